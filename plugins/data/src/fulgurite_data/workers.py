"""Batches read ahead by threads or processes, in order.

Which worker reads a batch changes nothing in it, so that a position knows nothing of workers.
"""

import signal
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from itertools import islice
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pickle import PicklingError, dumps, loads
from traceback import format_exception
from typing import Any, NamedTuple

import jax
from fulgurite.errors import ConfigurationError, DataError
from fulgurite.plugins import ProcessShard

from fulgurite_data.grouping import BatchNode, read_batch
from fulgurite_data.passes import Pass

_AHEAD = 2
"""Batches under way for each worker: one that is read, and one that waits for it."""
_PATIENCE = 5.0
"""Seconds that a worker process has to end by itself, and others to finish once one has died."""


class Job(NamedTuple):
    """A batch to read.

    Attributes:
        number: of the batch.
        at: the pass.
        process: as of `Batches.iter_epoch`.
    """

    number: int
    at: Pass
    process: ProcessShard


def iter_in_threads(node: BatchNode, jobs: Iterable[Job], count: int) -> Iterator[Any]:
    """Yield batches in order, read by threads.

    Args:
        node: what reads them.
        jobs: what to read.
        count: the number of threads.
    """
    remaining = iter(jobs)
    has_x64: bool = jax.config.jax_enable_x64  # type: ignore[attr-defined]
    with ThreadPoolExecutor(count, thread_name_prefix="fulgurite-data") as executor:
        waiting: deque[Future[Any]] = deque()
        try:
            for job in islice(remaining, _AHEAD * count):
                waiting.append(executor.submit(_read, has_x64, node, job))
            while waiting:
                yield waiting.popleft().result()
                for job in islice(remaining, 1):
                    waiting.append(executor.submit(_read, has_x64, node, job))
        finally:
            for future in waiting:
                future.cancel()


def _read(has_x64: bool, node: BatchNode, job: Job) -> Any:
    """Return a batch; functions that use jax keep 64 bits where the reader of the batches does."""
    with jax.enable_x64(has_x64):
        return read_batch(node, *job)


class WorkerPool:
    """Processes that read batches of one node.

    Args:
        node: what reads them; sent to each process once.
        count: the number of processes.

    Raises:
        ConfigurationError: the node cannot be sent.
    """

    def __init__(self, node: BatchNode, count: int) -> None:
        self._workers: list[_Worker] = []
        self._num_sent = 0
        try:
            for number in range(count):
                self._workers.append(_Worker(number, count, node))
        except (PicklingError, AttributeError, TypeError) as error:
            self.close()
            raise ConfigurationError(
                f"this dataset cannot be sent to worker processes: {error}. Define the functions "
                "of map() at the top level of a module, without lambda, or use threads"
            ) from error

    def iter_batches(self, jobs: Iterable[Job]) -> Iterator[Any]:
        """Yield batches in order. What an earlier iteration did not wait for is left out.

        Args:
            jobs: what to read.
        """
        remaining = iter(jobs)
        waiting: deque[tuple[int, Job]] = deque()
        for job in islice(remaining, _AHEAD * len(self._workers)):
            waiting.append(self._send(job))
        while waiting:
            batch = self._receive(waiting)
            waiting.popleft()
            for following in islice(remaining, 1):
                waiting.append(self._send(following))
            yield batch

    def close(self) -> None:
        """End the processes."""
        for worker in self._workers:
            worker.connection.close()
        for worker in self._workers:
            worker.end()

    def _receive(self, waiting: Sequence[tuple[int, Job]]) -> Any:
        """Return the first of the batches that were asked for.

        Args:
            waiting: the number under which each was asked for, and what it is.

        Raises:
            DataError: a process has died.
        """
        ticket, job = waiting[0]
        worker = self._get_worker(ticket)
        while True:
            self._wait_for(worker, waiting)
            answer = worker.receive(job)
            if answer.ticket != ticket:
                continue
            if answer.error is not None:
                raise answer.error
            return answer.batch

    def _wait_for(self, worker: "_Worker", waiting: Sequence[tuple[int, Job]]) -> None:
        """Wait until a process has answered or has died. Once another one has died, not for long:
        it would be told only after all that is read before its batch."""
        sentinels = [other.sentinel for other in self._workers]
        ready = wait([worker.connection, *sentinels])
        if worker.connection in ready or worker.sentinel in ready:
            return
        if wait([worker.connection, worker.sentinel], _PATIENCE):
            return
        (dead, *_) = [other for other in self._workers if other.sentinel in ready]
        jobs = [job for ticket, job in waiting if self._get_worker(ticket) is dead]
        raise dead.make_error((jobs or [waiting[0][1]])[0])

    def _get_worker(self, ticket: int) -> "_Worker":
        return self._workers[ticket % len(self._workers)]

    def _send(self, job: Job) -> tuple[int, Job]:
        ticket = self._num_sent
        self._num_sent += 1
        has_x64: bool = jax.config.jax_enable_x64  # type: ignore[attr-defined]
        self._get_worker(ticket).send(ticket, has_x64, job)
        return ticket, job


