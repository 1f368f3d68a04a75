"""Some programs of ``make stress``, with fixed seeds, so that neither they nor what runs them can
rot; and that what is wrong is found."""

import dataclasses
import subprocess
import sys

import pytest
import sampling
import torch

import memsave_ext as ms
from memsave_ext.elsewhere.gradient import Values
from memsave_ext.elsewhere.gradients import Gradients
from memsave_ext.fakes import repeats, workspaces
from stress import (
    adam,
    any_optimizer,
    backwards,
    chunks,
    databases,
    libraries,
    optimizers,
    predictions,
    programs,
    regions,
    rules,
    run,
    weights,
    worlds,
    zoo_budgets,
)
from stress.adam_cases import generate
from stress.programs import Op

PARTS = {
    "regions": (regions, 100, 20),
    "adam": (adam, 60, 20),
    "rules": (rules, 60, 20),
    "backwards": (backwards, 15, 8),
    "any_optimizer": (any_optimizer, 20, 10),
    "databases": (databases, 10, 5),
    "chunks": (chunks, 10, 5),
    "optimizers": (optimizers, 10, 5),
    "zoo_budgets": (zoo_budgets, 11, 3),
    "predictions": (predictions, 4, 1),
    "libraries": (libraries, 200, 50),
    "weights": (weights, 40, 10),
}  # and their seeds, with --full and without


@pytest.mark.parametrize("part", run.PARTS)
def test_programs_of_fixed_seeds(part):
    module, every, few = PARTS[part]
    for seed in range(every if sampling.full else few):
        verdict, text = module.run_seed(seed, [], False)
        assert not verdict or verdict.startswith("refused"), f"{part} {seed}: {verdict}\n{text}"


@pytest.mark.skipif(not ms._native.available, reason="remat records natively")
def test_operators_and_functions_of_libraries_run_again():
    """Of liars a share is found out only when they do."""
    before, refused = dict(libraries.repeated), 0
    for seed in range(1000, 1040):
        refused += libraries.run_seed(seed, [], False)[0] == "refused"
    assert all(libraries.repeated[what] - before[what] > 40 for what in before)
    assert refused < 20


def test_what_only_runs_natively_is_run_so():
    """In pure Python all its programs are refused, and drawn so fast that nothing else counts."""
    assert run.kinds_of("zoo_budgets", None) == [("zoo_budgets", "1")]
    assert run.kinds_of("adam", None) == [("adam", "1"), ("adam", "0")]
    assert ("zoo_budgets", "0") not in run.kinds_of(None, None)
    assert run.kinds_of("zoo_budgets", "0") == [("zoo_budgets", "0")]  # of one seed, once more


