"""A vLLM engine in a process of its own, which serves requests.

Must not import the package: this file is run by an interpreter that has vLLM and need not have
anything else of ours. A request and its reply are JSON over a socket that the
server was started with; weights are safetensors files.
"""

from __future__ import annotations

import importlib
import json
import os
import select
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

VERSION = "0.32"  # the release whose calls these are, and that tests were run with
# Set before vLLM is imported, unless they are set: it would report how it is used.
ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    # The engine's loop in this process, with which it ends.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}

GRACE = 5.0  # seconds for a server to end in order when the other side is gone

Completion = tuple[list[int], list[float]]  # tokens of a response and their log-probabilities


class Engine:
    """vLLM with the weights of a folder.

    Args:
        folder: config.json and safetensors files.
        options: arguments of `vllm.LLM`. With `enable_sleep_mode` the engine gives the memory of
            weights and cache back after each generation.

    Raises:
        ImportError: if vLLM is not installed.
        RuntimeError: for another release of vLLM.
    """

    def __init__(self, folder: str, options: dict[str, Any]) -> None:
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        self.vllm: Any = importlib.import_module("vllm")
        found = str(self.vllm.__version__)
        if found.split(".")[:2] != VERSION.split("."):
            raise RuntimeError(f"vLLM {found} is installed, and this was made for {VERSION}")
        self.sleeps = bool(options.get("enable_sleep_mode"))
        self.asleep = False
        self.llm = self.vllm.LLM(
            model=folder,
            skip_tokenizer_init=True,
            generation_config="vllm",  # never the checkpoint's top-k and top-p
            logprobs_mode="processed_logprobs",  # at the temperature
            **options,
        )

    def load(self, folder: str) -> None:
        """Replace every weight by those of a folder.

        Raises:
            RuntimeError: if keys and values of the old weights could not be dropped.
        """
        if self.asleep:
            self.llm.wake_up(tags=["weights"])
        self.llm.collective_rpc("reload_weights", kwargs={"weights_path": folder})
        if self.asleep:
            self.llm.wake_up(tags=["kv_cache"])
        self.asleep = False
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("vLLM kept keys and values of the weights before")

    def generate(
        self,
        rows: Sequence[Sequence[int]],
        seeds: Sequence[int],
        *,
        temperature: float,
        max_new_tokens: int,
        stop_ids: Sequence[int],
        stay_awake: bool = False,
    ) -> list[Completion]:
        """Return a response to each prompt of `rows`, its stop token included.

        The log-probabilities are those of softmax(logits / temperature), or of softmax(logits) at
        temperature 0.

        Raises:
            RuntimeError: if vLLM responds to other prompts than it was sent.
        """
        shared = {
            "temperature": temperature,
            "top_p": 1.0,
            "top_k": 0,
            "min_p": 0.0,
            "max_tokens": max_new_tokens,
            "stop_token_ids": list(stop_ids),
            "ignore_eos": True,  # only our own stop ids end a response
            "detokenize": False,
            "logprobs": 0,  # of the chosen token alone
        }
        settings = [self.vllm.SamplingParams(seed=seed, **shared) for seed in seeds]
        prompts = [self.vllm.TokensPrompt(prompt_token_ids=list(row)) for row in rows]
        outputs = self.llm.generate(prompts, settings, use_tqdm=False)
        if self.sleeps and not stay_awake:
            self.llm.sleep(level=2)  # weights are sent again before they are needed
            self.asleep = True
        # Cut prompts, or responses in another order, would belong to other rows.
        if [list(output.prompt_token_ids) for output in outputs] != [list(row) for row in rows]:
            raise RuntimeError("vLLM answered other prompts than it was asked")
        return [_completion(output.outputs[0]) for output in outputs]


def _completion(response: Any) -> Completion:
    tokens = list(response.token_ids)
    pairs = zip(tokens, response.logprobs, strict=True)
    return tokens, [entry[token].logprob for token, entry in pairs]


def serve(connection: Connection) -> None:
    """Serve requests `[number, method, arguments]` until the other side hangs up."""
    engine: Engine | None = None
    folders = [""]  # of the weights
    threading.Thread(target=_end_with, args=(connection, folders), daemon=True).start()
    while True:
        try:
            number, method, arguments = json.loads(connection.recv_bytes())
        except EOFError:
            return
        folders[0] = arguments.get("folder", folders[0])
        reply: dict[str, Any] = {"result": None}
        try:
            if method == "start":
                engine = Engine(**arguments)
            else:
                reply["result"] = getattr(engine, method)(**arguments)
        except Exception as error:
            traceback.print_exc()
            reply = {"error": f"{type(error).__name__}: {error}"}
        connection.send_bytes(json.dumps([number, reply]).encode())


def _end_with(connection: Connection, folders: Sequence[str]) -> None:
    """Wait for the other side to hang up; then remove the weights, and end what is under way.

    A process that was killed cannot remove its files, and a generation may take minutes.
    """
    watched = select.poll()
    watched.register(connection.fileno(), 0)  # a hang-up is always told
    watched.poll()
    shutil.rmtree(folders[0], ignore_errors=True)
    time.sleep(GRACE)
    os.killpg(os.getpid(), signal.SIGKILL)  # a server leads its group, which its workers are in


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
