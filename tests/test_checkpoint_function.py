"""CheckpointFunction against plain autograd: the same values and gradients, bitwise."""

import contextlib
import gc
import threading
import warnings
import weakref
from collections import namedtuple

import programs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import memsave_ext as ms

apply = ms.CheckpointFunction.apply


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def leaf(*shape, dtype=torch.float32):
    return torch.randn(*shape, dtype=dtype, requires_grad=True)


def gradients(output, tensors, **kwargs):
    outputs = [output] if isinstance(output, torch.Tensor) else list(output)
    outputs = [o for o in outputs if isinstance(o, torch.Tensor) and o.requires_grad]
    weights = [torch.linspace(-1, 1, o.numel()).reshape(o.shape).to(o.dtype) for o in outputs]
    return torch.autograd.grad(outputs, tensors, weights, allow_unused=True, **kwargs)


def assert_equal(left, right):
    assert len(left) == len(right)
    for a, b in zip(left, right, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert a.dtype == b.dtype
            assert torch.equal(a, b)


def assert_as_plain(function, inputs, parameters=()):
    """Outputs, gradients and the random numbers that follow are those of a plain call."""
    tensors = [t for t in (*inputs, *parameters) if t.requires_grad]
    torch.manual_seed(1)
    plain = function(*inputs)
    after_plain = torch.rand(2)
    expected = gradients(plain, tensors)
    torch.manual_seed(1)
    ours = apply(function, len(inputs), *inputs, *parameters)
    after_ours = torch.rand(2)
    got = gradients(ours, tensors)
    assert torch.equal(after_plain, after_ours)
    assert type(ours) is type(plain)
    as_tuple = (lambda r: (r,)) if isinstance(plain, torch.Tensor) else tuple
    for a, b in zip(as_tuple(plain), as_tuple(ours), strict=True):
        if isinstance(a, torch.Tensor):
            assert torch.equal(a, b)
            assert a.requires_grad == b.requires_grad
        else:
            assert a is b
    assert_equal(expected, got)
    return ours


Pair = namedtuple("Pair", "left right")
MARKER = object()

FUNCTIONS = {
    "one op": lambda x, y: x * y,
    "reuse": lambda x, y: (x * y).sin() + x * x.exp(),
    "view": lambda x, y: (x * y).t()[1:].reshape(-1),
    "in place": lambda x, y: (x * y).mul_(2).relu_() + x,
    "in place on a view": lambda x, y: _write_into_view(x * y),
    "dropout": lambda x, y: F.dropout(x, 0.5) + F.dropout(y, 0.3) * torch.randn_like(x),
    "tuple": lambda x, y: (x + y, x * y),
    "list": lambda x, y: [x + y, y.cos()],
    "named tuple": lambda x, y: Pair(x + y, x * y),
    "views of one tensor": lambda x, y: (x * y).chunk(2),
    "others among outputs": lambda x, y: (None, x * y, 3, (x > 0), MARKER),
    "an input": lambda x, y: x,
    "an input among outputs": lambda x, y: (x, x * y),
    "a view of an input": lambda x, y: x[1:],
    "an input not used": lambda x, y: y.tanh(),
    "one tensor twice": lambda x, y: (lambda z: (z, z))(x * y),
    "an integer output": lambda x, y: (x * y, x.argmax(0)),
}


def _write_into_view(x):
    x[0].mul_(3)
    return x


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name):
    assert_as_plain(FUNCTIONS[name], (leaf(4, 5), leaf(4, 5)))


@pytest.mark.parametrize("needs_grad", [(True, False), (False, True)])
def test_inputs_without_gradient(needs_grad):
    inputs = [torch.randn(4, 5).requires_grad_(need) for need in needs_grad]
    assert_as_plain(FUNCTIONS["reuse"], inputs)


def test_integer_input():
    weight = leaf(7, 3)
    index = torch.tensor([1, 5, 1])
    assert_as_plain(lambda i: F.embedding(i, weight).exp(), (index,), (weight,))


def test_no_input_at_all():
    weight = leaf(3)
    assert_as_plain(lambda: weight.exp(), (), (weight,))


