"""examples/train_distributed.py under torchrun, and the programs of docs/distributed.md."""

import contextlib
import functools
import io
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import sampling
import torch
import torch.distributed as dist
from ranks import errors_of_ranks, run_ranks
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "train_distributed.py"
DOCS = ROOT / "docs" / "distributed.md"
TIMEOUT = 180
FAILING = ["--fail-at", "2"]


def torchrun(processes, *arguments, restarts=0):
    """(Exit status, output) of a program that runs in several processes, all of them ended."""
    env = dict(os.environ, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1", CUDA_VISIBLE_DEVICES="")
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), env.get("PYTHONPATH")]))
    env.setdefault("GLOO_SOCKET_IFNAME", "lo")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    options = ["--nproc-per-node", str(processes), "--max-restarts", str(restarts)]
    process = subprocess.Popen(
        [*launcher, *options, *map(str, arguments)],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        pytest.fail(f"no end within {TIMEOUT} s:\n{output}")
    return process.returncode, output


def killed_under_torchrun(folder):
    """The example with DDP, with a process killed once; see `told`."""
    for _ in range(2):
        status, output = torchrun(2, EXAMPLE, *arguments("ddp", folder, 3), *FAILING, restarts=1)
        if "terminate called without an active exception" not in output:
            break
        # A thread of torch's gloo freed a tensor while Python ended: pytorch/pytorch#179291.
        shutil.rmtree(folder / "ddp")
    assert status == 0, output
    return told(output)


def killed(engine, folder, digits):
    """The same as in `undisturbed`, started again as torchrun does it."""
    failing, first = [*arguments(engine, folder, 3), *FAILING], folder / f"{engine}.txt"
    folder.mkdir(exist_ok=True)
    once = functools.partial(example, failing, digits, output=first)
    lost, none = errors_of_ranks(2, once, TIMEOUT)
    assert lost and none is None  # the second one killed itself, and the first one was told
    again = functools.partial(example, failing, digits, restarts=1)
    return told(first.read_text() + run_ranks(2, {"example": again})["example"][0])


def undisturbed(engine, folder, digits, epochs, processes, *more):
    """The example in processes that are there already: torchrun's take seconds to start."""
    given = [*arguments(engine, folder, epochs), *more]
    runs = {"example": functools.partial(example, given, digits)}
    return told(run_ranks(processes, runs)["example"][0])


def arguments(engine, folder, epochs):
    return ["--engine", engine, "--checkpoint", str(folder), "--epochs", str(epochs)]


def example(arguments, digits, restarts=0, output=None):
    """What it prints on this rank, in the group that this is in. With a file, it is there.

    ``digits`` are scikit-learn's, which takes each process a second to import.
    """
    datasets = SimpleNamespace(load_digits=lambda: SimpleNamespace(**digits))
    with (
        mock.patch.dict(sys.modules, {"sklearn": datasets, "sklearn.datasets": datasets}),
        mock.patch.object(sys, "argv", [str(EXAMPLE), *arguments]),
        mock.patch.dict(os.environ, TORCHELASTIC_RESTART_COUNT=str(restarts)),
        mock.patch.object(dist, "init_process_group"),
        mock.patch.object(dist, "destroy_process_group"),
        contextlib.redirect_stdout(output.open("a") if output else io.StringIO()) as printed,
    ):
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    return None if output else printed.getvalue()


def told(output):
    """Output of the example, and what it says of each epoch: (number, loss, accuracy)."""
    lines = re.findall(r"^epoch (\d+): loss ([\d.]+), accuracy ([\d.]+)%", output, re.MULTILINE)
    return output, [(int(epoch), float(loss), float(percent)) for epoch, loss, percent in lines]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """By name: an undisturbed run, two with a process killed, and one by another number. Those of
    FSDP2 that go on by another number with --full alone."""
    datasets = pytest.importorskip("sklearn.datasets")
    if not EXAMPLE.is_file():
        pytest.skip("no examples")
    loaded = datasets.load_digits()
    digits = {"images": loaded.images, "target": loaded.target}
    folder = tmp_path_factory.mktemp("runs")
    with ThreadPoolExecutor() as pool:  # most of the time is that of starting
        ddp = pool.submit(killed_under_torchrun, folder / "killed")
        found = {
            "undisturbed": undisturbed("ddp", folder / "undisturbed", digits, 3, 2),
            "ddp": ddp.result(),
        }
    # A budget of each process; and three go on from the checkpoint of two, with one for all.
    fits = functools.partial(undisturbed, "fsdp2", folder / "fits", digits)
    found["fits"] = fits(1, 2, "--budget", "2.5MB", "3MB")
    if sampling.full:
        found["fits by three"] = fits(2, 3, "--budget", "2.2MB")
        found["fsdp2"] = killed("fsdp2", folder / "killed", digits)
        dcp_to_torch_save(folder / "killed/fsdp2/3", folder / "fsdp2.pt")
        found["by one"] = undisturbed("fsdp2", folder / "killed", digits, 4, 1)
    return {"folder": folder, **found}


def parameters(path):
    saved = torch.load(path, weights_only=True)
    assert saved["epoch"] == 3
    return saved["model"]


def test_learns(runs):
    _, epochs = runs["undisturbed"]
    assert [number for number, _, _ in epochs] == [1, 2, 3]
    losses = [loss for _, loss, _ in epochs]
    assert losses == sorted(losses, reverse=True) and losses[-1] < 1.3
    assert epochs[-1][2] > 50  # percent


@pytest.mark.parametrize("engine", ["ddp", pytest.param("fsdp2", marks=pytest.mark.full)])
def test_a_killed_process_starts_again_from_the_checkpoint(runs, engine):
    output, epochs = runs[engine]
    assert re.findall(r"from epoch (\d+)", output) == ["1", "2"]
    assert [number for number, _, _ in epochs] == [1, 2, 3]


def test_a_restart_changes_nothing(runs):
    killed, undisturbed = (
        parameters(runs["folder"] / name / "ddp/last.pt") for name in ("killed", "undisturbed")
    )
    assert killed.keys() == undisturbed.keys()
    assert all(torch.equal(killed[name], undisturbed[name]) for name in killed)


@pytest.mark.full
def test_engines_agree(runs):
    sharded = parameters(runs["folder"] / "fsdp2.pt")
    for name, value in parameters(runs["folder"] / "killed/ddp/last.pt").items():
        name = name.removeprefix("module.")
        torch.testing.assert_close(sharded[name], value, rtol=0.05, atol=0.02)


@pytest.mark.full
def test_another_number_of_processes_goes_on(runs):
    output, epochs = runs["by one"]
    assert "1 processes: from epoch 4" in output
    assert [number for number, _, _ in epochs] == [4]
    assert epochs[0][1] < runs["fsdp2"][1][-1][1]


def test_what_fits_every_process_is_applied(runs):
    output, epochs = runs["fits"]
    assert "fit: nothing is changed" not in output and "fit: predicted peak" in output
    assert re.search(r"^fit: rank \d has the least left: predicted peak", output, re.MULTILINE)
    assert [number for number, _, _ in epochs] == [1]


@pytest.mark.full
def test_three_go_on_from_what_two_have_saved(runs):
    output, later = runs["fits by three"]
    assert "3 processes: from epoch 2" in output and "fit: predicted peak" in output
    assert "fit: nothing is changed" not in output
    assert [number for number, _, _ in later] == [2] and later[0][1] < runs["fits"][1][0][1]


def programs():
    """The Python of the document, block by block."""
    return re.findall(r"^```python\n(.*?)^```", DOCS.read_text(encoding="utf-8"), re.M | re.S)


def document():
    """One program, in pieces."""
    namespace = {"__name__": DOCS.stem}
    for number, program in enumerate(programs()):
        exec(compile(program, f"{DOCS.name}, block {number}", "exec"), namespace)
    return number + 1


@pytest.mark.skipif(not DOCS.is_file(), reason="no docs")
def test_programs_of_the_document():
    assert run_ranks(2, [document])["document"] == [len(programs())] * 2
