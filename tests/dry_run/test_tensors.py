"""Real tensors of a process become fake ones in a child: all objects, with what belongs to them."""

import functools
import gc
import mmap

import numpy as np
import pytest
import torch
from helpers import on_fakes
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

import memsave_ext as ms
from memsave_ext.fakes import patches


def storage_of(tensor):
    return tensor.untyped_storage()._cdata


ELSEWHERE = {"weight": torch.randn(4, 4)}


@functools.lru_cache
def cached():
    return torch.randn(3)


def test_all_objects_are_fake():
    listed, closed, cell = [torch.randn(2)], torch.randn(5), torch.randn(6)
    cached()

    def closure():
        return cell

    def seen():
        return [type(t) for t in (listed[0], closed, closure(), ELSEWHERE["weight"], cached())]

    assert on_fakes(seen) == [FakeTensor] * 5
    assert {type(t) for t in (listed[0], closed, cell, cached())} == {torch.Tensor}


def test_frozen_objects_too():
    tensor = torch.randn(3)
    gc.freeze()
    try:
        assert on_fakes(lambda: type(tensor)) is FakeTensor
    finally:
        gc.unfreeze()


def test_geometry_and_shared_memory():
    base = torch.randn(6, 8)
    views = [base, base[1:, ::2], base.T, base.flatten()[5:], base.expand(2, 6, 8)]
    other = torch.randn(6, 8)

    def geometry():
        return [(t.shape, t.stride(), t.storage_offset(), t.dtype) for t in views]

    def same():
        assert geometry() == expected
        return len({*map(storage_of, views)}), storage_of(other) == storage_of(base)

    expected = geometry()
    assert on_fakes(same) == (1, False)


def test_modules_and_optimizers():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model.register_parameter("tied", model[0].weight)
    model[1].weight.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    frozen, x = model[1].weight, torch.randn(3, 4)

    def inside():
        params = list(model.parameters())
        assert all(isinstance(p, nn.Parameter) and isinstance(p, FakeTensor) for p in params)
        assert model.tied is model[0].weight and not frozen.requires_grad and frozen.grad is None
        assert all(isinstance(p.grad, FakeTensor) for p in params if p.requires_grad)
        states = [optimizer.state[p] for p in params if p.requires_grad]
        assert all(isinstance(s["exp_avg"], FakeTensor) and s["step"].item() == 1 for s in states)
        assert model[1].num_batches_tracked.item() == 1
        model.zero_grad()
        model(x).sum().backward()
        optimizer.step()
        return {float(s["step"]) for s in states}, model[1].num_batches_tracked.item()

    before = [p.clone() for p in model.parameters()]
    assert on_fakes(inside) == ({2.0}, 2)
    assert all(map(torch.equal, before, model.parameters()))
    assert {float(s["step"]) for s in optimizer.state.values()} == {1.0}


def test_users_hooks_come_along_and_ours_do_not():
    calls, x = [], torch.randn(3, 4)
    model = nn.Linear(4, 4)
    model.weight.register_hook(lambda grad: calls.append(("before", type(grad))))
    model.weight.register_post_accumulate_grad_hook(lambda p: calls.append(("after", type(p))))
    ms.AdamW(model.parameters(), in_backward=True)

    def inside():
        model(x).sum().backward()
        return calls, model.weight.grad is not None

    seen, has_gradient = on_fakes(inside)
    assert seen == [("before", FakeTensor), ("after", FakeTensor)] and has_gradient
    assert not calls and model.weight.grad is None


def test_values_that_stay():
    lengths, mask = torch.tensor([3, 1, 2]), torch.zeros(1000, 1000, dtype=torch.bool)
    scale, weight = torch.tensor(0.5), nn.Parameter(torch.tensor(2.0))
    table = torch.randn(8)

    def inside():
        assert lengths.max().item() == 3 and not mask.any() and scale > 0.4
        assert [lengths.tolist(), lengths[1].item(), int(lengths.sum())] == [[3, 1, 2], 1, 6]
        lengths.add_(1)
        mask[0, 0] = True
        return lengths.tolist(), weight.item(), table.sum().item()

    assert on_fakes(inside) == ([4, 2, 3], 1, 1)  # what is not known is taken to be 1
    assert lengths.tolist() == [3, 1, 2] and not mask.any()


