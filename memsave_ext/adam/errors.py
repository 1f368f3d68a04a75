"""The errors of a step. Every message is here, once.

The native part and the fallback each detect what is wrong and raise the exceptions that these
functions return. csrc/adam calls them by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

_REASONS = {
    "keeps_after_norm": (
        "gradients are accumulated after norm_pass(), whose norm is that of one backward. Use "
        "clip_global_norm=, which clips the sum."
    ),
    "pass_too_late": "norm_pass() must come before the backward that steps, once in each step",
    "step_in_pass": (
        "step() inside of norm_pass(), which only measures gradients. Run the backward again "
        "after it, and then step()."
    ),
    "has_failed": (
        "a backward raised after {stepped} parameters had been stepped; the others were not. "
        "Call zero_grad() to go on from there, or load a checkpoint with load_state_dict()."
    ),
}


# of the step as a whole


def impossible(reason: str, stepped: int) -> RuntimeError:
    """For an event that the step's state does not allow.

    ``stepped`` is how many parameters a backward had stepped before it failed.
    """
    return RuntimeError(f"memsave_ext: {_REASONS[reason].format(stepped=stepped)}")


def two_norms() -> ValueError:
    return ValueError(
        "use either max_grad_norm, which clips each parameter's gradient, or clip_global_norm or "
        "norm_pass(), which clip by the norm of all: not both"
    )


def compiled_autograd() -> NotImplementedError:
    return NotImplementedError(
        "memsave_ext: compiled autograd cannot trace a step in backward. Leave it off, "
        "torch._dynamo.config.compiled_autograd = False, or the optimizer's in_backward=True "
        "out. torch.compile() of the model alone works."
    )


def backward_runs(call: str) -> RuntimeError:
    return RuntimeError(
        f"memsave_ext: {call} while a backward is under way, in another thread or around this "
        "call. Wait until all of a step's backwards have ended."
    )


def measures_sums() -> RuntimeError:
    return RuntimeError(
        "memsave_ext: norm_pass() while gradients are accumulated: it drops those that it "
        "measures. Use clip_global_norm=, which keeps them."
    )


# of one parameter


def stepped_again(name: str) -> RuntimeError:
    return RuntimeError(
        f"memsave_ext: {name} was stepped in backward and has a gradient again, which would be a "
        "second step. Set .grad before backward(), or after step()."
    )


def second_gradient(name: str) -> RuntimeError:
    return RuntimeError(
        f"memsave_ext: {name} receives a second gradient in one step. Either backward() ran twice "
        "before opt.step(): put `with opt.accumulate():` around all but the last, or, where a "
        "trainer runs it, call opt.accumulate_when() once. Or one of them was of a loss that is "
        "not to train this parameter, as a GAN's generator's for the discriminator: put `with "
        "opt.paused():` around it. Or the parameter is used in several regions of "
        "torch.utils.checkpoint(use_reentrant=True), which deliver their gradients one by one: "
        "use use_reentrant=False, or memsave_ext.checkpoint."
    )


def not_measured(name: str) -> RuntimeError:
    return RuntimeError(
        f"memsave_ext: {name} has a gradient now, but had none in norm_pass(), whose norm it would "
        "be clipped by. Both must run the backward of the same loss."
    )


def several_threads(name: str) -> RuntimeError:
    return RuntimeError(
        f"memsave_ext: {name} receives gradients from several threads in one step. Python has no "
        "access to torch's lock of a gradient: run the step's backwards in one thread, use "
        "accumulate(), or the compiled memsave_ext."
    )


# under DistributedDataParallel


def not_reduced(name: str) -> RuntimeError:
    return RuntimeError(
        f"memsave_ext: the gradient of {name} has not been reduced over the processes. The last "
        "backward of a step must be outside of ddp.no_sync()."
    )


def not_attached(param: Tensor) -> RuntimeError:
    return RuntimeError(
        f"memsave_ext: a parameter of shape {list(param.shape)} belongs to a "
        "DistributedDataParallel module, which reduces its gradient after it would be stepped "
        "here. Call opt.attach(ddp) once, before training."
    )


def folds_unreduced() -> RuntimeError:
    return RuntimeError(
        "memsave_ext: accumulate(fold=True) would fold gradients of one process, which "
        "DistributedDataParallel has not reduced. Use accumulate()."
    )


def keeps_reduced() -> RuntimeError:
    return RuntimeError(
        "memsave_ext: opt.paused(keep=True) around a backward whose gradients "
        "DistributedDataParallel reduces. Use `with ddp.no_sync(), opt.paused(keep=True):`."
    )


def accumulates_reduced() -> RuntimeError:
    return RuntimeError(
        "memsave_ext: opt.accumulate() around a backward whose gradients DistributedDataParallel "
        "reduces, or accumulate_when() says so. Use `with ddp.no_sync(), opt.accumulate():`."
    )


# of gradients and states


def sparse(rule: str = "adam") -> RuntimeError:
    instead = {
        "sgd": "SGD does not support sparse gradients, torch.optim.SGD does",
        "momentum": "SGD does not support sparse gradients, torch.optim.SGD does",
        "lion": "Lion does not support sparse gradients",
    }
    ours = "Adam does not support sparse gradients, please consider SparseAdam instead"
    return RuntimeError(instead.get(rule, ours))


def sparse_for_own_step() -> RuntimeError:
    return RuntimeError(
        "memsave_ext: a sparse gradient is not stepped in backward. Leave the parameter out of "
        "in_backward(), in an optimizer of its own."
    )


def wrong_gradient(param: Tensor, grad: Tensor) -> RuntimeError:
    return RuntimeError(
        "memsave_ext: a gradient must have the shape, dtype and device of its parameter, "
        f"{list(param.shape)} {param.dtype} {param.device}, got {list(grad.shape)} "
        f"{grad.dtype} {grad.device}"
    )


def another_mesh(param: Any, grad: Any) -> RuntimeError:
    mesh = getattr(grad, "device_mesh", None)
    got = "a plain tensor" if mesh is None else f"one on {mesh}"
    return RuntimeError(
        f"memsave_ext: the gradient of a DTensor must be a DTensor on {param.device_mesh}, got "
        f"{got}. Wrap it with torch.distributed.tensor.DTensor.from_local() or distribute_tensor()"
    )


def wrong_type(dtype: torch.dtype) -> RuntimeError:
    return RuntimeError(f"memsave_ext: parameters must be floating-point or complex, got {dtype}")


def wrong_step() -> RuntimeError:
    return RuntimeError(
        "memsave_ext: the state step of a parameter must be a floating-point scalar tensor on the "
        "CPU, or float32 on the parameter's device"
    )


def no_state(name: str) -> RuntimeError:
    return RuntimeError(f"memsave_ext: the state of a parameter has no {name}")


def wrong_moments(
    name: str, param: torch.dtype, moments: torch.dtype, allowed: Iterable[torch.dtype]
) -> RuntimeError:
    return RuntimeError(
        f"memsave_ext: the state {name} of a {param} parameter must be "
        f"{' or '.join(map(str, allowed))}, got {moments}. Convert the model before making the "
        "optimizer, or load the optimizer's state_dict() into it again."
    )


def wrong_place(name: str, state: Tensor, param: Tensor) -> RuntimeError:
    return RuntimeError(
        f"memsave_ext: the state {name} of a parameter is a tensor of shape {list(state.shape)} on "
        f"{state.device}, the parameter one of shape {list(param.shape)} on {param.device}. Move "
        "the model before making the optimizer, or load the optimizer's state_dict() into it again."
    )


def wrong_state_type(name: str, got: torch.dtype, expected: torch.dtype) -> RuntimeError:
    return RuntimeError(
        f"memsave_ext: the state {name} of a parameter is {got}, expected {expected}"
    )


def wrong_scale(name: str, param: Tensor, blocks: int) -> RuntimeError:
    return RuntimeError(
        f"memsave_ext: the state {name} of a parameter of shape {list(param.shape)} must be a "
        f"contiguous float32 tensor of {blocks} elements on its device"
    )


def moved_blocks(then: Sequence[int], now: Sequence[int]) -> RuntimeError:
    return RuntimeError(
        "memsave_ext: states in blocks need a parameter in the memory format it had when they were "
        f"made: strides {list(then)} then, {list(now)} now. Load to_fp32_state_dict() into a new "
        "optimizer."
    )


def no_amsgrad() -> RuntimeError:
    return RuntimeError("memsave_ext: states in blocks cannot have amsgrad")


def cannot_fold(moments: torch.dtype) -> RuntimeError:
    return RuntimeError(
        f"memsave_ext: accumulate(fold=True) needs states of float32 or float64, got {moments}. "
        "Use accumulate() or state_dtype=None."
    )
