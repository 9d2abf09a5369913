import math
from functools import reduce
from typing import Any

import equinox as eqx
import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fulgurite._src.metrics.base import AccumulatedMetric
from fulgurite.errors import ConfigurationError, ModelError
from fulgurite.metrics import (
    Accuracy,
    CollectingMetric,
    ExponentialMovingAverage,
    LastValue,
    Max,
    Mean,
    Metric,
    Min,
    RunningMetric,
    Std,
    Sum,
    flatten_nested,
    sort_by_kind,
)
from hypothesis import given, strategies as st
from sklearn.metrics import top_k_accuracy_score

OF_VALUES = [Mean, Sum, Min, Max, Std]
NAN, INF = math.nan, math.inf


class F1(Metric):
    """A metric made of metrics, as a user writes it."""

    hits: Sum
    misses: Sum

    def compute(self) -> dict[str, Any]:
        return {"hits": self.hits.compute(), "misses": self.misses.compute()}


def bits(tree: Any) -> list[tuple[str, tuple[int, ...], bytes]]:
    """Dtype, shape and bytes of every leaf."""
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]
    return [(str(leaf.dtype), leaf.shape, leaf.tobytes()) for leaf in leaves]


def some_metrics() -> list[Metric]:
    values = jnp.array([1.5, -0.1, 3e8, 7.25])
    infinite, minus_zero = jnp.array([INF, 1.0]), jnp.array(-0.0)
    metrics = [
        kind.from_values(array)
        for kind in OF_VALUES
        for array in (values, infinite, minus_zero, jnp.array(NAN), jnp.zeros(0))
    ]
    accuracy = Accuracy.from_logits(jnp.eye(3), jnp.array([0, 1, 0]))
    return [
        *metrics,
        accuracy,
        Mean.from_values(values, weight=values),
        F1(Sum.from_values(values), Sum.from_values(1)),
    ]


def test_merging_with_the_identity_on_both_sides_changes_no_bit() -> None:
    merge = jax.jit(lambda a, b: a.merge(b))
    for metric in some_metrics():
        merged = reduce(lambda a, b: a.merge(b), [metric, metric, metric])
        for operand in (metric, merged, metric.empty()):
            empty = operand.empty()
            assert jax.tree.structure(empty) == jax.tree.structure(operand)
            assert bits(operand.merge(empty)) == bits(operand)
            assert bits(empty.merge(operand)) == bits(operand)
            assert bits(merge(empty, operand)) == bits(operand)


def test_merging_keeps_structure_shapes_and_dtypes() -> None:
    @jax.jit
    def merge_three(metric: Metric) -> Metric:
        return jax.lax.fori_loop(0, 3, lambda _, merged: merged.merge(metric), metric.empty())

    for metric in some_metrics():
        leaves = jax.tree.leaves(metric)
        assert all(
            isinstance(leaf, jax.Array) and leaf.shape == () and leaf.dtype == jnp.float32
            for leaf in leaves
        )
        assert not any(
            leaf.weak_type
            for leaf in jax.tree.leaves((metric, metric.empty(), metric.merge(metric)))
        )
        merged = merge_three(metric)
        assert jax.tree.structure(merged) == jax.tree.structure(metric)
        assert bits(merged) == bits(reduce(lambda a, b: a.merge(b), [metric, metric, metric]))


def test_numpy_fields_are_computed_on_the_host_with_the_same_value() -> None:
    compute_jitted = jax.jit(lambda metric: metric.compute())
    for metric in some_metrics():
        on_host = jax.tree.map(np.asarray, metric).compute()
        assert not any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(on_host))
        assert all(leaf.dtype == np.float32 for leaf in jax.tree.leaves(on_host))
        for on_device in (metric.compute(), compute_jitted(metric)):
            jax.tree.map(
                lambda a, b: np.testing.assert_array_max_ulp(np.asarray(a), np.asarray(b), 1),
                on_device,
                on_host,
            )


def test_a_metric_of_metrics_is_merged_field_by_field():
    merged = F1(Sum.from_values(1), Sum.from_values(2)).merge(
        F1(Sum.from_values(10), Sum.from_values(20))
    )
    assert merged.compute() == {"hits": 11, "misses": 22}


