"""How Adam's parameters and states are stored, in the reference, beside plain Python."""

import math
import struct
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.adam_formats import split8

from memsave_ext.adam import blocks, formats, precise
from memsave_ext.adam.fallback import packing, random_bits
from memsave_ext.adam.fallback.random_bits import Draw
from memsave_ext.adam.formats import BLOCK

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
    return random_bits.random_bits(
        numel, seed=seed, position=1, step=2, draw=Draw.MOMENTS, device=CPU
    )


def same(left, right):
    """Bitwise, but for the bits of what is no number."""
    assert left.dtype == right.dtype
    return torch.equal(left.isnan(), right.isnan()) and torch.equal(
        left[~left.isnan()].view(torch.int32), right[~right.isnan()].view(torch.int32)
    )


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
    words = random_bits.philox(tuple(torch.tensor(w) for w in word), seed)
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
    found = random_bits.philox(tuple(torch.tensor(c) for c in counter), seed)
    assert [w.item() for w in found] == words


def test_random_bits_are_halves_of_words():
    drawn = random_bits.random_bits(21, seed=5, position=7, step=9, draw=Draw.MOMENTS, device=CPU)
    assert drawn.shape == (21,) and drawn.dtype == torch.int32
    for i in range(21):
        counter = tuple(torch.tensor(c) for c in (i // 8, 7, 9, 1))
        word = random_bits.philox(counter, 5)[i % 8 // 2].item()
        assert drawn[i] == (word >> 16 if i % 2 else word & 0xFFFF)


def test_random_bits_differ_by_all_that_they_depend_on():
    def draw(seed=0, position=0, step=1, draw=Draw.PARAM):
        return random_bits.random_bits(
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


@given(FLOATS)
def test_kahan_keeps_twice_the_bits(values):
    x = floats(values)
    upper, compensation = formats.kahan(x)
    assert upper.dtype == compensation.dtype == torch.bfloat16
    assert torch.equal(upper.view(torch.int16), x.bfloat16().view(torch.int16))
    assert compensation.isfinite().all()
    both = formats.unkahan(upper, compensation)
    fits = upper.isfinite()
    tolerance = x.double().abs() * 2.0**-17 + 1e-40
    assert ((both.double() - x.double()).abs() <= tolerance)[fits].all()
    assert same(both[~fits], upper.float()[~fits])


# moments in blocks


def in_blocks(values, random=None, root=False):
    """As read again after values were stored."""
    x = floats(values) if isinstance(values, list) else values
    random = bits(x.numel()) if random is None else random
    encode = blocks.encode_exp_avg_sq if root else blocks.encode_exp_avg
    decode = blocks.decode_exp_avg_sq if root else blocks.decode_exp_avg
    codes, scale = encode(x, random)
    assert codes.dtype == torch.uint8 and codes.shape == x.shape
    assert scale.dtype == torch.float32 and scale.shape == (-(-x.numel() // BLOCK),)
    return decode(codes, scale)


@pytest.mark.parametrize("levels", [7, 8])
def test_numbers_of_codes(levels):
    numbers = blocks._numbers(levels)
    assert numbers[0] == 0 and numbers[-1] == pytest.approx(1, rel=UNIT)
    steps = numbers.diff()
    assert (steps > 0).all()
    assert (steps.diff() > -1e-7).all()  # convex
    for level in range(1, levels):  # a tenth of each level's top is the top of the one before
        top = numbers[(2 << level) - 1].double()
        assert top == pytest.approx(10.0 ** (level + 1 - levels), rel=1e-6)
    codes = torch.arange(1 << levels)
    torch.testing.assert_close(blocks._codes(numbers, levels), codes.float(), rtol=0, atol=1e-4)


@pytest.mark.parametrize("levels", [7, 8])
def test_codes_rise_with_numbers(levels):
    numbers = torch.cat([torch.linspace(0, 1, 100_001), torch.logspace(-9, 0, 10_001)]).sort()[0]
    codes = blocks._codes(numbers, levels)
    assert (codes.diff() >= 0).all()
    assert codes[0] == 0 and codes[-1] == (1 << levels) - 1


@pytest.mark.parametrize("root", [False, True])
@pytest.mark.parametrize("random", [0, 0x8000, 0xFFFF])
@pytest.mark.parametrize("scale", [1.0, 1e-30, 3e8])
def test_blocks_are_exact_at_zero_and_the_maximum(root, random, scale):
    torch.manual_seed(1)
    x = torch.rand(3 * BLOCK + 5) * scale
    x[::7] = 0
    x[-5:] = 0  # a whole block
    tops = [10, BLOCK, 2 * BLOCK + 7]
    x[tops] = scale * torch.tensor([1.0, 2.0, 3.0])
    read = in_blocks(x, bits(x.numel(), random), root)
    assert not read[::7].any() and not read[-5:].any()
    torch.testing.assert_close(read[tops], x[tops], rtol=3 * UNIT, atol=0)


@pytest.mark.parametrize("root", [False, True])
def test_blocks_are_near_and_unbiased(root):
    """Within one of a level's equal steps, which go from a tenth of its top to that."""
    torch.manual_seed(2)
    x = torch.rand(16 * BLOCK) ** 3  # more of the small
    x = x if root else x * torch.randn(x.shape).sign()
    exact = x.sqrt() if root else x
    of_top = exact.abs().view(-1, BLOCK)
    tops = of_top.amax(1, keepdim=True)
    of_top = of_top / tops
    levels = 8 if root else 7
    level = (levels - 1 + of_top.double().log10().ceil()).clamp(min=0)
    step = tops * 0.9 * 10 ** (level - levels + 1) / 2**level
    step = torch.where(level == 0, tops * 10.0 ** (1 - levels), step).view(-1) * 1.0001
    draws = 200
    seen = torch.zeros_like(step)
    for seed in range(draws):
        read = in_blocks(x, bits(x.numel(), seed=seed), root)
        error = (read.sqrt() if root else read) - exact
        assert (error.abs() <= step).all()
        seen += error
    assert (seen.abs() / draws < 6 * step / 2 / math.sqrt(draws)).all()
    assert abs((seen / step).mean() / draws) < 4 / 2 / math.sqrt(draws * x.numel())


@given(FINITE.filter(any), st.sampled_from([0, 1, 0xFFFF]))
def test_no_root_but_zero_is_zero(values, random):
    x = floats(values).square()
    x = x[x.isfinite()]
    codes, _ = blocks.encode_exp_avg_sq(x, bits(x.numel(), random))
    assert torch.equal(codes == 0, x == 0)


@given(FLOATS, st.integers(0, 0xFFFF))
def test_exp_avg_in_a_block(values, random):
    x = floats(values)
    read = in_blocks(x, bits(x.numel(), random))
    if not x.isfinite().all():
        assert read.isnan().all()
        return
    top = x.abs().max()
    assert (read.abs() <= top).all()
    assert ((read.sign() == x.sign()) | (read == 0)).all()
    if top >= 1.2e-38:  # of what is less the inverse may be no number
        assert ((read - x).abs().double() <= top.double() * 0.9 / 64 * 1.0001).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("root", [False, True])
def test_what_is_not_finite_shows_in_its_block_alone(bad, root):
    x = torch.zeros(3 * BLOCK)
    x[BLOCK + 3] = bad
    read = in_blocks(x, root=root)
    assert torch.equal(read.isnan().view(3, BLOCK).all(1), torch.tensor([False, True, False]))
    assert torch.equal(read[:BLOCK], x[:BLOCK]) and torch.equal(read[-BLOCK:], x[-BLOCK:])


@settings(deadline=None)
@given(st.integers(1, 3 * BLOCK), st.booleans())
def test_a_part_of_a_block_is_as_one_with_zeros(numel, root):
    torch.manual_seed(numel)
    x = torch.rand(numel)
    padded = torch.nn.functional.pad(x, (0, -numel % BLOCK))
    read = in_blocks(padded, root=root)
    assert torch.equal(in_blocks(x, root=root), read[:numel])
    assert not read[numel:].any()


# moments that are folded


@given(FLOATS, FLOATS, st.integers(0, 0xFFFF))
def test_pack(first, second, random):
    n = min(len(first), len(second))
    exp_avg, exp_avg_sq = floats(first[:n]), floats(second[:n]).abs()
    packed = packing.pack(exp_avg, exp_avg_sq, bits(n, random))
    assert packed.dtype == torch.float32
    upper, lower = packing.unpack(packed)
    assert same(upper, exp_avg.bfloat16().float())
    assert torch.equal(lower.isnan(), exp_avg_sq.isnan())
    assert torch.equal(lower.isinf() & exp_avg_sq.isinf(), exp_avg_sq.isinf())
    assert not lower[exp_avg_sq == 0].any()
    fits = exp_avg_sq < 3.38e38
    error = (lower.double() - exp_avg_sq.double()).abs()
    assert (error <= exp_avg_sq.double() * 2.0**-8 + 2.0**-134)[fits].all()
    assert (lower >= 0)[fits].all()


def test_pack_is_unbiased():
    exp_avg_sq = torch.tensor([1.2345e-7, 0.1, 3e-40])
    exp_avg = torch.zeros(3)
    total = torch.zeros(3, dtype=torch.float64)
    for random in range(0, 1 << 16, 2):
        total += packing.unpack(packing.pack(exp_avg, exp_avg_sq, bits(3, random)))[1].double()
    torch.testing.assert_close(total / (1 << 15), exp_avg_sq.double(), rtol=1e-12, atol=0)


@given(st.lists(st.floats(), min_size=1), st.lists(st.floats(), min_size=1))
def test_pack_doubles(first, second):
    n = min(len(first), len(second))
    exp_avg, exp_avg_sq = (torch.tensor(v[:n], dtype=torch.float64) for v in (first, second))
    packed = packing.pack(exp_avg, exp_avg_sq, None)
    assert packed.dtype == torch.float64
    for found, exact in zip(packing.unpack(packed), (exp_avg, exp_avg_sq), strict=True):
        assert found.dtype == torch.float64
        assert same(found.float(), exact.float())


# arithmetic


@given(FINITE, FINITE, FINITE)
def test_fused_rounds_once(a, b, c):
    n = min(len(a), len(b), len(c))
    a, b, c = (floats(v[:n]) for v in (a, b, c))
    exact = a.double() * b.double() + c.double()  # the product is exact, and the sum nearly
    assert torch.equal(precise.fused(a, b, c), exact.float())
    assert torch.equal(precise.fused(a[0].item(), b, c), precise.fused(a[0].expand(n), b, c))
