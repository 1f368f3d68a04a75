"""memory.predict() of steps that name a card: autocast, and what else of CUDA they call."""

import contextlib
import warnings
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from helpers import Shared
from sampling import share
from torch import nn

import memsave_ext as ms
from memsave_ext.predict import predict
from memsave_ext.shared import device_memory


class Net(nn.Module):
    """``cast`` says what autocast does by itself."""

    def __init__(self, cast):
        super().__init__()
        self.cast = cast
        self.norm, self.up, self.down = nn.LayerNorm(128), nn.Linear(128, 512), nn.Linear(512, 128)

    def linear(self, layer, x):
        if self.cast is None:
            return layer(x)
        return F.linear(x.to(self.cast), layer.weight.to(self.cast), layer.bias.to(self.cast))

    def forward(self, x):
        wide = self.linear(self.up, self.norm(x))
        wide = F.relu(wide).float() if self.cast else F.relu(wide)
        return self.linear(self.down, wide.exp())


def builder(around, cast=None, seen=None):
    def build():
        model = Net(cast).to("cuda")
        optimizer = torch.optim.AdamW(model.parameters())
        scaler = torch.amp.GradScaler("cuda")
        x = torch.randn(4096, 128, device="cuda")

        def step():
            with around():
                y = model(x)
                loss = y.float().square().mean()
            if seen is not None:
                seen.extend((y.dtype, loss.dtype))
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)

        return model, optimizer, step

    return build


