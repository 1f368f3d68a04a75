"""Adam's formats in exact arithmetic, a number at a time: what kernels and fallback must give."""

from __future__ import annotations

import math
from fractions import Fraction


def resolution(value: Fraction, bits: int) -> Fraction:
    """The distance of neighbours around ``value`` with so many bits, in float32's exponents."""
    exponent = -126
    if value:
        exponent = value.numerator.bit_length() - value.denominator.bit_length()
        exponent -= Fraction(2) ** exponent > value
    return Fraction(2) ** (max(exponent, -126) - (bits - 1))


def split8(value: float, random: int) -> tuple[Fraction, int]:
    """Returns the magnitude of the bfloat16 and the rest of a float32, which is finite.

    It is rounded to 16 significant bits, up where its fraction and the lower 8 of the random bits
    are 1 or more together. The bfloat16, of 8, is the nearest to that; of two the larger.
    """
    exact = abs(Fraction(value))
    unit = resolution(exact, 16)
    kept = math.floor(exact / unit + Fraction(random & 0xFF, 256)) * unit
    coarse = resolution(kept, 8)
    upper = math.floor(kept / coarse + Fraction(1, 2)) * coarse
    rest = (kept - upper) / resolution(kept, 16)
    assert rest.denominator == 1
    return upper, int(rest)
