"""Tensors from outside of a region that change between its forward and its recompute."""

import contextlib
import copy
import dataclasses
import functools
from types import SimpleNamespace

import pytest
import torch
from helpers import assert_equal, leaf, state_unchanged
from torch import nn

import memsave_ext as ms


@dataclasses.dataclass
class Batch:
    mask: torch.Tensor
    more: object = None


@dataclasses.dataclass(slots=True)
class Slots:
    mask: torch.Tensor
    unset: object = dataclasses.field(init=False)


class Method:
    def __init__(self, block):
        self.block = block

    def run(self, x):
        return self.block(x).sin()


@contextlib.contextmanager
def engine_hooks_are(used):
    before = ms.use_engine_hooks(used)
    try:
        yield
    finally:
        ms.use_engine_hooks(before)


factor = torch.ones(4)  # a global that functions below name


def x_and_m():
    return torch.ones(4, requires_grad=True), torch.ones(4)


# Programs that read m from outside, where no graph saves the storage of m: (x, m) -> output.
READS = {
    "keyword": lambda x, m: ms.checkpoint(lambda x, m: x * (m + 1), x, m=m),
    "in a list": lambda x, m: ms.checkpoint(lambda x, ms: x * (ms[0] + 1), x, [m]),
    "in a dict": lambda x, m: ms.checkpoint(lambda x, d: x * (d["a"]["b"] + 1), x, {"a": {"b": m}}),
    "in a dataclass": lambda x, m: ms.checkpoint(
        lambda x, b: x * (b.more[0].mask + 1), x, Batch(x, (Batch(m),))
    ),
    "in a dataclass with slots": lambda x, m: ms.checkpoint(
        lambda x, b: x * (b.more.mask + 1), x, Batch(x, Slots(m))
    ),
    "closure": lambda x, m: ms.checkpoint(lambda x: x * (m + 1), x),
    "closure of a closure": lambda x, m: ms.checkpoint(
        functools.partial(lambda f, x: f(x), lambda x: x * (m + 1)), x
    ),
    "closure, in a list": lambda x, m: (lambda held: ms.checkpoint(lambda x: x * (held[0] + 1), x))(
        [m]
    ),
    "default device": lambda x, m: ms.checkpoint(
        lambda x: x * (m + 1), x, context_fn=lambda: (contextlib.nullcontext(),) * 2
    ),
    "a list of tensors": lambda x, m: ms.checkpoint(lambda x: x * torch.stack([m, m]).sum(0), x),
    "indices": lambda x, m: ms.checkpoint(lambda x: x * (x.detach()[m.long() - 1] + 1), x),
    "a view": lambda x, m: ms.checkpoint(lambda x: x[:2] * (m[2:] + 1), x),
}


@pytest.mark.parametrize("name", READS)
def test_a_tensor_changed_in_place_is_an_error(name):
    x, m = x_and_m()
    out = READS[name](x, m)
    with state_unchanged():
        m.add_(1)
        with pytest.raises(ms.CheckpointError, match="modified by an inplace operation: version"):
            out.sum().backward()
    assert x.grad is None
    m = torch.ones(4)
    READS[name](x, m).sum().backward()  # unchanged
    assert x.grad.sum() != 0


def test_a_global_changed_in_place_is_an_error():
    x = leaf(4)
    out = ms.checkpoint(lambda x: x * (factor + 1), x)
    factor.add_(1)
    with pytest.raises(ms.CheckpointError, match=r"factor \(shape \[4\], dtype float32\).*read by"):
        out.sum().backward()


@dataclasses.dataclass
class Config:
    mask: object = None


class Shared(nn.Module):
    def forward(self, x):
        return (x * CACHE["k"]).exp()


CACHE, LISTED, NESTED, CONFIG, SPACE = {}, [None], {"a": {"m": None}}, Config(), SimpleNamespace()


def named(x):
    return (x * CACHE["k"]).exp()


def with_default(x, cache=CACHE, *, listed=LISTED):
    return (x * (cache["k"] if listed[0] is None else listed[0])).exp()


# How a tensor is put there, and a function that reads it there.
PLACES = {
    "a dict": (CACHE, "k", lambda x: (x * CACHE["k"]).exp()),
    "a list": (LISTED, 0, lambda x: (x * LISTED[0]).exp()),
    "nested dicts": (NESTED["a"], "m", lambda x: (x * NESTED["a"]["m"]).exp()),
    "a dataclass": (vars(CONFIG), "mask", lambda x: (x * CONFIG.mask).exp()),
    "a namespace": (vars(SPACE), "mask", lambda x: (x * SPACE.mask).exp()),
    "another function": (CACHE, "k", lambda x: named(x)),
    "a default": (CACHE, "k", with_default),
    "a keyword's default": (LISTED, 0, with_default),
    "forward": (CACHE, "k", Shared()),
    "forward of a module inside": (CACHE, "k", nn.Sequential(nn.Identity(), Shared())),
}


