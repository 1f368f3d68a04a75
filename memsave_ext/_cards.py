"""The CUDA cards of this machine, and whether a build has kernels for them.

The driver's management library (NVML) is asked, not CUDA: that would take a second, memory of each
card, and the use of CUDA in processes that are forked later.
"""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass
from typing import Any

_ARCH = re.compile(r"(\d+)\.(\d)([af]?)(\+PTX)?")


@dataclass(frozen=True)
class Card:
    name: str
    capability: tuple[int, int]  # as torch.cuda.get_device_capability() has it


def cards() -> list[Card]:
    """Returns those of the machine, also where CUDA_VISIBLE_DEVICES hides them; none where the
    driver cannot be asked."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return []
    try:
        if nvml.nvmlInit_v2() != 0:
            return []
        count = ctypes.c_uint()
        nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
        return [card for i in range(count.value) if (card := _card(nvml, i)) is not None]
    except AttributeError:  # of a driver from before 2011
        return []


def _card(nvml: Any, index: int) -> Card | None:
    device, name = ctypes.c_void_p(), ctypes.create_string_buffer(96)
    major, minor = ctypes.c_int(), ctypes.c_int()
    if (
        nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)) != 0
        or nvml.nvmlDeviceGetName(device, name, len(name)) != 0
        or nvml.nvmlDeviceGetCudaComputeCapability(device, ctypes.byref(major), ctypes.byref(minor))
        != 0
    ):
        return None
    return Card(name.value.decode(errors="replace"), (major.value, minor.value))


def sm(capability: tuple[int, int]) -> str:
    """Returns nvcc's name of a card's architecture, such as "sm_90"."""
    major, minor = capability
    return f"sm_{major}{minor}"


def runs_on(archs: str, capability: tuple[int, int]) -> bool:
    """Returns whether kernels that were compiled for ``archs`` run on a card.

    Machine code runs on cards of its major version that are not older, PTX on all that are not
    older. See "Binary compatibility" and "PTX compatibility" in the CUDA C++ programming guide.

    Args:
        archs: as TORCH_CUDA_ARCH_LIST has them, such as "8.0;9.0+PTX". What is not known among
            them, such as "Ampere", may run everywhere.
        capability: of the card.
    """
    for arch in re.split(r"[;\s]+", archs.strip()):
        known = _ARCH.fullmatch(arch)
        if known is None:
            return True
        of = int(known[1]), int(known[2])
        if known[3] == "a":  # its instructions are of this architecture alone
            if of == capability:
                return True
        elif of <= capability and (known[4] or of[0] == capability[0]):
            return True
    return False


def without_kernels(build_info: dict[str, Any], here: list[Card]) -> str:
    """Returns a sentence where a build has kernels for none of the cards that are here.

    Args:
        build_info: of the compiled file that is in use.
        here: cards; empty: nothing is missing.
    """
    if not here or "MEMSAVE_EXT_CUDA=0" in build_info.get("decision", ""):
        return ""
    listed = ", ".join(dict.fromkeys(f"{card.name} ({sm(card.capability)})" for card in here))
    if not build_info.get("cuda"):
        why = re.search(r"\((.*)\)", build_info.get("decision", ""))
        return (
            f"memsave_ext was built without CUDA{f' ({why[1]})' if why else ''}, so that on "
            f"{listed} it runs with torch's own operators, and its optimizers not at all, unless "
            "MEMSAVE_EXT_DISABLE=adam.cuda has them do so. Rebuild it with a CUDA toolkit of "
            "torch's version, or with MEMSAVE_EXT_CUDA=0 if you do not want its CUDA kernels."
        )
    archs = build_info.get("archs") or ""
    if any(runs_on(archs, card.capability) for card in here):
        return ""
    wanted = ";".join(dict.fromkeys(".".join(map(str, card.capability)) for card in here))
    return (
        f"memsave_ext was built for {archs}, which does not run on {listed}. Rebuild it with "
        f"TORCH_CUDA_ARCH_LIST='{wanted}', or set MEMSAVE_EXT_NATIVE=0 to run in pure Python."
    )
