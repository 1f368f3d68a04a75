"""The tests of a GPU that run on the device, too."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class GpuTests:
    file: str  # in tests
    chosen: str = ""  # for pytest's -k


EVERY_TIME = [
    GpuTests("adam/test_states_elsewhere_cuda.py"),
    GpuTests("checkpoint/test_checkpoint_cuda.py", "not overlap"),  # measure
    GpuTests("checkpoint/test_graph_cuda.py", "not without_random_numbers_graphs"),  # shares a pool
    GpuTests("elsewhere/test_gradients_cuda.py"),
    GpuTests("elsewhere/test_weights_cuda.py"),
    GpuTests("loss_head/test_loss_cuda.py", "fp32 or float32 or waits or stream or rows"),
    GpuTests("memory/test_memory_cuda.py"),
    GpuTests("remat/test_remat_cuda.py"),
]
# Those of more than 2^31 elements are skipped: the device says that it has no memory for them.
IN_FULL = [
    GpuTests("adam/test_adam_cuda.py"),
    GpuTests("adam/test_adam_exact_cuda.py"),
    GpuTests("adam/test_adam_modes_cuda.py"),
    GpuTests("batch_norm/test_batch_norm_cuda.py"),
    GpuTests("batch_norm/test_batch_norm_parts_cuda.py"),
    GpuTests("loss_head/test_loss_cuda.py"),
]
