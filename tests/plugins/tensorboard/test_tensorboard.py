"""Event files: every record once, read back raw; cut back and set aside on resume."""

import os
import resource
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fulgurite.errors import CheckpointError, ConfigurationError, StateError
from fulgurite_checkpoint import Checkpointer
from fulgurite_logging import media
from fulgurite_tensorboard import EventFile, TensorBoardLogger, TensorBoardWriter, read_events
from fulgurite_tensorboard.events import _pack_crc, build_start_event
from matplotlib import pyplot
from matplotlib.figure import Figure
from PIL import Image


class Line(fg.Module):
    """Least squares with media: a picture of two pixels, a histogram of the weight, a text and a
    figure."""

    weight: jax.Array

    def __init__(self, *, key: Any) -> None:
        self.weight = jnp.arange(4.0)

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        shown = {
            "pictures": lambda: media.Images.from_pixels(
                jnp.stack([jnp.zeros((2, 3, 3)), jnp.ones((2, 3, 3))])
            ),
            "weight": lambda: media.Histogram.from_values(self.weight, bins=2),
            "note": media.Text("a note"),
            "figure": lambda: media.Figure(drawn, self.weight),
        }
        loss = ((batch @ self.weight - 1) ** 2).mean()
        return fg.Output(loss, metrics={"double": 2 * loss}, media=shown)

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(1e-2)


def drawn(values: np.ndarray) -> Figure:
    assert isinstance(values, np.ndarray)
    figure = Figure(figsize=(1, 1), dpi=20)
    figure.add_subplot().plot(values)
    return figure


@dataclass(frozen=True)
class Showing:
    """Shows media every so often, and evaluates."""

    every: int = 4
    plugin_name = "media"

    @fg.hookimpl
    def register_actions(self) -> list[fg.ScheduledAction]:
        return [
            fg.ScheduledAction("show", self.every, fg.Run.emit_media),
            fg.ScheduledAction("evaluate", self.every, self.evaluate, "evaluate"),
        ]

    @fg.hookimpl
    def register_evaluations(self) -> list[fg.Evaluation]:
        return [fg.Evaluation("test", BATCHES[:2])]

    def evaluate(self, run: fg.Run) -> None:
        run.evaluate("test")


BATCHES = [
    np.random.default_rng(number).normal(size=(5, 4)).astype(np.float32) for number in range(8)
]


def fit(
    run: Path,
    *plugins: Any,
    steps: int = 8,
    logger: TensorBoardLogger | None = None,
    **arguments: Any,
) -> fg.FitResult:
    engine = fg.Engine(
        steps=steps,
        run_dir=run,
        log_every=2,
        plugins=[logger or TensorBoardLogger(), *plugins],
        autoload=False,
    )
    return engine.fit(Line, fg.DataSource(BATCHES), **arguments)


def events(run: Path, split: str) -> list[Any]:
    """All events of a split as TensorBoard reads them: files by name, checksums looked at."""
    files = sorted((run / "tensorboard" / split).glob("*tfevents*"))
    records = []
    for file in files:
        ends = [0]
        for end, event in read_events(file):
            ends.append(end)
            records.append(event)
        assert ends[-1] == file.stat().st_size
    return records


def scalars(run: Path, split: str) -> list[tuple[int, str, float]]:
    return [
        (event.step, value.tag, value.simple_value)
        for event in events(run, split)
        for value in event.summary.value
        if value.HasField("simple_value")
    ]


def test_a_full_disk_leaves_no_file_open(tmp_path: Path):
    before = os.listdir("/proc/self/fd")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            EventFile(tmp_path / "events.out.tfevents.1")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert os.listdir("/proc/self/fd") == before


