"""Every kernel, once or a few times, on small tensors: what compute-sanitizer is run over.

Not among the tests by its name; benchmarks/gpu.sh gives it to the sanitizer. Sizes are odd, tails
not full, addresses not aligned. What the kernels compute, other tests check: here only that it is
finite.
"""

import contextlib
import os

import pytest
import torch
from on_device import HAS_CUDA
from torch import nn

import memsave_ext as ms
from memsave_ext import _native

DEVICE = "cuda" if HAS_CUDA else "cpu"
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
ops = torch.ops.memsave_ext


def finite(*tensors):
    for tensor in tensors:
        assert tensor.isfinite().all()


# ---- batch norm ---------------------------------------------------------------------------------

# Channels first: on chip, with more than 48 KiB too, and in chunks. Last: in groups not full.
SHAPES = [(1, 1, 1, 2), (2, 3, 5, 7), (4, 130, 14, 14), (64, 128, 7, 7), (3, 5, 65, 127)]
LAYOUTS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [FP64, FP32, FP16, BF16], ids=str)
def test_batch_norm(dtype, shape, layout):
    x, residual, grad = (
        torch.randn(shape, device=DEVICE).to(dtype).contiguous(memory_format=LAYOUTS[layout])
        for _ in range(3)
    )
    kind = FP64 if dtype == FP64 else FP32
    weight, bias, mean, var = torch.rand(4, shape[1], device=DEVICE, dtype=kind)
    for activation, added in (("none", None), ("leaky_relu", residual)):
        given = (x, weight, bias, added)
        tail = (activation, 0.1)
        output, statistics = ops.batch_norm_forward(
            *given, None, mean, var, True, 0.1, 1e-5, *tail, None
        )
        again, _ = ops.batch_norm_forward(*given, statistics, None, None, True, 0.1, 1e-5, *tail,
                                          None)  # fmt: skip
        assert torch.equal(output, again)
        mask = [True, added is not None, True, True]
        finite(
            output,
            *ops.batch_norm_backward(grad, *given, statistics, True, 1e-5, *tail, mask),
            *ops.batch_norm_backward(grad, *given, statistics, False, 1e-5, *tail, mask),
        )
        sums = ops.batch_norm_backward_sums(grad, *given, statistics, *tail)
        finite(sums, *ops.batch_norm_backward_input(grad, *given, statistics, sums, *tail,
                                                    mask[:2]))  # fmt: skip
    channels = shape[1] * kind.itemsize
    finite(ops.batch_norm_moments(x)[: 2 * channels].view(kind))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_batch_norm_of_an_address_that_is_not_aligned(layout):
    aligned = torch.randn(4, 16, 8, 8, device=DEVICE).to(BF16)
    aligned = aligned.contiguous(memory_format=LAYOUTS[layout])
    storage = torch.zeros(aligned.numel() + 1, device=DEVICE, dtype=BF16)
    x = storage.as_strided(aligned.shape, aligned.stride(), 1)
    x.copy_(aligned)
    finite(*ops.batch_norm_forward(
        x, None, None, None, None, None, None, True, 0.1, 1e-5, "relu", 0.0, None
    ))  # fmt: skip


# ---- Adam ---------------------------------------------------------------------------------------

SIZES = [1, 31, 255, 257, 4095, 4096, 5001, 70_003]
MODES = {
    "fp64": (FP64, {}),
    "fp32": (FP32, {}),
    "fp32, amsgrad": (FP32, {"amsgrad": True, "maximize": True}),
    "fp32, clipped": (FP32, {"max_grad_norm": 0.5}),
    "fp32, all clipped": (FP32, {"clip_global_norm": 0.5}),
    "fp32, states bf16": (FP32, {"state_dtype": BF16, "amsgrad": True}),
    "fp32, states 8bit": (FP32, {"state_dtype": "8bit"}),
    "fp32, states 4bit": (FP32, {"state_dtype": "4bit"}),
    "fp16": (FP16, {"max_grad_norm": 0.5}),
    "fp16, states bf16": (FP16, {"state_dtype": BF16}),
    "fp16, states 8bit": (FP16, {"state_dtype": "8bit"}),
    "bf16": (BF16, {}),
    "bf16, states bf16": (BF16, {"state_dtype": BF16}),
    "bf16, states 8bit": (BF16, {"state_dtype": "8bit"}),
    **{
        f"{kind}, states {state or 'fp32'}": (BF16, {"bf16": kind, "state_dtype": state})
        for kind in ("stochastic", "split", "split8")
        for state in (None, BF16, "8bit", "4bit")
    },
}


def parameters(dtype):
    """Every other one at an address that no vector may be loaded from."""
    made = []
    for i, size in enumerate(SIZES):
        whole = torch.randn(size + 1, device=DEVICE).to(dtype)
        made.append(nn.Parameter(whole[i % 2 :][:size]))
    return made


def backward(params, scale=1.0):
    (sum((p * p.detach().cos()).sum().float() for p in params) * scale).backward()


@pytest.mark.parametrize("on_device", [False, True], ids=["", "steps on the device"])
@pytest.mark.parametrize("mode", MODES)
def test_adam(mode, on_device):
    dtype, options = MODES[mode]
    params = parameters(dtype)
    in_backward = "clip_global_norm" not in options  # which needs all gradients
    optimizer = ms.AdamW(params, lr=1e-3, in_backward=in_backward, fused=on_device, **options)
    for _ in range(2):
        backward(params)
        optimizer.step()
        optimizer.zero_grad()
    finite(*params, *optimizer.fp32_parameters())