def test_values_worked_out_by_hand():
    values = jnp.array([[2.0, 4.0], [4.0, 6.0]])
    assert Mean.from_values(values).compute() == 4
    assert Sum.from_values(values).compute() == 16
    assert Min.from_values(values).compute() == 2
    assert Max.from_values(values).compute() == 6
    assert Std.from_values(values).compute() == math.sqrt(np.float32(2))
    assert (
        Mean.from_values(5).compute()
        == Std.from_values(jnp.array([1, 11])).compute()
        == Sum.from_values(np.array([True, False, True] * 2)).compute() + 1
        == 5
    )


def test_the_mean_is_weighted():
    weights = [1, 3]
    assert Mean.from_values(jnp.array([2.0, 4.0]), weight=jnp.array(weights)).compute() == 3.5
    assert (
        Mean.from_values(jnp.array([[2.0, 2.0], [4.0, 4.0]]), weight=jnp.array(weights)).compute()
        == 3.5
    )
    assert (
        Mean.from_values(
            jnp.array([2.0, 4.0, 9.0]), jnp.array([True, True, False]), jnp.array([1, 3, 5])
        ).compute()
        == 3.5
    )
    merged = Mean.from_values(jnp.float32(2), weight=jnp.int32(4)).merge(
        Mean.from_values(jnp.float32(5), weight=jnp.int32(2))
    )
    assert merged.compute() == 3
    assert merged.merge(Mean.from_values(NAN, weight=0)).compute() == 3


@pytest.mark.variants("slow")
@pytest.mark.parametrize("junk", [NAN, INF, -INF, 1e38])
def test_masked_values_may_hold_anything(junk: float):
    values = jnp.array([[1.0, 3.0], [junk, junk], [5.0, 7.0]])
    mask = jnp.array([True, False, True])
    full = jnp.stack([mask, mask], axis=1)
    remaining = jnp.array([1.0, 3.0, 5.0, 7.0])
    for kind in OF_VALUES:
        assert bits(kind.from_values(values, mask)) == bits(kind.from_values(values, full)), kind
        assert kind.from_values(values, mask).compute() == kind.from_values(remaining).compute(), (
            kind
        )
        assert bits(kind.from_values(values, mask).compute()) == bits(
            kind.from_values(values, np.asarray(mask)).compute()
        ), kind
    weight = jnp.array([1.0, junk, 1.0])
    assert Mean.from_values(values, mask, weight).compute() == 4
    assert Mean.from_values(values, weight=jnp.array([1, 0, 1])).compute() == 4
    gradient = jax.grad(lambda array: Mean.from_values(array, mask).compute())(values)
    assert gradient.tolist() == [[0.25, 0.25], [0, 0], [0.25, 0.25]]


def test_accuracy_of_one_logit_for_two_classes_G11():
    logits, labels = jnp.array([2.0, -1.0, 0.5, NAN]), jnp.array([1, 0, 0, 1])
    assert Accuracy.from_binary_logits(logits, labels).compute() == 0.5
    assert Accuracy.from_binary_logits(logits, labels == 1).compute() == 0.5
    mask = jnp.array([True, True, False, False])
    assert Accuracy.from_binary_logits(logits, labels, mask).compute() == 1
    probabilities = jnp.array([[0.9, 0.4], [0.6, 0.5]])
    labels = jnp.array([[1, 0], [0, 1]])
    assert Accuracy.from_binary_logits(probabilities, labels, threshold=0.5).compute() == 0.5
    with pytest.raises(ModelError, match="one label for each logit"):
        Accuracy.from_binary_logits(probabilities, jnp.array([1, 0]))


@pytest.mark.full
def test_metrics_without_values():
    for nothing in (jnp.zeros(0), jnp.zeros((0, 3))):
        assert math.isnan(Mean.from_values(nothing).compute())
        assert math.isnan(Std.from_values(nothing).compute())
        assert (
            Sum.from_values(nothing).compute(),
            Min.from_values(nothing).compute(),
            Max.from_values(nothing).compute(),
        ) == (0, INF, -INF)
    masked = jnp.array([False, False])
    assert math.isnan(Mean.from_values(jnp.ones(2), masked).compute())
    assert math.isnan(Accuracy.from_logits(jnp.ones((2, 3)), jnp.zeros(2, int), masked).compute())
    for kind in OF_VALUES:
        nothing, some = (
            kind.from_values(jnp.array([NAN, 1.0]), masked),
            kind.from_values(jnp.array([1.0, 2.0])),
        )
        assert (
            bits(nothing.merge(some).compute())
            == bits(some.merge(nothing).compute())
            == bits(some.compute())
        ), kind


