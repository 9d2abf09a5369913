"""Comparing what a run has recorded with what its steps compute again."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import fulgurite as fg
from fulgurite.errors import CheckpointError, ConfigurationError
from fulgurite_checkpoint import restore_state
from fulgurite_logging import JSONLLogger, iter_records
from fulgurite_runs import dumps, loads

from fulgurite_replay.digests import Digests, digest_state, find_difference, read_digests
from fulgurite_replay.observing import Observer
from fulgurite_replay.rerun import Recorded, find_last_step, train_again

_RECORDS_FILE = "records.jsonl"
"""In which `JSONLLogger` keeps the exact records of a run."""


@dataclass(frozen=True)
class Difference:
    """What is not as a run recorded it.

    Example:
        from fulgurite_replay import Difference

        print(Difference(20, "checkpoint", "module.weight differs"))

    Attributes:
        step: at which it shows.
        source: `records`, `digests` or `checkpoint`.
        text: what differs.
    """

    step: int
    source: str
    text: str

    def __str__(self) -> str:
        return f"step {self.step}: {self.text}"


@dataclass
class Proof:
    """What a comparison of a run with its own steps has found.

    Example:
        from fulgurite_replay import Proof

        proof = Proof(start=0, stop=20)
        assert proof.is_equal

    Attributes:
        start: the step from which the steps were executed.
        stop: the last one.
        counts: how much was compared, by kind.
        differences: what is not as it was recorded, by step.
    """

    start: int
    stop: int
    counts: dict[str, int] = field(default_factory=dict)
    differences: list[Difference] = field(default_factory=list)

    @property
    def is_equal(self) -> bool:
        """Whether everything is as it was recorded."""
        return not self.differences

    def __str__(self) -> str:
        steps = f"steps {self.start + 1} to {self.stop}"
        compared = ", ".join(
            f"{count} {kind.removesuffix('s') if count == 1 else kind}"
            for kind, count in self.counts.items()
        )
        if self.is_equal:
            return f"{steps} are as recorded ({compared})"
        return f"{steps} are not as recorded ({compared}): {self.differences[0]}"


def verify(recorded: Recorded, first: int = 0, last: int | None = None) -> Proof:
    """Execute steps of a run again, and compare their states and exact records with those of the
    run, bit for bit.

    Compared are all records of `records.jsonl`, the digests of `StateDigest`, and every checkpoint
    on the way.

    Args:
        recorded: the run.
        first: the step to begin at; execution begins at the newest checkpoint that is not after it,
            and what comes after that one is compared.
        last: the last step; by default the newest checkpoint's.

    Raises:
        CheckpointError: the run has no checkpoint where one is needed, or there is nothing to
            compare with.
        ConfigurationError: there are no such steps.
    """
    last = find_last_step(recorded) if last is None else last
    if not 0 <= first < last:
        raise ConfigurationError(
            f"there are no steps {first}:{last}: give A:B with 0 <= A < B; the newest checkpoint "
            "is the last step by default"
        )
    start = recorded.find_start(first)
    proof = Proof(start or 0, last)
    checkpoints = [
        (step, path) for step, path in recorded.list_checkpoints() if proof.start < step <= last
    ]
    digests: dict[int, Digests] = {
        step: values
        for step, values in read_digests(recorded.directory.path).items()
        if proof.start < step <= last
    }
    observer = Observer(
        {step: partial(_compare_checkpoint, proof, path) for step, path in checkpoints},
        stop=last,
        look_at={step: partial(_compare_digests, proof, digests[step]) for step in digests},
    )
    end = train_again(recorded, start, observer)
    if end < last:
        raise ConfigurationError(
            f"the run has {end} steps, so that it cannot be compared up to step "
            f"{last}: give a smaller one"
        )
    compare_records(proof, recorded, observer.records, is_whole=start is None)
    if not any(proof.counts.values()):
        raise CheckpointError(
            f"{recorded.directory.path} has nothing to compare the steps {proof.start + 1} to "
            f"{last} with: no exact record of 'jsonl', no digest of StateDigest, no checkpoint"
        )
    proof.differences.sort(key=lambda difference: difference.step)
    return proof


def _compare_digests(proof: Proof, recorded: Digests, run: fg.Run) -> None:
    """Compare the state as a step has left it with the digests of the run."""
    _count(proof, "digests")
    current = digest_state(run.state)
    path = find_difference(recorded, current)
    if path is not None:
        text = f"{path} has the digest {current.get(path)}, recorded is {recorded.get(path)}"
        proof.differences.append(Difference(run.step, "digests", text))


def _compare_checkpoint(proof: Proof, saved_in: Path, run: fg.Run) -> None:
    """Compare the state at the end of a step with a checkpoint of the run."""
    _count(proof, "checkpoints")
    try:
        # Of weights alone only those are compared.
        saved = restore_state(saved_in, like=run.state, fills_in=True)
    except CheckpointError as error:
        proof.differences.append(Difference(run.step, "checkpoint", str(error)))
        return
    path = find_difference(digest_state(saved), digest_state(run.state))
    if path is not None:
        text = f"{path} is not that of the checkpoint {saved_in}"
        proof.differences.append(Difference(run.step, "checkpoint", text))


def compare_records(
    proof: Proof, recorded: Recorded, again: Sequence[fg.Record], *, is_whole: bool
) -> None:
    """Compare the exact records of a run with those that its steps gave again; note the first
    difference in the proof.

    Args:
        proof: says of which steps.
        recorded: the run.
        again: the records that the steps gave.
        is_whole: whether the steps were executed from the begin of the run, which may have records
            of its own.
    """
    if not (recorded.directory.path / _RECORDS_FILE).is_file():
        return  # the run was not logged
    written: list[fg.Record] = []
    try:
        written.extend(iter_records(recorded.directory.path))
    except ConfigurationError as error:  # a line is damaged
        step = written[-1].step if written else proof.start
        proof.differences.append(Difference(step, "records", str(error)))
        return
    expected, actual = (
        [
            record
            for record in every
            if record.kind in JSONLLogger.kinds
            and (proof.start < record.step <= proof.stop or (is_whole and record.step == 0))
        ]
        for every in (written, again)
    )
    _count(proof, "records", len(expected))
    difference = _find_differing_record(_group(expected), _group(actual))
    if difference is not None:
        proof.differences.append(difference)


_Group = tuple[int, str, str]
"""Step, source and kind of records."""


def _group(records: Sequence[fg.Record]) -> dict[_Group, list[dict[str, Any]]]:
    """Return the values of records by step, source and kind, as they are written."""
    groups: dict[_Group, list[dict[str, Any]]] = {}
    for record in records:
        group = (record.step, record.source, record.kind)
        groups.setdefault(group, []).append(loads(dumps(record.values)))
    return groups


def _find_differing_record(
    expected: dict[_Group, list[dict[str, Any]]], actual: dict[_Group, list[dict[str, Any]]]
) -> Difference | None:
    """Return the first difference, by step, between records of a run and those that its steps gave
    again; None without one."""
    groups = sorted({**expected, **actual}, key=lambda group: group[0])
    for group in groups:
        step, source, _ = group
        for old, new in zip_longest(expected.get(group, []), actual.get(group, [])):
            text = _compare_values(source, old, new)
            if text is not None:
                return Difference(step, "records", text)
    return None


def _compare_values(
    source: str, old: dict[str, Any] | None, new: dict[str, Any] | None
) -> str | None:
    """Return what differs between a record and the one that a step gave again; None if nothing
    does.

    Args:
        source: of both.
        old: the values that the run recorded; None if it has no such record.
        new: those that the step gave; None if it gave none.
    """
    if new is None:
        return f"the step gives no record of {source!r} with {', '.join(old or {})}"
    if old is None:
        return f"the run has no record of {source!r} with {', '.join(new)}"
    for name in {**old, **new}:
        recorded, current = (_format(values, name) for values in (old, new))
        if recorded != current:
            return f"{source}/{name} is {current}, recorded is {recorded}"
    return None


def _format(values: dict[str, Any], name: str) -> str:
    return dumps(values[name]) if name in values else "missing"


def _count(proof: Proof, kind: str, number: int = 1) -> None:
    proof.counts[kind] = proof.counts.get(kind, 0) + number


@dataclass(frozen=True)
class Divergence:
    """Where two runs part.

    Example:
        from fulgurite_replay import Divergence

        print(Divergence(step=50, last_equal=40, leaves=("module.weight",), num_compared=5))

    Attributes:
        step: the first step whose states differ; None if none does.
        last_equal: the last step before it whose states are equal; None without one.
        leaves: the paths of what differs at that step.
        num_compared: at how many steps both have a digest.
    """

    step: int | None
    last_equal: int | None
    leaves: tuple[str, ...]
    num_compared: int

    def __str__(self) -> str:
        if self.step is None:
            return f"equal at all {self.num_compared} steps, the last of them {self.last_equal}"
        before = "" if self.last_equal is None else f"equal at step {self.last_equal}, "
        others = len(self.leaves) - 1
        more = f" and {others} more" if others else ""
        return f"{before}different at step {self.step}: {self.leaves[0]}{more}"


def bisect(good: Path, bad: Path) -> Divergence:
    """Return the first step at which the states of two runs differ, by their digests.

    Args:
        good: the directory of a run with `StateDigest`.
        bad: that of the other one, of the same program.

    Raises:
        ConfigurationError: they have no digest of a step in common.
    """
    digests = [read_digests(run) for run in (good, bad)]
    steps = sorted(digests[0].keys() & digests[1].keys())
    if not steps:
        raise ConfigurationError(
            f"{good} and {bad} have no digests of a common step: train both with "
            "StateDigest(every=...) of fulgurite-replay"
        )
    last_equal = None
    for step in steps:
        leaves = tuple(_iter_differing(digests[0][step], digests[1][step]))
        if leaves:
            return Divergence(step, last_equal, leaves, len(steps))
        last_equal = step
    return Divergence(None, last_equal, (), len(steps))


def _iter_differing(first: Digests, second: Digests) -> Iterator[str]:
    for path in {**first, **second}:
        if first.get(path) != second.get(path):
            yield path
