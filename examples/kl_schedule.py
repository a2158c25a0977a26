"""A KL coefficient on a schedule: python examples/kl_schedule.py POLICY PROMPTS.jsonl FOLDER."""

import argparse

import lightning as L

from rlhf_lightning import PPOModule, PromptDataModule, trainer_arguments


class KLSchedule(L.Callback):
    """Moves the KL coefficient in a straight line from `first` to `last`."""

    def __init__(self, first: float, last: float) -> None:
        self.first, self.last = first, last

    def on_train_batch_start(self, trainer, module, batch, batch_idx):  # noqa: ANN001, ANN201
        """Set it for iteration `batch_idx`, on every rank, before its rollout."""
        share = batch_idx / max(trainer.num_training_batches - 1, 1)
        module.controls.kl_coef = self.first + share * (self.last - self.first)


def main() -> None:
    """Train with it; `ppo/kl_coef` in metrics.csv shows what was used."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("policy", help="folder or hub name")
    parser.add_argument("prompts", help="file with the column prompt")
    parser.add_argument("folder", help="of the run")
    parser.add_argument("--iterations", type=int, default=100)
    options = parser.parse_args()
    module = PPOModule.from_pretrained(
        options.policy, lambda prompts, completions, **_: [float(len(c) < 80) for c in completions]
    )
    data = PromptDataModule(options.prompts, module.tokenizer, batch_size=8)
    own = {"max_iterations": options.iterations, "callbacks": KLSchedule(0.2, 0.02)}
    L.Trainer(**trainer_arguments(options.folder, **own)).fit(module, data)


if __name__ == "__main__":
    main()
