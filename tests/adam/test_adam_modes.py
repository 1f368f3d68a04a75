"""Adam's modes: low precision, clipping, loss scaling, folded accumulation."""

import contextlib
import copy
import io
import math
import pickle
import re

import pytest
import torch
from torch import nn

import memsave_ext as ms
from memsave_ext.adam import formats
from memsave_ext.adam.fallback.update import update
from memsave_ext.adam.states import make_state

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
# Blocks of 8-bit states that are whole and not, too few elements for them, and another order of
# memory.
SHAPES = [(5000,), (3, 7), (64, 8, 3, 3), ()]
MODES = {
    "fp32": (FP32, {}),
    "fp32 amsgrad": (FP32, {"amsgrad": True, "weight_decay": 0.1}),
    "fp32, states bf16": (FP32, {"state_dtype": BF16}),
    "fp32, states bf16, amsgrad": (FP32, {"state_dtype": BF16, "amsgrad": True}),
    "fp32, states 8bit": (FP32, {"state_dtype": "8bit", "weight_decay": 0.1}),
    "fp32, clipped": (FP32, {"max_grad_norm": 0.5}),
    "fp64, clipped": (FP64, {"max_grad_norm": 0.5}),
    "fp16, states 8bit": (FP16, {"state_dtype": "8bit"}),
    "fp16, states bf16": (FP16, {"state_dtype": BF16}),
    "bf16": (BF16, {}),
    "stochastic": (BF16, {"bf16": "stochastic", "maximize": True}),
    "kahan": (BF16, {"bf16": "kahan", "weight_decay": 0.1}),
    "split": (BF16, {"bf16": "split", "amsgrad": True}),
    "stochastic, states bf16": (BF16, {"bf16": "stochastic", "state_dtype": BF16}),
    "stochastic, states 8bit": (BF16, {"bf16": "stochastic", "state_dtype": "8bit"}),
    "kahan, states 8bit, clipped": (
        BF16, {"bf16": "kahan", "state_dtype": "8bit", "max_grad_norm": 0.5}
    ),
    "split, states bf16": (BF16, {"bf16": "split", "state_dtype": BF16, "betas": (0.5, 0.9)}),
    "split, states 8bit": (BF16, {"bf16": "split", "state_dtype": "8bit"}),
}  # fmt: skip

# clip_global_norm with in_backward=True.
nothing_in_backward = pytest.mark.filterwarnings("ignore:memsave_ext. clip_global_norm needs")
every_mode = pytest.mark.parametrize("mode", MODES)
both_ways = pytest.mark.parametrize("in_backward", [False, True], ids=["after", "in backward"])


# helpers


def make(dtype=FP32, **options):
    torch.manual_seed(1)
    params = [nn.Parameter(torch.randn(shape).to(dtype)) for shape in SHAPES]
    params[2].data = params[2].data.to(memory_format=torch.channels_last)
    return params, ms.Adam(params, **{"lr": 1e-2, **options})


def make_mode(mode, **options):
    dtype, own = MODES[mode]
    return make(dtype, **own, **options)


def copies(params, dtype=None):
    return [nn.Parameter(p.detach().to(dtype or p.dtype, copy=True)) for p in params]


def gradients(params, number, noise=1.0):
    """The same for the same number, whatever the type: float16 and bfloat16 values."""
    generator = torch.Generator().manual_seed(number)
    return [
        (0.5 + noise * torch.randn(p.shape, generator=generator)).half().bfloat16().to(p.dtype)
        for p in params
    ]


def loss(params, number, **kwargs):
    grads = gradients(params, number, **kwargs)
    return sum((p * g).sum().double() for p, g in zip(params, grads, strict=True))


def train(params, optimizer, steps, start=0):
    for number in range(start, start + steps):
        optimizer.zero_grad()
        loss(params, number).backward()
        optimizer.step()


def tensors(params, optimizer):
    """Values and states, by name."""
    for i, param in enumerate(params):
        yield f"{i} param", param.detach()
        for name, value in optimizer.state[param].items():
            yield f"{i} {name}", value


def assert_same(one, other):
    """Bitwise."""
    found, expected = dict(tensors(*one)), dict(tensors(*other))
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert value.dtype == expected[name].dtype, name
        assert torch.equal(value, expected[name]), name


def save_and_load(state_dict):
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    return torch.load(file)


def distance(params, exact, start):
    """Of where they are, over the way that the exact ones have gone."""
    apart = sum(
        (p.double() - q.double()).square().sum() for p, q in zip(params, exact, strict=True)
    )
    way = sum((q.double() - s.double()).square().sum() for q, s in zip(exact, start, strict=True))
    return (apart / way).sqrt().item()


# every mode


@every_mode
def test_in_backward_as_after_it(mode):
    runs = [make_mode(mode, in_backward=in_backward) for in_backward in (False, True)]
    for params, optimizer in runs:
        train(params, optimizer, 4)
    assert_same(*runs)
    assert all(p.grad is None for p in runs[1][0])


def oracle(params, optimizer, number):
    """One step by the reference's formulas, on copies."""
    group = optimizer.param_groups[0]
    results = []
    for position, (param, grad) in enumerate(zip(params, gradients(params, number), strict=True)):
        param, state = param.detach().clone(), copy.deepcopy(optimizer.state[param])
        factor = None
        if (max_norm := group.get("max_grad_norm")) is not None:
            factor = min(1.0, max_norm / (grad.double().norm().item() + 1e-6))
        update(param, grad, state, group, position=position, factor=factor)
        results.append({"param": param, **state})
    return results


def assert_rounded_alike(found, expected, unit):
    """Where what was rounded differs by an ulp of float32, few are rounded to a neighbour."""
    differs = found != expected
    assert differs.double().mean() <= 2e-3
    torch.testing.assert_close(found, expected, rtol=unit, atol=unit * 1e-6)


