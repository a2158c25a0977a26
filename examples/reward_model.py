"""A reward model from pairs: python examples/reward_model.py MODEL PAIRS.jsonl RUN_FOLDER."""

import argparse

import lightning as L

from rlhf_lightning import (
    PreferenceDataModule,
    RewardHparams,
    RewardModule,
    export_model,
    trainer_arguments,
)


def main() -> None:
    """Learn which of two responses is preferred; `val/accuracy` in summary.json says how well."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="folder or hub name")
    parser.add_argument("pairs", help="file with the columns prompt, chosen and rejected")
    parser.add_argument("folder", help="of the run")
    parser.add_argument("--iterations", type=int, default=200)
    options = parser.parse_args()

    module = RewardModule.from_pretrained(options.model, reward=RewardHparams(learning_rate=1e-5))
    data = PreferenceDataModule(options.pairs, module.tokenizer, batch_size=8)
    trainer = L.Trainer(**trainer_arguments(options.folder, max_iterations=options.iterations))
    trainer.fit(module, data)
    print(export_model(module, f"{options.folder}/export"))  # noqa: T201


if __name__ == "__main__":
    main()
