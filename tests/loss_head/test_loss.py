"""The loss and its gradients beside those of torch's operators, in float64 and in its dtype."""

import itertools
import random

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_equal, run_threads
from losses import chunked, gradients, in_dtype, plain, problem

import memsave_ext as ms

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
REDUCTIONS = ["mean", "sum", "none"]


def random_case(seed):
    """(tensors, options, gradient of the loss): tensors are input, weight, bias, target and class
    weight, in float64 with values of the dtype that is to be tested."""
    choose = random.Random(seed)
    dtype = choose.choice(DTYPES)
    classes = choose.choice([2, 100, 256, 257, 700, 1024])
    tokens = choose.choice([0, 1, 3, 17, 64])
    probabilities = choose.random() < 0.4
    x, w, t = problem(
        tokens, choose.choice([1, 5, 32]), classes, seed=seed, probabilities=probabilities
    )
    w = w.detach() * choose.choice([0.1, 1])
    bias = torch.randn(classes) if choose.random() < 0.5 else None
    weight = torch.rand(classes) if choose.random() < 0.4 else None
    tensors = in_dtype(in_dtype([x, w, bias, t, weight], dtype), torch.float64)
    for tensor in tensors[:3]:
        if tensor is not None:
            tensor.requires_grad_(choose.random() < 0.7)
    options = {
        "reduction": choose.choice(REDUCTIONS),
        "label_smoothing": choose.choice([0.0, 0.0, 0.1, 1.0]),
        "softcap": choose.choice([None, None, 3.0, 30.0]),
    }
    if not probabilities:
        options["ignore_index"] = choose.choice([None, -100, 0, -1])
        ignored = -100 if options["ignore_index"] is None else options["ignore_index"]
        tensors[3][torch.rand(tokens) < 0.3] = ignored
    grad = torch.randn(tokens, dtype=torch.float64) if options["reduction"] == "none" else None
    return dtype, tensors, options, grad


def run(loss_of, tensors, options, grad, dtype):
    x, w, bias, t, weight = in_dtype(tensors, dtype)
    loss = loss_of(x, w, t, linear_bias=bias, weight=weight, **options)
    return gradients(loss, (x, w, bias), grad)


@pytest.mark.parametrize("first", range(0, 200, 50))
def test_error_is_at_most_twice_that_of_torch(first):
    for seed in range(first, first + 50):
        dtype, tensors, options, grad = random_case(seed)
        exact = run(plain, tensors, options, grad, torch.float64)
        torchs = run(plain, tensors, options, grad, dtype)
        ours = run(chunked, tensors, options, grad, dtype)
        assert len(exact) == len(ours)
        for right, other, found in zip(exact, torchs, ours, strict=True):
            assert found.dtype == other.dtype and found.shape == other.shape
            if right.isnan().any():
                assert torch.equal(found.isnan(), right.isnan())
                continue
            if dtype == torch.float64:  # torch's are the exact ones
                torch.testing.assert_close(found, right, rtol=1e-10, atol=1e-12)
                continue
            error = (found.double() - right).norm().item()
            allowed = 2 * (other.double() - right).norm().item()
            # A few roundings of what it is made of, where torch's error happens to be none.
            scale = max(right.norm().item(), tensors[1].norm().item() * 0.01)
            assert error <= allowed + 8 * torch.finfo(dtype).eps * scale, (seed, options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("probabilities", [False, True], ids=["indices", "probabilities"])
def test_16_bit_sums_are_in_float32(dtype, probabilities):
    x, w, t = problem(64, 32, 4096, dtype, probabilities=probabilities)
    exact = gradients(plain(x.double(), w.double(), t if t.dtype == torch.long else t.double()), ())
    ours = chunked(x, w, t)
    assert ours.dtype == plain(x, w, t).dtype
    torch.testing.assert_close(ours.double(), exact[0], rtol=8 * torch.finfo(dtype).eps, atol=0)


def test_chunks_of_any_size_are_the_same_loss():
    x, w, t = problem(33, 16, 3000)
    results = [gradients(plain(x, w, t), (x, w))]
    for size in (None, 256, 1024, 8192):
        results.append(gradients(ms.linear_cross_entropy(x, w, t, chunk_size=size), (x, w)))
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], rtol=1e-4, atol=1e-6)