def test_nan_and_infinity_are_not_hidden():
    for kind in OF_VALUES:
        for bad in (NAN, INF):
            merged = (
                kind.from_values(jnp.array([1.0, bad]))
                .merge(kind.from_values(jnp.ones(2)))
                .compute()
            )
            assert not math.isfinite(merged) or (kind is Min and bad == INF), (kind, bad)
    assert (
        Sum.from_values(INF).merge(Sum.from_values(1)).compute()
        == Mean.from_values(jnp.array([INF, 1])).merge(Mean.from_values(3)).compute()
        == INF
    )
    assert math.isnan(Sum.from_values(INF).merge(Sum.from_values(-INF)).compute())
    assert math.isnan(Min.from_values(jnp.array([NAN, 1])).merge(Min.from_values(0)).compute())


def test_mask_of_wrong_shape_is_an_error_naming_both_shapes():
    for kind in OF_VALUES:
        with pytest.raises(
            ConfigurationError, match=r"mask of shape \[2\] for values of shape \[3, 2\]"
        ):
            kind.from_values(jnp.ones((3, 2)), jnp.array([True, False]))
    with pytest.raises(
        ConfigurationError, match=r"weight of shape \[2, 3\] for values of shape \[2\]"
    ):
        Mean.from_values(jnp.ones(2), weight=jnp.ones((2, 3)))


def test_the_mean_of_many_values_stays_exact():
    """51 million times 0.1, where plain float32 sums are 5e-4 off; whole batches, and values one by
    one."""

    def total(batch: int, batches: int) -> Any:
        def add(_: Any, mean: Mean) -> Mean:
            return mean.merge(Mean.from_values(jnp.full(batch, 0.1)))

        return jax.jit(lambda: jax.lax.fori_loop(0, batches, add, Mean.from_values(0.0).empty()))()

    for batch, batches in ((1_000, 51_000), (1, 5_100_000)):
        mean = total(batch, batches)
        assert abs(float(mean.compute()) / 0.1 - 1) < 1e-6
        assert mean.weight.compute() == batch * batches


def test_small_values_are_not_lost_beside_large_ones():
    parts = [Sum.from_values(value) for value in (1e8, 1.0, -1e8, 1e-3, 3e8, -3e8)]
    for order in (parts, parts[::-1], parts[::2] + parts[1::2]):
        assert reduce(lambda a, b: a.merge(b), order).compute() == np.float32(1.001)


@pytest.mark.full
@given(
    st.lists(st.lists(st.floats(-1000, 1000, width=32), max_size=5), min_size=1, max_size=6),
    st.randoms(),
)
def test_merging_in_any_grouping_and_order_gives_the_same_result(
    batches: list[list[float]], random: Any
):
    every = np.array([value for batch in batches for value in batch], np.float64)
    for kind in (Mean, Sum, Min, Max):
        parts: list[Any] = [kind.from_values(np.array(batch, np.float32)) for batch in batches]
        while len(parts) > 1:
            a, b = parts.pop(random.randrange(len(parts))), parts.pop(random.randrange(len(parts)))
            parts.append(a.merge(b))
        expected = {Sum: every.sum(), Min: every.min(initial=INF), Max: every.max(initial=-INF)}
        expected[Mean] = every.sum() / every.size if every.size else NAN
        # Within one batch of 5 the sum is a plain one of float32, some of which cancels.
        np.testing.assert_allclose(parts[0].compute(), expected[kind], rtol=1e-6, atol=2e-3)


@pytest.mark.variants("slow")
@pytest.mark.parametrize("sizes", [[100, 0, 7, 93, 100], [300], [1] * 20 + [280], [299, 1]])
@pytest.mark.parametrize("offset", [-3e6, 0, 1e4])
def test_the_standard_deviation_beside_a_large_mean(sizes: list[int], offset: float):
    values = (np.random.default_rng(0).normal(size=300) * 3 + offset).astype(np.float32)
    parts = [Std.from_values(part) for part in np.split(values, np.cumsum(sizes)[:-1])]
    exact = values.astype(np.float64).std()
    np.testing.assert_allclose(reduce(lambda a, b: a.merge(b), parts).compute(), exact, rtol=3e-6)
    np.testing.assert_allclose(reduce(lambda a, b: b.merge(a), parts).compute(), exact, rtol=3e-6)


