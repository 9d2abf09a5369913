"""Where batches come from: arrays in memory, or any iterable of pytrees of arrays.

One pass over a source is one epoch. What can be iterated again repeats; an iterator does not. A yielded array must
never be written again, because jax may alias it: wrap a source that reuses buffers in ``Data(source, copy=True)``.
"""

from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property
from typing import Any, Literal, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr

from fulgurite.errors import ConfigurationError, DataError, did_you_mean

Seed = int | tuple[int, ...]


# No array types on the fields of these two: jax also builds them around placeholders.
@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class Masked:
    """A batch with padding: a pytree of arrays `(batch, ...)`, and a bool mask `(batch,)` that is False for padding."""

    value: Any
    mask: Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class Indexed:
    """A batch of data that is on the device, where `ArrayData.gather` makes it: the examples, int32 `(batch,)`, and the
    mask of a source that pads, or None. The index of padding is the number of examples, which is out of bounds.
    """

    indices: Any
    mask: Any


@runtime_checkable
class Stateful(Protocol):
    """A source that can go on in the middle of an epoch.

    `state` is a JSON value for the place right after the batch yielded last; after `restore`, the next `iter()` goes on
    from there.
    """

    def state(self) -> Any: ...

    def restore(self, state: Any) -> None: ...


@dataclass(frozen=True, eq=False)
class ArrayData:
    """Arrays in memory, cut into batches. It is immutable and holds no place: any batch of any epoch can be had.

    Attributes:
        arrays: pytree of arrays `(examples, ...)` of numbers or bools, not copied. Bad ones are a `DataError`.
        batch_size: examples a batch, over all processes.
        shuffle: whether each epoch has an order of its own; else it is that of the arrays.
        seed: of the orders, instead of the one that `epoch` is given.
        remainder: of examples that do not fill a batch: ``"keep"`` makes a smaller one, ``"drop"`` none, and ``"pad"``
            fills it up with zeros; every batch is then `Masked`.
        on_device: whether batches are `Indexed`, to be gathered from `resident` on the device.
    """

    arrays: Any = field(repr=False)
    batch_size: int
    _: KW_ONLY
    shuffle: bool = False
    seed: Seed | None = None
    remainder: Literal["keep", "drop", "pad"] = "keep"
    on_device: bool = False
    examples: int = field(init=False)
    _leaves: tuple[np.ndarray, ...] = field(init=False, repr=False)
    _structure: Any = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.batch_size, int) or self.batch_size < 1:
            raise ConfigurationError(f"ArrayData: batch_size is {self.batch_size!r}; it must be a positive integer.")
        if self.remainder not in ("keep", "drop", "pad"):
            raise ConfigurationError(f"ArrayData: remainder is {self.remainder!r}; choose 'keep', 'drop' or 'pad'.")
        _words(self.seed or 0)
        leaves, structure = jax.tree_util.tree_flatten_with_path(self.arrays)
        arrays = {f"data{keystr(path)}": np.asarray(as_array(path, leaf)) for path, leaf in leaves}
        object.__setattr__(self, "examples", _common_length(arrays))
        object.__setattr__(self, "_leaves", tuple(arrays.values()))
        object.__setattr__(self, "_structure", structure)
        if not len(self):
            raise DataError(f"ArrayData: {self.examples} examples make no batch of {self.batch_size}.")

    def __len__(self) -> int:
        """Batches an epoch."""
        full, rest = divmod(self.examples, self.batch_size)
        return full + (rest > 0 and self.remainder != "drop")

    def __iter__(self) -> Iterator[Any]:
        """Epoch 0, with seed 0 unless this source has its own."""
        return self.epoch(0, seed=0)

    def epoch(self, number: int, *, seed: Seed, start: int = 0, process: tuple[int, int] = (0, 1)) -> Iterator[Any]:
        """The batches of epoch `number` from batch `start` on, in an order that seed and epoch alone decide.

        `seed` (ints that are not negative) is for a source that has none of its own. `process` is the index and number
        of the processes that share each batch: each gets an equal part of it, in one piece.
        """
        index, count = process
        rest = self.examples % self.batch_size if self.remainder == "keep" else 0
        if not 0 <= index < count or self.batch_size % count or rest % count:
            raise ConfigurationError(
                f"ArrayData: process {index} of {count} cannot have an equal part of each batch: batch_size is "
                f"{self.batch_size}, and {rest} examples are left for a last one (choose remainder='drop' or 'pad')."
            )
        order = None
        if self.shuffle:
            entropy = np.random.SeedSequence([*_words(seed if self.seed is None else self.seed), number])
            order = np.random.Generator(np.random.Philox(entropy)).permutation(self.examples)
        return self._batches(order, start, index, count)

    def _batches(self, order: np.ndarray | None, start: int, index: int, count: int) -> Iterator[Any]:
        leaves, unflatten, padding = self._leaves, self._structure.unflatten, 0
        if self.on_device:
            indices = np.arange(self.examples) if order is None else order
            leaves, order, padding = (indices.astype(np.int32),), None, self.examples

        def rows(low: int, high: int) -> list[np.ndarray]:
            if order is None:
                return [leaf[low:high] for leaf in leaves]
            chosen = order[low:high]
            return [leaf.take(chosen, 0) for leaf in leaves]

        def batch(parts: list[np.ndarray], present: np.ndarray) -> Any:
            mask = present if self.remainder == "pad" else None
            if self.on_device:
                return Indexed(parts[0], mask)
            return unflatten(parts) if mask is None else Masked(unflatten(parts), mask)

        full, rest = divmod(self.examples, self.batch_size)
        share = self.batch_size // count
        everyone = np.ones(share, bool)
        for low in range(start * self.batch_size + index * share, full * self.batch_size, self.batch_size):
            yield batch(rows(low, low + share), everyone)
        if start < len(self) > full:
            share = rest // count if self.remainder == "keep" else share
            low = full * self.batch_size + index * share
            present = np.arange(low, low + share) < self.examples

            def filled(part: np.ndarray) -> np.ndarray:
                return np.concatenate([part, np.full((share - len(part), *part.shape[1:]), padding, part.dtype)])

            yield batch([filled(part) for part in rows(low, low + share)], present)

    @cached_property
    def resident(self) -> Any:
        """The pytree of all arrays on the default device."""
        return self._structure.unflatten([jnp.asarray(leaf) for leaf in self._leaves])

    @staticmethod
    def gather(resident: Any, indexed: Indexed) -> Any:
        """The batch that `indexed` stands for. Pure; meant to be traced."""
        mode = "promise_in_bounds" if indexed.mask is None else "fill"
        value = jax.tree.map(lambda array: array.at[indexed.indices].get(mode=mode, fill_value=0), resident)
        return value if indexed.mask is None else Masked(value, indexed.mask)


