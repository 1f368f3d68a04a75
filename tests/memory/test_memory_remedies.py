"""The report names the loss head where logits are a large part of the peak, and chunks where one
module makes it while it runs."""

import io

import pytest
import torch
from torch import nn

import memsave_ext as ms


class Net(nn.Module):
    def __init__(self, classes, loss_of):
        super().__init__()
        self.body, self.head = nn.Linear(32, 32), nn.Linear(32, classes, bias=False)
        self.loss_of = loss_of

    def forward(self, x, target):
        return self.loss_of(self.body(x).tanh(), self.head, target)


def plain(hidden, head, target):
    return nn.functional.cross_entropy(head(hidden), target)


def chunked(hidden, head, target):
    return ms.linear_cross_entropy(hidden, head.weight, target)


def tracked(classes, loss_of, tokens=256):
    net = Net(classes, loss_of)
    with ms.memory.track(net) as track:
        net(torch.randn(tokens, 32), torch.randint(classes, (tokens,))).backward()
    return track


def test_logits_are_named_with_what_does_without_them():
    track = tracked(4000, plain)
    (sentence,) = track.remedies()
    assert sentence.startswith("The logits of head, and tensors of their size, are ")
    assert "memsave_ext.linear_cross_entropy(x, head.weight, target)" in sentence
    share = int(sentence.partition(" are ")[2].partition("%")[0])
    assert 60 <= share <= 100
    text = io.StringIO()
    track.report(file=text)
    assert sentence in text.getvalue()


@pytest.mark.parametrize(
    ("classes", "loss_of", "tokens"), [(4000, chunked, 256), (100, plain, 256), (4000, plain, 2)]
)
def test_nothing_is_named_where_there_is_nothing_to_gain(classes, loss_of, tokens):
    track = tracked(classes, loss_of, tokens)
    assert track.remedies() == []
    text = io.StringIO()
    track.report(file=text)
    assert "linear_cross_entropy" not in text.getvalue()


def test_nothing_was_tracked():
    with ms.memory.track(Net(4000, plain)) as track:
        pass
    assert track.remedies() == []
    with ms.memory.track() as track:
        assert track.remedies() == []


def test_a_wide_layer_inside_is_no_head():
    net = nn.Sequential(nn.Linear(32, 2048), nn.ReLU(), nn.Linear(2048, 32))
    with ms.memory.track(net) as track:
        net(torch.randn(256, 32)).sum().backward()
    assert track.remedies() == []


class Block(nn.Module):
    def __init__(self, norm=nn.LayerNorm):
        super().__init__()
        self.first = nn.Linear(32, 32)
        self.mlp = nn.Sequential(norm(32), nn.Linear(32, 1024), nn.GELU(), nn.Linear(1024, 32))

    def forward(self, x):
        return x + self.mlp(self.first(x))


class Blocks(nn.Module):
    def __init__(self, norm=nn.LayerNorm, depth=4):
        super().__init__()
        self.blocks = nn.ModuleList(Block(norm) for _ in range(depth))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def train(net, run=lambda net, x: net(x)):
    with ms.memory.track(net) as track:
        run(net, torch.randn(512, 32)).sum().backward()
    return track


@pytest.mark.once
def test_a_wide_layer_that_is_computed_again_is_named():
    net = Blocks()
    ms.checkpoint_modules(net, Block)
    (sentence,) = train(net).remedies()
    assert sentence.startswith("What blocks.0.mlp makes when it is computed again is ")
    assert "memsave_ext.checkpoint(function, x, chunks=n)" in sentence
    assert 50 <= int(sentence.partition("again is ")[2].partition("%")[0]) <= 100
    net = Blocks()
    ms.checkpoint_modules(net, Block, chunks=64)
    assert train(net).remedies() == []


def test_a_wide_layer_without_a_graph_is_named():
    net = Blocks()
    with torch.no_grad(), ms.memory.track(net) as track:
        net(torch.randn(512, 32))
    (sentence,) = track.remedies()
    assert sentence.startswith("What blocks.")
    assert ".mlp makes and frees again in its forward is " in sentence


def test_no_layer_is_named_where_chunks_do_not_help():
    assert train(Blocks()).remedies() == []  # nothing is checkpointed
    assert train(Blocks(), ms.checkpoint).remedies() == []  # everything, in one region
    net = Blocks(nn.BatchNorm1d)
    ms.checkpoint_modules(net, Block)
    assert train(net).remedies() == []
    assert train(nn.Linear(32, 32), ms.checkpoint).remedies() == []


@pytest.mark.parametrize("inputs", [["p2", "p3"], 1.5, None])
def test_modules_with_other_in_features(inputs):
    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.in_features, self.fc = inputs, nn.Linear(8, 8)

        def forward(self, x):
            return self.fc(x)

    model = Heads()
    with ms.memory.track(model) as t:
        model(torch.ones(2, 8)).sum().backward()
    assert "parameters" in t.report()
