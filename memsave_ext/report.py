"""Reports what is installed, what it was built for, and which path each feature takes here.

Run it with ``python -m memsave_ext.report``, and put its output into bug reports.
"""

from __future__ import annotations

import platform
import warnings

import torch

from . import _cards, _native, _parts
from ._version import __version__

_KERNELS = "native on CPU and, where built, CUDA"

# feature -> (its part, path with the native part, path without it)
PATHS = {
    "checkpoint": ("checkpoint", "native", "pure Python"),
    "CheckpointFunction": ("checkpoint", "native", "pure Python"),
    "remat": ("remat", "native", "keeps everything"),
    "BatchNorm": ("batch_norm", _KERNELS, "torch operators"),
    "Adam, SGD, Lion": ("adam", _KERNELS, "torch operators"),
    "in_backward": (
        "adam", "native hooks, the optimizer's own step", "hooks in Python, its own step"
    ),
    "loss head": ("loss_head", _KERNELS, "torch operators"),
    "memory tracking": ("memory", "native", "pure Python, torch's profiler"),
    "prediction": ("remat", "fake tensors, native plans of remat", "fake tensors"),
}  # fmt: skip


def report() -> str:
    """Return the report as text: versions, native and CUDA state, one line per feature."""
    yes = _native.available
    info = _native.build_info
    versions = {
        "memsave_ext": __version__,
        "built for": _built_for(),
        "running": f"torch {torch.__version__}, Python {platform.python_version()}",
        "platform": platform.platform(),
        "archs": info.get("archs") or "none",
        "decision": info.get("decision", "not recorded"),
    }
    paths = {feature: _path(*feature_path) for feature, feature_path in PATHS.items()}
    state = "native: yes" if yes else f"native: no ({_native.reason})"
    off = ", ".join(_parts.disabled()) or "nothing"
    lines = [state, f"off (MEMSAVE_EXT_DISABLE, disable()): {off}", *_cuda()]
    parts = [_table(versions), "\n".join(lines), _table({"feature": "path", **paths})]
    return "\n\n".join(parts)


def _path(part: str, native: str, python: str) -> str:
    if native == _KERNELS and _native.available:
        off = [d for d in _parts.DEVICES if _parts.runs_in_python(part, d)]
        if len(off) == 1:
            return f"{native}; {python} on {off[0].upper()}, where it is off"
        return f"{python}: it is off" if off else native
    return native if _parts.native(part) else python


def _built_for() -> str:
    info = _native.build_info
    if not info:
        return "nothing: no build info"
    cuda = f"CUDA {info['torch_cuda']}" if info.get("cuda") else "no CUDA"
    return f"torch {info['torch']}, Python {info['python']}, {cuda}, {info['compiler']}"


def _cuda() -> list[str]:
    """Returns a line on CUDA, and one per visible device on whether this build's kernels run."""
    built = bool(_native.build_info.get("cuda"))
    # The driver's library counts devices that torch cannot use, as with a driver that is too old.
    reason = why_no_cuda()
    count = 0 if reason else torch.cuda.device_count()
    devices = f"{count} device{'' if count == 1 else 's'}" + (f" ({reason})" if reason else "")
    lines = [f"CUDA: built {'with' if built else 'without'} it; torch sees {devices}"]
    for index in range(count):
        name = torch.cuda.get_device_name(index)
        arch = _cards.sm(torch.cuda.get_device_capability(index))
        lines.append(f"  cuda:{index} {name} ({arch}): {_probe(index)}")
    return lines


def why_no_cuda() -> str:
    """Returns why torch can use no CUDA device; empty where it can."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is what is returned
        if torch.cuda.is_available():
            return ""
        if torch.version.hip is not None:
            return "torch is built for ROCm"
        if torch.version.cuda is None:
            return "torch is built without CUDA"
        try:
            torch.cuda.init()
        except Exception as error:  # of a driver, in torch's words
            return str(error).partition("\n")[0].partition(". ")[0]
    return "there is none"


def _probe(index: int) -> str:
    if _native.module is None or not _native.module.with_cuda:
        return "no kernels of this package in use"
    try:
        with torch.cuda.device(index):
            arch = _native.module.probe_cuda()
    except RuntimeError as error:
        return f"kernels do not run ({error})"
    return f"kernels run, compiled for sm_{arch // 10}"


def _table(rows: dict[str, str]) -> str:
    width = max(map(len, rows)) + 2
    return "\n".join(f"{name:<{width}}{value}" for name, value in rows.items())


def main() -> None:
    print(report())


if __name__ == "__main__":
    main()
