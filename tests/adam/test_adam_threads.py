"""Adam's kernels give the same bits for any number of threads."""

import pytest
import torch
from torch import nn

import memsave_ext as ms

pytestmark = pytest.mark.skipif(not ms._native.available, reason="about the native kernels")

# Together worth several threads, whose borders fall into parameters and between them.
SHAPES = [(70_001,), (3,), (0, 5), (300, 501), (), (33_000,)]
MODES = [
    {}, {"amsgrad": True}, {"max_grad_norm": 0.5}, {"clip_global_norm": 0.5},
    {"state_dtype": torch.bfloat16}, {"state_dtype": "8bit"},
    {"bf16": "stochastic"}, {"bf16": "kahan"}, {"bf16": "split"},
]  # fmt: skip


def steps(options, threads):
    """Parameters and states after three steps."""
    torch.manual_seed(1)
    dtype = torch.bfloat16 if "bf16" in options else torch.float32
    params = [nn.Parameter(torch.randn(shape).to(dtype)) for shape in SHAPES]
    optimizer = ms.AdamW(params, lr=1e-2, **options)
    torch.set_num_threads(threads)
    for _ in range(3):
        for p in params:
            p.grad = torch.randn(p.shape).to(dtype)
        optimizer.step()
    state = optimizer.state_dict()["state"]
    tensors = [value for entry in state.values() for value in entry.values()]
    return [*params, *(value for value in tensors if isinstance(value, torch.Tensor))]


@pytest.mark.parametrize("options", MODES, ids=str)
def test_the_same_bits_for_any_number_of_threads(options):
    before = torch.get_num_threads()
    try:
        expected, *others = (steps(options, threads) for threads in (1, 2, 3, 8))
    finally:
        torch.set_num_threads(before)
    assert len(expected) > 2 * len(SHAPES)
    for other in others:
        for left, right in zip(expected, other, strict=True):
            torch.testing.assert_close(left, right, rtol=0, atol=0)
