"""vLLM's server with a fault: `faulty_engine.py -P ENGINE SOCKET`, in the place of its interpreter.

In the middle of its second generation, counted by FAULT_COUNT over all servers of a run, it is
killed (FAULT=kill) or stays where it is (FAULT=stay).
"""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

COUNT = Path(os.environ["FAULT_COUNT"])


def is_due() -> bool:
    with COUNT.open("a") as file:
        file.write("x")
    return COUNT.stat().st_size == 2


def happen() -> None:
    COUNT.with_suffix(".pid").write_text(str(os.getpid()))
    if os.environ["FAULT"] == "stay":
        time.sleep(3600)
    os.kill(os.getpid(), signal.SIGKILL)


def in_the_middle(llm: Any) -> None:
    """Let it happen at the third token; a stand-in writes all tokens at once."""
    engine = getattr(llm, "llm_engine", None)
    if engine is None:
        happen()
        return
    step: Callable[[], Any] = engine.step
    steps = []

    def counted() -> Any:
        steps.append(1)
        if len(steps) == 3:
            happen()
        return step()

    engine.step = counted


def main(path: str, socket: str) -> None:
    spec: Any = importlib.util.spec_from_file_location("vllm_engine", path)
    engine: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(engine)

    class Faulty(engine.Engine):
        def generate(self, *arguments: Any, **options: Any) -> Any:
            if is_due():
                in_the_middle(self.llm)
            return super().generate(*arguments, **options)

    engine.Engine = Faulty
    engine.serve(Connection(int(socket)))


if __name__ == "__main__":
    main(*sys.argv[2:])
