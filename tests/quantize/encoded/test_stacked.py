"""`--expert-layout`: experts of a layer in one tensor have the numbers of numbered ones."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.cli import ktconv, refused
from helpers.convert import all_files, read_model
from helpers.corrupt import check, found
from helpers.families import Raw, write_checkpoint
from helpers.family_list import MODELS
from helpers.family_models import write
from helpers.gpu import ending, stacked
from helpers.gpu_corrupt import change
from helpers.layered import EXPERTS, HIDDEN, INNER, layered_model
from helpers.nemotron import write_nemotron
from helpers.recoded import encode

from ktconv import native
from ktconv.source import open_checkpoint
from ktconv.source.reading.matrices import MatrixReader, buffer_bytes
from ktconv.source.reading.reader import BOUNCE_BYTES, SourceReader
from ktconv.targets.encoded import readers
from ktconv.targets.encoded.names import fits
from ktconv.targets.encoded.readers import readers_of
from ktconv.targets.encoded.scheme import names_of

SCHEMES = names_of("quantize-gpu")
STACKED = ("stacked", "stacked-flat")
Made = Callable[..., Path]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return layered_model(tmp_path_factory.mktemp("stacked") / "model", 2)


@pytest.fixture(scope="module")
def made(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Outputs by scheme and layout."""
    where = tmp_path_factory.mktemp("made")

    def get(scheme: str = "W4A16", layout: str = "numbered") -> Path:
        output = where / f"{scheme}-{layout}"
        if not output.exists():
            encode(model, output, scheme, expert_layout=layout)
        return output

    return get


def values(path: Path) -> dict[tuple[int, int, str], np.ndarray[Any, Any]]:
    """All experts of a checkpoint, decoded."""
    checkpoint = open_checkpoint(str(path))
    reader = SourceReader(checkpoint.files, checkpoint.sources)
    decoded = {}
    for layer in checkpoint.layers:
        for expert, matrices in enumerate(layer.experts):
            for proj, matrix in matrices.items():
                source = MatrixReader(reader, matrix)
                sizes = buffer_bytes(matrix, matrix.rows), BOUNCE_BYTES
                buffers = (np.empty(size, np.uint8) for size in sizes)
                rows = [native.decode(view) for _, view in source.views(*buffers)]
                decoded[layer.index, expert, str(proj)] = np.concatenate(rows)
    return decoded


