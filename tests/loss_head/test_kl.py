"""linear_kl beside torch's operators in float64, its memory, and the rows it steps."""

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_equal
from losses import in_dtype
from torch import nn

import memsave_ext as ms
from memsave_ext import _native

BETAS = [0.0, 1.0, 0.5, 0.1]
WIDE = {torch.float64: torch.float64}


def by_torch(x, w, tx, tw, b=None, tb=None, *, beta=0.0, temperature=1.0, softcap=None,
             teacher_softcap=None):  # fmt: skip
    """By F.kl_div of the definition."""

    def log_probs(x, w, b, cap):
        logits = F.linear(x, w, b)
        logits = logits if cap is None else cap * torch.tanh(logits / cap)
        return (logits.to(WIDE.get(x.dtype, torch.float32)) / temperature).log_softmax(-1)

    student = log_probs(x, w, b, softcap)
    teacher = log_probs(tx, tw, tb, teacher_softcap).detach()

    def kl(p, q):
        return F.kl_div(q, p, reduction="none", log_target=True).sum(-1)

    if beta in (0.0, 1.0):
        return kl(student, teacher) if beta else kl(teacher, student)
    mixed = (beta * teacher.exp() + (1 - beta) * student.exp()).log()
    return beta * kl(teacher, mixed) + (1 - beta) * kl(student, mixed)


