"""What goes wrong between a forward and its recompute."""

import torch.utils.checkpoint


class CheckpointError(torch.utils.checkpoint.CheckpointError):
    """The recompute of a region did not do what its forward did.

    A subclass of torch's, with messages that begin with torch's wording, so that code written for
    torch's checkpoint keeps catching and matching it.
    """
