"""A directory of checkpoints outside of the run: whose they are, and who may write there."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import fulgurite as fg
import pytest
from fulgurite.errors import CheckpointError
from fulgurite_checkpoint import Checkpointer
from fulgurite_checkpoint.format import list_entries, read_commit, write_commit
from fulgurite_runs import RunDirectory
from trained import ZEROS, Act, Counting, counting, engine, steps_in


def list_files(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.full
@pytest.mark.parametrize(
    "resume",
    ["auto", *(pytest.param(choice, marks=pytest.mark.slow) for choice in (None, "never", 2))],
)
def test_a_run_leaves_the_checkpoints_of_another_alone_and_names_it(
    resume: Any, tmp_path: Path
) -> None:
    """Of a sweep whose runs share a directory, the second would resume from the end of the first,
    train nothing, and be complete; or move them away."""
    shared = tmp_path / "shared"
    counting(tmp_path / "first", directory=shared, steps=3)
    files = list_files(shared / "checkpoints")
    with pytest.raises(
        CheckpointError,
        match=rf"step-[123] is a checkpoint of the run '{tmp_path}/first', and this is the run "
        rf"'{tmp_path}/second'",
    ):
        counting(tmp_path / "second", directory=shared, steps=3, resume=resume)
    assert list_files(shared / "checkpoints") == files
    assert not RunDirectory(tmp_path / "second").is_complete
    assert float(counting(tmp_path / "first", directory=shared, resume="auto").module.weight) == -5


@pytest.mark.full
def test_a_program_without_a_run_leaves_the_checkpoints_of_one_alone(tmp_path: Path) -> None:
    """It reads them where it only evaluates."""
    shared = tmp_path / "shared"
    counting(tmp_path / "first", directory=shared, steps=3)
    without = engine(None, Checkpointer(1, directory=shared), steps=2, log_every=None)
    with pytest.raises(CheckpointError, match=r"'.*/first', and this run has no run_dir"):
        without.fit(Counting, ZEROS)
    assert steps_in(shared) == [1, 2, 3]
    weights = without.load_weights(Counting(), fg.CheckpointRef(None))
    assert float(weights.module.weight) == -3


@pytest.mark.full
def test_checkpoints_that_do_not_know_their_run_are_read(tmp_path: Path) -> None:
    """Those of an earlier version, and of a run without a directory."""
    shared = tmp_path / "shared"
    engine(None, Checkpointer(1, directory=shared), steps=2, log_every=None).fit(Counting, ZEROS)
    assert [entry.commit.run for entry in list_entries(shared) if entry.commit] == [None, None]
    assert float(counting(tmp_path / "run", directory=shared, resume="auto").module.weight) == -5


@pytest.mark.full
def test_a_run_that_was_moved_is_continued_by_naming_its_checkpoints(tmp_path: Path) -> None:
    shared, moved = tmp_path / "shared", tmp_path / "moved"
    options: dict[str, Any] = {"directory": shared, "max_to_keep": 2}
    counting(tmp_path / "run", "jsonl", steps=3, **options)
    (tmp_path / "run").rename(moved)
    with pytest.raises(CheckpointError, match=rf"fit\(resume='{shared}'\) continues it"):
        counting(moved, "jsonl", resume="auto", **options)
    # Until it has saved, it could resume from nothing else once more.
    fail = Act(fg.At(4), lambda run: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        counting(moved, "jsonl", fail, resume=str(shared), on_exception=False, **options)
    assert steps_in(shared) == [2, 3]
    counting(moved, "jsonl", resume=str(shared), steps=4, **options)
    result = counting(moved, "jsonl", resume="auto", steps=5, **options)
    assert (float(result.module.weight), steps_in(shared)) == (-5, [4, 5])


def test_two_fits_that_share_a_directory_at_once_are_an_error(tmp_path: Path) -> None:
    shared = tmp_path / "shared"

    def within(run: fg.Run) -> None:
        counting(tmp_path / "second", directory=shared)

    with pytest.raises(CheckpointError, match=rf"{shared} is in use by attempt 1"):
        counting(tmp_path / "first", Act(fg.At(2), within), directory=shared)
    with RunDirectory(shared).lock():
        with pytest.raises(CheckpointError, match=rf"{shared} is in use by"):
            counting(tmp_path / "first", directory=shared, resume="auto")
    assert not (tmp_path / "second" / "checkpoints").exists()


def test_a_directory_whose_lock_was_lost_is_written_to_no_more(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    lose = Act(fg.At(3), lambda run: (shared / "lock").unlink())
    with pytest.raises(CheckpointError, match=rf"{shared}/lock was deleted or replaced"):
        counting(tmp_path / "run", lose, directory=shared, async_save=False)
    assert steps_in(shared) == [1, 2]


KILLED = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
import fulgurite as fg
from trained import Act, counting
shared = Path(sys.argv[2])
kill = Act(fg.At(4), lambda run: os.kill(os.getpid(), signal.SIGKILL))
counting(shared.parent / "run", kill, directory=shared, steps=6, async_save=False)
"""


@pytest.mark.full
def test_the_lock_of_a_killed_run_is_free_for_its_next_start(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    command = [sys.executable, "-c", KILLED, str(Path(__file__).parent), str(shared)]
    assert subprocess.run(command, capture_output=True).returncode == -9
    result = counting(tmp_path / "run", directory=shared, steps=6, resume="auto")
    assert (float(result.module.weight), steps_in(shared)) == (-6, [4, 5, 6])


@pytest.mark.full
def test_what_saved_in_the_meantime_is_no_former_run(tmp_path: Path) -> None:
    """Between the reading of a checkpoint and the lock, where no run directory tells."""
    shared = tmp_path / "shared"
    settings: dict[str, Any] = {"log_every": None}
    engine(None, Checkpointer(1, directory=shared), steps=2, **settings).fit(Counting, ZEROS)

    def overtake(run: fg.Run) -> None:
        other = engine(None, Checkpointer(1, directory=shared), steps=4, **settings)
        other.fit(Counting, ZEROS, resume="auto")

    first = fg.LambdaPlugin(fit_context=overtake)
    late = engine(None, first, Checkpointer(1, directory=shared), steps=6, **settings)
    with pytest.raises(CheckpointError, match="another fit has saved checkpoints in"):
        late.fit(Counting, ZEROS, resume="auto")
    assert steps_in(shared) == [2, 3, 4]


@pytest.mark.full
def test_a_name_of_a_run_that_is_none_is_damage(tmp_path: Path) -> None:
    counting(tmp_path, steps=2)
    path = tmp_path / "checkpoints" / "step-2"
    commit = read_commit(path)
    assert commit.run == str(tmp_path)
    foreign: Any = {"path": 3}
    write_commit(path, commit.__class__(**{**vars(commit), "run": foreign}))
    assert json.loads((path / "COMMIT").read_text())["run"] == foreign
    with pytest.warns(UserWarning, match="step 2 is damaged.*run is"):
        counting(tmp_path, steps=3, resume="auto")