def test_results_are_the_same_bits_in_each_run_and_for_any_number_of_threads():
    x, w, t = problem(300, 16, 3000)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 2):
            torch.set_num_threads(threads)
            results.append(gradients(chunked(x, w, t, softcap=5.0), (x, w)))
    finally:
        torch.set_num_threads(before)
    assert_equal(results[1], results[2])
    torch.testing.assert_close(results[0], results[1])  # matrix products may differ


def test_inputs_that_are_not_contiguous():
    x, w, t = problem(12, 8, 600)
    a, b = x.detach().t().contiguous().t().requires_grad_(), w.detach().t().contiguous().t()
    b.requires_grad_()
    target = torch.stack([t, t], 1)[:, 0]
    found = gradients(chunked(a, b, target), (a, b))
    torch.testing.assert_close(found, gradients(plain(x, w, t), (x, w)))
    assert found[2].stride() == b.stride()


def test_one_sample_and_several_dimensions():
    x, w, t = problem(1, 8, 600)
    for target in (t[0], torch.rand(600)):
        for reduction in REDUCTIONS:
            found = chunked(x[0], w, target, reduction=reduction)
            torch.testing.assert_close(found, plain(x[0], w, target, reduction=reduction))
    wide = torch.randn(5, 2, 3, 8)
    x, target = torch.randn(4, 8), torch.randint(5, (4, 2, 3))
    logits = (x @ wide.reshape(-1, 8).t()).reshape(4, 5, 2, 3)
    torch.testing.assert_close(chunked(x, wide, target), F.cross_entropy(logits, target))


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_no_token_and_no_token_that_counts(reduction):
    x, w, t = problem(0, 8, 600)
    ignored = torch.full((3,), -100)
    more = torch.randn(3, 8, requires_grad=True)
    for input, target in ((x, t), (x, torch.empty(0, 600)), (more, ignored)):
        grad = torch.ones(len(input)) if reduction == "none" else None
        found = gradients(chunked(input, w, target, reduction=reduction), (input, w), grad)
        expected = gradients(plain(input, w, target, reduction=reduction), (input, w), grad)
        torch.testing.assert_close(found, expected, equal_nan=True)


def test_infinite_logits_of_other_classes():
    """As biases of -inf that mask classes, here those of a whole chunk."""
    x, w, t = problem(9, 8, 700)
    t = t % 200
    bias = torch.zeros(700)
    bias[200:520] = -torch.inf
    found = gradients(chunked(x, w, t, linear_bias=bias), (x, w))
    torch.testing.assert_close(found, gradients(plain(x, w, t, linear_bias=bias), (x, w)))
    bias = torch.zeros(700)
    bias[:300] = -torch.inf  # the first chunk has nothing
    t = t + 400
    found = gradients(chunked(x, w, t, linear_bias=bias), (x, w))
    torch.testing.assert_close(found, gradients(plain(x, w, t, linear_bias=bias), (x, w)))


