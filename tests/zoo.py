"""Tiny models of transformers, timm and torch with random weights, chosen by architecture.

Each is small enough for a step of less than 0.1 s on one core, and large enough for activations of
a megabyte or more, so that shares of them mean something. Libraries are imported when a model is
built, or the test is skipped.

    entry = zoo.ENTRIES["gpt2"]
    model = entry.build()  # in train mode
    loss = entry.batch(model)  # draws a batch: a call without arguments that gives the loss
    loss().backward()
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from libraries import library
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY = 96
Loss = Callable[[], Tensor]


@dataclasses.dataclass(frozen=True)
class Entry:
    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[nn.Module], Loss]

    def build(self) -> nn.Module:
        torch.manual_seed(0)
        return self.make().train()


def _tokens(model: nn.Module, batch: int = 4, length: int = 48) -> Loss:
    """A causal or masked language model of transformers, which computes the loss itself."""
    ids = torch.randint(5, VOCABULARY, (batch, length))
    return lambda: model(input_ids=ids, labels=ids).loss


def _labelled_images(model: nn.Module, batch: int = 8, size: int = 32) -> Loss:
    images, labels = torch.randn(batch, 3, size, size), torch.randint(10, (batch,))
    return lambda: F.cross_entropy(model(images), labels)


def _pixels(model: nn.Module) -> Loss:
    """An image classifier of transformers."""
    images, labels = torch.randn(8, 3, 32, 32), torch.randint(10, (8,))
    return lambda: model(pixel_values=images, labels=labels).loss


def _sequences(*shape: int) -> Callable[[nn.Module], Loss]:
    """Of a module whose result, or the first of its results, is a sequence."""

    def batch(model: nn.Module) -> Loss:
        x = torch.randn(shape)

        def loss() -> Tensor:
            y = model(x)
            return (y if isinstance(y, Tensor) else y[0]).square().mean()

        return loss

    return batch


def _speech(model: nn.Module) -> Loss:
    features, ids = torch.randn(2, 16, 96), torch.randint(5, VOCABULARY, (2, 24))
    return lambda: model(input_features=features, labels=ids).loss


def _pairs(model: nn.Module) -> Loss:
    ids, images = torch.randint(5, VOCABULARY, (8, 16)), torch.randn(8, 3, 32, 32)
    return lambda: model(input_ids=ids, pixel_values=images, return_loss=True).loss


def _transformers(
    kind: str, head: str, attention: str | None = None, **options: Any
) -> Callable[[], nn.Module]:
    """A model of ``AutoModelFor<head>`` (of ``AutoModel`` where it is empty), without weights."""

    def make() -> nn.Module:
        transformers = library("transformers")
        config = transformers.AutoConfig.for_model(kind, **options)
        auto = getattr(transformers, f"AutoModel{head and 'For' + head}")
        more = {"attn_implementation": attention} if attention else {}
        return auto.from_config(config, **more)

    return make


def _timm(name: str, **options: Any) -> Callable[[], nn.Module]:
    return lambda: library("timm").create_model(name, num_classes=10, **options)


# What the makers of configurations call the same sizes. Where a number of tokens is given, it is
# the one of padding or of an end, which has to lie in the vocabulary.
_LLAMA = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "use_cache": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_BERT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
_GPT = {
    "vocab_size": VOCABULARY,
    "n_embd": 64,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 64,
    "use_cache": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_BART = {
    "vocab_size": VOCABULARY,
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
    "max_position_embeddings": 64,
    "use_cache": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
}
_VIT = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 4,
    "num_labels": 10,
}
_CAUSAL: dict[str, tuple[str, str | None, dict[str, Any]]] = {
    "gpt2": ("gpt2", None, _GPT),
    "gpt2 eager": ("gpt2", "eager", _GPT),
    "gpt_neo": (
        "gpt_neo",
        None,
        {
            **_LLAMA,
            "num_hidden_layers": 2,
            "window_size": 16,
            "attention_types": [[["global", "local"], 1]],
        },
    ),
    "gpt_neox": ("gpt_neox", None, _LLAMA),
    "opt": (
        "opt",
        None,
        {**_LLAMA, "ffn_dim": 128, "word_embed_proj_dim": 64, "dropout": 0.1},
    ),
    "bloom": ("bloom", None, {**_LLAMA, "n_layer": 3, "n_head": 4, "hidden_dropout": 0.1}),
    "llama": ("llama", "sdpa", _LLAMA),
    "llama eager": ("llama", "eager", _LLAMA),
    "mistral": ("mistral", None, {**_LLAMA, "sliding_window": 16}),
    "mixtral": (
        "mixtral",
        None,
        {**_LLAMA, "num_hidden_layers": 2, "num_local_experts": 4, "output_router_logits": True},
    ),
    "qwen2": ("qwen2", None, _LLAMA),
    "qwen3": ("qwen3", None, {**_LLAMA, "head_dim": 16}),
    "gemma": ("gemma", None, {**_LLAMA, "head_dim": 16}),
    "gemma2 eager": ("gemma2", "eager", {**_LLAMA, "head_dim": 16, "sliding_window": 16}),
    "phi": ("phi", None, {**_LLAMA, "resid_pdrop": 0.1}),
    "phi3": ("phi3", None, _LLAMA),
    "falcon": ("falcon", None, {**_LLAMA, "ffn_hidden_size": 128, "alibi": False}),
    "mpt": ("mpt", None, {"vocab_size": VOCABULARY, "d_model": 64, "n_heads": 4, "n_layers": 3}),
    "stablelm": ("stablelm", None, _LLAMA),
    "olmo2": ("olmo2", None, _LLAMA),
    "cohere": ("cohere", None, _LLAMA),
    "granite": ("granite", None, _LLAMA),
    "mamba": (
        "mamba",
        None,
        {**_LLAMA, "state_size": 8, "num_hidden_layers": 2, "intermediate_size": 128},
    ),
}
_MASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("bert", _BERT),
    "roberta": ("roberta", {**_BERT, "bos_token_id": 1, "eos_token_id": 2}),
    "albert": ("albert", {**_BERT, "embedding_size": 32}),
    "electra": ("electra", {**_BERT, "embedding_size": 64}),
    "deberta-v2": (
        "deberta-v2",
        {**_BERT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
    ),
    "distilbert": (
        "distilbert",
        {**_BERT, "dim": 64, "hidden_dim": 128, "n_layers": 3, "n_heads": 4},
    ),
    "modernbert": (
        "modernbert",
        {
            **_BERT,
            "local_attention": 16,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "cls_token_id": 1,
            "sep_token_id": 2,
        },
    ),
}
_TIMM: dict[str, tuple[str, int, dict[str, Any]]] = {
    "timm resnet": ("test_resnet", 32, {"drop_path_rate": 0.1}),
    "timm efficientnet": ("test_efficientnet", 64, {"drop_path_rate": 0.1}),
    "timm mobilenetv3": ("mobilenetv3_small_050", 64, {}),
    "timm convnext": ("test_convnext", 64, {"drop_path_rate": 0.1}),
    "timm vit": ("test_vit", 64, {"img_size": 64, "drop_path_rate": 0.1, "proj_drop_rate": 0.1}),
    "timm swin": (
        "swin_tiny_patch4_window7_224",
        32,
        {"img_size": 32, "window_size": 4, "embed_dim": 24, "depths": (2, 2), "num_heads": (2, 4)},
    ),
    "timm regnet": ("regnetx_002", 32, {"w0": 16, "depth": 6}),
    "timm densenet": (
        "densenet121",
        32,
        {"growth_rate": 12, "block_config": (3, 3)},
    ),
    "timm maxvit": (
        "maxvit_pico_rw_256",
        32,
        {"img_size": 32, "embed_dim": (32, 64), "depths": (1, 1), "stem_width": 16},
    ),
    "timm coatnet": (
        "coatnet_0_rw_224",
        32,
        {"img_size": 32, "embed_dim": (16, 32, 64, 64), "depths": (1, 1, 1, 1), "stem_width": 16},
    ),
    "timm nfnet": ("test_nfnet", 64, {"drop_path_rate": 0.1}),
    "timm cait": (
        "cait_xxs24_224",
        32,
        {"img_size": 32, "patch_size": 4, "embed_dim": 48, "depth": 2, "num_heads": 4},
    ),
}


class _Block(nn.Module):
    """Of a GPT written by hand: attention in single operators, a mask filled in place."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mix = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1)
        )
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norms[0](x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        weights = F.dropout(scores.masked_fill_(later, -torch.inf).softmax(-1), 0.1)
        x = x + self.out((weights @ v).transpose(1, 2).flatten(2))
        return x + self.mix(self.norms[1](x))


class _Unet(nn.Module):
    """Two levels with a skip, and a sum and ReLUs in place."""

    def __init__(self, width: int) -> None:
        super().__init__()

        def convolutions(inputs: int, outputs: int) -> nn.Module:
            return nn.Sequential(
                nn.Conv2d(inputs, outputs, 3, padding=1),
                nn.BatchNorm2d(outputs),
                nn.ReLU(inplace=True),
                nn.Conv2d(outputs, outputs, 3, padding=1),
                nn.GroupNorm(4, outputs),
                nn.SiLU(inplace=True),
            )

        self.first, self.inner = convolutions(3, width), convolutions(width, 2 * width)
        self.last, self.up = convolutions(3 * width, width), nn.Upsample(scale_factor=2)

    def forward(self, x: Tensor) -> Tensor:
        skip = self.first(x)
        y = self.up(self.inner(F.max_pool2d(skip, 2)))
        y = self.last(torch.cat([skip, y], 1))
        y += skip
        return y


def _mixer() -> nn.Module:
    mixer = library("timm.models.mlp_mixer").MlpMixer
    return mixer(10, 32, patch_size=4, num_blocks=3, embed_dim=64, drop_path_rate=0.1)


def _gpt() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), *(_Block(64, 4) for _ in range(3)), nn.LayerNorm(64))


