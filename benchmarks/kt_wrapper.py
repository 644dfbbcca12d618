"""KTMoEWrapper of ktconv beside that of the published kt_kernel wheel: results, speed, memory.

    python benchmarks/kt_wrapper.py compare --wheel SITE
    python benchmarks/kt_wrapper.py time --wheel SITE --hidden 2048 --inner 768 --experts 16

SITE: a directory made by `pip install --target SITE --no-deps kt-kernel==0.7.2`; it needs CPython
3.11. Both load the same files by the same calls, in a process for each method, as kt_kernel keeps
its first threads and files. On a torch without CUDA its pinned memory is replaced by common memory.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import measure
import numpy as np
import torch
from kt_wrapper_files import CONVERTED, METHODS, Shape, write_files

from ktconv.runtime.layers import open_experts

# Of results against float32 arithmetic on the same weights: int8 activations, or bf16 ones; Q8_0 is
# packed as INT8 here, and has int8 activations by 32 there.
BOUNDS = dict.fromkeys(METHODS, 0.006) | dict.fromkeys(
    ("AMXINT4", "AMXINT8", "RAWINT4", "GPTQ_INT4", "LLAMAFILE"), 0.03
)
# Permutations do nothing there in kt_kernel, and slots that a map with replicas does not name are
# empty.
NO_MAPS = ("GPTQ_INT4", "LLAMAFILE")
TOKENS = (1, 2, 7, 33, 64)
SIDES = ("ktconv", "kt_kernel")


@dataclass(frozen=True)
class Setting:
    """What a process computes with."""

    side: str
    method: str
    path: str
    shape: Shape
    threads: int
    parts: int
    chunk: int
    wheel: str


@dataclass(frozen=True)
class Case:
    """Calls with one map and mask."""

    mapping: np.ndarray
    mask: np.ndarray
    calls: list[tuple[np.ndarray, np.ndarray, np.ndarray]]


def wrapper_of(setting: Setting, mask: np.ndarray | None, mapping: np.ndarray) -> Any:
    if setting.side == "kt_kernel":
        _without_pinned_memory()
        sys.path.insert(0, setting.wheel)
        os.environ["KT_FORCE_SYNC_SUBMIT"] = "1"
        from kt_kernel import KTMoEWrapper
    else:
        from ktconv.compat.kt import KTMoEWrapper
    shape = setting.shape
    made = KTMoEWrapper(
        0, shape.experts, shape.top_k, shape.hidden, shape.inner,
        None if mask is None else torch.from_numpy(mask), setting.threads, setting.parts,
        setting.path, setting.chunk, method=setting.method,
    )  # fmt: skip
    made.load_weights(torch.from_numpy(mapping))
    return made


def _without_pinned_memory() -> None:
    """torch.empty and others as if `pin_memory` were not given."""

    def plain(function: Any) -> Any:
        def call(*arguments: Any, pin_memory: bool = False, **named: Any) -> Any:
            return function(*arguments, **named)

        return call

    for name in ("empty", "zeros", "full"):
        setattr(torch, name, plain(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda self, *_: self  # type: ignore[method-assign]


def results(setting: Setting, case: Case) -> list[np.ndarray]:
    made, found = wrapper_of(setting, case.mask, case.mapping), []
    for x, ids, weights in case.calls:
        given = torch.from_numpy(x).bfloat16()
        made.submit_forward(given, torch.from_numpy(ids), torch.from_numpy(weights), 0)
        found.append(made.sync_forward(given, 0).float().numpy().copy())
    return found


def times(setting: Setting, tokens: list[int], seconds: float) -> dict[str, Any]:
    """Microseconds of the fastest call, of some routings; loading, and memory that it took."""
    shape, rng = setting.shape, np.random.default_rng(0)
    before, started = _resident(), time.perf_counter()
    made = wrapper_of(setting, None, np.arange(shape.experts))
    found: dict[str, Any] = {"load": time.perf_counter() - started}
    for count in tokens:
        calls = [_call(rng, shape, count) for _ in range(8)]
        given = [
            (torch.from_numpy(x).bfloat16(), torch.from_numpy(ids), torch.from_numpy(weights))
            for x, ids, weights in calls
        ]
        found[str(count)] = _timed(made, given, seconds)
    found["memory"] = _resident() - before
    return found


def _timed(made: Any, given: list[Any], seconds: float) -> float:
    taken: list[float] = []
    end = time.perf_counter() + seconds
    while (start := time.perf_counter()) < end or len(taken) < 5:
        x, ids, weights = given[len(taken) % len(given)]
        made.submit_forward(x, ids, weights, 0)
        made.sync_forward(x, 0)
        taken.append(time.perf_counter() - start)
    return 1e6 * min(taken[2:])


def _resident() -> int:
    return measure.status_bytes(os.getpid())["VmRSS"]


def _call(rng: np.random.Generator, shape: Shape, tokens: int) -> Any:
    x = rng.standard_normal((tokens, shape.hidden), np.float32)
    ids = np.argsort(rng.random((tokens, shape.experts)), axis=1)[:, : shape.top_k]
    return x, np.ascontiguousarray(ids), rng.random((tokens, shape.top_k), np.float32)


def in_process(function: Any, *arguments: Any) -> Any:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as executor:
        return executor.submit(function, *arguments).result()


def reference(values: dict[str, np.ndarray], case: Case, call: Any) -> np.ndarray:
    """float32 arithmetic on the numbers that the files stand for."""
    x, ids, weights = call
    x = torch.from_numpy(x).bfloat16().float().numpy()
    y = np.zeros_like(x)
    for slot, expert in enumerate(case.mapping):
        token, place = np.nonzero(ids == slot)
        if case.mask[slot] or not len(token):
            continue
        gate, up = (x[token] @ values[name][expert].T for name in ("gate", "up"))
        inner = gate / (1 + np.exp(-gate)) * up
        np.add.at(y, token, weights[token, place, None] * (inner @ values["down"][expert].T))
    return y


def cases(shape: Shape, seed: int, kind: str) -> Case:
    rng = np.random.default_rng(seed)
    mapping = {
        "": np.arange(shape.experts),
        "replicas": rng.integers(0, shape.experts, shape.experts),
        "permutation": rng.permutation(shape.experts),
    }[kind]
    calls = []
    for tokens in rng.permutation(TOKENS):
        x, ids, weights = _call(rng, shape, int(tokens))
        outside = rng.random(ids.shape) < 0.1
        calls.append((x, np.where(outside, rng.choice([-1, 999], ids.shape), ids), weights))
    return Case(mapping.astype(np.int64), rng.random(shape.experts) < 0.25, calls)


def compare(options: argparse.Namespace) -> bool:
    print("| method | map | hidden, inner | ktconv | kt_kernel | difference | bound |")
    print("| --- | --- | --- | ---: | ---: | ---: | ---: |")
    rng, passed = np.random.default_rng(options.seed), True
    for method in options.methods:
        for kind in ("", "permutation" if method in NO_MAPS else "replicas"):
            shape = Shape(*(int(256 * rng.integers(1, 4)) for _ in range(2)), 8, 3)
            with tempfile.TemporaryDirectory(dir=options.work) as folder:
                passed &= _compare_one(options, method, shape, kind, Path(folder) / "weights")
    return passed


def _compare_one(
    options: argparse.Namespace, method: str, shape: Shape, kind: str, path: Path
) -> bool:
    values = write_files(path, method, shape, 1, options.seed, values=True)
    case, found = cases(shape, options.seed, kind), {}
    for side in SIDES:
        setting = Setting(side, method, str(path), shape, 2, 1, 64, options.wheel)
        try:
            found[side] = in_process(results, setting, case)
        except Exception as error:  # what the wheel does not run here
            print(f"| {method} | {side}: {type(error).__name__}: {str(error)[:90]} |")
            return side == "kt_kernel"
    if method in CONVERTED:
        values = packed_values(path, shape)
    truth = {side: [reference(values, case, call) for call in case.calls] for side in SIDES}
    same = not kind or method not in NO_MAPS
    if not same:
        case = replace(case, mapping=np.arange(shape.experts))
        truth["kt_kernel"] = [reference(values, case, call) for call in case.calls]
    ours, theirs = (_worst(found[side], truth[side]) for side in SIDES)
    apart = _worst(found["ktconv"], found["kt_kernel"]) if same else 0.0
    bound, sizes = BOUNDS[method], f"{shape.hidden}, {shape.inner}"
    kind = f"{kind or 'none'}{'' if same else ', by ktconv alone'}"
    last = f"{apart:.4f}" if same else ""
    print(
        f"| {method} | {kind} | {sizes} | {ours:.4f} | {theirs:.4f} | {last} | {bound} |",
        flush=True,
    )
    return max(ours, theirs) < bound and apart < 2 * bound


def packed_values(path: Path, shape: Shape) -> dict[str, np.ndarray]:
    """What the packed codes and scales of a conversion mean."""
    experts = open_experts(path)
    found = [experts.streams(expert) for expert in range(shape.experts)]
    stacks = zip(("gate", "up", "down"), zip(*found, strict=True), strict=True)
    return {name: np.stack([one.values() for one in row if one]) for name, row in stacks}


def _worst(found: list[np.ndarray], truth: list[np.ndarray]) -> float:
    """Of all calls: the norm of the difference over that of the truth."""
    pairs = zip(found, truth, strict=True)
    return max(float(np.linalg.norm(y - one) / np.linalg.norm(one)) for y, one in pairs)


def time_all(options: argparse.Namespace) -> None:
    shape = Shape(options.hidden, options.inner, options.experts, options.top_k)
    tokens = [int(word) for word in options.tokens.split(",")]
    print(f"{measure.cpu_model()}, {options.threads} threads; {shape}\n")
    heads = "".join(f" {count} |" for count in tokens)
    print(f"| method | side | load s | MB |{heads}\n| --- | --- |{' ---: |' * (len(tokens) + 2)}")
    for method in options.methods:
        with tempfile.TemporaryDirectory(dir=options.work) as folder:
            path = Path(folder) / "weights"
            write_files(path, method, shape, 1, options.seed, values=False)
            for side in SIDES:
                setting = Setting(
                    side, method, str(path), shape, options.threads, 1, 1024, options.wheel
                )
                _time_one(options, setting, tokens)


def _time_one(options: argparse.Namespace, setting: Setting, tokens: list[int]) -> None:
    """The best of some processes, as other work disturbs them."""
    head = f"| {setting.method} | {setting.side} |"
    try:
        runs = [in_process(times, setting, tokens, options.seconds) for _ in range(options.rounds)]
    except Exception as error:  # what the wheel does not run here
        print(f"{head} {type(error).__name__}: {str(error)[:80]} |", flush=True)
        return
    best = {key: min(run[key] for run in runs) for key in runs[0]}
    cells = "".join(f" {best[str(count)]:.0f} |" for count in tokens)
    print(f"{head} {best['load']:.2f} | {best['memory'] / 1e6:.0f} |{cells}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["compare", "time"])
    parser.add_argument("--wheel", required=True, help="directory that has kt_kernel")
    parser.add_argument("--methods", type=lambda text: text.split(","), default=METHODS)
    parser.add_argument("--work", help="directory for weights")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--inner", type=int, default=768)
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tokens", default="1,4,16,64,256,1024")
    parser.add_argument("--seconds", type=float, default=1.0, help="of each row")
    parser.add_argument("--rounds", type=int, default=3, help="processes for each row")
    options = parser.parse_args()
    if options.what == "time":
        time_all(options)
    elif not compare(options):
        sys.exit(1)


if __name__ == "__main__":
    main()
