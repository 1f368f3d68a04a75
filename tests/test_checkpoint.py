"""checkpoint() against plain autograd: the same values and gradients, bitwise."""

import contextlib
import gc
import threading
import weakref
from dataclasses import dataclass

import programs
import pytest
import torch
import torch.utils.checkpoint as torch_checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import memsave_ext as ms
from memsave_ext import _native

checkpoint = ms.checkpoint


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def leaf(*shape, dtype=torch.float32):
    return torch.randn(*shape, dtype=dtype, requires_grad=True)


def plain(function, *args, **kwargs):
    return function(*args, **kwargs)


def assert_equal(left, right):
    assert len(left) == len(right)
    for a, b in zip(left, right, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def both(program, tensors, **kwargs):
    """Gradients of ``program(run)``, a scalar, run plainly and checkpointed."""
    results = []
    for run in (plain, checkpoint):
        torch.manual_seed(1)
        output = program(run)
        after = torch.rand(2)
        grads = torch.autograd.grad(output, tensors, allow_unused=True, **kwargs)
        results.append((output, after, *grads))
    assert_equal(*results)
    return results[1]


@given(steps=programs.STEPS, outputs=st.integers(1, 3), early_stop=st.booleans())
@settings(max_examples=150, deadline=None)
def test_random_programs(steps, outputs, early_stop):
    results = []
    for run in (plain, lambda f, *a: checkpoint(f, *a, early_stop=early_stop)):
        inputs, weight = programs.tensors()
        function = programs.build(steps, outputs, run, weight)
        torch.manual_seed(7)
        out = run(function, *inputs)
        tensors = [t for t in (*inputs, weight) if t.requires_grad]
        grads = programs.gradients(out, tensors, retain_graph=True)
        again = programs.gradients(out, tensors)
        results.append((*out, *grads, *again, torch.rand(2)))
    assert_equal(*results)


# ---- arguments and results --------------------------------------------------------------------


@dataclass
class Batch:
    tensors: dict
    scale: float


def test_structures_keywords_and_closures():
    x, y, w = leaf(4), leaf(4), leaf(4)

    def function(batch, factors, /, *, offset, flag=False):
        value = batch.tensors["x"] * batch.scale * factors[0][0] * w
        return {"value": value.exp() + offset, "flag": flag, "list": [value.sin(), None]}

    def program(run):
        result = run(function, Batch({"x": x}, 2.0), [[y]], offset=y * 2, flag=True)
        assert result["flag"] is True
        assert result["list"][1] is None
        return (result["value"] * result["list"][0]).sum()

    both(program, (x, y, w))


def test_keywords_named_like_a_function_parameter():
    assert checkpoint(lambda **kw: kw["input"] * 2, input=torch.ones(1)) == 2


def test_no_tensor_at_all():
    assert checkpoint(lambda a, b: a + b, 2, b=3) == 5


def test_inputs_without_gradient_train_the_parameters():
    linear = nn.Linear(4, 4)
    x = torch.randn(2, 4)
    both(lambda run: run(linear, x).tanh().sum(), tuple(linear.parameters()))


def test_bound_methods():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def block(self, x):
            return self.linear(x).tanh()

    net, x = Net(), leaf(2, 4)
    both(lambda run: run(net.block, x).sum(), (x, *net.parameters()))


def test_use_reentrant_is_accepted(recwarn):
    x = leaf(4)
    for value in (True, False, None):
        both(
            lambda run, v=value: (
                run(torch.exp, x) if run is plain else run(torch.exp, x, use_reentrant=v)
            ),
            (x,),
            grad_outputs=torch.ones(4),
        )
    assert not [w for w in recwarn if "reentrant" in str(w.message)]


def test_without_grad_mode():
    with torch.no_grad():
        assert not checkpoint(torch.exp, leaf(3)).requires_grad


# ---- backward ---------------------------------------------------------------------------------


def test_inputs_argument_and_accumulation():
    x, w = leaf(4), leaf(4)
    out = checkpoint(lambda a: (a * w).exp(), x).sum()
    out.backward(inputs=[w], retain_graph=True)
    assert x.grad is None
    out.backward()
    torch.testing.assert_close(w.grad, 2 * (x * w).exp() * x)


def test_freed_graph():
    x = leaf(4)
    out = checkpoint(lambda a: a.exp().sin(), x).sum()
    out.backward()
    with pytest.raises(RuntimeError, match="second time"):
        out.backward()


def test_double_backward():
    w = leaf(3, dtype=torch.float64)

    def function(a):
        return checkpoint(lambda b: (b * w).sin() * b, a)

    x = leaf(3, dtype=torch.float64)
    assert torch.autograd.gradcheck(function, (x,))
    assert torch.autograd.gradgradcheck(function, (x,))


def test_forward_mode():
    x, tangent = torch.randn(4), torch.randn(4)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, tangent)
        out = checkpoint(lambda a: a.sin(), dual)
        assert torch.equal(torch.autograd.forward_ad.unpack_dual(out).tangent, x.cos() * tangent)


