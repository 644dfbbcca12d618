"""Python between the calls of the C library, while `ktconv generate` writes tokens.

    python benchmarks/between_calls.py OUTPUT --source MODEL

A decoder layer takes two calls: attention with the norms, the router with the experts. Printed is
the time from the end of one to the beginning of the next, medians over layers and tokens: within a
layer, from layer to layer, and their sum, which is all Python of a layer; then the calls.
"""

from __future__ import annotations

import argparse
from itertools import pairwise
from pathlib import Path
from statistics import median
from time import perf_counter_ns
from typing import Any

from ktconv.generate.decoding import generate
from ktconv.generate.loading import OpenedModel
from ktconv.generate.request import Sampling
from ktconv.native import dense
from ktconv.source.model_source import ModelSource

ATTENTION, EXPERTS = "kt_attention_layer_run", "kt_routed_layer_run"


class Watched:
    """The C library, whose two calls of a layer note when they begin and end."""

    def __init__(self, lib: Any) -> None:
        self.calls: list[tuple[str, int, int]] = []
        self._lib = lib
        for name in (ATTENTION, EXPERTS):
            setattr(self, name, self._noting(name, getattr(lib, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lib, name)

    def _noting(self, name: str, function: Any) -> Any:
        def call(*given: Any) -> Any:
            began = perf_counter_ns()
            status = function(*given)
            self.calls.append((name, began, perf_counter_ns()))
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
        watched = Watched(dense.lib)
        dense.lib = watched
        ids = [1 + number % 1000 for number in range(given.prompt)]
        generate(
            one.model, ids, given.tokens, Sampling(), frozenset(), lambda _: True, one.step_threads
        )
        layers = one.outside.decoder_layers
    calls = watched.calls
    assert [name for name, *_ in calls[: 2 * layers]] == [ATTENTION, EXPERTS] * layers

    gaps: dict[str, list[float]] = {ATTENTION: [], EXPERTS: []}  # by the call that follows
    for number, ((_, _, end), (name, begin, _)) in enumerate(pairwise(calls)):
        if (number + 1) % (2 * layers):  # within a token
            gaps[name].append((begin - end) / 1000)
    within, between = (median(gaps[name]) for name in (EXPERTS, ATTENTION))
    print(f"{layers} layers, {len(calls) // (2 * layers)} tokens after {given.prompt}")
    print(f"us within a layer {within:.1f}, from layer to layer {between:.1f}")
    print(f"us of Python a layer: {within + between:.1f}")
    for name in (ATTENTION, EXPERTS):
        print(f"us in {name}: {median((e - b) / 1000 for one, b, e in calls if one == name):.0f}")


if __name__ == "__main__":
    main()
