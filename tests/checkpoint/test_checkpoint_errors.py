"""checkpoint(): recomputes that differ from their forward, context_fn, and bad input."""

import contextlib
import runpy

import pytest
import torch
import torch.utils.checkpoint as torch_checkpoint
from helpers import assert_equal, both, leaf, plain

import memsave_ext as ms

checkpoint = ms.checkpoint


def changing(first, second):
    def function(a):
        return second(a) if ms.is_recomputing() else first(a)

    return function


def test_different_metadata():
    function = changing(lambda a: a[:2].exp().sin(), lambda a: a[:3].exp().sin())
    out = checkpoint(function, leaf(4))
    with pytest.raises(ms.CheckpointError) as caught:
        out.sum().backward()
    text = str(caught.value)
    assert text.startswith("checkpoint: Recomputed values for the following tensors")
    assert "tensor at position 0:\nsaved metadata: {'shape': torch.Size([2])" in text
    assert "'dtype': torch.float32, 'device': device(type='cpu')}" in text
    assert "recomputed metadata: {'shape': torch.Size([3])" in text


@pytest.mark.parametrize("early_stop", [True, False])
def test_fewer_saved(early_stop):
    function = changing(lambda a: a.exp().sin(), lambda a: a.exp() + 1)
    out = checkpoint(function, leaf(200, 200), early_stop=early_stop)
    with pytest.raises(ms.CheckpointError, match="A different number of tensors was saved") as e:
        out.sum().backward()
    assert "during forward: 2" in str(e.value)
    assert "during recomputation: 1" in str(e.value)


def test_more_saved():
    function = changing(lambda a: a.exp(), lambda a: a.exp().exp())
    out = checkpoint(function, leaf(4), early_stop=False)
    with pytest.raises(ms.CheckpointError, match="trying to save more tensors"):
        out.sum().backward()


def test_the_error_is_torchs_too():
    assert issubclass(ms.CheckpointError, torch_checkpoint.CheckpointError)


def test_the_check_can_be_left_out():
    function = changing(lambda a: a.exp(), lambda a: a.double().exp().float())
    checkpoint(function, leaf(4), determinism_check="none")


@pytest.mark.parametrize("debug", ["argument", "torch's switch"])
def test_debug_lists_the_operators(debug):
    function = changing(lambda a: a.exp().sin(), lambda a: a[:2].cos().exp())
    enabled = torch_checkpoint.set_checkpoint_debug_enabled(True)
    with enabled if debug == "torch's switch" else contextlib.nullcontext():
        out = checkpoint(function, leaf(4), debug=debug == "argument")
    with pytest.raises(ms.CheckpointError) as caught:
        out.sum().backward()
    text = str(caught.value)
    assert "aten.exp.default(float32[4])" in text
    assert "aten.cos.default(float32[2])" in text
    assert __file__ in text


def test_debug_names_the_users_line_in_a_folder_named_as_a_library(tmp_path):
    for folder in ("memsave_ext", "torch"):
        path = tmp_path / folder / "users.py"
        path.parent.mkdir()
        path.write_text(
            "def first(a):\n    return a.exp()\ndef second(a):\n    return a[:2].exp()\n"
        )
        scope = runpy.run_path(str(path))
        out = checkpoint(changing(scope["first"], scope["second"]), leaf(4), debug=True)
        with pytest.raises(ms.CheckpointError) as caught:
            out.sum().backward()
        assert f"{path}:2" in str(caught.value)
        assert f"{path}:4" in str(caught.value)


def test_a_closure_tensor_changed_in_place_is_an_error():
    """Plain autograd refuses; torch's checkpoint says nothing and is wrong."""
    x, w = leaf(4), torch.randn(4)
    out = checkpoint(lambda a: (a * w).exp(), x)
    w.add_(1)
    with pytest.raises(ms.CheckpointError, match="modified by an inplace operation") as caught:
        out.sum().backward()
    assert "version 0 in the forward, 1 in the recompute" in str(caught.value)
    out = checkpoint(lambda a: (a * w).exp(), x, determinism_check="none")
    w.add_(1)
    out.sum().backward()


def test_an_argument_changed_in_place_is_an_error():
    x = leaf(4) * 1
    out = checkpoint(lambda a: a.exp().sin(), x)
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_a_tensor_that_is_not_found_changed_in_place_is_an_error():
    """In an object that is not looked into; saved, it is seen all the same."""

    class Box:
        tensor = torch.randn(4)

    out = checkpoint(lambda a: (a * Box.tensor).exp(), leaf(4))
    Box.tensor.add_(1)
    with pytest.raises(ms.CheckpointError, match="modified by an inplace operation"):
        out.sum().backward()


