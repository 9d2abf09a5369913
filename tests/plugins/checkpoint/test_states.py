"""The state of a loop of one's own, saved and continued bit for bit."""

from pathlib import Path
from typing import Any

import equinox as eqx
import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fulgurite.errors import CheckpointError, ConfigurationError, StateError
from fulgurite_checkpoint import Checkpointer, restore_state, save_state, save_weights
from fulgurite_cli.command import main
from trained import NET, Average, regression

pytestmark = pytest.mark.full

BATCHES = list(regression())[:4]


def make_engine(**options: Any) -> fg.Engine:
    return fg.Engine(steps=4, plugins=[Average()], autoload=False, **options)


def run_steps(engine: fg.Engine, state: fg.TrainState, batches: list[Any]) -> fg.TrainState:
    for batch in batches:
        state, _ = engine.step(state, batch)
    return state


def get_bits(state: Any) -> list[Any]:
    leaves = jax.tree.leaves(eqx.filter(state, eqx.is_array))
    is_key = [jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) for leaf in leaves]
    return [
        np.asarray(jax.random.key_data(leaf) if key else leaf).tobytes()
        for leaf, key in zip(leaves, is_key, strict=True)
    ]


def test_a_loop_that_restores_its_state_ends_with_the_same_bits(tmp_path: Path) -> None:
    engine = make_engine()
    whole = run_steps(engine, engine.init_state(NET, BATCHES), BATCHES)
    half = run_steps(engine, engine.init_state(NET, BATCHES), BATCHES[:2])
    save_state(half, tmp_path / "states" / "2")
    saved, saved_module = get_bits(half), get_bits(half.module)
    other = make_engine()
    like = other.init_state(NET, BATCHES)
    continued = restore_state(tmp_path / "states" / "2", like=like)
    assert get_bits(continued) == saved
    assert int(continued.step) == 2 and continued.opt_state is not None
    assert get_bits(run_steps(other, continued, BATCHES[2:])) == get_bits(whole)
    # What was saved, and what it was continued like, stay usable.
    assert get_bits(run_steps(engine, half, BATCHES[2:])) == get_bits(whole)
    assert int(run_steps(other, like, BATCHES[:1]).step) == 1
    with pytest.raises(StateError, match="this train state was consumed"):
        save_state(half, tmp_path / "consumed")
    with pytest.raises(CheckpointError, match="already exists: choose another path"):
        save_state(whole, tmp_path / "states" / "2")
    resuming = fg.Engine(steps=4, plugins=[Average(), Checkpointer(1)], autoload=False)
    with pytest.raises(CheckpointError, match="the state of a loop of one's own"):
        resuming.fit(NET, BATCHES, resume=tmp_path / "states" / "2")
    weights = resuming.load_weights(NET, tmp_path / "states" / "2")
    assert get_bits(weights.module) == saved_module


def test_a_state_that_does_not_fit_or_is_damaged_is_refused(tmp_path: Path) -> None:
    class Line(fg.Module):
        weight: jax.Array
        optimizer: Any = eqx.field(static=True, default_factory=lambda: optax.adam(0.1))

        def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
            return fg.Output(jnp.sum(self.weight.astype(jnp.float32) ** 2))

        def configure_optimizers(self) -> Any:
            return self.optimizer

    engine = fg.Engine(steps=3, run_dir=tmp_path / "run", plugins=[Checkpointer(1)], autoload=False)
    data = [np.ones(2, np.float32)]
    adam = Line(jnp.ones(3, jnp.bfloat16))
    state = engine.init_state(adam, data)
    save_state(state, tmp_path / "state")
    for module, path in (
        (
            Line(jnp.ones(2, jnp.bfloat16)),
            r"module.weight: saved bfloat16\[3\], wanted bfloat16\[2\]",
        ),
        (Line(jnp.ones(3)), r"module.weight: saved bfloat16\[3\], wanted float32\[3\]"),
        (Line(jnp.ones(3, jnp.bfloat16), optax.sgd(0.1)), r"opt_state.* wanted nothing"),
    ):
        with pytest.raises(CheckpointError, match=path):
            restore_state(tmp_path / "state", like=engine.init_state(module, data))
    # The checkpoints of a fit hold such states, too.
    result = engine.fit(adam, data)
    for step in (2, 3):
        source = fg.CheckpointRef(tmp_path / "run", step=step)
        assert int(restore_state(source, like=state).step) == step
    assert get_bits(restore_state(tmp_path / "run", like=state)) == get_bits(result.state)
    save_weights(result, tmp_path / "weights")
    with pytest.raises(CheckpointError, match="holds weights alone"):
        restore_state(tmp_path / "weights", like=state)
    with pytest.raises(CheckpointError, match="there is no state in"):
        restore_state(tmp_path / "nothing", like=state)
    for reference in (
        fg.CheckpointRef(None),
        fg.CheckpointRef(tmp_path / "state", map={"module": "module"}),
        fg.CheckpointRef(tmp_path / "state", view="average"),
    ):
        with pytest.raises(ConfigurationError, match="restore_state reads a whole state"):
            restore_state(reference, like=state)
    with pytest.raises(StateError, match="takes a train state, not FitResult"):
        save_state(result, tmp_path / "result")  # pyright: ignore[reportArgumentType]
    (file,) = (tmp_path / "state" / "checkpoints" / "step-0").glob("index.json")
    file.write_bytes(file.read_bytes().replace(b"module.weight", b"module.weighs"))
    with pytest.raises(CheckpointError, match="no checkpoint of .* can be read"):
        restore_state(tmp_path / "state", like=state)


def test_a_state_is_written_where_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    engine = make_engine()
    state = engine.init_state(NET, BATCHES)
    save_state(state, "~/states/0")
    assert get_bits(restore_state("~/states/0", like=state)) == get_bits(state)
    save_weights(state, "$HOME/weights")
    for save in (save_state, save_weights):
        with pytest.raises(ConfigurationError, match="gs://b/w is not a folder of this machine"):
            save(state, "gs://b/w")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["states", "weights"]


def test_arrays_of_64_bits_are_compared_where_jax_has_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Wide(fg.Module):
        weight: jax.Array

        def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
            return fg.Output(jnp.sum(self.weight))

        def configure_optimizers(self) -> optax.GradientTransformation:
            return optax.sgd(0.1)

    with jax.enable_x64(True):
        for name, difference in (("a", 0.0), ("b", 1e-12)):
            engine = fg.Engine(steps=1, autoload=False)
            module = Wide(jnp.ones(3) + difference)
            save_weights(engine.init_state(module, [np.ones(1)]), tmp_path / name)
    command = ["checkpoints", "diff", str(tmp_path / "a"), str(tmp_path / "b")]
    assert main(command) == 2
    message = "module.weight is of float64, of which JAX would read the half: run this again with"
    assert message in capsys.readouterr().err
    jax.config.update("jax_enable_x64", True)
    try:
        assert main(command) == 1
    finally:
        jax.config.update("jax_enable_x64", False)
    assert f"{(1 + 1e-12) - 1:.6g}" in capsys.readouterr().out
