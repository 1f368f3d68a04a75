"""CUDA sources as C++ for tests/emulation/cuda: only what no macro can is rewritten, in its line.

kernel<<<grid, block, bytes, stream>>>(...)   emulation::launch(kernel, ...)(...)
__shared__ T name[n];                         a reference to the block's memory for it
extern __shared__ T name[];                   a macro for the block's dynamic memory
__launch_bounds__(n) kernel(...) {            kernel(...) { a check of the launch
"""

from __future__ import annotations

import re
from pathlib import Path

BOUNDS = r"__launch_bounds__(\([^)]*\))"
REWRITES = [
    (r"(\w+)<<<(.*?)>>>\(", r"emulation::launch(\1, \2)("),
    (
        r"^extern __shared__ (\w+) (\w+)\[\];$",
        r"#define \2 static_cast<\1*>(emulation::dynamic_shared())",
    ),
    (
        r"__shared__ ([^;]+?) (\w+)((?:\[[^;]+\])*);",
        r"auto& \2 = emulation::shared_variable<\1\3>([] {});",
    ),
    (BOUNDS + r"([^{]*\{)", r"\2 emulation::require_launch_bounds\1;"),
]
KERNEL = re.compile(rf"__global__ void\s+(?:{BOUNDS}\s*)?(\w+)\(")


def translate(path: Path) -> str:
    text = path.read_text()
    for pattern, rewritten in REWRITES:
        text = re.sub(pattern, rewritten, text, flags=re.DOTALL | re.MULTILINE)
    left = re.search(r"<<<|__shared__|__launch_bounds__", text)
    if left:
        line = text.count("\n", 0, left.start()) + 1
        raise ValueError(f"{path}:{line}: {left.group()} is not translated")
    return f'#line 1 "{path.name}"\n{text}'


def kernel_names(path: Path) -> set[str]:
    return {match[2] for match in KERNEL.finditer(path.read_text())}


def translate_tree(csrc: Path, target: Path) -> list[Path]:
    """Write what is CUDA's in csrc under ``target``; return its sources. What is as it was keeps
    its time."""
    sources = []
    for path in sorted([*csrc.glob("**/*.cu"), *csrc.glob("**/*.cuh")]):
        to = target / path.relative_to(csrc)
        if path.suffix == ".cu":
            to = to.with_suffix(".cpp")
            sources.append(to)
        text = translate(path)
        to.parent.mkdir(parents=True, exist_ok=True)
        if not to.exists() or to.read_text() != text:
            to.write_text(text)
    return sources