def test_non_leaf_inputs_and_parameters():
    x, w = leaf(4, 5), leaf(5, 5)
    scaled = w * 2
    hidden = x.sin()
    expected = torch.autograd.grad((hidden @ scaled).cos().sum(), (x, w), retain_graph=True)
    ours = apply(lambda a: (a @ scaled).cos(), 1, hidden, scaled)
    assert_equal(expected, torch.autograd.grad(ours.sum(), (x, w)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex64])
def test_dtypes(dtype):
    assert_as_plain(lambda x, y: (x * y).sin() * y, (leaf(6, dtype=dtype), leaf(6, dtype=dtype)))


def test_modules_and_accumulation():
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2))
    x = leaf(5, 6)
    model(x).pow(2).sum().backward()
    expected = [p.grad.clone() for p in (*model.parameters(), x)]
    for p in (*model.parameters(), x):
        p.grad = None
    apply(model, 1, x, *model.parameters()).pow(2).sum().backward()
    assert_equal(expected, [p.grad for p in (*model.parameters(), x)])


def test_a_tensor_listed_twice_counts_once():
    x, w = leaf(4), leaf(4)
    expected = torch.autograd.grad((x * w).sum(), (x, w))
    assert_equal(expected, torch.autograd.grad(apply(lambda a: a * w, 1, x, w, w).sum(), (x, w)))
    # As two inputs it is used twice.
    expected = torch.autograd.grad((x * x).sum(), x)
    assert_equal(expected, torch.autograd.grad(apply(lambda a, b: a * b, 2, x, x).sum(), x))
    # As input and as parameter: the sum of both uses.
    expected = torch.autograd.grad((x * x.exp()).sum(), x)
    got = torch.autograd.grad(apply(lambda a: a * x.exp(), 1, x, x).sum(), x)
    torch.testing.assert_close(got[0], expected[0])


def test_unused_outputs():
    x, y = leaf(4), leaf(4)
    first, second = apply(lambda a, b: (a.exp(), b.sin()), 2, x, y)
    assert_equal(torch.autograd.grad(first.sum(), (x, y), allow_unused=True), (x.exp(), None))
    assert second.requires_grad


def test_only_what_is_asked_for():
    x, w, v = leaf(4), leaf(4), leaf(4)
    output = apply(lambda a: a * w * v, 1, x, w, v).sum()
    output.backward(inputs=[w])
    assert x.grad is None and v.grad is None
    assert torch.equal(w.grad, x * v)


def test_outputs_can_be_changed_in_place():
    x = leaf(4, 6)

    def changed(outputs):
        a, b = outputs
        a.mul_(2)
        return a * 3 + b

    def halves(t):
        return (t.exp()[:2] * 1, t.sin()[2:])

    expected = torch.autograd.grad(changed(halves(x)).sum(), x)
    assert_equal(expected, torch.autograd.grad(changed(apply(halves, 1, x)).sum(), x))


def test_retain_graph():
    x, w = leaf(4), leaf(4)
    output = apply(lambda a: F.dropout(a * w, 0.5).exp(), 1, x, w).sum()
    first = torch.autograd.grad(output, (x, w), retain_graph=True)
    second = torch.autograd.grad(output, (x, w))
    assert_equal(first, second)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(output, (x, w))


def test_second_backward_without_inputs_raises_too():
    w = leaf(4)
    output = apply(lambda: w.exp(), 0, w).sum()
    output.backward()
    with pytest.raises(RuntimeError, match="second time"):
        output.backward()


def test_nested_regions():
    x, w, v = leaf(3, 3), leaf(3, 3), leaf(3, 3)

    def inner(a):
        return F.dropout(a @ w, 0.4).tanh()

    def outer(a):
        return F.dropout(apply(inner, 1, a, w) * v, 0.2) + a

    def plain(a):
        return F.dropout(inner(a) * v, 0.2) + a

    torch.manual_seed(5)
    expected = torch.autograd.grad(plain(x).sum(), (x, w, v))
    torch.manual_seed(5)
    got = torch.autograd.grad(apply(outer, 1, x, w, v).sum(), (x, w, v))
    assert_equal(expected, got)


