"""The run directory: attempts, committed checkpoints, the completion mark."""

import hashlib
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import fulgurite as fg
import pytest
from fulgurite import CheckpointRef
from fulgurite.errors import CheckpointError, ConfigurationError
from fulgurite_runs import RunDirectory, RunPlugin
from fulgurite_runs.directory import hash_commit
from fulgurite_runs.json_codec import loads
from fulgurite_testing import TinyModel, tiny_data


def checkpoint(run: RunDirectory, name: str, committed: bool = True) -> Path:
    folder = run.get_step_directory(0).parent / name
    folder.mkdir(parents=True)
    if committed:
        (folder / "COMMIT").write_text("{}")
    return folder


def test_missing_run_directory_is_empty_and_not_created(tmp_path: Path):
    run = RunDirectory(tmp_path / "run")
    assert run.num_attempts == 0
    assert not run.is_complete
    assert list(run.list_checkpoints()) == []
    assert not run.path.exists()


def test_attempts_are_counted(tmp_path: Path):
    run = RunDirectory(tmp_path / "deep" / "run")
    assert [run.start_attempt() for _ in range(11)] == list(range(1, 12))
    assert run.num_attempts == RunDirectory(run.path).num_attempts == 11


def test_a_lost_attempt_is_not_counted_twice(tmp_path: Path):
    run = RunDirectory(tmp_path)
    for _ in range(3):
        run.start_attempt()
    (tmp_path / "attempts" / "2").unlink()
    assert run.start_attempt() == 4


def test_foreign_files_are_no_attempts(tmp_path: Path):
    run = RunDirectory(tmp_path)
    run.start_attempt()
    for name in ("notes.txt", "9.tmp", "-3", "x"):
        (tmp_path / "attempts" / name).touch()
    assert run.start_attempt() == 2


def test_a_run_directory_that_cannot_be_written_is_an_error_that_names_it(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"file/run cannot be written.*Choose another"):
        RunDirectory(tmp_path / "file" / "run").start_attempt()
    # The system refuses to look for it, as below a folder that this user may not read.
    with pytest.raises(CheckpointError, match=r"cannot be written.*too long.*Choose another"):
        with RunDirectory(tmp_path / ("x" * 300)).lock():
            pass


def test_committed_checkpoints_come_in_the_order_of_their_steps(tmp_path: Path):
    run = RunDirectory(tmp_path)
    for step in (1000, 9, 0, 20):
        checkpoint(run, f"step-{step}")
    assert list(run.list_checkpoints()) == [
        (step, run.get_step_directory(step)) for step in (0, 9, 20, 1000)
    ]
    assert run.get_step_directory(9) == tmp_path / "checkpoints" / "step-9"


def test_a_checkpoint_without_commit_does_not_exist(tmp_path: Path):
    run = RunDirectory(tmp_path)
    checkpoint(run, "step-1")
    half = checkpoint(run, "step-2", committed=False)
    (half / "arrays").touch()
    (checkpoint(run, "step-3", committed=False) / "COMMIT").mkdir()
    assert [step for step, _ in run.list_checkpoints()] == [1]
    assert run.find_newest_step() == 3  # which is damaged
    (half / "COMMIT").touch()
    assert [step for step, _ in run.list_checkpoints()] == [1, 2]


def test_links_and_foreign_names_are_ignored(tmp_path: Path):
    run = RunDirectory(tmp_path / "run")
    real = checkpoint(run, "step-7")
    elsewhere = checkpoint(RunDirectory(tmp_path / "other"), "step-8")
    run.get_step_directory(8).symlink_to(elsewhere)
    run.get_step_directory(9).symlink_to(real)
    run.get_step_directory(10).symlink_to(tmp_path / "nowhere")
    run.get_step_directory(11).write_text("a file")
    for name in [
        "step-07",
        "step-٣",
        "step-",
        "step--1",
        "step-1.5",
        "step-5.trash",
        "trash-5",
        "7",
        f"step-{10**12}",
    ]:
        checkpoint(run, name)
    assert list(run.list_checkpoints()) == [(7, real)]
    assert run.find_newest_step() == 7
    assert RunDirectory(tmp_path / "nowhere").find_newest_step() is None


