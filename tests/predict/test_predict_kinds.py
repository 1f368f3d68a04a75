"""Predictions of what is no plain tensor or module: experts, sparse gradients, compiled and wrapped
models."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from steps import assert_near, assert_same, builder, mlp
from torch import nn

import memsave_ext as ms


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.weights = nn.Parameter(torch.randn(4, 32, 64))

    def forward(self, x, ends):
        return F.grouped_mm(x, self.weights, offs=ends)


def test_grouped_products():
    """In float32, of which torch has no fake kernel."""

    def build():
        model = Experts()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.randn(40, 32, requires_grad=True)
        ends = torch.tensor([8, 16, 24, 40], dtype=torch.int32)

        def step():
            model(x, ends).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            x.grad = None

        return model, optimizer, step

    assert_same(build)


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(1000, 64, sparse=True)

    def forward(self, ids):
        return self.embedding(ids).square().sum()


SPARSE = {  # by how much a peak may be off
    "SGD": (lambda ps: torch.optim.SGD(ps, lr=0.1), 0),
    "SGD with momentum": (lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9), 0.01),
    "SparseAdam": (lambda ps: torch.optim.SparseAdam(ps), 0.02),
    "Adagrad": (lambda ps: torch.optim.Adagrad(ps), 0.01),
}


@pytest.mark.parametrize("name", SPARSE)
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_sparse_gradients(name):
    """They hold the rows of the batch, not those of the embedding."""
    make, tolerance = SPARSE[name]

    def build():
        model = Words()
        optimizer = make(list(model.parameters()))
        ids = torch.arange(40)

        def step():
            model(ids).backward()
            optimizer.step()
            optimizer.zero_grad()

        return model, optimizer, step

    predicted, t = assert_near(build, tolerance)
    dense = t.at_peak["parameters"] + t.at_peak["optimizer"]
    assert t.peak - dense > 40 * 64 * 4  # the rows count
    assert predicted.live == t.live


def in_place(model):
    model.compile()
    return model


def first_block(model):
    model[0].compile()
    return model


@pytest.mark.parametrize("compiled", [torch.compile, in_place, first_block])
def test_compiled_models_are_predicted_uncompiled(compiled):
    plain, lazy = (
        ms.memory.predict(builder(torch.optim.AdamW, prepare))
        for prepare in (lambda model: model, compiled)
    )
    assert lazy.peak == plain.peak and lazy.at_peak == plain.at_peak
    model, called = mlp(), []
    x = torch.randn(8, 64)
    frames = torch.compile(model, backend=lambda graph, _: called.append(graph) or graph)
    assert torch.equal(frames(x), model(x)) and called  # what is compiled afterwards is compiled


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def sharded(model):
    dist.fsdp.fully_shard(model)
    return model


DDP = nn.parallel.DistributedDataParallel
SENTENCE = r"before it is wrapped.*memory\.footprint"


@pytest.mark.parametrize("prepare", [DDP, sharded])
def test_wrapped_models_are_refused(group, prepare):
    error = f"(DistributedDataParallel|DTensor).*{SENTENCE}"
    build = builder(torch.optim.AdamW, prepare)
    for call in (ms.memory.predict, lambda b: ms.memory.fits(b, "1GB", device="cpu")):
        with pytest.raises((RuntimeError, ValueError), match=error):
            call(build)
    model = prepare(mlp())
    with pytest.raises(ValueError, match="wrapped for the processes that there are already"):
        ms.memory.predict(model, None, torch.randn(4, 64), devices=2, shard="ddp")
    loss = {"loss": lambda y: y.square().mean()}
    assert ms.memory.predict(model, None, torch.randn(4, 64), **loss).peak
    assert ms.memory.footprint(prepare(mlp())).predicted  # as the sentence says


def test_wrapped_without_processes():
    with pytest.raises(RuntimeError, match=f"DistributedDataParallel cannot.*{SENTENCE}"):
        ms.memory.predict(builder(torch.optim.AdamW, DDP))


def test_an_error_has_no_dump(capfd):
    """torch logs the traceback of a fake kernel that fails."""

    def build():
        model = nn.Linear(4, 4)
        return model, None, lambda: model(torch.ones(2, 3)).sum().backward()

    with pytest.raises(RuntimeError, match="reduction dim"):
        ms.memory.predict(build)
    assert capfd.readouterr() == ("", "")


def test_where_a_fake_kernel_differs_a_note_says_so():
    with torch.library._scoped_library("predict_test", "DEF") as library:
        library.define("once(Tensor x) -> Tensor")
        library.impl("once", torch.clone, "CPU")
        library.impl("once", lambda x: x.view(-1, 5), "Meta")

        def build():
            model = nn.Linear(4, 4)
            return model, None, lambda: torch.ops.predict_test.once(model(torch.ones(2, 4)))

        build()[2]()
        with pytest.raises(RuntimeError, match="is invalid for input") as raised:
            ms.memory.predict(build)
    if hasattr(raised.value, "add_note"):  # since Python 3.11
        assert "If the step runs by itself" in raised.value.__notes__[0]


def test_an_assertion_of_the_fakes_themselves_has_the_note():
    """As torch's nested tensors fail one."""

    def build():
        model = nn.Linear(4, 4)

        def step():
            parts = [torch.ones(2, 4), torch.ones(3, 4)]
            model(torch.nested.nested_tensor(parts, layout=torch.jagged)).values().sum().backward()

        return model, None, step

    build()[2]()
    with pytest.raises(AssertionError) as raised:
        ms.memory.predict(build)
    if hasattr(raised.value, "add_note"):  # since Python 3.11
        assert "If the step runs by itself" in raised.value.__notes__[0]


class Codes(torch.Tensor):
    """A weight whose values numpy reads."""

    @staticmethod
    def __new__(cls, codes):
        made = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)
        made.codes = codes
        return made

    def __init__(self, codes):
        pass

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return cls(args[0].codes)
        plain = [torch.from_numpy(a.codes.numpy() * 0.1) if type(a) is cls else a for a in args]
        return func(*plain, **(kwargs or {}))


def of_codes():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64))
    codes = Codes(torch.randint(9, (64, 64), dtype=torch.float32))
    model[1].weight = nn.Parameter(codes, requires_grad=False)
    return model


def test_a_class_that_cannot_run_on_fakes_is_named():
    model, x = of_codes(), torch.randn(32, 64)
    model(x).sum().backward()
    of_class = f"tensors of the class {Codes.__module__}.Codes cannot be predicted: .numpy"
    with pytest.raises(RuntimeError, match=of_class):
        ms.memory.predict(model, None, x, loss=torch.sum)
    if ms._native.available:
        handle = ms.remat_module(model, budget=0.5)
        model(x).sum().backward()
        report = " ".join(handle.report().split())
        assert "which is measured and has no plan yet" in report and of_class in report
