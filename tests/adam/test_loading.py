"""Loading a checkpoint is a fresh start, whatever the open step had come to: training goes on to
the bits of a new optimizer that has loaded it."""

import copy
import io
import re

import pytest
import torch
from torch import nn

import memsave_ext as ms

pytestmark = pytest.mark.filterwarnings("ignore:memsave_ext. norm_pass")


def take(kind, **options):
    return lambda params: ms.in_backward(kind(params, **options), small_bytes=0)


def own(kind, **options):
    return lambda params: kind(params, in_backward=True, small_bytes=0, **options)


KINDS = {
    "Adam": own(ms.Adam, lr=0.01),
    "AdamW amsgrad": own(ms.AdamW, lr=0.01, amsgrad=True),
    "Adam in buckets": lambda params: ms.Adam(params, lr=0.01, in_backward=True),
    "Adam bfloat16": own(ms.Adam, lr=0.01, state_dtype=torch.bfloat16),
    "SGD": own(ms.SGD, lr=0.1),
    "SGD momentum": own(ms.SGD, lr=0.1, momentum=0.9, dampening=0.1),
    "Lion": own(ms.Lion, lr=0.01),
    "torch's SGD": take(torch.optim.SGD, lr=0.1, momentum=0.9),
    "torch's AdamW": take(torch.optim.AdamW, lr=0.01),
    "torch's Adafactor": take(torch.optim.Adafactor, lr=0.01),
}


class Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ZeroDivisionError


def model():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 33), nn.Tanh(), nn.Linear(33, 7), nn.Tanh(), nn.Linear(7, 1))


def loss(net, number, raises=False):
    h = torch.randn(8, 5, generator=torch.Generator().manual_seed(number))
    for i, layer in enumerate(net):
        h = layer(h)
        if raises and i == 0:  # the last two layers' gradients have come by then
            h = Raises.apply(h)
    return (h - 1).square().mean()


def step(net, optimizer, number):
    loss(net, number).backward()
    assert all(p.grad is None for p in net.parameters())
    optimizer.step()
    optimizer.zero_grad()


def failing(net, number=7):
    with pytest.raises(ZeroDivisionError):
        loss(net, number, raises=True).backward()


# What comes between the last step and the loading.


def backward(net, optimizer):
    loss(net, 7).backward()


def backward_failed(net, optimizer):
    failing(net)


def second_backward(net, optimizer):
    loss(net, 7).backward()
    with pytest.raises(RuntimeError, match="second gradient|has a gradient in .grad again"):
        loss(net, 8).backward()


def accumulated(net, optimizer):
    with optimizer.accumulate():
        loss(net, 7).backward()


def accumulated_and_failed(net, optimizer):
    accumulated(net, optimizer)
    failing(net)


def kept(net, optimizer):
    with optimizer.paused(keep=True):
        loss(net, 7).backward()


def set_by_hand(net, optimizer):
    net[0].weight.grad = torch.ones_like(net[0].weight)


def measured(net, optimizer):
    with optimizer.norm_pass(1e-3):
        loss(net, 7).backward()


def measured_and_failed(net, optimizer):
    measured(net, optimizer)
    failing(net)


def pass_failed(net, optimizer):
    failing(net)
    with pytest.raises(RuntimeError, match="norm_pass|raised after"), optimizer.norm_pass(1):
        pass


def scaled(net, optimizer):
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer.grad_scaler = scaler
    scaler.scale(loss(net, 7)).backward()
    optimizer.grad_scaler = None


BETWEEN = [
    backward, backward_failed, second_backward, accumulated, accumulated_and_failed, kept,
    set_by_hand, measured, measured_and_failed, pass_failed, scaled,
]  # fmt: skip


def trained(kind):
    """A model and its optimizer after two steps, and their checkpoint."""
    net = model()
    optimizer = KINDS[kind](list(net.parameters()))
    for number in range(2):
        step(net, optimizer, number)
    return net, optimizer, copy.deepcopy((net.state_dict(), optimizer.state_dict()))


def load(net, optimizer, saved):
    net.load_state_dict(saved[0])
    optimizer.load_state_dict(copy.deepcopy(saved[1]))


def assert_goes_on_as_new(kind, net, optimizer, saved):
    other = model()
    new = KINDS[kind](list(other.parameters()))
    load(other, new, saved)
    for number in range(2, 5):
        step(net, optimizer, number)
        step(other, new, number)
        for p, q in zip(net.parameters(), other.parameters(), strict=True):
            assert torch.equal(p, q)
            assert optimizer.state[p].keys() == new.state[q].keys()
            for name, value in optimizer.state[p].items():
                assert torch.equal(value, new.state[q][name]), name


