"""Blocks that move memory to the host's, or to a file: copies on streams of their own, and who
waits for them."""

import contextlib
import gc
import os
import time

import fake_cuda  # noqa: F401
import pytest
import torch
from helpers import run_threads
from torch import nn
from torch.nn import functional as F

import memsave_ext as ms
from memsave_ext import _native

DEVICE = torch.device("cuda", 0)

pytestmark = pytest.mark.filterwarnings("ignore:remat. the budget of")


@pytest.fixture(params=["to the host", "to a file"])
def place(request, tmp_path):
    _native.module.remat_forget()
    place = "cpu" if request.param == "to the host" else str(tmp_path)
    yield place
    assert used_in_the_end(place) == 0


@pytest.fixture
def everything(place):
    """Options of a block that moves every second content and drops the others."""
    return {"_everything": True, "offload": place}


def used(place):
    stores = _native.module.RematStore
    if place == "cpu":
        return stores.in_host_memory(DEVICE).used()
    return stores.in_folder(os.path.realpath(place), DEVICE).used()


def used_in_the_end(place):
    """Of a failed backward, too, which the engine's thread lets go of after its error is here."""
    gc.collect()
    deadline = time.monotonic() + 60
    while used(place) > 0 and time.monotonic() < deadline:
        time.sleep(0.001)
    return used(place)


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x):
        return x + F.dropout(F.gelu(self.layer(self.norm(x))), 0.2)


def network(seed=0, layers=4, width=64):
    torch.manual_seed(seed)
    model = nn.Sequential(*(Layer(width) for _ in range(layers))).to(DEVICE)
    return model, torch.randn(512, width).to(DEVICE)  # an activation has 128 KiB


def step(model, x, block=None):
    """The gradients, on the host, and the most bytes that were allocated."""
    torch.cuda.manual_seed(1)
    gc.collect()
    with ms.memory.track(model) as track:
        others = torch.cuda.memory_allocated() - track.live
        with block or contextlib.nullcontext():
            loss = model(x).square().mean()
        loss.backward()
        del loss
        peak = track.peak + others
    gradients = [p.grad.cpu() for p in model.parameters()]
    model.zero_grad()
    return gradients, peak


def check(program, options):
    """``program`` is given what makes blocks, which move something."""
    torch.cuda.manual_seed(1)
    expected = [t.cpu() for t in program(contextlib.nullcontext)]
    made = []

    def block():
        made.append(ms.remat(**options))
        return made[-1]

    torch.cuda.manual_seed(1)
    ours = [t.cpu() for t in program(block)]
    assert all(map(torch.equal, ours, expected))
    figures = [b.figures() for b in made]
    assert sum(f.moved_bytes for f in figures) > 0
    assert sum(f.brought_back_bytes for f in figures) > 0


@pytest.mark.parametrize("share", [0.5, 0.2, 0.05])
def test_the_bits_within_a_budget(share, place):
    model, x = network()
    expected, plain = step(model, x)
    for _ in range(4):
        block = ms.remat(model, budget=share, offload=place)
        ours, peak = step(model, x, block)
        assert all(map(torch.equal, ours, expected))
        figures = block.figures()
        assert peak <= 1.02 * max(block.budget, block.least) < plain
        assert figures.not_moved_bytes == 0
    assert figures.brought_back_bytes >= figures.moved_bytes > 0
    where = "the host's memory" if place == "cpu" else place
    assert f"to {where}, and" in " ".join(block.report().split())
    assert (figures.waited_seconds == 0) == (place == "cpu")  # the device waits, or the host


def test_below_the_least_of_recomputing(place):
    model, x = network()
    least = []
    for options in ({}, {"offload": place}):
        _native.module.remat_forget()
        for _ in range(2):
            block = ms.remat(model, budget=0.01, **options)
            step(model, x, block)
        least.append(block.least)
    assert least[1] < 0.95 * least[0]


def test_moved_on_several_streams(seed, everything):
    """Whose layers, and their backwards, are on streams that wait for no more than they must."""
    model, x = network(seed, 3)
    streams = [torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()]

    def program(block):
        with block():
            y = x
            for i, layer in enumerate(model):
                before, stream = streams[(i + seed) % 3], streams[(i + seed + 1) % 3]
                stream.wait_stream(before)
                y.record_stream(stream)
                with torch.cuda.stream(stream):
                    y = layer(y).tanh()
            streams[0].wait_stream(stream)
            y.record_stream(streams[0])
            loss = y.sum()
        return torch.autograd.grad(loss, list(model.parameters()))

    streams[1].wait_stream(streams[0])
    check(program, everything)


def test_moved_in_steps_of_two_streams(everything):
    """They know nothing of each other, and have pinned memory in turn."""
    nets = [network(i, 2) for i in range(2)]
    streams = [torch.cuda.Stream() for _ in nets]
    torch.cuda.synchronize()
    for _ in range(3):
        for (model, x), stream in zip(nets, streams, strict=True):
            with torch.cuda.stream(stream):
                with ms.remat(**everything) as block:
                    loss = model(x).sum()
                torch.autograd.grad(loss, list(model.parameters()))
                del loss
            assert block.figures().brought_back_bytes > 0
    torch.cuda.synchronize()  # before the networks are freed


