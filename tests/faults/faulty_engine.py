"""vLLM's server with a fault: `faulty_engine.py -P ENGINE SOCKET`, in the place of its interpreter.

FAULT is `kill`, `stop` or `stay` (in the middle of a generation), `edited` (a weight is changed
after it arrived), or `lost` (a tensor is taken out of a transfer). FAULT_CALLS are the numbers of
the calls, of this server and those before it, which FAULT_COUNT counts.
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

from safetensors.numpy import load_file, save_file

FAULT = os.environ["FAULT"]
CALLS = [int(number) for number in os.environ["FAULT_CALLS"].split(",")]
COUNT = Path(os.environ["FAULT_COUNT"])
LOST = "model.layers.0.mlp.down_proj.weight"
EDITED = "model.norm.weight"  # of a matrix a CPU computes with a packed copy


def is_due() -> bool:
    with COUNT.open("a") as file:
        file.write("x")
    return COUNT.stat().st_size in CALLS


def happen() -> None:
    COUNT.with_suffix(".pid").write_text(str(os.getpid()))
    if FAULT == "stay":
        time.sleep(3600)
    os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[FAULT])


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


def edit(worker: Any) -> None:
    worker.get_model().get_parameter(EDITED).data.mul_(1.5)


def lose_a_tensor(folder: str) -> None:
    for file in Path(folder).glob("*.safetensors"):
        tensors = load_file(file)
        if tensors.pop(LOST, None) is not None:
            save_file(tensors, file)


def main(path: str, socket: str) -> None:
    spec: Any = importlib.util.spec_from_file_location("vllm_engine", path)
    engine: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(engine)

    class Faulty(engine.Engine):
        def generate(self, *arguments: Any, **options: Any) -> Any:
            if FAULT in ("kill", "stop", "stay") and is_due():
                in_the_middle(self.llm)
            return super().generate(*arguments, **options)

        def load(self, folder: str) -> None:
            due = FAULT in ("edited", "lost") and is_due()
            if due and FAULT == "lost":
                lose_a_tensor(folder)
            super().load(folder)
            if due and FAULT == "edited":
                self.llm.collective_rpc(edit)

    engine.Engine = Faulty
    engine.serve(Connection(int(socket)))


if __name__ == "__main__":
    main(*sys.argv[2:])
