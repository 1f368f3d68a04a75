"""The benchmarks at toy size: their models, their checks, their files."""

import dataclasses
import gc
import importlib
import itertools
import json
import sys
import threading
import types
import weakref
from collections import Counter
from pathlib import Path

import pytest
import torch
from libraries import library
from torch import nn

import memsave_ext as ms
from memsave_ext import _native

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))  # they are scripts, and import one another by plain names
common = importlib.import_module("shared.common")
models = importlib.import_module("shared.models")
readme_tables = importlib.import_module("readme_tables")
adam_methods = importlib.import_module("shared.adam_methods")

TINY = ["--depth", "10", "--growth-rate", "2", "--batch-size", "32", "--device", "cpu"]
TINY += ["--steps", "4"]
TINY_RUN = ["--tiny", "--rounds", "2", "--no-progress"]


@pytest.fixture
def densenet():
    for name in ("sklearn", "matplotlib", "tqdm"):
        pytest.importorskip(name)
    return importlib.import_module("densenet")


def make(method, **shape):
    return models.DenseNet(**shape, checkpoint=method, norm=models.norm_of(method))


# models


def test_densenet_bc_has_the_published_number_of_parameters():
    assert sum(p.numel() for p in models.DenseNet(100, 12).parameters()) == 769_162  # "0.8M"


@pytest.mark.parametrize(("depth", "growth_rate"), [(4, 12), (41, 12), (10, 0)])
def test_shape_that_is_no_densenet(depth, growth_rate):
    with pytest.raises(ValueError, match="must be"):
        models.DenseNet(depth, growth_rate)


@pytest.mark.parametrize("method", [*models.OURS, "torch", "torch_reentrant", "fairscale"])
def test_method_changes_nothing_but_memory(method):
    if reason := models.reasons().get(method):
        pytest.skip(reason)
    torch.manual_seed(1)
    x, y = torch.randn(4, 3, 32, 32), torch.arange(4)
    networks = [
        make(name, depth=16, growth_rate=4) for name in (models.without_checkpoint(method), method)
    ]
    losses = []
    for network in networks:
        losses.append(nn.functional.cross_entropy(network(x), y))
        losses[-1].backward()
    naive, other = networks
    # Bitwise: the same kernels on the same values, with gradients summed in the same order.
    assert torch.equal(*losses)
    for (name, p), q in zip(naive.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q), name
        assert torch.equal(p.grad, q.grad), name
    counts = [m.num_batches_tracked.item() for m in other.modules() if hasattr(m, "running_var")]
    assert max(counts) == (2 if method.startswith("torch") else 1)


# data


def no_torchvision(monkeypatch, found=None):
    monkeypatch.setitem(sys.modules, "torchvision", found)
    monkeypatch.setitem(sys.modules, "torchvision.datasets", found)


def test_cifar10_without_torchvision(densenet, monkeypatch, capsys):
    no_torchvision(monkeypatch)
    assert densenet.main(["--data", "cifar10", "--root", "."]) == 2
    assert "pip install torchvision" in capsys.readouterr().err


@pytest.mark.parametrize("root", [[], ["--root", "nowhere"]])
def test_cifar10_without_its_files(densenet, monkeypatch, capsys, root):
    def missing(root, train, download):
        raise RuntimeError("Dataset not found or corrupted.")

    no_torchvision(monkeypatch, types.SimpleNamespace(CIFAR10=missing))
    assert densenet.main(["--data", "cifar10", *root]) == 2
    assert "cifar-10-batches-py" in capsys.readouterr().err


# the main job


