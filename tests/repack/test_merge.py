"""Merged folders are, byte for byte, what quantize-cpu writes as shards."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner
from helpers import golden
from helpers.cli import STATE, check_reader, contents, edit_json, staged, stamps, tmpfs, write_model
from helpers.convert import all_files, assert_same, convert, read_json, read_model
from helpers.disk_calls import Commands
from helpers.families import Tensor, bf16, numbered, random_weights, simple_config, write_checkpoint
from helpers.faults import read_zeros
from helpers.stopped import StopsAfterOneUnit

from ktconv.cli.app import app
from ktconv.cli.options import preflight_facts, report_facts
from ktconv.conversion.pipeline import Observer
from ktconv.errors import CheckpointError, OutputError, ResourceError, UsageError, VerificationError
from ktconv.merge import Request, merge, prepare

pytestmark = [pytest.mark.slow, pytest.mark.process]

Made = Callable[[str, int], Path]
Backward = Callable[[Path, str, int], dict[str, bytes]]
OWN = ("README.md", "ktconv.json")  # they tell where the bytes come from
EVERY = pytest.mark.parametrize(
    ("method", "numa"), [("int4", 1), ("int4", 2), ("int8", 1), ("int8", 2)]
)


def files(directory: Path) -> dict[str, bytes]:
    """All that must be equal to a conversion's."""
    return {name: data for name, data in all_files(directory).items() if name not in OWN}


# ---- the bytes -------------------------------------------------------------------------


@EVERY
def test_with_source(
    model: Path, shards: Made, kept_folders: Made, tmp_path: Path, method: str, numa: int
) -> None:
    report = merge(Request(kept_folders(method, numa), tmp_path / "out", str(model)))
    assert report.complete and not report.missing
    assert_same(files(tmp_path / "out"), files(shards(method, numa)))
    merged, fresh = (read_json(at / OWN[1]) for at in (tmp_path / "out", shards(method, numa)))
    assert merged.pop("merged_from")["manifest"] is True
    assert merged == fresh
    assert not (tmp_path / "out" / STATE).exists()


@EVERY
def test_without_source(
    model: Path, kept_folders: Made, tmp_path: Path, method: str, numa: int
) -> None:
    convert(model, tmp_path / "fresh", method=method, numa=numa, experts_only=True)
    merge(Request(kept_folders(method, numa), tmp_path / "out"))
    assert_same(files(tmp_path / "out"), files(tmp_path / "fresh"))


@pytest.mark.parametrize("source", [True, False])
def test_foreign_folders_without_manifest(
    model: Path, foreign: Made, tmp_path: Path, source: bool
) -> None:
    merge(Request(foreign("int4", 2), tmp_path / "out", str(model) if source else None))
    convert(model, tmp_path / "shards", method="int4", numa=2, compat=True)
    expected = read_model(tmp_path / "shards")
    if not source:
        expected = {name: tensor for name, tensor in expected.items() if "_exps." in name}
        assert not (tmp_path / "out" / "config.json").exists()
    assert_same(read_model(tmp_path / "out"), expected)
    manifest = read_json(tmp_path / "out" / "ktconv.json")
    assert manifest["merged_from"]["manifest"] is False
    assert manifest["options"]["method"] == "int4" and manifest["options"]["numa"] == 2


def test_max_shard_size_and_experts_only(model: Path, kept_folders: Made, tmp_path: Path) -> None:
    options = {"experts_only": True, "max_shard_size": 150_000}
    convert(model, tmp_path / "fresh", method="int8", numa=2, **options)
    merge(Request(kept_folders("int8", 2), tmp_path / "out", str(model), **options))  # type: ignore[arg-type]
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 6
    assert_same(files(tmp_path / "out"), files(tmp_path / "fresh"))


