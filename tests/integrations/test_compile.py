"""torch.compile of models with regions, batch norms and an Adam that is stepped in backward."""

import pytest
import torch
from torch import nn

import memsave_ext as ms

native = pytest.mark.skipif(
    not ms._native.available, reason="what is compiled is the same in pure Python"
)


@pytest.fixture(autouse=True)
def _forget():
    yield
    torch._dynamo.reset()


class Block(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.conv, self.norm, self.dropout = (
            nn.Conv2d(4, 4, 3, padding=1, bias=False),
            norm(4),
            nn.Dropout(0.2),
        )

    def forward(self, x):
        return x + self.dropout(self.norm(self.conv(x)).relu())


def build(norm=ms.BatchNorm2d):
    torch.manual_seed(0)
    return nn.Sequential(*[Block(norm) for _ in range(3)])


def train(net, forward, optimizer):
    """The losses."""
    x = torch.randn(2, 4, 6, 6, generator=torch.Generator().manual_seed(1))
    losses = []
    for step in range(3):
        torch.manual_seed(step)
        loss = (forward(x) - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def compile_model(net):
    return torch.compile(net, backend="aot_eager", fullgraph=True)


def compile_blocks(net):
    for block in net:
        block.compile(backend="aot_eager", fullgraph=True)
    return net


@native
@pytest.mark.parametrize("compiled", [compile_model, compile_blocks])
def test_it_trains_as_torchs(compiled):
    plain = build(nn.BatchNorm2d)
    losses = train(plain, plain, torch.optim.AdamW(plain.parameters(), lr=1e-2))
    net = build()
    ms.checkpoint_modules(net, Block)
    optimizer = ms.AdamW(net.parameters(), lr=1e-2, in_backward=True)
    assert train(net, compiled(net), optimizer) == pytest.approx(losses, rel=1e-5)
    for (name, left), right in zip(net.named_buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(left, right, msg=name)  # counted once
    for (name, left), right in zip(net.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-3, atol=1e-4, msg=name)


@native
def test_compiled_blocks_inside_of_regions():
    def in_regions(net):
        compile_blocks(net)
        return lambda x: ms.checkpoint(net, x)

    results = []
    for forward in (compile_blocks, in_regions):
        net = build(nn.Identity)
        optimizer = ms.AdamW(net.parameters(), lr=1e-2, in_backward=True)
        results.append((train(net, forward(net), optimizer), list(net.parameters())))
    assert results[0][0] == results[1][0]
    torch.testing.assert_close(results[0][1], results[1][1], rtol=0, atol=0)


# gradients of a graph arrive together


class Layer(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(size))

    def forward(self, x):
        return (x @ self.weight).tanh()


@native
@pytest.mark.parametrize(("compiled", "gradients"), [(compile_model, 8), (compile_blocks, 1)])
def test_memory_of_gradients(compiled, gradients):
    """What docs/integrations.md says of what to compile."""
    size = 256
    net = nn.Sequential(*[Layer(size) for _ in range(8)])
    optimizer = ms.AdamW(net.parameters(), in_backward=True)
    forward, x = compiled(net), torch.randn(2, size)
    for _ in range(2):
        with ms.memory.track() as tracked:
            forward(x).square().mean().backward()
        optimizer.step()
    assert gradients <= tracked.peak / (4 * size * size) < gradients + 0.5


def test_compiled_autograd_is_an_error():
    from torch._dynamo import compiled_autograd  # seconds, which collecting does not need

    net = nn.Linear(4, 4)
    optimizer = ms.AdamW(net.parameters(), lr=1e-2, in_backward=True)
    before = net.weight.detach().clone()
    compiler = torch.compile(backend="eager")
    with (
        compiled_autograd._enable(compiler),
        pytest.raises(NotImplementedError, match="compiled autograd cannot trace a step in backw"),
    ):
        net(torch.ones(2, 4)).sum().backward()
    assert torch.equal(net.weight, before)
    net.zero_grad()
    net(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    assert optimizer.state[net.weight]["step"].item() == 1


@pytest.mark.parametrize(
    "make",
    [
        lambda params, _: ms.in_backward(torch.optim.AdamW(params, lr=0.01, fused=True)),
        lambda params, _: ms.AdamW(params, lr=0.01, in_backward=True),
        lambda params, folder: ms.AdamW(params, lr=0.01, in_backward=True, states_on=folder),
        lambda params, folder: ms.AdamW(params, lr=0.01, grads_on=folder),
    ],
    ids=["own step", "in_backward", "states_on", "grads_on"],
)
def test_a_compiled_training_step(make, tmp_path):
    """It has hooks run inside of what is compiled."""
    runs = []
    for compiles in (False, True):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(64, 300), nn.Tanh(), nn.Linear(300, 300))
        optimizer = make(net.parameters(), tmp_path)

        def step(x, net=net, optimizer=optimizer):
            net(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        run = torch.compile(step, backend="eager") if compiles else step
        for number in range(3):
            run(torch.randn(8, 64, generator=torch.Generator().manual_seed(number)))
        assert [optimizer.state[p]["step"].item() for p in net.parameters()] == [3] * 4
        runs.append(net)
    for p, q in zip(runs[0].parameters(), runs[1].parameters(), strict=True):
        assert torch.equal(p, q)
