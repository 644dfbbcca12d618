#!/usr/bin/env python3
"""Measure how importance from few tokens should be drawn towards that of its layer.

    importance.py MODEL TEXT WORK

The second half of TEXT says what the inputs of experts are. From pieces of the first half, of 128
to 8192 tokens, importance is recorded in WORK, where a later run finds it. Rows of gate and down
are quantized to INT4 with weights that follow from it; errors are weighed by the mean squares of
the second half, and printed as multiples of those of the unweighted search: for experts that got so
many tokens, by SHRINKAGE (columns), with the product that conversions take of an expert's own mean
squares and those of its layer, and with the weighted sum in its place. Then the same with channels
that differ: inputs multiplied by exp(N(0, 0.5)), and columns of weights divided by it, which is the
same function; for gate all experts have the same factors, for down each has its own.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from ktconv import native
from ktconv.formats import FORMATS, reference
from ktconv.quantize.packed.importance.channel_weights import FLOOR, channel_weights
from ktconv.source import ExpertMatrix, Projection, open_checkpoint
from ktconv.source.reading.buffers import Buffers
from ktconv.source.reading.matrices import MatrixReader, buffers_of
from ktconv.source.reading.reader import SourceReader
from ktconv.stats import Recorder, Wanted, read_importance
from ktconv.stats.importance_file import LayerImportance
from ktconv.system.arrays import F32, I64

TOKENS = (128, 256, 512, 1024, 2048, 4096, 8192)
SEEDS = 4
SHRINKAGES = (1e-6, 16, 32, 64, 128, 256, 1e9)
WAYS = ("product", "sum")
OUTLIERS = (0.0, 0.5)  # standard deviations of the logarithm of channels' factors
BINS = (0, 24, 64, 200, 600)  # tokens of an expert, from these on
ROWS, HELD = 64, 500  # rows of each matrix; the fewest tokens of an expert in the second half
INT4 = FORMATS["int4"]

Layers = dict[int, LayerImportance]
Key = tuple[Projection, str, float, int]  # projection, one of WAYS, SHRINKAGE, first of BINS


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
    buffers, source = Buffers(buffers_of([matrix])), MatrixReader(reader, matrix)
    _, values = next(iter(source.decoded(buffers.source, buffers.bounce)))
    rows: F32 = np.array(values[:ROWS], np.float32)
    return rows


def error(weights: F32, importance: F32 | None, true: F32) -> float:
    """Squared error of INT4, weighed by true mean squares."""
    matrix = native.Matrix(weights.view(np.uint8).reshape(-1), "F32", *weights.shape)
    codes, scale = native.quantize(INT4.layout, matrix, native.Choice("search", importance))
    off = weights.astype(np.float64) - reference.dequantize(INT4, codes, scale)
    return float((np.square(off) * true).sum())


def weights_of(means: F32, tokens: I64, way: str, shrinkage: float) -> F32:
    """Weights [E, channels] of a layer."""
    if way == "product":
        return channel_weights(means, tokens, shrinkage)
    own, number = means / np.maximum(means.mean(axis=1, keepdims=True), 1e-30), tokens[:, None]
    layer = (number * own).sum(axis=0) / tokens.sum()
    found: F32 = ((number * own + shrinkage * layer) / (number + shrinkage)).astype(np.float32)
    return np.maximum(found, np.float32(FLOOR))


def compare(
    model: Path, held: Layers, found: Sequence[Layers], outliers: float
) -> dict[Key, list[float]]:
    """Errors as multiples of those of the unweighted search."""
    checkpoint, ratios, rng = open_checkpoint(model), defaultdict(list), np.random.default_rng(0)
    reader = SourceReader(checkpoint.files, checkpoint.sources)
    for layer in checkpoint.layers:
        if layer.index not in held:
            continue
        for proj in ("gate", "down"):
            true = held[layer.index].of(proj)
            shape = true.shape if proj == "down" else (1, true.shape[1])
            factor = np.exp(rng.normal(0, outliers, shape)).astype(np.float32)
            factor = np.broadcast_to(factor, true.shape)
            candidates = {
                (number, way, k): weights_of(
                    one[layer.index].of(proj) * factor**2, one[layer.index].counts, way, k
                )
                for number, one in enumerate(found)
                for way in WAYS
                for k in SHRINKAGES
            }
            for expert in np.flatnonzero(held[layer.index].counts >= HELD):
                rows = first_rows(reader, layer.experts[expert][proj]) / factor[expert]
                squares = true[expert] * factor[expert] ** 2
                base = error(rows, None, squares)
                for (number, way, k), weights in candidates.items():
                    tokens = found[number][layer.index].counts[expert]
                    ratio = error(rows, weights[expert], squares) / base
                    bin_of = max(n for n in BINS if n <= tokens)
                    ratios[proj, way, k, bin_of].append(ratio)
    return ratios


def table(ratios: dict[Key, list[float]], proj: Projection, way: str) -> Iterator[str]:
    """Means over experts, a line for each of BINS."""
    yield f"{proj}, {way}; SHRINKAGE {' '.join(f'{k:g}' for k in SHRINKAGES)}"
    for tokens in BINS:
        row = [ratios[proj, way, k, tokens] for k in SHRINKAGES]
        if row[0]:
            means = " ".join(f"{np.mean(one):.4f}" for one in row)
            yield f"  from {tokens:>3} tokens ({len(row[0]):>3} experts)  {means}"


def main() -> None:
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    model, text, work = Path(sys.argv[1]), Path(sys.argv[2]).read_text(), Path(sys.argv[3])
    work.mkdir(parents=True, exist_ok=True)
    recorder, half = Recorder(model), len(text) // 2
    held = recorded(recorder, text[half:], 10**6, work / "held.safetensors")
    found = list(pieces(recorder, text[:half], work))
    for outliers in OUTLIERS:
        print(f"outliers: exp(N(0, {outliers:g}))")
        ratios = compare(model, held, found, outliers)
        for proj in ("gate", "down"):
            for way in WAYS:
                print("\n".join(table(ratios, proj, way)), flush=True)


if __name__ == "__main__":
    main()
