"""Every family as transformers writes it, converted and held against the NumPy truth."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.convert import (
    Matrices,
    Rule,
    all_files,
    assert_output,
    assert_same,
    convert,
    matrices_of,
    read_json,
    read_model,
    source_matrices,
)
from helpers.families import (
    FAMILIES,
    Raw,
    Weights,
    bf16,
    family,
    fused,
    numbered,
    random_weights,
    simple_config,
    write_checkpoint,
    write_family,
)
from helpers.paths import EXAMPLE, MODELS

from ktconv.formats import output_formats
from ktconv.quantize.packed.run import Request, prepare

pytestmark = pytest.mark.slow

# By family: where the decoder's tensors are, and what that becomes. Everything else keeps
# its name, but for a leading "model.".
DECODERS = {
    "qwen3_5_moe": "model.language_model.",
    "qwen3_vl_moe": "model.language_model.",
}


def others_of(model: Path, decoder: str = "model.") -> dict[str, Raw]:
    """The non-expert tensors of a checkpoint under the names that the output must have."""
    tensors = {}
    for name, tensor in read_model(model).items():
        if ".experts." in name:
            continue
        rest = name.removeprefix(decoder) if name.startswith(decoder) else name
        rest = rest.removeprefix("model.")
        tensors["blk." + rest[7:] if rest.startswith("layers.") else rest] = tensor
    return tensors


class Model:
    """A checkpoint with its truth, which is computed once."""

    def __init__(self, path: Path, decoder: str = "model.") -> None:
        self.path = path
        self.matrices = source_matrices(path)
        self.others = others_of(path, decoder)

    def parts(self, method: str) -> list[int]:
        """The part counts that the dimensions allow: whole tiles of 64 or 128 columns."""
        tile = {"int4": 128, "int8": 64}[method]
        inner = min(values.shape[1] for key, values in self.matrices.items() if key[2] == "down")
        return [count for count in range(1, inner + 1) if inner % (count * tile) == 0]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Model]:
    """Models by family name, each written once."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    root, written = tmp_path_factory.mktemp("families"), {}

    def get(name: str) -> Model:
        if name not in written:
            write_family(name, root / name)
            written[name] = Model(root / name, DECODERS.get(name, "model."))
        return written[name]

    return get


def convert_and_check(
    model: Model, output: Path, method: str, numa: int, scale: Rule = "search"
) -> None:
    report = convert(model.path, output, method=method, numa=numa, scale=scale, threads=2)
    assert report.source_bytes == sum(
        len(tensor.data) for tensor in read_model(model.path).values()
    )
    assert_output(output, model.matrices, model.others, method=method, numa=numa, scale=scale)


@pytest.mark.parametrize("method", list(output_formats()))
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_is_quantized_as_by_the_reference(
    name: str, method: str, model: Callable[[str], Model], tmp_path: Path
) -> None:
    """All NUMA counts, the last one with the search for scales, which takes the reference long;
    experts equal the truth, everything else is copied."""
    source = model(name)
    layers = sorted({layer for layer, _, _ in source.matrices})
    assert layers == list(family(name).layers)
    assert family(name).intermediate // {"int4": 128, "int8": 64}[method] in source.parts(method)
    *parts, last = source.parts(method)
    for numa in parts:
        convert_and_check(source, tmp_path / str(numa), method, numa, "amax")
    convert_and_check(source, tmp_path / str(last), method, last)
    manifest = read_json(tmp_path / "1" / "ktconv.json")
    assert (
        manifest["geometry"]["model_type"] == read_json(source.path / "config.json")["model_type"]
    )
    for name_of_file in ("config.json", "generation_config.json"):
        if (original := source.path / name_of_file).exists():
            assert (tmp_path / "1" / name_of_file).read_bytes() == original.read_bytes()


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_converting_a_family_in_other_dtypes(
    dtype: str, tmp_path: Path, model: Callable[[str], Model]
) -> None:
    """From fp32 values and not through bf16; --compat takes the detour."""
    model("qwen3_moe")  # skips without transformers
    write_family("qwen3_moe", tmp_path / "model", dtype)
    source = Model(tmp_path / "model")
    outputs = []
    for method, numa in (("int4", 1), ("int8", 2)):
        for compat in (False, True):
            output = tmp_path / f"{method}-{compat}"
            convert(source.path, output, method=method, numa=numa, compat=compat)
            assert_output(
                output, source.matrices, source.others, method=method, numa=numa, compat=compat
            )
            outputs.append(read_model(output))
    assert outputs[0] != outputs[1], "the detour must show"
    assert outputs[2] != outputs[3], "the detour must show"


def test_converting_gpt_oss_is_refused(tmp_path: Path) -> None:
    from ktconv.errors import CheckpointError

    pytest.importorskip("transformers")
    write_family("gpt_oss", tmp_path / "model")
    with pytest.raises(CheckpointError, match=r"with biases \(.*\); KTransformers' AMXINT4"):
        convert(tmp_path / "model", tmp_path / "output")
    assert not (tmp_path / "output").exists()


# ---- multi-token prediction ------------------------------------------------------------


def without_layer(matrices: Matrices, index: int) -> Matrices:
    return {key: values for key, values in matrices.items() if key[0] != index}


