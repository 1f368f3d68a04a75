"""Whether the emulation finds bugs: each is put into a copy of the sources and must be seen.

python tests/emulation/seeded_bugs.py [WORD...]     # those whose file or kind is such a word
"""

from __future__ import annotations

import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import programs
import run

FOLDER = programs.ROOT / "build" / "emulation-bugs"


@dataclass
class Bug:
    what: str
    file: str
    right: str
    wrong: str
    kind: str = "address"  # the build that sees it

    @property
    def program(self) -> str:
        return self.file.partition("/")[0]


BUGS = [
    Bug(
        "logits that no vector has",
        "loss_head/cuda/kernels.cu",
        "first_of(vectors) + i - head",
        "first_of(vectors) + i",
    ),
    Bug(
        "a vector of a row that begins between two",
        "loss_head/cuda/kernels.cu",
        "return head + vector * kSize;",
        "return vector * kSize;",
    ),
    Bug(
        "tokens that there are not",
        "loss_head/cuda/kernels.cu",
        "if (token >= chunk.tokens) return;",
        "",
    ),
    Bug(
        "a missing barrier between the warps of a token",
        "loss_head/cuda/kernels.cu",
        "    __syncthreads();\n",
        "",
    ),
    Bug(
        "a missing barrier before what one thread wrote is read",
        "adam/cuda/step.cuh",
        "start_of<typename M::Value, M::kRule>(batch, tensor);\n  __syncthreads();",
        "start_of<typename M::Value, M::kRule>(batch, tensor);",
    ),
    Bug(
        "the same, where blocks of states are stepped",
        "adam/cuda/step_blocks.cuh",
        "start_of<float, M::kRule, true>(batch, tensor);\n  __syncthreads();",
        "start_of<float, M::kRule, true>(batch, tensor);",
    ),
    Bug(
        "the same, between the sums of warps",
        "batch_norm/cuda/reduce.cuh",
        "of_warps[threadIdx.x / 32] = value;\n  __syncthreads();",
        "of_warps[threadIdx.x / 32] = value;",
    ),
    Bug(
        "a missing barrier before shared memory is written again",
        "batch_norm/cuda/reduce.cuh",
        "__syncthreads();\n    rows = half;",
        "rows = half;",
        "thread",
    ),
    Bug(
        "memory that a shuffle is taken to order",
        "adam/cuda/step_blocks.cuh",
        "  __syncwarp();",
        "",
        "thread",
    ),
    Bug(
        "threads that end before a barrier",
        "adam/cuda/measure_kernels.cu",
        "  sum = sum_block(sum);\n  finite",
        "  if (threadIdx.x >= 64) return;\n  sum = sum_block(sum);\n  finite",
    ),
    Bug(
        "threads in different barriers",
        "adam/cuda/measure_kernels.cu",
        "  sums[thread] = sum;\n  __syncthreads();",
        "  sums[thread] = sum;\n  if (thread % kWarp == 0) {\n __syncthreads();\n"
        "} else {\n __syncthreads();\n}",
    ),
    Bug(
        "squares that are too small for floats",
        "adam/cuda/measure_kernels.cu",
        "sums[0].high >= kSmallest && ",
        "",
        "plain",
    ),
    Bug(
        "squares that are too large for floats",
        "adam/cuda/measure_kernels.cu",
        "sums[0].high <= FLT_MAX",
        "true",
        "plain",
    ),
    Bug(
        "what a square of a float is rounded by",
        "adam/cuda/measure_kernels.cu",
        "__fmaf_rn(value, value, -square)",
        "0",
        "plain",
    ),
    Bug(
        "a warp that is not full",
        "batch_norm/cuda/launch.cuh",
        "ceil_div(p.chunks, 32) * 32",
        "p.chunks",
    ),
    Bug(
        "a shared array that is too small",
        "batch_norm/cuda/reduce.cuh",
        "double2 of_warps[32];",
        "double2 of_warps[4];",
    ),
    Bug(
        "a workspace that is too small",
        "batch_norm/cuda/launch.cuh",
        "problem.channels * (1 + p.chunks)",
        "problem.channels * p.chunks",
    ),
    Bug(
        "vectors at addresses that are not aligned",
        "batch_norm/cuda/launch.cuh",
        "fits = fits && address % (vector * item_size(problem.dtype)) == 0;",
        "static_cast<void>(address);",
    ),
    Bug(
        "a value of a neighbouring plane",
        "batch_norm/cuda/partition.cuh",
        "return kAll << before & ",
        "return kAll & ",
    ),
    Bug(
        "an element too many",
        "adam/cuda/step.cuh",
        "step_vectors<M, 1>(tensor, last, end, c, random);",
        "step_vectors<M, 1>(tensor, last, end + (end == tensor.numel), c, random);",
    ),
    Bug(
        "an element too few",
        "adam/cuda/step.cuh",
        "step_vectors<M, 1>(tensor, last, end, c, random);",
        "step_vectors<M, 1>(tensor, last, end - 1, c, random);",
    ),
    Bug(
        "a border of chunks",
        "adam/cuda/measure_kernels.cu",
        "from < whole ? from + kThreads : from;",
        "from;",
    ),
    Bug(
        "random bits of another element",
        "adam/cuda/step.cuh",
        "const int drawn = w % Draws::kWords;",
        "const int drawn = 0 * w;",
    ),
    Bug(
        "fewer threads allowed than launched",
        "batch_norm/cuda/onchip.cu",
        "__launch_bounds__(kMostThreads, 1)",
        "__launch_bounds__(kMostThreads / 2, 1)",
    ),
    Bug(
        "shared memory that was not asked for",
        "batch_norm/cuda/onchip.cu",
        "fit.bytes + kStaticBytes > kDefault",
        "fit.bytes > kDefault",
    ),
    Bug(
        "a state that nobody wrote",
        "batch_norm/cuda/forward.cu",
        "if (walk.chunk == 0) origins[channel] = origin[c];",
        "",
        "memory",
    ),
]


def seen(bug: Bug) -> tuple[bool, str]:
    sources, rows = FOLDER / "sources", "memsave_ext/adam/format_rows.h"  # which csrc includes
    shutil.rmtree(sources, ignore_errors=True)
    csrc = Path(shutil.copytree(programs.ROOT / "csrc", sources / "csrc"))
    (sources / rows).parent.mkdir(parents=True)
    shutil.copy(programs.ROOT / rows, sources / rows)
    file = csrc / bug.file
    text = file.read_text()
    if bug.right not in text:
        return False, f"{bug.file} has no such line any more"
    file.write_text(text.replace(bug.right, bug.wrong))
    programs.build([bug.kind], FOLDER, csrc, (bug.program,))
    status, output = run.run_program(FOLDER / bug.kind / bug.program, bug.kind)
    lines = [line for line in output.splitlines() if run.names_an_error(line)]
    return status != 0, lines[0] if lines else f"exit {status}"


def main() -> None:
    words = sys.argv[1:]
    chosen = [b for b in BUGS if not words or any(w in (b.kind, b.file) for w in words)]
    kinds = {kind for kind in programs.KINDS if run.has_compiler(kind)}  # it says what is skipped
    chosen = [bug for bug in chosen if bug.kind in kinds]
    missed = 0
    for bug in chosen:
        found, how = seen(bug)
        missed += not found
        print(f"{'seen' if found else 'NOT SEEN'}: {bug.what} ({bug.file}): {how}", flush=True)
    if missed:
        sys.exit(f"emulate: {missed} of {len(chosen)} seeded bugs were not seen")
    print(f"{len(chosen)} seeded bugs seen")


if __name__ == "__main__":
    main()
