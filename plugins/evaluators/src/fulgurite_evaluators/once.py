"""Evaluate one checkpoint with the evaluators of a program."""

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any

import fulgurite as fg
from fulgurite.errors import CheckpointError, ConfigurationError
from fulgurite.plugins import EvaluationResult
from fulgurite_runs import RunDirectory, dumps

from fulgurite_evaluators.evaluator import find_evaluators
from fulgurite_evaluators.logging import EvaluationRun, ResultLogger

if TYPE_CHECKING:
    from fulgurite_cli import Experiment

ReportResult = Callable[[str, int, EvaluationResult | Exception], None]


def evaluate_checkpoint(
    experiment: "Experiment",
    run: RunDirectory,
    step: int | str,
    *,
    output: RunDirectory | None = None,
    report: ReportResult,
) -> bool:
    """Run every evaluator of a program on one checkpoint of a run; return whether all succeeded.

    Args:
        experiment: of the program.
        run: the directory of the run.
        step: of the checkpoint: a number, `latest` or `best`.
        output: a directory for the loggers of the program; without one they get nothing.
        report: called with the name of each evaluator, the step, and its result or its exception.

    Raises:
        ConfigurationError: the program has no evaluator.
        CheckpointError: the checkpoint cannot be read, or something else is in `output`.
    """
    engine = experiment.engine
    evaluators = find_evaluators(engine)
    # Other plugins may have evaluations as well.
    names = list(dict.fromkeys([*evaluators, *engine.evaluations]))
    if not names:
        raise ConfigurationError(
            "the program has no evaluator: add Evaluator('test', data) to its plugins"
        )
    # Each evaluator chooses its weights itself, also of the best checkpoint.
    checkpoint = fg.CheckpointRef(run.path, step, view="current")  # type: ignore[arg-type]
    state = engine.load_weights(experiment.model, checkpoint)
    trained_steps = int(state.step)
    description = {"run": str(run.path), "step": trained_steps}
    has_succeeded = True
    with _open_output(engine, output, run, description) as logger:
        for name in names:
            try:
                if name in evaluators:
                    result = evaluators[name].compute(state, engine, engine.run_evaluation)
                else:
                    result = engine.run_evaluation(name, state)
            except Exception as error:
                report(name, trained_steps, error)
                has_succeeded = False
                continue
            if logger is not None:
                logger.log(name, trained_steps, result)
            report(name, trained_steps, result)
        if output is not None and has_succeeded:
            output.mark_complete()
    return has_succeeded


@contextmanager
def _open_output(
    engine: fg.Engine, output: RunDirectory | None, run: RunDirectory, evaluates: dict[str, Any]
) -> Iterator[ResultLogger | None]:
    """Open a directory for the results, and the loggers of the program in it.

    Args:
        engine: of the program.
        output: the directory; None for none.
        run: whose checkpoint is evaluated.
        evaluates: says which checkpoint that is.
    """
    if output is None:
        yield None
        return
    if output.is_at(run.path) or output.list_checkpoints():
        raise CheckpointError(
            f"{output.path} is the directory of a training run: give the results one of their own"
        )
    manifest = {**run.read_manifest(), "evaluates": evaluates}
    with output.lock():
        # What an earlier evaluation has left here is set aside.
        attempt = output.start_attempt(dumps(manifest))
        view = EvaluationRun(engine, output, manifest, attempt, step=0)
        with closing(ResultLogger(view)) as logger:
            yield logger
