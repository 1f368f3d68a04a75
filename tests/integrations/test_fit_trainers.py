"""Fit in the Trainer of transformers and in Lightning's, and fit() beside accelerate and timm."""

import contextlib
import copy
import gc
import logging
import pickle
import re
import warnings
import weakref
from types import FrameType, SimpleNamespace

import pytest
import torch
from libraries import library
from sampling import share
from torch import nn

import memsave_ext as ms
from memsave_ext.elsewhere.gradient import GradientElsewhere
from memsave_ext.store.kept import FileKeeper

LIBRARIES = ["transformers", "accelerate", "lightning.pytorch"]
transformers = accelerate = pytorch = None  # conftest.py imports them

logging.getLogger("transformers").setLevel(logging.ERROR)
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
GB = "1GB"
IN_BACKWARD = "optimizer in backward"
SMALL = "checkpoint by block, Adam in backward, 8-bit states"
TECHNIQUES = [IN_BACKWARD, "remat within the budget", "checkpoint by block"]


def gpt2():
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=128, n_positions=32, n_embd=64, n_layer=2, n_head=2, bos_token_id=0,
        eos_token_id=0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def rows():
    ids = torch.randint(128, (24, 32), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in ids]


class Run:
    def __init__(self, folder, fit=None, model=None, **arguments):
        self.model = gpt2() if model is None else model
        defaults = {
            "output_dir": str(folder), "use_cpu": True, "report_to": [], "disable_tqdm": True,
            "save_strategy": "no", "logging_steps": 1, "per_device_train_batch_size": 2,
            "max_steps": 4, "max_grad_norm": 0, "seed": 3, "learning_rate": 1e-3,
        }  # fmt: skip
        options = {
            name: arguments.pop(name) for name in ("compute_loss_func",) if name in arguments
        }
        self.trainer = transformers.Trainer(
            model=self.model,
            args=transformers.TrainingArguments(**(defaults | arguments)),
            train_dataset=rows(),
            callbacks=[] if fit is None else [fit],
            **options,
        )

    def train(self, **options):
        self.trainer.train(**options)
        return self

    @property
    def losses(self):
        return [log["loss"] for log in self.trainer.state.log_history if "loss" in log]

    def assert_same(self, other):
        assert self.losses == other.losses and len(self.losses) > 0
        for one, two in zip(self.model.parameters(), other.model.parameters(), strict=True):
            assert torch.equal(one, two)


def fit(budget=GB, technique=None, **options):
    return ms.integrations.transformers.Fit(budget, technique=technique, verbose=False, **options)


CASES = {
    "accumulation": {"gradient_accumulation_steps": 3},
    "bfloat16": {"bf16": True},
    "checkpointing of its own": {"gradient_checkpointing": True},
    "evaluation first": {"eval_on_start": True, "eval_strategy": "no"},
}


@pytest.mark.each_value
@pytest.mark.parametrize("technique", [IN_BACKWARD, "remat within the budget"])
@pytest.mark.parametrize("arguments", CASES.values(), ids=CASES)
def test_the_trainers_own_arguments(tmp_path, arguments, technique):
    if "remat" in technique and not ms._native.available:
        pytest.skip("remat is native")
    runs = []
    for callback in (None, fit(technique=technique)):
        run = Run(tmp_path, callback, **arguments)
        run.trainer.eval_dataset = rows()[:2]
        runs.append(run.train())
    assert callback.fitted.technique == technique
    assert callback.fitted.steps_in_backward == ("backward" in technique)
    assert not ms._native.available or callback.fitted.measured is not None
    runs[1].assert_same(runs[0])
    if technique == IN_BACKWARD:
        assert all(p.grad is None for p in runs[1].model.parameters())
        assert isinstance(runs[1].trainer.optimizer.optimizer, ms.adam.step_in_backward.InBackward)


def test_what_a_backward_holds_is_freed_after_it(tmp_path):
    """Fit looks at the frames of a backward, and keeps none in a cycle, which would be there until
    the garbage collector runs: FSDP2's have reduced gradients."""
    frames, is_over = [], ms.integrations.transformers._Training.is_over.__code__

    class Counts(transformers.TrainerCallback):
        def on_step_end(self, *_, **__):
            found = [o for o in gc.get_objects() if isinstance(o, FrameType)]
            frames.append(sum(frame.f_code is is_over for frame in found))

    callback = fit(technique=IN_BACKWARD)
    run = Run(tmp_path, callback)
    run.trainer.add_callback(Counts())
    gc.disable()
    try:
        run.train()
    finally:
        gc.enable()
    assert callback.fitted.steps_in_backward and frames == [0] * 4


