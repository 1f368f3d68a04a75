"""Checkpointed regions on several streams, offloaded, and in a captured graph."""

import gc
import random

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import memsave_ext as ms

DEVICE = "cuda"


def layers(seed, count=3):
    torch.manual_seed(seed)
    return nn.ModuleList(nn.Linear(8, 8) for _ in range(count)).to(DEVICE)


def gradients(net, seed, region, move=False):
    """Of a loss that runs each layer as a region, on streams that take turns where ``move`` is."""
    chance = random.Random(seed)
    streams = [torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()]
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed)).to(DEVICE)
    torch.manual_seed(seed)
    for layer in net:
        stream = chance.choice(streams) if move else streams[0]
        before = torch.cuda.current_stream()
        stream.wait_stream(before)
        x.record_stream(stream)
        with torch.cuda.stream(stream):
            x = region(lambda x, layer=layer: F.dropout(layer(x).tanh(), 0.3), x.sin())
        before.wait_stream(stream)
        x.record_stream(before)
    x.square().mean().backward()
    found = [p.grad.cpu() for p in net.parameters()]
    for param in net.parameters():
        param.grad = None
    return found


def plainly(function, x):
    return function(x)


def assert_same(found, expected):
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("offload", [None, "cpu"], ids=str)
def test_regions_on_several_streams(seed, offload):
    net = layers(seed)

    def region(function, x):
        return ms.checkpoint(function, x, offload=offload)

    found = gradients(net, seed, region, move=True)
    assert_same(found, gradients(net, seed, plainly))


@pytest.mark.parametrize("offload", [None, "cpu", "by torch"], ids=str)
def test_several_streams_in_a_region(seed, offload):
    """The recompute is asked for on the stream of what is last in the region, and runs on that of
    the region, on which hooks around it give back what they have kept."""
    net = layers(seed)
    side = torch.cuda.Stream()

    def on_the_side(function, x):
        outer = torch.cuda.current_stream()
        side.wait_stream(outer)
        x.record_stream(side)
        with torch.cuda.stream(side):
            y = function(x)
        outer.wait_stream(side)
        y.record_stream(outer)
        return y

    def region(function, x):
        def both(x):
            return on_the_side(torch.sigmoid, function(x))

        if offload == "by torch":
            with torch.autograd.graph.save_on_cpu():
                return ms.checkpoint(both, x)
        return ms.checkpoint(both, x, offload=offload)

    def alone(function, x):
        return torch.sigmoid(function(x))

    assert_same(gradients(net, seed, region), gradients(net, seed, alone))


def test_what_is_recomputed_is_read_on_another_stream(seed):
    """By someone who looks at what the graph has saved."""
    chance = random.Random(seed)
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed)).to(DEVICE)
    x.requires_grad_()
    current, stream = torch.cuda.current_stream(), torch.cuda.Stream()
    stream.wait_stream(current)
    x.record_stream(stream)
    with torch.cuda.stream(stream):
        y = ms.checkpoint(lambda x: x.exp().sin(), x, offload=chance.choice([None, "cpu"]))
    current.wait_stream(stream)
    saved = y.grad_fn._saved_self
    saved.record_stream(current)
    assert torch.equal(saved.cpu(), x.detach().exp().cpu())


def test_what_a_region_reads_is_put_back_for_backward():
    """As FSDP does with parameters: who asks has waited for them, the stream of the region not."""
    x = torch.ones(8, device=DEVICE, requires_grad=True)
    weight, gathered = torch.full((2, 8), 2.0, device=DEVICE)
    current, stream = torch.cuda.current_stream(), torch.cuda.Stream()
    stream.wait_stream(current)
    for tensor in x, weight:
        tensor.record_stream(stream)
    with torch.cuda.stream(stream):
        y = ms.checkpoint(lambda x: (x * weight).exp().sin(), x)
    current.wait_stream(stream)
    weight.data.zero_()
    weight.data.copy_(gathered)
    saved = y.grad_fn._saved_self
    saved.record_stream(current)
    assert torch.equal(saved.cpu(), (x.detach() * 2).exp().cpu())


def test_a_recompute_that_raises():
    """Who catches it reads what the recompute has written until then."""
    x = torch.ones(4, device=DEVICE, requires_grad=True)
    written, stream = torch.zeros(4, device=DEVICE), torch.cuda.Stream()
    current = torch.cuda.current_stream()
    again = []

    def function(x):
        written.data.add_(x.detach())
        if again:
            raise ArithmeticError
        return x.exp().sin()

    stream.wait_stream(current)
    for tensor in x, written:
        tensor.record_stream(stream)
    with torch.cuda.stream(stream):
        y = ms.checkpoint(function, x)
    current.wait_stream(stream)
    again.append(True)
    with pytest.raises(ArithmeticError):
        y.grad_fn._saved_self  # noqa: B018
    assert (written + 1).sum().item() == 12


