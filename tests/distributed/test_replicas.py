"""Regions and batch norms in the replicas of a model, each in a thread, as under DataParallel.

Replicas are those of torch.nn.parallel.replicate, with its copies made on the CPU: what it knows of
devices is replaced. torch.nn.parallel.parallel_apply insists on an accelerator; its threads are
started here as there, with the caller's grad mode and autocast.
"""

import copy
import sys
import threading

import pytest
import torch
from helpers import assert_equal, state_unchanged
from sampling import share
from torch import nn
from torch._utils import ExceptionWrapper

import memsave_ext as ms
from memsave_ext import _parts
from memsave_ext.remat import ahead
from memsave_ext.shared.modules import device_of, parameters_of

KINDS = ["checkpoint", "function", "nested", "closure"]
SIZE, BLOCKS, SAMPLES = 6, 3, 8


class Block(nn.Module):
    def __init__(self, kind="plain", norm=True):
        super().__init__()
        self.kind = kind
        self.linear = nn.Linear(SIZE, SIZE)
        self.norm = ms.BatchNorm1d(SIZE) if norm else None

    def inner(self, x):
        y = self.linear(x)
        return torch.tanh(y if self.norm is None else self.norm(y)) * y

    def forward(self, x):
        if self.kind == "checkpoint":
            return x + ms.checkpoint(self.inner, x)
        if self.kind == "nested":
            return ms.checkpoint(lambda a: a + ms.checkpoint(self.inner, a).sin(), x)
        if self.kind == "closure":  # twice the same parameters and statistics, a dict of arguments
            y = ms.checkpoint(lambda values: {"y": self.inner(values["x"])}, {"x": x})["y"]
            return x + ms.checkpoint(self.inner, y)
        if self.kind == "function":
            # parameters() of a replica is empty: there they are ordinary attributes.
            modules = [self.linear] if self.norm is None else [self.linear, self.norm]
            tensors = [t for module in modules for t in (module.weight, module.bias)]
            return x + ms.CheckpointFunction.apply(self.inner, 1, x, *tensors)
        if self.kind == "nested, plain":
            return x + self.inner(x).sin()
        if self.kind == "closure, plain":
            return x + self.inner(self.inner(x))
        return x + self.inner(x)


def plain(kind):
    return f"{kind}, plain" if kind in ("nested", "closure") else "plain"


def model(kind="plain", **kwargs):
    torch.manual_seed(0)
    return nn.Sequential(*[Block(kind, **kwargs) for _ in range(BLOCKS)]).double()


def data(replicas):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(SAMPLES * replicas, SIZE, generator=generator, dtype=torch.double)


def loss(output):
    return output.square().sum()


def norms(net):
    return [module for module in net.modules() if isinstance(module, ms.BatchNorm1d)]


def buffers(net):
    """replicate() keeps none of a replica's in order, so by module."""
    return [b for n in norms(net) for b in (n.running_mean, n.running_var, n.num_batches_tracked)]


def grads(net):
    return [p.grad for p in net.parameters()]