def test_densenet_end_to_end(densenet, tmp_path, capsys):
    assert densenet.main([*TINY, "--save", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    (path,), (picture,) = tmp_path.glob("densenet-*.json"), tmp_path.glob("densenet-*.png")
    assert str(path) in printed
    assert str(picture) in printed
    assert picture.read_bytes().startswith(b"\x89PNG")
    (record,) = json.loads(path.read_text())
    keys = {"claim", "date", "machine", "settings", "rows", "left_out", "checks"}
    assert record.keys() == keys | {"command", "seconds"}
    assert {"cpu", "cores", "torch", "memsave_ext", "native", "commit"} <= record["machine"].keys()
    rows = {row["method"]: row for row in record["rows"]}
    assert list(rows) == models.available()
    assert record["left_out"] == models.reasons()
    for name, row in rows.items():
        assert row["peak_memory_bytes"] > 0
        assert row["seconds_per_step"] > 0
        assert 0 <= row["test_error"] <= 1
        assert row["label"] in printed
        assert row["bn_updates_per_step"] == (2 if name.startswith("torch") else 1)
        compared = name not in ("naive", "memsave_ext_batch_norm")
        assert (row["running_stats_max_diff"] is not None) == compared
    for name in models.OURS:
        assert rows[name]["running_stats_max_diff"] == 0
        assert rows[name]["loss"] == rows["memsave_ext_batch_norm"]["loss"]
        if name in models.CHECKPOINTS:  # remat drops by what it measures, here next to nothing
            assert rows[name]["memory_ratio"] < 1
    assert [check["ok"] for check in record["checks"]] == [True] * 12 + [None] * 3


def test_densenet_fails_where_statistics_are_counted_twice(densenet, monkeypatch, tmp_path, capsys):
    class CountsTwice(ms.BatchNorm2d):
        def forward(self, x):
            if ms.is_recomputing():
                self.num_batches_tracked.add_(1)
            return super().forward(x)

    monkeypatch.setattr(ms, "BatchNorm2d", CountsTwice)
    methods = ["--methods", "naive,memsave_ext"]
    assert densenet.main([*TINY, *methods, "--save", str(tmp_path)]) == 1
    assert "FAILED  memsave_ext.CheckpointFunction, num_batches_tracked" in capsys.readouterr().out


@pytest.mark.parametrize(("efficient", "method"), [("true", "memsave_ext"), ("False", "naive")])
def test_efficient_trains_one_method(densenet, tmp_path, efficient, method):
    options = ["--efficient", efficient, "--steps", "2", "--save", str(tmp_path)]
    assert densenet.main([*TINY, *options]) == 0
    (path,) = tmp_path.glob("*.json")
    (record,) = json.loads(path.read_text())
    assert [row["method"] for row in record["rows"]] == [method]
    assert record["settings"]["steps"] == 2


@pytest.mark.parametrize(
    ("error", "ok"), [(1e-9, True), (1e-2, False), (float("nan"), False)], ids=str
)
def test_noise_bound_lets_rounding_pass_and_nothing_else(densenet, error, ok):
    training, data = (
        importlib.import_module("shared.training"),
        importlib.import_module("shared.data"),
    )
    images, _ = data.load("digits")
    job = training.Job(10, 2, 64, 1, 5, 0, torch.device("cpu"))
    naive = training.Trainer("naive", job)
    training.train({"naive": naive}, images, job)
    checks = importlib.import_module("shared.checks").within_noise(
        [error] * job.steps, error, naive, images, job
    )
    assert [check["ok"] for check in checks] == [ok, ok]


@pytest.mark.parametrize(
    "wrong",
    [
        ["--depth", "41"],
        ["--epochs", "0"],
        ["--steps", "0"],
        ["--methods", "ours"],
        ["--threads", "0"],
        ["--batch-size", "5000"],
    ],
)
def test_wrong_option_is_named(densenet, capsys, wrong):
    assert densenet.main(wrong) == 2
    assert wrong[0] in capsys.readouterr().err


# what the benchmarks share


def test_seconds_together():
    """Jobs begin together; what one raises is raised once all are done."""
    both, done = threading.Barrier(2), []
    assert common.seconds_together([lambda: both.wait(10), lambda: both.wait(10)]) < 10
    with pytest.raises(ZeroDivisionError):
        common.seconds_together([lambda: 1 / 0, lambda: done.append(1)])
    assert done and gc.isenabled()


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5])
def test_balanced_order(n):
    names = [str(i) for i in range(n)]
    rounds = [common.balanced_order(names, i) for i in range(2 * n)]
    assert all(sorted(order) == names for order in rounds)
    places = Counter((place, name) for order in rounds for place, name in enumerate(order))
    assert set(places.values()) == {2}
    pairs = Counter(pair for order in rounds for pair in itertools.pairwise(order))
    assert len(pairs) == n * (n - 1)
    assert len(set(pairs.values())) <= 1


def test_interleave_counts_rounds_not_warmup():
    calls = Counter()
    cases = {name: lambda name=name: calls.update([name]) for name in "abc"}
    seconds = common.interleave(cases, rounds=4, warmup=2, progress=False)
    assert calls == {"a": 6, "b": 6, "c": 6}
    assert {name: len(taken) for name, taken in seconds.items()} == {"a": 4, "b": 4, "c": 4}


