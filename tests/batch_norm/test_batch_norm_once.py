"""Running statistics are those of the run without checkpoint, bit for bit, everywhere."""

import gc
import weakref

import pytest
import torch
from batch_norms import (
    CHECKPOINTS,
    KINDS,
    NO_DOUBLE_BACKWARD,
    NO_SECOND_BACKWARD,
    assert_same_buffers,
    plain,
)
from helpers import assert_equal, run_threads
from torch import nn
from torch.utils import checkpoint as torch_checkpoint
from torch.utils._python_dispatch import TorchDispatchMode

import memsave_ext as ms
from memsave_ext import _parts
from memsave_ext.batch_norm.calls import Call

NO_GRAPH_IS_RUN = ("checkpoint", "non-reentrant", "non-reentrant context_fn")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.a, self.b = ms.BatchNorm2d(4), ms.BatchNorm2d(4, momentum=None)
        self.c = ms.BatchNorm2d(4, affine=False, activation="relu")
        self.d = ms.BatchNorm2d(4, track_running_stats=False)


def first(net, run, x):
    run(lambda t: net.conv(net.a(t)).relu(), x, params(net)).sum().backward()


def middle(net, run, x):
    run(lambda t: net.conv(net.b(net.conv(t))).sigmoid(), x, params(net)).sum().backward()


def last(net, run, x):
    y = run(lambda t: net.c(net.d(net.a(net.conv(t)))), x, params(net))
    y.square().sum().backward()


def alone(net, run, x):
    run(lambda t: net.a(t), x, params(net)).square().sum().backward()


def three_times(net, run, x):
    def function(t):
        return net.conv(net.a(net.a(2 * net.a(t)) ** 2)).sin()

    run(function, x, params(net)).sum().backward()


def two_regions(net, run, x):
    y = run(lambda t: net.conv(net.a(t)), x, params(net))
    z = run(lambda t: net.b(net.a(t)).sin(), y, params(net))
    (y * z).sum().backward()


def micro_batches(net, run, x):
    batches = x, x**2, x.exp()
    outputs = [run(lambda t: net.conv(net.a(t).sin()), b, params(net)) for b in batches]
    for output in outputs[::-1]:
        output.sum().backward()


def frozen(net, run, x):
    net.a.eval()
    run(lambda t: net.b(net.a(t)).sin(), x, params(net)).sum().backward()


def without_backward(net, run, x):
    run(lambda t: net.conv(net.a(t)).relu(), x, params(net))


def without_grad(net, run, x):
    with torch.no_grad():
        run(lambda t: net.conv(net.a(t)).relu(), x, params(net))


def input_without_grad(net, run, x):
    bias = torch.zeros(1, requires_grad=True)  # reentrant checkpoints want something that needs one
    run(lambda t: net.conv(net.a(x.detach()) + t), bias, params(net)).sum().backward()


def hook_on_output(net, run, x):
    y = run(lambda t: net.conv(net.a(t)), x, params(net))
    y.register_hook(lambda grad: net.a(grad) * 0 + grad)
    y.sum().backward()


def hook_on_input(net, run, x):
    h = x * 2
    h.register_hook(lambda grad: net.b(net.a(grad)) * 0 + grad)
    run(lambda t: net.conv(net.a(t)), h, params(net)).sum().backward()


def nested(net, run, x):
    def outer(t):
        return net.b(run(lambda u: net.conv(net.a(net.a(u))).sin(), net.a(t), params(net)))

    run(outer, x, params(net)).square().sum().backward()


def nested_deeply(net, run, x):
    def wrap(inner):
        return lambda t: run(lambda u: inner(net.a(u).sin()), t, params(net))

    wrap(wrap(wrap(lambda t: net.conv(net.a(t)))))(x).sum().backward()


PROGRAMS = [
    first, middle, last, alone, three_times, two_regions, micro_batches, frozen, without_backward,
    without_grad, input_without_grad, hook_on_output, hook_on_input, nested, nested_deeply,
]  # fmt: skip


def params(net):
    return [p for p in net.parameters() if p.requires_grad]


