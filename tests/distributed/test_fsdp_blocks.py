"""States in blocks of the shards of FSDP2's parameters, on gloo ranks: steps."""

from unittest import mock

import pytest
import torch
from fsdp_blocks import (
    EVEN,
    ODD,
    OPTIMIZERS,
    STEPS,
    Net,
    backward,
    local,
    make,
    shard,
    train,
)
from ranks import run_ranks, whole
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from memsave_ext.adam import blocks


def beside_plain_shards(shapes, mesh=None):
    """This process's shards after training, beside plain parameters of the same values."""
    results = {}
    for name in OPTIMIZERS:
        ours = shard(Net(shapes), mesh)
        optimizer = make(name, ours.parameters())
        train(ours, optimizer)
        gives = shard(Net(shapes), mesh)
        plain = [nn.Parameter(local(p.detach()).clone()) for p in gives.parameters()]
        reference = make(name, plain, in_backward=False)
        for step in range(STEPS):
            backward(gives, step)
            for p, q in zip(gives.parameters(), plain, strict=True):
                q.grad, p.grad = local(p.grad), None
            with mock.patch.object(blocks, "SMALLEST", 2400):  # as the whole parameters have blocks
                reference.step()
            for p, q in zip(gives.parameters(), plain, strict=True):
                local(p.detach()).copy_(q.detach())
        results[name] = [
            (list(p.shape), local(p.detach()).clone(), q.detach(), sorted(optimizer.state[p]))
            for p, q in zip(ours.parameters(), plain, strict=True)
        ]
    return results


def even():
    return beside_plain_shards(EVEN)


def odd():
    return beside_plain_shards(ODD)


def hybrid(replicas, shards):
    return init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("replicas", "shards"))


def replicated_shards():
    return beside_plain_shards(EVEN + ODD, hybrid(1, 2))


def replicas():
    return beside_plain_shards(EVEN + ODD, hybrid(2, 1))


def without_in_backward():
    """The same values as with it."""
    results = {}
    for name in OPTIMIZERS:
        of = []
        for in_backward in (True, False):
            net = shard(Net(EVEN + ODD))
            optimizer = make(name, net.parameters(), in_backward)
            for step in range(STEPS):
                backward(net, step)
                optimizer.step()
                optimizer.zero_grad()
            of.append(whole(net.parameters()))
        results[name] = of
    return results


@pytest.fixture(scope="module")
def results():
    found = run_ranks(2, [even, odd, replicated_shards, replicas, without_in_backward])
    return found | run_ranks(1, {"odd alone": odd})


STEPPED = ["even", "odd", "replicated_shards", "replicas", "odd alone"]


@pytest.mark.parametrize("name", STEPPED)
def test_steps_are_those_of_the_shards(results, name):
    for rank in results[name]:
        assert isinstance(rank, dict), rank
        for parameters in rank.values():
            for shape, ours, plain, _ in parameters:
                assert torch.equal(ours, plain), shape


@pytest.mark.parametrize("name", STEPPED)
def test_ranks_agree_on_the_format(results, name):
    """They have blocks or none, whatever the size of their own shard."""
    of_ranks = [[[p[3] for p in of] for of in rank.values()] for rank in results[name]]
    assert all(of == of_ranks[0] for of in of_ranks)
    small = [shape for shape, _, _, keys in results[name][0]["8bit"] if "exp_avg_scale" not in keys]
    expected = [] if name == "even" else [[3, 100]]
    assert [shape for shape in small if len(shape) > 1] == expected


def test_without_in_backward(results):
    for rank in results["without_in_backward"]:
        assert isinstance(rank, dict), rank
        for one, other in rank.values():
            for p, q in zip(one, other, strict=True):
                assert torch.equal(p, q)