@both_ways
@every_mode
def test_a_step_is_the_references(mode, in_backward):
    """Float32 within a few ulps, as not every machine fuses; the same random bits."""
    params, optimizer = make_mode(mode, in_backward=in_backward, seed=2**63 + 5)
    train(params, optimizer, 2)
    for number in range(2, 5):
        expected = oracle(params, optimizer, number)
        train(params, optimizer, 1, start=number)
        for param, state in zip(params, expected, strict=True):
            found = {"param": param.detach(), **optimizer.state[param]}
            assert found.keys() == state.keys()
            if "param_rest" in found:  # what both halves stand for
                kahan = "kahan" in mode
                join = formats.unkahan if kahan else formats.unsplit
                values = [join(d["param"], d.pop("param_rest")) for d in (found, state)]
                unit = 2**-16 if kahan else 5e-7
                torch.testing.assert_close(*values, rtol=unit, atol=1e-8)
            for name, value in found.items():
                unit = torch.finfo(value.dtype).eps if value.is_floating_point() else None
                if value.dtype == torch.uint8:
                    apart = (value.int() - state[name].int()).abs()
                    assert apart.max() <= 1 and (apart > 0).double().mean() <= 2e-3, name
                elif value.dtype in (BF16, FP16):
                    assert_rounded_alike(value.double(), state[name].double(), unit)
                else:
                    torch.testing.assert_close(value, state[name], rtol=8 * unit, atol=8 * unit)


@every_mode
def test_resume_bit_for_bit(mode):
    params, optimizer = make_mode(mode, in_backward=True)
    train(params, optimizer, 3)
    others = copies(params)
    resumed = ms.Adam(others, in_backward=True, **MODES[mode][1])
    resumed.load_state_dict(save_and_load(optimizer.state_dict()))
    assert_same((params, optimizer), (others, resumed))
    for one in ((params, optimizer), (others, resumed)):
        train(*one, 3, start=3)
    assert_same((params, optimizer), (others, resumed))


@both_ways
@pytest.mark.parametrize("mode", ["split, states 8bit", "stochastic, states bf16"])
def test_copies_go_on_alike(mode, in_backward):
    params, optimizer = make_mode(mode, in_backward=in_backward)
    train(params, optimizer, 2)
    others, other = copy.deepcopy((params, optimizer))
    for one in ((params, optimizer), (others, other)):
        train(*one, 2, start=2)
    assert_same((params, optimizer), (others, other))


