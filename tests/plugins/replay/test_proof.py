"""What a run recorded is compared with what its steps compute again."""

import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import equinox as eqx
import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fulgurite.errors import CheckpointError, ConfigurationError
from fulgurite_averaging import EMA, Average
from fulgurite_checkpoint import Checkpointer, restore_state, save_state
from fulgurite_optimizers import GradientAccumulation
from fulgurite_replay import (
    Recorded,
    StateDigest,
    bisect,
    digest_state,
    read_digests,
    verify,
)
from fulgurite_runs import dumps, loads
from fulgurite_testing import TinyModel, tiny_data


class Shift:
    """Changes the bias at step 6, which is digested, and at step 8, which is saved."""

    @fg.hookimpl
    def register_actions(self) -> list[fg.ScheduledAction]:
        return [fg.ScheduledAction("shift", fg.At(6, 8), self.shift)]

    def shift(self, run: fg.Run) -> fg.ReplaceState:
        bias = run.state.module.linear.bias + 1
        return fg.ReplaceState(eqx.tree_at(lambda state: state.module.linear.bias, run.state, bias))


def make_engine(run_dir: Path, *plugins: Any, steps: int = 12, **saving: Any) -> fg.Engine:
    """Return an engine for 12 steps that saves, logs, digests, averages and changes the state."""
    options: dict[str, Any] = {"every": 4, "max_to_keep": None} | saving
    return fg.Engine(
        steps=steps,
        log_every=2,
        run_dir=str(run_dir),
        autoload=False,
        plugins=[
            Checkpointer(**options),
            "jsonl",
            StateDigest(every=3),
            Average(EMA(0.9)),
            Shift(),
            *plugins,
        ],
    )


