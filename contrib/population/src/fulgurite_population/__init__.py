"""Populations for Fulgurite: members that differ in seed or learning rate, in one program."""

__tracebackhide__ = True

from fulgurite_population.evolution import Evolution as Evolution
from fulgurite_population.hyperparameters import (
    list_hyperparameters as list_hyperparameters,
    list_scheduled as list_scheduled,
)
from fulgurite_population.members import Members as Members, make_init_key as make_init_key
from fulgurite_population.plugin import Best as Best, Population as Population
