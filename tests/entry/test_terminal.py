"""The terminal is not the run: what cannot be printed ends no command and loses no work."""

from __future__ import annotations

import io
import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlhf_lightning.app.terminal import Shown
from tests.builders.command_lines import command, environment, small_sft, summary, train

pytestmark = pytest.mark.timeout(240)
PROGRAM = """
import os, subprocess, sys
from rlhf_lightning.app.terminal import outlast_terminal
outlast_terminal()
for number in range(20000):
    print("a · b", number)
print("▁▂▃", file=sys.stderr)
sys.stdout.flush()
subprocess.run([sys.executable, "-c", "print('of a child', flush=True)"], check=True)
with open("work", "w") as file:
    file.write("done")
"""
TERMINALS = {
    "ascii": ("RUN > out", {"PYTHONIOENCODING": "ascii"}),
    "latin-1": ("RUN > out", {"PYTHONIOENCODING": "latin-1"}),
    "reader that goes away": ("RUN | head -1", {}),
    "both to a reader that goes away": ("RUN 2>&1 | head -1", {}),
    "full disk": ("RUN > /dev/full", {}),
    "full disk for errors": ("RUN > out 2> /dev/full", {}),
    "closed": ("RUN >&- 2>&-", {}),
    "closed output": ("RUN >&-", {}),
    "unbuffered": ("RUN > /dev/full", {"PYTHONUNBUFFERED": "1"}),
}


def to_shell(script: str, words: list[str], folder: Path, extra: dict[str, str]) -> int:
    script = "set -o pipefail; " + script.replace("RUN", '"$@"')
    return subprocess.run(
        ["bash", "-c", script, "bash", *words],
        cwd=folder,
        env=environment() | extra,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        timeout=200,
        check=False,
    ).returncode


@pytest.mark.parametrize("terminal", TERMINALS)
def test_a_program_does_its_work_whatever_its_terminal_takes(tmp_path, terminal):
    script, extra = TERMINALS[terminal]
    assert to_shell(script, [sys.executable, "-c", PROGRAM], tmp_path, extra) == 0
    assert (tmp_path / "work").read_text() == "done"
    if "> out" in script:
        lines = (tmp_path / "out").read_text("latin-1").splitlines()
        assert len(lines) == 20001
        assert lines[0] in ("a ? b 0", "a · b 0", "a Â· b 0")


@pytest.mark.parametrize("extra", [{}, {"PYTHONUNBUFFERED": "1"}], ids=["as it is", "unbuffered"])
def test_lines_are_seen_at_once_and_in_order_with_errors_and_child_processes(tmp_path, extra):
    program = (
        "import subprocess, sys\n"
        "from rlhf_lightning.app.terminal import outlast_terminal\n"
        "outlast_terminal()\n"
        "print('first')\n"
        "print('second', file=sys.stderr)\n"
        "print('third')\n"
        "subprocess.run([sys.executable, '-c', 'print(\"fourth\")'], check=True)\n"
        "print('fifth')"
    )
    assert to_shell("RUN > out 2>&1", [sys.executable, "-c", program], tmp_path, extra) == 0
    assert (tmp_path / "out").read_text().split() == ["first", "second", "third", "fourth", "fifth"]


def test_a_terminal_that_is_closed_in_the_middle_is_written_to_no_more(tmp_path):
    ours, theirs = os.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], cwd=tmp_path, env=environment(),
        stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs, start_new_session=True,
    )  # fmt: skip
    os.close(theirs)
    os.read(ours, 1000)
    os.close(ours)
    assert process.wait(60) == 0
    assert (tmp_path / "work").read_text() == "done"


def test_a_slow_reader_that_does_not_wait_gets_every_line(tmp_path):
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], cwd=tmp_path, env=environment(), stdout=writing
    )
    os.close(writing)
    with os.fdopen(reading) as pipe:
        assert len(pipe.read().splitlines()) == 20001
    assert process.wait(60) == 0


