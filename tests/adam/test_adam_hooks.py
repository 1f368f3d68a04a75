"""The hooks of a step in backward: they come and go, with parameters and with optimizers."""

import collections
import copy
import gc
import weakref

import pytest
import torch
from stepped_in_backward import loss, make, values
from torch import nn

import memsave_ext as ms


def test_remove_hooks_gives_the_parameters_back():
    params, optimizer = make()
    kept = params[1].register_post_accumulate_grad_hook(lambda p: None)
    optimizer.remove_hooks()
    assert not optimizer.in_backward
    assert params[0]._post_accumulate_grad_hooks is None
    assert len(params[1]._post_accumulate_grad_hooks) == 1
    kept.remove()
    before = values(params)
    loss(params).backward()
    assert all(torch.equal(p, b) for p, b in zip(params, before, strict=True))
    optimizer.step()
    assert not torch.equal(params[0], before[0])
    assert params[0].grad is not None


def test_hooks_that_cannot_be_renewed():
    params, optimizer = make()
    optimizer.remove_hooks()
    optimizer.clip_global_norm = 1.0
    with pytest.raises(ValueError, match="renew_hooks: clip_global_norm needs all gradients"):
        optimizer.renew_hooks()
    assert not optimizer.in_backward and params[0]._post_accumulate_grad_hooks is None
    optimizer.clip_global_norm = None
    optimizer.renew_hooks()
    assert optimizer.in_backward
    optimizer = ms.Adam([nn.Parameter(torch.ones(2))], differentiable=True)
    with pytest.raises(ValueError, match="renew_hooks: differentiable=True"):
        optimizer.renew_hooks()


def test_whole_numbers_among_the_parameters(tmp_path):
    """As the codes of quantized weights, which are frozen."""
    net = nn.Linear(200, 200)
    net.codes = nn.Parameter(torch.zeros(8, dtype=torch.uint8), requires_grad=False)
    for options in ({"in_backward": True}, {"grads_on": tmp_path}, {"states_on": tmp_path}):
        optimizer = ms.AdamW(net.parameters(), **options)
        before = net.weight.clone()
        net(torch.ones(1, 200)).sum().backward()
        optimizer.step()
        assert not torch.equal(net.weight, before)
        optimizer.zero_grad()
        ms.remove_hooks(net)


def test_two_optimizers_on_one_parameter():
    params, optimizer = make()
    with pytest.raises(ValueError, match=r"shape \[10\] is stepped in backward by another"):
        ms.AdamW([nn.Parameter(torch.ones(2)), params[1]], in_backward=True)
    other = ms.AdamW([nn.Parameter(torch.ones(2))], in_backward=True)
    with pytest.raises(ValueError, match="stepped in backward by another"):
        other.add_param_group({"params": params[:1]})
    assert len(other.param_groups) == 1
    optimizer.remove_hooks()
    ms.AdamW(params, in_backward=True)


def test_a_displaced_hook_is_attached_again():
    params, optimizer = make()
    params[1]._post_accumulate_grad_hooks = collections.OrderedDict()  # fills the slot
    before = values(params)
    loss(params).backward()
    assert params[1].grad is not None
    with pytest.warns(RuntimeWarning, match="memsave_ext: 1 parameters had lost their hook"):
        optimizer.step()
    assert not torch.equal(params[1], before[1])
    loss(params).backward()
    assert params[1].grad is None


def test_to_keeps_the_hooks_and_swapping_finds_them_again():
    net = nn.Linear(3, 2)
    optimizer = ms.Adam(net.parameters(), in_backward=True)
    net.to(torch.float64)  # .data is replaced
    net(torch.ones(1, 3, dtype=torch.float64)).sum().backward()
    assert net.weight.grad is None
    optimizer.step()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        net.float()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    optimizer.state.clear()
    net(torch.ones(1, 3)).sum().backward()
    assert net.weight.grad is not None
    if ms._native.available:
        with pytest.warns(RuntimeWarning, match="memsave_ext: 2 parameters had lost their hook"):
            optimizer.step()
    else:  # Python cannot see it
        optimizer.step()
    net(torch.ones(1, 3)).sum().backward()
    assert net.weight.grad is None


def test_parameters_replaced_by_assignment_are_an_error():
    net = nn.Linear(3, 2)
    optimizer = ms.Adam(net.parameters(), in_backward=True)
    net.load_state_dict({k: v.clone() for k, v in net.state_dict().items()}, assign=True)
    net(torch.ones(1, 3)).sum().backward()
    with pytest.raises(RuntimeError, match="no parameter has received a gradient"):
        optimizer.step()


def test_steps_without_gradients_are_nothing():
    params, optimizer = make()
    before = values(params)
    optimizer.step()
    optimizer.step()
    assert all(map(torch.equal, params, before)) and not any(map(optimizer.state.get, params))
    loss(params).backward()
    once = values(params)
    assert not any(map(torch.equal, params, before))
    optimizer.step()
    optimizer.step()
    assert all(map(torch.equal, params, once))
    assert [int(optimizer.state[p]["step"]) for p in params] == [1] * len(params)


def test_deepcopy_of_a_parameter_alone_has_no_hook():
    params, _ = make(1)
    other = copy.deepcopy(params[0])
    other.sum().backward()
    assert other.grad is not None


# lifetimes


def test_model_and_optimizer_are_collectable():
    params, optimizer = make()
    loss(params).backward()
    optimizer.step()
    state = weakref.ref(optimizer.state[params[0]]["exp_avg"])
    references = [weakref.ref(p) for p in params] + [weakref.ref(optimizer)]
    del optimizer
    gc.collect()
    assert references[-1]() is None and state() is None
    loss(params).backward()  # the optimizer is gone: an ordinary backward
    assert all(p.grad is not None for p in params)
    del params
    gc.collect()
    assert not any(r() is not None for r in references)


def test_the_model_dies_first():
    params, optimizer = make()
    loss(params).backward()
    optimizer.step()
    reference = weakref.ref(params[0])
    optimizer.param_groups.clear()
    optimizer.state.clear()
    del params
    gc.collect()
    assert reference() is None


@pytest.mark.once
def test_no_growth():
    params, optimizer = make(2, size=4)

    def steps(count):
        for _ in range(count):
            optimizer.zero_grad()
            loss(params).backward()
            optimizer.step()

    steps(20)
    with ms.memory.track() as tracked:
        steps(10_000 if ms._native.available else 500)
    assert tracked.live <= 0
    gc.collect()
    objects = len(gc.get_objects())
    steps(200)
    gc.collect()
    # Less than one for ten steps: threads of who runs the tests make a few meanwhile.
    assert len(gc.get_objects()) < objects + 20
