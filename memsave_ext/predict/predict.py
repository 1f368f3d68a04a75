"""Predicts what parameters, gradients and optimizer state will hold, for each way to step."""

from __future__ import annotations

import itertools
import textwrap
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._foreach_utils import _get_foreach_kernels_supported_devices

from ..adam import SGD, AdamW, Lion, formats, modes
from ..adam.dtensor import as_placed
from ..adam.native import Native
from ..adam.own_optimizer import OwnStep
from ..adam.rules import rule_of
from ..adam.states import check, make_state
from ..adam.step_in_backward import BUCKET_BYTES, SMALL_BYTES
from . import gradients
from .dry_step import dry_step
from .holdings import Amount, Entry, Holding, Inventory, Slot, Tally

FOR_LOOP, FOREACH, FUSED = "for-loop", "foreach", "fused"
AFTER, IN_BACKWARD = "after backward", "in backward"
# The state formats that an option selects; None: the option is not given.
_STATE_FORMATS = (None, *(row for row in formats.STATE_FORMATS if row.option is not None))


@dataclass(frozen=True)
class Prediction:
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


class Unpredictable(Exception):
    """A mode has no :class:`Prediction`; the message says why."""


class Predictor:
    """Predicts all modes for a model and its optimizer, torch.optim.AdamW if that is None.

    Attributes:
        predicted, unpredicted: by name of the mode, what it will hold or why that is not known.
        ordinary: the mode in which the optimizer steps when it steps after backward.
        in_backward: whether the optimizer steps in backward.
        has_modes: whether the optimizer is memsave_ext's, or its Adam or AdamW can take its place.
    """

    def __init__(self, inventory: Inventory, optimizer: torch.optim.Optimizer | None) -> None:
        self._inventory = inventory
        self._ours = optimizer if isinstance(optimizer, (Native, OwnStep)) else None
        self._kind: type[torch.optim.Optimizer] = torch.optim.AdamW
        if optimizer is None:
            self._defaults = torch.optim.AdamW([torch.empty(0, device="meta")]).defaults
            self._groups = [(dict(self._defaults), inventory.trained)]
        else:
            if isinstance(optimizer, OwnStep):
                self._kind = optimizer._own
            elif self._ours is None:
                self._kind = type(optimizer)
            elif isinstance(optimizer, SGD):
                self._kind = torch.optim.SGD
            elif not isinstance(optimizer, AdamW):
                self._kind = torch.optim.Adam
            self._defaults = optimizer.defaults
            self._groups = [_group(g, inventory) for g in optimizer.param_groups]
        self._stepped = {slot for _, slots in self._groups for slot in slots}
        is_adam = self._kind in (torch.optim.Adam, torch.optim.AdamW)
        self.has_modes = isinstance(optimizer, Native) or (is_adam and self._ours is None)
        self.in_backward = self._ours is not None and self._ours.in_backward
        self.ordinary = AFTER if isinstance(optimizer, Native) else self._ordinary_of_torch()
        self.predicted: dict[str, Prediction] = {}
        self.unpredicted: dict[str, str] = {}
        self._predict()

    def _predict(self) -> None:
        if not isinstance(self._ours, Lion):  # torch has none
            self._try(FOR_LOOP, self._of_torch)
        for switch in (FOREACH, FUSED):
            if switch in self._defaults:
                self._try(switch, self._of_torch)
        if isinstance(self._ours, OwnStep):
            self._try(IN_BACKWARD, self._of_own)
        if not self.has_modes:
            return
        self._try(AFTER, self._of_ours)
        self._try(IN_BACKWARD, self._of_ours)
        for params, states in itertools.product(formats.PARAM_FORMATS, _STATE_FORMATS):
            names = [f"bf16={params.name}"] if params.name else []
            names += [f"state_dtype={states.name}"] if states else []
            if names:
                options = {"bf16": params.name, "state_dtype": states and states.option}
                self._try(", ".join([IN_BACKWARD, *names]), self._of_ours, **options)

    def _try(self, mode: str, predict: Callable[..., Prediction], **options: Any) -> None:
        try:
            if any(own.get("differentiable") for own, _ in self._groups):
                raise Unpredictable("differentiable=True keeps the graph of every step")
            self.predicted[mode] = predict(mode, **options)
        except Unpredictable as why:
            self.unpredicted[mode] = str(why)

    # Modes in which torch steps, with any optimizer.

    def _ordinary_of_torch(self) -> str:
        """Returns the mode that the optimizer will choose.

        For parameters on the meta device it is the mode that accelerators get. If groups differ, it
        is the mode that needs most.
        """
        chosen = {_implementation(options, slots) for options, slots in self._groups}
        return next((mode for mode in (FOREACH, FOR_LOOP, FUSED) if mode in chosen), FOR_LOOP)

    def _of_torch(self, mode: str) -> Prediction:
        return self._stepped_after(*self._dry_step(mode))

    def _of_own(self, mode: str) -> Prediction:
        """Predicts what steps of single parameters hold, as those of the for-loop are."""
        state, temporaries = self._dry_step(FOR_LOOP)
        return self._stepped_in_backward(state, temporaries, narrow=False)

    def _dry_step(self, mode: str) -> tuple[list[Entry], int]:
        """Returns the state that a step makes, and the bytes of its temporaries."""
        slot_of: dict[object, Slot] = {}
        groups = []
        for options, slots in self._groups:
            metas = [_meta_parameter(slot) for slot in slots]
            slot_of.update(zip(metas, slots, strict=True))
            plain = {name: v for name, v in options.items() if name not in modes.DEFAULTS}
            groups.append({**plain, "params": metas})
        state: dict[Any, Any] = {}
        temporaries = 0
        trained = [slot.param for slot in self._stepped if slot.param.requires_grad]
        if mode == FUSED and not all(param.is_floating_point() for param in trained):
            raise Unpredictable("fused=True is for floating-point parameters")
        if self._stepped:
            try:
                state, temporaries = dry_step(
                    self._kind, self._defaults, groups, foreach=mode == FOREACH
                )
            except Exception as error:  # an optimizer of anybody's may raise anything
                what = textwrap.shorten(f"{type(error).__name__}: {error}", 200, placeholder=" ...")
                raise Unpredictable(
                    f"{self._kind.__name__} cannot be stepped on the meta device: {what}"
                ) from error
        if mode == FUSED:
            temporaries = 0
            for of_param in state.values():
                if isinstance(of_param, dict) and isinstance(of_param.get("step"), Tensor):
                    of_param["step"] = of_param["step"].float()  # whatever the default dtype
        tally = Tally()
        for key, value in state.items():
            module = slot_of[key].module if key in slot_of else ""
            tally.add_tensors("optimizer", module, value)
        return tally.entries(), temporaries

    # Modes in which memsave_ext's optimizers step.

    def _of_ours(self, mode: str, **options: Any) -> Prediction:
        """Predicts a mode with ``options`` in every group; with ``bf16`` the model is bfloat16."""
        narrow = options.get("bf16") is not None
        state: list[Entry] = []
        for own, slots in self._groups:
            state += _our_state({**own, **options}, slots, narrow)
        if mode == AFTER:
            return self._stepped_after(state, 0)
        return self._stepped_in_backward(state, 0, narrow)

    def _stepped_in_backward(
        self, state: list[Entry], temporaries: int, narrow: bool
    ) -> Prediction:
        small, limit = SMALL_BYTES, BUCKET_BYTES
        if self._ours is not None:
            small, limit = self._ours._small_bytes, self._ours._bucket_bytes
            if self._ours.clip_global_norm is not None:
                raise Unpredictable("clip_global_norm keeps gradients until step()")
        complete = gradients.in_buckets(self._stepped, small, limit, narrow)
        live = gradients.most_in_backward(self._inventory.uses, complete, narrow)
        return Prediction(
            between=self._holding(state, self._left, narrow),
            at_peak=self._holding(state, live, narrow),
            temporaries=temporaries,
        )

    # Used for both.

    @property
    def _left(self) -> gradients.Live:
        """The gradients of parameters that the optimizer does not have, which stay after a step."""
        return Counter(slot for slot in self._inventory.trained if slot not in self._stepped)

    def _stepped_after(self, state: list[Entry], temporaries: int) -> Prediction:
        live = Counter(self._inventory.trained)
        in_backward = gradients.most_in_backward(self._inventory.uses, gradients.keep, narrow=False)
        in_step = gradients.bytes_of(live, narrow=False) + temporaries
        if gradients.bytes_of(in_backward, narrow=False) > in_step:
            live, temporaries = in_backward, 0
        return Prediction(
            between=self._holding(state, self._left),
            at_peak=self._holding(state, live),
            temporaries=temporaries,
        )

    def _holding(self, state: list[Entry], live: gradients.Live, narrow: bool = False) -> Holding:
        tally = Tally()
        tensors: list[tuple[str, str, Tensor]]
        tensors = [("parameters", s.module, s.param) for s in self._inventory.slots.values()]
        tensors += [("buffers", module, buffer) for module, buffer in self._inventory.buffers]
        for kind, module, tensor in tensors:
            if (dtype := gradients.dtype_of(tensor, narrow)) == tensor.dtype:
                tally.add_tensors(kind, module, tensor)
            else:
                tally.add(Entry(kind, module, dtype, gradients.amount_of(tensor, narrow)))
        tally.add(*gradients.entries_of(live, narrow), *state)
        return tally.holding()


