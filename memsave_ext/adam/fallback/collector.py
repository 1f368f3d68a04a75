"""Collects gradients and carries out what the stepper decides, as csrc/adam/collector.h does."""

from __future__ import annotations

import gc
import itertools
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from ..._streams import current_stream, use_here
from ...checkpoint.function import note_step
from ...shared import dtensor
from ...shared.tensors import is_shared
from .. import errors, modes
from ..norms import Scaling
from ..place import Place
from ..precise import total
from ..rules import is_complete
from ..shards import sharding_of
from ..states import check, check_dense, make_state, publish_states
from . import hooks
from .operator import Prepared, of_batch, step, sum_of_squares
from .records import Records


class Update(NamedTuple):
    """A parameter to step, with its gradient as it is in ``.grad``."""

    param: Tensor
    group: dict[str, Any]
    grad: Tensor


class Collector:
    """The parameters of a stepper's optimizer; none when the optimizer is gone."""

    def __init__(self, stepper: Any, small_bytes: int, bucket_bytes: int, own_step: bool) -> None:
        self._stepper = weakref.ref(stepper)
        self.small_bytes, self.bucket_bytes, self.own_step = small_bytes, bucket_bytes, own_step
        self.records = Records()
        self._lock = threading.RLock()
        self._intake = "step"
        self._attached = False
        self._backwards: weakref.WeakValueDictionary[int, Backward] = weakref.WeakValueDictionary()
        self._running: set[int] = set()  # ids of backwards
        # Ids of parameters: DistributedDataParallel reduces the gradients of the first; those of
        # the second have one that it has not reduced yet.
        self._reduced_by_ddp: set[int] = set()
        self._unreduced: set[int] = set()
        self._forget_uses()
        self.drop_stale_low_part = self.records.drop_stale_low_part

    # called by the stepper

    def __enter__(self) -> Collector:
        self._lock.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    owner = staticmethod(hooks.owner)

    def attach(self, params: Iterable[Tensor]) -> None:
        for param in params:
            if hooks.owner(param) is None:
                hooks.install_hook(param, self)
        self._attached = True

    def lost(self) -> list[Tensor]:
        """Returns the parameters that have lost their hook."""
        optimizer = self.optimizer()
        if not self._attached:
            return []
        return [param for param in self.params() if hooks.owner(param) is not optimizer]

    def detach(self) -> None:
        self._attached = False
        for param in self.params():
            hooks.remove_hooks(param, self)

    def release(self, params: list[Tensor]) -> None:
        """Removes the hooks of these alone."""
        for param in params:
            hooks.remove_hooks(param, self)

    def set_intake(self, intake: str) -> None:
        """Sets what hooks do: leave a gradient ("keep", "sum"), "drop" it, or use it."""
        self._intake = intake

    def expect(self, *expected: bool) -> None:
        """Does nothing: here the stepper is asked about every gradient."""

    def any_gradient(self) -> bool:
        return any(param.grad is not None for param in self.params())

    def drop_gradients(self) -> None:
        for param in self.params():
            param.grad = None

    def forget_gradients(self) -> None:
        if self._attached:
            self.drop_gradients()
            self._unreduced.clear()

    def dtensors(self) -> list[Tensor]:
        return [param for param in self.params() if dtensor.is_dtensor(param)]

    def remaining(self, asks: str) -> list[Batch]:
        """Returns the parameters that have gradients in ``.grad``, by device."""
        stepper = self._stepper()
        assert stepper is not None
        updates = []
        for group in self._groups():
            for param in group["params"]:
                if param.grad is None:
                    continue
                flags = (
                    self._attached and id(param) in self._stepped,
                    id(param) in self._reduced_by_ddp,
                    id(param) in self._unreduced,
                )
                if stepper.uses_remaining(self._name(param), *flags):
                    updates.append(Update(param, group, param.grad))
        return self.batches(updates, asks)

    def drop_used(self, batches: list[Batch]) -> None:
        if self._attached:
            for param in itertools.chain.from_iterable(batch.params for batch in batches):
                param.grad = None
            for param in self.params():
                hooks.renew_hooks(param)

    def next_step(self) -> int:
        """Returns how many parameters have been stepped in backward in the step that ends."""
        count = len(self._stepped)
        self._forget_uses()
        return count

    def count_used(self, params: list[Tensor]) -> int:
        if not self._attached:
            return 0
        backward = self._backwards.get(torch._C._current_graph_task_id())
        waits = backward.waits_for if backward else lambda _: False
        return sum(id(param) in self._stepped and not waits(param) for param in params)

    def runs_backward(self) -> bool:
        return bool(self._running)

    def current_backward(self) -> Backward | None:
        """Returns the backward of this thread, which may begin with this call."""
        task = torch._C._current_graph_task_id()
        stepper = self._stepper()
        if task == -1 or stepper is None:
            return None
        if (backward := self._backwards.get(task)) is not None:
            return backward
        if (begun := stepper.begin_backward()) is None:
            return None
        backward = self._backwards[task] = Backward(self, stepper, *begun)
        at_end = _AtEnd(backward)  # first: it ends the backward where this is interrupted
        self._running.add(id(backward))
        # After callbacks that others queue in the backward: each root of FSDP2's reduces its last
        # gradients in one.
        engine = torch.autograd.Variable._execution_engine
        engine.queue_callback(lambda: engine.queue_callback(at_end))
        return backward

    def check_reduced(self, params: list[Tensor]) -> None:
        for param in params:
            self._check_use(param)
        self._unreduced.difference_update(id(param) for param in params)

    def hand_to_ddp(self, params: list[Tensor], enabled: bool) -> None:
        change = self._reduced_by_ddp.update if enabled else self._reduced_by_ddp.difference_update
        change(id(param) for param in params)

    # called by hooks

    def optimizer(self) -> Any:
        """Returns the optimizer; None when it is gone."""
        stepper = self._stepper()
        return None if stepper is None else stepper.optimizer()

    def ready(self, param: Tensor, is_last: bool) -> None:
        """Takes a complete gradient. If not ``is_last``, later hooks have still to see it."""
        if self._intake == "keep":
            return
        if self._intake == "drop":
            if is_last:
                param.grad = None
            return
        if param.grad is not None and id(param) in self._reduced_by_ddp:
            self._unreduced.add(id(param))
            return
        if self._intake == "sum" or torch._C._current_graph_task_id() == -1:
            return
        # This must precede any look at .grad: another thread may have taken part of the gradient.
        here = threading.get_ident()
        if self._threads.get(id(param), here) != here:
            raise errors.several_threads(self._name(param))
        if param.grad is None or (backward := self.current_backward()) is None:
            return
        if id(param) in backward.of_ddp:
            raise errors.not_attached(param)
        if backward.action == "keep":
            backward.stepper.check_kept()
            return
        group = self.group_of(param)
        if group is None:  # the parameter is no longer in param_groups
            return
        self._check_use(param)
        if self.own_step and param.grad.layout != torch.strided:
            raise errors.sparse_for_own_step()
        check_dense(param.grad, group)
        self._threads[id(param)] = here
        self.note_uses([param], backward.action)
        try:
            backward.add(param, group, is_last)
        except BaseException:
            if param.grad is not None:  # it was not used
                self.forget_uses([param])
            raise

    def _check_use(self, param: Tensor) -> None:
        stepper = self._stepper()
        assert stepper is not None
        stepped, measured = id(param) in self._stepped, id(param) in self._measured
        stepper.check_gradient(self._name(param), stepped, measured)

    # called by backwards and batches

    def params(self) -> Iterator[Tensor]:
        return itertools.chain.from_iterable(group["params"] for group in self._groups())

    def note_uses(self, params: Iterable[Tensor], action: str) -> None:
        """Notes that these take part in the step. Their gradients may still wait in a bucket."""
        uses = {"step": self._stepped, "measure": self._measured}
        uses[action].update(id(param) for param in params)

    def forget_uses(self, params: Iterable[Tensor]) -> None:
        """Forgets uses that were not made after all."""
        for param in params:
            self._stepped.discard(id(param))
            self._measured.discard(id(param))
            self._threads.pop(id(param), None)

    def forget_threads(self, params: Iterable[Tensor]) -> None:
        """The gradients are gone, to which another thread could have added its part."""
        for param in params:
            self._threads.pop(id(param), None)

    def ended(self, backward: Backward) -> None:
        self._running.discard(id(backward))

    def batches(self, updates: Sequence[Update], asks: str) -> list[Batch]:
        """Returns a batch for each device. Missing states are made.

        Raises:
            RuntimeError: a parameter cannot be stepped. Nothing has been changed.
        """
        if not self.own_step:
            for group in {id(group): group for _, group, _ in updates}.values():
                modes.check_options(group)
            self._make_and_check_states(updates)
        return self.on_devices(updates, asks)

    def on_devices(self, updates: Sequence[Update], asks: str = "never") -> list[Batch]:
        by_device: dict[torch.device, list[Update]] = {}
        for update in updates:
            by_device.setdefault(update.param.device, []).append(update)
        return [Batch(self, on_device, asks) for on_device in by_device.values()]

    def prepared(self, updates: list[Update]) -> list[Prepared]:
        """Returns the operator's view of updates: of DTensors the local parts."""
        positions = self.positions()
        return [self._prepare(u, positions[id(u.param)]) for u in updates]

    def positions(self) -> dict[int, int]:
        """Returns the position of each parameter in the optimizer, by its id."""
        return {id(param): i for i, param in enumerate(self.params())}

    def numbers_of(self, updates: list[Update]) -> list[int]:
        """Returns the numbers of these parameters' groups."""
        numbers = {id(group): number for number, group in enumerate(self._groups())}
        return [numbers[id(group)] for _, group, _ in updates]

    def _groups(self) -> list[dict[str, Any]]:
        optimizer = self.optimizer()
        return [] if optimizer is None else optimizer.param_groups

    def group_of(self, param: Tensor) -> dict[str, Any] | None:
        groups = (g for g in self._groups() if any(p is param for p in g["params"]))
        return next(groups, None)

    def _name(self, param: Tensor) -> str:
        position = next(i for i, p in enumerate(self.params()) if p is param)
        return f"parameter {position} of the optimizer (shape {list(param.shape)})"

    def _state_of(self, param: Tensor) -> dict[str, Any]:
        """Returns the parameter's state; empty where it has none."""
        optimizer = self.optimizer()
        return {} if optimizer is None else optimizer.state.get(param, {})

    def _forget_uses(self) -> None:
        """Begins a step. All are ids of parameters."""
        self._stepped: set[int] = set()  # stepped, or queued
        self._measured: set[int] = set()  # in the norm pass
        self._threads: dict[int, int] = {}  # the thread whose backward uses the gradient

    def _make_and_check_states(self, updates: Sequence[Update]) -> None:
        optimizer, fresh = self.optimizer(), []
        try:
            for param, group, grad in updates:
                state = optimizer.state.get(param, {})
                if not is_complete(state, group):
                    if made := make_state(param, group):
                        fresh.append((param, state))
                        publish_states(optimizer, [(param, made)])
                    state = made
                check(param, grad, state, group)
        except BaseException:
            for param, state in fresh:
                if state:
                    optimizer.state[param] = state
                else:
                    optimizer.state.pop(param, None)
            raise

    def _prepare(self, update: Update, position: int) -> Prepared:
        param, state = dtensor.local_tensor(update.param), self._state_of(update.param)
        state = {name: dtensor.local_tensor(value) for name, value in state.items()}
        self.records.drop_stale_low_part(param, state.get("param_rest"))
        return Prepared(param, _local_gradient(update), state, update.group, position)


