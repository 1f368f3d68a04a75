"""Floats of every kind, random bits for them, and how they are compared."""

import math
import struct

import torch
from hypothesis import strategies as st

from memsave_ext.adam.fallback import stored
from memsave_ext.adam.fallback.stored import Draw

CPU = torch.device("cpu")
UNIT = 2.0**-23
ANY = [0.0, -0.0, 1.0, math.inf, -math.inf, math.nan, 1e-45, -1e-45, 1e-39, 3.4028235e38]
# Of every exponent and both signs: patterns of bits, as they are.
FLOATS = st.lists(
    st.integers(0, 2**32 - 1).map(lambda bits: struct.unpack("<f", struct.pack("<I", bits))[0])
    | st.sampled_from(ANY),
    min_size=1,
    max_size=50,
)
FINITE = st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1)


def floats(values):
    return torch.tensor(values, dtype=torch.float32)


def bits(numel, value=None, seed=3):
    if value is not None:
        return torch.full((numel,), value, dtype=torch.int32)
    return stored.random_bits(numel, seed=seed, position=1, step=2, draw=Draw.MOMENTS, device=CPU)


def same(left, right):
    """Bitwise, but for the bits of what is no number."""
    assert left.dtype == right.dtype
    return torch.equal(left.isnan(), right.isnan()) and torch.equal(
        left[~left.isnan()].view(torch.int32), right[~right.isnan()].view(torch.int32)
    )
