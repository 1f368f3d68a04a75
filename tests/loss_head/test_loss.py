"""The loss and its gradients beside those of torch's operators, in float64 and in its dtype."""

import random

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_equal
from losses import REDUCTIONS, chunked, gradients, in_dtype, plain, problem

import memsave_ext as ms

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


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
