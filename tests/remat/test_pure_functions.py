"""Functions of autograd that are declared to be pure: what they make is computed again."""

import contextlib
import gc
import signal
import threading
import uuid
import weakref

import pytest
import torch
from remat_programs import bits, everything
from torch import nn
from torch.autograd import Function

import memsave_ext as ms
from memsave_ext import CheckpointError

FAILED = "not the same when run twice, or not as its schema says"


@pytest.fixture(autouse=True)
def wide_reports(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")  # else texts are broken into lines


W = nn.Parameter(torch.randn(16, 16))
X = torch.randn(16, 16)


def unseen(x, factor):
    """A kernel that no dispatcher sees."""
    y = torch.zeros_like(x)
    y.numpy()[...] = x.detach().numpy() * factor
    return y


class Old(Function):
    """Saves an input, its output and an intermediate result."""

    calls = 0

    @staticmethod
    def forward(ctx, x, factor, y):
        Old.calls += 1
        middle = unseen(x, factor)
        out = middle.sin() * y
        ctx.save_for_backward(y, middle, out)
        ctx.factor = factor
        return out

    @staticmethod
    def backward(ctx, grad):
        y, middle, out = ctx.saved_tensors
        return grad * y * middle.cos() * ctx.factor, None, grad * middle.sin() + 0 * out


class New(Function):
    """With a context of its own."""

    calls = 0

    @staticmethod
    def forward(x, factor, y):
        New.calls += 1
        middle = unseen(x, factor)
        return middle.sin() * y, middle

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[2], output[1])
        ctx.factor = inputs[1]
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx, grad, _):
        y, middle = ctx.saved_tensors
        return grad * y * middle.cos() * ctx.factor, None, grad * middle.sin()


def run(function, block, times=1, factor=2.0):
    with block:
        y = X * W
        for _ in range(times):
            y = function.apply((y * W).sin(), factor, y.cos())
            y = (y[0] if isinstance(y, tuple) else y).sin()
    return [y.detach(), *torch.autograd.grad(y.sum(), [W])]


def same(ours, plain):
    return all((bits(a) == bits(b)).all() for a, b in zip(ours, plain, strict=True))


def declared(*functions, **options):
    return ms.remat(pure=list(functions), _everything=True, **options)


def rows(block, function, kind="saved"):
    name = f"::{function.__qualname__}"
    return [row for row in getattr(block.figures(), kind) if name in row.operator]


@pytest.mark.parametrize("function", [Old, New])
def test_what_it_makes_is_computed_again(function):
    plain = run(function, contextlib.nullcontext(), 3)
    undeclared, block = everything(), declared(function)
    assert same(run(function, undeclared, 3), plain)
    before = function.calls
    own = function.__dict__["forward"]
    assert same(run(function, block, 3), plain)
    assert function.__dict__["forward"] is own
    assert function.calls - before in (3 + 3, 3 + 3 + 1)  # 3 again, and its proof
    assert sum(row.count for row in rows(block, function, "recomputed")) == 3
    figures = block.figures()
    assert figures.kept_bytes == 0 < undeclared.figures().kept_bytes
    made = sum(row.bytes for row in rows(block, function) if row.verdict == "dropped")
    assert made == 3 * 2 * X.nbytes  # its outputs, which sin saves, and what lies between


def test_numbers_of_a_call_are_proved_by_themselves():
    for factor, runs in ((5.0, 3), (5.0, 2), (6.0, 3)):
        before = Old.calls
        run(Old, declared(Old), factor=factor)
        assert Old.calls - before == runs


def test_it_is_as_it_was_after_an_exception():
    own = Old.__dict__["forward"]
    block = declared(Old)
    with pytest.raises(TypeError), block:
        Old.apply(X * W, "no number", X)
    assert Old.__dict__["forward"] is own
    with declared(Old):
        with pytest.raises(TypeError), declared(Old):
            Old.apply(X * W, "no number", X)
        assert Old.__dict__["forward"] is not own
    assert Old.__dict__["forward"] is own
    assert same(run(Old, declared(Old)), run(Old, contextlib.nullcontext()))


