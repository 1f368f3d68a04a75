"""Checkpointing whole models: segments, blocks in place, models that call torch's function."""

import copy
import functools
import pickle
import subprocess
import sys
import types
import weakref

import pytest
import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import nn

import memsave_ext as ms


class Block(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.linear = nn.Linear(size, size)
        self.dropout = nn.Dropout(0.2)
        self.recomputed = 0

    def forward(self, x, *, scale=1.0):
        self.recomputed += ms.is_recomputing()
        return self.dropout(self.linear(x * scale)).tanh()


class Model(nn.Module):
    def __init__(self, blocks=3, size=4):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(size) for _ in range(blocks))
        self.head = nn.Linear(size, 2)

    def forward(self, x):
        for block in self.blocks:
            x = block(x, scale=2.0)
        return self.head(x)


def gradients(model, x):
    torch.manual_seed(3)
    model.zero_grad()
    model(x).square().sum().backward()
    return [p.grad.clone() for p in model.parameters()]


def recomputed(model):
    return [block.recomputed for block in model.blocks]


@pytest.mark.parametrize(
    "select",
    [Block, (Block, nn.Conv2d), lambda m: isinstance(m, Block)],
    ids=["class", "tuple", "fn"],
)
def test_blocks_in_place(select):
    x = torch.randn(5, 4)
    plain, model = Model(), Model()
    names, keys = dict(model.named_modules()).keys(), model.state_dict().keys()
    expected = gradients(plain, x)
    handle = ms.checkpoint_modules(model, select)
    for a, b in zip(expected, gradients(model, x), strict=True):
        assert torch.equal(a, b)
    assert recomputed(model) == [1, 1, 1]
    assert dict(model.named_modules()).keys() == names
    assert model.state_dict().keys() == keys
    assert type(model.blocks[0]) is Block
    assert handle.modules == list(model.blocks)
    handle.remove()
    handle.remove()
    gradients(model, x)
    assert recomputed(model) == [1, 1, 1]
    assert "forward" not in model.blocks[0].__dict__


def test_modules_that_learn_their_shapes_in_the_region():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.LazyLinear(4), nn.Tanh()), torch.randn(3, 5)
    ms.checkpoint(model, x).sum().backward()
    found = [p.grad for p in model.parameters()]
    expected = torch.autograd.grad(model(x).sum(), [*model.parameters()])
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_are_checkpointed_by_themselves(duplicate):
    x = torch.randn(5, 4)
    model = Model()
    ms.checkpoint_modules(model, Block)
    other = duplicate(model)
    for a, b in zip(gradients(model, x), gradients(other, x), strict=True):
        assert torch.equal(a, b)
    with torch.no_grad():
        other.blocks[0].linear.weight.zero_()
    assert not torch.equal(gradients(model, x)[0], gradients(other, x)[0])
    assert recomputed(model) == [2, 2, 2]
    assert recomputed(other) == [2, 2, 2]


@pytest.mark.parametrize("hooked", [False, True])
def test_a_shallow_copy_runs_its_own_forward(hooked):
    block = Block(4).eval()
    ms.checkpoint_modules(block, Block)
    other = copy.copy(block)
    other._modules = {**block._modules, "linear": nn.Linear(4, 4)}
    if hooked:
        other.register_forward_hook(lambda m, a, o: None)
    x = torch.randn(5, 4)
    assert torch.equal(other(x), other.linear(x).tanh())
    assert torch.equal(block(x), block.linear(x).tanh())
    block.recomputed = other.recomputed = 0
    other(x).sum().backward()
    assert (block.recomputed, other.recomputed) == (0, 1)
    assert block.linear.weight.grad is None


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"determinism_check": "x"}, ValueError, "'default' or 'none', got 'x'"),
        ({"offload": "disk"}, ValueError, "None or 'cpu', got 'disk'"),
        ({"early_stop": "no"}, TypeError, "early_stop must be True or False, got 'no'"),
        ({"preserve_rng_state": 1}, TypeError, "preserve_rng_state must be True or False, got 1"),
    ],
)
def test_bad_options_are_refused_at_once(options, error, message):
    model = Model()
    with pytest.raises(error, match=message):
        ms.checkpoint_modules(model, Block, **options)
    assert "forward" not in model.blocks[0].__dict__
    with pytest.raises(error, match=message):
        ms.checkpoint_sequential(model.blocks, 2, torch.randn(1, 4), **options)
    with pytest.raises(error, match=message):
        torch.compile(lambda x: ms.checkpoint(torch.sin, x, **options), backend="eager")(
            torch.randn(2, requires_grad=True)
        )


