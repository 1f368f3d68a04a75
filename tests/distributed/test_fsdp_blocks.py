"""States in blocks of the shards of FSDP2's parameters, on gloo ranks: steps and checkpoints."""

import copy
import os

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import run_ranks
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import memsave_ext as ms

FOLDER = "MEMSAVE_EXT_TEST_FOLDER"  # an environment variable, which the ranks inherit
STEPS = 3
FORMATS = ["8bit", "4bit"]
EVEN = [(64, 128), (32, 256)]  # shards of whole blocks, in one process and in two
# Shards that end within a block; of 4800 and 3600 elements; of 5000 and none; of less than 4096.
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


def whole(values):
    return [(v.full_tensor() if isinstance(v, DTensor) else v).detach().clone() for v in values]


def adam(net, states, **kwargs):
    return ms.AdamW(net.parameters(), lr=0.01, state_dtype=states, in_backward=True, **kwargs)


def train(net, optimizer, start=0, steps=STEPS):
    for step in range(start, start + steps):
        net(part(step)).backward()
        assert all(p.grad is None for p in net.parameters())
        optimizer.step()
        optimizer.zero_grad()


def beside_plain_shards(shapes, mesh=None):
    """This process's shards after training, beside plain parameters of the same values."""
    results = {}
    for states in FORMATS:
        ours = shard(Net(shapes), mesh)
        optimizer = adam(ours, states)
        train(ours, optimizer)
        gives = shard(Net(shapes), mesh)
        plain = [nn.Parameter(local(p.detach()).clone()) for p in gives.parameters()]
        reference = ms.AdamW(plain, lr=0.01, state_dtype=states)
        for step in range(STEPS):
            gives(part(step)).backward()
            for p, q in zip(gives.parameters(), plain, strict=True):
                q.grad, p.grad = local(p.grad), None
            reference.step()
            for p, q in zip(gives.parameters(), plain, strict=True):
                local(p.detach()).copy_(q.detach())
        results[states] = [
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
    for states in FORMATS:
        of = []
        for in_backward in (True, False):
            net = shard(Net(EVEN + ODD))
            options = {"state_dtype": states, "in_backward": in_backward}
            optimizer = ms.AdamW(net.parameters(), lr=0.01, **options)
            for step in range(STEPS):
                net(part(step)).backward()
                optimizer.step()
                optimizer.zero_grad()
            of.append(whole(net.parameters()))
        results[states] = of
    return results


def folder(name):
    return f"{os.environ[FOLDER]}/{name}"


def saved(shapes, name, states):
    net = shard(Net(shapes))
    optimizer = adam(net, states)
    train(net, optimizer)
    state = get_optimizer_state_dict(net, optimizer)
    dcp.save({"model": net.state_dict(), "optimizer": state}, checkpoint_id=folder(name))
    fp32 = optimizer.to_fp32_state_dict(state)
    dcp.save({"model": net.state_dict(), "optimizer": fp32}, checkpoint_id=folder(f"{name}-fp32"))
    train(net, optimizer, STEPS, 1)
    return whole(net.parameters())


def loaded(shapes, name, states, fp32=False):
    net = shard(Net(shapes))
    optimizer = adam(net, states)
    state = get_optimizer_state_dict(net, optimizer)
    if fp32:
        state = optimizer.to_fp32_state_dict(state)
    held = {"model": net.state_dict(), "optimizer": state}
    dcp.load(held, checkpoint_id=folder(name))
    net.load_state_dict(held["model"])
    set_optimizer_state_dict(net, optimizer, optim_state_dict=held["optimizer"])
    moments = optimizer.to_fp32_state_dict()["state"]
    found = [whole((s["exp_avg"], s["exp_avg_sq"])) for s in moments.values()]
    train(net, optimizer, STEPS, 1)
    return whole(net.parameters()), found


def save_all():
    of = dist.get_world_size()
    return {
        (kind, states): saved(shapes, f"{kind}-{states}-{of}", states)
        for kind, shapes in (("even", EVEN), ("odd", ODD))
        for states in FORMATS
    }


def load_all(by, of):
    """What ``by`` processes have saved."""
    results = {}
    for kind, shapes in (("even", EVEN), ("odd", ODD)):
        for states in FORMATS:
            for suffix in ("", "-fp32"):
                name = f"{kind}-{states}-{by}{suffix}"
                try:
                    results[name] = loaded(shapes, name, states, bool(suffix))
                except (Exception, CheckpointException) as error:
                    results[name] = str(error)
    return results


def load_of_one():
    return load_all(1, dist.get_world_size())


def load_of_two():
    return load_all(2, dist.get_world_size())


def full():
    """A full state dict, into the same sharding and, for an error, into that of one process."""
    results = {}
    options = StateDictOptions(full_state_dict=True)
    for states in FORMATS:
        for kind, shapes in (("even", EVEN), ("odd", ODD)):
            net = shard(Net(shapes))
            optimizer = adam(net, states)
            train(net, optimizer)
            state = copy.deepcopy(get_optimizer_state_dict(net, optimizer, options=options))
            other = shard(Net(shapes))
            other.load_state_dict(net.state_dict())
            into = adam(other, states)
            set_optimizer_state_dict(other, into, state, options=options)
            train(net, optimizer, STEPS, 1)
            train(other, into, STEPS, 1)
            alone = Net(shapes)
            plain = ms.AdamW(alone.parameters(), lr=0.01, state_dtype=states)
            try:
                set_optimizer_state_dict(alone, plain, state)
                said = "loaded"
            except ValueError as error:
                said = str(error)
            results[kind, states] = whole(net.parameters()), whole(other.parameters()), said
    return results


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    os.environ[FOLDER] = str(tmp_path_factory.mktemp("checkpoints"))
    steps = [even, odd, replicated_shards, replicas, without_in_backward, full]
    found = run_ranks(2, [*steps, save_all])
    found["saved by 2"] = found.pop("save_all")
    alone = run_ranks(1, {"odd alone": odd, "saved by 1": save_all, "2 to 1": load_of_two})
    found |= alone | run_ranks(2, {"1 to 2": load_of_one, "2 to 2": load_of_two})
    del os.environ[FOLDER]
    return found


STEPPED = ["even", "odd", "replicated_shards", "replicas", "odd alone"]


@pytest.mark.parametrize("name", STEPPED)
def test_steps_are_those_of_the_shards(results, name):
    for rank in results[name]:
        assert isinstance(rank, dict), rank
        for parameters in rank.values():
            for shape, ours, plain, _ in parameters:
                # Plain parameters of 3600 elements have no blocks.
                if shape[0] == 7 and name in ("odd", "replicated_shards"):
                    torch.testing.assert_close(ours, plain, rtol=0, atol=2e-2)
                else:
                    assert torch.equal(ours, plain), shape


@pytest.mark.parametrize("name", STEPPED)
def test_ranks_agree_on_the_format(results, name):
    """They have blocks or none, whatever the size of their own shard."""
    of_ranks = [[[p[3] for p in of] for of in rank.values()] for rank in results[name]]
    assert all(of == of_ranks[0] for of in of_ranks)
    small = [shape for shape, _, _, keys in results[name][0]["8bit"] if "exp_avg_scale" not in keys]
    alone = name in ("replicas", "odd alone")
    expected = [] if name == "even" else [[3, 100]] if alone else [[8, 600], [3, 100]]
    assert [shape for shape in small if len(shape) > 1] == expected


def test_without_in_backward(results):
    for rank in results["without_in_backward"]:
        assert isinstance(rank, dict), rank
        for one, other in rank.values():
            for p, q in zip(one, other, strict=True):
                assert torch.equal(p, q)


def equal(some, others):
    assert all(torch.equal(p, q) for p, q in zip(some, others, strict=True))


@pytest.mark.parametrize("states", FORMATS)
@pytest.mark.parametrize("kind", ["even", "odd"])
def test_resumes_with_the_same_sharding(results, kind, states):
    for rank, going_on in zip(results["2 to 2"], results["saved by 2"], strict=True):
        assert isinstance(rank, dict), rank
        assert isinstance(rank[f"{kind}-{states}-2"], tuple), rank[f"{kind}-{states}-2"]
        equal(rank[f"{kind}-{states}-2"][0], going_on[kind, states])


@pytest.mark.parametrize("states", FORMATS)
@pytest.mark.parametrize(("by", "into"), [(1, 2), (2, 1)])
def test_another_world_size(results, states, by, into):
    """Whole blocks go over; others are refused. Both do in float32."""
    for rank in results[f"{by} to {into}"]:
        assert isinstance(rank, dict), rank
        blocks = rank[f"even-{states}-{by}"]
        assert isinstance(blocks, tuple), blocks
        for one, other in zip(blocks[1], rank[f"even-{states}-{by}-fp32"][1], strict=True):
            for p, q in zip(one, other, strict=True):
                torch.testing.assert_close(p, q)
        assert "Size mismatch" in rank[f"odd-{states}-{by}"], rank[f"odd-{states}-{by}"]
        values, _ = rank[f"odd-{states}-{by}-fp32"]
        for p, q in zip(values, results[f"saved by {by}"][0]["odd", states], strict=True):
            torch.testing.assert_close(p, q, rtol=0, atol=1e-2)


def test_full_state_dict(results):
    for rank in results["full"]:
        assert isinstance(rank, dict), rank
        for (kind, _), (one, other, said) in rank.items():
            equal(one, other)
            refused = "blocks are those of another sharding. Save to_fp32_state_dict()"
            assert said == "loaded" if kind == "even" else refused in said
