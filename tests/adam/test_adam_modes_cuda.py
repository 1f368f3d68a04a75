"""Adam's modes on a GPU beside the CPU; skipped where there is no GPU or no CUDA build."""

import copy
import math

import pytest
import torch
from modes import BF16, FP16, FP32, FP64, assert_same, both_ways, nothing_in_backward, tensors
from on_device import capture
from torch import nn
from torch.utils._pytree import tree_map_only

import memsave_ext as ms
from memsave_ext import _native

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or _native.module is None or not _native.module.with_cuda,
    reason="needs a GPU and a CUDA build",
)
DEVICE = "cuda"
# In blocks of 8-bit states and in none; the last is not aligned, the one before in another order.
SHAPES = [(5000,), (3, 7), (), (70_001,), (64, 16, 3, 3), (8193,)]
MODES = {
    "fp32": (FP32, {}),
    "fp32, clipped": (FP32, {"max_grad_norm": 0.5, "amsgrad": True}),
    "fp64, clipped": (FP64, {"max_grad_norm": 0.5}),
    "fp32, states bf16": (FP32, {"state_dtype": BF16}),
    "fp32, states bf16, amsgrad": (FP32, {"state_dtype": BF16, "amsgrad": True}),
    "fp32, states 8bit": (FP32, {"state_dtype": "8bit", "weight_decay": 0.1}),
    "fp16, states bf16": (FP16, {"state_dtype": BF16}),
    "fp16, states 8bit": (FP16, {"state_dtype": "8bit"}),
    "stochastic": (BF16, {"bf16": "stochastic", "maximize": True}),
    "split, decayed": (BF16, {"bf16": "split", "weight_decay": 0.1}),
    "split": (BF16, {"bf16": "split", "amsgrad": True}),
    "stochastic, states bf16": (BF16, {"bf16": "stochastic", "state_dtype": BF16}),
    "stochastic, states 8bit": (BF16, {"bf16": "stochastic", "state_dtype": "8bit"}),
    "split, states 8bit, clipped": (
        BF16, {"bf16": "split", "state_dtype": "8bit", "max_grad_norm": 0.5}
    ),
    "split, states bf16": (BF16, {"bf16": "split", "state_dtype": BF16, "betas": (0.5, 0.9)}),
    "split, states 8bit": (BF16, {"bf16": "split", "state_dtype": "8bit"}),
    "split8": (BF16, {"bf16": "split8", "amsgrad": True}),
    "split8, states 8bit": (BF16, {"bf16": "split8", "state_dtype": "8bit"}),
    "fp32, states 4bit": (FP32, {"state_dtype": "4bit", "weight_decay": 0.1}),
    "stochastic, states 4bit": (BF16, {"bf16": "stochastic", "state_dtype": "4bit"}),
}  # fmt: skip
MOMENTUM = {"kind": ms.SGD, "momentum": 0.9}
OTHERS = {
    "SGD": (FP32, {"kind": ms.SGD, "weight_decay": 0.1, "max_grad_norm": 0.5}),
    "SGD, split8": (BF16, {"kind": ms.SGD, "bf16": "split8"}),
    "momentum": (FP32, {**MOMENTUM, "dampening": 0.1}),
    "momentum, fp64": (FP64, {**MOMENTUM, "nesterov": True}),
    "momentum, split": (BF16, {**MOMENTUM, "bf16": "split", "maximize": True}),
    "momentum, states bf16": (FP16, {**MOMENTUM, "state_dtype": BF16}),
    "momentum, states 8bit": (FP32, {**MOMENTUM, "state_dtype": "8bit"}),
    "Lion": (FP32, {"kind": ms.Lion, "weight_decay": 0.1}),
    "Lion, split, states bf16": (BF16, {"kind": ms.Lion, "bf16": "split", "state_dtype": BF16}),
}
every_mode = pytest.mark.parametrize("mode", MODES | OTHERS)