def test_selective_checkpointing():
    x, w = leaf(8, 8), leaf(8, 8)
    ops = [torch.ops.aten.mm.default]
    counted = []

    class Count(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            counted.append(func)
            return func(*args, **(kwargs or {}))

    def program(run):
        if run is plain:
            return run(lambda a: (a @ w).sin() @ w, x).sum()
        return run(
            lambda a: (a @ w).sin() @ w,
            x,
            context_fn=lambda: torch_checkpoint.create_selective_checkpoint_contexts(ops),
        ).sum()

    both(program, (x, w))
    out = program(checkpoint)
    with Count():
        torch.autograd.grad(out, (x, w))
    assert counted.count(torch.ops.aten.mm.default) == 4  # those of backward, none recomputed


def test_selective_checkpointing_of_torchs_batch_norm():
    """What is kept is found by counting operators, of which a recompute must not have others."""
    norm, x, w = torch.nn.BatchNorm1d(4), leaf(5, 4, 3), leaf(3, 3)
    ops = [torch.ops.aten.clone.default, torch.ops.aten.bmm.default]

    def function(a):
        return (norm(a @ w).clone().relu() @ w).exp()

    expected = torch.autograd.grad(function(x).sum(), (x, w))
    out = checkpoint(
        function,
        x,
        context_fn=lambda: torch_checkpoint.create_selective_checkpoint_contexts(ops),
    )
    assert_equal(expected, torch.autograd.grad(out.sum(), (x, w)))
    assert int(norm.num_batches_tracked) == 2


def test_context_fn_runs_around_both():
    events = []

    @contextlib.contextmanager
    def note(name):
        events.append(f"enter {name}")
        yield
        events.append(f"exit {name}")

    out = checkpoint(
        lambda a: a.exp(), leaf(4), context_fn=lambda: (note("forward"), note("recompute"))
    )
    assert events == ["enter forward", "exit forward"]
    out.sum().backward()
    assert events[2] == "enter recompute"


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((3, torch.ones(1)), {}, TypeError, "function must be callable, got int"),
        (
            (torch.sin, torch.ones(1)),
            {"determinism_check": "all"},
            ValueError,
            "'default' or 'none'",
        ),
        ((torch.sin, torch.ones(1)), {"offload": "disk"}, ValueError, "must be None or 'cpu'"),
        (
            (torch.sin, torch.ones(1)),
            {"debug": True, "context_fn": lambda: (None, None)},
            ValueError,
            "debug=True cannot be combined",
        ),
    ],
)
def test_bad_input(arguments, options, error, message):
    with pytest.raises(error, match=message):
        checkpoint(*arguments, **options)


def test_offload_is_a_no_op_on_the_cpu():
    x = leaf(4)
    function = torch.nn.Tanh()
    out = checkpoint(lambda a: function(a).exp(), x, offload="cpu")
    expected = torch.autograd.grad(function(x).exp().sum(), x)
    assert_equal(expected, torch.autograd.grad(out.sum(), x))


def test_function_transforms_are_refused():
    with pytest.raises(RuntimeError, match="torch.func"):
        torch.func.grad(lambda x: checkpoint(torch.sin, x).sum())(torch.randn(3))


def saves(*functions):
    def run(x):
        for function in functions:
            x = function(x)
        return x

    return run


def in_turn(functions):
    """A function that is another one in each call; is_recomputing() knows nothing of torch's."""
    calls = iter(functions)
    return lambda x: next(calls)(x)


# How torch's own test has a recompute differ, and what torch's error says.
DIFFERENT = {
    "fewer": (saves(torch.sin, torch.exp, torch.sin), saves(torch.sin, torch.exp)),
    "more": (saves(torch.sin, torch.exp), saves(torch.sin, torch.exp, torch.sin)),
    "other shapes": (
        saves(torch.sin, torch.exp),
        saves(lambda x: torch.cat([x, x]), torch.sin, lambda x: x[:4].exp()),
    ),
}
BECAUSE = "You are seeing this error because you passed `debug=True` to checkpoint"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"use_reentrant": "x"}, "use_reentrant must be True, False or None, got 'x'"),
        ({"context_fn": 3}, "context_fn must be a function or None, got 3"),
    ],
)
def test_wrong_options_of_torchs(options, message):
    with pytest.raises(TypeError, match=message):
        ms.checkpoint(torch.sin, leaf(4), **options)


@pytest.mark.parametrize("difference", DIFFERENT)
@pytest.mark.parametrize(
    ("switch", "debug", "told"),
    [(None, False, False), (None, True, True), (True, False, True), (False, True, False)],
)
def test_errors_of_a_patched_checkpoint_say_what_torchs_say(difference, switch, debug, told):
    def message(**options):
        out = torch_checkpoint.checkpoint(
            in_turn(DIFFERENT[difference]),
            leaf(4),
            use_reentrant=False,
            early_stop=False,
            **options,
        )
        with pytest.raises(torch_checkpoint.CheckpointError) as caught:
            out.sum().backward()
        return str(caught.value)

    torchs = message()
    with ms.patch_torch_checkpoint(), torch_checkpoint.set_checkpoint_debug_enabled(switch):
        ours = message(debug=debug)
    sentences = (
        "A different number of tensors was saved",
        "trying to save more tensors during recomputation",
        "tensors have different metadata",
    )
    assert sum(sentence in torchs for sentence in sentences) == 1
    for sentence in sentences:
        assert (sentence in ours) == (sentence in torchs)
    # torch's own logging of the operators fails where a test runner captures logs.
    assert BECAUSE in torch_checkpoint._checkpoint_error_template
    assert (BECAUSE in ours) == told
