"""Examples that a function has changed."""

from collections.abc import Callable
from typing import Any

import numpy as np
from fulgurite.errors import DataError, error_context

from fulgurite_data.content import Mark, look_at
from fulgurite_data.dtypes import StackedNode
from fulgurite_data.examples import split_rows
from fulgurite_data.nodes import Node
from fulgurite_data.passes import Pass


class Mapped(StackedNode):
    """The examples of another node, each changed by a function.

    Args:
        parent: the other node.
        function: called with an example, and with a `numpy.random.Generator` if `has_rng`.
        name: what errors and the identity of the dataset call it.
        has_rng: whether it draws random numbers.
    """

    dtype_advice = "Return arrays of one dtype, such as np.float32(x)"

    def __init__(
        self, parent: Node, function: Callable[..., Any], name: str, has_rng: bool
    ) -> None:
        self.follow(parent, f"map({name}{', rng=True' if has_rng else ''})")
        self.parent = parent
        self.function = function
        self.name = name
        self.has_rng = has_rng
        self.length = parent.length
        self.batch_size = parent.batch_size
        self.is_fixed = parent.is_fixed and not has_rng
        self.level = parent.level + has_rng

    def look(self) -> Mark:
        return look_at(self.function)

    def read_examples(self, indices: np.ndarray, at: Pass) -> list[Any]:
        examples = split_rows(self.parent.read(indices, at))
        key = at.make_key(self.parent.level) if self.has_rng else 0
        results = []
        for index, example in zip(indices.tolist(), examples, strict=True):
            with error_context(lambda index=index: self._describe(index, at)):
                if self.has_rng:
                    # A key of its own for each example: 4 us, where a SeedSequence takes 20.
                    rng = np.random.Generator(np.random.Philox(key=[key, index]))
                    result = self.function(example, rng)
                else:
                    result = self.function(example)
            if result is None:
                raise DataError(
                    f"{self.stages[-1]} returned None for {self.parent.trace(index, at)}: return "
                    "the changed example"
                )
            results.append(result)
        return results

    def trace(self, index: int, at: Pass) -> str:
        return self.parent.trace(index, at)

    def _describe(self, index: int, at: Pass) -> str:
        return f"in {self.stages[-1]}, of {self.parent.trace(index, at)}"
