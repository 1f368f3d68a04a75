import copy

import pytest
import torch
from torch import nn

import memsave_ext as ms


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, momentum=None))
        self.shared = nn.BatchNorm2d(4, eps=1e-3)
        self.again = self.shared
        self.blocks = nn.ModuleList([nn.ModuleDict({"norm": nn.BatchNorm3d(2, affine=False)})])
        self.done = ms.BatchNorm1d(5, activation="relu")
        self.layer_norm = nn.LayerNorm(4)

    def forward(self, x):
        return self.again(self.shared(self.stem(x)))


def test_in_place_with_the_same_objects():
    model = Model()
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    tensors = [*model.parameters(), *model.buffers()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle_calls = []
    model.shared.register_forward_hook(lambda *_: handle_calls.append(1))
    keys = list(model.state_dict())

    assert ms.convert_batch_norm(model) is model

    assert [type(m) for m in norms] == [
        ms.BatchNorm2d, ms.BatchNorm2d, ms.BatchNorm3d, ms.BatchNorm1d,
    ]  # fmt: skip
    assert all(
        p is q for p, q in zip(tensors, [*model.parameters(), *model.buffers()], strict=True)
    )
    assert model.again is model.shared
    assert list(model.state_dict()) == keys
    assert norms[3].activation == "relu" and norms[0].activation is None
    before = model.shared.weight.detach().clone()
    model(torch.randn(2, 3, 6, 6)).square().sum().backward()
    optimizer.step()
    assert len(handle_calls) == 2
    assert not torch.equal(before, model.shared.weight)


def test_as_the_model_before():
    theirs = Model()
    ours = ms.convert_batch_norm(copy.deepcopy(theirs))
    x = torch.randn(2, 3, 6, 6)
    for _ in range(2):
        torch.testing.assert_close(ours(x), theirs(x))
    torch.testing.assert_close(list(ours.buffers()), list(theirs.buffers()))
    assert repr(ours) == repr(theirs)
    ours.eval()
    assert not any(m.training for m in ours.modules())


def test_a_norm_itself_and_one_converted_already():
    bn = nn.BatchNorm2d(4).eval()
    assert ms.convert_batch_norm(bn) is bn
    assert type(bn) is ms.BatchNorm2d and not bn.training
    assert ms.convert_batch_norm(bn, dry_run=True) == []


def test_dry_run():
    model = Model()
    assert ms.convert_batch_norm(model, dry_run=True) == [
        ("stem.1", "torch.nn.BatchNorm2d", "memsave_ext.BatchNorm2d"),
        ("shared", "torch.nn.BatchNorm2d", "memsave_ext.BatchNorm2d"),
        ("blocks.0.norm", "torch.nn.BatchNorm3d", "memsave_ext.BatchNorm3d"),
    ]
    assert type(model.shared) is nn.BatchNorm2d


@pytest.mark.parametrize("training", [False, True])
def test_torch_fx_has_norms_as_leaves(training):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.norms = nn.Sequential(ms.BatchNorm1d(4), ms.BatchNorm1d(4, activation="relu"))

        def forward(self, x):
            return self.norms[1](self.norms[0](x) + x, residual=x)

    torch.manual_seed(0)
    net, x = Net().train(training), torch.randn(8, 4)
    traced = torch.fx.symbolic_trace(copy.deepcopy(net))
    assert [node.target for node in traced.graph.find_nodes(op="call_module")] == [
        "norms.0", "norms.1"
    ]  # fmt: skip
    for _ in range(2):
        assert torch.equal(traced(x), net(x))
    for name, value in traced.state_dict().items():
        assert torch.equal(value, net.state_dict()[name]), name


def test_sync():
    model = Model()
    model.already = nn.SyncBatchNorm(4)
    ms.convert_batch_norm(model, sync=True)
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    assert {type(m) for m in norms} == {ms.SyncBatchNorm}
    assert all(m.process_group is None for m in norms)
    assert model.done.activation == "relu"
    model(torch.randn(2, 3, 6, 6))  # without torch.distributed
    assert ms.convert_batch_norm(model, sync=True, dry_run=True) == []
    assert type(ms.convert_batch_norm(nn.SyncBatchNorm(3))) is ms.SyncBatchNorm


class Own(nn.BatchNorm2d):
    def forward(self, x):
        return 2 * super().forward(x)


def test_refuses_what_it_does_not_know_and_changes_nothing():
    model = Model()
    model.own = Own(3)
    model.lazy = nn.LazyBatchNorm1d()
    with pytest.raises(TypeError) as info:
        ms.convert_batch_norm(model)
    assert "own (test_batch_norm_convert.Own)" in str(info.value)
    assert "lazy (torch.nn.modules.batchnorm.LazyBatchNorm1d)" in str(info.value)
    assert type(model.shared) is nn.BatchNorm2d


def test_refuses_a_patched_forward():
    model = Model()
    model.shared.forward = lambda x: x
    with pytest.raises(TypeError, match=r"shared \(torch.nn"):
        ms.convert_batch_norm(model)
