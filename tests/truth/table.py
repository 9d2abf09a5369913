"""The table: what should become of each pair of a feature and a kind of loss, the check of one, and
which of them are in the fast selection."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any, Literal, NamedTuple

import fulgurite as fg
import pytest
from columns import FEATURES
from features import Evaluation, EvaluationInTraining, Feature
from fulgurite.errors import DataError, FulguriteError, ModelError
from fulgurite_evaluators import Evaluator
from kinds import KINDS, Kind, make_model

PROBE_MESSAGE = "examples is "
"""What is said of bare numbers that are not means over examples: accumulation refuses them, evaluations
tell of them."""

LEFT_OUT: Sequence[tuple[str, str]] = [
    # Adam squares the magnitude of a complex number, and the oracle its two parts.
    ("*adam", "complex"),
    # Two numbers of half precision tell nothing of means that differ by less than they round.
    ("*_bf16", "root"),
    ("*_fp16", "root"),
    ("evaluate_bf16", "tokens_bare"),
    # Each share is a batch of an update of its own, which nothing puts together.
    ("repeat_split", "tokens_bare"),
    ("repeat_split", "sum"),
    ("repeat_split", "contrast"),
    ("repeat_split", "root"),
    ("repeat_split", "deviation"),
    # Plugins that look into a model are asked for all members at once in an evaluation.
    ("evaluate_members", "tokens_keys"),
    ("evaluate_members", "three_terms"),
]
"""Pairs, as patterns, that mean nothing."""

Outcome = Literal["equal", "refused", "told"]


@dataclass(frozen=True)
class Expectation:
    """What should become of a pair.

    Attributes:
        outcome: equal to the oracle, refused by an error, or told of by a warning.
        error: the class of the error.
        message: a pattern that the error or the warning has.
    """

    outcome: Outcome
    error: type[FulguriteError] = FulguriteError
    message: str = ""


COMPLETE = ("plain", "window", "microbatches", "steps", "evaluate", "data_parallel")
"""Features that are crossed with every kind."""

SIMILAR = ("tokens_computed", "weights_mean", "tuple", "deviation")
"""Kinds that the others leave out: a step sees of them what it sees of others."""


def expect(feature: Feature, kind: Kind) -> Expectation | None:
    """Return what should become of a pair; None if it is not known yet."""
    divides = "does not divide into 8 parts|cannot be split"
    if not kind.has_count:
        return Expectation("refused", DataError, f"begin with different lengths|{divides}")
    if not kind.can_split and feature.num_devices > 1 and not feature.averages:
        return Expectation("refused", DataError, divides)
    if not kind.can_split and feature.splits == "microbatch":
        return Expectation("refused", DataError, "cannot be split")
    if kind is KINDS["three_terms"] and feature.splits == "steps":
        return Expectation("refused", ModelError, "different weights")
    if kind.is_mean or not (feature.splits or feature.averages):
        return Expectation("equal")
    if feature.splits:
        return Expectation("refused", ModelError, PROBE_MESSAGE)
    return Expectation("told", message=PROBE_MESSAGE)


def list_pairs(features: Mapping[str, Feature]) -> list[tuple[str, str]]:
    """Return all pairs of the table by the names of feature and kind."""
    return [
        (feature_name, kind_name)
        for feature_name, feature in features.items()
        for kind_name, kind in KINDS.items()
        if expect(feature, kind) is not None
        and (feature_name in COMPLETE or kind_name not in SIMILAR)
        and not any(fnmatch(kind_name, pattern) for pattern in feature.leaves_out)
        and not any(
            fnmatch(feature_name, first) and fnmatch(kind_name, second)
            for first, second in LEFT_OUT
        )
    ]


def check_pair(feature_name: str, kind_name: str) -> Outcome:
    """Check one pair, and return what became of it."""
    feature = FEATURES[feature_name]
    kind = KINDS[kind_name]
    expectation = expect(feature, kind)
    assert expectation is not None
    if expectation.outcome == "equal":
        feature.check(kind)
    elif expectation.outcome == "refused":
        with pytest.raises(expectation.error, match=expectation.message):
            feature.check(kind)
    else:
        check_told(feature, kind, expectation.message)
    return expectation.outcome


def check_told(feature: Feature, kind: Kind, message: str) -> None:
    """Check that a warning or a message of the run says that a number means little.

    Args:
        feature: that averages such numbers.
        kind: whose loss is not a mean.
        message: what it says.
    """
    data = [kind.pack(batch) for batch in feature.make_batches()]
    model = make_model(kind, feature.make_optimizer(), feature.phases, feature.model_class)
    engine = feature.make_engine(kind)
    if isinstance(feature, Evaluation) and not isinstance(feature, EvaluationInTraining):
        with pytest.warns(UserWarning, match=message):
            feature.evaluate(kind, model, data)
        return
    if isinstance(feature, EvaluationInTraining):
        engine = feature.make_engine(kind, Evaluator("test", data, every=fg.AtEnd()))
    messages = engine.fit(model, data).messages
    assert any(message in text for text in messages), messages


COVERING = 11
"""Every eleventh pair of a feature is run for every change, from another offset for each feature, so that
each feature and each kind is there. The ten after it are for `pytest -m slow`."""


class Selections(NamedTuple):
    """Pairs of the names of a feature and a kind, by what runs them.

    Attributes:
        fast: run for every change.
        slow: run by `pytest -m slow` alone.
    """

    fast: list[tuple[str, str]]
    slow: list[tuple[str, str]]


def split_pairs(features: Mapping[str, Feature]) -> Selections:
    """Return the pairs of some features by what runs them.

    Args:
        features: by name.
    """
    kinds = [*KINDS]
    numbers = {name: number for number, name in enumerate(FEATURES)}
    selections = Selections([], [])
    for feature, kind in list_pairs(features):
        place = (kinds.index(kind) + 3 * numbers[feature]) % COVERING
        if place == 0:
            selections.fast.append((feature, kind))
        else:
            selections.slow.append((feature, kind))
    return selections


def parametrize(features: Mapping[str, Feature]) -> Any:
    """Return the mark that runs a test for each pair, in the selection of the pair.

    Args:
        features: by name.
    """
    marks: dict[str, Any] = {"fast": (), "slow": pytest.mark.slow}
    parameters = [
        pytest.param(*pair, id="-".join(pair), marks=marks[name])
        for name, pairs in split_pairs(features)._asdict().items()
        for pair in pairs
    ]
    return pytest.mark.parametrize(("feature", "kind"), parameters)
