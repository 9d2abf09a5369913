"""Metrics of texts that a model wrote, computed on the host."""

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from fulgurite.errors import ConfigurationError
from fulgurite.metrics import Metric, Sum, Value

from fulgurite_metrics.arrays import get_array_namespace


class BLEU(Metric):
    """How many words and sequences of up to four words of texts are also in their references, from
    0 to 100; NaN without texts. Merged, it is that of the whole corpus, not the mean over texts.

    Words are counted by sacrebleu (`pip install "fulgurite-metrics[text]"`), with the same numbers;
    an order without any match is smoothed as there.

    Source: Papineni et al., BLEU: a Method for Automatic Evaluation of Machine Translation (2002);
    Post, A Call for Clarity in Reporting BLEU Scores (2018).

    Example:
        from fulgurite_metrics import BLEU

        BLEU.from_texts(["the cat sat on the mat"], ["the cat is on the mat"]).compute()

    Attributes:
        matches: `(4,)`, sequences of 1 to 4 words that are in a reference.
        totals: `(4,)`, all sequences of 1 to 4 words.
        length: the number of words.
        reference_length: that of the references nearest in length.
    """

    higher_is_better: ClassVar[bool | None] = True

    matches: Sum
    totals: Sum
    length: Sum
    reference_length: Sum

    @staticmethod
    def from_texts(
        preds: Sequence[str],
        references: Sequence[str | Sequence[str]],
        *,
        tokenize: str | None = None,
        lowercase: bool = False,
    ) -> "BLEU":
        """Return the score of texts, such as those of a batch. Runs on the host.

        Args:
            preds: the texts.
            references: for each text a right one, or several.
            tokenize: how texts are split into words: a name of sacrebleu's, such as `zh`, `char` or
                `none`; None for its default, `13a`.
            lowercase: whether capital letters do not matter.
        """
        if isinstance(preds, str) or len(preds) != len(references):
            raise ConfigurationError(
                f"BLEU of {1 if isinstance(preds, str) else len(preds)} texts with "
                f"{len(references)} references; give two lists of one length"
            )
        lists = [[texts] if isinstance(texts, str) else list(texts) for texts in references]
        if not all(lists):
            raise ConfigurationError(
                f"BLEU: text {lists.index([])} has no reference; leave it out, or give it one"
            )
        if not preds:
            return BLEU(*(_as_sum(np.zeros(shape)) for shape in (4, 4, (), ())))
        try:
            import sacrebleu
        except ImportError as error:
            raise ConfigurationError(
                "BLEU splits texts into words with sacrebleu, which is not installed: "
                "pip install 'fulgurite-metrics[text]'"
            ) from error
        scorer = sacrebleu.BLEU(tokenize=tokenize, lowercase=lowercase)
        # It takes the first references of all texts, then the second; None where one is missing.
        score = scorer.corpus_score(list(preds), list(map(list, zip_longest(*lists))))
        counts = (score.counts, score.totals, score.sys_len, score.ref_len)
        return BLEU(*(_as_sum(np.asarray(count, np.float32)) for count in counts))

    def compute(self) -> Value:
        matches: Any = self.matches.compute()
        totals = self.totals.compute()
        length = self.length.compute()
        reference_length = self.reference_length.compute()
        numpy = get_array_namespace(matches)
        is_missing = matches == 0
        # The n-th order without a match counts as 1 / 2^n of a match.
        smoothed = numpy.where(is_missing, 0.5 ** numpy.cumsum(is_missing), matches)
        precision = smoothed / numpy.where(totals == 0, 1, totals)
        brevity = numpy.exp(
            numpy.minimum(0, 1 - reference_length / numpy.where(length == 0, 1, length))
        )
        score = 100 * brevity * numpy.exp(numpy.mean(numpy.log(precision)))
        has_score = numpy.any(~is_missing) & numpy.all(totals > 0)
        is_empty = (length == 0) & (reference_length == 0)
        return numpy.where(is_empty, np.nan, numpy.where(has_score, score, 0)).astype(matches.dtype)


def _as_sum(counts: np.ndarray) -> Sum:
    total = jnp.asarray(counts, jnp.float32)
    return Sum(total, jnp.zeros_like(total))
