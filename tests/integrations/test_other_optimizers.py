"""in_backward() for optimizers of other packages, and for torch's in trainers.

Each equals its ordinary step to the bit.
"""

import importlib.util

import pytest
import torch
from libraries import library
from torch import nn

import memsave_ext as ms

OTHERS = {
    "optimi": ["Adam", "AdamW", "SGD", "Lion", "Adan", "RAdam", "Ranger", "StableAdamW"],
    "bitsandbytes.optim": [
        "Adam8bit", "AdamW8bit", "PagedAdamW8bit", "AdEMAMix8bit", "Lion8bit", "SGD8bit",
        "RMSprop8bit", "Adam32bit", "AdamW32bit", "AdEMAMix", "Lion32bit", "SGD32bit",
        "RMSprop32bit", "Adagrad", "LAMB", "LARS",
    ],
    "schedulefree": ["AdamWScheduleFree", "SGDScheduleFree"],
    "pytorch_optimizer": ["AdaBelief", "Lion", "SOAP", "Shampoo", "ADOPT", "StableAdamW", "Adan"],
    "timm.optim": [
        "AdamP", "Adan", "Adopt", "AdaBelief", "Lion", "LaProp", "MADGRAD", "Mars", "Muon",
        "NAdamW", "NvNovoGrad", "SGDP",
    ],
}  # fmt: skip
MOMENTUM = ("SGD8bit", "SGD32bit", "LARS")  # bitsandbytes' want one
# Of pytorch_optimizer: what draws random numbers, which fall differently.
RANDOM = {"Alice", "Gravity", "Kron"}
# Where triton is, and nothing that it can compile for.
WITHOUT_GPU = importlib.util.find_spec("triton") is not None and not torch.cuda.is_available()
REFUSED = {"prodigyopt": ["Prodigy"], "timm.optim": ["Lamb"], "pytorch_optimizer": ["DAdaptAdam"]}


def each(names):
    return [pytest.param(p, n, id=f"{p} {n}") for p, of in names.items() for n in of]


def model():
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64))


def made(package, name, net):
    kind = getattr(library(package), name)
    if (package, name) == ("optimi", "StableAdamW") and WITHOUT_GPU:
        pytest.skip("it asks triton, where there is one, for a GPU")
    momentum = {"momentum": 0.9} if name in MOMENTUM else {}
    optimizer = kind(net.parameters(), lr=0.01, **momentum)
    if package == "schedulefree":
        optimizer.train()
    return optimizer


def train(net, optimizer):
    for step in range(4):
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(step))
        (net(x) - 1).square().mean().backward()
        yield
        optimizer.step()
        optimizer.zero_grad()


def assert_steps_alike(nets, optimizers):
    """The first of the optimizers steps in backward."""
    for _ in train(nets[0], optimizers[0]):
        assert all(p.grad is None for p in nets[0].parameters())
    for _ in train(nets[1], optimizers[1]):
        pass
    for p, q in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize(("package", "name"), each(OTHERS))
def test_other_packages(package, name):
    nets = model(), model()
    optimizers = [made(package, name, net) for net in nets]
    ms.in_backward(optimizers[0], small_bytes=1 << 12)
    assert_steps_alike(nets, optimizers)


@pytest.mark.once
@pytest.mark.filterwarnings("ignore")  # the package's own
def test_each_of_pytorch_optimizer_is_refused_or_steps_alike():
    everything = library("pytorch_optimizer.optimizer").OPTIMIZERS
    stepped = []
    for name, kind in sorted({kind.__name__: kind for kind in everything.values()}.items()):
        nets = model(), model()
        try:
            optimizers = [kind(net.parameters(), lr=0.01) for net in nets]
        except Exception:
            continue  # it needs more arguments
        try:
            ms.in_backward(optimizers[0], small_bytes=1 << 12)
        except ValueError:
            continue
        if name not in RANDOM:
            assert_steps_alike(nets, optimizers)
            stepped.append(name)
    assert len(stepped) == 92  # docs/adam/any_optimizer.md


@pytest.mark.parametrize(("package", "name"), each(REFUSED))
def test_refused(package, name):
    optimizer = made(package, name, model())
    with pytest.raises(ValueError, match="it needs all gradients"):
        ms.in_backward(optimizer)


def transformers(takes, folder):
    library("transformers")
    import transformers

    config = transformers.GPT2Config(
        vocab_size=64, n_positions=8, n_embd=16, n_layer=2, n_head=2,
        resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
    )  # fmt: skip
    torch.manual_seed(0)
    net = transformers.GPT2LMHeadModel(config)
    generator = torch.Generator().manual_seed(1)
    rows = [
        {"input_ids": ids, "labels": ids} for ids in torch.randint(64, (16, 8), generator=generator)
    ]
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    schedule = transformers.get_cosine_schedule_with_warmup(optimizer, 1, 4)
    if takes:  # after the schedule was made
        ms.in_backward(optimizer)
    arguments = transformers.TrainingArguments(
        str(folder / f"{takes}"), max_steps=4, save_steps=2, max_grad_norm=0, report_to=[],
        gradient_accumulation_steps=2, use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    trainer = transformers.Trainer(
        net, arguments, train_dataset=rows, optimizers=(optimizer, schedule)
    )
    if takes:
        optimizer.accumulate_when(lambda: not trainer.accelerator.sync_gradients)
    trainer.train()
    trainer.train(resume_from_checkpoint=str(folder / f"{takes}" / "checkpoint-2"))
    return net


def lightning(takes, folder):
    pl = library("lightning.pytorch")

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.net = nn.Linear(4, 3)

        def training_step(self, batch, _):
            return self.net(batch[0]).square().mean()

        def configure_optimizers(self):
            optimizer = torch.optim.RMSprop(self.parameters(), lr=0.01)
            if takes:
                ms.in_backward(optimizer)
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
            return {"optimizer": optimizer, "lr_scheduler": schedule}

    net, rows = Module(), torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
    batches = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(rows), batch_size=4)
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    pl.Trainer(max_epochs=3, accelerator="cpu", enable_model_summary=False, **options).fit(
        net, batches
    )
    return net


def accelerate(takes, folder):
    library("accelerate")
    import accelerate

    torch.manual_seed(0)
    net = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    if takes:
        ms.in_backward(optimizer)
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    net, prepared = accelerator.prepare(net, optimizer)
    if takes:
        optimizer.accumulate_when(lambda: not accelerator.sync_gradients)
    for number in range(6):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(number))
        with accelerator.accumulate(net):
            accelerator.backward(net(x).square().mean())
            prepared.step()
            prepared.zero_grad()
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()
    return net


@pytest.mark.once
@pytest.mark.parametrize("train", [transformers, lightning, accelerate])
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_trainers(train, tmp_path):
    for p, q in zip(*(train(takes, tmp_path).parameters() for takes in (True, False)), strict=True):
        assert torch.equal(p, q)
