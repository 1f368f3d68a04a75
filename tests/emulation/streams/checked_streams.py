"""A plugin of pytest: the tests have the device, and whatever they do, nothing may be unordered."""

import fake_cuda  # before torch
import pytest

SEEDS = 50


def pytest_generate_tests(metafunc):
    if "seed" in metafunc.fixturenames:
        metafunc.parametrize("seed", range(SEEDS))


@pytest.fixture(autouse=True)
def _in_order():
    fake_cuda.take_failures()
    yield
    failures = fake_cuda.take_failures()
    assert not failures, "\n".join(failures)
