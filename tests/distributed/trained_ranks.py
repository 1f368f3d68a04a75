"""What trainers do on ranks, with Fit and without: tests import it there."""

import contextlib
import functools
import io
import logging
import os
import tempfile
import warnings
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from libraries import library
from ranks import whole
from sharded_steps import pauses
from torch import nn
from torch.distributed.fsdp import fully_shard

import memsave_ext as ms
from memsave_ext.store.kept import FileKeeper

LIBRARIES = ["transformers", "transformers.trainer", "accelerate", "lightning.pytorch", "trl"]
LIBRARIES += ["trl.trainer.sft_trainer", "tokenizers", "datasets"]
KINDS = ("ddp", "fsdp2")
BUDGET = {"ddp": "4.5MB", "fsdp2": "5MB"}  # less than the steps of GPT-2 below take
WITHIN = "remat within the budget" if ms._native.available else "checkpoint by block"
IN_BACKWARD = "checkpoint by block, optimizer in backward"
# On CPUs accelerate cannot save whole weights of FSDP2, without Fit neither.
FSDP2 = {
    "fsdp": True,
    "fsdp_config": {
        "version": 2,
        "transformer_layer_cls_to_wrap": ["GPT2Block"],
        "state_dict_type": "SHARDED_STATE_DICT",
    },
}


def as_torchrun_says():
    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world, LOCAL_WORLD_SIZE=world)
    os.environ.update(GROUP_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="29511")
    os.environ["TORCHELASTIC_RUN_ID"] = "trained"  # Lightning starts no processes then
    for name in ("transformers", "lightning.pytorch"):
        logging.getLogger(name).setLevel(logging.ERROR)


@functools.cache
def folder():
    """One folder for all ranks."""
    made = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(made)
    return Path(made[0])


@functools.cache
def _let_accelerate_shard_on_cpus():
    """It does so on GPUs alone; what it calls, and when, is the same."""
    accelerate = library("accelerate")
    state = accelerate.state.AcceleratorState
    init = state.__init__

    def made(self, *args, fsdp_plugin=None, **options):
        init(self, *args, fsdp_plugin=fsdp_plugin, **options)
        if fsdp_plugin is not None:
            self.distributed_type = accelerate.utils.DistributedType.FSDP
            self.fsdp_plugin = fsdp_plugin

    state.__init__ = made


def accelerate_anew():
    _let_accelerate_shard_on_cpus()
    state = library("accelerate").state
    state.AcceleratorState._reset_state(reset_partial_state=True)
    state.GradientState._reset_state()
    os.environ.pop("ACCELERATE_USE_FSDP", None)


def gpt2(**options):
    torch.manual_seed(0)
    transformers = library("transformers")
    sizes = {"vocab_size": 32, "n_positions": 32, "n_embd": 64, "n_layer": 3, "n_head": 2}
    more = {"bos_token_id": 0, "eos_token_id": 0, "tie_word_embeddings": False}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **more, **options))


def rows(count=48):
    ids = torch.randint(32, (count, 32), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in ids]


def arguments(kind, make, **options):
    accelerate_anew()
    defaults = {
        "output_dir": str(folder() / kind), "use_cpu": True, "report_to": [],
        "disable_tqdm": True, "save_strategy": "no", "logging_steps": 1, "max_steps": 4,
        "per_device_train_batch_size": 4, "seed": 3, "learning_rate": 1e-3, "max_grad_norm": 0,
        "ddp_backend": "gloo",
    }  # fmt: skip
    return make(**defaults | (FSDP2 if kind == "fsdp2" else {}) | options)


def trainer_of(kind, fit=None, model=None, callbacks=(), **options):
    transformers = library("transformers")
    return transformers.Trainer(
        model=gpt2() if model is None else model,
        args=arguments(kind, transformers.TrainingArguments, **options),
        train_dataset=rows(),
        eval_dataset=rows(4),
        callbacks=[*callbacks, *([] if fit is None else [fit])],
    )