def test_shared_memory_stays_as_it_is(tmp_path):
    """As that of batches which a DataLoader's workers have made, and of arrays on files."""
    shared = torch.arange(8).share_memory_()
    file = np.memmap(tmp_path / "file", dtype=np.int64, mode="w+", shape=8)
    on_file, anonymous = (
        torch.from_numpy(file),
        torch.frombuffer(mmap.mmap(-1, 64), dtype=torch.int64),
    )
    tensors = [shared, on_file, anonymous]
    views = [tensor[2:6:2] for tensor in tensors]
    own = torch.arange(8)

    def inside():
        for tensor in (*tensors, own):
            tensor.add_(1)
        for view in views:
            view.mul_(10)
        return [tensor.tolist() for tensor in (*tensors, own)], [view.tolist() for view in views]

    # A part of memory that is too large to be copied as a whole.
    large = torch.from_numpy(np.memmap(tmp_path / "large", np.int64, "w+", shape=(1 << 24) + 1))
    part = large[:4]
    before = [tensor.tolist() for tensor in tensors]
    assert on_fakes(lambda: part.add_(1).tolist()) == [1] * 4 and part.tolist() == [0] * 4
    first, rest = [1, 2, 30, 4, 50, 6, 7, 8], [1, 1, 10, 1, 10, 1, 1, 1]
    assert on_fakes(inside) == (
        [first, rest, rest, list(range(1, 9))],
        [[30, 50], [10, 10], [10, 10]],
    )
    assert [tensor.tolist() for tensor in tensors] == before
    assert own.tolist() == list(range(8))


class Coded(torch.Tensor):
    def decoded(self):
        return self.float() * self.scale


class CodedParameter(nn.Parameter):
    pass


class Slots(torch.Tensor):
    __slots__ = ("more",)


class Wrapping(torch.Tensor):
    """With a dispatch of its own, and a tensor inside."""

    @staticmethod
    def __new__(cls, inside):
        made = torch.Tensor._make_wrapper_subclass(cls, inside.shape, dtype=inside.dtype)
        made.inside = inside
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        args = [a.inside if isinstance(a, Wrapping) else a for a in args]
        return func(*args, **(kwargs or {}))


def test_subclasses_keep_their_class_and_attributes():
    codes = torch.randint(9, (4, 4), dtype=torch.uint8).as_subclass(Coded)
    codes.scale = torch.tensor(0.25)
    param = CodedParameter(torch.randn(3))
    param.quant_state = {"blocks": 3}
    wrapped, slots = Wrapping(torch.randn(2)), torch.randn(2).as_subclass(Slots)

    def inside():
        assert isinstance(codes, Coded) and isinstance(codes, FakeTensor)
        assert isinstance(param, CodedParameter) and isinstance(param, nn.Parameter)
        assert param.quant_state == {"blocks": 3} and param.requires_grad
        assert type(wrapped) is Wrapping and isinstance(wrapped.inside, FakeTensor)
        assert isinstance(wrapped * 2, FakeTensor)
        return type(codes.decoded()).__name__, isinstance(slots, Slots)

    name, stays = on_fakes(inside)
    assert name in ("FakeTensor", "Coded") and stays


def test_other_layouts_and_kinds():
    kept = [
        torch.eye(4).to_sparse(), torch.eye(4).to_sparse_csr(),
        torch.nested.nested_tensor([torch.randn(2), torch.randn(3)]),
        torch.quantize_per_tensor(torch.randn(4), 0.1, 0, torch.quint8),
        torch.randn(3, dtype=torch.complex64).conj(), torch.randn(0), nn.LazyLinear(3).weight,
        torch.randn(4, device="meta"), torch.randn(1, requires_grad=True) * 2,
    ]  # fmt: skip
    with torch.inference_mode():
        kept.append(torch.randn(3))

    def inside():
        product = kept[1] @ torch.randn(4, 4)
        assert isinstance(product, FakeTensor) and product.shape == (4, 4)
        assert [t.is_conj() for t in kept[4:6]] == [True, False]
        return [isinstance(t, FakeTensor) for t in kept]

    fake = on_fakes(inside)
    assert fake[:2] == [True, True] and fake[4:6] == [True, True] and not fake[6]
    assert fake[7:] == [True, True, True]


def test_weak_references_forbid_nothing():
    from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

    tensor = torch.randn(3)
    reference, known = TensorWeakRef(tensor), WeakTensorKeyDictionary()
    known[tensor] = 1
    assert on_fakes(lambda: (isinstance(reference(), FakeTensor), len(known))) == (True, 1)


@pytest.mark.skipif(not ms._native.available, reason="budgets need the native part")
def test_traced_models_within_a_budget():
    x = torch.randn(16, 8)
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
    plain = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    made = torch.jit.trace(model, x)
    handle = ms.remat_module(made, budget=0.5)
    made(x).square().sum().backward()
    assert all(torch.equal(p.grad, g) for p, g in zip(made.parameters(), plain, strict=True))
    assert "the model is scripted" in " ".join(handle.report().split())


def test_globals_are_replaced_in_the_child_alone():
    listed = [*patches.in_child(1, None, None), *patches.on_fakes(print), *patches.on_cuda()]
    listed.append(patches.of_parameters(print))

    def standing():
        return [getattr(one.owner, one.name) for one in listed]

    def unchanged():
        return [
            one.name for one, now, was in zip(listed, standing(), before, strict=True) if now is was
        ]

    before = standing()
    assert on_fakes(unchanged, "cuda") == []
    assert len(unchanged()) == len(listed)
