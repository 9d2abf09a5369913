"""The program that `fulgurite sweep --workers population:N` starts."""

from fulgurite_sweeps.population import experiment as experiment
