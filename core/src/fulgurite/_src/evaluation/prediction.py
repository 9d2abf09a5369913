"""Predictions of a module for every example of some data."""

from collections import deque
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from fulgurite._src.callbacks import callback_error_context
from fulgurite._src.evaluation.evaluation import Evaluation
from fulgurite._src.evaluation.feed import BatchFeed, EvalBatch
from fulgurite._src.evaluation.program import EvaluationProgramCache
from fulgurite._src.evaluation.step import EvaluationStep
from fulgurite._src.evaluation.target import EvalTarget
from fulgurite._src.execution.dispatch import MAX_IN_FLIGHT
from fulgurite._src.model.module import get_method
from fulgurite._src.training.forward import call_with_around_hooks
from fulgurite._src.training.services import Services
from fulgurite._src.tree.specs import format_tree
from fulgurite._src.tree.typecheck import check_batch
from fulgurite.errors import ModelError


class PredictionRunner:
    """Runs `predict_step` on any module and data.

    The program is compiled once for each structure of them.

    Args:
        services: what the engine provides.
    """

    def __init__(self, services: Services) -> None:
        self._step = EvaluationStep(services, Evaluation("predict", ()), "predict_step")
        self._programs = EvaluationProgramCache(services, "predict", self._make_program)

    def predict(
        self,
        target: EvalTarget,
        data: Any,
        num_batches: int | None,
        callback: Callable[[PyTree[np.ndarray]], None] | None,
    ) -> Any:
        """Return the predictions for every example, in order and without padding, as one tree.

        Args:
            target: the module and what belongs to it.
            data: any data source.
            num_batches: use at most this many batches.
            callback: called with the predictions of each batch instead; nothing is returned.
        """
        predictions: list[Any] = []
        take = predictions.append if callback is None else callback
        with callback_error_context(lambda: self._step.failed_batch_name):
            self._run(target, data, num_batches, take)
        return _concatenate(predictions) if callback is None else None

    def _run(
        self, target: EvalTarget, data: Any, num_batches: int | None, take: Callable[[Any], None]
    ) -> None:
        """Hand the predictions of each batch to `take`; the other arguments are those of
        `predict`."""
        executables: dict[Any, Callable[..., Any]] = {}
        in_flight: deque[Any] = deque()
        feed = BatchFeed(self._step, target, data)
        with feed.open(num_batches) as batches:
            for batch in batches:
                arguments = feed.make_arguments(batch)
                if batch.signature not in executables:
                    executables[batch.signature] = self._prepare(target, batch, arguments)
                executable = executables[batch.signature]
                in_flight.append(executable(*arguments))
                if len(in_flight) > MAX_IN_FLIGHT:
                    take(_remove_padding(*in_flight.popleft()))
        for preds, mask in in_flight:
            take(_remove_padding(preds, mask))

    def _prepare(
        self, target: EvalTarget, batch: EvalBatch, arguments: tuple[Any, ...]
    ) -> Callable[..., Any]:
        """Return the executable for a batch of new shapes."""
        program = self._programs.get(target, batch.value)
        return self._programs.prepare(target, batch.index, program, arguments)

    def _make_program(self, target: EvalTarget) -> jax.stages.Wrapped:
        # Whatever leaves an evaluation is read on the host, by every process.
        return jax.jit(
            lambda leaves, *rest: self._predict_batch(target.join(leaves), *rest),
            out_shardings=self._step.sharding.replicated,
        )

    def _predict_batch(self, target: Any, batch: Any, device_arrays: Any, index: Any) -> Any:
        """Return the predictions of one batch, and its mask; traced."""
        with self._step.open_context(target, batch, device_arrays, index) as (module, batch, ctx):
            step = get_method(module, "predict_step")
            check_batch(step, batch, module)
            preds = call_with_around_hooks(
                self._step.plugins, step, module, batch, ctx.for_forward()
            )
            shapes = [jnp.shape(leaf)[:1] for leaf in jax.tree.leaves(preds)]
            fits_mask = ctx.mask is None or {*shapes} == {ctx.mask.shape}
            if not all(shapes or [()]) or not fits_mask:
                raise ModelError(
                    f"{step.__qualname__} returned {format_tree(preds) or 'nothing'}: return "
                    "arrays that begin with the example axis"
                )
            return preds, ctx.mask


def _concatenate(predictions: list[Any]) -> Any:
    """Return the predictions of all batches as one tree."""
    for index, preds in enumerate(predictions):
        if _get_example_spec(preds) != _get_example_spec(predictions[0]):
            raise ModelError(
                f"predict_step returned {format_tree(preds)} for batch {index}, and "
                f"{format_tree(predictions[0])} for batch 0: give them the same shapes, or take "
                "each with callback="
            )
    return jax.tree.map(lambda *parts: np.concatenate(parts), *predictions)


def _get_example_spec(preds: Any) -> tuple[Any, list[tuple[int, ...]]]:
    """Return the structure of predictions, and the shapes of one example."""
    return jax.tree.structure(preds), [leaf.shape[1:] for leaf in jax.tree.leaves(preds)]


def _remove_padding(preds: Any, mask: Any) -> Any:
    """Return the predictions that the mask, if any, does not exclude, as NumPy arrays."""

    def select(leaf: Any) -> np.ndarray:
        array = np.asarray(leaf)
        return array if mask is None else array[np.asarray(mask)]

    return jax.tree.map(select, preds)
