"""Moments that are coded in blocks, in the reference, beside plain Python."""

import math

import pytest
import torch
from formats_of_floats import FINITE, FLOATS, UNIT, bits, floats
from hypothesis import given
from hypothesis import strategies as st
from oracles.adam_formats import coded, numbers

from memsave_ext.adam import blocks
from memsave_ext.adam.formats import STATE_FORMATS
from memsave_ext.adam.precise import fused

CODED = {row.name: row.codes for row in STATE_FORMATS if row.codes}
every_code = pytest.mark.parametrize("of", CODED.values(), ids=CODED)
any_code = st.sampled_from(list(CODED.values()))


def levels_of(of, root):
    return of.bits if root else of.bits - 1


def in_blocks(of, values, random=None, root=False):
    """As read again after values were stored."""
    x = floats(values) if isinstance(values, list) else values
    random = bits(x.numel()) if random is None else random
    name = "exp_avg_sq" if root else "exp_avg"
    x = blocks.without_lost({name: x})[name]
    encode = blocks.encode_exp_avg_sq if root else blocks.encode_exp_avg
    decode = blocks.decode_exp_avg_sq if root else blocks.decode_exp_avg
    codes, scale = encode(x, random, of)
    assert codes.dtype == torch.uint8 and codes.shape == x.shape
    assert scale.dtype == torch.float32 and scale.shape == (-(-x.numel() // of.block),)
    return decode(codes, scale, of)


@every_code
@pytest.mark.parametrize("root", [False, True])
def test_numbers_of_codes(of, root):
    levels = levels_of(of, root)
    numbers = blocks._numbers(levels, of.ratio)
    assert numbers[0] == 0 and numbers[-1] == pytest.approx(1, rel=UNIT)
    steps = numbers.diff()
    assert (steps > 0).all()
    assert (steps.diff() > -1e-7).all()  # convex
    for level in range(1, levels):  # of each level's top a part is the top of the one before
        top = numbers[(2 << level) - 1].double()
        assert top == pytest.approx(float(of.ratio) ** (level + 1 - levels), rel=1e-6)
    codes = torch.arange(1 << levels)
    torch.testing.assert_close(
        blocks._codes(numbers, levels, of.ratio), codes.float(), rtol=0, atol=1e-4
    )


@every_code
@pytest.mark.parametrize("root", [False, True])
def test_codes_are_the_oracles(of, root):
    """But where the exact one is nearly an integer: floats are rounded."""
    levels, generator = levels_of(of, root), torch.Generator().manual_seed(3)
    exact = [float(number) for number in numbers(levels, of.ratio)]
    table = blocks._numbers(levels, of.ratio)
    torch.testing.assert_close(table, floats(exact), rtol=4 * UNIT, atol=0)
    x = torch.rand(2 * of.block, generator=generator) ** 2
    random = bits(x.numel())
    encode = blocks.encode_exp_avg_sq if root else blocks.encode_exp_avg
    codes, scale = encode(x.square() if root else x, random, of)
    x = x.square().sqrt() if root else x
    checked = 0
    for i, (value, code, drawn) in enumerate(zip(x, codes, random, strict=True)):
        expected = coded(value.item(), scale[i // of.block].item(), drawn.item(), levels, of.ratio)
        if root and expected < 1:
            assert code == 1
        elif abs(expected - round(expected)) > 1e-4 or expected == len(exact) - 1:
            assert code == math.floor(expected)
            checked += 1
    assert checked > 0.8 * x.numel()


@pytest.mark.parametrize("root", [False, True])
def test_where_lines_of_8_bits_meet_an_exponent_tells_the_level(root):
    """Kernels look levels up by exponents; the largest or the smallest of all lines is the same."""
    of = CODED["8bit"]
    levels = levels_of(of, root)
    start, step, offset, inverse = floats(blocks._lines(levels, of.ratio)).unbind(1)
    codes = torch.arange(1, 1 << levels)
    level = codes.double().log2().floor().int()
    by_level = fused(step[level], codes.float(), start[level])
    assert torch.equal(by_level, blocks._numbers(levels, of.ratio)[1:])
    for top in range(1, levels):
        middle = floats([float(of.ratio) ** (top + 1 - levels)]).view(torch.int32)
        near = (middle + torch.arange(-5000, 5000)).to(torch.int32).view(torch.float32)
        near = near[near <= 1]
        exponent = near.frexp().exponent - 1  # of 1: 0, of numbers from a half on: -1
        below = torch.where(exponent < 0, (-exponent - 1) // 3, 0)
        level = (levels - 1 - below).clamp(min=1)
        by_level = fused(inverse[level], near, offset[level])
        assert torch.equal(by_level, blocks._codes(near, levels, of.ratio))


@every_code
@pytest.mark.parametrize("root", [False, True])
def test_codes_rise_with_numbers(of, root):
    levels = levels_of(of, root)
    numbers = torch.cat([torch.linspace(0, 1, 100_001), torch.logspace(-9, 0, 10_001)]).sort()[0]
    codes = blocks._codes(numbers, levels, of.ratio)
    assert (codes.diff() >= 0).all()
    assert codes[0] == 0 and codes[-1] == (1 << levels) - 1


@every_code
@pytest.mark.parametrize("root", [False, True])
@pytest.mark.parametrize("random", [0, 0x8000, 0xFFFF])
@pytest.mark.parametrize("scale", [1.0, 1e-30, 3e8])
def test_blocks_are_exact_at_zero_and_the_maximum(of, root, random, scale):
    torch.manual_seed(1)
    x = torch.rand(3 * of.block + 5) * scale
    x[::7] = 0
    x[-5:] = 0  # a whole block
    tops = [10, of.block, 2 * of.block + 7]
    x[tops] = scale * torch.tensor([1.0, 2.0, 3.0])
    read = in_blocks(of, x, bits(x.numel(), random), root)
    assert not read[::7].any() and not read[-5:].any()
    torch.testing.assert_close(read[tops], x[tops], rtol=3 * UNIT, atol=0)


@pytest.mark.each_value
@every_code
@pytest.mark.parametrize("root", [False, True])
def test_blocks_are_near_and_unbiased(of, root):
    """Within one of a level's equal steps, which go to its top from that of the level before."""
    torch.manual_seed(2)
    x = torch.rand(16 * of.block) ** 3  # more of the small
    x = x if root else x * torch.randn(x.shape).sign()
    exact = x.sqrt() if root else x
    of_top = exact.abs().view(-1, of.block)
    tops = of_top.amax(1, keepdim=True)
    of_top = of_top / tops
    levels = levels_of(of, root)
    level = (levels - 1 + (of_top.double().log() / math.log(of.ratio)).ceil()).clamp(min=0)
    step = tops * (1 - 1 / of.ratio) * float(of.ratio) ** (level - levels + 1) / 2**level
    step = torch.where(level == 0, tops * float(of.ratio) ** (1 - levels), step).view(-1) * 1.0001
    draws = 200
    seen = torch.zeros_like(step)
    for seed in range(draws):
        read = in_blocks(of, x, bits(x.numel(), seed=seed), root)
        error = (read.sqrt() if root else read) - exact
        assert (error.abs() <= step).all()
        seen += error
    if root:  # what is less than the code of 1 gets that
        clear = (of_top >= float(of.ratio) ** (1 - levels)).view(-1)
        assert clear.double().mean() > 0.9
        seen, step = seen[clear], step[clear]
    assert (seen.abs() / draws < 6 * step / 2 / math.sqrt(draws)).all()
    assert abs((seen / step).mean() / draws) < 4 / 2 / math.sqrt(draws * x.numel())


@given(FINITE.filter(any), st.sampled_from([0, 1, 0xFFFF]), any_code)
def test_no_root_but_zero_is_zero(values, random, of):
    x = floats(values).square()
    x = x[x.isfinite()]
    codes, _ = blocks.encode_exp_avg_sq(x, bits(x.numel(), random), of)
    assert torch.equal(codes == 0, x == 0)


@given(FLOATS, st.integers(0, 0xFFFF), any_code)
def test_exp_avg_in_a_block(values, random, of):
    x = floats(values)
    read = in_blocks(of, x, bits(x.numel(), random))
    lost = ~(x.abs() < 2.0**63)
    assert not read[lost].any()
    x = torch.where(lost, 0, x)
    top = x.abs().max()
    assert (read.abs() <= top).all()
    assert ((read.sign() == x.sign()) | (read == 0)).all()
    if top >= 1.2e-38:  # of what is less the inverse may be no number
        assert (
            (read - x).abs().double()
            <= top.double() * (1 - 1 / of.ratio) / 2 ** (of.bits - 2) * 1.0001
        ).all()


@every_code
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 3.4e38, 2.0**126])
@pytest.mark.parametrize("root", [False, True])
def test_what_is_too_large_is_lost_alone(of, bad, root):
    x = torch.rand(3 * of.block)
    x[of.block + 3] = 0
    expected = in_blocks(of, x, root=root)
    x[of.block + 3] = bad
    assert torch.equal(in_blocks(of, x, root=root), expected)


@every_code
@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e38])
def test_both_moments_are_lost(of, bad):
    ones = torch.ones(of.block)
    spoiled = ones.clone()
    spoiled[7] = bad
    for moments in (
        {"exp_avg": spoiled, "exp_avg_sq": ones},
        {"exp_avg": ones, "exp_avg_sq": spoiled},
    ):
        kept = blocks.without_lost(moments)
        for values in kept.values():
            assert values[7] == 0 and values.sum() == of.block - 1


@given(st.integers(1, 3 * 256), st.booleans(), any_code)
def test_a_part_of_a_block_is_as_one_with_zeros(numel, root, of):
    torch.manual_seed(numel)
    x = torch.rand(numel)
    padded = torch.nn.functional.pad(x, (0, -numel % of.block))
    read = in_blocks(of, padded, root=root)
    assert torch.equal(in_blocks(of, x, root=root), read[:numel])
    assert not read[numel:].any()
