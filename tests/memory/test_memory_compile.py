"""Compiled models under memory.track() and remat(model): their graphs stay those of before."""

from contextlib import nullcontext

import pytest
import torch
from sampling import share
from torch import nn
from torch._dynamo.testing import CompileCounter

import memsave_ext as ms
from memsave_ext import _native


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return x + self.b(self.a(x).relu())


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def whole(net, **options):
    return torch.compile(net, **options)


def in_place(net, **options):
    net.compile(**options)
    return net


def blocks_in_place(net, **options):
    for block in net.blocks:
        block.compile(**options)
    return net


def blocks_replaced(net, **options):
    for i, block in enumerate(net.blocks):
        net.blocks[i] = torch.compile(block, **options)
    return net


def a_function(net, **options):
    return torch.compile(lambda x: net(x) + 1, **options)


def with_a_hook_of_the_user(net, **options):
    net.blocks[0].a.register_forward_hook(lambda module, args, result: result * 2)
    return torch.compile(net, **options)


KINDS = [
    whole,
    in_place,
    blocks_in_place,
    blocks_replaced,
    a_function,
    with_a_hook_of_the_user,
]
AROUND = [ms.memory.track]
if _native.available:
    AROUND.append(ms.remat)


@pytest.fixture(autouse=True)
def _forget():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Run:
    """Runs a compiled net, and says how many graphs and operators were compiled meanwhile."""

    def __init__(self, kind, fullgraph=True):
        torch.manual_seed(0)
        self.net = Net()
        self.counter = CompileCounter()
        self.compiled = kind(self.net, backend=self.counter, fullgraph=fullgraph)
        self.x = torch.randn(3, 8)

    def __call__(self):
        before = self.counter.frame_count, self.counter.op_count
        self.net.zero_grad()
        self.compiled(self.x).square().sum().backward()
        self.grads = [p.grad.clone() for p in self.net.parameters()]
        return self.counter.frame_count - before[0], self.counter.op_count - before[1]


@pytest.mark.each_value
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fullgraph", [True, False])
@pytest.mark.parametrize("around", AROUND)
def test_graphs_are_those_of_an_ordinary_run(kind, fullgraph, around):
    ordinary = Run(kind, fullgraph)
    graphs = ordinary()
    assert graphs[0] in (1, 2)
    assert graphs[1] >= 8

    compiled_inside = Run(kind, fullgraph)
    with around(compiled_inside.net):
        assert [compiled_inside(), compiled_inside()] == [graphs, (0, 0)]
    assert all(map(torch.equal, compiled_inside.grads, ordinary.grads))
    compiled_before = Run(kind, fullgraph)
    compiled_before()
    with around(compiled_before.net):
        again = compiled_before()
        assert compiled_before() == (0, 0)
    assert all(map(torch.equal, compiled_before.grads, ordinary.grads))

    # torch.compile asks a module with hooks for what it runs. That is compiled once more; but remat
    # puts nothing into modules.
    has_hook = kind is with_a_hook_of_the_user
    more = graphs if has_hook and around is ms.memory.track else (0, 0)
    assert again == more
    assert [compiled_inside(), compiled_inside()] == [more, (0, 0)]
    for run in (compiled_inside, compiled_before):
        for _ in range(12):  # more often than torch.compile compiles a function again
            with around(run.net):
                assert run() == (0, 0)
            assert run() == (0, 0)


def made_activations(t):
    return {tensor.module for tensor in t.top(100) if tensor.category == "activations"}


@pytest.mark.parametrize("kind", [whole, in_place])
def test_a_compiled_model_is_seen_from_outside(kind):
    run = Run(kind)
    run()
    with ms.memory.track(run.net) as t:
        for _ in range(2):
            result = run.compiled(run.x)
    assert result.shape == (3, 2)
    assert [step.index for step in t.steps] == [0, 1]
    assert made_activations(t) == {"Net"}


