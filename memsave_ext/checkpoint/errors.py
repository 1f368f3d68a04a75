"""Errors and warnings of checkpointing. Every message is here, once.

The native part and the fallback each detect what is wrong and raise what these functions return.
csrc/checkpoint calls them by name.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from types import CodeType
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor

from .. import _native
from ..shared.warn import warn

OnError = Callable[[str], str] | None  # may add to a message
Metadata = tuple[Sequence[int], torch.dtype, torch.device]  # of a saved tensor
# An operator that has read a changed tensor: its name; what describe_change() says of the tensor,
# if anything; its place among an optimizer's parameters, if one has stepped it; shape and dtype.
Read = tuple[str, str, int | None, Sequence[int], torch.dtype]
# A tensor that is used but was not listed: shape, dtype, name of the node that uses it (empty where
# the tensor is an output).
Unlisted = tuple[Sequence[int], torch.dtype, str]

_APPLY = "CheckpointFunction.apply"
_REPLACED = "replaced: the forward had another tensor there"
_THE_SAME = "The function must do the same each time it is called."
_TIP = (
    "Tip: pass `debug=True` to memsave_ext.checkpoint(...), or use "
    "torch.utils.checkpoint.set_checkpoint_debug_enabled(True), to see the operators of both runs. "
    "Common causes: the function depends on a global, a cache or a random number that is not "
    "torch's; a different autocast or grad mode is set inside it; it changes its own inputs."
)
DOUBLE_BACKWARD = (
    "CheckpointFunction does not support double backward: its gradients have no graph. Use "
    "memsave_ext.checkpoint or torch.utils.checkpoint.checkpoint(use_reentrant=False)."
)


class CheckpointError(torch.utils.checkpoint.CheckpointError):
    """The recompute of a region did not do what its forward did.

    A subclass of torch's, with messages that begin with torch's wording, so that code written for
    torch's checkpoint keeps catching and matching it.
    """


# CheckpointFunction


def check_arguments(*args: Any) -> None:
    """Raise unless these can be given to ``CheckpointFunction.apply``."""
    if len(args) < 2:
        raise TypeError(
            f"{_APPLY}(function, n, *args): expected a function and the number n of its inputs, "
            f"got {len(args)} arguments"
        )
    function, n, *rest = args
    if not callable(function):
        raise TypeError(f"{_APPLY}: function must be callable, got {type(function).__name__}")
    if not isinstance(n, int) or isinstance(n, bool):
        raise TypeError(f"{_APPLY}: n must be an int, got {type(n).__name__}")
    if not 0 <= n <= len(rest):
        raise ValueError(
            f"{_APPLY}: n must be between 0 and {len(rest)}, the number of tensors that follow it, "
            f"got {n}"
        )
    for i, arg in enumerate(rest):
        if not isinstance(arg, Tensor):
            role = f"input {i}" if i < n else f"parameter {i - n}"
            raise TypeError(
                f"{_APPLY}: args[{i}] ({role}) must be a torch.Tensor, got {type(arg).__name__}. "
                "Pass tensors one by one, other values through a closure."
            )


def inside_transform() -> RuntimeError:
    return RuntimeError(
        "CheckpointFunction does not work inside torch.func transforms (grad, vjp, jvp, vmap): "
        "they trace the function themselves. Call the function directly there."
    )


def forward_mode() -> NotImplementedError:
    return NotImplementedError(
        "CheckpointFunction does not work with forward mode AD: the function's output has a "
        "tangent, and a tensor that was listed, or that it uses, needs a gradient. Use "
        "memsave_ext.checkpoint."
    )


def output_holds_tensors(index: int, output: object) -> TypeError:
    return TypeError(
        f"{_APPLY}: output {index} is a {type(output).__name__} that holds tensors, which would "
        "get no gradient. Return a tensor or a flat tuple of tensors, or use "
        "memsave_ext.checkpoint."
    )


def input_changed(index: int) -> RuntimeError:
    return RuntimeError(
        f"{_APPLY}: the function changes input {index} in place, so that it could not be run again "
        "from it. Clone the input inside the function first."
    )


def parameter_changed(index: int, parameter: Tensor, version: int) -> RuntimeError:
    return RuntimeError(
        f"CheckpointFunction: parameter {index} ({_describe(parameter.shape, parameter.dtype)}) "
        f"has been modified by an inplace operation: it is at version {parameter._version}, the "
        f"forward used version {version}. The recompute would give wrong gradients: change "
        "parameters after backward."
    )


def other_number_of_outputs(recomputed: int, forward: int) -> RuntimeError:
    return RuntimeError(
        f"CheckpointFunction: the recompute returned {recomputed} outputs, the forward {forward}. "
        f"{_THE_SAME}"
    )


def output_is_no_tensor(index: int) -> RuntimeError:
    return RuntimeError(
        f"CheckpointFunction: output {index} of the recompute is not a tensor, but in the forward "
        f"it was one. {_THE_SAME}"
    )


def output_of_other_shape(index: int, output: Tensor, grad: Tensor) -> RuntimeError:
    return RuntimeError(
        f"CheckpointFunction: output {index} of the recompute has shape {list(output.shape)}, in "
        f"the forward it had {list(grad.shape)}. {_THE_SAME}"
    )


_warned: set[tuple[CodeType, int, tuple[str, ...]]] = set()


def warn_unlisted(
    code: CodeType, instruction: int, line: int, unlisted: Iterable[Unlisted]
) -> None:
    """Warn once of each tensor for each call of apply, known by ``code`` and instruction."""
    found = tuple(
        _describe(shape, dtype) + (f", used by {user}" if user else ", returned as an output")
        for shape, dtype, user in unlisted
    )
    place = (code, instruction, found)
    if found and place not in _warned:
        _warned.add(place)
        warn(
            f"{_APPLY} at {code.co_filename}:{line}: the function uses tensors that need a "
            f"gradient but were not listed; they get none from this region: {'; '.join(found)}. "
            f"List them: {_APPLY}(function, n, *inputs, *parameters).",
        )


# checkpoint


def needs_itself() -> RuntimeError:
    return RuntimeError(
        "memsave_ext.checkpoint: the recompute of the function needs a tensor that this recompute "
        "itself has still to make, since the function runs a backward through the graph of an "
        "earlier call of itself. Run that backward outside of the function."
    )


def describe_change(tensor: Tensor, name: str, before: int | None, now: int) -> str:
    """How a tensor changed. ``before`` is its version in the forward, None for another tensor."""
    flag = f"its requires_grad was changed, and is {tensor.requires_grad} in the recompute"
    what = _REPLACED if before is None else flag if before == now else _modified(before, now)
    return f"{name} ({_describe(tensor.shape, tensor.dtype)}): {what}"


def describe_change_by_forward(tensor: Tensor, name: str) -> str:
    return (
        f"{name} ({_describe(tensor.shape, tensor.dtype)}): a buffer that the forward itself "
        "changes and reads, as spectral_norm does in training; leave the buffer's module out of "
        "the checkpointed function"
    )


def arguments_changed(
    changes: Iterable[tuple[int, int, int]], on_error: OnError
) -> CheckpointError:
    """``changes``: for each argument its position and its versions in the forward and now."""
    lines = "".join(f"argument {i}: {_modified(before, now)}\n" for i, before, now in changes)
    return _error(_outside_changed(lines), on_error)


def offloaded_changed(shape: list[int]) -> CheckpointError:
    return CheckpointError(
        "memsave_ext: the checkpointed function changes in place what it was given, a tensor of "
        f"shape {shape}, which offload='cpu' copies meanwhile. Change a clone of it, or leave "
        "offload out."
    )


def value_changed(index: int, saved: int, now: int, on_error: OnError) -> CheckpointError:
    """``saved`` and ``now``: versions of a tensor that a recompute has saved at ``index``."""
    return _error(
        "memsave_ext: the checkpointed function, or one called inside of it, changes a tensor that "
        f"its graph has saved before, at position {index}, which is modified by an inplace "
        f"operation: it was saved at version {saved} and is at version {now}. The gradients would "
        "be wrong. Change a clone of the tensor.",
        on_error,
    )


def outside_changed(
    saved: Iterable[tuple[int, Metadata, tuple[int, int] | None]],
    reads: Iterable[Read],
    on_error: OnError,
) -> CheckpointError:
    """``saved``: position, metadata and both versions of tensors that both runs save; without
    versions, of those that are in another's place."""
    lines = "".join(
        f"tensor at position {i}: {_as_torch_prints(*metadata)}, "
        f"{_modified(*versions) if versions else _REPLACED}\n"
        for i, metadata, versions in saved
    )
    message = _outside_changed(lines + _describe_reads(reads))
    return _error(f'{message} determinism_check="none" turns this check off.', on_error)


