"""`rlhf-evaluate benchmark=...`: figures of sets that others use, offline."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from rlhf_lightning.app.config.compose import ConfigError
from rlhf_lightning.models.factory import load_scalar_model
from rlhf_lightning.modules.export import save_hf_model
from rlhf_lightning.reports.page import render_report
from rlhf_lightning.runs.folder import RunFolder
from rlhf_lightning.runs.summary import Summary
from rlhf_lightning.runs.verdict import verdict
from rlhf_lightning.text.tokenizers import load_tokenizer
from tests.builders.command_lines import by_length, settings_of

pytestmark = pytest.mark.timeout(300)
TASK = """task: local_pairs
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: ""
doc_to_target: 0
doc_to_choice: "{{{{[good, bad]}}}}"
metric_list: [{{metric: acc}}]
"""


def write(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def evaluate(folder: Path, *overrides: str) -> Summary:
    from rlhf_lightning.app.evaluate import run

    given = list(overrides)
    return run(settings_of(*given, entry="evaluate"), RunFolder(folder), given)


def test_pairs_of_a_file_are_measured_gated_and_reported(tmp_path, start):
    long = {"chosen": "w2 w3 w4", "rejected": "w5", "subset": "long"}
    short = {"chosen": "w2", "rejected": "w3 w4 w5", "subset": "short"}
    rows = [{"prompt": f"w{n % 6} w{n // 6}", **(long if n < 27 else short)} for n in range(36)]
    file = write(tmp_path / "pairs.jsonl", rows)
    found = evaluate(
        tmp_path / "run",
        *by_length(tmp_path),
        f"policy={start}",
        "benchmark=pairs",
        f"benchmark.path={file}",
        "+gates.right={metric: benchmark/accuracy, at_least: 0.8}",
    )
    assert found.metrics["benchmark/accuracy"] == 27 / 36
    assert found.metrics["benchmark/accuracy/subset/long"] == 1
    assert found.metrics["benchmark/accuracy_chosen_shorter"] == 0
    assert found.metrics["benchmark/longer_wins_accuracy"] == 27 / 36
    assert [(gate.name, gate.passed) for gate in found.gates] == [("right", False)]
    assert verdict(found).number == "75.0 %"
    page = render_report(RunFolder(tmp_path / "run"))
    assert "ranked as labelled" in page
    assert "accuracy chosen shorter" in page


@pytest.mark.thorough
def test_lm_eval_measures_both_sides_on_the_same_questions(tmp_path, start):
    rows = [{"good": f"w1 w{n} w3", "bad": f"w{n} w3 w1 w5"} for n in range(1, 13)]
    file = write(tmp_path / "questions.jsonl", rows)
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "local.yaml").write_text(TASK.format(file=file))
    policy = shutil.copytree(start, tmp_path / "policy")
    words = [f"policy={policy}", f"baseline={start}", "scorer=none", "benchmark=lm_eval"]
    words += [f"benchmark.include_path={tmp_path}/tasks"]
    found = evaluate(tmp_path / "run", *words, "benchmark.tasks=[local_pairs]").metrics
    assert found["benchmark/num_questions/task/local_pairs"] == 12
    of = "task/local_pairs"
    assert 0 <= found[f"benchmark/acc/{of}"] <= 1
    assert found[f"benchmark/acc/{of}"] == found[f"benchmark/baseline_acc/{of}"]
    assert found[f"benchmark/acc_change/{of}"] == 0
    low, high = (found[f"benchmark/acc_change_{end}/{of}"] for end in ("low", "high"))
    assert low == pytest.approx(-high)
    assert 0.4 < high < 0.6, "twelve answers that agree say little of the next one"


def test_an_ensemble_is_read_by_its_own_tokenizer_and_its_members_need_the_same(tmp_path, start):
    # A policy of another vocabulary stands in `policy`, as an artifact of other data would.
    members = [tmp_path / "a", tmp_path / "b"]
    for seed, folder in enumerate(members):
        model, tokenizer = load_scalar_model(start, head="reward", seed=seed), load_tokenizer(start)
        stops = [int(tokenizer.eos_token_id)]
        save_hf_model(model, tokenizer, folder, model.state_dict(), stop_ids=stops)
    other = shutil.copytree(start, tmp_path / "other")
    mapping = json.loads((other / "tokenizer.json").read_text())
    words = mapping["model"]["vocab"]
    low, high = sorted(words, key=words.get)[20:22]
    words[low], words[high] = words[high], words[low]
    (other / "tokenizer.json").write_text(json.dumps(mapping))
    sides = [f"the {low} . {high}", f"{high} {high} ."]
    rows = [
        {"prompt": f"what is {low} ?", "chosen": sides[i % 2], "rejected": sides[1 - i % 2]}
        for i in range(2)
    ]
    file = write(tmp_path / "pairs.jsonl", rows)
    words = ["scorer=reward_ensemble", f"scorer.sources=[{members[0]},{members[1]}]"]
    words += ["benchmark=pairs", f"benchmark.path={file}"]
    found = [
        evaluate(tmp_path / f"run_{i}", f"policy={policy}", *words).metrics
        for i, policy in enumerate((start, other))
    ]
    assert found[0] == found[1]
    shutil.copy(other / "tokenizer.json", members[1])
    with pytest.raises(ConfigError, match="tokenizer"):
        evaluate(tmp_path / "run_2", f"policy={start}", *words)
