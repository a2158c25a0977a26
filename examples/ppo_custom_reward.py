"""PPO with a function: python examples/ppo_custom_reward.py POLICY PROMPTS.jsonl FOLDER."""

import argparse
from collections.abc import Sequence

import lightning as L

from rlhf_lightning import PPOModule, PromptDataModule, export_model, trainer_arguments


def ends_soon(prompts: Sequence[str], completions: Sequence[str], **columns: object) -> list:
    """Return one number per response: shorter is better. `columns` are the file's other columns."""
    return [1.0 / (1 + len(text.split())) for text in completions]


def main() -> None:
    """Train, load the last checkpoint as a user would later, and export it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("policy", help="folder or hub name")
    parser.add_argument("prompts", help="file with the column prompt")
    parser.add_argument("folder", help="of the run")
    parser.add_argument("--iterations", type=int, default=100)
    options = parser.parse_args()

    module = PPOModule.from_pretrained(options.policy, ends_soon)
    data = PromptDataModule(options.prompts, module.tokenizer, batch_size=8)
    trainer = L.Trainer(**trainer_arguments(options.folder, max_iterations=options.iterations))
    trainer.fit(module, data)
    trained = PPOModule.load_from_checkpoint(
        f"{options.folder}/checkpoints/last.ckpt", reward=ends_soon
    )
    print(export_model(trained, f"{options.folder}/export"))  # noqa: T201


if __name__ == "__main__":
    main()
