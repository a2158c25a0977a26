"""The dashboard of a project in Weights & Biases: `python -m rlhf_lightning.dashboard`."""

from __future__ import annotations

import json
import os
from typing import Any

from rlhf_lightning.app.command_line import run_command, say
from rlhf_lightning.app.config.commands import DashboardSettings
from rlhf_lightning.app.config.compose import ConfigError
from rlhf_lightning.reports.charts import looked_at_first
from rlhf_lightning.runs.folder import ITERATION
from rlhf_lightning.runs.metric_catalog import QUANTITIES, capitalized, quantity

MEDIA = (
    *(f"samples/{part}" for part in ("held_out", "best", "worst")),
    *(f"histograms/{part}" for part in ("scores", "ratios", "advantages", "lengths")),
)


def run(settings: DashboardSettings) -> list[str]:
    """Make what `settings` ask for and return where it is, or its content.

    Raises:
        ConfigError: if no login is found.
    """
    entity = settings.entity or os.environ.get("WANDB_ENTITY")
    project = settings.project or os.environ.get("WANDB_PROJECT") or "rlhf_lightning"
    if settings.action == "print":
        # Without a login the user's name is unknown; the layout does not depend on it.
        made = make_workspace(entity or "entity", project, settings.name)
        return [json.dumps(made._to_model().model_dump(by_alias=True), default=str, indent=2)]
    require_login()
    if not entity:
        # takes seconds, and only publishing needs it
        import wandb

        entity = str(wandb.Api().default_entity)
    return [str(make_workspace(entity, project, settings.name).save().url)]


def sections() -> dict[str, list[str]]:
    """Return what one looks at first in a run: metrics by the first part of their names."""
    found: dict[str, list[str]] = {}
    for name in looked_at_first(QUANTITIES):
        found.setdefault(name.partition("/")[0], []).append(name)
    return {**found, "samples and distributions": list(MEDIA)}


def make_workspace(entity: str, project: str, name: str) -> Any:
    """Return the workspace: what one looks at first, then all that W&B finds.

    Iterations are on every x-axis.

    Raises:
        ConfigError: if wandb-workspaces is not installed.
    """
    workspaces, _ = _libraries()
    return workspaces.Workspace(
        entity=entity,
        project=project,
        name=name,
        sections=[
            workspaces.Section(
                name=title,
                panels=[_panel(metric) for metric in metrics],
                is_open=True,
                panel_settings=workspaces.SectionPanelSettings(x_axis=ITERATION),
            )
            for title, metrics in sections().items()
        ],
        settings=workspaces.WorkspaceSettings(x_axis=ITERATION),
        auto_generate_panels=True,
    )


def require_login() -> None:
    """Check that a login to Weights & Biases is found; without one the panels are named.

    Raises:
        ConfigError: if there is none.
    """
    # brings torch and lightning, which action=print does without
    from rlhf_lightning.callbacks.wandb_logger import is_logged_in

    if not is_logged_in():
        for title, metrics in sections().items():
            names = (m.rpartition("/")[2] if m in MEDIA else quantity(m).label for m in metrics)
            say(f"{title}: {'; '.join(names)}")
        raise ConfigError("no login to W&B: run `wandb login`, set WANDB_API_KEY or action=print")


def _panel(metric: str) -> Any:
    """Return a panel, with where a healthy run keeps the metric in its title."""
    _, reports = _libraries()
    if metric in MEDIA:
        title = metric.rpartition("/")[2].replace("_", " ")
        return reports.MediaBrowser(title=title, media_keys=[metric])
    about = quantity(metric)
    usual = f", usually {about.usual}" if about.usual else ""
    return reports.LinePlot(title=capitalized(about.label) + usual, x=ITERATION, y=[metric])


def _libraries() -> tuple[Any, Any]:
    try:
        # of the extra `dashboards`, which may be missing
        import wandb_workspaces.reports.v2 as reports
        import wandb_workspaces.workspaces as workspaces
    except ModuleNotFoundError as error:
        told = f"the dashboard needs {error.name}: pip install -e '.[dashboards]' in the checkout"
        raise ConfigError(told) from error
    return workspaces, reports


def main() -> None:
    """Run the command line."""
    run_command("dashboard", run)
