"""Trials on Ray: a cluster of this machine that the sweep starts, and one that was there before."""

import os
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from fulgurite.errors import ConfigurationError
from fulgurite_runs import RunDirectory
from fulgurite_sweeps import RayExecutor, list_trials
from fulgurite_sweeps.ray_executor import LONGEST_FOLDER, count_trials
from fulgurite_sweeps.workers import parse_executor
from quadratic import HOLD
from ray_cluster import (
    VARIABLES,
    RayCluster,
    find_machine,
    read_name,
    read_parent,
    start_cluster,
)
from sweep_processes import kill_started, read_records, run_sweep, start_sweep, wait_for

needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="needs the dependency group `ray`")


@pytest.fixture(autouse=True)
def no_sweep_is_left() -> Iterator[None]:
    """Kill what a test has started, which ends its trials, too."""
    yield
    kill_started()


def test_a_machine_has_room_for_as_many_trials_as_its_scarcest_resource() -> None:
    node = {"CPU": 16.0, "GPU": 3.0, "memory": 1e9, "big": 1.0}
    assert count_trials(node, {"CPU": 4, "GPU": 1}) == 3
    assert count_trials(node, {"CPU": 6, "GPU": 1}) == 2
    assert count_trials(node, {"CPU": 0, "GPU": 0.5}) == 6
    assert count_trials(node, {"CPU": 0.1, "GPU": 0}) == 160
    assert count_trials(node, {"CPU": 1, "GPU": 0, "big": 2}) == 0
    assert count_trials(node, {"CPU": 1, "TPU": 1}) == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ray://10.0.0.1:10001", "is not HOST:PORT"),
        ("ray:ray://10.0.0.1:10001", "is not HOST:PORT"),
        ("ray(cpus=x)", "cpus=x is not a number"),
        ("ray(cpu=1)", "has no argument 'cpu'. Did you mean 'cpus'"),
        ("ray(slots=0)", "give positive numbers"),
        ("ray(2)", "there are no workers"),
        ("ray(cpus=0.00001)", "cpus=1e-05 is less than Ray can count, which is 0.0001"),
        ("slurm:gpu", "slurm:gpu submits jobs that choose their trials"),
        ("population:4(exakt=true)", "has no argument 'exakt'. Did you mean 'exact'?"),
        ("population:4(exact=1)", "exact is 1: give true or false"),
        ("local:2(cpus=1)", "local has no argument 'cpus'"),
    ],
)
def test_workers_that_are_written_wrong_are_an_error(text: str, message: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse_executor(text)
    assert message in str(caught.value)


def test_ray_workers_have_an_address_and_numbers() -> None:
    executor = parse_executor("ray:10.0.0.1:6379(cpus=4,gpus=0.5,slots=3)")
    assert isinstance(executor, RayExecutor)
    assert vars(executor) == vars(RayExecutor("10.0.0.1:6379", cpus=4, gpus=0.5, slots=3))


@pytest.mark.skipif(find_spec("ray") is not None, reason="Ray is installed")
def test_without_ray_its_workers_say_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"pip install 'fulgurite-sweeps\[ray\]'"):
        RayExecutor().open(tmp_path, print).__enter__()


@needs_ray
@pytest.mark.slow
def test_a_sweep_on_ray_has_the_records_of_a_local_one(tmp_path: Path) -> None:
    space = ["steps=8", "lr=0.1,0.5", "bad=no,raise", "--sampler", "grid", "--workers"]
    run_sweep(tmp_path / "local", *space, "local:2")
    output = run_sweep(tmp_path / "ray", *space, "ray(slots=2)")
    local, on_ray = (list_trials(tmp_path / name / "sweep") for name in ("local", "ray"))
    assert [trial.state for trial in on_ray] == ["complete", "fail"] * 2
    for trial, other in zip(local, on_ray, strict=True):
        assert (trial.params, trial.values, trial.metrics, trial.error) == (
            other.params,
            other.values,
            other.metrics,
            other.error,
        )
        if trial.state == "complete":
            assert read_records(trial.run_dir) == read_records(other.run_dir)
    # Ray's files are in the directory of the sweep, or in a folder that is gone.
    inside = tmp_path / "ray" / "sweep" / "ray"
    if len(str(inside)) <= LONGEST_FOLDER:
        assert list(inside.glob("session_2*"))
    else:
        (outside,) = re.findall(r"its files are in (.*)", output)
        assert not inside.exists() and not Path(outside).exists()


