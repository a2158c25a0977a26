"""Atomic writes: a reader, or the next start after a kill, sees the old file or the new one."""

from __future__ import annotations

import ctypes
import errno
import os
import re
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

FULL = {
    errno.ENOSPC: "no space is left on the device",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "the file is larger than the system allows",
}
_ERROR_NUMBER = re.compile(r"\(os error (\d+)\)")  # how safetensors reports it

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


class DiskFullError(OSError):
    """There is no room to write; the message names the path and what is free there."""


@contextmanager
def naming_full_disk(path: Path | str) -> Iterator[None]:
    """Turn an error because of a full disk into a `DiskFullError` about `path`."""
    try:
        yield
    except Exception as error:
        number = full_disk(error)
        if number is None or isinstance(error, DiskFullError):
            raise
        raise DiskFullError(describe_full_disk(number, path)) from error


def full_disk(error: BaseException) -> int | None:
    """Return the number of the system's error if a full disk is behind `error`, else None.

    torch reports one as a failure of its archive, safetensors in words.
    """
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.errno in FULL:
            return seen.errno
        found = _ERROR_NUMBER.search(str(seen))
        if found and int(found.group(1)) in FULL:
            return int(found.group(1))
        seen = seen.__cause__ or seen.__context__
    return None


def describe_full_disk(number: int, path: Path | str) -> str:
    """Return what could not be written where, and how much is free there."""
    folder = Path(path).absolute()
    while not folder.exists():
        folder = folder.parent
    there = os.statvfs(folder)
    free = f"{there.f_bavail * there.f_frsize / 2**20:.1f} MiB free there"
    if number == errno.ENOSPC and there.f_files and not there.f_favail:
        free = f"not one inode is free there, which each file takes: remove files; {free}"
    return (
        f"cannot write {path}: {FULL[number]} ({free}). The previous content "
        "is intact: make room and start again (a run with resume=auto)"
    )


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """Yield a binary file that takes the place of `path` when the block ends without an error.

    The bytes go to a temporary file in the same folder, because a rename is atomic only within
    one filesystem; they are on disk before the rename, and the rename is on disk on return.

    Raises:
        DiskFullError: if there is no room; `path` is then what it was.
    """
    with naming_full_disk(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = staging_of(path)
        try:
            with open(temporary, "wb", opener=_new_file) as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
            sync_folder(path.parent)
        finally:
            temporary.unlink(missing_ok=True)


_STAGED = ".tmp-"


def target_of(staging: Path) -> str:
    """Return what a path of `staging_of` will be, as it can be typed; another path as it is."""
    name, staged, _ = staging.name.removeprefix(".").partition(_STAGED)
    return from_here(staging.with_name(name) if staged else staging)


def from_here(path: Path) -> str:
    """Return a path as short as it can be typed: below the working folder without that folder."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)


def staging_of(path: Path) -> Path:
    """Return the path where a process writes the replacement of `path`; its folder must exist.

    Leftovers of dead processes of this machine are removed.
    """
    head = f".{path.name}{_STAGED}{socket.gethostname()}-"
    for left in path.parent.iterdir():
        number = left.name.removeprefix(head)
        if left.name.startswith(head) and number.isdecimal() and not _is_alive(int(number)):
            if left.is_dir() and not left.is_symlink():
                shutil.rmtree(left, ignore_errors=True)
            else:
                with suppress(OSError):  # of another user
                    left.unlink()
    return path.with_name(f"{head}{os.getpid()}")


def _is_alive(process: int) -> bool:
    if process == os.getpid():  # what has its number is of an earlier process
        return False
    with suppress(ProcessLookupError):
        with suppress(PermissionError):
            os.kill(process, 0)
        return True
    return False


def _new_file(name: str, flags: int) -> int:
    """Open a file that is not there: the name of a temporary one can be foretold, and be a link."""
    return os.open(name, flags | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0), 0o666)


def write_text(path: Path, text: str) -> None:
    """Replace the content of `path` by `text` in one step; a lone surrogate is escaped."""
    with replacing(path) as file:
        file.write(text.encode("utf-8", "backslashreplace"))


def follow_umask(*paths: Path) -> None:
    """Give files the mode that a new file gets beside them.

    safetensors and `tempfile` make files that their owner alone may read.
    """
    for path in paths:
        probe = path.with_name(f".{path.name}.mode-{os.getpid()}")
        probe.unlink(missing_ok=True)
        # The process's umask cannot be read without changing it for every thread.
        open(probe, "wb", opener=_new_file).close()
        try:
            path.chmod(probe.stat().st_mode & 0o777)
        finally:
            probe.unlink()


def link_atomically(link: Path, target: Path) -> None:
    """Make `link` a relative symbolic link to `target`; at no instant is there no `link`."""
    temporary = staging_of(link)
    temporary.symlink_to(os.path.relpath(target, link.parent))
    temporary.replace(link)
    sync_folder(link.parent)


def link_or_copy(source: Path | str, target: Path | str) -> None:
    """Make `target` a hard link to the file `source`; a copy where there are no such links."""
    try:
        os.link(source, target, follow_symlinks=True)
    except OSError:  # another file system, or one without hard links
        Path(target).unlink(missing_ok=True)
        shutil.copy2(source, target)
        with Path(target).open("rb") as file:
            os.fsync(file.fileno())


def take_along(source: Path, target: Path) -> None:
    """Put the file or folder `source` at `target` as well, in one step, linked where possible.

    Raises:
        DiskFullError: if there is no room; nothing is at `target` then.
    """
    with naming_full_disk(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        staging = staging_of(target)
        try:
            if source.is_dir():
                shutil.copytree(source, staging, copy_function=link_or_copy)
            else:
                link_or_copy(source, staging)
            staging.rename(target)
            sync_folder(target.parent)
        finally:
            remove(staging)


def replace_folder(new: Path, target: Path) -> Path | None:
    """Put the folder `new` at `target` and return where the former folder is now, if any.

    On Linux both names are exchanged in one system call. Elsewhere the former folder is moved
    aside first, which leaves a moment without `target`.
    """
    if not target.exists():
        new.rename(target)
        sync_folder(target.parent)
        return None
    if _exchange(new, target):
        sync_folder(target.parent)
        return new
    aside = target.with_name(f".{target.name}.old-{os.getpid()}")
    target.rename(aside)
    new.rename(target)
    sync_folder(target.parent)
    return aside


def remove(path: Path) -> None:
    """Remove a file, a link, or a folder, which loses its name before it loses its content."""
    if path.is_dir() and not path.is_symlink():
        aside = path.with_name(f".{path.name}.tmp-removed")
        shutil.rmtree(aside, ignore_errors=True)
        path.rename(aside)
        shutil.rmtree(aside)
    else:
        path.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Bring the names in `folder` to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:  # some network filesystems refuse to sync a folder
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def _exchange(first: Path, second: Path) -> bool:
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    done = rename(
        _AT_FDCWD,
        os.fsencode(first),
        _AT_FDCWD,
        os.fsencode(second),
        ctypes.c_uint(_RENAME_EXCHANGE),
    )
    return bool(done == 0)