def in_threads(calls):
    """What ``calls`` return, each called in a thread of its own as parallel_apply does it."""
    results = [None] * len(calls)
    grad, autocast = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")
    start = threading.Barrier(len(calls))

    def worker(i):
        torch.set_grad_enabled(grad)
        start.wait()
        try:
            with torch.amp.autocast("cpu", enabled=autocast):
                results[i] = calls[i]()
        except Exception:
            results[i] = ExceptionWrapper(where=f"in replica {i}")

    threads = [threading.Thread(target=worker, args=(i,), daemon=True) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    return results


def reraise(results):
    for result in results:
        if isinstance(result, ExceptionWrapper):
            result.reraise()
    return results


def apply(replicas, parts):
    return reraise(
        in_threads([lambda r=r, x=x: r(x) for r, x in zip(replicas, parts, strict=True)])
    )


def one_by_one(replicas, parts):
    return [replica(x) for replica, x in zip(replicas, parts, strict=True)]


def check_backward(*runs):
    """Of a model, its replicas and their outputs, twice: the same gradients and buffers."""
    for net, _, outputs in runs:
        net.zero_grad()
        loss(torch.cat(outputs)).backward()
    (found, replicas, _), (expected, references, _) = runs
    torch.testing.assert_close(grads(found), grads(expected), rtol=1e-12, atol=1e-12)
    for a, b in zip(replicas, references, strict=True):
        assert_equal(buffers(a), buffers(b))


@pytest.fixture(params=[False, True], ids=["hooks", "engine hooks"])
def engine_hooks(request):
    if request.param and not _parts.native("checkpoint"):
        pytest.skip("without the native part they do nothing")
    before = ms.use_engine_hooks(request.param)
    yield
    ms.use_engine_hooks(before)


@pytest.fixture
def switching_often():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


# ---- as DataParallel: forwards in threads, one backward ------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_data_parallel(kind, count, replicate_on_cpu, engine_hooks):
    """Steps of the same model: gradients and statistics of each part run plainly, one by one."""
    found, expected = model(kind), model(plain(kind))
    for _ in range(3):
        replicas, references = replicate_on_cpu(found, count), replicate_on_cpu(expected, count)
        output = apply(replicas, data(count).chunk(count))
        reference = one_by_one(references, data(count).chunk(count))
        assert_equal(output, reference)
        check_backward((found, replicas, output), (expected, references, reference))
        assert_equal(buffers(found), buffers(expected))
        with torch.no_grad():
            for net in (found, expected):
                for p, g in zip(net.parameters(), grads(expected), strict=True):
                    p.sub_(1e-3 * g)
    times = 2 if kind == "closure" else 1
    assert [n.num_batches_tracked.item() for n in norms(found)] == [3 * times] * BLOCKS


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_equals_one_run_of_the_whole_batch(kind, count, replicate_on_cpu):
    net, whole = model(kind, norm=False), model(plain(kind), norm=False)
    x, y = data(count).requires_grad_(), data(count).requires_grad_()
    loss(torch.cat(apply(replicate_on_cpu(net, count), x.chunk(count)))).backward()
    loss(whole(y)).backward()
    close = {"rtol": 1e-11, "atol": 1e-11}
    torch.testing.assert_close([x.grad, *grads(net)], [y.grad, *grads(whole)], **close)


def test_grad_mode_and_autocast_reach_the_threads(replicate_on_cpu):
    net, expected = model("checkpoint").float(), model().float()
    parts = data(2).float().chunk(2)
    with torch.no_grad():
        assert not any(y.requires_grad for y in apply(replicate_on_cpu(net, 2), parts))
    assert [n.num_batches_tracked.item() for n in norms(net)] == [1] * BLOCKS
    one_by_one(replicate_on_cpu(expected, 2), parts)
    with torch.autocast("cpu"):
        outputs = apply(replicate_on_cpu(net, 2), parts)
        references = one_by_one(replicate_on_cpu(expected, 2), parts)
    assert_equal(outputs, references)
    for tensors in (outputs, references):
        loss(torch.cat(tensors)).backward()
    torch.testing.assert_close(grads(net), grads(expected), rtol=1e-5, atol=1e-6)
    assert_equal(buffers(net), buffers(expected))


def test_checkpointed_modules_can_be_replicated(replicate_on_cpu):
    net, expected = model(), model()
    ms.checkpoint_modules(net, Block)
    found, wanted = replicate_on_cpu(net, 2), replicate_on_cpu(expected, 2)
    outputs = apply(found, data(2).chunk(2))
    assert_equal(outputs, one_by_one(wanted, data(2).chunk(2)))
    loss(torch.cat(outputs)).backward()
    for a, b in zip(found, wanted, strict=True):
        assert_equal(buffers(a), buffers(b))


def test_a_module_under_remat_can_be_replicated(replicate_on_cpu):
    """Each replica's forward is a block in its own thread; later steps follow plans."""
    net, expected = model(), model()
    handle = ms.remat_module(net)
    for _ in range(5):
        found, wanted = replicate_on_cpu(net, 2), replicate_on_cpu(expected, 2)
        outputs, references = apply(found, data(2).chunk(2)), one_by_one(wanted, data(2).chunk(2))
        assert_equal(outputs, references)
        check_backward((net, found, outputs), (expected, wanted, references))
    handle.figures()  # of a replica


@pytest.mark.skipif(not _parts.native("remat"), reason="a budget needs the native part")
@pytest.mark.filterwarnings("ignore:remat. the budget")
@pytest.mark.parametrize("threads", [False, True])
def test_a_module_within_a_budget_can_be_replicated(threads, replicate_on_cpu, monkeypatch):
    """Steps are planned ahead once, though replicas are new in each step."""
    runs = []
    run = ahead._run
    monkeypatch.setattr(ahead, "_run", lambda *args: runs.append(run(*args)) or runs[-1])
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(6)])
    expected, x = copy.deepcopy(net), torch.randn(512, 32)
    handle = ms.remat_module(net, budget=0.5)
    ms._native.module.remat_forget()
    for _ in range(4):
        found, wanted = replicate_on_cpu(net, 2), replicate_on_cpu(expected, 2)
        outputs = (apply if threads else one_by_one)(found, x.chunk(2))
        references = one_by_one(wanted, x.chunk(2))
        assert_equal(outputs, references)
        check_backward((net, found, outputs), (expected, wanted, references))
        assert_equal(grads(net), grads(expected))
    assert len(runs) == 1 and isinstance(runs[0], int), runs
    assert handle.figures().dropped_bytes > 0 and "of a budget of" in handle.report()
    before = handle._last()._recorder.budget()["before"]
    assert before >= sum(p.nbytes for p in net.parameters())
    # Which of the threads is ahead of the other, and so their peak, is another in each step.
    assert threads or handle.peak <= 1.02 * max(handle.budget, handle.least)


