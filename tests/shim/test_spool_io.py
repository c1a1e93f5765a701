"""spool_io.so: every byte where it belongs and summed, or the call's own errno."""

from __future__ import annotations

import errno
import os
import random
import subprocess
import sys
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

from runnerd.core.blocks import Batch, Block, Piece, Record
from runnerd.daemon import spool_io
from runnerd.daemon.spool_io import NativeIo, PlainIo, SpoolIo, load_spool_io

if TYPE_CHECKING:
    from collections.abc import Callable

DRIVER: Final = Path(__file__).parent / "spool_io_driver.c"
FLAGS: Final = ("-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")


@pytest.fixture(params=["native", "plain"])
def its_io(
    request: pytest.FixtureRequest,
    native: tuple[Path, Path, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> SpoolIo:
    monkeypatch.setattr(spool_io, "LIBRARY", native[2])
    return NativeIo() if request.param == "native" else PlainIo()


def make_batch(sizes: list[int], extents: list[tuple[int, int]]) -> tuple[Batch, list[bytes]]:
    """Return a batch of two blocks, and what each of them is on disk."""
    batch = Batch(0)
    batch.place(extents)
    seq = 0
    for half in (sizes[: len(sizes) // 2], sizes[len(sizes) // 2 :]):
        piece = Piece(Block(0, seq + 1, (0, 0)))
        batch.pieces.append(piece)
        for size in half:
            seq += 1
            piece.add(Record(seq, 0, 0, random.Random(seq).randbytes(size), 0))
    return batch, [b"".join(piece.parts) for piece in batch.pieces]


def test_short_interrupted_full_and_stuck_disks_under_the_sanitizers(
    tmp_path: Path, compile_c: Callable[..., None]
) -> None:
    compile_c(DRIVER, tmp_path / "driver", "-Wno-unused", *FLAGS)
    done = subprocess.run(
        [tmp_path / "driver"], capture_output=True, text=True, check=False, timeout=120
    )
    assert (done.returncode, done.stdout) == (0, "all as it should be\n"), done.stderr


@pytest.mark.parametrize("sizes", [[65536] * 9, [1] * 3000, [65536, 1, 4096, 50000, 77]])
def test_a_batch_lies_in_its_extents(its_io: SpoolIo, tmp_path: Path, sizes: list[int]) -> None:
    total = sum(sizes) + 21 * len(sizes)
    extents = [(300_000, total // 3), (5, total // 4), (200_000, total - total // 3 - total // 4)]
    extents[2] = (1_000_000, extents[2][1])
    batch, blocks = make_batch(sizes, extents)
    with (tmp_path / "file").open("w+b", buffering=0) as file:
        crcs = its_io.write(file.fileno(), batch)
        found = b"".join(os.pread(file.fileno(), size, at) for at, size in extents)
        assert found == b"".join(blocks)
        assert crcs == [its_io.crc(block) for block in blocks]
        # And a block that goes on later is summed from where it was.
        piece = batch.pieces[1]
        piece.block.used_bytes, piece.block.crc = piece.end, crcs[1]
        more = Batch(0)
        more.pieces.append(Piece(piece.block))
        more.pieces[0].add(Record(99999, 1, 0, b"more", 0))
        more.place([(0, 25)])
        rest = b"".join(more.pieces[0].parts)
        assert its_io.write(file.fileno(), more) == [its_io.crc(blocks[1] + rest)]


@pytest.mark.parametrize(
    ("path", "flags", "expected"),
    [
        ("/dev/full", os.O_WRONLY, errno.ENOSPC),
        ("/dev/null", os.O_RDONLY, errno.EBADF),
        (None, 0, errno.EBADF),
    ],
)
def test_what_fails_says_why(its_io: SpoolIo, path: str | None, flags: int, expected: int) -> None:
    fd = -1 if path is None else os.open(path, flags)
    try:
        batch, _ = make_batch([100, 200], [(0, 342)])
        with pytest.raises(OSError) as caught:
            its_io.write(fd, batch)
        assert caught.value.errno == expected
    finally:
        if fd >= 0:
            os.close(fd)


def test_a_write_cut_short_by_a_limit_is_an_error(its_io: SpoolIo, tmp_path: Path) -> None:
    """The first call writes what fits; the one that goes on says why there is no more."""
    program = f"""
import resource, signal, sys
from pathlib import Path
from runnerd.daemon import spool_io
from tests.shim.test_spool_io import make_batch
spool_io.LIBRARY = Path({str(spool_io.LIBRARY)!r})
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
batch, _ = make_batch([700, 700], [(0, 1442)])
with open({str(tmp_path / "file")!r}, "wb") as file:
    try:
        spool_io.{type(its_io).__name__}().write(file.fileno(), batch)
    except OSError as error:
        print(error.errno)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == f"{errno.EFBIG}\n"
    assert (tmp_path / "file").stat().st_size == 1000


def test_without_the_library_it_is_done_in_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spool_io, "LIBRARY", tmp_path / "spool_io.so")
    its_io, reason = load_spool_io()
    assert isinstance(its_io, PlainIo)
    assert "cannot open shared object" in str(reason)
    assert its_io.crc(b"abc") == zlib.crc32(b"abc")
