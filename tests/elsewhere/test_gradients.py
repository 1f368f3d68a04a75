"""``grads_on=FOLDER``: training loops have the bits of loops whose gradients are in memory."""

import copy
import errno
import gc
import io
import itertools
import math
import os
import pickle
import sys

import pytest
import torch
from helpers import run_threads
from processes import run_program
from sampling import share
from torch import nn
from torch_operators import op_db

import memsave_ext as ms
from memsave_ext.elsewhere import gradients
from memsave_ext.elsewhere.gradient import GradientElsewhere
from memsave_ext.elsewhere.gradients import Gradients
from memsave_ext.store import kept

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="a folder is for Linux")


def network(dtype=torch.float32):
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(8, 64, 6), nn.Flatten(), nn.Linear(64 * 9, 130), nn.Tanh(), nn.Linear(130, 256)
    ).to(dtype)
    net[0].to(memory_format=torch.channels_last)
    return net


def backward(net, number=0, scale=None):
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(4, 8, 8, 8, generator=generator).to(net[0].weight.dtype)
    loss = net(x).square().sum()
    (loss if scale is None else scale(loss * 1e4)).backward()


def elsewhere(net):
    return sum(isinstance(p.grad, GradientElsewhere) for p in net.parameters())


def assert_same(net, other):
    for p, q in zip(net.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)
        assert (p.grad is None) == (q.grad is None)
        if p.grad is not None:
            assert torch.equal(p.grad, q.grad)
            assert p.grad.stride() == q.grad.stride() and p.grad.dtype == q.grad.dtype


OPTIMIZERS = {
    "AdamW": lambda params, **on: ms.AdamW(params, lr=1e-3, **on),
    "in backward": lambda params, **on: ms.AdamW(params, lr=1e-3, in_backward=bool(on), **on),
    "8-bit states": lambda params, **on: ms.Adam(params, lr=1e-3, state_dtype="8bit", **on),
    "each clipped": lambda params, **on: ms.Adam(params, lr=1e-3, max_grad_norm=1e-3, **on),
    "SGD": lambda params, **on: ms.SGD(params, lr=0.1, momentum=0.9, nesterov=True, **on),
    "Lion": lambda params, **on: ms.Lion(params, lr=1e-3, **on),
    "torch's AdamW": lambda params, **on: taken(torch.optim.AdamW(params, lr=1e-3), on),
    "torch's NAdam": lambda params, **on: taken(torch.optim.NAdam(params, lr=1e-3), on),
    "Adafactor": lambda params, **on: taken(torch.optim.Adafactor(params, lr=1e-3), on),
}


def taken(optimizer, on):
    return ms.in_backward(optimizer, **on) if on else optimizer


def clip_norm(params):
    return torch.nn.utils.clip_grad_norm_(params, 0.01)


def clip_twice(params):
    whole = torch.nn.utils.clip_grad_norm_(params, 0.01)
    return whole + torch.nn.utils.clip_grad_norm_(params[::2], 1e-4, norm_type=math.inf)


def clip_by_the_sum(params):
    return torch.nn.utils.clip_grad_norm_(params, 0.5, norm_type=1.0, error_if_nonfinite=True)


def clip_value(params):
    torch.nn.utils.clip_grad_value_(params, 1e-4)
    return torch.nn.utils.get_total_norm([p.grad for p in params])


CLIPS = {"none": lambda params: torch.zeros(()), "norm": clip_norm, "twice": clip_twice,
         "by the sum": clip_by_the_sum, "value": clip_value}  # fmt: skip


