"""Where optimizer states lie between steps: what all places have."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from ..store.mapped import is_mapped


class Place:
    """Where states lie: a value of a param group's ``states_on``. ``device``: the parameter's.

    Attributes:
        smallest: the bytes from which on a tensor on the parameter's device may lie there.
    """

    smallest = sys.maxsize

    def check(self, params: Iterable[Tensor]) -> None:
        """Raises ValueError where the states of these parameters cannot lie there."""

    def takes(self, nbytes: int, device: torch.device) -> bool:
        """Whether a tensor of this size lies there, and not beside the parameter."""
        return False

    def holds(self, name: str, state: Tensor, device: torch.device) -> bool:
        """Whether a state of this name and size lies there between steps."""
        return not self.stays(name, device) and self.takes(state.nbytes, device)

    def stays(self, name: str, device: torch.device) -> bool:
        """Whether states of this name are beside the parameter.

        On CUDA low parts of bfloat16 parameters are, which are changed where the parameter is
        written to between steps.
        """
        return name == "param_rest" and device.type == "cuda"

    def reserve(self, nbytes: Iterable[int]) -> None:
        """Makes room for tensors of these sizes, or raises OSError."""

    def put(self, tensor: Tensor, device: torch.device) -> Tensor:
        """Returns a tensor of the same values that lies there; the tensor, where it does."""
        return tensor.clone() if is_mapped(tensor) else tensor

    def zeros(self, like: Tensor, device: torch.device) -> Tensor:
        """Returns zeros that lie there, of the shape, strides and dtype of ``like``, which may be
        on the meta device."""
        return torch.zeros_like(like, device=device)

    def fetch(self, state: Mapping[str, Tensor], device: torch.device) -> Fetched:
        """Returns the state for one step."""
        return Fetched(dict(state))

    def wait(self) -> None:
        """Waits until all states are there, for the host to read them."""

    def buffers(self) -> list[Tensor]:
        """Returns what is kept in memory for the next step."""
        return []


class Fetched:
    """A parameter's state while it is stepped."""

    def __init__(self, state: dict[str, Tensor]) -> None:
        self.state = state

    def write_back(self) -> None:
        pass
