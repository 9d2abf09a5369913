"""Checks each everyday plugin under FSDP on eight simulated devices, and prints a JSON report of
what it breaks. Started by `test_kit.py`.

    python kit_on_eight.py CHECK [PLUGIN...]

CHECK is one of the conformance check, or `all`; without PLUGIN all are checked.
"""

import json
import sys
from collections.abc import Callable
from typing import Any

import equinox as eqx
import fulgurite as fg
import jax
import numpy as np
from fulgurite_averaging import EMA, Average, Lookahead
from fulgurite_evaluators import Evaluator
from fulgurite_optimizers import BackboneFinetuning, Freeze, GradientAccumulation, ReduceOnPlateau
from fulgurite_precision import Precision
from fulgurite_sharding import FSDP
from fulgurite_stopping import EarlyStopping, SpikeDetection, TimeLimit
from fulgurite_testing import TinyModel, check_plugin


class EightWide(TinyModel):
    """The tiny model, with a weight and a bias that eight devices can share."""

    def __init__(self, *, key: Any) -> None:
        self.linear = eqx.nn.Linear(8, 8, key=key)


def make_data() -> fg.ArrayData:
    """Return five batches of sixteen examples: `x` float32 (batch, 8), `label` int32 (batch,)."""
    x = np.random.default_rng(0).normal(size=(80, 8)).astype(np.float32)
    return fg.ArrayData({"x": x, "label": x.argmax(1).astype(np.int32)}, 16, shuffle=True)


def make_evaluator() -> Evaluator:
    return Evaluator("test", make_data(), every=4)


PLUGINS: dict[str, Callable[[], Any]] = {
    "accumulate": lambda: GradientAccumulation({0: 1, 4: 2}),
    "backbone": lambda: BackboneFinetuning("linear.bias", 3, warmup=2),
    "average": lambda: Average(EMA(0.5)),
    "early_stopping": lambda: EarlyStopping("test/loss", patience=1, restore_best=True),
    "freeze": lambda: Freeze("linear.bias", since=2, until=6),
    "lookahead": lambda: Lookahead(2),
    "precision": Precision,
    "precision_of_parameters": lambda: Precision("bf16-true"),
    "reduce_on_plateau": lambda: ReduceOnPlateau("test/loss", 4),
    "spike_detection": lambda: SpikeDetection(factor=1.05, window=2),
    "time_limit": lambda: TimeLimit("1h"),
}


def check(name: str, only: list[str] | None) -> str | None:
    """Return what a plugin breaks, None if it passes.

    Args:
        name: of the plugin.
        only: the checks to run; None for all.
    """

    def make_others() -> list[Any]:
        others: list[Any] = [FSDP(min_size=1)]
        if name in ("early_stopping", "reduce_on_plateau"):
            others.append(make_evaluator())
        return others

    try:
        check_plugin(
            PLUGINS[name],
            other_plugins=make_others,
            model=EightWide,
            data=make_data,
            only=only,
        )
    except AssertionError as error:
        return str(error)
    return None


if __name__ == "__main__":
    check_name, *names = sys.argv[1:]
    only = None if check_name == "all" else [check_name]
    weight = (
        fg.Engine(steps=1, plugins=[FSDP(min_size=1)], autoload=False)
        .init_state(EightWide, make_data())
        .module.linear.weight
    )
    report = {
        "devices": jax.device_count(),
        "shard": list(weight.sharding.shard_shape(weight.shape)),
        "failures": {name: check(name, only) for name in names or PLUGINS},
    }
    print(json.dumps(report))
