"""Backwards of several threads in one optimizer's parameters, and hooks that go away in one."""

import threading

import pytest
import torch
from helpers import run_threads
from torch import nn

import memsave_ext as ms

THREADS = 8


def together(work):
    """``work(i)`` in all threads, which begin at the same time."""
    barrier = threading.Barrier(THREADS)

    def run(i):
        barrier.wait()
        work(i)

    run_threads(run, THREADS)


def into_one_parameter(work):
    """At the same time only where torch's lock of a gradient can be taken."""
    if ms._native.available:
        together(work)
        return
    turn = threading.Lock()

    def in_turn(i):
        with turn:
            work(i)

    together(in_turn)


def make(sizes, **options):
    torch.manual_seed(2)
    params = [nn.Parameter(torch.randn(size, dtype=torch.float64)) for size in sizes]
    return params, ms.Adam(params, lr=0.1, in_backward=True, **options)


def exact(sizes, gradients):
    """The parameters after one step of torch's."""
    params, other = make(sizes)
    other.remove_hooks()
    for param, grad in zip(params, gradients, strict=True):
        param.grad = grad
    torch.optim.Adam(params, lr=0.1).step()
    return params


SIZES = [(20_000,), (20_000, 3), (5,), (700, 2)]


@pytest.mark.parametrize("small_bytes", [0, 1 << 16, 1 << 20], ids=["at once", "some", "waiting"])
def test_gradients_of_all_threads_are_summed(small_bytes):
    """Whole numbers: in float64 their sums do not depend on the order."""
    for _ in range(12):
        params, optimizer = make(SIZES, small_bytes=small_bytes, bucket_bytes=1 << 20)
        weights = [[torch.randint(-9, 9, p.shape).double() for p in params] for _ in range(THREADS)]

        def work(i, params=params, weights=weights):
            order = list(zip(params, weights[i], strict=True))
            sum((p * w).sum() for p, w in (order if i % 2 else order[::-1])).backward()

        with optimizer.accumulate():
            together(work)
        assert not optimizer.state
        optimizer.step()
        sums = [sum(w[k] for w in weights) for k in range(len(params))]
        for p, q in zip(params, exact(SIZES, sums), strict=True):
            torch.testing.assert_close(p, q, rtol=0, atol=1e-6)
            assert optimizer.state[p]["step"] == 1
        optimizer.remove_hooks()


@pytest.mark.parametrize("small_bytes", [0, 1 << 20], ids=["at once", "waiting"])
def test_second_gradients_of_a_step_are_refused(small_bytes):
    """But where torch has added them up before the first hook is called: the sum is stepped then,
    or refused. Each thread's is a power of two, so that the sum tells which are in it."""
    for _ in range(20):
        (param,), optimizer = make([(20_000,)], small_bytes=small_bytes)
        before, failures = param.detach().clone(), []

        def work(i, param=param, failures=failures):
            try:
                (param * 2**i).sum().backward()
            except RuntimeError as error:
                failures.append(str(error))

        into_one_parameter(work)
        if not ms._native.available:
            assert all("in one step" in text for text in failures) and len(failures) == THREADS - 1
            return
        assert all("receives a second gradient in one step" in text for text in failures)
        left = torch.zeros_like(param) if param.grad is None else param.grad
        used = torch.zeros_like(param)
        if state := optimizer.state.get(param):
            used = (state["exp_avg"] * 10).round()
            assert state["step"] == 1 and not torch.equal(param, before)
        else:
            assert torch.equal(param, before)
        assert (used + left == 2**THREADS - 1).all()
        assert used.unique().numel() == 1  # never a part of a gradient
        optimizer.remove_hooks()


@pytest.mark.parametrize("small_bytes", [0, 1 << 20], ids=["at once", "waiting"])
def test_each_thread_its_own_parameters(small_bytes):
    """States are made once, whichever thread's backward makes them."""
    params, optimizer = make([(50,)] * (4 * THREADS), small_bytes=small_bytes, bucket_bytes=1000)
    for step in range(1, 21):
        together(lambda i: sum(p.square().sum() for p in params[i::THREADS]).backward())
        optimizer.step()
        assert all(p.grad is None for p in params)
        assert [optimizer.state[p]["step"].item() for p in params] == [step] * len(params)


def test_step_while_a_backward_runs():
    params, optimizer = make([(10,), (10,)])
    h = params[0] * 2
    h.register_hook(lambda _: optimizer.step())
    with pytest.raises(
        RuntimeError, match=r"memsave_ext: step\(\) was called while a backward is running"
    ):
        (params[1] + h).sum().backward()
    optimizer.zero_grad()
    (params[1] + params[0]).sum().backward()
    optimizer.step()


def test_a_hook_that_removes_the_hooks():
    params, optimizer = make([(10,), (10,)], small_bytes=0)
    before = [p.detach().clone() for p in params]
    for p in params:
        p.register_post_accumulate_grad_hook(lambda _: optimizer.remove_hooks())
    sum(params).sum().backward()
    stepped = sum(not torch.equal(p, b) for p, b in zip(params, before, strict=True))
    assert stepped == 0 if ms._native.available else stepped <= 1
    optimizer.step()
    assert not any(torch.equal(p, b) for p, b in zip(params, before, strict=True))


def test_a_parameter_that_left_param_groups_is_not_stepped():
    params, optimizer = make([(10,)] * 3, small_bytes=0)
    sum(params).sum().backward()
    optimizer.step()
    left = optimizer.param_groups[0]["params"].pop(0)
    for _ in range(5):
        before = [p.detach().clone() for p in params]
        (left * 5 - params[1] - params[2]).sum().backward()
        optimizer.step()
        assert torch.equal(left, before[0]) and left.grad is not None
        assert all((p > b).all() for p, b in zip(params[1:], before[1:], strict=True))
        left.grad = None


@pytest.mark.filterwarnings("ignore:memsave_ext. norm_pass")
def test_a_norm_pass_in_another_thread_whose_gradients_a_later_hook_takes():
    params, optimizer = make([(10,), (10,)])

    def take(param):
        param.grad = None

    params[0].register_post_accumulate_grad_hook(take)
    before = [p.detach().clone() for p in params]
    with optimizer.norm_pass(1.0):
        run_threads(lambda _: sum(params).sum().backward(), 1)
    sum(params).sum().backward()
    optimizer.step()
    assert torch.equal(params[0], before[0]) and not torch.equal(params[1], before[1])
