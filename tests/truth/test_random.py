"""Sizes, masks, weights and rates that nobody chose, against the oracle."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import oracle
import pytest
from columns import PHASES, make_phases
from features import Evaluation, Feature, Window
from fulgurite_optimizers import GradientAccumulation
from hypothesis import HealthCheck, given, settings, strategies as st
from kinds import KINDS

KIND_NAMES = [
    *("mean", "padded", "tokens_weight", "tokens_mean", "tokens_losses", "tokens_keys"),
    *("weights_weight", "weights_losses", "scaled_losses", "three_terms"),
]


@dataclass(frozen=True)
class Drawn:
    """What was drawn for a pair.

    Attributes:
        kind: the name of the kind.
        n: the number of microbatches or steps.
        lengths: the number of tokens of each example, for each batch; at least one token in all.
        seed: of the numbers.
        rate: of the optimizer.
    """

    kind: str
    n: int
    lengths: tuple[tuple[int, ...], ...]
    seed: int
    rate: float

    def make_batches(self) -> list[oracle.Batch]:
        """Return the batches."""
        random = np.random.default_rng(self.seed)
        return [oracle.make_batch(random, np.array(lengths)) for lengths in self.lengths]


@st.composite
def draw_pairs(draw: Any) -> Drawn:
    n = draw(st.integers(2, 4))
    # Two sizes at most, each an executable.
    sizes = draw(st.lists(st.sampled_from([n, 2 * n]), min_size=2, max_size=5))
    lengths = tuple(
        tuple(draw(st.lists(st.integers(0, oracle.LENGTH), min_size=size, max_size=size)))
        for size in sizes
    )
    if not any(map(any, lengths)):
        lengths = ((1, *lengths[0][1:]), *lengths[1:])
    return Drawn(
        draw(st.sampled_from(KIND_NAMES)),
        n,
        lengths,
        draw(st.integers(0, 2**16)),
        draw(st.sampled_from([0.01, 0.05, 0.1])),
    )


FEATURES: Mapping[str, Callable[[int, float], Feature]] = {
    "plain": lambda n, rate: Feature(),
    "microbatches": lambda n, rate: Feature(lambda: [GradientAccumulation(n)], splits="microbatch"),
    "steps": lambda n, rate: Feature(
        lambda: [GradientAccumulation(n, "steps")], splits="steps", num_joined=n
    ),
    "phases": lambda n, rate: Feature(
        lambda: [make_phases(accumulate=GradientAccumulation(n), rate=rate)],
        rule={"order": PHASES},
        phases=PHASES,
        splits="microbatch",
    ),
    "evaluate": lambda n, rate: Evaluation(averages=True),
    "window": lambda n, rate: Window(averages=True, settings={"log_every": 3}),
}


@pytest.mark.parametrize(
    "num_examples",
    [pytest.param(3, marks=pytest.mark.full), pytest.param(20, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("name", FEATURES)
def test_whatever_is_drawn_is_that_of_the_oracle(
    name: str, num_examples: int, record_property: Callable[[str, object], None]
) -> None:
    num_checked = 0

    @settings(
        max_examples=num_examples,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(draw_pairs())
    def check(drawn: Drawn) -> None:
        nonlocal num_checked
        feature = FEATURES[name](drawn.n, drawn.rate)
        if drawn.kind == "padded" and drawn.n == 3 and feature.splits == "microbatch":
            return  # with its padding such a batch has no parts of equal size
        if drawn.kind == "three_terms" and feature.splits == "steps":
            return  # refused, as the table says
        batches = drawn.make_batches()
        rule = {**feature.rule, "rate": drawn.rate}
        sizes = tuple(len(lengths) for lengths in drawn.lengths)
        feature = replace(feature, rule=rule, sizes=sizes, draw=lambda: batches)
        feature.check(KINDS[drawn.kind])
        num_checked += 1

    check()
    record_property("truth: equal", num_checked)