def test_a_gradient_inside_the_function():
    x, w = leaf(4), leaf(4)

    def function(a):
        energy = (a * w).exp().sum()
        (force,) = torch.autograd.grad(energy, a, create_graph=True)
        return force * a

    both(lambda run: run(function, x * 1).sum(), (x, w))


@pytest.mark.parametrize("last", ["mul", "rrelu"])
def test_a_backward_inside_the_function(last):
    x = leaf(64)
    seen = []

    def function(a):
        b = a.detach().requires_grad_()
        y = F.rrelu(b * 3, training=True) if last == "rrelu" else b * b
        y.sum().backward()
        seen.append(b.grad)
        return a * b.grad

    both(lambda run: run(function, x).sum(), (x,))
    for other in seen[1:]:
        assert torch.equal(seen[0], other)


def test_partial_backwards_of_one_region():
    x, y = leaf(4), leaf(4)
    left, right = checkpoint(lambda a, b: (a.exp() * a, b.sin() * b), x, y)
    (gx,) = torch.autograd.grad(left.sum(), x)
    (gy,) = torch.autograd.grad(right.sum(), y)
    torch.testing.assert_close(gx, x.exp() * x + x.exp())
    torch.testing.assert_close(gy, y.cos() * y + y.sin())


def test_saved_tensors_seen_from_python():
    x = leaf(4)
    out = checkpoint(lambda a: a.exp().sin(), x)
    assert torch.equal(out.grad_fn._saved_self, x.exp())
    assert torch.equal(out.grad_fn._saved_self, x.exp())
    out.sum().backward()
    assert torch.equal(x.grad, x.exp().cos() * x.exp())


class SavesTwice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        (again,) = ctx.saved_tensors
        assert torch.equal(x, again)
        return 2 * x * grad


def test_custom_functions_may_look_twice():
    x = leaf(4)
    both(lambda run: run(lambda a: SavesTwice.apply(a.exp()).sin(), x).sum(), (x,))


def test_hooks_of_tensors_and_modules():
    linear, x = nn.Linear(4, 4), leaf(2, 4)
    calls = []
    linear.weight.register_hook(lambda g: calls.append("tensor"))
    linear.weight.register_post_accumulate_grad_hook(lambda p: calls.append("accumulated"))
    linear.register_full_backward_hook(lambda m, gi, go: calls.append("module"))
    linear.register_forward_hook(lambda m, i, o: calls.append("forward"))
    checkpoint(lambda a: linear(a).tanh() * a, x).sum().backward()
    assert sorted(calls) == ["accumulated", "forward", "forward", "module", "tensor"]


@pytest.mark.parametrize("where", ["around", "inside"])
def test_saved_tensor_hooks_and_save_on_cpu(where):
    x, w = leaf(4), leaf(4)
    packed = []

    @contextlib.contextmanager
    def hooks():
        with (
            torch.autograd.graph.saved_tensors_hooks(
                lambda t: packed.append(t.shape) or t.clone(), lambda t: t
            ),
            torch.autograd.graph.save_on_cpu(),
        ):
            yield

    def function(a):
        with hooks() if where == "inside" else contextlib.nullcontext():
            return (a * w).sin() * a

    def program(run):
        with hooks() if where == "around" else contextlib.nullcontext():
            return run(function, x * 1).sum()

    both(program, (x, w))


