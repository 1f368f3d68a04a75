"""One row of real_limit.py: a model of real size, trained by one method in a process of its own.

The process limits itself to so many bytes of private memory (RLIMIT_DATA) before it makes the
model. It prints a line of JSON for what it begins with, for each step, and for how it ended.
"""

import argparse
import functools
import gc
import json
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import memsave_ext as ms
from memsave_ext.predict.techniques import blocks_of
from shared.adam_methods import LR, VisionTransformer, tutorial
from shared.common import ROOT
from shared.real_models import METHODS, SHAPES, Format, Shape, format_of

CHUNK = 128  # tokens of torch's loss in chunks
# What exceptions say where there is no memory, beside those that have a class for it.
NO_MEMORY = ("can't allocate memory", "Cannot allocate memory", "bad_alloc", "not enough memory")


def build(shape: Shape, dtype: torch.dtype) -> nn.Module:
    """With random weights, which are made in ``dtype`` and once."""
    torch.set_default_dtype(dtype)
    try:
        return _language_model(shape) if shape.kind != "vit" else _vision_transformer(shape)
    finally:
        torch.set_default_dtype(torch.float32)


def _vision_transformer(shape: Shape) -> nn.Module:
    model = VisionTransformer(224, 16, shape.width, shape.heads, shape.depth)
    assert model.head.out_features == shape.vocabulary
    return model


def _language_model(shape: Shape) -> nn.Module:
    sys.path.insert(0, str(ROOT / "tests"))
    from libraries import library

    transformers = library("transformers")
    if shape.kind == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=shape.vocabulary, n_embd=shape.width, n_layer=shape.depth,
            n_head=shape.heads, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
        )  # fmt: skip
        return transformers.GPT2LMHeadModel(config)
    config = transformers.LlamaConfig(
        vocab_size=shape.vocabulary, hidden_size=shape.width, num_hidden_layers=shape.depth,
        num_attention_heads=shape.heads, num_key_value_heads=shape.key_value_heads,
        intermediate_size=shape.inner, max_position_embeddings=2048, use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


class Trainer:
    """A model and the steps of one method; ``folder`` is for what is moved to a disk."""

    def __init__(self, shape: Shape, method: str, form: Format, folder: str) -> None:
        torch.manual_seed(0)
        if shape.kind == "vit":
            self.x = torch.randn(shape.batch, 3, 224, 224)
            self.y = torch.arange(shape.batch)
        else:
            self.x = torch.randint(shape.vocabulary, (shape.batch, shape.tokens))
            self.y = self.x
        self.x = self.x.to(form.dtype) if self.x.is_floating_point() else self.x
        self.has_head = shape.kind != "vit"
        made = functools.partial(build, shape, form.dtype)
        self.model: Any = ms.weights_on(made, folder).model if form.weights_elsewhere else made()
        ways = self._plain, self._torchs, self._ours, self._ours, self._moving
        self.step = dict(zip(METHODS, ways, strict=True))[method](form, folder)

    def loss(self) -> Tensor:
        if self.has_head:
            return self.model(input_ids=self.x, labels=self.y).loss
        return F.cross_entropy(self.model(self.x).float(), self.y)

    def _plain(self, form: Format, folder: str) -> Callable[[], Tensor]:
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=LR, fused=True)

        def step() -> Tensor:
            loss = self.loss()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return step

    def _torchs(self, form: Format, folder: str) -> Callable[[], Tensor]:
        """A checkpoint of each block, the loss in chunks, the tutorial's optimizer in backward."""
        for block in blocks_of(self.model):
            forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
            block.forward = forward  # type: ignore[method-assign]
        backward = tutorial(fused=True)(list(self.model.parameters()))

        def step() -> Tensor:
            loss = self._loss_in_chunks() if self.has_head else self.loss()
            backward(loss.backward)
            return loss.detach()

        return step

    def _loss_in_chunks(self) -> Tensor:
        hidden = self.model.base_model(input_ids=self.x)[0][:, :-1].flatten(0, 1)
        target = self.y[:, 1:].flatten()

        def part(hidden: Tensor, target: Tensor) -> Tensor:
            return F.cross_entropy(self.model.lm_head(hidden).float(), target, reduction="sum")

        parts = [
            checkpoint(part, hidden[i : i + CHUNK], target[i : i + CHUNK], use_reentrant=False)
            for i in range(0, len(target), CHUNK)
        ]
        return torch.stack(parts).sum() / len(target)

    def _ours(self, form: Format, folder: str) -> Callable[[], Tensor]:
        """The loss without logits, Adam in backward, remat within what is free."""
        if self.has_head:
            ms.patch_causal_lm(self.model)
        optimizer = ms.AdamW(self.model.parameters(), lr=LR, in_backward=True, **form.options)
        return self._within_budget(optimizer)

    def _moving(self, form: Format, folder: str) -> Callable[[], Tensor]:
        """As before, with states and activations in files, and weights where they do not fit."""
        if self.has_head:
            ms.patch_causal_lm(self.model)
        optimizer = ms.AdamW(
            self.model.parameters(), lr=LR, in_backward=True, states_on=folder, **form.options
        )
        return self._within_budget(optimizer, offload=folder)

    def _within_budget(
        self, optimizer: torch.optim.Optimizer, **options: Any
    ) -> Callable[[], Tensor]:
        def step() -> Tensor:
            with ms.remat(self.model, budget="auto", optimizer=optimizer, **options):
                loss = self.loss()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return step


def status(name: str) -> int:
    """Bytes that the system counts for this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name + ":")) * 1024


def disk_bytes() -> tuple[int, int]:
    """Bytes that this process has had read from a disk, and written; what the page cache has is
    not read."""
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["read_bytes"]), int(lines["write_bytes"])


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def train(shape: Shape, method: str, form: Format, options: argparse.Namespace) -> None:
    trainer = Trainer(shape, method, form, options.folder)
    count = sum(p.numel() for p in trainer.model.parameters())
    assert count == shape.parameters, count
    say(built=status("VmData"))
    for _ in range(options.steps):
        start = time.perf_counter(), time.process_time(), *disk_bytes()
        loss = trainer.step().item()
        ends = time.perf_counter(), time.process_time(), *disk_bytes()
        seconds, cpu, read, written = (e - b for e, b in zip(ends, start, strict=True))
        say(loss=loss, seconds=seconds, cpu_seconds=cpu, disk_bytes=[read, written])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", choices=SHAPES)
    parser.add_argument("method", choices=METHODS)
    parser.add_argument("limit", type=int, help="bytes")
    parser.add_argument("--folder", required=True, help="of a disk, for what is moved")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    shape = SHAPES[options.model]
    form = format_of(shape, options.method, options.limit)
    resource.setrlimit(resource.RLIMIT_DATA, (options.limit, options.limit))
    say(form=form.name, before=status("VmData"))
    died = None
    try:
        train(shape, options.method, form, options)
    except (MemoryError, torch.OutOfMemoryError, RuntimeError, OSError) as error:
        is_memory = isinstance(error, (MemoryError, torch.OutOfMemoryError))
        if not is_memory and not any(text in str(error) for text in NO_MEMORY):
            raise
        died = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    gc.collect()
    say(peak=status("VmHWM"), died=died)
    return 0


if __name__ == "__main__":
    sys.exit(main())
