"""Code in a checkpoint is not run, whichever way it is read."""

from __future__ import annotations

import os
import pickle

import pytest
import torch

from rlhf_lightning.distributed.checkpoint import META, load_shards, load_whole, read_full
from rlhf_lightning.modules.pretrained import read_checkpoint
from rlhf_lightning.runs.resume import CheckpointError


class Code:
    def __reduce__(self):
        return (os.mkdir, (str(self.place),))

    def __init__(self, place):
        self.place = place


@pytest.mark.parametrize("read", ["full", "shards", "whole", "library"])
def test_code_in_a_checkpoint_is_one_line_and_is_not_run(read, tmp_path):
    made = tmp_path / "made"
    torch.save({"x": Code(made)}, tmp_path / META)
    model = torch.nn.Linear(1, 1)
    readers = {
        "full": lambda: read_full(tmp_path),
        "shards": lambda: load_shards(tmp_path, model, []),
        "whole": lambda: load_whole(tmp_path / META, model, []),
        "library": lambda: read_checkpoint(tmp_path / META, {}),
    }
    with pytest.raises(CheckpointError, match=META) as told:
        readers[read]()
    assert "\n" not in str(told.value)
    assert not made.exists()
    (tmp_path / META).write_bytes(pickle.dumps(Code(made)))
    with pytest.raises(CheckpointError, match=META):
        readers[read]()
    assert not made.exists()
