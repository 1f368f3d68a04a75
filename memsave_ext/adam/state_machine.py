"""The states of an optimizer's step, with all transitions in one table.

A state belongs to the step as a whole, from one call of ``step()`` to the next. What can nest or
exist several times at once is counted elsewhere: the open blocks of the training loop that decide
what is done with gradients, which are allowed in any state, and the backwards that run.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from . import errors


class State(Enum):
    IDLE = "no parameter has been stepped since the last call of step()"
    STEPPING = "some have been"
    MEASURING = "inside of norm_pass(): gradients are measured and dropped"
    CLIPPING = "after it: what is stepped is clipped to its norm"
    FAILED = "a backward raised after it had stepped some parameters, and not all"


class Event(Enum):
    KEEP_GRADIENTS = "they will stay in .grad, and add up over backwards"
    USE_GRADIENT = "one is complete, and will be stepped with or measured"
    STEPPED = "parameters have been stepped"
    BEGIN_NORM_PASS = "norm_pass() is entered"
    FINISH_NORM_PASS = "it is left, and the norm is known"
    DROP_NORM_PASS = "it is left by an error"
    END_STEP = "step()"
    FAIL = "a backward raised that had stepped parameters"
    ACKNOWLEDGE = "zero_grad(), after which a failure is forgotten"
    LOAD = "states were loaded: what the step has come to does not matter any more"


class Block(Enum):
    ACCUMULATE = "accumulate(): gradients add up in .grad"
    KEEP = "paused(keep=True): they stay in .grad, and step() leaves them there"
    DROP = "paused(): they are dropped"


# The state that an event leads to, or the reason why it cannot happen, a key of errors.py. Where
# there is no entry the state stays.
_TABLE: dict[Event, dict[State, State | str]] = {
    Event.KEEP_GRADIENTS: {
        State.MEASURING: "keeps_after_norm",
        State.CLIPPING: "keeps_after_norm",
    },
    Event.USE_GRADIENT: {State.FAILED: "has_failed"},
    # Other states stay: after a failure another backward may go on to its end, and in a norm pass
    # a backward of another thread that began before it may step.
    Event.STEPPED: {State.IDLE: State.STEPPING},
    Event.BEGIN_NORM_PASS: {
        State.IDLE: State.MEASURING,
        State.STEPPING: "pass_too_late",
        State.MEASURING: "pass_too_late",
        State.CLIPPING: "pass_too_late",
        State.FAILED: "has_failed",
    },
    Event.FINISH_NORM_PASS: {State.MEASURING: State.CLIPPING},
    Event.DROP_NORM_PASS: {State.MEASURING: State.IDLE},
    Event.END_STEP: {
        State.STEPPING: State.IDLE,
        State.MEASURING: "step_in_pass",
        State.CLIPPING: State.IDLE,
        State.FAILED: "has_failed",
    },
    Event.FAIL: dict.fromkeys(State, State.FAILED),
    Event.ACKNOWLEDGE: {State.FAILED: State.IDLE},
    Event.LOAD: {
        State.STEPPING: State.IDLE,
        State.CLIPPING: State.IDLE,
        State.FAILED: State.IDLE,
    },
}


def _allows(state: State, event: Event) -> bool:
    return not isinstance(_TABLE[event].get(state), str)


class Expected(NamedTuple):
    """What a collector need not ask the stepper about, in a state.

    Attributes:
        uses: gradients can be used.
        keeps: gradients can be kept in ``.grad``.
        measured: the norm pass of this step has measured each gradient that is used.
        first: what is stepped is the first of the step, which the stepper is told.
    """

    uses: bool
    keeps: bool
    measured: bool
    first: bool


_EXPECTED = {
    state: Expected(
        uses=_allows(state, Event.USE_GRADIENT),
        keeps=_allows(state, Event.KEEP_GRADIENTS),
        measured=state is State.CLIPPING,
        first=state is State.IDLE,
    )
    for state in State
}


class StateMachine:
    def __init__(self) -> None:
        self.state = State.IDLE
        self._stepped_before_failure = 0

    def check(self, event: Event) -> State:
        """Returns the state that the event leads to.

        Raises:
            RuntimeError: the event cannot happen in this state.
        """
        to = _TABLE[event].get(self.state, self.state)
        if isinstance(to, str):
            raise errors.impossible(to, self._stepped_before_failure)
        return to

    def handle(self, event: Event) -> None:
        """Goes to the state that :meth:`check` returns."""
        self.state = self.check(event)
        if self.state is not State.FAILED:
            self._stepped_before_failure = 0

    def expected(self) -> Expected:
        return _EXPECTED[self.state]

    def fail(self, stepped: int) -> None:
        """Notes that a backward raised after it had stepped ``stepped`` parameters."""
        if stepped:
            self.handle(Event.FAIL)
            self._stepped_before_failure += stepped
