"""One dtype for each array of a dataset, whatever examples are in a batch."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from fulgurite.errors import DataError, error_context

from fulgurite_data.examples import find_dtypes, has_arrays, simplify_dtype, stack_rows
from fulgurite_data.nodes import Node
from fulgurite_data.passes import Pass, start_pass


def is_numeric(dtype: np.dtype) -> bool:
    """Return whether arrays of a dtype hold numbers or bools.

    Args:
        dtype: of NumPy, or such as bfloat16, which NumPy takes for no number.
    """
    return jnp.issubdtype(dtype, np.bool_) or jnp.issubdtype(dtype, np.number)


def is_real(dtype: np.dtype) -> bool:
    """Return whether arrays of a dtype hold numbers or bools that are not complex.

    Args:
        dtype: as of `is_numeric`.
    """
    return is_numeric(dtype) and not jnp.issubdtype(dtype, np.complexfloating)


class StackedNode(Node):
    """The base of nodes whose examples come one by one, from a function or a file. Example 0 says
    which arrays an example has, and their dtypes: a batch would else have the dtype of whatever
    examples landed in it.

    Attributes:
        dtype_advice: what to do where an example has another dtype, for the error.
    """

    dtype_advice: str
    _dtypes: dict[str, np.dtype] | None = None

    def read_examples(self, indices: np.ndarray, at: Pass) -> list[Any]:
        """Return examples, each a pytree of arrays, numbers and strings.

        Args:
            indices: as of `read`.
            at: as of `read`.
        """
        raise NotImplementedError(f"{type(self).__name__} has no read_examples: define it")

    def read(self, indices: np.ndarray, at: Pass) -> Any:
        examples = self.read_examples(indices, at)
        for index, example in zip(indices.tolist(), examples, strict=True):
            if not has_arrays(example):
                raise DataError(
                    f"{self.trace(index, at)} in {self.stages[-1]} is {example!r:.60}, which holds "
                    "no array"
                )
        if self._dtypes is None:
            self._dtypes = self._find_dtypes()
        dtypes = self._dtypes

        def check(path: str, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
            if path not in dtypes:
                name = self._trace(indices[0], at)
                raise DataError(
                    f"{self.stages[-1]}: examples have several structures: {name} has data{path}, "
                    f"and example 0 has data{', data'.join(dtypes)}. Return the same keys for "
                    "every example"
                )
            return [
                self._check_dtype(
                    path, array, dtypes[path], lambda k=k: self._trace(indices[k], at)
                )
                for k, array in enumerate(arrays)
            ]

        return stack_rows(examples, lambda: self.stages[-1], check)

    def _find_dtypes(self) -> dict[str, np.dtype]:
        note = f"in example 0 of {self.stages[-1]}, which decides the dtypes. {self.dtype_advice}"
        with error_context(lambda: note):
            (example,) = self.read_examples(np.zeros(1, np.int64), start_pass(0))
            return find_dtypes(example, f"example 0 of {self.stages[-1]}")

    def _trace(self, index: Any, at: Pass) -> str:
        return self.trace(int(index), at)

    def _check_dtype(
        self, path: str, array: np.ndarray, expected: np.dtype, trace: Callable[[], str]
    ) -> np.ndarray:
        if array.dtype == expected or simplify_dtype(array.dtype) == expected:
            return array
        if not array.size:
            return array.astype(expected)  # an empty list says nothing of a dtype
        raise DataError(
            f"{self.stages[-1]}: data{path} is {array.dtype} in {trace()}, and {expected} in "
            f"example 0, so that a batch would have the dtype of what is in it. {self.dtype_advice}"
        )


def check_equal_dtypes(examples: Mapping[str, Any], where: str) -> None:
    """Raise unless examples of several sources have the same arrays, each of one dtype.

    Args:
        examples: of each source, by its name.
        where: what joins them.

    Raises:
        DataError: structures or dtypes differ.
    """
    first, *others = examples
    expected = find_dtypes(examples[first], f"source {first}")
    for name in others:
        dtypes = find_dtypes(examples[name], f"source {name}")
        if [*dtypes] != [*expected]:
            raise DataError(
                f"{where}: the examples of several sources have several structures: those of "
                f"{first} have data{', data'.join(expected)}, and those of {name} "
                f"data{', data'.join(dtypes)}. Map them to one"
            )
        for path, dtype in dtypes.items():
            if dtype != expected[path]:
                raise DataError(
                    f"{where}: data{path} is {expected[path]} in source {first}, and {dtype} in "
                    f"source {name}, so that a batch would have the dtype of what is in it. Map "
                    "them to one dtype"
                )
