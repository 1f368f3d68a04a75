"""Adam stepped in backward under DistributedDataParallel, on gloo ranks."""

import collections
import contextlib
from dataclasses import dataclass, field

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import memsave_ext as ms
from memsave_ext.adam.ddp import _that_backward_waits_for

STEPS = 4


class Net(nn.Module):
    """``branch`` is used where ``use`` says so; ``shared`` twice; ``never`` not at all."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.first, self.shared = nn.Linear(6, 8), nn.Linear(8, 8)
        self.branch, self.never, self.last = nn.Linear(8, 8), nn.Linear(2, 2), nn.Linear(8, 1)

    def forward(self, x, use=True):
        x = self.shared(self.shared(self.first(x)).tanh()).tanh()
        return self.last(self.branch(x) if use else x)


def data(step):
    return torch.randn(12, 6, generator=torch.Generator().manual_seed(step))


def part(step):
    return data(step).chunk(dist.get_world_size())[dist.get_rank()]


def loss(net, x, **kwargs):
    return (net(x, **kwargs) - 1).square().mean()


def values(net):
    return {name: p.detach().clone() for name, p in net.named_parameters()}


def used_always(net):
    net.never.requires_grad_(False)
    return net


def train(ddp, optimizer, loop=None):
    for step in range(STEPS):
        optimizer.zero_grad()
        loss(ddp, part(step)).backward()
        assert all(p.grad is None for p in ddp.parameters())
        optimizer.step()
    return values(ddp.module)


def optimizer_after_ddp():
    ddp = DistributedDataParallel(used_always(Net()))
    optimizer = ms.AdamW(ddp.parameters(), lr=0.01, in_backward=True)
    optimizer.attach(ddp)
    return train(ddp, optimizer)


def optimizer_before_ddp():
    net = used_always(Net())
    optimizer = ms.AdamW(net.parameters(), lr=0.01, in_backward=True)
    ddp = DistributedDataParallel(net, gradient_as_bucket_view=True)
    optimizer.attach(ddp)
    return train(ddp, optimizer)


def many_buckets():
    ddp = DistributedDataParallel(used_always(Net()), bucket_cap_mb=0.0001)
    optimizer = ms.AdamW(ddp.parameters(), lr=0.01, in_backward=True)
    optimizer.attach(ddp)
    return train(ddp, optimizer)


def own_hook():
    ddp = DistributedDataParallel(used_always(Net()))
    optimizer = ms.AdamW(ddp.parameters(), lr=0.01, in_backward=True)
    buckets = []

    def hook(state, bucket):
        buckets.append(state)
        return default_hooks.allreduce_hook(None, bucket)

    optimizer.attach(ddp, hook, "state")
    result = train(ddp, optimizer)
    assert set(buckets) == {"state"}
    return result


def lost_hook():
    ddp = DistributedDataParallel(used_always(Net()))
    optimizer = ms.AdamW(ddp.parameters(), lr=0.01, in_backward=True)
    optimizer.attach(ddp)
    ddp.module.last.weight._post_accumulate_grad_hooks = collections.OrderedDict()
    with pytest.warns(RuntimeWarning, match="1 parameters had lost their hook"):
        optimizer.step()
    return train(ddp, optimizer)


def reducer_that_writes():
    """As where torch has no way to keep the reducer from it."""
    ddp = DistributedDataParallel(used_always(Net()), gradient_as_bucket_view=True)
    ddp.reducer = _WithoutSwitch(ddp.reducer)
    optimizer = ms.AdamW(ddp.parameters(), lr=0.01, in_backward=True)
    optimizer.attach(ddp)
    return train(ddp, optimizer)


class _WithoutSwitch:
    def __init__(self, reducer):
        self._reducer = reducer

    def __getattr__(self, name):
        if name == "_set_optimizer_in_backward":
            raise AttributeError(name)
        return getattr(self._reducer, name)


def micro_batches():
    ddp = DistributedDataParallel(used_always(Net()))
    optimizer = ms.AdamW(ddp.parameters(), lr=0.01, in_backward=True)
    optimizer.attach(ddp)
    for step in range(STEPS):
        first, second = part(step).chunk(2)
        with ddp.no_sync(), optimizer.accumulate():
            (loss(ddp, first) / 2).backward()
        (loss(ddp, second) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return values(ddp.module)


def micro_batches_by_condition():
    ddp = DistributedDataParallel(used_always(Net()))
    optimizer = ms.AdamW(ddp.parameters(), lr=0.01, in_backward=True)
    optimizer.attach(ddp)
    optimizer.accumulate_when(lambda: not ddp.require_backward_grad_sync)
    for step in range(STEPS):
        first, second = part(step).chunk(2)
        with ddp.no_sync():
            (loss(ddp, first) / 2).backward()
        (loss(ddp, second) / 2).backward()
        with pytest.raises(RuntimeError, match="have been stepped in backward by memsave_ext.Ada"):
            nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return values(ddp.module)


WHOLE_BATCH = [
    optimizer_after_ddp, optimizer_before_ddp, many_buckets, own_hook, lost_hook,
    reducer_that_writes, micro_batches, micro_batches_by_condition,
]  # fmt: skip


def with_unused(**kwargs):
    """The branch is used by one rank, by both, by none."""
    ddp = DistributedDataParallel(Net(), find_unused_parameters=True, **kwargs)
    optimizer = ms.AdamW(ddp.parameters(), lr=0.01, weight_decay=0.1, in_backward=True)
    optimizer.attach(ddp)
    for step, uses in enumerate([(True, False, False), (True,) * 3, (False,) * 3]):
        optimizer.zero_grad()
        loss(ddp, part(step), use=uses[dist.get_rank()]).backward()
        optimizer.step()
    steps = {n: optimizer.state[p]["step"] for n, p in ddp.module.named_parameters()
             if p in optimizer.state}  # fmt: skip
    return values(ddp.module), steps


def with_unused_and_views():
    return with_unused(gradient_as_bucket_view=True)


def with_unused_and_many_buckets():
    return with_unused(bucket_cap_mb=0.0001)


def collectives_of_unused():
    """Who used what is asked in the last bucket's hook alone, once all are on their way."""
    ddp = DistributedDataParallel(Net(), find_unused_parameters=True, bucket_cap_mb=0.0001)
    optimizer = ms.AdamW(ddp.parameters(), lr=0.01, in_backward=True)
    called = []

    def hook(state, bucket):
        called.append("bucket")
        return default_hooks.allreduce_hook(state, bucket)

    def all_reduce(tensor, op=dist.ReduceOp.SUM, **options):
        if op == dist.ReduceOp.MAX:
            called.append("flags")
        return reduce(tensor, op=op, **options)

    optimizer.attach(ddp, hook, None)
    reduce, dist.all_reduce = dist.all_reduce, all_reduce
    try:
        for step in range(STEPS):
            loss(ddp, part(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
    finally:
        dist.all_reduce = reduce
    return called


def raise_in_backward(ddp, optimizer):
    """A backward raises before its last bucket, after one that did not.

    Returns what ends the reductions that are on their way then.
    """
    late, raises = [], False

    def hook(state, bucket):
        reduction = default_hooks.allreduce_hook(state, bucket)
        if not raises:
            return reduction
        assert not bucket.is_last()
        late.append((torch.futures.Future(), reduction))
        return late[-1][0]

    def broken(grad):
        raise RuntimeError("broken here")

    def end():
        for future, reduction in late:
            future.set_result(reduction.wait())

    optimizer.attach(ddp, hook, None)
    loss(ddp, part(0)).backward()
    optimizer.step()
    optimizer.zero_grad()
    raises = True
    x = ddp.module.first(part(1)).tanh().detach().requires_grad_()
    x.register_hook(broken)
    ddp.module.first.forward = lambda _: x
    try:
        loss(ddp, part(1)).backward()
    except RuntimeError as error:
        assert "broken here" in str(error)  # noqa: PT017, pytest.raises() keeps what it was raised in
    assert late
    return end


def unused_and_an_error():
    """A backward that ends before its last bucket steps nothing, and nothing of it stays."""
    ddp = DistributedDataParallel(Net(), find_unused_parameters=True, bucket_cap_mb=0.0001)
    optimizer = ms.AdamW(ddp.parameters(), lr=0.01, in_backward=True)
    end = raise_in_backward(ddp, optimizer)
    assert not optimizer._stepper._collector.runs_backward()
    before = values(ddp.module)
    end()
    assert all(torch.equal(v, before[n]) for n, v in values(ddp.module).items())
    return "nothing"


def reductions_after_an_error():
    """Without unused parameters they step when they end, and the optimizer says that it was half
    a step."""
    ddp = DistributedDataParallel(used_always(Net()), bucket_cap_mb=0.0001)
    optimizer = ms.AdamW(ddp.parameters(), lr=0.01, in_backward=True)
    end = raise_in_backward(ddp, optimizer)
    before = values(ddp.module)
    end()
    changed = [n for n, v in values(ddp.module).items() if not torch.equal(v, before[n])]
    assert "last.weight" in changed
    assert "first.weight" not in changed
    assert not optimizer._stepper._collector.runs_backward()
    try:
        optimizer.step()
    except RuntimeError as error:
        return str(error)


def static_graph():
    ddp = DistributedDataParallel(Net(), static_graph=True)
    optimizer = ms.AdamW(ddp.parameters(), lr=0.01, in_backward=True)
    optimizer.attach(ddp)
    result = train(ddp, optimizer)
    assert not any(p in optimizer.state for p in ddp.module.never.parameters())
    return result


def checkpointed_with_static_graph():
    net = Net()
    forward = net.shared.forward
    net.shared.forward = lambda x: ms.checkpoint(forward, x)
    ddp = DistributedDataParallel(net, static_graph=True)
    optimizer = ms.AdamW(ddp.parameters(), lr=0.01, in_backward=True)
    optimizer.attach(ddp)
    return train(ddp, optimizer)


def refusals():
    """What raises, on every rank alike."""
    messages = {}

    def note(name, function):
        try:
            function()
        except Exception as error:
            messages[name] = f"{type(error).__name__}: {error}"

    net = used_always(Net())
    ddp = DistributedDataParallel(net)
    optimizer = ms.AdamW(net.parameters(), in_backward=True)
    before = values(net)
    note("not attached", lambda: loss(ddp, part(0)).backward())
    assert all(torch.equal(v, before[n]) for n, v in values(net).items())
    optimizer.zero_grad()

    ddp = DistributedDataParallel(net)
    optimizer.attach(ddp)

    def accumulate():
        with optimizer.accumulate():
            loss(ddp, part(0)).backward()

    note("twice", lambda: optimizer.attach(ddp))
    with ddp.no_sync():
        loss(ddp, part(0)).backward()
    note("not reduced", optimizer.step)
    optimizer.zero_grad()
    note("accumulate", accumulate)
    taken = DistributedDataParallel(net)
    taken.register_comm_hook(None, default_hooks.allreduce_hook)
    note("hook taken", lambda: optimizer.attach(taken))
    note("not a ddp", lambda: optimizer.attach(net))
    stranger = DistributedDataParallel(nn.Linear(2, 2))
    note("stranger", lambda: optimizer.attach(stranger))
    small = DistributedDataParallel(nn.Linear(6, 2))
    asking = ms.AdamW(small.parameters(), in_backward=True)
    asking.accumulate_when(lambda: True)
    asking.attach(small)
    note("condition", lambda: small(part(0)).sum().backward())
    note("ordinary", lambda: ms.AdamW(nn.Linear(1, 1).parameters()).attach(ddp))
    return messages


def second_backward():
    ddp = DistributedDataParallel(used_always(Net()))
    optimizer = ms.AdamW(ddp.parameters(), in_backward=True)
    optimizer.attach(ddp)
    loss(ddp, part(0)).backward()
    try:
        loss(ddp, part(0)).backward()
    except RuntimeError as error:
        return str(error)


def removed_and_attached_again():
    """After remove_hooks() gradients are reduced into .grad, and another optimizer can have it."""
    ddp = DistributedDataParallel(used_always(Net()))
    optimizer = ms.AdamW(ddp.parameters(), lr=0.01, in_backward=True)
    optimizer.attach(ddp)
    for step in range(STEPS):
        if step == 1:
            optimizer.remove_hooks()
        if step == 2:
            saved = optimizer.state_dict()
            del optimizer
            optimizer = ms.AdamW(ddp.parameters(), in_backward=True)
            optimizer.load_state_dict(saved)
            optimizer.attach(ddp)
        loss(ddp, part(step)).backward()
        assert all((p.grad is None) == (step != 1) for p in ddp.parameters() if p.requires_grad)
        optimizer.step()
        optimizer.zero_grad()
    return values(ddp.module)


def part_of_the_parameters():
    """The others' gradients are reduced as usual."""
    ddp = DistributedDataParallel(used_always(Net()))
    net = ddp.module
    optimizer = ms.AdamW(net.first.parameters(), lr=0.01, in_backward=True)
    optimizer.attach(ddp)
    rest = [p for p in net.parameters() if p.requires_grad and p not in optimizer.state]
    rest = [p for p in rest if not any(p is q for q in net.first.parameters())]
    other = torch.optim.AdamW(rest, lr=0.01)
    for step in range(STEPS):
        other.zero_grad()
        loss(ddp, part(step)).backward()
        optimizer.step()
        other.step()
    return values(net)


SAME = [*WHOLE_BATCH, static_graph, checkpointed_with_static_graph, removed_and_attached_again,
        part_of_the_parameters]  # fmt: skip


@pytest.fixture(scope="module", params=[2, 3])
def results(request):
    functions = [*SAME, with_unused, with_unused_and_views, with_unused_and_many_buckets]
    functions += [collectives_of_unused, refusals, second_backward]
    return run_ranks(request.param, functions)


def alone():
    net = used_always(Net())
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss(net, data(step)).backward()
        optimizer.step()
    return values(net)


@pytest.mark.parametrize("name", [f.__name__ for f in SAME])
def test_equals_one_process_with_the_whole_batch(results, name):
    expected = alone()
    for rank in results[name]:
        assert isinstance(rank, dict), rank
        for parameter, value in rank.items():
            torch.testing.assert_close(value, expected[parameter], rtol=1e-5, atol=1e-6)
            assert torch.equal(value, results[name][0][parameter])


@pytest.mark.parametrize(
    "name", ["with_unused", "with_unused_and_views", "with_unused_and_many_buckets"]
)
def test_only_what_some_rank_used_is_stepped(results, name):
    world = len(results[name])
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, weight_decay=0.1)
    for step, uses in enumerate([(True, False, False), (True,) * 3, (False,) * 3]):
        optimizer.zero_grad()
        parts = data(step).chunk(world)
        losses = [loss(net, x, use=use) for x, use in zip(parts, uses, strict=False)]
        (sum(losses) / world).backward()
        optimizer.step()
    for rank in results[name]:
        assert isinstance(rank, tuple), rank
        parameters, steps = rank
        for parameter, value in parameters.items():
            torch.testing.assert_close(
                value, net.get_parameter(parameter).detach(), rtol=1e-5, atol=1e-6
            )
        assert steps["branch.weight"] == 2 and steps["last.weight"] == 3
        assert "never.weight" not in steps


def test_one_collective_a_backward_asks_what_was_used(results):
    for called in results["collectives_of_unused"]:
        assert isinstance(called, list), called
        assert called.count("flags") == STEPS
        assert called.count("bucket") > 3 * STEPS
        assert called[-1] == "flags"


def test_a_backward_that_raises_before_it_knows_what_was_used():
    for said in run_ranks(2, [unused_and_an_error])["unused_and_an_error"]:
        assert said == "nothing", said


def test_reductions_that_end_after_an_error():
    for said in run_ranks(2, [reductions_after_an_error])["reductions_after_an_error"]:
        assert said is not None
        assert "a backward raised after 4 parameters had been stepped" in said, said


def test_refusals(results):
    for messages in results["refusals"]:
        assert isinstance(messages, dict), messages
        assert "Call opt.attach(ddp) once, before training" in messages["not attached"]
        assert "outside of ddp.no_sync()" in messages["not reduced"]
        assert "with ddp.no_sync(), opt.accumulate():" in messages["accumulate"]
        assert "or opt.accumulate_when(), in a backward" in messages["condition"]
        assert "attached to another optimizer" in messages["twice"]
        assert "opt.attach(ddp, hook=..., state=...)" in messages["hook taken"]
        assert messages["not a ddp"].startswith("TypeError: ddp must be")
        assert messages["stranger"].startswith("ValueError: attach: ddp has no parameter")
        assert messages["ordinary"].startswith(
            "ValueError: attach() is only for optimizers with in_backward=True"
        )


def test_a_second_backward_is_refused(results):
    for message in results["second_backward"]:
        assert "receives a second gradient in one step" in message


@dataclass
class Stream:
    name: str
    waited: list = field(default_factory=list, compare=False)
    device: str = "cuda:0"

    def wait_stream(self, other):
        self.waited.append(other.name)


@pytest.mark.parametrize(
    ("callback", "backward", "runs_on"),
    [
        ("default", "loop", "loop"),  # gloo's thread
        ("default", "default", "default"),
        ("loop", "loop", "loop"),  # gloo was done before the hook
        ("nccl", "loop", "nccl"),  # which the end of backward waits for
        ("nccl", "default", "nccl"),
    ],
)
def test_a_step_is_ordered_with_the_stream_of_backward(monkeypatch, callback, backward, runs_on):
    current = [Stream(callback)]

    @contextlib.contextmanager
    def on(stream):
        current.append(stream)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current[-1])
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: Stream("default"))
    monkeypatch.setattr(torch.cuda, "stream", on)
    stream = Stream(backward)
    with _that_backward_waits_for(stream):
        assert current[-1].name == runs_on
    assert stream.waited == (["default"] if runs_on == "loop" else [])
