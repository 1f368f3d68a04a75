"""Runs functions in several processes of one torch.distributed group, on the CPU."""

import datetime
import os
import tempfile
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run_ranks(world, functions):
    """{function's name: [what it returned on each rank]}; what one raises is returned as text.

    One start for all: starting a process takes seconds. Functions are called in order, on all
    ranks, and must be importable.
    """
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, (world, folder, functions), nprocs=world)
        ranks = [
            torch.load(Path(folder, f"{rank}.pt"), weights_only=False) for rank in range(world)
        ]
    return {name: [results[name] for results in ranks] for name in ranks[0]}


def _rank(rank, world, folder, functions):
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/init",
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=120),
    )
    results = {}
    for function in functions:
        torch.manual_seed(0)
        try:
            results[function.__name__] = function()
        except Exception:
            results[function.__name__] = traceback.format_exc()
        dist.barrier()
    torch.save(results, Path(folder, f"{rank}.pt"))
    dist.destroy_process_group()
