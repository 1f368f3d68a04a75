"""Has all processes of a training take one technique, or raise."""

from __future__ import annotations

import hashlib
import pickle
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..shared.dtensor import is_dtensor
from .ranks import is_wrapped

if dist.is_available():
    from torch.distributed import distributed_c10d

_LOOK = 0.1  # the longest time, in seconds, between two looks for what others tell


class _Found(Protocol):
    """What :class:`Fits` has for :func:`agreed`, whose file imports this one."""

    @property
    def cheapest(self) -> Any: ...

    def sentence(self, who: str) -> str: ...


Found = TypeVar("Found", bound=_Found)


class Meeting:
    """Where processes tell each other values, each as many times as the others.

    Values go through the store that the process group was made with, not through collectives: a
    process that raises leaves its error there and waits for nobody, no collective of the training
    meets another one, and others wait no longer than the store's time limit, which is the group's.

    Args:
        who: the function that errors are of.
        store: what all have.
        rank: of this process.
        ranks: of all that come, in order. The first gathers what each tells.
    """

    def __init__(self, who: str, store: Any, rank: int, ranks: Sequence[int]) -> None:
        self.who, self.rank, self.ranks = who, rank, ranks
        self._limit = store.timeout.total_seconds()
        of_whom = hashlib.sha256(repr(list(ranks)).encode()).hexdigest()[:16]
        self._store: Any = distributed_c10d.PrefixStore(f"memsave_ext/{of_whom}", store)
        self._is_over = False  # an error is told already

    @property
    def is_first(self) -> bool:
        """Whether this process is the one that prints."""
        return self.rank == self.ranks[0]

    def all_gather(self, value: Any) -> list[Any]:
        """Returns what each process tells, in the order of their ranks.

        Raises:
            RuntimeError: another process has raised an error, or has not come in time.
            torch.OutOfMemoryError: another process has raised one.
        """
        number = self._put("value", value)
        if self.is_first:
            self._gather(number)
        # The first may come later than this process, and waits for the last as long again.
        everything = self._get(f"{number}/all", 1 if self.is_first else 2)
        if everything is None:
            everything = ("error", self._late(self.ranks[0], 2), False)
        if everything[0] == "value":
            found: list[Any] = everything[1]
            return found
        self._is_over = True
        _, text, is_memory = everything
        raise (torch.OutOfMemoryError if is_memory else RuntimeError)(f"{self.who}: {text}")

    @contextmanager
    def errors_told(self) -> Iterator[None]:
        """Tells the others what is raised inside, where each waits in :meth:`all_gather`."""
        try:
            yield
        except BaseException as error:
            if not self._is_over:
                self._is_over = True
                with suppress(RuntimeError):  # the store is gone with the first process
                    number = self._put("error", error)
                    if self.is_first:
                        self._store.set(f"{number}/all", pickle.dumps(self._error(error)))
            raise

    def _put(self, kind: str, value: Any) -> int:
        number = int(self._store.add(f"calls/{self.rank}", 1))
        message = self._error(value) if kind == "error" else (kind, value)
        self._store.set(f"{number}/{self.rank}", pickle.dumps(message))
        return number

    def _error(self, error: BaseException) -> tuple[str, str, bool]:
        text = f"{type(error).__name__}: {error}".rstrip(": ")
        is_memory = isinstance(error, torch.OutOfMemoryError)
        return "error", f"rank {self.rank} has raised {text}", is_memory

    def _gather(self, number: int) -> None:
        values: list[Any] = []
        answer: Any = ("value", values)
        end = time.monotonic() + self._limit
        for rank in self.ranks:
            message = self._get(f"{number}/{rank}", 1, end)
            if message is None:
                answer = ("error", self._late(rank, 1), False)
                break
            if message[0] == "error":
                answer = message
                break
            values.append(message[1])
        self._store.set(f"{number}/all", pickle.dumps(answer))
        if len(values) == len(self.ranks):  # all have read what came before
            for key in (f"{number - 1}/all", *(f"{number}/{rank}" for rank in self.ranks)):
                self._store.delete_key(key)

    def _get(self, key: str, limits: int, end: float | None = None) -> Any:
        """Returns what is told by this key; None where that does not come."""
        end = time.monotonic() + limits * self._limit if end is None else end
        pause = 0.001
        while not self._store.check([key]):
            if time.monotonic() > end:
                return None
            time.sleep(pause)
            pause = min(2 * pause, _LOOK)
        return pickle.loads(self._store.get(key))

    def _late(self, rank: int, limits: int) -> str:
        return (
            f"rank {rank} has not called it within {limits * self._limit:.0f} s, the time limit of "
            "the process group. All processes that train the model must"
        )


