"""What is tried of the losses of training before the first step: whether they are means over
examples, and whether padding counts in them."""

from typing import Any, NamedTuple

from fulgurite._src.data.sources import has_unequal_batches, may_pad
from fulgurite._src.evaluation.evaluation import Evaluation
from fulgurite._src.evaluation.loss_trial import FIX, Sample, Undecided, choose_sample
from fulgurite._src.evaluation.padding_trial import (
    FIX as FIX_PADDING,
    PaddingTrial,
    choose_examples,
)
from fulgurite._src.evaluation.step import EvaluationStep
from fulgurite._src.evaluation.target import EvalTarget
from fulgurite._src.evaluation.trials import StepTrials
from fulgurite._src.execution.program import Program
from fulgurite._src.model.module import Module, has_training_losses, run_training_losses
from fulgurite._src.training.services import Services
from fulgurite._src.training.state import TrainState
from fulgurite.errors import ModelError


def choose_trials(data: Any, program: Program, first_batch: Any) -> tuple[Sample | None, Any]:
    """Return what of a batch to try the losses on, and the padding; None where neither matters.

    Args:
        data: the data source of training.
        program: the training program.
        first_batch: the first batch.
    """
    is_weighted = has_unequal_batches(data, first_batch)
    needs_means = is_weighted or program.update_rule.needs_mean_loss
    sample = choose_sample(first_batch) if needs_means else None
    padded = choose_examples(first_batch) if may_pad(data, first_batch) else None
    return sample, padded


def try_losses(
    services: Services,
    program: Program,
    state: TrainState,
    sample: Sample | None,
    device_arrays: Any,
) -> list[str]:
    """Try, once for each program, whether the losses of training are means over examples, and
    return what the user is told.

    Args:
        services: of the engine.
        program: the training program.
        state: to train from.
        sample: examples of the first batch of this process; None where nothing depends on it.
        device_arrays: what indexed batches are gathered from.

    Raises:
        ModelError: they are not, and the update rule needs it.
    """
    target = None if program.has_tried_losses else _select_target(state)
    if target is None:
        return []
    outcome = _try_means(services, program, target, sample, device_arrays)
    answer = None if outcome is None else (outcome.sentences, outcome.failure)
    answers = _gather(services, "losses", answer)
    if not answers:
        return []
    # What one process finds ends the fit of all of them, or is told by the first.
    sentences, failure = next(filter(any, answers), answers[0])
    cause = None if outcome is None else outcome.error
    messages = _judge_losses(
        program.update_rule.needs_mean_loss, _Outcome(sentences, failure, cause)
    )
    # Not before: a loss that was refused is refused again in the next fit.
    program.has_tried_losses = True
    return messages


def _judge_losses(is_needed: bool, outcome: "_Outcome") -> list[str]:
    """Return what the user is told of losses that were tried.

    Args:
        is_needed: whether the update rule needs means over examples.
        outcome: of the trial.

    Raises:
        ModelError: they are not such means, and it needs them.
    """
    allow = "; or allow it, GradientAccumulation(..., assume_mean=True)"
    sentences = outcome.sentences
    if outcome.failure is not None:
        message = (
            "whether the loss is a mean over examples could not be tried on "
            f"{outcome.failure}. {FIX}"
        )
        if is_needed:
            raise ModelError(
                f"gradients are averaged over examples, and {message}{allow}"
            ) from outcome.error
        return [message]
    losses = [sentence for name, sentence in sentences.items() if name.startswith("the loss")]
    if losses and is_needed:
        raise ModelError(
            f"gradients are averaged over examples, but {'; '.join(losses)}. {FIX}{allow}"
        )
    if not sentences:
        return []
    where = "batches differ in how many they have" if not is_needed else "a batch is divided"
    return [
        f"metrics of training are averaged over examples, and {where}, but "
        f"{'; '.join(sentences.values())}. {FIX}"
    ]


class _Outcome(NamedTuple):
    """What a trial of the losses has given on this process.

    Attributes:
        sentences: one for each number that is not a mean over examples, by its name.
        failure: on how many examples it failed, and how, in words; None if it did not.
        error: the exception, where it was raised.
    """

    sentences: dict[str, str]
    failure: str | None = None
    error: Exception | None = None


