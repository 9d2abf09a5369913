"""Metrics of classes, labels, lists and pictures: numbers from elsewhere, and what is an error."""

import math
from collections.abc import Callable
from itertools import zip_longest
from typing import Any

import fulgurite as fg
import fulgurite_metrics as fm
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sklearn.metrics as sk
from fulgurite.errors import ConfigurationError, DataError
from fulgurite.metrics import flatten_nested

NAN = math.nan


def test_average_precision_with_the_identity_on_both_sides() -> None:
    labels, scores = jnp.array([0, 0, 1, 1]), jnp.array([0.1, 0.4, 0.35, 0.8])
    three = fm.AveragePrecision.from_scores(scores[:3], labels[:3])
    one_more = fm.AveragePrecision.from_scores(scores[3:], labels[3:])
    for parts in ((three, one_more), (one_more, three)):
        with_identity = parts[0].empty().merge(*parts, parts[0].empty())
        for metric in (parts[0].merge(parts[1]), with_identity):
            assert metric.compute() == pytest.approx(0.833333, abs=1e-6)


def test_norm_of_a_tree_together_and_the_mean_of_norms() -> None:
    leaves = [jnp.array([1, 2, 3]), jnp.array([4.0, 5, 6])]
    assert fm.Norm.from_tree({"a": leaves}).compute() == pytest.approx(9.539392, abs=1e-6)
    mean = fm.Norm.from_tree(leaves[0]).merge(fm.Norm.from_tree(leaves[1]))
    assert mean.compute() == pytest.approx(6.258311, abs=1e-6)
    assert fm.Norm.from_tree(jnp.array([3 + 4j])).compute() == 5
    assert fm.Norm.from_vectors(jnp.array([[3j, 4], [0, 1j]])).compute() == 3


@pytest.mark.full
def test_means_of_the_leaves_of_a_tree_and_their_mean() -> None:
    """Metrics of each leaf need no class of their own: a tree of metrics is logged by its paths."""
    tree = {"a": jnp.arange(12), "b": {"c": jnp.arange(8), "d": jnp.arange(9)}}
    means = jax.tree.map(fg.metrics.Mean.from_values, tree)
    results = fg.metrics.MetricAccumulator.from_metrics(flatten_nested(means)).compute()
    assert results == {"a": 5.5, "b/c": 3.5, "b/d": 4}
    mean = fg.metrics.Mean.from_values(jnp.array(list(results.values())))
    assert mean.compute() == pytest.approx(4.3333, abs=1e-4)


@pytest.mark.full
def test_average_precision_of_several_labels_and_psnr_of_a_constant_error() -> None:
    # The example of torchmetrics.
    scores = [[0.75, 0.05, 0.35], [0.45, 0.75, 0.05], [0.05, 0.55, 0.75], [0.05, 0.65, 0.05]]
    labels = [[1, 0, 1], [0, 0, 0], [0, 1, 1], [1, 1, 1]]
    arrays = (np.array(scores, np.float32), np.array(labels))
    metric = fm.MultilabelAveragePrecision.from_scores(*arrays)
    assert metric.compute() == pytest.approx(0.75)
    each = fm.MultilabelAveragePrecision.from_scores(*arrays, average=None)
    assert np.asarray(each.compute()).tolist() == pytest.approx([0.75, 0.583333, 0.916667])

    pictures = jnp.linspace(0, 0.9, 2 * 12 * 12).reshape(2, 12, 12, 1)
    assert fm.PSNR.from_images(pictures, pictures + 0.1).compute() == pytest.approx(20, abs=1e-4)
    bright = fm.PSNR.from_images(255 * pictures, 255 * pictures + 25.5, data_range=255)
    assert bright.compute() == pytest.approx(20, abs=1e-4)
    assert fm.PSNR.from_images(pictures, pictures).compute() == math.inf
    assert fm.SSIM.from_images(pictures, pictures).compute() == pytest.approx(1)


