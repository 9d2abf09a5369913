"""One dataset of the examples of several: in turn, by weights, or side by side."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import numpy as np
from fulgurite.errors import (
    ConfigurationError,
    as_int,
    check_one_of,
    check_positive_int,
)

from fulgurite_data.dataset import Dataset
from fulgurite_data.dtypes import check_equal_dtypes
from fulgurite_data.examples import merge_rows
from fulgurite_data.identity import Identity
from fulgurite_data.indexing import ENDLESS, ENDLESS_ROUNDS
from fulgurite_data.nodes import Node
from fulgurite_data.passes import Pass, start_pass
from fulgurite_data.proportions import Proportions, as_integers
from fulgurite_data.sources import as_dataset

Exhausted = Literal["stop", "restart"]
Length = Literal["strict", "min", "cycle"]
Weights = Mapping[str, float] | Sequence[float]


class Joined(Node):
    """The base of nodes with several parents, of which those that end begin again.

    Args:
        parents: the nodes, by name.
        stage: the line of this one, without the parents.
    """

    def __init__(self, parents: Mapping[str, Node], stage: str) -> None:
        self.names = [*parents]
        self.parents = [*parents.values()]
        self.is_fixed = all(parent.is_fixed for parent in self.parents)
        self.level = max(parent.level for parent in self.parents)
        lines = [" ".join((name, *node.stages)) for name, node in parents.items()]
        self.stages = (*lines, stage)
        self.take_workers(*self.parents)

    def identify(self) -> Identity:
        if self._identity is None:
            identities = [parent.identify() for parent in self.parents]
            lines = [
                " ".join((name, *parent.lines))
                for name, parent in zip(self.names, identities, strict=True)
            ]
            changing = [mark for parent in identities for mark in parent.changing]
            unseen = [what for parent in identities for what in parent.unseen]
            identity = Identity(tuple(lines), tuple(changing), tuple(unseen))
            self._identity = identity.extend(self.stages[-1], self.look())
        return self._identity

    def read_parent(self, number: int, indices: np.ndarray, at: Pass, rounds: int) -> Any:
        """Return examples of a parent, counted through its repetitions.

        Args:
            number: of the parent.
            indices: of the examples, int64 `(k,)`.
            at: the pass over this node.
            rounds: how often the parent is begun in a pass.
        """
        parent = self.parents[number]
        at = at.enter(number)
        if rounds == 1:
            return parent.read(indices, at)
        repetitions, places = np.divmod(indices, parent.length)
        values = np.unique(repetitions)
        orders = [np.flatnonzero(repetitions == value) for value in values]
        parts = [
            parent.read(places[order], at.at_epoch(at.epoch * rounds + int(value)))
            for order, value in zip(orders, values, strict=True)
        ]
        return merge_rows(parts, orders, lambda: self.stages[-1])

    def trace_parent(self, number: int, index: int, at: Pass, rounds: int) -> str:
        """Return where an example of a parent comes from.

        Args:
            number: as of `read_parent`.
            index: as of `read_parent`.
            at: as of `read_parent`.
            rounds: as of `read_parent`.
        """
        repetition, place = divmod(index, self.parents[number].length)
        at = at.enter(number)
        if rounds > 1:
            at = at.at_epoch(at.epoch * rounds + repetition)
        return f"{self.parents[number].trace(place, at)} ({self.names[number]})"


class Mixed(Joined):
    """Examples of several nodes in turn.

    Args:
        parents: the nodes, by name.
        phases: from which place on which proportions count; the first from 0.
        exhausted: see `mix`.
    """

    def __init__(
        self, parents: Mapping[str, Node], phases: Mapping[int, Proportions], exhausted: Exhausted
    ) -> None:
        weights = {start: list(phase.weights) for start, phase in phases.items()}
        stage = weights[0] if len(weights) == 1 else weights
        super().__init__(parents, f"mix({stage}, {exhausted!r})")
        first = np.zeros(1, np.int64)
        examples = {
            name: parent.read(first, start_pass(0).enter(number))
            for number, (name, parent) in enumerate(parents.items())
        }
        check_equal_dtypes(examples, "mix")
        self.starts = np.array([*phases])
        self.phases = [*phases.values()]
        sizes = [parent.length for parent in self.parents]
        # How many places each source had before each phase.
        bases = [np.zeros(len(sizes), np.int64)]
        for phase, places in zip(self.phases, np.diff(self.starts), strict=False):
            bases.append(bases[-1] + phase.count(places.reshape(1))[:, 0])
        self.bases = np.array(bases)
        self.length = self._find_length(sizes, exhausted)
        self.rounds = self._count_rounds(sizes)

    def read(self, indices: np.ndarray, at: Pass) -> Any:
        owners, numbers = self._locate(indices)
        sources = np.unique(owners)
        orders = [np.flatnonzero(owners == source) for source in sources]
        parts = [
            self.read_parent(int(source), numbers[order], at, self.rounds[source])
            for order, source in zip(orders, sources, strict=True)
        ]
        return merge_rows(parts, orders, lambda: self.stages[-1])

    def trace(self, index: int, at: Pass) -> str:
        owners, numbers = self._locate(np.array([index]))
        owner = int(owners[0])
        return self.trace_parent(owner, int(numbers[0]), at, self.rounds[owner])

    def _locate(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the source of each place, and the number of its example, both int64 `(k,)`."""
        owners = np.empty(len(indices), np.int64)
        numbers = np.empty(len(indices), np.int64)
        phase_numbers = np.searchsorted(self.starts, indices, side="right") - 1
        for number in np.unique(phase_numbers):
            order = np.flatnonzero(phase_numbers == number)
            places = indices[order] - self.starts[number]
            before = self.phases[number].count(places)
            is_owner = self.phases[number].count(places + 1) > before
            owners[order] = is_owner.argmax(0)
            counts = before + self.bases[number][:, None]
            numbers[order] = counts[owners[order], np.arange(len(order))]
        return owners, numbers

    def _find_length(self, sizes: list[int], exhausted: Exhausted) -> int:
        if exhausted == "restart":
            return ENDLESS if len(self.phases) > 1 else self.phases[0].find_cover(sizes)
        for number, phase in enumerate(self.phases):
            left = [
                size if size >= ENDLESS else max(size - int(base), 0)
                for size, base in zip(sizes, self.bases[number], strict=True)
            ]
            start = int(self.starts[number])
            end = min(start + phase.find_length(left), ENDLESS)
            if number + 1 == len(self.phases) or end < self.starts[number + 1]:
                return end
        return 0

    def _count_rounds(self, sizes: list[int]) -> list[int]:
        """Return how often each source is begun in a pass."""
        if self.length >= ENDLESS:
            return [1 if size >= ENDLESS else ENDLESS_ROUNDS for size in sizes]
        number = int(np.searchsorted(self.starts, self.length, side="right")) - 1
        places = np.array([self.length - self.starts[number]])
        counts = self.bases[number] + self.phases[number].count(places)[:, 0]
        return [max(math.ceil(int(n) / size), 1) for n, size in zip(counts, sizes, strict=True)]


