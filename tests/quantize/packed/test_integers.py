"""Integers with a scale per row go into INT8 and INT4 unchanged: the same weights, exactly."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import reference
from helpers.cli import ktconv
from helpers.convert import convert, read_shards
from helpers.encoded import (
    Stored,
    of_angelslim,
    of_awq,
    of_gptq,
    of_int8,
    of_msmodelslim,
    of_packed,
)
from helpers.families import Tensor, simple_config, write_checkpoint
from helpers.reference.kt_layout import unpack_codes
from numpy.typing import NDArray

from ktconv import native
from ktconv.formats import FORMATS, KINDS, PROJECTIONS, tensor_name
from ktconv.quantize.packed.run import Request, prepare
from ktconv.targets.packed.target import Options
from ktconv.writer.manifest import Manifest, read_manifest

pytestmark = pytest.mark.slow

SOURCE = "model.layers.0.mlp.experts"
HIDDEN, INNER = 256, 384
F32 = NDArray[np.float32]
NAMES = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}


class Numbers:
    """A generator whose integers have no 0, which means the lowest number, in every other row."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self.uniform, self.permutation = self._rng.uniform, self._rng.permutation

    def integers(self, low: int, high: int, shape: tuple[int, int], dtype: Any) -> NDArray[Any]:
        found = self._rng.integers(low, high, shape, dtype)
        found[::2] = np.maximum(found[::2], 1)
        return found


