"""SyncBatchNorm on three processes beside one process with the whole batch."""

import copy

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn
from torch.utils import checkpoint as torch_checkpoint
from torch.utils._python_dispatch import TorchDispatchMode

import memsave_ext as ms

WORLD = 3
SIZES = [4, 0, 3]  # of the ranks' batches: different, and an empty one
CHECKPOINTS = {
    "plain": lambda f, x: f(x),
    "checkpoint": ms.checkpoint,
    "non-reentrant": lambda f, x: torch_checkpoint.checkpoint(f, x, use_reentrant=False),
    "reentrant": lambda f, x: torch_checkpoint.checkpoint(f, x, use_reentrant=True),
}


def batch():
    torch.manual_seed(1)
    return torch.randn(sum(SIZES), 5, 3, 2) + 10, torch.randn(sum(SIZES), 5, 3, 2)


def own_part(tensor):
    return tensor.split(SIZES)[dist.get_rank()]


def module(kind=ms.SyncBatchNorm, **options):
    torch.manual_seed(2)
    bn = kind(5, **options)
    with torch.no_grad():
        bn.weight.uniform_(0.5, 2)
        bn.bias.uniform_(-1, 1)
    return bn


def train(bn, x, grad, residual=None, run=CHECKPOINTS["plain"]):
    """Two steps. Output, gradients, buffers."""
    for _ in range(2):
        x = x.detach().requires_grad_()
        for p in bn.parameters():
            p.grad = None
        output = run(lambda t: bn(t, residual) if residual is not None else bn(t), x)
        output.backward(grad)
    results = output, x.grad, *(p.grad for p in bn.parameters()), *bn.buffers()
    return [t.detach().clone() for t in results]


