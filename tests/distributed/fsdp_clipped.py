"""Nets of FSDP2 whose gradients are clipped or scaled, for tests on gloo ranks."""

import torch
import torch.distributed as dist
from ranks import whole
from test_adam_fsdp import STEPS, data
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import memsave_ext as ms


def part(step):
    if not dist.is_initialized():
        return data(step)
    return data(step).chunk(dist.get_world_size())[dist.get_rank()]


def loss(net, x):
    return (net(x) - 3).square().mean()


def mesh_of(*shape):
    names = ("replicas", "shards")[-len(shape) :]
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def shard(net, mesh=None, **options):
    mesh = mesh or mesh_of(dist.get_world_size())
    for module in dict.fromkeys(net):
        fully_shard(module, mesh=mesh, **options)
    return fully_shard(net, mesh=mesh, **options)


MAKES = {
    "adam": lambda params, **options: ms.AdamW(params, lr=0.01, in_backward=True, **options),
    "sgd": lambda params, **options: ms.in_backward(torch.optim.SGD(params, lr=0.1), **options),
}


def train(net, optimizer, clips=None, scaler=None):
    """Returns the norms, if they are measured, and the parameters."""
    norms = []
    for step in range(STEPS):
        if clips is not None:
            with optimizer.norm_pass(clips):
                loss(net, part(step)).backward()
        value = loss(net, part(step))
        (value if scaler is None else scaler.scale(value)).backward()
        if optimizer.in_backward:
            assert all(p.grad is None for p in net.parameters())
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
        norms.append(optimizer.grad_norm)
    return norms, whole(net.parameters())


def of_each(net, make="adam", **options):
    return train(net, MAKES[make](net.parameters(), max_grad_norm=0.05, **options))


def at_once(net, make="adam"):
    return of_each(net, make, bucket_bytes=0)


def in_two_buckets(net, make="adam"):
    return of_each(net, make, bucket_bytes=200)


def by_norm_pass(net, make="adam"):
    return train(net, MAKES[make](net.parameters()), clips=0.5)


def together(net):
    optimizer = ms.AdamW(net.parameters(), lr=0.01, clip_global_norm=0.5)
    return train(net, optimizer)


def scaled(net, make="adam", **options):
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = MAKES[make](net.parameters(), grad_scaler=scaler, **options)
    return train(net, optimizer, scaler=scaler)


def scaled_and_clipped(net, make="adam"):
    return scaled(net, make, max_grad_norm=0.05)


def scaled_together(net):
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = ms.AdamW(net.parameters(), lr=0.01, clip_global_norm=0.5, grad_scaler=scaler)
    return train(net, optimizer, scaler=scaler)


CLIPS = [of_each, at_once, in_two_buckets, by_norm_pass, together, scaled, scaled_and_clipped,
         scaled_together]  # fmt: skip
BOTH = [of_each, at_once, by_norm_pass, scaled, scaled_and_clipped]  # also of in_backward()


# One of each kind of norm and of scale, for meshes where only those who are asked are others.
SOME = [of_each, by_norm_pass, together, scaled_and_clipped, scaled_together]


def all_ways(make_net, ways=CLIPS, both=BOTH):
    found = {way.__name__: way(make_net()) for way in ways}
    return found | {f"sgd {way.__name__}": way(make_net(), "sgd") for way in both}
