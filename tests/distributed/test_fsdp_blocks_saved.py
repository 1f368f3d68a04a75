"""States in blocks of the shards of FSDP2's parameters, on gloo ranks: checkpoints."""

import contextlib
import copy
import os
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fsdp_blocks import EVEN, ODD, OPTIMIZERS, STEPS, Net, as_before, make, shard, train
from ranks import run_ranks, whole
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import memsave_ext as ms
from memsave_ext.adam import blocks, modes, states
from memsave_ext.adam.native import Native
from memsave_ext.shared.dtensor import largest_shard

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


def even_of(world):
    """Those of even shards alone."""
    return {kind: saved(EVEN, f"even-{kind}-{world}", kind) for kind in OPTIMIZERS}


def save_even():
    return even_of(dist.get_world_size())


def load_even(of):
    results = {}
    for kind in OPTIMIZERS:
        try:
            name = f"even-{kind}-{of}"
            results[kind] = [loaded(EVEN, name + s, kind, bool(s)) for s in ("", "-fp32")]
        except (Exception, CheckpointException) as error:
            results[kind] = str(error)
    return results


def load_even_of_one():
    return load_even(1)


def load_even_of_four():
    return load_even(4)


PLAIN = {
    "8bit": (ms.AdamW, {"lr": 0.01}),
    "4bit": (ms.AdamW, {"lr": 0.01}),
    "SGD 8bit": (ms.SGD, {"lr": 0.01, "momentum": 0.9, "dampening": 0.1}),
    "Lion 8bit": (ms.Lion, {"lr": 0.003}),
}


def into_others():
    """What is said where one of two optimizers has blocks and the other none, by kind; and by
    pairs of kinds of blocks."""

    def optimizer_of(one, net):
        kind, blocks = one
        of, options = (OPTIMIZERS if blocks else PLAIN)[kind]
        return of(net.parameters(), **options, in_backward=True)

    def said_of(first, second, flat):
        options = StateDictOptions(flatten_optimizer_state_dict=flat)
        net, name = shard(Net(EVEN)), folder(f"other-{first}-{second}-{flat}")
        optimizer = optimizer_of(first, net)
        train(net, optimizer)
        dcp.save(get_optimizer_state_dict(net, optimizer, options=options), checkpoint_id=name)
        net = shard(Net(EVEN))
        optimizer = optimizer_of(second, net)
        state = get_optimizer_state_dict(net, optimizer, options=options)
        try:
            dcp.load(state, checkpoint_id=name)
        except (Exception, CheckpointException) as error:
            return str(error)
        return "loaded"

    pairs = [((kind, a), (kind, not a)) for kind in OPTIMIZERS for a in (True, False)]
    pairs += [(("8bit", True), ("4bit", True)), (("4bit", True), ("8bit", True))]
    return {(*pair, flat): said_of(*pair, flat) for pair in pairs for flat in (False, True)}


def saved_before():
    """As versions up to 0.3.0 have saved states: float32 where the largest shard is small, and
    codes under the names of moments. By kind, moments when they were saved and after loading."""
    results = {}

    def moments(optimizer):
        found = optimizer.to_fp32_state_dict()["state"].values()
        return [whole(v for n, v in sorted(s.items()) if n != "step") for s in found]

    def largest_decides(param):
        return largest_shard(param) >= blocks.SMALLEST

    for kind in OPTIMIZERS:
        name = folder(f"before-{kind}")
        net = shard(Net(EVEN + ODD))
        with contextlib.ExitStack() as stack:
            for module in (states, modes):
                stack.enter_context(mock.patch.object(module, "takes_blocks", largest_decides))
            own = torch.optim.Optimizer.state_dict
            stack.enter_context(mock.patch.object(Native, "state_dict", own))
            optimizer = make(kind, net.parameters())
            train(net, optimizer)
            state = get_optimizer_state_dict(net, optimizer)
            dcp.save({"optimizer": state}, checkpoint_id=name)
        other = shard(Net(EVEN + ODD))
        other.load_state_dict(net.state_dict())
        into = make(kind, other.parameters())
        old = dcp.FileSystemReader(name).read_metadata().state_dict_metadata
        state = as_before(into, get_optimizer_state_dict(other, into), old, "optimizer.")
        dcp.load({"optimizer": state}, checkpoint_id=name)
        set_optimizer_state_dict(other, into, state)
        before, loaded = moments(optimizer), moments(into)
        train(other, into, STEPS, 1)
        results[kind] = before, loaded, [sorted(s) for s in into.state.values()]
    return results


