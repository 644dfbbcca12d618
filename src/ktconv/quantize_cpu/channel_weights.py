"""What squared errors of each input channel of an expert's matrix count: from the mean squares of
its inputs, drawn towards those of its layer where it saw few tokens.

With m[e] the mean squares of expert e over n[e] tokens, divided by their mean over the channels,

    layer = mean over all tokens of m = sum(n[e] m[e]) / sum(n[e])
    prior = (1 - UNIFORM) layer + UNIFORM
    v[e]  = (n[e] m[e] + SHRINKAGE prior) / (n[e] + SHRINKAGE)

and weights are v, at least FLOOR, divided by their mean. docs/calibration.md has the measurements
that the constants follow from.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ktconv.system.arrays import F32, I64

F64 = npt.NDArray[np.float64]

SHRINKAGE = 256  # tokens: an expert with so many is half its own and half its layer's
UNIFORM = 0.5
FLOOR = 2.0**-10


def channel_weights(
    means: F32, counts: I64, shrinkage: float = SHRINKAGE, uniform: float = UNIFORM
) -> F32:
    """Weights [E, channels] of mean 1 from mean squares [E, channels] over `counts` [E] tokens.

    Means of experts without tokens are not looked at. Other constants are for measurements
    (benchmarks/importance.py). ValueError if no expert has a token and a mean that is not 0: then
    there is nothing that weights could follow from.
    """
    profiles, tokens = _profiles(means, counts)
    prior = (1 - uniform) * _layer_mean(profiles, tokens) + uniform
    own = tokens[:, None]
    weights = (own * profiles + shrinkage * prior) / (own + shrinkage)
    floored = np.maximum(weights, FLOOR)
    found: F32 = (floored / _row_means(floored)).astype(np.float32)
    return found


def layer_profile(means: F32, counts: I64) -> F64:
    """The layer's mean [channels] alone, at least FLOOR, of mean 1; as `channel_weights` says."""
    floored = np.maximum(_layer_mean(*_profiles(means, counts)), FLOOR)[None]
    profile: F64 = (floored / _row_means(floored))[0]
    return profile


def _profiles(means: F32, counts: I64) -> tuple[F64, F64]:
    """Means divided by those of their rows, and tokens [E]; both 0 for experts that say nothing.

    Experts whose inputs are large would otherwise make the layer's mean by themselves.
    """
    wide = means.astype(np.float64)
    size = _row_means(wide)[:, 0]
    tells = (counts > 0) & (size > 0)
    if not tells.any():
        raise ValueError("no expert has inputs")
    divisor = np.where(tells, size, 1.0)[:, None]
    return np.where(tells[:, None], wide / divisor, 0.0), np.where(tells, counts, 0).astype(float)


def _layer_mean(profiles: F64, tokens: F64) -> F64:
    """[channels], added up expert by expert."""
    total = np.zeros(profiles.shape[1])
    for profile, number in zip(profiles, tokens, strict=True):
        total += number * profile
    total /= np.cumsum(tokens)[-1]
    return total


def _row_means(values: F64) -> F64:
    """[E, 1]. Added up from the first channel on, and so the same on every machine: a sum would
    follow the order that the installed NumPy prefers."""
    means: F64 = np.cumsum(values, axis=1)[:, -1:] / values.shape[1]
    return means
