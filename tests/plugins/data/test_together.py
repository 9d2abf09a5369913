"""Several sources in one batch: which batches, how many, and the same ones after a resume."""

import itertools
from pathlib import Path
from typing import Any

import equinox as eqx
import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fulgurite.errors import ConfigurationError, DataError, ModelError
from fulgurite_checkpoint import Checkpointer
from fulgurite_data import Arrays, Stages, Together
from fulgurite_optimizers import GradientAccumulation
from fulgurite_testing import check_source


def make_lists() -> dict[str, Any]:
    return {"a": [np.full(1, n) for n in range(2)], "b": [np.full(1, 10 + n) for n in range(5)]}


def read_numbers(source: Together, num_passes: int = 1) -> list[tuple[Any, ...]]:
    batches = itertools.chain.from_iterable(iter(source) for _ in range(num_passes))
    return [tuple(p if p is None else int(p[0]) for p in batch.values()) for batch in batches]


def test_pass_ends_with_the_shortest_or_the_longest_source():
    cycle = [(0, 10), (1, 11), (0, 12), (1, 13), (0, 14)]
    assert read_numbers(Together(make_lists()), 2) == 2 * cycle
    assert read_numbers(Together(make_lists(), "min"), 2) == 2 * [(0, 10), (1, 11)]
    ended = [(0, 10), (1, 11), (None, 12), (None, 13), (None, 14)]
    assert read_numbers(Together(make_lists(), "max"), 2) == 2 * ended
    assert [len(Together(make_lists(), length)) for length in ("cycle", "min", "max")] == [5, 2, 5]


def test_shuffled_sources_have_orders_of_their_own_in_each_round():
    arrays = np.arange(12)
    parts = {name: fg.ArrayData(arrays, 3, shuffle=True) for name in "ab"}
    parts["long"] = fg.ArrayData(np.arange(24), 3, shuffle=True)
    both = Together(parts)
    batches = [batch for _ in range(2) for batch in both]
    rounds = [[batch[name] for batch in batches[n : n + 4]] for n in (0, 4, 8, 12) for name in "ab"]
    orders = [np.concatenate(order) for order in rounds]
    assert all(sorted(order) == [*range(12)] for order in orders)
    assert len({tuple(order) for order in orders}) == 8
    passes = [np.concatenate([batch["long"] for batch in batches[n : n + 8]]) for n in (0, 8)]
    assert all(sorted(order) == [*range(24)] for order in passes)
    assert passes[0].tolist() != passes[1].tolist()


def shuffle_by_hand(seed: int, index: int, epoch: int) -> list[int]:
    """Return the order of the epoch of a source of six examples, from NumPy's generator."""
    entropy = np.random.SeedSequence([seed, index, epoch])
    return np.random.Generator(np.random.Philox(entropy)).permutation(6).tolist()


@pytest.mark.parametrize("kind", ["together", "stages"])
def test_order_follows_from_the_seed_of_the_run_unless_the_source_has_one(kind: str):
    def build_source(**options: Any) -> Any:
        part = fg.ArrayData(np.arange(6), 2, shuffle=True)
        return (
            Together({"a": part}, **options) if kind == "together" else Stages((part, 3), **options)
        )

    def read_order(source: Any, seed: int, start_step: int = 0) -> list[list[int]]:
        engine = fg.Engine(steps=6, seed=seed)
        batches = [*engine.iter_batches(source, start_step=start_step)]
        leaves = [jax.tree.leaves(batch)[0] for batch in batches]
        return [np.concatenate(leaves[n : n + 3]).tolist() for n in range(0, len(leaves), 3)]

    for seed in (0, 1):
        by_hand = [shuffle_by_hand(seed, 0, epoch) for epoch in range(2)]
        assert read_order(build_source(), seed) == by_hand
        # A walk that continues in the middle of a pass keeps to the order of that pass.
        source = build_source()
        batches = [*itertools.islice(fg.Engine(steps=2, seed=seed).iter_batches(source), 2)]
        rest = fg.Engine(steps=1, seed=seed).iter_batches(source, start_step=2)
        leaves = jax.tree.leaves([*batches, *itertools.islice(rest, 1)])
        assert np.concatenate(leaves).tolist() == by_hand[0]
        assert read_order(build_source(seed=7), seed)[0] == shuffle_by_hand(7, 0, 0)
    # An evaluation reads with a seed of its own, and leaves that of the run to the next pass.
    source = build_source()
    batches = fg.Engine(steps=6, seed=1).iter_batches(fg.DataSource(source, prefetch=0))
    read = [jax.tree.leaves(next(batches))[0] for _ in range(2)]
    source.set_run_seed(0)
    read += [jax.tree.leaves(batch)[0] for batch in batches]
    assert np.concatenate(read[3:]).tolist() == shuffle_by_hand(1, 0, 1)


