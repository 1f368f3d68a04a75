"""The benchmarks that train on several devices, and that look for the largest model."""

import copy
import dataclasses
import importlib
import itertools
import json
import random
import sys
from pathlib import Path

import pytest
import torch
from sampling import share
from torch import nn

from memsave_ext import _native

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))  # they are scripts, and import one another by plain names
models = importlib.import_module("shared.models")
search = importlib.import_module("shared.search")


@pytest.fixture
def record_of(tmp_path, capsys):
    """Runs a benchmark and returns its record."""
    for name in ("matplotlib", "tqdm", "sklearn"):
        pytest.importorskip(name)
    threads = torch.get_num_threads()

    def run(name, *options):
        module, tables = importlib.import_module(name), importlib.import_module("readme_tables")
        assert module.main([*options, "--no-progress", "--save", str(tmp_path)]) == 0
        (path,) = tmp_path.glob(f"{name}-*.json")
        printed = capsys.readouterr().out
        assert str(path) in printed
        assert path.with_suffix(".png").exists()
        (record,) = json.loads(path.read_text())
        for table, caption in (t for n, t in tables.TABLES.items() if n.startswith(name)):
            assert table(record)
            assert torch.__version__ in caption(record)
        return record

    yield run
    torch.set_num_threads(threads)


# replicas


@pytest.fixture
def replicas():
    pytest.importorskip("tqdm")
    return importlib.import_module("shared.replicas")


def job_of(batch):
    shape = {"depth": 16, "growth_rate": 4, "batch_size": batch, "epochs": 1, "steps": 1, "seed": 0}
    return importlib.import_module("shared.training").Job(**shape, device=torch.device("cpu"))


def batch_of(size):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(size, 3, 32, 32, generator=generator)
    return x, torch.randint(10, (size,), generator=generator)


@pytest.mark.parametrize("method", ["naive", "torch", *models.OURS])
def test_replicas_step_by_the_mean_gradient_of_their_parts(replicas, method):
    training = importlib.import_module("shared.training")
    x, y = batch_of(8)
    found = replicas.Replicas(method, job_of(8), 2)
    expected = training.network("naive", job_of(8))
    if method in models.OURS:
        expected = training.network("memsave_ext_batch_norm", job_of(8))
    optimizer = training.sgd(expected)
    for _ in range(2):
        found.step(x, y)
        optimizer.zero_grad()
        other = copy.deepcopy(expected)
        for model, part, labels in zip((expected, other), x.chunk(2), y.chunk(2), strict=True):
            (nn.functional.cross_entropy(model(part), labels) / 2).backward()
        for p, q in zip(expected.parameters(), other.parameters(), strict=True):
            p.grad += q.grad
        optimizer.step()
    state = expected.state_dict()
    assert found.models[0].state_dict().keys() == state.keys()
    for name, value in found.models[0].state_dict().items():
        if method == "torch" and ("norm1" in name) and not name.endswith(("weight", "bias")):
            continue  # counted twice
        torch.testing.assert_close(value, state[name], rtol=1e-3, atol=1e-5, msg=name)


def test_replicas_start_each_step_with_the_first_ones_state(replicas):
    found = replicas.Replicas("naive", job_of(4), 2)
    x, y = batch_of(4)
    for _ in range(2):
        found.step(x, y)
        found._broadcast()
        for value, other in zip(*(m.state_dict().values() for m in found.models), strict=True):
            assert torch.equal(value, other)
    assert all(p.grad is None for model in found.models for p in model.parameters())


def test_each_of_two_devices_needs_what_one_needs_for_half_the_batch(replicas):
    x, y = batch_of(16)
    whole = replicas.Replicas("naive", job_of(16), 1).peak(x, y)
    half = replicas.Replicas("naive", job_of(8), 1).peak(x[:8], y[:8])
    two = replicas.Replicas("naive", job_of(16), 2)
    assert two.peak(x, y) == pytest.approx(half, rel=0.02)
    assert two.peak(x, y) == pytest.approx(half, rel=0.02)  # nothing adds up
    assert half < 0.6 * whole


def test_what_a_replica_raises_is_raised(replicas):
    def fail():
        raise ValueError("a part")

    with pytest.raises(ValueError, match="a part"):
        replicas.in_threads([lambda: None, fail])


