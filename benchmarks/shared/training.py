"""Training of several methods in lock step, each with its own account of memory and time."""

import contextlib
import itertools
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import memsave_ext as ms
from shared.common import balanced_order, bar
from shared.data import Images
from shared.models import DenseNet, norm_of


@dataclass(frozen=True)
class Job:
    """What every method trains: the same network, for the same steps, from the same seed."""

    depth: int
    growth_rate: int
    batch_size: int
    epochs: int
    steps: int
    seed: int
    device: torch.device

    @property
    def skip(self) -> int:
        """Steps left out of timings: the first ones pay for allocators and caches.

        Memory is measured in these alone, as that takes time, too; the second one has the momenta.
        """
        return min(5, self.steps // 2)


class CudaMemory:
    """What ``track()`` gives on CPU, for one method beside others that hold memory too."""

    def __init__(self, device: torch.device) -> None:
        torch.cuda.init()  # statistics cannot be reset before
        self.device = device
        self.live = self.peak = 0

    def __enter__(self) -> "CudaMemory":
        torch.cuda.reset_peak_memory_stats(self.device)
        self._others = torch.cuda.memory_allocated(self.device) - self.live
        return self

    def __exit__(self, *exception: object) -> None:
        self.peak = max(self.peak, torch.cuda.max_memory_allocated(self.device) - self._others)
        self.live = torch.cuda.memory_allocated(self.device) - self._others


def memory_of(device: torch.device) -> Any:
    """Counts the bytes of tensors in its ``with`` blocks: ``live`` and ``peak``."""
    return CudaMemory(device) if device.type == "cuda" else ms.memory.track()


def network(method: str, job: Job) -> DenseNet:
    model = DenseNet(
        job.depth, job.growth_rate, checkpoint=method, norm=norm_of(method), seed=job.seed
    )
    return model.to(job.device)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    # As in the DenseNet paper, but for the drop of the rate at half time: in a short run it would
    # come before the network has learnt much.
    return torch.optim.SGD(
        model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-4
    )


class Trainer:
    """One method's model, optimizer and readings.

    ``memory.peak`` counts weights, gradients and optimizer state too, but not the batch.
    """

    def __init__(self, method: str, job: Job) -> None:
        self.device = job.device
        self.watched = max(1, job.skip)
        self.norm = norm_of(method)
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self.memory = memory_of(job.device)
        with self.memory:
            self.model = network(method, job)
            self.optimizer = sgd(self.model)
        drop = max(1, job.steps * 3 // 4)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, drop, gamma=0.1)
        self.norms = [
            m for m in self.model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)
        ]

    def step(self, x: Tensor, y: Tensor, seed: int) -> None:
        torch.manual_seed(
            seed
        )  # the methods share one generator: each must find it at the same place
        with self.memory if len(self.seconds) < self.watched else contextlib.nullcontext():
            self._synchronize()
            start = time.perf_counter()
            loss = self._train(x, y)
            self._synchronize()
            self.seconds.append(time.perf_counter() - start)
        self.losses.append(loss)
        self.schedule.step()

    def _train(self, x: Tensor, y: Tensor) -> float:
        # A function of its own, so that loss and graph are freed while the tracker still looks.
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.model(x), y)
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    @torch.no_grad()
    def test_error(self, batches: Iterable[tuple[Tensor, Tensor]]) -> float:
        self.model.eval()
        wrong = count = 0
        for x, y in batches:
            wrong += int((self.model(x).argmax(dim=1) != y).sum())
            count += len(y)
        return wrong / count

    def running_statistics(self) -> Tensor:
        return torch.cat([torch.cat((norm.running_mean, norm.running_var)) for norm in self.norms])

    def updates(self) -> Tensor:
        """How often each BatchNorm has counted its statistics."""
        return torch.stack([norm.num_batches_tracked for norm in self.norms])


def train(trainers: dict[str, Trainer], images: Images, job: Job, progress: bool = True) -> None:
    """Every trainer makes a step, in an order that favours none, before the next step begins."""
    epochs = (
        images.epoch(job.batch_size, job.device, job.seed + epoch) for epoch in range(job.epochs)
    )
    rounds = bar(range(job.steps), progress)
    for step, (x, y) in zip(rounds, itertools.chain.from_iterable(epochs), strict=False):
        for name in balanced_order(list(trainers), step):
            trainers[name].step(x, y, job.seed + step)
        rounds.set_postfix({"loss": f"{trainers[name].losses[-1]:.3f}"}, refresh=False)


def one_ulp_away(job: Job, seed: int) -> Trainer:
    """The naive method, from weights each moved up or down by the smallest step float32 has."""
    twin = Trainer("naive", job)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in twin.model.parameters():
            up = torch.rand(parameter.shape, generator=generator).to(parameter.device) < 0.5
            towards = torch.where(up, torch.inf, -torch.inf).to(parameter.dtype)
            parameter.copy_(torch.nextafter(parameter, towards))
    return twin
