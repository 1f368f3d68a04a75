import pytest
import torch

import memsave_ext as ms


def pytest_addoption(parser):
    parser.addoption(
        "--engine-hooks", action="store_true", help="run with use_engine_hooks(True) from the start"
    )


def pytest_configure(config):
    if config.getoption("--engine-hooks"):
        ms.use_engine_hooks(True)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
