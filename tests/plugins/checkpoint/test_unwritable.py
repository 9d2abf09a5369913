"""What becomes of a run whose checkpoints cannot be written: read-only, deleted, full."""

import gc
import json
import os
import resource
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import fulgurite as fg
import pytest
from fulgurite.errors import CheckpointError
from fulgurite_checkpoint import SaveError
from fulgurite_runs import RunDirectory
from trained import Act, counting, steps_in


def blocked(run: fg.Run) -> None:
    """Puts a file where the next two checkpoints are to be written."""
    for step in (run.step, run.step + 1):
        (Path(run.run_dir.path) / "checkpoints" / f"saving-step-{step}").write_text("in the way")  # type: ignore[union-attr]


def test_failed_save_is_reported_keeps_older_ones_and_is_retried(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"step [34] could not be written.*next save tries again"):
        result = counting(tmp_path, Act(fg.At(3), blocked), steps=6, async_save=False)
    assert steps_in(tmp_path) == [2, 5, 6]
    assert result.stop_reason is None


@pytest.mark.parametrize("every", [1, 99])
def test_three_failed_saves_in_a_row_end_the_run_without_losing_state(
    tmp_path: Path, every: int
) -> None:
    """At three steps, and of the only save, at the end."""
    with (
        pytest.warns(UserWarning, match="could not be written"),
        pytest.raises(SaveError, match=r"third failure in a row.*`result`") as caught,
    ):
        counting(
            tmp_path,
            Act(1, lambda run: blocked(run) if run.step > 2 else None),
            steps=5,
            every=every,
        )
    assert steps_in(tmp_path) == ([1, 2] if every == 1 else [])
    result = caught.value.result
    assert (float(result.module.weight), int(result.state.step)) == (-5, 5)
    assert "the checkpoint of step 5 could not be written" in result.failures["checkpoints"]


def test_failed_background_save_is_reported_when_training_fails_too(
    tmp_path: Path,
) -> None:
    def fail(run: fg.Run) -> None:
        blocked(run)
        run.save()
        raise CheckpointError("of another kind")

    with (
        pytest.warns(UserWarning, match="step 3 could not be written"),
        pytest.raises(CheckpointError, match="another"),
    ):
        counting(tmp_path, Act(fg.At(3), fail, "save"), every=fg.At(1, 2))
    assert steps_in(tmp_path) == [1, 2]