@every_mode
def test_to_fp32_state_dict(mode):
    """Torch's Adam goes on from it, and so does a plain one of ours."""
    params, optimizer = make_mode(mode, in_backward=True)
    train(params, optimizer, 3)
    exported = save_and_load(optimizer.to_fp32_state_dict())
    values = optimizer.fp32_parameters()
    assert all(v.dtype == FP32 for v in values)
    options = {"lr": 1, "amsgrad": MODES[mode][1].get("amsgrad", False)}
    runs = []
    for kind in (ms.Adam, torch.optim.Adam):
        others = copies(values, FP64 if "fp64" in mode else None)  # which has moments of its own
        runs.append((others, kind(others, **options)))
        fresh = runs[-1][1].state_dict()["param_groups"][0].keys()
        runs[-1][1].load_state_dict(copy.deepcopy(exported))
        assert runs[-1][1].state_dict()["param_groups"][0].keys() == fresh
        for other in others:
            state = runs[-1][1].state[other]
            names = ["step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"]
            assert list(state) == names[: 3 + options["amsgrad"]]
            if "fp64" not in mode:
                assert all(t.dtype == FP32 for t in state.values())
        train(*runs[-1], 1, start=3)
    assert runs[0][1].param_groups[0]["lr"] == 1e-2
    for ours, theirs in zip(runs[0][0], runs[1][0], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@every_mode
@pytest.mark.parametrize("kind", [ms.Adam, torch.optim.Adam])
def test_a_plain_state_loads_into_every_mode(mode, kind):
    dtype, options = MODES[mode]
    plain_options = {k: v for k, v in options.items() if k in ("amsgrad", "weight_decay")}
    params, _ = make(FP64 if dtype == FP64 else FP32)
    plain = kind(params, lr=1e-2, **plain_options)
    train(params, plain, 3)
    others = copies(params, dtype)
    optimizer = ms.Adam(others, lr=1, in_backward=True, **options)
    formats = {}
    fresh, other = make_mode(mode)
    train(fresh, other, 1)
    for i, param in enumerate(fresh):
        formats[i] = {name: (v.dtype, v.shape) for name, v in other.state[param].items()}
    optimizer.load_state_dict(save_and_load(plain.state_dict()))
    for i, (param, mine) in enumerate(zip(params, others, strict=True)):
        state = optimizer.state[mine]
        if dtype != FP16 and (dtype != BF16 or kind is ms.Adam):
            assert {n: (v.dtype, v.shape) for n, v in state.items()} == formats[i]
        assert state["step"] == 3
        exported = optimizer.to_fp32_state_dict()["state"][i]
        for name in ("exp_avg", "exp_avg_sq"):
            exact = plain.state[param][name]
            # 8-bit: half a step of the codes, of the block's largest.
            near = 0.03 if state["exp_avg"].dtype == torch.uint8 else 2**-8
            torch.testing.assert_close(
                exported[name].double(), exact.double(), rtol=near, atol=near * exact.abs().max()
            )
    train(others, optimizer, 2, start=3)
    assert optimizer.state[others[0]]["step"] == 5
    assert all(p.isfinite().all() for p in others)


@pytest.mark.parametrize(
    ("saved", "own"),
    [
        ("split", "kahan"), ("split", "bf16"), ("split, states 8bit", "split, states bf16"),
        ("fp32, states 8bit", "fp32"), ("fp32, states bf16", "fp32, states 8bit"),
    ],
)  # fmt: skip
def test_another_modes_state_is_refused(saved, own):
    params, optimizer = make_mode(saved)
    train(params, optimizer, 1)
    others, other = make_mode(own)
    train(others, other, 1)
    before = copy.deepcopy(other.state_dict())
    values = [
        f"{name}={MODES[mode][1].get(name)!r}" for mode in (saved, own)
        for name in ("bf16", "state_dtype")
    ]  # fmt: skip
    both = "saved with {}, {}, this optimizer has {}, {}".format(*values)
    with pytest.raises(ValueError, match=re.escape(both)) as raised:
        other.load_state_dict(optimizer.state_dict())
    assert "to_fp32_state_dict()" in str(raised.value)
    after = other.state_dict()
    assert after["param_groups"] == before["param_groups"]
    for index, state in before["state"].items():
        for name, value in state.items():
            assert torch.equal(after["state"][index][name], value)
    other.load_state_dict(optimizer.to_fp32_state_dict())
    train(others, other, 1)


# options by group


def test_groups_have_their_own_modes():
    torch.manual_seed(1)
    params = [nn.Parameter(torch.randn(4096).to(t)) for t in (BF16, BF16, FP32, FP32, FP64)]
    groups = [
        {"params": params[:1], "bf16": "split"},
        {"params": params[1:2], "bf16": "stochastic", "state_dtype": "8bit", "seed": 3},
        {"params": params[2:3], "max_grad_norm": 0.1},
        {"params": params[3:4], "state_dtype": BF16},
        {"params": params[4:]},
    ]
    together = ms.Adam([dict(group) for group in groups], in_backward=True)
    others = copies(params)
    alone = []
    for i, group in enumerate(groups):
        own = {"bf16", "state_dtype", "seed", "max_grad_norm"} & together.param_groups[i].keys()
        assert own == group.keys() - {"params"}
        # Random bits depend on where in the optimizer a parameter is.
        before = [nn.Parameter(torch.zeros(1)) for _ in range(i)]
        alone.append(
            ms.Adam([*({"params": [p]} for p in before), {**group, "params": [others[i]]}])
        )
    for number in range(3):
        loss(params, number).backward()
        together.step()
        loss(others, number).backward()
        for optimizer in alone:
            optimizer.step()
            optimizer.zero_grad()
    for p, q, optimizer in zip(params, others, alone, strict=True):
        assert torch.equal(p, q)
        assert together.state[p].keys() == optimizer.state[q].keys()


def test_groups_that_are_added_have_the_optimizers_mode():
    params, optimizer = make(BF16, bf16="split", seed=4)
    more = nn.Parameter(torch.ones(5, dtype=BF16))
    optimizer.add_param_group({"params": [more]})
    assert optimizer.param_groups[1]["bf16"] == "split"
    other = nn.Parameter(torch.ones(5))
    optimizer.add_param_group({"params": [other], "bf16": None})
    train([*params, more, other], optimizer, 1)
    assert "param_rest" in optimizer.state[more] and "param_rest" not in optimizer.state[other]


def test_a_plain_group_has_torchs_keys():
    params, optimizer = make(max_grad_norm=None, bf16=None, state_dtype=None, seed=0)
    plain = torch.optim.Adam(params).state_dict()["param_groups"][0]
    assert optimizer.state_dict()["param_groups"][0].keys() == plain.keys()


# bfloat16 parameters


@pytest.mark.parametrize("mode", [None, "stochastic", "kahan", "split"])
@both_ways
def test_a_weight_of_one_moves_as_in_fp32_on_average(mode, in_backward):
    weight = nn.Parameter(torch.ones(4000, dtype=BF16))
    exact = nn.Parameter(torch.ones(4000))
    optimizer = ms.Adam([weight], lr=1e-4, bf16=mode, in_backward=in_backward)
    expected = torch.optim.Adam([exact], lr=1e-4)
    for number in range(100):
        (grad,) = gradients([weight], number, noise=0.2)
        (weight * grad).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        exact.grad = grad.float()
        expected.step()
    (master,) = optimizer.fp32_parameters()
    moved, way = (1 - t.detach().double().mean().item() for t in (master, exact))
    assert way > 0.009
    if mode is None:
        assert moved == 0  # each step is less than half of what bfloat16 resolves
    elif mode == "stochastic":
        # The sum of 100 steps of 2^-8 that are made with a probability of 1e-4 * 2^8.
        deviation = math.sqrt(100 * 1e-4 * 2**-8)
        assert abs(moved - way) < 4 * deviation / math.sqrt(4000)
    else:
        near = 2e-4 if mode == "kahan" else 2e-6
        torch.testing.assert_close(master, exact.detach(), rtol=0, atol=near)
        assert ((weight - master).abs() <= 2**-9).all()


@pytest.mark.parametrize(
    "options", [{}, {"weight_decay": 0.1}, {"amsgrad": True}, {"state_dtype": "8bit"}], ids=str
)
def test_split_is_an_fp32_master(options):
    params, optimizer = make(BF16, bf16="split", in_backward=True, **options)
    masters = copies(params, FP32)
    plain = ms.Adam(masters, lr=1e-2, in_backward=True, **options)
    for number in range(10):
        train(params, optimizer, 1, start=number)
        train(masters, plain, 1, start=number)
        for param, master, joined in zip(params, masters, optimizer.fp32_parameters(), strict=True):
            assert torch.equal(joined, master)
            assert joined.stride() == master.stride()
            assert ((param - master).abs() <= (master.bfloat16() - master).abs()).all()
            for name in ("exp_avg", "exp_avg_sq"):
                mine, theirs = (o.state[p][name] for o, p in ((optimizer, param), (plain, master)))
                assert torch.equal(mine, theirs)


def test_fp32_parameters_are_copies():
    params, optimizer = make(in_backward=True)
    values = optimizer.fp32_parameters()
    assert all(torch.equal(v, p) for v, p in zip(values, params, strict=True))
    values[0].zero_()
    assert params[0].any()


# random rounding


@pytest.mark.parametrize("mode", ["stochastic", "fp32, states bf16", "fp32, states 8bit"])
def test_seeds(mode):
    def run(**options):
        params, optimizer = make_mode(mode, **options)
        torch.manual_seed(torch.seed())  # has nothing to do with it
        train(params, optimizer, 2)
        return params, optimizer

    assert_same(run(), run(seed=0))
    assert_same(run(seed=7), run(seed=7, in_backward=True))
    for other in (7, 1 << 32):
        assert not all(torch.equal(a, b) for a, b in zip(run()[0], run(seed=other)[0], strict=True))


@pytest.mark.parametrize("mode", ["stochastic", "fp32, states bf16", "fp32, states 8bit"])
def test_every_parameter_has_its_own_random_bits(mode):
    dtype, options = MODES[mode]
    params = [nn.Parameter(torch.ones(4096, dtype=dtype)) for _ in range(2)]
    optimizer = ms.Adam(params, **options)
    for param in params:
        param.grad = torch.linspace(0.1, 1, 4096).to(dtype)
    optimizer.step()
    one, other = ({"param": p, **optimizer.state[p]} for p in params)
    assert not all(torch.equal(one[name], other[name]) for name in one)


@every_mode
def test_elements_are_in_the_order_of_memory(mode):
    """Blocks and random bits do not depend on a tensor's shape; with gaps, on its indices."""
    dtype, options = MODES[mode]
    torch.manual_seed(1)
    flat = torch.randn(8192).to(dtype)
    shaped = {
        "flat": flat.clone(),
        "channels_last": flat.view(8, 16, 16, 4).permute(0, 3, 1, 2).clone(),
        "transposed": flat.view(64, 128).t().clone(),
    }
    if options.get("state_dtype") != "8bit":
        shaped["strided"] = torch.stack([flat, flat], 1).view(32, 256, 2)[:, :, 0]
    back = {
        "flat": lambda t: t,
        "channels_last": lambda t: t.permute(0, 2, 3, 1).reshape(-1),
        "transposed": lambda t: t.t().reshape(-1),
        "strided": lambda t: t.reshape(-1),
    }
    assert shaped["transposed"].stride() == (1, 128)
    runs = []
    for name, start in shaped.items():
        param = nn.Parameter(torch.empty(0, dtype=dtype))
        param.data = start
        optimizer = ms.Adam([param], lr=1e-2, **options)
        for number in range(2):
            (grad,) = gradients([flat], number)
            param.grad = torch.empty_like(param)
            param.grad.copy_(_like(grad, start, name))
            optimizer.step()
        state = {n: v for n, v in optimizer.state[param].items() if v.shape == param.shape}
        runs.append({n: back[name](v) for n, v in {"param": param.detach(), **state}.items()})
    for run in runs[1:]:
        assert run.keys() == runs[0].keys()
        assert all(torch.equal(value, runs[0][name]) for name, value in run.items())


def _like(flat, tensor, name):
    """The flat gradient in the indices of the tensor of that name."""
    if name == "channels_last":
        return flat.view(8, 16, 16, 4).permute(0, 3, 1, 2)
    return flat.view(64, 128).t() if name == "transposed" else flat.view(tensor.shape)


# states


def test_8bit_states_are_of_8_bits():
    params, optimizer = make(state_dtype="8bit")
    train(params, optimizer, 1)
    sizes = [sum(t.nbytes for n, t in optimizer.state[p].items() if n != "step") for p in params]
    blocks = [math.ceil(p.numel() / 256) for p in params]
    expected = [2 * p.numel() + 8 * b for p, b in zip(params, blocks, strict=True)]
    small = [p.numel() < 4096 for p in params]
    assert sizes == [
        8 * p.numel() if s else e for p, s, e in zip(params, small, expected, strict=True)
    ]
    assert small == [False, True, False, True]


@pytest.mark.parametrize("mode", ["fp32, states 8bit", "fp32, states bf16"])
def test_low_precision_states_stay_near_exact_adam(mode):
    params, optimizer = make_mode(mode, in_backward=True)
    start = copies(params)
    exact = copies(params)
    expected = torch.optim.Adam(
        exact, lr=1e-2, weight_decay=optimizer.param_groups[0]["weight_decay"]
    )
    for one in ((params, optimizer), (exact, expected)):
        train(*one, 60)
    assert distance(params, exact, start) < 0.05


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.9, 0.95), (0.95, 0.9), (0.5, 0.5)])
def test_the_bound_of_an_8bit_step_is_what_adam_can_reach(betas):
    """By gradients that rise as (beta2 / beta1)^i. Here exp_avg is more than they can have left."""
    beta1, beta2 = betas
    for steps in (1, 2, 10, 100, 20_000):
        i = torch.arange(steps, dtype=FP64)
        grads = (beta1 / beta2) ** i  # the last one first
        if not grads.isfinite().all():
            continue
        first = (1 - beta1) * (beta1**i * grads).sum()
        second = (1 - beta2) * (beta2**i * grads**2).sum() / (1 - beta2**steps)
        reached = (first / second.sqrt()).item()
        param = nn.Parameter(torch.zeros(4096))
        optimizer = ms.Adam([param], lr=1.0, betas=betas, eps=0, state_dtype="8bit")
        param.grad = torch.full_like(param, 1e-20)
        optimizer.step()
        state = optimizer.state[param]
        state["step"].fill_(steps - 1)
        state["exp_avg_scale"].fill_(1.0)
        start = param.detach().clone()
        optimizer.step()
        step = (start - param.detach()).abs().max().item() * (1 - beta1**steps)
        assert step == pytest.approx(reached, rel=1e-3)