@contextlib.contextmanager
def told():
    """What is printed by fit, and its warnings."""
    found, printed = [], io.StringIO()
    with warnings.catch_warnings(record=True) as caught, contextlib.redirect_stdout(printed):
        warnings.simplefilter("always")
        yield found
    found += [line for line in printed.getvalue().splitlines() if line.startswith("fit: ")]
    found += [str(w.message) for w in caught if "memsave_ext" in str(w.message)]


def run(kind, fit=None, resume=None, make=trainer_of, times=1, **options):
    """Trains, and returns what happened."""
    with told() as said:
        trainer = make(kind, fit, **options)
        for _ in range(times):
            trainer.train(resume_from_checkpoint=resume)
    history = trainer.state.log_history
    losses, norms = ([log[n] for log in history if n in log] for n in ("loss", "grad_norm"))
    evaluated = [log["eval_loss"] for log in history if "eval_loss" in log]
    found = SimpleNamespace(losses=losses, norms=norms, evaluated=evaluated, said=said)
    found.weights = [w.clone() for w in whole(trainer.model.parameters())]
    if fit is not None:
        found.technique, found.predicted = fit.fitted.technique, fit.fitted.predicted
        found.recomputed = recomputed(trainer.model)
        fit.fitted.undo()
        found.left = [n for n, m in trainer.model.named_modules() if "forward" in vars(m)]
    return found


def recomputed(model):
    """How many operators remat computes again, or how many blocks are checkpointed."""
    # Lightning leaves the forward of a module in DistributedDataParallel on it.
    for stand_in in map(vars(model).get, ("forward", "training_step")):
        if hasattr(stand_in, "last"):
            return stand_in.last.figures().recomputed_operators
    return sum("Checkpointed" in type(vars(m).get("forward")).__name__ for m in model.modules())


def fit(budget="1GB", technique=None, **options):
    return ms.integrations.transformers.Fit(budget, technique=technique, **options)


LOOP = {
    "gradient_accumulation_steps": 2, "max_grad_norm": 0.5, "eval_strategy": "steps",
    "eval_steps": 2,
}  # fmt: skip


@functools.cache
def plain(kind):
    return run(kind, **LOOP)


def searched(kind):
    """What is cheapest in a budget that as built does not do for."""
    options = {"max_grad_norm": 0.5}
    return run(kind, **options), run(kind, fit("4MB"), **options)


def within_a_budget(kind):
    """A loop that accumulates, clips and evaluates; and what goes on from its checkpoint."""
    saving = LOOP | {"save_strategy": "steps", "save_steps": 2}
    whole_run = run(kind, fit(BUDGET[kind], WITHIN), **saving)
    path = str(folder() / kind / "checkpoint-2")
    resumed = run(kind, fit(BUDGET[kind], "checkpoint by block"), resume=path, **LOOP)
    return plain(kind), whole_run, resumed


def clipped_elsewhere(kind):
    """Gradients lie elsewhere; how many did."""
    away, keep = [], FileKeeper.keep

    def counted(self, value):
        away.append(1)
        return keep(self, value)

    FileKeeper.keep, smallest = counted, ms.elsewhere.gradients.SMALLEST
    ms.elsewhere.gradients.SMALLEST = 0
    try:
        return plain(kind), run(kind, fit(technique="gradients elsewhere"), **LOOP), len(away)
    finally:
        FileKeeper.keep, ms.elsewhere.gradients.SMALLEST = keep, smallest


def in_backward(kind):
    """Trains twice, and accumulates."""
    options = {"gradient_accumulation_steps": 2, "times": 2}
    return run(kind, **options), run(kind, fit(technique=IN_BACKWARD), **options)


class Interrupts:
    def __new__(cls):
        class Callback(library("transformers").TrainerCallback):
            def on_step_end(self, args, state, control, **_):
                if state.global_step == 2:
                    raise ZeroDivisionError

        return Callback()