@pytest.mark.parametrize("entry", ["train", "report"])
def test_a_command_whose_text_nobody_reads_ends_quietly(tmp_path, entry):
    words = [sys.executable, "-m", f"rlhf_lightning.{entry}", "--help"]
    assert to_shell("RUN > /dev/full", words, tmp_path, {"PYTHONIOENCODING": "ascii"}) == 0


@pytest.mark.slow
@pytest.mark.parametrize("terminal", ["ascii", "full disk", "closed"])
def test_a_run_of_training_reaches_its_end(start, tmp_path, terminal):
    script, extra = TERMINALS[terminal]
    assert to_shell(script, command(*small_sft(start)), tmp_path, extra) == 0
    assert summary(tmp_path)["status"] == "completed"
    assert list(tmp_path.glob("outputs/sft/*/export/model.safetensors"))


@pytest.mark.slow
def test_an_evaluation_keeps_what_it_measured(start, tmp_path):
    words = [
        sys.executable,
        "-m",
        "rlhf_lightning.evaluate",
        f"policy={start}",
        f"baseline={start}",
    ]
    words += ["evaluation.num_prompts=8", "scorer=none", f"hydra.run.dir={tmp_path}/run"]
    assert to_shell("RUN > /dev/full", words, tmp_path, {"PYTHONIOENCODING": "ascii"}) == 0
    found = json.loads((tmp_path / "run/summary.json").read_text())
    assert found["status"] == "completed"
    assert found["metrics"]


HOSTILE = "a\x1b]0;title\x07\x1b[2J\x9b2J\x1bc\x1b[10;1Hb\x08\x7f"
SHOWN = rb"a\x1b]0;title\x07\x1b[2J\x9b2J\x1bc\x1b[10;1Hb\x08\x7f"


def test_control_characters_are_shown_and_not_obeyed():
    raw = io.BytesIO()
    stream = Shown(raw, encoding="utf-8", newline="")
    assert stream.write(HOSTILE) == len(HOSTILE)
    print("\ttab\r\x1b[1mbold é", file=stream, end="\n")
    stream.flush()
    assert raw.getvalue() == SHOWN + "\ttab\r\\x1b[1mbold é\n".encode()


def test_a_terminal_gets_colours_and_the_moves_of_a_progress_bar_alone():
    reader, writer = os.openpty()
    ours = "\x1b[1;31mred\x1b[0m\x1b[?25l\x1b[1A\x1b[2K"
    with Shown(open(writer, "wb", buffering=0), encoding="utf-8") as stream:
        stream.write(HOSTILE + ours)
        stream.flush()
        assert os.read(reader, 1000) == SHOWN + ours.encode()
    os.close(reader)


def test_a_key_with_control_characters_reaches_no_terminal(tmp_path):
    (tmp_path / "keys.jsonl").write_text(json.dumps({"key\x1b]0;t\x07": 1}) + "\n")
    words = ["-m", "rlhf_lightning.annotate", "store=s.sqlite", "action=import", "file=keys.jsonl"]
    done = subprocess.run(
        [sys.executable, *words], cwd=tmp_path, env=environment(), capture_output=True, timeout=120
    )
    assert b"\x1b" not in done.stdout + done.stderr
    assert rb"key\x1b]0;t\x07" in done.stdout + done.stderr


@pytest.mark.thorough
def test_commands_silence_the_warnings_of_transformers_after_it_was_imported() -> None:
    script = (
        "from rlhf_lightning.app.train import main\n"
        "from rlhf_lightning.models.quiet import quieten\n"
        "from transformers.utils.logging import get_verbosity\n"
        "quieten()\nprint(get_verbosity())"
    )
    unset = {k: v for k, v in os.environ.items() if k != "TRANSFORMERS_VERBOSITY"}
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=unset,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert int(done.stdout) == logging.ERROR


@pytest.mark.thorough
def test_a_run_with_adapters_does_not_tell_that_their_frozen_base_is_in_eval_mode(start, tmp_path):
    done = train(tmp_path, *small_sft(start, "lora=lora"))
    assert done.returncode == 0, done.stderr
    assert "eval mode" not in done.stdout + done.stderr
