import gc

import pytest
import torch
from libraries import library


@pytest.fixture(autouse=True, scope="module")
def _libraries(request):
    """Imports what a module names in LIBRARIES; not before, for every worker of pytest-xdist
    collects every test, and this takes seconds.

    Tiny models would wait for threads, and trainers collect garbage among all that was imported.
    """
    for name in getattr(request.module, "LIBRARIES", ()):
        setattr(request.module, name.rpartition(".")[2], library(name))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
    torch.set_num_threads(threads)
