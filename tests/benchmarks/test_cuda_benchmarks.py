"""benchmarks/gpu.sh, and the benchmarks of a GPU at toy size, on the CPU where there is no GPU."""

import argparse
import importlib
import inspect
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from memsave_ext import _native

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "gpu.sh"
sys.path.insert(0, str(ROOT / "benchmarks"))  # they are scripts, and import one another
HAS_KERNELS = torch.cuda.is_available() and bool(_native.module and _native.module.with_cuda)
DEVICE = "cuda" if HAS_KERNELS else "cpu"
needs_bash = pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")


def run(*arguments, **environment):
    """In this tree, whose build stays: ``OUT`` has another."""
    if "OUT" in environment:
        environment["BUILT"] = f"{environment['OUT']}-built.tar.gz"
    return subprocess.run(
        ["bash", str(SCRIPT), *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=environment or None,
    )


@needs_bash
def test_how_long_every_set_may_take():
    listed = run("--list")
    assert listed.returncode == 0, listed.stderr
    totals = {
        name: int(seconds)
        for name, seconds in re.findall(r"^(\w+) \(at most (\d+) s", listed.stdout, re.MULTILINE)
    }
    assert totals.keys() == {"a", "b", "c", "second", "training", "big", "more"}
    assert max(totals[name] for name in "abc") <= 480
    assert max(totals.values()) <= 570


@needs_bash
def test_every_part_that_is_listed_can_be_run():
    source = SCRIPT.read_text()
    parts = set(re.findall(r"^  (\w+) +\d+ s ", run("--list").stdout, re.MULTILINE)) | {"build"}
    assert parts == set(re.findall(r"^part_(\w+)\(\)", source, re.MULTILINE))
    limits = source.partition("declare -A LIMIT=(")[2].partition("\n)")[0]
    abouts = source.partition("declare -A ABOUT=(")[2].partition("\n)")[0]
    for text in (limits, abouts):
        assert set(re.findall(r"\[(\w+)\]=", text)) == parts


@needs_bash
def test_files_that_it_names_are_there():
    source = SCRIPT.read_text()
    for name in re.findall(r"[\w/]+\.py\b", source):
        assert any((folder / name).is_file() for folder in (ROOT, ROOT / "benchmarks")), name


@needs_bash
def test_an_unknown_part_is_named():
    found = run("tests", "nothing")
    assert found.returncode == 2
    assert "no set or part nothing" in found.stderr
    assert "memcheck" in found.stderr


@needs_bash
def test_without_a_build_nothing_runs_and_the_log_says_so(tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho no compiler here >&2\nexit 3\n")
    python.chmod(0o755)
    out = tmp_path / "out"
    found = run("copy", "adam", PYTHON=str(python), OUT=str(out), PATH="/usr/bin:/bin")
    assert found.returncode == 1
    assert "no compiler here" in found.stdout
    assert "not run without a build: copy adam" in found.stdout
    assert "failed: build" in found.stdout
    assert [path.name for path in out.iterdir()] == ["gpu.log"]
    assert (out / "gpu.log").read_text() in found.stdout


@needs_bash
def test_parts_run_and_their_records_are_packed(tmp_path):
    """With a stand-in for Python: it measures a copy, and writes what it is called with."""
    python = tmp_path / "python"
    python.write_text(
        """#!/bin/bash
case "$*" in
  *cuda_timing.py) printf 'a GPU\\n3021.5\\n' ;;
  *--save*)
    [[ $* =~ --save\\ ([^ ]+) ]]
    echo "$*" >"${BASH_REMATCH[1]}/$(basename "$1" .py).json"
    ;;
esac
"""
    )
    python.chmod(0o755)
    out = tmp_path / "out"
    found = run(
        "copy", "adam", "batch_norm", PYTHON=str(python), OUT=str(out), PATH="/usr/bin:/bin"
    )
    assert found.returncode == 0, found.stdout + found.stderr
    assert {path.name for path in out.iterdir()} == {"gpu-results.tar.gz", "gpu.log"}
    shutil.unpack_archive(out / "gpu-results.tar.gz", tmp_path / "records")
    records = {path.name: path.read_text() for path in (tmp_path / "records").iterdir()}
    assert records.keys() == {"adam_cuda.json", "batch_norm_cuda.json"}
    assert all("--bandwidth 3021.5" in text for text in records.values())
    assert "copy: exit 0" in found.stdout


@needs_bash
def test_a_later_call_takes_the_build_along(tmp_path):
    """Packed by one call, unpacked by the next, which compiles nothing."""
    tree = tmp_path / "tree"
    (tree / "benchmarks").mkdir(parents=True)
    (tree / "memsave_ext").mkdir()
    shutil.copy(SCRIPT, tree / "benchmarks")
    python = tmp_path / "python"
    python.write_text(
        """#!/bin/bash
if [[ $* == *build_ext* ]]; then
  echo compiles
  touch memsave_ext/_C.some.so memsave_ext/_build_info.json
fi
"""
    )
    python.chmod(0o755)
    environment = {"PYTHON": str(python), "OUT": str(tmp_path / "out"), "PATH": "/usr/bin:/bin"}

    def call():
        return subprocess.run(
            ["bash", str(tree / "benchmarks/gpu.sh"), "report"],
            capture_output=True, text=True, check=True, env=environment,
        ).stdout  # fmt: skip

    assert "compiles" in call()
    built = list((tree / "memsave_ext").iterdir())
    assert len(built) == 2
    for path in built:
        path.unlink()
    assert "compiles" not in call()
    assert all(path.exists() for path in built)
    (tree / "setup.py").write_text("other sources")
    assert "compiles" in call()


@needs_bash
@pytest.mark.parametrize("name", ["a", "b", "c"])
def test_a_dry_run_prints_what_would_run(name, tmp_path):
    """Of tools of CUDA that are not here, stand-ins."""
    for tool in ("compute-sanitizer", "ncu"):
        (tmp_path / tool).write_text("#!/bin/sh\n[ $2 = no ]\n")
        (tmp_path / tool).chmod(0o755)
    path = f"{tmp_path}:/usr/bin:/bin"
    out = str(tmp_path / "out")
    found = run("--dry-run", name, PATH=path, OUT=out, PYTHON=sys.executable)
    assert found.returncode == 0, found.stdout + found.stderr
    said = found.stdout
    if name == "c":
        assert said.count("--kernel-name kns=memsave_ext") == 3
        assert "--clock-control none" in said
        assert "skipped" not in said
    assert all(f"== {part}: " in said for part in {
        "a": ("build", "report", "check", "copy", "tests", "adam"),
        "b": ("build", "copy", "batch_norm", "loss_head", "remat", "adam_memory"),
        "c": ("build", "memcheck", "racecheck", "synccheck", "ncu"),
    }[name])  # fmt: skip


@needs_bash
def test_a_rehearsal_of_all_parts(tmp_path, monkeypatch):
    """Every line runs, with stand-ins for Python and CUDA's tools; then every benchmark reads the
    arguments that it was called with."""
    tree = tmp_path / "a tree"
    for folder in ("benchmarks", "tests", "memsave_ext"):
        (tree / folder).mkdir(parents=True)
    shutil.copy(SCRIPT, tree / "benchmarks")
    calls = tmp_path / "calls"
    stand_ins = {
        "python": f"""
printf '%s\\n' "$*" >>"{calls}"
case "$*" in
  *build_ext*) touch memsave_ext/_C.some.so memsave_ext/_build_info.json ;;
  *cuda_timing.py) printf 'a GPU\\n3021.5\\n' ;;
  *ncu_table.py*) echo 'a table' ;;
esac
""",
        "compute-sanitizer": '[[ $2 == no ]] || exec "${@: -8}"',
        "ncu": 'exec "${@: -5}"',
    }
    for name, text in stand_ins.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    sets = ("a", "b", "c", "second", "training", "big", "more")
    found = subprocess.run(
        ["bash", str(tree / "benchmarks/gpu.sh"), *sets],
        capture_output=True, text=True, check=False,
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "PYTHON": str(tmp_path / "python")},
    )  # fmt: skip
    assert found.returncode == 0, found.stdout + found.stderr
    assert not found.stderr
    parts = re.findall(r"^  (\w+) +\d+ s ", run("--list").stdout, re.MULTILINE)
    for part in ("build", *parts):
        assert re.search(rf"== {part}: exit 0 after \d+ s of \d+", found.stdout), part
    assert list((tree / "benchmarks/out").glob("built-*.tar.gz"))

    class Read(Exception):
        pass

    parse = argparse.ArgumentParser.parse_args

    def parse_alone(self, arguments=None, namespace=None):
        parse(self, arguments, namespace)
        raise Read

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_alone)
    called = [line.split() for line in calls.read_text().splitlines()]
    scripts = [words for words in called if words[0].startswith("benchmarks/")]
    assert len(scripts) > 12
    for script, *arguments in scripts:
        if script.endswith(("cuda_timing.py", "ncu_table.py")):
            continue
        main = importlib.import_module(Path(script).stem).main
        monkeypatch.setattr(sys, "argv", [script, *arguments])
        with pytest.raises(Read):
            main(*([arguments] if inspect.signature(main).parameters else []))