def results(program, run):
    torch.manual_seed(2)
    net, x = Net(), torch.randn(3, 4, 5, 5, requires_grad=True)
    program(net, run, x)
    return net, [x.grad, *(p.grad for p in net.parameters())]


def check(program, run, tolerance=0.0):
    ours, grads = results(program, run)
    expected, expected_grads = results(program, plain)
    assert_same_buffers(ours, expected)
    if tolerance:
        torch.testing.assert_close(grads, expected_grads, rtol=tolerance, atol=tolerance)
    else:
        assert_equal(grads, expected_grads)


@pytest.mark.filterwarnings("ignore:.*None of the inputs have requires_grad=True")
@pytest.mark.filterwarnings("ignore:.*is not listed")
@pytest.mark.parametrize("name", CHECKPOINTS)
@pytest.mark.parametrize("program", PROGRAMS)
def test_as_without_checkpoint(program, name):
    check(program, CHECKPOINTS[name])


@pytest.mark.parametrize("inner", KINDS)
@pytest.mark.parametrize("outer", KINDS)
# torch's reentrant checkpoint refuses to be differentiated by autograd.grad.
@pytest.mark.without(
    case=lambda c: c["inner"] == "reentrant" and c["outer"] == "CheckpointFunction"
)
def test_regions_of_different_kinds_nested(outer, inner):
    def program(net, run, x):
        inside, outside = (plain, plain) if run is plain else (CHECKPOINTS[inner], run)

        def function(t):
            h = net.conv(net.a(t)).sin()
            h = inside(lambda u: net.b(net.conv(net.a(u)).sin()), h, params(net))
            return net.a(h).sin()

        outside(function, x, params(net)).sum().backward()

    # A reentrant region adds to a parameter's gradient in an order of its own.
    check(program, CHECKPOINTS[outer], tolerance=1e-6 if inner == "reentrant" else 0.0)


@pytest.mark.parametrize("name", [n for n in CHECKPOINTS if n not in NO_SECOND_BACKWARD])
def test_retain_graph(name):
    def program(net, run, x):
        y = run(lambda t: net.conv(net.a(net.a(t)).sin()), x, params(net)).sum()
        for _ in range(3):
            y.backward(retain_graph=True)

    check(program, CHECKPOINTS[name])