def function_outside_changed(reads: Iterable[Read]) -> CheckpointError:
    """As outside_changed(), for CheckpointFunction, which has no determinism_check."""
    return _error(_outside_changed(_describe_reads(reads)), None)


def other_generator(on_error: OnError) -> CheckpointError:
    return _error(
        "memsave_ext: the recompute of the checkpointed function has drawn random numbers from a "
        "torch.Generator that was not there when the forward began: the forward made it, or "
        "another one was in its place. The numbers would be others, and the gradients wrong. Make "
        "generators before the forward, and leave them in their places until after backward.",
        on_error,
    )


def other_metadata(
    differences: Iterable[tuple[int, Metadata, Metadata]], on_error: OnError
) -> CheckpointError:
    lines = "".join(
        f"tensor at position {i}:\nsaved metadata: {_as_torch_prints(*saved)}\n"
        f"recomputed metadata: {_as_torch_prints(*recomputed)}\n"
        for i, saved, recomputed in differences
    )
    return _error(
        "checkpoint: Recomputed values for the following tensors have different "
        f"metadata than during the forward pass.\n{lines}.\n{_TIP}",
        on_error,
    )


def more_saved(on_error: OnError) -> CheckpointError:
    return _error(
        "checkpoint: trying to save more tensors during recomputation than during the "
        f"original forward pass.\n{_TIP}",
        on_error,
    )


