"""``python -m memsave_ext.check``: what it says of a right build, and that it sees wrong ones."""

import contextlib
import json
import os
import subprocess
import sys

import pytest
import sampling
import torch

import memsave_ext as ms
from memsave_ext import _native, _parts
from memsave_ext.check import __main__ as check
from memsave_ext.check import levels, training

needs_native = pytest.mark.skipif(not _native.available, reason="has instruction sets to choose")
LEVELS = ("default", "avx2", "avx512")


def test_this_build(tmp_path, monkeypatch, capsys):
    """Every time without what is timed; times are of caches here, and so taken sooner."""
    monkeypatch.setattr(check, "_MANY_BYTES", 1 << 24)
    monkeypatch.setattr(check, "_SECONDS", 0.0)
    path = tmp_path / "check.json"
    timed = _native.available and sampling.full
    quick = [] if timed else ["--quick"]
    status = check.main([*quick, "--json", str(path)])
    lines = capsys.readouterr().out.splitlines()
    assert status == 0, lines
    assert lines[-1].endswith("all right" + (", in pure Python alone" * (not _native.available)))
    assert max(map(len, lines)) <= 80
    found = json.loads(path.read_text())
    assert found["torch"] == torch.__version__
    assert found["native"] == _native.available
    assert os.sep not in path.read_text()
    rows = found["rows"]
    assert {row["part"] for row in rows} >= {"adam", "batch_norm", "loss_head", "checkpoint"}
    assert all(row["cases"] and not row["problem"] for row in rows)
    if timed:
        rates = [row for row in rows if row["gb_per_s"]]
        assert len(rates) > 20
        assert all(row["percent_of_copy"] > 0 for row in rates)
        chosen = levels.level().lower()
        below = LEVELS[: LEVELS.index(chosen)] if chosen in LEVELS else ()
        assert {row["where"] for row in rows} >= {
            f"cpu {name.upper()}" for name in (*below, chosen)
        }
    if _native.available:
        remat = next(row for row in rows if row["part"] == "remat")
        assert remat["from_python"] == 0


@pytest.fixture
def quick(monkeypatch, capsys):
    """Runs the check of one operator, or of one part's training; (exit status, what it says)."""

    def run(operator=None, part=None):
        kernels = [k for k in check.KERNELS if k.operator == operator]
        monkeypatch.setattr(check, "KERNELS", kernels[:2])
        runs = {name: of for name, of in training.RUNS.items() if name == part}
        monkeypatch.setattr(check, "RUNS", runs)
        monkeypatch.setattr(training, "_STEPS", 2)
        return check.main(["--quick"]), capsys.readouterr().out

    return run


@contextlib.contextmanager
def kernel(operator, function):
    """Puts a kernel in place of the one for CPUs."""
    with torch.library._scoped_library("memsave_ext", "FRAGMENT") as library:
        library.impl(operator, function, "CPU", allow_override=True)
        yield


