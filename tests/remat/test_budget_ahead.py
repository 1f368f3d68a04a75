"""Steps within a budget are planned before their first one, by a run on fake tensors."""

import random
import threading
import warnings

import numpy as np
import pytest
import test_budget as budget
import torch
import torch.distributed as dist
import zoo
from helpers import gradients_and_peak as step
from test_budget import nothing_is_known_yet  # noqa: F401
from torch import nn
from torch.nn import functional as F

import memsave_ext as ms
from memsave_ext.remat import ahead

PROMISED = 1.02


@pytest.fixture
def runs(monkeypatch):
    """What each run on fake tensors has returned: a hash, or why it could not run."""
    found = []
    run = ahead._run

    def counted(*args):
        found.append(run(*args))
        return found[-1]

    monkeypatch.setattr(ahead, "_run", counted)
    return found


def said(block):
    """Its report in one line: sentences are broken at any word."""
    return " ".join(block.report().split())


def wide(*shape):
    return budget.wide(*shape)[0]


class Attention(nn.Module):
    """Attention, dropout and a loss of its own where labels are given."""

    def __init__(self, width=48, vocabulary=96):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(vocabulary, width)
        layers = [nn.TransformerEncoderLayer(width, 4, 4 * width, 0.1, "gelu", batch_first=True)]
        layers += [nn.TransformerEncoderLayer(width, 4, 4 * width, 0.1, "relu", batch_first=True)]
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids, labels=None):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x)
        if labels is None:
            return logits
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


class LossHead(nn.Module):
    """Its loss looks at its targets."""

    def __init__(self):
        super().__init__()
        self.inner = wide(6)
        self.head = nn.Linear(64, 96)

    def forward(self, x, labels):
        hidden = self.inner(x)
        return ms.linear_cross_entropy(
            hidden, self.head.weight, labels, linear_bias=self.head.bias, label_smoothing=0.1,
            weight=torch.ones(96),
        )  # fmt: skip


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        sizes = [(3, 16), (16, 32), (32, 32)]
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(i, o, 3, padding=1), nn.BatchNorm2d(o), nn.SiLU())
            for i, o in sizes
        )
        self.head = nn.Linear(32, 10)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


def ids_of(shape=(4, 32)):
    return torch.randint(96, shape, generator=torch.Generator().manual_seed(1))


def attention_loss(model):
    ids = ids_of()
    return lambda: model(ids, labels=ids)["loss"]


def logits_loss(model):
    ids = ids_of()
    return lambda: F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())


def image_loss(model):
    x = torch.randn(8, 3, 24, 24, generator=torch.Generator().manual_seed(1))
    return lambda: F.cross_entropy(model(x), torch.arange(8))


def wide_loss(model):
    x = torch.randn(512, 64, generator=torch.Generator().manual_seed(1))
    return lambda: model(x).square().mean()


def head_loss(model):
    x = torch.randn(512, 64, generator=torch.Generator().manual_seed(1))
    return lambda: model(x, torch.arange(512) % 96)


CASES = {
    "loss inside": (Attention, attention_loss),
    "loss outside": (Attention, logits_loss),
    "loss head": (LossHead, head_loss),
    "images": (Convolutions, image_loss),
    "another loss": (wide, wide_loss),
}


@pytest.mark.each_value
@pytest.mark.parametrize("share", [0.8, 0.6, 0.4])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("whole_module", [False, True])
def test_the_first_step_keeps_to_the_budget(name, share, whole_module, runs):
    make, batch = CASES[name]
    plain, most = step(model := make(), batch(model))
    model = make()  # with the statistics of its batch norms as they were
    loss = batch(model)
    if whole_module:
        block, context = ms.remat_module(model, budget=share), None
    else:
        block = context = ms.remat(model, budget=share)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of a budget below the least
        grads, peak = step(model, loss, context)
    assert all(map(torch.equal, plain, grads))
    assert len(runs) == 1 and isinstance(runs[0], int), runs
    assert block.least is not None and block.figures().dropped_bytes > 0
    assert peak <= PROMISED * max(block.budget, block.least) and peak < most
    assert "of a budget of" in said(block)


