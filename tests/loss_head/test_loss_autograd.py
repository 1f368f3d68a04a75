"""The loss inside of what else torch and this package do: autocast, higher derivatives, regions,
threads, transforms, compilers."""

import pytest
import torch
from helpers import assert_equal, run_threads
from losses import REDUCTIONS, chunked, gradients, plain, problem

import memsave_ext as ms


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_graph_of_gradients_in_autocast(dtype):
    """A GradScaler's scale is infinite in float16; a weight of the classes stays float32."""
    x, w, t = problem(16, 8, 300)
    weight = torch.rand(300)
    with torch.autocast("cpu", dtype):
        loss = chunked(0.1 * x, 0.1 * w, t, weight=weight) * 65536
    expected = torch.autograd.grad(loss, (x, w), retain_graph=True)
    found = torch.autograd.grad(loss, (x, w), create_graph=True)
    torch.testing.assert_close(found, expected, rtol=0.02, atol=20.0)
    assert all(grad.isfinite().all() and grad.abs().max() > 10 for grad in found)
    (1e-4 * found[0].square().sum()).backward()
    assert w.grad.isfinite().all()
