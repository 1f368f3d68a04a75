"""Nets of FSDP2 whose optimizers have states in blocks, for tests on gloo ranks."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import memsave_ext as ms

STEPS = 3
# By name: an optimizer with states in blocks.
OPTIMIZERS = {
    "8bit": (ms.AdamW, {"lr": 0.01, "state_dtype": "8bit"}),
    "4bit": (ms.AdamW, {"lr": 0.01, "state_dtype": "4bit"}),
    "SGD 8bit": (ms.SGD, {"lr": 0.01, "momentum": 0.9, "dampening": 0.1, "state_dtype": "8bit"}),
    "Lion 8bit": (ms.Lion, {"lr": 0.003, "state_dtype": "8bit"}),
}
EVEN = [(64, 128), (32, 256)]  # shards of whole blocks, in one process and in two
# Shards that end within a block; of 4800 and 3600 elements; of 5000 and none; of 2400, all of them
# more than 4096; of less than 4096.
ODD = [(10, 900), (7, 1200), (1, 5000), (8, 600), (3, 100)]


class Net(nn.Module):
    def __init__(self, shapes):
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(nn.Linear(wide, high) for high, wide in shapes)

    def forward(self, x):
        return sum(layer(x[:, : layer.in_features]).sin().sum() for layer in self.layers)


def data(step):
    return torch.randn(4, 5000, generator=torch.Generator().manual_seed(step))


def part(step):
    return data(step).chunk(dist.get_world_size())[dist.get_rank()]


def shard(net, mesh=None):
    mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in net.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def make(name, params, in_backward=True):
    kind, options = OPTIMIZERS[name]
    return kind(params, **options, in_backward=in_backward)


def backward(net, step):
    (net(part(step)) * dist.get_world_size()).backward()  # FSDP2 takes the mean of gradients


def train(net, optimizer, start=0, steps=STEPS):
    for step in range(start, start + steps):
        backward(net, step)
        assert all(p.grad is None for p in net.parameters())
        optimizer.step()
        optimizer.zero_grad()


def as_before(optimizer, state, old, prefix=""):
    """What a checkpoint of version 0.3.0 or before is loaded into: that of docs/distributed.md."""
    fp32 = optimizer.to_fp32_state_dict(state)["state"]
    for name, now in state["state"].items():
        now = {n: v["codes"] if isinstance(v, dict) else v for n, v in now.items()}
        if any(f"{prefix}state.{name}.{n}" not in old for n in now):  # it had float32 states
            now |= fp32[name]
        state["state"][name] = {n: v for n, v in now.items() if f"{prefix}state.{name}.{n}" in old}
    return state
