"""Modules of the package import each other in one direction."""

import ast
import graphlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import memsave_ext

PACKAGE = Path(memsave_ext.__file__).parent
# ``memsave_ext.memory`` also offers the names of ``predict``, which is above it: its ``__init__``
# imports predict before anybody else can. Predict imports modules of memory, never memory itself;
# so do the fakes, which are below predict.
OFFERS, OFFERED, FAKES = "memsave_ext.memory", "memsave_ext.predict", "memsave_ext.fakes"


def module_names():
    """Every module's file, by name; a package's is its ``__init__``."""
    modules = {}
    for path in PACKAGE.rglob("*.py"):
        parts = ("memsave_ext", *path.relative_to(PACKAGE).with_suffix("").parts)
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return modules


def inside(name, package):
    return name == package or name.startswith(f"{package}.")


def imports(name, path, modules):
    """What a module imports of the package, inside functions and for types, too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name in modules}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = [*name.split("."), *([""] if path.stem == "__init__" else [])]
                base = ".".join([*parts[: -node.level], *([base] if base else [])])
            for alias in node.names:
                submodule = f"{base}.{alias.name}"
                found |= {submodule if submodule in modules else base} & modules.keys()
    for target in [*found]:
        # The packages that it is in are imported before it, unless the importer is in them, too.
        parents = [target.rpartition(".")[0]]
        while parents[-1]:
            parents.append(parents[-1].rpartition(".")[0])
        if inside(name, OFFERED) or inside(name, FAKES):
            parents = [parent for parent in parents if parent != OFFERS]
        found |= {parent for parent in parents if parent and not inside(name, parent)}
    return found - {name}


def import_graph():
    modules = module_names()
    return {name: imports(name, path, modules) for name, path in modules.items()}


def test_no_cycles():
    graph = import_graph()
    assert "memsave_ext.memory.figures" in graph["memsave_ext.memory.report"]
    assert "memsave_ext.checkpoint" in graph["memsave_ext.memory.fallback"]
    graphlib.TopologicalSorter(graph).prepare()  # raises an error that names the cycle


def test_who_imports_predict():
    graph = import_graph()
    found = {
        name
        for name, imported in graph.items()
        if not inside(name, OFFERED) and any(inside(module, OFFERED) for module in imported)
    }
    assert found == {
        OFFERS,
        f"{OFFERS}.__main__",
        "memsave_ext.integrations.lightning",
        "memsave_ext.integrations.transformers",
    }
    assert graph["memsave_ext.integrations"] == set()
    source = (PACKAGE / "__init__.py").read_text("utf-8")
    # Memory comes first of those that import anything.
    assert source.partition("\nfrom ")[2].startswith(". import integrations, memory\n")


def test_no_library_that_trains_models_is_imported():
    code = "import sys, memsave_ext; memsave_ext.integrations; print(sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    names = {name.partition(".")[0] for name in ast.literal_eval(done.stdout)}
    assert "memsave_ext" in names
    assert names.isdisjoint({"transformers", "lightning", "pytorch_lightning", "accelerate"})


def test_another_system_than_linux_has_pure_python():
    code = """
import os, sys
import torch, torch._dynamo
sys.modules.update(resource=None, fcntl=None)  # an import of these fails
sys.platform = "win32"
for name in ("fork", "sysconf", "waitpid", "posix_fallocate"):
    delattr(os, name)
import memsave_ext as ms

model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 8))
optimizer = ms.AdamW(model.parameters(), in_backward=True)
with ms.memory.track(model, optimizer) as track:
    for _ in range(2):
        ms.checkpoint(model, torch.randn(4, 8)).sum().backward()
        optimizer.step()
assert track.peak > 0
try:
    ms.memory.predict(model, optimizer, torch.randn(4, 8), loss=torch.sum)
except RuntimeError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "MEMSAVE_EXT_NATIVE": "0"},
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "no child process can be made: fork is used on Linux alone" in done.stdout


def test_what_remat_shares_with_memory_is_below_both():
    graph = import_graph()
    of_remat = {m for name in graph if inside(name, "memsave_ext.remat") for m in graph[name]}
    assert "memsave_ext.shared.table" in of_remat
    assert not any(inside(module, OFFERS) for module in of_remat)


def test_stores_are_below_who_uses_them():
    graph = import_graph()
    modules = [name for name in graph if inside(name, "memsave_ext.store")]
    imported = {module for name in modules for module in graph[name]}
    assert len(modules) > 3 and imported <= {*modules, "memsave_ext"}
    csrc = PACKAGE.parent / "csrc"
    if not csrc.is_dir():
        pytest.skip("needs the source tree")
    sources = [path.read_text("utf-8") for path in (csrc / "store").iterdir()]
    rooms = {room for text in sources for room in re.findall(r'#include "(\w+)/', text)}
    assert rooms == {"store", "memory"}