def test_a_chain_of_regions_deeper_than_the_engine_recurses():
    x, w = leaf(8), leaf(8)
    y = plain = x
    for _ in range(200):
        y = apply(lambda a: (a * w).tanh(), 1, y, w)
        plain = (plain * w).tanh()
    assert_equal(gradients(plain, (x, w)), gradients(y, (x, w)))


def test_backward_inside_the_function():
    x = leaf(3)

    def function(a):
        with torch.enable_grad():
            b = a.detach().requires_grad_()
            (b**3).sum().backward()
        return a * b.grad

    assert torch.equal(torch.autograd.grad(apply(function, 1, x).sum(), x)[0], 3 * x.detach() ** 2)


@given(steps=programs.STEPS, outputs=st.integers(1, 3))
@settings(max_examples=100, deadline=None)
def test_random_programs(steps, outputs):
    results = []
    for checkpointed in (False, True):
        inputs, weight = programs.tensors(torch.float64)

        def run(function, *args, checkpointed=checkpointed, weight=weight):
            return apply(function, len(args), *args, weight) if checkpointed else function(*args)

        function = programs.build(steps, outputs, run, weight)
        torch.manual_seed(7)
        out = run(function, *inputs)
        results.append((out, programs.gradients(out, [inputs[0], inputs[2], weight])))
    for a, b in zip(results[0][0], results[1][0], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
    for a, b in zip(results[0][1], results[1][1], strict=True):
        # One node stands for the region, so that gradients are summed in another order; and an
        # output that needs no gradient in the plain run has a zero one here.
        if a is None or b is None:
            assert a is b or not (b if a is None else a).any()
        else:
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9, equal_nan=True)


# ---- state around the function ----------------------------------------------------------------


