"""A low-rank product beside the head's logits, as an adapter on the head makes it."""

import pytest
import torch
import torch.nn.functional as F
from losses import REDUCTIONS, chunked, in_dtype, plain, problem

import memsave_ext as ms
from memsave_ext import _native
from memsave_ext.loss_head import chunks, function

SCALE = 1.5
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def adapter(rank=4, features=12, classes=600, dtype=torch.float32):
    g = torch.Generator().manual_seed(3)
    shapes = (rank, features), (classes, rank)
    return [(0.4 * torch.randn(*s, generator=g)).to(dtype).requires_grad_() for s in shapes]


def low_rank(x, a, b):
    return F.linear(x, a) * SCALE, b


def by_torch(x, w, t, a, b, **options):
    """With a weight of (C, features) that has the product in it."""
    return plain(x, w + SCALE * b @ a, t, **options)


OPTIONS = [
    {},
    {"linear_bias": torch.linspace(-1, 1, 600)},
    {"softcap": 2.0},
    {"ignore_index": 7},
    {"label_smoothing": 0.1, "weight": torch.linspace(0.5, 2, 600)},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: ", ".join(o) or "plain")
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("probabilities", [False, True], ids=["indices", "probabilities"])
@pytest.mark.parametrize("frozen", [False, True], ids=["", "frozen"])
@pytest.mark.without(case=lambda c: c["probabilities"] and "ignore_index" in c["options"])
def test_loss_and_gradients_beside_float64(options, reduction, dtype, probabilities, frozen):
    """Errors at most those of torch's operators in this dtype, twice, and four roundings."""
    x, w, t = problem(17, dtype=dtype, probabilities=probabilities)
    if not probabilities:
        t[:3] = 7
    w.requires_grad_(not frozen)
    tensors = x, w, *adapter(dtype=dtype)

    def run(of, tensors):
        x, w, a, b = tensors
        more = in_dtype(options.values(), x.dtype)
        loss = of(x, w, t.to(x.dtype) if probabilities else t, a, b, reduction=reduction,
                  **dict(zip(options, more, strict=True)))  # fmt: skip
        grad = torch.linspace(0.5, 2, loss.numel(), dtype=torch.float64).view(loss.shape)
        wanted = [v for v in tensors if v.requires_grad]
        return [loss.detach(), *torch.autograd.grad(loss, wanted, grad.to(loss.dtype))]

    def as_peft_does(x, w, t, a, b, *, linear_bias=None, softcap=None, **options):
        logits = F.linear(x, w, linear_bias) + F.linear(F.linear(x, a), b) * SCALE
        logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
        return F.cross_entropy(logits, t, **options)

    right = run(by_torch, in_dtype(tensors, torch.float64))
    theirs = run(as_peft_does, tensors)
    found = run(lambda x, w, t, a, b, **o: chunked(x, w, t, low_rank=low_rank(x, a, b), **o),
                tensors)  # fmt: skip
    assert len(found) == len(right) == 4 + (not frozen)
    for ours, torchs, exact in zip(found, theirs, right, strict=True):
        assert ours.dtype == torchs.dtype and ours.stride() == torchs.stride()
        bound = 2 * (torchs.double() - exact).norm()
        bound = bound + 4 * torch.finfo(dtype).eps * exact.norm()
        assert (ours.double() - exact).norm() <= bound


@pytest.mark.parametrize("options", [{}, {"softcap": 3.0, "temperature": 0.7}], ids=str)
@pytest.mark.parametrize("shape", [(24,), (3, 8)], ids=str)
def test_log_probs_and_what_calls_return_besides(options, shape):
    x, w, t = problem(24, dtype=torch.float64)
    a, b = adapter(dtype=torch.float64)
    x, t = x.view(*shape, -1), t.view(shape)
    cap, temperature = options.get("softcap"), options.get("temperature", 1.0)
    logits = F.linear(x, w + SCALE * b @ a)
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    log_p = (logits / temperature).log_softmax(-1)
    right = (
        log_p.gather(-1, t[..., None])[..., 0], (logits / temperature).logsumexp(-1),
        logits.argmax(-1), -(log_p.exp() * log_p).sum(-1),
    )  # fmt: skip
    found = ms.linear_log_probs(
        x, w, t, low_rank=low_rank(x, a, b), chunk_size=256, return_lse=True,
        return_predicted=True, return_entropy=True, **options,
    )  # fmt: skip
    torch.testing.assert_close(found, right)
    totals = [v[0].sum() + v[1].square().sum() - v[3].sum() for v in (found, right)]
    torch.testing.assert_close(*[torch.autograd.grad(total, (x, w, a, b)) for total in totals])


