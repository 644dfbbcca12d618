"""`compare`: the strongest verdict that holds, and every difference where it is."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import reference
from helpers.cli import ktconv, refused, write_model
from helpers.convert import convert, read_model
from helpers.families import (
    Raw,
    Tensor,
    Weights,
    numbered,
    random_weights,
    simple_config,
    write_checkpoint,
    write_safetensors,
)
from helpers.reference.kt_layout import offsets, unpack_codes

from ktconv.errors import UsageError
from ktconv.formats import (
    FORMATS,
    PROJECTIONS,
    Projection,
    TensorId,
    matrix_shape,
    split,
    tensor_name,
)
from ktconv.targets.packed.weights import PackedWeights, open_packed
from ktconv.verify.compare import Comparison, compare, make_plan
from ktconv.verify.runner import sizes_by_unit

pytestmark = pytest.mark.slow

HIDDEN, INNER, EXPERTS, LAYERS = 128, 256, 4, 2
MATRICES = LAYERS * EXPERTS * len(PROJECTIONS)

Make = Callable[..., Path]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model") / "model"
    return write_model(directory, layers=LAYERS, experts=EXPERTS, inner=INNER)


@pytest.fixture(scope="module")
def made(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Conversions of the model by their options, each made once; not to be changed."""
    root = tmp_path_factory.mktemp("made")
    known: dict[str, Path] = {}

    def make(**options: Any) -> Path:
        key = json.dumps(options, sort_keys=True)
        if key not in known:
            known[key] = root / str(len(known))
            convert(model, known[key], **options)
        return known[key]

    return make


@pytest.fixture
def copied(made: Make, tmp_path: Path) -> Make:
    """Copies of conversions, to be changed."""
    return lambda **options: Path(shutil.copytree(made(**options), tmp_path / "copy"))


def check(a: Path, b: Path, verdict: str, **options: Any) -> Comparison:
    """Compares, and holds the result to what every result must be."""
    found = compare(a, b, **{"threads": 2, **options})
    assert found.verdict == verdict, found.lines()
    assert found.equal == (verdict != "different") == (not found.differences)
    facts = json.loads(json.dumps(found.as_dict(), allow_nan=False))
    assert (facts["schema"], facts["kind"], facts["passed"]) == (1, "comparison", found.equal)
    assert (facts["a"], facts["b"]) == (str(a), str(b))
    assert found.lines()[0].startswith(verdict) and len(found.lines()) < 40
    assert not [text for text in found.differences if not text.endswith((".", "more"))]
    assert bool(found.worst) == any(sum(layer["different"].values()) for layer in found.layers)
    return found


def said(found: Comparison, *phrases: str) -> None:
    text = "\n".join(found.lines())
    for phrase in phrases:
        assert phrase in text, text


def different(found: Comparison) -> dict[str, int]:
    """Matrices that differ, by projection."""
    counts: dict[str, int] = dict.fromkeys(PROJECTIONS, 0)
    for layer in found.layers:
        for proj, count in layer["different"].items():
            counts[proj] += count
    return counts


def change(directory: Path, tensor: TensorId, byte: int, mask: int) -> None:
    """Flips bits of one byte of a tensor on the disk."""
    place = open_packed(directory).place(tensor)
    with place.file.open("r+b") as file:
        file.seek(place.offset + byte)
        value = file.read(1)[0]
        file.seek(place.offset + byte)
        file.write(bytes([value ^ mask]))


def write_scales(directory: Path, tensor: TensorId, *scales: float) -> None:
    """Replaces the first scales of a matrix on the disk."""
    place = open_packed(directory).place(tensor)
    with place.file.open("r+b") as file:
        file.seek(place.offset)
        file.write(np.array(scales, "<f4").tobytes())


