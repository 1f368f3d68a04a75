"""Snapshots of torch's CUDA allocator, against a model of it that knows the true course."""

import io
import os
import pickle
import random
import sys

import pytest
import torch
from oracles.allocator import SEGMENT, Allocator, frames

import memsave_ext as ms
from memsave_ext.memory.snapshot import _of_device, plot_snapshot, save_snapshot
from memsave_ext.memory.snapshot_file import (
    BEFORE,
    NO_PYTHON,
    NO_STACK,
    histories,
    line_of,
    read_snapshot,
)
from memsave_ext.shared import table

CUDA = torch.device("cuda", 0)
MODEL = ("/home/me/net.py", 12, "forward")
TRAIN = ("/home/me/train.py", 3, "main")
LINEAR = ("/usr/lib/python3.11/site-packages/torch/nn/modules/linear.py", 134, "forward")
CPP = ("/pytorch/aten/src/ATen/native/Linear.cpp", 80, "at::linear")


def at(line):
    return frames(LINEAR, ("/home/me/net.py", line, "forward"), TRAIN)


def busy(seed, device=0):
    """An allocator after some hundred random calls, streams that wait and emptied caches."""
    rng, allocator, kept, waiting = random.Random(seed), Allocator(device), [], []
    for _ in range(200):
        choice = rng.random()
        if choice < 0.55 or not kept:
            size = rng.choice((1, 100, 513, 70_000, SEGMENT + 1))
            kept.append(allocator.alloc(size, at(rng.randrange(12))))
        elif choice < 0.9:
            address = kept.pop(rng.randrange(len(kept)))
            waits = rng.random() < 0.3
            allocator.free(address, completed=not waits)
            waiting += [address] * waits
        elif waiting:
            allocator.complete(waiting.pop(0))
        else:
            allocator.empty_cache()
    return allocator


def write(snapshot, path):
    path.write_bytes(pickle.dumps(snapshot))
    return path


# what a snapshot tells


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("last", [None, 150, 1, 0])
def test_the_course_is_the_true_one(seed, last):
    allocator = busy(seed)
    (history,) = histories(allocator.snapshot(last))
    first = 0 if last is None else len(allocator.events) - last
    assert history.allocated.tolist() == allocator.allocated[first:]
    assert history.reserved.tolist() == allocator.reserved[first:]
    assert history.unexplained == 0
    lines = [history.of_line(line) for line in history.lines]
    assert torch.equal(torch.stack(lines).sum(0), history.allocated)
    for row in range(0, len(history.allocated), 40):
        held = history.by_line(row)
        assert sum(held.values()) == history.allocated[row]
        assert list(held.values()) == sorted(held.values(), reverse=True)
        assert held == {n: int(c[row]) for n, c in zip(history.lines, lines, strict=True) if c[row]}


def test_lines_hold_what_they_allocated():
    allocator = Allocator()
    early = allocator.alloc(1000, at(1))
    late = allocator.alloc(300, at(2))
    allocator.alloc(40, at(2))
    allocator.alloc(5, None)
    allocator.free(early)
    allocator.free(late)
    (history,) = histories(allocator.snapshot())
    assert history.by_line(5) == {
        "net.py:1 in forward": 1000,
        "net.py:2 in forward": 340,
        NO_STACK: 5,
    }
    assert history.by_line(9) == {"net.py:2 in forward": 40, NO_STACK: 5}
    # A free's stack is not who allocated; what is still there says who it was.
    (history,) = histories(allocator.snapshot(last=4))
    assert history.by_line(0) == {BEFORE: 1300, "net.py:2 in forward": 40, NO_STACK: 5}


def test_a_block_that_waits_for_a_stream_counts():
    allocator = Allocator()
    address = allocator.alloc(1000, at(1))
    allocator.free(address, completed=False)
    (history,) = histories(allocator.snapshot())
    assert history.allocated.tolist() == [0, 0, 1000, 1000]
    allocator.complete(address)
    (history,) = histories(allocator.snapshot())
    assert history.allocated.tolist() == [0, 0, 1000, 1000, 0]


