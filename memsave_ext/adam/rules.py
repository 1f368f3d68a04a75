"""What is computed from gradients: one row of format_rows.h for each rule.

The options of a param group say which rule steps its parameters.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .formats import read_rows


@dataclass(frozen=True)
class Rule:
    """How parameters are stepped.

    Attributes:
        name: the row's name.
        moments: the names of the states that it keeps of each element.
    """

    name: str
    moments: tuple[str, ...]


# Interned, as names in source are: csrc/adam/snapshot.cpp finds a state's tensors by identity.
RULES = tuple(
    Rule(name, tuple(map(sys.intern, moments.split()))) for name, moments in read_rows("RULES")
)
ADAM, AMSGRAD, SGD, MOMENTUM, LION = RULES
MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer")  # of any rule


def rule_of(group: Mapping[str, Any]) -> Rule:
    """Returns the rule that steps the parameters of a group."""
    if "amsgrad" in group:
        return AMSGRAD if group["amsgrad"] else ADAM
    if "dampening" in group:
        return MOMENTUM if group["momentum"] != 0 else SGD
    return LION


def is_adam(rule: Rule) -> bool:
    return rule in (ADAM, AMSGRAD)


def is_complete(state: Mapping[str, Any], group: Mapping[str, Any]) -> bool:
    """Returns whether a state has all that the group's options ask for.

    SGD's may begin to ask for a momentum buffer at any step.
    """
    return bool(state) and (rule_of(group) is not MOMENTUM or "momentum_buffer" in state)
