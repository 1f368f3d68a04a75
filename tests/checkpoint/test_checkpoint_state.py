"""checkpoint() and what surrounds it: random numbers, autocast, early stop, memory, threads."""

import contextlib
import dataclasses
import gc
import threading
import time
import weakref

import pytest
import torch
import torch.utils.checkpoint as torch_checkpoint
from helpers import assert_equal, both, host_memory_grows, leaf, plain, run_threads
from processes import run_program
from torch import nn
from torch.nn import functional as F

import memsave_ext as ms
from memsave_ext import _native

checkpoint = ms.checkpoint


def test_random_numbers_are_left_alone_by_backward():
    x = leaf(100)
    out = checkpoint(lambda a: F.dropout(a, 0.5).exp(), x)
    before = torch.get_rng_state()
    out.sum().backward()
    assert torch.equal(before, torch.get_rng_state())


def test_the_second_of_two_normal_numbers():
    """torch draws two at once where it draws few, and keeps the other for the next time."""
    x = leaf(3)

    def function(a):
        return (a * torch.randn(3)).exp().sin()

    torch.randn(1)
    torch.manual_seed(7)
    torch.randn(3)
    (expected,) = torch.autograd.grad(function(x).sum(), x)
    torch.manual_seed(7)
    torch.randn(3)
    out = checkpoint(function, x)
    torch.randn(2)
    assert_equal([expected], torch.autograd.grad(out.sum(), x))


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
    bn, twin, x = ms.BatchNorm1d(4), ms.BatchNorm1d(4), leaf(8, 4)
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
def test_early_stop_where_the_rest_is_not_needed_any_more():
    ran = []

    def function(a):
        first = a.exp()
        ran.append("first")
        second = (first * 2).exp()
        ran.append("second")
        return first.sum(), second.sin().cos().sum()

    first, second = checkpoint(function, leaf(200, 200))
    del second
    ran.clear()
    first.backward()
    assert ran == ["first"]


@pytest.mark.skipif(not _native.available, reason="pure Python frees it with the region")
def test_what_was_recomputed_for_a_graph_that_goes_is_freed():
    x = leaf(512, 512)
    first, second = checkpoint(lambda a: (a.exp().sum(), (a * 2).exp().sum()), x)
    with ms.memory.track() as t:
        (grad,) = torch.autograd.grad(first, x, retain_graph=True)
        del grad
        assert t.live < x.nbytes  # with the backward
        with torch_checkpoint.GraphExecGroup():  # whose backwards share it
            (grad,) = torch.autograd.grad(first, x, retain_graph=True)
            del grad
            before = t.live
            del second
            assert t.live <= before - x.nbytes


def test_threads_of_one_backward_wait_for_its_recompute():
    saved, taken, grads = threading.Event(), threading.Event(), {}

    def function(a):
        first = a.sin()
        if ms.is_recomputing():
            saved.set()
            taken.wait(0.3)  # which does not come before the recompute has ended
        return first, (a + 1).cos()

    x = leaf(4)
    outs, group = checkpoint(function, x), torch_checkpoint.GraphExecGroup()

    def run(number):
        if number == 0:
            assert saved.wait(30)
        with group:
            (grads[number],) = torch.autograd.grad(outs[number].sum(), x, retain_graph=True)
        taken.set()

    run_threads(run, 2)
    assert_equal([grads[0], grads[1]], [x.cos(), -(x + 1).sin()])


def test_no_thread_takes_values_of_a_recompute_that_turns_out_to_be_wrong():
    saved, raised = threading.Event(), {}

    def function(a):
        first = a.sin()
        if ms.is_recomputing():
            saved.set()
            time.sleep(0.3)  # the other thread asks for what is saved by now
        return first, (a.double() if ms.is_recomputing() else a + 1).cos()

    x = leaf(4)
    outs, group = checkpoint(function, x), torch_checkpoint.GraphExecGroup()

    def run(number):
        if number == 0:
            assert saved.wait(30)
        with group, pytest.raises(torch_checkpoint.CheckpointError) as raised[number]:
            torch.autograd.grad(outs[number].sum(), x, retain_graph=True)

    run_threads(run, 2)
    assert len(raised) == 2


@pytest.mark.skipif(not _native.available, reason="pure Python stops whatever is left")
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


class Noisy(nn.Module):
    """Draws from generators that it, a closure and a file have."""

    def __init__(self, own):
        super().__init__()
        self.linear, self.generator, self.own = nn.Linear(8, 8), torch.Generator(), own

    def forward(self, x):
        x = self.linear(x).sin() * torch.rand(x.shape, generator=self.generator)
        x = x.sin() * torch.rand(x.shape, generator=self.own[0])
        return x.sin() * torch.rand(x.shape, generator=_of_file)


