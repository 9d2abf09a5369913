"""wandb for real, offline: its files are read back and compared record by record."""

import os
import pty
import shutil
import signal
import struct
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fulgurite.errors import CheckpointError, ConfigurationError
from fulgurite_logging import BackgroundWriter, LoopLogger, media
from fulgurite_runs.json_codec import dumps, loads
from fulgurite_runs.lock import Lock
from fulgurite_wandb import WandbLogger, read_run
from fulgurite_wandb.backend import _iter_records
from matplotlib import pyplot

pytestmark = pytest.mark.full


class Line(fg.Module):
    """Least squares with media."""

    weight: jax.Array

    def __init__(self, *, key: Any) -> None:
        self.weight = jnp.arange(4.0)

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        shown = {
            "pictures": lambda: media.Images.from_pixels(
                jnp.stack([jnp.zeros((2, 3, 1)), jnp.ones((2, 3, 1))])
            ),
            "picture": lambda: media.Image.from_pixels(jnp.ones((2, 3))),
            "weight": lambda: media.Histogram.from_values(self.weight, bins=2),
            "note": media.Text("a note"),
        }
        return fg.Output(((batch @ self.weight - 1) ** 2).mean(), media=shown)

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(1e-2)


class Telling:
    """Emits what the test says at a step, after the training's own record."""

    def __init__(self, *records: tuple[int, str, str, dict[str, Any]], show: int = 1000) -> None:
        self.records, self.show = records, show

    plugin_name = "media"

    @fg.hookimpl
    def register_actions(self) -> list[fg.ScheduledAction]:
        show = fg.ScheduledAction("show", self.show, fg.Run.emit_media)
        return [show, fg.ScheduledAction("tell", fg.Every(1), self.tell)]

    def tell(self, run: fg.Run) -> None:
        for step, kind, source, values in self.records:
            if step == run.step:
                getattr(run, f"log_{kind}")(source, values)  # type: ignore[arg-type]


BATCHES = [
    np.random.default_rng(number).normal(size=(5, 4)).astype(np.float32) for number in range(8)
]


def fit(run: Path | None, *plugins: Any, steps: int = 8, **arguments: Any) -> fg.FitResult:
    engine = fg.Engine(steps=steps, run_dir=run, log_every=2, plugins=plugins, autoload=False)
    return engine.fit(Line, fg.DataSource(BATCHES), **arguments)


def offline(**arguments: Any) -> WandbLogger:
    return WandbLogger("tests", mode="offline", **arguments)


def files(run: Path) -> list[Path]:
    return sorted(run.glob("wandb/offline-run-*/*.wandb"))


