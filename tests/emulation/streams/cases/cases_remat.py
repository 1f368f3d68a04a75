"""Blocks of rematerialization on several streams, run again on those of backward."""

import contextlib
import gc
import itertools
import random

import fake_cuda
import pytest
import torch
from helpers import run_threads
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend

import memsave_ext as ms
from memsave_ext import _native

DEVICE = "cuda"
KINDS = {"all": {"_everything": True}, "cheap": {}, "budget": {"budget": 0.4}}


@pytest.fixture(autouse=True)
def forget():
    _native.module.remat_forget()


class Net(nn.Module):
    """Branches on streams chosen at random, which read the same and know nothing of each other.

    What they make and read is ordered and recorded, as a program must.

    The sum saves nothing, so that the first to compute the trunk again is a branch.
    """

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4)).to(DEVICE)
        self.seed = seed

    def forward(self, x):
        chance = random.Random(self.seed)
        main = torch.cuda.current_stream()
        streams = [main, torch.cuda.Stream(), torch.cuda.Stream()]
        x = F.gelu(self.layers[0](x)).tanh()
        chosen = [chance.choice(streams) for _ in self.layers[1:]]
        for stream in chosen:
            stream.wait_stream(main)
            x.record_stream(stream)
        made = []
        for stream, layer in zip(chosen, self.layers[1:], strict=True):
            with torch.cuda.stream(stream):
                y = layer(x.sigmoid() * x).tanh() * x
                made.append(F.dropout(y, 0.2) if chance.random() < 0.3 else y)
        for stream, y in zip(chosen, made, strict=True):
            main.wait_stream(stream)
            y.record_stream(main)
        return torch.stack(made).sum()


def gradients(net, x):
    net.zero_grad()
    net(x).sum().backward()
    return [p.grad.cpu() for p in net.parameters()]


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_on_several_streams(seed, kind):
    net = Net(seed)
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(seed)).to(DEVICE)
    for step in range(3):
        torch.cuda.manual_seed(step)
        expected = gradients(net, x)
        torch.cuda.manual_seed(step)
        net.zero_grad()
        with ms.remat(**KINDS[kind]):
            loss = net(x)
        loss.backward()
        for param, gradient in zip(net.parameters(), expected, strict=True):
            assert torch.equal(param.grad.cpu(), gradient)


def test_plans_follow_times_of_events_without_waiting(seed):
    """The host waits for nothing; when it meets events that are past, there is a plan."""
    torch.manual_seed(seed)
    net = nn.Sequential(
        *(m for _ in range(4) for m in (nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)))
    )
    net.to(DEVICE)
    x = torch.randn(64, 8, device=DEVICE)
    plans = []
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(6):
            net.zero_grad()
            with ms.remat(budget=0.5) as block:
                loss = net(x).square().mean()
            loss.backward()
            plans.append(block._recorder.budget()["plan"])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert plans[0] is None and plans[-1] is not None
    _peak, seconds = plans[-1]
    assert 0 < seconds < 1


def test_memory_that_an_operator_frees_itself():
    x = torch.ones(64, device=DEVICE, requires_grad=True)
    with ms.remat(budget="1GB") as block:
        y = x.exp()
        before = torch.cuda.memory_allocated()
        fake_cuda.allocate_for_a_moment(1 << 20)
        loss = y.sin().sum()
    loss.backward()
    assert before + (1 << 20) <= block.peak < before + (1 << 20) + 4096


def test_the_allocator_is_asked_once_a_step():
    """It locks itself and copies all of its figures for each answer."""
    x = torch.ones(64, device=DEVICE, requires_grad=True)
    asked = []
    for operators in (10, 110):
        for _ in range(4):
            before = fake_cuda.questions()
            with ms.remat(budget=0.6) as block:
                y = x
                for _ in range(operators):
                    y = y.sin()
                count = fake_cuda.questions() - before
            y.sum().backward()
        assert block._recorder.budget()["plan"] is not None
        asked.append(count)
    assert asked == [1, 1]  # after that it says what it gives


