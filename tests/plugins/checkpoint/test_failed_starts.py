"""A start that failed leaves nothing in the engine: its next fit is as that of a new one."""

from pathlib import Path
from typing import Any

import fulgurite as fg
import pytest
from fulgurite.errors import CheckpointError
from fulgurite_checkpoint import Checkpointer
from fulgurite_logging import CSVLogger, JSONLLogger
from trained import ZEROS, Counting, engine, steps_in

FILES = ("records.jsonl", "records.csv")


def read(run: Path) -> list[bytes]:
    return [(run / name).read_bytes() for name in FILES]


def test_a_fit_after_a_resume_that_was_refused_saves_its_last_checkpoint(tmp_path: Path) -> None:
    """The checkpoint is read before it is known that it is past the end of the fit."""
    trains = engine(tmp_path / "first", Checkpointer(every=3), steps=5)
    trains.fit(Counting, ZEROS)
    for place, resume in (("first", "never"), ("second", None)):
        with pytest.raises(CheckpointError, match="step 5 is past step 4"):
            trains.fit(Counting, ZEROS, steps=4, resume="auto")
        trains.run_dir = tmp_path / place
        trains.fit(Counting, ZEROS, resume=resume)
        assert steps_in(tmp_path / place) == [3, 5]


@pytest.mark.full
def test_a_fit_after_a_resume_that_failed_writes_the_records_of_a_new_engine(
    tmp_path: Path,
) -> None:
    class Failing:
        """Fails once the loggers have been told where they were."""

        after = ("checkpoints",)
        is_failing = False

        @fg.hookimpl
        def on_restore(self) -> None:
            if self.is_failing:
                raise OSError("no such server")

    failing = Failing()
    plugins: list[Any] = [Checkpointer(every=3), JSONLLogger(), CSVLogger(), failing]
    trains = engine(tmp_path / "first", *plugins, steps=5, log_every=1)
    trains.fit(Counting, ZEROS)
    failing.is_failing = True
    with pytest.raises(OSError, match="no such server"):
        trains.fit(Counting, ZEROS, resume=3)
    failing.is_failing = False
    trains.run_dir = tmp_path / "second"
    result = trains.fit(Counting, ZEROS)
    assert result.failures == {}
    alone = [Checkpointer(every=3), JSONLLogger(), CSVLogger()]
    engine(tmp_path / "alone", *alone, steps=5, log_every=1).fit(Counting, ZEROS)
    assert read(tmp_path / "second") == read(tmp_path / "alone")
