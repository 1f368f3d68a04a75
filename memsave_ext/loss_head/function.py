"""linear_cross_entropy: what is chunked, and what torch's operators do."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, SupportsFloat

import torch
from torch import Tensor
from torch.overrides import has_torch_function

from ..checkpoint import forward_records
from ..shared.checks import check_bool
from ..shared.recording import unrecorded
from . import head
from .chunks import BLOCK, Settings, shape_of_chunk
from .reference import Found, Options, check, reference
from .vocabulary import is_sharded, local_rows, local_tokens, refuse_dtensors, vocabulary_of

_REDUCTIONS = "mean", "sum", "none"
_DTYPES = torch.float64, torch.float32, torch.bfloat16, torch.float16


def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    low_rank: tuple[Tensor, Tensor] | None = None,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    options: Any = None,
    softcap: float | None = None,
    chunk_size: int | None = None,
    loss_dtype: torch.dtype | None = None,
    return_lse: bool = False,
    return_predicted: bool = False,
    return_entropy: bool = False,
    debug: bool = False,
) -> Any:
    """Compute ``cross_entropy(linear(input, linear_weight), target)`` without the logits.

    A drop-in for :func:`torch.nn.functional.linear_cross_entropy`, on every torch. It goes over the
    vocabulary in chunks: forward keeps a few numbers of each token, and backward computes the
    logits of a chunk again and has the chunk's rows of the weight's gradient complete. Where
    ``Adam(in_backward=True)`` owns the weight, these rows are stepped at once, and the gradient of
    the weight never exists.

    Args:
        input: ``(in_features)`` or ``(N, in_features)``.
        linear_weight: ``(C, in_features)``, of the C classes.
        target: class indices, or probabilities of the classes.
        low_rank: ``(low, b)``, of shapes ``(N, r)`` and ``(C, r)``: ``linear(low, b)`` is added to
            the logits, as by an adapter of rank r, whose ``low`` is ``scale * linear(input, a)``.
            Both have gradients, in their own dtypes; products are of the logits' dtype. Where
            ``linear_weight`` is frozen, its gradient is not computed.
        linear_bias, weight, reduction, ignore_index, label_smoothing: as in torch.
        options: accepted and not used: those of torch are about chunks of tokens.
        softcap: logits are ``softcap * tanh(logits / softcap)``, as in Gemma. None: they stay.
        chunk_size: how many classes a chunk has; a multiple of 256. None chooses it so that a chunk
            takes some two fifths of the weight's memory; on CUDA at least 2048, with the tokens in
            blocks where there are too many for that.
        loss_dtype: of the result. None: torch's, which for 16-bit inputs is theirs. torch.float32
            gives a loss of bfloat16 or float16 inputs as it was summed, without a rounding.
        return_lse: also return the log-sum-exp of each token's logits, of the shape that losses
            have with ``reduction="none"``, in float32 at least. It has a gradient:
            ``loss + 1e-4 * lse.square().mean()`` is a loss with a z-loss.
        return_predicted: also return the class of each token's largest logit, of that shape, int64:
            ``(predicted == target).float().mean()`` is the accuracy.
        return_entropy: also return the entropy of each token's softmax, in nats, whether its target
            counts or not; of the shape and dtype of the log-sum-exp. It has a gradient. A class
            whose logit is minus infinity has no part in it.
        debug: warn in backward where the gradient of ``linear_weight`` is whole, and why.

    Returns:
        The loss, a tensor in ``loss_dtype``; or a tuple of it and of what else is asked for, in the
        order of the arguments. Sums are of float32 at least.

    Raises:
        TypeError: something else is given for a tensor, as a module for its weight.
        RuntimeError, ValueError, IndexError: wrong arguments, as torch raises them.
    """
    found = loss_of(
        input,
        linear_weight,
        target,
        linear_bias=linear_bias,
        low_rank=low_rank,
        weight=weight,
        reduction=reduction,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        softcap=softcap,
        chunk_size=chunk_size,
        loss_dtype=loss_dtype,
        return_lse=return_lse,
        return_predicted=return_predicted,
        return_entropy=return_entropy,
        debug=debug,
    )
    return as_asked(found)


def as_asked(found: Found) -> Any:
    """Returns the loss, or a tuple with what else was asked for."""
    asked = tuple(value for value in found if value is not None)
    return asked if len(asked) > 1 else found.loss


def loss_of(*tensors: Tensor, **options: Any) -> Found:
    """:func:`linear_cross_entropy`, with the arguments of what follows."""
    if torch.compiler.is_compiling():
        return _not_traced(*tensors, **options)
    return _loss_of(*tensors, **options)


def _loss_of(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    low_rank: tuple[Tensor, Tensor] | None = None,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    chunk_size: int | None = None,
    loss_dtype: torch.dtype | None = None,
    return_lse: bool = False,
    return_predicted: bool = False,
    return_entropy: bool = False,
    debug: bool = False,
) -> Found:
    check_tensors(input=input, linear_weight=linear_weight, target=target)
    may_be_none = {"linear_bias": linear_bias, "weight": weight}
    check_tensors(**{name: given for name, given in may_be_none.items() if given is not None})
    _check_tokens(input, target)
    given = check(input, linear_weight, target, linear_bias)
    low, low_weight = check_low_rank(low_rank, input, linear_weight)
    has_probabilities = tuple(target.shape) == given
    if ignore_index is not None and (
        not isinstance(ignore_index, (int, torch.SymInt)) or isinstance(ignore_index, bool)
    ):
        raise TypeError(f"ignore_index must be an int or None, got {ignore_index!r}")
    if has_probabilities and ignore_index is not None:
        raise RuntimeError("ignore_index cannot be specified when target contains probabilities")
    if loss_dtype is not None and loss_dtype not in _DTYPES:
        allowed = ", ".join(str(dtype) for dtype in _DTYPES)
        raise ValueError(f"loss_dtype must be one of {allowed} or None, got {loss_dtype!r}")
    if not isinstance(label_smoothing, SupportsFloat):
        raise TypeError(f"label_smoothing must be a number, got {label_smoothing!r}")
    check_softcap("softcap", softcap)
    check_chunk_size(chunk_size)
    flags = {"return_lse": return_lse, "return_predicted": return_predicted}
    flags |= {"return_entropy": return_entropy, "debug": debug}
    for name, flag in flags.items():
        check_bool(name, flag)
    ignored = -100 if ignore_index is None else ignore_index
    asked = return_lse, return_predicted, return_entropy
    loss_options = Options(reduction, ignored, label_smoothing, softcap, *asked)
    classes, vocabulary = linear_weight.shape[0], None
    if is_sharded(linear_weight):
        if has_probabilities:
            raise ValueError(
                "target must have class indices where linear_weight is sharded over its classes, "
                f"got probabilities of shape {tuple(target.shape)}"
            )
        vocabulary = vocabulary_of(linear_weight)
        target, weight = local_tokens(linear_weight, target=target, weight=weight)
        input, low = local_tokens(linear_weight, **{"input": input, "low_rank[0]": low})
        rows = {"linear_bias": linear_bias, "low_rank[1]": low_weight}
        linear_weight, linear_bias, low_weight = local_rows(linear_weight, **rows)
    else:
        refuse_dtensors(input=input, linear_weight=linear_weight, linear_bias=linear_bias)
        refuse_dtensors(target=target, weight=weight, low_rank=low)
    tensors = (input, linear_weight, linear_bias, target, weight)
    is_chunked = _is_chunked(*tensors, low, low_weight, loss_options, has_probabilities, classes)
    if vocabulary is not None:
        if not is_chunked:
            raise ValueError(_not_as_shards(*tensors, low, low_weight, options=loss_options))
    elif not is_chunked or _divides_by_zero(target, weight, loss_options, has_probabilities):
        found = reference(
            input, linear_weight, target, linear_bias, weight, loss_options, low, low_weight
        )
        return found if loss_dtype is None else found._replace(loss=found.loss.to(loss_dtype))
    if unbatched := input.dim() == 1:
        input, target = input[None], target[None]
        low = None if low is None else low[None]
    if not has_probabilities:
        _check_indices(target, classes, ignored)
    dtype = logits_dtype(input)
    tokens, columns = shape_of_chunk(input.shape[0], linear_weight.shape, linear_weight.is_cuda)
    if chunk_size is not None:
        tokens, columns = input.shape[0], chunk_size
    settings = Settings(dtype, columns, tokens, in_region(), debug, vocabulary)
    result = loss_dtype or _loss_dtype(input, target, weight)
    layer = input, linear_weight, linear_bias, low, low_weight
    found = head.run(*layer, target, weight, settings, loss_options, result)
    if not unbatched:
        return found
    loss, *more = found
    return Found(loss[0] if loss.dim() else loss, *(None if m is None else m[0] for m in more))


# A compiled graph ends here and begins again: in it the chunks would be traced one by one.
_not_traced: Callable[..., Found] = torch._disable_dynamo(_loss_of)  # type: ignore[attr-defined]


def in_region() -> bool:
    """Whether the call is in the forward or the recompute of a checkpointed region."""
    if not torch.is_grad_enabled():  # there will be no backward of it
        return False
    region = forward_records.enclosing()
    return bool(region.recording or region.replay) or torch._C._current_graph_task_id() != -1


def check_tensors(**given: Any) -> None:
    for name, value in given.items():
        if not isinstance(value, Tensor):
            more = ""
            if isinstance(getattr(value, "weight", None), Tensor):
                more = ": give its weight, and its bias as linear_bias"
            raise TypeError(f"{name} must be a tensor, got {type(value).__name__}{more}")


def _check_tokens(input: Tensor, target: Tensor) -> None:
    """Sequences in batches: torch's message would say nothing of how to flatten them."""
    if input.dim() > 2 and target.shape[: input.dim() - 1] == input.shape[:-1]:
        raise RuntimeError(
            f"expected input with dimensionality 1 or 2, got {input.dim()}: input has shape "
            f"{tuple(input.shape)} and target {tuple(target.shape)}, allowed are (N, in_features) "
            f"and (N). input.flatten(0, -2) and target.flatten(0, {input.dim() - 2}) have these "
            "shapes, with one row for each token"
        )