@pytest.mark.parametrize("arguments", share(CASES.values(), 2), ids=share(CASES, 2))
@pytest.mark.parametrize("norm", [1.0, 0.01])
def test_clipping_by_the_norm_of_all_is_the_trainers(tmp_path, arguments, norm, monkeypatch):
    monkeypatch.setattr("memsave_ext.elsewhere.gradients.SMALLEST", 0)
    away = []
    keep = FileKeeper.keep
    monkeypatch.setattr(FileKeeper, "keep", lambda self, v: (away.append(1), keep(self, v))[1])
    runs = []
    for callback in (None, fit(technique="gradients elsewhere")):
        run = Run(tmp_path, callback, max_grad_norm=norm, **arguments)
        run.trainer.eval_dataset = rows()[:2]
        runs.append(run.train())
    norms = [
        [log["grad_norm"] for log in run.trainer.state.log_history if "grad_norm" in log]
        for run in runs
    ]
    assert len(norms[0]) > 1 and norms[0] == norms[1]
    runs[1].assert_same(runs[0])
    assert len(away) >= len([*runs[1].model.parameters()]) * len(norms[0])
    assert not callback.fitted.steps_in_backward
    assert "gradients lie in " in str(callback.fitted)
    # Nothing leaves once the training has ended.
    runs[1].model(**{n: torch.ones(1, 4, dtype=torch.long) for n in ("input_ids", "labels")})[
        0
    ].backward()
    assert not any(isinstance(p.grad, GradientElsewhere) for p in runs[1].model.parameters())


@pytest.mark.usefixtures("few_techniques")
def test_its_clipping_stays_or_is_taken_over(tmp_path):
    plain = Run(tmp_path, max_grad_norm=0.1).train()
    probe = fit(technique="as built")
    Run(tmp_path, probe).train()
    # It stays where nothing steps in backward.
    callback = fit(int(0.9 * probe.fitted.predicted))
    run = Run(tmp_path, callback, max_grad_norm=0.1).train()
    assert not callback.fitted.steps_in_backward and callback.fitted.technique != "as built"
    assert run.losses == pytest.approx(plain.losses, rel=1e-6)
    # It is refused before the first step where that would not do.
    least = fit(technique="optimizer in backward")
    with pytest.raises(ValueError, match="the Trainer clips by the norm of all gradients"):
        Run(tmp_path, least, max_grad_norm=0.1).train()
    told = r"fit: Nothing fits.*Not tried: .*max_grad_norm=0 in Training"
    with pytest.raises(torch.OutOfMemoryError, match=told):
        Run(tmp_path, fit("10kB"), max_grad_norm=0.1).train()
    # Or each parameter's gradient is clipped, as by its own optimizer.
    callback = fit(technique="Adam in backward", clip_each=True)
    run = Run(tmp_path, callback, max_grad_norm=0.1)
    seen = []
    run.model.transformer.wte.register_forward_pre_hook(
        lambda *_: seen.append(run.trainer.args.max_grad_norm)
    )
    run.train()
    assert set(seen[-3:]) == {0.0} and run.trainer.args.max_grad_norm == 0.1
    groups = run.trainer.optimizer.param_groups
    assert {group["max_grad_norm"] for group in groups} == {0.1}
    model = gpt2()
    optimizer = ms.AdamW(
        model.parameters(), lr=1e-3, weight_decay=0, in_backward=True, max_grad_norm=0.1
    )
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1, 0, 4)
    written = Run(tmp_path, model=model)
    written.trainer.optimizer, written.trainer.lr_scheduler = optimizer, schedule
    assert written.train().losses == pytest.approx(run.losses, rel=1e-6)


