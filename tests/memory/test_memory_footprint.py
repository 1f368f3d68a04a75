"""What footprint() says against what is there: after real steps, and in them."""

import io
import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.optim.optimizer import register_optimizer_step_pre_hook

import memsave_ext as ms
from memsave_ext import _native
from memsave_ext.memory import table
from memsave_ext.memory.prediction.holdings import KINDS, Amount, Inventory

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64

# helpers


def make_model(dtype=FP32, device="cpu"):
    """Blocks of 8-bit states that are whole and not, too few elements for them, another order of
    memory, gaps, a scalar, buffers, something frozen and a module without anything."""
    model = nn.Sequential(
        nn.Linear(70, 75, device=device),
        nn.ReLU(),
        nn.BatchNorm1d(7, device=device),
        nn.Conv2d(16, 32, 3, device=device).to(memory_format=torch.channels_last),
        nn.ModuleDict({"inner": nn.Linear(3, 5, device=device)}),
    )
    model.gaps = nn.Parameter(torch.randn(80, 120, device=device)[:, :60])
    model.scale = nn.Parameter(torch.ones((), device=device))
    model[4]["inner"].bias.requires_grad_(False)
    return model.to(dtype)


def backward(params):
    sum((param * torch.ones_like(param)).sum().double() for param in params).backward()


def train(model, optimizer, steps=2):
    for _ in range(steps):
        backward([p for p in model.parameters() if p.requires_grad])
        optimizer.step()
        optimizer.zero_grad()


def now(model, optimizer=None):
    return Inventory.of(model).holding(optimizer)  # footprint().now, without its predictions


def nbytes(tensors):
    return sum(t.numel() * t.element_size() for t in tensors)


def peak_of(work):
    with ms.memory.track() as t:
        work()
    return t.peak


def check_sums(holding):
    """Modules and dtypes are two views of the same."""
    for kind in KINDS:
        of_modules = sum((row.get(kind, Amount()) for row in holding.by_module.values()), Amount())
        assert of_modules == sum(holding.by_dtype[kind].values(), Amount())
        assert getattr(holding, kind) == of_modules
        whole = holding.at_depth(0).get("", {}).get(kind, Amount())
        assert whole == of_modules
    assert holding.bytes == sum(getattr(holding, kind).bytes for kind in KINDS)


