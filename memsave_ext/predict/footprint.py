"""Predicts what a model and its training hold between and in steps, before it is allocated."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import nn

from ..shared.table import Text, as_text, format_bytes, print_table
from .holdings import KINDS, Amount, Holding, Inventory
from .predict import IN_BACKWARD, Prediction, Predictor

__all__ = ["Amount", "Footprint", "Holding", "Prediction", "footprint"]


@dataclass(frozen=True)
class Footprint:
    """What :func:`footprint` returns.

    Attributes:
        now: what is held now.
        predicted: by mode, what will be held from the second step on. The modes are
            ``"for-loop"``, ``"foreach"`` and ``"fused"``, as torch steps; ``"after backward"`` and
            ``"in backward"``, as memsave_ext's Adam steps with the optimizer's own options; and
            modes that replace some of these options, such as
            ``"in backward, bf16=split, state_dtype=8bit"``. With bf16 the model is predicted as
            converted to bfloat16.
        unpredicted: by mode, why it cannot be predicted or does not exist.
        mode: the mode of :attr:`expected`.
        optimizer: name of the optimizer's class, such as ``"torch.optim.AdamW"``.
    """

    now: Holding
    predicted: dict[str, Prediction]
    unpredicted: dict[str, str]
    mode: str
    optimizer: str

    @property
    def expected(self) -> Prediction:
        """The prediction for the optimizer as it is, or as the argument ``in_backward`` says.

        Raises:
            RuntimeError: there is none for this mode; :attr:`unpredicted` says why.
        """
        if self.mode not in self.predicted:
            raise RuntimeError(
                f"{self.optimizer} cannot be predicted, {self.mode!r}: "
                f"{self.unpredicted[self.mode]}. In predicted there is: {list(self.predicted)}"
            )
        return self.predicted[self.mode]

    def report(self, *, depth: int | None = 1, file: TextIO | None = None) -> Text:
        """Returns as text what is held now, what is expected, and what each mode would need.

        Args:
            depth: how many names deep to list modules; what is nested deeper is added to the module
                above it. None for every module.
            file: where to print it, too; None for nowhere.
        """
        return as_text(lambda text: self._write(depth, text), file)

    def _write(self, depth: int | None, file: TextIO) -> None:
        by_module = self.now.at_depth(depth)
        _print_amounts("Now", "dtype", _by_dtype(self.now), file, elements=True)
        if (expected := self.predicted.get(self.mode)) is None:
            _print_amounts("Now, by module", "module", by_module, file)
        else:
            title = (
                f"Expected at the worst moment of a step: {self.optimizer}, {self.mode}; besides, "
                f"temporaries of {format_bytes(expected.temporaries)}"
            )
            _print_amounts(title, "dtype", _by_dtype(expected.at_peak), file, elements=True)
            by_module = expected.at_peak.at_depth(depth)
            _print_amounts("The same, by module", "module", by_module, file)
        if self.predicted:
            rows = [self._row(mode, prediction) for mode, prediction in self.predicted.items()]
            columns = ["mode", "peak", "between steps", *KINDS, "temporaries"]
            print_table("Modes, without activations", columns, rows, file)
        if self.unpredicted:
            reasons: dict[str, list[str]] = {}
            for mode, why in self.unpredicted.items():
                reasons.setdefault(why, []).append(mode)
            print("Not predicted", file=file)
            for why, names in reasons.items():
                print(f"  {'; '.join(names)}:\n    {why}", file=file)

    def _row(self, mode: str, prediction: Prediction) -> list[str]:
        sizes = (
            prediction.peak,
            prediction.between.bytes,
            *(getattr(prediction.at_peak, kind).bytes for kind in KINDS),
            prediction.temporaries,
        )
        return [f"{mode} (expected)" if mode == self.mode else mode, *map(format_bytes, sizes)]

    def to_json(self, path: str | Path | None = None, *, depth: int | None = None) -> str:
        """Returns everything as JSON, with modules down to ``depth``; also written to ``path``."""
        text = json.dumps(
            {
                "optimizer": self.optimizer,
                "mode": self.mode,
                "now": _json(self.now, depth),
                "predicted": {
                    mode: {
                        "peak": prediction.peak,
                        "temporaries": prediction.temporaries,
                        "between": _json(prediction.between, depth),
                        "at_peak": _json(prediction.at_peak, depth),
                    }
                    for mode, prediction in self.predicted.items()
                },
                "unpredicted": self.unpredicted,
            },
            indent=1,
        )
        if path is not None:
            Path(path).write_text(text + "\n", encoding="utf-8")
        return text


def footprint(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    in_backward: bool | None = None,
) -> Footprint:
    """Counts what parameters (P), gradients (G) and optimizer state (O) need, now and in each mode.

    Nothing of the model's size is allocated, and the model does not run: it can be on the meta
    device or made of FakeTensors::

        with torch.device("meta"):
            model = Transformer(config)
        print(ms.memory.footprint(model).report())
        ms.memory.footprint(model, in_backward=True).expected.peak

    Args:
        model: the model whose parameters and buffers count. Memory that several tensors share
            counts once; of a DTensor, the part in this process counts.
        optimizer: an optimizer of parameters of ``model``; None for torch.optim.AdamW with its
            defaults and all parameters that require a gradient. States of torch's and other
            optimizers are found by steps on the meta device, in which values that Python reads from
            tensors are all 1.
        in_backward: whether :attr:`Footprint.expected` is for steps in backward, by memsave_ext's
            Adam in place of torch's. None: as ``optimizer`` steps.

    Sizes are those that allocators are asked for. G in backward is that of a backward through the
    modules in reverse order, one module's own parameters at a time. Small gradients are collected
    as the optimizer collects them; a gradient to which several modules contribute is kept until
    the last of them. Predictions leave out activations, sparse gradients (whose size depends on the
    batch), buckets of DistributedDataParallel, gathered parameters of FSDP2, workspaces inside
    kernels, and copies of gradients whose strides are not their parameter's. The states of DTensors
    are predicted as those of plain tensors of the local shape; whether they are in 8 or 4 bits is
    decided by the largest shard, so that those of a smaller one may be fewer bytes. In pure Python
    memsave_ext's Adam also makes temporaries of the size of single parameters, which predictions
    leave out.

    Raises:
        TypeError: ``model``, ``optimizer`` or ``in_backward`` is of another type.
        ValueError: a parameter of ``optimizer`` is not in ``model``; ``in_backward`` is given with
            an optimizer that is not Adam or AdamW; a lazy module has not learned its shapes yet.
    """
    _check_types(model, optimizer, in_backward)
    inventory = Inventory.of(model)
    if optimizer is not None:
        _check_same_parameters(inventory, optimizer)
    predictor = Predictor(inventory, optimizer)
    if in_backward and not predictor.has_modes:
        raise ValueError(
            "in_backward=True is for torch.optim.Adam and AdamW, which memsave_ext's replace, and "
            f"for memsave_ext's, got {type(optimizer).__name__}"
        )
    steps_in_backward = predictor.in_backward if in_backward is None else in_backward
    return Footprint(
        now=inventory.holding(optimizer),
        predicted=predictor.predicted,
        unpredicted=predictor.unpredicted,
        mode=IN_BACKWARD if steps_in_backward else predictor.ordinary,
        optimizer=_name(torch.optim.AdamW if optimizer is None else type(optimizer)),
    )


def _name(kind: type) -> str:
    for package in ("torch.optim", "memsave_ext"):  # the packages that export their optimizers
        if kind.__module__.startswith(f"{package}."):
            return f"{package}.{kind.__name__}"
    return f"{kind.__module__}.{kind.__qualname__}"


def _check_types(model: object, optimizer: object, in_backward: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"optimizer must be a torch.optim.Optimizer or None, got {type(optimizer).__name__}"
        )
    if in_backward is not None and not isinstance(in_backward, bool):
        raise TypeError(f"in_backward must be True, False or None, got {in_backward!r}")


def _check_same_parameters(inventory: Inventory, optimizer: torch.optim.Optimizer) -> None:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    foreign = [param for param in params if id(param) not in inventory.slots]
    if foreign:
        raise ValueError(
            f"optimizer has {len(foreign)} of {len(params)} parameters that are not in model, the "
            f"first of shape {list(foreign[0].shape)}. Pass a module that has all of them, for "
            "instance torch.nn.ModuleList([model, other]), or the optimizer that was made from "
            "this model's present parameters."
        )


def _by_dtype(holding: Holding) -> dict[str, dict[str, Amount]]:
    names = {name for amounts in holding.by_dtype.values() for name in amounts}
    return {
        name: {kind: amounts.get(name, Amount()) for kind, amounts in holding.by_dtype.items()}
        for name in sorted(names)
    }


def _print_amounts(
    title: str,
    first: str,
    rows: Mapping[str, Mapping[str, Amount]],
    file: TextIO | None,
    elements: bool = False,
) -> None:
    def cells(name: str, amounts: Mapping[str, Amount]) -> list[str]:
        of_kinds = [amounts.get(kind, Amount()) for kind in KINDS]
        total = sum(of_kinds, Amount())
        return [name, *(_text(amount, elements) for amount in of_kinds), format_bytes(total.bytes)]

    total: dict[str, Amount] = {}
    for amounts in rows.values():
        for kind, amount in amounts.items():
            total[kind] = total.get(kind, Amount()) + amount
    table = [cells(name or "(itself)", amounts) for name, amounts in rows.items()]
    print_table(title, [first, *KINDS, "total"], [*table, cells("total", total)], file)


def _text(amount: Amount, elements: bool) -> str:
    if not amount.bytes:
        return "-"
    size = format_bytes(amount.bytes)
    return f"{size} ({amount.elements:,})" if elements else size


def _json(holding: Holding, depth: int | None) -> dict[str, Any]:
    def plain(table: Mapping[str, Mapping[str, Amount]]) -> dict[str, dict[str, Any]]:
        return {
            name: {key: asdict(amount) for key, amount in amounts.items()}
            for name, amounts in table.items()
        }

    return {
        "bytes": holding.bytes,
        "by_dtype": plain(holding.by_dtype),
        "by_module": plain(holding.at_depth(depth)),
    }
