"""TRL's trainers with the loss head: what they log, and what their head returns."""

import importlib
import inspect
import warnings

import pytest
import torch
import torch.nn.functional as F
from libraries import library

import memsave_ext as ms
from memsave_ext.integrations.trl import LMHead

EVERYTHING = "entropy", "log_sum_sq_probs", "mean_logits", "is_top1"


def by_torch(x, w, b, t, temperature, cap, scale):
    return of_logits(F.linear(x, w, b).double(), t, temperature, cap, scale)


def of_logits(logits, t, temperature, cap, scale):
    logits = logits * scale
    if cap is not None:
        logits = cap * torch.tanh(logits / cap)
    log_p = (logits / temperature).log_softmax(-1)
    return (
        log_p.gather(-1, t[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1),
        (2 * log_p).logsumexp(-1), (logits / temperature).mean(-1), log_p.argmax(-1) == t,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize("scale", [1.0, 0.25])
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
def test_the_head_beside_torch_in_float64(dtype, cap, scale, bias):
    g = torch.Generator().manual_seed(0)
    x, w, b = (torch.randn(*s, generator=g).to(dtype) for s in ((9, 16), (700, 16), (700,)))
    t = torch.randint(700, (9,), generator=g)
    with torch.no_grad():
        t[:3] = F.linear(x, w, b if bias else None)[:3].argmax(-1)  # some are right
    wanted = [v.requires_grad_() for v in ((x, w, b) if bias else (x, w))]
    exact = [v.detach().double().requires_grad_() for v in wanted]
    rest = 0.7, cap, scale
    right = by_torch(exact[0], exact[1], exact[2] if bias else None, t, *rest)
    head = LMHead(chunk_size=256)
    found = head.apply(x, w, b if bias else None, t, 0.7, 99, cap, scale, EVERYTHING)
    assert [v.requires_grad for v in found] == [True, True, False, False, False]
    tolerance = {torch.float32: 2e-5, torch.float64: 1e-11, torch.bfloat16: 0.06}[dtype]
    for value, other in zip(found[:4], right[:4], strict=True):
        assert value.dtype == torch.promote_types(dtype, torch.float32)
        torch.testing.assert_close(value.double(), other, rtol=tolerance, atol=tolerance)
    assert found[4].any() and not found[4].all()
    assert (found[4] == right[4]).float().mean() >= (0.8 if dtype == torch.bfloat16 else 1.0)
    totals = [v[0].sum() + 0.1 * v[1].square().sum() for v in (found, right)]
    for of, by in zip(torch.autograd.grad(totals[0], wanted), torch.autograd.grad(totals[1], exact),
                      strict=True):  # fmt: skip
        assert (of.double() - by).norm() <= tolerance * by.norm()


def test_what_is_not_asked_for_is_none():
    x, w, t = torch.randn(3, 4), torch.randn(5, 4), torch.tensor([0, 4, 2])
    alone = LMHead().apply(x, w, None, t, 1.0, 99)
    assert alone[1:] == (None,) * 4
    torch.testing.assert_close(alone[0], by_torch(x, w, None, t, 1.0, None, 1.0)[0].float())
    for number, name in enumerate(EVERYTHING, 1):
        found = LMHead().apply(x, w, None, t, 1.0, 99, outputs=(name,))
        assert [v is not None for v in found] == [n in (0, number) for n in range(5)]


# ---- with TRL -----------------------------------------------------------------------------------


@pytest.fixture
def trl(tmp_path, monkeypatch):
    library("transformers")
    monkeypatch.chdir(tmp_path)
    module = library("trl")
    yield module
    utils = module.trainer.utils
    assert not isinstance(utils._ChunkedLogProbFunction, LMHead)


def tokenizer():
    import tokenizers
    import transformers

    words = [f"w{n}" for n in range(290)]
    vocabulary = {word: n for n, word in enumerate(["<pad>", "<eos>", "<unk>", *words])}
    model = tokenizers.models.WordLevel(vocabulary, unk_token="<unk>")
    of = tokenizers.Tokenizer(model)
    of.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=of, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def model(layers=1):
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=300, hidden_size=16, intermediate_size=16, num_hidden_layers=layers,
        num_attention_heads=2, num_key_value_heads=2, pad_token_id=0, eos_token_id=1,
        bos_token_id=1, initializer_range=0.5,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def words(first, count):
    return " ".join(f"w{(first * 7 + n * n) % 290}" for n in range(count))


def rows(kind):
    import datasets

    if kind == "SFT":
        of = [
            {"prompt": words(n, 3), "completion": " " + words(n + 1, 5 + n % 3)} for n in range(8)
        ]
    elif kind == "DPO":
        of = [
            {
                "prompt": words(n, 3),
                "chosen": " " + words(n + 1, 4),
                "rejected": " " + words(n + 2, 6),
            }
            for n in range(8)
        ]
    else:
        of = [{"prompt": words(n, 3)} for n in range(8)]
    return datasets.Dataset.from_list(of)


OPTIONS = {
    "SFT": {},
    "DPO": {"use_weighting": True},
    "GRPO": {
        "num_generations": 2, "max_completion_length": 6, "temperature": 0.7, "beta": 0.0,
        "entropy_coef": 0.5,
    },
}  # fmt: skip
LOGGED = {
    "SFT": {"entropy", "mean_token_accuracy"},
    "DPO": {"entropy", "mean_token_accuracy", "logits/chosen", "logits/rejected", "logps/chosen"},
    "GRPO": {"entropy", "reward"},
}


MEASURED = "time", "per_second"


def logged(trl, kind, options, of=None, callbacks=()):
    """Returns what a run of three steps logs, and the trained weights; of a model that is given, or
    of another one with a reference model."""
    config = getattr(trl, f"{kind}Config")(
        output_dir="out", use_cpu=True, report_to=[], disable_tqdm=True, save_strategy="no",
        per_device_train_batch_size=2, max_steps=3, logging_steps=1, learning_rate=1e-3, bf16=False,
        **options,
    )  # fmt: skip
    more = {}
    if kind == "GRPO":
        more["reward_funcs"] = lambda completions, **_: [float(len(c) % 5) for c in completions]
    if kind == "DPO" and of is None:
        more["ref_model"] = model()
        with torch.no_grad():
            more["ref_model"].lm_head.weight.mul_(0.9)
    of = of or model()
    trainer = getattr(trl, f"{kind}Trainer")(
        of, args=config, train_dataset=rows(kind), processing_class=tokenizer(),
        callbacks=[*callbacks], **more,
    )  # fmt: skip
    trainer.train()
    history = [
        {
            name: value
            for name, value in of_step.items()
            if isinstance(value, (int, float)) and not any(word in name for word in MEASURED)
        }
        for of_step in trainer.state.log_history
    ]
    return history, [p.detach().clone() for p in of.parameters()]


@pytest.mark.parametrize("kind", OPTIONS)
def test_trainers_log_and_learn_the_same(trl, kind, monkeypatch):
    calls = []
    apply = LMHead.apply

    def counted(self, *args, **options):
        calls.append(args[8])
        return apply(self, *args, **options)

    monkeypatch.setattr(LMHead, "apply", counted)
    expected, weights = logged(trl, kind, OPTIONS[kind])
    assert not calls
    patch = ms.integrations.trl.patch_lm_head()
    try:
        found, trained = logged(trl, kind, OPTIONS[kind])
    finally:
        patch.remove()
    assert calls and any("entropy" in outputs for outputs in calls)
    assert LOGGED[kind] <= {*found[0]}
    assert len(found) == len(expected) > 3
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, rel=1e-3, abs=1e-5)
    torch.testing.assert_close(trained, weights, rtol=1e-3, atol=1e-4)


# ---- adapters on the head -----------------------------------------------------------------------


def adapted(**options):
    peft = library("peft")
    of = model()
    torch.manual_seed(1)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "lm_head"], **options)
    of = peft.get_peft_model(of, config)
    with torch.no_grad():
        for name, p in of.named_parameters():
            if "lora_B" in name:  # else the adapters add nothing at first
                p.copy_(0.3 * torch.randn(p.shape))
    return of


