"""Importing this, before torch, sets the process up as `rlhf_lightning.train` does."""

from rlhf_lightning.distributed.process import prepare_process

prepare_process()
