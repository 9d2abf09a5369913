"""Training by several real processes on loopback: what they compute, save, resume, and how they
stop and die.

`trained.py` is what they run, and saves by fulgurite_checkpoint. Each has one device.
"""

import json
import os
import platform
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

pytestmark = pytest.mark.full

PROGRAM = Path(__file__).with_name("trained.py")
LAUNCH = [
    sys.executable,
    "-c",
    "from fulgurite_cli.command import main; raise SystemExit(main())",
    "launch",
]
DEADLINE = 300.0
"""Seconds that anything may take on a busy machine before it counts as stuck."""


def alone(out: Path, *, devices: int = 1, **options: object) -> subprocess.CompletedProcess[str]:
    """One process with that many simulated devices."""
    command = [sys.executable, str(PROGRAM), str(out), *written(options)]
    environment = {**os.environ, "JAX_NUM_CPU_DEVICES": f"{devices}"}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=DEADLINE, env=environment
    )


@contextmanager
def launched(out: Path, processes: int = 2, **options: object) -> Iterator[subprocess.Popen[str]]:
    """The launcher of several processes, which are ended with it."""
    command = [*LAUNCH, "--processes", str(processes), str(PROGRAM), str(out), *written(options)]
    launcher = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        yield launcher
    finally:
        launcher.kill()
        launcher.communicate()


def together(out: Path, processes: int = 2, *, code: int = 0, **options: object) -> str:
    """What several processes print until all have ended."""
    with launched(out, processes, **options) as launcher:
        output = launcher.communicate(timeout=DEADLINE)[0]
        assert launcher.returncode == code, output
        return output


def written(options: dict[str, object]) -> list[str]:
    return [f"{name}={value}" for name, value in options.items()]


def said(out: Path, process: int = 0) -> list[dict[str, Any]]:
    """What a process has told so far."""
    path = Path(f"{out}-{process}.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def values(out: Path, name: str, process: int = 0) -> list[Any]:
    return [line[name] for line in said(out, process) if name in line]


def until(condition: Callable[[], Any]) -> Any:
    """What is true at last, of what other processes do."""
    deadline = time.monotonic() + DEADLINE
    while not (value := condition()):
        assert time.monotonic() < deadline, "it did not come about in time"
        time.sleep(0.05)
    return value


def pid(out: Path, process: int) -> int:
    return until(lambda: values(out, "pid", process))[-1]


def assert_same_end(out: Path, processes: int = 2) -> dict[str, Any]:
    """All processes say the same of their end; gives what they say."""
    ends = [said(out, process)[-1] for process in range(processes)]
    assert "ended" in ends[0] and all(end == ends[0] for end in ends), ends
    assert ends[0]["processes"] == processes
    return ends[0]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two processes over 50 steps that nobody disturbs, evaluated and saved on the way."""
    out = tmp_path_factory.mktemp("whole") / "two"
    together(out, gradients="", evaluate=20, save=20, run=out.parent / "run")
    return out


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same training by one process."""
    out = tmp_path_factory.mktemp("single") / "one"
    ended = alone(out, alone="", gradients="", evaluate=20)
    assert ended.returncode == 0, ended.stderr
    return out


# --- what they compute ----------------------------------------------------------------------------


def assert_like_one(out: Path, single: Path) -> None:
    ours, theirs = ([line for line in said(output) if "logged" in line] for output in (out, single))
    assert [(line["logged"], line["source"]) for line in ours] == [
        (line["logged"], line["source"]) for line in theirs
    ]
    assert len(ours) == 52
    for name, tolerance in (("loss", 1e-5), ("batch_loss", 1e-5)):
        pairs = [(a[name], b[name]) for a, b in zip(ours, theirs, strict=True) if name in a]
        np.testing.assert_allclose(*np.transpose(pairs), rtol=tolerance)
    # At equal parameters, which are those of the first step.
    for name in ("told/norm", "told/first", "told/second"):
        np.testing.assert_allclose(ours[0][name], theirs[0][name], rtol=1e-6, atol=1e-6)


def test_two_processes_compute_what_one_does(whole: Path, single: Path) -> None:
    assert_like_one(whole, single)
    assert_same_end(whole)


def test_only_the_first_process_writes_records_and_all_write_the_checkpoint(whole: Path) -> None:
    assert not values(whole, "logged", process=1)
    assert values(whole, "saved", 0) == values(whole, "saved", 1) == [20, 40, 50]
    assert values(whole, "attempt", 0) == values(whole, "attempt", 1) == [1]
    run = whole.parent / "run"
    assert sorted(path.name for path in (run / "attempts").iterdir()) == ["1"]
    assert (run / "COMPLETE").exists()
    for step in (20, 40, 50):
        names = {path.name for path in (run / "checkpoints" / f"step-{step}").iterdir()}
        assert names >= {"COMMIT", "host-0.json", "host-1.json", "hashes-0.json", "hashes-1.json"}


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["", "fsdp"])
def test_four_processes_compute_what_one_does(single: Path, tmp_path: Path, layout: str) -> None:
    options = {layout: ""} if layout else {}
    together(
        tmp_path / "four", 4, code=0, gradients="", evaluate=20, steps_per_execution=4, **options
    )
    assert_like_one(tmp_path / "four", single)
    assert_same_end(tmp_path / "four", 4)