def test_converting_the_mtp_layer_of_deepseek_v3(
    tmp_path: Path, model: Callable[[str], Model]
) -> None:
    """Layer num_hidden_layers is converted like the others, and the plan says so."""
    source = model("deepseek_v3")
    request = Request(str(source.path), tmp_path / "with")
    assert any("layer 3 is an MTP layer" in note for note in prepare(request).plan.notes)
    convert_and_check(source, tmp_path / "with", "int4", 1)
    written = read_model(tmp_path / "with")
    assert "blk.3.ffn_gate_exps.3.numa.0.weight" in written
    assert {"blk.3.eh_proj.weight", "blk.3.shared_head.head.weight"} <= written.keys()


def test_no_mtp_on_deepseek_v3(tmp_path: Path, model: Callable[[str], Model]) -> None:
    """--no-mtp leaves out the layer with all its tensors, and the plan says what."""
    source = model("deepseek_v3")
    report = convert(source.path, tmp_path / "out", mtp=False)
    skipped = " / ".join(report.preflight.plan.skipped)
    gone = {name for name in source.others if name.startswith("blk.3.")}
    assert "MTP layer 3: --no-mtp" in skipped
    assert f"{len(gone)} other tensors of MTP layers: --no-mtp" in skipped
    others = {name: tensor for name, tensor in source.others.items() if name not in gone}
    matrices = without_layer(source.matrices, 3)
    assert_output(tmp_path / "out", matrices, others, method="int4", numa=1)


def mtp_stack(directory: Path, source: str) -> tuple[Path, dict[int, Weights]]:
    """Two decoder layers, and one in an `mtp` stack of its own as Qwen3-Next has it."""
    weights = {index: random_weights(seed=index) for index in range(3)}
    tensors = numbered("model.layers.0.mlp.experts", weights[0])
    tensors |= fused("model.layers.1.mlp.experts", weights[1], transposed=False)
    tensors |= numbered(source, weights[2])
    root = source.split(".")[0]
    for name in ("model.norm", f"{root}.fc", f"{root}.norm", "mtprojector"):
        tensors[f"{name}.weight"] = bf16(np.ones((3, 5)))
    return write_checkpoint(directory, tensors, simple_config(num_hidden_layers=2)), weights


@pytest.mark.parametrize("source", ["mtp.layers.0.mlp.experts", "mtp.0.ffn.experts"])
def test_mtp_stack(source: str, tmp_path: Path) -> None:
    """It counts on from num_hidden_layers; layer 0 of `mtp` is not layer 0."""
    path, weights = mtp_stack(tmp_path / "model", source)
    others = others_of(path)
    assert {"mtp.fc.weight", "mtp.norm.weight", "norm.weight", "mtprojector.weight"} == set(others)
    report = convert(path, tmp_path / "with", numa=1)
    assert f"layer 2 is an MTP layer ({source})" in report.preflight.plan.notes
    assert_output(tmp_path / "with", matrices_of(weights), others, method="int4", numa=1)
    report = convert(path, tmp_path / "without", mtp=False)
    assert "MTP layer 2: --no-mtp" in report.preflight.plan.skipped
    assert "2 other tensors of MTP layers: --no-mtp" in report.preflight.plan.skipped
    kept = {name: tensor for name, tensor in others.items() if not name.startswith("mtp.")}
    matrices = without_layer(matrices_of(weights), 2)
    assert_output(tmp_path / "without", matrices, kept, method="int4", numa=1)


# ---- trained weights -------------------------------------------------------------------


@pytest.fixture(scope="session")
def trained() -> Callable[[Path], Model]:
    """Trained models by directory, each read once."""
    read: dict[Path, Model] = {}

    def get(path: Path) -> Model:
        if not path.is_dir():
            pytest.skip(f"{path.name} is not on this machine")
        if path not in read:
            read[path] = Model(path)
        return read[path]

    return get


PARTS = [("int4", 1), ("int4", 2), ("int8", 1), ("int8", 2), ("int8", 4)]
TRAINED = [(path, *part) for path in (MODELS / "tiny-qwen3moe", EXAMPLE) for part in PARTS]
TRAINED += [(MODELS / "tiny-deepseekv3", *part) for part in (PARTS[1], PARTS[-1])]


@pytest.mark.parametrize(
    ("path", "method", "numa"), TRAINED, ids=lambda one: getattr(one, "name", str(one))
)
def test_trained(
    path: Path, method: str, numa: int, trained: Callable[[Path], Model], tmp_path: Path
) -> None:
    """Whole matrices by the search for scales, parts by largest weights."""
    source, output = trained(path), tmp_path / "out"
    assert source.parts(method) == {"int4": [1, 2], "int8": [1, 2, 4]}[method]
    options: dict[str, Any] = {"method": method, "numa": numa}
    options["scale"] = "search" if numa == 1 else "amax"
    report = convert(path, output, threads=2, **options)
    assert_output(output, source.matrices, source.others, **options)
    assert report.worst is not None
    assert report.mean_error is not None
    low, high = {"int4": (0.05, 0.2), "int8": (0.002, 0.02)}[method]
    assert low < report.mean_error < high
    assert report.mean_error <= report.worst[1] < 2 * high


def test_example_twice(tmp_path: Path) -> None:
    """What ships converts to the same files again, manifest and card included."""
    convert(EXAMPLE, tmp_path / "a" / "out", numa=2)
    convert(EXAMPLE, tmp_path / "b" / "elsewhere", numa=2, threads=3)
    assert_same(all_files(tmp_path / "a" / "out"), all_files(tmp_path / "b" / "elsewhere"))
