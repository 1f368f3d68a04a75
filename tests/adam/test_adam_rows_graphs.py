"""Graphs in which a weight's rows cannot be stepped alone: the gradient is whole, and right."""

import pytest
import torch
from helpers import assert_equal
from rows import CHUNK, Model, expect_whole, reasons

import memsave_ext as ms

# Each case has a loss that the head's rows have to be whole for, and why.


def tied(model):
    hidden, target = model.batch()
    embedded = torch.nn.functional.embedding(target, model.head)
    return ms.linear_cross_entropy(
        hidden + embedded, model.head, target, chunk_size=CHUNK, debug=True
    )


def tied_beside(model):
    return model.loss() + model.head.square().mean()


def two_heads(model):
    return model.loss() + model.loss()


class Root(torch.autograd.Function):
    """The node at which backward begins uses the weight itself."""

    @staticmethod
    def forward(ctx, loss, weight):
        ctx.save_for_backward(weight)
        return loss + 0.1 * weight.square().sum()

    @staticmethod
    def backward(ctx, grad):
        return grad, grad * 0.2 * ctx.saved_tensors[0]


def at_the_root(model):
    return Root.apply(model.loss(), model.head)


def in_a_region(model):
    hidden, target = model.batch()
    options = {"chunk_size": CHUNK, "debug": True}
    return ms.checkpoint(
        lambda x: ms.linear_cross_entropy(x, model.head, target, **options), hidden
    )


def in_torchs_region(model):
    hidden, target = model.batch()
    options = {"chunk_size": CHUNK, "debug": True}
    return torch.utils.checkpoint.checkpoint(
        lambda x: ms.linear_cross_entropy(x, model.head, target, **options),
        hidden,
        use_reentrant=False,
    )


def in_a_reentrant_region(model):
    hidden, target = model.batch()
    options = {"chunk_size": CHUNK, "debug": True}
    return torch.utils.checkpoint.checkpoint(
        lambda x: ms.linear_cross_entropy(x, model.head, target, **options),
        hidden,
        use_reentrant=True,
    )


def in_an_explicit_region(model):
    hidden, target = model.batch()
    options = {"chunk_size": CHUNK, "debug": True}
    return ms.CheckpointFunction.apply(
        lambda x, w: ms.linear_cross_entropy(x, w, target, **options), 2, hidden, model.head
    )


def computed(model):
    hidden, target = model.batch()
    return ms.linear_cross_entropy(hidden, model.head * 1.0, target, chunk_size=CHUNK, debug=True)


LOSSES = {
    tied: "the weight is used elsewhere",
    tied_beside: "the weight is used elsewhere",
    two_heads: "the weight is used elsewhere",
    at_the_root: "the weight is used elsewhere",
    in_a_region: "the loss is inside of a checkpointed region",
    in_torchs_region: "the loss is inside of a checkpointed region",
    in_a_reentrant_region: "the loss is inside of a checkpointed region",
    in_an_explicit_region: "the loss is inside of a checkpointed region",
    computed: "the weight is computed from other tensors",
}


@pytest.mark.parametrize("loss_of", LOSSES, ids=lambda loss_of: loss_of.__name__)
def test_graphs_that_need_the_whole_gradient(loss_of):
    results = []
    for in_backward in (False, True):
        model = Model(in_backward=in_backward)
        with reasons() as found:
            for _ in range(2):
                model.optimizer.zero_grad()
                loss_of(model).backward()
                model.optimizer.step()
        results.append(list(model.tensors()))
    expect_whole(found, LOSSES[loss_of])
    assert_equal(*results)


def test_a_graph_that_is_kept_beside():
    """Its backward comes later, or never."""
    model = Model()
    kept = model.loss()
    with reasons() as found:
        (model.loss() / 2).backward()
    expect_whole(found, "the weight is used elsewhere, too (as a tied embedding is), or in")
    del kept


def test_not_in_backward():
    model = Model(in_backward=False)
    with reasons() as found:
        model.loss().backward()
    assert model.head.grad is not None
    expect_whole(found, "no optimizer of memsave_ext steps the weight in backward")
