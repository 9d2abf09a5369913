"""Schedule the steps whose pictures, histograms and figures are shown."""

from dataclasses import dataclass

import fulgurite as fg
from fulgurite.errors import ConfigurationError
from fulgurite.plugins import Or, as_trigger, hide_constructor_frames, is_exact


@hide_constructor_frames
@dataclass(frozen=True)
class MediaLogger(fg.Plugin):
    """Pass the `fg.Output(media=...)` of steps to the loggers that show media.

    At other steps none of it is computed.

    Example:
        from fulgurite_logging import MediaLogger

        plugins = ["tensorboard", MediaLogger(every=100)]
        engine = fg.Engine(steps=1000, run_dir="runs/digits", plugins=plugins)

    Attributes:
        every: a trigger, or an interval in steps. A step must know beforehand whether it is shown,
            so a trigger by the clock is not possible; at the start of a run there is nothing to
            show.
    """

    every: int | fg.Trigger = 500

    def __post_init__(self) -> None:
        trigger = as_trigger(self.every)
        for part in trigger.parts if isinstance(trigger, Or) else (trigger,):
            if isinstance(part, fg.AtStart) or not is_exact(part):
                raise ConfigurationError(
                    f"MediaLogger: at {part} nothing would be shown, because media are computed in "
                    "the step: give a trigger by steps or epochs that follow from the program "
                    "alone, such as fg.Every(500)"
                )

    @fg.hookimpl
    def register_actions(self) -> list[fg.ScheduledAction]:
        """Return the action `media.show`, on which the steps' media depend."""
        return [fg.ScheduledAction("show", self.every, fg.Run.emit_media)]
