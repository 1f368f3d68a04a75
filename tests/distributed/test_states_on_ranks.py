"""``states_on=FOLDER`` under DistributedDataParallel and FSDP2, on two gloo ranks."""

import os
import sys
import tempfile
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import memsave_ext as ms
from memsave_ext.adam import in_place
from memsave_ext.adam.files import Files
from memsave_ext.shared.dtensor import local_tensor
from memsave_ext.store.mapped import is_mapped

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="a folder is for Linux")
FOLDER = "MEMSAVE_EXT_TEST_FOLDER"  # an environment variable, which the ranks inherit


def net():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(130, 512), nn.Tanh(), nn.Linear(512, 130))


def train(model, optimizer, steps=2, start=0, max_norm=None):
    for step in range(start, start + steps):
        x = torch.randn(6, 130, generator=torch.Generator().manual_seed(2 * step + dist.get_rank()))
        if max_norm is not None:
            with optimizer.norm_pass(max_norm):
                model(x).square().mean().backward()
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def results(model, optimizer):
    """Values and states of this rank, and how many of them are in a file."""
    states = [t for p in model.parameters() for _, t in sorted(optimizer.state[p].items())]
    locals_ = [local_tensor(t) for t in states]
    tensors = [local_tensor(p) for p in model.parameters()] + locals_
    return [t.detach().clone() for t in tensors], sum(map(is_mapped, locals_))


def places():
    return None, os.environ[FOLDER]


def ddp():
    found = []
    for place in places():
        model = net()
        optimizer = ms.AdamW(model.parameters(), lr=0.01, in_backward=True, states_on=place)
        wrapped = DistributedDataParallel(model)
        optimizer.attach(wrapped)
        train(wrapped, optimizer)
        found.append(results(model, optimizer))
    return found


def sharded(place, **options):
    model = fully_shard(net(), mesh=dist.init_device_mesh("cpu", (2,)))
    optimizer = ms.AdamW(model.parameters(), lr=0.01, in_backward=True, states_on=place, **options)
    return model, optimizer


def fsdp(**options):
    found = []
    for place in places():
        model, optimizer = sharded(place, **options)
        train(model, optimizer)
        assert all(isinstance(optimizer.state[p]["exp_avg"], DTensor) for p in model.parameters())
        found.append(results(model, optimizer))
    return found


def fsdp_clipped():
    return fsdp(max_grad_norm=0.1)


def fsdp_norm_pass():
    found = []
    for place in places():
        model, optimizer = sharded(place)
        train(model, optimizer, max_norm=0.1)
        found.append(results(model, optimizer))
    return found


def fsdp_saved():
    """What one optimizer has saved another loads, in memory from the folder and the other way."""
    found = []
    for place, other_place in (places(), places()[::-1]):
        model, optimizer = sharded(place)
        train(model, optimizer)
        saved = get_optimizer_state_dict(model, optimizer)
        other, another = sharded(other_place)
        other.load_state_dict(model.state_dict())
        set_optimizer_state_dict(other, another, saved)
        train(other, another, start=2)
        found.append(results(other, another))
    return found[::-1]


def fsdp_saved_as_torchs():
    """The small states of an optimizer that ``fit`` has applied are saved as torch's, in a file
    that has room for this rank's shards."""
    model = fully_shard(net(), mesh=dist.init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    in_place.become(optimizer, ms.AdamW, state_dtype="8bit")
    train(model, optimizer)
    reserved, reserve = [], Files.reserve

    def noted(place, sizes):
        reserved.extend(sizes := [*sizes])
        reserve(place, sizes)

    expected = optimizer.to_fp32_state_dict(ms.AdamW.state_dict(optimizer))["state"]
    tempfile.tempdir = os.environ[FOLDER]
    with mock.patch.object(Files, "reserve", noted):
        saved = optimizer.state_dict()
    tempfile.tempdir = None
    shards = [local_tensor(p).nbytes for p in model.parameters()]
    names = ("exp_avg", "exp_avg_sq")
    mapped = 0
    for number, p in enumerate(model.parameters()):
        for name in names:
            one, other = saved["state"][number][name], expected[number][name]
            assert isinstance(one, DTensor) and one.shape == p.shape
            assert one.placements == p.placements
            assert torch.equal(local_tensor(one), local_tensor(other))
            mapped += is_mapped(local_tensor(one))
    plain = torch.optim.AdamW(model.parameters(), lr=0.01)
    plain.load_state_dict(saved)
    train(model, plain, 1, 2)
    return mapped, sum(reserved) == 2 * sum(shards)


FUNCTIONS = [ddp, fsdp, fsdp_clipped, fsdp_norm_pass, fsdp_saved]


def test_ranks(tmp_path, monkeypatch):
    """Bits are those of states in memory."""
    monkeypatch.setenv(FOLDER, str(tmp_path))
    for name, ranks in run_ranks(2, FUNCTIONS).items():
        for result in ranks:
            assert not isinstance(result, str), f"{name}: {result}"
            (memory, none), (files, some) = result
            assert (none, some) == (0, 4), name
            assert all(map(torch.equal, memory, files)), name
    assert list(tmp_path.iterdir()) == []


def test_states_that_are_saved_as_torchs_lie_in_a_file(tmp_path, monkeypatch):
    monkeypatch.setenv(FOLDER, str(tmp_path))
    ranks = run_ranks(2, [fsdp_saved_as_torchs])["fsdp_saved_as_torchs"]
    assert ranks == [(4, True)] * 2, ranks
