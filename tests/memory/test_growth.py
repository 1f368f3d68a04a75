"""``growth()`` of a track names what steps leave behind, and what holds it."""

import gc
import re
import sys
import threading
import time
from collections import deque
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import memsave_ext as ms
from memsave_ext import _native
from memsave_ext.memory.holders import holders_of
from memsave_ext.memory.tracking import running

KEPT = []  # a global variable
STEPS = 6
ROWS, WIDE = 48, 64
SIZE = 4 * ROWS * WIDE  # bytes of a result of Net.wide


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide, self.head = nn.Linear(8, WIDE), nn.Linear(WIDE, 2)
        self.outputs = []

    def forward(self, x):
        return self.head(self.wide(x).tanh())


@pytest.fixture(autouse=True)
def nothing_is_kept():
    gc.unfreeze()  # conftest.py sets aside what is there, which no search finds then
    KEPT.clear()
    yield
    KEPT.clear()


def train(leave, steps=STEPS, **options):
    """What has grown in training steps, after each of which ``leave(net, hidden, loss)`` is called;
    read while all of its variables live. Loss and results go with each step."""
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    results = []
    handle = net.wide.register_forward_hook(lambda _, __, result: results.append(result))
    with ms.memory.track(net, optimizer, **options) as t:
        for _ in range(steps):
            loss = net(torch.randn(ROWS, 8)).square().sum()
            loss.backward(retain_graph=True)
            optimizer.step()
            optimizer.zero_grad()
            leave(net, results.pop(), loss)
            del loss
    handle.remove()
    return t