def test_no_mtp(tmp_path: Path) -> None:
    tensors: dict[str, Tensor] = {"model.layers.2.eh_proj.weight": bf16(random_weights().gate[0])}
    for index in range(3):
        tensors |= numbered(f"model.layers.{index}.mlp.experts", random_weights(seed=index))
    config = simple_config(num_hidden_layers=2, num_nextn_predict_layers=1)
    model = str(write_checkpoint(tmp_path / "model", tensors, config))
    convert(Path(model), tmp_path / "fresh", mtp=False)
    convert(Path(model), tmp_path / "layers", mtp=False, layout="layers")
    merge(Request(tmp_path / "layers", tmp_path / "out", model))
    assert_same(files(tmp_path / "out"), files(tmp_path / "fresh"))
    for name in OWN:
        (tmp_path / "layers" / name).unlink()
    with pytest.raises(CheckpointError, match="does not contain the MTP layer 2") as caught:
        prepare(Request(tmp_path / "layers", tmp_path / "other", model))
    assert "--no-mtp" in str(caught.value.hint)
    merge(Request(tmp_path / "layers", tmp_path / "other", model, mtp=False))
    assert_same(files(tmp_path / "other"), files(tmp_path / "fresh"))


@pytest.mark.parametrize("name", ["upscale", "scale_.kt", "a scale/quant_scale"])
def test_a_path_that_says_scale(
    shards: Made, kept_folders: Made, tmp_path: Path, name: str
) -> None:
    shutil.copytree(kept_folders("int4", 2), tmp_path / name / "in")
    merge(Request(tmp_path / name / "in", tmp_path / name / "out"))
    expected = {k: t for k, t in read_model(shards("int4", 2)).items() if "_exps." in k}
    found = read_model(tmp_path / name / "out")
    assert_same(found, expected)
    assert {t.dtype for k, t in found.items() if k.endswith(".weight")} == {"I8"}


@pytest.mark.parametrize(("method", "numa"), [("int4", 2), ("int8", 1)])
def test_backward_sets(
    shards: Made, folders: Made, add_backward: Backward, tmp_path: Path, method: str, numa: int
) -> None:
    root = folders(method, numa)
    written = add_backward(root, method, numa)
    merge(Request(root, tmp_path / "out"))
    found = read_model(tmp_path / "out")
    forward = {k: t for k, t in read_model(shards(method, numa)).items() if "_exps." in k}
    assert_same({k: t for k, t in found.items() if "_bwd" not in k}, forward)
    assert_same({k: t.data for k, t in found.items() if "_bwd" in k}, written)
    weight_map = read_json(tmp_path / "out" / "model.safetensors.index.json")["weight_map"]
    assert weight_map.keys() == found.keys()
    of_layer = [f"model-{n:05d}-of-00006.safetensors" for n in (3, 4)]
    assert weight_map["blk.1.ffn_up_exps.0.numa.0.scale"] == of_layer[0]
    assert weight_map["blk.1.ffn_up_bwd_exps.0.numa.0.scale"] == of_layer[1]


GOLDEN = [case for case in golden.CASES if case.blob is not None]


@pytest.mark.parametrize("case", GOLDEN, ids=[case.name for case in GOLDEN])
def test_files_of_the_reference_converter(case: golden.Case, tmp_path: Path) -> None:
    """Its own bytes in, backward ones too; out come the tensors that it writes itself."""
    for name, entry in case.tensors.items():
        path = tmp_path / "layers" / entry["kt_file"]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(case.expected_bytes(name) or b"")
    merge(Request(tmp_path / "layers", tmp_path / "out"))
    found = read_model(tmp_path / "out")
    assert found.keys() == case.tensors.keys()
    for name, tensor in found.items():
        case.check(name, tensor.data)
        entry = case.tensors[name]
        assert (tensor.dtype, list(tensor.shape)) == (entry["dtype"], entry["shape"])


@pytest.mark.parametrize("source", [True, False])
def test_verify_holds(model: Path, kept_folders: Made, tmp_path: Path, source: bool) -> None:
    merge(Request(kept_folders("int4", 2), tmp_path / "out", str(model) if source else None))
    words = ["verify", tmp_path / "out", "--source", model, "--level", "weights"]
    result = CliRunner().invoke(app, list(map(str, words)))
    assert result.exit_code == 0, result.output


# ---- dry run, resume, faults -----------------------------------------------------------


