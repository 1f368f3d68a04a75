"""memory.predict() of steps and models that look at values."""

import pytest
import torch
import zoo
from steps import assert_near, tracked
from torch import nn

import memsave_ext as ms


def masked_step(attention_mask):
    """``attention_mask`` makes what the model is called with beside the tokens."""

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


@pytest.mark.parametrize("std", [0.02, 1.0])
@pytest.mark.parametrize(("a", "b"), [(-2.0, 2.0), (-0.04, 0.04)])
def test_truncated_normals_end(std, a, b):
    def build():
        model = nn.Linear(8, 8)
        nn.init.trunc_normal_(model.weight, std=std, a=a, b=b)
        return model, None, lambda: model(torch.ones(2, 8)).sum().backward()

    assert ms.memory.predict(build).peak > 0
