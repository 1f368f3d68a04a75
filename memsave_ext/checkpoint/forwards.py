"""Changing how a module's forward runs, in place."""

from __future__ import annotations

import inspect
import sys
from abc import abstractmethod
from types import CodeType
from typing import Any

import torch
from torch import nn


class ForwardInPlace:
    """Stands in for a module's ``forward``; copied and pickled with the module it belongs to.

    Classes, names, parameters, hooks and the state_dict stay as they are.
    """

    def __init__(self, module: nn.Module, options: dict[str, Any]) -> None:
        self.module = module
        self.options = options

    @abstractmethod
    def call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """``module`` is the one whose forward is called."""

    @property
    def __signature__(self) -> inspect.Signature:
        """Trainers look there for what the model takes."""
        return inspect.signature(type(self.module).forward.__get__(self.module))

    @property
    def __code__(self) -> CodeType:
        """torch.export looks there for the names of arguments."""
        code: CodeType = type(self.module).forward.__code__
        return code

    @property
    def __globals__(self) -> dict[str, Any]:
        """torch.jit.script looks there for what it compiles, which is a function's source."""
        raise AttributeError(
            f"torch.jit.script cannot compile {type(self.module).__name__}, whose forward "
            "checkpoint_modules or remat_module has replaced: remove() the handle first, or use "
            "torch.jit.trace or torch.export"
        )

    def install(self) -> None:
        self.module.__dict__["forward"] = self
        self.module.__dict__["_replicate_for_data_parallel"] = self.replicate

    @classmethod
    def remove(cls, module: nn.Module) -> None:
        if isinstance(module.__dict__.get("forward"), cls):
            del module.__dict__["forward"], module.__dict__["_replicate_for_data_parallel"]

    def replicate(self) -> nn.Module:
        """A replica has a copy of ``__dict__``, and would run the forward of this module."""
        replica: nn.Module = type(self.module)._replicate_for_data_parallel(self.module)
        type(self)(replica, self.options).install()
        return replica

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self.module
        if not torch.compiler.is_compiling():
            # A shallow copy of the module has this same object in its __dict__; only the caller
            # says which of them is meant.
            caller = sys._getframe(1).f_locals.get("self")
            if isinstance(caller, nn.Module) and caller.__dict__.get("forward") is self:
                module = caller
        return self.call(module, args, kwargs)
