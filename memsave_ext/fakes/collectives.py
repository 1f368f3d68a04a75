"""What models that are wrapped for several processes ask of torch, where this one runs alone and on
fake tensors."""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard import _fully_shard
from torch.nn.parallel import distributed as parallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_iter, tree_leaves

from ..adam.ddp import _hooks as attached_hooks
from .mode import NotPredicted
from .patches import Patch, patch

_EMPTY = torch.ops.aten.empty.memory_format
_kept: list[Any] = []  # groups from before, which would wait for their threads as they end
_reducers: weakref.WeakSet[Any] = weakref.WeakSet()
_wrapped: weakref.WeakSet[Any] = weakref.WeakSet()


def run(func: Any, args: tuple[Any, ...]) -> Any:
    """Returns what a collective of ``c10d`` returns on fake tensors: its outputs, which are its
    first argument, and work that is done.

    The work of torch's fake process group has no result, which DistributedDataParallel reads.
    """
    done: torch.futures.Future[list[Tensor]] = torch.futures.Future()
    done.set_result([leaf for leaf in tree_leaves(args[0]) if isinstance(leaf, Tensor)])
    work = c10d._create_work_from_future(done).boxed()  # type: ignore[attr-defined]
    return work if len(func._schema.returns) == 1 else (args[0], work)


def become_rank(count: int) -> None:
    """In a child: makes this process the first of ``count``, the others of which are not there.

    A group that the process has stays as it is, but nothing finds it any more.
    """
    world = distributed_c10d._world
    found = (
        *(world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_backend_config),
        *(world.pg_to_tag, world.tags_to_pg, world.pg_coalesce_state),
    )
    _kept.append([world.default_pg, *(dict(one) for one in found)])
    distributed_c10d._update_default_pg(None)
    for one in found:
        one.clear()
    c10d._unregister_all_process_groups()
    world.group_count = 0
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE=str(count), LOCAL_WORLD_SIZE=str(count))
    dist.init_process_group("fake", rank=0, world_size=count, store=FakeStore())
    patch(_of_groups())
    stay()


def stay() -> None:
    """In a child: lets this process be one of those that it was one of, without the others."""
    patch(_of_wrappers())
    # Hooks ask whether what was reduced is the bucket itself, which of fakes is found, too.
    warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")


def renew(ddp: parallel.DistributedDataParallel) -> None:
    """Gives a module that was wrapped before a reducer for fakes in place of its own, whose buckets
    are real."""
    parts: Any = ddp
    parts.reducer._remove_autograd_hooks()
    parameters, sparse = parts._build_params_for_reducer()
    parts._ddp_init_helper(parameters, sparse, {}, parts.static_graph)
    hooks, parts._comm_hooks = parts._comm_hooks, []
    if attached_hooks.pop(ddp, None) is None:  # else the optimizer is attached once more
        for hook, state in hooks:
            parts.register_comm_hook(state, hook)
    _wrapped.add(ddp)


def wrapped() -> list[parallel.DistributedDataParallel]:
    """Returns the modules in DistributedDataParallel that were made here."""
    return list(_wrapped)


def will_change() -> bool:
    """Whether a step to come makes the buckets of gradients anew: DistributedDataParallel does so
    once, in the order in which gradients came, but where some may not come."""
    return any(not reducer.rebuilt for reducer in _reducers)


def buckets() -> list[Tensor]:
    """Returns the memory that DistributedDataParallel reduces gradients in."""
    return [bucket for reducer in _reducers for bucket in reducer.buckets]


def _of_groups() -> list[Patch]:
    """Those of a group that takes the place of others."""
    return [
        # A program makes its own group; the one that is there takes its place.
        Patch(dist, "init_process_group", _nothing),
        Patch(distributed_c10d, "init_process_group", _nothing),
        Patch(dist, "destroy_process_group", _nothing),
        Patch(distributed_c10d, "destroy_process_group", _nothing),
    ]


def _of_wrappers() -> list[Patch]:
    return [
        # These read what others have sent. What this rank has sent is there already.
        Patch(dist, "broadcast_object_list", _nothing),
        Patch(dist, "all_gather_object", _same_objects),
        Patch(dist, "monitored_barrier", _nothing),
        # The mesh's ranks are numbers that are read; all devices are the CPU here.
        Patch(DeviceMesh, "__init__", _mesh_made),
        Patch(_fully_shard, "_get_post_forward_mesh_info", _on_real_tensors),
        # Shapes are compared, and values sent: those of a first step, which needs less memory.
        Patch(parallel, "_verify_param_shape_across_processes", _nothing),
        Patch(parallel.DistributedDataParallel, "__init__", _noted),
        Patch(dist, "Reducer", lambda _: _Reducer),
    ]


def _nothing(_: Any) -> Callable[..., None]:
    return lambda *args, **kwargs: None


def _same_objects(_: Any) -> Callable[..., None]:
    def all_gather_object(object_list: list[Any], obj: Any, group: Any = None) -> None:
        object_list[:] = [obj] * len(object_list)

    return all_gather_object


def _mesh_made(before: Any) -> Any:
    def made(self: DeviceMesh, device_type: str, mesh: Any = None, **options: Any) -> None:
        device_type = "cpu" if device_type == "cuda" else device_type
        if isinstance(options.get("_rank_map"), FakeTensor):
            options["_rank_map"] = _real(options["_rank_map"])
        mesh = _real(mesh) if isinstance(mesh, FakeTensor) else mesh
        with _disable_current_modes():
            before(self, device_type, mesh, **options)

    return made


def _real(ranks: FakeTensor) -> Tensor:
    if ranks.constant is None:
        raise NotPredicted(
            "predict: the ranks of a DeviceMesh are a tensor whose values are not known before the "
            "step. Make the mesh by init_device_mesh(), or of a list of numbers"
        )
    with _disable_current_modes():
        return ranks.constant.to(torch.int)


def _on_real_tensors(before: Any) -> Any:
    def run_alone(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return before(*args, **kwargs)

    return run_alone


def _noted(before: Any) -> Any:
    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        before(self, *args, **kwargs)
        _wrapped.add(self)

    return made


_TorchsReducer: Any = dist.Reducer  # type: ignore[attr-defined]


class _Reducer(_TorchsReducer):  # type: ignore[misc]
    """torch's reducer: its buckets are fakes, and the numbers of parameters are not."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.buckets: list[Tensor] = []
        self.rebuilt = False
        _reducers.add(self)
        with _OfReducer(self.buckets):
            super().__init__(*args, **kwargs)

    def _rebuild_buckets(self) -> bool:
        made: list[Tensor] = []
        with _OfReducer(made):
            rebuilt: bool = super()._rebuild_buckets()
        if rebuilt:
            self.buckets, self.rebuilt = made, True
        return rebuilt


class _OfReducer(TorchDispatchMode):
    def __init__(self, buckets: list[Tensor]) -> None:
        super().__init__()
        self._buckets = buckets

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [t for t in tree_iter((args, kwargs)) if isinstance(t, Tensor)]
        counts = kwargs.get("dtype") is torch.int32
        fakes = any(isinstance(t, FakeTensor) for t in tensors)
        if func.namespace == "aten" and (counts or (tensors and not fakes)):
            with _disable_current_modes():
                return func(*args, **kwargs)
        result = func(*args, **kwargs)
        if func is _EMPTY:
            self._buckets.append(result)
        return result
