"""Loops and models with clipped shards, on gloo ranks: the same bits in backward and after it."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from fsdp_clipped import loss, mesh_of, part, shard
from ranks import run_ranks, whole
from test_adam_fsdp import STEPS, model
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import memsave_ext as ms


@contextlib.contextmanager
def no_context():
    yield


def frozen(_):
    net = model()
    net[1].linear.weight.requires_grad_(False)
    return shard(net), None


def used_twice(_):
    net = model()
    return shard(nn.Sequential(*net[:2], net[1], net[3])), None


def tied(_):
    net = model()
    net[2].linear.weight = net[1].linear.weight
    return fully_shard(net, mesh=mesh_of(dist.get_world_size())), None


def not_resharded(_):
    return shard(model(), reshard_after_forward=False), None


def mixed_precision(_):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return shard(model(), mp_policy=policy), None


def micro_batches(_):
    net = shard(model())
    return net, lambda optimizer: unreduced(net)


@contextlib.contextmanager
def unreduced(net):
    net.set_requires_gradient_sync(False)
    yield
    net.set_requires_gradient_sync(True)


def accumulated(in_backward):
    return shard(model()), lambda opt: opt.accumulate() if in_backward else no_context()


LOOPS = [frozen, used_twice, tied, not_resharded, mixed_precision, micro_batches, accumulated]


def loops():
    found = {}
    for way in LOOPS:
        found[way.__name__] = [one_loop(way, in_backward) for in_backward in (True, False)]
    found["two optimizers"] = [two_optimizers(in_backward) for in_backward in (True, False)]
    return found


def one_loop(way, in_backward):
    net, around_first = way(in_backward)
    options = {"max_grad_norm": 0.05, "in_backward": in_backward, "bucket_bytes": 100}
    optimizer = ms.AdamW(net.parameters(), lr=0.01, **options)
    for step in range(STEPS):
        if around_first:
            with around_first(optimizer):
                loss(net, part(step + 9)).backward()
        loss(net, part(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return whole(net.parameters())


def two_optimizers(in_backward):
    net = shard(model())
    options = {"max_grad_norm": 0.05, "in_backward": in_backward, "bucket_bytes": 100}
    params = list(net.parameters())
    both = [ms.AdamW(of, lr=0.01, **options) for of in (params[::2], params[1::2])]
    for step in range(STEPS):
        loss(net, part(step)).backward()
        for optimizer in both:
            optimizer.step()
            optimizer.zero_grad()
    return whole(net.parameters())


@pytest.fixture(scope="module")
def results():
    return run_ranks(2, [loops])


@pytest.mark.parametrize("loop", [*(f.__name__ for f in LOOPS), "two optimizers"])
def test_loops_come_to_the_same_in_backward_and_after_it(results, loop):
    for rank in results["loops"]:
        assert isinstance(rank, dict), rank
        ours, after = rank[loop]
        for p, q in zip(ours, after, strict=True):
            assert torch.equal(p, q)
