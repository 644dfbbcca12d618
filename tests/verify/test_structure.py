"""What headers, names and side files tell: faults that need no weight to be read."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.convert import convert, read_header, read_json
from helpers.corrupt import bytes_of, check, forget_manifest, found, overwrite
from helpers.families import Raw, Tensor, numbered, random_weights, simple_config, write_checkpoint
from numpy.typing import NDArray

from ktconv.errors import CheckpointError
from ktconv.targets.packed.weights import open_packed
from ktconv.verify import Request, prepare, verify

Convert = Callable[..., Path]
Change = Callable[[dict[str, Any]], Any]


# ---- no manifest, no source: config.json and the tensors themselves must tell ----------------


def gone(output: Path, pattern: str) -> Path:
    for path in output.glob(pattern):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return forget_manifest(output)


def test_a_part_that_one_layer_lacks(damaged: Convert) -> None:
    for layer in (0, 1):
        output = gone(damaged("int4", 2, "layers"), f"_layer_{layer}/_numa_1")
        messages = {one["message"] for one in found(check(output), "structure", "dimensions")}
        wrong = f"layer {layer} has 1 NUMA part, not 2."
        other = f"layer {1 - layer} has 2 NUMA parts, not 1."  # of two layers, which is right?
        assert messages & {wrong, other}
        shutil.rmtree(output)


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("_layer_*/_numa_1", "moe_intermediate_size 256"),
        ("_layer_*/_numa_*/*_2_*", "num_experts 3"),
    ],
)
def test_what_all_layers_lack(pattern: str, words: str, damaged: Convert) -> None:
    output = gone(damaged("int4", 2, "layers"), pattern)
    assert all(words in one["message"] for one in found(check(output), "structure", "dimensions"))


def test_a_layer_that_is_not_there(model: Path, damaged: Convert) -> None:
    output = gone(damaged("int4", 2, "layers"), "_layer_1")
    config = read_json(output / "config.json") | {"first_k_dense_replace": 0}
    (output / "config.json").write_text(json.dumps(config))
    failure = found(check(output), "structure", "dimensions")[0]
    assert failure["layer"] == 1 and "has no experts" in failure["message"]


# ---- files ------------------------------------------------------------------------------------


def test_link_to_nothing(model: Path, damaged: Convert) -> None:
    output = damaged("int4", 2, "layers")
    file = next(output.glob("_layer_0/_numa_0/*_gate_1_*quant*"))
    file.unlink()
    file.symlink_to("nowhere")
    name = file.relative_to(output).as_posix()
    assert found(check(output, model), "structure", "damaged file")[0]["file"] == name


def test_file_named_after_another_method(model: Path, damaged: Convert) -> None:
    """Readers look for names that begin with the method."""
    output = forget_manifest(damaged("int4", 2, "layers"))
    file = next(output.glob("_layer_0/_numa_0/INT4_gate_1_*quant*"))
    file.rename(file.with_name(file.name.replace("INT4", "INT8")))
    message = found(check(output, model), "structure", "damaged file")[0]["message"]
    assert "is named INT8, not INT4" in message


def test_shard_in_a_folder_below(damaged: Convert) -> None:
    """KTransformers reads it too."""
    output = damaged()
    (output / "old").mkdir()
    shutil.copy(min(output.glob("*.safetensors")), output / "old/part.safetensors")
    failure = found(check(output), "structure", "double tensor")[0]
    assert failure["file"] == "old/part.safetensors"


@pytest.mark.parametrize("dtype", ["F32", "BF16", "I8"])
def test_dtype_of_a_weight(dtype: str, model: Path, damaged: Convert) -> None:
    """Also without a manifest; only U8 is another spelling of I8."""
    output = forget_manifest(damaged())
    name = "blk.0.ffn_gate_exps.0.numa.0.weight"
    shard = next(s for s in output.glob("*.safetensors") if name in read_header(s)[1])
    start, header = read_header(shard)
    begin, end = header[name]["data_offsets"]
    size = {"F32": 4, "BF16": 2, "I8": 1}[dtype]
    shape = [2, (end - begin) // 2] if dtype == "I8" else [(end - begin) // size]
    data = shard.read_bytes()[start:]
    for kind, shaped in ((dtype, shape), ("U8", [end - begin])):
        header[name] |= {"dtype": kind, "shape": shaped}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        shard.write_bytes(len(text).to_bytes(8, "little") + text + data)
        for source in (None, model):
            result = check(output, source, "structure")
            if kind == "U8":
                assert result.passed
            else:
                assert found(result, "structure", "wrong shape")[0]["tensor"] == name


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"num_experts": 5}', '{"hidden_size": -1}'])
def test_odd_config(text: str, damaged: Convert) -> None:
    output = damaged()
    (output / "config.json").write_text(text)
    result = check(output)
    check_name = "dimensions" if "num_experts" in text else "damaged file"
    assert found(result, "structure", check_name)[0]["file"] == "config.json"


def test_tokenizer_of_another_model(model: Path, damaged: Convert, tmp_path: Path) -> None:
    source = tmp_path / "model"
    shutil.copytree(model, source)
    (source / "tokenizer.json").write_text('{"version": 1}')
    output = tmp_path / "out"
    convert(source, output)
    assert check(output, source).passed
    (output / "tokenizer.json").write_text('{"version": 2}')
    failure = found(check(output, source, "structure"), "structure", "changed file")[0]
    assert failure["file"] == "tokenizer.json"
    assert found(check(output), "structure", "changed file")[0]["file"] == "tokenizer.json"
    (output / "tokenizer.json").write_text("{")
    assert found(check(output), "structure", "damaged file")[0]["file"] == "tokenizer.json"
    (output / "tokenizer.json").write_text('{"version": 2}')
    result = check(forget_manifest(output), source, "structure")  # others may rewrite theirs
    assert result.passed
    assert any("tokenizer.json differs from the source's" in note for note in result.facts["notes"])


# ---- manifest ---------------------------------------------------------------------------------


def first_unit(manifest: dict[str, Any]) -> dict[str, Any]:
    unit: dict[str, Any] = next(iter(manifest["units"].values()))
    return unit


DAMAGED: dict[str, Change] = {
    "parts as text": lambda m: m["options"].update(numa="2"),
    "no parts": lambda m: m["options"].update(numa=0),
    "other parts": lambda m: m["options"].update(numa=4),
    "other method": lambda m: m["options"].update(method="int8"),
    "method as a list": lambda m: m["options"].update(method=["int4"]),
    "sizes as text": lambda m: m["options"].update(max_shard_size="big"),
    "no options": lambda m: m.update(options={}),
    "source as a list": lambda m: m.update(source=[1]),
    "source files as a list": lambda m: m["source"].update(files=[1]),
    "source file as a number": lambda m: m["source"].update(files={"a": 3}),
    "no units": lambda m: m.update(units={}),
    "a unit less": lambda m: m["units"].pop(next(iter(m["units"]))),
    "a checksum less": lambda m: first_unit(m)["tensors"].popitem(),
}


@pytest.mark.parametrize("change", DAMAGED)
def test_edited_manifest(change: str, model: Path, damaged: Convert) -> None:
    """It is not trusted: whatever it says, every tensor is read."""
    output = damaged()
    manifest = read_json(output / "ktconv.json")
    DAMAGED[change](manifest)
    (output / "ktconv.json").write_text(json.dumps(manifest))
    assert not check(output, None, "structure").passed
    result = check(output, model)
    assert found(result, "structure", "manifest")
    assert result.facts["weights"]["matrices"] == 2 * 3 * 3


def test_small_shards_in_the_manifest(model: Path, damaged: Convert) -> None:
    """Which shard holds what means nothing."""
    output = damaged()
    manifest = read_json(output / "ktconv.json")
    manifest["options"]["max_shard_size"] = 1
    (output / "ktconv.json").write_text(json.dumps(manifest))
    assert check(output, model).passed


# ---- unfinished --------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["safetensors", "layers"])
def test_an_unfinished_output_is_not_another_tools(
    layout: str, model: Path, tmp_path: Path
) -> None:
    """What comes last is not missed yet, and how it is made is known."""
    output = tmp_path / "out"
    convert(model, output, layout=layout, layers=[0])
    for source in (None, model):
        result = check(output, source)
        assert result.failures[0].check == "unfinished"
        assert not any("tool" in note or "has no" in note for note in result.facts["notes"])


def _f32(values: NDArray[np.float32]) -> Raw:
    """Numbers that bf16 does not have."""
    return Raw("F32", values.shape, (values * np.float32(1.003)).astype("<f4").tobytes())


def test_the_rounding_of_an_unfinished_output(model: Path, tmp_path: Path) -> None:
    """Its options are those of the run: without --compat nothing is rounded to bf16 first."""
    source = tmp_path / "model"
    weights = random_weights(256, 256, 2, seed=8)
    tensors: dict[str, Tensor] = {}
    for layer in (0, 1):
        tensors |= numbered(f"model.layers.{layer}.mlp.experts", weights, encode=_f32)
    sizes = {"hidden_size": 256, "moe_intermediate_size": 256, "num_experts": 2}
    write_checkpoint(source, tensors, simple_config(num_hidden_layers=2, **sizes))
    convert(source, tmp_path / "out", layers=[0], method="int8")
    assert not [one for one in check(tmp_path / "out", source).failures if one.level == "weights"]


# ---- levels above -----------------------------------------------------------------------------


def test_failures_are_told_though_a_level_cannot_be_run(
    model: Path, damaged: Convert, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ktconv.verify import hidden_states
    from ktconv.verify.packed.verifier import PackedVerifier

    def fails(*_: object) -> None:
        raise CheckpointError("the kernels refuse these weights")

    monkeypatch.setattr(hidden_states, "check_source", lambda output: None)
    monkeypatch.setattr(PackedVerifier, "run_layers", fails)
    request = Request(damaged(), str(model), "layers", threads=1)
    with pytest.raises(CheckpointError):  # nothing was wrong: it could not be run
        verify(request)
    output = forget_manifest(request.output)
    place = next(iter(open_packed(output).tensors.values()))
    overwrite(place, bytes([bytes_of(place)[0] ^ 6]))
    result = verify(request)
    assert {one.level for one in result.failures} == {"weights"} and result.facts["layers"] is None
    assert any("the kernels refuse" in note for note in result.facts["notes"])


def test_file_that_becomes_shorter(model: Path, damaged: Convert) -> None:
    """After its header was read: the output is wrong, not this machine."""
    output = damaged()
    request = Request(output, str(model), "weights", threads=1)
    ready = prepare(request)
    for shard in output.glob("*.safetensors"):
        os.truncate(shard, shard.stat().st_size // 2)
    with pytest.raises(CheckpointError, match="became shorter while it was read") as caught:
        verify(request, prepared=ready)
    assert caught.value.exit_code == 2