class Collectives(TorchDispatchMode):
    """Counts what is said to other processes."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace in ("c10d", "_c10d_functional") and "wait" not in func.__name__:
            self.count += 1
        return func(*args, **(kwargs or {}))


def plain():
    return train(module(), *map(own_part, batch()))


def fused_activation():
    x, grad = map(own_part, batch())
    return train(module(activation="relu"), x, grad, residual=x.flip(1))


def cumulative():
    return train(module(momentum=None), *map(own_part, batch()))


def bfloat16():
    return train(module(), *(own_part(t.bfloat16()) for t in batch()))


def collectives():
    """By checkpoint: in the forward, in the backward; and what they computed."""
    results = {}
    for name, run in CHECKPOINTS.items():
        bn, (x, grad) = module(), map(own_part, batch())
        x.requires_grad_()
        with Collectives() as forward:
            output = run(lambda t, bn=bn: bn(t).sin(), x)
        with Collectives() as backward:
            output.backward(grad)
        grads = [x.grad, *(p.grad for p in bn.parameters()), *bn.buffers()]
        results[name] = forward.count, backward.count, grads
    return results


def sub_group():
    groups = [dist.new_group([0, 2]), dist.new_group([1])]
    mine = groups[dist.get_rank() == 1]
    bn = module(process_group=mine)
    torch.manual_seed(dist.get_rank())
    bn(torch.randn(4, 5, 3, 2))
    return bn.running_mean


def one_group_for_all():
    """Also of norms that had none, and not of those that have one."""
    given, own = dist.new_group([0, 1, 2]), dist.new_group([0, 1, 2])
    net = nn.Sequential(
        nn.BatchNorm1d(4), nn.SyncBatchNorm(4), ms.SyncBatchNorm(4),
        ms.SyncBatchNorm(4, process_group=own),
    )  # fmt: skip
    changes = ms.convert_batch_norm(net, sync=True, process_group=given, dry_run=True)
    ms.convert_batch_norm(net, sync=True, process_group=given)
    groups = [next(i for i, g in enumerate((given, own)) if m.process_group is g) for m in net]
    return [name for name, _, _ in changes], groups


def evaluation():
    bn = module().eval()
    with Collectives() as communication:
        output = bn(own_part(batch()[0]))
    return communication.count, output


def double_backward():
    x, grad = map(own_part, batch())
    x.requires_grad_()
    (first,) = torch.autograd.grad(module()(x), x, grad, create_graph=True)
    try:
        first.sum().backward()
    except RuntimeError as error:
        return str(error)


def under_transforms():
    """What cannot know of other processes raises in training, and works in eval mode."""
    x, bn = batch()[0], module()
    transforms = {
        "grad": lambda: torch.func.grad(lambda t: bn(t).square().sum())(x),
        "jvp": lambda: torch.func.jvp(bn, (x,), (x,)),
        "export": lambda: torch.export.export(bn, (x,)),
    }
    messages = {}
    for name, transform in transforms.items():
        try:
            transform()
        except RuntimeError as error:
            messages[name] = str(error)
    assert bn.num_batches_tracked == 0 and not bn.running_mean.any()
    bn.eval()
    return messages, torch.func.grad(lambda t: bn(t).square().sum())(x)


def not_in_the_group():
    group = dist.new_group([0, 2])
    try:
        module(process_group=group)(batch()[0])
    except RuntimeError as error:
        return str(error)


def group_that_is_gone():
    group = dist.new_group([0, 1, 2])
    bn = module(process_group=group)
    dist.barrier()  # who still connects would see the others go
    dist.destroy_process_group(group)
    try:
        bn(batch()[0])
    except RuntimeError as error:
        return str(error), int(bn.num_batches_tracked), bn.running_mean
    return None


def bad_channels():
    bn = module()
    try:
        bn(torch.randn(4, 6, 3, 2))
    except RuntimeError as error:
        return str(error), int(bn.num_batches_tracked), bn.running_mean


def values_in_the_group(counts):
    """Error and buffers where the ranks have so many values per channel; then an ordinary batch."""
    x = torch.randn(counts[dist.get_rank()], 5, requires_grad=True)
    bn = module()
    message = ""
    try:
        bn(x).square().sum().backward()
    except ValueError as error:
        message = str(error)
    buffers = [b.clone() for b in bn.buffers()]
    bn(own_part(batch()[0]))  # all of them go on
    return message, buffers, bn.running_var


def one_value():
    return values_in_the_group([0, 1, 0])


def no_value():
    return values_in_the_group([0, 0, 0])


def two_values():
    return values_in_the_group([1, 0, 1])


def converted_ddp():
    """In a model under DistributedDataParallel, checkpointed; parameters after a step."""
    model = ms.convert_batch_norm(Model(nn.BatchNorm2d), sync=True)
    ddp = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    # Equal parts: DDP averages over ranks, not over samples.
    x = batch()[0][:6].split(2)[dist.get_rank()]
    ddp(x).square().mean().backward()
    optimizer.step()
    return [t.detach().clone() for t in (*model.parameters(), *model.buffers())]


class Model(nn.Module):
    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(3)
        self.conv, self.norm = nn.Conv2d(5, 5, 1), kind(5)

    def forward(self, x):
        return ms.checkpoint(lambda t: self.norm(self.conv(t)).sin(), x)


SCENARIOS = [
    plain, fused_activation, cumulative, bfloat16, collectives, sub_group, one_group_for_all,
    evaluation, double_backward, under_transforms, not_in_the_group, group_that_is_gone,
    bad_channels, converted_ddp, one_value, no_value, two_values,
]  # fmt: skip


@pytest.fixture(scope="module")
def of_ranks():
    return run_ranks(WORLD, SCENARIOS)


def check_against_one_process(results, expected, **tolerance):
    """``results``: of each rank; gradients of parameters are parts of a sum."""
    close = torch.testing.assert_close
    output, grad, *rest = expected
    close(torch.cat([r[0] for r in results]), output, **tolerance)
    close(torch.cat([r[1] for r in results]), grad, **tolerance)
    for i, whole in enumerate(rest[:2]):
        close(sum(r[2 + i] for r in results), whole, **tolerance)
    for i, buffer in enumerate(rest[2:]):
        for r in results:
            close(r[4 + i], buffer)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("plain", {}),
        ("fused_activation", {"activation": "relu"}),
        ("cumulative", {"momentum": None}),
    ],
)
def test_as_one_process(of_ranks, name, options):
    x, grad = batch()
    residual = x.flip(1) if "activation" in options else None
    expected = train(module(ms.BatchNorm2d, **options), x, grad, residual)
    check_against_one_process(of_ranks[name], expected, rtol=1e-4, atol=1e-5)


def test_bfloat16(of_ranks):
    x, grad = (t.bfloat16() for t in batch())
    expected = train(module(ms.BatchNorm2d), x, grad)
    check_against_one_process(of_ranks["bfloat16"], expected, rtol=2e-2, atol=2e-2)


def test_ranks_have_the_same_bits(of_ranks):
    for name in ("plain", "cumulative"):
        for other in of_ranks[name][1:]:
            for a, b in zip(of_ranks[name][0][4:], other[4:], strict=True):
                assert torch.equal(a, b)


def test_one_collective_each_way_and_none_in_the_recompute(of_ranks):
    for results in of_ranks["collectives"]:
        *_, expected = results["plain"]
        for name, (forward, backward, tensors) in results.items():
            assert (forward, backward) == (1, 1), name
            for a, b in zip(tensors, expected, strict=True):
                assert torch.equal(a, b), name


def test_a_sub_group(of_ranks):
    first, alone, third = of_ranks["sub_group"]
    assert torch.equal(first, third)
    torch.manual_seed(1)
    torch.testing.assert_close(alone, 0.1 * torch.randn(4, 5, 3, 2).mean((0, 2, 3)))


def test_a_group_for_all(of_ranks):
    assert of_ranks["one_group_for_all"] == [(["0", "1", "2"], [0, 0, 0, 1])] * WORLD


def test_evaluation_does_not_communicate(of_ranks):
    expected = module(ms.BatchNorm2d).eval()(batch()[0])
    assert [count for count, _ in of_ranks["evaluation"]] == [0] * WORLD
    torch.testing.assert_close(torch.cat([y for _, y in of_ranks["evaluation"]]), expected)


def test_double_backward_is_refused(of_ranks):
    for message in of_ranks["double_backward"]:
        assert message == "memsave_ext.SyncBatchNorm does not support double backward"


def test_transforms_know_one_process_alone(of_ranks):
    x = batch()[0].requires_grad_()
    (expected,) = torch.autograd.grad(module(ms.BatchNorm2d).eval()(x).square().sum(), x)
    for messages, grad in of_ranks["under_transforms"]:
        assert messages.keys() == {"grad", "jvp", "export"}
        assert all("which take the statistics of one process" in m for m in messages.values())
        torch.testing.assert_close(grad, expected)


def test_a_process_outside_of_the_group(of_ranks):
    assert of_ranks["not_in_the_group"][1] == (
        "SyncBatchNorm: this process is not in its process_group"
    )


def test_a_group_that_is_gone(of_ranks):
    for message, batches, mean in of_ranks["group_that_is_gone"]:
        assert message.startswith("SyncBatchNorm: its process_group does not exist any more")
        assert batches == 0 and not mean.any()


def test_nothing_is_updated_by_an_error(of_ranks):
    for message, batches, mean in of_ranks["bad_channels"]:
        assert "should contain 6 elements not 5" in message
        assert batches == 0 and not mean.any()


def test_one_value_in_the_whole_group(of_ranks):
    """Each process raises; nobody has updated anything, and nobody waits for another."""
    for message, (mean, var, batches), after in of_ranks["one_value"]:
        assert message.startswith("Expected more than 1 value per channel when training, got input")
        assert message.endswith("and 1 value in the whole process group")
        assert not mean.any() and torch.equal(var, torch.ones(5)) and batches == 0
        assert after.isfinite().all()


def test_no_value_in_the_whole_group(of_ranks):
    """As an empty batch of a BatchNorm."""
    alone = module(ms.BatchNorm2d)
    alone(torch.randn(0, 5, 1, 1))
    for message, buffers, after in of_ranks["no_value"]:
        assert message == ""
        for a, b in zip(buffers, alone.buffers(), strict=True):
            assert torch.equal(a, b)
        assert after.isfinite().all()


def test_two_values_on_two_processes(of_ranks):
    for message, (_, var, batches), _ in of_ranks["two_values"]:
        assert message == "" and var.isfinite().all() and batches == 1


def test_a_converted_model_under_ddp(of_ranks):
    model = Model(ms.BatchNorm2d)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(batch()[0][:6]).square().mean().backward()
    optimizer.step()
    for tensors in of_ranks["converted_ddp"]:
        expected = *model.parameters(), *model.buffers()
        for a, b in zip(tensors, expected, strict=True):
            torch.testing.assert_close(a, b.detach(), rtol=1e-4, atol=1e-6)


def test_alone_it_is_a_batch_norm():
    x, grad = batch()
    expected = train(module(ms.BatchNorm2d), x, grad)
    for a, b in zip(train(module(), x, grad), expected, strict=True):
        assert torch.equal(a, b)
    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        module()(torch.randn(1, 5))


def test_as_torchs():
    ours, theirs = ms.SyncBatchNorm(5), nn.SyncBatchNorm(5)
    assert repr(ours) == repr(theirs)
    theirs.load_state_dict(ours.state_dict())
    with pytest.raises(ValueError, match="expected at least 2D input"):
        ours(torch.randn(5))
    copy.deepcopy(ours)
    with pytest.raises(ValueError, match="number of input channels should be non-zero"):
        ms.SyncBatchNorm(0)(torch.randn(2, 0))


def test_a_group_without_torch_distributed():
    with pytest.raises(RuntimeError, match="process_group does not exist any more"):
        ms.SyncBatchNorm(5, process_group=object())(torch.randn(4, 5))
