"""Every loss against numbers from elsewhere, and what all have in common: masks, weights, means."""

import inspect
import itertools
import math
import re
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

import fulgurite as fg
import fulgurite_losses as losses
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fulgurite.errors import ConfigurationError
from fulgurite_losses.embeddings import Mining
from scipy.special import expit, logsumexp
from sklearn.metrics import log_loss

NAN = math.nan
Arrays = tuple[np.ndarray, ...]


def compute_values(loss: Callable[..., Any], *arrays: Any, **options: Any) -> list[float]:
    return loss(*map(jnp.asarray, arrays), reduction="none", **options).ravel().tolist()


# --- the cases of the table of features ---


@pytest.mark.full
def test_softmax_cross_entropy_of_one_hot_labels_and_a_masked_row_of_nan() -> None:
    logits = jnp.array([[10.0, 1, -2], [1, 4, 0.2]])
    labels = jnp.array([[0, 1, 0], [1, 0, 0]])
    values = compute_values(losses.softmax_cross_entropy, logits, labels)
    assert values == pytest.approx([9.00013, 3.06967], abs=1e-5)
    assert losses.softmax_cross_entropy(logits, labels) == pytest.approx(6.03490, abs=1e-5)

    loss = partial(losses.softmax_cross_entropy, labels=labels, mask=jnp.array([True, False]))
    value, gradient = jax.value_and_grad(loss)(logits)
    assert value == pytest.approx(9.00013, abs=1e-5)
    with_nan = jax.value_and_grad(loss)(logits.at[1].set(NAN))
    assert with_nan[0] == value and np.array_equal(with_nan[1], gradient)
    assert not gradient[1].any() and gradient[0].all()


def test_softmax_cross_entropy_of_integers_and_smoothed_labels() -> None:
    logits = jnp.array([[2.0, 0, -1], [1, 1, 1]])
    labels = jnp.array([0, 2])
    values = compute_values(losses.softmax_cross_entropy, logits, labels)
    assert values == pytest.approx([0.169846, 1.098612], abs=1e-6)
    smoothed = losses.softmax_cross_entropy(logits[0], labels[0], label_smoothing=0.1)
    assert smoothed == pytest.approx(0.336513, abs=1e-6)


def test_binary_cross_entropy_of_extreme_logits_is_finite() -> None:
    logits = jnp.array([-1e9, -1e-9])
    loss = losses.sigmoid_binary_cross_entropy(logits, jnp.array([1, 0]))
    assert loss == pytest.approx(5e8)
    zero = losses.sigmoid_binary_cross_entropy(jnp.zeros(2), jnp.array([True, False]))
    assert zero == pytest.approx(0.693147, abs=1e-6)


@pytest.mark.full
def test_gradient_of_binary_cross_entropy_and_of_a_masked_example() -> None:
    logits = jnp.array([5, 1e-6, 0, 0, -1e-6, -5])
    labels = jnp.array([1, 0, 1, 0, 0, 1])
    expected = [-0.00669285, 0.50000025, -0.5, 0.5, 0.5, -0.99330715]
    gradient = jax.grad(losses.sigmoid_binary_cross_entropy)(logits, labels)
    np.testing.assert_allclose(6 * gradient, expected, atol=1e-6)

    seven = (jnp.append(logits, NAN), jnp.append(labels, 1))
    mask = jnp.arange(7) < 6
    masked = jax.grad(partial(losses.sigmoid_binary_cross_entropy, mask=mask))(*seven)
    np.testing.assert_allclose(6 * masked, [*expected, 0], atol=1e-6)


def test_means_by_count_and_by_weight() -> None:
    arrays = (jnp.array([2.0, 4, 0]), jnp.array([1.0, 2, 7]))
    options: dict[str, Any] = {
        "weight": jnp.array([5, 1, 3.2]),
        "mask": jnp.array([True, True, False]),
    }
    assert losses.squared_error(*arrays, **options) == 4.5
    assert losses.squared_error(*arrays, reduction="weighted_mean", **options) == 1.5
    assert losses.squared_error(*arrays, reduction="sum", **options) == 9
    assert losses.absolute_error(*arrays, **options) == 3.5
    mean = losses.absolute_error(*arrays, reduction="weighted_mean", **options)
    assert mean == pytest.approx(1.16667, abs=1e-5)


