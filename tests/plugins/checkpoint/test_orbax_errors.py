"""What is left out of what libraries print of a save or a load that failed, and what is not."""

import asyncio
import logging
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from fulgurite_checkpoint.orbax_errors import mute_failed_transfers


def raise_closed() -> None:
    raise RuntimeError("Event loop is closed")


def call_closed_loop() -> None:
    loop = asyncio.new_event_loop()
    loop.close()
    loop.call_soon_threadsafe(print)


def call_closed_uvloop() -> None:
    loop = pytest.importorskip("uvloop").new_event_loop()
    loop.close()
    loop.call_soon_threadsafe(print)


@pytest.mark.parametrize(
    ("function", "is_called_by_python", "is_printed"),
    [
        (call_closed_loop, False, False),
        (call_closed_uvloop, False, False),
        (call_closed_loop, True, True),
        (raise_closed, True, True),
    ],
)
def test_only_late_transfers_of_tensorstore_are_left_out(
    monkeypatch: pytest.MonkeyPatch,
    function: Callable[[], None],
    is_called_by_python: bool,
    is_printed: bool,
) -> None:
    """C++ calls the closed loop itself, so no other frame stands above it."""
    printed: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", printed.append)
    mute_failed_transfers()
    with pytest.raises(RuntimeError) as caught:
        function()
    frames = caught.value.__traceback__
    while not is_called_by_python and frames and frames.tb_frame.f_globals is globals():
        frames = frames.tb_next
    unraisable: Any = SimpleNamespace(exc_value=caught.value, exc_traceback=frames)
    sys.unraisablehook(unraisable)
    assert len(printed) == is_printed


def test_other_errors_that_absl_logs_are_printed(caplog: pytest.LogCaptureFixture) -> None:
    mute_failed_transfers()
    logger = logging.getLogger("absl")
    logger.error("[process=%d] _SignalingThread.run() raised an exception: %s", 0, "full")
    logger.error("the disk is full")
    assert [record.getMessage() for record in caplog.records] == ["the disk is full"]
    with caplog.at_level(logging.DEBUG, "absl"):
        logger.error("[process=%d] _SignalingThread.run() raised an exception: %s", 0, "full")
    assert caplog.records[-1].levelname == "DEBUG"


def test_errors_of_tasks_that_orbax_does_not_await_are_left_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Each array of a checkpoint that is deleted while it is read has one; the first is raised."""
    mute_failed_transfers()
    logger = logging.getLogger("asyncio")
    never = "Task exception was never retrieved\nfuture: <Task finished coro=<"
    logger.error(f"{never}async_deserialize() done, defined at /site/orbax/serialization.py:394>>")
    logger.error(f"{never}fetch() done, defined at /home/user/program.py:3>>")
    assert ["program.py" in record.getMessage() for record in caplog.records] == [True]
