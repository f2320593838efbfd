"""Files and folders appear whole or not at all: after an error, a kill, on a full disk; and permissions."""

import errno
import hashlib
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from diloco.atomic_files import (
    PRIVATE,
    FileDigest,
    append_file,
    digest_file,
    move_folder,
    replace_file,
    replace_folder,
    write_file,
)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("durable", [False, True])
@pytest.mark.parametrize("content", ["grüße\n", b"\0\xff", b""])
def test_a_file_is_written_and_its_size_and_sha256_returned(
    tmp_path: Path, content: str | bytes, durable: bool
) -> None:
    data = content.encode() if isinstance(content, str) else content
    digest = write_file(tmp_path / "file", content, durable=durable)
    assert (tmp_path / "file").read_bytes() == data and names(tmp_path) == ["file"]
    assert digest == FileDigest(len(data), hashlib.sha256(data).hexdigest()) == digest_file(tmp_path / "file")


def test_a_large_file_is_hashed_in_the_order_in_which_it_is_written(tmp_path: Path) -> None:
    """Pieces of a MiB or more are hashed in a thread, others are not."""
    pieces = [os.urandom(size) for size in ((1 << 20) + 3, 5, 40 << 20, 1 << 20, 0, 7)]
    with replace_file(tmp_path / "file") as file:
        for piece in pieces:
            file.write(piece)
        digest = file.finish()
    data = b"".join(pieces)
    assert digest == FileDigest(len(data), hashlib.sha256(data).hexdigest()) == digest_file(tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == data


def test_a_streamed_file_takes_the_place_of_the_old_one_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_file(path, "old")
    with replace_file(path, durable=True) as file:
        file.write(b"ne")
        file.write(memoryview(b"w"))
        assert path.read_text() == "old"
        assert file.finish() == FileDigest(3, hashlib.sha256(b"new").hexdigest())
    assert path.read_text() == "new" and names(tmp_path) == ["file"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_leaves_the_old_file_and_nothing_else(tmp_path: Path, error: type[BaseException]) -> None:
    write_file(tmp_path / "file", "old")

    def fail() -> None:
        with replace_file(tmp_path / "file") as file:
            file.write(b"half")
            raise error

    with pytest.raises(error):
        fail()
    assert (tmp_path / "file").read_text() == "old" and names(tmp_path) == ["file"]


def test_a_kill_leaves_the_old_file_and_the_next_write_succeeds(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_file(path, "old")
    code = (
        "import os, signal, sys; from pathlib import Path; from diloco.atomic_files import replace_file\n"
        "with replace_file(Path(sys.argv[1])) as file:\n"
        "    file.write(b'half')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)"
    )
    killed = subprocess.run([sys.executable, "-c", code, str(path)], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert path.read_text() == "old" and all(name.endswith(".partial") for name in names(tmp_path) if name != "file")
    write_file(path, "new")
    assert path.read_text() == "new"


def test_a_private_file_is_never_readable_by_others_and_a_plain_one_follows_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        with replace_file(tmp_path / "key", mode=PRIVATE):
            (partial,) = tmp_path.iterdir()
            assert mode(partial) == 0o600
        write_file(tmp_path / "plain", "")
        append_file(tmp_path / "list", b"line\n", mode=PRIVATE)
    finally:
        os.umask(before)
    assert {path.name: mode(path) for path in tmp_path.iterdir()} == {"key": 0o600, "plain": 0o644, "list": 0o600}


def test_without_overwrite_an_existing_file_stays(tmp_path: Path) -> None:
    write_file(tmp_path / "key", "first", overwrite=False)
    with pytest.raises(FileExistsError):
        write_file(tmp_path / "key", "second", overwrite=False)
    assert (tmp_path / "key").read_text() == "first" and names(tmp_path) == ["key"]


@pytest.mark.parametrize("fails", ["write", "fsync"])
@pytest.mark.parametrize(
    "write", [lambda path: write_file(path, "new", durable=True), lambda path: append_file(path, b"new")]
)
def test_a_full_disk_is_reported_with_the_file_and_leaves_no_temporary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[Path], object], fails: str
) -> None:
    write_file(tmp_path / "file", "old")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, fails, full)
    with pytest.raises(OSError, match=f"No space left on device: '{tmp_path / 'file'}'"):
        write(tmp_path / "file")
    assert (tmp_path / "file").read_text().startswith("old") and names(tmp_path) == ["file"]


def test_a_write_that_takes_a_part_only_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: real(descriptor, data[:3]))
    write_file(tmp_path / "file", "0123456789")
    append_file(tmp_path / "file", b"abcdefg")
    assert (tmp_path / "file").read_text() == "0123456789abcdefg"


def test_a_folder_takes_the_place_of_the_old_one_at_the_end(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "folder"
    for content in ("first", "second"):
        with replace_folder(target) as new:
            (new / content).write_text(content)
        assert names(target) == [content] and names(target.parent) == ["folder"]

    def fail() -> None:
        with replace_folder(target) as new:
            (new / "third").write_text("third")
            raise ValueError("bad")

    with pytest.raises(ValueError, match="bad"):
        fail()
    assert names(target) == ["second"] and names(target.parent) == ["folder"]


def test_a_folder_that_cannot_be_moved_into_place_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("new", "old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    real = Path.rename

    def fails_after_the_old_one_is_gone(source: Path, target: Path) -> Path:
        if source.name == "new" and not target.exists():
            raise OSError(errno.EIO, "Input/output error")
        return real(source, target)

    monkeypatch.setattr(Path, "rename", fails_after_the_old_one_is_gone)
    with pytest.raises(OSError, match="Input/output error"):
        move_folder(tmp_path / "new", tmp_path / "old")
    assert (tmp_path / "old" / "file").read_text() == "old" and names(tmp_path) == ["new", "old"]
