"""Durable files: what is written, what reaches the disk in which order, what a failure leaves."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ktconv.errors import (
    DiskFullError,
    FileSizeError,
    KtconvError,
    OutputError,
    ResourceError,
    UsageError,
)
from ktconv.system import files, regular_files

Names = list[tuple[str, str]]


def names(directory: Path) -> list[str]:
    return sorted(path.relative_to(directory).as_posix() for path in directory.rglob("*"))


@pytest.fixture
def steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Names:
    """What is made to survive a power loss, renamed and removed, by names below tmp_path."""
    done: Names = []

    def note(step: str, path: str | Path) -> None:
        done.append((step, os.path.relpath(path, tmp_path)))

    def fsync(fd: int, real: Callable[[int], None] = os.fsync) -> None:
        note("sync", Path(f"/proc/self/fd/{fd}").readlink())
        real(fd)

    def replace(old: Path, new: Path, real: Callable[..., Path] = Path.replace) -> Path:
        note("rename", new)
        return real(old, new)

    def unlink(path: Path, real: Callable[..., None] = Path.unlink, **named: bool) -> None:
        note("remove", path)
        real(path, **named)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "replace", replace)
    monkeypatch.setattr(Path, "unlink", unlink)
    return done


@pytest.mark.parametrize(
    ("number", "kind", "reason", "hint"),
    [
        (errno.ENOSPC, DiskFullError, "the disk is full",
         "free some space, then run the same command again"),
        (errno.EDQUOT, DiskFullError, "the disk quota is used up",
         "free some space, then run the same command again"),
        (errno.EROFS, ResourceError, "the file system is read-only",
         "choose a directory that can be written"),
        (errno.EACCES, ResourceError, "permission denied",
         "choose a directory that can be written"),
        (errno.EPERM, ResourceError, "permission denied",
         "choose a directory that can be written"),
        (errno.EIO, ResourceError, "the device reports an I/O error", None),
        (errno.EFBIG, FileSizeError, "files this large are not allowed here",
         "raise the limit of the file system or process"),
        (errno.ENAMETOOLONG, ResourceError, "the name is too long", "choose a shorter name"),
        (errno.EMFILE, ResourceError, "too many open files",
         "raise the limit of open files (ulimit -n)"),
        (errno.ENFILE, ResourceError, "too many open files on this machine", None),
        (errno.ELOOP, ResourceError, os.strerror(errno.ELOOP), None),
    ],
)  # fmt: skip
def test_every_reason_and_its_way_out(
    number: int, kind: type[KtconvError], reason: str, hint: str | None
) -> None:
    with pytest.raises(KtconvError) as caught, files.translated("write", "x/y"):
        raise OSError(number, "not shown")
    assert type(caught.value) is kind
    assert (str(caught.value), caught.value.hint) == (f"cannot write x/y: {reason}", hint)
    assert isinstance(caught.value.__cause__, OSError)


def test_an_error_without_a_number_says_its_own_words() -> None:
    assert str(files.io_error("read", "x", OSError("no more"))) == "cannot read x: no more"


def test_what_cannot_be_read_has_another_way_out_than_what_cannot_be_written() -> None:
    for number, hint in (
        (errno.EACCES, "make it readable for this user"),
        (errno.ENOSPC, "free some space, then run the same command again"),
    ):
        for action in ("read", "read tensor y from"):
            assert files.io_error(action, "x", OSError(number, "")).hint == hint


def test_pieces_that_the_system_shortens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite, preadv = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: pwrite(fd, data[:2], at))
    monkeypatch.setattr(os, "preadv", lambda fd, to, at: preadv(fd, [to[0][:2]], at))
    with files.opened_fd(tmp_path / "x", os.O_RDWR | os.O_CREAT) as fd:
        files.write_all(fd, memoryview(b"abcde"), 3)
        found = bytearray(4)
        files.read_exactly(fd, memoryview(found), 4)
        assert found == b"bcde"
        with pytest.raises(files.FileTooShortError, match=r"^the file ends too early$"):
            files.read_exactly(fd, memoryview(bytearray(5)), 4)
    assert (tmp_path / "x").read_bytes() == b"\0\0\0abcde"
    assert (tmp_path / "x").stat().st_mode & 0o777 & ~0o644 == 0
    with pytest.raises(OSError, match="descriptor"):
        os.fstat(fd)


@pytest.mark.parametrize("number", [0, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS, errno.ENOSPC])
def test_files_have_their_size_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """File systems that cannot allocate give the size alone; a full disk is an error."""
    real = os.posix_fallocate

    def allocate(fd: int, offset: int, size: int) -> None:
        if number:
            raise OSError(number, "refused")
        real(fd, offset, size)

    monkeypatch.setattr(os, "posix_fallocate", allocate)
    with (tmp_path / "x").open("wb") as file:
        if number == errno.ENOSPC:
            with pytest.raises(OSError, match="refused"):
                files.allocate(file.fileno(), 5000)
            return
        files.allocate(file.fileno(), 5000)
        stat = os.fstat(file.fileno())
    assert stat.st_size == 5000 and (number or stat.st_blocks * 512 >= 5000)


def test_a_file_reaches_the_disk_before_its_name(tmp_path: Path, steps: Names) -> None:
    (tmp_path / "staging").mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "staging/x.part").write_bytes(b"longer than what follows, of a killed run")
    for data, content in ((b"whole", b"whole"), (iter([b"pie", b"", b"ces"]), b"pieces")):
        files.write_durably(tmp_path / "out/x", data, tmp_path / "staging")
        assert (tmp_path / "out/x").read_bytes() == content
        assert names(tmp_path) == ["out", "out/x", "staging"]
    one = [("sync", "staging/x.part"), ("rename", "out/x"), ("sync", "out")]
    assert steps == [("remove", "staging/x.part"), *one, *one]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_write_that_fails_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    (tmp_path / "x").write_bytes(b"before")

    def refuse(_: object) -> None:
        raise OSError(number, "")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", refuse)
        with pytest.raises(ResourceError, match=rf"^cannot write {tmp_path}/x: the d"):
            files.write_durably(tmp_path / "x", b"after", tmp_path)
    assert names(tmp_path) == ["x"] and (tmp_path / "x").read_bytes() == b"before"
    with pytest.raises(ResourceError, match=rf"^cannot write {tmp_path}/none/y: "):
        files.write_durably(tmp_path / "none/y", b"", tmp_path / "none")
    (tmp_path / "y").mkdir()
    with pytest.raises(ResourceError, match=rf"^cannot write {tmp_path}/y: "):
        files.write_durably(tmp_path / "y", b"", tmp_path)
    assert names(tmp_path) == ["x", "y"]


def test_a_description_is_never_that_of_another_file(tmp_path: Path, steps: Names) -> None:
    x, y = tmp_path / "x", tmp_path / "y"
    files.write_described(x, b"1", y, b"one")
    staged = [("sync", "x.part"), ("sync", "y.part")]
    final = [("rename", "x"), ("sync", "."), ("rename", "y"), ("sync", ".")]
    assert steps == [*staged, *final]
    steps.clear()
    files.write_described(x, b"2", y, b"one")
    assert steps == [*staged, *final]  # the description is that of the new file, too
    steps.clear()
    files.write_described(x, b"3", y, b"three")
    assert steps == [*staged, ("remove", "y"), ("sync", "."), *final]
    assert (x.read_bytes(), y.read_bytes(), names(tmp_path)) == (b"3", b"three", ["x", "y"])


def test_what_fails_of_a_description_names_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y = tmp_path / "x", tmp_path / "y"
    files.write_described(x, b"1", y, b"one")
    replace = Path.replace

    def refuse(old: Path, new: Path) -> Path:
        if new.name == refused:
            raise OSError(errno.EIO, "")
        return replace(old, new)

    monkeypatch.setattr(Path, "replace", refuse)
    for refused, left in (("x", ["x"]), ("y", ["x"])):
        words = rf"^cannot write {tmp_path}/{refused}: the device"
        with pytest.raises(ResourceError, match=words):
            files.write_described(x, b"2", y, b"two")
        assert names(tmp_path) == left
    (tmp_path / "y").mkdir()
    with pytest.raises(ResourceError, match=rf"^cannot write {tmp_path}/y: "):
        files.write_described(x, b"2", y, b"two")


def test_the_names_of_all_directories_up_to_the_mount(
    tmp_path: Path, steps: Names, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "mount/a/b"
    folder.mkdir(parents=True)
    (tmp_path / "link").symlink_to(folder)
    stat = Path.stat
    outside = [tmp_path, *tmp_path.parents]

    def mounted(path: Path, **named: bool) -> Any:
        found = stat(path, **named)
        return os.stat_result((*found[:2], -1, *found[3:])) if path in outside else found

    monkeypatch.setattr(Path, "stat", mounted)
    files.sync_names(tmp_path / "link")
    assert steps == [("sync", "mount/a"), ("sync", "mount")]
    with pytest.raises(ResourceError, match=rf"^cannot write {tmp_path}/none: No such"):
        files.sync_names(tmp_path / "none")


def test_directories_survive_with_their_parents(tmp_path: Path, steps: Names) -> None:
    files.make_directory(tmp_path / "a/b/c")
    assert names(tmp_path) == ["a", "a/b", "a/b/c"]
    assert steps == [("sync", "."), ("sync", "a"), ("sync", "a/b")]
    files.make_directory(tmp_path / "a/b/c")
    assert len(steps) == 3


def test_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error in a directory that may not be entered: Python 3.14 would say that nothing is."""
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    assert files.is_there(tmp_path) and files.is_there(tmp_path / "file")
    for name in ("none", "file/below", "loop", "a\0b"):
        assert not files.is_there(tmp_path / name), name
    with pytest.raises(ResourceError, match=r"^cannot read .*: .*name.*long"):
        files.is_there(tmp_path / ("x" * 300))
    ask = os.stat

    def refused(path: Any, *given: Any, **named: Any) -> Any:
        if str(path).endswith("locked/model"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return ask(path, *given, **named)

    monkeypatch.setattr(os, "stat", refused)
    with pytest.raises(ResourceError, match=r"^cannot read .*locked/model: permission denied"):
        files.is_there(tmp_path / "locked/model")


@pytest.mark.parametrize("kind", [PermissionError, FileNotFoundError])
def test_parents_that_cannot_be_read_are_entered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[OSError]
) -> None:
    def refuse(_: Path) -> None:
        raise kind

    monkeypatch.setattr(files, "sync", refuse)
    files.make_directory(tmp_path / "a/b")
    files.sync_names(tmp_path / "a/b")
    assert names(tmp_path) == ["a", "a/b"]


