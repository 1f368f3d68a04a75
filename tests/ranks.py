"""Runs functions in several processes of one torch.distributed group, by gloo or another backend.

Processes are forked from one that has imported what takes seconds.
"""

import datetime
import faulthandler
import functools
import gc
import multiprocessing
import os
import tempfile
import time
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from libraries import library
from torch.distributed.tensor import DTensor

IMPORTS = ["memsave_ext", "torch._dynamo", "torch.distributed.fsdp"]


def run_ranks(world, functions, backend="gloo", libraries=()):
    """{function's name: [what it returned on each rank]}; what one raises is returned as text.

    Functions, a list or a dict by name, are called in order, on all ranks, and must be importable.
    Libraries, which take many seconds, are imported once for all ranks.
    """
    if not isinstance(functions, dict):
        functions = {function.__name__: function for function in functions}
    multiprocessing.get_context("forkserver").set_forkserver_preload(IMPORTS)
    with tempfile.TemporaryDirectory() as folder:
        arguments = world, folder, dict(os.environ), functions, backend
        if libraries:
            context = multiprocessing.get_context("forkserver")
            origin = context.Process(target=_origin, args=(libraries, arguments))
            origin.start()
            origin.join()
        else:
            mp.start_processes(_rank, arguments, nprocs=world, start_method="forkserver")
        ranks = [
            torch.load(Path(folder, f"{rank}.pt"), weights_only=False) for rank in range(world)
        ]
    return {name: [results[name] for results in ranks] for name in ranks[0]}


def _origin(names, arguments):
    for name in names:
        library(name)
    mp.start_processes(_rank, arguments, nprocs=arguments[0], start_method="fork")


def _rank(rank, world, folder, environment, functions, backend):
    _join(rank, world, folder, environment, backend)
    results = {}
    for name, function in functions.items():
        torch.manual_seed(0)
        try:
            results[name] = function()
        except Exception:
            results[name] = traceback.format_exc()
        dist.barrier()
    torch.save(results, Path(folder, f"{rank}.pt"))
    dist.destroy_process_group()


def whole(tensors):
    """Copies without shards, on all ranks; meshes are of all of them.

    All parts are sent together: ``full_tensor()`` takes milliseconds for each.
    """
    tensors = [t.detach() for t in tensors]
    sharded = [t for t in tensors if isinstance(t, DTensor)]
    if not sharded:
        return [t.clone() for t in tensors]
    mine = [t.to_local().contiguous() for t in sharded]
    sent = [(t.shape, t.view(-1).view(torch.uint8).numpy()) for t in mine]
    ranks = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, sent)
    ranks_of = functools.cache(lambda mesh: mesh.mesh)
    joined = []
    for t, parts in zip(sharded, zip(*ranks, strict=True), strict=True):
        parts = [torch.from_numpy(data).view(t.dtype).view(shape) for shape, data in parts]
        joined.append(_assemble(parts, ranks_of(t.device_mesh), t.placements))
    found = iter(joined)
    return [next(found) if isinstance(t, DTensor) else t.clone() for t in tensors]


def _assemble(parts, ranks, placements):
    if ranks.ndim == 0:
        return parts[ranks]
    joined = [_assemble(parts, some, placements[1:]) for some in ranks]
    return torch.cat(joined, placements[0].dim) if placements[0].is_shard() else joined[0]


def errors_of_ranks(world, function, timeout=60):
    """[the error that ended each rank; None: it ended without one, or was killed after a while]."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTS)
    with tempfile.TemporaryDirectory() as folder:
        arguments = world, folder, dict(os.environ), function
        ranks = [
            context.Process(target=_rank_that_fails, args=(rank, *arguments))
            for rank in range(world)
        ]
        for rank in ranks:
            rank.start()
        end = time.monotonic() + timeout
        for rank in ranks:
            rank.join(max(end - time.monotonic(), 0))
            rank.kill()
            rank.join()
        files = [Path(folder, f"{rank}.txt") for rank in range(world)]
        return [file.read_text() if file.exists() else None for file in files]


def _rank_that_fails(rank, world, folder, environment, function):
    _join(rank, world, folder, environment)
    try:
        function()
    except Exception:
        Path(folder, f"{rank}.txt").write_text(traceback.format_exc())
        os._exit(1)  # the others notice when the connections are gone


def _join(rank, world, folder, environment, backend="gloo"):
    faulthandler.enable()  # a rank that crashes says where
    gc.freeze()  # what has been imported stays, and takes long to be looked through
    os.environ.update(environment)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group(
        backend,
        init_method=f"file://{folder}/init",
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=120),
    )
