"""Online DPO, a loss that compares rows: online_dpo.py POLICY PROMPTS.jsonl FOLDER [ITERATIONS]."""

import sys

import lightning as L
import torch

import rlhf_lightning as rlhf
from rlhf_lightning.models.forward import response_statistics


class OnlineDPOModule(rlhf.PolicyGradientModule):
    """The best response to a prompt against the worst, by the reward (Guo et al. 2024)."""

    title = "online DPO"
    whole_groups_in_micro_batches = True

    def policy_loss(self, micro_batch, counts):  # noqa: ANN001, ANN201
        """Return -log sigmoid(kl_coef * margin), the mean over the prompts of all ranks."""
        new = response_statistics(self.policy, micro_batch, temperature=self.controls.temperature)
        gains = micro_batch.by_group((new.logprobs - micro_batch.ref_logprobs).sum(-1))
        rewards = micro_batch.by_group(micro_batch.rewards.sum(-1))  # [prompts, responses]
        scored = micro_batch.by_group(micro_batch.scored)
        best = rewards.where(scored, -torch.inf).argmax(1, keepdim=True)
        worst = rewards.where(scored, torch.inf).argmin(1, keepdim=True)
        margins = (gains.gather(1, best) - gains.gather(1, worst))[best != worst]  # a tie: no pair
        losses = -torch.nn.functional.logsigmoid(self.controls.kl_coef * margins)
        loss = losses.sum() / (counts.num_sequences / micro_batch.group_size)
        moved = new.logprobs.detach() - micro_batch.logprobs  # since the rollout
        approx_kl = (moved.expm1() - moved).sum() / counts.num_tokens
        return loss, {"grpo/policy_loss": loss, "grpo/approx_kl": approx_kl}


if __name__ == "__main__":
    policy, prompts, folder, iterations = [*sys.argv[1:], "100"][:4]
    module = OnlineDPOModule.from_pretrained(
        policy, lambda prompts, completions, **_: [float(len(c) < 80) for c in completions]
    )
    data = rlhf.PromptDataModule(prompts, module.tokenizer, batch_size=8, num_generations=2)
    L.Trainer(**rlhf.trainer_arguments(folder, max_iterations=int(iterations))).fit(module, data)
