"""Steps in backward under DistributedDataParallel on gloo ranks: how gradients lie in buckets,
sparse ones, and classes made from DistributedDataParallel."""

import itertools

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import memsave_ext as ms

STEPS = 4
KINDS = [*itertools.product(["sgd", "own sgd"], [False, True], [False, True])]


class Net(nn.Module):
    """With weights of channels_last, transposed, of gaps in memory and contiguous ones."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.conv = nn.Conv2d(3, 5, 3, padding=1).to(memory_format=torch.channels_last)
        self.turned = nn.Parameter(torch.randn(7, 5).t() / 4)
        self.gaps = nn.Parameter(torch.randn(7, 9)[:, :4].detach() / 4)
        self.last = nn.Linear(4, 2)
        self.unused = nn.Parameter(torch.randn(3, 2, 2, 2).to(memory_format=torch.channels_last))

    def forward(self, x):
        x = self.conv(x.to(memory_format=torch.channels_last)).tanh().mean((2, 3))
        return self.last((x @ self.turned).tanh() @ self.gaps)


class Derived(DistributedDataParallel):
    pass


class DerivedTwice(Derived):
    pass


def part(step):
    x = torch.randn(8, 3, 4, 4, generator=torch.Generator().manual_seed(step))
    return x.chunk(dist.get_world_size())[dist.get_rank()]


def loss(net, x):
    return (net(x) - 1).square().mean()


def values(net):
    return {name: p.detach().clone() for name, p in net.named_parameters()}


def used(net):
    net.unused.requires_grad_(False)
    return net


def wrapped(views, unused):
    net = Net() if unused else used(Net())
    return DistributedDataParallel(
        net, gradient_as_bucket_view=views, find_unused_parameters=unused, bucket_cap_mb=0.0005
    )


def train(ddp, optimizers, steps=STEPS):
    for step in range(steps):
        loss(ddp, part(step)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return values(ddp.module)


def stepped_by(kind, params):
    if kind == "sgd":
        return ms.SGD(params, lr=0.1, in_backward=True)
    return ms.in_backward(torch.optim.SGD(params, lr=0.1))


def plainly():
    """By torch's optimizer after backward, with nothing of this package."""
    found = {}
    for _, views, unused in KINDS:
        ddp = wrapped(views, unused)
        found[views, unused] = train(ddp, [torch.optim.SGD(ddp.parameters(), lr=0.1)])
    return found


def attached(detaches=False):
    found = {}
    for kind, views, unused in KINDS:
        ddp = wrapped(views, unused)
        optimizer = stepped_by(kind, ddp.parameters())
        optimizer.attach(ddp)
        if detaches:
            optimizer.remove_hooks()
        found[kind, views, unused] = train(ddp, [optimizer])
    return found


def detached():
    """After remove_hooks() gradients are in .grad."""
    return attached(detaches=True)


def beside_another():
    """Which steps the other half of the parameters after backward."""
    found = {}
    for (kind, views, unused), half in itertools.product(KINDS, (0, 1)):
        ddp = wrapped(views, unused)
        params = [*ddp.parameters()]
        optimizer = stepped_by(kind, params[half::2])
        optimizer.attach(ddp)
        other = torch.optim.SGD(params[1 - half :: 2], lr=0.1)
        found[kind, views, unused, half] = train(ddp, [optimizer, other])
    return found


def moved_afterwards():
    """The memory format is changed when DDP has been made."""
    said = []
    formats = torch.contiguous_format, torch.channels_last
    for views, unused, late in itertools.product((False, True), (False, True), (False, True)):
        first, then = formats if views else formats[::-1]
        net = nn.Conv2d(3, 5, 3).to(memory_format=first)
        ddp = DistributedDataParallel(
            net, gradient_as_bucket_view=views, find_unused_parameters=unused
        )
        optimizer = ms.SGD(ddp.parameters(), lr=0.1, in_backward=True)
        optimizer.attach(ddp)
        if late:
            ddp(part(0)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        ddp.to(memory_format=then)
        before = values(net)
        try:
            ddp(part(0)).sum().backward()
            said.append("stepped")
        except RuntimeError as error:
            assert all(torch.equal(v, before[n]) for n, v in values(net).items())
            said.append(str(error))
    return said


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.words = nn.Embedding(20, 6, sparse=True)
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, numbers, deep=True):
        x = self.words(numbers).sum(1)
        return self.last(self.first(x).tanh() if deep else x)


def words(step):
    numbers = torch.randint(20, (6, 3), generator=torch.Generator().manual_seed(step))
    return numbers.chunk(dist.get_world_size())[dist.get_rank()]