@pytest.mark.parametrize("budget", [0.5, "1TB"])
def test_a_known_step_times_nothing(budget):
    """Two events for each operator are host time; the times of earlier steps stay. That holds for
    the first operators, too, although what they save is what tells which step it is."""
    net = nn.Sequential(*(m for _ in range(8) for m in (nn.Linear(32, 32), nn.GELU()))).to(DEVICE)
    x = torch.randn(256, 32, device=DEVICE)

    def events_of(block):
        before = fake_cuda.recorded_events()
        with block:
            loss = net(x).sum()
        loss.backward()
        return fake_cuda.recorded_events() - before

    assert events_of(contextlib.nullcontext()) == 0
    blocks = [ms.remat(budget=budget) for _ in range(8)]
    recorded = [events_of(block) for block in blocks]
    assert (blocks[-1].figures().dropped_bytes > 0) == (budget == 0.5)
    assert recorded[0] > 2 and recorded[-1] == 0, recorded


@pytest.mark.parametrize("kind", KINDS)
def test_a_captured_step(seed, kind):
    """Whether or not the times of earlier steps have been read, the capture asks for none."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU()).to(DEVICE)
    x = torch.randn(64, 8, device=DEVICE)

    def step():
        with ms.remat(**KINDS[kind]) as block:
            loss = net(x).square().mean()
        return torch.autograd.grad(loss, net.parameters()), block

    plain = torch.autograd.grad(net(x).square().mean(), net.parameters())
    for _ in range(seed % 8):
        step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        grads, block = step()
    graph.replay()
    assert block.figures().dropped_bytes > 0 or kind != "all"
    for ours, expected in zip(grads, plain, strict=True):
        assert torch.equal(ours.cpu(), expected.cpu())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("retry", [False, True])
def test_a_device_that_is_full(seed, kind, retry):
    """The allocator lets blocks drop memory before it gives up, in forward and in backward."""
    if kind == "all" or (kind == "cheap" and not retry):
        pytest.skip("keeps nothing to drop, or fits as it is")
    torch.manual_seed(seed)
    net = nn.Sequential(*(m for _ in range(8) for m in (nn.Linear(32, 32), nn.GELU()))).to(DEVICE)
    x = torch.randn(256, 32, device=DEVICE)
    options = {"budget": "1TB"} if kind == "budget" else {}
    for _ in range(3):
        expected = gradients(net, x)
        net.zero_grad()
        most = torch.cuda.memory_allocated() + 10 * x.nbytes
        with fake_cuda.limited_memory(most):
            try:
                with ms.remat(retry=retry, **options) as block:
                    loss = net(x).sum()
                loss.backward()
            except torch.OutOfMemoryError:
                assert not retry
                continue
        assert retry
        assert block.figures().given_back_bytes > 0
        for param, gradient in zip(net.parameters(), expected, strict=True):
            assert torch.equal(param.grad.cpu(), gradient)


def test_what_was_refused_is_given_room_when_it_is_asked_for_again(seed):
    """The allocator does not say how much it is asked for: most of a device may be free."""
    torch.manual_seed(seed)
    net = nn.Sequential(*(m for _ in range(8) for m in (nn.Linear(32, 32), nn.GELU()))).to(DEVICE)
    x = torch.randn(256, 32, device=DEVICE)
    expected = gradients(net, x)
    net.zero_grad()
    most = 2 * torch.cuda.memory_allocated() + 40 * x.nbytes
    with fake_cuda.limited_memory(most):
        with ms.remat(retry=True, budget="1TB") as block:
            loss = net(x).sum()
        free = most - torch.cuda.memory_allocated()
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(free + 2 * x.nbytes, dtype=torch.uint8, device=DEVICE)
        assert block.figures().given_back_bytes == 0
        torch.empty(free + 2 * x.nbytes, dtype=torch.uint8, device=DEVICE)
        assert block.figures().given_back_bytes > 0
        loss.backward()
    for param, gradient in zip(net.parameters(), expected, strict=True):
        assert torch.equal(param.grad.cpu(), gradient)


def test_no_memory_is_freed_by_the_allocator_while_history_is_recorded():
    """It would want the GIL for Python's stacks, with its own lock."""
    net = nn.Sequential(*(m for _ in range(8) for m in (nn.Linear(32, 32), nn.GELU()))).to(DEVICE)
    x = torch.randn(256, 32, device=DEVICE)
    with fake_cuda.limited_memory(torch.cuda.memory_allocated() + 10 * x.nbytes):
        refused = pytest.raises(torch.OutOfMemoryError)
        with fake_cuda.recorded_history(), refused, ms.remat(retry=True, budget="1TB"):
            net(x)
        with ms.remat(retry=True, budget="1TB") as block:
            net(x)
        assert block.figures().given_back_bytes > 0


