"""Populations for Fulgurite: members that differ in seed or learning rate, in one program."""

__tracebackhide__ = True

from fulgurite_population.evolution import Evolution as Evolution
from fulgurite_population.members import Members as Members
from fulgurite_population.plugin import Best as Best, Population as Population
