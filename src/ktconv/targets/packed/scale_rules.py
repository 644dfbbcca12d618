"""The scales that rows of a source can have, by the audit's own implementation of the rules."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec import Struct

from ktconv import native
from ktconv.formats import Format, reference
from ktconv.formats.search import possible_scales, storable
from ktconv.system.arrays import F32, Bools
from ktconv.targets.packed.proof import Proof

SMALLEST_SCALE, _LARGEST = np.finfo(np.float32).tiny, np.finfo(np.float32).max


class Allowed(Struct, frozen=True):
    """Allowed scales, from `least` to `most`, [rows, 1] or [rows, groups]; both are the same where
    a rule gives one scale. `kept`: the number of rows whose integers are kept, with the scale of
    their source."""

    least: F32
    most: F32
    kept: int = 0

    def includes(self, fmt: Format, scale: F32, factors: tuple[float, ...]) -> Bools:
        """Whether each scale is an allowed one times one of `factors`; NaN is not."""
        found: Bools = np.zeros(scale.shape, bool)
        for factor in map(np.float32, factors):
            least, most = (storable(fmt, factor * bound) for bound in (self.least, self.most))
            found |= (least <= scale) & (scale <= most)
        return found

    def equals(self, scale: F32, factors: tuple[float, ...]) -> bool:
        """Whether scales are the only ones that are allowed, all of them normal numbers: `includes`
        is then true. That is so of most matrices, and soon told."""
        if self.least is not self.most or 1.0 not in factors:
            return False
        if scale.dtype != self.most.dtype or not scale.size:
            return False
        if scale.tobytes() != self.most.tobytes():  # a copy of both is quicker than NumPy's way
            return False
        return bool(scale.min() >= SMALLEST_SCALE and scale.max() <= _LARGEST)

    @staticmethod
    def joined(pieces: Sequence[Allowed]) -> Allowed:
        """Allowed scales of rows, one piece behind the other."""
        if len(pieces) == 1:
            return pieces[0]
        most = np.concatenate([piece.most for piece in pieces])
        if all(piece.least is piece.most for piece in pieces):
            return Allowed(most, most)
        return Allowed(np.concatenate([piece.least for piece in pieces]), most)


def allowed_scales(
    fmt: Format, found: native.Audit, source: native.Matrix, proof: Proof
) -> Allowed:
    """Allowed scales of what was audited."""
    least = most = found.row_scale
    if not proof.exact:
        first = reference.scale_of(fmt, found.row_amax)
        least, most = possible_scales(fmt, found.row_amax, first)
    shape, count = (source.rows, -1), 0
    if source.row_scale is None and least is most:
        bound = most.reshape(shape)
        return Allowed(bound, bound)
    if source.row_scale is not None and not fmt.group:
        kept = source.row_scale / np.float32(fmt.traits.scale_units)
        limit = np.float32(fmt.traits.max_level + 0.5) * source.row_scale
        possible = (kept >= np.finfo(np.float32).tiny) & (found.row_amax <= limit)
        least, most = np.where(possible, kept, least), np.where(possible, kept, most)
        count = int(possible.sum())
    return Allowed(least.reshape(shape), most.reshape(shape), count)


def scales_of(fmt: Format, source: native.Matrix, proof: Proof) -> Allowed:
    """Allowed scales of rows that were packed as they are in `source`."""
    layout = fmt.layout
    nothing = np.zeros(layout.weight_size(source.rows, source.cols), np.uint8)
    scale = np.zeros(layout.scale_size(source.rows, source.cols), np.uint8)
    found = native.audit(layout, source, source.rows, 0, nothing, scale, proof.choice)
    return allowed_scales(fmt, found, source, proof)