@pytest.mark.full
def test_full_disk_is_reported_and_saving_is_retried(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """No file may grow beyond some bytes while steps 3 and 4 are saved. Nothing is said but by us:
    Orbax logs the same error of several threads, and raises further ones where nobody catches
    them."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(run: fg.Run) -> None:
        resource.setrlimit(
            resource.RLIMIT_FSIZE, (30 if run.step in (3, 4) else limits[0], limits[1])
        )

    try:
        with pytest.warns(UserWarning, match=r"step [34] could not be written"):
            result = counting(tmp_path, Act(1, fill), steps=6, async_save=False, max_to_keep=None)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (steps_in(tmp_path), float(result.module.weight)) == ([1, 2, 5, 6], -6)
    assert float(counting(tmp_path, steps=7, resume="auto").module.weight) == -7
    gc.collect()  # what Orbax left shows in this test
    assert [record.getMessage() for record in caplog.records] == []


@pytest.fixture
def allow_no_bytes() -> Iterator[Callable[..., None]]:
    """A function after which no file can grow or be overwritten, until the test has ended."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def forbid(*_: Any) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))

    yield forbid
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_disk_that_takes_nothing_more_leaves_the_result_in_hand(
    tmp_path: Path, allow_no_bytes: Callable[..., None]
) -> None:
    """The lock is the last that is written to, and its error hides no other."""
    with (
        pytest.warns(UserWarning, match="could not be written"),
        pytest.raises(SaveError, match=r"third failure in a row") as caught,
    ):
        counting(tmp_path, Act(fg.At(3), allow_no_bytes), steps=5)
    assert float(caught.value.result.module.weight) == -5
    notes = "; ".join(caught.value.__notes__)
    assert f"{tmp_path / 'lock'} could not be updated" in notes and "File too large" in notes


@pytest.mark.full
def test_a_last_write_of_the_lock_that_fails_is_a_warning(
    tmp_path: Path, allow_no_bytes: Callable[..., None]
) -> None:
    at_end = fg.LambdaPlugin(on_fit_end=lambda result: allow_no_bytes())
    with pytest.warns(UserWarning, match=rf"{tmp_path / 'lock'} could not be updated.*too large"):
        result = counting(tmp_path, at_end, steps=5)
    assert float(result.module.weight) == -5
    assert RunDirectory(tmp_path).is_complete


@pytest.mark.full
def test_a_last_save_that_cannot_begin_leaves_the_result_in_hand(tmp_path: Path) -> None:
    """Of a host state that JSON cannot hold, and of a run whose lock is lost."""
    states: list[Any] = []

    def fill(run: fg.Run) -> None:
        states.append(object())

    unwritable = fg.LambdaPlugin(get_host_state=lambda: list(states))
    with pytest.raises(SaveError, match="hook get_host_state: object cannot be written") as caught:
        counting(tmp_path / "a", unwritable, Act(fg.At(3), fill), steps=3)
    assert float(caught.value.result.module.weight) == -3

    delete = Act(fg.At(3), lambda run: shutil.rmtree(tmp_path / "b"))
    with pytest.raises(SaveError, match="lock was deleted or replaced") as caught:
        counting(tmp_path / "b", delete, steps=3, async_save=False)
    assert float(caught.value.result.module.weight) == -3


@pytest.mark.full
def test_a_run_directory_deleted_during_training_ends_the_run(tmp_path: Path) -> None:
    """Its lock is gone with it: a new run may be there already, and would find our checkpoints."""
    run = tmp_path / "run"
    delete = Act(fg.At(3), lambda _: shutil.rmtree(run))
    with pytest.raises(CheckpointError, match="lock was deleted or replaced"):
        counting(run, delete, steps=6, async_save=False)
    assert not run.exists()


def test_an_exception_after_the_run_directory_was_deleted_saves_nothing(tmp_path: Path) -> None:
    run = tmp_path / "run"

    def delete_and_fail(_: fg.Run) -> None:
        shutil.rmtree(run)
        raise RuntimeError("the disk is full")

    with pytest.raises(RuntimeError, match="the disk is full") as caught:
        counting(run, Act(fg.At(3), delete_and_fail), steps=6, async_save=False)
    assert "lock was deleted or replaced" in str(caught.value.__notes__)
    assert not run.exists()


@pytest.mark.full
def test_checkpoints_deleted_during_training(tmp_path: Path) -> None:
    """What was there is gone; training continues, and what is saved later is whole."""
    run = tmp_path / "run"
    delete = Act(fg.At(3), lambda _: shutil.rmtree(run / "checkpoints"))
    result = counting(run, delete, steps=6, async_save=False)
    assert (float(result.module.weight), steps_in(run)) == (-6, [4, 5, 6])
    assert float(counting(run, steps=8, resume="auto").module.weight) == -8


@pytest.mark.full
@pytest.mark.parametrize("elsewhere", [None, "other"])
def test_changed_working_directory_does_not_move_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, elsewhere: str | None
) -> None:
    """What was given relative to the one it began in stays there."""
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
    monkeypatch.chdir(tmp_path / "a")
    counting(
        Path("run"), Act(fg.At(3), lambda _: os.chdir(tmp_path / "b")), steps=6, directory=elsewhere
    )
    assert steps_in(tmp_path / "a" / (elsewhere or "run")) == [4, 5, 6]
    assert (tmp_path / "a/run/COMPLETE").exists() and not list((tmp_path / "b").iterdir())


