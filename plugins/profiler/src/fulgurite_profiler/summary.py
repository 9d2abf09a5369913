"""Add up the operations of a trace."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fulgurite.errors import ConfigurationError

from fulgurite_profiler.hlo import CONTROL_FLOW, HLOProgram, parse_layer_path, parse_program
from fulgurite_profiler.kernels import DeviceEvent, make_event, split_graphs
from fulgurite_profiler.window import (
    PROGRAMS,
    STEP,
    list_profiles,
    list_recordings,
    parse_window,
)


@dataclass
class Operation:
    """What an operation of a program took in a trace, in all.

    Example:
        from fulgurite_profiler import Profile, summarize_profile

        engine = fg.Engine(steps=20, run_dir="runs/a", plugins=[Profile(at=10, steps=5)])
        engine.fit(model, data)
        for operation in summarize_profile("runs/a/profiles/steps-11-15").operations[:3]:
            print(operation.name, operation.layer, operation.seconds)

    Attributes:
        name: of the operation, as XLA calls it.
        module: of which it is.
        layer: where in the model it is, `-` if XLA does not know.
        calls: how often it ran.
        seconds: that it took.
        flops: of products of matrices and convolutions; 0 for others.
    """

    name: str
    module: str
    layer: str
    calls: int = 0
    seconds: float = 0.0
    flops: float = 0.0


@dataclass(frozen=True)
class ProfileSummary:
    """What a trace says.

    Example:
        from fulgurite_profiler import Profile, summarize_profile

        engine = fg.Engine(steps=20, run_dir="runs/a", plugins=[Profile(at=10, steps=5)])
        engine.fit(model, data)
        summary = summarize_profile("runs/a/profiles/steps-11-15")
        print(summary.steps, summary.operations[0].name)

    Attributes:
        steps: the seconds of each step that is annotated, by its number: from one dispatch to the
            next.
        operations: in the order of their time, the longest first.
        devices: the names of what they ran on.
    """

    steps: dict[int, float]
    operations: list[Operation]
    devices: list[str]

    @property
    def seconds(self) -> float:
        """Of all operations, on all devices and threads."""
        return sum(operation.seconds for operation in self.operations)

    def add_up_layers(self) -> list[Operation]:
        """Return an operation for each layer, with the sums of its own, the longest first."""
        layers: dict[str, Operation] = {}
        for operation in self.operations:
            layer = layers.setdefault(operation.layer, Operation("", "", operation.layer))
            layer.calls += operation.calls
            layer.seconds += operation.seconds
            layer.flops += operation.flops
        return _sort_by_time(layers.values())


def find_trace(path: Path, window: str | None = None) -> Path:
    """Return the folder of a trace.

    Args:
        path: of a run, of which the newest trace is taken, or of a trace.
        window: the trace of a run to take, such as `steps-11-15`.

    Raises:
        ConfigurationError: there is none.
    """
    if list_recordings(path):
        return path
    profiles = list_profiles(path) if path.is_dir() else []
    names = [profile.name for profile in profiles]
    if window is not None and window not in names:
        raise ConfigurationError(
            f"{path} has no profile {window!r}; there are {', '.join(names) or 'none'}"
        )
    if not profiles:
        raise ConfigurationError(
            f"there is no profile in {path}: give the directory of a run that was trained with the "
            "plugin 'profile', or of a trace of jax.profiler"
        )
    return profiles[-1] if window is None else profiles[names.index(window)]


def summarize_profile(trace: str | Path) -> ProfileSummary:
    """Return what a trace says.

    Args:
        trace: the folder that `Profile` has written, or one of `jax.profiler`. Of several
            recordings in it the newest counts.

    Raises:
        ConfigurationError: there is no trace, or it cannot be read.
    """
    folder = Path(trace)
    files = list_recordings(folder)
    if not files:
        raise ConfigurationError(
            f"{folder} holds no trace: give a folder that jax.profiler has written"
        )
    programs = _read_programs(folder / PROGRAMS)
    steps: dict[int, float] = {}
    by_plane: dict[str, list[DeviceEvent]] = {}
    for plane in _read_planes(files[-1]):
        events = []
        for event in _iter_events(plane):
            stats = dict(event.stats)
            if "step_num" in stats and event.name == STEP:
                steps[int(stats["step_num"])] = event.duration_ns * 1e-9
            if "hlo_op" in stats:
                events.append(make_event(event, stats))
        if events:
            by_plane[plane.name] = events
    # What the host does for a device is not the time of an operation.
    devices = [name for name in by_plane if name.startswith("/device:")] or list(by_plane)
    operations: dict[tuple[str, str], Operation] = {}
    for name in devices:
        for event in split_graphs(by_plane[name], programs):
            _add(operations, programs, event)
    window = parse_window(folder.name)
    if window is not None:
        # Where a fit ended within its window, the last annotation is that of a step never taken.
        steps = {step: steps[step] for step in steps if step <= window[1]}
    return ProfileSummary(dict(sorted(steps.items())), _sort_by_time(operations.values()), devices)


def _add(
    operations: dict[tuple[str, str], Operation],
    programs: dict[str, list[HLOProgram]],
    event: DeviceEvent,
) -> None:
    """Add an event of the trace to its operation, unless it contains others.

    Args:
        operations: by module and name.
        programs: that ran, by module.
        event: of the trace.
    """
    module, name = event.module, event.operation
    program = _find_program(programs.get(module, ()), name)
    instruction = None if program is None else program.instructions[name]
    opcode = name.partition(".")[0] if instruction is None else instruction.opcode
    if opcode in CONTROL_FLOW:
        return
    operation = operations.get((module, name))
    if operation is None:
        op_name = event.scopes if instruction is None else instruction.op_name
        operation = Operation(name, module, str(parse_layer_path(op_name)))
        operations[module, name] = operation
    operation.calls += 1
    operation.seconds += event.seconds
    operation.flops += 0.0 if program is None else program.count_flops(name)


def _find_program(programs: Sequence[HLOProgram], name: str) -> HLOProgram | None:
    """Return the newest program that has an instruction of this name, or None."""
    for program in reversed(programs):
        if name in program.instructions:
            return program
    return None


def _read_programs(folder: Path) -> dict[str, list[HLOProgram]]:
    """Return the programs beside a trace, by module."""
    programs = defaultdict(list)
    for path in sorted(folder.glob("*.hlo.txt")):
        program = parse_program(path.read_text())
        programs[program.name].append(program)
    return programs


def _read_planes(path: Path) -> list[Any]:
    """Return the planes of a recording: the host, and each device."""
    import jax

    try:
        return list(jax.profiler.ProfileData.from_file(str(path)).planes)
    except Exception as error:  # the reader does not say which
        raise ConfigurationError(f"{path} cannot be read as a trace: {error}") from error


def _iter_events(plane: Any) -> Iterator[Any]:
    for line in plane.lines:
        yield from line.events


def _sort_by_time(operations: Iterable[Operation]) -> list[Operation]:
    return sorted(operations, key=lambda operation: -operation.seconds)
