"""MEMSAVE_EXT_DISABLE and disable(): parts that run in pure Python beside the native ones."""

import ast
import textwrap

import pytest
import torch
from processes import run_program

import memsave_ext as ms
from memsave_ext import _native, _parts
from memsave_ext.check.__main__ import machine_of_now
from memsave_ext.memory.figures import make_tracker
from memsave_ext.report import report

needs_native = pytest.mark.skipif(not _native.available, reason="switches native parts off")

# Trains with every part that has kernels, and counts what of it runs in Python.
TRAINING = """
    import torch
    import memsave_ext as ms
    from memsave_ext.adam.fallback import collector, operator
    from memsave_ext.batch_norm import fallback as norm
    from memsave_ext.checkpoint.fallback import region
    from memsave_ext.loss_head import operators as head
    from memsave_ext.memory import fallback as memory

    counts = {}

    def count(part, owner, name):
        function = getattr(owner, name)
        def counted(*args, **kwargs):
            counts[part] = counts.get(part, 0) + 1
            return function(*args, **kwargs)
        setattr(owner, name, counted)

    count("adam kernel", operator, "update")
    count("adam hooks", collector.Collector, "attach")
    count("batch_norm", norm, "_mean_and_m2")
    count("loss_head", head.Chunk, "__init__")
    count("memory", memory.ProfilerTracker, "start")
    count("checkpoint", region._Region, "__init__")

    def train():
        torch.manual_seed(0)
        first = torch.nn.Linear(6, 8, bias=False)
        net = torch.nn.Sequential(first, ms.BatchNorm1d(8), torch.nn.ReLU())
        head = torch.nn.Linear(8, 40, bias=False)
        params = [*net.parameters(), *head.parameters()]
        optimizer = ms.AdamW(params, in_backward=True)
        with ms.memory.track(net, optimizer) as t:
            for _ in range(2):
                hidden = ms.checkpoint(net, torch.randn(16, 6))
                target = torch.randint(40, (16,))
                ms.linear_cross_entropy(hidden, head.weight, target).backward()
                optimizer.step()
        assert t.peak > 0
        assert int(net[1].num_batches_tracked) == 2
        return params
"""


def run(code, *, disable="", native="1"):
    """What code prints, in a process of its own."""
    done = run_process(code, disable, native)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def run_process(code, disable, native="1"):
    return run_program(code, MEMSAVE_EXT_NATIVE=native, MEMSAVE_EXT_DISABLE=disable)


# What is off, and what runs in Python then.
OFF = {
    "": [],
    "batch_norm,loss_head.cuda, adam.cuda": ["adam hooks", "batch_norm"],
    "checkpoint,loss_head.cpu": [
        "adam hooks", "adam kernel", "checkpoint", "loss_head", "memory"
    ],
}  # fmt: skip


@needs_native
def test_a_part_that_is_off_runs_in_python():
    trained = {}
    for disable, in_python in OFF.items():
        then = "print([p.tolist() for p in train()], sorted(counts), sep='@')"
        values, counts = run(textwrap.dedent(TRAINING) + then, disable=disable).split("@")
        assert counts == str(in_python)
        trained[disable] = [torch.tensor(value) for value in ast.literal_eval(values)]
    for values in trained.values():  # sums are taken in another order
        for value, native in zip(values, trained[""], strict=True):
            torch.testing.assert_close(value, native)


@needs_native
def test_from_now_on():
    then = (
        "train(); print(sorted(counts)); ms.disable('loss_head', 'adam.cpu', 'memory'); "
        "train(); print(sorted(counts))"
    )
    both = run(textwrap.dedent(TRAINING) + then).splitlines()
    assert both == ["[]", str(["adam hooks", "adam kernel", "loss_head", "memory"])]


CHANGED = """
import torch, memsave_ext as ms
outside = torch.nn.Parameter(torch.ones(3))
own = ms.SGD([outside], lr=0.1)
x = torch.ones(3, requires_grad=True)
y = ms.checkpoint(lambda x: (x * outside.detach()).sin(), x)
outside.grad = torch.ones(3)
own.step()
try:
    y.sum().backward()
except ms.CheckpointError as error:
    print("stepped" in str(error))
"""


@needs_native
@pytest.mark.parametrize("disable", ["adam.cuda", "adam.cpu", "checkpoint"])
def test_regions_hear_of_steps_whichever_of_the_two_is_native(disable):
    assert run(CHANGED, disable=disable) == "True"


def test_remat_keeps_everything_where_it_is_off():
    code = """
import warnings
import torch, memsave_ext as ms
warnings.simplefilter("ignore")
x = torch.ones(8, requires_grad=True)
with ms.remat() as r:
    y = x.sin().exp()
y.sum().backward()
try:
    with ms.remat(budget=100):
        pass
except RuntimeError as error:
    print(error)
"""
    said = run(code, disable="remat", native="auto")
    assert "remat was switched off" in said or not _native.available
    assert "a budget needs the native part" in said


def test_names_that_there_are_not():
    for wrong in ("loss-head", "memory.cuda", "adam.CPU", ""):
        with pytest.raises(
            ValueError, match=f"no part '{wrong}'; the parts are adam, adam.cpu, ada"
        ):
            ms.disable("adam", wrong)
    assert not _parts.disabled()
    done = run_process("import memsave_ext", "adam,,nothing", native="auto")
    assert "MEMSAVE_EXT_DISABLE: there is no part 'nothing'; the parts are adam" in done.stderr


def test_checkpoint_is_chosen_at_import():
    with pytest.raises(RuntimeError, match="set MEMSAVE_EXT_DISABLE=checkpoint"):
        ms.disable("loss_head", "checkpoint")
    assert not _parts.disabled()


def test_the_report_says_what_is_off():
    code = "from memsave_ext.report import report; print(report())"
    lines = run(code, disable="batch_norm,loss_head.cuda", native="auto").splitlines()
    assert "off (MEMSAVE_EXT_DISABLE, disable()): batch_norm, loss_head.cuda" in lines
    if _native.available:
        (norm,) = (line for line in lines if line.startswith("BatchNorm"))
        (head,) = (line for line in lines if line.startswith("loss head"))
        assert norm.endswith("torch operators: it is off")
        assert head.endswith("torch operators on CUDA, where it is off")


def test_a_driver_that_is_too_old_is_told(monkeypatch):
    """Its library counts devices that CUDA cannot use, and the two commands run where it is."""

    def too_old(*_):
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 11040).\nUp")

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name in ("init", "get_device_capability", "get_device_name"):
        monkeypatch.setattr(torch.cuda, name, too_old)
    told = "The NVIDIA driver on your system is too old (found version 11040)."
    assert f"torch sees 0 devices ({told})" in report()
    assert machine_of_now()["devices"] == f"none: {told}"
    assert machine_of_now()["driver"] == "none"


def test_torch_counts_nothing_without_its_caching_allocator(monkeypatch):
    monkeypatch.setenv("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")
    with pytest.raises(RuntimeError, match="track: torch counts no memory of CUDA without its"):
        make_tracker(torch.device("cuda"), [], False, 100)
    make_tracker(torch.device("cpu"), [], False, 100)
    if ms._native.available:
        with ms.remat(budget="1GB"):
            pass
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        with pytest.raises(RuntimeError, match="remat: budget: torch counts no memory of CUDA"):
            ms.remat(budget="1GB")
