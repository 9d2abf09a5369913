"""How several processes agree, over JAX's coordination service.

No device takes part, so nobody waits for one.
"""

import json
import signal
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import fulgurite as fg
import jax
from fulgurite.errors import ProcessError, check_positive_int
from fulgurite.plugins import FIT_START

from fulgurite_sharding.distributed import get_client, has_reached_sync_point

# After this many meetings all wait for each other, so that what they left in the store can go.
_CLEANUP_INTERVAL = 64


@dataclass
class _Counters:
    """How often this process has exchanged something with the others.

    There is one of it in a process, as there is one store of the answers: the second of two engines
    would else read what the first one wrote.

    Attributes:
        polls: calls of `reduce_requests`.
        meetings: exchanges of requests.
        broadcasts: calls of `broadcast`.
        last_stop: the meeting up to which votes to stop have been obeyed.
        gathers: calls of `all_gather` by name.
        lock: for `gathers`, because `all_gather` may be called on any thread.
    """

    polls: int = 0
    meetings: int = 0
    broadcasts: int = 0
    last_stop: int = 0
    gathers: Counter[str] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)


_counters = _Counters()


class CoordinatedSync(fg.ProcessSync):
    """Makes every process do the same at the same step.

    JAX handles SIGTERM: once one process has received it, all stop at the same point. They look for
    it at each end of a dispatch and between the batches of an evaluation. Other requests are
    exchanged every `every` steps: process 0's clock decides which actions are due by the clock, and
    any process can ask to stop.

    Example:
        from fulgurite_sharding import CoordinatedSync, MeshStrategy

        mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
        strategy = MeshStrategy(mesh, sync=CoordinatedSync(every=20))

    Args:
        every: steps between two exchanges.
        timeout: seconds to wait for another process where all must take part.
    """

    signals: ClassVar[tuple[signal.Signals, ...]] = (signal.SIGINT,)

    def __init__(self, every: int = 50, timeout: float = 600.0) -> None:
        check_agree_every(every)
        self._every = every
        self._timeout = timeout
        self._last_meeting: int | None = None

    def reduce_requests(self, step: int, requests: frozenset[str]) -> frozenset[str]:
        # Counted by polls instead of steps, because evaluations poll as well; every process does so
        # equally often.
        _counters.polls += 1
        agreed: frozenset[str] = frozenset()
        if has_reached_sync_point(_counters.polls):
            agreed = frozenset({"stop:SIGTERM"})
        if self._is_meeting_due(step):
            self._last_meeting = step
            agreed |= self._exchange_requests(requests)
        return agreed

    def broadcast(self, fn: Callable[[], Any]) -> Any:
        _counters.broadcasts += 1
        key = f"fulgurite/decide/{_counters.broadcasts}"
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
        with _counters.lock:
            _counters.gathers[name] += 1
            number = _counters.gathers[name]
        key = f"fulgurite/gather/{name}/{number}"
        value = json.loads(json.dumps(value))
        if jax.process_index() > 0:
            self._write(f"{key}/{jax.process_index()}", value)
            return self._read(f"{key}/all")
        others = range(1, jax.process_count())
        values = [value, *(self._read(f"{key}/{process}") for process in others)]
        for process in others:
            self._delete(f"{key}/{process}")
        # All have come here, and so have read what was gathered before.
        self._delete(f"fulgurite/gather/{name}/{number - 1}/all")
        if name == FIT_START:
            # A vote that came too late for a fit must not end the next one.
            _counters.last_stop = _counters.meetings
        self._write(f"{key}/all", values)
        return values

    def _is_meeting_due(self, step: int) -> bool:
        """Return whether this is the first poll of a fit, or a multiple of `every` steps has passed
        since the last meeting."""
        if self._last_meeting is None or step < self._last_meeting:
            return True
        return step // self._every > self._last_meeting // self._every

    def _exchange_requests(self, requests: frozenset[str]) -> frozenset[str]:
        """Return the requests that process 0 decides on.

        The others write their votes to stop before they read its decision. Process 0 waits for no
        vote, so it may learn of one a meeting late.
        """
        _counters.meetings += 1
        block, number = divmod(_counters.meetings, _CLEANUP_INTERVAL)
        key = f"fulgurite/agree/{block}/{number}"
        if number == 0:
            self.all_gather("meetings", None)
            if jax.process_index() == 0:
                self._delete(f"fulgurite/agree/{block - 1}")
        stops = sorted(request for request in requests if request.startswith("stop:"))
        if jax.process_index() > 0:
            if stops:
                vote = {"meeting": _counters.meetings, "stops": stops}
                self._write(f"fulgurite/votes/{jax.process_index()}", vote)
            return frozenset(self._read(key))
        votes = [json.loads(text) for _, text in get_client().key_value_dir_get("fulgurite/votes/")]
        # A vote counts once: what a fit ended for must not end the next one in this process.
        agreed = set(requests)
        for vote in votes:
            if vote["meeting"] > _counters.last_stop:
                agreed.update(vote["stops"])
        if any(request.startswith("stop:") for request in agreed):
            _counters.last_stop = _counters.meetings
        self._write(key, sorted(agreed))
        return frozenset(agreed)

    def _write(self, key: str, value: Any) -> None:
        get_client().key_value_set(key, json.dumps(value), allow_overwrite=True)

    def _read(self, key: str) -> Any:
        try:
            return json.loads(get_client().blocking_key_value_get(key, int(self._timeout * 1000)))
        except jax.errors.JaxRuntimeError as error:
            failure = "lost process 0, which has ended"
            if "DEADLINE_EXCEEDED" in str(error):
                failure = f"waited {self._timeout:.0f} s for another one, in vain"
            raise ProcessError(
                f"process {jax.process_index()} {failure} ({key}): look at the output of the others"
            ) from error

    def _delete(self, key: str) -> None:
        get_client().key_value_delete(key)


def check_agree_every(every: int) -> None:
    """Raise a ConfigurationError unless `every` is a number of steps."""
    check_positive_int(every, "agree_every")