@pytest.mark.parametrize("between", BETWEEN, ids=lambda f: f.__name__)
@pytest.mark.parametrize("kind", KINDS)
def test_is_a_fresh_start(kind, between):
    net, optimizer, saved = trained(kind)
    between(net, optimizer)
    load(net, optimizer, saved)
    assert all(p.grad is None for p in net.parameters())
    assert_goes_on_as_new(kind, net, optimizer, saved)


@pytest.mark.parametrize("between", BETWEEN, ids=lambda f: f.__name__)
def test_without_it_the_step_is_another(between):
    """Of the tests above: there is something to forget."""
    net, optimizer, _ = trained("Adam")
    reference, new, saved = trained("Adam")
    between(net, optimizer)
    net.load_state_dict(saved[0])
    try:
        step(net, optimizer, 2)
    except (RuntimeError, AssertionError):
        return
    step(reference, new, 2)
    pairs = zip(net.parameters(), reference.parameters(), strict=True)
    assert not all(torch.equal(p, q) for p, q in pairs)


@pytest.mark.parametrize("kind", KINDS)
def test_where_the_error_is_caught(kind):
    """The error's traceback refers to what raised it."""
    net, optimizer, saved = trained(kind)

    def refuse(param):
        raise ZeroDivisionError

    handle = net[0].weight.register_post_accumulate_grad_hook(refuse)
    try:
        loss(net, 7).backward()
    except ZeroDivisionError:
        handle.remove()
        load(net, optimizer, saved)
        assert_goes_on_as_new(kind, net, optimizer, saved)
    else:
        raise AssertionError("nothing was raised")


@pytest.mark.parametrize("small_bytes", [0, 1 << 16], ids=["in a hook", "at the end"])
@pytest.mark.parametrize("loads", [True, False], ids=["load", "zero_grad"])
def test_where_the_step_raised_and_the_error_is_kept(small_bytes, loads):
    """Its traceback has the frames of the step itself."""
    net, optimizer, saved = trained("torch's SGD")
    optimizer.remove_hooks()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    ms.in_backward(optimizer, small_bytes=small_bytes)
    optimizer.load_state_dict(copy.deepcopy(saved[1]))
    optimizer.param_groups[0]["lr"] = "x"
    with pytest.raises(TypeError) as kept:
        loss(net, 7).backward()
    if loads:
        load(net, optimizer, saved)
        assert_goes_on_as_new("torch's SGD", net, optimizer, saved)
    else:
        optimizer.param_groups[0]["lr"] = 0.1
        optimizer.zero_grad()
        step(net, optimizer, 2)
    assert kept.value.__traceback__ is not None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("block", ["accumulate", "paused", "norm_pass"])
