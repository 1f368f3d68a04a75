"""The sample of cases that runs without --full (tests/sampling.py)."""

import itertools

import pytest
import sampling

from memsave_ext import _native

A, B, C = range(3), "pqr", (True, False)


@pytest.mark.parametrize("a", A)
@pytest.mark.parametrize(("b", "again"), [(b, b) for b in B])
@pytest.mark.parametrize("c", C)
@pytest.mark.parametrize(
    "d", ["runs", pytest.param("never", marks=pytest.mark.skipif(True, reason="a sample of 1"))]
)
def test_a_sample_has_every_value(request, a, b, again, c, d):
    mine = [i for i in request.session.items if i.originalname == request.node.originalname]
    if any("::" in argument for argument in request.config.args):
        return  # nothing is left out of what is named
    values = [
        (i.callspec.params["a"], i.callspec.params["b"], i.callspec.params["c"]) for i in mine
    ]
    assert sorted({v[0] for v in values}) == [*A] and sorted({v[1] for v in values}) == [*B]
    if sampling.full:
        assert len(mine) == 2 * 18 and {*values} == {*itertools.product(A, B, C)}
        return
    assert {i.callspec.params["d"] for i in mine} == {"runs"} and {v[2] for v in values} == {*C}
    assert len(mine) < 18 if _native.available else len(mine) == 3
    pairs = {pair for v in values for pair in itertools.combinations(enumerate(v), 2)}
    assert len(pairs) == 9 + 6 + 6 or not _native.available


@pytest.mark.full
def test_what_is_marked_runs_in_full_alone(request):
    assert sampling.full or any("::" in argument for argument in request.config.args)


def test_some_of_many(monkeypatch):
    monkeypatch.setattr(sampling, "full", False)
    assert sampling.some(range(10), 3) == [0, 4, 9]
    assert sampling.some("abc", 5) == ["a", "b", "c"] and sampling.some("abc", 1) == ["a"]
    assert sampling.some("abc", 2) == ["a", "c"]
    monkeypatch.setattr(sampling, "full", True)
    assert sampling.some(range(10), 3) == [*range(10)]
