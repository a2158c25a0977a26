"""Every `_target_` of conf/ and sweeps/ is a public name: what YAML builds, Python can write."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import yaml

import rlhf_lightning
from rlhf_lightning.app.config.compose import HPARAMS, conf_dir
from rlhf_lightning.app.config.targets import resolve

FILES = sorted(f for d in ("conf", "sweeps") for f in (conf_dir().parent / d).rglob("*.yaml"))
# With the reason.
OTHERS = {
    "torch.optim.AdamW": "torch's own",
    "rlhf_lightning.app.run_claim.ClaimFolder": "a hook of Hydra, which no user sets",
    "rlhf_lightning.app.sweep.SweepEnd": "a hook of Hydra, which no user sets",
}


def targets(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        if "_target_" in node:
            yield node["_target_"]
        node = list(node.values())
    for value in node if isinstance(node, list) else ():
        yield from targets(value)


def is_public(name: str) -> bool:
    package, _, rest = name.partition(".")
    first, _, method = rest.partition(".")
    known = package == "rlhf_lightning" and first in rlhf_lightning.__all__
    return known and method in ("", "from_pretrained")


def test_files_build_by_public_names_alone() -> None:
    found = [name for file in FILES for name in targets(yaml.safe_load(file.read_text()))]
    assert {name for name in found if not is_public(name)} == set(OTHERS)
    assert len(set(found)) > 40
    assert all(callable(resolve(name, "here")) for name in set(found) if is_public(name))


def test_hyper_parameters_are_public_names() -> None:
    assert {cls.__name__ for cls in HPARAMS.values()} <= set(rlhf_lightning.__all__)
