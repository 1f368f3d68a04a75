"""Adam's hooks on several streams: parts of a network run on streams of their own."""

import random

import pytest
import torch
from torch import nn

import memsave_ext as ms
from memsave_ext.adam import host_memory
from memsave_ext.adam.files import Files
from memsave_ext.elsewhere import gradients
from memsave_ext.elsewhere.gradient import GradientElsewhere
from memsave_ext.store import host

DEVICE = "cuda"
pytestmark = pytest.mark.filterwarnings("ignore:memsave_ext. norm_pass")


class Branches(nn.Module):
    """Layers that run each on one of two side streams or on the caller's, as a seed says."""

    def __init__(self, chance):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(chance.randint(3, 6)))
        self.streams = [torch.cuda.Stream() for _ in range(2)]
        # At least two, in which hooks run.
        self.places = [0, 1] + [chance.choice([None, 0, 1]) for _ in self.layers[2:]]
        chance.shuffle(self.places)

    def forward(self, x):
        current = torch.cuda.current_stream()
        total = 0
        for layer, place in zip(self.layers, self.places, strict=True):
            if place is None:
                total = total + layer(x).tanh()
                continue
            stream = self.streams[place]
            stream.wait_stream(current)
            x.record_stream(stream)
            with torch.cuda.stream(stream):
                y = layer(x).tanh()
            current.wait_stream(stream)
            y.record_stream(current)
            total = total + y
        return total


def network(seed):
    torch.manual_seed(seed)
    return Branches(random.Random(seed)).to(DEVICE)


def loss_of(net, step):
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step)).to(DEVICE)
    return net(x).square().mean()


def train(net, optimizer, steps=3, scaler=None, norm=None, on=None):
    """With ``norm`` the backward that measures is on the stream ``on``."""
    for step in range(steps):
        loss = loss_of(net, step)
        if scaler is not None:
            loss = scaler.scale(1000 * loss)
        if norm is not None:
            with optimizer.norm_pass(norm):
                if on is not None:
                    on.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(on):
                    loss.backward(retain_graph=True)
        loss.backward()
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
    return [p.detach().cpu() for p in net.parameters()]


def on_one_stream(net):
    net.places = [None] * len(net.places)
    return net


def assert_same(found, expected):
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


OPTIONS = {"lr": 0.01, "eps": 1e-3}
at_once_or_in_buckets = pytest.mark.parametrize(
    "small_bytes", [0, 1 << 20], ids=["at once", "in buckets"]
)


@at_once_or_in_buckets
def test_gradients_of_several_streams(seed, small_bytes):
    net = network(seed)
    found = train(
        net, ms.AdamW(net.parameters(), in_backward=True, small_bytes=small_bytes, **OPTIONS)
    )
    assert all(p.grad is None for p in net.parameters())
    net = on_one_stream(network(seed))
    assert_same(found, train(net, ms.AdamW(net.parameters(), **OPTIONS)))


@at_once_or_in_buckets
def test_the_norm_of_gradients_of_several_streams(seed, small_bytes):
    net = network(seed)
    optimizer = ms.AdamW(net.parameters(), in_backward=True, small_bytes=small_bytes, **OPTIONS)
    found = train(net, optimizer, norm=0.1)
    net = on_one_stream(network(seed))
    assert_same(found, train(net, ms.AdamW(net.parameters(), clip_global_norm=0.1, **OPTIONS)))


def test_a_norm_that_is_read_on_another_stream(seed):
    """Its block ends on a stream that has not waited for that of the backward."""
    net = network(seed)
    optimizer = ms.AdamW(net.parameters(), in_backward=True, **OPTIONS)
    found = train(net, optimizer, norm=0.1, on=torch.cuda.Stream())
    net = on_one_stream(network(seed))
    assert_same(found, train(net, ms.AdamW(net.parameters(), clip_global_norm=0.1, **OPTIONS)))


@at_once_or_in_buckets
def test_infinite_gradients_of_several_streams(seed, small_bytes):
    """The first scale is so large that gradients overflow, of some parameters or of all."""

    def run(net):
        scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**127, backoff_factor=2.0**-8)
        optimizer = ms.AdamW(
            net.parameters(),
            in_backward=True,
            small_bytes=small_bytes,
            grad_scaler=scaler,
            **OPTIONS,
        )
        found = train(net, optimizer, steps=4, scaler=scaler)
        assert scaler.get_scale() < 2.0**127
        return found

    assert_same(run(network(seed)), run(on_one_stream(network(seed))))


