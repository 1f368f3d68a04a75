"""Reports of rematerialization by module: which one runs is seen, and nothing is put into it."""

import copy
import gc
import threading
import weakref
from collections import Counter

import pytest
import torch
from torch import nn

import memsave_ext as ms
from memsave_ext import _native

pytestmark = pytest.mark.skipif(not _native.available, reason="nothing is recorded")

STEPS = pytest.mark.parametrize("step", [1, 2, 6], ids=["first", "second", "planned"])


class Double(nn.Module):
    """Multiplies by itself around a module inside of it; each operator's result is saved."""

    def __init__(self, inner=None):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        x = x * x
        if self.inner is not None:
            x = self.inner(x)
        return x.sin()


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = Double(Double()), Double()
        self.again = self.left  # the same module under a second name

    def forward(self, x):
        return self.again(self.right(self.left(x)).exp())


def run(model, block, steps=1, x=None):
    for _ in range(steps):
        with block() as r:
            loss = model(torch.randn(64, requires_grad=True) if x is None else x).sum()
        loss.backward()
    return r


def saved_by(r):
    """(module, operator) -> how many of its results were saved."""
    counted = Counter()
    for row in r.figures().saved:
        counted[row.module, row.operator] += row.count if row.operator else 0
    return +counted


@STEPS
@pytest.mark.parametrize("options", [{"_everything": True}, {"budget": 0.5}, {}], ids=str)
def test_modules_that_run(options, step):
    model = Named()
    r = run(model, lambda: ms.remat(model, **options), step)
    counted = saved_by(r)
    # What a sine is computed from is saved by it, and its own result by what comes after.
    assert counted[("left", "aten::mul")] == 2
    assert counted[("left.inner", "aten::mul")] == 2
    assert counted[("right", "aten::mul")] == 1
    assert counted[("Named", "aten::exp")] == 1
    assert {module for module, _ in counted} == {"left", "left.inner", "right", "Named"}
    again = {row.module for row in r.figures().recomputed}
    assert again <= {"left", "left.inner", "right", "Named"}
    assert again or not options


def test_nothing_is_put_into_modules():
    model = Named()
    seen = []

    class Looks(nn.Module):
        def forward(self, x):
            seen.append([dict(module.__dict__) for module in model.modules()])
            return x

    model.right.inner = Looks()
    before = [dict(module.__dict__) for module in model.modules()]
    r = run(model, lambda: ms.remat(model, budget=0.5), 3)
    assert len(seen) >= 3 and all(found == before for found in seen)
    assert "right" in {row.module for row in r.figures().saved}
    assert [dict(module.__dict__) for module in model.modules()] == before


def test_two_methods_of_a_module():
    class Small(nn.Linear):
        def training_step(self, x):
            return self(x).square().sum()

    for first in (0, 1):
        net = Small(4, 4)
        handles = [ms.remat_module(net), ms.remat_module(net, _method="training_step")]
        handles[first].remove()
        replica = net._replicate_for_data_parallel()
        left = ("training_step", "forward")[first]
        assert {"forward", "training_step"} & vars(replica).keys() == {left}
        assert vars(replica)[left].module is replica
        handles[1 - first].remove()
        assert {"forward", "training_step", "_replicate_for_data_parallel"}.isdisjoint(vars(net))


def test_a_module_outside_of_its_model():
    """What calls no module of the model is the model's caller's, also on the way through others."""
    model, other = Named(), Double()
    with ms.remat(model, _everything=True) as r:
        loss = other(model.right(torch.randn(64, requires_grad=True))).sum()
    loss.backward()
    assert set(saved_by(r)) == {
        ("right", "aten::mul"), ("right", "aten::sin"), ("", "aten::mul")
    }  # fmt: skip
    around = Double(model)  # the model is called by another one
    r = run(around, lambda: ms.remat(model, _everything=True))
    counted = saved_by(r)
    assert counted[("", "aten::mul")] == 1 and counted[("left.inner", "aten::mul")] == 2


