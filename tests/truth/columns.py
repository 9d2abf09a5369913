"""The columns of the table: what a user adds to training, each with what the oracle does instead."""

from collections.abc import Mapping
from typing import Any

import optax
import oracle
from features import (
    UNEVEN,
    Adapters,
    Averaging,
    Evaluation,
    EvaluationByFunctions,
    EvaluationInTraining,
    EvaluationOfMembers,
    EvaluationOfPhases,
    Feature,
    Members,
    Repeated,
    Resume,
    Simultaneous,
    Window,
)
from fulgurite_averaging import EMA, Average, Mean
from fulgurite_lora import Lora
from fulgurite_optimizers import Freeze, GradientAccumulation, GradientClip, MultiOptimizer, Phase
from fulgurite_precision import Dynamic, Precision
from fulgurite_sam import Sam
from fulgurite_sharding import FSDP, DataParallel
from kinds import FunctionModel

PHASES = ("body", "head")


def make_phases(
    *, order: Any = "alternating", accumulate: Any = None, rate: float = oracle.RATE
) -> MultiOptimizer:
    """Return two optimizers, each of a part of the model.

    Args:
        order: of their updates.
        accumulate: of each.
        rate: of both.
    """
    phases: dict[str, Any] = {
        name: Phase(optax.sgd(rate, momentum=oracle.MOMENTUM), name, accumulate=accumulate)
        for name in PHASES
    }
    return MultiOptimizer(order=order, **phases)


def make_averages() -> list[Any]:
    return [Average(EMA(0.5)), Average(Mean(), name="mean")]


IN_STEPS: Mapping[str, Any] = {"num_joined": 2, "splits": "steps"}
"""Two updates: of two steps, and of the step that is left."""

IN_PARTS: Mapping[str, Any] = {"splits": "microbatch"}

TRAINING: Mapping[str, Feature] = {
    "plain": Feature(sizes=(8, 8, 4)),
    "adam": Feature(rule={"adam": True}),
    "phases_alternating": Feature(lambda: [make_phases()], rule={"order": PHASES}, phases=PHASES),
    "phases_simultaneous": Simultaneous(
        lambda: [make_phases(order="simultaneous")],
        rule={"order": PHASES, "simultaneous": True},
        phases=PHASES,
    ),
    "phases_functions": Feature(
        lambda: [make_phases()],
        rule={"order": PHASES},
        phases=PHASES,
        model_class=FunctionModel,
        leaves_out=["tokens_keys"],
    ),
    "phases_sam": Feature(
        lambda: [make_phases(), Sam(radius=0.1)],
        rule={"order": PHASES, "radius": 0.1},
        phases=PHASES,
    ),
    "repeat_split": Repeated(
        lambda: [
            MultiOptimizer(
                loss=Phase(optax.sgd(oracle.RATE, momentum=oracle.MOMENTUM), repeat=2, split=True)
            )
        ],
        splits="microbatch",
    ),
    "precision_bf16": Feature(
        lambda: [Precision("bf16")],
        rule={"compute": "bfloat16"},
        dtype="bfloat16",
        leaves_out=["half", "complex"],
    ),
    "precision_fp16": Feature(
        lambda: [Precision("fp16", scale=Dynamic(initial=1024.0))],
        rule={"compute": "float16"},
        dtype="float16",
        settings={"on_nonfinite": "skip"},
        leaves_out=["half", "complex"],
    ),
    "averages": Averaging(make_averages),
    "clip": Feature(lambda: [GradientClip(max_norm=0.5)], rule={"clip": 0.5}),
    "freeze": Feature(lambda: [Freeze("body")], rule={"trained": ("head",)}),
    "lora": Adapters(
        lambda: [Lora("body", rank=2, scale=2.0)],
        rule={"trained": ("down", "up")},
        leaves_out=["complex"],
    ),
    "sam": Feature(lambda: [Sam(radius=0.1)], rule={"radius": 0.1}),
    "population": Members(),
    "window": Window(sizes=UNEVEN, averages=True, settings={"log_every": 3}),
}