OVERHEADS = {
    "checkpoint_overhead": ["--saved-tensors", "1", "8"],
    "checkpoint_threads": ["--calls", "10"],
}


@pytest.mark.parametrize("name", OVERHEADS)
def test_overhead_benchmarks_end_to_end(name, densenet, tmp_path, capsys):
    benchmark = importlib.import_module(name)
    threads = torch.get_num_threads()
    try:
        options = ["--rounds", "2", *OVERHEADS[name], "--no-progress"]
        benchmark.main([*options, "--save", str(tmp_path)])
    finally:
        torch.set_num_threads(threads)
    (path,) = tmp_path.glob(f"{name}-*.json")
    (record,) = json.loads(path.read_text())
    assert {"torch, use_reentrant=False", "checkpoint"} <= {row["peer"] for row in record["rows"]}
    assert str(path) in capsys.readouterr().out


@pytest.fixture
def benchmark_of(tmp_path, capsys):
    """Runs an Adam benchmark at toy size and returns its rows by method, and its record."""
    pytest.importorskip("tqdm")
    threads = torch.get_num_threads()

    def run(name, *options):
        common_options = ["--threads", "1", "--no-progress", "--save", str(tmp_path)]
        assert importlib.import_module(name).main([*options, *common_options]) == 0
        (path,) = tmp_path.glob(f"{name}-*.json")
        assert str(path) in capsys.readouterr().out
        (record,) = json.loads(path.read_text())
        table, caption = readme_tables.TABLES[name]
        assert all(row["method"] in table(record) for row in record["rows"])
        assert torch.__version__ in caption(record)
        return {row["method"]: row for row in record["rows"]}, record

    yield run
    torch.set_num_threads(threads)
    # torch's collector does not see parameters that their own hooks hold, as the tutorial's do.
    gc.collect()
    for tensor in filter(torch.is_tensor, gc.get_objects()):
        if tensor._post_accumulate_grad_hooks:
            tensor._post_accumulate_grad_hooks.clear()


def test_adam_benchmark_end_to_end(benchmark_of):
    sizes = ["--elements", "9000", "--huge", "9000", "--depth", "2"]
    rows, record = benchmark_of("adam", "--rounds", "1", *sizes)
    assert rows.keys() | record["left_out"].keys() == adam_methods.METHODS.keys()
    assert rows[adam_methods.BASE]["large_ms"] == 0
    ours, fused = rows[adam_methods.IN_BACKWARD], rows[adam_methods.FUSED]
    if _native.available:  # pure Python has temporaries
        assert ours["peak_bytes"] < fused["peak_bytes"] / 3
    assert len(record["bars"]) == 4
    assert all(row["own_us"] > 0 for row in record["any_optimizer"])
    assert len(record["any_optimizer"]) == 4


