"""The errors of a step. Every message is here, once.

The native part and the fallback each detect what is wrong and raise the exceptions that these
functions return. csrc/adam calls them by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

_REASONS = {
    "keeps_after_norm": (
        "gradients cannot be accumulated after norm_pass() or inside of it, since it measures the "
        "norm of one backward alone. Use clip_global_norm=, which clips the accumulated gradients."
    ),
    "pass_too_late": (
        "norm_pass() was entered too late or twice: enter it once in each step, before any "
        "backward that steps parameters"
    ),
    "step_in_pass": (
        "step() was called inside of norm_pass(), which only measures gradients. Leave "
        "norm_pass(), run the backward again, and then call step()."
    ),
    "has_failed": (
        "a backward raised after {stepped} parameters had been stepped; the others were not. Call "
        "zero_grad() to go on from there, or load a checkpoint with load_state_dict()."
    ),
}


# of the step as a whole


def impossible(reason: str, stepped: int) -> RuntimeError:
    """For an event that the step's state does not allow.

    ``stepped`` is how many parameters a backward had stepped before it failed.
    """
    return RuntimeError(f"memsave_ext: {_REASONS[reason].format(stepped=stepped)}")


def count_in_graph() -> RuntimeError:
    return RuntimeError(
        "memsave_ext: the state 'step' is on the host, where a CUDA graph does not count it: each "
        "replay would be the same step. Make the optimizer with capturable=True."
    )


def two_norms() -> ValueError:
    return ValueError(
        "use either max_grad_norm, which clips each parameter's gradient, or clip_global_norm or "
        "norm_pass(), which clip by the norm of all: not both"
    )


def compiled_autograd() -> NotImplementedError:
    return NotImplementedError(
        "memsave_ext: compiled autograd cannot trace a step in backward. Set "
        "torch._dynamo.config.compiled_autograd = False, or make the optimizer without "
        "in_backward=True. torch.compile() of the model alone works."
    )


def backward_runs(call: str) -> RuntimeError:
    return RuntimeError(
        f"memsave_ext: {call} was called while a backward is running, in another thread or around "
        "this call. Call it when all backwards of the step have ended."
    )


def measures_sums() -> RuntimeError:
    return RuntimeError(
        "memsave_ext: norm_pass() cannot be used while gradients are accumulated, since it drops "
        "the gradients that it measures. Use clip_global_norm=, which keeps them."
    )


# of one parameter


def stepped_again(name: str) -> RuntimeError:
    return RuntimeError(
        f"memsave_ext: {name} was stepped in backward and has a gradient in .grad again, with "
        "which it would be stepped twice. Set .grad before backward(), or after step()."
    )


def second_gradient(name: str) -> RuntimeError:
    return RuntimeError(
        f"memsave_ext: {name} receives a second gradient in one step. There are four common "
        "reasons. (1) backward() ran several times before opt.step(): put `with opt.accumulate():` "
        "around all backwards but the last, or, where a trainer runs them, call "
        "opt.accumulate_when() once. (2) One backward was of a loss that must not train this "
        "parameter, such as a GAN generator's loss, which reaches the discriminator: put `with "
        "opt.paused():` around that backward. (3) The parameter is used in several regions of "
        "torch.utils.checkpoint(use_reentrant=True), which deliver their gradients one by one: use "
        "use_reentrant=False, or memsave_ext.checkpoint. (4) opt.step() was not called after the "
        "backward before this one, as in a loop that skips steps, though it had stepped its "
        "parameters. Call opt.step() after each; a backward that is not to step is one in `with "
        "opt.paused():`, and grad_scaler= of memsave_ext.Adam skips what overflows. To go on after "
        "this error, or where an interrupt has kept step() from its call, call opt.zero_grad() and "
        "opt.step()."
    )


def not_measured(name: str) -> RuntimeError:
    return RuntimeError(
        f"memsave_ext: {name} has a gradient now, but had none in norm_pass(), so that the "
        "measured norm does not include it. Run the backward of the same loss in norm_pass() and "
        "after it."
    )


def several_threads(name: str) -> RuntimeError:
    return RuntimeError(
        f"memsave_ext: {name} receives gradients from several threads in one step, which "
        "memsave_ext cannot do in pure Python. Run the step's backwards in one thread, put `with "
        "opt.accumulate():` around them, or build the native part of memsave_ext."
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
        "DistributedDataParallel module, which would reduce its gradient only after the optimizer "
        "has stepped the parameter. Call opt.attach(ddp) once, before training."
    )


def keeps_reduced() -> RuntimeError:
    return RuntimeError(
        "memsave_ext: opt.paused(keep=True) is not supported around a backward whose gradients "
        "DistributedDataParallel reduces. Use `with ddp.no_sync(), opt.paused(keep=True):`."
    )


def accumulates_reduced() -> RuntimeError:
    return RuntimeError(
        "memsave_ext: gradients cannot be accumulated, by opt.accumulate() or "
        "opt.accumulate_when(), in a backward in which DistributedDataParallel reduces them. Use "
        "`with ddp.no_sync(), opt.accumulate():`."
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
        "memsave_ext: a parameter with a sparse gradient cannot be stepped in backward. Put such "
        "parameters into an optimizer of their own, and do not pass that one to in_backward()."
    )


def sparse_in_ddp() -> RuntimeError:
    return RuntimeError(
        "memsave_ext: DistributedDataParallel has reduced a sparse gradient, of a parameter that "
        "attach() has the optimizer step in backward, which sparse gradients cannot be. Put such "
        "parameters into another optimizer, which steps after backward"
    )


def divides_by_those_left() -> RuntimeError:
    return RuntimeError(
        "memsave_ext: join(divide_by_initial_world_size=False) is not possible after attach(), as "
        "a communication hook cannot know how many processes still have batches. Leave the option "
        "out: gradients are then divided by the number of all processes"
    )


def moved_in_ddp(param: Tensor) -> RuntimeError:
    return RuntimeError(
        f"memsave_ext: a parameter of shape {list(param.shape)} has strides {param.stride()}, and "
        "had others when DistributedDataParallel was made, which lays gradients with those. Call "
        "model.to(memory_format=...) before DistributedDataParallel(model)"
    )


def wrong_gradient(param: Tensor, grad: Tensor) -> RuntimeError:
    return RuntimeError(
        "memsave_ext: a gradient must have the shape, dtype and device of its parameter, "
        f"{list(param.shape)} {param.dtype} {param.device}, got {list(grad.shape)} "
        f"{grad.dtype} {grad.device}"
    )


def wrong_type(dtype: torch.dtype) -> RuntimeError:
    return RuntimeError(f"memsave_ext: parameters must be floating-point or complex, got {dtype}")


def wrong_step() -> RuntimeError:
    return RuntimeError(
        "memsave_ext: the state 'step' of a parameter must be a floating-point scalar tensor on "
        "the CPU, or a float32 one on the parameter's device"
    )


def no_state(name: str) -> RuntimeError:
    return RuntimeError(f"memsave_ext: the optimizer's state of a parameter has no {name!r}")


def wrong_moments(
    name: str, param: torch.dtype, moments: torch.dtype, allowed: Iterable[torch.dtype]
) -> RuntimeError:
    return RuntimeError(
        f"memsave_ext: the state {name!r} of a {param} parameter must be "
        f"{' or '.join(map(str, allowed))}, got {moments}. Convert the model before making the "
        "optimizer, or load the optimizer's state_dict() into it again."
    )


def wrong_place(name: str, state: Tensor, param: Tensor) -> RuntimeError:
    return RuntimeError(
        f"memsave_ext: the state {name!r} of a parameter has shape {list(state.shape)} and is on "
        f"{state.device}, but the parameter has shape {list(param.shape)} and is on "
        f"{param.device}. Move the model before making the optimizer, or load the optimizer's "
        "state_dict() into it again."
    )


def wrong_state_type(name: str, got: torch.dtype, expected: torch.dtype) -> RuntimeError:
    return RuntimeError(
        f"memsave_ext: the state {name!r} of a parameter must be {expected}, got {got}"
    )


def wrong_scale(name: str, param: Tensor, blocks: int) -> RuntimeError:
    return RuntimeError(
        f"memsave_ext: the state {name!r} of a parameter of shape {list(param.shape)} must be a "
        f"contiguous float32 tensor of {blocks} elements on the parameter's device"
    )


def moved_blocks(then: Sequence[int], now: Sequence[int]) -> RuntimeError:
    return RuntimeError(
        "memsave_ext: the memory format of a parameter has changed since its 8-bit or 4-bit states "
        f"were made: its strides were {list(then)}, and are {list(now)} now. Load this optimizer's "
        "to_fp32_state_dict() into a new optimizer."
    )


def no_amsgrad() -> RuntimeError:
    return RuntimeError("memsave_ext: 8-bit and 4-bit states cannot be combined with amsgrad=True")