class ByLogits:
    """Stands for the autograd Function of TRL's head; computes with the logits of a model's."""

    def __init__(self, of):
        self.head, self.calls = of.get_base_model().lm_head, 0

    def apply(self, x, w, b, t, temperature, size, cap=None, scale=1.0, outputs=()):
        self.calls += 1
        found = of_logits(self.head(x).double(), t, temperature, cap, scale)
        logits = [value.float() if value.is_floating_point() else value for value in found]
        return logits[0], *(v if n in outputs else None
                            for n, v in zip(EVERYTHING, logits[1:], strict=True))  # fmt: skip


NOTHING = type("Nothing", (), {})


@pytest.mark.parametrize("kind", OPTIONS)
def test_trainers_train_adapters_on_the_head(trl, kind, monkeypatch):
    """As they would with the plain model's logits, which they do not have. DPO's reference is the
    model with its adapters disabled."""
    of = adapted()
    by_logits = ByLogits(of)
    with monkeypatch.context() as m:
        name = f"trl.trainer.{kind.lower()}_trainer"
        m.setattr(importlib.import_module(name), "BaseTunerLayer", NOTHING)
        m.setattr(trl.trainer.utils, "_ChunkedLogProbFunction", by_logits)
        expected, weights = logged(trl, kind, OPTIONS[kind], of)
    assert by_logits.calls
    patch = ms.integrations.trl.patch_lm_head()
    try:
        of = adapted()
        before = of.get_base_model().lm_head.lora_B["default"].weight.detach().clone()
        found, trained = logged(trl, kind, OPTIONS[kind], of)
    finally:
        patch.remove()
    after = of.get_base_model().lm_head.lora_B["default"].weight
    assert not torch.equal(after, before) and LOGGED[kind] <= {*found[0]}
    assert len(found) == len(expected) > 3
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, rel=1e-3, abs=1e-5)
    torch.testing.assert_close(trained, weights, rtol=1e-3, atol=1e-4)


