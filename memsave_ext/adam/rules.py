"""What is computed from gradients: one row for each rule, as in csrc/adam/rules.h.

The options of a param group say which rule steps its parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Rule:
    """How parameters are stepped.

    Attributes:
        name: the row's name, as in csrc/adam/rules.h.
        moments: the names of the states that it keeps of each element.
        folds: whether gradients can be folded into them.
    """

    name: str
    moments: tuple[str, ...]
    folds: bool = False


ADAM = Rule("adam", ("exp_avg", "exp_avg_sq"), folds=True)
AMSGRAD = Rule("amsgrad", ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"), folds=True)

RULES = (ADAM, AMSGRAD)


def rule_of(group: Mapping[str, Any]) -> Rule:
    """Returns the rule that steps the parameters of a group."""
    return AMSGRAD if group["amsgrad"] else ADAM