def test_preparing_merge_writes_nothing(model: Path, kept_folders: Made, tmp_path: Path) -> None:
    before = stamps(kept_folders("int4", 2))
    preflight = prepare(Request(kept_folders("int4", 2), tmp_path / "out", str(model)))
    assert not (tmp_path / "out").exists()
    assert stamps(kept_folders("int4", 2)) == before
    merge(Request(kept_folders("int4", 2), tmp_path / "out", str(model)), preflight=preflight)
    sizes = [path.stat().st_size for path in (tmp_path / "out").glob("*.safetensors")]
    assert preflight.plan.output_bytes == sum(sizes)
    assert preflight.peak_memory > 0 and preflight.disk_free > 0


def test_facts_for_the_command_line(model: Path, kept_folders: Made, tmp_path: Path) -> None:
    for source in (str(model), None):
        request = Request(kept_folders("int4", 2), tmp_path / f"out-{source is None}", source)
        facts = json.loads(json.dumps(preflight_facts(prepare(request))))
        assert facts["method"] == "int4" and facts["numa"] == 2 and facts["experts"] == 4
        assert facts["copied_tensors"] == (4 if source else 0)
        done = report_facts(merge(request))
        assert done["complete"] and done["worst_relative_rms_error"] > 0


def test_too_small_a_shard_size(kept_folders: Made, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--max-shard-size 1\.0 kB is too small") as caught:
        prepare(Request(kept_folders("int4", 2), tmp_path / "out", max_shard_size=1000))
    least = int(str(caught.value.hint).split()[-1])
    merge(Request(kept_folders("int4", 2), tmp_path / "out", max_shard_size=least))


def test_again_changes_nothing(kept_folders: Made, tmp_path: Path) -> None:
    request = Request(kept_folders("int8", 1), tmp_path / "out")
    merge(request)
    before = stamps(tmp_path / "out")
    assert merge(request).converted == []
    assert stamps(tmp_path / "out") == before


def test_killed_until_done(
    commands: Commands, model: Path, kept_folders: Made, tmp_path: Path
) -> None:
    """Each run is given some calls more than the one before, and goes on from what that left."""
    layers, output = kept_folders("int4", 2), tmp_path / "out"
    merge(Request(layers, tmp_path / "clean", str(model)))
    clean, codes = contents(tmp_path / "clean"), []
    for call in (1, 12, 24, 20, 40, 10_000):
        words = ["merge", layers, output, "--source", model, "--threads=2"]
        codes.append(commands.run(words, call).returncode)
        check_reader(output, clean)
    assert codes == [-signal.SIGKILL] * codes.index(0) + [0] * (len(codes) - codes.index(0))
    assert codes.index(0) >= 4
    assert contents(output) == clean


def test_full_disk_on_the_way(kept_folders: Made, tmp_path: Path) -> None:
    request = Request(kept_folders("int8", 1), tmp_path / "disk" / "out", threads=1)
    with tmpfs(tmp_path / "disk", "size=80m") as disk:
        with pytest.raises(ResourceError, match="the disk is full"):
            merge(request, FillDisk(disk / "ballast"))
        assert staged(disk / "out") == []
        (disk / "ballast").unlink()
        report = merge(request)
        assert report.complete and report.kept
        merge(Request(request.layers_dir, tmp_path / "clean"))
        assert contents(disk / "out") == contents(tmp_path / "clean")


class FillDisk(Observer):
    """Leaves no byte free after the first unit."""

    def __init__(self, ballast: Path) -> None:
        self.ballast = ballast

    def unit_finished(self, key: str) -> None:
        with self.ballast.open("wb", buffering=0) as file:
            while True:
                try:
                    file.write(bytes(1 << 12))
                except OSError:
                    break


def test_changed_folders_are_refused_on_resume(folders: Made, tmp_path: Path) -> None:
    root = folders("int4", 1)
    request = Request(root, tmp_path / "out", threads=1)
    with pytest.raises(KeyboardInterrupt):
        merge(request, StopsAfterOneUnit())
    file = next((root / "_layer_2").rglob("*scale_.kt"))
    os.utime(file, ns=(1, 1))
    with pytest.raises(OutputError, match=r"begun from other input files.*layers\.2") as caught:
        merge(request)
    assert "--overwrite" in str(caught.value.hint)
    assert merge(Request(root, tmp_path / "out", overwrite=True)).complete


def test_changed_options_are_refused_on_resume(kept_folders: Made, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        merge(Request(kept_folders("int4", 1), tmp_path / "out", threads=1), StopsAfterOneUnit())
    with pytest.raises(OutputError):
        merge(Request(kept_folders("int4", 1), tmp_path / "out", max_shard_size=10**6))
    with pytest.raises(OutputError):
        merge(Request(kept_folders("int4", 2), tmp_path / "out"))


def test_output_of_quantize_cpu_is_refused(model: Path, kept_folders: Made, tmp_path: Path) -> None:
    convert(model, tmp_path / "out", method="int4", numa=1)
    before = stamps(tmp_path / "out")
    with pytest.raises(OutputError, match="begun from other input files"):
        merge(Request(kept_folders("int4", 1), tmp_path / "out", str(model)))
    assert stamps(tmp_path / "out") == before


def test_folders_that_change_meanwhile(folders: Made, tmp_path: Path) -> None:
    root = folders("int4", 1)
    preflight = prepare(Request(root, tmp_path / "out"))
    os.utime(next((root / "_layer_1").rglob("*quant_.kt")), ns=(1, 1))
    with pytest.raises(CheckpointError, match="_layer_1 changed during the merge"):
        merge(Request(root, tmp_path / "out"), preflight=preflight)


# ---- checks on the way -----------------------------------------------------------------


def test_a_flipped_byte_is_found_by_the_manifest(folders: Made, tmp_path: Path) -> None:
    root = folders("int4", 2)
    (file,) = root.glob("_layer_1/_numa_1/INT4_down_3_*_quant_.kt")
    data = bytearray(file.read_bytes())
    data[100] ^= 1
    file.write_bytes(bytes(data))
    with pytest.raises(
        VerificationError, match=r"INT4_down_3_.*differs from the one in its manifest"
    ):
        merge(Request(root, tmp_path / "out"))
    assert not list((tmp_path / "out").glob("*index*"))


def test_a_scale_that_is_no_number(foreign: Made, tmp_path: Path) -> None:
    root = foreign("int4", 2)
    (file,) = root.glob("_layer_0/_numa_0/INT4_up_1_*_scale_.kt")
    file.write_bytes(b"\xff" * file.stat().st_size)
    with pytest.raises(CheckpointError, match=r"INT4_up_1_.*infinite or NaN"):
        merge(Request(root, tmp_path / "out"))


def test_verify_reads_back(
    kept_folders: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ktconv.writer.staging.ShardStaging.read", read_zeros)
    with pytest.raises(VerificationError, match="read back differs from what was written"):
        merge(Request(kept_folders("int4", 1), tmp_path / "out"))
    assert merge(Request(kept_folders("int4", 1), tmp_path / "out", verify=False)).complete


@pytest.mark.parametrize("where", ["inside layers", "inside source", "itself"])
def test_nested_output(model: Path, kept_folders: Made, where: str) -> None:
    root = kept_folders("int4", 1)
    output = {"inside layers": root / "out", "inside source": model / "out", "itself": root}[where]
    with pytest.raises(UsageError, match="is inside the"):
        prepare(Request(root, output, str(model)))


def test_merging_with_another_source(kept_folders: Made, tmp_path: Path) -> None:
    other = write_model(tmp_path / "other", layers=3, inner=512, shards=2)
    with pytest.raises(CheckpointError, match="converted from another model"):
        prepare(Request(kept_folders("int4", 1), tmp_path / "out", str(other)))


def test_merging_a_damaged_manifest(folders: Made, tmp_path: Path) -> None:
    root = folders("int4", 1)
    edit_json(root / "ktconv.json", lambda content: content["options"].update(numa="two"))
    with pytest.raises(CheckpointError, match=r"ktconv\.json is damaged"):
        prepare(Request(root, tmp_path / "out"))