def test_callers_keep_no_variables():
    """Python up to 3.12 keeps those of a frame whose f_locals somebody has asked for."""

    class Caller:
        def run(self, forward):
            kept = torch.empty(8)
            reference = weakref.ref(kept)
            forward(torch.randn(4, 8))
            del kept
            return reference() is None

        def tell(self, forward):
            mine = locals()
            forward(torch.randn(4, 8))
            return [*mine]

    model = nn.Linear(8, 8)
    ms.checkpoint_modules(model, nn.Linear)
    for forward in (model, model.forward):
        assert Caller().run(forward)
        assert Caller().tell(forward) == ["self", "forward"]


def test_hooks_and_options():
    model, x = Model(1), torch.randn(5, 4)
    calls = []
    model.blocks[0].register_forward_pre_hook(lambda m, a: calls.append("pre"))
    model.blocks[0].register_forward_hook(lambda m, a, o: calls.append("post"))
    ms.checkpoint_modules(model, Block, early_stop=False, determinism_check="none")
    gradients(model, x)
    assert calls == ["pre", "post"]


@pytest.mark.parametrize(
    ("select", "error", "message"),
    [
        (nn.Conv2d, ValueError, "matches no module"),
        (lambda m: False, ValueError, "matches no module"),
        ("Block", TypeError, "must be a module class, a tuple of classes or a predicate, got str"),
        (int, TypeError, "must name module classes"),
        ((Block, 3), TypeError, "must name module classes"),
    ],
)
def test_bad_selections(select, error, message):
    with pytest.raises(error, match=message):
        ms.checkpoint_modules(Model(), select)


def test_removed_where_another_library_has_wrapped_the_forward_since():
    recomputing = []

    class Block(nn.Module):
        def forward(self, x):
            recomputing.append(ms.is_recomputing())
            return x.exp().sin()

    model = nn.Sequential(Block(), Block())
    handle = ms.checkpoint_modules(model, Block)
    for block in model:
        block.forward = functools.partial(lambda own, *args: own(*args), block.forward)
    x = torch.randn(4, requires_grad=True)
    model(x).sum().backward()
    assert recomputing == [False, False, True, True]
    handle.remove()
    model(x).sum().backward()
    assert recomputing[4:] == [False, False] and not handle.modules


def test_twice_is_an_error_that_changes_nothing():
    model = Model()
    ms.checkpoint_modules(model, lambda m: m is model.blocks[1])
    with pytest.raises(ValueError, match="the forward of .* has been replaced already"):
        ms.checkpoint_modules(model, Block)
    assert "forward" not in model.blocks[0].__dict__


# ---- segments ---------------------------------------------------------------------------------


