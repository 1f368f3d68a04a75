"""remat on a GPU: gradients bit for bit, within a budget, on another stream, without waiting."""

import contextlib
import gc
import warnings

import pytest
import torch
from on_device import HAS_CUDA, another_stream, capture, needs_cuda, on_every_device
from torch import nn
from torch.nn import functional as F

import memsave_ext as ms

FORMS = {"cheap": {}, "everything": {"_everything": True}, "budget": {"budget": 0.5}}
MOVED = {"moved": {"_everything": True, "offload": "cpu"}}


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x):
        return x + F.dropout(F.gelu(self.layer(self.norm(x))), 0.2)


def train(device, form=None, steps=7, width=64):
    """(parameters, what each step dropped). Activations are many times the parameters."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(width) for _ in range(4))).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    dropped = []
    for number in range(steps):
        torch.manual_seed(number)
        x = torch.randn(512, width).to(device)
        if form is None:
            loss = model(x).square().mean()
        else:
            with ms.remat(model, **(FORMS | MOVED)[form]) as r:
                loss = model(x).square().mean()
        loss.backward()
        if form is not None:
            dropped.append(r.figures().dropped_bytes)
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach() for p in model.parameters()], dropped


@on_every_device
@pytest.mark.parametrize("form", FORMS)
def test_the_bits_of_plain_torch(form, device):
    (expected, _), (found, dropped) = train(device), train(device, form)
    for f, e in zip(found, expected, strict=True):
        assert torch.equal(f, e)
    # On a GPU it depends on times what is cheap.
    assert all(dropped) or form == "cheap"


@pytest.mark.parametrize("budget", [0.5, "8GB"])
def test_replays_of_a_step_within_a_budget(budget):
    """With Adam in backward. The step that is captured goes by its plan's script."""
    device = "cuda" if HAS_CUDA else "cpu"
    ms._native.module.remat_forget()

    def make(**options):
        torch.manual_seed(0)
        model = nn.Sequential(*(Block(64) for _ in range(4))).to(device)
        optimizer = ms.AdamW(model.parameters(), lr=1e-3, in_backward=True, capturable=True)
        if options:
            ms.remat_module(model, **options)
        x = torch.randn(512, 64).to(device)
        torch.manual_seed(1)

        def step():
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        return model, step

    warmup, replays = 24, 3  # first by estimated times, until those of events are known
    model, step = make(budget=budget)
    replay, _ = capture(step, warmup)
    assert model.forward.last._recorder.figures()["passed"]
    for _ in range(replays):
        replay()
    expected, step = make()
    for _ in range(warmup + replays):
        step()
    for f, e in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(f, e, rtol=1e-5, atol=1e-6)


@on_every_device
@pytest.mark.parametrize("share", [0.8, 0.5, 0.3])
@pytest.mark.parametrize("whole_module", [False, True])
def test_every_step_keeps_to_the_budget(whole_module, share, device):
    """Of a shape the first one, too, which ran ahead on fake tensors."""
    ms._native.module.remat_forget()
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(64) for _ in range(6))).to(device)
    block = ms.remat_module(model, budget=share) if whole_module else None
    for rows in (512, 512, 768, 768, 512, 768):
        x = torch.randn(rows, 64).to(device)
        model.zero_grad()
        gc.collect()
        with ms.memory.track(model) as track:
            # On a GPU what others have allocated counts as well, before the step and in it.
            others = torch.cuda.memory_allocated() - track.live if device == "cuda" else 0
            step = block or ms.remat(model, budget=share)
            with contextlib.nullcontext() if whole_module else step:
                loss = model(x).square().mean()
            loss.backward()
            del loss
            peak = track.peak + others
        assert "of a budget of" in " ".join(step.report().split())
        assert step.figures().dropped_bytes > 0
        assert peak <= 1.02 * max(step.budget, step.least)


@needs_cuda
@pytest.mark.parametrize("form", ["everything", "budget"])
def test_on_another_stream(form):
    expected, _ = train("cuda")
    with another_stream():
        found, dropped = train("cuda", form)
    assert all(dropped)
    for f, e in zip(found, expected, strict=True):
        assert torch.equal(f, e)


@needs_cuda
@pytest.mark.skipif(not torch.backends.cudnn.is_available(), reason="needs cuDNN")
def test_recurrent_nets_are_recomputed_without_dropout():
    """The state of cuDNN's dropout changes unseen: with it they are kept."""
    torch.manual_seed(0)
    x, *state = (torch.randn(n, 8, 32, device="cuda") for n in (64, 2, 2))
    dropped = {}
    for dropout in (0.0, 0.5):
        net = nn.LSTM(32, 32, num_layers=2, dropout=dropout).cuda()
        with ms.remat(net, _everything=True) as r:
            loss = net(x, tuple(state))[0].square().sum()
        found = torch.autograd.grad(loss, list(net.parameters()))
        dropped[dropout] = r.figures().dropped_bytes
        if dropout == 0.0:
            plain = net(x, tuple(state))[0].square().sum()
            for f, e in zip(found, torch.autograd.grad(plain, list(net.parameters())), strict=True):
                torch.testing.assert_close(f, e, rtol=1e-4, atol=1e-4)
    assert dropped[0.5] == 0 < dropped[0.0]


@needs_cuda
@pytest.mark.parametrize("share", [0.3, 0.05])
@pytest.mark.parametrize("place", ["the host's memory", "a file"])
def test_moved(share, place, tmp_path):
    """The bits of plain torch within a budget, the second one below the least of recomputing."""
    ms._native.module.remat_forget()
    model = nn.Sequential(*(Block(256) for _ in range(4))).to("cuda")
    x = torch.randn(2048, 256).to("cuda")

    def step(**options):
        torch.manual_seed(1)
        model.zero_grad()
        with ms.remat(model, budget=share, **options) if options else contextlib.nullcontext() as r:
            loss = model(x).square().mean()
        loss.backward()
        return [p.grad.clone() for p in model.parameters()], r

    offload = "cpu" if place == "the host's memory" else tmp_path
    expected, _ = step()
    for _ in range(4):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            found, r = step(offload=offload, offload_limit="1GB")
        for f, e in zip(found, expected, strict=True):
            assert torch.equal(f, e)
        assert r.peak <= 1.02 * max(r.budget, r.least)
    figures = r.figures()
    assert figures.brought_back_bytes >= figures.moved_bytes > 0 == figures.not_moved_bytes


@needs_cuda
@pytest.mark.parametrize("on_another_stream", [False, True])
def test_every_second_content_moved(on_another_stream):
    expected, _ = train("cuda")
    with another_stream() if on_another_stream else contextlib.nullcontext():
        found, _ = train("cuda", "moved")
    for f, e in zip(found, expected, strict=True):
        assert torch.equal(f, e)