@pytest.mark.parametrize(
    "given", [(0,), (1,), (2,), (3,), (0, 2), (0, 3), (2, 3)], ids=lambda g: "xwlb"[g[0]] + str(g)
)
def test_gradients_of_some_tensors_alone(given):
    x, w, t = problem(9, dtype=torch.float64)
    a, b = (v.detach() for v in adapter(dtype=torch.float64))
    tensors = [x.detach(), w.detach(), F.linear(x.detach(), a), b]
    for number in given:
        tensors[number].requires_grad_()

    def by_products(x, w, low, b):
        return F.cross_entropy(F.linear(x, w) + F.linear(low, b), t)

    x, w, low, b = tensors
    wanted = [tensors[number] for number in given]
    found = torch.autograd.grad(chunked(x, w, t, low_rank=(low, b)), wanted)
    torch.testing.assert_close(found, torch.autograd.grad(by_products(*tensors), wanted))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_blocks_of_tokens(dtype, monkeypatch):
    """As on a GPU: of 3 blocks and 3 chunks."""
    x, w, t = problem(17, dtype=dtype)
    tensors = x, w, *adapter(dtype=dtype)
    exact = in_dtype(tensors, torch.float64)
    right = torch.autograd.grad(by_torch(exact[0], exact[1], t, *exact[2:]), exact)
    seen = []
    monkeypatch.setattr(function, "shape_of_chunk", lambda *_: (7, 256))
    iterate = chunks.Chunks.__iter__
    monkeypatch.setattr(
        chunks.Chunks, "__iter__", lambda self: (seen.append(c.block) or c for c in iterate(self))
    )
    loss = ms.linear_cross_entropy(*tensors[:2], t, low_rank=low_rank(x, *tensors[2:]))
    found = torch.autograd.grad(loss, tensors)
    assert seen == 6 * [0, 1, 2]
    for ours, theirs in zip(found, right, strict=True):
        assert (ours.double() - theirs).norm() <= 8 * torch.finfo(dtype).eps * theirs.norm()


def test_a_frozen_weight_has_no_product_of_its_gradient(monkeypatch):
    x, w, t = problem(17)
    a, b = adapter()
    shapes = []

    def counted(real):
        def product(to, *factors):
            shapes.append(tuple(to.shape))
            real(to, *factors)

        return product

    for name in ("_add_product", "_set_product"):
        monkeypatch.setattr(chunks, name, counted(getattr(chunks, name)))

    def made():
        shapes.clear()
        chunked(x, w, t, low_rank=low_rank(x, a, b)).backward()
        return {*shapes}

    narrow = {(17, 12), (17, 4), (256, 4), (600 - 512, 4)}
    assert made() == narrow | {(256, 12), (600 - 512, 12)}
    w.requires_grad_(False)
    assert made() == narrow


@pytest.mark.skipif(_native.module is None, reason="in pure Python the gradient is whole")
def test_rows_of_a_weight_that_is_trained_are_stepped():
    results = []
    for step in (False, True):
        x, w, t = problem(17)
        weight, (a, b) = torch.nn.Parameter(w.detach()), adapter()
        optimizer = ms.Adam([weight, a, b], lr=0.1, in_backward=step)
        chunked(x, weight, t, low_rank=low_rank(x, a, b), debug=step).backward()
        optimizer.step()
        results.append((weight.detach(), a.detach(), b.detach(), x.grad))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def test_twice_differentiable():
    x, w, t = problem(3, 4, 300, torch.float64)
    low, b = torch.randn(3, 2).double().requires_grad_(), torch.randn(300, 2).double()

    def found(x, low, b):
        return ms.linear_log_probs(x, w.detach(), t, low_rank=(low, b), return_entropy=True)

    tensors = x, low, b.requires_grad_()
    assert torch.autograd.gradcheck(found, tensors, fast_mode=True)
    assert torch.autograd.gradgradcheck(found, tensors, fast_mode=True)