def wrong_in_one_element(operator):
    right = _parts.python_kernel(operator)

    def wrong(*arguments, **named):
        returned = right(*arguments, **named)
        changed = {
            "adam_step_": lambda: arguments[0][-1],
            "linear_cross_entropy_reduce_": lambda: arguments[0],
            "linear_cross_entropy_gradient_": lambda: arguments[0],
            "batch_norm_moments": lambda: returned[:4].view(torch.float32),
            "batch_norm_backward_sums": lambda: returned,
        }.get(operator, lambda: returned[0])()
        with torch.no_grad():
            changed.view(-1)[changed.numel() // 2] += 0.1
        return returned

    return wrong


OPERATORS = {
    "adam_step_": "adam.cpu",
    "batch_norm_forward": "batch_norm.cpu",
    "batch_norm_backward": "batch_norm.cpu",
    "batch_norm_moments": "batch_norm.cpu",
    "batch_norm_backward_sums": "batch_norm.cpu",
    "batch_norm_backward_input": "batch_norm.cpu",
    "linear_cross_entropy_reduce_": "loss_head.cpu",
    "linear_cross_entropy_gradient_": "loss_head.cpu",
}


@pytest.mark.filterwarnings("ignore:.*other operators may also be overridden")
@pytest.mark.parametrize("operator", OPERATORS)
def test_one_wrong_element(operator, quick):
    assert quick(operator)[0] == 0
    with kernel(operator, wrong_in_one_element(operator)):
        status, said = quick(operator)
    assert status == 1
    assert f"MEMSAVE_EXT_DISABLE={OPERATORS[operator]}," in said
    assert "WRONG" in said


@pytest.mark.filterwarnings("ignore:.*other operators may also be overridden")
def test_a_kernel_that_raises(quick):
    def broken(*_):
        raise RuntimeError("no kernel image in /home/someone/lib.so\nmore")

    with kernel("linear_cross_entropy_reduce_", broken):
        status, said = quick("linear_cross_entropy_reduce_")
    assert status == 1
    assert "RuntimeError: no kernel image in (path)" in said
    assert "MEMSAVE_EXT_DISABLE=loss_head.cpu," in said


@pytest.mark.parametrize("part", training.RUNS)
def test_a_part_that_trains_wrongly(part, quick, monkeypatch):
    if part == "remat" and not _native.available:
        pytest.skip("remat drops nothing in pure Python")
    assert quick(part=part)[0] == 0

    def other_gradients(function, x):
        return function(x * 1.00001)

    class NothingDropped(contextlib.nullcontext):
        def __init__(self, budget):
            super().__init__()

        def figures(self):
            return self

        dropped_bytes = 0

    def other_step(params, in_backward=False, **options):
        kind = ms.AdamW if in_backward else torch.optim.SGD
        return kind(params, in_backward=True, **options) if in_backward else kind(params, **options)

    class Track(contextlib.nullcontext):
        live, peak, at_peak = 1, 1, {}

    name, wrong = {
        "checkpoint": ("checkpoint", other_gradients),
        "remat": ("remat", NothingDropped),
        "adam": ("AdamW", other_step),
        "memory": ("memory", type("memory", (), {"track": lambda model: Track(Track())})),
    }[part]
    monkeypatch.setattr(training, name, wrong)
    status, said = quick(part=part)
    assert status == 1
    assert f"MEMSAVE_EXT_DISABLE={part}," in said


@needs_native
@pytest.mark.skipif(not levels.others(), reason="this CPU has one instruction set")
def test_a_process_of_an_instruction_set_that_dies(monkeypatch, tmp_path):
    """The kernel that it had begun is the one that is wrong."""
    begun = '{"part": "adam", "what": "SGD", "where": "cpu AVX2", "setting": "adam.cpu"}'
    script = tmp_path / "python"
    script.write_text(f"#!/bin/sh\necho '{begun}'\nkill -ILL $$\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    (row,) = levels.rows_at("AVX2")
    assert (row.part, row.what, row.setting) == ("adam", "SGD", "adam.cpu")
    assert row.problem == "the process that checks AVX2 ended with exit status -4"


@pytest.mark.parametrize("name", ["tpu", "cuda:1", "", "cuda"])
def test_a_device_that_cannot_be_used(name, monkeypatch, capsys):
    monkeypatch.setattr(check, "why_no_cuda", lambda: "the driver is too old")
    with pytest.raises(SystemExit, match="^2$"):
        check.main(["--device", name])
    captured = capsys.readouterr()
    assert captured.out == ""
    said = captured.err.splitlines()[-1].replace("'", "")
    if name == "cuda":
        assert said.endswith("error: --device cuda: the driver is too old; --device cpu is there")
    else:
        assert f"argument --device: invalid choice: {name} (choose from cpu, cuda)" in said


def test_parts_that_are_off_are_left_out():
    """And those that are on are checked. As a user runs it."""
    done = subprocess.run(
        [sys.executable, "-m", "memsave_ext.check", "--quick"],
        env={**os.environ, "MEMSAVE_EXT_DISABLE": "batch_norm,adam.cpu,memory"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    parts = {line.split(" ")[0] for line in done.stdout.partition("of a copy")[2].splitlines()}
    assert parts >= {"loss_head", "checkpoint"}
    assert not parts & {"batch_norm", "adam", "memory"} or not _native.available
