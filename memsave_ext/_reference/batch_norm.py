"""The batch_norm operators in torch's own: any device, any size, float64 where it counts."""

from __future__ import annotations

import torch
from torch import Tensor

ACTIVATIONS = ("none", "relu", "leaky_relu")


def statistic_dtype(input: Tensor) -> torch.dtype:
    return torch.float64 if input.dtype == torch.float64 else torch.float32


def memory_format(input: Tensor) -> torch.memory_format:
    """Of the output. Dense inputs keep their layout."""
    if input.is_contiguous():
        return torch.contiguous_format
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(input.dim())
    if last is not None and input.is_contiguous(memory_format=last):
        return last
    return torch._prims_common.suggest_memory_format(input)


def grad_memory_format(input: Tensor) -> torch.memory_format:
    """Of the gradient. Where a size is 1 the same memory may be contiguous in both ways."""
    suggested = torch._prims_common.suggest_memory_format(input)
    if input.is_contiguous(memory_format=suggested):
        return suggested
    return memory_format(input)


def nothing(input: Tensor) -> Tensor:
    return input.new_empty(0, dtype=statistic_dtype(input))


def check(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    activation: str,
    **channels: Tensor | None,
) -> None:
    if input.dim() < 2:
        raise RuntimeError(
            f"batch_norm: expected an input of shape (N, C, *), got {list(input.shape)}"
        )
    if input.dtype not in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        raise NotImplementedError(f'"batch_norm" not implemented for {input.dtype}')
    if activation not in ACTIVATIONS:
        raise ValueError(
            f"batch_norm: activation must be 'none', 'relu' or 'leaky_relu', got '{activation}'"
        )
    for name, tensor in dict(weight=weight, bias=bias, **channels).items():
        if tensor is None:
            continue
        _check_device(name, tensor, input)
        if tensor.numel() != input.shape[1]:
            raise RuntimeError(
                f"{name} should contain {input.shape[1]} elements not {tensor.numel()}"
            )
        if not tensor.is_floating_point():
            raise RuntimeError(
                f"batch_norm: {name} must be a floating-point tensor, got {tensor.dtype}"
            )
    if residual is not None:
        _check_device("residual", residual, input)
        if residual.shape != input.shape or residual.dtype != input.dtype:
            raise RuntimeError(
                "batch_norm: residual must have the shape and dtype of input, "
                f"{list(input.shape)} {input.dtype}, got {list(residual.shape)} {residual.dtype}"
            )


def check_statistics(name: str, tensor: Tensor, input: Tensor) -> None:
    _check_device(name, tensor, input)
    dtype, shape = statistic_dtype(input), (2, input.shape[1])
    if tensor.dtype != dtype or tensor.shape != shape or not tensor.is_contiguous():
        kind = "Double" if dtype == torch.float64 else "Float"
        raise RuntimeError(
            f"batch_norm: {name} must be a contiguous {kind} tensor of shape {list(shape)}, got "
            f"{tensor.dtype} {list(tensor.shape)}"
        )


def _check_device(name: str, tensor: Tensor, input: Tensor) -> None:
    if tensor.device != input.device:
        raise RuntimeError(
            f"batch_norm: expected all tensors to be on the same device, but {name} is on "
            f"{tensor.device} and input on {input.device}"
        )


def _count(input: Tensor) -> int:
    return input.numel() // input.shape[1] if input.shape[1] else 0


def _reduced(input: Tensor) -> list[int]:
    return [0, *range(2, input.dim())]


def _per_channel(vector: Tensor, input: Tensor) -> Tensor:
    return vector.to(statistic_dtype(input)).view(1, -1, *[1] * (input.dim() - 2))


def _mean_and_m2(input: Tensor) -> tuple[Tensor, Tensor]:
    x, dims = input.double(), _reduced(input)
    mean = x.mean(dims, keepdim=True)
    return mean.flatten(), (x - mean).square().sum(dims)


def _normalized(input: Tensor, statistics: Tensor) -> Tensor:
    x = input.to(statistics.dtype)
    return (x - _per_channel(statistics[0], input)) * _per_channel(statistics[1], input)


def _before_activation(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    statistics: Tensor,
) -> Tensor:
    z = _normalized(input, statistics)
    if weight is not None:
        z = z * _per_channel(weight, input)
    if bias is not None:
        z = z + _per_channel(bias, input)
    return z if residual is None else z + residual


def _activate(z: Tensor, activation: str, negative_slope: float) -> Tensor:
    if activation == "relu":
        return z.relu()
    if activation == "leaky_relu":
        return torch.where(z > 0, z, z * negative_slope)
    return z


def _grad_before_activation(
    grad: Tensor,
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    statistics: Tensor,
    activation: str,
    negative_slope: float,
) -> Tensor:
    grad = grad.to(statistics.dtype)
    if activation == "none":
        return grad
    z = _before_activation(input, weight, bias, residual, statistics)
    if activation == "relu":
        return torch.where(z <= 0, 0, grad)
    return torch.where(z > 0, grad, grad * negative_slope)


def _as_input(tensor: Tensor, input: Tensor, layout: torch.memory_format) -> Tensor:
    return torch.empty_like(input, memory_format=layout).copy_(tensor)