def train(net, optimizer, clip, *, backwards=1, scaler=None, steps=4):
    seen = []
    for step in range(steps):
        for number in range(backwards):
            backward(net, step * backwards + number, scaler and scaler.scale)
        if scaler is not None:
            scaler.unscale_(optimizer)
        seen.append((elsewhere(net), clip([*net.parameters()]).clone()))
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
    return seen


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("backwards", [1, 3])
def test_loops_have_the_same_bits(name, clip, backwards, tmp_path):
    plain, ours = network(), network()
    make = OPTIMIZERS[name]
    expected = train(plain, make([*plain.parameters()]), CLIPS[clip], backwards=backwards)
    optimizer = make([*ours.parameters()], grads_on=tmp_path)
    found = train(ours, optimizer, CLIPS[clip], backwards=backwards)
    assert_same(ours, plain)
    assert [away for away, _ in found] == [3] * len(found)  # the biases are small
    assert [away for away, _ in expected] == [0] * len(found)
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(found, expected, strict=True))
    assert not optimizer.in_backward


@pytest.mark.parametrize("name", ["AdamW", "torch's AdamW"])
def test_grad_scaler_skips_a_step_that_is_not_finite(name, tmp_path):
    nets, scales = [], []
    for on in ({}, {"grads_on": tmp_path}):
        net = network()
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**120, growth_interval=1)
        optimizer = OPTIMIZERS[name]([*net.parameters()], **on)
        found = []
        for _ in range(16):
            train(net, optimizer, clip_norm, scaler=scaler, steps=1, backwards=2)
            found.append(scaler.get_scale())
        nets.append(net)
        scales.append(found)
    assert scales[0] == scales[1]
    pairs = [*itertools.pairwise(scales[0])]
    assert any(a > b for a, b in pairs) and any(a < b for a, b in pairs)  # some were skipped
    assert_same(*nets)


def test_clip_global_norm_is_torchs(tmp_path):
    plain, ours = network(), network()
    norms = train(plain, ms.AdamW(plain.parameters(), lr=1e-3), clip_norm)
    optimizer = ms.AdamW(
        ours.parameters(), lr=1e-3, in_backward=True, grads_on=tmp_path, clip_global_norm=0.01
    )
    train(ours, optimizer, CLIPS["none"])
    assert_same(ours, plain)
    assert torch.equal(optimizer.grad_norm, norms[-1][1])


def test_states_and_gradients_elsewhere(tmp_path):
    plain, ours = network(torch.bfloat16), network(torch.bfloat16)
    train(plain, ms.AdamW(plain.parameters(), bf16="split"), clip_norm)
    optimizer = ms.AdamW(ours.parameters(), bf16="split", grads_on=tmp_path, states_on=tmp_path)
    train(ours, optimizer, clip_norm)
    assert_same(ours, plain)
    assert optimizer.state_dict()["state"].keys() == {*range(6)}


def test_the_norm_is_known_without_reading_it_from_the_second_step_on(tmp_path, monkeypatch):
    net = network()
    optimizer = ms.AdamW(net.parameters(), grads_on=tmp_path)
    reads = []
    inner = kept._InFile.read
    monkeypatch.setattr(kept._InFile, "read", lambda *a: (reads.append(1), inner(*a))[1])
    for _ in range(3):
        backward(net)
        clip_norm([*net.parameters()])
        reads.append("clipped")
        optimizer.step()
        optimizer.zero_grad()
    assert reads == [1, 1, 1, "clipped", 1, 1, 1, *["clipped", 1, 1, 1] * 2]


# ---- a tensor as any other ----


def gradient(tmp_path, value):
    """A parameter whose gradient has this value, and one that has it elsewhere."""
    here, there = nn.Parameter(torch.zeros_like(value)), nn.Parameter(torch.zeros_like(value))
    here.grad, there.grad = value.clone(), Gradients(tmp_path).leave(value.clone())
    assert isinstance(there.grad, GradientElsewhere)
    return here, there


UNINITIALIZED = {
    "empty_like", "new_empty", "new_empty_strided", "empty_strided", "logspace"
}  # fmt: skip


def _samples():
    for op in op_db:
        if torch.float32 not in op.dtypes or op.name in UNINITIALIZED:
            continue
        for variant in ("out of place", "in place"):
            if variant == "in place" and op.inplace_variant is None:
                continue
            yield pytest.param(op, variant, id=f"{op.formatted_name}-{variant}")


