from __future__ import annotations

import io
import logging
import re
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import rich
from lightning.pytorch import Callback
from rich.console import Console

from rlhf_lightning.callbacks import console as console_module
from rlhf_lightning.callbacks.console import ProgressBar, print_start, print_verdict
from rlhf_lightning.runs.doctor_log import DoctorEvent, write_events
from rlhf_lightning.runs.folder import SamplesAppender, read_samples
from rlhf_lightning.runs.summary import GateResult, read_summary
from tests.builders.run_folders import fake_ppo_run
from tests.callbacks.tiny_run import run


def test_a_pipe_gets_plain_lines_with_iteration_time_and_metrics(tmp_path):
    out = io.StringIO()
    bar = ProgressBar("ppo", every_n_seconds=0, file=out)
    run(tmp_path, num_iterations=4, callbacks=[bar])
    text = out.getvalue()
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", text), "no control characters on a pipe"
    lines = text.splitlines()
    assert [line.split(" · ")[:2] for line in lines] == [
        ["ppo 1/4", "25 %"],
        ["ppo 2/4", "50 %"],
        ["ppo 3/4", "75 %"],
        ["ppo 4/4", "100 %"],
        ["ppo 4/4", "100 %"],
    ]
    assert re.search(r"\d s left", lines[0])
    assert "held-out loss" not in lines[1], "the validation of iteration 2 comes after its line"
    assert re.search(r"held-out loss [\d.]+$", lines[2])
    assert re.search(r"took \d+\.\d s", lines[-1])


def shown(text: str) -> list[str]:
    """Return the lines that a terminal shows of a text that moves up and erases lines."""
    lines, row = [""], 0
    for part in re.findall(r"\x1b\[[\d;?]*[A-Za-z]|\n|[^\x1b\r\n]+", text):
        if part == "\n":
            row += 1
            lines += [""] * (row == len(lines))
        elif part == "\x1b[1A":
            row -= 1
        elif part == "\x1b[2K":
            lines[row] = ""
        elif part[0] != "\x1b":
            lines[row] += part
    return lines


@pytest.fixture
def log(monkeypatch):
    """Return a logger whose handler holds the standard output of before, as Hydra's does."""
    monkeypatch.setenv("TERM", "xterm")
    logger = logging.getLogger("tests.console")
    handler = logging.StreamHandler(sys.stdout)
    logger.addHandler(handler)
    yield logger
    logger.removeHandler(handler)
    rich.reconfigure()