def check_low_rank(
    given: Any, input: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """Returns its two tensors; two None where there is none."""
    if given is None:
        return None, None
    if not isinstance(given, (tuple, list)) or len(given) != 2:
        kind = type(given).__name__
        raise TypeError(f"low_rank must be a pair of tensors or None, got {kind}")
    low, low_weight = given
    check_tensors(**{"low_rank[0]": low, "low_rank[1]": low_weight})
    shapes = tuple(low.shape), tuple(low_weight.shape)
    if (
        weight.dim() != 2
        or low_weight.dim() != 2
        or low.shape != (*input.shape[:-1], low_weight.shape[1])
        or low_weight.shape[0] != weight.shape[0]
    ):
        raise ValueError(
            "low_rank must have shapes (..., r) and (C, r) beside input and linear_weight of "
            f"shapes (..., in_features) and (C, in_features), got {shapes[0]} and {shapes[1]} "
            f"beside {tuple(input.shape)} and {tuple(weight.shape)}"
        )
    if {low.device, low_weight.device} != {weight.device}:
        raise ValueError(
            f"low_rank must be on linear_weight's device {weight.device}, got {low.device} and "
            f"{low_weight.device}"
        )
    if not {low.dtype, low_weight.dtype} <= {*_DTYPES}:
        raise ValueError(
            "low_rank must have floating-point tensors of 16 bits or more, got "
            f"{low.dtype} and {low_weight.dtype}"
        )
    return low, low_weight


def check_softcap(name: str, softcap: float | None) -> None:
    if softcap is not None and not (isinstance(softcap, (int, float)) and 0 < softcap < math.inf):
        raise ValueError(f"{name} must be a positive number or None, got {softcap!r}")


def check_chunk_size(chunk_size: int | None) -> None:
    if chunk_size is not None and (
        not hasattr(chunk_size, "__index__") or chunk_size <= 0 or chunk_size % BLOCK != 0
    ):
        raise ValueError(
            f"chunk_size must be a positive multiple of {BLOCK} or None, got {chunk_size!r}"
        )


def _is_chunked(
    input: Tensor,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    target: Tensor,
    weight: Tensor | None,
    low: Tensor | None,
    low_weight: Tensor | None,
    options: Options,
    has_probabilities: bool,
    classes: int,
) -> bool:
    """Whether the chunks' arithmetic is defined for these arguments.

    Others are left to torch's operators: losses of several dimensions, subclasses, transforms of
    torch.func, gradients of targets, and whatever torch raises an error for.
    """
    kind = target.is_floating_point() if has_probabilities else target.dtype == torch.int64
    return (
        classes > 0
        and layer_is_chunked(input, linear_weight, linear_bias, target, weight, low, low_weight)
        and kind
        and (has_probabilities or target.shape == input.shape[:-1])
        and not target.requires_grad
        and (weight is None or _is_class_weight(weight, classes))
        and options.reduction in _REDUCTIONS
        and 0 <= options.label_smoothing <= 1
    )


def _not_as_shards(*tensors: Tensor | None, options: Options) -> str:
    """Returns why there is no loss: torch's operators would take a shard for the whole."""
    names = "input", "linear_weight", "linear_bias", "target", "weight", "low_rank", "low_rank[1]"
    given = ", ".join(
        f"{name} {type(t).__name__} of {t.dtype} and shape {tuple(t.shape)} on {t.device}"
        for name, t in zip(names, tensors, strict=True)
        if t is not None
    )
    return (
        "where linear_weight is sharded over its classes, tensors must be on one device and of one "
        "dtype out of float64, float32, bfloat16 and float16 (any with autocast), targets int64 "
        "without a gradient of shape (N), weight (C) without a gradient, reduction 'mean', 'sum' "
        "or 'none', label_smoothing between 0 and 1, and torch.func transforms nothing; got "
        f"{given}, reduction {options.reduction!r}, label_smoothing {options.label_smoothing}"
    )


def layer_is_chunked(
    input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None, *others: Tensor | None
) -> bool:
    """Whether the chunks' arithmetic is defined for a layer's tensors, with others beside them."""
    floats = [t for t in (input, linear_weight, linear_bias) if t is not None]
    tensors = [*floats, *(t for t in others if t is not None)]
    return (
        linear_weight.dim() == 2
        and not input.is_meta  # which knows no autocast
        and all(t.dtype in _DTYPES and t.layout == torch.strided for t in floats)
        and (autocasts(input) or all(t.dtype == input.dtype for t in floats))
        and all(t.device == input.device for t in tensors)
        and not has_torch_function(tensors)
        and not torch._C._are_functorch_transforms_active()
    )


def _divides_by_zero(
    target: Tensor, weight: Tensor | None, options: Options, has_probabilities: bool
) -> bool:
    """Whether the targets' weights, some of them negative, add up to 0 in a mean with smoothing.

    torch divides the parts of the targets and of the smoothing each by itself, and adds infinities;
    the chunks have one sum of both. A GPU is not awaited for it.
    """
    if weight is None or has_probabilities or options.reduction != "mean":
        return False
    if not options.label_smoothing or type(target) is not Tensor or not target.is_cpu:
        return False
    with unrecorded():
        counted = target[(target != options.ignore_index) & (target >= 0) & (target < len(weight))]
        return bool(weight[counted].sum() == 0)


def _is_class_weight(weight: Tensor, classes: int) -> bool:
    return weight.shape == (classes,) and weight.is_floating_point() and not weight.requires_grad


def autocasts(input: Tensor) -> bool:
    if input.is_meta or input.dtype == torch.float64:
        return False
    return torch.is_autocast_enabled(input.device.type)


def logits_dtype(input: Tensor) -> torch.dtype:
    if autocasts(input):
        return torch.get_autocast_dtype(input.device.type)
    return input.dtype


def _loss_dtype(input: Tensor, target: Tensor, weight: Tensor | None) -> torch.dtype:
    """Returns torch's."""
    if autocasts(input):
        return torch.float32
    result = input.dtype
    if target.is_floating_point():
        result = torch.promote_types(result, target.dtype)
        result = result if weight is None else torch.promote_types(result, weight.dtype)
    return result


def _check_indices(target: Tensor, classes: int, ignored: int) -> None:
    with unrecorded():  # fake tensors are not looked at
        wrong = ((target < 0) | (target >= classes)) & (target != ignored)
        if type(target) is Tensor and target.is_cpu:
            if wrong.any():
                raise IndexError(f"Target {target[wrong][0].item()} is out of bounds.")
        elif not target.is_meta:
            torch._assert_async(~wrong.any(), "linear_cross_entropy: a target is out of bounds")
