"""What holds for every test: the CPU, compiled programs kept between runs, and types checked while
the tests run."""

import gc
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import version
from itertools import count
from pathlib import Path
from types import FunctionType
from typing import Any, get_args

import jaxtyping
import pytest
from beartype import beartype
from hypothesis import settings

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))  # for edits.py, which tests in several folders share
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fulgurite" / "tests"

# Set before jax is imported, and inherited by the processes that tests start.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(CACHE))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
# Where each operation comes from is written into every program, for profilers: a twentieth of the
# time.
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")
# A table and a live line for each of thousands of fits took a fifteenth of the time; tests that are
# about them ask.
os.environ.setdefault("FULGURITE_AUTOLOAD", "rng")
# XLA compiles in a fifth of the time if it may make slow code. Where XLA_FLAGS is set, empty or
# not, it obeys that. A flag that XLA does not know ends the process: these are known to that of jax
# 0.10, which Python 3.11 has.
QUICK = "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
os.environ.setdefault("XLA_FLAGS", QUICK if version("jaxlib").startswith("0.10.") else "")

# A shell that runs the tests in the background has them ignore Ctrl-C, and with them the programs
# that they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Tracing makes millions of short-lived objects: with the usual threshold, a seventh of the time
# goes into collections.
gc.set_threshold(50_000)

