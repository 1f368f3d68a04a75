"""Which cards a build has kernels for, and what is said at import where it has none."""

# ruff: noqa: N802  the names of a library in C

import ctypes
import subprocess
import sys

import pytest
from sampling import share

from memsave_ext import _cards, _native
from memsave_ext._cards import Card, runs_on, without_kernels

T4, A100, A10 = Card("T4", (7, 5)), Card("A100", (8, 0)), Card("A10", (8, 6))
BLACKWELL = Card("B200", (10, 0))


@pytest.mark.parametrize(
    ("archs", "runs", "not_there"),
    [
        ("8.0", [(8, 0), (8, 6), (8, 9)], [(7, 5), (9, 0), (10, 0)]),
        ("8.6", [(8, 6), (8, 9)], [(8, 0), (9, 0)]),
        ("8.0;9.0+PTX", [(8, 0), (8, 9), (9, 0), (10, 0), (12, 0)], [(7, 5)]),
        ("8.0+PTX 9.0", [(8, 0), (9, 0), (12, 0)], [(7, 5)]),
        ("9.0a", [(9, 0)], [(8, 0), (10, 0)]),
        ("7.5;8.0;8.6;8.9;9.0;10.0;12.0+PTX", [(7, 5), (8, 9), (10, 3), (12, 1)], [(7, 0)]),
        ("Ampere", [(8, 0), (7, 5)], []),
    ],
)
def test_what_runs_where(archs, runs, not_there):
    """Machine code within a major version, PTX on all that come after."""
    assert [card for card in runs + not_there if runs_on(archs, card)] == runs


def info(archs, decision="memsave_ext: C++ and CUDA build for it."):
    return {"cuda": archs is not None, "archs": archs, "decision": decision}


def test_a_list_that_lacks_the_card_is_said():
    said = without_kernels(info("8.0;9.0+PTX"), [T4, T4])
    assert "built for 8.0;9.0+PTX, which does not run on T4 (sm_75)" in said
    assert "TORCH_CUDA_ARCH_LIST='7.5'" in said
    assert without_kernels(info("8.0;9.0+PTX"), [T4, A10]) == ""  # one for pictures, perhaps
    assert without_kernels(info("8.0;9.0+PTX"), []) == ""
    assert "'7.5;10.0'" in without_kernels(info("8.0"), [T4, BLACKWELL])


def test_a_build_without_cuda_is_said_unless_that_was_asked_for():
    missing = "memsave_ext: C++ build without CUDA (nvcc was not found (set CUDA_HOME))."
    said = without_kernels(info(None, missing), [A100])
    why = "without CUDA (nvcc was not found (set CUDA_HOME))"
    assert f"{why}, so that on A100 (sm_80) it runs with torch's own operators" in said
    asked_for = "memsave_ext: C++ build without CUDA (MEMSAVE_EXT_CUDA=0)."
    assert without_kernels(info(None, asked_for), [A100]) == ""
    assert without_kernels(info(None, missing), []) == ""


class Nvml:
    """Two cards, in place of the driver's library."""

    names = (b"A100", b"T4")
    capabilities = ((8, 0), (7, 5))

    def nvmlInit_v2(self):
        return 0

    def nvmlDeviceGetCount_v2(self, count):
        count._obj.value = 2
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index, device):
        device._obj.value = index + 1
        return 0

    def nvmlDeviceGetName(self, device, name, size):
        assert size >= 96  # NVML_DEVICE_NAME_V2_BUFFER_SIZE
        name.value = self.names[device.value - 1]
        return 0

    def nvmlDeviceGetCudaComputeCapability(self, device, major, minor):
        major._obj.value, minor._obj.value = self.capabilities[device.value - 1]
        return 0


def test_the_driver_is_asked(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Nvml())
    assert _cards.cards() == [A100, T4]
    monkeypatch.setattr(Nvml, "nvmlInit_v2", lambda self: 9)  # there is a library, and no driver
    assert _cards.cards() == []
    monkeypatch.delattr(Nvml, "nvmlInit_v2")
    assert _cards.cards() == []


def test_no_driver(monkeypatch):
    def missing(name):
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert _cards.cards() == []


@pytest.mark.skipif(not _native.available, reason="in pure Python nothing is missing")
@pytest.mark.parametrize(("cuda", "warned"), share([("13.0", True), (None, False)], 2))
def test_it_is_said_at_import(cuda, warned):
    """Where torch is a CUDA build."""
    program = f"""
import json, sys, torch, types, warnings
package = types.ModuleType("memsave_ext")  # without what its __init__ imports
package.__path__ = [{str(_native._FOLDER)!r}]
sys.modules["memsave_ext"] = package
from memsave_ext import _cards

torch.version.cuda = {cuda!r}
_cards.cards = lambda: [_cards.Card("A100", (8, 0))]
of_this_build = json.loads
decision = "memsave_ext: C++ build without CUDA (nvcc was not found)."
json.loads = lambda text: {{**of_this_build(text), "cuda": False, "decision": decision}}
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    from memsave_ext import _native
assert _native.available
print([str(w.message) for w in caught if w.category is RuntimeWarning])
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    said = "built without CUDA (nvcc was not found), so that on A100 (sm_80) it runs with torch"
    assert (said in done.stdout) == warned
    assert (done.stdout.strip() == "[]") != warned