def test_run_is_complete_until_restarted(tmp_path: Path):
    run = RunDirectory(tmp_path)
    run.start_attempt()
    assert not run.is_complete
    run.mark_complete()
    assert run.is_complete
    assert RunDirectory(str(tmp_path)).is_complete
    run.start_attempt()
    assert not run.is_complete


# --- what an attempt does not continue from -------------------------------------------------------


def populated(path: Path) -> RunDirectory:
    """Checkpoints of steps 5, 10 and 15, one that is not complete, and records."""
    run = RunDirectory(path)
    for step in (5, 10, 15):
        checkpoint(run, f"step-{step}")
    checkpoint(run, "step-20", committed=False)
    for name in ("records.jsonl", "metrics.csv", "telemetry.jsonl", "notes.txt"):
        (path / name).write_text(name)
    return run


def tree(path: Path) -> set[str]:
    return {
        str(file.relative_to(path))
        for file in path.rglob("*")
        if file.is_file() and "attempts" not in file.parts
    }


KEPT = {"checkpoints/step-5/COMMIT", "checkpoints/step-10/COMMIT", "checkpoints/step-15/COMMIT"}
RECORDS = {"records.jsonl", "metrics.csv"}
OTHERS = {"telemetry.jsonl", "notes.txt"}


def test_resuming_from_the_newest_checkpoint_moves_nothing(tmp_path: Path):
    run = populated(tmp_path)
    before = tree(tmp_path)
    assert before == KEPT | RECORDS | OTHERS
    run.start_attempt(step=15)
    assert tree(tmp_path) == before
    run.start_attempt(step=10)
    moved = {"superseded/2/step-15/COMMIT", *(f"superseded/2/{name}" for name in RECORDS)}
    assert tree(tmp_path) == before - {"checkpoints/step-15/COMMIT"} | moved
    assert (tmp_path / "superseded" / "2" / "records.jsonl").read_text() == "records.jsonl"


def test_fresh_start_sets_aside_all_checkpoints_and_records(tmp_path: Path):
    run = populated(tmp_path)
    run.start_attempt()
    moved = {f"superseded/1/step-{step}/COMMIT" for step in (5, 10, 15)} | {
        f"superseded/1/{name}" for name in RECORDS
    }
    assert tree(tmp_path) == OTHERS | moved
    assert (tmp_path / "checkpoints" / "step-20").is_dir()  # no checkpoint
    before = tree(tmp_path)
    assert run.start_attempt() == 2  # nothing to move
    assert tree(tmp_path) == before


def test_manifest_of_an_attempt_is_written_once(tmp_path: Path):
    run = RunDirectory(tmp_path)
    with run.lock():
        assert run.start_attempt('{"seed": 0}') == 1
        assert (tmp_path / "attempts" / "1").read_text() == '{"seed": 0}'
        with pytest.raises(CheckpointError, match="cannot be written.*attempts/1"):
            run.start_attempt("{}")
    assert (tmp_path / "attempts" / "1").read_text() == '{"seed": 0}'


@pytest.mark.full
def test_triggers_and_selections_among_the_settings_of_a_plugin_are_text(tmp_path: Path):
    @dataclass
    class Timed:
        when: fg.Trigger
        often: list[fg.Trigger]
        where: fg.Selector
        plugin_name = "timed"

    timed = Timed(fg.Every(3), [fg.At(1), fg.AtEnd()], fg.select("head"))
    fg.Engine(steps=1, run_dir=tmp_path, plugins=[timed, RunPlugin()], autoload=False).fit(
        TinyModel, tiny_data()
    )
    (plugin,) = (
        entry
        for entry in loads((tmp_path / "attempts" / "1").read_text())["plugins"]
        if entry["name"] == "timed"
    )
    assert plugin["settings"] == {
        "when": "Every(n=3)",
        "often": ["At(1)", "AtEnd()"],
        "where": "select('head')",
    }