def test_a_directory_whose_name_may_be_lost_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: object) -> None:
        raise OSError(errno.EIO, "")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(ResourceError, match=rf"^cannot create directory {tmp_path}/a: the device"):
        files.make_directory(tmp_path / "a")
    assert names(tmp_path) == []


@pytest.mark.parametrize("kind", [FileExistsError, FileNotFoundError])
def test_a_directory_that_is_never_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[OSError]
) -> None:
    """As in /proc: it is tried so often, and no more. One that comes late is taken."""
    tries: list[Path] = []
    mkdir = Path.mkdir

    def refuse(path: Path) -> None:
        tries.append(path)
        if len(tries) == late:
            mkdir(path)
        raise kind(2, "refused")

    monkeypatch.setattr(Path, "mkdir", refuse)
    late = 0
    with pytest.raises(ResourceError, match=rf"^cannot create directory {tmp_path}/a: No such"):
        files.make_directory(tmp_path / "a")
    assert tries == [tmp_path / "a"] * files.MKDIR_ATTEMPTS
    tries.clear()
    late = files.MKDIR_ATTEMPTS - 1
    files.make_directory(tmp_path / "a")
    assert len(tries) == late


def test_what_stands_where_a_directory_should_be(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "none")
    for name, words in (
        ("file", "is a file"), ("file/below", "file is a file"), ("link", "is a broken link"),
        ("link/below", "link is a broken link"),
    ):  # fmt: skip
        with pytest.raises(OutputError, match=words) as caught:
            files.make_directory(tmp_path / name)
        assert caught.value.hint == "choose another path, or remove it"