def test_moved_views_and_writes_in_place(seed, everything):
    torch.manual_seed(seed)
    w = nn.Parameter(torch.randn(64, 64).to(DEVICE))
    x = torch.randn(64, 64).to(DEVICE)

    def program(block):
        with block():
            h = (x @ w).tanh()
            rows = h[:32].t()
            a = rows.sin() * 2
            b = (h.view(-1)[::2] * 1.5).exp()
            c = torch.cat([a.flatten(), b])
            c.mul_(0.5).relu_()
            d = (c * c).sigmoid()
        return [*torch.autograd.grad(d.sum(), w), d.detach()]

    check(program, everything)


def test_moved_and_written_while_it_leaves(everything):
    """On the stream that made it, and on another one."""
    w = nn.Parameter(torch.randn(256, 256).to(DEVICE))
    side = torch.cuda.Stream()

    def program(block):
        main, values = torch.cuda.current_stream(), []
        with block():
            for i in range(6):
                y = w * 2
                z = (y + 1).sin()
                side.wait_stream(main)
                with torch.no_grad(), torch.cuda.stream(side if i % 2 else main):
                    y.record_stream(side)
                    y.mul_(3)  # of which nothing was saved but z's way
                main.wait_stream(side)
                values.append(z.exp().sum())
        return torch.autograd.grad(sum(values), w)

    check(program, everything)


def test_moved_and_written_on_another_stream_at_once(place):
    """While there is room for it, nobody else waits for its copy."""
    w = nn.Parameter(torch.randn(256, 256).to(DEVICE))
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    moved = 0
    for _ in range(5):
        with ms.remat(budget=0.3, offload=place) as block:
            values = []
            for _ in range(6):
                y = w @ w
                z = y.sin()
                side.wait_stream(main)
                with torch.cuda.stream(side):
                    y.data.mul_(3)  # behind autograd's back
                y.record_stream(side)
                main.wait_stream(side)
                values.append(z.exp().sum())
            loss = sum(values)
        loss.backward()
        del loss, y, z, values
        moved += block.figures().moved_bytes
    assert moved > 0


@pytest.mark.parametrize("inside", [True, False])
def test_moved_and_changed_is_an_error_as_ever(inside, everything):
    w = nn.Parameter(torch.randn(64, 64).to(DEVICE))
    with ms.remat(**everything) as block:
        h = w * 2
        z = h.sin() + h.cos()
        if inside:
            h.detach().mul_(2)
    if not inside:
        h.detach().mul_(2)
    assert block.figures().moved_bytes > 0
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.sum().backward()


def test_moved_for_two_backwards_and_one_of_a_backward(everything):
    model, x = network(layers=2)
    x.requires_grad_()

    def program(block):
        with block():
            out = model(x).softmax(-1)
            (grad,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
            loss = (grad.norm(dim=1) - 1).square().mean() + out.exp().sum()
        params = [x, *model.parameters()]
        first = torch.autograd.grad(loss, params, retain_graph=True)
        return [*first, *torch.autograd.grad(loss, params)]

    check(program, everything)


def test_moved_in_nested_blocks(everything):
    model, x = network()

    def program(block):
        with block():
            y = model[:2](x)
            with block():
                z = model[2:](y)
            loss = (z * y).sum()
        return torch.autograd.grad(loss, list(model.parameters()))

    check(program, everything)


def test_moved_and_dropped_after_an_exception(place, everything):
    """What was on its way out or back when nobody asked for it any more."""
    model, x = network()

    class Fails(torch.autograd.Function):
        at = None

        @staticmethod
        def forward(ctx, x, number):
            ctx.number = number
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            if ctx.number == Fails.at:
                raise RuntimeError("in backward")
            return grad, None

    def forward_fails():
        with ms.remat(**everything):
            model(x)
            raise RuntimeError("in forward")

    with pytest.raises(RuntimeError, match="in forward"):
        forward_fails()
    layers = [m for _ in range(4) for m in (nn.Linear(64, 64), nn.GELU(), nn.Identity())]
    net = nn.Sequential(*layers).to(DEVICE)
    for i in range(2, len(layers), 3):
        layers[i].forward = lambda x, i=i: Fails.apply(x, i)
    for Fails.at in (None, None, 5, None, 2, 8):
        with ms.remat(net, budget=0.05, offload=place) as block:
            loss = net(x).square().mean()
        with pytest.raises(RuntimeError) if Fails.at else contextlib.nullcontext():
            loss.backward()
        assert block.figures().moved_bytes > 0
        del loss
        assert used_in_the_end(place) == 0
    with ms.remat(**everything):
        model(x).sum()  # dropped at once
    with ms.remat(**everything):
        loss = model(x).sum()
    assert used(place) > 0
    del loss
    assert used_in_the_end(place) == 0


def test_moved_and_dropped_while_it_leaves(place, everything):
    w = nn.Parameter(torch.randn(1 << 21).to(DEVICE))
    for _ in range(3):
        with ms.remat(**everything) as block:
            y = w
            for _ in range(16):
                y = y * w
            del y  # dropped at once
        with ms.remat(**everything):
            w.sin().sum()
        assert block.figures().not_moved_bytes == 0
    assert used_in_the_end(place) == 0


def test_moved_in_several_threads(everything):
    """Steps that share the host's memory, and backwards of one graph at once."""
    x = torch.randn(512, 64).to(DEVICE)
    shared = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 64))
    params = list(shared.to(DEVICE).parameters())
    expected_of_shared = torch.autograd.grad(shared(x).exp().sum(), params)
    with ms.remat(**everything):
        loss = shared(x).exp().sum()
    done = []

    def work(i):
        net = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)).to(DEVICE)
        of_net = list(net.parameters())
        expected = torch.autograd.grad(net(x).exp().sum(), of_net)
        for _ in range(5):
            with ms.remat(**everything) as block:
                of_block = net(x).exp().sum()
            ours = torch.autograd.grad(of_block, of_net)
            assert all(map(torch.equal, expected, ours)) and block.figures().moved_bytes > 0
            del of_block, ours
        ours = torch.autograd.grad(loss, params, retain_graph=True)
        assert all(map(torch.equal, expected_of_shared, ours))
        done.append(i)

    run_threads(work, 3)
    assert len(done) == 3