def values(packed: PackedWeights, layer: int, expert: int, proj: Projection) -> Any:
    """A whole matrix, dequantized by the reference."""
    geometry = packed.geometry(layer)
    assert geometry.format is not None
    whole = np.empty(matrix_shape(proj, geometry.hidden, geometry.intermediate), np.float32)
    for part in range(geometry.parts):
        payload = packed.map(TensorId(layer, proj, expert, part, "weight"))
        scale = packed.map(TensorId(layer, proj, expert, part, "scale")).view("<f4")
        codes = unpack_codes(geometry.format, payload, *geometry.shape(proj))
        here = split(proj, geometry.hidden, geometry.intermediate, part, geometry.parts)
        whole[here.index] = reference.dequantize(geometry.format, codes, scale)
    return whole


def assert_measured(found: Comparison, a: Path, b: Path) -> None:
    """The numbers of the worst matrices are those of the reference's values."""
    packed = open_packed(a), open_packed(b)
    for one in found.worst:
        where = one["layer"], one["expert"], one["projection"]
        left, right = (values(side, *where).astype(np.float64) for side in packed)
        off = left - right
        relative = np.linalg.norm(off) / np.linalg.norm(left)
        cosine = (left * right).sum() / np.linalg.norm(left) / np.linalg.norm(right)
        assert one["relative_rms_difference"] == pytest.approx(relative, rel=1e-9)
        assert one["cosine"] == pytest.approx(cosine, rel=1e-9)
        assert one["differing_elements"] == np.count_nonzero(off)
        assert one["elements"] == off.size
        row, column = np.argwhere(off)[0]
        assert (one["row"], one["column"]) == (row, column)
        assert (one["value_a"], one["value_b"]) == (left[row, column], right[row, column])
    order = [one["relative_rms_difference"] for one in found.worst]
    assert order == sorted(order, reverse=True)


def rewrite(directory: Path, output: Path, change: Callable[[dict[str, Raw]], Any]) -> Path:
    """All tensors in one shard and nothing else, as another tool might; some changed."""
    tensors = read_model(directory)
    change(tensors)
    output.mkdir()
    write_safetensors(output / "model-00001.safetensors", tensors)
    return output


# ---- equal -----------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["int4", "int8"])
@pytest.mark.parametrize("numa", [1, 2])
def test_same_conversion_twice(
    method: str, numa: int, model: Path, made: Make, tmp_path: Path
) -> None:
    convert(model, tmp_path / "again", method=method, numa=numa)
    found = check(made(method=method, numa=numa), tmp_path / "again", "equal bytes")
    assert found.matrices == MATRICES and found.other_tensors == LAYERS + 1
    assert found.elements == MATRICES * HIDDEN * INNER
    assert not found.worst and not found.notes and not found.only_in_a and not found.expected
    for layer in found.layers:
        assert layer["equal_bytes"] == layer["equal_weights"] == layer["matrices"] == 12
        assert layer["relative_rms_difference"] == 0 and layer["cosine"] == 1


@pytest.mark.parametrize("numa", [1, 2])
def test_layouts(numa: int, made: Make) -> None:
    found = check(made(numa=numa), made(numa=numa, layout="layers"), "equal bytes")
    said(found, "Only A has non-expert tensors (3 tensors), B none", "as layers")
    assert not found.only_in_a and found.other_tensors == 0
    assert found.a["method"] == found.b["method"] == "int4" and found.b["numa"] == numa


def test_shard_sizes(made: Make) -> None:
    small = made(max_shard_size=100_000)
    assert len(list(small.glob("*.safetensors"))) > len(list(made().glob("*.safetensors")))
    check(made(), small, "equal bytes")


