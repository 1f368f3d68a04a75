"""Steps give the same bits for any number of threads."""

import threading

import pytest
import torch
from torch import nn

import memsave_ext as ms

pytestmark = pytest.mark.filterwarnings("ignore:memsave_ext. norm_pass")

# Together worth several threads, whose borders fall into parameters and between them.
SHAPES = [(70_001,), (3,), (0, 5), (300, 501), (), (33_000,)]
MODES = [
    {}, {"amsgrad": True}, {"max_grad_norm": 0.5}, {"clip_global_norm": 0.5},
    {"state_dtype": torch.bfloat16}, {"state_dtype": "8bit"},
    {"bf16": "stochastic"}, {"bf16": "split8"}, {"bf16": "split"},
    {"dtype": torch.float64, "max_grad_norm": 0.5}, {"dtype": torch.float64, "norm_pass": 0.5},
    {"dtype": torch.float64, "clip_global_norm": 0.5},
    {"dtype": torch.complex128, "clip_global_norm": 0.5},
    {"kind": ms.SGD, "momentum": 0.9, "dtype": torch.float64, "clip_global_norm": 0.5},
    {"kind": ms.Lion, "dtype": torch.float64, "max_grad_norm": 0.5},
]  # fmt: skip


def steps(options, threads):
    """Parameters and states after three steps; gradients are in several orders of memory."""
    torch.manual_seed(1)
    options = dict(options)
    max_norm = options.pop("norm_pass", None)
    dtype = options.pop("dtype", torch.bfloat16 if "bf16" in options else torch.float32)
    params = [nn.Parameter(torch.randn(shape).to(dtype)) for shape in SHAPES]
    kind = options.pop("kind", ms.AdamW)
    optimizer = kind(params, lr=1e-2, in_backward=max_norm is not None, **options)
    torch.set_num_threads(threads)
    for _ in range(3):
        grads = [
            torch.randn(p.shape[::-1]).to(dtype).permute(tuple(range(p.dim()))[::-1])
            for p in params
        ]
        if max_norm is None:
            for p, grad in zip(params, grads, strict=True):
                p.grad = grad
        else:
            with optimizer.norm_pass(max_norm):
                torch.autograd.backward(params, grads)
            torch.autograd.backward(params, grads)
        optimizer.step()
    state = optimizer.state_dict()["state"]
    tensors = [value for entry in state.values() for value in entry.values()]
    return [*params, *(value for value in tensors if isinstance(value, torch.Tensor))]


# In pure Python torch's operators are spread over threads, and sums alone depend on how.
@pytest.mark.parametrize(
    "options",
    [mode for mode in MODES if ms._native.available or mode.get("dtype") == torch.float64],
    ids=str,
)
def test_the_same_bits_for_any_number_of_threads(options):
    before = torch.get_num_threads()
    try:
        expected, *others = (steps(options, threads) for threads in (1, 2, 3))
    finally:
        torch.set_num_threads(before)
    assert len(expected) >= 2 * len(SHAPES)
    for other in others:
        for left, right in zip(expected, other, strict=True):
            torch.testing.assert_close(left, right, rtol=0, atol=0)


def of_one_memory():
    """A parameter, one tied to it as by hand, one that is a part of it, and one that is every
    second of its elements; and one that has nothing to do with them."""
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(80_000, generator=generator, dtype=torch.float64)
    parts = [whole, whole, whole[500:60_000], whole[::2], torch.ones(3, dtype=torch.float64)]
    params = [nn.Parameter(torch.zeros_like(part)) for part in parts]
    for param, part in zip(params, parts, strict=True):
        param.data = part
    return params


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("max_norm", [None, 3.0])
@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
def test_parameters_of_one_memory_are_stepped_one_after_the_other(kind, max_norm, scaled):
    options = {"momentum": 0.9} if kind == "SGD" else {"amsgrad": True}
    params, others = of_one_memory(), of_one_memory()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, enabled=scaled)
    ours = getattr(ms, kind)(params, lr=0.1, max_grad_norm=max_norm, grad_scaler=scaler, **options)
    theirs = getattr(torch.optim, kind)(others, lr=0.1, foreach=False, **options)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for number in range(10):
            generator = torch.Generator().manual_seed(number)
            scaler.scale(torch.ones(()))
            for p, q in zip(params, others, strict=True):
                q.grad = torch.randn(q.shape, generator=generator, dtype=torch.float64)
                p.grad = q.grad * (4.0 if scaled else 1.0)
                if max_norm is not None:
                    nn.utils.clip_grad_norm_([q], max_norm)
            scaler.step(ours)
            scaler.update()
            theirs.step()
            for p, q in zip(params, others, strict=True):
                torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-9)
    finally:
        torch.set_num_threads(before)


def test_clipping_while_another_thread_makes_optimizers():
    def new():
        return ms.SGD([nn.Parameter(torch.ones(4))], lr=0.1, in_backward=True)

    kept, errors, stop = [new() for _ in range(300)], [], threading.Event()

    def clip():
        param = nn.Parameter(torch.ones(4))
        param.grad = torch.ones(4)
        while not stop.is_set():
            try:
                nn.utils.clip_grad_norm_([param], 1.0)
            except Exception as error:
                errors.append(error)
                return

    thread = threading.Thread(target=clip)
    thread.start()
    kept += [new() for _ in range(1500)]
    stop.set()
    thread.join()
    assert not errors
