"""What a run calls may not end it in silence; a machine without the accelerator is told early."""

from __future__ import annotations

import sys

import pytest

from rlhf_lightning.app.config.compose import ConfigError
from rlhf_lightning.app.config.settings import TrainSettings
from rlhf_lightning.app.config.validate import check_devices
from rlhf_lightning.app.failures import RunFailedError, cause_of, exits_are_failures, is_expected
from tests.builders.command_lines import settings_of


@pytest.mark.parametrize("code", [0, None, 3, "done"])
def test_leaving_the_process_is_a_failure_that_names_the_place(code):
    def impatient_callback():
        sys.exit(code)

    @exits_are_failures()
    def run():
        impatient_callback()

    with pytest.raises(RunFailedError) as caught:
        run()
    text = cause_of(caught.value)
    assert text.startswith(
        f"sys.exit({code!r}) was called in impatient_callback ({__file__}, line "
    )
    assert is_expected(caught.value)


def test_an_interrupt_that_lightning_makes_an_exit_of_is_an_interrupt():
    @exits_are_failures()
    def run():
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            sys.exit(1)

    with pytest.raises(KeyboardInterrupt):
        run()


def on(kind: str, devices: int) -> TrainSettings:
    found: TrainSettings = settings_of(
        "+experiment=base",
        f"trainer.accelerator={kind}",
        f"trainer.devices={devices}",
        "data.batch_size=24",
    )
    return found


@pytest.mark.parametrize("kind", ["gpu", "cuda", "mps"])
def test_an_accelerator_that_is_not_there_is_refused(kind, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.setattr("torch.backends.mps.is_available", lambda: False)
    settings = on(kind, 1)
    with pytest.raises(ConfigError, match=rf"^trainer\.accelerator={kind}, but torch finds none"):
        check_devices(settings)


def test_more_devices_than_there_are_is_refused(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    for devices in (1, 2):
        check_devices(on("gpu", devices))
    settings = on("gpu", 3)
    with pytest.raises(ConfigError, match=r"^trainer\.devices=3, but torch finds 2 of kind gpu"):
        check_devices(settings)
    check_devices(on("cpu", 8))


def test_a_file_in_a_folder_named_wandb_is_named_too(tmp_path):
    file = tmp_path / "wandb" / "reward.py"
    file.parent.mkdir()
    file.write_text("import sys\n\ndef leave():\n    sys.exit(0)\n")
    scope: dict[str, object] = {}
    exec(compile(file.read_text(), str(file), "exec"), scope)
    with pytest.raises(RunFailedError, match=r"called in leave \(.*/wandb/reward\.py, line 4\)"):
        exits_are_failures()(scope["leave"])()
