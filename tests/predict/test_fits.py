"""memory.fits(): which means make a step fit, and how large its batch can be."""

import dataclasses
import functools
import json
import os
import sys
from pathlib import Path

import pytest
import sampling
import torch
from helpers import Shared
from sampling import share
from torch import nn

import memsave_ext as ms
from memsave_ext.memory.__main__ import main
from memsave_ext.predict import fits, picture
from memsave_ext.predict.fits import _largest, search
from memsave_ext.predict.techniques import ALL, Techniques, blocks_of

pytestmark = pytest.mark.usefixtures("few_techniques")


def net():
    blocks = [nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)) for _ in range(4)]
    return nn.Sequential(nn.Linear(64, 64), nn.Sequential(*blocks), nn.Linear(64, 8))


def of_batch(batch, make=torch.optim.AdamW):
    model = net()
    optimizer = make(model.parameters())
    x = torch.randn(batch, 64)

    def step():
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step


def build():
    return of_batch(256)


def wide():
    """On a card more than the segments of its allocator, which have 20 MiB."""
    width, batch = 512, 1 << 13
    blocks = [
        nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width))
        for _ in range(6)
    ]
    model = nn.Sequential(nn.Linear(width, width), nn.Sequential(*blocks), nn.Linear(width, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(batch, width)

    def step():
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step


def failing():
    raise ValueError("of the user's own")


def rows(found):
    return {row.name: row for row in found.rows}


def every(build, budget, **options):
    """All means, also those that cost more than the first that fits."""
    return ms.memory.fits(build, budget, every=True, **options)


def among(names, build, budget, device="cuda"):
    """Rows of some means alone, and of the step as built, by their names."""
    tried = [techniques for techniques in ALL if techniques.name in ("as built", *names)]
    assert len(tried) == 1 + len(names)
    return rows(search(build, budget, device=torch.device(device), every=True, among=tried))


@pytest.fixture(scope="module")
def large():
    """All means within a budget that all of them fit in."""
    with sampling.few_techniques():
        return every(wide, 1 << 40)


def test_the_cheapest_that_fits(large):
    """On a card, by what is reserved."""
    needed = {name: row.reserved for name, row in rows(large).items()}
    assert len(needed) == (17 if sampling.full else 7)
    predicted = ms.memory.predict(wide, device="cuda")
    assert needed["as built"] == predicted.reserved
    assert rows(large)["as built"].peak == predicted.peak < predicted.reserved
    assert large.cheapest.name == "as built"
    budget = needed["checkpoint by block"]
    others = [name for name in needed if "budget" not in name]
    costlier = [name for name in others if needed[name] is not None and needed[name] <= budget]
    assert costlier[0] == "checkpoint by block"
    found = ms.memory.fits(wide, budget)
    assert found.cheapest is found.rows[-1] and not any(row.fits for row in found.rows[:-1])
    within = "remat within the budget" if ms._native.available else costlier[0]
    assert found.cheapest.name == within and 1 < len(found.rows) < 14
    least = min(size for size in needed.values() if size is not None)
    only = ms.memory.fits(wide, least)
    assert only.cheapest.name == "checkpoint by block, Adam in backward, 4-bit states"
    assert [row.fits for row in only.rows] == [False] * (len(only.rows) - 1) + [True]
    assert len(only.rows) == (14 if sampling.full else 7)


@pytest.mark.skipif(not ms._native.available, reason="only the native remat keeps to a budget")
def test_remat_keeps_to_less_than_a_budget_of_reserved_bytes():
    """It counts what is allocated, and what fragmentation costs comes on top."""
    budget = 720 << 20
    row = rows(ms.memory.fits(wide, budget))["remat within the budget"]
    assert row.fits and row.peak <= 1.02 * row.remat_budget and row.reserved <= budget
    assert row.remat_budget < budget


@pytest.mark.parametrize(
    ("load", "limit", "free"),
    [(0.2, "max 100000", 8), (3.4, "max 100000", 5), (3.4, "200000 100000", 2), (9, "", 1)],
)
def test_how_many_predictions_run_at_once(load, limit, free, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8))
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0, 0))
    monkeypatch.setattr(Path, "read_text", lambda *_: limit)
    assert fits._free_cores() == free


