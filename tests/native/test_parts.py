"""Parts of the level avx512: what other CPUs than this one run of it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from functools import cache

import numpy as np
import pytest
from helpers.levels import at_level, isa_parts

from ktconv import native
from ktconv.formats import FORMATS
from ktconv.formats.decode import bf16_to_f32, f32_to_bf16
from ktconv.native import Pool
from ktconv.runtime.layers import KERNEL_BOUND, Experts, pack_experts
from ktconv.system.arrays import Array

pytestmark = [pytest.mark.slow, pytest.mark.process]

PARTS = ("avx512-base", "avx512-vnni", "avx512-bf16", "avx512-vbmi", "avx512-zen")
# Those whose bits are the same with every order of sums.
INTEGERS = ("int4", "int8", "gint4-32", "gint8-64")
FLOATS = ("bf16", "fp8", "fp8-channel", "mxfp4", "mxfp8", "nvfp4")
HIDDEN, INTERMEDIATE, EXPERTS = 384, 128, 2


@pytest.fixture(params=PARTS)
def part(request: pytest.FixtureRequest) -> Iterator[str]:
    name: str = request.param
    if name not in isa_parts():
        pytest.skip(f"this machine does not support {name}")
    with at_level(name):
        yield name


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    made = Pool(2)
    yield made
    made.close()


@cache
def layer_of(method: str) -> Experts:
    rng = np.random.default_rng(5)

    def expert(_: int) -> tuple[Array, Array, Array]:
        shapes = (INTERMEDIATE, HIDDEN), (INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE)
        gate, up, down = (
            rng.standard_normal(shape, np.float32) * np.float32(shape[1] ** -0.5)
            for shape in shapes
        )
        return gate, up, down

    return pack_experts(FORMATS[method], expert, list(range(EXPERTS)), HIDDEN, INTERMEDIATE)


def inputs(tokens: int) -> tuple[Array, Array, Array]:
    """All tokens to the first expert, some to the second."""
    rng = np.random.default_rng(tokens)
    x = f32_to_bf16(rng.standard_normal((tokens, HIDDEN), np.float32))
    ids = np.zeros((tokens, 2), np.int64)
    ids[:, 1] = np.where(np.arange(tokens) % 3, 1, -1)
    return x, ids, rng.random((tokens, 2), np.float32)


def close(got: Array, expected: Array) -> bool:
    off = np.linalg.norm(bf16_to_f32(got) - expected) / np.linalg.norm(expected)
    return bool(off < KERNEL_BOUND)


@pytest.mark.parametrize("method", [*INTEGERS, *FLOATS])
def test_parts_compute_what_the_reference_does(part: str, pool: Pool, method: str) -> None:
    layer = layer_of(method)
    for tokens in (1, 2, 3, 11, 12, 13, 25, 100, 205):
        x, ids, weights = inputs(tokens)
        y = layer.forward(x, ids, weights, pool)
        assert close(y, layer.reference(x, ids, weights, rounded=True)), tokens


@pytest.mark.parametrize("method", INTEGERS)
def test_integers_have_the_same_bits_in_all_parts(part: str, pool: Pool, method: str) -> None:
    layer = layer_of(method)
    for tokens in (1, 4, 12, 13, 30):
        given = inputs(tokens)
        native.use_isa(part)
        found = layer.forward(*given, pool)
        native.use_isa("scalar")
        assert np.array_equal(found, layer.forward(*given, pool)), tokens


@pytest.mark.parametrize("method", [*INTEGERS, *FLOATS])
def test_the_batch_does_not_matter(part: str, pool: Pool, method: str) -> None:
    layer = layer_of(method)
    x, ids, weights = inputs(60)
    together = layer.forward(x, ids, weights, pool)
    for first, end in ((0, 1), (5, 7), (20, 33), (59, 60)):
        alone = layer.forward(x[first:end], ids[first:end], weights[first:end], pool)
        assert np.array_equal(alone, together[first:end])


def level_in_a_process(**variables: str) -> str:
    code = (
        "from ktconv import native\nfrom ktconv.errors import UsageError\n"
        "try: print(native.isa())\nexcept UsageError as error: print('refused', error)"
    )
    environment = {**os.environ, "KTCONV_ASSUME": "", **variables}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_the_environment_names_parts() -> None:
    if "avx512-vnni" not in isa_parts():
        pytest.skip("this machine does not support avx512-vnni")
    assert level_in_a_process(KTCONV_ISA="avx512-vnni") == "avx512"
    assert level_in_a_process(KTCONV_ISA="avx512-vnn").startswith("refused KTCONV_ISA=avx512-vnn ")


def test_parts_are_listed_in_their_order() -> None:
    found = isa_parts()
    assert found == list(PARTS[: len(found)])
    assert bool(found) == ("avx512" in native.isa_available())
    with pytest.raises(ValueError):
        native.use_isa("avx512-none")
