"""What ktconv.json, the index, the card and the copied files say, held against the files."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blake3 import blake3
from helpers import reference
from helpers.convert import (
    all_files,
    assert_same,
    convert,
    matrices_of,
    read_header,
    read_json,
    read_model,
    truths,
)
from helpers.families import (
    Tensor,
    Weights,
    bf16,
    numbered,
    random_weights,
    simple_config,
    write_checkpoint,
)
from msgspec.structs import replace

import ktconv
from ktconv.formats import FORMATS, tensor_name
from ktconv.targets.packed.target import (
    CalibrationRecord,
    ImportanceRecord,
    Options,
    options_of_record,
)

SOURCE = "model.layers.{}.mlp.experts"
SIDECARS = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "preprocessor_config.json",
    "modeling_custom.py",
    "additional_chat_templates/rag.jinja",
    "LICENSE",
)


@pytest.fixture(scope="module")
def weights() -> dict[int, Weights]:
    """Two layers; some rows are zero, some mostly small."""
    layers = {index: random_weights(128, 256, 2, seed=index) for index in range(2)}
    layers[0].gate[0, 3] = 0
    layers[0].down[1, 5, 1:] = 0
    layers[1].up[1] *= np.float32(2.0**-60)
    return layers


@pytest.fixture(scope="module")
def model(weights: dict[int, Weights], tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("manifest") / "model"
    tensors: dict[str, Tensor] = {
        "model.norm.weight": bf16(np.ones(128)),
        "lm_head.weight": bf16(np.ones((9, 128))),
    }
    for index, layer in weights.items():
        tensors |= numbered(SOURCE.format(index), layer)
    config = simple_config(num_experts=2, moe_intermediate_size=256, num_hidden_layers=2)
    write_checkpoint(directory, tensors, config, shards=3)
    (directory / "additional_chat_templates").mkdir()
    for name in SIDECARS:
        (directory / name).write_text(f"content of {name}\n")
    return directory


@pytest.fixture(scope="module", params=["int4", "int8"])
def converted(
    request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path]:
    """(method, output) with two parts."""
    output = tmp_path_factory.mktemp("converted") / "out"
    convert(model, output, method=request.param, numa=2)
    return request.param, output


def tensors_of(manifest: dict[str, Any]) -> dict[str, Any]:
    return {
        name: about
        for unit in manifest["units"].values()
        for name, about in unit["tensors"].items()
    }


def test_checksums(converted: tuple[str, Path]) -> None:
    """BLAKE3 of exactly the bytes of each tensor, whatever the tensor is."""
    _, output = converted
    found = {
        name: about["blake3"]
        for name, about in tensors_of(read_json(output / "ktconv.json")).items()
    }
    expected = {
        name: blake3(tensor.data).hexdigest() for name, tensor in read_model(output).items()
    }
    assert_same(found, expected)


def test_errors(converted: tuple[str, Path], weights: dict[int, Weights]) -> None:
    """The three numbers of each tensor, from the values in binary64."""
    method, output = converted
    fmt = FORMATS[method]
    about = tensors_of(read_json(output / "ktconv.json"))
    for (layer, expert, proj, part), truth in truths(matrices_of(weights), method, 2).items():
        source = truth.source.astype(np.float64)
        restored = reference.dequantize(fmt, truth.codes, truth.scale).astype(np.float64)
        off = np.abs(restored - source)
        step = truth.scale.astype(np.float64) * fmt.traits.scale_units
        has_scale = step > 0
        reach = fmt.traits.max_level * step[:, None]  # steps are of the source cut to the levels
        steps = np.abs(np.clip(source, -reach, reach) - restored)[has_scale]
        steps /= step[has_scale, None]
        found = about[tensor_name(layer, proj, expert, part, "weight")]
        rms = np.sqrt((off**2).sum() / (source**2).sum())
        assert found["relative_rms_error"] == pytest.approx(rms, rel=6e-4)
        assert found["max_error_steps"] == pytest.approx(steps.max(), rel=6e-4)
        assert found["zero_share"] == pytest.approx((truth.codes == 0).mean(), rel=6e-4)
        assert found["max_error_steps"] <= fmt.error_steps("search") + 1e-4


def test_files(converted: tuple[str, Path]) -> None:
    """Each unit's files with size and the hash of their header."""
    _, output = converted
    units = read_json(output / "ktconv.json")["units"]
    assert list(units) == ["layer-00000", "layer-00001", "other-00001"]
    files = [file for unit in units.values() for file in unit["files"]]
    assert {file["name"] for file in files} == {p.name for p in output.glob("*.safetensors")}
    for file in files:
        data = (output / file["name"]).read_bytes()
        start, _ = read_header(output / file["name"])
        assert file["bytes"] == len(data)
        assert file["header_sha256"] == hashlib.sha256(data[:start]).hexdigest()