@pytest.mark.parametrize("seed", range(5))
def test_precision_recall_curve_equals_that_of_scikit_learn(seed: int) -> None:
    random = np.random.default_rng(seed)
    scores = np.round(random.normal(size=40) * 3).astype(np.float32)
    labels = random.random(40) < random.choice([0, 0.3])
    mask = random.random(40) < 0.7
    hidden = np.where(mask, scores, NAN)
    parts = [
        fm.PrecisionRecallCurve.from_scores(hidden[part], labels[part], mask[part])
        for part in (slice(0, 13), slice(13, 40))
    ]
    curve = parts[0].merge(parts[1]).compute()
    with pytest.warns() if not labels.any() else NoWarning():
        expected = sk.precision_recall_curve(labels[mask], scores[mask])
    for name, values in zip(("precision", "recall", "thresholds"), expected, strict=True):
        np.testing.assert_allclose(curve[name], values, rtol=1e-6)


class NoWarning:
    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None: ...


def test_roc_auc_of_each_class_against_the_rest() -> None:
    random = np.random.default_rng(0)
    logits = random.normal(size=(50, 3)).astype(np.float32)
    probs = np.asarray(jax.nn.softmax(logits.astype(float)))
    labels = random.integers(0, 3, 50)
    metric = fm.RocAucOneVsRest.from_logits(probs.astype(np.float32), labels)
    expected = sk.roc_auc_score(labels, probs, multi_class="ovr")
    assert metric.compute() == pytest.approx(expected, rel=1e-6)
    absent = fm.RocAucOneVsRest.from_logits(logits, np.minimum(labels, 1), average=None)
    assert np.isnan(absent.compute()).tolist() == [False, False, True]
    with_nan = fm.RocAucOneVsRest.from_logits(np.where(logits > 2, NAN, logits), labels)
    assert np.isnan(with_nan.compute())


@pytest.mark.full
def test_items_of_a_list_may_be_masked() -> None:
    scores = jnp.array([[3.0, 2, 1, NAN], [1, 2, NAN, NAN], [NAN] * 4])
    relevance = jnp.array([[0.0, 1, 2, NAN], [1, 0, NAN, NAN], [NAN] * 4])
    mask = ~jnp.isnan(scores)
    expected = np.mean(
        [
            sk.ndcg_score([[0, 1, 2]], [[3, 2, 1]]),
            sk.ndcg_score([[1, 0]], [[1, 2]]),
        ]
    )
    assert fm.NDCG.from_scores(scores, relevance, mask).compute() == pytest.approx(expected)
    rank = fm.MeanReciprocalRank.from_scores(scores, relevance, mask)
    assert rank.compute() == 0.5
    assert np.isnan(fm.NDCG.from_scores(scores, relevance).compute())


@pytest.mark.full
def test_reciprocal_rank_of_ties_and_of_lists_without_an_answer() -> None:
    scores = jnp.array([[1.0, 1, 1], [0, 0, 1], [5, NAN, 1]])
    relevance = jnp.array([[0, 1, 1], [0, 0, 0], [0, 1, 1]])
    assert fm.MeanReciprocalRank.from_scores(scores, relevance).compute() == pytest.approx(1 / 3)
    first = fm.MeanReciprocalRank.from_scores(scores[2:], relevance[2:]).compute()
    assert first == 0.5
    unknown = jnp.array([[1, NAN, 0]])
    assert math.isnan(fm.MeanReciprocalRank.from_scores(scores[:1], unknown).compute())
    mask = jnp.array([[True, False, True]])
    assert fm.MeanReciprocalRank.from_scores(scores[:1], unknown, mask).compute() == 1


@pytest.mark.full
def test_pearson_is_exact_with_large_means_and_over_many_parts() -> None:
    random = np.random.default_rng(0)
    preds = (random.normal(size=400) + 1000).astype(np.float32)
    targets = (preds + random.normal(size=400) * 2 - 3000).astype(np.float32)
    parts = [
        fm.Pearson.from_predictions(preds[start : start + 40], targets[start : start + 40])
        for start in range(0, 400, 40)
    ]
    merged = parts[0]
    for part in parts[1:]:
        merged = merged.merge(part)
    expected = np.corrcoef(preds.astype(float), targets.astype(float))[0, 1]
    assert merged.compute() == pytest.approx(expected, abs=1e-6)
    assert np.isnan(fm.Pearson.from_predictions(preds[:1], targets[:1]).compute())