def test_large_logits():
    x, w, t = problem(9, 8, 700)
    for scale in (1e2, 1e4):
        a = (x.detach() * scale).requires_grad_()
        torch.testing.assert_close(
            gradients(chunked(a, w, t), (a, w)), gradients(plain(a, w, t), (a, w))
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("probabilities", [False, True], ids=["indices", "probabilities"])
def test_autocast(dtype, probabilities):
    x, w, t = problem(17, 12, 600, probabilities=probabilities)
    bias = torch.randn(600, requires_grad=True)
    results = []
    for loss_of in (plain, chunked):
        with torch.autocast("cpu", dtype=dtype):
            loss = loss_of(x, w, t, linear_bias=bias)
        results.append(gradients(loss, (x, w, bias)))
    assert results[0][0].dtype == results[1][0].dtype == torch.float32
    torch.testing.assert_close(results[1], results[0], rtol=0.02, atol=1e-3)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("probabilities", [False, True], ids=["indices", "probabilities"])
def test_double_backward(reduction, probabilities):
    x, w, t = problem(4, 3, 300, torch.float64, probabilities=probabilities)
    bias = torch.randn(300, dtype=torch.float64, requires_grad=True)

    def loss_of(*tensors):
        of = {"linear_bias": tensors[2], "reduction": reduction, "softcap": 4.0}
        return chunked(tensors[0], tensors[1], t, label_smoothing=0.1, **of)

    assert torch.autograd.gradcheck(loss_of, (x, w, bias), fast_mode=True)
    assert torch.autograd.gradgradcheck(loss_of, (x, w, bias), fast_mode=True)


def test_double_backward_where_the_input_is_made_of_the_weight():
    w = torch.randn(300, 6, dtype=torch.float64, requires_grad=True)
    t = torch.randint(300, (5,))
    results = []
    for loss_of in (plain, chunked):
        loss = loss_of(w[:5] * 2, w, t)
        (grad,) = torch.autograd.grad(loss, w, create_graph=True)
        results.append([grad, *torch.autograd.grad(grad.square().sum(), w)])
    torch.testing.assert_close(results[1], results[0])


def test_backward_twice_and_to_some_inputs():
    x, w, t = problem()
    loss, expected = chunked(x, w, t), gradients(plain(x, w, t), (x, w))
    for _ in range(2):
        found = torch.autograd.grad(loss, (x, w), retain_graph=True)
        torch.testing.assert_close(list(found), expected[1:])
    (found,) = torch.autograd.grad(loss, x, retain_graph=True)
    torch.testing.assert_close(found, expected[1])
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_a_change_in_between_raises():
    x, w, t = problem()
    loss = chunked(x, w, t)
    with torch.no_grad():
        w.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("use_reentrant", [None, False, True], ids=["ours", "torch's", "reentrant"])
def test_inside_of_a_checkpointed_region(use_reentrant):
    x, w, t = problem()
    u = torch.randn(12, 12, requires_grad=True)

    def region(x, w):
        return chunked(torch.tanh(x @ u), w, t)

    region(x, w).backward()
    expected = [x.grad, w.grad, u.grad]
    x.grad = w.grad = u.grad = None
    if use_reentrant is None:
        ms.checkpoint(region, x, w).backward()
    else:
        torch.utils.checkpoint.checkpoint(region, x, w, use_reentrant=use_reentrant).backward()
    assert_equal([x.grad, w.grad, u.grad], expected)


def test_inside_of_remat_and_with_explicit_regions():
    x, w, t = problem()
    expected = gradients(chunked(torch.tanh(x), w, t), (x, w))
    with ms.remat():
        loss = chunked(torch.tanh(x), w, t)
    assert_equal(gradients(loss, (x, w)), expected)
    loss = ms.CheckpointFunction.apply(lambda x, w: chunked(torch.tanh(x), w, t), 2, x, w)
    assert_equal(gradients(loss, (x, w)), expected)


def test_threads():
    x, w, t = problem(40, 12, 3000)
    expected = gradients(chunked(x, w, t), (x, w))

    def work(_):
        for _ in range(5):
            assert_equal(gradients(chunked(x, w, t), (x, w)), expected)

    run_threads(work, 4)


def test_transforms_and_targets_that_need_gradients():
    x, w, t = problem(5, 4, 300)
    expected = gradients(plain(x, w, t), (x, w))
    found = torch.func.grad(chunked, (0, 1))(x.detach(), w.detach(), t)
    torch.testing.assert_close(list(found), expected[1:])
    p = torch.rand(5, 300, requires_grad=True)
    torch.testing.assert_close(
        gradients(chunked(x, w, p), (x, w, p)), gradients(plain(x, w, p), (x, w, p))
    )


def test_fake_tensors():
    x, w, t = problem()
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        a, b, c = (mode.from_tensor(v) for v in (x, w, t))
        a.requires_grad_(), b.requires_grad_()
        loss = chunked(a, b, c)
        loss.backward()
        assert loss.shape == () and a.grad.shape == x.shape and b.grad.shape == w.shape


def test_compiled():
    x, w, t = problem()

    @torch.compile(backend="aot_eager")
    def step(x, w, t):
        return chunked(x * 2, w, t) + 1

    found = gradients(step(x, w, t), (x, w))
    assert_equal(found, gradients(chunked(x * 2, w, t) + 1, (x, w)))


def wrong_calls():
    x, w, t = problem(3, 4, 5)
    w2 = torch.randn(5, 2, 4)
    yield x, w, t[:2], {}
    yield x, w, t.int(), {}
    yield x, w, torch.tensor([0, 5, 1]), {}
    yield x, w, torch.tensor([0, -1, 1]), {}
    yield x, w, torch.rand(3, 4), {}
    yield x, w, t, {"reduction": "most"}
    yield x, w, t, {"label_smoothing": 2.0}
    yield x, w, t, {"weight": torch.rand(4)}
    yield x, w, t, {"linear_bias": torch.rand(4)}
    yield x, w.double(), t, {}
    yield x, w[:, :3], t, {}
    yield x[None], w, t, {}
    yield x, w[0], t, {}
    yield x[0], w2, t, {}
    yield x, w, torch.rand(3, 5), {"ignore_index": 1}


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="torch has no such function")
@pytest.mark.parametrize("number", range(15))
def test_wrong_arguments_raise_torchs_errors(number):
    x, w, t, options = next(itertools.islice(wrong_calls(), number, None))
    with pytest.raises((RuntimeError, ValueError, IndexError)) as expected:
        F.linear_cross_entropy(x, w, t, **options)
    with pytest.raises(type(expected.value)) as found:
        ms.linear_cross_entropy(x, w, t, **options)
    assert str(found.value) == str(expected.value)