def test_the_device_and_the_parameters_of_a_replica(replicate_on_cpu):
    net = model().to("meta")
    replica = replicate_on_cpu(net, 1)[0]
    assert not any(True for _ in replica.parameters())
    assert device_of(replica) == torch.device("meta")
    of_replica, of_net = (
        sum(p.nbytes for part in found.modules() for p in parameters_of(part))
        for found in (replica, net)
    )
    assert of_replica == of_net > 0


# ---- each thread its own forward and backward ----------------------------------------------------


def step(net, x):
    output = net(x)
    tensors = [x, *net.parameters()]
    return [output.detach(), *torch.autograd.grad(loss(output), tensors)]


@pytest.mark.each_value
@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_copies_many_times(kind, count, engine_hooks, switching_often):
    parts = [x.requires_grad_() for x in data(count).chunk(count)]
    nets = [copy.deepcopy(model(kind)) for _ in parts]
    references = [copy.deepcopy(model(plain(kind))) for _ in parts]
    expected = [step(net, x) for net, x in zip(references, parts, strict=True)]
    many = 25

    def work(i):
        with state_unchanged():
            return [step(nets[i], parts[i]) for _ in range(many)]

    for results, wanted in zip(
        reraise(in_threads([lambda i=i: work(i) for i in range(count)])), expected, strict=True
    ):
        for result in results:
            assert_equal(result, wanted)
    for net, reference, x in zip(nets, references, parts, strict=True):
        with torch.no_grad():
            for _ in range(many - 1):
                reference(x)
        assert_equal(buffers(net), buffers(reference))


@pytest.mark.parametrize("kind", share(KINDS, 2))
def test_one_model_in_all_threads(kind, engine_hooks, switching_often):
    """Modules and parameters shared: what a region keeps must not depend on the other threads."""
    net, reference = model(kind), model(plain(kind))
    parts = [x.requires_grad_() for x in data(4).chunk(4)]
    expected = [step(reference, x) for x in parts]

    def work(i):
        for _ in range(15):
            assert_equal(step(net, parts[i]), expected[i])

    reraise(in_threads([lambda i=i: work(i) for i in range(4)]))


@pytest.mark.parametrize("kind", KINDS)
def test_backwards_that_accumulate_together(kind, engine_hooks, switching_often):
    """.grad of shared parameters: regions recomputed at the same time add to it."""
    net, reference = model(kind), model(plain(kind))
    parts = data(4).chunk(4)
    losses = [loss(net(x)) for x in parts]
    reraise(in_threads([each.backward for each in losses]))
    for x in parts:
        loss(reference(x)).backward()
    torch.testing.assert_close(grads(net), grads(reference), rtol=1e-11, atol=1e-11)
    assert_equal(buffers(net), buffers(reference))


def test_a_backward_in_another_thread_than_its_forward(engine_hooks):
    net, reference = model("checkpoint"), model()
    x = data(1)
    output = apply([net], [x])[0]
    reraise(in_threads([loss(output).backward]))
    loss(reference(x)).backward()
    assert_equal(grads(net), grads(reference))
    assert_equal(buffers(net), buffers(reference))


# ---- exceptions ----------------------------------------------------------------------------------


class RaisesError(Exception):
    pass


