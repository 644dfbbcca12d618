"""MoE layers at all numbers of tokens: AMX against AVX-512 and kt-kernel, in turns, one thread.

    python benchmarks/sweep.py                                     # every format, 1 to 4096 tokens
    python benchmarks/sweep.py --methods int4 --tokens 64,1024     # a piece
    python benchmarks/sweep.py --even 1,2,4,8                      # so many tokens an expert
    python benchmarks/sweep.py --concentrated 8,64                 # all tokens to the same few

Needs a CPU with AMX; kt-kernel is left out where it is not installed, or lacks the format. Each
implementation runs in a process of its own with one thread, which is stopped while another has its
turn: kt-kernel's threads spin. A turn's time is that of its fastest call; a ratio is the median of
those of the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np

SHAPE = "2048,768,128,8"
TOKENS = ",".join(str(1 << n) for n in range(13))
TURN, ROUNDS, LONG, LONG_ROUNDS = 0.03, 5, 0.5, 3  # seconds; a round that takes longer has fewer
TARGET, LEAST = 1.5, 0.97  # times kt-kernel's speed and AVX-512's; the latter may be the same code
ROUTINGS = 16
LEVELS = ("amx", "avx512")


@dataclass(frozen=True)
class Case:
    """A batch: `tokens`, each of which goes to top-k experts."""

    tokens: int
    routing: str  # balanced, concentrated (see ktconv bench) or even: as many for every expert


def routings(case: Case, experts: int, top_k: int) -> Iterator[Any]:
    """Ids [tokens, top-k] of call after call."""
    from ktconv.bench.routing import parse_routing

    if case.routing != "even":
        yield from parse_routing(case.routing).iterations(case.tokens, experts, top_k, 0)
    rng = np.random.default_rng(0)
    ids = (np.arange(case.tokens * top_k) % experts).reshape(case.tokens, top_k)
    while True:
        yield np.ascontiguousarray(rng.permutation(experts)[rng.permutation(ids)])


def batch_of(case: Case, shape: Any) -> Any:
    from ktconv.bench.measure import Effort, make_batch

    ids = routings(case, shape.experts, shape.top_k)
    few = Effort(iterations=ROUTINGS)
    return make_batch(ids, case.tokens, shape.hidden, shape.top_k, 0, few)


def turn(calls: list[Callable[[], None]], place: int) -> tuple[float, int]:
    """Seconds of the fastest call, and which one is next."""
    fastest, end = float("inf"), time.perf_counter() + TURN
    while True:
        begin = time.perf_counter()
        calls[place % len(calls)]()
        now = time.perf_counter()
        fastest, place = min(fastest, now - begin), place + 1
        if now >= end:
            return fastest, place


def answer_forever(engine: str, method: str, shape_text: str, most: int) -> None:
    """Reads cases, prints seconds."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # kt-kernel prints
    from ktconv.bench.presets import parse_shape

    shape = parse_shape(shape_text)
    make_calls = (_ours if engine in LEVELS else _peer)(engine, method, shape, most)
    print("ready", file=answers, flush=True)
    known, calls, place = None, [], 0
    for line in sys.stdin:
        case = Case(**json.loads(line))
        if case != known:
            known, calls, place = case, make_calls(batch_of(case, shape)), 0
            calls[0]()
        seconds, place = turn(calls, place)
        print(seconds, file=answers, flush=True)


def _origins(shape: Any) -> list[int]:
    from ktconv.bench.cases import different_experts

    return [expert % different_experts(shape) for expert in range(shape.experts)]


def _ours(level: str, method: str, shape: Any, most: int) -> Callable[[Any], Any]:
    from ktconv import native
    from ktconv.bench.weights import RandomWeights
    from ktconv.formats import FORMATS
    from ktconv.runtime.layers import pack_experts

    del most
    source = RandomWeights(0, shape.hidden, shape.intermediate)
    sizes = (shape.hidden, shape.intermediate)
    layer = pack_experts(FORMATS[method], source.expert, _origins(shape), *sizes).layer
    pool = native.Pool(1)
    native.use_isa(level)

    def calls(batch: Any) -> Any:
        y = np.empty_like(batch.x)
        tokens, top_k = batch.weights.shape
        scratch = layer.scratch(tokens, top_k, pool)
        return [layer.call(pool, batch.x, ids, batch.weights, y, scratch) for ids in batch.ids]

    return calls


def _peer(name: str, method: str, shape: Any, most: int) -> Callable[[Any], Any]:
    from ktconv.bench.peers.base import Layer
    from ktconv.bench.peers.table import PEERS
    from ktconv.bench.weights import RandomWeights

    peer = PEERS[f"{name} {method}"].make()
    source = RandomWeights(0, shape.hidden, shape.intermediate).expert
    peer.prepare(Layer(shape, _origins(shape), source, threads=1, max_tokens=most))
    return lambda batch: peer.steps(batch).calls


