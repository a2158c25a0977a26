"""Output that may fail: what is printed is no part of the work."""

from __future__ import annotations

import io
import os
import re
import select
import sys
from contextlib import suppress

# What a terminal would obey, but for tabs and line ends. A terminal itself gets the colours of
# tables as well, and what moves a progress bar.
_CONTROLS = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")
_CONTROLS_NOT_OURS = re.compile(rf"(?!\x1b\[([0-9;]*m|[0-9]*[AK]|\?25[hl])){_CONTROLS.pattern}")


class Shown(io.TextIOWrapper):
    """Text whose control characters, which a record or a name may hold, are shown, not obeyed."""

    def write(self, text: str) -> int:
        """Write `text`; return its length."""
        controls = _CONTROLS_NOT_OURS if self.isatty() else _CONTROLS
        super().write(controls.sub(lambda found: f"\\x{ord(found.group()):02x}", text))
        return len(text)


class _Lasting(io.RawIOBase):
    """A descriptor that takes whatever is written; once it fails, all of it goes nowhere.

    The descriptor itself then leads nowhere, so that processes that inherit it can write as well.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def fileno(self) -> int:
        return self.descriptor

    def isatty(self) -> bool:
        return os.isatty(self.descriptor)

    def writable(self) -> bool:
        return True

    def write(self, content: object) -> int:
        view = memoryview(content)  # type: ignore[arg-type]
        try:
            return os.write(self.descriptor, view)
        except BlockingIOError:
            select.select([], [self.descriptor], [])
            return 0
        except OSError:
            lead_nowhere(self.descriptor)
            return len(view)


def lead_nowhere(descriptor: int) -> None:
    """Have what is written to a descriptor thrown away, also where it was closed."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    if nowhere != descriptor:
        os.dup2(nowhere, descriptor)
        os.close(nowhere)


def outlast_terminal() -> None:
    """Let no print end this process or control its terminal.

    A character that the encoding lacks or a closed terminal raises nothing, and control characters
    of records and files are escaped.

    A reader of a pipe may go away (`| head -1`), a window may be closed under a disowned run, a
    disk behind `> FILE` may be full. Streams that were replaced by other code are kept.
    """
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        stream = getattr(sys, name)
        if stream is None:  # closed by who started us: the next file opened would get its number
            with suppress(OSError):
                os.fstat(descriptor)
                continue
            lead_nowhere(descriptor)
        elif stream is not getattr(sys, f"__{name}__"):
            continue
        else:
            with suppress(OSError):
                stream.flush()
        lasting = Shown(
            io.BufferedWriter(_Lasting(descriptor)),
            encoding=getattr(stream, "encoding", "utf-8"),
            errors="replace" if descriptor == 1 else "backslashreplace",
            line_buffering=True,  # in one order with the other stream and with child processes
        )
        setattr(sys, name, lasting)