def test_random_numbers_are_replayed_and_left_alone():
    x = leaf(64)
    seen = []

    def function(a):
        seen.append(torch.rand(3))
        return a * seen[-1][0]

    output = apply(function, 1, x)
    before = torch.get_rng_state()
    output.sum().backward()
    assert torch.equal(seen[0], seen[1])
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype):
    linear = nn.Linear(8, 8)
    x = leaf(4, 8)
    types = []

    def function(a):
        types.append((torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")))
        return linear(a).float().tanh()

    with torch.autocast("cpu", dtype):
        expected = torch.autograd.grad(function(x).sum(), (x, *linear.parameters()))
        ours = apply(function, 1, x, *linear.parameters())
    assert not torch.is_autocast_enabled("cpu")
    assert_equal(expected, torch.autograd.grad(ours.sum(), (x, *linear.parameters())))
    assert types == [(True, dtype)] * 3
    # Outside autocast in forward, inside it in backward: the forward decides.
    types.clear()
    ours = apply(function, 1, x, *linear.parameters())
    with torch.autocast("cpu", dtype):
        ours.sum().backward()
    assert [enabled for enabled, _ in types] == [False, False]


def test_autocast_cache_is_not_poisoned():
    """A cast made without a graph inside the region must not serve the same weight outside."""
    linear = nn.Linear(4, 4)
    x = leaf(2, 4)
    with torch.autocast("cpu", torch.bfloat16):
        inside = apply(linear, 1, x, *linear.parameters())
        outside = linear(x)
        assert torch.is_autocast_cache_enabled()
    outside.sum().backward()
    assert linear.weight.grad is not None
    inside.sum().backward()


def test_is_recomputing():
    x = leaf(3)
    seen = []

    def inner(a):
        seen.append(("inner", ms.is_recomputing()))
        return a * 2

    def function(a):
        seen.append(("outer", ms.is_recomputing()))
        return apply(inner, 1, a)

    output = apply(function, 1, x)
    output.register_hook(lambda grad: seen.append(("hook", ms.is_recomputing())))
    output.sum().backward()
    assert seen == [
        ("outer", False),
        ("inner", False),
        ("hook", False),
        ("outer", True),
        ("inner", True),
        ("inner", True),
    ]
    assert not ms.is_recomputing()


class BoomError(Exception):
    pass


@contextlib.contextmanager
def state_unchanged():
    def state():
        return (
            torch.is_grad_enabled(),
            torch.is_autocast_enabled("cpu"),
            torch.is_autocast_cache_enabled(),
            ms.is_recomputing(),
            torch._C._autograd._top_saved_tensors_default_hooks(False),
        )

    before = state()
    yield
    assert state() == before


@pytest.mark.parametrize("where", ["forward", "recompute"])
def test_exceptions_come_out_as_they_are(where):
    x = leaf(3)
    error = BoomError("from the function")

    def function(a):
        torch.rand(1)
        if (where == "recompute") == ms.is_recomputing():
            raise error
        return a * 2

    with state_unchanged(), torch.autocast("cpu"):
        if where == "forward":
            with state_unchanged(), pytest.raises(BoomError) as caught:
                apply(function, 1, x)
        else:
            output = apply(function, 1, x)
            rng = torch.get_rng_state()
            with state_unchanged(), pytest.raises(BoomError) as caught:
                output.sum().backward()
            assert torch.equal(rng, torch.get_rng_state())
        assert caught.value is error
    assert x.grad is None


def test_hooks_see_each_gradient_once():
    x, w = leaf(4), leaf(4)
    calls = []

    def hook(name, factor=1):
        def run(grad):
            calls.append(name)
            return grad * factor

        return run

    w.register_hook(hook("w", 2))
    x.register_hook(hook("x", 3))
    w.register_post_accumulate_grad_hook(lambda p: calls.append("w accumulated"))
    hidden = x * 1
    hidden.register_hook(hook("hidden", 5))
    first = apply(lambda a: a * w, 1, hidden, w)
    second = apply(lambda a: a * w, 1, first, w)
    second.sum().backward()
    assert sorted(calls) == ["hidden", "w", "w accumulated", "x"]
    torch.testing.assert_close(w.grad, (2 * 2 * x * w).detach())
    torch.testing.assert_close(x.grad, (3 * 5 * w * w).detach())


def test_hooks_of_a_non_leaf_parameter_run_once():
    w = leaf(4)
    scaled = w * 2
    scaled.retain_grad()
    calls = []
    scaled.register_hook(lambda grad: calls.append(1))
    x = leaf(4)
    apply(lambda a: a * scaled, 1, x, scaled).sum().backward()
    assert calls == [1]
    assert torch.equal(scaled.grad, x)


@pytest.mark.parametrize("where", ["around", "inside"])
def test_saved_tensor_hooks(where):
    x, w = leaf(4), leaf(4)
    packed = []

    def hooks():
        return torch.autograd.graph.saved_tensors_hooks(
            lambda t: packed.append(t.shape) or t.clone(), lambda t: t
        )

    def function(a):
        with hooks() if where == "inside" else contextlib.nullcontext():
            return (a * w).sin()

    with hooks() if where == "around" else contextlib.nullcontext():
        output = apply(function, 1, x, w)
    assert len(packed) == (where == "around")  # the input, and nothing of the region
    expected = torch.autograd.grad((x * w).sin().sum(), (x, w))
    assert_equal(expected, torch.autograd.grad(output.sum(), (x, w)))


def test_save_on_cpu():
    x, w = leaf(4), leaf(4)
    with torch.autograd.graph.save_on_cpu():
        output = apply(lambda a: (a * w).sin(), 1, x * 1, w)
    expected = torch.autograd.grad((x * w).sin().sum(), (x, w))
    assert_equal(expected, torch.autograd.grad(output.sum(), (x, w)))


def test_without_grad_mode_it_is_a_plain_call():
    x = leaf(3)
    calls = []

    def function(a):
        calls.append(torch.is_grad_enabled())
        return a * 2

    with torch.no_grad():
        assert not apply(function, 1, x).requires_grad
    with torch.inference_mode():
        assert apply(function, 1, x).is_inference()
    assert calls == [False, False]


def test_forward_mode():
    x, tangent = torch.randn(4), torch.randn(4)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, tangent)
        output = apply(lambda a: a.sin(), 1, dual)
        assert torch.equal(torch.autograd.forward_ad.unpack_dual(output).tangent, x.cos() * tangent)


# ---- memory -----------------------------------------------------------------------------------


def test_it_holds_the_inputs_and_nothing_else():
    x = leaf(256, 256)
    w = leaf(256, 256)

    def function(a):
        for _ in range(10):
            a = (a @ w).tanh()
        return a.sum()

    with ms.memory.track() as tracked:
        output = apply(function, 1, x.neg(), w)
    # The input and the output; w was there before.
    assert tracked.live == x.nbytes + output.nbytes
    with ms.memory.track() as tracked:
        output.backward()
    x.grad = w.grad = None


def test_nothing_is_left_behind():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, a):
            return apply(self.linear, 1, a, *self.linear.parameters())

    x = leaf(2, 4)
    dropped = Block()
    dropped(x)  # a forward without a backward
    used = Block()
    used(x).sum().backward()
    kept = Block()
    output = kept(x).sum()
    output.backward()  # releases the function, though the output lives on
    references = [weakref.ref(m) for m in (dropped, used, kept)]
    del dropped, used, kept
    gc.collect()
    assert [r() for r in references] == [None] * 3