def test_a_program_without_an_engine_writes_numbers(tmp_path: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = tmp_path / "a" / "board"
    values = (np.float64(1.5), jnp.bfloat16(-2), True, 3, np.ones((1, 1), np.int8), float("nan"))
    writer = TensorBoardWriter(folder, sources=("train", "test"))
    with writer:
        for step, value in enumerate(values):
            writer.scalar("loss", value, step)
        writer.scalar("loss", 7, np.int64(10), source="test")  # pyright: ignore[reportArgumentType]
        writer.flush()
    with TensorBoardWriter(folder) as again:
        again.scalar("loss", 8, 11)
        with pytest.raises(TypeError):
            again.scalar("loss", 8, 1.5)  # pyright: ignore[reportArgumentType]
    expected = {"train": [1.5, -2.0, 1.0, 3.0, 1.0, np.nan, 8.0], "test": [7.0]}
    for source, numbers in expected.items():
        read = EventAccumulator(str(folder / source)).Reload().Scalars("loss")
        np.testing.assert_equal([event.value for event in read], numbers)
        steps = [10] if source == "test" else [*range(6), 11]
        assert [event.step for event in read] == steps
    for wrong in (1j, "1", np.zeros(2), np.zeros(0), None):
        with pytest.raises(ConfigurationError, match="train/loss is .* give one real number"):
            TensorBoardWriter(folder).scalar("loss", wrong, 0)
    with pytest.raises(ConfigurationError, match="no source 'tset'. Did you mean 'test'"):
        TensorBoardWriter(folder, sources=["test"]).scalar("loss", 1, 0, source="tset")
    with pytest.raises(ConfigurationError, match="give a tuple of names"):
        TensorBoardWriter(folder, sources="train")
    with pytest.raises(StateError, match="is closed"):
        writer.scalar("loss", 1, 0)


@pytest.mark.full
def test_scalars_equal_the_history_each_once(tmp_path: Path):
    history = fit(tmp_path, Showing()).history
    for split in ("train", "test"):
        expected = [
            (record.step, name, np.float32(value))
            for record in history.records
            if record.source == split
            for name, value in record.values.items()
        ]
        assert expected and scalars(tmp_path, split) == expected
    rates = scalars(tmp_path, "telemetry=train")
    assert [(step, tag) for step, tag, _ in rates] == [
        (step, "steps_per_second") for step in (4, 6, 8)
    ]
    assert events(tmp_path, "train")[0].file_version == "brain.Event:2"


@pytest.mark.full
def test_media(tmp_path: Path):
    fit(tmp_path, Showing(), steps=4)
    values = {
        value.tag: value for event in events(tmp_path, "train") for value in event.summary.value
    }
    for index, shade in enumerate((0, 255)):
        picture = values[f"pictures/{index}"].image
        assert (picture.height, picture.width, picture.colorspace) == (2, 3, 3)
        (tmp_path / "picture.png").write_bytes(picture.encoded_image_string)
        assert (np.asarray(Image.open(tmp_path / "picture.png")) == shade).all()
    weight = np.asarray(fit(tmp_path / "b", steps=3).module.weight)
    counts, edges = np.histogram(weight, 2)
    histogram = values["weight"].histo
    assert list(histogram.bucket) == list(counts) and histogram.num == 4
    np.testing.assert_allclose(histogram.bucket_limit, edges[1:], rtol=1e-5)
    assert values["note"].tensor.string_val[0] == b"a note"
    assert values["figure"].image.width == 20


@pytest.mark.full
def test_records_of_a_plugin_are_written(tmp_path: Path):
    @dataclass(frozen=True)
    class Telling:
        @fg.hookimpl
        def on_fit_start(self, run: fg.Run) -> None:
            run.log_scalars(
                "up/down", {"each": np.array([[1.0, 2.0]]), "count": 3, "nothing": float("nan")}
            )
            run.log_media("shown", {"picture": media.Image.from_pixels(jnp.ones((2, 3)))})
            run.log_config(
                "setting",
                {"configuration": {"lr": 0.1, "name": "a", "deep": True, "sizes": [1, 2]}},
            )

    fit(tmp_path, Telling(), steps=1)
    written = scalars(tmp_path, "up%2Fdown")
    assert written[:3] == [
        (0, "each/0/0", 1.0),
        (0, "each/0/1", 2.0),
        (0, "count", 3.0),
    ] and np.isnan(written[3][2])
    (shown,) = [value for event in events(tmp_path, "shown") for value in event.summary.value]
    assert (shown.tag, shown.image.height, shown.image.width) == ("picture", 2, 3)
    tags = [value.tag for event in events(tmp_path, "setting") for value in event.summary.value]
    assert tags == ["setting"]
    assert [v.tag for event in events(tmp_path, "") for v in event.summary.value] == [
        "_hparams_/session_start_info"
    ]


@dataclass(frozen=True)
class Emitting:
    """Emits what it is given at steps 1 and 2."""

    kind: Any
    values: dict[str, Any]

    @fg.hookimpl
    def register_actions(self) -> list[fg.ScheduledAction]:
        return [
            fg.ScheduledAction(
                "emit", 1, lambda run: getattr(run, f"log_{self.kind}")("told", self.values)
            )
        ]


def by_pyplot(values: Any) -> Figure:
    figure, axes = pyplot.subplots(figsize=(1, 1), dpi=20)
    axes.plot(values)
    return figure


@pytest.mark.full
def test_unsupported_records_are_reported_once_and_the_rest_is_shown(tmp_path: Path):
    class Own(media.Text):
        pass

    class Unknown(fg.Media):
        pass

    values = np.arange(3.0)
    shown = {
        "broken": media.Figure(lambda values: 1 / 0, values),
        "none": media.Figure(lambda values: None, values),
        "unknown": Unknown(),
        "own": Own("so"),
        "figure": media.Figure(by_pyplot, values),
    }
    with pytest.warns(UserWarning, match="leaves 'told/") as warned:
        result = fit(tmp_path, Emitting("media", shown), steps=2)
    messages = sorted(str(warning.message) for warning in warned)
    assert (
        len(messages) == 3
        and "'told/broken' out, of step 1 first: ZeroDivisionError" in messages[0]
    )
    assert "NoneType, not a matplotlib" in messages[1] and "type Unknown" in messages[2]
    assert not result.failures and not pyplot.get_fignums()
    tags = [
        (event.step, value.tag)
        for event in events(tmp_path, "told")
        for value in event.summary.value
    ]
    assert tags == [(step, tag) for step in (1, 2) for tag in ("own", "figure")]


@pytest.mark.full
def test_each_source_has_its_own_directory(tmp_path: Path):
    sources = [
        "a/b",
        "a b",
        "a_b",
        "",
        "%",
        "x" * 81,
        "x" * 82,
        "語" * 90,
        "é",
        ".é",
        "telemetry=a",
    ]

    @dataclass(frozen=True)
    class Telling:
        @fg.hookimpl
        def register_actions(self) -> list[fg.ScheduledAction]:
            return [fg.ScheduledAction("tell", 1, self.tell)]

        def tell(self, run: fg.Run) -> None:
            for number, source in enumerate(sources):
                run.log_scalars(source, {"number": number})

    memory = Memory()
    fit(tmp_path, Telling(), memory, steps=4)
    assert not fit(
        tmp_path, Telling(), memory, steps=4, resume=fg.CheckpointRef(tmp_path, 3)
    ).failures
    splits = {path.name for path in (tmp_path / "tensorboard").iterdir()} - {"train"}
    tables = [scalars(tmp_path, split) for split in splits if not split.startswith("telemetry=")]
    expected = [
        [(step, "number", number) for step in (1, 2, 3, 4)] for number in range(len(sources))
    ]
    assert (
        sorted(tables, key=lambda table: table[0][2]) == expected
        and {"a%2Fb", "a%20b", "a_b", "é"} <= splits
    )


def test_text_values_that_are_not_plain_strings_are_shown(tmp_path: Path):
    assert not fit(
        tmp_path, Emitting("text", {"list": ["a", 1], "name": "caf\udce9"}), steps=1
    ).failures
    values = {
        value.tag: value for event in events(tmp_path, "told") for value in event.summary.value
    }
    assert values["list"].tensor.string_val[0] == b"['a', 1]"
    assert values["name"].tensor.string_val[0] == b"caf\\udce9"


@dataclass(eq=False)
class Memory:
    """A checkpointer that keeps what it is told in memory."""

    saved: dict[int, tuple[Any, ...]] = field(default_factory=dict)

    @fg.hookimpl
    def register_actions(self) -> list[fg.ScheduledAction]:
        return [fg.ScheduledAction("save", 3, fg.Run.save, "save")]

    @fg.hookimpl
    def save_checkpoint(self, run: fg.Run) -> None:
        positions = {
            logger.name: future.result()
            for logger, future in run.engine.plugins.hooks.flush_logger.each(0, step=run.step)
        }
        snapshot = run.snapshot()
        state = jax.tree.map(
            lambda leaf: jnp.copy(leaf) if isinstance(leaf, jax.Array) else leaf, snapshot.state
        )
        self.saved[run.step] = (state, snapshot.step_range, snapshot.data_position, positions)

    @fg.hookimpl
    def restore_checkpoint(self, resume: fg.CheckpointRef, template: fg.TrainState) -> fg.Snapshot:
        state, step_range, position, _ = self.saved[int(resume.step)]
        return fg.Snapshot(
            jax.tree.map(
                lambda leaf: jnp.copy(leaf) if isinstance(leaf, jax.Array) else leaf, state
            ),
            step_range,
            position,
        )

    @fg.hookimpl
    def on_restore(self, run: fg.Run, step: int) -> None:
        positions = self.saved[step][3]
        run.engine.plugins.hooks.rewind_logger.each(
            step, per_plugin=lambda logger: {"position": positions[logger.name]}
        )


class Killed(BaseException):
    """Ends a run on the spot."""


@dataclass(eq=False)
class Kill:
    step: int

    @fg.hookimpl
    def register_actions(self) -> list[fg.ScheduledAction]:
        return [fg.ScheduledAction("kill", fg.At(self.step), self.kill)]

    def kill(self, run: fg.Run) -> None:
        raise Killed


@pytest.mark.full
def test_resumed_twice_each_record_is_there_once(tmp_path: Path):
    """Log every 2, evaluate every 4, save every 3; ended at 5, resumed from 3; ended at 7, resumed
    from 6."""
    fit(tmp_path / "whole", Showing(), steps=10)
    run, memory = tmp_path / "run", Memory()
    for step, resumed in ((5, None), (7, 3), (None, 6)):
        kill = [] if step is None else [Kill(step)]
        arguments: dict[str, Any] = (
            {} if resumed is None else {"resume": fg.CheckpointRef(run, resumed)}
        )
        try:
            fit(run, Showing(), memory, *kill, steps=10, **arguments)
        except Killed:
            pass
    for split in ("train", "test"):
        assert scalars(run, split) == scalars(tmp_path / "whole", split)
        tags = [
            [v.tag for v in event.summary.value]
            for event in events(run, split)
            if event.HasField("summary")
        ]
        whole = [
            [v.tag for v in e.summary.value]
            for e in events(tmp_path / "whole", split)
            if e.HasField("summary")
        ]
        assert tags == whole
    starts = [
        event.step for event in events(run, "train") if event.session_log.status == 1
    ]  # START
    assert starts == [
        0,
        4,
        7,
    ]  # a server drops the steps from there on, unless it is the first START
    files = sorted(path.name for path in (run / "tensorboard" / "train").iterdir())
    assert files == [f"events.out.tfevents.{number:010d}.fulgurite" for number in (1, 2, 3)]


@pytest.mark.full
def test_files_later_than_the_checkpoint_are_set_aside(tmp_path: Path):
    """From step 3, then from step 3 again: what the second attempt wrote does not count."""
    memory = Memory()
    fit(tmp_path, memory, steps=6)
    for _ in range(2):
        fit(tmp_path, memory, steps=6, resume=fg.CheckpointRef(tmp_path, 3))
    assert [step for step, tag, _ in scalars(tmp_path, "train") if tag == "loss"] == [2, 4, 6]
    names = sorted(path.name for path in (tmp_path / "tensorboard" / "train").iterdir())
    assert names == [
        "events.out.tfevents.0000000001.fulgurite",
        "events.out.tfevents.0000000002.fulgurite",
        "events.out.tfevents.0000000003.fulgurite",
        "set-aside.0000000002",
    ]
    assert (
        tmp_path / "tensorboard" / "train" / names[1]
    ).stat().st_size == 0  # it stays for a server that reads it
    aside = [event.step for _, event in read_events(tmp_path / "tensorboard" / "train" / names[3])]
    assert aside == [0, 4, 4, 6]  # header, START, and the two records


def test_fresh_start_sets_all_files_aside(tmp_path: Path):
    for _ in range(2):
        fit(tmp_path, steps=4)
    assert [step for step, tag, _ in scalars(tmp_path, "train") if tag == "loss"] == [2, 4]


@pytest.mark.full
def test_fit_from_the_state_of_an_earlier_one_continues_after_it(tmp_path: Path):
    engine = fg.Engine(
        steps=4,
        run_dir=tmp_path,
        log_every=2,
        plugins=[TensorBoardLogger(), Showing()],
        autoload=False,
    )
    result = engine.fit(Line, fg.DataSource(BATCHES))
    result = engine.fit(data=fg.DataSource(BATCHES), state=result.state)
    assert [step for step, tag, _ in scalars(tmp_path, "train") if tag == "loss"] == [2, 4, 6, 8]
    assert sorted({step for step, *_ in scalars(tmp_path, "test")}) == [4, 8]


def damaged(change: Callable[[Path], None], tmp_path: Path) -> None:
    memory = Memory()
    fit(tmp_path, memory, steps=6)
    change(next((tmp_path / "tensorboard" / "train").iterdir()))
    fit(tmp_path, memory, steps=6, resume=fg.CheckpointRef(tmp_path, 3))


@pytest.mark.parametrize(
    "change, message",
    [
        (Path.unlink, "is missing"),
        (lambda path: path.write_bytes(path.read_bytes()[:50]), "is not the file"),
        (
            lambda path: path.write_bytes(struct.pack("<QI", 5, 0) + path.read_bytes()),
            "is not the file",
        ),
    ],
)
def test_file_unknown_to_the_checkpoint_is_an_error(change: Any, message: str, tmp_path: Path):
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(CheckpointError, match=message):
        damaged(change, tmp_path)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.variants("full")
@pytest.mark.parametrize(
    "position",
    [
        3,
        {"train": 3},
        {"../up": {}},
        {"train": {"../../victim": 0}},
        {"train": {"events.out.tfevents.0000000001.fulgurite": -1}},
        {".": {"events.out.tfevents.0000000001.fulgurite": 1}},
    ],
)
def test_invalid_position_is_an_error(position: Any, tmp_path: Path):
    memory = Memory()
    fit(tmp_path, memory, steps=3)
    memory.saved[3] = (*memory.saved[3][:3], {"tensorboard": position})
    with pytest.raises(CheckpointError, match="position of the TensorBoard log"):
        fit(tmp_path, memory, steps=6, resume=fg.CheckpointRef(tmp_path, 3))


def test_flipped_bit_is_detected(tmp_path: Path):
    file = EventFile(str(tmp_path / "a"))
    file.append(build_start_event(3))
    file.close()
    data = bytearray((tmp_path / "a").read_bytes())
    data[-6] ^= 1
    (tmp_path / "a").write_bytes(data)
    with pytest.raises(CheckpointError, match="damaged"):
        list(read_events(tmp_path / "a"))


@pytest.mark.parametrize("length", [2**62, 2**63, 2**64 - 1])
def test_a_record_longer_than_any_file_is_one_that_is_not_complete(length: int, tmp_path: Path):
    file = EventFile(tmp_path / "a")
    file.close()
    header = length.to_bytes(8, "little")
    with open(tmp_path / "a", "ab") as events:
        events.write(header + _pack_crc(header))
    assert len(list(read_events(tmp_path / "a"))) == 1


def test_a_record_that_is_no_event_is_an_error(tmp_path: Path):
    header = (4).to_bytes(8, "little")
    data = b"\xff" * 4
    (tmp_path / "a").write_bytes(header + _pack_crc(header) + data + _pack_crc(data))
    with pytest.raises(CheckpointError, match="the record that ends at byte 20 is not an event"):
        list(read_events(tmp_path / "a"))


def test_missing_run_directory_is_an_error():
    engine = fg.Engine(steps=2, plugins=[TensorBoardLogger()], autoload=False)
    with pytest.raises(ConfigurationError, match="Engine\\(run_dir="):
        engine.fit(Line, fg.DataSource(BATCHES))


def test_fast_dev_run_writes_nothing(tmp_path: Path):
    engine = fg.Engine(
        fast_dev_run=2, run_dir=tmp_path / "run", plugins=[TensorBoardLogger()], autoload=False
    )
    engine.fit(Line, fg.DataSource(BATCHES))
    assert not (tmp_path / "run").exists()


@pytest.mark.full
def test_layout_chooses_directory_and_tag(tmp_path: Path):
    """Also each value once, in a run that is resumed."""

    def join_windows(source: str, name: str) -> tuple[str, str]:
        kind, _, rest = name.partition("_")
        return (f"{source}-{kind}", rest) if rest == "loss" else (source, name)

    logger = TensorBoardLogger(layout=join_windows)
    fit(tmp_path, Checkpointer(4), steps=6, logger=logger)
    fit(tmp_path, Checkpointer(4), logger=logger, resume=4)
    whole = fit(tmp_path / "whole").history
    assert [(step, tag) for step, tag, _ in scalars(tmp_path, "train-batch")] == [
        (step, "loss") for step in (2, 4, 6, 8)
    ]
    assert [value for _, _, value in scalars(tmp_path, "train-batch")] == [
        np.float32(value) for value in whole["train/batch_loss"]
    ]
    assert {tag for _, tag, _ in scalars(tmp_path, "train")} == {"loss", "loss_average", "double"}
