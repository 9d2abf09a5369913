"""What the tests of hooks share: engines and plugins made on the spot, a plugin whose numbers NumPy
computes too, and one that draws random numbers wherever it can."""

from dataclasses import dataclass
from typing import Any

import fulgurite as fg
import jax
import numpy as np
from models import Linear, regression


def engine(*plugins: Any, **settings: Any) -> fg.Engine:
    """An engine with these plugins and no installed ones."""
    return fg.Engine(plugins=plugins, autoload=False, **settings)


def plugin(name: str, /, **members: Any) -> Any:
    """A plugin of a class made on the spot; functions among its members become implementations of
    hooks."""
    marked = {
        key: fg.hookimpl(value) if callable(value) else value for key, value in members.items()
    }
    return type(name, (), {"plugin_name": name, **marked})()


@dataclass(frozen=True)
class Averaging:
    """An exponential moving average of the weights."""

    decay: float = 0.9

    @fg.hookimpl
    def init_plugin_state(self, module: Linear) -> Any:
        return {"average": module}

    @fg.hookimpl
    def after_update(self, module: Linear, plugin_state: Any) -> Any:
        average = jax.tree.map(
            lambda old, new: self.decay * old + (1 - self.decay) * new,
            plugin_state["average"],
            module,
        )
        return module, {"average": average}

    @fg.hookimpl
    def module_views(self, state: fg.TrainState) -> dict[str, Any]:
        return {"averaged": state.plugin_states["averaging"]["average"]}


def averaged_by_hand(steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Weights and their average after that many steps of gradient descent, in float64."""
    weight, average = np.zeros(3), np.zeros(3)
    batches = [batch for _ in range(steps) for batch in regression(24, 8)][:steps]
    for batch in batches:
        x, y = batch["x"].astype(np.float64), batch["y"].astype(np.float64)
        weight = weight - 0.1 * 2 * x.T @ (x @ weight - y) / len(y)
        average = 0.9 * average + 0.1 * weight
    return weight, average


@dataclass(frozen=True)
class Noise:
    """Draws in every traced hook, and once for its own slice."""

    instance: str

    @fg.hookimpl
    def init_plugin_state(self, key: Any) -> Any:
        return jax.random.uniform(key, (2,))

    @fg.hookimpl
    def after_update(self, module: Any, plugin_state: Any, ctx: fg.Context) -> Any:
        return module, plugin_state + jax.random.uniform(ctx.key(), (2,))

    @fg.hookimpl
    def step_metrics(self, ctx: fg.Context) -> dict[str, Any]:
        return {"drawn": fg.metrics.LastValue.from_values(jax.random.uniform(ctx.key()))}


class Blurred(Linear):
    """Learns from inputs with noise, drawn from the stream `default`."""

    def __init__(self, *, key: Any) -> None:
        self.weight = jax.random.normal(key, (3,))

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        keys = ctx.keys("default", len(batch["y"]))
        noise = jax.vmap(lambda key: jax.random.normal(key, (3,)))(keys)
        return super().training_step({"x": batch["x"] + noise, "y": batch["y"]}, ctx)