def test_in_place_and_views():
    x = leaf(4, 4)

    def function(a):
        b = a * 2
        b[0].mul_(3)
        c = b.view(-1)[2:]
        c.add_(1)
        return b.exp() * c.sum()

    both(lambda run: run(function, x).sum(), (x,))


def test_an_output_is_an_input():
    x = leaf(4)
    both(lambda run: (run(lambda a: (a, a.exp()), x * 1)[0] ** 2).sum(), (x,))


def test_graph_exec_group():
    x, w = leaf(4), leaf(4)
    calls = []

    def function(a):
        calls.append(1)
        return (a * w).sin(), (a + w).exp()

    first, second = checkpoint(function, x)
    with torch_checkpoint.GraphExecGroup():
        torch.autograd.grad(first.sum(), x, retain_graph=True)
        torch.autograd.grad(second.sum(), x, retain_graph=True)
    assert len(calls) == 2


# ---- state ------------------------------------------------------------------------------------


def test_random_numbers_are_left_alone_by_backward():
    x = leaf(100)
    out = checkpoint(lambda a: F.dropout(a, 0.5).exp(), x)
    before = torch.get_rng_state()
    out.sum().backward()
    assert torch.equal(before, torch.get_rng_state())


def test_random_numbers_can_be_left_out():
    seen = []

    def function(a):
        seen.append(torch.rand(3))
        return (a * seen[-1][0]).exp() * a

    checkpoint(function, leaf(3), preserve_rng_state=False).sum().backward()
    assert not torch.equal(seen[0], seen[1])


def test_autocast_and_default_device():
    linear, x = nn.Linear(8, 8), leaf(4, 8)
    seen = []

    def function(a):
        seen.append((torch.is_autocast_enabled("cpu"), torch.zeros(()).device.type))
        return linear(a).float().tanh()

    with torch.autocast("cpu", torch.bfloat16), torch.device("meta"):
        out = checkpoint(function, x)
    expected = torch.autograd.grad(_autocast(linear, x), (x, *linear.parameters()))
    assert_equal(expected, torch.autograd.grad(out.sum(), (x, *linear.parameters())))
    assert seen == [(True, "meta")] * 2


def _autocast(linear, x):
    with torch.autocast("cpu", torch.bfloat16):
        return linear(x).float().tanh().sum()


def test_autocast_cache_does_not_change_what_is_saved():
    linear, x = nn.Linear(8, 8), leaf(4, 8)
    with torch.autocast("cpu", torch.bfloat16):
        warm = linear(x)
        out = checkpoint(lambda a: linear(linear(a)).float(), x)
    (warm.float().sum() + out.sum()).backward()
    assert linear.weight.grad is not None


def test_is_recomputing():
    seen = []

    def function(a):
        seen.append(ms.is_recomputing())
        return (a * 2).exp().sin()

    checkpoint(function, leaf(3)).sum().backward()
    assert seen == [False, True]
    assert not ms.is_recomputing()


def test_batch_norm_counts_once():
    bn, twin, x = ms.BatchNorm1d(4), nn.BatchNorm1d(4), leaf(8, 4)
    out = checkpoint(lambda a: bn(a).exp().sin(), x).sum()
    out.backward(retain_graph=True)
    out.backward()
    twin(x)
    assert_equal(list(bn.buffers()), list(twin.buffers()))


def test_modules_that_update_buffers_are_no_mutation():
    """torch's BatchNorm counts twice here, but trains as it does with torch's checkpoint."""
    bn, x = nn.BatchNorm2d(4), leaf(8, 4, 3, 3)
    for _ in range(3):
        checkpoint(lambda a: bn(a).exp().sin(), x).sum().backward()


