"""linear_log_probs, and the log-sum-exp, predicted classes and entropies that calls can return,
beside torch's operators in float64."""

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_equal
from losses import in_dtype, problem

import memsave_ext as ms

EVERYTHING = {"return_lse": True, "return_predicted": True, "return_entropy": True}
WIDE = {torch.float64: torch.float64}  # of results; float32 of all others


def by_torch(x, w, t, b=None, *, ignore_index=-100, softcap=None, temperature=1.0):
    logits = F.linear(x, w, b)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits.to(WIDE.get(x.dtype, torch.float32)) / temperature
    counted = t != ignore_index
    chosen = logits.log_softmax(-1).gather(-1, torch.where(counted, t, 0)[..., None])[..., 0]
    return (
        torch.where(counted, chosen, 0.0),
        logits.logsumexp(-1),
        logits.argmax(-1),
        entropy(logits),
    )


def entropy(logits):
    log_p = logits.log_softmax(-1)
    return -(log_p.exp() * log_p.masked_fill(log_p == -torch.inf, 0.0)).sum(-1)


def case(dtype, bias):
    x, w, t = problem(24, 16, 700)
    x = x.detach().unflatten(0, (3, 8))
    t = t.unflatten(0, (3, 8)).clone()
    t[0, :3] = -100
    b = torch.randn(700, generator=torch.Generator().manual_seed(4)) if bias else None
    return [
        None if v is None else v.detach().to(dtype).double().requires_grad_() for v in (x, w, b)
    ], t


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize(
    "options", [{}, {"softcap": 3.0}, {"temperature": 0.7}, {"softcap": 3.0, "temperature": 4.0}],
    ids=str,
)  # fmt: skip
def test_values_and_gradients(dtype, bias, options):
    exact, t = case(dtype, bias)
    grads = torch.randn(3, 3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(5))

    def run(of, tensors):
        x, w, b = tensors
        log_probs, lse, predicted, entropies = of(x, w, t, b, **options)
        values = torch.stack([log_probs, lse, entropies])
        wanted = [tensor for tensor in tensors if tensor is not None]
        of_values = torch.autograd.grad((values * grads).sum(), wanted)
        return log_probs, lse, predicted, entropies, *of_values

    def ours(*args, **more):
        return ms.linear_log_probs(
            *args,
            chunk_size=256,
            return_lse=True,
            return_predicted=True,
            return_entropy=True,
            **more,
        )

    right = run(by_torch, exact)
    torchs = run(by_torch, in_dtype(exact, dtype))
    found = run(ours, in_dtype(exact, dtype))
    assert {found[at].dtype for at in (0, 1, 3)} == {WIDE.get(dtype, torch.float32)}
    assert found[2].dtype == torch.int64 and found[0].shape == found[2].shape == t.shape
    assert_equal([found[0][0, :3]], [torch.zeros(3, dtype=found[0].dtype)])
    narrow = torch.finfo(dtype).bits == 16
    agree = (found[2] == right[2]).float().mean()
    assert agree >= 0.9 if narrow else agree == 1  # rounded logits may tie
    for at, (value, other) in enumerate(zip(found, right, strict=True)):
        if at == 2:
            continue
        assert value.shape == other.shape
        if narrow:
            error = (value.double() - other).norm()
            scale = 8 * torch.finfo(dtype).eps * other.norm()
            assert error <= 2 * (torchs[at].double() - other).norm() + scale
        else:
            rtol = 1e-4 if dtype == torch.float32 else 1e-10
            torch.testing.assert_close(value.double(), other, rtol=rtol, atol=rtol)


def test_alone_it_is_one_tensor():
    (x, w, _), t = case(torch.float32, False)
    alone = ms.linear_log_probs(x, w, t)
    pair = ms.linear_log_probs(x, w, t, return_lse=True)
    assert isinstance(alone, torch.Tensor) and len(pair) == 2
    assert_equal([alone], [pair[0]])


def test_one_token_and_none():
    (x, w, _), t = case(torch.float64, False)
    found = ms.linear_log_probs(x[1, 0], w, t[1, 0], **EVERYTHING)
    torch.testing.assert_close(found, by_torch(x[1, 0], w, t[1, 0]))
    empty = ms.linear_log_probs(x[:0], w, t[:0], **EVERYTHING)
    assert [value.shape for value in empty] == [(0, 8)] * 4
    (of_w,) = torch.autograd.grad(empty[3].sum(), w)
    assert not of_w.any()
    ignored = torch.full_like(t, -100)
    (of_x, of_w) = torch.autograd.grad(ms.linear_log_probs(x, w, ignored).sum(), (x, w))
    assert not of_x.any() and not of_w.any()