@pytest.mark.once
@pytest.mark.parametrize(("op", "variant"), share(_samples(), 10))
def test_every_operator_has_the_values(op, variant, tmp_path, monkeypatch):
    monkeypatch.setattr("memsave_ext.elsewhere.gradients.SMALLEST", 0)
    function = op if variant == "out of place" else op.inplace_variant
    tried = 0
    for sample in op.sample_inputs("cpu", torch.float32):
        if not isinstance(sample.input, torch.Tensor) or type(sample.input) is not torch.Tensor:
            continue
        if sample.input.layout != torch.strided or sample.input.numel() == 0:
            continue
        like = torch.empty_like(sample.input)
        value = like.copy_(sample.input.detach())
        if any(a is sample.input for a in sample.args):
            continue
        here, there = gradient(tmp_path, value)
        results = []
        for p in (here, there):
            torch.manual_seed(0)
            try:
                with torch.no_grad():
                    results.append(function(p.grad, *sample.args, **sample.kwargs))
            except Exception as error:
                results.append(error)
        if isinstance(results[0], Exception):
            assert type(results[0]) is type(results[1])
            continue
        if "shape of a gradient that lies elsewhere cannot be changed" in str(results[1]):
            assert variant == "in place"  # its shape changes, at least for a while
            _assert_equal(there.grad, value)
            continue
        tried += 1
        exact = not op.name.startswith("linalg.")  # LAPACK's bits depend on where memory lies
        _assert_equal(*results, exact)
        _assert_equal(there.grad, here.grad, exact)
        if tried == 3:
            break
    if not tried:
        pytest.skip("no sample that this operator takes")


def _assert_equal(left, right, exact=True):
    if isinstance(left, torch.Tensor):
        by = {"rtol": 0, "atol": 0} if exact else {}
        torch.testing.assert_close(_plain(left), _plain(right), equal_nan=True, **by)
    elif isinstance(left, (list, tuple)):
        for one, other in zip(left, right, strict=True):
            _assert_equal(one, other, exact)
    else:
        assert left == right or left != left


def _plain(tensor):
    return tensor.clone() if isinstance(tensor, GradientElsewhere) else tensor


WRITES = {
    "a row": lambda g: g[0].fill_(7),
    "an index": lambda g: g.__setitem__((1, 2), 5),
    "a view": lambda g: g.view(-1)[3:5].zero_(),
    "data": lambda g: g.data.mul_(2),
    "a view of data": lambda g: g.data.t()[1].copy_(torch.ones(256)),
    "detached": lambda g: g.detach().add_(1),
    "numpy": lambda g: g.numpy().__setitem__(4, 3),
    "a storage": lambda g: g.untyped_storage().fill_(0),
    "out": lambda g: torch.add(torch.ones(256, 256), 1, out=g),
    "an assignment": lambda g: g.copy_(torch.full((256, 256), 2.0)),
    "mul_ by itself": lambda g: g.mul_(g),
    "mul_ by rows": lambda g: g.mul_(torch.arange(256.0)),
    "mul_ by a number": lambda g: g.mul_(0.3).mul_(torch.tensor(0.7)),
    "mul_ by a number that changes": lambda g: _changed(g),
    "foreach": lambda g: torch._foreach_add_([g], [torch.ones(256, 256)]),
}


def _changed(g):
    number = torch.tensor(3.0)
    g.mul_(number)
    number.zero_()


@pytest.mark.parametrize("write", WRITES)
def test_what_is_written_to_it_is_there(write, tmp_path):
    here, there = gradient(tmp_path, torch.randn(256, 256))
    for p in (here, there):
        before = p.grad
        WRITES[write](p.grad)
        WRITES["data"](p.grad)
        assert p.grad is before
    assert torch.equal(there.grad, here.grad)
    assert there.grad.norm() == here.grad.norm()


def test_a_factor_that_changes_later(tmp_path):
    """It waits until the gradient is read, as what it was."""
    here, there = gradient(tmp_path, torch.randn(256, 256))
    for p in (here, there):
        factor = torch.tensor(0.5)
        p.grad.mul_(factor)
        factor.fill_(100.0)
    assert torch.equal(there.grad, here.grad)


