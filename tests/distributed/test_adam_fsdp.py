"""Adam stepped in backward, and checkpointing, under FSDP2 (fully_shard), on gloo ranks."""

import os

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import run_ranks, whole
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.multiprocessing.reductions import StorageWeakRef

import memsave_ext as ms

STEPS = 4
FOLDER = "MEMSAVE_EXT_TEST_FOLDER"  # an environment variable, which the ranks inherit


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(7), nn.Linear(7, 7)  # of odd sizes

    def forward(self, x):
        return x + self.linear(self.norm(x)).tanh()


def model():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 7), Block(), Block(), nn.Linear(7, 1))


def data(step):
    return torch.randn(12, 6, generator=torch.Generator().manual_seed(step))


def part(step):
    return data(step).chunk(dist.get_world_size())[dist.get_rank()]


def loss(net, x):
    return (net(x) - 1).square().mean()


def shard(net, **kwargs):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in net:
        fully_shard(module, mesh=mesh, **kwargs)
    return fully_shard(net, mesh=mesh, **kwargs)


def values(net):
    """By name, as they are without checkpointing modules and shards."""
    names, params = zip(*net.named_parameters(), strict=True)
    return dict(zip(names, whole(params), strict=True))


def train(net, optimizer, start=0, steps=STEPS):
    for step in range(start, start + steps):
        loss(net, part(step)).backward()
        assert all(p.grad is None for p in net.parameters())
        optimizer.step()
        optimizer.zero_grad()
    return values(net)


def adam(net, **kwargs):
    return ms.AdamW(net.parameters(), lr=0.01, in_backward=True, **kwargs)


def sharded():
    net = shard(model())
    return train(net, adam(net))


def at_once():
    net = shard(model())
    return train(net, adam(net, small_bytes=0))


