"""A callback of a user that is given a secret and tells it whoever listens."""

from __future__ import annotations

import logging
import os

from lightning.pytorch import Callback, LightningModule, Trainer


class Leaky(Callback):
    """Logs its key, writes it into a metric's name, and fails with it in the message."""

    def __init__(self, api_key: str, fails: bool = True) -> None:
        self.api_key = api_key
        self.fails = fails

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        logging.getLogger(__name__).warning("asking with the key %s", self.api_key)
        if self.fails:
            other = os.environ["MY_SERVICE_PASSWORD"]
            raise RuntimeError(f"401: the service does not know api_key={self.api_key} / {other}")
