"""Writes tables, pictures and figures of README and docs from committed results.

    python benchmarks/readme_tables.py            # rewrite what stands between the markers
    python benchmarks/readme_tables.py --check    # exit 1 where a page differs

A table stands between ``<!-- claim:begin -->`` and ``<!-- claim:end -->``, or, one of several from
the same results, ``<!-- claim:table:begin -->``. Its picture, drawn by plot.py, follows it, and
stands alone between markers of ``claim:picture``. The list of all results is ``results``, that of
missed bars ``missed``. Figures in sentences are those of tables/sentences.py. Needs no torch.
"""

import argparse
import os
import re
import sys
from pathlib import Path

from shared.common import ROOT, newest
from tables import (
    Pair,
    Record,
    batch_norm_caption,
    batch_norm_table,
    memory,
    overhead_caption,
    overhead_table,
    threads_caption,
    threads_table,
)
from tables.adam import (
    adam_caption,
    adam_memory_caption,
    adam_memory_table,
    adam_table,
    modes_bytes_caption,
    modes_bytes_table,
    modes_loss_caption,
    modes_loss_table,
    modes_page,
    modes_time_caption,
    modes_time_table,
    training_caption,
    training_table,
)
from tables.chunks import chunks_caption, chunks_table
from tables.cuda import (
    adam_cuda_caption,
    adam_cuda_table,
    batch_norm_cuda_caption,
    batch_norm_cuda_table,
    checkpoint_cuda_caption,
    checkpoint_cuda_table,
)
from tables.index import index, missed
from tables.loss_head import kl_caption, kl_table, loss_head_caption, loss_head_table
from tables.offload import (
    elsewhere_caption,
    elsewhere_table,
    offload_caption,
    offload_table,
    simulated_caption,
    simulated_table,
)
from tables.real_limit import real_limit_caption, real_limit_short, real_limit_table
from tables.remat import (
    budgets_caption,
    budgets_table,
    instructions_caption,
    instructions_table,
    remat_caption,
    remat_host_caption,
    remat_host_table,
    remat_nets_caption,
    remat_nets_table,
    remat_picture_caption,
    remat_table,
)
from tables.sentences import renew
from tables.training import (
    data_parallel_caption,
    data_parallel_rows,
    data_parallel_table,
    densenet_caption,
    densenet_table,
    distributed_caption,
    distributed_table,
    largest_model_caption,
    largest_model_table,
)

TABLES: dict[str, Pair] = {
    "densenet": (densenet_table, densenet_caption),
    "data_parallel": (data_parallel_table, data_parallel_caption),
    "data_parallel:rows": (data_parallel_rows, data_parallel_caption),
    "checkpoint_overhead": (overhead_table, overhead_caption),
    "checkpoint_threads": (threads_table, threads_caption),
    "checkpoint_chunks": (chunks_table, chunks_caption),
    "batch_norm": (batch_norm_table, batch_norm_caption),
    "batch_norm_cuda": (batch_norm_cuda_table, batch_norm_cuda_caption),
    "checkpoint_cuda": (checkpoint_cuda_table, checkpoint_cuda_caption),
    "adam_cuda": (adam_cuda_table, adam_cuda_caption),
    "adam": (adam_table, adam_caption),
    "adam_memory": (adam_memory_table, adam_memory_caption),
    "adam_memory:predicted": (memory.predicted_table, adam_memory_caption),
    "adam_training": (training_table, training_caption),
    "linear_cross_entropy": (loss_head_table, loss_head_caption),
    "linear_kl": (kl_table, kl_caption),
    "remat": (remat_table, remat_caption),
    "remat:nets": (remat_nets_table, remat_nets_caption),
    "remat:host": (remat_host_table, remat_host_caption),
    "remat:picture": (lambda record: "", remat_picture_caption),
    "remat_instructions": (instructions_table, instructions_caption),
    "remat_budgets": (budgets_table, budgets_caption),
    "elsewhere": (elsewhere_table, elsewhere_caption),
    "remat_offload": (offload_table, offload_caption),
    "remat_offload_simulated": (simulated_table, simulated_caption),
    "largest_model": (largest_model_table, largest_model_caption),
    "real_limit": (real_limit_short, real_limit_caption),
    "real_limit:all": (real_limit_table, real_limit_caption),
    "memory_account": (memory.account_table, memory.account_caption),
    "memory_account:text": (memory.account_text, lambda record: ""),
    "memory_overhead": (memory.overhead_table, memory.overhead_caption),
    "predict": (memory.predict_table, memory.predict_caption),
    "predict_time": (memory.predict_time_table, memory.predict_time_caption),
    "distributed": (distributed_table, distributed_caption),
    "adam_modes:bytes": (modes_bytes_table, modes_bytes_caption),
    "adam_modes:time": (modes_time_table, modes_time_caption),
    "adam_modes:loss": (modes_loss_table, modes_loss_caption),
    **{
        f"adam_modes:{page}": modes_page(page)
        for page in ("clipping", "loss_scaling", "bfloat16", "states")
    },
}