def _encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    return nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)


def _entries() -> list[Entry]:
    found = [
        Entry(name, _transformers(kind, "CausalLM", attention, **options), _tokens)
        for name, (kind, attention, options) in _CAUSAL.items()
    ]
    found += [
        Entry(name, _transformers(kind, "MaskedLM", **options), _tokens)
        for name, (kind, options) in _MASKED.items()
    ]
    t5 = {"d_kv": 16, "d_ff": 128, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4}
    audio = {"num_mel_bins": 16, "max_source_positions": 48, "max_target_positions": 64}
    towers = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    towers["num_attention_heads"] = 4
    clip = {
        "text_config": {**_BERT, **towers, "bos_token_id": 1, "eos_token_id": 2},
        "vision_config": {**_VIT, **towers},
        "projection_dim": 32,
    }
    swin = {
        "image_size": 32,
        "patch_size": 2,
        "num_labels": 10,
        "embed_dim": 24,
        "depths": [2, 2],
        "num_heads": [2, 4],
        "window_size": 4,
    }
    convnext = {"hidden_sizes": [16, 32], "depths": [2, 2], "num_stages": 2, "patch_size": 2}
    images = "ImageClassification"
    found += [
        Entry("t5", _transformers("t5", "Seq2SeqLM", **{**_BART, **t5}), _tokens),
        Entry("bart", _transformers("bart", "Seq2SeqLM", **_BART), _tokens),
        Entry("whisper", _transformers("whisper", "SpeechSeq2Seq", **{**_BART, **audio}), _speech),
        Entry("clip", _transformers("clip", "", **clip), _pairs),
        Entry("vit", _transformers("vit", images, **_VIT), _pixels),
        Entry("dinov2", _transformers("dinov2", images, **{**_VIT, "mlp_ratio": 2}), _pixels),
        Entry("swin", _transformers("swin", images, **swin), _pixels),
        Entry("convnext", _transformers("convnext", images, num_labels=10, **convnext), _pixels),
    ]
    found += [
        Entry(
            name,
            _timm(model, **options),
            lambda model, size=size: _labelled_images(model, size=size),
        )
        for name, (model, size, options) in _TIMM.items()
    ]
    found += [
        Entry("timm mixer", _mixer, _labelled_images),
        Entry("torch encoder", _encoder, _sequences(8, 48, 64)),
        Entry("torch lstm", lambda: nn.LSTM(64, 96, 2, batch_first=True), _sequences(16, 32, 64)),
        Entry("torch gru", lambda: nn.GRU(64, 96, 2, batch_first=True), _sequences(16, 32, 64)),
        Entry("own gpt", _gpt, _sequences(8, 48, 64)),
        Entry("own unet", lambda: _Unet(16), _sequences(4, 3, 32, 32)),
    ]
    return found


ENTRIES = {entry.name: entry for entry in _entries()}