@pytest.mark.parametrize("name", ["lr=[1]", "*", "back\\slash", "\udcff"])
def test_directory_names_that_orbax_cannot_write_are_errors(tmp_path: Path, name: str) -> None:
    """Below `[1]` it lost the arrays of a checkpoint that looked complete."""
    with pytest.raises(
        CheckpointError, match="in its name, with which Orbax cannot write: rename the folder"
    ):
        counting(tmp_path / name, steps=2)


@pytest.mark.full
def test_unwritable_directories_are_errors(tmp_path: Path) -> None:
    """In a process for which permissions hold, whoever runs the tests."""
    prefix: list[str] = []
    if os.geteuid() == 0:
        prefix = ["setpriv", "--bounding-set", "-dac_override,-dac_read_search"]
        if (
            shutil.which("setpriv") is None
            or subprocess.run([*prefix, "true"], capture_output=True).returncode
        ):
            pytest.skip("root may write everywhere, and setpriv cannot take that away here")
    program = [*prefix, sys.executable, __file__, str(tmp_path)]
    # Orbax waits for folders that it could not make for as long as twenty minutes, also at the end
    # of the process.
    done = subprocess.run(program, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    error, reason, steps = report["later"]
    assert (
        (error, steps) == ("SaveError", [1, 2])
        and "Permission denied" in reason
        and "third failure" in reason
    )
    for name, place in (
        ("run", "closed"),
        ("resumed", "run"),
        ("elsewhere", "closed"),
        ("checkpoints", "run"),
    ):
        error, reason, _ = report[name]
        assert (
            error == "CheckpointError"
            and str(tmp_path / place) in reason
            and "cannot be written" in reason
        ), report
    assert report["folders"] == [None, "", [1, 2, 4]]


def read_only(path: Path) -> None:
    """Trains where it cannot write, and prints for each attempt the error, its message, and the
    steps saved."""
    warnings.simplefilter("ignore")
    report: dict[str, Any] = {}

    def attempt(name: str, run: Path, fit: Callable[[], Any]) -> None:
        error = None
        try:
            fit()
        except Exception as raised:
            error = raised
        report[name] = error and type(error).__name__, str(error or ""), steps_in(run)

    run, closed = path / "run", path / "closed"
    closed.mkdir(mode=0o500)
    forbid = Act(fg.At(3), lambda _: (run / "checkpoints").chmod(0o500))
    attempt("later", run, lambda: counting(run, forbid, steps=9, async_save=False))
    attempt("checkpoints", run, lambda: counting(run, steps=9, resume="auto"))
    run.chmod(0o500)
    (run / "lock").chmod(0o400)
    attempt("resumed", run, lambda: counting(run, steps=9, resume="auto"))
    attempt("run", closed, lambda: counting(closed / "run"))
    attempt("elsewhere", closed, lambda: counting(path / "other", directory=closed))

    class Spoiling:
        """A logger that spoils the place of the checkpoint of step 3, between its making and Orbax's
        first folder."""

        @fg.hookimpl
        def flush_logger(self, step: int) -> Future[None]:
            folder = path / "spoiled" / "checkpoints" / f"saving-step-{step}"
            if step == 3:
                folder.rmdir()
                folder.write_text("in the way")
            (future := Future()).set_result(None)
            return future

    attempt(
        "folders",
        path / "spoiled",
        lambda: counting(path / "spoiled", Spoiling(), steps=4, max_to_keep=None),
    )
    print(json.dumps(report))


if __name__ == "__main__":
    read_only(Path(sys.argv[1]))


@pytest.mark.full
def test_a_run_in_use_is_said_before_its_checkpoints_are_read(tmp_path: Path) -> None:
    """Its owner deletes them meanwhile, which would look like damage."""
    counting(tmp_path, steps=3, max_to_keep=None)
    (tmp_path / "checkpoints" / "step-3" / "index.json").write_text("{}")
    with RunDirectory(tmp_path).lock(), warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(CheckpointError, match="is in use by"):
            counting(tmp_path, steps=4, resume="auto")
