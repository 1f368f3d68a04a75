"""How much memory a device has for this process."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..dry_run.child import is_dry_run

_UNCACHED = "PYTORCH_NO_CUDA_MEMORY_CACHING"  # torch reads it once, whatever its value is
_UNLIMITED = 1 << 62  # what version 1 of control groups says then, in whole pages, is more


class DeviceMemory(NamedTuple):
    """Bytes that this process may have in all, and those of them that it may still take."""

    limit: int
    free: int


def device_memory(device: torch.device) -> DeviceMemory:
    """Returns what there is of a device's memory.

    CPU: the least of physical memory, the process's limits of address space and data, and those of
    its control groups (version 1 and 2) and of the groups around them. Page cache that the system
    gives back counts as free, and so does what malloc keeps to give out again. CUDA: what the
    device has free, and what torch's caching allocator has; of that, pieces of segments that are in
    use elsewhere are neither free nor given out. Where the process may have only a share of the
    device, the rest of it does not count.

    Raises:
        RuntimeError: it is not known: the device is another one or is not there, or the system has
            no ``/proc``.
    """
    if device.type == "cpu":
        limit, free = _of_host(Path("/"))
        return DeviceMemory(limit, min(free + _kept_by_malloc(), limit))
    if device.type == "cuda" and is_dry_run() and _asked is not None:
        return _asked
    if device.type == "cuda" and torch.cuda.is_available():
        return _of_cuda(device)
    raise RuntimeError(f"the memory of device {str(device)!r} is not known here")


def check_counts(who: str, device: torch.device) -> None:
    """Raises RuntimeError of ``who`` where torch counts no memory of a device."""
    if device.type == "cuda" and _UNCACHED in os.environ:
        raise RuntimeError(
            f"{who}: torch counts no memory of CUDA without its caching allocator, which the "
            f"environment variable {_UNCACHED} switches off, as for compute-sanitizer: unset it"
        )


class Card(NamedTuple):
    """What a CUDA device says of itself."""

    properties: Any  # as torch.cuda.get_device_properties() returns them
    memory: tuple[int, int]  # bytes, as torch.cuda.mem_get_info() returns them


_asked: DeviceMemory | None = None
_card: Card | None = None


def ask_for_child() -> None:
    """Asks the present CUDA device, where one is in use: a child process cannot."""
    global _asked, _card
    _asked = _card = None
    if torch.cuda.is_initialized():
        _asked = device_memory(torch.device("cuda"))
        _card = Card(torch.cuda.get_device_properties(), torch.cuda.mem_get_info())


def card_of_child() -> Card | None:
    """In a child: returns what was asked; None where no CUDA device was in use."""
    return _card


def _of_cuda(device: torch.device) -> DeviceMemory:
    index = torch.cuda.current_device() if device.index is None else device.index
    free, total = torch.cuda.mem_get_info(index)
    stats = torch.cuda.memory_stats(index)

    def now(name: str) -> int:
        return int(stats.get(f"{name}.all.current", 0))

    reserved, allocated = now("reserved_bytes"), now("allocated_bytes")
    allowed = int(torch.cuda.get_per_process_memory_fraction(index) * total)
    free = max(min(free, allowed - reserved), 0)
    free += max(reserved - allocated - now("inactive_split_bytes"), 0)
    return DeviceMemory(allocated + free, free)


def _of_host(root: Path) -> DeviceMemory:
    """``root``: the folder that has ``proc`` and what is mounted."""
    try:
        bounds = [_physical(root), *_limits_of_process(root), *_limits_of_groups(root)]
    except OSError as error:
        raise RuntimeError(f"the memory of device 'cpu' is not known here: {error}") from error
    return DeviceMemory(min(b.limit for b in bounds), max(min(b.free for b in bounds), 0))


class _MallInfo(ctypes.Structure):
    """As mallinfo2(3) has it."""

    _fields_ = (
        ("before", ctypes.c_size_t * 4),
        ("hblkhd", ctypes.c_size_t),  # bytes of blocks that are mapped
        ("between", ctypes.c_size_t * 2),
        ("uordblks", ctypes.c_size_t),  # bytes of other blocks in use
        ("fordblks", ctypes.c_size_t),  # bytes of free blocks
        ("keepcost", ctypes.c_size_t),
    )


@functools.cache
def _mallinfo() -> Any:
    """The function of the C library; None where it has none (glibc before 2.33, and others)."""
    function = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if function is not None:
        function.restype = _MallInfo
    return function


def _kept_by_malloc() -> int:
    function = _mallinfo()
    return 0 if function is None else int(function().fordblks)


def _physical(root: Path) -> DeviceMemory:
    fields = _fields(root / "proc/meminfo")
    return DeviceMemory(fields["MemTotal"], fields["MemAvailable"])


def _limits_of_process(root: Path) -> Iterator[DeviceMemory]:
    import resource  # Windows has none, and no /proc

    fields = _fields(root / "proc/self/status")
    for which, used in ((resource.RLIMIT_AS, "VmSize"), (resource.RLIMIT_DATA, "VmData")):
        limit, _ = resource.getrlimit(which)
        if limit != resource.RLIM_INFINITY:
            yield DeviceMemory(limit, limit - fields[used])


def _fields(path: Path) -> dict[str, int]:
    """Those lines of a file that are ``name: number kB``, in bytes."""
    lines = (line.split() for line in path.read_text().splitlines())
    return {words[0][:-1]: 1024 * int(words[1]) for words in lines if words[2:] == ["kB"]}


def _limits_of_groups(root: Path) -> Iterator[DeviceMemory]:
    # By version; see cgroups(7).
    names = (
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ("memory.max", "memory.current", "inactive_file"),
    )
    for version, folder in _groups(root):
        of_limit, of_usage, of_cache = names[version - 1]
        try:
            limit = (folder / of_limit).read_text().strip()
            if limit == "max" or int(limit) >= _UNLIMITED:
                continue
            used = int((folder / of_usage).read_text())
            lines = (folder / "memory.stat").read_text().splitlines()
        except OSError:  # the root has no limit, and other groups may be out of sight
            continue
        cache = next((int(line.split()[1]) for line in lines if line.split()[0] == of_cache), 0)
        yield DeviceMemory(int(limit), int(limit) - max(used - cache, 0))


def _groups(root: Path) -> Iterator[tuple[int, Path]]:
    """The version and folder of this process's control groups of memory, and of those around."""
    own = {}
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            own[2] = path
        elif "memory" in controllers.split(","):
            own[1] = path
    for line in (root / "proc/self/mountinfo").read_text().splitlines():
        mount, _, system = line.partition(" - ")
        kind, _, options = system.split(" ", 2)
        version = {"cgroup": 1, "cgroup2": 2}.get(kind)
        if version not in own or (version == 1 and "memory" not in options.split(",")):
            continue
        base, place = mount.split()[3:5]
        top = root / place.lstrip("/")
        inside = os.path.relpath(own[version], base)
        # A group outside of what is mounted here, as of a container that has no name space.
        folder = top if inside.startswith("..") else Path(os.path.normpath(top / inside))
        while True:
            yield version, folder
            if folder == top:
                break
            folder = folder.parent
