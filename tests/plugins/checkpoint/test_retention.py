"""Checkpoints that cannot be removed or moved, and a kill between a checkpoint and the removal of
an older one."""

import json
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import fulgurite as fg
import pytest
from fulgurite_checkpoint.format import list_entries
from trained import Act, counting, steps_in


def list_names(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


@pytest.mark.full
@pytest.mark.parametrize("async_save", [True, False])
def test_what_cannot_be_removed_is_told_once_and_the_others_go(
    async_save: bool, tmp_path: Path
) -> None:
    """Every save after it is a success: none of the three is a failure that ends the run."""

    def block(run: fg.Run) -> None:
        (tmp_path / "checkpoints" / "trash-step-1").write_text("of somebody else")

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = counting(
            tmp_path, Act(fg.At(1), block), steps=8, max_to_keep=2, async_save=async_save
        )
    assert float(result.module.weight) == -8
    assert list_names(tmp_path) == ["step-1", "step-7", "step-8", "trash-step-1"]
    (message,) = [str(warning.message) for warning in caught]
    assert f"{tmp_path}/checkpoints/step-1 need not stay" in message
    assert f"{tmp_path}/checkpoints/trash-step-1 was not written by a Checkpointer" in message
    # The next start removes it as soon as that is possible.
    (tmp_path / "checkpoints" / "trash-step-1").unlink()
    counting(tmp_path, steps=9, max_to_keep=2, resume="auto")
    assert list_names(tmp_path) == ["step-8", "step-9"]


@pytest.mark.parametrize("place", ["before its name", "before the removal"])
def test_a_kill_at_the_last_checkpoint_leaves_none_too_many_after_the_next_start(
    place: str, tmp_path: Path
) -> None:
    """The run is complete, and so nothing is saved that would remove the oldest."""
    counting(tmp_path, steps=4, max_to_keep=3)
    newest = tmp_path / "checkpoints" / "step-4"
    shutil.copytree(tmp_path / "checkpoints" / "step-2", tmp_path / "copy")
    counting(tmp_path, steps=5, max_to_keep=3, resume="auto")
    # As it was when the process was killed: COMMIT is there, and four are complete.
    (tmp_path / "copy").rename(tmp_path / "checkpoints" / "step-2")
    if place == "before its name":
        newest = tmp_path / "checkpoints" / "step-5"
        newest.rename(newest.with_name("saving-step-5"))
    assert [entry.step for entry in list_entries(tmp_path)] == [2, 3, 4, 5]
    result = counting(tmp_path, steps=5, max_to_keep=3, resume="auto")
    assert (float(result.module.weight), list_names(tmp_path)) == (
        -5,
        ["step-3", "step-4", "step-5"],
    )


def mount(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "none", str(folder)], check=True)


def try_mounts(root: Path) -> dict[str, Any]:
    """Trains on mounts, in a namespace of its own, and returns what is there at the end."""
    warnings.simplefilter("ignore")
    report: dict[str, Any] = {}
    for resume in (3, "never"):
        run = root / f"resumed-{resume}"
        mount(run / "checkpoints")
        counting(run, "jsonl", steps=5, max_to_keep=None)
        result = counting(run, "jsonl", steps=4, max_to_keep=None, resume=resume)
        report[str(resume)] = [
            float(result.module.weight),
            steps_in(run),
            sorted(str(path.relative_to(run)) for path in run.glob("**/superseded/2/*")),
        ]
    run = root / "busy"

    def make_busy(_: fg.Run) -> None:
        mount(run / "checkpoints" / "step-1" / "busy")

    result = counting(run, Act(fg.At(2), make_busy), steps=5, max_to_keep=2, async_save=False)
    report["busy"] = [float(result.module.weight), list_names(run)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = counting(run, steps=6, max_to_keep=2, resume="auto")
    report["busy again"] = [
        float(result.module.weight),
        list_names(run),
        [str(warning.message) for warning in caught],
    ]
    return report


@pytest.mark.full
def test_checkpoints_on_a_mount_of_their_own_are_set_aside_there(tmp_path: Path) -> None:
    """A rename to another file system is an error; and what is busy stays, and ends nothing."""
    prefix = ["unshare", "--map-root-user", "--mount"]
    if (
        shutil.which("unshare") is None
        or subprocess.run([*prefix, "true"], capture_output=True).returncode
    ):
        pytest.skip("nothing can be mounted here")
    program = [*prefix, sys.executable, __file__, str(tmp_path)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    beside = "checkpoints/superseded/2"
    assert report["3"] == [
        -4,
        [1, 2, 3, 4],
        [f"{beside}/step-4", f"{beside}/step-5", "superseded/2/records.jsonl"],
    ]
    moved = [f"{beside}/step-{step}" for step in (1, 2, 3, 4, 5)]
    assert report["never"] == [-4, [1, 2, 3, 4], [*moved, "superseded/2/records.jsonl"]]
    assert report["busy"] == [-5, ["step-4", "step-5", "trash-step-1"]]
    weight, names, (message,) = report["busy again"]
    assert (weight, names) == (-6, ["step-5", "step-6", "trash-step-1"])
    assert "trash-step-1 need not stay" in message and "Device or resource busy" in message


if __name__ == "__main__":
    print(json.dumps(try_mounts(Path(sys.argv[1]))))
