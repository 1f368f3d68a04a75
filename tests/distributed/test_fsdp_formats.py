"""Every format of parameters and states under FSDP2, on gloo ranks: float32 copies and checkpoints
of every kind."""

import os
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fsdp_blocks import as_before, shard
from ranks import run_ranks, whole
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

import memsave_ext as ms
from memsave_ext.adam import formats
from memsave_ext.adam.native import Native

FOLDER = "MEMSAVE_EXT_TEST_FOLDER"  # an environment variable, which the ranks inherit
STEPS = 2
STATES = dict.fromkeys(row.option for row in formats.STATE_FORMATS)
BF16 = ["fp32", *(row.name for row in formats.PARAM_FORMATS)]
RULES = {"AdamW": (ms.AdamW, {}), "SGD": (ms.SGD, {"momentum": 0.9}), "Lion": (ms.Lion, {})}
ALL = [
    *(("AdamW", bf16, states) for bf16 in BF16 for states in STATES),
    ("AdamW", "split", torch.float32),
    *((rule, "split", states) for rule in ("SGD", "Lion") for states in STATES if states != "4bit"),
]
OF_TWO = [kind for kind in ALL if kind[1] == "split" or kind[2] is None]  # that two ranks train
SHARDED, FULL = {}, {"full_state_dict": True}
# What a state is saved and loaded with. Offloaded whole, it is on the first rank alone.
WAYS = {
    "sharded": (SHARDED, SHARDED),
    "offloaded": ({"cpu_offload": True}, {"cpu_offload": True}),
    "flat": ({"flatten_optimizer_state_dict": True}, {"flatten_optimizer_state_dict": True}),
    "full": (FULL, FULL),
    "full, offloaded": (FULL | {"cpu_offload": True}, FULL | {"broadcast_from_rank0": True}),
}


def ways_of(number):
    """A third of the ways for each kind, in turn, so that each way meets each format somewhere."""
    ways = [*WAYS, "old"]
    return [ways[(number + i) % len(ways)] for i in (0, 3)]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        # The second has shards that differ, of bfloat16 in an odd number of elements.
        self.layers = nn.ModuleList([nn.Linear(96, 128), nn.Linear(96, 3)])

    def forward(self, x):
        return sum(layer(x).float().sin().sum() for layer in self.layers)


def net_of(bf16):
    net = Net()
    return net if bf16 == "fp32" else net.bfloat16()


def optimizer_of(net, rule, bf16, states):
    kind, options = RULES[rule]
    if bf16 != "fp32":
        options = options | {"bf16": bf16}
    return kind(net.parameters(), lr=0.01, state_dtype=states, in_backward=True, **options)


def train(net, optimizer, start):
    for step in range(start, start + STEPS):
        x = torch.randn(4, 96, generator=torch.Generator().manual_seed(step))
        net(x.to(net.layers[0].weight.dtype)).backward()
        optimizer.step()
        optimizer.zero_grad()


def saved(net, optimizer, way, name, old):
    """Saves the optimizer's state. ``old``: as versions up to 0.2.0 had it."""
    own = torch.optim.Optimizer.state_dict if old else Native.state_dict
    with mock.patch.object(Native, "state_dict", own):
        state = get_optimizer_state_dict(net, optimizer, options=StateDictOptions(**WAYS[way][0]))
    if "full_state_dict" in WAYS[way][0]:
        torch.save(state, f"{name}-{dist.get_rank()}.pt")
    else:
        dcp.save(state, checkpoint_id=name)


def loaded(net, kind, way, name, old):
    """Returns another net and its optimizer, whose state is the one that was saved."""
    other = shard(net_of(kind[1]))
    other.load_state_dict(net.state_dict())
    optimizer = optimizer_of(other, *kind)
    saving, loading = (StateDictOptions(**options) for options in WAYS[way])
    if saving.full_state_dict:
        state = torch.load(f"{name}-{dist.get_rank()}.pt", weights_only=True)
    else:
        state = get_optimizer_state_dict(other, optimizer, options=saving)
        if old:
            metadata = dcp.FileSystemReader(name).read_metadata().state_dict_metadata
            state = as_before(optimizer, state, metadata)
        dcp.load(state, checkpoint_id=name)
    set_optimizer_state_dict(other, optimizer, state, options=loading)
    return other, optimizer


def storage(optimizer):
    """The dtypes of the states, and the option that asks for them."""
    states = [{n: v.dtype for n, v in state.items()} for state in optimizer.state.values()]
    return states, [group.get("state_dtype") for group in optimizer.param_groups]


