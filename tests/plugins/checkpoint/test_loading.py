"""The model of a run without an engine, and a checkpointer without an interval."""

from functools import partial
from pathlib import Path
from typing import Any

import equinox as eqx
import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fulgurite.errors import CheckpointError, ConfigurationError, ModelError
from fulgurite_checkpoint import Checkpointer, load, save_weights
from fulgurite_evaluators import Evaluator
from trained import NET, Average, Counting, regression

WEIGHT = np.asarray([[1.5, -2, 0.25]], np.float32)


class Head(fg.Module):
    """A body and a head of some width, whose weights do not depend on training."""

    body: jax.Array
    head: jax.Array
    count: jax.Array

    def __init__(self, *, key: Any, width: int = 2, dtype: Any = jnp.float32) -> None:
        self.body = jnp.zeros((1, 3), dtype)
        self.head = jax.random.normal(key, (width,), dtype)
        self.count = jnp.zeros((), jnp.int32)

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(0.1)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Weights of a `Head` of width 2, at step 7."""
    module = Head(key=jax.random.key(1))
    module = eqx.tree_at(lambda head: (head.body, head.head), module, (WEIGHT, np.ones(2)))
    module = eqx.tree_at(lambda head: head.count, module, 5)
    module = jax.tree.map(
        lambda new, old: jnp.asarray(new, old.dtype), module, Head(key=jax.random.key(1))
    )
    none: Any = None
    state = fg.TrainState(jnp.int32(7), module, none, none, jax.random.key(0), none, none, {})
    save_weights(state, tmp_path / "head")
    return tmp_path / "head"


@pytest.mark.full
def test_the_model_of_a_run_is_loaded_with_its_state_bit_for_bit(tmp_path: Path) -> None:
    engine = fg.Engine(steps=2, run_dir=tmp_path, plugins=[Checkpointer(), Average()])
    result = engine.fit(NET, regression())
    for path, step in (
        (tmp_path, "latest"),
        (tmp_path, 2),
        (tmp_path / "checkpoints/step-2", "latest"),
    ):
        module, state = load(path, step, model=NET)  # type: ignore[arg-type]
        expected = result.module, result.state.model_state
        assert eqx.tree_equal((module, state), expected)
    with pytest.raises(CheckpointError, match="no checkpoint of step 5 .*There is: 2"):
        load(tmp_path, 5, model=NET)
    with pytest.raises(CheckpointError, match="by which metric"):
        load(tmp_path, "best", model=NET)
    with pytest.raises(CheckpointError, match="there is no run in .*nowhere"):
        load(tmp_path / "nowhere", model=NET)
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="there is no checkpoint in .*empty"):
        load(tmp_path / "empty", model=NET)
    bad: Any = "newest"
    with pytest.raises(ConfigurationError, match="step is 'newest'"):
        load(tmp_path, bad, model=NET)
    with pytest.raises(ModelError, match="has layers that keep state"):
        load(tmp_path, model=result.module)


@pytest.mark.full
def test_the_best_checkpoint_is_loaded_by_its_metric(tmp_path: Path) -> None:
    def measure(state: fg.TrainState, step: int) -> dict[str, Any]:
        return {"score": {1: 0.5, 2: 3.0, 3: 1.0}[step]}

    evaluator = Evaluator("test", fn=measure, every=1)
    saver = Checkpointer(every=1, monitor="test/score", mode="max")
    fg.Engine(steps=3, run_dir=tmp_path, plugins=[evaluator, saver]).fit(
        Counting, [(np.zeros(2, np.float32),)]
    )
    assert float(load(tmp_path, "best", model=Counting).weight) == -2
    assert float(load(tmp_path, model=Counting).weight) == -3
    # Nobody knows how good one was whose commit is damaged.
    (tmp_path / "checkpoints" / "step-1" / "COMMIT").write_text("{}")
    with pytest.raises(CheckpointError, match="is not known, because that of step 1 is damaged"):
        load(tmp_path, "best", model=Counting)
    assert float(load(tmp_path, 2, model=Counting).weight) == -2


@pytest.mark.full
def test_another_head_keeps_what_the_model_makes_and_is_listed(run: Path) -> None:
    wide = partial(Head, width=3)
    with pytest.raises(
        CheckpointError,
        match=r"(?s)does not fit Head.*module.head: saved float32\[2\], wanted float32\[3\].*strict=False",
    ):
        load(run, model=wide)
    with pytest.warns(
        UserWarning, match=r"(?s)fits Head in part.*\n  module.head: saved float32\[2\]"
    ):
        module = load(run, model=wide, strict=False)
    np.testing.assert_array_equal(module.body, WEIGHT)
    np.testing.assert_array_equal(module.head, Head(key=jax.random.key(0), width=3).head)
    assert int(module.count) == 5
    head = Head(key=jax.random.key(9), width=3)
    with pytest.warns(UserWarning, match="in part"):
        module = load(run, model=head, strict=False)
    np.testing.assert_array_equal(module.head, head.head)
    np.testing.assert_array_equal(head.body, np.zeros((1, 3)))


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_another_dtype_of_the_model_is_cast_and_listed_if_not_strict(run: Path, dtype: str) -> None:
    half = partial(Head, dtype=jnp.dtype(dtype))
    with pytest.raises(
        CheckpointError, match=rf"module.body: saved float32\[1, 3\], wanted {dtype}"
    ):
        load(run, model=half)
    with pytest.warns(UserWarning, match=rf"wanted {dtype}\[1, 3\], and cast"):
        module = load(run, model=half, strict=False)
    assert module.body.dtype == dtype
    np.testing.assert_array_equal(module.body, WEIGHT.astype(module.body.dtype))


def test_what_is_not_a_cast_of_floating_point_numbers_stays(run: Path) -> None:
    class Other(fg.Module):
        body: jax.Array
        count: jax.Array
        new: jax.Array

    other = Other(jnp.zeros((1, 3), jnp.complex64), jnp.full((), 2, jnp.int8), jnp.ones(2))
    with pytest.raises(CheckpointError, match="(?s)nothing of .* fits Other:.*module.new: saved"):
        load(run, model=other, strict=False)
    fitting = eqx.tree_at(lambda other: other.body, other, jnp.zeros((1, 3)))
    with pytest.warns(UserWarning, match=r"(?s)module.head: saved float32\[2\], wanted nothing"):
        module = load(run, model=fitting, strict=False)
    np.testing.assert_array_equal(module.body, WEIGHT)
    assert int(module.count) == 2 and module.new.tolist() == [1, 1]


def test_a_number_that_the_dtype_cannot_hold_is_an_error(tmp_path: Path) -> None:
    class Large(fg.Module):
        weight: jax.Array

    none: Any = None
    module = Large(jnp.asarray([1e6, -jnp.inf, 2.0]))
    state = fg.TrainState(jnp.int32(1), module, none, none, jax.random.key(0), none, none, {})
    save_weights(state, tmp_path / "large")
    with pytest.raises(
        CheckpointError, match="1 numbers of module.weight .* too large for float16"
    ):
        load(tmp_path / "large", model=Large(jnp.zeros(3, jnp.float16)), strict=False)
    with pytest.warns(UserWarning, match="and cast"):
        cast = load(tmp_path / "large", model=Large(jnp.zeros(3, jnp.bfloat16)), strict=False)
    assert np.asarray(cast.weight, np.float32).tolist() == [999424.0, -np.inf, 2.0]


@pytest.mark.full
def test_a_damaged_newest_checkpoint_is_replaced_by_the_one_before(tmp_path: Path) -> None:
    fg.Engine(steps=2, run_dir=tmp_path, plugins=[Checkpointer(1)]).fit(
        Counting, [(np.zeros(2, np.float32),)]
    )
    (tmp_path / "checkpoints" / "step-2" / "index.json").write_text("{}")
    with pytest.warns(UserWarning, match="step 2 is damaged.*step 1 is used instead"):
        assert float(load(tmp_path, model=Counting).weight) == -1


def test_a_checkpointer_without_an_interval_saves_at_the_end_and_monitors_nothing(
    tmp_path: Path,
) -> None:
    fg.Engine(steps=3, run_dir=tmp_path, plugins=[Checkpointer()]).fit(
        Counting, [(np.zeros(2, np.float32),)]
    )
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-3"]
    assert Checkpointer().every == fg.EverySeconds(600)
    with pytest.raises(ConfigurationError, match="monitor is 'test/loss', and without every="):
        Checkpointer(monitor="test/loss")


@pytest.mark.full
def test_home_in_paths_of_checkpoints_is_expanded_and_steps_of_numpy_are_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    data = [(np.zeros(2, np.float32),)]
    int64: Any = np.int64
    saver = Checkpointer(int64(2), directory="$HOME/saved", max_to_keep=int64(2))
    engine = fg.Engine(steps=int64(4), plugins=[saver])
    result = engine.fit(Counting, data)
    folder = tmp_path / "home" / "saved" / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == ["step-2", "step-4"]
    assert float(load("~/saved", int64(2), model=Counting).weight) == -2
    assert float(load("~/saved/checkpoints/step-2", model=Counting).weight) == -2
    more = engine.fit(Counting, data, steps=5, resume=int64(2))
    assert float(more.module.weight) == -5
    save_weights(result, "~/weights")
    assert float(load(tmp_path / "home" / "weights", model=Counting).weight) == -4
    state = engine.load_weights(Counting, fg.CheckpointRef("~/weights", int64(4)))
    assert float(state.module.weight) == -4
    assert sorted(path.name for path in tmp_path.iterdir()) == ["home"]


@pytest.mark.full
def test_a_run_resumes_below_a_folder_with_a_dollar_in_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_SUCH_NAME", raising=False)
    folder = tmp_path / "costs $NO_SUCH_NAME"
    folder.mkdir()
    monkeypatch.chdir(folder)
    data = [(np.zeros(2, np.float32),)]
    for steps in (2, 4):
        engine = fg.Engine(steps=steps, run_dir="run", plugins=[Checkpointer(2)])
        engine.fit(Counting, data, resume="auto")
    assert sorted(path.name for path in (folder / "run" / "checkpoints").iterdir()) == [
        "step-2",
        "step-4",
    ]
    assert float(load(folder / "run", model=Counting).weight) == -4
