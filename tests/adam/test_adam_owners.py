"""Whose parameters are stepped in backward: optimizers that are gone, living ones, and pauses."""

import gc
import sys
import threading
import time
import weakref

import pytest
import torch
from torch import nn

import memsave_ext as ms
from memsave_ext.adam import owners
from memsave_ext.elsewhere import gradients
from memsave_ext.elsewhere.gradient import GradientElsewhere
from memsave_ext.store import mapped


def model():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))


def train(net, optimizer, steps=2):
    for i in range(steps):
        net(torch.full((3, 4), i + 1.0)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def expected(steps, kind=torch.optim.AdamW):
    net = model()
    train(net, kind(net.parameters(), lr=0.1), steps)
    return list(net.parameters())


def assert_close(net, others):
    for p, q in zip(net.parameters(), others, strict=True):
        torch.testing.assert_close(p, q)


@pytest.mark.parametrize("cycle", [False, True], ids=["counted", "in a cycle"])
def test_an_optimizer_that_is_gone_is_replaced(cycle):
    net = model()
    optimizer = ms.AdamW(net.parameters(), in_backward=True)
    train(net, optimizer)
    if cycle:  # as a schedule's
        optimizer.itself = optimizer
    gone = weakref.ref(optimizer)
    gc.disable()
    try:
        del optimizer
        assert (gone() is not None) == cycle
        net.load_state_dict(model().state_dict())
        again = ms.AdamW(net.parameters(), lr=0.1, in_backward=True)
    finally:
        gc.enable()
    assert gone() is None
    train(net, again)
    assert_close(net, expected(2))
    again.remove_hooks()
    assert all(p._post_accumulate_grad_hooks is None for p in net.parameters())


def test_hooks_of_one_that_is_gone_can_be_removed():
    net = model()
    ms.AdamW(net.parameters(), in_backward=True)
    gc.collect()
    ms.remove_hooks(net)
    assert all(p._post_accumulate_grad_hooks is None for p in net.parameters())


@pytest.mark.parametrize(
    "select", [lambda n: n, lambda n: n[0].weight, lambda n: [n[2].bias], lambda n: n.parameters()],
    ids=["module", "parameter", "list", "iterator"],
)  # fmt: skip
def test_remove_hooks_by_parameters(select):
    net = model()
    first = ms.AdamW(net.parameters(), lr=0.1, in_backward=True)
    train(net, first, 1)
    ms.remove_hooks(select(net))
    assert not first.in_backward
    assert all(p._post_accumulate_grad_hooks is None for p in net.parameters())
    train(net, first, 1)  # goes on as an ordinary one
    state = first.state_dict()
    second = ms.AdamW(net.parameters(), lr=0.1, in_backward=True)
    second.load_state_dict(state)
    train(net, second, 1)
    reference = model()
    optimizer = torch.optim.AdamW(reference.parameters(), lr=0.1)
    for steps in (1, 1, 1):
        train(reference, optimizer, steps)
    assert_close(net, reference.parameters())


def test_remove_hooks_of_what_has_none():
    net = model()
    ms.remove_hooks(net)
    ms.remove_hooks([])
    other = ms.Adam(net.parameters(), in_backward=True)
    ms.remove_hooks(nn.Linear(2, 2))
    assert other.in_backward
    torch.optim.Adam(nn.Linear(2, 2).parameters())


@pytest.mark.parametrize(
    "bad", [None, 3, "x", [torch.ones(1), 3], [("name", torch.ones(1))]], ids=str
)
def test_remove_hooks_of_something_else(bad):
    with pytest.raises(TypeError, match="params must be a module, a parameter or an iterable of"):
        ms.remove_hooks(bad)


def groups_of(net):
    return [{"params": [*net[0].parameters()]}, {"params": [*net[2].parameters()]}]


@pytest.mark.parametrize("release", [True, False], ids=["removed", "not removed"])
@pytest.mark.parametrize("way", ["in backward", "elsewhere", "torch's"])
def test_a_group_can_go_to_another_optimizer(way, release, tmp_path, monkeypatch):
    monkeypatch.setattr(gradients, "SMALLEST", 1)
    if way == "elsewhere" and sys.platform != "linux":
        pytest.skip("a folder is for Linux")
    options = {"grads_on": tmp_path} if way == "elsewhere" else {"in_backward": True}

    def make(groups):
        if way == "torch's":
            return ms.in_backward(torch.optim.AdamW(groups, lr=0.1))
        return ms.AdamW(groups, lr=0.1, **options)

    net, reference = model(), model()
    first, plain = make(groups_of(net)), torch.optim.AdamW(groups_of(reference), lr=0.1)
    train(net, first, 1)
    train(reference, plain, 1)
    moved, of_plain = first.param_groups.pop(), plain.param_groups.pop()
    if release:
        ms.remove_hooks(moved["params"])
    second, other = make(moved["params"]), torch.optim.AdamW(of_plain["params"], lr=0.1)
    assert first.in_backward == second.in_backward == (way != "elsewhere")
    for i in range(2):
        net(torch.full((3, 4), i + 1.0)).square().mean().backward()
        if way == "elsewhere":
            assert all(isinstance(p.grad, GradientElsewhere) for p in net.parameters())
        else:
            assert all(p.grad is None for p in net.parameters())
        reference(torch.full((3, 4), i + 1.0)).square().mean().backward()
        for optimizer in (first, second, plain, other):
            optimizer.step()
            optimizer.zero_grad()
    assert_close(net, reference.parameters())
    with pytest.raises(ValueError, match="another optimizer"):
        first.add_param_group(moved)
    second.remove_hooks()
    first.remove_hooks()
    assert not any(p._post_accumulate_grad_hooks for p in net.parameters())


def test_a_living_optimizer_is_named_by_its_parameter():
    net = model()
    kept = ms.AdamW(net.parameters(), in_backward=True)
    match = (
        r"parameter '2.weight' of shape \[1, 5\] is stepped in backward by another optimizer "
        r"already .of class AdamW.\. .*memsave_ext\.remove_hooks\(model\)"
    )
    with pytest.raises(ValueError, match=match):
        ms.Adam([("2.weight", net[2].weight)], in_backward=True)
    with pytest.raises(ValueError, match=r"a parameter of shape \[1, 5\] is stepped"):
        ms.Adam([net[2].weight], in_backward=True)
    kept.remove_hooks()
    _by_name = ms.Adam(net.named_parameters(), in_backward=True)
    with pytest.raises(ValueError, match=r"parameter '0.weight' of shape \[5, 4\] is stepped"):
        ms.Adam(net.parameters(), in_backward=True)


# pauses


@pytest.mark.parametrize("small_bytes", [0, 1 << 16], ids=["at once", "in a bucket"])
def test_paused_drops_gradients_and_steps_nothing(small_bytes):
    net = model()
    optimizer = ms.AdamW(net.parameters(), lr=0.1, in_backward=True, small_bytes=small_bytes)
    train(net, optimizer, 1)
    before = [p.detach().clone() for p in net.parameters()]
    x = torch.ones(3, 4, requires_grad=True)
    for _ in range(2):  # more than one in a step
        with optimizer.paused():
            net(x).sum().backward()
    assert x.grad is not None
    for p, value in zip(net.parameters(), before, strict=True):
        assert p.grad is None and torch.equal(p, value)
        assert optimizer.state[p]["step"] == 1
    reference = model()
    other = torch.optim.AdamW(reference.parameters(), lr=0.1)
    train(reference, other, 1)
    train(reference, other, 2)
    train(net, optimizer, 2)
    assert_close(net, reference.parameters())


def test_paused_frees_each_gradient_as_it_arrives():
    params = [nn.Parameter(torch.ones(10)) for _ in range(4)]
    optimizer = ms.Adam(params, in_backward=True)
    seen = []
    h = params[0] * 1
    h.register_hook(lambda _: seen.extend(p.grad is None for p in params))
    total = h
    for p in params[1:]:
        total = total + p
    with optimizer.paused():
        total.sum().backward()
    assert seen == [True] * 4


def test_paused_ends_where_gradients_cannot_be_restored():
    p = nn.Parameter(torch.ones(3))
    optimizer = ms.Adam([p], in_backward=True)
    with optimizer.accumulate():
        p.sum().backward()
    with pytest.raises(RuntimeError, match="grad"), optimizer.paused():
        p.data = p.data.double()
    p.sum().backward()
    optimizer.step()
    assert optimizer.state[p]["exp_avg"].dtype == torch.float64


def test_paused_keeps_gradients():
    p = nn.Parameter(torch.ones(3))
    optimizer = ms.Adam([p], in_backward=True)
    with optimizer.paused(keep=True):
        (p * 2).sum().backward()
        (p * 3).sum().backward()
    assert torch.equal(p.grad, torch.full((3,), 5.0)) and not optimizer.state
    optimizer.step()
    assert p.grad is None and optimizer.state[p]["step"] == 1
    assert torch.equal(optimizer.state[p]["exp_avg"], torch.full((3,), 5 * (1 - 0.9)))


def test_paused_between_accumulated_backwards():
    p = nn.Parameter(torch.ones(3))
    optimizer = ms.Adam([p], in_backward=True)
    with optimizer.accumulate():
        (p * 2).sum().backward()
        with optimizer.paused():
            (p * 100).sum().backward()
    with optimizer.paused():
        (p * 100).sum().backward()
    assert torch.equal(p.grad, torch.full((3,), 2.0))
    (p * 3).sum().backward()
    optimizer.step()
    torch.testing.assert_close(optimizer.state[p]["exp_avg"], torch.full((3,), 0.5))


@pytest.mark.filterwarnings("ignore:memsave_ext. norm_pass")
def test_paused_and_norm_pass():
    p = nn.Parameter(torch.ones(4))
    optimizer = ms.Adam([p], in_backward=True)
    with optimizer.norm_pass(1.0):
        p.sum().backward()
        with optimizer.paused():
            (p * 100).sum().backward()
        with pytest.raises(RuntimeError, match=r"accumulated after norm_pass\(\)"):
            optimizer.paused(keep=True).__enter__()
    with optimizer.paused():
        (p * 100).sum().backward()
    p.sum().backward()
    optimizer.step()
    assert optimizer.grad_norm == 2
    torch.testing.assert_close(optimizer.state[p]["exp_avg"], torch.full((4,), 0.05))


def test_paused_nested_and_raising():
    p = nn.Parameter(torch.ones(3))
    optimizer = ms.Adam([p], in_backward=True)

    def fail():
        with optimizer.paused():
            with optimizer.paused(keep=True):
                p.sum().backward()
                assert p.grad is not None
            p.sum().backward()
            assert p.grad is None
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    p.sum().backward()
    assert p.grad is None and optimizer.state[p]["step"] == 1


def test_step_inside_of_paused():
    p = nn.Parameter(torch.ones(3))
    for in_backward in (False, True):
        optimizer = ms.Adam([p], in_backward=in_backward)
        with (
            optimizer.paused(),
            pytest.raises(RuntimeError, match=r"step\(\) was called inside of paused\(\)"),
        ):
            optimizer.step()
        optimizer.step()


def test_paused_without_in_backward():
    p = nn.Parameter(torch.ones(3))
    optimizer = ms.Adam([p])
    p.sum().backward()
    with optimizer.paused():
        (p * 5).sum().backward()
    assert torch.equal(p.grad, torch.ones(3))


def test_the_second_backwards_error_names_paused():
    p = nn.Parameter(torch.ones(3))
    optimizer = ms.Adam([p], in_backward=True)
    p.sum().backward()
    match = r"opt\.accumulate\(\).*GAN generator's loss.*opt\.paused\(\)"
    with pytest.raises(RuntimeError, match=match):
        p.sum().backward()
    optimizer.zero_grad()


def test_attach_names_clip_global_norm(tmp_path):
    net = model()
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1
    )
    try:
        ddp = nn.parallel.DistributedDataParallel(net)
        optimizer = ms.Adam(net.parameters(), clip_global_norm=1.0)
        with pytest.raises(ValueError, match="which clip_global_norm has switched off"):
            optimizer.attach(ddp)
        stepped = ms.Adam(net.parameters(), lr=0.1, in_backward=True)
        stepped.attach(ddp)
        before = [p.detach().clone() for p in net.parameters()]
        with stepped.paused():
            ddp(torch.ones(3, 4)).sum().backward()
        assert all(p.grad is None for p in net.parameters())
        for p, value in zip(net.parameters(), before, strict=True):
            assert torch.equal(p, value)
        with ddp.no_sync(), stepped.paused():
            ddp(torch.ones(3, 4)).sum().backward()
        match = r"opt\.paused\(keep=True\) is not supported around a backward .* Dist"
        with stepped.paused(keep=True), pytest.raises(RuntimeError, match=match):
            ddp(torch.ones(3, 4)).sum().backward()
    finally:
        torch.distributed.destroy_process_group()
    del ddp, optimizer, stepped


@pytest.mark.once
def test_looked_for_while_another_thread_makes_one():
    """Also places where tensors may lie."""

    class Place:
        def has(self, tensor):
            return False

    param = nn.Parameter(torch.zeros(4))
    places = [Place() for _ in range(8)]
    for place in places:
        mapped.add(place)
    optimizers = [ms.SGD([param]) for _ in range(8)]
    end, before, made = time.monotonic() + 2, sys.getswitchinterval(), []

    def make():
        while time.monotonic() < end:
            made[:] = ms.SGD([param]), Place()
            mapped.add(made[1])

    sys.setswitchinterval(1e-6)  # threads take turns more often
    maker = threading.Thread(target=make)
    maker.start()
    try:
        while time.monotonic() < end:
            assert not mapped.is_mapped(param)
            assert {*map(id, optimizers)} <= {*map(id, owners.alive_optimizers())}
    finally:
        sys.setswitchinterval(before)
        maker.join()
