import gc
import os
import sys

import pytest
import sampling
import torch
import turns
from hypothesis import settings
from torch.nn import parallel  # noqa: F401, loads torch.nn.parallel.replicate

import memsave_ext as ms
from memsave_ext import _native

# Machines are busy: no example has to end within a time.
settings.register_profile("memsave_ext", deadline=None)
settings.load_profile("memsave_ext")


def pytest_addoption(parser):
    parser.addoption(
        "--engine-hooks", action="store_true", help="run with use_engine_hooks(True) from the start"
    )
    parser.addoption(
        "--full", action="store_true", help="run every case of every test, not a sample of them"
    )


def pytest_configure(config):
    config.addinivalue_line("markers", "full: runs with --full alone")
    config.addinivalue_line("markers", "once: natively alone, but for --full: both do the same")
    config.addinivalue_line("markers", "each_value: a sample has each value, natively, too")
    config.addinivalue_line("markers", "without(case): there is no case of such values")
    sampling.full = config.getoption("--full")
    if "PYTEST_XDIST_WORKER" not in os.environ:
        named = config.args_source is pytest.Config.ArgsSource.ARGS
        turns.choose(everybody=sampling.full or named)
    if config.getoption("--engine-hooks"):
        ms.use_engine_hooks(True)
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))
    if workers > 1:
        # Threads of OpenMP spin while they wait: more of them than cores, and all are many times
        # slower.
        threads = max(1, _cores() // workers)
        torch.set_num_threads(threads)
        os.environ["OMP_NUM_THREADS"] = str(threads)  # of the processes that tests start


def pytest_report_header():
    turn = os.environ[turns.VARIABLE]
    if turn != "all":
        return f"turn {turn} of {turns.TURNS}: {turns.VARIABLE}, or the number of commits"


def pytest_ignore_collect(collection_path):
    return True if turns.is_others(collection_path) else None


def pytest_collection_modifyitems(config, items):
    items[:] = [item for item in items if not sampling.is_without(item)]
    # What is named one by one is run as named.
    if not sampling.full and not any("::" in argument for argument in config.args):
        left_out = ["full"] if _native.available else ["full", "once"]
        kept = [i for i in items if not any(map(i.get_closest_marker, left_out))]
        kept = sampling.sampled(kept)
        config.hook.pytest_deselected(items=list({*items} - {*kept}))
        items[:] = kept
    # The longest files first: at the end one worker would have one, and nothing be left for others.
    begins = {turns.TESTS / name: place for place, name in enumerate(turns.LONGEST)}
    items.sort(key=lambda item: begins.get(item.path, len(begins)))


@pytest.hookimpl(tryfirst=True)
def pytest_warning_recorded(warning_message):
    """The process that tells of the workers' warnings imports their classes: not peft's, which need
    what libraries.py does first."""
    if warning_message.category.__module__.partition(".")[0] == "peft":
        warning_message.message = UserWarning(str(warning_message.message))
        warning_message.category = UserWarning


def _cores():
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@pytest.fixture(scope="module", autouse=True)
def _what_is_there_stays():
    # Each tensor that other files have left costs each prediction time. Compiled ones stay, too.
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    # Nothing of what has been imported goes away, and to look through all of it takes longer than
    # most tests that collect garbage.
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _seed():
    # ``torch.manual_seed`` takes a millisecond where there is no GPU: it keeps the stack for later.
    if torch.cuda.is_available():
        torch.manual_seed(0)
    else:
        torch.default_generator.manual_seed(0)


@pytest.fixture
def few_techniques():
    """``fits`` and ``fit`` try few techniques; all with --full."""
    with sampling.few_techniques():
        yield


@pytest.fixture
def replicate_on_cpu(monkeypatch):
    """torch's replicate(), on devices that need not be there.

    The first replica has the model's own buffers, the others copies.
    """
    module = sys.modules["torch.nn.parallel.replicate"]

    def broadcast(tensors, devices, detach=False):
        return [[t if detach and not i else t.clone() for t in tensors] for i in devices]

    monkeypatch.setattr(module, "_get_device_index", lambda device, optional=False: device)
    monkeypatch.setattr(module, "_broadcast_coalesced_reshape", broadcast)
    return lambda net, count: module.replicate(net, range(count))
