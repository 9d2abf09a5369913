"""What the plugins of the everyday kit cost a step.

All arms train the same model with `Engine.fit`, in turns, compiled before the timed region.

    plain      the default Engine
    ema        with an exponential moving average of the weights
    stoppers   with early stopping on the training loss and a time limit
    spikes     with SpikeDetection over 100 losses
    bf16       with Precision("bf16")
    by_hand    the module casts itself and its batch to bfloat16
    unscaled   with Precision in float16, and on_nonfinite="skip"
    fp16       the same and a static scale
    dynamic    with Precision("fp16"), whose scale is dynamic

The ratios are ema, stoppers and spikes over plain, bf16 over by_hand, dynamic over fp16, and `scaling`
for fp16 over unscaled.
"""

import importlib.util
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import equinox as eqx
import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
from fulgurite_averaging import EMA, Average
from fulgurite_precision import Precision, Static
from fulgurite_precision.casting import cast_floats
from fulgurite_stopping import EarlyStopping, SpikeDetection, TimeLimit
from harness import Spread, arguments, interleaved, ratio, show, write
from workloads import WORKLOADS, Trained, copy_arrays

EXAMPLE = Path(__file__).parents[2] / "examples" / "transformer.py"
RATIOS = {
    "ema": ("ema", "plain"),
    "stoppers": ("stoppers", "plain"),
    "spikes": ("spikes", "plain"),
    "bf16": ("bf16", "by_hand"),
    "dynamic": ("dynamic", "fp16"),
    "scaling": ("fp16", "unscaled"),
}


HALF = ("unscaled", "fp16", "dynamic")
"""The arms in float16, in which attention does not run on a CPU."""


def build_engines() -> dict[str, fg.Engine]:
    """Return the engine of each arm."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        unscaled = Precision(compute="float16")
    plugins = {
        "plain": [],
        "ema": [Average(EMA(0.999))],
        "stoppers": [EarlyStopping("train/loss", patience=10**6), TimeLimit("1h")],
        "spikes": [SpikeDetection(factor=1e6)],
        "bf16": [Precision("bf16")],
        "by_hand": [],
        "unscaled": [unscaled],
        "fp16": [Precision(compute="float16", scale=Static(2.0**10))],
        "dynamic": [Precision("fp16")],
    }
    return {
        name: fg.Engine(
            steps=1,
            autoload=False,
            plugins=chosen,
            on_nonfinite="skip" if name in HALF else "raise",
        )
        for name, chosen in plugins.items()
    }


class CastByHand(fg.Module):
    """A module that casts itself and its batch."""

    inner: Any

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        """Return the loss, computed in bfloat16."""
        inner = cast_floats(self.inner, jnp.bfloat16)
        output = inner.training_step(cast_floats(batch, jnp.bfloat16), ctx)
        return output.replace(loss=output.loss.astype(jnp.float32))

    def configure_optimizers(self) -> Any:
        """Return the optimizer of the module within."""
        return self.inner.configure_optimizers()


def make_perceptron() -> tuple[fg.Module, fg.ArrayData, int]:
    """Return the network of 784-256-10, its data, and the steps of a timed region."""
    workload = WORKLOADS["mlp_784"]
    data = fg.ArrayData(workload.arrays(), workload.batch_size, shuffle=True)
    return Trained(workload.model(key=jax.random.key(0))), data, workload.steps


def make_transformer() -> tuple[fg.Module, fg.ArrayData, int]:
    """Return the transformer of the examples, small, its data, and the steps of a timed region."""
    spec = importlib.util.spec_from_file_location("transformer", EXAMPLE)
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    model = example.Transformer(64, 2, 4, 1e-3, key=jax.random.key(0))
    text = np.random.default_rng(0).integers(0, 256, (512, 65), np.uint8)
    return model, fg.ArrayData(text, 16, shuffle=True), 30


MODELS: dict[str, Callable[[], tuple[fg.Module, fg.ArrayData, int]]] = {
    "mlp_784": make_perceptron,
    "transformer": make_transformer,
}


def measure_step(engine: fg.Engine, state: Any, data: fg.ArrayData, steps: int) -> float:
    """Return the seconds of a step, over that many of them from the initial state."""
    state = copy_arrays(state)
    before = perf_counter()
    result = engine.fit(data=data, state=state, steps=steps)
    jax.block_until_ready(eqx.filter(result.module, eqx.is_array))
    return (perf_counter() - before) / steps


def main() -> None:
    """Run the arms, print the tables and write the file."""
    parser = arguments(__doc__, repeats=11)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    options = parser.parse_args()
    ratios: dict[str, Spread] = {}
    for name in options.models:
        model, data, steps = MODELS[name]()
        arms = {}
        for arm, engine in build_engines().items():
            if arm in HALF and name == "transformer":
                continue
            module = CastByHand(model) if arm == "by_hand" else model
            state = engine.init_state(module, data)
            arms[arm] = partial(measure_step, engine, state, data, steps)
            measure_step(engine, state, data, 4)
        seconds = interleaved(arms, options.repeats)
        times = {arm: Spread.of([1e6 * value for value in seconds[arm]]) for arm in seconds}
        results = {
            f"{name}.{label}": ratio(seconds, arm, base)
            for label, (arm, base) in RATIOS.items()
            if arm in arms
        }
        show(f"{name}: µs a step", times)
        show(f"{name}: ratios", results)
        ratios |= results
    if options.json:
        write(options.json, ratios)


if __name__ == "__main__":
    main()