def test_expandable_segments():
    """They grow and shrink in place: the snapshot has one segment, the trace its pieces."""
    snapshot = {
        "segments": [{"device": 0, "address": 0, "total_size": 4 * SEGMENT, "blocks": []}],
        "device_traces": [
            [
                {"action": "segment_map", "addr": 0, "size": 4 * SEGMENT},
                {"action": "segment_map", "addr": 4 * SEGMENT, "size": SEGMENT},
                {"action": "segment_unmap", "addr": 4 * SEGMENT, "size": SEGMENT},
            ]
        ],
    }
    (history,) = histories(snapshot)
    assert [size // SEGMENT for size in history.reserved.tolist()] == [0, 4, 5, 4]
    assert history.time is None  # older torch writes none


def test_actions_left_out_of_the_trace():
    """``_record_memory_history(skip_actions=...)``"""
    allocator = busy(0)
    snapshot = allocator.snapshot()

    def without(*actions):
        trace = [e for e in snapshot["device_traces"][0] if e["action"] not in actions]
        return histories({**snapshot, "device_traces": [trace]})[0]

    true = allocator.allocated
    assert max(without("free_requested").allocated) == max(true)
    waiting = sum(size for size, _, waits in allocator.live.values() if waits)
    only_requested = without("free_completed")
    assert only_requested.allocated[-1] == true[-1] - waiting
    assert only_requested.unexplained == -waiting
    assert without("free_requested", "free_completed").unexplained > 0


def test_other_events_change_nothing():
    allocator = busy(1)
    snapshot = allocator.snapshot()
    stamp = snapshot["device_traces"][0][50]["time_us"]
    more = [
        {"action": "oom", "device_free": 77, "size": 1 << 40, "stream": 0, "time_us": stamp},
        {"action": "snapshot", "addr": 0, "size": 0, "stream": 0, "time_us": stamp},
        {"action": "of_the_future", "addr": 3, "size": 9, "stream": 0, "time_us": stamp},
    ]
    snapshot["device_traces"][0][50:50] = more
    (history,) = histories(snapshot)
    true = allocator.allocated
    assert history.allocated.tolist() == [*true[:51], *[true[50]] * 3, *true[51:]]
    assert history.out_of_memory == [(51, 1 << 40)]
    assert history.time.tolist() == sorted(history.time.tolist())
    assert history.time[-1] == pytest.approx(1e-5 * (len(allocator.events) - 1))


@pytest.mark.parametrize(
    ("stack", "line"),
    [
        ((CPP, LINEAR, MODEL, TRAIN), "net.py:12 in forward"),
        (
            (LINEAR, ("/venv/lib/python3.12/site-packages/vit/layers.py", 7, "f")),
            "layers.py:7 in f",
        ),
        ((("/home/me/pytorch/torch/nn/functional.py", 5, "relu"), MODEL), "net.py:12 in forward"),
        ((("/usr/lib/python3.10/contextlib.py", 81, "inner"), MODEL), "net.py:12 in forward"),
        ((("<string>", 1, "f"), ("<frozen runpy>", 8, "g"), MODEL), "net.py:12 in forward"),
        ((("/home/me/torch/my.py", 4, "f"), TRAIN), "my.py:4 in f"),
        ((("/home/me/torch/nn/my.py", 4, "f"), TRAIN), "my.py:4 in f"),
        ((("/home/me/memsave_ext/memory/my.py", 4, "f"), TRAIN), "my.py:4 in f"),
        (
            (("/c/memsave_ext/memsave_ext/adam/optimizer.py", 9, "step"), TRAIN),
            "train.py:3 in main",
        ),
        (((ms.memory.__file__, 9, "step"), (torch.__file__, 2, "g"), TRAIN), "train.py:3 in main"),
        (
            (("/x/site-packages/memsave_ext/adam/optimizer.py", 9, "step"), TRAIN),
            "train.py:3 in main",
        ),
        ((("/tmp/ipykernel_7/12345.py", 2, "<module>"),), "12345.py:2 in <module>"),
        ((("/home/me/memsave_ext/benchmarks/adam.py", 1, "f"), TRAIN), "adam.py:1 in f"),
        ((CPP, LINEAR), "linear.py:134 in forward"),
        ((CPP,), NO_PYTHON),
    ],
)
def test_the_innermost_line_of_the_users(stack, line):
    assert line_of(frames(*stack)) == line


# files that are no snapshots


class Malicious:
    def __init__(self, flag):
        self.flag = str(flag)

    def __reduce__(self):
        return os.mkdir, (self.flag,)


@pytest.mark.parametrize("protocol", [0, 2, 5])
def test_a_file_runs_no_code(tmp_path, protocol):
    flag = tmp_path / "flag"
    for content in (Malicious(flag), {"segments": [Malicious(flag)], "device_traces": []}):
        path = tmp_path / "malicious.pickle"
        path.write_bytes(pickle.dumps(content, protocol=protocol))
        with pytest.raises(
            ValueError, match=r"malicious.pickle cannot be read.*asks for \w+.mkdir"
        ):
            plot_snapshot(path)
        assert not flag.exists()
    pickle.loads(path.read_bytes())  # it would have
    assert flag.exists()


@pytest.mark.parametrize(
    "content",
    [
        pickle.dumps(torch.Size([3])),
        pickle.dumps(len),
        b"cos\nsystem\n(S'true'\ntR.",
        b"(S'true'\nios\nsystem\n.",
        b"",
        b"\x80\x04.",
        b"not a pickle",
        pickle.dumps({"segments": [1, 2, 3]})[:-4],
    ],
)
def test_files_that_are_no_plain_pickles(tmp_path, content):
    path = tmp_path / "some.pickle"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="some.pickle cannot be read as a snapshot: "):
        read_snapshot(path)