def batch_norm_forward(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    statistics: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    activation: str,
    negative_slope: float,
    group: str | None,
) -> tuple[Tensor, Tensor]:
    check(
        input, weight, bias, residual, activation,
        running_mean=running_mean, running_var=running_var,
    )  # fmt: skip
    count = _count(input)
    if statistics is not None:
        check_statistics("statistics", statistics, input)
        statistics = statistics.clone()
    elif not training:
        if running_mean is None or running_var is None:
            raise RuntimeError(
                "batch_norm: expected running_mean and running_var to be given when not training"
            )
        dtype = statistic_dtype(input)
        statistics = torch.stack([running_mean.to(dtype), (running_var.to(dtype) + eps).rsqrt()])
    elif count == 1:
        raise ValueError(
            f"Expected more than 1 value per channel when training, got input size {input.shape}"
        )
    elif count == 0:  # counts nothing, as in torch
        statistics = input.new_zeros((2, input.shape[1]), dtype=statistic_dtype(input))
    else:
        mean, m2 = _mean_and_m2(input)
        statistics = torch.stack([mean, (m2 / count + eps).rsqrt()]).to(statistic_dtype(input))
        update_running(running_mean, mean, momentum)
        update_running(running_var, m2 / (count - 1), momentum)
    z = _before_activation(input, weight, bias, residual, statistics)
    return _as_input(
        _activate(z, activation, negative_slope), input, memory_format(input)
    ), statistics


def update_running(running: Tensor | None, batch: Tensor, momentum: float) -> None:
    if running is not None:
        running.copy_((1 - momentum) * running.double() + momentum * batch)


def _row_sums(grad: Tensor, input: Tensor, statistics: Tensor) -> tuple[Tensor, Tensor]:
    dims = _reduced(input)
    products = grad * _normalized(input, statistics)
    sums = grad.double().sum(dims), products.double().sum(dims)
    return sums[0].to(grad.dtype), sums[1].to(grad.dtype)


def _sums(grad: Tensor, input: Tensor, statistics: Tensor) -> Tensor:
    return torch.stack(_row_sums(grad, input, statistics))


def _grad_input(
    grad: Tensor,
    input: Tensor,
    weight: Tensor | None,
    statistics: Tensor,
    means: Tensor | tuple[Tensor, Tensor] | None,
) -> Tensor:
    scale = _per_channel(statistics[1], input)
    if weight is not None:
        scale = scale * _per_channel(weight, input)
    if means is not None:
        products = _normalized(input, statistics) * _per_channel(means[1], input)
        grad = grad - _per_channel(means[0], input) - products
    return _as_input(scale * grad, input, grad_memory_format(input))


def batch_norm_backward(
    grad: Tensor,
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    statistics: Tensor,
    training: bool,
    eps: float,
    activation: str,
    negative_slope: float,
    output_mask: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    grad = _grad_before_activation(
        grad, input, weight, bias, residual, statistics, activation, negative_slope
    )
    sums = _sums(grad, input, statistics)
    means = sums / max(_count(input), 1) if training else None

    def channels(row: int, of: Tensor | None) -> Tensor:
        return sums[row].to(sums.dtype if of is None else of.dtype, copy=True)

    return (
        _grad_input(grad, input, weight, statistics, means) if output_mask[0] else nothing(input),
        _as_input(grad, input, grad_memory_format(input)) if output_mask[1] else nothing(input),
        channels(1, weight) if output_mask[2] else nothing(input),
        channels(0, bias) if output_mask[3] else nothing(input),
    )


def batch_norm_moments(input: Tensor) -> Tensor:
    count = torch.tensor([_count(input)], device=input.device)
    moments = input.new_zeros((2, input.shape[1]), dtype=statistic_dtype(input))
    if _count(input) > 0:
        moments.copy_(torch.stack(_mean_and_m2(input)))
    return torch.cat([moments.flatten().view(torch.uint8), count.view(torch.uint8)])


def batch_norm_backward_sums(
    grad: Tensor,
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    statistics: Tensor,
    activation: str,
    negative_slope: float,
) -> Tensor:
    grad = _grad_before_activation(
        grad, input, weight, bias, residual, statistics, activation, negative_slope
    )
    return _sums(grad, input, statistics)


def batch_norm_backward_input(
    grad: Tensor,
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    statistics: Tensor,
    means: Tensor,
    activation: str,
    negative_slope: float,
    output_mask: list[bool],
) -> tuple[Tensor, Tensor]:
    grad = _grad_before_activation(
        grad, input, weight, bias, residual, statistics, activation, negative_slope
    )
    return (
        _grad_input(grad, input, weight, statistics, means) if output_mask[0] else nothing(input),
        _as_input(grad, input, grad_memory_format(input)) if output_mask[1] else nothing(input),
    )


def gradients(
    grad: Tensor,
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    statistics: Tensor,
    training: bool,
    eps: float,
    activation: str,
    negative_slope: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Those of input, residual, weight and bias; differentiable as often as one likes."""
    # Not through stacked rows: the zeros that one row's gradient has for the other would meet
    # infinities there.
    if training:  # again as functions of the input
        x, dims = input.to(statistics.dtype), _reduced(input)
        mean = x.mean(dims, keepdim=True)
        var = (x - mean).square().mean(dims)
        statistics = torch.stack([mean.flatten(), (var + eps).rsqrt()])
    grad = _grad_before_activation(
        grad, input, weight, bias, residual, statistics, activation, negative_slope
    )
    sums = _row_sums(grad, input, statistics)
    count = max(_count(input), 1)
    means = (sums[0] / count, sums[1] / count) if training else None
    return _grad_input(grad, input, weight, statistics, means), grad, sums[1], sums[0]
