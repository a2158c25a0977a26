"""Whether Weights & Biases runs online: without a network, and without asking anybody."""

from __future__ import annotations

import logging
import netrc
import os
from pathlib import Path
from typing import Literal
from urllib.parse import urlparse

logger = logging.getLogger(__name__)

Mode = Literal["auto", "online", "offline", "disabled"]
MODES = ("auto", "online", "offline", "disabled")
_KEY_VARIABLES = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")


def choose_mode(mode: Mode) -> Literal["online", "offline", "disabled"]:
    """Return the mode to use, without a network and without asking anybody."""
    wanted: str = mode
    if mode == "auto":
        wanted = os.environ.get("WANDB_MODE", "online").lower()
        if wanted in ("dryrun", "shared"):
            wanted = "offline" if wanted == "dryrun" else "online"
    if wanted in ("disabled", "offline"):
        return "disabled" if wanted == "disabled" else "offline"
    if is_logged_in():
        return "online"
    if mode == "online":
        logger.warning(
            "logger.mode=online, but nobody is logged in to Weights & Biases: running offline; "
            "set WANDB_API_KEY or run `wandb login`, and upload this run with `wandb sync`"
        )
    return "offline"


def is_logged_in() -> bool:
    """Return whether there is a key for the W&B host: in the environment or in the netrc file."""
    if any(os.environ.get(name) for name in _KEY_VARIABLES):
        return True
    base = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")
    host = urlparse(base).netloc or base
    for path in (os.environ.get("NETRC"), "~/.netrc", "~/_netrc"):
        if path and (file := Path(path).expanduser()).is_file():
            try:
                found = netrc.netrc(str(file)).authenticators(host)
            except (netrc.NetrcParseError, OSError):
                continue
            if found and found[2]:
                return True
    return False