def test_the_standard_deviation_of_many_batches():
    def add(index: Any, std: Std) -> Std:
        return std.merge(Std.from_values(10_000 + jnp.array([-1.0, 1.0]) * (1 + index % 2)))

    std = jax.jit(lambda: jax.lax.fori_loop(0, 1_000_000, add, Std.from_values(0.0).empty()))()
    np.testing.assert_allclose(std.compute(), math.sqrt(2.5), rtol=1e-6)


def test_accuracy_over_batches_of_different_sizes():
    logits = jnp.array([[0.0, 1.0]])
    four = Accuracy.from_logits(jnp.repeat(logits, 4, axis=0), jnp.array([1, 1, 1, 1]))
    two = Accuracy.from_logits(jnp.repeat(logits, 2, axis=0), jnp.array([1, 0]))
    assert four.compute() == 1
    assert two.compute() == 0.5
    assert four.merge(two).compute() == np.float32(5 / 6)
    padded = Accuracy.from_logits(
        jnp.repeat(logits, 4, axis=0),
        jnp.array([1, 0, 1, 1]),
        jnp.array([True, True, False, False]),
    )
    assert padded.compute() == 0.5
    assert four.merge(padded).compute() == np.float32(5 / 6)


@pytest.mark.variants("full")
@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_accuracy_of_integer_and_one_hot_labels(top_k: int):
    random = np.random.default_rng(0)
    logits, labels = (
        random.normal(size=(3, 40, 5)).astype(np.float32),
        random.integers(0, 5, (3, 40)),
    )
    expected = top_k_accuracy_score(labels.ravel(), logits.reshape(-1, 5), k=top_k, labels=range(5))
    for given_labels in (
        labels,
        labels.astype(np.uint8),
        np.eye(5, dtype=np.float32)[labels],
        np.eye(5, dtype=int)[labels],
    ):
        np.testing.assert_allclose(
            Accuracy.from_logits(logits, given_labels, top_k=top_k).compute(), expected, rtol=1e-6
        )


@pytest.mark.full
def test_accuracy_of_equal_logits_nan_and_invalid_labels():
    def right(logits: list[float], label: int, top_k: int = 1) -> bool:
        return bool(
            Accuracy.from_logits(
                jnp.array([logits], float), jnp.array([label]), top_k=top_k
            ).compute()
        )

    assert [right([1, 1, 1], label) for label in (0, 1, 2)] == [True, False, False]
    assert [right([1, 1, 1], label, 2) for label in (0, 1, 2)] == [True, True, False]
    assert not right([NAN, NAN, NAN], 0)
    assert not right([NAN, 1, 0], 1)
    assert not right([1, NAN, 0], 1)
    assert not right([1, 1, 1], -1)
    assert not right([0, 1, 1], 3)
    assert not right([-INF, -INF, 1], -1, 2)
    assert right([-INF, -INF, -INF], 0)


@pytest.mark.parametrize("dtype", [bool, np.uint8, np.float32])
def test_a_one_hot_row_of_zeros_is_a_label_that_is_not_a_class(dtype: Any):
    # `one_hot(-1)` is such a row. The last two examples are predicted as class 0.
    labels = jax.nn.one_hot(jnp.array([0, 2, -1]), 3, dtype=dtype)
    logits = jnp.array([[2.0, 1, 0], [3, 2, 1], [2, 0, 0]])
    assert Accuracy.from_logits(logits, labels).compute() == np.float32(1 / 3)
    assert Accuracy.from_logits(logits, jnp.full((3, 3), NAN)).compute() == 0


@pytest.mark.full
def test_accuracy_of_small_integers_and_many_classes():
    labels = jnp.array([0, 200], jnp.uint8)
    assert Accuracy.from_logits(jax.nn.one_hot(labels, 300), labels).compute() == 1
    assert (
        Accuracy.from_logits(jnp.array([[0.0, 1], [0, 1]]), jnp.array([True, False])).compute()
        == 0.5
    )


def test_logits_without_a_class_axis_are_an_error():
    with pytest.raises(
        ConfigurationError,
        match=r"logits \[4\] .* end with an axis of classes, the labels are integers",
    ):
        Accuracy.from_logits(jnp.ones(4), jnp.array([0, 1, 1, 0]))