def symmetric_gptq(rng: np.random.Generator, rows: int, cols: int, bits: int) -> Stored:
    """As of_gptq, of one group, with all zero points in the middle."""
    middle = 1 << bits - 1
    parts, values = of_gptq(rng, rows, cols, bits, v2=True, group=cols)
    words = np.full((1, rows * bits // 32), 0, np.uint32)
    for place in range(32 // bits):
        words |= np.uint32(middle << place * bits)
    scale = np.asarray(parts["scales"], np.float32)
    codes = np.asarray(parts["qweight"]).view(np.uint32)
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    numbers = (codes[:, None, :] >> shifts[None, :, None] & (2 * middle - 1)).reshape(cols, rows)
    values = (numbers.T.astype(np.float32) - middle) * scale.T
    return {**parts, "qzeros": words.view(np.int32)}, values


KEPT: dict[str, Callable[..., Stored]] = {
    "int8": of_int8,
    "int8, msModelSlim": of_msmodelslim,
    "int4, AngelSlim": of_angelslim,
    "int8 packed": partial(of_packed, bits=8),
    "int4 packed": partial(of_packed, bits=4),
    "int3 packed": partial(of_packed, bits=3),
    "gptq int8": partial(symmetric_gptq, bits=8),
    "gptq int4": partial(symmetric_gptq, bits=4),
}
REQUANTIZED: dict[str, tuple[Callable[..., Stored], str]] = {
    "groups": (partial(of_packed, bits=4, group=64), "a scale for 64 inputs"),
    "zero points": (partial(of_packed, bits=4, asymmetric=True), "are symmetric"),
    "awq": (of_awq, "a scale for 64 inputs"),
    "msModelSlim": (partial(of_msmodelslim, asymmetric=True), "are symmetric"),
}


def model_of(directory: Path, of: Callable[..., Stored]) -> tuple[Path, dict[Any, Any]]:
    """A model of two experts; their weights and the scales of their rows."""
    rng: Any = Numbers(3)
    tensors: dict[str, Tensor] = {}
    values = {}
    for expert in range(2):
        for proj, name in NAMES.items():
            shape = (HIDDEN, INNER) if proj == "down" else (INNER, HIDDEN)
            parts, weights = of(rng, *shape)
            scale = parts["weight_scale"] if "weight_scale" in parts else parts["scales"]
            values[expert, proj] = weights, np.asarray(scale, np.float32).reshape(-1)
            tensors |= {f"{SOURCE}.{expert}.{name}.{part}": one for part, one in parts.items()}
    sizes = {"hidden_size": HIDDEN, "moe_intermediate_size": INNER, "num_experts": 2}
    quantization = {"quantization_config": {"checkpoint_format": "gptq_v2"}}
    settings = simple_config(**sizes, **quantization)
    return write_checkpoint(directory, tensors, settings), values


def dequantized(output: Path, method: str, numa: int, expert: int, proj: Any) -> F32:
    """The whole matrix, by the readable reference; files are read by safetensors."""
    fmt, parts = FORMATS[method], []
    tensors = read_shards(sorted(output.glob("*.safetensors")))
    rows, cols = (HIDDEN, INNER // numa) if proj == "down" else (INNER // numa, HIDDEN)
    for part in range(numa):
        weight, scale = (tensors[tensor_name(0, proj, expert, part, kind)].data for kind in KINDS)
        codes = unpack_codes(fmt, np.frombuffer(weight, np.uint8), rows, cols)
        parts.append(reference.dequantize(fmt, codes, np.frombuffer(scale, np.float32)))
    return np.concatenate(parts, axis=1 if proj == "down" else 0)


def manifest_of(output: Path) -> Manifest:
    found = read_manifest(output)
    assert found is not None
    return found


def beyond(values: F32, scale: F32, method: str) -> NDArray[np.bool_]:
    """Rows whose source has a number that the format does not: -128 or -8."""
    limit = {"int8": 127.5, "int4": 7.5}[method]
    found: NDArray[np.bool_] = np.abs(values).max(axis=1) > limit * scale
    return found


@pytest.mark.parametrize("kind", KEPT)
def test_the_same_weights(isa: str, kind: str, tmp_path: Path) -> None:
    """Whole matrices and parts take turns: each kind and each level has both."""
    method = "int8" if "int8" in kind else "int4"
    turn = [*KEPT].index(kind) + [*native.ISA_NAMES.values()].index(isa)
    numa = (1, 3)[turn % 2]
    model, values = model_of(tmp_path / "model", KEPT[kind])
    convert(model, tmp_path / "out", method=method, numa=numa)
    kept = 0
    for (expert, proj), (source, scale) in values.items():
        found = dequantized(tmp_path / "out", method, numa, expert, proj)
        # A part has a row's own scale if its columns are within the levels.
        exact = (found == source).all(axis=1)
        assert exact[~beyond(source, scale, method)].all()
        kept += int(exact.sum())
    records = manifest_of(tmp_path / "out").tensors
    assert sum(one.get("lossless_rows", 0) for one in records.values()) >= kept > 0


def test_int4_fits_int8_whole(tmp_path: Path) -> None:
    """-8 too, which INT4 does not have."""
    model, values = model_of(tmp_path / "model", KEPT["int4 packed"])
    convert(model, tmp_path / "out", method="int8", numa=1)
    for (expert, proj), (source, _) in values.items():
        found = dequantized(tmp_path / "out", "int8", 1, expert, proj)
        np.testing.assert_array_equal(found, source)


@pytest.mark.parametrize("kind", ["int8", "int4 packed", "gptq int4"])
def test_requantize_is_what_the_values_make(kind: str, tmp_path: Path) -> None:
    """The bytes of a float32 checkpoint with the same weights."""
    model, values = model_of(tmp_path / "model", KEPT[kind])
    convert(model, tmp_path / "out", method="int4", numa=1, requantize=True)
    tensors = {
        f"{SOURCE}.{expert}.{NAMES[proj]}.weight": one
        for (expert, proj), (one, _) in values.items()
    }
    sizes = {"hidden_size": HIDDEN, "moe_intermediate_size": INNER, "num_experts": 2}
    plain = write_checkpoint(tmp_path / "values", dict(tensors), simple_config(**sizes))
    convert(plain, tmp_path / "expected", method="int4", numa=1)
    found, expected = (
        read_shards(sorted((tmp_path / name).glob("*.safetensors"))) for name in ("out", "expected")
    )
    for expert in range(2):
        for proj in PROJECTIONS:
            for tensor in KINDS:
                name = tensor_name(0, proj, expert, 0, tensor)
                assert found[name].data == expected[name].data


@pytest.mark.parametrize("kind", REQUANTIZED)
def test_the_plan_says_why_integers_are_quantized_anew(kind: str, tmp_path: Path) -> None:
    of, reason = REQUANTIZED[kind]
    model, _ = model_of(tmp_path / "model", of)
    plan = prepare(Request(str(model), tmp_path / "out", Options(numa=1))).plan
    [note] = [note for note in plan.notes if "integers" in note]
    assert reason in note
    convert(model, tmp_path / "out", method="int4")
    records = manifest_of(tmp_path / "out").tensors
    assert not any("lossless_rows" in one for one in records.values())


@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 1)])
@pytest.mark.parametrize("kind", ["int8", "int4 packed"])
def test_kept_integers_are_resharded(kind: str, before: int, after: int, tmp_path: Path) -> None:
    model, _ = model_of(tmp_path / "model", KEPT[kind])
    method = kind.partition(" ")[0]
    convert(model, tmp_path / "out", method=method, numa=before)
    # Without the source, parts that differ in the scale of a row cannot be joined.
    source = ("--source", model) if before > after else ()
    for words in (
        ("reshard", tmp_path / "out", tmp_path / "again", "--numa", after, *source),
        ("verify", tmp_path / "again", "--source", model, "--level", "weights"),
    ):
        done = ktconv(*words)
        assert done.exit_code == 0, done.stdout + done.stderr


def test_verify_knows_kept_integers_and_finds_changed_ones(tmp_path: Path) -> None:
    model, _ = model_of(tmp_path / "model", KEPT["int8"])
    output = tmp_path / "out"
    convert(model, output, method="int8", numa=2)
    words = ("verify", output, "--source", model, "--level", "weights")
    sound = ktconv(*words)
    assert sound.exit_code == 0, sound.stdout + sound.stderr
    record = json.loads((output / "ktconv.json").read_text())
    assert "requantize" not in record["options"]
    record["options"]["requantize"] = True
    (output / "ktconv.json").write_text(json.dumps(record))
    wrong = ktconv(*words)
    assert wrong.exit_code == 1
    assert "but the search for the smallest error gives" in wrong.stdout
