"""What the step of an optimizer has come to, and what may happen next: all transitions are in one
table. As csrc/adam/state_machine.h.

A state belongs to the step as a whole, from one call of ``step()`` to the next. What nests, or is
there several times at once, is counted instead: the blocks of the training loop that say what
becomes of gradients, which can be open in any state, and the backwards that run.
"""

from __future__ import annotations

from enum import Enum


class State(Enum):
    IDLE = "no parameter has been stepped since the last call of step()"
    STEPPING = "some have been"
    MEASURING = "inside of norm_pass(): gradients are measured and dropped"
    CLIPPING = "after it: what is stepped is clipped to its norm"
    FAILED = "a backward raised after it had stepped some parameters, and not all"


class Event(Enum):
    KEEP_GRADIENTS = "they will stay in .grad, or be folded, and add up over backwards"
    USE_GRADIENT = "one is complete, and will be stepped with, folded or measured"
    STEPPED = "parameters have been stepped"
    BEGIN_NORM_PASS = "norm_pass() is entered"
    FINISH_NORM_PASS = "it is left, and the norm is known"
    DROP_NORM_PASS = "it is left by an error"
    END_STEP = "step()"
    FAIL = "a backward raised that had stepped parameters, or folded"
    ACKNOWLEDGE = "zero_grad(), after which a failure is forgotten"


class Block(Enum):
    ACCUMULATE = "accumulate(): gradients add up in .grad"
    FOLD = "accumulate(fold=True): they are folded into the moments"
    KEEP = "paused(keep=True): they stay in .grad, and step() leaves them there"
    DROP = "paused(): they are dropped"


KEEPS_AFTER_NORM = (
    "Adam: gradients are accumulated after norm_pass(), whose norm is that of one backward. Use "
    "clip_global_norm=, which clips the sum."
)
PASS_TOO_LATE = "Adam: norm_pass() must come before the backward that steps, once in each step"
STEP_IN_PASS = (
    "Adam: step() inside of norm_pass(), which only measures gradients. Run the backward again "
    "after it, and then step()."
)
HAS_FAILED = (
    "Adam: a backward raised after {stepped} parameters had been stepped; the others were not. "
    "Call zero_grad() to go on from there, or load a checkpoint."
)

# Where an event leads, or why it cannot happen. The state stays where nothing is said.
_TABLE: dict[Event, dict[State, State | str]] = {
    Event.KEEP_GRADIENTS: {
        State.MEASURING: KEEPS_AFTER_NORM,
        State.CLIPPING: KEEPS_AFTER_NORM,
    },
    Event.USE_GRADIENT: {State.FAILED: HAS_FAILED},
    # Another backward than the one that failed may go on to its end; and one of another thread
    # steps that began before the norm pass.
    Event.STEPPED: {State.IDLE: State.STEPPING},
    Event.BEGIN_NORM_PASS: {
        State.IDLE: State.MEASURING,
        State.STEPPING: PASS_TOO_LATE,
        State.MEASURING: PASS_TOO_LATE,
        State.CLIPPING: PASS_TOO_LATE,
        State.FAILED: HAS_FAILED,
    },
    Event.FINISH_NORM_PASS: {State.MEASURING: State.CLIPPING},
    Event.DROP_NORM_PASS: {State.MEASURING: State.IDLE},
    Event.END_STEP: {
        State.STEPPING: State.IDLE,
        State.MEASURING: STEP_IN_PASS,
        State.CLIPPING: State.IDLE,
        State.FAILED: HAS_FAILED,
    },
    Event.FAIL: dict.fromkeys(State, State.FAILED),
    Event.ACKNOWLEDGE: {State.FAILED: State.IDLE},
}


class StateMachine:
    def __init__(self) -> None:
        self.state = State.IDLE
        self._stepped_before_failure = 0

    def check(self, event: Event) -> State:
        """The state that the event leads to.

        Raises:
            RuntimeError: it cannot happen in this state.
        """
        to = _TABLE[event].get(self.state, self.state)
        if isinstance(to, str):
            raise RuntimeError(to.format(stepped=self._stepped_before_failure))
        return to

    def handle(self, event: Event) -> None:
        """As :meth:`check`, and goes there."""
        self.state = self.check(event)
        if self.state is not State.FAILED:
            self._stepped_before_failure = 0

    def fail(self, stepped: int) -> None:
        """A backward raised that had stepped so many parameters."""
        if stepped:
            self.handle(Event.FAIL)
            self._stepped_before_failure += stepped
