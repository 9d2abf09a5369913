"""How like predicted pictures are to the true ones.

Pictures are `(batch, height, width, channels)`. Each has a value of its own, which are averaged.
"""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from fulgurite.errors import ConfigurationError
from fulgurite.metrics import Mask, Mean, Metric, Value, Values
from jaxtyping import Array, Float

from fulgurite_metrics.regression import as_same_shape


class PSNR(Metric):
    """The peak signal-to-noise ratio in dB, 10·log10(range² / mean squared error), averaged over
    the pictures; infinite for equal ones, NaN without pictures.

    Example:
        from fulgurite_metrics import PSNR

        pictures = jnp.zeros((4, 8, 8, 1))
        PSNR.from_images(pictures, pictures + 0.1, mask).compute()  # 20.0
    """

    higher_is_better: ClassVar[bool | None] = True

    mean: Mean

    @staticmethod
    def from_images(
        preds: Values, targets: Values, mask: Mask | None = None, data_range: float = 1.0
    ) -> "PSNR":
        """Return the ratio of a batch.

        Args:
            preds: `(batch, height, width, channels)`.
            targets: of the same shape.
            mask: bools `(batch,)`.
            data_range: the difference of the largest and the smallest possible value.
        """
        preds, targets = _as_pictures(preds, targets, data_range, "PSNR")
        errors = jnp.mean((preds - targets) ** 2, axis=(1, 2, 3))
        return PSNR(Mean.from_values(10 * jnp.log10(data_range**2 / errors), mask))

    def compute(self) -> Value:
        return self.mean.compute()


class SSIM(Metric):
    """The structural similarity, averaged over channels and pictures; 1 for equal ones, NaN without
    pictures. The window is a Gaussian of 11 pixels with a standard deviation of 1.5, and is only
    placed where it fits.

    Source: Wang, Bovik, Sheikh and Simoncelli, Image Quality Assessment (2004).

    Example:
        from fulgurite_metrics import SSIM

        pictures = jnp.linspace(0, 1, 4 * 256).reshape(4, 16, 16, 1)
        SSIM.from_images(pictures, pictures**2, mask).compute()
    """

    higher_is_better: ClassVar[bool | None] = True

    mean: Mean

    @staticmethod
    def from_images(
        preds: Values, targets: Values, mask: Mask | None = None, data_range: float = 1.0
    ) -> "SSIM":
        """Return the similarity of a batch.

        Args:
            preds: `(batch, height, width, channels)`, at least 11 pixels high and wide.
            targets: of the same shape.
            mask: bools `(batch,)`.
            data_range: the difference of the largest and the smallest possible value.
        """
        preds, targets = _as_pictures(preds, targets, data_range, "SSIM")
        if min(preds.shape[1:3]) < _WINDOW:
            raise ConfigurationError(
                f"SSIM of pictures {list(preds.shape)}; they are at least {_WINDOW} pixels high "
                "and wide, as its window is"
            )
        # Without what both have in common the squares below cancel less.
        center = jnp.mean(targets, axis=(1, 2), keepdims=True)
        first, second = preds - center, targets - center
        mean_first, mean_second = _blur(first), _blur(second)
        variances = _blur((first - second) ** 2) - (mean_first - mean_second) ** 2
        covariance = _blur(first * second) - mean_first * mean_second
        small = (0.01 * data_range) ** 2
        contrast_small = (0.03 * data_range) ** 2
        mean_first, mean_second = mean_first + center, mean_second + center
        brightness = 2 * mean_first * mean_second + small
        brightness /= mean_first**2 + mean_second**2 + small
        # The variance of the difference is the sum of both minus twice the covariance.
        structure = 2 * covariance + contrast_small
        structure /= variances + 2 * covariance + contrast_small
        return SSIM(Mean.from_values(jnp.mean(brightness * structure, axis=(1, 2, 3)), mask))

    def compute(self) -> Value:
        return self.mean.compute()


_WINDOW = 11
_OFFSETS = np.arange(_WINDOW) - _WINDOW // 2
_GAUSSIAN = np.exp(-(_OFFSETS**2) / (2 * 1.5**2))
_GAUSSIAN /= _GAUSSIAN.sum()


def _blur(
    pictures: Float[Array, "batch height width channels"],
) -> Float[Array, "batch inner_height inner_width channels"]:
    """Return the weighted mean of each window that fits."""
    kernel = jnp.asarray(_GAUSSIAN, pictures.dtype)
    for axis in (1, 2):
        size = pictures.shape[axis] - _WINDOW + 1
        shifted = [
            weight * jax.lax.slice_in_dim(pictures, start, start + size, axis=axis)
            for start, weight in enumerate(kernel)
        ]
        pictures = jnp.sum(jnp.stack(shifted), axis=0)
    return pictures


def _as_pictures(
    preds: Any, targets: Any, data_range: float, metric_name: str
) -> tuple[Array, Array]:
    preds, targets = as_same_shape(preds, targets, metric_name)
    if preds.ndim != 4 or 0 in preds.shape[1:]:
        raise ConfigurationError(
            f"{metric_name} of pictures {list(preds.shape)}; they are (batch, height, width, "
            "channels)"
        )
    if not data_range > 0:
        raise ConfigurationError(
            f"{metric_name} with data_range={data_range}; it is the largest value minus the "
            "smallest, such as 1.0 or 255"
        )
    return preds, targets
