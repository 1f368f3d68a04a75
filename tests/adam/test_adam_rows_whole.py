"""Backwards in which a weight's rows cannot be stepped alone: the gradient is whole, and right."""

import pytest
import torch
from helpers import assert_equal
from rows import CHUNK, Model, expect_whole, reasons, train, whole

import memsave_ext as ms
from memsave_ext import _native


def backward(model, **options):
    model.loss().backward(**options)


def through_grad(model):
    torch.autograd.grad(model.loss(), [model.first, model.head])


def to_inputs(model):
    model.loss().backward(inputs=[model.first, model.head])


def retained(model):
    backward(model, retain_graph=True)


def accumulated(model):
    with model.optimizer.accumulate():
        backward(model)
    backward(model)


def accumulated_when(model):
    model.optimizer.accumulate_when(lambda: True)
    backward(model)
    model.optimizer.accumulate_when(None)
    backward(model)


def grad_was_set(model):
    model.head.grad = torch.ones_like(model.head)
    backward(model)


def clipped_in_two_passes(model):
    loss = model.loss()
    with model.optimizer.norm_pass(max_norm=0.1):
        loss.backward(retain_graph=True)
    loss.backward()


def paused(model):
    with model.optimizer.paused():
        backward(model)


def paused_and_kept(model):
    with model.optimizer.paused(keep=True):
        backward(model)
    backward(model)


def with_post_accumulate_hook(model):
    seen = []
    handle = model.head.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    backward(model)
    handle.remove()
    assert seen[0].shape == model.head.shape


def with_tensor_hook(model):
    seen = []
    handle = model.head.register_hook(seen.append)
    backward(model)
    handle.remove()
    assert seen[0].shape == model.head.shape


def with_node_hook(model):
    node = model.head.view_as(model.head).grad_fn.next_functions[0][0]
    seen = []
    handle = node.register_prehook(lambda grads: seen.append(grads))
    backward(model)
    handle.remove()
    assert seen


BACKWARDS = {
    through_grad: "autograd.grad() or backward(inputs=)",
    to_inputs: "autograd.grad() or backward(inputs=)",
    retained: "retain_graph=True",
    accumulated: ("gradients are accumulated", ".grad of the weight is set"),
    accumulated_when: ("this backward accumulates", ".grad of the weight is set"),
    grad_was_set: ".grad of the weight is set",
    clipped_in_two_passes: (
        "retain_graph=True",
        "this backward accumulates or measures",
        "the optimizer measures or clips by the norm",
    ),
    paused: "the optimizer is paused",
    paused_and_kept: ("the optimizer is paused", ".grad of the weight is set"),
    with_post_accumulate_hook: "a hook on the weight has to see",
    with_tensor_hook: "a hook on the weight has to see",
    with_node_hook: "a hook on the weight has to see",
}


@pytest.mark.parametrize("run", BACKWARDS, ids=lambda run: run.__name__)
def test_backwards_that_need_the_whole_gradient(run):
    """They do what they do where the whole gradient is forced by a hook."""
    results = []
    for model in (whole(Model()), Model()):
        with reasons() as found:
            run(model)
        model.optimizer.step()
        train(model, 1)
        results.append(list(model.tensors()))
    expect_whole(found, BACKWARDS[run])
    assert_equal(*results)


def test_create_graph():
    model = Model()
    with reasons() as found:
        loss = model.loss()
        torch.autograd.grad(loss, model.head, create_graph=True)
    assert found == ["backward makes a graph (create_graph=True)"]


def test_grad_scaler():
    models = []
    for make in (whole, lambda model: model):
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
        model = make(Model(grad_scaler=scaler))
        with reasons() as found:
            for i in range(4):
                model.optimizer.zero_grad()
                loss = model.loss() * (float("inf") if i == 1 else 1)
                scaler.scale(loss).backward()
                scaler.step(model.optimizer)
                scaler.update()
        models.append(list(model.tensors()))
    expect_whole(found, "a GradScaler has to see")
    assert_equal(*models)


def test_states_and_weights_in_another_order_of_memory():
    model = Model()
    model.head.data = model.head.data.t().contiguous().t()
    other = whole(Model())
    other.head.data = other.head.data.t().contiguous().t()
    found = train(model)
    expect_whole(found, "the rows of the weight, or of its states, are not contiguous")
    train(other)
    assert_equal(list(model.tensors()), list(other.tensors()))


@pytest.mark.skipif(not _native.available, reason="remat records natively")
def test_remat_around_the_model():
    """The head's weight is not what dropped values are computed from."""
    results = []
    for make in (whole, lambda model: model):
        model = make(Model())
        with reasons() as found:
            for _ in range(2):
                model.optimizer.zero_grad()
                with ms.remat():
                    hidden, target = model.batch()
                    loss = ms.linear_cross_entropy(
                        torch.tanh(hidden), model.head, target, chunk_size=CHUNK, debug=True
                    )
                loss.backward()
                model.optimizer.step()
        results.append(list(model.tensors()))
    assert found == []
    assert_equal(*results)