@pytest.mark.full
def test_adam_memory_benchmark_end_to_end(benchmark_of):
    sizes = ["--width", "256", "--depth", "2", "--image", "32", "--batch-size", "32"]
    rows, _ = benchmark_of("adam_memory", *sizes)
    peaks = {name: row["peak_bytes"] for name, row in rows.items()}
    ours = adam_methods.IN_BACKWARD
    assert peaks[adam_methods.FUSED] < peaks[adam_methods.FOREACH]
    if _native.available:
        assert peaks[ours] < peaks[adam_methods.FUSED]
        assert peaks[f"{ours} + checkpoint"] < peaks[ours]
        assert peaks["AdamW(grads_on=...), clipped"] < peaks[adam_methods.FUSED]


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:memsave_ext. norm_pass")
@pytest.mark.skipif(not _native.available, reason="a minute in pure Python")
def test_adam_modes_benchmark_end_to_end(densenet, tmp_path, capsys):
    names = "adam_modes", "shared.adam_mode_list"
    benchmark, modes = map(importlib.import_module, names)
    sizes = ["--elements", "9000", "--depth", "1", "--width", "256", "--layers", "8"]
    steps = ["--rounds", "1", "--steps", "10", "--seeds", "2", "--loss-steps", "2"]
    options = ["--no-progress", "--save", str(tmp_path)]
    threads = torch.get_num_threads()
    try:
        with torch._dynamo.config.patch(disable=True):  # peers would compile for 30 s
            assert benchmark.main([*sizes, *steps, *options]) == 0
    finally:
        torch.set_num_threads(threads)
    (path,) = tmp_path.glob("adam_modes-*.json")
    printed = capsys.readouterr().out
    assert str(path) in printed
    (record,) = json.loads(path.read_text())
    rows = {row["method"]: row for row in record["rows"]}
    # Distances: what is exact, what is near, and what is something else.
    worst = {name: max(row["distance"].values()) for name, row in rows.items() if "distance" in row}
    for name in ("fp32", "fp32, max_grad_norm", "fp32, norm_pass()", "fp32, grad_scaler",
                 "bf16 split"):  # fmt: skip
        assert worst[name] < 1e-4, name
    assert worst["bf16 split8"] < 1e-2 < 0.3 < worst["bf16"]
    assert worst["torch's clip_grad_norm_, in backward"] > 0.1
    assert worst["fp32, 8-bit states"] < 0.1 < worst["fp32, 8-bit states, spread 3"]
    for mode in modes.OURS:
        row = rows[mode.name]
        assert mode.name in printed
        assert row["one"].keys() == row["vit"].keys() == row["peak"].keys() == set(mode.kinds)
        assert row["measured"] == pytest.approx(mode.stored, rel=0.01), mode.name
        if "in backward" in mode.kinds and mode.way != "accumulate":
            # A layer's gradient and that of the next, of 8.
            assert row["peak"]["in backward"] < mode.stored + 0.3 * mode.dtype.itemsize, mode.name
        assert row["loss"] > 0
    for mode in modes.SGD_LION:
        row = rows[mode.name]
        assert row["one"].keys() == row["vit"].keys() == row["peak"].keys() == set(mode.kinds)
        assert row["measured"] == pytest.approx(mode.stored, rel=0.01), mode.name
    for name in ("fp32, norm_pass()", "fp32, clip_global_norm"):
        assert abs(rows[name]["loss_change"]) < 1e-5
    assert rows["bf16"]["loss_spread"] > 0
    claims = [claim for claim in readme_tables.TABLES if claim.startswith("adam_modes")]
    assert len(claims) == 7
    for claim in claims:
        table, caption = readme_tables.TABLES[claim]
        assert "fp32" in table(record)
        assert torch.__version__ in caption(record)


