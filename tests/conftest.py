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
QUICK = (
    "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
    " --xla_cpu_parallel_codegen_split_count=1"
)
os.environ.setdefault("XLA_FLAGS", QUICK if version("jaxlib").startswith("0.10.") else "")

# A shell that runs the tests in the background has them ignore Ctrl-C, and with them the programs
# that they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Tracing makes millions of short-lived objects: with the usual threshold, a seventh of the time
# goes into collections.
gc.set_threshold(50_000)

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


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the cases of a test that only vary one of them, as the test's mark `variants` says.

    The first case without a mark of its own stays in the fast selection, and stands for the others.
    """
    represented: set[str] = set()
    for item in items:
        variants = item.get_closest_marker("variants")
        is_left_out = any(map(item.get_closest_marker, left_out))
        if variants is None or is_left_out:
            continue
        function_id = item.nodeid.partition("[")[0]
        if function_id in represented:
            item.add_marker(variants.args[0])
        represented.add(function_id)


# What the marks select, and the time that it takes, for who runs it.
SELECTIONS = {
    "not slow and not full": (
        "the fast selection: what a change most likely breaks; 5 minutes on two cores that do "
        "nothing else, half an hour on a machine with a load of ten"
    ),
    "full and not slow": (
        "what the fast selection leaves out, but for the soak; 12 minutes on two cores that do "
        "nothing else"
    ),
    "not slow": "all but the soak; 17 minutes on two cores that do nothing else",
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


@pytest.fixture(scope="module", autouse=True)
def garbage_of_each_file() -> Iterator[None]:
    """What a file leaves behind in caches stays, as do imports: gigabytes, which a collection in a
    later test would take seconds to look through."""
    yield
    gc.collect()
    gc.freeze()


cells = count()


@pytest.fixture(autouse=True)
def cell_of_each_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that a signal stops and that resumes within one test stands for two processes: as if
    each fit were in a notebook's cell of its own, a stop ends no later one. `test_signals.py` tests
    that of real programs."""
    monkeypatch.setattr("fulgurite._src.fit.signals._find_cell", cells.__next__)
