"""``weights_on(model, "cpu")``: weights of a model on CUDA in the host's memory.

Where they are when they are used: tests/emulation/streams/cases/cases_weights.py.
"""

import copy
import gc
from contextlib import ExitStack

import pytest
import torch
from on_device import capture, needs_kernels
from torch import nn
from torch.nn import functional as F

import memsave_ext as ms
from memsave_ext.predict.techniques import named
from memsave_ext.store.mapped import is_mapped

pytestmark = needs_kernels

DEVICE = torch.device("cuda", 0)
WIDTH, LAYERS = 160, 8  # of 102,400 bytes each


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + F.dropout(torch.tanh(self.layer(self.norm(x))), 0.2, self.training)


def network(layers=LAYERS):
    torch.manual_seed(0)
    return nn.Sequential(*(Layer() for _ in range(layers))).to(DEVICE)


def data(seed=0):
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def train(net, optimizer, steps=3, first=0):
    torch.manual_seed(1)
    for step in range(first, first + steps):
        net(data(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def values(net):
    return [p.detach().cpu() for p in net.parameters()]


def assert_same(net, plain):
    assert all(map(torch.equal, values(net), values(plain)))


OPTIMIZERS = {
    "in backward": lambda p: ms.AdamW(p, in_backward=True),
    "8 bit": lambda p: ms.AdamW(p, in_backward=True, state_dtype="8bit"),
    "states": lambda p: ms.AdamW(p, in_backward=True, states_on="cpu"),
    "gradients": lambda p: ms.AdamW(p, grads_on="cpu"),
    "torch's": lambda p: torch.optim.AdamW(p),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_weights_train_to_the_same_bits(name):
    plain, ours = network(), network()
    train(plain, OPTIMIZERS[name](plain.parameters()))
    weights = ms.weights_on(ours, "cpu")
    assert weights.nbytes == LAYERS * WIDTH * WIDTH * 4
    train(ours, OPTIMIZERS[name](ours.parameters()))
    assert all(is_mapped(layer.layer.weight) for layer in ours)
    assert_same(ours, plain)
    weights.remove()
    assert not any(map(is_mapped, ours.parameters()))
    train(plain, OPTIMIZERS[name](plain.parameters()), 1, 3)
    train(ours, OPTIMIZERS[name](ours.parameters()), 1, 3)
    assert_same(ours, plain)


def test_weights_do_not_count_and_make_room():
    net = network()
    before = torch.cuda.memory_allocated()
    weights = ms.weights_on(net, "cpu")
    assert before - torch.cuda.memory_allocated() == weights.nbytes
    del net, weights
    gc.collect()


def test_weights_are_built_where_they_are_to_lie():
    def build():
        with DEVICE:
            torch.manual_seed(0)
            return nn.Sequential(*(Layer() for _ in range(LAYERS)))

    before = torch.cuda.memory_allocated()
    ours = ms.weights_on(build, "cpu").model
    assert torch.cuda.memory_allocated() - before < 2 * WIDTH * WIDTH * 4
    assert sum(map(is_mapped, ours.parameters())) == LAYERS
    with DEVICE:
        torch.manual_seed(0)
        built = nn.Sequential(*(Layer() for _ in range(LAYERS)))
    assert_same(ours, built)


def test_weights_copies_averages_and_states():
    net, plain = network(), network()
    ms.weights_on(net, "cpu")
    average, other = map(torch.optim.swa_utils.AveragedModel, (net, plain))
    twin = copy.deepcopy(net)
    assert not any(map(is_mapped, twin.parameters()))
    saved = {name: value.clone() for name, value in net.state_dict().items()}
    for model, averaged in ((net, average), (plain, other)):
        optimizer = ms.AdamW(model.parameters(), in_backward=True)
        for step in range(2):
            train(model, optimizer, 1, step)
            averaged.update_parameters(model)
    assert_same(average, other)
    twin.load_state_dict(saved)
    net.load_state_dict(saved)
    assert_same(net, twin)
    assert sum(map(is_mapped, net.parameters())) == LAYERS


def test_weights_that_go_while_they_are_used():
    grads = []
    for elsewhere in (True, False):
        net, x = network(), data().requires_grad_()
        weights = ms.weights_on(net, "cpu") if elsewhere else None
        torch.manual_seed(1)
        loss = net(x).square().mean()
        del net, weights
        gc.collect()
        loss.backward()
        del loss
        gc.collect()
        grads.append(x.grad)
    assert grads[0].any() and torch.equal(*grads)


def test_weights_that_are_shared_or_elsewhere_are_refused():
    net = network(2)
    states = net.state_dict()
    with pytest.raises(ValueError, match="weight shares its memory with another tensor"):
        ms.weights_on(net, "cpu")
    assert not any(map(is_mapped, net.parameters()))
    del states
    with pytest.raises(ValueError, match="0.norm.weight is on cpu: weights on the CPU can lie"):
        ms.weights_on(net.cpu(), "cpu")


@pytest.mark.parametrize("with_states", [False, True])
def test_weights_of_a_fit(with_states):
    """What `fit` applies last: its budget leaves room for what is on the device beside."""
    net, plain = network(12), network(12)
    kind = "Adam" if with_states else "optimizer"
    states = "states elsewhere, " * with_states
    technique = named("", f"remat within the budget, {kind} in backward, {states}weights elsewhere")
    optimizer = torch.optim.AdamW(net.parameters(), foreach=False)
    with ExitStack() as undo:
        handle = technique.apply(net, optimizer, undo, 1 << 20)
        assert handle.figures is not None
        assert sum(map(is_mapped, net.parameters())) == 12
        train(net, optimizer)
        assert handle.budget == (1 << 20) - 3 * WIDTH * WIDTH * 4
    make = ms.AdamW if with_states else torch.optim.AdamW
    train(plain, make(plain.parameters(), foreach=None if with_states else False))
    assert_same(net, plain)
    assert not any(map(is_mapped, net.parameters()))


def test_weights_of_a_graph_are_read_where_they_are():
    net, plain = network().eval(), network().eval()
    ms.weights_on(net, "cpu")
    x = data()
    with torch.no_grad():
        replay, out = capture(lambda: net(x), warmup=1)
        replay()
        assert torch.equal(out.cpu(), plain(x).cpu())
