"""Learning rate and batch size finders for Fulgurite."""

__tracebackhide__ = True

from fulgurite_tuner.batch_size import BatchSizes as BatchSizes, find_batch_size as find_batch_size
from fulgurite_tuner.learning_rate import (
    LearningRates as LearningRates,
    find_learning_rate as find_learning_rate,
)
