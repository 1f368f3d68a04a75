"""Options that are none: a sentence that names the option, what came and what is allowed."""

import math
import re

import numpy as np
import pytest
import torch
from modes import BF16_CHOICES, STATE_DTYPE_CHOICES
from torch import nn

import memsave_ext as ms

NUMBER = "must be a number or a tensor of one element, got "
BF16 = f"{BF16_CHOICES}, got "
STATE = f"{STATE_DTYPE_CHOICES}, got "
SEED = "seed must be an int from 0 to 2**64 - 1, got "
NORM = "max_grad_norm must be a number above 0, got "

OPTIONS = {
    "lr": ({"lr": None}, TypeError, f"lr {NUMBER}None"),
    "lr text": ({"lr": "1e-3"}, TypeError, f"lr {NUMBER}'1e-3'"),
    "lr complex": ({"lr": 1j}, TypeError, f"lr {NUMBER}1j"),
    "lr of several": ({"lr": torch.ones(2)}, ValueError, "Tensor lr must be 1-element, got t"),
    "lr complex tensor": ({"lr": torch.tensor(1j)}, TypeError, f"lr {NUMBER}tensor"),
    "betas": ({"betas": None}, TypeError, "betas must be two numbers, got None"),
    "one beta": ({"betas": 0.9}, TypeError, "betas must be two numbers, got 0.9"),
    "three betas": ({"betas": (0.9, 0.9, 0.9)}, TypeError, "betas must be two numbers, got"),
    "betas of text": ({"betas": "ab"}, TypeError, "betas must be two numbers, got 'ab'"),
    "a beta": ({"betas": (0.9, "x")}, TypeError, f"betas {NUMBER}'x'"),
    "eps": ({"eps": "x"}, TypeError, f"eps {NUMBER}'x'"),
    "eps none": ({"eps": None}, TypeError, f"eps {NUMBER}None"),
    "weight_decay": ({"weight_decay": [0.1]}, TypeError, f"weight_decay {NUMBER}[0.1]"),
    "amsgrad": ({"amsgrad": "no"}, TypeError, "amsgrad must be True or False, got 'no'"),
    "maximize": ({"maximize": "no"}, TypeError, "maximize must be True or False, got 'no'"),
    "capturable": ({"capturable": "no"}, TypeError, "capturable must be True or False, got 'no'"),
    "fused": ({"fused": "no"}, TypeError, "fused must be True, False or None, got 'no'"),
    "bf16": ({"bf16": "garbage"}, ValueError, f"{BF16}'garbage'"),
    "bf16 number": ({"bf16": 3}, ValueError, f"{BF16}3"),
    "state_dtype": ({"state_dtype": torch.float16}, ValueError, f"{STATE}torch.float16"),
    "state_dtype text": ({"state_dtype": "2bit"}, ValueError, f"{STATE}'2bit'"),
    "state_dtype number": ({"state_dtype": 8}, ValueError, f"{STATE}8"),
    "seed": ({"seed": -1}, ValueError, f"{SEED}-1"),
    "seed text": ({"seed": "x"}, ValueError, f"{SEED}'x'"),
    "seed large": ({"seed": 2**64}, ValueError, f"{SEED}{2**64}"),
    "max_grad_norm": ({"max_grad_norm": 0}, ValueError, f"{NORM}0"),
    "max_grad_norm text": ({"max_grad_norm": "x"}, ValueError, f"{NORM}'x'"),
    "max_grad_norm nan": ({"max_grad_norm": math.nan}, ValueError, f"{NORM}nan"),
}  # fmt: skip
CONSTRUCTOR = {
    "small_bytes": ({"small_bytes": 2**70}, ValueError, f"to 2**63 - 1, got {2**70}"),
    "bucket_bytes": ({"bucket_bytes": 2**63}, ValueError, "bucket_bytes must be an int from 0 to"),
    "small_bytes text": ({"small_bytes": "x"}, ValueError, "small_bytes must be an int from 0 to"),
    "in_backward": ({"in_backward": "no"}, TypeError, "in_backward must be True or False, got"),
    "grad_scaler": ({"grad_scaler": 3}, TypeError, "grad_scaler must be a torch.amp.Grad"),
    "clip_global_norm": (
        {"clip_global_norm": "x"}, ValueError, "clip_global_norm must be a number above 0, got 'x'",
    ),
    "two norms": (
        {"clip_global_norm": 1.0, "max_grad_norm": 1.0}, ValueError,
        "use either max_grad_norm, which clips each parameter's gradient, or clip_global_norm",
    ),
}  # fmt: skip
every_option = pytest.mark.parametrize("case", OPTIONS)
in_backward = pytest.mark.parametrize("in_backward", [False, True], ids=["after", "in backward"])