def test_a_class_that_inherits_its_forward():
    class Heir(Old):
        pass

    plain = run(Heir, contextlib.nullcontext())
    assert same(run(Heir, declared(Heir)), plain)
    assert "forward" not in Heir.__dict__


class Drops(Function):
    """Draws random numbers; its mask is between input and output."""

    @staticmethod
    def forward(ctx, x, factor, y):
        mask = torch.rand_like(x) < 0.5
        ctx.save_for_backward(mask, y)
        ctx.factor = factor
        return x * mask * y * factor

    @staticmethod
    def backward(ctx, grad):
        mask, y = ctx.saved_tensors
        return grad * mask * y * ctx.factor, None, None


def test_random_numbers_are_drawn_again():
    states = []
    for block in (contextlib.nullcontext(), declared(Drops), declared(Drops)):
        torch.manual_seed(4)
        states.append([*run(Drops, block, 3), torch.get_rng_state()])
        assert same(states[-1], states[0])
    assert sum(row.count for row in rows(block, Drops, "recomputed")) == 3


class Casts(Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx, x, factor, y):
        out = x @ y
        ctx.save_for_backward(out, y)
        return out * factor

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx, grad):
        out, y = ctx.saved_tensors
        return (grad * out.sin()).float() @ y.t().float(), None, None


def test_autocast_is_as_in_the_forward():
    def program(block):
        with torch.autocast("cpu", torch.bfloat16):
            return run(Casts, block)

    block = declared(Casts)
    assert same(program(block), program(contextlib.nullcontext()))
    assert sum(row.count for row in rows(block, Casts, "recomputed")) == 1


class Attribute(Function):
    """Keeps on ctx what it does not save."""

    @staticmethod
    def forward(ctx, x, factor, y):
        ctx.middle = unseen(x, factor)
        return ctx.middle.sin()

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.middle.cos() * 2, None, None


class Inner(Function):
    """With a graph of its own."""

    @staticmethod
    def forward(ctx, x, factor, y):
        with torch.enable_grad():
            inner = x.detach().requires_grad_()
            out = (inner.sin() * inner * factor).tanh()
        ctx.graph = inner, out
        return out.detach() * 1

    @staticmethod
    def backward(ctx, grad):
        inner, out = ctx.graph
        return torch.autograd.grad(out, inner, grad, retain_graph=True)[0], None, None


@pytest.mark.parametrize("function", [Attribute, Inner])
def test_what_lies_on_ctx_stays_there(function):
    block = declared(function)
    assert same(run(function, block, 2), run(function, contextlib.nullcontext(), 2))
    assert sum(row.count for row in rows(block, function, "recomputed")) == 2


class State:
    count = 0


def stateful(kind):
    class Stateful(Function):
        @staticmethod
        def forward(ctx, x, factor, y):
            State.count += 1
            ctx.save_for_backward(y)
            if kind == "counter":
                return unseen(x, State.count)
            if kind == "raises" and State.count > 1:
                raise ValueError("a second time")
            if kind == "writes" and State.count > 1:
                x.detach().numpy()[...] *= 2
            if kind == "dirty":
                x.mul_(3)
                ctx.mark_dirty(x)
                return x
            if kind == "input":
                return x
            if kind == "cache":
                State.cache = getattr(State, "cache", None) or unseen(x, 3)
                return State.cache
            return unseen(x, 3)

        @staticmethod
        def backward(ctx, grad):
            return grad * 3, None, None

    return Stateful


@pytest.mark.parametrize("kind", ["counter", "raises", "writes", "dirty", "input", "cache"])
def test_what_is_not_pure_is_kept(kind):
    function = stateful(kind)
    results = []
    for block in (contextlib.nullcontext(), declared(function)):
        State.count = 0
        State.cache = None
        results.append(run(function, block))
    assert same(*results)
    assert not rows(block, function, "recomputed")
    if kind not in ("dirty", "input"):  # which make no memory
        assert [row.verdict for row in rows(block, function)] == [FAILED]


def test_what_changes_after_its_proof_is_raised():
    factor = [2]

    class Changes(Function):
        @staticmethod
        def forward(ctx, x, _, y):
            return unseen(x, factor[0])

        @staticmethod
        def backward(ctx, grad):
            return grad, None, None

    with declared(Changes):
        y = Changes.apply(X * W, None, X).sin()
    factor[0] = 3
    with pytest.raises(CheckpointError, match="Changes.* was computed again and returned other v"):
        y.sum().backward()
    W.grad = None


