"""A plugin of pytest: the tests have the device, and whatever they do, nothing may be unordered."""

import os

import fake_cuda  # before torch
import pytest

STDERR = os.fdopen(os.dup(2), "w")  # as it is before pytest takes it


def pytest_generate_tests(metafunc):
    is_case = metafunc.module.__name__.startswith("cases_")
    if is_case and "seed" in metafunc.fixturenames:
        metafunc.parametrize("seed", range(int(os.environ["MEMSAVE_EXT_SEEDS"])))


@pytest.fixture(autouse=True)
def _in_order():
    fake_cuda.take_failures()
    yield
    failures = fake_cuda.take_failures()
    assert not failures, "\n".join(failures)
