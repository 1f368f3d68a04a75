"""memsave_ext._native and the report: which path is taken, and what the user is told."""

from __future__ import annotations

import ast
import functools
import importlib
import json
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

import pytest
import torch

import memsave_ext
from memsave_ext import _native

PACKAGE = Path(memsave_ext.__file__).parent
COMPILED = f"_C{EXTENSION_SUFFIXES[0]}"
INFO = "_build_info.json"


@pytest.fixture
def package(tmp_path, monkeypatch) -> Path:
    """A package of another name that holds _native.py, so that it can be imported afresh."""
    folder = tmp_path / "a b" / "memsave_copy"
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()
    for name in ("_native.py", "_cards.py"):
        shutil.copy(PACKAGE / name, folder)
    monkeypatch.syspath_prepend(str(folder.parent))
    monkeypatch.delenv("MEMSAVE_EXT_NATIVE", raising=False)
    return folder


def load():
    for name in [name for name in sys.modules if name.startswith("memsave_copy")]:
        del sys.modules[name]
    return importlib.import_module("memsave_copy._native")


@pytest.mark.skipif(not _native.available, reason="needs the native part")
def test_the_stub_has_what_is_compiled():
    compiled: Any = _native.module
    names = dict(_declared(ast.parse((PACKAGE / "_C.pyi").read_text("utf-8")).body))
    if not compiled.with_cuda:
        for name in ("probe_cuda", "managed_memory", "managed_owner", "move_managed"):
            del names[name]
    assert set(names) == {name for name in vars(compiled) if not name.startswith("_")}
    for name, members in names.items():
        if members:
            made = set(filter(_is_bound, vars(getattr(compiled, name))))
            assert set(members) - {"__init__"} == made, name


def _declared(body: list[ast.stmt]) -> Iterator[tuple[str, dict[str, object]]]:
    """The names that a stub declares, and those in its classes."""
    for node in body:
        if isinstance(node, ast.AnnAssign):
            yield ast.unparse(node.target), {}
        elif isinstance(node, ast.FunctionDef):
            yield node.name, {}
        elif isinstance(node, ast.ClassDef):
            yield node.name, dict(_declared(node.body))


def _is_bound(name: str) -> bool:
    special = ("__call__", "__enter__", "__exit__", "__len__")
    return name in special or not name.startswith("_")


def load_with_one_warning() -> str:
    with pytest.warns(RuntimeWarning) as caught:
        native = load()
    assert len(caught) == 1
    assert native.module is None
    assert not native.available
    message = str(caught[0].message)
    assert native.reason in message
    assert "pip install --no-build-isolation ." in message
    return message


def pretend_built(package: Path, torch_version: str | None) -> None:
    """Put a file where the compiled one would be, with the info of a build for torch_version."""
    (package / COMPILED).write_bytes(b"not a library")
    if torch_version is not None:
        info = {"file": COMPILED, "torch": torch_version, "python": "3", "compiler": "c++"}
        (package / INFO).write_text(json.dumps(info))


class TestWithoutCompiledFile:
    def test_auto_falls_back_quietly(self, package):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            native = load()
        assert (native.module, native.available, native.build_info) == (None, False, {})
        assert "the installed package has no compiled file" in native.reason
        assert "pip install --no-build-isolation ." in native.reason

    def test_reason_in_a_source_tree_names_the_inner_loop(self, package):
        (package.parent / "setup.py").touch()
        reason = load().reason
        assert "the source tree has no compiled file" in reason
        assert "python setup.py build_ext --inplace" in reason

    def test_a_source_tree_that_hides_what_is_installed(self, package, monkeypatch, tmp_path):
        """As where Python is started in the checkout that was installed."""
        (package.parent / "setup.py").touch()
        site = tmp_path / "site"
        (site / "memsave_ext").mkdir(parents=True)
        (site / "memsave_ext" / COMPILED).touch()
        (site / "memsave_ext-1.dist-info").mkdir()
        about = "Metadata-Version: 2.1\nName: memsave_ext\nVersion: 1\n"
        (site / "memsave_ext-1.dist-info" / "METADATA").write_text(about)
        monkeypatch.syspath_prepend(site)
        with pytest.warns(RuntimeWarning, match="runs in pure Python: Python has found the source"):
            native = load()
        assert f"before the installed {site / 'memsave_ext'}: run it in" in native.reason
        (site / "memsave_ext" / COMPILED).unlink()
        assert "setup.py build_ext" in load().reason

    def test_1_raises_with_cause_and_fix(self, package, monkeypatch):
        monkeypatch.setenv("MEMSAVE_EXT_NATIVE", "1")
        with pytest.raises(ImportError, match="MEMSAVE_EXT_NATIVE=1, but") as stop:
            load()
        assert "no compiled file" in str(stop.value)
        assert "pip install --no-build-isolation ." in str(stop.value)


