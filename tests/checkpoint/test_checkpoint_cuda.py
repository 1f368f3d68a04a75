"""Checkpointing on a GPU: random numbers, autocast, streams, threads, offloading, no waiting."""

import threading

import pytest
import torch
from on_device import (
    FORMS,
    assert_same_values,
    every_form,
    needs_cuda,
    network,
    no_synchronisation,
    on_every_device,
    plain,
    synchronize,
    values,
)
from torch import nn
from torch.nn import functional as F

import memsave_ext as ms
from memsave_ext.checkpoint import offload

AUTOCAST = {"float32": None, "float16": torch.float16, "bfloat16": torch.bfloat16}


def layer(device="cuda", width=64):
    torch.manual_seed(0)
    linear = nn.Linear(width, width, device=device)
    x = torch.randn(32, width, device=device, requires_grad=True)
    return linear, x


def with_dropout(linear):
    return lambda a: F.dropout(F.dropout(linear(a).relu(), 0.5).tanh(), 0.2)


# ---- random numbers and autocast ----------------------------------------------------------------


@on_every_device
@pytest.mark.parametrize("autocast", AUTOCAST)
@every_form
def test_dropout_and_autocast_are_replayed(form, autocast, device):
    linear, x = layer(device)
    tensors = (x, *linear.parameters())
    dtype = AUTOCAST[autocast]
    results = []
    for run in (plain, FORMS[form]):
        torch.manual_seed(1)
        # Without the cache, which regions do without: with it, gradients of two uses of a weight
        # are added in half precision.
        with torch.autocast(device, dtype, enabled=dtype is not None, cache_enabled=False):
            middle = run(with_dropout(linear), 1, *tensors)
            output = run(with_dropout(linear), 1, middle, *linear.parameters())
        after = torch.rand(3, device=device)
        assert output.dtype == (dtype or torch.float32)
        results.append((output, after, *torch.autograd.grad(output.float().sum(), tensors)))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


@on_every_device
@every_form
def test_both_runs_draw_the_same_and_differ_from_the_next(form, device):
    linear, x = layer(device)
    drawn = []

    def function(a):
        drawn.append(torch.rand(1000, device=device))
        return linear(a) * drawn[-1].sum()

    for _ in range(2):
        FORMS[form](function, 1, x, *linear.parameters()).sum().backward()
    runs = len(drawn) // 2  # a nested region runs three times
    assert runs == (3 if form == "nested" else 2)
    assert all(torch.equal(drawn[0], other) for other in drawn[1:runs])
    assert not torch.equal(drawn[0], drawn[runs])


@on_every_device
@every_form
def test_the_generator_is_left_alone_by_backward(form, device):
    linear, x = layer(device)
    output = FORMS[form](with_dropout(linear), 1, x, *linear.parameters())
    before = torch.get_rng_state() if device == "cpu" else torch.cuda.get_rng_state()
    output.sum().backward()
    after = torch.get_rng_state() if device == "cpu" else torch.cuda.get_rng_state()
    assert torch.equal(before, after)


@needs_cuda
def test_a_tensor_only_the_closure_knows_draws_the_same_numbers():
    w = torch.ones(1000, device="cuda")
    x = torch.ones(1000, requires_grad=True)  # on the CPU: no listed tensor is on the GPU
    seen = []

    def function(a):
        seen.append(F.dropout(w, 0.5).cpu())
        return a * seen[-1]

    ms.CheckpointFunction.apply(function, 1, x).sum().backward()
    assert torch.equal(seen[0], seen[1])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_every_device_is_replayed():
    x = torch.ones(100, device="cuda:0", requires_grad=True)
    seen = []

    def function(a):
        seen.append(torch.rand(100, device="cuda:1"))
        return a * seen[-1].to(a.device)

    ms.CheckpointFunction.apply(function, 1, x).sum().backward()
    assert torch.equal(seen[0], seen[1])


# ---- streams and threads ------------------------------------------------------------------------


@needs_cuda
@every_form
def test_a_region_moved_between_streams(form):
    """The recompute runs on the stream of the forward, and whoever asked for it waits."""
    seen = []

    def function(a):
        seen.append(torch.cuda.current_stream())
        for _ in range(20):
            a = a @ a
        return a

    # A permutation: products of it, and the gradient, are exact, and far from 0.
    x = torch.eye(512, device="cuda").roll(1, 0).requires_grad_()
    expected = torch.autograd.grad(function(x).sum(), x)
    assert expected[0].eq(2**20).all()
    seen.clear()
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    first.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(first):
        output = FORMS[form](function, 1, x).sum()
    second.wait_stream(first)
    with torch.cuda.stream(second):
        got = torch.autograd.grad(output, x)
    second.synchronize()
    assert len(seen) >= 2
    assert all(stream == first for stream in seen)
    assert torch.equal(expected[0], got[0])


