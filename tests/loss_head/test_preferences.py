"""The recipes of docs/linear_cross_entropy.md, DPO and ORPO over two models, and distillation,
beside logits in float64; without a tensor of tokens and classes."""

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import memsave_ext as ms

PAGE = Path(__file__).resolve().parents[2] / "docs" / "linear_cross_entropy.md"
BATCH, TOKENS, WIDTH, CLASSES = 3, 12, 16, 900


@pytest.fixture(scope="module")
def recipes():
    """The functions of the page, by name."""
    if not PAGE.is_file():
        pytest.skip("no docs")
    text = PAGE.read_text("utf-8")
    (block,) = [b for b in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "def dpo" in b]
    found = {"ms": ms, "torch": torch}
    exec(block[: block.index("reference_body")], found)
    return found


def models(dtype=torch.float64):
    """The head and the reference's, and of each the hidden states of two answers."""
    torch.manual_seed(0)
    heads = [nn.Linear(WIDTH, CLASSES, bias=bias, dtype=dtype) for bias in (True, False)]
    hidden = torch.randn(2, 2, BATCH, TOKENS, WIDTH, dtype=dtype)  # (model, answer, ...)
    labels = torch.randint(CLASSES, (2, BATCH, TOKENS))
    for at, prompt in enumerate((3, 5, 2)):
        labels[:, at, :prompt] = -100
    labels[1, 0, 9:] = -100  # answers of different lengths
    return heads, hidden.requires_grad_(), labels


def by_logits(head, hidden, labels):
    """The log-probabilities of tokens (batch, tokens), 0 where labels do not count."""
    labels = labels[:, 1:]
    all_of_them = head(hidden[:, :-1]).log_softmax(-1)
    chosen = all_of_them.gather(2, labels.clamp(min=0)[..., None])[..., 0]
    return chosen * (labels != -100), labels != -100


def both(of, heads, hidden, labels):
    policy = [of(hidden[0, answer], heads[0], labels[answer]) for answer in (0, 1)]
    with torch.no_grad():
        reference = [of(hidden[1, answer], heads[1], labels[answer]) for answer in (0, 1)]
    return policy, reference


def gradients(loss, heads, hidden):
    return torch.autograd.grad(loss, [hidden, *heads[0].parameters()])


def test_dpo(recipes):
    heads, hidden, labels = models()
    policy, reference = both(recipes["of_answers"], heads, hidden, labels)
    sums = [[tokens.sum(1) for tokens, _ in pair] for pair in (policy, reference)]
    loss = recipes["dpo_loss"](*sums, beta=0.3)

    def logits(hidden, head, labels):
        return by_logits(head, hidden, labels)[0].sum(1)

    (chosen, rejected), (of_chosen, of_rejected) = both(logits, heads, hidden, labels)
    expected = -torch.sigmoid(0.3 * ((chosen - of_chosen) - (rejected - of_rejected))).log().mean()
    torch.testing.assert_close(loss, expected, rtol=1e-10, atol=0)
    torch.testing.assert_close(
        gradients(loss, heads, hidden), gradients(expected, heads, hidden), rtol=1e-9, atol=1e-12
    )


def test_orpo(recipes):
    heads, hidden, labels = models()
    (chosen, rejected), _ = both(recipes["of_answers"], heads, hidden, labels)
    loss = recipes["orpo_loss"](chosen[0], rejected[0], chosen[1], rejected[1], beta=0.3)

    means = []
    for answer in (0, 1):
        tokens, counted = by_logits(heads[0], hidden[0, answer], labels[answer])
        means.append((tokens.sum(1) / counted.sum(1)).exp())
    odds = [p / (1 - p) for p in means]
    logits = heads[0](hidden[0, 0, :, :-1]).flatten(0, 1)
    expected = F.cross_entropy(logits, labels[0, :, 1:].flatten())
    expected = expected - 0.3 * torch.sigmoid((odds[0] / odds[1]).log()).log().mean()
    torch.testing.assert_close(loss, expected, rtol=1e-10, atol=0)
    torch.testing.assert_close(
        gradients(loss, heads, hidden), gradients(expected, heads, hidden), rtol=1e-9, atol=1e-12
    )


def test_one_batch_of_both_answers_steps_the_rows(recipes):
    """One use of the head; the gradient of its weight is never made."""
    heads, hidden, labels = models(torch.float32)
    results = []
    for stepped in (False, True):
        head = nn.Linear(WIDTH, CLASSES)
        head.load_state_dict(heads[0].state_dict())
        optimizer = ms.AdamW(head.parameters(), lr=0.1, in_backward=stepped)
        flat, targets = hidden[0].detach().flatten(0, 1), labels.flatten(0, 1)
        tokens, _ = recipes["of_answers"](flat, head, targets)
        chosen, rejected = tokens.sum(1).split(BATCH)
        recipes["dpo_loss"]((chosen, rejected), (0.0, 0.0)).backward()
        assert (head.weight.grad is None) == stepped
        optimizer.step()
        results.append(head.weight.detach())
    assert torch.equal(*results)


def test_memory_of_two_models(recipes):
    tokens, classes = 256, 16384
    heads = [nn.Linear(32, classes, bias=False) for _ in range(2)]
    hidden = torch.randn(2, 2, 1, tokens, 32)
    labels = torch.randint(classes, (2, 1, tokens))

    def peak(of):
        with ms.memory.track() as track:
            policy, reference = both(of, heads, hidden, labels)
            sums = [[t.sum(1) for t, _ in pair] for pair in (policy, reference)]
            recipes["dpo_loss"](*sums).backward()
        for head in heads:
            head.weight.grad = None
        return track.peak

    logits = 4 * tokens * classes  # of one answer
    assert peak(lambda hidden, head, labels: by_logits(head, hidden, labels)) > 3 * logits
    assert peak(recipes["of_answers"]) < logits / 2
