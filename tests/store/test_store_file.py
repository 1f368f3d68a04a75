"""The file of a store: its parts, its errors, and nothing that is left behind."""

import errno
import os
import sys

import pytest
import torch

from memsave_ext.store.file import File
from memsave_ext.store.folder import absolute_folder

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="files of stores are for Linux")


@pytest.fixture
def file(tmp_path):
    yield File(str(tmp_path), "place='here'", "things")
    assert os.listdir(tmp_path) == []


def test_parts_hold_what_was_put(file):
    values = [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in (1, 4096, 100_000)]
    parts = [file.take(value.nbytes) for value in values]
    for part, value in zip(parts, values, strict=True):
        file.put(part, value)
    for part, value in zip(parts, values, strict=True):
        file.get(part, found := torch.empty_like(value))
        assert torch.equal(found, value)
        assert bytes(part.memory(value.nbytes)) == bytes(value.tolist())


def test_what_was_freed_is_taken_again(file):
    file.reserve([5000, 5000])
    size = os.fstat(file.descriptor()).st_size
    one, other = file.take(5000), file.take(5000)
    assert one.is_zero and {one.offset, other.offset} == {0, 8192}
    file.free(one)
    again = file.take(8000)  # as many pages
    assert again is one and not again.is_zero
    file.free(again)
    file.reserve([5000])  # is there
    assert os.fstat(file.descriptor()).st_size == size == 16384
    file.take(5000)
    file.take(1)
    assert os.fstat(file.descriptor()).st_size == size + 4096


def test_a_full_disk(file, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    for call in (lambda: file.take(5000), lambda: file.reserve([5000])):
        with pytest.raises(OSError, match=r"place='here': no room for 8,192 bytes of things: No"):
            call()


def test_a_file_that_has_been_closed(file):
    part = file.take(5000)
    os.close(file.descriptor())
    for call in (file.put, file.get):
        with pytest.raises(RuntimeError, match="place='here': the file of things has been closed"):
            call(part, torch.zeros(5000, dtype=torch.uint8))


def test_a_file_that_has_been_cut(file):
    part = file.take(5000)
    os.ftruncate(file.descriptor(), 0)
    with pytest.raises(OSError, match="place='here': the file of things has been cut"):
        file.get(part, torch.zeros(5000, dtype=torch.uint8))


def test_folders(tmp_path, monkeypatch):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    assert absolute_folder("folder", "") == str(tmp_path / "folder")
    for wrong in ("", "none", "file"):
        with pytest.raises(ValueError, match=f"^place must be a folder, got '{wrong}'$"):
            absolute_folder(wrong, "place must be a folder")