NCU = """\
==PROF== Connected to process 812 (/usr/bin/python3.12)
==PROF== Profiling "step_kernel" - 0: 0%....50%....100% - 4 passes
"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size",\
"Grid Size","Device","CC","Section Name","Metric Name","Metric Unit","Metric Value"
"""


def ncu_lines(number, kernel, grid, *values):
    names = importlib.import_module("ncu_table").METRICS
    before = f'"{number}","812","python3.12","127.0.0.1","{kernel}","1","7","(256, 1, 1)"'
    return "".join(
        f'{before},"{grid}","0","9.0","Command line profiler metrics","{name}","","{value}"\n'
        for name, value in zip(names, values, strict=False)
    )


def test_what_ncu_measured_says_because_of_what(tmp_path, capsys):
    """In the form of ncu's manual; no card has written it yet."""
    table = importlib.import_module("ncu_table")
    text = NCU + ncu_lines(
        0, "void memsave_ext::adam::step_kernel<float, 4>(Batch)", "(2048, 1, 1)",
        "1,234,567", "91.2", "16", "60", "48",
    )  # fmt: skip
    text += ncu_lines(1, "memsave_ext::adam::blocks", "(64, 1, 1)", 20000, 55, 81, 40, 79)
    text += ncu_lines(2, "memsave_ext::onchip", "(64, 1, 1)", 30000, 55, 20, 12.5, 82)
    text += ncu_lines(3, "memsave_ext::onchip", "(9, 1, 1)", 31000, 55, 20, 50, 82)
    text += ncu_lines(4, "memsave_ext::small", "(1, 1, 1)", 1800, 2, 1, 12, 16)
    text += ncu_lines(5, "memsave_ext::cut", "(1, 1, 1)", 1800, "n/a")
    path = tmp_path / "ncu.csv"
    path.write_text(text + "==PROF== Disconnected from process 812\n")
    assert table.main([str(path)]) == 0
    _, *lines, left_out = capsys.readouterr().out.splitlines()
    assert lines[0].split(maxsplit=5) == [
        "1234.6", "91%", "16%", "60%", "48",
        "memory: void adam::step_kernel<float, 4>(Batch) (2048, 1, 1)",
    ]  # fmt: skip
    assert [line.split(maxsplit=5)[-1] for line in lines[1:]] == [
        "waits: latency or barriers: onchip (9, 1, 1)",
        "few threads: 82 registers, or few blocks: onchip (64, 1, 1)",
        "issue: adam::blocks (64, 1, 1)",
        "short: the launch: small (1, 1, 1)",
    ]
    assert left_out.startswith("1 launches left out")
    path.write_text("==ERROR== ERR_NVGPUCTRPERM\n")
    assert table.main([str(path)]) == 1