def test_every_metric_says_which_direction_is_better() -> None:
    lower = {
        *("BrierScore", "ExpectedCalibrationError", "MeanAbsoluteError", "MeanSquaredError"),
        "Perplexity",
    }
    neither = {"Collect", "ConfusionMatrix", "Median", "Norm", "PrecisionRecallCurve", "SampledSet"}
    for name in fm.__all__:
        kind = getattr(fm, name)
        if name != "SampledObjects":  # not a metric
            expected = None if name in neither else name not in lower
            assert kind.higher_is_better is expected, name
    assert fg.metrics.Accuracy.higher_is_better and fg.metrics.Mean.higher_is_better is None


TEXTS = [
    ("the cat sat on the mat", ["the cat is on the mat", "a cat sat on a mat"]),
    ("Hello there, General!", ["Hello there, general Kenobi!"]),
    ("two words", ["entirely different text of six"]),
    ("a short one", ["a short one", "a very short one", "one"]),
    ("", ["nothing was written"]),
]


@pytest.mark.parametrize("texts", [TEXTS, TEXTS[:1], TEXTS[1:4], TEXTS[2:3], TEXTS[4:]])
def test_bleu_of_parts_equals_that_of_sacrebleu_over_the_corpus(texts: list[Any]) -> None:
    sacrebleu = pytest.importorskip("sacrebleu")
    preds = [text for text, _ in texts]
    lists = [references for _, references in texts]
    transposed = [list(column) for column in zip_longest(*lists)]
    expected = sacrebleu.BLEU().corpus_score(preds, transposed).score
    whole = fm.BLEU.from_texts([], [])
    assert np.isnan(whole.compute())
    for text, references in reversed(texts):
        whole = whole.merge(fm.BLEU.from_texts([text], [references]))
    host = jax.tree.map(np.asarray, whole)
    for metric in (whole, host, fm.BLEU.from_texts(preds, lists)):
        assert metric.compute() == pytest.approx(expected, rel=1e-5)
    array = fm.BLEU.from_texts(np.array(preds), lists)  # type: ignore[arg-type]
    assert array.compute() == pytest.approx(expected, rel=1e-5)
    with pytest.raises(ConfigurationError, match="tokenize='no'; sacrebleu has 'none', 'zh'"):
        fm.BLEU.from_texts(preds, lists, tokenize="no")
    single = fm.BLEU.from_texts(["The cat sat here"], ["the cat sat here"], lowercase=True)
    assert single.compute() == pytest.approx(100)


@pytest.mark.parametrize("texts", [TEXTS, TEXTS[:1], TEXTS[1:4], TEXTS[2:3], TEXTS[4:]])
def test_chrf_of_parts_equals_that_of_sacrebleu_over_the_corpus(texts: list[Any]) -> None:
    sacrebleu = pytest.importorskip("sacrebleu")
    preds = [text for text, _ in texts]
    lists = [references for _, references in texts]
    transposed = [list(column) for column in zip_longest(*lists)]
    expected = sacrebleu.CHRF().corpus_score(preds, transposed).score
    whole = fm.CHRF.from_texts([], [])
    assert np.isnan(whole.compute())
    for text, references in reversed(texts):
        whole = whole.merge(fm.CHRF.from_texts([text], [references]))
    host = jax.tree.map(np.asarray, whole)
    for metric in (whole, host, fm.CHRF.from_texts(preds, lists)):
        assert metric.compute() == pytest.approx(expected, rel=1e-5)
    single = fm.CHRF.from_texts(["The cat sat"], ["the cat sat"], lowercase=True)
    assert single.compute() == pytest.approx(100)


@pytest.mark.parametrize("beta", [0.5, 2.0, 1e25, math.inf])
@pytest.mark.parametrize("average", ["macro", "micro", None])
def test_f_beta_of_any_weight_equals_that_of_scikit_learn(beta: float, average: Any) -> None:
    random = np.random.default_rng(0)
    logits, labels = random.normal(size=(30, 4)), random.integers(0, 4, 30)
    parts = [
        fm.FBeta.from_predictions(logits[part], labels[part], average=average, beta=beta)
        for part in (slice(0, 7), slice(7, 30))
    ]
    expected = sk.fbeta_score(labels, logits.argmax(-1), beta=beta, average=average)
    np.testing.assert_allclose(parts[0].merge(parts[1]).compute(), expected, rtol=1e-5)
    multilabel = fm.FBeta.from_multilabel(logits > 0, logits > 0.5, average=average, beta=beta)
    expected = sk.fbeta_score(logits > 0.5, logits > 0, beta=beta, average=average)
    np.testing.assert_allclose(multilabel.compute(), expected, rtol=1e-5)


