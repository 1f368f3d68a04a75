"""What training loops and other libraries do with gradients, which lie elsewhere or not."""

import sys

import pytest
import torch
from torch import nn
from torch.nn import utils

import memsave_ext as ms

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="a folder is for Linux")
X = torch.randn(8, 256, generator=torch.Generator().manual_seed(3))


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(256, 300), nn.Tanh(), nn.Linear(300, 256))


def backward(net, **options):
    net(X).square().mean().backward(**options)


def grads(net):
    return [p.grad for p in net.parameters()]


def to_float64(net, optimizer):
    backward(net)
    net.double()


def to_bfloat16_and_back(net, optimizer):
    backward(net)
    net.bfloat16().float()
    optimizer.step()


def to_another_format(net, optimizer):
    backward(net)
    net.to(memory_format=torch.contiguous_format)
    optimizer.step()


def shared_memory(net, optimizer):
    backward(net)
    net.share_memory()


def second_order(net, optimizer):
    backward(net, create_graph=True)
    penalty = sum(p.grad.square().sum() for p in net.parameters())
    optimizer.zero_grad()
    penalty.backward()
    optimizer.step()


def vector(net, optimizer):
    backward(net)
    return utils.parameters_to_vector(grads(net))


def foreach_norms(net, optimizer):
    backward(net)
    return torch.stack(torch._foreach_norm(grads(net)))


def clipped_in_two_calls(net, optimizer):
    backward(net)
    norm = utils.get_total_norm(grads(net))
    utils.clip_grads_with_norm_(net.parameters(), 0.01, norm, foreach=True)
    optimizer.step()
    return norm


def logged(net, optimizer):
    backward(net)
    return torch.from_numpy(net[0].weight.grad.cpu().numpy()).histc()


def assigned(net, optimizer):
    backward(net)
    for p in net.parameters():
        p.grad = torch.where(p.grad.abs() > 1e-5, p.grad * 2, 0)
    optimizer.step()


def data_assigned(net, optimizer):
    backward(net)
    net[0].weight.grad.data = torch.ones(300, 256)
    optimizer.step()


def changed_in_place(net, optimizer):
    backward(net)
    for p in net.parameters():
        p.grad /= 3
        p.grad += 1
        p.grad *= torch.tensor(2.0)
        p.grad *= p.detach()
        p.grad[p.grad < 0] = 0
        torch.nan_to_num(p.grad, nan=0.0, out=p.grad)
        p.grad.add_(torch.ones_like(p.grad))
    optimizer.step()


def clipped_in_a_hook(net, optimizer):
    for p in net.parameters():
        p.register_post_accumulate_grad_hook(lambda p: utils.clip_grad_value_(p, 1e-4))
    backward(net)
    optimizer.step()


def changed_in_a_hook(net, optimizer):
    for p in net.parameters():
        p.register_hook(lambda grad: grad * 3)
    backward(net)
    backward(net)
    optimizer.step()


def by_closure(net, optimizer):
    def closure():
        optimizer.zero_grad()
        backward(net)
        utils.clip_grad_norm_(net.parameters(), 0.01)
        return net(X).sum()

    return torch.stack([optimizer.step(closure).detach() for _ in range(2)])


def compiled(net, optimizer):
    backward(torch.compile(net, backend="aot_eager"))
    optimizer.step()


def of_some_inputs(net, optimizer):
    backward(net, inputs=[net[0].weight])
    optimizer.step()


def zeroed(net, optimizer):
    backward(net)
    optimizer.zero_grad(set_to_none=False)
    backward(net)
    optimizer.step()


def taken_away_and_put_back(net, optimizer):
    backward(net)
    grad, net[0].weight.grad = net[0].weight.grad, None
    optimizer.step()
    net[0].weight.grad = grad
    optimizer.step()


def flattened(net, optimizer):
    backward(net)
    flat = torch._utils._flatten_dense_tensors(grads(net)).mul_(2)
    for p, part in zip(
        net.parameters(), torch._utils._unflatten_dense_tensors(flat, grads(net)), strict=True
    ):
        p.grad.copy_(part)
    optimizer.step()


def by_lbfgs(net, optimizer):
    lbfgs = torch.optim.LBFGS(net.parameters(), max_iter=3)

    def closure():
        lbfgs.zero_grad()
        loss = net(X).square().mean()
        loss.backward()
        return loss

    lbfgs.step(closure)


def by_reentrant_checkpoints(net, optimizer):
    x = X.clone().requires_grad_()
    for _ in range(2):
        torch.utils.checkpoint.checkpoint(net, x, use_reentrant=True).square().mean().backward()
    optimizer.step()


def in_inference_mode(net, optimizer):
    backward(net)
    with torch.inference_mode():
        norms = torch.stack([grad.norm() for grad in grads(net)])
    optimizer.step()
    return norms.clone()


def looked_at(net, optimizer):
    backward(net)
    grad = net[0].weight.grad
    seen = [grad.is_sparse, grad.storage_offset(), grad.nbytes, grad.is_contiguous(), grad.is_leaf]
    return torch.tensor([*map(float, seen), *(g.isfinite().all() for g in grads(net))])


USES = [
    to_float64, to_bfloat16_and_back, to_another_format, shared_memory, second_order, vector,
    foreach_norms, clipped_in_two_calls, logged, assigned, data_assigned, changed_in_place,
    clipped_in_a_hook, changed_in_a_hook, by_closure, compiled, of_some_inputs, zeroed,
    taken_away_and_put_back, flattened, by_lbfgs, by_reentrant_checkpoints, in_inference_mode,
    looked_at,
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
def test_all_is_as_with_gradients_in_memory(use, tmp_path, monkeypatch):
    left = []
    results = []
    for on in ({}, {"grads_on": tmp_path}):
        net = network()
        optimizer = ms.AdamW(net.parameters(), **on)
        if on:
            inner = optimizer._gradients.leave
            monkeypatch.setattr(
                optimizer._gradients, "leave", lambda grad, i=inner: (left.append(1), i(grad))[1]
            )
        found = use(net, optimizer)
        results.append([*([] if found is None else [found]), *net.parameters(), *grads(net)])
    assert len(left) > 0
    for one, other in zip(*results, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert one.dtype == other.dtype and one.shape == other.shape
            assert torch.equal(one.clone(), other.clone())
