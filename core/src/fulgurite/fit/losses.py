"""What is tried of the losses of training before the first step: whether they are means over
examples, and whether padding counts in them."""

from typing import Any

from fulgurite.errors import ModelError
from fulgurite.evaluation.evaluator import Evaluator
from fulgurite.evaluation.loss_trial import FIX, Sample, Undecided
from fulgurite.evaluation.padding_trial import FIX as FIX_PADDING
from fulgurite.evaluation.runner import EvaluationRunner
from fulgurite.evaluation.target import EvalTarget
from fulgurite.execution.program import Program
from fulgurite.model.module import Module, has_training_losses, run_training_losses
from fulgurite.training.services import Services
from fulgurite.training.state import TrainState


def try_losses(
    services: Services,
    program: Program,
    state: TrainState,
    sample: Sample | None,
    device_arrays: Any,
) -> list[str]:
    """Try, once for each program that is not refused, whether the losses of training are means over
    examples, and return what the user is told.

    Args:
        services: of the engine.
        program: the training program.
        state: to train from.
        sample: examples of the first batch; None where nothing depends on it.
        device_arrays: what indexed batches are gathered from.

    Raises:
        ModelError: they are not, and the update rule needs it.
    """
    target = _select_target(state)
    if sample is None or target is None or program.has_tried_losses:
        return []
    messages = _try_means(services, program, target, sample, device_arrays)
    program.has_tried_losses = True
    return messages


def _try_means(
    services: Services, program: Program, target: EvalTarget, sample: Sample, device_arrays: Any
) -> list[str]:
    is_needed = program.update_rule.needs_mean_loss
    runner = EvaluationRunner(services, Evaluator("losses", ()), run_training_losses)
    allow = "; or allow it, GradientAccumulation(..., assume_mean=True)"
    try:
        sentences = runner.try_means(target, sample, device_arrays, program.step.transform_batch)
    except Undecided:
        return []  # a loss that is not finite ends the run by itself
    except Exception as error:
        message = (
            "whether the loss is a mean over examples could not be tried on "
            f"{2 * sample.size} of them: {type(error).__name__}: {error}. {FIX}"
        )
        if is_needed:
            raise ModelError(
                f"gradients are averaged over examples, and {message}{allow}"
            ) from error
        return [message]
    losses = [sentence for name, sentence in sentences.items() if name.startswith("the loss")]
    if losses and is_needed:
        raise ModelError(
            f"gradients are averaged over examples, but {'; '.join(losses)}. {FIX}{allow}"
        )
    if not sentences:
        return []
    where = "the last batch of an epoch has fewer" if not is_needed else "a batch is divided"
    return [
        f"metrics of training are averaged over examples, and {where}, but "
        f"{'; '.join(sentences.values())}. {FIX}"
    ]


def try_padding(
    services: Services,
    program: Program,
    state: TrainState,
    examples: Any,
    device_arrays: Any,
) -> list[str]:
    """Try, once for each program that is not refused, whether padding counts in losses and metrics
    of training that do not use the mask, and return what the user is told.

    Args:
        services: of the engine.
        program: the training program.
        state: to train from.
        examples: of the first batch; None where no batch has padding.
        device_arrays: what indexed batches are gathered from.

    Raises:
        ModelError: padding changes the gradient.
    """
    target = _select_target(state)
    if examples is None or target is None or program.has_tried_padding:
        return []
    where = f"{type(state.module).__name__}.training_step does not use ctx.mask"
    messages = _try_mask(services, program, target, examples, device_arrays, where)
    program.has_tried_padding = True
    return messages


def _try_mask(
    services: Services,
    program: Program,
    target: EvalTarget,
    examples: Any,
    device_arrays: Any,
    where: str,
) -> list[str]:
    is_standard = services.compute_update.__qualname__ == "Engine.train_step"
    runner = EvaluationRunner(services, Evaluator("padding", ()), run_training_losses)
    try:
        trial = runner.try_padding(target, examples, device_arrays, program.step.transform_batch)
    except Exception as error:
        return [
            "batches may have padding, and whether it counts could not be tried: "
            f"{type(error).__name__}: {error}. {FIX_PADDING}"
        ]
    if trial is None:
        return []
    if trial.changes_gradient and is_standard:
        raise ModelError(
            f"the data has batches with padding, and {where} for {', '.join(trial.unused_by)}: "
            f"padding changes the gradient ({'; '.join(trial.sentences) or 'not the loss'}). "
            f"{FIX_PADDING}"
        )
    if trial.sentences or trial.is_random:
        details = "; ".join(trial.sentences) or "it is random, so it could not be tried"
        return [
            f"the data has batches with padding, and {where} for {', '.join(trial.unused_by)}: "
            f"{details}. {FIX_PADDING}"
        ]
    return []


def _select_target(state: TrainState) -> EvalTarget | None:
    """Return what is tried of a state; None for a module that does not define its losses."""
    module, model_state = state.module, state.model_state
    if isinstance(module, Module):
        module, model_state = module.select_model(model_state)
    if not has_training_losses(module):
        return None
    return EvalTarget(module, model_state, state.key, state.step)