def test_moved_no_more_than_the_limit(place):
    model, x = network()
    expected, _ = step(model, x)
    moved = []
    for limit in (0, 1 << 18, "1MiB", None):
        _native.module.remat_forget()
        for _ in range(2):
            block = ms.remat(model, budget=0.05, offload=place, offload_limit=limit)
            ours, _ = step(model, x, block)
            assert all(map(torch.equal, ours, expected))
        moved.append(block.figures().moved_bytes)
    assert moved[0] == 0 < moved[1] <= 1 << 18 and moved[1] < moved[2] <= 1 << 20 < moved[3]


def test_moved_until_the_limit_is_reached(everything):
    model, x = network()
    expected, _ = step(model, x)
    options = {**everything, "offload_limit": 1 << 20}
    with ms.remat(**options) as first:
        loss = model(x).sum()
    second = ms.remat(**options)
    ours, _ = step(model, x, second)
    assert all(map(torch.equal, ours, expected))
    assert 0 < first.figures().moved_bytes + second.figures().moved_bytes <= 1 << 20
    assert second.figures().not_moved_bytes > 0
    report = " ".join(second.report().split())
    assert report.count("could not be moved, and are kept: offload_limit is reached") == 1
    del loss


@pytest.mark.parametrize("place", ["to the host"], indirect=True)
def test_moved_without_waiting(place):
    """The host waits for nothing, so that it runs ahead of the device as ever."""
    model, x = network()
    ms.remat(model, budget=0.05, offload=place)  # measures how fast the host's memory is
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            with ms.remat(model, budget=0.05, offload=place) as block:
                loss = model(x).square().mean()
            loss.backward()
            del loss
            model.zero_grad()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert block.figures().moved_bytes > 0


def test_moved_by_a_module_and_its_trainer(place):
    model, x = network()
    expected, _ = step(model, x)
    handle = ms.remat_module(model, budget=0.05, offload=place, offload_limit="1GB")
    for _ in range(3):
        ours, _ = step(model, x)
        assert all(map(torch.equal, ours, expected))
    assert handle.figures().moved_bytes > 0
    handle.remove()
    del handle


def test_moved_nothing_while_a_graph_is_captured(everything):
    model = nn.Sequential(nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU()).to(DEVICE)
    x = torch.randn(512, 64).to(DEVICE)
    params = list(model.parameters())
    expected = torch.autograd.grad(model(x).square().mean(), params)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with ms.remat(**everything) as block:
            loss = model(x).square().mean()
        ours = torch.autograd.grad(loss, params)
    graph.replay()
    assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(ours, expected, strict=True))
    assert block.figures().moved_bytes == 0 < block.figures().not_moved_bytes
    assert "cannot be captured in a CUDA graph" in " ".join(block.report().split())
    del loss, ours


@pytest.mark.parametrize("budget", [0.05, None])
def test_moved_where_the_device_is_on_the_host(budget, place):
    """A block in which tensors of the CPU are saved, too: these stay, or are computed again."""
    model, x = network(layers=2)
    here, host = nn.Linear(256, 256), torch.randn(256, 256)
    params = [*model.parameters(), *here.parameters()]
    options = {"budget": budget} if budget else {"_everything": True}

    def program(block):
        for _ in range(3):
            torch.cuda.manual_seed(1)
            with block():
                loss = model(x).square().mean() + F.gelu(here(host)).tanh().sum().to(DEVICE)
            grads = torch.autograd.grad(loss, params)
        return grads

    check(program, {"model": model, "offload": place, **options})