def train_words(ddp, optimizers, unused):
    for step in range(STEPS):
        kwargs = {"deep": step % 2 == 0} if unused else {}
        (ddp(words(step), **kwargs) - 1).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return values(ddp.module)


def sparse_beside():
    """Sparse gradients are reduced for another optimizer, as DDP alone does."""
    found = {}
    for views, unused in itertools.product((False, True), (False, True)):
        options = {"gradient_as_bucket_view": views, "find_unused_parameters": unused}
        ddp = DistributedDataParallel(Words(), **options, bucket_cap_mb=0.0001)
        net = ddp.module
        rest = [*net.first.parameters(), *net.last.parameters()]
        ours = ms.SGD(rest, lr=0.1, in_backward=True)
        ours.attach(ddp)
        others = torch.optim.SGD(net.words.parameters(), lr=0.1)
        one = train_words(ddp, [ours, others], unused)
        ddp = DistributedDataParallel(Words(), **options)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        found[views, unused] = one, train_words(ddp, [optimizer], unused)
    return found


def sparse_of_ours():
    said = []
    for kind in ("sgd", "own sgd"):
        ddp = DistributedDataParallel(Words())
        optimizer = stepped_by(kind, ddp.parameters())
        optimizer.attach(ddp)
        before = ddp.module.words.weight.detach().clone()
        try:
            ddp(words(0)).sum().backward()
        except RuntimeError as error:
            said.append(str(error))
        assert torch.equal(ddp.module.words.weight, before)
    return said


def those_left():
    """join() with another divisor than the number of all processes."""
    ddp = DistributedDataParallel(nn.Linear(2, 2))
    optimizer = ms.SGD(ddp.parameters(), lr=0.1, in_backward=True)
    optimizer.attach(ddp)
    try:
        with ddp.join(divide_by_initial_world_size=False):
            ddp(torch.ones(1, 2)).sum().backward()
    except RuntimeError as error:
        return str(error)
    return "stepped"


def derived():
    """Their reductions are seen as those of DDP itself."""
    said = []
    for kind in (DistributedDataParallel, Derived, DerivedTwice):
        ddp = kind(nn.Linear(2, 2))
        optimizer = ms.SGD(ddp.parameters(), lr=0.1, in_backward=True)
        try:
            ddp(torch.ones(1, 2)).sum().backward()
            said.append("stepped")
        except RuntimeError as error:
            said.append(str(error))
        del optimizer
    return said


LAYOUTS = [attached, detached, beside_another]


@pytest.fixture(scope="module")
def results():
    others = [moved_afterwards, sparse_beside, sparse_of_ours, those_left, derived]
    return run_ranks(2, [plainly, *LAYOUTS, *others])


@pytest.mark.parametrize("name", [f.__name__ for f in LAYOUTS])
def test_weights_of_any_strides(results, name):
    for plain, rank in zip(results["plainly"], results[name], strict=True):
        assert isinstance(plain, dict), plain
        assert isinstance(rank, dict), rank
        for kind, parameters in rank.items():
            expected = plain[kind[1:3]]
            for parameter, value in parameters.items():
                torch.testing.assert_close(value, expected[parameter], rtol=1e-5, atol=1e-6)


def test_a_memory_format_that_is_changed_afterwards(results):
    for said in results["moved_afterwards"]:
        assert isinstance(said, list), said
        for message, (_, unused, late) in zip(
            said, itertools.product((False, True), (False, True), (False, True)), strict=True
        ):
            if late and not unused:  # buckets are made anew after the first backward
                assert message == "stepped"
            else:
                assert "Call model.to(memory_format=...) before" in message, message


def test_sparse_gradients_of_another_optimizer(results):
    for rank in results["sparse_beside"]:
        assert isinstance(rank, dict), rank
        for one, plain in rank.values():
            for parameter, value in one.items():
                torch.testing.assert_close(value, plain[parameter], rtol=1e-5, atol=1e-6)


def test_sparse_gradients_are_refused(results):
    for said in results["sparse_of_ours"]:
        assert isinstance(said, list), said
        assert len(said) == 2
        assert all("Put such parameters into another optimizer" in message for message in said)


def test_a_divisor_that_hooks_do_not_know(results):
    for message in results["those_left"]:
        assert message.startswith("memsave_ext: join(divide_by_initial_world_size=False)"), message


def test_classes_made_from_ddp(results):
    for said in results["derived"]:
        assert isinstance(said, list), said
        for message in said:
            assert "Call opt.attach(ddp) once, before training" in message