@pytest.mark.parametrize("segments", [1, 2, 3, 5])
def test_sequential(segments):
    torch.manual_seed(0)
    model = nn.Sequential(*[Block(4) for _ in range(5)])
    x = torch.randn(3, 4, requires_grad=True)
    torch.manual_seed(1)
    expected = torch.autograd.grad(model(x).sum(), (x, *model.parameters()))
    torch.manual_seed(1)
    out = ms.checkpoint_sequential(model, segments, x, use_reentrant=False)
    got = torch.autograd.grad(out.sum(), (x, *model.parameters()))
    for a, b in zip(expected, got, strict=True):
        assert torch.equal(a, b)
    counts = [block.recomputed for block in model]
    uncheckpointed = -(-5 // segments)
    assert sum(counts) == 5 - uncheckpointed
    assert counts[-uncheckpointed:] == [0] * uncheckpointed


def test_sequential_with_several_values():
    functions = [
        lambda a, b: (a * b, a + b),
        lambda a, b: (a.sin(), b.exp()),
        lambda a, b: a * b,
        torch.tanh,
    ]
    a, b = torch.randn(4, requires_grad=True), torch.randn(4, requires_grad=True)
    values = (a, b)
    for f in functions[:2]:
        values = f(*values)
    expected = torch.autograd.grad(functions[3](functions[2](*values)).sum(), (a, b))
    got = torch.autograd.grad(ms.checkpoint_sequential(functions, 3, a, b).sum(), (a, b))
    for left, right in zip(expected, got, strict=True):
        assert torch.equal(left, right)


@pytest.mark.parametrize("use_reentrant", [True, False, None])
def test_sequential_as_torch_is_called(use_reentrant):
    functions = [torch.sin, torch.exp, torch.tanh]
    x = torch.randn(4, requires_grad=True)
    expected = torch_checkpoint.checkpoint_sequential(functions, 2, x, False)
    assert torch.equal(ms.checkpoint_sequential(functions, 2, x, use_reentrant), expected)
    with pytest.raises(TypeError, match="use_reentrant is given twice"):
        ms.checkpoint_sequential(functions, 2, x, use_reentrant, use_reentrant=False)
    flagged = [lambda a, flag: a if flag else -a, torch.exp]
    assert torch.equal(ms.checkpoint_sequential(flagged, 2, (x, False)), (-x).exp())


def test_a_segment_refers_to_its_own_functions_alone(monkeypatch):
    """A region looks at all that its function refers to."""
    found = []
    monkeypatch.setattr(
        sys.modules["memsave_ext.checkpoint.models"],
        "checkpoint",
        lambda function, *args, **_: found.append(function) or function(*args),
    )
    steps = [nn.Linear(2, 2) for _ in range(6)]
    ms.checkpoint_sequential(steps, 3, torch.randn(1, 2))
    cells = [[cell.cell_contents for cell in function.__closure__] for function in found]
    assert [[c for c in of if isinstance(c, list)] for of in cells] == [[steps[:2]], [steps[2:4]]]


@pytest.mark.parametrize(
    ("segments", "error"), [(0, ValueError), (3, ValueError), (1.0, TypeError), (True, TypeError)]
)
def test_sequential_bad_segments(segments, error):
    with pytest.raises(error, match="segments must be"):
        ms.checkpoint_sequential([torch.sin, torch.cos], segments, torch.ones(1))


def test_sequential_of_what_cannot_be_called():
    for wrong in (3, [torch.sin, "cos"]):
        with pytest.raises(TypeError, match="functions must be an nn.Sequential or callables, got"):
            ms.checkpoint_sequential(wrong, 1, torch.ones(1))


# ---- models that call torch's checkpoint ------------------------------------------------------


@pytest.fixture
def library():
    """A module that has imported the name, as model libraries do."""
    module = types.ModuleType("somebodys_models")
    exec("from torch.utils.checkpoint import checkpoint as ckpt", module.__dict__)
    sys.modules[module.__name__] = module
    yield module
    del sys.modules[module.__name__]


def test_patch(library):
    original, sequential = torch_checkpoint.checkpoint, torch_checkpoint.checkpoint_sequential
    x = torch.randn(4, requires_grad=True)
    seen = []

    def function(a):
        seen.append(ms.is_recomputing())
        return a.exp().sin()

    with ms.patch_torch_checkpoint():
        assert library.ckpt is torch.utils.checkpoint.checkpoint is not original
        assert torch.utils.checkpoint.checkpoint_sequential is not sequential
        library.late = torch_checkpoint.checkpoint
        library.ours = ms.checkpoint
        library.ckpt(function, x, use_reentrant=True).sum().backward()
        functools.partial(torch_checkpoint.checkpoint, use_reentrant=False)(function, x)
    assert seen == [False, True, False]
    assert library.ckpt is library.late is torch_checkpoint.checkpoint is original
    assert torch_checkpoint.checkpoint_sequential is sequential
    assert library.ours is ms.checkpoint
    handle = ms.patch_torch_checkpoint()
    assert library.ckpt is not original
    handle.remove()
    assert library.ckpt is original


def test_patches_nest(library):
    original = torch_checkpoint.checkpoint
    outer = ms.patch_torch_checkpoint()
    with ms.patch_torch_checkpoint() as inner:
        pass
    inner.remove()
    assert library.ckpt is torch_checkpoint.checkpoint is not original
    outer.remove()
    assert library.ckpt is torch_checkpoint.checkpoint is original


def test_patch_is_undone_by_an_exception(library):
    original = torch_checkpoint.checkpoint
    with pytest.raises(KeyError), ms.patch_torch_checkpoint():
        raise KeyError
    assert library.ckpt is original


# ---- torch.compile ----------------------------------------------------------------------------


@pytest.mark.once
def test_compile_full_graph():
    """In a process of its own: dynamo's state is global."""
    code = """
import torch, memsave_ext as ms
torch.manual_seed(0)
bn = ms.BatchNorm1d(4)
linear = torch.nn.Linear(4, 4)
x = torch.randn(8, 4, requires_grad=True)
def model(x):
    return ms.checkpoint(lambda a: bn(linear(a)).tanh(), x).sum()
model(x).backward()
expected, x.grad = x.grad, None
torch.compile(model, fullgraph=True, backend="aot_eager")(x).backward()
torch.testing.assert_close(x.grad, expected)
assert bn.num_batches_tracked == 2, bn.num_batches_tracked
norm = torch.nn.BatchNorm1d(4)
for run in (ms.checkpoint, torch.utils.checkpoint.checkpoint):
    with ms.patch_torch_checkpoint():
        torch._dynamo.reset()
        compiled = torch.compile(
            lambda x: run(norm, x, use_reentrant=False).sum(), fullgraph=True, backend="aot_eager"
        )
        compiled(x).backward()
assert norm.num_batches_tracked == 2, norm.num_batches_tracked
class Block(torch.nn.Module):
    def forward(self, x, debug=False, use_reentrant=True):
        return x.sin() * (3 if debug else 1) * (5 if use_reentrant else 1)
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.block = Block()
    def forward(self, x):
        return self.block(x, debug=True, use_reentrant=False)
net = Net()
ms.checkpoint_modules(net, Block)
x = torch.ones(3, requires_grad=True)
y = torch.compile(net, fullgraph=True, backend="aot_eager")(x)
y.sum().backward()
torch.testing.assert_close(y, 3 * x.sin())
torch.testing.assert_close(x.grad, 3 * x.detach().cos())
print("as expected")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip().endswith("as expected"), done.stderr


def test_a_sequence_that_has_modules_twice():
    a, b = nn.Linear(4, 4), nn.Linear(4, 4)
    net, x = nn.Sequential(a, b, a, b), torch.randn(2, 4)
    for segments in (2, 4):
        assert torch.equal(net(x), ms.checkpoint_sequential(net, segments, x))


class TakesAnOption(nn.Module):
    """Its forward has parameters that options of checkpoint are called, too."""

    def forward(self, x, *, debug=False, chunks=1):
        return x.sin() * (3 if debug else 1) * chunks


def test_keywords_of_blocks_that_options_are_called_too():
    net, x = nn.Sequential(TakesAnOption()), torch.ones(4, requires_grad=True)
    expected = net[0](x, debug=True, chunks=5)
    ms.checkpoint_modules(net, TakesAnOption)
    found = net[0](x, debug=True, chunks=5)
    assert torch.equal(found, expected)
    found.sum().backward()
    assert torch.equal(x.grad, 15 * torch.ones(4).cos())


def test_keywords_under_the_patch():
    x = torch.ones(4, requires_grad=True)
    options = {"use_reentrant": False, "preserve_rng_state": False}
    with ms.patch_torch_checkpoint():
        block = TakesAnOption()
        found = torch.utils.checkpoint.checkpoint(block, x, chunks=4, **options)
        assert torch.equal(found, 4 * x.sin())


def test_sequences_under_the_patch():
    net, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), torch.randn(2, 4)
    steps = [lambda a: (a, a + 1), sum, torch.tanh]
    sequential = torch.utils.checkpoint.checkpoint_sequential
    expected = sequential(steps, 2, x, use_reentrant=False)
    with ms.patch_torch_checkpoint():
        sequential = torch.utils.checkpoint.checkpoint_sequential
        assert torch.equal(sequential(steps, 2, x, use_reentrant=False), expected)
        assert torch.equal(sequential(steps, 3, x, False), expected)
        assert torch.equal(sequential(net, 2, input=x, use_reentrant=False), net(x))


def test_options_that_are_none():
    net = nn.Sequential(TakesAnOption())
    with pytest.raises(TypeError, match="checkpoint_modules: offlod is no option of checkpoint"):
        ms.checkpoint_modules(net, TakesAnOption, offlod="cpu")
    with pytest.raises(TypeError, match="checkpoint_sequential: x is no option of checkpoint"):
        ms.checkpoint_sequential(net, 1, torch.ones(2), x=1)


def test_scripted_blocks_are_refused():
    net = nn.Sequential(torch.jit.script(nn.Linear(4, 4)))
    with pytest.raises(ValueError, match="a scripted module is selected"):
        ms.checkpoint_modules(net, torch.jit.ScriptModule)
    x = torch.randn(2, 4)
    assert torch.equal(ms.checkpoint(net[0], x), net(x))