def test_what_torch_compile_returned_can_be_tracked():
    net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    run = Run(lambda _, **options: torch.compile(net, **options))
    run.net = net
    assert run() == (1, 3)
    with ms.memory.track(run.compiled) as t:
        result = run.compiled(run.x)
    assert result.shape == (3, 2)
    assert made_activations(t) == {"Sequential"}
    with ms.memory.track(net):  # torch.compile inlines torch's own modules
        assert run() == (0, 0)


@pytest.mark.parametrize("kind", [blocks_in_place, blocks_replaced])
def test_compiled_parts_have_the_names_they_have_in_the_model(kind):
    run = Run(kind)
    with ms.memory.track(run.net) as t:
        run()
    made = {tensor.module for tensor in t.top(100)}
    assert {"blocks.0", "blocks.1"} <= made
    assert not any(name.startswith("blocks.") and name.count(".") > 1 for name in made)
    if kind is blocks_in_place:
        assert all("_compiled_call_impl" in block.__dict__ for block in run.net.blocks)


def test_compiled_in_the_block():
    """What the user compiles meanwhile stays compiled."""
    net, counter = Net(), CompileCounter()
    x = torch.randn(3, 8)
    with ms.memory.track(net):
        net.compile(backend=counter, fullgraph=True)
        net(x)
        assert counter.frame_count == 1
    net(x)
    assert counter.frame_count == 1
    assert "_compiled_call_impl" in net.__dict__


@pytest.mark.parametrize("first", share([True, False], 2))
def test_a_compiled_training_step(first):
    """Its hooks run beside its graphs: no more graphs, steps are told apart, states are seen."""

    def compiled_step(net):
        counter = CompileCounter()
        optimizer = torch.optim.AdamW(net.parameters(), lr=torch.tensor(1e-3))

        @torch.compile(backend=counter)
        def step():
            net(torch.ones(3, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        return counter, optimizer, step

    def counts(counter):
        return counter.frame_count, counter.op_count

    ordinary, _, step = compiled_step(Net())
    for _ in range(3):
        step()
    net = Net()
    counter, optimizer, step = compiled_step(net)
    if not first:
        step()
    with ms.memory.track(net, optimizer) as t:
        for _ in range(3):
            step()
    assert len(t.steps) == 3
    states = sum(value.nbytes for state in optimizer.state.values() for value in state.values())
    assert states > 0
    assert t.timeline.live[-1, 2] == states
    step()
    assert counts(counter) == counts(ordinary)


@pytest.mark.skipif(not _native.available, reason="it records nothing in pure Python")
@pytest.mark.parametrize("compile_all", [True, False])
def test_remat_module_with_compiled_parts(compile_all):
    run = Run(whole if compile_all else blocks_in_place)
    ordinary = Run(whole if compile_all else blocks_in_place)
    graphs = ordinary()
    handle = ms.remat_module(run.net, by_module=True)
    assert run() == graphs
    assert run() == (0, 0)
    assert all(map(torch.equal, run.grads, ordinary.grads))
    handle.remove()
    assert run()[0] <= 1  # `forward` is guarded on where the whole model was compiled
    assert run() == (0, 0)


@pytest.mark.parametrize("around", AROUND)
def test_exported_in_the_block(around):
    net = Net()
    x = torch.randn(3, 8)
    with around(net):
        exported = torch.export.export(net, (x,))
        strict = torch.export.export(net, (x,), strict=True)
    expected = net(x)
    for program in (exported, strict):
        assert sum(node.op == "call_function" for node in program.graph.nodes) >= 9
        assert torch.equal(program.module()(x), expected)


def test_blocks_that_overlap():
    """The first to begin is the first to end."""
    run = Run(whole)
    first, second = ms.memory.track(run.net), nullcontext()
    if _native.available:
        second = ms.memory.track(run.net)
    first.__enter__()
    run()
    second.__enter__()
    run()
    first.__exit__(None, None, None)
    assert run() == (0, 0)
    second.__exit__(None, None, None)
    assert run() == (0, 0)
    assert all("_compiled_call_impl" not in m.__dict__ for m in run.net.modules())
