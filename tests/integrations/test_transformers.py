"""transformers' Trainer: gradient checkpointing, Adam stepped in backward, save and resume."""

import contextlib
import logging

import pytest
import torch
from libraries import REMATERIALIZED

import memsave_ext as ms

LIBRARIES = ["transformers", "accelerate"]  # without the second there is no Trainer
transformers = None  # conftest.py imports it

pytestmark = pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated")
logging.getLogger("transformers").setLevel(logging.ERROR)


def gpt2():
    """With dropout in embeddings, attention and MLPs."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=32, n_positions=8, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config)


def tokens():
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(32, (20, 8), generator=generator)
    return [{"input_ids": row, "labels": row} for row in rows]


def trainer_of(folder, model, optimizer=None, callbacks=(), **arguments):
    """10 batches an epoch. The learning rate falls in every step."""
    defaults = {
        "output_dir": str(folder),
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "save_strategy": "no",
        "logging_steps": 1,
        "per_device_train_batch_size": 2,
        "max_steps": 5,
        "max_grad_norm": 0,
        "seed": 3,
    }
    optimizers = (None, None)
    if optimizer is not None:
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        optimizers = (optimizer, schedule)
    return transformers.Trainer(
        model=model,
        args=transformers.TrainingArguments(**(defaults | arguments)),
        train_dataset=tokens(),
        optimizers=optimizers,
        callbacks=list(callbacks),
    )


def ours(model, in_backward=True, **options):
    return ms.AdamW(model.parameters(), lr=1e-2, in_backward=in_backward, **options)


def train(trainer):
    """(losses, learning rates) of each step."""
    trainer.train()
    logs = [log for log in trainer.state.log_history if "loss" in log]
    return [log["loss"] for log in logs], [log["learning_rate"] for log in logs]


def assert_same(model, other, **tolerance):
    for (name, left), right in zip(model.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(left, right, **(tolerance or {"rtol": 0, "atol": 0}), msg=name)


def no_gradients():
    """A callback that looks before the optimizer is called."""

    class NoGradients(transformers.TrainerCallback):
        seen = 0

        def on_pre_optimizer_step(self, args, state, control, model, **kwargs):
            assert all(p.grad is None for p in model.parameters())
            self.seen += 1

    return NoGradients()


@contextlib.contextmanager
def patched(model):
    with ms.patch_torch_checkpoint():
        yield {"gradient_checkpointing": True}


@contextlib.contextmanager
def modules(model):
    ms.checkpoint_modules(model, transformers.models.gpt2.modeling_gpt2.GPT2Block)
    yield {}


@pytest.mark.parametrize(("how", "bf16"), [(patched, False), (patched, True), (modules, False)])
def test_checkpointing_changes_nothing(tmp_path, how, bf16):
    runs = []
    for around in (lambda model: contextlib.nullcontext({}), how):
        model = gpt2()
        recomputing = []
        for block in model.transformer.h:
            block.mlp.register_forward_pre_hook(
                lambda *_, seen=recomputing: seen.append(ms.is_recomputing())
            )
        with around(model) as arguments:
            trainer = trainer_of(tmp_path, model, ours(model), bf16=bf16, **arguments)
            runs.append((model, train(trainer), recomputing))
    (plain, logs, before), (checkpointed, logs_of_it, after) = runs
    assert logs_of_it == logs
    assert_same(checkpointed, plain)
    assert before == [False] * 10 and sorted(after) == [False] * 10 + [True] * 10


@pytest.mark.parametrize("micro_batches", [1, 4], ids=["each batch", "4 batches"])
def test_in_backward_trains_as_torchs(tmp_path, micro_batches):
    # The last step of an epoch has 2 micro-batches.
    arguments = {"gradient_accumulation_steps": micro_batches}
    plain = gpt2()
    adamw = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    losses, rates = train(trainer_of(tmp_path, plain, adamw, **arguments))
    model = gpt2()
    optimizer = ours(model)
    watch = no_gradients()
    trainer = trainer_of(tmp_path, model, optimizer, [watch], **arguments)
    optimizer.accumulate_when(lambda: not trainer.accelerator.sync_gradients)
    own_losses, own_rates = train(trainer)
    assert own_rates == rates == pytest.approx([1e-2 / (1 + step) for step in range(5)])
    assert own_losses == pytest.approx(losses, rel=1e-4)
    assert_same(model, plain, rtol=1e-3, atol=1e-5)
    assert watch.seen == 5
    assert all(state["step"].item() == 5 for state in optimizer.state.values())


def test_the_trainer_makes_the_optimizer(tmp_path):
    models = []
    for kind, options in ((torch.optim.AdamW, {}), (ms.AdamW, {"in_backward": True})):
        model = gpt2()
        trainer = transformers.Trainer(
            model=model,
            args=trainer_of(tmp_path, model, weight_decay=0.1).args,
            train_dataset=tokens(),
            optimizer_cls_and_kwargs=(kind, {"lr": 1e-2, **options}),
        )
        trainer.train()
        assert [group["weight_decay"] for group in trainer.optimizer.param_groups] == [0.1, 0]
        models.append(model)
    assert_same(*models, rtol=1e-3, atol=1e-5)


def test_save_and_resume(tmp_path):
    whole = gpt2()
    trainer_of(tmp_path, whole, ours(whole), save_strategy="steps", save_steps=3).train()
    resumed = gpt2()
    torch.nn.init.normal_(resumed.transformer.wpe.weight)
    optimizer = ours(resumed)
    trainer = trainer_of(tmp_path, resumed, optimizer)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert_same(resumed, whole)
    assert trainer.optimizer.param_groups[0]["lr"] == pytest.approx(1e-2 / 6)
    assert all(state["step"].item() == 5 for state in optimizer.state.values())


def test_its_own_clipping_is_an_error(tmp_path):
    model = gpt2()
    trainer = trainer_of(tmp_path, model, ours(model), max_grad_norm=1.0)  # the default
    with pytest.raises(
        RuntimeError, match="Switch this clipping off .transformers: max_grad_norm=0"
    ):
        trainer.train()


def test_clipping_in_the_optimizer(tmp_path):
    plain = gpt2()
    adamw = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    losses, _ = train(trainer_of(tmp_path, plain, adamw, max_grad_norm=0.1))
    model = gpt2()
    losses_of_it, _ = train(trainer_of(tmp_path, model, ours(model, False, clip_global_norm=0.1)))
    assert losses_of_it == pytest.approx(losses, rel=1e-4)
    assert_same(model, plain, rtol=1e-3, atol=1e-5)


def test_accumulation_that_it_was_not_told_of_is_an_error(tmp_path):
    model = gpt2()
    trainer = trainer_of(tmp_path, model, ours(model), gradient_accumulation_steps=2)
    with pytest.raises(
        RuntimeError, match=r"where a trainer runs them, call opt.accumulate_when\(\)"
    ):
        trainer.train()


@pytest.mark.parametrize("kept", [False, True], ids=["gone", "still there"])
def test_a_second_trainer(tmp_path, kept):
    runs = []
    for kind, options in ((torch.optim.AdamW, {}), (ms.AdamW, {"in_backward": True})):
        model, trainers, losses = gpt2(), [], []
        for _ in range(2):
            trainer = transformers.Trainer(
                model=model,
                args=trainer_of(tmp_path, model).args,
                train_dataset=tokens(),
                optimizer_cls_and_kwargs=(kind, {"lr": 1e-2, **options}),
            )
            if kept:
                trainers.append(trainer)
                ms.remove_hooks(model)
            losses += train(trainer)[0]
        runs.append(losses)
    assert len(runs[0]) == 10 and runs[1] == pytest.approx(runs[0], rel=1e-3)


@pytest.mark.each_value
@pytest.mark.parametrize("options", REMATERIALIZED, ids=str)
@pytest.mark.filterwarnings("ignore:remat. the budget")
@pytest.mark.parametrize(
    ("micro_batches", "bf16"), [(1, True), (4, False)], ids=["each batch, bfloat16", "4 batches"]
)
def test_rematerialization_changes_nothing(tmp_path, micro_batches, bf16, options):
    """Two runs each, of a Trainer of their own."""
    runs = []
    for in_place in (False, True):
        model, losses = gpt2(), []
        handle = ms.remat_module(model, **options) if in_place else None
        for _ in range(2):
            ms.remove_hooks(model)
            optimizer = ours(model)
            arguments = {"gradient_accumulation_steps": micro_batches, "bf16": bf16}
            trainer = trainer_of(tmp_path, model, optimizer, [no_gradients()], **arguments)
            optimizer.accumulate_when(
                lambda trainer=trainer: not trainer.accelerator.sync_gradients
            )
            losses += train(trainer)
        runs.append((model, losses))
    (plain, losses), (model, own_losses) = runs
    assert own_losses == losses
    assert_same(model, plain)
    figures = handle.figures()
    assert figures.dropped_bytes > 0.3 * figures.kept_bytes and figures.recomputed_operators > 0
