"""Bytes of distinct storages, as an allocator gives them out."""

import torch
from torch import nn

from memsave_ext.shared.tensors import bytes_held, rounded, storage_of

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_each_storage_counts_once():
    flat = torch.zeros(100)
    param = nn.Parameter(flat[:40])
    assert bytes_held([flat, param, {"views": [flat[10:], flat.view(10, 10)]}, "text"]) == 400
    seen = set()
    assert bytes_held([flat], seen) == 400
    assert bytes_held([param, torch.zeros(2, dtype=torch.float64)], seen) == 16
    assert seen >= {storage_of(param)[0]}
    assert bytes_held([]) == 0


def test_memory_without_a_storage():
    assert storage_of(torch.zeros(4, 4).to_mkldnn())[1] == 64


def test_sparse_tensors_have_indices_and_values():
    dense = torch.eye(4)
    assert bytes_held([dense.to_sparse()]) == 2 * 4 * 8 + 4 * 4
    rows, columns, values = torch.arange(5), torch.arange(4), torch.ones(4)
    compressed = torch.sparse_csr_tensor(rows, columns, values, (4, 4))
    assert bytes_held([compressed]) == (5 + 4) * 8 + 4 * 4


def test_cuda_gives_out_blocks():
    assert [rounded(size, CUDA) for size in (0, 1, 512, 513)] == [0, 512, 512, 1024]
    assert rounded(513, CPU) == 513