@needs_ray
@pytest.mark.slow
def test_a_cluster_of_a_sweep_is_seen_by_this_machine_alone_and_ends_with_it(
    tmp_path: Path,
) -> None:
    hold = tmp_path / "hold"
    hold.mkdir()
    arguments = ["steps=40", "lr=0.05,0.1", "--sampler", "grid", "--workers", "ray(slots=2)"]
    driver = start_sweep(tmp_path, *arguments, hold=hold)
    wait_for(lambda: len(list(hold.iterdir())) == 2)
    processes = list_descendants(driver.pid)
    assert any("raylet" in name for name in processes.values())
    assert list_listeners(processes) and set(list_listeners(processes)) == {"127.0.0.1"}
    driver.kill()
    driver.wait()
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in processes))
    (hold / "go").touch()
    run_sweep(tmp_path, *arguments)
    for trial in list_trials(tmp_path / "sweep"):
        assert trial.state == "complete"
        assert RunDirectory(trial.run_dir).num_attempts == 2


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RayCluster]:
    """A cluster of two machines, whose trials wait for a file `go` in the folder `hold`."""
    monkeypatch.setenv(HOLD, str(tmp_path / "hold"))
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "hold").mkdir()
    with start_cluster() as cluster:
        yield cluster


@needs_ray
@pytest.mark.slow
def test_trials_of_a_machine_that_is_lost_are_resumed_on_another(
    tmp_path: Path, cluster: RayCluster
) -> None:
    hold = tmp_path / "hold"
    space = ["steps=40", "lr=0.02,0.05,0.1", "--sampler", "grid"]
    driver = start_sweep(tmp_path, *space, "--workers", f"ray:{cluster.address}")
    wait_for(lambda: len(list(hold.iterdir())) == 2)
    # They are on different machines.
    machines = {find_machine(int(path.name)) for path in hold.iterdir()}
    assert len(machines) == 2
    machine = machines.pop()
    assert machine is not None
    cluster.replace_machine(machine)
    wait_for(lambda: len(list(hold.iterdir())) == 3)
    (hold / "go").touch()
    output, _ = driver.communicate(timeout=600)
    assert driver.returncode == 0, output
    assert "was cut off (the worker that ran it is gone): resuming" in output
    trials = list_trials(tmp_path / "sweep")
    assert [trial.state for trial in trials] == ["complete"] * 3
    assert sorted(RunDirectory(trial.run_dir).num_attempts for trial in trials) == [1, 1, 2]
    run_sweep(tmp_path / "local", *space, "--workers", "local:2")
    for trial, other in zip(trials, list_trials(tmp_path / "local" / "sweep"), strict=True):
        assert read_records(trial.run_dir) == read_records(other.run_dir)


def list_descendants(pid: int) -> dict[int, str]:
    """Return the names of the processes that a process has started, and so on, by their numbers."""
    parents = {int(path.name): read_parent(int(path.name)) for path in Path("/proc").glob("[0-9]*")}
    descendants = {pid}
    while True:
        more = {child for child, parent in parents.items() if parent in descendants} - descendants
        if not more:
            return {child: read_name(child) for child in descendants - {pid}}
        descendants |= more


def list_listeners(processes: dict[int, str]) -> list[str]:
    """Return the addresses at which processes take connections."""
    inodes = set()
    for pid in processes:
        for path in Path(f"/proc/{pid}/fd").glob("*"):
            try:
                inodes.add(os.readlink(path))
            except OSError:
                continue
    addresses = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                address = bytes.fromhex(fields[1].partition(":")[0])
                is_loopback = address[::-1][:1] == b"\x7f" or address.endswith(b"\x7f\0\0\1"[::-1])
                addresses.append("127.0.0.1" if is_loopback else fields[1])
    return addresses