_of_file = torch.Generator()


@pytest.mark.parametrize("run", [checkpoint, "CheckpointFunction"])
def test_numbers_of_own_generators_are_drawn_again(run):
    generators = [torch.Generator(), _of_file]

    def trained(run):
        torch.manual_seed(0)
        model = Noisy(generators[:1])
        generators_now = [*generators, model.generator]
        for number, generator in enumerate(generators_now):
            generator.manual_seed(number)
        x = torch.randn(4, 8)
        for _ in range(2):
            x = run(model, x)
        x.sum().backward()
        states = [g.get_state() for g in generators_now]
        return [x, *(p.grad for p in model.parameters()), *states]

    def explicit(model, x):
        return ms.CheckpointFunction.apply(model, 1, x, *model.parameters())

    got = trained(explicit if isinstance(run, str) else run)
    assert_equal(trained(lambda model, x: model(x)), got)
    if run is checkpoint:
        other = trained(lambda model, x: checkpoint(model, x, preserve_rng_state=False))
        assert not torch.equal(other[1], got[1])


class MakesItsGenerator(nn.Module):
    generator = None

    def forward(self, x):
        if self.generator is None:
            self.generator = torch.Generator().manual_seed(0)
        return x.sin() * torch.rand(x.shape, generator=self.generator)


def explicit(function, x):
    return ms.CheckpointFunction.apply(function, 1, x)


@pytest.mark.parametrize("run", [checkpoint, explicit])
@pytest.mark.parametrize("which", ["made in the forward", "replaced since"])
def test_a_generator_that_the_forward_did_not_begin_with(run, which):
    x = leaf(4, 8)
    if which == "made in the forward":
        out = run(MakesItsGenerator(), x)
    else:
        generator = torch.Generator().manual_seed(0)
        out = run(lambda a: a.sin() * torch.rand(a.shape, generator=generator), x)
        generator = torch.Generator().manual_seed(1)
    with pytest.raises(ms.CheckpointError, match="torch.Generator that was not there"):
        out.sum().backward()


def test_a_generator_that_each_run_makes():
    class Makes(nn.Module):
        def forward(self, x):
            self.generator = torch.Generator().manual_seed(0)
            return x.sin() * torch.rand(x.shape, generator=self.generator)

    x, module = leaf(4, 8), Makes()
    got = [torch.autograd.grad(run(module, x).sum(), x) for run in (checkpoint, explicit)]
    expected = torch.autograd.grad(module(x).sum(), x)
    assert_equal([*expected, *expected], [one for (one,) in got])


@dataclasses.dataclass(slots=True)
class Result:
    y: torch.Tensor


class Hidden:
    def __init__(self, y):
        self.y = y


@pytest.mark.parametrize("kind", [Result, Hidden])
def test_rrelu_whose_result_is_in_an_object(kind):
    """Where nobody looks for it, the recompute runs on."""
    x, w = leaf(128, 128), leaf(128, 128)

    def function(a):
        torch.full((128, 128), 7.0)
        return kind(F.rrelu(a @ w, training=True))

    both(lambda run: run(function, x).y.sum(), (x, w))


def test_rrelu_as_the_last_that_is_needed():
    """What was saved after it has been dropped, so that the recompute could end before it."""
    x = leaf(100, 100)

    def function(a):
        y = F.rrelu(a, training=True)
        (y * y).exp()
        return y + 1

    both(lambda run: run(function, x).sum(), (x,))


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

    def regions(count):
        for _ in range(count):
            torch.autograd.grad(checkpoint(block, x).sum(), x)
            ms.CheckpointFunction.apply(block, 1, x, *block.parameters()).sum().backward()
            checkpoint(block, x)

    regions(1000)
    assert not host_memory_grows(lambda: regions(3000), 0.6 * 2**20)  # 70 bytes a region


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


def backwards_at_once(function, threads, times):
    """Every thread runs backwards of one and the same region; all get the same gradients."""
    x, w = leaf(64), leaf(64)
    out = checkpoint(lambda a: function(a, w), x).sum()
    expected = torch.autograd.grad(out, (x, w), retain_graph=True)

    def work(i):
        for _ in range(times):
            assert_equal(expected, torch.autograd.grad(out, (x, w), retain_graph=True))

    run_threads(work, threads)


