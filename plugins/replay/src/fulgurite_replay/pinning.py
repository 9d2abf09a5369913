"""Which executables a run has trained with, so that a run that resumes notices if they are others.

XLA chooses kernels and fusions when it compiles. On GPUs it measures some of them (autotuning), so
that another process may choose others, and a run that resumes then has other bits. JAX can write
executables, and reads them without checking what they do, so that a run directory must not hold
them: what is kept here is a hash of each.
"""

import dataclasses
import hashlib
import re
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import fulgurite as fg
import jax
from fulgurite.errors import CheckpointError, ConfigurationError, check_one_of
from fulgurite.plugins import format_tree, hide_constructor_frames
from fulgurite_runs import RunPlugin

from fulgurite_replay.lines import append_line, iter_entries, make_line_error

PROGRAMS_FILE = "programs.jsonl"
"""Where a run keeps the hashes: a line of JSON for each executable of each attempt."""
_TEXT = r'"(?:[^"\\]|\\.)*"'
_INNER = rf"\{{(?:[^{{}}\"]|{_TEXT}|\{{[^{{}}]*\}})*\}}"
# Where in the code an operation comes from, and how arguments were placed: neither changes a
# number, and what several devices do is in the operations. Newer versions of XLA list files and
# lines before these.
_IRRELEVANT = re.compile(
    rf", (?:metadata|origin|sharding|frontend_attributes)=\{{(?:[^{{}}\"]|{_TEXT}|{_INNER})*\}}"
    r"|^HloModule .*\n|^(?:FileNames|FunctionNames|FileLocations|StackFrames)\n(?:\d+ .*\n)*",
    re.MULTILINE,
)
_SHARDING = r"sdy\.sharding = #sdy\.sharding<@empty_mesh, \[[^\]]*\]>"
_SOURCE_SHARDING = re.compile(rf" \{{{_SHARDING}\}}|{_SHARDING}(?:, )?")

_FUNCTION = re.compile(r"^  func\.func ", re.MULTILINE)
_SYMBOL = re.compile(r"@([\w.$-]+|\"[^\"]*\")")


@dataclass(frozen=True)
class PinnedProgram:
    """An executable of a run.

    Example:
        from fulgurite_replay import PinnedProgram

        print(PinnedProgram("step", "f32[8]", "0a" * 32, "1b" * 32, "jax 0.10, cpu", attempt=1))

    Attributes:
        name: `step`, or `evaluate.NAME`.
        batch: the shapes that it was compiled for.
        source: the SHA-256 of what XLA began with, in hexadecimal.
        executable: that of what XLA made of it: operations, fusions, layouts and, on GPUs, the
            kernels that autotuning has chosen.
        platform: versions of jax and jaxlib, and the kind of device.
        attempt: the start of the run that compiled it.
    """

    name: str
    batch: str
    source: str
    executable: str
    platform: str
    attempt: int


@hide_constructor_frames
@dataclass(frozen=True, eq=False)
class PinPrograms(RunPlugin):
    """Notes a hash of each executable in the run's `programs.jsonl`, and ends or warns a run that
    resumes with another one: its numbers may differ in their last bits from here on.

    A program that no attempt has compiled, such as after a change of the code, is noted and not
    compared: what has changed of code and settings, a resumed run says anyway.

    It keeps no executables: `Engine(compilation_cache_dir=...)` has JAX keep them, in a directory
    that only those may write to whose code you would run.

    Example:
        from fulgurite_replay import PinPrograms

        engine = fg.Engine(steps=100, run_dir="runs/a", plugins=[PinPrograms()])

    Args:
        on_change: what happens when the same program is compiled to another executable than before:
            `error` ends the run before a step with it, `warn` says so and continues.

    Raises:
        CheckpointError: in a fit, if `on_change` is `error`.
    """

    plugin_name = "pin_programs"

    on_change: Literal["error", "warn"] = "error"

    def __post_init__(self) -> None:
        check_one_of(self.on_change, ("error", "warn"), "PinPrograms: on_change")

    @fg.hookimpl
    def on_fit_start(self, run: fg.Run) -> None:
        """Refuse a run without a directory."""
        if run.run_dir is None and run.engine.fast_dev_run is None:
            raise ConfigurationError(
                "PinPrograms has no place to write to: give Engine(run_dir=...), or --run"
            )

    @fg.hookimpl
    def on_compile(
        self,
        run: fg.Run | None,
        name: str,
        batch_spec: Any,
        compiled: jax.stages.Compiled,
        lowered: jax.stages.Lowered,
    ) -> None:
        """Compare an executable with those of earlier attempts, and note it."""
        if run is None or run.run_dir is None:
            return
        executable = hash_executable(compiled)
        if executable is None:
            run.notify(
                self.registered_name,
                f"{name} is not pinned: this device does not tell what it runs",
            )
            return
        program = PinnedProgram(
            name,
            format_tree(batch_spec),
            hash_source(lowered),
            executable,
            _describe_platform(),
            run.attempt,
        )
        text = run.engine.sharding.sync.broadcast(lambda: self._note(run.run_dir.path, program))
        if text is None:
            return
        if self.on_change == "error":
            raise CheckpointError(f"{text} To continue with it, PinPrograms(on_change='warn')")
        run.notify(self.registered_name, text)

    def _note(self, run: Path, program: PinnedProgram) -> str | None:
        """Note an executable unless it ends the run; return how it differs from that of the newest
        attempt that compiled the same program, None if it does not.

        Args:
            run: the directory of the run.
            program: the executable.
        """
        earlier = [
            other
            for other in read_programs(run)
            if (other.name, other.batch, other.source)
            == (program.name, program.batch, program.source)
        ]
        if earlier and earlier[-1].executable == program.executable:
            return None
        if not earlier or self.on_change == "warn":
            append_line(run / PROGRAMS_FILE, dataclasses.asdict(program))
        return _describe_change(earlier[-1], program) if earlier else None