def round_trips():
    """By kind: the copies and the parameters; the copies after more steps; and for each way of
    saving those after as many steps of what was loaded, and whether it is stored alike."""
    results = {}
    for number, kind in enumerate(ALL if dist.get_world_size() == 1 else OF_TWO):
        net = shard(net_of(kind[1]))
        optimizer = optimizer_of(net, *kind)
        train(net, optimizer, 0)
        copies = optimizer.fp32_parameters()
        placed = all(isinstance(c, DTensor) and c.dtype == torch.float32 for c in copies)
        found = {"placed": placed, "copies": whole(copies), "params": whole(net.parameters())}
        others = {}
        for way in ways_of(number):
            name = f"{os.environ[FOLDER]}/{dist.get_world_size()}-{number}-{way}"
            as_in = "sharded" if way == "old" else way
            saved(net, optimizer, as_in, name, old=way == "old")
            others[way] = loaded(net, kind, as_in, name, old=way == "old")
        train(net, optimizer, STEPS)
        found["going on"] = whole(optimizer.fp32_parameters())
        found["ways"] = {}
        for way, (other, into) in others.items():
            alike = storage(into) == storage(optimizer)
            train(other, into, STEPS)
            found["ways"][way] = alike, whole(into.fp32_parameters())
        results[kind] = found
    return results


def broadcast_under_ddp():
    """Rank 0 sends its state, whose low parts it has made int32, to the others."""
    found = []
    for _ in range(2):
        net = net_of("split")
        ddp = nn.parallel.DistributedDataParallel(net)
        optimizer = ms.AdamW(net.parameters(), lr=0.01, bf16="split")
        train(ddp.module, optimizer, 0)
        if found:
            state = get_optimizer_state_dict(net, optimizer, options=StateDictOptions(**FULL))
            for of in state["state"].values():
                assert of["param_rest"].dtype == torch.int16
                of["param_rest"] = of["param_rest"].int()
            for of in optimizer.state.values():
                of["param_rest"].fill_(dist.get_rank())
            options = StateDictOptions(**FULL, broadcast_from_rank0=True)
            sent = {} if dist.get_rank() else state
            set_optimizer_state_dict(net, optimizer, sent, options=options)
        train(net, optimizer, STEPS)
        found.append(optimizer.fp32_parameters())
    return found


def test_low_parts_that_rank_0_broadcasts():
    for rank in run_ranks(2, [broadcast_under_ddp])["broadcast_under_ddp"]:
        assert isinstance(rank, list), rank
        assert equal(*rank)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    os.environ[FOLDER] = str(tmp_path_factory.mktemp("checkpoints"))
    found = {of: run_ranks(of, [round_trips])["round_trips"] for of in (1, 2)}
    del os.environ[FOLDER]
    return found


def bits(values):
    return [v.view(torch.int32) for v in values]


def equal(some, others):
    return all(torch.equal(p, q) for p, q in zip(bits(some), bits(others), strict=True))


@pytest.mark.parametrize("of", [1, 2])
def test_fp32_copies_are_the_parameters(results, of):
    for rank in results[of]:
        assert isinstance(rank, dict), rank
        for kind, found in rank.items():
            assert found["placed"], kind
            with_low_parts = 0
            for exact, param in zip(found["copies"], found["params"], strict=True):
                # Half of what bfloat16 resolves there: of two that are as near, formats differ.
                assert ((exact - param).abs() <= param.float().abs() / 256).all(), kind
                with_low_parts += int((exact != param.float()).sum())
            has_low_part = kind[1] in ("split", "split8")
            assert (with_low_parts > 0) == has_low_part, kind


def test_fp32_copies_are_those_without_shards(results):
    (rank,) = results[1]
    assert isinstance(rank, dict), rank
    for kind, found in rank.items():
        net = net_of(kind[1])
        optimizer = optimizer_of(net, *kind)
        train(net, optimizer, 0)
        assert equal(found["copies"], optimizer.fp32_parameters()), kind


@pytest.mark.parametrize("of", [1, 2])
def test_resumes_from_each_kind_of_state_dict(results, of):
    for rank in results[of]:
        assert isinstance(rank, dict), rank
        assert list(rank) == (ALL if of == 1 else OF_TWO)
        assert {way for found in rank.values() for way in found["ways"]} == {*WAYS, "old"}
        for kind, found in rank.items():
            assert not equal(found["going on"], found["copies"])
            assert len(found["ways"]) == 2
            for way, (alike, values) in found["ways"].items():
                assert alike, (kind, way)
                assert equal(values, found["going on"]), (kind, way)
