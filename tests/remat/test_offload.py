"""Blocks that move memory to files: the same bits, less memory, and nothing lost or left behind."""

import contextlib
import ctypes
import gc
import os
import resource
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch
from helpers import leaf, run_threads
from remat_programs import bits, layers
from sampling import some
from test_budget import nothing_is_known_yet, settled, step  # noqa: F401
from test_remat_random import check as check_random
from torch import nn

import memsave_ext as ms
from memsave_ext.remat import offload
from memsave_ext.remat.offload import check_offload

native = ms._native.module


@pytest.fixture
def half(tmp_path):
    """Makes blocks that move every second content, and drop the others."""
    blocks = []

    def make():
        blocks.append(ms.remat(_everything=True, offload=tmp_path))
        return blocks[-1]

    make.moved = lambda: sum(block.figures().moved_bytes for block in blocks)
    make.back = lambda: sum(block.figures().brought_back_bytes for block in blocks)
    make.blocks = blocks
    yield make
    assert os.listdir(tmp_path) == []


def check(program, half):
    expected, ours = [], []
    for block, results in ((contextlib.nullcontext, expected), (half, ours)):
        torch.manual_seed(1)
        results += [bits(tensor) for tensor in program(block)]
    assert all((a == b).all() for a, b in zip(expected, ours, strict=True))
    assert half.moved() > 0 and half.back() > 0


def text(block):
    return " ".join(block.report().split())  # in lines of any length


def used(folder):
    gc.collect()
    return native.RematStore.in_folder(os.path.realpath(folder), torch.device("cpu")).used()


@pytest.mark.parametrize("start", some(range(0, 150, 50), 1))
def test_random_programs(start, half):
    wrong = [
        (seed, text) for seed in range(start, start + 50) if (text := check_random(seed, make=half))
    ]
    assert not wrong, f"{len(wrong)}: seed {wrong[0][0]}: {wrong[0][1]}"
    assert half.moved() > 0 and half.back() > 0