def test_it_can_be_read_in_any_way(tmp_path):
    here, there = gradient(tmp_path, torch.randn(130, 256))
    a, b = here.grad, there.grad
    assert repr(a) == repr(b) and a.tolist() == b.tolist() and a.sum().item() == b.sum().item()
    assert torch.equal(copy.deepcopy(b), a) and type(copy.deepcopy(b)) is torch.Tensor
    file = io.BytesIO()
    torch.save(b, file)
    file.seek(0)
    assert torch.equal(torch.load(file), a)
    assert torch.equal(pickle.loads(pickle.dumps(b)), a)
    assert isinstance(b, GradientElsewhere) and b.stored.here is None  # nothing of that brought it
    assert torch.from_dlpack(b).equal(a) and torch.equal(torch.from_numpy(b.numpy()), a)
    assert b.data_ptr() == b.stored.here.data_ptr()


def test_its_shape_cannot_change_in_place(tmp_path):
    _, there = gradient(tmp_path, torch.randn(130, 256))
    with pytest.raises(RuntimeError, match=r"grads_on='.*': the shape of a gradient that lies"):
        there.grad.t_()
    there.grad[0].add_(1)  # with which it is back for good
    before = there.grad.clone()
    with pytest.raises(RuntimeError, match=r"grads_on='.*': the shape of a gradient that lies"):
        there.grad.t_()
    assert there.grad.shape == (130, 256) and torch.equal(there.grad.clone(), before)


# ---- memory ----

PROGRAM = """
import resource, torch
from torch import nn
import memsave_ext as ms

torch.set_num_threads(1)
width, layers, folder = 1024, 24, {folder!r}
net = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
optimizer = ms.SGD(net.parameters(), lr=0.1, grads_on={grads_on})
x = torch.randn(8, width)
(net[:1](x).sum() * 0).backward()
optimizer.step()
optimizer.zero_grad()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for _ in range(3):
    net(x).square().mean().backward()
    norm = torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024, norm.item())
"""


@pytest.mark.skipif(not ms._native.available, reason="without it malloc keeps what is freed")
@pytest.mark.once
def test_the_systems_bytes(tmp_path):
    found = {}
    for grads_on in ("None", "folder"):
        program = PROGRAM.format(folder=str(tmp_path), grads_on=grads_on)
        found[grads_on] = [float(word) for word in run_program(program).stdout.split()]
    (plain, norm), (ours, same) = found["None"], found["folder"]
    assert norm > 0 and math.isclose(norm, same, rel_tol=1e-3)
    assert plain > 24 * 4 * 0.9  # MiB: all gradients at once
    assert ours < 5 * 4  # a few of them


def test_nothing_is_left_in_the_folder(tmp_path):
    net = network()
    optimizer = ms.AdamW(net.parameters(), grads_on=tmp_path)
    train(net, optimizer, clip_norm, steps=1)
    assert os.listdir(tmp_path) == []