@pytest.mark.parametrize("kind", ["SGD", "momentum", "Lion"])
@pytest.mark.parametrize("mode", [m for m in MODES if "amsgrad" not in m and "4bit" not in m])
def test_sgd_and_lion(mode, kind):
    dtype, options = MODES[mode]
    options = {name: value for name, value in options.items() if name != "amsgrad"}
    params = parameters(dtype)
    options |= {"momentum": 0.9, "dampening": 0.1} if kind == "momentum" else {}
    in_backward = "clip_global_norm" not in options
    make = ms.Lion if kind == "Lion" else ms.SGD
    optimizer = make(params, lr=1e-3, in_backward=in_backward, **options)
    for _ in range(2):
        backward(params)
        optimizer.step()
        optimizer.zero_grad()
    finite(*params, *optimizer.fp32_parameters())


@pytest.mark.parametrize("mode", ["fp64", "fp32", "fp16", "fp32, states 8bit"])
def test_adam_under_a_scaler(mode):
    dtype, options = MODES[mode]
    params = parameters(dtype)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=8.0)
    optimizer = ms.AdamW(params, lr=1e-3, in_backward=True, grad_scaler=scaler, **options)
    for factor in (1.0, float("inf"), 1.0):
        backward(params, 8.0 * factor)
        scaler.scale(torch.ones((), device=DEVICE))  # makes the scale
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    finite(*params)


@pytest.mark.filterwarnings("ignore:memsave_ext. norm_pass")
def test_adam_norm_pass():
    params = parameters(FP32)
    optimizer = ms.AdamW(params, lr=1e-3, in_backward=True)
    with optimizer.norm_pass(1.0):
        backward(params)
    backward(params)
    optimizer.step()
    finite(optimizer.grad_norm, *params)


# ---- loss head ----------------------------------------------------------------------------------


@pytest.mark.parametrize("entropy", [False, True], ids=["", "entropy"])
@pytest.mark.parametrize("kind", ["target", "probabilities", "weights"])
@pytest.mark.parametrize("dtype", [FP64, FP32, FP16, BF16], ids=str)
def test_loss_head(dtype, kind, entropy):
    """Chunks whose rows are whole vectors and not, one at an odd address, the last one short."""
    wide = FP64 if dtype == FP64 else FP32
    for tokens, classes, cap in ((5, 300, 0.0), (3, 1027, 30.0), (1, 1, 0.0), (70, 64, 0.0)):
        logits = torch.randn(tokens * classes + 1, device=DEVICE).to(dtype)[classes % 2 :]
        logits = logits[: tokens * classes].view(tokens, classes)
        target = torch.randint(classes, (tokens,), device=DEVICE)
        given = torch.rand(tokens, classes, device=DEVICE, dtype=wide)
        weights = torch.rand(classes, device=DEVICE, dtype=wide) if kind == "weights" else None
        by_row = kind == "probabilities"
        rest = (None if by_row else target, given if by_row else None, weights, 0, 0.9, 0.01, cap)
        sums = torch.zeros(3 + entropy, tokens, device=DEVICE, dtype=wide)
        ops.linear_cross_entropy_reduce_(sums, logits, *rest)
        ones = torch.ones_like(sums[0])
        coefficients = torch.stack([sums[0], sums[1].log(), *[ones] * (2 + entropy)])
        ops.linear_cross_entropy_gradient_(logits, coefficients, *rest)
        finite(sums, logits)


def test_loss_head_in_chunks_with_rows_stepped():
    hidden = torch.randn(9, 24, device=DEVICE, requires_grad=True)
    weight = nn.Parameter(torch.randn(777, 24, device=DEVICE))
    optimizer = ms.AdamW([weight], lr=1e-3, in_backward=True)
    target = torch.randint(777, (9,), device=DEVICE)
    ms.linear_cross_entropy(hidden, weight, target, chunk_size=256).backward()
    optimizer.step()
    finite(hidden.grad, weight)


# ---- what has no kernels of its own, around those that have -------------------------------------


def test_a_tracked_step_in_remat():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(24, 31), ms.BatchNorm1d(31), nn.GELU(), nn.Linear(31, 5))
    net = net.to(DEVICE)
    optimizer = ms.AdamW(net.parameters(), lr=1e-3, in_backward=True)
    # compute-sanitizer runs without the caching allocator, which counts.
    counts = DEVICE == "cpu" or "PYTORCH_NO_CUDA_MEMORY_CACHING" not in os.environ
    with ms.memory.track(net, optimizer) if counts else contextlib.nullcontext() as t:
        for _ in range(2):
            with ms.remat(_everything=True):
                loss = net(torch.randn(17, 24, device=DEVICE)).square().mean()
            loss.backward()
            optimizer.step()
    assert t is None or t.peak > 0
    finite(*net.parameters())


@pytest.mark.skipif(
    not (HAS_CUDA and _native.module and _native.module.with_cuda), reason="needs a build with CUDA"
)
def test_probe():
    assert _native.module.probe_cuda() > 0