@pytest.mark.full
def test_huber_loss_and_its_gradient() -> None:
    preds = jnp.array([1.1, 0.9, 3, -1])
    values = compute_values(losses.huber_loss, preds, jnp.ones(4))
    assert values == pytest.approx([0.005, 0.005, 1.5, 1.5], abs=1e-6)
    assert losses.huber_loss(preds, jnp.ones(4)) == pytest.approx(0.7525)
    gradient = jax.grad(losses.huber_loss)(preds, jnp.ones(4))
    np.testing.assert_allclose(4 * gradient, [0.1, -0.1, 1, -1], atol=1e-6)


def test_cross_entropy_of_probabilities() -> None:
    probs = jnp.array([[0.05, 0.95, 0], [0.1, 0.8, 0.1]])
    loss = partial(losses.categorical_cross_entropy, probs, jnp.array([1, 2]))
    assert loss(reduction="none").tolist() == pytest.approx([0.051293, 2.302585], abs=1e-6)
    assert loss() == pytest.approx(1.176939, abs=1e-6)
    weight = jnp.array([1, 3])
    assert loss(weight=weight) == pytest.approx(3.479524, abs=1e-6)
    assert loss(weight=weight, reduction="weighted_mean") == pytest.approx(1.739762, abs=1e-6)


@pytest.mark.full
def test_adaptive_power_loss_and_its_gradient() -> None:
    loss = partial(losses.adaptive_power_loss, near=3, far=1, middle=10)
    errors = jnp.array([0, 0.1, -0.1, 10, -1000])
    values = compute_values(loss, errors, jnp.zeros(5))
    assert values == pytest.approx([0, 0.001, 0.001, 100, 1001.38], abs=1e-2)
    assert loss(errors, jnp.zeros(5)) == pytest.approx(220.277, abs=1e-2)
    gradient = 5 * jax.grad(loss)(errors, jnp.zeros(5))
    np.testing.assert_allclose(gradient[3:], [20, -1], atol=1e-2)
    assert gradient[0] == 0
    # The power grows with the error where `far` is the larger.
    growing = compute_values(partial(loss, near=1, far=2), errors, jnp.zeros(5))
    assert growing[1] == pytest.approx(0.1, rel=0.05) and growing[4] == pytest.approx(1e6, rel=0.1)


@pytest.mark.full
def test_triplet_loss_of_a_batch() -> None:
    embeddings = jnp.array([[0.23, 0.75], [0.89, 0.41], [0.37, 0.62], [0.78, 0.24]])
    labels = jnp.array([0, 1, 0, 1])
    expectations: dict[Mining, float] = {"all": 0.543688, "hard": 0.591451, "semi_hard": 0.591451}
    for mining, expected in expectations.items():
        loss = partial(losses.triplet_loss, labels=labels, mining=mining)
        assert loss(embeddings) == pytest.approx(expected, abs=1e-6)
        coincident = jax.grad(loss)(embeddings.at[2].set(embeddings[0]))
        assert np.isfinite(coincident).all() and coincident.any()


@pytest.mark.full
def test_negative_cosine_and_its_gradient_at_a_zero_vector() -> None:
    preds = jnp.array([[1.0, 0], [3, 4], [0, 0], [1e-30, 0], [1e30, 1e30]])
    targets = jnp.array([[1.0, 1], [4, 3], [1, 2], [1, 0], [1, 1]])
    values = compute_values(losses.negative_cosine, preds, targets)
    assert values == pytest.approx([-0.707107, -0.96, 0, -1, -1], abs=1e-6)
    gradients = jax.grad(losses.negative_cosine, argnums=(0, 1))(preds, targets)
    assert all(np.isfinite(gradient).all() for gradient in gradients)
    assert abs(gradients[0][:3]).max() < 10


def test_a_loss_of_tenfold_rows_weighted_and_masked() -> None:
    ones = jnp.ones((2, 3))
    loss = partial(losses.absolute_error, targets=jnp.zeros((2, 3)))
    assert loss(10 * ones) == 10
    assert loss(10 * ones, weight=2.5) == 25
    assert loss(10 * ones, weight=jnp.int32(100) / 20) == 50
    rows = 10 * jnp.array([[1.0] * 3, [2.0] * 3])
    mask = jnp.array([True, False])
    assert loss(rows) == 15 and loss(rows, mask=mask) == 10
    assert loss(rows, weight=3) == 45 and loss(rows, mask=mask, weight=3) == 30


