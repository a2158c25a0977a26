"""The dashboard of a project in Weights & Biases: `python -m rlhf_lightning.dashboard`."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlhf_lightning.app.command_line import fail
from rlhf_lightning.app.config.compose import ConfigError, conf_dir, register
from rlhf_lightning.app.config.errors import COMPOSE_ERRORS, explain

HELP = """Make the workspace of a project in Weights & Biases, and a report that compares two runs.

  python -m rlhf_lightning.dashboard                                the workspace of rlhf_lightning
  python -m rlhf_lightning.dashboard dashboard.project=mine         of another project
  python -m rlhf_lightning.dashboard dashboard.action=print         what it holds, without a login
  python -m rlhf_lightning.dashboard 'dashboard.compare=[RUN,RUN]'  and a report of two runs

RUN is a run folder, or the id of a W&B run. Settings: conf/dashboard.yaml.
"""
ACTIONS = ("save", "print")


def run(settings: dict[str, Any]) -> list[str]:
    """Make what `settings` ask for and return where it is, or its content.

    Args:
        settings: those of conf/dashboard.yaml.

    Raises:
        ConfigError: if they cannot work, or nobody is logged in.
    """
    if settings["action"] not in ACTIONS:
        raise ConfigError(f"dashboard.action={settings['action']} must be {' or '.join(ACTIONS)}")
    if len(settings["compare"]) not in (0, 2):
        raise ConfigError(
            f"dashboard.compare has {len(settings['compare'])} runs: give two, or none"
        )
    runs = [run_id_of(str(name)) for name in settings["compare"]]
    entity = settings["entity"]
    if settings["action"] == "print":
        # Without a login nobody's name is known; the layout does not depend on it.
        made = make_workspace(entity or "entity", settings["project"], settings["name"])
        return [json.dumps(made._to_model().model_dump(by_alias=True), default=str, indent=2)]
    require_login()
    entity = entity or default_entity()
    places = [str(make_workspace(entity, settings["project"], settings["name"]).save().url)]
    if runs:
        places.append(str(make_report(entity, settings["project"], runs).save().url))
    return places


def make_workspace(entity: str, project: str, name: str) -> Any:
    """Return the workspace: a section a stage, iterations on every x-axis.

    Raises:
        ConfigError: if wandb-workspaces is not installed.
    """
    from rlhf_lightning.reports.panels import SECTIONS
    from rlhf_lightning.runs.folder import ITERATION

    workspaces, _ = _libraries()
    return workspaces.Workspace(
        entity=entity,
        project=project,
        name=name,
        sections=[
            workspaces.Section(
                name=section.name,
                panels=[_panel(panel) for panel in section.panels],
                is_open=index < 3,
                panel_settings=workspaces.SectionPanelSettings(x_axis=ITERATION),
            )
            for index, section in enumerate(SECTIONS)
        ],
        settings=workspaces.WorkspaceSettings(x_axis=ITERATION),
    )


def make_report(entity: str, project: str, runs: Sequence[str]) -> Any:
    """Return a report that compares runs: outcomes, what differs, curves, samples.

    Args:
        entity: whose project.
        project: the project of both.
        runs: ids of W&B runs.

    Raises:
        ConfigError: if wandb-workspaces is not installed.
    """
    from rlhf_lightning.reports.panels import OUTCOMES, PPO_SECTIONS
    from rlhf_lightning.runs.metric_catalog import quantity

    _, reports = _libraries()
    names = ", ".join(f"'{name}'" for name in runs)
    runset = reports.Runset(
        entity=entity, project=project, name="compared", filters=f"ID in [{names}]"
    )
    outcomes = [
        reports.BarPlot(title=quantity(name).label, metrics=[reports.SummaryMetric(name)])
        for name in OUTCOMES
    ]
    blocks: list[Any] = [
        reports.H1("Outcomes"),
        reports.P("Final values on held-out prompts. Intervals stand in each run's report.html."),
        reports.PanelGrid(runsets=[runset], panels=outcomes),
        reports.H1("What differs"),
        reports.PanelGrid(runsets=[runset], panels=[reports.RunComparer(diff_only="split")]),
    ]
    for section in PPO_SECTIONS:
        panels = [_panel(panel) for panel in section.panels]
        blocks += [reports.H1(section.name), reports.PanelGrid(runsets=[runset], panels=panels)]
    return reports.Report(
        entity=entity,
        project=project,
        title=f"{runs[0]} and {runs[1]}"[:128],
        description="Two runs compared by rlhf_lightning.dashboard",
        blocks=blocks,
    )


def run_id_of(name: str) -> str:
    """Return the id of the W&B run of a run folder; any other name is an id already.

    Raises:
        ConfigError: if the folder holds no W&B run.
    """
    folder = Path(name)
    if not folder.is_dir():
        if "/" in name:
            raise ConfigError(f"dashboard.compare: {name} is no folder")
        return name
    kept = folder / "wandb" / "run_id"
    if not kept.is_file():
        raise ConfigError(
            f"dashboard.compare: {name} has no W&B run: it was not run with logger=wandb"
        )
    return kept.read_text("utf-8").strip()


def require_login() -> None:
    """Check that somebody is logged in.

    Raises:
        ConfigError: if nobody is.
    """
    from rlhf_lightning.callbacks.wandb_logger import is_logged_in

    if not is_logged_in():
        raise ConfigError(
            "nobody is logged in to Weights & Biases: run `wandb login` or set WANDB_API_KEY; "
            "dashboard.action=print shows the workspace without it"
        )


def default_entity() -> str:
    """Return whose projects those of the user who is logged in are."""
    import wandb

    return str(wandb.Api().default_entity)


def _panel(panel: Any) -> Any:
    from rlhf_lightning.runs.folder import ITERATION

    _, reports = _libraries()
    if panel.kind == "media":
        return reports.MediaBrowser(title=panel.title, media_keys=list(panel.metrics))
    return reports.LinePlot(title=panel.title, x=ITERATION, y=list(panel.metrics))


def _libraries() -> tuple[Any, Any]:
    try:
        import wandb_workspaces.reports.v2 as reports
        import wandb_workspaces.workspaces as workspaces
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"the dashboard needs wandb-workspaces ({error}): pip install "
            "-e '.[dashboards]' in the checkout"
        ) from error
    return workspaces, reports


def compose_settings(overrides: Sequence[str]) -> dict[str, Any]:
    """Return the settings of the overrides.

    Raises:
        ConfigError: for an unknown one.
    """
    register()
    with initialize_config_dir(version_base="1.3", config_dir=str(conf_dir())):
        try:
            cfg = compose("dashboard", overrides=list(overrides))
        except COMPOSE_ERRORS as error:
            raise ConfigError(explain(error, list(overrides), "dashboard")) from error
    settings: Any = OmegaConf.to_container(cfg.dashboard, resolve=True)
    return dict(settings)


def main() -> None:
    """Run the command line."""
    arguments = sys.argv[1:]
    if {"-h", "--help"} & set(arguments):
        sys.stdout.write(HELP)
        return
    try:
        for line in run(compose_settings(arguments)):
            sys.stdout.write(f"{line}\n")
    except (ConfigError, HydraException, OmegaConfBaseException) as error:
        fail(str(error))


if __name__ == "__main__":
    main()
