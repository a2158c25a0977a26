"""The stages of training, one file each: what differs between them stands here and nowhere else."""