def test_adapters_that_are_refused(trl):
    def trainer(of, kind="SFT", **options):
        config = getattr(trl, f"{kind}Config")(
            output_dir="out", use_cpu=True, report_to=[], bf16=False, **options
        )
        more = {"reward_funcs": lambda completions, **_: [0.0]} if kind == "GRPO" else {}
        return getattr(trl, f"{kind}Trainer")(
            of, args=config, train_dataset=rows(kind), processing_class=tokenizer(), **more
        )

    with pytest.raises(ValueError, match="PEFT adapter to `lm_head` is not supported"):
        trainer(adapted())
    patch = ms.integrations.trl.patch_lm_head()
    try:
        with pytest.raises(ValueError, match="PEFT adapter to `lm_head` is not supported"):
            trainer(adapted(use_dora=True))
        with pytest.raises(ValueError, match="cast_lm_head_to_fp32=True is not possible with adap"):
            trainer(of := adapted(), "GRPO", cast_lm_head_to_fp32=True)
        assert "forward" not in vars(of.get_base_model().lm_head)
        made = trainer(adapted())
        ids = torch.randint(3, 300, (2, 7))
        given = {"input_ids": ids, "labels": ids, "fused_lm_head": True}
        with_adapters = made.model(**given).loss
        torch.testing.assert_close(with_adapters, made.model(input_ids=ids, labels=ids).loss)
        with made.model.disable_adapter():
            torch.testing.assert_close(
                made.model(**given).loss, model()(input_ids=ids, labels=ids).loss
            )
        assert set(inspect.signature(made.model.get_base_model().forward).parameters) >= {"labels"}
    finally:
        patch.remove()
    with pytest.raises(RuntimeError, match="TRL's head would ignore the adapters"):
        made.model(**given)
    with pytest.raises(ValueError, match="PEFT adapter to `lm_head` is not supported"):
        trainer(adapted())


