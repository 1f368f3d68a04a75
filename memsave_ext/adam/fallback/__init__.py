"""Adam in torch's operators: what runs without the native part, by the rules of csrc/adam."""

from .stepper import AdamStepper

__all__ = ["AdamStepper"]
