"""Training in two processes: what checkpointing and steps in backward cost and save there.

A DenseNet under DistributedDataParallel, with synchronised BatchNorm, and a small ViT under it,
with gradients as copies of its buckets and as views, and under FSDP2. Four methods take turns in
the same processes: naive, torch's checkpoint (both with torch's fused AdamW), memsave_ext's
checkpoint with its AdamW, and that with AdamW in backward.

- Seconds: of the slower process, medians. No method may need more than 1.15 times what naive and
  the recompute need together; the recompute's own time is measured in the regions, as the smaller
  of naive's forward there and of what runs in a recompute.
- Peak memory: parameters, states, gradients, buckets and activations of one process.
- Collectives and bytes: of one step, counted where torch dispatches them. Bytes are those a process
  sends by a ring: 2 (n - 1) / n of an all-reduce, (n - 1) / n of the whole tensor for the others.

On the CPU all methods have memsave_ext.SyncBatchNorm, since torch has none there; it makes no
collective in a recompute, where torch's, on CUDA, makes another one per layer.

    python benchmarks/distributed.py --save benchmarks/results
    python benchmarks/distributed.py --device cuda              # two processes on one GPU, gloo
    python benchmarks/distributed.py --device cuda --ranks 1    # NCCL
"""

import argparse
import datetime
import functools
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import memsave_ext as ms
from shared.adam_methods import VisionTransformer
from shared.common import (
    IMPORTS,
    balanced_order,
    bar,
    figure,
    machine,
    median_and_spread,
    parser_of,
    settings_of,
    show_bars,
    show_left_out,
    write_record,
)
from shared.models import DenseLayer, DenseNet
from shared.training import CudaMemory
from tables.training import distributed_table

NAIVE, TORCH = "naive", "torch checkpoint"
AFTER, OURS = "memsave_ext, AdamW after backward", "memsave_ext"
METHODS = {  # the checkpoint, as shared/models.py names it, and whether Adam is stepped in backward
    NAIVE: ("naive", False),
    TORCH: ("torch", False),
    AFTER: ("memsave_ext_checkpoint", False),
    OURS: ("memsave_ext_checkpoint", True),
}
VIEWS = "DDP, bucket views"  # DistributedDataParallel(gradient_as_bucket_view=True)
JOBS = (("DenseNet", "DDP"), ("ViT", "DDP"), ("ViT", VIEWS), ("ViT", "FSDP2"))
BAR = 1.15
WARMUP = 3  # DistributedDataParallel makes its buckets anew after the first step


@dataclass(frozen=True)
class Sizes:
    """Batches are those of one process. Several buckets, as large models have."""

    batch: int = 8
    depth: int = 40
    growth: int = 12
    vit_batch: int = 4
    vit_depth: int = 8
    vit_width: int = 256
    bucket_mib: int = 5


QUICK = Sizes(batch=2, depth=10, growth=4, vit_batch=2, vit_depth=2, vit_width=32, bucket_mib=1)


class Stopwatch:
    """Time inside regions: of recomputes, or of forwards where there are none."""

    def __init__(self, recomputes: bool, device: torch.device) -> None:
        self.recomputes, self.cuda = recomputes, device.type == "cuda"
        self.seconds = 0.0
        self.events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if ms.is_recomputing() is not self.recomputes:
            return function(*args, **kwargs)
        with self._time():  # a recompute may end with an exception
            return function(*args, **kwargs)

    @contextmanager
    def _time(self) -> Iterator[None]:
        if self.cuda:
            events = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            events[0].record()
            self.events.append(events)
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - start
            if self.cuda:
                events[1].record()

    def take(self) -> float:
        """Seconds since the last call."""
        seconds, self.seconds = self.seconds, 0.0
        if self.cuda:
            seconds = sum(begin.elapsed_time(end) for begin, end in self.events) / 1e3
            self.events.clear()
        return seconds


class Block(nn.TransformerEncoderLayer):
    """A block of the ViT, timed."""

    watch: Stopwatch

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.watch.run(super().forward, *args, **kwargs)


class Collectives(TorchDispatchMode):
    """Counts collectives, and the bytes that this process sends in them."""

    def __init__(self) -> None:
        super().__init__()
        self.count = self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().partition("::")
        if name[0] in ("c10d", "_c10d_functional") and "wait" not in name[2]:
            self.count += 1
            self.bytes += round(self._sent(name[2].partition(".")[0], args))
        return func(*args, **(kwargs or {}))

    @staticmethod
    def _sent(name: str, args: Any) -> float:
        n = dist.get_world_size()
        share = (n - 1) / n
        match name:
            case "allreduce_" | "allreduce_coalesced_":
                return 2 * share * sum(t.nbytes for t in args[0])
            case "all_reduce" | "all_reduce_":
                return 2 * share * args[0].nbytes
            case "broadcast_":
                return share * sum(t.nbytes for t in args[0])
            case "_allgather_base_":
                return share * args[0].nbytes
            case "_reduce_scatter_base_":
                return share * args[1].nbytes
            case "all_gather_into_tensor":
                return share * args[0].nbytes * args[1]
        raise NotImplementedError(f"bytes of {name}")


