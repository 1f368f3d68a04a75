"""Chunks of some tokens and some classes, which a GPU's are: here on any device."""

import pytest
import torch
from losses import gradients, in_dtype, plain, problem

import memsave_ext as ms
from memsave_ext.loss_head import chunks, function

CLASSES = 256


@pytest.fixture
def in_blocks(monkeypatch):
    """Blocks of 7 tokens; the products of 16 bits that are added, by the dtype of the sum."""
    monkeypatch.setattr(function, "shape_of_chunk", lambda *_: (7, CLASSES))
    added = []

    def add(to, left, right, real=chunks._add_product):
        added.append((to.dtype, tuple(left.shape)))
        real(to, left, right)

    monkeypatch.setattr(chunks, "_add_product", add)
    return added


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("probabilities", [False, True], ids=["indices", "probabilities"])
def test_loss_and_gradients_are_those_of_all_tokens(in_blocks, dtype, probabilities):
    x, w, t = problem(17, 12, 600, dtype, probabilities=probabilities)
    bias = torch.randn(600).to(dtype).requires_grad_()
    for options in (
        {},
        {"reduction": "none", "softcap": 3.0},
        {"label_smoothing": 0.1, "weight": torch.rand(600).to(dtype)},
    ):
        wide = in_dtype((x, w, t, bias), torch.float64)
        exact_options = {
            k: v.double() if isinstance(v, torch.Tensor) else v for k, v in options.items()
        }
        exact = plain(*wide[:3], linear_bias=wide[3], **exact_options)
        grad = torch.linspace(0.5, 2, exact.numel()).view(exact.shape).double()
        right = gradients(exact, (wide[0], wide[1], wide[3]), grad)
        loss = ms.linear_cross_entropy(x, w, t, linear_bias=bias, **options)
        found = gradients(loss, (x, w, bias), grad)
        for ours, theirs in zip(found, right, strict=True):
            error = (ours.double() - theirs).norm() / theirs.norm()
            assert error <= 8 * torch.finfo(dtype).eps
    # 3 blocks of 3 chunks: those of the weight's gradient, and of the input's.
    assert len(in_blocks) == 3 * 3 * 3 * 2
    assert {to for to, _ in in_blocks} == {torch.promote_types(dtype, torch.float32)}


def test_rows_of_blocks_are_stepped_once(in_blocks):
    x, w, t = problem(17, 12, 600)
    results = []
    for step in (False, True):
        weight = torch.nn.Parameter(w.detach().clone())
        optimizer = ms.Adam([weight], lr=0.1, in_backward=step)
        ms.linear_cross_entropy(x, weight, t).backward()
        optimizer.step()
        assert weight.grad is None or not step
        results.append(weight.detach())
    assert torch.equal(*results)
    assert not torch.equal(results[0], w)


def test_no_tokens(in_blocks):
    x, w, _ = problem(17, 12, 600)
    t = torch.zeros(0, dtype=torch.long)
    loss = ms.linear_cross_entropy(x[:0], w, t, reduction="sum")
    assert gradients(loss, (w,))[1].count_nonzero() == 0 and loss == 0


@pytest.mark.parametrize("tokens", [0, 1, 500, 4096, 32768])
@pytest.mark.parametrize("weight", [(300, 8), (50257, 768), (128256, 4096)])
def test_chunks_of_a_gpu_are_large_and_fit(tokens, weight):
    assert chunks.shape_of_chunk(tokens, weight, False)[0] == tokens
    rows, classes = chunks.shape_of_chunk(tokens, weight, True)
    assert classes >= 2048 and classes % 256 == 0 and rows <= tokens
    blocks = -(-tokens // max(rows, 1))
    if blocks > 1:
        assert rows >= 1024 * 0.9
    if rows > 1024:
        assert (rows + weight[1]) * classes <= 2 * weight[0] * weight[1] // 5 + classes


def test_float32_of_a_16_bit_loss():
    x, w, t = problem(17, 12, 600, torch.bfloat16)
    exact = plain(*in_dtype((x, w, t), torch.float64))
    for one in (x, x[0]):
        target = t if one is x else t[0]
        loss = ms.linear_cross_entropy(one, w, target, loss_dtype=torch.float32)
        rounded = ms.linear_cross_entropy(one, w, target)
        assert loss.dtype == torch.float32 and rounded.dtype == torch.bfloat16
        assert torch.equal(loss.to(torch.bfloat16), rounded) and loss != rounded
        assert loss.requires_grad
    loss = ms.linear_cross_entropy(x, w, t, loss_dtype=torch.float32)
    # Logits are of 16 bits, their errors many and small.
    assert abs(loss.double() - exact) < 2**-10 * exact
    module = ms.LinearCrossEntropyLoss(12, 600, dtype=torch.bfloat16, loss_dtype=torch.float32)
    assert module(x, t).dtype == torch.float32
    with pytest.raises(ValueError, match="loss_dtype must be one of .* or None, got torch.int64"):
        ms.linear_cross_entropy(x, w, t, loss_dtype=torch.int64)


def test_a_capture_does_not_try_whether_products_add_in_float32(monkeypatch):
    """An error of the trial would end it; what was found outside of a capture is used there."""
    tried = []
    capturing = [True]
    monkeypatch.setattr(chunks, "_adding", {})
    monkeypatch.setattr(chunks, "_try_to_add", lambda *of: tried.append(of) or True)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    of = torch.device("cuda", 0), torch.bfloat16
    assert not chunks._adds_in_float32(*of)
    assert tried == []
    capturing[0] = False
    assert chunks._adds_in_float32(*of)
    capturing[0] = True
    assert chunks._adds_in_float32(*of)
    assert tried == [of]
