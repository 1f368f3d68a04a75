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
