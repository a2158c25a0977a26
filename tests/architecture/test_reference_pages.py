"""Pages that quote the code agree with it: configuration, implementation details, TRL's options."""

from __future__ import annotations

import importlib.util
import re
import types
from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf

from rlhf_lightning.app.config.compose import composed, conf_dir, register

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"


def builder() -> types.ModuleType:
    spec = importlib.util.spec_from_file_location("builder", DOCS / "build_configuration.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_configuration_page_is_the_one_that_the_code_gives():
    assert (DOCS / "configuration.md").read_text(encoding="utf-8") == builder().page(), (
        "run `python docs/build_configuration.py`"
    )


def rows(page: str) -> list[list[str]]:
    return table_rows((DOCS / page).read_text(encoding="utf-8"))


def table_rows(text: str) -> list[list[str]]:
    """Return the cells of the tables of a text, headers and rules left out."""
    lines = text.splitlines()
    tables = [line for line in lines if line.startswith("| ") and set(line) - set("|- ")]
    body = [line for line in tables if not line.startswith(("| detail", "| TRL"))]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in body]


@pytest.mark.parametrize("row", rows("implementation_details.md"), ids=lambda row: row[0])
def test_the_line_that_implements_a_detail_is_where_the_table_says(row):
    quoted = re.fullmatch(r"`([\w./]+)`: `([^`]+)`", row[2])
    assert quoted, f"{row[2]}: write `file`: `piece of the line`"
    file = ROOT / "rlhf_lightning" / quoted.group(1)
    file = file if file.exists() else ROOT / quoted.group(1)
    count = file.read_text(encoding="utf-8").count(quoted.group(2))
    assert count == 1, f"{quoted.group(2)!r} stands {count} times in {quoted.group(1)}"


def trl_rows(config: str) -> list[list[str]]:
    """Return the rows of the table of one of TRL's configurations."""
    page = (DOCS / "migrating_from_trl.md").read_text(encoding="utf-8")
    section = page.split(f"## Options of `{config}`\n")[1].split("\n## ")[0]
    return [row for row in table_rows(section) if len(row) == 3]


@pytest.mark.parametrize(
    ("config", "least"),
    [("PPOConfig", 21), ("GRPOConfig", 20), ("RLOOConfig", 4), ("DPOConfig", 7)],
)
def test_every_counterpart_is_a_setting_that_exists(config, least):
    register()
    experiment = f"+experiment={config.removesuffix('Config').lower()}"
    cfg = composed("train", [experiment, "model=smollm2_135m", "lora=lora"])
    checked = 0
    for row in trl_rows(config):
        for written in re.findall(r"`([^`]+)`", row[1]):
            key, _, value = written.partition("=")
            if value and (conf_dir() / key).is_dir():
                assert (conf_dir() / key / f"{value}.yaml").is_file(), written
            elif re.fullmatch(r"[a-z_]+(\.[a-z_]+)*", key) and not written.startswith("rlhf-"):
                assert exists(cfg, key), f"{key} of migrating_from_trl.md does not exist"
                checked += 1
    assert checked >= least


def exists(cfg: DictConfig, key: str) -> bool:
    parent, _, name = key.rpartition(".")
    node = OmegaConf.select(cfg, parent) if parent else cfg
    return node is not None and name in node