def test_gradcheck_also_twice():
    x, w, t = problem(3, 4, 300, torch.float64)

    t[0] = -100

    def found(x, w):
        more = {"return_lse": True, "return_entropy": True}
        return ms.linear_log_probs(x, w, t, softcap=5.0, temperature=2.0, **more)

    assert torch.autograd.gradcheck(found, (x, w), fast_mode=True)
    assert torch.autograd.gradgradcheck(found, (x, w), fast_mode=True)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("probabilities", [False, True], ids=["indices", "probabilities"])
def test_what_linear_cross_entropy_returns_besides(reduction, probabilities):
    x, w, t = problem(17, 12, 600, torch.float64, probabilities=probabilities)
    logits = x @ w.t()
    expected = F.cross_entropy(logits, t, reduction=reduction)
    loss, lse, predicted, entropies = ms.linear_cross_entropy(
        x, w, t, reduction=reduction, chunk_size=256, **EVERYTHING
    )
    right = expected, logits.logsumexp(1), entropy(logits)
    torch.testing.assert_close((loss, lse, entropies), right)
    assert_equal([predicted], [logits.argmax(1)])
    losses = [(a.sum() + 0.1 * b.square().mean() - c.square().sum()) for a, b, c in
              ((loss, lse, entropies), right)]  # fmt: skip
    torch.testing.assert_close(*[torch.autograd.grad(z, (x, w)) for z in losses])


def test_only_the_lse_is_used():
    x, w, t = problem(17, 12, 600, torch.float64)
    lse = ms.linear_log_probs(x, w, t, return_lse=True)[1]
    expected = torch.autograd.grad((x @ w.t()).logsumexp(1).sum(), (x, w))
    torch.testing.assert_close(torch.autograd.grad(lse.sum(), (x, w)), expected)


@pytest.mark.parametrize("ignored", [False, True], ids=["", "ignored"])
def test_only_the_entropy_is_used(ignored):
    """It does not depend on targets."""
    x, w, t = problem(17, 12, 600, torch.float64)
    if ignored:
        t = torch.full_like(t, -100)
    _, found = ms.linear_log_probs(x, w, t, return_entropy=True, chunk_size=256)
    expected = entropy(x @ w.t())
    torch.testing.assert_close(found, expected)
    of = torch.linspace(-1, 1, 17, dtype=torch.float64)
    torch.testing.assert_close(*[torch.autograd.grad(e, (x, w), of) for e in (found, expected)])


def test_an_entropy_that_is_not_used_changes_no_bit():
    for dtype in (torch.float32, torch.bfloat16):
        x, w, t = problem(17, 12, 600, dtype)
        alone = ms.linear_log_probs(x, w, t)
        besides, _ = ms.linear_log_probs(x, w, t, return_entropy=True)
        assert_equal([alone], [besides])
        assert_equal(*[torch.autograd.grad(v.sum(), (x, w)) for v in (alone, besides)])


@pytest.mark.parametrize("masked", [False, True], ids=["", "masked"])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0, 1e3, 1e6])
def test_entropies_of_logits_of_every_size(scale, masked):
    """Also of distributions that are all of one class, and where a bias leaves classes out."""
    x, w, t = problem(40, 12, 700, torch.float64)
    x, w = ((v.detach() * s).float().double().requires_grad_() for v, s in ((x, scale), (w, 1)))
    b = torch.zeros(700, dtype=torch.float64)
    if masked:
        b[100:650] = -torch.inf  # one whole chunk, and parts of two
        t = t % 100

    def run(of, tensors):
        found = of(*tensors, b.to(tensors[0].dtype))
        return found, *torch.autograd.grad(found.sum(), tensors)

    def ours(x, w, b):
        return ms.linear_log_probs(x, w, t, b, chunk_size=256, return_entropy=True)[1]

    def torchs(x, w, b):
        return entropy(torch.nn.functional.linear(x, w, b))

    exact = run(torchs, (x, w))
    found = run(ours, in_dtype((x, w), torch.float32))
    plain = run(torchs, in_dtype((x, w), torch.float32))
    assert (found[0] >= 0).all()
    for value, other, by in zip(found, plain, exact, strict=True):
        assert value.isfinite().all()
        error, theirs = (value - by).abs().max(), (other - by).abs().max()
        assert error <= 2 * theirs + 16 * torch.finfo(torch.float32).eps * by.abs().max()


def test_entropies_of_one_class_and_of_few():
    x, w, _ = problem(5, 4, 3)
    for classes in (1, 3):
        t = torch.zeros(5, dtype=torch.int64)
        found = ms.linear_log_probs(x, w[:classes], t, return_entropy=True)[1]
        expected = entropy(x @ w[:classes].t())
        torch.testing.assert_close(found, expected)
        of = [torch.autograd.grad(e.sum(), x, retain_graph=True)[0] for e in (found, expected)]
        torch.testing.assert_close(*of)
    equal = ms.linear_log_probs(x, w.new_zeros(700, 4), t, return_entropy=True)[1]
    torch.testing.assert_close(equal, torch.full_like(equal, 700).log())


