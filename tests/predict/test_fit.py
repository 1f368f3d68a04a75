"""fit() and Fits.apply(): the technique that fits is applied to a real model, and undone."""

import copy
import gc
import os
import pickle
import random
import sys
import tempfile
import time
import warnings
import weakref
from collections import UserDict

import numpy as np
import pytest
import sampling
import torch
from helpers import Shared
from on_device import on_every_device
from sampling import share
from torch import nn

import memsave_ext as ms
from memsave_ext.predict import techniques
from memsave_ext.predict.fits import search
from memsave_ext.predict.techniques import ALL
from memsave_ext.shared.table import format_seconds
from memsave_ext.store.folder import is_in_memory
from memsave_ext.store.mapped import is_mapped

NATIVE = ms._native.available
EXACT = [t for t in ALL if t.bits == "yes"]
OURS = [t for t in ALL if t.adam_in_backward and not t.loss_head and not t.offload]
GB = "1GB"


class Net(nn.Module):
    """Blocks that are worth a checkpoint, a norm with buffers, dropout, tied weights."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(32, 64, bias=False)
        self.norm, self.dropout = nn.BatchNorm1d(32), nn.Dropout(0.1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(3)
        )
        self.last = nn.Linear(64, 32, bias=False)
        self.last.weight = nn.Parameter(self.first.weight.detach().T.contiguous())
        self.again = nn.Linear(64, 32, bias=False)
        self.again.weight = self.last.weight

    def forward(self, x):
        x = self.last(self.first(x).relu()) + self.again(self.first(x))
        x = self.dropout(self.norm(x))
        for block in self.blocks:
            x = x + block(x)
        return x


def square(y):
    return y.square().mean()


def groups_of(model):
    wide = [p for p in model.parameters() if p.dim() > 1]
    narrow = [p for p in model.parameters() if p.dim() == 1]
    return [{"params": wide, "weight_decay": 0.1}, {"params": narrow, "lr": 1e-3}]


class Loop:
    def __init__(self, make=torch.optim.AdamW, **options):
        self.model = Net()
        self.optimizer = make(groups_of(self.model), lr=1e-2, **options)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)
        self.x = torch.randn(256, 32, generator=torch.Generator().manual_seed(1))
        self.losses = []
        torch.manual_seed(2)

    def run(self, steps, micro_batches=1):
        for _ in range(steps):
            for x in self.x.chunk(micro_batches):
                loss = square(self.model(x))
                loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.schedule.step()
            self.losses.append(loss.item())
        return self

    def fit(self, technique=None, budget=GB, **options):
        return ms.fit(
            self.model, self.optimizer, self.x, budget=budget, loss=square, technique=technique,
            **options,
        )  # fmt: skip

    def everything(self):
        state = self.optimizer.state_dict()
        return (
            [*self.model.state_dict().values()],
            [{n: v for n, v in g.items() if n != "params"} for g in state["param_groups"]],
            {key: sorted(value) for key, value in state["state"].items()},
            [t for key in sorted(state["state"]) for t in state["state"][key].values()],
        )


def assert_same(left, right):
    """Of loops: parameters, buffers, options, states."""
    for one, other in zip(left.everything(), right.everything(), strict=True):
        if one and isinstance(one, list) and isinstance(one[0], torch.Tensor):
            torch.testing.assert_close(one, other, rtol=0, atol=0)
        else:
            assert one == other


def assert_unchanged(loop, make=torch.optim.AdamW):
    assert type(loop.optimizer) is make
    for module in loop.model.modules():
        assert "forward" not in module.__dict__
        assert not module._forward_hooks and not module._forward_pre_hooks
    assert not any(p._post_accumulate_grad_hooks for p in loop.model.parameters())
    assert not loop.optimizer._optimizer_step_post_hooks


def needs_native(technique):
    if not NATIVE and (technique.remat or technique.within_budget):
        pytest.skip("remat is native")


@pytest.mark.each_value
@pytest.mark.filterwarnings("ignore:memsave_ext. a step had a peak of .* with remat,")
@pytest.mark.parametrize("before", [0, 2], ids=["new", "with states"])
@pytest.mark.parametrize("technique", share(EXACT, 2), ids=lambda technique: technique.name)
def test_exact_means_change_no_bit(technique, before, tmp_path):
    needs_native(technique)
    plain = Loop().run(before + 4)
    loop = Loop().run(before)
    fitted = loop.fit(technique.name, offload=str(tmp_path) if technique.offload else None)
    assert fitted.model is loop.model and fitted.optimizer is loop.optimizer
    assert (type(loop.optimizer) is torch.optim.AdamW) == (not technique.steps_in_backward)
    loop.run(3)
    if NATIVE and not technique.remat:  # whose plan follows from measured times
        assert fitted.measured == pytest.approx(fitted.predicted, rel=0.02)
    assert (fitted.measured is not None) == NATIVE
    fitted.undo()
    fitted.undo()
    assert_unchanged(loop)
    loop.run(1)
    assert loop.losses == plain.losses and len(loop.losses) == before + 4
    assert_same(loop, plain)


@pytest.mark.each_value
@pytest.mark.parametrize("before", [0, 2], ids=["new", "with states"])
@pytest.mark.parametrize("technique", share(OURS, 2), ids=lambda technique: technique.name)
def test_our_adam_takes_the_place_of_torchs(technique, before):
    needs_native(technique)
    plain = Loop().run(before + 4)
    loop = Loop().run(before)
    fitted = loop.fit(technique.name)
    assert type(loop.optimizer) is ms.AdamW and loop.optimizer.in_backward
    loop.run(3)
    states = [*loop.optimizer.state.values()]
    small = any(t.dtype is torch.uint8 for s in states for t in s.values())
    assert small == (technique.state_dtype is not None)
    fitted.undo()
    assert_unchanged(loop)
    assert all({*s} == {"step", "exp_avg", "exp_avg_sq"} for s in loop.optimizer.state.values())
    loop.run(1)
    assert {s["step"].item() for s in loop.optimizer.state.values()} == {before + 4}
    assert loop.schedule.get_last_lr() == plain.schedule.get_last_lr()
    rtol = {None: 1e-5, "8bit": 0.05, "4bit": 0.3}[technique.state_dtype]
    assert loop.losses == pytest.approx(plain.losses, rel=rtol)


@pytest.mark.parametrize(
    "technique",
    ["optimizer in backward", "Adam in backward", "Adam in backward, 8-bit states", "as built"],
)
def test_groups_and_states_that_a_loop_has_kept(technique):
    """It may set a rate there, without asking the optimizer for them again."""
    model, x = Net(), torch.randn(16, 32)
    optimizer = torch.optim.AdamW(groups_of(model), lr=1e-2)
    square(model(x)).backward()
    optimizer.step()
    optimizer.zero_grad()
    groups, states, dicts = optimizer.param_groups, optimizer.state, [*optimizer.param_groups]

    def trains_at_kept_rate():
        for group in dicts:
            group["lr"] = 0.0
            group["weight_decay"] = 0.0
        before = [p.detach().clone() for p in model.parameters()]
        square(model(x)).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert all(map(torch.equal, before, model.parameters()))
        assert optimizer.param_groups is groups and optimizer.state is states
        assert all(map(lambda a, b: a is b, groups, dicts))
        assert len(states) == len({*model.parameters()})

    applied = ms.fit(
        model, optimizer, x, budget=GB, loss=square, technique=technique, verbose=False
    )
    trains_at_kept_rate()
    applied.undo()
    trains_at_kept_rate()
    assert type(optimizer) is torch.optim.AdamW


@pytest.mark.parametrize("technique", ["optimizer in backward", "Adam in backward"])
def test_attributes_that_a_loop_has_given_its_optimizer(technique):
    model, x = Net(), torch.randn(16, 32)
    optimizer = torch.optim.AdamW(groups_of(model), lr=1e-2)
    of_torch, calls = {*vars(optimizer)}, []
    zero_grad = optimizer.zero_grad
    optimizer.tag = "before"
    optimizer.zero_grad = lambda *args: (calls.append(args), zero_grad(*args))
    applied = ms.fit(
        model, optimizer, x, budget=GB, loss=square, technique=technique, verbose=False
    )
    optimizer.later = "while it is fitted"
    for number, tag in enumerate(("before", "since"), 1):
        square(model(x)).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert len(calls) == number and optimizer.tag == tag
        optimizer.tag = "since"
        applied.undo()
    assert {*vars(optimizer)} - of_torch == {"tag", "zero_grad", "later"}
    assert optimizer.later == "while it is fitted"


@pytest.mark.parametrize(
    "technique", ["optimizer in backward", "Adam in backward", "Adam in backward, 8-bit states"]
)
def test_gradients_of_an_open_step_are_kept(technique):
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(2, 4)
    model(x).sum().backward()
    optimizer.step()  # there are states
    optimizer.zero_grad()
    model(x).square().sum().backward()
    before = [p.grad for p in model.parameters()]
    found = ms.fit(model, optimizer, x, budget="1GB", loss=lambda y: y.sum(), technique=technique)
    for when in ("applied", "undone"):
        assert [p.grad for p in model.parameters()] == before, when  # the same objects
        found.undo()


def test_the_cheapest_that_fits_is_applied_and_said(capsys):
    loop = Loop()
    plain = loop.fit("as built").predicted
    loop = Loop()
    fitted = loop.fit(budget=plain)
    assert fitted.technique == "as built" and "fit: nothing is changed" in capsys.readouterr().out
    assert_unchanged_but_for_the_measure(loop)
    fitted.undo()
    budget = plain - 50_000
    fitted = loop.fit(budget=budget)
    assert fitted.technique != "as built" and fitted.predicted <= budget == fitted.budget
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"fit: {fitted.technique}"
    assert "predicted peak" in lines[1] and len(lines) == 4
    assert f"about {fitted.time:.2f}x; results keep their bits: yes" in lines[3]
    loop.run(2)
    assert not NATIVE or fitted.measured <= 1.02 * budget


def assert_unchanged_but_for_the_measure(loop):
    hooks = loop.optimizer._optimizer_step_post_hooks
    assert len(hooks) == 1
    kept = dict(hooks)
    hooks.clear()
    assert_unchanged(loop)
    hooks.update(kept)


@pytest.mark.once
@pytest.mark.parametrize("others", ["before", "after", "around", "track", "in the end"])
def test_hooks_of_others(others):
    """torch goes through the hooks of a step while the measure takes its own away."""
    loop, calls = Loop(), []

    def count(kind):
        return lambda *_: calls.append(kind)

    register = loop.optimizer.register_step_post_hook, loop.optimizer.register_step_pre_hook
    if others in ("before", "around"):
        kept = [add(count(i)) for i, add in enumerate(register)]
    fitted = loop.fit("checkpoint by block", verbose=False)
    if others in ("after", "around"):
        kept = [add(count(i)) for i, add in enumerate(register)]
    if others == "track":
        with ms.memory.track(loop.model, loop.optimizer):
            loop.run(12)
    elif others == "in the end":  # where the measure is about to go
        loop.run(6)
        kept = [add(count(i)) for i, add in enumerate(register)]
        loop.run(1)
        kept += [add(count(i)) for i, add in enumerate(register)]
        loop.run(5)
    else:
        loop.run(12)
    assert fitted.seconds is not None
    every = {"before": 12, "after": 12, "around": 24, "track": 0, "in the end": 11}[others]
    assert [calls.count(kind) for kind in range(2)] == [every, every]
    for hook in kept if others not in ("track", "around") else ():
        hook.remove()
    ours = [*loop.optimizer._optimizer_step_post_hooks, *loop.optimizer._optimizer_step_pre_hooks]
    assert len(ours) == (4 if others == "around" else 0)


@pytest.mark.once
def test_undone_while_the_measure_goes():
    loop = Loop()
    fitted = loop.fit("checkpoint by block", verbose=False)
    handle = loop.optimizer.register_step_post_hook(lambda *_: None)
    loop.run(7)
    fitted.undo()
    handle.remove()
    assert_unchanged(loop)
    assert not loop.optimizer._optimizer_step_pre_hooks
    loop.run(2)


@pytest.mark.once
@pytest.mark.parametrize("verbose", [True, False])
def test_the_time_of_the_first_steps_is_told(capsys, verbose):
    loop = Loop()
    fitted = loop.fit("checkpoint by block", verbose=verbose)
    assert fitted.time is None and fitted.bits == "yes"  # the plain step was not predicted
    loop.run(6)
    assert fitted.seconds is None and "measured" not in capsys.readouterr().out
    begin = time.perf_counter()
    loop.run(1)
    assert 0 < fitted.seconds < 60 * (time.perf_counter() - begin)
    out = capsys.readouterr().out
    assert out.count("fit: measured: ") == verbose
    assert not verbose or format_seconds(fitted.seconds) in out
    assert not loop.optimizer._optimizer_step_post_hooks
    assert f"fit: measured: {format_seconds(fitted.seconds)} a step" in str(fitted)
    loop.run(3)
    assert not capsys.readouterr().out
    fitted.undo()


@pytest.mark.parametrize("verbose", [False, True])
def test_progress_is_shown_where_it_talks(capsys, monkeypatch, verbose):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    model, x = nn.Linear(8, 8), torch.randn(4, 8)
    ms.fit(model, None, x, budget="1GB", loss=torch.sum, verbose=verbose)
    assert ("as built" in capsys.readouterr().err) == verbose


def test_the_step_as_built_is_told_of_the_predicted_ratio(capsys):
    loop = Loop()

    def build():
        made = Loop()
        return made.model, made.optimizer, lambda: made.run(1)

    tried = [t for t in ALL if t.name in ("as built", "checkpoint by block")]
    found = search(build, 10**9, device=torch.device("cpu"), every=True, among=tried)
    fitted = found.apply(loop.model, loop.optimizer, "checkpoint by block")
    assert fitted.time == {row.name: row.time for row in found.rows}["checkpoint by block"] > 1
    fitted.tells = True
    loop.run(7)
    as_built = format_seconds(fitted.seconds / fitted.time)
    assert f"as built a step would take about {as_built}" in capsys.readouterr().out


@pytest.mark.usefixtures("few_techniques")
@pytest.mark.once
def test_nothing_fits_and_nothing_is_touched():
    loop = Loop().run(1)
    square(loop.model(loop.x)).backward()
    grads = [p.grad.clone() for p in loop.model.parameters()]
    before = copy.deepcopy(loop.everything())
    sources = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    with pytest.raises(torch.OutOfMemoryError) as caught:
        loop.fit(budget="10kB")
    text = str(caught.value)
    assert "Nothing fits. The lowest peak is" in text and "4-bit states" in text
    assert "Tried: as built (" in text and "checkpoint by block (" in text
    assert torch.equal(torch.get_rng_state(), sources[0]) and random.getstate() == sources[1]
    assert np.array_equal(np.random.get_state()[1], sources[2])
    for one, other in zip(before, loop.everything(), strict=True):
        assert str(one) == str(other)
    torch.testing.assert_close([p.grad for p in loop.model.parameters()], grads, rtol=0, atol=0)
    assert_unchanged(loop)


@pytest.mark.usefixtures("few_techniques")
@pytest.mark.once
def test_without_a_step_in_backward():
    loop = Loop()
    with pytest.raises(torch.OutOfMemoryError, match=r"Not tried: .* \(in_backward=False\)"):
        loop.fit(budget="10kB", in_backward=False)
    budget = loop.fit("checkpoint by block").predicted
    other = Loop()
    fitted = other.fit(budget=budget, in_backward=False)
    assert "in backward" not in fitted.technique and fitted.technique != "as built"
    other.run(1)


def wide(clip=1e-3):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(6)))
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.ones(16, 256)

    def step():
        square(model(x)).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        return norm

    return model, optimizer, x, step


@pytest.mark.parametrize(
    ("in_backward", "mib", "moved"),
    [
        pytest.param(True, 18, ["states"], marks=pytest.mark.full),
        (True, 10, ["weights", "states"]),
        pytest.param(False, 10, ["weights", "states"], marks=pytest.mark.full),
    ],
)
@pytest.mark.skipif(not ms._native.available, reason="a budget is native")
def test_what_lies_elsewhere_before_nothing_fits(in_backward, mib, moved, tmp_path, capsys):
    x = torch.randn(64, 256)

    def made():
        torch.manual_seed(0)
        sizes = (256, 1024), (1024, 256)
        layers = [m for _ in range(6) for size in sizes for m in (nn.Linear(*size), nn.GELU())]
        model = nn.Sequential(*layers)
        return model, torch.optim.AdamW(model.parameters())

    def train(model, optimizer, steps=3):
        losses = []
        for _ in range(steps):
            loss = model(x).square().mean()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1) if not in_backward else None
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    plain = made()
    losses = train(*plain)
    model, optimizer = made()  # weights of 12 MiB
    fitted = ms.fit(
        model, optimizer, x, budget=f"{mib}MiB", loss=lambda y: y.square().mean(), offload=tmp_path,
        in_backward=in_backward,
    )  # fmt: skip
    elsewhere = [part for part in fitted.technique.split(", ") if part.endswith("elsewhere")]
    assert elsewhere[-len(moved) :] == [f"{what} elsewhere" for what in reversed(moved)]
    assert f"fit: {' and '.join(moved)} lie in {tmp_path}" in capsys.readouterr().out
    assert sum(map(is_mapped, model.parameters())) == 12 * ("weights" in moved)
    assert train(model, optimizer) == pytest.approx(losses, rel=1e-5)
    assert fitted.measured <= mib << 20
    fitted.undo()
    assert not any(map(is_mapped, model.parameters()))
    assert type(optimizer) is torch.optim.AdamW
    assert train(model, optimizer, 1) == pytest.approx(train(*plain, 1), rel=1e-5)


@pytest.mark.usefixtures("few_techniques")
@pytest.mark.once
def test_a_technique_whose_prediction_failed_is_told(monkeypatch):
    """Not one that does not apply, as a checkpoint of a model that has no blocks."""
    applied = techniques.Techniques.applied

    def dies(self, build, *more):
        made = applied(self, build, *more)
        return (lambda: os._exit(5)) if self.name == "optimizer in backward" else made

    model, optimizer, x, _ = wide()
    built = ms.memory.predict(model, optimizer, x, loss=square).peak
    options = {"loss": square, "budget": built - 2 * model[0].weight.nbytes, "verbose": False}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ms.fit(model, optimizer, x, **options).undo()
    monkeypatch.setattr(techniques.Techniques, "applied", dies)
    with pytest.warns(UserWarning, match="fit: ") as told:
        fitted = ms.fit(model, optimizer, x, **options)
    (text,) = [str(one.message) for one in told]
    left_out = f"fit: optimizer in backward, which costs less than {fitted.technique}, was left out"
    assert left_out in text and "exit status 5" in text
    assert fitted.technique not in ("as built", "optimizer in backward")
    fitted.undo()
    with pytest.raises(RuntimeError, match="fit: optimizer in backward was not predicted: .* 5"):
        ms.fit(model, optimizer, x, technique="optimizer in backward", **options)
    with pytest.raises(torch.OutOfMemoryError, match=r"Not predicted: optimizer in backward \(pre"):
        ms.fit(model, optimizer, x, loss=square, budget=1000)


@pytest.mark.once
def test_a_loop_that_clips_has_its_gradients_elsewhere(tmp_path):
    plain, _, _, expected = wide()
    model, optimizer, x, step = wide()
    built = ms.memory.predict(model, optimizer, batch=x, loss=square, device="cpu").peak
    budget = built - 2 * plain[0].weight.nbytes
    options = {"loss": square, "in_backward": False, "offload": tmp_path, "verbose": False}
    fitted = ms.fit(model, optimizer, x, budget=budget, **options)
    assert fitted.technique == "gradients elsewhere" and not fitted.steps_in_backward
    assert f"gradients lie in {tmp_path} until each is stepped" in str(fitted)
    norms = [expected() for _ in range(4)]  # not beside steps that are measured
    for norm in norms[:3]:
        assert torch.equal(step(), norm)
    assert not NATIVE or fitted.measured <= 1.02 * budget
    fitted.undo()
    assert type(optimizer) is torch.optim.AdamW and optimizer.state
    assert torch.equal(step(), norms[3])
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.usefixtures("few_techniques")
@pytest.mark.once
def test_fits_knows_a_step_that_clips(tmp_path):
    def build():
        model, optimizer, _, step = wide()
        return model, optimizer, step

    found = ms.memory.fits(build, "1MB", device="cpu", offload=tmp_path)
    rows = {row.name: row for row in found.rows}
    stepped, elsewhere = rows["optimizer in backward"], rows["gradients elsewhere"]
    assert stepped.peak is None and "the step clips gradients" in stepped.reason
    assert elsewhere.peak < rows["as built"].peak
    assert not sampling.full or "gradients elsewhere, 8-bit states" in rows


@pytest.mark.once
@pytest.mark.skipif(sys.platform != "linux", reason="a folder is for Linux")
def test_temporary_files_in_memory_are_no_place_for_gradients(monkeypatch):
    monkeypatch.setattr(techniques, "is_in_memory", lambda folder: folder == tempfile.gettempdir())
    model, optimizer, x, _ = wide()
    options = {"loss": square, "in_backward": False, "verbose": False}
    with pytest.raises(torch.OutOfMemoryError) as error:
        ms.fit(model, optimizer, x, budget="1MB", **options)
    assert "gradients elsewhere" not in str(error.value)
    with pytest.raises(ValueError, match="pass offload=FOLDER, or set TMPDIR"):
        ms.fit(model, optimizer, x, budget=GB, technique="gradients elsewhere", **options)
    assert type(optimizer) is torch.optim.AdamW


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="no such folder")
def test_what_is_in_memory():
    assert is_in_memory("/dev/shm") and not is_in_memory("/proc")


@pytest.mark.once
def test_twice_is_an_error_until_it_is_undone():
    loop = Loop()
    fitted = loop.fit("checkpoint by block")
    for model in (loop.model, nn.Sequential(loop.model)):
        with pytest.raises(
            ValueError, match=r"fit: a technique is applied to this .* already: call undo\(\)"
        ):
            ms.fit(model, loop.optimizer, torch.randn(4, 32), budget=GB, loss=square)
    fitted.undo()
    loop.fit("checkpoint by block, optimizer in backward").undo()
    fitted.undo()
    assert_unchanged(loop)


def test_an_exception_in_the_middle_leaves_nothing():
    def failing(technique, optimizer):
        model = Net()
        found = ms.memory.Fits([], 1 << 30, "cpu", None, [], [])
        with pytest.raises(ValueError, match=f"apply: {technique} does not apply: "):
            found.apply(model, optimizer(model.parameters()), technique)
        assert all("forward" not in module.__dict__ for module in model.modules())
        assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
        assert not model._forward_hooks
        found.apply(model, torch.optim.SGD(model.parameters()), "checkpoint by block").undo()

    failing("checkpoint by block, optimizer in backward", torch.optim.SparseAdam)
    failing("checkpoint by block, Adam in backward", torch.optim.SGD)
    # The last of the technique is refused where the model has a forward of its own.
    model = Net()
    model.forward = lambda x: x
    optimizer = torch.optim.AdamW(model.parameters())
    found = ms.memory.Fits([], 1 << 30, "cpu", None, [], [])
    with pytest.raises(ValueError, match="does not apply"):
        found.apply(model, optimizer, "remat, optimizer in backward")
    assert type(optimizer) is torch.optim.AdamW
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # nothing is watched any more


@pytest.mark.usefixtures("few_techniques")
@pytest.mark.once
def test_fits_applies_what_it_found():
    def build():
        loop = Loop()
        return loop.model, loop.optimizer, lambda: loop.run(1)

    budget = Loop().fit("checkpoint by block").predicted
    found = ms.memory.fits(build, budget, device="cpu")
    assert found.cheapest.name in ("remat within the budget", "checkpoint by block")
    plain, loop = Loop().run(3), Loop()
    fitted = found.apply(loop.model, loop.optimizer)
    assert fitted.technique == found.cheapest.name and fitted.predicted == found.cheapest.peak
    loop.run(3)
    assert_same(loop, plain)
    fitted.undo()
    assert_unchanged(loop)
    named = found.apply(loop.model, loop.optimizer, "checkpoint by block, Adam in backward")
    assert named.predicted is None  # it was not tried
    named.undo()
    with pytest.raises(ValueError, match="apply: technique must be None or one of 'as built', "):
        found.apply(loop.model, loop.optimizer, "magic")
    nothing = ms.memory.fits(lambda: (nn.Linear(2, 2), None, lambda: None), 1, device="cpu")
    with pytest.raises(torch.OutOfMemoryError, match="apply: Nothing fits"):
        nothing.apply(loop.model, loop.optimizer)


@pytest.mark.once
def test_wrapped_and_compiled_models_are_refused():
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(4, 32)
    with pytest.raises(ValueError, match="the model is wrapped in DataParallel"):
        ms.fit(nn.DataParallel(model), optimizer, x, budget=GB, loss=square)
    compiled = Net()
    compiled.blocks[0].compile()
    with pytest.raises(ValueError, match="the model is compiled"):
        ms.fit(compiled, torch.optim.AdamW(compiled.parameters()), x, budget=GB, loss=square)
    with pytest.raises(TypeError, match="fit: model must be a torch.nn.Module, got str"):
        ms.fit("model", optimizer, x, budget=GB)
    with pytest.raises(TypeError, match="fit: optimizer must be a torch.optim.Optimizer or None"):
        ms.fit(model, [optimizer], x, budget=GB)
    with pytest.raises(ValueError, match=r"step\(\) of LBFGS needs a closure"):
        ms.fit(model, torch.optim.LBFGS(model.parameters()), x, budget=GB, loss=square)
    lazy = nn.Sequential(nn.LazyLinear(4))
    with pytest.raises(ValueError, match="parameters of this Sequential have no shape yet: call"):
        ms.fit(lazy, torch.optim.AdamW(lazy.parameters()), x, budget=GB, loss=square)
    with pytest.raises(ValueError, match="fit: model must be on the CPU or a CUDA device"):
        ms.fit(nn.Linear(2, 2, device="meta"), None, x, budget=GB, loss=square)
    with pytest.raises(ValueError, match="fit: optimizer has a parameter of shape"):
        ms.fit(model, torch.optim.AdamW(Net().parameters()), x, budget=GB, loss=square)


X = torch.randn(16, 32)
WRONG = {
    "generator": (
        {"batch": (x for x in [X])},
        TypeError,
        r"one batch, .*\(loader\)\), .* generator",
    ),
    "loader": ({"batch": torch.utils.data.DataLoader(X)}, TypeError, "got DataLoader"),
    "dataset": ({"batch": torch.utils.data.TensorDataset(X)}, TypeError, "got TensorDataset"),
    "array": ({"batch": X.numpy()}, TypeError, "batch must be one batch, a tensor,.* got ndarray"),
    "none": ({"batch": None}, TypeError, "fit: a model needs batch="),
    "list": ({"batch": [X, X]}, TypeError, "batch is a list, .* of a loader's .* the inputs alone"),
    "two": ({"batch": (X, X)}, TypeError, "fit: batch must be what Net is called with.*: too many"),
    "no loss": ({"loss": None}, TypeError, "fit: the model returned no loss. Pass loss"),
    "loss": ({"loss": 3}, TypeError, "fit: loss must be a function or None, got int"),
    "loss of three": (
        {"loss": lambda a, b, c: a},
        TypeError,
        r"got a function with the parameters \(a, b, c\)",
    ),
    "tuple": ({"loss": lambda y: (y.mean(), y)}, TypeError, "of one number, got tuple"),
    "vector": ({"loss": lambda y: y}, TypeError, r"of one number, got one of shape \[16, 32\]"),
    "detached": (
        {"loss": lambda y: y.mean().detach()},
        ValueError,
        "the loss has no gradient",
    ),
    "technique": (
        {"technique": "magic"},
        ValueError,
        "fit: technique must be None or one of 'as built'",
    ),
    "micro": ({"micro_batches": 0}, ValueError, "fit: micro_batches must be at least 1, got 0"),
    "norm": ({"max_grad_norm": 0}, ValueError, "fit: max_grad_norm must be a number above 0"),
    "scaler": ({"grad_scaler": "x"}, TypeError, "fit: grad_scaler must be a torch.amp.Grad.* str"),
    "condition": ({"accumulate_when": 1}, TypeError, "fit: accumulate_when must be a function"),
    "in backward": ({"in_backward": None}, TypeError, "fit: in_backward must be True or False"),
}


@pytest.mark.once
@pytest.mark.parametrize(("change", "error", "text"), WRONG.values(), ids=WRONG)
def test_wrong_arguments(change, error, text):
    """Each says which it is, also where nothing that needs it is applied, and changes nothing."""
    loop = Loop()
    with pytest.raises(error, match=text):
        ms.fit(loop.model, loop.optimizer, **{"batch": X, "budget": GB, "loss": square, **change})
    assert_unchanged(loop)


@pytest.mark.once
def test_the_mode_that_it_is_called_in():
    peak = Loop().fit("as built").predicted
    for off in (torch.no_grad, torch.inference_mode):
        with off():
            assert Loop().fit("as built").predicted == peak
    loop = Loop()
    loop.model.eval()
    with pytest.warns(
        UserWarning, match="fit: this Net is in eval mode, and the step is predicted in"
    ):
        loop.fit("as built")
    frozen = Loop()
    frozen.model.requires_grad_(False)
    with pytest.raises(ValueError, match="it depends on no parameter that requires one"):
        frozen.fit("as built")


def test_a_loss_module_is_given_the_batch_where_it_takes_a_target():
    model = nn.Linear(32, 32)
    optimizer = torch.optim.AdamW(model.parameters())
    fitted = ms.fit(model, optimizer, X, budget=GB, loss=nn.MSELoss(), verbose=False)
    assert fitted.technique == "as built"


@pytest.mark.once
def test_what_ours_accumulates_is_asked_on():
    """An optimizer that changes in place asks as before, during fit() and after it."""
    plain, loop = (Loop(ms.AdamW, in_backward=True) for _ in range(2))
    for each in (plain, loop):
        count = iter(range(1, 1000))
        each.optimizer.accumulate_when(lambda count=count: next(count) % 2)
    fitted = ms.fit(
        loop.model, loop.optimizer, loop.x.chunk(2)[0], budget=GB, loss=square, micro_batches=2,
        technique="Adam in backward, 8-bit states",
    )  # fmt: skip
    loop.run(2, micro_batches=2)
    assert all("exp_avg" in state for state in loop.optimizer.state.values())
    fitted.undo()
    loop.run(1, micro_batches=2)
    plain.run(3, micro_batches=2)
    assert loop.losses == pytest.approx(plain.losses, rel=0.05)
    taken = Loop()
    ms.in_backward(taken.optimizer)
    with pytest.raises(ValueError, match=r"in_backward\(\) has taken the optimizer already"):
        taken.fit("Adam in backward")


@pytest.mark.once
def test_a_distributed_model_is_the_model_itself():
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    try:
        model = nn.parallel.DistributedDataParallel(Net())
        optimizer = torch.optim.AdamW(model.parameters())
        x = torch.randn(4, 32)
        inside = nn.Sequential(model)
        with pytest.raises(ValueError, match="the model is wrapped in DistributedDataParallel"):
            ms.fit(inside, optimizer, x, budget=GB, loss=square)
        fitted = ms.fit(model, optimizer, x, budget=GB, loss=square)
        found = ms.memory.fits(lambda: (Net(), None, lambda: None), GB, device="cpu")
        fitted.undo()
        found.apply(model, optimizer).undo()
        del model, optimizer, inside, fitted
        gc.collect()
    finally:
        torch.distributed.destroy_process_group()


def test_copies_have_the_means_and_nothing_to_undo():
    loop = Loop()
    fitted = loop.fit("checkpoint by block")
    for copied in (copy.deepcopy(loop.model), pickle.loads(pickle.dumps(loop.model))):
        assert copied.blocks[0].forward.module is copied.blocks[0]
        assert torch.equal(copied(loop.x).mean().isfinite(), torch.tensor(True))
    fitted.undo()
    assert_unchanged(loop)
    dropped = weakref.ref(loop.model)
    del loop, fitted
    gc.collect()
    assert dropped() is None


@pytest.mark.once
def test_inside_of_autocast():
    """As a loop that has it around its forwards alone."""

    def written():
        loop = Loop()
        for block in loop.model.blocks:
            ms.checkpoint_modules(block, lambda module, block=block: module is block)
        return loop.model, loop.optimizer, stepping(loop)

    def stepping(loop):
        def step():
            with torch.autocast("cpu", torch.bfloat16):
                loss = square(loop.model(loop.x))
            loss.backward()
            loop.optimizer.step()
            loop.optimizer.zero_grad()

        return step

    with torch.autocast("cpu", torch.bfloat16):
        fitted = Loop().fit("checkpoint by block")
        assert torch.is_autocast_enabled("cpu")
    assert fitted.predicted == ms.memory.predict(written).peak
    assert fitted.predicted < 0.9 * Loop().fit("checkpoint by block").predicted


@pytest.mark.skipif(not NATIVE, reason="peaks are measured natively")
def test_what_is_measured():
    """Also where gradients are kept and zeroed, with a closure, and inside of a track."""
    loop = Loop()
    fitted = loop.fit("checkpoint by block")

    def closure():
        loop.optimizer.zero_grad(set_to_none=False)
        loss = square(loop.model(loop.x))
        loss.backward()
        return loss

    loop.optimizer.step(closure)
    told = pytest.warns(UserWarning, match="a step had a peak of")
    with ms.memory.track(loop.model, loop.optimizer) as track, told:
        loop.optimizer.step(closure)
    assert fitted.measured == pytest.approx(track.peak, rel=0.02)
    loop = Loop()
    with ms.memory.track(loop.model, loop.optimizer) as track:
        fitted = loop.fit("checkpoint by block")
        loop.run(3)
    assert fitted.measured == pytest.approx(fitted.predicted, rel=0.02)
    assert track.peak == pytest.approx(fitted.predicted, rel=0.02)


class StepsByItsBase(torch.optim.AdamW):
    """Its step calls that of its base class, around which torch calls all step hooks, too, once
    there has been an optimizer of that class."""

    def step(self, closure=None):
        return super().step(closure)


def test_a_step_that_calls_that_of_its_base_class_is_one_step():
    Loop()
    loop = Loop(StepsByItsBase)
    fitted = loop.fit("checkpoint by block")
    loop.run(1)
    assert fitted.measured is None
    loop.run(5)
    if NATIVE:
        assert fitted.measured == pytest.approx(fitted.predicted, rel=0.02)
    assert fitted.seconds is None
    loop.run(1)
    assert fitted.seconds is not None


def test_a_prediction_before_the_first_steps_measures_nothing():
    loop = Loop()
    fitted = loop.fit("checkpoint by block")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        later = ms.memory.predict(loop.model, loop.optimizer, loop.x, loss=square)
    assert later.peak == fitted.predicted and fitted.measured is None
    loop.run(2)
    assert (fitted.measured is not None) is NATIVE


def test_a_group_that_is_added_stays():
    loop = Loop().run(1)
    fitted = loop.fit("Adam in backward, 8-bit states")
    loop.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))], "lr": 0.5})
    loop.run(1)
    fitted.undo()
    assert type(loop.optimizer) is torch.optim.AdamW
    assert [group["lr"] for group in loop.optimizer.param_groups][2] == 0.25  # by the schedule
    assert "state_dtype" not in loop.optimizer.param_groups[2]
    loop.optimizer.step()


def test_undone_within_a_step():
    loop = Loop().run(1)
    fitted = loop.fit("Adam in backward, 8-bit states")
    square(loop.model(loop.x)).backward()
    fitted.undo()
    assert_unchanged(loop)
    loop.run(2)
    assert all(torch.isfinite(p).all() for p in loop.model.parameters())


@pytest.mark.once
def test_budgets():
    loop = Loop()
    held = sum(t.nbytes for t in loop.model.state_dict().values())
    for budget, least in (("80%", held), ("auto", held), (1 << 30, 1 << 30), ("1GiB", 1 << 30)):
        fitted = loop.fit("as built", budget)
        assert fitted.budget >= least
        fitted.undo()
    for wrong in ("much", "0%", 0, -1, "120%"):
        with pytest.raises(ValueError, match="fit: budget must be bytes as an int, or text"):
            loop.fit(budget=wrong)
    with pytest.raises(TypeError, match="fit: budget must be bytes"):
        loop.fit(budget=None)
    with pytest.raises(ValueError, match="a share of the activations is for remat"):
        loop.fit(budget=0.5)


class Adding(nn.Module):
    called = Shared()  # with runs on fake tensors

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x, y=None):
        self.called.append(y is not None)
        return {"loss": (self.layer(x) + (0 if y is None else y)).square().mean(), "out": x}


@pytest.mark.once
def test_batches_and_losses():
    x = torch.randn(64, 8)
    model = Adding()
    optimizer = torch.optim.AdamW(model.parameters())
    for batch in (x, (x, x), {"x": x, "y": x}, UserDict(x=x, y=x)):
        model.called.clear()
        ms.fit(model, optimizer, batch, budget=GB, verbose=False).undo()
        assert set(model.called.values()) == {batch is not x}
    seen = Shared()

    def loss(output, batch):
        seen.append(sorted(batch))
        return output["loss"] * batch["x"].mean()

    ms.fit(model, optimizer, {"x": x}, budget=GB, loss=loss, verbose=False).undo()
    assert seen.values()[0] == ["x"]


@pytest.mark.once
def test_micro_batches():
    plain = Loop().run(3, micro_batches=4)
    loop = Loop()
    small = loop.x.chunk(4)[0]
    rest = iter(range(1, 1000))
    fitted = ms.fit(
        loop.model, loop.optimizer, small, budget=GB, loss=square, micro_batches=4,
        technique="checkpoint by block, optimizer in backward",
        accumulate_when=lambda: next(rest) % 4 != 0,
    )  # fmt: skip
    loop.run(3, micro_batches=4)
    assert_same(loop, plain)
    assert not NATIVE or fitted.measured <= 1.02 * fitted.predicted
    one = Loop().fit("optimizer in backward").predicted
    assert Loop().fit("optimizer in backward", micro_batches=2).predicted > one


@pytest.mark.skipif(not NATIVE, reason="peaks are measured natively")
def test_a_peak_that_was_not_predicted_is_told():
    loop = Loop()
    fitted = loop.fit("checkpoint by block")
    loop.x = loop.x.repeat(8, 1)
    loop.run(1)
    with pytest.warns(UserWarning, match=r"a step had a peak of .*MiB.*was predicted"):
        loop.run(1)
    assert fitted.measured > 2 * fitted.predicted
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loop.run(1)  # it is told once


@pytest.mark.once
def test_clipping_and_a_scaler_are_handed_on():
    loop = Loop()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024)
    loop.fit("Adam in backward, 8-bit states", max_grad_norm=0.5, grad_scaler=scaler)
    assert [g["max_grad_norm"] for g in loop.optimizer.param_groups] == [0.5, 0.5]
    assert loop.optimizer.grad_scaler is scaler
    scaler.scale(square(loop.model(loop.x))).backward()
    scaler.step(loop.optimizer)
    scaler.update()
    other = Loop()
    with pytest.warns(
        UserWarning, match="max_grad_norm=0.5 has no effect .* clip gradients in the train"
    ):
        fitted = other.fit("checkpoint by block", max_grad_norm=0.5, grad_scaler=scaler)
    assert "max_grad_norm" not in other.optimizer.param_groups[0]  # the loop's own clipping stays
    fitted.undo()


@on_every_device
def test_on_each_device(device):
    losses = []
    for technique in (None, "optimizer in backward"):
        loop = Loop()
        loop.model.to(device)
        loop.x = loop.x.to(device)
        loop.run(1)
        fitted = loop.fit(technique) if technique else None
        losses.append(loop.run(2).losses)
    assert losses[1] == losses[0]
    assert not NATIVE or fitted.measured <= 1.05 * fitted.predicted


@pytest.mark.once
def test_an_optimizer_of_ours(tmp_path):
    loop = Loop(ms.AdamW, in_backward=True, max_grad_norm=1.0).run(1)
    with pytest.raises(ValueError, match="the optimizer steps in backward already"):
        loop.fit("Adam in backward")
    fitted = loop.fit("Adam in backward, 8-bit states")
    loop.run(1)
    assert loop.optimizer.param_groups[0]["state_dtype"] == "8bit"
    fitted.undo()
    assert type(loop.optimizer) is ms.AdamW and loop.optimizer.in_backward
    group = loop.optimizer.param_groups[0]
    assert group["max_grad_norm"] == 1.0 and "state_dtype" not in group
    loop.run(1)
    assert all(p.grad is None for p in loop.model.parameters())
    elsewhere = Loop(ms.AdamW, states_on=str(tmp_path))
    with pytest.raises(ValueError, match="states_on= keeps the optimizer's states elsewhere"):
        elsewhere.fit("Adam in backward, 8-bit states")
    for options, text in (
        ({"clip_global_norm": 1.0}, "clip_global_norm needs all gradients"),
        ({"bf16": "split"}, "mode keeps bits of the parameters in its states"),
    ):
        refused = Loop()
        refused.model.bfloat16()
        refused.x = refused.x.bfloat16()
        refused.optimizer = ms.AdamW(refused.model.parameters(), **options)
        with pytest.raises(ValueError, match=text):
            refused.fit("Adam in backward, 8-bit states")


@pytest.mark.once
def test_options_that_ours_keep_outside_of_their_groups():
    """A prediction has them but for the scaler, and so has an optimizer that changes in place."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024)
    options = {"in_backward": True, "small_bytes": 4, "bucket_bytes": 8, "grad_scaler": scaler}
    loop = Loop(ms.AdamW, **options)
    before = scaler.state_dict()
    fitted = loop.fit("Adam in backward, 8-bit states")
    assert scaler.state_dict() == before and not scaler._per_optimizer_states
    scaler.scale(square(loop.model(loop.x))).backward()
    scaler.step(loop.optimizer)
    scaler.update()
    fitted.undo()
    ours = loop.optimizer
    assert (ours.in_backward, ours._small_bytes, ours._bucket_bytes) == (True, 4, 8)
    assert ours.grad_scaler is scaler
    clipped = Loop(ms.AdamW, clip_global_norm=1.0)
    fitted = clipped.fit("checkpoint by block")
    clipped.run(3)
    assert not NATIVE or fitted.measured == pytest.approx(fitted.predicted, rel=0.02)
    fitted.undo()
    assert clipped.optimizer.clip_global_norm == 1.0


def test_the_old_name_of_a_technique():
    loop = Loop()
    with pytest.warns(FutureWarning, match="means of fit is called technique now") as warned:
        fitted = ms.fit(
            loop.model, loop.optimizer, loop.x, budget=GB, loss=square, means="as built"
        )
    assert warned[0].filename == __file__
    with pytest.warns(FutureWarning, match="called technique now") as warned:
        assert fitted.means == fitted.technique == "as built"
    assert warned[0].filename == __file__
    fitted.undo()
    with pytest.raises(TypeError, match="fit: means is the old name of the argument technique"):
        loop.fit("as built", means="as built")
