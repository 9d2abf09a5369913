"""Names that users bring from other libraries, and what is in their place here."""

import functools
from collections.abc import Callable, Iterable, Mapping
from inspect import Parameter, signature
from typing import ParamSpec, TypeVar

from fulgurite.errors import ConfigurationError

_EVALUATIONS = (
    "evaluations are plugins of fulgurite-evaluators, plugins=[Evaluator('val', data, every=100)]"
)

ENGINE_ARGUMENTS: Mapping[str, str] = {
    **dict.fromkeys(("max_epochs", "num_epochs"), "give epochs="),
    **dict.fromkeys(("max_steps", "num_steps", "num_train_steps"), "give steps="),
    **dict.fromkeys(("default_root_dir", "log_dir", "workdir"), "give run_dir="),
    **dict.fromkeys(("logger", "loggers"), "loggers are plugins, plugins=['jsonl', 'tensorboard']"),
    **dict.fromkeys(
        ("accelerator", "devices", "strategy"),
        "how devices share the work is a plugin of fulgurite-sharding, such as DataParallel()",
    ),
    **dict.fromkeys(
        (
            "check_val_every_n_epoch",
            "eval_data",
            "val",
            "val_check_interval",
            "val_data",
            "val_dataloaders",
            "validation_data",
        ),
        _EVALUATIONS,
    ),
    **dict.fromkeys(
        ("ckpt_path", "resume_from_checkpoint"), "give fit(..., resume=) or fit(..., init_from=)"
    ),
    "accumulate_grad_batches": "add GradientAccumulation(n) of fulgurite-optimizers to the plugins",
    "batch_size": "it belongs to the data, fg.ArrayData(arrays, batch_size)",
    "callbacks": "callbacks are plugins, plugins=[...]",
    "enable_checkpointing": "add Checkpointer(every=...) of fulgurite-checkpoint to the plugins",
    "enable_progress_bar": "the progress line is the plugin 'progress', and '-progress' leaves it "
    "out",
    "gradient_clip_val": "add GradientClip(max_norm=...) of fulgurite-optimizers to the plugins",
    "log_every_n_steps": "give log_every=",
    "optimizer": "a module has its own: define configure_optimizers, or give it to fg.Task",
}
"""Arguments of the trainers of other libraries."""

DATA_ARGUMENTS: Mapping[str, str] = {
    **dict.fromkeys(
        ("dataloader", "dataloaders", "datamodule", "dataset", "ds", "train_dataloaders"),
        "give the data as the second argument",
    ),
}
"""What others call the data of `fit`, `evaluate` and `predict`."""

FIT_ARGUMENTS: Mapping[str, str] = {
    **ENGINE_ARGUMENTS,
    **DATA_ARGUMENTS,
    **dict.fromkeys(
        ("default_root_dir", "log_dir", "run_dir", "workdir"), "give fg.Engine(run_dir=...)"
    ),
    "log_every_n_steps": "give fg.Engine(log_every=...)",
}
"""Arguments that are given to `fit` elsewhere."""

_MODULE_ATTRIBUTES: Mapping[str, str] = {
    **dict.fromkeys(
        ("log", "log_dict"),
        "return what is to be logged, fg.Output(loss, metrics={'accuracy': accuracy})",
    ),
    "global_step": "the step is ctx.step",
    "manual_backward": "fg.compute_gradients in Engine.train_step computes gradients",
}
"""Attributes of a `LightningModule` that its steps use."""

P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C", bound=type)


def check_foreign_arguments(
    owner: str, names: Iterable[str], known: Iterable[str], hints: Mapping[str, str]
) -> None:
    """Raise an error that names what is in the place of an argument.

    Args:
        owner: whose arguments they are, as the message calls it.
        names: of the arguments that were passed.
        known: those that it has.
        hints: what to do, by the names of other libraries.
    """
    for name in names:
        if name in hints and name not in known:
            raise ConfigurationError(f"{owner} has no argument {name!r}: {hints[name]}")


def hint_at_arguments(
    hints: Mapping[str, str], owner: str, too_many: str | None = None
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator of a method that refuses arguments by their names in other libraries.

    Args:
        hints: what to do, by name.
        owner: what the message calls the method.
        too_many: what to do if there are more arguments by position than it has; None for the error
            of Python.
    """

    def decorate(method: Callable[P, R]) -> Callable[P, R]:
        parameters = signature(method).parameters
        by_position = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
        max_args = sum(parameter.kind in by_position for parameter in parameters.values())

        @functools.wraps(method)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            check_foreign_arguments(owner, kwargs, parameters, hints)
            if too_many is not None and len(args) > max_args:
                noun = "argument" if len(args) == 2 else "arguments"
                raise ConfigurationError(
                    f"{owner} got {len(args) - 1} {noun} by position and takes {max_args - 1}: "
                    f"{too_many}"
                )
            return method(*args, **kwargs)

        return call

    return decorate


def hint_at_class_arguments(hints: Mapping[str, str]) -> Callable[[C], C]:
    """Return a decorator of a class whose `__init__` refuses arguments by their names in other
    libraries.

    Args:
        hints: what to do, by name.
    """

    def decorate(cls: C) -> C:
        init = cls.__init__
        cls.__init__ = hint_at_arguments(hints, cls.__name__)(init)  # type: ignore[misc]
        return cls

    return decorate


def add_attribute_hint(error: BaseException, module_class: type) -> None:
    """Add a note to the error for an attribute that a module lacks, if others have it.

    Args:
        error: what left a step.
        module_class: the class of modules.
    """
    if isinstance(error, AttributeError) and isinstance(error.obj, module_class):
        hint = _MODULE_ATTRIBUTES.get(str(error.name))
        if hint is not None:
            error.add_note(f"a module has no {error.name!r} here: {hint}")