def make_mode(mode, device=DEVICE, **more):
    dtype, options = (MODES | OTHERS)[mode] if isinstance(mode, str) else (mode, {})
    kind, options = options.get("kind", ms.Adam), {k: v for k, v in options.items() if k != "kind"}
    generator = torch.Generator().manual_seed(1)
    values = [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]
    values[4] = values[4].to(memory_format=torch.channels_last)
    values = [value.to(device) for value in values]
    values[5] = torch.cat([values[5][:1], values[5]])[1:]
    params = [nn.Parameter(value) for value in values]
    return params, kind(params, **{"lr": 1e-2, "seed": 2**40 + 3, **options, **more})


def gradients(params, number):
    """The same on every device and in every type: float16 and bfloat16 values."""
    generator = torch.Generator().manual_seed(number)
    return [
        (0.5 + torch.randn(p.shape, generator=generator)).half().bfloat16().to(p) for p in params
    ]


def backward(params, number, scale=None):
    grads = gradients(params, number)
    loss = sum((p * g).sum().to(torch.float32) for p, g in zip(params, grads, strict=True))
    (loss if scale is None else scale(loss)).backward()


def train(params, optimizer, numbers):
    for number in numbers:
        backward(params, number)
        optimizer.step()
        optimizer.zero_grad()


def assert_nearly(found, expected, name):
    """Within some ulps of float32; where that is rounded to less, few to a neighbour."""
    found = found.cpu()
    assert found.dtype == expected.dtype, name
    if name.endswith("moments"):  # the codes of both
        both = [(t & 0xF, t >> 4) for t in (found, expected)]
        for one, other in zip(*both, strict=True):
            assert_nearly(one, other, f"{name} of one")
        return
    if found.dtype == torch.uint8:
        apart = (found.int() - expected.int()).abs()
        assert apart.max() <= 1, name  # of exp_avg's sign, too
    elif found.dtype in (BF16, FP16):
        unit = torch.finfo(found.dtype).eps
        torch.testing.assert_close(found, expected, rtol=unit, atol=unit * 1e-6)
        apart = found != expected
    else:
        unit = torch.finfo(found.dtype).eps
        torch.testing.assert_close(found, expected, rtol=16 * unit, atol=16 * unit)
        return
    if found.numel() > 1000:
        assert (apart != 0).double().mean() <= 5e-3, name


@both_ways
@every_mode
def test_a_modes_step_as_on_the_cpu(mode, in_backward):
    """Step by step, from the same state."""
    cpu, cuda = (make_mode(mode, device, in_backward=in_backward) for device in ("cpu", DEVICE))
    for number in range(4):
        for one in (cpu, cuda):
            train(*one, [number])
        expected, found = dict(tensors(*cpu)), dict(tensors(*cuda))
        assert found.keys() == expected.keys()
        for i, (param, other) in enumerate(zip(cuda[0], cpu[0], strict=True)):
            if "param_rest" not in cpu[1].state[other]:
                continue
            # Rounding to a neighbour changes the low part altogether: what counts is both together.
            together = [o.fp32_parameters()[i].cpu() for _, o in (cuda, cpu)]
            unit = 2.0**-15 if "split8" in mode else 1e-6
            torch.testing.assert_close(*together, rtol=unit, atol=1e-7)
            for part in (expected, found):
                del part[f"{i} param"], part[f"{i} param_rest"]
            assert param.shape == other.shape
        for name, value in found.items():
            assert_nearly(value, expected[name], name)
        with torch.no_grad():
            for source, target in zip(tensors(*cpu), tensors(*cuda), strict=True):
                target[1].copy_(source[1])


@every_mode
def test_a_mode_in_backward_as_after_it(mode):
    runs = [make_mode(mode, in_backward=in_backward) for in_backward in (False, True)]
    for one in runs:
        train(*one, range(4))
    assert_same(*runs)
    assert all(p.grad is None for p in runs[1][0])


