"""Checkpointed regions and batch norms under DistributedDataParallel, on gloo ranks.

The kinds of regions, in every mode of DDP, beside one process that runs all ranks' parts plainly.
"""

import contextlib
import functools
import itertools
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import errors_of_ranks, run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import memsave_ext as ms
from memsave_ext import _native

TESTS = Path(__file__).resolve().parents[1]  # where the helpers are
STEPS, SAMPLES = 3, 24
KINDS = ["checkpoint", "engine hooks", "function", "nested", "modules"]
BUCKETS = {"bucket_cap_mb": 1e-3}  # of two or three parameters
MODES = {
    "buckets": BUCKETS,
    "unused": {"find_unused_parameters": True},
    "unused, buckets, views": {
        "find_unused_parameters": True, "gradient_as_bucket_view": True, **BUCKETS,
    },
    "static": {"static_graph": True},
    "static, buckets, views": {"static_graph": True, "gradient_as_bucket_view": True, **BUCKETS},
}  # fmt: skip
USES = {  # whether each rank uses the branch, in each step
    "always": [(True,) * 3] * STEPS,
    "never": [(False,) * 3] * STEPS,
    "sometimes": [(True, False, False), (True,) * 3, (False,) * 3],
}


class Block(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), norm(8)

    def forward(self, x):
        return x + self.norm(self.linear(x)).tanh()


class Net(nn.Module):
    """``shared`` is in two regions, ``pair`` in one; ``branch`` is used where ``use`` says so."""

    def __init__(self, kind="plain", norm=ms.BatchNorm1d):
        super().__init__()
        torch.manual_seed(3)
        self.kind = kind
        self.first, self.shared, self.branch = Block(norm), Block(norm), nn.Linear(8, 8)
        self.pair = nn.Sequential(Block(norm), Block(norm))
        self.never, self.last = nn.Linear(2, 2), nn.Linear(8, 1)
        self.double()
        if kind == "modules":
            ms.checkpoint_modules(self, Block)

    def forward(self, x, use=True):
        x = self.region(self.first, x)  # of an input that needs no gradient
        x = self.region(self.shared, self.region(self.shared, x).sin())
        x = self.region(self.pair, x)
        # Listed in any case, where that is to be done.
        x = self.region(lambda a: self.branch(a).sin() if use else a.cos(), x, self.branch)
        return self.last(x)

    def region(self, function, x, module=None):
        tensors = list((module or function).parameters())
        if self.kind in ("checkpoint", "engine hooks"):
            return ms.checkpoint(function, x)
        if self.kind == "function":
            return ms.CheckpointFunction.apply(function, 1, x, *tensors)
        if self.kind == "nested":
            explicit = functools.partial(ms.CheckpointFunction.apply, function, 1)
            return ms.checkpoint(lambda a: ms.checkpoint(explicit, a, *tensors), x)
        return function(x)


