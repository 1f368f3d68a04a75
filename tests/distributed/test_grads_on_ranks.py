"""``grads_on=FOLDER`` of sharded and of replicated parameters, on two gloo ranks."""

import tempfile

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks, whole
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import memsave_ext as ms
from memsave_ext.elsewhere.gradients import _values_of


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(256, 300), nn.Tanh(), nn.Linear(300, 260), nn.Tanh())


def sharded(**options):
    net = network()
    for part in (net[0], net[2], net):
        fully_shard(part, **options)
    return net


def replicated(**options):
    return nn.parallel.DistributedDataParallel(network(), **options)


def train(net, optimizer, backwards):
    away, norms = [], []
    for step in range(3):
        for number in range(backwards):
            seed = (step * backwards + number) * 2 + dist.get_rank()
            x = torch.randn(8, 256, generator=torch.Generator().manual_seed(seed))
            net(x).square().mean().backward()
        away.append(sum(_values_of(p.grad) is not None for p in net.parameters()))
        norm = torch.nn.utils.clip_grad_norm_(net.parameters(), 0.05)
        norms.append(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
        optimizer.step()
        optimizer.zero_grad()
    return whole([*net.parameters()]), norms, away


def both(make, backwards=1):
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for on in ({}, {"grads_on": folder}):
            net = make()
            found.append(train(net, ms.AdamW(net.parameters(), lr=1e-2, **on), backwards))
    return found


def shards():
    return both(sharded)


def shards_that_accumulate():
    return both(sharded, 2)


def shards_of_mixed_precision():
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return both(lambda: sharded(mp_policy=policy))


def replicas():
    return both(replicated)


def replicas_that_accumulate():
    return both(replicated, 2)


def replicas_with_views_of_buckets():
    return both(lambda: replicated(gradient_as_bucket_view=True), 2)


def replicas_of_a_static_graph():
    return both(lambda: replicated(static_graph=True))


def reduced_by_hand():
    """Collectives do not say in their schemas what they write."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for on in ({}, {"grads_on": folder}):
            net = network()
            optimizer = ms.AdamW(net.parameters(), lr=1e-2, **on)
            x = torch.randn(8, 256, generator=torch.Generator().manual_seed(dist.get_rank()))
            net(x).square().mean().backward()
            away = [sum(_values_of(p.grad) is not None for p in net.parameters())]
            for number, param in enumerate(net.parameters()):
                work = dist.all_reduce(param.grad, async_op=number > 1)
                if work is not None:
                    work.wait()
            optimizer.step()
            found.append(([p.detach() for p in net.parameters()], [], away))
    return found


def uneven_shards(trained, **options):
    """Of which those of one process alone are large enough to lie elsewhere, or for two parts."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for on in ({}, {"grads_on": folder}):
            torch.manual_seed(0)
            net = nn.Sequential(
                nn.Linear(253, 129, bias=False), nn.Linear(129, 1024, bias=False),
                nn.Linear(1024, 257, bias=False), nn.Linear(257, 1024, bias=False),
                nn.Linear(1024, 257, bias=False),
            )  # fmt: skip
            for i, part in enumerate(net):
                fully_shard(part.requires_grad_(i in trained))
            optimizer = ms.AdamW([net[i].weight for i in trained], lr=1e-2, **options, **on)
            away = []
            for step in range(2):
                x = torch.randn(8, 253, generator=torch.Generator().manual_seed(step))
                net(x).square().mean().backward()
                elsewhere = sum(_values_of(p.grad) is not None for p in net.parameters())
                away.append(2 if elsewhere else 0)
                optimizer.step()
                net.zero_grad()
            found.append((whole([*net.parameters()]), [], away))
    return found


def uneven_shards_clipped():
    return uneven_shards((2, 4), max_grad_norm=1e-3)


def uneven_shards_clipped_together():
    return uneven_shards((0,), clip_global_norm=1e6)


def mixed_network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(64, 600), nn.Tanh(), nn.Linear(600, 64), nn.LayerNorm(64), nn.Linear(64, 600)
    )


def mixed(second):
    """Parameters of tensor parallelism, plain ones, and with ``second`` shards on another mesh."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for on in ({}, {"grads_on": folder}):
            net = mixed_network()
            mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
            parallelize_module(net, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
            if second:
                of_shards = init_device_mesh("cpu", (1, 2), mesh_dim_names=("copies", "shards"))
                fully_shard(net[4], mesh=of_shards)
            optimizer = ms.SGD(net.parameters(), lr=0.1, clip_global_norm=0.05, **on)
            norms, away = train_mixed(net, optimizer)
            assert any(away) == bool(on)
            found.append((whole([*net.parameters()]), norms))
    return found


def train_mixed(net, optimizer):
    norms, away = [], []
    for step in range(3):
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(step))
        net(x).square().mean().backward()
        away += [_values_of(p.grad) is not None for p in net.parameters()]
        if isinstance(optimizer, torch.optim.SGD) and not isinstance(optimizer, ms.SGD):
            norms.append(torch.nn.utils.clip_grad_norm_(net.parameters(), 0.05))
        optimizer.step()
        if isinstance(optimizer, ms.SGD):
            norms.append(optimizer.grad_norm)
        optimizer.zero_grad()
    return norms, away


def parallel_and_plain():
    return mixed(second=False)


def parallel_plain_and_shards():
    return mixed(second=True)


FUNCTIONS = [
    shards, shards_that_accumulate, shards_of_mixed_precision, replicas, replicas_that_accumulate,
    replicas_with_views_of_buckets, replicas_of_a_static_graph, reduced_by_hand,
    uneven_shards_clipped, uneven_shards_clipped_together,
]  # fmt: skip

MIXED = [parallel_and_plain, parallel_plain_and_shards]


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(2, [*FUNCTIONS, *MIXED])


@pytest.mark.parametrize("name", [function.__name__ for function in FUNCTIONS])
def test_bits_are_those_of_gradients_in_memory(name, ranks):
    for result in ranks[name]:
        assert not isinstance(result, str), result
        (plain, norms, none), (ours, same, away) = result
        assert set(none) == {0}
        if "together" not in name:  # in one process alone
            assert set(away) == {0 if "views" in name else 2}  # views of a bucket stay
        for one, other in zip((*plain, *norms), (*ours, *same), strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("name", [function.__name__ for function in MIXED])
def test_the_norm_of_gradients_of_several_meshes(name, ranks):
    net = mixed_network()
    expected, _ = train_mixed(net, torch.optim.SGD(net.parameters(), lr=0.1))
    assert min(expected) > 0.05
    for result in ranks[name]:
        assert not isinstance(result, str), result
        for params, norms in result:
            for one, other in zip(params, net.parameters(), strict=True):
                torch.testing.assert_close(one, other.detach(), rtol=1e-5, atol=1e-6)
            for one, other in zip(norms, expected, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