def test_a_sample_of_each_operator_and_module():
    """Of torch's databases, all with --full; and that things are dropped while nearly all run."""
    counts = {way: databases.Counts() for way in databases.ways()}
    every = databases.cases()
    cases = sampling.some(every, len(every) // 3)
    share = len(cases) / len(every)
    for case in cases:
        for way, counted in databases.check(case, most=1).items():
            counts[way] += counted
    for counted in counts.values():
        assert counted.samples > 1600 * share
        assert counted.refused < 20 * share
    if ms._native.available:
        assert counts["remat"].dropped > 0.95 * counts["remat"].samples
        assert counts["offload"].moved > 0.9 * counts["offload"].samples
        assert counts["budget"].dropped > 0.5 * counts["budget"].samples


def test_chunks_of_a_share_of_the_operators_and_modules():
    """That most have samples that act on rows."""
    cases = databases.cases()[::12]
    assert sum(bool(chunks.check(case, most=2)) for case in cases) > len(cases) / 2


def test_other_bits_of_chunks_are_found(monkeypatch):
    def wrong(function, *args, chunks):
        return [result * 1.5 for result in function(*args)]

    monkeypatch.setattr(ms, "checkpoint", wrong)
    case = next(c for c in databases.cases() if str(c) == "exp float32")
    verdict, _ = chunks.run_seed(databases.cases().index(case), [], False)
    assert verdict == "exp float32: AssertionError"


@pytest.mark.once
def test_a_share_of_the_optimizers():
    """Of torch's database, a fifth of all options; and that parameters are stepped in backward."""
    counts = {way: optimizers.Counts() for way in ("taken", "ours", "lion")}
    for case in optimizers.cases()[::5]:
        counts[case.way] += optimizers.check(case)
    taken, ours, lion = counts.values()
    assert taken.programs > 100 and taken.stepped > 30 * taken.programs
    assert taken.refused > 40 and ours.refused == 0
    assert ours.programs > 20 and ours.stepped > 30 * ours.programs
    assert lion.stepped > 0 and lion.refused > 0
    names = {case.info.name for case in optimizers.cases()[::5]}
    assert len(names) == len(optimizers.optim_db)


def test_another_step_in_backward_is_found(monkeypatch):
    """A fault in each of the ways."""
    for name, way in (("RAdam", "taken"), ("SGD", "ours"), ("Adam", "lion")):
        case = next(
            c
            for c in optimizers.cases()
            if (c.info.name, c.way, c.impl, c.number) == (name, way, "", 0)
            and c.dtype == torch.float32
        )
        number = optimizers.cases().index(case)
        assert optimizers.run_seed(number, [], False)[0] == ""
        with monkeypatch.context() as patched:
            step = optimizers.Side.step

            def wrong(side, number, step=step):
                stepped = step(side, number)
                if getattr(side.optimizer, "in_backward", False) and number == 4:
                    with torch.no_grad():
                        side.params[0][0, 0] += 1e-3
                return stepped

            patched.setattr(optimizers.Side, "step", wrong)
            verdict, _ = optimizers.run_seed(number, [], False)
        assert verdict == f"{case}: AssertionError"


def test_other_bits_of_gradients_elsewhere_are_found(monkeypatch):
    """Of most loops, as nearly all have gradients that leave."""
    cases = [case for case in map(generate, range(60)) if case["elsewhere"]]
    get = Values.get
    monkeypatch.setattr(Values, "get", lambda values: get(values).mul(1.001))
    found = [adam.guarded(case) for case in cases]
    assert len(cases) > 10
    assert sum(verdict.startswith("other bits with grads_on=") for verdict in found) > 6


def test_gradients_that_stay_in_memory_are_found(monkeypatch):
    monkeypatch.setattr(Gradients, "leave", lambda _, grad: grad)
    cases = [case for case in map(generate, range(20)) if case["elsewhere"]]
    assert any("has stayed" in adam.guarded(case) for case in cases)


def test_other_bits_are_found(monkeypatch):
    def wrong(function, *args):
        return worlds.plain_checkpoint(function, *args) * 1.5

    monkeypatch.setattr(ms, "checkpoint", wrong)
    case = next(c for c in databases.cases() if str(c) == "exp float32")
    verdict, _ = databases.run_seed(databases.cases().index(case), [], False)
    assert verdict == "exp float32: AssertionError"


@pytest.mark.skipif(not ms._native.available, reason="a track sees what kernels make natively")
def test_a_wrong_prediction_is_found(monkeypatch):
    """Where it is not known what kernels make; and that what is told of others means something."""
    case = next(c for c in predictions.cases() if str(c) == "kthvalue float32")
    number = predictions.cases().index(case)
    assert predictions.run_seed(number, [], False) == ("", str(case))
    monkeypatch.setattr(repeats, "_of_process", {})  # which knows by now
    monkeypatch.setattr(workspaces, "workspace_bytes", lambda *_: 0)
    assert predictions.run_seed(number, [], False)[0] == f"{case}: AssertionError"


def test_a_wrong_gradient_is_found_and_made_small(monkeypatch):
    class Doubles(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad * 2

    def wrong(function, *args, **kwargs):
        (first, *others) = args
        return worlds.plain_checkpoint(function, Doubles.apply(first), *others, **kwargs)

    body = [Op("region:checkpoint", k=2, body=[Op("mul"), Op("sin")]) for _ in range(3)]
    program = dataclasses.replace(
        programs.generate(0), body=body, events=[Op("backward:backward")], adam="", rounds=1
    )
    assert regions.check(program) == ""
    monkeypatch.setattr(ms, "checkpoint", wrong)
    verdict = regions.check(program)
    assert verdict == "silent: other backward"
    smallest = programs.Writer(regions.shrink(program, verdict)).source()
    assert smallest.count("ms.checkpoint(") == 1 and smallest.count("def ") == 2


@pytest.mark.once
def test_the_command_line_runs_a_seed_again():
    native = "1" if ms._native.available else "0"
    command = [sys.executable, run.__file__, "--part", "adam", "--native", native, "--seed", "2"]
    command += ["--count", "3"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "3 programs, 0 failures (0 refused), seed range 2 to 4" in done.stdout, done.stderr
    assert done.returncode == 0
