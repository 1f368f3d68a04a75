"""DenseNet-BC for 32x32 images, whose recomputed region can be run in several ways.

The network is the one of Huang et al., "Densely Connected Convolutional Networks" (CVPR 2017). What
is recomputed follows Pleiss et al., "Memory-Efficient Implementation of DenseNets"
(arXiv:1707.06990): concatenation and normalisation are cheap to compute and, kept for every layer,
grow with the square of the depth.
"""

import functools
import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import memsave_ext as ms

Region = Callable[..., Tensor]
Strategy = Callable[[Region, Sequence[Tensor], Sequence[Tensor]], Tensor]


def _naive(region: Region, inputs: Sequence[Tensor], parameters: Sequence[Tensor]) -> Tensor:
    return region(*inputs)


def _torch(region: Region, inputs: Sequence[Tensor], parameters: Sequence[Tensor]) -> Tensor:
    return checkpoint(region, *inputs, use_reentrant=False)


def _torch_no_early_stop(
    region: Region, inputs: Sequence[Tensor], parameters: Sequence[Tensor]
) -> Tensor:
    return checkpoint(region, *inputs, use_reentrant=False, early_stop=False)


def _torch_reentrant(
    region: Region, inputs: Sequence[Tensor], parameters: Sequence[Tensor]
) -> Tensor:
    return checkpoint(region, *inputs, use_reentrant=True)


# A wrapped region for each layer. Not kept in the layer: a copy of that would have this one's.
_wrapped: weakref.WeakKeyDictionary[nn.Module, nn.Module] = weakref.WeakKeyDictionary()


def _fairscale(region: Region, inputs: Sequence[Tensor], parameters: Sequence[Tensor]) -> Tensor:
    from fairscale.nn.checkpoint import checkpoint_wrapper

    layer = region.__self__
    if layer not in _wrapped:
        _wrapped[layer] = checkpoint_wrapper(_Bottleneck(layer))
    return _wrapped[layer](*inputs)


class _Bottleneck(nn.Module):
    """A layer's region as a module, which is what fairscale wraps."""

    def __init__(self, layer: "DenseLayer") -> None:
        super().__init__()
        self.norm1, self.relu1, self.conv1 = layer.norm1, layer.relu1, layer.conv1

    def forward(self, *features: Tensor) -> Tensor:
        return self.conv1(self.relu1(self.norm1(torch.cat(features, dim=1))))


def _memsave_ext(region: Region, inputs: Sequence[Tensor], parameters: Sequence[Tensor]) -> Tensor:
    return ms.CheckpointFunction.apply(region, len(inputs), *inputs, *parameters)


def _memsave_ext_checkpoint(
    region: Region, inputs: Sequence[Tensor], parameters: Sequence[Tensor]
) -> Tensor:
    return ms.checkpoint(region, *inputs)


STRATEGIES: dict[str, Strategy] = {
    "naive": _naive,
    "memsave_ext_batch_norm": _naive,
    "torch": _torch,
    "torch_reentrant": _torch_reentrant,
    "torch_no_early_stop": _torch_no_early_stop,
    "fairscale": _fairscale,
    "memsave_ext": _memsave_ext,
    "memsave_ext_checkpoint": _memsave_ext_checkpoint,
    "memsave_ext_remat": _naive,  # the whole network is under remat
}
CHECKPOINTS = ("memsave_ext", "memsave_ext_checkpoint")
OURS = (*CHECKPOINTS, "memsave_ext_remat")  # recompute
LABELS = {
    "naive": "naive",
    "memsave_ext_batch_norm": "naive with memsave_ext.BatchNorm2d",
    "torch": "torch checkpoint",
    "torch_reentrant": "torch checkpoint, use_reentrant=True",
    "torch_no_early_stop": "torch checkpoint, early_stop=False",
    "fairscale": "fairscale checkpoint_wrapper",
    "memsave_ext": "memsave_ext.CheckpointFunction",
    "memsave_ext_checkpoint": "memsave_ext.checkpoint",
    "memsave_ext_remat": "memsave_ext.remat",
}


@functools.cache
def reasons() -> dict[str, str]:
    """Why some methods cannot run here."""
    try:
        import fairscale.nn.checkpoint  # noqa: F401
    except Exception as error:  # one built for another torch may raise anything
        return {"fairscale": str(error).partition("\n")[0]}
    return {}


def available() -> list[str]:
    return [name for name in STRATEGIES if name not in reasons()]