@contextmanager
def together(who: str, model: Any) -> Iterator[Meeting | None]:
    """Tells the processes that a model is wrapped for what one of them raises inside; see
    :func:`meeting_of`."""
    _reshard(model)
    meeting = meeting_of(who, model)
    with nullcontext() if meeting is None else meeting.errors_told():
        yield meeting


def meeting_of(who: str, model: Any) -> Meeting | None:
    """Returns where the processes meet that a model is wrapped for; None for one process.

    What is no model is taken to be one that is wrapped, as it is in the other processes.

    Raises:
        ValueError: the processes are not there.
    """
    if isinstance(model, nn.Module) and not is_wrapped(model):
        return None
    if not dist.is_available():
        return None
    if not dist.is_initialized():
        if not isinstance(model, nn.Module):
            return None
        raise ValueError(
            f"{who}: the model is wrapped for several processes, and this one is in no process "
            "group, or in none any more: call torch.distributed.init_process_group() before the "
            "model is wrapped, and fit it before destroy_process_group()"
        )
    if dist.get_backend() == "fake":
        raise ValueError(
            f"{who}: the other processes of torch's fake process group are not there. "
            "memory.fits(build, budget, devices=...) predicts without them"
        )
    ranks = _ranks_of(model) if isinstance(model, nn.Module) else None
    everyone = list(range(dist.get_world_size()))
    store = distributed_c10d._get_default_store()
    return Meeting(who, store, dist.get_rank(), ranks or everyone)


def _reshard(model: Any) -> None:
    """Has FSDP2 let go of what an evaluation has gathered and left in the place of shards."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    for module in model.modules() if fsdp and isinstance(model, nn.Module) else ():
        if isinstance(module, fsdp.FSDPModule):
            module.reshard()


def _ranks_of(model: nn.Module) -> list[int] | None:
    """Returns the ranks of the processes that train a model; None where parameters are of several
    meshes, which may be others in another process."""
    sets = set()
    if isinstance(model, DistributedDataParallel):
        sets.add(tuple(sorted(dist.get_process_group_ranks(model.process_group))))
    for p in model.parameters():
        if is_dtensor(p):
            mesh: Any = p.device_mesh  # type: ignore[attr-defined]
            sets.add(tuple(sorted(mesh.mesh.flatten().tolist())))
    return list(sets.pop()) if len(sets) == 1 else None


def check_same(meeting: Meeting, settings: Mapping[str, Any]) -> None:
    """Raises ValueError, in all processes, where settings of one are not those of another."""
    of_all = meeting.all_gather(dict(settings))
    for name in settings:
        first, rank = of_all[0].get(name), meeting.ranks[0]
        for other, one in zip(meeting.ranks, of_all, strict=True):
            if one.get(name) != first:
                raise ValueError(
                    f"{meeting.who}: {name} must be the same in all processes, got {first!r} on "
                    f"rank {rank} and {one.get(name)!r} on rank {other}"
                )


def agreed(
    meeting: Meeting,
    first: Callable[[], Found],
    names: Sequence[str],
    only: Callable[[str], Found],
) -> Found:
    """Returns what this process found of the cheapest technique that fits in every process.

    All processes call it. They tell each other what fits, once where all have found the same.

    Args:
        meeting: where they do.
        first: searches in this process, and stops at the first that fits.
        names: of techniques, the cheapest first.
        only: tries one technique in this process.

    Raises:
        torch.OutOfMemoryError: none fits in every process.
        Exception: what :meth:`Meeting.all_gather` raises.
    """
    found = first()
    place = len(names) if found.cheapest is None else names.index(found.cheapest.name)
    while True:
        of_all = meeting.all_gather((place, found.cheapest is not None))
        places = [one[0] for one in of_all]
        candidate = max(places)
        if candidate == len(names):
            if found.cheapest is None:
                raise torch.OutOfMemoryError(found.sentence(meeting.who))
            raise torch.OutOfMemoryError(
                f"{meeting.who}: nothing fits on rank {meeting.ranks[places.index(candidate)]} of "
                "what the other processes could take, too. The step would run out of memory."
            )
        if min(places) == candidate and all(one[1] for one in of_all):
            return found
        if found.cheapest is None or place != candidate:
            found = only(names[candidate])
            place = candidate + (found.cheapest is None)
