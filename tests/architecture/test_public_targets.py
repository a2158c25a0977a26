"""Every `_target_` of conf/ and sweeps/ is a public name: what YAML builds, Python can write."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import rlhf_lightning
from rlhf_lightning.app.config.compose import HPARAMS, conf_dir
from rlhf_lightning.app.config.targets import LOOKUPS, resolve

FILES = sorted(f for d in ("conf", "sweeps") for f in (conf_dir().parent / d).rglob("*.yaml"))
# With the reason.
OTHERS = {
    "torch.optim.AdamW": "torch's own",
    "rlhf_lightning.app.config.run_claim.ClaimFolder": "a hook of Hydra, which no user sets",
    "rlhf_lightning.app.sweep.SweepEnd": "a hook of Hydra, which no user sets",
}


def targets(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        if "_target_" in node:
            yield node["path"] if node["_target_"] in LOOKUPS else node["_target_"]
        node = list(node.values())
    for value in node if isinstance(node, list) else ():
        yield from targets(value)


def is_public(name: str) -> bool:
    package, _, rest = name.partition(".")
    first, _, method = rest.partition(".")
    known = package == "rlhf_lightning" and first in rlhf_lightning.__all__
    return known and method in ("", "from_pretrained")


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(conf_dir().parent)))
def test_a_file_builds_by_public_names_alone(file: Path) -> None:
    found = set(targets(yaml.safe_load(file.read_text())))
    assert {name for name in found if not is_public(name) and name not in OTHERS} == set()
    assert all(callable(resolve(name, "here")) for name in found if is_public(name))


def test_hyper_parameters_are_public_names() -> None:
    assert {cls.__name__ for cls in HPARAMS.values()} <= set(rlhf_lightning.__all__)


@pytest.mark.parametrize(
    "name",
    ["rlhf_lightning.rollout.scorers.http.HttpScorer", "rlhf_lightning.Nothing", "os.system"],
)
def test_a_name_that_is_not_public_is_seen(name: str) -> None:
    assert not any(map(is_public, targets({"a": [{"b": {"_target_": name}}]})))


def test_every_target_is_read_in_some_file() -> None:
    found = [name for file in FILES for name in targets(yaml.safe_load(file.read_text()))]
    assert len(set(found)) > 40
    assert set(OTHERS) <= set(found)