@pytest.mark.parametrize("how", ["replaced", "in place", "not changed"])
@pytest.mark.parametrize("name", PLACES)
def test_what_globals_lead_to(name, how):
    where, key, function = PLACES[name]
    x = leaf(4)
    LISTED[0] = None
    where[key] = torch.ones(4)
    expected = torch.autograd.grad(function(x).sum(), x)[0]
    out = ms.checkpoint(function, x)
    if how == "not changed":
        assert torch.equal(torch.autograd.grad(out.sum(), x)[0], expected)
        return
    if how == "replaced":
        where[key] = torch.ones(4) + 1
        message = "replaced: the forward had"
    else:
        where[key].add_(1)
        message = "modified by an inplace"
    with state_unchanged(), pytest.raises(ms.CheckpointError, match=message):
        out.sum().backward()
    assert x.grad is None


class Factor(nn.Module):
    def __init__(self):
        super().__init__()
        self.factor = torch.full((4,), 2.0)  # called as a global

    def forward(self, x):
        return (x * self.factor * factor).exp()


def test_places_of_one_name_are_told_apart():
    three = torch.full((4,), 3.0)

    def scaled(a, x, b=three):
        return (x * a * b).exp()

    for function in (Factor(), functools.partial(scaled, torch.full((4,), 2.0))):
        x = leaf(4)
        expected = torch.autograd.grad(function(x).sum(), x)[0]
        out = ms.checkpoint(function, x)
        assert torch.equal(torch.autograd.grad(out.sum(), x)[0], expected)


def test_a_cache_in_a_global_that_the_function_fills():
    """As an attention's, of what depends on lengths: its forward finds none, and the recompute
    another one than the next region's."""

    def function(x):
        CACHE["k"] = torch.full((4,), 2.0)
        return (x * CACHE["k"]).exp()

    x = leaf(4)
    outs = [ms.checkpoint(function, x) for _ in range(3)]
    sum(out.sum() for out in outs).backward()
    assert torch.allclose(x.grad, 3 * 2 * (2 * x).exp())


def blocks():
    linear = nn.Linear(4, 4)
    yield "the module", linear, lambda x: ms.checkpoint(linear, x)
    yield "a method", linear, lambda x: ms.checkpoint(linear.forward, x)
    yield "in a closure", linear, lambda x: ms.checkpoint(lambda x: linear(x).tanh(), x)
    sequence = nn.Sequential(linear, nn.Tanh())
    yield "inside a module", linear, lambda x: ms.checkpoint(sequence, x)
    ms.checkpoint_modules(sequence, nn.Sequential)
    yield "checkpoint_modules", linear, lambda x: sequence(x)


@pytest.mark.parametrize("index", range(5))
@pytest.mark.parametrize("what", ["bias in place", "bias", "weight", "data"])
def test_parameters_changed_or_replaced(index, what):
    _, linear, run = list(blocks())[index]
    # What follows the linear layer needs its output: so its bias matters.
    x = leaf(3, 4)
    out = ms.checkpoint(lambda x: run(x).sin().exp(), x) if index < 3 else run(x).exp()
    with torch.no_grad():
        if what == "bias in place":
            linear.bias.add_(1)
        elif what == "bias":
            linear.bias = nn.Parameter(linear.bias + 1)
        elif what == "weight":
            linear.weight = nn.Parameter(linear.weight + 1)
        else:
            linear.weight.data = linear.weight.data + 1
    message = "modified by an inplace" if what == "bias in place" else "replaced: the forward had"
    with pytest.raises(ms.CheckpointError, match=message):
        out.sum().backward()


def test_functional_call_around_a_region():
    linear, x = nn.Linear(4, 4), leaf(3, 4)
    sequence = nn.Sequential(linear, nn.Tanh())
    ms.checkpoint_modules(sequence, nn.Sequential)
    others = {name: p.detach() + 1 for name, p in sequence.named_parameters()}
    out = torch.func.functional_call(sequence, others, (x,))
    with pytest.raises(ms.CheckpointError, match=r"weight \(shape \[4, 4\].*replaced"):
        out.sum().backward()
    # Inside of the region the recompute swaps them in again.
    plain = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    out = ms.checkpoint(lambda x: torch.func.functional_call(plain, others, (x,)), x)
    (grad,) = torch.autograd.grad(out.sum(), x)
    y = (x @ others["0.weight"].t() + others["0.bias"]).tanh()
    torch.testing.assert_close(grad, torch.autograd.grad(y.sum(), x)[0])