def grown(t):
    """The groups that are as large as the hidden results, for which the others make way."""
    return [group for group in t.growth() if group.bytes >= STEPS * SIZE // 2]


def test_nothing_grows():
    t = train(lambda *_: None)
    assert t.growth() == []
    assert "never freed" not in t.report()


def test_lazy_modules_anywhere_are_passed_over():
    lazy = nn.LazyLinear(4)
    t = train(lambda net, hidden, loss: KEPT.append(hidden.detach()))
    (group,) = grown(t)
    assert group.held_by.startswith("KEPT[") and nn.parameter.is_lazy(lazy.weight)


def test_a_list_that_is_a_global_variable():
    t = train(lambda net, hidden, loss: KEPT.append(hidden.detach()))
    (group,) = grown(t)
    assert group.held_by == f"KEPT[{STEPS - 2}] of the module {__name__}"
    assert (group.tensors, group.steps, group.bytes) == (STEPS, STEPS, STEPS * SIZE)
    assert (group.shape, group.module, group.category) == ((ROWS, WIDE), "wide", "activations")
    report = str(t.report())
    assert "Made in several steps and never freed" in report
    assert f"KEPT[{STEPS - 2}]" in report


def test_a_local_variable():
    history = {"hidden": deque()}
    t = train(lambda net, hidden, loss: history["hidden"].append(hidden.detach()))
    (group,) = grown(t)
    # The closure of the lambda has the same dict.
    expected = (
        rf"history\['hidden'\]\[{STEPS - 2}\] in (test_a_local_variable\(\)|the closure of .*)"
    )
    assert re.match(expected, group.held_by), group.held_by


def test_an_attribute_of_a_module():
    nets = []

    def leave(net, hidden, loss):
        nets[:] = [net]
        net.outputs.append((hidden.detach(), 1))

    (group,) = grown(train(leave))
    assert group.held_by == f"Net.outputs[{STEPS - 2}][0]"


@pytest.mark.once
@pytest.mark.parametrize("sums", [True, False])
def test_graphs_of_losses(sums):
    """The classic: the loss is added up, or collected, with its graph."""
    total = []

    def leave(net, hidden, loss):
        if sums and total:
            total[0] = total[0] + loss
        else:
            total.append(loss)

    t = train(leave)
    groups = {group.module: group for group in grown(t)}
    assert groups.keys() >= {"Net"}  # what tanh has saved is made in the model's own forward
    assert groups["Net"].steps == STEPS
    place = f"total[{0 if sums else STEPS - 2}]"
    assert groups["Net"].held_by.startswith(f"graph of a tensor of shape []: {place} in ")
    assert groups["Net"].shape == (ROWS, WIDE)


@pytest.mark.parametrize("graphs", [False, True])
def test_variables_of_the_loop_that_have_the_latest_one(graphs):
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with ms.memory.track(net, optimizer) as t:
        for _ in range(STEPS):
            out = net(torch.randn(ROWS, 8))
            loss = out.square().sum()
            loss.backward(retain_graph=graphs)
            optimizer.step()
            optimizer.zero_grad()
            KEPT.append(loss if graphs else out)
    kept = f"KEPT[{STEPS - 2}] of the module {__name__}"
    groups = {group.shape: group.held_by for group in t.growth()}
    assert groups.keys() >= ({(ROWS, WIDE), ()} if graphs else {(ROWS, 2)})
    if graphs:
        assert groups[()] == kept
        assert groups[ROWS, WIDE] == f"graph of a tensor of shape []: {kept}"
    else:
        assert groups[ROWS, 2] == kept


class Keeps(torch.autograd.Function):
    """Keeps a tensor without saving it."""

    @staticmethod
    def forward(ctx, x):
        ctx.x = x.detach().clone()
        return x.sum()

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.x


def test_what_a_function_has_on_ctx():
    """It is made where the loss is, and takes more memory. What the last step was followed by is of
    a step that has not ended."""
    t = train(lambda net, hidden, loss: KEPT.append(Keeps.apply(hidden) * 2))
    (group,) = (group for group in grown(t) if group.module == "")
    assert group.shape == (ROWS, WIDE)
    expected = f"graph of a tensor of shape []: KEPT[{STEPS - 3}] of the module {__name__}"
    assert group.held_by == expected


def test_of_many_sizes_the_one_that_takes_most():
    def leave(net, hidden, loss):
        KEPT.append([torch.ones(2), torch.ones(5 if len(KEPT) == 2 else 4), torch.ones(3)])

    (group,) = (group for group in train(leave).growth() if group.tensors == 3 * STEPS - 3)
    assert group.shape == (4,)
    assert group.held_by == f"KEPT[{STEPS - 3}][1] of the module {__name__}"


@pytest.mark.skipif(not _native.available, reason="pure Python takes no stacks")
def test_the_line_that_made_it():
    t = train(lambda net, hidden, loss: KEPT.append(hidden.detach().clone()), stacks=True)
    (group,) = grown(t)
    assert group.operator == "clone"
    assert re.search(r"test_growth.py:\d+ in <lambda>", group.line), group.line


def test_what_a_few_latest_steps_have_is_no_growth():
    queue = deque(maxlen=2)
    assert grown(train(lambda net, hidden, loss: queue.append(hidden.detach()))) == []
    assert len(queue) == 2


def test_what_comes_seldom_grows():
    def leave(net, hidden, loss):
        leave.calls += 1
        if leave.calls % 3 == 0:
            KEPT.append(hidden.detach())

    leave.calls = 0
    groups = [g for g in train(leave, steps=12).growth() if g.shape == (ROWS, WIDE)]
    assert [group.steps for group in groups] == [4]


@pytest.mark.parametrize(("begins", "steps"), [(30, 50), (30, 49), (60, 100)])
def test_what_begins_late(begins, steps):
    """It grows once it has gone on for 20 steps: what is shorter may be a queue, and what has ended
    a cache."""

    def leave(net, hidden, loss):
        leave.calls += 1
        if begins < leave.calls <= begins + 20:
            KEPT.append(hidden.detach())

    leave.calls = 0
    groups = [g for g in train(leave, steps=steps).growth() if g.shape == (ROWS, WIDE)]
    assert [group.steps for group in groups] == ([20] if steps == 50 else [])


def test_steps_that_were_forgotten():
    """The log keeps some changes alone; what lives is known for as long as it does."""
    t = train(lambda net, hidden, loss: KEPT.append(hidden.detach()), steps=40, max_events=200)
    groups = [group for group in t.growth() if group.shape == (ROWS, WIDE)]
    assert [(group.tensors, group.steps) for group in groups] == [(40, 40)]


@pytest.mark.skipif(not _native.available, reason="pure Python tracks one block at a time")
def test_twice_and_nested():
    def leave(net, hidden, loss):
        KEPT.append(hidden.detach())

    with ms.memory.track() as outer:
        t = train(leave)
    assert grown(t) == grown(t) != []
    assert outer.growth() == []  # no step is known


@pytest.mark.parametrize("graphs", [False, True])
def test_what_is_freed_after_the_block(graphs):
    """Some of its addresses are given to others, as a rule, which have no part in it."""
    t = train(lambda net, hidden, loss: KEPT.append(loss if graphs else hidden.detach()))
    kept = [group for group in grown(t) if group.shape == (ROWS, WIDE)]
    assert kept and all("KEPT[" in group.held_by for group in kept)
    KEPT.clear()
    gc.collect()
    others = [torch.ones(ROWS, WIDE) for _ in range(200)]
    after = [group for group in grown(t) if group.bytes == STEPS * SIZE]
    assert len(after) == len(kept)
    assert [group.held_by for group in after] == [""] * len(kept)
    assert len(others) == 200


def test_in_the_block():
    """Pure Python knows it afterwards; a report there leaves it out."""
    told = []

    def leave(net, hidden, loss):
        KEPT.append(hidden.detach())
        if len(KEPT) < STEPS:
            return
        (track,) = running()
        told.append(str(track.report()))
        if _native.available:
            told.append(track.growth())
        else:
            with pytest.raises(RuntimeError, match="growth.* is known once the `with` block"):
                track.growth()

    t = train(leave)
    assert told[-1] if _native.available else "Peak" in told[-1]
    assert grown(t)


def test_a_wrong_number():
    with pytest.raises(ValueError, match="n must not be negative, got -1"):
        train(lambda *_: None, steps=1).growth(-1)


# ---- who holds a tensor ----


def held(address):
    return holders_of([address])[address]


def test_local_variables_that_somebody_has_are_not_emptied():
    value = torch.ones(8)
    had = locals()
    held(value.data_ptr())
    assert had["value"] is value


@pytest.mark.once
def test_holders():
    class Slots:
        __slots__ = ("value",)

    class Class:
        value = torch.ones(3)

    def function():
        kept = [torch.ones(5)]

        def inner():
            return kept

        return inner

    def default(value=torch.ones(2)):  # noqa: B008
        return value

    thing = SimpleNamespace(a={"b": [torch.ones(4, 2)]})
    slots = Slots()
    slots.value = torch.ones(6)
    inner = function()
    here = f"in test_holders(), {__file__}:"
    # Each in a statement of its own: pytest has parts of assertions in variables.
    in_dict = held(thing.a["b"][0].data_ptr())
    in_slot, in_class = held(slots.value.data_ptr()).text, held(Class.value.data_ptr()).text
    in_closure, in_default = held(inner()[0].data_ptr()).text, held(default().data_ptr()).text
    assert in_dict.text.startswith(f"thing.a['b'][0] {here}")
    assert in_dict.shape == (4, 2)
    assert in_slot.startswith(f"slots.value {here}")
    assert in_class == "test_holders.<locals>.Class.value"
    assert in_closure == f"kept[0] in the closure of {inner.__qualname__}()"
    assert in_default == f"a default of {default.__qualname__}()"


def test_keys_of_a_dict():
    key, part = torch.ones(2), torch.ones(3)
    KEPT.extend([{key: 1}, SimpleNamespace(by={("a", part): 1})])
    addresses = key.data_ptr(), part.data_ptr()
    del key, part
    found = [held(address).text for address in addresses]
    assert found == [
        f"KEPT[0] (a key) of the module {__name__}",
        f"KEPT[1].by (a key)[1] of the module {__name__}",
    ]


def test_what_a_traceback_keeps():
    def fails():
        lost = torch.ones(7)
        raise ValueError(lost.data_ptr())

    try:
        fails()
    except ValueError as caught:
        error = caught
    (holder,) = holders_of(error.args).values()
    assert holder.text.startswith("lost in fails(), ")
    assert "traceback" in holder.text
    assert error.__traceback__ is not None


def test_variables_of_other_threads():
    ready, go = threading.Event(), threading.Event()
    pointers = []

    def work():
        inside = torch.ones(9)
        pointers.append(inside.data_ptr())
        ready.set()
        go.wait(60)

    thread = threading.Thread(target=work)
    thread.start()
    ready.wait(60)
    try:
        (holder,) = holders_of(pointers).values()
    finally:
        go.set()
        thread.join()
    assert holder.text.startswith("inside in work(), ")


def test_the_search_keeps_nothing_alive():
    def inner():
        value = torch.ones(11)
        address = value.data_ptr()
        before = sys.getrefcount(value)
        text = held(address).text
        after = sys.getrefcount(value)
        assert text.startswith("value in inner(), ")
        assert after == before
        del value
        gc.collect()
        return address

    assert not [t for t in holders_of([inner()]).values() if t.shape == (11,)]


def test_hooks_of_saved_tensors_are_not_called():
    calls = []

    def unpack(value):
        calls.append(1)
        return value[0]

    x = torch.ones(13, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: [t.clone()], unpack):
        y = x.exp()
    saved = y.grad_fn._raw_saved_result.data[0]
    address = saved.data_ptr()
    del saved
    (holder,) = holders_of([address]).values()
    assert calls == []
    assert holder.shape == (13,)


def test_a_view_that_was_changed_in_place():
    """torch does not say what made it."""
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with torch.no_grad():
        first = net.wide.weight[0]
    total = 0
    with ms.memory.track(net, optimizer) as t:
        for _ in range(5):
            loss = net(torch.randn(ROWS, 8)).square().sum()
            loss.backward(retain_graph=True)
            optimizer.step()
            optimizer.zero_grad()
            total = total + loss
    assert "graph of a tensor of shape []" in " ".join(g.held_by for g in t.growth())
    assert first.shape == (8,)


class Settings:
    __slots__ = ("_values",)

    def __init__(self, values):
        self._values = values

    def __getattr__(self, name):
        return self._values[name]


class Proxy:
    """As of web frameworks: it cannot be asked what it stands for."""

    def __init__(self, values):
        self.__dict__["values"] = values

    @property
    def __class__(self):
        raise RuntimeError("outside of a request")


@pytest.mark.parametrize("kind", [Settings, Proxy])
def test_objects_that_cannot_be_asked(kind):
    KEPT.append(kind([]))
    if kind is Settings:
        t = train(lambda net, hidden, loss: KEPT[0]._values.append(hidden))
    else:
        t = train(lambda net, hidden, loss: vars(KEPT[0])["values"].append(hidden))
    (group,) = grown(t)
    assert group.tensors == STEPS and "KEPT" in group.held_by


def test_keys_are_not_printed():
    class Key:
        def __repr__(self):
            raise AssertionError

    KEPT.append({})
    t = train(lambda net, hidden, loss: KEPT[0].update({Key(): hidden}))
    (group,) = grown(t)
    assert "[a Key]" in group.held_by


@pytest.mark.parametrize("kind", [dict, deque])
def test_what_other_threads_write_to_meanwhile(kind):
    """The search goes through copies, which are made at once: no other thread has its turn in one,
    though it may wherever the collector calls Python, as Hypothesis has it do."""
    tensor, stop = torch.ones(17), threading.Event()
    many = kind.fromkeys(range(100_000)) if kind is dict else deque(range(100_000))
    if kind is dict:
        many["tensor"] = tensor
    else:
        many.append(tensor)
    KEPT.append(many)
    address = tensor.data_ptr()
    del tensor, many

    def collects(*_):
        for _ in range(100):
            pass

    def write():
        number = 1_000_000
        while not stop.is_set():
            number += 1
            if kind is dict:
                KEPT[0][number] = None
            else:
                KEPT[0].append(number)
            time.sleep(1e-5)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    thread = threading.Thread(target=write)
    thread.start()
    gc.callbacks.append(collects)
    try:
        texts = [held(address).text for _ in range(3)]
    finally:
        gc.callbacks.remove(collects)
        stop.set()
        thread.join()
        sys.setswitchinterval(interval)
    place = "KEPT[0]['tensor']" if kind is dict else "KEPT[0][100000]"
    assert texts == [f"{place} of the module {__name__}"] * 3


def test_results_that_are_kept_as_arrays_have_a_shape():
    t = train(lambda net, hidden, loss: KEPT.append(hidden.detach().numpy()))
    (group,) = grown(t)
    assert (group.tensors, group.shape, group.held_by) == (STEPS, (ROWS, WIDE), "")
    assert str([ROWS, WIDE]) in t.report()


def test_a_search_that_fails(monkeypatch):
    def fails(*_):
        raise RuntimeError("dictionary changed size during iteration")

    monkeypatch.setattr("memsave_ext.memory.holders._step_to", fails)
    t = train(lambda net, hidden, loss: KEPT.append(hidden.detach()))
    (group,) = grown(t)
    assert group.held_by == ""
    assert "never freed" in (report := t.report())
    assert "[]" not in report  # its shape is not known
