"""A step is written with all that it needs to be replayed, and replayed without its data."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from captured import BAD_EXAMPLE, BAD_STEP, make_engine, read_data, write_data
from fulgurite.errors import CheckpointError, ConfigurationError, NonFiniteError
from fulgurite_cli import build_experiment, load_experiment
from fulgurite_optimizers import Freeze
from fulgurite_replay import (
    Capture,
    Recorded,
    list_captures,
    read_capture,
    replay,
    replay_capture,
)
from fulgurite_replay.capture_files import Captured, read_state, remove_oldest, write_capture
from fulgurite_replay.commands import replay as replay_command
from fulgurite_testing import TinyModel, assert_same_bits, tiny_data
from replayed import Weighted

PROGRAM = Path(__file__).parent / "captured.py"


def build(folder: Path) -> Any:
    built = build_experiment(
        load_experiment(str(PROGRAM)), [f"path={folder / 'data.npz'}"], run_dir=str(folder / "run")
    )
    built.engine.run_dir = str(folder / "run")
    return built


@pytest.fixture(scope="module")
def failed_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, NonFiniteError]:
    """Return the directory `run` of a run that failed at step 18, beside its data, and the
    error."""
    folder = tmp_path_factory.mktemp("capture")
    write_data(folder / "data.npz")
    built = build(folder)
    with pytest.raises(NonFiniteError) as caught:
        built.engine.fit(built.model, built.data())
    return folder, caught.value


def test_captured_are_the_batch_and_the_state_before_it(
    failed_run: tuple[Path, NonFiniteError],
) -> None:
    folder, error = failed_run
    batches = read_data(folder / "data.npz")
    (path,) = list_captures(folder / "run").values()
    captured = read_capture(path)
    assert (captured.step, captured.reason) == (BAD_STEP, "the loss")
    # The run that ends one step earlier, by another engine.
    engine = make_engine(steps=BAD_STEP - 1)
    expected = engine.fit(Weighted, batches).state
    # Not its own: its arrays may be those of the template.
    like = make_engine(seed=1).init_state(Weighted, batches)
    state, batch = read_state(path, captured.batch, like)
    for name in ("step", "module", "opt_state", "key", "plugin_states"):
        assert_same_bits(getattr(state, name), getattr(expected, name))
    assert batch.keys() == batches[0].keys()
    for name, array in batches[BAD_STEP - 1].items():
        np.testing.assert_array_equal(batch[name], array)
    size = sum(file.stat().st_size for file in path.rglob("*"))
    (note,) = [note for note in error.__notes__ if "captured" in note]
    start = f"step 18 (the loss) was captured for `fulgurite replay`: {path}, "
    assert note.startswith(start)
    assert 0 < int(note.removeprefix(start).split()[0].replace(",", "")) < size


@pytest.mark.full
def test_replay_of_a_capture_finds_what_the_replay_of_the_run_finds(
    failed_run: tuple[Path, NonFiniteError],
) -> None:
    folder, _ = failed_run
    path = folder / "run"
    built = build(folder)
    from_data = replay(Recorded(built.engine, built.model, built.data(), path))
    captured = replay_capture(make_engine(), Weighted, list_captures(path)[BAD_STEP])
    assert from_data.start == 10 and captured.step == from_data.step == BAD_STEP
    assert captured.failed_when_compiled
    culprits = [result.examination.culprit for result in (captured, from_data)]
    assert culprits[0] is not None and str(culprits[0]) == str(culprits[1])
    assert (culprits[0].operation, culprits[0].example) == ("sqrt", (BAD_EXAMPLE, 8))
    assert captured.source == from_data.source == [f"the batch is data[{BAD_STEP - 1}]"]


def test_command_needs_no_data_and_no_checkpoint(
    failed_run: tuple[Path, NonFiniteError], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder, _ = failed_run
    moved = (folder / "data.npz").rename(folder / "elsewhere.npz")
    try:
        arguments = [str(folder / "run"), "--program", str(PROGRAM)]
        arguments += ["--out", str(tmp_path / "batch.npz")]
        assert replay_command(arguments) == 1
        output = capsys.readouterr().out
        assert "captures/step-18\nstep 18: the loss is not finite\n  NaN made by sqrt" in output
        assert replay_command([*arguments, "--step", "17", "--from", "capture"]) == 2
        assert "no capture of step 17; captured is 18" in capsys.readouterr().err
        assert replay_command([*arguments, "--step", "0", "--from", "capture"]) == 2
        assert "no capture of step 0; captured is 18" in capsys.readouterr().err
    finally:
        moved.rename(folder / "data.npz")
    with np.load(tmp_path / "batch.npz") as batch:
        assert batch["batch.weight"][BAD_EXAMPLE] == -1


@pytest.mark.full
def test_steps_that_a_function_of_the_metrics_wants_are_captured_and_few_kept(
    tmp_path: Path,
) -> None:
    batches = [{"x": np.full((2, 1), index, np.float32)} for index in range(1, 13)]

    class Echo(fg.Module):
        w: jax.Array

        def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
            return fg.Output(batch["x"].mean() + 0 * self.w.sum())

        def configure_optimizers(self) -> Any:
            return TinyModel(key=jax.random.key(0)).configure_optimizers()

    def is_even(metrics: Mapping[str, Any]) -> bool:
        return metrics["loss"] % 2 == 0

    def iter_once() -> Iterator[Any]:
        yield from batches

    capture = Capture(on=None, when=is_even, every=5, max_to_keep=2)
    engine = fg.Engine(
        steps=12, log_every=1, autoload=False, run_dir=str(tmp_path / "run"), plugins=[capture]
    )
    result = engine.fit(Echo(jnp.ones(3)), iter_once())
    # The first of steps 1 to 5, of 6 to 10, and of 11 and 12; the earliest went.
    captures = list_captures(tmp_path / "run")
    assert sorted(captures) == [6, 12]
    steps = [text.split(" (is_even)")[0] for text in result.messages if "is_even" in text]
    assert [text[-6:].strip() for text in steps] == ["step 2", "step 6", "tep 12"]
    for step, path in captures.items():
        like = engine.init_state(Echo(jnp.ones(3)), batches)
        _, batch = read_state(path, read_capture(path).batch, like)
        assert batch["x"][0, 0] == step


def test_batches_keep_their_containers(tmp_path: Path) -> None:
    engine = fg.Engine(steps=1, autoload=False)
    state = engine.init_state(TinyModel, tiny_data())
    parts = ([np.arange(3, dtype=np.int8), None], {"b": np.ones((3, 2), np.float32)})
    batch = fg.Batch(parts, np.array([True, True, False]), spec="images")
    step_range = fg.StepRange(0, None, (4, 8))
    names = ("row 7 of the arrays", "row 2 of the arrays")
    captured = Captured(5, "test", step_range, batch, state, "the batch is data[4]", names)
    path, _ = write_capture(tmp_path, captured)
    again = read_capture(path)
    assert again.step_range == step_range
    assert (again.place, again.examples) == (captured.place, names)
    _, read = read_state(path, again.batch, state)
    assert isinstance(read, fg.Batch) and read.spec == "images"
    assert jax.tree.structure(read) == jax.tree.structure(batch)
    assert_same_bits(jax.tree.leaves(read), jax.tree.leaves(batch))


def test_names_of_examples_that_are_too_long_are_left_out(tmp_path: Path) -> None:
    state = fg.Engine(steps=1, autoload=False).init_state(TinyModel, tiny_data())
    batch = {"x": np.ones(2, np.float32)}
    captured = Captured(5, "test", fg.StepRange(0, 9), batch, state, "a batch", ("a" * 2**20,))
    again = read_capture(write_capture(tmp_path, captured)[0])
    assert (again.place, again.examples) == ("a batch", ())


class Pair(fg.Module):
    a: Any


def test_containers_that_could_not_be_read_again_are_refused(tmp_path: Path) -> None:
    state = fg.Engine(steps=1, autoload=False).init_state(TinyModel, tiny_data())
    captured = Captured(5, "test", fg.StepRange(0, 9), {"x": Pair(np.ones(2))}, state)
    with pytest.raises(ConfigurationError, match="not of Pair: without pickle"):
        write_capture(tmp_path, captured)
    assert not list_captures(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content.update(format=2),
        lambda content: content.update(step="38"),
        lambda content: content.update(step=True),
        lambda content: content.update(step_range={"start": 0, "stop": [], "epoch_ends": []}),
        lambda content: content.update(
            batch={"dict": [["x", {"shape": [2**40], "dtype": "int8"}]]}
        ),
        lambda content: content.update(
            batch={"list": [{"shape": [2**31], "dtype": "int8"} for _ in range(9)]}
        ),
        lambda content: content.update(batch={"shape": [-1], "dtype": "float32"}),
        lambda content: content.update(batch={"shape": [1], "dtype": "O"}),
        lambda content: content.update(batch={"shape": [1], "dtype": "float32,float32"}),
        lambda content: content.update(batch={"batch": {"dict": [["a", None]]}, "spec": None}),
        lambda content: content.update(batch={"dict": [[1, 2, 3]]}),
        lambda content: content.update(place=["data[3]"]),
        lambda content: content.update(examples="row 3"),
        lambda content: content.update(examples=[3]),
        lambda content: content.clear(),
    ],
)
def test_file_that_was_altered_is_refused(tmp_path: Path, change: Any) -> None:
    write_json(tmp_path, change)
    with pytest.raises(CheckpointError, match="is not a capture that can be read"):
        read_capture(tmp_path)


def write_json(folder: Path, change: Any) -> None:
    content = {
        "format": 1,
        "step": 38,
        "reason": "the loss",
        "step_range": {"start": 0, "stop": 50, "epoch_ends": []},
        "batch": {"dict": [["x", {"shape": [2], "dtype": "float32"}]]},
    }
    change(content)
    (folder / "capture.json").write_text(json.dumps(content))


def test_file_that_is_no_file_or_too_large_is_refused(tmp_path: Path) -> None:
    write_json(tmp_path, lambda content: None)
    assert read_capture(tmp_path).batch["x"].shape == (2,)
    file = tmp_path / "capture.json"
    file.rename(tmp_path / "other.json")
    file.symlink_to(tmp_path / "other.json")
    with pytest.raises(CheckpointError, match="is not a capture"):
        read_capture(tmp_path)
    file.unlink()
    file.write_text(" " * (2**20 + 1))
    with pytest.raises(CheckpointError, match="more than 1,048,576 bytes"):
        read_capture(tmp_path)


def test_byte_that_changed_in_an_array_is_noticed(tmp_path: Path) -> None:
    state = fg.Engine(steps=1, autoload=False).init_state(TinyModel, tiny_data())
    captured = Captured(5, "test", fg.StepRange(0, 9), {"x": np.ones(2, np.float32)}, state)
    path, _ = write_capture(tmp_path, captured)
    largest = max((path / "state").rglob("*"), key=lambda file: file.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 1
    largest.write_bytes(data)
    with pytest.raises(CheckpointError):
        read_state(path, captured.batch, state)


@pytest.mark.full
def test_capture_that_could_write_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="captures nothing: give when="):
        Capture(on=None)
    with pytest.raises(ConfigurationError, match="on is 'nonfinite' or None"):
        Capture(on="nan")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="max_to_keep is 0"):
        Capture(max_to_keep=0)
    with pytest.raises(ConfigurationError, match="no place to write to"):
        fg.Engine(steps=1, autoload=False, plugins=[Capture()]).fit(TinyModel, tiny_data())
    engine = fg.Engine(
        steps=1,
        autoload=False,
        plugins=[Capture()],
        run_dir=str(tmp_path / "run"),
        on_nonfinite="skip",
    )
    with pytest.raises(ConfigurationError, match="with on_nonfinite='skip' none does"):
        engine.fit(TinyModel, tiny_data())


def test_captured_is_the_state_that_an_action_has_put_in_place_of_another(tmp_path: Path) -> None:
    states: dict[int, fg.TrainState] = {}

    class Replacing(fg.Plugin):
        @fg.hookimpl
        def register_actions(self) -> list[fg.ScheduledAction]:
            return [
                fg.ScheduledAction("begin", fg.AtStart(), self.double),
                fg.ScheduledAction("double", fg.At(3, 5), self.double),
                fg.ScheduledAction("keep", 1, self.keep, stage="save"),
            ]

        def double(self, run: fg.Run) -> fg.ReplaceState:
            state = run.state
            doubled = jax.tree.map(lambda leaf: 2 * leaf, state.module)
            return fg.ReplaceState(state.replace(module=doubled))

        def keep(self, run: fg.Run) -> None:
            states[run.step] = jax.tree.map(jnp.copy, run.state)

    wanted = {2: True, 7: True}
    engine = fg.Engine(
        steps=8,
        log_every=1,
        autoload=False,
        run_dir=str(tmp_path / "run"),
        plugins=[
            Replacing(),
            Capture(on=None, when=lambda metrics: wanted.pop(len(states) + 1, False)),
        ],
    )
    engine.fit(TinyModel, tiny_data())
    captures = list_captures(tmp_path / "run")
    assert sorted(captures) == [2, 7]
    for step, path in captures.items():
        like = engine.init_state(TinyModel, tiny_data())
        state, _ = read_state(path, read_capture(path).batch, like)
        assert_same_bits(state.module, states[step - 1].module)
        assert_same_bits(state.opt_state, states[step - 1].opt_state)


def test_a_step_whose_state_was_replaced_before_its_metrics_were_logged_is_captured(
    tmp_path: Path,
) -> None:
    class Replacing(fg.Plugin):
        @fg.hookimpl
        def register_actions(self) -> list[fg.ScheduledAction]:
            return [fg.ScheduledAction("replace", fg.At(5), self.replace, stage="decide")]

        def replace(self, run: fg.Run) -> fg.ReplaceState:
            return fg.ReplaceState(run.state)

    seen_metrics: list[Any] = []

    def is_fifth(metrics: Mapping[str, Any]) -> bool:
        seen_metrics.append(metrics)
        return len(seen_metrics) == 5

    plugins = [Replacing(), Capture(on=None, when=is_fifth)]
    engine = fg.Engine(
        steps=8, log_every=1, autoload=False, run_dir=str(tmp_path / "run"), plugins=plugins
    )
    engine.fit(TinyModel, tiny_data())
    assert list(list_captures(tmp_path / "run")) == [5]


def test_a_rule_that_waits_for_an_epoch_is_captured(tmp_path: Path) -> None:
    plugins = [
        Freeze("linear.bias", until=fg.EveryEpoch(1)),
        Capture(on=None, when=lambda metrics: True),
    ]
    engine = fg.Engine(
        epochs=2, log_every=1, autoload=False, run_dir=str(tmp_path / "run"), plugins=plugins
    )
    result = engine.fit(TinyModel, tiny_data())
    assert list_captures(tmp_path / "run") and not result.failures


def test_a_step_that_cannot_be_written_is_told_and_training_continues(tmp_path: Path) -> None:
    keys = jax.random.split(jax.random.key(0), 4)

    class Keyed(TinyModel):
        def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
            return super().training_step(batch["numbers"], ctx)

    batches = [{"numbers": batch, "keys": keys} for batch in tiny_data()][:2]
    engine = fg.Engine(
        steps=2,
        log_every=1,
        autoload=False,
        run_dir=str(tmp_path / "run"),
        plugins=[Capture(on=None, when=lambda metrics: True)],
    )
    with pytest.warns(UserWarning, match="step 1 was not captured"):
        result = engine.fit(Keyed, batches)
    assert "consists of numbers, not of key<fry>" in result.failures["capture"]
    assert not list_captures(tmp_path / "run")


def test_the_captures_that_were_written_first_go(tmp_path: Path) -> None:
    state = fg.Engine(steps=1, autoload=False).init_state(TinyModel, tiny_data())
    (tmp_path / "captures" / ".step-9.new").mkdir(parents=True)  # of a process that was killed
    for step in (25, 30, 5, 30):
        captured = Captured(step, "test", fg.StepRange(0, 40), np.ones(2), state)
        path, _ = write_capture(tmp_path, captured)
        remove_oldest(tmp_path, 2)
        assert path.is_dir()
    assert sorted(list_captures(tmp_path)) == [5, 30]
    assert len(list((tmp_path / "captures").iterdir())) == 2


@pytest.mark.full
def test_source_that_writes_into_the_same_arrays_is_noticed(tmp_path: Path) -> None:
    def iter_batches() -> Iterator[Any]:
        batch = {key: array[:4].copy() for key, array in tiny_data().arrays.items()}
        for step in range(1, 9):
            batch["x"][...] = np.inf if step == 3 else step
            yield batch

    engine = fg.Engine(
        steps=8, autoload=False, plugins=[Capture()], run_dir=str(tmp_path / "run"), log_every=8
    )
    with pytest.raises(NonFiniteError) as caught:
        engine.fit(TinyModel, fg.DataSource(iter_batches(), prefetch=0))
    assert not list_captures(tmp_path / "run")
    assert any("was not captured: executed again" in text for text in caught.value.__notes__)