class Zipped(Joined):
    """Examples of several nodes side by side.

    Args:
        parents: the nodes, by name.
        length: see `zip_datasets`.
        is_tuple: whether an example is a tuple instead of a dictionary.
    """

    def __init__(self, parents: Mapping[str, Node], length: Length, is_tuple: bool) -> None:
        super().__init__(parents, f"zip_datasets({length!r})")
        sizes = [parent.length for parent in self.parents]
        if length == "strict" and len(set(sizes)) > 1:
            listed = ", ".join(f"{n} has {size}" for n, size in zip(self.names, sizes, strict=True))
            raise ConfigurationError(
                f"zip_datasets: the datasets have several lengths: {listed}. Say length='min' to "
                "stop with the shortest, or 'cycle' to begin the shorter ones again"
            )
        self.length = max(sizes) if length == "cycle" else min(sizes)
        batch_sizes = {node.batch_size for node in self.parents if node.batch_size is not None}
        if len(batch_sizes) > 1:
            raise ConfigurationError(
                "zip_datasets: the datasets are mixtures with a schedule for batches of "
                f"{' and '.join(map(str, sorted(batch_sizes)))}: give mix() one batch_size"
            )
        self.batch_size = next(iter(batch_sizes), None)
        self.is_tuple = is_tuple
        self.rounds = [1 if size >= self.length else ENDLESS_ROUNDS for size in sizes]
        if self.length < ENDLESS:
            self.rounds = [max(math.ceil(self.length / size), 1) for size in sizes]

    def read(self, indices: np.ndarray, at: Pass) -> Any:
        parts = [
            self.read_parent(number, indices, at, rounds)
            for number, rounds in enumerate(self.rounds)
        ]
        return tuple(parts) if self.is_tuple else dict(zip(self.names, parts, strict=True))

    def trace(self, index: int, at: Pass) -> str:
        traces = [
            self.trace_parent(number, index, at, rounds)
            for number, rounds in enumerate(self.rounds)
        ]
        return " with ".join(traces)


