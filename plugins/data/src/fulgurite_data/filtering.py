"""Examples that a predicate keeps."""

from collections.abc import Callable
from os import PathLike
from typing import Any

import numpy as np
from fulgurite.errors import DataError, error_context

from fulgurite_data.content import Mark, look_at
from fulgurite_data.examples import split_rows
from fulgurite_data.nodes import Node, check_fixed, iter_chunks
from fulgurite_data.passes import Pass, start_pass
from fulgurite_data.plans import check_seen, load_or_make

_CHUNK = 1024
"""Examples that a plan looks at at once."""


class Filtered(Node):
    """The examples of another node for which a predicate holds. Which these are is found out when
    it is made, in one pass over all of them; 8 bytes for each are kept.

    Args:
        parent: the other node.
        predicate: called with an example.
        name: what errors and the identity of the dataset call it.
        path: of a file for the numbers of these examples, or None.

    Raises:
        DataError: no example is left, or the file is of another dataset or predicate.
        ConfigurationError: there is a path, and a function holds what cannot be looked into.
    """

    def __init__(
        self,
        parent: Node,
        predicate: Callable[[Any], Any],
        name: str,
        path: str | PathLike[str] | None = None,
    ) -> None:
        self.follow(parent, f"filter({name})")
        check_fixed(parent, "filter", "put filter() before shuffle(), and before map(rng=True)")
        self.parent = parent
        # Not the function itself, which a worker process would need to import.
        self.mark = look_at(predicate)
        if path is not None:
            check_seen(self.identify(), f"{self.stages[-1]}, path={str(path)!r}", "leave path= out")
        self.numbers = load_or_make(
            path,
            self.identify,
            lambda: {"numbers": _find_kept(parent, predicate, self.stages[-1])},
        )["numbers"]
        self.length = len(self.numbers)
        if not self.length:
            raise DataError(f"no example is left after {'.'.join(self.stages)}")

    def look(self) -> Mark:
        return self.mark

    def read(self, indices: np.ndarray, at: Pass) -> Any:
        return self.parent.read(self.numbers[indices], at)

    def read_lengths(self, indices: np.ndarray, at: Pass, leaf: str | None) -> np.ndarray:
        return self.parent.read_lengths(self.numbers[indices], at, leaf)

    def trace(self, index: int, at: Pass) -> str:
        return self.parent.trace(int(self.numbers[index]), at)


def _find_kept(parent: Node, predicate: Callable[[Any], Any], stage: str) -> np.ndarray:
    at = start_pass(0)
    parts = [np.empty(0, np.int64)]
    for indices in iter_chunks(parent.length, _CHUNK):
        flags = []
        for index, example in zip(
            indices.tolist(), split_rows(parent.read(indices, at)), strict=True
        ):
            with error_context(lambda index=index: f"in {stage}, of {parent.trace(index, at)}"):
                flags.append(bool(predicate(example)))
        parts.append(indices[np.array(flags)])
    return np.concatenate(parts)