@every_mode
def test_a_mode_resumes_bit_for_bit_from_the_cpu(mode):
    params, optimizer = make_mode(mode, in_backward=True)
    train(params, optimizer, range(2))
    saved = tree_map_only(torch.Tensor, torch.Tensor.cpu, copy.deepcopy(optimizer.state_dict()))
    others, other = make_mode(mode, in_backward=True)
    with torch.no_grad():
        for p, q in zip(others, params, strict=True):
            p.copy_(q)
    other.load_state_dict(saved)
    for one in ((params, optimizer), (others, other)):
        train(*one, range(2, 4))
    assert_same((params, optimizer), (others, other))


@pytest.mark.parametrize("state_dtype", [None, BF16, "8bit"])
def test_split_is_an_fp32_master(state_dtype):
    params, optimizer = make_mode(BF16, bf16="split", state_dtype=state_dtype, in_backward=True)
    masters = [nn.Parameter(p.detach().float()) for p in params]
    plain = ms.Adam(masters, lr=1e-2, seed=2**40 + 3, state_dtype=state_dtype, in_backward=True)
    for number in range(5):
        train(params, optimizer, [number])
        train(masters, plain, [number])
    for joined, master in zip(optimizer.fp32_parameters(), masters, strict=True):
        assert torch.equal(joined, master)


def test_one_launch_for_many_parameters_of_every_mode():
    """Of groups that differ, with so many parameters that they take several launches."""
    groups, values = [], []
    generator = torch.Generator().manual_seed(0)
    for dtype, options in MODES.values():
        sizes = [1, 5, 33, 4096, 4097] * 12
        part = [torch.randn(n, generator=generator).to(dtype) for n in sizes]
        values.append(part)
        groups.append({**options, "params": [nn.Parameter(v.to(DEVICE)) for v in part]})
    together = ms.Adam([dict(group) for group in groups], lr=1e-2, in_backward=True)
    params = [p for group in groups for p in group["params"]]
    train(params, together, range(2))
    copies = [nn.Parameter(v.to(DEVICE)) for part in values for v in part]
    start = 0
    for group in groups:
        # Random bits depend on where in the optimizer a parameter is.
        mine = copies[start : start + len(group["params"])]
        before = [nn.Parameter(torch.zeros(1, device=DEVICE)) for _ in range(start)]
        alone = ms.Adam([{"params": before}, {**group, "params": mine}][not before :], lr=1e-2)
        for number in range(2):
            for p, g in zip(copies, gradients(copies, number), strict=True):
                p.grad = g
            alone.step()
        start += len(mine)
    for p, q in zip(params, copies, strict=True):
        assert torch.equal(p, q)


# clipping


def exact_run(params, clip, steps=4):
    """torch's, in float64 on the CPU."""
    exact = [nn.Parameter(p.detach().cpu().double()) for p in params]
    optimizer = torch.optim.Adam(exact, lr=1e-2, eps=0.01)
    norms = []
    for number in range(steps):
        backward(exact, number)
        norms.append(clip(exact))
        optimizer.step()
        optimizer.zero_grad()
    return exact, norms


def assert_close_to(params, exact):
    for param, expected in zip(params, exact, strict=True):
        torch.testing.assert_close(param.cpu().double(), expected, rtol=2e-6, atol=2e-6)


@both_ways
def test_max_grad_norm(in_backward):
    params, optimizer = make_mode(FP32, max_grad_norm=0.3, eps=0.01, in_backward=in_backward)
    exact, _ = exact_run(params, lambda all: [nn.utils.clip_grad_norm_([p], 0.3) for p in all])
    train(params, optimizer, range(4))
    assert_close_to(params, exact)


@pytest.mark.filterwarnings("ignore:memsave_ext. norm_pass")
@nothing_in_backward
@pytest.mark.parametrize("way", ["clip_global_norm", "norm_pass"])
@pytest.mark.parametrize("max_norm", [0.3, 1e6])
def test_global_norm(way, max_norm):
    options = {"clip_global_norm": max_norm} if way == "clip_global_norm" else {}
    params, optimizer = make_mode(FP32, eps=0.01, in_backward=True, **options)
    exact, norms = exact_run(params, lambda all: nn.utils.clip_grad_norm_(all, max_norm))
    for number, norm in enumerate(norms):
        if way == "norm_pass":
            with optimizer.norm_pass(max_norm):
                backward(params, number)
        train(params, optimizer, [number])
        assert optimizer.grad_norm.device.type == DEVICE
        assert optimizer.grad_norm.item() == pytest.approx(norm.item(), rel=1e-6)
    assert_close_to(params, exact)