def mix(
    sources: Mapping[str, Any] | Sequence[Any],
    weights: Weights | None = None,
    *,
    schedule: Mapping[int, Weights] | None = None,
    batch_size: int | None = None,
    exhausted: Exhausted = "stop",
) -> Dataset:
    """Return the examples of several datasets in turn, in exact proportions from the first one on.

    Which source each place is of depends only on its number and on the weights before it, so a
    change at a step changes nothing before that step. Reads the first example of each source:
    all have the same arrays, of the same dtypes.

    Example:
        from fulgurite_data import Arrays, mix

        web, code = Arrays(np.arange(300)), Arrays(np.arange(100))
        mixed = mix({"web": web, "code": code}, {"web": 3, "code": 1})

    Args:
        sources: datasets, by name or in a sequence; or what `as_dataset` takes.
        weights: of each source, by name or in order; equal by default.
        schedule: weights by the step from which on they count, the first from step 0, instead of
            `weights`. A source may have weight 0 at times.
        batch_size: for `schedule`: how many of these examples a step takes, and so the size of
            batches.
        exhausted: `stop` a pass before a source lacks an example for its proportion, or `restart`
            sources that have ended, in another order if they shuffle, until each was read to its
            end; with a schedule endlessly.

    Raises:
        ConfigurationError: a weight is not positive, a source is empty, or names do not fit.
        DataError: the sources have other arrays, or other dtypes.
    """
    check_one_of(exhausted, get_args(Exhausted), "mix: exhausted")
    nodes = _as_nodes(sources, "mix")
    if schedule is None:
        if batch_size is not None:
            raise ConfigurationError("mix: batch_size is for schedule=, whose keys are steps")
        values = _list_weights([1] * len(nodes) if weights is None else weights, nodes, "mix")
        for index, (name, weight) in enumerate(zip(nodes, values, strict=True)):
            if not weight:
                raise ConfigurationError(
                    f"mix: the weight of source {index} ({name}) is 0, so it would never be read: "
                    "leave it out"
                )
        return Dataset(Mixed(nodes, {0: Proportions(as_integers(values))}, exhausted))
    if weights is not None:
        raise ConfigurationError("mix: give weights or schedule, not both")
    batch_size = as_int(batch_size)
    check_positive_int(batch_size, "mix: batch_size, how many examples a step of schedule takes,")
    steps = [as_int(step) for step in schedule]
    if not steps or steps[0] != 0 or steps != sorted(set(steps)):
        raise ConfigurationError(f"mix: the steps of schedule are {steps}; they must rise from 0")
    phases = {}
    for step, step_weights in zip(steps, schedule.values(), strict=True):
        values = _list_weights(step_weights, nodes, f"mix, from step {step} on")
        phases[step * batch_size] = Proportions(as_integers(values))
    for index, name in enumerate(nodes):
        if not any(phase.weights[index] for phase in phases.values()):
            raise ConfigurationError(
                f"mix: the weight of source {index} ({name}) is 0 at all steps: leave it out"
            )
    node = Mixed(nodes, phases, exhausted)
    node.batch_size = batch_size
    return Dataset(node)


def zip_datasets(
    sources: Mapping[str, Any] | Sequence[Any], *, length: Length = "strict"
) -> Dataset:
    """Return examples that are dictionaries, or tuples, of an example of each of several datasets.

    Example:
        from fulgurite_data import Arrays, zip_datasets

        pairs = zip_datasets({"x": Arrays(np.arange(6)), "y": Arrays(np.ones(3))}, length="cycle")
        pairs.get(5)  # {"x": 5, "y": 1.0}

    Args:
        sources: datasets, by name or in a sequence; or what `as_dataset` takes.
        length: `strict` for datasets of one length, `min` to stop with the shortest, `cycle` to
            begin shorter ones again, in another order if they shuffle.

    Raises:
        ConfigurationError: lengths differ, or a source is empty.
    """
    check_one_of(length, get_args(Length), "zip_datasets: length")
    is_tuple = not isinstance(sources, Mapping)
    return Dataset(Zipped(_as_nodes(sources, "zip_datasets"), length, is_tuple))


def _as_nodes(sources: Any, where: str) -> dict[str, Node]:
    """Return the nodes of several sources by name; those of a sequence are called by number."""
    if not isinstance(sources, Mapping):
        sources = {str(index): source for index, source in enumerate(sources)}
    if not sources:
        raise ConfigurationError(f"{where}: there are no sources")
    nodes = {}
    for index, (name, source) in enumerate(sources.items()):
        if not isinstance(name, str):
            raise ConfigurationError(
                f"{where}: the name of source {index} is {name!r}; it must be a string"
            )
        node = as_dataset(source, f"{where}: source {index} ({name})").node
        if not node.length:
            raise ConfigurationError(
                f"{where}: source {index} ({name}) is empty ({'.'.join(node.stages)})"
            )
        nodes[name] = node
    return nodes


def _list_weights(weights: Weights, nodes: Mapping[str, Node], where: str) -> list[float]:
    """Return the weights in the order of the sources."""
    names = [*nodes]
    if isinstance(weights, Mapping):
        if {*weights} != {*names}:
            raise ConfigurationError(
                f"{where}: weights are for {', '.join(map(repr, weights))}, and the sources are "
                f"{', '.join(map(repr, names))}: give one for each. Those of a sequence "
                "are in order, [3, 1]"
            )
        values = [weights[name] for name in names]
    else:
        values = [*weights]
        if len(values) != len(names):
            raise ConfigurationError(
                f"{where}: there are {len(values)} weights and {len(names)} sources: give one for "
                "each"
            )
    for index, (name, value) in enumerate(zip(names, values, strict=True)):
        if isinstance(value, bool) or not isinstance(value, int | float | np.number):
            raise ConfigurationError(f"{where}: the weight of source {index} ({name}) is {value!r}")
        if not 0 <= value < math.inf:
            raise ConfigurationError(
                f"{where}: the weight of source {index} ({name}) is {value}; it must be a finite "
                "number, and not negative"
            )
    if not any(values):
        raise ConfigurationError(f"{where}: all weights are 0")
    return [float(value) for value in values]
