"""The batch_norm operators, written with torch's own operators for any device and any size.

Sums over a channel are taken in float64.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .activations import ACTIVATIONS
from .arguments import Arguments, grad_memory_format, memory_format, nothing, statistic_dtype


def _reduced(input: Tensor) -> list[int]:
    return [0, *range(2, input.dim())]


def _per_channel(vector: Tensor, input: Tensor) -> Tensor:
    return vector.to(statistic_dtype(input)).view(1, -1, *[1] * (input.dim() - 2))


def _mean_and_m2(input: Tensor) -> tuple[Tensor, Tensor]:
    x, dims = input.double(), _reduced(input)
    mean = x.mean(dims, keepdim=True)
    return mean.flatten(), (x - mean).square().sum(dims)


def _normalized(of: Arguments) -> Tensor:
    x = of.input.to(of.statistics.dtype)
    return (x - _per_channel(of.statistics[0], x)) * _per_channel(of.statistics[1], x)


def _before_activation(of: Arguments) -> Tensor:
    z = _normalized(of)
    if of.weight is not None:
        z = z * _per_channel(of.weight, of.input)
    if of.bias is not None:
        z = z + _per_channel(of.bias, of.input)
    return z if of.residual is None else z + of.residual


def _grad_before_activation(of: Arguments) -> Tensor:
    grad: Tensor = of.grad.to(of.statistics.dtype)
    if of.activation == "none":
        return grad
    return ACTIVATIONS[of.activation].backward(grad, _before_activation(of), of.negative_slope)


def _as_input(tensor: Tensor, input: Tensor, layout: torch.memory_format) -> Tensor:
    return torch.empty_like(input, memory_format=layout).copy_(tensor)


def _statistics(of: Arguments) -> Tensor:
    """Return statistics (2, C): in training those of the batch, which also update the running ones;
    otherwise those from the running ones.
    """
    dtype = statistic_dtype(of.input)
    if not of.training:
        if of.running_mean is None or of.running_var is None:
            raise RuntimeError(
                "batch_norm: expected running_mean and running_var to be given when not training"
            )
        var = of.running_var.to(dtype)
        return torch.stack([of.running_mean.to(dtype), (var + of.eps).rsqrt()])
    if of.count == 1:
        raise ValueError(
            f"Expected more than 1 value per channel when training, got input size {of.input.shape}"
        )
    if of.count == 0:  # nothing to count, as in torch
        return of.input.new_zeros((2, of.input.shape[1]), dtype=dtype)
    mean, m2 = _mean_and_m2(of.input)
    update_running(of.running_mean, mean, of.momentum)
    update_running(of.running_var, m2 / (of.count - 1), of.momentum)
    return torch.stack([mean, (m2 / of.count + of.eps).rsqrt()]).to(dtype)


def forward(of: Arguments) -> tuple[Tensor, Tensor]:
    known = of.statistics is not None
    if not known:
        of.statistics = _statistics(of)
    output = ACTIVATIONS[of.activation].forward(_before_activation(of), of.negative_slope)
    output = _as_input(output, of.input, memory_format(of.input))
    return output, nothing(of.input) if known else of.statistics


def update_running(running: Tensor | None, batch: Tensor, momentum: float) -> None:
    if running is not None:
        running.copy_((1 - momentum) * running.double() + momentum * batch)


def _row_sums(grad: Tensor, of: Arguments) -> tuple[Tensor, Tensor]:
    dims = _reduced(of.input)
    products = grad * _normalized(of)
    sums = grad.double().sum(dims), products.double().sum(dims)
    return sums[0].to(grad.dtype), sums[1].to(grad.dtype)


def _grad_input(grad: Tensor, of: Arguments, means: tuple[Tensor, Tensor] | None) -> Tensor:
    scale = _per_channel(of.statistics[1], of.input)
    if of.weight is not None:
        scale = scale * _per_channel(of.weight, of.input)
    if means is not None:
        products = _normalized(of) * _per_channel(means[1], of.input)
        grad = grad - _per_channel(means[0], of.input) - products
    return _as_input(scale * grad, of.input, grad_memory_format(of.input))


def _wanted(
    grad: Tensor, of: Arguments, means: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, Tensor]:
    """Return the gradients of input and residual; one is empty where the mask is False."""
    input, mask = of.input, of.output_mask
    return (
        _grad_input(grad, of, means) if mask[0] else nothing(input),
        _as_input(grad, input, grad_memory_format(input)) if mask[1] else nothing(input),
    )


def backward(of: Arguments) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    grad = _grad_before_activation(of)
    sums = _row_sums(grad, of)
    count = max(of.count, 1)
    means = (sums[0] / count, sums[1] / count) if of.training else None

    def channels(row: int, like: Tensor | None) -> Tensor:
        if not of.output_mask[3 - row]:
            return nothing(of.input)
        return sums[row].to(sums[row].dtype if like is None else like.dtype)

    return *_wanted(grad, of, means), channels(1, of.weight), channels(0, of.bias)


def moments(of: Arguments) -> Tensor:
    count = torch.tensor([of.count], device=of.input.device)
    moments = of.input.new_zeros((2, of.input.shape[1]), dtype=statistic_dtype(of.input))
    if of.count > 0:
        moments.copy_(torch.stack(_mean_and_m2(of.input)))
    return torch.cat([moments.flatten().view(torch.uint8), count.view(torch.uint8)])


def backward_sums(of: Arguments) -> Tensor:
    return torch.stack(_row_sums(_grad_before_activation(of), of))


def backward_input(of: Arguments) -> tuple[Tensor, Tensor]:
    return _wanted(_grad_before_activation(of), of, (of.means[0], of.means[1]))


def gradients(of: Arguments) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return differentiable gradients of input, residual, weight and bias."""
    # The sums are used separately, not as stacked rows: there, the gradient of one row is zero for
    # the other, and these zeros would be multiplied by infinities.
    if of.training:  # computes statistics again, as functions of the input
        x, dims = of.input.to(of.statistics.dtype), _reduced(of.input)
        mean = x.mean(dims, keepdim=True)
        var = (x - mean).square().mean(dims)
        of.statistics = torch.stack([mean.flatten(), (var + of.eps).rsqrt()])
    grad = _grad_before_activation(of)
    sums = _row_sums(grad, of)
    count = max(of.count, 1)
    means = (sums[0] / count, sums[1] / count) if of.training else None
    return _grad_input(grad, of, means), grad, sums[1], sums[0]
