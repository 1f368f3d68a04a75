"""Models that do what people's code does: closures, caches, registries, threads, loops on values.

Each is a class whose instances are called with rows of ``WIDTH`` numbers. ``noted`` has what it did
outside of itself, in order.
"""

import contextlib
import functools
import logging
import random
import sys
import types
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

WIDTH = 32
noted = []
MODELS = {}


def model(kind):
    MODELS[kind.__name__] = kind
    return kind


class Layers(nn.Module):
    """Four blocks; a subclass says what one does, or what is around them."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
            for _ in range(4)
        )

    def forward(self, x):
        for part in self.parts:
            x = self.block(part, x)
        return x

    def block(self, part, x):
        return x + part(x)


@model
class Closures(nn.Module):
    class Part(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
            self.mlp = lambda x: self.b(F.gelu(self.a(x)))

        def forward(self, x):
            return x + self.mlp(x)

    def __init__(self):
        super().__init__()
        self.parts = nn.Sequential(*[self.Part() for _ in range(4)])

    def forward(self, x):
        return self.parts(x)


@model
class PatchedForwards(Layers):
    def __init__(self):
        super().__init__()
        for part in self.parts:
            part.forward = types.MethodType(lambda self, x: self[2](torch.tanh(self[0](x))), part)


@model
class Partials(Layers):
    def __init__(self):
        super().__init__()
        self.calls = [functools.partial(self._scaled, part, 0.5) for part in self.parts]

    @staticmethod
    def _scaled(part, scale, x):
        return x + scale * part(x)

    def forward(self, x):
        for call in self.calls:
            x = call(x)
        return x


@model
class WeakParents(Layers):
    def __init__(self):
        super().__init__()
        self.shared = nn.Linear(WIDTH, WIDTH)
        for part in self.parts:
            part.__dict__["parent"] = weakref.ref(self)

    def block(self, part, x):
        return x + part(part.parent().shared(x))


ELSEWHERE = []


@model
class Globals(Layers):
    """A layer that no module holds."""

    def __init__(self):
        super().__init__()
        ELSEWHERE[:] = [nn.Linear(WIDTH, WIDTH)]

    def block(self, part, x):
        return x + part(ELSEWHERE[0](x))


@functools.lru_cache
def table(rows):
    noted.append("table")
    return torch.linspace(0, 1, rows)[:, None].sin()


@model
class CachedTables(Layers):
    def __init__(self):
        super().__init__()
        table.cache_clear()

    def block(self, part, x):
        return x * table(len(x)) + part(x)


@model
class ClassCaches(Layers):
    cache = {}  # noqa: RUF012  # shared

    def __init__(self):
        super().__init__()
        self.cache.clear()

    def block(self, part, x):
        if len(x) not in self.cache:
            noted.append("made")
            self.cache[len(x)] = torch.ones(len(x), 1).cumsum(0)
        return x / self.cache[len(x)] + part(x)


@model
class ListsOfLosses(Layers):
    def forward(self, x):
        x = super().forward(x)
        noted.append(x.detach().clone())
        return x


@model
class Counters(Layers):
    def __init__(self):
        super().__init__()
        self.calls = 0
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        self.calls += 1
        self.count += 1
        noted.append((self.calls, self.count.item()))
        return super().forward(x) / self.calls


@model
class Logs(Layers):
    def __init__(self):
        super().__init__()
        self.log = logging.Logger("user")
        handler = logging.Handler()
        handler.emit = lambda record: noted.append(record.getMessage())
        self.log.addHandler(handler)

    def block(self, part, x):
        self.log.info("block of %d rows", len(x))
        return super().block(part, x)


@model
class Prints(Layers):
    def forward(self, x):
        print(f"{len(x)} rows")
        return super().forward(x)


@model
class Delegates(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Layers()

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.inner, name)

    def forward(self, x):
        for part in self.parts:
            x = self.block(part, x)
        return x


@model
class Registries(Layers):
    known = weakref.WeakValueDictionary()  # noqa: RUF012  # shared

    def __init__(self):
        super().__init__()
        for number, part in enumerate(self.parts):
            self.known[number] = part

    def forward(self, x):
        for number in sorted(self.known):
            x = x + self.known[number](x)
        return x


@model
class Properties(Layers):
    @property
    def scaled(self):
        return [p * 2 for p in self.parts[0].parameters()]

    def forward(self, x):
        weight, bias = self.scaled[:2]
        return super().forward(x + F.linear(x, weight, bias)[:, :WIDTH])


@model
class PlainLists(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = [nn.Linear(WIDTH, WIDTH) for _ in range(4)]
        for number, part in enumerate(self.parts):
            self.register_parameter(f"weight{number}", part.weight)

    def forward(self, x):
        for part in self.parts:
            x = x + F.gelu(part(x))
        return x


@model
class ParameterContainers(nn.Module):
    def __init__(self):
        super().__init__()
        self.listed = nn.ParameterList(torch.randn(WIDTH, WIDTH) / 6 for _ in range(3))
        self.named = nn.ParameterDict({"gain": torch.ones(WIDTH)})

    def forward(self, x):
        for weight in self.listed:
            x = x + F.silu(x @ weight) * self.named["gain"]
        return x


@model
class Tied(Layers):
    def __init__(self):
        super().__init__()
        for part in self.parts[1:]:
            part[0].weight = self.parts[0][0].weight
        self.parts[3] = self.parts[2]


@model
class Parametrized(Layers):
    def __init__(self):
        super().__init__()
        nn.utils.parametrizations.weight_norm(self.parts[0][0])
        nn.utils.parametrizations.orthogonal(self.parts[1][2])
        nn.utils.parametrizations.spectral_norm(self.parts[2][0])


@model
class GradientHooks(Layers):
    def __init__(self):
        super().__init__()
        for name, p in self.named_parameters():
            p.register_hook(lambda grad, name=name: noted.append((name, type(grad))))
            p.register_post_accumulate_grad_hook(lambda p: noted.append(type(p.grad)))


@model
class ModuleHooks(Layers):
    def __init__(self):
        super().__init__()
        for part in self.parts:
            part.register_forward_pre_hook(lambda module, args: noted.append("before"))
            part.register_forward_hook(lambda module, args, out: noted.append(type(out)))
            part.register_full_backward_hook(lambda module, *grads: noted.append("backward"))


@model
class TensorHooks(Layers):
    def block(self, part, x):
        y = part(x)
        y.register_hook(lambda grad: noted.append(tuple(grad.shape)))
        return x + y


@model
class LoopsOverValues(Layers):
    """Until it has come near enough."""

    def forward(self, x):
        y, steps = torch.zeros_like(x), 0
        while (x - y).abs().max().item() > 0.1 * x.abs().max().item() and steps < 40:
            y, steps = y + 0.3 * (x - y), steps + 1
        noted.append(steps)
        return super().forward(y)


@model
class Exits(Layers):
    def forward(self, x):
        if not torch.isfinite(x).all() or x.abs().max().item() < 1e-6 or x.sum().item() == 1:
            sys.exit("nothing to train on")
        if x.std().item() == 1:
            sys.exit("no")
        return super().forward(x)


@model
class SwallowsErrors(Layers):
    def forward(self, x):
        try:
            rows = (x[:, 0] > 0).nonzero()
            noted.append(len(rows))
        except Exception:
            noted.append("failed")
            return self.parts[0](x)
        return super().forward(x)


@model
class LooksAtMasks(Layers):
    def __init__(self):
        super().__init__()
        self.register_buffer("mask", torch.arange(WIDTH) % 2 == 0)
        self.register_buffer("off", torch.zeros(WIDTH, dtype=torch.bool))

    def block(self, part, x):
        if self.off.any():
            return x
        if self.mask.all():
            return part(x)
        return x + part(x.masked_fill(self.mask, 0.0))


@model
class Lengths(Layers):
    def __init__(self):
        super().__init__()
        self.register_buffer("lengths", torch.tensor([5, 9, 17]))

    def forward(self, x):
        return super().forward(torch.cat([x[:n] for n in self.lengths.tolist()]))


@model
class DrawsInPython(Layers):
    def block(self, part, x):
        return x + part(x) if random.random() < 0.7 else x + np.random.rand() * x


@model
class OwnGenerators(Layers):
    def __init__(self):
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)

    def block(self, part, x):
        noise = torch.rand(x.shape, generator=self.generator)
        return x + part(x) * noise + F.dropout(x, 0.3)


@model
class RemembersResults(Layers):
    def __init__(self):
        super().__init__()
        self.before = None

    def forward(self, x):
        y = super().forward(x if self.before is None else x + self.before)
        self.before = y.detach()
        return y


@model
class Averages(Layers):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def block(self, part, x):
        with torch.no_grad():
            self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return x + part(x - self.mean)


@model
class AddsModules(Layers):
    """As it is called first."""

    def forward(self, x):
        if not hasattr(self, "activation"):
            noted.append("added")
            self.activation = nn.Softplus()
        return self.activation(super().forward(x))


@model
class ThreadPools(Layers):
    """Whose threads a child process does not have."""

    pool = ThreadPoolExecutor(1)

    def block(self, part, x):
        return x + self.pool.submit(part, x).result()


@model
class Checkpoints(Layers):
    def block(self, part, x):
        return x + checkpoint(part, x, use_reentrant=False)


@model
class ReentrantCheckpoints(Layers):
    def forward(self, x):
        return super().forward(x.detach().requires_grad_())

    def block(self, part, x):
        return x + checkpoint(part, x, use_reentrant=True)


@model
class Functions(Layers):
    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, scale):
            ctx.scale, ctx.kept = scale, x.exp()
            noted.append("forward")
            return ctx.kept * scale

        @staticmethod
        def backward(ctx, grad):
            noted.append("backward")
            return grad * ctx.kept * ctx.scale, None

    def block(self, part, x):
        return x + self.Scaled.apply(torch.tanh(part(x)), 0.5)


@model
class InnerGradients(Layers):
    def forward(self, x):
        x = x.detach().requires_grad_()
        y = super().forward(x)
        (grad,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        return y + grad


@model
class FunctionalCalls(Layers):
    def block(self, part, x):
        halved = {name: p / 2 for name, p in part.named_parameters()}
        return x + torch.func.functional_call(part, halved, (x,))


@model
class CopiesItself(Layers):
    def __deepcopy__(self, memo):
        return self


@model
class DataClasses(Layers):
    @dataclass
    class State:
        x: torch.Tensor
        depth: int = 0

    def forward(self, x):
        state = self.State(x)
        for part in self.parts:
            state = self.State(self.block(part, state.x), state.depth + 1)
        return state.x / state.depth


@model
class Generators(Layers):
    def blocks(self, x):
        for part in self.parts:
            x = x + part(x)
            yield x

    def forward(self, x):
        return sum(self.blocks(x))


@model
class ChangesInPlace(Layers):
    def block(self, part, x):
        y = part(x)
        y[:, ::2] *= 0.5
        y.add_(x)
        return y.relu_()


@model
class Contexts(Layers):
    @contextlib.contextmanager
    def noting(self):
        noted.append("in")
        try:
            yield
        finally:
            noted.append("out")

    def block(self, part, x):
        with self.noting():
            return super().block(part, x)


@model
class Numpy(Layers):
    def forward(self, x):
        noted.append(float(x.detach().numpy().sum()))
        return super().forward(x)


@model
class Sparse(Layers):
    def __init__(self):
        super().__init__()
        self.graph = torch.eye(WIDTH).to_sparse_csr()

    def block(self, part, x):
        return x + (self.graph @ part(x).T).T


class Weight(nn.Parameter):
    """A parameter with attributes that its layer needs, as weights in four bits have."""


@model
class AttributesOfParameters(Layers):
    def __init__(self):
        super().__init__()
        self.weight = Weight(torch.randn(WIDTH, WIDTH) / 6)
        self.weight.state = {"scale": torch.tensor(0.5), "name": "w"}

    def block(self, part, x):
        assert isinstance(self.weight, Weight)
        return x + part(x) + x @ self.weight * self.weight.state["scale"]
