"""Files of csrc include each other in one direction: a file is what its header and source are
together."""

import graphlib
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent / "csrc"
SUFFIXES = {".h", ".cuh", ".cpp", ".cu"}
# Hook, backward, batch and collector of gradients call each other: they count as one file.
GRADIENTS = {f"adam/{name}" for name in ("backward", "batch", "collector", "hook")}


def stem(path):
    name = path.relative_to(ROOT).with_suffix("").as_posix()
    return "adam/gradients" if name in GRADIENTS else name


def include_graph():
    graph = {}
    for path in ROOT.rglob("*"):
        if path.suffix not in SUFFIXES:
            continue
        included = graph.setdefault(stem(path), set())
        for name in re.findall(r'^#include "(.+)"', path.read_text("utf-8"), re.MULTILINE):
            found = ROOT / name if (ROOT / name).exists() else path.parent / name
            if found.is_relative_to(ROOT) and ".." not in found.parts:
                included.add(stem(found))
        included.discard(stem(path))
    return graph


def test_no_cycles():
    graph = include_graph()
    assert {"plan/simulate", "remat/content"} <= graph["remat/step"] | graph["plan/plan"]
    assert "remat/block" in graph["remat/recompute"]
    graphlib.TopologicalSorter(graph).prepare()  # raises an error that names the cycle


def test_a_plan_knows_no_tensors():
    """The planner is numbers alone: of torch it has a vector that is small, and of this package the
    locks."""
    for path in (ROOT / "plan").iterdir():
        included = re.findall(r"^#include [<\"](.+)[>\"]", path.read_text("utf-8"), re.MULTILINE)
        others = {name for name in included if "/" in name and not name.startswith("plan/")}
        assert others <= {"c10/util/SmallVector.h", "store/speed.h"}, path
