"""The file of a store: its parts, its errors, and nothing that is left behind."""

import errno
import itertools
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
    file.take(1)  # and as much again ahead
    assert os.fstat(file.descriptor()).st_size == 2 * size


def test_reserved_parts_stay_whole(file):
    """Small ones that are taken first are not cut from large ones."""
    file.reserve([100_000])
    file.reserve([100_000, 5000, 5000])
    size = os.fstat(file.descriptor()).st_size
    parts = [file.take(nbytes) for nbytes in (5000, 5000, 100_000)]
    assert os.fstat(file.descriptor()).st_size == size == 102_400 + 2 * 8192
    ends = [(part.offset, part.offset + part.size) for part in parts]
    assert sorted(ends)[0][0] == 0 and all(
        a[1] == b[0] for a, b in itertools.pairwise(sorted(ends))
    )


def test_many_parts_take_few_descriptors(file):
    file.take(5000)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(300):
        file.take(5000)
    assert len(os.listdir("/proc/self/fd")) - before < 20


def test_large_parts_leave_nothing_unused(file, monkeypatch):
    """Of what is taken ahead, where no other part fits into the rest."""
    monkeypatch.setattr("memsave_ext.store.file._MOST_AHEAD", 32 * 4096)
    for nbytes in (17 * 4096, 10 * 4096):
        before = os.fstat(file.descriptor()).st_size
        for _ in range(12):
            file.take(nbytes)
        assert os.fstat(file.descriptor()).st_size - before == 12 * nbytes


def test_no_room_ahead(file, monkeypatch):
    """What is asked for is found on a disk that has no room for as much again."""
    really = os.posix_fallocate

    def nearly_full(descriptor, offset, size):
        if offset + size > 48 * 4096:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        really(descriptor, offset, size)

    monkeypatch.setattr(os, "posix_fallocate", nearly_full)
    for _ in range(48):
        file.take(1)
    assert os.fstat(file.descriptor()).st_size == 48 * 4096
    with pytest.raises(OSError, match="no room for 4,096 bytes"):
        file.take(1)


def test_a_refused_part_takes_nothing_of_the_disk(file, monkeypatch):
    """As ext4, which keeps what it has found until it was full."""
    file.take(5000)
    size, really = os.fstat(file.descriptor()).st_size, os.posix_fallocate

    def partly(descriptor, offset, size):
        really(descriptor, offset, size // 2)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", partly)
    with pytest.raises(OSError, match="no room for"):
        file.take(1 << 20)
    assert os.fstat(file.descriptor()).st_size == size


@pytest.mark.parametrize("call", ["pwritev", "preadv"])
def test_a_disk_that_fails(file, call, monkeypatch):
    part = file.take(5000)

    def fail(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, call, fail)
    use = file.put if call == "pwritev" else file.get
    with pytest.raises(OSError, match="place='here': cannot read or write things: Input/out"):
        use(part, torch.zeros(5000, dtype=torch.uint8))


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