def refused(error, message):
    return pytest.raises(error, match=re.escape(message))


def param():
    return nn.Parameter(torch.ones(5000, dtype=torch.bfloat16))


@pytest.mark.parametrize("case", {**OPTIONS, **CONSTRUCTOR})
@pytest.mark.parametrize("kind", [ms.Adam, ms.AdamW])
def test_at_construction(case, kind):
    options, error, message = {**OPTIONS, **CONSTRUCTOR}[case]
    p = param()
    with refused(error, message):
        kind([p], **{"in_backward": True, **options})
    assert p._post_accumulate_grad_hooks is None


@every_option
def test_in_a_group(case):
    options, error, message = OPTIONS[case]
    with refused(error, message):
        ms.Adam([{"params": [param()], **options}])
    p, other = param(), param()
    optimizer = ms.Adam([p], in_backward=True)
    with refused(error, message):
        optimizer.add_param_group({"params": [other], **options})
    assert len(optimizer.param_groups) == 1 and other._post_accumulate_grad_hooks is None


@every_option
@in_backward
def test_set_later(case, in_backward):
    """What is wrong is said by the backward or step that would use it; nothing is changed."""
    options, error, message = OPTIONS[case]
    p = param()
    optimizer = ms.Adam([p], in_backward=in_backward)
    p.sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    before = p.detach().clone(), optimizer.state[p]["step"].item()
    optimizer.param_groups[0].update(options)

    def use():
        p.sum().backward()
        optimizer.step()

    with refused(error, message):
        use()
    assert torch.equal(p, before[0]) and optimizer.state[p]["step"] == before[1]


@pytest.mark.parametrize("name", ["lr", "betas", "eps", "weight_decay"])
@in_backward
def test_removed_later(name, in_backward):
    p = param()
    optimizer = ms.Adam([p], in_backward=in_backward)
    del optimizer.param_groups[0][name]

    def use():
        p.sum().backward()
        optimizer.step()

    with pytest.raises(TypeError, match=f"{name} must be .*, got None"):
        use()
    assert torch.equal(p, param())


def test_numbers_of_other_libraries():
    def stepped(kind, **options):
        p = nn.Parameter(torch.ones(5))
        optimizer = kind([p], **options)
        for _ in range(3):
            optimizer.zero_grad()
            p.square().sum().backward()
            optimizer.step()
        return p

    for lr in (np.float32(0.1), np.float64(0.1), np.array(0.1), torch.tensor(0.1), 1, True):
        ours = stepped(ms.Adam, lr=lr, amsgrad=np.bool_(True), betas=[np.float64(0.9), 0.99])
        theirs = stepped(torch.optim.Adam, lr=float(lr), amsgrad=True, betas=(0.9, 0.99))
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_float32_states_by_name():
    for set_later in (False, True):
        p = param()
        optimizer = ms.Adam([p], **({} if set_later else {"state_dtype": torch.float32}))
        optimizer.param_groups[0]["state_dtype"] = torch.float32
        p.sum().backward()
        optimizer.step()
        assert optimizer.state[p]["exp_avg"].dtype == torch.float32