def test_room_is_free_once_what_came_back_is_freed(half, tmp_path):
    # Threads that copy are put aside while others compute: what they held was freed later.
    w, x = leaf(64, 64), torch.randn(64, 64)
    over, left = threading.Event(), 0

    def compute():
        a = torch.randn(400, 400)
        while not over.is_set():
            a @ a

    threads = [threading.Thread(target=compute) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(500):
            with half():
                h = x
                for _ in range(4):
                    h = (h @ w).tanh()
                loss = h.sum()
            del h
            loss.backward()
            left += native.RematStore.in_folder(
                os.path.realpath(tmp_path), torch.device("cpu")
            ).used()
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert left == 0 and half.moved() == half.back() > 0


def test_views_and_writes_in_place(half):
    w = nn.Parameter(torch.randn(64, 64))

    def program(block):
        x = torch.randn(64, 64)
        with block():
            h = (x @ w).tanh()
            rows = h[:32].t()
            a = rows.sin() * 2
            b = (h.view(-1)[::2] * 1.5).exp()
            c = torch.cat([a.flatten(), b])
            c.mul_(0.5).relu_()
            d = (c * c).sigmoid()
        return [*torch.autograd.grad(d.sum(), w), d.detach()]

    check(program, half)


def test_what_others_need_is_written_while_it_leaves(half):
    w = nn.Parameter(torch.randn(256, 256))

    def program(block):
        values = []
        with block():
            for _ in range(6):
                y = w * 2
                z = (y + 1).sin()
                with torch.no_grad():
                    y.mul_(3)  # of which nothing was saved but z's way
                values.append(z.exp().sum())
        return torch.autograd.grad(sum(values), w)

    check(program, half)


@pytest.mark.parametrize("inside", [True, False])
def test_a_saved_value_that_was_changed_is_an_error_as_ever(half, inside):
    w = nn.Parameter(torch.randn(64, 64))
    with half() as block:
        h = w * 2
        z = h.sin() + h.cos()
        if inside:
            h.detach().mul_(2)
    if not inside:
        h.detach().mul_(2)
    assert block.figures().moved_bytes > 0
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.sum().backward()


class OfAFunction(torch.autograd.Function):
    """It saves what no operator is recorded for."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x.cos())
        return x.sin()

    @staticmethod
    def backward(ctx, grad):
        (cos,) = ctx.saved_tensors
        many = torch.ones(32, *cos.shape)  # so that the peak is here
        return grad * cos * many[0]


def test_a_block_in_which_no_operator_is_recorded(tmp_path):
    x = torch.randn(1 << 14, requires_grad=True)
    expected = x
    for _ in range(4):
        expected = OfAFunction.apply(expected)
    (expected,) = torch.autograd.grad(expected.sum(), x)
    moved = 0
    for _ in range(4):
        with ms.remat(budget=0.5, offload=tmp_path) as block:
            y = x
            for _ in range(4):
                y = OfAFunction.apply(y)
        assert torch.equal(torch.autograd.grad(y.sum(), x)[0], expected)
        moved += block.figures().moved_bytes
    assert moved > 0


def test_double_backward_and_retained_graphs(half):
    model, x = layers()
    x.requires_grad_()

    def program(block):
        with block():
            out = model(x).softmax(-1)
            (grad,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
            loss = (grad.norm(dim=1) - 1).square().mean() + out.exp().sum()
        params = [x, *model.parameters()]
        first = torch.autograd.grad(loss, params, retain_graph=True)
        return [*first, *torch.autograd.grad(loss, params)]

    check(program, half)


def test_backwards_of_one_graph_at_once(half):
    model, x = layers(0.0)
    params = list(model.parameters())
    expected = torch.autograd.grad(model(x).exp().sum(), params)
    with half():
        loss = model(x).exp().sum()
    results = {}

    def work(i):
        results[i] = torch.autograd.grad(loss, params, retain_graph=True)

    run_threads(work, 4)
    assert all(all(map(torch.equal, expected, results[i])) for i in range(4))
    assert half.back() > 0


def test_steps_in_several_threads_share_a_folder(half, tmp_path):
    results = []

    def work(i):
        torch.manual_seed(i)
        net, x = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)), torch.randn(64, 64)
        expected = torch.autograd.grad(net(x).exp().sum(), list(net.parameters()))
        for _ in range(10):
            with half():
                loss = net(x).exp().sum()
            ours = torch.autograd.grad(loss, list(net.parameters()))
            results.append(all(map(torch.equal, expected, ours)))
            del loss, ours

    run_threads(work, 4)
    assert results == [True] * 40 and half.back() > 0
    assert used(tmp_path) == 0


def test_exceptions_and_graphs_that_are_dropped_leave_nothing(half, tmp_path):
    model, x = layers()

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise RuntimeError("in backward")

    def fails():
        with half():
            model(x)
            raise RuntimeError("in forward")

    with pytest.raises(RuntimeError, match="in forward"):
        fails()
    with half():
        loss = model[4:](Fails.apply(model[:4](x))).sum()
    with pytest.raises(RuntimeError, match="in backward"):
        loss.backward()
    del loss
    with half():
        model(x).sum()  # dropped at once
    with half():
        loss = model(x).sum()
    assert half.moved() > 0 and used(tmp_path) > 0
    del loss
    deadline = time.monotonic() + 60  # a copy that has begun is made to its end
    while used(tmp_path) > 0 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert used(tmp_path) == 0


def open_file(folder):
    """The one in a folder: its place in /proc."""
    found = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    found = [path for path in found if os.path.islink(path)]
    (path,) = [path for path in found if os.readlink(path).startswith(str(folder.resolve()))]
    return path


def test_the_file_has_no_name(half, tmp_path):
    model, x = layers()
    with half():
        loss = model(x).sum()
        assert os.readlink(open_file(tmp_path)).endswith("(deleted)")
        assert os.listdir(tmp_path) == []
    loss.backward()


def test_room_in_the_file_is_taken_again(half, tmp_path):
    model, x = layers()
    sizes = []
    for _ in range(12):
        with half():
            loss = model(x).sum()
        loss.backward()
        del loss
        assert used(tmp_path) == 0
        sizes.append(os.stat(open_file(tmp_path)).st_size)
    assert 0 < sizes[-1] == sizes[0]


def test_a_file_that_another_program_cuts(half, tmp_path):
    model, x = layers()
    with half():
        loss = model(x).sum()
    assert half.moved() > 0
    os.truncate(open_file(tmp_path), 0)
    with pytest.raises(RuntimeError, match="could not be read back: Input/output error"):
        loss.backward()


@contextlib.contextmanager
def full_disk(size):
    """Files cannot grow beyond ``size`` bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_keeps_what_has_no_room(tmp_path):
    model, x = encoder()
    expected, _, _ = step(model, x)
    with full_disk(1 << 20):
        actual, _, block = step(model, x, _everything=True, offload=tmp_path)
    assert all(map(torch.equal, expected, actual))
    figures = block.figures()
    assert figures.moved_bytes > 0 and figures.not_moved_bytes > 0
    assert any(row.verdict == "there was no room to move it to" for row in figures.saved)
    assert text(block).count("could not be moved, and are kept: File too large") == 1


def test_a_disk_that_fills_up_under_a_plan(tmp_path):
    model, x = encoder()
    expected, _, _ = step(model, x)
    _, _, block = settled(model, x, budget=0.1, offload=tmp_path)
    assert block.figures().moved_bytes > 0
    with full_disk(1 << 20):
        actual, _, block = settled(model, x, budget=0.1, offload=tmp_path)
    assert all(map(torch.equal, expected, actual))
    figures = block.figures()
    assert figures.not_moved_bytes > 0
    del block
    assert used(tmp_path) == 0


def test_a_folder_that_goes_away_in_the_middle(tmp_path):
    folder = tmp_path / "scratch"
    folder.mkdir()
    model, x = encoder()
    expected, _, _ = step(model, x)
    settled(model, x, budget=0.05, offload=folder)
    torch.manual_seed(3)
    with ms.remat(budget=0.05, offload=folder) as block:
        loss = model(x).square().mean()
    folder.rmdir()  # the file in it has no name, and lives on
    loss.backward()
    assert block.figures().brought_back_bytes >= block.figures().moved_bytes > 0
    assert all(map(torch.equal, expected, [loss, *(p.grad for p in model.parameters())]))
    with pytest.raises(ValueError, match="an existing folder"):
        ms.remat(budget=0.05, offload=folder)


def test_a_file_that_the_program_closes_is_not_taken_for_another(tmp_path):
    """As daemons close all that is open, and then open others by the same numbers."""
    folder, other = tmp_path / "scratch", tmp_path / "other"
    folder.mkdir()
    other.write_text("mine")
    model, x = encoder()
    settled(model, x, budget=0.05, offload=folder)
    block = ms.remat(budget=0.05, offload=folder)
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{number}").startswith(str(folder)):
                os.close(int(number))
                taken = os.open(other, os.O_RDWR)
                assert taken == int(number)
    torch.manual_seed(3)
    with block:
        loss = model(x).square().mean()
    loss.backward()
    assert block.figures().moved_bytes == 0 and "Bad file descriptor" in text(block)
    del block, loss
    gc.collect()
    assert os.pread(taken, 10, 0) == b"mine"
    os.close(taken)


def test_a_relative_folder_and_a_program_that_goes_elsewhere(tmp_path, monkeypatch):
    (tmp_path / "scratch").mkdir()
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    model, x = encoder()
    handle = ms.remat_module(model, budget=0.05, offload="scratch", ahead=False)
    monkeypatch.chdir(tmp_path / "other")
    for _ in range(3):
        model(x).square().mean().backward()
    assert handle.figures().moved_bytes > 0


def test_memory_that_is_given_back_by_hand_while_it_is_copied(tmp_path):
    """As FSDP does with that of parameters. Whether it is copied by then is a matter of time."""
    torch.manual_seed(0)
    model = nn.Sequential(*[m for _ in range(6) for m in (nn.Linear(128, 128), nn.GELU())])
    x = torch.randn(4096, 128)
    expected, _, _ = step(model, x)
    kept = []

    def keep(module, inputs):
        memory = inputs[0].untyped_storage()
        kept[:] = [ctypes.string_at(memory.data_ptr(), memory.nbytes())]

    def give_back(module, inputs, output):
        memory = inputs[0].untyped_storage()
        memory.resize_(0)
        other = torch.full_like(output, 7.0)  # in its place
        memory.resize_(len(kept[0]))
        ctypes.memmove(memory.data_ptr(), kept[0], len(kept[0]))
        del other

    moved = 0
    for number in range(8):
        with contextlib.ExitStack() as stack:
            for gelu in model[1::2] if number > 1 else ():
                stack.callback(gelu.register_forward_pre_hook(keep).remove)
                stack.callback(gelu.register_forward_hook(give_back).remove)
            actual, _, block = step(model, x, budget=0.3, offload=tmp_path)
        assert all(map(torch.equal, expected, actual))
        moved += block.figures().moved_bytes
    assert moved > 0


def encoder(layers=4):
    torch.manual_seed(0)
    options = {"dropout": 0.1, "activation": "gelu", "batch_first": True, "norm_first": True}
    blocks = [nn.TransformerEncoderLayer(64, 4, 256, **options) for _ in range(layers)]
    return nn.Sequential(*blocks), torch.randn(16, 64, 64)


@pytest.mark.parametrize("share", [0.5, 0.2, 0.05])
def test_the_bits_within_a_budget(share, tmp_path):
    model, x = encoder()
    expected, plain, _ = step(model, x)
    for number in range(4):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            actual, peak, block = step(model, x, budget=share, offload=tmp_path)
        assert all(map(torch.equal, expected, actual))
        if number == 0:
            continue
        assert peak <= 1.02 * max(block.budget, block.least) < plain
        figures = block.figures()
        assert figures.brought_back_bytes >= figures.moved_bytes and figures.not_moved_bytes == 0
        # With room to recompute it depends on the disk's speed whether anything is moved.
        assert figures.moved_bytes > 0 or share > 0.05
    del actual, expected
    gc.collect()
    assert used(tmp_path) == 0


def test_it_goes_below_the_least_of_recomputing(tmp_path):
    model, x = encoder()
    _, _, alone = settled(model, x, budget=0.01)
    least = alone.least
    native.remat_forget()
    _, peak, both = settled(model, x, budget=0.01, offload=tmp_path)
    assert both.least < 0.9 * least and peak <= 1.02 * both.least
    report = text(both)
    assert "Moved " in report and " back; waited " in report


def test_no_more_than_the_limit(tmp_path):
    """Of what cannot be recomputed: each content that is moved makes the least possible less,
    however long copies and operators take."""
    w, moved = leaf(1), []

    def sum_of_products():
        products = []
        for _ in range(8):
            source = torch.ones(1 << 18)
            y = source + 1
            source.untyped_storage().resize_(0)
            products.append((w * y).sum())
            del y  # 1 MiB, which only the graph has now
        return sum(products)

    for limit in (0, 2 << 20, "4MiB", None):
        native.remat_forget()
        for _ in range(2):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)
                with ms.remat(budget=0.05, offload=tmp_path, offload_limit=limit) as block:
                    loss = sum_of_products()
                loss.backward()
        assert block.figures().not_moved_bytes == 0  # no more was planned
        moved.append(block.figures().moved_bytes)
    assert moved[:3] == [0, 2 << 20, 4 << 20] and moved[3] > 6 << 20


