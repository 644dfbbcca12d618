"""Python around the calls of the C library, while `ktconv generate` writes tokens.

    python benchmarks/between_calls.py OUTPUT --source MODEL

Decoder layers on kernels that follow one another take one call a token. Printed are medians over
tokens: time in these calls; Python of the layers, which is the rest of the time from the end of the
rotary embedding, behind which the model goes over its layers, to the beginning of the norm behind
them; and what a token takes outside of the layers.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import median
from time import perf_counter_ns
from typing import Any

from ktconv.generate.decoding import generate
from ktconv.generate.loading import OpenedModel
from ktconv.generate.request import Sampling
from ktconv.native import dense
from ktconv.source.model_source import ModelSource

LAYERS = "kt_decoder_layers_run"


class Watched:
    """The C library, whose call for layers adds its nanoseconds to the last of `spent`."""

    def __init__(self, lib: Any) -> None:
        self.spent: list[list[int]] = []
        self._lib = lib
        setattr(self, LAYERS, self._noting(getattr(lib, LAYERS)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lib, name)

    def _noting(self, function: Any) -> Any:
        def call(*given: Any) -> Any:
            began = perf_counter_ns()
            status = function(*given)
            self.spent[-1].append(perf_counter_ns() - began)
            return status

        return call


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--source", required=True)
    parser.add_argument("--prompt", type=int, default=512, help="tokens before")
    parser.add_argument("--tokens", type=int, default=32)
    given = parser.parse_args()

    opened = OpenedModel(given.output, ModelSource(given.source))
    with opened.loaded(print) as one:
        dense.lib = watched = Watched(dense.lib)
        decoder = one.model.get_decoder()
        began, ended = list[int](), list[int]()

        def begin(*_: Any) -> None:
            watched.spent.append([])
            began.append(perf_counter_ns())

        decoder.rotary_emb.register_forward_hook(begin)
        decoder.norm.register_forward_pre_hook(lambda *_: ended.append(perf_counter_ns()))
        ids = [1 + number % 1000 for number in range(given.prompt)]
        _, timing = generate(
            one.model, ids, given.tokens, Sampling(), frozenset(), lambda _: True, one.step_threads
        )
    count = len(timing.steps_s)  # tokens after the prompt's passes
    spans = [end - begin for begin, end in zip(began, ended, strict=True)][-count:]
    spent = watched.spent[-count:]
    python = [span - sum(calls) for span, calls in zip(spans, spent, strict=True)]
    outside = [1e9 * step - span for step, span in zip(timing.steps_s, spans, strict=True)]
    layers = len(decoder.layers)
    print(f"{layers} layers, {count} tokens after {given.prompt}, calls: {len(spent[-1])}")
    print(f"us in the calls of a token: {median(map(sum, spent)) / 1e3:.0f}")
    print(f"us of Python a layer: {median(python) / 1e3 / layers:.1f}")
    print(f"us of a token outside the layers: {median(outside) / 1e3:.0f}")


if __name__ == "__main__":
    main()