def test_what_the_last_operation_saves():
    x, scales = leaf(3, 4), {"a": torch.ones(4)}
    out = ms.checkpoint(lambda x: x * scales["a"] + 1, x)
    scales["a"] = torch.zeros(4)
    with pytest.raises(ms.CheckpointError, match="replaced: the forward had"):
        out.sum().backward()


@pytest.mark.parametrize("change", ["in place", "rebound"])
def test_what_an_explicit_region_reads(change):
    scale, x = torch.ones(4), leaf(3, 4)
    out = ms.CheckpointFunction.apply(lambda x: (x * scale).sin(), 1, x)
    expected = torch.autograd.grad(out.sum(), x, retain_graph=True)[0]
    torch.testing.assert_close(expected, x.cos())
    if change == "in place":
        scale.mul_(3)
    else:
        scale = torch.zeros(4)
    what = "modified by an inplace" if change == "in place" else "replaced: the forward had"
    with pytest.raises(ms.CheckpointError, match=rf"scale \(shape.*{what}.*read by aten.*mul"):
        out.sum().backward()


class Holds(nn.Module):
    def __init__(self, scale, function):
        super().__init__()
        self.scale, self.function = scale, function
        self.register_buffer("statistics", torch.ones(4))

    def forward(self, x):
        self.statistics.add_(1)
        return self.function(x * (self.scale["a"] + 1))


def test_attributes_of_a_module():
    scale, bias = torch.ones(4), torch.ones(4)
    for change in (lambda: scale.mul_(3), lambda: bias.mul_(3)):
        module = Holds({"a": scale}, lambda x: (x + bias).sin())
        ms.checkpoint_modules(module, Holds)
        x = leaf(3, 4)
        out = module(x)
        module.statistics.add_(1)  # running statistics move
        torch.autograd.grad(out.sum(), x, retain_graph=True)
        change()
        with pytest.raises(ms.CheckpointError, match=r"modified by an inplace"):
            out.sum().backward()


