from __future__ import annotations

import re

from huggingface_hub import ModelCard, metadata_load

from rlhf_lightning.runs.model_card import CardFacts, write_model_card
from rlhf_lightning.runs.summary import GateResult


def facts(stage="reward", **changes):
    given = {"run": "run", "base": "sft", "data": "world", "licence": "apache-2.0"}
    return CardFacts(stage=stage, is_reward=stage == "reward", **(given | changes))


def test_the_hub_can_read_the_front_matter(tmp_path):
    card = facts(
        "ppo", hub_base="org/base-1B", datasets=("org/data",), settings={"ppo.kl_coef": 0.05}
    )
    path = write_model_card(tmp_path, card)
    assert metadata_load(path) == {
        "library_name": "transformers",
        "license": "apache-2.0",
        "base_model": "org/base-1B",
        "base_model_relation": "finetune",
        "datasets": ["org/data"],
        "pipeline_tag": "text-generation",
        "tags": ["rlhf_lightning", "ppo"],
    }
    text = ModelCard.load(path).text
    assert "| ppo.kl_coef | 0.05 |" in text
    assert "Data: world, org/data" in text


def test_the_card_of_an_adapter_is_one_of_peft(tmp_path):
    made = {"versions": {"python": "3.11", "torch": "2.9"}, "title": "SFT", "doubts": "Too few."}
    path = write_model_card(tmp_path, facts("sft", is_adapter=True, hub_base="org/base", **made))
    matter = metadata_load(path)
    assert (matter["library_name"], matter["base_model_relation"]) == ("peft", "adapter")
    text = path.read_text()
    assert "A causal language model after SFT. Too few.\n" in text
    assert "AutoPeftModelForCausalLM" in text
    assert "# Policy after SFT (adapter): world\n" in text
    assert "* Made with: python 3.11, torch 2.9\n" in text


HOSTILE = "x|y <script>a</script> [link](http://evil) `code` *b* --> \x1b[2J\n# Heading"


def test_what_comes_from_outside_is_plain_text_of_a_card(tmp_path):
    card = facts(
        "reward",
        base=HOSTILE,
        data=HOSTILE,
        hub_base=HOSTILE,
        datasets=(HOSTILE,),
        metrics={HOSTILE: 1.0},
        settings={HOSTILE: HOSTILE},
        gates=(GateResult(HOSTILE, passed=False, value=1.0, threshold=2.0, reason=HOSTILE),),
        reward={"reward_offset": 1.0, "pad_token": "<|pad|>`" + HOSTILE},
    )
    path = write_model_card(tmp_path, card)
    assert metadata_load(path)["datasets"] == [HOSTILE]
    text = ModelCard.load(path).text
    outside_code = re.sub(r"(?<!\\)`[^`\n]*`", "", text)
    assert "<script" not in outside_code
    assert not re.search(r"(?<!\\)\]\(http", outside_code)
    assert "\n# Heading" not in text
    assert "\x1b" not in text