class Trainer:
    """One method's model, optimizer and readings in this process."""

    def __init__(
        self, network: str, engine: str, method: str, sizes: Sizes, device: torch.device
    ) -> None:
        self.device = device
        kind, in_backward = METHODS[method]
        self.watch = Stopwatch(kind.startswith("memsave_ext"), device)
        torch.manual_seed(dist.get_rank())
        batch, classes = (sizes.batch, 10) if network == "DenseNet" else (sizes.vit_batch, 1000)
        self.images = torch.randn(batch, 3, 32, 32, device=device)
        self.labels = torch.randint(classes, (batch,), device=device)
        self.seconds: list[float] = []
        self.regions: list[float] = []
        self.memory = CudaMemory(device) if device.type == "cuda" else ms.memory.track()
        with self.memory:
            torch.manual_seed(0)
            make = self._densenet if network == "DenseNet" else self._vit
            model = make(kind, sizes).to(device)
            self._distribute(model, engine, sizes, in_backward)
        for _ in range(WARMUP):
            self._step_watched()
        self._forget_peak()
        for _ in range(2):
            self._step_watched()
        self.peak = self.memory.peak
        with Collectives() as self.collectives:
            self._step()
        self.watch.take()

    def _densenet(self, kind: str, sizes: Sizes) -> nn.Module:
        norm = ms.SyncBatchNorm
        if self.device.type == "cuda" and not kind.startswith("memsave_ext"):
            norm = nn.SyncBatchNorm
        model = DenseNet(sizes.depth, sizes.growth, checkpoint=kind, norm=norm)
        for layer in model.modules():
            if isinstance(layer, DenseLayer):
                layer.bn_function = functools.partial(self.watch.run, layer.bn_function)
        return model

    def _vit(self, kind: str, sizes: Sizes) -> nn.Module:
        model = VisionTransformer(32, 4, sizes.vit_width, 4, sizes.vit_depth)
        for block in model.blocks:
            block.__class__, block.watch = Block, self.watch
            if kind == "torch":
                block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
        if kind == "memsave_ext_checkpoint":
            ms.checkpoint_modules(model, Block)
        return model

    def _distribute(self, model: nn.Module, engine: str, sizes: Sizes, in_backward: bool) -> None:
        if engine != "FSDP2":
            self.model = DistributedDataParallel(
                model, bucket_cap_mb=sizes.bucket_mib, gradient_as_bucket_view=engine == VIEWS
            )
        else:
            mesh = init_device_mesh(self.device.type, (dist.get_world_size(),))
            for block in model.blocks:
                fully_shard(block, mesh=mesh)
            self.model = fully_shard(model, mesh=mesh)
        params = list(self.model.parameters())
        if self.watch.recomputes:
            self.optimizer = ms.AdamW(params, lr=1e-4, in_backward=in_backward)
        else:
            self.optimizer = torch.optim.AdamW(params, lr=1e-4, fused=True)
        if in_backward and engine != "FSDP2":
            # States made here: gloo's thread, which would make them, is not tracked.
            self._make_states(params)
            self.optimizer.attach(self.model)

    def _make_states(self, params: list[Tensor]) -> None:
        states = {
            i: {
                "step": torch.zeros(()),
                "exp_avg": torch.zeros_like(p),
                "exp_avg_sq": torch.zeros_like(p),
            }
            for i, p in enumerate(params)
        }
        saved = self.optimizer.state_dict()
        self.optimizer.load_state_dict({**saved, "state": states})

    def _step(self) -> None:
        loss = nn.functional.cross_entropy(self.model(self.images), self.labels)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _step_watched(self) -> None:
        with self.memory:
            self._step()
            self._synchronize()

    def _forget_peak(self) -> None:
        if isinstance(self.memory, CudaMemory):
            self.memory.peak = 0
        else:
            self.memory.reset_peak()

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def timed_step(self) -> None:
        self._synchronize()
        dist.barrier()
        start = time.perf_counter()
        self._step()
        self._synchronize()
        self.seconds.append(time.perf_counter() - start)
        self.regions.append(self.watch.take())


def local_bytes(param: Tensor) -> int:
    return (param.to_local() if isinstance(param, DTensor) else param).nbytes


