"""torch's own database of operators, each with samples of its arguments."""

from torch.testing._internal import common_utils

# Samples are drawn by an iterator that looks for the unittest it is called by, which none of ours
# is: it asks every module for the source of each function on the stack, a tenth of a second where
# all libraries are imported.
common_utils.extract_test_fn = lambda: None

from torch.testing._internal.common_methods_invocations import op_db  # noqa: E402

__all__ = ["op_db"]