@pytest.mark.parametrize("share", [0.8, 0.3])
def test_chunks_that_are_written_one_by_one(share, runs):
    """What a cell of torch's GRU saves are chunks of one tensor. Each has a version counter, and
    their memory is free once all of them are gone."""
    torch.manual_seed(0)
    model, x = nn.GRU(64, 64, 2), torch.randn(24, 32, 64)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)

    def loss():
        return model(x)[0].square().mean()

    plain, most = step(model, loss)
    handle = ms.remat_module(model, budget=share)
    for _ in range(3):
        optimizer.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of a budget below the least
            grads, peak = step(model, loss)
        assert all(map(torch.equal, plain, grads))
        assert peak <= PROMISED * max(handle.budget, handle.least)
    assert len(runs) == 1 and isinstance(runs[0], int)
    assert peak < most and handle.figures().dropped_bytes > 0
    assert "went differently" not in said(handle)


def test_a_shape_is_run_ahead_once_and_every_new_one_before_its_first_step(runs):
    model = wide(4)
    handle = ms.remat_module(model, budget=0.5)
    for _ in range(2):
        for rows in range(64, 512, 32):
            x = torch.randn(rows, 64)
            _, peak = step(model, lambda x=x: model(x).square().mean())
            assert peak <= PROMISED * max(handle.budget, handle.least), rows
    assert len(runs) == len(range(64, 512, 32))
    model.eval()
    step(model, lambda: model(x).square().mean())
    assert len(runs) == len(range(64, 512, 32)) + 1


def test_a_forgotten_shape_is_run_ahead_again(runs):
    model, x = wide(4), torch.randn(64, 64)
    ms.remat_module(model, budget=0.5)
    step(model, lambda: model(x).sum())
    ms._native.module.remat_forget()
    step(model, lambda: model(x).sum())
    assert len(runs) == 2


def test_shapes_in_turn_are_run_ahead_once_however_many_are_remembered(runs, monkeypatch):
    monkeypatch.setattr(ahead, "_MOST_SHAPES", 2)
    model = wide(2)
    ms.remat_module(model, budget=0.5)
    for rows in (64, 96, 128, 64, 96, 128):
        step(model, lambda rows=rows: model(torch.randn(rows, 64)).square().mean())
    assert len(runs) == 3


def test_gradients_from_before_and_their_absence():
    model, x = wide(), torch.randn(512, 64)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    block = ms.remat(model, budget=0.5)
    with ms.memory.track(model) as track:
        with block:
            loss = model(x).square().mean()
        loss.backward()
    assert track.peak <= PROMISED * max(block.budget, block.least)


@pytest.mark.parametrize("steps_before", [0, 2])
def test_an_optimizer_in_backward(steps_before, runs):
    # Parameters are large beside activations: gradients that stayed would be seen.
    model, x = wide(8, 256), torch.randn(128, 256)
    optimizer = ms.AdamW(model.parameters(), 1e-4, in_backward=True)
    for _ in range(steps_before):
        model(x).square().mean().backward()
        optimizer.step()
    block = ms.remat(model, budget=0.6)
    step(model, lambda: model(x).square().mean(), block)  # its track does not count the states
    assert isinstance(runs[0], int), runs
    assert 0.8 < block.peak / max(block.budget, block.least) <= 1.05


@pytest.mark.parametrize("on", [False, True])
def test_an_optimizer_in_backward_whose_parameters_have_no_other_hooks(on, runs, tmp_path):
    # Nobody else's hook has made a place for those of the run ahead.
    model, x = wide(8, 256), torch.randn(16, 256)
    place = {"states_on": tmp_path} if on else {}
    optimizer = ms.AdamW(model.parameters(), 1e-4, in_backward=True, **place)
    least = []
    for _ in range(3):
        with ms.remat(model, budget="64MiB", optimizer=optimizer) as block:
            loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        least.append(block.least)
    assert isinstance(runs[0], int), runs
    assert least[0] == pytest.approx(least[2], rel=0.1)


def test_a_new_optimizer_of_a_model_like_one_that_has_been_trained(runs):
    # The former's later steps began with its states; this one makes them in its first backward.
    def first_steps():
        model, x = wide(8, 256), torch.randn(128, 256)
        optimizer = ms.AdamW(model.parameters(), 1e-4, in_backward=True)
        figures = []
        for _ in range(3):
            block = ms.remat(model, optimizer=optimizer, budget="8MiB")
            step(model, lambda: model(x).square().mean(), block)
            optimizer.step()
            figures.append((block.least, block.peak))
        return figures

    first, second, third = (first_steps() for _ in range(3))
    assert all(isinstance(run, int) for run in runs)
    assert first[0][0] != first[2][0], "states change what the first step needs"
    assert second == third
    assert second[0] == first[0]


