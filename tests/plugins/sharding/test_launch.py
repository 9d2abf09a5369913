"""`fulgurite launch` and `initialize_distributed()`: real processes on loopback, without a model.

`PROGRAM` is what they run; its first argument says what is to happen.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax
import pytest
from fulgurite.errors import ConfigurationError
from fulgurite_sharding import CoordinatedSync, initialize_distributed
from fulgurite_sharding.distributed import ProcessGroup
from fulgurite_sharding.launch import launch

pytestmark = pytest.mark.full

PROGRAM = """
import json, os, signal, sys, time
import jax
from fulgurite_sharding import CoordinatedSync, initialize_distributed

what = sys.argv[1:]
mine = jax.process_index()
agreement = CoordinatedSync(every=10, timeout=60)

def say(**values):
    print(json.dumps(values), flush=True)

if what == ["agree"]:
    initialize_distributed()  # once more, which does nothing
    say(processes=jax.process_count(), devices=jax.device_count(), local=jax.local_device_count())
    say(decided=[agreement.broadcast(lambda: [mine, number]) for number in range(3)])
    say(gathered=[agreement.all_gather("name", [mine, number]) for number in range(3)])
    try:
        agreement.broadcast(lambda: 1 / 0)
    except Exception as error:
        say(error=f"{type(error).__name__}: {error}")
    clock = {"action:save"} if mine == 0 else {"action:other"}
    for step in range(700):  # enough meetings that what they leave behind is tidied up
        agreement.reduce_requests(step, frozenset())
    say(agreed=sorted(agreement.reduce_requests(700, frozenset(clock))))
    voted = []
    for step in (710, 720, 730):
        # The one vote of process 1 counts now, or at the next meeting if process 0 was here
        # earlier.
        voted += agreement.reduce_requests(step, frozenset({"stop:enough"} if mine and step == 710 else ()))
        agreement.all_gather("voted", None)
    say(voted=voted)
    # A vote that comes too late, because process 0 was there before it, is nothing to the next fit.
    if mine == 0:
        agreement.reduce_requests(740, frozenset())
    agreement.all_gather("turn", None)
    if mine == 1:
        agreement.reduce_requests(740, frozenset({"stop:late"}))
    agreement.all_gather("fit", None)
    other = CoordinatedSync(every=10, timeout=60)  # of another engine, which hears nothing of what the first one said
    say(next=[sorted(other.reduce_requests(step, frozenset())) for step in (0, 10)])
    say(other=[other.broadcast(lambda: (1, {2: "new"})), other.all_gather("name", "new")])
elif what[0] == "fail":
    for number in range(30):
        print("line", number, flush=True)
    if mine == 1:
        os.kill(os.getpid(), signal.SIGKILL) if what[1] == "kill" else sys.exit(7) if what[1] == "exit" else 1 / 0
    agreement.all_gather("never", None)
elif what == ["loud"]:
    for number in range(3000):
        print("x" * 100, flush=True)
    print("that was all", file=sys.stderr)
elif what == ["bar"]:
    sys.stdout.reconfigure(encoding="utf-8")
    print("\\r10%\\r20%", "\\u2192" * 100_000, "the end", sep="\\n", flush=True)
elif what == ["wait"]:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with open(f"{mine}.pid", "x") as file:
        file.write(str(os.getpid()))
    time.sleep(600)
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


FULGURITE = [
    sys.executable,
    "-c",
    "from fulgurite_cli.command import main; raise SystemExit(main())",
]


def run(
    *arguments: object, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    command = [*FULGURITE, *map(str, arguments)]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, **(environment or {})},
    )