# --- death and resumption -------------------------------------------------------------------------


def test_killed_run_ends_like_an_uninterrupted_run(whole: Path, tmp_path: Path) -> None:
    """Process 1 is killed at step 45: the launcher says so at once, and both continue from one
    checkpoint, each with its own host state."""
    out, run = tmp_path / "two", tmp_path / "run"
    output = together(out, code=137, gradients="", evaluate=20, save=20, run=run, kill=45)
    assert "process 1 of 2 was ended by SIGKILL. Its last lines:" in output
    together(out, gradients="", evaluate=20, save=20, run=run, resume="auto")
    began = values(out, "started", 0)
    assert began == values(out, "started", 1)
    assert began[0] == 0 and began[1] in (20, 40)
    assert values(out, "attempt", 0) == values(out, "attempt", 1) == [1, 2]
    assert [values(out, "restored", process) for process in range(2)] == [[0], [1]]
    assert assert_same_end(out) == assert_same_end(whole)


@pytest.mark.slow
def test_surviving_process_ends_without_a_launcher(tmp_path: Path) -> None:
    """By the heartbeat of 10 s: within 30 s of real time, plus what a busy machine takes. It says
    which process ended."""
    out = tmp_path / "two"
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reserved.bind(("127.0.0.1", 0))
        place = f"127.0.0.1:{reserved.getsockname()[1]}"
        command = [
            sys.executable,
            "-m",
            "fulgurite_sharding.worker",
            str(PROGRAM),
            str(out),
            "steps=100000",
        ]
        members = [
            subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stderr=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                text=True,
                start_new_session=True,
                env={**os.environ, "FULGURITE_DISTRIBUTED": f"{place} {process}/2 heartbeat=10"},
            )
            for process in range(2)
        ]
        try:
            until(lambda: values(out, "logged"))
            os.kill(pid(out, 1), signal.SIGKILL)
            assert members[0].wait(30) != 0
            assert members[0].stderr is not None
            output = members[0].stderr.read()
            assert f"process 1 (pid {members[1].pid} on {platform.node()}) ended" in output
        finally:
            for member in members:
                member.kill()
                member.communicate()


@pytest.mark.slow
def test_run_resumes_with_another_number_of_processes_and_devices(
    single: Path, tmp_path: Path
) -> None:
    """`ArrayData` has one place for all: from eight devices of one process to two processes to
    one."""
    out = tmp_path / "out"
    options = {"gradients": "", "evaluate": 20, "save": 20, "run": tmp_path / "run"}
    ended = alone(out, devices=8, stop=15, fsdp="", **options)
    assert ended.returncode == 0, ended.stderr
    together(out, stop=25, agree=5, resume="auto", **options)
    ended = alone(out, resume="auto", **options)
    assert ended.returncode == 0, ended.stderr
    assert values(out, "processes") == [1, 2, 1]
    assert values(out, "started") == [0, *values(out, "ended")[:2]]
    assert_like_one(out, single)
    np.testing.assert_allclose(values(out, "sums")[-1], values(single, "sums")[-1], rtol=1e-5)


