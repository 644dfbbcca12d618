"""Importance of each input channel of an expert's matrix: from the mean squares of its inputs,
drawn towards those of its layer where it saw few tokens.

With m[e] the mean squares of expert e over n[e] tokens, divided by their mean over the channels,

    layer = mean over all tokens of m = sum(n[e] m[e]) / sum(n[e])
    v[e]  = m[e]^a layer^(1 - a), a = n[e] / (n[e] + SHRINKAGE)

with m and the layer's mean at least FLOOR; weights are v divided by its mean. A weighted sum in
place of the product would raise the channels that only this expert hardly uses, where its weights
may be large. docs/calibration.md has the measurements that this follows from.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ktconv.system.arrays import F32, I64

F64 = npt.NDArray[np.float64]

SHRINKAGE = 64  # tokens: an expert with so many is half its own and half its layer's
# Of the mean. Not 0, as the weights of a channel that the text never used could become anything;
# and small, since where inputs are small, weights can be large.
FLOOR = 2.0**-24
_BITS = 12  # of the exponent a


def channel_weights(means: F32, counts: I64, shrinkage: float = SHRINKAGE) -> F32:
    """Weights [E, channels] of mean 1 from mean squares [E, channels] over `counts` [E] tokens.

    Means of experts without tokens are not looked at. Another shrinkage is for measurements
    (benchmarks/importance.py). ValueError if no expert has a token and a mean that is not 0: then
    there is nothing that weights could follow from.
    """
    layer = np.maximum(_layer_mean(means, counts), FLOOR)
    found: F32 = np.empty(means.shape, np.float32)
    for expert, (own, tokens) in enumerate(zip(means, counts.tolist(), strict=True)):
        profile = _profile(own) if tokens else None
        drawn = layer
        if profile is not None:
            ratio = np.maximum(profile, FLOOR) / layer
            drawn = layer * _power(ratio, tokens / (tokens + shrinkage))
        found[expert] = drawn / _mean(drawn)
    return found


def layer_profile(means: F32, counts: I64) -> F64:
    """The layer's mean [channels] alone, at least FLOOR, of mean 1; as `channel_weights` says."""
    layer = np.maximum(_layer_mean(means, counts), FLOOR)
    profile: F64 = layer / _mean(layer)
    return profile


def normalised(counted: F64) -> F32 | None:
    """Weights [channels] of mean 1 in proportion to what errors count, at least FLOOR of their
    mean; None if all are 0."""
    size = _mean(counted)
    if size == 0:
        return None
    floored = np.maximum(counted / size, FLOOR)
    weights: F32 = (floored / _mean(floored)).astype(np.float32)
    return weights


def _layer_mean(means: F32, counts: I64) -> F64:
    """[channels], added up expert by expert."""
    total, tokens = np.zeros(means.shape[1]), 0
    for own, number in zip(means, counts.tolist(), strict=True):
        profile = _profile(own) if number else None
        if profile is not None:
            total += number * profile
            tokens += number
    if not tokens:
        raise ValueError("no expert has inputs")
    total /= tokens
    return total


def _profile(means: F32) -> F64 | None:
    """Mean squares [channels] divided by their mean; None if all are 0.

    Experts whose inputs are large would otherwise make the layer's mean by themselves.
    """
    wide = means.astype(np.float64)
    size = _mean(wide)
    return wide / size if size > 0 else None


def _mean(values: F64) -> float:
    """Added up from the first channel on, and so the same on every machine: a sum would follow the
    order that the installed NumPy prefers."""
    return float(np.cumsum(values)[-1]) / len(values)


def _power(values: F64, exponent: float) -> F64:
    """values^exponent, of an exponent from 0 to below 1 that is cut to _BITS bits.

    By square roots, which are the same on every machine; those of `pow` are not.
    """
    bits = int(exponent * 2**_BITS)
    found, root = np.ones_like(values), values
    for bit in reversed(range(_BITS)):
        root = np.sqrt(root)
        if bits >> bit & 1:
            found *= root
    return found