@pytest.mark.parametrize(
    "content", [None, 3, [], {}, {"segments": []}, {"segments": 1, "device_traces": []}]
)
def test_pickles_that_are_no_snapshots(tmp_path, content):
    path = write(content, tmp_path / "some.pickle")
    with pytest.raises(
        ValueError, match="some.pickle is no snapshot.*'segments' and 'device_traces'"
    ):
        read_snapshot(path)


@pytest.mark.parametrize(
    "snapshot",
    [
        {"segments": [{}], "device_traces": []},
        {"segments": [], "device_traces": [3]},
        {"segments": [], "device_traces": [[{"action": "alloc"}]]},
        {"segments": [], "device_traces": [[{"action": "alloc", "addr": 1, "size": "1"}]]},
        {
            "segments": [],
            "device_traces": [[{"action": "alloc", "addr": 1, "size": 1, "frames": 5}]],
        },
    ],
)
def test_entries_that_are_none(tmp_path, snapshot):
    with pytest.raises(
        ValueError, match="some.pickle has entries that differ from those that torch"
    ):
        plot_snapshot(write(snapshot, tmp_path / "some.pickle"))


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_snapshot(tmp_path / "none.pickle")


# pictures and summaries


def test_the_picture_and_its_summary(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(table, "_rich", lambda: None)
    allocator = busy(2)
    path = write(allocator.snapshot(), tmp_path / "snapshot.pickle")
    summary = plot_snapshot(path)
    assert summary.picture == tmp_path / "snapshot.png"
    assert summary.picture.read_bytes().startswith(b"\x89PNG")
    (found,) = summary.devices
    peak = allocator.allocated.index(max(allocator.allocated))
    assert (found.device, found.events) == (0, len(allocator.events))
    assert (found.peak, found.reserved_at_peak) == (
        max(allocator.allocated),
        allocator.reserved[peak],
    )
    assert found.peak_reserved == max(allocator.reserved)
    assert sum(found.at_peak.values()) == found.peak
    file = io.StringIO()
    summary.report(top=2, file=file)
    lines = file.getvalue().splitlines()
    assert lines[0].startswith(f"cuda:0: peak {table.format_bytes(found.peak)} allocated")
    for (line, size), row in zip(list(found.at_peak.items())[:2], lines[5:7], strict=True):
        assert line in row and table.format_bytes(size) in row
    assert not any(lines[7:])


def test_the_areas_are_the_lines(tmp_path):
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    from memsave_ext.memory.pictures.history import draw_history

    allocator = busy(3)
    (history,) = histories(allocator.snapshot())
    axes = Figure().add_subplot()
    draw_history(axes, history)
    areas = {a.get_label().rpartition(": ")[0]: a.get_paths()[0].vertices for a in axes.collections}
    peak = allocator.allocated.index(max(allocator.allocated))
    assert list(areas) == [*list(history.by_line(peak))[:7], "all other lines"]
    for row in range(len(history.allocated) - 1):
        between = float(history.time[row : row + 2].mean())
        if history.time[row] == history.time[row + 1]:
            continue
        bottom = 0
        for line, vertices in areas.items():
            starts, ends = vertices[:-1], vertices[1:]
            heights = starts[(starts[:, 0] < between) != (ends[:, 0] < between)][:, 1]
            assert heights.min() == bottom
            if line in history.lines:
                assert heights.max() - bottom == history.of_line(line)[row]
            bottom = heights.max()
        assert bottom == allocator.allocated[row]
    reserved = next(line for line in axes.lines if line.get_label().startswith("reserved"))
    assert reserved.get_ydata().tolist()[:-1] == allocator.reserved
    (marker,) = [line for line in axes.lines if line.get_gid() == "peak"]
    assert marker.get_ydata()[0] == max(allocator.allocated)


def test_long_traces_keep_their_peaks(tmp_path):
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    from memsave_ext.memory.pictures.history import draw_history

    size = [(i * 7919) % 1000 + 1 for i in range(5000)]
    trace = []
    for i, asked in enumerate(size):
        asked = 10**6 if i == 3333 else asked
        trace += [{"action": a, "addr": i, "size": asked} for a in ("alloc", "free_completed")]
    spike = [{"action": f"segment_{a}", "addr": 0, "size": 10**9} for a in ("alloc", "free")]
    trace[7005:7005] = spike  # not where a bin of the picture begins
    (history,) = histories({"segments": [], "device_traces": [trace]})
    axes = Figure().add_subplot()
    draw_history(axes, history)
    assert max(a.get_paths()[0].vertices[:, 1].max() for a in axes.collections) == 10**6
    (reserved,) = [line for line in axes.lines if line.get_label().startswith("reserved")]
    assert max(reserved.get_ydata()) == 10**9
    assert max(len(a.get_paths()[0].vertices) for a in axes.collections) < 50_000


def test_several_devices(tmp_path):
    pytest.importorskip("matplotlib")
    one, two = busy(0), busy(1, device=2)
    traces = [*one.snapshot()["device_traces"], [], two.events]
    segments = one.snapshot()["segments"] + two.snapshot()["segments"]
    path = write({"segments": segments, "device_traces": traces}, tmp_path / "s.pickle")
    summary = plot_snapshot(path, tmp_path / "all.svg")
    assert [(d.device, d.peak) for d in summary.devices] == [
        (0, max(one.allocated)),
        (2, max(two.allocated)),
    ]
    drawn = (tmp_path / "all.svg").read_text()
    assert "<!-- CUDA memory, cuda:0 -->" in drawn and "<!-- CUDA memory, cuda:2 -->" in drawn
    (found,) = plot_snapshot(path, tmp_path / "two.svg", device="cuda:2").devices
    assert found.device == 2
    assert "cuda:0" not in (tmp_path / "two.svg").read_text()
    for device, expected in ((2, 2), (torch.device("cuda", 2), 2), ("cuda", 0)):
        assert [h.device for h in _of_device(histories(read_snapshot(path)), device, path)] == [
            expected
        ]
    with pytest.raises(ValueError, match="device must be one of cuda:0, cuda:2, got 'cuda:1'"):
        plot_snapshot(path, device="cuda:1")


def test_without_history(tmp_path):
    """Recording was off, or of ``"state"``: there are only the blocks at the end."""
    pytest.importorskip("matplotlib")
    allocator = busy(0)
    path = write(allocator.snapshot(last=0), tmp_path / "s.pickle")
    summary = plot_snapshot(path)
    (found,) = summary.devices
    assert (found.events, found.peak) == (0, allocator.allocated[-1])
    assert BEFORE not in found.at_peak
    file = io.StringIO()
    summary.report(file=file)
    assert "no history" in file.getvalue()


def test_what_went_wrong_is_said(tmp_path):
    pytest.importorskip("matplotlib")
    trace = [
        {"action": "alloc", "addr": 1, "size": 100},
        {"action": "oom", "device_free": 5, "size": 3 << 30},
    ]
    summary = plot_snapshot(
        write({"segments": [], "device_traces": [trace]}, tmp_path / "s.pickle")
    )
    assert summary.devices[0].out_of_memory == (3 << 30,)
    file = io.StringIO()
    summary.report(file=file)
    assert "cuda:0: out of memory: 3.00 GiB asked for" in file.getvalue()
    assert "those in the trace, and the memory at its end, differ by 100 B" in file.getvalue()


@pytest.mark.parametrize(
    ("blocks", "trace", "notes"),
    [
        ([{"size": 4096, "state": "inactive"}], [], "no history"),
        ([], [{"action": "oom", "device_free": 5, "size": 3 << 30}], "out of memory: 3.00 GiB"),
        ([], [{"action": "snapshot"}], ""),
    ],
)
def test_nothing_is_held(tmp_path, blocks, trace, notes):
    """All is freed but what the allocator keeps, or there was no memory for a first block."""
    pytest.importorskip("matplotlib")
    segment = {"device": 0, "address": 64, "total_size": 4096, "blocks": blocks}
    snapshot = {"segments": [segment], "device_traces": [trace]}
    summary = plot_snapshot(write(snapshot, tmp_path / "s.pickle"))
    (found,) = summary.devices
    assert (found.peak, found.at_peak, found.unexplained) == (0, {}, 0)
    assert found.peak_reserved == 4096
    file = io.StringIO()
    summary.report(file=file)
    assert "cuda:0: peak 0 B allocated, 4.00 KiB reserved then" in file.getvalue()
    assert notes in file.getvalue()


def test_nothing_to_tell(tmp_path):
    path = write({"segments": [], "device_traces": [[], []]}, tmp_path / "s.pickle")
    with pytest.raises(ValueError, match="s.pickle is an empty snapshot"):
        plot_snapshot(path)


def test_without_matplotlib(tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match="a picture needs matplotlib"):
        plot_snapshot(write(busy(0).snapshot(), tmp_path / "s.pickle"))


# saving


def test_save_what_torch_gives(tmp_path, monkeypatch):
    snapshot = busy(0).snapshot()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda device: snapshot)
    save_snapshot(CUDA, tmp_path / "s.pickle")
    assert read_snapshot(tmp_path / "s.pickle") == snapshot
    assert [path.name for path in tmp_path.iterdir()] == ["s.pickle"]


