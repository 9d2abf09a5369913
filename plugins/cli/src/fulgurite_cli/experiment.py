"""A program that trains: a function with typed arguments, and the experiment that it returns."""

import inspect
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fulgurite import Engine
from fulgurite.errors import (
    ConfigurationError,
    did_you_mean,
)
from fulgurite.plugins import REDACTED, RedactedText, redact_value
from fulgurite_config import Node, normalize_path
from fulgurite_runs import dumps, loads

from fulgurite_cli.configuration import (
    KEY as CONFIG_KEY,
    build_from_config,
    find_allowed,
    is_configuration,
    override_config,
    plan_from_config,
    rebuild_from_config,
    refer_to_options,
)
from fulgurite_cli.report import format_arguments, format_config
from fulgurite_cli.values import (
    Parameter,
    fit_default,
    get_parameters,
    is_same_value,
    parse_value,
    restore_value,
    to_plain,
)

RUN_DIR = "run_dir"
"""An experiment's argument that gets the value of `--run`. It is not part of the configuration."""


@dataclass(frozen=True)
class Experiment:
    """What a program trains.

    Example:
        from fulgurite_cli import Experiment, run


        def experiment(seed: int = 0, steps: int = 1000) -> Experiment:
            engine = fg.Engine(steps=steps, seed=seed)
            return Experiment(engine, model=lambda key: Net(key), data=data)


        if __name__ == "__main__":
            run(experiment)

    Attributes:
        engine: the engine that trains.
        model: the model, as for `Engine.fit`.
        data: the data, as for `Engine.fit`, or a function without arguments that returns it and
            that is called only where the data is needed. None if the program only evaluates the
            checkpoints of other programs' runs.
    """

    engine: Engine
    model: Any
    data: Any = None


Factory = Callable[..., Any]
"""A function whose typed arguments are the configuration of the experiment that it returns, or one
without arguments that returns a configuration of `fulgurite_config`."""


def build_experiment(
    experiment: Factory,
    overrides: Sequence[str] = (),
    saved_config: dict[str, Any] | None = None,
    *,
    run_dir: str | None = None,
    start_config: dict[str, Any] | None = None,
    allow: Sequence[str] = (),
) -> Experiment:
    """Call an experiment's function with `name=value` overrides.

    Args:
        experiment: the function.
        overrides: strings `name=value`.
        saved_config: the configuration in a run's manifest. It holds: an override that differs is
            an error, unless the manifest hides the value because it is a secret. An argument that
            the function does not have is one too, unless its program only evaluates.
        run_dir: the run directory, handed to an experiment that has an argument `run_dir`, so that
            it can leave out plugins that need one.
        start_config: a configuration, as manifests hold it, that overrides may change.
        allow: names, packages and modules that a configuration which the program did not make may
            import, besides what the program's own names.

    Raises:
        ConfigurationError: an argument is unknown, missing, or not of its type, or the function
            returns no `Experiment`.
    """
    parameters = get_parameters(experiment)
    built: Any = None if parameters else experiment()
    if isinstance(built, Node):
        if saved_config is None:
            resolved, engine_config = build_from_config(built, overrides, start_config, allow)
        else:
            resolved = rebuild_from_config(saved_config, overrides, built, allow)
            engine_config = saved_config | {CONFIG_KEY: RedactedText(saved_config[CONFIG_KEY])}
        return _finish_experiment(as_experiment(resolved), experiment, engine_config)
    if allow:
        raise ConfigurationError(
            "--allow is for a run whose program is a configuration: leave it out"
        )
    arguments = _read_start_config(experiment, start_config or {}, parameters)
    arguments |= _parse_overrides(experiment, overrides, parameters)
    if RUN_DIR in parameters and run_dir is not None:
        arguments.setdefault(RUN_DIR, run_dir)
    if saved_config is not None:
        arguments |= _merge_saved_config(experiment, saved_config, arguments)
    _check_complete(experiment, parameters, arguments)
    built = experiment(**arguments) if parameters else built
    _check_experiment(experiment, built)
    if built.data is not None:
        _check_known(experiment, saved_config or {}, parameters)
    config = _describe_arguments(parameters, arguments)
    if run_dir is not None or built.engine.run_dir is not None:
        _check_config(experiment, config)
    return _finish_experiment(built, experiment, config)


