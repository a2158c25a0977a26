"""Every metric of lm-eval that is a mean of numbers, one a question, is compared, and no other."""

from __future__ import annotations

import json

import pytest

from rlhf_lightning.evaluation.lm_eval_tasks import LmEvalBenchmark
from rlhf_lightning.modules.export import save_hf_model
from tests.builders.models import EOS, tiny_policy, tiny_tokenizer

METRICS = {
    # metric: what `process_results` gives, how lm-eval sums it up
    "prompt_level_strict_acc": ("doc['n'] % 2 == 0", "mean"),
    "inst_level_strict_acc": ("[doc['n'] > k for k in range(1 + doc['n'] % 3)]", "of_lists"),
    "f1": ("doc['n'] / 10", "mean"),
    "points": ("100 * doc['n']", "mean"),
    "perplexity": ("-0.1 * doc['n']", "perplexity"),
    "matches": ("(1, doc['n'] % 2)", "of_pairs"),
}
FUNCTIONS = """
def of_lists(items):
    flat = [x for item in items for x in item]
    return sum(flat) / len(flat)

def of_pairs(items):
    return sum(a == b for a, b in items) / len(items)
"""


def task(folder, name, metrics):
    rows = [{"prompt": "w5", "n": n} for n in range(8)]
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = ", ".join(f"'{metric}': {METRICS[metric][0]}" for metric in metrics)
    asked = f"open({str(folder / 'asked')!r}, 'a').write('.')"
    code = f"{FUNCTIONS}\ndef process(doc, results):\n    {asked}\n    return {{{given}}}\n"
    (folder / f"{name}_code.py").write_text(code)
    ours = {"of_lists", "of_pairs"}
    lines = [
        f"  - {{metric: {m}, higher_is_better: true, aggregation: "
        + (
            f"!function {name}_code.{METRICS[m][1]}}}"
            if METRICS[m][1] in ours
            else METRICS[m][1] + "}"
        )
        for m in metrics
    ]
    (folder / f"{name}.yaml").write_text(
        f"task: {name}\ndataset_path: json\n"
        f"dataset_kwargs: {{data_files: {{test: {folder / name}.jsonl}}}}\ntest_split: test\n"
        "output_type: multiple_choice\ndoc_to_text: prompt\ndoc_to_target: 0\n"
        'doc_to_choice: ["w6", "w7"]\n'
        f"process_results: !function {name}_code.process\nmetric_list:\n" + "\n".join(lines) + "\n"
    )


@pytest.fixture
def side(tmp_path):
    policy, folder = tiny_policy("llama"), tmp_path / "policy"
    save_hf_model(policy, tiny_tokenizer(), folder, policy.state_dict(), stop_ids=[EOS])
    return str(folder)


@pytest.mark.thorough
def test_numbers_are_compared_and_what_is_no_mean_of_them_is_left_out(tmp_path, side):
    task(tmp_path, "many", METRICS)
    found = LmEvalBenchmark(["many"], include_path=tmp_path).measure(side, side)
    means = {name: found.get(f"benchmark/{name}/task/many") for name in METRICS}
    assert means == pytest.approx(
        {
            "prompt_level_strict_acc": 0.5,
            "inst_level_strict_acc": None,
            "f1": 0.35,
            "points": 350.0,
            "perplexity": None,
            "matches": None,
        }
    )
    for name in ("f1", "points"):
        low, high = (found[f"benchmark/{name}_change_{end}/task/many"] for end in ("low", "high"))
        assert found[f"benchmark/{name}_change/task/many"] == 0
        assert low == pytest.approx(-high)
        assert high > 0.1


def test_a_task_without_such_a_metric_ends_after_one_question(tmp_path, side):
    task(tmp_path, "none", ["perplexity", "matches"])
    with pytest.raises(ValueError, match=r"none has no metric .*matches, perplexity"):
        LmEvalBenchmark(["none"], include_path=tmp_path).measure(side, side)
    assert (tmp_path / "asked").read_text() == "."


def test_examples_that_may_be_the_question_itself_are_refused(tmp_path, side):
    task(tmp_path, "own", ["points"])
    with pytest.raises(ValueError, match="own: lm-eval may show a question its own answer"):
        LmEvalBenchmark(["own"], include_path=tmp_path, num_fewshot=2).measure(side, side)
    assert (tmp_path / "asked").read_text() == "."
