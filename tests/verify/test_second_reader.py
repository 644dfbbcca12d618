"""The second way to read weights: right for every encoding, and a judge of the converter's way."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.convert import convert
from helpers.encoded import KINDS, encoded_model, of_gptq
from helpers.families import (
    Tensor,
    Weights,
    bf16,
    fp8,
    fused,
    numbered,
    random_weights,
    simple_config,
    write_checkpoint,
)
from helpers.gguf_files import Blocks as Stack
from helpers.gguf_files import metadata, write_gguf
from helpers.gpt_oss import SIZES
from helpers.gpt_oss import Blocks as GptOssBlocks
from msgspec.structs import replace

from ktconv import native
from ktconv.source import PROJECTIONS, Checkpoint, Projection, open_checkpoint
from ktconv.source.elements import BLOCKS
from ktconv.source.encodings import grids
from ktconv.source.encodings.gguf import GGUF
from ktconv.source.fused import FusedLayout
from ktconv.source.reading import matrices
from ktconv.source.reading.matrices import MatrixReader, Scales, buffer_bytes
from ktconv.source.reading.reader import SourceReader
from ktconv.system.opened import Opened
from ktconv.verify import Request, verify
from ktconv.verify.findings import Findings
from ktconv.verify.reading_check import ReadingCheck, expert_check
from ktconv.verify.second_reader import SecondReader
from ktconv.verify.second_reader.numbers import GGML_TYPES, block_numbers, block_size

pytestmark = pytest.mark.slow

SOURCE = "model.layers.0.mlp.experts"
GGUF_WORDS = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
BOUNCE = np.empty(1 << 16, np.uint8)


def second_reader(checkpoint: Checkpoint) -> tuple[SourceReader, SecondReader]:
    reader = SourceReader(checkpoint.files, checkpoint.sources)
    return reader, SecondReader(checkpoint, reader)


def assert_reads(checkpoint: Checkpoint, weights: Weights) -> None:
    """All values of all experts, and that the converter's way has no other."""
    reader, second = second_reader(checkpoint)
    layer = checkpoint.layers[0]
    for number in range(len(layer.experts)):
        for proj in PROJECTIONS:
            values = getattr(weights, proj)[number]
            found = second.expert(layer, number, proj)
            rows, cols = values.shape
            whole = found.values(range(rows), range(cols))
            np.testing.assert_array_equal(whole, values)
            part = found.values(range(rows // 2, rows // 2 + 1), range(32, 96))
            np.testing.assert_array_equal(part, values[rows // 2 : rows // 2 + 1, 32:96])
            assert differences(reader, second, checkpoint, number, proj) == []


def differences(
    reader: SourceReader,
    second: SecondReader,
    checkpoint: Checkpoint,
    expert: int,
    proj: Projection,
    spoil: Callable[[Scales], Scales] = lambda scales: scales,
    spoil_data: Callable[[np.ndarray], None] = lambda data: None,
) -> list[str]:
    """What is found where the converter's scales or bytes are spoilt."""
    findings, layer = Findings(), checkpoint.layers[0]
    matrix = layer.experts[expert][proj]
    check = expert_check(second, findings, layer, expert, proj)
    assert isinstance(check, ReadingCheck)
    source = MatrixReader(reader, matrix)
    scales = source.load_scales()
    scales = None if scales is None else spoil(scales)
    check.scales(scales)
    chunk, data = range(matrix.rows), np.empty(buffer_bytes(matrix, matrix.rows), np.uint8)
    with source.open() as fd:
        source.read(fd, chunk, data, BOUNCE)
    spoil_data(data)
    check.view(source, scales, chunk, data, 0, matrix.cols)
    return [failure.message for failure in findings.listed]


# ---- every encoding --------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_every_encoding_is_read_and_spoilt_readings_are_found(kind: str, tmp_path: Path) -> None:
    model, weights, _ = encoded_model(tmp_path, kind)
    checkpoint = open_checkpoint(model)
    assert_reads(checkpoint, weights)
    reader, second = second_reader(checkpoint)

    def spoilt(**changes: Any) -> list[str]:
        return differences(reader, second, checkpoint, 1, "down", **changes)

    def last_scale(scales: Scales) -> Scales:
        scale = scales.scale.copy()
        scale[-1, -1] *= 1.001
        return replace(scales, scale=scale, row_scale=None)

    [message] = spoilt(spoil=last_scale)
    assert "the scale of [" in message and f"{SOURCE}.1.down_proj." in message

    def last_zero(scales: Scales) -> Scales:
        zero = np.zeros_like(scales.scale)
        if scales.zero_point is not None:
            zero[:] = scales.zero_point
        zero[-1, -1] += 1
        return replace(scales, zero_point=zero)

    [message] = spoilt(spoil=last_zero)
    assert "the zero point of [" in message

    def other_bits(data: np.ndarray) -> None:
        data ^= 0x11

    [message] = spoilt(spoil_data=other_bits)
    assert "the value at [" in message


def test_mxint4_of_some_modules(tmp_path: Path) -> None:
    """AutoRound names their data type in extra_config."""
    model, weights, _ = encoded_model(tmp_path, "mxint4, AutoRound")
    config = json.loads((model / "config.json").read_text())
    extra = {f"{SOURCE}.0.gate_proj": {"data_type": "mx_int4"}}
    config["quantization_config"] |= {"data_type": "int", "extra_config": extra}
    (model / "config.json").write_text(json.dumps(config))
    assert_reads(open_checkpoint(model), weights)


@pytest.mark.parametrize("encode", [bf16, np.float16, np.float32])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("hidden", [128, 256, 512])
def test_plain_fused_weights(
    hidden: int, transposed: bool, encode: Callable[[Any], Tensor], tmp_path: Path
) -> None:
    """Also where I = H, and 2I = H."""
    weights = random_weights(hidden, 256, 2)
    if encode is np.float16:
        weights = Weights(*(one.astype(np.float16).astype(np.float32) for one in weights))
    config = simple_config(hidden_size=hidden, moe_intermediate_size=256, num_experts=2)
    tensors = fused(SOURCE, weights, transposed, encode=encode)
    assert_reads(open_checkpoint(write_checkpoint(tmp_path, tensors, config)), weights)


@pytest.mark.parametrize("words", [("gate_proj", "up_proj", "down_proj"), GGUF_WORDS])
def test_gate_and_up_apart(words: tuple[str, ...], tmp_path: Path) -> None:
    source = "blk.0" if words == GGUF_WORDS else SOURCE
    weights = random_weights(inner=192)
    tensors: dict[str, Tensor] = {
        f"{source}.{word}.weight": bf16(one) for word, one in zip(words, weights, strict=True)
    }
    config = simple_config(moe_intermediate_size=192)
    assert_reads(open_checkpoint(write_checkpoint(tmp_path, tensors, config)), weights)


@pytest.mark.parametrize("stored", ["mxfp4", "bf16"])
def test_outputs_that_alternate(stored: str, tmp_path: Path) -> None:
    blocks = GptOssBlocks()
    config = simple_config(**SIZES, model_type="gpt_oss")
    model = write_checkpoint(tmp_path, getattr(blocks, stored), config)
    assert_reads(open_checkpoint(model), blocks.weights)


@pytest.mark.parametrize("name", GGML_TYPES)
def test_blocks_of_ggml(name: str) -> None:
    """Bytes in any number of leading dimensions, with the values that the C library decodes."""
    from helpers.ggml import blocks_of

    cols, nbytes = block_size(name)
    blocks = blocks_of(np.random.default_rng(3), name, 16, 1024)
    with np.errstate(all="ignore"):
        found = block_numbers(name, blocks.reshape(16, -1, nbytes))
    assert found.dtype == np.float32 and found.shape == (16, 1024 // cols, cols)
    if name in BLOCKS:  # others are decoded by the package for both
        view = native.Matrix(blocks.reshape(-1), name, 16, 1024, row_stride=1024 // cols)
        np.testing.assert_array_equal(found.reshape(16, -1), native.decode(view))


def test_every_type_of_ggml_is_there() -> None:
    plain = {"BF16", "F16", "F32"}
    assert {dtype for one in GGUF for dtype in one.dtypes} - plain <= {*GGML_TYPES}


@pytest.mark.parametrize("form", ["apart", "together", "numbered"])
def test_gguf_models(form: str, tmp_path: Path) -> None:
    """Another type for every projection, and factors of experts."""
    from helpers.ggml import blocks_of

    rng, factor = np.random.default_rng(2), np.array([0.5, -3], np.float32)
    kinds = ("Q4_0", "Q4_0" if form == "together" else "IQ2_XS", "Q8_0")
    tensors: dict[str, Any] = {}
    found: dict[str, np.ndarray] = {}
    for word, kind in zip(PROJECTIONS, kinds, strict=True):
        rows, cols = (256, 192) if word == "down" else (192, 256)
        data = blocks_of(rng, kind, 2 * rows, cols).reshape(2, rows, -1)
        found[word] = Stack(kind, data).values.reshape(2, rows, cols)
        name = f"blk.0.ffn_{word}"
        if form == "numbered":
            tensors |= {f"{name}.{e}.weight": Stack(kind, data[e]) for e in range(2)}
            continue
        tensors[f"{name}_exps.weight"] = Stack(kind, data)
        tensors[f"{name}_exps.scale"] = factor
        found[word] = found[word] * factor[:, None, None]
    if form == "together":
        both = [tensors.pop(f"blk.0.ffn_{word}_exps.weight").data for word in ("gate", "up")]
        tensors["blk.0.ffn_gate_up_exps.weight"] = Stack("Q4_0", np.concatenate(both, axis=1))
        tensors["blk.0.ffn_gate_up_exps.scale"] = tensors.pop("blk.0.ffn_gate_exps.scale")
        del tensors["blk.0.ffn_up_exps.scale"]
    sizes = metadata(expert_count=2, expert_feed_forward_length=192, embedding_length=256)
    checkpoint = open_checkpoint(write_gguf(tmp_path / "tiny.gguf", tensors, sizes))
    assert_reads(checkpoint, Weights(**found))


def fused_fp8(directory: Path, transposed: bool = False, inner: int = 192) -> Path:
    """Codes of one value; scales that all differ; up begins inside a block."""
    config = simple_config(moe_intermediate_size=inner, num_experts=2)
    tensors: dict[str, Tensor] = {}
    for name, shape in (("gate_up_proj", (2 * inner, 128)), ("down_proj", (128, inner))):
        stored = shape[::-1] if transposed else shape
        codes = np.random.default_rng(1).integers(1, 0x7E, (2, *stored), np.uint8)
        grid = (2, *(-(-size // 128) for size in stored))
        scales = np.arange(1, 1 + np.prod(grid), dtype=np.float32).reshape(grid)
        tensors[f"{SOURCE}.{name}"] = fp8(codes)
        tensors[f"{SOURCE}.{name}_scale_inv"] = scales
    return write_checkpoint(directory, tensors, config)


# ---- faults in the converter's way -----------------------------------------------------

Patch = Callable[[pytest.MonkeyPatch], None]


def number(name: str, other: str) -> Patch:
    return lambda patch: patch.setitem(grids.NUMBERS, name, grids.NUMBERS[other])


def decoded(name: str, change: Callable[[Any], Any]) -> Patch:
    """Numbers of a grid that are decoded wrongly."""
    right = grids.NUMBERS[name]
    wrong = replace(right, decode=lambda bits: change(right.decode(bits)))
    return lambda patch: patch.setitem(grids.NUMBERS, name, wrong)


def other_way(patch: pytest.MonkeyPatch) -> None:
    right = grids.load_outer_scale

    def wrong(outer: Any, grid: Any, data: Any) -> Any:
        return right(replace(outer, divides=not outer.divides), grid, data)

    patch.setattr(matrices, "load_outer_scale", wrong)


def groups_in_order(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(matrices, "load_groups", lambda *_: None)


def groups_shifted(patch: pytest.MonkeyPatch) -> None:
    right: Any = grids.load_groups

    def wrong(*about: Any) -> Any:
        return np.roll(right(*about), 1)

    patch.setattr(matrices, "load_groups", wrong)


def grid(change: Callable[[np.ndarray], np.ndarray]) -> Patch:
    right = grids.load_block_scale
    return lambda patch: patch.setattr(
        matrices,
        "load_block_scale",
        lambda *about: np.ascontiguousarray(change(right(*about))),
    )


def transposed(values: np.ndarray) -> np.ndarray:
    """Stored the other way round, in the same bytes."""
    return values.reshape(values.shape[::-1]).T if values.size > 1 else values * 2


def bytes_read(change: Callable[[np.ndarray], np.ndarray]) -> Patch:
    def apply(patch: pytest.MonkeyPatch) -> None:
        right = MatrixReader.loaded

        @contextmanager
        def wrong(
            self: MatrixReader, fd: Opened, chunk: range, target: Any, bounce: Any, nbytes: int = 0
        ) -> Iterator[Any]:
            with right(self, fd, chunk, target, bounce, nbytes) as data:
                yield change(data[: self.matrix.nbytes(len(chunk))].copy())

        patch.setattr(MatrixReader, "loaded", wrong)
        patch.setattr(matrices, "_neighbours", lambda wanted: [[i] for i in range(len(wanted))])

    return apply


def kept_in_spite_of_zeros(patch: pytest.MonkeyPatch) -> None:
    right = MatrixReader._row_scale

    def wrong(self: MatrixReader, scale: Any, zero: Any, groups: Any) -> Any:
        return right(self, scale, None, groups) if scale.shape[1] == 1 else None

    patch.setattr(MatrixReader, "_row_scale", wrong)


def up_is_gate(patch: pytest.MonkeyPatch) -> None:
    right = FusedLayout.views

    def wrong(self: FusedLayout, expert: int) -> Any:
        found = right(self, expert)
        return {**found, "up": found["gate"]}

    patch.setattr(FusedLayout, "views", wrong)


def nibbles_swapped(data: np.ndarray) -> np.ndarray:
    return data >> 4 | data << 4


FAULTS: dict[str, tuple[str, Patch]] = {
    "zero points of v1 as those of v2": ("gptq int4, v1", number("U4_ROWS_LESS_ONE", "U4_ROWS")),
    "zero points of v2 as those of v1": ("gptq int8, v2", number("U8_ROWS", "U8_ROWS_LESS_ONE")),
    "zero points of AWQ in order": ("awq", number("U4_ROWS_AWQ", "U4_ROWS")),
    "weights in halves of bytes swapped": ("awq", bytes_read(nibbles_swapped)),
    "FP4 in halves of bytes swapped": ("mxfp4, Quark", bytes_read(nibbles_swapped)),
    "rows moved": ("int8 group", bytes_read(lambda data: np.roll(data, 256))),
    "outer scale multiplied": ("nvfp4, compressed-tensors", other_way),
    "outer scale divided by": ("nvfp4, ModelOpt", other_way),
    "groups in order": ("gptq by activation", groups_in_order),
    "groups shifted": ("int4 packed by activation", groups_shifted),
    "blocks transposed": ("fp8 block", grid(transposed)),
    "groups transposed": ("int4 packed, group 32", grid(transposed)),
    "channels reversed": ("fp8 channel", grid(lambda values: values[::-1])),
    "rows of the grid moved": ("int8 channel", grid(lambda values: np.roll(values, 1, 0))),
    "scale of the tensor doubled": ("fp8 tensor", grid(lambda values: 2 * values)),
    "exponents off by one": ("mxfp4, DeepSeek-V4", decoded("E8M0", lambda values: values / 2)),
    "half as bfloat": ("int4 packed, channel", number("BF16", "F16")),
    "zero points in another order": (
        "int3 packed, asymmetric", decoded("U3_ROWS", lambda values: values[::-1])
    ),
    "signs of zero points lost": ("int8 asymmetric", decoded("I8", np.abs)),
    "integers kept in spite of zero points": ("int8 asymmetric", kept_in_spite_of_zeros),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_converters_way_is_found(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The packed experts agree with the source as the converter reads it, and still it is found."""
    kind, patch = FAULTS[fault]
    model, _, _ = encoded_model(tmp_path / "model", kind)
    patch(monkeypatch)
    assert_found(model, tmp_path / "out")


def assert_found(model: Path, output: Path) -> None:
    convert(model, output, method="int8", numa=2)
    result = verify(Request(output, source=str(model), level="weights"))
    assert not result.passed
    assert {failure.check for failure in result.failures} == {"reading"}
    first = result.failures[0]
    assert first.level == "weights" and first.tensor and first.tensor.startswith(SOURCE)
    assert first.expert is not None and first.projection and first.tensor in first.message


@pytest.mark.parametrize("fault", [up_is_gate, grid(np.flip)])
@pytest.mark.parametrize("turned", [False, True])
def test_a_fault_in_reading_fused_experts_is_found(
    turned: bool, fault: Patch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = fused_fp8(tmp_path / "model", turned)
    convert(model, tmp_path / "sound", method="int8")
    request = Request(tmp_path / "sound", source=str(model), level="weights")
    assert verify(request).passed
    fault(monkeypatch)
    convert(model, tmp_path / "out", method="int8")
    result = verify(Request(tmp_path / "out", source=str(model), level="weights"))
    assert {failure.check for failure in result.failures} == {"reading"}


def test_a_layout_that_only_the_converter_knows_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ktconv.verify.second_reader import encodings

    model, _, _ = encoded_model(tmp_path / "model", "fp8 block")
    convert(model, tmp_path / "out")
    monkeypatch.setattr(encodings, "ROWS", encodings.ROWS[2:])
    result = verify(Request(tmp_path / "out", source=str(model), level="weights"))
    assert {failure.check for failure in result.failures} == {"reading"}
    what = "0.gate_proj is no weight that verify knows: weight F8_E4M3 [384, 256]"
    assert any(what in failure.message for failure in result.failures)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("outputs", [1, 4, 9, 60])
def test_zero_points_of_a_part_of_a_word(outputs: int, bits: int, tmp_path: Path) -> None:
    """A router in GPTQ (ModelCloud/GPTQModel#1439: 60 experts): the last word of zero points has
    some of outputs that there are not."""
    columns = -(-outputs // 16) * 16
    parts, values = of_gptq(np.random.default_rng(3), columns, 128, bits, v2=False)
    widths = {"qweight": outputs, "scales": outputs, "qzeros": -(-outputs * bits // 32)}
    router: dict[str, Tensor] = {
        f"model.layers.0.mlp.gate.{part}": np.asarray(parts[part])[:, :width]
        for part, width in widths.items()
    }
    every = numbered(SOURCE, random_weights()) | router
    checkpoint = open_checkpoint(write_checkpoint(tmp_path, every, simple_config()))
    _, second = second_reader(checkpoint)
    found = second.module("model.layers.0.mlp.gate.qweight", outputs, 128)
    np.testing.assert_array_equal(found.values(range(outputs), range(128)), values[:outputs])