@pytest.mark.parametrize("average", ["macro", "micro", None])
def test_metrics_of_several_outputs_side_by_side_are_those_of_each(average: Any) -> None:
    random = np.random.default_rng(0)
    logits, labels = random.normal(size=(2, 30, 4)), random.integers(0, 4, (2, 30))

    def score(logits: Any, labels: Any) -> fm.F1:
        return fm.F1.from_predictions(logits, labels, average=average)

    def score_two(logits: Any, labels: Any) -> fm.F1:
        return fm.F1.from_predictions(logits[:, 0] > 0, labels > 1, average=average)

    pairs = list(zip(logits, labels, strict=True))
    expected = [sk.f1_score(label, logit.argmax(-1), average=average) for logit, label in pairs]
    np.testing.assert_allclose(jax.vmap(score)(logits, labels).compute(), expected, rtol=1e-5)
    expected = [sk.f1_score(label > 1, logit[:, 0] > 0) for logit, label in pairs]
    np.testing.assert_allclose(jax.vmap(score_two)(logits, labels).compute(), expected, rtol=1e-5)
    errors = jax.vmap(fm.ExpectedCalibrationError.from_logits)(logits, labels)
    expected = [fm.ExpectedCalibrationError.from_logits(*pair).compute() for pair in pairs]
    np.testing.assert_allclose(errors.compute(), expected, rtol=1e-5)


def test_ndcg_of_float64_is_computed_in_float64() -> None:
    random = np.random.default_rng(0)
    scores, relevance = random.normal(size=(3, 50)), random.integers(0, 5, (3, 50)).astype(float)
    with jax.enable_x64(True):
        score = fm.NDCG.from_scores(scores, relevance).compute()
    assert float(score) == pytest.approx(sk.ndcg_score(relevance, scores), rel=1e-14)


def test_collected_integers_that_jax_cannot_hold_are_an_error() -> None:
    with pytest.raises(DataError, match="outside the range of int32"):
        fm.Collect.from_values({"id": np.array([2**40 + 5, 3])})


SQUARE = np.ones((4, 4), np.float32)
PICTURES = np.ones((2, 8, 8, 1), np.float32)
AVERAGE: dict[str, Any] = {"average": "micro"}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: fm.FBeta.from_predictions(SQUARE, np.ones(4, int), beta=0), "beta=0; it must"),
        (lambda: fm.F1.from_multilabel(SQUARE, SQUARE), "booleans such as `logits > 0`"),
        (lambda: fm.F1.from_multilabel(SQUARE > 0, SQUARE[:2]), r"and labels \[2, 4\]"),
        (lambda: fm.BLEU.from_texts("a text", ["a text"]), "give two lists of one length"),
        (lambda: fm.BLEU.from_texts(["a", "b"], ["a", []]), "text 1 has no reference"),
        (lambda: fm.CHRF.from_texts(["a"], []), "CHRF of 1 texts with 0 references"),
        (lambda: fm.NDCG.from_scores(SQUARE[0], SQUARE[0]), r"both are \(queries, items\)"),
        (lambda: fm.NDCG.from_scores(SQUARE, SQUARE, top_k=0), "top_k=0; it must be at least 1"),
        (lambda: fm.SSIM.from_images(PICTURES, PICTURES), "at least 11 pixels"),
        (lambda: fm.PSNR.from_images(PICTURES, PICTURES, data_range=0), "data_range=0"),
        (lambda: fm.PSNR.from_images(PICTURES[0], PICTURES[0]), r"of pictures \[8, 8, 1\]"),
        (
            lambda: fm.RocAucOneVsRest.from_logits(SQUARE, np.ones(4, int), **AVERAGE),
            "'macro' or N",
        ),
        (lambda: fm.MultilabelAveragePrecision.from_scores(SQUARE, SQUARE[:, :2]), "same shape"),
        (lambda: fm.MultilabelAveragePrecision.from_scores(SQUARE[0], SQUARE[0]), "examples, cl"),
    ],
)
def test_wrong_arguments_are_errors(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        call()
