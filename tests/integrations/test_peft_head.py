"""Language models whose head has LoRA adapters of peft: losses and gradients without logits, beside
those of the plain model."""

import copy

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_equal
from torch import nn

import memsave_ext as ms
from memsave_ext import _native
from memsave_ext.loss_head import chunks, lm_heads

LIBRARIES = ["transformers", "peft"]
transformers = peft = None  # conftest.py imports them

EVERYTHING = (
    "token_losses", "log_probs", "entropy", "lse", "mean_logits", "predicted_tokens",
    "token_accuracy",
)  # fmt: skip
IDS = torch.randint(3, 300, (3, 8), generator=torch.Generator().manual_seed(1))
LABELS = IDS.clone()
LABELS[0, :4] = -100
LORA = {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "lm_head"]}


def plain(kind="Llama", bias=False, **more):
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=300, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, **more,
    )  # fmt: skip
    model = getattr(transformers, f"{kind}ForCausalLM")(config).double()
    if bias:
        model.lm_head.bias = nn.Parameter(torch.linspace(-1, 1, 300).double())
    return model


def adapted(model=None, names=("default",), dtype=torch.float64, **options):
    """With adapters whose every number is of some size: a B of zeros would hide much."""
    torch.manual_seed(1)
    options = {**LORA, **options}
    configs = [peft.LoraConfig(**{**options, "r": options["r"] + n}) for n in range(len(names))]
    wrapped = peft.get_peft_model(plain() if model is None else model, configs[0])
    for name, config in zip(names[1:], configs[1:], strict=True):
        wrapped.add_adapter(name, config)
    with torch.no_grad():
        for name, p in wrapped.named_parameters():
            if "lora_" in name and "magnitude" not in name:
                p.copy_(0.3 * torch.randn(p.shape))
    return wrapped.to(dtype).train()


def double_loss(logits, labels, vocab_size, **options):
    """The models' own loss, without its cast to float32."""
    logits, labels = logits[:, :-1].reshape(-1, vocab_size), labels[:, 1:].reshape(-1)
    return F.cross_entropy(logits, labels)


