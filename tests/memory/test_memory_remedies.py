"""The report names the loss head where logits are a large part of the peak."""

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