@pytest.mark.parametrize(
    ("labels", "top_k", "words"),
    [
        (jnp.zeros((4, 1), int), 1, r"logits \[4, 3\] with labels int32\[4, 1\]"),
        (
            jnp.zeros(4),
            1,
            (
                r"labels float32\[4\]; .* labels are integers of shape \[4\], or one-hot of shape"
                r" \[4, 3\]"
            ),
        ),
        (jnp.zeros(4, int), 0, "top_k=0 of 3 classes; choose from 1 to 3"),
        (jnp.zeros(4, int), 4, "top_k=4 of 3 classes"),
    ],
)
def test_invalid_arguments_of_accuracy_are_an_error(labels: Any, top_k: int, words: str):
    with pytest.raises(ConfigurationError, match=words):
        Accuracy.from_logits(jnp.ones((4, 3)), labels, top_k=top_k)


def test_the_moving_average_begins_as_a_mean():
    averages = [
        ExponentialMovingAverage.from_values(value, decay=0.75) for value in (4.0, 0, 0, 0, 0, 0)
    ]
    values = [averages[0]]
    for new in averages[1:]:
        values.append(values[-1].update(new))
    np.testing.assert_allclose(
        [average.compute() for average in values], [4, 2, 4 / 3, 1, 0.75, 0.5625], rtol=1e-6
    )
    folded = jax.jit(lambda: reduce(lambda a, b: a.update(b), averages, averages[0].empty()))()
    np.testing.assert_allclose(folded.compute(), 0.5625, rtol=1e-6)


def test_a_moving_average_leaves_out_what_weighs_nothing():
    nothing = ExponentialMovingAverage.from_values(0.0, weight=jnp.float32(0))
    values = [ExponentialMovingAverage.from_values(value, weight=7) for value in (4.0, 2.0)]
    averages = [nothing, nothing, values[0], nothing, values[1], nothing]
    expected = [NAN, NAN, 4, 4, 3, 3]
    average = averages[0].empty()
    for new, number in zip(averages, expected, strict=True):
        average = average.update(new)
        np.testing.assert_allclose(average.compute(), number, rtol=1e-6)


@pytest.mark.parametrize(
    "first",
    [
        LastValue.from_values(3),
        LastValue.from_values(jnp.arange(3)),
        ExponentialMovingAverage.from_values(-0.7),
        ExponentialMovingAverage.from_values(NAN),
    ],
)
def test_running_metrics_start_from_empty(first: RunningMetric):
    empty = first.empty()
    assert jax.tree.structure(empty) == jax.tree.structure(first)
    assert bits(empty.update(first)) == bits(first)
    assert not any(leaf.weak_type for leaf in jax.tree.leaves((first, empty, first.update(first))))
    loop = jax.jit(
        lambda metric: jax.lax.fori_loop(
            0, 3, lambda _, before: before.update(metric), metric.empty()
        )
    )
    assert jax.tree.structure(loop(first)) == jax.tree.structure(first)
    on_host = jax.tree.map(np.asarray, first).compute()
    assert isinstance(on_host, np.ndarray)
    np.testing.assert_array_equal(on_host, np.asarray(first.compute()))


def test_last_value_is_the_newest():
    assert LastValue.from_values(1).update(LastValue.from_values(2)).compute() == 2


@pytest.mark.parametrize("decay", [1, -0.5, 1.1, NAN])
def test_decay_outside_of_zero_to_one_is_an_error(decay: float):
    with pytest.raises(ConfigurationError, match="ExponentialMovingAverage with decay="):
        ExponentialMovingAverage.from_values(1.0, decay=decay)


class Kept(CollectingMetric):
    """The examples themselves, as a user writes it."""

    values: Any

    @staticmethod
    def from_values(values: Any, mask: Any = None) -> "Kept":
        length = len(jax.tree.leaves(values)[0])
        return Kept(jnp.ones(length, bool) if mask is None else mask, values)

    def compute(self) -> Any:
        return jax.tree.map(lambda leaf: leaf[self.mask], self.values)


