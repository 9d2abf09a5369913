"""A program that trains: an experiment with typed arguments, run from the command line."""

import argparse
import inspect
import json
import os
import signal
import sys
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin, get_type_hints

from fulgurite.errors import ConfigurationError, PluginError, ProcessError, did_you_mean
from fulgurite.masking import MASK
from fulgurite.processes import connect

if TYPE_CHECKING:
    from fulgurite.engine import Engine
    from fulgurite.fit.run import FitResult

EXIT_CODES = {"SIGINT": 130, "SIGTERM": 143}


@dataclass(frozen=True)
class Experiment:
    """What a program trains: an engine, and model and data as for `Engine.fit`. `data` may also be
    a function without arguments that returns the data; it is called only where the data is
    needed."""

    engine: "Engine"
    model: Any
    data: Any


Factory = Callable[..., Experiment]
"""A function whose typed arguments are the configuration of the experiment that it returns."""


def main(
    experiment: Factory, argv: Sequence[str] | None = None, program: str | None = None
) -> "FitResult":
    """Runs `experiment` as the command line says: `python digits.py lr=3e-4 --run runs/a`.

    The function's arguments are overridden as `name=value`. Returns the result of the fit; exits
    with 130 after Ctrl-C, with 143 (or `--preempted-exit-code`) after SIGTERM, and with 2 on
    invalid arguments. After a first signal the step is finished and saved; a second one ends the
    process at once.
    """
    rows = [
        f"  {name}={'...' if one.default is one.empty else _to_plain(one.default)}  ({_kind(kind)})"
        for name, (one, kind) in get_parameters(experiment).items()
    ]
    parser = argparse.ArgumentParser(
        prog=program,
        description=inspect.getdoc(experiment),
        epilog="\n".join(["arguments:", *rows] if rows else []),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="name=value",
        help="arguments of the experiment, listed below",
    )
    parser.add_argument("--run", metavar="DIR", help="the run's directory, where plugins write")
    parser.add_argument(
        "--preempted-exit-code",
        type=_exit_code,
        default=EXIT_CODES["SIGTERM"],
        metavar="N",
        help="the exit code after SIGTERM, for schedulers that restart a job by its exit code (default: %(default)s)",
    )
    options = parser.parse_intermixed_args(argv)
    try:
        connect()
        made = build(experiment, options.overrides, run=options.run)
        if options.run is not None:
            made.engine.set_run(options.run)
    except (ConfigurationError, PluginError, ProcessError) as error:
        parser.exit(2, f"error: {error}\n")
    engine, data = made.engine, made.data() if callable(made.data) else made.data
    resumes = (
        engine.run_dir is not None
        and engine.plugins.get_single_impl("restore_checkpoint") is not None
    )
    with _exit_on_second_interrupt():
        result = engine.fit(made.model, data, resume="auto" if resumes else None)
    codes = EXIT_CODES | {"SIGTERM": options.preempted_exit_code}
    if result.stop_reason in codes:
        with suppress(OSError):  # what read it, such as `tee`, was ended by the same Ctrl-C
            print(
                f"stopped by {result.stop_reason} at step {int(result.state.step)}", file=sys.stderr
            )
        sys.exit(codes[result.stop_reason])
    return result


def build(
    experiment: Factory,
    overrides: Sequence[str],
    kept: dict[str, Any] | None = None,
    *,
    run: str | None = None,
) -> Experiment:
    """The experiment with `name=value` overrides. `kept` is the configuration of a run's manifest,
    which holds: an override that says otherwise is an error, unless the manifest does not tell,
    because it is a secret. `run`, the run's directory, is handed to an experiment that has an
    argument `run`, so that it can leave out what needs one; it is no part of the configuration."""
    known = get_parameters(experiment)
    given: dict[str, Any] = {"run": run} if "run" in known and run is not None else {}
    for override in overrides:
        name, equals, text = override.partition("=")
        if not equals:
            raise ConfigurationError(f"{override!r} is not an argument: write name=value")
        if name not in known:
            raise ConfigurationError(
                f"{experiment.__name__} has no argument {name!r}. {did_you_mean(name, known)}"
            )
        given[name] = parse_value(name, text, known[name][1])
    if kept is not None:
        given |= _merge_saved_config(experiment, kept, given)
    if missing := [
        name for name, (one, _) in known.items() if one.default is one.empty and name not in given
    ]:
        raise ConfigurationError(
            f"{experiment.__name__} needs {', '.join(f'{name}=...' for name in missing)}"
        )
    made = experiment(**given)
    from fulgurite.encoding import dumps  # with jax, as what was just made

    if not isinstance(made, Experiment):
        raise ConfigurationError(
            f"{experiment.__name__} returned {type(made).__name__}; return fg.Experiment(...)"
        )
    configuration = {name: one.default for name, (one, _) in known.items()} | given
    made.engine.config = {
        name: _to_plain(value) for name, value in configuration.items() if name != "run"
    }
    for name, value in made.engine.config.items() if run or made.engine.run_dir else ():
        try:
            dumps(value)
        except ConfigurationError as error:
            raise ConfigurationError(
                f"{experiment.__name__}({name}=...) is for no manifest: {error}"
            ) from error
    return made


