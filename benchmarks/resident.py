"""Peak resident memory of a command, read from outside.

`VmHWM` of /proc/PID/status is the kernel's own high-water mark of what is resident: private memory
and mapped files alike. It is read until the process ends, as nothing else tells it exactly: what
`wait4` gives may be the memory of the process that started it.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

INTERVAL = 0.01  # seconds; a peak that falls into the last of them before the end may be missed
LAST_WORDS = 3000


@dataclass(frozen=True)
class Resident:
    """The memory of a process, in bytes.

    Args:
        peak: most that was resident at once.
        private: most that was resident and no file, as seen every `INTERVAL`.
        files: resident files when most was resident: libraries, and weights that are mapped.
        seconds: it ran.
    """

    peak: int
    private: int
    files: int
    seconds: float


def watch(command: Sequence[str], *, environment: Mapping[str, str], folder: Path) -> Resident:
    """Run `command` to its end and return what it held.

    Args:
        command: and its arguments.
        environment: all of its variables.
        folder: that it runs in.

    Raises:
        RuntimeError: if it fails, with its last words; if this is no Linux.
    """
    if not Path("/proc/self/status").exists():
        raise RuntimeError("resident memory is read from /proc/PID/status, which only Linux has")
    started = time.monotonic()
    with tempfile.TemporaryFile() as words:
        process = subprocess.Popen(
            command, cwd=folder, env=dict(environment), stdout=words, stderr=subprocess.STDOUT
        )
        peak, private, files, most = 0, 0, 0, 0
        while process.poll() is None:
            now = _status(process.pid)
            peak, private = max(peak, now.get("VmHWM", 0)), max(private, now.get("RssAnon", 0))
            if now.get("VmRSS", 0) > most:
                most, files = now["VmRSS"], now["RssFile"]
            time.sleep(INTERVAL)
        if process.returncode:
            words.seek(0, os.SEEK_END)
            words.seek(max(words.tell() - LAST_WORDS, 0))
            text = words.read().decode(errors="replace")
            raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}:\n{text}")
    return Resident(peak, private, files, time.monotonic() - started)


def _status(pid: int) -> dict[str, int]:
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return {}
    fields = (line.partition(":") for line in lines if line.endswith(" kB"))
    return {name: int(value.split()[0]) * 1024 for name, _, value in fields}
