"""Several optimizers in one step for Fulgurite: GANs, frozen parts, accumulation, constraints."""

from fulgurite_optimizers.accumulate import Accumulate as Accumulate
from fulgurite_optimizers.clip import Clip as Clip
from fulgurite_optimizers.constraints import (
    ClipWeights as ClipWeights,
    Constraint as Constraint,
    NonNegative as NonNegative,
    UnitNorm as UnitNorm,
)
from fulgurite_optimizers.freeze import Freeze as Freeze, frozen as frozen
from fulgurite_optimizers.phase import Phase as Phase, partial_update as partial_update
from fulgurite_optimizers.phases import Phases as Phases
from fulgurite_optimizers.plateau import ReduceOnPlateau as ReduceOnPlateau