def _local_gradient(update: Update) -> Tensor:
    return dtensor.local_gradient(update.param, update.grad)


class Batch:
    """Updates on one device, as the stepper sees them: csrc/adam/batch.h."""

    def __init__(self, collector: Collector, updates: list[Update], asks: str) -> None:
        self._collector, self._updates, self._asks = collector, updates, asks
        self.device = updates[0].param.device

    def __len__(self) -> int:
        return len(self._updates)

    @property
    def params(self) -> list[Tensor]:
        return [param for param, *_ in self._updates]

    @property
    def grads(self) -> list[Tensor]:
        return [_local_gradient(update) for update in self._updates]

    @property
    def groups(self) -> list[int]:
        return self._collector.numbers_of(self._updates)

    def put_gradients(self) -> None:
        """Puts them into ``.grad``, where an optimizer's own step looks for them, and from where it
        may change them."""
        for param, _, grad in self._updates:
            # Where DistributedDataParallel has reduced it, it is not in .grad.
            param.grad = _changeable(grad) if grad is param.grad else grad

    def note_steps(self) -> None:
        """Tells recomputes that the parameters have changed."""
        positions = self._collector.positions()
        for param in self.params:
            note_step(dtensor.local_tensor(param), positions[id(param)])

    @property
    def asks(self) -> bool:
        return any(key is not None for key in self.asking())

    def asking(self) -> list[Any]:
        """Returns None for each, or where its shard asks: what those that ask together share."""
        return [
            (sharding_of(param)[0], group.get("max_grad_norm") or 0.0)
            if asks_others(param, group, self._asks)
            else None
            for param, group, _ in self._updates
        ]

    def select(self, places: Sequence[int]) -> Batch:
        chosen = [self._updates[i] for i in places]
        return Batch(self._collector, chosen, self._asks)

    def squares(self) -> dict[int, Tensor]:
        """Returns the sum of squares by number of the sharding; 0: the gradients are whole."""
        of_each: dict[int, list[Tensor]] = {}
        for param, grad in zip(self.params, self.grads, strict=True):
            number = sharding_of(param)[0] if dtensor.is_dtensor(param) else 0
            of_each.setdefault(number, []).append(sum_of_squares(grad))
        return {number: total(torch.stack(squares)) for number, squares in of_each.items()}

    def squares_of_each(self) -> Tensor:
        return torch.stack([sum_of_squares(grad) for grad in self.grads])

    def step(self, scaling: Scaling | None) -> None:
        prepared = self._collector.prepared(self._updates)
        by = {} if scaling is None else scaling._asdict()
        if all(p.group.get("states_on") is None for p in prepared):
            step(prepared, **by)
        else:
            self._step_elsewhere(prepared, by)
        for p in prepared:
            self._collector.records.note(p)

    def _step_elsewhere(self, prepared: list[Prepared], scaling: dict[str, Any]) -> None:
        """One after the other, so that no more than one has its states here."""
        for i, p in enumerate(prepared):
            place = p.group.get("states_on") or Place()
            by = {name: of_batch(value, [i], len(prepared)) for name, value in scaling.items()}
            try:
                fetched = place.fetch(p.state, p.param.device)
                step([p._replace(state=fetched.state)], **by)
                fetched.write_back()
            except BaseException:  # has it been stepped?
                if (stepper := self._collector._stepper()) is not None:
                    stepper.failed(1)
                raise