@pytest.mark.parametrize("length", ["cycle", "min"])
def test_source_resumes_at_every_position(length: Any):
    def build_source() -> Together:
        long = fg.ArrayData(np.arange(14), 3, shuffle=True, remainder="drop")
        return Together({"a": fg.ArrayData(np.arange(9), 3, shuffle=True), "b": long}, length)

    check_source(build_source)


class Sum(fg.Module):
    weight: jax.Array

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        parts = [part for part in batch.values() if part is not None]
        return fg.Output(sum(jnp.mean((self.weight - part) ** 2) for part in parts))

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(0.05)


def make_model() -> Sum:
    return Sum(jnp.zeros(()))


@pytest.mark.full
@pytest.mark.parametrize("length", ["cycle", pytest.param("max", marks=pytest.mark.slow)])
def test_run_resumes_with_the_bits_of_one_that_never_stopped(tmp_path: Path, length: Any):
    def fit(folder: str, steps: int) -> Any:
        parts = {
            "a": fg.ArrayData(np.arange(6.0), 2, shuffle=True),
            "b": fg.ArrayData(10 + np.arange(10.0), 2, shuffle=True),
        }
        both = Together(parts, length, seed=3)
        data = fg.DataSource(both, batch_examples=both.batch_examples)
        plugins = [Checkpointer(every=4)]
        engine = fg.Engine(steps=steps, run_dir=tmp_path / folder, plugins=plugins)
        return engine.fit(make_model(), data, resume="auto")

    whole = fit("whole", 13)
    fit("parts", 4)
    fit("parts", 8)
    assert float(fit("parts", 13).module.weight) == float(whole.module.weight)


def test_epochs_are_passes_over_the_sources():
    result = fg.Engine(epochs=2).fit(make_model(), Together(make_lists(), "min"))
    by_hand = 0.0
    for a, b in 2 * [(0, 10), (1, 11)]:
        by_hand -= 0.05 * (2 * (by_hand - a) + 2 * (by_hand - b))
    assert int(result.state.step) == 4
    assert float(result.module.weight) == pytest.approx(by_hand, rel=1e-6)


class Distances(Sum):
    """A loss for each source: as means of known weight, as plain numbers, or with one weight."""

    losses: str = eqx.field(static=True, default="means")

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        values = {name: (self.weight - part) ** 2 for name, part in batch.items()}
        if self.losses == "means":
            means = {name: fg.metrics.Mean.from_values(value) for name, value in values.items()}
            return fg.Output(losses=means)
        weight = 1 if self.losses == "one weight" else None
        losses = {name: jnp.mean(value) for name, value in values.items()}
        return fg.Output(losses=losses, weight=weight)


@pytest.mark.full
def test_what_the_errors_about_unequal_batches_say_is_what_can_be_done():
    first = [np.array([1.0, 2.0]), np.array([3.0, 5.0])]
    second = [np.arange(4.0), 7 + np.arange(4.0)]

    def fit(losses: str, *plugins: Any, second: Any = second) -> float:
        engine = fg.Engine(steps=2, plugins=plugins)
        result = engine.fit(Distances(jnp.zeros(()), losses), Together({"a": first, "b": second}))
        return float(result.module.weight)

    microbatches, steps = GradientAccumulation(2), GradientAccumulation(2, "steps")
    with pytest.raises(DataError, match=r"need one batch size .* over steps.*'steps'\).*weight=1"):
        fit("means", microbatches)
    with pytest.raises(ModelError, match=r"weight=1 has each step count alike.* with one length"):
        fit("means", steps)
    with pytest.raises(DataError, match=r"each loss and metric as fg\.metrics\.Mean\.from_values"):
        fit("plain numbers")

    def compute_gradient(weight: float, number: int) -> float:
        return sum(2 * (weight - float(np.mean(part[number]))) for part in (first, second))

    once = -0.05 * (compute_gradient(0, 0) + compute_gradient(0, 1)) / 2
    assert fit("one weight", steps) == pytest.approx(once, rel=1e-6)
    twice = -0.05 * compute_gradient(0, 0)
    twice -= 0.05 * compute_gradient(twice, 1)
    assert fit("means") == pytest.approx(twice, rel=1e-6)
    second = [part[:2] for part in second]
    twice = -0.05 * compute_gradient(0, 0)
    twice -= 0.05 * compute_gradient(twice, 1)
    assert fit("means", microbatches, second=second) == pytest.approx(twice, rel=1e-6)