def plan_config(
    experiment: Factory,
    overrides: Sequence[str],
    start_config: dict[str, Any] | None,
    allow: Sequence[str] = (),
) -> dict[str, Any]:
    """Return the configuration that the manifest of a run will hold, without building anything.

    Args:
        experiment: the function.
        overrides: strings `name=value`.
        start_config: a configuration, as manifests hold it, that the overrides change.
        allow: what that may name, besides what the program's own names.

    Raises:
        ConfigurationError: as `build_experiment`.
    """
    parameters = get_parameters(experiment)
    config = None if parameters else experiment()
    if isinstance(config, Node):
        planned = plan_from_config(config, overrides, start_config, allow)
    else:
        arguments = _read_start_config(experiment, start_config or {}, parameters)
        arguments |= _parse_overrides(experiment, overrides, parameters)
        _check_complete(experiment, parameters, arguments)
        planned = _describe_arguments(parameters, arguments)
    return loads(dumps(redact_value(planned)))


def _describe_arguments(
    parameters: dict[str, Parameter], arguments: dict[str, Any]
) -> dict[str, Any]:
    """Return the arguments of an experiment as manifests hold them.

    Args:
        parameters: of its function.
        arguments: that are not the defaults.
    """
    config = {name: fit_default(name, parameter) for name, parameter in parameters.items()}
    config |= arguments
    config.pop(RUN_DIR, None)
    return {name: to_plain(value) for name, value in config.items()}


def _check_complete(
    experiment: Factory, parameters: dict[str, Parameter], arguments: dict[str, Any]
) -> None:
    """Raise a `ConfigurationError` if an argument without a default is missing."""
    missing = [
        name
        for name, parameter in parameters.items()
        if parameter.is_required and name not in arguments
    ]
    if missing:
        raise ConfigurationError(
            f"{experiment.__name__} needs {', '.join(f'{name}=...' for name in missing)}"
        )


def _check_experiment(experiment: Factory, built: Any) -> None:
    """Raise a `ConfigurationError` if a function returned no `Experiment`."""
    if isinstance(built, Node):
        raise ConfigurationError(
            f"{experiment.__name__} has arguments and returned a configuration: one that returns a "
            "configuration has no arguments, because the command line sets its values by path"
        )
    if not isinstance(built, Experiment):
        raise ConfigurationError(
            f"{experiment.__name__} returned {type(built).__name__}; return "
            "fulgurite_cli.Experiment(...)"
        )
    _check_engine(built)


def _check_engine(built: Experiment) -> None:
    """Raise a `ConfigurationError` if an experiment has something else in the place of its engine,
    as after an override `engine=3`."""
    if not isinstance(built.engine, Engine):
        raise ConfigurationError(f"the engine is {built.engine!r}: give a fulgurite.Engine(...)")


def _check_known(
    experiment: Factory, saved_config: dict[str, Any], parameters: dict[str, Parameter]
) -> None:
    """Raise a `ConfigurationError` if a run was started with an argument that the function does not
    have."""
    unknown = {
        name: value
        for name, value in saved_config.items()
        if name not in parameters and not _is_hidden(value)
    }
    if unknown:
        name, value = min(unknown.items())
        raise ConfigurationError(
            f"the run was started with {name}={value!r}, and {experiment.__name__} has no "
            f"argument {name!r}: evaluate it with the program that trained it"
        )


def _finish_experiment(
    built: Experiment, experiment: Factory, engine_config: dict[str, Any]
) -> Experiment:
    """Tell the engine of an experiment which program made it, and of what.

    Args:
        built: the experiment.
        experiment: the function of the program.
        engine_config: its configuration, as manifests hold it.
    """
    built.engine.program_file = inspect.getsourcefile(experiment)
    built.engine.config = engine_config
    return built


def as_experiment(resolved: Any) -> Experiment:
    """Return the experiment of a resolved configuration: an `Experiment`, or a section with
    `engine`, `model` and perhaps `data`."""
    if isinstance(resolved, Experiment):
        return resolved
    if not hasattr(resolved, "engine") or not hasattr(resolved, "model"):
        raise ConfigurationError(
            "the configuration has no `engine` or no `model`: set cfg.engine = L(fg.Engine, ...) "
            "and cfg.model = L(...), or return L(Experiment, ...)"
        )
    built = Experiment(resolved.engine, resolved.model, getattr(resolved, "data", None))
    _check_engine(built)
    return built