def test_tracked_bytes_are_those_in_memory(tmp_path):
    peaks = []
    for on in ({}, {"grads_on": tmp_path}):
        torch.manual_seed(0)
        net = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(16)))
        optimizer = ms.AdamW(net.parameters(), **on)
        with ms.memory.track(net, optimizer) as track:
            for _ in range(2):
                net(torch.ones(2, 256)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        peaks.append(track.peak)
    weights = sum(p.nbytes for p in net.parameters())
    assert peaks[0] > 4 * weights
    # Together no more than 1 MiB of gradients is back, where none is larger.
    beside = 3 * 256 * 256 * 4 if ms._native.available else 4 << 20  # pure Python's temporaries
    assert peaks[1] < 3 * weights + (1 << 20) + beside


# ---- lives of optimizers ----


def test_hooks_go_with_the_optimizer(tmp_path):
    net = network()
    optimizer = ms.AdamW(net.parameters(), grads_on=tmp_path)
    backward(net)
    assert elsewhere(net) == 3
    kept = [p.grad.clone() for p in net.parameters()]
    del optimizer
    gc.collect()
    assert all(not p._post_accumulate_grad_hooks for p in net.parameters())
    for p, grad in zip(net.parameters(), kept, strict=True):
        assert torch.equal(p.grad, grad)  # which others may still use
    torch.optim.AdamW(net.parameters()).step()
    net.zero_grad()
    backward(net)
    assert elsewhere(net) == 0


def test_remove_and_renew_hooks(tmp_path):
    net, plain = network(), network()
    optimizer, reference = (
        ms.AdamW(net.parameters(), grads_on=tmp_path),
        ms.AdamW(plain.parameters()),
    )
    for change, away in (
        (lambda: None, 3),
        (optimizer.remove_hooks, 0),
        (optimizer.renew_hooks, 3),
    ):
        change()
        for of in (net, plain):
            backward(of)
        assert elsewhere(net) == away
        for o in (optimizer, reference):
            o.step()
            o.zero_grad()
    ms.remove_hooks(net)
    added = nn.Parameter(torch.zeros(256, 256))
    optimizer.add_param_group({"params": [added]})
    added.sum().backward()
    backward(net)
    assert elsewhere(net) == 0 and not isinstance(added.grad, GradientElsewhere)
    for p, q in zip(net.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
@pytest.mark.parametrize("name", ["AdamW", "torch's AdamW"])
def test_a_copy_has_a_file_of_its_own(copied, name, tmp_path):
    net = network()
    optimizer = OPTIMIZERS[name]([*net.parameters()], grads_on=tmp_path)
    train(net, optimizer, clip_norm, steps=1)
    model, another = copied((net, optimizer))
    train(net, optimizer, clip_norm, steps=2)
    assert train(model, another, clip_norm, steps=2)[0][0] == 3
    assert_same(net, model)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda of: pickle.loads(pickle.dumps(of))])
@pytest.mark.parametrize("own", [False, True])
def test_a_copy_has_hooks_where_the_optimizer_has(copied, own, tmp_path):
    net = nn.Linear(256, 256)
    params = net.parameters()
    if own:
        optimizer = ms.in_backward(torch.optim.SGD(params, lr=0.1), grads_on=tmp_path)
    else:
        optimizer = ms.AdamW(params, grads_on=tmp_path)
    for has_hooks in (True, False, True):
        other, another = copied((net, optimizer))
        other(torch.ones(2, 256)).sum().backward()
        assert isinstance(other.weight.grad, GradientElsewhere) is has_hooks
        another.remove_hooks()
        another.renew_hooks()
        other.zero_grad()
        other(torch.ones(2, 256)).sum().backward()
        assert isinstance(other.weight.grad, GradientElsewhere)
        optimizer.remove_hooks() if has_hooks else optimizer.renew_hooks()


def test_the_norm_is_float32(tmp_path):
    net = nn.Linear(256, 256).to(torch.bfloat16)
    optimizer = ms.AdamW(net.parameters(), grads_on=tmp_path, clip_global_norm=1.0)
    net(torch.ones(2, 256, dtype=torch.bfloat16)).sum().backward()
    assert isinstance(net.weight.grad, GradientElsewhere)
    optimizer.step()
    assert optimizer.grad_norm.dtype == torch.float32


def test_a_state_dict_is_as_ever(tmp_path):
    net, other = network(), network()
    optimizer = ms.AdamW(net.parameters(), grads_on=tmp_path)
    train(net, optimizer, clip_norm, steps=2)
    assert "grads_on" not in str(optimizer.state_dict()["param_groups"])
    other.load_state_dict(net.state_dict())
    plain = torch.optim.AdamW(other.parameters())
    plain.load_state_dict(optimizer.state_dict())