def test_another_tool(made: Make, tmp_path: Path) -> None:
    """One shard without manifest, index and metadata, with U8 matrices."""

    def two_dimensional(tensors: dict[str, Raw]) -> None:
        for name, tensor in tensors.items():
            if tensor.dtype == "I8":
                tensors[name] = Raw("U8", (2, len(tensor.data) // 2), tensor.data)

    check(made(), rewrite(made(), tmp_path / "theirs", two_dimensional), "equal bytes")


def test_backward_matrices_are_extra(made: Make, tmp_path: Path) -> None:
    def add(tensors: dict[str, Raw]) -> None:
        for name in [name for name in tensors if "_exps" in name]:
            tensors[name.replace("_exps", "_bwd_exps")] = tensors[name]

    theirs = rewrite(made(), tmp_path / "theirs", add)
    found = check(made(), theirs, "equal weights")
    assert found.only_in_b[0] == {"layer": 0, "projection": "gate_bwd"}
    said(found, "Only B has backward matrices")
    check(theirs, theirs, "equal bytes")


def test_equal_weights_in_other_parts(tmp_path: Path) -> None:
    """Both halves of every row of down have the same maximum, so parts change no value by amax."""
    half = random_weights(experts=2)
    wide = random_weights(inner=INNER, experts=2)
    weights = Weights(wide.gate, wide.up, np.concatenate([half.down, half.down], axis=2))
    config = simple_config(moe_intermediate_size=INNER, num_experts=2)
    source = write_checkpoint(
        tmp_path / "model", numbered("model.layers.0.mlp.experts", weights), config
    )
    for numa in (1, 2):
        convert(source, tmp_path / str(numa), numa=numa, scale="amax")
    found = check(tmp_path / "1", tmp_path / "2", "equal weights")
    assert found.layers[0]["equal_bytes"] == 0 and found.layers[0]["equal_weights"] == 6


# ---- other options ---------------------------------------------------------------------


@pytest.mark.parametrize("scale", ["amax", "search"])
@pytest.mark.parametrize("method", ["int4", "int8"])
def test_numa_counts(method: str, scale: str, made: Make) -> None:
    """A search cuts the largest weights, in each part at another place."""
    a = made(method=method, numa=1, scale=scale)
    b = made(method=method, numa=2, scale=scale, layout="layers")
    found = check(a, b, "different")
    assert different(found) == {"gate": 0, "up": 0, "down": LAYERS * EXPERTS}
    assert found.expected
    said(found, "This is expected: A has 1 NUMA part and B has 2", "scales of its own")
    assert_measured(found, a, b)
    most = found.layers[0]["max_difference_steps"]
    assert most > 0 and (scale == "search" or most <= 2 * FORMATS[method].max_error_steps)


def test_numa_counts_do_not_excuse_more(made: Make, copied: Make) -> None:
    """A scale that doubled in down is no rounding; a changed gate is none at all."""
    b = copied(numa=2)
    change(b, TensorId(1, "down", 3, 1, "scale"), 4 * 5 + 3, 1)
    found = check(made(), b, "different")
    assert not found.expected and (found.worst[0]["layer"], found.worst[0]["expert"]) == (1, 3)
    said(found, "does not explain")


def test_numa_counts_do_not_excuse_gate(made: Make, copied: Make) -> None:
    b = copied(numa=2)
    change(b, TensorId(1, "gate", 0, 0, "weight"), 0, 1)
    found = check(made(), b, "different")
    assert not found.expected and different(found)["gate"] == 1
    assert "expected" not in " ".join(found.differences)


def test_numa_counts_do_not_excuse_a_missing_layer(made: Make, copied: Make) -> None:
    b = copied(numa=2, layout="layers")
    shutil.rmtree(b / "_layer_0")
    found = check(made(), b, "different")
    assert not found.expected
    said(found, "This is expected", "Only in A: layer 0.")


@pytest.mark.parametrize("scale", ["amax", "search"])
def test_methods(scale: str, made: Make) -> None:
    a, b = made(method="int4", scale=scale), made(method="int8", numa=2, scale=scale)
    found = check(a, b, "different")
    assert sum(different(found).values()) == MATRICES and found.expected
    assert all(0.05 < one["relative_rms_difference"] < 0.3 for one in found.worst)
    said(found, "A is INT4 and B is INT8")
    assert_measured(found, a, b)
    back = check(b, a, "different")  # steps are those of the coarser
    for here, there in zip(found.layers, back.layers, strict=True):
        assert here["max_difference_steps"] == there["max_difference_steps"]
        assert scale == "search" or here["max_difference_steps"] < 0.6


def test_different_source(made: Make, tmp_path: Path) -> None:
    tensors: dict[str, Tensor] = {}
    for layer in range(LAYERS):
        weights = random_weights(inner=INNER, seed=100 + layer)
        tensors |= numbered(f"model.layers.{layer}.mlp.experts", weights)
    config = simple_config(num_hidden_layers=LAYERS, moe_intermediate_size=INNER)
    write_checkpoint(tmp_path / "model", tensors, config)
    shutil.copy(made() / "tokenizer.json", tmp_path / "model")
    convert(tmp_path / "model", tmp_path / "other")
    found = check(made(), tmp_path / "other", "different")
    assert sum(different(found).values()) == MATRICES and not found.expected
    assert found.worst[0]["relative_rms_difference"] == pytest.approx(math.sqrt(2), abs=0.05)
    assert abs(found.worst[0]["cosine"]) < 0.05
    assert len(found.differences) == 1  # the sentence about all matrices


# ---- damage ----------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["int4", "int8"])
@pytest.mark.parametrize("proj", PROJECTIONS)
def test_flipped_bit_of_a_weight(
    method: str, proj: Projection, made: Make, copied: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ktconv.verify.compare.pairs.CHUNK_ELEMENTS", 3 * INNER)
    options = {"method": method, "numa": 2, "layout": "layers"}
    a, b, fmt = made(method=method, numa=2), copied(**options), FORMATS[method]
    row, column = 37, 100  # in the second part
    rows, cols = open_packed(a).layers[1].shape(proj)
    byte, plane = offsets(fmt, np.array(row), np.array(column), rows, cols)
    change(b, TensorId(1, proj, 2, 1, "weight"), int(byte), 1 << fmt.traits.bits * int(plane))
    found = check(a, b, "different")
    here = split(proj, HIDDEN, INNER, 1, 2)
    assert len(found.worst) == 1
    worst = found.worst[0]
    assert (worst["layer"], worst["expert"], worst["projection"]) == (1, 2, proj)
    assert (worst["row"], worst["column"]) == (here.row_start + row, here.col_start + column)
    assert worst["differing_elements"] == 1
    assert worst["max_difference_steps"] == pytest.approx(1, rel=1e-5)
    assert_measured(found, a, b)
    said(found, f"Layer 1, expert 2, {proj}", f"[{worst['row']}, {worst['column']}]")


@pytest.mark.parametrize("proj", PROJECTIONS)
def test_flipped_bit_of_a_scale(proj: Projection, made: Make, copied: Make) -> None:
    """The last bit of one: every weight of the part's row that is not 0 changes a little."""
    a, b = made(numa=2), copied(numa=2)
    change(b, TensorId(0, proj, 3, 1, "scale"), 4 * 50, 1)
    found = check(a, b, "different")
    worst = found.worst[0]
    here = split(proj, HIDDEN, INNER, 1, 2)
    assert (worst["layer"], worst["expert"], worst["projection"]) == (0, 3, proj)
    assert worst["row"] == here.row_start + 50
    assert here.col_start <= worst["column"] < here.col_stop
    assert 1 <= worst["differing_elements"] <= here.col_stop - here.col_start
    assert worst["max_difference_steps"] < 1e-5 and worst["relative_rms_difference"] > 0
    assert_measured(found, a, b)


def test_scale_that_is_no_number(made: Make, copied: Make) -> None:
    b = copied()
    write_scales(b, TensorId(0, "up", 1, 0, "scale"), np.nan, np.inf)
    found = check(made(), b, "different")
    worst = found.worst[0]
    assert worst["relative_rms_difference"] is None and worst["value_b"] is None
    assert (worst["row"], worst["column"]) == (0, 0)
    assert worst["differing_elements"] == 2 * HIDDEN
    said(found, "not finite")
    check(b, b, "equal bytes")
    change(b, TensorId(0, "gate", 0, 0, "weight"), 0, 1)
    found = check(made(), b, "different")
    assert [one["projection"] for one in found.worst] == ["up", "gate"]


def test_same_nonsense_is_the_same(made: Make, copied: Make, tmp_path: Path) -> None:
    """Rows that are no number on both sides are equal, and no difference to the rest."""
    a = copied()
    write_scales(a, TensorId(0, "up", 1, 0, "scale"), np.nan)
    b = Path(shutil.copytree(a, tmp_path / "b"))
    change(b, TensorId(0, "up", 1, 0, "scale"), 4 * 9, 1)
    found = check(a, b, "different")
    assert (found.worst[0]["row"], different(found)["up"]) == (9, 1)


def test_zero_matrix(made: Make, tmp_path: Path) -> None:
    """What is all zero in A has no relative difference to A."""

    def clear(tensors: dict[str, Raw]) -> None:
        name = tensor_name(0, "gate", 0, 0, "scale")
        tensors[name] = tensors[name]._replace(data=bytes(len(tensors[name].data)))

    a = rewrite(made(), tmp_path / "a", clear)
    for pair in ((a, made()), (made(), a)):
        worst = check(*pair, "different").worst[0]
        assert worst["relative_rms_difference"] == pytest.approx(1)
        assert worst["cosine"] == 0


def test_comparing_swapped_experts(made: Make, tmp_path: Path) -> None:
    def swap(tensors: dict[str, Raw]) -> None:
        for proj in PROJECTIONS:
            for kind in ("weight", "scale"):
                a, b = (tensor_name(1, proj, expert, 0, kind) for expert in (0, 2))
                tensors[a], tensors[b] = tensors[b], tensors[a]

    found = check(made(), rewrite(made(), tmp_path / "b", swap), "different")
    assert different(found) == {"gate": 2, "up": 2, "down": 2}
    assert {one["expert"] for one in found.worst} == {0, 2}
    assert found.worst[0]["relative_rms_difference"] == pytest.approx(math.sqrt(2), abs=0.05)
    said(
        found,
        "The down, gate, up of expert 0 of layer 1 in A is that of expert 2 of layer 1 in B.",
        "The down, gate, up of expert 2 of layer 1 in A is that of expert 0 of layer 1 in B.",
    )


def test_comparing_with_a_missing_part(made: Make, copied: Make) -> None:
    b = copied(numa=2, layout="layers")
    open_packed(b).place(TensorId(1, "down", 2, 1, "scale")).file.unlink()
    found = check(made(numa=2), b, "different")
    said(found, "Layer 1, expert 2, down cannot be compared: B has no " + "blk.1.ffn_down_exps.2")
    assert found.matrices == MATRICES - 1 and not found.worst
    check(b, made(), "different")
    found = check(b, b, "equal bytes")
    said(found, "Layer 1 was compared as bytes where A has no blk.1.ffn_down_exps.2.numa.1.scale.")


def test_missing_part_of_all(made: Make, copied: Make) -> None:
    b = copied(numa=2, layout="layers")
    shutil.rmtree(b / "_layer_1" / "_numa_1")
    said(check(made(numa=2), b, "different"), "Layer 1 has other dimensions", "in 2 parts in A")


def test_missing_matrices(made: Make, tmp_path: Path) -> None:
    """A projection of one expert, an expert, a projection of a layer, each named as such."""
    gone = ("blk.0.ffn_up_exps.1.", "blk.0.ffn_{}_exps.3.", "blk.1.ffn_up_exps.")

    def drop(tensors: dict[str, Raw]) -> None:
        for name in list(tensors):
            if name.startswith(tuple(one.format(proj) for one in gone for proj in PROJECTIONS)):
                del tensors[name]

    theirs = rewrite(made(), tmp_path / "theirs", drop)
    expected = [
        {"layer": 0, "expert": 3},
        {"layer": 0, "expert": 1, "projection": "up"},
        {"layer": 1, "projection": "up"},
    ]
    found = check(made(), theirs, "different")
    assert found.only_in_a == expected and found.only_in_b == []
    said(found, "Only in A: layer 0 expert 3, layer 0 expert 1 up, layer 1 up.")
    assert check(theirs, made(), "different").only_in_b == expected


def test_missing_layer(made: Make, copied: Make) -> None:
    b = copied(layout="layers")
    shutil.rmtree(b / "_layer_0")
    found = check(made(), b, "different")
    assert found.only_in_a == [{"layer": 0}]
    said(found, "Only in A: layer 0.")


@pytest.mark.parametrize("number", range(3))
def test_comparing_a_truncated_shard(number: int, made: Make, copied: Make) -> None:
    b = copied()
    shard = sorted(b.glob("*.safetensors"))[number]
    with shard.open("r+b") as file:
        file.truncate(shard.stat().st_size - 1)
    found = check(made(), b, "different")
    said(found, f"B has the damaged file {shard.name}", "1 of its", "bytes are missing")
    assert not check(b, made(), "different").worst
    said(check(b, b, "different"), "A has the damaged", "B has the damaged")


def test_only_damaged_shards(made: Make, copied: Make) -> None:
    b = copied()
    for shard in b.glob("*.safetensors"):
        shard.write_bytes(b"")
    said(check(made(), b, "different"), "Only in A: layer 0, layer 1.")


def test_truncated_file_of_a_folder(made: Make, copied: Make) -> None:
    b = copied(layout="layers")
    place = open_packed(b).place(TensorId(0, "gate", 1, 0, "weight"))
    place.file.write_bytes(b"short")
    found = check(made(), b, "different")
    said(found, "has 5 bytes", "Layer 0, expert 1, gate cannot be compared: B has 5 bytes of blk")


def test_dangling_link(made: Make, copied: Make) -> None:
    """A file that cannot be read is a difference."""
    b = copied(layout="layers")
    file = open_packed(b).place(TensorId(0, "gate", 1, 0, "weight")).file
    file.unlink()
    file.symlink_to(b / "nowhere")
    name = file.relative_to(b).as_posix()
    said(check(made(), b, "different"), f"B has the damaged file {name}", "cannot be compared")


def test_twice_the_same_tensor(made: Make, copied: Make) -> None:
    b = copied()
    shutil.copy(sorted(b.glob("*.safetensors"))[0], b / "zz.safetensors")
    found = check(made(), b, "different")
    said(found, "and again in zz.safetensors")


# ---- other models ----------------------------------------------------------------------


def test_more_experts(made: Make, tmp_path: Path) -> None:
    """Those that both have are compared; here they are those of another draw."""
    source = write_model(tmp_path / "model", layers=LAYERS, experts=EXPERTS + 2, inner=INNER)
    convert(source, tmp_path / "b")
    found = check(made(), tmp_path / "b", "different")
    extra = [{"layer": layer, "expert": expert} for layer in (0, 1) for expert in (4, 5)]
    assert found.only_in_b == extra and found.matrices == MATRICES


def test_other_dimensions(made: Make, tmp_path: Path) -> None:
    source = write_model(tmp_path / "model", layers=LAYERS, experts=EXPERTS, inner=128)
    convert(source, tmp_path / "b")
    found = check(made(), tmp_path / "b", "different")
    said(found, "Layer 0 has other dimensions", "intermediate size 256 in A", "128 in B")
    assert found.matrices == 0


def test_unknown_format(made: Make, tmp_path: Path) -> None:
    """Only bytes can be compared, and they are."""

    def cut(tensors: dict[str, Raw]) -> None:
        for name in [name for name in tensors if name.endswith("weight") and "_exps" in name]:
            data = tensors[name].data[:-32]
            tensors[name] = Raw("I8", (len(data),), data)

    a, b = (rewrite(made(), tmp_path / name, cut) for name in "ab")
    said(check(a, b, "equal bytes"), "was compared as bytes where A has an unknown format")
    change(b, TensorId(0, "gate", 0, 0, "weight"), 0, 1)
    found = check(a, b, "different")
    said(found, "Layer 0, expert 0, gate: the bytes differ.")
    assert found.layers[0]["relative_rms_difference"] is None
    check(made(), b, "different")


def test_other_methods_of_the_same_sizes(made: Make, copied: Make) -> None:
    """MOE_INT4 orders its bytes in another way, so INT4 must not be read out of them."""
    b = copied(layout="layers")
    for path in list(b.glob("_layer_*/*/*.kt")):
        path.rename(path.with_name(f"MOE_{path.name}"))
    change(b, TensorId(0, "gate", 0, 0, "weight"), 0, 1)
    said(check(made(), b, "different"), "Layer 0, expert 0, gate: the bytes differ.")


def test_comparing_an_unfinished_output(made: Make, copied: Make) -> None:
    b = copied()
    (b / ".ktconv").mkdir()
    (b / ".ktconv" / "run.json").write_text("{}")
    said(check(made(), b, "equal bytes"), "B is incomplete")


def test_other_tensors(made: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ktconv.verify.compare.pairs.CHUNK_BYTES", 300)

    def edit(tensors: dict[str, Raw]) -> None:
        data = bytearray(tensors["embed_tokens.weight"].data)
        data[1001] ^= 1
        tensors["embed_tokens.weight"] = tensors["embed_tokens.weight"]._replace(data=bytes(data))
        tensors["new"] = tensors.pop("blk.0.mlp.gate.weight")
        router = tensors["blk.1.mlp.gate.weight"]
        tensors["blk.1.mlp.gate.weight"] = router._replace(dtype="F16")

    found = check(made(), rewrite(made(), tmp_path / "b", edit), "different")
    assert found.only_in_a == [{"tensor": "blk.0.mlp.gate.weight"}]
    assert found.only_in_b == [{"tensor": "new"}]
    assert found.other_tensors == 1 and not found.worst and not found.expected
    said(
        found,
        "Non-expert tensors only in B: new.",
        "blk.1.mlp.gate.weight is BF16 [4, 128] in A, F16 [4, 128] in B.",
        "embed_tokens.weight differs from its byte 1001 on.",
    )


# ---- sample, progress, refusals --------------------------------------------------------


class Watcher:
    """An observer that holds the comparison to the protocol."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self.sizes, self.open, self.finished = sizes, list[str](), list[str]()
        self.keys, self.nbytes = list[str](), 0

    def begin(self, keys: list[str]) -> None:
        self.keys = keys

    def advanced(self, source_bytes: int) -> None:
        self.nbytes += source_bytes

    def unit_started(self, key: str) -> None:
        assert key in self.keys and key not in self.open
        self.open.append(key)

    def unit_finished(self, key: str) -> None:
        assert key in self.open and key not in self.finished
        self.finished.append(key)


@pytest.mark.parametrize("sample", [1.0, 0.5])
def test_observer(sample: float, made: Make) -> None:
    pair = made(), made(method="int8")
    sizes = sizes_by_unit(make_plan(*pair, sample, 3).tasks)
    watcher = Watcher(sizes)
    check(*pair, "different", sample=sample, seed=3, observer=watcher)
    assert watcher.keys == watcher.finished == list(sizes)
    assert {"layer-00000", "layer-00001"} <= sizes.keys()
    assert watcher.nbytes == sum(sizes.values())


def experts_read(found: Comparison) -> list[tuple[int, int]]:
    return [(layer["layer"], one["expert"]) for layer in found.layers for one in layer["experts"]]


def test_comparing_a_sample(made: Make) -> None:
    pair = made(), made(method="int8")
    first = check(*pair, "different", sample=0.5, seed=1)
    assert first == check(*pair, "different", sample=0.5, seed=1, threads=1)
    assert first.matrices == MATRICES // 2
    assert [layer for layer, _ in experts_read(first)] == [0, 0, 1, 1]
    others = [experts_read(compare(*pair, sample=0.5, seed=seed)) for seed in range(2, 8)]
    assert any(other != experts_read(first) for other in others)
    assert compare(*pair, sample=1e-9).matrices == 3 * LAYERS
    assert compare(*pair, sample=1e-9).other_tensors == 0
    found = check(made(), made(), "equal bytes", sample=0.25)
    said(found, "equal bytes (of a sample of 25 %)")


def test_threads_change_nothing(made: Make) -> None:
    pair = made(), made(numa=2)
    assert compare(*pair, threads=1) == compare(*pair, threads=5)


@pytest.mark.parametrize("options", [{"sample": 0.0}, {"sample": 1.5}, {"threads": 0}])
def test_unusable_options(options: dict[str, Any], made: Make) -> None:
    with pytest.raises(UsageError):
        compare(made(), made(), **options)


def test_no_packed_weights(model: Path, made: Make, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no directory")
    for other in (model, tmp_path, tmp_path / "nothing", tmp_path / "file"):
        for pair in ((made(), other), (other, made())):
            with pytest.raises(UsageError, match=r"contains no packed experts|is not a directory"):
                compare(*pair)
            with pytest.raises(UsageError):
                make_plan(*pair, 1.0, 0)


# ---- side files ------------------------------------------------------------------------------


@pytest.fixture
def twins(made: Make, tmp_path: Path) -> tuple[Path, Path]:
    """Two equal conversions; the second may be changed."""
    shutil.copytree(made(), tmp_path / "twin")
    return made(), tmp_path / "twin"


def test_equal_side_files_are_counted(twins: tuple[Path, Path]) -> None:
    found = compare(*twins)
    assert found.verdict == "equal bytes"
    assert found.side_files == found.as_dict()["side_files"] == 2  # config.json, tokenizer.json
    assert "2 side files compared" in found.lines()[0]


def test_another_config_and_no_tokenizer(twins: tuple[Path, Path]) -> None:
    a, b = twins
    (b / "tokenizer.json").unlink()
    config = json.loads((b / "config.json").read_text()) | {"num_experts_per_tok": 3}
    (b / "config.json").write_text(json.dumps(config))
    said(check(a, b, "different"), "Only A has tokenizer.json.", "num_experts_per_tok is")
    said(check(b, a, "different"), "Only B has tokenizer.json.", "in B")


@pytest.mark.parametrize(
    ("name", "text"),
    [("tokenizer.json", '{"model": 5}'), ("modeling.py", "pass"), ("special.json", "{}")],
)
def test_a_side_file_that_differs(name: str, text: str, twins: tuple[Path, Path]) -> None:
    (twins[1] / name).write_text(text)
    said(check(*twins, "different"), name)


def test_a_side_file_that_cannot_be_read(twins: tuple[Path, Path]) -> None:
    (twins[1] / "tokenizer.json").unlink()
    (twins[1] / "tokenizer.json").symlink_to("nowhere")
    said(check(*twins, "different"), "tokenizer.json cannot be compared", "broken link")


def test_side_files_that_say_the_same(twins: tuple[Path, Path]) -> None:
    """Not equal bytes, but nothing that a model would notice."""
    config = twins[1] / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()), indent=9))
    (twins[1] / "LICENSE").write_text("MIT")
    found = compare(*twins)
    assert found.verdict == "equal weights"
    assert any("config.json" in note for note in found.notes)
    assert any("Only B has LICENSE." in note for note in found.notes)


def test_one_side_without_any_side_file(twins: tuple[Path, Path]) -> None:
    """As other converters leave their layer folders."""
    for name in ("config.json", "tokenizer.json"):
        (twins[1] / name).unlink()
    found = compare(*twins)
    assert found.equal
    assert "Only A has side files (2 files), B none." in found.notes


def test_one_output_twice(made: Make, tmp_path: Path) -> None:
    """It would be compared with itself, and be equal whatever is wrong."""
    output = made()
    (tmp_path / "link").symlink_to(output)
    for other in (output, tmp_path / "link"):
        refused(ktconv("verify", output, other), 2, "is given twice")


def test_what_has_no_packed_experts_is_named(model: Path, made: Make) -> None:
    with pytest.raises(UsageError, match=r"and no ktconv\.json: it is a model, or an output in"):
        compare(made(), model)