def test_collected_states_are_concatenated():
    first, second = (
        Kept.from_values(jnp.arange(6.0).reshape(3, 2)),
        Kept.from_values(jnp.arange(6.0, 12).reshape(3, 2)),
    )
    merged = first.merge(second)
    assert merged.compute().shape == (6, 2)
    assert merged.compute().tolist() == np.arange(12).reshape(6, 2).tolist()
    assert all(type(leaf) is np.ndarray for leaf in jax.tree.leaves(merged))
    for both in (merged.merge(merged.empty()), merged.empty().merge(merged), merged.merge()):
        assert bits(both) == bits(merged)
    assert bits(first.merge(second, first)) == bits(first.merge(second).merge(first))


def test_collected_trees_are_merged_leaf_by_leaf():
    @jax.jit
    def step(start: Any) -> Kept:
        values = {
            "index": start + jnp.arange(3),
            "pair": (jnp.ones((3, 2, 2)), jnp.array([True, False, True])),
        }
        return Kept.from_values(values, jnp.array([True, True, False]))

    merged = step(0).merge(step(10)).compute()
    assert merged["index"].tolist() == [0, 1, 10, 11]
    assert merged["index"].dtype == np.int32
    assert merged["pair"][0].shape == (4, 2, 2)
    assert merged["pair"][1].tolist() == [True, False, True, False]
    assert step(0).empty().compute()["pair"][0].shape == (0, 2, 2)


def test_collecting_different_shapes_or_dtypes_is_an_error():
    with pytest.raises(ModelError, match=r"Kept collects .*float32\[2\].*float32\[3\]"):
        Kept.from_values(jnp.ones((4, 2))).merge(Kept.from_values(jnp.ones((4, 3))))
    with pytest.raises(ModelError, match=r"float32.*int32"):
        Kept.from_values(jnp.ones(4)).merge(Kept.from_values(jnp.ones(4, int)))


def test_the_three_kinds_are_distinct_types():
    assert issubclass(Std, Metric) and not issubclass(Std, RunningMetric | CollectingMetric)
    assert issubclass(LastValue, RunningMetric) and not issubclass(
        LastValue, Metric | CollectingMetric
    )
    assert issubclass(Kept, CollectingMetric) and not issubclass(Kept, Metric | RunningMetric)
    for kind in (Metric, RunningMetric, CollectingMetric):
        assert issubclass(kind, eqx.Module)
        with pytest.raises(TypeError, match="abstract"):
            kind(*[jnp.zeros(1)] * len(kind.__dataclass_fields__))


@pytest.mark.variants("full")
@pytest.mark.parametrize("kind", [*OF_VALUES, LastValue, ExponentialMovingAverage])
def test_float64_stays_and_all_else_becomes_float32(kind: Any):
    with jax.enable_x64(True):
        for dtype in (jnp.float64, jnp.float32, jnp.bfloat16, jnp.int64, jnp.bool_):
            metric = kind.from_values(jnp.ones(3, dtype))
            both = (
                metric.update(metric) if isinstance(metric, RunningMetric) else metric.merge(metric)
            )
            for leaf in jax.tree.leaves((metric, both, metric.empty())):
                assert (
                    leaf.dtype == (jnp.float64 if dtype == jnp.float64 else jnp.float32)
                    or leaf.dtype == jnp.int32
                )
                assert not leaf.weak_type


def test_float64_is_computed_in_float64():
    with jax.enable_x64(True):
        values = np.array([1.0, 1.0 + 1e-12])
        assert Mean.from_values(values).compute() == values.mean()
        assert Std.from_values(values).merge(Std.from_values(values)).compute() == values.std()


class Raw(fg.metrics.Metric):
    """Arrays, of which nobody says how they are merged."""

    values: jax.Array

    def compute(self) -> jax.Array:
        return self.values.sum()


class Growing(Raw):
    """Keeps every value, so that its shape grows."""

    def merge(self, other: Any) -> "Growing":
        return Growing(jnp.concatenate([self.values, other.values]))


class Failing(fg.metrics.Metric):
    """Cannot be computed."""

    mean: fg.metrics.Mean

    def compute(self) -> jax.Array:
        raise ZeroDivisionError


