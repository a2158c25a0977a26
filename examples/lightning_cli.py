"""SFT by Lightning's own command line, which needs jsonargparse[signatures].

python examples/lightning_cli.py fit --model.source=MODEL --data.path=FILE --trainer.folder=RUN
"""

from typing import Any

import lightning as L
from lightning.pytorch.cli import LightningCLI

from rlhf_lightning import DemonstrationDataModule, SFTHparams, SFTModule, trainer_arguments


def sft(source: str, learning_rate: float = 2e-5, seed: int = 1) -> SFTModule:
    """Return the module that fine-tunes `source`, a folder or hub name."""
    return SFTModule.from_pretrained(source, sft=SFTHparams(learning_rate=learning_rate), seed=seed)


def demonstrations(path: str, tokenizer: Any, batch_size: int = 8) -> DemonstrationDataModule:
    """Return the data of a file with the columns prompt and completion."""
    return DemonstrationDataModule(path, tokenizer, batch_size=batch_size)


def trainer(folder: str, iterations: int = 200, callbacks: list | None = None) -> L.Trainer:
    """Return a Trainer that writes the run into `folder`."""
    return L.Trainer(**trainer_arguments(folder, max_iterations=iterations, callbacks=callbacks))


class CLI(LightningCLI):
    """`fit ... --print_config > run.yaml` writes settings, `fit --config run.yaml` reads them."""

    def add_arguments_to_parser(self, parser):  # noqa: ANN001, ANN201
        """Give the data the tokenizer of the model."""
        parser.link_arguments("model", "data.tokenizer", lambda it: it.tokenizer, "instantiate")


if __name__ == "__main__":
    own = {"auto_configure_optimizers": False, "load_from_checkpoint_support": False}  # ours do it
    CLI(sft, demonstrations, None, trainer_class=trainer, seed_everything_default=1, **own)