def _try_means(
    services: Services,
    program: Program,
    target: EvalTarget,
    sample: Sample | None,
    device_arrays: Any,
) -> _Outcome | None:
    """Return what the trial on this process gives; None if there are no examples to try.

    Args:
        services: of the engine.
        program: the training program.
        target: the module and what belongs to it.
        sample: the examples, or None.
        device_arrays: what indexed batches are gathered from.
    """
    if sample is None:
        return None
    step = EvaluationStep(services, Evaluation("losses", ()), run_training_losses)
    try:
        return _Outcome(
            StepTrials(step).try_means(target, sample, device_arrays, program.step.transform_batch)
        )
    except Undecided:
        return _Outcome({})  # a loss that is not finite ends the run by itself
    except Exception as error:
        failure = f"{2 * sample.size} of them: {type(error).__name__}: {error}"
        return _Outcome({}, failure, error)


def _gather(services: Services, name: str, answer: Any) -> list[Any]:
    """Return what trials have given on all processes that could try anything.

    Args:
        services: of the engine.
        name: of the trial.
        answer: of this process, a JSON value; None if it has tried nothing.
    """
    answers = services.sharding.sync.all_gather(name, answer)
    return [answer for answer in answers if answer is not None]


def try_padding(
    services: Services,
    program: Program,
    state: TrainState,
    examples: Any,
    device_arrays: Any,
) -> list[str]:
    """Try, once for each program, whether padding counts in losses and metrics of training that do
    not use the mask, and return what the user is told.

    Args:
        services: of the engine.
        program: the training program.
        state: to train from.
        examples: of the first batch of this process; None where no batch has padding.
        device_arrays: what indexed batches are gathered from.

    Raises:
        ModelError: padding changes the gradient.
    """
    target = None if program.has_tried_padding else _select_target(state)
    if target is None:
        return []
    answer = _try_padding(services, program, target, examples, device_arrays)
    answers = _gather(services, "padding", answer)
    if not answers:
        return []
    where = f"{type(state.module).__name__}.training_step does not use ctx.mask"
    messages = _judge_padding(answers, where, services.custom_train_step is None)
    # Not before: a step that was refused is refused again in the next fit.
    program.has_tried_padding = True
    return messages


def _judge_padding(answers: list[Any], where: str, is_standard: bool) -> list[str]:
    """Return what the user is told of padding that was tried.

    Args:
        answers: what the trials of all processes gave.
        where: what does not use the mask, in words.
        is_standard: whether the update is that of the engine.

    Raises:
        ModelError: padding changes the gradient.
    """
    trials = [PaddingTrial(*numbers) for numbers, _ in answers if numbers is not None]
    failures = [failure for _, failure in answers if failure is not None]
    if not trials and failures:
        return [
            f"batches may have padding, and whether it counts could not be tried: {failures[0]}. "
            f"{FIX_PADDING}"
        ]
    if not trials:
        return []
    # Of several processes, that which has found most.
    trial = max(trials, key=lambda trial: (trial.changes_gradient, len(trial.sentences)))
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


def _try_padding(
    services: Services,
    program: Program,
    target: EvalTarget,
    examples: Any,
    device_arrays: Any,
) -> tuple[PaddingTrial | None, str | None] | None:
    """Return the trial on this process, if there are numbers that do not use the mask, and how it
    failed, if it did; None if there are no examples to try. The arguments are those of
    `try_padding`."""
    if examples is None:
        return None
    step = EvaluationStep(services, Evaluation("padding", ()), run_training_losses)
    try:
        trial = StepTrials(step).try_padding(
            target, examples, device_arrays, program.step.transform_batch
        )
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"
    return trial, None


def _select_target(state: TrainState) -> EvalTarget | None:
    """Return what is tried of a state; None for a module that does not define its losses."""
    module, model_state = state.module, state.model_state
    if isinstance(module, Module):
        module, model_state = module.select_model(model_state)
    if not has_training_losses(module):
        return None
    return EvalTarget(module, model_state, state.key, state.step)
