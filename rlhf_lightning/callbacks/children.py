"""The end of a run one of whose processes, started by Lightning, has failed."""

from __future__ import annotations

import signal
import subprocess
import threading
from collections.abc import Callable
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

OBSERVER = "child-process-observer"  # Lightning's thread, which kills all processes of the run
NOTICE_SECONDS = 15.0
LEAVE_SECONDS = 5.0


class WatchChildren(Callback):
    """Let the first process write down why the run ends, before everything is killed.

    Lightning kills the first process within five seconds after another one failed, and the run
    folder then says for ever that the run is under way. A process that waits for a dead one may
    fail by itself and say what it lost (gloo), or wait until it is killed (NCCL): it has
    `NOTICE_SECONDS` for the former.

    Args:
        tell: is given rank and exit code of those that failed, from another thread, where the
            first process has not noticed; all processes are killed afterwards.
    """

    def __init__(self, tell: Callable[[dict[int, int]], None]) -> None:
        self.tell = tell
        self.noticed = threading.Event()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Put ourselves before what Lightning's observer does; other launchers have none."""
        for thread in threading.enumerate():
            if thread.name == OBSERVER:
                observer: Any = thread
                observer._terminate_all = self._instead_of(observer, observer._terminate_all)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Note that the first process ends the run by itself."""
        self.noticed.set()

    def _instead_of(self, observer: Any, kill_all: Callable[[], None]) -> Callable[[], None]:
        def end() -> None:
            children: list[subprocess.Popen[bytes]] = observer._child_processes
            failed = {i + 1: p.returncode for i, p in enumerate(children) if p.returncode}
            if self.noticed.wait(NOTICE_SECONDS):
                threading.Event().wait(LEAVE_SECONDS)
                for child in children:
                    if child.poll() is None:
                        child.send_signal(signal.SIGKILL)
                return
            try:
                self.tell(failed)
            finally:
                kill_all()

        return end