def hash_executable(compiled: jax.stages.Compiled) -> str | None:
    """Return the SHA-256 of what an executable does, in hexadecimal, without where in the code it
    comes from; None where the device does not tell.

    Args:
        compiled: the executable.
    """
    text = compiled.as_text()
    if text is None:
        return None
    return hashlib.sha256(_IRRELEVANT.sub("", text).encode()).hexdigest()


def hash_source(lowered: jax.stages.Lowered) -> str:
    """Return the SHA-256 of what XLA begins with, in hexadecimal, without whether an argument was
    placed before and without the names of functions.

    JAX numbers functions of the same name, and has one function for several calls only while it
    remembers the trace of the first: both depend on what the process has traced before.

    Args:
        lowered: the program.
    """
    text = _SOURCE_SHARDING.sub("", lowered.as_text()).rstrip().removesuffix("}")
    module, *functions = _FUNCTION.split(text)
    bodies = {_SYMBOL.findall(function)[0]: function.rstrip() for function in functions}
    hashes: dict[str, str] = {}

    def hash_function(name: str) -> str:
        if name not in hashes:
            head, tail = bodies[name].split(f"@{name}", 1)
            body = _SYMBOL.sub(lambda match: name_call(match[1]), head + tail)
            hashes[name] = hashlib.sha256(body.encode()).hexdigest()
        return hashes[name]

    def name_call(name: str) -> str:
        return hash_function(name) if name in bodies else name

    return hashlib.sha256((module + hash_function("main")).encode()).hexdigest()


def read_programs(run: Path) -> list[PinnedProgram]:
    """Return the executables of a run, oldest first.

    Args:
        run: its directory.

    Raises:
        CheckpointError: the file is not one of `PinPrograms`.
    """
    path = run / PROGRAMS_FILE
    programs = []
    for entry in iter_entries(path, "PinPrograms"):
        number = entry.pop("line")
        try:
            program = PinnedProgram(**entry)
            texts = (
                program.name,
                program.batch,
                program.source,
                program.executable,
                program.platform,
            )
            if not all(isinstance(text, str) for text in texts) or type(program.attempt) is not int:
                raise ValueError("a value has another type")
        except (TypeError, ValueError) as error:
            raise make_line_error(path, number, "PinPrograms", error) from error
        programs.append(program)
    return programs


def _describe_change(earlier: PinnedProgram, program: PinnedProgram) -> str:
    """Return how an executable is another one than that of an earlier attempt."""
    if earlier.platform != program.platform:
        why = f"it was compiled by {earlier.platform}, and now by {program.platform}"
    else:
        why = (
            "XLA has other flags, sees another machine, or autotuning has chosen other kernels "
            "(docs/resume.md says how to keep its choice)"
        )
    return (
        f"{program.name} for batches {program.batch} was compiled to another executable than in "
        f"attempt {earlier.attempt}: {why}. "
        "The last bits of numbers may differ from here on."
    )


def _describe_platform() -> str:
    kind = jax.devices()[0].device_kind
    return f"jax {jax.__version__}, jaxlib {version('jaxlib')}, {kind}"
