"""GGUF outputs: files that the package gguf reads, whole models, proof, resuming, refusals."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.cli import ktconv, ktconv_done, refused
from helpers.families import numbered, random_weights, simple_config, write_checkpoint
from helpers.gguf_files import around, biases, experts, metadata, write_gguf
from helpers.lora import sides, write_adapter

from ktconv.conversion.run import Conversion
from ktconv.formats.gguf import GGUF_FORMATS
from ktconv.source import ModelSource, open_checkpoint
from ktconv.source.reading import streamed
from ktconv.source.reading.tensors import SourceTensors
from ktconv.verify.gguf.dequantized import dequantized
from ktconv.verify.gguf.output import open_gguf_output

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_transformers")]

gguf = pytest.importorskip("gguf")

HIDDEN, INNER, EXPERTS, LAYERS = 256, 512, 3, 2


def _config(inner: int, experts: int, layers: int = 1) -> dict[str, Any]:
    return simple_config(
        hidden_size=HIDDEN,
        moe_intermediate_size=inner,
        num_experts=experts,
        num_hidden_layers=layers,
        num_experts_per_tok=2,
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _routed(tmp_path_factory.mktemp("gguf") / "model")


def _tensors(output: Path) -> dict[str, Any]:
    files = sorted(output.glob("*.gguf"))
    return {one.name: one for path in files for one in gguf.GGUFReader(path).tensors}


def _source(layer: int, proj: str) -> np.ndarray:
    return np.asarray(getattr(random_weights(HIDDEN, INNER, EXPERTS, seed=layer), proj), np.float32)


def _converted(model: Path, output: Path, method: str, *more: object) -> Path:
    ktconv_done("quantize-cpu", model, output, "--method", method, *more)
    return output


@pytest.mark.parametrize("method", GGUF_FORMATS)
def test_the_package_reads_every_type(
    model: Path, tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ktconv_done("quantize-cpu", model, tmp_path / "o", "--method", method)
    found = _tensors(tmp_path / "o")
    assert len(found) == 3 * LAYERS
    for layer in range(LAYERS):
        for proj in ("gate", "up", "down"):
            one = found[f"blk.{layer}.ffn_{proj}_exps.weight"]
            assert one.tensor_type.name == GGUF_FORMATS[method].type
            values = gguf.quants.dequantize(one.data, one.tensor_type)
            wanted = _source(layer, proj)
            off = np.linalg.norm(values - wanted) / np.linalg.norm(wanted)
            assert values.shape == wanted.shape and 0.003 < off < 0.13
    monkeypatch.setattr(streamed, "PIECE_BYTES", 1)  # several pieces of a matrix
    _decodes(tmp_path / "o", model)
    words = ("verify", tmp_path / "o", "--source", model, "--tokens", "2", "--json")
    document = json.loads(ktconv_done(*words))
    assert document["level"] == "layers"
    low, high = (0.002, 0.012) if method == "gguf-q8_0" else (0.01, 0.25)
    assert all(low < one["quantization_error"] < high for one in document["layers"]["layers"])


def _beside(path: Path, first: int = 0) -> Path:
    """A whole model, whose experts are twice those of `model`, or of another one."""
    rng = np.random.default_rng(9)
    tensors = {"token_embd.weight": rng.standard_normal((32, HIDDEN), np.float32)}
    for layer in range(LAYERS):
        weights = random_weights(HIDDEN, INNER, EXPERTS, seed=first + layer)
        for proj in ("gate", "up", "down"):
            tensors[f"blk.{layer}.ffn_{proj}_exps.weight"] = 2 * np.asarray(
                getattr(weights, proj), np.float32
            )
        name = f"blk.{layer}.ffn_gate_inp.weight"
        tensors[name] = rng.standard_normal((EXPERTS, HIDDEN), np.float32)
    about = metadata(
        LAYERS, expert_count=EXPERTS, expert_feed_forward_length=INNER, embedding_length=HIDDEN
    )
    return write_gguf(path, tensors, about)


def test_a_whole_model_has_the_other_tensors_and_metadata(model: Path, tmp_path: Path) -> None:
    beside = _beside(tmp_path / "beside.gguf")
    output = tmp_path / "o"
    ktconv_done("quantize-cpu", model, output, "--method", "gguf-q8_0", "--with", beside)
    found, given = _tensors(output), _tensors_of(beside)
    assert found.keys() == given.keys()
    for name in ("token_embd.weight", "blk.1.ffn_gate_inp.weight"):
        assert np.array_equal(found[name].data, given[name].data)
    first = gguf.GGUFReader(sorted(output.glob("*.gguf"))[0]).fields
    other = gguf.GGUFReader(beside).fields
    for key in ("general.architecture", "qwen3moe.expert_used_count"):
        assert first[key].contents() == other[key].contents()
    assert first["general.file_type"].contents() == 7
    assert first["split.count"].contents() == LAYERS + 1
    assert first["split.tensors.count"].contents() == len(given)
    ktconv_done("verify", output, "--source", model)
    # It is a source of its own.
    assert "moe layers           0-1" in ktconv_done("inspect", sorted(output.glob("*.gguf"))[0])


def test_a_file_of_another_model_of_the_same_sizes(model: Path, tmp_path: Path) -> None:
    beside, output = _beside(tmp_path / "beside.gguf", first=50), tmp_path / "o"
    result = ktconv("quantize-cpu", model, output, "--method", "gguf-q8_0", "--with", beside)
    words = f"--with {beside} is of another model: the experts of layer 0 have other weights there"
    refused(result, 2, words)
    assert not output.exists()


def _tensors_of(path: Path) -> dict[str, Any]:
    return {one.name: one for one in gguf.GGUFReader(path).tensors}


def test_importance_lowers_the_error_of_what_counts(model: Path, tmp_path: Path) -> None:
    from helpers.imatrix_files import tensors_of, write_imatrix

    from ktconv.stats.importance_file import LayerImportance

    rng = np.random.default_rng(4)
    shown = {
        layer: LayerImportance(
            counts=np.full(EXPERTS, 4096, np.int64),
            gate_up=np.exp(2 * rng.standard_normal((EXPERTS, HIDDEN))).astype(np.float32),
            down=np.exp(2 * rng.standard_normal((EXPERTS, INNER))).astype(np.float32),
        )
        for layer in range(LAYERS)
    }
    file = write_imatrix(tmp_path / "i.gguf", tensors_of(shown))
    errors = {}
    for name, more in (("plain", ()), ("weighed", ("--importance", file))):
        ktconv_done("quantize-cpu", model, tmp_path / name, "--method", "gguf-q4_k", *more)
        one = _tensors(tmp_path / name)["blk.0.ffn_up_exps.weight"]
        off = gguf.quants.dequantize(one.data, one.tensor_type) - _source(0, "up")
        errors[name] = float((shown[0].gate_up[:, None, :] * off.astype(np.float64) ** 2).sum())
    assert errors["weighed"] < 0.97 * errors["plain"]
    record = json.loads((tmp_path / "weighed/ktconv.json").read_text())
    assert record["options"]["importance"]["file"] == "i.gguf"


def test_a_run_that_was_killed_continues(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("--method", "gguf-q4_0", "--threads", "1")
    ktconv_done("quantize-cpu", model, tmp_path / "whole", *words)
    record = Conversion.record

    def stop(self: Any, unit: Any, found: Any) -> None:
        record(self, unit, found)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Conversion, "record", stop)
        assert ktconv("quantize-cpu", model, tmp_path / "o", *words).exit_code == 130
    assert "unfinished" in ktconv_done("inspect", tmp_path / "o")
    ktconv_done("quantize-cpu", model, tmp_path / "o", *words)
    for path in sorted((tmp_path / "whole").glob("*.gguf")):
        assert path.read_bytes() == (tmp_path / "o" / path.name).read_bytes()


def test_damage_is_found(model: Path, tmp_path: Path) -> None:
    output = tmp_path / "o"
    ktconv_done("quantize-cpu", model, output, "--method", "gguf-q6_k")
    path = sorted(output.glob("*.gguf"))[1]
    data = bytearray(path.read_bytes())
    data[-1000] ^= 0x11
    path.write_bytes(data)
    found = ktconv("verify", output, "--source", model, "--json")
    assert found.exit_code == 1
    checks = {one["check"] for one in json.loads(found.stdout)["failures"]}
    assert "checksum" in checks


def test_refusals(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "o"
    narrow = tmp_path / "narrow"
    weights = random_weights(HIDDEN, 96, 2, seed=1)
    tensors = numbered("model.layers.0.mlp.experts", weights)
    write_checkpoint(narrow, tensors, _config(96, 2))
    result = ktconv("quantize-cpu", narrow, out, "--method", "gguf-q4_k")
    refused(result, 2, "blocks of 256 columns, and down of layer 0 has 96")
    assert "gguf-q8_0" in result.stderr
    beside = _beside(tmp_path / "beside.gguf")
    more = ("--method", "gguf-q8_0", "--with")
    refused(ktconv("quantize-cpu", narrow, out, *more, beside), 2, "is of another model")
    refused(ktconv("quantize-cpu", model, out, *more, model), 2, "is no GGUF model")
    other = tmp_path / "other.gguf"
    other.write_bytes(beside.read_bytes().replace(b"qwen3moe", b"qwen2moe"))
    refused(
        ktconv("quantize-cpu", model, out, *more, other),
        2,
        "is of another model: its general.architecture is qwen2moe, and the model's is qwen3moe",
    )
    text, none, url = tmp_path / "beside.txt", tmp_path / "none.gguf", "hf://org/model"
    text.write_text("no model")
    for given, words, hint in (
        (text, "is no GGUF model", "convert_hf_to_gguf"),
        (none, "does not exist", "convert_hf_to_gguf"),
        (url, "is a URL", "a GGUF file on this machine"),
    ):
        result = ktconv("quantize-cpu", model, out, *more, given)
        refused(result, 2, f"--with {given} {words}")
        assert hint in result.stderr
    url = "https://user:secret@host/out"
    refused(
        ktconv("quantize-cpu", model, url, *more[:2]), 2, "the output https://host/out is a URL"
    )
    assert not out.exists()


def test_an_output_is_not_rounded_once_more(model: Path, tmp_path: Path) -> None:
    beside = _beside(tmp_path / "beside.gguf")
    ktconv_done("quantize-cpu", model, tmp_path / "o", "--method", "gguf-q4_0", "--with", beside)
    for method in ("gguf-q8_0", "int8"):
        words = ("quantize-cpu", tmp_path / "o", tmp_path / "again", "--method", method)
        refused(ktconv(*words), 2, "is an output of ktconv in gguf-q4_0", "once more")
    ktconv_done(*words, "--requantize")


def test_compare_and_push_know_the_files(model: Path, tmp_path: Path) -> None:
    for method in ("gguf-q8_0", "gguf-q4_0"):
        ktconv_done("quantize-cpu", model, tmp_path / method, "--method", method)
    words = (
        "--source",
        model,
        "--level",
        "weights",
        "--tokens",
        "1",
        "--seconds",
        "0.01",
        "--json",
    )
    found = ktconv_done("compare", tmp_path / "gguf-q8_0", tmp_path / "gguf-q4_0", *words)
    sizes = [one["bytes"] for one in json.loads(found)["rows"][1:]]
    there = [
        sum(path.stat().st_size for path in (tmp_path / method).glob("*.gguf"))
        for method in ("gguf-q8_0", "gguf-q4_0")
    ]
    assert sizes == there
    shown = ktconv_done("push", tmp_path / "gguf-q8_0", "a/b", "--dry-run")
    assert "model-00002-of-00002.gguf" in shown


def test_an_unfinished_output_is_verified(model: Path, tmp_path: Path) -> None:
    output = tmp_path / "o"
    ktconv_done("quantize-cpu", model, output, "--method", "gguf-q4_0", "--layers", "0")
    found = json.loads(ktconv("verify", output, "--source", model, "--json").stdout)
    assert {one["check"] for one in found["failures"]} == {"unfinished", "missing tensor"}
    assert found["failures"][1]["tensor"].startswith("blk.1.ffn_")
    alone = json.loads(ktconv("verify", output, "--json").stdout)
    assert [one["check"] for one in alone["failures"]] == ["unfinished"]
    assert (alone["structure"]["tensors_found"], alone["structure"]["tensors_expected"]) == (3, 6)
    refused(ktconv("bench", "--model", output), 2, "the conversion in", "is not finished")


def test_an_unfinished_output_says_what_comes_last(model: Path, tmp_path: Path) -> None:
    words = ("--method", "gguf-q4_0", "--layers", "0", "--with", _beside(tmp_path / "b.gguf"))
    shown = ktconv_done("quantize-cpu", model, tmp_path / "o", *words)
    assert "missing layer 1. The manifest is written when these are converted." in shown
    found = json.loads(ktconv("verify", tmp_path / "o", "--json").stdout)
    assert [one["check"] for one in found["failures"]] == ["unfinished"]


def test_biases_are_those_of_the_source(tmp_path: Path) -> None:
    bare = {**experts(), **around(), "blk.0.ffn_gate_inp.bias": np.zeros(4, np.float32)}
    source = {**bare, **biases()}
    model = write_gguf(tmp_path / "m.gguf", source, metadata(), architecture="gpt-oss")
    other = write_gguf(tmp_path / "bare.gguf", bare, metadata())
    words = ("quantize-cpu", model, tmp_path / "x", "--method", "gguf-q8_0", "--with", other)
    refused(ktconv(*words), 2, "with gates there, and", "with gates and biases in the model")
    output = _converted(model, tmp_path / "o", "gguf-q8_0", "--with", model)
    found = _tensors(output)
    for name, values in biases().items():
        assert found[name].tensor_type.name == "F32"
        assert np.array_equal(found[name].data, values)
    ktconv_done("verify", output, "--source", model)
    _decodes(output, model)
    (path,) = (one for one in output.glob("*.gguf") if "blk.0.ffn_up_exps.bias" in _names(one))
    data = bytearray(path.read_bytes())
    at = data.index(biases()["blk.0.ffn_up_exps.bias"].tobytes())
    data[at + 4 * (192 + 7)] ^= 1  # of expert 1, row 7
    path.write_bytes(data)
    result = ktconv("verify", output, "--source", model, "--json")
    failures = json.loads(result.stdout)["failures"]
    assert {one["check"] for one in failures} == {"checksum", "bias"}
    (wrong,) = (one["message"] for one in failures if one["check"] == "bias")
    assert "blk.0.ffn_up_exps.bias" in wrong and "of expert 1 in 1 rows, first in row 7" in wrong


def _decodes(output: Path, model: Path) -> None:
    """What levels layers and model compute with is what the package gguf reads."""
    opened, found = open_gguf_output(output, ModelSource(str(model))), _tensors(output)
    for layer in opened.source_layers.values():
        for proj in layer.projections:
            stored = found[f"blk.{layer.index}.ffn_{proj}_exps.weight"]
            values = gguf.quants.dequantize(stored.data, stored.tensor_type)
            bias = found.get(f"blk.{layer.index}.ffn_{proj}_exps.bias")
            for expert, wanted in enumerate(values):
                matrix = dequantized(opened, layer, expert, proj)
                assert np.array_equal(matrix.values(), wanted)
                if bias is None:
                    assert matrix.bias is None
                else:
                    assert matrix.bias is not None
                    assert np.array_equal(matrix.bias, bias.data[expert])


def _names(path: Path) -> set[str]:
    return {one.name for one in gguf.GGUFReader(path).tensors}


def test_a_source_is_not_overwritten(model: Path, tmp_path: Path) -> None:
    output = _converted(model, tmp_path / "o", "gguf-q8_0", "--with", _beside(tmp_path / "b.gguf"))
    before = {path.name: path.read_bytes() for path in output.iterdir()}
    again = ("--overwrite", "--requantize", "--method")
    first = sorted(output.glob("*.gguf"))[0]
    for words in (
        (first, output, *again, "gguf-q4_0"),
        (output, output, *again, "int8"),
        (model, output, *again, "gguf-q4_0", "--with", first),
    ):
        refused(ktconv("quantize-cpu", *words), 2, f"the output {output} is the directory of")
    assert {path.name: path.read_bytes() for path in output.iterdir()} == before


def test_layers_that_the_file_beside_lacks(tmp_path: Path) -> None:
    tensors = numbered("model.layers.1.mlp.experts", random_weights(HIDDEN, INNER, EXPERTS, seed=1))
    for layer in (0, 2):
        weights = random_weights(HIDDEN, INNER, EXPERTS, seed=layer)
        tensors |= numbered(f"model.layers.{layer}.mlp.experts", weights)
    config = _config(INNER, EXPERTS, LAYERS) | {"num_nextn_predict_layers": 1}
    model = write_checkpoint(tmp_path / "model", tensors, config)
    beside = _beside(tmp_path / "beside.gguf")
    words = ("quantize-cpu", model, tmp_path / "o", "--method", "gguf-q8_0", "--with", beside)
    result = ktconv(*words)
    refused(result, 2, "is of another model: it has no experts in layer 2")
    assert "--no-mtp" in result.stderr
    ktconv_done(*words, "--no-mtp")


def test_a_wrong_code_is_found_by_name(model: Path, tmp_path: Path) -> None:
    output = tmp_path / "o"
    ktconv_done("quantize-cpu", model, output, "--method", "gguf-q8_0")
    path = sorted(output.glob("*.gguf"))[0]
    data = bytearray(path.read_bytes())
    data[-1000] ^= 0x10  # of the last expert's down
    path.write_bytes(data)
    found = ktconv("verify", output, "--source", model)
    assert found.exit_code == 1
    assert "blk.0.ffn_down_exps.weight" in found.stdout + found.stderr
    assert "has 1 code of expert 2, rows 0 to 255" in " ".join(
        (found.stdout + found.stderr).split()
    )


def test_a_changed_error_in_the_manifest_is_found(model: Path, tmp_path: Path) -> None:
    """Those of a tensor are of all its experts: with a sample nothing is compared."""
    output = tmp_path / "o"
    ktconv_done("quantize-cpu", model, output, "--method", "gguf-q8_0")
    path = output / "ktconv.json"
    text = path.read_text()
    for key in ("relative_rms_error", "zero_share"):
        path.write_text(re.sub(rf'"{key}": [0-9.e-]+', f'"{key}": 0.25', text, count=1))
        found = ktconv("verify", output, "--source", model, "--json")
        assert found.exit_code == 1
        (failure,) = json.loads(found.stdout)["failures"]
        assert (failure["check"], failure["file"]) == ("manifest", "ktconv.json")
        assert f"says {key} 0.25 of blk.0.ffn_down_exps.weight, but" in failure["message"]
        ktconv_done("verify", output, "--source", model, "--sample", "0.5")


def test_compare_measures_what_kernels_compute(model: Path, tmp_path: Path) -> None:
    outputs = [_converted(model, tmp_path / one, one) for one in ("gguf-q8_0", "gguf-q5_k")]
    words = ("compare", *outputs, "--source", model, "--tokens", "1", "--seconds", "0.01")
    found = ktconv(*words, "--level", "weights", "--json")  # by default layers or model
    assert found.exit_code == 0
    eight, five = json.loads(found.stdout)["rows"][1:]
    assert eight["kernel_formats"] == ["gint8-32-f32"] and eight["tokens_per_s"]["1"] > 0
    assert "no weight format of the kernels has exactly" in five["not_measured"]


def test_other_commands_say_what_the_files_are(model: Path, tmp_path: Path) -> None:
    output = tmp_path / "o"
    ktconv_done("quantize-cpu", model, output, "--method", "gguf-q4_0")
    refused(ktconv("merge", output, tmp_path / "m"), 2, "has GGUF files, which have no NUMA parts")
    refused(ktconv("reshard", output, tmp_path / "m", "--numa", "2"), 2, "has GGUF files")
    result = ktconv("bench", "--model", _converted(model, tmp_path / "k", "gguf-q4_k"))
    refused(result, 2, "gguf-q4_k (blk.0.ffn_gate_exps.weight is Q4_K), which no weight format")
    assert "of GGUF's types they have MXFP4, Q4_0, Q8_0 exactly" in result.stderr


def _routed(folder: Path) -> Path:
    """A model with routers."""
    tensors: dict[str, Any] = {}
    for layer in range(LAYERS):
        weights = random_weights(HIDDEN, INNER, EXPERTS, seed=layer)
        tensors |= numbered(f"model.layers.{layer}.mlp.experts", weights)
        tensors[f"model.layers.{layer}.mlp.gate.weight"] = np.ones((EXPERTS, HIDDEN), np.float32)
    return write_checkpoint(folder, tensors, _config(INNER, EXPERTS, LAYERS))


def _adapter(folder: Path, *others: str) -> Path:
    rng = np.random.default_rng(5)
    shapes = {"gate": (INNER, HIDDEN), "up": (INNER, HIDDEN), "down": (HIDDEN, INNER)}
    modules = {
        f"model.layers.0.mlp.experts.{expert}.{proj}_proj": sides(rng, *shape)
        for expert in range(EXPERTS)
        for proj, shape in shapes.items()
    }
    return write_adapter(folder, modules | {name: sides(rng, EXPERTS, HIDDEN) for name in others})


def test_adapters_change_experts_alone(model: Path, tmp_path: Path) -> None:
    router = "model.layers.0.mlp.gate"
    words = ("quantize-cpu", model, tmp_path / "o", "--method", "gguf-q8_0", "--adapter")
    more = ("--with", _beside(tmp_path / "beside.gguf"))
    both = _adapter(tmp_path / "both", router)
    refused(ktconv(*words, both, *more), 2, f"--adapter changes {router}.weight, which --with")
    one = _adapter(tmp_path / "one")
    ktconv_done(*words, one, *more)
    found = _tensors(tmp_path / "o")["blk.0.ffn_up_exps.weight"]
    values = gguf.quants.dequantize(found.data, found.tensor_type)
    checkpoint = open_checkpoint(ModelSource(model, adapter=(str(one),)))
    merged = SourceTensors(checkpoint).expert(checkpoint.layers[0], 1)[1]
    assert merged is not None
    plain, wanted = _source(0, "up")[1], merged.values()
    assert np.linalg.norm(values[1] - wanted) < 0.9 * np.linalg.norm(values[1] - plain)
    assert np.linalg.norm(values[1] - wanted) < 0.006 * np.linalg.norm(wanted)
    ktconv_done("verify", tmp_path / "o", "--source", model)


def test_fewer_experts(model: Path, tmp_path: Path) -> None:
    lines = [{"layer": layer, "ids": [2, 0, 1]} for layer in range(LAYERS)]
    ranking = tmp_path / "ranking.jsonl"
    ranking.write_text("".join(json.dumps(one) + "\n" for one in lines))
    kept, output = tmp_path / "kept.json", tmp_path / "o"
    ktconv_done("prune", model, "--scores", ranking, "--keep", "2", "--write", kept)
    words = ("quantize-cpu", model, output, "--method", "gguf-q8_0", "--prune", kept)
    beside = _beside(tmp_path / "beside.gguf")
    refused(ktconv(*words, "--with", beside), 2, "has 3 experts", "and 2 experts")
    ktconv_done(*words)
    first = gguf.GGUFReader(sorted(output.glob("*.gguf"))[0]).fields
    assert first["qwen3moe.expert_count"].contents() == 2
    found = _tensors(output)["blk.1.ffn_gate_exps.weight"]
    values = gguf.quants.dequantize(found.data, found.tensor_type)
    wanted = _source(1, "gate")[[0, 2]]
    assert np.linalg.norm(values - wanted) < 0.01 * np.linalg.norm(wanted)
    ktconv_done("verify", output, "--source", model)
