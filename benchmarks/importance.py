#!/usr/bin/env python3
"""Measure how importance from few tokens should be drawn towards that of its layer.

    importance.py MODEL TEXT WORK

The second half of TEXT says what the inputs of experts are. From pieces of the first half, of 128
to 8192 tokens, importance is recorded in WORK, where a later run finds it. Rows of gate and down
are quantized to INT4 with weights that follow from it; errors are weighed by the mean squares of
the second half, and printed as multiples of those of the unweighted search: for experts that got so
many tokens, by SHRINKAGE (columns), for every UNIFORM.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from ktconv import native
from ktconv.checkpoint import ExpertMatrix, Projection, open_checkpoint
from ktconv.formats import FORMATS, reference
from ktconv.quantize_cpu.channel_weights import channel_weights
from ktconv.reading.buffers import Buffers
from ktconv.reading.decoded import source_buffer
from ktconv.reading.matrices import MatrixReader
from ktconv.reading.reader import SourceReader
from ktconv.stats import Recorder, Wanted, read_importance
from ktconv.stats.importance_file import LayerImportance
from ktconv.system.arrays import F32

TOKENS = (128, 256, 512, 1024, 2048, 4096, 8192)
SEEDS = 4
SHRINKAGES = (0, 16, 64, 128, 256, 1024, 1e12)
UNIFORMS = (0.0, 0.5, 1.0)
BINS = (0, 8, 24, 64, 200, 600)  # tokens of an expert, from these on
ROWS, HELD = 64, 500  # rows of each matrix; the fewest tokens of an expert in the second half
INT4 = FORMATS["int4"]

Layers = dict[int, LayerImportance]
Key = tuple[Projection, float, float, int]  # projection, UNIFORM, SHRINKAGE, first of BINS


def recorded(recorder: Recorder, text: str, tokens: int, path: Path) -> Layers:
    """Importance of the first tokens of a text, from `path` if it is there."""
    if not path.exists():
        work = path.parent / "pass"
        with recorder.prepare([text], tokens, Wanted(importance=path), work=work) as recording:
            recording.run()
            recording.complete()
    return dict(read_importance(path).layers)


def pieces(recorder: Recorder, text: str, work: Path) -> Iterator[Layers]:
    """Importance of pieces of a text that begin at random characters."""
    rng = np.random.default_rng(0)
    for tokens in TOKENS:
        for seed in range(SEEDS):
            start = int(rng.integers(0, max(1, len(text) - 5 * tokens)))
            path = work / f"{tokens}-{seed}.safetensors"
            yield recorded(recorder, text[start:], tokens, path)


def first_rows(reader: SourceReader, matrix: ExpertMatrix) -> F32:
    """The first rows of a matrix in float32."""
    buffers, source = Buffers(source_buffer(matrix)), MatrixReader(reader, matrix)
    _, values = next(iter(source.decoded(buffers.source, buffers.bounce)))
    rows: F32 = np.array(values[:ROWS], np.float32)
    return rows


def error(weights: F32, importance: F32 | None, true: F32) -> float:
    """Squared error of INT4, weighed by true mean squares."""
    matrix = native.Matrix(weights.view(np.uint8).reshape(-1), "F32", *weights.shape)
    codes, scale = native.quantize(INT4.layout, matrix, native.Choice("search", importance))
    off = weights.astype(np.float64) - reference.dequantize(INT4, codes, scale)
    return float((np.square(off) * true).sum())


def compare(model: Path, held: Layers, found: Sequence[Layers]) -> dict[Key, list[float]]:
    """Errors as multiples of those of the unweighted search."""
    checkpoint, ratios = open_checkpoint(model), defaultdict(list)
    reader = SourceReader(checkpoint.files, checkpoint.sources)
    for layer in checkpoint.layers:
        if layer.index not in held:
            continue
        for expert in np.flatnonzero(held[layer.index].counts >= HELD):
            for proj in ("gate", "down"):
                rows = first_rows(reader, layer.experts[expert][proj])
                true = held[layer.index].of(proj)[expert]
                base = error(rows, None, true)
                for one in found:
                    tokens = one[layer.index].counts
                    bin_of = max(n for n in BINS if n <= tokens[expert])
                    for uniform in UNIFORMS:
                        for shrinkage in SHRINKAGES:
                            own = channel_weights(
                                one[layer.index].of(proj), tokens, max(shrinkage, 1e-6), uniform
                            )[expert]
                            ratio = error(rows, np.ascontiguousarray(own), true) / base
                            ratios[proj, uniform, shrinkage, bin_of].append(ratio)
    return ratios


def main() -> None:
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    model, text, work = Path(sys.argv[1]), Path(sys.argv[2]).read_text(), Path(sys.argv[3])
    work.mkdir(parents=True, exist_ok=True)
    recorder, half = Recorder(model), len(text) // 2
    held = recorded(recorder, text[half:], 10**6, work / "held.safetensors")
    found = list(pieces(recorder, text[:half], work))
    ratios = compare(model, held, found)
    for proj in ("gate", "down"):
        for uniform in UNIFORMS:
            print(f"{proj}, UNIFORM {uniform:g}; SHRINKAGE", *(f"{k:g}" for k in SHRINKAGES))
            for tokens in BINS:
                row = [ratios[proj, uniform, k, tokens] for k in SHRINKAGES]
                if row[0]:
                    means = " ".join(f"{np.mean(one):.4f}" for one in row)
                    print(f"  from {tokens:>3} tokens ({len(row[0]):>3} experts)  {means}")


if __name__ == "__main__":
    main()