class Fragile(nn.Module):
    """Raises in the forward or in the recompute where its input has a NaN."""

    def __init__(self, kind, recompute):
        super().__init__()
        self.block, self.kind, self.recompute = Block(), kind, recompute

    def inner(self, x):
        if x.isnan().any() and ms.is_recomputing() == self.recompute:
            raise RaisesError("a NaN in this replica")
        return self.block(x.nan_to_num())

    def forward(self, x):
        if self.kind == "function":
            tensors = [t for m in (self.block.linear, self.block.norm) for t in (m.weight, m.bias)]
            return ms.CheckpointFunction.apply(self.inner, 1, x, *tensors)
        return ms.checkpoint(self.inner, x)


def bad_parts():
    parts = [x.clone() for x in data(4).chunk(4)]
    parts[2][0, 0] = torch.nan
    return parts


@pytest.mark.parametrize("kind", ["checkpoint", "function"])
def test_an_error_in_one_forward(kind, replicate_on_cpu, engine_hooks):
    torch.manual_seed(0)
    net = Fragile(kind, recompute=False).double()
    replicas = replicate_on_cpu(net, 4)
    calls = [lambda r=r, x=x: r(x) for r, x in zip(replicas, bad_parts(), strict=True)]
    with state_unchanged():
        outputs = in_threads(calls)
        with pytest.raises(RaisesError, match="in replica 2(.|\n)*a NaN in this replica"):
            reraise(outputs)
    del outputs[2]
    check_the_others(net, outputs)
    assert net.block.norm.num_batches_tracked == 1


@pytest.mark.parametrize("kind", ["checkpoint", "function"])
def test_an_error_in_one_recompute(kind, replicate_on_cpu, engine_hooks):
    torch.manual_seed(0)
    net = Fragile(kind, recompute=True).double()
    outputs = apply(replicate_on_cpu(net, 4), bad_parts())
    with state_unchanged(), pytest.raises(RaisesError, match="a NaN in this replica"):
        loss(torch.cat(outputs)).backward()
    net.zero_grad()
    outputs = apply(replicate_on_cpu(net, 4), bad_parts())
    del outputs[2]
    check_the_others(net, outputs)
    # Each in its thread: three go on.
    nets = [copy.deepcopy(net) for _ in range(4)]
    outputs = apply(nets, bad_parts())
    for each in nets:
        each.zero_grad()
    results = in_threads([loss(y).backward for y in outputs])
    assert [isinstance(r, ExceptionWrapper) for r in results] == [False, False, True, False]
    del nets[2]
    sums = [sum(gs) for gs in zip(*map(grads, nets), strict=True)]
    torch.testing.assert_close(sums, grads(net), rtol=1e-11, atol=1e-11)


def check_the_others(net, outputs):
    """``outputs`` of the replicas that did not raise have the gradients they should have."""
    parts = bad_parts()
    del parts[2]
    reference = copy.deepcopy(net)
    reference.zero_grad()
    loss(torch.cat(outputs)).backward()
    sum(loss(reference.block(x)) for x in parts).backward()
    torch.testing.assert_close(grads(net), grads(reference), rtol=1e-11, atol=1e-11)


def test_listing_parameters_of_a_replica(replicate_on_cpu):
    """A replica has no parameters(): what is not listed is named, not silently left out."""

    class Careless(Block):
        def forward(self, x):
            return ms.CheckpointFunction.apply(self.inner, 1, x, *self.parameters())

    net = Careless().double()
    with pytest.warns(UserWarning, match="need a gradient but were not listed"):
        one_by_one(replicate_on_cpu(net, 1), [data(1).requires_grad_()])[0].sum().backward()


def test_channels_last_images(replicate_on_cpu, engine_hooks):
    """A larger region, of kernels that run without the GIL."""
    torch.manual_seed(0)
    norm = ms.BatchNorm2d(8, activation="relu")
    net = Region(nn.Sequential(nn.Conv2d(3, 8, 3), norm, nn.Conv2d(8, 4, 3)))
    reference = copy.deepcopy(net.body)
    images = torch.randn(8, 3, 12, 12).contiguous(memory_format=torch.channels_last)
    x, y = images.clone().requires_grad_(), images.clone().requires_grad_()
    loss(torch.cat(apply(replicate_on_cpu(net, 4), x.chunk(4)))).backward()
    loss(torch.cat(one_by_one(replicate_on_cpu(reference, 4), y.chunk(4)))).backward()
    assert_equal([x.grad], [y.grad])
    torch.testing.assert_close(grads(net), grads(reference), rtol=1e-4, atol=1e-4)
    assert norm.num_batches_tracked == 1


class Region(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.body = body

    def forward(self, x):
        return ms.checkpoint(self.body, x)
