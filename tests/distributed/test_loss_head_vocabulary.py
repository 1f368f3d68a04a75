"""The loss head whose weight is sharded over the vocabulary, on gloo ranks, beside float64 cross
entropy of the whole weight."""

import functools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import errors_of_ranks, run_ranks, whole
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import memsave_ext as ms

TOKENS, FEATURES = 24, 12
EVERYTHING = {"return_lse": True, "return_predicted": True, "return_entropy": True}
# Of 4 ranks the third has 1 row and the last none, of 5 classes; of 2 ranks both have some.
CLASSES = [600, 601, 5, 2]
OPTIONS = {
    "plain": {},
    "bias": {"bias": True},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none", "ignore_index": 1},
    "cap": {"softcap": 2.0, "bias": True},
    "smoothed": {"label_smoothing": 0.2, "reduction": "sum"},
    "weighted": {"weight": True, "label_smoothing": 0.1},
    "low rank": {"low_rank": True, "bias": True, "softcap": 3.0},
    "all ignored": {"reduction": "none", "ignored": True},
}


def mesh():
    return init_device_mesh("cpu", (dist.get_world_size(),))


def problem(classes, dtype, *, bias=False, low_rank=False, weight=False, ignored=False, **options):
    """Leaves by name, the target and the options of a call; the same on all ranks."""
    generator = torch.Generator().manual_seed(classes)

    def normal(*shape):
        return torch.randn(shape, generator=generator).to(dtype)

    leaves = {"input": normal(TOKENS, FEATURES), "linear_weight": normal(classes, FEATURES)}
    if bias:
        leaves["linear_bias"] = normal(classes)
    if low_rank:
        leaves |= {"low": normal(TOKENS, 3), "b": normal(classes, 3)}
    size = -(-classes // dist.get_world_size())
    edges = torch.tensor([e for s in range(0, classes, size) for e in (s, s + size - 1)])
    target = torch.randint(classes, (TOKENS,), generator=generator)
    target[: len(edges)] = edges.clamp(max=classes - 1)
    target[-3:] = options.get("ignore_index", -100)
    if ignored:
        target[:] = -100
    if weight:
        options["weight"] = torch.rand(classes, generator=generator).to(dtype)
    return leaves, target, options


def exact(leaves, target, options):
    """All that a call returns, and gradients, in float64 with whole logits."""
    options = dict(options)
    leaves = {name: t.double().requires_grad_() for name, t in leaves.items()}
    logits = F.linear(leaves["input"], leaves["linear_weight"], leaves.get("linear_bias"))
    if "low" in leaves:
        logits = logits + leaves["low"] @ leaves["b"].t()
    if (softcap := options.pop("softcap", None)) is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if "weight" in options:
        options["weight"] = options["weight"].double()
    log_p = logits.log_softmax(1)
    entropy = -(log_p.exp() * log_p).sum(1)
    loss = F.cross_entropy(logits, target, **options)
    return differentiated(leaves, loss, logits.logsumexp(1), logits.argmax(1), entropy)


def differentiated(leaves, loss, lse, predicted, entropy):
    parts = loss.double(), lse.double().square(), entropy.double()
    total = sum((t * torch.linspace(1, 2, t.numel()).view(t.shape)).sum() for t in parts)
    grads = torch.autograd.grad(total, list(leaves.values()))
    return [loss, lse, predicted, entropy, *grads]


def sharded(leaves, target, options, place=Replicate):
    mesh_, options = mesh(), dict(options)
    placed = {}
    for name, tensor in leaves.items():
        if name not in ("input", "low"):
            tensor = distribute_tensor(tensor, mesh_, [Shard(0)])
        elif place is not Replicate:
            tensor = distribute_tensor(tensor, mesh_, [place])
        placed[name] = tensor.detach().requires_grad_()
    if "low" in placed:
        options["low_rank"] = placed["low"], placed["b"]
    if "linear_bias" in placed:
        options["linear_bias"] = placed["linear_bias"]
    found = ms.linear_cross_entropy(
        placed["input"], placed["linear_weight"], target, **options, **EVERYTHING
    )
    return whole(differentiated(placed, *found))


def errors(dtype, options, classes, place=Replicate):
    """The largest error of each value beside float64, as a part of its largest element; and of the
    predicted classes how many differ."""
    leaves, target, options = problem(classes, dtype, **options)
    right = exact(leaves, target, options)
    found = sharded(leaves, target, options | {"chunk_size": 256}, place)
    assert [f.shape for f in found] == [r.shape for r in right]
    wrong = int((found.pop(2) != right.pop(2)).sum())
    scale = [max(float(r.detach().nan_to_num().abs().max()), 1e-3) for r in right]
    differences = [f.double() - r.detach() for f, r in zip(found, right, strict=True)]
    return wrong, [float(d.abs().max()) / s for d, s in zip(differences, scale, strict=True)]


def log_probs_of_sequences():
    """Hidden states (batch, tokens, features) whose tokens are sharded, with a temperature."""
    mesh_ = mesh()
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 8, FEATURES, dtype=torch.float64, generator=generator)
    w = torch.randn(21, FEATURES, dtype=torch.float64, generator=generator)
    t = torch.randint(21, (2, 8), generator=generator)
    results = []
    for place in (Shard(1), Replicate()):
        hidden = distribute_tensor(x, mesh_, [place]).requires_grad_()
        weight = distribute_tensor(w, mesh_, [Shard(0)]).requires_grad_()
        target = distribute_tensor(t, mesh_, [place])
        found = ms.linear_log_probs(hidden, weight, target, temperature=0.7)
        grads = torch.autograd.grad(found.sum(), (hidden, weight))
        assert grads[0].placements == (place,) and grads[1].placements == (Shard(0),)
        results.append([found, *(g.full_tensor() for g in grads)])
    x, w = x.requires_grad_(), w.requires_grad_()
    right = ((x @ w.t()) / 0.7).log_softmax(-1).gather(-1, t[..., None])[..., 0]
    torch.testing.assert_close(results[0], [right, *torch.autograd.grad(right.sum(), (x, w))])
    torch.testing.assert_close(results[0], results[1])
    return True