def test_groups_that_are_added_and_parameters_that_are_unfrozen(tmp_path):
    net, plain = network(), network()
    ours = ms.AdamW(net[2:].parameters(), grads_on=tmp_path)
    theirs = ms.AdamW(plain[2:].parameters())
    for of, optimizer in ((net, ours), (plain, theirs)):
        of[4].requires_grad_(False)
        backward(of)
        optimizer.step()
        of.zero_grad()
        of[4].requires_grad_(True)
        optimizer.add_param_group({"params": [*of[0].parameters()], "lr": 0.01})
        backward(of)
    assert elsewhere(net) == 3
    for optimizer in (ours, theirs):
        optimizer.step()
    assert_same(net, plain)


def test_an_optimizer_for_the_same_parameters_in_memory_steps_too(tmp_path):
    net, plain = network(), network()
    keep = ms.AdamW(net.parameters(), grads_on=tmp_path)
    for of in (net, plain):
        backward(of)
        ms.SGD(of.parameters(), lr=0.1).step()
        torch.optim.Adam(of.parameters(), fused=True).step()
    assert elsewhere(net) == 3 and keep is not None
    assert_same(net, plain)


def test_one_that_steps_in_backward_is_refused_and_takes_over_later(tmp_path):
    net, plain = network(), network()
    keep = ms.AdamW(net.parameters(), grads_on=tmp_path)
    with pytest.raises(ValueError, match="has its gradients elsewhere, by grads_on= of"):
        ms.AdamW(net.parameters(), in_backward=True)
    with pytest.raises(ValueError, match="has its gradients elsewhere, by grads_on= of"):
        ms.AdamW(net.parameters(), grads_on=tmp_path)
    for of in (net, plain):
        backward(of)
    keep.remove_hooks()
    after = [ms.SGD(of.parameters(), lr=0.1, in_backward=True) for of in (net, plain)]
    for of, optimizer in zip((net, plain), after, strict=True):
        with optimizer.accumulate():
            backward(of, 1)
        backward(of, 2)
        optimizer.step()
    assert_same(net, plain)


def test_a_step_that_raises_leaves_all_gradients(tmp_path):
    net = network()
    optimizer = ms.AdamW(net.parameters(), grads_on=tmp_path)
    backward(net)
    before = [p.grad.clone() for p in net.parameters()]
    net[4].weight.grad = torch.sparse_coo_tensor([[0], [0]], [1.0], net[4].weight.shape)
    with pytest.raises(RuntimeError, match="sparse"):
        optimizer.step()
    net[4].weight.grad = before[4]
    for p, grad in zip(net.parameters(), before, strict=True):
        assert torch.equal(p.grad, grad)


def test_what_was_stepped_before_a_step_raised_is_not_stepped_again(tmp_path, monkeypatch):
    monkeypatch.setattr(gradients, "_PART", 1)  # each parameter by itself
    net, plain = network(), network()
    optimizer = ms.AdamW(net.parameters(), lr=1e-3, grads_on=tmp_path)
    other = ms.AdamW(plain.parameters(), lr=1e-3)
    for of, by in ((net, optimizer), (plain, other)):
        backward(of)
        by.step()
        by.zero_grad()
        backward(of)
    state = optimizer.state[net[4].weight]
    right = state["exp_avg"]
    state["exp_avg"] = right.half()  # what step() refuses
    with pytest.raises(RuntimeError, match="exp_avg"):
        optimizer.step()
    state["exp_avg"] = right
    stepped = [p.grad is None for p in net.parameters()]
    assert any(stepped) and not all(stepped)
    optimizer.step()
    other.step()
    for p, q in zip(net.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p, q)


def test_models_in_several_threads(tmp_path):
    nets = [network() for _ in range(4)]
    optimizers = [ms.AdamW(net.parameters(), grads_on=tmp_path) for net in nets]
    run_threads(lambda i: train(nets[i], optimizers[i], clip_norm, backwards=2), 4)
    for net in nets[1:]:
        assert_same(net, nets[0])


@pytest.mark.parametrize("backwards", [1, 2])
@pytest.mark.skipif(not ms._native.available, reason="a budget is native")
def test_checkpoints_and_budgets(backwards, tmp_path):
    plain, ours = network(), network()
    train(plain, ms.AdamW(plain.parameters()), clip_norm, backwards=backwards)
    optimizer = ms.AdamW(ours.parameters(), grads_on=tmp_path)
    handle = ms.remat_module(ours, budget="8MB")
    train(ours, optimizer, clip_norm, backwards=backwards)
    handle.remove()
    assert_same(ours, plain)