@pytest.mark.parametrize("where", ["forward", "recompute"])
def test_exceptions_come_out_as_they_are(where):
    error = KeyError("from the function")

    def function(a):
        torch.rand(1)
        if (where == "recompute") == ms.is_recomputing():
            raise error
        return a.exp().sin()

    x = leaf(3)
    rng = torch.get_rng_state()

    def step():
        nonlocal rng
        out = checkpoint(function, x)
        rng = torch.get_rng_state()
        out.sum().backward()

    with pytest.raises(KeyError) as caught:
        step()
    assert caught.value is error
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    assert not ms.is_recomputing()
    if where == "recompute":
        assert torch.equal(rng, torch.get_rng_state())


# ---- stopping early ---------------------------------------------------------------------------


def calls_of(count, function, size=100, **kwargs):
    """How many of the function's numbered marks a recompute reaches."""
    reached = []

    def run(a):
        return function(a, lambda v, i: reached.append(i) or v)

    out = checkpoint(run, leaf(size, size), **kwargs)
    reached.clear()
    out.sum().backward()
    assert len(reached) == count, reached


def marks(a, mark):
    return mark(mark(mark(a, 0).exp(), 1).sin(), 2) + 1


def test_early_stop():
    calls_of(2, marks)
    calls_of(3, marks, early_stop=False)
    with torch_checkpoint.set_checkpoint_early_stop(False):
        calls_of(3, marks)
    with torch_checkpoint.set_checkpoint_early_stop(True):
        calls_of(2, marks, early_stop=False)


@pytest.mark.skipif(not _native.available, reason="in pure Python every recompute stops early")
def test_short_tails_are_run_to_their_end():
    calls_of(3, marks, size=8)


def test_handlers_of_the_function_do_not_catch_the_stop():
    def function(a, mark):
        try:
            return mark(a.exp(), 0).sin()
        except Exception:  # a fallback path, as libraries have them
            return mark(mark(a, 1), 2)

    calls_of(1, function)


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("size", [8, 200])
def test_rrelu_fills_its_noise_after_saving_it(inplace, size):
    """pytorch#193671: stopped there, torch's checkpoint gives wrong gradients without a word."""
    x = leaf(size, size)

    def function(a):
        torch.full((size, size), 7.0)  # what the noise would find in the memory
        return F.rrelu(a * 2, training=True, inplace=inplace)

    both(lambda run: run(function, x).sum(), (x,))
    both(lambda run: run(function, x).view(-1)[1:].sum(), (x,))


def test_rrelu_as_the_last_that_is_needed():
    """What was saved after it has been dropped, so that the recompute could end before it."""
    x = leaf(100, 100)

    def function(a):
        y = F.rrelu(a, training=True)
        (y * y).exp()
        return y + 1

    both(lambda run: run(function, x).sum(), (x,))


# ---- determinism ------------------------------------------------------------------------------


def changing(first, second):
    def function(a):
        return second(a) if ms.is_recomputing() else first(a)

    return function


def test_different_metadata():
    function = changing(lambda a: a[:2].exp().sin(), lambda a: a[:3].exp().sin())
    out = checkpoint(function, leaf(4))
    with pytest.raises(ms.CheckpointError) as caught:
        out.sum().backward()
    text = str(caught.value)
    assert text.startswith("torch.utils.checkpoint: Recomputed values for the following tensors")
    assert "tensor at position 0:\nsaved metadata: {'shape': torch.Size([2])" in text
    assert "'dtype': torch.float32, 'device': device(type='cpu')}" in text
    assert "recomputed metadata: {'shape': torch.Size([3])" in text


@pytest.mark.parametrize("early_stop", [True, False])
def test_fewer_saved(early_stop):
    function = changing(lambda a: a.exp().sin(), lambda a: a.exp() + 1)
    out = checkpoint(function, leaf(200, 200), early_stop=early_stop)
    with pytest.raises(ms.CheckpointError, match="A different number of tensors was saved") as e:
        out.sum().backward()
    assert "during forward: 2" in str(e.value)
    assert "during recomputation: 1" in str(e.value)


def test_more_saved():
    function = changing(lambda a: a.exp(), lambda a: a.exp().exp())
    out = checkpoint(function, leaf(4), early_stop=False)
    with pytest.raises(ms.CheckpointError, match="trying to save more tensors"):
        out.sum().backward()


