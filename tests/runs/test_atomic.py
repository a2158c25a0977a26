"""A temporary file whose name can be foretold is not written through a link."""

from __future__ import annotations

import os
import socket
import stat
import subprocess

from rlhf_lightning.runs.atomic import follow_umask, staging_of, write_text


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