def test_data_parallel_benchmark_end_to_end(record_of):
    sizes = ["--depth", "10", "--growth-rate", "2", "--batch-sizes", "2", "4", "8"]
    record = record_of("data_parallel", *sizes, "--rounds", "1", "--device", "cpu")
    module = importlib.import_module("data_parallel")
    rows = {(r["method"], r["devices"], r["batch_size"]): r for r in record["rows"]}
    assert len(rows) == 6 * (len(module.METHODS) - len(record["left_out"]))
    assert all(r["peak_memory_bytes"] and r["seconds_per_step"] > 0 for r in rows.values())
    assert rows["naive", 2, 2]["original_seconds"] == 0.10
    assert rows["torch", 2, 2]["original_time_ratio"] == pytest.approx(14)
    assert rows["memsave_ext", 1, 8]["original_gb"] == 10.1
    assert rows["memsave_ext", 1, 8]["original_time_ratio"] is None  # naive has no such row
    if _native.available:  # in pure Python what is freed between a tracker's blocks counts on
        for method, devices in itertools.product(models.CHECKPOINTS, (1, 2)):
            assert rows[method, devices, 8]["memory_ratio"] < 1
    # As in the original: two devices with twice the batch need what one needs.
    one, two = rows["naive", 1, 4], rows["naive", 2, 8]
    assert two["peak_memory_bytes"] == pytest.approx(one["peak_memory_bytes"], rel=0.02)
    assert {bar["bar"] for bar in record["bars"]} >= {1.01, 1.3}


@pytest.mark.parametrize(
    "wrong", [["--batch-sizes", "3"], ["--devices", "0"], ["--methods", "ours"]], ids=str
)
def test_data_parallel_names_a_wrong_option(record_of, capsys, wrong):
    with pytest.raises(SystemExit):
        importlib.import_module("data_parallel").main(["--device", "cpu", *wrong])
    error = capsys.readouterr().err
    assert "--batch-sizes" in error or "--methods" in error


# the largest that fits

PEAKS = {
    "linear": lambda n, a, b: a + b * n,
    "bent": lambda n, a, b: max(5 * b * n, 3 * a + b * n),
    "bent up": lambda n, a, b: a + b * n + 0.05 * n * n,
    "root": lambda n, a, b: a + 10 * b * n**0.5,
}


@pytest.mark.parametrize("kind", PEAKS)
@pytest.mark.parametrize("known", [True, False], ids=["peaks", "out of memory"])
def test_largest_is_the_largest_that_fits(kind, known):
    rng = random.Random(0)
    for _ in range(200):
        a, b, limit = rng.uniform(0, 100), rng.uniform(0.5, 10), rng.uniform(0, 1000)
        tried = []

        def peak_of(n, a=a, b=b, limit=limit, tried=tried):
            tried.append(n)
            peak = PEAKS[kind](n, a, b)
            return peak if known or peak <= limit else None

        found = search.largest(peak_of, limit, first=rng.randint(1, 60), most=3000)
        fits = [n for n in range(1, 3001) if PEAKS[kind](n, a, b) <= limit]
        assert found["largest"] == (max(fits) if fits else 0)
        assert [n for n, _ in found["tries"]] == tried
        assert len(set(tried)) == len(tried) <= 25
        assert found["peak_bytes"] == (PEAKS[kind](max(fits), a, b) if fits else None)


def test_largest_needs_few_tries_where_peaks_are_linear():
    for limit in range(100, 3000, 7):
        found = search.largest(lambda n: 10 + 3 * n, limit, first=12)
        assert len(found["tries"]) <= 9
        # Where two tries are within reach, two more suffice.
        if 50 <= found["largest"] <= 95:
            assert len(found["tries"]) <= 6


SMALL = ["--budget-gb", "0.0036", "--gpt-budget-gb", "0.005", "--image", "16", "--patch", "4",
         "--width", "64", "--heads", "2", "--depth", "2", "--batch-size", "4", "--threads", "1",
         "--vocabulary", "1024", "--tokens", "16", "--rounds", "1"]  # fmt: skip