def data(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(SAMPLES, 8, generator=generator, dtype=torch.double)


def loss(output):
    return (output - 1).square().mean()


def tensors(net):
    """Gradients, parameters and buffers; gradients of what nobody used are zeros or None."""
    values = {f"grad of {n}": p.grad for n, p in net.named_parameters() if p.grad is not None}
    values |= dict(net.named_parameters()) | dict(net.named_buffers())
    return {name: value.detach().clone() for name, value in values.items()}


def descend(net):
    with torch.no_grad():
        for p in net.parameters():
            if p.grad is not None:
                p.sub_(p.grad, alpha=0.1)


def wrap(kind, mode, norm=ms.BatchNorm1d):
    net = Net(kind, norm)
    if not {"find_unused_parameters", "static_graph"} & set(mode):
        net.never.requires_grad_(False)
    return DistributedDataParallel(net, **mode)


@contextlib.contextmanager
def hooks_of(kind):
    before = ms.use_engine_hooks(kind == "engine hooks")
    try:
        yield
    finally:
        ms.use_engine_hooks(before)


def train(kind, mode, norm="BatchNorm1d", uses="always", micro=1):
    """Steps of micro-batches, the earlier ones in no_sync(). What each step leaves."""
    rank, results = dist.get_rank(), []
    with hooks_of(kind):
        ddp = wrap(kind, MODES[mode], getattr(ms, norm))
        for step in range(STEPS):
            ddp.zero_grad()
            parts = data(step).chunk(dist.get_world_size())[rank].chunk(micro)
            for i, x in enumerate(parts):
                with contextlib.nullcontext() if i == micro - 1 else ddp.no_sync():
                    (loss(ddp(x, use=USES[uses][step][rank])) / micro).backward()
            descend(ddp.module)
            results.append(tensors(ddp.module))
    return results


def alone(world, sync=False, uses="always", micro=1):
    """What ``train`` should give: for each rank, of each step."""
    nets = [Net() for _ in range(1 if sync else world)]
    results = [[] for _ in range(world)]
    for step in range(STEPS):
        parts = [x.chunk(micro) for x in data(step).chunk(world)]
        broadcast = [b.clone() for b in nets[0].buffers()]
        for rank, net in enumerate(nets):
            net.zero_grad()
            for mine, first in zip(net.buffers(), broadcast, strict=True):
                mine.copy_(first)
            for i in range(micro):
                x = torch.cat([part[i] for part in parts]) if sync else parts[rank][i]
                (loss(net(x, use=USES[uses][step][rank])) / micro).backward()
        for group in zip(*[net.parameters() for net in nets], strict=True):
            given = [p.grad for p in group if p.grad is not None]
            for p in group:
                p.grad = sum(given) / len(nets) if given else None
        for net in nets:
            descend(net)
        for rank in range(world):
            results[rank].append(tensors(nets[rank % len(nets)]))
    return results


# ---- scenarios, by what they must equal ----------------------------------------------------------


def cases(name, modes, kinds=KINDS, **kwargs):
    return {
        f"{name}{kind}, {mode}": functools.partial(train, kind, mode, **kwargs)
        for kind, mode in itertools.product(kinds, modes)
    }


SYNCED = {"norm": "SyncBatchNorm"}
ORDINARY = cases("", MODES)
SYNC = cases("sync, ", ["buckets", "static"], **SYNCED)
MICRO = cases("micro-batches, ", ["buckets", "unused"], micro=2)
SYNC_MICRO = cases("sync, micro-batches, ", ["buckets"], ["checkpoint"], micro=2, **SYNCED)
SOMETIMES = cases("sometimes, ", ["unused, buckets, views"], uses="sometimes")
NEVER = cases("never, ", ["static"], uses="never")


def collectives():
    """{kind: (of the batch norms in forward, in backward, of DDP)} in the second step."""
    group, results = dist.new_group(), {}

    def said(to):
        return to._get_sequence_number_for_group()

    norm = functools.partial(ms.SyncBatchNorm, process_group=group)
    for kind in ("plain", *KINDS):
        with hooks_of(kind):
            ddp = wrap(kind, BUCKETS, norm)
            for _ in range(2):
                start, start_ddp = said(group), said(dist.group.WORLD)
                output = ddp(data(0))
                middle = said(group)
                loss(output).backward()
            results[kind] = middle - start, said(group) - middle, said(dist.group.WORLD) - start_ddp
    return results


def two_forwards():
    """Before one backward, so that DDP writes the buffers between a forward and its recompute."""
    results = {}
    for kind in ("plain", *KINDS):
        with hooks_of(kind):
            ddp = wrap(kind, BUCKETS)
            outputs = [ddp(data(step)) for step in range(2)]
            sum(map(loss, outputs)).backward()
            results[kind] = tensors(ddp.module)
    return results


def retained():
    """A second backward of the same graph, the first without a reduction."""
    results = {}
    for kind in ("plain", *KINDS):
        with hooks_of(kind):
            ddp = wrap(kind, {})
            with ddp.no_sync():
                loss(ddp(data(dist.get_rank()))).backward(retain_graph=True)
            loss(ddp(data(7))).backward()
            results[kind] = tensors(ddp.module)
    return results


def autocast():
    results = {}
    for kind in ("plain", *KINDS):
        with hooks_of(kind):
            ddp = wrap(kind, BUCKETS)
            ddp.module.float()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                output = ddp(data(dist.get_rank()).float())
            loss(output.float()).backward()
            results[kind] = tensors(ddp.module)
    return results


def unlisted():
    """A warning names what gets no gradient; the next forward of DDP is torch's error."""
    net = Net().first.requires_grad_()
    forward = net.forward
    net.forward = lambda x: ms.CheckpointFunction.apply(forward, 1, x, net.linear.weight)
    ddp = DistributedDataParallel(net)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loss(ddp(data(0))).backward()
    try:
        ddp(data(0))
    except RuntimeError as error:
        return [str(w.message) for w in caught], str(error)


def static_graph_that_changes():
    """What a static graph does not have is not reduced: torch's own rule, the same in regions."""
    results = {}
    for kind in ("plain", *KINDS):
        with hooks_of(kind):
            ddp = wrap(kind, {"static_graph": True})
            try:
                for use in (True, False, False):
                    ddp.zero_grad()
                    loss(ddp(data(0), use=use)).backward()
                results[kind] = tensors(ddp.module)
            except RuntimeError as error:
                results[kind] = str(error).partition("\n")[0]
    return results


COMPARED = [two_forwards, retained, autocast]
CASES = ORDINARY | SYNC | MICRO | SYNC_MICRO | SOMETIMES | NEVER
OTHERS = {f.__name__: f for f in (*COMPARED, collectives, unlisted, static_graph_that_changes)}
ON_THREE = {n: f for n, f in CASES.items() if f.args[0] in ("checkpoint", "function")}


@pytest.fixture(scope="module")
def results():
    return {2: run_ranks(2, CASES | OTHERS), 3: run_ranks(3, ON_THREE)}


@pytest.fixture(scope="module")
def expected():
    return functools.cache(alone)


def on_ranks(names):
    return pytest.mark.parametrize(
        ("world", "name"), [(2, n) for n in names] + [(3, n) for n in names if n in ON_THREE]
    )


def check(ranks, wanted):
    """Equal to ``wanted``, parameters and their gradients to the bit on all ranks."""
    for rank, steps in zip(ranks, wanted, strict=True):
        assert isinstance(rank, list), rank
        for found, values, first in zip(rank, steps, ranks[0], strict=True):
            assert found.keys() >= values.keys()
            for name, value in found.items():
                reference = values.get(name, torch.zeros_like(value))
                torch.testing.assert_close(value, reference, rtol=1e-9, atol=1e-11, msg=name)
                if "running" not in name:
                    assert torch.equal(value, first[name]), name


@on_ranks(ORDINARY)
def test_equals_one_process(results, expected, world, name):
    check(results[world][name], expected(world))


@on_ranks(SYNC)
def test_sync_batch_norm_equals_one_process_with_the_whole_batch(results, expected, world, name):
    check(results[world][name], expected(world, sync=True))


@on_ranks(MICRO | SYNC_MICRO)
def test_micro_batches(results, expected, world, name):
    check(results[world][name], expected(world, sync=name in SYNC_MICRO, micro=2))


@on_ranks(SOMETIMES)
def test_a_branch_that_not_all_ranks_use(results, expected, world, name):
    check(results[world][name], expected(world, uses="sometimes"))


@on_ranks(NEVER)
def test_a_branch_that_no_rank_uses(results, expected, world, name):
    check(results[world][name], expected(world, uses="never"))


@pytest.mark.parametrize("name", [f.__name__ for f in COMPARED])
def test_as_without_checkpoint(results, name):
    for rank in results[2][name]:
        assert isinstance(rank, dict), rank
        for kind in KINDS:
            for tensor, value in rank["plain"].items():
                close = {"rtol": 1e-2, "atol": 1e-3} if name == "autocast" else {}
                torch.testing.assert_close(rank[kind][tensor], value, **close, msg=kind + tensor)


def test_collectives(results):
    """One each way for a batch norm, none in recomputes; DDP makes as many as without regions."""
    for rank in results[2]["collectives"]:
        assert isinstance(rank, dict), rank
        norms = 5  # in a forward: `shared` has two
        assert set(rank.values()) == {(norms, norms, rank["plain"][2])}, rank
        assert rank["plain"][2] > 2


def test_parameters_that_are_not_listed(results):
    for rank in results[2]["unlisted"]:
        assert isinstance(rank, tuple), rank
        (warning,), error = rank
        assert "need a gradient but were not listed" in warning
        assert "Expected to have finished reduction in the prior iteration" in error


def test_a_static_graph_that_changes(results):
    """Where the branch is listed it stays in the graph, and the gradients are right."""
    for rank in results[2]["static_graph_that_changes"]:
        assert isinstance(rank, dict), rank
        for kind in ("checkpoint", "engine hooks", "modules"):
            assert "this is not compatible with static_graph" in rank[kind] == rank["plain"]
        for kind in ("function", "nested"):
            assert not rank[kind]["grad of branch.weight"].any()
            assert rank[kind]["grad of first.linear.weight"].any()


# ---- an error on one rank ------------------------------------------------------------------------


def fail(kind, how):
    """The last rank, in its second step."""
    last = dist.get_rank() == dist.get_world_size() - 1
    ddp = DistributedDataParallel(Net(kind), find_unused_parameters=True)
    norm = ms.convert_batch_norm(ddp.module.pair, sync=True)[0].norm
    for step in range(2):
        if last and step:
            norm.register_forward_pre_hook(functools.partial(disturb, how))
        with torch.autograd.set_detect_anomaly(how == "nan"):
            loss(ddp(data(step))).backward()


def disturb(how, module, arguments):
    recomputing = ms.is_recomputing()
    if how == ("recompute" if recomputing else "forward"):
        raise ValueError(f"a bad sample in the {how}")
    if how == "other tensors" and recomputing:
        return arguments[0].sin().cos()
    if how == "nan":  # in backward
        return arguments[0] + (arguments[0] - arguments[0]).sqrt() * 0
    return None


ERRORS = {
    "forward": "ValueError: a bad sample in the forward",
    "recompute": "ValueError: a bad sample in the recompute",
    "other tensors": "CheckpointError: checkpoint: Recomputed values for the following",
    "nan": "returned nan values",
}
FAILING = [
    *itertools.product(["checkpoint"], ERRORS),
    ("function", "forward"), ("function", "recompute"), ("modules", "recompute"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "how"), FAILING)
def test_an_error_on_one_rank_ends_all(kind, how):
    *others, last = errors_of_ranks(3, functools.partial(fail, kind, how))
    assert ERRORS[how] in str(last)
    assert all(others)  # of lost connections


@pytest.mark.skipif(not _native.available, reason="torchrun does nothing else in pure Python")
def test_torchrun_shows_the_error():
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    path = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), str(TESTS)])
    environment = os.environ | {
        "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": path
    }  # fmt: skip
    done = subprocess.run(
        [*run, __file__], capture_output=True, text=True, timeout=60, env=environment, check=False
    )
    assert done.returncode != 0
    assert ERRORS["recompute"] in done.stderr
    assert "a step was made" in done.stdout


if __name__ == "__main__":
    dist.init_process_group("gloo")
    print("a step was made", flush=True)
    fail("checkpoint", "recompute")
