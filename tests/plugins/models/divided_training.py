"""Trains a model that is divided over four simulated devices, and compares it with one device.

JAX_NUM_CPU_DEVICES=4 python divided_training.py fsdp|tensor_parallel
"""

import sys
from typing import Any

import equinox as eqx
import fulgurite as fg
import jax
import numpy as np
import optax
from fulgurite_models import Llama, LlamaConfig, generate, make_sharding_rules, next_token_loss
from fulgurite_sharding import FSDP, TensorParallel, gather

CONFIG = LlamaConfig(32, 16, 2, 4, 2, 24, use_qkv_bias=True)
TOKENS = np.random.default_rng(0).integers(0, 32, (8, 8))


def make_task(key: Any) -> fg.Task:
    return fg.Task(Llama(CONFIG, key=key), loss=next_token_loss, optimizer=optax.sgd(0.5))


def main(layout: str) -> None:
    assert jax.device_count() == 4
    model = eqx.filter_eval_shape(Llama, CONFIG, key=jax.random.key(0))
    plugins = {
        "fsdp": FSDP(min_size=64),
        "tensor_parallel": TensorParallel(make_sharding_rules(model), size=2),
    }
    data = fg.ArrayData((TOKENS,), 8)
    divided = fg.Engine(steps=4, log_every=1, plugins=[plugins[layout]]).fit(make_task, data)
    whole = fg.Engine(steps=4, log_every=1).fit(make_task, data)
    weight = divided.module.model.blocks.attention.query.weight
    assert weight.addressable_shards[0].data.size < weight.size
    losses = [result.history["train/loss"] for result in (divided, whole)]
    np.testing.assert_allclose(*losses, rtol=1e-5)
    gathered = gather(eqx.filter(divided.module.model, eqx.is_array))
    expected = eqx.filter(whole.module.model, eqx.is_array)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), gathered, expected)
    rows = [generate(r.module.model, [[1, 2], [3]], 4).as_lists() for r in (divided, whole)]
    assert rows[0] == rows[1], rows
    print("equal")


if __name__ == "__main__":
    main(*sys.argv[1:])
