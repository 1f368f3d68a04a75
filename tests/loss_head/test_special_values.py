"""NaN, infinities and zeros wherever they may be given: as F.cross_entropy of the logits."""

import pytest
import torch
from losses import REDUCTIONS, chunked, gradients, plain

CLASSES, IGNORED = 600, 77
OF_TARGETS, OF_NO_TARGET = 5, 401  # classes: the targets are all below 300
INF, NAN = torch.inf, torch.nan
SPECIAL = [INF, -INF, NAN, 0.0]


class Given:
    """Arguments of the loss; the tokens 1 and 4 are ignored where targets are indices."""

    def __init__(self, dtype, probabilities, reduction):
        make = torch.Generator().manual_seed(0)

        def normal(*shape):
            return torch.randn(shape, generator=make).to(dtype)

        self.input, self.linear_weight = normal(6, 4), normal(CLASSES, 4)
        self.bias = normal(CLASSES)
        self.weight = normal(CLASSES).abs() + 0.1
        self.grad = normal(6) if reduction == "none" else normal()
        if probabilities:
            self.target = normal(6, CLASSES).softmax(1)
        else:
            self.target = torch.tensor([OF_TARGETS, IGNORED, 290, OF_TARGETS, IGNORED, 255])

    def results(self, loss_of, **options):
        given = [t.clone().requires_grad_() for t in (self.input, self.linear_weight, self.bias)]
        x, w, bias = given
        weight = None if self.weight is None else self.weight.clone()
        loss = loss_of(x, w, self.target.clone(), linear_bias=bias, weight=weight, **options)
        return gradients(loss, given, self.grad)


def put(name, place, value):
    def change(given):
        tensor = getattr(given, name)
        if tensor.dim():
            tensor[place] = value
        else:
            tensor.fill_(value)

    return change


def all_ignored(given):
    given.target.fill_(IGNORED if given.target.dim() == 1 else 0.0)


def several(*changes):
    return lambda given: [change(given) for change in changes]


CASES = {"nothing": lambda given: None, "all ignored": all_ignored}
for value in SPECIAL:
    for place, token in (("counted", 2), ("ignored", 1)):
        CASES[f"input of a token that is {place}: {value}"] = put("input", (token, 0), value)
        CASES[f"gradient of a token that is {place}: {value}"] = put("grad", token, value)
    for place, of in (("targets", OF_TARGETS), ("no target", OF_NO_TARGET), ("ignored", IGNORED)):
        CASES[f"weight of a class of {place}: {value}"] = put("linear_weight", (of, 1), value)
        CASES[f"bias of a class of {place}: {value}"] = put("bias", of, value)
        CASES[f"class weight of {place}: {value}"] = put("weight", of, value)
    CASES[f"all biases: {value}"] = put("bias", slice(None), value)
    CASES[f"all biases of the first chunk: {value}"] = put("bias", slice(256), value)
    CASES[f"all class weights: {value}"] = put("weight", slice(None), value)
    CASES[f"all ignored, input: {value}"] = several(all_ignored, put("input", (1, 0), value))
    CASES[f"all ignored, gradient: {value}"] = several(all_ignored, put("grad", 0, value))
    CASES[f"all ignored, class weight: {value}"] = several(
        all_ignored, put("weight", OF_TARGETS, value)
    )
CASES["class weights of all targets: 0"] = several(
    *(put("weight", of, 0.0) for of in (OF_TARGETS, 290, 255))
)
CASES["class weights of the targets add up to 0"] = several(
    put("weight", OF_TARGETS, 1.0), put("weight", 290, -2.5), put("weight", 255, 0.5)
)
OF_PROBABILITIES = {
    f"probability: {value}, bias: {bias}": several(
        put("target", (2, OF_TARGETS), value), put("bias", OF_TARGETS, bias)
    )
    for value in SPECIAL
    for bias in (0.5, *SPECIAL)
}


# (label_smoothing, softcap, whether classes have weights)
OPTIONS = [
    (0.0, None, True),
    (0.0, 3.0, False),
    (0.1, None, False),
    (0.1, 3.0, True),
    (1.0, None, True),
]


@pytest.mark.each_value
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("probabilities", [False, True])
def test_as_cross_entropy(dtype, reduction, probabilities):
    tolerance = 1e-5 if dtype == torch.float32 else 1e-10
    differ, special = [], 0
    for name, change in (CASES | (OF_PROBABILITIES if probabilities else {})).items():
        for smoothing, softcap, weighted in OPTIONS:
            given = Given(dtype, probabilities, reduction)
            change(given)
            if not weighted:
                given.weight = None
            options = {"reduction": reduction, "label_smoothing": smoothing, "softcap": softcap}
            if not probabilities:
                options["ignore_index"] = IGNORED
            expected, found = given.results(plain, **options), given.results(chunked, **options)
            special += not all(tensor.isfinite().all() for tensor in expected)
            for left, right in zip(found, expected, strict=True):
                same = torch.allclose(left, right, tolerance, tolerance, equal_nan=True)
                if not same or left.dtype != right.dtype:
                    differ.append((name, smoothing, softcap, weighted))
    assert not differ
    assert special > 100