def test_identity(converted: tuple[str, Path], model: Path) -> None:
    """Version, options, source and geometry: all that decides the bytes."""
    method, output = converted
    manifest = read_json(output / "ktconv.json")
    assert manifest["schema"] == 1
    assert manifest["ktconv_version"] == ktconv.__version__
    assert manifest["options"] == {
        "method": method,
        "numa": 2,
        "layout": "safetensors",
        "scale": "search",
        "search": 2,
        "compat": False,
        "mtp": True,
        "experts_only": False,
        "max_shard_size": 5_000_000_000,
    }
    files = manifest["source"]["files"]
    assert (
        files["config.json"]["sha256"]
        == hashlib.sha256((model / "config.json").read_bytes()).hexdigest()
    )
    for shard in model.glob("*.safetensors"):
        assert files[shard.name]["bytes"] == shard.stat().st_size
    assert manifest["geometry"]["layers"]["1"] == {
        "experts": 2,
        "hidden_size": 128,
        "intermediate_size": 256,
        "encoding": "bf16",
        "mtp": False,
        "source": "model.layers.1.mlp.experts",
    }


def test_no_timestamp(model: Path, converted: tuple[str, Path], tmp_path: Path) -> None:
    """Another directory, another second, more threads, no reading back: the same files."""
    method, output = converted
    time.sleep(max(0.0, 1.1 - (time.time() - (output / "ktconv.json").stat().st_mtime)))
    again = tmp_path / "somewhere" / "else"
    os.environ["TZ"], before = "UTC+5", os.environ.get("TZ")
    try:
        convert(model, again, method=method, numa=2, threads=3, verify=False)
    finally:
        os.environ.pop("TZ")
        os.environ |= {"TZ": before} if before else {}
    assert_same(all_files(output), all_files(again))


def test_index_is_loadable(converted: tuple[str, Path]) -> None:
    """The safetensors library finds each tensor where the index says."""
    from safetensors import safe_open

    _, output = converted
    weight_map = read_json(output / "model.safetensors.index.json")["weight_map"]
    found = {}
    for shard in sorted(set(weight_map.values())):
        with safe_open(output / shard, framework="numpy") as file:
            assert file.metadata()["ktconv_numa"] == "2"
            found.update(dict.fromkeys(file.keys(), shard))
    assert found == weight_map
    shards = list(weight_map.values())  # shard after shard: it is written in one pass
    assert shards == sorted(shards)


def test_side_files(converted: tuple[str, Path], model: Path) -> None:
    """config.json and everything around the weights, unchanged; nothing else appears."""
    _, output = converted
    copied = {"config.json", *SIDECARS}
    for name in copied:
        assert (output / name).read_bytes() == (model / name).read_bytes(), name
    written = {path.relative_to(output).as_posix() for path in output.rglob("*") if path.is_file()}
    shards = {path.name for path in output.glob("*.safetensors")}
    assert written - shards == copied | {"README.md", "ktconv.json", "model.safetensors.index.json"}


def test_card_names_a_command_that_gives_the_same(
    model: Path, tmp_path: Path, converted: tuple[str, Path]
) -> None:
    from click.testing import CliRunner

    from ktconv.cli.app import app

    _, output = converted
    card = (output / "README.md").read_text()
    [line] = [line.strip() for line in card.splitlines() if "ktconv quantize-cpu" in line]
    words = shlex.split(line)
    assert words[:2] == ["ktconv", "quantize-cpu"]
    assert words[2:4] == [model.name, "OUTPUT"]
    arguments = ["quantize-cpu", str(model), str(tmp_path / "out"), *words[4:]]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    assert_same(all_files(output), all_files(tmp_path / "out"))


@pytest.mark.parametrize(
    "options", [{"layout": "layers"}, {"experts_only": True}, {"compat": True}, {"mtp": False}]
)
def test_card_repeats_options(options: dict[str, Any], model: Path, tmp_path: Path) -> None:
    from click.testing import CliRunner

    from ktconv.cli.app import app

    convert(model, tmp_path / "a", **options)
    card = (tmp_path / "a" / "README.md").read_text()
    [line] = [line.strip() for line in card.splitlines() if "ktconv quantize-cpu" in line]
    arguments = ["quantize-cpu", str(model), str(tmp_path / "b"), *shlex.split(line)[4:]]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    assert_same(all_files(tmp_path / "a"), all_files(tmp_path / "b"))


