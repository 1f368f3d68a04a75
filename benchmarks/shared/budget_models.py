"""What the benchmark of remat's budgets trains: the tests' tiny models of transformers, timm and
torch, and larger ones of this folder; each with its loss in the model and outside of it."""

import functools
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch._dynamo  # the first optimizer would import it, in each process anew: a second
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from shared import remat_models
from shared.common import ROOT

sys.path.insert(0, str(ROOT / "tests"))
import zoo

BLOCK = "block"  # with remat(model): the loss is computed in the block
INSIDE = "module, loss inside"  # remat_module(model), whose result is the loss
OUTSIDE = "module, loss outside"
WAYS = (BLOCK, INSIDE, OUTSIDE)
OWN = ("GPT", "ViT", "DenseNet", "U-Net", "LSTM")
NAMES = (*OWN, *zoo.ENTRIES)
WITHOUT_LIBRARIES = ("own gpt",)  # and small
_TARGETS = ("labels", "return_loss")  # arguments that make a model compute its loss


@dataclass
class Subject:
    model: nn.Module
    loss: Callable[[], Tensor]  # calls the model


class _WithLoss(nn.Module):
    """A model whose result is a loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return _loss_of(self.model(*args, **kwargs), None)


def build(name: str, way: str) -> Subject:
    """A model in training mode with a batch, the same in each process."""
    model, args, kwargs = _own(name) if name in OWN else _of_zoo(name)
    has_loss = any(target in kwargs for target in _TARGETS)
    if way != OUTSIDE and has_loss:
        return Subject(model, lambda: model(*args, **kwargs).loss)
    if way == INSIDE:
        whole = _WithLoss(model)
        return Subject(whole, lambda: whole(*args, **kwargs))
    labels = kwargs.pop("labels", None)
    kwargs.pop("return_loss", None)
    if labels is not None and getattr(model.config, "is_encoder_decoder", False):
        kwargs["decoder_input_ids"] = labels
    return Subject(model, lambda: _loss_of(model(*args, **kwargs), labels))


def _own(name: str) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    torch.manual_seed(0)
    case = remat_models.cases(2)[name]
    return case.build().train(), (torch.randn(case.inputs),), {}


def _of_zoo(name: str) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    entry = zoo.ENTRIES[name]
    model = entry.build()
    return model, *_arguments_of(model, entry.batch(model))


class _Called(Exception):
    pass


def _arguments_of(
    model: nn.Module, loss: Callable[[], Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What ``loss`` calls the model with."""
    found: list[Any] = []

    def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found.extend((args, kwargs))
        raise _Called

    handle = model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        loss()
    except _Called:
        pass
    finally:
        handle.remove()
    args, kwargs = found
    return args, dict(kwargs)


def _loss_of(result: Any, labels: Tensor | None) -> Tensor:
    if not isinstance(result, Tensor):
        names = [name for name in ("logits", "logits_per_text") if hasattr(result, name)]
        result = result[names[0] if names else 0]
    if labels is not None and result.shape[:-1] == labels.shape:
        return F.cross_entropy(result.flatten(0, -2), labels.flatten())
    return result.square().mean()


def checkpoint_blocks(model: nn.Module) -> int:
    """Puts torch's checkpoint around every block, and returns how many there are."""
    blocks = list(_blocks(model))
    for block in blocks:
        forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
        block.forward = forward  # type: ignore[method-assign]
    return len(blocks)


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    """Members of the innermost lists of modules that have several of one kind, which are no single
    layers."""
    found = [block for child in module.children() for block in _blocks(child)]
    if not found and isinstance(module, (nn.ModuleList, nn.Sequential)):
        members = [child for child in module if any(True for _ in child.children())]
        kinds = Counter(map(type, members))
        found = [member for member in members if kinds[type(member)] > 1]
    yield from found
