"""A weight format with group scales becomes an output by one row of the table: every command
works on it, and nothing else changes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from helpers import reference, with_format
from helpers.convert import all_files, convert, read_model, source_matrices
from helpers.corrupt import check, forget_manifest, found, overwrite, place_of
from helpers.paths import EXAMPLE
from helpers.reference import Choice, packing

from ktconv.errors import CheckpointError
from ktconv.formats import FORMATS, Format, parse_tensor_name, split
from ktconv.formats.groups import pack_scale, unpacked_nibbles
from ktconv.inspect.inspection import inspect_path
from ktconv.merge import Request as MergeRequest
from ktconv.merge import merge
from ktconv.reshard import Request as ReshardRequest
from ktconv.reshard import reshard

pytestmark = [pytest.mark.slow, pytest.mark.process]

rows = pytest.mark.parametrize("row", with_format.ROWS.values(), ids=lambda row: row.key)


@pytest.fixture(autouse=True)
def table(monkeypatch: pytest.MonkeyPatch) -> None:
    for key, row in with_format.ROWS.items():
        monkeypatch.setitem(FORMATS, key, row)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Outputs of the example by format, parts and layout, each made when it is first asked for."""
    found: dict[tuple[str, int, str], Path] = {}

    def get(row: Format, numa: int = 2, layout: str = "safetensors") -> Path:
        key = row.key, numa, layout
        if key not in found:
            found[key] = tmp_path_factory.mktemp("made") / "out"
            convert(EXAMPLE, found[key], method=row.key, numa=numa, layout=layout)
        return found[key]

    return get


def weights_of(directory: Path) -> dict[str, bytes]:
    """The shards, whose other files say by which command they were made."""
    return {name: data for name, data in all_files(directory).items() if "safetensors" in name}


@rows
def test_converted_tensors_are_those_of_the_specification(
    row: Format, made: Callable[..., Path]
) -> None:
    sources, seen = source_matrices(EXAMPLE), 0
    for name, tensor in read_model(made(row)).items():
        key = parse_tensor_name(name)
        if key is None:
            continue
        whole = sources[key.layer, key.expert, key.proj]  # type: ignore[index]
        hidden, intermediate = whole.shape[::-1] if key.proj != "down" else whole.shape
        here = split(key.proj, hidden, intermediate, key.part, 2)
        codes, scale = reference.quantize(
            row, np.ascontiguousarray(whole[here.index]), Choice("search")
        )
        if key.kind == "scale":
            shape = len(scale) // 32, here.shape[1] // 32, 32
            assert (tensor.dtype, tensor.shape) == (row.scale_dtype.upper(), shape)
            assert tensor.data == pack_scale(scale).tobytes()
        else:
            assert tensor.data == packing.gint4(unpacked_nibbles(codes)).tobytes()
        seen += 1
    assert seen == 2 * 8 * 3 * 2 * 2


@rows
@pytest.mark.parametrize("layout", ["safetensors", "layers"])
def test_inspect_and_verify(row: Format, layout: str, made: Callable[..., Path]) -> None:
    out = made(row, layout=layout)
    about = inspect_path(str(out))
    assert about["complete"] and about["method"] == row.name
    assert (about["hidden_size"], about["intermediate_size"], about["numa_parts"]) == (
        [128],
        [256],
        [2],
    )
    for level in ("structure", "weights"):
        result = check(out, EXAMPLE, level)
        assert result.passed, result.failures


@rows
def test_damage_is_found(row: Format, made: Callable[..., Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(made(row), out)
    code, scale = (f"blk.0.ffn_down_exps.1.numa.1.{kind}" for kind in ("weight", "scale"))
    place = place_of(out, code)
    overwrite(place, bytes([place.file.read_bytes()[place.offset + 5] ^ 0x77]), 5)
    forget_manifest(out)
    failures = found(check(out, EXAMPLE, "weights"), "weights", "element")
    assert failures[0]["tensor"] == code and failures[0]["row"] < 128 <= failures[0]["column"]
    place = place_of(out, scale)
    overwrite(place, bytes([place.file.read_bytes()[place.offset] ^ 1]))
    failures = found(check(out, EXAMPLE, "weights"), "weights", "scale")
    assert (
        "at row 0, group 0, but the search for the smallest error gives" in failures[0]["message"]
    )


@rows
def test_merge_and_reshard_give_the_bytes_of_a_conversion(
    row: Format, made: Callable[..., Path], tmp_path: Path
) -> None:
    shards, folders, one = made(row), made(row, layout="layers"), made(row, numa=1)
    merge(MergeRequest(folders, tmp_path / "merged", source=str(EXAMPLE), threads=1))
    assert weights_of(tmp_path / "merged") == weights_of(shards)
    for numa, given, expected in ((1, shards, one), (2, one, shards)):
        cut = tmp_path / f"cut-{numa}"
        reshard(ReshardRequest(given, cut, numa=numa, threads=1))
        assert weights_of(cut) == weights_of(expected)
        assert check(cut, EXAMPLE, "weights").passed


def test_folders_without_a_manifest_do_not_say_their_dimensions(tmp_path: Path) -> None:
    convert(EXAMPLE, tmp_path / "folders", method="g32-f32", layout="layers")
    (tmp_path / "folders" / "ktconv.json").unlink()
    with pytest.raises(CheckpointError, match="file sizes do not give the dimensions"):
        merge(MergeRequest(tmp_path / "folders", tmp_path / "out"))


def test_the_kernels_compute_what_was_converted(made: Callable[..., Path]) -> None:
    """Level layers needs transformers; this needs only the output."""
    from ktconv.formats.decode import bf16_to_f32, f32_to_bf16
    from ktconv.runtime.layers import open_experts
    from ktconv.system.pool import Pool

    experts = open_experts(made(FORMATS["g32-bf16"]))
    rng = np.random.default_rng(1)
    x = f32_to_bf16(rng.standard_normal((5, 128), np.float32))
    ids = np.argsort(rng.random((5, 8)), axis=1)[:, :2].astype(np.int32)
    weights = rng.random((5, 2), np.float32)
    with Pool(1) as pool:
        y = bf16_to_f32(experts.forward(x, ids, weights, pool))
    expected = experts.reference(x, ids, weights)
    assert np.linalg.norm(y - expected) <= experts.format.tolerance * np.linalg.norm(expected)


def test_the_command_line_offers_it(tmp_path: Path) -> None:
    command = [sys.executable, with_format.__file__, "quantize-cpu", str(EXAMPLE), str(tmp_path)]
    shown = subprocess.run(
        [*command, "--method", "g32-f32", "--dry-run", "--json"],
        capture_output=True,
        text=True,
        env=os.environ,
        check=False,
    )
    assert shown.returncode == 0, shown.stderr
    assert '"method": "g32-f32"' in shown.stdout
    refused = subprocess.run(
        [*command, "--method", "gint4-99"], capture_output=True, text=True, check=False
    )
    assert refused.returncode == 2 and "g32-bf16" in refused.stderr
