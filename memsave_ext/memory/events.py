"""The events from which the memory of a run is worked out; log.py says what they amount to."""

from __future__ import annotations

from typing import NamedTuple

CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "other")
"""What memory is counted as: ``"parameters", "gradients", "optimizer", "activations", "other"``."""
PHASES = ("other", "forward", "backward", "recompute", "optimizer", "rematerialize")
"""What a step does: ``"other", "forward", "backward", "recompute", "optimizer", "rematerialize"``.
A timeline names them by their index here."""
PARAMETERS, GRADIENTS, OPTIMIZER_STATES, ACTIVATIONS, OTHER_CATEGORY = range(len(CATEGORIES))
OTHER, FORWARD, BACKWARD, RECOMPUTE, OPTIMIZER, REMATERIALIZE = range(len(PHASES))
RECOMPUTES = (RECOMPUTE, REMATERIALIZE)

# Kinds of events, each with what `subject` and `value` are. The first ones are written by
# csrc/memory/tracker.h, too, where they have the same numbers. Those up to LABELLED do not change
# what a thread is doing.
(
    ALLOCATED,  # address, bytes
    FREED,  # address; memory that is not known changes only the total
    FOUND,  # address, bytes: memory that lived before tracking, unless it is known
    LABELLED,  # address, label_value(): unless it has a label
    BEGIN_RECOMPUTE,  # 1 for a checkpointed region, 0 for operators of remat
    END_RECOMPUTE,
    BEGIN_TRACKING,
    RESET_PEAK,
    MOVED,  # 0, bytes of the device's memory that lie elsewhere now
    END_TRACKING,
    ENTER_MODULE,  # the module, the number that autograd gives to the thread's next node
    EXIT_MODULE,  # the same
    BEGIN_OPTIMIZER,
    END_OPTIMIZER,
    END_STEP,
    GONE,  # address: memory that was FOUND there, if it was, has been freed
) = range(16)

# Values of Event.node where it is no number.
NO_NODE, NOT_IN_BACKWARD = -1, -2


class Event(NamedTuple):
    kind: int
    thread: int
    # The autograd node that runs: the thread that made it and its number in that thread, as
    # autograd counts them.
    node_thread: int
    time: int  # ns
    node: int
    subject: int = 0
    value: int = 0
    total: int = -1  # live bytes after the event, as the allocator counts; -1 where it does not


def label_value(category: int, name: int) -> int:
    """Returns a label as one number, of which ``divmod(number, 16)`` is the name and category."""
    return 16 * name + category