def _changeable(grad: Tensor) -> Tensor:
    """Returns the gradient as one that a step may change in place.

    It is a copy where backward goes on with memory that the gradient shares: that of a view, as in
    ``h + param.view(...)``.
    """
    if torch._C._current_graph_task_id() == -1 or dtensor.is_dtensor(grad):
        return grad
    return grad.detach().clone() if is_shared(grad) else grad


def asks_others(param: Tensor, group: dict[str, Any], asks: str) -> bool:
    """Whether a step needs the whole gradient of which this process has a shard."""
    if asks == "never" or not dtensor.is_dtensor(param):
        return False
    clips = asks == "always" or group.get("max_grad_norm") is not None
    return clips and sharding_of(param)[0] != 0


class _Waiting(NamedTuple):
    """A parameter whose gradient waits in ``.grad``."""

    param: Tensor
    group: dict[str, Any]
    made_on: torch.cuda.Stream | None  # the stream of the gradient


class Backward:
    """One backward in which parameters are stepped, until :meth:`finish` or :meth:`fail`."""

    def __init__(
        self, collector: Collector, stepper: Any, optimizer: Any, action: str, asks: str
    ) -> None:
        self.action, self.stepper = action, stepper
        self.of_ddp = _params_of_ddp()  # ids of parameters whose gradients a reducer reduces later
        self._collector, self._asks = collector, asks
        self._optimizer = optimizer  # is not to go meanwhile
        self._waiting: list[_Waiting] = []
        self._bytes = 0  # of the gradients queued since the last flush
        # Shards whose step takes a collective. All processes must flush the same ones together, so
        # that only what all of them know decides how long they wait.
        self._asking: list[_Waiting] = []
        self._asking_bytes = 0
        self._used = 0  # how many gradients have been stepped with
        self._finished = self._failed = False

    def waits_for(self, param: Tensor) -> bool:
        return any(other.param is param for other in self._waiting + self._asking)

    def add(self, param: Tensor, group: dict[str, Any], is_last: bool) -> None:
        """Uses the gradient now, or queues it. If other hooks still run (not ``is_last``): queues.

        Queued gradients stay in ``.grad``.
        """
        assert param.grad is not None
        waiting = _Waiting(param, group, current_stream(param.device))
        size = param.grad.nbytes
        sharded = dtensor.is_dtensor(param)
        is_small = size < self._collector.small_bytes
        steps = self.action == "step" and not self._finished
        if sharded and steps and asks_others(param, group, self._asks):
            return self._add_asking(waiting, is_last, is_small)
        # To wait is worth it for what is saved in calls, or in collectives.
        if is_last and (sharded or not is_small):
            self._flush([waiting])
            return
        self._bytes += size
        if sharded or self._bytes >= self._collector.bucket_bytes:
            # This gradient is not flushed: its later hooks may still have to run.
            self._flush(self._waiting)
            self._waiting = []
            self._bytes = size
        if sharded and is_small:
            dtensor.leave_buffer(param.grad, dtensor.local_tensor(param.grad))
        self._waiting.append(waiting)

    def _add_asking(self, waiting: _Waiting, is_last: bool, is_small: bool) -> None:
        param = waiting.param
        # By now all hooks of the parameters that were queued before this one have run.
        if self._asking_bytes >= self._collector.bucket_bytes:
            self._flush_asking()
        if is_small:
            dtensor.leave_buffer(param.grad, dtensor.local_tensor(param.grad))
        self._asking.append(waiting)
        size = param.numel() * param.element_size()  # of all shards
        self._asking_bytes += size // sharding_of(param)[1]
        if is_last and self._asking_bytes >= self._collector.bucket_bytes:
            self._flush_asking()

    def step_reduced(self, params: list[Tensor], grads: list[Tensor]) -> None:
        """Uses gradients that were reduced over processes."""
        groups = map(self._collector.group_of, params)
        of_groups = zip(params, groups, grads, strict=True)
        updates = [Update(p, group, grad) for p, group, grad in of_groups if group is not None]
        self._use(updates)
        self._collector.note_uses((param for param, *_ in updates), self.action)
        if self._failed and self.action != "measure":  # it raised before the reduction had ended
            self.stepper.failed(len(updates))

    def finish(self) -> None:
        self._flush_asking()
        self._flush(self._waiting)
        self._waiting = []
        self._collector.ended(self)
        self._finished, self._optimizer = True, None

    def fail(self) -> None:
        """Called where the backward raised. Does nothing after :meth:`finish`, and twice."""
        if self._finished or self._failed:
            return
        self._failed, self._optimizer = True, None
        self._collector.ended(self)
        self._collector.forget_uses(param for param, *_ in self._waiting + self._asking)
        self.stepper.failed(self._used)

    def _flush_asking(self) -> None:
        self._flush(self._asking)
        self._asking, self._asking_bytes = [], 0

    def _flush(self, waiting: list[_Waiting]) -> None:
        updates = []
        for param, group, made_on in waiting:
            if param.grad is not None:
                use_here(dtensor.local_tensor(param.grad), made_on)
                updates.append(Update(param, group, param.grad))
        self._use(updates)
        if self.action == "measure":  # also of gradients that a later hook has taken
            self._collector.forget_threads(param for param, *_ in waiting)

    def _use(self, updates: list[Update]) -> None:
        if self.action == "measure":
            for batch in self._collector.on_devices(updates):
                self.stepper.measure(batch)
        else:
            for batch in self._collector.batches(updates, self._asks):
                self._step(batch)
            self._used += len(updates)
        for param, *_ in updates:
            param.grad = None

    def _step(self, batch: Batch) -> None:
        if self._collector.own_step:
            self.stepper.step_by_own(batch)
        elif batch.asks:
            self.stepper.step_shards(batch)
        else:
            batch.step(self.stepper.scaling(batch.device))
        self.stepper.stepped()


class _AtEnd:
    """The callback of a graph task, which alone keeps it alive: it goes where the task fails.

    The backward itself may live on in an error's traceback.
    """

    def __init__(self, backward: Backward) -> None:
        self._backward = backward

    @_disable_dynamo  # as the hooks
    def __call__(self) -> None:
        try:
            self._backward.finish()
        except BaseException:
            self._backward.fail()
            raise

    def __del__(self) -> None:
        self._backward.fail()


def _params_of_ddp() -> set[int]:
    """Returns ids of the parameters of all DistributedDataParallel modules, attached or not.

    The modules are searched for, since the reducer's hooks are not visible from Python.
    """
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return set()
    from torch.nn.parallel import DistributedDataParallel

    # Every object refers to its class. To ask the collector for these takes half of what a list of
    # all objects does; it is still some 30 ms.
    kinds: list[Any] = [DistributedDataParallel]
    for kind in kinds:  # which grows
        kinds += kind.__subclasses__()
    modules = [m for m in gc.get_referrers(*kinds) if type(m) in kinds]
    return {id(p) for module in modules for p in module.parameters()}
