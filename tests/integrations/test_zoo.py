"""The zoo's models can be trained: each can be built, and its loss reaches its parameters."""

import pytest
import zoo

LIBRARIES = ()  # conftest.py then runs these in one thread


@pytest.mark.parametrize("name", zoo.ENTRIES)
def test_models(name):
    entry = zoo.ENTRIES[name]
    model = entry.build()
    loss = entry.batch(model)()
    loss.backward()
    assert loss.isfinite()
    reached = [p.grad is not None for p in model.parameters()]
    assert sum(reached) >= len(reached) - 1  # an embedding of padding, or of masks