def test_the_error_is_torchs_too():
    assert issubclass(ms.CheckpointError, torch_checkpoint.CheckpointError)


def test_the_check_can_be_left_out():
    function = changing(lambda a: a.exp(), lambda a: a.double().exp().float())
    checkpoint(function, leaf(4), determinism_check="none")


@pytest.mark.parametrize("debug", ["argument", "torch's switch"])
def test_debug_lists_the_operators(debug):
    function = changing(lambda a: a.exp().sin(), lambda a: a[:2].cos().exp())
    enabled = torch_checkpoint.set_checkpoint_debug_enabled(True)
    with enabled if debug == "torch's switch" else contextlib.nullcontext():
        out = checkpoint(function, leaf(4), debug=debug == "argument")
    with pytest.raises(ms.CheckpointError) as caught:
        out.sum().backward()
    text = str(caught.value)
    assert "aten.exp.default(float32[4])" in text
    assert "aten.cos.default(float32[2])" in text
    assert __file__ in text


def test_a_closure_tensor_changed_in_place_is_an_error():
    """Plain autograd refuses; torch's checkpoint says nothing and is wrong."""
    x, w = leaf(4), torch.randn(4)
    out = checkpoint(lambda a: (a * w).exp(), x)
    w.add_(1)
    with pytest.raises(ms.CheckpointError, match="modified by an inplace operation") as caught:
        out.sum().backward()
    assert "version 0 in the forward, 1 in the recompute" in str(caught.value)
    out = checkpoint(lambda a: (a * w).exp(), x, determinism_check="none")
    w.add_(1)
    out.sum().backward()


def test_an_argument_changed_in_place_is_an_error():
    x = leaf(4) * 1
    out = checkpoint(lambda a: a.exp().sin(), x)
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_selective_checkpointing():
    x, w = leaf(8, 8), leaf(8, 8)
    ops = [torch.ops.aten.mm.default]
    counted = []

    class Count(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            counted.append(func)
            return func(*args, **(kwargs or {}))

    def program(run):
        if run is plain:
            return run(lambda a: (a @ w).sin() @ w, x).sum()
        return run(
            lambda a: (a @ w).sin() @ w,
            x,
            context_fn=lambda: torch_checkpoint.create_selective_checkpoint_contexts(ops),
        ).sum()

    both(program, (x, w))
    out = program(checkpoint)
    with Count():
        torch.autograd.grad(out, (x, w))
    assert counted.count(torch.ops.aten.mm.default) == 4  # those of backward, none recomputed


def test_context_fn_runs_around_both():
    events = []

    @contextlib.contextmanager
    def note(name):
        events.append(f"enter {name}")
        yield
        events.append(f"exit {name}")

    out = checkpoint(
        lambda a: a.exp(), leaf(4), context_fn=lambda: (note("forward"), note("recompute"))
    )
    assert events == ["enter forward", "exit forward"]
    out.sum().backward()
    assert events[2] == "enter recompute"


# ---- memory -----------------------------------------------------------------------------------


def chain(depth=10):
    w = leaf(128, 128)

    def function(a):
        for _ in range(depth):
            a = (a @ w).tanh()
        return a.sum()

    return function


def test_no_more_memory_than_torch():
    x, function = leaf(128, 128), chain()
    kept = {}
    for name, run in (("ours", checkpoint), ("torch", torch_checkpoint.checkpoint)):
        options = {} if run is checkpoint else {"use_reentrant": False}
        with ms.memory.track() as t:
            out = run(function, x.neg(), **options)
        held = t.live
        with t:
            out.backward()
            del out
        kept[name] = (held, t.peak)
        x.grad = None
    assert kept["ours"][0] <= kept["torch"][0]
    assert kept["ours"][0] == x.nbytes + 4
    assert kept["ours"][1] <= kept["torch"][1]


def test_twenty_levels():
    """Every level's arguments are held by the level around it."""
    x, w = leaf(4), leaf(4)

    def nested(depth, run):
        def function(a):
            return nested(depth - 1, run)(a).sin() * w if depth else a * w

        return lambda a: run(function, a)

    depth = 20
    results = []
    for run in (plain, checkpoint):
        results.append(torch.autograd.grad(nested(depth, run)(x).sum(), (x, w)))
    assert_equal(*results)


@pytest.mark.skipif(not _native.available, reason="ten times slower, and torch's own objects")
def test_host_memory_does_not_grow():
    block, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Dropout()), leaf(2, 4)

    def resident():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    def regions(count):
        for _ in range(count):
            torch.autograd.grad(checkpoint(block, x).sum(), x)
            ms.CheckpointFunction.apply(block, 1, x, *block.parameters()).sum().backward()
            checkpoint(block, x)

    regions(2000)
    before = resident()
    regions(10_000)
    assert resident() - before < 2**20


