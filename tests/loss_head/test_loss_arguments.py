"""Wrong arguments, and the module."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from losses import plain, problem

import memsave_ext as ms


def wrong_calls():
    x, w, t = problem(3, 4, 5)
    w2 = torch.randn(5, 2, 4)
    yield x, w, t[:2], {}
    yield x, w, t.int(), {}
    yield x, w, torch.tensor([0, 5, 1]), {}
    yield x, w, torch.tensor([0, -1, 1]), {}
    yield x, w, torch.rand(3, 4), {}
    yield x, w, t, {"reduction": "most"}
    yield x, w, t, {"label_smoothing": 2.0}
    yield x, w, t, {"weight": torch.rand(4)}
    yield x, w, t, {"linear_bias": torch.rand(4)}
    yield x, w.double(), t, {}
    yield x, w[:, :3], t, {}
    yield x[None], w, t, {}
    yield x, w[0], t, {}
    yield x[0], w2, t, {}
    yield x, w, torch.rand(3, 5), {"ignore_index": 1}


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="torch has no such function")
@pytest.mark.parametrize("number", range(15))
def test_wrong_arguments_raise_torchs_errors(number):
    x, w, t, options = next(itertools.islice(wrong_calls(), number, None))
    with pytest.raises((RuntimeError, ValueError, IndexError)) as expected:
        F.linear_cross_entropy(x, w, t, **options)
    with pytest.raises(type(expected.value)) as found:
        ms.linear_cross_entropy(x, w, t, **options)
    assert str(found.value) == str(expected.value)


def test_a_module_for_a_weight():
    x, _, t = problem(3, 4, 5)
    head = torch.nn.Linear(4, 5)
    with pytest.raises(
        TypeError, match="linear_weight must be a tensor, got Linear: give its weig"
    ):
        ms.linear_cross_entropy(x, head, t)
    with pytest.raises(TypeError, match="target must be a tensor, got list$"):
        ms.linear_cross_entropy(x, head.weight, [0, 1, 2])
    with pytest.raises(TypeError, match="linear_bias must be a tensor, got Linear"):
        ms.linear_cross_entropy(x, head.weight, t, linear_bias=head)
    with pytest.raises(TypeError, match="^weight must be a tensor, got list$"):
        ms.linear_cross_entropy(x, head.weight, t, weight=[1.0] * 5)


@pytest.mark.parametrize("probabilities", [False, True], ids=["indices", "probabilities"])
def test_batches_of_sequences(probabilities):
    x, w, t = problem(6, 4, 5, probabilities=probabilities)
    rows, targets = x.reshape(2, 3, 4), t.reshape(2, 3, *t.shape[1:])
    with pytest.raises(RuntimeError, match=r"\(2, 3, 4\).*allowed are \(N, in_fe") as error:
        ms.linear_cross_entropy(rows, w, targets)
    assert "input.flatten(0, -2) and target.flatten(0, 1)" in str(error.value)
    found = ms.linear_cross_entropy(rows.flatten(0, -2), w, targets.flatten(0, 1))
    assert torch.equal(found, ms.linear_cross_entropy(x, w, t))


def test_own_options_are_checked():
    x, w, t = problem(3, 4, 5)
    for softcap in (0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="softcap must be a positive number or None"):
            ms.linear_cross_entropy(x, w, t, softcap=softcap)
    for size in (0, 100, -256, 256.0):
        with pytest.raises(ValueError, match="chunk_size must be a positive multiple of 256"):
            ms.linear_cross_entropy(x, w, t, chunk_size=size)
    for ignored in (True, 1.5, "1"):
        with pytest.raises(TypeError, match="ignore_index must be an int or None, got"):
            ms.linear_cross_entropy(x, w, t, ignore_index=ignored)
    for smoothing in (None, "0.1"):
        with pytest.raises(TypeError, match="label_smoothing must be a number, got"):
            ms.linear_cross_entropy(x, w, t, label_smoothing=smoothing)
    for name in ("return_lse", "return_predicted", "return_entropy", "debug"):
        for flag in (None, 1, "no"):
            with pytest.raises(TypeError, match=f"^{name} must be True or False, got {flag!r}"):
                ms.linear_cross_entropy(x, w, t, **{name: flag})


def test_on_the_meta_device():
    x, w = (torch.randn(n, 8, device="meta", requires_grad=True) for n in (4, 300))
    target = torch.zeros(4, dtype=torch.long, device="meta")
    for loss in (
        ms.linear_cross_entropy(x, w, target),
        ms.linear_log_probs(x, w, target).sum(),
        ms.linear_kl(x, w, x.detach(), w.detach()).sum(),
    ):
        x.grad = w.grad = None
        loss.backward()
        assert loss.is_meta and x.grad.shape == x.shape and w.grad.shape == w.shape


def test_module():
    torch.manual_seed(3)
    loss_of = ms.LinearCrossEntropyLoss(8, 300, bias=True, weight=torch.rand(300), softcap=9.0)
    x, t = torch.randn(5, 8), torch.randint(300, (5,))
    expected = plain(
        x, loss_of.linear.weight, t, linear_bias=loss_of.linear.bias, softcap=9.0,
        weight=loss_of.weight,
    )  # fmt: skip
    torch.testing.assert_close(loss_of(x, t), expected)
    assert "num_classes=300" in repr(loss_of) and "softcap=9.0" in repr(loss_of)
    several = ms.LinearCrossEntropyLoss(8, 5, out_features=(2, 3))
    assert several(x, torch.randint(5, (5, 2, 3))).shape == ()
    with pytest.raises(RuntimeError, match="expected weight shape"):
        ms.LinearCrossEntropyLoss(8, 300, weight=torch.rand(3))
    with pytest.raises(RuntimeError, match="label_smoothing"):
        ms.LinearCrossEntropyLoss(8, 300, label_smoothing=2)
    if hasattr(torch.nn, "LinearCrossEntropyLoss"):
        torchs = torch.nn.LinearCrossEntropyLoss(8, 300, bias=True, weight=torch.rand(300))
        torchs.load_state_dict(loss_of.state_dict())
