"""Packing and audit of every stored element, in caches; two versions of ktconv side by side.

    python benchmarks/packing.py                           # this version
    python benchmarks/packing.py --against OTHER/src       # ratios to another built tree
    python benchmarks/packing.py --dtypes BF16 --scales amax,search,weighted

Two processes on the same core take turns every few milliseconds, so that what the host does
meets both; the memory of packed bytes begins at another offset in each round. GB/s are of decoded
bf16, whatever the source takes. Elements that the other version does not know have no ratio.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from pairs import SLICE, Version, pair_row, start_versions

ROWS, COLS = 512, 4096  # the source of one call, as a conversion reads it
PLAIN = {"BF16": 2, "F16": 2, "F32": 4}
UNITS = {
    "F8_E4M3": (1, 1), "F4_E2M1": (1, 2), "I8": (1, 1), "U2": (4, 16), "U3": (12, 32), "U4": (4, 8),
    "U5": (20, 32), "U6": (12, 16), "U7": (28, 32), "U8": (4, 4), "U4_AWQ": (4, 1),
    "I4": (1, 2), "F4_E0M3": (1, 2),
}  # fmt: skip
GGML = {
    "Q4_0": (18, 32), "Q4_1": (20, 32), "Q5_0": (22, 32), "Q5_1": (24, 32), "Q8_0": (34, 32),
    "Q2_K": (84, 256), "Q3_K": (110, 256), "Q4_K": (144, 256), "Q5_K": (176, 256),
    "Q6_K": (210, 256), "IQ4_NL": (18, 32), "IQ4_XS": (136, 256), "MXFP4": (17, 32),
    "NVFP4": (36, 64), "TQ1_0": (54, 256), "TQ2_0": (66, 256),
}  # fmt: skip
RULES = ("amax", "search", "weighted")  # weighted: the search with an importance
TRANSPOSED = ("BF16", "F16", "F32", "U4", "U8", "U4_AWQ")


@dataclass(frozen=True)
class Case:
    what: str  # pack or audit
    isa: str
    dtype: str
    transposed: bool
    method: str
    scale: str  # of RULES

    @property
    def rows(self) -> int:
        """Fewer where a row takes long, so that a call is shorter than a turn on a busy CPU."""
        return ROWS if self.scale == "amax" else ROWS // 8

    @property
    def name(self) -> str:
        order = ", [in, out]" if self.transposed else ""
        return f"{self.what} {self.isa} {self.dtype}{order} {self.method} {self.scale}"


# ---- the measured process ---------------------------------------------------------------


def source(case: Case) -> Any:
    import numpy as np

    from ktconv import native

    rng = np.random.default_rng(0)
    if case.dtype in PLAIN:
        values = rng.standard_normal((case.rows, COLS), np.float32)
        stored: Any = values if case.dtype == "F32" else values.astype(np.float16)
        if case.dtype == "BF16":
            stored = (values.view(np.uint32) >> 16).astype(np.uint16)
        rows, cols, scales = case.rows, COLS, {}
    elif case.dtype in GGML:
        size, wide = GGML[case.dtype]
        rows, cols, scales = case.rows, COLS // wide, {}
        # Of no two bytes half precision makes an infinity or a NaN.
        stored = rng.integers(0, 0x7C, (rows, cols * size), np.uint8).view(f"V{size}")
    else:
        size, wide = UNITS[case.dtype]
        high = 8 if case.dtype == "U4_AWQ" else 1
        rows, cols = case.rows // high, COLS // wide
        stored = rng.integers(0, 0x7E, (rows, cols * size), np.uint8).view(f"V{size}")
        block = (128, 128) if case.dtype == "F8_E4M3" else (1, 32)
        grid = rng.uniform(0.5, 1, (-(-case.rows // block[0]), COLS // block[1])).astype(np.float32)
        scales = {"block_scale": grid, "block": block}
    strides = (cols, 1)
    if case.transposed:
        stored, strides = np.ascontiguousarray(stored.T), (1, rows)
    data = stored.reshape(-1).view(np.uint8)
    return native.Matrix(
        data, case.dtype, case.rows, COLS, row_stride=strides[0], col_stride=strides[1], **scales
    )


def choice_of(case: Case) -> dict[str, Any]:
    """Options of a call; AttributeError from a version without the search."""
    import numpy as np

    from ktconv import native

    if case.scale == "amax":
        return {}
    importance = np.random.default_rng(1).lognormal(0, 1, COLS).astype(np.float32)
    return {"choice": native.Choice("search", importance if case.scale == "weighted" else None)}


def answer_forever() -> None:
    """Case and offset per line in, seconds of the fastest call out; -1: cannot be run."""
    import numpy as np

    from ktconv import native

    known: dict[Case, Any] = {}
    for line in sys.stdin:
        *fields, offset = json.loads(line)
        case = Case(*fields)
        try:
            native.use_isa(case.isa)
            if case not in known:
                known = {case: source(case)}
            matrix, size = known[case], native.packed_size(case.method, case.rows, COLS)
            choice = choice_of(case)
        except (AttributeError, KeyError, ValueError):
            print(-1.0, flush=True)
            continue
        room = np.empty(size + 8192, np.uint8)
        start = -room.ctypes.data % 64 + 64 * offset
        packed, scale = room[start : start + size], np.empty(case.rows, np.float32)
        scratch, fastest = native.new_scratch(COLS), float("inf")
        native.quantize_pack(case.method, matrix, packed, scale, scratch, **choice)
        end = time.perf_counter() + SLICE
        while time.perf_counter() < end:
            begin = time.perf_counter()
            if case.what == "pack":
                native.quantize_pack(case.method, matrix, packed, scale, scratch, **choice)
            else:
                native.audit(case.method, matrix, case.rows, 0, packed, scale, **choice)
            fastest = min(fastest, time.perf_counter() - begin)
        print(fastest, flush=True)


# ---- the report -------------------------------------------------------------------------


def cases(levels: list[str], dtypes: list[str], rules: list[str]) -> list[Case]:
    return [
        Case(what, isa, dtype, transposed, method, rule)
        for what in ("pack", "audit")
        for isa in levels
        for dtype in dtypes
        for transposed in (False, True)
        if not transposed or dtype in TRANSPOSED
        for method in ("int4", "int8")
        if dtype != "U4_AWQ" or transposed
        for rule in rules
    ]


def report(versions: list[Version], case: Case, rounds: int) -> str:
    work = case.rows * COLS * 2 / 1e9
    return pair_row(versions, case.name, work, [*astuple(case)], rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--against", type=Path, help="directory with another built ktconv")
    parser.add_argument("--isa", default="avx512,avx2,scalar")
    parser.add_argument("--dtypes", default=",".join((*PLAIN, *UNITS, *GGML)))
    parser.add_argument("--scales", default="amax,search", help=f"of {', '.join(RULES)}")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--answer", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.answer:
        answer_forever()
        return
    versions = start_versions(__file__, options.against)
    print("| case | GB/s | times the other's speed |")
    print("| --- | ---: | ---: |")
    asked = (options.isa.split(","), options.dtypes.split(","), options.scales.split(","))
    for case in cases(*asked):
        print(report(versions, case, options.rounds), flush=True)


if __name__ == "__main__":
    main()
