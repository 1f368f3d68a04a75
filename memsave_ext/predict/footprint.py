"""Predicts what a model and its training hold between and in steps, before it is allocated."""

from __future__ import annotations

import itertools
import json
import textwrap
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor, nn
from torch.utils._foreach_utils import _get_foreach_kernels_supported_devices

from ..adam import SGD, AdamW, Lion, formats, in_backward, modes
from ..adam.native import Native
from ..adam.own_optimizer import OwnStep
from ..adam.place import Place
from ..adam.rules import rule_of
from ..adam.states import check, make_state
from ..shared.checks import check_bool
from ..shared.dtensor import as_placed
from ..shared.table import Text, as_text, format_bytes, print_table
from . import footprint_step
from .footprint_step import FootprintStep, Make
from .holdings import KINDS, Amount, Entry, Holding, Inventory, Slot, Tally, holding_of

__all__ = ["Amount", "Footprint", "Holding", "ModeFootprint", "footprint"]

FOR_LOOP, FOREACH, FUSED = "for-loop", "foreach", "fused"
AFTER, IN_BACKWARD = "after backward", "in backward"
# Of a group, what torch's optimizers do not take.
_NOT_TORCHS = {*modes.DEFAULTS, "params", "param_names"}
# The state formats that an option selects; None: the option is not given.
_STATE_FORMATS = (None, *(row for row in formats.STATE_FORMATS if row.option is not None))


