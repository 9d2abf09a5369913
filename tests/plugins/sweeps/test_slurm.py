"""Sweeps as job arrays of SLURM, with a stand-in for `sbatch` that runs the jobs as processes."""

import os
import shlex
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fulgurite.errors import ConfigurationError
from fulgurite_runs import RunDirectory
from fulgurite_sweeps import list_trials
from fulgurite_sweeps.slurm import plan_job_array
from fulgurite_sweeps.workers import parse_workers
from quadratic import HOLD
from sweep_processes import has_saved, read_records, run_sweep, wait_for

FAKE = Path(__file__).with_name("fake_sbatch.py")
PROFILES = """
[profiles.gpu]
command = ["sbatch", "--partition=gpu", "--gpus={devices}"]
devices = 2
environment = {JAX_PLATFORMS = "cuda"}

[profiles.interactive]
command = ["srun", "-n1"]
"""


@pytest.fixture
def sbatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder in which the stand-in writes the numbers of the processes that it starts."""
    programs, folder = tmp_path / "bin", tmp_path / "jobs"
    programs.mkdir()
    folder.mkdir()
    script = programs / "sbatch"
    script.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {FAKE} "$@"\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(programs), prepend=os.pathsep)
    monkeypatch.setenv("FAKE_SBATCH", str(folder))
    yield folder
    for path in folder.iterdir():
        if is_running(int(path.read_text())):
            os.kill(int(path.read_text()), signal.SIGKILL)


def is_running(pid: int) -> bool:
    """Return whether a process is there, and not only its exit code."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_the_command_of_a_job_array_drives_the_same_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("fulgurite.toml").write_text(PROFILES)
    arguments = ["a b.py", "lr=log(1e-3,1)", "--workers", "slurm", "--", "--init-from", "runs/a"]
    array = plan_job_array(
        parse_workers("slurm:gpu(jobs=3,slots=2)"), arguments, Path("/shared/runs/s"), 40
    )
    assert array.environment == {"JAX_PLATFORMS": "cuda"}
    *options, wrap = array.command
    assert options == [
        "sbatch",
        "--job-name=s",
        "--output=/shared/runs/s/slurm-%A_%a.log",
        "--open-mode=append",
        "--signal=B:TERM@60",
        "--partition=gpu",
        "--gpus=2",
        "--array=0-2",
    ]
    words = shlex.split(wrap.removeprefix("--wrap="))
    assert words[0] == "exec" and words[1:6] == [
        sys.executable,
        "-P",
        "-m",
        "fulgurite_cli",
        "sweep",
    ]
    added = ["--workers", "local:2", "--no-wait"]
    assert words[6:] == [*arguments[:4], *added, *arguments[4:]]
    assert str(array).startswith("JAX_PLATFORMS=cuda sbatch ")
    # No more jobs than there are trials for.
    array = plan_job_array(parse_workers("slurm(slots=2)"), arguments, Path("s"), 5)
    assert array.command[0] == "sbatch" and array.command[-2] == "--array=0-2"


@pytest.mark.parametrize(
    ("workers", "message"),
    [
        ("slurm:interactive", "starts srun, and job arrays are submitted by sbatch"),
        ("slurm:gpuu", "has no profile 'gpuu'"),
        ("slurm(jobs=0)", "give integers above 0"),
        ("slurm(jobs=1.5)", "give integers above 0"),
        ("slurm(job=2)", "has no argument 'job'"),
    ],
)
def test_job_arrays_that_cannot_be_submitted_are_an_error(
    workers: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("fulgurite.toml").write_text(PROFILES)
    with pytest.raises(ConfigurationError) as caught:
        plan_job_array(parse_workers(workers), [], Path("s"), 4)
    assert message in str(caught.value)


def test_without_sbatch_or_where_it_refuses_the_array_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    array = plan_job_array(parse_workers("slurm"), [], Path("s"), 4)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigurationError, match="no program 'sbatch' on this machine"):
        array.submit(print)
    (tmp_path / "sbatch").write_text("#!/bin/sh\necho 'Invalid partition' >&2\nexit 1\n")
    (tmp_path / "sbatch").chmod(0o755)
    with pytest.raises(ConfigurationError, match="has refused the job array: Invalid partition"):
        array.submit(lambda text: None)


@pytest.mark.slow
def test_jobs_of_an_array_share_a_sweep_and_take_over_what_one_has_left(
    tmp_path: Path, sbatch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold = tmp_path / "hold"
    hold.mkdir()
    monkeypatch.setenv(HOLD, str(hold))
    space = ["steps=40", "lr=0.02,0.05,0.1", "--sampler", "grid", "--workers"]
    output = run_sweep(tmp_path, *space, "slurm")
    assert "--array=0-2" in output and "Submitted batch job 42" in output
    wait_for(lambda: all(has_saved(tmp_path, number) for number in range(3)))
    wait_for(lambda: len(list(hold.iterdir())) == 3)
    # The machine of a job is lost, with the trial that runs there.
    jobs = [int(path.read_text()) for path in sbatch.iterdir()]
    assert len(jobs) == 3
    os.kill(jobs[0], signal.SIGKILL)
    (hold / "go").touch()
    wait_for(lambda: not any(map(is_running, jobs)))
    trials = list_trials(tmp_path / "sweep")
    assert [trial.state for trial in trials] == ["complete"] * 3
    assert sorted(RunDirectory(trial.run_dir).num_attempts for trial in trials) == [1, 1, 2]
    logs = [path.name for path in (tmp_path / "sweep").glob("slurm-*")]
    assert sorted(logs) == [f"slurm-42_{index}.log" for index in range(3)]
    monkeypatch.delenv(HOLD)
    run_sweep(tmp_path / "local", *space, "local:2")
    for trial, other in zip(trials, list_trials(tmp_path / "local" / "sweep"), strict=True):
        assert read_records(trial.run_dir) == read_records(other.run_dir)
    output = run_sweep(tmp_path, *space, "slurm")
    assert "all trials have ended" in output
