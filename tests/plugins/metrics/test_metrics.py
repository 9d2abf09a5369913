"""Every metric against scikit-learn over the whole set, from randomly split, padded and merged
parts."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, cast

import fulgurite as fg
import fulgurite_metrics as fm
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import sklearn.metrics as sk
from fulgurite.errors import ConfigurationError
from fulgurite_evaluators import Evaluator
from fulgurite_metrics.arrays import count_indices
from hypothesis import example, given, settings, strategies as st
from scipy.ndimage import gaussian_filter
from scipy.special import softmax
from scipy.stats import pearsonr, spearmanr

CLASSES = range(4)
PART = 6  # examples in a part with its padding: one shape, so that little is compiled
NAN = math.nan
MERGE = jax.jit(lambda a, b: a.merge(b))
COMPUTE = jax.jit(lambda metric: metric.compute())


@dataclass(frozen=True)
class Case:
    """A metric of `data(random)`, whose `expected` over the arrays of the whole set is computed by
    something else."""

    of: Callable[..., Any]
    data: Callable[..., dict[str, np.ndarray]]
    expected: Callable[..., Any]

    @cached_property
    def compiled(self) -> Callable[..., Any]:
        return jax.jit(self.of)


def logits(random: np.random.Generator, n: int) -> dict[str, np.ndarray]:
    """Few values, so that there are ties; some classes do not occur."""
    label = random.choice(random.choice(4, random.integers(1, 5)), n).astype(
        random.choice(["uint8", "int32", "int8"])
    )
    return {"preds": np.round(random.normal(size=(n, 4)) * 2).astype("float16"), "labels": label}


def binary(random: np.random.Generator, n: int) -> dict[str, np.ndarray]:
    share = random.choice([0, 0.3, 0.5, 1])
    labels = (random.random(n) < share).astype(random.choice(["bool", "int32", "float32"]))
    return {"scores": (np.round(random.normal(size=n) * 2) / 2).astype("float16"), "labels": labels}


def decisions(random: np.random.Generator, n: int) -> dict[str, np.ndarray]:
    labels = random.random(n) < random.choice([0, 0.3, 1])
    return {
        "preds": random.random(n) < random.choice([0, 0.5, 1]),
        "labels": labels.astype(random.choice(["?", "i4"])),
    }


def numbers(random: np.random.Generator, n: int) -> dict[str, np.ndarray]:
    offset = random.choice([0, 0, 100.0])
    targets = np.round(random.normal(size=n) * random.choice([0, 1])) + offset
    return {
        "preds": (targets + random.normal(size=n) / 8).astype("float32"),
        "targets": targets.astype("float32"),
    }


def ratings(random: np.random.Generator, n: int) -> dict[str, np.ndarray]:
    """Lists of five items, few values, so that there are ties."""
    return {
        "scores": np.round(random.normal(size=(n, 5)) * 2).astype("float16"),
        "relevance": random.choice([0, 0, 1, 3], (n, 5)).astype("float32"),
    }


def single_answers(random: np.random.Generator, n: int) -> dict[str, np.ndarray]:
    """Lists of five items without ties, of which one is relevant."""
    scores = random.permuted(np.tile(np.arange(5), (n, 1)), axis=1).astype("float32")
    return {"scores": scores, "relevance": np.eye(5, dtype="float32")[random.integers(0, 5, n)]}


def several_labels(random: np.random.Generator, n: int) -> dict[str, np.ndarray]:
    labels = random.random((n, 3)) < random.choice([0, 0.3, 1], 3)
    return {"scores": np.round(random.normal(size=(n, 3)) * 2).astype("f2"), "labels": labels}


def several_decisions(random: np.random.Generator, n: int) -> dict[str, np.ndarray]:
    arrays = several_labels(random, n)
    return {"preds": arrays["scores"] > 0, "labels": arrays["labels"]}


def pictures(random: np.random.Generator, n: int) -> dict[str, np.ndarray]:
    targets = random.random((n, 13, 14, 2)).astype("float32")
    noise = random.normal(size=targets.shape) * 0.2
    return {"preds": (targets + noise).astype("float32"), "targets": targets}


def similarity(preds: np.ndarray, targets: np.ndarray) -> float:
    """As the paper defines it, with the window of scipy."""

    def blur(array: np.ndarray) -> np.ndarray:
        blurred = gaussian_filter(array, 1.5, radius=5, axes=(1, 2))
        return blurred[:, 5:-5, 5:-5]

    x, y = preds.astype(float), targets.astype(float)
    mean_x, mean_y = blur(x), blur(y)
    variances = blur(x**2) - mean_x**2 + blur(y**2) - mean_y**2
    covariance = blur(x * y) - mean_x * mean_y
    brightness = (2 * mean_x * mean_y + 1e-4) / (mean_x**2 + mean_y**2 + 1e-4)
    return (brightness * (2 * covariance + 9e-4) / (variances + 9e-4)).mean()


def average_defined(score: Callable[..., Any], scores: np.ndarray, is_label: np.ndarray) -> float:
    """The mean over the columns that have a positive and a negative example."""
    values = [
        score(labels, column)
        for labels, column in zip(is_label.T, scores.T, strict=True)
        if labels.any() and (score is sk.average_precision_score or not labels.all())
    ]
    return float(np.mean(values)) if values else NAN


def decided_labels(score: Callable[..., Any], average: str | None) -> Callable[..., Any]:
    """Averaged over the labels that occur."""

    def expected(preds: np.ndarray, labels: np.ndarray) -> Any:
        if average == "micro":
            return decided(score)(preds.ravel(), labels.ravel())
        values = [decided(score)(*columns) for columns in zip(preds.T, labels.T, strict=True)]
        defined = [value for value in values if not math.isnan(value)]
        return values if average is None else float(np.mean(defined)) if defined else NAN

    return expected


def is_constant(preds: np.ndarray, targets: np.ndarray) -> bool:
    return len(set(targets.tolist())) < 2 or len(set(preds.tolist())) < 2


def classified(score: Callable[..., Any], average: str | None) -> Callable[..., Any]:
    def expected(preds: np.ndarray, labels: np.ndarray) -> Any:
        predicted = preds.argmax(-1)
        options = {"labels": CLASSES} if average is None else {}
        if not len(labels):
            return np.full(4, NAN) if average is None else NAN
        values = score(labels, predicted, average=average, zero_division=0, **options)
        occurs = [label in labels or label in predicted for label in CLASSES]
        return np.where(occurs, values, NAN) if average is None else values

    return expected


def decided(score: Callable[..., Any]) -> Callable[..., Any]:
    def expected(preds: np.ndarray, labels: np.ndarray) -> Any:
        return score(labels, preds, zero_division=0) if preds.any() or labels.any() else NAN

    return expected


def calibration(preds: np.ndarray, labels: np.ndarray, bins: int) -> float:
    """Bin by bin, as the paper writes it."""
    if not len(labels):
        return NAN
    probabilities = np.asarray(jax.nn.softmax(preds.astype("float32")))
    confidence, right = probabilities.max(-1), preds.argmax(-1) == labels
    total = 0.0
    for low in range(bins):
        inside = (confidence * np.float32(bins) > low) & (confidence * np.float32(bins) <= low + 1)
        if inside.any():
            total += inside.mean() * abs(
                right[inside].mean() - confidence[inside].astype(float).mean()
            )
    return total


def perplexity(preds: np.ndarray, labels: np.ndarray) -> float:
    if not len(labels):
        return NAN
    probabilities = np.exp(preds.astype(float)) / np.exp(preds.astype(float)).sum(-1, keepdims=True)
    return np.exp(sk.log_loss(labels, probabilities, labels=CLASSES))


def unless(undefined: Callable[..., bool], score: Callable[..., Any]) -> Callable[..., Any]:
    return lambda **arrays: (
        NAN if undefined(*arrays.values()) else score(*reversed(arrays.values()))
    )


def widen(array: np.ndarray) -> np.ndarray:
    return array.astype(float)


def none(_: np.ndarray, labels: np.ndarray) -> bool:
    return not len(labels)


LONG_CASES = {"ExpectedCalibrationError"}
CASES = {
    "ConfusionMatrix": Case(
        fm.ConfusionMatrix.from_predictions,
        logits,
        lambda preds, labels: (
            sk.confusion_matrix(labels, preds.argmax(-1), labels=CLASSES)
            if len(labels)
            else np.zeros((4, 4))
        ),
    ),
    "ConfusionMatrix of two": Case(
        fm.ConfusionMatrix.from_predictions,
        decisions,
        lambda preds, labels: (
            sk.confusion_matrix(labels, preds, labels=(0, 1)) if len(labels) else np.zeros((2, 2))
        ),
    ),
    **{
        f"{kind.__name__} {average}": Case(
            partial(kind.from_predictions, average=average), logits, classified(score, average)
        )
        for kind, score in (
            (fm.Precision, sk.precision_score),
            (fm.Recall, sk.recall_score),
            (fm.F1, sk.f1_score),
        )
        for average in ("macro", "micro", None)
    },
    "Precision of two": Case(fm.Precision.from_predictions, decisions, decided(sk.precision_score)),
    "Recall of two": Case(
        partial(fm.Recall.from_predictions, average="micro"), decisions, decided(sk.recall_score)
    ),
    "F1 of two": Case(
        partial(fm.F1.from_predictions, average=None), decisions, decided(sk.f1_score)
    ),
    "MeanSquaredError": Case(
        fm.MeanSquaredError.from_predictions, numbers, unless(none, sk.mean_squared_error)
    ),
    "MeanAbsoluteError": Case(
        fm.MeanAbsoluteError.from_predictions, numbers, unless(none, sk.mean_absolute_error)
    ),
    "R2": Case(
        fm.R2.from_predictions, numbers, unless(lambda _, targets: len(targets) < 2, sk.r2_score)
    ),
    "Perplexity": Case(fm.Perplexity.from_logits, logits, perplexity),
    "ExpectedCalibrationError": Case(
        partial(fm.ExpectedCalibrationError.from_logits, bins=5),
        logits,
        partial(calibration, bins=5),
    ),
    "RocAuc": Case(
        fm.RocAuc.from_scores,
        binary,
        unless(lambda _, labels: len(set(labels.tolist())) < 2, sk.roc_auc_score),
    ),
    "AveragePrecision": Case(
        fm.AveragePrecision.from_scores,
        binary,
        unless(lambda _, labels: not labels.any(), sk.average_precision_score),
    ),
    **{
        f"FBeta {average}": Case(
            partial(fm.FBeta.from_predictions, average=average, beta=2.0),
            logits,
            classified(partial(sk.fbeta_score, beta=2.0), average),
        )
        for average in ("macro", "micro", None)
    },
    **{
        f"{kind.__name__} of several labels {average}": Case(
            partial(kind.from_multilabel, average=average),
            several_decisions,
            decided_labels(score, average),
        )
        for kind, score, average in (
            (fm.F1, sk.f1_score, "macro"),
            (fm.Precision, sk.precision_score, None),
            (fm.Recall, sk.recall_score, "micro"),
        )
    },
    "BrierScore": Case(
        fm.BrierScore.from_logits,
        logits,
        unless(
            none,
            lambda labels, preds: (
                ((softmax(preds.astype(float), -1) - np.eye(4)[labels]) ** 2).sum(-1).mean()
            ),
        ),
    ),
    "Pearson": Case(
        fm.Pearson.from_predictions,
        numbers,
        unless(is_constant, lambda targets, preds: pearsonr(*map(widen, (preds, targets)))[0]),
    ),
    "Spearman": Case(
        fm.Spearman.from_predictions,
        numbers,
        unless(is_constant, lambda targets, preds: spearmanr(preds, targets)[0]),
    ),
    "NDCG": Case(
        fm.NDCG.from_scores,
        ratings,
        unless(none, lambda relevance, scores: sk.ndcg_score(relevance, scores)),
    ),
    "NDCG of three": Case(
        partial(fm.NDCG.from_scores, top_k=3),
        ratings,
        unless(none, lambda relevance, scores: sk.ndcg_score(relevance, scores, k=3)),
    ),
    "MeanReciprocalRank": Case(
        fm.MeanReciprocalRank.from_scores,
        single_answers,
        unless(none, sk.label_ranking_average_precision_score),
    ),
    "RocAucOneVsRest": Case(
        fm.RocAucOneVsRest.from_logits,
        logits,
        lambda preds, labels: average_defined(
            sk.roc_auc_score, preds, labels[:, None] == np.arange(4)
        ),
    ),
    "MultilabelAveragePrecision": Case(
        fm.MultilabelAveragePrecision.from_scores,
        several_labels,
        lambda scores, labels: average_defined(sk.average_precision_score, scores, labels),
    ),
    "PSNR": Case(
        fm.PSNR.from_images,
        pictures,
        unless(
            none,
            lambda targets, preds: np.mean(
                [
                    -10 * math.log10(sk.mean_squared_error(*pair))
                    for pair in zip(
                        widen(preds).reshape(-1, 364), targets.reshape(-1, 364), strict=True
                    )
                ]
            ),
        ),
    ),
    "SSIM": Case(
        fm.SSIM.from_images,
        pictures,
        unless(none, lambda targets, preds: similarity(preds, targets)),
    ),
    "Collect": Case(
        lambda scores, labels, mask: fm.Collect.from_values(scores, mask),
        binary,
        lambda scores, labels: scores,
    ),
}


def split_batches(
    arrays: dict[str, np.ndarray], random: np.random.Generator
) -> list[dict[str, np.ndarray]]:
    """The examples in order, in parts of random sizes, padded with what must not matter, at random
    places."""
    parts, rest = [], np.arange(len(next(iter(arrays.values()))))
    while len(rest) or not parts:
        here, rest = np.split(rest, [random.integers(0, PART + 1)])
        mask = np.zeros(PART, bool)
        mask[random.permutation(PART)[: len(here)]] = True
        part: dict[str, np.ndarray] = {}
        for name, array in arrays.items():
            junk = NAN if array.dtype.kind == "f" else 1
            part[name] = np.full((PART, *array.shape[1:]), junk).astype(array.dtype)
            part[name][mask] = array[here]
        parts.append({**part, "mask": mask})
    return parts


def merged(parts: list[Any], random: np.random.Generator) -> Any:
    """In any order and grouping; those that are gathered in order."""
    if isinstance(parts[0], fg.metrics.CollectingMetric):
        return parts[0].merge(*parts[1:])
    while len(parts) > 1:
        a, b = (parts.pop(random.integers(len(parts))) for _ in range(2))
        parts.append(MERGE(a, b))
    return parts[0]


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=name, marks=pytest.mark.full if name in LONG_CASES else ())
        for name, case in CASES.items()
    ],
)
@given(n=st.integers(0, 25), seed=st.integers(0, 10_000))
@settings(max_examples=8)
@example(n=0, seed=0)
@example(n=1, seed=0)
def test_any_split_gives_what_scikit_learn_gives_over_the_whole_set(
    case: Case, n: int, seed: int
) -> None:
    random = np.random.default_rng(seed)
    arrays = case.data(random, n)
    parts = [case.compiled(*part.values()) for part in split_batches(arrays, random)]
    both = jax.tree.map(np.asarray, merged(parts, random))
    computed_value, expected = both.compute(), case.expected(**arrays)
    assert not isinstance(computed_value, jax.Array)
    np.testing.assert_allclose(computed_value, expected, rtol=2e-6, atol=2e-6)
    if isinstance(both, fg.metrics.Metric):
        np.testing.assert_allclose(COMPUTE(both), computed_value, rtol=1e-6)


def test_accuracy_over_batches_of_different_sizes() -> None:
    four = fm.Recall.from_predictions(np.ones(4, bool), np.ones(4, int), average="micro")
    two = fm.Recall.from_predictions(np.array([True, False]), np.ones(2, int), average="micro")
    assert (four.compute(), two.compute()) == (1, 0.5)
    assert four.merge(two).compute() == two.merge(four).compute() == np.float32(5 / 6)


def test_average_precision_of_two_parts_in_either_order() -> None:
    first = fm.AveragePrecision.from_scores(jnp.array([0.1, 0.4]), jnp.array([0, 0]))
    two = fm.AveragePrecision.from_scores(jnp.array([0.35, 0.8]), jnp.array([1, 1]))
    for both in (first.merge(two), two.merge(first), first.merge(two.empty(), two)):
        assert both.compute() == pytest.approx(5 / 6)
    assert fm.RocAuc(both.mask, both.scores, both.labels).compute() == 0.75


def some_metrics() -> list[fg.metrics.Metric]:
    preds, labels = jnp.array([[2.0, 1, 0], [0, 3, 1], [1, 1, 0]]), jnp.array([0, 2, 1])
    classified = [
        kind.from_predictions(preds, labels) for kind in (fm.ConfusionMatrix, fm.Precision, fm.F1)
    ]
    classified = [*classified, fm.Perplexity.from_logits(preds, labels)]
    numeric = [
        kind.from_predictions(preds[0], preds[1])
        for kind in (fm.MeanSquaredError, fm.MeanAbsoluteError, fm.R2)
    ]
    sampled = [fm.SampledSet.from_values({"x": preds}, labels, size=size) for size in (2, 5)]
    median = fm.Median.from_values(preds, jax.random.key(1), size=4)
    more = [
        fm.FBeta.from_predictions(preds, labels, beta=0.5),
        fm.F1.from_multilabel(preds > 1, preds > 0),
        fm.BrierScore.from_logits(preds, labels),
        fm.Pearson.from_predictions(preds[0], preds[1]),
        fm.NDCG.from_scores(preds, preds),
        fm.MeanReciprocalRank.from_scores(preds, preds > 2),
        fm.PSNR.from_images(preds[..., None, None], preds[..., None, None] + 1),
        fm.Norm.from_tree({"a": preds}),
    ]
    return [
        *classified,
        *more,
        *numeric,
        *sampled,
        median,
        fm.ExpectedCalibrationError.from_logits(preds, labels),
    ]


def test_merging_with_the_identity_on_both_sides_changes_no_bit() -> None:
    def bits(tree: Any) -> list[Any]:
        return [
            (leaf.dtype, leaf.shape, leaf.weak_type, leaf.tobytes())
            for leaf in jax.tree.leaves(tree)
        ]

    for metric in some_metrics():
        twice = MERGE(metric, metric)
        for operand in (metric, twice, metric.empty()):
            assert jax.tree.structure(operand) == jax.tree.structure(metric.empty())
            assert (
                bits(MERGE(operand, metric.empty()))
                == bits(MERGE(metric.empty(), operand))
                == bits(operand)
            )


@pytest.mark.full
def test_counts_stay_exact_where_float32_does_not() -> None:
    million = fm.ConfusionMatrix.from_predictions(jnp.ones(2**20, bool), jnp.ones(2**20, bool))
    single = fm.ConfusionMatrix.from_predictions(jnp.ones(1, bool), jnp.ones(1, bool))
    added = jax.jit(
        lambda: jax.lax.fori_loop(0, 64, lambda _, both: both.merge(million).merge(single), single)
    )()
    assert float(added.counts.total[1, 1]) + float(added.counts.rounding_error[1, 1]) == 2**26 + 65
    many = count_indices(jnp.zeros(2**24 + 1, jnp.int32), 2)
    assert float(many.total[0]) + float(many.rounding_error[0]) == 2**24 + 1


def test_label_that_is_not_a_class_is_never_right() -> None:
    preds = jnp.array([[0.0, 1, 2], [0, 1, 2], [NAN, 1, 0], [3, 1, 2]])
    labels = jnp.array([2, -1, 1, 3])
    recall, precision = (
        fm.Recall.from_predictions(preds, labels, average=None),
        fm.Precision.from_predictions(preds, labels, average=None),
    )
    np.testing.assert_array_equal(
        recall.compute(), [0, 0, 1]
    )  # the first was predicted, but is none
    np.testing.assert_array_equal(precision.compute(), [0, 0, 0.5])
    assert fm.ConfusionMatrix.from_predictions(preds, labels).compute().tolist() == [
        [0, 0, 0],
        [0, 0, 0],
        [0, 0, 1],
    ]
    assert (
        fm.Perplexity.from_logits(preds, labels, labels >= 0).compute()
        != fm.Perplexity.from_logits(preds, labels).compute()
    )
    assert fm.Perplexity.from_logits(preds[:2], labels[:2]).compute() == math.inf
    for metric in (fm.F1, fm.Precision, fm.Recall):
        one_hot = metric.from_predictions(preds, jax.nn.one_hot(labels, 3), average=None)
        integers = metric.from_predictions(preds, labels, average=None)
        np.testing.assert_array_equal(one_hot.compute(), integers.compute())


@pytest.mark.full
def test_metrics_under_strict_dtype_promotion() -> None:
    logits, labels, weight = jnp.eye(3), np.array([0, 1, 0], np.uint8), jnp.array([1, 1, 2])
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        assert fg.metrics.Mean.from_values(jnp.array([0.0, 4.0, 2.0]), weight=weight).compute() == 2
        accuracy = fg.metrics.Accuracy.from_logits(logits, labels).compute()
        assert (
            accuracy
            == fm.Precision.from_predictions(logits, labels, average="micro").compute()
            == pytest.approx(2 / 3)
        )
        assert (
            fm.Perplexity.from_logits(logits, labels).compute()
            > fm.ExpectedCalibrationError.from_logits(logits, labels).compute()
        )
        assert fm.MeanReciprocalRank.from_scores(logits[:, ::-1], logits).compute() == np.float32(
            11 / 18
        )


@pytest.mark.full
def test_labels_may_be_one_hot_and_examples_have_more_axes() -> None:
    random = np.random.default_rng(0)
    preds, labels = random.normal(size=(3, 5, 4)), random.integers(0, 4, (3, 5))
    mask, expected = (
        np.array([True, False, True]),
        sk.f1_score(labels[[0, 2]].ravel(), preds[[0, 2]].argmax(-1).ravel(), average="macro"),
    )
    for encoding in (labels, np.eye(4)[labels]):
        assert fm.F1.from_predictions(preds, encoding, mask).compute() == pytest.approx(expected)
        full = np.broadcast_to(mask[:, None], (3, 5))
        assert fm.F1.from_predictions(preds, encoding, full).compute() == pytest.approx(expected)
    several = jax.vmap(fm.R2.from_predictions, in_axes=-1)(
        preds.astype("f4"), preds.astype("f4") + labels[..., None]
    )
    assert jax.vmap(lambda metric: metric.compute())(several).shape == (4,)


@pytest.mark.full
def test_nan_and_infinity_are_not_hidden() -> None:
    bad, good = jnp.array([[NAN, 0], [1, 0]]), jnp.array([[1.0, 0], [1, 0]])
    labels = jnp.array([0, 0])
    kinds: list[Any] = [fm.Perplexity, fm.ExpectedCalibrationError]
    for kind in kinds:
        assert math.isnan(
            kind.from_logits(bad, labels).merge(kind.from_logits(good, labels)).compute()
        )
    kinds = [fm.MeanSquaredError, fm.MeanAbsoluteError, fm.R2]
    for kind in kinds:
        assert math.isnan(
            kind.from_predictions(bad, good).merge(kind.from_predictions(good, good * 2)).compute()
        )
    for kind in (fm.RocAuc, fm.AveragePrecision):
        assert math.isnan(kind.from_scores(jnp.array([NAN, 1, 2]), jnp.array([0, 1, 0])).compute())
        assert kind.from_scores(jnp.array([-math.inf, math.inf]), jnp.array([0, 1])).compute() == 1
    few = fm.Median.from_values(jnp.arange(100.0), jax.random.key(0), size=3)
    assert math.isnan(few.merge(fm.Median.from_values(NAN, jax.random.key(1), size=3)).compute())


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: fm.F1.from_predictions(
                jnp.ones((4, 3)), jnp.ones(4, int), average=cast(Any, "binary")
            ),
            "F1 with average='binary'; choose",
        ),
        (
            lambda: fm.F1.from_predictions(jnp.ones(4), jnp.ones(4, int)),
            r"F1 of logits \[4\] .* end with an axis of classes",
        ),
        (
            lambda: fm.F1.from_predictions(jnp.ones((4, 3)), jnp.ones(4, int), jnp.ones(3, bool)),
            r"mask of shape \[3\]",
        ),
        (
            lambda: fm.RocAuc.from_scores(jnp.ones(4), jnp.ones(4), jnp.ones(4, int)),
            "a mask is int32: give bools",
        ),
        (
            lambda: fg.metrics.Mean.from_values(jnp.ones(4), jnp.ones(4)),
            "a mask is float32: .* a weight, Mean.from_values",
        ),
        (
            lambda: fm.R2.from_predictions(jnp.ones((4, 1)), jnp.ones(4)),
            r"R2 of predictions \[4, 1\] and targets \[4\]",
        ),
        (
            lambda: fm.RocAuc.from_scores(jnp.ones((4, 2)), jnp.ones(4)),
            r"RocAuc of scores \[4, 2\]; they must be one number",
        ),
        (
            lambda: fm.RocAuc.from_scores(jnp.ones(4), jnp.ones((4, 1))),
            r"RocAuc of labels \[4, 1\]; they must be one number",
        ),
        (
            lambda: fm.RocAuc.from_scores(jnp.ones(4), jnp.ones(3)),
            r"begin with axes \[\[3\], \[4\]\]",
        ),
        (
            lambda: fm.RocAuc.from_scores(jnp.ones(2), jnp.array([1, 2])).compute(),
            r"RocAuc of labels \[1, 2\]; .* 0 or 1",
        ),
        (lambda: fm.Collect.from_values(jnp.ones(4), jnp.ones((4, 1), bool)), "begin with axes"),
        (
            lambda: fm.ExpectedCalibrationError.from_logits(
                jnp.ones((1, 2)), jnp.ones(1, int), bins=0
            ),
            "bins=0",
        ),
        (
            lambda: fm.SampledSet.from_values(jnp.ones(3), jnp.arange(3), size=0),
            "size=0; it must be at least one",
        ),
        (
            lambda: fm.SampledSet.from_values(jnp.ones(3), jnp.arange(4), size=2),
            r"begin with axes \[\[3\], \[4\]\]",
        ),
        (
            lambda: fm.SampledSet.from_values(jnp.ones(3), jnp.ones(3), size=2),
            "ids of float32; they must be integers",
        ),
    ],
)
def test_invalid_arguments_are_an_error(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        make()


class Measured(fg.Module):
    """A linear classifier of three classes that returns every metric."""

    weight: jax.Array

    def __init__(self, *, key: Any) -> None:
        self.weight = jax.random.normal(key, (5, 3))

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        preds, label, mask = batch["x"] @ self.weight, batch["label"], ctx.mask
        loss = fg.metrics.Mean.from_values(
            optax.softmax_cross_entropy_with_integer_labels(preds, label), mask
        ).compute()
        best = preds.max(-1)
        metrics = {
            "confusion": fm.ConfusionMatrix.from_predictions(preds, label, mask),
            "precision": fm.Precision.from_predictions(preds, label, mask),
            "recall": fm.Recall.from_predictions(preds, label, mask, average=None),
            "f1": fm.F1.from_predictions(preds[:, 0] > 0, label == 0, mask),
            "perplexity": fm.Perplexity.from_logits(preds, label, mask),
            "calibration": fm.ExpectedCalibrationError.from_logits(preds, label, mask, bins=4),
            "squared": fm.MeanSquaredError.from_predictions(best, label, mask),
            "absolute": fm.MeanAbsoluteError.from_predictions(best, label, mask),
            "r2": fm.R2.from_predictions(best, label, mask),
            "median": fm.Median.from_values(best, ctx.key(), mask, size=64),
            "sample": fm.SampledSet.from_values(
                {"x": batch["x"], "id": batch["id"]}, batch["id"], mask, size=3
            ),
        }
        return fg.Output(loss, metrics=metrics)

    def validation_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        output = self.training_step(batch, ctx)
        scores, positive = batch["x"] @ self.weight[:, 0], batch["label"] == 0
        whole = {
            "auc": fm.RocAuc.from_scores(scores, positive, ctx.mask),
            "ap": fm.AveragePrecision.from_scores(scores, positive, ctx.mask),
            "all": fm.Collect.from_values(
                {"id": batch["id"], "preds": batch["x"] @ self.weight}, ctx.mask
            ),
        }
        return output.replace(metrics=output.metrics | whole)

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(0.0)  # so that all steps measure the same module


def make_measurements(n: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(3)
    x = random.normal(size=(n, 5)).astype("f4")
    return {"x": x, "label": random.integers(0, 3, n), "id": 1000 + np.arange(n)}


def expected(arrays: dict[str, np.ndarray], weight: np.ndarray) -> dict[str, Any]:
    preds, label = arrays["x"] @ weight, arrays["label"]
    predicted, best = preds.argmax(-1), preds.max(-1)
    probabilities = np.exp(preds) / np.exp(preds).sum(-1, keepdims=True)
    return {
        "confusion": sk.confusion_matrix(label, predicted),
        "precision": sk.precision_score(label, predicted, average="macro"),
        "recall": sk.recall_score(label, predicted, average=cast(Any, None)),
        "f1": sk.f1_score(label == 0, preds[:, 0] > 0),
        "perplexity": np.exp(sk.log_loss(label, probabilities)),
        "calibration": calibration(preds, label, 4),
        "squared": sk.mean_squared_error(label, best),
        "absolute": sk.mean_absolute_error(label, best),
        "r2": sk.r2_score(label, best),
        "median": np.median(best),
        "loss": sk.log_loss(label, probabilities),
    }


@pytest.mark.full
@pytest.mark.parametrize("remainder", ["pad", "keep"])
def test_evaluations_with_an_uneven_last_batch(remainder: Any) -> None:
    arrays = make_measurements(11)
    module = Measured(key=jax.random.key(0))
    metrics = fg.Engine().evaluate(module, fg.ArrayData(arrays, 4, remainder=remainder))
    weight = np.asarray(module.weight)
    for name, value in expected(arrays, weight).items():
        np.testing.assert_allclose(metrics[name], value, rtol=2e-6, atol=1e-6, err_msg=name)
    scores = arrays["x"] @ weight[:, 0]
    assert metrics["auc"] == pytest.approx(sk.roc_auc_score(arrays["label"] == 0, scores))
    assert metrics["ap"] == pytest.approx(sk.average_precision_score(arrays["label"] == 0, scores))
    np.testing.assert_array_equal(metrics["all/id"], arrays["id"])
    assert metrics["sample/count"] == 3
    np.testing.assert_array_equal(metrics["sample/x"], arrays["x"][metrics["sample/id"] - 1000])
    assert {"sample/id", "sample/x", "all/preds"} <= metrics.keys()


def test_collected_tree_gives_results_by_path() -> None:
    class Trees(Measured):
        def validation_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
            tree = (batch["x"], {"label": batch["label"], "ids": [batch["id"]]})
            return fg.Output(metrics={"all": fm.Collect.from_values(tree, ctx.mask)})

    arrays, kind = make_measurements(11), cast(Any, Trees)
    metrics = fg.Engine().evaluate(
        kind(key=jax.random.key(0)), fg.ArrayData(arrays, 4, remainder="pad")
    )
    assert metrics.keys() == {"all/0", "all/1/label", "all/1/ids/0"}
    for name, key in (("all/0", "x"), ("all/1/label", "label"), ("all/1/ids/0", "id")):
        np.testing.assert_array_equal(metrics[name], arrays[key])


def test_collected_examples_leave_the_device_during_the_evaluation() -> None:
    """At most what five batches gave is there: a set may be larger than the device."""

    class Doubled(Measured):
        def validation_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
            return fg.Output(metrics={"all": fm.Collect.from_values(2 * batch)})

    there: list[int] = []

    def batches() -> Iterator[np.ndarray]:
        for number in range(20):
            there.append(sum(array.shape == (7, 13) for array in jax.live_arrays()))
            yield np.full((7, 13), number, np.float32)

    kind = cast(Any, Doubled)
    metrics = fg.Engine().evaluate(
        kind(key=jax.random.key(0)), fg.DataSource(batches(), prefetch=0)
    )
    np.testing.assert_array_equal(metrics["all"][:, 0], np.repeat(np.arange(20), 7) * 2)
    assert max(there) <= 10, there  # the batch, too, if it was put there


@pytest.mark.full
@pytest.mark.parametrize("steps_per_execution", [1, pytest.param(2, marks=pytest.mark.full)])
def test_windows_over_several_steps(steps_per_execution: int) -> None:
    arrays = make_measurements(11)
    data = fg.ArrayData(arrays, 4, remainder="pad")
    result = fg.Engine(
        epochs=2, log_every=fg.EveryEpoch(), steps_per_execution=steps_per_execution, autoload=False
    ).fit(Measured, data)
    for name, value in expected(arrays, np.asarray(result.module.weight)).items():
        for logged_value in result.history[f"train/{name}"]:
            np.testing.assert_allclose(logged_value, value, rtol=2e-6, atol=1e-6, err_msg=name)
    samples = result.history["train/sample/id"]
    assert len(samples) == 2 and np.array_equal(samples[0], samples[1])


def test_confusion_matrix_shows_itself_in_evaluations_B19() -> None:
    class Fixed(fg.Module):
        weight: jax.Array

        def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
            logits = jax.nn.one_hot(batch["guess"], 2)
            matrix = fm.ConfusionMatrix.from_predictions(logits, batch["label"])
            return fg.Output(jnp.sum(self.weight), metrics={"confusion": {"all": matrix}})

        def configure_optimizers(self) -> optax.GradientTransformation:
            return optax.sgd(0.1)

    batch = {"guess": np.array([0, 1, 1, 1]), "label": np.array([0, 0, 1, 1])}
    engine = fg.Engine(plugins=[Evaluator("test", [batch])], autoload=False)
    state = engine.init_state(Fixed(jnp.ones(1)), [batch])
    result = engine.run_evaluation("test", state)
    assert result.metrics["confusion/all"].tolist() == [[1, 1], [0, 2]]
    pixels = result.media["confusion/all"].pixels
    # Of the first class a half each, of the second all are right.
    assert pixels.shape == (256, 256, 1)
    corners = pixels[[0, 0, -1, -1], [0, -1, 0, -1], 0]
    assert corners.tolist() == [128, 128, 0, 255]
