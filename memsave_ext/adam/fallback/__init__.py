"""Adam in torch's operators, used without the native part. It follows the rules of csrc/adam."""

from .stepper import AdamStepper

__all__ = ["AdamStepper"]
