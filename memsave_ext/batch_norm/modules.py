"""BatchNorm1d, BatchNorm2d and BatchNorm3d, and what they share with SyncBatchNorm."""

from __future__ import annotations

import math
import numbers
from typing import Any, NoReturn

import torch
from torch import Tensor, fx
from torch.autograd import forward_ad
from torch.nn.modules.batchnorm import _BatchNorm

from ..checkpoint import forward_records, norms
from . import calls, operators  # noqa: F401  # operators defines them
from .activations import ACTIVATIONS, check_activation
from .calls import Settings, Tensors

Buffers = tuple[Tensor | None, Tensor | None]  # running mean and variance
Running = tuple[Tensor | None, Tensor | None, float]  # these, and the weight of the batch in them
NO_RUNNING: Running = None, None, 0.0

DOUBLE = torch.float64

_forward = torch.ops.memsave_ext.batch_norm_forward.default


def run(
    tensors: Tensors, settings: Settings, statistics: Tensor | None, running: Running = NO_RUNNING
) -> tuple[Tensor, Tensor]:
    training, eps, activation, negative_slope, group = settings
    mean, var, momentum = running
    result: tuple[Tensor, Tensor] = _forward(
        *tensors, statistics, mean, var, training, momentum, eps, activation, negative_slope, group
    )
    return result


class CountOnce(_BatchNorm):
    """What this package's batch norms share. Keeps torch's parameters, buffers and options."""

    # Defaults for a converted module, whose __init__ did not run.
    activation: str | None = None
    negative_slope: float = 0.01
    # In a recompute these modules find by themselves what their forward computed, so that
    # checkpoint/norms.py leaves their calls as they are.
    _call_impl = torch.nn.Module._call_impl

    def __init__(
        self,
        *args: Any,
        activation: str | None = None,
        negative_slope: float = 0.01,
        **kwargs: Any,
    ) -> None:
        check_activation(type(self).__name__, activation, none=None)
        num_features = args[0] if args else kwargs.get("num_features", 0)
        if isinstance(num_features, bool) or not isinstance(num_features, int):
            raise TypeError(
                f"{type(self).__name__}: num_features must be an int, got "
                f"{type(num_features).__name__}"
            )
        if num_features < 0:
            raise ValueError(
                f"{type(self).__name__}: num_features must not be negative, got {num_features}"
            )
        super().__init__(*args, **kwargs)
        self.activation = activation
        self.negative_slope = negative_slope
        self._check_options()

    def _check_options(self) -> None:
        """Raise for wrong options that torch accepts silently.

        An eps that is too small is an error of the call, as in torch.
        """
        names = ["eps", "negative_slope"] + ["momentum"] * (self.momentum is not None)
        for name in names:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, numbers.Real):
                kind = "a number or None" if name == "momentum" else "a number"
                raise TypeError(
                    f"{type(self).__name__}: {name} must be {kind}, got {type(value).__name__}"
                )
            if not math.isfinite(value):
                raise ValueError(f"{type(self).__name__}: {name} must be finite, got {value}")
        if self.momentum is not None and not 0 <= self.momentum <= 1:
            raise ValueError(
                f"{type(self).__name__}: momentum must be between 0 and 1, got {self.momentum}"
            )

    def forward(self, input: Tensor, residual: Tensor | None = None) -> Tensor:
        if type(input) is not Tensor and _is_traced(input):
            return self._traced(input, residual)
        self._check_input_dim(input)
        if residual is not None and not isinstance(residual, Tensor):
            raise TypeError(
                f"{type(self).__name__}: residual must be a tensor or None, got "
                f"{type(residual).__name__}"
            )
        around = forward_records.NOTHING
        if not torch.compiler.is_compiling():
            norms.check_batch(self)
            around = forward_records.enclosing(functions=self.training)
        if _must_use_torch():
            if self._group_name() is not None:
                raise RuntimeError(
                    f"{type(self).__name__}: torch.func, forward-mode derivatives and torch.export "
                    "know only torch's own kernels, which take the statistics of one process alone"
                )
            module = self if around.replay is None else norms.copy_of(self)
            output = _BatchNorm.forward(module, input)
            z = output if residual is None else output + residual
            return ACTIVATIONS[self.activation or "none"].forward(z, self.negative_slope)
        # Everything is read once: a parametrized weight is computed at each access, and any access
        # to a module's tensors takes a microsecond.
        tensors = Tensors(input, self.weight, self.bias, residual)
        buffers = self.running_mean, self.running_var
        for name, tensor in (("weight", tensors.weight), ("running_mean", buffers[0])):
            if tensor is not None and (tensor.dtype is DOUBLE) is not (input.dtype is DOUBLE):
                raise RuntimeError(
                    f"{type(self).__name__}: input and {name} must both be float64 or neither of "
                    f"them, got {input.dtype} and {tensor.dtype}"
                )
        found = calls.find(self, tensors, around.replay)
        if found is not None:
            output, _ = run(tensors, found.settings, found.statistics)
        else:
            settings = self._settings(buffers)
            is_recompute = around.replay is not None
            output, statistics = self._compute(tensors, settings, buffers, count=not is_recompute)
            if around.recording:
                found = calls.Call.of(self, tensors, statistics, settings)
        if found is not None:
            calls.keep(self, found, around.recording)
        return output

    def _traced(self, input: Any, residual: Any) -> Tensor:
        """Returns the call as a leaf of the graph that torch.fx traces, as of torch.nn's modules,
        which it knows by where they are defined."""
        tracer = input.tracer
        args = (input,) if residual is None else (input, residual)
        made: Tensor = tracer.create_proxy("call_module", tracer.path_of_module(self), args, {})
        return made  # which stands for one

    def __prepare_scriptable__(self) -> NoReturn:
        raise RuntimeError(
            f"torch.jit.script cannot compile memsave_ext.{type(self).__name__}. Use torch.compile "
            "or torch.export, or load its state_dict into torch.nn's module and script that."
        )

    def extra_repr(self) -> str:
        text: str = super().extra_repr()
        if self.activation is not None:
            text += f", activation={self.activation!r}"
        if self.activation == "leaky_relu":
            text += f", negative_slope={self.negative_slope}"
        return text

    def _settings(self, buffers: Buffers) -> Settings:
        training = self.training or buffers[0] is None or buffers[1] is None
        eps = self.eps
        if eps <= 0 and (training or eps < 0):  # with torch's messages
            kind = "positive during training" if training else "non-negative"
            raise ValueError(f"batch_norm eps must be {kind}, but got {eps}")
        activation = self.activation or "none"
        return Settings(
            training, eps, activation, self.negative_slope, self._group_name() if training else None
        )

    def _compute(
        self, tensors: Tensors, settings: Settings, buffers: Buffers, count: bool
    ) -> tuple[Tensor, Tensor]:
        """Return output and statistics. ``count``: in training, update the running statistics."""
        if not settings.training:
            return run(tensors, settings, None, (*buffers, 0.0))
        if not (count and self.training and self.track_running_stats):
            return self._run_and_count(tensors, settings, NO_RUNNING)
        batches = self.num_batches_tracked
        result = self._run_and_count(tensors, settings, (*buffers, self._share(batches)))
        if batches is not None:
            batches.add_(1)
        return result

    def _run_and_count(
        self, tensors: Tensors, settings: Settings, running: Running
    ) -> tuple[Tensor, Tensor]:
        return run(tensors, settings, None, running)

    def _group_name(self) -> str | None:
        """Return the group of processes that share statistics, or None."""
        return None

    def _share(self, batches: Tensor | None) -> float:
        """Return the weight of the batch in the running statistics."""
        if self.momentum is not None:
            return self.momentum
        return 0.0 if batches is None else 1.0 / (float(batches) + 1.0)


