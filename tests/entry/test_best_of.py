"""`python -m rlhf_lightning.evaluate best_of.n=[...]`: best-of-n of a policy by a scorer."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhf_lightning.app.config.compose import ConfigError
from rlhf_lightning.app.evaluate import run
from rlhf_lightning.runs.folder import RunFolder
from rlhf_lightning.runs.summary import Summary
from rlhf_lightning.runs.verdict import verdict
from tests.builders.command_lines import by_length, settings_of

pytestmark = pytest.mark.timeout(300)


def evaluate(folder: Path, start: Path, *overrides: str) -> Summary:
    """Run it in this process: a policy against itself, by the length of the answer."""
    given = [
        "evaluation.num_prompts=32",
        "evaluation.max_new_tokens=6",
        "evaluation.answers_per_prompt=2",
        f"policy={start}",
        f"baseline={start}",
        *([] if "scorer=none" in overrides else by_length(folder.parent)),
        *overrides,
    ]
    return run(settings_of(*given, entry="evaluate"), RunFolder(folder), given)


def test_every_n_has_its_figures_beside_those_of_one_answer_and_the_report_its_curve(
    tmp_path: Path, start: Path
) -> None:
    measured = RunFolder(tmp_path / "run")
    summary = evaluate(
        measured.path,
        start,
        "best_of.n=[4,1,4]",
        "best_of.pool=4",
        "+gates.best={metric: best_of/4/score, above: best_of/1/score}",
    )
    found = summary.metrics
    shares = ("gold_win_rate", "gold_win_rate_low", "gold_win_rate_high")
    for n in (1, 4):
        for name in (*shares, "gold", "score", "score_low", "response_length", "kl_per_token"):
            assert f"best_of/{n}/{name}" in found
        low, rate, high = (
            found[f"best_of/{n}/gold_win_rate{end}"] for end in ("_low", "", "_high")
        )
        assert 0 <= low <= rate <= high <= 1
    assert found["best_of/4/score"] > found["best_of/1/score"]
    assert found["best_of/4/kl_per_response"] == pytest.approx(0.6363, abs=1e-4)
    assert "val/gold_win_rate" in found
    (gate,) = summary.gates
    assert (gate.name, gate.passed) == ("best", True)
    assert "the best of 4" in verdict(summary).caption
    page = measured.report.read_text()
    assert "<h2>Best of n</h2>" in page
    assert f"{100 * found['best_of/4/gold_win_rate']:.1f} %" in page


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["best_of.n=[1,64,65]"], r"best_of\.n=\[1, 64, 65\] must be at most best_of\.pool=64"),
        (["best_of.n=[4]", "scorer=none"], r"best_of\.n needs a scorer"),
        (["best_of.n=[4]", "evaluation.temperature=0.0"], "needs evaluation.temperature above 0"),
    ],
)
def test_what_cannot_be_measured_is_refused(tmp_path, start, overrides, message) -> None:
    with pytest.raises(ConfigError, match=message):
        evaluate(tmp_path / "run", start, *overrides)
    assert not (tmp_path / "run").exists()
