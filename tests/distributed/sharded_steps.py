"""Training steps of wrapped models, built by the same functions on ranks and in predictions."""

import contextlib
import functools
import time
import unittest.mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import memsave_ext as ms

WIDTH, DEPTH, ROWS = 256, 4, 64
MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).relu())


def network(depth=DEPTH):
    blocks = nn.Sequential(*[Block() for _ in range(depth)])
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), blocks, nn.Linear(WIDTH, 16))


def stepped(model, optimizer=None):
    optimizer = optimizer or torch.optim.AdamW(model.parameters())
    x = torch.randn(ROWS, WIDTH)

    def step():
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step


def alone():
    return stepped(network())


def ddp(**options):
    return stepped(DistributedDataParallel(network(), **options))


def ddp_in_backward():
    model = network()
    ms.checkpoint_modules(model, Block)
    model = DistributedDataParallel(model)
    optimizer = ms.AdamW(model.parameters(), in_backward=True)
    optimizer.attach(model)
    return stepped(model, optimizer)


def sharded(shape=None, depth=DEPTH, **options):
    shape = shape or (dist.get_world_size(),)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards")[-len(shape) :])
    model = network(depth)
    for block in model[1]:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def fsdp(*args, **options):
    return stepped(sharded(*args, **options))


def fsdp_in_backward():
    model = sharded()
    ms.checkpoint_modules(model, Block)
    return stepped(model, ms.AdamW(model.parameters(), in_backward=True, state_dtype="8bit"))


def fsdp_remat():
    model = sharded()
    ms.remat_module(model)
    return stepped(model)


def tensor_parallel():
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = network()
    for block in model[1]:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return stepped(model)


def fsdp_of_parallel_tensors():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shards", "parts"))
    model = network()
    for block in model[1]:
        parts = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(block, mesh["parts"], parts)
        fully_shard(block, mesh=mesh["shards"])
    fully_shard(model, mesh=mesh["shards"])
    return stepped(model, torch.optim.AdamW(model.parameters(), foreach=False))


BUILDS = {
    "DDP": ddp,
    "DDP, bucket views": functools.partial(ddp, gradient_as_bucket_view=True),
    "DDP, small buckets": functools.partial(ddp, bucket_cap_mb=3),
    "DDP, static graph": functools.partial(ddp, static_graph=True),
    "DDP, unused": functools.partial(ddp, find_unused_parameters=True),
    "DDP, checkpoint, Adam in backward": ddp_in_backward,
    "FSDP2": fsdp,
    "FSDP2, no reshard": functools.partial(fsdp, reshard_after_forward=False),
    "FSDP2, reshard to 2": functools.partial(fsdp, reshard_after_forward=2),
    "FSDP2, mixed": functools.partial(fsdp, depth=10, mp_policy=MIXED),
    "FSDP2, offload": functools.partial(fsdp, offload_policy=CPUOffloadPolicy(pin_memory=False)),
    "FSDP2, checkpoint, 8-bit Adam in backward": fsdp_in_backward,
    "FSDP2, remat": fsdp_remat,
    "HSDP": functools.partial(fsdp, (2, 2)),
    "tensor parallel": tensor_parallel,
    "FSDP2, tensor parallel": fsdp_of_parallel_tensors,
}


def measured(name):
    """The peak of a later step on this rank, without the batch.

    All memory is followed from the beginning: that of gathered parameters comes from the allocator
    that was there when FSDP2 made their storages.
    """
    tracked = ms.memory.track()
    with tracked, pauses():
        _, _, step = BUILDS[name]()
        peaks = []
        for _ in range(4):
            dist.barrier()
            tracked.reset_peak()
            step()
            peaks.append(tracked.peak - ROWS * WIDTH * 4)
    return peaks[-1]


@contextlib.contextmanager
def pauses():
    """A thread of gloo holds what a collective was given for some time after it is over: of peaks
    without a pause after each one varies by a block."""
    names = ["all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce"]
    names += ["all_gather_single", "reduce_scatter_single"]  # what torch 2.13 calls
    with contextlib.ExitStack() as stack:
        for name in filter(dist.__dict__.get, names):
            slow = _with_a_pause(getattr(dist, name))
            stack.enter_context(unittest.mock.patch.object(dist, name, slow))
        yield


def _with_a_pause(collective):
    @functools.wraps(collective)
    def slow(*args, **options):
        result = collective(*args, **options)
        time.sleep(0.004)
        return result

    return slow