def test_files_that_options_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(b"kept")
    os.mkfifo(tmp_path / "pipe")
    before = names(tmp_path)
    for name in ("file", "new"):
        files.check_writable(tmp_path / name, "--report")
    assert names(tmp_path) == before and (tmp_path / "file").read_bytes() == b"kept"
    monkeypatch.chdir(tmp_path)
    files.check_writable(Path("new"), "--report")
    for name, words, hint in (
        (".", "cannot be written", "give a file in an existing directory"),
        ("none/new", "cannot be written", "give a file in an existing directory"),
        ("file/new", "cannot be written", "give a file in an existing directory"),
        ("pipe", "is not a regular file", "give the name of a new file"),
    ):
        with pytest.raises(UsageError, match=rf"^--report {name} {words}$") as caught:
            files.check_writable(Path(name), "--report")
        assert caught.value.hint == hint
    for refused, name in ((tmp_path / "file", "file"), (tmp_path, "new")):
        allowed = [path for path in (tmp_path / "file", tmp_path) if path != refused]
        with monkeypatch.context() as patch:
            patch.setattr(os, "access", lambda path, mode, fine=allowed: path in fine and mode == 2)
            files.check_writable(tmp_path / ("new" if name == "file" else "file"), "--report")
            with pytest.raises(UsageError, match="cannot be written") as caught:
                files.check_writable(tmp_path / name, "--report")
        assert caught.value.hint == "choose a directory that can be written"


