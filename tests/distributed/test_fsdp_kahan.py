"""Sharded states of ``bf16="kahan"`` of version 0.3.0: compensations are DTensors of bfloat16."""

import os

import pytest
import torch
import torch.distributed.checkpoint as dcp
from fsdp_blocks import Net, shard
from ranks import run_ranks, whole
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import memsave_ext as ms
from memsave_ext.shared.dtensor import as_placed, local_tensor

FOLDER = "MEMSAVE_EXT_TEST_FOLDER"  # an environment variable, which the ranks inherit
SHAPES = [(10, 24), (3, 7)]  # with two ranks, shards of different sizes


def net_and_optimizer():
    net = shard(Net(SHAPES).bfloat16())
    return net, ms.AdamW(net.parameters(), lr=0.01, bf16="split")


def as_kahan(state_dict):
    """The groups as version 0.3.0 saved them."""
    for group in state_dict["param_groups"]:
        group["bf16"] = "kahan"
    return state_dict


def compensations(net, optimizer):
    """Of a size that rounding to bfloat16 may have taken from each parameter."""
    return [as_placed(p, local_tensor(p.detach()) * (3 * 2.0**-11)) for p in net.parameters()]


def loads():
    net, optimizer = net_and_optimizer()
    (net(torch.ones(4, 24, dtype=torch.bfloat16))).backward()
    optimizer.step()
    rests = compensations(net, optimizer)
    expected = [
        p.detach().float() + c.float() for p, c in zip(net.parameters(), rests, strict=True)
    ]
    params = whole(net.parameters())

    state = as_kahan(optimizer.state_dict())
    for index, rest in enumerate(rests):
        state["state"][index]["param_rest"] = rest
    optimizer.load_state_dict(state)
    found = {"loaded": whole(optimizer.fp32_parameters())}

    named = as_kahan(get_optimizer_state_dict(net, optimizer))
    for (name, _), rest in zip(net.named_parameters(), rests, strict=True):
        named["state"][name]["param_rest"] = rest
    set_optimizer_state_dict(net, optimizer, named)
    found["by name"] = whole(optimizer.fp32_parameters())

    dcp.save(named, checkpoint_id=os.environ[FOLDER])
    into = get_optimizer_state_dict(net, optimizer)
    dcp.load(into, checkpoint_id=os.environ[FOLDER])
    set_optimizer_state_dict(net, optimizer, into)
    found["dcp"] = whole(optimizer.fp32_parameters())
    kept = [group["bf16"] for group in optimizer.param_groups]
    return params, whole(expected), found, kept, whole(net.parameters())


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    os.environ[FOLDER] = str(tmp_path_factory.mktemp("checkpoint"))
    found = run_ranks(2, [loads])["loads"]
    del os.environ[FOLDER]
    return found


def test_shards_load_as_split(results):
    for rank in results:
        assert isinstance(rank, tuple), rank
        params, expected, found, kept, after = rank
        assert kept == ["split"]
        assert all(map(torch.equal, params, after))
        for way in ("loaded", "by name"):
            for one, other in zip(found[way], expected, strict=True):
                assert (one.view(torch.int32) - other.view(torch.int32)).abs().max() <= 1, way


def test_what_is_read_into_whole_numbers_is_the_bfloat16_parameters(results):
    for rank in results:
        params, _, found, _, _ = rank
        for one, param in zip(found["dcp"], params, strict=True):
            assert torch.equal(one, param.float())
