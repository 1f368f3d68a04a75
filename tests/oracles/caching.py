"""A slow model of torch's caching allocator of CUDA, byte ranges in lists, and no links."""

MIB = 1 << 20


class Slow:
    """Segments are lists of ``[size, number or None]``, each part after the other."""

    def __init__(self, expandable):
        self.expandable = expandable
        self.pools = {True: [], False: []}  # by whether it is small: segments in order of address
        self.where = {}

    @property
    def reserved(self):
        return sum(size for segments in self.pools.values() for s in segments for size, _ in s)

    def allocated(self, number, size):
        small = size <= MIB
        segments = self.pools[small]
        self.where[number] = small
        found = []
        for s, segment in enumerate(segments):
            for p, (room, who) in enumerate(segment):
                if who is None and room >= size:
                    at_end = self.expandable and p == len(segment) - 1
                    found.append((at_end, room, s, p))
        if found:
            _, room, s, p = min(found)
            segment = segments[s]
        else:
            segment, p = self._make(segments, small, size)
            room = segment[p][0]
        left = room - size
        is_cut = left >= 512 if small or self.expandable else left > MIB
        segment[p] = [size if is_cut else room, number]
        if is_cut:
            segment.insert(p + 1, [left, None])

    def _make(self, segments, small, size):
        if not self.expandable:
            total = (
                2 * MIB
                if small
                else 20 * MIB
                if size < 10 * MIB
                else -(-size // (2 * MIB)) * 2 * MIB
            )
            segments.append([[total, None]])
            return segments[-1], 0
        page = (2 if small else 20) * MIB
        if not segments:
            segments.append([])
        (segment,) = segments
        room = segment.pop()[0] if segment and segment[-1][1] is None else 0
        pages = -(-(size - room) // page)
        segment.append([room + pages * page, None])
        return segment, len(segment) - 1

    def freed(self, number):
        for segment in self.pools[self.where.pop(number)]:
            for part in segment:
                if part[1] == number:
                    part[1] = None
            joined = []
            for size, who in segment:
                if joined and who is None and joined[-1][1] is None:
                    joined[-1][0] += size
                else:
                    joined.append([size, who])
            segment[:] = joined