def gradients(model, seed=2):
    model.zero_grad()
    torch.manual_seed(seed)
    output = model(input_ids=IDS, labels=LABELS)
    output.loss.backward()
    return output, {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_same(model, count, expected=None):
    """Of the patched model beside ``expected`` or a copy of it that is not."""
    right = copy.deepcopy(model) if expected is None else expected
    right.get_base_model().loss_function = double_loss
    patch = ms.patch_causal_lm(model)
    (by, theirs), (output, found) = gradients(right), gradients(model)
    assert by.logits is not None and output.logits is None
    torch.testing.assert_close(output.loss.double(), by.loss, rtol=1e-6, atol=0)
    assert found.keys() == theirs.keys()
    assert sum("lm_head" in name for name in found) == count
    for name, grad in found.items():
        torch.testing.assert_close(grad, theirs[name], rtol=1e-9, atol=1e-12)
    patch.remove()
    return found


ADAPTERS = {
    "plain": {},
    "rsLoRA": {"use_rslora": True},
    "dropout": {"lora_dropout": 0.3},
    "bias of the adapter": {"lora_bias": True},
    "of the head alone": {"target_modules": ["lm_head"]},
    "rank of some layers": {"rank_pattern": {"lm_head": 2}, "alpha_pattern": {"lm_head": 5}},
}


@pytest.mark.each_value
@pytest.mark.parametrize("options", ADAPTERS)
@pytest.mark.parametrize(
    "model",
    [{}, {"bias": True}, {"kind": "Granite", "logits_scaling": 2.0},
     {"kind": "Gemma2", "head_dim": 8, "final_logit_softcapping": 2.0,
      "tie_word_embeddings": False}],
    ids=["Llama", "bias", "scaled", "capped"],
)  # fmt: skip
def test_loss_and_gradients(options, model):
    more = ADAPTERS[options]
    assert_same(adapted(plain(**model), **more), 3 if more.get("lora_bias") else 2)


def test_the_weight_has_no_gradient_computed(monkeypatch):
    model = adapted()
    shapes, real = [], chunks._set_product

    def product(to, *factors):
        shapes.append(tuple(to.shape))
        real(to, *factors)

    monkeypatch.setattr(chunks, "_set_product", product)
    assert_same(model, 2)
    assert {*shapes} == {(256, 4), (44, 4)}


@pytest.mark.parametrize("active", [["default"], ["default", "other", "third"]], ids=len)
def test_several_adapters(active):
    model = adapted(names=("default", "other", "third"), lora_dropout=0.2)
    model.base_model.set_adapter(active)
    found = assert_same(model, 2 * len(active))
    assert all(found[f"base_model.model.lm_head.lora_B.{name}.weight"].any() for name in active)


def test_an_adapter_that_becomes_active_while_it_is_patched():
    model = adapted(names=("default", "other"))
    losses = []
    for patched in (False, True):
        patch = ms.patch_causal_lm(model) if patched else None
        for name in ("default", "other"):
            model.set_adapter(name)
            output, grads = gradients(model)
            assert (output.logits is None) == patched
            assert f"base_model.model.lm_head.lora_B.{name}.weight" in grads
            losses.append(output.loss)
    patch.remove()
    torch.testing.assert_close(losses[:2], losses[2:])
    assert (losses[0] - losses[1]).abs() > 0.01


def test_disabled_adapters():
    """As a reference model: DPO's."""
    model = adapted(lora_dropout=0.3)
    with_adapters = gradients(model)[0].loss
    expected = plain().train()(input_ids=IDS, labels=LABELS).loss
    ms.patch_causal_lm(model)
    for merged in (False, True):
        if merged:
            model.merge_adapter()
        with model.disable_adapter(), torch.no_grad():
            found = model(input_ids=IDS, labels=LABELS)
        assert found.logits is None
        torch.testing.assert_close(found.loss, expected)
    torch.testing.assert_close(gradients(model)[0].loss, with_adapters)


@pytest.mark.parametrize("options", [{}, {"use_dora": True}], ids=["LoRA", "DoRA"])
def test_merged_adapters(options):
    model = adapted(**options)
    expected = model(input_ids=IDS, labels=LABELS).loss
    model.merge_adapter()
    model.requires_grad_(True)  # else nothing has a gradient
    assert_same(model, 1)
    patch = ms.patch_causal_lm(model)
    output = model(input_ids=IDS, labels=LABELS)
    assert output.logits is None
    torch.testing.assert_close(output.loss, expected)
    if options:
        model.unmerge_adapter()
        with pytest.raises(RuntimeError, match="has an adapter 'default' on its output embeddings"):
            model(input_ids=IDS, labels=LABELS)
    else:
        model.unmerge_adapter()
        torch.testing.assert_close(model(input_ids=IDS, labels=LABELS).loss, expected)
    patch.remove()


def test_outputs_besides_and_z_loss():
    model = adapted()
    logits = model(input_ids=IDS).logits
    target = F.pad(LABELS, (0, 1), value=-100)[:, 1:]
    counted, log_p = target != -100, logits.log_softmax(-1)
    right = {
        "token_losses": F.cross_entropy(logits.mT, target, reduction="none"),
        "entropy": torch.where(counted, -(log_p.exp() * log_p).sum(-1), 0.0),
        "lse": logits.logsumexp(-1),
        "mean_logits": torch.where(counted, logits.mean(-1), 0.0),
        "predicted_tokens": logits.argmax(-1),
    }
    ms.patch_causal_lm(model, outputs=EVERYTHING, z_loss=0.1)
    output = model(input_ids=IDS, labels=LABELS)
    for name, value in right.items():
        torch.testing.assert_close(output[name], value.to(output[name].dtype))
    losses = right["token_losses"] + 0.1 * torch.where(counted, right["lse"], 0.0).square()
    torch.testing.assert_close(output.loss.double(), losses[counted].mean(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
@pytest.mark.parametrize("base", [torch.float32, torch.bfloat16])
def test_16_bits(base, autocast):
    """A 16-bit model with float32 adapters, as peft makes them, and autocast: errors at most twice
    those of the plain model."""
    model = adapted(dtype=torch.float32).to(base)
    for name, p in model.named_parameters():
        if "lora" in name:
            p.data = p.data.float()
    exact = copy.deepcopy(model).double()
    exact.get_base_model().loss_function = double_loss
    right = gradients(exact)
    runs = []
    for patched in (False, True):
        patch = ms.patch_causal_lm(model) if patched else None
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            runs.append(gradients(model))
        assert (runs[-1][0].logits is None) == patched
    patch.remove()
    (by, theirs), (output, found) = runs
    assert output.loss.dtype == by.loss.dtype == torch.float32
    assert found.keys() == theirs.keys() == right[1].keys()
    narrow = autocast or base == torch.bfloat16
    least = 1e-3 if narrow else 1e-6
    assert abs(output.loss - right[0].loss) <= 2 * abs(by.loss - right[0].loss) + least
    for name, exactly in right[1].items():
        assert found[name].dtype == theirs[name].dtype
        error, bound = ((of[name].double() - exactly).norm() for of in (found, theirs))
        assert error <= 2 * bound + 1e-7 * exactly.norm()


def test_logits_without_labels_in_eval_and_saved(tmp_path):
    model = adapted(names=("default", "other"))
    patch = ms.patch_causal_lm(model)
    patched = copy.deepcopy(model)
    patch.remove()
    found, right = (of(input_ids=IDS).logits for of in (patched, model))
    assert_equal([found], [right])
    model.eval(), patched.eval()
    found, right = (of(input_ids=IDS, labels=LABELS) for of in (patched, model))
    assert_equal([found.loss, found.logits], [right.loss, right.logits])
    names = ["default", "other", "__base__"]
    found, right = (of(input_ids=IDS, adapter_names=names).logits for of in (patched, model))
    assert_equal([found], [right])
    patched.train().save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(plain(), tmp_path).train()
    assert_equal([loaded(input_ids=IDS).logits], [model.train()(input_ids=IDS).logits])


def test_an_optimizer_that_steps_in_backward():
    runs = []
    for patched in (False, True):
        model = adapted()
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = ms.AdamW(trained, lr=1e-2, in_backward=True)
        if patched:
            ms.patch_causal_lm(model)
        losses = []
        for _ in range(3):
            output = model(input_ids=IDS, labels=LABELS)
            assert (output.logits is None) == patched
            output.loss.backward()
            assert all(p.grad is None for p in trained)
            optimizer.step()
            losses.append(output.loss.item())
        runs.append(losses)
    assert runs[0] == pytest.approx(runs[1], rel=1e-6) and runs[0][2] < runs[0][0]


@pytest.mark.skipif(_native.module is None, reason="remat records natively")
def test_within_a_budget_of_remat():
    model = adapted(lora_dropout=0.2)
    ms.patch_causal_lm(model)
    expected, theirs = gradients(model)
    handle = ms.remat_module(model, budget=0.01)
    for _ in range(3):
        output, found = gradients(model)
        assert output.logits is None
        assert_equal([output.loss, *found.values()], [expected.loss, *theirs.values()])
    handle.remove()


def test_compiled():
    model = adapted(lora_dropout=0.2)
    ms.patch_causal_lm(model)
    expected, theirs = gradients(model)
    compiled = torch.compile(model, backend="eager")
    torch.manual_seed(2)
    model.zero_grad()
    output = compiled(input_ids=IDS, labels=LABELS)
    output.loss.backward()
    assert output.logits is None
    torch.testing.assert_close(output.loss, expected.loss)
    for name, p in model.named_parameters():
        if p.grad is not None:
            torch.testing.assert_close(p.grad, theirs[name], rtol=1e-9, atol=1e-12)


def test_heads_that_are_refused():
    with pytest.raises(TypeError, match="'default' .* not plain LoRA, but DoRA: leave them out"):
        ms.patch_causal_lm(adapted(use_dora=True))
    model = peft.get_peft_model(plain(), peft.LoHaConfig(target_modules=["lm_head"]))
    with pytest.raises(TypeError, match="nor one with LoRA adapters, got Linear with adapters"):
        ms.patch_causal_lm(model)
    model = adapted()
    patch = ms.patch_causal_lm(model)
    with pytest.raises(RuntimeError, match="is patched already"):
        ms.patch_causal_lm(model)
    patch.remove()
    assert model(input_ids=IDS, labels=LABELS).logits is not None


def test_adapters_that_come_after_the_patch():
    model = plain().train()
    patch = ms.patch_causal_lm(model)
    wrapped = peft.get_peft_model(model, peft.LoraConfig(**LORA))
    with pytest.raises(RuntimeError, match="has another head than when it was patched"):
        wrapped(input_ids=IDS, labels=LABELS)
    with pytest.raises(RuntimeError, match="is patched already"):
        ms.patch_causal_lm(wrapped)
    patch.remove()
    ms.patch_causal_lm(wrapped)
    assert wrapped(input_ids=IDS, labels=LABELS).logits is None


def test_an_encoder_with_a_decoder():
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=300, d_model=16, d_ff=16, d_kv=8, num_layers=1, num_heads=2, dropout_rate=0.0,
        tie_word_embeddings=False, decoder_start_token_id=0, pad_token_id=0,
    )  # fmt: skip
    model = transformers.T5ForConditionalGeneration(config)
    model = adapted(model, target_modules=["q", "lm_head"])
    by, theirs = gradients(model)
    ms.patch_seq2seq_lm(model)
    output, found = gradients(model)
    assert output.logits is None and by.logits is not None
    torch.testing.assert_close(output.loss.double(), by.loss.double())
    assert sum("lm_head" in name for name in found) == 2
    torch.testing.assert_close(found, theirs, rtol=1e-5, atol=1e-8)


def test_memory():
    """Of 2048 tokens and 4096 classes: plain takes the logits several times."""
    torch.manual_seed(0)
    of = transformers.LlamaConfig(
        vocab_size=4096, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2,
    )  # fmt: skip
    model = adapted(
        transformers.LlamaForCausalLM(of), target_modules=["lm_head"], dtype=torch.float32
    )
    ids = torch.randint(4096, (16, 128))
    peaks = []
    for patched in (False, True):
        if patched:
            ms.patch_causal_lm(model)
        model.zero_grad()
        with ms.memory.track() as t:
            model(input_ids=ids, labels=ids).loss.backward()
        peaks.append(t.peak)
    logits = ids.numel() * 4096 * 4
    assert peaks[0] > 3 * logits
    # The fallback's kernels have several tensors of a chunk.
    assert peaks[1] < logits / (2 if _native.module is None else 4)


def test_what_is_a_head():
    head = adapted().get_base_model().lm_head
    assert lm_heads.has_lora(head) and not lm_heads.is_linear(head)
    assert lm_heads.is_linear(head.base_layer) and not lm_heads.has_lora(head.base_layer)
    assert not lm_heads.has_lora(None)


def test_a_disabled_copy_of_the_head():
    """The head that was there before it is used, with its logits."""
    config = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"])
    model = peft.get_peft_model(plain(), config).train()
    with model.disable_adapter(), torch.no_grad():
        expected = model(input_ids=IDS, labels=LABELS)
    with torch.no_grad():
        model.base_model.model.lm_head.modules_to_save["default"].weight.mul_(20)
    with_copy = model(input_ids=IDS, labels=LABELS).loss
    assert (with_copy - expected.loss).abs() > 1e-3
    ms.patch_causal_lm(model)
    with model.disable_adapter(), torch.no_grad():
        found = model(input_ids=IDS, labels=LABELS)
    assert torch.equal(found.loss, expected.loss) and torch.equal(found.logits, expected.logits)
    again = model(input_ids=IDS, labels=LABELS)
    assert again.logits is None
    torch.testing.assert_close(again.loss, with_copy)
