"""A model of torch's CUDA caching allocator, which writes snapshots and keeps the true course."""

BLOCK = 512
SEGMENT = 2 << 20


def frames(*places):
    """A stack, innermost first; a place is ``(file, line, function)``."""
    return [{"filename": f, "line": line, "name": name} for f, line, name in places]


class Allocator:
    """One device. ``allocated`` and ``reserved`` are the true bytes before and after each event."""

    def __init__(self, device=0):
        self.device = device
        self.live = {}  # address -> (requested size, frames, freed and waiting)
        self.segments = {}  # address -> size
        self.events = []
        self.allocated = [0]
        self.reserved = [0]
        self._next = 0x7F0000000000
        self._room = {}  # address of a segment -> first free address

    def _event(self, action, addr, size, stack=None, **more):
        event = {"action": action, "addr": addr, "size": size, "stream": 0, **more}
        event["time_us"] = 1_000_000 + 10 * len(self.events)
        if stack is not None:
            event["frames"] = stack
        self.events.append(event)
        self.allocated.append(sum(size for size, *_ in self.live.values()))
        self.reserved.append(sum(self.segments.values()))

    def alloc(self, size, stack=None, address=None):
        rounded = -(-size // BLOCK) * BLOCK
        if address is None:
            segment = next(
                (s for s, at in self._room.items() if s + self.segments[s] - at >= rounded), None
            )
            if segment is None and rounded <= SEGMENT:  # one in which nothing lives is used again
                unused = (s for s, n in self.segments.items() if n >= rounded and not self._used(s))
                segment = next(unused, None)
                if segment is not None:
                    self._room[segment] = segment
            if segment is None:
                segment, self._next = self._next, self._next + (1 << 32)
                self.segments[segment] = max(SEGMENT, rounded)
                self._room[segment] = segment
                self._event("segment_alloc", segment, self.segments[segment])
            address = self._room[segment]
            self._room[segment] += rounded
        self.live[address] = (size, stack or [], False)
        self._event("alloc", address, size, stack)
        return address

    def free(self, address, completed=True):
        size, stack, _ = self.live[address]
        self.live[address] = (size, stack, True)
        elsewhere = frames(("/home/me/frees.py", 99, "frees"))
        self._event("free_requested", address, size, elsewhere)
        if completed:
            self.complete(address)

    def complete(self, address):
        size, *_ = self.live.pop(address)
        self._event("free_completed", address, size, frames(("/home/me/frees.py", 99, "frees")))

    def empty_cache(self):
        """Give back the segments in which nothing is live."""
        for segment, size in list(self.segments.items()):
            if not self._used(segment):
                del self.segments[segment], self._room[segment]
                self._event("segment_free", segment, size)

    def _used(self, segment):
        end = segment + self.segments[segment]
        return any(segment <= address < end for address in self.live)

    def snapshot(self, last=None):
        """What torch writes; ``last`` events only, as of a trace whose buffer is bounded."""
        segments = []
        for start, total in self.segments.items():
            blocks, at = [], start
            for address in sorted(a for a in self.live if start <= a < start + total):
                size, stack, waits = self.live[address]
                rounded = -(-size // BLOCK) * BLOCK
                if address > at:
                    blocks.append(_inactive(at, address - at))
                state = "active_pending_free" if waits else "active_allocated"
                blocks.append(
                    {
                        "address": address,
                        "size": rounded,
                        "requested_size": size,
                        "state": state,
                        "frames": stack,
                    }
                )
                at = address + rounded
            if at < start + total:
                blocks.append(_inactive(at, start + total - at))
            segments.append(
                {
                    "device": self.device,
                    "address": start,
                    "total_size": total,
                    "stream": 0,
                    "blocks": blocks,
                }
            )
        traces = [[] for _ in range(self.device)]
        traces.append(self.events[0 if last is None else len(self.events) - last :])
        return {"segments": segments, "device_traces": traces, "external_annotations": []}


def _inactive(address, size):
    return {
        "address": address,
        "size": size,
        "requested_size": 0,
        "state": "inactive",
        "frames": [],
    }