# --- how they stop --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ended_by_sigterm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two processes, the second slowed by 0.2 s a step, saving by the clock, until that one alone
    gets SIGTERM."""
    out = tmp_path_factory.mktemp("sigterm") / "two"
    with launched(
        out,
        steps=100_000,
        slow=0.2,
        steps_per_execution=8,
        agree=8,
        log=100,
        period=0.3,
        run=out.parent / "run",
    ) as launcher:
        until(lambda: len(values(out, "saved", 1)) > 1)
        os.kill(pid(out, 1), signal.SIGTERM)
        output = launcher.communicate(timeout=DEADLINE)[0]
        assert launcher.returncode == 143, output
    return out


def test_sigterm_to_one_process_stops_all_at_one_step(ended_by_sigterm: Path) -> None:
    end = assert_same_end(ended_by_sigterm)
    assert end["stopped"] == "SIGTERM"
    saved = values(ended_by_sigterm, "saved", 0)
    assert saved == values(ended_by_sigterm, "saved", 1)
    assert saved[-1] == end["ended"]


def test_position_in_custom_data_needs_the_number_of_processes(
    ended_by_sigterm: Path, tmp_path: Path
) -> None:
    out = ended_by_sigterm
    ended = alone(
        tmp_path / "one",
        own="",
        steps=100_000,
        period=0.3,
        log=100,
        run=out.parent / "run",
        resume="auto",
    )
    assert ended.returncode == 1
    last = ended.stderr.strip().splitlines()
    assert any("CheckpointError" in line and "was saved by 2 processes" in line for line in last), (
        ended.stderr
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "reason"),
    [({"limit": 4, "period": 0.3}, "time limit"), ({"vote": 16}, "enough")],
    ids=["limit", "vote"],
)
def test_requests_of_one_process_are_agreed_on(
    options: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    """The limit is by process 0's clock, the wish to stop is that of process 1 alone."""
    out = tmp_path / "two"
    together(
        out,
        steps=100_000,
        slow=0.2,
        steps_per_execution=8,
        agree=8,
        log=100,
        run=tmp_path / "run",
        **options,
    )
    end = assert_same_end(out)
    assert end["stopped"] == reason
    assert values(out, "saved", 0) == values(out, "saved", 1)


def test_several_processes_need_a_sharding_plugin(tmp_path: Path) -> None:
    output = together(tmp_path / "two", code=1, alone="")
    assert (
        "ConfigurationError: this is one of 2 processes, and no plugin makes them train one model"
        in output
    )


def test_a_loss_that_the_division_of_batches_changes_is_refused_by_all_processes() -> None:
    """It is not a mean over examples, or padding counts in it. Each tries examples of its own, and they agree. NumPy says what the numbers are."""
    program = PROGRAM.with_name("bare_losses.py")
    run = subprocess.run(
        [*LAUNCH, "--processes", "2", program], capture_output=True, text=True, timeout=DEADLINE
    )
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-4000:]
    lines = [line for line in run.stdout.splitlines() if "{" in line]
    first, second = (json.loads(line[line.index("{") :]) for line in lines)
    assert first == second
    # The mean is 2.5, of four weights, and the rate .5.
    assert first["mean"] == first["sharded"] == {"weight": 1 - 0.5 * 2.5 / 4}

    def root(*numbers: float) -> float:
        return float(np.sqrt(np.mean(np.square(numbers))))

    for name, halves in (("root", [(1, 2), (3, 4)]), ("root on one", [(1, 2), (2, 5)])):
        whole = root(*halves[0], *halves[1])
        mean = np.mean([root(*half) for half in halves])
        error = first[name]["error"]
        assert error.startswith(
            "ModelError: gradients are averaged over examples, but the loss of "
        )
        assert f"of 4 examples is {whole:.6g}, " in error and f" of them is {mean:.6g}." in error
    # What the second process alone sees is said by both, and all ask each other equally often: above,
    # `first == second`.
    (message,) = first["evaluated"]["messages"]
    assert f"of 4 examples is {root(1, 2, 2, 5):.6g}, " in message
    assert len(first["evaluated"]["polls"]) >= 6
    # The first two of the numbers 1 to 6 are those of the first process.
    padded = first["padded"]["error"]
    assert "the loss of 2 examples is 1.5, and with as many rows of padding 0.75)" in padded


