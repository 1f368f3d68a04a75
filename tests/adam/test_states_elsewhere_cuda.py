"""``states_on=`` for parameters on CUDA; skipped where there is no GPU or no CUDA build."""

import copy

import pytest
import torch
from modes import ALL_MODES
from torch import nn

import memsave_ext as ms
from memsave_ext import _native
from memsave_ext.store.mapped import is_mapped

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or _native.module is None or not _native.module.with_cuda,
    reason="needs a GPU and a CUDA build",
)


@pytest.fixture(params=["on the host", "in a file"])
def place(request, tmp_path):
    return "cpu" if request.param == "on the host" else tmp_path


def both(place, dtype=torch.float32, **options):
    """The same parameters twice: with states on the device, and elsewhere."""
    made = []
    for states_on in (None, place):
        torch.manual_seed(1)
        shapes = [(260, 256), (65536,), (7,)]
        params = [nn.Parameter(torch.randn(shape).to(dtype).cuda()) for shape in shapes]
        options = {"kind": ms.AdamW, "lr": 1e-2, "in_backward": True, **options}
        kind = options.pop("kind")
        made.append((params, kind(params, states_on=states_on, **options)))
        options["kind"] = kind
    return made


def train(params, optimizer, steps, start=0):
    for number in range(start, start + steps):
        generator = torch.Generator().manual_seed(number)
        grads = [torch.randn(p.shape, generator=generator).to(p.dtype).cuda() for p in params]
        sum((p * g).sum().double() for p, g in zip(params, grads, strict=True)).backward()
        optimizer.step()
        optimizer.zero_grad()


def elsewhere(optimizer):
    states = [t for s in optimizer.state.values() for n, t in s.items() if n != "step"]
    return sum(t.is_cpu and (t.is_pinned() or is_mapped(t)) for t in states)


def assert_same(one, other):
    params, optimizer = one
    others, another = other
    optimizer.state_dict(), another.state_dict()  # which wait
    for param, same in zip(params, others, strict=True):
        assert torch.equal(param.cpu(), same.cpu())
        for name, value in optimizer.state[param].items():
            assert torch.equal(value.cpu(), another.state[same][name].cpu()), name


@pytest.mark.parametrize("mode", ["fp32", "split", "fp32, states 8bit", "momentum", "Lion"])
def test_bits(mode, place):
    dtype, options = ALL_MODES[mode]
    made = both(place, dtype, **options)
    for one in made:
        train(*one, steps=3)
    assert_same(*made)
    assert elsewhere(made[0][1]) == 0
    assert elsewhere(made[1][1]) == {"momentum": 2, "Lion": 2}.get(mode, 4) + (mode == "split") * 2


def test_saved_loaded_and_copied(place):
    device, host = both(place)
    for one in (device, host):
        train(*one, 2)
    saved = copy.deepcopy(host[1].state_dict())
    device[1].load_state_dict(saved)
    assert elsewhere(device[1]) == 0
    host[1].load_state_dict(copy.deepcopy(device[1].state_dict()))
    assert elsewhere(host[1]) == 4
    copied = copy.deepcopy(host[1])
    assert elsewhere(copied) == 4
    train(copied.param_groups[0]["params"], copied, 1, start=2)
    for one in (device, host):
        train(*one, 1, start=2)
    assert_same(device, host)
    assert_same((copied.param_groups[0]["params"], copied), host)
