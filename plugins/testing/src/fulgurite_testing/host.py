"""Checks of what a plugin does on the host: it waits for nothing, and lets go in time."""

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import fulgurite as fg
import jax
import jax.numpy as jnp
from fulgurite.errors import ConfigurationError

from fulgurite_testing.subject import Broken, Subject
from fulgurite_testing.watched import watch

FREE = ("on_epoch_end", "on_compile", "log_scalars", "log_media", "log_text", "log_config")
"""Host hooks that are called while steps run. The others come before the first step, or where the
engine waits."""
MOMENT = 0.01
"""Seconds, a small part of a slow step."""
SLOW = 60
"""Products of two 384 × 384 matrices in one step: about 0.1 s."""


def no_sync(subject: Subject) -> None:
    """While a slow step runs, no hook and no action of the phases `log` and `act` waits for it."""
    if not subject.hooks & {*FREE, "register_actions"}:
        return
    seen: dict[str, list[bool]] = defaultdict(list)

    def around(name: str, call: Callable[[], Any]) -> Any:
        was_busy = busy()
        answer = call()
        if was_busy:
            seen[name].append(still_busy())
        return answer

    plugin = watch(subject.make(), FREE, around, phases=("log", "act"))
    subject.fit(plugin, others=[_Slow()], log_every=1, steps=8)
    # One that waits finds the device idle, and one that does not finds it busy; on a busy machine
    # not each time.
    if waited := [
        name for name, after in seen.items() if len(after) > 1 and 2 * sum(after) < len(after)
    ]:
        raise Broken(
            f"{', '.join(waited)} waits for the device: after each call the newest step was done. "
            f"Emit device arrays "
            "by run.emit, which copies them in the background, and read metrics in the phase "
            "`decide`, where those of "
            "training are of the window before"
        )


def closes(subject: Subject) -> None:
    """At the end of a run it lets go of everything in bounded time, and leaves no thread behind."""
    again = subject.again
    if again.late:
        raise Broken(
            f"{again.late[0]} is not done after {subject.timeout:g} s: wait for what is outside "
            f"with a limit"
        )
    if again.left:
        raise Broken(
            f"the run is over and the thread {again.left[0]!r} still runs: end it in close_logger "
            f"or on_fit_end"
        )


def busy() -> bool:
    """Whether anything is still being computed."""
    return not all(array.is_ready() for array in jax.live_arrays())


def still_busy() -> bool:
    """Whether anything is being computed for a while yet. What was waited for is done, but what is
    computed from it, and what came with it, is marked as done a moment later."""
    deadline = time.monotonic() + MOMENT
    while busy():
        if time.monotonic() > deadline:
            return True
    return False


@dataclass(frozen=True)
class _Slow:
    """Makes each step slow, by a sum of products that is worth nothing and that XLA cannot leave
    out."""

    plugin_name = "slow_step"

    @fg.hookimpl
    def transform_batch(self, batch: Any) -> Any:
        leaves, tree = jax.tree.flatten(batch)
        place = next(
            (i for i, leaf in enumerate(leaves) if jnp.issubdtype(leaf.dtype, jnp.floating)), None
        )
        if place is None:
            raise ConfigurationError(
                "the check no_sync needs a batch with an array of floating-point numbers"
            )
        start = jnp.full((384, 384), 1e-3) * (1 + 0 * leaves[place].ravel()[0].astype(jnp.float32))
        made = jax.lax.fori_loop(0, SLOW, lambda _, one: jnp.tanh(one @ start), start)
        leaves[place] = leaves[place] + (0 * made.sum()).astype(leaves[place].dtype)
        return tree.unflatten(leaves)
