"""A program that trains: an experiment with typed arguments, run from the command line."""

import argparse
import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin, get_type_hints

from fulgurite.errors import ConfigurationError, did_you_mean

if TYPE_CHECKING:
    from fulgurite.engine import Engine
    from fulgurite.run import Result

EXIT_CODES = {"SIGINT": 130, "SIGTERM": 143}


@dataclass(frozen=True)
class Experiment:
    """What a program trains.

    Attributes:
        engine: the engine.
        model: as for `Engine.fit`.
        data: as for `Engine.fit`, or a function without arguments that gives it, called only where it is needed.
    """

    engine: "Engine"
    model: Any
    data: Any


def main(experiment: Callable[..., Experiment], argv: Sequence[str] | None = None) -> "Result":
    """Runs `experiment` as the command line says: `python digits.py lr=3e-4 --run runs/a`.

    The function's typed arguments are its configuration, overridden as `name=value`. Returns the result of the fit; exits
    with 130 after Ctrl-C and with 143 after SIGTERM, and with 2 on arguments that cannot be meant.
    """
    options = parser(experiment).parse_args(argv)
    try:
        made = build(experiment, options.overrides, run=options.run)
    except ConfigurationError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    data = made.data() if callable(made.data) else made.data
    result = made.engine.fit(made.model, data)
    if result.stopped in EXIT_CODES:
        print(f"stopped by {result.stopped} at step {int(result.state.step)}", file=sys.stderr)
        sys.exit(EXIT_CODES[result.stopped])
    return result


def parser(experiment: Callable[..., Experiment], program: str | None = None) -> argparse.ArgumentParser:
    """The command line of an experiment, with its arguments and their defaults as help."""
    rows = [
        f"  {name}={_shown(parameter.default)}  ({_kind(kind)})"
        for name, (parameter, kind) in arguments_of(experiment).items()
    ]
    made = argparse.ArgumentParser(
        prog=program,
        description=inspect.getdoc(experiment),
        epilog="arguments:\n" + "\n".join(rows or ["  none"]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("overrides", nargs="*", metavar="name=value", help="arguments of the experiment, listed below")
    made.add_argument("--run", metavar="DIR", help="the run's directory, where plugins write")
    return made


def build(experiment: Callable[..., Experiment], overrides: Sequence[str], run: str | None = None) -> Experiment:
    """The experiment with `name=value` overrides, and the run directory set in its engine."""
    known, given = arguments_of(experiment), {}
    for override in overrides:
        name, equals, text = override.partition("=")
        if not equals:
            raise ConfigurationError(f"{override!r} is no override: write name=value")
        if name not in known:
            raise ConfigurationError(f"{experiment.__name__} has no argument {name!r}. {did_you_mean(name, known)}")
        given[name] = parsed(name, text, known[name][1])
    missing = [name for name, (parameter, _) in known.items() if parameter.default is parameter.empty and name not in given]
    if missing:
        raise ConfigurationError(f"{experiment.__name__} needs {', '.join(f'{name}=...' for name in missing)}")
    made = experiment(**given)
    if not isinstance(made, Experiment):
        raise ConfigurationError(f"{experiment.__name__} returned {type(made).__name__}; return fg.Experiment(...)")
    if run is not None:
        made.engine.set_run(run)
    return made


def arguments_of(experiment: Callable[..., Any]) -> dict[str, tuple[inspect.Parameter, Any]]:
    """Its arguments by name, with their types (that of the default where there is no annotation)."""
    hints = get_type_hints(experiment)
    return {
        name: (parameter, hints.get(name, str if parameter.default is None else type(parameter.default)))
        for name, parameter in inspect.signature(experiment).parameters.items()
    }


def parsed(name: str, text: str, kind: Any) -> Any:
    """`text` as a value of `kind`: bool, int, float, str, a Literal, a tuple or list of these, or one of a union."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Union or type(kind).__name__ == "UnionType":
        for part in inner:
            try:
                return parsed(name, text, part)
            except ConfigurationError:
                continue
    elif kind is type(None) and text.lower() == "none":
        return None
    elif origin is Literal:
        for choice in inner:
            if text == str(choice):
                return choice
    elif origin in (tuple, list):
        part = inner[0] if inner else str
        return origin(parsed(name, item.strip(), part) for item in text.split(",") if item.strip())
    elif kind is bool and text.lower() in ("true", "false"):
        return text.lower() == "true"
    elif kind is str:
        return text
    elif kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    raise ConfigurationError(f"{name}={text!r} is not {_kind(kind)}")


def _kind(kind: Any) -> str:
    return getattr(kind, "__name__", None) if isinstance(kind, type) else str(kind).replace("typing.", "")  # type: ignore[return-value]


def _shown(default: Any) -> str:
    return "..." if default is inspect.Parameter.empty else str(default)