def test_nothing_grows_and_nothing_is_left():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, a):
            return checkpoint(lambda b: F.dropout(self.linear(b)).tanh(), a)

    block, x = Block(), leaf(2, 4)
    block(x)  # dropped without a backward
    with ms.memory.track() as t:
        for _ in range(300):
            torch.autograd.grad(block(x).sum(), x)
        gc.collect()
    assert t.live == 0
    kept = block(x).sum()
    kept.backward()
    reference = weakref.ref(block)
    del block
    gc.collect()
    assert reference() is None


# ---- threads ----------------------------------------------------------------------------------


def run_threads(work, count):
    failures = []

    def guarded(i):
        try:
            work(i)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not any(thread.is_alive() for thread in threads)
    assert not failures, failures[0]


def test_eight_threads():
    linear = nn.Linear(8, 8)
    parameters = tuple(linear.parameters())
    inputs = [leaf(4, 8) for _ in range(8)]

    def function(a):
        return checkpoint(lambda b: linear(b).tanh(), linear(a).sin())

    expected = [torch.autograd.grad(function(x).sum(), (x, *parameters)) for x in inputs]

    def work(i):
        for _ in range(500 if _native.available else 100):
            out = checkpoint(function, inputs[i]).sum()
            assert_equal(expected[i], torch.autograd.grad(out, (inputs[i], *parameters)))

    run_threads(work, 8)


def test_one_region_recomputed_by_two_backwards_at_once():
    x, w = leaf(64), leaf(64)
    entered = threading.Barrier(2, timeout=20)

    def function(a):
        if ms.is_recomputing():
            with contextlib.suppress(threading.BrokenBarrierError):
                entered.wait(0.05)  # lets the other backward arrive
        return (a * w).tanh().exp()

    out = checkpoint(function, x).sum()
    expected = torch.autograd.grad(out, (x, w), retain_graph=True)

    def work(i):
        for _ in range(5):
            assert_equal(expected, torch.autograd.grad(out, (x, w), retain_graph=True))

    run_threads(work, 2)


# ---- bad input --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((3, torch.ones(1)), {}, TypeError, "function must be callable, got int"),
        (
            (torch.sin, torch.ones(1)),
            {"determinism_check": "all"},
            ValueError,
            "'default' or 'none'",
        ),
        ((torch.sin, torch.ones(1)), {"offload": "disk"}, ValueError, "must be None or 'cpu'"),
        (
            (torch.sin, torch.ones(1)),
            {"debug": True, "context_fn": lambda: (None, None)},
            ValueError,
            "debug=True cannot be combined",
        ),
    ],
)
def test_bad_input(arguments, options, error, message):
    with pytest.raises(error, match=message):
        checkpoint(*arguments, **options)


def test_offload_is_a_no_op_on_the_cpu():
    x = leaf(4)
    function = torch.nn.Tanh()
    out = checkpoint(lambda a: function(a).exp(), x, offload="cpu")
    expected = torch.autograd.grad(function(x).exp().sum(), x)
    assert_equal(expected, torch.autograd.grad(out.sum(), x))


def test_function_transforms_are_refused():
    with pytest.raises(RuntimeError, match="torch.func"):
        torch.func.grad(lambda x: checkpoint(torch.sin, x).sum())(torch.randn(3))