def test_in_an_open_block(kind, block):
    net, optimizer, saved = trained(kind)
    blocks = {
        "accumulate": optimizer.accumulate,
        "paused": optimizer.paused,
        "norm_pass": lambda: optimizer.norm_pass(1e-3),
    }
    with blocks[block]():
        loss(net, 7).backward()
        load(net, optimizer, saved)
    if block == "norm_pass":  # nothing has been measured since
        with pytest.raises(RuntimeError, match="had none in norm_pass"):
            loss(net, 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        load(net, optimizer, saved)
    assert_goes_on_as_new(kind, net, optimizer, saved)


def test_the_norm_is_that_of_what_was_loaded_in_its_pass():
    net, optimizer, saved = trained("Adam")
    other, new, _ = trained("Adam")
    with optimizer.norm_pass(1e-3):
        loss(net, 7).backward()
        load(net, optimizer, saved)
        loss(net, 2).backward()
    with new.norm_pass(1e-3):
        loss(other, 2).backward()
    assert optimizer.grad_norm == new.grad_norm
    for of, by in ((net, optimizer), (other, new)):
        loss(of, 2).backward()
        by.step()
    pairs = zip(net.parameters(), other.parameters(), strict=True)
    assert all(torch.equal(p, q) for p, q in pairs)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_refused_changes_nothing(kind):
    net, optimizer, saved = trained(kind)
    twin, other, _ = trained(kind)
    for of, by in ((net, optimizer), (twin, other)):
        with by.accumulate():
            loss(of, 7).backward()
    wrong = copy.deepcopy(saved[1])
    wrong["param_groups"][0]["params"].pop()
    with pytest.raises(ValueError, match="doesn't match the size"):
        optimizer.load_state_dict(wrong)
    for of, by in ((net, optimizer), (twin, other)):
        step(of, by, 8)
    pairs = zip(net.parameters(), twin.parameters(), strict=True)
    assert all(torch.equal(p, q) for p, q in pairs)


@pytest.mark.parametrize("kind", KINDS)
def test_while_a_backward_runs(kind):
    net, optimizer, saved = trained(kind)
    twin, other, _ = trained(kind)
    raised = []

    def loads(grad):
        with pytest.raises(
            RuntimeError, match=re.escape("load_state_dict() was called while a backward is")
        ):
            optimizer.load_state_dict(copy.deepcopy(saved[1]))
        raised.append(True)

    handle = net[0].weight.register_hook(loads)
    step(net, optimizer, 2)
    handle.remove()
    step(twin, other, 2)
    assert raised == [True]
    for p, q in zip(net.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p, q)
    load(net, optimizer, saved)
    assert_goes_on_as_new(kind, net, optimizer, saved)


@pytest.mark.parametrize("kind", ["SGD", "torch's SGD"])
def test_an_ordinary_one_keeps_its_gradients(kind):
    """As torch's: they are not steps in backward that are undone."""
    net, optimizer, saved = trained(kind)
    optimizer.remove_hooks()
    loss(net, 7).backward()
    optimizer.load_state_dict(saved[1])
    assert all(p.grad is not None for p in net.parameters())


@pytest.mark.parametrize("kind", [ms.AdamW, ms.SGD, ms.Lion])
@pytest.mark.parametrize("bf16", [None, "split"])
def test_codes_under_the_names_of_earlier_versions(kind, bf16):
    """Versions up to 0.3.0 have saved codes under the names of float32 moments."""
    options = {"state_dtype": "8bit", "bf16": bf16, "lr": 0.01}
    options |= {"momentum": 0.9} if kind is ms.SGD else {}
    found = []
    for old in (False, True):
        torch.manual_seed(0)
        weight = nn.Parameter(torch.randn(64, 128, dtype=torch.bfloat16 if bf16 else None))
        optimizer = kind([weight], **options)
        weight.square().sum().backward()
        optimizer.step()
        own = torch.optim.Optimizer.state_dict(optimizer) if old else optimizer.state_dict()
        saved = io.BytesIO()
        torch.save(own, saved)
        saved.seek(0)
        loaded = torch.load(saved, weights_only=True)
        (state,) = loaded["state"].values()
        moment = "momentum_buffer" if kind is ms.SGD else "exp_avg"
        assert isinstance(state[moment], dict) is not old
        other = kind([weight], **options)
        other.load_state_dict(loaded)
        assert {n: v.dtype for n, v in other.state[weight].items()} == {
            n: v.dtype for n, v in optimizer.state[weight].items()
        }
        exported = optimizer.to_fp32_state_dict(loaded)["state"][0][moment]
        other.step()
        other.zero_grad()
        found.append((weight.detach().clone(), exported))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


@pytest.mark.parametrize("by", [{"foreach": False}, {"foreach": True}, {"fused": True}])
@pytest.mark.parametrize("states", ["8bit", "4bit"])
def test_torchs_optimizer_does_not_step_with_codes(states, by):
    weight = nn.Parameter(torch.randn(64, 64))
    optimizer = ms.AdamW([weight], state_dtype=states)
    weight.square().sum().backward()
    optimizer.step()
    torchs = torch.optim.AdamW([weight], **by)
    torchs.load_state_dict(optimizer.state_dict())
    for group in torchs.param_groups:  # which were loaded, too
        group.update({"foreach": None, "fused": None} | by)
    with pytest.raises((TypeError, KeyError, AttributeError)):
        torchs.step()


@pytest.mark.parametrize("kind", [ms.Adam, ms.AdamW, ms.SGD, ms.Lion])
@pytest.mark.parametrize("in_backward", [False, True])
def test_values_that_a_user_puts_into_the_state(kind, in_backward):
    """As torch's own test of hooks on state_dict() does."""
    params = [nn.Parameter(torch.ones(4))]
    optimizer = kind(params, lr=0.1, in_backward=in_backward)
    params[0].sum().backward()
    optimizer.step()
    optimizer.state["mine"] = {"list": [1]}
    optimizer.state["number"] = 3
    saved = copy.deepcopy(optimizer.state_dict())
    assert saved["state"]["mine"] == {"list": [1]} and saved["state"]["number"] == 3
    assert optimizer.to_fp32_state_dict()["state"]["number"] == 3
    optimizer.load_state_dict(saved)
    assert optimizer.state["mine"] == {"list": [1]} and optimizer.state["number"] == 3
    assert copy.deepcopy(optimizer).state["number"] == 3


def bitsandbytes_state(moments, coded):
    """As its optimizers save it: each moment in codes of blocks of 256, or in float32."""
    if not coded:
        return {f"state{i}": m for i, m in enumerate(moments, 1)}
    state = {}
    for i, moment in enumerate(moments, 1):
        numbers = torch.linspace(-1, 1, 256)
        blocks = moment.flatten().split(256)
        scales = torch.stack([block.abs().max() for block in blocks])
        codes = [
            (numbers[None] - (b / s)[:, None]).abs().argmin(1)
            for b, s in zip(blocks, scales, strict=True)
        ]
        state |= {
            f"state{i}": torch.cat(codes).byte().view(moment.shape),
            f"qmap{i}": numbers,
            f"absmax{i}": scales,
        }
    return state


@pytest.mark.parametrize("coded", [False, True])
@pytest.mark.parametrize("options", [{}, {"state_dtype": "8bit"}, {"in_backward": True}], ids=str)
def test_states_of_bitsandbytes(coded, options):
    torch.manual_seed(0)
    param = nn.Parameter(torch.randn(100, 129))
    torchs = torch.optim.Adam([param])
    param.grad = torch.randn_like(param)
    torchs.step()
    saved = torchs.state_dict()
    state = saved["state"][0]
    moments = [state.pop("exp_avg"), state.pop("exp_avg_sq")]
    state["step"] = 1
    state["__bnb_optimizer_quant_state__"] = bitsandbytes_state(moments, coded)
    optimizer = ms.Adam([param], **options)
    optimizer.load_state_dict(saved)
    loaded = optimizer.to_fp32_state_dict()["state"][0]
    assert {*loaded} == {"step", "exp_avg", "exp_avg_sq"} and loaded["step"] == 1
    exact = not coded and "state_dtype" not in options
    for ours, moment in zip((loaded["exp_avg"], loaded["exp_avg_sq"]), moments, strict=True):
        torch.testing.assert_close(
            ours, moment, rtol=0, atol=0 if exact else 0.02 * moment.abs().max().item()
        )
    param.square().sum().backward()
    optimizer.step()
    del state["__bnb_optimizer_quant_state__"]["state2"]
    with pytest.raises(
        ValueError, match="state_dict is of an optimizer of bitsandbytes, and its exp"
    ):
        optimizer.load_state_dict(saved)


def saved_without_counts(kind, steps=3):
    """Returns a network that was trained in float64, its optimizer, and what that one has saved."""
    net = model().double()
    optimizer = kind(net.parameters(), lr=0.01)
    for number in range(steps):
        optimizer.zero_grad()
        loss_in_float64(net, number).backward()
        optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    for state in saved["state"].values():
        state.pop("step", None)
    return net, optimizer, saved


def loss_in_float64(net, number):
    x = torch.randn(8, 5, generator=torch.Generator().manual_seed(number))
    return (net(x.double()) - 1).square().mean()


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("count", [3, 3.0, torch.tensor([3], dtype=torch.int32)], ids=repr)
def test_adam_with_the_count_of_a_group(count, in_backward):
    """As apex's FusedAdam saves it."""
    net, optimizer, saved = saved_without_counts(torch.optim.AdamW)
    for group in saved["param_groups"]:
        group["step"] = count
    other = copy.deepcopy(net)
    loaded = ms.AdamW(other.parameters(), lr=0.01, in_backward=in_backward)
    loaded.load_state_dict(saved)
    for number in (3, 4):
        for one, by in ((net, optimizer), (other, loaded)):
            by.zero_grad()
            loss_in_float64(one, number).backward()
            by.step()
    for p, q in zip(net.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-12)
        assert loaded.state[q]["step"] == 5


@pytest.mark.parametrize("count", [None, True, "3", -1, torch.ones(2)], ids=repr)
def test_adam_without_a_count_is_refused(count):
    net, _, saved = saved_without_counts(torch.optim.Adam)
    del saved["state"][0]  # has had no gradient
    if count is not None:
        saved["param_groups"][0]["step"] = count
    loaded = ms.Adam(net.parameters(), lr=0.01)
    before = copy.deepcopy(loaded.state_dict())
    with pytest.raises(ValueError, match="moments of Adam but no 'step' for parameter 1, and none"):
        loaded.load_state_dict(saved)
    assert loaded.state_dict() == before


def test_lion_and_sgd_need_no_count():
    net, _, saved = saved_without_counts(
        lambda p, lr: ms.SGD(p, lr=lr, momentum=0.9, dampening=0.5)
    )
    loaded = ms.SGD(net.parameters(), lr=0.01, momentum=0.9, dampening=0.5)
    loaded.load_state_dict(saved)
    random = ms.Lion(net.float().parameters(), lr=0.01, state_dtype=torch.bfloat16)
    _, _, saved = saved_without_counts(lambda p, lr: ms.Lion(p, lr=lr))
    random.load_state_dict(saved)
    assert {float(state["step"]) for state in random.state.values()} == {1.0}
