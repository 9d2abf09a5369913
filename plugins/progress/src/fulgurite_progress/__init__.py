"""Shows in the terminal what a run is doing: `Engine(plugins=["progress"])`, or active once it is installed."""

from fulgurite_progress.plugin import Progress as Progress
from fulgurite_progress.summary import parameters as parameters, summary as summary
from fulgurite_progress.times import times as times
