"""Models of the rematerialization benchmark: small, whole, and with nothing of ours in them."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import memsave_ext as ms
from shared.models import DenseNet

Norm = Callable[[int], nn.Module]


class TransformerBlock(nn.Module):
    """``post``: norms after the residuals, as in BERT; else before, as in GPT and ViT."""

    def __init__(self, width: int, heads: int, dropout: float, post: bool, causal: bool) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout, self.heads, self.post, self.causal = dropout, heads, post, causal

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(x).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(mixed.transpose(1, 2).flatten(2))

    def mix(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))

    def forward(self, x: Tensor) -> Tensor:
        for part, norm in zip((self.attend, self.mix), self.norms, strict=True):
            if self.post:
                x = norm(x + F.dropout(part(x), self.dropout, self.training))
            else:
                x = x + F.dropout(part(norm(x)), self.dropout, self.training)
        return x


class Transformer(nn.Module):
    def __init__(self, width: int, layers: int, post: bool, causal: bool, dropout: float) -> None:
        super().__init__()
        heads = max(1, width // 32)
        self.blocks = nn.ModuleList(
            TransformerBlock(width, heads, dropout, post, causal) for _ in range(layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class ResidualBlock(nn.Module):
    def __init__(self, norm: Norm, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.convs = nn.ModuleList(
            [
                nn.Conv2d(inputs, width, 3, stride, 1, bias=False),
                nn.Conv2d(width, width, 3, 1, 1, bias=False),
            ]
        )
        self.norms, self.relu = nn.ModuleList(norm(width) for _ in range(2)), nn.ReLU(inplace=True)
        self.skip = nn.Identity()
        if stride > 1 or inputs != width:
            self.skip = nn.Sequential(nn.Conv2d(inputs, width, 1, stride, bias=False), norm(width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.norms[0](self.convs[0](x)))
        return self.relu(self.norms[1](self.convs[1](y)) + self.skip(x))


def resnet(norm: Norm, width: int) -> nn.Module:
    blocks = [
        ResidualBlock(norm, inputs, outputs, stride)
        for inputs, outputs, stride in (
            *((3, width, 1), (width, width, 1)),
            *((width, 2 * width, 2), (2 * width, 2 * width, 1)),
        )
    ]
    return nn.Sequential(*blocks)


class Unet(nn.Module):
    def __init__(self, norm: Norm, width: int) -> None:
        super().__init__()
        self.down = nn.ModuleList(
            [ResidualBlock(norm, 3, width, 1), ResidualBlock(norm, width, 2 * width, 2)]
        )
        self.inner = ResidualBlock(norm, 2 * width, 4 * width, 2)
        self.up = nn.ModuleList(
            [
                ResidualBlock(norm, 6 * width, 2 * width, 1),
                ResidualBlock(norm, 3 * width, width, 1),
            ]
        )

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for block in self.down:
            x = block(x)
            skips.append(x)
        x = self.inner(x)
        for block in self.up:
            x = block(torch.cat([F.interpolate(x, scale_factor=2), skips.pop()], 1))
        return x


class Recurrent(nn.Module):
    """Two LSTMs over time, a step of each at a time."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.cells = nn.ModuleList(nn.LSTMCell(width, width) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        states: list[tuple[Tensor, Tensor] | None] = [None, None]
        outputs = []
        for y in x.unbind(1):
            for i, cell in enumerate(self.cells):
                states[i] = cell(y, states[i])
                y = states[i][0]  # type: ignore[index]
            outputs.append(y)
        return torch.stack(outputs, 1)


@dataclass(frozen=True)
class Case:
    build: Callable[[], nn.Module]
    inputs: tuple[int, ...]  # the shape
    block: type[nn.Module] | None  # what torch's checkpoint would be put around
    memory: float | None = None  # bars, as shares of the plain step's
    time: float | None = None


def cases(scale: int) -> dict[str, Case]:
    """By name; ``scale`` multiplies batches."""

    def transformer(post: bool, causal: bool, shape: tuple[int, ...]) -> Case:
        def build() -> nn.Module:
            return Transformer(shape[-1], 4, post, causal, 0.1)

        return Case(build, shape, TransformerBlock, 0.72, 1.04)

    found = {
        "GPT": transformer(False, True, (2 * scale, 128, 256)),
        "BERT": transformer(True, False, (2 * scale, 128, 256)),
        "ViT": transformer(False, False, (4 * scale, 65, 192)),
        "LSTM": Case(lambda: Recurrent(256), (16 * scale, 32, 256), None),
    }
    for suffix, norm, memory, time in (
        (", ours", ms.BatchNorm2d, 0.60, 1.03),
        ("", nn.BatchNorm2d, 0.65, 1.08),
    ):
        image = (4 * scale, 3, 32, 32)

        def densenet(norm: type[nn.Module] = norm) -> nn.Module:
            model = DenseNet(40, 12, checkpoint="naive", seed=0)
            return ms.convert_batch_norm(model) if norm is ms.BatchNorm2d else model

        found[f"DenseNet{suffix}"] = Case(densenet, image, None, memory, time)
        found[f"ResNet{suffix}"] = Case(
            lambda norm=norm: resnet(norm, 32), image, ResidualBlock, memory, time
        )
        found[f"U-Net{suffix}"] = Case(
            lambda norm=norm: Unet(norm, 24), image, ResidualBlock, memory, time
        )
    return found