def test_a_limit_that_another_step_has_used_up(tmp_path):
    model, x = encoder()
    expected, _, _ = step(model, x)
    options = {"_everything": True, "offload": tmp_path, "offload_limit": 6 << 20}
    with ms.remat(**options) as first:
        loss = model(x).sum()
    actual, _, second = step(model, x, **options)
    assert all(map(torch.equal, expected, actual))
    assert first.figures().moved_bytes + second.figures().moved_bytes <= 6 << 20
    assert "could not be moved, and are kept: offload_limit is reached" in text(second)
    loss.backward()


def test_a_module_and_its_copies(tmp_path):
    model, x = encoder(2)
    expected, _, _ = step(model, x)
    handle = ms.remat_module(model, budget=0.05, offload=tmp_path, offload_limit="1GB")
    for _ in range(3):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            actual, _, _ = step(model, x)
        assert all(map(torch.equal, expected, actual))
    assert handle.figures().moved_bytes > 0
    handle.remove()


def test_adam_in_backward(tmp_path):
    def train(block_of):
        model, x = encoder(3)
        optimizer = ms.Adam(model.parameters(), in_backward=True, lr=1e-3)
        for _ in range(4):
            torch.manual_seed(3)
            with block_of(model) as block:
                loss = model(x).square().mean()
            loss.backward()
            del loss
            optimizer.step()
        return [p.detach() for p in model.parameters()], block

    def within(model):
        return ms.remat(model, budget=0.05, offload=tmp_path)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        (expected, _), (actual, block) = train(lambda _: contextlib.nullcontext()), train(within)
    assert all(map(torch.equal, expected, actual))
    assert block.figures().moved_bytes > 0


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"offload": "/tmp"}, ValueError, "offload needs a budget"),
        ({"offload": "cpu"}, ValueError, "offload needs a budget"),
        ({"budget": 0.5, "offload": 3}, TypeError, "must be 'cpu', a folder or None, got int"),
        ({"budget": 0.5, "offload": "/no/such"}, ValueError, "'cpu' or an existing folder"),
        ({"budget": 0.5, "offload": ""}, ValueError, "'cpu' or an existing folder"),
        ({"budget": 0.5, "offload": "./cpu"}, ValueError, "an existing folder"),
        ({"budget": 0.5, "offload": Path("cpu")}, ValueError, "an existing folder"),
        ({"budget": 0.5, "offload_limit": 5}, ValueError, "offload_limit says how much offload="),
        ({"budget": 0.5, "offload": "/tmp", "offload_limit": 1.5}, TypeError, "got float"),
        ({"budget": 0.5, "offload": "/tmp", "offload_limit": "x"}, ValueError, "got 'x'"),
        ({"budget": 0.5, "offload": "/tmp", "offload_limit": -1}, ValueError, "got -1"),
        ({"budget": 0.5, "offload": "/proc"}, OSError, "offload='/proc': cannot make a file"),
    ],
)
def test_arguments(options, error, match):
    with pytest.raises(error, match=match):
        ms.remat(**options)
    if error is not OSError:  # of a module it is known when it runs
        with pytest.raises(error, match=match):
            ms.remat_module(nn.Linear(2, 2), **options)


def test_nothing_is_moved_from_the_cpu_to_the_cpu():
    model, x = encoder(2)
    expected, _, _ = step(model, x)
    offload._tell_of_cpu.cache_clear()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for _ in range(3):
            actual, _, block = step(model, x, budget=0.5, offload="cpu", offload_limit="1GB")
            assert all(map(torch.equal, expected, actual))
    told = [str(warning.message) for warning in warned]
    assert len([text for text in told if "on the CPU, where nothing is moved" in text]) == 1
    assert block.figures().moved_bytes == 0 < block.figures().dropped_bytes


@pytest.mark.parametrize(
    ("offload", "match"),
    [
        ("cpu", "to the host's memory; the model is on xpu"),
        ("/tmp", "to files; the model is on xpu"),
    ],
)
def test_memory_that_cannot_be_moved(offload, match):
    with pytest.raises(ValueError, match=match):
        check_offload("remat", offload, None, True, torch.device("xpu"))


def test_a_folder_of_the_name_cpu(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("cpu").mkdir()
    model, x = encoder(2)
    for folder in ("./cpu", Path("cpu")):
        _, _, block = settled(model, x, budget=0.05, offload=folder)
        assert block.figures().moved_bytes > 0