def test_links_are_neither_followed_nor_moved(tmp_path: Path):
    victim = tmp_path / "victim"
    checkpoint(RunDirectory(victim), "step-7")
    (victim / "records.jsonl").write_text("mine")
    run = RunDirectory(tmp_path / "run")
    checkpoint(run, "step-1", committed=False)
    (run.get_step_directory(1) / "COMMIT").symlink_to(victim / "records.jsonl")
    run.get_step_directory(7).symlink_to(victim / "checkpoints" / "step-7")
    (run.path / "records.jsonl").symlink_to(victim / "records.jsonl")
    (run.path / "COMPLETE").symlink_to(victim / "made")
    before = tree(victim)
    assert (run.list_checkpoints(), run.is_complete) == ([], False)
    run.start_attempt()
    run.mark_complete()
    assert tree(victim) == before
    assert not (run.path / "superseded").exists()
    for name in ("checkpoints", "attempts", "superseded"):
        (tmp_path / name).mkdir()
        other = RunDirectory(tmp_path / name)
        if name == "superseded":
            checkpoint(other, "step-3")
        (other.path / name).symlink_to(victim)
        with pytest.raises(CheckpointError, match=f"{name} is a link"):
            other.start_attempt()
        assert tree(victim) == before


def test_numbers_too_long_to_be_ours_are_no_attempts(tmp_path: Path):
    run = RunDirectory(tmp_path)
    run.start_attempt()
    for name in ("9" * 200, "٣", "07"):
        (tmp_path / "attempts" / name).touch()
    assert run.num_attempts == 1


def test_a_reference_names_a_step_or_the_latest_or_the_best():
    assert CheckpointRef("runs/a") == CheckpointRef("runs/a", "latest")
    for step in (0, 500, "latest", "best"):
        assert CheckpointRef("runs/a", step).step == step  # type: ignore[arg-type]
    for step in ("last", True, 1.5, None):
        with pytest.raises((ConfigurationError, TypeError), match=r"step is|latest"):
            CheckpointRef("runs/a", step)  # type: ignore[arg-type]


def test_a_manifest_of_many_small_values_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "attempts").mkdir()
    (tmp_path / "attempts" / "1").write_text(f'{{"a":[{"{}," * 5_000_000}0]}}')
    with pytest.raises(CheckpointError, match="attempts/1 cannot be read.*so many values"):
        RunDirectory(tmp_path).read_manifest()


def test_the_digest_of_a_commit_is_that_of_its_bytes(tmp_path: Path) -> None:
    assert hash_commit(tmp_path) is None
    (tmp_path / "COMMIT").write_bytes(b"abc")
    assert hash_commit(tmp_path) == hashlib.sha256(b"abc").hexdigest()
    (tmp_path / "COMMIT").unlink()
    os.mkfifo(tmp_path / "COMMIT")
    assert hash_commit(tmp_path) is None


def test_home_and_variables_in_paths_are_expanded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("SCRATCH", str(tmp_path / "scratch"))
    monkeypatch.delenv("NO_SUCH_NAME", raising=False)
    run = tmp_path / "home" / "runs" / "a"
    for path in ("~/runs/a", "$HOME/runs/a", "${HOME}/runs/a", Path("~/runs/a")):
        assert RunDirectory(path).path == run
        assert RunDirectory(run).is_at(path)
    assert RunDirectory("$SCRATCH/a~b").path == tmp_path / "scratch" / "a~b"
    assert RunDirectory("costs$").path == tmp_path / "costs$"
    with pytest.raises(ConfigurationError, match=r"no variable \$\{?NO_SUCH_NAME"):
        RunDirectory("$NO_SUCH_NAME/a")
    with pytest.raises(ConfigurationError, match="there is no such user"):
        RunDirectory("~no-such-user/a")
    engine = fg.Engine(steps=1, run_dir="~/runs/a", plugins=[RunPlugin()])
    engine.fit(TinyModel, tiny_data())
    assert RunDirectory(run).is_complete
    assert not (tmp_path / "~").exists()
    with pytest.raises(ConfigurationError, match=r"neither ~ nor variables are expanded"):
        fg.Engine(steps=1, compilation_cache_dir="~/cache")