@pytest.fixture(scope="module")
def divided() -> list[dict[str, Any]]:
    """What `divided.py` says on each of two processes of two devices."""
    command = [*LAUNCH, "--processes", "2", PROGRAM.with_name("divided.py")]
    environment = {**os.environ, "JAX_NUM_CPU_DEVICES": "2"}
    run = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE, env=environment)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-4000:]
    lines = sorted((line for line in run.stdout.splitlines() if "{" in line), reverse=True)
    first, second = (json.loads(line[line.index("{") :]) for line in lines)
    return [second, first] if lines[0].startswith("[1]") else [first, second]


@pytest.mark.slow
def test_batches_with_typed_keys_are_divided_over_processes(divided: list[dict[str, Any]]) -> None:
    """Also where JAX computes them as they are read, and where the data of one process ends
    earlier."""

    def draw(seed: int, size: int) -> list[float]:
        keys = jax.random.split(jax.random.key(seed), size)
        return [float(jax.random.uniform(key)) for key in keys]

    for answers in divided:
        loss, predictions = answers["keys"]
        assert loss == pytest.approx((28 + 3 + 6) / 15)
        np.testing.assert_allclose(predictions, [*draw(0, 8), *draw(10, 3), *draw(1, 4)], rtol=1e-6)
        assert answers["trained on keys"] == pytest.approx(1.5)


def test_what_batches_count_is_added_up_over_processes(divided: list[dict[str, Any]]) -> None:
    """The means are 1.5 and 5.5, of 5 and 4 examples. Each process had a mean of its own."""
    for answers in divided:
        assert answers["counted"] == pytest.approx([(5 * 1.5 + 4 * 5.5) / 9] * 2)
        assert "batch 1 of an evaluation says num_examples, and is" in answers["counted on one"]


def test_numbers_in_batches_that_differ_between_processes_are_refused(
    divided: list[dict[str, Any]],
) -> None:
    for answers in divided:
        assert "differ in what is in scale, which is one number" in answers["numbers"]


def test_a_model_that_differs_between_processes_is_not_evaluated(
    divided: list[dict[str, Any]],
) -> None:
    for answers in divided:
        assert "differ in the arrays of a model" in answers["models"]


def test_gather_keeps_all_64_bits(divided: list[dict[str, Any]]) -> None:
    for answers in divided:
        assert answers["gathered"] == {"int": [2**40, 2**40 + 1], "float": [0.1, 0.1], "none": []}


def test_copies_that_differ_on_one_process_are_an_error_on_all(
    divided: list[dict[str, Any]],
) -> None:
    """The others waited for it."""
    first, second = (answers["compared"] for answers in divided)
    assert first == (
        "ReplicaError: copies on the devices of process 1 differ; its error says which"
    )
    assert second.startswith("ReplicaError: a: the copy on ")


def test_examples_keep_their_order_whatever_the_order_of_devices(
    divided: list[dict[str, Any]],
) -> None:
    numbers = list(range(16))
    for answers in divided:
        predictions, evaluated, messages = answers["reversed"]
        assert predictions == answers["network"] == numbers
        assert evaluated == {"loss": 7.5, "bare": 7.5}
        assert not messages  # whether the number is a mean could not be tried
        assert "parts of a batch that are not next to each other" in answers["interleaved"]
        assert "has no device of process 1" in answers["one process"]
