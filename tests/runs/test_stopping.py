from __future__ import annotations

import os
import signal

import pytest

from rlhf_lightning.runs.stopping import RunStoppedError, stopping_on_signals


def test_outside_of_training_a_signal_stops_at_once():
    before = signal.getsignal(signal.SIGUSR1)
    with pytest.raises(RunStoppedError, match="SIGUSR1"), stopping_on_signals():
        os.kill(os.getpid(), signal.SIGUSR1)
    assert signal.getsignal(signal.SIGUSR1) is before