@dataclass(frozen=True, eq=False)
class Data:
    """A source with options.

    Attributes:
        source: any iterable of pytrees of arrays.
        copy: whether each array is copied, for a source that writes to one again after yielding it.
        prefetch: batches that a background thread keeps ready; 0 for no thread.
    """

    source: Any
    _: KW_ONLY
    copy: bool = False
    prefetch: int = 2

    def __post_init__(self) -> None:
        if not hasattr(self.source, "__iter__") and not hasattr(self.source, "__getitem__"):
            raise ConfigurationError(f"data must be an iterable of batches, not {self.source!r}.")
        if self.prefetch < 0:
            raise ConfigurationError(f"Data: prefetch is {self.prefetch}; it must be 0 or a positive integer.")


def as_data(source: Any) -> Data:
    """`source`, with the default options if it has none: no thread for what is in memory."""
    if isinstance(source, Data):
        return source
    return Data(source, prefetch=0 if isinstance(source, ArrayData | list | tuple) else 2)


def part_of(data: Any, part: str, name: str | None = None) -> Any:
    """`data` itself, or a part of an object that holds several sources: `train`, `evaluations[name]`, `predict`."""
    if data is None:
        raise ConfigurationError("no data was given")
    if not hasattr(data, "train") or not hasattr(data, "evaluations"):
        return data
    found = getattr(data, part)
    if name is not None and name not in found:
        raise DataError(f"{type(data).__name__} has no evaluation {name!r}. {did_you_mean(name, found)}")
    return found if name is None else found[name]


def resident_of(data: Any) -> Any:
    """The arrays that the batches of `data` are gathered from on the device, or None."""
    source = as_data(data).source
    return source.resident if isinstance(source, ArrayData) and source.on_device else None


def as_array(path: tuple[Any, ...], leaf: Any) -> np.ndarray | jax.Array:
    """`leaf` as an array: jax arrays as they are, all else by NumPy; a `DataError` if it does not hold numbers."""
    if isinstance(leaf, jax.Array):
        return leaf
    array = np.asarray(leaf)
    # bfloat16 and its like are of kind V to NumPy, as are records, which jax does not know
    if array.dtype.kind in "biufc" or (array.dtype.kind == "V" and jnp.issubdtype(array.dtype, np.number)):
        return array
    what = f"data{keystr(path)} is a {type(leaf).__name__} of dtype {array.dtype}"
    raise DataError(f"{what}, but batches hold arrays of numbers or bools: encode it first.")


def _common_length(arrays: dict[str, np.ndarray]) -> int:
    lengths = {where: array.shape[0] if array.ndim else 0 for where, array in arrays.items()}
    first, length = next(iter(lengths.items()), ("", 0))
    for where, other in lengths.items():
        if other != length or not other:
            counts = f"{where} has {other} examples, {first} has {length}"
            raise DataError(f"ArrayData: {counts}; all arrays must have the same number of them, and at least 1.")
    return length


def _words(seed: Seed) -> tuple[int, ...]:
    words = seed if isinstance(seed, tuple) else (seed,)
    if any(not isinstance(word, int) or word < 0 for word in words):
        raise ConfigurationError(f"the data's seed is {seed!r}; it must be ints that are not negative.")
    return words
