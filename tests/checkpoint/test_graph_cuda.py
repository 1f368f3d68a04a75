"""Whole training steps captured in a CUDA graph: checkpoint, batch norm and Adam in backward.

Without a GPU the tests run, with a step in place of each replay.
"""

import pytest
import torch
from on_device import (
    FORMS,
    HAS_CUDA,
    another_stream,
    assert_same_values,
    capture,
    every_form,
    needs_cuda,
    needs_kernels,
    network,
    no_synchronisation,
    values,
)
from torch import nn
from torch.nn import functional as F

import memsave_ext as ms
from memsave_ext import _native

DEVICE = "cuda" if HAS_CUDA else "cpu"
# In pure Python torch's generators let nobody read them while a graph is captured.
pytestmark = pytest.mark.skipif(
    HAS_CUDA and not (_native.module and _native.module.with_cuda),
    reason="on a GPU it needs a native build with CUDA",
)


def make_step(form, autocast=None, **options):
    """(net, step): a step of training returns its loss. The same for every form."""
    net = network(FORMS[form], DEVICE)
    optimizer = ms.AdamW(net.parameters(), lr=1e-3, in_backward=True, capturable=True, **options)
    torch.manual_seed(7)
    x = torch.randn(32, 16, device=DEVICE)

    def step():
        with torch.autocast(DEVICE, autocast, enabled=autocast is not None):
            loss = net(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return net, step


@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=str)
@every_form
def test_replays_are_steps(form, autocast):
    """The random numbers of 5 replays are those of 5 steps: the runs go the same way."""
    # Gradients that are 0 but for rounding, as of a bias before a batch norm, make no step with it:
    # with a small one they make steps of lr, in directions that any other rounding turns around.
    options = {"eps": 1e-3}
    captured_net, step = make_step(form, autocast, **options)
    torch.manual_seed(11)
    replay, captured_loss = capture(step, warmup=3)
    losses = []
    for _ in range(5):
        loss = replay()
        losses.append((captured_loss if loss is None else loss).clone())
    after = torch.rand(4, device=DEVICE)

    net, step = make_step(form, autocast, **options)
    torch.manual_seed(11)
    expected = [step() for _ in range(8)][3:]
    expected_after = torch.rand(4, device=DEVICE)
    # Equal numbers for equal offsets. A product of matrices may be summed in another order in a
    # graph, whose workspace is its own; another dropout mask would change losses by percents.
    assert torch.equal(after, expected_after)
    tolerance = 1e-5 if autocast is None else 1e-2
    for a, b in zip(losses, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=0)
    assert len({loss.item() for loss in losses}) == 5
    found, wanted = values(captured_net), values(net)
    for name in found:
        torch.testing.assert_close(
            found[name], wanted[name], rtol=tolerance, atol=3 * tolerance, msg=name
        )
        if name.endswith("num_batches_tracked"):
            assert found[name].item() == 8


@every_form
def test_forward_and_recompute_draw_the_same_in_every_replay(form):
    """Three regions, recomputed last to first; what each run draws goes into memory of its own."""
    size = 1000
    kept = torch.zeros(3, 2, size, device=DEVICE)
    x = torch.ones(size, device=DEVICE, requires_grad=True)
    w = torch.ones(size, device=DEVICE, requires_grad=True)

    def region(number):
        def function(a):
            drawn = torch.rand(size, device=DEVICE)
            with torch.no_grad():
                kept[number, int(ms.is_recomputing())].copy_(drawn)
            return (a * w * drawn).sin() * F.dropout(w, 0.5)

        return function

    def step():
        value = x
        for number in range(3):
            value = FORMS[form](region(number), 1, value, w)
        value.sum().backward()
        drawn_after = torch.rand(size, device=DEVICE)
        x.grad = w.grad = None
        return drawn_after

    torch.manual_seed(3)
    replay, captured_after = capture(step, warmup=2)
    for seed in (20, 21, 20):
        torch.manual_seed(seed)
        after = [replay() for _ in range(2)][-1]
        after = captured_after if after is None else after
        assert torch.equal(kept[:, 0], kept[:, 1])
        # As step by step: a draw of each region and its dropout's, then the one after backward.
        torch.manual_seed(seed)
        for _ in range(2):
            expected = []
            for _ in range(3):
                expected.append(torch.rand(size, device=DEVICE))
                F.dropout(w.detach(), 0.5)
            expected_after = torch.rand(size, device=DEVICE)
        assert torch.equal(kept[:, 0], torch.stack(expected))
        assert torch.equal(after, expected_after)


@needs_cuda
@every_form
def test_replays_do_not_synchronise(form):
    """Inside a capture waiting is an error of CUDA's own."""
    net, step = make_step(form)
    replay, _ = capture(step, warmup=1)
    with no_synchronisation():
        replay()
        step()
    assert all(value.isfinite().all() for value in values(net).values())


@needs_kernels
@every_form
def test_two_graphs_of_one_generator(form):
    """Each with its own place in the generator's numbers; they take turns."""
    kept = torch.zeros(2, 2, 100, device="cuda")
    x = torch.ones(100, device="cuda", requires_grad=True)

    def step(number):
        def function(a):
            drawn = torch.rand(100 * (number + 1), device="cuda")[:100]
            with torch.no_grad():
                kept[number, int(ms.is_recomputing())].copy_(drawn)
            return (a * drawn).sin()

        torch.rand(7, device="cuda")
        FORMS[form](function, 1, x).sum().backward()
        x.grad = None

    replays = [capture(lambda n=n: step(n))[0] for n in range(2)]
    seen = []
    for number in (0, 1, 1, 0, 0):
        replays[number]()
        torch.cuda.synchronize()
        assert torch.equal(kept[number, 0], kept[number, 1])
        seen.append(kept[number, 0].clone())
    assert not any(torch.equal(a, b) for i, a in enumerate(seen) for b in seen[:i])


@needs_kernels
@pytest.mark.parametrize("form", ["checkpoint", "CheckpointFunction"])
def test_forward_and_backward_in_different_graphs_are_refused(form):
    """The second graph would draw other numbers. Nothing is left of the attempt."""
    linear = nn.Linear(8, 8, device="cuda")
    x = torch.randn(4, 8, device="cuda", requires_grad=True)

    def forward():
        return FORMS[form](lambda a: F.dropout(linear(a), 0.5), 1, x, *linear.parameters()).sum()

    with another_stream():
        forward().backward()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = forward()
    state = torch.cuda.get_rng_state()
    with pytest.raises(RuntimeError, match="Capture forward and backward in one graph"):
        output.backward()
    assert torch.equal(state, torch.cuda.get_rng_state())
    torch.rand(3, device="cuda")  # the generator is at work again


@needs_cuda
@pytest.mark.parametrize("form", ["checkpoint", "CheckpointFunction"])
def test_without_random_numbers_graphs_may_be_different(form):
    """torch.cuda.make_graphed_callables captures forward and backward apart."""
    net = network(FORMS[form], "cuda", p=0.0, norm=nn.LayerNorm)
    for block in net[:-1]:
        block.p = 0.0
    other = network(FORMS[form], "cuda", p=0.0, norm=nn.LayerNorm)
    x = torch.randn(8, 16, device="cuda", requires_grad=True)
    graphed = torch.cuda.make_graphed_callables(other, (x.detach().clone().requires_grad_(),))
    for run in (net, graphed):
        run(x).square().sum().backward()
    assert_same_values(
        {n: p.grad for n, p in net.named_parameters()},
        {n: p.grad for n, p in other.named_parameters()},
    )
