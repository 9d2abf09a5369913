"""What training and evaluation should give: plain JAX, NumPy and optax over whole batches.

Nothing here knows Fulgurite. A loss is a set of terms, each a total and the size that it is a mean
over; so a batch that something divided is computed here in one piece, and several steps whose
gradients are one update are one batch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

Batch = dict[str, np.ndarray]
Params = dict[str, Any]
Terms = dict[str, tuple[Any, Any]]
"""The total of each term and the size that it is a mean over, by name."""

LENGTH = 3
"""The number of tokens that an example has room for."""

WIDTH = 8

RATE = 0.1
MOMENTUM = 0.9


# --- Data -----------------------------------------------------------------------------------------


def make_batches(sizes: Sequence[int], seed: int = 0) -> list[Batch]:
    """Return batches of sequences of 0 to 3 tokens. In the first batch every second example has no
    token, and the second has none at all; the weight of an example without tokens is 0.

    All numbers are multiples of 1/8, which half precision holds.

    Args:
        sizes: the number of examples of each batch.
        seed: of the numbers.
    """
    random = np.random.default_rng(seed)
    batches = []
    for index, size in enumerate(sizes):
        lengths = random.integers(0, LENGTH + 1, size)
        lengths[0] = 2
        if index == 0:
            lengths[1::2] = 0
        if index == 1:
            lengths[:] = 0
        batches.append(make_batch(random, lengths))
    return batches


def make_batch(random: np.random.Generator, lengths: np.ndarray) -> Batch:
    """Return one batch.

    Args:
        random: draws the numbers.
        lengths: the number of tokens of each example.
    """
    size = len(lengths)
    return {
        "x": (random.integers(-8, 9, (size, LENGTH, 2)) / 8).astype(np.float32),
        "y": (random.integers(-8, 17, (size, LENGTH)) / 8).astype(np.float32),
        "tokens": np.arange(LENGTH) < lengths[:, None],
        "weight": (lengths * (1 + np.arange(size) % 2) / 4).astype(np.float32),
    }


def join(batches: Sequence[Batch]) -> Batch:
    """Return several batches as one."""
    return {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}


# --- Model and losses -----------------------------------------------------------------------------


def make_params(dtype: str) -> Params:
    """Return the first weights, multiples of 1/16. Complex ones are pairs of real arrays."""
    body = (np.arange(WIDTH * 2).reshape(WIDTH, 2) % 5 - 2) / 16
    head = (np.arange(WIDTH) % 3 - 0.5) / 4
    if dtype == "complex64":
        return {
            "body": {"real": jnp.asarray(body), "imaginary": jnp.asarray(body[::-1] / 2)},
            "head": {"real": jnp.asarray(head), "imaginary": jnp.asarray(head[::-1] / 2)},
        }
    return {"body": jnp.asarray(body, dtype), "head": jnp.asarray(head, dtype)}


def predict(params: Params, x: Any, compute: str | None = None) -> Any:
    """Return `(batch, LENGTH)` predictions; of complex weights their real and imaginary part.

    Args:
        params: the weights; with adapters of the body also `down` and `up`.
        x: the inputs.
        compute: the dtype to which the weights are rounded where they are used.
    """
    if compute is not None:
        params = {name: round_to(value, compute) for name, value in params.items()}
    body = params["body"]
    head = params["head"]
    if isinstance(body, dict):
        real = x @ body["real"].T
        imaginary = x @ body["imaginary"].T
        return (
            real @ head["real"] - imaginary @ head["imaginary"],
            real @ head["imaginary"] + imaginary @ head["real"],
        )
    if "up" in params:
        body = body + 2.0 * params["up"] @ params["down"]
    return x @ body.T @ head


def round_to(array: Any, dtype: str) -> Any:
    """Return an array rounded to a dtype, in its own, with the gradient of the identity."""
    return array + jax.lax.stop_gradient(array.astype(dtype).astype(array.dtype) - array)


def measure_errors(params: Params, batch: Batch, compute: str | None) -> Any:
    """Return the squared error of each token, `(batch, LENGTH)`, float32."""
    preds = predict(params, batch["x"], compute)
    if isinstance(preds, tuple):
        return (preds[0] - batch["y"]) ** 2 + preds[1] ** 2
    return (preds.astype(jnp.float32) - batch["y"]) ** 2


def average_tokens(params: Params, batch: Batch, compute: str | None) -> Terms:
    errors = measure_errors(params, batch, compute)
    return {"loss": (jnp.sum(errors * batch["tokens"]), jnp.sum(batch["tokens"]))}


def average_tokens_silently(params: Params, batch: Batch, compute: str | None) -> Terms:
    """A mean over tokens that does not say so: to whom it is passed it is a number."""
    return {"loss": (divide(*average_tokens(params, batch, compute)["loss"]), None)}


def average_examples(params: Params, batch: Batch, compute: str | None) -> Terms:
    errors = measure_errors(params, batch, compute)
    return {"loss": (jnp.sum(errors.mean(1)), len(batch["y"]))}


def average_weighted(params: Params, batch: Batch, compute: str | None) -> Terms:
    errors = measure_errors(params, batch, compute).mean(1)
    return {"loss": (jnp.sum(errors * batch["weight"]), jnp.sum(batch["weight"]))}


def average_scaled(params: Params, batch: Batch, compute: str | None) -> Terms:
    """The weights are factors: the mean is over examples."""
    errors = measure_errors(params, batch, compute).mean(1)
    return {"loss": (jnp.sum(errors * batch["weight"]), len(batch["y"]))}


def average_three(params: Params, batch: Batch, compute: str | None) -> Terms:
    """A mean over tokens, one over examples, and a penalty that does not depend on the batch."""
    size = len(batch["y"])
    examples, _ = average_examples(params, batch, compute)["loss"]
    return {
        **average_tokens(params, batch, compute),
        "example": (0.5 * examples, size),
        "l2": (0.1 * jnp.sum(params["head"] ** 2) * size, size),
    }


def add_up(params: Params, batch: Batch, compute: str | None) -> Terms:
    return {"loss": (jnp.sum(measure_errors(params, batch, compute).mean(1)), None)}


def contrast(params: Params, batch: Batch, compute: str | None) -> Terms:
    """Each example should be nearer to its own target than to those of the others."""
    preds = predict(params, batch["x"], compute)
    scores = -jnp.mean((preds[:, None] - batch["y"][None]) ** 2, -1)
    chances = jax.nn.log_softmax(scores, axis=1)
    return {"loss": (-jnp.mean(jnp.diagonal(chances)), None)}


def take_root(params: Params, batch: Batch, compute: str | None) -> Terms:
    return {"loss": (jnp.sqrt(jnp.mean(measure_errors(params, batch, compute))), None)}


def deviate(params: Params, batch: Batch, compute: str | None) -> Terms:
    return {"loss": (jnp.std(predict(params, batch["x"], compute) - batch["y"]), None)}


def divide(total: Any, size: Any) -> Any:
    """Return a mean; over nothing it is 0. What has no size is not a mean, but the number itself."""
    if size is None:
        return total
    size = jnp.asarray(size, jnp.float32)
    return jnp.where(size == 0, 0, total / jnp.where(size == 0, 1, size))


# --- Training -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rule:
    """How training goes.

    Attributes:
        terms: `terms(params, batch, compute)` returns the terms of the loss.
        compute: the dtype to which weights are rounded where they are used.
        rate: of the gradient descent with momentum.
        adam: whether Adam with weight decay takes its place.
        clip: the largest norm of the gradient of an update.
        radius: of sharpness-aware minimization.
        parts: into how many batches the batch is divided for that: each has its own worst point.
        trained: the names of the parameters that are trained.
        order: the phases of a step, by the names of their parameters; None for all in one.
        simultaneous: whether all phases see the parameters from before the step.
    """

    terms: Callable[[Params, Batch, str | None], Terms]
    compute: str | None = None
    rate: float = RATE
    adam: bool = False
    clip: float | None = None
    radius: float | None = None
    parts: int = 1
    trained: tuple[str, ...] = ("body", "head")
    order: tuple[str, ...] | None = None
    simultaneous: bool = False

    def make_optimizer(self) -> optax.GradientTransformation:
        """Return the optimizer of one phase."""
        if self.adam:
            return optax.adamw(self.rate, weight_decay=0.1)
        return optax.sgd(self.rate, momentum=MOMENTUM)


@dataclass(frozen=True)
class Training:
    """What training gives.

    Attributes:
        params: the weights after each update; the first are those of the beginning.
        losses: of each batch, as they are recorded, at the weights that it was computed with.
        minimised: likewise, as they are minimised: of nothing a term is 0.
    """

    params: list[Params]
    losses: list[float]
    minimised: list[float]


def train(
    rule: Rule, params: Params, batches: Sequence[Batch], num_joined: int | Sequence[int] = 1
) -> Training:
    """Train, one update for each batch.

    Args:
        rule: how.
        params: the first weights.
        batches: of all steps.
        num_joined: how many of them are one batch; what is left at the end is one too. Several
            numbers are those of each update.
    """
    phases = rule.order or ("",)
    optimizer = rule.make_optimizer()
    states = {
        phase: optimizer.init(_select(params, (phase,) if phase else rule.trained))
        for phase in phases
    }
    history = [params]
    losses, minimised = [], []
    for group in _join_groups(batches, num_joined):
        before = params
        for batch in group:
            terms = _get_terms(rule)(before, batch)
            losses.append(measure(rule, before, batch)["loss"])
            minimised.append(float(sum(divide(*term) for term in terms.values())))
        for phase in phases:
            names = (phase,) if phase else rule.trained
            grads = _differentiate(
                rule, before if rule.simultaneous else params, join(group), names
            )
            if rule.clip is not None:
                norm = optax.tree.norm(jax.tree.map(lambda leaf: leaf.astype(jnp.float32), grads))
                factor = jnp.minimum(1, rule.clip / norm)
                grads = jax.tree.map(
                    lambda leaf, factor=factor: (leaf * factor).astype(leaf.dtype), grads
                )
            chosen = _select(params, names)
            updates, states[phase] = optimizer.update(grads, states[phase], chosen)
            new: Any = optax.apply_updates(chosen, updates)
            params = {**params, **new}
        history.append(params)
    return Training(history, losses, minimised)


def measure(rule: Rule, params: Params, batch: Batch) -> dict[str, float]:
    """Return the loss of a batch as it is recorded, its sum as `loss` and each further term by
    name. Over nothing nothing is measured: a term is NaN and adds nothing to the sum, which is NaN
    where no term is measured, and where the loss that is minimised is 0."""
    return measure_window(rule, [params], [batch])


def measure_window(
    rule: Rule, params: Sequence[Params], batches: Sequence[Batch]
) -> dict[str, float]:
    """Return the losses over several steps: the mean of each term by its size, and their sum. What
    is not a mean must be of one step.

    Args:
        rule: how the loss is computed.
        params: the weights of each step.
        batches: of each step.
    """
    totals: dict[str, float] = {}
    sizes: dict[str, float] = {}
    for step_params, batch in zip(params, batches, strict=True):
        for name, (total, size) in _get_terms(rule)(step_params, batch).items():
            totals[name] = totals.get(name, 0) + float(total)
            sizes[name] = sizes.get(name, 0) + (1.0 if size is None else float(size))
    values = {name: total / (sizes[name] or np.nan) for name, total in totals.items()}
    numbers = [value for name, value in values.items() if sizes[name]]
    return {**values, "loss": sum(numbers) if numbers else np.nan}


def average(params: Sequence[Params], decay: float | None) -> Params:
    """Return the average of weights: the moving average that begins with the first of them, or,
    without a decay, the mean of all others.

    Args:
        params: the weights from the beginning, and after each update.
        decay: of the moving average.
    """
    if decay is None:
        return jax.tree.map(lambda *leaves: sum(leaves) / len(leaves), *params[1:])
    result = params[0]
    for newest in params[1:]:
        result = jax.tree.map(lambda a, b: decay * a + (1 - decay) * b, result, newest)
    return result


def _join_groups(batches: Sequence[Batch], sizes: int | Sequence[int]) -> list[Sequence[Batch]]:
    """Return the batches of each update."""
    if isinstance(sizes, int):
        sizes = [sizes] * -(-len(batches) // sizes)
    stops = np.cumsum(sizes)
    return [batches[stop - size : stop] for stop, size in zip(stops, sizes, strict=True)]


def _select(params: Params, names: Sequence[str]) -> Params:
    return {name: params[name] for name in names}


def _differentiate(rule: Rule, params: Params, batch: Batch, names: tuple[str, ...]) -> Params:
    """Return the gradient of the loss of a batch by some parameters."""
    if rule.radius is None:
        return _select(_get_gradient(rule)(params, batch), names)
    parts = [
        {name: array[index :: rule.parts] for name, array in batch.items()}
        for index in range(rule.parts)
    ]
    jacobians = []
    for part in parts:
        grads = _select(_get_gradient(rule)(params, part), names)
        norm = float(optax.tree.norm(grads))
        scale = rule.radius / norm if norm else 0.0
        worst = {name: params[name] for name in params}
        worst |= {
            name: jax.tree.map(lambda a, b, scale=scale: a + scale * b, params[name], grads[name])
            for name in names
        }
        totals = {
            name: _select(value, names) for name, value in _get_jacobian(rule)(worst, part).items()
        }
        sizes = {name: size for name, (_, size) in _get_terms(rule)(worst, part).items()}
        jacobians.append((totals, sizes))
    result = jax.tree.map(jnp.zeros_like, _select(params, names))
    for name in jacobians[0][0]:
        size = sum(float(sizes[name] or 0) for _, sizes in jacobians) or 1.0
        for totals, sizes in jacobians:
            divisor = 1.0 if sizes[name] is None else size
            result = jax.tree.map(
                lambda a, b, divisor=divisor: a + b / divisor, result, totals[name]
            )
    return result


# The functions below are compiled once for each kind of loss, and the rest of a rule is not theirs.


def _get_terms(rule: Rule) -> Callable[[Params, Batch], Terms]:
    return _compile(rule.terms, rule.compute)[0]


def _get_gradient(rule: Rule) -> Callable[[Params, Batch], Params]:
    return _compile(rule.terms, rule.compute)[1]


def _get_jacobian(rule: Rule) -> Callable[[Params, Batch], dict[str, Params]]:
    return _compile(rule.terms, rule.compute)[2]


@cache
def _compile(terms: Any, compute: str | None) -> tuple[Any, Any, Any]:
    def evaluate(params: Params, batch: Batch) -> Terms:
        return terms(params, batch, compute)

    def loss(params: Params, batch: Batch) -> Any:
        return sum(divide(*term) for term in evaluate(params, batch).values())

    def totals(params: Params, batch: Batch) -> Any:
        return {name: total for name, (total, _) in evaluate(params, batch).items()}

    return jax.jit(evaluate), jax.jit(jax.grad(loss)), jax.jit(jax.jacrev(totals))
