"""Train a small residual network on several devices within little memory.

    torchrun --nproc-per-node 2 examples/train_distributed.py --engine ddp
    torchrun --nproc-per-node 2 examples/train_distributed.py --engine fsdp2
    torchrun --nproc-per-node 2 examples/train_distributed.py --engine fsdp2 --budget 2.5MB 3MB

Blocks are checkpointed, BatchNorm's statistics are those of all processes, and AdamW is stepped in
backward. With --budget, of all processes or of each one, torch's AdamW trains the model, and what
is changed is the cheapest that makes a step fit in every process. A checkpoint is written after
every epoch; a run that finds one goes on from there, also with another number of processes. With
--max-restarts 3, torchrun starts all processes again when one dies; it needs
TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in its environment for that, or they may look for each other at
the addresses of those before (pytorch#135712). Data: scikit-learn's digits, nothing is downloaded.
"""

import argparse
import contextlib
import math
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import memsave_ext as ms


class Block(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv2(self.norm2(self.conv1(self.norm1(x).relu())).relu())


def network(channels: int = 16, blocks: int = 4) -> nn.Module:
    ends = [nn.BatchNorm2d(channels), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    stem = nn.Conv2d(1, channels, 3, padding=1, bias=False)
    body = [Block(channels) for _ in range(blocks)]
    return nn.Sequential(stem, *body, *ends, nn.Linear(channels, 10))


def digits() -> tuple[TensorDataset, TensorDataset]:
    """1437 images to train on and 360 to test with."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        sys.exit("this example needs scikit-learn's digits: pip install scikit-learn")
    raw = load_digits()
    images = torch.from_numpy(raw.images).float().div(16).unsqueeze(1)
    labels = torch.from_numpy(raw.target).long()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order.tensor_split([len(labels) * 4 // 5])
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def prepare(
    engine: str, device: torch.device, by_hand: bool
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model on all devices, and its optimizer."""
    torch.manual_seed(0)  # the same weights everywhere
    model = ms.convert_batch_norm(network(), sync=True).to(device)
    model = wrap(engine, device, model)
    if not by_hand:
        return model, torch.optim.AdamW(model.parameters(), lr=5e-3)
    ms.checkpoint_modules(model, Block)
    optimizer = ms.AdamW(model.parameters(), lr=5e-3, in_backward=True)
    if engine == "ddp":
        optimizer.attach(model)  # FSDP2 needs nothing of the kind
    return model, optimizer


def wrap(engine: str, device: torch.device, model: nn.Module) -> nn.Module:
    if engine == "ddp":
        return DistributedDataParallel(model)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for block in filter(lambda module: isinstance(module, Block), model):
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


class Training:
    """What a checkpoint is of. Its folder must be one that all machines see."""

    def __init__(self, engine: str, folder: Path, device: torch.device, by_hand: bool) -> None:
        self.engine, self.device = engine, device
        self.model, self.optimizer = prepare(engine, device, by_hand)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, gamma=0.9)
        self.epoch = 0  # epochs done
        self.folder = folder / engine

    def save(self) -> None:
        if self.engine == "ddp":
            if dist.get_rank() == 0:  # all have the same
                self.folder.mkdir(parents=True, exist_ok=True)
                # Written aside and renamed: whatever happens meanwhile, there is a whole one.
                aside = self.folder / "last.tmp"
                torch.save(self._state(), aside)
                aside.replace(self.folder / "last.pt")
            return
        # Each process writes its shards; the file .metadata comes last and makes it a whole one.
        dcp.save(self._state(), checkpoint_id=self.folder / str(self.epoch))
        if dist.get_rank() == 0:
            for older in (self.folder / str(epoch) for epoch in range(self.epoch)):
                shutil.rmtree(older, ignore_errors=True)

    def resume(self) -> None:
        """Go on from the last checkpoint, if there is one."""
        if self.engine == "ddp":
            path = self.folder / "last.pt"
            if not path.exists():
                return
            state = torch.load(path, map_location="cpu", mmap=True)
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
        else:
            whole = [int(path.parent.name) for path in self.folder.glob("*/.metadata")]
            if not whole:
                return
            state = self._state()  # is loaded in place
            dcp.load(state, checkpoint_id=self.folder / str(max(whole)))
            set_state_dict(
                self.model,
                self.optimizer,
                model_state_dict=state["model"],
                optim_state_dict=state["optimizer"],
            )
        self.scheduler.load_state_dict(state["scheduler"])
        self.epoch = state["epoch"]

    def fit(self, batch: tuple[Tensor, Tensor], budget: str) -> None:
        """Make steps with such a batch fit into a budget, that of this process."""
        x, y = (t.to(self.device) for t in batch)
        self.model.train()
        ms.fit(
            self.model,
            self.optimizer,
            x,
            budget=budget,
            loss=lambda output: nn.functional.cross_entropy(output, y),
        )

    def _state(self) -> dict[str, Any]:
        if self.engine == "ddp":
            model, optimizer = self.model.state_dict(), self.optimizer.state_dict()
        else:
            model, optimizer = get_state_dict(self.model, self.optimizer)
        scheduler = self.scheduler.state_dict()
        states = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
        return {**states, "epoch": self.epoch}

    def train(self, batches: DataLoader, fail: bool) -> float:
        """One epoch; the mean loss over all processes."""
        # Of the epoch and the process: dropout and the like are the same again after a restart.
        torch.manual_seed(self.epoch * dist.get_world_size() + dist.get_rank())
        batches.sampler.set_epoch(self.epoch)
        self.model.train()
        total = torch.zeros((), device=self.device)
        for number, (x, y) in enumerate(batches):
            if fail and number == len(batches) // 2:
                os.kill(os.getpid(), signal.SIGKILL)
            loss = nn.functional.cross_entropy(self.model(x.to(self.device)), y.to(self.device))
            loss.backward()  # reduces gradients, steps parameters and frees gradients
            self.optimizer.step()
            self.optimizer.zero_grad()
            total += loss.detach()
        self.scheduler.step()
        self.epoch += 1
        dist.all_reduce(total)
        return total.item() / (len(batches) * dist.get_world_size())

    @torch.no_grad()
    def accuracy(self, test: TensorDataset) -> float:
        # One batch, so that each process makes as many forwards as the others.
        x, y = (t[dist.get_rank() :: dist.get_world_size()].to(self.device) for t in test.tensors)
        self.model.eval()
        right = (self.model(x).argmax(1) == y).sum()
        dist.all_reduce(right)
        return right.item() / len(test)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--engine", choices=("ddp", "fsdp2"), default="ddp")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=96, help="of all processes together")
    folder = Path(__file__).resolve().parent / "checkpoints"
    parser.add_argument("--checkpoint", type=Path, default=folder, metavar="DIR")
    help_of_budget = "bytes of a step, as 5MB: of all processes, or one for each"
    parser.add_argument("--budget", nargs="+", help=help_of_budget)
    parser.add_argument("--fail-at", type=int, metavar="EPOCH", help="kill a process there, once")
    return parser.parse_args()


@record  # torchrun shows the error of the process that failed first
def main() -> None:
    args = options()
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    if args.batch_size % world:
        sys.exit(f"--batch-size {args.batch_size} is not a multiple of {world} processes")

    train, test = digits()
    sampler = DistributedSampler(train, seed=0, drop_last=True)
    batches = DataLoader(train, args.batch_size // world, sampler=sampler, drop_last=True)
    memory = ms.memory.track()  # of the CPU
    with memory:
        training = Training(args.engine, args.checkpoint, device, by_hand=args.budget is None)
        training.resume()
        if args.budget is not None:
            training.fit(next(iter(batches)), args.budget[rank % len(args.budget)])
    begin = training.epoch
    if rank == 0:
        print(f"{args.engine}, {world} processes: from epoch {begin + 1}", flush=True)
    first_start = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    while training.epoch < args.epochs:
        fail = training.epoch + 1 == args.fail_at and rank == world - 1 and first_start
        start = time.perf_counter()
        with memory if training.epoch == begin else contextlib.nullcontext():
            loss = training.train(batches, fail)
        seconds = time.perf_counter() - start
        if not math.isfinite(loss):
            raise RuntimeError(f"the loss of epoch {training.epoch} is {loss}")
        accuracy = training.accuracy(test)
        training.save()
        peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else memory.peak
        if rank == 0:
            figures = f"loss {loss:.4f}, accuracy {accuracy:.1%}, {seconds:.1f} s"
            print(f"epoch {training.epoch}: {figures}, peak {peak / 2**20:.1f} MiB", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