@pytest.mark.parametrize("state_dtype", [BF16, "8bit"])
def test_what_is_not_finite_shows(state_dtype):
    param = nn.Parameter(torch.zeros(2 * 4096))
    optimizer = ms.Adam([param], state_dtype=state_dtype)
    param.grad = torch.ones_like(param)
    param.grad[5] = math.nan
    optimizer.step()
    optimizer.step()
    assert param[5].isnan() and not param[4096:].isnan().any()


# clipping


def exact_run(params, options, clip, steps=4):
    """torch's, in float64, with ``clip`` before each step."""
    exact = copies(params, FP64)
    optimizer = torch.optim.Adam(exact, lr=1e-2, **options)
    norms = []
    for number in range(steps):
        loss(exact, number).backward()
        norms.append(clip(exact))
        optimizer.step()
        optimizer.zero_grad()
    return exact, norms


def assert_close_to(params, exact):
    for param, expected in zip(params, exact, strict=True):
        torch.testing.assert_close(param.double(), expected, rtol=2e-6, atol=1e-6)


def clip_all(max_norm):
    return lambda params: nn.utils.clip_grad_norm_(params, max_norm)


@both_ways
@pytest.mark.parametrize("max_norm", [0.3, 1, 1000.0])
def test_max_grad_norm_clips_each(max_norm, in_backward):
    # So large an eps shows by how much gradients were scaled, which Adam is blind to.
    options = {"eps": 0.01, "weight_decay": 0.1}
    params, optimizer = make(max_grad_norm=max_norm, in_backward=in_backward, **options)
    exact, _ = exact_run(params, options, lambda all: [clip_all(max_norm)([p]) for p in all])
    train(params, optimizer, 4)
    assert_close_to(params, exact)


