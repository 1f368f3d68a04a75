"""The batch_norm operators, written with torch's own operators for any device and any size, and
their autograd, which does what csrc/batch_norm/autograd.cpp does.

Sums over a channel are taken in float64.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .._leaves import hold_accumulators
from .activations import ACTIVATIONS
from .arguments import (
    Arguments,
    call,
    grad_memory_format,
    memory_format,
    names,
    nothing,
    read,
    statistic_dtype,
)

_FORWARD, _BACKWARD = "batch_norm_forward", "batch_norm_backward"
_SAVED = "grad", "input", "statistics", "weight", "bias", "residual"
_DIFFERENTIABLE = "input", "residual", "weight", "bias"  # in the order of their gradients


def _reduced(input: Tensor) -> list[int]:
    return [0, *range(2, input.dim())]


def _per_channel(vector: Tensor, input: Tensor) -> Tensor:
    return vector.to(statistic_dtype(input)).view(1, -1, *[1] * (input.dim() - 2))


def _mean_and_m2(input: Tensor) -> tuple[Tensor, Tensor]:
    x, dims = input.double(), _reduced(input)
    mean = x.mean(dims, keepdim=True)
    return mean.flatten(), (x - mean).square().sum(dims)


def _normalized(args: Arguments) -> Tensor:
    x = args.input.to(args.statistics.dtype)
    return (x - _per_channel(args.statistics[0], x)) * _per_channel(args.statistics[1], x)


def _before_activation(args: Arguments) -> Tensor:
    z = _normalized(args)
    if args.weight is not None:
        z = z * _per_channel(args.weight, args.input)
    if args.bias is not None:
        z = z + _per_channel(args.bias, args.input)
    return z if args.residual is None else z + args.residual


def _grad_before_activation(args: Arguments) -> Tensor:
    grad: Tensor = args.grad.to(args.statistics.dtype)
    if args.activation == "none":
        return grad
    return ACTIVATIONS[args.activation].backward(
        grad, _before_activation(args), args.negative_slope
    )


def _as_input(tensor: Tensor, input: Tensor, layout: torch.memory_format) -> Tensor:
    return torch.empty_like(input, memory_format=layout).copy_(tensor)


def _statistics(args: Arguments) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
    """Return statistics (2, C), in training those of the batch, otherwise those from the running
    ones; and what the running ones are updated with, or None.
    """
    dtype = statistic_dtype(args.input)
    if not args.training:
        if args.running_mean is None or args.running_var is None:
            raise RuntimeError(
                "batch_norm: expected running_mean and running_var to be given when not training"
            )
        var = args.running_var.to(dtype)
        return torch.stack([args.running_mean.to(dtype), (var + args.eps).rsqrt()]), None
    if args.count == 1:
        raise ValueError(
            "Expected more than 1 value per channel when training, got input size "
            f"{args.input.shape}"
        )
    if args.count == 0:  # nothing to count, as in torch
        return args.input.new_zeros((2, args.input.shape[1]), dtype=dtype), None
    mean, m2 = _mean_and_m2(args.input)
    statistics = torch.stack([mean, (m2 / args.count + args.eps).rsqrt()]).to(dtype)
    return statistics, (mean, m2 / (args.count - 1))


def forward(args: Arguments) -> tuple[Tensor, Tensor]:
    known, batch = args.statistics is not None, None
    if not known:
        args.statistics, batch = _statistics(args)
    output = ACTIVATIONS[args.activation].forward(_before_activation(args), args.negative_slope)
    output = _as_input(output, args.input, memory_format(args.input))
    if batch is not None:  # where something above raises, nothing was updated
        update_running(args.running_mean, batch[0], args.momentum)
        update_running(args.running_var, batch[1], args.momentum)
    return output, nothing(args.input) if known else args.statistics


def update_running(running: Tensor | None, batch: Tensor, momentum: float) -> None:
    if running is not None:
        running.copy_((1 - momentum) * running.double() + momentum * batch)


def _row_sums(grad: Tensor, args: Arguments) -> tuple[Tensor, Tensor]:
    dims = _reduced(args.input)
    products = grad * _normalized(args)
    sums = grad.double().sum(dims), products.double().sum(dims)
    return sums[0].to(grad.dtype), sums[1].to(grad.dtype)


def _grad_input(grad: Tensor, args: Arguments, means: tuple[Tensor, Tensor] | None) -> Tensor:
    scale = _per_channel(args.statistics[1], args.input)
    if args.weight is not None:
        scale = scale * _per_channel(args.weight, args.input)
    if means is not None:
        products = _normalized(args) * _per_channel(means[1], args.input)
        grad = grad - _per_channel(means[0], args.input) - products
    return _as_input(scale * grad, args.input, grad_memory_format(args.input))


def _wanted(
    grad: Tensor, args: Arguments, means: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, Tensor]:
    """Return the gradients of input and residual; one is empty where the mask is False."""
    input, mask = args.input, args.output_mask
    return (
        _grad_input(grad, args, means) if mask[0] else nothing(input),
        _as_input(grad, input, grad_memory_format(input)) if mask[1] else nothing(input),
    )


def backward(args: Arguments) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    grad = _grad_before_activation(args)
    sums = _row_sums(grad, args)
    count = max(args.count, 1)
    means = (sums[0] / count, sums[1] / count) if args.training else None

    def channels(row: int, like: Tensor | None) -> Tensor:
        if not args.output_mask[3 - row]:
            return nothing(args.input)
        return sums[row].to(sums[row].dtype if like is None else like.dtype)

    return *_wanted(grad, args, means), channels(1, args.weight), channels(0, args.bias)


def moments(args: Arguments) -> Tensor:
    count = torch.tensor([args.count], device=args.input.device)
    moments = args.input.new_zeros((2, args.input.shape[1]), dtype=statistic_dtype(args.input))
    if args.count > 0:
        moments.copy_(torch.stack(_mean_and_m2(args.input)))
    return torch.cat([moments.flatten().view(torch.uint8), count.view(torch.uint8)])


def backward_sums(args: Arguments) -> Tensor:
    return torch.stack(_row_sums(_grad_before_activation(args), args))


def backward_input(args: Arguments) -> tuple[Tensor, Tensor]:
    return _wanted(_grad_before_activation(args), args, (args.means[0], args.means[1]))


def _gradients(args: Arguments) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return differentiable gradients of input, residual, weight and bias."""
    # The sums are used separately, not as stacked rows: there, the gradient of one row is zero for
    # the other, and these zeros would be multiplied by infinities.
    if args.training:  # computes statistics again, as functions of the input
        x, dims = args.input.to(args.statistics.dtype), _reduced(args.input)
        mean = x.mean(dims, keepdim=True)
        var = (x - mean).square().mean(dims)
        args.statistics = torch.stack([mean.flatten(), (var + args.eps).rsqrt()])
    grad = _grad_before_activation(args)
    sums = _row_sums(grad, args)
    count = max(args.count, 1)
    means = (sums[0] / count, sums[1] / count) if args.training else None
    return _grad_input(grad, args, means), grad, sums[1], sums[0]