def test_a_file_that_an_option_names_is_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[Path] = []

    def full(dir: Path) -> None:
        tried.append(dir)
        raise OSError(errno.ENOSPC, "")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    with pytest.raises(DiskFullError, match=r"^cannot write x: the disk is full$"):
        files.check_writable(Path("x"), "--report")
    assert tried == [tmp_path]


def test_directories_that_options_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "none")
    (tmp_path / "model/part").mkdir(parents=True)
    (tmp_path / "other").symlink_to(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    apart = [Path("model")]
    for name in (".", "new", "new/below"):
        files.check_directory(Path(name), "--work-dir", apart)
    files.check_directory(Path("model/part"), "--work-dir")
    for name, why in (
        ("file", f"{tmp_path}/file is not a directory"),
        ("file/below", f"{tmp_path}/file is not a directory"),
        ("link/below", f"{tmp_path}/link is not a directory"),
        ("model", "it is in model, to which nothing may be added"),
        ("other/new", "it is in model, to which nothing may be added"),
    ):
        with pytest.raises(UsageError) as caught:
            files.check_directory(Path(name), "--work-dir", apart)
        assert str(caught.value) == f"--work-dir {name} cannot be used: {why}"
        assert caught.value.hint == "choose another directory"
    monkeypatch.setattr(
        os, "access", lambda path, mode: (path, mode) != (tmp_path, os.W_OK | os.X_OK)
    )
    with pytest.raises(UsageError, match=rf": {tmp_path} cannot be written$"):
        files.check_directory(Path("new"), "--work-dir")


def test_removing_what_is_there_and_what_is_not(tmp_path: Path) -> None:
    (tmp_path / "folder/below").mkdir(parents=True)
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept/file").touch()
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "kept")
    for name in ("folder", "file", "link", "none"):
        files.remove(tmp_path / name)
    assert names(tmp_path) == ["kept", "kept/file"]
    (tmp_path / "a/b").mkdir(parents=True)
    files.remove_empty(tmp_path / "a/b", tmp_path / "kept", tmp_path / "a")
    assert names(tmp_path) == ["a", "kept", "kept/file"]  # no further than the first that is kept
    files.remove_empty(tmp_path / "a")
    assert names(tmp_path) == ["kept", "kept/file"]


@pytest.mark.parametrize("number", [errno.ENOTEMPTY, errno.EBUSY, errno.EIO])
def test_removing_what_this_process_has_open_on_nfs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, "refused")

    words = rf"^cannot remove {tmp_path}/a: "
    for call, held in (("rmdir", True), ("rmdir", False), ("unlink", True)):
        (tmp_path / "a").mkdir(exist_ok=True)
        (tmp_path / "a/x").touch()
        with monkeypatch.context() as patch:
            patch.setattr(os, call, refuse)
            if call == "rmdir" and held and number != errno.EIO:
                files.remove(tmp_path / "a", but_held=True)
            else:
                with pytest.raises(ResourceError, match=words):
                    files.remove(tmp_path / "a", **({"but_held": True} if held else {}))
        assert (tmp_path / "a").is_dir()


# ---- devices, and limits of the process --------------------------------------------------


@pytest.mark.parametrize("device", ["/dev/zero", "/dev/null"])
def test_devices_are_refused(device: str, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(device)
    for path in (Path(device), tmp_path / "link"):
        with pytest.raises(UsageError, match=f"^--text {path} is a device$"):
            regular_files.refuse_device(path, "--text")


def test_files_and_pipes_are_no_devices(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").touch()
    for name in ("pipe", "file", "missing"):
        regular_files.refuse_device(tmp_path / name, "--text")


@pytest.mark.parametrize(
    ("number", "hint"),
    [
        (errno.EMFILE, "raise the limit of open files (ulimit -n)"),
        (errno.ENOSPC, "free some space, then run the same command again"),
        (errno.EACCES, None),  # reading and writing have different ones
        (errno.ELOOP, None),
        (None, None),
    ],
)
def test_what_helps_whatever_was_tried(number: int | None, hint: str | None) -> None:
    assert files.way_out(OSError(number, "x") if number else OSError("x")) == hint