@nothing_in_backward
@both_ways
@pytest.mark.parametrize("dtype", [FP32, FP64])
@pytest.mark.parametrize("max_norm", [0.3, 1e6])
def test_clip_global_norm(max_norm, dtype, in_backward):
    options = {"eps": 0.01}
    params, optimizer = make(dtype, clip_global_norm=max_norm, in_backward=in_backward, **options)
    exact, norms = exact_run(params, options, clip_all(max_norm))
    before = copies(params)
    for number, norm in enumerate(norms):
        loss(params, number).backward()
        assert all(p.grad is not None for p in params)  # they are kept
        if number == 0:
            assert all(torch.equal(p, b) for p, b in zip(params, before, strict=True))
        optimizer.step()
        assert optimizer.grad_norm.item() == pytest.approx(norm.item(), rel=1e-6)
        optimizer.zero_grad()
    assert_close_to(params, exact)


@pytest.mark.parametrize("small_bytes", [0, 1 << 16])
@pytest.mark.parametrize("forward_again", [False, True])
def test_norm_pass(small_bytes, forward_again):
    options = {"eps": 0.01, "in_backward": True, "small_bytes": small_bytes}
    params, optimizer = make(**options)
    others, other = make(eps=0.01, clip_global_norm=0.3)
    assert optimizer.grad_norm is None
    for number in range(4):
        before = [p.detach().clone() for p in params]
        value = loss(params, number)
        with optimizer.norm_pass(0.3):
            value.backward(retain_graph=not forward_again)
        assert all(p.grad is None for p in params)
        assert all(torch.equal(p, b) for p, b in zip(params, before, strict=True))
        (loss(params, number) if forward_again else value).backward()
        assert all(p.grad is None for p in params)
        optimizer.step()
        train(others, other, 1, start=number)
        torch.testing.assert_close(optimizer.grad_norm, other.grad_norm, rtol=1e-6, atol=0)
    for p, q in zip(params, others, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)


def test_a_step_without_norm_pass_is_not_clipped():
    params, optimizer = make(in_backward=True, eps=0.01)
    others, other = make(eps=0.01)
    with optimizer.norm_pass(1e-3):
        loss(params, 0).backward()
    loss(params, 0).backward()
    optimizer.step()
    other_clipped = ms.Adam(others, lr=1e-2, eps=0.01, clip_global_norm=1e-3)
    train(others, other_clipped, 1)
    other.load_state_dict(other_clipped.state_dict())
    for one in ((params, optimizer), (others, other)):
        train(*one, 1, start=1)
    for p, q in zip(params, others, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)


def test_norm_pass_that_raises_is_as_none():
    params, optimizer = make(in_backward=True)
    others, other = make()

    def fail():
        loss(params, 0).backward()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), optimizer.norm_pass(1e-3):
        fail()
    for one in ((params, optimizer), (others, other)):
        train(*one, 2)
    assert_same((params, optimizer), (others, other))


def test_no_step_inside_of_norm_pass():
    params, optimizer = make(in_backward=True)
    others, other = make()

    def step():
        loss(params, 0).backward()
        optimizer.step()

    inside = pytest.raises(RuntimeError, match=r"step\(\) inside of norm_pass\(\)")
    with inside, optimizer.norm_pass(1e-3):
        step()
    for one in ((params, optimizer), (others, other)):
        train(*one, 2)
    assert_same((params, optimizer), (others, other))


def test_norm_pass_and_another_loss():
    params, optimizer = make(in_backward=True)
    with optimizer.norm_pass(1.0):
        loss(params[:2], 0).backward()
    with pytest.raises(RuntimeError, match="had none in norm_pass()"):
        loss(params, 0).backward()


# loss scaling


def scaled_step(params, optimizer, scaler, number, spoiled=()):
    optimizer.zero_grad()
    value = loss(params, number)
    for i in spoiled:
        value = value + (params[i] * math.inf).sum()
    scaler.scale(value).backward()
    scaler.step(optimizer)
    scaler.update()


def make_scaled(dtype=FP32, scale=1024.0, **options):
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=3)
    return *make(dtype, grad_scaler=scaler, **options), scaler


@both_ways
def test_grad_scaler_as_in_torchs_loop(in_backward):
    params, optimizer, scaler = make_scaled(in_backward=in_backward, eps=1e-3)
    others = copies(params)
    other = torch.optim.Adam(others, lr=1e-2, eps=1e-3)
    torchs = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    for number in range(7):
        scaled_step(params, optimizer, scaler, number)
        scaled_step(others, other, torchs, number)
        assert scaler.get_scale() == torchs.get_scale()
        assert scaler.state_dict() == torchs.state_dict()
    assert scaler.get_scale() == 4096
    for p, q in zip(params, others, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-6)


@both_ways
def test_grad_scaler_with_fp16_parameters(in_backward):
    """Which torch's refuses. A scale that is a power of 2 leaves no trace."""
    params, optimizer, scaler = make_scaled(FP16, in_backward=in_backward)
    others, other = make(FP16)
    for number in range(4):
        scaled_step(params, optimizer, scaler, number)
        train(others, other, 1, start=number)
    assert_same((params, optimizer), (others, other))


@both_ways
@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 0.5}], ids=str)
def test_an_infinity_skips_its_parameter(in_backward, options):
    params, optimizer, scaler = make_scaled(in_backward=in_backward, **options)
    for number in range(2):
        scaled_step(params, optimizer, scaler, number)
    before = {name: t.clone() for name, t in tensors(params, optimizer)}
    scaled_step(params, optimizer, scaler, 2, spoiled=[1])
    assert scaler.get_scale() == 512
    for name, value in tensors(params, optimizer):
        assert torch.equal(value, before[name]) == name.startswith("1 "), name
    scaled_step(params, optimizer, scaler, 3)
    steps = [optimizer.state[p]["step"].item() for p in params]
    assert steps == [4, 3, 4, 4]
    assert scaler.get_scale() == 512
    assert all(p.isfinite().all() for p in params)


@nothing_in_backward
@both_ways
def test_an_infinity_skips_all_with_clip_global_norm(in_backward):
    params, optimizer, scaler = make_scaled(in_backward=in_backward, clip_global_norm=1.0)
    scaled_step(params, optimizer, scaler, 0)
    before = {name: t.clone() for name, t in tensors(params, optimizer)}
    scaled_step(params, optimizer, scaler, 1, spoiled=[2])
    assert scaler.get_scale() == 512
    assert all(torch.equal(t, before[name]) for name, t in tensors(params, optimizer))
    scaled_step(params, optimizer, scaler, 2)
    assert [optimizer.state[p]["step"].item() for p in params] == [2] * 4


