"""Lightning: automatic optimization, which calls the optimizer with a closure."""

import functools
import logging

import pytest
import torch
from libraries import REMATERIALIZED
from torch import nn

import memsave_ext as ms

if not ms._native.available:
    pytest.skip(
        "closures and conditions are tested in pure Python by test_adam_trainers.py",
        allow_module_level=True,
    )
LIBRARIES = ["lightning.pytorch"]
pytorch = None  # conftest.py imports it

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


@functools.cache
def net_class():
    class Net(pytorch.LightningModule):
        def __init__(self, make, seed):
            super().__init__()
            torch.manual_seed(seed)
            self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 1)
            self.dropout = nn.Dropout(0.2)
            self.make = make
            self.losses = []

        def training_step(self, batch, batch_idx):
            torch.manual_seed(
                100 * self.current_epoch + batch_idx
            )  # Lightning saves no random state
            loss = self.last(self.dropout(self.first(batch).tanh())).square().mean()
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self):
            optimizer = self.make(self)
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    return Net


def torchs(net):
    return torch.optim.AdamW(net.parameters(), lr=0.05)


def ours(net, **options):
    return ms.AdamW(net.parameters(), lr=0.05, in_backward=True, **options)


def told(net):
    """Which micro-batch is the last of its step."""
    optimizer, trainer = ours(net), net.trainer
    optimizer.accumulate_when(
        lambda: (
            (trainer.fit_loop.batch_idx + 1) % trainer.accumulate_grad_batches
            and not trainer.is_last_batch
        )
    )
    return optimizer


def fit(make, epochs=2, resume=None, seed=0, net=None, **arguments):
    """5 batches an epoch."""
    net = net_class()(make, seed) if net is None else net
    rows = torch.randn(10, 4, generator=torch.Generator().manual_seed(1))
    trainer = pytorch.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **arguments,
    )
    trainer.fit(net, torch.utils.data.DataLoader(rows, batch_size=2), ckpt_path=resume)
    return net, trainer


CLOSE = {"rtol": 1e-5, "atol": 1e-6}


def assert_same(net, other, **tolerance):
    for left, right in zip(net.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(left, right, **(tolerance or {"rtol": 0, "atol": 0}))


@pytest.mark.parametrize("batches", [1, 3], ids=["each batch", "3 batches"])
def test_it_trains_as_torchs(batches):
    plain, trainer = fit(torchs, accumulate_grad_batches=batches)
    net, trainer_of_it = fit(told, accumulate_grad_batches=batches)
    assert net.losses == pytest.approx(plain.losses, rel=1e-5)
    assert_same(net, plain, **CLOSE)
    (rate,) = (group["lr"] for group in trainer.optimizers[0].param_groups)
    assert trainer_of_it.optimizers[0].param_groups[0]["lr"] == rate
    steps = {state["step"].item() for state in trainer_of_it.optimizers[0].state.values()}
    assert steps == {10 if batches == 1 else 4}


def test_accumulation_that_it_was_not_told_of_is_an_error():
    with pytest.raises(
        RuntimeError, match=r"where a trainer runs them, call opt.accumulate_when\(\)"
    ):
        fit(ours, accumulate_grad_batches=2)


def test_save_and_resume(tmp_path):
    whole, _ = fit(ours, epochs=2)
    _, trainer = fit(ours, epochs=1)
    trainer.save_checkpoint(tmp_path / "first.ckpt")
    resumed, trainer = fit(ours, epochs=2, resume=tmp_path / "first.ckpt", seed=1)
    assert resumed.losses == whole.losses[5:]
    assert_same(resumed, whole)
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.05 * 0.9**10)


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_its_own_clipping_is_an_error(algorithm):
    with pytest.raises(RuntimeError, match="Lightning: gradient_clip_val=None"):
        fit(ours, gradient_clip_val=0.1, gradient_clip_algorithm=algorithm)


