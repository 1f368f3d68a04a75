"""Which kernel attention has on a card that is not there, and what that keeps for backward."""

import pytest
import torch
from helpers import on_fakes
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from memsave_ext import _native

pytestmark = pytest.mark.skipif(not _native.available, reason="fakes are the same in pure Python")

FLASH = "_scaled_dot_product_flash_attention"
EFFICIENT = "_scaled_dot_product_efficient_attention"
MATH = "_safe_softmax"
HALF, FLOAT, DOUBLE = torch.float16, torch.float32, torch.float64


class Names(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def names_of(run, device="cuda"):
    def seen():
        with Names() as names:
            run()
        return names.seen

    return on_fakes(seen, device)


def kernels_of(run):
    return [name for name in names_of(run) if name in (FLASH, EFFICIENT, MATH)]


def attend(dtype=HALF, heads=4, rows=32, head=64, kv_heads=4, keys=32, mask=None, **options):
    query = torch.randn(2, heads, rows, head, dtype=dtype, device="cuda", requires_grad=True)
    key = torch.randn(2, kv_heads, keys, head, dtype=dtype, device="cuda")
    if mask is not None:
        options["attn_mask"] = torch.ones(rows, keys, dtype=mask, device="cuda")
    made = F.scaled_dot_product_attention(query, key, key, **options)
    assert made.shape == query.shape
    made.sum().backward()
    assert query.grad.shape == query.shape


# What torch.backends.cuda's documentation and sdp_utils.cpp say of a card of 8.0.
CHOICES = [
    ({}, FLASH),
    ({"dtype": torch.bfloat16, "is_causal": True, "dropout_p": 0.1}, FLASH),
    ({"head": 20}, FLASH),  # padded to 24
    ({"kv_heads": 2, "enable_gqa": True}, FLASH),
    ({"mask": torch.bool}, EFFICIENT),
    ({"mask": HALF, "keys": 30}, EFFICIENT),
    ({"dtype": FLOAT}, EFFICIENT),
    ({"dtype": FLOAT, "is_causal": True, "dropout_p": 0.1}, EFFICIENT),
    ({"keys": 48, "is_causal": True}, EFFICIENT),
    ({"head": 512}, EFFICIENT),
    ({"dtype": FLOAT, "head": 18}, MATH),
    ({"dtype": FLOAT, "kv_heads": 2, "enable_gqa": True}, MATH),
    ({"dtype": DOUBLE}, MATH),
]


@pytest.mark.parametrize(("options", "expected"), CHOICES)
def test_the_kernel_of_a_card(options, expected):
    assert kernels_of(lambda: attend(**options)) == [expected]


def test_a_kernel_that_is_switched_off():
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        assert kernels_of(attend) == [EFFICIENT]
    with sdpa_kernel(SDPBackend.MATH):
        assert kernels_of(attend) == [MATH]


def test_autocast_narrows_before_the_choice():
    def run():
        with torch.autocast("cuda", dtype=torch.bfloat16):
            attend(FLOAT)

    assert kernels_of(run) == [FLASH]


def test_inside_of_a_module_of_torch():
    """``F.multi_head_attention_forward`` calls attention, or dropout where it returns weights."""

    def run(need_weights):
        module = nn.MultiheadAttention(64, 2, dropout=0.1, batch_first=True, device="cuda")
        x = torch.randn(2, 8, 64, device="cuda")
        module(x, x, x, need_weights=need_weights)

    assert kernels_of(lambda: run(False)) == [EFFICIENT]
    names = names_of(lambda: run(True))
    assert "native_dropout" in names
    assert "bernoulli_" not in names


@pytest.mark.parametrize(
    ("dtype", "states"), [(HALF, [16, 8]), (FLOAT, [8, 8])], ids=["flash", "efficient"]
)
def test_what_is_kept_for_backward(dtype, states):
    """Beside what is read and made: a float32 a row and head, and the random numbers' state."""

    def kept():
        query = torch.randn(2, 4, 256, 64, dtype=dtype, device="cuda", requires_grad=True)
        node = F.scaled_dot_product_attention(query, query, query).grad_fn
        saved = [getattr(node, name) for name in dir(node) if name.startswith("_saved_")]
        tensors = [t for t in saved if isinstance(t, torch.Tensor)]
        return sorted({t.untyped_storage()._cdata: t.nbytes for t in tensors}.values())

    of_query = 2 * 4 * 256 * 64 * dtype.itemsize
    assert on_fakes(kept, "cuda") == sorted([*states, 2 * 4 * 256 * 4, of_query, of_query])


def test_a_step_on_the_cpu_keeps_its_kernel():
    def run():
        query = torch.randn(2, 4, 32, 64, requires_grad=True)
        F.scaled_dot_product_attention(query, query, query)

    assert "_scaled_dot_product_flash_attention_for_cpu" in names_of(run, "cpu")