def test_an_infinity_in_the_first_step():
    params, optimizer, scaler = make_scaled(in_backward=True)
    scaled_step(params, optimizer, scaler, 0, spoiled=range(4))
    assert scaler.get_scale() == 512
    scaled_step(params, optimizer, scaler, 0)
    assert [optimizer.state[p]["step"].item() for p in params] == [1] * 4


@nothing_in_backward
@both_ways
@pytest.mark.parametrize("clip", ["max_grad_norm", "clip_global_norm"])
def test_grad_scaler_with_clipping(clip, in_backward):
    """Of the gradients that are not scaled."""
    options = {"eps": 0.01}
    params, optimizer, scaler = make_scaled(in_backward=in_backward, **{clip: 0.3}, **options)
    each = clip_all(0.3)
    exact, norms = exact_run(
        params, options, each if clip != "max_grad_norm" else lambda all: [each([p]) for p in all]
    )
    for number in range(4):
        scaled_step(params, optimizer, scaler, number)
    assert_close_to(params, exact)
    if clip == "clip_global_norm":
        assert optimizer.grad_norm.item() == pytest.approx(norms[-1].item(), rel=1e-6)


def test_grad_scaler_with_norm_pass():
    options = {"eps": 0.01}
    params, optimizer, scaler = make_scaled(in_backward=True, **options)
    exact, norms = exact_run(params, options, clip_all(0.3))
    for number, norm in enumerate(norms):
        value = scaler.scale(loss(params, number))
        with optimizer.norm_pass(0.3):
            value.backward(retain_graph=True)
        value.backward()
        scaler.step(optimizer)
        scaler.update()
        assert optimizer.grad_norm.item() == pytest.approx(norm.item(), rel=1e-6)
    assert_close_to(params, exact)
    before = copies(params)
    value = scaler.scale(loss(params, 9) + (params[0] * math.inf).sum())
    scale = scaler.get_scale()
    with optimizer.norm_pass(0.3):
        value.backward(retain_graph=True)
    value.backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == scale / 2
    assert all(torch.equal(p, b) for p, b in zip(params, before, strict=True))


def test_gradients_that_were_unscaled_by_hand():
    params, optimizer, scaler = make_scaled(eps=0.01)
    exact, _ = exact_run(params, {"eps": 0.01}, clip_all(0.3))
    for number in range(4):
        optimizer.zero_grad()
        scaler.scale(loss(params, number)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(params, 0.3)
        scaler.step(optimizer)
        scaler.update()
    assert_close_to(params, exact)


def test_a_disabled_grad_scaler_is_none():
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    params, optimizer = make(in_backward=True, grad_scaler=scaler)
    for number in range(2):
        scaled_step(params, optimizer, scaler, number)
    others, other = make()
    train(others, other, 2)
    for p, q in zip(params, others, strict=True):
        assert torch.equal(p, q)


def test_a_grad_scaler_that_was_not_handed_over():
    params, optimizer = make(in_backward=True)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loss(params, 0)).backward()
    with pytest.raises(RuntimeError, match="grad_scaler=scaler"):
        scaler.step(optimizer)


# folded accumulation


def folded_step(params, optimizer, number, micro_batches=4, all_folded=False):
    for part in range(micro_batches):
        last = part == micro_batches - 1 and not all_folded
        with contextlib.nullcontext() if last else optimizer.accumulate(fold=True):
            loss(params, number * micro_batches + part).backward()
        assert all(p.grad is None for p in params)
    optimizer.step()


def summed_step(params, optimizer, number, micro_batches=4):
    optimizer.zero_grad()
    for part in range(micro_batches):
        loss(params, number * micro_batches + part).backward()
    optimizer.step()