# What takes long and fails seldom on its own: `.ci/run` runs it, the test command of the README does
# not. Each line is the beginning of a test's id. Single tests and variants elsewhere have the mark
# `full` beside them, where something quicker holds the same promise in the fast selection.
FULL = (
    "tests/core/test_batch_structures.py::test_g6_a_loop_of_one_s_own_takes_batches_of_both_structures",
    "tests/core/test_many_arrays.py::",
    "tests/integration/test_examples.py::test_ppo",
    "tests/integration/test_examples.py::test_agent_of_ppo_goes_on_in_the_same_episodes",
    "tests/plugins/checkpoint/test_commands.py::",
    "tests/plugins/checkpoint/test_exact.py::test_actions_after_one_that_saves_are_not_lost",
    "tests/plugins/checkpoint/test_exact.py::test_logger_without_a_position_prevents_a_checkpoint",
    "tests/plugins/checkpoint/test_restoring.py::test_changed_",
    "tests/plugins/checkpoint/test_restoring.py::test_m",
    "tests/plugins/checkpoint/test_states.py::",
    "tests/plugins/evaluators/test_predictions.py::",
    "tests/plugins/logging/test_loop_logger.py::test_a_loop_logs_what_a_fit_logs_",
    "tests/core/test_batch_structures.py::test_g6_a_run_over_two_structures_resumes_exactly",
    "tests/core/test_compilation.py::test_one_executable_whatever_is_due_and_the_same_bits_for_three_",
    "tests/core/test_docstrings.py::test_example_runs",
    "tests/core/test_evaluate.py::test_evaluate_accepts_everything_that_holds_a_module",
    "tests/core/test_fit.py::test_logging_interval_does_not_change_the_state",
    "tests/core/test_hooks.py::test_traced_hooks_behave_the_same_in_fused_steps",
    "tests/core/test_imports.py::test_any_module_may_be_imported_first",
    "tests/core/test_many_arrays.py::test_single_steps_give_the_same_bits",
    "tests/core/test_metrics.py::test_merging_in_any_grouping_and_order_gives_the_same_result",
    "tests/core/test_modes.py::test_every_nesting_knows_the_mode",
    "tests/core/test_resume_seam.py::test_a_resumed_run_ends_with_the_same_bits[exception",
    "tests/core/test_resume_seam.py::test_evaluation_interrupted_at_the_end_leaves_the_run_incomplete",
    "tests/core/test_resume_seam.py::test_pending_evaluation_may_be_interrupted_again",
    "tests/integration/",
    "tests/plugins/checkpoint/test_commands.py::test_runs_are_compared",
    "tests/plugins/checkpoint/test_data_state.py::test_a_run_goes_on_with_the_same_batches",
    "tests/plugins/checkpoint/test_exact.py::test_a_resumed_run_ends_with_the_same_bits",
    "tests/plugins/checkpoint/test_hostile.py",
    "tests/plugins/cli/test_experiment.py::test_a_signal_ends_the_program_between_steps_with_its_code[15",
    "tests/plugins/cli/test_sweeps.py::test_a_sweep_runs_what_is_not_complete",
    "tests/plugins/cli/test_sweeps.py::test_runs_of_a_module_of_a_package_are_run_as_it_is",
    "tests/plugins/dev/test_new_plugin.py",
    "tests/plugins/evaluators/test_standalone.py",
    "tests/plugins/logging/test_runs.py",
    "tests/plugins/losses/test_losses.py::test_2s9_triplet_loss_of_a_batch",
    "tests/plugins/losses/test_losses.py::test_ctc_loss",
    "tests/plugins/losses/test_losses.py::test_pixels_may_be_masked_in_dice_loss",
    "tests/plugins/losses/test_losses.py::test_what_is_masked_changes_no_value_and_no_gradient[ctc",
    "tests/plugins/losses/test_losses.py::test_without_examples",
    "tests/plugins/metrics/test_metrics.py::test_evaluations_with_an_uneven_last_batch[pad]",
    "tests/plugins/metrics/test_metrics.py::test_metrics_under_strict_dtype_promotion",
    "tests/plugins/metrics/test_metrics.py::test_windows_over_several_steps",
    "tests/plugins/optimizers/test_by_hand.py::test_the_gan_of_digits",
    "tests/plugins/optimizers/test_phases.py::test_phases_and_repetitions_draw_distinct_numbers",
    "tests/plugins/progress/test_progress.py::test_terminal_is_restored[os.kill",
    "tests/plugins/sharding/test_eight_devices.py",
    "tests/plugins/sharding/test_launch.py",
    "tests/plugins/sharding/test_processes.py",
    "tests/plugins/tensorboard/test_shown.py",
    "tests/plugins/tensorboard/test_tensorboard.py::test_layout_chooses_directory_and_tag_B20",
    "tests/plugins/testing/test_check.py",
    "tests/plugins/wandb/",
    "tests/recovery/",
    "tests/core/test_batch_structures.py::test_g6_metrics_of_one_structure_are_of_its_steps_alone",
    "tests/core/test_batch_structures.py::test_g6_two_structures_equal_a_loop_over_two_jitted_steps[1]",
    "tests/core/test_fit.py::test_the_steps_in_flight_are_bounded",
    "tests/core/test_media.py::test_media_are_rendered_only_at_their_trigger[4]",
    "tests/core/test_modes.py::test_a_part_is_switched_to_evaluation_and_evaluation_switches_everything",
    "tests/core/test_resume_seam.py::test_evaluation_of_an_interrupted_action_is_not_recorded_twice",
    "tests/core/test_schedule.py::test_one_executable_whatever_is_due[8]",
    "tests/core/test_sharding_hooks.py::",
    "tests/plugins/checkpoint/test_exact.py::test_a_finished_run_that_starts_again_",
    "tests/plugins/checkpoint/test_exact.py::test_a_fit_that_would_end_before_its_checkpoint_",
    "tests/plugins/checkpoint/test_exact.py::test_host_states_and_metrics_survive_",
    "tests/plugins/checkpoint/test_interrupted.py::test_an_interrupted_action_begins_from_the_state_before_it[terminate]",
    "tests/plugins/checkpoint/test_damage.py::test_run_resumes_from_the_previous_checkpoint_and_rewrites_the_damaged_one[remove]",
    "tests/plugins/checkpoint/test_restoring.py::test_added_or_removed_logger_is_reported",
    "tests/plugins/checkpoint/test_restoring.py::test_optimizer_arrays_can_be_loaded_too",
    "tests/plugins/checkpoint/test_saving.py::test_case_19_the_best_is_strictly_better_and_never_nan[scores1",
    "tests/plugins/checkpoint/test_saving.py::test_case_19_the_best_is_strictly_better_and_never_nan[scores2",
    "tests/plugins/checkpoint/test_saving.py::test_keep_period_checkpoints_are_never_deleted",
    "tests/plugins/checkpoint/test_saving.py::test_only_metrics_of_the_very_step_count",
    "tests/plugins/cli/test_experiment.py::test_a_signal_ends_the_program_between_steps_with_its_code",
    "tests/plugins/dev/test_doctor.py::test_doctor_reports_an_unwritable_compilation_cache",
    "tests/plugins/evaluators/test_evaluator.py::test_metrics_and_losses_of_an_evaluator_replace_those_of_the_module",
    "tests/plugins/evaluators/test_evaluator.py::test_noise_repeats_unless_",
    "tests/plugins/losses/test_losses.py::test_triplet_losses_equal_loops_over_the_triplets",
    "tests/plugins/metrics/test_metrics.py::test_any_split_gives_what_scikit_learn_gives_over_the_whole_set[ExpectedCalibrationError]",
    "tests/plugins/metrics/test_more_metrics.py::test_items_of_a_list_may_be_masked",
    "tests/plugins/metrics/test_sampled.py::test_fewer_examples_than_the_sample_size",
    "tests/plugins/metrics/test_sampled.py::test_infinite_numbers_have_a_median",
    "tests/plugins/metrics/test_sampled.py::test_sample_of_objects_on_the_host_",
    "tests/plugins/optimizers/test_freeze.py::test_frozen_until_a_step[3-1]",
    "tests/plugins/optimizers/test_phases.py::test_case_36_simultaneous_phases_see_the_same_parameters[Game]",
    "tests/plugins/optimizers/test_phases.py::test_optimizer_of_unused_parameters_is_reported",
    "tests/plugins/progress/test_progress.py::test_line_names_the_current_activity",
    "tests/plugins/runs/test_lock.py::test_lock_of_a_killed_process_is_free_at_once[arguments1]",
    "tests/plugins/tensorboard/test_tensorboard.py::test_media",
    "tests/plugins/testing/test_fixtures.py::test_run_with_resumes_a_run",
    "tests/plugins/keys/test_keys.py::test_masks_and_weights_of_examples_are_keys",
    "tests/plugins/keys/test_keys.py::test_25_means_of_trees",
    "tests/plugins/keys/test_layers.py::test_2s19_stacked_blocks_under_scan_and_remat",
)

