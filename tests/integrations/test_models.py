"""Models of timm and torchvision: their blocks checkpointed, their batch norms converted."""

import pytest
import torch
from torch import nn

import memsave_ext as ms

if not ms._native.available:
    pytest.skip("other models are tested in pure Python", allow_module_level=True)
LIBRARIES = ["timm", "torchvision.models"]
timm = models = None  # conftest.py imports them

X = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def train(build, change=lambda net: None):
    """A model after 2 steps with everything on; its losses."""
    torch.manual_seed(0)
    net = build().train()
    change(net)
    optimizer = ms.AdamW(net.parameters(), lr=1e-3, in_backward=True)
    losses = []
    for step in range(2):
        torch.manual_seed(step)
        loss = net(X).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return net, losses


def assert_same(one, other):
    """Bitwise; also what batch norms have counted."""
    assert one[1] == other[1]
    found, expected = one[0].state_dict(), other[0].state_dict()
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert torch.equal(value, expected[name]), name


def recomputed(net, kind):
    """Whether modules of this kind have been seen in a recompute, filled while it runs."""
    seen = set()
    for module in net.modules():
        if isinstance(module, kind):
            module.register_forward_pre_hook(lambda *_: seen.add(ms.is_recomputing()))
    return seen


def vit():
    return timm.create_model(
        "test_vit", num_classes=10, img_size=32, drop_path_rate=0.2, proj_drop_rate=0.1
    )


def resnet():
    return timm.create_model("test_resnet", num_classes=10, drop_rate=0.1)


@pytest.mark.parametrize(("build", "inner"), [(vit, nn.Linear), (resnet, nn.Conv2d)])
def test_timms_own_checkpointing(build, inner):
    seen = {}

    def checkpointed(net):
        ms.convert_batch_norm(net)
        net.set_grad_checkpointing()
        seen["inner"] = recomputed(net, inner)

    plain = train(build, ms.convert_batch_norm)
    with ms.patch_torch_checkpoint():
        assert_same(train(build, checkpointed), plain)
    assert seen["inner"] == {False, True}


def test_blocks_of_timms_resnet():
    from timm.models.resnet import BasicBlock, Bottleneck

    def checkpointed(net):
        ms.convert_batch_norm(net)
        assert len(ms.checkpoint_modules(net, (BasicBlock, Bottleneck)).modules) == 4

    assert_same(train(resnet, checkpointed), train(resnet, ms.convert_batch_norm))


def densenet(**options):
    return models.DenseNet(8, (2, 2), 8, num_classes=10, **options)


def test_torchvisions_densenet():
    """Its own checkpointing, of the bottlenecks."""
    plain = train(densenet, ms.convert_batch_norm)
    with ms.patch_torch_checkpoint():
        assert_same(train(lambda: densenet(memory_efficient=True), ms.convert_batch_norm), plain)
    torchs = train(densenet)
    assert plain[1] == pytest.approx(torchs[1], rel=1e-4)
    for (name, left), right in zip(plain[0].named_buffers(), torchs[0].buffers(), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-3, atol=1e-4, msg=name)


def test_a_batch_norm_that_is_timms_own_is_refused():
    net = timm.create_model("test_efficientnet", num_classes=10)
    with pytest.raises(
        TypeError, match=r"these modules are of other classes.*timm.layers.*BatchNormAct2d"
    ):
        ms.convert_batch_norm(net)