# ---- the benchmarks -----------------------------------------------------------------------------


def measured(name, tmp_path, *arguments):
    pytest.importorskip("tqdm")
    module = importlib.import_module(name)
    options = ["--device", DEVICE, "--save", str(tmp_path), "--no-progress", *arguments]
    assert module.main(options) == 0
    (path,) = tmp_path.glob(f"{name}-*.json")
    (record,) = json.loads(path.read_text())
    assert record["machine"]["device"] == DEVICE
    return record


def page_of(name, record):
    """[a row's cells], and what stands below them, as the page of results has them."""
    table, caption = importlib.import_module("readme_tables").TABLES[name]
    text = table(record).replace("\N{MULTIPLICATION SIGN}", "x")
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.split("\n")]
    assert len({len(line) for line in lines}) == 1
    return [lines[0], *lines[2:]], caption(record)


def test_adam(tmp_path, capsys):
    record = measured(
        "adam_cuda", tmp_path, "--rounds", "2", "--sizes", "300", "5000", "--bandwidth", "2"
    )
    rows = {(row["mode"], row["elements"]): row for row in record["rows"]}
    assert len(rows) == 2 * 19
    row = rows["fp32", 5000]
    assert row["floor_us"] == pytest.approx(28 * 5000 / 2e3)
    assert row["share"] == pytest.approx(row["floor_us"] / row["ours_us"])
    assert row["torch_us"] > 0 and rows["bf16 split", 300]["torch_us"] is None
    # bfloat16: gradient 2, parameter 4; states in float 16, of 8 bits 4 and two scales for 256.
    assert rows["bf16", 300]["floor_us"] == pytest.approx(22 * 300 / 2e3)
    mode = "bf16 stochastic, 8-bit states"
    assert rows[mode, 300]["floor_us"] == pytest.approx((10 + 1 / 16) * 300 / 2e3)
    printed = capsys.readouterr().out
    assert "copy: 2 GB/s" in printed and "times the speed of torch fused" in printed
    (header, first, *_, last), below = page_of("adam_cuda", record)
    assert header[1:] == ["300", "5,000"]
    row = rows["fp32", 300]
    assert first[1] == (
        f"{row['ours_us']:.0f} µs, {row['share']:.0%} ({row['torch_us'] / row['ours_us']:.2f}x)"
    )
    assert last[0] == "torch, fused, bf16" and "x" not in last[1]
    assert "Medians of 2 rounds" in below


