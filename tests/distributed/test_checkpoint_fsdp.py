"""Checkpointed regions and batch norms under FSDP2 (fully_shard), on two gloo ranks.

Regions within the sharded blocks, around them and around several of them, beside one process that
has the whole batch and checkpoints nothing.
"""

import contextlib
import functools
import itertools
import warnings

import pytest
import torch
import torch.distributed as dist
from ranks import errors_of_ranks, run_ranks, whole
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils import checkpoint as torch_checkpoint

import memsave_ext as ms

STEPS, SAMPLES, WIDTH = 2, 24, 7  # of odd size
KINDS = [
    "modules before",  # ms.checkpoint_modules, then fully_shard
    "modules after",
    "inside",  # ms.checkpoint in a block's forward
    "explicit",  # CheckpointFunction there, with the parameters as they are there
    "around",  # ms.checkpoint of a sharded block, which so gathers its parameters in the recompute
    "around two",
    "engine hooks",
]
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Block(nn.Module):
    def __init__(self, kind, norm):
        super().__init__()
        self.kind = kind
        self.norm, self.linear = norm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def inner(self, x):
        return x + self.linear(self.norm(x)).tanh()

    def forward(self, x):
        if self.kind in ("inside", "engine hooks"):
            return ms.checkpoint(self.inner, x)
        if self.kind == "explicit":
            return ms.CheckpointFunction.apply(self.inner, 1, x, *self.parameters())
        return self.inner(x)


class Net(nn.Module):
    def __init__(self, kind="plain", norm=ms.SyncBatchNorm, dtype=torch.double):
        super().__init__()
        torch.manual_seed(3)
        self.first, self.last = nn.Linear(6, WIDTH), nn.Linear(WIDTH, 1)
        self.blocks = nn.ModuleList(Block(kind, norm) for _ in range(4))
        self.kind = kind
        self.to(dtype)

    def forward(self, x):
        x = self.first(x)
        if "two" in self.kind:
            for i in (0, 2):
                x = AROUND[self.kind](lambda t, i=i: self.blocks[i + 1](self.blocks[i](t)), x)
        else:
            for block in self.blocks:
                x = AROUND.get(self.kind, call)(block, x)
        return self.last(x)


def call(function, x):
    return function(x)


def list_shards(block, x):
    return ms.CheckpointFunction.apply(block, 1, x, *block.parameters())


AROUND = {
    "around": ms.checkpoint,
    "around two": ms.checkpoint,
    "torch around": functools.partial(torch_checkpoint.checkpoint, use_reentrant=False),
    "torch around two": functools.partial(torch_checkpoint.checkpoint, use_reentrant=False),
    "explicit around": list_shards,
}


