"""A temporary file whose name can be foretold is not written through a link."""

from __future__ import annotations

import os
import pickle
import socket
import stat
import subprocess

import pytest
import torch

from rlhf_lightning.distributed.checkpoint import META, load_shards, load_whole, read_full
from rlhf_lightning.modules.pretrained import read_checkpoint
from rlhf_lightning.runs.atomic import follow_umask, staging_of, write_text
from rlhf_lightning.runs.resume import CheckpointError


def test_a_link_in_the_place_of_a_temporary_file_is_not_written_through(tmp_path):
    victim, target = tmp_path / "victim", tmp_path / "file"
    victim.write_text("mine")
    victim.chmod(0o640)
    for path in (staging_of(target), tmp_path / f".file.mode-{os.getpid()}"):
        path.symlink_to(victim)
    write_text(target, "new")
    follow_umask(target)
    assert (victim.read_text(), stat.S_IMODE(victim.stat().st_mode)) == ("mine", 0o640)
    assert target.read_text() == "new"
    assert not target.is_symlink()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "victim"]


def test_what_a_killed_process_had_begun_to_write_goes_at_the_next_write_of_that_name(tmp_path):
    ended = subprocess.Popen(["true"])
    ended.wait()
    host = socket.gethostname()
    (tmp_path / f".file.tmp-{host}-{ended.pid}").write_text("half")
    kept = [f".file.tmp-{host}-{os.getppid()}", f".file.tmp-elsewhere-{ended.pid}", ".file.tmp-1"]
    for name in kept:
        (tmp_path / name).write_text("theirs")
    write_text(tmp_path / "file", "new")
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(["file", *kept])


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
