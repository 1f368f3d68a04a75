"""Training steps of many kinds, to compare trackers by: each is (model, optimizer, step)."""

import pytest
import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import nn
from torch.nn import functional as F

import memsave_ext as ms
from memsave_ext import _native
from memsave_ext.checkpoint.fallback import function as fallback_apply


def mlp():
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU())
    return model, torch.randn(8, 16)


def adam_after():
    model, x = mlp()
    optimizer = torch.optim.Adam(model.parameters())

    def step():
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return model, optimizer, step


def adam_in_backward():
    model, x = mlp()
    optimizer = ms.AdamW(model.parameters(), in_backward=True)

    def step():
        model(x).square().mean().backward()
        optimizer.step()

    return model, optimizer, step


def pure_adam_in_backward():
    """All its work is done in a callback at the end of backward."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_native, "module", None)
        return adam_in_backward()


def callback_of_a_callback():
    """As DistributedDataParallel's: memory is changed after every other callback."""
    model, x = mlp()
    queue = torch.autograd.Variable._execution_engine.queue_callback
    kept = []

    def keep():
        kept.append(torch.empty(1000))

    model[0].bias.register_post_accumulate_grad_hook(lambda _: queue(lambda: queue(keep)))

    def step():
        model(x).sum().backward()
        kept.clear()

    return model, None, step


def conv_and_batch_norm():
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(512, 4)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x, y = torch.randn(4, 3, 8, 8), torch.randint(4, (4,))

    def step():
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step


class Dense(nn.Module):
    """A DenseNet's block; ``run`` calls a layer."""

    def __init__(self, run=lambda layer, x: layer(x)):
        super().__init__()
        self.run = run
        self.layers = nn.ModuleList(
            nn.Sequential(ms.BatchNorm2d(4 * i), nn.ReLU(), nn.Conv2d(4 * i, 4, 3, padding=1))
            for i in range(1, 5)
        )

    def forward(self, x):
        for layer in self.layers:
            x = torch.cat([x, self.run(lambda x, layer=layer: layer(x), x)], 1)
        return x


def train_dense(run, size=6):
    model = Dense(run)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(2, 4, size, size, requires_grad=True)

    def step():
        x.grad = None
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step


def dense_concat():
    return train_dense(lambda layer, x: layer(x))


def explicit_region_in_python():
    """The native tracker knows it as somebody's: by modules that run in a backward."""
    return train_dense(
        lambda f, x: fallback_apply.checkpoint_apply(f, 1, x, *f.__defaults__[0].parameters())
    )


def torch_checkpointed():
    return train_dense(lambda f, x: torch_checkpoint.checkpoint(f, x, use_reentrant=False))


def torch_checkpointed_reentrant():
    return train_dense(lambda f, x: torch_checkpoint.checkpoint(f, x, use_reentrant=True))


def torch_checkpointed_whole():
    """Its backward is the first node's, with another backward inside."""
    model, x = mlp()
    x.requires_grad_()
    grad = torch.randn(8, 32)

    def step():
        x.grad = None
        torch_checkpoint.checkpoint(model, x, use_reentrant=True).backward(grad)

    return model, torch.optim.SGD(model.parameters()), step


def torch_checkpointed_nested():
    def run(f, x):
        return torch_checkpoint.checkpoint(
            lambda x: torch_checkpoint.checkpoint(f, x.sin(), use_reentrant=False),
            x,
            use_reentrant=False,
        )

    return train_dense(run)


def accumulated_gradients():
    model, x = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)

    def step():
        for part in x.chunk(4):
            model(part).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    return model, optimizer, step


def closure():
    model, x = mlp()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2, history_size=2)

    def evaluate():
        optimizer.zero_grad()
        loss = model(x).square().sum()
        loss.backward()
        return loss

    return model, optimizer, lambda: optimizer.step(evaluate)


def failing_forward():
    class Fails(nn.Module):
        def forward(self, x):
            if x.sum() < 0:
                raise KeyError("x")
            return x * 2

    model = nn.Sequential(nn.Linear(4, 4), Fails())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    nn.init.ones_(model[0].weight)

    def step():
        with pytest.raises(KeyError):
            model(-torch.ones(3, 4) * 10)
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()

    return model, optimizer, step


def failing_backward():
    model, x = mlp()

    def fail(param):
        raise KeyError("x")

    model[0].weight.register_post_accumulate_grad_hook(fail)

    def step():
        with pytest.raises(KeyError):
            model(x).sum().backward()
        torch.empty(100)

    return model, None, step


def no_optimizer():
    """A step ends where the next forward begins; some of it runs without a graph."""
    model, x = mlp()

    def step():
        with torch.no_grad():
            model(x)
        loss = model(x).sum()
        grads = torch.autograd.grad(loss, [*model.parameters()], create_graph=True)
        sum(g.square().sum() for g in grads).backward()

    return model, None, step


def no_model():
    weight = torch.randn(50, requires_grad=True)
    optimizers = [torch.optim.SGD([weight], lr=0.1, momentum=0.9), torch.optim.Adam([weight])]

    def step():
        weight.square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()

    return None, optimizers, step


def sparse_gradients():
    model = nn.Embedding(40, 8, sparse=True)
    optimizer = torch.optim.SparseAdam([*model.parameters()])

    def step():
        model(torch.tensor([1, 5, 1])).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step


def memory_of_before():
    """Gradients and buffers from before tracking, freed and replaced inside."""
    model, x = mlp()
    model.register_buffer("table", torch.randn(100))
    model(x).sum().backward()
    tables = [torch.randn(70), torch.randn(30)]

    def step():
        model(x)
        if tables:
            model.zero_grad()
            model.table.set_(tables.pop())
        model[0].weight.data = model[0].weight.data.clone()
        model(x).sum().backward()

    return model, None, step


PROGRAMS = [
    adam_after,
    adam_in_backward,
    pure_adam_in_backward,
    callback_of_a_callback,
    conv_and_batch_norm,
    dense_concat,
    explicit_region_in_python,
    torch_checkpointed,
    torch_checkpointed_reentrant,
    torch_checkpointed_whole,
    torch_checkpointed_nested,
    accumulated_gradients,
    closure,
    failing_forward,
    failing_backward,
    no_optimizer,
    no_model,
    sparse_gradients,
    memory_of_before,
]
