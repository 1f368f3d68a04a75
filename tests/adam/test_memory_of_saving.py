"""What fits while it trains can be saved and loaded: no more memory is taken for it than what is
kept afterwards, and a few tensors of one parameter."""

import copy
import io

import pytest
import torch
from torch import nn

import memsave_ext as ms
from memsave_ext.adam import in_place
from memsave_ext.adam.blocks import codes_from_saved
from memsave_ext.store.mapped import is_mapped

pytestmark = pytest.mark.skipif(
    not ms._native.available, reason="a track in pure Python sees an allocation when it is over"
)
NUMEL, COUNT = 1 << 21, 4
ONE = NUMEL * 4
MODES = {
    "float32": {},
    "bfloat16 states": {"state_dtype": torch.bfloat16},
    "8 bits": {"state_dtype": "8bit"},
    "4 bits": {"state_dtype": "4bit"},
    "split": {"bf16": "split", "state_dtype": "8bit"},
}


def stepped(kind, **options):
    torch.manual_seed(0)
    dtype = torch.bfloat16 if "bf16" in options else torch.float32
    params = [nn.Parameter(torch.randn(NUMEL, dtype=dtype)) for _ in range(COUNT)]
    optimizer = kind(params, lr=0.01, **options)
    for p in params:
        p.grad = torch.randn_like(p)
    optimizer.step()
    optimizer.zero_grad()
    return params, optimizer


def tensors(states):
    states = [codes_from_saved(state) for state in states.values()]
    return [v for state in states for v in state.values() if isinstance(v, torch.Tensor)]


def nbytes(states):
    return sum(t.nbytes for t in tensors(states))


def taken(call):
    with ms.memory.track() as track:
        call()
    return track.peak


@pytest.mark.each_value
@pytest.mark.parametrize("kind", [ms.AdamW, ms.SGD, ms.Lion])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.without(  # Adam's alone
    case=lambda c: c["kind"] is not ms.AdamW and MODES[c["mode"]].get("state_dtype") == "4bit"
)
def test_loading_its_own(kind, mode):
    options = MODES[mode] | ({"momentum": 0.9} if kind is ms.SGD else {})
    _, saved = stepped(kind, **options)
    state_dict = copy.deepcopy(saved.state_dict())
    params, optimizer = stepped(kind, **options)
    optimizer.state.clear()
    # Those of float32 are shared, as torch does.
    kept = 0 if mode == "float32" else nbytes(state_dict["state"])
    assert taken(lambda: optimizer.load_state_dict(state_dict)) <= kept + ONE
    for index, state in enumerate(state_dict["state"].values()):
        for name, value in codes_from_saved(state).items():
            ours = optimizer.state[params[index]][name]
            assert ours is value or torch.equal(ours, value)


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "split"])
def test_loading_torchs(mode):
    _, torchs = stepped(torch.optim.AdamW)
    state_dict = torchs.state_dict()
    _, optimizer = stepped(ms.AdamW, **MODES[mode])
    kept = 0 if mode == "float32" else nbytes(optimizer.state)
    optimizer.state.clear()
    assert taken(lambda: optimizer.load_state_dict(state_dict)) <= kept + 2 * ONE


@pytest.mark.parametrize("mode", MODES)
def test_saving_and_copying(mode):
    _, optimizer = stepped(ms.AdamW, **MODES[mode])
    assert taken(optimizer.state_dict) == 0
    weights = sum(p.nbytes for p in optimizer.param_groups[0]["params"])
    copied = taken(lambda: copy.deepcopy(optimizer))
    assert copied <= nbytes(optimizer.state) + weights + 2 * ONE


def test_states_that_are_saved_as_torchs_take_no_memory(monkeypatch, tmp_path):
    """Of an optimizer that ``fit`` has given small states."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    params, optimizer = stepped(torch.optim.AdamW)
    undo = in_place.become(optimizer, ms.AdamW, state_dtype="8bit")
    expected = optimizer.to_fp32_state_dict(ms.AdamW.state_dict(optimizer))
    found = []
    assert taken(lambda: found.append(optimizer.state_dict())) <= 4 * ONE
    (state_dict,) = found
    assert all(is_mapped(t) for t in tensors(state_dict["state"]) if t.dim())
    file = io.BytesIO()
    torch.save(state_dict, file)
    for one in (state_dict, torch.load(io.BytesIO(file.getvalue()))):
        for state, other in zip(one["state"].values(), expected["state"].values(), strict=True):
            assert state.keys() == other.keys()
            assert all(torch.equal(state[name], other[name]) for name in state)
    plain = torch.optim.AdamW(params)
    plain.load_state_dict(state_dict)
    undo()
    for p in params:
        p.grad = torch.ones_like(p)
    plain.step()


def test_states_that_are_saved_as_torchs_where_no_file_can_be_made(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "none"))
    _, optimizer = stepped(torch.optim.AdamW)
    in_place.become(optimizer, ms.AdamW, state_dtype="8bit")
    state = optimizer.state_dict()["state"][0]
    assert state["exp_avg"].dtype == torch.float32 and not is_mapped(state["exp_avg"])
