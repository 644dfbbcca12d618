"""Weights that are written for GPU kernels: every byte, for ranks and NUMA parts of any number."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ktconv.errors import UsageError

from .conftest import EXPERTS, HIDDEN, INNER, Make, stacks
from .test_loading import gguf_model

torch = pytest.importorskip("torch")

from ktconv.compat.kt.raw import raw_layer  # noqa: E402
from ktconv.runtime import MoELayer  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.torch]

WIDTH = 256  # of an expert here: two parts of FP8 blocks
GUARD = 64  # bytes behind each buffer
NAMES = ("gate", "up", "down")


def raw(kind: str, seed: int = 0) -> dict[str, list[Any]]:
    """Codes and scales of all experts, as checkpoints have them."""
    made = torch.Generator().manual_seed(seed)
    found: dict[str, list[Any]] = {}

    def draw(dtype: Any, rows: int, cols: int) -> Any:
        if dtype == torch.float32:
            return torch.rand(rows, cols, generator=made) + 0.5
        if dtype == "power":
            return torch.exp2(torch.randint(-9, 9, (rows, cols), generator=made).float()).bfloat16()
        if dtype == torch.bfloat16:
            return torch.randn(rows, cols, generator=made).bfloat16()
        bits = torch.randint(0, 120, (rows, cols), generator=made, dtype=torch.uint8)
        return bits.view(dtype)

    for name in NAMES:
        rows, cols = (HIDDEN, WIDTH) if name == "down" else (WIDTH, HIDDEN)
        codes, scale = {
            "BF16": ((torch.bfloat16, rows, cols), None),
            "FP8": ((torch.float8_e4m3fn, rows, cols), (torch.float32, rows // 128, cols // 128)),
            "FP8_PERCHANNEL": ((torch.float8_e4m3fn, rows, cols), (torch.float32, rows, 1)),
            "RAWINT4": ((torch.uint8, rows, cols // 2), (torch.bfloat16, rows, cols // 32)),
            "MXFP4": ((torch.uint8, rows, cols // 2), ("power", rows, cols // 32)),
            "MXFP8": ((torch.float8_e4m3fn, rows, cols), (torch.uint8, rows, cols // 32)),
        }[kind]
        found[name] = [draw(*codes) for _ in range(EXPERTS)]
        if scale:
            drawn = [draw(*scale) for _ in range(EXPERTS)]
            found[f"{name}_scale"] = drawn if kind == "MXFP8" else [one.abs() for one in drawn]
    return found


def bytes_of(tensor: Any) -> bytes:
    return bytes(tensor.contiguous().view(torch.uint8).numpy().tobytes())


def wanted(
    own: dict[str, list[Any]], expert: int, ranks: int, suffix: str = ""
) -> list[list[bytes]]:
    """w13 and w2 of each rank, cut from what a checkpoint has."""
    gate, up, down = (own[f"{name}{suffix}"][expert] for name in NAMES)
    found = []
    for rank in range(ranks):
        rows = slice(rank * len(gate) // ranks, (rank + 1) * len(gate) // ranks)
        cols = slice(rank * down.shape[1] // ranks, (rank + 1) * down.shape[1] // ranks)
        w2 = down if down.shape[1] == 1 else down[:, cols]
        found.append([bytes_of(gate[rows]) + bytes_of(up[rows]), bytes_of(w2)])
    return found


def written(wrapper: Any, expert: int, sizes: list[list[int]]) -> list[list[bytes]]:
    """w13, w13's scales, w2 and w2's scales of each rank, with what lies behind them."""
    buffers = [[np.full(size + GUARD, 0xEE, np.uint8) for size in rank] for rank in sizes]
    lists = [
        [one.ctypes.data if len(one) > GUARD else 0 for one in row]
        for row in zip(*buffers, strict=True)
    ]
    wrapper.submit_write_weight_scale_to_buffer(len(sizes), expert, *lists)
    wrapper.sync_write_weight_scale_to_buffer()
    return [[one.tobytes() for one in row] for row in buffers]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("kind", ["BF16", "FP8", "FP8_PERCHANNEL", "RAWINT4", "MXFP4", "MXFP8"])
def test_bytes_are_those_of_the_checkpoint(make: Make, kind: str, parts: int, ranks: int) -> None:
    wrapper = make(None, method=kind, moe_intermediate_size=WIDTH, threadpool_count=parts)
    own = raw(kind, seed=parts)
    slots = [3, 1, 2, 0, 7, 7, 5, 4]
    wrapper._layer = MoELayer(raw_layer(kind, wrapper._settings, own, slots), wrapper._pool)
    for slot in (0, 5):
        codes = wanted(own, slots[slot], ranks)
        scales = (
            [[b"", b""]] * ranks if kind == "BF16" else wanted(own, slots[slot], ranks, "_scale")
        )
        expected = [
            [w13, w13_scale, w2, w2_scale]
            for (w13, w2), (w13_scale, w2_scale) in zip(codes, scales, strict=True)
        ]
        found = written(wrapper, slot, [[len(one) for one in row] for row in expected])
        assert found == [[one + b"\xee" * GUARD for one in row] for row in expected]


@pytest.mark.parametrize("method", ["AMXINT4", "AMXINT8", "BF16"])
def test_integers_with_a_scale_per_row_are_written_as_bf16(make: Make, method: str) -> None:
    wrapper = make(stacks(3), method=method)
    dense = {
        name: [torch.from_numpy(stream.values()).bfloat16()]  # type: ignore[union-attr]
        for name, stream in zip(NAMES, wrapper.layer.packed.streams(2), strict=True)
    }
    expected = wanted(dense, 0, 4)
    found = written(wrapper, 2, [[len(w13), 0, len(w2), 0] for w13, w2 in expected])
    assert [[row[0], row[2]] for row in found] == [
        [one + b"\xee" * GUARD for one in row] for row in expected
    ]


def of_gguf(make: Make, path: Path, kind: str, method: str) -> tuple[Any, Any]:
    """A wrapper whose weights are those of a GGUF file, and their values."""
    file, own = gguf_model(path, kind)
    wrapper = make(
        None, path=file, method=method, num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=WIDTH,
    )  # fmt: skip
    wrapper.load_weights()
    return wrapper, own


@pytest.mark.parametrize("kind", ["BF16", "MXFP4", "Q4_0", "Q8_0", "Q4_K"])
def test_llamafile_is_written_as_bf16(make: Make, tmp_path: Path, kind: str) -> None:
    """Whatever the kernels multiply with, as nothing tells the caller what that is."""
    wrapper, own = of_gguf(make, tmp_path, kind, "LLAMAFILE")
    if kind == "Q4_K":  # packed again, as INT8
        streams = wrapper.layer.packed.streams(2)
        dense = {n: [torch.from_numpy(s.values())] for n, s in zip(NAMES, streams, strict=True)}
    else:
        dense = {name: [stack[2]] for name, stack in zip(NAMES, own, strict=True)}
    exact = {name: [one.bfloat16() for one in stack] for name, stack in dense.items()}
    expected = wanted(exact, 0, 2)
    found = written(wrapper, 2, [[len(w13), 0, len(w2), 0] for w13, w2 in expected])
    assert [[row[0], row[2]] for row in found] == [
        [one + b"\xee" * GUARD for one in row] for row in expected
    ]


@pytest.mark.parametrize("method", ["RAWINT4", "GPTQ_INT4"])
def test_scales_of_int4_are_written_as_bf16(make: Make, tmp_path: Path, method: str) -> None:
    """Half precision in the file, float32 in the kernels: buffers have two bytes for a scale."""
    wrapper, own = of_gguf(make, tmp_path, "Q4_0", method)
    assert wrapper.layer.method == "gint4-32-f32"
    codes, scales = HIDDEN * WIDTH // 2, HIDDEN * WIDTH // 32 * 2
    _, _, w2, w2_scale = written(wrapper, 1, [[2 * codes, 2 * scales, codes, scales]])[0]
    assert w2_scale[scales:] == b"\xee" * GUARD
    pairs = np.frombuffer(w2[:codes], np.uint8).reshape(HIDDEN, -1)
    numbers = np.stack((pairs & 15, pairs >> 4), axis=2).reshape(HIDDEN, WIDTH).astype(int) - 8
    step = torch.frombuffer(bytearray(w2_scale[:scales]), dtype=torch.bfloat16).float().numpy()
    found = numbers * np.repeat(step.reshape(HIDDEN, -1), 32, axis=1)
    exact = own.down[1].numpy()
    assert np.abs(found - exact).max() <= np.abs(exact).max() * 2.0**-8


def test_nvfp4_has_both_levels_of_scales_in_one(make: Make) -> None:
    wrapper = make(stacks(4), method="NVFP4")
    rows, groups = INNER, HIDDEN // 16
    sizes = [
        2 * rows * HIDDEN // 2,
        2 * rows * groups * 2,
        HIDDEN * INNER // 2,
        HIDDEN * INNER // 8,
    ]
    (w13, scales, _, _), = written(wrapper, 1, [sizes])  # fmt: skip
    nibbles = np.frombuffer(w13[:-GUARD], np.uint8)[: rows * HIDDEN // 2].reshape(rows, -1)
    pairs = np.stack((nibbles & 15, nibbles >> 4), axis=2).reshape(rows, HIDDEN)
    levels = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    numbers = np.where(pairs >= 8, -1, 1) * levels[pairs & 7]
    step = torch.frombuffer(bytearray(scales[:-GUARD]), dtype=torch.bfloat16)[: rows * groups]
    found = numbers * np.repeat(step.float().numpy().reshape(rows, groups), 16, axis=1)
    gate = wrapper.layer.packed.streams(1)[0]
    assert gate is not None
    exact = gate.values()
    assert np.abs(found - exact).max() <= np.abs(exact).max() * 2.0**-8  # bf16 scales
    assert (found != 0).any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ranks": 0}, "gpu_tp_count must be 1 or more"),
        ({"ranks": 3}, "must have the addresses of 3 ranks, not 1"),
        ({"expert": EXPERTS}, f"expert_id is {EXPERTS}, but the layer has {EXPERTS} experts"),
        ({"expert": -1}, "expert_id must be 0 or more"),
        ({"w13": [0]}, "w13_weight_ptrs has the address 0"),
        ({"w13_scale": [8]}, "written as BF16, which has no scales"),
        ({"w2": 8}, "w2_weight_ptrs must be a list of integers"),
    ],
)
def test_what_does_not_fit_is_refused(make: Make, change: dict[str, Any], message: str) -> None:
    wrapper = make(stacks(5), method="AMXINT8")
    own: dict[str, Any] = {
        "ranks": 1,
        "expert": 0,
        "w13": [8],
        "w13_scale": [0],
        "w2": [8],
        "w2_scale": [0],
    }
    with pytest.raises(UsageError, match=message):
        wrapper.submit_write_weight_scale_to_buffer(*(own | change).values())
    wrapper.sync_write_weight_scale_to_buffer()


def test_ranks_must_divide_the_experts_with_their_scales(make: Make) -> None:
    wrapper = make(None, method="FP8", moe_intermediate_size=WIDTH)
    packed = raw_layer("FP8", wrapper._settings, raw("FP8"), None)
    wrapper._layer = MoELayer(packed, wrapper._pool)
    with pytest.raises(UsageError, match="256 intermediate columns of fp8 cannot be cut into 4"):
        wrapper.submit_write_weight_scale_to_buffer(4, 0, [8] * 4, [8] * 4, [8] * 4, [8] * 4)


def test_it_needs_weights(make: Make) -> None:
    with pytest.raises(UsageError, match="no weights yet"):
        make(None).submit_write_weight_scale_to_buffer(1, 0, [8], [0], [8], [0])


def test_the_layerwise_transport_is_refused_by_name(make: Make) -> None:
    with pytest.raises(UsageError, match="run_layerwise_fp8_batch") as caught:
        make(None).run_layerwise_fp8_batch(None, 1)
    assert "TRANSPORT=legacy" in str(caught.value.hint)


def test_the_queue_is_waited_for(make: Make, tmp_path: Path) -> None:
    wrapper = make(stacks(6), method="BF16")
    sizes = (2 * INNER * HIDDEN * 2, HIDDEN * INNER * 2)
    w13, w2 = (np.zeros(size, np.uint8) for size in sizes)
    wrapper.submit_write_weight_scale_to_buffer(1, 3, [w13.ctypes.data], [0], [w2.ctypes.data], [0])
    wrapper.cpu_infer.sync()
    assert w2.tobytes() == bytes_of(stacks(6).down[3])
    assert w13.tobytes() == bytes_of(stacks(6).gate[3]) + bytes_of(stacks(6).up[3])
