"""``weights_on``: weights on mapped memory of a file are weights as any other."""

import contextlib
import copy
import errno
import gc
import io
import os
import pickle
import subprocess
import sys
import textwrap
import time
import weakref

import pytest
import torch
from helpers import run_threads
from torch import nn

import memsave_ext as ms
from memsave_ext.elsewhere import weights
from memsave_ext.predict.techniques import named
from memsave_ext.store.file import Region
from memsave_ext.store.mapped import is_mapped

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="a folder is for Linux")


class Net(nn.Module):
    """A little of everything: tied weights, a recurrent part, attention, small weights."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(300, 128)
        self.attention = nn.MultiheadAttention(128, 4, batch_first=True)
        self.rnn = nn.GRU(128, 128, batch_first=True)
        self.conv = nn.Conv1d(128, 128, 3, padding=1)
        self.norm = nn.LayerNorm(128)
        self.mlp = nn.Sequential(nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128))
        self.head = nn.Linear(128, 300, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        h = self.embed(ids)
        h = h + self.attention(h, h, h, need_weights=False)[0]
        h = h + self.rnn(h)[0]
        h = h + self.conv(h.transpose(1, 2)).transpose(1, 2)
        return self.head(self.norm(h + self.mlp(h)))


def network():
    torch.manual_seed(0)
    return Net()


def ids(number=0):
    return torch.randint(300, (2, 16), generator=torch.Generator().manual_seed(number))


def loss_of(net, number=0):
    logits = net(ids(number))
    return nn.functional.cross_entropy(logits.flatten(0, 1), ids(number + 1).flatten())


def mapped(net):
    return sum(is_mapped(p) for p in net.parameters())


LARGE = 8  # of Net: the tied one, two of attention, two of the recurrent part, conv, two of the mlp


def train(net, optimizer, steps=3, clip=None, start=0):
    losses = []
    for step in range(start, start + steps):
        loss = loss_of(net, step)
        loss.backward()
        if clip:
            clip(net)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def assert_same(net, other):
    for (name, p), q in zip(net.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q), name


def clip_all(net):
    nn.utils.clip_grad_norm_(net.parameters(), 0.5)


OPTIMIZERS = {
    "torch's AdamW": (lambda p, on: torch.optim.AdamW(p), None),
    "torch's AdamW, clipped": (lambda p, on: torch.optim.AdamW(p), clip_all),
    "torch's AdamW, foreach": (lambda p, on: torch.optim.AdamW(p, foreach=True), None),
    "torch's AdamW, fused": (lambda p, on: torch.optim.AdamW(p, fused=True), None),
    "torch's SGD": (lambda p, on: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True), None),
    "torch's Adafactor": (lambda p, on: torch.optim.Adafactor(p), None),
    "AdamW": (lambda p, on: ms.AdamW(p), None),
    "in backward": (lambda p, on: ms.AdamW(p, in_backward=True), None),
    "8 bit": (lambda p, on: ms.AdamW(p, in_backward=True, state_dtype="8bit"), None),
    "states": (lambda p, on: ms.AdamW(p, in_backward=True, states_on=on), None),
    "gradients": (lambda p, on: ms.AdamW(p, states_on=on, grads_on=on), clip_all),
    "Lion": (lambda p, on: ms.Lion(p, in_backward=True), None),
    "torch's in backward": (lambda p, on: ms.in_backward(torch.optim.NAdam(p)), None),
    "torch's, gradients": (
        lambda p, on: ms.in_backward(torch.optim.NAdam(p), grads_on=on),
        clip_all,
    ),
}


@pytest.mark.parametrize("optimizer_first", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_has_the_same_bits(name, optimizer_first, tmp_path):
    make, clip = OPTIMIZERS[name]
    plain, ours = network(), network()
    losses = train(plain, make(plain.parameters(), tmp_path), clip=clip)
    if optimizer_first:
        optimizer = make(ours.parameters(), tmp_path)
        handle = ms.weights_on(ours, tmp_path)
    else:
        handle = ms.weights_on(ours, tmp_path)
        optimizer = make(ours.parameters(), tmp_path)
    assert mapped(ours) == LARGE
    assert handle.nbytes == sum(p.nbytes for p in ours.parameters() if is_mapped(p))
    assert train(ours, optimizer, clip=clip) == losses
    assert mapped(ours) == LARGE
    assert_same(ours, plain)


def test_pages_go_and_come_again(tmp_path):
    plain, ours = network(), network()
    handle = ms.weights_on(ours, tmp_path)
    first, second = torch.optim.AdamW(plain.parameters()), torch.optim.AdamW(ours.parameters())
    for step in range(4):
        train(plain, first, 1, start=step)
        loss = loss_of(ours, step)
        handle.let_go()
        loss.backward()
        handle.let_go()
        second.step()
        second.zero_grad()
        handle.let_go()
    assert_same(ours, plain)


@pytest.mark.once
def test_let_go_beside_training(tmp_path):
    """As the watching thread may do at any time."""
    plain, ours = network(), network()
    handle = ms.weights_on(ours, tmp_path)
    train(plain, torch.optim.AdamW(plain.parameters()), 20)
    done = []

    def work(i):
        if i == 0:
            train(ours, torch.optim.AdamW(ours.parameters()), 20)
            done.append(True)
        count = 0
        while not done:
            handle.let_go()
            count += 1
        assert i == 0 or count > 10

    run_threads(work, 2)
    assert_same(ours, plain)


# ---- who uses weights ----


def test_watched_on_where_no_file_can_be_opened_for_a_moment(tmp_path, monkeypatch):
    calls, mapped = [], weights._mapped_bytes

    def fails():
        calls.append(1)
        if len(calls) < 4:
            raise OSError(errno.EMFILE, "Too many open files")
        return mapped()

    monkeypatch.setattr(weights, "_mapped_bytes", fails)
    handle = ms.weights_on(nn.Linear(512, 512), tmp_path)
    end = time.monotonic() + 20
    while len(calls) < 6 and time.monotonic() < end:
        time.sleep(0.01)
    handle.remove()
    assert len(calls) >= 6


def test_averages_copies_and_saved_states(tmp_path):
    net = network()
    ms.weights_on(net, tmp_path)
    plain = network()
    average = torch.optim.swa_utils.AveragedModel(net)
    of_plain = torch.optim.swa_utils.AveragedModel(plain)
    for model, of in ((net, average), (plain, of_plain)):
        train(model, torch.optim.AdamW(model.parameters()))
        of.update_parameters(model)
        of.update_parameters(model)
    assert_same(average, of_plain)
    assert mapped(average.module) == 0
    for copied in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert mapped(copied) == 0 and mapped(net) == LARGE
        assert_same(copied, plain)
        train(copied, torch.optim.SGD(copied.parameters(), 0.1), 1)
        assert_same(net, plain)
    file = io.BytesIO()
    torch.save(net.state_dict(), file)
    file.seek(0)
    other = network()
    other.load_state_dict(torch.load(file))
    assert_same(other, plain)
    for model in (net, plain):
        for value in model.state_dict().values():  # as averages are loaded
            value.mul_(2)
    assert_same(net, plain)
    for name, value in plain.state_dict().items():
        assert (net.state_dict()[name].numpy() == value.numpy()).all()


@pytest.mark.parametrize("assign", [False, True])
def test_loading(assign, tmp_path):
    net, trained = network(), network()
    ms.weights_on(net, tmp_path)
    train(trained, torch.optim.SGD(trained.parameters(), 0.1), 1)
    net.load_state_dict(trained.state_dict(), assign=assign)
    loaded = net.state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in trained.state_dict().items())
    assert mapped(net) == (0 if assign else LARGE)


def test_converted_weights_are_in_memory(tmp_path):
    net = network()
    handle = ms.weights_on(net, tmp_path)
    net.double()
    assert mapped(net) == 0 and handle.nbytes == 0
    train(net, torch.optim.SGD(net.parameters(), 0.1), 1)
    handle.remove()


def test_frozen_weights_and_evaluation(tmp_path):
    net, plain = network(), network()
    for model in (net, plain):
        model.embed.weight.requires_grad_(False)
        model.rnn.requires_grad_(False)
    ms.weights_on(net, tmp_path)
    assert train(net, ms.AdamW(net.parameters())) == train(plain, ms.AdamW(plain.parameters()))
    with torch.no_grad():
        assert torch.equal(net.eval()(ids()), plain.eval()(ids()))
    with torch.inference_mode():
        assert torch.equal(net(ids()), plain(ids()))


def test_checkpoints_autocast_and_parametrizations(tmp_path):
    results = []
    for on in (None, tmp_path):
        net = network()
        nn.utils.parametrizations.weight_norm(net.mlp[0])
        nn.utils.parametrizations.spectral_norm(net.conv)
        ms.checkpoint_modules(net, nn.Sequential)
        if on:
            ms.weights_on(net, on)
            assert mapped(net) == LARGE
        optimizer = torch.optim.AdamW(net.parameters())
        with torch.autocast("cpu", torch.bfloat16):
            losses = train(net, optimizer)
        results.append((losses, net))
    assert results[0][0] == results[1][0]
    assert_same(results[1][1], results[0][1])


def test_functions_of_the_weights(tmp_path):
    """torch.func puts tensors in their places that have no memory of their own."""
    model, x = nn.Sequential(nn.Linear(160, 160), nn.Tanh()), torch.randn(8, 160)

    def loss(weights, x=x):
        return torch.func.functional_call(model, weights, (x,)).square().mean()

    def results():
        weights = dict(model.named_parameters())
        several = {name: torch.stack([p, 2 * p]) for name, p in weights.items()}
        grads = torch.func.grad(loss)(weights)
        return [*grads.values(), torch.func.vmap(loss, (0, None))(several, x)]

    expected = results()
    handle = ms.weights_on(model, tmp_path)
    assert handle.nbytes
    assert all(map(torch.equal, results(), expected))


def test_compiled(tmp_path):
    net = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256))
    plain = copy.deepcopy(net)
    ms.weights_on(net, tmp_path)
    x = torch.randn(8, 256)
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
    compiled(x).square().mean().backward()
    plain(x).square().mean().backward()
    for p, q in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


@pytest.mark.skipif(not ms._native.available, reason="a budget is native")
def test_within_a_budget(tmp_path):
    net, plain = network(), network()
    handle = ms.weights_on(net, tmp_path)
    least = []
    for model in (net, plain):
        block = ms.remat_module(model, budget=0.6)
        train(model, ms.AdamW(model.parameters(), in_backward=True))
        least.append(block.least)
    assert_same(net, plain)
    assert least[1] - least[0] == pytest.approx(handle.nbytes, rel=0.05)  # weights take none of it


@pytest.mark.once
def test_tracked_and_predicted(tmp_path):
    peaks = []
    for on in (None, tmp_path):
        net = network()
        handle = ms.weights_on(net, on) if on else None
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        predicted = ms.memory.predict(net, optimizer, (ids(),), loss=lambda out: out.sum())
        with ms.memory.track(net, optimizer) as track:
            for _ in range(2):
                net(ids()).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        peaks.append((track.peak, predicted.peak))
    assert peaks[0][0] - peaks[1][0] == pytest.approx(handle.nbytes, abs=4096)
    assert peaks[0][1] - peaks[1][1] == handle.nbytes


def trained(elsewhere=False, **options):
    """Builds 8 layers of 256 KiB, and a step that trains them with Adam in backward."""

    def build():
        net = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(8)))
        if elsewhere:
            ms.weights_on(net, "cpu")
        optimizer = ms.AdamW(net.parameters(), in_backward=True, **options)

        def step():
            net(torch.ones(4, 256)).sum().backward()
            optimizer.step()

        return net, optimizer, step

    return build


@pytest.mark.once
def test_predicted_on_cuda():
    """On the device there is room beside for the weights of three modules, the largest, and states
    of two parameters."""
    size = 256 * 256 * 4
    plain, weights, states = (
        ms.memory.predict(trained(**options), device="cuda").peak
        for options in ({}, {"elsewhere": True}, {"states_on": "cpu"})
    )
    assert plain - weights == (8 - 3) * size
    assert plain - states == (8 - 2) * 2 * size


@pytest.mark.skipif(not ms._native.available, reason="a budget is native")
def test_fits_on_cuda():
    """Last come weights elsewhere, within a budget that states elsewhere alone do not keep to."""

    def build():
        layers = [m for _ in range(8) for m in (nn.Linear(256, 256), nn.GELU())]
        net = nn.Sequential(*layers)
        optimizer = torch.optim.AdamW(net.parameters())

        def step():
            net(torch.ones(4, 256)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        return net, optimizer, step

    name = "remat within the budget, Adam in backward, states elsewhere, weights elsewhere"
    budget = 7 << 19
    made = named("", name).applied(build, budget)
    predicted = ms.memory.predict(made, device="cuda")
    assert predicted.at_peak["parameters"] < 1 << 16  # the biases
    assert predicted.at_peak["other"] > 3 * 256 * 256 * 4
    assert predicted.peak <= budget


def test_other_processes(tmp_path):
    net = network()
    ms.weights_on(net, tmp_path)
    before = copy.deepcopy(net)
    values = [p.detach().numpy() for p in net.parameters()]
    expected = [p.detach().numpy() for p in before.parameters()]
    child = os.fork()
    if child == 0:  # without torch, whose threads it does not have
        pairs = zip(values, expected, strict=True)
        os._exit(0 if all((one == other).all() for one, other in pairs) else 1)
    assert os.waitpid(child, 0)[1] == 0
    net.share_memory()
    assert_same(net, before)


# ---- models that are built there ----


def test_built_with_the_same_values(tmp_path):
    handle = ms.weights_on(network, tmp_path)
    assert mapped(handle.model) == LARGE
    assert_same(handle.model, network())
    train(handle.model, torch.optim.AdamW(handle.model.parameters()))
    assert mapped(network()) == 0  # what is built after it is in memory


class GivesItAway(nn.Module):
    """Fills the parameter by a tensor from before, once a module has it."""

    def __init__(self):
        super().__init__()
        values = torch.empty(200, 200)
        self.weight = nn.Parameter(values)
        values.fill_(3)

    def forward(self, x):
        return x @ self.weight


def test_built_with_a_tensor_from_before(tmp_path):
    model = ms.weights_on(GivesItAway, tmp_path).model
    assert mapped(model) == 1 and bool((model.weight == 3).all())


@pytest.mark.once
def test_of_transformers(tmp_path):
    from libraries import library

    transformers = library("transformers")
    config = transformers.GPT2Config(n_layer=2, n_embd=128, n_head=2, vocab_size=512)

    def build():
        torch.manual_seed(1)
        return transformers.GPT2LMHeadModel(config)

    model, plain = ms.weights_on(build, tmp_path).model, build()
    assert_same(model, plain)
    assert mapped(model) > 8
    model.save_pretrained(tmp_path / "saved")
    loaded = ms.weights_on(
        lambda: transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "saved"), tmp_path
    ).model
    assert mapped(loaded) == mapped(model)
    assert_same(loaded, plain)
    assert loaded.lm_head.weight is loaded.transformer.wte.weight
    x = ids() % 512
    loaded.eval(), plain.eval()
    with torch.no_grad():
        assert torch.equal(
            loaded.generate(x, max_new_tokens=8, do_sample=False),
            plain.generate(x, max_new_tokens=8, do_sample=False),
        )


@pytest.mark.once
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("adapters", [False, True])
def test_trainers_save_and_resume(tmp_path, adapters):
    from libraries import library

    transformers = library("transformers")
    config = transformers.GPT2Config(n_layer=2, n_embd=128, n_head=2, vocab_size=512)
    rows = torch.randint(512, (20, 8), generator=torch.Generator().manual_seed(1))

    def build():
        torch.manual_seed(1)
        return transformers.GPT2LMHeadModel(config)

    def trained(model, folder, **resumed):
        if adapters:  # the weights are frozen, and only read
            peft = library("peft")
            torch.manual_seed(2)
            # peft makes them in memory: they are small.
            model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["c_attn", "c_fc"]))
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path / folder), use_cpu=True, report_to=[], disable_tqdm=True,
            save_strategy="steps", save_steps=3, logging_steps=1, per_device_train_batch_size=2,
            max_steps=5, seed=3,
        )  # fmt: skip
        data = [{"input_ids": row, "labels": row} for row in rows]
        trainer = transformers.Trainer(model=model, args=arguments, train_dataset=data)
        trainer.train(**resumed)
        return model, [log["loss"] for log in trainer.state.log_history if "loss" in log]

    plain, losses = trained(build(), "plain")
    assert len(losses) == 5
    handle = ms.weights_on(build, tmp_path)
    there = handle.nbytes
    model, found = trained(handle.model, "elsewhere")
    assert found == losses and there > 1 << 20 and handle.nbytes == there
    assert_same(model, plain)
    again = ms.weights_on(build, tmp_path)
    checkpoint = str(tmp_path / "elsewhere" / "checkpoint-3")
    model, found = trained(again.model, "resumed", resume_from_checkpoint=checkpoint)
    assert found == losses and again.nbytes == there
    assert_same(model, plain)


# ---- the handle ----


def test_remove(tmp_path):
    net, plain = network(), network()
    handle = ms.weights_on(net, tmp_path)
    optimizers = [torch.optim.AdamW(m.parameters()) for m in (net, plain)]
    train(net, optimizers[0], 1)
    handle.remove()
    handle.remove()
    assert mapped(net) == 0 and handle.nbytes == 0
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in net.modules())
    train(net, optimizers[0], 1, start=1)
    train(plain, optimizers[1], 2)
    assert_same(net, plain)
    again = ms.weights_on(net, tmp_path)
    assert mapped(net) == LARGE and again.nbytes > 0


def test_parameters_of_a_class_of_their_own_stay(tmp_path):
    class Quantized(nn.Parameter):
        pass

    net = nn.Linear(256, 256)
    net.weight = Quantized(net.weight.detach().clone())
    net.other = nn.Parameter(torch.zeros(256, 256))
    address = net.weight.data_ptr()
    handle = ms.weights_on(net, tmp_path)
    assert type(net.weight) is Quantized and net.weight.data_ptr() == address
    assert handle.nbytes == net.other.nbytes


def test_twice_takes_what_is_not_there(tmp_path):
    net = network()
    first = ms.weights_on(net.mlp, tmp_path)
    second = ms.weights_on(net, tmp_path)
    assert mapped(net) == LARGE and first.nbytes + second.nbytes == sum(
        p.nbytes for p in net.parameters() if is_mapped(p)
    )
    first.remove()
    assert mapped(net) == LARGE - 2


def test_a_handle_or_a_model_that_goes(tmp_path, monkeypatch):
    held = []

    class Held(weights.LargeMemory):
        def __init__(self):
            super().__init__()
            held.append(weakref.ref(self))

    monkeypatch.setattr(weights, "LargeMemory", Held)
    net = network()
    ms.weights_on(net, tmp_path)
    gc.collect()
    assert held[0]() is not None  # as long as the model may use weights
    train(net, torch.optim.SGD(net.parameters(), 0.1), 1)
    weight, watched = net.mlp[0].weight, weakref.ref(net)
    value = weight.detach().clone()
    gc.collect()
    gc.disable()  # nothing of it is in a cycle
    try:
        del net
        assert watched() is None and held[0]() is None
    finally:
        gc.enable()
    assert torch.equal(weight, value)  # its memory is there as long as it is


def test_read_ahead_in_the_order_of_the_last_step(tmp_path, monkeypatch):
    net = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
    handle = ms.weights_on(net, tmp_path)
    read = []
    monkeypatch.setattr(Region, "read_ahead", lambda self: read.append(self.offset // self.size))
    for _ in range(2):
        net(torch.ones(1, 256)).sum().backward()
    assert read[-7:] == [1, 2, 3, 3, 2, 1, 0] or read[-7:] == [2, 3, 3, 2, 1, 0, 0], read
    del handle


# ---- wrong use, and faults ----


def test_bad_values(tmp_path):
    net = network()
    with pytest.raises(TypeError, match="model must be a torch.nn.Module or a function.*got int"):
        ms.weights_on(3, tmp_path)
    with pytest.raises(TypeError, match="the function must make a torch.nn.Module, got int"):
        ms.weights_on(lambda: 3, tmp_path)
    with pytest.raises(TypeError, match="where must be a folder or 'cpu', got 3"):
        ms.weights_on(net, 3)
    for wrong in (tmp_path / "none", ""):
        with pytest.raises(ValueError, match="where must be a folder that exists, or 'cpu', got"):
            ms.weights_on(net, wrong)
    with pytest.raises(ValueError, match=r"weight is on cpu: weights on the CPU can lie in a fold"):
        ms.weights_on(net, "cpu")
    for where in (tmp_path, "cpu"):
        with pytest.raises(ValueError, match=r"weight is on meta: weights on the CPU can lie in a"):
            ms.weights_on(nn.Linear(256, 256, device="meta"), where)
    with pytest.raises(ValueError, match=r"weight has no shape yet"):
        ms.weights_on(nn.LazyLinear(256), tmp_path)
    held = net.mlp[0].weight.detach()
    with pytest.raises(ValueError, match=r"mlp\.0\.weight shares its memory with another tensor"):
        ms.weights_on(net, tmp_path)
    assert mapped(net) == 0
    del held
    assert ms.weights_on(net, tmp_path).nbytes > 0


def test_a_full_disk(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    net, plain = network(), network()
    with pytest.raises(OSError, match="no room for .* bytes of weights: No space left"):
        ms.weights_on(net, tmp_path)
    assert mapped(net) == 0
    assert not any(m._forward_pre_hooks for m in net.modules())
    with pytest.raises(OSError, match="no room"):
        ms.weights_on(network, tmp_path)
    assert mapped(network()) == 0
    assert_same(net, plain)


def test_a_folder_that_goes_and_a_closed_file(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    net, plain = network(), network()
    ms.weights_on(net, folder)
    folder.rmdir()
    for number in range(3, 256):
        with contextlib.suppress(OSError):
            if "memsave_ext-" in os.readlink(f"/proc/self/fd/{number}"):
                os.close(number)
    losses = train(plain, torch.optim.AdamW(plain.parameters()))
    assert train(net, torch.optim.AdamW(net.parameters())) == losses


def test_models_of_one_folder(tmp_path):
    nets = [network() for _ in range(3)]
    for net in nets:
        ms.weights_on(net, tmp_path)
    for i, net in enumerate(nets):
        train(net, torch.optim.SGD(net.parameters(), 0.1), i)
    for i, net in enumerate(nets):
        plain = network()
        train(plain, torch.optim.SGD(plain.parameters(), 0.1), i)
        assert_same(net, plain)


def test_an_interrupted_step(tmp_path):
    """A step that raises leaves each weight with its old values, or its new ones."""
    results = []
    for on in (None, tmp_path):
        net = network()
        if on:
            ms.weights_on(net, on)
        optimizer = ms.AdamW(net.parameters(), in_backward=True)

        def fail(grad):
            raise RuntimeError("interrupted")

        net.conv.weight.register_hook(fail)
        with pytest.raises(RuntimeError, match="interrupted"):
            train(net, optimizer, 1)
        results.append(net)
    assert_same(*results)
    assert any(
        not torch.equal(p, q) for p, q in zip(net.parameters(), network().parameters(), strict=True)
    )


@pytest.mark.once
def test_nothing_is_left_of_it(tmp_path):
    program = f"""
        import os, signal, torch, memsave_ext as ms
        net = torch.nn.Linear(512, 512)
        ms.weights_on(net, {str(tmp_path)!r})
        net(torch.ones(1, 512)).sum().backward()
        os.kill(os.getpid(), signal.SIGKILL)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=False)
    assert os.listdir(tmp_path) == []