def several_roots():
    """Each reduces its last gradients at the end of backward, when others have been stepped."""
    net = model()
    for module in net:
        fully_shard(module, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return train(net, adam(net))


def resharded_after_forward():
    net = shard(model(), reshard_after_forward=True)
    return train(net, adam(net))


def checkpointed_before_sharding():
    net = model()
    ms.checkpoint_modules(net, Block)
    net = shard(net, reshard_after_forward=True)
    return train(net, adam(net))


def checkpointed_after_sharding():
    net = shard(model(), reshard_after_forward=True)
    ms.checkpoint_modules(net, Block)
    return train(net, adam(net))


def without_in_backward():
    net = shard(model())
    optimizer = ms.AdamW(net.parameters(), lr=0.01)
    for step in range(STEPS):
        loss(net, part(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return values(net)


def micro_batches():
    net = shard(model())
    optimizer = adam(net)
    for step in range(STEPS):
        first, second = part(step).chunk(2)
        net.set_requires_gradient_sync(False)
        (loss(net, first) / 2).backward()
        net.set_requires_gradient_sync(True)
        (loss(net, second) / 2).backward()
        optimizer.step()
    return values(net)


def accumulated_after_reduction():
    net = shard(model())
    optimizer = adam(net)
    for step in range(STEPS):
        first, second = part(step).chunk(2)
        with optimizer.accumulate():
            (loss(net, first) / 2).backward()
        (loss(net, second) / 2).backward()
        optimizer.step()
    return values(net)


def checkpoint(saved_by):
    return f"{os.environ[FOLDER]}/{saved_by}"


def resumed():
    """From a checkpoint that torch.distributed.checkpoint wrote, into other objects."""
    net = shard(model())
    optimizer = adam(net)
    train(net, optimizer, 0, 2)
    states = dict(zip(("model", "optimizer"), get_state_dict(net, optimizer), strict=True))
    dcp.save(states, checkpoint_id=checkpoint(dist.get_world_size()))
    return load(dist.get_world_size())


def load(saved_by):
    net = shard(model())
    optimizer = adam(net)
    states = dict(zip(("model", "optimizer"), get_state_dict(net, optimizer), strict=True))
    dcp.load(states, checkpoint_id=checkpoint(saved_by))
    set_state_dict(
        net, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"]
    )
    return train(net, optimizer, 2, STEPS - 2)


def resumed_by_others():
    return load(2)


SAME = [
    sharded, at_once, several_roots, resharded_after_forward, checkpointed_before_sharding,
    checkpointed_after_sharding, without_in_backward, micro_batches, accumulated_after_reduction,
    resumed,
]  # fmt: skip


def mixed_precision():
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    results = []
    for ours in (True, False):
        net = shard(model(), mp_policy=policy)
        optimizer = adam(net) if ours else torch.optim.AdamW(net.parameters(), lr=0.01)
        for step in range(STEPS):
            loss(net, part(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append(values(net))
    return results


def hooks_see_gradients():
    """Those registered before ours and after."""
    net = shard(model())
    seen = []

    def see(param):
        seen.append(param.grad is not None)

    for p in net.parameters():
        p.register_post_accumulate_grad_hook(see)
    optimizer = adam(net, small_bytes=0)
    for p in net.parameters():
        p.register_post_accumulate_grad_hook(see)
    loss(net, part(0)).backward()
    assert all(p.grad is None for p in net.parameters())
    count = len(list(net.parameters()))
    optimizer.step()
    optimizer.remove_hooks()
    loss(net, part(0)).backward()
    kept = [p.grad is not None for p in net.parameters()]
    return seen == [True] * 4 * count, all(kept)


def groups_alive(make, later_hooks=False):
    """The most groups whose reduced gradients were there when another's were."""
    net = shard(model())
    seen, most = [], 0

    def see(param):
        nonlocal most
        storage = StorageWeakRef(param.grad.to_local().untyped_storage())
        if all(storage.cdata != other.cdata for other in seen):
            seen.append(storage)
        most = max(most, sum(not other.expired() for other in seen))

    for p in net.parameters():
        p.register_post_accumulate_grad_hook(see)
    _kept = make(net)
    if later_hooks:
        for p in net.parameters():
            p.register_post_accumulate_grad_hook(lambda param: None)
    loss(net, part(0)).backward()
    return len(seen), most


def gradients_do_not_wait():
    return groups_alive(adam)


def gradients_wait_for_later_hooks():
    return groups_alive(adam, later_hooks=True)


def raises_twice():
    net = shard(model())
    _kept = adam(net)
    loss(net, part(0)).backward()
    try:
        loss(net, part(0)).backward()
    except RuntimeError as error:
        return str(error)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    os.environ[FOLDER] = str(tmp_path_factory.mktemp("checkpoints"))
    others = [mixed_precision, hooks_see_gradients, raises_twice]
    alive = [gradients_do_not_wait, gradients_wait_for_later_hooks]
    found = run_ranks(2, [*SAME, *others, *alive])
    found |= run_ranks(3, [resumed_by_others])
    del os.environ[FOLDER]
    return found


def alone():
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    for step in range(STEPS):
        loss(net, data(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return values(net)


@pytest.mark.parametrize("name", [f.__name__ for f in [*SAME, resumed_by_others]])
def test_equals_one_process_with_the_whole_batch(results, name):
    expected = alone()
    for rank in results[name]:
        assert isinstance(rank, dict), rank
        for parameter, value in rank.items():
            torch.testing.assert_close(value, expected[parameter], rtol=1e-5, atol=1e-6)


def test_mixed_precision_as_torch(results):
    for rank in results["mixed_precision"]:
        assert isinstance(rank, list), rank
        ours, theirs = rank
        for name, value in ours.items():
            torch.testing.assert_close(value, theirs[name], rtol=1e-4, atol=1e-5)


def test_hooks(results):
    for rank in results["hooks_see_gradients"]:
        assert rank == (True, True), rank


def test_reduced_gradients_go_before_the_next_group_is(results):
    """Small ones are views of what was reduced together: one that waited would keep it all."""
    for rank in results["gradients_do_not_wait"]:
        assert rank == (4, 1), rank
    for rank in results["gradients_wait_for_later_hooks"]:  # copies do
        assert rank == (4, 1), rank


def test_a_second_backward_is_refused(results):
    for message in results["raises_twice"]:
        assert "receives a second gradient in one step" in str(message)
