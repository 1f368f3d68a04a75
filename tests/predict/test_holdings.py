"""What footprint() says is there, against the tensors of a model and of its optimizer."""

import pytest
import torch
from footprints import BF16, FP16, FP32, FP64, check_sums, make_model, nbytes, now
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.optim.optimizer import register_optimizer_step_pre_hook

import memsave_ext as ms
from memsave_ext.predict.holdings import Amount

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


@pytest.mark.once
@settings(max_examples=30)
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
            assert "in backward, state_dtype=8bit" not in footprint.unpredicted
    finally:
        dist.destroy_process_group()


class Coded(nn.Parameter):
    """As bitsandbytes' Params4bit: scales are in an object that an attribute holds."""


class Scales:
    def __init__(self, count, more=None):
        self.absmax, self.more, self.shape = torch.rand(count), more, torch.Size([count])


def test_what_parameters_of_a_class_of_their_own_hold():
    module = nn.Linear(8, 8)
    codes = torch.zeros(256, dtype=torch.uint8)
    weight = Coded(codes, requires_grad=False)
    weight.scales, weight.module, weight.alias = Scales(64, Scales(2)), module, codes
    weight.itself = [weight, {"one": Scales(1)}]
    module.weight = weight
    held = ms.memory.footprint(module, None).now
    assert held.parameters.bytes == 256 + 4 * (64 + 2 + 1) + 4 * 8
    assert held.by_dtype["parameters"]["uint8"].bytes == 256