def test_tensors_in_lists_are_not_followed():
    class Listed(Function):
        @staticmethod
        def forward(ctx, x, others, y):
            return x * others[0]

        @staticmethod
        def backward(ctx, grad):
            return grad, None, None

    others = [torch.randn(16, 16)]
    block = declared(Listed)
    with block:
        y = Listed.apply(X * W, others, X).sin()
    others[0].mul_(2)
    (grad,) = torch.autograd.grad(y.sum(), W)
    assert not rows(block, Listed, "recomputed") and grad.isfinite().all()


def test_threads_declare_the_same():
    plain = run(Old, contextlib.nullcontext(), 2)
    own, wrong = Old.__dict__["forward"], []

    def work():
        for _ in range(20):
            if not same(run(Old, declared(Old), 2), plain):
                wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and Old.__dict__["forward"] is own


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))

    def forward(self, x):
        for layer in self.layers:
            h = layer(x)
            x = Old.apply(h, 2.0, h.cos()).sin()
        return x


def of_a_library(module, writes):
    class SumFn(Function):
        @staticmethod
        def forward(ctx, x):
            if writes:
                x.detach().numpy()[...] *= 2  # stands for a kernel of Triton's
            return x.sum()

        @staticmethod
        def backward(ctx, grad):
            return grad.expand(512, 16)

    SumFn.__module__ = module
    return SumFn


def test_functions_of_two_libraries_that_have_one_name():
    """What was seen of one says nothing of the other."""

    def step(function, block):
        x = torch.linspace(-1, 1, 512 * 16).view(512, 16).requires_grad_()
        with block:
            y = x.sin()
            total = function.apply(y)
            loss = (y * y).sum() + total
        loss.backward()
        return x.grad

    step(of_a_library(uuid.uuid4().hex, False), ms.remat())
    writes = of_a_library(uuid.uuid4().hex, True)
    assert torch.equal(step(writes, ms.remat()), step(writes, contextlib.nullcontext()))


def test_classes_that_were_declared_are_freed():
    def step():
        class Local(Old):
            pass

        with ms.remat(pure=[Local]):
            Local.apply(W, 2.0, X).sum().backward()
        return weakref.ref(Local)

    gone = [step() for _ in range(3)]
    gc.collect()
    assert not any(reference() for reference in gone)


def test_modules_within_a_budget():
    torch.manual_seed(0)
    model, x = Net(), torch.randn(512, 64)

    def step():
        model.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return [loss.detach(), *(p.grad for p in model.parameters())]

    plain = step()
    leasts = []
    for pure in ((), [Old]):
        handle = ms.remat_module(model, budget=0.3, pure=pure)
        for _ in range(4):
            assert same(step(), plain)
        assert handle.peak <= 1.02 * max(handle.budget, handle.least)
        leasts.append(handle.least)
        handle.remove()
    assert leasts[1] < 0.8 * leasts[0]


@pytest.mark.parametrize(
    "pure", [Old, [Old, 3], [nn.Linear], "Old"], ids=["class", "number", "module", "text"]
)
def test_what_is_declared_is_checked(pure):
    for make in (ms.remat, lambda **options: ms.remat_module(Net(), **options)):
        with pytest.raises(TypeError, match="pure must be a list of classes of torch.autograd.F"):
            make(pure=pure)


class Seen(Function):
    """Of operators of torch alone, so that it runs on fake tensors."""

    @staticmethod
    def forward(ctx, x, factor):
        middle = x.sin()
        ctx.save_for_backward(x, middle)
        ctx.factor = factor
        return middle.exp() * factor

    @staticmethod
    def backward(ctx, grad):
        x, middle = ctx.saved_tensors
        return grad * middle.exp() * x.cos() * ctx.factor, None


class OfBoth(nn.Module):
    def __init__(self, operator):
        super().__init__()
        self.operator = operator
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))

    def forward(self, x):
        for layer in self.layers:
            x = self.operator(Seen.apply(layer(x), 0.5)).sin()
        return x.square().mean()