def full_as_fp32():
    """to_fp32_state_dict() of a full state dict, by sizes and kind, and of the shards."""
    options = StateDictOptions(full_state_dict=True)
    results = {}
    for sizes, shapes in (("even", EVEN), ("odd", ODD)):
        for kind in OPTIMIZERS:
            net = shard(Net(shapes))
            optimizer = make(kind, net.parameters())
            train(net, optimizer)
            state = get_optimizer_state_dict(net, optimizer)
            right = optimizer.to_fp32_state_dict(state)["state"]
            right = {n: whole(v for k, v in s.items() if k != "step") for n, s in right.items()}
            state = copy.deepcopy(get_optimizer_state_dict(net, optimizer, options=options))
            try:
                made = optimizer.to_fp32_state_dict(state)["state"]
                made = {n: [v for k, v in s.items() if k != "step"] for n, s in made.items()}
            except ValueError as error:
                made = str(error)
            results[sizes, kind] = made, right
    return results


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
    found |= run_ranks(2, {"1 to 2": load_of_one, "2 to 2": load_of_two, "others": into_others,
                           "full as fp32": full_as_fp32, "before": saved_before})  # fmt: skip
    found |= run_ranks(4, {"saved by 4": save_even, "1 to 4": load_even_of_one})
    found |= run_ranks(1, {"4 to 1": load_even_of_four})
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
        coded = rank[f"even-{kind}-{by}"]
        assert isinstance(coded, tuple), coded
        for one, other in zip(coded[1], rank[f"even-{kind}-{by}-fp32"][1], strict=True):
            for p, q in zip(one, other, strict=True):
                torch.testing.assert_close(p, q)
        assert "Size mismatch" in rank[f"odd-{kind}-{by}"], rank[f"odd-{kind}-{by}"]
        values, _ = rank[f"odd-{kind}-{by}-fp32"]
        for p, q in zip(values, results[f"saved by {by}"][0]["odd", kind], strict=True):
            torch.testing.assert_close(p, q, rtol=0, atol=1e-2)


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize(("by", "into"), [(1, 4), (4, 1)])
def test_shards_of_fewer_elements_than_a_small_parameter(results, kind, by, into):
    for rank in results[f"{by} to {into}"]:
        assert isinstance(rank, dict), rank
        assert isinstance(rank[kind], list), rank[kind]
        (values, coded), (_, fp32) = rank[kind]
        for one, other in zip(coded, fp32, strict=True):
            for p, q in zip(one, other, strict=True):
                torch.testing.assert_close(p, q)
        saved = results[f"saved by {by}"][0]
        expected = saved[kind] if by == 4 else saved["even", kind]
        for p, q in zip(values, expected, strict=True):
            torch.testing.assert_close(p, q, rtol=0, atol=1e-2)


def test_codes_are_no_moments_of_an_optimizer_without_blocks(results):
    for rank in results["others"]:
        assert isinstance(rank, dict), rank
        for pair, said in rank.items():
            both = pair[0][1] and pair[1][1]  # whose blocks are not of one size
            expected = "Size mismatch" if both and "exp_avg_scale" in said else "Missing key in"
            assert expected in said, (pair, said)


def test_checkpoints_of_earlier_versions(results):
    """Codes are the same, and what was float32 is coded."""
    for rank in results["before"]:
        assert isinstance(rank, dict), rank
        for kind, (before, loaded, keys) in rank.items():
            for one, other in zip(before, loaded, strict=True):
                for p, q in zip(one, other, strict=True):
                    largest = p.abs().max()
                    near = {"4bit": 0.3}.get(kind, 0.02) if p.shape[0] == 8 else 0
                    torch.testing.assert_close(p, q, rtol=0, atol=float(near * largest))
            assert sum(any("_scale" in name for name in names) for names in keys) == 6


def test_a_full_state_dict_in_float32(results):
    for rank in results["full as fp32"]:
        assert isinstance(rank, dict), rank
        for (sizes, kind), (made, right) in rank.items():
            if sizes == "odd":
                assert "call to_fp32_state_dict() while it is sharded" in made, (kind, made)
                continue
            for name, values in right.items():
                equal(made[name], values)


def test_full_state_dict(results):
    for rank in results["full"]:
        assert isinstance(rank, dict), rank
        for (sizes, _), (one, other, said) in rank.items():
            equal(one, other)
            refused = "states cannot be sharded anew. Save to_fp32_state_dict()"
            assert said == "loaded" if sizes == "even" else refused in said
