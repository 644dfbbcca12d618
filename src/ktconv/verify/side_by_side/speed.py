"""Tokens per second of all MoE layers of a model or an output, in our kernels.

Layers with the same dimensions and methods take the same time: one of each kind is measured, and
counted as often as there are such layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import Struct

from ktconv import native
from ktconv.bench.cases import Layer, Request, prepare
from ktconv.bench.measure import Effort, Reference, check, make_batch, sample
from ktconv.errors import CheckpointError, KtconvError, UsageError
from ktconv.system import machine
from ktconv.system.pool import Pool
from ktconv.system.text import Notify
from ktconv.targets.encoded.recipe import parse_recipe
from ktconv.writer.manifest import Manifest, read_manifest


class Speed(Struct, frozen=True):
    """`tokens_per_s` by tokens of a step; empty, with the reason, where our kernels cannot."""

    tokens_per_s: Mapping[int, float]
    formats: Sequence[str] = ()
    why_not: str | None = None

    def facts(self) -> dict[str, Any]:
        return {
            "tokens_per_s": {str(tokens): rate for tokens, rate in self.tokens_per_s.items()},
            "kernel_formats": list(self.formats),
            "not_measured": self.why_not,
        }


def measure(
    model: Path,
    layers: Mapping[int, object],
    tokens: Sequence[int],
    seconds: float,
    threads: int | None,
    notify: Notify,
) -> Speed:
    """`layers`: equal values for layers that take the same time."""
    kinds: dict[str, list[int]] = {}
    for layer, kind in layers.items():
        kinds.setdefault(repr(kind), []).append(layer)
    total = dict.fromkeys(tokens, 0.0)  # seconds
    formats: dict[str, None] = {}
    workers = threads or machine.usable_cores()
    try:
        with Pool(workers) as pool:
            for alike in kinds.values():
                request = Request(
                    methods=(),
                    shapes=(),
                    tokens=tuple(tokens),
                    threads=(workers,),
                    isas=(native.isa(),),
                    model=model,
                    layer=alike[0],
                    effort=Effort(seconds, None),
                )
                (layer_plan,) = prepare(request, notify).layers
                formats[layer_plan.method.key] = None
                for count, median in _times(request, layer_plan, pool):
                    total[count] += median * len(alike)
    except (CheckpointError, UsageError) as error:
        return Speed({}, (), str(error))
    return Speed({n: n / time for n, time in total.items()}, tuple(formats))


def _times(request: Request, layer: Layer, pool: Pool) -> Iterator[tuple[int, float]]:
    """Tokens, and the median of seconds; the result of the kernels is checked first."""
    experts, shape = layer.experts, layer.shape
    assert experts is not None, "of a model"
    experts.layer.touch(pool)
    for tokens in request.tokens:
        ids = layer.routings(request, tokens)
        batch = make_batch(ids, tokens, shape.hidden, shape.top_k, request.seed, request.effort)
        check(experts, batch, Reference(experts, batch), pool)
        yield tokens, float(np.median(sample(experts, batch, pool, request.effort).seconds))


def kinds_of_output(output: Path, layers: Sequence[int]) -> dict[int, object]:
    """Kinds of layers of an output, by all that decides their time: the manifest's dimensions, and
    the recipe."""
    try:
        manifest = read_manifest(output)
    except KtconvError:
        manifest = None
    if manifest is None:
        return dict.fromkeys(layers, None)
    return {layer: (_sizes(manifest, layer), _methods(manifest, layer)) for layer in layers}


def _sizes(manifest: Manifest, layer: int) -> tuple[object, ...]:
    about = manifest.layers.get(layer, {})
    return tuple(about.get(key) for key in ("experts", "hidden_size", "intermediate_size"))


def _methods(manifest: Manifest, layer: int) -> object:
    lines = manifest.options.get("recipe")
    if not isinstance(lines, list):
        return None
    return parse_recipe("\n".join(map(str, lines))).alike(layer)