@pytest.mark.filterwarnings("ignore:memsave_ext. norm_pass")
@pytest.mark.parametrize("way", ["clip_global_norm", "norm_pass", "set between"])
def test_two_norms_set_later(way):
    p = nn.Parameter(torch.ones(3))
    clips = way == "clip_global_norm"
    optimizer = ms.Adam([p], in_backward=not clips, clip_global_norm=0.5 if clips else None)
    match = "use either max_grad_norm, which clips each parameter's gradient, or clip_global_norm"
    if way != "set between":
        optimizer.param_groups[0]["max_grad_norm"] = 1.0
    if clips:
        p.sum().backward()
        with pytest.raises(ValueError, match=match):
            optimizer.step()
        with pytest.raises(ValueError, match=match):
            optimizer.add_param_group({"params": [param()], "max_grad_norm": 1.0})
    elif way == "norm_pass":
        with pytest.raises(ValueError, match=match), optimizer.norm_pass(1.0):
            pass
    else:
        with optimizer.norm_pass(1.0):
            p.sum().backward()
        optimizer.param_groups[0]["max_grad_norm"] = 1.0
        with pytest.raises(ValueError, match=match):
            p.sum().backward()
    assert torch.equal(p, torch.ones(3)) and (not optimizer.state or clips)


def test_clip_global_norm_set_later():
    p = nn.Parameter(torch.ones(3))
    optimizer = ms.Adam([p], in_backward=True)
    with pytest.raises(ValueError, match="needs all gradients, which in_backward=True frees"):
        optimizer.clip_global_norm = 1.0
    optimizer.remove_hooks()
    for bad in (-1, "x"):
        with pytest.raises(ValueError, match="clip_global_norm must be a number above 0"):
            optimizer.clip_global_norm = bad
    optimizer.param_groups[0]["max_grad_norm"] = 1.0
    with pytest.raises(ValueError, match="use either max_grad_norm"):
        optimizer.clip_global_norm = 1.0
    optimizer.param_groups[0]["max_grad_norm"] = None
    optimizer.clip_global_norm = 1.0
    p.sum().backward()
    optimizer.step()
    assert optimizer.grad_norm == torch.tensor(3.0).sqrt()


@pytest.mark.parametrize("kind", [ms.Adam, ms.AdamW])
def test_clip_global_norm_with_in_backward_is_said_once(kind):
    with pytest.warns(UserWarning, match="clip_global_norm needs all gradients") as warnings:
        optimizer = kind([param()], in_backward=True, clip_global_norm=1.0)
    (warning,) = warnings
    assert warning.filename == __file__
    assert not optimizer.in_backward


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("in_backward", True), ("small_bytes", 0), ("bucket_bytes", 0), ("grads_on", "cpu"),
        ("clip_global_norm", 1.0), ("grad_scaler", None),
    ],
)  # fmt: skip
def test_options_of_the_whole_optimizer_are_none_of_a_group(option, value):
    params = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    message = f"param group of AdamW cannot have the option '{option}', which is one of the whole"
    with pytest.raises(TypeError, match=message):
        ms.AdamW([{"params": params[:1], option: value}])
    optimizer = ms.AdamW(params[:1])
    with pytest.raises(TypeError, match=message):
        optimizer.add_param_group({"params": params[1:], option: value})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("in_backward", [False, True])
def test_the_same_parameter_twice(in_backward):
    p, q = param(), param()
    for params in ([p, q, p], [("a", p), ("b", q), ("c", p)]):
        with pytest.raises(
            ValueError, match=r"a parameter of .* and shape \[5000\] is twice in a param gr"
        ):
            ms.Adam(params, in_backward=in_backward)
    assert p._post_accumulate_grad_hooks is None


STATES = {
    "double": (torch.float64, torch.float32, "parameter must be"),
    "complex": (torch.complex64, torch.float32, "parameter must be"),
    "of a complex one": (torch.float32, torch.complex64, "parameter must be"),
    "half": (torch.float16, torch.bfloat16, "parameter must be"),
}


@pytest.mark.parametrize("case", STATES)
def test_states_of_another_dtype(case):
    dtype, other, message = STATES[case]
    p = nn.Parameter(torch.ones(4, dtype=dtype))
    optimizer = ms.Adam([p])
    p.grad = torch.ones_like(p)
    optimizer.step()
    before = p.detach().clone()
    for name in ("exp_avg", "exp_avg_sq"):
        optimizer.state[p][name] = torch.zeros(4, dtype=other)
    p.grad = torch.ones_like(p)
    with pytest.raises(
        RuntimeError, match=f"the state 'exp_avg' of a .* {message} .*, got "
    ) as info:
        optimizer.step()
    assert "must be of its type or float" not in str(info.value)
    assert torch.equal(p, before)


