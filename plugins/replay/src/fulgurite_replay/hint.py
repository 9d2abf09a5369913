"""What a user can do about a step that was not finite, said where it fails."""

import shlex

import fulgurite as fg
from fulgurite.errors import NonFiniteError


class ReplayHint(fg.Plugin):
    """Notes on a `NonFiniteError` how to find the operation, where the run can be replayed.

    Active wherever this distribution is installed.

    Example:
        from fulgurite_replay import ReplayHint

        engine = fg.Engine(steps=100, plugins=[ReplayHint()], autoload=False)
    """

    plugin_name = "replay_hint"

    @fg.hookimpl
    def on_exception(self, run: fg.Run, exception: BaseException) -> None:
        """Note the command, if the run has a directory and its first bad step is known."""
        if not isinstance(exception, NonFiniteError) or run.run_dir is None:
            return
        if run.engine.on_nonfinite != "raise":
            return
        path, step = str(run.run_dir.path), exception.step
        command = f"fulgurite replay {shlex.quote(path)} --step {step}"
        if run.engine.config is None:
            command += " (once the program defines `experiment`, docs/command-line.md)"
        exception.add_note(
            f"To see which operation made it: {command}\n"
            "or in Python, with what fit was called with:\n"
            "    from fulgurite_replay import Recorded, replay\n"
            f"    print(replay(Recorded(engine, model, data, {path!r}), step={step}))"
        )
