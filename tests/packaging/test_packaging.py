"""The build's decisions, without building: every message a user can meet, in one sentence."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from torch.utils import cpp_extension

import memsave_ext as ms

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [
    pytest.mark.skipif(not (ROOT / "setup.py").exists(), reason="needs the source tree"),
    pytest.mark.skipif(
        os.environ.get("MEMSAVE_EXT_NATIVE") == "0", reason="no different in pure Python"
    ),
]


def load_tool(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)  # dataclasses look their module up there.
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch):
    """tools/build_config.py, in an environment that names neither a choice nor a toolkit."""
    for name in ("CUDA_HOME", "CUDA_PATH", "MEMSAVE_EXT_CUDA", "TORCH_CUDA_ARCH_LIST"):
        monkeypatch.delenv(name, raising=False)
    return load_tool("build_config", monkeypatch)


def executable(path: Path, script: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def toolkit(tmp_path: Path) -> Path:
    """A folder that looks like CUDA 13.0, its nvcc answering the two questions that are asked."""
    home = tmp_path / "cuda 13"
    (home / "lib64").mkdir(parents=True)
    (home / "lib64" / "libcudart.so").touch()
    script = f"""case "$1" in
      --version) echo 'Cuda compilation tools, release 13.0, V13.0.48' ;;
      --dryrun) echo '#$ TOP={home}/bin/..' >&2 ;;
    esac"""
    executable(home / "bin" / "nvcc", script)
    return home


def run_setup(*arguments: str, **env: str):
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        check=False,
    )


def assert_one_sentence(result, *words: str) -> None:
    assert result.returncode != 0
    assert "Traceback" not in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1, result.stderr
    for word in words:
        assert word in result.stderr


class TestSetup:
    def test_without_torch(self):
        # -S: without site-packages. setuptools, which is there too, is replaced by a stub.
        code = (
            "import sys, types; sys.modules['setuptools'] = types.ModuleType('setuptools'); "
            "__file__ = 'setup.py'; exec(open('setup.py').read())"
        )
        for command in ((), ("bdist_wheel",), ("-q", "dist_info"), ("build_ext", "--inplace")):
            result = run_setup("-S", "-I", "-c", code, *command)
            assert_one_sentence(result, "install torch first", "--no-build-isolation")

    def test_pure_python_without_torch(self, tmp_path):
        code = (
            "import sys; sys.modules['torch'] = None; __file__ = 'setup.py'; "
            "exec(open('setup.py').read())"
        )
        result = run_setup(
            "-c", code, "-q", "egg_info", "--egg-base", str(tmp_path), "build", "--build-base",
            str(tmp_path), "bdist_wheel", "--dist-dir", str(tmp_path), "--bdist-dir",
            str(tmp_path / "tree"), MEMSAVE_EXT_NATIVE="0",
        )  # fmt: skip
        assert result.returncode == 0, result.stderr
        assert "pure Python (MEMSAVE_EXT_NATIVE=0)" in result.stdout
        (wheel,) = tmp_path.glob("*.whl")
        assert wheel.name == f"memsave_ext-{ms.__version__}-py3-none-any.whl"
        with zipfile.ZipFile(wheel) as archive:
            names = archive.namelist()
        assert "memsave_ext/adam/__init__.py" in names
        assert not [name for name in names if name.endswith((".so", "_build_info.json"))]

    @pytest.mark.parametrize("version", ["2.10.0", "2.16.0a0+git1", "1.13.1", "3.0.0"])
    def test_a_torch_that_pip_would_replace(self, config, version):
        with pytest.raises(SystemExit, match=rf"needs torch 2.11 to 2.15, found {version[:4]}"):
            config.check_torch(version, ROOT)

    @pytest.mark.parametrize("version", ["2.11.0", "2.13.0+cpu", "2.15.1+cu130", torch.__version__])
    def test_a_torch_that_is_allowed(self, config, version):
        config.check_torch(version, ROOT)

    @pytest.mark.skipif(torch.version.cuda is not None, reason="needs a CPU build of torch")
    def test_cuda_wanted_from_a_cpu_torch(self):
        result = run_setup("setup.py", "--version", MEMSAVE_EXT_CUDA="1")
        assert_one_sentence(
            result, "MEMSAVE_EXT_CUDA=1", f"torch {torch.__version__} is a CPU build"
        )

    def test_invalid_choice(self):
        result = run_setup("setup.py", "--version", MEMSAVE_EXT_CUDA="yes")
        assert_one_sentence(result, "MEMSAVE_EXT_CUDA must be auto, 0 or 1, got 'yes'")


NOT_IN_THE_SDIST = {".ci/run", ".gitignore", "examples/.gitignore"}
MADE = re.compile(r"PKG-INFO|setup\.cfg|memsave_ext\.egg-info/.*")


def test_changelog_and_citation_name_the_version():
    changelog, citation = ((ROOT / name).read_text() for name in ("CHANGELOG.md", "CITATION.cff"))
    version, date = re.search(r"^## \[(\d.*)\] - (.*)$", changelog, re.MULTILINE).groups()
    if "\n## [Unreleased]\n" in changelog:  # until it is released, the next one's
        assert ms.__version__.endswith(".dev0")
        assert Version(ms.__version__).release > Version(version).release
    else:
        assert version == ms.__version__
    assert f"\nversion: {version}\ndate-released: {date}\n" in citation


def test_workflows_call_what_is_there():
    folder = ROOT / ".github" / "workflows"
    text = "\n".join(path.read_text() for path in sorted(folder.glob("*.yml")))
    called = {
        word
        for line in re.findall(r"- run: make (.*)", text)
        for word in line.split()
        if "=" not in word
    }
    targets = set(re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {"lint", "test", "cuda-check", "emulate", "docs", "wheel"} <= called <= targets
    (range_,) = re.findall(r'"torch(>=.*?)"', (ROOT / "pyproject.toml").read_text())
    versions = set(re.findall(r"\b2\.\d+\.\d+\b", text))
    assert len(versions) >= 5 and all(version in SpecifierSet(range_) for version in versions)


class TestSdist:
    @pytest.fixture(scope="class")
    def names(self, tmp_path_factory):
        """What is in it, made from a copy of the checkout, without torch; and what should be."""
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        if not (ROOT / ".git").exists() or not shutil.which("git"):
            pytest.skip("needs a git checkout")
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        files = {name for name in listed.stdout.split("\0") if (ROOT / name).is_file()}
        checkout = tmp_path_factory.mktemp("sdist") / "a checkout"
        for name in files:
            (checkout / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, checkout / name)
        # An entry of None is an import that fails.
        code = (
            "import sys; sys.modules['torch'] = None; __file__ = 'setup.py'; "
            "exec(open('setup.py').read())"
        )
        command = [sys.executable, "-c", code, "-q", "sdist"]
        done = subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        (sdist,) = (checkout / "dist").glob("memsave_ext-*.tar.gz")
        with tarfile.open(sdist) as archive:
            names = {entry.name.partition("/")[2] for entry in archive if entry.isfile()}
        return names, files

    def test_has_every_file_of_the_checkout(self, names):
        there, files = names
        assert files - there == NOT_IN_THE_SDIST

    def test_has_nothing_else(self, names):
        there, files = names
        assert not [name for name in there - files if not MADE.fullmatch(name)]


class TestWheel:
    @pytest.mark.parametrize(
        ("torch_version", "cuda", "local"),
        [
            ("2.13.0+cpu", None, "pt213cpu"),
            ("2.15.1", None, "pt215cpu"),
            ("2.11.0+cu130", "13.0", "pt211cu130"),
        ],
    )
    def test_its_version_says_which_torch_it_fits(self, config, torch_version, cuda, local):
        assert config.local_version(torch_version, cuda) == local
        assert Version(f"{ms.__version__}+{local}").local == local

    def test_it_requires_this_torch(self, monkeypatch):
        make_wheel = load_tool("make_wheel", monkeypatch)
        metadata = "Name: memsave_ext\nRequires-Dist: torch<2.16,>=2.11\nRequires-Dist: other\n"
        changed = make_wheel.requiring("2.13.0+cpu", metadata)
        assert changed == metadata.replace("torch<2.16,>=2.11", "torch==2.13.*")
        with pytest.raises(SystemExit, match="requires torch 0 times"):
            make_wheel.requiring("2.13.0", "Name: memsave_ext\n")


class TestDecision:
    def test_cuda_where_torch_and_nvcc_have_it(self, config, toolkit, monkeypatch):
        monkeypatch.setenv("CUDA_HOME", str(toolkit))
        decision = config.decide("2.13.0+cu130", "13.0")
        assert decision.cuda
        assert decision.cuda_home == str(toolkit)
        assert decision.archs == "7.5;8.0;8.6;8.9;9.0;10.0;12.0+PTX"
        assert str(toolkit) in decision.sentence

    @pytest.mark.parametrize(
        ("release", "cards", "archs"),
        [
            ("", [], "7.5;8.0;8.6;8.9;9.0+PTX"),  # of an nvcc that does not say it
            ("12.6", [], "7.5;8.0;8.6;8.9;9.0+PTX"),
            ("12.8", [], "7.5;8.0;8.6;8.9;9.0;10.0;12.0+PTX"),
            ("13.0", [(9, 0), (9, 0)], "9.0+PTX"),
            ("12.6", [(8, 9), (7, 5), (8, 9)], "7.5;8.9+PTX"),
            ("12.6", [(6, 1), (8, 6)], "8.6+PTX"),
            ("12.6", [(6, 1)], "7.5;8.0;8.6;8.9;9.0+PTX"),
        ],
    )
    def test_architectures_of_the_visible_cards_else_of_all(self, config, release, cards, archs):
        assert config.default_archs(release, cards) == archs
        torch_knows = cpp_extension._get_cuda_arch_flags
        with pytest.MonkeyPatch.context() as patched:
            patched.setenv("TORCH_CUDA_ARCH_LIST", archs)
            assert len(torch_knows()) == archs.count(";") + 2

    def test_arch_list_is_the_users(self, config, toolkit, monkeypatch):
        monkeypatch.setenv("CUDA_HOME", str(toolkit))
        monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0a")
        assert config.decide("2.13.0+cu130", "13.0").archs == "9.0a"

    def test_0_leaves_cuda_out(self, config, toolkit, monkeypatch):
        monkeypatch.setenv("CUDA_HOME", str(toolkit))
        monkeypatch.setenv("MEMSAVE_EXT_CUDA", "0")
        assert not config.decide("2.13.0+cu130", "13.0").cuda

    @pytest.mark.parametrize(
        ("torch_version", "torch_cuda", "home", "why"),
        [
            ("2.13.0+cpu", None, "toolkit", "torch 2.13.0+cpu is a CPU build"),
            ("2.13.0+cu130", "13.0", "/nowhere", "CUDA_HOME=/nowhere has no bin/nvcc"),
            ("2.13.0+cu126", "12.6", "toolkit", "nvcc is CUDA 13.0 while torch"),
            ("2.13.0+rocm7", None, "toolkit", "torch 2.13.0+rocm7 is a ROCm build, for which"),
        ],
        ids=["cpu_torch", "no_nvcc", "other_cuda", "rocm"],
    )
    def test_what_is_missing(
        self, config, toolkit, monkeypatch, torch_version, torch_cuda, home, why
    ):
        monkeypatch.setenv("CUDA_HOME", str(toolkit) if home == "toolkit" else home)
        torch_hip = "7.0" if "rocm" in torch_version else None
        decision = config.decide(torch_version, torch_cuda, torch_hip)
        assert not decision.cuda
        assert why in decision.sentence
        monkeypatch.setenv("MEMSAVE_EXT_CUDA", "1")
        with pytest.raises(SystemExit, match="MEMSAVE_EXT_CUDA=1 cannot be met") as stop:
            config.decide(torch_version, torch_cuda, torch_hip)
        assert why in str(stop.value)


class TestToolkit:
    def test_wrapper_outside_the_toolkit(self, config, toolkit, monkeypatch, tmp_path):
        nvcc = executable(tmp_path / "local" / "bin" / "nvcc", f'exec "{toolkit}/bin/nvcc" "$@"')
        monkeypatch.setenv("PATH", str(nvcc.parent), prepend=os.pathsep)
        assert config.find_cuda_home() == (str(toolkit), None)

    def test_symbolic_link_to_a_silent_nvcc(self, config, toolkit, monkeypatch, tmp_path):
        executable(toolkit / "bin" / "nvcc", "exit 1")
        link = tmp_path / "local" / "bin" / "nvcc"
        link.parent.mkdir(parents=True)
        link.symlink_to(toolkit / "bin" / "nvcc")
        monkeypatch.setenv("PATH", str(link.parent), prepend=os.pathsep)
        assert config.find_cuda_home() == (str(toolkit), None)

    def test_the_variable_comes_first(self, config, toolkit, monkeypatch, tmp_path):
        nvcc = executable(tmp_path / "local" / "bin" / "nvcc", "exit 1")
        monkeypatch.setenv("PATH", str(nvcc.parent), prepend=os.pathsep)
        monkeypatch.setenv("CUDA_PATH", str(toolkit))
        assert config.find_cuda_home() == (str(toolkit), None)


def test_cuda_sources_are_left_out_of_a_cpu_build(config, tmp_path):
    for name in ("module.cpp", "adam/cpu.cpp", "adam/cuda.cpp", "adam/kernel.cu", "adam/math.h"):
        path = tmp_path / "csrc" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    assert config.sources(tmp_path, cuda=False) == ["csrc/adam/cpu.cpp", "csrc/module.cpp"]
    assert len(config.sources(tmp_path, cuda=True)) == 4
    assert config.headers(tmp_path) == ["csrc/adam/math.h"]


class TestUnits:
    @pytest.fixture
    def units(self, monkeypatch):
        return load_tool("build_units", monkeypatch)

    @pytest.mark.parametrize("cuda", [False, True])
    def test_every_source_is_compiled_once(self, config, units, cuda):
        sources = config.sources(ROOT, cuda)
        alone, texts = units.units(sources, config.headers(ROOT))
        within = re.findall(r'#include "(.+\.cpp)"', "".join(texts.values()))
        assert sorted([*alone, *(f"csrc/{path}" for path in within)]) == sources
        assert all(path.endswith((".cu", "/cuda.cpp")) for path in alone)

    def test_loops_over_vectors_are_compiled_for_each_instruction_set(self, config, units):
        _, texts = units.units([], config.headers(ROOT))
        rooms = {name.rpartition("_")[0] for name in texts}
        assert rooms == {"adam", "batch_norm", "loss_head"}
        for room in rooms:
            for isa, size in (("baseline", 16), ("avx2", 32), ("avx512", 64)):
                text = texts[f"{room}_{isa}.cpp"]
                assert f"#define MEMSAVE_EXT_VECTOR_BYTES {size}\n" in text
                included = re.findall(r'#include "(.+)"', text)
                loops = f"{room}/cpu/vector_loops.h"
                assert included == ["vector/target_begin.h", loops, "vector/target_end.h"]
                assert all((ROOT / "csrc" / path).exists() for path in included)

    def test_an_unchanged_file_keeps_its_time(self, units, tmp_path):
        (path,) = units.write_units(tmp_path / "units", {"room.cpp": "one"})
        os.utime(path, (1, 1))
        units.write_units(tmp_path / "units", {"room.cpp": "one"})
        assert path.stat().st_mtime == 1
        units.write_units(tmp_path / "units", {"room.cpp": "two"})
        assert path.stat().st_mtime > 1
        assert path.read_text() == "two"


class TestProgress:
    OUTPUT = (
        "[1/3] ccache c++ -MMD -I'/a b/csrc' -c -c '/a b/build/units/adam.cpp' -o /o/adam.o -O3\n"
        "/a b/csrc/adam/step.cpp:3: warning: unused\n"
        "[2/3] /cuda/bin/nvcc -c /a/csrc/adam/cuda/kernels.cu -o /o/kernels.o\n"
        "FAILED: [code=1] /o/memory.o \n"
        "c++ -c /a/build/units/memory.cpp -o /o/memory.o -O3\n"
        "/a/csrc/memory/log.cpp:9: error: expected ';'\n"
    )
    SHORT = (
        "[1/3] adam\n"
        "/a b/csrc/adam/step.cpp:3: warning: unused\n"
        "[2/3] csrc/adam/cuda/kernels.cu\n"
        "FAILED: [code=1] /o/memory.o \n"
        "/a/csrc/memory/log.cpp:9: error: expected ';'\n"
    )

    def test_commands_are_left_out_and_messages_are_not(self, monkeypatch):
        progress = load_tool("build_progress", monkeypatch)
        assert "".join(progress.shortened(self.OUTPUT.splitlines(keepends=True))) == self.SHORT

    def test_what_child_processes_print(self):
        code = (
            "import subprocess, sys; sys.path.insert(0, 'tools'); import build_progress\n"
            "try:\n"
            "    with build_progress.short_output():\n"
            f"        subprocess.run(['printf', '%s', {self.OUTPUT!r}], check=True)\n"
            "        raise KeyError\n"
            "except KeyError:\n"
            "    print('after')\n"
        )
        done = run_setup("-c", code)
        assert (done.returncode, done.stdout) == (0, self.SHORT + "after\n"), done.stderr


def test_no_flag_chooses_the_language_standard(config):
    flags = config.compile_flags(["include"], cuda=True)
    assert not any(flag.startswith("-std") for flags in flags.values() for flag in flags)


NVCC_OF_ARCHS = """#!/bin/sh
case "$*" in
*sm_75*onchip.cu*) echo "ptxas info    : Compiling entry function 'kernel' for 'sm_75'"
    echo "    16 bytes stack frame, 12 bytes spill stores, 4 bytes spill loads" ;;
