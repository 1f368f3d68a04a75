"""``remat``: a block in which autograd keeps less."""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType

from .. import _native

_VERDICTS = ("dropped", "input", "not computable again", "bound by arithmetic", "no gain")


@dataclass(frozen=True)
class Kept:
    """What became of the memory that autograd saved in a block."""

    bytes: dict[str, int]  # by verdict
    tensors: dict[str, int]
    recomputed_bytes: int
    recomputed_operators: int
    recompute_seconds: float


class remat:  # noqa: N801, a context manager is used like a function
    """A block whose operators are recorded: of the tensors that autograd saves in it, those that
    are cheap to compute again from what is kept are dropped, and computed again in backward, one
    operator at a time. No line of the model changes; gradients are those of the plain run, bit for
    bit.

    Raises:
        RuntimeError: without the compiled part, which records; or entered a second time.
    """

    def __init__(self, *, _everything: bool = False) -> None:
        if _native.module is None:
            raise RuntimeError("remat needs the compiled part of memsave_ext")
        self._block = _native.module.RematBlock(_everything)
        self._entered = False

    def __enter__(self) -> remat:
        if self._entered:
            raise RuntimeError("remat: a block is entered once; make another")
        self._entered = True
        self._block.enter()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._block.leave()

    def kept(self) -> Kept:
        """Bytes and tensors so far, all of the block."""
        bytes_, tensors = dict.fromkeys(_VERDICTS, 0), dict.fromkeys(_VERDICTS, 0)
        for of_bytes, of_tensors, _ in self._block.sums().values():
            for name, size, count in zip(_VERDICTS, of_bytes, of_tensors, strict=True):
                bytes_[name] += size
                tensors[name] += count
        return Kept(bytes_, tensors, *self._block.again())
