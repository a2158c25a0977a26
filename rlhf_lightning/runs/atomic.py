"""Atomic writes: a reader, or the next start after a kill, sees the old content or the new one."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """Yield a binary file that takes the place of `path` when the block ends without an error.

    The bytes go to a temporary file in the same folder, because a rename is atomic only within
    one filesystem; they are on disk before the rename, and the rename is on disk on return.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Replace the content of `path` by `text` in one step; a lone surrogate is escaped."""
    with replacing(path) as file:
        file.write(text.encode("utf-8", "backslashreplace"))


def follow_umask(*paths: Path) -> None:
    """Give files the mode of a new file; safetensors makes some that their owner alone may read."""
    os.umask(umask := os.umask(0))
    for path in paths:
        path.chmod(0o666 & ~umask)


def link_atomically(link: Path, target: Path) -> None:
    """Make `link` a relative symbolic link to `target`; at no instant is there no `link`."""
    temporary = link.with_name(f".{link.name}.tmp-{os.getpid()}")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(os.path.relpath(target, link.parent))
    temporary.replace(link)
    sync_folder(link.parent)


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
    with suppress(OSError):  # some network filesystems refuse to sync a folder
        os.fsync(descriptor)
    os.close(descriptor)
