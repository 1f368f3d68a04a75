"""What fits while it trains is saved, resumed and evaluated within the same bytes."""

import mmap
import re
import resource
from pathlib import Path

import pytest
import torch
from processes import call_in_a_process
from torch import nn

import memsave_ext as ms

pytestmark = pytest.mark.skipif(
    not ms._native.available, reason="budgets are kept, and states are small, natively"
)
MIB = 1 << 20


class Part(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


def made(width, count):
    torch.manual_seed(0)
    model = nn.Sequential(*(Part(width) for _ in range(count)))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def loss_of(y):
    return y.square().mean()


def train(model, optimizer, x, steps):
    for _ in range(steps):
        loss_of(model(x)).backward()
        optimizer.step()
        optimizer.zero_grad()


def evaluate(model, x):
    model.eval()
    with torch.no_grad():
        value = loss_of(model(x))
    model.train()
    return value


SMALL = "remat within the budget, Adam in backward, 8-bit states"


@pytest.mark.parametrize("technique", ["as built", "remat within the budget", SMALL])
def test_what_an_evaluation_needs(technique):
    model, optimizer = made(64, 4)
    x = torch.randn(256, 64)
    options = {"budget": "6MB", "loss": loss_of, "technique": technique, "verbose": False}
    fitted = ms.fit(model, optimizer, x, **options)
    train(model, optimizer, x, 3)
    with ms.memory.track(model, optimizer) as track:
        evaluate(model, x)
    if technique == "as built":
        assert fitted.evaluation is None and track.peak < fitted.predicted
    else:
        assert fitted.evaluation == track.peak
    assert model.training


class Calls(nn.Module):
    """In eval mode a model may do what it does not do in training."""

    def __init__(self, evaluate):
        super().__init__()
        self.inner, self._evaluate = nn.Sequential(*(Part(32) for _ in range(2))), evaluate

    def forward(self, x):
        return self.inner(x) if self.training else self._evaluate(self.inner(x))


def wide(y):
    return y.repeat(1, 1, 64).square().sum()


def fails(y):
    raise ValueError("of the user's own")


@pytest.mark.parametrize(("evaluates", "is_said"), [(wide, True), (fails, False)])
def test_evaluations_that_do_not_fit_are_said(evaluates, is_said, capsys):
    model = Calls(evaluates)
    optimizer = torch.optim.SGD(model.parameters())
    x = torch.randn(64, 32)
    fitted = ms.fit(
        model, optimizer, x, budget="1MB", loss=lambda y: y.sum(),
        technique="checkpoint by block, optimizer in backward",
    )  # fmt: skip
    assert ("an evaluation of a batch of this size needs" in capsys.readouterr().out) == is_said
    assert (fitted.evaluation is not None) == is_said
    if is_said:
        model.eval()
        with torch.no_grad(), ms.memory.track(model, optimizer) as track:
            model(x)
        assert fitted.evaluation == track.peak > fitted.budget


@pytest.mark.parametrize("technique", ["as built", SMALL])
def test_what_loading_a_checkpoint_needs(technique, tmp_path):
    model, optimizer = made(512, 4)
    x = torch.randn(16, 512)

    def fit():
        return ms.fit(model, optimizer, x, budget="170MB", loss=loss_of, technique=technique)

    fit()
    train(model, optimizer, x, 1)
    torch.save((model.state_dict(), optimizer.state_dict()), tmp_path / "checkpoint")
    model, optimizer = made(512, 4)
    fitted = fit()
    with ms.memory.track(model, optimizer) as track:
        states = torch.load(tmp_path / "checkpoint")
        model.load_state_dict(states[0])
        optimizer.load_state_dict(states[1])
    # States are converted in pieces of some MiB.
    assert fitted.resume <= track.peak <= fitted.resume + 10 * MIB


def used():
    return 1024 * int(re.search(r"VmData:\s+(\d+)", Path("/proc/self/status").read_text())[1])


def run(folder, mib, resumes, limited, mapped):
    """Trains, saves and ends; or goes on from what was saved, trains and evaluates."""
    torch.set_num_threads(1)
    x = torch.randn(64, 1024, generator=torch.Generator().manual_seed(0))
    train(*made(32, 1), torch.randn(8, 32), 1)  # what torch needs once in a process
    ms.memory.predict(nn.Linear(2, 2), None, torch.randn(2, 2), loss=loss_of)
    if limited:
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        resource.setrlimit(resource.RLIMIT_DATA, (used() + (mib + 24) * MIB, hard))
    model, optimizer = made(1024, 3)
    fitted = ms.fit(model, optimizer, x, budget=mib * MIB, loss=loss_of, technique=SMALL)
    assert fitted.resume > (mib + 24) * MIB, fitted
    assert "loading a checkpoint as a whole needs" in str(fitted)
    path = Path(folder, "checkpoint")
    if resumes:
        # Pages of a file that others may have, too, are nobody's private memory.
        with torch.serialization.set_default_mmap_options(mmap.MAP_SHARED):
            states = torch.load(path, mmap=mapped)
        model.load_state_dict(states[0])
        optimizer.load_state_dict(states[1])
        del states
    train(model, optimizer, x, 2)
    if not resumes:
        torch.save((model.state_dict(), optimizer.state_dict()), path)
        if limited:
            return
        train(model, optimizer, x, 2)
    assert evaluate(model, x) < 1
    torch.save(model.state_dict(), Path(folder, f"weights {limited}"))


def test_under_a_limit_of_the_system(tmp_path, capsys):
    """A process trains, saves and ends; another one resumes, trains and evaluates. Both may have so
    much private memory as fit was told, and what a step makes that no tensor of torch's is."""
    folder, mib = str(tmp_path), 175
    call_in_a_process(run, folder, mib, False, False, False)
    call_in_a_process(run, folder, mib, False, True, False)
    with pytest.raises(Exception, match="returned non-zero"):
        call_in_a_process(run, folder, mib, True, True, False)
    assert re.search("allocate memory|MemoryError|not enough memory", capsys.readouterr().out)
    call_in_a_process(run, folder, mib, True, True, True)
    expected, found = (torch.load(tmp_path / f"weights {limited}") for limited in (False, True))
    assert expected and all(torch.equal(expected[name], found[name]) for name in expected)