@pytest.mark.parametrize(
    "name", [n for n in CHECKPOINTS if n not in NO_DOUBLE_BACKWARD | NO_SECOND_BACKWARD]
)
def test_double_backward(name):
    def program(net, run, x):
        y = run(lambda t: net.b(net.conv(net.a(t)).sin()), x, params(net))
        (grad,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        grad.square().sum().backward()

    check(program, CHECKPOINTS[name])


@pytest.mark.parametrize("name", [n for n in CHECKPOINTS if n not in NO_SECOND_BACKWARD])
def test_an_exception_in_a_recompute(name):
    """The recompute that follows starts from the beginning again."""

    def program(net, run, x):
        fail = []

        def function(t):
            h = net.a(t)
            if fail:
                raise ZeroDivisionError
            return net.conv(net.a(h * 2).sin())

        y = run(function, x, params(net)).sum()
        if run is not plain:
            fail.append(True)
            with pytest.raises(ZeroDivisionError):
                y.backward(retain_graph=True)
            fail.clear()
        y.backward()

    check(program, CHECKPOINTS[name])


# Of the others the recompute's graph is not run.
@pytest.mark.parametrize("name", [n for n in KINDS if n not in NO_GRAPH_IS_RUN])
def test_a_forward_inside_a_hook_of_the_recomputed_graph(name):
    """It runs while the region's node is the current one, and is no recompute."""

    def program(net, run, x):
        def function(t):
            h = net.a(t)
            # In a first forward without a graph there is nothing to hook.
            if h.requires_grad and (run is plain or name not in ("checkpoint", "non-reentrant")):
                h.register_hook(lambda grad: net.b(grad) * 0 + grad)
            return net.conv(h).sin()

        run(function, x, params(net)).sum().backward()

    check(program, CHECKPOINTS[name])


@pytest.mark.parametrize("name", KINDS)
def test_replicas_in_threads(name):
    def program(net, run, x):
        nets = [net, Net(), Net()]
        for other in nets[1:]:
            other.load_state_dict(net.state_dict())

        outputs = [None] * 3

        def replica(i):
            t = x * (i + 1)
            for _ in range(5):
                t = run(lambda u: nets[i].conv(nets[i].a(u)).sin(), t, params(nets[i]))
            outputs[i] = t

        run_threads(replica, 3)
        sum(o.sum() for o in outputs).backward()
        net.d.register_buffer("others", torch.stack([n.a.running_var for n in nets]))

    check(program, CHECKPOINTS[name], tolerance=1e-6)  # the gradient of x is summed in any order


@pytest.mark.parametrize("of", [ms.checkpoint_sequential, torch_checkpoint.checkpoint_sequential])
def test_checkpoint_sequential(of):
    def program(net, run, x):
        layers = nn.Sequential(net.a, net.conv, net.b, nn.ReLU(), net.c, net.d)
        y = layers(x) if run is plain else of(layers, 3, x, use_reentrant=False)
        y.square().sum().backward()

    check(program, of)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_nothing_is_left_behind(name):
    def records():
        gc.collect()
        return sum(type(o) is Call for o in gc.get_objects())

    before = records()
    net, x = Net(), torch.randn(3, 4, 5, 5, requires_grad=True)
    run = CHECKPOINTS[name]
    outputs = [
        run(lambda t: net.conv(net.a(t)).sin(), x, params(net)),
        run(lambda t: net.a(net.a(t)), x, params(net)),
    ]
    assert records() == before + 3
    sum(o.sum() for o in outputs).backward()
    del outputs
    assert records() == before
    without_backward(net, run, x)
    without_grad(net, run, x)
    assert records() == before


def test_the_region_that_is_dropped_frees_its_statistics():
    bn, x = ms.BatchNorm2d(4), torch.randn(3, 4, 5, 5, requires_grad=True)
    kept = []

    def function(t):
        y = bn(t)
        return y.sin()

    y = ms.checkpoint(function, x)
    gc.collect()
    kept = [weakref.ref(o.statistics) for o in gc.get_objects() if type(o) is Call]
    assert len(kept) == 1
    del y
    assert kept[0]() is None


class Operators(TorchDispatchMode):
    """Records the batch_norm operators below autograd, and whether they were given statistics."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.memsave_ext.batch_norm_forward.default:
            self.calls.append("reuse" if args[4] is not None else "count")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", [n for n in CHECKPOINTS if n != "selective, all saved"])
def test_the_recompute_computes_no_statistics(name):
    """And gives the same bits, which the gradients above show."""
    net, x = Net(), torch.randn(3, 4, 5, 5, requires_grad=True)
    with Operators() as operators:
        y = CHECKPOINTS[name](lambda t: net.conv(net.a(net.a(t))).sin(), x, params(net))
        y.sum().backward()
    assert operators.calls == ["count", "count", "reuse", "reuse"]


@pytest.mark.skipif(
    _parts.native("batch_norm") is None, reason="Python saves tensors after the kernel"
)
@pytest.mark.parametrize(
    "name", ["checkpoint", "non-reentrant", "non-reentrant context_fn", "selective"]
)
def test_last_in_a_region_it_is_not_run_again(name):
    net, x = Net(), torch.randn(30, 4, 9, 9, requires_grad=True)  # no tail short enough to be run
    with Operators() as operators:
        y = CHECKPOINTS[name](lambda t: net.c(net.a(net.conv(t))), x, params(net))
        y.square().sum().backward()
    assert operators.calls == ["count", "count", "reuse"]


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("which", ["weight", "bias"])
def test_a_parameter_changed_in_between(name, which):
    bn, conv = ms.BatchNorm2d(4), nn.Conv2d(4, 4, 3)
    x = torch.randn(3, 4, 5, 5, requires_grad=True)
    # Not listed: CheckpointFunction itself notices a listed parameter.
    y = CHECKPOINTS[name](lambda t: conv(bn(t)).sin(), x, list(conv.parameters()))
    with torch.no_grad():
        getattr(bn, which).add_(1)
    with pytest.raises(RuntimeError, match=f"BatchNorm2d: {which} has been modified .* version 1"):
        y.sum().backward()