def until(condition: Callable[[], bool], seconds: float = 120) -> None:
    """Waits for something that another process does."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come about in time"
        time.sleep(0.05)


# --- launch ---------------------------------------------------------------------------------------


def test_processes_are_connected_and_agree(program: Path, tmp_path: Path) -> None:
    ended = run("launch", "--processes", 2, "--logs", tmp_path / "logs", program, "agree")
    assert ended.returncode == 0, ended.stderr
    said = [line for line in ended.stdout.splitlines() if line.startswith(("{", "[1] {"))]
    first = [line for line in said if line.startswith("{")]
    second = [line.removeprefix("[1] ") for line in said if line.startswith("[1] ")]
    assert len(first) == len(second) == 8
    assert first[0] == second[0] == '{"processes": 2, "devices": 2, "local": 1}'
    assert first[1] == second[1] == '{"decided": [[0, 0], [0, 1], [0, 2]]}'
    assert (
        first[2]
        == second[2]
        == '{"gathered": [[[0, 0], [1, 0]], [[0, 1], [1, 1]], [[0, 2], [1, 2]]]}'
    )
    assert "ZeroDivisionError" in first[3] and "ProcessError: process 0 failed" in second[3]
    assert "division by zero" in second[3]
    assert first[4] == second[4] == '{"agreed": ["action:save"]}'
    assert first[5] == second[5] == '{"voted": ["stop:enough"]}'
    assert first[6] == second[6] == '{"next": [[], []]}'
    assert first[7] == second[7] == '{"other": [[1, {"2": "new"}], ["new", "new"]]}'
    for number, lines in enumerate((first, second)):
        log = (tmp_path / "logs" / f"process-{number}.log").read_text()
        assert [line for line in log.splitlines() if line.startswith("{")] == lines


@pytest.mark.slow
def test_process_with_unread_output_continues(program: Path) -> None:
    """More of it than a pipe holds."""
    reading, writing = os.pipe()
    os.close(reading)
    command = [*FULGURITE, "launch", "--processes", "1", str(program), "loud"]
    ended = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=120)
    os.close(writing)
    assert ended.returncode == 0, ended.stderr
    assert "process 0 of 1: what it prints can no longer be passed on" in ended.stderr
    assert "that was all" in ended.stderr


def test_output_is_unchanged_and_what_the_terminal_cannot_show_is_escaped(program: Path) -> None:
    """A bar that overwrites itself, and an arrow. It hung when its pipe was full."""
    environment = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    command = [*FULGURITE, "launch", "--processes", "1", str(program), "bar"]
    ended = subprocess.run(command, capture_output=True, timeout=120, env=environment)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == b"\r10%\r20%\n" + b"\\u2192" * 100_000 + b"\nthe end\n"


@pytest.mark.parametrize(
    ("how", "code", "words"),
    [
        ("kill", 137, "SIGKILL"),
        pytest.param("raise", 1, "exit code 1", marks=pytest.mark.slow),
        pytest.param("exit", 7, "exit code 7", marks=pytest.mark.slow),
    ],
)
def test_failure_of_a_process_ends_the_others(
    program: Path, how: str, code: int, words: str
) -> None:
    """Long before the heartbeat, which is a minute here, would tell JAX."""
    ended = run("launch", "--processes", 2, "--heartbeat", 60, program, "fail", how)
    assert ended.returncode == code
    report = ended.stderr.splitlines()
    start = next(number for number, line in enumerate(report) if line.startswith("process 1 of 2"))
    assert words in report[start] and "Its last lines:" in report[start]
    last = report[start + 1 :]
    assert len(last) == 20
    if how != "raise":
        lines = [line.removeprefix("    ") for line in last]
        assert [line for line in lines if line.startswith("line")] == [
            f"line {number}" for number in range(10, 30)
        ]
    else:
        assert "    ZeroDivisionError: division by zero" in last


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGTERM, marks=pytest.mark.slow), signal.SIGKILL]
)
def test_no_process_outlives_the_launcher(
    program: Path, tmp_path: Path, number: signal.Signals
) -> None:
    """These two do not listen to SIGINT and SIGTERM: asked twice, the launcher ends them."""
    arguments = ["launch", "--processes", "2", str(program), "wait"]
    launcher = subprocess.Popen([*FULGURITE, *arguments], cwd=tmp_path, stderr=subprocess.DEVNULL)
    try:
        files = [tmp_path / f"{process}.pid" for process in range(2)]
        until(lambda: all(file.exists() and file.read_text() for file in files))
        for signal_number in {number, signal.SIGINT}:
            launcher.send_signal(signal_number)
        assert launcher.wait(60) == (137 if number == signal.SIGTERM else -signal.SIGKILL)
        until(lambda: not any(alive(int(file.read_text())) for file in files))
    finally:
        launcher.kill()
        launcher.wait()


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--processes", "0", __file__], "at least 1"),
        (["--processes", "2", "nowhere.py"], "no Python file nowhere.py"),
        (["--processes", "two", __file__], "invalid int"),
        (
            ["--processes", "2", "--logs", __file__, __file__],
            "is not a folder that can be written to",
        ),
        ([__file__], "--processes"),
    ],
)
def test_wrong_arguments(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        launch(arguments)
    assert words in capsys.readouterr().err


def test_gpus_are_divided_evenly(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,4")
    with pytest.raises(SystemExit, match="2"):
        launch(["--processes", "2", __file__])
    assert "2 processes cannot have an equal part of 3 GPUs" in capsys.readouterr().err


# --- distributed ----------------------------------------------------------------------------------


@pytest.mark.parametrize("process", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_process_that_never_connects_is_an_error(process: int, program: Path) -> None:
    """Whoever waits, says for whom, and ends."""
    place = f"127.0.0.1:{20_000 + os.getpid() % 10_000} {process}/2 timeout=2"
    ended = run("fit", program, environment={"FULGURITE_DISTRIBUTED": place})
    assert ended.returncode == 2, ended.stderr
    assert f"error: process {process} of 2 waited 2 s for the others at 127.0.0.1:" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_undetected_cluster_is_an_error() -> None:
    program = "import fulgurite_sharding; fulgurite_sharding.initialize_distributed()"
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=240
    )
    assert ended.returncode == 1
    assert "ConfigurationError: JAX detects neither SLURM" in ended.stderr


SUM = """
import fulgurite_sharding, jax, jax.numpy as jnp, numpy as np
fulgurite_sharding.initialize_distributed(timeout=60)
spread = jax.sharding.NamedSharding(jax.make_mesh((2,), ("data",)), jax.P("data"))
parts = jax.make_array_from_process_local_data(spread, np.full(1, 3.0 + jax.process_index()))
print(jax.process_index(), jax.process_count(), jax.jit(jnp.sum)(parts))
"""


def slurm(job: int, process: int) -> dict[str, str]:
    """What `srun --ntasks=2` sets of what tells a process who it is, as Slurm 22.05 did."""
    variables = {
        "PROCID": process,
        "LOCALID": process,
        "NTASKS": 2,
        "JOB_ID": job,
        "STEP_NUM_NODES": 1,
    }
    return {f"SLURM_{name}": str(value) for name, value in variables.items()} | {
        "SLURM_STEP_NODELIST": "localhost"
    }


def open_mpi(job: int, process: int) -> dict[str, str]:
    """What `mpirun -n 2` sets, as Open MPI 4.1 did."""
    variables = {
        "RANK": process,
        "LOCAL_RANK": process,
        "NODE_RANK": process,
        "SIZE": 2,
        "LOCAL_SIZE": 2,
    }
    uri = f"{job * 2**12}.0;tcp://127.0.0.1:37465;tcp6://[::1]:38581"
    return {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in variables.items()} | {
        "OMPI_MCA_orte_hnp_uri": uri
    }


def free_job() -> int:
    """The number of a job of which JAX makes a free port, one of 4096; tests that run at once begin
    elsewhere."""
    for job in range(os.getpid(), os.getpid() + 4096):
        try:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 65536 - 4096 + job % 4096))
                return job
        except OSError:
            continue
    raise AssertionError("no free port")


@pytest.mark.parametrize(
    ("cluster", "variable"),
    [(slurm, ""), pytest.param(open_mpi, "auto timeout=60", marks=pytest.mark.slow)],
)
def test_processes_of_a_cluster_find_each_other(
    cluster: Callable[[int, int], dict[str, str]], variable: str
) -> None:
    """Without `fulgurite launch`. The coordinator's port follows from the job's number."""
    job = free_job()
    members = [
        subprocess.Popen(
            [sys.executable, "-c", SUM],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "FULGURITE_DISTRIBUTED": variable, **cluster(job, process)},
        )
        for process in range(2)
    ]
    try:
        for process, member in enumerate(members):
            output, errors = member.communicate(timeout=240)
            assert member.returncode == 0, errors
            assert f"{process} 2 7.0" in output.splitlines()
    finally:
        for member in members:
            member.kill()
            member.communicate()


def test_backend_already_in_use_is_an_error() -> None:
    jax.devices()
    with pytest.raises(
        ConfigurationError, match="jax is in use already.*initialize_distributed\\(\\) before"
    ):
        initialize_distributed("127.0.0.1:4000", 2, 0)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("127.0.0.1:4000", 2), "process missing"),
        ((None, 2, 0), "coordinator missing"),
        (("127.0.0.1", 2, 0), "HOST:PORT"),
        ((":4000", 2, 0), "HOST:PORT"),
        (("127.0.0.1:0", 2, 0), "HOST:PORT"),
        (("127.0.0.1:65536", 2, 0), "HOST:PORT"),
        (("127.0.0.1:4000", 2, 2), "no process 2 of 2"),
        (("127.0.0.1:4000", 2, 0, 0), "at least 1"),
    ],
)
def test_invalid_arguments_are_errors(arguments: tuple, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        ProcessGroup(*arguments)


@pytest.mark.parametrize(
    "text", ["yes", "host:1 0", "host:1 0/x", "host:1 0/2 wait=3", "auto timeout=long"]
)
def test_invalid_environment_variable_is_an_error(text: str) -> None:
    with pytest.raises(
        ConfigurationError, match="FULGURITE_DISTRIBUTED is '.*write `auto`, or `HOST:PORT"
    ):
        ProcessGroup.parse(text)


def test_patience_is_that_of_the_variable_or_else_that_of_the_program(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    groups: list[ProcessGroup] = []

    def connect(group: ProcessGroup) -> None:
        groups.append(group)
        raise ConnectionError

    monkeypatch.setattr("fulgurite_sharding.distributed._connect", connect)
    monkeypatch.setattr("jax._src.xla_bridge.backends_are_initialized", lambda: False)
    for text in ("10.0.0.1:4000 1/2", "10.0.0.1:4000 1/2 timeout=5"):
        monkeypatch.setenv("FULGURITE_DISTRIBUTED", text)
        with pytest.raises(ConnectionError):
            initialize_distributed(timeout=20, heartbeat=30)
    assert [(group.timeout, group.heartbeat) for group in groups] == [(20, 30), (5, 30)]


def test_environment_variable_round_trips() -> None:
    assert ProcessGroup.parse("auto heartbeat=7") == ProcessGroup(heartbeat=7)
    group = ProcessGroup("[::1]:4000", 3, 1, 20, 30)
    assert str(group) == "[::1]:4000 1/3 timeout=20 heartbeat=30"
    assert ProcessGroup.parse(str(group)) == group
    assert ProcessGroup.parse(str(ProcessGroup())) == ProcessGroup()


def test_agree_every_is_a_number_of_steps() -> None:
    with pytest.raises(ConfigurationError, match="agree_every is 0"):
        CoordinatedSync(every=0)
