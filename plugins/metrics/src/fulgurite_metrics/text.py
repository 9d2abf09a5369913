"""Metrics of texts that a model wrote, computed on the host."""

from collections import Counter
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from fulgurite.errors import ConfigurationError
from fulgurite.metrics import Metric, Sum, Value

from fulgurite_metrics.arrays import get_array_namespace


class BLEU(Metric):
    """How many words and sequences of up to four words of texts are also in their references, from
    0 to 100; NaN without any word. Merged, it is that of the whole corpus, not the mean over texts.

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
        lists = _list_references("BLEU", preds, references)
        if not len(preds):
            return BLEU(*(_as_sum(np.zeros(shape)) for shape in (4, 4, (), ())))
        try:
            import sacrebleu
        except ImportError as error:
            raise ConfigurationError(
                "BLEU splits texts into words with sacrebleu, which is not installed: "
                "pip install 'fulgurite-metrics[text]'"
            ) from error
        names = sacrebleu.BLEU.TOKENIZERS
        if tokenize is not None and tokenize not in names:
            raise ConfigurationError(
                f"BLEU with tokenize={tokenize!r}; sacrebleu has {', '.join(map(repr, names))}"
            )
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
        with jax.numpy_dtype_promotion("standard"):
            smoothed = numpy.where(is_missing, 0.5 ** numpy.cumsum(is_missing), matches)
        precision = smoothed / numpy.where(totals == 0, 1, totals)
        brevity = numpy.exp(
            numpy.minimum(0, 1 - reference_length / numpy.where(length == 0, 1, length))
        )
        score = 100 * brevity * numpy.exp(numpy.mean(numpy.log(precision)))
        has_score = numpy.any(~is_missing) & numpy.all(totals > 0)
        is_empty = (length == 0) & (reference_length == 0)
        return numpy.where(is_empty, np.nan, numpy.where(has_score, score, 0)).astype(matches.dtype)


class CHRF(Metric):
    """How many sequences of up to six characters of texts are also in their references, as an
    F-score that counts recall twice, from 0 to 100; NaN without texts.

    Merged, it is that of the whole corpus, not the mean over texts. White space does not count. Of
    several references the one counts that gives its text the highest score. The numbers are those
    of sacrebleu, which tells its counts to nobody, so they are counted here.

    Source: Popović, chrF: character n-gram F-score for automatic MT evaluation (2015).

    Example:
        from fulgurite_metrics import CHRF

        CHRF.from_texts(["the cat sat on the mat"], ["the cat is on the mat"]).compute()

    Attributes:
        matches: `(6,)`, sequences of 1 to 6 characters that are in a reference.
        totals: `(6,)`, all sequences of 1 to 6 characters.
        reference_totals: `(6,)`, those of the references.
        num_texts: the number of texts.
    """

    higher_is_better: ClassVar[bool | None] = True

    matches: Sum
    totals: Sum
    reference_totals: Sum
    num_texts: Sum

    @staticmethod
    def from_texts(
        preds: Sequence[str], references: Sequence[str | Sequence[str]], *, lowercase: bool = False
    ) -> "CHRF":
        """Return the score of texts, such as those of a batch. Runs on the host.

        Args:
            preds: the texts.
            references: for each text a right one, or several.
            lowercase: whether capital letters do not matter.
        """
        lists = _list_references("CHRF", preds, references)
        counts = np.zeros((3, CHARACTER_ORDERS), np.float32)
        for pred, texts in zip(preds, lists, strict=True):
            alternatives = [_count_matches(pred, text, lowercase) for text in texts]
            scores = [float(_compute_chrf(*count, numpy=np)) for count in alternatives]
            counts += alternatives[int(np.argmax(scores))]
        matches, totals, reference_totals = map(_as_sum, counts)
        num_texts = _as_sum(np.asarray(len(preds), np.float32))
        return CHRF(matches, totals, reference_totals, num_texts)

    def compute(self) -> Value:
        matches: Any = self.matches.compute()
        numpy = get_array_namespace(matches)
        score = _compute_chrf(
            matches, self.totals.compute(), self.reference_totals.compute(), numpy=numpy
        )
        return numpy.where(self.num_texts.compute() == 0, np.nan, score).astype(matches.dtype)


CHARACTER_ORDERS = 6
"""The longest sequence of characters that chrF counts."""


def _count_matches(pred: str, reference: str, lowercase: bool) -> np.ndarray:
    """Return the matches, the sequences and those of the reference by length, `(3, 6)`."""
    counts = np.zeros((3, CHARACTER_ORDERS), np.float32)
    for index in range(CHARACTER_ORDERS):
        mine = _count_sequences(pred, index + 1, lowercase)
        others = _count_sequences(reference, index + 1, lowercase)
        # Without a sequence of this length in the reference none of the text's is an error.
        total = mine.total() if others else 0
        counts[:, index] = (mine & others).total(), total, others.total()
    return counts


def _count_sequences(text: str, length: int, lowercase: bool) -> Counter[str]:
    """Return how often each sequence of that many characters is in a text, without white space."""
    characters = "".join((text.lower() if lowercase else text).split())
    starts = range(len(characters) - length + 1)
    return Counter(characters[start : start + length] for start in starts)


def _compute_chrf(matches: Any, totals: Any, reference_totals: Any, *, numpy: Any) -> Any:
    """Return the score of counts by length; lengths that one side does not have are left out."""
    is_counted = (totals > 0) & (reference_totals > 0)
    num_counted = numpy.maximum(numpy.sum(is_counted), 1)
    with jax.numpy_dtype_promotion("standard"):
        weight = is_counted / num_counted
    precision = numpy.sum(weight * matches / numpy.where(is_counted, totals, 1))
    recall = numpy.sum(weight * matches / numpy.where(is_counted, reference_totals, 1))
    denominator = 4 * precision + recall
    return 100 * 5 * precision * recall / numpy.where(denominator == 0, 1, denominator)


def _list_references(
    name: str, preds: Sequence[str], references: Sequence[str | Sequence[str]]
) -> list[list[str]]:
    """Return the references of each text.

    Args:
        name: of the metric, for errors.
        preds: the texts.
        references: for each text a right one, or several.

    Raises:
        ConfigurationError: they do not belong together, or a text has none.
    """
    if isinstance(preds, str) or len(preds) != len(references):
        raise ConfigurationError(
            f"{name} of {1 if isinstance(preds, str) else len(preds)} texts with "
            f"{len(references)} references; give two lists of one length"
        )
    lists = [[texts] if isinstance(texts, str) else list(texts) for texts in references]
    if not all(lists):
        raise ConfigurationError(
            f"{name}: text {lists.index([])} has no reference; leave it out, or give it one"
        )
    return lists


def _as_sum(counts: np.ndarray) -> Sum:
    total = jnp.asarray(counts, jnp.float32)
    return Sum(total, jnp.zeros_like(total))
