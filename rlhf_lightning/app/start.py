"""The start of every command: help and the words of a shell come before torch is imported."""

from __future__ import annotations

import gc
import importlib
import sys

import hydra

from rlhf_lightning import __version__
from rlhf_lightning.app.config.compose import conf_dir, register
from rlhf_lightning.app.config.help import help_text, register_help
from rlhf_lightning.distributed.process import prepare_process


def start(command: str, module: str | None = None) -> None:
    """Write the help of a command, its version, or what completes its words in a shell, or run it.

    Args:
        command: its name, and its file in `conf/`.
        module: the file of `app` that has its `main`; None for that of its name.
    """
    # In one order with the other stream and with child processes, whatever the locale can show.
    sys.stdout.reconfigure(errors="replace", line_buffering=True)  # type: ignore[union-attr]
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(help_text(command), flush=True)  # noqa: T201
        return
    if "--version" in sys.argv[1:]:
        print(f"rlhf_lightning {__version__}", flush=True)  # noqa: T201
        return
    if {"-sc", "--shell-completion"} & set(sys.argv[1:]):
        register()
        register_help()
        hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name=command)(id)()
        return
    prepare_process()
    # Imports make half a million objects that stay. The collector looks through those that are
    # there after every 700 new ones by default: a seventh of the time to import torch.
    gc.set_threshold(10_000)
    importlib.import_module(f"rlhf_lightning.app.{module or command}").main()