DIVIDED: Mapping[str, Feature] = {
    "microbatches": Feature(lambda: [GradientAccumulation(2)], sizes=(8, 8, 4), **IN_PARTS),
    "microbatches_clip": Feature(
        lambda: [GradientAccumulation(2), GradientClip(max_norm=0.5)],
        rule={"clip": 0.5},
        **IN_PARTS,
    ),
    "microbatches_bf16": Feature(
        lambda: [GradientAccumulation(2), Precision("bf16")],
        rule={"compute": "bfloat16"},
        dtype="bfloat16",
        leaves_out=["half", "complex"],
        **IN_PARTS,
    ),
    "microbatches_fp16": Feature(
        lambda: [GradientAccumulation(2), Precision("fp16", scale=Dynamic(initial=1024.0))],
        rule={"compute": "float16"},
        dtype="float16",
        settings={"on_nonfinite": "skip"},
        leaves_out=["half", "complex"],
        **IN_PARTS,
    ),
    "microbatches_averages": Averaging(
        lambda: [GradientAccumulation(2), *make_averages()], **IN_PARTS
    ),
    "microbatches_freeze": Feature(
        lambda: [GradientAccumulation(2), Freeze("body")], rule={"trained": ("head",)}, **IN_PARTS
    ),
    "microbatches_lora": Adapters(
        lambda: [GradientAccumulation(2), Lora("body", rank=2, scale=2.0)],
        rule={"trained": ("down", "up")},
        leaves_out=["complex"],
        **IN_PARTS,
    ),
    "microbatches_sam": Feature(
        lambda: [GradientAccumulation(2), Sam(radius=0.1)],
        rule={"radius": 0.1, "parts": 2},
        **IN_PARTS,
    ),
    "microbatches_population": Members(lambda: [GradientAccumulation(2)], **IN_PARTS),
    "microbatches_window": Window(
        lambda: [GradientAccumulation(2)],
        sizes=(8, 8, 8, 8),
        splits="microbatch",
        settings={"log_every": 3},
    ),
    "microbatches_phases": Feature(
        lambda: [make_phases(accumulate=GradientAccumulation(2))],
        rule={"order": PHASES},
        phases=PHASES,
        **IN_PARTS,
    ),
    "microbatches_functions": Feature(
        lambda: [make_phases(accumulate=GradientAccumulation(2))],
        rule={"order": PHASES},
        phases=PHASES,
        model_class=FunctionModel,
        leaves_out=["tokens_keys"],
        **IN_PARTS,
    ),
    "steps_changing": Feature(
        lambda: [GradientAccumulation({0: 1, 2: 2}, "steps")],
        sizes=(8,) * 5,
        num_joined=(1, 1, 2, 1),
        splits="steps",
    ),
    "steps": Feature(lambda: [GradientAccumulation(2, "steps")], sizes=UNEVEN, **IN_STEPS),
    "steps_adam": Feature(
        lambda: [GradientAccumulation(2, "steps")], rule={"adam": True}, **IN_STEPS
    ),
    "steps_clip": Feature(
        lambda: [GradientAccumulation(2, "steps"), GradientClip(max_norm=0.5)],
        rule={"clip": 0.5},
        **IN_STEPS,
    ),
    "steps_bf16": Feature(
        lambda: [GradientAccumulation(2, "steps"), Precision("bf16")],
        rule={"compute": "bfloat16"},
        dtype="bfloat16",
        leaves_out=["half", "complex"],
        **IN_STEPS,
    ),
    "steps_fp16": Feature(
        lambda: [
            GradientAccumulation(2, "steps"),
            Precision("fp16", scale=Dynamic(initial=1024.0)),
        ],
        rule={"compute": "float16"},
        dtype="float16",
        settings={"on_nonfinite": "skip"},
        leaves_out=["half", "complex"],
        **IN_STEPS,
    ),
    "steps_averages": Averaging(
        lambda: [GradientAccumulation(2, "steps"), *make_averages()], **IN_STEPS
    ),
    "steps_lora": Adapters(
        lambda: [GradientAccumulation(2, "steps"), Lora("body", rank=2, scale=2.0)],
        rule={"trained": ("down", "up")},
        leaves_out=["complex"],
        **IN_STEPS,
    ),
    "steps_population": Members(lambda: [GradientAccumulation(2, "steps")], **IN_STEPS),
    "steps_phases": Simultaneous(
        lambda: [make_phases(order="simultaneous", accumulate=GradientAccumulation(2, "steps"))],
        rule={"order": PHASES, "simultaneous": True},
        phases=PHASES,
        **IN_STEPS,
    ),
    "steps_resume": Resume(lambda: [GradientAccumulation(2, "steps")], sizes=UNEVEN, **IN_STEPS),
}

EVALUATION: Mapping[str, Feature] = {
    "evaluate": Evaluation(sizes=(8, 8, 4, 1), averages=True),
    "evaluate_one_by_one": Evaluation(sizes=(1,) * 6, averages=True),
    "evaluate_members": EvaluationOfMembers(sizes=(8, 8, 4), averages=True),
    "evaluate_phases": EvaluationOfPhases(
        sizes=(8, 8, 4),
        averages=True,
        phases=PHASES,
        model_class=FunctionModel,
        leaves_out=["tokens_keys"],
    ),
    "evaluate_functions": EvaluationByFunctions(
        sizes=(8, 8, 4),
        averages=True,
        leaves_out=["tokens_keys", "*_weight", "complex", "foreign_*", "three_terms"],
    ),
    "evaluate_in_training": EvaluationInTraining(sizes=(8, 8, 4), averages=True),
    "evaluate_bf16": Evaluation(
        lambda: [Precision("bf16")],
        sizes=(8, 8, 4),
        averages=True,
        rule={"compute": "bfloat16"},
        dtype="bfloat16",
        leaves_out=["half", "complex"],
    ),
}

ON_EIGHT: Mapping[str, Feature] = {
    "data_parallel": Feature(lambda: [DataParallel()], num_devices=8, sizes=(8, 8, 16)),
    "fsdp": Feature(lambda: [FSDP(min_size=1)], num_devices=8, sizes=(8, 8, 16)),
    "fsdp_microbatches": Feature(
        lambda: [FSDP(min_size=1), GradientAccumulation(2)],
        num_devices=8,
        sizes=(16, 16, 32),
        splits="microbatch",
    ),
    "fsdp_steps": Feature(
        lambda: [FSDP(min_size=1), GradientAccumulation(2, "steps")],
        num_devices=8,
        sizes=(8, 8, 16),
        num_joined=2,
        splits="steps",
    ),
    "fsdp_evaluate": Evaluation(
        lambda: [FSDP(min_size=1)], num_devices=8, sizes=(8, 8, 16), averages=True
    ),
}
"""These need eight devices."""

FEATURES: Mapping[str, Feature] = {**TRAINING, **DIVIDED, **EVALUATION, **ON_EIGHT}
