"""Clocks that jump, as they do when a machine wakes up or its time is set."""

import time
from pathlib import Path
from typing import Any

import fulgurite as fg
import numpy as np
import pytest
from fulgurite_checkpoint import Checkpointer
from fulgurite_logging import JSONLLogger
from trained import ZEROS, Counting, engine


class Clock:
    """The time of day, which jumps a day ahead at step 3, and two days back at step 7."""

    def __init__(self) -> None:
        self.read = time.time
        self.offset = 0.0

    def __call__(self) -> float:
        return self.read() + self.offset

    @fg.hookimpl
    def register_actions(self) -> list[fg.ScheduledAction]:
        return [fg.ScheduledAction("jump", fg.At(3) | fg.At(7), self.jump)]

    def jump(self, run: fg.Run) -> None:
        self.offset += {3: 86_400.0, 7: -172_800.0}[run.step]


def train(run_dir: Path, steps: int, *plugins: Any) -> fg.FitResult:
    # While Orbax writes, it measures its own timeouts by this clock, and the save may fail.
    saving = Checkpointer(fg.Every(4) | fg.EverySeconds(3600), async_save=False)
    plugins = (saving, JSONLLogger(), *plugins)
    return engine(run_dir, *plugins, steps=steps, log_every=2).fit(Counting, ZEROS, resume="auto")


def test_a_clock_that_jumps_changes_nothing_exact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = train(tmp_path / "whole", 12)
    clock = Clock()
    monkeypatch.setattr(time, "time", clock)
    train(tmp_path / "run", 8, clock)
    jumped = train(tmp_path / "run", 12, clock)
    assert clock.offset == -86_400
    assert np.array_equal(jumped.module.weight, whole.module.weight)
    records = [(tmp_path / name / "records.jsonl").read_bytes() for name in ("run", "whole")]
    assert records[0] == records[1]
    names = {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()}
    assert {"step-4", "step-8", "step-12"} <= names
