"""When the pictures, histograms and figures that steps give are shown."""

from dataclasses import dataclass

import fulgurite as fg


@dataclass(frozen=True)
class Media:
    """Hands what steps give as `fg.Output(media=...)` to the sinks that show such things. At other steps nothing of it
    is computed.

    Attributes:
        every: a trigger, or every so many steps.
    """

    every: int | fg.Trigger = 500

    @fg.hookimpl
    def schedule(self) -> list[fg.Scheduled]:
        """The action `media.show`, on which the steps' media depend."""
        return [fg.Scheduled("show", self.every, fg.Run.show)]