def test_the_first_step_is_planned():
    space = f"tried_{uuid.uuid4().hex}"
    torch.library.define(f"{space}::op", "(Tensor x) -> Tensor")
    torch.library.impl(f"{space}::op", "CPU", lambda x: unseen(x, 3))
    torch.library.register_fake(f"{space}::op", torch.empty_like)
    torch.library.register_autograd(f"{space}::op", lambda ctx, grad: grad * 3)
    torch.manual_seed(0)
    model, x = OfBoth(getattr(torch.ops, space).op), torch.randn(2048, 64)

    def step():
        model.zero_grad()
        loss = model(x)
        loss.backward()
        return [loss.detach(), *(p.grad for p in model.parameters())]

    plain = step()
    handle = ms.remat_module(model, budget=0.1, pure=[Seen])
    for number in range(3):
        assert same(step(), plain)
        assert handle.least is not None  # it has a plan, also the first one
        most = 1.02 * max(handle.budget, handle.least)
        proofs = 2 * x.nbytes + 2**16 if number == 0 else 0
        assert handle.peak <= most + proofs
    recomputed = {row.operator.partition("::")[2] for row in handle.figures().recomputed}
    assert {"op", "Seen"} <= recomputed


def test_compiled_parts_stay_whole():
    compiled = torch.compile(lambda x: Seen.apply(x, 0.5) * 2, backend="eager", fullgraph=True)
    results = []
    for block in (contextlib.nullcontext(), declared(Seen)):
        with block:
            y = compiled(W * X).sin()
        results.append(torch.autograd.grad(y.sum(), [W]))
    assert same(*results)
    assert not rows(block, Seen, "recomputed")


def test_a_graph_that_is_kept_is_computed_again_twice():
    with declared(Old):
        y = Old.apply((X * W).sin(), 2.0, X).sin().sum()
    first = torch.autograd.grad(y, W, retain_graph=True)
    assert same(torch.autograd.grad(y, W), first)


def test_blocks_and_regions_in_one_another():
    plain = run(Old, contextlib.nullcontext(), 2)
    with declared(Old), ms.remat():
        ours = run(Old, contextlib.nullcontext(), 2)
    assert same(ours, plain)
    with declared(Old) as block:
        y = ms.checkpoint(lambda a: Old.apply((a * W).sin(), 2.0, a).sin(), X * W)
    kept = torch.autograd.grad(y.sum(), W)
    a = X * W
    y = Old.apply((a * W).sin(), 2.0, a).sin()
    assert same(torch.autograd.grad(y.sum(), W), kept)
    assert not rows(block, Old, "recomputed")  # the region has its own rule


class WithGradients(Function):
    """A kernel of its own changes what an operator has made while gradients are enabled."""

    @staticmethod
    def forward(ctx, x, factor, y):
        with torch.enable_grad():
            y = x.detach().exp()
        y.numpy()[...] = x.detach().numpy() * factor
        return y

    @staticmethod
    def backward(ctx, grad):
        return grad * 2, None, None


def test_what_it_calls_with_gradients_is_part_of_it():
    block = declared(WithGradients)
    assert same(run(WithGradients, block), run(WithGradients, contextlib.nullcontext()))
    assert sum(row.count for row in rows(block, WithGradients, "recomputed")) == 1


def test_an_interrupt_while_it_is_proven_says_nothing_of_it():
    calls, interrupted_at = [0], 2  # the proof's

    class Sin(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            calls[0] += 1
            if calls[0] == interrupted_at:
                raise KeyboardInterrupt
            ctx.save_for_backward(x)
            return x.sin()

        @staticmethod
        def backward(ctx, grad):
            return grad * ctx.saved_tensors[0].cos()

    def step():
        x = torch.randn(64, 64, requires_grad=True)
        with ms.remat(_everything=True, pure=[Sin]) as block:
            loss = (Sin.apply(x.exp()).exp() * 2).sum()
        loss.backward()
        return [row.operator for row in block.figures().recomputed]

    # Python raises it again by its handler, which processes in the background have none of.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            step()
    finally:
        signal.signal(signal.SIGINT, before)
    step()
    assert any("Sin" in operator for operator in step())
