"""checkpoint_modules on transformers' architectures, whose blocks fill caches."""

import copy
import inspect
import logging
import warnings

import pytest
import torch
from libraries import library

import memsave_ext as ms
from memsave_ext.checkpoint import models

LIBRARIES = ["transformers", "transformers.modeling_layers"]
transformers = modeling_layers = None  # conftest.py imports them

logging.getLogger("transformers").setLevel(logging.ERROR)

SMALL = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 40,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = SMALL | {"num_key_value_heads": 1}
BOTH = {
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "vocab_size": 40,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
EAGER = {"attn_implementation": "eager"}
# How many blocks each has: 2, or 2 of the encoder and 2 of the decoder.
MODELS = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", GROUPED, 2),
    "llama, eager": ("LlamaForCausalLM", "LlamaConfig", GROUPED | EAGER, 2),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", GROUPED | {"head_dim": 8}, 2),
    "mistral": ("MistralForCausalLM", "MistralConfig", GROUPED, 2),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", GROUPED | {"num_local_experts": 4}, 2),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", GROUPED, 2),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", GROUPED, 2),
    "falcon": ("FalconForCausalLM", "FalconConfig", SMALL, 2),
    "bloom": ("BloomForCausalLM", "BloomConfig", SMALL, 2),
    "neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", SMALL, 2),
    "mamba": ("MambaForCausalLM", "MambaConfig", SMALL | {"state_size": 4}, 2),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", SMALL | {"n_positions": 32}, 2),
    "opt": (
        "OPTForCausalLM",
        "OPTConfig",
        SMALL | {"ffn_dim": 32, "max_position_embeddings": 32, "word_embed_proj_dim": 16},
        2,
    ),
    "bert": ("BertForMaskedLM", "BertConfig", SMALL, 2),
    "bert, a decoder": ("BertLMHeadModel", "BertConfig", SMALL | {"is_decoder": True}, 2),
    "roberta": ("RobertaForMaskedLM", "RobertaConfig", SMALL, 2),
    "t5": (
        "T5ForConditionalGeneration",
        "T5Config",
        {
            "d_model": 16,
            "d_ff": 32,
            "d_kv": 8,
            "num_layers": 2,
            "num_heads": 2,
            "vocab_size": 40,
            "decoder_start_token_id": 0,
        },
        4,
    ),
    "bart": (
        "BartForConditionalGeneration",
        "BartConfig",
        BOTH | {"max_position_embeddings": 32},
        4,
    ),
    "whisper": (
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        BOTH | {"max_source_positions": 16, "max_target_positions": 16, "num_mel_bins": 8},
        4,
    ),
    "vit": (
        "ViTForImageClassification",
        "ViTConfig",
        SMALL | {"image_size": 8, "patch_size": 4, "num_labels": 3},
        2,
    ),
}


def model_of(name):
    kind, config, options, _ = MODELS[name]
    torch.manual_seed(0)
    return getattr(transformers, kind)(getattr(transformers, config)(**options)).train()


def batch_of(name):
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 40, (2, 8), generator=generator)
    if name == "vit":
        images = torch.randn(2, 3, 8, 8, generator=generator)
        return {"pixel_values": images, "labels": torch.tensor([0, 2])}
    if name == "whisper":
        return {"input_features": torch.randn(2, 8, 32, generator=generator), "labels": ids}
    return {"input_ids": ids, "labels": ids}


def step(model, name, **options):
    torch.manual_seed(3)
    model.zero_grad()
    loss = model(**batch_of(name), **options).loss
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters())]


def assert_same(left, right):
    assert sum(gradient is not None for gradient in left) > 10
    for a, b in zip(left, right, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.filterwarnings("ignore:checkpoint_modules. .* is called without its cache")
def test_the_same_step_as_without_it(name):
    model = model_of(name)
    cached = step(copy.deepcopy(model), name)
    # A cache copies keys and values, and what BLAS makes of other strides can differ in last bits.
    has_cache = "use_cache" in inspect.signature(model.forward).parameters
    without = {"use_cache": False} if has_cache else {}
    expected = step(copy.deepcopy(model), name, **without)
    torch.testing.assert_close(cached[0], expected[0], atol=1e-3, rtol=0)
    handle = ms.checkpoint_modules(model, modeling_layers.GradientCheckpointingLayer)
    assert len(handle.modules) == MODELS[name][3]
    seen = []
    for block in handle.modules:
        part = next(
            m for m in block.modules() if isinstance(m, torch.nn.Linear | torch.nn.LayerNorm)
        )
        part.register_forward_pre_hook(lambda m, _: seen.append((ms.is_recomputing(), id(m))))
    for _ in range(2):
        assert_same(expected, step(model, name))
    again = [number for recomputing, number in seen if recomputing]
    assert len(again) == 2 * len(set(again)) == 2 * len(handle.modules)


@pytest.fixture
def llama():
    model = model_of("llama, eager")
    ms.checkpoint_modules(model, modeling_layers.GradientCheckpointingLayer)
    return model


def test_a_warning_once(llama):
    models._warn_once.cache_clear()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        step(llama, "llama")
        step(llama, "llama")
    told = [str(w.message) for w in found if "is called without its cache" in str(w.message)]
    assert len(told) == 1 and "LlamaDecoderLayer" in told[0]
    models._warn_once.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(llama, "llama", use_cache=False)


def test_without_gradients_the_cache_is_used(llama):
    ids = batch_of("llama")["input_ids"]
    plain = model_of("llama, eager")
    with torch.no_grad():
        cache = llama(ids).cache
        assert cache.get_seq_length() == 8
        assert torch.equal(
            llama(ids, cache=cache).logits, plain(ids, cache=plain(ids).cache).logits
        )
    assert torch.equal(
        llama.generate(ids, max_new_tokens=4, do_sample=False),
        plain.generate(ids, max_new_tokens=4, do_sample=False),
    )


def test_a_cache_with_content_is_an_error(llama):
    """transformers would go on without it: another function."""
    with torch.no_grad():
        cache = llama(batch_of("llama")["input_ids"]).cache
    with pytest.raises(RuntimeError, match="LlamaDecoderLayer is called with a cache that holds 8"):
        step(llama, "llama", cache=cache)
    assert cache.get_seq_length() == 8


def test_blocks_given_a_cache_by_position():
    utils = library("transformers.cache_utils")

    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(4, 4)

        def forward(self, x, cache, other=None):
            return self.linear(x) * (2 if cache is None else 3)

    block, x = Block(), torch.randn(2, 4)
    ms.checkpoint_modules(block, Block)
    with pytest.warns(UserWarning, match="Block is called without its cache"):
        assert torch.equal(block(x, utils.DynamicCache()), block.linear(x) * 2)
    assert torch.equal(block(x, "anything else"), block.linear(x) * 3)


def test_torch_compile_is_told_the_same(llama):
    plain = model_of("llama, eager")
    for model in (plain, llama):
        model.model.layers = model.model.layers[:1]  # each takes seconds
    expected = step(plain, "llama")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = torch.compile(llama, backend="eager")
        actual = step(compiled, "llama")
    for a, b in zip(expected, actual, strict=True):
        torch.testing.assert_close(a, b)
