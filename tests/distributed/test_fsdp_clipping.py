"""Clipping and loss scaling of FSDP2's parameters on gloo ranks: all processes find the same."""

import pytest
import torch
import torch.distributed as dist
from fsdp_clipped import (
    BOTH,
    CLIPS,
    MAKES,
    SOME,
    all_ways,
    loss,
    mesh_of,
    part,
    scaled_together,
    shard,
)
from ranks import run_ranks, whole
from test_adam_fsdp import model
from torch.distributed.fsdp import fully_shard

pytestmark = pytest.mark.filterwarnings("ignore:memsave_ext. norm_pass")


def sharded():
    return all_ways(lambda: shard(model()))


def replicas():
    return all_ways(lambda: shard(model(), mesh_of(2, 1)), SOME, BOTH[:1])


def hybrid():
    mesh = mesh_of(2, dist.get_world_size() // 2)
    return all_ways(lambda: shard(model(), mesh), SOME, BOTH[:1])


def mixed():
    """The last layer is not sharded; its gradients are averaged by hooks."""

    def average(grad):
        dist.all_reduce(grad := grad.clone())
        return grad / dist.get_world_size()

    def make():
        net = model()
        for p in net[3].parameters():
            p.register_hook(average)
        for module in net[:3]:
            fully_shard(module, mesh=mesh_of(2))
        return fully_shard(net, mesh=mesh_of(2), ignored_params=set(net[3].parameters()))

    # torch's GradScaler refuses gradients of both kinds together.
    return all_ways(make, [way for way in CLIPS if way is not scaled_together])


# An infinity in the shard of one process.


def spoil(param):
    local = param.grad.to_local()
    if dist.get_rank() == 0:
        local.view(-1)[0] = float("inf")


def infinite(make="adam"):
    net = shard(model())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    net[1].linear.weight.register_post_accumulate_grad_hook(spoil)
    optimizer = MAKES[make](net.parameters(), grad_scaler=scaler)
    before = whole(net.parameters())
    scaler.scale(loss(net, part(0))).backward()
    scaler.step(optimizer)
    scaler.update()
    same = [torch.equal(p, q) for p, q in zip(before, whole(net.parameters()), strict=True)]
    names = [name for name, _ in net.named_parameters()]
    return [n for n, s in zip(names, same, strict=True) if s], scaler.get_scale()


def infinite_of_sgd():
    return infinite("sgd")


def infinite_of_all():
    """With the norm of all, nothing is stepped."""
    net = shard(model())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    net[1].linear.weight.register_post_accumulate_grad_hook(spoil)
    optimizer = MAKES["adam"](net.parameters(), grad_scaler=scaler)
    before = whole(net.parameters())
    with optimizer.norm_pass(1.0):
        scaler.scale(loss(net, part(0))).backward()
    scaler.scale(loss(net, part(0))).backward()
    scaler.step(optimizer)
    scaler.update()
    same = all(torch.equal(p, q) for p, q in zip(before, whole(net.parameters()), strict=True))
    return same, scaler.get_scale()


@pytest.fixture(scope="module")
def results():
    found = run_ranks(2, [sharded, replicas, mixed, infinite, infinite_of_sgd, infinite_of_all])
    return found | run_ranks(1, {"alone": sharded}) | run_ranks(4, [hybrid])


@pytest.fixture(scope="module")
def one_process():
    return all_ways(model)


@pytest.mark.parametrize("name", ["sharded", "replicas", "mixed", "alone", "hybrid"])
def test_equals_one_process_with_the_whole_batch(results, one_process, name):
    for rank in results[name]:
        assert isinstance(rank, dict), rank
        for way, (norms, values) in rank.items():
            expected_norms, expected = one_process[way]
            for p, q in zip(values, expected, strict=True):
                torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)
            for p, q in zip(norms, expected_norms, strict=True):
                torch.testing.assert_close(p, q, rtol=1e-5, atol=0) if p is not None else None


@pytest.mark.parametrize("name", ["infinite", "infinite_of_sgd"])
def test_an_infinity_of_one_shard_skips_all_of_them(results, name):
    for rank in results[name]:
        assert rank == (["1.linear.weight"], 512.0), rank


def test_an_infinity_skips_all_with_the_norm_of_all(results):
    for rank in results["infinite_of_all"]:
        assert rank == (True, 512.0), rank