def raising(kind):
    """A step that raises on all ranks, after which a backward steps nothing: under
    DistributedDataParallel it is an error, since what it reduces cannot be put aside."""
    callback = fit(technique=IN_BACKWARD)
    with told():
        trainer = trainer_of(kind, callback, callbacks=[Interrupts()])
        with contextlib.suppress(ZeroDivisionError):
            trainer.train()
    before = whole(trainer.model.parameters())
    ids = torch.ones(1, 4, dtype=torch.long)
    said = ""
    try:
        trainer.model_wrapped(input_ids=ids, labels=ids).loss.backward()
    except RuntimeError as error:
        said = str(error)
    same = map(torch.equal, whole(trainer.model.parameters()), before)
    return all(same), said


def sft(kind, fit=None, followed_by=None, **options):
    """TRL's trainer, whose steps are of texts."""
    tokenizers, transformers, trl = map(library, ("tokenizers", "transformers", "trl"))
    words = {word: n for n, word in enumerate(["<pad>", "<eos>", "<unk>", *map(str, range(29))])}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=model, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    texts = [{"text": " ".join(str((n + k) % 29) for k in range(30))} for n in range(48)]
    return trl.SFTTrainer(
        gpt2(),
        arguments(kind, trl.SFTConfig, **options),
        train_dataset=library("datasets").Dataset.from_list(texts),
        processing_class=tokenizer,
        callbacks=[one for one in (fit, followed_by) if one is not None],
    )


def trl_sft(kind):
    """With the peaks of the steps after the first."""
    options = {"make": sft, "max_grad_norm": 1.0, "max_steps": 3}
    tracked, peaks = ms.memory.track(), []
    chosen = fit(technique="checkpoint by block")
    with tracked, pauses():
        followed = run(kind, chosen, **options, followed_by=Peaks(tracked, peaks))
    return run(kind, **options), followed, peaks


class Peaks:
    def __new__(cls, tracked, peaks):
        class Callback(library("transformers").TrainerCallback):
            def on_step_begin(self, args, state, control, **_):
                dist.barrier()
                tracked.reset_peak()

            def on_step_end(self, args, state, control, **_):
                if state.global_step > 1:
                    peaks.append(tracked.peak)

        return Callback()


def lightning_run(kind, fit=None, resume=None, save=None, technique=None, **options):
    pytorch = library("lightning.pytorch")
    strategies = library("lightning.pytorch.strategies")

    class Net(pytorch.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.net = nn.Sequential(
                nn.Linear(16, 64),
                nn.Sequential(
                    *(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64)) for _ in "1234")
                ),
                nn.Linear(64, 4),
            )
            self.register_buffer("factor", torch.ones(64))
            self.losses, self.sharded = [], False

        def configure_model(self):
            if kind == "fsdp2" and not self.sharded:
                self.sharded = True
                for block in self.net[1]:
                    fully_shard(block, mesh=self.device_mesh["data_parallel"])
                fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

        def training_step(self, batch):
            loss = self.net(batch).square().mean()
            self.log("loss", loss)
            self.losses.append(loss.item())
            return loss

        def validation_step(self, batch):
            self.log("valid", self.net(batch).mean(), sync_dist=True)

        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
            return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]

    net = Net()
    sharding = strategies.ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    trainer = pytorch.Trainer(
        accelerator="cpu", devices=2, strategy="ddp" if kind == "ddp" else sharding,
        logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[] if fit is None else [fit],
        **{"max_epochs": 1, **options},
    )  # fmt: skip
    x = torch.randn(320, 16, generator=torch.Generator().manual_seed(1))
    loader = torch.utils.data.DataLoader(x, batch_size=32)
    with told() as said:
        validating = loader if "val_check_interval" in options else None
        trainer.fit(net, loader, validating, ckpt_path=resume)
        if save is not None:
            trainer.save_checkpoint(save)
    found = SimpleNamespace(losses=net.losses, said=said, weights=whole(net.parameters()))
    if fit is not None:
        found.technique, found.bits = fit.fitted.technique, fit.fitted.bits
        found.recomputed, optimizer = recomputed(net), fit.fitted.optimizer
        states = torch.utils._pytree.tree_leaves([*optimizer.state.values()])
        found.state_dtypes = {t.dtype for t in states if isinstance(t, torch.Tensor)}
        found.steps_in_backward = fit.fitted.steps_in_backward
        fit.fitted.undo()
    return found


