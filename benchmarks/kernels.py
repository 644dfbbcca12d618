"""One MoE layer on one core; two versions of ktconv side by side.

    python benchmarks/kernels.py --against OTHER/src            # ratios to another built tree
    python benchmarks/kernels.py --methods int4 --isa amx,avx512 --tokens 1,64

`ktconv bench` says how far a kernel is from the machine's limits; this, whether one build of it is
faster than another, also on a busy machine. Experts are few enough for the caches of large cores.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from pairs import SLICE, pair_row, start_versions

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K = 2048, 768, 16, 8
METHODS = "int4,int8,bf16,fp8,gint4-32,gint8-64,mxfp4,nvfp4"


def answer_forever() -> None:
    import numpy as np

    from ktconv import native
    from ktconv.bench.weights import RandomWeights
    from ktconv.formats import FORMATS
    from ktconv.formats.decode import f32_to_bf16
    from ktconv.runtime.layers import pack_experts

    pool, known = native.Pool(1), {}
    source = RandomWeights(0, HIDDEN, INTERMEDIATE)
    for line in sys.stdin:
        method, isa, tokens, _ = json.loads(line)
        try:
            native.use_isa(isa)
            if method not in known:
                known = {
                    method: pack_experts(
                        FORMATS[method], source.expert, range(EXPERTS), HIDDEN, INTERMEDIATE
                    )
                }
        except (KeyError, ValueError):
            print(-1.0, flush=True)
            continue
        rng = np.random.default_rng(tokens)
        x = f32_to_bf16(rng.standard_normal((tokens, HIDDEN), np.float32))
        ids = np.argsort(rng.random((tokens, EXPERTS)))[:, :TOP_K].astype(np.int64)
        weights = np.full((tokens, TOP_K), 1 / TOP_K, np.float32)
        layer = known[method].layer
        call = layer.call(
            pool, x, ids, weights, np.empty_like(x), layer.scratch(tokens, TOP_K, pool)
        )
        call()
        fastest, end = float("inf"), time.perf_counter() + SLICE
        while time.perf_counter() < end:
            begin = time.perf_counter()
            call()
            fastest = min(fastest, time.perf_counter() - begin)
        print(fastest, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--against", type=Path, help="directory with another built ktconv")
    parser.add_argument("--methods", default=METHODS)
    parser.add_argument("--isa", default="avx512,avx2")
    parser.add_argument("--tokens", default="1,64,512")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--answer", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.answer:
        answer_forever()
        return
    versions = start_versions(__file__, options.against)
    print("| layer | GOPS | times the other's speed |")
    print("| --- | ---: | ---: |")
    for isa in options.isa.split(","):
        for method in options.methods.split(","):
            for tokens in map(int, options.tokens.split(",")):
                work = 6e-9 * tokens * TOP_K * HIDDEN * INTERMEDIATE
                case = [method, isa, tokens]
                name = f"{method} {isa}, {tokens} tokens"
                print(pair_row(versions, name, work, case, options.rounds), flush=True)


if __name__ == "__main__":
    main()