# --- other losses, against independent computations ---


def make_arrays(seed: int = 0) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {
        "logits": random.normal(size=(6, 4)).astype("float32") * 3,
        "probs": random.dirichlet(np.ones(4), size=6).astype("float32"),
        "targets": random.dirichlet(np.ones(4), size=6).astype("float32"),
        "classes": random.integers(0, 4, 6),
        "bits": random.integers(0, 2, (6, 4)),
        "counts": random.poisson(3, (6, 4)).astype("float32"),
    }


def log_softmax(logits: np.ndarray) -> np.ndarray:
    return logits - logsumexp(logits, axis=-1, keepdims=True)


def measure(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    return np.linalg.norm(first - second, axis=-1)


def expect_binary(probs: np.ndarray, bits: np.ndarray) -> list[float]:
    pairs = zip(bits.ravel(), probs.ravel(), strict=True)
    return [float(log_loss([bit], [prob], labels=[0, 1])) for bit, prob in pairs]


def expect_focal(logits: np.ndarray, bits: np.ndarray) -> np.ndarray:
    prob = expit(np.where(bits, logits, -logits))
    return np.where(bits, 0.25, 0.75) * (1 - prob) ** 2 * -np.log(prob)


def expect_contrastive(first: np.ndarray, second: np.ndarray, same: np.ndarray) -> np.ndarray:
    distance = measure(first, second)
    return np.where(same, distance**2, np.maximum(0, 5 - distance) ** 2)


def expect_info_nce(queries: np.ndarray, keys: np.ndarray) -> np.ndarray:
    units = [array / np.linalg.norm(array, axis=-1)[:, None] for array in (queries, keys)]
    similarity = np.exp(units[0] @ units[1].T / 0.2)
    return -np.log(np.diag(similarity) / similarity.sum(1))


def expect_dice(probs: np.ndarray, bits: np.ndarray) -> np.ndarray:
    return 1 - (2 * (probs * bits).sum(1) + 1) / ((probs + bits).sum(1) + 1)


# The loss, what it is called with, and its values in float64 by scipy, scikit-learn or the paper.
CALLS: dict[str, tuple[Callable[..., Any], Callable[[dict[str, np.ndarray]], Arrays], Any]] = {
    "log_cosh": (
        losses.log_cosh,
        lambda a: (a["logits"], a["targets"]),
        lambda preds, targets: np.log(np.cosh(preds - targets)),
    ),
    "poisson_loss": (
        losses.poisson_loss,
        lambda a: (a["logits"], a["counts"]),
        lambda logs, counts: np.exp(logs) - counts * logs,
    ),
    "softmax_cross_entropy": (
        losses.softmax_cross_entropy,
        lambda a: (a["logits"], a["targets"]),
        lambda logits, targets: -(targets * log_softmax(logits)).sum(-1),
    ),
    "binary_cross_entropy": (
        losses.binary_cross_entropy,
        lambda a: (a["probs"], a["bits"]),
        expect_binary,
    ),
    "sigmoid_focal_loss": (
        partial(losses.sigmoid_focal_loss, alpha=0.25),
        lambda a: (a["logits"], a["bits"]),
        expect_focal,
    ),
    "hinge_loss": (
        losses.hinge_loss,
        lambda a: (a["logits"], a["bits"]),
        lambda preds, bits: np.maximum(0, 1 - (2 * bits - 1) * preds),
    ),
    "kl_divergence": (
        losses.kl_divergence,
        lambda a: (log_softmax(a["logits"]), a["targets"]),
        lambda logs, targets: (targets * np.log(targets / np.exp(logs))).sum(-1),
    ),
    "euclidean_distance": (
        losses.euclidean_distance,
        lambda a: (a["logits"], a["targets"]),
        measure,
    ),
    "contrastive_loss": (
        partial(losses.contrastive_loss, margin=5.0),
        lambda a: (a["logits"], a["probs"], a["bits"][:, 0]),
        expect_contrastive,
    ),
    "info_nce": (
        partial(losses.info_nce, temperature=0.2),
        lambda a: (a["logits"], a["probs"]),
        expect_info_nce,
    ),
    "triplet_margin_loss": (
        partial(losses.triplet_margin_loss, margin=0.5),
        lambda a: (a["logits"], a["probs"], a["targets"]),
        lambda a, p, n: np.maximum(0, measure(a, p) - measure(a, n) + 0.5),
    ),
    "dice_loss": (
        losses.dice_loss,
        lambda a: (a["probs"].reshape(6, 2, 2), a["bits"].reshape(6, 2, 2)),
        expect_dice,
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_values_equal_an_independent_computation(name: str) -> None:
    loss, select, compute_expected = CALLS[name]
    arrays = select(make_arrays())
    expected = np.ravel(compute_expected(*(array.astype(float) for array in arrays)))
    values = jax.jit(partial(loss, reduction="none"))(*arrays)
    np.testing.assert_allclose(values.ravel(), expected, rtol=2e-6, atol=2e-6)


@pytest.mark.full
def test_triplet_losses_equal_loops_over_the_triplets() -> None:
    arrays = make_arrays(1)
    embeddings = arrays["logits"].astype(float)
    labels = np.array([0, 1, 0, 1, 0, 2])  # the last has no positive
    distance = np.linalg.norm(embeddings[:, None] - embeddings, axis=-1)
    expected: dict[Mining, list[float]] = {"all": [], "hard": [], "semi_hard": []}
    for anchor in range(5):
        positives = [i for i in range(6) if i != anchor and labels[i] == labels[anchor]]
        near = distance[anchor, positives]
        far = distance[anchor, labels != labels[anchor]]
        relu = partial(np.maximum, 0)
        expected["all"].append(relu(near[:, None] - far + 1).mean())
        expected["hard"].append(relu(near.max() - far.min() + 1))
        chosen = [min(far[far > length], default=far.max()) for length in near]
        expected["semi_hard"].append(relu(near - chosen + 1).mean())
    for mining, values in expected.items():
        loss = partial(losses.triplet_loss, embeddings, labels, mining=mining)
        assert loss(reduction="none").tolist() == pytest.approx([*values, 0], rel=1e-5)
        assert loss() == pytest.approx(np.mean(values), rel=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("mining", ["all", "hard", "semi_hard"])
def test_triplet_losses_of_no_examples_and_without_implicit_broadcasting(mining: Mining) -> None:
    embeddings, labels = jnp.arange(6.0).reshape(3, 2), jnp.array([0, 0, 1])
    expected = losses.triplet_loss(embeddings, labels, mining=mining)
    with jax.numpy_rank_promotion("raise"):
        assert losses.triplet_loss(embeddings, labels, mining=mining) == expected
        assert losses.triplet_loss(embeddings[:0], labels[:0], mining=mining) == 0


@pytest.mark.full
def test_ctc_loss_equals_the_sum_over_all_alignments() -> None:
    logits = make_arrays(2)["logits"][:4, :3]
    probs = np.exp(logits - logsumexp(logits, axis=-1, keepdims=True))

    def collapse(path: tuple[int, ...]) -> list[int]:
        return [label for label, _ in itertools.groupby(path) if label != 0]

    for labels, frames in (([1, 2], 4), ([1, 1], 4), ([2], 3)):
        paths = itertools.product(range(3), repeat=frames)
        total = sum(
            math.prod(probs[range(frames), path]) for path in paths if collapse(path) == labels
        )
        label_mask = np.arange(2) < len(labels)
        frame_mask = np.arange(4) < frames
        padded = np.where(frame_mask[:, None], logits, NAN)
        loss = partial(
            losses.ctc_loss,
            labels=np.where(label_mask, np.resize(labels, 2), -1)[None],
            logit_mask=frame_mask[None],
            label_mask=label_mask[None],
        )
        value, gradient = jax.value_and_grad(loss)(jnp.asarray(padded)[None])
        assert value == pytest.approx(-math.log(total), rel=1e-5)
        assert np.isfinite(gradient).all() and not gradient[0, frames:].any()
    assert losses.ctc_loss(logits[None, :1], jnp.array([[1, 2]])) > 1e4
    assert np.isnan(losses.ctc_loss(logits[None], jnp.array([[1, 0]])))


# --- what all have in common ---

WITH_MASK = {
    **{name: call[:2] for name, call in CALLS.items()},
    "absolute_error": (losses.absolute_error, lambda a: (a["logits"], a["targets"])),
    "squared_error": (losses.squared_error, lambda a: (a["logits"], a["targets"])),
    "huber_loss": (losses.huber_loss, lambda a: (a["logits"], a["targets"])),
    "adaptive_power_loss": (losses.adaptive_power_loss, lambda a: (a["logits"], a["targets"])),
    "sigmoid_binary_cross_entropy": (
        losses.sigmoid_binary_cross_entropy,
        lambda a: (a["logits"], a["bits"]),
    ),
    "softmax_cross_entropy of integers": (
        partial(losses.softmax_cross_entropy, label_smoothing=0.1),
        lambda a: (a["logits"], a["classes"]),
    ),
    "categorical_cross_entropy": (
        losses.categorical_cross_entropy,
        lambda a: (a["probs"], a["classes"]),
    ),
    "negative_cosine": (losses.negative_cosine, lambda a: (a["logits"], a["targets"])),
    **{
        f"triplet_loss {mining}": (
            partial(losses.triplet_loss, mining=mining),
            lambda a: (a["logits"], a["classes"] % 2),
        )
        for mining in ("all", "hard", "semi_hard")
    },
    "ctc_loss": (
        losses.ctc_loss,
        lambda a: (np.stack([a["logits"]] * 6) + a["classes"][:, None, None], a["bits"][:, :2] + 1),
    ),
}


def test_every_loss_is_checked_with_masks() -> None:
    functions = {*losses.__all__} - {"Examples", "Reduction"}
    assert functions == {name.split()[0] for name in WITH_MASK}


@pytest.mark.variants("full")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.full if name.startswith("ctc") else ())
        for name in WITH_MASK
    ],
)
def test_what_is_masked_changes_no_value_and_no_gradient(name: str) -> None:
    """Eight examples, two of them masked NaN, are as good as six."""
    loss, select = WITH_MASK[name]
    arrays = select(make_arrays())
    is_real = np.array([True, False, True, True, True, False, True, True])
    weight = np.linspace(0.5, 2, 6, dtype="float32")

    def pad(array: np.ndarray) -> np.ndarray:
        junk = NAN if array.dtype.kind == "f" else -1
        padded = np.full((8, *array.shape[1:]), junk).astype(array.dtype)
        padded[is_real] = array
        return padded

    @jax.jit
    def differentiate(arrays: Arrays, options: dict[str, Any]) -> dict[str, Any]:
        first, *rest = arrays

        def compute(first: Any, reduction: str) -> Any:
            values = loss(first, *rest, reduction=reduction, **options)
            return jnp.sum(values), values

        return {
            reduction: jax.grad(compute, has_aux=True)(first, reduction)
            for reduction in ("mean", "weighted_mean", "none")
        }

    expected = differentiate(arrays, {"weight": weight})
    padded_options = {"weight": pad(weight), "mask": is_real}
    padded = differentiate(tuple(map(pad, arrays)), padded_options)
    for reduction, (gradient, values) in expected.items():
        padded_gradient, padded_values = padded[reduction]
        assert np.isfinite(gradient).all() and gradient.any()
        np.testing.assert_allclose(padded_gradient[is_real], gradient, rtol=1e-5, atol=1e-7)
        assert not padded_gradient[~is_real].any()
        if reduction == "none":
            assert not padded_values[~is_real].any()
            padded_values = padded_values[is_real]
        np.testing.assert_allclose(padded_values, values, rtol=1e-6)


@pytest.mark.full
@pytest.mark.parametrize("name", WITH_MASK)
def test_without_examples_loss_and_gradient_are_zero_and_nan_is_not_hidden(name: str) -> None:
    loss, select = WITH_MASK[name]
    first, *rest = select(make_arrays())

    @jax.jit
    def differentiate(first: Any, mask: Any) -> Any:
        return jax.value_and_grad(lambda first: loss(first, *rest, mask=mask))(first)

    first[2] = NAN
    value, gradient = differentiate(first, np.zeros(6, bool))
    assert value == 0 and not gradient.any()
    assert np.isnan(differentiate(first, np.ones(6, bool))[0])


@pytest.mark.full
def test_gradients_have_the_dtype_of_the_input_and_values_float32() -> None:
    logits = make_arrays()["logits"].astype(jnp.bfloat16)
    loss = partial(losses.softmax_cross_entropy, labels=make_arrays()["classes"])
    value, gradient = jax.value_and_grad(loss)(jnp.asarray(logits))
    assert value.dtype == jnp.float32 and gradient.dtype == jnp.bfloat16


def test_label_that_is_not_a_class_gives_nan_and_is_fine_where_masked() -> None:
    logits = make_arrays()["logits"]
    labels = np.array([0, -1, 2, 4, 1, 3])
    values = losses.softmax_cross_entropy(logits, labels, reduction="none")
    assert np.isnan(values).tolist() == [False, True, False, True, False, False]
    mask = (labels >= 0) & (labels < 4)
    masked = losses.softmax_cross_entropy(logits, labels, mask=mask)
    assert masked == pytest.approx(float(np.nanmean(values)))


@pytest.mark.full
def test_classes_of_probability_zero_have_finite_losses_and_gradients() -> None:
    logits = jnp.array([[1.0, -jnp.inf, 0]])
    value, gradient = jax.value_and_grad(losses.softmax_cross_entropy)(logits, jnp.array([0]))
    assert value == pytest.approx(math.log(1 + math.exp(-1))) and np.isfinite(gradient).all()
    log_probs = jnp.log(jnp.array([0.5, 0.5, 0]))
    divergence = losses.kl_divergence(log_probs, jnp.array([1.0, 0, 0]))
    assert divergence == pytest.approx(math.log(2))
    for loss, probs in (
        (losses.binary_cross_entropy, jnp.array([0.0, 1])),
        (losses.categorical_cross_entropy, jnp.array([[1.0, 0], [0, 1]])),
    ):
        wrong, gradient = jax.value_and_grad(loss)(probs, jnp.array([1, 0]))
        assert wrong == pytest.approx(-math.log(1e-7), rel=1e-3) and np.isfinite(gradient).all()


@pytest.mark.full
def test_focal_loss_of_a_certain_example_has_a_finite_gradient() -> None:
    loss = partial(losses.sigmoid_focal_loss, gamma=0.5)
    value, gradient = jax.value_and_grad(loss)(jnp.array([100.0, -100]), jnp.array([1, 1]))
    assert value == pytest.approx(50) and np.isfinite(gradient).all()


@pytest.mark.full
def test_log_cosh_is_exact_for_small_errors_and_finite_for_large() -> None:
    errors = jnp.array([0, 1e-4, 0.9999999, 1e30])
    values = compute_values(losses.log_cosh, errors, jnp.zeros(4))
    assert values == pytest.approx([0, 5e-9, 0.4337808, 1e30], rel=1e-6)
    gradient = jax.grad(losses.log_cosh)(errors, jnp.zeros(4))
    np.testing.assert_allclose(4 * gradient, np.tanh(errors), rtol=1e-6)


@pytest.mark.full
def test_pixels_may_be_masked_in_dice_loss() -> None:
    arrays = make_arrays()
    probs = arrays["probs"].reshape(2, 3, 4)
    labels = arrays["classes"].reshape(2, 3)
    mask = np.array([[True, True, False], [False, False, False]])
    expected = losses.dice_loss(probs[:1, :2], labels[:1, :2])
    hidden = np.where(mask[..., None], probs, NAN)
    assert losses.dice_loss(hidden, labels, mask=mask) == pytest.approx(float(expected))
    empty = losses.dice_loss(jnp.zeros((1, 3, 2)), jnp.zeros((1, 3, 2)), smooth=0)
    assert empty == 0


AVERAGE: dict[str, Any] = {"reduction": "avg"}
SOFT: dict[str, Any] = {"mining": "soft"}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda a, b: losses.squared_error(a, a[:, 0]), r"predictions \[6, 4\] and targets \[6\]"),
        (lambda a, b: losses.squared_error(a, a, **AVERAGE), "reduction is 'avg'"),
        (lambda a, b: losses.squared_error(a, a, weight=np.ones(4)), r"a weight of shape \[4\]"),
        (lambda a, b: losses.huber_loss(a, a, delta=0), "delta=0; it must be positive"),
        (lambda a, b: losses.softmax_cross_entropy(a, b[:3]), r"labels int\d+\[3\]"),
        (lambda a, b: losses.softmax_cross_entropy(a, b * 0.5), r"labels float32\[6\]"),
        (lambda a, b: losses.softmax_cross_entropy(a, b, label_smoothing=2), "a share from 0 to 1"),
        (lambda a, b: losses.triplet_loss(a, b, **SOFT), "choose 'all', 'hard' or"),
        (lambda a, b: losses.triplet_loss(a, b[:3]), r"\(batch, features\) and \(batch,\)"),
        (lambda a, b: losses.adaptive_power_loss(a, a, far=0.5), "powers of at least 1"),
        (lambda a, b: losses.info_nce(a[0], a[0]), "one for each example"),
        (lambda a, b: losses.contrastive_loss(a, a, a), "one value for each pair"),
        (lambda a, b: losses.sigmoid_focal_loss(a, a, gamma=-1), "gamma=-1; it is at least 0"),
        (lambda a, b: losses.sigmoid_focal_loss(a, a, alpha=-1), "alpha=-1; it is from 0 to 1"),
        (lambda a, b: losses.adaptive_power_loss(a, a, near=NAN), "powers of at least 1"),
        (lambda a, b: losses.dice_loss(b * 0.5, b), "begin with the axis of examples"),
        (lambda a, b: losses.ctc_loss(a, b), r"integers \(batch, labels\)"),
    ],
)
def test_wrong_arguments_are_errors(call: Callable[..., Any], message: str) -> None:
    arrays = make_arrays()
    with pytest.raises(ConfigurationError, match=message):
        call(arrays["logits"], arrays["classes"])