@pytest.mark.full
@pytest.mark.skipif(not _native.available, reason="in pure Python Adam's temporaries need more")
def test_largest_model_benchmark_end_to_end(record_of, monkeypatch):
    pytest.importorskip("matplotlib")
    module = importlib.import_module("largest_model")
    low = f"{module.OURS}, bf16 stochastic, 4-bit states"
    shown = (module.NAIVE, module.THEIRS, module.OURS, f"{module.OURS}, remat in the budget", low)
    monkeypatch.setattr(module, "WAYS", {name: module.WAYS[name] for name in shown})
    record = record_of("largest_model", *SMALL)
    for kind, budget in ((module.VIT, 3_600_000), (module.GPT, 5_000_000)):
        rows = {row["method"]: row for row in record["rows"] if row["model"] == kind}
        assert list(rows) == list(shown)
        for row in rows.values():
            assert row["budget_bytes"] == budget
            for what in ("depth", "batch"):
                peaks = dict(row[what]["tries"])
                largest = row[what]["largest"]
                assert peaks[largest] == row[what]["peak_bytes"] <= budget
                assert peaks[largest + 1] > budget
        # What a trained parameter needs at least: itself and its states, naively its gradient, too.
        for name, bytes_ in ((module.NAIVE, 16), (module.THEIRS, 12), (module.OURS, 12)):
            assert rows[name]["depth"]["parameters"] * bytes_ <= budget
        assert rows[low]["depth"]["parameters"] * 12 > budget
        for what in ("depth", "batch"):
            # Not beside the second: so small a model's gradients all wait in one bucket.
            naive, _, ours, _, smallest = (rows[name][what]["largest"] for name in shown)
            assert naive < ours < smallest
        assert rows[module.THEIRS]["time"] == 1
        assert all(row["seconds"] > 0 for row in rows.values())
        values = [bar["value"] for bar in record["bars"] if bar["name"].startswith(kind)]
        assert values == [
            rows[module.OURS][what]["largest"] / rows[other][what]["largest"]
            for other in (module.NAIVE, module.THEIRS)
            for what in ("depth", "batch")
        ] + [1 / rows[module.OURS]["time"],
             rows[low]["depth"]["largest"] / rows[module.NAIVE]["depth"]["largest"]]  # fmt: skip


def test_parameters_are_made_in_the_type_that_is_trained():
    pytest.importorskip("matplotlib")
    module = importlib.import_module("shared.largest_ways")
    with module.default_dtype(torch.bfloat16):
        assert nn.Linear(2, 2).weight.dtype == torch.bfloat16
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize("wrong", [["--width", "-1"], ["--budget-gb", "1", "0"]], ids=str)
def test_largest_model_names_a_wrong_option(capsys, wrong):
    pytest.importorskip("matplotlib")
    with pytest.raises(SystemExit):
        importlib.import_module("largest_model").main(wrong)
    assert wrong[0] in capsys.readouterr().err


# models of real size under a limit of the operating system


@pytest.fixture
def real_models():
    return importlib.import_module("shared.real_models")


needs_a_limit = pytest.mark.skipif(sys.platform != "linux", reason="needs RLIMIT_DATA")


@pytest.mark.full
@needs_a_limit
def test_a_limit_stops_plain_and_not_ours(record_of, capsys):
    """In processes of their own: 400 MB of logits where there is room for 250."""
    pytest.importorskip("transformers")
    methods = ["plain", "memsave_ext, exact"]
    options = ["--only", "GPT-2 tiny", "--limits", "0.62", "--methods", *methods]
    record = record_of("real_limit", *options)
    plain, ours = record["rows"]
    assert plain["built"] and plain["losses"] == [] and "allocate memory" in plain["died"]
    assert ours["died"] is None and len(ours["losses"]) == 3
    assert ours["losses"][0] > ours["losses"][2]
    assert ours["peak_bytes"] < 0.62 * 2**30 < plain["needs_bytes"]
    assert all(row["limited_by"] == "RLIMIT_DATA" for row in record["rows"])


@pytest.mark.parametrize("name", share(["GPT-2 tiny", "ViT tiny", "Llama tiny"], 3))
def test_losses_of_exact_methods_are_plains(name, real_models, tmp_path):
    """To the bit where the loss has logits, and all but for the order of its sums where not."""
    if "ViT" not in name:
        pytest.importorskip("transformers")
    trainer_of = importlib.import_module("real_row").Trainer
    shape, many = real_models.SHAPES[name], 2**40
    if "ViT" not in name:
        shape = dataclasses.replace(shape, tokens=160)  # chunks of torch's loss are of 128

    def losses(method):
        form = real_models.format_of(shape, method, many)
        trainer = trainer_of(shape, method, form, str(tmp_path))
        found = [trainer.step().item() for _ in range(2)]
        importlib.import_module("shared.adam_methods").release(trainer.model.parameters())
        return found

    plain = losses(real_models.PLAIN)
    assert plain[0] > plain[1]
    for method in (real_models.TORCH, real_models.EXACT, real_models.MOVING):
        if name == "ViT tiny":
            assert losses(method) == plain
        else:
            assert losses(method) == pytest.approx(plain, rel=1e-5 if "GPT" in name else 1e-3)


def test_real_models_have_the_parameters_that_they_are_named_for(real_models):
    pytest.importorskip("transformers")
    build = importlib.import_module("real_row").build
    for shape in real_models.SHAPES.values():
        with torch.device("meta"):
            model = build(shape, shape.dtype)
        assert {p.dtype for p in model.parameters()} == {shape.dtype}
        assert sum(p.numel() for p in model.parameters()) == shape.parameters


