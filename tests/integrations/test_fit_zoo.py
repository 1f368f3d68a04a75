"""Twelve architectures, each in two of three trainers: Fit applies a technique, and training is as
before."""

import functools
import logging

import pytest
import torch
import zoo
from libraries import library

import memsave_ext as ms

LIBRARIES = ["transformers", "accelerate", "lightning.pytorch"]
transformers = accelerate = pytorch = None  # conftest.py imports them

NAMES = [
    "gpt2", "bert", "opt", "bloom", "llama", "mistral", "qwen2", "gemma", "phi", "granite", "t5",
    "vit",
]  # fmt: skip
IN_PYTHON = ["gpt2", "bert"]
STEPS, BATCH = 3, 2
SHARE = 0.85  # of what a plain step needs

logging.getLogger("transformers").setLevel(logging.ERROR)
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


@functools.cache
def rows(name):
    generator = torch.Generator().manual_seed(1)
    if name == "vit":
        images = torch.randn(STEPS * BATCH, 3, 32, 32, generator=generator)
        return [{"pixel_values": image, "labels": torch.tensor(3)} for image in images]
    ids = torch.randint(5, zoo.VOCABULARY, (STEPS * BATCH, 48), generator=generator)
    return [{"input_ids": row, "labels": row} for row in ids]


def batches(name):
    return torch.utils.data.DataLoader(rows(name), batch_size=BATCH)


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def by_trainer(name, folder, fit=None):
    model = zoo.ENTRIES[name].build()
    arguments = transformers.TrainingArguments(
        str(folder), max_steps=STEPS, per_device_train_batch_size=BATCH, use_cpu=True,
        report_to=[], disable_tqdm=True, save_strategy="no", logging_steps=1, max_grad_norm=0,
        seed=3,
    )  # fmt: skip
    losses = []
    trainer = transformers.Trainer(
        model, arguments, train_dataset=rows(name), optimizers=(adamw(model), None)
    )
    trainer.log = lambda logs, *_: losses.extend([logs["loss"]] if "loss" in logs else [])
    callback = None
    if fit is not None:
        callback = ms.integrations.transformers.Fit(**fit)
        trainer.add_callback(callback)
    trainer.train()
    return model, losses, callback and callback.fitted


def by_lightning(name, folder, fit=None):
    class Net(pytorch.LightningModule):
        def __init__(self):
            super().__init__()
            self.model, self.losses = zoo.ENTRIES[name].build(), []

        def training_step(self, batch, batch_idx):
            loss = self.model(**batch).loss
            self.log("loss", loss)
            self.losses.append(loss.detach())
            return loss

        def configure_optimizers(self):
            return adamw(self)

    callback = None if fit is None else ms.integrations.lightning.Fit(**fit)
    trainer = pytorch.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
        callbacks=[] if callback is None else [callback],
    )  # fmt: skip
    net = Net()
    torch.manual_seed(3)
    trainer.fit(net, batches(name))
    return net.model, [loss.item() for loss in net.losses], callback and callback.fitted


def by_accelerate(name, folder, fit=None):
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()
    accelerator = accelerate.Accelerator(cpu=True)
    model = zoo.ENTRIES[name].build()
    net, optimizer, data = accelerator.prepare(model, adamw(model), batches(name))
    fitted = None
    if fit is not None:
        fitted = ms.fit(net, optimizer, next(iter(data)), **fit)
    torch.manual_seed(3)
    losses = []
    for batch in data:
        loss = net(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, losses, fitted


TRAINERS = {"Trainer": by_trainer, "Lightning": by_lightning, "accelerate": by_accelerate}
GIVEN = "checkpoint by block, optimizer in backward"
# Each architecture is in two trainers: in one the technique is found, in the other it is given.
# Without --full it is found once, and given once in each trainer.
EVERY_TIME = [("gpt2", None), ("bloom", GIVEN), ("mistral", GIVEN), ("t5", GIVEN)]
CASES = [
    pytest.param(
        name, [*TRAINERS][(index + place) % 3], technique,
        marks=[] if (name, technique) in EVERY_TIME else [pytest.mark.full],
    )
    for index, name in enumerate(NAMES)
    for place, technique in enumerate([None, GIVEN])
]  # fmt: skip


@pytest.mark.usefixtures("few_techniques")
@pytest.mark.parametrize(("name", "trainer", "technique"), CASES)
def test_it_fits_and_trains_alike(name, trainer, technique, tmp_path):
    if not ms._native.available and name not in IN_PYTHON:
        pytest.skip("in pure Python some of them do")
    library("transformers")
    run = TRAINERS[trainer]
    plain, losses, _ = run(name, tmp_path)
    model = zoo.ENTRIES[name].build()
    least = ms.memory.predict(model, adamw(model), next(iter(batches(name)))).peak
    fit = {"budget": int(SHARE * least), "technique": technique, "verbose": False}
    model, own_losses, fitted = run(name, tmp_path, fit)
    if technique:
        assert fitted.technique == technique
    else:
        assert fitted.technique != "as built" and fitted.predicted <= fitted.budget
    assert len(losses) == STEPS and len(set(losses)) == STEPS
    exact = "Adam" not in fitted.technique and "loss head" not in fitted.technique
    if exact:
        assert own_losses == losses
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(one, other)
    else:
        assert own_losses == pytest.approx(losses, rel=1e-2)
    if ms._native.available:
        assert fitted.measured == pytest.approx(fitted.predicted, rel=0.05)
    assert applied(fitted)


def applied(fitted):
    """How many modules and optimizers are changed; what undo() changes back."""
    parts = [fitted.model, *fitted.model.modules()]
    count = (
        sum(name in vars(part) for part in parts for name in ("forward", "training_step"))
        + fitted.steps_in_backward
    )
    fitted.undo()
    assert type(fitted.optimizer) is torch.optim.AdamW
    assert not any("training_step" in vars(part) for part in parts)
    return count
