"""`skip_special_tokens` reaches every text that is made of a response."""

from __future__ import annotations

import pytest
import torch

from rlhf_lightning.batches import FINISHED_BY_LENGTH, Generation
from rlhf_lightning.callbacks.doctor.rollouts import responses_of
from rlhf_lightning.callbacks.run_tables import describe_rollout, describe_rows
from rlhf_lightning.hparams import SamplingHparams
from rlhf_lightning.rollout.scorers.base import FunctionScorer
from tests.builders.models import EOS, prompt_batch
from tests.builders.stages import tiny_module

TEXTS = {False: "w7 <eos> w8", True: "w7 w8"}


class WritesASpecialToken:
    """Writes one response, with a special token that does not end it."""

    def __call__(self, model, prompts, **options) -> Generation:
        responses = torch.tensor([[7, EOS, 8]]).expand(len(prompts), -1)
        sequences = torch.cat([prompts.input_ids, responses], 1)
        ends = torch.full((len(prompts),), FINISHED_BY_LENGTH)
        return Generation(sequences, torch.ones_like(responses, dtype=torch.bool), ends)


@pytest.mark.parametrize("skip", [False, True])
def test_rewards_samples_and_the_doctor_are_given_the_texts_that_the_setting_asks_for(skip):
    seen: list[str] = []

    def reward(prompts, completions):
        seen.extend(completions)
        return [1.0] * len(completions)

    module = tiny_module(
        sampling=SamplingHparams(max_new_tokens=3, skip_special_tokens=skip),
        scorer=FunctionScorer(reward),
        generator=WritesASpecialToken(),
    )
    module.configure_model()
    prompts = prompt_batch([[3, 4]], prompt=["w3 w4"])
    rollout, _ = module.collect_rollout(prompts, 0)
    assert seen == [TEXTS[skip]]
    assert rollout.response_tensors.tolist() == [[7, EOS, 8]]
    assert module.generate(["w3 w4"]) == [TEXTS[skip]]
    options = {"skip_special_tokens": skip}
    [sample] = describe_rollout(rollout, module.tokenizer, 1, **options)
    assert sample["response"] == TEXTS[skip]
    answers = responses_of(rollout, prompts, module.tokenizer, **options)
    assert answers.completions == (TEXTS[skip],)
    assert describe_rows(rollout, module.tokenizer)[0]["response"] == TEXTS[False]