def rows(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Step and values of each row, without wandb's own."""
    for record in read_run(file):
        if record.HasField("history"):
            items = {
                item.key or "/".join(item.nested_key): loads(item.value_json)
                for item in record.history.item
            }
            yield record.history.step.num, {k: v for k, v in items.items() if not k.startswith("_")}


def exact(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if not name.endswith("steps_per_second")}


def test_each_step_is_a_row_with_the_numbers_of_the_history(tmp_path: Path):
    logger = offline()
    history = fit(
        tmp_path, logger, Telling((4, "scalars", "test", {"accuracy": 0.5, "each": np.arange(2)}))
    ).history
    written = [(step, exact(row)) for step, row in rows(files(tmp_path)[0])]
    expected: dict[int, dict[str, Any]] = {}
    for record in history.records:
        for name, value in record.values.items():
            expected.setdefault(record.step, {})[f"{record.source}/{name}"] = value
    expected[4] |= {"test/each/0": 0, "test/each/1": 1}
    del expected[4]["test/each"]
    assert written == list(expected.items())
    assert files(tmp_path)[0].name == f"run-{logger.id}.wandb"


def test_media_tables_and_configuration(tmp_path: Path):
    records = [
        (2, "scalars", "test", {"confusion": np.array([[1, 2], [3, 4]])}),
        (2, "text", "note", {"said": "so"}),
        (2, "config", "fulgurite", {"configuration": {"lr": 0.5}, "versions": {"jax": "1"}}),
    ]
    fit(tmp_path, offline(), Telling(*records, show=2), steps=2)
    row = dict(rows(files(tmp_path)[0]))[2]
    pictures = [row[f"train/pictures/{name}"] for name in ("_type", "count", "width", "height")]
    assert pictures == ["images/separated", 2, 3, 2] and row["train/picture/_type"] == "image-file"
    assert row["train/weight/_type"] == "histogram" and sum(row["train/weight/values"]) == 4
    for name in ("train/note", "test/confusion", "note/said"):
        assert row[f"{name}/_type"] == "table-file"
    assert (row["test/confusion/nrows"], row["test/confusion/ncols"]) == (2, 2)
    updates = [
        (update.key or update.nested_key[0], loads(update.value_json))
        for record in read_run(files(tmp_path)[0])
        if record.HasField("config")
        for update in record.config.update
    ]
    configured = dict(updates)
    assert configured["lr"] == 0.5 and configured["fulgurite"] == {"versions": {"jax": "1"}}


PILLOW = """
import sys, threading, time, traceback
from importlib.machinery import PathFinder
import fulgurite as fg, jax, jax.numpy as jnp, numpy as np, optax
from fulgurite_logging import media
from fulgurite_wandb import WandbLogger

half = threading.Event()

def showing(frame):
    return any(one.f_code.co_name == "_convert_image" for one, _ in traceback.walk_stack(frame))

class Slow:  # Pillow is half imported until wandb wants it
    def find_spec(self, name, path=None, target=None):
        if name != "PIL.ImageMode":
            return None
        spec = PathFinder.find_spec(name, path)
        whole = spec.loader.exec_module
        def exec_module(module):
            half.set()
            end = time.monotonic() + 30
            while time.monotonic() < end and not any(map(showing, sys._current_frames().values())):
                time.sleep(0.001)
            whole(module)
        spec.loader.exec_module = exec_module
        return spec

class Model(fg.Module):
    weight: jax.Array
    def training_step(self, batch, ctx):
        return fg.Output(self.weight * 1.0, media={"picture": lambda: media.Image.from_pixels(jnp.ones((2, 3)))})
    def configure_optimizers(self):
        return optax.sgd(1.0)

class Show:  # as the thread of another logger does
    plugin_name = "media"
    @fg.hookimpl
    def register_actions(self):
        return [fg.ScheduledAction("show", 2, self.show)]
    def show(self, run):
        threading.Thread(target=lambda: __import__("PIL.Image")).start()
        half.wait()
        run.emit_media()

sys.meta_path.insert(0, Slow())
plugins = [WandbLogger("tests", mode="offline"), Show()]
fg.Engine(steps=2, run_dir=sys.argv[1], plugins=plugins, autoload=False).fit(Model(jnp.zeros(())), [np.zeros(1)])
"""


@pytest.mark.slow
def test_pictures_are_shown_while_another_thread_imports_pillow(tmp_path: Path):
    # In a process of its own, for here it is imported already.
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PILLOW, tmp_path], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    pictures = tmp_path.glob("wandb/offline-run-*/files/media/images/train/picture*.png")
    # wandb takes the step from the row before, unless it is told.
    assert sorted(path.name.split("_")[1] for path in pictures) == ["2"]


def test_unsupported_records_are_reported_once_and_the_rest_is_shown(tmp_path: Path):
    class Own(media.Text):
        pass

    class Unknown(fg.Media):
        pass

    def by_pyplot(values: Any) -> Any:
        return pyplot.subplots(figsize=(1, 1), dpi=20)[0]

    values, counts = np.arange(3.0), np.arange(1025)
    shown = {
        "broken": media.Figure(lambda values: 1 / 0, values),
        "unknown": Unknown(),
        "own": Own("so"),
        "figure": media.Figure(by_pyplot, values),
        "fine": media.Histogram(counts, np.arange(1026.0)),  # pyright: ignore[reportArgumentType]
    }
    with pytest.warns(UserWarning, match="leaves 'told/") as warned:
        result = fit(
            tmp_path,
            offline(),
            Telling(*[(step, "media", "told", shown) for step in (1, 2)]),
            steps=2,
        )
    messages = sorted(str(warning.message) for warning in warned)
    assert (
        len(messages) == 2
        and "'told/broken' out, of step 1 first: ZeroDivisionError" in messages[0]
    )
    assert "type Unknown" in messages[1] and not result.failures and not pyplot.get_fignums()
    row = dict(rows(files(tmp_path)[0]))[2]
    kinds = [row[f"told/{name}/_type"] for name in ("own", "figure", "fine")]
    assert kinds == ["table-file", "image-file", "histogram"] and "train/loss" in row
    together = row["told/fine/values"]
    assert together == [3 * (3 * number + 1) for number in range(341)] + [1023 + 1024]
    assert row["told/fine/bins"] == [*range(0, 1025, 3), 1025]