def specify(batch: Any) -> fg.Batch:
    return fg.Batch(batch, spec="first")


@pytest.mark.parametrize(
    ("parts", "options", "message"),
    [
        ({}, {}, "dictionary of sources"),
        ([[1]], {}, "dictionary of sources"),
        ({"a": []}, {}, "'a' has no batch"),
        ({"a": (n for n in range(3))}, {}, "'a' is a generator"),
        ({"a": fg.ArrayData(np.ones(3), 2, remainder="pad")}, {}, "remainder='pad'"),
        ({"a": Arrays(np.ones(4)).batch(2).map(specify)}, {}, "has an fg.Batch.*to arrays"),
        ({"a": fg.ArrayData(np.ones(3), 2, on_device=True)}, {}, "on_device=True"),
        ({"a": [1]}, {"length": "longest"}, "'longest'; it must be"),
    ],
)
def test_source_that_cannot_be_combined_is_refused(parts: Any, options: Any, message: str):
    with pytest.raises(ConfigurationError, match=message):
        Together(parts, **options)


def test_position_of_longer_sources_is_refused():
    with pytest.raises(ConfigurationError, match="batch 7, and a pass has 5"):
        Together(make_lists()).set_state({"pass": 0, "batch": 7})


def test_stages_follow_each_other_and_go_on_in_the_next_pass():
    stages = Stages(([{"x": n} for n in range(3)], 2), ([{"x": 10}], 3))
    passes = [[batch["x"] for batch in stages] for _ in range(2)]
    assert passes == [[0, 1, 10, 10, 10], [2, 0, 10, 10, 10]]
    assert stages.ends == (2, 5) and len(stages) == 5
    assert stages.batch_examples == ({"x": 0}, {"x": 10})


def test_stages_resume_at_every_position():
    def build_source() -> Stages:
        long = fg.ArrayData(np.arange(14), 3, shuffle=True, remainder="drop")
        return Stages((fg.ArrayData(np.arange(9), 3, shuffle=True), 5), (long, 3))

    check_source(build_source)


@pytest.mark.full
def test_run_in_stages_resumes_in_the_middle_of_one(tmp_path: Path):
    def fit(folder: str, steps: int) -> Any:
        first = fg.ArrayData({"a": np.arange(6.0)}, 2, shuffle=True)
        second = fg.ArrayData({"b": 10 + np.arange(10.0)}, 2, shuffle=True)
        stages = Stages((first, 5), (second, 6))
        data = fg.DataSource(stages, batch_examples=stages.batch_examples)
        plugins = [Checkpointer(every=20)]
        engine = fg.Engine(steps=steps, run_dir=tmp_path / folder, plugins=plugins)
        return engine.fit(make_model(), data, resume="auto")

    whole = fit("whole", 11)
    for steps in (4, 7, 11):
        parts = fit("parts", steps)
    assert float(parts.module.weight) == float(whole.module.weight) > 5


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([], "at least one pair"),
        ([([1], 0)], "steps of stage 0 is 0; it must be a positive integer"),
        ([([1], True)], "steps of stage 0 is True"),
        ([([], 1)], "source 0 has no batch"),
    ],
)
def test_stage_that_cannot_be_read_is_refused(stages: Any, message: str):
    with pytest.raises(ConfigurationError, match=message):
        Stages(*stages)


def test_position_of_longer_stages_is_refused():
    with pytest.raises(ConfigurationError, match="batch 7, and a pass has 2"):
        Stages(([1], 2)).set_state({"pass": 0, "batch": 7})
