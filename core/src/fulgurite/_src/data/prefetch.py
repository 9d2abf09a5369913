"""A thread that reads ahead."""

import threading
from collections.abc import Generator
from queue import Empty, Queue
from typing import Any, TypeVar

import jax

from fulgurite._src.data.leaves import has_x64
from fulgurite._src.waits import WaitAbandoned

Item = TypeVar("Item")


def prefetch(items: Generator[Item, None, None], depth: int) -> Generator[Item, None, None]:
    """Yield the same items, made by a thread.

    Args:
        items: closed by the thread when it ends.
        depth: how many finished items wait at most; one more may be in the making.
    """
    queue: Queue[Item | BaseException | None] = Queue(maxsize=depth)
    stopped = threading.Event()
    is_x64 = has_x64()  # what is read depends on it

    def produce() -> None:
        last: BaseException | None = None
        try:
            with jax.enable_x64(is_x64):
                for item in items:
                    # After `stopped` is set the queue is emptied once, so that this always finds
                    # room.
                    queue.put(item)
                    if stopped.is_set():
                        return
        except BaseException as error:
            last = error
        finally:
            items.close()
        if not stopped.is_set():
            queue.put(last)

    thread = threading.Thread(target=produce, name="fulgurite-data", daemon=True)
    thread.start()
    patience = 5.0
    try:
        while True:
            item = queue.get()
            if item is None:
                return
            if isinstance(item, BaseException):
                raise item
            yield item
    except WaitAbandoned:
        patience = 0.0  # it was waited for long enough
        raise
    finally:
        stopped.set()
        _empty(queue)
        thread.join(timeout=patience)


def _empty(queue: Queue[Any]) -> None:
    try:
        while True:
            queue.get_nowait()
    except Empty:
        return
