#!/usr/bin/env bash
# huggingface_hub 2.4.0: two results of one benchmark with other settings become one entry of the model card, under the first's settings.
#
# A model's 0-shot and 8-shot GSM8K, two EvalResult that differ in dataset_args={"num_few_shot": ...} and in the value, are written as
# one result with num_few_shot 0 and two values. The 8 is gone, and so are the name, the task's name and the source of the second.
# A card that has both, by hand or from the hub, loses them when it is only loaded and saved.
# EvalResult.unique_identifier groups by the type of the task and the type, config, split and revision of the data set; everything
# else of an entry but its metrics is taken from the first of the group.
#
# Seen: written [({'num_few_shot': 0}, 0.41), ({'num_few_shot': 8}, 0.62)], read back [({'num_few_shot': 0}, 0.41), ({'num_few_shot': 0}, 0.62)].
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --no-compile 'huggingface_hub==2.4.0' 2>/dev/null
cd "$folder"
HF_HOME="$folder/hub" HF_HUB_OFFLINE=1 "$folder/venv/bin/python" - <<'PY'
from huggingface_hub import EvalResult, ModelCard, ModelCardData


def told(results):
    return [(result.dataset_args, result.metric_value) for result in results]


results = [
    EvalResult(
        task_type="text-generation", dataset_type="openai/gsm8k", dataset_name=f"GSM8K, {shots}-shot",
        dataset_args={"num_few_shot": shots}, metric_type="exact_match", metric_value=value,
    )
    for shots, value in ((0, 0.41), (8, 0.62))
]
card = ModelCard(f"---\n{ModelCardData(model_name='policy', eval_results=results).to_yaml()}\n---\n")
print("written  ", told(results))
print("read back", told(card.data.eval_results), {result.dataset_name for result in card.data.eval_results})
assert told(card.data.eval_results) == [({"num_few_shot": 0}, 0.41), ({"num_few_shot": 0}, 0.62)], "the behaviour has changed"

# A card with both entries, loaded and saved.
entry = """  - task: {{type: text-generation}}
    dataset: {{name: GSM8K, type: openai/gsm8k, args: {{num_few_shot: {shots}}}}}
    metrics: [{{type: exact_match, value: {value}}}]
"""
text = "---\nmodel-index:\n- name: policy\n  results:\n" + entry.format(shots=0, value=0.41) + entry.format(shots=8, value=0.62) + "---\n"
first = ModelCard(text)
first.save("README.md")
second = ModelCard.load("README.md")
print("a card of two entries, loaded", told(first.data.eval_results), "saved and loaded again", told(second.data.eval_results))
assert told(first.data.eval_results) == [({"num_few_shot": 0}, 0.41), ({"num_few_shot": 8}, 0.62)]
assert told(second.data.eval_results) == [({"num_few_shot": 0}, 0.41), ({"num_few_shot": 0}, 0.62)], "the behaviour has changed"
PY
