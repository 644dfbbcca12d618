"""Counts of AMX instructions in a layer, by the emulator: loads, stores and products of tiles, and
the gaps in which nothing is multiplied. The time of a layer on a CPU with AMX depends on them, and
any machine can count them."""

from __future__ import annotations

import math

import numpy as np
import pytest
from helpers import amx
from helpers.levels import at_level

from ktconv import native
from ktconv.bench.weights import RandomWeights
from ktconv.formats import FORMATS
from ktconv.formats.decode import f32_to_bf16
from ktconv.native.arrays import aligned_bytes
from ktconv.native.moe import VALUE_DTYPES, Call
from ktconv.native.training import Gradients, Lora, Training
from ktconv.runtime.layers import pack_experts

pytestmark = pytest.mark.slow

WIDTH, EXPERTS, TOKENS = 128, 3, 32  # of hidden and intermediate size; all experts get all tokens
GROUP_EXPERTS = 2  # that a thread goes through together (native/src/moe/forward.c)
STRIPS = EXPERTS * 3 * WIDTH // 32
TILES = 4  # sums of a strip for 32 tokens
# Columns of a step, and steps after which sums are stored, or a spare tile in their place: so that
# a core does not switch off what stores tiles.
STEPS = {
    "int8": (64, None),
    "int4": (64, None),
    "bf16": (32, 4),
    "fp8": (32, None),
    "fp8-channel": (32, 4),
    "mxfp4": (32, 4),
    "nvfp4": (32, 4),
}
GROUPS = {"gint4-32": 32, "gint4-64": 64, "gint4-128": 128, "gint8-32": 32, "gint8-128": 128}
# Instructions: hundreds of nanoseconds, after which a core switches AMX off. Compilers differ.
GAP = 10_000


def forward(
    key: str,
    emulator: amx.Emulator,
    gap: int = 0,
    tokens: int = TOKENS,
    rank: int = 0,
    back: bool = False,
) -> None:
    """Run a layer in this format once under the emulator, which counts. gap: see
    `Emulator.stepping`. rank: of LoRA on down, as in fine-tuning. back: count what
    follows it, the gradient of x."""
    emulator.install()
    source = RandomWeights(0, WIDTH, WIDTH).expert
    layer = pack_experts(FORMATS[key], source, range(EXPERTS), WIDTH, WIDTH).layer
    pool = native.Pool(1)
    x = np.random.default_rng(0).standard_normal((tokens, WIDTH), np.float32)
    ids = np.tile(np.arange(EXPERTS, dtype=np.int64), (tokens, 1))
    weights = np.full(ids.shape, 1 / EXPERTS, np.float32)
    with at_level("amx"):
        scratch = layer.scratch(tokens, EXPERTS, pool)
        rows = f32_to_bf16(x)
        y = np.empty_like(rows)
        call = layer.call(pool, rows, ids, weights, y, scratch)
        matrix = np.zeros((EXPERTS, rank, WIDTH), np.float32)  # A, or B with its sides exchanged
        pair = dict.fromkeys(("down_a", "down_b"), matrix.ctypes.data)
        training = Training(layer, Lora(rank, pair, "fp32", 1.0) if rank else None, pool)
        memory = aligned_bytes(training.scratch_size(tokens, EXPERTS))
        bf16 = VALUE_DTYPES["bf16"]
        at, chosen, by = (array.ctypes.data for array in (rows, ids, weights))
        trained = Call(
            len(ids),
            ids.shape[1],
            at,
            chosen,
            by,
            0,
            0,
            y.ctypes.data,
            id_size=8,
            x_dtype=bf16,
            y_dtype=bf16,
        )
        saved = aligned_bytes(training.saved_size(tokens, EXPERTS))
        if back:
            training.forward(trained, saved.ctypes.data, memory)
        emulator.reset()
        with emulator.stepping(gap):
            if back:
                places = {"dy": rows.ctypes.data, "dx": y.ctypes.data}
                wanted = Gradients(places, "bf16", "bf16")
                training.backward(trained, saved.ctypes.data, wanted, memory)
            elif rank:
                training.forward(trained, 0, memory)
            else:
                call()


@pytest.mark.parametrize("key", [*STEPS, *GROUPS])
def test_tiles_of_a_layer(key: str, emulator: amx.Emulator) -> None:
    """A load for each product. Sums are stored once for a strip, or for each group of columns."""
    forward(key, emulator)
    if key in GROUPS:
        columns, stores = min(GROUPS[key], 64), STRIPS * TILES * WIDTH // GROUPS[key]
    else:
        columns, spare = STEPS[key]
        stores = STRIPS * (TILES + (WIDTH // columns // spare if spare else 0))
    counts = emulator.counts()
    assert counts.products == STRIPS * TILES * WIDTH // columns
    assert counts.loads == counts.products
    assert counts.stores == stores
    assert counts.configs == 1


@pytest.mark.parametrize("key", ["int4", "int8", "bf16"])
def test_products_follow_one_another(key: str, emulator: amx.Emulator) -> None:
    """Only where the middle of a group of experts is quantized, between up and down, is nothing
    multiplied for long: scaling, the activation and the weighted sum lie within the products of the
    next strip."""
    forward(key, emulator, GAP)
    assert emulator.long_gaps() == math.ceil(EXPERTS / GROUP_EXPERTS)


def test_gaps_are_seen(emulator: amx.Emulator) -> None:
    """Without room between products each gap is long."""
    forward("int8", emulator, 1)
    products = emulator.counts().products
    assert products / 4 <= emulator.long_gaps() < products


@pytest.mark.parametrize("key", ["gint4-32", "gint4-64", "gint8-32", "gint8-64"])
def test_fine_tuning_keeps_sums_of_groups_in_tiles(key: str, emulator: amx.Emulator) -> None:
    """Grouped integers take as many products, loads and stores as MXFP4, which has its scales in
    its numbers."""
    forward("mxfp4", emulator, tokens=2 * TOKENS, rank=16)
    expected = emulator.counts()
    forward(key, emulator, tokens=2 * TOKENS, rank=16)
    assert emulator.counts() == expected
    assert not expected.int8_products


@pytest.mark.parametrize(("key", "tokens"), [("int8", 16), ("int4", 16), ("bf16", 32)])
def test_backward_keeps_sums_of_few_tokens_in_tiles(
    key: str, tokens: int, emulator: amx.Emulator
) -> None:
    """From chunk to chunk of a strip, which is stored once; that over gate and up is one."""
    forward(key, emulator, tokens=tokens, back=True)
    counts = emulator.counts()
    assert counts.stores == EXPERTS * 2 * (WIDTH // 32) * TILES
    assert counts.products == EXPERTS * 3 * (WIDTH // 32) * TILES * WIDTH // STEPS[key][0]
    assert counts.loads == counts.products
