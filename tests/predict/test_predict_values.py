"""memory.predict() of steps and models that look at values."""

import logging

import pytest
import torch
import zoo
from helpers import on_fakes
from libraries import library
from sampling import share
from steps import assert_near, tracked
from torch import nn
from torch.nn import functional as F

import memsave_ext as ms

pytestmark = pytest.mark.skipif(
    not ms._native.available, reason="fakes are the same in pure Python"
)

STRIDED = {
    "layer norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "log softmax": lambda x: F.log_softmax(x, 1),
    "relu": F.relu,
    "gelu": F.gelu,
    "sum of two": lambda x: x + x.contiguous(),
    "clone": torch.clone,
    "compared": lambda x: x > 0,
}


def masked_step(attention_mask):
    """``attention_mask`` makes what the model is called with beside the tokens."""
    library("transformers")

    def build():
        entry = zoo.ENTRIES["llama"]
        model = entry.build()
        optimizer = torch.optim.AdamW(model.parameters())
        ids = torch.randint(5, zoo.VOCABULARY, (4, 80))

        def step():
            model(input_ids=ids, labels=ids, attention_mask=attention_mask()).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        return model, optimizer, step

    return build


@pytest.mark.parametrize(
    "attention_mask",
    [lambda: None, lambda: torch.ones(4, 80), lambda: torch.zeros(4, 80)],
    ids=["none", "ones", "zeros"],
)
def test_masks_that_transformers_leaves_out(attention_mask):
    assert_near(masked_step(attention_mask), 1e-4)


def test_masks_of_unknown_values_are_made():
    plain = ms.memory.predict(masked_step(lambda: None)).peak
    build = masked_step(lambda: (torch.rand(4, 80) < 0.5).long())
    padded = ms.memory.predict(masked_step(lambda: torch.rand(4, 80).round().long())).peak
    assert padded == pytest.approx(tracked(build).peak, rel=0.01)
    assert padded > plain


def padded():
    mask = torch.ones(4, 80, dtype=torch.long)
    mask[:, 40:] = 0
    return mask


@pytest.mark.parametrize("mask", [padded(), torch.ones(4, 80, dtype=torch.long)], ids=str)
def test_padding_of_a_batch_that_is_there(mask):
    assert_near(masked_step(lambda: mask), 1e-3)


@pytest.mark.parametrize(
    "test",
    [
        lambda mask: mask.bool().all(),
        lambda mask: (mask == 1).all(),
        lambda mask: not (mask == 0).any(),
        lambda mask: mask.sum() == mask.numel(),
        lambda mask: mask.min() > 0,
    ],
)
@pytest.mark.parametrize("is_padded", [False, True])
def test_what_is_left_out_without_padding(test, is_padded):
    mask = padded() if is_padded else torch.ones(4, 80, dtype=torch.long)
    model = nn.Linear(4, 4)

    def step():
        more = torch.empty(0 if test(mask) else 1 << 20)
        model(torch.ones(2, 4)).sum().backward()
        model.zero_grad()
        del more

    peak = ms.memory.predict(lambda: (model, None, step)).peak
    assert (peak >= 1 << 22) is is_padded


def test_no_warning_of_padding_that_only_fake_tokens_have():
    library("transformers")
    heard = []

    class Hears(logging.Handler):
        def emit(self, record):
            heard.append(record.getMessage())

    def build():
        entry = zoo.ENTRIES["deberta-v2"]
        model = entry.build()
        model.config.pad_token_id = 1  # which fake tokens are taken to be
        optimizer = torch.optim.AdamW(model.parameters())
        loss = entry.batch(model)
        return model, optimizer, lambda: loss().backward()

    logger, handler = logging.getLogger("transformers.modeling_utils"), Hears()
    logger.addHandler(handler)
    try:
        assert_near(build, 1e-2)
    finally:
        logger.removeHandler(handler)
    assert not heard


@pytest.mark.parametrize("layout", [(0, 3, 1, 2), (0, 2, 3, 1), (0, 1, 2, 3)])
@pytest.mark.parametrize("shape", [(4, 8, 1, 1), (4, 1, 1, 8), (2, 1, 3, 5), (2, 4, 3, 5)])
@pytest.mark.parametrize("name", share(STRIDED, 2))
def test_strides_are_those_of_steps(name, layout, shape):
    operator = STRIDED[name]

    def strides():
        x = torch.ones([shape[i] for i in layout]).permute([layout.index(i) for i in range(4)])
        assert x.shape == shape
        return operator(x).stride()

    assert on_fakes(strides) == strides()


@pytest.mark.parametrize("std", [0.02, 1.0])
@pytest.mark.parametrize(("a", "b"), [(-2.0, 2.0), (-0.04, 0.04)])
def test_truncated_normals_end(std, a, b):
    def build():
        model = nn.Linear(8, 8)
        nn.init.trunc_normal_(model.weight, std=std, a=a, b=b)
        return model, None, lambda: model(torch.ones(2, 8)).sum().backward()

    assert ms.memory.predict(build).peak > 0


def test_a_value_that_is_written_over_is_not_known_any_more():
    def build():
        model = nn.Linear(4, 4)

        def step():
            flag = torch.zeros(1)
            flag.copy_(torch.rand(1) + 1)
            made = torch.empty(1 << 20 if flag.item() else 1)
            model(torch.ones(2, 4)).sum().backward()
            model.zero_grad()
            del made

        return model, None, step

    assert 1 << 22 <= ms.memory.predict(build).peak < (1 << 22) + 4096
