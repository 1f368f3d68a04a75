"""The tables of formats: Python's, the kernels', the docs', and what is really stepped."""

import itertools
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import memsave_ext as ms
from memsave_ext import _native
from memsave_ext.adam import formats
from memsave_ext.adam.formats import COMPUTED, PARAM_FORMATS, STATE_FORMATS
from memsave_ext.adam.rules import ADAM, AMSGRAD, LION, MOMENTUM, RULES, SGD, is_adam

DOCS = Path(__file__).resolve().parents[2] / "docs"
NUMEL = 4096  # enough for blocks
needs_native = pytest.mark.skipif(not _native.available, reason="needs the native part")


def exists(param, bf16, states, rule):
    """What csrc/adam/formats.h says of a combination, by Python's rows."""
    if param not in states.params or (bf16.name is not None and param != torch.bfloat16):
        return False
    if rule is AMSGRAD and not states.amsgrad:
        return False
    if not rule.moments:
        return states.name == "as_param"
    return len(rule.moments) > 1 or not states.joint


KINDS = {
    ADAM: (ms.Adam, {}),
    AMSGRAD: (ms.Adam, {"amsgrad": True}),
    SGD: (ms.SGD, {}),
    MOMENTUM: (ms.SGD, {"momentum": 0.9}),
    LION: (ms.Lion, {}),
}
COMBINATIONS = [
    combination
    for combination in itertools.product(COMPUTED, PARAM_FORMATS, STATE_FORMATS, RULES)
    if exists(*combination)
]


def names(param, bf16, states, rule):
    return param, bf16.name or "", states.name, rule.name


def optimizer_of(param, bf16, states, rule):
    """Of one parameter, with states in this format, whichever way it has come."""
    weight = nn.Parameter(torch.randn(NUMEL).to(param))
    kind, own = KINDS[rule]
    optimizer = kind([weight], **own, in_backward=True, bf16=bf16.name, state_dtype=states.option)
    weight.sum().backward()
    optimizer.step()
    if states.option is None:  # a loaded state keeps its dtype
        state = optimizer.state[weight]
        for name in rule.moments:
            state[name] = state[name].to(states.dtype or param)
    return weight, optimizer


@pytest.mark.parametrize("combination", COMBINATIONS, ids=lambda c: "-".join(map(str, names(*c))))
def test_what_exists_is_stepped(combination):
    """On CPUs. CUDA's tables are filled from the same rows by the same function, dispatch.h's."""
    param, bf16, states, rule = combination
    weight, optimizer = optimizer_of(param, bf16, states, rule)
    before = weight.detach().clone()
    (3 * weight).sum().backward()
    optimizer.step()
    state = optimizer.state.get(weight, {})
    if rule.moments:
        assert formats.key_of_state(state) == (states.dtype or param, states.joint)
    assert all((name in state) != states.joint for name in rule.moments)
    counts = is_adam(rule) or bf16.at_random or bool(states.at_random or states.codes)
    assert state.get("step") == (2 if counts else None)
    low_part = state.get("param_rest")
    assert (None if low_part is None else low_part.dtype) == bf16.low_part
    moved = not torch.equal(weight, before)
    assert moved or low_part is not None or param in (torch.bfloat16, torch.float16)


def test_what_does_not_exist_is_refused_before_anything_changes():
    weight, optimizer = optimizer_of(torch.float32, *_rows(None, "float32"), ADAM)
    state = optimizer.state[weight]
    for name in ("exp_avg", "exp_avg_sq"):
        state[name] = state[name].to(torch.float16)
    before = weight.detach().clone()
    weight.grad = torch.ones_like(weight)
    with pytest.raises(RuntimeError, match=re.escape("the state 'exp_avg' of a")):
        optimizer.step()
    assert state["step"] == 1 and torch.equal(weight, before)


def _rows(bf16, states):
    by_name = {row.name: row for row in STATE_FORMATS}
    return formats.param_format(bf16), by_name[states]


@needs_native
def test_kernels_are_compiled_for_what_exists():
    expected = [names(*combination) for combination in COMBINATIONS]
    found = _native.module.adam_combinations()
    assert len(found) > 100 and sorted(found, key=str) == sorted(expected, key=str)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("bf16", ""), ("bf16", "Split"), ("bf16", "nearest"), ("bf16", torch.bfloat16),
        ("state_dtype", "bfloat16"), ("state_dtype", "as_param"), ("state_dtype", "8 bit"),
        ("state_dtype", torch.float16), ("state_dtype", torch.uint8), ("state_dtype", 8),
    ],
)  # fmt: skip
def test_an_unknown_format_is_an_error_everywhere(option, value):
    with pytest.raises(ValueError, match=f"{option} must be "):
        ms.Adam([nn.Parameter(torch.ones(3).bfloat16())], **{option: value})
    weight = nn.Parameter(torch.ones(3).bfloat16())
    optimizer = ms.Adam([weight])
    weight.sum().backward()
    optimizer.param_groups[0][option] = value  # between steps
    with pytest.raises(ValueError, match=f"{option} must be "):
        optimizer.step()
    with pytest.raises(ValueError, match=f"{option} must be "):
        optimizer.fp32_parameters() if option == "bf16" else formats.state_option({option: value})
    assert not optimizer.state[weight]


def table(page, option):
    """The first two columns of the table of an option's values."""
    path = DOCS / "adam" / page
    if not path.is_file():
        pytest.skip("no docs")
    text = path.read_text(encoding="utf-8")
    rows = re.search(rf"^\| `{option}=` .*\n\| :-.*\n((?:\|.*\n)+)", text, re.MULTILINE)[1]
    return [tuple(cell.strip(" `") for cell in row.split("|")[1:3]) for row in rows.splitlines()]


def shown(value):
    return f'"{value}"' if isinstance(value, str) else str(value)


def test_the_docs_table_of_parameters():
    expected = [
        (shown(row.name), str(row.low_part.itemsize if row.low_part else 0))
        for row in PARAM_FORMATS
    ]
    assert table("bfloat16.md", "bf16") == expected


def bytes_per_element(row):
    """Of both moments and their scales."""
    if row.codes is None:
        return 2 * (row.dtype or torch.bfloat16).itemsize
    return 2 * (row.codes.bits / 8 + torch.float32.itemsize / row.codes.block)


def test_the_docs_table_of_states():
    made = [row for row in STATE_FORMATS if row.option is not None or row.dtype]
    expected = [(shown(row.option), f"{bytes_per_element(row):.3g}") for row in made]
    assert table("states.md", "state_dtype") == expected


def test_cuda_has_a_table_for_each_format_of_states():
    """Each in one source, filled from all combinations with them."""
    csrc = DOCS.parent / "csrc" / "adam"
    if not csrc.is_dir():
        pytest.skip("no sources")
    text = Path(formats.__file__).with_name("format_rows.h").read_text()
    rows = re.findall(r"ROW\((k\w+)", text.partition("STATE_FORMATS(ROW)")[2])
    assert len(rows) == len(STATE_FORMATS)
    sources = [path.read_text() for path in (csrc / "cuda").glob("step_*.cu")]
    tables = [re.findall(r"steps_with<StateFormat::(k\w+)>\(\) \{", text) for text in sources]
    assert all(len(table) == 1 for table in tables)
    assert sorted(row for (row,) in tables) == sorted(rows)
    assert all(
        text.count(f"StateFormat::{row}") > 1 for text, (row,) in zip(sources, tables, strict=True)
    )