def test_a_run_that_fails_is_shown_as_failed_with_all_it_has_said(tmp_path: Path):
    def fail(run: fg.Run) -> None:
        run.notify("told", "the first message")
        run.notify("told", "the second message")
        raise ValueError("an action fails")

    with pytest.raises(ValueError, match="an action fails"):
        fit(tmp_path, offline(), fg.LambdaPlugin(every={fg.At(2): fail}), steps=4)
    (file,) = files(tmp_path)
    (table,) = file.parent.glob("files/media/table/told/message*.json")
    assert loads(table.read_text())["data"] == [["the first message"], ["the second message"]]
    codes = [record.exit.exit_code for record in read_run(file) if record.HasField("exit")]
    assert codes == [1]


@pytest.mark.full
def test_a_run_that_a_signal_stops_has_not_finished(tmp_path: Path):
    interrupt = fg.LambdaPlugin(every={fg.At(2): lambda run: os.kill(os.getpid(), signal.SIGTERM)})
    assert fit(tmp_path, offline(), interrupt).stop_reason == "SIGTERM"
    fg.forget_stop_request()
    records = read_run(files(tmp_path)[0])
    assert [record.exit.exit_code for record in records if record.HasField("exit")] == [255]


def test_records_of_a_lost_network_can_be_sent_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    gate = threading.Event()
    figure = media.Figure(
        lambda values: gate.wait(60), np.arange(3.0)
    )  # stands for wandb, which waits for a server
    monkeypatch.setattr("fulgurite_wandb.plugin.EXTRA_TIMEOUT", 5.0)
    try:
        with (
            pytest.warns(UserWarning, match="waits for logger 'wandb'"),
            pytest.warns(UserWarning, match=r"did nothing for 5(\.1)? s"),
        ):
            dispatcher = Telling((2, "media", "told", {"hangs": figure}))
            result = fit(tmp_path, offline(timeout=0.1), dispatcher, steps=2)
    finally:
        gate.set()
    assert f"`wandb sync {tmp_path / 'wandb'}" in result.failures["wandb"]


def test_best_values_are_in_the_summary(tmp_path: Path):
    values = [0.3, float("nan"), 0.7, 0.5]
    records = [
        (step, "scalars", "test", {"accuracy": value}) for step, value in enumerate(values, 1)
    ]
    logger = offline(best={"test/accuracy": "max", "train/loss": "min"})
    history = fit(tmp_path, logger, Telling(*records)).history
    summary = {
        item.key or "/".join(item.nested_key): loads(item.value_json)
        for record in read_run(files(tmp_path)[0])
        if record.HasField("summary")
        for item in record.summary.update
    }
    assert (
        summary["best/test/accuracy"] == 0.7
        and summary["best/train/loss"] == history["train/loss"].min()
    )
    assert logger.get_host_state() == {
        "id": logger.id,
        "best": {"test/accuracy": 0.7, "train/loss": history["train/loss"].min()},
    }


class Memory:
    """A checkpointer that keeps the newest snapshot in memory, of this run or of `another`."""

    def __init__(self) -> None:
        self.snapshot: Any = None
        self.positions: dict[str, Any] = {}
        self.another = False

    @fg.hookimpl
    def save_checkpoint(self, run: fg.Run) -> None:
        snapshot = run.snapshot()
        state = jax.tree.map(
            lambda leaf: jnp.copy(leaf) if isinstance(leaf, jax.Array) else leaf, snapshot.state
        )
        self.snapshot = fg.Snapshot(
            state, fg.StepRange(0, 12), snapshot.data_position, host_states=snapshot.host_states
        )
        self.positions = {
            logger.name: future.result()
            for logger, future in run.engine.plugins.hooks.flush_logger.each(0, step=0)
        }

    @fg.hookimpl
    def restore_checkpoint(self, resume: fg.CheckpointRef, template: fg.TrainState) -> fg.Snapshot:
        return self.snapshot

    @fg.hookimpl
    def on_restore(self, run: fg.Run, step: int) -> None:
        if not self.another:
            run.engine.plugins.hooks.rewind_logger.each(
                step, per_plugin=lambda logger: {"position": self.positions[logger.name]}
            )


