"""What an alert does: run a command, send a request. Each is called on a thread of the alert."""

import json
import os
import subprocess
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fulgurite.errors import ConfigurationError
from fulgurite.plugins import hide_constructor_frames, register_secret

from fulgurite_monitor.arguments import check_seconds


class AlertEvent(NamedTuple):
    """What an alert says.

    Example:
        from fulgurite_monitor import AlertEvent

        event = AlertEvent("train/loss > 10", 50, "train/loss > 10 at step 50: train/loss is 12.5")

    Attributes:
        condition: that came to hold.
        step: of the record with which it did.
        message: in a sentence.
    """

    condition: str
    step: int
    message: str


@hide_constructor_frames
@dataclass(frozen=True)
class NotifyCommand:
    """Run a command for an alert, with its message as the last argument, without a shell.

    The command also has `FULGURITE_ALERT` and `FULGURITE_STEP` in its environment.

    Example:
        from fulgurite_monitor import Alert, NotifyCommand

        alert = Alert("train/loss > 10", do=[NotifyCommand(["notify-send", "Fulgurite"])])

    Attributes:
        command: the program and its first arguments.
        timeout: seconds after which it is ended.
    """

    command: Sequence[str]
    timeout: float = 60.0

    def __post_init__(self) -> None:
        is_list = not isinstance(self.command, str) and len(self.command) > 0
        if not is_list or not all(isinstance(part, str) for part in self.command):
            raise ConfigurationError(
                f"NotifyCommand: command is {self.command!r}; give a list of strings, such as "
                "['notify-send', 'Fulgurite']"
            )
        check_seconds(self.timeout, "NotifyCommand: timeout")

    def __call__(self, event: AlertEvent) -> None:
        """Run the command; an exit code other than 0 is an error."""
        variables = {"FULGURITE_ALERT": event.message, "FULGURITE_STEP": str(event.step)}
        subprocess.run(
            [*self.command, event.message],
            check=True,
            timeout=self.timeout,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=os.environ | variables,
        )


@hide_constructor_frames
@dataclass(frozen=True)
class Webhook:
    """Send an alert as JSON to an address, as chat programs take it.

    The request is a POST with the members `text` (the message), `condition` and `step`. The address
    counts as a secret.

    Example:
        from fulgurite_monitor import Alert, Webhook

        alert = Alert("train/loss > 10", do=[Webhook("https://chat.example.com/hooks/abc")])

    Attributes:
        url: an address that begins with `https://` or `http://`.
        timeout: seconds after which it is given up.
    """

    url: str
    timeout: float = 10.0

    def __post_init__(self) -> None:
        if not isinstance(self.url, str) or not self.url.startswith(("https://", "http://")):
            raise ConfigurationError(
                "Webhook: url must begin with https:// or http://; give the address that the chat "
                "program shows for a webhook"
            )
        check_seconds(self.timeout, "Webhook: timeout")
        register_secret(self.url)

    def __call__(self, event: AlertEvent) -> None:
        """Send the request; an answer that is an error raises one."""
        content = {"text": event.message, "condition": event.condition, "step": event.step}
        request = urllib.request.Request(
            self.url,
            data=json.dumps(content).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=self.timeout):
            pass