def norm_of(method: str) -> type[nn.Module]:
    return ms.BatchNorm2d if method.startswith("memsave_ext") else nn.BatchNorm2d


def without_checkpoint(method: str) -> str:
    """The method that computes the same, on the same kernels, and keeps everything."""
    return "memsave_ext_batch_norm" if method in OURS else "naive"


class DenseLayer(nn.Module):
    """Bottleneck layer: all earlier features -> 4k channels by 1x1 -> k new channels by 3x3."""

    def __init__(
        self, channels: int, growth_rate: int, run: Strategy, norm: type[nn.Module]
    ) -> None:
        super().__init__()
        self.run = run
        self.norm1 = norm(channels)
        self.relu1 = nn.ReLU(inplace=True)
        self.conv1 = nn.Conv2d(channels, 4 * growth_rate, kernel_size=1, bias=False)
        self.norm2 = norm(4 * growth_rate)
        self.relu2 = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(4 * growth_rate, growth_rate, kernel_size=3, padding=1, bias=False)

    def bn_function(self, *features: Tensor) -> Tensor:
        """The region to recompute."""
        return self.conv1(self.relu1(self.norm1(torch.cat(features, dim=1))))

    def forward(self, features: Sequence[Tensor]) -> Tensor:
        # Without a graph there is nothing to save, and torch's reentrant checkpoint would warn.
        run = self.run if torch.is_grad_enabled() else _naive
        bottleneck = run(
            self.bn_function, features, (self.norm1.weight, self.norm1.bias, self.conv1.weight)
        )
        return self.conv2(self.relu2(self.norm2(bottleneck)))


class DenseBlock(nn.Module):
    """Every layer sees the features of all layers before it."""

    def __init__(
        self, layers: int, channels: int, growth_rate: int, run: Strategy, norm: type[nn.Module]
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            DenseLayer(channels + i * growth_rate, growth_rate, run, norm) for i in range(layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for layer in self.layers:
            features.append(layer(tuple(features)))  # a list would grow before a recompute reads it
        return torch.cat(features, dim=1)


class DenseNet(nn.Module):
    """DenseNet-BC: three dense blocks; transitions halve channels (compression 0.5) and resolution.

    Args:
        depth: number of layers, ``6 * n + 4`` for ``n`` bottleneck layers per block.
        growth_rate: channels each layer adds (k in the paper).
        checkpoint: how the region is run, a key of :data:`STRATEGIES`.
        norm: BatchNorm class, called with the number of channels.
        seed: of the weights, which depend on nothing else but the shape of the network.

    Input ``(N, 3, 32, 32)``, output logits ``(N, num_classes)``.
    """

    def __init__(
        self,
        depth: int = 100,
        growth_rate: int = 12,
        *,
        checkpoint: str = "naive",
        norm: type[nn.Module] = nn.BatchNorm2d,
        num_classes: int = 10,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if depth < 10 or (depth - 4) % 6:
            raise ValueError(
                f"depth must be 6 * n + 4 with n >= 1 (10, 16, ... 40, ... 100), got {depth}"
            )
        if growth_rate < 1:
            raise ValueError(f"growth_rate must be at least 1, got {growth_rate}")
        layers, run = (depth - 4) // 6, STRATEGIES[checkpoint]

        channels = 2 * growth_rate
        parts: list[nn.Module] = [nn.Conv2d(3, channels, kernel_size=3, padding=1, bias=False)]
        for block in range(3):
            parts.append(DenseBlock(layers, channels, growth_rate, run, norm))
            channels += layers * growth_rate
            parts += [norm(channels), nn.ReLU(inplace=True)]
            if block < 2:
                parts += [
                    nn.Conv2d(channels, channels // 2, kernel_size=1, bias=False),
                    nn.AvgPool2d(2),
                ]
                channels //= 2
        self.features = nn.Sequential(*parts)
        self.classifier = nn.Linear(channels, num_classes)
        self._initialise(seed)
        if checkpoint == "memsave_ext_remat":
            ms.remat_module(self)

    def _initialise(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):  # He et al. 2015, as in the paper
                nn.init.kaiming_normal_(
                    module.weight, mode="fan_out", nonlinearity="relu", generator=generator
                )
        nn.init.xavier_uniform_(self.classifier.weight, generator=generator)
        nn.init.zeros_(self.classifier.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.features(x)
        return self.classifier(nn.functional.adaptive_avg_pool2d(x, 1).flatten(1))