def test_card_front_matter(converted: tuple[str, Path]) -> None:
    method, output = converted
    card = (output / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: ktransformers\npipeline_tag: text-generation\n")
    assert f"- {method}\n" in card


def test_manifest_of_layer_folders(model: Path, tmp_path: Path) -> None:
    """Files by path and size; the checksums are of the same tensors as in shards."""
    convert(model, tmp_path / "folders", layout="layers", numa=2)
    convert(model, tmp_path / "shards", experts_only=True, numa=2)
    folders = read_json(tmp_path / "folders" / "ktconv.json")
    shards = read_json(tmp_path / "shards" / "ktconv.json")
    assert tensors_of(folders) == tensors_of(shards)
    for unit in folders["units"].values():
        for file in unit["files"]:
            assert (tmp_path / "folders" / file["name"]).stat().st_size == file["bytes"]
    assert not (tmp_path / "folders" / "model.safetensors.index.json").exists()


def test_manifest_is_strict_json(converted: tuple[str, Path]) -> None:
    """No NaN or Infinity, which Python would write and others refuse."""

    def refuse(word: str) -> None:
        raise AssertionError(word)

    _, output = converted
    json.loads((output / "ktconv.json").read_text(), parse_constant=refuse)


def test_model_in_the_cache_of_the_hub(model: Path, tmp_path: Path) -> None:
    """Symlinks to blobs are followed; the output holds files, and the card the hub's name."""
    snapshot = tmp_path / "models--org--some-moe" / "snapshots" / "0123abc"
    blobs = tmp_path / "models--org--some-moe" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, path in enumerate(path for path in model.iterdir() if path.is_file()):
        (blobs / str(number)).write_bytes(path.read_bytes())
        (snapshot / path.name).symlink_to(Path("..", "..", "blobs", str(number)))
    convert(snapshot, tmp_path / "out")
    assert not any(path.is_symlink() for path in (tmp_path / "out").iterdir())
    assert "\nbase_model: org/some-moe\n" in (tmp_path / "out" / "README.md").read_text()
    convert(model, tmp_path / "plain")
    assert read_model(tmp_path / "out") == read_model(tmp_path / "plain")


def test_model_in_the_current_directory(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`ktconv quantize-cpu . OUTPUT` names the model as its absolute path would."""
    convert(model, tmp_path / "plain")
    monkeypatch.chdir(model)
    convert(Path(), tmp_path / "out")
    assert_same(all_files(tmp_path / "out"), all_files(tmp_path / "plain"))


def test_the_rule_of_a_record() -> None:
    """Without one it is the only rule that there was; --compat has no other."""
    record = Options(scale="search").as_dict()
    del record["scale"]
    assert options_of_record(record) == Options(scale="amax")
    assert options_of_record({**record, "scale": ""}) is None
    assert options_of_record({**record, "scale": "search", "compat": True}) is None
    assert options_of_record({**record, "scale": "amax", "compat": True}) == Options(compat=True)


def test_the_revision_of_a_record() -> None:
    """Without one it is the first, which is not recorded; one that is not known is no record."""
    record = Options().as_dict()
    assert record["search"] == 2 and Options().rule == "search"
    first = {name: value for name, value in record.items() if name != "search"}
    assert options_of_record(first) == Options(search=1)
    assert Options(search=1).as_dict() == first and Options(search=1).rule == "search-1"
    for unknown in (0, 3, "2", True, None):
        assert options_of_record({**record, "search": unknown}) is None
    amax = Options(scale="amax")
    assert "search" not in amax.as_dict() and amax.rule == "amax" and amax.search == 0
    assert replace(Options(), scale="amax") == amax


def test_a_record_of_options_that_exclude_one_another() -> None:
    importance, calibrate = (
        dict.fromkeys(kind.__struct_fields__, "x") for kind in (ImportanceRecord, CalibrationRecord)
    )
    search, compat = (Options(scale="search").as_dict(), Options(compat=True).as_dict())
    for one in ({"importance": importance}, {"calibrate": calibrate}, {"fold": "up-down"}):
        assert options_of_record({**search, **one}) is not None
    assert options_of_record({**search, "fold": "up-down", "calibrate": calibrate}) is not None
    for record in (
        {**search, "importance": importance, "calibrate": calibrate},
        {**compat, "fold": "up-down"},
    ):
        assert options_of_record(record) is None
