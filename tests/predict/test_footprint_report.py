"""What footprint() shows, and what it refuses."""

import io
import json

import pytest
import torch
from footprints import FP64, make_model
from torch import nn

import memsave_ext as ms
from memsave_ext.shared import table

# what cannot be predicted


def test_unpredicted():
    model = nn.Linear(3, 4)

    def footprint(kind, **options):
        return ms.memory.footprint(model, kind(model.parameters(), **options))

    lbfgs = footprint(torch.optim.LBFGS)
    assert not lbfgs.predicted
    with pytest.raises(
        RuntimeError, match="LBFGS needs in mode 'for-loop' cannot be predicted: .*closure"
    ):
        _ = lbfgs.expected
    graph = footprint(torch.optim.Adam, differentiable=True)
    assert not graph.predicted and "differentiable=True" in graph.unpredicted["for-loop"]
    clipped = footprint(ms.AdamW, clip_global_norm=1.0)
    assert "clip_global_norm" in clipped.unpredicted["in backward"]
    assert clipped.expected == clipped.predicted["after backward"]
    double = ms.memory.footprint(nn.Linear(3, 4, dtype=FP64))
    assert "float32, float16 and bfloat16" in double.unpredicted["in backward, state_dtype=8bit"]
    complex_ones = ms.memory.footprint(nn.Linear(3, 4, dtype=torch.complex64))
    assert "floating-point" in complex_ones.unpredicted["fused"]
    assert complex_ones.predicted["foreach"].between.optimizer.bytes == 2 * 16 * 8 + 2 * 4


def test_nothing_to_train():
    model = nn.BatchNorm1d(3).requires_grad_(False)
    footprint = ms.memory.footprint(model)
    assert {p.peak for p in footprint.predicted.values()} == {6 * 4 + 6 * 4 + 8, 6 * 2 + 6 * 2 + 8}
    assert ms.memory.footprint(nn.ReLU()).expected.peak == 0
    footprint.report(file=io.StringIO())


def test_errors():
    model, other = nn.Linear(3, 4), nn.Linear(4, 5)
    footprint = ms.memory.footprint
    with pytest.raises(TypeError, match="model must be a torch.nn.Module, got list"):
        footprint(list(model.parameters()))
    with pytest.raises(TypeError, match="optimizer must be a torch.optim.Optimizer or None, got"):
        footprint(model, 0.1)
    with pytest.raises(TypeError, match="in_backward must be True, False or None, got 1"):
        footprint(model, in_backward=1)
    both = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1)
    with pytest.raises(ValueError, match=r"2 of 4 parameters.*shape \[5, 4\].*ModuleList"):
        footprint(model, both)
    assert footprint(nn.ModuleList([model, other]), both).expected
    with pytest.raises(ValueError, match="in_backward=True is only for Adam and AdamW.*got SGD"):
        footprint(model, torch.optim.SGD(model.parameters()), in_backward=True)
    taken = ms.in_backward(torch.optim.SGD(model.parameters()))
    assert footprint(model, taken).mode == footprint(model, taken, in_backward=True).mode
    with pytest.raises(ValueError, match="no shape for 0.weight yet"):
        footprint(nn.Sequential(nn.LazyLinear(3)))
    with pytest.raises(ValueError, match="depth must be None or an int of at least 0, got -1"):
        footprint(model).report(depth=-1, file=io.StringIO())


def test_report(monkeypatch):
    monkeypatch.setattr(table, "_rich", lambda: None)
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Sequential(nn.Linear(64, 2)))
    file = io.StringIO()
    footprint = ms.memory.footprint(model, ms.AdamW(model.parameters(), amsgrad=True))
    footprint.report(depth=1, file=file)
    lines = [line.split() for line in file.getvalue().splitlines()]
    assert ["Now"] in lines
    assert ["int64", "-", "8", "B", "(1)", "-", "-", "8", "B"] in lines
    title = "Expected at the peak of a step: memsave_ext.AdamW, after backward;"
    assert title in file.getvalue()
    names = [line[0] for line in lines if line]
    assert names.count("2") == 1 and "2.0" not in names
    (row,) = [line for line in file.getvalue().splitlines() if line.startswith("after backward")]
    assert table.format_bytes(footprint.expected.peak) in row and "(expected)" in row
    assert "8bit" in file.getvalue().split("Not predicted")[1]
    everything = io.StringIO()
    footprint.report(depth=None, file=everything)
    assert "2.0" in everything.getvalue().split()


def test_json(tmp_path):
    model = make_model()
    footprint = ms.memory.footprint(model, torch.optim.Adam(model.parameters(), amsgrad=True))
    path = tmp_path / "footprint.json"
    text = footprint.to_json(path)
    loaded = json.loads(text)
    assert json.loads(path.read_text()) == loaded
    assert loaded["unpredicted"] == footprint.unpredicted
    assert loaded["now"]["bytes"] == footprint.now.bytes
    mode = loaded["predicted"][loaded["mode"]]
    assert mode["peak"] == footprint.expected.peak
    assert mode["at_peak"]["by_module"]["4.inner"]["parameters"] == {"elements": 20, "bytes": 80}
    assert set(json.loads(footprint.to_json(depth=0))["now"]["by_module"]) == {""}