MEMBERS = ("core", "plugins/*", "contrib/*")
PACKAGES = [
    path.parent.name for member in MEMBERS for path in ROOT.glob(f"{member}/src/*/__init__.py")
]


whole_jaxtyped = jaxtyping.jaxtyped


def jaxtyped(*arguments: Any, **options: Any) -> Any:
    """As the import hook puts it on every function and class: it stays away where no array is
    annotated, for binding the arguments of every call takes a tenth of the time of the tests.
    Fields are left out: in a tree of shapes or of shardings they hold those in place of arrays."""
    if arguments or options.get("typechecker", "") is None:  # not of the import hook
        return whole_jaxtyped(*arguments, **options)

    def decorate(decorated: Any) -> Any:
        unchecked = isinstance(decorated, type) or decorated.__name__ == "__init__"
        if unchecked or not any(map(holds_arrays, decorated.__annotations__.values())):
            return decorated
        return whole_jaxtyped(decorated, **options)

    return decorate


def checked(function: FunctionType) -> Callable[..., Any]:
    """Checks the arrays that a function takes and gives for shape and dtype; all other types are
    for the type checker.

    jaxtyping hands over a stand-in with the signature of the function that it checks.
    """
    function.__annotations__ = {
        name: hint for name, hint in function.__annotations__.items() if holds_arrays(hint)
    }
    return beartype(function)


def holds_arrays(hint: Any) -> bool:
    if isinstance(hint, type) and issubclass(hint, jaxtyping.AbstractArray):
        return True
    return any(holds_arrays(part) for part in get_args(hint))


jaxtyping.jaxtyped = jaxtyped
jaxtyping.install_import_hook(
    PACKAGES, f"{__name__}.checked"
)  # before any of the packages is imported

settings.register_profile("fulgurite", deadline=None)
settings.load_profile("fulgurite")


def pytest_collection_finish() -> None:
    """What was imported stays: no collection needs to look at it."""
    gc.freeze()


# What the marks select, and the time that it takes, for who runs it.
SELECTIONS = {
    "not slow and not full": (
        "the fast selection: what a change most likely breaks; 5 minutes on two cores that do "
        "nothing else, half an hour on a machine with a load of ten"
    ),
    "full and not slow": (
        "what the fast selection leaves out, but for the soak; 15 minutes on two cores that do "
        "nothing else"
    ),
    "not slow": "all but the soak; 20 minutes on two cores that do nothing else",
    "slow": "long variants and the soak; hours",
}


def pytest_report_header(config: pytest.Config) -> str:
    """Say what is about to run and how long it takes. After that, pytest counts the tests."""
    marks = config.option.markexpr
    return f"tests: {SELECTIONS.get(marks, f'those with the marks {marks!r}' if marks else 'all')}"


# The ids of the tests that were not run, by the mark that left them out.
left_out: dict[str, set[str]] = {"slow": set(), "full": set()}


def pytest_deselected(items: list[pytest.Item]) -> None:
    """Note which tests are left out by their mark."""
    for item in items:
        mark = next((mark for mark in left_out if item.get_closest_marker(mark)), None)
        if mark is not None:
            left_out[mark].add(item.nodeid)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Send what was left out from a process of pytest-xdist to the one that reports."""
    output = getattr(session.config, "workeroutput", {})
    output["left_out"] = {mark: sorted(ids) for mark, ids in left_out.items()}


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Receive what a process of pytest-xdist left out."""
    for mark, ids in getattr(node, "workeroutput", {}).get("left_out", {}).items():
        left_out[mark].update(ids)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how many tests were left out, so that nobody takes the selection for all of them."""
    commands = {"slow": "pytest -m slow", "full": "pytest -m 'full and not slow'"}
    for mark, ids in left_out.items():
        if ids:
            terminalreporter.write_line(f"left out: {len(ids)} marked {mark!r}; {commands[mark]}")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs what is marked `optimized`, slow or not, in a process where XLA makes of it what it
    makes for users."""
    if not os.environ["XLA_FLAGS"] or pyfuncitem.get_closest_marker("optimized") is None:
        return None
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-m",
        "",
        pyfuncitem.nodeid,
    ]
    run = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "XLA_FLAGS": ""}, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return True


@pytest.fixture
def unchecked() -> Iterator[None]:
    """For tests that hand over what an annotation rules out, to see the error that users get."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


cells = count()


@pytest.fixture(autouse=True)
def cell_of_each_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that a signal stops and that resumes within one test stands for two processes: as if
    each fit were in a notebook's cell of its own, a stop ends no later one. `test_signals.py` tests
    that of real programs."""
    monkeypatch.setattr("fulgurite.fit.signals._find_cell", cells.__next__)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of `FULL`."""
    for item in items:
        if item.nodeid.startswith(FULL):
            item.add_marker(pytest.mark.full)