def tracked(model, optimizer, x, block):
    """The peak by ``memory.track`` of a step in a block, with what the optimizer has."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of a budget below the least
        with ms.memory.track(model, optimizer) as track:
            with block:
                loss = model(x).square().mean()
            loss.backward()
    return track.peak


GRADIENTS = {
    "added up": lambda optimizer: optimizer.accumulate(),
    "kept": lambda optimizer: optimizer.paused(keep=True),
    "dropped": lambda optimizer: optimizer.paused(),
}


@pytest.mark.each_value
@pytest.mark.parametrize("steps_before", [0, 1])
@pytest.mark.parametrize("gradients", GRADIENTS)
def test_gradients_that_are_not_stepped(gradients, steps_before, runs):
    model, x = wide(16, 256), torch.randn(512, 256)
    optimizer = ms.AdamW(model.parameters(), 1e-4, in_backward=True)
    for _ in range(steps_before):
        model(x).square().mean().backward()
        optimizer.step()
    weights = sum(p.nbytes for p in model.parameters())
    block = ms.remat(model, budget=(2 + 2 * steps_before) * weights)
    with GRADIENTS[gradients](optimizer):
        peak = tracked(model, optimizer, x, block)
    assert isinstance(runs[0], int), runs
    assert peak <= PROMISED * max(block.budget, block.least)
    assert block.peak == pytest.approx(peak, rel=0.01)
    assert block.figures().dropped_bytes > 0


class LooksAtValues(torch.optim.SGD):
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and p.grad.abs().sum() > 0:
                    p.data.add_(p.grad, alpha=-group["lr"])


@pytest.mark.each_value
@pytest.mark.parametrize("share", [1.1, 0.8, 0.6])
@pytest.mark.parametrize("kind", ["AdamW", "RMSprop", "Adamax", "Adafactor", "Adagrad", "ASGD"])
def test_states_that_other_optimizers_make(kind, share, runs):
    """In the first step, while activations go."""
    model, x = wide(16, 256), torch.randn(512, 256)
    optimizer = ms.in_backward(getattr(torch.optim, kind)(model.parameters(), 1e-4))
    weights = sum(p.nbytes for p in model.parameters())
    block = ms.remat(model, budget=int(share * (2 * weights + 16 * x.nbytes)))
    peak = tracked(model, optimizer, x, block)
    assert isinstance(runs[0], int), runs
    made = [v for p in model.parameters() for v in optimizer.state[p].values()]
    assert sum(v.nbytes for v in made if isinstance(v, torch.Tensor)) > 0
    assert peak <= PROMISED * max(block.budget, block.least)
    assert block.figures().dropped_bytes > 0


def test_an_optimizer_that_looks_at_values(runs):
    model, x = wide(8, 256), torch.randn(128, 256)
    ms.in_backward(LooksAtValues(model.parameters(), 1e-4))
    block = ms.remat(model, budget=0.6)
    step(model, lambda: model(x).square().mean(), block)
    assert isinstance(runs[0], int), runs
    assert 0.8 < block.peak / max(block.budget, block.least) <= 1.05


def test_an_optimizer_in_backward_that_has_frozen_parameters(runs):
    model, x = wide(8, 256), torch.randn(128, 256)
    optimizer = ms.AdamW(model.parameters(), 1e-4, in_backward=True)
    model[2].requires_grad_(False)
    block = ms.remat(model, budget=0.6)
    step(model, lambda: model(x).square().mean(), block)
    assert isinstance(runs[0], int), runs
    assert 0.8 < block.peak / max(block.budget, block.least) <= 1.05
    assert model[2][0].weight not in optimizer.state


@pytest.mark.each_value
@pytest.mark.parametrize("state_dtype", [None, "8bit"])
@pytest.mark.parametrize("steps_before", [0, 1, 2])
def test_states_that_lie_elsewhere(steps_before, state_dtype, tmp_path):
    """They take no memory: neither those from before nor those that the first step makes."""
    model, x = wide(24, 256), torch.randn(512, 256)
    options = {"in_backward": True, "state_dtype": state_dtype, "states_on": tmp_path}
    optimizer = ms.AdamW(model.parameters(), 1e-4, **options)
    for _ in range(steps_before):
        model(x).square().mean().backward()
        optimizer.step()
    weights = sum(p.nbytes for p in model.parameters())
    block = ms.remat(model, budget=weights + 8 * x.nbytes)
    peak = tracked(model, optimizer, x, block)
    assert block.figures().dropped_bytes > 0
    assert block.peak == pytest.approx(peak, rel=0.01)
    assert peak <= PROMISED * max(block.budget, block.least)
    assert block.least < 2.2 * weights  # without a file states alone take as much as 2


class Watched(nn.Module):
    """Writes down what its forward does, in itself and in its argument."""

    def __init__(self):
        super().__init__()
        self.inner = wide(4)
        self.register_buffer("seen", torch.zeros(()))
        self.calls, self.last, self.scale = 0, None, torch.ones(64)

    def forward(self, x, notes):
        self.calls += 1
        self.seen += 1
        random.random()
        np.random.rand()
        torch.rand(3)
        y = self.last = self.inner(x * self.scale) * torch.rand(())
        notes.append(y)
        return y


def test_nothing_but_the_plan_is_left_of_the_run_ahead(runs):
    model, x, notes, heard = Watched(), torch.randn(64, 64), [], []
    model.inner[0].register_forward_hook(lambda *_: heard.append(1))

    def states():
        return torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()

    step(model, lambda: model(x, []).sum())  # from which the random numbers go on
    random.seed(0), np.random.seed(0)
    step(model, lambda: model(x, []).sum())
    expected = states()
    random.seed(0), np.random.seed(0)
    heard.clear()
    with ms.remat(model, budget=0.5):
        torch.manual_seed(3)
        model(x, notes).sum().backward()
    assert isinstance(runs[0], int), runs
    assert (model.calls, model.seen.item(), len(notes), len(heard)) == (3, 3, 1, 1)
    assert type(model.last) is torch.Tensor and notes[0] is model.last
    assert torch.equal(states()[0], expected[0]) and states()[1:] == expected[1:]
    assert all(
        type(t) in (torch.Tensor, nn.Parameter) for t in model.state_dict(keep_vars=True).values()
    )


def test_hooks_of_torch_take_part(runs):
    model = nn.Sequential(nn.utils.weight_norm(nn.Linear(64, 64)), nn.GELU(), nn.Linear(64, 64))
    x, block = torch.randn(512, 64), ms.remat(model, budget=0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _, peak = step(model, lambda: model(x).square().mean(), block)
    assert isinstance(runs[0], int) and block.least is not None
    assert peak <= PROMISED * max(block.budget, block.least)


def test_channels_of_one_pixel_that_are_last(runs):
    """torch tells by strides of dimensions of one element what it does after a mean."""

    class Pools(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.inner, self.head = nn.Conv2d(32, 64, 1), nn.Linear(64, 64)
            self.norm = nn.LayerNorm(64)

        def forward(self, x):
            y = self.norm(self.inner(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
            return F.gelu(self.head(F.adaptive_avg_pool2d(y, 1).flatten(1)))

    model, x = Pools(), torch.randn(64, 32, 1, 1)
    block = ms.remat(model, budget=0.6)
    step(model, lambda: model(x).square().mean(), block)
    assert isinstance(runs[0], int) and block.least is not None, said(block)


@pytest.mark.parametrize(
    ("name", "share"), [("deberta-v2", 0.3), ("timm coatnet", 0.3), ("opt", 0.8), ("opt", 0.45)]
)
def test_models_of_libraries(name, share, runs):
    """They look at tensors, or save results, as none of the models above."""
    entry = zoo.ENTRIES[name]
    plain, _ = step(model := entry.build(), entry.batch(model))
    handle = ms.remat_module(model := entry.build(), budget=share)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of a budget below the least
        grads, peak = step(model, entry.batch(model))
    assert all(torch.equal(a, b) for a, b in zip(plain, grads, strict=True) if a is not None)
    assert isinstance(runs[0], int) and handle.least is not None, said(handle)
    assert peak <= PROMISED * max(handle.budget, handle.least)


class Chooses(nn.Module):
    """Its result has as many rows as the input has positive ones."""

    def __init__(self):
        super().__init__()
        self.inner = wide(4)

    def forward(self, x):
        return self.inner(x[x[:, 0] > 0])


def test_what_cannot_run_on_fake_tensors_is_measured_and_the_report_says_so(runs):
    model, x = Chooses(), torch.randn(256, 64)
    plain, _ = step(model, lambda: model(x).sum())
    block = ms.remat(model, budget=0.5)
    grads, _ = step(model, lambda: model(x).sum(), block)
    assert all(map(torch.equal, plain, grads))
    assert "depends on the values" in runs[0] and runs[0] in said(block)
    assert block.least is None
    step(model, lambda: model(x).sum(), ms.remat(model, budget=0.5))
    assert len(runs) == 1  # the reason is known


@pytest.mark.parametrize(
    ("block_of", "reason"),
    [
        (lambda model: ms.remat(torch.jit.script(model), budget=0.5), "given a scripted model"),
        (lambda model: ms.remat(budget=0.5), "was given no model"),
        (
            lambda model: ms.remat(model, budget=0.5),
            "saved for backward before the model was called",
        ),
    ],
)
def test_blocks_that_are_measured(block_of, reason, runs):
    model, x = wide(4), torch.randn(64, 64, requires_grad=True)
    with block_of(model) as block:
        loss = model(x.sin()).sum()
    loss.backward()
    assert reason in said(block) and not runs


def test_what_a_block_does_before_it_calls_its_model(runs):
    model, x = wide(), torch.randn(512, 64)
    plain, most = step(model, lambda: model(x.sin() + 1).square().mean())
    for _ in range(2):
        block = ms.remat(model, budget=0.5)
        grads, peak = step(model, lambda: model(x.sin() + 1).square().mean(), block)
        assert all(map(torch.equal, plain, grads)) and block.least is not None
        assert peak <= 1.05 * max(block.budget, block.least) and peak < most
    assert len(runs) == 1 and isinstance(runs[0], int)


def test_modes_and_hooks_that_would_see_fake_tensors_keep_it_from_running(runs):
    model, x, seen = wide(4), torch.randn(64, 64), []

    def pack(tensor):
        seen.append(type(tensor))
        return tensor

    handle = ms.remat_module(model, budget=0.5)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        model(x).sum().backward()
    assert "saved-tensor hooks" in runs[0]
    with torch.device("cpu"):
        model(x[:32]).sum().backward()
    assert "function mode of torch" in runs[1] and runs[1] in said(handle)
    assert set(seen) <= {torch.Tensor, nn.Parameter}


class Reduces(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = wide(4)

    def forward(self, x):
        y = self.inner(x)
        with torch.no_grad():
            dist.all_reduce(y.sum())
        return y


def test_collectives_are_not_run_ahead(runs):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model, x = Reduces(), torch.randn(64, 64)
        with ms.remat(model, budget=0.5):
            loss = model(x).sum()
        loss.backward()
    finally:
        dist.destroy_process_group()
    assert "communicates with other processes" in runs[0]


def test_another_way_than_the_one_run_ahead(runs):
    """As of a model that asks where it runs."""
    ways = []

    class Turns(nn.Module):
        def __init__(self):
            super().__init__()
            ways = [wide(4), nn.Sequential(nn.Tanh(), wide(4))]
            self.first, self.ways = wide(4), nn.ModuleList(ways)

        def forward(self, x):
            return self.ways[0 if ms.is_dry_run() else ways.pop()](self.first(x))

    model, x = Turns(), torch.randn(128, 64)

    def train(*turns):
        ways[:] = turns
        block = ms.remat(model, budget=0.5)
        grads, _ = step(model, lambda: model(x).sum(), block)
        return grads, block

    def same(one, other):
        return one is other if one is None or other is None else torch.equal(one, other)

    ways.append(1)
    plain, _ = step(model, lambda: model(x).sum())
    grads, block = train(1)
    assert len(runs) == 1 and isinstance(runs[0], int) and not ways
    assert all(map(same, plain, grads)) and block.least is None
    assert "went differently than on fake tensors" in said(block)
    grads, block = train(1)
    assert all(map(same, plain, grads)) and block.least is not None and len(runs) == 1


def test_autocast(runs):
    model, x = wide(), torch.randn(512, 64)

    def loss():
        with torch.autocast("cpu", torch.bfloat16):
            return F.cross_entropy(model(x), torch.zeros(512, dtype=torch.long))

    plain, most = step(model, loss)
    block = ms.remat(model, budget=0.5)
    grads, peak = step(model, loss, block)
    assert all(map(torch.equal, plain, grads)) and isinstance(runs[0], int)
    assert peak <= PROMISED * max(block.budget, block.least) and peak < most


def test_a_strict_budget_that_is_too_small_is_refused_in_the_first_step():
    model, x = wide(), torch.randn(512, 64)
    with (
        pytest.raises(torch.OutOfMemoryError, match="needs at least"),
        ms.remat(model, budget=1000, strict=True),
    ):
        model(x)
    assert not any(p.grad is not None for p in model.parameters())


def test_threads_run_ahead_one_after_the_other(runs):
    # Made here: threads share the generator that makes parameters.
    models = [
        (wide(4, width), wide(4, width), torch.randn(64, width)) for width in (32, 40, 48, 56)
    ]

    def train(model, plain, x):
        block = ms.remat(model, budget=0.5)
        with block:
            loss = model(x).square().mean()
        loss.backward()
        plain(x).square().mean().backward()
        pairs = zip(model.parameters(), plain.parameters(), strict=True)
        out.append(all(torch.equal(p.grad, q.grad) for p, q in pairs))

    out = []
    threads = [threading.Thread(target=train, args=args) for args in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert out == [True] * 4 and len(runs) == 4 and all(isinstance(run, int) for run in runs)


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = wide(4)

    def forward(self, x, scale=1.0, name="", depth=1):
        for _ in range(depth):
            x = self.inner(x)
        return x * scale


def test_numbers_and_texts_do_not_run_ahead_again(runs):
    model, x = Scaled(), torch.randn(128, 64)
    handle = ms.remat_module(model, budget=0.6)
    for i in range(4):
        step(model, lambda i=i: model(x, 0.5 + i, name=f"step {i}").square().mean())
        assert "of a budget of" in said(handle)
    assert len(runs) == 1 and isinstance(runs[0], int)
    known = ahead.ahead_of(model)._steps
    assert all(isinstance(key, int) and isinstance(value, int) for key, value in known.items())
    # One that changes the operators is noticed by them, and no plan is followed any more.
    for _ in range(2):
        _, peak = step(model, lambda: model(x, depth=2).square().mean())
    assert peak <= PROMISED * max(handle.budget, handle.least)
    assert len(runs) <= 2


@pytest.mark.parametrize("whole_module", [False, True])
def test_without_a_run_ahead(whole_module, runs):
    model, x = wide(4), torch.randn(128, 64)
    if whole_module:
        block, context = ms.remat_module(model, budget=0.6, ahead=False), None
    else:
        block = context = ms.remat(model, budget=0.6, ahead=False)
    step(model, lambda: model(x).square().mean(), context)
    assert not runs and "no plan yet: ahead=False was passed" in said(block)


def test_a_run_ahead_that_takes_too_long(runs):
    class Loops(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = wide(2)

        def forward(self, x):
            while ms.is_dry_run():
                x = x + 1
            return self.inner(x)

    model, x = Loops(), torch.randn(128, 64)
    handle = ms.remat_module(model, budget=0.6, ahead=0.5)
    step(model, lambda: model(x).square().mean())
    assert "running it on fake tensors took longer than" in said(handle)
    with pytest.raises(RuntimeError, match=r"predict: .* took longer than 0\.5 s"):
        ms.memory.predict(model, None, x, loss=lambda y: y.sum(), timeout=0.5)


@pytest.mark.parametrize(
    ("ahead", "error", "told"),
    [("no", TypeError, "got str"), (0.0, ValueError, "got 0.0"), (-1, ValueError, "got -1")],
)
def test_what_ahead_may_be(ahead, error, told):
    with pytest.raises(error, match=f"remat: ahead must be a bool.*{told}"):
        ms.remat(wide(), budget=0.5, ahead=ahead)
    with pytest.raises(error, match="remat: ahead must be a bool"):
        ms.remat_module(wide(), budget=0.5, ahead=ahead)


def test_a_model_goes_by_its_own_steps_however_many_there_are():
    """Those of models that step in backward, and of one whose gradients stay."""

    def peaks(in_backward, runs_ahead=True):
        torch.manual_seed(0)
        sizes = nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)
        model, x = nn.Sequential(*sizes, *sizes[:2], nn.Linear(256, 64)), torch.randn(128, 64)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        if in_backward:
            optimizer = ms.in_backward(optimizer)
        handle = ms.remat_module(model, budget=1_400_000, optimizer=optimizer, ahead=runs_ahead)
        for _ in range(3):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            yield handle.peak / max(handle.budget, handle.least)

    first = list(peaks(True))
    for _ in range(70):
        list(peaks(True, runs_ahead=False))
    for _ in range(2):
        assert max(peaks(False)) <= PROMISED
        assert list(peaks(True)) == first