class TestCompiledFileThatDoesNotFit:
    def test_garbage_gives_one_warning_and_the_fallback(self, package):
        pretend_built(package, torch.__version__)
        assert f"running torch {torch.__version__}" in load_with_one_warning()

    def test_other_torch_names_both_versions_and_is_not_imported(self, package):
        # Loading a library of another torch may crash: the info must decide, not the loader, whose
        # words would be the cause.
        pretend_built(package, "2.9.1+cu128")
        message = load_with_one_warning()
        assert "built for torch 2.9.1+cu128" in message
        assert f"running torch {torch.__version__}" in message
        assert "the minor version" in message

    def test_other_cuda_is_not_imported(self, package):
        pretend_built(package, torch.__version__)
        info = json.loads((package / INFO).read_text())
        (package / INFO).write_text(json.dumps({**info, "cuda": True, "torch_cuda": "1.0"}))
        assert "built for CUDA 1.0" in load_with_one_warning()

    def test_other_patch_release_is_tried(self, package):
        major, minor = torch.__version__.split(".")[:2]
        pretend_built(package, f"{major}.{minor}.99+other")
        assert "the minor version" not in load_with_one_warning()

    def test_without_build_info_is_not_imported(self, package):
        pretend_built(package, None)
        assert "built for torch unknown" in load_with_one_warning()

    def test_build_info_of_another_file_is_not_believed(self, package):
        pretend_built(package, torch.__version__)
        (package / INFO).write_text(json.dumps({"file": "_C.so", "torch": torch.__version__}))
        (package / COMPILED).rename(package / f"_C{EXTENSION_SUFFIXES[1]}")
        assert "describes another file" in load_with_one_warning()

    def test_other_python_is_named(self, package):
        (package / "_C.cpython-39-x86_64-linux-gnu.so").write_bytes(b"not a library")
        assert "is not for Python" in load_with_one_warning()

    def test_1_raises_with_both_versions(self, package, monkeypatch):
        monkeypatch.setenv("MEMSAVE_EXT_NATIVE", "1")
        pretend_built(package, "2.9.1")
        with pytest.raises(ImportError, match=r"built for torch 2\.9\.1 .* running torch"):
            load()

    def test_0_says_nothing(self, package, monkeypatch):
        monkeypatch.setenv("MEMSAVE_EXT_NATIVE", "0")
        pretend_built(package, "2.9.1")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            native = load()
        assert (native.module, native.reason) == (None, "MEMSAVE_EXT_NATIVE=0")


def test_invalid_value_names_variable_value_and_choices(package, monkeypatch):
    monkeypatch.setenv("MEMSAVE_EXT_NATIVE", "yes")
    with pytest.raises(ValueError, match="MEMSAVE_EXT_NATIVE must be auto, 0 or 1, got 'yes'"):
        load()


def run_report(folder: Path, **env: str):
    """The report as a user runs it: in a new process, from a directory elsewhere."""
    return subprocess.run(
        [sys.executable, "-m", "memsave_ext.report"],
        env={**os.environ, "PYTHONPATH": str(folder), **env},
        cwd=folder.anchor,
        capture_output=True,
        text=True,
        check=False,
    )


@functools.cache
def report_with(native: str):
    """Two seconds of imports: once for all that reads it."""
    return run_report(PACKAGE.parent, MEMSAVE_EXT_NATIVE=native)


class TestReport:
    @pytest.mark.skipif(not _native.available, reason="the native part is not in use")
    def test_native(self):
        result = report_with("auto")
        assert result.returncode == 0, result.stderr
        assert "native: yes" in result.stdout
        assert f"torch {_native.build_info['torch']}" in result.stdout
        assert "CheckpointFunction  native" in result.stdout
        assert "memory tracking     native" in result.stdout
        assert "remat               native" in result.stdout

    def test_pure_python(self):
        result = report_with("0")
        assert result.returncode == 0, result.stderr
        assert "native: no (MEMSAVE_EXT_NATIVE=0)" in result.stdout
        assert "CheckpointFunction  pure Python" in result.stdout
        assert "memory tracking     pure Python" in result.stdout
        assert "remat               keeps everything" in result.stdout

    @pytest.mark.parametrize("native", ["auto", "0"])
    def test_every_part_has_a_line(self, native):
        result = report_with(native)
        lines = result.stdout.partition("\nfeature ")[2].splitlines()[1:]
        features = [line.split("  ")[0] for line in lines]
        assert features == [
            "checkpoint",
            "CheckpointFunction",
            "remat",
            "BatchNorm",
            "Adam, SGD, Lion",
            "in_backward",
            "loss head",
            "memory tracking",
            "prediction",
        ]
        assert all(line.split("  ", 1)[1].strip() for line in lines)

    def test_whole_package_survives_a_file_of_another_torch(self, tmp_path):
        skip = shutil.ignore_patterns("_C.*", INFO, "__pycache__")
        copy = Path(shutil.copytree(PACKAGE, tmp_path / "memsave_ext", ignore=skip))
        pretend_built(copy, "2.9.1")
        result = run_report(tmp_path, MEMSAVE_EXT_NATIVE="auto")
        assert result.returncode == 0, result.stderr
        assert result.stderr.count("RuntimeWarning") == 1
        assert "native: no (the compiled file was built for torch 2.9.1" in result.stdout
        assert "CheckpointFunction  pure Python" in result.stdout
