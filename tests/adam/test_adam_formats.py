"""How Adam's parameters and states are stored, in the reference, beside plain Python."""

import math
from fractions import Fraction

import pytest
import torch
from formats_of_floats import CPU, FLOATS, bits, floats, same
from hypothesis import given
from hypothesis import strategies as st
from oracles.adam_formats import split8

from memsave_ext.adam import formats
from memsave_ext.adam.fallback import stored
from memsave_ext.adam.fallback.stored import Draw

# random bits


@pytest.mark.parametrize(
    ("word", "seed", "expected"),
    [  # of Random123's kat_vectors
        ((0,) * 4, 0, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ((0xFFFFFFFF,) * 4, 2**64 - 1, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), 0x299F31D0A4093822,
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)  # fmt: skip
def test_philox_known_answers(word, seed, expected):
    words = stored.philox(tuple(torch.tensor(w) for w in word), seed)
    assert " ".join(f"{w.item():08x}" for w in words) == expected


@given(
    counter=st.tuples(*[st.integers(0, 2**32 - 1)] * 4),
    seed=st.integers(0, 2**64 - 1),
)
def test_philox_in_integers(counter, seed):
    words, low, high = list(counter), seed & 0xFFFFFFFF, seed >> 32
    for _ in range(10):
        even, odd = 0xD2511F53 * words[0], 0xCD9E8D57 * words[2]
        words = [odd >> 32 ^ words[1] ^ low, odd, even >> 32 ^ words[3] ^ high, even]
        words = [w & 0xFFFFFFFF for w in words]
        low, high = low + 0x9E3779B9 & 0xFFFFFFFF, high + 0xBB67AE85 & 0xFFFFFFFF
    found = stored.philox(tuple(torch.tensor(c) for c in counter), seed)
    assert [w.item() for w in found] == words


def test_random_bits_are_halves_of_words():
    drawn = stored.random_bits(21, seed=5, position=7, step=9, draw=Draw.MOMENTS, device=CPU)
    assert drawn.shape == (21,) and drawn.dtype == torch.int32
    for i in range(21):
        counter = tuple(torch.tensor(c) for c in (i // 8, 7, 9, 1))
        word = stored.philox(counter, 5)[i % 8 // 2].item()
        assert drawn[i] == (word >> 16 if i % 2 else word & 0xFFFF)


def test_random_bits_differ_by_all_that_they_depend_on():
    def draw(seed=0, position=0, step=1, draw=Draw.PARAM):
        return stored.random_bits(
            800, seed=seed, position=position, step=step, draw=draw, device=CPU
        )

    assert torch.equal(draw(), draw(step=torch.tensor(1.0)))
    for other in ({"seed": 1}, {"seed": 1 << 32}, {"position": 1}, {"step": 2}, {"draw": Draw(1)}):
        assert (draw() == draw(**other)).sum() < 5
    assert abs(draw().double().mean() / 65535 - 0.5) < 0.05


# parameters


@given(FLOATS, st.integers(0, 0xFFFF))
def test_round_at_random_is_one_of_two_neighbours(values, random):
    x = floats(values)
    rounded = formats.round_at_random(x, bits(x.numel(), random)).float()
    up = formats.round_at_random(x, bits(x.numel(), 0xFFFF)).float()
    down = formats.round_at_random(x, bits(x.numel(), 0)).float()
    for value, found, above, below in zip(x, rounded, up, down, strict=True):
        if value.isnan():
            assert found.isnan()
        else:
            assert found in (above, below)
            assert below.abs() <= value.abs() <= above.abs()
            assert not value.isinf() or found == value
            assert found == value or value.bfloat16() != value


@pytest.mark.parametrize("value", [1.001, -1.001, 3e-40, 1.0, 0.0, 65280.5])
def test_round_at_random_is_unbiased(value):
    x = floats([value])
    all_bits = torch.arange(1 << 16, dtype=torch.int32)
    mean = formats.round_at_random(x.expand(1 << 16), all_bits).double().mean()
    torch.testing.assert_close(mean, x.double()[0], rtol=1e-12, atol=0)
    n = 40_000
    mean = formats.round_at_random(x.expand(n), bits(n)).double().mean()
    spacing = abs(value) / 128 + 1e-40
    assert abs(mean - value) < 4 * spacing / math.sqrt(n)


@given(FLOATS)
def test_split_is_all_of_a_float(values):
    x = floats(values)
    upper, low_bits = formats.split(x)
    assert (upper.dtype, low_bits.dtype) == (torch.bfloat16, torch.int16)
    assert same(formats.unsplit(upper, low_bits), x)
    number = ~x.isnan()
    assert not low_bits[~number].any()
    # The nearest, of two as near the one away from 0.
    close = (upper.float() - x).abs() <= (x.bfloat16().float() - x).abs()
    assert (close | x.isinf() | upper.isinf())[number].all()


def test_split_of_every_exponent():
    upper = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(torch.bfloat16)
    for lower in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        x = ((upper.view(torch.int16).int() << 16) + lower).view(torch.float32)
        assert same(formats.unsplit(*formats.split(x)), x)


@given(FLOATS, st.integers(0, 0xFFFF))
def test_split8_is_the_oracles(values, random):
    x = floats(values)
    upper, low_bits = formats.split8(x, bits(x.numel(), random))
    assert (upper.dtype, low_bits.dtype) == (torch.bfloat16, torch.int8)
    both = formats.unsplit8(upper, low_bits)
    assert same(both[~x.isfinite()], x[~x.isfinite()])
    for value, up, rest, joined in zip(x, upper.float(), low_bits, both, strict=True):
        if not value.isfinite():
            continue
        of_upper, of_rest = split8(value.item(), random)
        # The nearest to the largest numbers is infinity, which with its rest is a number again.
        assert of_upper == (2**128 if up.isinf() else abs(Fraction(up.item())))
        assert rest == of_rest
        assert joined.signbit() == value.signbit()
        near = value.abs().double() * 2.0**-15 + 2.0**-141
        assert (joined.isinf() and value.abs() > 3.4e38) or (joined - value).abs() <= near


@pytest.mark.parametrize("value", [1.00001, -1.00001, 1.5, 0.0, 3e-40])
def test_split8_is_unbiased(value):
    x = floats([value])
    all_bits = torch.arange(256, dtype=torch.int32)
    mean = formats.unsplit8(*formats.split8(x.expand(256), all_bits)).double().mean()
    torch.testing.assert_close(mean, x.double()[0], rtol=1e-12, atol=0)
