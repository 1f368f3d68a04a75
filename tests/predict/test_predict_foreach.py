"""memory.predict() for CUDA of torch's optimizers: whether they step lists of tensors there."""

import pytest
import torch
from libraries import library
from torch import nn

import memsave_ext as ms


class Derived(torch.optim.AdamW):
    pass


def peak_of(make, width=64):
    def build():
        model = nn.Sequential(*[nn.Linear(width, width) for _ in range(8)])
        optimizer = make(list(model.parameters()))
        x = torch.randn(8, width)

        def step():
            model(x).square().mean().backward()
            optimizer.step()

        return model, optimizer, step

    return ms.memory.predict(build, device="cuda").peak


def tensor_lr(**options):
    return {"lr": torch.tensor(0.1), **options}


@pytest.mark.parametrize(
    ("kind", "options", "foreach"),
    [
        (torch.optim.AdamW, dict, True),
        (torch.optim.Adam, dict, True),
        (Derived, dict, True),
        (torch.optim.Adadelta, dict, True),
        (torch.optim.Adadelta, lambda: {"capturable": True}, True),
        (torch.optim.SGD, lambda: tensor_lr(weight_decay=0.1), True),
        (torch.optim.AdamW, lambda: {"capturable": True}, True),
        (torch.optim.AdamW, lambda: tensor_lr(capturable=True), True),
        (torch.optim.AdamW, tensor_lr, False),
        (torch.optim.AdamW, lambda: {"fused": False}, False),
        (torch.optim.Adafactor, dict, False),
    ],
)
def test_torch_decides_as_for_a_card(kind, options, foreach):
    """As it says in its documentation; the peak is that of the option that asks for it."""
    peaks = {}
    for given in (None, True, False):
        more = {} if given is None else {"foreach": given}
        if given and not foreach and kind is not torch.optim.Adafactor:
            continue  # torch refuses it
        peaks[given] = peak_of(lambda params, more=more: kind(params, **options(), **more))
    assert peaks[None] == peaks[foreach]
    if len(peaks) == 3:
        assert peaks[True] > peaks[False]


def test_fused_optimizers():
    fused = peak_of(lambda params: torch.optim.AdamW(params, fused=True))
    assert fused == peak_of(lambda params: torch.optim.AdamW(params, foreach=False))


def test_an_optimizer_that_accelerate_has_wrapped():
    accelerate = library("accelerate")

    def wrapped(params):  # in the child, so that accelerate keeps nothing here
        return accelerate.Accelerator(cpu=True).prepare_optimizer(torch.optim.AdamW(params))

    assert peak_of(wrapped) == peak_of(lambda params: torch.optim.AdamW(params, foreach=True))