# ---- bad input, and faults ----


def test_a_sparse_gradient_stays_in_memory(tmp_path):
    """torch's SGD steps it as ever; ours say that they take none, and not in backward."""
    weights = []
    for grads_on in (None, tmp_path):
        torch.manual_seed(0)
        net = nn.Embedding(500, 64, sparse=True)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        if grads_on is not None:
            optimizer = ms.in_backward(optimizer, grads_on=grads_on)
        net(torch.tensor([1, 2, 1])).square().sum().backward()
        assert net.weight.grad.is_sparse
        optimizer.step()
        weights.append(net.weight.detach())
    assert torch.equal(*weights)
    net = nn.Embedding(500, 64, sparse=True)
    ours = ms.AdamW(net.parameters(), grads_on=tmp_path)
    net(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="Adam does not support sparse gradients"):
        ours.step()


@pytest.mark.filterwarnings("ignore:memsave_ext. norm_pass")
def test_bad_values(tmp_path):
    net = network()
    with pytest.raises(TypeError, match="grads_on must be None, 'cpu' or a folder, got 3"):
        ms.AdamW(net.parameters(), grads_on=3)
    with pytest.raises(ValueError, match="grads_on must be None, 'cpu' or a folder that exists"):
        ms.AdamW(net.parameters(), grads_on=tmp_path / "none")
    with pytest.raises(ValueError, match="a folder for those on the CPU, got 'cpu'"):
        ms.AdamW(net.parameters(), grads_on="cpu")
    with pytest.raises(ValueError, match="grads_on needs no grad_scaler"):
        ms.AdamW(net.parameters(), grads_on=tmp_path, grad_scaler=torch.amp.GradScaler("cpu"))
    optimizer = ms.AdamW(net.parameters(), grads_on=tmp_path)
    with pytest.raises(ValueError, match="grads_on needs no grad_scaler"):
        optimizer.grad_scaler = torch.amp.GradScaler("cpu")
    with (
        pytest.raises(ValueError, match="only for optimizers with in_backward=True"),
        optimizer.norm_pass(1.0),
    ):
        pass
    with pytest.raises(ValueError, match="has no grads_on"):
        ms.AdamW(network().parameters(), grads_on=tmp_path, differentiable=True)
    torchs = torch.optim.AdamW(network().parameters())
    with pytest.raises(ValueError, match="a folder for those on the CPU, got 'cpu'"):
        ms.in_backward(torchs, grads_on="cpu")
    assert type(torchs) is torch.optim.AdamW