class _Worker:
    """One process, and the connection to it."""

    def __init__(self, number: int, count: int, node: BatchNode) -> None:
        self._name = f"worker process {number} of {count}"
        # A process that is forked from one with threads, as jax has them, may hang.
        context = get_context("spawn")
        self.connection, other = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(other, node), name=f"fulgurite-data-{number}", daemon=True
        )
        self._process.start()
        self.sentinel = self._process.sentinel
        other.close()

    def send(self, ticket: int, has_x64: bool, job: Job) -> None:
        # That the process has died is told where its first missing batch is waited for.
        with suppress(OSError):
            self.connection.send((ticket, has_x64, job))

    def receive(self, job: Job) -> "_Answer":
        """Return an answer.

        Args:
            job: what is waited for.

        Raises:
            DataError: the process has ended.
        """
        if self.connection not in wait([self.connection, self.sentinel]):
            raise self.make_error(job)
        try:
            return self.connection.recv()
        except (EOFError, OSError) as error:
            raise self.make_error(job) from error

    def end(self) -> None:
        self._process.join(_PATIENCE)
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join(_PATIENCE)

    def make_error(self, job: Job) -> DataError:
        """Return what says that the process has died.

        Args:
            job: what was waited for.
        """
        self._process.join(_PATIENCE)
        code = self._process.exitcode
        reason = f"exit code {code}"
        if code is not None and code < 0:
            reason = f"signal {signal.Signals(-code).name}"
        return DataError(
            f"{self._name} (pid {self._process.pid}) died with {reason} before batch {job.number} "
            f"of epoch {job.at.epoch}. Signal SIGKILL is often a lack of memory: use fewer "
            "workers. Exit code 1 at the start is often a program without "
            "`if __name__ == '__main__':`"
        )


class _Answer(NamedTuple):
    """What a worker sends back.

    Attributes:
        ticket: the number under which a batch was asked for.
        batch: the batch.
        error: instead of it.
    """

    ticket: int
    batch: Any = None
    error: BaseException | None = None


def _serve(connection: Connection, node: BatchNode) -> None:
    """Read batches until the connection is closed."""
    # Ctrl-C is for the program, which closes the connection.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    jax.config.update("jax_platforms", "cpu")
    while True:
        try:
            ticket, has_x64, job = connection.recv()
        except (EOFError, OSError):
            return
        try:
            answer = _Answer(ticket, _read(has_x64, node, job))
        except (Exception, SystemExit) as error:
            answer = _Answer(ticket, error=_make_sendable(error))
        try:
            connection.send(answer)
        except BrokenPipeError:
            return
        except (PicklingError, AttributeError, TypeError) as error:
            text = f"a batch cannot be sent from a worker process: {error}"
            connection.send(_Answer(ticket, error=DataError(text)))


def _make_sendable(error: BaseException) -> BaseException:
    """Return an exception that another process can raise, with the traceback as a note."""
    note = f"In a worker process:\n{''.join(format_exception(error))}"
    notes = [*getattr(error, "__notes__", ()), note]
    error.add_note(note)
    try:
        loads(dumps(error))
    except Exception:
        # Neither its class nor its arguments need arrive, so all that it says is a message.
        substitute = DataError(f"in a worker process: {type(error).__qualname__}: {error}")
        for text in notes:
            substitute.add_note(text)
        return substitute
    return error
