"""`--stage pack`: how fast weights are quantized and packed, against copying memory.

GB/s count source bytes, on one thread, over more matrices than fit into the caches.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product

import numpy as np
from msgspec import Struct
from msgspec.structs import asdict

from ktconv import native
from ktconv.bench.fingerprint import fingerprint
from ktconv.bench.limits import level_kept
from ktconv.bench.measure import Effort, timed
from ktconv.bench.presets import Shape
from ktconv.bench.render import render_rows
from ktconv.errors import UsageError
from ktconv.formats import FORMATS, output_formats
from ktconv.formats.decode import f32_to_bf16
from ktconv.system import machine
from ktconv.system.arrays import Array
from ktconv.system.text import Notify
from ktconv.system.units import format_size

SCHEMA = 1  # docs/bench-pack.schema.json
SOURCES = ("BF16", "F16", "F32", "F8_E4M3", "BF16 [in, out]")
_WORKING_SET = 128 << 20  # bytes of source per pass
_SLOW_SHARE = 8  # scalar code and the search of scales get an eighth of the work
_SHARE_OF_MEMORY = 0.8
_MOST_ITEM = 4  # largest size of a source element in bytes


class PackRow(Struct, frozen=True):
    """One measured case; rates are of source bytes. See docs/bench-pack.schema.json."""

    method: str
    source: str
    rows: int
    cols: int
    isa: str
    scale: str  # how scales are chosen: "amax" or "search"
    pack_gb_s: float
    audit_gb_s: float  # reading back and comparing with the source, as conversions do
    memcpy_gb_s: float
    share_of_memcpy: float


def bench_packing(
    methods: Sequence[str],
    shapes: Sequence[Shape],
    isas: Sequence[str],
    notify: Notify,
    *,
    effort: Effort | None = None,
    seed: int = 0,
    working_set: int = _WORKING_SET,
) -> list[PackRow]:
    """Measure gate matrices [I, H] of each shape. Raises UsageError, before it measures, for a
    method without a packer and for matrices that do not fit into the format or into memory."""
    for method in methods:
        _check(method, shapes, working_set)
    rows: list[PackRow] = []
    with level_kept():
        for method, shape, source in product(methods, shapes, SOURCES):
            notify(f"{method} from {source}, {shape.intermediate} x {shape.hidden}")
            work = (seed, working_set)
            rows += _case(method, source, shape, isas, effort or Effort(), *work)
    return rows


def _check(method: str, shapes: Sequence[Shape], working_set: int) -> None:
    if method not in output_formats():
        raise UsageError(
            f"--stage pack cannot measure {method}", f"it can: {', '.join(output_formats())}"
        )
    for shape in shapes:
        rows, cols = shape.intermediate, shape.hidden
        try:
            size = native.packed_size(FORMATS[method].layout, rows, cols)
        except ValueError as error:
            raise UsageError(str(error), "give another --shape") from None
        source = _MOST_ITEM * rows * cols
        # Drawing one takes four times its size; of each there is one to pack and two to copy.
        needed = 4 * source + _count(source, working_set) * (3 * source + size + 4 * rows)
        if needed > _SHARE_OF_MEMORY * machine.available_memory():
            raise UsageError(
                f"measuring with {rows} x {cols} takes {format_size(needed)}, more than this "
                "machine has free",
                "give a smaller --shape",
            )


def _count(nbytes: int, working_set: int) -> int:
    """Number of matrices that are packed in turn."""
    return max(_SLOW_SHARE, working_set // nbytes)


def _case(
    method: str,
    source: str,
    shape: Shape,
    isas: Sequence[str],
    effort: Effort,
    seed: int,
    working_set: int,
) -> list[PackRow]:
    rows, cols = shape.intermediate, shape.hidden
    size = native.packed_size(method, rows, cols)
    stored = stored_weights(source, rows, cols, seed)
    count = _count(stored.nbytes, working_set)
    matrices = [_matrix(stored.copy(), source, rows, cols) for _ in range(count)]
    packed = [np.zeros(size, np.uint8) for _ in matrices]
    scales = [np.zeros(rows, np.float32) for _ in matrices]
    scratch = native.new_scratch(cols)
    copied = _copy_rate(stored.nbytes * count, effort)
    found = []
    for isa, rule in product(isas, native.RULES):
        native.use_isa(isa)
        slow = isa == "scalar" or rule == "search"
        used = max(1, count // _SLOW_SHARE) if slow else count
        nbytes, choice = stored.nbytes * used, native.Choice(rule)
        work = Work(list(zip(matrices, packed, scales, strict=True))[:used], choice, scratch)
        pack = _rate(partial(_pack_all, method, work), nbytes, effort)
        audit = _rate(partial(_audit_all, method, work), nbytes, effort)
        rates = pack, audit, copied, pack / copied
        found.append(PackRow(method, source, rows, cols, isa, rule, *rates))
    return found


class Work(Struct, frozen=True):
    """Matrices with room for their packed bytes and scales, and how those are chosen."""

    items: Sequence[tuple[native.Matrix, Array, Array]]
    choice: native.Choice
    scratch: Array


def _pack_all(method: str, work: Work) -> None:
    for matrix, packed, scale in work.items:
        native.quantize_pack(method, matrix, packed, scale, work.scratch, work.choice)


def _audit_all(method: str, work: Work) -> None:
    for matrix, packed, scale in work.items:
        native.audit(method, matrix, matrix.rows, 0, packed, scale, work.choice, work.scratch)


def stored_weights(source: str, rows: int, cols: int, seed: int) -> Array:
    """Ordinary weights as bytes of a safetensors dtype (FP8: random codes)."""
    rng, dtype = np.random.default_rng(seed), _dtype(source)
    if dtype == "F8_E4M3":
        return rng.integers(0, 0x7F, rows * cols, np.uint8)
    values = rng.standard_normal(rows * cols, np.float32) * np.float32(0.02)
    if dtype == "BF16":
        return f32_to_bf16(values).view(np.uint8)
    stored: Array = values.astype(np.float16) if dtype == "F16" else values
    return stored.view(np.uint8)


def _matrix(buffer: Array, source: str, rows: int, cols: int) -> native.Matrix:
    dtype = _dtype(source)
    if source != dtype:
        return native.Matrix(buffer, dtype, rows, cols, row_stride=1, col_stride=rows)
    if dtype != "F8_E4M3":
        return native.Matrix(buffer, dtype, rows, cols)
    grid = np.full((-(-rows // 128), -(-cols // 128)), 1e-3, np.float32)
    return native.Matrix(buffer, dtype, rows, cols, block_scale=grid, block=(128, 128))


def _dtype(source: str) -> str:
    """The safetensors dtype in a name of SOURCES; the rest is the order of the dimensions."""
    return source.partition(" ")[0]


def _copy_rate(nbytes: int, effort: Effort) -> float:
    source, target = np.ones(nbytes, np.uint8), np.empty(nbytes, np.uint8)
    np.copyto(target, source)
    return _rate(lambda: np.copyto(target, source), nbytes, effort)


def _rate(work: Callable[[], None], nbytes: int, effort: Effort) -> float:
    """GB/s, the median of some passes after one that warms up."""
    work()
    return nbytes / 1e9 / statistics.median(timed([work], effort))


_COLUMNS: dict[str, Callable[[PackRow], str]] = {
    "method": lambda row: row.method,
    "source": lambda row: row.source,
    "matrix": lambda row: f"{row.rows} x {row.cols}",
    "isa": lambda row: row.isa,
    "scale": lambda row: row.scale,
    "pack GB/s": lambda row: f"{row.pack_gb_s:.1f}",
    "audit GB/s": lambda row: f"{row.audit_gb_s:.1f}",
    "memcpy GB/s": lambda row: f"{row.memcpy_gb_s:.1f}",
    "share": lambda row: f"{row.share_of_memcpy:.0%}",
}


def render_packing(rows: Sequence[PackRow], form: str) -> str:
    """Render rows in one of render.FORMATS."""
    facts = [asdict(row) for row in rows]
    report = {"schema": SCHEMA, "stage": "pack", "machine": fingerprint(), "rows": facts}
    cells = [[text(row) for text in _COLUMNS.values()] for row in rows]
    words = {"method", "source", "matrix", "isa", "scale"}
    return render_rows(form, report, facts, list(_COLUMNS), cells, words)
