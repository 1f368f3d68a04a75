"""Fake tensors made fit for training steps: what these would allocate, and about how long take."""
