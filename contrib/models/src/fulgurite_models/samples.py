"""The plugin that shows what a language model writes while it is trained."""

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field

import fulgurite as fg
import jax
from fulgurite.errors import ConfigurationError, check_positive_int, set_ints
from fulgurite.plugins import as_trigger, hide_constructor_frames, make_root_key

from fulgurite_models.generation import Sampling, generate
from fulgurite_models.language import find_language_model


@hide_constructor_frames
@dataclass(frozen=True)
class TextSamples(fg.Plugin):
    """Logs what a language model writes after prompts, as text, at intervals.

    The model is the one in the module that is trained, such as `model` of an `fg.Task`.

    Example:
        from fulgurite_models import TextSamples

        samples = TextSamples([[1, 2, 3]], every=100, max_new_tokens=8)

    Attributes:
        prompts: tokens, or strings for `encode`.
        every: when: an interval in steps, or a trigger.
        encode: makes tokens of a string, such as `lambda text: tokenizer.encode(text).ids`.
        decode: makes a string of tokens, such as `tokenizer.decode`; without one they are logged as
            numbers.
        max_new_tokens: how many are written at most.
        sampling: how a token is chosen; the most probable one by default.
        end: tokens with which a sample ends.
    """

    plugin_name = "text_samples"

    prompts: Sequence[Sequence[int] | str]
    every: int | fg.Trigger
    _: KW_ONLY
    encode: Callable[[str], Sequence[int]] | None = None
    decode: Callable[[list[int]], str] | None = None
    max_new_tokens: int = 32
    sampling: Sampling = field(default_factory=Sampling)
    end: int | Sequence[int] = ()

    def __post_init__(self) -> None:
        as_trigger(self.every)
        set_ints(self, "max_new_tokens")
        check_positive_int(self.max_new_tokens, "TextSamples: max_new_tokens")
        prompts = () if isinstance(self.prompts, str) else tuple(self.prompts)
        if not prompts:
            raise ConfigurationError(
                f"TextSamples: prompts is {self.prompts!r:.100}; give a list of at least one "
                "prompt, such as ['Once']"
            )
        object.__setattr__(self, "prompts", prompts)  # a generator would be used up
        if self.encode is None and any(isinstance(prompt, str) for prompt in self.prompts):
            raise ConfigurationError(
                "TextSamples: a prompt is a string, and encode= is missing, which makes tokens of "
                "it: give encode=lambda text: tokenizer.encode(text).ids"
            )

    @fg.hookimpl
    def register_actions(self) -> list[fg.ScheduledAction]:
        """Write at intervals."""
        return [fg.ScheduledAction("sample", self.every, self.sample)]

    def sample(self, run: fg.Run) -> None:
        """Log what the model writes now."""
        model = find_language_model(run.state.module, "TextSamples")
        prompts = list(map(self._encode, self.prompts))
        key = jax.random.fold_in(make_root_key(run.engine.seed), run.step)
        generated = generate(
            model,
            prompts,
            self.max_new_tokens,
            sampling=self.sampling,
            end=self.end,
            key=key,
        )
        texts = {
            str(number): self.decode(tokens) if self.decode else " ".join(map(str, tokens))
            for number, tokens in enumerate(generated.as_lists())
        }
        run.log_text(self.registered_name, texts)

    def _encode(self, prompt: Sequence[int] | str) -> Sequence[int]:
        """Return the tokens of a prompt."""
        if not isinstance(prompt, str):
            return prompt
        assert self.encode is not None  # checked in __post_init__
        return self.encode(prompt)
