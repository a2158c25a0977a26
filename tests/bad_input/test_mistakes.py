"""Whatever is mistyped on the command line of training is answered in one line that helps."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from functools import cache

import pytest
from hydra import compose, initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, flag_override

from rlhf_lightning.app import prerequisites, train
from rlhf_lightning.app.command_line import fail
from rlhf_lightning.app.config.compose import conf_dir, register
from rlhf_lightning.app.config.settings import TrainSettings
from rlhf_lightning.app.config.validate import read_settings
from rlhf_lightning.runs.folder import RunFolder
from tests.bad_input.mistakes import COMPOSITION, FORMS, MISTAKES, VALUES, Mistake

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
MOST_CHARACTERS = 2500  # the names of all experiments are 1500
Answer = Callable[[list[str]], str]


@pytest.fixture(autouse=True)
def nothing_is_trained(working_folder, monkeypatch):
    """A mistake must be found before a stage is trained, or another one for it."""

    def went_on(*_: object) -> None:
        raise AssertionError("the mistake was not found")

    monkeypatch.setattr(train, "_train", went_on)
    monkeypatch.setattr(prerequisites, "_train", went_on)
    register()


def run_job(cfg: DictConfig, overrides: list[str]) -> None:
    """Do what Hydra's job does, without its logging and its folder."""
    try:
        train.run(read_settings(TrainSettings, cfg), RunFolder("outputs/run"), overrides)
    except train.ConfigError as error:
        fail(str(error))


def run_composed(overrides: list[str]) -> None:
    with initialize_config_dir(version_base="1.3", config_dir=str(conf_dir())):
        cfg = compose("train", overrides=overrides)
    run_job(cfg, overrides)


@pytest.fixture
def whole_command(monkeypatch, capsys) -> Answer:
    """Return what the command line says, which ends with status 2."""

    def answer(overrides: list[str]) -> str:
        monkeypatch.setattr(sys, "argv", ["rlhf-train", *overrides])
        monkeypatch.setattr(train, "run_job", lambda *_: run_composed(overrides))
        with pytest.raises(SystemExit) as caught:
            train.main()
        assert caught.value.code == 2
        return capsys.readouterr().err

    return answer


@cache
def composed(*overrides: str) -> DictConfig:
    with initialize_config_dir(version_base="1.3", config_dir=str(conf_dir())):
        return compose("train", overrides=list(overrides))


@pytest.fixture
def checks_alone(capsys) -> Answer:
    """Return what the checks say; the choices of groups are composed once for many rows."""

    def answer(overrides: list[str]) -> str:
        chosen = [o for o in overrides if "." not in o.split("=")[0] and is_choice(o)]
        parsed = OverridesParser.create().parse_overrides([o for o in overrides if o not in chosen])
        cfg = copy.deepcopy(composed(*chosen))
        with flag_override(cfg, "struct", True):
            ConfigLoaderImpl._apply_overrides_to_config(parsed, cfg)
        with pytest.raises(SystemExit) as caught:
            run_job(cfg, overrides)
        assert caught.value.code == 2
        return capsys.readouterr().err

    return answer


def is_choice(override: str) -> bool:
    return (conf_dir() / override.lstrip("+").split("=")[0]).is_dir()


def check(said: str, mistake: Mistake) -> None:
    assert said.startswith("error: ")
    assert said.count("\n") == 1
    assert said.endswith("\n")
    assert len(said) < MOST_CHARACTERS
    for part in (mistake.name, mistake.got, mistake.wanted):
        assert part in said


@pytest.mark.parametrize("mistake", COMPOSITION, ids=lambda mistake: mistake.given)
def test_what_does_not_compose_is_named_with_what_can_be_written(mistake, whole_command):
    check(whole_command(mistake.given.split()), mistake)


@pytest.mark.thorough
@pytest.mark.parametrize("mistake", VALUES, ids=lambda mistake: mistake.given)
def test_a_value_that_cannot_be_is_named_with_what_is_wanted(mistake, checks_alone):
    check(checks_alone(mistake.given.split()), mistake)


@pytest.mark.parametrize("mistake", FORMS, ids=lambda mistake: mistake.given)
def test_what_was_taken_away_or_has_another_form_is_named(mistake, checks_alone):
    check(checks_alone(mistake.given.split()), mistake)


@pytest.mark.slow
@pytest.mark.parametrize("mistake", [*VALUES, *FORMS], ids=lambda mistake: mistake.given)
def test_the_whole_command_line_answers_as_its_checks_do(mistake, whole_command):
    check(whole_command(mistake.given.split()), mistake)


def test_the_mistakes_are_at_least_sixty_and_distinct():
    assert len(MISTAKES) >= 60
    assert len({mistake.given for mistake in MISTAKES}) == len(MISTAKES)
    assert len({mistake[1:] for mistake in MISTAKES}) == len(MISTAKES)


def test_the_mistakes_are_distinct():
    assert len({mistake.given for mistake in MISTAKES}) == len(MISTAKES)
    assert len({mistake[1:] for mistake in MISTAKES}) == len(MISTAKES)


def test_a_configuration_without_mistakes_goes_on_to_the_training():
    """Or the tests above would pass for want of a way on."""
    with pytest.raises(AssertionError, match="was not found"):
        run_composed(["+experiment=base", "logger=none"])
