"""How many steps go into one dispatch, decided from the traced program alone.

No clock is asked, so that the same program is dispatched alike in each run and on each machine of a
kind. Whatever is chosen, the bits are those of single steps.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import ClosedJaxpr

from fulgurite._src.execution.flops import contains_primitive, count_flops

MAX_IN_FLIGHT = 4
"""Dispatches of training, evaluation or prediction that are under way at once.

Enough that the device never waits for the host (2 cost a small step 10 % more than 4), and no more,
because each holds its batch, and jax 0.10.2 on CPU was seen to deadlock with many of them where
several processes have several devices each.
"""

MAX_FUSED_STEPS = 16
"""More gain nothing: 8 and 16 steps of the small perceptron take 155 and 149 µs each, one 249."""

MAX_BUFFER_BYTES = 16 * 2**20
"""Of the batches of one dispatch."""


class FusionLimits(NamedTuple):
    """Which steps gain from running in a loop on the device.

    Attributes:
        max_flops: of one step; a larger one hides what a dispatch costs.
        max_arrays: that a step takes; XLA compiles a loop over more of them for too long.
        excluded: primitives that no loop is made over, and what is known of them there.
    """

    max_flops: float
    max_arrays: int
    excluded: Mapping[str, str]


# By platform; one that is missing was not measured, and runs single steps. XLA on CPU runs a
# convolution in a loop on a single thread, at 5.9 times the cost of a loop by hand. It compiles a
# loop over 2,000 arrays as fast as the step alone, and one over 5,000 in 69 instead of 59 s of CPU
# time, or for 25 s longer on two quiet cores. Each step gains 0.045 s there, so that a run of many
# hundreds of steps does well to ask for the loop by `steps_per_execution`.
#
# On an H200, 16 steps a dispatch take 0.52 of the time of a loop by hand for a step of 0.009 GFLOP
# (single ones 1.62), 0.91 for one of 0.11 GFLOP (1.43), 1.38 for one of 4.1 GFLOP (1.33), and then
# more the larger the batches, whose copies to the device single steps hide.
FUSION_LIMITS = {
    "cpu": FusionLimits(4e8, 3_000, {"conv_general_dilated": "is slower"}),
    "gpu": FusionLimits(1e9, 3_000, {"conv_general_dilated": "was not measured"}),
}


class LoopChoice(NamedTuple):
    """Whether the steps of a program run in a loop on the device.

    Attributes:
        runs_in_loop: whether they do, however few of them a dispatch has: in a loop XLA may fuse
            the operations of a step in another way, so that the last bits are others.
        reason: why, in words.
    """

    runs_in_loop: bool
    reason: str


class DispatchChoice(NamedTuple):
    """How many steps go into one dispatch.

    Attributes:
        steps: the largest number of them.
        reason: why, in words.
    """

    steps: int
    reason: str


def choose_loop(programs: Sequence[ClosedJaxpr], *, is_sharded: bool) -> LoopChoice:
    """Return whether the steps of a program run in a loop on the device.

    Args:
        programs: of one step, for each structure of batches.
        is_sharded: whether there are several devices.
    """
    platform = jax.default_backend()
    limits = FUSION_LIMITS.get(platform)
    if limits is None:
        return LoopChoice(False, f"several steps were not measured on the platform {platform!r}")
    if is_sharded:
        return LoopChoice(False, "several steps were not measured on several devices")
    for name, finding in limits.excluded.items():
        if any(contains_primitive(program, name) for program in programs):
            return LoopChoice(False, f"{name} {finding} in a loop on the platform {platform!r}")
    num_arrays = max(len(program.jaxpr.invars) for program in programs)
    if num_arrays > limits.max_arrays:
        return LoopChoice(
            False,
            f"XLA takes long to compile a loop over the {num_arrays:,} arrays of a step, which "
            "steps_per_execution=16 has it do",
        )
    flops = max(map(count_flops, programs))
    size = f"a step has {flops / 1e6:,.1f} MFLOP"
    if flops > limits.max_flops:
        return LoopChoice(False, f"{size}, which hides what a dispatch costs")
    return LoopChoice(True, f"{size}, of which a dispatch would be a large part")


def choose_steps_per_execution(
    loop_choice: LoopChoice, batch_bytes: int, interval: float, epoch_length: float
) -> DispatchChoice:
    """Return how many steps go into one dispatch.

    Args:
        loop_choice: whether they may be several.
        batch_bytes: the size of the largest batch.
        interval: the mean number of steps from one at which anything is due to the next.
        epoch_length: the number of batches in an epoch, whose end is that of a dispatch.
    """
    if not loop_choice.runs_in_loop:
        return DispatchChoice(1, loop_choice.reason)
    if epoch_length < 2:
        return DispatchChoice(1, "each step is the end of an epoch, because the data has one batch")
    if interval < 2:
        return DispatchChoice(1, "something is due after nearly every step")
    if 2 * batch_bytes > MAX_BUFFER_BYTES:
        return DispatchChoice(1, f"a batch has {batch_bytes / 2**20:,.1f} MiB")
    fitting = MAX_BUFFER_BYTES // max(batch_bytes, 1)
    steps = min(MAX_FUSED_STEPS, fitting, math.floor(min(interval, epoch_length, MAX_FUSED_STEPS)))
    return DispatchChoice(steps, loop_choice.reason)


def count_batch_bytes(batch: Any) -> int:
    """Return the bytes of the arrays of a batch."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(batch))