def _is_traced(input: object) -> bool:
    return isinstance(input, fx.Proxy)


def _must_use_torch() -> bool:
    """Whether a torch.func transform, forward-mode derivative or export is active.

    These know only torch's own operators.
    """
    return (
        torch._C._functorch.peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
        or torch.compiler.is_exporting()
    )


class BatchNorm1d(CountOnce, torch.nn.BatchNorm1d):
    """Drop-in for :class:`torch.nn.BatchNorm1d`: same arguments, state_dict and meaning.

    In training it differs in three ways. First, inside a checkpointed region (this package's,
    torch's, or any other that runs a function again in backward) the batch is counted once: the
    recompute takes mean and variance from the forward, needs one pass, and updates nothing; torch
    counts again (pytorch#96136). Second, the addition of a residual and an activation can be fused:
    ``activation(bn(input) + residual)``. Third, when a call raises, nothing was updated.

    Args:
        activation: None, "relu" or "leaky_relu". The input is saved for backward, not the output
            of the activation.
        negative_slope: the slope of "leaky_relu" for negative values.
        *args, **kwargs: as for :class:`torch.nn.BatchNorm1d`: num_features, eps, momentum, affine,
            track_running_stats, device, dtype, bias.

    Shapes: input, residual and output are (N, C) or (N, C, L), of one floating-point dtype.
    Statistics are float64 where the input and the parameters are float64, and otherwise float32,
    whatever the dtype of the parameters.

    A recompute does what its forward did, even if the module's mode, running statistics or options
    have changed since. Its weight and bias must be those of the forward.

    Raises:
        TypeError: an option is not a number, or ``num_features`` is not an int.
        ValueError: the activation is unknown; ``momentum`` is not between 0 and 1;
            ``num_features`` is negative; an option is infinite or NaN. In a call: eps is not
            positive (in eval mode: negative); the input has another number of dimensions; it has
            one value per channel in training.
        RuntimeError: the input has another number of channels; the residual has another shape or
            dtype; tensors are on several devices; float64 is mixed with other types. In a
            recompute: weight or bias was changed or replaced since the forward; batch norms are
            called in another order than in the forward. Also from torch.jit.script, which cannot
            compile this module.

    Under torch.func transforms, forward-mode derivatives and torch.export, torch's kernel runs.
    torch's ``SyncBatchNorm.convert_sync_batchnorm`` and ``fuse_conv_bn_eval`` take this module for
    torch's and leave out the activation; ``convert_batch_norm(model, sync=True)`` keeps it.
    Source: Ioffe and Szegedy 2015, arXiv 1502.03167.
    """


class BatchNorm2d(CountOnce, torch.nn.BatchNorm2d):
    """Drop-in for :class:`torch.nn.BatchNorm2d`: like :class:`BatchNorm1d`, for (N, C, H, W)."""


class BatchNorm3d(CountOnce, torch.nn.BatchNorm3d):
    """Drop-in for :class:`torch.nn.BatchNorm3d`: like :class:`BatchNorm1d`, for (N, C, D, H, W)."""


CpBatchNorm2d = BatchNorm2d
