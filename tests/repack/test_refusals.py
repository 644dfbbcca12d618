"""Folders that are not one complete conversion: each kind is named, and nothing is written."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.cli import write_model
from helpers.convert import convert

from ktconv.errors import CheckpointError
from ktconv.merge import Request, merge
from ktconv.verify import VerifyRequest, verify

Made = Callable[[str, int], Path]
Backward = Callable[[Path, str, int], dict[str, bytes]]


def refused(root: Path, phrase: str, source: Path | None = None) -> None:
    """The merge is refused in one sentence with a way out, and leaves no trace."""
    output = root.parent / "never"
    with pytest.raises(CheckpointError, match=phrase) as caught:
        merge(Request(root, output, str(source) if source else None))
    assert caught.value.hint and "\n" not in str(caught.value)
    assert not output.exists()


def one(root: Path, pattern: str) -> Path:
    (path,) = root.glob(pattern)
    return path


# ---- gaps ------------------------------------------------------------------------------


def test_layer_missing_in_between(foreign: Made) -> None:
    root = foreign("int4", 1)
    shutil.rmtree(root / "_layer_1")
    refused(root, r"does not contain layer 1 between 0 and 2")


def test_layer_missing_at_the_end_by_the_manifest(folders: Made) -> None:
    root = folders("int4", 1)
    shutil.rmtree(root / "_layer_2")
    refused(root, r"does not contain layer 2 of .*ktconv\.json")


def test_layer_missing_at_the_end_by_the_source(foreign: Made, model: Path) -> None:
    root = foreign("int4", 1)
    shutil.rmtree(root / "_layer_2")
    refused(root, r"does not contain layer 2 of .*model", model)


def test_a_layer_too_many_by_the_source(foreign: Made, model: Path) -> None:
    root = foreign("int4", 1)
    (root / "_layer_2").rename(root / "_layer_3")
    shutil.copytree(root / "_layer_3", root / "_layer_2")
    refused(root, r"has layer 3, and .*model has not", model)


def test_a_gap_that_the_config_explains(foreign: Made, tmp_path: Path) -> None:
    root = foreign("int4", 1)
    shutil.rmtree(root / "_layer_1")
    (root / "config.json").write_text('{"moe_layers": [0, 2]}')
    assert merge(Request(root, tmp_path / "out")).complete


@pytest.mark.parametrize(
    ("lost", "changes", "phrase"),
    [
        (
            "_layer_2",
            {"first_k_dense_replace": 0},
            r"does not contain layer 2 of the config\.json",
        ),
        ("_layer_*/_numa_1", {}, "has an intermediate size of .* but config.json says"),
        ("nothing", {"hidden_size": 512}, "has a hidden size of .* but config.json says"),
        ("nothing", {"num_experts": 99}, "has a number of experts of .* num_experts 99"),
    ],
)
def test_a_config_beside_the_folders_tells(
    lost: str, changes: dict[str, int], phrase: str, foreign: Made, model: Path
) -> None:
    root = foreign("int4", 2)
    config = json.loads((model / "config.json").read_text()) | changes
    (root / "config.json").write_text(json.dumps(config))
    for path in root.glob(lost):
        shutil.rmtree(path)
    refused(root, phrase)


def test_denormal_scale(foreign: Made) -> None:
    """No rule makes one: the kernels take it for zero."""
    root = foreign("int4", 1)
    path = one(root, "_layer_0/_numa_0/*_gate_0_*scale*")
    data = bytearray(path.read_bytes())
    data[:4] = b"\x01\x00\x00\x00"
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="denormal"):
        merge(Request(root, root.parent / "never"))


def test_merged_without_config(foreign: Made, model: Path, tmp_path: Path) -> None:
    """Nothing had one: that is no failure of the merge."""
    merge(Request(foreign("int4", 1), tmp_path / "out"))
    result = verify(VerifyRequest(tmp_path / "out", str(model), "weights"))
    assert result.passed, result.failures
    assert any("has no config.json" in note for note in result.facts["notes"])


def test_expert_missing(foreign: Made) -> None:
    root = foreign("int4", 2)
    for file in root.glob("_layer_1/*/INT4_*_2_*"):
        file.unlink()
    refused(
        root,
        r"does not contain _layer_1/_numa_0/INT4_gate_2_.* and 11 more files, of expert 2",
    )


def test_last_expert_missing_in_one_layer(foreign: Made, model: Path) -> None:
    root = foreign("int4", 1)
    for file in root.glob("_layer_1/*/INT4_*_3_*"):
        file.unlink()
    refused(root, "layers that differ.*_layer_1 3 experts")
    refused(root, "_layer_1 contains 3 experts.* has 4 experts", model)


def test_one_file_missing(foreign: Made) -> None:
    root = foreign("int8", 2)
    one(root, "_layer_0/_numa_1/INT8_up_1_*_scale_.kt").unlink()
    refused(root, r"does not contain _layer_0/_numa_1/INT8_up_1_1024Byte_scale_\.kt, of expert 1")


def test_part_missing(foreign: Made) -> None:
    root = foreign("int4", 4)
    shutil.rmtree(root / "_layer_1" / "_numa_1")
    refused(root, "_layer_1 has _numa_3 but no _numa_1")


def test_backward_in_some_layers_only(foreign: Made, add_backward: Backward) -> None:
    root = foreign("int4", 1)
    add_backward(root, "int4", 1)
    for file in root.glob("_layer_1/*/*_bwd_*"):
        file.unlink()
    refused(root, "_layer_1 has no backward matrices")


def test_backward_file_missing(foreign: Made, add_backward: Backward) -> None:
    root = foreign("int4", 1)
    add_backward(root, "int4", 1)
    one(root, "_layer_1/_numa_0/INT4_down_bwd_1_*_quant_.kt").unlink()
    refused(root, "does not contain _layer_1/_numa_0/INT4_down_bwd_1_")


# ---- what another conversion left ------------------------------------------------------


@pytest.mark.parametrize(("first", "then"), [(1, 2), (2, 1)])
def test_two_numbers_of_parts_in_one_tree(
    kept_folders: Made, foreign: Made, first: int, then: int
) -> None:
    root = foreign("int4", first)
    shutil.copytree(kept_folders("int4", then), root, dirs_exist_ok=True)
    (root / "ktconv.json").unlink()
    refused(root, "contains one tensor twice: .*Byte_quant_.kt and .*left over")


def test_ghost_part_of_another_width(kept_folders: Made, foreign: Made) -> None:
    root = foreign("int4", 1)
    for layer in range(3):
        ghost = kept_folders("int4", 2) / f"_layer_{layer}" / "_numa_1"
        shutil.copytree(ghost, root / f"_layer_{layer}" / "_numa_1")
    refused(
        root, "_layer_0/_numa_1 is inconsistent: its parts have 256 rows, those of _numa_0 have 512"
    )


def test_empty_ghost_part(foreign: Made) -> None:
    root = foreign("int4", 1)
    (root / "_layer_1" / "_numa_1").mkdir()
    (root / "_layer_1" / "_numa_1" / ".DS_Store").touch()
    refused(root, "_layer_1/_numa_1 contains no")


def test_ghost_part_by_the_manifest(folders: Made) -> None:
    root = folders("int4", 1)
    for layer in range(3):
        numa = root / f"_layer_{layer}"
        shutil.copytree(numa / "_numa_0", numa / "_numa_1")
    refused(root, r"contains INT4 in 2 parts, but .* says INT4 in 1")


def test_ghost_part_by_the_source(foreign: Made, model: Path) -> None:
    root = foreign("int4", 1)
    for layer in range(3):
        numa = root / f"_layer_{layer}"
        shutil.copytree(numa / "_numa_0", numa / "_numa_1")
    refused(root, "intermediate size 1024, but .* intermediate size 512", model)


def test_mixed_methods_in_a_layer(kept_folders: Made, foreign: Made) -> None:
    root = foreign("int4", 1)
    shutil.copytree(kept_folders("int8", 1), root, dirs_exist_ok=True)
    (root / "ktconv.json").unlink()
    refused(root, "mixes methods: _layer_0/.*INT4.* and _layer_0/.*INT8")


def test_mixed_methods_between_layers(kept_folders: Made, foreign: Made) -> None:
    root = foreign("int4", 1)
    shutil.rmtree(root / "_layer_1")
    shutil.copytree(kept_folders("int8", 1) / "_layer_1", root / "_layer_1")
    refused(root, "mixes methods: _layer_0 is INT4, _layer_1 is INT8")


def test_mixed_parts_between_layers(kept_folders: Made, foreign: Made) -> None:
    root = foreign("int4", 1)
    shutil.rmtree(root / "_layer_1")
    shutil.copytree(kept_folders("int4", 2) / "_layer_1", root / "_layer_1")
    refused(root, "mixes numbers of NUMA parts: _layer_0 has 1, _layer_1 has 2")


def test_layer_of_another_size(foreign: Made, tmp_path: Path) -> None:
    root = foreign("int4", 1)
    shutil.rmtree(root / "_layer_1")
    other = write_model(tmp_path / "other", layers=2, inner=256)
    convert(other, tmp_path / "small", layout="layers")
    shutil.copytree(tmp_path / "small" / "_layer_1", root / "_layer_1")
    refused(root, "layers that differ.*intermediate size 512.*_layer_1.*intermediate size 256")


def test_file_of_another_size(foreign: Made) -> None:
    root = foreign("int4", 1)
    file = one(root, "_layer_2/_numa_0/INT4_gate_1_*_quant_.kt")
    file.unlink()
    file.with_name("INT4_gate_1_128Byte_quant_.kt").write_bytes(bytes(128))
    refused(root, "INT4_gate_1_128Byte_quant_.kt has the size of another model .*32768 bytes")


def test_sizes_of_no_layer(foreign: Made) -> None:
    root = foreign("int4", 1)
    for file in root.glob("_layer_*/_numa_0/INT4_gate_*_scale_.kt"):
        file.write_bytes(bytes(400))
        file.rename(file.with_name(file.name.replace("2048Byte", "400Byte")))
    refused(root, "sizes of no INT4 layer: intermediate size 100")


@pytest.mark.parametrize("size", [0, 100, 40_000])
def test_wrong_file_size(foreign: Made, size: int) -> None:
    root = foreign("int4", 1)
    one(root, "_layer_2/_numa_0/INT4_gate_1_*_quant_.kt").write_bytes(bytes(size))
    refused(root, f"INT4_gate_1_.* has {size} bytes, but its name says 32768")


@pytest.mark.parametrize("kind", ["folder", "link"])
def test_no_file(foreign: Made, kind: str) -> None:
    root = foreign("int4", 1)
    file = one(root, "_layer_2/_numa_0/INT4_gate_1_*_quant_.kt")
    file.unlink()
    file.mkdir() if kind == "folder" else file.symlink_to("nothing")
    refused(root, r"INT4_gate_1_32768Byte_quant_\.kt is not a regular file, or a broken link")


def test_repacking_follows_links(foreign: Made, tmp_path: Path) -> None:
    root = foreign("int4", 1)
    (root / "_layer_1").rename(tmp_path / "elsewhere")
    (root / "_layer_1").symlink_to(tmp_path / "elsewhere")
    assert merge(Request(root, tmp_path / "out")).complete


def test_private_method(foreign: Made) -> None:
    root = foreign("int4", 1)
    for file in root.rglob("INT4_*.kt"):
        file.rename(file.with_name("MOE_" + file.name))
    refused(root, "method MOE_INT4, whose layout is specific")


@pytest.mark.parametrize(
    "name",
    [
        "_layer_1/_numa_0/INT4_gate_0_32768Byte_quant_.kt.tmp",
        "_layer_1/_numa_0/INT4_gate_00_32768Byte_quant_.kt",
        "_layer_1/_numa_00/x",
        "_layer_1/notes.txt",
        "_layer_01/_numa_0/x",
    ],
)
def test_foreign_names(foreign: Made, name: str) -> None:
    root = foreign("int4", 1)
    (root / name).parent.mkdir(exist_ok=True, parents=True)
    (root / name).touch()
    refused(root, "is not named like|neither a NUMA folder|is not a layer folder")


# ---- what is no tree at all ------------------------------------------------------------


def test_no_folders(shards: Made, tmp_path: Path) -> None:
    refused(tmp_path / "nothing", "is not a directory")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "contains no _layer_")
    shutil.copytree(shards("int4", 1), tmp_path / "shards")
    refused(tmp_path / "shards", "contains no _layer_\\* folder, but shards")


def test_unfinished_folders(folders: Made) -> None:
    root = folders("int4", 1)
    (root / ".ktconv").mkdir()
    (root / ".ktconv" / "run.json").write_text("{}")
    refused(root, "is not finished")