def _merge_saved_config(
    experiment: Callable[..., Any], kept: dict[str, Any], given: dict[str, Any]
) -> dict[str, Any]:
    """The arguments that a run was made with."""
    known, told = get_parameters(experiment), dict[str, Any]()
    for name, value in kept.items():
        if MASK in json.dumps(value):
            continue
        if name not in known:
            gap = f"the run was made with {name}={value!r}, and {experiment.__name__} has no argument {name!r}"
            raise ConfigurationError(f"{gap}: evaluate it with the program that trained it")
        if name in given and json.loads(json.dumps(_to_plain(given[name]))) != value:
            made = f"what the run was made with, {name}={value!r}"
            raise ConfigurationError(f"{name}={given[name]!r} is not {made}: leave it out")
        kind = known[name][1]
        named = any(
            isinstance(one, type) and issubclass(one, Enum | PurePath)
            for one in get_args(kind) or (kind,)
        )
        if isinstance(value, list) and "tuple" in str(kind):
            told[name] = tuple(value)
        else:
            told[name] = (
                parse_value(name, value, kind) if named and isinstance(value, str) else value
            )
    return told


def _to_plain(value: Any) -> Any:
    """An argument as manifests hold it and the command line gives it."""
    return (
        value.name
        if isinstance(value, Enum)
        else str(value)
        if isinstance(value, PurePath)
        else value
    )


def get_parameters(experiment: Callable[..., Any]) -> dict[str, tuple[inspect.Parameter, Any]]:
    """Its parameters by name, with their types: that of the default where there is no
    annotation."""
    hints = get_type_hints(experiment)
    return {
        name: (one, hints.get(name, str if one.default in (None, one.empty) else type(one.default)))
        for name, one in inspect.signature(experiment).parameters.items()
    }


def parse_value(name: str, text: str, kind: Any) -> Any:
    """`text` as a value of `kind`: bool, int, float, str, None, a Literal, a path, a member of an
    Enum by its name, a tuple or list of these, or a union."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        for part in sorted(inner, key=lambda part: part is not type(None)):
            try:
                return parse_value(name, text, part)
            except ConfigurationError:
                continue
    elif kind is type(None) and text.lower() == "none":
        return None
    elif origin is Literal and text in map(str, inner):
        return next(choice for choice in inner if text == str(choice))
    elif origin in (tuple, list) or kind in (tuple, list):
        items = [item.strip() for item in text.strip("()[] ").split(",") if item.strip()]
        several = origin is not tuple or inner[1:] == (...,)
        kinds = (inner[0] if inner else str,) * len(items) if several else inner
        if len(kinds) == len(items):
            values = [
                parse_value(name, item, part) for item, part in zip(items, kinds, strict=True)
            ]
            return tuple(values) if tuple in (origin, kind) else values
    elif kind is bool and text.lower() in ("true", "false"):
        return text.lower() == "true"
    elif kind is str or (isinstance(kind, type) and issubclass(kind, PurePath)):
        return kind(text)
    elif isinstance(kind, type) and issubclass(kind, Enum) and text in kind.__members__:
        return kind[text]
    elif kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass  # the error below says more
    raise ConfigurationError(f"{name}={text!r} is not {_kind(kind)}")


@contextmanager
def _exit_on_second_interrupt() -> Iterator[None]:
    """Within it a second Ctrl-C ends the process, whatever is waited for. A display may have hidden
    the cursor."""

    def end(*_: Any) -> None:
        os.write(2, b"\x1b[?25h" * os.isatty(2) + b"stopped at once by SIGINT\n")
        os._exit(EXIT_CODES["SIGINT"])

    inside = threading.current_thread() is threading.main_thread()
    former = signal.signal(signal.SIGINT, end) if inside else None
    try:
        yield
    finally:
        if inside:
            signal.signal(signal.SIGINT, former)


def _exit_code(text: str) -> int:
    code = parse_value("--preempted-exit-code", text, int)
    if not 0 < code < 256:
        raise argparse.ArgumentTypeError(f"{code} is no exit code: they go from 1 to 255")
    return code


def _kind(kind: Any) -> str:
    if isinstance(kind, type) and issubclass(kind, Enum):
        return " | ".join(kind.__members__)
    return (
        kind.__name__
        if isinstance(kind, type) and not get_args(kind)
        else str(kind).replace("typing.", "")
    )
