"""Digests of a train state: which leaf differs between two runs, and from which step on."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fulgurite as fg
import jax
import jax.numpy as jnp
from fulgurite.errors import ConfigurationError
from fulgurite.plugins import as_trigger, hide_constructor_frames, leaves_with_paths
from fulgurite_runs import RunDirectory, RunPlugin
from jaxtyping import Array, Shaped, UInt32

from fulgurite_replay.attempts import list_last_kept_steps
from fulgurite_replay.lines import append_line, iter_entries, make_line_error

DIGESTS_FILE = "digests.jsonl"
"""Where a run keeps the digests of its states: a line of JSON for each of these steps."""
_FIELDS = ("module", "model_state", "opt_state", "key", "plugin_states")
"""What of a train state makes the next one; the metric window and the step number do not."""

Digests = dict[str, str]
"""The digest of each array of a state, 16 hexadecimal digits, by its path."""


def digest_state(state: fg.TrainState) -> Digests:
    """Return the digest of each array of a train state by its path, without its metrics.

    Two arrays of the same bits have the same digest, wherever they lie on the devices. A single bit
    that differs always changes it; of other differences one in 2**64 would go unnoticed.

    Args:
        state: the state; it is waited for.
    """
    return start_digest(state).read()


@dataclass(frozen=True, eq=False)
class PendingDigests:
    """Digests that the device has yet to compute.

    Example:
        from fulgurite_replay.digests import start_digest

        pending = start_digest(engine.init_state(model, data))
        pending.read()["module.linear.bias"]

    Attributes:
        paths: of the arrays.
        sums: two words for each array.
    """

    paths: list[str]
    sums: UInt32[Array, "arrays 2"]

    def read(self) -> Digests:
        """Return the digests; waits for the device."""
        pairs = zip(self.paths, jax.device_get(self.sums).tolist(), strict=True)
        return {path: f"{high:08x}{low:08x}" for path, (high, low) in pairs}


def start_digest(state: fg.TrainState, paths: list[str] | None = None) -> PendingDigests:
    """Have the device digest a state, and wait neither for the state nor for the digests.

    Args:
        state: the state, which may be donated as soon as this returns.
        paths: those of `list_paths`, if they are known of a state of the same structure.
    """
    sums = _digest_all(list_arrays(state))
    sums.copy_to_host_async()
    return PendingDigests(list_paths(state) if paths is None else paths, sums)


def list_arrays(state: fg.TrainState) -> list[jax.Array]:
    """Return the arrays of a state that make the next one, of random keys the numbers."""
    leaves = jax.tree.leaves(_get_parts(state))
    return [as_plain(leaf) for leaf in leaves if isinstance(leaf, jax.Array)]


def list_paths(state: fg.TrainState) -> list[str]:
    """Return the paths of the arrays of `list_arrays`."""
    leaves = leaves_with_paths(_get_parts(state))
    return [path for path, leaf in leaves if isinstance(leaf, jax.Array)]


def _get_parts(state: fg.TrainState) -> dict[str, Any]:
    return {name: getattr(state, name) for name in _FIELDS}


def find_difference(first: Mapping[str, str], second: Mapping[str, str]) -> str | None:
    """Return the path of the first leaf whose digests differ, or that one of two states lacks;
    None if there is none."""
    for path in (*first, *second):
        if first.get(path) != second.get(path):
            return path
    return None


@hide_constructor_frames
@dataclass(frozen=True, eq=False)
class StateDigest(RunPlugin):
    """Writes a digest of each array of the train state, as a step has left it, into the run's
    `digests.jsonl`.

    `fulgurite verify` compares them with those of the steps as it executes them again, and
    `fulgurite bisect` those of two runs. It is telemetry: no number of the run depends on it. What
    an action changes of the state at a step, such as a return to earlier weights, shows in the next
    digest.

    Example:
        from fulgurite_replay import StateDigest

        engine = fg.Engine(steps=100, run_dir="runs/a", plugins=[StateDigest(every=50)])

    Args:
        every: at which steps: an interval, or a trigger.
    """

    plugin_name = "state_digest"

    every: int | fg.Trigger = 50
    _pending = fg.PerFit(list[tuple[int, PendingDigests]])
    _paths = fg.PerFit(list[str])

    def __post_init__(self) -> None:
        as_trigger(self.every)

    @fg.hookimpl
    def register_actions(self) -> list[fg.ScheduledAction]:
        """Digest the state as the step has left it: an action after the one that logs would wait
        for the device."""
        return [schedule_digest("digest", self.every, self._digest)]

    @fg.hookimpl
    def on_save(self, run: fg.Run) -> None:
        """Write what has been digested: a run that resumes here does not digest it again."""
        self._write(run)

    @fg.hookimpl
    def on_exception(self, run: fg.Run) -> None:
        """Write what has been digested."""
        self._write(run)

    @fg.hookimpl
    def on_fit_end(self, run: fg.Run) -> None:
        """Write what has been digested."""
        self._write(run)

    @fg.hookimpl
    def on_fit_start(self, run: fg.Run) -> None:
        """Refuse a run without a directory."""
        if run.run_dir is None and run.engine.fast_dev_run is None:
            raise ConfigurationError(
                "StateDigest has no place to write to: give Engine(run_dir=...), or --run"
            )

    def _digest(self, run: fg.Run) -> None:
        """Write the digests of the step before, which are there by now, and begin those of this
        one."""
        self._write(run)
        state = run.unchecked_state
        if not self._paths:
            self._paths.extend(list_paths(state))
        self._pending.append((run.step, start_digest(state, self._paths)))

    def _write(self, run: fg.Run) -> None:
        for step, pending in self._pending:
            digests = pending.read()
            if run.run_dir is None or jax.process_index() != 0:
                continue
            run.run_dir.assert_locked()
            entry = {"step": step, "attempt": run.attempt, "digests": digests}
            append_line(run.run_dir.path / DIGESTS_FILE, entry)
        self._pending.clear()


def schedule_digest(
    name: str, trigger: Any, action: Callable[[fg.Run], None]
) -> fg.ScheduledAction:
    """Return an action that gets the state as a step has left it, once `SelfCheck` has compared it.

    Args:
        name: of the action.
        trigger: when.
        action: `action(run)`.
    """
    after = ("self_check.compare",)
    return fg.ScheduledAction(name, trigger, action, stage="evaluate", after=after)


def read_digests(run: Path) -> dict[int, Digests]:
    """Return the digests of a run by step, of the newest attempt that has those of the step; none
    of steps that the run has given up, by going back and ending earlier.

    Args:
        run: its directory.

    Raises:
        CheckpointError: the file is not one of `StateDigest`.
    """
    last_kept = list_last_kept_steps(RunDirectory(run))
    entries = _iter_digests(run / DIGESTS_FILE)
    return {
        step: digests
        for attempt, step, digests in entries
        if attempt not in last_kept or step <= last_kept[attempt]
    }


def _iter_digests(path: Path) -> Iterator[tuple[Any, int, Digests]]:
    """Yield attempt, step and digests of each line of a file."""
    for entry in iter_entries(path, "StateDigest"):
        step, digests, attempt = (entry.get(name) for name in ("step", "digests", "attempt"))
        is_attempt = attempt is None or type(attempt) is int
        if type(step) is not int or not isinstance(digests, dict) or not is_attempt:
            error = ValueError("it has no step and digests, or an attempt that is not a number")
            raise make_line_error(path, entry["line"], "StateDigest", error)
        yield attempt, step, digests


@jax.jit
def _digest_all(arrays: list[Shaped[Array, "..."]]) -> UInt32[Array, "arrays 2"]:
    """Return two checksums of the bits of each array."""
    return jnp.stack([_digest(array) for array in arrays])


def _digest(array: Shaped[Array, "..."]) -> UInt32[Array, "2"]:
    """Return two checksums of the bits of an array.

    Sums of integers are the same in any order, so that they do not depend on how an array is
    divided among devices. Each word is mixed, one to one, and multiplied by an odd number of its
    own place, so that one that changes always changes the sum.
    """
    words = as_words(array)
    mixed = (words ^ (words >> 16)) * jnp.uint32(0x9E3779B1)
    mixed = mixed ^ (mixed >> 13)
    factors = (jax.lax.iota(jnp.uint32, words.size) + jnp.uint32(1)) * jnp.uint32(0x85EBCA77)
    factors = (factors ^ (factors >> 15)) * jnp.uint32(0x2C1B3C6D)
    factors = factors ^ (factors >> 12)
    others = factors * jnp.uint32(0xC2B2AE3D)
    terms = [mixed * (odd | jnp.uint32(1)) for odd in (factors, others)]
    # Both in one pass, which takes a third of the time of two.
    zeros = [jnp.uint32(0), jnp.uint32(0)]
    return jnp.stack(jax.lax.reduce(terms, zeros, _add_pairs, (0,)))


def _add_pairs(first: Sequence[Any], second: Sequence[Any]) -> list[Any]:
    return [left + right for left, right in zip(first, second, strict=True)]


def as_words(array: Shaped[Array, "..."]) -> UInt32[Array, " words"]:
    """Return the bits of an array as words of 32 bits, those of smaller elements one a word."""
    if jnp.iscomplexobj(array):
        array = jnp.stack([jnp.real(array), jnp.imag(array)])
    if array.dtype == jnp.bool_:
        return array.astype(jnp.uint32).reshape(-1)
    bits = jnp.iinfo(array.dtype).bits if _is_integer(array) else jnp.finfo(array.dtype).bits
    if bits < 8:
        return array.astype(jnp.float32).view(jnp.uint32).reshape(-1)
    unsigned = {8: jnp.uint8, 16: jnp.uint16}.get(bits, jnp.uint32)
    return jax.lax.bitcast_convert_type(array, unsigned).astype(jnp.uint32).reshape(-1)


def _is_integer(array: Shaped[Array, "..."]) -> bool:
    return bool(jnp.issubdtype(array.dtype, jnp.integer))


def as_plain(leaf: jax.Array) -> jax.Array:
    """Return the numbers of a random key, and any other array as it is, committed to its device."""
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return commit(jax.random.key_data(leaf) if is_key else leaf)


def commit(array: jax.Array) -> jax.Array:
    """Return an array that stays on its device. Those of a state that was read may be moved, and
    for them `jax.jit` would compile another program."""
    return array if array.committed else jax.device_put(array, array.sharding)