MIB = 1 << 20
RESIDENT = """
    import os, resource, sys, torch
    import memsave_ext as ms
    from torch import nn

    def status(name):
        lines = open("/proc/self/status").read().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))

    def build():
        return nn.Sequential(*(m for _ in range(20) for m in (nn.Linear(2048, 2048), nn.GELU())))

    def step(net, optimizer):
        net(torch.ones(4, 2048)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    small = nn.Linear(2048, 2048)  # has torch load what a step needs
    step(small, ms.AdamW(small.parameters(), in_backward=True, states_on=sys.argv[1]))
    del small
    before, data = status("VmRSS:"), status("VmData:")
    resource.setrlimit(resource.RLIMIT_DATA, (data + (192 << 20),) * 2)
    net = ms.weights_on(build, sys.argv[1]).model  # of 320 MiB
    optimizer = ms.AdamW(net.parameters(), in_backward=True, states_on=sys.argv[1])
    for _ in range(2):
        step(net, optimizer)
    average = [p.mean().item() for p in net.parameters()]
    print(status("VmHWM:") - before, status("VmData:") - data)
"""


@pytest.mark.skipif(not ms._native.available, reason="malloc finds large memory again natively")
def test_resident_bytes(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(RESIDENT), str(tmp_path)],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    resident, private = map(int, done.stdout.split())
    # 320 MiB of weights, with their gradients and states 1.25 GiB.
    assert private < 160 * MIB
    assert resident < 288 * MIB


def test_a_parameter_that_a_module_returns_has_no_hooks(tmp_path):
    class Queries(nn.Module):
        def __init__(self):
            super().__init__()
            self.queries = nn.Parameter(torch.randn(300, 256))

        def forward(self):
            return self.queries

    net = Queries()
    handle = ms.weights_on(net, tmp_path)
    for _ in range(3):
        net().sum().backward()
    assert not net.queries._backward_hooks
    handle.remove()


def test_many_weights_that_are_built_take_few_descriptors(tmp_path):
    def build():
        return nn.Sequential(*[nn.Linear(128, 128, bias=False) for _ in range(300)])

    before = len(os.listdir("/proc/self/fd"))
    handle = ms.weights_on(build, tmp_path)
    assert all(map(is_mapped, handle.model.parameters()))
    assert len(os.listdir("/proc/self/fd")) - before < 30
