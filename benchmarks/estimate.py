#!/usr/bin/env python3
"""How long `quantize-cpu --dry-run --estimate` takes for models that fit on no disk here.

    python benchmarks/estimate.py DIR --preset deepseek-v3 --layers 60 --dtype bf16 --repeats 3

Writes a checkpoint of full size to DIR whose weights are holes, and fills in random ones where an
estimate will look: which rows it samples follows from headers alone. Then runs the command, with
the source dropped from the page cache, and prints a line of a table. DIR stays, for another run.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import make_checkpoint
import measure
import numpy as np
import numpy.typing as npt

from ktconv.quantize.estimate.sampling import Limits, Sample, draw
from ktconv.quantize.packed.run import Request, prepare
from ktconv.source import ExpertMatrix
from ktconv.source.encodings.grids import scale_span
from ktconv.targets.packed.target import Options

POOL_ELEMENTS = 4 << 20
SHARD_BYTES = 4 * 10**9
FUSED_SHARD_BYTES = 40 * 10**9  # all experts of a layer are one tensor


class Filler:
    """Writes random weights, and scales about 2^-9, where samples are."""

    def __init__(self, dtype: str) -> None:
        self._random = np.random.default_rng(0)
        typical = make_checkpoint.FP8_MAX / 8 if dtype == "F8_E4M3" else 0.02
        values = self._random.standard_normal(POOL_ELEMENTS).astype(np.float32)
        self._pool = make_checkpoint.as_bytes(
            make_checkpoint.encode(values * np.float32(typical), dtype)
        )

    def fill(self, sample: Sample) -> None:
        """All of the sample's rows, in the order of the file, and all scales of its matrix."""
        matrix, rows = sample.matrix, sample.rows
        size = matrix.element.unit_bytes
        across, along = matrix.row_stride, len(rows) * matrix.cols
        pieces = [(rows.start * across, along)]
        if matrix.col_stride != 1:  # [in, out]
            along = (len(rows) - 1) * across + 1
            start = rows.start * across
            pieces = [(start + col * matrix.col_stride, along) for col in range(matrix.cols)]
        with matrix.tensor.file.open("r+b") as file:
            for at, count in pieces:
                file.seek(matrix.tensor.offset + (matrix.start + at) * size)
                file.write(self._bytes(count * size))
        self._fill_scales(matrix)

    def _bytes(self, count: int) -> memoryview:
        at = 4 * int(self._random.integers((len(self._pool) - count) // 4))
        return self._pool[at : at + count]

    def _fill_scales(self, matrix: ExpertMatrix) -> None:
        if matrix.scale is None:
            return
        offset, length = scale_span(matrix.scale, matrix.rows, matrix.cols)
        scales = np.exp(self._random.normal(-6.0, 0.1, length // 4)).astype(np.float32)
        with matrix.scale.tensor.file.open("r+b") as file:
            _write_at(file, matrix.scale.tensor.offset + offset, scales)


def _write_at(file: BinaryIO, offset: int, values: npt.NDArray[np.float32]) -> None:
    file.seek(offset)
    file.write(make_checkpoint.as_bytes(values))


def make(directory: Path, options: argparse.Namespace) -> None:
    """The checkpoint, with weights where an estimate looks."""
    preset = replace(make_checkpoint.PRESETS[options.preset], layers=options.layers)
    shard = FUSED_SHARD_BYTES if options.fused else SHARD_BYTES
    fused = options.fused
    make_checkpoint.write_checkpoint(directory, preset, options.dtype, fused, shard, 0, holes=True)
    plan = prepare(Request(str(directory), directory.parent / "none", Options(numa=options.numa)))
    filler = Filler({"bf16": "BF16", "fp8": "F8_E4M3"}[options.dtype])
    for sample in draw(plan.units, Limits()):
        filler.fill(sample)


def run(directory: Path, numa: int) -> tuple[measure.Run, dict[str, Any]]:
    """The command with a cold source, and its JSON."""
    measure.drop_from_cache(measure.source_files(directory))
    command = [sys.executable, "-m", "ktconv", "quantize-cpu", str(directory)]
    command += [str(directory.parent / "none"), "--numa", str(numa)]
    done = measure.run_measured([*command, "--dry-run", "--estimate", "--json"])
    if done.code:
        sys.exit(done.stderr)
    return done, json.loads(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--preset", choices=make_checkpoint.PRESETS, default="deepseek-v3")
    parser.add_argument("--layers", type=int, default=60)
    parser.add_argument("--dtype", choices=["bf16", "fp8"], default="bf16")
    parser.add_argument("--fused", choices=["out-in", "in-out"])
    parser.add_argument("--numa", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    if not options.directory.exists():
        make(options.directory, options)
    for _ in range(options.repeats):
        done, facts = run(options.directory, options.numa)
        found = facts["estimate"]
        print(
            f"| {facts['source_bytes'] / 1e9:.0f} GB | {done.seconds:.1f} s | "
            f"{found['seconds']:.1f} s | {done.cpu_seconds:.1f} s | "
            f"{done.other_cpu_seconds:.0f} s | {found['bytes_read'] / 1e6:.0f} MB | "
            f"{found['matrices_sampled']} of {found['matrices_planned']} | "
            f"{done.peak.high_water / 2**20:.0f} MiB |",
            flush=True,
        )


if __name__ == "__main__":
    main()