def collectives():
    """{operator: how often} of forward and of backward, and the bytes of all that was sent."""
    leaves, target, _ = problem(600, torch.float32)
    x = leaves["input"].requires_grad_()
    w = distribute_tensor(leaves["linear_weight"], mesh(), [Shard(0)]).requires_grad_()
    counts = []
    with CommDebugMode() as mode:
        loss = ms.linear_cross_entropy(x, w, target)
    counts.append({str(op): n for op, n in mode.get_comm_counts().items() if n})
    with CommDebugMode() as mode:
        loss.backward()
    counts.append({str(op): n for op, n in mode.get_comm_counts().items() if n})
    return counts


def peaks():
    """What a step takes above what was there, and the logits of all classes, in bytes."""
    tokens, classes, features = 512, 16384, 32
    x = torch.randn(tokens, features).requires_grad_()
    w = distribute_tensor(torch.randn(classes, features), mesh(), [Shard(0)]).requires_grad_()
    target = torch.randint(classes, (tokens,), generator=torch.Generator().manual_seed(0))
    with ms.memory.track() as track:
        before = track.live
        ms.linear_cross_entropy(x, w, target).backward()
    return track.peak - before, 4 * tokens * classes, w.to_local().nbytes


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)
        self.head = nn.Linear(16, 37, bias=False)

    def forward(self, x, target):
        y = x + self.down(F.gelu(self.up(self.norm(x))))
        return ms.linear_cross_entropy(y.flatten(0, 1), self.head.weight, target.flatten())