def fewer_saved(forward: int, recompute: int, on_error: OnError) -> CheckpointError:
    return _error(
        "checkpoint: A different number of tensors was saved during the original "
        f"forward and recomputation.\nNumber of tensors saved during forward: {forward}\n"
        f"Number of tensors saved during recomputation: {recompute}.\n{_TIP}",
        on_error,
    )


def remat_changed(
    operator: str, argument: str, shape: Sequence[int], before: int, now: int
) -> CheckpointError:
    return CheckpointError(
        f"memsave_ext.remat: {operator} is to be computed again, but its argument {argument} "
        f"(shape {list(shape)}) has been modified by an inplace operation: it had version {before} "
        f"in the forward, and has version {now} now. Change it after backward, or inside of remat, "
        "which then records the change."
    )


def remat_stepped(
    operator: str, argument: str, shape: Sequence[int], position: int
) -> CheckpointError:
    return CheckpointError(
        f"memsave_ext.remat: {operator} is to be computed again, but its argument {argument} "
        f"(shape {list(shape)}) is parameter {position} of an optimizer, which has stepped it "
        "since the forward. Let the optimizer step after backward."
    )


def remat_given_back(operator: str, argument: str) -> CheckpointError:
    return CheckpointError(
        f"memsave_ext.remat: {operator} is to be computed again, but the memory of its argument "
        f"{argument} has been freed since the forward, as FSDP frees gathered parameters. "
        "Keep it until backward has used it."
    )


def remat_other_result(
    operator: str,
    forward: tuple[Sequence[int], Sequence[int], torch.dtype],
    recompute: tuple[Sequence[int], Sequence[int], torch.dtype],
) -> CheckpointError:
    """Each is a result's shape, strides and dtype."""

    def describe(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> str:
        return f"{_describe(shape, dtype)}, strides {list(strides)}"

    return CheckpointError(
        f"memsave_ext.remat: {operator} was computed again and returned another kind of tensor "
        f"({describe(*recompute)}) than in the forward ({describe(*forward)}). Something that it "
        "depends on, such as a global setting of torch, has changed between the two."
    )


def remat_other_values(operator: str) -> CheckpointError:
    return CheckpointError(
        f"memsave_ext.remat: {operator} was computed again and returned other values than in the "
        "forward. It gave the same twice before its results were dropped for the first time, but "
        "keeps state, or depends on something that has changed between the two. From now on its "
        "results are kept."
    )


def remat_saved_changed(shape: Sequence[int], before: int, now: int) -> CheckpointError:
    return CheckpointError(
        "memsave_ext.remat: one of the variables needed for gradient computation has been "
        f"modified by an inplace operation: a tensor of shape {list(shape)} was saved at version "
        f"{before} and is at version {now} now."
    )


def _error(message: str, on_error: OnError) -> CheckpointError:
    return CheckpointError(on_error(message) if on_error else message)


def _describe(shape: Sequence[int], dtype: torch.dtype) -> str:
    return f"shape {list(shape)}, dtype {str(dtype).removeprefix('torch.')}"


def _as_torch_prints(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> str:
    return str({"shape": torch.Size(shape), "dtype": dtype, "device": device})


def _modified(in_forward: int, in_recompute: int) -> str:
    return (
        f"modified by an inplace operation: version {in_forward} in the forward, {in_recompute} in "
        "the recompute"
    )


def _describe_reads(reads: Iterable[Read]) -> str:
    """A line for each tensor that was read, with the first operator that did."""
    lines: dict[str, str] = {}
    for operator, change, position, shape, dtype in reads:
        if position is None:
            what = change
        else:
            step = f"parameter {position} of an optimizer, which stepped it"
            what = f"{change}; {step}" if change else f"{step} ({_describe(shape, dtype)})"
        lines.setdefault(what, operator)
    return "".join(f"{what}, read by {operator}\n" for what, operator in lines.items())


def _outside_changed(lines: str) -> str:
    return (
        "memsave_ext: tensors from outside the checkpointed function, which it uses in both runs, "
        f"have changed between forward and recompute.\n{lines}The recompute would give wrong "
        "gradients. Change these tensors after backward, or give the function clones of them. Of a "
        "parameter that the function reads without a gradient, the optimizer must step after "
        "backward (no in_backward=True)."
    )


if _native.module:
    _native.module.register_functions({"checkpoint_errors": sys.modules[__name__]})