def _group(group: dict[str, Any], inventory: Inventory) -> tuple[dict[str, Any], list[Slot]]:
    options = {name: v for name, v in group.items() if name not in ("params", "param_names")}
    return options, [inventory.slots[id(param)] for param in group["params"]]


def _implementation(options: dict[str, Any], slots: Sequence[Slot]) -> str:
    if options.get("fused"):
        return FUSED
    foreach = options.get("foreach")
    if foreach is None and "foreach" in options:
        fitting = {"meta", *_get_foreach_kernels_supported_devices()}
        foreach = all(slot.param.device.type in fitting for slot in slots)
        if isinstance(options.get("lr"), Tensor) and not options.get("capturable"):
            foreach = False
    return FOREACH if foreach else FOR_LOOP


def _our_state(group: dict[str, Any], slots: Sequence[Slot], narrow: bool) -> list[Entry]:
    metas = [_meta_parameter(slot, narrow) for slot in slots]
    placed = [as_placed(s.param, m.detach()) for s, m in zip(slots, metas, strict=True)]
    entries = []
    # By the properties that decide a parameter's state, as many parameters are alike.
    known: dict[object, list[tuple[torch.dtype, Amount]]] = {}
    try:
        modes.check_group({**group, "params": placed}, rule_of(group))
        for slot, meta in zip(slots, metas, strict=True):
            if meta.grad is None:
                continue
            alike = (meta.shape, meta.stride(), meta.dtype, slot.sparse)
            if alike not in known:
                state = make_state(meta, group)
                check(meta, meta.grad, state, group)
                known[alike] = [(t.dtype, Amount(t.numel(), t.nbytes)) for t in state.values()]
            entries += [Entry("optimizer", slot.module, *of_one) for of_one in known[alike]]
    except (ValueError, RuntimeError) as error:
        raise Unpredictable(str(error)) from error
    return entries


def _meta_parameter(slot: Slot, narrow: bool = False) -> nn.Parameter:
    try:
        return gradients.meta_parameter(slot, narrow)
    except ValueError as error:
        raise Unpredictable(str(error)) from error
