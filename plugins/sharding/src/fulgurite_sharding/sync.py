"""How several processes agree, over JAX's coordination service: no device takes part, so nobody
waits for one."""

import json
import signal
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import fulgurite as fg
import jax
from fulgurite.errors import ConfigurationError, ProcessError
from fulgurite.sharding import FIT_START

from fulgurite_sharding.distributed import client, reached_sync_point

# So many meetings, and all wait for each other, so that what they left in the store can go.
_TIDIED_EVERY = 64


@dataclass
class _Counters:
    """How often this process has spoken with the others. It belongs to the process as the store of
    their answers does: of two engines the second would else read what the first one said."""

    polls: int = 0
    meetings: int = 0
    decisions: int = 0
    honoured: int = 0
    gathered: Counter[str] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)


_said = _Counters()


class CoordinatedSync(fg.ProcessSync):
    """Makes every process do the same at the same step.

    SIGTERM is JAX's: once one process has it, all stop at the same point, asked for at each end of
    a dispatch and between the batches of an evaluation. Other requests are checked every `every`
    steps: process 0's clock decides which actions are due by the clock, and any process can ask to
        stop.

    Args:
        every: steps between two checks.
        timeout: seconds to wait for another process where all must take part.
    """

    signals: ClassVar[tuple[signal.Signals, ...]] = (signal.SIGINT,)

    def __init__(self, every: int = 50, timeout: float = 600.0) -> None:
        check_every(every)
        self._every, self._timeout = every, timeout
        self._met: int | None = None

    def reduce_requests(self, step: int, requests: frozenset[str]) -> frozenset[str]:
        # Counted by polls instead of steps, because evaluations poll as well; every process does so
        # equally often.
        _said.polls += 1
        preempted = frozenset({"stop:SIGTERM"} if reached_sync_point(_said.polls) else ())
        if (
            self._met is None
            or not self._met <= step < self._met - self._met % self._every + self._every
        ):
            self._met = step
            return preempted | self._meet(requests)
        return preempted

    def broadcast(self, fn: Callable[[], Any]) -> Any:
        _said.decisions += 1
        key = f"fulgurite/decide/{_said.decisions}"
        if jax.process_index() > 0:
            answer = self._read(key)
            if "error" in answer:
                raise ProcessError(f"process 0 failed where it decides for all: {answer['error']}")
            return answer["value"]
        try:
            value = json.loads(json.dumps(fn()))
        except BaseException as error:
            self._write(key, {"error": f"{type(error).__name__}: {error}"})
            raise
        self._write(key, {"value": value})
        return value

    def all_gather(self, name: str, value: Any) -> list[Any]:
        with _said.lock:
            _said.gathered[name] += 1
            number = _said.gathered[name]
        key, value = f"fulgurite/gather/{name}/{number}", json.loads(json.dumps(value))
        if jax.process_index() > 0:
            self._write(f"{key}/{jax.process_index()}", value)
            return self._read(f"{key}/all")
        values = [value, *(self._read(f"{key}/{other}") for other in range(1, jax.process_count()))]
        for other in range(1, jax.process_count()):
            self._drop(f"{key}/{other}")
        # All have come here, and so have read what was gathered before.
        self._drop(f"fulgurite/gather/{name}/{number - 1}/all")
        if name == FIT_START:
            _said.honoured = (
                _said.meetings
            )  # a vote that came too late for a fit must not end the next one
        self._write(f"{key}/all", values)
        return values

    def _meet(self, requests: frozenset[str]) -> frozenset[str]:
        """Process 0's decision. The others cast their votes to stop before they read it; it may
        come to know of a vote one meeting late, and waits for none."""
        _said.meetings += 1
        block, number = divmod(_said.meetings, _TIDIED_EVERY)
        key = f"fulgurite/agree/{block}/{number}"
        if number == 0:
            self.all_gather("meetings", None)
            if jax.process_index() == 0:
                self._drop(f"fulgurite/agree/{block - 1}")
        stops = sorted(wish for wish in requests if wish.startswith("stop:"))
        if jax.process_index() > 0:
            if stops:
                vote = {"meeting": _said.meetings, "stops": stops}
                self._write(f"fulgurite/votes/{jax.process_index()}", vote)
            return frozenset(self._read(key))
        votes = [json.loads(text) for _, text in client().key_value_dir_get("fulgurite/votes/")]
        # A vote counts once: what a fit ended for must not end the next one in this process.
        agreed = {
            stop for vote in votes if vote["meeting"] > _said.honoured for stop in vote["stops"]
        } | requests
        if any(wish.startswith("stop:") for wish in agreed):
            _said.honoured = _said.meetings
        self._write(key, sorted(agreed))
        return frozenset(agreed)

    def _write(self, key: str, value: Any) -> None:
        client().key_value_set(key, json.dumps(value), allow_overwrite=True)

    def _read(self, key: str) -> Any:
        try:
            return json.loads(client().blocking_key_value_get(key, int(self._timeout * 1000)))
        except jax.errors.JaxRuntimeError as error:
            late = "DEADLINE_EXCEEDED" in str(error)
            how = (
                f"waited {self._timeout:.0f} s for another one, in vain"
                if late
                else "lost process 0, which has ended"
            )
            raise ProcessError(
                f"process {jax.process_index()} {how} ({key}): look at the output of the others"
            ) from error

    def _drop(self, key: str) -> None:
        client().key_value_delete(key)


def check_every(every: int) -> None:
    """Raises `ConfigurationError` for what is no number of steps."""
    if type(every) is not int or every < 1:
        raise ConfigurationError(f"agree_every is {every!r}; it must be a positive integer")
