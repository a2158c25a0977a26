"""Importing this, before torch, sets the process up as `rlhf_lightning.train` does."""

from rlhf_lightning.process_settings import prepare_process

prepare_process()