def test_a_dollar_in_the_working_directory_is_a_character(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("NO_SUCH_NAME", raising=False)
    for name in ("costs $NO_SUCH_NAME", "$HOME"):
        folder = tmp_path / name
        folder.mkdir()
        monkeypatch.chdir(folder)
        run = RunDirectory("runs/a")
        assert run.path == folder / "runs" / "a"
        assert RunDirectory(run.path).path == run.path
        assert run.is_at(run.path)


def test_a_link_in_place_of_checkpoints_names_where_else_they_may_be(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    run = RunDirectory(tmp_path / "run")
    run.start_attempt()
    (run.path / "checkpoints").symlink_to(elsewhere)
    with pytest.raises(CheckpointError, match=r"is a link.*Checkpointer\(directory=\.\.\.\)"):
        run.list_checkpoints()
    (run.path / "superseded").symlink_to(elsewhere)
    with pytest.raises(CheckpointError, match="put the folder itself there$"):
        run.get_folder("superseded")


def test_an_empty_manifest_of_the_newest_attempt_is_passed_over(tmp_path: Path) -> None:
    """As a machine may leave it that lost its power before attempts were written as a whole."""
    run = RunDirectory(tmp_path)
    run.start_attempt('{"a": 1}')
    (tmp_path / "attempts" / "2").touch()
    assert run.read_manifest() == {"a": 1}
    assert run.start_attempt('{"a": 3}') == 3
    assert run.read_manifest() == {"a": 3}
    assert run.read_manifests() == {1: {"a": 1}, 3: {"a": 3}}
    (tmp_path / "attempts" / "3").write_text("{")
    with pytest.raises(CheckpointError, match="attempts/3 cannot be read as the manifest of a run"):
        run.read_manifest()
    for number in (1, 2, 3):
        (tmp_path / "attempts" / str(number)).write_text("")
    with pytest.raises(CheckpointError, match="attempts/3 cannot be read as the manifest of a run"):
        run.read_manifest()


@pytest.mark.full
def test_an_attempt_has_its_whole_manifest_or_does_not_exist(tmp_path: Path) -> None:
    """A process is killed at each of its file operations that Python reports."""
    program = """
import os, signal, sys
from pathlib import Path
from fulgurite_runs import RunDirectory

def look(event, arguments):
    global left
    if event in ("open", "os.rename") and str(Path(sys.argv[1])) in str(arguments[0]):
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

run = RunDirectory(sys.argv[1])
left = int(sys.argv[2])
sys.addaudithook(look)
run.start_attempt('{"a": 1}')
"""
    codes = []
    for count in range(1, 5):
        folder = tmp_path / str(count)
        done = subprocess.run([sys.executable, "-c", program, str(folder), str(count)])
        codes.append(done.returncode)
        run = RunDirectory(folder)
        assert run.num_attempts == 0 or run.read_manifest() == {"a": 1}
        number = run.num_attempts + 1
        assert run.start_attempt('{"a": 2}') == number
        assert run.read_manifest() == {"a": 2}
    assert codes[0] == -signal.SIGKILL and codes[-1] == 0


def test_a_run_directory_that_is_a_link_to_nothing_says_so(tmp_path: Path) -> None:
    (tmp_path / "run").symlink_to(tmp_path / "gone")
    with pytest.raises(CheckpointError, match=r"run is a link to .*gone, which is not there: make"):
        with RunDirectory(tmp_path / "run").lock():
            pass
    (tmp_path / "gone").mkdir()
    with RunDirectory(tmp_path / "run").lock():
        assert (tmp_path / "gone" / "lock").exists()