def test_own_options_are_checked():
    x, w, t = problem(3, 4, 5)
    for softcap in (0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="softcap must be a positive number or None"):
            ms.linear_cross_entropy(x, w, t, softcap=softcap)
    for size in (0, 100, -256):
        with pytest.raises(ValueError, match="chunk_size must be a positive multiple of 256"):
            ms.linear_cross_entropy(x, w, t, chunk_size=size)


def test_module():
    torch.manual_seed(3)
    loss_of = ms.LinearCrossEntropyLoss(8, 300, bias=True, weight=torch.rand(300), softcap=9.0)
    x, t = torch.randn(5, 8), torch.randint(300, (5,))
    expected = plain(
        x, loss_of.linear.weight, t, linear_bias=loss_of.linear.bias, softcap=9.0,
        weight=loss_of.weight,
    )  # fmt: skip
    torch.testing.assert_close(loss_of(x, t), expected)
    assert "num_classes=300" in repr(loss_of) and "softcap=9.0" in repr(loss_of)
    several = ms.LinearCrossEntropyLoss(8, 5, out_features=(2, 3))
    assert several(x, torch.randint(5, (5, 2, 3))).shape == ()
    with pytest.raises(RuntimeError, match="expected weight shape"):
        ms.LinearCrossEntropyLoss(8, 300, weight=torch.rand(3))
    with pytest.raises(RuntimeError, match="label_smoothing"):
        ms.LinearCrossEntropyLoss(8, 300, label_smoothing=2)
    if hasattr(torch.nn, "LinearCrossEntropyLoss"):
        torchs = torch.nn.LinearCrossEntropyLoss(8, 300, bias=True, weight=torch.rand(300))
        torchs.load_state_dict(loss_of.state_dict())