def test_how_many_run_at_once_where_no_prediction_does(monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.delattr(os, "getloadavg")
    assert fits._free_cores() == 1


def test_a_process_that_cannot_be_made_ahead_is_made_later(monkeypatch):
    """Its failure is no row's."""
    names, asked = ["optimizer in backward", "checkpoint by block"], []
    monkeypatch.setattr(fits, "_free_cores", lambda: 3)
    expected = among(names, build, 10**9, "cpu")
    start = fits.start

    def fails_third(*args, **options):
        asked.append(1)
        if len(asked) == 3:
            raise RuntimeError("predict: no child process can be made: out of memory")
        return start(*args, **options)

    monkeypatch.setattr(fits, "start", fails_third)
    assert among(names, build, 10**9, "cpu") == expected and len(asked) == 4


def test_a_head_that_does_not_apply_is_tried_once(monkeypatch):
    """And only what has none is left in the table. Idle cores begin with the next ones."""
    monkeypatch.setattr(fits, "_free_cores", lambda: 1)
    tried, heads = Shared(), [techniques for techniques in ALL if techniques.loss_head]

    def noted():
        tried.append(1)
        return build()

    found = search(noted, 1, device=torch.device("cpu"), every=True, among=[ALL[0], *heads])
    assert len(heads) > 2 and [row.name for row in found.rows] == ["as built"]
    assert len(tried.values()) == 2


def test_means_are_what_they_are_called():
    """As a user would write them."""

    def written():
        model = net()
        ms.checkpoint_modules(
            model[1], lambda m: isinstance(m, nn.Sequential) and m is not model[1]
        )
        optimizer = ms.AdamW(model.parameters(), in_backward=True, state_dtype="8bit")
        x = torch.randn(256, 64)

        def step():
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        return model, optimizer, step

    name = "checkpoint by block, Adam in backward, 8-bit states"
    row = among([name], build, 10**9, "cpu")[name]
    assert row.peak == ms.memory.predict(written).peak


def test_the_largest_batch():
    budget = 8 << 20
    found = ms.memory.fits(of_batch, budget, batch=16, device="cpu")
    assert found.batch == 16
    size = found.rows[0].largest_batch
    assert size > 16
    assert ms.memory.predict(lambda: of_batch(size)).peak <= budget
    assert ms.memory.predict(lambda: of_batch(size + 1)).peak > budget
    none = ms.memory.fits(of_batch, 1 << 17, batch=2, device="cpu")
    applied = [row for row in none.rows if row.peak is not None]  # in pure Python not all do
    assert {row.largest_batch for row in applied} == {0}


def test_which_functions_take_a_batch():
    """A batch that was asked for is never left out without a word."""

    def by_name(batch=8):
        return of_batch(batch)

    def by_longer_name(batch_size=None):
        return of_batch(16 if batch_size is None else batch_size)

    def width(width=64):
        return build()

    def row(function, **options):
        found = ms.memory.fits(function, "1GB", device="cpu", **options)
        return found.batch, found.rows[0].peak

    def peak(size):
        return ms.memory.predict(lambda: of_batch(size)).peak

    assert row(of_batch) == (1, peak(1))
    assert row(by_name) == (8, peak(8)) and row(by_name, batch=64) == (64, peak(64))
    assert row(by_longer_name) == (None, peak(16))
    assert row(by_longer_name, batch=64) == (64, peak(64))
    for none in (width, build, functools.partial(of_batch, batch=8), lambda *sizes: build()):
        assert row(none)[0] is None
        with pytest.raises(ValueError, match=r"fits: batch=64 was given, but build takes no batch"):
            ms.memory.fits(none, "1GB", batch=64)


@pytest.mark.parametrize("straight", [True, False])
@pytest.mark.parametrize("step", [1, 1 << 21], ids=["bytes", "segments"])
@pytest.mark.parametrize("held", [0, 10**8, 10**10], ids=["none held", "some held", "too much"])
def test_the_largest_batch_needs_few_predictions(held, step, straight):
    """Also of an allocator, which reserves the same for many sizes."""
    budget, asked = 10**9, []

    def peak(size):
        asked.append(size)
        return -(-(held + 9_876 * size) // step) * step

    limit = budget // step * step
    for batch in (1, 16, 300_000):
        asked.clear()
        largest = _largest(peak, budget, batch, peak(batch), straight)
        assert largest == max((limit - held) // 9_876, 0)
        # Where peaks below the budget say nothing, sizes are multiplied by 4 until two are over it.
        most = {(True, 1): 8, (False, 1): 14, (True, 1 << 21): 22, (False, 1 << 21): 28}
        assert len(asked) <= (most[straight, step] if largest else 2)


def test_sizes_that_fail_leave_the_row():
    """As a batch of 1 does, of which a batch norm has no variance."""

    def normed(batch):
        model = nn.Sequential(nn.Linear(64, 256), nn.BatchNorm1d(256), nn.Linear(256, 64))
        x = torch.randn(batch, 64)

        def step():
            model(x).square().mean().backward()
            model.zero_grad()

        return model, None, step

    def peak(size):
        return ms.memory.predict(lambda: normed(size)).peak

    def row(build, budget, batch):
        found = search(build, budget, device=torch.device("cpu"), batch=batch, among=ALL[:1])
        return found.rows[0]

    found = row(normed, peak(100), 4096)
    assert found.peak == peak(4096) and not found.fits and not found.reason
    assert peak(found.largest_batch) <= peak(100) < peak(found.largest_batch + 1)
    assert row(normed, 1, 64).largest_batch is None

    def few(batch):
        if batch > 10:
            raise IndexError("there are no more rows")
        return normed(batch)

    found = row(few, 1 << 30, 4)
    assert found.fits and found.peak == peak(4) and found.largest_batch == 10
    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        row(normed, 1 << 30, 1)


def test_the_largest_batch_above_sizes_that_fail():
    def of(fails):
        return lambda size: None if fails(size) else 100 * size

    assert _largest(of(lambda size: size < 5), 1000, 64, 6400, True) == 10
    assert _largest(of(lambda size: size < 5), 1000, 8, 800, True) == 10
    assert _largest(of(lambda size: size > 9), 1000, 8, 800, True) == 9
    assert _largest(of(lambda size: size != 64), 1000, 64, 6400, True) is None
    assert _largest(of(lambda size: size != 64), 10_000, 64, 6400, True) == 64
    assert _largest(of(lambda size: False), 50, 64, 6400, True) == 0


def test_nothing_fits():
    found = ms.memory.fits(build, "100KB")
    assert found.cheapest is None
    text = " ".join(found.report().split())
    assert "Nothing fits. The lowest peak is" in text
    assert "parameters" in text and "Its largest tensors: " in text


def test_means_that_do_not_apply():
    def plain():
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return model, optimizer, lambda: model(torch.randn(2, 4)).sum().backward()

    found = among(["Adam in backward", "checkpoint by block"], plain, 10**9)
    assert found["as built"].fits
    assert "not Adam or AdamW" in found["Adam in backward"].reason
    assert "no list of blocks" in found["checkpoint by block"].reason
    assert found["checkpoint by block"].peak is None


def test_optimizers_of_any_kind_in_backward():
    def momentum(params):
        return torch.optim.SGD(params, lr=0.1, momentum=0.9)

    def written():
        model, optimizer, step = of_batch(16, momentum)
        return model, ms.in_backward(optimizer, small_bytes=0), step

    found = among(["optimizer in backward"], lambda: of_batch(16, momentum), 10**9, "cpu")
    assert found["optimizer in backward"].peak <= found["as built"].peak
    assert found["optimizer in backward"].reason == ""
    peak = ms.memory.predict(written).peak
    # In pure Python a bucket of gradients waits for the hooks of who follows them: all of these.
    assert peak < found["as built"].peak if ms._native.available else peak <= found["as built"].peak


def test_an_optimizer_that_steps_in_backward_already():
    def ours():
        return of_batch(64, lambda params: ms.AdamW(params, in_backward=True))

    found = among(["Adam in backward", "Adam in backward, 8-bit states"], ours, 10**9)
    assert "already" in found["Adam in backward"].reason
    eight = found["Adam in backward, 8-bit states"].peak
    assert eight is not None and eight < found["as built"].peak


def test_blocks():
    assert len(blocks_of(net())) == 4
    assert blocks_of(nn.Linear(2, 2)) == []


def test_budgets():
    assert ms.memory.fits(build, "24GB").budget == 24 * 10**9
    assert ms.memory.fits(build, " 1.5 GiB").budget == 3 << 29
    for wrong in ("24 apples", "GB", "", -1, 0, "80%", "auto"):
        with pytest.raises(ValueError, match="fits: budget must be bytes as an int, or text"):
            ms.memory.fits(build, wrong)
    for wrong in (None, True):
        with pytest.raises(TypeError, match="fits: budget must be bytes"):
            ms.memory.fits(build, wrong)
    with pytest.raises(ValueError, match="a share of the activations is for remat"):
        ms.memory.fits(build, 0.5)
    with pytest.raises(ValueError, match="batch must be at least 1"):
        ms.memory.fits(build, 1, batch=0)


def test_times_are_over_the_step_as_built(large):
    times = {name: row.time for name, row in rows(large).items()}
    assert times["as built"] == 1
    applied = {name for name, row in rows(large).items() if row.peak is not None}
    applied = {name for name in applied if "elsewhere" not in name}
    assert applied == {name for name, time in times.items() if time is not None}
    assert times["checkpoint by block"] > 1
    if sampling.full:
        assert times["checkpoint by block, Adam in backward"] < times["checkpoint by block"]
    head = large.report().partition("as built")[0]
    assert "time" in head and "bits" in head and "1.00x" in large.report()
    document = large.to_json()["rows"][0]
    assert (document["time"], document["bits"]) == (1.0, "yes")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_checkpointed_step_takes_one_more_forward(device):
    """Most of it is products of matrices: eight in forward, fifteen in backward, as the first
    layer's input needs no gradient."""

    def wide():
        blocks = [
            nn.Sequential(nn.Linear(256, 1024), nn.Linear(1024, 256), nn.ReLU()) for _ in range(4)
        ]
        model, x = nn.Sequential(*blocks), torch.randn(4096, 256)

        def step():
            model(x).square().mean().backward()
            model.zero_grad()

        return model, None, step

    plain = ms.memory.predict(wide, device=device).seconds
    again = ms.memory.predict(Techniques(checkpoint=True).applied(wide), device=device).seconds
    assert again / plain == pytest.approx(1 + 8 / 23, abs=0.05)


@pytest.mark.skipif(not ms._native.available, reason="remat is native")
def test_less_memory_takes_more_time():
    peak = ms.memory.predict(build).peak
    name = "remat within the budget"
    times = [among([name], build, int(share * peak), "cpu")[name].time for share in (1.0, 0.9, 0.8)]
    assert times == sorted(times) and times[-1] > times[0] + 0.01


def test_a_step_of_no_operators_has_no_time():
    found = ms.memory.fits(lambda: (nn.Linear(1, 1), None, lambda: None), "1GB", every=True)
    assert {row.time for row in found.rows} == {None}
    assert found.rows[0].times == "" and found.report()


@pytest.mark.parametrize("groups", [1, 4, 16])
def test_convolutions_take_three_in_a_step(groups):
    """Whose backward takes two; torch's formula has more of groups."""

    def of(passes):
        def build():
            x = torch.randn(64, 16, 64, 64, requires_grad=passes == 3)
            grad = torch.randn(64, 16, 64, 64)
            conv = nn.Conv2d(16, 16, 3, groups=groups, padding=1, bias=False)

            def step():
                y = conv(x)
                if passes > 1:
                    y.backward(grad)
                    x.grad = conv.weight.grad = None

            return conv, None, step

        return ms.memory.predict(build).seconds

    one, two, three = map(of, (1, 2, 3))
    assert two / one == pytest.approx(2, abs=0.05) and three / one == pytest.approx(3, abs=0.05)


def test_the_command_line(capsys):
    where = f"{__name__}:of_batch"
    assert main(["fits", where, "--budget", "1GB", "--batch", "8"]) == 0
    assert "The cheapest that fits: as built." in capsys.readouterr().out
    assert main(["fits", where, "--budget", "1KB", "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["cheapest"] is None and document["budget"] == 1000
    assert document["rows"][0]["time"] == 1
    batches = [row["largest_batch"] for row in document["rows"] if not row["reason"]]
    tried = (17, 11) if sampling.full else (7, 6)
    assert batches == [0] * tried[not ms._native.available]
    assert main(["fits", f"{__name__}:build", "--budget", "1GB", "--batch", "8"]) == 2
    assert "batch=8 was given, but build takes no" in capsys.readouterr().err
    assert main(["fits", where, "--budget", "much"]) == 2
    assert "budget must be" in capsys.readouterr().err
    assert main(["fits", f"{__name__}:failing", "--budget", "1GB"]) == 2
    assert "ValueError: of the user's own" in capsys.readouterr().err


def test_the_command_lines_places_and_devices(capsys):
    on_cpu = ["fits", f"{__name__}:build", "--budget", "1GB", "--device", "cpu"]
    assert main([*on_cpu, "--offload", "/nonexistent"]) == 2
    told = capsys.readouterr()
    assert "fits: offload" in told.err and "/nonexistent" in told.err and not told.out
    assert main([*on_cpu, "--devices", "4-1", "--shard", "ddp"]) == 0
    assert "1 device" in capsys.readouterr().out


def test_a_step_that_calls_parts_of_the_model():
    def parts():
        model, optimizer, _ = build()
        x = torch.randn(256, 64)

        def step():
            model[2](model[1](model[0](x))).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        return model, optimizer, step

    found = among(["remat", "checkpoint by block"], parts, 10**9)
    assert "never the model itself" in found["remat"].reason
    assert found["checkpoint by block"].fits


def test_what_does_not_apply_is_told_below():
    def plain():
        model = nn.Linear(4, 4)
        return model, None, lambda: model(torch.randn(2, 4)).sum().backward()

    text = " ".join(every(plain, "1GB").report().split())
    assert "Not tried: checkpoint by block; checkpoint by block, optimizer in backward;" in text
    assert "(the model has no list of blocks of one class)." in text


def test_it_stops_at_the_first_that_fits():
    built = Shared()

    def counting():
        built.append(1)
        return build()

    found = ms.memory.fits(counting, 1 << 40)
    assert [row.name for row in found.rows] == ["as built"] and built.values()[:2] == [1]
    assert "every=True, or --every, tries them, too" in " ".join(found.report().split())
    assert found.skipped


def test_none_were_skipped_where_all_were_tried(large):
    """Also of a model without a head, to which the last of them does not apply."""
    on_a_cpu = every(lambda: (nn.Linear(1, 1), None, lambda: None), "1GB", device="cpu")
    for found in (large, on_a_cpu):
        assert found.cheapest.name == "as built" and not found.skipped
        assert "were skipped" not in found.report()


def test_a_row_whose_step_fails_has_the_reason():
    """As a step that reads gradients does, where an optimizer in backward has taken them."""
    errors = [AttributeError, AssertionError, KeyError]
    raised = Shared()

    def reads():
        model, optimizer, _ = build()
        x = torch.randn(256, 64)

        def step():
            model(x).square().mean().backward()
            if any(p.grad is None for p in model.parameters()):
                error = errors[len(raised.values()) % len(errors)]
                raised.append(error)
                raise error("no gradients")
            optimizer.step()
            optimizer.zero_grad()

        return model, optimizer, step

    found = every(reads, "1GB")
    failed = [row for row in found.rows if row.reason.startswith("the step raises")]
    assert failed[0].name == "optimizer in backward" and len(failed) == len(raised.values()) > 3
    for row, error in zip(failed, raised.values(), strict=True):
        assert row.peak is None and not row.fits
        assert error.__name__ in row.reason and "no gradients" in row.reason
    assert rows(found)["checkpoint by block"].fits
    assert "no gradients" in " ".join(found.report().split())

    def always():
        model, optimizer, _ = build()

        def step():
            raise errors[0]("of the user")

        return model, optimizer, step

    with pytest.raises(errors[0], match="of the user"):
        ms.memory.fits(always, "1GB")


def test_a_row_was_not_predicted_where_the_prediction_says_so():
    """Not where the step's own error begins as those of predictions do."""

    def numbers(y):
        return y.detach().numpy()

    def raises(_):
        raise RuntimeError("predict: the user's own")

    def dies(_):
        os._exit(5)

    def build_with(fails):
        model = net()
        optimizer = torch.optim.AdamW(model.parameters())
        x = torch.randn(256, 64)

        def step():
            y = model(x)
            y.square().mean().backward()
            if model[0].weight.grad is None:  # the optimizer was stepped in backward
                fails(y)
            optimizer.step()
            optimizer.zero_grad()

        return model, optimizer, step

    def row(fails):
        name = "optimizer in backward"
        return among([name], lambda: build_with(fails), 10**9, "cpu")[name]

    of_the_step = row(raises)
    assert (of_the_step.reason, of_the_step.is_unpredicted) == ("predict: the user's own", False)
    for fails, reason in ((numbers, "reads the values"), (dies, "exit status 5")):
        unpredicted = row(fails)
        assert unpredicted.is_unpredicted and reason in unpredicted.reason


def test_an_error_without_a_text_is_not_taken_for_gradients_that_are_gone():
    """Gradients elsewhere are tried in place of a step in backward only where a loop clips them."""

    def raises():
        model = net()
        optimizer = torch.optim.AdamW(model.parameters())
        x = torch.randn(256, 64)

        def step():
            model(x).square().mean().backward()
            if model[0].weight.grad is None:
                raise ValueError
            optimizer.step()
            optimizer.zero_grad()

        return model, optimizer, step

    found = among(["optimizer in backward"], raises, 10**9)
    assert list(found) == ["as built", "optimizer in backward"]
    assert found["optimizer in backward"].peak is None


def test_grad_scalers_in_every_row():
    def scaled():
        model, optimizer, _ = build()
        scaler, x = torch.amp.GradScaler("cpu"), torch.randn(256, 64)

        def step():
            scaler.scale(model(x).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

        return model, optimizer, step

    found = every(scaled, "1GB", device="cpu")
    assert rows(found)["as built"].fits and rows(found)["checkpoint by block"].fits
    assert len(found.rows) == (17 if sampling.full else 7)


@pytest.mark.parametrize("with_tqdm", share([True, False], 2))
def test_progress_is_shown_on_a_terminal_or_when_asked_for(capsys, monkeypatch, with_tqdm):
    if with_tqdm:
        pytest.importorskip("tqdm")
    else:
        monkeypatch.setitem(sys.modules, "tqdm", None)
    predict = ms.memory.predict

    def shown(**options):
        ms.memory.fits(build, "1GB", **options)
        of_fits = capsys.readouterr().err
        predict(build, **options)
        return of_fits, capsys.readouterr().err

    assert shown() == ("", "")
    asked = shown(progress=True)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    assert shown(progress=False) == ("", "")
    for found in (asked, shown()):
        assert "fits" in found[0] and "as built" in found[0] and "predict" not in found[0]
        assert "predict" in found[1] and "first step" in found[1]
        for text in found:
            last = text.rsplit("\r", 2)[-2:]
            assert not "".join(last).strip(), "nothing is left of it"


def test_progress_of_a_step_that_raises_is_gone(capsys):
    with pytest.raises(ValueError, match="of the user's own"):
        ms.memory.fits(failing, "1GB", progress=True)
    assert not capsys.readouterr().err.rpartition("\r")[2].strip()


def test_a_picture_has_a_bar_for_each_means_and_the_budget(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    drawn = []
    monkeypatch.setattr(picture, "save", lambda figure, path: drawn.append(figure))
    found = every(lambda: of_batch(256, torch.optim.SGD), "2300KB")
    found.plot(tmp_path / "fits.png")
    found.plot(tmp_path / "fits.png", title="Of a title")
    dataclasses.replace(found, budget=24 * 10**9).plot(tmp_path / "fits.png")
    axes, titled, far = (figure.axes[0] for figure in drawn)
    names = [label.get_text().replace("\n", " ") for label in axes.get_yticklabels()]
    assert names == [row.name for row in found.rows]
    for place, row in enumerate(found.rows):
        bars = [b for b in axes.patches if round(b.get_y() + b.get_height() / 2) == place]
        assert sum(bar.get_width() for bar in bars) == (row.peak or 0)
    (line,) = [line for line in axes.lines if line.get_gid() == "budget"]
    assert {*line.get_xdata()} == {2_300_000} == {found.budget}
    texts = "\n".join(text.get_text().replace("\n", " ") for text in axes.texts)
    assert "fits; costs one more forward" in texts and "does not fit; costs nothing" in texts
    assert "does not apply: the optimizer is SGD, not Adam or AdamW" in texts
    assert axes.get_title("left") == "Predicted peaks of a training step on cuda"
    assert titled.get_title("left") == "Of a title"
    assert not [line for line in far.lines if line.get_gid() == "budget"]
    assert "budget: 22.4 GiB, far to the right" in str(
        [text.get_text() for text in far.get_legend().get_texts()]
    )


def test_a_picture_is_written(tmp_path):
    pytest.importorskip("matplotlib")
    ms.memory.fits(build, "1GB").plot(tmp_path / "fits.png")
    assert (tmp_path / "fits.png").read_bytes().startswith(b"\x89PNG")


def test_arguments_are_named_in_errors():
    for wrong in ("999999999TB", "0GB", 0, 1 << 63):
        with pytest.raises(ValueError, match=r"fits: budget must be .* less than 2\*\*63"):
            ms.memory.fits(build, wrong)
    for device in ("tpu", "mps", 7.5):
        with pytest.raises(ValueError, match="fits: device must be the CPU or a CUDA device, got"):
            ms.memory.fits(build, "1GB", device=device)
    with pytest.raises(ValueError, match="predict: device must be .*, got 'tpu'"):
        ms.memory.predict(build, device="tpu")
    with pytest.raises(
        TypeError, match=r"fits: build must be a function .*, got a model \(Linear\)"
    ):
        ms.memory.fits(nn.Linear(2, 2), "1GB")
    assert main(["fits", f"{__name__}:build", "--budget", "1GB", "--device", "tpu"]) == 2
