"""Four-bit codes in words of neighbouring inputs, with scales by group and output: GPTQ's tensors,
and what KTransformers' converter makes of AWQ (SPEC 7).

Both have the words of kt_encode, q + 8 with the first input in the lowest bits; GPTQ's are
transposed. Zero points are 8 everywhere, but those of an AWQ
source, which are kept. GPTQ's first version, the one that engines read without
being told, stores them less one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ktconv.targets.encoded.layouts.base import Layout, Sizes

if TYPE_CHECKING:
    from ktconv.system.arrays import U8, Array


def _groups(sizes: Sizes) -> int:
    return sizes.scale_shape[1]


class _Gptq(Layout):
    name = "gptq"
    parts = ("qweight", "qzeros", "scales", "g_idx")
    scale_part = "scales"
    streamed = False

    def shapes(self, sizes: Sizes) -> Sequence[tuple[str, tuple[int, ...], int]]:
        words, groups = sizes.row_bytes // 4, _groups(sizes)
        return (
            ("I32", (words, sizes.rows), 4 * words * sizes.rows),
            ("I32", (groups, sizes.rows // 8), groups * sizes.rows // 2),
            (sizes.scale_dtype, (groups, sizes.rows), 2 * groups * sizes.rows),
            ("I32", (sizes.cols,), 4 * sizes.cols),
        )

    def others(
        self, sizes: Sizes, scales: Array, factor: float, zeros: U8 | None = None
    ) -> Mapping[str, Array]:
        import numpy as np

        groups = _groups(sizes)
        return {
            "qzeros": np.full((groups, sizes.rows // 8), 0x77777777, "<u4"),
            "scales": np.ascontiguousarray(scales.T),
            "g_idx": np.arange(sizes.cols, dtype="<i4") // (sizes.cols // groups),
        }

    def whole(self, codes: U8) -> U8:
        import numpy as np

        words = codes.view("<u4")
        return np.ascontiguousarray(words.T).reshape(-1).view(np.uint8)

    def codes(self, stored: U8, sizes: Sizes) -> U8:
        import numpy as np

        words = stored.view("<u4").reshape(-1, sizes.rows)
        return np.ascontiguousarray(words.T).view(np.uint8)

    def scales(self, parts: Mapping[str, U8], sizes: Sizes) -> U8:
        import numpy as np

        stored = parts["scales"].view("<u2").reshape(-1, sizes.rows)
        return np.ascontiguousarray(stored.T).view(np.uint8)


class _Awq(Layout):
    name = "awq"
    parts = ("weight", "qzeros", "scale")
    scale_part = "scale"

    def shapes(self, sizes: Sizes) -> Sequence[tuple[str, tuple[int, ...], int]]:
        words, groups = sizes.row_bytes // 4, _groups(sizes)
        return (
            ("I32", (sizes.rows, words), 4 * words * sizes.rows),
            ("I32", (groups, sizes.rows // 8), groups * sizes.rows // 2),
            (sizes.scale_dtype, (groups * sizes.rows,), 2 * groups * sizes.rows),
        )

    def others(
        self, sizes: Sizes, scales: Array, factor: float, zeros: U8 | None = None
    ) -> Mapping[str, Array]:
        import numpy as np

        stored = np.full((_groups(sizes), sizes.rows // 8), 0x88888888, "<u4")
        if zeros is not None:  # eight outputs in a word, the first in the lowest bits
            pairs = zeros.T[:, 0::2] | zeros.T[:, 1::2] << np.uint8(4)
            stored = np.ascontiguousarray(pairs).view("<u4")
        return {"qzeros": stored, "scale": np.ascontiguousarray(scales.T).reshape(-1)}

    def zeros(self, parts: Mapping[str, U8], sizes: Sizes) -> U8 | None:
        import numpy as np

        stored = parts["qzeros"].reshape(_groups(sizes), -1)
        found = np.stack([stored & 15, stored >> 4], -1).reshape(_groups(sizes), -1)
        return np.ascontiguousarray(found.T)

    def scales(self, parts: Mapping[str, U8], sizes: Sizes) -> U8:
        import numpy as np

        stored = parts["scale"].view("<u2").reshape(-1, sizes.rows)
        return np.ascontiguousarray(stored.T).view(np.uint8)


GPTQ = _Gptq()
AWQ = _Awq()
