"""patch_causal_lm beside the plain run of many architectures, or refused when it is called."""

import copy

import pytest
import torch
import torch.nn.functional as F
from libraries import library
from sampling import share

import memsave_ext as ms
from memsave_ext import _native

LIBRARIES = ["transformers"]
transformers = None  # conftest.py imports it

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "use_cache": False,
}  # fmt: skip
GPT = {
    "vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32, "n_ctx": 32,
    "bos_token_id": 1, "eos_token_id": 2, "use_cache": False,
}  # fmt: skip
MHA = {**SIZES, "num_key_value_heads": 4}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "num_experts": 4,
           "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
           "output_router_logits": True}  # fmt: skip
DEEPSEEK = {
    **MHA, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2,
    "moe_intermediate_size": 16, "first_k_dense_replace": 1, "kv_lora_rank": 8, "q_lora_rank": 8,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
}  # fmt: skip
MAMBA = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}
PADDING = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
CAUSAL_LMS = {
    "gpt2": GPT,
    "gpt_neo": {**SIZES, "num_layers": 2, "attention_types": [[["global", "local"], 1]],
                "num_heads": 4},
    "gpt_neox": MHA,
    "gptj": {**GPT, "rotary_dim": 4},
    "codegen": {**GPT, "rotary_dim": 4},
    "gpt_bigcode": GPT,
    "opt": {**SIZES, "ffn_dim": 48, "word_embed_proj_dim": 32},
    "bloom": {**SIZES, "n_layer": 2, "n_head": 4},
    "llama": SIZES,
    "mistral": SIZES,
    "mixtral": {**SIZES, **EXPERTS},
    "qwen2": SIZES,
    "qwen2_moe": {**SIZES, **EXPERTS},
    "qwen3": {**SIZES, "head_dim": 8},
    "qwen3_moe": {**SIZES, **EXPERTS, "head_dim": 8},
    "gemma": {**SIZES, "head_dim": 8},
    "gemma2": {**SIZES, "head_dim": 8, "final_logit_softcapping": 0.5},
    "gemma3_text": {**SIZES, "head_dim": 8, "final_logit_softcapping": 0.5},
    "phi": MHA,
    "phi3": SIZES,
    "falcon": {**SIZES, "alibi": False},
    "mpt": {"vocab_size": 64, "d_model": 32, "n_heads": 4, "n_layers": 2},
    "starcoder2": SIZES,
    "stablelm": SIZES,
    "olmo": SIZES,
    "olmo2": SIZES,
    "olmoe": {**SIZES, **EXPERTS},
    "cohere": {**SIZES, "logit_scale": 0.3},
    "cohere2": {**SIZES, "logit_scale": 0.3},
    "granite": {**SIZES, "logits_scaling": 8.0},
    "granitemoe": {**SIZES, **EXPERTS, "logits_scaling": 3.0},
    "ctrl": {**GPT, "dff": 48},
    "xglm": {**SIZES, "d_model": 32, "num_layers": 2, "attention_heads": 4, "ffn_dim": 48},
    "biogpt": SIZES,
    "persimmon": MHA,
    "nemotron": SIZES,
    "mamba": MAMBA,
    "mamba2": {**MAMBA, "num_heads": 8, "head_dim": 8, "n_groups": 1, "expand": 2},
    "rwkv": {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "context_length": 32,
             "attention_hidden_size": 32},
    "recurrent_gemma": {**SIZES, "lru_width": 32, "attention_window_size": 8},
    "deepseek_v3": DEEPSEEK,
    "glm": {**SIZES, "head_dim": 8},
    "nanochat": SIZES,
    "bert": {**MHA, "is_decoder": True},
}  # fmt: skip
TEXT = {**SIZES, "head_dim": 8}
VISION = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "image_size": 16, "patch_size": 8, "depth": 1, "embed_dim": 16, "num_heads": 2,
}  # fmt: skip
WITH_IMAGES = ["llava", "idefics3", "internvl", "mistral3", "gemma3", "paligemma", "mllama",
               "qwen2_5_vl", "qwen3_vl"]  # fmt: skip
WIDTHS = {"d_model": 32, "d_ff": 48, "d_kv": 8, "num_heads": 4, "num_layers": 2, "vocab_size": 64,
          "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4,
          "decoder_attention_heads": 4, "decoder_start_token_id": 0, **PADDING}  # fmt: skip
FLOAT32 = ["xglm", "mamba", "mamba2"]  # these compute in it, whatever their dtype is
IN_PYTHON = ["gpt2", "mixtral", "gemma2", "granite", "cohere"]


