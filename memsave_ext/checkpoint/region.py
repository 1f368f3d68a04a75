"""``checkpoint``: a drop-in for torch.utils.checkpoint.checkpoint."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.utils.checkpoint as _torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from .. import _parts
from ..shared.checks import check_bool
from . import norms
from .chunks import Argument, Chunking, check_chunking, run_in_pieces
from .debug import record_operators
from .errors import OnError
from .fallback import region as _fallback
from .offload import keep_inputs_on_cpu


def use_engine_hooks(enabled: bool = True) -> bool:
    """Let autograd's engine give regions of :func:`checkpoint` C++ hooks; opt-in, process-wide.

    torch calls saved-tensor hooks through Python, a Python object for every saved tensor, forward
    and recompute. With this the engine hands out hooks in C++ where the topmost hook is a region's;
    all other hooks, and everything else the engine does, stay torch's. It rests on an extension
    point of torch that is not documented (``set_default_engine_stub``), hence the opt-in. Results
    are the same. In pure Python it does nothing.

    Args:
        enabled: for regions from now on; those that have run keep the hooks they have.

    Returns:
        What was set before.

    Raises:
        TypeError: ``enabled`` is not a bool.
    """
    check_bool("use_engine_hooks: enabled", enabled)
    native = _parts.native("checkpoint")
    return native.use_engine_hooks(enabled) if native else False


# Taken at import: patch_torch_checkpoint() puts ours in its place.
_torch_checkpoint = _torch.checkpoint

ContextFn = Callable[
    [], tuple[contextlib.AbstractContextManager[Any], contextlib.AbstractContextManager[Any]]
]

_run_region: Callable[..., Any] = (_parts.native("checkpoint") or _fallback).checkpoint_region


def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    use_reentrant: bool | None = False,
    preserve_rng_state: bool = True,
    context_fn: ContextFn | None = None,
    determinism_check: str = "default",
    early_stop: bool = True,
    debug: bool = False,
    offload: str | None = None,
    chunks: int | None = None,
    chunk_dim: int = 0,
    chunk_args: Sequence[Argument] | None = None,
    **kwargs: Any,
) -> Any:
    """Run ``function(*args, **kwargs)`` without keeping what its graph saves; recompute it instead.

    Everything torch.utils.checkpoint.checkpoint(use_reentrant=False) does: arguments and results of
    any structure, closures, ``autograd.grad``, ``inputs=``, ``retain_graph``, double backward,
    nesting, hooks. Between forward and backward a region holds its arguments and a few hundred
    bytes for each tensor its graph would have saved.

    Args:
        function: called again in backward; must do the same each time. It finds the random numbers,
            autocast state (with the cast cache off), default device and dtype, torch's settings
            of determinism, precision and backends, CUDA device and stream of its forward.
        *args: its arguments. Tensors among them are kept as autograd keeps tensors.
        use_reentrant: accepted for code written for torch. True is served by the same path, which
            does all that torch's reentrant variant does.
        preserve_rng_state: replay random numbers: of the CPU, of the current CUDA device and of
            those that tensors are on which the function is given, may read or saves for backward;
            and of the torch.Generator objects among what ``determinism_check`` looks through,
            unless that is "none"; one that the forward did not begin with raises.
        context_fn: returns a pair of context managers, for the forward and for recomputes, such as
            torch.utils.checkpoint.create_selective_checkpoint_contexts makes.
        determinism_check: "default" compares shape, dtype and device of every saved tensor with its
            recomputed one (of a nested region: its arguments), and raises where the recompute reads
            a tensor from outside the function that has changed in between: in place (of tensors
            that its graph saves, or that stand in its arguments, its closure, its defaults or the
            globals it names, nested in tuples, lists, dicts, dataclasses, SimpleNamespace, modules'
            parameters, buffers and attributes, functools.partial and other functions of its file;
            of modules also where their forward has them; containers of more than 1000 elements,
            other objects and what compiled code reads are not looked at), by another object in such
            a place, also where the forward made the first one (by one that the forward had in
            another place: of tensors that its graph saves), or by a step of this package's
            optimizers. What the function changes by itself is left out, but for buffers: those that
            it changes and then reads, as torch's spectral_norm does in training, raise; norms in
            training do not read theirs. "none" checks nothing.
        early_stop: end a recompute at the last tensor that is needed. Short tails are run to their
            end, which is cheaper than stopping.
            ``torch.utils.checkpoint.set_checkpoint_early_stop`` overrides it.
        debug: on a mismatch, list the operators of both runs. Slow.
            ``torch.utils.checkpoint.set_checkpoint_debug_enabled`` overrides it.
        offload: "cpu" keeps CUDA arguments in pinned host memory until the recompute. They are
            copied on a stream of their own, back when the region after this one is recomputed:
            those of two regions are on the device then. What comes after the region on its stream
            waits for the copies out. Tensors on the CPU stay where they are.
        chunks: run a function that acts on rows, such as an MLP over tokens, over this many pieces
            of them, in forward and backward one after the other, so that what it makes on the way
            takes one ``chunks``-th of the memory. Gradients leave the region once, complete. More
            chunks than rows are pieces of one row.
        chunk_dim: the dimension of the rows, of arguments and results; a negative one counts from
            the end of each tensor.
        chunk_args: positions and keyword names of the tensors to cut. None cuts the first tensor
            among the arguments and all that have its size in ``chunk_dim``, but no Parameter.
            Everything else, such as tensors in containers, each piece is given whole.
        **kwargs: passed to ``function``.

    Returns:
        What ``function`` returned. With ``chunks``: a result of the same structure, each tensor the
        pieces' tensors concatenated along ``chunk_dim``, everything else that of the first piece.

    Raises:
        ValueError: an unknown ``determinism_check`` or ``offload``; ``debug`` with ``context_fn``;
            ``chunks`` is less than 1, or there is nothing that it could cut; ``chunk_dim`` or
            ``chunk_args`` without ``chunks``.
        TypeError: ``function`` is not callable; a flag is not a bool, ``chunks`` not an int.
        RuntimeError: inside a ``torch.func`` transform, where torch allows no saved-tensor hooks.
            With ``chunks``: in the function a batch norm is called in training mode, or another
            norm that counts running statistics; the pieces' results cannot be put together: a
            tensor without ``chunk_dim`` or of another number of rows, another structure, a value
            that is no tensor and not the same.
        CheckpointError: in backward, when the recompute differs from the forward.

    Under ``torch.compile`` it hands over to torch's function, which is a higher-order operator
    there; under ``torch.export`` and ``torch.jit.trace`` it calls ``function``. Source: Chen et
    al. 2016, arXiv 1604.06174.
    """
    return run(
        function,
        args,
        kwargs,
        use_reentrant=use_reentrant,
        preserve_rng_state=preserve_rng_state,
        context_fn=context_fn,
        determinism_check=determinism_check,
        early_stop=early_stop,
        debug=debug,
        offload=offload,
        chunks=chunks,
        chunk_dim=chunk_dim,
        chunk_args=chunk_args,
    )


def run(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    use_reentrant: bool | None = False,
    preserve_rng_state: bool = True,
    context_fn: ContextFn | None = None,
    determinism_check: str = "default",
    early_stop: bool = True,
    debug: bool = False,
    offload: str | None = None,
    chunks: int | None = None,
    chunk_dim: int = 0,
    chunk_args: Sequence[Argument] | None = None,
) -> Any:
    """Does what :func:`checkpoint` does, with keywords of ``function`` that may be named as options
    are."""
    check_options(
        determinism_check,
        early_stop,
        preserve_rng_state,
        debug,
        offload,
        chunks,
        chunk_dim,
        chunk_args,
        use_reentrant,
        context_fn,
    )
    if chunks is not None:

        def region(*piece: Any, **named: Any) -> Any:
            return run(
                function,
                piece,
                named,
                preserve_rng_state=preserve_rng_state,
                context_fn=context_fn,
                determinism_check=determinism_check,
                early_stop=early_stop,
                debug=debug,
                offload=offload,
            )

        return run_in_pieces(region, args, kwargs, Chunking(chunks, chunk_dim, chunk_args))
    if torch.compiler.is_compiling():
        return _run_torchs(function, args, kwargs, preserve_rng_state, context_fn)
    if torch._C._is_tracing():  # for torch.jit.trace, as for torch.export
        return function(*args, **kwargs)
    if not callable(function):
        raise TypeError(f"checkpoint: function must be callable, got {type(function).__name__}")
    if torch._C._are_functorch_transforms_active():
        raise RuntimeError(
            "checkpoint does not work inside torch.func transforms (grad, vjp, jvp, vmap): torch "
            "allows no saved-tensor hooks there. Call the function directly."
        )
    if _torch._enable_checkpoint_early_stop is not None:
        early_stop = _torch._enable_checkpoint_early_stop
    if _torch._checkpoint_debug_enabled is not None:
        debug = _torch._checkpoint_debug_enabled

    forward, recompute = function, norms.for_recompute(function, args)
    on_error = None
    if torch.is_grad_enabled():
        if debug or context_fn is not None:
            forward, recompute, on_error = _in_contexts(function, recompute, context_fn, debug)
        if torch._C._len_torch_function_stack():
            recompute = _on_default_device(recompute)
    with keep_inputs_on_cpu() if offload else contextlib.nullcontext():
        return _run_region(
            forward,
            recompute,
            args,
            kwargs or None,
            preserve_rng_state,
            early_stop,
            determinism_check == "default",
            on_error,
        )


def _run_torchs(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    preserve_rng_state: bool,
    context_fn: ContextFn | None,
) -> Any:
    if torch.compiler.is_exporting():  # there is no backward to recompute for
        return function(*args, **kwargs)
    # Traced into a higher-order operator, which takes no others of the options. Dynamo knows it by
    # what is torch.utils.checkpoint.checkpoint now; what it made of it runs torch's own.
    dynamo = torch.compiler.is_dynamo_compiling()
    torchs = _torch.checkpoint if dynamo else _torch_checkpoint
    if any(name in OPTIONS for name in kwargs):  # the function's, which torch's would take
        called, given = function, kwargs
        function, kwargs = (lambda *args: called(*args, **given)), {}
    if context_fn is None:
        return torchs(
            function,
            *args,
            use_reentrant=False,
            preserve_rng_state=preserve_rng_state,
            **kwargs,
        )
    return torchs(
        function,
        *args,
        use_reentrant=False,
        preserve_rng_state=preserve_rng_state,
        context_fn=context_fn,
        **kwargs,
    )


def check_options(
    determinism_check: object = "default",
    early_stop: object = True,
    preserve_rng_state: object = True,
    debug: object = False,
    offload: object = None,
    chunks: object = None,
    chunk_dim: object = 0,
    chunk_args: object = None,
    use_reentrant: object = False,
    context_fn: object = None,
) -> None:
    """Raises where one of these options of :func:`checkpoint` is not one of its values."""
    if determinism_check not in ("default", "none"):
        raise ValueError(
            f"checkpoint: determinism_check must be 'default' or 'none', got {determinism_check!r}"
        )
    if offload not in (None, "cpu"):
        raise ValueError(f"checkpoint: offload must be None or 'cpu', got {offload!r}")
    check_chunking(chunks, chunk_dim, chunk_args)
    check_bool("checkpoint: early_stop", early_stop)
    check_bool("checkpoint: preserve_rng_state", preserve_rng_state)
    check_bool("checkpoint: debug", debug)
    check_bool("checkpoint: use_reentrant", use_reentrant, none=True)
    if context_fn is not None and not callable(context_fn):
        raise TypeError(f"checkpoint: context_fn must be a function or None, got {context_fn!r}")


OPTIONS = frozenset(inspect.signature(check_options).parameters)


def refuse_unknown(who: str, options: Iterable[str]) -> None:
    """Raises TypeError where one of these is no option of :func:`checkpoint`."""
    if unknown := [name for name in options if name not in OPTIONS]:
        raise TypeError(
            f"{who}: {', '.join(unknown)} is no option of checkpoint, which are "
            f"{', '.join(sorted(OPTIONS))}"
        )


def _in_contexts(
    function: Callable[..., Any],
    recompute: Callable[..., Any],
    context_fn: ContextFn | None,
    debug: bool,
) -> tuple[Callable[..., Any], Callable[..., Any], OnError]:
    """Both functions inside their context managers, and what adds the operators to a message."""
    on_error = None
    if context_fn is _torch.noop_context_fn:
        context_fn = None
    if debug:
        if context_fn is not None:
            raise ValueError("checkpoint: debug=True cannot be combined with a context_fn")
        context_fn, on_error = record_operators()
    if context_fn is None:
        return function, recompute, None
    forward_context, recompute_context = context_fn()
    return _inside(forward_context, function), _inside(recompute_context, recompute), on_error


def _inside(
    context: contextlib.AbstractContextManager[Any], function: Callable[..., Any]
) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with context:
            return function(*args, **kwargs)
        raise RuntimeError(
            "checkpoint: a context manager of context_fn suppressed an exception of the function; "
            "a checkpoint cannot return a value for it"
        )

    return run


def _on_default_device(function: Callable[..., Any]) -> Callable[..., Any]:
    """Restores torch.set_default_device, or ``with device:``, on the thread that recomputes."""
    for mode in reversed(_get_current_function_mode_stack()):
        if isinstance(mode, DeviceContext):
            return _inside(mode, function)
    return function