def differentiable_forward(*values: Any) -> tuple[Tensor, Tensor]:
    if torch.is_grad_enabled() and any(isinstance(v, Tensor) and v.requires_grad for v in values):
        args = read(_FORWARD, values)
        saved = [args.input, args.weight]
        saved += [args.bias, args.residual] if args.activation != "none" else []
        if any(v is not None and v.is_inference() for v in saved):  # torch says it after the kernel
            raise RuntimeError("Inference tensors cannot be saved for backward: clone the input")
    nodes = hold_accumulators(values)
    result: tuple[Tensor, Tensor] = _Forward.apply(*values)
    del nodes
    return result


def differentiable_backward(*values: Any) -> tuple[Tensor, ...]:
    result: tuple[Tensor, ...] = _Backward.apply(*values)
    return result


def _save(ctx: Any, args: Arguments) -> None:
    if args.activation == "none":
        args.bias = args.residual = None
    ctx.save_for_backward(*(getattr(args, name) for name in _SAVED))
    tensors = dict.fromkeys((*_SAVED, "running_mean", "running_var"))
    ctx.options = replace(args, **tensors)  # type: ignore[arg-type]
    ctx.set_materialize_grads(False)


def _unpack(ctx: Any) -> Arguments:
    options: Arguments = ctx.options
    return replace(options, **dict(zip(_SAVED, ctx.saved_tensors, strict=True)))