def made(kind, sizes, auto="AutoModelForCausalLM"):
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **sizes)
    config._experts_implementation = "eager"  # others have no float64
    model = getattr(transformers, auto).from_config(config).double().train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for name in ("dropout", "attention_dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return model


IDS = torch.randint(3, 60, (2, 8), generator=torch.Generator().manual_seed(1))


def step(model, **more):
    labels = IDS.clone()
    labels[0, :3] = -100
    torch.manual_seed(2)
    output = model(**{"input_ids": IDS, "labels": labels, **more})
    output.loss.backward()
    return output, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def double_loss(logits, labels, vocab_size, **options):
    """The models' own loss, without its cast to float32."""
    logits, labels = logits[:, :-1].reshape(-1, vocab_size), labels[:, 1:].reshape(-1)
    return F.cross_entropy(logits, labels)


@pytest.mark.parametrize("kind", CAUSAL_LMS if _native.module is not None else IN_PYTHON)
def test_same_gradients(kind):
    model = made(kind, CAUSAL_LMS[kind])
    if kind == "xglm":
        model = model.float()
    patched = copy.deepcopy(model)
    ms.patch_causal_lm(patched)
    model.loss_function = double_loss
    (plain, expected), (output, found) = step(model), step(patched)
    assert output.logits is None and plain.logits is not None
    torch.testing.assert_close(output.loss.double(), plain.loss.double(), rtol=1e-6, atol=0)
    assert found.keys() == expected.keys()
    for name, right in expected.items():
        scale = max(right.abs().max().item(), 1e-3)
        rtol = 1e-5 if kind in FLOAT32 else 1e-9
        torch.testing.assert_close(found[name], right, rtol=rtol, atol=rtol * scale)


def with_images(kind):
    """A model for images and text, whose sizes are those of its two small parts."""
    parts = {}
    for name in ("text_config", "vision_config"):
        part = getattr(transformers.AutoConfig.for_model(kind), name)
        sizes = dict(TEXT if name == "text_config" else VISION)
        if hasattr(part, "out_hidden_size"):
            sizes["out_hidden_size"] = 32
        if kind.startswith("qwen") and name == "text_config":
            sizes["rope_parameters"] = {"rope_type": "default", "mrope_section": [2, 1, 1]}
        parts[name] = {"model_type": part.model_type, **sizes}
    tokens = {"image_token_id": 60, "image_token_index": 60, "video_token_id": 61}
    return made(kind, {**parts, **tokens}, "AutoModelForImageTextToText")


@pytest.mark.parametrize("kind", WITH_IMAGES if _native.module is not None else ["llava"])
def test_models_for_images_and_text(kind):
    model = with_images(kind)
    more = {}
    if kind == "llava":  # with its images, of four tokens each
        more = {"pixel_values": torch.rand(2, 3, 16, 16).double(), "input_ids": IDS.clone()}
        more["input_ids"][:, 1:5] = 60
    if kind in ("gemma3", "paligemma"):
        more = {"token_type_ids": torch.zeros_like(IDS)}
    patched = copy.deepcopy(model)
    ms.patch_causal_lm(patched)
    (plain, expected), (output, found) = step(model, **more), step(patched, **more)
    assert output.logits is None and plain.logits is not None
    torch.testing.assert_close(output.loss, plain.loss)
    assert found.keys() == expected.keys()
    assert any("vision" in name for name in found) == (kind == "llava")
    for name, right in expected.items():  # the models' own loss is that of float32 logits
        scale = max(right.abs().max().item(), 1e-3)
        torch.testing.assert_close(found[name], right, rtol=1e-5, atol=1e-5 * scale)


@pytest.mark.parametrize("kind", ["t5", "bart", "marian"])
def test_encoders_with_decoders_are_refused(kind):
    model = made(kind, WIDTHS, "AutoModelForSeq2SeqLM")
    with pytest.raises(TypeError, match="an encoder with a decoder.*patch_seq2seq_lm|another loss"):
        ms.patch_causal_lm(model)
    assert not model._forward_hooks and "forward" not in vars(model.get_output_embeddings())


@pytest.mark.parametrize("kind", ["cohere", "gemma2", "granite", "llama"])
def test_zero_heads_and_zero_hidden_states_hide_nothing(kind):
    """What a model does to its logits is the same where all of them are 0 in the first step."""
    model = made(kind, CAUSAL_LMS[kind])
    head = model.get_output_embeddings()
    if head.weight is model.get_input_embeddings().weight:  # then hidden states are 0, too
        head.weight = torch.nn.Parameter(head.weight.detach().clone())
    torch.nn.init.zeros_(head.weight)
    patched = copy.deepcopy(model)
    ms.patch_causal_lm(patched)
    model.loss_function = double_loss
    for _ in range(2):  # in the second the head is no longer 0
        for of in (model, patched):
            of.zero_grad()
            of.grads = step(of)[1]
            with torch.no_grad():
                of.get_output_embeddings().weight.sub_(10 * of.get_output_embeddings().weight.grad)
        for name, right in model.grads.items():
            torch.testing.assert_close(patched.grads[name], right, rtol=1e-9, atol=1e-12)


def changed(change):
    class Changed(transformers.LlamaForCausalLM):
        def forward(self, input_ids, labels=None, **kwargs):
            hidden = self.model(input_ids).last_hidden_state
            logits = change(self, self.lm_head(hidden))
            loss = None
            if labels is not None:
                loss = self.loss_function(logits, labels, self.config.vocab_size)
            return transformers.modeling_outputs.CausalLMOutputWithPast(loss=loss, logits=logits)

    torch.manual_seed(0)
    model = Changed(transformers.LlamaConfig(**SIZES))
    model.temperature = torch.nn.Parameter(torch.tensor(2.0))
    return model


CHANGES = {
    "does more to its logits": [
        lambda model, logits: logits + 1,
        lambda model, logits: logits.clamp(-5, 5),
        lambda model, logits: logits * torch.arange(64),
        lambda model, logits: logits.log_softmax(-1),
        lambda model, logits: logits * 0,
        lambda model, logits: torch.nan * logits,
    ],
    "with parameters that are not the head's": [lambda model, logits: logits * model.temperature],
    "takes a part of its logits": [lambda model, logits: logits[:, :-1]],
    "more than once": [lambda model, logits: logits + model.lm_head(torch.zeros(2, 8, 32))],
}


@pytest.mark.parametrize(
    ("text", "change"), [(text, of) for text, changes in CHANGES.items() for of in changes]
)
def test_other_logits_are_an_error_in_the_first_step(text, change):
    model = changed(change)
    ms.patch_causal_lm(model)
    with pytest.raises(RuntimeError, match=text):
        step(model)
    assert all(p.grad is None for p in model.parameters())


def test_nan_weights_give_a_nan_loss():
    model = made("llama", SIZES)
    torch.nn.init.constant_(model.lm_head.weight, torch.nan)
    ms.patch_causal_lm(model)
    assert step(model)[0].loss.isnan()


@pytest.mark.parametrize("order", share(["after it ran", "before", "in place"], 3))
def test_compiled(order):
    model = made("granite", {**CAUSAL_LMS["granite"], "num_hidden_layers": 0})
    plain = copy.deepcopy(model)
    plain.loss_function = double_loss
    expected = step(plain)[1]
    if order == "before":
        ms.patch_causal_lm(model)
    compiled = model
    if order == "in place":
        model.compile(backend="eager")
    else:
        compiled = torch.compile(model, backend="eager")
    if order == "after it ran":
        assert step(compiled)[0].logits is not None
        model.zero_grad()
    if order != "before":
        patch = ms.patch_causal_lm(compiled)
    output, _ = step(compiled)
    assert output.logits is None
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, expected[name], rtol=1e-9, atol=1e-12)
    if order != "before":
        patch.remove()
        assert step(compiled)[0].logits is not None


@pytest.mark.parametrize(
    "options", [{}, *({"modules_to_save": [name]} for name in ("embed_tokens", "lm_head"))], ids=str
)
def test_peft(options):
    peft = library("peft")
    results = []
    for patched in (False, True):
        model = made("granite", CAUSAL_LMS["granite"])
        config = peft.LoraConfig(
            target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM",
            **options,
        )  # fmt: skip
        torch.manual_seed(5)
        wrapped = peft.get_peft_model(model, config)
        if patched:
            patch = ms.patch_causal_lm(wrapped)
        else:
            model.loss_function = double_loss
        output, grads = step(wrapped)
        assert (output.logits is None) == patched
        results.append(grads)
    assert results[0].keys() == results[1].keys() and len(results[0]) >= 8
    for name, right in results[0].items():
        torch.testing.assert_close(results[1][name], right, rtol=1e-9, atol=1e-12)
    with pytest.raises(RuntimeError, match="is patched already"):
        ms.patch_causal_lm(wrapped.get_base_model())
    patch.remove()
    assert step(wrapped)[0].logits is not None
