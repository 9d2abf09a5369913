"""Several optimizers in one step for Fulgurite: GANs, frozen parts, accumulation, constraints."""

__tracebackhide__ = True

from fulgurite_optimizers.accumulate import GradientAccumulation as GradientAccumulation
from fulgurite_optimizers.clip import GradientClip as GradientClip
from fulgurite_optimizers.constraints import (
    Constraint as Constraint,
    ModuleConstraints as ModuleConstraints,
    NonNegative as NonNegative,
    UnitNorm as UnitNorm,
    WeightClip as WeightClip,
)
from fulgurite_optimizers.finetuning import BackboneFinetuning as BackboneFinetuning
from fulgurite_optimizers.freezing import Freeze as Freeze, freeze as freeze
from fulgurite_optimizers.multi_optimizer import MultiOptimizer as MultiOptimizer
from fulgurite_optimizers.phase import Phase as Phase, optimize_only as optimize_only
from fulgurite_optimizers.plateau import ReduceOnPlateau as ReduceOnPlateau
from fulgurite_optimizers.switching import switch_optimizers as switch_optimizers