# loss scaling


def make_scaled(**options):
    scaler = torch.amp.GradScaler(DEVICE, init_scale=1024.0, growth_interval=100)
    return *make_mode(options.pop("mode", FP32), grad_scaler=scaler, **options), scaler


def scaled_step(params, optimizer, scaler, number):
    backward(params, number, scale=scaler.scale)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


@both_ways
@pytest.mark.parametrize("mode", ["fp32", "split", "fp16, states 8bit"])
def test_a_scale_of_a_power_of_2_leaves_no_trace(mode, in_backward):
    params, optimizer, scaler = make_scaled(mode=mode, in_backward=in_backward)
    others, other = make_mode(mode, fused=True)
    for number in range(4):
        scaled_step(params, optimizer, scaler, number)
    train(others, other, range(4))
    assert_same((params, optimizer), (others, other))


@both_ways
@pytest.mark.parametrize(
    "options",
    [{}, {"max_grad_norm": 0.5}, {"state_dtype": "8bit"}, {"foreach": True}],
    ids=str,
)
def test_an_infinity_without_synchronising(in_backward, options):
    params, optimizer, scaler = make_scaled(in_backward=in_backward, **options)
    scaled_step(params, optimizer, scaler, 0)
    grads = [gradients(params, number) for number in range(1, 4)]
    with torch.no_grad():
        grads[1][3][7] = math.inf
    before = [{n: t.clone() for n, t in tensors(params, optimizer)}]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for part in grads:
            loss = torch.stack([(p * g).sum() for p, g in zip(params, part, strict=True)]).sum()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            before.append({n: t.clone() for n, t in tensors(params, optimizer)})
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert scaler.get_scale() == 512
    assert [optimizer.state[p]["step"].item() for p in params] == [4, 4, 4, 3, 4, 4]
    for name, value in before[2].items():
        assert torch.equal(value, before[1][name]) == name.startswith("3 "), name


def test_an_infinity_skips_all_with_clip_global_norm():
    params, optimizer, scaler = make_scaled(clip_global_norm=1.0)
    scaled_step(params, optimizer, scaler, 0)
    before = {n: t.clone() for n, t in tensors(params, optimizer)}
    scaler.scale((params[3] * math.inf).sum() + params[0].sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 512
    assert all(torch.equal(t, before[n]) for n, t in tensors(params, optimizer))


# graphs


CAPTURED = {
    "clipped": (FP32, {"max_grad_norm": 0.5}),
    "split": (BF16, {"bf16": "split"}),
    "stochastic, states bf16": (BF16, {"bf16": "stochastic", "state_dtype": BF16}),
    "8bit": (FP32, {"state_dtype": "8bit"}),
    "split, 8bit": (BF16, {"bf16": "split", "state_dtype": "8bit"}),
    "clip_global_norm": (FP32, {"clip_global_norm": 0.5}),
}


@nothing_in_backward
@pytest.mark.parametrize("case", CAPTURED)
def test_a_captured_step_of_a_mode(case):
    """Bit for bit: its random numbers follow the step count on the device, too."""
    dtype, options = CAPTURED[case]
    runs = [
        make_mode(dtype, in_backward=True, capturable=True, lr=1e-3, **options) for _ in range(2)
    ]
    grads = gradients(runs[0][0], 1)

    def step(params, optimizer):
        # Depends on parameters: no two steps are alike.
        terms = [(p * (p + g)).sum().float() for p, g in zip(params, grads, strict=True)]
        torch.stack(terms).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    replay, _ = capture(lambda: step(*runs[0]))
    for _ in range(5):
        replay()
    for _ in range(8):
        step(*runs[1])
    torch.cuda.synchronize()
    assert_same(*runs)
    assert runs[0][1].state[runs[0][0][0]]["step"].item() == 8
