"""Many small arrays as one vector a dtype."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

Vectors = tuple[Array, ...]


class Packing:
    """The place of each of a list of arrays in vectors of their dtypes; booleans travel with the int32s.

    Arguments:
        structs: the arrays' shapes and dtypes.
    """

    def __init__(self, structs: Sequence[Any]) -> None:
        self.structs = list(structs)
        self.dtypes = list(dict.fromkeys(_vector_dtype(struct) for struct in self.structs))
        ends = {dtype: 0 for dtype in self.dtypes}
        self._places: list[tuple[int, int, int]] = []
        for struct in self.structs:
            dtype = _vector_dtype(struct)
            self._places.append((self.dtypes.index(dtype), ends[dtype], ends[dtype] + struct.size))
            ends[dtype] += struct.size

    def pack(self, values: Sequence[Array]) -> Vectors:
        """The vectors that hold `values`."""
        groups: list[list[Array]] = [[] for _ in self.dtypes]
        for value, (vector, _, _) in zip(values, self._places, strict=True):
            groups[vector].append(jnp.ravel(value).astype(self.dtypes[vector]))
        return tuple(jnp.concatenate(group) for group in groups)

    def unpack(self, vectors: Sequence[Any]) -> list[Any]:
        """The values again, jax arrays of jax vectors and NumPy arrays of NumPy vectors."""
        return [
            vectors[vector][start:end].reshape(struct.shape).astype(struct.dtype)
            for struct, (vector, start, end) in zip(self.structs, self._places, strict=True)
        ]


def _vector_dtype(struct: Any) -> Any:
    return jnp.dtype(jnp.int32) if struct.dtype == jnp.bool_ else jnp.dtype(struct.dtype)
