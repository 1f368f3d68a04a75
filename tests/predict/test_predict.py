"""memory.predict() against memory.track(): the same step on fake and on real memory."""

import pytest
import torch
import torch.nn.functional as F
from steps import assert_near, assert_same, builder, mlp, tracked, without_optimizer
from torch import nn

import memsave_ext as ms
from memsave_ext import _native
from memsave_ext.adam.elsewhere import buffers_of


def checkpointed(model):
    ms.checkpoint_modules(model, lambda m: isinstance(m, nn.Sequential) and m is not model)
    return model


OPTIMIZERS = {
    "AdamW": lambda ps: torch.optim.AdamW(ps),
    "AdamW foreach": lambda ps: torch.optim.AdamW(ps, foreach=True),
    "AdamW fused": lambda ps: torch.optim.AdamW(ps, fused=True),
    "SGD": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
    "ours": lambda ps: ms.AdamW(ps),
    "in backward": lambda ps: ms.AdamW(ps, in_backward=True),
    "8bit": lambda ps: ms.AdamW(ps, in_backward=True, state_dtype="8bit"),
    "bfloat16": lambda ps: ms.AdamW(ps, in_backward=True, state_dtype=torch.bfloat16),
    "amsgrad": lambda ps: ms.AdamW(ps, amsgrad=True),
    "clip": lambda ps: ms.AdamW(ps, clip_global_norm=1.0),
    "clip each": lambda ps: ms.AdamW(ps, in_backward=True, max_grad_norm=1.0),
}


@pytest.mark.once
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name):
    build = builder(OPTIMIZERS[name])
    assert_same(build)


@pytest.mark.once
@pytest.mark.parametrize("bf16", ["stochastic", "split", "split8"])
@pytest.mark.parametrize("in_backward", [False, True])
def test_bfloat16_parameters(bf16, in_backward):
    def make(params):
        return ms.AdamW(params, in_backward=in_backward, bf16=bf16)

    build = builder(make, dtype=torch.bfloat16)
    assert_same(build)