class Rotary(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("table", torch.ones(4))

    def forward(self, x):
        return self.layer(x * (self.table + 1)).sin()


@pytest.mark.parametrize("how", ["in place", "replaced", "another's region"])
def test_a_buffer_that_is_read(how):
    model, x = Rotary(), leaf(3, 4)
    run = (lambda x: model(x)) if how == "another's region" else model
    out = ms.checkpoint(run, x)
    torch.autograd.grad(out.sum(), x, retain_graph=True)
    if how == "replaced":
        model.table = torch.zeros(4)
    else:
        model.table.mul_(3)
    what = "replaced: the forward had" if how == "replaced" else "modified by an inplace"
    with pytest.raises(ms.CheckpointError, match=rf"table \(shape.*{what}.*read by aten.*add"):
        out.sum().backward()


SPECTRAL = [torch.nn.utils.spectral_norm, torch.nn.utils.parametrizations.spectral_norm]


@pytest.mark.parametrize("spectral_norm", SPECTRAL)
def test_a_buffer_that_the_forward_changes_and_reads(spectral_norm):
    """A recompute would go on with the power iteration, to another weight."""
    torch.manual_seed(0)
    model, x = nn.Sequential(spectral_norm(nn.Linear(8, 8)), nn.Tanh()), leaf(3, 8)
    model(x)
    out = ms.checkpoint(model, x)
    with pytest.raises(ms.CheckpointError, match=r"_u.*a buffer that the forward itself changes"):
        out.square().sum().backward()
    ms.checkpoint(model, x, determinism_check="none").square().sum().backward()
    model.eval()
    model.zero_grad()
    x.grad = None
    ms.checkpoint(model, x).square().sum().backward()
    grads = [p.grad.clone() for p in (x, *model.parameters())]
    model.zero_grad()
    x.grad = None
    model(x).square().sum().backward()
    assert_equal(grads, [p.grad for p in (x, *model.parameters())])


class Table(nn.Module):
    """Makes a table of its own when it first needs one, or a longer one."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        if len(getattr(self, "table", ())) < len(x):
            self.table = torch.linspace(0, 1, len(x))[:, None]
        return self.layer(x * self.table[: len(x)]).sin()


def test_an_attribute_that_the_forward_made_and_another_call_replaced():
    model, x = Table(), leaf(3, 4)
    out = ms.checkpoint(model, x)
    torch.autograd.grad(out.sum(), x, retain_graph=True)
    model(torch.ones(5, 4))
    with pytest.raises(ms.CheckpointError, match=r"table \(shape \[5, 1\].*replaced.*read by aten"):
        out.sum().backward()


def test_an_attribute_that_another_region_made():
    class Reads(nn.Module):
        def __init__(self, first):
            super().__init__()
            self.first = first

        def forward(self, x):
            self.kept = x.detach()  # new in this module, beside what it reads
            return (x * self.first.table).sin()

    first, x = Table(), leaf(3, 4)
    second = Reads(first)
    out = ms.checkpoint(second, ms.checkpoint(first, x))
    torch.autograd.grad(out.sum(), x, retain_graph=True)
    first.table = torch.zeros(3, 1)
    with pytest.raises(ms.CheckpointError, match=r"first.table \(shape.*replaced.*read by"):
        out.sum().backward()


class Slices(nn.Module):
    """Reads a slice that its caller puts here, of a table that it does not have."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return (self.layer(x) * self.slice).sin()


def explicit(model, x):
    return ms.CheckpointFunction.apply(model, 1, x, *model.parameters())


@pytest.mark.parametrize("run", [ms.checkpoint, explicit])
@pytest.mark.parametrize(
    "other",
    [
        lambda table: table[3:6],
        lambda table: table[:1].expand(3, 4),
        lambda table: table.flatten()[:12].view(4, 3).t()[:, :1],
    ],
)
def test_another_view_of_the_same_memory(run, other):
    table, model, x = torch.rand(6, 4), Slices(), leaf(3, 4)
    model.slice = table[:3]
    out = run(model, x)
    expected = torch.autograd.grad(out.sum(), x, retain_graph=True)
    model.slice = table[:3]
    assert_equal(expected, torch.autograd.grad(out.sum(), x, retain_graph=True))
    model.slice = other(table)
    with pytest.raises(ms.CheckpointError, match=r"slice \(shape.*replaced.*read by"):
        out.sum().backward()


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.used = self.first

    def forward(self, x):
        return self.second(self.used(x).sin()).sin()


def exchange(model):
    model.first, model.second = model.second, model.first


def put_twice(model):
    model.second = model.first


def use_the_other(model):
    model.used = model.second


@pytest.mark.parametrize("change", [exchange, put_twice, use_the_other])
def test_known_tensors_in_places_of_others(change):
    """The graph has saved another tensor: all of them were there in the forward, too."""
    model, x = Pair(), leaf(3, 4)
    out = ms.checkpoint(model, x)
    kept = torch.autograd.grad(out.sum(), x, retain_graph=True)
    change(model)
    with pytest.raises(ms.CheckpointError, match=r"position \d: .*replaced: the forward had"):
        out.sum().backward()
    out = ms.checkpoint(model, x, determinism_check="none")
    out.sum().backward()
    assert not torch.equal(kept[0], x.grad)


@pytest.mark.parametrize("more", [False, True])
def test_a_recompute_that_does_something_else_with_known_tensors(more):
    """The error is of what it did, not of the places of tensors."""
    first, second = (nn.Parameter(torch.rand(4, 4)) for _ in range(2))

    def function(x):
        if not ms.is_recomputing():
            return (x @ first).sin()
        return (x @ second).sin() @ first if more else (x @ second)[:2].sin()

    out = ms.checkpoint(function, leaf(3, 4), early_stop=False)
    with pytest.raises(ms.CheckpointError, match="more tensors|different metadata"):
        out.sum().backward()


# What must go on working.


class Experts(nn.Module):
    """Keeps what it has made, and the expert that it used last, which leads to other places."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.hidden = []

    def forward(self, x, number):
        self.used = self.experts[number]
        self.hidden.append(self.used(x).sin())
        return self.hidden[-1].cos()


def test_what_each_call_chooses_and_keeps():
    model, x = Experts(), leaf(3, 4)
    out = ms.checkpoint(model, x, 0).sum() + ms.checkpoint(model, x, 2).exp().sum()
    expected = model(x, 0).sum() + model(x, 2).exp().sum()
    wanted = (x, model.experts[0].weight, model.experts[2].weight)
    assert_equal(torch.autograd.grad(expected, wanted), torch.autograd.grad(out, wanted))


class Slimmable(nn.Module):
    """Keeps the part of its weight that it used last."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(6, 4))

    def forward(self, x, width):
        self.used = self.weight[:width]
        return (x @ self.used.t()).sin()


@pytest.mark.parametrize("run", [ms.checkpoint, None])
def test_views_that_each_call_makes_of_what_it_has(run):
    model, x = Slimmable(), leaf(3, 4)

    def forward(width):
        if run is not None:
            return run(model, x, width)
        called = functools.partial(model, width=width)
        return ms.CheckpointFunction.apply(called, 1, x, model.weight)

    out = forward(2).sum() + forward(4).exp().sum()
    expected = model(x, 2).sum() + model(x, 4).exp().sum()
    wanted = (x, model.weight)
    assert_equal(torch.autograd.grad(expected, wanted), torch.autograd.grad(out, wanted))


def test_keys_of_dicts_are_not_asked():
    class Key:
        asked = 0

        def __hash__(self):
            Key.asked += 1
            return 7

    key, m = Key(), torch.ones(4)
    held, x = {key: m}, leaf(4)
    asked = Key.asked
    out = ms.checkpoint(lambda x: x.sin() * sum(held.values()), x)
    expected = torch.autograd.grad(out.sum(), x, retain_graph=True)
    assert Key.asked == asked
    assert_equal(expected, torch.autograd.grad(out.sum(), x))


def test_an_attribute_that_each_call_makes_anew():
    """The recompute frees the one of a later call, and what it makes next may lie there."""

    class Keeps(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            self.kept = self.layer(x) * 2
            return (self.layer(x).sin() * self.kept).tanh()

    x = leaf(64, 4)
    for _ in range(20):
        model = Keeps()
        expected = torch.autograd.grad(model(x).sum(), x)
        del model.kept
        out = ms.checkpoint(model, x)
        with torch.no_grad():
            model(x)
        assert_equal(expected, torch.autograd.grad(out.sum(), x))


def test_running_statistics_may_move():
    """Norms write them in training, and do not read them."""
    norm, x = nn.Sequential(nn.BatchNorm1d(4), nn.Tanh()), leaf(8, 4)
    out = ms.checkpoint(norm, x)
    expected = torch.autograd.grad(out.sum(), x, retain_graph=True)
    norm(x)
    norm[0].running_mean.zero_()
    assert_equal(expected, torch.autograd.grad(out.sum(), x, retain_graph=True))
    norm.eval()
    out = ms.checkpoint(norm, x)
    norm[0].running_mean.add_(1)
    with pytest.raises(ms.CheckpointError, match="running_mean"):
        out.sum().backward()


def test_a_buffer_that_counts():
    class Counts(Rotary):
        def forward(self, x):
            self.table.add_(1)
            return self.layer(x).sin()

    model, x = Counts(), leaf(3, 4)
    for _ in range(3):
        ms.checkpoint(model, x).sum().backward()
    assert_equal(model.table, torch.full((4,), 7.0))  # as with torch's checkpoint


def test_what_the_recompute_does_not_read_may_change():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    x, unread = leaf(3, 4), torch.ones(4)
    out = ms.checkpoint(
        lambda x, d: model[0](x).sin() * d["a"], x, {"a": torch.ones(4), "b": unread}
    )
    expected = torch.autograd.grad(out.sum(), x, retain_graph=True)
    with torch.no_grad():
        unread.add_(1)
        model[1].weight.add_(1)
        model[1].bias = nn.Parameter(torch.zeros(4))
    assert_equal(expected, torch.autograd.grad(out.sum(), x))


def test_what_the_function_changes_by_itself_may_change():
    count, loss, kept = torch.zeros(()), torch.zeros(()), []

    def function(x):
        nonlocal loss
        count.add_(1)
        loss = loss + x.detach().mean()
        kept.append(x.detach())
        return x.exp().sin()

    x = leaf(4)
    expected = torch.autograd.grad(x.exp().sin().exp().sin().sum(), x)
    out = ms.checkpoint(function, ms.checkpoint(function, x))
    assert_equal(expected, torch.autograd.grad(out.sum(), x))


def test_shapes_of_changed_tensors_and_writes_to_them_are_no_reads():
    x, like, total = leaf(4), torch.ones(4), torch.zeros(4)

    def function(x):
        total.add_(x.detach())
        return (x + torch.zeros_like(like)).exp().sin()

    out = ms.checkpoint(function, x)
    expected = torch.autograd.grad(x.exp().sin().sum(), x)
    like.add_(1)
    total.zero_()
    assert_equal(expected, torch.autograd.grad(out.sum(), x))


def test_without_the_check():
    x, m = x_and_m()
    out = ms.checkpoint(lambda x, m: x * (m + 1), x, m=m, determinism_check="none")
    m.add_(1)
    out.sum().backward()
    assert x.grad.tolist() == [3] * 4  # of another function, as in torch


def test_odd_containers():
    loop: list = [leaf(4)]
    loop += [loop, loop]  # a walk along each path would not end
    m = torch.ones(4)
    out = ms.checkpoint(
        lambda x, *rest: x * (rest[1][0] + 1), leaf(4), loop, (m, [None] * 2000), {3: m}
    )
    m.add_(1)
    with pytest.raises(ms.CheckpointError, match="modified"):
        out.sum().backward()


# An optimizer that steps in backward.


def stepped(run, in_backward, **options):
    """Parameters w and v after one step of a program whose region reads w without a gradient."""
    torch.manual_seed(0)
    w, v = nn.Parameter(torch.randn(5)), nn.Parameter(torch.randn(5))
    opt = ms.Adam([w, v], lr=0.5, in_backward=in_backward, **options)
    x = torch.ones(5, requires_grad=True)
    h = run(lambda x: (x * (w.detach() * 2) * v).sin(), x, v)
    (h * w).sum().backward()
    opt.step()
    return x.grad, w, v


def explicit(function, x, v):
    return ms.CheckpointFunction.apply(function, 1, x, v)


def implicit(function, x, v):
    return ms.checkpoint(function, x)


@pytest.mark.parametrize("run", [explicit, implicit])
@pytest.mark.parametrize("engine_hooks", [False, True])
def test_a_parameter_stepped_before_a_region_reads_it_again(run, engine_hooks):
    error = pytest.raises(ms.CheckpointError, match="parameter 0 of an optimizer, which stepped it")
    with engine_hooks_are(engine_hooks), state_unchanged(), error:
        stepped(run, True, small_bytes=0)
    expected = stepped(lambda f, x, v: f(x), False)
    assert_equal(expected, stepped(run, True))  # small: they wait until backward ends
    assert_equal(expected, stepped(run, False))


def test_parameters_in_one_storage_are_told_apart():
    flat = torch.randn(10)
    w, v = (nn.Parameter(part.data) for part in flat.split(5))  # versions of their own
    opt = ms.Adam([w, v], lr=0.5, in_backward=True, small_bytes=0)
    x = torch.ones(5, requires_grad=True)
    h = ms.checkpoint(lambda x: (x * 2 * v).sin(), x)
    plain = copy.deepcopy([w, v])
    expected = torch.autograd.grad(((x * 2 * plain[1]).sin() * plain[0]).sum(), x)
    (h * w).sum().backward()
    opt.step()
    assert_equal(expected, [x.grad])


def test_steps_after_backward_are_noticed():
    w = nn.Parameter(torch.randn(5))
    opt = ms.Adam([w], lr=0.5)
    x = leaf(5)
    out = ms.checkpoint(lambda x: (x + Holder.of(w).detach()).sin(), x)
    w.grad = torch.ones(5)
    opt.step()
    with pytest.raises(ms.CheckpointError, match="which stepped it"):
        out.sum().backward()


class Holder:
    """Nothing that looks for tensors looks in here."""

    held: torch.Tensor

    @staticmethod
    def of(tensor):
        holder = Holder()
        holder.held = tensor
        return holder.held


@pytest.mark.parametrize("around", ["offload", "hooks", "save_on_cpu"])
def test_arguments_that_hooks_hand_on_as_they_are(around):
    """Autograd itself looks at no versions there."""
    x, m = x_and_m()
    contexts = {
        "offload": contextlib.nullcontext(),
        "hooks": torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t),
        "save_on_cpu": torch.autograd.graph.save_on_cpu(),
    }
    options = {"offload": "cpu"} if around == "offload" else {}
    with contexts[around]:
        out = ms.checkpoint(lambda x, m: x * (m + 1), x, m, **options)
    torch.autograd.grad(out.sum(), x, retain_graph=True)
    m.mul_(10)
    with pytest.raises(ms.CheckpointError, match="argument 1: modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("early_stop", [True, False])
def test_a_function_inside_that_changes_its_argument(early_stop, debug):
    """A recompute that goes on after it has saved the argument would change what it hands out."""

    def run(checkpoint):
        x, w = torch.ones(4, 3), leaf(4, 3)

        def inner(h):
            return h.mul_(1.5) * w

        out = checkpoint(lambda a, _: checkpoint(inner, a + 1), x, w)
        return torch.autograd.grad(out.sum(), w)

    expected = run(lambda function, *args: function(*args))
    ours = functools.partial(ms.checkpoint, early_stop=early_stop, debug=debug)
    if early_stop:
        assert_equal(run(ours), expected)
    else:
        with pytest.raises(ms.CheckpointError, match="modified by an inplace operation: it was"):
            run(ours)


@pytest.mark.parametrize("early_stop", [True, False])
def test_a_saved_tensor_that_the_function_changes(early_stop):
    """As in plain autograd, which raises."""
    x, w = torch.ones(4, 3), leaf(4, 3)

    def function(x):
        h = x + 1
        out = h * w
        h.mul_(1.5)
        return out * h.detach().sum() * w

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(function(x).sum(), w)
    out = ms.checkpoint(function, x, early_stop=early_stop)
    with pytest.raises(ms.CheckpointError, match="modified by an inplace operation: it was"):
        torch.autograd.grad(out.sum(), w)
    out = ms.checkpoint(function, x, early_stop=early_stop, determinism_check="none")
    torch.autograd.grad(out.sum(), w)


class Loops(nn.Module):
    """Its lambdas read the loop's variable when they are called: in backward the last block."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.scale = 1.0

    def late(self, x):
        for block in self.blocks:
            x = ms.checkpoint(lambda x: block(x).tanh() * self.scale, x)  # noqa: B023
        return x

    def late_behind_self(self, x):  # the names of a closure are in order
        for unit in self.blocks:
            x = ms.checkpoint(lambda x: unit(x).tanh() * self.scale, x)  # noqa: B023
        return x

    def bound(self, x):
        for block in self.blocks:
            x = ms.checkpoint(lambda x, block=block: block(x).tanh() * self.scale, x)
        return x


@pytest.mark.parametrize("way", ["late", "late_behind_self"])
def test_a_loop_variable_that_is_reached_by_another_name_too(way):
    net, x = Loops(), torch.randn(5, 4)
    with pytest.raises(ms.CheckpointError, match=r"weight \(shape \[4, 4\].*replaced"):
        getattr(net, way)(x).sum().backward()
    net.zero_grad()  # the last block's was right
    net.bound(x).sum().backward()
    found = [p.grad.clone() for p in net.parameters()]
    net.zero_grad()
    for block in net.blocks:
        x = block(x).tanh()
    x.sum().backward()
    assert_equal(found, [p.grad for p in net.parameters()])


def test_names_that_are_set_to_what_holds_the_same():
    """A list, a bound method and a function that are made anew, of the same tensors."""
    net, x = nn.Linear(4, 4), torch.randn(2, 4)
    held, call = [net.weight], net.forward
    helper = lambda x: x @ held[0]  # noqa: E731
    y = ms.checkpoint(lambda x: helper(call(x)) + held[0].sum(), x)
    held, call = [net.weight], net.forward
    helper = lambda x: x @ held[0]  # noqa: E731
    y.sum().backward()
    assert net.weight.grad.any()


def test_entries_that_are_exchanged():
    pair = {"a": torch.full((3,), 2.0), "b": torch.full((3,), 5.0)}
    x = torch.ones(3, requires_grad=True)
    y = ms.checkpoint(lambda x: (x * pair["a"]).exp(), x)
    pair = {"a": pair["b"], "b": pair["a"]}
    with pytest.raises(ms.CheckpointError, match="replaced"):
        y.sum().backward()


first = torch.full((3,), 2.0)  # globals that what functions below define names
shift = functools.partial(torch.add, torch.ones(3))


def test_names_that_lead_to_each_other_and_are_others_since():
    """Followed along every path they would be followed for ever."""
    x = x0 = leaf(4)
    for _ in range(3):

        def f(x, depth):
            return x.sin() if depth == 0 else f(x, depth - 1) + g(x, depth - 1)

        def g(x, depth):
            return x.cos() if depth == 0 else f(x, depth - 1) * g(x, depth - 1)

        x = ms.checkpoint(f, x, 2)
    x.sum().backward()
    expected = x0.detach().clone().requires_grad_()
    y = f(f(f(expected, 2), 2), 2)
    y.sum().backward()
    assert_equal([x0.grad], [expected.grad])


last = None


class Names(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.last(self.first(x).relu())


def test_a_global_that_is_called_as_an_attribute(monkeypatch):
    """The forward reads no global of that name."""
    net, x = Names(), leaf(4)
    monkeypatch.setitem(globals(), "last", net.first)
    y = ms.checkpoint(net, x)
    monkeypatch.setitem(globals(), "last", net.last)
    y.sum().backward()
    expected = x.detach().clone().requires_grad_()
    net(expected).sum().backward()
    assert_equal([x.grad], [expected.grad])


@pytest.mark.parametrize(
    "function",
    [
        lambda x: sum(x * first for _ in range(2)).exp(),
        lambda x: (lambda: x * first)().exp(),
        lambda x: torch.stack([x * first for _ in range(2)]).exp(),
    ],
)
def test_globals_named_in_what_the_function_defines(function, monkeypatch):
    x = torch.ones(3, requires_grad=True)
    y = ms.checkpoint(function, x)
    monkeypatch.setitem(globals(), "first", torch.full((3,), 5.0))
    with pytest.raises(ms.CheckpointError, match="first.*replaced"):
        y.sum().backward()


def test_a_global_partial():
    x = torch.ones(3, requires_grad=True)
    y = ms.checkpoint(lambda x: shift(x).sin(), x)
    shift.args[0].add_(1)
    with pytest.raises(ms.CheckpointError, match="modified by an inplace"):
        y.sum().backward()


def test_modules_with_many_members():
    params = nn.ParameterList([nn.Parameter(torch.zeros(3)) for _ in range(1001)])
    x = torch.ones(3, requires_grad=True)
    y = ms.checkpoint(lambda x: (x + params[0]).sin(), x)
    with torch.no_grad():
        params[0].add_(1)
    with pytest.raises(ms.CheckpointError, match="modified by an inplace"):
        y.sum().backward()


class Frozen(nn.Module):
    """The second of these saves a tensor more where the first one needs a gradient."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = (nn.Linear(8, 8, bias=False) for _ in range(2))

    def forward(self, x):
        return self.second(self.first(x)).tanh()


@pytest.mark.parametrize("engine_hooks", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_a_parameter_that_is_frozen_or_unfrozen_before_backward(engine_hooks, frozen):
    model, x = Frozen(), torch.randn(8, 8)
    model.first.weight.requires_grad_(not frozen)
    with engine_hooks_are(engine_hooks):
        out = ms.checkpoint(model, x)
        model.first.weight.requires_grad_(frozen)
        with pytest.raises(
            ms.CheckpointError,
            match=rf"first\.weight .*: its requires_grad was changed, and is {frozen} in the",
        ):
            torch.autograd.grad(out.sum(), model.second.weight)
        model.first.weight.requires_grad_(not frozen)
        torch.autograd.grad(ms.checkpoint(model, x).sum(), model.second.weight)


@pytest.mark.parametrize("engine_hooks", [False, True])
@pytest.mark.parametrize("run", [ms.checkpoint, lambda f, x: ms.CheckpointFunction.apply(f, 1, x)])
def test_a_teacher_that_is_frozen_before_backward(engine_hooks, run):
    """What is read without a graph is read alike."""
    teacher, x = nn.Linear(8, 8), torch.randn(8, 8, requires_grad=True)

    def distance(x):
        with torch.no_grad():
            target = teacher(x)
        return (x.sin() - target).square()

    with engine_hooks_are(engine_hooks):
        out = run(distance, x)
        teacher.requires_grad_(False)
        (grad,) = torch.autograd.grad(out.sum(), x)
        (expected,) = torch.autograd.grad(distance(x).sum(), x)
        assert torch.equal(grad, expected)


@pytest.mark.parametrize("engine_hooks", [False, True])
@pytest.mark.parametrize("needs_one", [False, True])
def test_an_argument_that_needs_a_gradient_by_the_time_of_backward(engine_hooks, needs_one):
    """Or no longer. The recompute has it as the forward had."""
    w = nn.Parameter(torch.randn(8, 8))

    def gradient(run):
        x = torch.linspace(-1, 1, 64).view(8, 8).requires_grad_(not needs_one)
        out = run(lambda x: (x @ w).sin(), x)
        x.requires_grad_(needs_one)
        (grad,) = torch.autograd.grad(out.sum(), w)
        assert x.requires_grad is needs_one
        return grad

    with engine_hooks_are(engine_hooks):
        assert torch.equal(gradient(ms.checkpoint), gradient(lambda f, x: f(x)))
