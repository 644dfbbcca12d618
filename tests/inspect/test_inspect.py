"""`ktconv inspect`: sources, finished, unfinished, foreign and damaged outputs."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from helpers.cli import ktconv
from helpers.convert import Converted, convert
from helpers.families import (
    family,
    numbered,
    random_weights,
    simple_config,
    write_checkpoint,
    write_family,
)
from helpers.paths import EXAMPLE

from ktconv.cli.app import app
from ktconv.errors import CheckpointError, KtconvError, OutputError
from ktconv.inspect.inspection import inspect_path
from ktconv.source import PROJECTIONS
from ktconv.writer.journal import Journal, parse_record

pytestmark = pytest.mark.slow

LAYER_0 = "model-00001-of-00003.safetensors"


@pytest.fixture
def finished(converted_example: Converted) -> Callable[[str], Path]:
    """The example converted with two parts, by layout; not to be changed."""
    return lambda layout: converted_example(layout=layout, numa=2)


@pytest.fixture
def output(finished: Callable[[str], Path], tmp_path: Path) -> Callable[[str], Path]:
    """A copy of it that a test may break."""

    def copy(layout: str) -> Path:
        shutil.copytree(finished(layout), tmp_path / layout)
        return tmp_path / layout

    return copy


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "qwen3_5_moe", "deepseek_v3"])
def test_inspect_shows_the_geometry_of_a_family(name: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    write_family(name, tmp_path)
    facts = inspect_path(str(tmp_path))
    expected = family(name)
    config = json.loads((tmp_path / "config.json").read_text())
    assert facts["kind"] == "checkpoint"
    assert facts["family"] == config["model_type"]
    assert facts["experts"] == [4]
    assert facts["hidden_size"] == [128]
    assert facts["intermediate_size"] == [expected.intermediate]
    assert facts["encodings"] == ["bf16"]
    first, last = expected.layers[0], expected.layers[-1]
    assert facts["moe_layers"] == (f"{first}-{last}" if first < last else f"{first}")
    assert facts["mtp_layers"] == ("3" if name == "deepseek_v3" else "none")
    wide = expected.intermediate == 256
    assert facts["numa_parts_possible"] == {
        "int4": [1, 2] if wide else [1],
        "int8": [1, 2, 4] if wide else [1, 2],
    }
    assert facts["bytes"] == sum(
        path.stat().st_size for path in [*tmp_path.glob("*.safetensors"), tmp_path / "config.json"]
    )


@pytest.mark.parametrize("method", ["int4", "int8"])
@pytest.mark.parametrize("layout", ["safetensors", "layers"])
@pytest.mark.parametrize("with_manifest", [True, False])
def test_finished(layout: str, method: str, with_manifest: bool, tmp_path: Path) -> None:
    """Also without ktconv.json, as the reference converter leaves its outputs."""
    convert(EXAMPLE, tmp_path / "out", layout=layout, method=method, numa=2)
    if not with_manifest:
        (tmp_path / "out" / "ktconv.json").unlink()
    facts = inspect_path(str(tmp_path / "out"))
    expected = {
        "kind": "converted weights",
        "made_by": "ktconv 0.1.0" if with_manifest else "no ktconv.json",
        "family": "qwen3_moe" if with_manifest else None,
        "method": method.upper(),
        "numa_parts": [2],
        "moe_layers": "0-1",
        "experts": [8],
        "hidden_size": [128],
        "intermediate_size": [256],
        "missing_tensors": 0,
        "wrong_sizes": 0,
        "damaged_files": [],
        "complete": True,
    }
    assert {key: facts[key] for key in expected} == expected
    weights = 2 * 8 * 3 * 128 * 256 * (1 if method == "int8" else 0.5)
    scales = 2 * 8 * (2 * 256 + 2 * 128) * 4
    assert facts["expert_bytes"] == weights + scales


@pytest.mark.parametrize("with_manifest", [True, False])
def test_lost_shard(with_manifest: bool, output: Callable[[str], Path]) -> None:
    """Manifest or index tell that a layer is missing."""
    directory = output("safetensors")
    (directory / LAYER_0).unlink()
    if not with_manifest:
        (directory / "ktconv.json").unlink()
    facts = inspect_path(str(directory))
    assert facts["complete"] is False
    assert facts["missing_tensors"] == 8 * 3 * 2 * 2
    assert facts["first_missing"].startswith("blk.0.ffn_down_exps.0.numa.0.")
    assert facts["damaged_files"] == ([LAYER_0] if with_manifest else [])


def test_all_shards_lost(output: Callable[[str], Path]) -> None:
    directory = output("safetensors")
    for shard in directory.glob("*.safetensors"):
        shard.unlink()
    facts = inspect_path(str(directory))
    assert (facts["kind"], facts["moe_layers"]) == ("converted weights", "none")
    assert facts["complete"] is False
    assert len(facts["damaged_files"]) == 3


@pytest.mark.parametrize("with_manifest", [True, False])
@pytest.mark.parametrize("broken", ["truncated", "empty", "header"])
def test_damaged_shard(broken: str, with_manifest: bool, output: Callable[[str], Path]) -> None:
    """One unreadable file is named; the rest is still described."""
    directory = output("safetensors")
    data = (directory / LAYER_0).read_bytes()
    changed = {"truncated": data[:-1], "empty": b"", "header": data[:8] + b"x" + data[9:]}
    (directory / LAYER_0).write_bytes(changed[broken])
    if not with_manifest:
        (directory / "ktconv.json").unlink()
    facts = inspect_path(str(directory))
    assert facts["damaged_files"] == [LAYER_0]
    assert facts["complete"] is False
    assert facts["method"] == "INT4"


def test_changed_header(output: Callable[[str], Path]) -> None:
    """A valid file of the right size that is not the one that was written."""
    directory = output("safetensors")
    data = (directory / LAYER_0).read_bytes()
    (directory / LAYER_0).write_bytes(data.replace(b'"ktconv_numa":"2"', b'"ktconv_numa":"1"', 1))
    facts = inspect_path(str(directory))
    assert facts["damaged_files"] == [LAYER_0]
    assert facts["complete"] is False


@pytest.mark.parametrize("with_manifest", [True, False])
@pytest.mark.parametrize("name", ["gate_0_4096Byte", "up_7_8192Byte", "down_3_512Byte"])
def test_lost_kt_file(name: str, with_manifest: bool, output: Callable[[str], Path]) -> None:
    """Also of expert 0 and of the last expert, whose absence could look like a smaller layer."""
    directory = output("layers")
    if not with_manifest:
        (directory / "ktconv.json").unlink()
    part = sorted((directory / "_layer_0" / "_numa_0").glob(f"INT4_{name.rsplit('_', 1)[0]}_*"))
    for file in part:
        file.unlink()
    facts = inspect_path(str(directory))
    assert facts["missing_tensors"] == len(part) == 2
    projection, expert = name.split("_")[:2]
    assert facts["first_missing"].startswith(f"blk.0.ffn_{projection}_exps.{expert}.numa.0.")
    assert facts["method"] == "INT4"
    assert facts["complete"] is False


@pytest.mark.parametrize("with_manifest", [True, False])
def test_short_kt_file(with_manifest: bool, output: Callable[[str], Path]) -> None:
    """What a full disk leaves of the reference: the name says how many bytes there should be."""
    directory = output("layers")
    if not with_manifest:
        (directory / "ktconv.json").unlink()
    file = next((directory / "_layer_1" / "_numa_1").glob("INT4_up_2_*quant_.kt"))
    file.write_bytes(file.read_bytes()[:-1])
    facts = inspect_path(str(directory))
    assert facts["damaged_files"] == [file.relative_to(directory).as_posix()]
    assert facts["first_wrong_size"] == "blk.1.ffn_up_exps.2.numa.1.weight"
    assert facts["complete"] is False


def test_tensor_of_half_size(output: Callable[[str], Path]) -> None:
    """What the reference's loader does not notice: a valid file with one short tensor."""
    from helpers.convert import read_model
    from helpers.families import Raw, write_safetensors

    directory = output("safetensors")
    tensors = dict(read_model(directory))
    name = "blk.0.ffn_gate_exps.0.numa.0.weight"
    half = tensors[name].data[: len(tensors[name].data) // 2]
    tensors[name] = Raw("I8", (len(half),), half)
    for path in directory.iterdir():
        path.unlink()
    write_safetensors(directory / "model.safetensors", tensors)
    facts = inspect_path(str(directory))
    assert (facts["wrong_sizes"], facts["first_wrong_size"]) == (1, name)
    assert facts["complete"] is False


def test_unknown_sizes(tmp_path: Path) -> None:
    """Packed by some other rule: said, and not called complete."""
    import numpy as np
    from helpers.families import Tensor, write_safetensors

    tensors: dict[str, Tensor] = {}
    for proj in PROJECTIONS:
        base = f"blk.0.ffn_{proj}_exps.0.numa.0"
        tensors[f"{base}.weight"] = np.zeros(1000, np.int8)
        tensors[f"{base}.scale"] = np.zeros(128, np.float32)
    write_safetensors(tmp_path / "model.safetensors", tensors)
    facts = inspect_path(str(tmp_path))
    assert facts["method"] is None
    assert facts["complete"] is False


def test_inspecting_an_unfinished_output(tmp_path: Path) -> None:
    convert(EXAMPLE, tmp_path / "out", layers=[1], numa=2, method="int8")
    facts = inspect_path(str(tmp_path / "out"))
    assert facts["kind"] == "unfinished conversion"
    assert facts["family"] == "qwen3_moe"
    assert (facts["layers_done"], facts["layers_missing"]) == ("1", "0")
    assert facts["options"]["method"] == "int8"
    assert facts["complete"] is False
    convert(EXAMPLE, tmp_path / "out", numa=2, method="int8")
    assert inspect_path(str(tmp_path / "out"))["complete"] is True


def test_a_lone_backward_matrix(output: Callable[[str], Path]) -> None:
    """Outputs of other tools may hold them too; kt-kernel then wants all of them."""
    directory = output("layers")
    (directory / "ktconv.json").unlink()
    folder = directory / "_layer_0" / "_numa_0"
    (folder / "INT4_gate_bwd_0_8192Byte_quant_.kt").write_bytes(bytes(8192))
    facts = inspect_path(str(directory))
    assert (facts["backward"], facts["wrong_sizes"], facts["complete"]) == (True, 0, False)
    assert facts["first_missing"] == "blk.0.ffn_gate_bwd_exps.0.numa.0.scale"


# ---- records that are not what we wrote ------------------------------------------------

WRONG: tuple[Any, ...] = (
    None, "x", [], [1], 1.5, {}, {"x": {}}, -1, 10**400, float("nan"), "\ud800", "a\0b", "../x",
)  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value in a record; of many beside each other two and the last."""
    yield path
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    for key in dict.fromkeys([*keys[:2], *keys[-1:]]):
        if isinstance(value[key], dict | list):
            yield from places(value[key], (*path, key))
        else:
            yield (*path, key)


def replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    changed = value.copy()
    changed[path[0]] = replaced(value[path[0]], path[1:], new)
    return changed


def without(value: Any, path: tuple[Any, ...]) -> Any:
    changed = value.copy()
    if path[1:]:
        changed[path[0]] = without(value[path[0]], path[1:])
    else:
        del changed[path[0]]
    return changed


def wrong_records(record: Any) -> Iterator[Any]:
    """Each value in turn replaced by each wrong one, or gone."""
    for path in places(record):
        yield from (replaced(record, path, new) for new in WRONG)
        if path:
            yield without(record, path)


def assert_told(directory: Path, model: Path, *overwrites: bool) -> None:
    """Whatever the records hold, only errors of ours come out, and what is said can be printed."""
    with contextlib.suppress(KtconvError):
        printed(directory)
    for overwrite in overwrites:
        with contextlib.suppress(KtconvError):
            convert(model, directory, overwrite=overwrite)


def printed(directory: Path) -> None:
    facts = inspect_path(str(directory))
    json.dumps(facts, ensure_ascii=False).encode()


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of one layer with an expert and one other tensor."""
    tensors = numbered("model.layers.0.mlp.experts", random_weights(experts=1))
    tensors["model.norm.weight"] = tensors["model.layers.0.mlp.experts.0.up_proj.weight"]
    directory = tmp_path_factory.mktemp("small")
    return write_checkpoint(directory, tensors, simple_config(num_experts=1))


def test_wrong_run_record(small: Path, tmp_path: Path) -> None:
    damage_all(small, tmp_path / "out", ".ktconv/run.json")


def test_wrong_unit_record(small: Path, tmp_path: Path) -> None:
    damage_all(small, tmp_path / "out", ".ktconv/layer-00000.json")


def test_wrong_manifest(small: Path, tmp_path: Path) -> None:
    damage_all(small, tmp_path / "out", "ktconv.json")


def damage_all(model: Path, output: Path, name: str) -> None:
    convert(model, output)
    if name != "ktconv.json":
        make_unfinished(output)
    good = output.with_name("good")
    shutil.copytree(output, good)
    for number, record in enumerate(wrong_records(json.loads((good / name).read_text()))):
        (output / name).write_text(json.dumps(record))
        # Every record is described; going on and overwriting are whole conversions: a third and a
        # ninth of them, other wrong values in each place.
        again = [overwrite for overwrite, each in ((False, 3), (True, 9)) if number % each == 0]
        assert_told(output, model, *again)
        if again:
            shutil.rmtree(output)
            shutil.copytree(good, output)


def make_unfinished(output: Path) -> None:
    """As a run that was killed before the manifest leaves it."""
    manifest = json.loads((output / "ktconv.json").read_text())
    journal = Journal(output)
    journal.create()
    units = manifest.pop("units")
    journal.write_run(manifest)
    for key, record in units.items():
        journal.write_unit(key, record)
    (output / "ktconv.json").unlink()


@pytest.mark.parametrize("field", ["options", "geometry"])
def test_damaged_run_record(field: str, small: Path, tmp_path: Path) -> None:
    convert(small, tmp_path)
    make_unfinished(tmp_path)
    run = json.loads((tmp_path / ".ktconv" / "run.json").read_text())
    (tmp_path / ".ktconv" / "run.json").write_text(json.dumps({**run, field: "x"}))
    with pytest.raises(OutputError, match=r"run.json is damaged"):
        inspect_path(str(tmp_path))


@pytest.mark.parametrize("change", [{"geometry": 3}, {"units": {"layer-00000": 3}}])
def test_inspecting_a_damaged_manifest(change: dict[str, Any], small: Path, tmp_path: Path) -> None:
    """The weights are described, but the output is not called complete."""
    convert(small, tmp_path)
    manifest = json.loads((tmp_path / "ktconv.json").read_text())
    (tmp_path / "ktconv.json").write_text(json.dumps({**manifest, **change}))
    facts = inspect_path(str(tmp_path))
    assert facts["damaged_files"] == ["ktconv.json"]
    assert (facts["method"], facts["complete"]) == ("INT4", False)


@pytest.mark.parametrize("text", ["[" * 100_000, "[]", '{"weight_map": 3}', "\\", ""])
def test_inspecting_a_damaged_index(text: str, small: Path, tmp_path: Path) -> None:
    convert(small, tmp_path)
    (tmp_path / "ktconv.json").unlink()
    (tmp_path / "model.safetensors.index.json").write_text(text)
    assert inspect_path(str(tmp_path))["method"] == "INT4"


@pytest.mark.parametrize(
    ("text", "sound"),
    [
        (r'{"a": "\ud83d\ude00"}', True), (r'{"a": "\ude00"}', False), (r'{"\uD83D": 1}', False),
        (r'{"a": "\u0000"}', False), (r'{"a": "\\u0000 \\ud800"}', True),
        (r'{"a": "\\\u0000"}', False), ("[]", False), ("{" * 9, False),
    ],
)  # fmt: skip
def test_strings_of_records_can_be_file_names(text: str, sound: bool) -> None:
    assert (parse_record(text.encode()) is not None) == sound


def test_inspect_where_no_model_is(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        inspect_path(str(tmp_path))
    with pytest.raises(CheckpointError):
        inspect_path(str(tmp_path / "missing"))


# ---- as a command ----------------------------------------------------------------------


def run(*words: str) -> Any:
    return CliRunner().invoke(app, ["inspect", *words])


def test_inspect_json(finished: Callable[[str], Path]) -> None:
    for path in (EXAMPLE, finished("safetensors"), finished("layers")):
        result = run(str(path), "--json")
        assert result.exit_code == 0
        assert json.loads(result.stdout) == inspect_path(str(path))
        assert json.loads(result.stdout)["schema"] == 1
        assert result.stderr == ""


def test_inspect_text(finished: Callable[[str], Path]) -> None:
    lines = run(str(finished("safetensors"))).stdout.splitlines()
    facts = dict(re.split(r"  +", line, maxsplit=1) for line in lines)
    assert facts["method"] == "INT4"
    assert facts["numa parts"] == "2"
    assert facts["complete"] == "yes"
    assert facts["expert bytes"] == "835584 (835.6 kB)"
    assert "numa parts possible\n  int4  1, 2\n  int8  1, 2, 4\n" in run(str(EXAMPLE)).stdout


def test_errors_are_sentences(tmp_path: Path) -> None:
    done = ktconv("inspect", tmp_path / "missing")
    assert done.exit_code == 2
    assert done.stdout == ""
    assert done.stderr.startswith("Error: ")
    assert "Traceback" not in done.stderr


def test_headers_of_a_checkpoint_are_parsed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a million tensors, looking for packed experts first took as long as all the rest."""
    from ktconv.targets.packed import weights as packed

    monkeypatch.setattr(packed, "read_header", lambda path: pytest.fail(f"{path} was parsed"))
    assert inspect_path(str(EXAMPLE))["kind"] == "checkpoint"


def test_a_side_file_that_conversions_refuse(tmp_path: Path) -> None:
    """A clone without git-lfs is found before its conversion."""
    model = tmp_path / "model"
    shutil.copytree(EXAMPLE, model)
    before = inspect_path(str(model))["notes"]
    (model / "tokenizer.model").write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 499723\n"
    )
    *notes, added = inspect_path(str(model))["notes"]
    assert notes == before
    assert "tokenizer.model is a Git LFS pointer" in added
    assert added.endswith("; conversions refuse it")
