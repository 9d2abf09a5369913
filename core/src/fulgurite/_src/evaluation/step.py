"""A step of a module as evaluations, predictions and trials run it: in inference mode, traced."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp

from fulgurite._src.data.batch import as_batch
from fulgurite._src.data.sources import ArrayData
from fulgurite._src.evaluation.batch_metrics import (
    choose_media,
    collect_batch_metrics,
    may_have_bare_numbers,
)
from fulgurite._src.evaluation.evaluation import Evaluation
from fulgurite._src.evaluation.program import EvaluationCarry
from fulgurite._src.execution.debugging import check_jit_can_compile
from fulgurite._src.model.context import Context
from fulgurite._src.model.media import MEDIA_ACTION
from fulgurite._src.model.mode import training_mode
from fulgurite._src.model.output import Output
from fulgurite._src.sharding import ShardingStrategy
from fulgurite._src.training.forward import Step, forward
from fulgurite._src.training.services import Services
from fulgurite._src.tree.specs import check_same_structure
from fulgurite._src.tree.typecheck import batch_error_context


class EvaluationStep:
    """A step of a module on the batches of an evaluation.

    Attributes:
        evaluation: what is evaluated.
        plugins: those of the engine.
        sharding: where arrays lie.
        batch_index: the number of the batch at hand, for errors.
        may_have_bare_numbers: whether a batch had scalars without a known weight.

    Args:
        services: what the engine provides.
        evaluation: what is evaluated; its data is not looked at.
        step: of the module, or a function `step(module, batch, ctx)`.
    """

    def __init__(self, services: Services, evaluation: Evaluation, step: Step) -> None:
        check_jit_can_compile()
        self.evaluation = evaluation
        self.plugins = services.plugins
        self.sharding = services.sharding
        self.batch_index = 0
        self.may_have_bare_numbers = False
        self._step: Step = step
        self._make_rng_streams = services.make_rng_streams
        self._due_names = services.due_names

    @property
    def batch_name(self) -> str:
        """The batch at hand as errors name it: `batch 3 of 'test'`."""
        return f"batch {self.batch_index} of {self.evaluation.name!r}"

    @property
    def failed_batch_name(self) -> str:
        """The batch a callback of which has failed. Only a CPU is known to be done with the
        previous batches when an error arrives."""
        is_exact = jax.default_backend() == "cpu"
        which = "batch" if is_exact else "one of the batches up to"
        return f"{which} {self.batch_index} of {self.evaluation.name!r}"

    def run(self, sharding: ShardingStrategy, module: Any, batch: Any, ctx: Context) -> Output:
        """Return the output of the step; traced.

        Args:
            sharding: where it is computed.
            module: the module, in inference mode.
            batch: without its mask.
            ctx: the context of the step.
        """
        return forward(self.plugins, sharding, self._step, module, batch, ctx)

    def evaluate(
        self,
        target: Any,
        batch: Any,
        device_arrays: Any,
        index: Any,
        carry: EvaluationCarry | None,
    ) -> tuple[EvaluationCarry, Any, Any]:
        """Return the carry with one more batch, and its collecting metrics and media; traced.

        Args:
            target: module, model state, key and step.
            batch: as the data source yields it.
            device_arrays: what indexed batches are gathered from.
            index: the number of the batch.
            carry: what the previous batch handed on; None for none.
        """
        with self.open_context(target, batch, device_arrays, index) as (module, batch, ctx):
            output = self.run(self.sharding, module, batch, ctx)
            self.may_have_bare_numbers |= may_have_bare_numbers(self.evaluation, output)
            accumulator, collected = collect_batch_metrics(
                self.evaluation, self.plugins, module, output, batch, ctx
            )
            media = choose_media(self.evaluation, output, batch, ctx, index == 0)
        new = EvaluationCarry(accumulator, dict.fromkeys(collected), jnp.bool_(True))
        if carry is not None:
            check_same_structure(carry.metrics, new.metrics, f"the metrics of {self.batch_name}")
            updated = carry.accumulator.update(accumulator, restart=~carry.has_batches)
            new = new._replace(accumulator=updated)
        return new, collected, media

    @contextmanager
    def open_context(
        self, target: Any, batch: Any, device_arrays: Any, index: Any
    ) -> Iterator[tuple[Any, Any, Context]]:
        """Give the module in inference mode, the batch without its mask, and the context of the
        step; errors name the batch.

        Args:
            target: module, model state, key and step.
            batch: as the data source yields it.
            device_arrays: what indexed batches are gathered from.
            index: the number of the batch.
        """
        module, model_state, key, step = target
        parts = as_batch(ArrayData.gather(device_arrays, batch))
        # Media are shown of the first batch; nothing else is due in an evaluation.
        due_flags: dict[str, Any] = {name: jnp.asarray(False) for name in self._due_names}
        if MEDIA_ACTION in due_flags:
            due_flags[MEDIA_ACTION] = jnp.asarray(index == 0)
        ctx = Context(
            self._make_rng_streams(key),
            step,
            training=False,
            model_state=model_state,
            mask=parts.mask,
            spec=parts.spec,
            num_examples=parts.num_examples,
            rng_path=((self.evaluation.name, index),),
            due_flags=due_flags,
            rng_step=step if self.evaluation.new_rng_each_time else None,
            evaluation=self.evaluation.name,
        )
        value = parts.value
        with training_mode(False, module) as module, batch_error_context(self.batch_name, value):
            yield module, value, ctx
