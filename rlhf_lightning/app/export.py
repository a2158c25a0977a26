"""Export a run's model as a Hugging Face folder: `python -m rlhf_lightning.export RUN`.

RUN is a run folder, whose newest complete checkpoint is taken (also of a run that was killed), or
a checkpoint in one. With --push-to-hub it may also be a folder that was exported before.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from pathlib import Path

from rlhf_lightning.app.export_settings import ExportError, Request, find_checkpoint, find_target


def run(request: Request) -> list[str]:
    """Export, upload if that was asked for, and return where the model is now.

    Raises:
        ExportError: with what is missing and what to do.
    """
    places = []
    if is_model_folder(request.run):
        if request.push_to_hub is None:
            raise ExportError(
                f"{request.run} is an exported model already: give a run folder, or --push-to-hub"
            )
        folder = request.run
    else:
        run_folder, checkpoint = find_checkpoint(request.run)
        folder = find_target(request, run_folder)
        from rlhf_lightning.app.reexport import reexport

        reexport(
            run_folder, checkpoint, folder, adapter_only=request.adapter_only, dtype=request.dtype
        )
        places.append(str(folder))
    if request.push_to_hub is not None:
        from rlhf_lightning.runs.hub import HubError, push_folder

        try:
            address = push_folder(folder, request.push_to_hub, private=not request.public)
        except HubError as error:
            raise ExportError(str(error)) from error
        places.append(address)
    return places


def is_model_folder(path: Path) -> bool:
    """Return whether `path` holds a model, or an adapter alone."""
    return any((path / name).is_file() for name in ("config.json", "adapter_config.json"))


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        prog="rlhf-export",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="run folder or checkpoint")
    parser.add_argument("--to", type=Path, metavar="FOLDER", help="the new folder")
    parser.add_argument("--adapter-only", action="store_true", help="of LoRA, without its base")
    parser.add_argument("--dtype", choices=("auto", "fp32", "bf16"), help="of the weights")
    parser.add_argument("--push-to-hub", metavar="NAME", help="upload, privately unless --public")
    parser.add_argument("--public", action="store_true", help="of a new repository on the hub")
    request = Request(**vars(parser.parse_args()))
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    warnings.filterwarnings("ignore", message=".*LeafSpec.*")
    try:
        for place in run(request):
            sys.stdout.write(f"{place}\n")
    except ExportError as error:
        sys.stderr.write(f"error: {error}\n")
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
