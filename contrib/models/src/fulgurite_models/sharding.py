"""Rules for dividing the matrices of the models over devices."""

from typing import Any

from fulgurite.plugins import leaves_with_paths
from jax.sharding import PartitionSpec as P

_ROWS = ("attention.query", "attention.key", "attention.value", "mlp.up", "mlp.gate")
"""The layers whose outputs are divided: heads, and hidden numbers."""
_COLUMNS = ("attention.output", "mlp.down")
"""The layers after them, whose inputs are."""


def make_sharding_rules(model: Any, axis: str = "model") -> list[tuple[str, P]]:
    """Return rules for `TensorParallel` of `fulgurite-sharding`.

    Heads and hidden numbers are divided, so that a block communicates twice: after attention and
    after the MLP. The first axis of each array of a block is that of the depth, which `scan` goes
    through: it stays whole.

    Example:
        from fulgurite_models import GPT2, GPT2Config, make_sharding_rules
        from fulgurite_sharding import TensorParallel

        config = GPT2Config(vocab_size=64, max_length=32, width=16, depth=2, num_heads=2)
        gpt2 = GPT2(config, key=jax.random.key(0))
        engine = fg.Engine(steps=100, plugins=[TensorParallel(make_sharding_rules(gpt2))])

    Args:
        model: a model of this package; shapes in the place of arrays will do.
        axis: of the mesh.
    """
    paths = {path for path, _ in leaves_with_paths(model.blocks)}
    rules = []
    for layer in _ROWS:
        rules.append((f"{layer}.weight", P(None, axis, None)))
        rules.append((f"{layer}.bias", P(None, axis)))
    rules += [(f"{layer}.weight", P(None, None, axis)) for layer in _COLUMNS]
    return [(f"**.blocks.{path}", spec) for path, spec in rules if path in paths]