def test_a_full_disk_is_seen_before_a_step(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    net = network()
    with pytest.raises(OSError, match=r"grads_on='.*': no room for [\d,]+ bytes of gradients"):
        ms.AdamW(net.parameters(), grads_on=tmp_path)
    monkeypatch.undo()
    backward(net)
    assert elsewhere(net) == 0


def test_after_a_fork(tmp_path):
    net = network()
    optimizer = ms.AdamW(net.parameters(), grads_on=tmp_path)
    torch.set_num_threads(1)
    reader, writer = os.pipe()
    backward(net)
    if (child := os.fork()) == 0:
        try:
            optimizer.step()
            os.write(writer, b"no error")
        except RuntimeError as error:
            os.write(writer, str(error).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    text = os.read(reader, 1000).decode()
    assert "the file of gradients was made before this process was forked" in text
    optimizer.step()


@pytest.mark.once
def test_a_file_that_the_program_closes(tmp_path):
    program = f"""
import os, torch, memsave_ext as ms
p = torch.nn.Parameter(torch.zeros(256, 256))
optimizer = ms.SGD([p], lr=0.1, grads_on={str(tmp_path)!r})
p.sum().backward()
os.closerange(3, 256)
try:
    optimizer.step()
except RuntimeError as error:
    print(error)
"""
    assert "has been closed by the program" in run_program(program).stdout


def test_conjugates_that_are_views(tmp_path):
    torch.manual_seed(0)
    x = torch.randn(200, 200, dtype=torch.complex64)
    grads = []
    for on in (tmp_path, None):
        p = nn.Parameter(torch.ones(200, 200, dtype=torch.complex64))
        optimizer = ms.AdamW([p], grads_on=on)
        (p.conj() * x).real.sum().backward()
        assert isinstance(p.grad, GradientElsewhere) == (on is not None)
        optimizer.step()
        grads.append(p.detach())
    assert torch.equal(*grads)


class _Noting(kept.HostKeeper):
    """As pinned memory takes gradients, but from the CPU; notes where they were."""

    def __init__(self):
        super().__init__("grads_on='cpu'")
        self._devices, self.found = ("cpu",), []

    def _room(self, values):
        self.found.append(values.data_ptr())
        return kept.Kept()


def test_what_backward_goes_on_with_is_not_copied_later(monkeypatch):
    """Backward may add to that memory in place before a stream has copied it."""
    keeper, at_hooks, flowing = _Noting(), [], []
    monkeypatch.setattr(gradients, "_keeper_of", lambda where: ("cpu", keeper))
    torch.manual_seed(0)
    pos, layer = nn.Parameter(torch.ones(128, 256)), nn.Linear(256, 256, bias=False)
    for p in (pos, layer.weight):
        p.register_post_accumulate_grad_hook(lambda p: at_hooks.append(p.grad.data_ptr()))
    _optimizer = ms.SGD([pos, layer.weight], grads_on="cpu")
    added = layer(torch.ones(1, 128, 256)) + pos.unsqueeze(0)
    added.register_hook(lambda grad: flowing.append(grad))
    added.square().sum().backward()
    assert at_hooks[0] == flowing[0].data_ptr()  # of pos: torch has not copied it
    assert keeper.found[0] != at_hooks[0]
    assert keeper.found[1:] == at_hooks[1:]  # of the weight: nobody else has it


def test_room_that_was_given_back_is_not_promised_twice(tmp_path):
    first, second = (nn.Parameter(torch.ones(256, 256)) for _ in range(2))
    optimizer = ms.AdamW([first], grads_on=tmp_path)
    for _ in range(2):
        first.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    file = optimizer._gradients._keeper._file
    size = file._size
    optimizer.add_param_group({"params": [second]})
    assert file._size == size + first.nbytes
    (first.sum() + second.sum()).backward()
    assert file._size == size + first.nbytes


def test_in_inference_mode_it_can_be_viewed(tmp_path):
    net = network()
    _optimizer = ms.AdamW(net.parameters(), grads_on=tmp_path)  # whose hooks go with it
    backward(net)
    assert elsewhere(net) == 3
    expected = net[2].weight.grad.clone()
    with torch.inference_mode():
        assert torch.equal(net[2].weight.grad.view(-1), expected.view(-1))
        net[4].weight.grad.numpy()
    for layer in (net[2], net[4]):
        layer.weight.grad[0].zero_()
        assert not layer.weight.grad[0].any() and layer.weight.grad[1].any()


def test_a_parameter_that_was_replaced_is_found_again(tmp_path):
    net = nn.Linear(256, 256, bias=False)
    optimizer = ms.AdamW(net.parameters(), grads_on=tmp_path)
    net.weight = nn.Parameter(torch.ones(256, 256))
    optimizer.param_groups[0]["params"] = [net.weight]
    net(torch.ones(2, 256)).sum().backward()
    assert type(net.weight.grad) is torch.Tensor
    with pytest.warns(RuntimeWarning, match="1 parameters had lost their hook.*gradients elsewhe"):
        optimizer.step()
    assert not torch.equal(net.weight, torch.ones(256, 256))
    for _ in range(2):
        optimizer.zero_grad()
        net(torch.ones(2, 256)).sum().backward()
        assert isinstance(net.weight.grad, GradientElsewhere)
        optimizer.step()