def test_entropies_that_are_not_numbers():
    """NaN where the softmax is: of a logit that is infinite or NaN, and where all are left out."""
    x, w, t = torch.eye(4), torch.ones(600, 4), torch.zeros(4, dtype=torch.int64)
    biases = torch.zeros(3, 600)
    biases[0, 300], biases[1, 300], biases[2] = torch.inf, torch.nan, -torch.inf
    for b in biases:
        found = ms.linear_log_probs(x, w, t, b, return_entropy=True, chunk_size=256)[1]
        assert found.isnan().all()


def test_the_first_of_equal_logits_is_predicted():
    x, w = torch.ones(2, 4), torch.zeros(900, 4)
    w[[300, 299, 800]] = 1.0  # in two chunks of 256
    t = torch.zeros(2, dtype=torch.long)
    found = ms.linear_log_probs(x, w, t, chunk_size=256, return_predicted=True)
    assert found[1].tolist() == [299, 299]


def test_other_tensors_are_left_to_torch():
    """Those of several dimensions, and subclasses."""
    x, w, t = problem(4, 8, 30, torch.float64)
    w3 = w.detach().reshape(5, 6, 8)
    loss, lse, entropies = ms.linear_cross_entropy(
        x, w3, torch.randint(5, (4, 6)), return_lse=True, return_entropy=True, reduction="none"
    )
    logits = (x @ w.t()).reshape(4, 5, 6)
    assert loss.shape == lse.shape
    torch.testing.assert_close((lse, entropies), (logits.logsumexp(1), entropy(logits.mT)))

    class Subclass(torch.Tensor):
        pass

    found = ms.linear_log_probs(x.detach().as_subclass(Subclass), w, t)
    torch.testing.assert_close(found.as_subclass(torch.Tensor), by_torch(x, w, t)[0])


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"target": torch.zeros(3, dtype=torch.long)}, ValueError, r"must have shapes.*\(4, 8\)"),
        ({"temperature": 0.0}, ValueError, "temperature must be a positive number, got 0.0"),
        ({"temperature": -1.0}, ValueError, "temperature must be"),
        ({"temperature": float("nan")}, ValueError, "temperature must be"),
        ({"softcap": -2.0, "temperature": 2.0}, ValueError, "softcap must be .* got -2.0"),
        ({"softcap": "3"}, ValueError, "softcap must be a positive number or None, got '3'"),
        ({"return_entropy": 1.5}, TypeError, "return_entropy must be True or False, got 1.5"),
        ({"chunk_size": 100}, ValueError, "chunk_size must be a positive multiple of 256"),
        ({"linear_weight": torch.nn.Linear(8, 30)}, TypeError, "linear_weight must be a tensor"),
        ({"target": torch.full((4,), 30)}, IndexError, "Target 30 is out of bounds"),
    ],
    ids=str,
)
def test_wrong_arguments(change, error, text):
    x, w, t = problem(4, 8, 30)
    with pytest.raises(error, match=text):
        ms.linear_log_probs(**{"input": x, "linear_weight": w, "target": t, **change})


def test_autocast_and_compile():
    (x, w, _), t = case(torch.float32, False)
    x, w = x.float(), w.float()
    with torch.autocast("cpu", torch.bfloat16):
        found, lse = ms.linear_log_probs(x, w, t, return_lse=True)
    assert found.dtype == lse.dtype == torch.float32
    torch.testing.assert_close(found, by_torch(x, w, t)[0], rtol=0.02, atol=0.05)

    @torch.compile(backend="eager")
    def compiled(x, w):
        return ms.linear_log_probs(x, w, t, return_lse=True)[0] * 2

    torch.testing.assert_close(compiled(x, w), 2 * by_torch(x, w, t)[0])


def test_no_tensor_of_tokens_and_classes():
    tokens, classes, features = 512, 8192, 64
    x, w, t = problem(tokens, features, classes)
    logits = 4 * tokens * classes

    def peak(of):
        with ms.memory.track() as t:
            of().square().mean().backward()
        return t.peak

    plain = peak(lambda: by_torch(x, w, t)[0])
    x.grad = w.grad = None

    def ours():
        log_probs, *_, entropies = ms.linear_log_probs(x, w, t, **EVERYTHING)
        return log_probs + entropies

    found = peak(ours)
    assert plain > 2 * logits
    assert found < logits // 4 + 3 * w.nbytes