def lightning(kind):
    lightning_fit = ms.integrations.lightning.Fit
    options = {"accumulate_grad_batches": 2, "val_check_interval": 2}
    clipped = {"gradient_clip_val": 0.1, **options}
    return (
        lightning_run(kind, **clipped),
        lightning_run(kind, lightning_fit("1GB", technique="checkpoint by block"), **clipped),
        lightning_run(kind, **options),
        lightning_run(kind, lightning_fit("1GB", technique=IN_BACKWARD), **options),
    )


# Less than a step as built takes, and less than one within the first budget.
LIGHTNING_BUDGETS = {"ddp": ("450KB", "390KB"), "fsdp2": ("300KB", "265KB")}


def lightning_tight(kind):
    options = {"gradient_clip_val": 0.1, "accumulate_grad_batches": 2}
    fits = map(ms.integrations.lightning.Fit, LIGHTNING_BUDGETS[kind])
    return [lightning_run(kind, fit, **options) for fit in (None, *fits)]


def lightning_resumed(kind):
    path = str(folder() / f"{kind}.ckpt")
    whole_run = lightning_run(kind, max_epochs=2)
    lightning_fit = ms.integrations.lightning.Fit
    lightning_run(kind, lightning_fit("1GB", technique=IN_BACKWARD), save=path)
    fit = lightning_fit("1GB", technique="checkpoint by block")
    return whole_run, lightning_run(kind, fit, resume=path, max_epochs=2)


def accelerated(kind):
    """accelerate's own loop, which accumulates and clips."""
    accelerate = library("accelerate")
    found = []
    for budget in (None, BUDGET[kind]):
        accelerate_anew()
        plugin = accelerate.FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["GPT2Block"],
        )  # fmt: skip
        accelerator = accelerate.Accelerator(
            cpu=True, gradient_accumulation_steps=2, fsdp_plugin=plugin if kind == "fsdp2" else None
        )
        os.environ.pop("ACCELERATE_USE_FSDP", None)
        model = gpt2()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        data = torch.utils.data.DataLoader(rows(), batch_size=4)
        model, optimizer, data = accelerator.prepare(model, optimizer, data)
        fitted, said = None, []
        if budget is not None:
            with told() as said:
                fitted = ms.fit(
                    model, optimizer, next(iter(data)), budget=budget, micro_batches=2,
                    in_backward=False, technique=WITHIN,
                )  # fmt: skip
        torch.manual_seed(3)
        losses = []
        for batch in data:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
        inside = accelerator.unwrap_model(model)
        found.append((losses, fitted and (fitted.technique, recomputed(inside)), said))
    return found


def frozen(kind):
    """All but the last block, with Fit."""
    found = []
    for chosen in (None, fit(technique=IN_BACKWARD)):
        model = gpt2()
        model.requires_grad_(False)
        model.transformer.h[-1].requires_grad_(True)
        found.append(run(kind, chosen, model=model, max_steps=2))
    return found


# What runs every time, and how; all of it with --full in each way, as each takes seconds.
EVERY_TIME = {
    within_a_budget: "fsdp2", searched: "fsdp2", in_backward: "ddp", trl_sft: "ddp",
    accelerated: "fsdp2", lightning: "ddp",
}  # fmt: skip
IN_FULL = (clipped_elsewhere, raising, frozen, lightning_tight, lightning_resumed)


def to_run(full):
    every = [(one, kind) for one in (*EVERY_TIME, *IN_FULL) for kind in KINDS]
    chosen = every if full else EVERY_TIME.items()
    named = {f"{one.__name__}: {kind}": functools.partial(one, kind) for one, kind in chosen}
    return {"as_torchrun_says": as_torchrun_says, **named}
