import fake_cuda
import pytest
import torch

SEEDS = 50


def pytest_generate_tests(metafunc):
    if "seed" in metafunc.fixturenames:
        metafunc.parametrize("seed", range(SEEDS))


@pytest.fixture(autouse=True)
def _in_order():
    """Whatever a case does: nothing may be left unordered."""
    torch.manual_seed(0)
    fake_cuda.take_failures()
    yield
    assert fake_cuda.take_failures() == []