@pytest.mark.full
@pytest.mark.skipif(not _native.available, reason="a minute in pure Python")
def test_adam_training_benchmark_end_to_end(densenet, tmp_path, capsys, monkeypatch):
    benchmark = importlib.import_module("adam_training")
    assert set(benchmark.MODES) <= {mode.name for mode in (*benchmark.OURS, *benchmark.PEERS)}
    some = (benchmark.BASE, "fp32, 8-bit states", "bf16 stochastic, 4-bit states", "torchao, 8-bit")
    assert set(some) <= set(benchmark.MODES)
    monkeypatch.setattr(benchmark, "MODES", some)  # all are stepped by adam_modes.py
    sizes = ["--seeds", "2", "--gpt-steps", "2", "--vit-steps", "2", "--processes", "1"]
    with torch._dynamo.config.patch(disable=True):
        assert benchmark.main([*sizes, "--no-progress", "--save", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("adam_training-*.json")
    assert str(path) in capsys.readouterr().out
    (record,) = json.loads(path.read_text())
    rows = {row["method"]: row for row in record["rows"]}
    assert rows.keys() | record["left_out"].keys() == set(benchmark.MODES)
    for row in record["rows"]:
        assert row["tasks"].keys() == benchmark.TASKS.keys()
        assert all(0 < loss < 10 for of in row["tasks"].values() for loss in of["losses"])
    table, caption = readme_tables.TABLES["adam_training"]
    assert all(name in table(record) for name in rows)
    assert torch.__version__ in caption(record)


def test_each_peer_of_the_modes_runs_or_says_why_not():
    modes = importlib.import_module("shared.adam_mode_list")
    peers = {mode.name for mode in modes.PEERS}
    left_out = modes.reasons("cpu")
    assert left_out.keys() <= peers - {"torch, fused", "torch, fused, bf16"}
    assert all(left_out.values())


def test_vit_l_16_has_the_published_number_of_parameters():
    with torch.device("meta"):
        sizes = [p.numel() for p in adam_methods.VisionTransformer().parameters()]
    assert (len(sizes), sum(sizes)) == (296, 304_326_632)


@pytest.mark.parametrize("name", [n for n in adam_methods.METHODS if n != adam_methods.BASE])
def test_adam_method_steps_as_torch_and_lets_go(name):
    if reason := adam_methods.reason(name, "cpu"):
        pytest.skip(reason)
    results = []
    for method in (adam_methods.FUSED, name):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        step = adam_methods.METHODS[method](list(net.parameters()))
        for _ in range(5):
            x = torch.randn(8, 3)
            step(lambda net=net, x=x: net(x).square().mean().backward())
        assert all(p.grad is None for p in net.parameters())
        results.append([p.detach().clone() for p in net.parameters()])
        adam_methods.release(net.parameters())
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)
    weak = weakref.ref(net)
    del net, step
    gc.collect()
    assert weak() is None


def test_adam_benchmark_hands_out_gradients_uncopied():
    pytest.importorskip("tqdm")
    adam = importlib.import_module("adam")
    param, grads = nn.Parameter(torch.ones(3)), [torch.ones(3)]
    address = grads[0].data_ptr()
    adam.HandOut.apply(grads, param).backward()
    assert param.grad.data_ptr() == address


def test_distributed_benchmark_end_to_end(tmp_path, capsys):
    pytest.importorskip("tqdm")
    distributed = importlib.import_module("distributed")
    assert distributed.main(["--quick", "--no-progress", "--save", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("distributed-*.json")
    (record,) = json.loads(path.read_text())
    table, caption = readme_tables.TABLES["distributed"]
    assert table(record) in capsys.readouterr().out
    assert torch.__version__ in caption(record)
    jobs = {(row["network"], row["engine"]) for row in record["rows"]}
    assert jobs == set(distributed.JOBS) and not record["left_out"]
    assert len(record["rows"]) == len(jobs) * len(distributed.METHODS)
    # A number of collectives and bytes depends on nothing but the job.
    for job in jobs:
        rows = [row for row in record["rows"] if (row["network"], row["engine"]) == job]
        assert len({(row["collectives"], row["bytes_sent"]) for row in rows}) == 1
        assert all(row["seconds_in_regions"] > 0 for row in rows if row["method"] != "naive")
    blocks, parameters = distributed.QUICK.vit_depth, rows_of(record, "DDP", "ViT")[0]
    assert rows_of(record, "FSDP2", "ViT")[0]["collectives"] == 3 * blocks + 2
    assert parameters["bytes_sent"] == parameters["parameter_bytes"]  # by two processes


def rows_of(record, engine, network):
    return [r for r in record["rows"] if (r["network"], r["engine"]) == (network, engine)]


def test_linear_cross_entropy_end_to_end(tmp_path, capsys):
    pytest.importorskip("tqdm")
    threads = torch.get_num_threads()
    benchmark = importlib.import_module("linear_cross_entropy")
    try:
        benchmark.main([*TINY_RUN, "--save", str(tmp_path)])
    finally:
        torch.set_num_threads(threads)
    (path,) = tmp_path.glob("linear_cross_entropy-*.json")
    (record,) = json.loads(path.read_text())
    assert {benchmark.PLAIN, benchmark.WHOLE, benchmark.STEPPED} <= {
        row["case"] for row in record["rows"]
    }
    assert "peak, of the weight" in capsys.readouterr().out


def test_linear_kl_end_to_end(tmp_path, capsys):
    """It compares the losses of all who compute them."""
    pytest.importorskip("tqdm")
    threads = torch.get_num_threads()
    benchmark = importlib.import_module("linear_kl")
    try:
        benchmark.main([*TINY_RUN, "--save", str(tmp_path)])
    finally:
        torch.set_num_threads(threads)
    (path,) = tmp_path.glob("linear_kl-*.json")
    (record,) = json.loads(path.read_text())
    made = {(row["loss"], row["case"]) for row in record["rows"]}
    for loss in (benchmark.LOG_PROBS, benchmark.ENTROPY, *benchmark.BETAS.values()):
        assert {(loss, benchmark.TORCH), (loss, benchmark.OURS)} <= made
    assert ("liger-kernel" in record.get("left_out", {})) == isinstance(benchmark.liger(), str)
    assert "peak, of the logits" in capsys.readouterr().out


def test_checkpoint_chunks_end_to_end(tmp_path, capsys):
    pytest.importorskip("tqdm")
    threads = torch.get_num_threads()
    benchmark = importlib.import_module("checkpoint_chunks")
    try:
        benchmark.main([*TINY_RUN, "--threads", "1", "--save", str(tmp_path)])
    finally:
        torch.set_num_threads(threads)
    (path,) = tmp_path.glob("checkpoint_chunks-*.json")
    (record,) = json.loads(path.read_text())
    rows = {row["case"]: row for row in record["rows"]}
    assert rows.keys() == {
        benchmark.PLAIN, benchmark.WHOLE, benchmark.CHUNKED, benchmark.TORCH, benchmark.PIECES,
    }  # fmt: skip
    assert rows[benchmark.CHUNKED]["peak_of_whole"] < 0.3
    assert "peak, of checkpoint" in capsys.readouterr().out
    table, caption = readme_tables.TABLES["checkpoint_chunks"]
    assert benchmark.CHUNKED in table(record)
    assert "MLP 32" in caption(record)


@pytest.mark.skipif(not _native.available, reason="budgets need the native part")
def test_remat_budgets_end_to_end(tmp_path, capsys):
    pytest.importorskip("tqdm")
    pytest.importorskip("matplotlib")
    benchmark = importlib.import_module("remat_budgets")
    options = ["--quick", "--threads", "1", "--no-progress", "--ways"]
    block, *modules = benchmark.WAYS
    assert benchmark.main([*options, block, "--save", str(tmp_path / "shares")]) == 0
    printed = capsys.readouterr().out
    options += [*modules, "--bytes", "--no-times", "--no-checkpoint"]
    assert benchmark.main([*options, "--save", str(tmp_path / "bytes")]) == 0
    records = []
    for folder in ("shares", "bytes"):
        (path,) = (tmp_path / folder).glob("remat_budgets-*.json")
        records += json.loads(path.read_text())
    shares, in_bytes = (record["rows"] for record in records)
    rows = [*shares, *in_bytes]
    assert not [row["error"] for row in rows if "error" in row]
    cases = [(row["way"], row["share"]) for row in rows]
    assert cases == [(block, 0.6), (block, None), *((way, 0.6) for way in modules)]
    for row in rows:
        assert row["in_bytes"] == (row in in_bytes or row["share"] is None)
        for number in (2, 10):
            assert 0.5 < row[f"ratio_{number}"] <= 1.02, row
        assert row["before_1"] < row["before_2"] < row["promised_2"] < 1.1 * row["plain"]
    assert all(row["time"] > 0 for row in shares)
    assert [row["share"] for row in shares if row.get("time_checkpoint", 0) > 0] == [None]
    table, caption = readme_tables.TABLES["remat_budgets"]
    assert "of torch's checkpoints" in table(records[0])
    assert "1 models, 1 ways" in caption(records[0])
    assert importlib.import_module("shared.drawings").DRAWINGS["remat_budgets"](records[0])
    assert "step 2, within 1.02 of what was promised: 1.00" in printed


def test_remat_instructions_are_those_of_an_operator_and_of_a_step(monkeypatch, tmp_path, capsys):
    benchmark = importlib.import_module("remat_instructions")
    ways = {"plain": (1000, 50), "remat": (1300, 450)}
    counted = {
        f"{program}/{length}/{way}": each * length + once
        for program in benchmark.PROGRAMS
        for length in (2, 5)
        for way, (each, once) in ways.items()
    }
    monkeypatch.setattr(benchmark, "operators_of", lambda program, length: length)
    rows = benchmark.rows_of(counted, [2, 5])
    assert [row["operator"] for row in rows] == [{"plain": 1000, "remat": 300}] * 2
    assert [row["step"] for row in rows] == [{"plain": 50, "remat": 400}] * 2
    table, caption = readme_tables.TABLES["remat_instructions"]
    record = {"rows": rows, "settings": {"lengths": [2, 5]}}
    assert "0.3" in table(record) and "2 and 5 layers" in caption(record)
    monkeypatch.setattr(benchmark.shutil, "which", lambda name: None)
    assert benchmark.main(["--save", str(tmp_path)]) == 0
    assert "valgrind is not installed" in capsys.readouterr().out


@pytest.mark.skipif(not _native.available, reason="budgets need the native part")
def test_remat_offload_end_to_end(tmp_path):
    pytest.importorskip("tqdm")
    pytest.importorskip("matplotlib")
    benchmark = importlib.import_module("remat_offload")
    options = ["--quick", "--threads", "1", "--no-progress", "--save", str(tmp_path)]
    assert benchmark.main([*options, "--folder", str(tmp_path)]) == 0
    records = {}
    for claim in ("remat_offload", "remat_offload_simulated"):
        (path,) = tmp_path.glob(f"{claim}-*.json")
        (records[claim],) = json.loads(path.read_text())
        table, caption = readme_tables.TABLES[claim]
        assert table(records[claim]) and caption(records[claim])
    record = records["remat_offload"]
    ((rows),) = [model["rows"] for model in record["models"]]
    of = {row["method"]: row for row in rows}
    assert of["remat, offload"]["moved"] > 0 == of["remat"]["moved"] == of["plain"]["moved"]
    assert of["remat, offload"]["memory"] < of["remat"]["memory"] < 0.5
    assert of["save_on_cpu"]["memory"] > 0.99 and of["every tensor to a file"]["memory"] < 0.5
    assert of["every tensor to a file"]["moved"] > 0.9 * of["plain"]["bytes"]
    record = records["remat_offload_simulated"]
    assert len(record["rows"]) == 3 * 2
    for row in record["rows"]:
        assert 0 <= row["both_least"] <= row["recompute_least"] * 1.05 < 1
        told = [row[way] for way in ("recompute", "move") if row[way] is not None]
        # Plans of both were searched for otherwise than those that move alone.
        assert row["both"] is not None and row["both"] <= 1.2 * min(told, default=9) + 0.01
    assert "no card has run it" in readme_tables.TABLES["remat_offload_simulated"][1](record)
    assert importlib.import_module("shared.drawings").DRAWINGS["remat_offload_simulated"](record)


def test_elsewhere_end_to_end(tmp_path):
    library("transformers")
    benchmark = importlib.import_module("elsewhere")
    assert benchmark.main(["--quick", "--tokens", "256", "--save", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("elsewhere-*.json")
    (record,) = json.loads(path.read_text())
    table, caption = readme_tables.TABLES["elsewhere"]
    assert len(table(record).splitlines()) == 2 + len(record["rows"]) == 2 + 3 * 2
    assert "no card has run it" in caption(record)
    for row in record["rows"]:
        assert 0 < row["arithmetic"] < row["step"] and row["sequences"] >= 1


def test_a_step_with_weights_elsewhere_by_hand():
    """Two blocks and the rest, in seconds that are easy to add."""
    benchmark = importlib.import_module("elsewhere")
    bytes_per_second = 100 / benchmark.BUS_REACHED
    card = dataclasses.replace(benchmark.CARDS[0], bus=bytes_per_second)
    shape = dataclasses.replace(benchmark.SHAPES["Llama tiny"], depth=2, width=1)
    block, rest = benchmark.Part(100, 30.0, 0), benchmark.Part(0, 3.0, 0)
    # Blocks: 10 s and 200 bytes (and 2 of the input) forward, 30 s and 302 or 1102 backward.
    arithmetic, step = benchmark.seconds_of(card, shape, block, rest, 1, 1, 1)
    assert arithmetic == pytest.approx(2 * (10 + 30) + 1 + 3)
    assert step == pytest.approx(arithmetic + 2)  # the first weights
    block = benchmark.Part(1000, 30.0, 0)
    arithmetic, step = benchmark.seconds_of(card, shape, block, rest, 2, 1, 1)
    assert step == pytest.approx(arithmetic + 20 + 2 * (20.02 - 10) + 2 * (40.02 - 30))


def test_what_remat_budgets_counts_is_what_torch_allocates():
    """A step of one product: its result and the gradients."""
    benchmark = importlib.import_module("remat_budgets")
    subject = importlib.import_module("shared.budget_models").Subject
    layer, x = nn.Linear(64, 64, bias=False), torch.randn(1024, 64)
    training = benchmark.Training(subject(layer, lambda: layer(x).sum()), benchmark.BLOCK, None)
    for states in (0, 1):
        before, peak = training.measure()
        weight = layer.weight.nbytes
        assert before == weight + states * (2 * weight + 4)  # and the number of steps
        rest = peak - before - x.nbytes - weight  # the result; the gradient of the weight
        assert 0 <= rest < 100
        training.step()
