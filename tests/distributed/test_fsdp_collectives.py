"""Collectives of clipped shards on gloo ranks: how many there are, who takes part, what waits."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from fsdp_clipped import (
    MAKES,
    by_norm_pass,
    in_two_buckets,
    loss,
    mesh_of,
    of_each,
    part,
    scaled,
    shard,
    together,
    whole,
)
from ranks import errors_of_ranks, run_ranks
from test_adam_fsdp import STEPS, groups_alive, model
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import memsave_ext as ms


@contextlib.contextmanager
def counted():
    """Collects the sizes of all-reduces; FSDP2 has none without replicas."""
    sizes, all_reduce = [], dist.all_reduce

    def count(tensor, *args, **kwargs):
        sizes.append(tensor.numel())
        return all_reduce(tensor, *args, **kwargs)

    dist.all_reduce = count
    try:
        yield sizes
    finally:
        dist.all_reduce = all_reduce


def collectives():
    found = {}
    for way in (of_each, in_two_buckets, by_norm_pass, together, scaled):
        with counted() as sizes:
            way(shard(model()))
        found[way.__name__] = sizes
    return found


def gradient_on_one_rank():
    """step() with the norm of all: every process takes part, with a gradient or without."""
    mesh = mesh_of(2)
    params = [nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0)])) for _ in range(2)]
    optimizer = ms.AdamW(params, clip_global_norm=1.0)
    if dist.get_rank() == 0:
        params[1].grad = distribute_tensor(torch.ones(4), mesh, [Shard(0)], src_data_rank=None)
    optimizer.step()
    return optimizer.grad_norm


def split_twice():
    """DTensors split along both dimensions of a mesh, along one and along none, and a plain one."""
    mesh = mesh_of(2, 2)
    kinds = [[Shard(0), Shard(1)], [Replicate(), Shard(0)], [Replicate(), Replicate()]]
    found = []
    for options in ({"clip_global_norm": 1.0}, {"max_grad_norm": 1.0}):
        params = [nn.Parameter(distribute_tensor(torch.ones(4, 6), mesh, kind)) for kind in kinds]
        params.append(nn.Parameter(torch.ones(4, 6)))
        optimizer = ms.Adam(params, betas=(0.0, 0.0), eps=1.0, **options)
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer.step()
        found.append((optimizer.grad_norm, whole(params)))
    return found


def groups_waiting():
    return groups_alive(lambda net: MAKES["adam"](net.parameters(), max_grad_norm=0.05))


def raises_in_backward():
    """On one rank alone; the others must notice."""
    net = shard(model())
    _kept = MAKES["adam"](net.parameters(), max_grad_norm=0.05, bucket_bytes=0)

    def fail(param):
        raise ValueError("spoilt")

    if dist.get_rank() == 0:
        net[1].linear.weight.register_post_accumulate_grad_hook(fail)
    loss(net, part(0)).backward()


@pytest.fixture(scope="module")
def results():
    found = run_ranks(2, [collectives, gradient_on_one_rank, groups_waiting])
    return found | run_ranks(4, [split_twice])


def test_collectives(results):
    """One for all parameters, as they are small; with little room in a bucket, several."""
    params = 12
    for rank in results["collectives"]:
        assert isinstance(rank, dict), rank
        assert rank["of_each"] == [params] * STEPS
        several = rank["in_two_buckets"]
        assert sum(several) == params * STEPS and len(several) == 2 * STEPS
        assert rank["by_norm_pass"] == rank["together"] == [1] * STEPS
        assert rank["scaled"] == [params, 1] * STEPS  # and whether any process found an infinity


def test_a_process_without_gradients_takes_part(results):
    first, second = results["gradient_on_one_rank"]
    assert torch.equal(first, second), (first, second)


def test_each_element_counts_once(results):
    for rank in results["split_twice"]:
        assert isinstance(rank, list), rank
        for norms_of, (norm, values) in zip((96, 24), rank, strict=True):
            if norm is not None:
                torch.testing.assert_close(norm, torch.tensor(96.0).sqrt())
            grad = 1 / (norms_of**0.5 + 1e-6)
            for value in values:
                expected = torch.full((4, 6), 1 - 0.001 * grad / (grad + 1))
                torch.testing.assert_close(value, expected)


def test_waiting_shards_leave_what_was_reduced_together(results):
    for rank in results["groups_waiting"]:
        assert rank == (4, 1), rank


def test_an_error_on_one_rank_ends_all():
    errors = errors_of_ranks(2, raises_in_backward)
    assert all(error is not None for error in errors), errors
    assert "spoilt" in errors[0]