def test_no_growth():
    x, w = leaf(8), leaf(8)
    with ms.memory.track() as tracked:
        for _ in range(200):
            torch.autograd.grad(apply(lambda a: F.dropout(a * w), 1, x, w).sum(), (x, w))
        gc.collect()
    assert tracked.live == 0


# ---- threads ----------------------------------------------------------------------------------


def test_threads():
    linear = nn.Linear(16, 16)
    parameters = list(linear.parameters())
    inputs = [leaf(8, 16) for _ in range(4)]
    expected = [torch.autograd.grad(linear(x).tanh().sum(), (x, *parameters)) for x in inputs]
    failures = []

    def work(i):
        try:
            for _ in range(50):
                output = apply(lambda a: linear(a).tanh(), 1, inputs[i], *parameters)
                got = torch.autograd.grad(output.sum(), (inputs[i], *parameters))
                assert_equal(expected[i], got)
                assert not ms.is_recomputing()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures and not any(t.is_alive() for t in threads)


def test_two_backwards_of_one_graph_at_once():
    x, w = leaf(64), leaf(64)
    output = apply(lambda a: (a * w).tanh(), 1, x, w).sum()
    expected = torch.autograd.grad(output, (x, w), retain_graph=True)
    results = [None, None]

    def work(i):
        for _ in range(50):
            results[i] = torch.autograd.grad(output, (x, w), retain_graph=True)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for result in results:
        assert_equal(expected, result)


# ---- what was not listed ----------------------------------------------------------------------


