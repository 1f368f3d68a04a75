"""The operators on a chunk: native and in Python the same, checks, fakes."""

import pytest
import torch
from torch.library import opcheck

from memsave_ext import _native
from memsave_ext.loss_head import operators

reduce_ = torch.ops.memsave_ext.linear_cross_entropy_reduce_.default
gradient_ = torch.ops.memsave_ext.linear_cross_entropy_gradient_.default

KINDS = {
    "indices": {},
    "smooth": {"keep": 0.9, "spread": 0.01},
    "probabilities": {"probabilities": True},
    "weighted": {"weighted": True, "softcap": 3.0},
    "all": {"probabilities": True, "weighted": True, "softcap": 3.0, "keep": 0.9, "spread": 0.01},
}
KINDS |= {f"{kind}, entropy": {**of, "entropy": True} for kind, of in KINDS.items()}
every_kind = pytest.mark.parametrize("kind", KINDS)
every_dtype = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16]
)


def arguments(kind, dtype, tokens=7, classes=300):
    """(logits, wide dtype, the last arguments of both operators)."""
    of = KINDS[kind]
    generator = torch.Generator().manual_seed(1)
    wide = torch.promote_types(dtype, torch.float32)
    logits = 3 * torch.randn(tokens, classes, generator=generator)
    logits[1, 5] = -torch.inf
    given = of.get("probabilities", False)
    target = torch.randint(200, 900, (tokens,), generator=generator)
    target[0], target[1] = 512, 512 + classes - 1
    probabilities = logits.roll(1, 0).softmax(1).to(wide)
    probabilities[1, 5] = 0.0
    return logits.to(dtype), wide, (
        None if given else target,
        probabilities if given else None,
        torch.rand(classes, generator=generator).to(wide) if of.get("weighted") else None,
        512,
        of.get("keep", 1.0),
        of.get("spread", 0.0),
        of.get("softcap", 0.0),
    )  # fmt: skip


def both(kind, dtype):
    """[(sums, gradient) of the operators, and of the functions in Python]."""
    logits, wide, last = arguments(kind, dtype)
    results = []
    for reduce, gradient in ((reduce_, gradient_), (operators.reduce_, operators.gradient_)):
        sums = torch.tensor([[-torch.inf], [0.0], [0.0]], dtype=wide).repeat(1, len(logits))
        sums[:, 2] = torch.tensor([1.0, 2.0, 3.0])  # as after another chunk
        if KINDS[kind].get("entropy"):
            sums = torch.cat([sums, torch.zeros_like(sums[:1])])
            sums[3, 2] = -0.7
        reduce(sums, logits, *last)
        coefficients = torch.stack([sums[0], sums[1].log(), sums[0] * 0 + 2, sums[0] * 0 + 3])
        if KINDS[kind].get("entropy"):
            coefficients = torch.cat([coefficients, torch.full_like(coefficients[:1], -0.5)])
            coefficients[2:4, 3] = 0  # what counts for the entropy alone
        coefficients[2:, 4] = 0  # a token that is ignored
        changed = logits.clone()
        gradient(changed, coefficients, *last)
        results.append((sums, changed))
    return results


@every_kind
@every_dtype
def test_native_and_python(kind, dtype):
    (sums, changed), (expected, gradient) = both(kind, dtype)
    torch.testing.assert_close(sums, expected, rtol=1e-5, atol=1e-5, equal_nan=True)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(changed, gradient, rtol=4 * eps, atol=8e-6, equal_nan=True)
    assert torch.equal(changed[4], torch.zeros_like(changed[4]))
    assert len(sums) == 3 + KINDS[kind].get("entropy", False) and changed[3].any()


@every_kind
def test_opcheck(kind):
    logits, wide, last = arguments(kind, torch.float32)
    rows = 3 + KINDS[kind].get("entropy", False)
    sums = torch.zeros(rows, len(logits), dtype=wide)
    opcheck(reduce_, (sums, logits, *last))
    opcheck(gradient_, (logits, torch.ones(rows + 1, len(logits), dtype=wide), *last))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_exponentials_over_their_whole_range(dtype):
    """exp and tanh of the kernels, as they come out of a row of logits."""
    x = torch.cat([torch.linspace(-110, 0, 20001), -torch.logspace(-8, 2, 2001)]).to(dtype)
    coefficients = torch.zeros(4, 1, dtype=dtype)
    coefficients[2] = 1
    changed = x[None].clone()
    last = (torch.tensor([-1]), None, None, 0, 1.0, 0.0)
    gradient_(changed, coefficients, *last, 0.0)
    exact = x.double().exp()
    eps = torch.finfo(dtype).eps
    tiny = torch.finfo(dtype).tiny
    torch.testing.assert_close(changed[0].double(), exact, rtol=3 * eps, atol=2 * tiny)
    for cap in (0.5, 30.0):
        changed = x[None].clone()
        gradient_(changed, coefficients, *last, cap)
        tanh = (x.double() / cap).tanh()
        exact = (cap * tanh).exp() * (1 - tanh.square())
        torch.testing.assert_close(changed[0].double(), exact, rtol=40 * eps * cap, atol=4 * eps)


@pytest.mark.skipif(_native.module is None, reason="the native operators' checks")
def test_wrong_arguments():
    logits, wide, last = arguments("all", torch.float32)
    sums = torch.zeros(3, len(logits), dtype=wide)
    wrong = [
        (sums[:2], logits, *last),
        (torch.zeros(5, 7), logits, *last),
        (sums.double(), logits, *last),
        (sums, logits.t(), *last),
        (sums, logits.int(), *last),
        (sums, logits, torch.zeros(7, dtype=torch.long), *last[1:]),
        (sums, logits, None, last[1][:3], *last[2:]),
        (sums, logits, *last[:2], last[2][:3], *last[3:]),
        (sums, logits, torch.zeros(7, dtype=torch.int), None, *last[2:]),
    ]
    for case in wrong:
        with pytest.raises(ValueError, match="linear_cross_entropy: "):
            reduce_(*case)
    with pytest.raises(ValueError, match="coefficients must be a contiguous"):
        gradient_(logits, sums, *last)