@pytest.mark.parametrize("layout", STACKED)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_bytes_are_those_of_numbered_experts(
    scheme: str, layout: str, made: Made, model: Path
) -> None:
    output = made(scheme, layout)
    tensors = read_model(output)
    assert tensors == stacked(read_model(made(scheme)), layout)
    index = json.loads((output / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == tensors.keys()
    assert index["metadata"]["total_size"] == sum(len(one.data) for one in tensors.values())
    gate_up = "weight_packed" if "16" in scheme else "weight"
    name = f"model.layers.1.mlp.experts.gate_up_proj{ending(layout, gate_up)}"
    assert tensors[name].shape[:2] == (EXPERTS, 2 * INNER)
    level = "layers" if scheme == "W4A16" else "weights"
    assert check(output, model, level).passed and check(output).passed


@pytest.mark.parametrize("layout", STACKED)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_read_again_as_a_source(scheme: str, layout: str, made: Made) -> None:
    """Every expert, slice by slice."""
    one, other = values(made(scheme)), values(made(scheme, layout))
    assert one.keys() == other.keys()
    assert all(np.array_equal(one[key].view("u4"), other[key].view("u4")) for key in one)


def test_a_second_scale_for_gate_and_one_for_up(made: Made, tmp_path: Path) -> None:
    """Of another tool: the same for both is what ours has."""
    output = tmp_path / "out"
    shutil.copytree(made("NVFP4A16", "stacked"), output)

    def twice_up(data: np.ndarray[Any, Any]) -> None:
        data.view("<f4").reshape(EXPERTS, 2)[1, 1] *= 2

    change(output, "model.layers.0.mlp.experts.gate_up_proj.weight_global_scale", twice_up)
    before, after = values(made("NVFP4A16", "stacked")), values(output)
    wrong = [key for key in before if not np.array_equal(before[key], after[key])]
    assert wrong == [(0, 1, "up")]
    np.testing.assert_array_equal(2 * after[0, 1, "up"], before[0, 1, "up"])


@pytest.mark.parametrize("layout", STACKED)
def test_layer_by_layer_with_any_number_of_threads(
    layout: str, made: Made, model: Path, tmp_path: Path
) -> None:
    """A finished layer is kept, and the same command again finds nothing to do."""
    first = encode(model, tmp_path, "W4A16", expert_layout=layout, layers=[1], threads=4)
    assert first.converted == ["layer-00001", "other-00001"]
    rest = encode(model, tmp_path, "W4A16", expert_layout=layout, threads=1)
    assert rest.complete and rest.converted == ["layer-00000"]
    assert encode(model, tmp_path, "W4A16", expert_layout=layout).converted == []
    assert all_files(tmp_path) == all_files(made("W4A16", layout))


def test_another_layout_does_not_continue(made: Made, model: Path, tmp_path: Path) -> None:
    encode(model, tmp_path / "out", "W4A16", expert_layout="stacked", layers=[0])
    words = ["quantize-gpu", model, tmp_path / "out", "--expert-layout"]
    assert "expert_layout" in refused(ktconv(*words, "stacked-flat"), 2)


@pytest.mark.parametrize("layout", STACKED)
def test_damage_is_found_in_its_expert(
    layout: str, made: Made, model: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    shutil.copytree(made("W4A16", layout), output)
    name = f"model.layers.1.mlp.experts.gate_up_proj{ending(layout, 'weight_packed')}"
    at = (2 * 2 * INNER + INNER) * HIDDEN // 2  # expert 2: the first of up

    def flip(data: np.ndarray[Any, Any]) -> None:
        data[at] ^= 1

    change(output, name, flip)
    (failure,) = found(check(output), "structure", "checksum")
    slot = "model.layers.1.mlp.experts.2.up_proj.weight_packed"
    assert failure["tensor"] == slot
    assert not check(output, model).passed
    assert slot in refused(ktconv("push", output, "me/it", "--dry-run"), 2)


def test_a_missing_stacked_tensor(made: Made, model: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    shutil.copytree(made("W4A16", "stacked"), output)
    name = "experts.down_proj.weight_scale"
    for path in [*output.glob("*.safetensors"), output / "model.safetensors.index.json"]:
        path.write_bytes(path.read_bytes().replace(name.encode(), name.upper().encode()))
    result = check(output, model)
    names = {failure.as_dict().get("tensor") for failure in result.failures}
    assert "model.layers.0.mlp.experts.3.down_proj.weight_scale" in names


def test_experts_without_a_gate(tmp_path: Path) -> None:
    model = write_nemotron(tmp_path / "model")[0]
    outputs = [tmp_path / layout for layout in ("numbered", *STACKED)]
    for output in outputs:
        encode(model, output, "W4A16", expert_layout=output.name)
        assert check(output, model).passed
    numbered, *others = (read_model(output) for output in outputs)
    for layout, tensors in zip(STACKED, others, strict=True):
        assert tensors == stacked(numbered, layout)
    assert any(name.endswith("experts.up_proj.weight_packed") for name in others[0])


def test_config_finds_numbered_and_stacked_modules(made: Made) -> None:
    section = json.loads((made("W4A16", "stacked") / "config.json").read_text())
    target, _ = section["quantization_config"]["config_groups"]["experts"]["targets"]
    where = "model.layers.1.mlp.experts"
    assert all(fits(target, f"{where}.{one}") for one in ("gate_up_proj", "down_proj"))
    assert fits(target, f"{where}.7.up_proj")
    assert not fits(target, "model.layers.1.mlp.shared_experts.gate_up_proj")


@pytest.mark.parametrize("layout", STACKED)
@pytest.mark.parametrize("scheme", ["W4A16", "FP8_DYNAMIC", "NVFP4A16"])
def test_a_checkpoint_of_another_tool(
    scheme: str, layout: str, made: Made, model: Path, tmp_path: Path
) -> None:
    """Without a manifest: the tensors show that experts are stacked, and how they are named."""
    shutil.copytree(made(scheme, layout), tmp_path / "out")
    (tmp_path / "out" / "ktconv.json").unlink()
    assert check(tmp_path / "out", model, "weights").passed
    assert check(tmp_path / "out").passed


@pytest.mark.parametrize("layout", STACKED)
def test_of_another_tool_for_a_family_with_other_names(layout: str, tmp_path: Path) -> None:
    """Numbered experts are called w1, w2 and w3 there, stacked ones are not."""
    model, output = tmp_path / "model", tmp_path / "out"
    write(MODELS["MiniMax-M2 FP8"], model)
    encode(model, output, "W8A16", expert_layout=layout)
    (output / "ktconv.json").unlink()
    assert check(output, model, "weights").passed
    name = f"model.layers.0.block_sparse_moe.experts.down_proj{ending(layout, 'weight_scale')}"

    def quadruple(data: np.ndarray[Any, Any]) -> None:
        data[1] += 1  # of bf16

    change(output, name, quadruple)
    failures = check(output, model, "weights").failures
    (module,) = {failure.as_dict()["tensor"].rpartition(".")[0] for failure in failures}
    assert module == "model.layers.0.block_sparse_moe.experts.0.down_proj"


@pytest.mark.parametrize("layout", ["sideways", ["stacked"], {"stacked": 1}, 3])
def test_a_layout_in_the_manifest_that_there_is_not(
    layout: object, made: Made, tmp_path: Path
) -> None:
    """The manifest is damaged; the tensors show how experts lie."""
    output = tmp_path / "out"
    shutil.copytree(made("W4A16", "stacked"), output)
    manifest = json.loads((output / "ktconv.json").read_text())
    manifest["options"]["expert_layout"] = layout
    (output / "ktconv.json").write_text(json.dumps(manifest))
    assert len(found(check(output), "structure", "manifest")) == 1
    assert ktconv("inspect", output).exit_code == 0
    refused(ktconv("push", output, "me/it", "--dry-run"), 2)


@pytest.mark.parametrize("recorded", ["numbered", "stacked-flat"])
def test_another_layout_in_the_manifest_than_in_the_files(
    recorded: str, made: Made, model: Path, tmp_path: Path
) -> None:
    """One sentence; not every tensor as missing."""
    output = shutil.copytree(made("W4A16", "stacked"), tmp_path / "o")
    manifest = json.loads((output / "ktconv.json").read_text())
    del manifest["options"]["expert_layout"]  # numbered
    if recorded != "numbered":
        manifest["options"]["expert_layout"] = recorded
    (output / "ktconv.json").write_text(json.dumps(manifest))
    words = f"says that experts are {recorded}, and in the files they are stacked"
    refused(ktconv("verify", output, "--source", model), 2, words)


def test_what_is_said(made: Made, model: Path, tmp_path: Path) -> None:
    done = ktconv("quantize-gpu", model, tmp_path, "--expert-layout", "stacked", "--dry-run")
    assert done.exit_code == 0
    for said in ("vLLM 0.32 ends", "transformers 5.17 fills", "SGLang 0.5.23 leaves"):
        assert said in " ".join(done.stdout.split())
    assert "W4A16 with --expert-layout stacked is not for vLLM: vLLM" in done.stdout
    card = " ".join((made("W4A16", "stacked-flat") / "README.md").read_text().split())
    assert "vLLM 0.32 reads it. SGLang" in card and "library_name: vllm" in card
    assert "--expert-layout stacked-flat" in card
    about = ktconv("inspect", made("W4A16", "stacked-flat"), "--json")
    document = json.loads(about.stdout)
    assert document["expert_layout"] == "stacked-flat" and document["complete"]
    assert document["expert_bytes"] == sum(
        len(one.data)
        for name, one in read_model(made("W4A16", "stacked-flat")).items()
        if ".experts." in name
    )


@pytest.mark.parametrize(
    ("kind", "layout", "said"),
    [
        ("olmoe", "stacked", "ends with an error about the names of stacked experts"),
        ("olmoe", "stacked-flat", None),
        ("mixtral", "stacked-flat", "leaves stacked experts out without an error"),
        ("glm4_moe", "stacked-flat", "was tried with stacked experts of olmoe, qwen2_moe and"),
        ("glm4_moe", "numbered", None),
    ],
)
def test_what_vllm_does_by_family(kind: str, layout: str, said: str | None) -> None:
    found = readers.why_not_stacked(readers.VLLM, "W4A16", layout, [kind])
    assert found is None if said is None else said in str(found)


def test_what_is_said_by_scheme(made: Made) -> None:
    """transformers has weights of the names and the dtype that codes of FP8 have."""
    for scheme, said, of_vllm in (
        ("W4A16", "fills stacked experts with random", None),
        ("NVFP4A16", "computes wrong results", "in W4A16 alone"),
        ("FP8_DYNAMIC", "takes codes of stacked experts for weights", "in W4A16 alone"),
    ):
        checkpoint = open_checkpoint(str(made(scheme, "numbered")))
        found = readers_of(scheme, checkpoint, "stacked-flat")
        assert said in str(found[readers.TRANSFORMERS])
        assert of_vllm in str(found[readers.VLLM]) if of_vllm else found[readers.VLLM] is None
        other = readers_of(scheme, checkpoint, "stacked")[readers.TRANSFORMERS]
        assert "takes codes" not in str(other)


def test_half_precision_beside_bf16(tmp_path: Path) -> None:
    """A tensor has scales of one dtype."""
    tensors = read_model(layered_model(tmp_path / "one", 1))
    name = "model.layers.0.mlp.experts.1.up_proj.weight"
    bits = np.frombuffer(tensors[name].data, "<u2").astype("<u4") << 16
    half = bits.view("<f4").astype("<f2")
    config = json.loads((tmp_path / "one" / "config.json").read_text())
    changed = {**tensors, name: Raw("F16", tensors[name].shape, half.tobytes())}
    mixed = write_checkpoint(tmp_path / "mixed", changed, config)
    words = ["quantize-gpu", mixed, tmp_path / "out", "--expert-layout", "stacked"]
    assert "scales of one dtype" in refused(ktconv(*words), 2)
    assert ktconv(*words, "--scheme", "FP8_BLOCK").exit_code == 0