*sm_86*kernel.cu*) echo "no such thing" >&2; exit 1 ;;
esac
"""


def test_cuda_check_of_other_architectures(config, monkeypatch, tmp_path, capsys):
    cuda_check = load_tool("cuda_check", monkeypatch)
    (tmp_path / "bin").mkdir()
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.write_text(NVCC_OF_ARCHS)
    nvcc.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["cuda_check.py", "--arch", "75", "86", "120"])
    with pytest.raises(SystemExit, match="cuda-check: 2 sources that do not compile or kernels"):
        cuda_check.main()
    said = capsys.readouterr().out
    assert "kernel (sm_75) spills 16 bytes" in said
    assert "csrc/report/kernel.cu does not compile for sm_86:\nno such thing" in said
    assert said.splitlines()[-1].startswith("sm_120: ")
    monkeypatch.setattr(sys, "argv", ["cuda_check.py", "--arch", "120"])
    cuda_check.main()


def test_cuda_check_compiles_what_is_not_the_tables(config, monkeypatch, tmp_path, capsys):
    """A file that a kernel includes, over others, or a flag: each makes other sources."""
    cuda_check = load_tool("cuda_check", monkeypatch)
    kernels = sorted(ROOT.glob("csrc/**/*.cu"))
    given = cuda_check.digest(kernels)
    if cuda_check.torch_std() == "-std=c++20":  # as of the torch that the table was written with
        assert cuda_check.read_table()[0].endswith(f"; sources {given}"), "run it with --renew"
    assert cuda_check.digest(kernels[1:]) != given
    with monkeypatch.context() as changed:
        changed.setattr(cuda_check, "ARCHS", ("90",))
        assert cuda_check.digest(kernels) != given
    monkeypatch.setattr(cuda_check, "ROOT", tmp_path)
    monkeypatch.setattr(cuda_check, "CSRC", tmp_path / "csrc")
    copies = [tmp_path / path.relative_to(ROOT) for path in kernels]
    for folder in ("csrc", "memsave_ext/adam"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    assert cuda_check.digest(copies) == given
    for change in ("csrc/adam/math.h", "memsave_ext/adam/format_rows.h", "csrc/report/kernel.cu"):
        text = (ROOT / change).read_text()
        (tmp_path / change).write_text(f"{text}//\n")
        assert cuda_check.digest(copies) != given, change
        (tmp_path / change).write_text(text)

    compiled = []
    monkeypatch.setattr(cuda_check, "check_bindings", lambda cuda_home: None)
    monkeypatch.setattr(cuda_check, "check_kernels", lambda *given: compiled.append(given))
    monkeypatch.setattr(cuda_check.build_config, "find_cuda_home", lambda: ("/toolkit", None))
    monkeypatch.setattr(cuda_check.build_config, "nvcc_release", lambda cuda_home: "13.0")
    for digest, arguments, calls in (
        (given, [], 0), ("of others", [], 1), (given, ["--anew"], 1), (given, ["--renew"], 1)
    ):  # fmt: skip
        monkeypatch.setattr(cuda_check, "digest", lambda kernels, value=digest: value)
        monkeypatch.setattr(cuda_check, "read_table", lambda: (f"nvcc 13.0; sources {given}", []))
        monkeypatch.setattr(sys, "argv", ["cuda_check.py", *arguments])
        compiled.clear()
        cuda_check.main()
        assert len(compiled) == calls, (digest, arguments)
    assert "are those of cuda_kernels.tsv" in capsys.readouterr().out


def test_cuda_check_reads_ptxas(config, monkeypatch):
    cuda_check = load_tool("cuda_check", monkeypatch)
    output = (
        "ptxas info    : Compiling entry function 'update_kernel' for 'sm_90'\n"
        "    16 bytes stack frame, 12 bytes spill stores, 4 bytes spill loads\n"
        "ptxas info    : Used 40 registers, used 1 barriers, 1024 bytes smem\n"
        "ptxas info    : Compiling entry function 'probe_kernel' for 'sm_80'\n"
        "    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n"
        "ptxas info    : Used 8 registers, used 0 barriers\n"
    )
    assert cuda_check.parse_ptxas(output) == [
        ("update_kernel", "sm_90", 40, 1024),
        ("probe_kernel", "sm_80", 8, 0),
    ]
    assert cuda_check.spills(output) == [("update_kernel", "sm_90", 16)]