def assert_close_but_at_zeros(params, exact, tolerance):
    """Where gradients cancel, Adam makes a step of full size of what rounding leaves of them."""
    for param, expected in zip(params, exact, strict=True):
        some = expected.grad.abs() > 1e-3
        assert some.double().mean() > 0.99
        torch.testing.assert_close(param[some], expected[some], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    "options",
    [
        {}, {"weight_decay": 0.1}, {"weight_decay": 0.1, "decoupled_weight_decay": True},
        {"amsgrad": True}, {"maximize": True}, {"betas": (0.3, 0.95)}, {"betas": (0.0, 0.99)},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("dtype", [FP32, FP64])
def test_fold_is_near_exact_adam(options, dtype):
    params, optimizer = make(dtype, in_backward=True, **options)
    exact, start = copies(params), copies(params)
    expected = torch.optim.Adam(exact, lr=1e-2, **options)
    for number in range(50):
        folded_step(params, optimizer, number)
        summed_step(exact, expected, number)
        if number == 0:
            assert_close_but_at_zeros(params, exact, 1e-6)
    assert distance(params, exact, start) < (0.02 if dtype == FP32 else 1e-4)
    assert all(optimizer.state[p]["step"] == 50 for p in params)
    for p, q in zip(params, exact, strict=True):
        mine, theirs = optimizer.state[p], expected.state[q]
        torch.testing.assert_close(mine["exp_avg"], theirs["exp_avg"], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("small_bytes", [0, 1 << 16])
def test_fold_with_every_backward_and_with_bf16_parameters(small_bytes):
    """step() closes what has only been folded."""
    options = {"bf16": "split", "in_backward": True, "small_bytes": small_bytes}
    params, optimizer = make(BF16, **options)
    exact = copies(params, FP32)
    start = copies(exact)
    expected = torch.optim.Adam(exact, lr=1e-2)
    for number in range(10):
        folded_step(params, optimizer, number, all_folded=number % 2 == 1)
        summed_step(exact, expected, number)
    assert distance(optimizer.fp32_parameters(), exact, start) < 0.02


def test_fold_is_the_references():
    params, optimizer = make(in_backward=True, seed=11, weight_decay=0.1)
    group = optimizer.param_groups[0]
    expected = copies(params)
    states = [make_state(p, group) for p in expected]
    for number in range(3):
        folded_step(params, optimizer, number, micro_batches=3)
        for part, phase in enumerate(("first_fold", "fold", "close")):
            grads = gradients(expected, number * 3 + part)
            for position, (p, g, s) in enumerate(zip(expected, grads, states, strict=True)):
                update(p, g, s, group, position=position, phase=phase)
        for p, q, state in zip(params, expected, states, strict=True):
            torch.testing.assert_close(p, q, rtol=2e-6, atol=1e-6)
            # Packing rounds to 9 bits, at random, what may differ by an ulp.
            for name in ("exp_avg", "exp_avg_sq"):
                torch.testing.assert_close(optimizer.state[p][name], state[name], rtol=1e-3,
                                           atol=1e-6)  # fmt: skip


def test_fold_and_parameters_that_take_part_now_and_then():
    params, optimizer = make(in_backward=True)
    exact = copies(params)
    expected = torch.optim.Adam(exact, lr=1e-2)
    for _ in range(2):
        with optimizer.accumulate(fold=True):
            loss(params[:2], 0).backward()
        loss(params[1:3], 1).backward()
        optimizer.step()
        expected.zero_grad()
        loss(exact[:2], 0).backward()
        loss(exact[1:3], 1).backward()
        expected.step()
    assert params[3] not in optimizer.state
    for p, q in zip(params[:3], exact, strict=False):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-4)
        assert optimizer.state[p]["step"] == 2


def test_fold_then_an_ordinary_step_and_accumulation():
    params, optimizer = make(in_backward=True)
    exact, start = copies(params), copies(params)
    expected = torch.optim.Adam(exact, lr=1e-2)
    folded_step(params, optimizer, 0)
    summed_step(exact, expected, 0)
    train(params, optimizer, 1, start=100)
    train(exact, expected, 1, start=100)
    for part in range(4):
        with optimizer.accumulate() if part < 3 else contextlib.nullcontext():
            loss(params, 4 + part).backward()
    optimizer.step()
    summed_step(exact, expected, 1)
    assert distance(params, exact, start) < 0.02
    assert [optimizer.state[p]["step"].item() for p in params] == [3] * 4


def test_no_state_dict_in_the_middle_of_folding():
    params, optimizer = make(in_backward=True)
    train(params, optimizer, 1)
    with optimizer.accumulate(fold=True):
        loss(params, 1).backward()
    for use in (optimizer.state_dict, optimizer.to_fp32_state_dict, lambda: copy.copy(optimizer),
                lambda: copy.deepcopy(optimizer)):  # fmt: skip
        with pytest.raises(RuntimeError, match="folded into their moments"):
            use()
    optimizer.step()
    optimizer.state_dict()


def test_fold_with_a_tied_parameter():
    """Its gradients of one backward are one."""
    params, optimizer = make(in_backward=True)
    exact = copies(params)
    expected = torch.optim.Adam(exact, lr=1e-2)
    for all_params, one in ((params, optimizer), (exact, expected)):
        with optimizer.accumulate(fold=True) if one is optimizer else contextlib.nullcontext():
            (loss(all_params, 0) + all_params[0].sin().sum()).backward()
        (loss(all_params, 1) + all_params[0].sin().sum()).backward()
        one.step()
    assert_close_but_at_zeros(params, exact, 1e-6)


# bad input

BAD = {
    "bf16": (FP32, {"bf16": "nearest"}, "bf16 must be None, 'stochastic', 'kahan' or 'split'"),
    "bf16 of fp32": (FP32, {"bf16": "split"}, "bf16='split' is for bfloat16 parameters, got"),
    "bf16 of fp16": (FP16, {"bf16": "kahan"}, "bf16='kahan' is for bfloat16 parameters, got"),
    "state_dtype": (FP32, {"state_dtype": FP16}, "state_dtype must be .* got torch.float16"),
    "state_dtype name": (FP32, {"state_dtype": "4bit"}, "state_dtype must be .* got '4bit'"),
    "states of fp64": (FP64, {"state_dtype": "8bit"}, "state_dtype='8bit' is for float32"),
    "states of complex": (torch.complex64, {"state_dtype": BF16}, "state_dtype=torch.bfloat16 is"),
    "amsgrad": (FP32, {"state_dtype": "8bit", "amsgrad": True}, "'8bit' cannot .* amsgrad=True"),
    "seed": (FP32, {"seed": -1}, "seed must be an int"),
    "seed too large": (FP32, {"seed": 2**64}, "seed must be an int"),
    "seed of float": (FP32, {"seed": 1.5}, "seed must be an int"),
    "max_grad_norm": (FP32, {"max_grad_norm": -1.0}, "max_grad_norm must be .* got -1.0"),
    "max_grad_norm of 0": (FP32, {"max_grad_norm": 0}, "max_grad_norm must be .* got 0"),
    "max_grad_norm name": (FP32, {"max_grad_norm": "1"}, "max_grad_norm must be .* got '1'"),
    "clip_global_norm": (FP32, {"clip_global_norm": -0.5}, "clip_global_norm must be"),
    "clip_global_norm nan": (FP32, {"clip_global_norm": math.nan}, "clip_global_norm must be"),
}


@both_ways
@pytest.mark.parametrize("kind", [ms.Adam, ms.AdamW])
@pytest.mark.parametrize("case", BAD)
def test_bad_arguments(case, kind, in_backward):
    dtype, options, message = BAD[case]
    param = nn.Parameter(torch.ones(2, dtype=dtype))
    with pytest.raises(ValueError, match=message):
        kind([param], in_backward=in_backward, **options)
    assert param._post_accumulate_grad_hooks is None
    if "clip_global_norm" not in options:
        with pytest.raises(ValueError, match=message):
            kind([{"params": [param], **options}], in_backward=in_backward)
        optimizer = kind([nn.Parameter(torch.ones(1))], in_backward=in_backward)
        with pytest.raises(ValueError, match=message):
            optimizer.add_param_group({"params": [param], **options})
        assert len(optimizer.param_groups) == 1
        assert param._post_accumulate_grad_hooks is None


UNFOLDABLE = {
    "without in_backward": ({"in_backward": False}, "in_backward=False"),
    "grad_scaler": ({"grad_scaler": torch.amp.GradScaler("cpu")}, "grad_scaler"),
    "max_grad_norm": ({"max_grad_norm": 1.0}, "max_grad_norm"),
    "clip_global_norm": ({"clip_global_norm": 1.0}, "clip_global_norm"),
    "8bit": ({"state_dtype": "8bit"}, "state_dtype='8bit'"),
    "bf16 states": ({"state_dtype": BF16}, "state_dtype=torch.bfloat16"),
}


@nothing_in_backward
@pytest.mark.parametrize("case", UNFOLDABLE)
def test_what_cannot_be_folded(case):
    options, named = UNFOLDABLE[case]
    params, optimizer = make(**{"in_backward": True, **options})
    match = rf"accumulate\(fold=True\) cannot be combined with {re.escape(named)}"
    with pytest.raises(ValueError, match=match), optimizer.accumulate(fold=True):
        pass
    if case != "grad_scaler":
        train(params, optimizer, 1)


def test_what_cannot_have_a_norm_pass():
    def check(error, message, optimizer, max_norm=1.0):
        with pytest.raises(error, match=message), optimizer.norm_pass(max_norm):
            pass

    check(ValueError, r"norm_pass\(\) cannot be .* clip_global_norm", make(clip_global_norm=1.0)[1])
    check(ValueError, r"norm_pass\(\) is for in_backward=True", make()[1])
    for bad in (-1.0, 0, math.nan, None):
        check(ValueError, "max_norm must be a number above 0", make(in_backward=True)[1], bad)

    params, optimizer = make(in_backward=True)
    with optimizer.accumulate():
        loss(params, 0).backward()
        check(RuntimeError, "while gradients are accumulated", optimizer)
    check(RuntimeError, "while gradients are accumulated", optimizer)
    optimizer.step()
    loss(params, 1).backward()
    check(RuntimeError, "before the backward that steps", optimizer)
    optimizer.step()
    with optimizer.norm_pass(1.0):
        loss(params, 2).backward()
    check(RuntimeError, "once in each step", optimizer)


def test_a_parameter_twice_in_a_norm_pass():
    params, optimizer = make(in_backward=True)
    with optimizer.norm_pass(1.0):
        loss(params, 0).backward()
        with pytest.raises(RuntimeError, match="receives a second gradient"):
            loss(params, 0).backward()


def test_nothing_is_loaded_in_the_middle_of_folding():
    p = nn.Parameter(torch.ones(8))
    optimizer = ms.Adam([p], in_backward=True)
    saved = optimizer.state_dict()
    with optimizer.accumulate(fold=True):
        p.sum().backward()
    with pytest.raises(RuntimeError, match="1 parameters have gradients folded"):
        optimizer.load_state_dict(saved)
    with pytest.raises(RuntimeError, match="norm_pass"), optimizer.norm_pass(1.0):
        p.sum().backward()
    optimizer.step()
    optimizer.load_state_dict(saved)


@pytest.mark.parametrize("fold", [False, True])
def test_a_norm_pass_is_of_one_backward(fold):
    p = nn.Parameter(torch.ones(8))
    optimizer = ms.Adam([p], in_backward=True)
    with optimizer.norm_pass(1.0):
        p.sum().backward()
    with pytest.raises(RuntimeError, match="after norm_pass"), optimizer.accumulate(fold=fold):
        pass
    p.sum().backward()
    optimizer.step()
    with optimizer.accumulate(fold=fold):
        p.sum().backward()


def test_clipping_a_gradient_that_is_no_number_is_torchs():
    ours, theirs = (nn.Parameter(torch.ones(3)) for _ in range(2))
    optimizer, expected = ms.Adam([ours], max_grad_norm=1.0), torch.optim.Adam([theirs])
    for p in (ours, theirs):
        p.grad = torch.tensor([1.0, float("nan"), 2.0])
    torch.nn.utils.clip_grad_norm_([theirs], 1.0)
    optimizer.step()
    expected.step()
    assert torch.equal(ours.isnan(), theirs.isnan()) and ours.isnan().all()


def test_8bit_states_and_memory_formats():
    same_order = nn.Parameter(torch.randn(64, 128, 1, 1))
    other = nn.Parameter(torch.randn(64, 16, 3, 3))
    gaps = nn.Parameter(torch.randn(8192)[::2])
    optimizer = ms.Adam([same_order, other, gaps], state_dtype="8bit")

    def step():
        for p in (same_order, other, gaps):
            p.grad = torch.ones_like(p)
        optimizer.step()

    step()
    assert optimizer.state[gaps]["exp_avg"].dtype == torch.float32
    assert optimizer.state[other]["exp_avg"].dtype == torch.uint8
    same_order.data = same_order.data.to(memory_format=torch.channels_last)
    step()
    other.data = other.data.to(memory_format=torch.channels_last)
    with pytest.raises(RuntimeError, match="Load to_fp32_state_dict"):
        step()


def test_an_amsgrad_state_is_not_for_8bit():
    p = nn.Parameter(torch.ones(8))
    saved = torch.optim.Adam([p], amsgrad=True).state_dict()
    with pytest.raises(ValueError, match="amsgrad=True, this optimizer has state_dtype='8bit'"):
        ms.Adam([p], state_dtype="8bit").load_state_dict(saved)


def test_a_copy_is_given_the_scaler_again():
    params, copies_ = [nn.Parameter(torch.ones(3))], [nn.Parameter(torch.ones(3))]
    scaler, other = (torch.amp.GradScaler("cpu", init_scale=8.0) for _ in range(2))
    optimizer = pickle.loads(pickle.dumps(ms.Adam(params, lr=0.1, grad_scaler=scaler)))
    params = optimizer.param_groups[0]["params"]
    expected = torch.optim.Adam(copies_, lr=0.1, eps=1.0)
    optimizer.param_groups[0]["eps"] = 1.0  # so that a wrong scale shows
    assert optimizer.grad_scaler is None
    optimizer.grad_scaler = scaler
    for used, step, of in ((scaler, optimizer, params), (other, expected, copies_)):
        used.scale((of[0] * 3).sum()).backward()
        used.step(step)
        used.update()
    torch.testing.assert_close(params[0], copies_[0])


@pytest.mark.parametrize("in_backward", [False, True])
def test_a_norm_set_by_hand_is_checked(in_backward):
    p = nn.Parameter(torch.ones(3))
    optimizer = ms.Adam([p], in_backward=in_backward)
    optimizer.param_groups[0]["max_grad_norm"] = -1.0
    if not in_backward:
        p.grad = torch.ones(3)
    with pytest.raises(ValueError, match="max_grad_norm must be a number above 0"):
        p.sum().backward() if in_backward else optimizer.step()
    assert torch.equal(p, torch.ones(3))