def test_clipping_in_the_optimizer():
    plain, _ = fit(torchs, gradient_clip_val=0.1)
    net, _ = fit(lambda net: ours(net, clip_global_norm=0.1))
    assert_same(net, plain, **CLOSE)


def mixed():
    plugin = pytorch.plugins.precision.MixedPrecision
    return plugin("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=1024))


def test_a_scaler():
    plain, _ = fit(torchs, plugins=[mixed()])
    net, trainer = fit(
        lambda net: ours(net, grad_scaler=net.trainer.precision_plugin.scaler), plugins=[mixed()]
    )
    assert_same(net, plain, rtol=1e-3, atol=1e-4)
    assert trainer.optimizers[0].state[net.last.bias]["step"].item() == 10
    with pytest.raises(RuntimeError, match="opt.grad_scaler = scaler where a trainer has made it"):
        fit(ours, plugins=[mixed()])
    with pytest.raises(RuntimeError, match="AdamW, does not allow for gradient clipping"):
        fit(
            lambda net: ours(net, grad_scaler=net.trainer.precision_plugin.scaler),
            plugins=[mixed()],
            gradient_clip_val=0.1,
        )


def anew(net):
    ms.remove_hooks(net)  # of the optimizer of the run before, which the trainer still has
    return ours(net)


@pytest.mark.parametrize("first", ["fit", "lr_find", "another trainer"])
def test_a_second_run(first, tmp_path):
    nets = [net_class()(make, 0) for make in (torchs, anew)]
    for net in nets:
        rows = torch.randn(10, 4, generator=torch.Generator().manual_seed(1))
        data = torch.utils.data.DataLoader(rows, batch_size=2)
        options = {
            "accelerator": "cpu", "logger": False, "enable_checkpointing": False,
            "enable_progress_bar": False, "enable_model_summary": False,
            "default_root_dir": tmp_path,
        }  # fmt: skip
        trainer = pytorch.Trainer(max_epochs=1, **options)
        if first == "lr_find":
            net.lr = 0.05
            pytorch.tuner.Tuner(trainer).lr_find(net, data, num_training=5, update_attr=False)
            net.losses.clear()
        else:
            trainer.fit(net, data)
        if first == "another trainer":
            trainer = pytorch.Trainer(max_epochs=2, **options)
        else:
            trainer.fit_loop.max_epochs = 2
        trainer.fit(net, data)
        assert all(p.grad is None for p in net.parameters()) or net is nets[0]
    assert nets[1].losses == pytest.approx(nets[0].losses, rel=1e-4)
    assert_same(*nets, rtol=1e-4, atol=1e-5)


def test_a_second_fit_without_it_says_what_to_do():
    net, trainer = fit(ours, epochs=1)
    trainer.fit_loop.max_epochs = 2
    with pytest.raises(ValueError, match=r"call memsave_ext.remove_hooks\(model\) before this one"):
        trainer.fit(net, torch.utils.data.DataLoader(torch.randn(4, 4), batch_size=2))


@pytest.mark.parametrize("options", REMATERIALIZED, ids=str)
@pytest.mark.filterwarnings("ignore:remat. the budget")
@pytest.mark.parametrize("batches", [1, 3], ids=["each batch", "3 batches"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_rematerialization_changes_nothing(batches, precision, options):
    """Of what training_step() calls: the module's own forward is none of it."""

    class Body(nn.Sequential):
        def forward(self, x):
            return super().forward(x).exp().sin()

    runs = []
    for in_place in (False, True):
        net = net_class()(told, 0)
        net.first = Body(nn.Linear(4, 8), nn.LayerNorm(8), nn.GELU(), nn.Dropout(0.2))
        handle = ms.remat_module(net.first, **options) if in_place else None
        fit(told, net=net, accumulate_grad_batches=batches, precision=precision)
        runs.append((net, handle))
    (plain, _), (net, handle) = runs
    assert net.losses == plain.losses and len(net.losses) == 10
    assert_same(net, plain)
    figures = handle.figures()
    assert figures.dropped_bytes > 0 and figures.recomputed_operators > 0
