"""A build with CUDA on a GPU it was built for: the report's probe."""

import torch
from on_device import needs_kernels

from memsave_ext import _native
from memsave_ext.report import report


@needs_kernels
def test_probe():
    major, minor = torch.cuda.get_device_capability()
    assert 0 < _native.module.probe_cuda() <= major * 100 + minor * 10


@needs_kernels
def test_the_report_says_that_kernels_run():
    lines = report().splitlines()
    (line,) = (line for line in lines if "cuda:0" in line)
    assert "kernels run, compiled for sm_" in line