def resumed_with(
    tmp_path: Path, steps_there: int, records: list[fg.Record] | None
) -> list[tuple[int, Any]]:
    """All rows of a run of 12 steps, resumed at 8 by another logger, of whose first file the rows
    after `steps_there` were lost in a kill."""
    memory, first = Memory(), offline()
    history = fit(tmp_path, first, memory).history
    file = files(tmp_path)[0]
    cut_behind(file, steps_there)
    if records is not None:
        lines = [
            {"kind": r.kind, "source": r.source, "step": r.step, "values": r.values}
            for r in history.records
        ]
        said = {"kind": "text", "source": "said", "step": 6, "values": {"text": "six"}}
        lines.insert(1 + [line["step"] for line in lines].index(6), said)
        (tmp_path / "records.jsonl").write_text("".join(dumps(line) + "\n" for line in lines))
    second = offline()
    fit(tmp_path, second, memory, steps=12, resume=fg.CheckpointRef(tmp_path, optional=True))
    assert second.id == first.id and len(files(tmp_path)) == 2
    return [(step, exact(row)) for file in files(tmp_path) for step, row in rows(file)]


def cut_behind(file: Path, step: int) -> None:
    """Cuts a run's file as a kill would: in the middle of the row after `step`."""
    data = file.read_bytes()
    for size in range(8, len(data) + 1):
        file.write_bytes(data[:size])
        if any(row_step > step for row_step, _ in rows(file)):
            file.write_bytes(data[: size - 3])
            return
    file.write_bytes(data)


