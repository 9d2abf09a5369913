"""Run by test_tuner.py in two processes: finds a batch size and a learning rate in each, and
prints them as JSON."""

import json

import fulgurite as fg
import jax
import optax
from fulgurite_sharding import DataParallel
from fulgurite_testing import TinyModel, tiny_data
from fulgurite_tuner import find_batch_size, find_learning_rate


def main() -> None:
    """Find both. The second process may use less memory than the first."""
    engine = fg.Engine(steps=1, plugins=[DataParallel()], autoload=False)
    limit = 40_000 if jax.process_index() == 0 else 20_000
    sizes = find_batch_size(engine, TinyModel, tiny_data(), limit=limit, fraction=1.0, start=7)
    rates = find_learning_rate(engine, TinyModel, tiny_data(), optax.sgd, low=0.1, high=1, steps=3)
    answer = {"size": sizes.suggestion, "limit": sizes.limit, "losses": rates.losses}
    print(json.dumps(answer | {"bytes": sizes.num_bytes[sizes.suggestion]}), flush=True)


if __name__ == "__main__":
    main()
