"""Clipping and loss scaling of FSDP2's parameters on gloo ranks: all processes find the same."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from ranks import errors_of_ranks, run_ranks
from test_adam_fsdp import STEPS, data, groups_alive, model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

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


def whole(net):
    params = net.parameters() if isinstance(net, nn.Module) else net
    return [(p.full_tensor() if isinstance(p, DTensor) else p).detach().clone() for p in params]


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
    return norms, whole(net)


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


def all_ways(make_net, ways=CLIPS):
    found = {way.__name__: way(make_net()) for way in ways}
    return found | {f"sgd {way.__name__}": way(make_net(), "sgd") for way in BOTH}


def sharded():
    return all_ways(lambda: shard(model()))


def replicas():
    return all_ways(lambda: shard(model(), mesh_of(2, 1)))


def hybrid():
    return all_ways(lambda: shard(model(), mesh_of(2, dist.get_world_size() // 2)))


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
    before = whole(net)
    scaler.scale(loss(net, part(0))).backward()
    scaler.step(optimizer)
    scaler.update()
    same = [torch.equal(p, q) for p, q in zip(before, whole(net), strict=True)]
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
    before = whole(net)
    with optimizer.norm_pass(1.0):
        scaler.scale(loss(net, part(0))).backward()
    scaler.scale(loss(net, part(0))).backward()
    scaler.step(optimizer)
    scaler.update()
    same = all(torch.equal(p, q) for p, q in zip(before, whole(net), strict=True))
    return same, scaler.get_scale()


# Loops and models: each in backward and after it, which must come to the same bits.


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
    return whole(net)


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
    return whole(net)


# Collectives


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
    infinities = [infinite, infinite_of_sgd, infinite_of_all]
    others = [collectives, gradient_on_one_rank, groups_waiting]
    found = run_ranks(2, [sharded, replicas, mixed, loops, *infinities, *others])
    found |= run_ranks(1, {"alone": sharded})
    return found | run_ranks(4, [hybrid, split_twice])


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


@pytest.mark.parametrize("loop", [*(f.__name__ for f in LOOPS), "two optimizers"])
def test_loops_come_to_the_same_in_backward_and_after_it(results, loop):
    for rank in results["loops"]:
        assert isinstance(rank, dict), rank
        ours, after = rank[loop]
        for p, q in zip(ours, after, strict=True):
            assert torch.equal(p, q)


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