@pytest.mark.parametrize(
    "there", [4, *(pytest.param(step, marks=pytest.mark.slow) for step in (0, 8))]
)
def test_resumed_run_sends_missing_steps_and_none_twice(there: int, tmp_path: Path):
    whole = fit(None, steps=12).history
    sent = resumed_with(tmp_path / "run", there, [])
    assert [step for step, _ in sent] == [2, 4, 6, 8, 10, 12]
    for step, row in sent:
        assert row["train/loss"] == whole["train/loss"][step // 2 - 1]
        assert ("said/text/path" in row) == (step == 6 and there < 6)


def test_missing_records_are_reported(tmp_path: Path):
    with pytest.warns(UserWarning, match="wandb has the steps up to 4 of 8"):
        sent = resumed_with(tmp_path, 4, None)
    assert [step for step, _ in sent] == [2, 4, 10, 12]


def test_records_of_an_online_attempt_are_not_sent_again_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for name, value in {
        "HOME": str(tmp_path),
        "WANDB_API_KEY": "",
        "WANDB_BASE_URL": "http://127.0.0.1:9",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(
        BackgroundWriter, "timeout", 0.1
    )  # wandb gets what a connection may take besides
    memory, first = Memory(), offline()
    fit(tmp_path, first, memory)
    folder = files(tmp_path)[0].parent
    folder.rename(
        folder.with_name(folder.name.removeprefix("offline-"))
    )  # as wandb calls one that is online
    with pytest.warns(UserWarning, match="continues offline"):
        fit(
            tmp_path,
            WandbLogger("tests", timeout=3),
            memory,
            steps=12,
            resume=fg.CheckpointRef(tmp_path, optional=True),
        )
    assert [step for file in files(tmp_path) for step, _ in rows(file)] == [10, 12]


def test_fit_from_the_state_of_an_earlier_one_continues_its_run(tmp_path: Path):
    logger = offline()
    engine = fg.Engine(steps=4, run_dir=tmp_path, log_every=2, plugins=[logger], autoload=False)
    result = engine.fit(Line, fg.DataSource(BATCHES))
    identity = logger.id
    engine.fit(data=fg.DataSource(BATCHES), state=result.state)
    assert logger.id == identity
    assert [step for file in files(tmp_path) for step, _ in rows(file)] == [2, 4, 6, 8]


@pytest.mark.full
def test_a_loop_that_continues_keeps_its_run_and_sends_each_step_once(tmp_path: Path):
    ids = []
    positions: dict[str, Any] = {}
    losses = [0.5, 0.25, 0.375, 1.0, 0.75]
    for first_step in (0, 2):
        logger = offline(best={"test/loss": "min"})
        engine = fg.Engine(run_dir=tmp_path, plugins=["jsonl", logger], autoload=False, steps=8)
        with LoopLogger(engine, step=first_step, positions=positions or None) as log:
            log.scalars("test", {"loss": jnp.float32(losses[first_step])}, first_step + 1)
            log.scalars("test", {"loss": jnp.float32(losses[first_step + 1])}, first_step + 2)
            positions = log.flush()
            log.scalars("test", {"loss": jnp.float32(losses[first_step + 2])}, first_step + 3)
        ids.append(logger.id)
    assert ids[0] == ids[1]
    sent = [(step, row["test/loss"]) for file in files(tmp_path) for step, row in rows(file)]
    assert sent == list(enumerate(losses, 1))
    assert positions["wandb"] == {"id": ids[0], "best": {"test/loss": 0.25}}
    with pytest.raises(ValueError, match=r"'\.\./x', which is none"):
        offline().rewind_logger({"id": "../x"})


@pytest.mark.full
def test_other_runs_of_the_process_are_left_alone(tmp_path: Path):
    import wandb

    (tmp_path / "own").mkdir()
    own_run = wandb.init(project="own", mode="offline", dir=tmp_path / "own")
    own_run.log({"x": 1}, step=0)

    def fit_within(run: fg.Run) -> None:
        deadline = time.monotonic() + 30
        while not files(tmp_path / "outer") and time.monotonic() < deadline:
            time.sleep(0.05)  # until the other logger has begun its run
        fit(tmp_path / "inner", offline(), steps=4)

    result = fit(tmp_path / "outer", offline(), fg.LambdaPlugin(every={fg.At(3): fit_within}))
    assert not result.failures
    own_run.log({"x": 2}, step=9)
    own_run.finish()
    wandb.teardown()  # after which its files are whole
    expected = {"own": [0, 9], "outer": [2, 4, 6, 8], "inner": [2, 4]}
    for name, steps in expected.items():
        (file,) = files(tmp_path / name)
        assert [step for step, _ in rows(file)] == steps


def test_run_from_the_checkpoint_of_another_is_a_separate_run(tmp_path: Path):
    memory, first, second = Memory(), offline(), offline()
    fit(tmp_path / "a", first, memory)
    memory.another = True
    fit(tmp_path / "b", second, memory, steps=12, resume=fg.CheckpointRef(tmp_path / "a"))
    assert second.id != first.id
    assert [step for file in files(tmp_path / "b") for step, _ in rows(file)] == [10, 12]


CANARY = "0123456789abcdef0123456789abcdef01234567"

PROGRAM = """
import sys
from pathlib import Path
sys.path.insert(0, {folder!r})
from test_wandb import fit, WandbLogger
fit(Path(sys.argv[1]), WandbLogger("tests", mode={mode!r}, timeout=3), steps=4)
print("trained")
"""


def run_program(mode: str, run: Path, **variables: str) -> tuple[int, str]:
    """The exit status of a program in a terminal, and what it said."""
    program = PROGRAM.format(folder=os.path.dirname(__file__), mode=mode)
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("WANDB")
    }
    environment |= {"HOME": str(run.parent), "WANDB_API_KEY": "", "TERM": "xterm", **variables}
    command = [sys.executable, "-c", program, str(run), f"token={CANARY}"]
    terminal, its = pty.openpty()
    process = subprocess.Popen(
        command,
        stdin=its,
        stdout=its,
        stderr=its,
        env=environment,
        cwd=run.parent,
        start_new_session=True,
    )
    os.close(its)
    said = []
    with open(terminal, "rb", buffering=0) as screen, suppress(OSError):  # which is how it ends
        while part := screen.read(65536):
            said.append(part)
    return process.wait(300), b"".join(said).decode()


@pytest.mark.parametrize(
    "variables",
    [
        pytest.param({}, marks=pytest.mark.slow),
        {"WANDB_API_KEY": CANARY, "WANDB_BASE_URL": "http://127.0.0.1:9"},
    ],
)
def test_missing_key_or_network_means_offline_and_no_secret_is_written(
    variables: Any, tmp_path: Path
):
    status, said = run_program("online", tmp_path / "run", **variables)
    assert status == 0 and "trained" in said, said
    assert "continues offline" in said and "Enter your choice" not in said
    sent = [(step, row) for file in files(tmp_path / "run") for step, row in rows(file)]
    assert [step for step, _ in sent] == [2, 4]
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not [path for path in written if CANARY.encode() in path.read_bytes()]
    assert "requirements.txt" not in {path.name for path in written}


WANDB_PROCESS = """
import os, sys, time
from pathlib import Path
import fulgurite as fg
from fulgurite_testing import TinyModel, tiny_data

def variables():
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if (path / "comm").read_text().startswith("wandb-core"):
                given = dict(one.split("=", 1) for one in (path / "environ").read_text().split("\\0") if "=" in one)
                if given.get("OURS") == os.environ["OURS"]:
                    return given
        except OSError:
            pass  # another's, or gone

class Look:
    @fg.hookimpl
    def on_fit_end(self, run):
        until = time.monotonic() + 60
        while (given := variables()) is None and time.monotonic() < until:
            time.sleep(0.05)
        print("wandb", given and (given["GOMAXPROCS"], given["GOGC"]))

wandb = {"wandb": {"project": "tests", "mode": "offline"}}
fg.Engine(steps=2, log_every=1, plugins=[wandb, Look()], run_dir=sys.argv[1], autoload=False).fit(TinyModel, tiny_data())
print("left", (os.environ.get("GOMAXPROCS"), os.environ.get("GOGC")))
"""


@pytest.mark.slow
@pytest.mark.skipif(
    not Path("/proc/self/environ").exists(),
    reason="needs /proc to see another process's environment",
)
def test_wandb_process_has_few_threads_unless_configured(tmp_path: Path):
    inherited = {
        name: value for name, value in os.environ.items() if name not in ("GOMAXPROCS", "GOGC")
    }
    # A program that used wandb leaves its process' address behind to those that it starts.
    environment = {
        **inherited,
        "GOGC": "50",
        "OURS": str(tmp_path),
        "WANDB_SERVICE": f"3-1-unix-{tmp_path}/gone",
    }
    command = [sys.executable, "-c", WANDB_PROCESS, str(tmp_path)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert run.stdout.splitlines() == ["wandb ('1', '50')", "left (None, '50')"]


def test_mode_disabled_writes_nothing(tmp_path: Path):
    fit(tmp_path, WandbLogger("tests", mode="disabled"))
    assert not (tmp_path / "wandb").exists()


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"mode": "on"}, "mode is 'on'"),
        ({"best": {"test/loss": "least"}}, "'min' or 'max'"),
        ({"best": "test/loss"}, "best is 'test/loss'; give 'min' or 'max' by name"),
        ({"settings": {"id": "a"}}, "sets 'id' by itself"),
        ({"timeout": "a"}, "timeout is 'a'; give a positive number"),
        ({"timeout": 0}, "timeout is 0"),
    ],
)
def test_invalid_arguments_are_errors(arguments: Any, message: str):
    with pytest.raises(ConfigurationError, match=message):
        WandbLogger("tests", **arguments)


