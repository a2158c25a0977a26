"""PPO without a trust region: python examples/ppo_new_objective.py POLICY PROMPTS.jsonl FOLDER."""

import argparse

import lightning as L

from rlhf_lightning import PPOModule, PromptDataModule, trainer_arguments
from rlhf_lightning.models.forward import response_statistics


class UnclippedPPOModule(PPOModule):
    """The same rollouts and value model, with the plain policy gradient as the loss."""

    def policy_loss(self, micro_batch, counts):  # noqa: ANN001, ANN201
        """Return - log pi * advantage, over all response tokens of all ranks."""
        how = {"temperature": self.controls.temperature, "with_entropy": False}
        new = response_statistics(self.policy, micro_batch, **how)
        loss = -(new.logprobs * micro_batch.advantages).sum() / counts.num_tokens  # 0 off the mask
        return loss, {"ppo/policy_loss": loss}


def main() -> None:
    """Train with it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("policy", help="folder or hub name")
    parser.add_argument("prompts", help="file with the column prompt")
    parser.add_argument("folder", help="of the run")
    parser.add_argument("--iterations", type=int, default=100)
    options = parser.parse_args()
    module = UnclippedPPOModule.from_pretrained(
        options.policy, lambda prompts, completions, **_: [float(len(c) < 80) for c in completions]
    )
    data = PromptDataModule(options.prompts, module.tokenizer, batch_size=8)
    arguments = trainer_arguments(options.folder, max_iterations=options.iterations)
    L.Trainer(**arguments).fit(module, data)


if __name__ == "__main__":
    main()