METHODS = {
    "fold": (lambda o: o.accumulate("no").__enter__(), TypeError, "fold must be True or"),
    "fold when": (lambda o: o.accumulate_when(print, fold=3), TypeError, "fold must be True or"),
    "condition": (lambda o: o.accumulate_when(3), TypeError, "condition must be a function"),
    "keep": (lambda o: o.paused(keep="no").__enter__(), TypeError, "keep must be True or False"),
    "norm": (lambda o: o.norm_pass("x").__enter__(), ValueError, "max_norm must be"),
    "norm none": (lambda o: o.norm_pass(None).__enter__(), ValueError, "max_norm must be"),
    "ddp": (lambda o: o.attach(nn.Linear(1, 1)), TypeError, "ddp must be a torch"),
    "grad_scaler": (lambda o: setattr(o, "grad_scaler", 3), TypeError, "grad_scaler must be"),
    "closure": (lambda o: o.step(3), TypeError, "closure must be a function without arguments"),
    "set_to_none": (lambda o: o.zero_grad("no"), TypeError, "set_to_none must be True or False"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:memsave_ext. norm_pass")
@pytest.mark.parametrize("case", METHODS)
def test_arguments_of_methods(case):
    call, error, message = METHODS[case]
    p = nn.Parameter(torch.ones(3))
    optimizer = ms.Adam([p], in_backward=True)
    with refused(error, message):
        call(optimizer)
    p.sum().backward()  # nothing was entered
    assert p.grad is None and (p < 1).all()
    optimizer.step()


KINDS = {"Adam": ms.Adam, "AdamW": ms.AdamW, "SGD": ms.SGD, "Lion": ms.Lion}
WORDS = {  # torch's
    "lr": "Invalid learning rate: {}. lr must be finite and at least 0",
    "eps": "Invalid epsilon value: {}. eps must be finite and at least 0",
    "weight_decay": "Invalid weight_decay value: {}. weight_decay must be finite and at least 0",
    "momentum": "Invalid momentum value: {}. momentum must be finite and at least 0",
    "dampening": "Invalid dampening value: {}. dampening must be finite",
    "betas": "Invalid beta parameter at index {}: {}. betas must be at least 0 and below 1",
}
OUT_OF_RANGE = [
    (kind, name, value, bad)
    for kind in KINDS
    for name, bads in {
        **dict.fromkeys(["lr", "weight_decay"], (-1.0, math.nan, math.inf, torch.tensor(math.nan))),
        **({"eps": (-1.0, math.nan, math.inf)} if "Adam" in kind else {}),
        **({"momentum": (-0.5, math.nan, math.inf)} if kind == "SGD" else {}),
        **({"dampening": (math.nan, -math.inf)} if kind == "SGD" else {}),
        **({"betas": (-0.1, 1.0, math.nan, math.inf)} if kind != "SGD" else {}),
    }.items()
    for bad in bads
    for value in ([(bad, 0.9), (0.9, bad)] if name == "betas" else [bad])
]


@pytest.mark.parametrize(("kind", "name", "value", "bad"), OUT_OF_RANGE)
def test_out_of_range(kind, name, value, bad):
    said = [f"{bad}"] if name != "betas" else [0 if value[0] is bad else 1, bad]
    message = WORDS[name].format(*said)
    make = KINDS[kind]
    first, second = (nn.Parameter(torch.ones(3)) for _ in range(2))
    with refused(ValueError, message):
        make([first], in_backward=True, **{name: value})
    with refused(ValueError, message):
        make([{"params": [first], name: value}], in_backward=True)
    optimizer = make([first], in_backward=True)
    with refused(ValueError, message):
        optimizer.add_param_group({"params": [second], name: value})
    assert len(optimizer.param_groups) == 1 and second._post_accumulate_grad_hooks is None


@pytest.mark.parametrize("kind", KINDS)
def test_the_ends_of_ranges(kind):
    options = {"lr": 0.0, "weight_decay": torch.tensor(0.0)}
    if kind != "SGD":
        options["betas"] = (0.0, 0.0)
    optimizer = KINDS[kind]([param()], **options)
    assert optimizer.param_groups[0]["lr"] == 0
    # torch knows no bound of it
    ms.SGD([param()], dampening=-0.5, momentum=2.0)
