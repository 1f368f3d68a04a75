"""States in blocks of the shards of FSDP2's parameters, on gloo ranks: checkpoints."""

import copy
import os

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fsdp_blocks import EVEN, ODD, OPTIMIZERS, STEPS, Net, make, shard, train
from ranks import run_ranks, whole
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

FOLDER = "MEMSAVE_EXT_TEST_FOLDER"  # an environment variable, which the ranks inherit


def folder(name):
    return f"{os.environ[FOLDER]}/{name}"


def saved(shapes, name, kind):
    net = shard(Net(shapes))
    optimizer = make(kind, net.parameters())
    train(net, optimizer)
    state = get_optimizer_state_dict(net, optimizer)
    dcp.save({"model": net.state_dict(), "optimizer": state}, checkpoint_id=folder(name))
    fp32 = optimizer.to_fp32_state_dict(state)
    dcp.save({"model": net.state_dict(), "optimizer": fp32}, checkpoint_id=folder(f"{name}-fp32"))
    train(net, optimizer, STEPS, 1)
    return whole(net.parameters())


def loaded(shapes, name, kind, fp32=False):
    net = shard(Net(shapes))
    optimizer = make(kind, net.parameters())
    state = get_optimizer_state_dict(net, optimizer)
    if fp32:
        state = optimizer.to_fp32_state_dict(state)
    held = {"model": net.state_dict(), "optimizer": state}
    dcp.load(held, checkpoint_id=folder(name))
    net.load_state_dict(held["model"])
    set_optimizer_state_dict(net, optimizer, optim_state_dict=held["optimizer"])
    moments = optimizer.to_fp32_state_dict()["state"]
    found = [whole(v for n, v in sorted(s.items()) if n != "step") for s in moments.values()]
    train(net, optimizer, STEPS, 1)
    return whole(net.parameters()), found


def save_all():
    of = dist.get_world_size()
    return {
        (sizes, kind): saved(shapes, f"{sizes}-{kind}-{of}", kind)
        for sizes, shapes in (("even", EVEN), ("odd", ODD))
        for kind in OPTIMIZERS
    }


def load_all(by, of):
    """What ``by`` processes have saved."""
    results = {}
    for sizes, shapes in (("even", EVEN), ("odd", ODD)):
        for kind in OPTIMIZERS:
            for suffix in ("", "-fp32"):
                name = f"{sizes}-{kind}-{by}{suffix}"
                try:
                    results[name] = loaded(shapes, name, kind, bool(suffix))
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
    for kind in OPTIMIZERS:
        for sizes, shapes in (("even", EVEN), ("odd", ODD)):
            net = shard(Net(shapes))
            optimizer = make(kind, net.parameters())
            train(net, optimizer)
            state = copy.deepcopy(get_optimizer_state_dict(net, optimizer, options=options))
            other = shard(Net(shapes))
            other.load_state_dict(net.state_dict())
            into = make(kind, other.parameters())
            set_optimizer_state_dict(other, into, state, options=options)
            train(net, optimizer, STEPS, 1)
            train(other, into, STEPS, 1)
            alone = Net(shapes)
            plain = make(kind, alone.parameters(), in_backward=False)
            try:
                set_optimizer_state_dict(alone, plain, state)
                said = "loaded"
            except ValueError as error:
                said = str(error)
            results[sizes, kind] = whole(net.parameters()), whole(other.parameters()), said
    return results


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    os.environ[FOLDER] = str(tmp_path_factory.mktemp("checkpoints"))
    found = run_ranks(2, {"full": full, "saved by 2": save_all})
    found |= run_ranks(1, {"saved by 1": save_all, "2 to 1": load_of_two})
    found |= run_ranks(2, {"1 to 2": load_of_one, "2 to 2": load_of_two})
    del os.environ[FOLDER]
    return found


def equal(some, others):
    assert all(torch.equal(p, q) for p, q in zip(some, others, strict=True))


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("sizes", ["even", "odd"])
def test_resumes_with_the_same_sharding(results, sizes, kind):
    for rank, going_on in zip(results["2 to 2"], results["saved by 2"], strict=True):
        assert isinstance(rank, dict), rank
        assert isinstance(rank[f"{sizes}-{kind}-2"], tuple), rank[f"{sizes}-{kind}-2"]
        equal(rank[f"{sizes}-{kind}-2"][0], going_on[sizes, kind])


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize(("by", "into"), [(1, 2), (2, 1)])
def test_another_world_size(results, kind, by, into):
    """Whole blocks go over; others are refused. Both do in float32."""
    for rank in results[f"{by} to {into}"]:
        assert isinstance(rank, dict), rank
        blocks = rank[f"even-{kind}-{by}"]
        assert isinstance(blocks, tuple), blocks
        for one, other in zip(blocks[1], rank[f"even-{kind}-{by}-fp32"][1], strict=True):
            for p, q in zip(one, other, strict=True):
                torch.testing.assert_close(p, q)
        assert "Size mismatch" in rank[f"odd-{kind}-{by}"], rank[f"odd-{kind}-{by}"]
        values, _ = rank[f"odd-{kind}-{by}-fp32"]
        for p, q in zip(values, results[f"saved by {by}"][0]["odd", kind], strict=True):
            torch.testing.assert_close(p, q, rtol=0, atol=1e-2)


def test_full_state_dict(results):
    for rank in results["full"]:
        assert isinstance(rank, dict), rank
        for (sizes, _), (one, other, said) in rank.items():
            equal(one, other)
            refused = "states cannot be sharded anew. Save to_fp32_state_dict()"
            assert said == "loaded" if sizes == "even" else refused in said