def data(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(SAMPLES, 6, generator=generator, dtype=torch.double)


def part(step):
    return data(step).chunk(dist.get_world_size())[dist.get_rank()]


def loss(output):
    return (output - 1).square().mean()


def sharded(kind, norm=ms.SyncBatchNorm, dtype=torch.double, **kwargs):
    net = Net(kind, norm, dtype)
    if kind == "modules before":
        ms.checkpoint_modules(net, Block)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in (net.first, *net.blocks, net.last):
        fully_shard(module, mesh=mesh, **kwargs)
    fully_shard(net, mesh=mesh, **kwargs)
    if kind == "modules after":
        ms.checkpoint_modules(net, Block)
    return net


def tensors(net):
    """Gradients, parameters and buffers by name, without shards."""
    values = {f"grad of {n}": p.grad for n, p in net.named_parameters() if p.grad is not None}
    values |= dict(net.named_parameters()) | dict(net.named_buffers())
    return dict(zip(values, whole(values.values()), strict=True))


@contextlib.contextmanager
def hooks_of(kind):
    before = ms.use_engine_hooks(kind == "engine hooks")
    try:
        yield
    finally:
        ms.use_engine_hooks(before)


def train(kind, make=torch.optim.SGD, micro=1, lr=0.05, **kwargs):
    """What each step leaves; the earlier micro-batches are accumulated without a reduction."""
    results = []
    with hooks_of(kind):
        net = sharded(kind, **kwargs)
        optimizer = make(net.parameters(), lr=lr)
        for step in range(STEPS):
            optimizer.zero_grad()
            for i, x in enumerate(part(step).to(net.last.weight.dtype).chunk(micro)):
                net.set_requires_gradient_sync(i == micro - 1)
                (loss(net(x)) / micro).backward()
            optimizer.step()
            results.append(tensors(net))
    return results


def alone(make=torch.optim.SGD, micro=1, lr=0.05):
    net, results = Net(norm=nn.BatchNorm1d), []
    optimizer = make(net.parameters(), lr=lr)
    for step in range(STEPS):
        optimizer.zero_grad()
        parts = [x.chunk(micro) for x in data(step).chunk(2)]
        for i in range(micro):
            (loss(net(torch.cat([x[i] for x in parts]))) / micro).backward()
        optimizer.step()
        results.append(tensors(net))
    return results


in_backward = functools.partial(ms.AdamW, in_backward=True)
ORDINARY = {
    f"{kind}, {reshard}": functools.partial(train, kind, reshard_after_forward=reshard)
    for kind, reshard in itertools.product(["plain", *KINDS], [True, False])
}
MICRO = {f"micro-batches, {kind}": functools.partial(train, kind, micro=2) for kind in KINDS}
ADAM = {
    f"Adam, {kind}": functools.partial(train, kind, in_backward, lr=0.01) for kind in KINDS
}  # all three features


def mixed_precision():
    options = {"mp_policy": BF16, "dtype": torch.float32, "reshard_after_forward": True}
    return {kind: train(kind, in_backward, **options) for kind in ("plain", *KINDS)}


def collectives():
    """{kind: (of the batch norms in forward, in backward, of all the rest)} in the second step."""
    results = {}
    everyone = dist.group.WORLD
    for kind in ("plain", "torch around", "torch around two", *KINDS):
        group = dist.new_group()
        norm = functools.partial(ms.SyncBatchNorm, process_group=group)
        with hooks_of(kind):
            net = sharded(kind, norm, reshard_after_forward=True)
            for _ in range(2):
                start, rest = said(group), said(everyone)
                output = net(part(0))
                middle = said(group)
                loss(output).backward()
            results[kind] = (
                middle - start,
                said(group) - middle,
                said(everyone) - rest,
            )
    return results


def said(group):
    return group._get_sequence_number_for_group()


def explicit_around():
    """The block uses what is gathered of the listed shards: what got a gradient, what is said."""
    net = sharded("explicit around")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loss(net(part(0))).backward()
    grads = {name for name, p in net.named_parameters() if p.grad is not None}
    return grads, [str(w.message) for w in caught if "CheckpointFunction" in str(w.message)]


CASES = ORDINARY | MICRO | ADAM
OTHERS = {f.__name__: f for f in (mixed_precision, collectives, explicit_around)}


@pytest.fixture(scope="module")
def results():
    return run_ranks(2, CASES | OTHERS)


@pytest.fixture(scope="module")
def expected():
    return functools.cache(alone)


def check(ranks, wanted):
    for rank in ranks:
        assert isinstance(rank, list), rank
        for found, values in zip(rank, wanted, strict=True):
            for name, value in found.items():
                close = {"rtol": 1e-8, "atol": 1e-10}
                torch.testing.assert_close(value, values[name], **close, msg=name)


@pytest.mark.parametrize("name", ORDINARY)
def test_equals_one_process_with_the_whole_batch(results, expected, name):
    check(results[name], expected())


@pytest.mark.parametrize("name", MICRO)
def test_micro_batches(results, expected, name):
    check(results[name], expected(micro=2))


@pytest.mark.parametrize("name", ADAM)
def test_all_three_features(results, expected, name):
    check(results[name], expected(torch.optim.AdamW, lr=0.01))
    for rank in results[name]:
        assert not any(n.startswith("grad of") for found in rank for n in found)


def test_mixed_precision(results):
    """All three features: the bits of the run without regions."""
    for rank in results["mixed_precision"]:
        assert isinstance(rank, dict), rank
        for kind in KINDS:
            for step, found in enumerate(rank[kind]):
                for name, value in rank["plain"][step].items():
                    assert torch.equal(found[name], value), f"{kind}: {name}"


def test_collectives(results):
    """One each way for a batch norm, none in recomputes; FSDP gathers and reduces as without."""
    for rank in results["collectives"]:
        assert isinstance(rank, dict), rank
        assert set(rank.values()) == {(4, 4, rank["plain"][2])}, rank


def test_the_explicit_form_belongs_into_the_block(results):
    """Around it, shards are listed and not what the block uses: a warning says so."""
    for rank in results["explicit_around"]:
        assert isinstance(rank, tuple), rank
        grads, (warning,) = rank
        assert grads == {"first.weight", "first.bias", "last.weight", "last.bias"}
        assert "need a gradient but were not listed" in warning


# ---- an error on one rank ------------------------------------------------------------------------


def fail(kind, when):
    """The last rank, in its second step, before it would talk to the other."""
    net = sharded(kind, reshard_after_forward=True)
    for step in range(2):
        if step and dist.get_rank() == dist.get_world_size() - 1:
            net.blocks[1].norm.register_forward_pre_hook(functools.partial(disturb, when))
        loss(net(part(step))).backward()


def disturb(when, module, arguments):
    if when == ("recompute" if ms.is_recomputing() else "forward"):
        raise ValueError(f"a bad sample in the {when}")


@pytest.mark.parametrize(
    ("kind", "when"),
    [("modules after", "forward"), ("modules after", "recompute"), ("around", "recompute"),
     ("around two", "forward"), ("explicit", "recompute")],
)  # fmt: skip
def test_an_error_on_one_rank_ends_all(kind, when):
    other, last = errors_of_ranks(2, functools.partial(fail, kind, when))
    assert f"ValueError: a bad sample in the {when}" in str(last)
    assert other  # of the lost connection