def made_before():
    """As accelerate makes one, which it enters in every forward."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # there is no card
        made = torch.autocast("cuda", dtype=torch.bfloat16)
    made._enabled = True
    return made


MADE = made_before()
WAYS = {
    "made before": (lambda: MADE, torch.bfloat16),
    "by name": (lambda: torch.autocast("cuda"), torch.float16),
    "bfloat16": (lambda: torch.autocast("cuda", dtype=torch.bfloat16), torch.bfloat16),
    "of a device": (
        lambda: torch.amp.autocast(device_type=torch.device("cuda").type, dtype=torch.bfloat16),
        torch.bfloat16,
    ),
    "of a tensor": (lambda: torch.autocast(torch.ones(1).cuda().device.type), torch.float16),
}


@pytest.mark.parametrize("name", share(WAYS, 2))
def test_autocast_as_written_by_hand(name):
    around, dtype = WAYS[name]
    seen = Shared()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        predicted = ms.memory.predict(builder(around, seen=seen), device="cuda")
    by_hand = ms.memory.predict(builder(contextlib.nullcontext, dtype), device="cuda")
    assert seen.values() == [dtype, torch.float32] * 2
    assert MADE.device == "cuda"
    assert predicted.peak == pytest.approx(by_hand.peak, rel=0.02)
    plain = ms.memory.predict(builder(contextlib.nullcontext), device="cuda")
    assert abs(predicted.peak - plain.peak) > 0.05 * plain.peak


def test_a_model_predicted_inside_of_autocast():
    def predicted():
        model = Net(None)
        optimizer = torch.optim.AdamW(model.parameters())
        batch, loss = torch.randn(4096, 128), lambda y: y.float().square().mean()
        return ms.memory.predict(model, optimizer, batch, loss=loss, device="cuda").peak

    plain = predicted()
    try:
        torch.set_autocast_enabled("cuda", True)
        torch.set_autocast_dtype("cuda", torch.bfloat16)
        inside = predicted()
        assert torch.is_autocast_enabled("cuda")
    finally:
        torch.set_autocast_enabled("cuda", False)
        torch.set_autocast_dtype("cuda", torch.float16)
    by_hand = ms.memory.predict(builder(WAYS["bfloat16"][0]), device="cuda").peak
    assert inside == pytest.approx(by_hand, rel=0.04)  # which has a scaler
    assert abs(plain - inside) > 0.05 * plain


def test_what_a_card_computes_in_float32():
    def build():
        model, x = nn.Linear(8, 8), torch.randn(4, 8)

        def step():
            with torch.autocast("cuda", dtype=torch.bfloat16):
                y = model(x)
                assert y.dtype == torch.bfloat16
                for wide in (y.softmax(-1), F.layer_norm(y, (8,)), y.sum(), y.pow(2), y.exp()):
                    assert wide.dtype == torch.float32
                assert F.softmax(y, -1, dtype=torch.bfloat16).dtype == torch.bfloat16
                assert F.gelu(y).dtype == torch.bfloat16
                with torch.autocast("cuda", enabled=False):
                    assert y.exp().dtype == torch.bfloat16
            y.sum().backward()

        return model, None, step

    ms.memory.predict(build, device="cuda")


def test_autocast_stays_as_it_is():
    before = torch.autocast.__init__

    def softmax():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return torch.randn(4).bfloat16().softmax(-1).dtype

    ms.memory.predict(builder(WAYS["by name"][0]), device="cuda")
    assert torch.autocast.__init__ is before
    assert softmax() == torch.bfloat16

    def failing():
        raise KeyError("of the user")

    with pytest.raises(KeyError), torch.autocast("cpu"):
        ms.memory.predict(failing, device="cuda")
    assert torch.autocast.__init__ is before
    # A prediction for the CPU has the CPU's.
    seen = Shared()

    def build():
        return nn.Linear(2, 2), None, lambda: seen.append(softmax())

    ms.memory.predict(build)
    assert seen.values() == [torch.bfloat16] * 2


def test_what_a_step_calls_of_a_card():
    """Streams, events and numbers of cards; and in another thread nothing has changed."""
    before = {name: getattr(torch.cuda, name) for name in ("synchronize", "Stream", "Event")}
    seen = Shared()

    def build():
        torch.cuda.set_device(0)
        model = nn.Linear(64, 64).to(0)
        x = torch.randn(8, 64).to(0, non_blocking=True)
        y = torch.zeros(8, 64, device=0)
        side, start = torch.cuda.Stream(), torch.cuda.Event(enable_timing=True)

        def step():
            start.record()
            assert isinstance(side, torch.cuda.Stream)
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                loss = (model(x) - y).square().mean()
            x.record_stream(side)
            seen.append((x.is_cuda, next(model.parameters()).is_cuda, loss.is_cuda))
            torch.cuda.current_stream().wait_stream(side)
            loss.backward()
            torch.cuda.synchronize()
            assert start.elapsed_time(torch.cuda.Event()) > 0
            model.zero_grad()

        return model, None, step

    assert ms.memory.predict(build, device="cuda").at_peak["gradients"] == 64 * 64 * 4 + 512
    assert seen.values() == [(True, True, True)] * 2
    assert all(getattr(torch.cuda, name) is value for name, value in before.items())


def test_what_a_step_asks_of_a_card(monkeypatch):
    """That of this process answers, where one is in use, else an A100."""
    seen = Shared()

    def build():
        model = nn.Linear(64, 64).to("cuda")
        x = torch.randn(8, 64).pin_memory().to("cuda", non_blocking=True)
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.empty_cache()

        def step():
            state = torch.cuda.get_rng_state()
            model(x).sum().backward()
            torch.cuda.set_rng_state(state)
            model.zero_grad()

        properties = torch.cuda.get_device_properties(0)
        seen.append((properties.major, properties.total_memory, torch.cuda.mem_get_info()))
        seen.append((torch.cuda.get_device_capability("cuda"), torch.cuda.get_device_name()))
        seen.append(torch.cuda.is_bf16_supported(including_emulation=False))
        return model, None, step

    size = 85_094_825_984
    expected = ms.memory.predict(build, device="cuda").at_peak
    a100 = [(8, size, (size, size)), ((8, 0), "NVIDIA A100-SXM4-80GB"), True]
    assert seen.values() == a100 and expected["parameters"] == 64 * 64 * 4 + 512
    seen.clear()
    properties = SimpleNamespace(name="a card", major=7, minor=5, total_memory=1000)
    monkeypatch.setattr(device_memory, "_card", device_memory.Card(properties, (600, 1000)))
    monkeypatch.setattr(predict, "ask_for_child", lambda: None)
    assert ms.memory.predict(build, device="cuda").at_peak == expected
    assert seen.values() == [(7, 1000, (600, 1000)), ((7, 5), "a card"), False]


NORMS = {
    "layer norm": lambda: nn.LayerNorm(64),
    "group norm": lambda: nn.Sequential(nn.Unflatten(1, (64, 64)), nn.GroupNorm(4, 64)),
    "batch norm": lambda: nn.Sequential(nn.Unflatten(1, (64, 64)), nn.BatchNorm1d(64)),
}


@pytest.mark.parametrize("norm", NORMS)
def test_norms_of_narrow_numbers_with_wide_weights(norm):
    """On a CPU their statistics are wide, and the gradient of their input is narrow."""

    def build():
        model = NORMS[norm]()
        shape = (2048, 64) if norm == "layer norm" else (32, 64 * 64)
        x = torch.randn(shape).bfloat16().requires_grad_()

        def step():
            y = model(x)
            y.backward(y.detach())
            x.grad = None
            model.zero_grad()

        return model, None, step

    predicted = ms.memory.predict(build).peak
    model, _, step = build()
    step()
    with ms.memory.track(model) as track:
        step()
    assert predicted == pytest.approx(track.peak, rel=1e-3)