@at_once_or_in_buckets
def test_states_on_the_host(seed, small_bytes, monkeypatch):
    """They come from pinned memory and go back there, on streams of their own."""
    monkeypatch.setattr(host_memory, "SMALLEST", 1)
    ahead = []
    copies = host_memory._Copies.__init__
    monkeypatch.setattr(
        host_memory._Copies, "__init__", lambda *args: (ahead.append(1), copies(*args))[1]
    )
    waits = []
    wait = torch.cuda.Stream.synchronize
    monkeypatch.setattr(
        torch.cuda.Stream, "synchronize", lambda stream: (waits.append(1), wait(stream))[1]
    )
    results = []
    for place in ("cpu", None):
        net = network(seed) if place else on_one_stream(network(seed))
        options = {**OPTIONS, "small_bytes": small_bytes, "states_on": place}
        optimizer = ms.AdamW(net.parameters(), in_backward=True, **options)
        found = train(net, optimizer, steps=4)
        loss_of(net, 4).backward()
        optimizer.step()
        waits.clear()
        states = [state["exp_avg"] for state in optimizer.state_dict()["state"].values()]
        if place:
            # The device has copied at once, so that what the host reads is right without, too.
            assert waits == [1]
            assert all(state.is_pinned() for state in states)
            states = [state.clone() for state in states]
            assert len(ahead) >= 4 * len(found)
        results.append([*found, *(state.cpu() for state in states)])
    assert_same(*results)


@pytest.fixture
def small_pieces(monkeypatch):
    """What goes to a file goes through buffers that are much smaller."""
    monkeypatch.setattr(host, "_PIECE", 96)
    host.staging.cache_clear()
    yield
    host.staging.cache_clear()


def test_states_in_a_file(seed, small_pieces, tmp_path, monkeypatch):
    """Through two buffers, as one is on its way to the disk and the other to the device."""
    monkeypatch.setattr(Files, "smallest", 1)
    results = []
    for place in (tmp_path, None):
        net = network(seed) if place else on_one_stream(network(seed))
        optimizer = ms.AdamW(net.parameters(), in_backward=True, states_on=place, **OPTIONS)
        found = train(net, optimizer, steps=4)
        states = [state["exp_avg"] for state in optimizer.state_dict()["state"].values()]
        assert all(state.is_cpu == bool(place) for state in states)
        results.append([*found, *(state.cpu() for state in states)])
    assert_same(*results)


def test_two_streams_read_and_write_in_a_file(seed, small_pieces):
    torch.manual_seed(seed)
    staging = host.staging(torch.device(DEVICE, 0))
    there = torch.randint(256, (400,), dtype=torch.uint8)
    written = torch.empty_like(there)

    def get(buffer, start):
        buffer.copy_(there[start : start + buffer.numel()])

    def put(buffer, start):
        written[start : start + buffer.numel()] = buffer

    one, other = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(one):
        into = torch.empty(400, dtype=torch.uint8, device=DEVICE)
        staging.read(into, get)
    with torch.cuda.stream(other):
        values = torch.arange(400, dtype=torch.uint8, device=DEVICE)
        staging.write(values, put)
        assert torch.equal(values.cpu(), written)
    with torch.cuda.stream(one):
        assert torch.equal(into.cpu(), there)


def test_a_file_that_cannot_be_written(seed, small_pieces):
    """What was to be written is freed while the next piece of it is on its way to the host."""
    staging = host.staging(torch.device(DEVICE, 0))
    full = seed % 4  # the pieces before the disk is full

    def refuse(buffer, start):
        if start >= full * buffer.numel():
            raise OSError("No space left on device")

    with torch.cuda.stream(torch.cuda.Stream()):
        values = torch.arange(400, device=DEVICE).to(torch.uint8)
        with pytest.raises(OSError, match="No space"):
            staging.write(values, refuse)
        del values
        others = torch.full((400,), 7, dtype=torch.uint8, device=DEVICE)
        written = []
        staging.write(others, lambda buffer, start: written.append(buffer.clone()))
        assert torch.equal(torch.cat(written), others.cpu())


@pytest.mark.parametrize("where", ["on the host", "in a file"])
def test_gradients_on_the_host(seed, where, small_pieces, tmp_path, monkeypatch):
    """Each leaves for pinned memory on a stream of its own, for a file from there, adds up there,
    is clipped and comes back for its step."""
    monkeypatch.setattr(gradients, "SMALLEST", 1)
    results = []
    for place in ("cpu" if where == "on the host" else tmp_path, None):
        net = network(seed) if place else on_one_stream(network(seed))
        optimizer = ms.AdamW(net.parameters(), grads_on=place, **OPTIONS)
        found = []
        for step in range(3):
            for number in range(2):
                loss_of(net, 2 * step + number).backward()
            away = [isinstance(p.grad, GradientElsewhere) for p in net.parameters()]
            assert any(away) == bool(place) and all(away) == bool(place)
            found.append(torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1, foreach=False))
            optimizer.step()
            optimizer.zero_grad()
        results.append([t.cpu() for t in (*found, *net.parameters())])
    assert_same(*results)


def test_states_on_the_host_that_are_fetched_and_dropped(seed, monkeypatch):
    """As where a step raises: their memory goes to others once the step's stream is done."""
    monkeypatch.setattr(host_memory, "SMALLEST", 1)
    place, device = host_memory.OnCpu(), torch.device(DEVICE, 0)
    one, other = (place.zeros(torch.empty(64, device="meta"), device) for _ in range(2))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for state in (one, other, one, other):
            fetched = place.fetch({"exp_avg": state}, device)
            fetched.state["exp_avg"].add_(1).mul_(seed)
            del fetched
        fetched = place.fetch({"exp_avg": other}, device)
        fetched.state["exp_avg"].add_(2)
        fetched.write_back()
    place.wait()
    assert one.eq(0).all() and other.eq(2).all()