class Engine:
    """A process that answers, stopped except in its turns."""

    def __init__(self, name: str, method: str, shape: str, most: int) -> None:
        self.name = name
        environment = os.environ | {"OPENBLAS_NUM_THREADS": "1"}
        command = [sys.executable, __file__, "--answer", name, method, shape, str(most)]
        self._process = subprocess.Popen(
            command, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self._read()
        self._process.send_signal(signal.SIGSTOP)

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} ended with status {self._process.wait()}")
        return line

    def seconds(self, case: Case) -> float:
        assert self._process.stdin is not None
        self._process.send_signal(signal.SIGCONT)
        self._process.stdin.write(json.dumps(asdict(case)) + "\n")
        self._process.stdin.flush()
        answer = float(self._read())
        self._process.send_signal(signal.SIGSTOP)
        return answer

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def rounds(works: Sequence[Callable[[], float]]) -> list[list[float]]:
    """Seconds of each of `works`, round after round, forwards and backwards in turn."""
    begin = time.perf_counter()
    for work in works:
        work()  # batches are made
    count = ROUNDS if time.perf_counter() - begin < LONG else LONG_ROUNDS
    times: list[list[float]] = [[] for _ in works]
    for number in range(count):
        order = range(len(works)) if number % 2 else reversed(range(len(works)))
        for index in order:
            times[index].append(works[index]())
    return times


def ratio(others: list[float], ours: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(others, ours, strict=True))


def work_of(case: Case, shape: Any) -> float:
    """10^9 operations."""
    return 1e-9 * case.tokens * shape.top_k * shape.operations


def sweep(engines: list[Engine], method: str, cases: list[Case], shape: Any) -> None:
    for case in cases:
        works = [partial(engine.seconds, case) for engine in engines]
        ours, *others = rounds(works)
        ratios = [ratio(other, ours) for other in others]
        bounds = [LEAST, TARGET]
        missed = [
            f"below {bound:g} x {engine.name}"
            for value, bound, engine in zip(ratios, bounds, engines[1:], strict=False)
            if value < bound
        ]
        cells = [f"{value:.2f}" for value in ratios] + ["-"] * (2 - len(ratios))
        each = case.tokens * shape.top_k / shape.experts
        speed = work_of(case, shape) / min(ours)
        row = [method, f"{case.tokens}", f"{each:g}", f"{speed:.0f}", *cells, ", ".join(missed)]
        print(f"| {' | '.join(row)} |", flush=True)


def compare_routings(engine: Engine, method: str, counts: list[int], shape: Any) -> None:
    """All tokens at the same top-k experts, against all experts with as many tokens each."""
    for count in counts:
        cases = [
            Case(count * shape.experts // shape.top_k, "even"),
            Case(count, "concentrated"),
        ]
        works = [partial(engine.seconds, case) for case in cases]
        even, few = (
            [work_of(case, shape) / value for value in times]
            for case, times in zip(cases, rounds(works), strict=True)
        )
        row = [method, f"{count}", f"{max(even):.0f}", f"{max(few):.0f}", f"{ratio(few, even):.2f}"]
        print(f"| {' | '.join(row)} |", flush=True)


def head(names: list[str]) -> None:
    print(f"| {' | '.join(names)} |")
    print(f"| --- |{' ---: |' * (len(names) - 1)}", flush=True)


def main() -> None:
    from ktconv import native
    from ktconv.bench.peers.table import PEERS, why_not
    from ktconv.bench.presets import parse_shape
    from ktconv.formats import FORMATS

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--methods", default=",".join(FORMATS))
    parser.add_argument("--shape", default=SHAPE)
    parser.add_argument("--tokens", default=TOKENS)
    parser.add_argument("--even", help="tokens an expert, of all experts, in place of --tokens")
    parser.add_argument("--concentrated", help="tokens an expert, of top-k experts and of all")
    parser.add_argument("--no-peer", action="store_true", help="leave kt-kernel out")
    parser.add_argument("--answer", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.answer:
        engine, method, text, most = options.answer
        answer_forever(engine, method, text, int(most))
        return
    if "amx" not in native.isa_available():
        raise SystemExit("this CPU has no AMX")
    shape = parse_shape(options.shape)
    if options.even:
        wanted = [int(count) * shape.experts // shape.top_k for count in options.even.split(",")]
        cases = [Case(tokens, "even") for tokens in wanted]
    else:
        cases = [Case(int(tokens), "balanced") for tokens in options.tokens.split(",")]
    counts = [int(count) for count in (options.concentrated or "").split(",") if count]
    if counts:
        head(["format", "tokens an expert", "all experts, GOPS", "top-k experts, GOPS", "ratio"])
    else:
        names = ["format", "tokens", "an expert", "GOPS", "x AVX-512", "x kt-kernel", ""]
        head(names)
    for method in options.methods.split(","):
        spec = PEERS.get(f"kt-kernel {method}")
        peers = spec is not None and not why_not(spec) and not options.no_peer and not counts
        names = ["amx"] if counts else [*LEVELS, *(["kt-kernel"] if peers else [])]
        most = max(case.tokens for case in cases)
        engines = [Engine(name, method, options.shape, most) for name in names]
        try:
            if counts:
                compare_routings(engines[0], method, counts, shape)
            else:
                sweep(engines, method, cases, shape)
        finally:
            for engine in engines:
                engine.close()


if __name__ == "__main__":
    main()