def test_batch_norm(tmp_path, capsys):
    record = measured(
        "batch_norm_cuda", tmp_path, "--rounds", "2", "--shapes", "2x4x8x8", "--bandwidth", "2"
    )
    rows = record["rows"]
    assert len(rows) == 3 * 2 * 3
    for row in rows:
        moved = {"forward": 2, "reuse": 2, "backward": 3}[row["pass"]] * row["bytes"]
        assert row["bytes"] == 2 * 4 * 8 * 8 * (4 if row["dtype"] == "fp32" else 2)
        assert row["floor_us"] == pytest.approx(moved / 2e3)
        assert row["ours_us"] > 0 and row["torch_us"] > 0
    assert "2x4x8x8" in capsys.readouterr().out
    (header, first, *others), below = page_of("batch_norm_cuda", record)
    assert header[1:] == ["forward", "reuse", "backward"] and len(others) == 5
    share, speed = (rows[0][name] / rows[0]["ours_us"] for name in ("floor_us", "torch_us"))
    assert first[1] == f"{rows[0]['ours_us']:.0f} µs, {share:.0%} ({speed:.2f}x)"
    assert "Medians of 2 rounds" in below


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
def test_checkpoint(tmp_path, capsys):
    shape = ["--depth", "10", "--growth", "2", "--batches", "2", "--rounds", "2", "--steps", "1"]
    record = measured("checkpoint_cuda", tmp_path, *shape)
    methods = [row["method"] for row in record["overhead"]]
    assert len(methods) == 7 and methods[0] == "naive"
    assert record["overhead"][0]["step_ratio"] == 1
    for row in record["overhead"]:
        assert 0 < row["host_ms"] <= row["step_ms"]
    assert [row["method"] for row in record["replicas"]] == methods[:-1]
    for row in record["replicas"]:
        assert row["threads"] == 2
        assert row["ratio"] == pytest.approx(row["together_ms"] / row["one_ms"] / 2)
    assert "replicas in threads" in capsys.readouterr().out
    (header, naive, *_, hooks), below = page_of("checkpoint_cuda", record)
    assert header[1:] == ["host, batch 2", "step, batch 2", "2 replicas, batch 2"]
    assert naive[2].endswith("(1.00x)") and naive[3].endswith(
        f"({record['replicas'][0]['ratio']:.2f}x)"
    )
    assert hooks[3] == "-"  # of the whole process
    assert "DenseNet-BC 10, growth rate 2" in below


def test_bandwidth_is_measured_where_it_is_not_given(tmp_path):
    record = measured("adam_cuda", tmp_path, "--rounds", "2", "--sizes", "300")
    assert record["copy_bytes_per_us"] > 10


@pytest.mark.skipif(HAS_KERNELS, reason="there are kernels")
def test_the_device_that_is_missing_is_named(capsys):
    with pytest.raises(SystemExit):
        importlib.import_module("adam_cuda").main(["--device", "cuda"])
    assert "--device cuda needs a" in capsys.readouterr().err
