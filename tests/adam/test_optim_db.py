"""What torch's own database of optimizers says of errors, for ours; and options of others."""

import inspect

import pytest
import torch
from torch import nn
from torch.testing._internal.common_optimizers import OptimizerErrorEnum, optim_db

import memsave_ext as ms

OURS = {"Adam": ms.Adam, "AdamW": ms.AdamW, "SGD": ms.SGD}
INFOS = {info.name: info for info in optim_db}
ERRORS = [
    (name, number, error.optimizer_error_input.desc)
    for name in OURS
    for number, error in enumerate(INFOS[name].optim_error_inputs_func("cpu", torch.float32))
]
OPTIONS = sorted(
    {
        option
        for info in optim_db
        for option in list(inspect.signature(info.optim_cls).parameters)[1:]
    }
)


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize(("name", "number", "_"), ERRORS)
def test_the_same_errors(name, number, _, in_backward):
    error = INFOS[name].optim_error_inputs_func("cpu", torch.float32)[number]
    given = error.optimizer_error_input
    assert error.error_on is OptimizerErrorEnum.CONSTRUCTION_ERROR
    params = [nn.Parameter(torch.ones(2, 2))] if given.params is None else given.params
    kind, regex = error.error_type, error.error_regex
    if kind is UserWarning:  # torch warns; a step would be made twice
        kind, regex = ValueError, "is twice in a param group"
    elif issubclass(kind, Warning):  # torch warns, and so do ours, which are then made
        with pytest.warns(kind, match=regex):
            OURS[name](params, in_backward=in_backward, **given.kwargs)
        return
    with pytest.raises(kind, match=regex):
        OURS[name](params, in_backward=in_backward, **given.kwargs)
    for param in params if isinstance(params, list) else [params]:
        tensors = param["params"] if isinstance(param, dict) else [param]
        for tensor in [tensors] if isinstance(tensors, torch.Tensor) else tensors:
            tensor = tensor[1] if isinstance(tensor, tuple) else tensor
            assert tensor._post_accumulate_grad_hooks is None


def test_the_errors_are_many():
    assert len(ERRORS) > 25


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("name", [*OURS, "Lion"])
def test_options_of_others_are_refused_by_name(name, option):
    kind = getattr(ms, name)
    accepted = ("lr", "betas", "weight_decay", "maximize")
    if name in OURS:
        accepted = list(inspect.signature(INFOS[name].optim_cls).parameters)
    params = [nn.Parameter(torch.ones(2, 2))]
    default = 0.5
    if option in accepted:
        kind(params)
        assert option in kind(params).param_groups[0]
        return
    with pytest.raises(TypeError, match=rf"argument '?{option}\b"):
        kind(params, in_backward=True, **{option: default})
    assert params[0]._post_accumulate_grad_hooks is None


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("Lion", {"amsgrad": False, "eps": 1e-8}),
        ("Lion", {"dampening": 0, "momentum": 0.9}),
        ("SGD", {"amsgrad": False, "eps": 1e-8, "betas": (0.9, 0.99)}),
        ("Adam", {"dampening": 0, "momentum": 0.9}),
    ],
)
def test_a_group_with_the_options_of_another_rule(name, options):
    """They would be stepped by that rule."""
    kind, params = getattr(ms, name), [nn.Parameter(torch.ones(2)) for _ in range(2)]
    with pytest.raises(TypeError, match=f"param group of {name} cannot have the option '[ad]"):
        kind([{"params": params, **options}])
    optimizer = kind(params[:1], in_backward=True)
    with pytest.raises(TypeError, match=f"param group of {name} cannot have the option '[ad]"):
        optimizer.add_param_group({"params": params[1:], **options})
    assert len(optimizer.param_groups) == 1
    assert params[1]._post_accumulate_grad_hooks is None
    optimizer.add_param_group({"params": params[1:], "note": 3})  # as in torch


SAVED = {
    "Adam": torch.optim.Adam, "SGD": torch.optim.SGD, "RMSprop": torch.optim.RMSprop,
    "our Adam": ms.Adam, "our SGD": ms.SGD, "our Lion": ms.Lion,
}  # fmt: skip


@pytest.mark.parametrize("saved", SAVED)
@pytest.mark.parametrize("name", [*OURS, "Lion"])
def test_states_of_another_rule_are_refused(saved, name):
    """Which would step from then on."""
    (p, q) = (nn.Parameter(torch.ones(2)) for _ in range(2))
    options = {"momentum": 0.9} if "SGD" in saved else {}
    other = SAVED[saved]([p], lr=0.1, **options)
    p.grad = torch.ones(2)
    other.step()
    optimizer = getattr(ms, name)([q], lr=0.1, in_backward=True)
    before = dict(optimizer.param_groups[0])
    if name[:4] == saved.removeprefix("our ")[:4]:
        optimizer.load_state_dict(other.state_dict())
        assert optimizer.state[q]
        return
    with pytest.raises(ValueError, match="state_dict is of another kind of optimizer"):
        optimizer.load_state_dict(other.state_dict())
    assert optimizer.param_groups[0] == before and not optimizer.state
