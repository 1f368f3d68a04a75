"""checkpoint_modules, remat_module, convert_batch_norm and patch_torch_checkpoint: what
their models can do, as without them."""

import collections
import copy
import dataclasses
import io
import pickle
import threading
import warnings

import pytest
import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import nn

import memsave_ext as ms
from memsave_ext import _native as native

pytestmark = [
    pytest.mark.filterwarnings("ignore:remat keeps everything"),
    pytest.mark.filterwarnings("ignore:.*torch.jit"),
]


@dataclasses.dataclass
class Result:
    value: torch.Tensor
    nothing: None = None


class Output(collections.OrderedDict):
    """As transformers' ModelOutput: a dict with attributes."""

    def __getattr__(self, name):
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class Block(nn.Module):
    """Calls and results of many kinds."""

    def __init__(self, kind="tensor"):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.kind = kind

    def forward(self, x, *, scale: float = 1.0):
        if self.kind == "raises":
            raise KeyError("of the block")
        y = torch.nn.functional.gelu(self.norm(self.linear(x * scale)))
        if self.kind == "in place":
            y += x
            return y
        return {
            "tensor": lambda: y,
            "with None": lambda: (y, None),
            "dict": lambda: {"value": y, "more": [y * 2]},
            "dataclass": lambda: Result(y),
            "ModelOutput": lambda: Output(value=y),
        }[self.kind]()


def tensor_of(out):
    if isinstance(out, torch.Tensor):
        return out
    if isinstance(out, tuple):
        return out[0]
    return out["value"] if isinstance(out, dict) else out.value


class Model(nn.Module):
    def __init__(self, kind="tensor", shared=False):
        super().__init__()
        torch.manual_seed(0)
        blocks = [Block(kind) for _ in range(2)]
        self.blocks = nn.ModuleList([blocks[0], blocks[0]] if shared else blocks)
        self.by_keywords = False
        self.double()

    def forward(self, x):
        for block in self.blocks:
            x = tensor_of(block(x=x, scale=0.5) if self.by_keywords else block(x))
        return x


class CallsTorchs(Model):
    """Checkpoints its blocks by itself."""

    def forward(self, x):
        for block in self.blocks:
            x = tensor_of(torch_checkpoint.checkpoint(block, x, use_reentrant=False))
        return x


def checkpointed(model):
    return ms.checkpoint_modules(model, Block)


def rematerialized(model):
    return ms.remat_module(model, _everything=native.available)


def converted(model):
    assert ms.convert_batch_norm(model) is model
    assert any(isinstance(m, ms.BatchNorm1d) for m in model.modules())


def all_of_them(model):
    converted(model)
    handle = checkpointed(model)
    rematerialized(model)
    return handle


CHANGES = {
    f.__name__.replace("_", " "): f for f in (checkpointed, rematerialized, converted, all_of_them)
}
changes = pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)


def batch():
    return torch.randn(16, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def step(model, x=None):
    model.zero_grad()
    x = (batch() if x is None else x).requires_grad_()
    out = model(x)
    out.square().sum().backward()
    return [out.detach(), x.grad, *(p.grad for p in model.parameters())]


def buffers(model):
    return [b.clone() for b in model.buffers()]


def assert_same(actual, expected, change=None):
    assert len(actual) == len(expected) > 5
    # This package's BatchNorm adds up in another order than torch's.
    exact = change in (None, checkpointed, rematerialized)
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, **({"rtol": 0, "atol": 0} if exact else {}))


def saved_and_loaded(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def with_state_of(model):
    other = Model()
    other.load_state_dict(model.state_dict())
    return other


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": saved_and_loaded,
    "state_dict": with_state_of,
}


@changes
@pytest.mark.parametrize("duplicate", COPIES.values(), ids=COPIES)
def test_copies(change, duplicate):
    model, plain = Model(), Model()
    change(model)
    step(model)
    step(plain)
    other = duplicate(model)
    assert_same(step(other), step(plain), converted if change is all_of_them else change)
    assert {*other.state_dict()} == {*plain.state_dict()}
    weight = model.blocks[0].linear.weight.clone()
    with torch.no_grad():
        other.blocks[0].linear.weight.zero_()
    assert torch.equal(model.blocks[0].linear.weight, weight)


KINDS = ["tensor", "with None", "dict", "dataclass", "ModelOutput", "in place"]


@changes
@pytest.mark.parametrize("by_keywords", [False, True], ids=["arguments", "keywords"])
@pytest.mark.parametrize("kind", KINDS)
def test_calls_and_results(change, kind, by_keywords):
    model, plain = Model(kind), Model(kind)
    model.by_keywords = plain.by_keywords = by_keywords
    change(model)
    assert_same(step(model), step(plain), change)
    assert_same([*buffers(model)], [*buffers(plain)], change)


