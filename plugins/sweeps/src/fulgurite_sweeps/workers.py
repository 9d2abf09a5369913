"""Where trials run, by its name on the command line: `local:2`, `ray(gpus=1)`, `slurm:PROFILE`."""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from fulgurite.errors import ConfigurationError, did_you_mean

from fulgurite_sweeps.calls import Call, parse_call
from fulgurite_sweeps.executors import Executor, LocalExecutor

_WORKERS = re.compile(r"([a-z]+)(?::([^()]+))?(?:\((.*)\))?")
_NUMBER = re.compile(r"[0-9]{1,6}(\.[0-9]{1,6})?")


class Workers(NamedTuple):
    """Where trials run, as the command line names it: `NAME:WHERE(key=value)`.

    Attributes:
        name: `local`, `ray`, ...
        where: a number of processes, an address or a name; None without one.
        call: the arguments.
    """

    name: str
    where: str | None
    call: Call


def parse_executor(text: str) -> Executor:
    """Return the executor that the command line names.

    Args:
        text: `local`, `local:N`, `ray`, `ray:ADDRESS` or `population:N`, the last two perhaps with
            arguments: `ray(gpus=1)`.

    Raises:
        ConfigurationError: there is none of this name, or it has no such argument.
    """
    workers = parse_workers(text)
    if workers.name == "slurm":
        raise ConfigurationError(
            f"{text} submits jobs that choose their trials, and no trial of an agent: give local, "
            "ray or population"
        )
    if workers.name == "local":
        _check_names(workers.call, ())
        return LocalExecutor(_parse_count(workers.where or "1", text))
    if workers.name == "ray":
        from fulgurite_sweeps.ray_executor import RayExecutor

        numbers: Any = read_numbers(workers.call, ("cpus", "gpus", "slots"))
        return RayExecutor(workers.where, **numbers)
    if workers.name == "population":
        from fulgurite_sweeps.population_executor import PopulationExecutor

        _check_names(workers.call, ("exact",))
        is_exact = workers.call.keywords.get("exact", "false").lower()
        if is_exact not in ("true", "false"):
            raise ConfigurationError(f"{text}: exact is {is_exact}: give true or false")
        return PopulationExecutor(
            _parse_count(workers.where or "4", text), exact=is_exact == "true"
        )
    raise _make_workers_error(text)


def parse_workers(text: str) -> Workers:
    """Return what a string says about where trials run.

    Args:
        text: such as `ray:10.0.0.1:6379(gpus=1)`.

    Raises:
        ConfigurationError: it has another form.
    """
    match = _WORKERS.fullmatch(text)
    call = parse_call(f"{match[1]}({match[3] or ''})") if match is not None else None
    if match is None or call is None or call.arguments:
        raise _make_workers_error(text)
    return Workers(match[1], match[2], call)


def read_numbers(call: Call, known: Sequence[str]) -> dict[str, float]:
    """Return the arguments of workers, which are numbers.

    Args:
        call: the workers.
        known: the names of the arguments that they have.

    Raises:
        ConfigurationError: there is no such argument, or a value is not a number above or at 0.
    """
    _check_names(call, known)
    numbers = {}
    for name, value in call.keywords.items():
        if not _NUMBER.fullmatch(value):
            raise ConfigurationError(f"{call.name}: {name}={value} is not a number: give 1, or 0.5")
        numbers[name] = float(value) if "." in value else int(value)
    return numbers


def _check_names(call: Call, known: Sequence[str]) -> None:
    """Raise an error if workers have an argument that there is not.

    Args:
        call: the workers.
        known: the names of the arguments that they have.
    """
    for name in call.keywords:
        if name not in known:
            raise ConfigurationError(
                f"{call.name} has no argument {name!r}. {did_you_mean(name, known)}"
            )


def _parse_count(text: str, workers: str) -> int:
    """Return a number of trials at a time.

    Args:
        text: what stands behind the colon.
        workers: all that was written, for the error.
    """
    if not text.isdecimal() or len(text) > 4:
        raise _make_workers_error(workers)
    return int(text)


def _make_workers_error(text: str) -> ConfigurationError:
    return ConfigurationError(
        f"there are no workers {text!r}: give local:N or population:N, with N at a time, ray, "
        "ray:ADDRESS, slurm or slurm:PROFILE"
    )
