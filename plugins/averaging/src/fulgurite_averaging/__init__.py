"""Averages of weights for Fulgurite: moving averages, SWA, Lookahead, exact batch statistics."""

__tracebackhide__ = True

from fulgurite_averaging.average import Average as Average
from fulgurite_averaging.lookahead import Lookahead as Lookahead
from fulgurite_averaging.rules import EMA as EMA, Mean as Mean
from fulgurite_averaging.statistics import recompute_statistics as recompute_statistics
