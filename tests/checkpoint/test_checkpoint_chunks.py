"""checkpoint(chunks=) against plain autograd: values, gradients, what is cut and put together."""

from collections import namedtuple
from dataclasses import dataclass

import chunk_programs as programs
import pytest
import torch
from chunk_programs import MLP, chunked, in_pieces
from helpers import assert_equal, leaf, plain
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import memsave_ext as ms


def gradients(outputs, tensors, **options):
    outputs = [o for o in outputs if o.requires_grad]
    if not outputs:
        return [None] * len(tensors)
    weights = [torch.linspace(-1, 1, o.numel(), dtype=o.dtype).reshape(o.shape) for o in outputs]
    return torch.autograd.grad(outputs, tensors, weights, allow_unused=True, **options)


@given(
    steps=programs.STEPS,
    outputs=st.integers(1, 3),
    rows=st.integers(1, 9),
    chunks=st.integers(1, 6),
    early_stop=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(max_examples=200)
def test_random_programs_equal_their_pieces(steps, outputs, rows, chunks, early_stop, seed):
    """Bitwise, in float32, random numbers included."""
    results = []
    for run, nest in ((in_pieces, plain), (chunked, ms.checkpoint)):
        torch.manual_seed(seed)
        x, y, leaves, computed = programs.tensors(rows, torch.float32)
        function = programs.build(steps, outputs, nest, leaves, computed)
        options = {"early_stop": early_stop} if run is chunked else {}
        out = run(function, x, y, chunks=chunks, **options)
        after = torch.rand(2)
        first = gradients(out, (x, *leaves), retain_graph=True)
        again = gradients(out, (x, *leaves))
        results.append((*out, after, *first, *again))
    assert_equal(*results)


@given(
    steps=programs.STEPS.map(lambda steps: [s for s in steps if s[0] not in programs.DRAWING]),
    outputs=st.integers(1, 3),
    rows=st.integers(1, 9),
    chunks=st.integers(1, 6),
    seed=st.integers(0, 99),
)
@settings(max_examples=200)
def test_random_programs_equal_the_whole(steps, outputs, rows, chunks, seed):
    """In float64: one matrix product of all rows rounds otherwise than several."""
    results = []
    for run, nest in ((plain, plain), (chunked, ms.checkpoint)):
        torch.manual_seed(seed)
        x, y, leaves, computed = programs.tensors(rows, torch.float64)
        function = programs.build(steps, outputs, nest, leaves, computed)
        out = run(function, x, y, **({"chunks": chunks} if run is chunked else {}))
        results.append([*out, *gradients(out, (x, *leaves))])
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("chunks", [1, 2, 3, 7, 8, 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_module_in_uneven_pieces(chunks, dtype):
    net, x = MLP(dtype=dtype), leaf(8, 6, dtype=dtype)
    tensors = (x, *net.parameters())
    out = ms.checkpoint(net, x, chunks=chunks)
    seen = []
    ms.checkpoint(lambda a: seen.append(len(a)) or net(a), x.detach(), chunks=chunks)
    assert sum(seen) == 8 and len(seen) == min(chunks, 8) and max(seen) - min(seen) <= 1
    expected = gradients([net(x)], tensors)
    torch.testing.assert_close(out, net(x))
    torch.testing.assert_close(gradients([out], tensors), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dim", [0, 1, 2, -1, -2])
def test_each_dimension(dim):
    x, bias = leaf(4, 5, 6), leaf(())
    tensors = x, bias
    out = ms.checkpoint(lambda a: (a.sin() + bias).exp(), x, chunks=3, chunk_dim=dim)
    assert_equal([out], [(x.sin() + bias).exp()])
    torch.testing.assert_close(
        gradients([out], tensors), gradients([(x.sin() + bias).exp()], tensors)
    )


def shapes(*args, chunks=2, **options):
    """The shapes that each piece was given, of positional and keyword arguments."""
    seen = []

    def function(*values, **named):
        values = *values, *named.values()
        seen.append([tuple(v.shape) if isinstance(v, torch.Tensor) else v for v in values])

    ms.checkpoint(function, *args, chunks=chunks, **options)
    return seen


def test_tensors_of_the_first_ones_size_are_cut():
    x, mask, table = torch.ones(4, 3), torch.ones(4, dtype=torch.bool), torch.ones(5, 3)
    weight, scale = nn.Parameter(torch.ones(4, 3)), torch.ones(())
    found = shapes("name", x, mask, table, weight, None, scale, [x], other=torch.ones(4, 1), k=2)
    expected = ["name", (2, 3), (2,), (5, 3), (4, 3), None, (), [x], (2, 1), 2]
    assert [str(piece) for piece in found] == [str(expected)] * 2


def test_a_parameter_is_not_what_sizes_are_compared_with():
    found = shapes(nn.Parameter(torch.ones(4, 3)), torch.ones(6, 3), torch.ones(4, 3))
    assert found == [[(4, 3), (3, 3), (4, 3)]] * 2


def test_keywords_alone():
    assert shapes(a=torch.ones(3, 2), b=torch.ones(3)) == [[(2, 2), (2,)], [(1, 2), (1,)]]


def test_named_arguments_alone_are_cut():
    x, same, weight = torch.ones(4, 3), torch.ones(4, 3), nn.Parameter(torch.ones(4, 2))
    assert shapes(x, same, chunk_args=(0,)) == [[(2, 3), (4, 3)]] * 2
    assert shapes(x, weight, k=same, chunk_args=["k", 1]) == [[(4, 3), (2, 2), (2, 3)]] * 2
    negative = shapes(torch.ones(2, 4), torch.ones(4), chunk_dim=-1)
    assert negative == [[(2, 2), (2,)]] * 2


def test_no_row_is_one_piece():
    net, x = MLP(), torch.ones(0, 6, requires_grad=True)
    out = ms.checkpoint(net, x, chunks=4)
    out.sum().backward()
    assert out.shape == x.grad.shape == (0, 6)


@dataclass
class Output:
    hidden: torch.Tensor
    extras: list
    scale: float = 2.0


Pair = namedtuple("Pair", "left right")


def test_structures_of_results():
    x, w = leaf(5, 3), leaf(3)

    def function(a):
        value = a * w
        nested = {"a": value.exp(), "rest": (None, 1.5, [value.argmax(1)])}
        return Output(value.sin(), [Pair(value, a), nested], 3.0)

    def program(run):
        out = run(function, x)
        assert type(out) is Output and out.scale == 3.0
        pair, nested = out.extras
        assert type(pair) is Pair and nested["rest"][:2] == (None, 1.5)
        tensors = out.hidden, *pair, nested["a"], nested["rest"][2][0]
        return [*tensors, *gradients(tensors, (x, w))]

    found = program(lambda f, a: chunked(f, a, chunks=2))
    torch.testing.assert_close(found, program(plain))


def test_results_may_have_a_multiple_of_the_rows():
    x = leaf(6, 4, 3)
    out = ms.checkpoint(lambda a: a.reshape(-1, 3).exp(), x, chunks=4)
    assert_equal([out], [x.reshape(-1, 3).exp()])


def test_a_tensor_given_twice_and_returned():
    x = leaf(5, 2)
    out, same = ms.checkpoint(lambda a, b: (a * b, a), x, x, chunks=3)
    assert_equal([same], [x])
    torch.testing.assert_close(gradients([out, same], [x]), gradients([x * x, x], [x]))
    out.add_(1)  # a tensor of its own


def test_checkpoint_modules_and_sequential():
    nets = [nn.Sequential(MLP(), nn.Tanh(), MLP()) for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    x = torch.randn(7, 6)
    handle = ms.checkpoint_modules(nets[1], MLP, chunks=3)
    seen = []
    nets[1][0].up.register_forward_hook(lambda m, a, o: seen.append(len(o)))
    for net in nets:
        net(x).square().sum().backward()
    assert seen == [3, 2, 2, 2, 2, 3]
    for p, q in zip(*(net.parameters() for net in nets), strict=True):
        torch.testing.assert_close(p.grad, q.grad)
    handle.remove()
    assert ms.checkpoint_sequential(nets[0], 2, x, chunks=2).shape == (7, 6)


class Adds(nn.Module):
    def __init__(self):
        super().__init__()
        self.seen = []

    def forward(self, table, x):
        self.seen.append((len(table), len(x)))
        return x + table.sum()


def test_positions_of_checkpoint_modules_do_not_count_the_module():
    block = Adds()
    ms.checkpoint_modules(block, Adds, chunks=2, chunk_args=(1,))
    block(torch.ones(4), torch.ones(4))
    assert block.seen == [(4, 2), (4, 2)]


def test_without_a_graph():
    net, x = MLP(), torch.randn(5, 6)
    with torch.no_grad():
        out = ms.checkpoint(net, x, chunks=2)
        torch.testing.assert_close(out, net(x))
    assert not out.requires_grad
    with torch.inference_mode():
        assert ms.checkpoint(net, x, chunks=2).is_inference()


def test_compiled():
    net, x = MLP(), leaf(8, 6)
    tensors = (x, *net.parameters())

    @torch.compile(backend="aot_eager", fullgraph=True)
    def step(x):
        return ms.checkpoint(net, x * 2, chunks=3).sin()

    found = gradients([step(x)], tensors)
    torch.testing.assert_close(found, gradients([net(x * 2).sin()], tensors))
