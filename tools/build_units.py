"""What is compiled at once: the sources of a room as one file, written beside the objects.

torch's headers take the compiler some twenty seconds, most of our sources one or two.
"""

from __future__ import annotations

from pathlib import Path, PurePosixPath

# A room's loops over vectors are compiled once for each instruction set: its name, and the bytes of
# its vectors.
INSTRUCTION_SETS = {"baseline": 16, "avx2": 32, "avx512": 64}
LOOPS = "vector_loops.h"
BEGIN, END = "csrc/vector/target_begin.h", "csrc/vector/target_end.h"
# Rooms of up to so many sources, and module.cpp, which is in none, are one file together.
SMALL = 6


def units(sources: list[str], headers: list[str]) -> tuple[list[str], dict[str, str]]:
    """The sources that are compiled as they are, and the other files to compile: text by name.

    As they are: what needs CUDA, which the tools compile one by one.
    """
    alone: list[str] = []
    rooms: dict[str, list[str]] = {}
    for source in sources:
        path = PurePosixPath(source)
        if path.suffix == ".cu" or path.name == "cuda.cpp":
            alone.append(source)
        else:
            rooms.setdefault(path.parts[1], []).append(_include(source))
    written: dict[str, str] = {}
    for room, includes in rooms.items():
        name = f"{room if len(includes) > SMALL else 'others'}.cpp"
        written[name] = written.get(name, "") + "".join(includes)
    for header in headers:  # last: they take the least time each
        if PurePosixPath(header).name == LOOPS:
            room = PurePosixPath(header).parts[1]
            written |= {f"{room}_{isa}.cpp": _loops(header, isa) for isa in INSTRUCTION_SETS}
    return alone, written


def write_units(folder: Path, texts: dict[str, str]) -> list[Path]:
    """Write these files; what is there already keeps its time, which says what to compile."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, text in texts.items():
        path = folder / name
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
        paths.append(path)
    return paths


def _include(path: str) -> str:
    return f'#include "{PurePosixPath(path).relative_to("csrc")}"\n'


def _loops(header: str, isa: str) -> str:
    size = f"#define MEMSAVE_EXT_VECTOR_BYTES {INSTRUCTION_SETS[isa]}\n"
    text = "".join(map(_include, (BEGIN, header, END)))
    return size + (text if isa == "baseline" else f"#if defined(__x86_64__)\n{text}#endif\n")