def case(dtype=torch.float64, bias=False, classes=700, seed=0):
    """Float64 tensors with values of ``dtype``: of the student, which need gradients, and of the
    teacher, whose layer is wider."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator).to(dtype).double()

    tensors = [normal(3, 5, 8), normal(classes, 8), normal(3, 5, 12), normal(classes, 12)]
    tensors += [normal(classes), normal(classes)] if bias else [None, None]
    for at in (0, 1, 4):
        if tensors[at] is not None:
            tensors[at].requires_grad_()
    return tensors


def gradients(kl, tensors):
    grad = torch.linspace(-1, 2, kl.numel(), dtype=kl.dtype).view(kl.shape)
    wanted = [tensors[at] for at in (0, 1, 4) if tensors[at] is not None]
    return [kl.detach(), *torch.autograd.grad(kl, wanted, grad)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize(
    "options",
    [{}, {"temperature": 2.5}, {"softcap": 3.0, "teacher_softcap": 5.0, "temperature": 0.5}],
    ids=str,
)
def test_values_and_gradients(dtype, beta, options):
    exact = case(dtype, bias="softcap" in options)
    options = {"beta": beta, **options}
    right = gradients(by_torch(*exact, **options), exact)
    tensors = in_dtype(exact, dtype)
    torchs = gradients(by_torch(*tensors, **options), tensors)
    found = gradients(ms.linear_kl(*tensors, chunk_size=256, **options), tensors)
    assert found[0].dtype == WIDE.get(dtype, torch.float32)
    for value, other, of_torch in zip(found, right, torchs, strict=True):
        assert value.shape == other.shape and value.dtype == of_torch.dtype
        if dtype == torch.float64:
            torch.testing.assert_close(value, other, rtol=1e-9, atol=1e-11)
            continue
        error, allowed = (value.double() - other).norm(), (of_torch.double() - other).norm()
        # A log-probability is rounded as the logits are that it is the difference of.
        assert error <= 2 * allowed + 32 * torch.finfo(dtype).eps * other.norm()


@pytest.mark.parametrize("beta", BETAS)
def test_chunks_of_tokens_and_of_any_size(beta, monkeypatch):
    tensors = case()
    right = gradients(ms.linear_kl(*tensors, beta=beta), tensors)
    monkeypatch.setattr(ms.loss_head.kl, "shape_of_chunk", lambda *_: (4, 256))
    found = gradients(ms.linear_kl(*tensors, beta=beta), tensors)
    torch.testing.assert_close(found, right, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("beta", BETAS)
def test_gradcheck_also_twice(beta):
    x, w, tx, tw, *_ = case(classes=300)
    x = x.detach()[0].requires_grad_()

    def of(x, w):
        return ms.linear_kl(x, w, tx[0], tw, beta=beta, softcap=4.0, temperature=1.5)

    assert torch.autograd.gradcheck(of, (x, w), fast_mode=True)
    assert torch.autograd.gradgradcheck(of, (x, w), fast_mode=True)


@pytest.mark.parametrize("beta", BETAS)
def test_equal_heads_and_masked_classes(beta):
    x, w, *_ = case()
    same = ms.linear_kl(x, w, x, w, beta=beta)
    torch.testing.assert_close(same, torch.zeros_like(same), rtol=0, atol=1e-12)
    bias = torch.zeros(700, dtype=torch.float64)
    bias[100:500] = -torch.inf  # a whole chunk of both
    tensors = case()
    masked = [*tensors[:4], bias, bias]
    kept = [*tensors[:4], None, None]
    for at in (1, 3):
        kept[at] = torch.cat([tensors[at][:100], tensors[at][500:]])
    found = ms.linear_kl(*masked, beta=beta, chunk_size=256)
    torch.testing.assert_close(found, by_torch(*kept, beta=beta))
    found = torch.autograd.grad(found.sum(), tensors[:2])
    torch.testing.assert_close(
        found, torch.autograd.grad(by_torch(*kept, beta=beta).sum(), tensors[:2])
    )


def test_the_teacher_is_a_constant():
    tensors = [t.detach().requires_grad_() for t in case()[:4]]
    ms.linear_kl(*tensors).sum().backward()
    assert [t.grad is not None for t in tensors] == [True, True, False, False]


def test_dtypes_of_their_own_and_autocast():
    tensors = case(torch.bfloat16)
    right = by_torch(*tensors)
    mixed = [t.float() for t in tensors[:2]] + [t.bfloat16() for t in tensors[2:4]]
    torch.testing.assert_close(ms.linear_kl(*mixed).double(), right, rtol=0.05, atol=0.02)
    single = [t.float() for t in tensors[:4]]
    with torch.autocast("cpu", torch.bfloat16):
        found = ms.linear_kl(*single)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), right, rtol=0.05, atol=0.05)


def test_one_token_none_subclasses_and_compile():
    tensors = case()
    x, w, tx, tw, *_ = tensors
    right = by_torch(x, w, tx, tw)
    torch.testing.assert_close(ms.linear_kl(x[1, 2], w, tx[1, 2], tw), right[1, 2])
    assert ms.linear_kl(x[:0], w, tx[:0], tw).shape == (0, 5)

    class Subclass(torch.Tensor):
        pass

    found = ms.linear_kl(x.detach().as_subclass(Subclass), w, tx, tw)
    torch.testing.assert_close(found.as_subclass(torch.Tensor), right)
    compiled = torch.compile(lambda x: ms.linear_kl(x, w, tx, tw) * 2, backend="eager")
    torch.testing.assert_close(compiled(x), 2 * right)


@pytest.mark.skipif(_native.module is None, reason="no fake kernel shows its temporaries")
@pytest.mark.parametrize("beta", [0.0, 0.5])
def test_a_prediction_is_the_step_that_is_tracked(beta):
    def build():
        heads = nn.Linear(32, 2000, bias=False), nn.Linear(48, 2000, bias=False)
        model = nn.ModuleList([nn.Linear(32, 32), *heads])
        optimizer = ms.AdamW(model[:2].parameters(), in_backward=True)
        x, tx = torch.randn(128, 32), torch.randn(128, 48)

        def step():
            hidden = model[0](x).tanh()
            ms.linear_kl(hidden, heads[0].weight, tx, heads[1].weight, beta=beta).mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        return model, optimizer, step

    model, optimizer, step = build()
    step()
    with ms.memory.track(model, optimizer) as track:
        step()
    assert abs(ms.memory.predict(build).peak / track.peak - 1) < 0.02


@pytest.mark.skipif(_native.module is None, reason="in pure Python the gradient is whole")
def test_rows_are_stepped():
    x, w, tx, tw, *_ = in_dtype(case(), torch.float32)
    results = []
    for stepped in (False, True):
        weight = torch.nn.Parameter(w.detach().clone())
        optimizer = ms.Adam([weight], lr=0.1, in_backward=stepped)
        with ms.memory.track() as track:
            ms.linear_kl(x, weight, tx, tw, chunk_size=256).sum().backward()
        assert (weight.grad is None) == stepped
        optimizer.step()
        results.append((weight.detach(), track.peak))
    assert_equal([results[0][0]], [results[1][0]])


def test_a_step_inside_of_a_region_and_rows_that_are_whole_are_said(recwarn):
    x, w, tx, tw, *_ = in_dtype(case(), torch.float32)
    optimizer = ms.Adam([w], lr=0.1, in_backward=True)
    ms.checkpoint(lambda x: ms.linear_kl(x, w, tx, tw, debug=True).sum(), x).backward()
    optimizer.step()
    assert any("gradient of linear_weight is made as a whole" in str(w.message) for w in recwarn)


def test_no_tensor_of_tokens_and_classes():
    tokens, classes = 512, 16384
    x, w = torch.randn(tokens, 64), torch.randn(classes, 64, requires_grad=True)
    tx, tw = torch.randn(tokens, 96), torch.randn(classes, 96)
    for beta in (0.0, 1.0, 0.5):
        with ms.memory.track() as t:
            ms.linear_kl(x, w, tx, tw, beta=beta).sum().backward()
        logits = 4 * tokens * classes
        assert t.peak < logits // 2 + 2 * w.nbytes, (beta, t.peak / logits)


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"teacher_input": torch.ones(4, 12)}, ValueError, r"must have shapes.*\(4, 12\)"),
        ({"teacher_weight": torch.ones(30, 11)}, ValueError, "must have shapes"),
        ({"teacher_weight": torch.ones(31, 12)}, ValueError, "must have shapes"),
        ({"linear_bias": torch.ones(3)}, ValueError, r"linear_bias must have shape \(30,\)"),
        ({"teacher_bias": torch.ones(2)}, ValueError, r"teacher_bias must have shape.*got \(2,\)"),
        ({"beta": 1.5}, ValueError, "beta must be a number from 0 to 1, got 1.5"),
        ({"beta": float("nan")}, ValueError, "beta must be"),
        ({"beta": "0.5"}, ValueError, "beta must be a number from 0 to 1, got '0.5'"),
        ({"temperature": None}, ValueError, "temperature must be a positive number, got None"),
        ({"softcap": "3"}, ValueError, "softcap must be a positive number or None, got '3'"),
        ({"temperature": 0.0}, ValueError, "temperature must be a positive number"),
        ({"teacher_softcap": 0.0}, ValueError, "teacher_softcap must be a positive number"),
        ({"chunk_size": 3}, ValueError, "chunk_size must be a positive multiple of 256"),
        ({"teacher_weight": torch.nn.Linear(8, 30)}, TypeError, "teacher_weight must be a tensor"),
        ({"teacher_bias": 1.0}, TypeError, "teacher_bias must be a tensor, got float"),
        (
            {"teacher_input": torch.ones(3, 5, 12, device="meta")},
            ValueError,
            "all tensors must be on one device, got input on cpu, .* teacher_input on meta",
        ),
        (
            {"linear_bias": torch.ones(30, device="meta")},
            ValueError,
            "must be on one device, .* linear_bias on meta",
        ),
        (
            {"teacher_input": torch.ones(3, 5, 12, dtype=torch.bfloat16)},
            ValueError,
            "teacher_input, teacher_weight must have the same floating-point dtype.* "
            "teacher_input of torch.bfloat16",
        ),
        (
            {"input": torch.ones(3, 5, 8).long(), "linear_weight": torch.ones(30, 8).long()},
            ValueError,
            "input, linear_weight must have the same floating-point dtype",
        ),
    ],
    ids=str,
)
def test_wrong_arguments(change, error, text):
    names = "input", "linear_weight", "teacher_input", "teacher_weight"
    given = dict(zip(names, case(classes=30)[:4], strict=True))
    with pytest.raises(error, match=text):
        ms.linear_kl(**{**given, **change})


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("masked", ["both", "student"])
def test_masked_classes_by_torchs_operators(beta, masked):
    """Their gradients are 0, whoever computes them."""
    x, w, tx, tw, b, tb = case(torch.float32, bias=True)
    x, w, tx, tw, b, tb = (t.detach().float() for t in (x, w, tx, tw, b, tb))
    b[100:200] = -torch.inf
    if masked == "both":
        tb[100:200] = -torch.inf
    elif beta == 0:
        pytest.skip("infinitely far from the teacher")

    def kl(x):
        return ms.linear_kl(x, w, tx, tw, b, tb, beta=beta).sum()

    x.requires_grad_()
    (expected,) = torch.autograd.grad(kl(x), x)
    assert expected.isfinite().all() and expected.any()
    found = [torch.autograd.grad(kl(x), x, create_graph=True)[0], torch.func.grad(kl)(x.detach())]
    for grad in found:
        torch.testing.assert_close(grad, expected, rtol=1e-4, atol=1e-4)
    (second,) = torch.autograd.grad(found[0].square().sum(), x)
    assert second.isfinite().all()
