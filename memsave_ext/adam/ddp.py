"""Steps Adam in backward under DistributedDataParallel, when a bucket has been reduced.

The reducer calls a communication hook with each bucket of gradients, and writes what the hook
returns to ``.grad`` at the end of backward. Here the hook steps the bucket's parameters as soon as
its gradients are reduced, and leaves ``.grad`` empty.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from ..elsewhere.gradient import is_dense
from . import errors

Hook = Callable[[Any, Any], Any]


_hooks: weakref.WeakKeyDictionary[DistributedDataParallel, StepReduced]
_hooks = weakref.WeakKeyDictionary()  # a module's hook cannot be replaced, so it is kept


def attach(
    optimizer: Any,
    ddp: DistributedDataParallel,
    params: list[Tensor],
    hook: Hook | None,
    state: Any,
) -> StepReduced:
    """Have ``optimizer`` step these parameters of ``ddp``.

    ``hook`` reduces the gradients; None: torch's all-reduce.
    """
    step_reduced = _hooks.get(ddp)
    if step_reduced is None:
        step_reduced = StepReduced(ddp)
        _hooks[ddp] = step_reduced
    elif step_reduced.stepper is not None:
        raise RuntimeError(
            "attach: ddp is attached to another optimizer already: call remove_hooks() of that "
            "optimizer first. One optimizer with several param_groups can step all parameters of "
            "ddp."
        )
    step_reduced.attach(optimizer, params, hook, state)
    return step_reduced


class StepReduced:
    """The communication hook of a module. While no optimizer is attached it fills ``.grad``."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._optimizer: Callable[[], Any] = lambda: None
        self._params: dict[int, Tensor] = {}  # the parameters that the optimizer steps, by id
        self._ddp = weakref.ref(ddp)
        self._group = ddp.process_group
        # False: every process uses every parameter in each backward.
        self._some_unused = ddp.find_unused_parameters or ddp.static_graph
        self._usage: Callable[[], _Usage | None] = lambda: None
        # The strides that the reducer was seen to lay gradients with, by id of the parameter.
        self._strides: dict[int, tuple[int, ...]] = {}
        self._mirrored = 0  # how many parameters the buckets of a mirrored backward have so far
        self._reducer_writes = True
        self._set_reduction(None, None)
        self._register(ddp)

    @property
    def stepper(self) -> Any:
        """The attached optimizer's stepper; None without an optimizer."""
        optimizer = self._optimizer()
        return None if optimizer is None else optimizer._stepper

    def attach(
        self, optimizer: Any, params: Sequence[Tensor], hook: Hook | None, state: Any
    ) -> None:
        self._set_reduction(hook, state)
        self._optimizer, self._params = weakref.ref(optimizer), {id(p): p for p in params}
        self.tell_hooks()

    def tell_hooks(self) -> None:
        """Tells the parameters' hooks, which may be new, that ``ddp`` reduces the gradients."""
        if (stepper := self.stepper) is not None:
            stepper.hand_to_ddp(list(self._params.values()), True)

    def detach(self) -> None:
        if (stepper := self.stepper) is not None:
            stepper.hand_to_ddp(list(self._params.values()), False)
        self._optimizer, self._params = lambda: None, {}

    def _set_reduction(self, hook: Hook | None, state: Any) -> None:
        self._reduce: Hook = allreduce_hook if hook is None else hook
        self._state = self._group if hook is None else state

    def _register(self, ddp: DistributedDataParallel) -> None:
        def memsave_ext_adam(state: Any, bucket):  # type: ignore[no-untyped-def]
            return self._run(bucket)

        try:
            ddp.register_comm_hook(None, memsave_ext_adam)
        except RuntimeError as error:
            if "can only be called once" not in str(error):
                raise
            raise RuntimeError(
                "attach: ddp has a communication hook already, and can have only one. Do not "
                "register yours, but pass it to the optimizer: opt.attach(ddp, hook=..., state=...)"
            ) from error
        if hasattr(ddp.reducer, "_set_optimizer_in_backward"):
            # The reducer then does not write to .grad, where all gradients would exist at once.
            ddp.reducer._set_optimizer_in_backward()
            self._reducer_writes = False

    def _run(self, bucket: Any) -> Any:
        if torch._C._current_graph_task_id() == -1:
            return self._mirror(bucket)
        self._check_divisor()
        stepper = self.stepper
        buffer: Tensor = bucket.buffer()
        pairs = list(zip(bucket.parameters(), _gradients(bucket), strict=True))
        used = [param.grad is not None for param, _ in pairs]
        ours = [id(param) in self._params for param, _ in pairs]
        for param, grad in pairs:
            self._check_layout(param, grad)
        backward = None
        if stepper is not None:
            mine = [param for (param, _), own in zip(pairs, ours, strict=True) if own]
            if mine and buffer.layout != torch.strided:
                raise errors.sparse_in_ddp()
            backward = stepper.begin_reduced(mine)
            for param in mine:
                param.grad = None  # the bucket has the gradient
            if self._reducer_writes and bucket.is_last():
                _call_after_reducer(self._clear_gradients)
        reduction: Any = self._reduce(self._state, bucket)
        stream = torch.cuda.current_stream(buffer.device) if buffer.is_cuda else None
        if stream is not None:
            # Autograd's own wait for this stream can come before the step is queued.
            _call_after_reducer(
                lambda: torch.cuda.current_stream(stream.device).wait_stream(stream)
            )

        def step(used: Iterable[bool]) -> None:
            chosen = []
            for pair, is_used, own in zip(pairs, used, ours, strict=True):
                if is_used and own and stepper is not None:
                    chosen.append(pair)
                elif is_used and not self._reducer_writes and buffer.layout == torch.strided:
                    param, grad = pair
                    param.grad = grad.clone()
            if chosen and backward is not None:
                backward.step_reduced([p for p, _ in chosen], [g for _, g in chosen])

        if self._some_unused:
            usage = self._usage_of(bucket)
            usage.add(used, step)
            if bucket.is_last():
                usage.send(buffer.device)
        # What a reduction calls at its end outlives a backward that raises. Where steps wait for
        # flags, it must not keep that backward as they do.
        step_now = None if self._some_unused else step

        def finish(done: Any) -> Tensor:
            with _that_backward_waits_for(stream):
                value = done.value()
                reduced: Tensor = value[0] if isinstance(value, (list, tuple)) else value
                if buffer.layout != torch.strided:
                    return reduced  # the reducer writes sparse gradients to .grad itself
                if reduced.data_ptr() != buffer.data_ptr():
                    buffer.copy_(reduced)
                if step_now is not None:
                    step_now([True] * len(ours))
            return buffer

        # NCCL's are done as soon as they are queued, and have devices: what follows runs on a
        # stream of its own, and not on that of the backward, which would wait for NCCL.
        return reduction.then(finish)

    def _mirror(self, bucket: Any) -> Any:
        """Takes part in the others' reduction inside of ``join()``, where this process has no batch
        left: there is no backward, the bucket has zeros, and nothing is stepped or used."""
        reduction = self._reduce(self._state, bucket)
        if self._some_unused:
            self._mirrored = len(bucket.parameters()) + (self._mirrored if bucket.index() else 0)
            if bucket.is_last():
                usage = _Usage(self._group)
                usage.add([False] * self._mirrored, lambda _: None)
                usage.send(bucket.buffer().device)
                usage.step()
        return reduction

    def _usage_of(self, bucket: Any) -> _Usage:
        """Returns that of this backward, whose buckets come in order."""
        usage = self._usage() if bucket.index() else None
        if usage is None:
            usage = _Usage(self._group)
            self._usage = weakref.ref(usage)
            # Held by the graph task alone, so that it is gone where the backward fails. After what
            # buckets queue alike.
            _call_after_reducer(lambda: _call_after_reducer(usage.step))
        return usage

    def _check_divisor(self) -> None:
        """Raises RuntimeError where ``join()`` asks for another divisor than all processes, which
        the reducer tells no hook."""
        ddp = self._ddp()
        if ddp is None or not ddp._join_config.enable or self._reduce is not allreduce_hook:
            return
        if not ddp._divide_by_initial_world_size:
            raise errors.divides_by_those_left()

    def _check_layout(self, param: Tensor, grad: Tensor) -> None:
        """Raises RuntimeError where the reducer has laid a gradient with other strides than those
        that the parameter has now.

        It keeps those that there were when its buckets were made. Before the reduction the bucket
        has the numbers in ``.grad``, which show it, unless they are all the same. They are compared
        once for each parameter and its strides.
        """
        local, strides = param.grad, param.stride()
        if param.dim() < 2 or not param.numel() or strides == self._strides.get(id(param)):
            return
        if type(grad) is not Tensor or grad.layout != torch.strided:
            return
        if local is None or local.dtype != grad.dtype:
            return
        if not bool(((local == grad) | local.isnan()).all()):
            raise errors.moved_in_ddp(param)
        if bool((local != local.flatten()[0]).any()):
            self._strides[id(param)] = strides

    def _clear_gradients(self) -> None:
        for param in self._params.values():
            param.grad = None