def measure(network: str, engine: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row per method, the same in all processes."""
    sizes = QUICK if options.quick else Sizes()
    device = torch.device(options.device)
    trainers = {name: Trainer(network, engine, name, sizes, device) for name in METHODS}
    rounds = bar(range(options.rounds), show=options.progress and dist.get_rank() == 0)
    for round_ in rounds:
        for name in balanced_order(list(METHODS), round_):
            trainers[name].timed_step()
    rows = []
    for name, trainer in trainers.items():
        mine = (trainer.seconds, trainer.regions, trainer.peak)
        all_ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(all_ranks, mine)
        seconds = [max(step) for step in zip(*(rank[0] for rank in all_ranks), strict=True)]
        regions = [max(step) for step in zip(*(rank[1] for rank in all_ranks), strict=True)]
        median, spread = median_and_spread(seconds)
        rows.append(
            {
                "network": network,
                "engine": engine,
                "method": name,
                "seconds_per_step": median,
                "seconds_per_step_iqr": spread,
                "seconds_in_regions": median_and_spread(regions)[0],
                "peak_memory_bytes": max(rank[2] for rank in all_ranks),
                "collectives": trainer.collectives.count,
                "bytes_sent": trainer.collectives.bytes,
                "parameter_bytes": sum(map(local_bytes, trainer.model.parameters())),
            }
        )
    return rows


def bars(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found = []
    for network, engine in dict.fromkeys((row["network"], row["engine"]) for row in rows):
        of = {
            row["method"]: row
            for row in rows
            if (row["network"], row["engine"]) == (network, engine)
        }
        naive, ours = of[NAIVE], of[OURS]
        recompute = min(naive["seconds_in_regions"], ours["seconds_in_regions"])
        ratio = ours["seconds_per_step"] / (naive["seconds_per_step"] + recompute)
        more = ours["collectives"] - naive["collectives"]
        job = f"{network}, {engine}"
        found.append(figure(f"{job}: time over naive and recompute", ratio, BAR))
        found.append(figure(f"{job}: collectives more than naive", more, 0))
    return found


def run_rank(rank: int, options: argparse.Namespace, folder: str) -> None:
    torch.set_num_threads(options.threads)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        options.backend,
        init_method=f"file://{folder}/init",
        rank=rank,
        world_size=options.ranks,
        timeout=datetime.timedelta(minutes=5),
    )
    rows, left_out = [], {}
    for network, engine in JOBS:
        try:
            rows += measure(network, engine, options)
        except (RuntimeError, NotImplementedError) as error:
            # A backend without a collective that is needed; all processes find that alike.
            if options.device == "cpu":
                raise
            left_out[f"{network}, {engine}"] = str(error).partition("\n")[0]
    if rank == 0:
        Path(folder, "rows.json").write_text(json.dumps([rows, left_out]))
    dist.barrier()
    dist.destroy_process_group()


def saved_in_backward(rows: list[dict[str, Any]]) -> Iterator[str]:
    """What Adam in backward saves of each job's peak."""
    for after, ours in itertools.pairwise(rows):
        if (after["method"], ours["method"]) == (AFTER, OURS):
            saved = (after["peak_memory_bytes"] - ours["peak_memory_bytes"]) / 2**20
            size = ours["parameter_bytes"] / 2**20
            yield (
                f"{ours['network']}, {ours['engine']}: Adam in backward saves {saved:.1f} MiB; "
                f"a process has {size:.1f} MiB of parameters"
            )


def main(arguments: list[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, help="default 5, with --quick 2")
    parser.add_argument("--threads", type=int, default=1, help="of one process")
    parser.add_argument("--quick", action="store_true", help="toy sizes")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda needs a CUDA device")
    options.rounds = options.rounds or (2 if options.quick else 5)
    options.backend = "nccl" if options.device == "cuda" and options.ranks == 1 else "gloo"
    with tempfile.TemporaryDirectory() as folder:
        mp.get_context("forkserver").set_forkserver_preload(IMPORTS)
        mp.start_processes(
            run_rank, (options, folder), nprocs=options.ranks, start_method="forkserver"
        )
        rows, left_out = json.loads(Path(folder, "rows.json").read_text())
    sizes = QUICK if options.quick else Sizes()
    names = ("ranks", "rounds", "threads", "backend")
    record = {
        "machine": machine(options.device),
        "settings": settings_of(options, *names) | asdict(sizes),
        "rows": rows,
        "left_out": left_out,
        "bars": bars(rows),
    }
    print(distributed_table(record))
    for line in saved_in_backward(rows):
        print(line)
    show_left_out(left_out)
    show_bars(record["bars"])
    print(write_record(options.save, "distributed", record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