def test_a_terminal_of_80_columns_has_two_lines_that_stay_below_whole_log_lines(tmp_path, log):
    told = "doctor: " + " ".join(f"word{i}" for i in range(30))

    class Warns(Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            log.warning(told)

    out = io.StringIO()
    bar = ProgressBar("ppo", file=out, force_terminal=True, width=80)
    run(tmp_path, num_iterations=4, callbacks=[bar, Warns()])
    lines = [line for line in shown(out.getvalue()) if line.strip()]
    *above, first, second = [line for line in lines if "Trainer.fit" not in line]  # Lightning's
    assert " ".join(line.strip() for line in above) == " ".join([told] * 4)
    assert re.match(r"ppo iteration .*━ 4/4 [-\d:]+ left [\d.]+it/s", first)
    assert re.match(r"training loss: [\d.]+ · held-out loss: [\d.]+ *$", second)
    assert max(map(len, (*above, first, second))) <= 80
    assert "\x1b[1A\x1b[2K\x1b[1A" not in out.getvalue(), "never three lines"
    assert log.handlers[0].stream is sys.stdout, "the log has its stream back"


def test_metrics_that_do_not_fit_beneath_the_bar_are_left_out_whole(tmp_path, log):
    out = io.StringIO()
    bar = ProgressBar("ppo", file=out, force_terminal=True, width=30)
    run(tmp_path, num_iterations=2, callbacks=[bar])
    last = [line for line in shown(out.getvalue()) if line.strip()][-1]
    assert re.fullmatch(r"training loss: [\d.]+ *", last)


def test_a_sample_says_what_it_is_also_where_the_response_is_empty(monkeypatch):
    row = {"prompt": "what list", "response": " ", "score": 1.0}
    monkeypatch.setattr(console_module, "describe_rollout", lambda *given, **how: [row])
    module: Any = SimpleNamespace(
        sampling=SimpleNamespace(skip_special_tokens=True), tokenizer=None
    )
    out, rollout = io.StringIO(), SimpleNamespace()
    ProgressBar("ppo", file=out)._write_completion(module, rollout)
    assert out.getvalue() == "sample  score 1.00  what list -> (empty)\n"


def test_the_last_screen_says_what_was_learnt_and_where_it_is(tmp_path):
    folder = fake_ppo_run(tmp_path / "run", 3)
    idle = [DoctorEvent(3, "idle", name, "", f"no {name}") for name in ("critic", "groups")]
    write_events(folder.doctor, [DoctorEvent(0, "watch", "critic,groups,entropy", "", ""), *idle])
    folder.export.mkdir()
    out = io.StringIO()
    console = Console(file=out, width=200)
    print_verdict(read_summary(folder), folder, wandb="offline: wandb sync x", console=console)
    text = out.getvalue()
    assert re.search(r"^W&B +offline: wandb sync x$", text, re.MULTILINE)
    compared = [s for s in read_samples(folder.samples) if s.get("baseline_response")]
    last = [s for s in compared if s["iteration"] == compared[-1]["iteration"]]
    assert text.count("prompt ") == min(len(last), 5)
    assert f"policy {last[0]['score']:.2f}" in text
    assert last[0]["baseline_response"][:40] in text
    for part in (
        "81.2 % of comparisons with the baseline on 400 prompts won (95 % interval 77.1 to 84.8 %)",
        "The policy answers better than the baseline",
        "-0.02 → 1.41",
        "0.24 nats",
        "14.1 → 17.9",
        "NOT PASSED",
        "1 of 3 detectors had enough to watch, 0 alerts",
        "2 detectors: doctor.jsonl says why",
        str(folder.samples),
        str(folder.export),
    ):
        assert part in text, part
    assert str(folder.report) not in text, "there is no report, so none is promised"


def test_text_of_others_neither_steers_the_terminal_nor_is_left_out(tmp_path):
    folder = fake_ppo_run(tmp_path / "a[b]c", 3)
    long = "\x1b[2Jgone" + "\u5929" * 400  # without a space at which to cut it
    row = {"prompt": "[bold]x[/bold] [/y]", "response": long, "baseline_response": "b\x9b2J"}
    SamplesAppender(folder.samples).append(4, [row])
    gate = GateResult("[/x]", 1.0, 2.0, False, "[/y]")
    out = io.StringIO()
    console = Console(file=out, width=200)
    print_start("ppo", folder, {"prompt": "[bold]z[/bold]", "kl_coef": 0.05}, console=console)
    print_verdict(replace(read_summary(folder), gates=(gate,)), folder, console=console)
    text = out.getvalue()
    assert "\u241b[2Jgone" in text
    assert not re.search("[\x1b\x9b]", text)
    assert 250 < text.count("\u5929") < 400
    assert "a[b]c" in re.sub(r"[│\s]", "", text)
    for part in ("[bold]x[/bold] [/y]", "[bold]z[/bold]", "gate [/x]"):
        assert part in text


def test_an_empty_response_is_shown_as_such(tmp_path):
    folder = fake_ppo_run(tmp_path, 3)
    row = {"prompt": "x", "response": "\n", "baseline_response": "b"}
    SamplesAppender(folder.samples).append(4, [row])
    out = io.StringIO()
    console = Console(file=out, width=80, force_terminal=True, color_system="standard")
    print_verdict(read_summary(folder), folder, console=console)
    assert re.search(r"policy .*\x1b\[2m\(empty\)\x1b\[0m", out.getvalue())