@pytest.mark.parametrize("technique", [IN_BACKWARD, SMALL])
def test_resuming(tmp_path, technique):
    whole = Run(tmp_path, fit(technique=technique), save_strategy="steps", save_steps=2).train()
    resumed = Run(tmp_path, fit(technique=technique))
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    resumed.assert_same(whole) if technique == IN_BACKWARD else None
    assert resumed.losses == pytest.approx(whole.losses, rel=1e-5)
    assert isinstance(resumed.trainer.optimizer.optimizer, ms.AdamW) == (technique == SMALL)
    # Without Fit the states are those of torch's optimizer.
    saved = torch.load(tmp_path / "checkpoint-2" / "optimizer.pt")
    assert {*saved["state"][0]} == {"step", "exp_avg", "exp_avg_sq"}
    assert all(s["exp_avg"].dtype is torch.float32 for s in saved["state"].values())
    plain = Run(tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert plain.losses == pytest.approx(whole.losses, rel=0.02)


def steps_nothing(model, loss):
    before = [p.detach().clone() for p in model.parameters()]
    loss().backward()
    assert all(map(torch.equal, model.parameters(), before))
    assert all(p.grad is not None for p in model.parameters())
    model.zero_grad()


def halves(grads):
    for grad in grads:
        grad.mul_(0.5)


@pytest.mark.usefixtures("few_techniques")
def test_a_trainer_that_changes_gradients(tmp_path):
    class Halving(transformers.TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model=None, **_):
            halves(p.grad for p in model.parameters())

    def run(callback):
        made = Run(tmp_path, callback)
        made.trainer.add_callback(Halving())
        return made.train()

    plain, probe = run(None), fit(technique="as built", in_backward=False)
    run(probe)
    callback = fit(int(0.9 * probe.fitted.predicted), in_backward=False)
    run(callback).assert_same(plain)
    assert callback.fitted.technique != "as built" and not callback.fitted.steps_in_backward


def test_a_module_that_changes_gradients():
    def net():
        made = Net()
        made.on_before_optimizer_step = lambda _: halves(p.grad for p in made.parameters())
        return made

    plain, _ = lightning(net=net())
    callback = lightning_fit(in_backward=False)
    trained, _ = lightning(callback, net())
    assert trained.losses == plain.losses and not callback.fitted.steps_in_backward
    for make in (fit, lightning_fit):
        with pytest.raises(TypeError, match="Fit: in_backward must be True or False, got 'no'"):
            make(in_backward="no")
    with pytest.raises(ValueError, match=f"{IN_BACKWARD} does not apply: in_backward=False"):
        lightning(lightning_fit(technique=IN_BACKWARD, in_backward=False))


@pytest.mark.parametrize("technique", [IN_BACKWARD, SMALL])
def test_nothing_steps_after_the_training(tmp_path, technique):
    run = Run(tmp_path, fit(technique=technique)).train()
    batch = {name: row[None] for name, row in rows()[0].items()}
    steps_nothing(run.model, lambda: run.model(**batch).loss)
    before = [p.detach().clone() for p in run.model.parameters()]
    run.train()
    assert not all(map(torch.equal, run.model.parameters(), before))
    steps_nothing(run.model, lambda: run.model(**batch).loss)


@pytest.mark.parametrize("technique", [IN_BACKWARD, SMALL])
def test_nothing_steps_after_a_training_that_raised(tmp_path, technique):
    class Interrupt(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            if state.global_step == 2:
                raise KeyboardInterrupt

    run = Run(tmp_path, fit(technique=technique, clip_each=True), max_grad_norm=0.5)
    interrupt = Interrupt()
    run.trainer.add_callback(interrupt)
    with pytest.raises(KeyboardInterrupt):
        run.train()
    run.trainer.remove_callback(interrupt)
    batch = {name: row[None] for name, row in rows()[0].items()}
    for _ in range(2):
        steps_nothing(run.model, lambda: run.model(**batch).loss)
    # Another Trainer has the model to itself, although the first one is there.
    copied = copy.deepcopy(run.model)
    others = [Run(tmp_path / "other", model=model).train() for model in (run.model, copied)]
    others[0].assert_same(others[1])
    # The first one trains again, and clips.
    before = [p.detach().clone() for p in run.model.parameters()]
    run.train()
    assert not all(map(torch.equal, run.model.parameters(), before))
    assert run.trainer.args.max_grad_norm == 0.5
    steps_nothing(run.model, lambda: run.model(**batch).loss)


def test_a_training_that_raised_keeps_nothing(tmp_path):
    class Interrupt(transformers.TrainerCallback):
        begins = False

        def on_step_begin(self, args, state, control, **_):
            if self.begins or state.global_step == 1:
                raise KeyboardInterrupt

    class Tries(transformers.Trainer):
        def run(self):
            with pytest.raises(KeyboardInterrupt):
                self.train()
            batch = {name: row[None] for name, row in rows()[0].items()}
            steps_nothing(self.model, lambda: self.model(**batch).loss)

    def train():
        callback = fit(technique=IN_BACKWARD, clip_each=True)
        run, interrupt = Run(tmp_path, callback, max_grad_norm=0.5), Interrupt()
        run.trainer.__class__ = Tries
        run.trainer.add_callback(interrupt)
        # Before the first batch, and then after a step.
        interrupt.begins = True
        run.trainer.run()
        interrupt.begins = False
        run.trainer.run()
        assert run.trainer.args.max_grad_norm == 0
        assert isinstance(copy.deepcopy(callback), type(callback))
        # Another callback clips as the Trainer was told to, unless that was changed meanwhile.
        run.trainer.remove_callback(callback)
        again = fit(technique=IN_BACKWARD, clip_each=True)
        run.trainer.add_callback(again)
        run.trainer.run()
        assert again.fitted.optimizer.param_groups[0]["max_grad_norm"] == 0.5
        run.trainer.args.max_grad_norm = 0.25
        run.trainer.remove_callback(interrupt)
        run.train()
        assert run.trainer.args.max_grad_norm == 0.25
        return weakref.ref(run.trainer)

    trainer = train()
    gc.collect()
    assert trainer() is None


def test_a_batch_that_does_not_fit_is_tried_again_by_accelerate():
    utils = library("accelerate.utils.memory")
    model, x = nn.Linear(64, 64), torch.ones(8, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(torch.OutOfMemoryError) as raised:
        ms.fit(model, optimizer, x, budget="1kB", loss=torch.sum, verbose=False)
    assert utils.should_reduce_batch_size(raised.value)
    assert type(optimizer) is torch.optim.AdamW and not vars(model).get("forward")


def test_training_twice(tmp_path):
    plain = Run(tmp_path)
    plain.train().train()
    callback = fit(technique=IN_BACKWARD)
    run = Run(tmp_path, callback).train()
    first = callback.fitted
    run.train()
    assert callback.fitted is first
    run.assert_same(plain)
    # Another Trainer for the same model.
    other = fit(technique="checkpoint by block")
    again = Run(tmp_path, other, model=run.model).train()
    assert other.fitted is not first and len(again.losses) == 4
    assert type(first.optimizer) is torch.optim.AdamW
    other.fitted.undo()
    assert not any("forward" in vars(module) for module in run.model.modules())


def test_a_larger_batch_in_a_second_training(tmp_path):
    run = Run(tmp_path, fit(technique="as built"))
    run.trainer.train_dataset = [{name: row[:16] for name, row in each.items()} for each in rows()]
    run.train()
    run.trainer.train_dataset = rows()
    with pytest.warns(UserWarning, match="of 64 elements, and the step was predicted with 32"):
        run.train()
    assert not run.model._forward_pre_hooks


def test_an_earlier_trials_model_may_go(tmp_path):
    made, alive = [], []

    def make():
        model = gpt2()
        made.append(weakref.ref(model))
        return model

    class Look(transformers.TrainerCallback):
        def on_step_begin(self, args, state, control, **_):
            gc.collect()
            alive.append([model() is not None for model in made])

    run = Run(tmp_path, fit(technique="as built"), max_steps=1)
    run.trainer.model_init = make  # as in hyperparameter_search()
    run.trainer.add_callback(Look())
    run.train().train()
    assert alive[1][-2:] == [False, True]


def test_lightnings_earlier_module_may_go():
    callback = lightning_fit(technique="as built")
    earlier = weakref.ref(lightning(callback)[0])
    alive = []

    class Look(pytorch.Callback):
        def on_train_start(self, *_):
            gc.collect()
            alive.append(earlier() is not None)

    lightning([callback, Look()])
    assert alive == [False]


def test_copies_before_the_first_step_are_in_no_training(tmp_path):
    class Average(transformers.TrainerCallback):
        def on_train_begin(self, args, state, control, model=None, **_):
            self.model, self.saved = copy.deepcopy(model), pickle.dumps(model)

    def train():
        average = Average()
        run = Run(tmp_path, fit(technique=IN_BACKWARD))
        run.trainer.add_callback(average)
        run.train()
        return average, weakref.ref(run.model)

    average, trained = train()
    gc.collect()
    assert trained() is None
    batch = {name: row[None] for name, row in rows()[0].items()}
    expected = [
        gradients_of(model, batch) for model in (gpt2(), average.model, pickle.loads(average.saved))
    ]
    for others in expected[1:]:
        assert all(map(torch.equal, expected[0], others))
    assert "forward" not in vars(average.model) and not average.model._forward_pre_hooks


def gradients_of(model, batch):
    model.eval()(**batch)
    torch.manual_seed(2)
    model.train()(**batch).loss.backward()
    return [p.grad for p in model.parameters()]


@pytest.mark.parametrize("raises", [False, True])
def test_undone_before_the_training_has_ended(raises):
    callback = lightning_fit(technique=IN_BACKWARD)

    class Undo(pytorch.Callback):
        def on_train_batch_end(self, *_):
            callback.fitted.undo()
            if raises:
                raise ValueError("the user's own error")

    with pytest.raises(ValueError, match="user's own") if raises else contextlib.nullcontext():
        lightning([callback, Undo()])
    assert type(callback.fitted.optimizer) is torch.optim.AdamW
    callback.fitted.rest()
    callback.fitted.go_on()


def test_where_memory_is_moved(tmp_path):
    """As the error of a place that is none advises: "pass offload=FOLDER"."""
    options = {"technique": "gradients elsewhere", "offload": tmp_path}
    callback, clips = fit(**options), {"max_grad_norm": 0.5}
    Run(tmp_path, callback, **clips).train().assert_same(Run(tmp_path, **clips).train())
    assert f"gradients lie in {tmp_path} until" in str(callback.fitted)
    callback, clips = lightning_fit(**options), {"gradient_clip_val": 0.1}
    assert lightning(callback, **clips)[0].losses == lightning(**clips)[0].losses
    assert f"gradients lie in {tmp_path} until" in str(callback.fitted)
    for make in (fit, lightning_fit):
        with pytest.raises(TypeError, match="Fit: offload must be 'cpu', a folder or None, got i"):
            make(offload=3)


def test_a_model_with_hooks_is_called_once(tmp_path):
    calls = {"before": 0, "after": 0}

    def counted(name):
        calls[name] += 1

    runs = []
    for callback in (None, fit(technique="loss head in chunks")):
        run = Run(tmp_path, callback)
        run.model.register_forward_pre_hook(lambda *_: counted("before"))
        run.model.register_forward_hook(lambda *_: counted("after"))
        runs.append(run.train())
        assert calls == {"before": 4, "after": 4}
        calls.update(before=0, after=0)
    assert runs[1].losses == pytest.approx(runs[0].losses, rel=1e-4)
    assert runs[1].losses[0] != 0


@pytest.mark.parametrize(
    "technique", ["loss head in chunks", "checkpoint by block, " + IN_BACKWARD]
)
def test_adapters_of_peft(tmp_path, technique):
    peft = library("peft")
    runs = []
    for callback in (None, fit(technique=technique)):
        config = peft.LoraConfig(r=4, target_modules=["c_attn"], lora_dropout=0.1)
        runs.append(Run(tmp_path, callback, model=peft.get_peft_model(gpt2(), config)).train())
    assert callback.fitted.technique == technique
    if "head" in technique:
        assert runs[1].losses == pytest.approx(runs[0].losses, rel=1e-4)
    else:
        runs[1].assert_same(runs[0])


def let_rows_become_longer(trainer):
    """The first half of a Trainer's rows has 8 tokens, the second half, which comes later, 32."""
    for row in trainer.train_dataset[: len(trainer.train_dataset) // 2]:
        row.update(input_ids=row["input_ids"][:8], labels=row["labels"][:8])
    in_order = torch.utils.data.SequentialSampler(trainer.train_dataset)
    trainer._get_train_sampler = lambda *_: in_order


def test_the_largest_batch(tmp_path):
    largest = {"input_ids": torch.zeros(2, 32, dtype=torch.long)}
    largest["labels"] = largest["input_ids"]
    predicted, said = {}, {}
    for name, options in {"first": {}, "largest": {"largest": largest}}.items():
        callback = fit(technique="as built", **options)
        run = Run(tmp_path, callback, max_steps=12)
        let_rows_become_longer(run.trainer)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run.train()
        said[name] = [w for w in caught if "memsave_ext" in str(w.message)]
        predicted[name] = callback.fitted.predicted
        assert len(run.losses) == 12
        assert not run.model._forward_pre_hooks
    assert predicted["largest"] > predicted["first"]
    assert said["largest"] == []
    (warning,) = said["first"]
    assert "of 64 elements, and the step was predicted with 16" in str(warning.message)
    assert "Fit(largest=batch)" in str(warning.message)
    with pytest.raises(TypeError, match=r"Fit\(largest=\): batch must be one batch"):
        fit(largest="all")


def test_lightnings_largest_batch():
    def run(callback):
        net = Net()
        trainer = pytorch.Trainer(
            accelerator="cpu", logger=False, enable_checkpointing=False, max_epochs=1,
            enable_progress_bar=False, enable_model_summary=False, callbacks=[callback],
        )  # fmt: skip
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            batches = [range(n) for n in (8, 8, 8, 32, 32)]
            trainer.fit(net, torch.utils.data.DataLoader(torch.ones(32, 16), batch_sampler=batches))
        assert len(net.losses) == 5
        return [str(w.message) for w in caught if "memsave_ext" in str(w.message)]

    first = lightning_fit(technique="as built")
    (said,) = run(first)
    assert "of 512 elements, and the step was predicted with 128 at most" in said
    callback = lightning_fit(technique="as built", largest=torch.ones(32, 16))
    assert run(callback) == []
    assert callback.fitted.predicted > first.fitted.predicted


def test_wrong_use(tmp_path):
    run = Run(tmp_path, fit())
    run.trainer.args.torch_compile = True
    with pytest.raises(ValueError, match="Fit: with torch_compile=True the compiler decides"):
        run.train()
    run = Run(tmp_path, fit())
    run.trainer.args._n_gpu = 2
    with pytest.raises(ValueError, match="Fit: one process has 2 devices, by DataParallel"):
        ms.integrations.transformers._refuse(run.trainer.args)
    deepspeed = SimpleNamespace(n_gpu=1, torch_compile=False, deepspeed="zero3.json")
    with pytest.raises(ValueError, match="Fit: DeepSpeed's engine divides gradients.*FSDP2 is fs"):
        ms.integrations.transformers._refuse(deepspeed)
    with pytest.raises(
        ValueError, match="Fit: 3 processes train the model, which is neither in Di"
    ):
        fit().on_train_begin(
            SimpleNamespace(n_gpu=1, torch_compile=False, world_size=3, max_grad_norm=0),
            None, None, model=gpt2(), optimizer=torch.optim.SGD([torch.ones(1)]),
        )  # fmt: skip
    run = Run(tmp_path, fit())
    handle = ms.remat_module(run.model)
    with pytest.raises(
        ValueError, match="the forward of GPT2LMHeadModel has been replaced already"
    ):
        run.train()
    handle.remove()
    assert len(run.train().losses) == 4

    def custom(outputs, labels, num_items_in_batch=None):
        return nn.functional.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten())

    for option in ({"compute_loss_func": custom}, {"label_smoothing_factor": 0.1}):
        with pytest.raises(TypeError, match="the model returned no loss. Pass loss"):
            Run(tmp_path, fit(), **option).train()
    stand_in = fit(
        technique="checkpoint by block", loss=lambda outputs: outputs.logits.logsumexp(-1).mean()
    )
    Run(tmp_path, stand_in, compute_loss_func=custom).train()
    assert stand_in.fitted.technique == "checkpoint by block"


def test_the_most_seconds_of_a_prediction(tmp_path):
    for make in (fit, lightning_fit):
        with pytest.raises(ValueError, match="Fit: timeout must be positive, got 0"):
            make(timeout=0)
    with pytest.raises(RuntimeError, match=r"took longer than 0\.001 s.*more seconds by timeout="):
        Run(tmp_path, fit(timeout=0.001)).train()
    with pytest.raises(RuntimeError, match=r"took longer than 0\.001 s"):
        lightning(lightning_fit(timeout=0.001))


class Net:
    """Makes a LightningModule whose training_step() calls parts of it."""

    def __new__(cls):
        class Module(pytorch.LightningModule):
            def __init__(self):
                super().__init__()
                torch.manual_seed(0)
                self.first, self.last = nn.Linear(16, 64), nn.Linear(64, 4)
                self.blocks = nn.ModuleList(
                    nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1)) for _ in range(4)
                )
                self.losses = []

            def training_step(self, batch):
                x = self.first(batch)
                for block in self.blocks:
                    x = x + block(x)
                loss = self.last(x).square().mean()
                self.log("loss", loss)
                self.log_dict({"epoch": float(self.trainer.current_epoch)})
                self.losses.append(loss.detach())
                return loss

            def configure_optimizers(self):
                optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
                return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]

        return Module()


