"""Supervised fine-tuning: python examples/sft.py MODEL DEMONSTRATIONS.jsonl RUN_FOLDER."""

import argparse

import lightning as L

from rlhf_lightning import (
    DemonstrationDataModule,
    SFTHparams,
    SFTModule,
    export_model,
    trainer_arguments,
)


def main() -> None:
    """Train on responses to prompts, and write the result as a Hugging Face folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="folder or hub name")
    parser.add_argument("demonstrations", help="file with the columns prompt and completion")
    parser.add_argument("folder", help="of the run")
    parser.add_argument("--iterations", type=int, default=200)
    options = parser.parse_args()

    module = SFTModule.from_pretrained(options.model, sft=SFTHparams(learning_rate=2e-5))
    data = DemonstrationDataModule(options.demonstrations, module.tokenizer, batch_size=8)
    trainer = L.Trainer(**trainer_arguments(options.folder, max_iterations=options.iterations))
    trainer.fit(module, data)
    print(export_model(module, f"{options.folder}/export"))  # noqa: T201


if __name__ == "__main__":
    main()