@pytest.mark.skipif(not _native.available, reason="fakes do not have what a Python step makes")
@pytest.mark.parametrize("before", [0, 2], ids=["new", "stepped"])
@pytest.mark.parametrize(
    "options",
    [{"in_backward": True}, {}, {"in_backward": True, "state_dtype": "8bit"}, {"amsgrad": True}],
    ids=str,
)
def test_states_in_a_folder(options, before, tmp_path):
    """Between steps a buffer stays, of the largest parameter's states."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(2)]
    model = nn.Sequential(nn.Embedding(2000, 64), *layers)
    optimizer = ms.AdamW(model.parameters(), states_on=tmp_path, **options)
    x = torch.randint(2000, (256,))

    def loss(out):
        return out.square().mean()

    def step():
        loss(model(x)).backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(before):
        step()
    predicted = ms.memory.predict(model, optimizer, x, loss=loss)
    step()
    step()
    with ms.memory.track(model, optimizer) as t:
        step()
    (buffer,) = buffers_of(optimizer)
    assert buffer.nbytes > 0.9 * t.at_peak["optimizer"] > 0
    assert predicted.peak == t.peak and predicted.at_peak == t.at_peak


def test_checkpoint():
    build = builder(OPTIMIZERS["in backward"], checkpointed)
    predicted, t = assert_same(build)

    def of(track):
        return sorted((r.name, r.calls, r.saved_bytes, r.phase) for r in track.regions)

    assert of(predicted) == of(t)
    assert of(predicted)


def test_an_optimizer_step_that_has_the_peak():
    build = builder(OPTIMIZERS["AdamW foreach"], rows=4)
    predicted, t = ms.memory.predict(build), tracked(build)
    assert predicted.peak_phase == t.peak_phase == "optimizer"
    # Kernels make tensors of numbers such as eps, which no operator shows.
    assert 0 <= t.peak - predicted.peak <= 16


def test_a_model_with_batch_norm_and_embedding():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(50, 32)
            self.norm = nn.BatchNorm1d(32)
            self.head = nn.Linear(32, 50)

        def forward(self, tokens):
            return self.head(F.gelu(self.norm(self.embedding(tokens).flatten(0, 1))))

    def build():
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters())
        tokens = torch.randint(50, (64, 16))

        def step():
            optimizer.zero_grad()
            F.cross_entropy(model(tokens), tokens.flatten()).backward()
            optimizer.step()

        return model, optimizer, step

    assert_same(build)


def test_buffers_that_a_recompute_copies():
    def make():
        model = nn.Sequential(*(nn.BatchNorm1d(10_000) for _ in range(3)))
        x = torch.randn(4, 10_000, requires_grad=True)
        return model, lambda: ms.checkpoint(model, x).sum()

    assert_near(without_optimizer(make), 1e-4)


def test_models_are_built_with_known_values():
    """As some are whose widths follow a rule."""

    def make():
        widths = torch.round(torch.arange(4, dtype=torch.float32) * 8.3 + 8).int()
        count = len(torch.unique(widths))
        model = nn.Sequential(*[nn.Linear(8, width) for width in widths.tolist()])
        assert count == 4 and [layer.out_features for layer in model] == [8, 16, 25, 33]
        x = torch.randn(64, 8)
        return model, lambda: sum(layer(x).square().mean() for layer in model)

    build = without_optimizer(make)
    assert_same(build)


def test_nothing_is_allocated():
    def build():
        with ms.memory.track() as t:
            made = builder(OPTIMIZERS["AdamW"], lambda model: model, rows=1 << 20)()
        assert t.peak < 1 << 16
        return made

    assert ms.memory.predict(build).peak > 1 << 30


def test_random_numbers_stay():
    before = torch.get_rng_state()
    ms.memory.predict(builder(OPTIMIZERS["AdamW"], checkpointed))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("meta", [False, True])
def test_a_model_with_a_batch(meta):
    with torch.device("meta" if meta else "cpu"):
        model, x = mlp(), torch.empty(512, 64)
    optimizer = ms.AdamW(model.parameters(), state_dtype="8bit")
    predicted = ms.memory.predict(model, optimizer, x, loss=lambda y: y.float().square().mean())
    same = ms.memory.predict(builder(lambda ps: ms.AdamW(ps, state_dtype="8bit")))
    assert predicted.peak == same.peak
    assert next(model.parameters()).is_meta == meta
    assert not optimizer.state
    assert all(p.grad is None for p in model.parameters())


def test_optimizers_of_a_batch_step_in_backward():
    def make(params):
        return ms.AdamW(params, in_backward=True, small_bytes=0)

    model, x = mlp(), torch.empty(512, 64)
    optimizer = make(model.parameters())
    predicted = ms.memory.predict(model, optimizer, (x,), loss=lambda y: y.float().square().mean())
    assert predicted.at_peak == ms.memory.predict(builder(make)).at_peak
    expected = ms.memory.predict(model, None, {"input": x}, loss=lambda y: y.sum())
    assert expected.at_peak["optimizer"] == 0


def test_a_card_that_is_not_there():
    def build():
        model = nn.Linear(3, 5).cuda()
        with torch.device("cuda"):
            model.append = nn.Linear(5, 1)
        optimizer = torch.optim.AdamW(model.parameters())
        x = torch.randn(7, 3, device="cuda:0").to("cuda", non_blocking=True)

        def step():
            model.append(model(x)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        return model, optimizer, step

    predicted = ms.memory.predict(build, device="cuda")
    assert predicted.device == torch.device("cuda")
    assert all(tensor.bytes % 512 == 0 for tensor in predicted.top(1000))
    assert predicted.at_peak["parameters"] == 4 * 512
    assert predicted.live >= 4 * 512 + 8 * 512 + 512  # with the batch


@pytest.mark.parametrize("device", ["meta", "cuda"])  # no card need be there
def test_under_a_default_device(device):
    build = builder(OPTIMIZERS["ours"])
    model, optimizer, _ = build()
    live = model, optimizer, torch.randn(512, 64)
    expected = ms.memory.predict(build, device="cuda")
    of_live = ms.memory.predict(*live, loss=lambda y: y.square().mean(), device="cuda")
    torch.set_default_device(device)
    try:
        assert ms.memory.predict(build, device="cuda").at_peak == expected.at_peak
        found = ms.memory.predict(*live, loss=lambda y: y.square().mean(), device="cuda")
        assert found.at_peak == of_live.at_peak
        assert ms.memory.fits(build, "1GB", device="cuda").cheapest.peak == expected.peak
    finally:
        torch.set_default_device(None)


def test_default_devices_of_what_is_built():
    expected = ms.memory.predict(builder(OPTIMIZERS["ours"]), device="cuda")

    def as_usual():
        torch.set_default_device("cuda")
        return builder(OPTIMIZERS["ours"])()

    def first_without_memory(model):
        with torch.device("meta"):
            assert all(p.is_meta for p in mlp().parameters())
        return model

    for build in (as_usual, builder(OPTIMIZERS["ours"], first_without_memory)):
        assert ms.memory.predict(build, device="cuda").at_peak == expected.at_peak


def test_what_a_track_has(tmp_path):
    predicted = ms.memory.predict(builder(OPTIMIZERS["in backward"], checkpointed))
    text = predicted.report()
    assert "What the peak was made of" in text and "Checkpointed regions" in text
    assert "of the time" not in text and "µs" not in text  # nothing was run
    assert predicted.to_json(tmp_path / "timeline.json")["peak"] == predicted.peak
    pytest.importorskip("matplotlib")
    predicted.plot(tmp_path / "timeline.png")
    assert (tmp_path / "timeline.png").stat().st_size > 1000


def test_values_that_decide_are_an_error():
    def build():
        model = nn.Linear(4, 4)
        x = torch.randn(4, 4)
        return model, None, lambda: model(x[x[:, 0] > 0]).sum().backward()

    with pytest.raises(
        RuntimeError,
        match=r"aten\.\w*(index|nonzero).* depends on the values.*`if not .*is_dry_run\(\):`",
    ):
        ms.memory.predict(build)


def test_operators_without_a_fake_kernel_are_an_error():
    with torch.library._scoped_library("predict_test", "DEF") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x * 2, "CPU")

        def build():
            model = nn.Linear(4, 4)
            x = torch.randn(4, 4)
            return model, None, lambda: torch.ops.predict_test.twice(model(x))

        with pytest.raises(RuntimeError, match=r"predict_test.*register_fake"):
            ms.memory.predict(build)


def test_a_model_that_was_made_before():
    """Also on the meta device; it stays what it is."""
    for device in ("cpu", "meta"):
        model = nn.Linear(64, 64, device=device)
        x = torch.randn(32, 64)

        def build(model=model, x=x):
            return model, None, lambda: model(x).sum().backward()

        assert ms.memory.predict(build).at_peak["parameters"] == 4 * (64 * 64 + 64)
        assert model.weight.grad is None and type(model.weight) is nn.Parameter
        assert model.weight.device.type == device


def test_detection_models_are_told():
    class Detects(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.sizes = (320,)

        def forward(self, x):
            index = int(torch.empty(1).uniform_(0.0, float(len(self.sizes))).item())
            x = self.layer(x) * self.sizes[index]
            return x[(x[:, 0] > 0).nonzero().flatten()].sum()

    with pytest.raises(RuntimeError, match="predict: the result of aten.nonzero.* depends on the"):
        ms.memory.predict(Detects(), None, torch.randn(8, 4))


def test_arguments():
    with pytest.raises(ValueError, match="predict: parameters of this LazyLinear have no shape"):
        ms.memory.predict(nn.LazyLinear(4), None, torch.ones(2, 3))
    model = nn.Linear(2, 2)
    for wrong, error in (("1", TypeError), (True, TypeError), (0, ValueError), (-1.0, ValueError)):
        with pytest.raises(error, match="predict: timeout must be"):
            ms.memory.predict(lambda: None, timeout=wrong)
        with pytest.raises(error, match="fits: timeout must be"):
            ms.memory.fits(lambda: None, 1, timeout=wrong)
        with pytest.raises(error, match="fit: timeout must be"):
            ms.fit(model, None, torch.empty(2, 2), budget=1, timeout=wrong)
    with pytest.raises(TypeError, match="predict: progress must be True, False or None"):
        ms.memory.predict(lambda: None, progress="")
    with pytest.raises(TypeError, match="a model needs batch="):
        ms.memory.predict(model)
    with pytest.raises(TypeError, match="returned no loss"):
        ms.memory.predict(model, None, torch.empty(2, 2))
    with pytest.raises(TypeError, match="must return"):
        ms.memory.predict(lambda: None)
    with pytest.raises(TypeError, match="can be passed only with a model"):
        ms.memory.predict(lambda: None, None, torch.empty(2))
    with pytest.raises(TypeError, match="predict: build must be .* got NoneType"):
        ms.memory.predict(None, None, torch.empty(2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 2)).sum().backward()
    optimizer.step()
    with pytest.raises(ValueError, match="predict: the optimizer has states already"):
        ms.memory.predict(
            model, optimizer, torch.ones(2, 2), loss=torch.sum, devices=2, shard="fsdp2"
        )
    with pytest.raises(ValueError, match="CPU or a CUDA device"):
        ms.memory.predict(lambda: None, device="mps")


def generators():
    def build():
        made, told = mlp(), nn.Sequential(nn.Linear(64, 256), nn.LeakyReLU(0.2), nn.Linear(256, 1))
        optimizers = [torch.optim.Adam(m.parameters()) for m in (made, told)]
        real, ones, zeros = torch.randn(256, 64), torch.ones(256, 1), torch.zeros(256, 1)
        loss = nn.BCEWithLogitsLoss()

        def step():
            optimizers[1].zero_grad()
            fake = made(torch.randn(256, 64))
            (loss(told(real), ones) + loss(told(fake.detach()), zeros)).backward()
            optimizers[1].step()
            optimizers[0].zero_grad()
            loss(told(fake), ones).backward()
            optimizers[0].step()

        return nn.ModuleList([made, told]), optimizers[0], step

    return build


def trained_on(loss, x):
    def build():
        model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 32))
        optimizer = torch.optim.AdamW(model.parameters())

        def step():
            loss(model, x).backward()
            optimizer.step()
            optimizer.zero_grad()

        return model, optimizer, step

    return build


def of_two_forwards(model, x):
    a, b = (model(x).log_softmax(-1) for _ in range(2))
    return sum(F.kl_div(*pair, "batchmean", log_target=True) for pair in ((a, b), (b, a)))


def ctc(model, x):
    targets, lengths = torch.ones(8, 12, dtype=torch.long), torch.arange(4, 12)
    return F.ctc_loss(model(x).log_softmax(-1), targets, torch.full((8,), 50), lengths)


@pytest.mark.once
@pytest.mark.parametrize(
    "build",
    [
        generators(),
        trained_on(of_two_forwards, torch.ones(256, 64)),
        trained_on(ctc, torch.ones(50, 8, 64)),
    ],
    ids=["two optimizers", "two forwards", "ctc"],
)
def test_other_steps_than_one_forward_of_one_model(build):
    predicted, t = ms.memory.predict(build), tracked(build)
    assert (predicted.peak, predicted.live) == (t.peak, t.live)