def test_nothing_is_written_into_a_run_that_began_where_this_one_was_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run_dir = tmp_path / "run"
    logger = offline()
    locks: list[Lock] = []

    def replace_run(run: fg.Run) -> None:
        assert logger._writer is not None
        logger._writer.flush().result()  # what came before is written
        shutil.rmtree(run_dir)
        run_dir.mkdir()
        locks.append(Lock(run_dir / "lock", 1))
        # The lock is looked at once a second.
        monkeypatch.setattr(
            time, "clock_gettime", lambda clock, now=time.clock_gettime: now(clock) + 60
        )

    replacing = fg.LambdaPlugin("replacing", every={fg.At(3): replace_run})
    with pytest.warns(UserWarning, match="lock was deleted or replaced"):
        result = fit(run_dir, logger, replacing, Telling(show=1))
    locks[0].release()
    assert "has begun a run that writes to" in result.failures["wandb"]
    assert [path.name for path in run_dir.iterdir()] == ["lock"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[]", "list indices must be integers"),
        ("{}", "'kind'"),
        ('{"kind":"scalars","source":"a","step":"1","values":{}}', "it lacks"),
        ("x", "Expecting value"),
        (" " * 2**24, "it is longer than 16,777,216 bytes"),
    ],
)
def test_records_that_are_damaged_are_an_error_naming_the_line(
    line: str, message: str, tmp_path: Path
):
    path = tmp_path / "records.jsonl"
    path.write_text(f'{{"kind":"text","source":"a","step":1,"values":{{}}}}\n{line}\n')
    with pytest.raises(CheckpointError, match=rf"records\.jsonl, line 2: .*{message}"):
        list(_iter_records(path, path.stat().st_size))


def test_a_record_without_an_end_takes_bounded_memory(tmp_path: Path):
    """Each chunk says that the record continues."""
    path = tmp_path / "run.wandb"
    block = struct.pack("<IHB", 0, 32768 - 7, 3) + bytes(32768 - 7)
    with open(path, "wb") as file:
        file.write(b":W&B\0\0\0" + block[:4] + struct.pack("<HB", 32768 - 14, 2))
        file.write(bytes(32768 - 14))
        file.writelines(block for _ in range(10_000))
    tracemalloc.start()
    try:
        assert list(read_run(path)) == []
        assert tracemalloc.get_traced_memory()[1] < 200 * 2**20
    finally:
        tracemalloc.stop()