def test_a_device_that_is_full_and_asked_by_two_threads():
    """Neither the lock of the allocator nor the blocks' keeps the other thread waiting."""
    torch.manual_seed(0)
    net = nn.Sequential(*(m for _ in range(8) for m in (nn.Linear(32, 32), nn.GELU()))).to(DEVICE)
    x = torch.randn(256, 32, device=DEVICE)
    expected = gradients(net, x)
    results = []

    def work():
        for _ in range(20):
            with ms.remat(retry=True, budget="1TB"):
                loss = net(x).sum()
            grads = torch.autograd.grad(loss, net.parameters())
            results.append([g.cpu() for g in grads])

    with fake_cuda.limited_memory(torch.cuda.memory_allocated() + 40 * x.nbytes):
        run_threads(lambda _: work(), 2)
    assert len(results) == 40
    for grads in results:
        assert all(map(torch.equal, grads, expected))


class Attention(nn.Module):
    def __init__(self, head, mask):
        super().__init__()
        self.head, self.mask = head, mask
        self.norm = nn.LayerNorm(4 * head)
        self.make, self.join = nn.Linear(4 * head, 12 * head), nn.Linear(4 * head, 4 * head)

    def forward(self, x):
        made = self.make(self.norm(x)).unflatten(-1, (4, 3 * self.head)).transpose(1, 2)
        options = {"is_causal": True} if self.mask is None else {"attn_mask": self.mask}
        made = F.scaled_dot_product_attention(*made.chunk(3, -1), **options)
        return x + self.join(made.transpose(1, 2).flatten(-2))


def a_mask(kind, rows):
    if kind == "none":
        return None
    mask = torch.ones(rows, rows, dtype=torch.bool).tril().to(DEVICE)
    if kind == "bools":
        return mask
    return torch.zeros(rows, rows, device=DEVICE).masked_fill(~mask, -1e9)


KERNELS_AND_MASKS = [  # flash attention takes no mask
    *itertools.product(["MATH", "EFFICIENT_ATTENTION"], ["none", "bools", "added"]),
    ("FLASH_ATTENTION", "none"),
]


@pytest.mark.parametrize(("kernel", "mask"), KERNELS_AND_MASKS)
@pytest.mark.parametrize(("rows", "head"), [(32, 8), (30, 6)])
def test_a_first_step_of_attention_is_planned(rows, head, kernel, mask):
    """Where torch chooses the kernel that the run ahead takes, whose process cannot ask a card.
    Where it chooses another one, that is noticed."""
    gc.collect()  # blocks of steps that have raised count as long as they are there
    torch.manual_seed(0)
    net = nn.Sequential(*(Attention(head, a_mask(mask, rows)) for _ in range(4))).to(DEVICE)
    x = torch.randn(8, rows, 4 * head).to(DEVICE)
    with fake_cuda.attention_by(getattr(SDPBackend, kernel)):
        expected = gradients(net, x)
        block = ms.remat_module(net, budget=0.5)
        found = gradients(net, x)
    report = " ".join(block.report().split())
    assert block.figures().dropped_bytes > 0
    assert all(map(torch.equal, found, expected))
    if kernel != ("EFFICIENT_ATTENTION" if head % 4 == 0 else "MATH"):
        assert "went differently than on fake tensors" in report, report
        return
    assert "of a budget of" in report, report
    assert block.peak <= 1.02 * max(block.budget, block.least), report
