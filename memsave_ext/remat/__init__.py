"""Rematerialization: tensors that are cheap to recompute are not kept for backward.

Kirisame et al. 2021, "Dynamic Tensor Rematerialization", arXiv 2006.09616.
"""

from .block import remat
from .figures import Recomputed, RematFigures, Saved
from .modules import RematHandle, remat_module

__all__ = ["Recomputed", "RematFigures", "RematHandle", "Saved", "remat", "remat_module"]
