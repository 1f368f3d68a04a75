"""What torch's caching allocator of CUDA reserves for a list of allocations and frees.

The rules are those of torch's CUDACachingAllocator.cpp with its default settings, for one stream,
and on a card with room: where it has none, cached segments are given back before an error. Sizes
are multiples of 512 bytes, as the allocator rounds them.
"""

from __future__ import annotations

from bisect import bisect_left, insort

_LEAST = 512  # bytes of a block
_SMALL = 1 << 20  # the largest size in the small pool
_SMALL_SEGMENT = 2 << 20
_LARGE_SEGMENT = 20 << 20  # from which sizes below the next one are cut
_LARGE_ALONE = 10 << 20  # larger ones have a segment of their own,
_ROUNDED = 2 << 20  # rounded up to a multiple of this


class _Block:
    __slots__ = "address", "after", "before", "is_free", "pool", "size"

    def __init__(self, address: int, size: int, pool: _Pool) -> None:
        self.address, self.size, self.pool = address, size, pool
        self.before: _Block | None = None  # neighbours in the segment
        self.after: _Block | None = None
        self.is_free = True


class _Pool:
    """Blocks of one segment each, cut into parts; with ``grows`` of one that grows at its end."""

    def __init__(self, is_small: bool, grows: bool) -> None:
        self._is_small, self._grows = is_small, grows
        self.reserved = 0
        self._end = 0  # the address where the next segment begins
        self._last: _Block | None = None  # at the end of the segment that grows
        self._free: list[tuple[int, int]] = []  # size and address, the smallest first
        self._by_address: dict[int, _Block] = {}  # those that are free

    def allocate(self, size: int) -> _Block:
        block = self._best(size) or (self._grown(size) if self._grows else self._segment(size))
        self._take(block)
        block.is_free = False
        left = block.size - size
        if left >= _LEAST if self._is_small or self._grows else left > _SMALL:
            rest = _Block(block.address + size, left, self)
            block.size = size
            self._link(rest, block, block.after)
            self._put(rest)
        return block

    def free(self, block: _Block) -> None:
        block.is_free = True
        for other in (block.before, block.after):
            if other is not None and other.is_free:
                self._take(other)
                block = self._joined(*((other, block) if other is block.before else (block, other)))
        self._put(block)

    def _best(self, size: int) -> _Block | None:
        """Returns the smallest that is large enough, the one at the end of a segment that grows
        last, whose size is what it can grow to."""
        place = bisect_left(self._free, (size, 0))
        fits = [self._by_address[address] for _, address in self._free[place : place + 2]]
        if len(fits) == 2 and fits[0] is self._last:
            return fits[1]
        return fits[0] if fits else None

    def _segment(self, size: int) -> _Block:
        if self._is_small:
            total = _SMALL_SEGMENT
        elif size < _LARGE_ALONE:
            total = _LARGE_SEGMENT
        else:
            total = -(-size // _ROUNDED) * _ROUNDED
        return self._mapped(total)

    def _grown(self, size: int) -> _Block:
        """Returns a free block at the end of the segment, which grows by whole pages."""
        last = self._last
        if last is not None and last.is_free:
            size -= last.size
        page = _SMALL_SEGMENT if self._is_small else _LARGE_SEGMENT
        block = self._mapped(-(-size // page) * page)
        self._link(block, last, None)
        if last is not None and last.is_free:
            self._take(last)
            self._take(block)
            block = self._joined(last, block)
            self._put(block)
        self._last = block
        return block

    def _mapped(self, size: int) -> _Block:
        block = _Block(self._end, size, self)
        self._end += size
        self.reserved += size
        self._put(block)
        return block

    def _link(self, block: _Block, before: _Block | None, after: _Block | None) -> None:
        block.before, block.after = before, after
        if before is not None:
            before.after = block
            if before is self._last:
                self._last = block
        if after is not None:
            after.before = block

    def _joined(self, first: _Block, second: _Block) -> _Block:
        first.size += second.size
        first.is_free = True
        first.after = second.after
        if second.after is not None:
            second.after.before = first
        if second is self._last:
            self._last = first
        return first

    def _put(self, block: _Block) -> None:
        insort(self._free, (block.size, block.address))
        self._by_address[block.address] = block

    def _take(self, block: _Block) -> None:
        del self._free[bisect_left(self._free, (block.size, block.address))]
        del self._by_address[block.address]


class CachingAllocator:
    """Follows events, in order of time.

    Args:
        expandable: whether segments are expandable: ``expandable_segments:True``.

    Attributes:
        reserved: bytes; they never become less, so that this is the largest value, too.
    """

    def __init__(self, expandable: bool) -> None:
        self._small, self._large = (_Pool(is_small, expandable) for is_small in (True, False))
        self._blocks: dict[int, _Block] = {}

    @property
    def reserved(self) -> int:
        return self._small.reserved + self._large.reserved

    def allocated(self, number: int, size: int) -> None:
        """``number`` tells this memory from other memory that lives."""
        if number in self._blocks:  # it lies there
            return
        pool = self._small if size <= _SMALL else self._large
        self._blocks[number] = pool.allocate(size)

    def freed(self, number: int) -> None:
        block = self._blocks.pop(number, None)
        if block is not None:  # else it was there before
            block.pool.free(block)
