"""What is said where gradients cannot be used."""

from __future__ import annotations


def backward_runs() -> RuntimeError:
    return RuntimeError(
        "Adam: step() while a backward is under way, in another thread or around this call. Wait "
        "until all of a step's backwards have ended."
    )


def measures_sums() -> RuntimeError:
    return RuntimeError(
        "Adam: norm_pass() while gradients are accumulated: it drops those that it measures. Use "
        "clip_global_norm=, which keeps them."
    )


# of one parameter


def stepped_again(name: str) -> RuntimeError:
    return RuntimeError(
        f"Adam: {name} was stepped in backward and has a gradient again, which would be a second "
        "step. Set .grad before backward(), or after step()."
    )


def second_gradient(name: str) -> RuntimeError:
    return RuntimeError(
        f"Adam: {name} receives a second gradient in one step. Either backward() ran twice before "
        "opt.step(): put `with opt.accumulate():` around all but the last, or, where a trainer "
        "runs it, call opt.accumulate_when() once. Or one of them was of a loss that is not to "
        "train this parameter, as a GAN's generator's for the discriminator: put `with "
        "opt.paused():` around it. Or the parameter is used in several regions of "
        "torch.utils.checkpoint(use_reentrant=True), which deliver their gradients one by one: "
        "use use_reentrant=False, or memsave_ext.checkpoint."
    )


def not_measured(name: str) -> RuntimeError:
    return RuntimeError(
        f"Adam: {name} has a gradient now, but had none in norm_pass(), whose norm it would be "
        "clipped by. Both must run the backward of the same loss."
    )


def several_threads(name: str) -> RuntimeError:
    return RuntimeError(
        f"Adam: {name} receives gradients from several threads in one step. Python has no access "
        "to torch's lock of a gradient: run the step's backwards in one thread, use accumulate(), "
        "or the compiled memsave_ext."
    )


# under DistributedDataParallel


def not_reduced(name: str) -> RuntimeError:
    return RuntimeError(
        f"Adam: the gradient of {name} has not been reduced over the processes. The last backward "
        "of a step must be outside of ddp.no_sync()."
    )


def not_attached(shape: list[int]) -> RuntimeError:
    return RuntimeError(
        f"Adam: a parameter of shape {shape} belongs to a DistributedDataParallel module, which "
        "reduces its gradient after it would be stepped here. Call opt.attach(ddp) once, before "
        "training."
    )


def folds_unreduced() -> RuntimeError:
    return RuntimeError(
        "Adam: accumulate(fold=True) would fold gradients of one process, which "
        "DistributedDataParallel has not reduced. Use accumulate()."
    )


def keeps_reduced() -> RuntimeError:
    return RuntimeError(
        "Adam: opt.paused(keep=True) around a backward whose gradients DistributedDataParallel "
        "reduces. Use `with ddp.no_sync(), opt.paused(keep=True):`."
    )


def accumulates_reduced() -> RuntimeError:
    return RuntimeError(
        "Adam: opt.accumulate() around a backward whose gradients DistributedDataParallel "
        "reduces, or accumulate_when() says so. Use `with ddp.no_sync(), opt.accumulate():`."
    )