def test_one_region_recomputed_by_two_backwards_at_once():
    entered = threading.Barrier(2, timeout=20)

    def function(a, w):
        if ms.is_recomputing():
            with contextlib.suppress(threading.BrokenBarrierError):
                entered.wait(0.05)  # lets the other backward arrive
        return (a * w).tanh().exp()

    backwards_at_once(function, threads=2, times=5)


def test_one_region_opened_by_four_backwards_at_once():
    """All of a region's state is shared here; with engine hooks, without the GIL."""

    def function(a, w):
        for _ in range(30):
            a = (a * w).sin()
        return a

    backwards_at_once(function, threads=4, times=25)


def explicit(function, x):
    return ms.CheckpointFunction.apply(function, 1, x)


@pytest.mark.parametrize("run", [ms.checkpoint, explicit])
def test_random_numbers_that_the_function_restores_by_itself(run):
    def function(a):
        with torch.random.fork_rng():
            return (a * torch.rand(4)).sin()

    x = leaf(4)
    torch.manual_seed(5)
    expected = torch.autograd.grad(function(x).sum(), x)
    torch.manual_seed(5)
    out = run(function, x)
    torch.rand(3)  # others' numbers in between
    after = torch.random.get_rng_state()
    assert_equal(expected, torch.autograd.grad(out.sum(), x))
    assert torch.equal(after, torch.random.get_rng_state())


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("size", [4, 40000])
def test_a_recompute_that_saves_more_after_the_last_needed_tensor(size, early_stop):
    """As in torch: an error where it runs to the end."""

    def function(a):
        y = a.exp()
        return y.sin() if ms.is_recomputing() else y

    x = leaf(size)
    out = ms.checkpoint(function, x, early_stop=early_stop)
    if early_stop:
        assert_equal(torch.autograd.grad(out.sum(), x), [x.detach().exp()])
    else:
        with pytest.raises(ms.CheckpointError, match="save more tensors"):
            out.sum().backward()


@pytest.mark.parametrize("early_stop", [True, False])
def test_a_backward_inside_the_function_runs_nothing_that_has_not_run(early_stop):
    w, after = leaf(3, 4), []
    norm = ms.BatchNorm1d(4)

    def function(x):
        h = x * w
        (g,) = torch.autograd.grad(h.sin().sum(), h, create_graph=True)
        after.append(ms.is_recomputing())
        return norm(g * h)

    x = leaf(3, 4)
    out = checkpoint(function, x, early_stop=early_stop)
    assert after == [False]
    assert norm.num_batches_tracked == 1
    expected = torch.autograd.grad(norm((x * w).cos() * (x * w)).square().sum(), (x, w))
    for a, b in zip(expected, torch.autograd.grad(out.square().sum(), (x, w)), strict=True):
        torch.testing.assert_close(a, b)


def test_a_backward_inside_the_function_that_saves_nothing():
    after = []

    def function(x):
        h = x.sin()
        (g,) = torch.autograd.grad(h.sum(), x, retain_graph=True)
        after.append(ms.is_recomputing())
        return (g * h).exp()

    out = checkpoint(function, leaf(200, 200))
    assert after == [False]
    out.sum().backward()
    assert after == [False, True]


@pytest.mark.parametrize("engine_hooks", [False, True] if _native.available else [False])
def test_threads_whose_regions_share_a_parameter(engine_hooks):
    """torch takes a leaf's mutex before the GIL: nothing here may wait for it with the GIL held.

    ``w[1:]`` is not among the functions: torch slices with the GIL held, and hangs here by itself.
    """
    code = """
import faulthandler, sys, threading
import torch, memsave_ext as ms
ms.use_engine_hooks(ENGINE_HOOKS)
faulthandler.dump_traceback_later(300, exit=True)
sys.setswitchinterval(1e-4)
one, f = torch.ones(20_000), lambda w, o: w * o
runs = [
    lambda w: w * one,
    lambda w: ms.CheckpointFunction.apply(f, 2, w, one),
    lambda w: ms.checkpoint(f, w, one),
    lambda w: ms.checkpoint(lambda w: w.narrow(0, 1, 19_999), w),
]
def work(i, w, start):
    start.wait()
    for _ in range(3):
        runs[i % 4](w).sum().backward()
for r in range(15):
    w, start = torch.nn.Parameter(torch.zeros(20_000)), threading.Barrier(8)
    threads = [threading.Thread(target=work, args=(i, w, start)) for i in range(8)]
    for t in threads: t.start()
    for t in threads: t.join()
print("done")
"""
    done = run_program(code.replace("ENGINE_HOOKS", str(engine_hooks)))
    assert done.stdout.strip() == "done", done.stderr[-4000:]