@STEPS
def test_models_that_change_between_steps(step):
    """Names are those of the model as it is in each step."""
    model = Named()
    run(model, lambda: ms.remat(model, _everything=True), step)
    model.left, model.right = model.right, model.left
    model.again = model.right
    counted = saved_by(run(model, lambda: ms.remat(model, _everything=True)))
    assert ("right.inner", "aten::mul") in counted and ("left.inner", "aten::mul") not in counted
    model.left = nn.Sequential(model.left)
    counted = saved_by(run(model, lambda: ms.remat(model, _everything=True)))
    assert counted[("left.0", "aten::mul")] == 1


def test_a_report_of_a_model_that_has_changed_or_gone():
    model = Named()
    with ms.remat(model, _everything=True) as r:
        loss = model(torch.randn(64, requires_grad=True)).sum()
    loss.backward()
    counted = saved_by(r)
    del model.left, model.again, loss
    assert saved_by(r) == counted
    gone = weakref.ref(model.right)
    del model, r
    gc.collect()
    assert gone() is None


def test_what_takes_the_place_of_a_module_that_is_gone():
    gone = nn.Sequential(*(Double() for _ in range(200)))
    model = nn.ModuleDict({"kept": Double(), "gone": gone})
    with ms.remat(model, _everything=True) as r:
        loss = model["kept"](torch.randn(64, requires_grad=True))
        places = {id(module) for module in gone}
        del model["gone"], gone
        gc.collect()
        others = [Double() for _ in range(1000)]
        taken = [other for other in others if id(other) in places]
        for other in taken:
            loss = other(loss)
        loss = loss.sum()
    loss.backward()
    if not taken:
        pytest.skip("nothing has come to lie there")
    assert {module for module, _ in saved_by(r)} == {"", "kept"}


def test_other_threads_and_nested_blocks():
    """A block tells what its own thread calls; an inner block has names of its own."""
    outer, inner = Named(), Named()
    inside = []

    class Both(nn.Module):
        def forward(self, x):
            x = outer.right(x)
            with ms.remat(inner, _everything=True) as r:
                x = inner(x)
            inside.append(r)
            thread = threading.Thread(target=lambda: outer.left(torch.randn(64)))
            thread.start()
            thread.join()
            return outer.left(x)

    model = Both()
    with ms.remat(outer, _everything=True) as r:
        loss = model(torch.randn(64, requires_grad=True)).sum()
    loss.backward()
    assert {m for m, _ in saved_by(r)} <= {"", "right", "left", "left.inner"}
    assert saved_by(r)[("left.inner", "aten::mul")] == 1
    assert saved_by(inside[0])[("left.inner", "aten::mul")] == 2


@pytest.mark.parametrize(
    "call",
    [
        lambda m, x: m(x),
        lambda m, x: nn.Module.__call__(m, x),
        lambda m, x: m.forward(x),  # no call of it: only what it calls is seen
    ],
    ids=["call", "function", "forward"],
)
def test_ways_to_call(call):
    model = Named()
    x = torch.randn(64, requires_grad=True)
    with ms.remat(model, _everything=True) as r:
        loss = call(model.left, x).sum()
    loss.backward()
    assert set(saved_by(r)) == {
        ("left.inner", "aten::mul"),
        ("left.inner", "aten::sin"),
        ("" if "forward" in call.__code__.co_names else "left", "aten::mul"),
    }


@pytest.mark.parametrize("of", [copy.deepcopy, torch.jit.script], ids=["copy", "script"])
def test_other_kinds_of_modules(of):
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.GELU()), nn.GELU())
    model[0] = of(model[0])
    r = run(model, lambda: ms.remat(model, _everything=True), x=torch.randn(4, 8))
    assert "0" in {m[:1] for m, _ in saved_by(r)}
    assert [r._names()[0], *r._names()[1:3]] == ["Sequential", "0", "0.0"]


def test_in_place_by_module():
    model = Named()
    handle = ms.remat_module(model, by_module=True, budget=0.5)
    for _ in range(4):
        model(torch.randn(64, requires_grad=True)).sum().backward()
        counted = saved_by(handle)
        assert counted[("left.inner", "aten::mul")] == 2 and counted[("Named", "aten::exp")] == 1