def test_offloaded_inputs(seed):
    """What a region was given is freed when it has been copied, and copied back in backward."""
    net = layers(seed, random.Random(seed).randint(1, 4))

    def region(function, x):
        return ms.checkpoint(function, x, offload="cpu")

    assert_same(gradients(net, seed, region), gradients(net, seed, plainly))


def test_offloaded_inputs_that_are_written(seed):
    """By what comes next; by the region itself they cannot be."""
    net = layers(seed)

    def residual(function, x):
        x += ms.checkpoint(function, x, offload="cpu")
        return x

    assert_same(gradients(net, seed, residual), gradients(net, seed, lambda f, x: x + f(x)))
    x = torch.ones(8, device=DEVICE, requires_grad=True)

    def changes(x):
        torch.cuda.synchronize()  # else it would be written while it is copied
        return x.mul_(2).sin()

    y = ms.checkpoint(changes, x * 1, offload="cpu")
    with pytest.raises(ms.CheckpointError, match=r"changes in place what it was given.*\[8\]"):
        y.sum().backward()


class CopiesToTheDevice(TorchDispatchMode):
    """Notes the stream of each, in order."""

    def __init__(self, noted):
        super().__init__()
        self.noted = noted

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket._qualified_op_name
        if name in ("aten::copy_", "aten::_to_copy") and any(
            isinstance(a, torch.Tensor) and a.device.type == "cpu" for a in args
        ):
            self.noted.append(torch.cuda.current_stream())
        return func(*args, **(kwargs or {}))


def test_offloaded_inputs_come_back_one_region_ahead():
    """On a stream of their own: when a region runs, its own and those of the one before it."""
    net = layers(0, 4)
    noted = []

    def region(number, layer, x):
        def function(x):
            noted.append(number)
            return layer(x).tanh()

        return ms.checkpoint(function, x, offload="cpu")

    x = torch.ones(4, 8, device=DEVICE, requires_grad=True)
    for number, layer in enumerate(net):
        x = region(number, layer, x * 2)
    noted.clear()
    with CopiesToTheDevice(noted):
        x.sum().backward()
    streams = [item for item in noted if not isinstance(item, int)]
    assert torch.cuda.current_stream() not in streams
    assert len(set(streams)) == 1
    stream = streams[0]
    assert noted == [stream, stream, 3, stream, 2, stream, 1, 0]


def test_offloaded_regions_in_any_order(seed):
    """Backwards that end in the middle, come in another order or never, raise, or come twice."""
    chance = random.Random(seed)
    net = layers(seed)
    start = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed)).to(DEVICE)
    start.requires_grad_()
    raising = []

    def function(layer, x):
        if layer in raising:
            raise ArithmeticError
        return layer(x).tanh()

    def chain(region):
        values = [start]
        for layer in net:
            values.append(region(lambda x, layer=layer: function(layer, x), values[-1].sin()))
        return values

    def offloaded(function, x):
        return ms.checkpoint(function, x, offload="cpu")

    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    chains = [chain(offloaded) for _ in range(2)]
    expected = chain(plainly)
    for _ in range(5):
        values = chance.choice(chains)
        first, last = sorted(chance.sample(range(len(values)), 2))
        if chance.random() < 0.2:
            raising.append(net[first])
            with pytest.raises(ArithmeticError):
                torch.autograd.grad(values[last].sum(), values[first], retain_graph=True)
            raising.clear()
        (found,), (right,) = (
            torch.autograd.grad(of[last].sum(), of[first], retain_graph=True)
            for of in (values, expected)
        )
        assert torch.equal(found.cpu(), right.cpu())
        if chance.random() < 0.3:
            chains[chance.randrange(2)] = chain(offloaded)
    del chains, expected, values, found, right
    gc.collect()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before


FORMATS = [{}, {"bf16": "stochastic"}, {"state_dtype": torch.bfloat16}]


def trained(seed, options, captured, replays=4):
    """Values after some steps with dropout and rounding at random; the last ones are replays."""
    net = layers(seed).to(torch.bfloat16 if "bf16" in options else torch.float32)
    optimizer = ms.AdamW(net.parameters(), lr=0.01, in_backward=True, capturable=True, **options)
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed)).to(DEVICE)
    x = x.to(net[0].weight.dtype)

    def step():
        y = x
        for layer in net:
            y = ms.checkpoint(lambda y, layer=layer: F.dropout(layer(y).tanh(), 0.3), y)
        loss = y.square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    torch.manual_seed(seed)
    losses = [step() for _ in range(2)]
    if captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            loss = step()
        for _ in range(replays):
            graph.replay()
            losses.append(loss.clone())
    else:
        losses += [step() for _ in range(replays)]
    return [value.detach().cpu() for value in [*losses, *net.parameters()]]


@pytest.mark.parametrize("options", FORMATS, ids=["plain", "stochastic", "states"])
def test_replays_draw_what_steps_draw(seed, options):
    assert_same(trained(seed, options, True), trained(seed, options, False))