def lightning(callback=None, net=None, resume=None, **options):
    net = Net() if net is None else net
    x = torch.randn(160, 16, generator=torch.Generator().manual_seed(1))
    trainer = pytorch.Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=callback if isinstance(callback, list) else [callback] if callback else [],
        **{"max_epochs": 1, **options},
    )  # fmt: skip
    torch.manual_seed(5)
    trainer.fit(net, torch.utils.data.DataLoader(x, batch_size=32), ckpt_path=resume)
    return net, trainer


def lightning_fit(budget=GB, technique=None, **options):
    return ms.integrations.lightning.Fit(budget, technique=technique, verbose=False, **options)


LIGHTNING_CASES = {
    "each batch": {},
    "accumulation": {"accumulate_grad_batches": 3},
    "bfloat16": {"precision": "bf16-mixed"},
}


@pytest.mark.each_value
@pytest.mark.parametrize("technique", TECHNIQUES)
@pytest.mark.parametrize("options", LIGHTNING_CASES.values(), ids=LIGHTNING_CASES)
def test_lightnings_own_arguments(options, technique):
    if "remat" in technique and not ms._native.available:
        pytest.skip("remat is native")
    plain, _ = lightning(**options)
    callback = lightning_fit(technique=technique)
    net, _ = lightning(callback, **options)
    assert callback.fitted.technique == technique and len(net.losses) == 5
    if ms._native.available and not options:  # gradients of the step before are there in forward
        assert callback.fitted.measured == pytest.approx(callback.fitted.predicted, rel=0.02)
    assert net.losses == plain.losses
    for one, other in zip(net.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.usefixtures("few_techniques")
def test_lightnings_clipping_and_refusals():
    plain, _ = lightning(gradient_clip_val=0.1)
    callback = lightning_fit(technique="checkpoint by block")
    net, _ = lightning(callback, gradient_clip_val=0.1)
    assert net.losses == plain.losses
    callback = lightning_fit(technique="gradients elsewhere")
    net, _ = lightning(callback, gradient_clip_val=0.1)
    assert net.losses == plain.losses and callback.fitted.technique == "gradients elsewhere"
    with pytest.raises(ValueError, match="the Trainer clips gradients, by gradient_clip_val or by"):
        lightning(lightning_fit(technique=IN_BACKWARD), gradient_clip_val=0.1)
    callback = lightning_fit(technique=IN_BACKWARD, clip_each=True)
    _, trainer = lightning(callback, gradient_clip_val=0.1)
    assert trainer.gradient_clip_val == 0.1 and callback.fitted.steps_in_backward
    assert trainer.optimizers[0].param_groups[0]["max_grad_norm"] == 0.1
    with pytest.raises(torch.OutOfMemoryError, match="fit: Nothing fits"):
        lightning(lightning_fit("1kB"))
    net = Net()
    net.automatic_optimization = False
    with pytest.raises(ValueError, match="Fit: the module optimizes by itself"):
        lightning(lightning_fit(), net)
    clipping = Net()
    type(clipping).configure_gradient_clipping = lambda self, *args, **_: self.clip_gradients(
        args[0], gradient_clip_val=0.1, gradient_clip_algorithm="norm"
    )
    with pytest.raises(ValueError, match=r"or by the module's own configure_gradient_clipping\(\)"):
        lightning(lightning_fit(technique=IN_BACKWARD), clipping)
    none = Net()
    none.configure_optimizers = lambda: None
    with pytest.raises(ValueError, match="Fit: the module must have one optimizer, got 0"):
        lightning(lightning_fit(), none)
    net = Net()
    net.training_step = lambda batch: None
    with pytest.raises(ValueError, match="must return a loss, or a dict with one, got NoneType"):
        lightning(lightning_fit(), net)


def test_gradients_that_add_up_from_some_epoch_on():
    schedule = {0: 1, 1: 2}
    net, plain = Net(), Net()
    lightning([pytorch.callbacks.GradientAccumulationScheduler(schedule)], plain, max_epochs=2)
    callback = lightning_fit(technique=IN_BACKWARD)
    fitted = []

    class Looks(pytorch.Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            fitted.append(callback.fitted)

    lightning(
        [pytorch.callbacks.GradientAccumulationScheduler(schedule), callback, Looks()],
        net,
        max_epochs=2,
    )
    assert len(set(map(id, fitted))) == 2 and fitted[4] is not fitted[5]
    assert fitted[5].predicted > fitted[4].predicted
    assert net.losses == plain.losses


@pytest.mark.parametrize("raises", [False, True])
def test_nothing_steps_after_lightnings_training(raises):
    class Ends(pytorch.Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            if raises and batch_idx == 2:
                raise ZeroDivisionError

    net, callback = Net(), lightning_fit(technique=IN_BACKWARD)
    with pytest.raises(ZeroDivisionError) if raises else contextlib.nullcontext():
        lightning([callback, Ends()], net)
    assert callback.fitted.steps_in_backward and len(net.losses) == (3 if raises else 5)

    def loss():
        x = net.first(torch.ones(2, 16))
        return net.last(x).sum() + sum(block(x).sum() for block in net.blocks)

    steps_nothing(net, loss)


@pytest.mark.parametrize("technique", TECHNIQUES)
def test_lightning_with_an_argument_of_another_name(technique):
    if "remat" in technique and not ms._native.available:
        pytest.skip("remat is native")

    def nets():
        net = Net()
        own = type(net).training_step
        type(net).training_step = lambda self, batch, _: own(self, batch)
        return net

    plain, _ = lightning(None, nets())
    net, _ = lightning(lightning_fit(technique=technique), nets())
    assert net.losses == plain.losses


def test_lightnings_search_of_a_rate():
    plain, callback = Net(), lightning_fit(technique=IN_BACKWARD)
    net = Net()
    for one, fit in ((plain, None), (net, callback)):
        one.lr = 1e-3
        type(one).configure_optimizers = lambda self: torch.optim.AdamW(
            self.parameters(), lr=self.lr
        )
        x = torch.randn(160, 16, generator=torch.Generator().manual_seed(1))
        trainer = pytorch.Trainer(
            accelerator="cpu", logger=False, enable_checkpointing=False, max_epochs=1,
            enable_progress_bar=False, enable_model_summary=False,
            callbacks=[fit] if fit else [],
        )  # fmt: skip
        batches = torch.utils.data.DataLoader(x, batch_size=32)
        torch.manual_seed(5)
        pytorch.tuner.Tuner(trainer).lr_find(one, batches, num_training=5)
        torch.manual_seed(5)
        trainer.fit(one, batches)
    assert callback.fitted.steps_in_backward
    assert net.losses[-5:] == plain.losses[-5:]


@pytest.mark.parametrize("technique", [IN_BACKWARD, SMALL])
def test_lightning_again_and_resumed(technique, tmp_path):
    def net_without_dropout():  # Lightning saves no random state, which dropout draws from
        net = Net()
        for block in net.blocks:
            del block[2]
        return net

    whole, _ = lightning(lightning_fit(technique=technique), net_without_dropout(), max_epochs=2)
    callback = lightning_fit(technique=technique)
    net, trainer = lightning(callback, net_without_dropout())
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    saved = torch.load(tmp_path / "one.ckpt", weights_only=False)
    assert {*saved["optimizer_states"][0]["state"][0]} == {"step", "exp_avg", "exp_avg_sq"}
    again, _ = lightning(callback, net, max_epochs=2, resume=tmp_path / "one.ckpt")
    assert again is net and len(net.losses) == 10
    assert net.losses == whole.losses
    callback.fitted.undo()
    assert not any("forward" in vars(m) or "training_step" in vars(m) for m in net.modules())


class Loop:
    """accelerate's, with a scaler as on a GPU."""

    def __init__(self, scaler=None, micro_batches=1, **options):
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        accelerate.state.GradientState._reset_state()
        self.accelerator = accelerate.Accelerator(
            cpu=True, gradient_accumulation_steps=micro_batches, **options
        )
        self.accelerator.scaler = scaler
        net = Net()
        self.net = nn.Sequential(net.first, nn.Sequential(*net.blocks), net.last)
        optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-2)
        x = torch.randn(160, 16, generator=torch.Generator().manual_seed(1))
        data = torch.utils.data.DataLoader(x, batch_size=32)
        self.net, self.optimizer, self.data = self.accelerator.prepare(self.net, optimizer, data)
        self.losses = []

    def fit(self, technique, **options):
        return ms.fit(
            self.net, self.optimizer, next(iter(self.data)), budget=GB, technique=technique,
            loss=lambda y: y.square().mean(), verbose=False,
            micro_batches=self.accelerator.gradient_accumulation_steps,
            accumulate_when=lambda: not self.accelerator.sync_gradients, **options,
        )  # fmt: skip

    def run(self):
        torch.manual_seed(3)
        for x in self.data:
            with self.accelerator.accumulate(self.net):
                loss = self.net(x).square().mean()
                self.accelerator.backward(loss)
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.losses.append(loss.item())
        return self


@pytest.mark.each_value
@pytest.mark.parametrize("technique", [IN_BACKWARD, "remat within the budget", SMALL])
@pytest.mark.parametrize("case", ["each batch", "accumulation", "bfloat16", "scaler"])
def test_accelerate(case, technique):
    if "remat" in technique and not ms._native.available:
        pytest.skip("remat is native")
    options = {"micro_batches": 2} if case == "accumulation" else {}
    if case == "bfloat16":
        options["mixed_precision"] = "bf16"
    loops = []
    for chosen in (None, technique):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024) if case == "scaler" else None
        loop = Loop(scaler, **options)
        fitted = loop.fit(chosen) if chosen else None
        loops.append(loop.run())
        assert not scaler or not loop.optimizer.step_was_skipped
    plain, loop = loops
    close = pytest.approx(plain.losses, rel=0.01)
    assert loop.losses == (plain.losses if technique != SMALL else close)
    assert type(loop.optimizer.optimizer).__name__ == "AdamW"
    fitted.undo()
    assert type(loop.optimizer.optimizer) is torch.optim.AdamW
    loop.run()
    plain.run()
    close = pytest.approx(plain.losses, rel=0.01)
    assert loop.losses == (plain.losses if technique != SMALL else close)


def test_timm():
    timm = library("timm")
    library("timm.optim"), library("timm.loss")
    torch.manual_seed(0)
    model = timm.create_model("test_vit", num_classes=10, img_size=32)
    optimizer = timm.optim.create_optimizer_v2(model, opt="adamw", lr=1e-3)
    x, y = torch.randn(8, 3, 32, 32), torch.randint(10, (8,))
    criterion = timm.loss.LabelSmoothingCrossEntropy()
    fitted = ms.fit(
        model, optimizer, x, budget=GB, loss=lambda output: criterion(output, y),
        technique="checkpoint by block, optimizer in backward", verbose=False,
    )  # fmt: skip
    for _ in range(2):
        criterion(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert fitted.technique and (fitted.measured is not None) == ms._native.available


def test_what_there_is():
    assert {"lightning", "transformers"} <= {*dir(ms.integrations)}
    for trainers in (ms.integrations.transformers, ms.integrations.lightning):
        with pytest.raises(
            ValueError, match="Fit: budget must be bytes as an int, .* got '24 G B'"
        ):
            trainers.Fit("24 G B")
        with pytest.raises(ValueError, match="Fit: technique must be None or one of"):
            trainers.Fit(GB, technique="magic")
    with pytest.raises(AttributeError, match=re.escape("has no attribute 'keras'")):
        ms.integrations.keras  # noqa: B018