@pytest.mark.parametrize(
    ("metric", "error", "message"),
    [
        (lambda: Raw(jnp.ones(2)), ModelError, "Raw holds .*, which is not a metric: define merge"),
        (
            lambda: Growing(jnp.ones(2)),
            ModelError,
            "metric 'mine' became .* when merged: .* of the same shapes",
        ),
        (lambda: Failing(fg.metrics.Mean.from_values(1.0)), ZeroDivisionError, "^"),
    ],
)
def test_mistake_in_a_custom_metric_is_an_error_naming_it(
    metric: Any, error: Any, message: str
) -> None:
    class Measuring(fg.Module):
        weight: jax.Array

        def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
            return fg.Output(self.weight * 1.0, metrics={"mine": metric()})

        def configure_optimizers(self) -> Any:
            return optax.sgd(1.0)

    with pytest.raises(error, match=message) as caught:
        fg.Engine(steps=2).fit(Measuring(jnp.zeros(())), [np.zeros(1, np.float32)] * 2)
    assert "metric 'mine'" in "\n".join(
        [str(caught.value), *getattr(caught.value, "__notes__", [])]
    )


@pytest.mark.parametrize("restart", [False, True])
def test_metrics_merged_as_one_vector_are_those_merged_alone(restart: bool):
    """From four of a kind on; of another kind or shape each stays alone."""
    values = np.random.default_rng(0).normal(size=(2, 6)).astype(np.float32)
    batches = [
        {
            **{f"mean_{index}": fg.metrics.Mean.from_values(row[index]) for index in range(6)},
            "largest": fg.metrics.Max.from_values(row),
            "vector": jax.vmap(fg.metrics.Mean.from_values)(row),
        }
        for row in values
    ]
    before, after = map(fg.metrics.MetricAccumulator.from_metrics, batches)
    updated = jax.jit(fg.metrics.MetricAccumulator.update)(before, after, jnp.bool_(restart))
    for name, metric in updated.metrics.items():
        alone = after.metrics[name] if restart else before.metrics[name].update(after.metrics[name])
        for leaf, expected in zip(jax.tree.leaves(metric), jax.tree.leaves(alone), strict=True):
            assert leaf.tobytes() == expected.tobytes(), name
    assert updated.metrics.keys() == batches[0].keys()


def test_an_index_follows_the_name_of_its_metric_without_a_slash():
    values = {"loss": {"": 1, "[0]": 2, "std": {"": 3, "[1]": 4}}}
    assert flatten_nested(values) == {"loss": 1, "loss[0]": 2, "loss/std": 3, "loss/std[1]": 4}


def test_numbers_may_be_the_keys_of_nested_metrics():
    assert flatten_nested({"recall": {0: 0.5, 1: 0.7}}) == {"recall/0": 0.5, "recall/1": 0.7}


class Record(AccumulatedMetric):
    """Of a kind that only the base classes know: merged in any order, yet carried across
    windows."""

    restarts_with_window = False

    value: jax.Array

    def update(self, new: Any) -> "Record":
        return Record(jnp.maximum(self.value, new.value))

    def empty(self) -> "Record":
        return Record(jnp.full_like(self.value, -jnp.inf))

    def compute(self) -> jax.Array:
        return self.value


class MeasuringRecord(fg.Module):
    weight: jax.Array

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        metrics = {"largest": fg.metrics.Max.from_values(batch), "record": Record(batch.max())}
        return fg.Output(self.weight * 1.0, metrics=metrics)

    def configure_optimizers(self) -> Any:
        return optax.sgd(1.0)


def test_a_further_kind_is_logged_as_its_class_says() -> None:
    data = [np.full(1, value, np.float32) for value in (1.0, 3.0, 2.0)]
    result = fg.Engine(steps=3, log_every=1).fit(MeasuringRecord(jnp.zeros(())), data)
    assert result.history["train/largest"].tolist() == [1.0, 3.0, 2.0]
    assert result.history["train/record"].tolist() == [1.0, 3.0, 3.0]


def test_who_does_not_know_a_kind_raises() -> None:
    data = [np.ones(1, np.float32)]
    message = "'record' is of type Record, which is not known here: use a Metric or RunningMetric"
    with pytest.raises(ModelError, match=message):
        fg.Engine().evaluate(MeasuringRecord(jnp.zeros(())), data)
    with pytest.raises(ModelError, match=message):
        sort_by_kind({"record": Record(jnp.ones(()))}, Metric, RunningMetric)
    with pytest.raises(ModelError, match="'rate' is of type float"):
        fg.metrics.MetricAccumulator.from_metrics({"rate": 0.1})  # pyright: ignore[reportArgumentType]