TORCH_OPTIMIZERS = {
    "SGD": (torch.optim.SGD, {}),
    "SGD, momentum": (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.1, "nesterov": True}),
    "Adam": (torch.optim.Adam, {"weight_decay": 0.1}),
    "Adam, amsgrad": (torch.optim.Adam, {"amsgrad": True, "maximize": True}),
    "AdamW": (torch.optim.AdamW, {}),
    "Adagrad": (torch.optim.Adagrad, {}),
    "Adadelta": (torch.optim.Adadelta, {}),
    "Adamax": (torch.optim.Adamax, {}),
    "NAdam": (torch.optim.NAdam, {}),
    "RAdam": (torch.optim.RAdam, {}),
    "RMSprop": (torch.optim.RMSprop, {}),
    "RMSprop, centered": (torch.optim.RMSprop, {"centered": True, "momentum": 0.9}),
    "Rprop": (torch.optim.Rprop, {}),
    "ASGD": (torch.optim.ASGD, {}),
    "Adafactor": (torch.optim.Adafactor, {}),
}
WAYS = {"for-loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
HAVE_FUSED = ("SGD", "Adam", "AdamW", "Adagrad")
CASES = [
    (name, way)
    for name in TORCH_OPTIMIZERS
    for way in WAYS
    if way != "fused" or name.split(",")[0] in HAVE_FUSED
]
OUR_MODES = [
    (bf16, state_dtype)
    for bf16 in (None, "stochastic", "kahan", "split")
    for state_dtype in (None, BF16, "8bit")
]


def name_of(bf16, state_dtype):
    parts = ["in backward"]
    parts += [f"bf16={bf16}"] if bf16 else []
    parts += [f"state_dtype={str(state_dtype).removeprefix('torch.')}"] if state_dtype else []
    return ", ".join(parts)


# predictions


@pytest.mark.parametrize(("name", "way"), CASES)
def test_torch_optimizers(name, way):
    """State, gradients, and the temporaries of a step, to the byte."""
    kind, options = TORCH_OPTIMIZERS[name]
    model = make_model()
    optimizer = kind(model.parameters(), lr=0.01, **options, **WAYS[way])
    before = ms.memory.footprint(model, optimizer)
    assert before.mode == way
    expected = before.expected
    for holding in (expected.between, expected.at_peak):
        check_sums(holding)
    train(model, optimizer)
    assert now(model, optimizer) == expected.between
    trained = [p for p in model.parameters() if p.requires_grad]
    backward(trained)
    assert now(model, optimizer) == expected.at_peak
    assert expected.at_peak.gradients.bytes == nbytes(trained)
    measured = peak_of(optimizer.step)
    unseen = 64  # scalars on the CPU
    if way == "fused":
        unseen += model[3].weight.nbytes  # its kernels copy what is in another order of memory
    assert expected.temporaries <= measured <= expected.temporaries + unseen
    assert expected.peak == expected.at_peak.bytes + expected.temporaries


@pytest.fixture(scope="module")
def of_float32():
    return ms.memory.footprint(make_model()).predicted


@pytest.mark.parametrize("in_backward", [False, True], ids=["after", "in backward"])
@pytest.mark.parametrize(("bf16", "state_dtype"), OUR_MODES)
def test_our_modes(bf16, state_dtype, in_backward, of_float32):
    """As predicted before the model was made bfloat16, and for it."""
    mode = name_of(bf16, state_dtype)
    before = of_float32[mode].between
    model = make_model(BF16 if bf16 else FP32)
    modes = {"bf16": bf16, "state_dtype": state_dtype, "in_backward": in_backward}
    optimizer = ms.AdamW(model.parameters(), **modes)
    footprint = ms.memory.footprint(model, optimizer)
    assert footprint.mode == ("in backward" if in_backward else "after backward")
    assert footprint.expected.between == footprint.predicted[mode].between
    train(model, optimizer)
    assert now(model, optimizer) == footprint.expected.between
    # Gaps are there until the model is converted.
    before_gaps = before.parameters.bytes - (0 if bf16 else 80 * 60 * 4)
    assert before_gaps == nbytes(model.parameters())
    assert before.optimizer == footprint.expected.between.optimizer
    assert before.buffers == footprint.expected.between.buffers


def test_bytes_of_each_parameter_by_hand():
    """What docs/choosing.md says, of one parameter of 2**20 elements."""
    n = 1 << 20
    model = nn.Linear(1024, 1024, bias=False, device="meta")
    predicted = ms.memory.footprint(model).predicted
    scales = 2 * 4 * n // 256
    between = {
        "fused": 12 * n,
        "in backward": 12 * n,
        "in backward, state_dtype=bfloat16": 8 * n,
        "in backward, state_dtype=8bit": 6 * n + scales,
        "in backward, bf16=stochastic": 10 * n,
        "in backward, bf16=kahan": 12 * n,
        "in backward, bf16=split, state_dtype=bfloat16": 8 * n,
        "in backward, bf16=stochastic, state_dtype=8bit": 4 * n + scales,
    }
    step = 4
    for mode, expected in between.items():
        assert predicted[mode].between.bytes == expected + step
    assert predicted["fused"].peak == 16 * n + step
    assert predicted["foreach"].peak == 20 * n + step
    assert predicted["for-loop"].peak == 24 * n + step  # two roots of one parameter
    assert predicted["in backward"].peak == 16 * n + step
    assert predicted["in backward, bf16=stochastic"].peak == 12 * n + step


class Recorder(nn.Module):
    """A model whose layers have other names than they are used in."""

    def __init__(self, tied):
        super().__init__()
        self.embedding = nn.Embedding(500, 64)
        self.layers = nn.Sequential(*[nn.Linear(64, 64) for _ in range(12)])
        self.head = nn.Linear(64, 500, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, index):
        return self.head(self.layers(self.embedding(index)))


BUCKETS = [{}, {"small_bytes": 0}, {"small_bytes": 1 << 20, "bucket_bytes": 100_000}]


@pytest.mark.parametrize("options", [None, *BUCKETS], ids=str)
@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
def test_gradients_in_flight(tied, options):
    """Of a backward with next to no activations: None is torch's fused AdamW."""
    model = Recorder(tied)
    if options is None:
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    elif not _native.available:
        pytest.skip("pure Python has temporaries of its own")
    else:
        optimizer = ms.AdamW(model.parameters(), in_backward=True, **options)
    expected = ms.memory.footprint(model, optimizer).expected
    index = torch.tensor([3])

    def step():
        loss = model(index).sum()
        activations = 2 * 500 * 4
        predicted = expected.at_peak.gradients.bytes
        assert predicted <= peak_of(loss.backward) <= predicted + activations
        optimizer.step()
        optimizer.zero_grad()

    train(model, optimizer, steps=1)  # makes state
    step()
    step()
    large = model.head.weight.nbytes
    if options == {"small_bytes": 0} and not tied:
        assert expected.at_peak.gradients.bytes == large
    if options is None and not tied:
        assert expected.at_peak.gradients.bytes == nbytes(model.parameters())


def test_gradients_that_the_optimizer_does_not_have():
    model = nn.Sequential(nn.Linear(300, 300), nn.Linear(10, 10))
    frozen_by_optimizer = nbytes(model[0].parameters())
    optimizer = ms.AdamW(model[1].parameters(), in_backward=True)
    footprint = ms.memory.footprint(model, optimizer)
    train(model, optimizer)
    assert now(model, optimizer) == footprint.expected.between
    assert footprint.expected.between.gradients.bytes == frozen_by_optimizer
    assert footprint.expected.at_peak.gradients.bytes == nbytes(model.parameters())


@pytest.mark.parametrize("in_backward", [True, False])
def test_one_optimizer_predicts_for_the_other(in_backward):
    """torch's Adam for ours and the other way round, with the options that both have."""
    model, groups = make_model(), []
    for amsgrad in (False, True):
        params = [p for p in model.parameters() if (p.dim() > 1) == amsgrad]
        groups.append({"params": params, "amsgrad": amsgrad})
    torchs = torch.optim.Adam([dict(g) for g in groups])
    ours = ms.Adam([dict(g) for g in groups], in_backward=in_backward)
    of_torchs = ms.memory.footprint(model, torchs, in_backward=in_backward)
    of_ours = ms.memory.footprint(model, ours)
    assert of_torchs.predicted == of_ours.predicted
    assert of_torchs.unpredicted == of_ours.unpredicted
    assert set(of_torchs.unpredicted) == {name_of(b, "8bit") for b, s in OUR_MODES if s == "8bit"}
    if in_backward:
        assert of_torchs.mode == of_ours.mode == "in backward"
    for why in of_ours.unpredicted.values():
        assert "cannot be combined with amsgrad=True" in why
    train(model, ours)
    assert now(model, ours) == of_torchs.predicted["in backward"].between


def test_the_default_is_adamw():
    model = make_model()
    of_none = ms.memory.footprint(model)
    optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
    assert of_none == ms.memory.footprint(model, optimizer)
    assert of_none.optimizer == "torch.optim.AdamW"
    assert ms.memory.footprint(model, ms.Adam(model.parameters())).optimizer == "memsave_ext.Adam"


def test_expected_is_what_the_optimizer_does():
    model = make_model()
    params = list(model.parameters())
    half = [{"params": params[:2], "fused": True}, {"params": params[2:], "foreach": False}]
    for optimizer, in_backward, mode in [
        (torch.optim.AdamW(params), None, "for-loop"),
        (torch.optim.AdamW(params), True, "in backward"),
        (torch.optim.AdamW(params, foreach=True), False, "foreach"),
        (torch.optim.SGD(params, fused=True), None, "fused"),
        (torch.optim.AdamW(half), None, "for-loop"),
        (ms.AdamW(params), None, "after backward"),
        (ms.AdamW(params), True, "in backward"),
        (ms.AdamW(params, clip_global_norm=1.0), None, "after backward"),
        (ms.AdamW(params, in_backward=True), False, "after backward"),
    ]:
        assert ms.memory.footprint(model, optimizer, in_backward=in_backward).mode == mode
    assert ms.memory.footprint(make_model(device="meta")).mode == "foreach"


def test_default_dtype():
    """Step counts of fused steps are float32, whatever it is."""
    torch.set_default_dtype(FP64)
    try:
        model = nn.Linear(3, 4)
        for fused in (False, True):
            optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
            expected = ms.memory.footprint(model, optimizer).expected
            train(model, optimizer)
            assert now(model, optimizer) == expected.between
            dtypes = {"float32", "float64"} if fused else {"float64"}
            assert set(expected.between.by_dtype["optimizer"]) == dtypes
    finally:
        torch.set_default_dtype(FP32)


def test_tensor_options():
    """Of which a copy on the meta device has none."""
    model = nn.Linear(3, 4)
    lr = torch.tensor(0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    footprint = ms.memory.footprint(model, optimizer)
    assert footprint.mode == "for-loop" and not footprint.unpredicted
    train(model, optimizer)
    assert now(model, optimizer) == footprint.expected.between


class Momentum(torch.optim.Optimizer):
    """Somebody's own: nested state, values read from tensors, state beside the parameters'."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["slots"] = [torch.zeros_like(param), {"half": param.to(FP16)}]
                    state["again"] = state["slots"][0]
                    self.state["all"] = {"steps": torch.zeros(3, dtype=torch.int64)}
                if param.grad.norm().item() > 0:
                    param -= group["lr"] * param.grad


def test_other_optimizers():
    model = make_model()
    optimizer = Momentum(model.parameters(), 0.1)
    footprint = ms.memory.footprint(model, optimizer)
    assert list(footprint.predicted) == ["for-loop"]
    assert footprint.optimizer.endswith("test_memory_footprint.Momentum")
    train(model, optimizer)
    there = now(model, optimizer)
    assert there.optimizer == footprint.expected.between.optimizer
    # What is there does not change what will be.
    again = ms.memory.footprint(model, optimizer)
    assert again.now == there and again.predicted == footprint.predicted
    count = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert there.by_dtype["optimizer"]["float32"] == Amount(count, 4 * count)
    assert there.by_dtype["optimizer"]["float16"] == Amount(count, 2 * count)
    assert there.by_dtype["optimizer"]["int64"] == Amount(3, 24)


def test_muon():
    model = nn.Sequential(nn.Linear(32, 48, bias=False), nn.Linear(48, 20, bias=False))
    optimizer = torch.optim.Muon(model.parameters())
    expected = ms.memory.footprint(model, optimizer).expected
    train(model, optimizer)
    assert now(model, optimizer) == expected.between


def test_sparse_gradients():
    model = nn.Sequential(nn.Embedding(100, 8, sparse=True), nn.Linear(8, 3))
    optimizer = torch.optim.SparseAdam([model[0].weight])
    footprint = ms.memory.footprint(model, optimizer)
    model(torch.tensor([1, 2, 1])).sum().backward()
    gradients = now(model).by_module["0"]["gradients"]
    assert gradients == Amount(3 + 24, 3 * 8 + 24 * 4)  # of each row its number and its values
    optimizer.step()
    optimizer.zero_grad()
    assert now(model, optimizer) == footprint.expected.between
    for other in (torch.optim.AdamW, ms.AdamW):
        refused = ms.memory.footprint(model, other(model.parameters()))
        assert not refused.predicted
        assert all("not support sparse" in why for why in refused.unpredicted.values())


# any model


DTYPES = [FP32, FP64, FP16, BF16, torch.complex64]
OPTIMIZERS = [
    lambda params: torch.optim.AdamW(params, foreach=False),
    lambda params: torch.optim.Adam(params, foreach=True, amsgrad=True),
    lambda params: torch.optim.SGD(params, momentum=0.9, foreach=False),
    lambda params: torch.optim.Adagrad(params, foreach=False),
    lambda params: ms.AdamW(params),
    lambda params: ms.AdamW(params, in_backward=True),
]
shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple) | st.just((80, 60))
parameters = st.tuples(shapes, st.sampled_from(DTYPES), st.booleans())
blocks = st.lists(st.lists(st.integers(0, 7), min_size=1, max_size=3), min_size=1, max_size=5)


def build(made, placed, device):
    """Modules with these parameters, of which some are in several, and some are frozen."""
    params = [
        nn.Parameter(torch.zeros(shape, dtype=dtype, device=device)).requires_grad_(trained)
        for shape, dtype, trained in made
    ]
    model = nn.Module()
    for number, positions in enumerate(placed):
        module = nn.ParameterList([params[i % len(params)] for i in positions])
        model.add_module(f"block{number}", module)
    return model


@settings(max_examples=30, deadline=None)
@given(st.lists(parameters, min_size=1, max_size=5), blocks, st.sampled_from(OPTIMIZERS))
def test_any_model(made, placed, make_optimizer):
    model = build(made, placed, "cpu")
    optimizer = make_optimizer(model.parameters())
    footprint = ms.memory.footprint(model, optimizer)
    params = list(model.parameters())  # each once
    assert footprint.now.parameters == Amount(sum(p.numel() for p in params), nbytes(params))
    trained = [p for p in params if p.requires_grad]
    for param in trained:
        param.grad = torch.ones_like(param)
    if trained:
        assert now(model).gradients == Amount(sum(p.numel() for p in trained), nbytes(trained))
    optimizer.step()
    optimizer.zero_grad()
    assert now(model, optimizer) == footprint.expected.between
    on_meta = build(made, placed, "meta")
    again = ms.memory.footprint(on_meta, make_optimizer(on_meta.parameters()))
    assert again.predicted == footprint.predicted
    assert again.unpredicted == footprint.unpredicted


# what is there


def test_tied_weights_count_once():
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    model[2].weight = nn.Parameter(model[0].weight.detach())  # the same memory
    there = now(model)
    assert there.by_module == {
        "0": {"parameters": Amount(16, 64)},
        "2": {"parameters": Amount(4, 16)},
    }
    assert ms.memory.footprint(model).predicted["fused"].at_peak.gradients.bytes == 3 * 64 + 64 + 16


def test_views_share_their_memory():
    """Parameters in one buffer, with a rest, gradients in another, and overlaps."""
    flat, bucket = torch.zeros(100), torch.zeros(90)
    model = nn.ParameterList([nn.Parameter(flat[:40]), nn.Parameter(flat[40:90].view(5, 10))])
    model[0].grad, model[1].grad = bucket[:40], bucket[40:].view(5, 10)
    there = now(model)
    assert there.parameters == Amount(90, 400)
    assert there.gradients == Amount(90, 360)
    overlapping = nn.ParameterList([nn.Parameter(flat[:60]), nn.Parameter(flat[40:])])
    assert now(overlapping).parameters == Amount(100, 400)
    expanded = nn.ParameterList([nn.Parameter(torch.zeros(1).expand(50))])
    assert now(expanded).parameters == Amount(1, 4)
    freed = nn.ParameterList([nn.Parameter(torch.zeros(50))])
    freed[0].untyped_storage().resize_(0)
    assert now(freed).parameters == Amount(0, 0)


def test_modules_and_dtypes():
    model = nn.Sequential(
        nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)), nn.Linear(2, 2, dtype=FP64)
    )
    model.root = nn.Parameter(torch.zeros(5, dtype=BF16))
    there = now(model)
    check_sums(there)
    assert there.by_dtype["parameters"] == {
        "bfloat16": Amount(5, 10),
        "float32": Amount(9 + 6, 60),
        "float64": Amount(6, 48),
    }
    assert there.by_dtype["buffers"] == {"float32": Amount(6, 24), "int64": Amount(1, 8)}
    assert set(there.at_depth(None)) == {"", "0.0", "0.1", "1"}
    assert there.at_depth(1) == {
        "": {"parameters": Amount(5, 10)},
        "0": {"parameters": Amount(15, 60), "buffers": Amount(7, 32)},
        "1": {"parameters": Amount(6, 48)},
    }


def test_meta_and_fake_tensors():
    of_real = ms.memory.footprint(make_model())
    of_meta = ms.memory.footprint(make_model(device="meta"))
    assert of_meta.predicted == of_real.predicted and not of_meta.unpredicted
    assert of_meta.now == of_real.now

    def small():
        return nn.Sequential(nn.Embedding(90, 80), nn.BatchNorm1d(80), nn.Linear(80, 3))

    with FakeTensorMode():
        fake = small()
        inside = ms.memory.footprint(fake)
    assert inside == ms.memory.footprint(fake) == ms.memory.footprint(small())


def test_nothing_is_allocated():
    """And nothing is left behind: parameters, optimizer and hooks are as before."""
    model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(4)])
    optimizer = torch.optim.AdamW(model.parameters())
    ms.memory.footprint(model, optimizer)
    called = []
    handle = register_optimizer_step_pre_hook(lambda *_: called.append(1))
    state = torch.get_rng_state()
    try:
        with ms.memory.track() as t:
            ms.memory.footprint(model, optimizer)
    finally:
        handle.remove()
    assert t.peak < 1000 < nbytes(model.parameters())
    assert not called and not optimizer.state
    assert all(p.grad is None and not p._backward_hooks for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("kind", ["ms", "sgd"])
def test_dtensors_count_with_their_local_shard(kind):
    """Four processes, of which this is the first; nothing is sent in a fake group."""
    dist = pytest.importorskip("torch.distributed")
    if not dist.is_available() or dist.is_initialized():
        pytest.skip("no process group can be made here")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        model = nn.Sequential(nn.Linear(64, 130), nn.Linear(130, 8))
        mesh = init_device_mesh("cpu", (4,))
        for part in (*model, model):
            fully_shard(part, mesh=mesh)
        if kind == "ms":
            optimizer = ms.AdamW(model.parameters(), in_backward=True)
        else:
            optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
        footprint = ms.memory.footprint(model, optimizer)
        shard = 33 * 64 + 33 + 2 * 130 + 2
        assert footprint.now.parameters == Amount(shard, 4 * shard)
        model(torch.randn(2, 64)).sum().backward()
        if kind == "sgd":
            assert now(model).gradients == footprint.expected.at_peak.gradients
        optimizer.step()
        optimizer.zero_grad()
        assert now(model, optimizer) == footprint.expected.between
        assert footprint.expected.between.optimizer.elements >= shard
        if kind == "ms":
            assert "not for DTensors" in footprint.unpredicted["in backward, state_dtype=8bit"]
    finally:
        dist.destroy_process_group()


# what cannot be predicted


def test_unpredicted():
    model = nn.Linear(3, 4)

    def footprint(kind, **options):
        return ms.memory.footprint(model, kind(model.parameters(), **options))

    lbfgs = footprint(torch.optim.LBFGS)
    assert not lbfgs.predicted
    with pytest.raises(RuntimeError, match="LBFGS cannot be predicted, 'for-loop'.*closure"):
        _ = lbfgs.expected
    graph = footprint(torch.optim.Adam, differentiable=True)
    assert not graph.predicted and "differentiable=True" in graph.unpredicted["for-loop"]
    clipped = footprint(ms.AdamW, clip_global_norm=1.0)
    assert "clip_global_norm" in clipped.unpredicted["in backward"]
    assert clipped.expected == clipped.predicted["after backward"]
    double = ms.memory.footprint(nn.Linear(3, 4, dtype=FP64))
    assert "float32, float16 and bfloat16" in double.unpredicted["in backward, state_dtype=8bit"]
    complex_ones = ms.memory.footprint(nn.Linear(3, 4, dtype=torch.complex64))
    assert "floating-point" in complex_ones.unpredicted["fused"]
    assert complex_ones.predicted["foreach"].between.optimizer.bytes == 2 * 16 * 8 + 2 * 4


def test_nothing_to_train():
    model = nn.BatchNorm1d(3).requires_grad_(False)
    footprint = ms.memory.footprint(model)
    assert {p.peak for p in footprint.predicted.values()} == {6 * 4 + 6 * 4 + 8, 6 * 2 + 6 * 2 + 8}
    assert ms.memory.footprint(nn.ReLU()).expected.peak == 0
    footprint.report(file=io.StringIO())


def test_errors():
    model, other = nn.Linear(3, 4), nn.Linear(4, 5)
    footprint = ms.memory.footprint
    with pytest.raises(TypeError, match="model must be a torch.nn.Module, got list"):
        footprint(list(model.parameters()))
    with pytest.raises(TypeError, match="optimizer must be a torch.optim.Optimizer or None, got"):
        footprint(model, 0.1)
    with pytest.raises(TypeError, match="in_backward must be True, False or None, got 1"):
        footprint(model, in_backward=1)
    both = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1)
    with pytest.raises(ValueError, match=r"2 of 4 parameters.*shape \[5, 4\].*ModuleList"):
        footprint(model, both)
    assert footprint(nn.ModuleList([model, other]), both).expected
    with pytest.raises(ValueError, match="in_backward=True is for torch.optim.Adam.*got SGD"):
        footprint(model, torch.optim.SGD(model.parameters()), in_backward=True)
    with pytest.raises(ValueError, match="no shape for 0.weight yet"):
        footprint(nn.Sequential(nn.LazyLinear(3)))
    with pytest.raises(ValueError, match="depth must be None or an int of at least 0, got -1"):
        footprint(model).report(depth=-1, file=io.StringIO())


# what is shown


def test_report(monkeypatch):
    monkeypatch.setattr(table, "_rich", lambda: None)
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Sequential(nn.Linear(64, 2)))
    file = io.StringIO()
    footprint = ms.memory.footprint(model, ms.AdamW(model.parameters(), amsgrad=True))
    footprint.report(depth=1, file=file)
    lines = [line.split() for line in file.getvalue().splitlines()]
    assert ["Now"] in lines
    assert ["int64", "-", "8", "B", "(1)", "-", "-", "8", "B"] in lines
    title = "Expected at the worst moment of a step: memsave_ext.AdamW, after backward;"
    assert title in file.getvalue()
    names = [line[0] for line in lines if line]
    assert names.count("2") == 1 and "2.0" not in names
    (row,) = [line for line in file.getvalue().splitlines() if line.startswith("after backward")]
    assert table.format_bytes(footprint.expected.peak) in row and "(expected)" in row
    assert "8bit" in file.getvalue().split("Not predicted")[1]
    everything = io.StringIO()
    footprint.report(depth=None, file=everything)
    assert "2.0" in everything.getvalue().split()


def test_json(tmp_path):
    model = make_model()
    footprint = ms.memory.footprint(model, torch.optim.Adam(model.parameters(), amsgrad=True))
    path = tmp_path / "footprint.json"
    text = footprint.to_json(path)
    loaded = json.loads(text)
    assert json.loads(path.read_text()) == loaded
    assert loaded["unpredicted"] == footprint.unpredicted
    assert loaded["now"]["bytes"] == footprint.now.bytes
    mode = loaded["predicted"][loaded["mode"]]
    assert mode["peak"] == footprint.expected.peak
    assert mode["at_peak"]["by_module"]["4.inner"]["parameters"] == {"elements": 20, "bytes": 80}
    assert set(json.loads(footprint.to_json(depth=0))["now"]["by_module"]) == {""}


def test_table():
    file = io.StringIO()
    table._print_plain("T", ["a", "b", "c"], [["1", "2 B", "x"], ["", "-", "yy"]], [0, 1, 0], file)
    assert file.getvalue() == "T\na  b    c\n-  ---  --\n1  2 B  x\n     -  yy\n\n".replace(
        "a  b    c", "a    b  c"
    )
    with pytest.raises(ValueError, match="rows must have 2 cells, as columns, got 1"):
        table.print_table("", ["a", "b"], [["1"]], file)


def test_table_with_rich():
    pytest.importorskip("rich")
    file = io.StringIO()
    rows = [["layers[0]", 12, "a.py:1 in f :smile:"], ["x" * 200, 3, "-"]]
    table.print_table("[T]", ["a", "b", "c"], rows, file)
    text = file.getvalue()
    for part in ("[T]", "layers[0]", "x" * 200, "a.py:1 in f :smile:"):
        assert part in text
    assert all("12" not in line or line.index("12") > 200 for line in text.splitlines())


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (10235, "10.0 KiB"),
        (102399, "100 KiB"),
        ((1 << 20) - 1, "1.00 MiB"),
        (-2048, "-2.00 KiB"),
        (5 << 50, "5120 TiB"),
    ],
)
def test_format_bytes(count, text):
    assert table.format_bytes(count) == text
    if abs(count) >= 1024:
        value, unit = text.split()
        size = float(value) * 1024 ** ("KiB", "MiB", "GiB", "TiB").index(unit) * 1024
        assert math.isclose(size, count, rel_tol=5e-3)
