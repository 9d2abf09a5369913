"""Checks of what a plugin does on the host: it does not wait for the device, and it closes in
time."""

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import fulgurite as fg
import jax
import jax.numpy as jnp
from fulgurite.errors import ConfigurationError
from fulgurite.plugins import find_hookspecs, hookspecs

from fulgurite_testing.subject import CheckError, PluginUnderTest
from fulgurite_testing.watch import watch

HOOKS_THAT_MAY_WAIT = {
    "around_fit",
    "fit_context",
    "on_fit_start",
    "on_evaluate_end",
    "on_save",
    "on_restore",
    "on_exception",
    "on_fit_end",
    "open_logger",
    "flush_logger",
    "check_logger_position",
    "rewind_logger",
    "close_logger",
}
"""Host hooks that are called before the first step, or where the engine itself waits."""
HOOKS_DURING_DISPATCH = {
    name for name, hook in find_hookspecs(hookspecs).items() if hook.kind in ("event", "logger")
} - HOOKS_THAT_MAY_WAIT
"""Host hooks that are called while steps run: a new hook is one of them until it is named above."""
GRACE_SECONDS = 0.01
"""A small part of a slow step."""
NUM_PRODUCTS = 60
"""Products of two 384 × 384 matrices in one slow step: about 0.1 s."""
SIZE = 384


def check_no_sync(subject: PluginUnderTest) -> None:
    """While a slow step runs, no hook and no action of the stages `log` and `act` waits for it."""
    if not subject.hooks & {*HOOKS_DURING_DISPATCH, "register_actions"}:
        return
    busy_after: dict[str, list[bool]] = defaultdict(list)

    def call_and_observe(name: str, call: Callable[[], Any]) -> Any:
        was_busy = is_device_busy()
        result = call()
        if was_busy:
            busy_after[name].append(is_device_still_busy())
        return result

    plugin = watch(subject.make(), HOOKS_DURING_DISPATCH, call_and_observe, stages=("log", "act"))
    subject.fit(plugin, others=[SlowStep()], log_every=1, steps=8)
    # A hook that waits finds the device idle, and one that does not wait finds it busy; on a busy
    # machine not each time.
    waiting = [
        name for name, flags in busy_after.items() if len(flags) > 1 and 2 * sum(flags) < len(flags)
    ]
    if waiting:
        raise CheckError(
            f"{', '.join(waiting)} waits for the device: after each call the newest step was "
            "finished. Log device arrays by run.log_scalars, which copies them in the background, "
            "and read metrics in the stage `decide`, where those of training are of the window "
            "before"
        )


def check_closes(subject: PluginUnderTest) -> None:
    """At the end of a run it releases everything in bounded time, and leaves no thread behind."""
    watched = subject.watched_fit
    if watched.late_hooks:
        raise CheckError(
            f"{watched.late_hooks[0]} is not done after {subject.timeout:g} s: wait for external "
            "resources with a timeout"
        )
    if watched.running_threads:
        raise CheckError(
            f"the run is over and the thread {watched.running_threads[0]!r} still runs: end it in "
            "close_logger or on_fit_end"
        )


def is_device_busy() -> bool:
    """Return whether anything is still being computed."""
    return not all(array.is_ready() for array in jax.live_arrays())


def is_device_still_busy() -> bool:
    """Return whether anything is being computed for longer than `GRACE_SECONDS`.

    An array that was waited for is ready, but arrays that are computed from it or together with it
    are marked as ready a moment later.
    """
    deadline = time.monotonic() + GRACE_SECONDS
    while is_device_busy():
        if time.monotonic() > deadline:
            return True
    return False


@dataclass(frozen=True)
class SlowStep:
    """Makes each step slow, by a sum of products that changes nothing and that XLA cannot leave
    out."""

    plugin_name = "slow_step"

    @fg.hookimpl
    def transform_batch(self, batch: Any) -> Any:
        leaves, structure = jax.tree.flatten(batch)
        floating = [
            index for index, leaf in enumerate(leaves) if jnp.issubdtype(leaf.dtype, jnp.floating)
        ]
        if not floating:
            raise ConfigurationError(
                "the check no_sync needs a batch with an array of floating-point numbers"
            )
        leaf = leaves[floating[0]]
        start = jnp.full((SIZE, SIZE), 1e-3) * (1 + 0 * leaf.ravel()[0].astype(jnp.float32))
        product = jax.lax.fori_loop(
            0, NUM_PRODUCTS, lambda _, matrix: jnp.tanh(matrix @ start), start
        )
        leaves[floating[0]] = leaf + (0 * product.sum()).astype(leaf.dtype)
        return structure.unflatten(leaves)
