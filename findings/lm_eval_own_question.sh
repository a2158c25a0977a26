#!/usr/bin/env bash
# lm-eval 0.4.13: few-shot prompts of a task that has only a test split show the model the answer to the question that is asked.
#
# A task of one's own with `test_split` alone, asked with num_fewshot=2. lm-eval says that it takes examples from the test split, "not
# recommended", and one would trust it to leave out the question itself, as `fewshot_split: test` does. It does not: a question is
# asked below its own text and answer. The same happens with `validation_split: dev, fewshot_split: dev` and no test split, where
# nothing is said at all.
# `fewshot_context` passes the question to the sampler, to be left out, only if the config's fewshot split equals its test split;
# where one of the two is missing they never do, whichever rows the sampler has.
#
# Seen: of 20 prompts with 2 of 5 rows as examples, 6 hold their own answer with test_split alone, 6 with validation_split as
#   fewshot_split, and 0 with test_split as fewshot_split.
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

rows = [{"question": f"question {n}?", "answer": f"answer-{n}"} for n in range(5)]
Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
here = Path.cwd()
splits = {
    "only_test": "test_split: rows",
    "only_validation": "validation_split: rows\nfewshot_split: rows",
    "named": "test_split: rows\nfewshot_split: rows",
}
for name, lines in splits.items():
    Path(f"{name}.yaml").write_text(f"""
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{rows: {here}/rows.jsonl}}}}
{lines}
output_type: generate_until
doc_to_text: question
doc_to_target: answer
generation_kwargs: {{until: ["\\n"]}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
""")


class Reader(LM):
    """Copies the answer from its prompt where the question is already answered there."""

    def generate_until(self, requests):
        said = []
        for request in requests:
            prompt = request.args[0]
            examples, _, asked = prompt.rpartition("question ")
            number = asked.partition("?")[0]
            said.append(f"answer-{number}" if f"answer-{number}\n" in examples else "?")
        return said

    def loglikelihood(self, requests):
        raise NotImplementedError

    loglikelihood_rolling = loglikelihood


tasks = TaskManager(include_path=here, include_defaults=False)
leaks = dict.fromkeys(splits, 0)
for name in splits:
    for seed in range(4):
        found = lm_eval.simple_evaluate(
            model=Reader(), tasks=[name], num_fewshot=2, fewshot_random_seed=seed,
            task_manager=tasks, bootstrap_iters=0,
        )
        leaks[name] += round(found["results"][name]["exact_match,none"] * len(rows))
print(f"prompts of {4 * len(rows)} that hold their own answer:", leaks)
assert leaks["named"] == 0 and leaks["only_test"] > 3 and leaks["only_validation"] > 3, "the behaviour has changed"
PY
