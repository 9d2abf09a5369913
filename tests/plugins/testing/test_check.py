"""The conformance check lets a sound plugin pass, and each check finds the plugin that breaks its
promise."""

import sqlite3
import sys
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fulgurite_testing import CHECKS, PluginFailure, check_plugin

sys.path.insert(0, str(Path(__file__).parent))
import broken

pytestmark = pytest.mark.full

BROKEN = [
    (
        "hooks",
        broken.Misspelt,
        "implements 'on_fit_starts', which is not a hook. Did you mean 'on_fit_start'?",
    ),
    ("hooks", broken.WrongAnswer, "returns a list or None, not {'every': 3}"),
    ("arguments", broken.TakesAnything, "TakesAnything(no_such_argument=...) is accepted silently"),
    (
        "arguments",
        broken.Unchecked,
        "Unchecked(every=-1) is accepted: check arguments where the plugin is built",
    ),
    ("same_trace", broken.CountsTraces, "the step is not the same program"),
    ("same_trace", broken.KeepsTracer, "keeps a tracer in self.tracer"),
    ("no_effects", broken.Prints, "calls the host at every step (debug_callback)"),
    ("no_captured_arrays", broken.Captures, "captures an array float32[2048]"),
    ("trains", broken.FailsAsLogger, "OSError: no space left"),
    ("names", broken.LogsUnwritableNames, "'$x' of 'names' is left out of the records"),
    ("streams", broken.TakesOverStream, "changes the random stream 'default'"),
    ("results", broken.ChangesWeights, "a run ends differently with it"),
    ("deterministic", broken.TellsTheTime, "two runs of one seed differ"),
    ("deterministic", broken.SaysTheTime, "['clock at 2']['wall'] is 'it is "),
    ("deterministic", broken.Draws, "two runs of one seed differ"),
    (
        "deterministic",
        broken.NeverBeginsAnew,
        "the second fit with one instance is not like the first",
    ),
    ("resume", broken.Forgets, "is not the one that was not interrupted"),
    ("resume", broken.ForgetsInWords, "['looked'] is '2 times' and '1 times'"),
    (
        "resume",
        broken.WritesOn,
        "losses.txt in the run directory is not the same after a run was resumed",
    ),
    (
        "resume",
        broken.TellsAnOldPlace,
        "losses.txt in the run directory is not the same after a run was resumed from step 5",
    ),
    ("host_state", broken.NoJson, "get_host_state returned something that is not JSON"),
    ("host_state", broken.KeepsTooMuch, "too large to be read again, most of it in seen"),
    (
        "host_state",
        broken.RestoresNothing,
        "get_host_state returned 1; after set_host_state on a new instance it returns",
    ),
    (
        "interruptions",
        broken.CountsOutsideOfItsState,
        "interrupted in the middle of its action 'count', and resumed with a new instance, is not",
    ),
    ("interruptions", broken.AppendsBeforeItLogs, "steps.txt in the run directory holds 4 bytes"),
    (
        "failed_start",
        broken.ForgetsAtTheEndOnly,
        "a fit with an instance whose last starts failed, by another plugin, is not like its first",
    ),
    (
        "shared",
        broken.CountsInItsClass,
        "a fit around another, each with an instance of its own, is not as it is alone",
    ),
    (
        "fused_steps",
        broken.AsksForFuse,
        "with steps_per_execution=8 the run is not the one with steps_per_execution=1",
    ),
    ("no_sync", broken.ReadsByAsarray, "action read waits for the device"),
    ("no_sync", broken.ReadsByFloat, "log_record waits for the device"),
    ("closes", broken.NeverCloses, "close_logger is not done after 0.5 s"),
    ("closes", broken.LeavesThread, "the thread 'left-behind' still runs"),
]

# Other ways to fail a check than that of the case before it, which take seconds.
LONG = {
    broken.AppendsBeforeItLogs,
    broken.ForgetsInWords,
    broken.KeepsTooMuch,
    broken.ReadsByFloat,
    broken.TellsAnOldPlace,
}


@pytest.mark.parametrize(
    ("check", "plugin", "message"),
    [pytest.param(*case, marks=[pytest.mark.slow] if case[1] in LONG else []) for case in BROKEN],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_each_check_detects_its_broken_plugin(check: str, plugin: Any, message: str) -> None:
    with pytest.raises(PluginFailure) as failure:
        check_plugin(
            plugin,
            only=[check],
            bad_arguments=[{"every": -1}] * (plugin is broken.Unchecked),
            timeout=0.5,
        )
    assert list(failure.value.failures) == [check]
    assert message in failure.value.failures[check]


@pytest.mark.slow
def test_correct_plugin_passes() -> None:
    check_plugin(broken.Sound, bad_arguments=[{"decay": 2.0}])
    check_plugin(broken.Sound(decay=0.5), only=["trains", "resume"])


@pytest.mark.slow
def test_two_processes_accept_a_correct_plugin() -> None:
    check_plugin(broken.Sound, only=["processes"])


def test_two_processes_detect_a_plugin_that_writes_from_both() -> None:
    with pytest.raises(
        PluginFailure, match=r"process [01] of 2 ended with code 1(.|\n)*FileExistsError"
    ):
        check_plugin(broken.WritesFromAll, only=["processes"])


def test_every_check_has_a_plugin_that_fails_it() -> None:
    assert {check for check, _, _ in BROKEN} | {"processes"} == CHECKS.keys()


def test_all_failures_are_reported_at_once() -> None:
    with pytest.raises(PluginFailure) as failure:
        check_plugin(broken.TellsTheTime, only=["deterministic", "resume", "streams"])
    assert list(failure.value.failures) == ["deterministic", "resume"]
    assert str(failure.value).startswith("TellsTheTime does not pass:\n  deterministic: two runs")


def test_arguments_of_a_partial_are_kept() -> None:
    build = partial(broken.NeedsStrength, 0.5)
    check_plugin(build, only=["arguments"], bad_arguments=[{"every": -1}])
    with pytest.raises(PluginFailure, match=r"^NeedsStrength does not pass:\n.*every=3.*accepted"):
        check_plugin(build, only=["arguments"], bad_arguments=[{"every": 3}])


def test_compared_part_of_a_file_may_be_specified() -> None:
    def rows(path: Path) -> Any:
        with closing(sqlite3.connect(path)) as database:
            return database.execute("select * from losses").fetchall()

    check_plugin(broken.WritesADatabase, only=["resume"], content=rows)


@pytest.mark.parametrize(
    ("plugin", "message"),
    [
        ("rng", "'rng' is a name: pass the class"),
        (broken.Locked(), "cannot be copied: pass its class"),
    ],
)
def test_invalid_plugin_arguments_are_reported(plugin: Any, message: str) -> None:
    with pytest.raises(PluginFailure, match=message):
        check_plugin(plugin, only=["hooks"])


def test_the_order_of_the_members_of_a_host_state_is_nothing() -> None:
    check_plugin(broken.SortsWhatItKeeps, only=["host_state", "interruptions"])


def test_an_instance_that_can_be_called_is_a_plugin_and_no_function_that_builds_one() -> None:
    check_plugin(broken.CanBeCalled(), only=["hooks"])


def test_unknown_check_is_an_error() -> None:
    with pytest.raises(ValueError, match="there is no check 'resumes'; there are hooks, arguments"):
        check_plugin(broken.Sound, skip=["resumes"])