@pytest.mark.each_value
@pytest.mark.parametrize("technique", ["gradients elsewhere", "optimizer in backward"])
@pytest.mark.parametrize("kind", OPTIONS)
def test_trainers_that_fit(trl, kind, technique):
    """TRL's clip by the norm of all, as others do, which leaves no steps in backward."""
    options = OPTIONS[kind]
    if technique == "optimizer in backward":
        options = {**options, "max_grad_norm": 0}
    expected, weights = logged(trl, kind, options)
    fit = ms.integrations.transformers.Fit("1GB", technique=technique, verbose=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # what TRL makes of logits is not predicted
        found, trained = logged(trl, kind, options, callbacks=[fit])
    assert fit.fitted.technique == technique
    assert [one["loss"] for one in found if "loss" in one] == [
        one["loss"] for one in expected if "loss" in one
    ]
    assert all(map(torch.equal, trained, weights))


@pytest.mark.filterwarnings("ignore::UserWarning")  # peft's
@pytest.mark.parametrize("reference", ["of its own", "without adapters"])
def test_preferences_within_a_budget(trl, reference):
    """The reference model is predicted, and the losses are the plain ones."""
    peft = library("peft")
    losses = []
    for fit in (None, ms.integrations.transformers.Fit("1GB", technique="checkpoint by block")):
        config = trl.DPOConfig(
            output_dir="out", use_cpu=True, report_to=[], disable_tqdm=True, save_strategy="no",
            per_device_train_batch_size=2, max_steps=3, logging_steps=1, learning_rate=1e-2,
            bf16=False, gradient_checkpointing=False,
        )  # fmt: skip
        more = {"ref_model": model(2)}
        if reference == "without adapters":
            adapters = {"target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}
            more = {"peft_config": peft.LoraConfig(r=4, **adapters)}
        torch.manual_seed(0)
        trainer = trl.DPOTrainer(
            model(2), args=config, train_dataset=rows("DPO"), processing_class=tokenizer(),
            callbacks=[] if fit is None else [fit], **more,
        )  # fmt: skip
        trainer.train()
        losses.append([log["loss"] for log in trainer.state.log_history if "loss" in log])
    assert losses[0] == losses[1] and len(losses[0]) == 3
    assert fit.fitted.technique == "checkpoint by block"
    if ms._native.available:
        assert fit.fitted.measured == pytest.approx(fit.fitted.predicted, rel=0.02)


def test_patched_twice_and_other_versions(trl, monkeypatch):
    patch = ms.integrations.trl.patch_lm_head(chunk_size=256)
    with pytest.raises(RuntimeError, match="TRL's head is patched already"):
        ms.integrations.trl.patch_lm_head()
    patch.remove()
    with pytest.raises(ValueError, match="chunk_size must be a positive multiple of 256"):
        ms.integrations.trl.patch_lm_head(chunk_size=100)
    with monkeypatch.context() as m:
        m.delattr(trl.trainer.utils, "_ChunkedLogProbFunction")
        with pytest.raises(RuntimeError, match="has no trl.trainer.utils._ChunkedLogProbFunction"):
            ms.integrations.trl.patch_lm_head()
    theirs = trl.trainer.utils._ChunkedLogProbFunction
    with monkeypatch.context() as m:
        m.delattr(trl.trainer.utils, "add_fused_lm_head")
        with pytest.raises(RuntimeError, match="has no trl.trainer.utils.add_fused_lm_head"):
            ms.integrations.trl.patch_lm_head()
    assert trl.trainer.utils._ChunkedLogProbFunction is theirs


def test_a_model_that_patch_causal_lm_has_patched(trl):
    """TRL's head calls neither the model's head nor its loss."""
    of = model()
    trl.trainer.utils.add_fused_lm_head(of, outputs=("log_probs", "entropy"))
    ids = torch.randint(3, 300, (2, 7))
    expected = of(input_ids=ids, labels=ids, fused_lm_head=True)
    patch = ms.patch_causal_lm(of.train())
    found = of(input_ids=ids, labels=ids, fused_lm_head=True)
    torch.testing.assert_close((found.loss, found.entropy), (expected.loss, expected.entropy))
    plain = of(input_ids=ids, labels=ids)
    assert plain.logits is None
    torch.testing.assert_close(plain.loss, expected.loss)
    patch.remove()