@pytest.mark.full
def test_a_step_of_a_padded_batch_trains_as_one_without_padding() -> None:
    """End to end: the last batch of a set holds padding, which the engine fills with zeros."""

    class Line(fg.Module):
        slope: jax.Array

        def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
            preds = self.slope * jnp.sqrt(batch["x"])
            return fg.Output(losses.squared_error(preds, batch["y"], mask=ctx.mask))

        def configure_optimizers(self) -> Any:
            return optax.sgd(0.1)

    arrays = {"x": np.array([1, 4, 9], np.float32), "y": np.array([1, 1, 1], np.float32)}
    slopes = [
        fg.Engine(steps=1).fit(Line(jnp.ones(())), data).state.module.slope
        for data in (
            fg.ArrayData(arrays, batch_size=4, remainder="pad"),
            fg.ArrayData(arrays, batch_size=3),
        )
    ]
    assert slopes[0] == slopes[1] == pytest.approx(1 - 0.1 * 2 * (0 + 2 + 6) / 3)


NO_LOSSES = {"Examples", "Reduction"}
LOSSES = [getattr(losses, name) for name in losses.__all__ if name not in NO_LOSSES]


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
def test_every_loss_says_what_all_of_them_take(loss: Callable[..., Any]) -> None:
    parameters = inspect.signature(loss).parameters
    shared = ["mask", "weight", "reduction"]
    assert list(parameters)[-3:] == shared
    assert [parameters[name].default for name in shared] == [None, None, "mean"]
    arguments = inspect.getdoc(loss).partition("\nArgs:\n")[2].partition("\n\n")[0]  # pyright: ignore[reportOptionalMemberAccess]
    assert re.findall(r"^    (\w+):", arguments, re.MULTILINE) == list(parameters)


def test_a_wrong_argument_of_a_loss_shows_the_line_that_calls_it() -> None:
    unchecked: Any = losses.squared_error
    for call, error_type in (
        (lambda: unchecked(jnp.ones(2), jnp.ones(2), reducton="sum"), TypeError),
        (lambda: unchecked(jnp.ones(2)), TypeError),
        (lambda: unchecked(jnp.ones(2), jnp.ones(3)), ConfigurationError),
    ):
        with pytest.raises(error_type) as caught:
            call()
        frames = traceback.extract_tb(caught.value.__traceback__)
        assert {frame.filename for frame in frames} == {__file__}
    with pytest.raises(TypeError, match=r"squared_error\(\) got an unexpected .* 'reducton'"):
        unchecked(jnp.ones(2), jnp.ones(2), reducton="sum")
