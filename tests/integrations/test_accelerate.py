"""accelerate: prepared optimizers, accumulation, scalers, save and resume."""

import pytest
import torch
from libraries import REMATERIALIZED
from torch import nn

import memsave_ext as ms

LIBRARIES = ["accelerate"]
accelerate = None  # conftest.py imports it


@pytest.fixture(autouse=True)
def _fresh_state():
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


class Loop:
    """A training loop as accelerate's guide has it. 5 batches an epoch."""

    def __init__(self, make, micro_batches=1, scaler=None, change=None, **options):
        self.accelerator = accelerate.Accelerator(
            cpu=True, gradient_accumulation_steps=micro_batches, **options
        )
        # It makes one on accelerators alone.
        self.accelerator.scaler = scaler
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 1))
        self.handle = None if change is None else change(net)
        self.optimizer = make(net.parameters())
        schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.9)
        rows = torch.randn(10, 4, generator=torch.Generator().manual_seed(1))
        batches = torch.utils.data.DataLoader(rows, batch_size=2)
        self.net, self.prepared, self.batches, self.schedule = self.accelerator.prepare(
            net, self.optimizer, batches, schedule
        )

    def epoch(self, clip=None):
        for x in self.batches:
            with self.accelerator.accumulate(self.net):
                self.accelerator.backward(self.net(x).square().mean())
                if clip is not None and self.accelerator.sync_gradients:
                    if self.accelerator.scaler is not None:  # what it does first in float16
                        self.accelerator.scaler.unscale_(self.optimizer)
                    self.accelerator.clip_grad_norm_(self.net.parameters(), clip)
                self.prepared.step()
                self.schedule.step()
                self.prepared.zero_grad()
        return self

    def assert_same(self, other, **tolerance):
        for left, right in zip(self.net.parameters(), other.net.parameters(), strict=True):
            torch.testing.assert_close(left, right, **(tolerance or {"rtol": 0, "atol": 0}))


def torchs(params):
    return torch.optim.AdamW(params, lr=0.05)


def ours(params):
    return ms.AdamW(params, lr=0.05, in_backward=True)


CLOSE = {"rtol": 1e-5, "atol": 1e-6}


@pytest.mark.parametrize("micro_batches", [1, 3], ids=["each batch", "3 batches"])
def test_it_trains_as_torchs(micro_batches):
    plain = Loop(torchs, micro_batches).epoch().epoch()
    loop = Loop(ours, micro_batches)
    loop.optimizer.accumulate_when(lambda: not loop.accelerator.sync_gradients)
    loop.epoch().epoch().assert_same(plain, **CLOSE)
    assert loop.schedule.get_last_lr() == plain.schedule.get_last_lr()
    steps = {state["step"].item() for state in loop.optimizer.state.values()}
    assert steps == {10 if micro_batches == 1 else 4}


def test_save_and_resume(tmp_path):
    whole = Loop(ours).epoch()
    whole.accelerator.save_state(str(tmp_path))
    whole.epoch()
    resumed = Loop(ours)
    torch.nn.init.normal_(resumed.net[0].weight)
    resumed.accelerator.load_state(str(tmp_path))
    resumed.epoch().assert_same(whole)


def test_its_own_clipping_is_an_error():
    with pytest.raises(RuntimeError, match="clip_grad_norm_: 4 of 4 parameters have been stepped"):
        Loop(ours).epoch(clip=1.0)
    plain = Loop(torchs).epoch(clip=0.1)
    Loop(lambda p: ms.AdamW(p, lr=0.05, clip_global_norm=0.1)).epoch().assert_same(plain, **CLOSE)


def scaler():
    return torch.amp.GradScaler("cpu", init_scale=1024, growth_interval=3)


@pytest.mark.parametrize("handed_over", ["before", "after"])
@pytest.mark.parametrize("clip", [None, float("inf")], ids=["", "norm asked for"])
def test_a_scaler(handed_over, clip):
    plain = Loop(torchs, scaler=scaler()).epoch(clip).epoch(clip)
    own = scaler()
    if handed_over == "before":
        loop = Loop(lambda p: ms.AdamW(p, lr=0.05, in_backward=True, grad_scaler=own), scaler=own)
    else:
        loop = Loop(ours, scaler=own)
        loop.optimizer.grad_scaler = loop.accelerator.scaler
    loop.epoch(clip).epoch(clip).assert_same(plain, **CLOSE)
    assert own.get_scale() == plain.accelerator.scaler.get_scale() == 1024 * 2**3
    assert not loop.prepared.step_was_skipped


def test_a_scaler_that_was_not_handed_over_is_an_error():
    with pytest.raises(RuntimeError, match="opt.grad_scaler = scaler where a trainer has made it"):
        Loop(ours, scaler=scaler()).epoch()


@pytest.mark.skipif(not ms._native.available, reason="budgets are native")
def test_the_batch_size_that_fits_a_budget_is_found():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(4)))
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    tried = []

    def train(batch):
        tried.append(batch)
        for _ in range(3):
            with ms.remat(budget=200_000, strict=True) as block:
                loss = model(torch.randn(batch, 32)).square().mean()
            loss.backward()
        return block

    block = accelerate.utils.find_executable_batch_size(train, starting_batch_size=4096)()
    assert tried[0] == 4096 and len(tried) > 2 and block.peak <= 1.02 * 200_000


@pytest.mark.parametrize("options", REMATERIALIZED, ids=str)
@pytest.mark.filterwarnings("ignore:remat. the budget")
@pytest.mark.parametrize("micro_batches", [1, 3], ids=["each batch", "3 batches"])
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_rematerialization_changes_nothing(micro_batches, precision, options):
    loops = []
    for change in (None, lambda net: ms.remat_module(net, **options)):
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        loop = Loop(ours, micro_batches, change=change, mixed_precision=precision)
        loop.optimizer.accumulate_when(lambda loop=loop: not loop.accelerator.sync_gradients)
        loops.append(loop.epoch().epoch())
    loops[1].assert_same(loops[0])
    handle = loops[1].handle
    if "budget" in options:
        assert handle.least is not None
    else:
        assert handle.figures().recomputed_operators > 0 < handle.figures().dropped_bytes