class _Forward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *values: Any) -> tuple[Tensor, Tensor]:
        args = read(_FORWARD, values)
        with torch._C._AutoDispatchBelowAutograd():
            output, statistics = getattr(torch.ops.memsave_ext, _FORWARD)(*values)
        _save(ctx, args if args.statistics is not None else replace(args, statistics=statistics))
        ctx.mark_non_differentiable(statistics)
        return output, statistics

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, _: None) -> Any:
        if grad is None:
            return (None,) * len(names(_FORWARD))
        wanted = dict(zip(names(_FORWARD), ctx.needs_input_grad, strict=True))
        args = replace(_unpack(ctx), grad=grad, output_mask=[wanted[n] for n in _DIFFERENTIABLE])
        results = (
            call(_BACKWARD, args) if args.group is None else _Reduced.apply(args, grad, args.input)
        )
        gradients = dict(zip(_DIFFERENTIABLE, results, strict=True))
        return tuple(gradients.get(n) if wanted[n] else None for n in names(_FORWARD))


class _Reduced(torch.autograd.Function):
    """The gradients where statistics are those of several processes. Takes one collective."""

    @staticmethod
    def forward(ctx: Any, args: Arguments, *differentiable: Tensor) -> tuple[Tensor, ...]:
        functional = torch.ops._c10d_functional
        sums = call("batch_norm_backward_sums", args)
        total = torch.cat([sums.flatten(), sums.new_full((1,), args.count)])
        total = functional.wait_tensor(functional.all_reduce(total, "sum", args.group))
        args.means = (total[:-1] / total[-1]).view(2, -1)
        args.output_mask = args.output_mask[:2]
        gradients = call("batch_norm_backward_input", args)
        return *gradients, sums[1].clone(), sums[0].clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise RuntimeError("memsave_ext.SyncBatchNorm does not support double backward")


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *values: Any) -> tuple[Tensor, ...]:
        with torch._C._AutoDispatchBelowAutograd():
            results: tuple[Tensor, ...] = getattr(torch.ops.memsave_ext, _BACKWARD)(*values)
        _save(ctx, read(_BACKWARD, values))
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        args = _unpack(ctx)
        create_graph = torch.is_grad_enabled()
        sources: dict[str, Tensor] = {}
        with torch.enable_grad():
            for name in ("grad", *_DIFFERENTIABLE):
                if (tensor := getattr(args, name)) is not None:
                    # Differentiates with respect to aliases: where one source depends on another,
                    # that path lies outside of this function and must not be counted.
                    sources[name] = torch.ops.aten.alias(tensor)
                    setattr(args, name, sources[name])
            pairs = [
                (output, grad)
                for output, grad, asked in zip(
                    _gradients(args), grads, args.output_mask, strict=True
                )
                if asked and grad is not None and output.requires_grad
            ]
        sources = {name: tensor for name, tensor in sources.items() if tensor.requires_grad}
        results: dict[str, Tensor | None] = {}
        if pairs and sources:
            outputs, root_grads = zip(*pairs, strict=True)
            second = torch.autograd.grad(
                outputs,
                list(sources.values()),
                root_grads,
                create_graph=create_graph,
                allow_unused=True,
            )
            results = dict(zip(sources, second, strict=True))
        return tuple(map(results.get, names(_BACKWARD)))
