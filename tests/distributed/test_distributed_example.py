"""examples/train_distributed.py under torchrun, and the programs of docs/distributed.md."""

import os
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "train_distributed.py"
DOCS = ROOT / "docs" / "distributed.md"
TIMEOUT = 180


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


def train(engine, folder, *arguments, processes=2, restarts=0):
    """Output of the example, and what it says of each epoch: (number, loss, accuracy)."""
    options = ["--engine", engine, "--checkpoint", folder, *arguments]
    status, output = torchrun(processes, EXAMPLE, *options, restarts=restarts)
    assert status == 0, output
    lines = re.findall(r"^epoch (\d+): loss ([\d.]+), accuracy ([\d.]+)%", output, re.MULTILINE)
    return output, [(int(epoch), float(loss), float(percent)) for epoch, loss, percent in lines]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """By name: an undisturbed run, two with a process killed, and one by another number."""
    pytest.importorskip("sklearn")
    if not EXAMPLE.is_file():
        pytest.skip("no examples")
    folder = tmp_path_factory.mktemp("runs")
    failing = ["--epochs", 3, "--fail-at", 2]

    def ddp():
        return {
            "undisturbed": train("ddp", folder / "undisturbed", "--epochs", 3),
            "ddp": train("ddp", folder / "killed", *failing, restarts=1),
        }

    def fsdp2():
        killed = train("fsdp2", folder / "killed", *failing, restarts=1)
        dcp_to_torch_save(folder / "killed/fsdp2/3", folder / "fsdp2.pt")
        return {
            "fsdp2": killed,
            "by one": train("fsdp2", folder / "killed", "--epochs", 4, processes=1),
        }

    with ThreadPoolExecutor(2) as pool:  # most of the time is that of starting
        first, second = pool.submit(ddp), pool.submit(fsdp2)
        return {"folder": folder, **first.result(), **second.result()}


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


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
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


def test_engines_agree(runs):
    sharded = parameters(runs["folder"] / "fsdp2.pt")
    for name, value in parameters(runs["folder"] / "killed/ddp/last.pt").items():
        name = name.removeprefix("module.")
        torch.testing.assert_close(sharded[name], value, rtol=0.05, atol=0.02)


def test_another_number_of_processes_goes_on(runs):
    output, epochs = runs["by one"]
    assert "1 processes: from epoch 4" in output
    assert [number for number, _, _ in epochs] == [4]
    assert epochs[0][1] < runs["fsdp2"][1][-1][1]


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
