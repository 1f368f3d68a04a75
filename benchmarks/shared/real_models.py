"""Models of real size for real_limit.py, and what each method needs to train one, on paper."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from tables.real_limit import METHODS

PLAIN, TORCH, EXACT, FORMATS, MOVING = METHODS
MIB, GIB = 2**20, 2**30


@dataclass(frozen=True)
class Shape:
    """A model and its batch: of ``tokens`` tokens for a language model, else of images."""

    kind: str
    depth: int
    width: int
    heads: int
    vocabulary: int
    batch: int
    tokens: int
    parameters: int
    dtype: torch.dtype = torch.float32
    key_value_heads: int = 0  # of a Llama, and the width within its MLPs
    inner: int = 0

    @property
    def is_bfloat16(self) -> bool:
        return self.dtype == torch.bfloat16

    @property
    def largest(self) -> int:
        """Numbers of the largest parameter."""
        return max(self.vocabulary * self.width, (self.inner or 4 * self.width) * self.width)


SHAPES = {
    "GPT-2 tiny": Shape("gpt2", 2, 64, 2, 50257, 1, 512, 3_382_080),
    "ViT tiny": Shape("vit", 2, 64, 2, 1000, 4, 197, 226_984),
    "Llama tiny": Shape("llama", 2, 64, 2, 32000, 1, 512, 4_188_480, torch.bfloat16, 1, 176),
    "GPT-2 124 M": Shape("gpt2", 12, 768, 12, 50257, 4, 512, 124_439_808),
    "GPT-2 355 M": Shape("gpt2", 24, 1024, 16, 50257, 1, 512, 354_823_168),
    "GPT-2 774 M": Shape("gpt2", 36, 1280, 20, 50257, 1, 512, 774_030_080),
    "GPT-2 1.5 B": Shape("gpt2", 48, 1600, 25, 50257, 1, 256, 1_557_611_200),
    "ViT-L/16": Shape("vit", 24, 1024, 16, 1000, 4, 197, 304_326_632),
    "Llama 1.1 B": Shape(
        "llama", 22, 2048, 32, 32000, 1, 512, 1_100_048_384, torch.bfloat16, 4, 5632
    ),
    "Llama 7 B": Shape(
        "llama", 32, 4096, 32, 32000, 1, 128, 6_738_415_616, torch.bfloat16, 32, 11008
    ),
}
TINY = tuple(name for name in SHAPES if name.endswith("tiny"))


class Format(NamedTuple):
    """How parameters and states are kept; ``size`` and ``state`` are bytes for each parameter,
    0 of weights that lie elsewhere."""

    name: str
    dtype: torch.dtype
    size: float
    state: float
    options: dict[str, Any]
    weights_elsewhere: bool = False


def _rounded(bf16: str, bits: int, low: int) -> Format:
    name = f"bf16 {bf16}, {bits}-bit states"
    options: dict[str, Any] = {"bf16": bf16, "state_dtype": f"{bits}bit"}
    return Format(name, torch.bfloat16, 2, low + 2 * (bits / 8) + 1 / 32, options)


FLOAT32 = Format("float32", torch.float32, 4, 8, {})
# What torch's AdamW does with bfloat16 parameters: moments of bfloat16, nothing stochastic.
BFLOAT16 = Format("bfloat16", torch.bfloat16, 2, 4, {"state_dtype": torch.bfloat16})
# From the more exact to the smaller, as docs/choosing.md has them.
SMALLER = (
    Format("float32, 8-bit states", torch.float32, 4, 2 + 1 / 32, {"state_dtype": "8bit"}),
    _rounded("split8", 8, 1),
    _rounded("stochastic", 8, 0),
    _rounded("stochastic", 4, 0),
)
# Numbers of a block's width that autograd saves for each token, counted by saved_tensors_hooks.
SAVED = {"gpt2": 28, "vit": 16, "llama": 21}
# Of Python and the libraries, before there is a model; transformers takes half of it.
PROCESS = {"gpt2": 370 * MIB, "vit": 190 * MIB, "llama": 370 * MIB}


class Needs(NamedTuple):
    """Bytes of a step: all but ``activations`` are there whatever is recomputed."""

    process: int
    weights: int
    states: int
    gradients: int
    activations: int

    @property
    def total(self) -> int:
        return sum(self)


def needs(shape: Shape, method: str, form: Format) -> Needs:
    """The least peak: with all activations for ``PLAIN``, else with a checkpoint of each block."""
    size = torch.finfo(form.dtype).bits // 8
    tokens = shape.batch * shape.tokens
    block = tokens * shape.width * SAVED[shape.kind] * size
    if method == PLAIN:
        # Logits, their log-softmax, and the gradients of both, in float32.
        logits = 4 * 4 * tokens * shape.vocabulary if shape.kind != "vit" else 0
        # Gradients come while activations go: the most is at one end of backward.
        activations = shape.depth * block + logits
        gradients = max(0, shape.parameters * size - activations)
    else:
        activations = shape.depth * tokens * shape.width * size + block
        # A head that is the embedding, too, has two until they are added.
        gradients = shape.largest * size * (2 if shape.kind == "gpt2" else 1)
    # Those in a file are fetched for one parameter at a time.
    states = form.state * (shape.largest if method == MOVING else shape.parameters)
    weights = form.size * shape.parameters
    return Needs(PROCESS[shape.kind], *map(round, (weights, states, gradients, activations)))


def format_of(shape: Shape, method: str, limit: int) -> Format:
    """The most exact format that fits on paper, or the smallest."""
    own = BFLOAT16 if shape.is_bfloat16 else FLOAT32
    forms: tuple[Format, ...] = (own,)
    if method == FORMATS:
        forms = tuple(f for f in SMALLER if f.dtype == torch.bfloat16 or not shape.is_bfloat16)
    elif method == MOVING:
        moved = {"name": f"{own.name}, weights elsewhere", "size": 0, "weights_elsewhere": True}
        forms = (own, own._replace(**moved))
    fitting = (form for form in forms if needs(shape, method, form).total <= limit)
    return next(fitting, forms[-1])
