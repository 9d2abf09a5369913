"""A plugin from functions."""

from typing import Any

import fulgurite as fg
import numpy as np
import optax
import pytest
from fulgurite.errors import ConfigurationError, PluginError


class Weight(fg.Module):
    value: Any

    def __init__(self, key: Any) -> None:
        self.value = np.zeros((), np.float32) + 1.0

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        return fg.Output(self.value * batch.mean())

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(0.1)


DATA = fg.ArrayData(np.ones((8, 1), np.float32), batch_size=4)


def test_functions_are_hooks_and_actions() -> None:
    events: list[Any] = []
    plugin = fg.LambdaPlugin(
        on_fit_start=lambda run: events.append(("start", run.step)),
        step_metrics=lambda updates: {"update": updates.value},
        every={
            2: lambda run: events.append(("every", run.step)),
            fg.AtEnd(): lambda run: events.append(("end", run.step)),
        },
    )
    engine = fg.Engine(steps=4, log_every=1, plugins=[plugin], autoload=False)
    result = engine.fit(Weight, DATA)
    assert events == [("start", 0), ("every", 2), ("every", 4), ("end", 4)]
    np.testing.assert_allclose(result.history["train/lambda/update"], [-0.1] * 4, rtol=1e-6)


def test_an_action_may_stop_training() -> None:
    stop = fg.LambdaPlugin("stopper", every={3: lambda run: fg.StopTraining("enough")})
    quiet = fg.LambdaPlugin()
    result = fg.Engine(steps=9, plugins=[stop, quiet], autoload=False).fit(Weight, DATA)
    assert (int(result.state.step), result.stop_reason) == (3, "enough")


def test_mistakes_are_errors_that_name_them() -> None:
    with pytest.raises(ConfigurationError, match="on_fit_start is 3"):
        fg.LambdaPlugin(on_fit_start=3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(PluginError, match="on_fit_stat.*Did you mean 'on_fit_start'"):
        fg.Engine(steps=1, plugins=[fg.LambdaPlugin(on_fit_stat=lambda run: None)])
    with pytest.raises(PluginError, match="takes 'trainer'"):
        fg.Engine(steps=1, plugins=[fg.LambdaPlugin(on_fit_start=lambda trainer: None)])
