"""Images for the benchmarks, kept as uint8 so that a whole data set stays small."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


class DataError(Exception):
    """The data cannot be had; the message says what to do about it."""


@dataclass
class Images:
    """Images ``(N, 3, 32, 32)`` uint8, labels ``(N,)``, and how to normalise image / 255."""

    images: Tensor
    labels: Tensor
    mean: Tensor
    std: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, index: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
        """Normalised float32 images and their labels, on ``device``."""
        x = (self.images[index].float() / 255 - self.mean.view(3, 1, 1)) / self.std.view(3, 1, 1)
        return x.to(device), self.labels[index].to(device)

    def epoch(
        self, batch_size: int, device: torch.device, seed: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Shuffled batches; an incomplete last one is dropped: its step would not compare."""
        order = torch.randperm(len(self), generator=torch.Generator().manual_seed(seed))
        for start in range(0, len(self) - batch_size + 1, batch_size):
            yield self.batch(order[start : start + batch_size], device)

    def in_order(self, batch_size: int, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
        """Every image once, in batches of at most ``batch_size``."""
        for index in torch.arange(len(self)).split(batch_size):
            yield self.batch(index, device)


def load(name: str, root: str | None = None) -> tuple[Images, Images]:
    """Training and test images of ``digits`` or ``cifar10``. Raises :class:`DataError`."""
    if name == "digits":
        return _digits()
    if name == "cifar10":
        return _cifar10(root)
    raise DataError(f"unknown data set {name!r}: choose digits or cifar10")


def _digits() -> tuple[Images, Images]:
    """The 1797 handwritten digits (8x8, values 0..16) that ship with scikit-learn, enlarged."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise DataError("--data digits needs scikit-learn: pip install scikit-learn") from error
    return _enlarged(load_digits)


@functools.cache  # a quarter of a second
def _enlarged(load_digits: Callable[[], Any]) -> tuple[Images, Images]:
    raw = load_digits()
    images = torch.from_numpy(raw.images).float().div(16).unsqueeze(1)
    images = nn.functional.interpolate(images, size=(32, 32), mode="bilinear", align_corners=False)
    images = images.mul(255).round().to(torch.uint8).expand(-1, 3, -1, -1).contiguous()
    labels = torch.from_numpy(raw.target).long()
    # The split has a seed of its own: a run's seed must not decide which images it is tested on.
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    cut = len(labels) * 4 // 5
    return _split(images, labels, order[:cut], order[cut:])


def _cifar10(root: str | None) -> tuple[Images, Images]:
    try:
        from torchvision.datasets import CIFAR10
    except (ImportError, RuntimeError) as error:  # the latter: built for another torch
        raise DataError(
            f"--data cifar10 needs torchvision built for torch {torch.__version__}: "
            f"pip install torchvision (importing it failed with: {error})"
        ) from error
    if root is None:
        raise DataError("--data cifar10 needs --root PATH, the folder of cifar-10-batches-py")
    try:
        parts = [CIFAR10(root, train=train, download=False) for train in (True, False)]
    except RuntimeError as error:
        raise DataError(
            f"no CIFAR-10 in {root}: --root must hold the folder cifar-10-batches-py (unpack "
            "cifar-10-python.tar.gz from https://www.cs.toronto.edu/~kriz/cifar.html there)"
        ) from error
    images = torch.cat([torch.from_numpy(part.data) for part in parts])
    images = images.permute(0, 3, 1, 2).contiguous()
    labels = torch.cat([torch.tensor(part.targets) for part in parts])
    cut = len(parts[0].targets)
    return _split(images, labels, torch.arange(cut), torch.arange(cut, len(labels)))


def _split(images: Tensor, labels: Tensor, train: Tensor, test: Tensor) -> tuple[Images, Images]:
    # Mean and deviation come from the training images alone, from a sample where there are many.
    sample = images[train[:5000]].float() / 255
    scale = sample.mean(dim=(0, 2, 3)), sample.std(dim=(0, 2, 3))
    return Images(images[train], labels[train], *scale), Images(images[test], labels[test], *scale)