def trained(parallel):
    model, losses = Model(), []
    if parallel:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel(), "head": ColwiseParallel()}
        parallelize_module(model, mesh(), plan)
    optimizer = ms.AdamW(model.parameters(), lr=1e-2, in_backward=True)
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        x, target = (
            torch.randn(2, 6, 16, generator=generator),
            torch.randint(37, (2, 6), generator=generator),
        )
        loss = model(x, target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses, whole(model.parameters())


def train_both():
    torch.testing.assert_close(trained(True), trained(False), rtol=1e-4, atol=1e-5)
    return True


def refusals():
    """What wrong use says."""
    mesh_ = mesh()
    leaves, target, _ = problem(600, torch.float32, bias=True, low_rank=True)
    w = distribute_tensor(leaves["linear_weight"], mesh_, [Shard(0)]).requires_grad_()
    rank = dist.get_rank()
    two = init_device_mesh("cpu", (2, dist.get_world_size() // 2))
    of_two = distribute_tensor(leaves["linear_weight"], two, [Shard(0), Replicate()])
    given = {"input": leaves["input"], "linear_weight": w, "target": target}
    probabilities = torch.full((TOKENS, 600), 1 / 600)
    low = leaves["low"]
    said = {}
    for name, change in {
        "linear_bias": {"linear_bias": leaves["linear_bias"]},
        "low_rank[1]": {"low_rank": (low, leaves["b"])},
        "probabilities": {"target": probabilities},
        "mesh": {"linear_weight": of_two},
        "another mesh": {"input": distribute_tensor(leaves["input"], two, [Replicate()] * 2)},
        "dtypes": {"input": leaves["input"].double()},
        "reduction": {"reduction": "max"},
        "targets": {"target": (target + rank).clamp(0, 599)},
        "out of bounds": {"target": target + 600},
        "columns": {"linear_weight": distribute_tensor(leaves["linear_weight"], mesh_, [Shard(1)])},
        "plain weight": {
            "linear_weight": leaves["linear_weight"],
            "input": distribute_tensor(leaves["input"], mesh_, [Replicate()]),
        },
    }.items():
        try:
            ms.linear_cross_entropy(**{**given, **change})
        except (ValueError, IndexError) as error:
            said[name] = str(error)
    try:
        ms.linear_kl(leaves["input"], w, leaves["input"], leaves["linear_weight"])
    except ValueError as error:
        said["kl"] = str(error)
    x = leaves["input"].requires_grad_()
    loss = ms.linear_cross_entropy(x, w, target)
    try:
        torch.autograd.grad(loss, x, create_graph=True)
    except RuntimeError as error:
        said["create_graph"] = str(error)
    return said


def another_number_of_tokens():
    leaves, target, _ = problem(600, torch.float32)
    w = distribute_tensor(leaves["linear_weight"], mesh(), [Shard(0)])
    tokens = TOKENS - 5 * dist.get_rank()
    ms.linear_cross_entropy(leaves["input"][:tokens], w, target[:tokens])


CASES = {
    f"{dtype} {classes} {name}": functools.partial(
        errors, getattr(torch, dtype), OPTIONS[name], classes
    )
    for dtype in ("float64", "float32", "bfloat16")
    for classes in CLASSES
    for name in OPTIONS
    if dtype == "float64" or (classes == 601 and name in ("cap", "low rank", "weighted"))
} | {"sequence": functools.partial(errors, torch.float64, {"low_rank": True}, 601, Shard(0))}
OTHERS = [log_probs_of_sequences, collectives, peaks, refusals, train_both]
TOLERANCES = {"float64": 1e-10, "float32": 2e-5, "bfloat16": 0.03, "sequence": 1e-10}


@pytest.fixture(scope="module", params=[2, 4])
def results(request):
    return run_ranks(request.param, CASES | {f.__name__: f for f in OTHERS})


def test_values_and_gradients_of_the_whole_model(results):
    for name in CASES:
        for rank in results[name]:
            assert isinstance(rank, tuple), rank
            wrong, found = rank
            assert wrong <= (2 if "bfloat16" in name else 0), name
            assert max(found) <= TOLERANCES[name.split()[0]], (name, found)


def test_hidden_states_whose_sequence_is_sharded(results):
    assert results["log_probs_of_sequences"] == [True] * len(results["log_probs_of_sequences"])


def test_small_collectives_and_no_gather(results):
    """One of four numbers and two of some for each token; and that of the gradient."""
    for forward, backward in results["collectives"]:
        assert len(forward) == 1 and list(forward.values()) == [3] and "allreduce" in str(forward)
        assert len(backward) == 1 and list(backward.values()) == [1] and "all" in str(backward)


def test_no_tensor_of_tokens_and_classes(results):
    for peak, logits, shard in results["peaks"]:
        assert peak < logits // 8 + 2 * shard


def test_a_parallelized_model_trains_as_one_process_does(results):
    for rank in results["train_both"]:
        assert rank is True, rank


def test_wrong_use_has_a_sentence(results):
    texts = {
        "linear_bias": "linear_bias must be a DTensor that is sharded as linear_weight",
        "low_rank[1]": r"low_rank[1] must be a DTensor that is sharded as linear_weight",
        "probabilities": "target must have class indices",
        "mesh": "on a mesh of one dimension",
        "another mesh": "input must be a plain tensor or a DTensor on linear_weight's",
        "dtypes": "of one dtype",
        "reduction": "reduction 'max'",
        "targets": "which must all have the same tokens",
        "out of bounds": "is out of bounds",
        "columns": "linear_weight must be a plain tensor, got a DTensor with (Shard(dim=1),)",
        "plain weight": "input must be a plain tensor, got a DTensor",
        "kl": "linear_weight must be a plain tensor, got a DTensor",
        "create_graph": "no double backward",
    }
    for rank in results["refusals"]:
        assert isinstance(rank, dict), rank
        assert rank.keys() == texts.keys()
        for name, text in texts.items():
            assert text in rank[name], name


def test_another_number_of_tokens_does_not_hang():
    for message in errors_of_ranks(2, another_number_of_tokens, timeout=40):
        assert message is not None
        assert "which must all have the same tokens" in message, message