def _gradients(bucket: Any) -> list[Tensor]:
    """Returns the gradients in a bucket, each as the reducer has laid it there.

    That is with the strides of its parameter where these are dense, and otherwise in the order of
    indices, in which ``bucket.gradients()`` has all of them. A bucket is for one sparse gradient.
    """
    buffer: Tensor = bucket.buffer()
    if buffer.layout != torch.strided:
        return [buffer]
    return [
        grad
        if param.is_contiguous() or not is_dense(param)
        else grad.as_strided(param.shape, param.stride(), grad.storage_offset())
        for param, grad in zip(bucket.parameters(), bucket.gradients(), strict=True)
    ]


class _Usage:
    """What processes have used in a backward, and the steps that wait for it.

    The gradient of a parameter that no process used arrives as zeros, and so may that of a used
    one: flags tell them apart. Those of all buckets are sent together, so that a host waits for its
    device once in a backward. Gradients wait where they are, in the reducer's buckets, which stay
    from one backward to the next.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self._used: list[bool] = []
        self._steps: list[tuple[int, Callable[[Iterable[bool]], None]]] = []

    def add(self, used: list[bool], step: Callable[[Iterable[bool]], None]) -> None:
        """Has ``step`` called with what any process used of these parameters."""
        self._used += used
        self._steps.append((len(used), step))

    def send(self, device: torch.device) -> None:
        self._flags = torch.tensor(self._used, dtype=torch.int32, device=device)
        self._work = dist.all_reduce(
            self._flags, op=dist.ReduceOp.MAX, group=self._group, async_op=True
        )

    def step(self) -> None:
        assert self._work is not None
        self._work.wait()
        used = iter(map(bool, self._flags.tolist()))
        for count, step in self._steps:
            step(itertools.islice(used, count))


def _call_after_reducer(function: Callable[[], None]) -> None:
    """Calls ``function`` when the reducer has waited for all futures and written to ``.grad``.

    The reducer queues that for the end of backward after it has called the hook; a callback that
    another callback queues runs later. The current streams are those on which backward was called.
    """
    engine = torch.autograd.Variable._execution_engine
    engine.queue_callback(lambda: engine.queue_callback(function))


@contextlib.contextmanager
def _that_backward_waits_for(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Runs the block on a stream that the end of backward waits for.

    ``stream`` is that of the hook, for which it does; None on a CPU.

    Callbacks of NCCL's futures, which have devices, run on a stream of their own, and the end of
    backward waits for it. gloo's futures have no devices. It makes the default stream wait for the
    reduced values, and its callbacks run on the default stream of its thread, for which nobody
    waits, or, where it is done already, on that of the hook. In both cases the block runs on the
    hook's stream, which waits for the default one. That wait is short: gloo is done by then.
    """
    if stream is None:
        yield
        return
    default = torch.cuda.default_stream(stream.device)
    if torch.cuda.current_stream(stream.device) not in (stream, default):
        yield
        return
    if stream != default:
        stream.wait_stream(default)
    with torch.cuda.stream(stream):
        yield