def test_autocast_and_adapters_of_another_dtype():
    """As peft has them: a 16-bit head and float32 adapters, with autocast and without."""
    x, w, t = problem(64)
    a, b = adapter()
    x, w = x.detach().bfloat16().requires_grad_(), w.detach().bfloat16()
    exact = in_dtype((x, w, a, b), torch.float64)
    wanted = exact[0], *exact[2:]
    right = torch.autograd.grad(by_torch(exact[0], exact[1], t, *exact[2:]), wanted)

    def theirs(autocast):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            of = x if autocast else x.float()
            logits = F.linear(x, w) + F.linear(F.linear(of, a), b) * SCALE
            return F.cross_entropy(logits.bfloat16().float(), t)

    def ours(autocast):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            of = x if autocast else x.float()
            return chunked(x, w, t, low_rank=low_rank(of, a, b))

    for autocast in (False, True):
        found, by = (torch.autograd.grad(of(autocast), (x, a, b)) for of in (ours, theirs))
        for value, other, exactly in zip(found, by, right, strict=True):
            assert value.dtype == other.dtype
            error, bound = (value.double() - exactly).norm(), (other.double() - exactly).norm()
            assert error <= 2 * bound


def test_one_token_no_tokens_and_no_rank():
    x, w, t = problem(17, dtype=torch.float64)
    a, b = adapter(dtype=torch.float64)
    found = chunked(x[0], w, t[0], low_rank=low_rank(x[0], a, b))
    torch.testing.assert_close(found, by_torch(x[0], w, t[0], a, b))
    none = chunked(x[:0], w, t[:0], low_rank=low_rank(x[:0], a, b), reduction="sum")
    assert none == 0 and torch.autograd.grad(none, b)[0].count_nonzero() == 0
    none = chunked(x, w, t, low_rank=(x[:, :0], b[:, :0]))
    torch.testing.assert_close(none, plain(x, w, t))


def test_no_tensor_of_tokens_and_classes():
    tokens, classes, features = 512, 8192, 64
    x, w, t = problem(tokens, features, classes)
    w.requires_grad_(False)
    a, b = adapter(8, features, classes)
    logits = 4 * tokens * classes

    def peak(of):
        x.grad = a.grad = b.grad = None
        with ms.memory.track() as t:
            of().backward()
        return t.peak

    def theirs():
        return F.cross_entropy(F.linear(x, w) + F.linear(F.linear(x, a), b) * SCALE, t)

    def ours():
        return ms.linear_cross_entropy(x, w, t, low_rank=low_rank(x, a, b))

    assert peak(theirs) > 3 * logits
    found = peak(ours)
    assert found < logits / 4
    if _native.module is not None:  # the fallback's kernels have several tensors of a chunk
        # Chunks of two fifths of the weight, gradients of x and b, and what x's is summed in.
        assert found < 0.4 * w.nbytes + 2 * x.nbytes + 2 * b.nbytes + 2**18


WRONG = {
    "classes": ((3, 2), (299, 2)),
    "tokens": ((2, 2), (300, 2)),
    "ranks": ((3, 2), (300, 3)),
    "dimensions": ((3,), (300,)),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("call", [ms.linear_log_probs, ms.linear_cross_entropy])
def test_wrong_shapes(name, call):
    x, w, t = problem(3, 4, 300)
    low, b = (torch.randn(shape) for shape in WRONG[name])
    with pytest.raises(ValueError, match=r"low_rank must have shapes.*got .* beside \(3, 4\)"):
        call(x, w, t, low_rank=(low, b))


def test_other_wrong_arguments():
    x, w, t = problem(3, 4, 300)
    low, b = torch.randn(3, 2), torch.randn(300, 2)
    with pytest.raises(TypeError, match=r"low_rank\[1\] must be a tensor, got Linear"):
        ms.linear_log_probs(x, w, t, low_rank=(low, torch.nn.Linear(2, 300)))
    for wrong in (low, (low,), (low, b, b)):
        with pytest.raises(TypeError, match="low_rank must be a pair of tensors or None, got"):
            ms.linear_cross_entropy(x, w, t, low_rank=wrong)
    with pytest.raises(ValueError, match="low_rank must have floating-point tensors"):
        ms.linear_cross_entropy(x, w, t, low_rank=(low.long(), b))
    with pytest.raises(ValueError, match="low_rank must be on linear_weight's device cpu"):
        ms.linear_cross_entropy(x, w, t, low_rank=(low.to("meta"), b))
    wide = w.detach().view(300, 1, 4)
    with pytest.raises(ValueError, match="low_rank must have shapes"):
        ms.linear_cross_entropy(x, wide, t[:, None], low_rank=(low, b))
