from __future__ import annotations

import io
import re

from rich.console import Console

from rlhf_lightning.callbacks.console import ProgressBar, print_start, print_verdict
from rlhf_lightning.runs.folder import RunFolder, SamplesAppender, read_samples
from rlhf_lightning.runs.summary import GateResult, Summary, read_summary
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


def test_the_last_screen_says_what_was_learnt_and_where_it_is(tmp_path):
    folder = fake_ppo_run(tmp_path / "run", 3)
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
        "81.2 % of comparisons with the baseline won (95 % interval 77.1 to 84.8 %)",
        "The policy answers better than the baseline",
        "-0.02 → 1.41",
        "0.24 nats",
        "14.1 → 17.9",
        "NOT PASSED",
        str(folder.samples),
        str(folder.export),
    ):
        assert part in text, part
    assert str(folder.report) not in text, "there is no report, so none is promised"


def test_an_escape_sequence_in_a_response_does_not_reach_the_terminal(tmp_path):
    folder = fake_ppo_run(tmp_path / "run", 3)
    row = {"prompt": "a", "response": "\x1b[2Jgone", "baseline_response": "b\x9b2J"}
    SamplesAppender(folder.samples).append(4, [row])
    out = io.StringIO()
    print_verdict(read_summary(folder), folder, console=Console(file=out, width=200))
    assert "\u241b[2Jgone" in out.getvalue()
    assert not re.search("[\x1b\x9b]", out.getvalue())


def test_a_long_response_without_a_space_is_cut_and_not_left_out(tmp_path):
    folder = fake_ppo_run(tmp_path / "run", 3)
    row = {"prompt": "a", "response": "\u5929" * 400, "baseline_response": "b"}
    SamplesAppender(folder.samples).append(4, [row])
    out = io.StringIO()
    print_verdict(read_summary(folder), folder, console=Console(file=out, width=200))
    assert 250 < out.getvalue().count("\u5929") < 400


def test_text_that_looks_like_markup_is_printed_as_it_is(tmp_path):
    out = io.StringIO()
    console = Console(file=out, width=120)
    settings = {"prompt": "[bold]x[/bold] [/nonsense]", "kl_coef": 0.05}
    print_start("ppo", RunFolder(tmp_path / "a[b]c"), settings, console=console)
    gate = GateResult("[/x]", 1.0, 2.0, False, "[/y]")
    print_verdict(
        Summary("ppo", "completed", 1, gates=(gate,)), RunFolder(tmp_path), console=console
    )
    text = out.getvalue().replace("\n", "")
    assert "[bold]x[/bold] [/nonsense]" in text
    assert "a[b]c" in re.sub(r"[│\s]", "", text)
    assert "gate [/x]" in text
