"""What evaluators find decides which checkpoint is the best, and that is the one that is evaluated
and restored."""

import re
from pathlib import Path
from typing import Any

import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fulgurite.errors import ConfigurationError
from fulgurite_checkpoint import Checkpointer
from fulgurite_evaluators import Evaluator
from fulgurite_optimizers import ReduceOnPlateau
from fulgurite_stopping import EarlyStopping

pytestmark = pytest.mark.full


class Counting(fg.Module):
    """One weight that every update makes smaller by exactly 1."""

    weight: jax.Array

    def __init__(self, *, key: Any = None) -> None:
        self.weight = jnp.zeros(())

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        return fg.Output(
            self.weight * 1.0, metrics={"updates": -self.weight}, preds=batch - self.weight
        )

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(1.0)


class Slice:
    """A plugin with state of its own."""

    @fg.hookimpl
    def init_plugin_state(self, module: Any) -> Any:
        return {"copy": module.weight}

    @fg.hookimpl
    def module_views(self, state: fg.TrainState) -> dict[str, Any]:
        return {"copied": Counting()}


@pytest.mark.parametrize(("values", "best"), [([0.36, 0.36], 10), ([np.nan, 0.5, 1.0], 30)])
def test_best_checkpoint_by_evaluator_metrics(
    values: list[float], best: int, tmp_path: Path
) -> None:
    zero = [np.zeros(2, np.float32)]
    probe = Evaluator("test", every=10, fn=lambda state, step: {"accuracy": values[step // 10 - 1]})
    plugins = [probe, Checkpointer(every=10, max_to_keep=1, monitor="test/accuracy"), Slice()]
    fg.Engine(steps=10 * len(values), run_dir=tmp_path, plugins=plugins, autoload=False).fit(
        Counting, zero
    )
    # Another program, without the plugins that trained, and no training data.
    engine, weights = (
        fg.Engine(plugins=[Checkpointer(every=1)], autoload=False),
        fg.CheckpointRef(tmp_path, "best"),
    )
    before = sorted(tmp_path.rglob("*"))
    assert engine.evaluate(Counting, zero, weights=weights)["updates"] == best
    assert engine.predict(Counting, zero, weights=weights).tolist() == [best, best]
    assert int(engine.load_weights(Counting, weights).step) == best
    for path, step in (
        (str(tmp_path), 10 * len(values)),
        (tmp_path / f"checkpoints/step-{best}", best),
    ):
        assert engine.evaluate(Counting, zero, weights=path)["updates"] == step
    # What is at hand says how the model is made.
    assert (
        engine.evaluate(engine.load_weights(Counting, weights), zero, weights=weights)["updates"]
        == best
    )
    with pytest.raises(ConfigurationError, match="path must be that of a run"):
        engine.evaluate(Counting, zero, weights=3)  # pyright: ignore[reportArgumentType]
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("monitor", "message"),
    [
        ("vla/iou", "nothing measures 'vla/iou': there is no evaluator 'vla'. Did you mean 'val'"),
        pytest.param(
            "train/los",
            "training measures no 'train/los'. Did you mean 'loss'",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "all/updtes",
            "evaluator 'all' measures no 'all/updtes'. Did you mean 'updates'",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_what_nothing_measures_is_refused_before_the_first_step(
    monitor: str, message: str, tmp_path: Path
) -> None:
    """By the checkpointer, which would keep no best, as by all that decide by it."""
    data = [np.zeros(2, np.float32)]
    val = Evaluator("val", every=1, fn=lambda state, step: {"iou": 0.5})
    plugins_by_monitor: list[Any] = [
        Checkpointer(1, directory=tmp_path, max_to_keep=1, monitor=monitor, mode="max"),
        ReduceOnPlateau(monitor, every=1, mode="max"),
        # That of training follows the log, that of an evaluator its evaluation.
        EarlyStopping(monitor, every=None if monitor.startswith("train") else 1, mode="max"),
    ]
    for plugin in plugins_by_monitor:
        plugins = [val, Evaluator("all", data, every=1), plugin]
        engine = fg.Engine(steps=2, plugins=plugins, autoload=False)
        with pytest.raises(ConfigurationError, match=re.escape(message)) as error:
            engine.fit(Counting, data)
        assert type(plugin).__name__ in str(error.value)
    # What a plugin of the program reports is known by nobody but itself.
    report = fg.LambdaPlugin(every={1: lambda run: run.report_evaluation("vla", {"iou": run.step})})
    plugins = [report, Checkpointer(every=1, max_to_keep=1, monitor="vla/iou", mode="min")]
    engine = fg.Engine(steps=3, plugins=plugins, autoload=False, run_dir=tmp_path / "own")
    engine.fit(Counting, data)
    names = sorted(path.name for path in (tmp_path / "own" / "checkpoints").iterdir())
    assert names == ["step-1", "step-3"]
