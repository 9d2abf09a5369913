"""Integers of NumPy are integers in the arguments of plugins, too."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
import pytest
from fulgurite.errors import ConfigurationError
from fulgurite_averaging import EMA, Lookahead, Mean
from fulgurite_checkpoint import Checkpointer
from fulgurite_logging import BatchPictures
from fulgurite_lora import Lora
from fulgurite_optimizers import Freeze, GradientAccumulation, Phase, ReduceOnPlateau
from fulgurite_population import Evolution, Population
from fulgurite_precision import Dynamic
from fulgurite_rng import Rng
from fulgurite_sharding import DataParallel, ShardBySize, Sharding
from fulgurite_stopping import EarlyStopping, SpikeDetection

pytestmark = pytest.mark.full

MAKERS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "max_to_keep": (lambda n: Checkpointer(1, max_to_keep=n), lambda plugin: plugin.max_to_keep),
    "keep_period": (lambda n: Checkpointer(1, keep_period=n), lambda plugin: plugin.keep_period),
    "Lookahead": (lambda n: Lookahead(period=n), lambda plugin: plugin.period),
    "EMA": (lambda n: EMA(0.5, every=n), lambda rule: rule.every),
    "Mean after": (lambda n: Mean(after=n), lambda rule: rule.after),
    "Mean every": (lambda n: Mean(every=n), lambda rule: rule.every),
    "BatchPictures": (lambda n: BatchPictures(num_examples=n), lambda plugin: plugin.num_examples),
    "Lora": (lambda n: Lora("net", rank=n), lambda plugin: plugin.rank),
    "accumulation": (GradientAccumulation, lambda plugin: plugin.n),
    "accumulation at steps": (
        lambda n: GradientAccumulation({0: 1, n: n}),
        lambda plugin: next(step for step in plugin.n if step),
    ),
    "Phase": (lambda n: Phase(optax.sgd(0.1), every=n), lambda phase: phase.every),
    "patience": (lambda n: EarlyStopping("test/loss", patience=n), lambda plugin: plugin.patience),
    "plateau": (
        lambda n: ReduceOnPlateau("test/loss", every=1, patience=n),
        lambda plugin: plugin.patience,
    ),
    "window": (lambda n: SpikeDetection(window=n), lambda plugin: plugin.window),
    "population": (lambda n: Population(seeds=[n, 1]), lambda plugin: plugin.seeds[0]),
    "Evolution": (lambda n: Evolution(n, "test/loss"), lambda evolution: evolution.every),
    "Dynamic": (lambda n: Dynamic(period=n), lambda scale: scale.period),
    "agree_every": (lambda n: DataParallel(agree_every=n), lambda plugin: plugin.agree_every),
    "mesh": (lambda n: Sharding({"data": n}), lambda plugin: plugin.mesh["data"]),
    "min_size": (lambda n: ShardBySize(min_size=n), lambda rule: rule.min_size),
    "Freeze": (lambda n: Freeze("net", until=n), lambda plugin: plugin.until.steps[0]),
}


@pytest.mark.parametrize("name", MAKERS)
def test_plugins_take_integers_of_numpy_and_keep_those_of_python(name: str) -> None:
    make, get = MAKERS[name]
    for number in (np.int64(3), np.int8(3), np.uint32(3)):
        value = get(make(number))
        assert type(value) is int and value == 3
    for wrong in (np.bool_(True), np.float32(3)):
        with pytest.raises(ConfigurationError):
            make(wrong)


def test_random_streams_of_a_numpy_seed_are_those_of_the_same_seed() -> None:
    key, same = (
        jax.random.key_data(Rng().make_streams(seed).train_keys(7)["default"])
        for seed in (np.int64(2**40 + 5), 2**40 + 5)
    )
    assert key.tolist() == same.tolist()