@dataclass(frozen=True)
class ModeFootprint:
    """What one way to step will hold, without activations.

    Attributes:
        between: what is held from ``optimizer.zero_grad()`` to the next backward.
        at_peak: what is held at the worst moment of a step, in its backward or in
            ``optimizer.step()``.
        temporaries: bytes of the intermediate tensors of ``optimizer.step()`` at that moment.
    """

    between: Holding
    at_peak: Holding
    temporaries: int

    @property
    def peak(self) -> int:
        """Bytes at the worst moment of a step."""
        return self.at_peak.bytes + self.temporaries


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
    predicted: dict[str, ModeFootprint]
    unpredicted: dict[str, str]
    mode: str
    optimizer: str

    @property
    def expected(self) -> ModeFootprint:
        """The prediction for the optimizer as it is, or as the argument ``in_backward`` says.

        Raises:
            RuntimeError: there is none for this mode; :attr:`unpredicted` says why.
        """
        if self.mode not in self.predicted:
            raise RuntimeError(
                f"what {self.optimizer} needs in mode {self.mode!r} cannot be predicted: "
                f"{self.unpredicted[self.mode]}. Modes that are predicted: {list(self.predicted)}"
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
                f"Expected at the peak of a step: {self.optimizer}, {self.mode}; temporaries of "
                f"{format_bytes(expected.temporaries)} come on top"
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

    def _row(self, mode: str, prediction: ModeFootprint) -> list[str]:
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
            defaults and all parameters that require a gradient. It is the same optimizer that
            steps on fake tensors, as :func:`predict` has it.
        in_backward: whether :attr:`Footprint.expected` is for steps in backward, of torch's Adam by
            memsave_ext's. None: as ``optimizer`` steps.

    Sizes are those that allocators are asked for. G is that of steps on fake tensors, whose
    backward goes through the modules in reverse order, one module's own parameters at a time, on
    one device. The optimizer's hooks run in it, which step parameters, or have gradients lie
    elsewhere. A gradient to which several modules contribute is kept until the last of them.
    Predictions leave out activations, sparse gradients (whose size depends on the batch), buckets
    of DistributedDataParallel, gathered parameters of FSDP2, workspaces inside kernels, and copies
    of gradients whose strides are not their parameter's. The states of DTensors are predicted as
    those of plain tensors of the local shape; whether they are in 8 or 4 bits is decided by the
    largest shard, so that those of a smaller one may be fewer bytes. In pure Python memsave_ext's
    Adam also makes temporaries of the size of single parameters, which predictions leave out.

    Raises:
        TypeError: ``model``, ``optimizer`` or ``in_backward`` is of another type.
        ValueError: a parameter of ``optimizer`` is not in ``model``; ``in_backward`` is given with
            an optimizer that is neither torch's Adam or AdamW, nor memsave_ext's, nor one that
            :func:`memsave_ext.in_backward` has taken; a lazy module has not learned its shapes yet.
    """
    _check_types(model, optimizer, in_backward)
    inventory = Inventory.of(model)
    if optimizer is not None:
        _check_same_parameters(inventory, optimizer)
    ways = _Modes(inventory, optimizer)
    if in_backward and IN_BACKWARD not in {*ways.predicted, *ways.unpredicted}:
        raise ValueError(
            "in_backward=True is only for Adam and AdamW of torch.optim, optimizers of memsave_ext "
            f"and those that ms.in_backward() has taken, got {type(optimizer).__name__}"
        )
    steps_in_backward = ways.in_backward if in_backward is None else in_backward
    return Footprint(
        now=inventory.holding(optimizer),
        predicted=ways.predicted,
        unpredicted=ways.unpredicted,
        mode=IN_BACKWARD if steps_in_backward else ways.ordinary,
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
    check_bool("in_backward", in_backward, none=True)


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
        row = [amounts.get(kind, Amount()) for kind in KINDS]
        total = sum(row, Amount())
        return [name, *(_text(amount, elements) for amount in row), format_bytes(total.bytes)]

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


class _Unpredictable(Exception):
    """A mode has no :class:`ModeFootprint`; the message says why."""


class _Modes:
    """Predicts all modes for a model and its optimizer, torch.optim.AdamW if that is None.

    Attributes:
        predicted, unpredicted: by name of the mode, what it will hold or why that is not known.
        ordinary: the mode in which the optimizer steps when it steps after backward.
        in_backward: whether the optimizer steps in backward.
        has_modes: whether the optimizer is memsave_ext's, or its Adam or AdamW can take its place.
    """

    def __init__(self, inventory: Inventory, optimizer: torch.optim.Optimizer | None) -> None:
        self._inventory = inventory
        self._in_bfloat16 = inventory.converted(torch.bfloat16)
        self._ours = optimizer if isinstance(optimizer, (Native, OwnStep)) else None
        self._kind = _torchs_kind(optimizer)
        if optimizer is None:
            self._defaults = torch.optim.AdamW([torch.empty(0, device="meta")]).defaults
            trained = [slot.param for slot in inventory.trained]
            self._groups = [{**self._defaults, "params": trained}]
        else:
            self._defaults = optimizer.defaults
            self._groups = optimizer.param_groups
        is_adam = self._kind in (torch.optim.Adam, torch.optim.AdamW)
        self.has_modes = isinstance(optimizer, Native) or (is_adam and self._ours is None)
        self.in_backward = self._ours is not None and self._ours.in_backward
        self.ordinary = AFTER if isinstance(optimizer, Native) else self._ordinary_of_torch()
        self.predicted: dict[str, ModeFootprint] = {}
        self.unpredicted: dict[str, str] = {}
        # Steps of memsave_ext's optimizers: after backward or in it, of the model or converted.
        self._known: dict[tuple[bool, bool], FootprintStep] = {}
        self._predict()

    def _predict(self) -> None:
        if not isinstance(self._ours, Lion):  # torch has none
            self._try(FOR_LOOP, self._predict_torchs)
        for switch in (FOREACH, FUSED):
            if switch in self._defaults:
                self._try(switch, self._predict_torchs)
        if isinstance(self._ours, OwnStep):
            self._try(IN_BACKWARD, self._predict_single_steps)
        if not self.has_modes:
            return
        self._try(AFTER, self._predict_ours)
        self._try(IN_BACKWARD, self._predict_ours)
        for params, states in itertools.product(formats.PARAM_FORMATS, _STATE_FORMATS):
            names = [f"bf16={params.name}"] if params.name else []
            names += [f"state_dtype={states.name}"] if states else []
            if names:
                options = {"bf16": params.name, "state_dtype": states and states.option}
                self._try(", ".join([IN_BACKWARD, *names]), self._predict_ours, **options)

    def _try(self, mode: str, predict: Callable[..., ModeFootprint], **options: Any) -> None:
        try:
            if any(group.get("differentiable") for group in self._groups):
                raise _Unpredictable("differentiable=True keeps the graph of every step")
            self.predicted[mode] = predict(mode, **options)
        except _Unpredictable as why:
            self.unpredicted[mode] = str(why)

    # Modes in which torch steps, with any optimizer.

    def _ordinary_of_torch(self) -> str:
        """Returns the mode that the optimizer will choose.

        For parameters on the meta device it is the mode that accelerators get. If groups differ, it
        is the mode that needs most.
        """
        chosen = {_implementation(self._kind, group) for group in self._groups}
        return next((mode for mode in (FOREACH, FOR_LOOP, FUSED) if mode in chosen), FOR_LOOP)

    def _predict_torchs(self, mode: str) -> ModeFootprint:
        elsewhere = isinstance(self._ours, OwnStep) and self._grads_on is not None
        return self._with_any(mode, {"grads_on": self._grads_on} if elsewhere else None)

    def _predict_single_steps(self, mode: str) -> ModeFootprint:
        """Predicts what any optimizer's steps of single parameters hold, as those of a for-loop."""
        return self._with_any(FOR_LOOP, self._buckets)

    def _with_any(self, switch: str, taken: dict[str, Any] | None) -> ModeFootprint:
        """Predicts steps by the optimizer's own class.

        Args:
            switch: how torch computes.
            taken: options of :func:`~memsave_ext.in_backward`; None: it has not taken it.
        """
        if switch == FUSED and not all(
            slot.param.is_floating_point()
            for slot in self._stepped(self._inventory)
            if slot.param.requires_grad
        ):
            raise _Unpredictable("fused=True is for floating-point parameters")
        groups = [
            {name: v for name, v in group.items() if name == "params" or name not in _NOT_TORCHS}
            for group in self._groups
        ]
        make = footprint_step.of_kind(self._kind, self._defaults, groups, switch)
        if taken is not None:
            make = _taken(make, taken)
        dry = self._step_of(self._inventory, make)
        tally = Tally()
        for slot, value in dry.state:
            tally.add("optimizer", "" if slot is None else slot.module, value)
        return self._prediction(self._inventory, tally.entries(), dry)

    # Modes in which memsave_ext's optimizers step.

    def _predict_ours(self, mode: str, **options: Any) -> ModeFootprint:
        """Predicts a mode with ``options`` in every group; with ``bf16`` the model is bfloat16."""
        converts = options.get("bf16") is not None
        inventory = self._in_bfloat16 if converts else self._inventory
        state: list[Entry] = []
        for group in self._groups:
            state += _our_state({**group, **options}, self._slots(group, inventory))
        return self._prediction(inventory, state, self._gradients(mode == AFTER, converts))

    def _gradients(self, after: bool, converts: bool) -> FootprintStep:
        """Returns what memsave_ext's optimizers hold beside the states."""
        if not after and self._ours is not None and self._ours.clip_global_norm is not None:
            raise _Unpredictable("clip_global_norm keeps gradients until step()")
        options: Any = {"in_backward": True, **self._buckets}
        if after:
            options = {"grads_on": self._grads_on}

        def make(made: Mapping[int, nn.Parameter]) -> torch.optim.Optimizer:
            params = [made[id(param)] for group in self._groups for param in group["params"]]
            return AdamW(params, **options)

        if (dry := self._known.get((after, converts))) is None:
            inventory = self._in_bfloat16 if converts else self._inventory
            dry = self._step_of(inventory, make)
            self._known[after, converts] = dry
        return dry

    # Used for both.

    @property
    def _buckets(self) -> dict[str, Any]:
        ours = self._ours
        if ours is None:
            return {}
        return {"small_bytes": ours._small_bytes, "bucket_bytes": ours._bucket_bytes}

    @property
    def _grads_on(self) -> str | None:
        """Where the optimizer's gradients lie; None: in memory."""
        gradients = self._ours and self._ours._gradients
        return gradients.where if gradients and gradients.attached else None

    def _step_of(self, inventory: Inventory, make: Make) -> FootprintStep:
        try:
            has_any = any(group["params"] for group in self._groups)
            return footprint_step.step(inventory, make if has_any else None)
        except Exception as error:  # an optimizer of anybody's may raise anything
            what = textwrap.shorten(f"{type(error).__name__}: {error}", 200, placeholder=" ...")
            raise _Unpredictable(
                f"{self._kind.__name__} cannot be stepped on fake tensors: {what}"
            ) from error

    def _slots(self, group: Mapping[str, Any], inventory: Inventory) -> list[Slot]:
        return [inventory.slots[id(param)] for param in group["params"]]

    def _stepped(self, inventory: Inventory) -> set[Slot]:
        return {slot for group in self._groups for slot in self._slots(group, inventory)}

    def _prediction(
        self, inventory: Inventory, state: list[Entry], dry: FootprintStep
    ) -> ModeFootprint:
        stepped = self._stepped(inventory)
        # Gradients of parameters that the optimizer does not have stay after a step.
        left = Counter(slot for slot in inventory.trained if slot not in stepped)
        between, at_peak = (
            holding_of([*inventory.entries, *footprint_step.entries_of(gradients), *state])
            for gradients in (left, dry.gradients)
        )
        return ModeFootprint(between, at_peak, dry.temporaries)


def _taken(make: Make, options: dict[str, Any]) -> Make:
    def taken(made: Mapping[int, nn.Parameter]) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = in_backward(make(made), **options)
        return optimizer

    return taken


def _torchs_kind(optimizer: torch.optim.Optimizer | None) -> type[torch.optim.Optimizer]:
    """Returns the class that steps in torch's modes: that which one of memsave_ext's replaces."""
    if isinstance(optimizer, OwnStep):
        kind: type[torch.optim.Optimizer] = optimizer._own
        return kind
    if optimizer is None or isinstance(optimizer, AdamW):
        return torch.optim.AdamW
    if isinstance(optimizer, SGD):
        return torch.optim.SGD
    return torch.optim.Adam if isinstance(optimizer, Native) else type(optimizer)


def _implementation(kind: type[torch.optim.Optimizer], group: Mapping[str, Any]) -> str:
    """Returns how an optimizer of a class steps a group."""
    if group.get("fused"):
        return FUSED
    if (foreach := group.get("foreach")) is not None:
        return FOREACH if foreach else FOR_LOOP
    # fused=False is a choice of the for-loop, and Adafactor has no other default.
    if "foreach" not in group or group.get("fused") is False:
        return FOR_LOOP
    if issubclass(kind, torch.optim.Adafactor):
        return FOR_LOOP
    is_adam = issubclass(kind, (torch.optim.Adam, torch.optim.AdamW))
    if is_adam and isinstance(group.get("lr"), Tensor) and not group.get("capturable"):
        return FOR_LOOP
    fitting = {"meta", *_get_foreach_kernels_supported_devices()}
    kinds = (Tensor, torch.nn.Parameter)  # torch has lists of no others, such as DTensors
    fits = all(p.device.type in fitting and type(p) in kinds for p in group["params"])
    return FOREACH if fits else FOR_LOOP


def _our_state(group: dict[str, Any], slots: Sequence[Slot]) -> list[Entry]:
    entries = []
    # Parameters that are alike have states of the same sizes.
    known: dict[object, list[tuple[torch.dtype, Amount]]] = {}
    try:
        metas = [footprint_step.stand_in(slot, "meta") for slot in slots]
        placed = [as_placed(s.param, m.detach()) for s, m in zip(slots, metas, strict=True)]
        modes.check_group({**group, "params": placed}, rule_of(group))
        for slot, meta in zip(slots, metas, strict=True):
            if not meta.requires_grad:
                continue
            alike = (meta.shape, meta.stride(), meta.dtype, slot.sparse)
            if alike not in known:
                state = make_state(meta, group)
                check(meta, footprint_step.gradient_of(slot, meta), state, group)
                place, device = group.get("states_on") or Place(), slot.param.device
                here = (t for n, t in state.items() if not place.holds(n, t, device))
                known[alike] = [(t.dtype, Amount(t.numel(), t.nbytes)) for t in here]
            entries += [Entry("optimizer", slot.module, *one) for one in known[alike]]
    except (ValueError, RuntimeError) as error:
        raise _Unpredictable(str(error)) from error
    return entries
