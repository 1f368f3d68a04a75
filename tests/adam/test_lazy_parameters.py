"""Optimizers that are made before the parameters of lazy modules have a shape."""

import pytest
import torch
from torch import nn

import memsave_ext as ms

OURS = {
    "after backward": (ms.SGD, {}),
    "in backward": (ms.SGD, {"in_backward": True}),
    "clipped": (ms.SGD, {"in_backward": True, "max_grad_norm": 1e9}),
    "any optimizer": (lambda p, lr: ms.in_backward(torch.optim.SGD(p, lr=lr)), {}),
}


def train(make):
    torch.manual_seed(0)
    model = nn.Sequential(nn.LazyLinear(50), nn.Tanh(), nn.Linear(50, 3))
    optimizer = make(model.parameters())
    for _ in range(3):
        model(torch.linspace(-1, 1, 1200).view(3, 400)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


@pytest.mark.parametrize("name", OURS)
def test_steps_are_those_of_torch(name):
    expected = train(lambda params: torch.optim.SGD(params, lr=0.1))
    ours, options = OURS[name]
    trained = train(lambda params: ours(params, lr=0.1, **options))
    for key, value in expected.items():
        torch.testing.assert_close(trained[key], value, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", ["8bit", "4bit"])
def test_states_of_fewer_bits(dtype):
    def trained(**options):
        return train(lambda params: ms.AdamW(params, state_dtype=dtype, **options))

    after, within = trained(), trained(in_backward=True)
    assert all(torch.equal(within[key], value) for key, value in after.items())


@pytest.mark.parametrize("option", ["states_on", "grads_on"])
def test_room_cannot_be_made_for_what_has_no_shape(tmp_path, option):
    lazy = nn.LazyLinear(3)
    with pytest.raises(ValueError, match=f"{option} got a parameter .*no shape yet: call its"):
        ms.AdamW(lazy.parameters(), **{option: tmp_path})
    assert not any(param._backward_hooks for param in lazy.parameters())
    lazy(torch.ones(1, 2))
    ms.AdamW(lazy.parameters(), **{option: tmp_path})


def test_one_that_is_given_twice():
    weight = nn.LazyLinear(3).weight
    with pytest.raises(ValueError, match="has no shape yet is twice in a param group"):
        ms.AdamW([weight, weight])