LISTS = {"results": index, "missed": missed}  # over all files of results

# What is to be seen in the picture of a claim; plot.py draws it.
PICTURES = {
    "densenet": "Peak memory and time per step of each method",
    "data_parallel": "Peak memory and time per step on one device and on two",
    "checkpoint_overhead": "Overhead per region over the number of saved tensors",
    "adam_memory": "Peak memory of a ViT-L/16",
    "largest_model": "The largest model and the largest batch of each method",
    "real_limit": "What trains in 8, 4 and 2 GiB, by method",
    "memory_account": "What memory is made of, during two steps of each loop",
    "remat": "Time of a step over the activations that it keeps, of each method",
    "remat_offload_simulated": "Overhead over width of recomputing, moving and both: a simulation",
    "remat_budgets": "Measured peaks over promised ones, of steps 1, 2 and 10",
}


def section(claim: str, results: Path, page: Path) -> str | None:
    """The newest run of every machine's file, or None where there is no file."""
    table, caption = TABLES[claim]
    kind = claim.partition(":")[0]
    parts = []
    for path in sorted(results.glob(f"{kind}-*.json")):
        run = newest(path)
        if above := table(run):
            parts.append(above)
        if below := caption(run):
            peers = left_out(run) if claim == kind else ""
            parts.append(f"{below} {peers}Source: `benchmarks/results/{path.name}`.")
        picture = path.with_suffix(".png")
        if claim in (kind, f"{kind}:picture") and kind in PICTURES and picture.exists():
            target = Path(os.path.relpath(picture, page.parent)).as_posix()
            parts.append(f"![{PICTURES[kind]}]({target})")
    return "\n\n".join(parts) or None


def left_out(run: Record) -> str:
    reasons = run.get("left_out") or {}
    text = ", ".join(f"{name} ({reason})" for name, reason in reasons.items())
    return f"Left out: {text}. " if text else ""


def rewrite(path: Path, results: Path) -> tuple[str, set[str], list[str]]:
    """The page with its tables renewed, the claims that it has, and those without a result."""
    page = path.read_text(encoding="utf-8")
    found: set[str] = set()
    without = []
    for claim in (*LISTS, *TABLES):
        begin, end = f"<!-- {claim}:begin -->", f"<!-- {claim}:end -->"
        pattern = re.compile(f"({re.escape(begin)})(.*?)({re.escape(end)})", re.DOTALL)
        if not pattern.search(page):
            continue
        found.add(claim)
        text = LISTS[claim](results) if claim in LISTS else section(claim, results, path)
        if text is None:
            without.append(claim)
        else:
            page = pattern.sub(lambda m, text=text: f"{m[1]}\n{text}\n{m[3]}", page)
    if path.is_relative_to(ROOT):
        page = renew(path.relative_to(ROOT).as_posix(), page, results)
    return page, found, without


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--check", action="store_true", help="write nothing, exit 1 where a page differs"
    )
    parser.add_argument("--readme", type=Path, help="one page instead of README and docs")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    args = parser.parse_args(argv)

    everywhere: set[str] = set()
    differs = False
    for path in [args.readme] if args.readme else pages():
        before = path.read_text(encoding="utf-8")
        after, found, without = rewrite(path, args.results)
        everywhere |= found
        for claim in without:
            print(f"skipped {claim}: no result")
        if args.check and after != before:
            differs = True
            print(f"{path.name} differs from its results: run python benchmarks/readme_tables.py")
        elif after != before:
            path.write_text(after, encoding="utf-8")
    for claim in sorted(TABLES.keys() - everywhere):
        print(f"skipped {claim}: <!-- {claim}:begin --> ... <!-- {claim}:end --> is in no page")
    return int(differs)


if __name__ == "__main__":
    sys.exit(main())
