"""An index decides which tensors count; what it names and is not there is looked for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from helpers.cli import (
    contents,
    done,
    ktconv_done,
    layer_tensors,
    model_tensors,
    refused,
    run,
    write_model,
)
from helpers.convert import read_model
from helpers.families import Tensor, bf16, random_weights, write_safetensors

from ktconv.errors import CheckpointError
from ktconv.source import open_checkpoint, source_identity

pytestmark = pytest.mark.slow

INDEX = "model.safetensors.index.json"
BASE, OVERLAY = "model-00001-of-00001.safetensors", "model-overlay-00001.safetensors"
FIRST = "model-00001-of-00003.safetensors"
INNER = 256
ROUTER = "model.layers.0.mlp.gate.weight"


def write_index(directory: Path, weight_map: Mapping[str, str]) -> None:
    text = json.dumps({"metadata": {"total_size": 0}, "weight_map": dict(weight_map)})
    (directory / INDEX).write_text(text)


def read_map(directory: Path) -> dict[str, str]:
    found: dict[str, str] = json.loads((directory / INDEX).read_text())["weight_map"]
    return found


@pytest.fixture
def newer() -> dict[str, Tensor]:
    """Expert 2 of layer 1 and the router of layer 0, anew."""
    weights = random_weights(inner=INNER, seed=77)
    names = {"gate": weights.gate, "up": weights.up, "down": weights.down}
    experts = {
        f"model.layers.1.mlp.experts.2.{name}_proj.weight": bf16(matrices[2])
        for name, matrices in names.items()
    }
    return {**experts, ROUTER: bf16(weights.up[:, 0])}


@pytest.fixture
def overlaid(tmp_path: Path, newer: dict[str, Tensor]) -> Path:
    """A model whose index sends four tensors to a second file; the first has them too."""
    model = write_model(tmp_path / "overlaid", inner=INNER, shards=1)
    (model / "model.safetensors").rename(model / BASE)
    write_safetensors(model / OVERLAY, newer)
    write_index(model, dict.fromkeys(model_tensors(), BASE) | dict.fromkeys(newer, OVERLAY))
    return model


def merged(tmp_path: Path, newer: dict[str, Tensor]) -> Path:
    """The same model in one file."""
    model = write_model(tmp_path / "merged", inner=INNER, shards=1)
    write_safetensors(model / "model.safetensors", model_tensors(inner=INNER) | newer)
    return model


# ---- copies, and tensors that are not listed -----------------------------------------------


@pytest.mark.parametrize("name", [OVERLAY, "a-overlay.safetensors"])
@pytest.mark.parametrize("method", [("--method=int4", "--numa=1"), ("--method=bf16",)])
def test_copies_in_other_shards_are_ignored(
    overlaid: Path, newer: dict[str, Tensor], tmp_path: Path, name: str, method: tuple[str, ...]
) -> None:
    """Whichever of the two files has the later name."""
    (overlaid / OVERLAY).rename(overlaid / name)
    write_index(overlaid, read_map(overlaid) | dict.fromkeys(newer, name))
    for source, output in ((overlaid, "out"), (merged(tmp_path, newer), "expected")):
        ktconv_done("quantize-cpu", source, tmp_path / output, *method)
    assert read_model(tmp_path / "out") == read_model(tmp_path / "expected")
    ktconv_done("verify", tmp_path / "out", "--source", overlaid, "--level", "weights")
    # And the stale copies are others.
    stale = write_model(tmp_path / "stale", inner=INNER, shards=1)
    ktconv_done("quantize-cpu", stale, tmp_path / "other", *method)
    there, other = (read_model(tmp_path / name) for name in ("out", "other"))
    assert sum(there[name] != other[name] for name in there) >= len(newer)


def test_all_that_read_a_source_say_so(overlaid: Path, tmp_path: Path) -> None:
    size = 3 * 128 * INNER * 2 + 4 * 128 * 2
    note = f"ignored 4 tensors that {INDEX} has in other shards: 197.6 kB in {BASE}"
    assert size == 197632
    for words in (
        ("inspect", overlaid),
        ("quantize-cpu", overlaid, tmp_path / "out", "--numa", 1, "--dry-run"),
    ):
        assert note in " ".join(ktconv_done(*words).split())
        assert note in json.loads(ktconv_done(*words, "--json"))["notes"]
    facts = json.loads(ktconv_done("inspect", overlaid, "--json"))
    files = sum((overlaid / name).stat().st_size for name in (BASE, OVERLAY, INDEX, "config.json"))
    assert facts["bytes"] == files - size == open_checkpoint(overlaid).nbytes
    explained = json.loads(ktconv_done("inspect", overlaid, "--explain", "--json"))["explained"]
    assert sum(one["tensors"] for one in explained["experts"][0]["patterns"]) == 3 * 4 * 3


def test_merge_and_reshard(overlaid: Path, newer: dict[str, Tensor], tmp_path: Path) -> None:
    done(overlaid, tmp_path / "layers", "--layout", "layers")
    ktconv_done("merge", tmp_path / "layers", tmp_path / "out", "--source", overlaid)
    done(merged(tmp_path, newer), tmp_path / "expected")
    assert read_model(tmp_path / "out") == read_model(tmp_path / "expected")
    ktconv_done("reshard", tmp_path / "out", tmp_path / "two", "--numa", 2)
    ktconv_done("verify", tmp_path / "two", "--source", overlaid, "--level", "weights")


def test_the_index_is_part_of_the_source(overlaid: Path, tmp_path: Path) -> None:
    """It decides: with another one, the same shards are another model."""
    names = [one["name"] for one in source_identity(open_checkpoint(overlaid))]
    assert names == ["config.json", BASE, OVERLAY, INDEX]
    done(overlaid, tmp_path / "out", "--layers", "0")
    write_index(overlaid, read_map(overlaid) | {ROUTER: BASE})
    assert open_checkpoint(overlaid).layers
    refused(run(overlaid, tmp_path / "out"), 2, f"source.files.{INDEX}")
    usual = write_model(tmp_path / "usual")
    assert INDEX not in [one["name"] for one in source_identity(open_checkpoint(usual))]


def test_tensors_that_the_index_does_not_list_are_ignored(tmp_path: Path) -> None:
    clean, model = write_model(tmp_path / "clean"), write_model(tmp_path / "model")
    listed = read_map(model)
    shard = {name: one for name, one in model_tensors().items() if listed[name] == FIRST}
    extra = {"model.rotary.inv_freq": bf16(random_weights().up[0, 0])}
    mtp = layer_tensors(3)  # a layer that config.json does not have
    write_safetensors(model / FIRST, {**extra, **shard, **mtp})
    opened = open_checkpoint(model)
    assert [layer.index for layer in opened.layers] == [0, 1, 2]
    [note] = opened.notes
    assert f"ignored {len(mtp) + 1} tensors that {INDEX} does not list" in note
    assert f" in {FIRST}" in note
    for source in (clean, model):
        done(source, tmp_path / f"{source.name}-out")
    assert read_model(tmp_path / "model-out") == read_model(tmp_path / "clean-out")


def test_one_of_each_kind_is_one_sentence(overlaid: Path, newer: dict[str, Tensor]) -> None:
    write_index(overlaid, {key: BASE for key in model_tensors() if key not in newer})
    weight_map = read_map(overlaid)
    name = next(iter(newer))
    write_index(overlaid, weight_map | {name: OVERLAY})
    with pytest.raises(CheckpointError) as caught:  # three matrices are in no shard by the index
        open_checkpoint(overlaid)
    assert f"{INDEX} does not list 6 of the tensors in its shards" in str(caught.value.hint)


def test_a_missing_tensor_stays_an_error(overlaid: Path, newer: dict[str, Tensor]) -> None:
    write_index(overlaid, read_map(overlaid) | {"ghost": BASE})
    with pytest.raises(CheckpointError, match=f"{BASE} contains 'ghost', but it does not$"):
        open_checkpoint(overlaid)
    # It is somewhere else: then that is said too.
    other = next(name for name in model_tensors() if name not in newer)
    write_index(overlaid, {k: v for k, v in read_map(overlaid).items() if k != "ghost"})
    write_index(overlaid, read_map(overlaid) | {other: OVERLAY})
    with pytest.raises(CheckpointError, match=rf"but it does not \({BASE} has it\)") as caught:
        open_checkpoint(overlaid)
    assert f"remove {overlaid / INDEX}" in str(caught.value.hint)
    write_safetensors(overlaid / "patch.safetensors", {"ghost": bf16(random_weights().up[0])})
    write_index(overlaid, dict.fromkeys(model_tensors(), BASE) | {"ghost": BASE})
    with pytest.raises(CheckpointError, match=r"but it does not \(patch.safetensors has it\)"):
        open_checkpoint(overlaid)


def test_doubles_without_an_index_stay_an_error(overlaid: Path) -> None:
    (overlaid / INDEX).unlink()
    with pytest.raises(CheckpointError, match="is in both"):
        open_checkpoint(overlaid)


# ---- shards that are not there ----------------------------------------------------------


@pytest.mark.parametrize("left", [(), (FIRST,)])
def test_a_complete_single_file_beside_a_stale_index(tmp_path: Path, left: tuple[str]) -> None:
    model, clean = write_model(tmp_path / "model"), write_model(tmp_path / "clean", shards=1)
    for shard in model.glob("*.safetensors"):
        if shard.name not in left:
            shard.unlink()
    write_safetensors(model / "model.safetensors", model_tensors())
    opened = open_checkpoint(model)
    assert [file.name for file in opened.files] == ["model.safetensors"]
    gone = 3 - len(left)
    assert f"{INDEX} names {gone} shards that are not there: " in opened.notes[0]
    assert "model.safetensors, which has all of its 40 tensors, is read instead" in opened.notes[0]
    for source in (model, clean):
        done(source, tmp_path / f"{source.name}-out")
    assert read_model(tmp_path / "model-out") == read_model(tmp_path / "clean-out")
    ktconv_done("verify", tmp_path / "model-out", "--source", model, "--level", "weights")


def test_a_single_file_that_is_not_complete(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    for shard in model.glob("*.safetensors"):
        shard.unlink()
    some = dict(list(model_tensors().items())[:-3])
    write_safetensors(model / "model.safetensors", some)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(model)
    message = str(caught.value)
    assert f"3 of the 3 shards that {model / INDEX} names are missing" in message
    assert message.endswith("37 of their 40 tensors are in model.safetensors")


@pytest.mark.parametrize("count", [1, 3])
def test_shards_under_other_names(tmp_path: Path, count: int) -> None:
    model, clean = write_model(tmp_path / "model"), write_model(tmp_path / "clean")
    for shard in sorted(model.glob("*.safetensors"))[:count]:
        shard.rename(model / shard.name.replace("model-", "weights-"))
    opened = open_checkpoint(model)
    names = {file.name for file in opened.files}
    assert names == {path.name for path in model.glob("*.safetensors")}
    what = "1 shard that is not" if count == 1 else "3 shards that are not"
    assert f"{INDEX} names {what}" in opened.notes[0]
    assert "weights-00001-of-00003.safetensors" in opened.notes[0]
    for source in (model, clean):
        done(source, tmp_path / f"{source.name}-out")
    outputs = [read_model(tmp_path / f"{name}-out") for name in ("model", "clean")]
    assert outputs[0] == outputs[1]
    ktconv_done("verify", tmp_path / "model-out", "--source", model, "--level", "weights")


def test_a_tensor_that_two_other_files_have(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    (model / FIRST).rename(model / "one.safetensors")
    (model / "two.safetensors").write_bytes((model / "one.safetensors").read_bytes())
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(model)
    assert f"names are missing: {FIRST}; 14 of their 14 tensors are in one.safetensors" in str(
        caught.value
    )
    assert str(caught.value).endswith("two.safetensors, some of them twice")


def test_a_damaged_file_beside_them_is_no_substitute(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    (model / FIRST).unlink()
    (model / "other.safetensors").write_bytes(b"no header")
    with pytest.raises(CheckpointError, match=f"names are missing: {FIRST}$"):
        open_checkpoint(model)


def test_outputs_are_the_same_files_as_before(tmp_path: Path) -> None:
    """A usual checkpoint has no notes, and its manifest no new entry."""
    model = write_model(tmp_path / "model")
    opened = open_checkpoint(model)
    assert opened.notes == [] and opened.unused_bytes == 0 and not opened.index_decides
    done(model, tmp_path / "out")
    files = json.loads((tmp_path / "out" / "ktconv.json").read_text())["source"]["files"]
    assert INDEX not in files and "ktconv.json" in contents(tmp_path / "out")


def test_names_that_begin_with_this_directory(overlaid: Path) -> None:
    before = open_checkpoint(overlaid)
    write_index(overlaid, {name: f"./{shard}" for name, shard in read_map(overlaid).items()})
    after = open_checkpoint(overlaid)
    assert after.layers == before.layers
    for name in ("./../a.safetensors", ".//a.safetensors", "././a.safetensors", "./"):
        write_index(overlaid, dict.fromkeys(read_map(overlaid), name))
        with pytest.raises(CheckpointError, match="not a plain name"):
            open_checkpoint(overlaid)
