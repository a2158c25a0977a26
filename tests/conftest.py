"""Settings and fixtures of every test: one thread, no network, fixed seeds."""

from __future__ import annotations

import gc
import os

# Before torch is imported, here and in every child process: the suite runs on two cores with two
# workers, and a sum taken by one thread is the same on every machine.
os.environ.update(
    OMP_NUM_THREADS="1",
    TOKENIZERS_PARALLELISM="false",
    HF_HUB_OFFLINE="1",
    HF_DATASETS_OFFLINE="1",
    HF_HUB_DISABLE_TELEMETRY="1",
    WANDB_MODE="offline",
    WANDB_SILENT="true",
)

import ipaddress
import pickle
import random
import signal
import socket
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import omegaconf
import pytest
import torch
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf, grammar_parser

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

torch.set_num_threads(1)
# Imports make half a million objects that stay. To look through them again and again while they
# are made takes a third of the time to collect the tests; `pytest_collection_finish` goes on.
gc.disable()
# A shell ignores Control-C in what it starts with `&`, and so would every process of a test.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # nohup
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


# The longest files: begun last, one worker would work on them while the other has nothing left.
# xdist keeps this order under `--no-loadscope-reorder`.
BEGUN_FIRST = (
    "test_trained_world.py",
    "test_train.py",
    "test_launching.py",
    "test_lost_ranks.py",
    "test_collect.py",
    "test_documented_commands.py",
    "test_interrupts.py",
    "test_disk.py",
    "test_memory.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    place = {name: number for number, name in enumerate(BEGUN_FIRST)}
    items.sort(key=lambda item: place.get(item.path.name, len(place)))
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish() -> None:
    """Leave what the imports have made out of every later garbage collection."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def files_read_once() -> Iterator[None]:
    """Parse each file and each interpolation of a configuration once, and not in every test.

    Hydra reads thirty files for a command line, in Python: two fifths of the time to compose it.
    """
    load, parse = OmegaConf.load, cache(grammar_parser.parse)
    kept: dict[tuple[str, int], bytes] = {}

    def load_once(file: Any) -> Any:
        path = Path(file if isinstance(file, str | Path) else file.name)
        key = str(path.absolute()), path.stat().st_mtime_ns
        if key not in kept:
            kept[key] = pickle.dumps(load(file))
        return pickle.loads(kept[key])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OmegaConf, "load", staticmethod(load_once))
        for module in (omegaconf.base, omegaconf._utils):
            patch.setattr(module, "parse", parse)
        yield


@pytest.fixture(autouse=True)
def fixed_seeds() -> Iterator[None]:
    """Start every test from the same random state, whatever ran before it."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    deterministic = torch.are_deterministic_algorithms_enabled()
    yield
    torch.use_deterministic_algorithms(deterministic)


@pytest.fixture(autouse=True)
def no_command() -> Iterator[None]:
    """Forget the command that a test has called in this process.

    Hydra keeps its configuration, and the variables on which ranks agree, such as the time at which
    a run was started, would be those of every later run.
    """
    before = set(os.environ)
    yield
    for name in set(os.environ) - before:
        if name.startswith("RLHF_"):
            del os.environ[name]
    HydraConfig.instance().cfg = None
    GlobalHydra.instance().clear()


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse connections that leave this machine."""
    connect = socket.socket.connect

    def local_connect(self: socket.socket, address: Any) -> None:
        if self.family in (socket.AF_INET, socket.AF_INET6) and not _is_loopback(address[0]):
            raise OSError(f"tests use no network, this one asked for {address[0]}")
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", local_connect)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@pytest.fixture(scope="session")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny policy of random weights with the built-in world's tokenizer, to start runs from."""
    from tests.builders.runs import make_start

    return make_start(tmp_path_factory.mktemp("models") / "start")


@pytest.fixture(scope="session")
def world_sft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which base and SFT model of seed 1 were trained, once for all workers."""
    from filelock import FileLock

    from tests.builders.processes import run_python

    mine = tmp_path_factory.getbasetemp()
    folder = (mine.parent if "PYTEST_XDIST_WORKER" in os.environ else mine) / "world"
    folder.mkdir(exist_ok=True)
    with FileLock(folder / "lock"):
        if not (folder / "artifacts/demo_seed1/sft/config.json").is_file():
            words = ["-m", "rlhf_lightning.train", "+experiment=sft", "logger=none"]
            done = run_python(*words, folder=folder, timeout=800)
            assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def forgetful_wandb() -> Iterator[None]:
    """Have W&B read the environment anew: a process keeps its first mode, host and login."""
    import wandb
    from wandb.sdk.lib import wbauth

    def forget() -> None:
        wbauth.unauthenticate_session(update_settings=False)
        wandb.teardown()

    forget()
    yield
    forget()


@pytest.fixture
def working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Run the test in an empty folder, where its `outputs/` and `artifacts/` end up."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def running_chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    """Start one Chromium for the tests of a file; use `browser`, which leaves nothing behind."""
    from tests.browser import chromium, find_chromium

    if find_chromium() is None:
        pytest.skip("needs chromium and chromedriver: apt-get install chromium chromium-driver")
    with chromium(tmp_path_factory.mktemp("chromium")) as driver:
        yield driver


@pytest.fixture
def browser(running_chromium: Chrome) -> Chrome:
    """A real headless Chromium of 1280 x 900, without cookies and without earlier messages."""
    from tests.browser import forget

    forget(running_chromium)
    return running_chromium
