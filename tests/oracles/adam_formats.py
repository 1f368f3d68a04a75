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


def numbers(levels: int, ratio: int) -> list[Fraction]:
    """What each code stands for: 0, and in each level equal steps from the last one's top on."""
    found, top = [Fraction(0)], Fraction(0)
    for level in range(levels):
        below, top = top, Fraction(1, ratio ** (levels - 1 - level))
        found += [below + (top - below) * k / 2**level for k in range(1, 2**level + 1)]
    return found


def coded(value: float, largest: float, random: int, levels: int, ratio: int) -> Fraction:
    """Returns the code of a magnitude before it is cut to an integer.

    It goes up where what it is past a code and the 16 random bits are 1 or more together.
    """
    of = numbers(levels, ratio)
    number = Fraction(value) / Fraction(largest) if largest else Fraction(0)
    below = max(code for code in range(len(of)) if of[code] <= number)
    past = Fraction(0)
    if below + 1 < len(of):
        past = (number - of[below]) / (of[below + 1] - of[below])
    return min(below + past + Fraction(random, 65536), Fraction(len(of) - 1))
