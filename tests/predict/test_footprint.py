"""What footprint() says against what is there: after real steps, and in them."""

import sys

import pytest
import torch
from footprints import BF16, FP16, FP32, FP64, backward, check_sums, make_model, nbytes, now, train
from torch import nn

import memsave_ext as ms
from memsave_ext import _native
from memsave_ext.adam.formats import PARAM_FORMATS, STATE_FORMATS
from memsave_ext.predict.holdings import Amount


def peak_of(work):
    with ms.memory.track() as t:
        work()
    return t.peak


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
    (row.name, state_dtype)
    for row in PARAM_FORMATS
    for state_dtype in dict.fromkeys(row.option for row in STATE_FORMATS)
]


def name_of(bf16, state_dtype):
    parts = ["in backward"]
    parts += [f"bf16={bf16}"] if bf16 else []
    parts += [f"state_dtype={str(state_dtype).removeprefix('torch.')}"] if state_dtype else []
    return ", ".join(parts)


@pytest.mark.once
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
def predicted_for_float32():
    return ms.memory.footprint(make_model()).predicted


@pytest.mark.once
@pytest.mark.parametrize("in_backward", [False, True], ids=["after", "in backward"])
@pytest.mark.parametrize(("bf16", "state_dtype"), OUR_MODES)
def test_our_modes(bf16, state_dtype, in_backward, predicted_for_float32):
    """As predicted before the model was made bfloat16, and for it."""
    mode = name_of(bf16, state_dtype)
    before = predicted_for_float32[mode].between
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


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_inside_inference_mode():
    model = make_model()
    with torch.inference_mode():
        inside = ms.memory.footprint(model)
    assert inside.predicted == ms.memory.footprint(model).predicted and not inside.unpredicted


class _LetsGo(torch.optim.SGD):
    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for param in group["params"]:
                param.grad = None


def test_an_optimizer_that_lets_go_of_gradients():
    model = make_model()
    plain, lets_go = (
        ms.memory.footprint(model, kind(model.parameters(), lr=0.1)).expected
        for kind in (torch.optim.SGD, _LetsGo)
    )
    assert lets_go.temporaries == plain.temporaries


def test_bytes_of_each_parameter_by_hand():
    """What docs/choosing.md says, of one parameter of 2**20 elements."""
    n = 1 << 20
    model = nn.Linear(1024, 1024, bias=False, device="meta")
    predicted = ms.memory.footprint(model).predicted
    scales, scales_of_4bit = 2 * 4 * n // 256, 2 * 4 * n // 128
    between = {
        "fused": 12 * n,
        "in backward": 12 * n,
        "in backward, state_dtype=bfloat16": 8 * n,
        "in backward, state_dtype=8bit": 6 * n + scales,
        "in backward, bf16=stochastic": 10 * n,
        "in backward, bf16=split": 12 * n,
        "in backward, bf16=split, state_dtype=bfloat16": 8 * n,
        "in backward, bf16=stochastic, state_dtype=8bit": 4 * n + scales,
        "in backward, bf16=split8, state_dtype=8bit": 5 * n + scales,
        "in backward, state_dtype=4bit": 5 * n + scales_of_4bit,
        "in backward, bf16=stochastic, state_dtype=4bit": 3 * n + scales_of_4bit,
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
    assert set(of_torchs.unpredicted) == {
        name_of(b, s) for b, s in OUR_MODES if s in ("8bit", "4bit")
    }
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


@pytest.mark.parametrize(
    ("make", "options", "mode"),
    [
        (torch.optim.Adafactor, {}, "for-loop"),
        (torch.optim.Adafactor, {"foreach": True}, "foreach"),
        (torch.optim.AdamW, {"fused": False}, "for-loop"),
        (torch.optim.AdamW, {"lr": torch.tensor(0.1)}, "for-loop"),
        (torch.optim.AdamW, {"lr": torch.tensor(0.1), "capturable": True}, "foreach"),
        (torch.optim.SGD, {"lr": torch.tensor(0.1)}, "foreach"),
        (torch.optim.RMSprop, {}, "foreach"),
    ],
)
def test_how_an_accelerator_steps(make, options, mode):
    model = nn.Linear(4, 4, device="meta")
    optimizer = make(model.parameters(), **options)
    assert ms.memory.footprint(model, optimizer).mode == mode


def test_any_optimizer_in_backward():
    model = nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 64))
    optimizer = ms.in_backward(torch.optim.RMSprop(model.parameters(), momentum=0.9))
    predicted = ms.memory.footprint(model, optimizer)
    assert predicted.mode == "in backward"
    assert predicted.expected.peak < predicted.predicted["for-loop"].peak
    model(torch.randn(2, 64)).sum().backward()
    optimizer.step()
    assert ms.memory.footprint(model, optimizer).now.bytes == predicted.expected.between.bytes
    optimizer.remove_hooks()
    assert ms.memory.footprint(model, optimizer).mode == "for-loop"


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


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (torch.optim.Muon, {}),
        # A copy of the option on the meta device would have no value.
        (torch.optim.AdamW, {"lr": torch.tensor(0.1)}),
    ],
)
def test_more_optimizers(make, options):
    model = nn.Sequential(nn.Linear(32, 48, bias=False), nn.Linear(48, 20, bias=False))
    optimizer = make(model.parameters(), **options)
    footprint = ms.memory.footprint(model, optimizer)
    if options:
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
    assert footprint.optimizer.endswith("test_footprint.Momentum")
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


def sgd(params, **options):
    return ms.in_backward(torch.optim.SGD(params, foreach=True), **options)


def adam_of_torch(params, **options):
    return ms.in_backward(torch.optim.AdamW(params), **options)


@pytest.mark.once
@pytest.mark.parametrize("make", [ms.AdamW, ms.Lion, adam_of_torch, sgd])
@pytest.mark.skipif(sys.platform != "linux", reason="a folder can be used on Linux only")
def test_gradients_elsewhere(make, tmp_path):
    """They are in memory a part at a time, and small ones."""
    model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(6)])
    optimizer = make(model.parameters(), grads_on=tmp_path)
    footprint = ms.memory.footprint(model, optimizer)
    expected = footprint.expected
    large = model[0].weight.nbytes
    assert expected.peak - expected.between.bytes < 3.1 * large < nbytes(model.parameters())
    x = torch.ones(1, 512)

    def step():
        model(x).sum().backward()
        optimizer.step()

    step()  # makes states
    optimizer.zero_grad()
    with ms.memory.track(model, optimizer) as t:
        step()
    if _native.available or not footprint.optimizer.startswith("memsave_ext."):
        # Some activations, and scalars.
        assert expected.peak <= t.peak <= expected.peak + 3 * x.nbytes
    assert now(model).gradients.bytes == sum(
        p.grad.nbytes for p in model.parameters() if p.dim() == 1
    )
    optimizer.remove_hooks()
    in_memory = ms.memory.footprint(model, optimizer).expected
    assert in_memory.at_peak.gradients.bytes == nbytes(model.parameters())
