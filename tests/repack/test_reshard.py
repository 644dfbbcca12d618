"""Other numbers of parts: the same weights, or a refusal that says why."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from helpers import reference
from helpers.cli import check_reader, contents, edit_json, stamps, write_model
from helpers.convert import assert_same, assert_shards, convert, read_json, read_model
from helpers.families import Raw, bf16, numbered, random_weights, simple_config, write_checkpoint
from helpers.faults import read_zeros
from helpers.reference.kt_layout import unpack_codes
from numpy.typing import NDArray

from ktconv import native
from ktconv.cli.options import preflight_facts
from ktconv.errors import CheckpointError, KtconvError, OutputError, UsageError, VerificationError
from ktconv.formats import FORMATS
from ktconv.repack.recut import Share, UnequalScales, joined_scales, shares
from ktconv.repack.reshard import Request, prepare, reshard
from ktconv.targets.packed.target import Options

pytestmark = pytest.mark.process

Made = Callable[[str, int], Path]
Backward = Callable[[Path, str, int], dict[str, bytes]]


def matrix(
    tensors: dict[str, Raw], method: str, numa: int, proj: str, expert: int = 1
) -> NDArray[np.float32]:
    """The weights of layer 1 that the parts of a matrix stand for, put together."""
    parts = []
    for part in range(numa):
        name = f"blk.1.ffn_{proj}_exps.{expert}.numa.{part}."
        scale = np.frombuffer(tensors[name + "scale"].data, np.float32)
        packed = np.frombuffer(tensors[name + "weight"].data, np.uint8)
        cols = packed.nbytes * 8 // FORMATS[method].traits.bits // len(scale)
        codes = unpack_codes(FORMATS[method], packed, len(scale), cols)
        parts.append(reference.dequantize(FORMATS[method], codes, scale))
    by_rows = proj in ("gate", "up", "down_bwd")
    return np.concatenate(parts, axis=0 if by_rows else 1)


def same_weights(first: Path, one: int, second: Path, two: int, method: str) -> None:
    old, new = read_model(first), read_model(second)
    for proj in ("gate", "up", "down"):
        assert np.array_equal(matrix(old, method, one, proj), matrix(new, method, two, proj))


# ---- cutting further -------------------------------------------------------------------


@pytest.mark.parametrize("method", ["int4", "int8"])
@pytest.mark.parametrize(("old", "new"), [(1, 2), (1, 4), (2, 4)])
def test_cutting_further_keeps_every_weight(
    shards: Made, tmp_path: Path, method: str, old: int, new: int
) -> None:
    given, out = shards(method, old), tmp_path / "out"
    report = reshard(Request(given, out, new))
    assert report.complete
    assert_shards(out, method, new)
    same_weights(given, old, out, new, method)
    fresh, found = read_model(shards(method, new)), read_model(out)
    assert_same(
        {name: tensor for name, tensor in found.items() if "_down_" not in name},
        {name: tensor for name, tensor in fresh.items() if "_down_" not in name},
    )
    assert (out / "tokenizer.json").read_bytes() == (given / "tokenizer.json").read_bytes()


def test_the_manifest_is_honest(shards: Made, tmp_path: Path) -> None:
    reshard(Request(shards("int4", 1), tmp_path / "out", 2))
    before = read_json(shards("int4", 1) / "ktconv.json")
    manifest = read_json(tmp_path / "out" / "ktconv.json")
    assert manifest["options"] == {**before["options"], "numa": 2}
    assert manifest["source"] == before["source"]
    assert manifest["geometry"] == before["geometry"]
    assert manifest["resharded_from"]["numa"] == 1
    assert "not the bytes of a fresh conversion" in manifest["resharded_from"]["down_scales"]
    about = manifest["units"]["layer-00000"]["tensors"]["blk.0.ffn_gate_exps.0.numa.1.weight"]
    assert about.keys() == {"blake3"}
    assert "reshard" in (tmp_path / "out" / "README.md").read_text()


def test_there_and_back(shards: Made, tmp_path: Path) -> None:
    """Inherited scales agree: joining gives the old bytes."""
    given = shards("int4", 1)
    reshard(Request(given, tmp_path / "four", 4))
    reshard(Request(tmp_path / "four", tmp_path / "two", 2))
    reshard(Request(tmp_path / "two", tmp_path / "one", 1))
    same_weights(given, 1, tmp_path / "two", 2, "int4")
    assert_same(read_model(tmp_path / "one"), read_model(given))
    manifest = read_json(tmp_path / "two" / "ktconv.json")
    assert manifest["resharded_from"]["earlier"] == [1]
    assert "whose row scales agree" in manifest["resharded_from"]["down_scales"]


def test_parts_that_do_not_nest(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", layers=2, inner=768)
    convert(model, tmp_path / "one", method="int4", numa=1)
    reshard(Request(tmp_path / "one", tmp_path / "two", 2))
    reshard(Request(tmp_path / "two", tmp_path / "three", 3))
    same_weights(tmp_path / "one", 1, tmp_path / "three", 3, "int4")


def test_shards_by_size_and_folders(shards: Made, kept_folders: Made, tmp_path: Path) -> None:
    reshard(Request(shards("int8", 1), tmp_path / "small", 2, max_shard_size=150_000))
    assert_shards(tmp_path / "small", "int8", 2, 150_000)
    reshard(Request(kept_folders("int8", 1), tmp_path / "folders", 2))
    found = read_model(tmp_path / "small")
    assert_same(
        read_model(tmp_path / "folders"),
        {name: tensor for name, tensor in found.items() if "_exps." in name},
    )


def test_backward(foreign: Made, add_backward: Backward, tmp_path: Path) -> None:
    one, two = foreign("int4", 1), foreign("int4", 2)
    before = add_backward(one, "int4", 1)
    fresh = add_backward(two, "int4", 2)
    reshard(Request(one, tmp_path / "out", 2))
    found = read_model(tmp_path / "out")
    old = {name: Raw("", (), data) for name, data in before.items()}
    for proj in ("gate_bwd", "up_bwd", "down_bwd"):
        assert np.array_equal(matrix(old, "int4", 1, proj), matrix(found, "int4", 2, proj))
    by_rows = {name: data for name, data in fresh.items() if "down_bwd" in name}
    assert_same({name: found[name].data for name in by_rows}, by_rows)
    with pytest.raises(UnequalScales, match="cannot be joined"):
        reshard(Request(two, tmp_path / "joined", 1))


# ---- joining ---------------------------------------------------------------------------


def test_joining_is_refused_where_scales_differ(shards: Made, tmp_path: Path) -> None:
    sentence = r"joined into --numa 1 .* row \d+ has the scale"
    with pytest.raises(UnequalScales, match=sentence) as caught:
        reshard(Request(shards("int4", 2), tmp_path / "out", 1))
    hint = str(caught.value.hint)
    assert "--source MODEL" in hint
    assert "ktconv quantize-cpu MODEL OUTPUT --method int4 --numa 1" in hint
    assert not (tmp_path / "out").exists()


def test_joining_is_accepted_where_scales_agree(tmp_path: Path) -> None:
    """Rows of down with the same largest weight in both halves, and one that is half zeros."""
    weights = random_weights(inner=256)
    weights.down[:, :, ::128] = 8
    weights.down[:, 5, 128:] = 0
    tensors = numbered("model.layers.0.mlp.experts", weights)
    tensors["model.norm.weight"] = bf16(weights.gate[0, 0])
    config = simple_config(moe_intermediate_size=256)
    model = write_checkpoint(tmp_path / "model", tensors, config)
    for method in ("int4", "int8"):
        room = tmp_path / method
        convert(model, room / "two", method=method, numa=2, scale="amax")
        convert(model, room / "one", method=method, numa=1, scale="amax")
        reshard(Request(room / "two", room / "joined", 1))
        assert_same(read_model(room / "joined"), read_model(room / "one"))


def test_joined_scales() -> None:
    first, second = np.array([1, 2, 0], np.float32), np.array([1, 0, 0], np.float32)
    zero = [np.array([False, False, True]), np.array([False, True, True])]
    assert joined_scales([first, second], zero).tolist() == [1, 2, 0]
    with pytest.raises(UnequalScales, match="row 1 has the scale 0 in one part and 2 in another"):
        joined_scales([first, second], [zero[0], zero[0]])


def test_shares() -> None:
    assert shares(12, 3, 1, 0) == [Share(0, 0, 4), Share(1, 0, 4), Share(2, 0, 4)]
    assert shares(12, 1, 3, 2) == [Share(0, 8, 12)]
    assert shares(12, 2, 3, 1) == [Share(0, 4, 6), Share(1, 0, 2)]


# ---- from the source -------------------------------------------------------------------


def test_from_the_source_it_is_a_fresh_conversion(
    model: Path, shards: Made, tmp_path: Path
) -> None:
    request = Request(shards("int8", 2), tmp_path / "out", 1, source=str(model))
    options = prepare(request).request.options
    assert isinstance(options, Options) and options.numa == 1
    assert not (tmp_path / "out").exists()
    assert reshard(request).complete
    assert contents(tmp_path / "out") == contents(shards("int8", 1))


# ---- refusals, dry run, resume ---------------------------------------------------------


def test_preparing_reshard_writes_nothing(shards: Made, tmp_path: Path) -> None:
    before = stamps(shards("int4", 1))
    preflight = prepare(Request(shards("int4", 1), tmp_path / "out", 2))
    assert preflight_facts(preflight)["numa"] == 2
    assert not (tmp_path / "out").exists() and stamps(shards("int4", 1)) == before
    reshard(Request(shards("int4", 1), tmp_path / "out", 2), preflight=preflight)
    sizes = [path.stat().st_size for path in (tmp_path / "out").glob("*.safetensors")]
    assert preflight.plan.output_bytes == sum(sizes)


@pytest.mark.parametrize(
    ("numa", "phrase"), [(2, "already"), (3, "does not divide"), (8, "not a multiple of 128")]
)
def test_impossible_numbers(shards: Made, tmp_path: Path, numa: int, phrase: str) -> None:
    with pytest.raises(UsageError, match=phrase) as caught:
        prepare(Request(shards("int4", 2), tmp_path / "out", numa))
    assert caught.value.hint


def damage(root: Path, kind: str) -> None:
    shard = root / "model-00002-of-00004.safetensors"
    if kind == "shard missing":
        shard.unlink()
    elif kind == "shard cut":
        shard.write_bytes(shard.read_bytes()[:-5])
    elif kind == "shard twice":
        shutil.copy(shard, root / "other.safetensors")
    elif kind == "other tensors missing":
        (root / "model-00004-of-00004.safetensors").unlink()
    elif kind == "not as the index says":
        (root / "model-00004-of-00004.safetensors").unlink()
        (root / "ktconv.json").unlink()
    elif kind == "other options":
        edit_json(root / "ktconv.json", lambda content: content["options"].update(numa=2))
    elif kind == "unfinished":
        (root / ".ktconv").mkdir()
        (root / ".ktconv" / "run.json").touch()


@pytest.mark.parametrize(
    ("kind", "phrase"),
    [
        ("shard missing", r"does not contain layer 1 of"),
        ("shard cut", "is truncated"),
        ("other tensors missing", r"does not contain .*embed_tokens\.weight|does not contain blk"),
        ("not as the index says", r"does not contain .*embed_tokens\.weight|does not contain blk"),
        ("shard twice", "twice, in model-00002.* and in other"),
        ("other options", r"contains INT4 in 1 part, but"),
        ("unfinished", "is not finished"),
    ],
)
def test_damaged_input(shards: Made, tmp_path: Path, kind: str, phrase: str) -> None:
    shutil.copytree(shards("int4", 1), tmp_path / "in")
    damage(tmp_path / "in", kind)
    with pytest.raises(CheckpointError, match=phrase):
        prepare(Request(tmp_path / "in", tmp_path / "out", 2))
    with pytest.raises(KtconvError):
        prepare(Request(tmp_path / "in", tmp_path / "in" / "out", 2))


def test_nothing_to_reshard(model: Path, tmp_path: Path) -> None:
    for directory in (model, tmp_path / "nothing"):
        with pytest.raises(CheckpointError):
            prepare(Request(directory, tmp_path / "out", 2))


@pytest.mark.parametrize("number", [1, 4])
def test_a_flipped_byte_is_found(shards: Made, tmp_path: Path, number: int) -> None:
    shutil.copytree(shards("int4", 1), tmp_path / "in")
    shard = tmp_path / "in" / f"model-0000{number}-of-00004.safetensors"
    data = bytearray(shard.read_bytes())
    data[-100] ^= 1
    shard.write_bytes(bytes(data))
    with pytest.raises(VerificationError, match="differs from the one in its manifest"):
        reshard(Request(tmp_path / "in", tmp_path / "out", 2))


def test_verify_unpacks_what_was_packed(
    shards: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack = native.pack

    def damaged(layout: native.Layout, codes: native.Array) -> native.Array:
        packed = pack(layout, codes)
        packed[0] ^= 1
        return packed

    monkeypatch.setattr(native, "pack", damaged)
    with pytest.raises(VerificationError, match="does not match the packed weights"):
        reshard(Request(shards("int4", 1), tmp_path / "out", 2))


def test_verify_reads_back_what_was_written(
    shards: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ktconv.writer.staging.ShardStaging.read", read_zeros)
    with pytest.raises(VerificationError, match="read back"):
        reshard(Request(shards("int4", 1), tmp_path / "out", 2))


KILLED = """
import os, signal, sys
from pathlib import Path
from ktconv.repack.reshard import Request, reshard
from ktconv.quantize.packed.run import Observer

class Killer(Observer):
    left = int(sys.argv[3])
    def unit_finished(self, key):
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

reshard(Request(Path(sys.argv[1]), Path(sys.argv[2]), 2, threads=1), Killer())
"""


def test_killed_and_resumed(shards: Made, tmp_path: Path) -> None:
    given, output = shards("int4", 1), tmp_path / "out"
    reshard(Request(given, tmp_path / "clean", 2))
    clean = contents(tmp_path / "clean")
    for units in (1, 2):
        command = [sys.executable, "-c", KILLED, str(given), str(output), str(units)]
        assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
        check_reader(output, clean)
    report = reshard(Request(given, output, 2))
    assert len(report.kept) >= 2
    assert contents(output) == clean


def test_output_of_another_conversion(shards: Made, tmp_path: Path) -> None:
    shutil.copytree(shards("int4", 2), tmp_path / "out")
    with pytest.raises(OutputError, match="begun from other input files"):
        reshard(Request(shards("int4", 1), tmp_path / "out", 2))