def test_an_interrupted_save_leaves_the_earlier_file(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda device: {"segments": lambda: 0})
    (tmp_path / "s.pickle").write_text("earlier")
    with pytest.raises((AttributeError, pickle.PicklingError)):
        save_snapshot(CUDA, tmp_path / "s.pickle")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["earlier"]


def test_save_needs_cuda(tmp_path, monkeypatch):
    with pytest.raises(RuntimeError, match="only the memory of CUDA devices.*cpu was tracked"):
        save_snapshot(torch.device("cpu"), tmp_path / "s.pickle")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="torch finds no CUDA device"):
        save_snapshot(CUDA, tmp_path / "s.pickle")
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_true_snapshot(tmp_path):
    pytest.importorskip("matplotlib")
    torch.cuda.memory._record_memory_history(stacks="python")
    try:
        before = torch.cuda.memory_allocated()
        tensors = [torch.empty(1 << 20, dtype=torch.uint8, device="cuda") for _ in range(5)]
        del tensors[1:]
        save_snapshot(CUDA, tmp_path / "s.pickle")
    finally:
        torch.cuda.memory._record_memory_history(None)
    device = torch.cuda.current_device()
    (found,) = plot_snapshot(tmp_path / "s.pickle", device=device).devices
    assert 5 << 20 <= found.peak <= before + (5 << 20)
    file = os.path.basename(__file__)
    mine = [size for line, size in found.at_peak.items() if line.startswith(file)]
    assert sum(mine) == 5 << 20
    assert found.unexplained == 0


def test_a_file_whose_name_begins_with_an_underscore(tmp_path):
    pytest.importorskip("matplotlib")
    frames = [{"filename": "/home/me/net/__init__.py", "line": 12, "name": "forward"}]
    block = {"address": 1, "size": 1 << 20, "requested_size": 1 << 20, "state": "active_allocated",
             "frames": frames}  # fmt: skip
    trace = [{"action": "alloc", "addr": 1, "size": 1 << 20, "frames": frames}]
    segment = {"device": 0, "address": 1, "total_size": 1 << 21, "blocks": [block]}
    with open(tmp_path / "s.pickle", "wb") as file:
        pickle.dump({"segments": [segment], "device_traces": [trace]}, file)
    ms.memory.plot_snapshot(tmp_path / "s.pickle", tmp_path / "s.svg")
    assert "__init__.py:12 in forward" in (tmp_path / "s.svg").read_text()