def make_recorded(
    run_dir: Path, data: Any = None, *plugins: Any, steps: int = 12, **saving: Any
) -> Recorded:
    engine = make_engine(run_dir, *plugins, steps=steps, **saving)
    return Recorded(engine, TinyModel, data or tiny_data(), run_dir)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a run of 12 steps."""
    path = tmp_path_factory.mktemp("proof") / "run"
    make_engine(path).fit(TinyModel, tiny_data())
    return path


def list_files(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_an_untouched_run_is_equal_and_stays_as_it_is(run_dir: Path) -> None:
    before = list_files(run_dir)
    proof = verify(make_recorded(run_dir), 5)
    assert proof.is_equal
    assert (proof.start, proof.stop) == (4, 12)
    # Records at 6, 8, 10 and 12, digests at 6, 9 and 12, checkpoints at 8 and 12.
    assert proof.counts == {"records": 4, "digests": 3, "checkpoints": 2}
    assert list_files(run_dir) == before


@pytest.mark.full
def test_an_altered_record_and_a_flipped_bit_are_found_with_their_steps(
    run_dir: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(run_dir, run)
    lines = (run / "records.jsonl").read_text().splitlines(keepends=True)
    index = next(index for index, line in enumerate(lines) if '"step":6' in line.replace(" ", ""))
    lines[index] = lines[index].replace('"accuracy"', '"accuracy2"')
    (run / "records.jsonl").write_text("".join(lines))
    engine = make_engine(tmp_path / "unused")
    saved = run / "checkpoints" / "step-8"
    state = restore_state(saved, like=engine.init_state(TinyModel, tiny_data()))
    bits = np.array(state.module.linear.weight).view(np.uint32)
    bits[1, 2] ^= 1 << 7
    weight = jnp.asarray(bits.view(np.float32))
    state = eqx.tree_at(lambda state: state.module.linear.weight, state, weight)
    shutil.rmtree(saved)
    save_state(state, tmp_path / "flipped")
    shutil.copytree(tmp_path / "flipped" / "checkpoints" / "step-8", saved)
    proof = verify(make_recorded(run), 4)
    record, checkpoint = proof.differences
    assert (record.step, record.source) == (6, "records")
    assert "train/accuracy" in record.text
    assert (checkpoint.step, checkpoint.source) == (8, "checkpoint")
    assert "module.linear.weight" in checkpoint.text
    assert str(proof).startswith("steps 5 to 12 are not as recorded")


def replace_number(line: str) -> str:
    values = loads(line)
    values["values"]["loss"] += 1e-6
    return dumps(values)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (replace_number, "step 6: train/loss is "),
        (lambda line: "garbage", r"step 4: .*records.jsonl, line 3: no record"),
        (lambda line: line[:20], r"step 4: .*records.jsonl, line 3: no record"),
        (lambda line: line.replace('"step":6', '"step":5'), "step 5: the step gives no record"),
        (lambda line: line.replace('"train"', '"test"'), "step 6: the step gives no .*'test'"),
        (lambda line: f"{line}\n{line}", "step 6: the step gives no record of 'train'"),
        (lambda line: None, "step 6: the run has no record of 'train' with "),
    ],
)
def test_altered_line_of_the_records_is_found(
    run_dir: Path, tmp_path: Path, edit: Any, message: str
) -> None:
    run = tmp_path / "run"
    shutil.copytree(run_dir, run)
    path = run / "records.jsonl"
    lines = path.read_text().splitlines()
    assert [loads(line)["step"] for line in lines] == [2, 4, 6, 8, 10, 12]
    edited = [edit(line) if index == 2 else line for index, line in enumerate(lines)]
    path.write_text("\n".join(line for line in edited if line is not None) + "\n")
    proof = verify(make_recorded(run), 4, 8)
    (difference,) = proof.differences
    assert difference.source == "records" and re.match(message, str(difference))


class AtBegin:
    """Logs a number before the first step, and one a quarter of the way."""

    @fg.hookimpl
    def register_actions(self) -> list[fg.ScheduledAction]:
        triggers = {"begin": fg.AtStart(), "parts": fg.EvenlySpaced(4)}
        return [fg.ScheduledAction(name, each, self.log) for name, each in triggers.items()]

    def log(self, run: fg.Run) -> None:
        run.log_scalars("mine", {"value": 1.0})


@pytest.mark.filterwarnings("ignore:.*may not be exact. data was")
@pytest.mark.parametrize(
    ("saving", "counts"),
    [
        ({"every": fg.AtStart() | fg.Every(4)}, {"records": 10, "digests": 4, "checkpoints": 3}),
        ({"weights_only": True}, {"records": 11, "digests": 4, "checkpoints": 3}),
        ({"weights_only": fg.select("linear")}, {"records": 11, "digests": 4, "checkpoints": 3}),
        (
            {"monitor": "train/loss", "mode": "min"},
            {"records": 11, "digests": 4, "checkpoints": 3},
        ),
    ],
)
def test_run_is_equal_whatever_it_saves(
    tmp_path: Path, saving: dict[str, Any], counts: dict[str, int]
) -> None:
    run = tmp_path / "run"
    make_engine(run, AtBegin(), **saving).fit(TinyModel, tiny_data())
    proof = verify(make_recorded(run, None, AtBegin(), **saving))
    assert proof.is_equal, proof
    # Six of training, four of quarters, and one of the begin, which is before a checkpoint of it.
    assert proof.counts == counts
    data = tiny_data()
    reordered = fg.ArrayData(data.arrays, 4, shuffle=True, seed=1)
    sources = {each.source for each in verify(make_recorded(run, reordered, **saving)).differences}
    assert sources == {"records", "digests", "checkpoint"}


@pytest.mark.parametrize(
    ("lengths", "back_to", "max_to_keep"),
    [
        ([6, 12], None, 1),
        pytest.param([6, 12, 10], 4, None, marks=pytest.mark.slow),
        pytest.param([12, 8], 4, None, marks=pytest.mark.full),
        pytest.param([6, 9, 12], None, None, marks=pytest.mark.slow),
    ],
)
def test_run_that_was_made_longer_or_shorter_is_equal(
    tmp_path: Path, lengths: list[int], back_to: int | None, max_to_keep: int | None
) -> None:
    """At each end that it had, it updated the weights by the gradients that were left."""
    run = tmp_path / "run"
    plugins = [GradientAccumulation(4, mode="steps"), AtBegin()]
    saving: dict[str, Any] = {"max_to_keep": max_to_keep}
    for number, steps in enumerate(lengths):
        is_last = number == len(lengths) - 1
        resume = back_to if is_last and back_to is not None else "auto"
        engine = make_engine(run, *plugins, steps=steps, **saving)
        engine.fit(TinyModel, tiny_data(), resume=resume)
    recorded = make_recorded(run, None, *plugins, steps=lengths[-1], **saving)
    whole = verify(recorded)
    assert whole.is_equal and (whole.start, whole.stop) == (0, lengths[-1]), whole
    part = verify(recorded, 3, 6)
    assert part.is_equal and part.stop == 6, part


def test_run_that_does_not_say_where_it_was_made_longer_is_refused(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "attempts").mkdir(parents=True)
    for number, steps in enumerate((6, 12), 1):
        manifest = {"settings": {"steps": steps, "epochs": None}}
        (run / "attempts" / str(number)).write_text(dumps(manifest))
    with pytest.raises(
        ConfigurationError, match="where attempt 2 of .* began, it was made longer or shorter"
    ):
        verify(make_recorded(run), 0, 12)


def test_another_batch_order_is_found_at_the_first_step_that_was_recorded(run_dir: Path) -> None:
    data = tiny_data()
    reordered = fg.ArrayData(data.arrays, 4, shuffle=True, seed=1)
    proof = verify(make_recorded(run_dir, reordered), 0, 4)
    assert [difference.step for difference in proof.differences][:2] == [2, 3]


@pytest.mark.full
def test_steps_that_the_run_does_not_have_are_refused(run_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="there are no steps 8:8"):
        verify(make_recorded(run_dir), 8, 8)
    with pytest.raises(CheckpointError, match="holds no checkpoint: name the last step"):
        verify(make_recorded(tmp_path / "none"))
    with pytest.raises(ConfigurationError, match="the run has 12 steps, so that it cannot"):
        verify(make_recorded(run_dir), 8, 13)


def write_digests(
    run: Path, digests: dict[int, dict[str, str]], attempts: Sequence[int] = (1, 1, 1)
) -> None:
    run.mkdir()
    lines = [
        dumps({"step": step, "attempt": attempt, "digests": digests[step]})
        for step, attempt in zip(digests, attempts, strict=False)
    ]
    (run / "digests.jsonl").write_text("\n".join(lines) + "\n")


def test_bisect_names_the_first_step_and_array_that_differ(tmp_path: Path) -> None:
    good, bad = tmp_path / "good", tmp_path / "bad"
    write_digests(good, {10: {"a": "0", "b": "1"}, 20: {"a": "2", "b": "3"}, 25: {}})
    write_digests(bad, {10: {"a": "0", "b": "1"}, 20: {"a": "2", "b": "4", "c": "5"}, 30: {}})
    assert str(bisect(good, bad)) == "equal at step 10, different at step 20: b and 1 more"
    assert str(bisect(good, good)) == "equal at all 3 steps, the last of them 25"
    write_digests(tmp_path / "short", {5: {}})
    with pytest.raises(ConfigurationError, match="have no digests of a common step"):
        bisect(good, tmp_path / "short")


@pytest.mark.parametrize(
    ("starts", "steps"),
    [
        ([0], [10, 20, 30]),
        ([0, 10], [10, 20, 30]),  # the second attempt wrote those after 10
        ([0, 10, 15], [10]),
        ([0, 10, 20], [10, 20]),
        ([0, 10, 30, 10], [10]),
        ([0, None, None], [10, 20, 30]),  # a version that did not note them
        ([0, 10, 0], []),
    ],
)
def test_digests_of_steps_that_a_run_has_given_up_do_not_count(
    tmp_path: Path, starts: list[int | None], steps: list[int]
) -> None:
    run = tmp_path / "run"
    write_digests(run, {10: {"a": "0"}, 20: {"a": "1"}, 30: {"a": "2"}}, [1, 2, 2])
    (run / "attempts").mkdir()
    for number, start in enumerate(starts, 1):
        (run / "attempts" / str(number)).write_text(dumps({"start_step": start}))
    assert list(read_digests(run)) == steps


def test_digests_of_a_run_are_those_of_its_states_and_survive_a_line_cut_off(
    run_dir: Path, tmp_path: Path
) -> None:
    digests = read_digests(run_dir)
    assert list(digests) == [3, 6, 9, 12]
    engine = make_engine(tmp_path / "unused")
    like = engine.init_state(TinyModel, tiny_data())
    state = restore_state(run_dir / "checkpoints" / "step-12", like=like)
    assert digest_state(state) == digests[12]
    assert "module.linear.weight" in digests[12]
    text = (run_dir / "digests.jsonl").read_text()
    cut = tmp_path / "cut"
    cut.mkdir()
    lines = text.splitlines()
    (cut / "digests.jsonl").write_text("\n".join([lines[0], lines[1][:40], *lines[2:]]))
    assert list(read_digests(cut)) == [3, 9, 12]


def test_digests_with_a_line_cut_off_anywhere_are_read(tmp_path: Path) -> None:
    line = dumps({"step": 2, "attempt": 1, "digests": {'a["x}"]': "0", "b": "1"}})
    others = [line.replace('"step":2', f'"step":{step}') for step in (1, 3)]
    for length in range(len(line)):
        cut = [others[0], line[:length], others[1]]
        (tmp_path / "digests.jsonl").write_text("\n".join(cut) + "\n")
        assert list(read_digests(tmp_path)) == [1, 3], line[:length]


@pytest.mark.parametrize("line", ["garbage", "[1]", '{"step": 2}}', '{"step": 2, "digests": 3}'])
def test_damaged_line_of_digests_is_an_error(tmp_path: Path, line: str) -> None:
    whole = dumps({"step": 1, "attempt": 1, "digests": {"a": "0"}})
    (tmp_path / "digests.jsonl").write_text(f"{whole}\n{line}\n{whole}\n")
    with pytest.raises(CheckpointError, match="line 2 is not a line of StateDigest"):
        read_digests(tmp_path)


@pytest.mark.parametrize(
    "dtype", ["float32", "bfloat16", "float16", "float8_e4m3fn", "int8", "uint16", "int32", "bool"]
)
def test_each_flipped_bit_changes_the_digest(dtype: str) -> None:
    array = np.zeros(5, jnp.dtype(dtype)) + np.arange(5).astype(jnp.dtype(dtype))
    base = make_digest(array)
    assert make_digest(array.copy()) == base
    size = array.dtype.itemsize
    for bit in [0] if dtype == "bool" else range(8 * size):
        flipped = array.copy()
        raw = flipped.view(np.uint8)
        raw[3 * size + bit // 8] ^= 1 << (bit % 8)
        assert make_digest(flipped) != base, bit
    # The same numbers in other places.
    assert make_digest(np.roll(np.arange(5), 1)) != make_digest(np.arange(5))


def make_digest(array: np.ndarray) -> str:
    """Return the digest of an array, as the weight of a module."""
    nothing: Any = None
    module = {"weight": jnp.asarray(array)}
    state = fg.TrainState(nothing, module, None, None, jax.random.key(0), nothing, nothing, {})
    return next(value for path, value in digest_state(state).items() if "weight" in path)


@pytest.mark.parametrize("attempt", [[], {}, "1", True, 1.0])
def test_a_line_of_digests_whose_attempt_is_not_a_number_is_an_error(
    tmp_path: Path, attempt: Any
) -> None:
    path = tmp_path / "digests.jsonl"
    lines = [{"step": 1, "attempt": 1, "digests": {"a": "0"}}, {"step": 2, "digests": {"a": "1"}}]
    path.write_text("".join(f"{dumps(line)}\n" for line in lines))
    assert read_digests(tmp_path) == {1: {"a": "0"}, 2: {"a": "1"}}
    with path.open("a") as file:
        file.write(f"{dumps({'step': 3, 'attempt': attempt, 'digests': {}})}\n")
    with pytest.raises(CheckpointError, match="line 3.*an attempt that is not a number"):
        read_digests(tmp_path)