def test_an_unlisted_parameter_is_named_once_per_call_site():
    x = leaf(2, 3)
    weight, bias = leaf(3, 3), leaf(3)

    def region():
        return apply(lambda a: a @ weight + bias, 1, x, bias)

    with pytest.warns(
        UserWarning, match=r"shape \[3, 3\], dtype float32, used by MmBackward0"
    ) as w:
        region().sum().backward()
    assert len(w) == 1
    assert __file__ in str(w[0].message)
    assert "shape [3]," not in str(w[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        region().sum().backward()
    assert weight.grad is None
    assert torch.equal(bias.grad, torch.full((3,), 4.0))


def test_an_unlisted_non_leaf_is_named_and_its_graph_left_alone():
    x, w = leaf(3), leaf(3)
    hidden = w.exp()
    output = apply(lambda a: a * hidden, 1, x)
    with pytest.warns(UserWarning, match=r"shape \[3\], dtype float32, used by MulBackward0"):
        output.sum().backward()
    assert w.grad is None
    hidden.sum().backward()
    assert torch.equal(w.grad, w.exp())


def test_an_unlisted_parameter_is_named_when_nothing_listed_needs_a_gradient():
    x = torch.randn(3)
    w = leaf(3)

    def region():
        return apply(lambda a: a * w, 1, x)

    with pytest.warns(UserWarning, match=r"shape \[3\], dtype float32, used by MulBackward0"):
        assert not region().requires_grad
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not region().requires_grad


def test_an_unlisted_leaf_as_output():
    x, w = leaf(3), leaf(3)
    with pytest.warns(UserWarning, match="returned as an output"):
        sum(o.sum() for o in apply(lambda a: (a * 2, w), 1, x)).backward()
    assert w.grad is None


def test_the_warning_as_an_error_comes_out_of_backward():
    x, w = leaf(3), leaf(3)
    output = apply(lambda a: a * w, 1, x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with state_unchanged(), pytest.raises(UserWarning, match="were not listed"):
            output.sum().backward()


# ---- bad input --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((), TypeError, r"expected a function and the number n of its inputs, got 0 arguments"),
        ((torch.sin,), TypeError, "got 1 arguments"),
        ((3, 1, torch.ones(1)), TypeError, "function must be callable, got int"),
        ((torch.sin, "1", torch.ones(1)), TypeError, "n must be an int, got str"),
        ((torch.sin, 1.0, torch.ones(1)), TypeError, "n must be an int, got float"),
        ((torch.sin, True, torch.ones(1)), TypeError, "n must be an int, got bool"),
        ((torch.sin, -1, torch.ones(1)), ValueError, "n must be between 0 and 1, .* got -1"),
        ((torch.sin, 2, torch.ones(1)), ValueError, "n must be between 0 and 1, .* got 2"),
        ((torch.sin, 1, [torch.ones(1)]), TypeError, r"args\[0\] \(input 0\) .* got list"),
        (
            (torch.sin, 1, None),
            TypeError,
            r"args\[0\] \(input 0\) must be a torch.Tensor, got None",
        ),
        ((torch.sin, 1, torch.ones(1), 2), TypeError, r"args\[1\] \(parameter 0\) .* got int"),
    ],
)
def test_bad_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        apply(*arguments)


def test_keywords_are_refused():
    with pytest.raises(TypeError, match="keyword"):
        apply(torch.sin, 1, input=torch.ones(1))


def test_it_is_not_instantiated():
    with pytest.raises(TypeError, match="CheckpointFunction.apply"):
        ms.CheckpointFunction()


@pytest.mark.parametrize("output", [{"a": 1}, [[1]], ({"deep": [1]},)])
def test_containers_of_tensors_are_refused(output):
    def fill(value, tensor):
        if isinstance(value, dict):
            return {k: fill(v, tensor) for k, v in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(fill(v, tensor) for v in value)
        return tensor

    with pytest.raises(TypeError, match="output 0 is a .* that holds tensors"):
        apply(lambda a: fill(output, a * 2), 1, leaf(2))


def test_an_input_changed_in_place_by_the_function():
    x = leaf(3) * 1
    with pytest.raises(RuntimeError, match="changes input 0 in place"):
        apply(lambda a: a.mul_(2), 1, x)


def test_an_input_changed_in_place_before_backward():
    x = leaf(3) * 1
    output = apply(lambda a: a.sin(), 1, x)
    x.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_a_parameter_changed_in_place_before_backward():
    x, w = leaf(3), leaf(3)
    output = apply(lambda a: a * w, 1, x, w)
    with torch.no_grad():
        w.mul_(2)
    with pytest.raises(RuntimeError, match=r"parameter 0 \(shape \[3\], dtype float32\)"):
        output.sum().backward()


def test_a_function_that_changes_its_mind():
    x = leaf(3)

    def shape(a):
        return a[:2] if ms.is_recomputing() else a * 1

    def number(a):
        return (a * 1,) if ms.is_recomputing() else (a * 1, a * 2)

    def kind(a):
        return None if ms.is_recomputing() else a * 1

    with pytest.raises(RuntimeError, match=r"has shape \[2\], in the forward it had \[3\]"):
        apply(shape, 1, x).sum().backward()
    with pytest.raises(RuntimeError, match="returned 1 outputs, the forward 2"):
        apply(number, 1, x)[0].sum().backward()
    with pytest.raises(RuntimeError, match="output 0 of the recompute is not a tensor"):
        apply(kind, 1, x).sum().backward()


def test_double_backward_is_refused():
    x, w = leaf(3), leaf(3)
    output = apply(lambda a: (a * w).sin(), 1, x, w).sum()
    (grad,) = torch.autograd.grad(output, x, create_graph=True)
    assert torch.equal(grad, (x * w).cos() * w)
    with pytest.raises(RuntimeError, match="does not support double backward"):
        torch.autograd.grad(grad.sum(), w)


def test_function_transforms_are_refused():
    with pytest.raises(RuntimeError, match="torch.func"):
        torch.func.grad(lambda x: apply(torch.sin, 1, x).sum())(torch.randn(3))
