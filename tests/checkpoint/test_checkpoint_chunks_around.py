"""checkpoint(chunks=) inside and around what else torch and this package do."""

import contextlib

import pytest
import torch
import torch.utils.checkpoint as torch_checkpoint
from chunk_programs import MLP, as_pieces, chunked, gradients, in_pieces
from helpers import assert_equal, leaf

import memsave_ext as ms


def test_random_numbers_and_autocast():
    net, x = MLP(dropout=0.5), leaf(9, 6)
    tensors = (x, *net.parameters())
    as_pieces(lambda run: run(net, x, chunks=4), tensors)
    # A cast that the pieces share would sum up their gradients in bfloat16.
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
        out, *_ = as_pieces(lambda run: run(net.down, net.up(x), chunks=4), tensors)
    assert out.dtype == torch.bfloat16


@pytest.mark.parametrize("enabled", [False, True])
def test_engine_hooks(enabled):
    net, x = MLP(dropout=0.5), leaf(9, 6)
    before = ms.use_engine_hooks(enabled)
    try:
        as_pieces(lambda run: run(net, x, chunks=4), (x, *net.parameters()))
    finally:
        ms.use_engine_hooks(before)


@contextlib.contextmanager
def on_cpu():
    with torch.autograd.graph.save_on_cpu():
        yield


AROUND = {
    "checkpoint": lambda f, x: ms.checkpoint(f, x),
    "chunks": lambda f, x: ms.checkpoint(f, x, chunks=1),
    "torch's": lambda f, x: torch_checkpoint.checkpoint(f, x, use_reentrant=False),
    "torch's reentrant": lambda f, x: torch_checkpoint.checkpoint(f, x, use_reentrant=True),
}
INSIDE = {
    "remat": ms.remat,
    "save_on_cpu": on_cpu,
    "nothing": contextlib.nullcontext,
}


@pytest.mark.parametrize("context", INSIDE)
@pytest.mark.parametrize("around", ["nothing", *AROUND])
def test_nested(around, context):
    net, other, x = MLP(dropout=0.3), MLP(dropout=0.3), leaf(8, 6)
    call = AROUND.get(around, lambda f, x: f(x))

    def program(run):
        with INSIDE[context]() if run is chunked else contextlib.nullcontext():
            return call(lambda a: other(run(net, a.sin(), chunks=3)), x * 1)

    if around == "torch's reentrant":
        results = []
        for run in (in_pieces, chunked):
            torch.manual_seed(1)
            x.grad = None
            net.zero_grad()
            program(run).square().sum().backward()
            results.append([x.grad, *(p.grad for p in net.parameters())])
        assert_equal(*results)
        return
    as_pieces(program, (x, *net.parameters(), *other.parameters()))


def test_chunks_in_chunks_and_regions_in_pieces():
    net, x, w = MLP(dropout=0.3), leaf(8, 6), leaf(6)

    def program(run):
        def function(a):
            first = run(net, a, chunks=2) if run is in_pieces else chunked(net, a, chunks=2)
            return first * w

        return run(function, x, chunks=3)

    as_pieces(program, (x, w, *net.parameters()))

    def explicit(a):
        return ms.CheckpointFunction.apply(net, 1, a, *net.parameters())

    results = []
    for function in (net, explicit):
        torch.manual_seed(3)
        out = ms.checkpoint(function, x, chunks=3)
        results.append((out, *gradients(out, (x, *net.parameters()))))
    assert_equal(*results)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_adam_in_backward_steps_once(dtype):
    nets = [MLP(dtype=dtype) for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    optimizers = [
        ms.Adam(nets[0].parameters(), lr=0.01),
        ms.Adam(nets[1].parameters(), lr=0.01, in_backward=True),
    ]
    x = torch.randn(8, 6, dtype=dtype)
    for _ in range(3):
        for net, optimizer, run in zip(nets, optimizers, (in_pieces, chunked), strict=True):
            run(net, x, chunks=4).square().mean().backward()
            if optimizer is optimizers[1]:
                assert all(p.grad is None for p in net.parameters())
            optimizer.step()
            optimizer.zero_grad()
    for p, q in zip(*(net.parameters() for net in nets), strict=True):
        assert torch.equal(p, q)
        assert optimizers[1].state[q]["step"] == 3


@pytest.mark.parametrize(
    "options",
    [
        {"debug": True},
        {"offload": "cpu"},
        {"early_stop": False},
        {"determinism_check": "none"},
        {"use_reentrant": True},
    ],
    ids=str,
)
def test_options(options):
    net, x = MLP(dropout=0.3), leaf(8, 6)

    def program(run):
        return run(net, x, chunks=3, **(options if run is chunked else {}))

    as_pieces(program, (x, *net.parameters()))


def test_contexts():
    x = leaf(6, 3)
    entered = []

    @contextlib.contextmanager
    def enter(name):
        entered.append(name)
        yield

    out = ms.checkpoint(
        lambda a: a.sin().exp(), x, chunks=2, context_fn=lambda: (enter("f"), enter("r"))
    )
    out.sum().backward()
    assert entered == ["f", "f", "r", "r"]