def test_the_most_exact_format_that_fits_is_taken(real_models):
    """On paper; 12 bytes for each parameter are 9.3 GB of 774 million."""
    shape = real_models.SHAPES["GPT-2 774 M"]
    gib = real_models.GIB
    exact = real_models.needs(shape, real_models.EXACT, real_models.FLOAT32)
    assert 12 * shape.parameters < exact.total < 14 * shape.parameters
    assert exact.total > 8 * gib
    plain = real_models.needs(shape, real_models.PLAIN, real_models.FLOAT32)
    assert (
        plain.weights + plain.states + plain.gradients + plain.activations >= 16 * shape.parameters
    )

    def names(method):
        forms = [real_models.format_of(shape, method, limit * gib) for limit in (32, 8, 4, 1)]
        return [form.name for form in forms]

    eight = "float32, 8-bit states"
    assert names(real_models.FORMATS) == [
        eight, eight, "bf16 stochastic, 8-bit states", "bf16 stochastic, 4-bit states",
    ]  # fmt: skip
    assert names(real_models.MOVING)[:3] == ["float32", "float32", "float32, weights elsewhere"]
    assert names(real_models.EXACT) == ["float32"] * 4


def test_rows_of_an_earlier_run_are_kept(record_of, tmp_path, monkeypatch):
    for name in ("matplotlib", "tqdm"):
        pytest.importorskip(name)
    module = importlib.import_module("real_limit")
    calls = []

    def run(model, method, limit, options):
        calls.append((model, method, limit))
        return {
            "model": model, "parameters": 1, "batch": 1, "tokens": 4, "method": method,
            "format": "float32", "limit_bytes": limit, "needs_bytes": 1, "peak_bytes": 2,
            "losses": [2.0, 1.0, 0.5],
            "seconds": [1.5] * 3, "cpu_seconds": [1.0] * 3, "built": True, "died": None,
            "disk_bytes": [[0, 0], [100, 1000], [100, 1000]],
            "disk_speed": [50.0, 2000.0] if method == "memsave_ext, moving" else None,
            "took": 3.0,
        }  # fmt: skip

    monkeypatch.setattr(module, "run", run)
    only = ["--only", "ViT tiny", "--limits", "1"]
    record_of("real_limit", *only, "--methods", "plain", "memsave_ext, exact")
    record = record_of(
        "real_limit", *only, "--methods", "memsave_ext, exact", "memsave_ext, moving"
    )
    methods = [row["method"] for row in record["rows"]]
    assert methods == ["plain", "memsave_ext, exact", "memsave_ext, moving"]
    assert len(calls) == 4
    # Losses of two methods, and 1.5 s where the disk takes 100 / 50 + 1000 / 2000.
    assert [bar["value"] for bar in record["bars"]] == [0.0, 0.0, 0.6]
    died = {**record["rows"][2], "died": "RuntimeError: ", "losses": [2.0], "seconds": [1.5]}
    assert len(module.bars([died])) == 0
    assert "on_paper" not in record
    record = record_of("real_limit", "--only", "ViT-L/16", "--limits", "8", "--methods", "plain")
    assert len(record["on_paper"]) == 3 * 7 * 5
    table = importlib.import_module("tables.real_limit").real_limit_short(record)
    (line,) = [line for line in table.splitlines() if line.startswith("| GPT-2 774 M")]
    assert [cell.strip() for cell in line.split("|")[2:-1]] == [
        "(11.9 GiB: no room)", "(9.6 GiB: no room)", "(9.6 GiB: no room)",
        "(5.3 GiB, float32, 8-bit states)", "(4.4 GiB)",
    ]  # fmt: skip
    for size, expected in (
        ("8 GiB", ["ViT-L/16, 1 s (wall 2 s)", *["none"] * 4]),
        ("4 GiB", ["none"] * 5),
        ("2 GiB", ["none"] * 5),
    ):
        (line,) = [line for line in table.splitlines() if line.startswith(f"| {size}")]
        assert [cell.strip() for cell in line.split("|")[2:-1]] == expected
    (line,) = [line for line in table.splitlines() if line.startswith("| ViT-L/16")]
    assert line.split("|")[2].strip() == "1 s (wall 2 s)"
    for row in record["rows"]:
        row["seconds"] = [1.1] * 3
    assert "wall" not in importlib.import_module("tables.real_limit").real_limit_short(record)
    record = record_of("real_limit", *only, "--methods", "plain", "--fresh")
    assert len(record["rows"]) == 1
