#!/usr/bin/env bash
# lm-eval 0.4.13: an answer that looks like a list is taken apart if doc_to_target is a template: the right response scores 0.
#
# The answers are texts such as "['ant', 'bee']". With `doc_to_target: answer`, the name of the column, exact_match compares the
# texts. With `doc_to_target: "{{answer}}"`, which says the same, the text goes through ast.literal_eval and becomes a list of
# alternative answers: the whole answer is wrong, "ant" alone is right, and few-shot examples show "ant" as the answer.
# The first question decides for the whole task: if its answer is no list, the lists of later questions are compared as text again.
#
# Seen: exact_match of whole answers 1.0 by name and 0.0 by template; of the first word alone 0.0 and 1.0.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --no-compile 'lm-eval==0.4.13' 'datasets==5.2.0' 2>/dev/null
cd "$folder"
HF_HOME="$folder/hub" HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 "$folder/venv/bin/python" - 2>"$folder/log" <<'PY' || { cat "$folder/log"; exit 1; }
import json
from pathlib import Path

import lm_eval
from lm_eval.api.model import LM
from lm_eval.tasks import TaskManager

words = [("bee", "ant"), ("dog", "cat"), ("fox", "elk"), ("hen", "gnu")]
rows = [{"question": f"Sort {a} {b}", "answer": str(sorted((a, b)))} for a, b in words]
for split in ("shots", "test"):
    Path(f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
here = Path.cwd()
for name, target in {"by_name": "answer", "by_template": '"{{answer}}"'}.items():
    Path(f"{name}.yaml").write_text(f"""
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{shots: {here}/shots.jsonl, test: {here}/test.jsonl}}}}
test_split: test
fewshot_split: shots
num_fewshot: 1
output_type: generate_until
doc_to_text: "{{{{question}}}}:"
doc_to_target: {target}
generation_kwargs: {{until: ["\\n"]}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
""")


class Sorter(LM):
    """Sorts the words of the last question; says all of them, or the first."""

    def __init__(self, whole):
        super().__init__()
        self.whole, self.shown = whole, []

    def generate_until(self, requests):
        self.shown = [request.args[0] for request in requests]
        found = [sorted(prompt.rsplit("Sort ", 1)[1].rstrip(":").split()) for prompt in self.shown]
        return [str(each) if self.whole else each[0] for each in found]

    def loglikelihood(self, requests):
        raise NotImplementedError

    loglikelihood_rolling = loglikelihood


tasks, seen = TaskManager(include_path=here, include_defaults=False), {}
for whole in (True, False):
    for name in ("by_name", "by_template"):
        model = Sorter(whole)
        found = lm_eval.simple_evaluate(model=model, tasks=[name], task_manager=tasks, bootstrap_iters=0)
        seen[whole, name] = float(found["results"][name]["exact_match,none"])
        print("whole answers" if whole else "first word", name, seen[whole, name], repr(model.shown[0]))
assert seen == {
    (True, "by_name"): 1.0, (True, "by_template"): 0.0, (False, "by_name"): 0.0, (False, "by_template"): 1.0
}, "the behaviour has changed"
PY