def train(net, x, steps=3):
    """Losses, and what the net is in the end."""
    optimizer = ms.AdamW(net.parameters(), lr=1e-2, in_backward=True)
    losses = []
    for _ in range(steps):
        loss = net(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return {"losses": torch.stack(losses), **values(net)}


@needs_cuda
@every_form
def test_streams_at_once(form):
    x = torch.randn(64, 16, device="cuda")
    expected = train(network(FORMS[form], "cuda", p=0), x)
    nets = [network(FORMS[form], "cuda", p=0) for _ in range(4)]
    streams = [torch.cuda.Stream() for _ in nets]
    found = []
    torch.cuda.synchronize()
    for stream, net in zip(streams, nets, strict=True):
        with torch.cuda.stream(stream):
            found.append(train(net, x))
    torch.cuda.synchronize()
    for one in found:
        assert_same_values(one, expected)


@on_every_device
@every_form
def test_replicas_in_threads(form, device):
    """Each with a stream of its own, on one device. (They share its generator: no dropout.)"""
    torch.manual_seed(0)
    x = torch.randn(64, 16, device=device)
    expected = train(network(FORMS[form], device, p=0), x)
    nets = [network(FORMS[form], device, p=0) for _ in range(2)]
    found = [None] * len(nets)
    synchronize(device)

    def work(i):
        if device == "cpu":
            found[i] = train(nets[i], x)
            return
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            found[i] = train(nets[i], x)
        stream.synchronize()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(nets))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    for one in found:
        assert one is not None
        assert_same_values(one, expected)


# ---- no waiting ---------------------------------------------------------------------------------


@on_every_device
@pytest.mark.parametrize("autocast", AUTOCAST)
@every_form
def test_a_whole_step_does_not_synchronise(form, autocast, device):
    net = network(FORMS[form], device)
    optimizer = ms.AdamW(net.parameters(), lr=1e-2, in_backward=True)
    x = torch.randn(8, 16, device=device)
    dtype = AUTOCAST[autocast]

    def step():
        with torch.autocast(device, dtype, enabled=dtype is not None):
            loss = net(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()  # lazy initialisation
    with no_synchronisation():
        step()


@on_every_device
@pytest.mark.parametrize(
    "options",
    [
        {"early_stop": False},
        {"preserve_rng_state": False},
        {"determinism_check": "none"},
        {"context_fn": ms.count_once_contexts},
        {"offload": "cpu"},
    ],
    ids=lambda options: next(iter(options)),
)
def test_no_option_synchronises(options, device):
    linear, x = layer(device)

    def step():
        value = F.rrelu(linear(x), training=True)  # filled after it is saved
        ms.checkpoint(with_dropout(linear), value, **options).sum().backward()

    step()
    with no_synchronisation():
        step()


# ---- offloading ---------------------------------------------------------------------------------


@needs_cuda
def test_offload_moves_the_inputs_to_pinned_memory_and_back():
    w = torch.randn(1024, 1024, device="cuda", requires_grad=True)
    x = torch.randn(1024, 1024, device="cuda", requires_grad=True)

    def function(a):
        return (a @ w).tanh() @ w

    expected = torch.autograd.grad(function(x * 2).sum(), (x, w))
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    output = ms.checkpoint(function, x * 2, offload="cpu").sum()
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated() - before
    got = torch.autograd.grad(output, (x, w))
    assert held < x.nbytes
    for a, b in zip(expected, got, strict=True):
        assert torch.equal(a, b)


@needs_cuda
def test_offloaded_regions_in_a_row_reuse_no_memory_too_early():
    x = torch.randn(512, 512, device="cuda", requires_grad=True)

    def chain(run):
        value = x
        for _ in range(20):
            value = run(lambda a: (a * 1.01).sin().cos(), value)
        return torch.autograd.grad(value.sum(), x)[0]

    plainly = chain(lambda f, a: f(a))
    for _ in range(3):
        assert torch.equal(plainly, chain(lambda f, a: ms.checkpoint(f, a, offload="cpu")))


@needs_cuda
def test_offloading_overlaps_with_the_forward():
    """The copy is over while the region's own work, some tenths of a second, still goes on."""
    x = torch.randn(1 << 20, device="cuda", requires_grad=True)

    def function(a):
        torch.cuda._sleep(600_000_000)  # cycles
        return a.sin()

    copies = offload._copy_stream(torch.device("cuda", x.device.index))
    ms.checkpoint(function, x, offload="cpu").sum().backward()  # pinned memory, kernels
    torch.cuda.synchronize()
    output = ms.checkpoint(function, x, offload="cpu")
    copies.synchronize()
    done = torch.cuda.current_stream().query()
    assert not done
    torch.cuda.synchronize()
    (grad,) = torch.autograd.grad(output.sum(), x)
    torch.testing.assert_close(grad, x.detach().cos())


@needs_cuda
def test_copies_back_overlap_with_the_backward():
    """Those of the first region are over while the last one is still recomputed."""
    x = torch.randn(1 << 20, device="cuda", requires_grad=True)
    done = []

    def first(a):
        if torch._C._current_graph_task_id() != -1:  # its recompute
            copies.synchronize()
            done.append(torch.cuda.current_stream().query())
        return a.sin()

    def last(a):
        torch.cuda._sleep(600_000_000)  # cycles
        return a.sin()

    def run():
        y = ms.checkpoint(first, x, offload="cpu")
        (ms.checkpoint(last, y, offload="cpu") * 2).sum().backward()
        torch.cuda.synchronize()

    copies = offload._copy_stream(torch.device("cuda", x.device.index))
    run()  # pinned memory, kernels
    run()
    assert done[-1] is False
