"""Trace windows of steps by JAX's profiler."""

import re
import shutil
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fulgurite as fg
import jax
from fulgurite import StepRange
from fulgurite.errors import ConfigurationError, check_positive_int, set_ints
from fulgurite.plugins import hide_constructor_frames
from fulgurite_runs import RunPlugin, get_folder

FOLDER = "profiles"
PROGRAMS = "programs"
STEP = "train"
"""What the annotation of a step is called."""
_WINDOW = re.compile(r"steps-([1-9][0-9]{0,11})-([0-9]{1,12})")
_MAX_PROGRAMS = 16


@dataclass(frozen=True)
class WindowSteps(fg.Trigger):
    """The step with which a window begins, and each step in it, for every window.

    Attributes:
        at: the number of updates before the first window.
        steps: the length of a window.
        every: the steps from one window to the next; None for a single one.
    """

    at: int
    steps: int
    every: int | None

    def find_window(self, step: int) -> int | None:
        """Return the number of updates before the window in or at the begin of which a step is;
        None outside of windows."""
        begin = self.at
        if self.every is not None and step > begin:
            begin += (step - begin) // self.every * self.every
        return begin if begin <= step <= begin + self.steps else None

    def _next_after(self, after: int, step_range: StepRange) -> int | None:
        step = max(after + 1, self.at)
        if self.find_window(step) is not None:
            return step
        if self.every is None:
            return None
        return self.at + -(-(step - self.at) // self.every) * self.every


@hide_constructor_frames
@dataclass(eq=False)
class Profile(RunPlugin):
    """Trace the operations of a few steps by `jax.profiler`, into `profiles/steps-A-B` of the run
    directory; `fulgurite profile RUN` shows which of them took the time.

    A trace begins and ends between two steps, when the device has nothing left to do: of the steps
    in it, each is an annotation `train` with its number. Steps of a window are dispatched one by
    one. A fit that resumes within a window does not trace it. A trace ends where the fit does,
    also by a signal or an exception; its name says which steps are in it. Where another profiler
    is running, nothing is traced, and a message says so. Of several processes the first traces
    itself.

    Beside the trace are the programs that ran, as XLA has optimized them: they tell which part of
    the model an operation is of.

    Example:
        from fulgurite_profiler import Profile

        engine = fg.Engine(steps=100, run_dir="runs/a", plugins=[Profile(at=20, steps=5)])

    Attributes:
        at: the number of updates before the first window: with 20, its first step is the 21st.
            Choose one after everything is compiled.
        steps: in a window.
        every: steps from the begin of one window to that of the next; None for a single window.
        keep: how many traces of a run stay; the oldest are removed.
        python: whether to trace calls of Python functions too, which takes time itself.
        instance: tells several of one engine apart.
    """

    plugin_name = "profile"

    at: int = 10
    steps: int = 5
    every: int | None = None
    keep: int = 3
    python: bool = False
    instance: str | None = None
    _active = fg.PerFit["_Trace | None"](lambda: None)
    # All that this instance was told of: another fit of a program compiles nothing.
    _programs: deque[tuple[str, jax.stages.Compiled]] = field(
        default_factory=lambda: deque(maxlen=_MAX_PROGRAMS), init=False, repr=False
    )

    def __post_init__(self) -> None:
        set_ints(self, "at", "steps", "keep")
        for name in ("steps", "keep"):
            check_positive_int(getattr(self, name), f"Profile: {name}")
        if not isinstance(self.at, int) or self.at < 0:
            raise ConfigurationError(f"Profile: at is {self.at!r}; give a step, from 0")
        if self.every is not None:
            set_ints(self, "every")
            check_positive_int(self.every, "Profile: every")
            if self.every <= self.steps:
                raise ConfigurationError(
                    f"Profile: a window of {self.steps} steps does not fit into every={self.every} "
                    "steps; give a larger every, or fewer steps"
                )

    @property
    def _trigger(self) -> WindowSteps:
        return WindowSteps(self.at, self.steps, self.every)

    @fg.hookimpl
    def register_actions(self) -> list[fg.ScheduledAction]:
        """Be called at the begin of each window, and after each step of it: there before anything
        else is done, and at the begin after evaluations and logging."""
        # Other triggers do not fire before the first step of a fit.
        begin = fg.AtStart() | self._trigger
        return [
            fg.ScheduledAction("step", self._trigger, self.end_step, stage="evaluate"),
            fg.ScheduledAction("begin", begin, self.begin, stage="act"),
        ]

    @fg.hookimpl
    def on_compile(self, name: str, compiled: jax.stages.Compiled) -> None:
        """Remember the programs."""
        self._programs.append((name, compiled))

    @fg.hookimpl
    def on_fit_start(self, run: fg.Run) -> None:
        """Refuse a run without a directory."""
        if run.run_dir is None and run.engine.fast_dev_run is None:
            raise ConfigurationError(
                "Profile writes into the run's directory, and this run has none: give "
                "Engine(run_dir='runs/a') or --run runs/a, or leave it out"
            )

    @fg.hookimpl
    def on_exception(self, run: fg.Run) -> None:
        """End a trace."""
        self._end(run)

    @fg.hookimpl
    def on_fit_end(self, run: fg.Run) -> None:
        """End a trace."""
        self._end(run)

    def begin(self, run: fg.Run) -> None:
        """Begin to trace, at the begin of a window."""
        is_begin = self._trigger.find_window(run.step) == run.step
        if not is_begin or run.run_dir is None or jax.process_index() > 0:
            return
        if run.step == run.step_range.stop:
            return  # no step follows
        first, last = run.step + 1, run.step + self.steps
        folder = get_folder(run.run_dir.path, FOLDER) / _get_name(first, last)
        _wait_for_device(run)
        run.run_dir.assert_locked()
        try:
            jax.profiler.start_trace(folder, profiler_options=self._make_options())
        except RuntimeError as error:
            run.notify(self.registered_name, f"no profile of the steps {first} to {last}: {error}")
            return
        if folder.exists():
            shutil.rmtree(folder)  # of an earlier attempt; a trace is written at its end
        self._active = _Trace(folder, first, last)
        self._active.begin_step(first)

    def end_step(self, run: fg.Run) -> None:
        """End the annotation of a step, and the trace after the last one."""
        trace = self._active
        if trace is None:
            return
        if run.step == trace.last:
            _wait_for_device(run)
            self._end(run)
        else:
            trace.begin_step(run.step + 1)

    def _make_options(self) -> jax.profiler.ProfileOptions:
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = int(self.python)
        return options

    def _end(self, run: fg.Run) -> None:
        """End the trace that is being made, if any, and write it."""
        trace = self._active
        if trace is None:
            return
        self._active = None
        trace.end_step()
        try:
            jax.profiler.stop_trace()
        except RuntimeError as error:
            run.notify(self.registered_name, f"the profile in {trace.folder} is lost: {error}")
            return
        folder = trace.folder
        if run.step < trace.first:
            shutil.rmtree(folder)  # the fit ends where the window began
            return
        if run.step < trace.last:  # the fit ends here
            folder = folder.with_name(_get_name(trace.first, run.step))
            if folder.exists():
                shutil.rmtree(folder)  # of an earlier attempt that ended at the same step
            trace.folder.replace(folder)
        _write_programs(folder / PROGRAMS, list(self._programs))
        for folder in list_profiles(run.run_dir.path)[: -self.keep]:
            shutil.rmtree(folder)


class _Trace:
    """A trace that is being made.

    Attributes:
        folder: where it is written to.
        first: the first step in it.
        last: the last step in it.
    """

    def __init__(self, folder: Path, first: int, last: int) -> None:
        self.folder = folder
        self.first = first
        self.last = last
        self._annotation: Any = None

    def begin_step(self, step: int) -> None:
        """Begin the annotation of a step; the one before ends."""
        self.end_step()
        self._annotation = jax.profiler.StepTraceAnnotation(STEP, step_num=step)
        self._annotation.__enter__()

    def end_step(self) -> None:
        """End the annotation of the newest step."""
        if self._annotation is not None:
            self._annotation.__exit__(None, None, None)
            self._annotation = None


def _wait_for_device(run: fg.Run) -> None:
    """Wait until the newest step is computed, which counts as training."""
    with run.timings.time("wait"):
        jax.block_until_ready(jax.tree.leaves(run.state))


def _get_name(first: int, last: int) -> str:
    """Return what the trace of some steps is called."""
    return f"steps-{first}-{last}"


def parse_window(name: str) -> tuple[int, int] | None:
    """Return the first and the last step of a trace, from its name; None for another name."""
    match = _WINDOW.fullmatch(name)
    return None if match is None else (int(match[1]), int(match[2]))


def list_profiles(run: Path) -> list[Path]:
    """Return the folders of the traces of a run, the oldest first.

    Those of later steps may be older: of an attempt before one that began again from step 0.

    Args:
        run: the run directory.
    """
    folder = get_folder(run, FOLDER)
    if not folder.is_dir():
        return []
    windows = {
        path: window
        for path in folder.iterdir()
        if not path.is_symlink() and (window := parse_window(path.name)) is not None
    }
    return sorted(windows, key=lambda path: (_find_time(path), windows[path]))


def list_recordings(folder: Path) -> list[Path]:
    """Return the recordings of a trace, the oldest first.

    Args:
        folder: of the trace.
    """
    # JAX puts each into a folder that is named by the time, 2026_01_31_12_00_00.
    return sorted(folder.glob("plugins/profile/*/*.xplane.pb"))


def _find_time(folder: Path) -> str:
    """Return when a trace was recorded, to the second; an empty string where nothing was."""
    recordings = list_recordings(folder)
    return recordings[-1].parent.name if recordings else ""


def _write_programs(folder: Path, programs: list[tuple[str, jax.stages.Compiled]]) -> None:
    """Write what XLA has made of programs, as text.

    Args:
        folder: is made.
        programs: names and executables, the oldest first.
    """
    folder.mkdir()
    for number, (name, compiled) in enumerate(programs, 1):
        text = compiled.as_text()
        if text is not None:
            (folder / f"{number:02}-{name}.hlo.txt").write_text(text)