def describe_values(
    experiment: Factory,
    overrides: Sequence[str],
    start_config: dict[str, Any] | None,
    start_source: str,
    allow: Sequence[str] = (),
) -> str:
    """Return a line for each value that an experiment would get, and where it comes from.

    Args:
        experiment: the function.
        overrides: strings `name=value`.
        start_config: a configuration, as manifests hold it, that the overrides change.
        start_source: what to call it.
        allow: what it may name, besides what the program's own names.

    Raises:
        ConfigurationError: as `build_experiment`; a missing argument is shown as `...`.
    """
    parameters = get_parameters(experiment)
    config = None if parameters else experiment()
    if isinstance(config, Node):
        with refer_to_options():
            names = find_allowed(config, allow)
            changed = override_config(config, overrides, start_config, names)
            return format_config(changed, start_source, names)
    changed = _parse_overrides(experiment, overrides, parameters)
    started = _read_start_config(experiment, start_config or {}, parameters)
    rows: list[tuple[str, Any, str]] = []
    for name, parameter in parameters.items():
        if name in changed:
            rows.append((name, changed[name], "command line"))
        elif name in started:
            rows.append((name, started[name], start_source))
        else:
            source = "missing" if parameter.is_required else "default"
            rows.append((name, parameter.default, source))
    return format_arguments(rows)


def _read_start_config(
    experiment: Factory, start_config: dict[str, Any], parameters: dict[str, Parameter]
) -> dict[str, Any]:
    """Return the arguments in a configuration, apart from hidden secrets."""
    arguments: dict[str, Any] = {}
    if is_configuration(start_config) and CONFIG_KEY not in parameters:
        raise ConfigurationError(
            f"the configuration is that of a program whose `experiment` returns one, and "
            f"{experiment.__name__} has arguments: use the program that it is of"
        )
    for key, value in start_config.items():
        name = normalize_path(key)
        if name not in parameters:
            raise ConfigurationError(
                f"{experiment.__name__} has no argument {name!r}, which the configuration sets. "
                f"{did_you_mean(name, parameters)}"
            )
        if not _is_hidden(value):
            arguments[name] = restore_value(name, value, parameters[name])
    return arguments


def _parse_overrides(
    experiment: Factory, overrides: Sequence[str], parameters: dict[str, Parameter]
) -> dict[str, Any]:
    arguments: dict[str, Any] = {}
    for override in overrides:
        name, equals, text = override.partition("=")
        if not equals:
            raise ConfigurationError(f"{override!r} is not an argument: write name=value")
        name = normalize_path(name)
        if name not in parameters:
            raise ConfigurationError(
                f"{experiment.__name__} has no argument {name!r}. {did_you_mean(name, parameters)}"
            )
        arguments[name] = parse_value(name, text, parameters[name].type)
    return arguments


def _check_config(experiment: Factory, config: dict[str, Any]) -> None:
    """Raise a `ConfigurationError` if the manifest cannot hold the configuration."""
    for name, value in config.items():
        try:
            dumps(value)
        except ConfigurationError as error:
            raise ConfigurationError(
                f"{experiment.__name__}({name}=...) cannot be written to the run's manifest: "
                f"{error}"
            ) from error


def _merge_saved_config(
    experiment: Factory, saved_config: dict[str, Any], arguments: dict[str, Any]
) -> dict[str, Any]:
    """Return the arguments that a run was started with, apart from hidden secrets and from those
    that the experiment does not have."""
    parameters = get_parameters(experiment)
    merged: dict[str, Any] = {}
    for name, value in saved_config.items():
        if name not in parameters or _is_hidden(value):
            continue
        if name in arguments and not is_same_value(to_plain(arguments[name]), value):
            raise ConfigurationError(
                f"{name}={arguments[name]!r} differs from what the run was started with, "
                f"{name}={value!r}: leave it out"
            )
        merged[name] = restore_value(name, value, parameters[name])
    return merged


def _is_hidden(value: Any) -> bool:
    """Return whether a manifest hides a value because it is a secret."""
    return REDACTED in json.dumps(value, default=repr)
