"""Set the process up as `rlhf_lightning.train` does; must be imported before torch."""

from rlhf_lightning.distributed.process import prepare_process

prepare_process()