@changes
def test_a_module_in_two_places(change):
    model, plain = Model(shared=True), Model(shared=True)
    handle = change(model)
    if change is checkpointed:
        assert len(handle.modules) == 1
    for _ in range(2):
        assert_same([*step(model), *buffers(model)], [*step(plain), *buffers(plain)], change)


@changes
def test_an_exception_in_a_block(change):
    model, plain = Model(), Model()
    change(model)
    model.blocks[1].kind = "raises"
    for _ in range(2):
        with pytest.raises(KeyError, match="of the block"):
            model(batch())
    model.blocks[1].kind = "tensor"
    for _ in range(2):
        plain.blocks[0](batch())  # statistics of the calls that failed later
    assert_same(step(model), step(plain), change)
    assert not ms.is_recomputing()


@changes
def test_autocast(change):
    model, plain = Model().float(), Model().float()
    change(model)
    if change in (converted, all_of_them):  # of which only rounding is another
        converted(plain)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual, expected = step(model, batch().float()), step(plain, batch().float())
    assert expected[0].dtype == actual[0].dtype == torch.bfloat16
    assert_same(actual, expected)


@changes
def test_in_threads(change):
    plain = Model()
    expected = step(plain)
    models = [Model() for _ in range(4)]
    results = [None] * 4

    def run(number):
        change(models[number])
        results[number] = step(models[number])

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        assert_same(result, expected, change)


COMPILERS = {
    "export": lambda m: torch.export.export(m, (batch(),)).module(),
    "strict export": lambda m: torch.export.export(m, (batch(),), strict=True).module(),
    "trace": lambda m: torch.jit.trace(m, (batch(),)),
    "compile": lambda m: torch.compile(m, backend="aot_eager"),
}


@pytest.mark.each_value
@changes
@pytest.mark.parametrize("compiler", COMPILERS)
def test_compilers(change, compiler):
    model, plain = Model().eval(), Model().eval()
    change(model)
    torch._dynamo.reset()
    compiled = COMPILERS[compiler](model)
    x, y = batch().requires_grad_(), batch().requires_grad_()
    actual, expected = compiled(x), plain(y)
    torch.testing.assert_close(actual, expected)
    actual.sum().backward()
    expected.sum().backward()
    torch.testing.assert_close(x.grad, y.grad)


@pytest.mark.parametrize("change", [checkpointed, rematerialized])
def test_torch_jit_script_says_why_not(change):
    model = Model("in place")
    handle = change(model)
    part = model.blocks[0] if change is checkpointed else model
    with pytest.raises(AttributeError, match=f"compile {type(part).__name__}, whose forward"):
        torch.jit.script(part)
    handle.remove()
    step(model)


@pytest.mark.parametrize("change", [checkpointed, rematerialized])
def test_twice_and_removed_twice(change):
    model, plain = Model(), Model()
    handle = change(model)
    before = {name: dict(m.__dict__) for name, m in model.named_modules()}
    with pytest.raises(ValueError, match="the forward of .* has been replaced already"):
        change(model)
    for name, module in model.named_modules():
        assert module.__dict__.keys() == before[name].keys()
    assert_same(step(model), step(plain))
    handle.remove()
    again = change(model)
    handle.remove()  # which has nothing to remove
    assert any("forward" in m.__dict__ for m in model.modules())
    again.remove()
    assert not any("forward" in m.__dict__ for m in model.modules())
    assert_same(step(model), step(plain))


def test_converted_twice():
    model = Model()
    converted(model)
    norm = model.blocks[0].norm
    converted(model)
    assert model.blocks[0].norm is norm


@pytest.mark.parametrize("kind", KINDS)
def test_patched(kind):
    model, plain = CallsTorchs(kind), CallsTorchs(kind)
    expected = step(plain)
    seen = []
    part = model.blocks[0].linear
    part.register_forward_pre_hook(lambda *_: seen.append(ms.is_recomputing()))
    with ms.patch_torch_checkpoint():
        assert_same(step(model), expected)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert_same(step(copy.deepcopy(model)), step(copy.deepcopy(plain)))
    assert seen[:2] == [False, True]


@pytest.fixture
def one_rank(tmp_path):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'ranks'}", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


@changes
def test_ddp_of_one_rank(change, one_rank):
    if not torch.distributed.is_available():
        pytest.skip("torch.distributed is not available")
    model, plain = Model(), Model()
    change(model)
    parallel = nn.parallel.DistributedDataParallel(model)
    for _ in range(2):
        assert_same(step(parallel), step(plain), change)
