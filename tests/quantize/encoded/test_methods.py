"""Every format that experts of a checkpoint are encoded in: names, numbers, config, proof."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple, get_args

import numpy as np
import pytest
from helpers.cli import ktconv, ktconv_done, write_model
from helpers.convert import read_json, read_model
from helpers.corrupt import check
from helpers.encoded import KINDS, encoded_model, of_packed
from helpers.families import (
    Raw,
    Weights,
    bf16,
    numbered,
    random_weights,
    simple_config,
    write_checkpoint,
)
from helpers.gpu_corrupt import find, flip
from helpers.recoded import change_recorded, encode, values_of

from ktconv import native
from ktconv.cli.encode import ENCODED_METHODS
from ktconv.cli.quantize_gpu import Scheme as GpuScheme
from ktconv.errors import CheckpointError, UsageError
from ktconv.source import open_checkpoint
from ktconv.source.reading.matrices import MatrixReader
from ktconv.source.reading.reader import SourceReader
from ktconv.targets.encoded.scheme import FORMATS, ROWS, SCHEMES, Scheme, group_size_of, names_of
from ktconv.targets.encoded.target import EncodedTarget
from ktconv.verify.encoded.output import is_gpu_output

pytestmark = pytest.mark.slow

HIDDEN, INNER, EXPERTS = 256, 384, 3
SOURCE = "model.layers.0.mlp.experts"
ALL = [row.name for row in ROWS]
# Relative RMS errors of normally distributed weights.
ERRORS = {"int4": (0.09, 0.125), "int8": (0.004, 0.009), "fp8": (0.02, 0.03), "bf16": (0, 0.003)}
ERRORS |= {"mxfp4": (0.1, 0.13), "mxfp8": (0.02, 0.03), "nvfp4": (0.08, 0.11)}


def _weights() -> Weights:
    """With a row of zeros, one of denormals of bf16, a huge and a tiny one."""
    weights = random_weights(HIDDEN, INNER, EXPERTS, seed=3)
    up = weights.up.copy()
    up[1, 5], up[1, 6] = 0, np.float32(2.0**-133)
    up[2, 7] *= np.float32(2.0**40)
    up[2, 8] *= np.float32(2.0**-100)
    return Weights(weights.gate, up, weights.down)


ORDINARY = random_weights(HIDDEN, INNER, EXPERTS, seed=3)


def _model(directory: Path, weights: Weights, **changes: Any) -> Path:
    config = simple_config(
        hidden_size=HIDDEN, moe_intermediate_size=INNER, num_experts=EXPERTS, **changes
    )
    others = {
        "model.embed_tokens.weight": bf16(np.ones((16, HIDDEN), np.float32)),
        "model.layers.0.self_attn.q_proj.weight": bf16(np.ones((32, HIDDEN), np.float32)),
        "model.layers.0.mlp.gate.weight": bf16(np.ones((EXPERTS, HIDDEN), np.float32)),
        "lm_head.weight": bf16(np.ones((16, HIDDEN), np.float32)),
    }
    return write_checkpoint(directory, {**numbered(SOURCE, weights), **others}, config)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _model(tmp_path_factory.mktemp("encode") / "model", ORDINARY)


@pytest.fixture(scope="module")
def made(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    found: dict[str, Path] = {}

    def get(scheme: str) -> Path:
        if scheme not in found:
            found[scheme] = tmp_path_factory.mktemp("made") / scheme
            encode(model, found[scheme], scheme)
        return found[scheme]

    return get


class Place(NamedTuple):
    module: str
    wanted: np.ndarray


def places(model: Path, scheme: str, weights: Weights = ORDINARY) -> Iterator[Place]:
    """Modules of an output with the values of their source."""
    checkpoint = open_checkpoint(str(model))
    target = EncodedTarget(_options(scheme), checkpoint)
    for expert in range(EXPERTS):
        for proj in ("gate", "up", "down"):
            module = target.module(checkpoint.layers[0], expert, proj)
            yield Place(module, getattr(weights, proj)[expert])


def _options(scheme: str) -> Any:
    from ktconv.targets.encoded.target import Options

    return Options(scheme=scheme, group_size=group_size_of(scheme))


# ---- the table -------------------------------------------------------------------------


def test_choices_of_the_commands_are_those_of_the_table() -> None:
    assert tuple(names_of("quantize-cpu")) == ENCODED_METHODS
    assert get_args(GpuScheme) == tuple(names_of("quantize-gpu"))


def test_manifests_tell_encoded_experts_from_packed_ones() -> None:
    assert "AMXINT4" not in FORMATS and "pack-quantized" in FORMATS


@pytest.mark.parametrize("name", ALL)
def test_shapes_hold_what_the_encoder_makes(name: str) -> None:
    """Bytes of the planned tensors are those of dtype and shape."""
    sizes = {"F32": 4, "I32": 4, "I64": 8, "BF16": 2, "F16": 2}
    scheme = Scheme(name, group_size_of(name))
    for half in ("BF16", "F16"):
        for tensor in scheme.tensors("m", 384, 256, half):
            assert tensor.nbytes == int(np.prod(tensor.shape)) * sizes.get(tensor.dtype, 1)


# ---- numbers ---------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ALL)
def test_values_are_near_their_source(
    scheme: str, model: Path, made: Callable[[str], Path]
) -> None:
    tensors, row = read_model(made(scheme)), SCHEMES[scheme]
    low, high = ERRORS[row.kind]
    manifest = read_json(made(scheme) / "ktconv.json")
    records = {k: v for unit in manifest["units"].values() for k, v in unit["tensors"].items()}
    for module, wanted in places(model, scheme):
        found = values_of(tensors, module, *wanted.shape)
        error = float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))
        assert low <= error <= high, module
        told = records[f"{module}.{row.layout.parts[0]}"]
        assert told["relative_rms_error"] == pytest.approx(error, rel=1e-3, abs=1e-7)
        assert told["zero_share"] == pytest.approx(float((found == 0).mean()), abs=1e-4)


@pytest.mark.parametrize("scheme", ALL)
def test_verify_proves_it(scheme: str, model: Path, made: Callable[[str], Path]) -> None:
    assert is_gpu_output(made(scheme))
    result = check(made(scheme), model)
    assert result.passed, result.failures
    assert result.facts["weights"]["matrices"] == 3 * EXPERTS
    assert result.facts["structure"]["copied_tensors"] == 4
    assert result.facts["method"] == (
        scheme if SCHEMES[scheme].command == "quantize-cpu" else "rtn"
    )
    assert check(made(scheme)).passed  # without the source


@pytest.mark.parametrize("scheme", ALL)
def test_unusual_numbers(scheme: str, tmp_path: Path) -> None:
    """Zeros, denormals, huge and tiny rows; scales that would overflow are refused."""
    model = _model(tmp_path / "model", _weights())
    try:
        encode(model, tmp_path / "out", scheme)
    except CheckpointError as error:
        assert SCHEMES[scheme].half
        assert "f16" in str(error)
        return
    assert check(tmp_path / "out", model).passed


@pytest.mark.parametrize("scheme", [name for name in ALL if SCHEMES[name].layout.name != "awq"])
def test_our_reader_reads_it(scheme: str, model: Path, made: Callable[[str], Path]) -> None:
    """An output is a source: what it stands for is what plain NumPy reads."""
    tensors = read_model(made(scheme))
    layer = open_checkpoint(str(made(scheme))).layers[0]
    checkpoint = open_checkpoint(str(made(scheme)))
    reader = SourceReader(checkpoint.files, checkpoint.sources)
    matrices = [one[proj] for one in layer.experts for proj in ("gate", "up", "down")]
    for matrix, (module, wanted) in zip(matrices, places(model, scheme), strict=True):
        buffer, bounce = np.empty(1 << 20, np.uint8), np.empty(1 << 20, np.uint8)
        decoded = [rows for _, rows in MatrixReader(reader, matrix).decoded(buffer, bounce)]
        found = np.concatenate(decoded)
        assert np.array_equal(found, values_of(tensors, module, *wanted.shape))


def test_gate_and_up_share_their_second_scale(model: Path, made: Callable[[str], Path]) -> None:
    """Engines compute both as one matrix; down has one of its own."""
    for scheme, part in (("NVFP4A16", "weight_global_scale"), ("nvfp4", "weight_scale_2")):
        tensors = read_model(made(scheme))
        names = [f"{SOURCE}.1.{proj}_proj.{part}" for proj in ("gate", "up", "down")]
        gate, up, down = (tensors[name].data for name in names)
        assert gate == up != down


@pytest.mark.parametrize("scheme", ["W4A16", "rawint4", "mxfp4", "NVFP4A16", "gptq-int4"])
def test_bits_do_not_depend_on_the_instruction_set(
    scheme: str, model: Path, made: Callable[[str], Path], tmp_path: Path
) -> None:
    words = ["--method", scheme] if SCHEMES[scheme].command == "quantize-cpu" else []
    words = words or ["--scheme", scheme]
    words += ["--scale", "amax"] if SCHEMES[scheme].is_int else []
    expected, before = read_model(made(scheme)), native.isa()
    native.use_isa("scalar")
    try:
        ktconv_done(SCHEMES[scheme].command, model, tmp_path / "out", *words)
        assert native.isa() == "scalar" != before or len(native.isa_available()) == 1
    finally:
        native.use_isa(before)
    assert read_model(tmp_path / "out") == expected


SEARCHED = [name for name in ALL if SCHEMES[name].is_int]


@pytest.mark.parametrize("scheme", SEARCHED)
def test_searched_scales_have_smaller_errors(
    scheme: str, model: Path, made: Callable[[str], Path], tmp_path: Path
) -> None:
    """And the same tensors; verify proves them, and finds a wrong bit."""
    encode(model, tmp_path / "out", scheme, scale="search")
    usual, found = read_model(made(scheme)), read_model(tmp_path / "out")
    assert {name: (raw.dtype, raw.shape) for name, raw in found.items()} == {
        name: (raw.dtype, raw.shape) for name, raw in usual.items()
    }
    for module, wanted in places(model, scheme):
        errors = [
            np.linalg.norm(values_of(tensors, module, *wanted.shape) - wanted)
            for tensors in (found, usual)
        ]
        assert errors[0] < 0.97 * errors[1]
    assert check(tmp_path / "out", model).passed
    assert check(tmp_path / "out").passed
    for part in SCHEMES[scheme].layout.parts[:2]:
        shutil.rmtree(tmp_path / "copy", ignore_errors=True)
        shutil.copytree(tmp_path / "out", tmp_path / "copy")
        change_recorded(tmp_path / "copy", f"{module}.{part}", flip)
        assert not check(tmp_path / "copy", model).passed


# ---- names and config.json -------------------------------------------------------------


@pytest.mark.parametrize(
    ("scheme", "name"),
    [
        ("rawint4", "model.layers.0.mlp.experts.1.up_proj.weight_packed"),
        ("fp8", "model.layers.0.mlp.experts.1.up_proj.weight_scale_inv"),
        ("mxfp4", "layers.0.ffn.experts.1.w3.scale"),
        ("mxfp8", "model.layers.0.block_sparse_moe.experts.1.w3.weight_scale_inv"),
        ("nvfp4", "model.layers.0.mlp.experts.1.up_proj.weight_scale_2"),
        ("awq", "blk.0.ffn_up_exps.1.qzeros"),
        ("gptq-int4", "model.layers.0.mlp.experts.1.up_proj.qweight"),
        ("MXFP8", "model.layers.0.mlp.experts.1.up_proj.weight_scale"),
        ("MXFP4A16", "model.layers.0.mlp.experts.1.up_proj.weight_packed"),
    ],
)
def test_names_are_those_of_the_reader(scheme: str, name: str, made: Callable[[str], Path]) -> None:
    assert name in read_model(made(scheme))


@pytest.mark.parametrize(
    ("scheme", "source", "kept"),
    [
        ("rawint4", "language_model.model.layers.0.mlp.experts", True),
        ("rawint4", "model.layers.0.block_sparse_moe.experts", False),
        ("fp8", "model.layers.0.block_sparse_moe.experts", True),
        ("mxfp4", "layers.0.ffn.experts", True),
        ("mxfp8", "language_model.model.layers.0.block_sparse_moe.experts", True),
        ("W4A16", "model.layers.0.block_sparse_moe.experts", True),
    ],
)
def test_own_names_stay_where_the_loader_knows_them(
    scheme: str, source: str, kept: bool, tmp_path: Path
) -> None:
    spelled = ("gate_proj", "up_proj", "down_proj") if ".mlp." in source else ("w1", "w3", "w2")
    config = simple_config(hidden_size=HIDDEN, moe_intermediate_size=INNER, num_experts=EXPERTS)
    tensors = numbered(source, ORDINARY, spelled)
    model = write_checkpoint(tmp_path / "model", tensors, config)
    encode(model, tmp_path / "out", scheme)
    named = [name for name in read_model(tmp_path / "out") if ".experts." in name]
    assert all(name.startswith(source) for name in named) == kept
    assert check(tmp_path / "out", model).passed


def test_experts_come_first_in_the_shards(made: Callable[[str], Path]) -> None:
    """KTransformers' loader tells the format by the first keys."""
    index = read_json(made("fp8") / "model.safetensors.index.json")["weight_map"]
    experts = {file for name, file in index.items() if ".experts." in name}
    rest = {file for name, file in index.items() if ".experts." not in name}
    assert max(experts) < min(rest)


@pytest.mark.parametrize("scheme", names_of("quantize-gpu"))
def test_compressed_tensors_reads_the_config(scheme: str, made: Callable[[str], Path]) -> None:
    quantization = pytest.importorskip("compressed_tensors.quantization")
    section = read_json(made(scheme) / "config.json")["quantization_config"]
    config = quantization.QuantizationConfig.model_validate(section)
    group = config.config_groups["experts"]
    if scheme not in ("W4A16", "W8A16"):
        preset = quantization.preset_name_to_scheme(scheme, ["Linear"])
        for field in ("num_bits", "type", "strategy", "group_size", "block_structure", "dynamic"):
            assert getattr(group.weights, field) == getattr(preset.weights, field), field
        for field in ("num_bits", "type", "strategy", "group_size", "dynamic"):
            ours, theirs = (one.input_activations for one in (group, preset))
            assert getattr(ours, field, None) == getattr(theirs, field, None), field
    assert config.format == SCHEMES[scheme].layout.name


@pytest.mark.parametrize("scheme", names_of("quantize-gpu"))
def test_compressed_tensors_comes_to_the_same_values(
    scheme: str, model: Path, made: Callable[[str], Path]
) -> None:
    """Decompressed by the library that defines the formats."""
    base = pytest.importorskip("compressed_tensors.compressors.base")
    import torch
    from compressed_tensors.quantization import QuantizationConfig

    dtypes = {
        "I32": torch.int32, "BF16": torch.bfloat16, "I64": torch.int64, "U8": torch.uint8,
        "F32": torch.float32, "F8_E4M3": torch.float8_e4m3fn,
    }  # fmt: skip
    section = read_json(made(scheme) / "config.json")["quantization_config"]
    group = QuantizationConfig.model_validate(section).config_groups["experts"]
    compressor = base.BaseCompressor.get_value_from_registry(group.format)
    tensors = read_model(made(scheme))
    module, wanted = next(places(model, scheme))

    def tensor(raw: Raw) -> Any:
        return torch.frombuffer(bytearray(raw.data), dtype=dtypes[raw.dtype]).reshape(raw.shape)

    stored = {
        name.rpartition(".")[2]: tensor(raw)
        for name, raw in tensors.items()
        if name.rpartition(".")[0] == module
    }
    found = compressor.decompress(stored, group)["weight"].float().numpy()
    ours = values_of(tensors, module, *wanted.shape)
    assert np.allclose(found, ours, rtol=2**-8, atol=0)  # the library computes in bf16
    assert found.shape == wanted.shape


def test_plain_weights_have_no_quantization_config(made: Callable[[str], Path]) -> None:
    assert "quantization_config" not in read_json(made("bf16") / "config.json")


@pytest.mark.parametrize("scheme", ["fp8", "mxfp8", "nvfp4", "mxfp4"])
def test_config_names_what_is_not_encoded(scheme: str, made: Callable[[str], Path]) -> None:
    section = read_json(made(scheme) / "config.json")["quantization_config"]
    [ignored] = (
        section[key]
        for key in ("ignore", "modules_to_not_convert", "ignored_layers")
        if key in section
    )
    assert {"model.layers.0.self_attn.q_proj", "lm_head"} <= set(ignored)
    assert not any(".experts." in name for name in ignored)


# ---- what the source has already -------------------------------------------------------

KEPT = [
    ("mxfp4, DeepSeek-V4", "mxfp4"),
    ("mxfp4, Quark", "mxfp4"),
    ("mxfp4, Ling", "MXFP4A16"),
    ("mxfp4, compressed-tensors", "mxfp4"),
    ("fp8 block", "fp8"),
    ("fp8 block, Qwen", "FP8_BLOCK"),
    ("fp8 block, DeepSeek-V4", "fp8"),
    ("fp8 channel", "fp8-channel"),
    ("fp8 channel, 1-D", "FP8_DYNAMIC"),
    ("mxfp8", "mxfp8"),
    ("mxfp8", "MXFP8"),
    ("nvfp4, compressed-tensors", "NVFP4A16"),
    ("nvfp4, ModelOpt", "nvfp4"),
    ("nvfp4, compressed-tensors", "nvfp4"),
    ("int4 packed, channel", "W4A16"),
]


@pytest.mark.parametrize(("kind", "scheme"), KEPT)
def test_what_the_source_has_already_is_kept(kind: str, scheme: str, tmp_path: Path) -> None:
    model, weights, _ = encoded_model(tmp_path / "model", kind)
    size = -1 if kind == "int4 packed, channel" else group_size_of(scheme)
    encode(model, tmp_path / "out", scheme, group_size=size)
    tensors = read_model(tmp_path / "out")
    checkpoint = open_checkpoint(str(model))
    target = EncodedTarget(_options(scheme), checkpoint)
    for expert in range(2):
        for proj in ("gate", "up", "down"):
            wanted = getattr(weights, proj)[expert]
            module = target.module(checkpoint.layers[0], expert, proj)
            found = values_of(tensors, module, *wanted.shape)
            if "nvfp4" in kind:
                assert np.allclose(found, wanted, rtol=1e-6, atol=0)
            else:
                assert np.array_equal(found, wanted)
    result = check(tmp_path / "out", model)
    assert result.passed, result.failures
    assert result.facts["weights"]["relative_rms_error"] < 1e-6


@pytest.fixture
def kimi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """INT4 in groups of 32 with bf16 scales."""
    kind = replace(
        KINDS["int4 packed, group 32"], of=partial(of_packed, bits=4, group=32, store=bf16)
    )
    monkeypatch.setitem(KINDS, "kimi", kind)
    return encoded_model(tmp_path / "kimi", "kimi")[0]


def test_kimis_experts_are_kept_byte_for_byte(kimi: Path, tmp_path: Path) -> None:
    encode(kimi, tmp_path / "out", "rawint4")
    source, found = read_model(kimi), read_model(tmp_path / "out")
    assert {name: raw.data for name, raw in found.items()} == {
        name: raw.data for name, raw in source.items()
    }
    assert check(tmp_path / "out", kimi).passed


def test_requantize_rounds_again(kimi: Path, tmp_path: Path) -> None:
    for again in (False, True):
        encode(kimi, tmp_path / f"out-{again}", "rawint4", requantize=again)
        assert check(tmp_path / f"out-{again}", kimi).passed
    kept, rounded = (read_model(tmp_path / f"out-{again}") for again in (False, True))
    assert kept != rounded


SYMMETRIC = [kind for kind in KINDS if "asymmetric" not in kind]


@pytest.mark.parametrize(
    ("kind", "scheme"), [*zip(SYMMETRIC, cycle(["rawint4", "fp8", "mxfp4", "bf16"]), strict=False)]
)
def test_sources_of_every_kind(kind: str, scheme: str, tmp_path: Path) -> None:
    model, weights, _ = encoded_model(tmp_path / "model", kind)
    encode(model, tmp_path / "out", scheme)
    result = check(tmp_path / "out", model)
    assert result.passed, result.failures
    tensors = read_model(tmp_path / "out")
    checkpoint = open_checkpoint(str(model))
    target = EncodedTarget(_options(scheme), checkpoint)
    wanted = weights.down[1]
    found = values_of(tensors, target.module(checkpoint.layers[0], 1, "down"), *wanted.shape)
    error = float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))
    assert error < 0.16


def test_nan_in_the_source_is_named(tmp_path: Path) -> None:
    for scheme, kept in (("fp8", True), ("bf16", False), ("mxfp4", False)):
        model, _, _ = encoded_model(tmp_path / f"model-{scheme}", "fp8 block")
        name = "model.layers.0.mlp.experts.1.up_proj.weight"
        tensor = find(model, name)
        with tensor.file.open("r+b") as file:
            file.seek(tensor.offset + 3 * 256 + 7)
            file.write(b"\x7f")
        with pytest.raises(CheckpointError, match=r"up_proj.weight .* NaN .* \[3, 7\]"):
            encode(model, tmp_path / f"out-{scheme}", scheme)
        assert kept or not (tmp_path / f"out-{scheme}" / "config.json").exists()


# ---- faults ----------------------------------------------------------------------------


FAULTS = [(name, part) for name in ALL for part in SCHEMES[name].layout.parts]


@pytest.mark.parametrize(("scheme", "part"), FAULTS)
def test_one_wrong_bit_is_found(
    scheme: str, part: str, model: Path, made: Callable[[str], Path], tmp_path: Path
) -> None:
    """By its meaning: the manifest has the checksum of the wrong bytes."""
    output = tmp_path / "copy"
    shutil.copytree(made(scheme), output)
    module = list(places(model, scheme))[4].module
    change_recorded(output, f"{module}.{part}", flip)
    result = check(output, model)
    assert not result.passed
    named = {failure.tensor for failure in result.failures}
    assert any(str(name).startswith(module) for name in named), result.failures


@pytest.mark.parametrize("scheme", ["fp8", "mxfp8", "nvfp4", "gptq-int4", "bf16"])
def test_a_changed_config_is_found(
    scheme: str, model: Path, made: Callable[[str], Path], tmp_path: Path
) -> None:
    output = tmp_path / "copy"
    shutil.copytree(made(scheme), output)
    path = output / "config.json"
    config = json.loads(path.read_text())
    section = config.setdefault("quantization_config", {"quant_method": "fp8"})
    section["bits"] = 3
    path.write_text(json.dumps(config))
    failures = check(output, model).failures
    assert any(failure.check == "config" for failure in failures), failures


# ---- refusals --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scheme", "hidden", "words"),
    [
        ("fp8", 192, "groups of 128, which do not divide"),
        ("mxfp4", 272, "groups of 32, which do not divide"),
        ("int4-g128", 192, "groups of 128, which do not divide"),
        ("FP8_BLOCK", 192, "blocks|groups of 128"),
    ],
)
def test_dimensions_that_groups_do_not_divide(
    scheme: str, hidden: int, words: str, tmp_path: Path
) -> None:
    weights = random_weights(hidden, 256, 2)
    config = simple_config(hidden_size=hidden, moe_intermediate_size=256, num_experts=2)
    model = write_checkpoint(tmp_path / "model", numbered(SOURCE, weights), config)
    with pytest.raises(UsageError, match=words) as error:
        encode(model, tmp_path / "out", scheme)
    assert "possible values of --" in str(error.value.hint)
    assert not (tmp_path / "out").exists()


def test_biases_are_refused(tmp_path: Path) -> None:
    from helpers.gpt_oss import SIZES, Blocks

    config = simple_config(**SIZES, model_type="gpt_oss", num_experts_per_tok=2)
    model = write_checkpoint(tmp_path / "model", Blocks().mxfp4, config)
    with pytest.raises(CheckpointError, match="biases"):
        encode(model, tmp_path / "out", "mxfp4")


def test_activations_of_the_loader_count(tmp_path: Path) -> None:
    """A clamp: MXFP4 and MXFP8 of KTransformers follow it, FP8 does not."""
    model = _model(tmp_path / "model", ORDINARY, model_type="deepseek_v4", swiglu_limit=10.0)
    with pytest.raises(CheckpointError, match="FP8 computes plain SiLU"):
        encode(model, tmp_path / "fp8", "fp8")
    encode(model, tmp_path / "mxfp4", "mxfp4")
    encode(model, tmp_path / "allowed", "fp8", allow_activation_mismatch=True)
    assert "FP8 computes plain SiLU" in (tmp_path / "allowed/README.md").read_text()
    assert check(tmp_path / "allowed", model).passed


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--method", "fp8", "--numa", "2"], "--numa does not apply to --method fp8"),
        (["--method", "mxfp4", "--calibrate", "x"], "--calibrate does not apply"),
        (["--method", "bf16", "--dry-run", "--estimate"], "--estimate does not apply"),
        (["--method", "int4", "--experts", "x"], "--experts does not apply to --method int4"),
        (["--method", "fp8", "--scale", "search"], "--scale does not apply to --method fp8"),
        (["--method", "fp8", "--experts", "x"], "cannot load an output without all experts"),
        (["--method", "moe_int4"], "another order of bytes than int4"),
        (["--method=moe_int8"], "another order of bytes than int8"),
    ],
)
def test_options_that_do_not_apply(
    words: list[str], said: str, model: Path, tmp_path: Path
) -> None:
    done = ktconv("quantize-cpu", model, tmp_path / "out", *words)
    assert done.exit_code == 2
    assert said in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr and not (tmp_path / "out").exists()


def test_gptq_rounds_to_integers_alone(model: Path, tmp_path: Path) -> None:
    pytest.importorskip("llmcompressor")
    done = ktconv(
        "quantize-gpu", model, tmp_path / "out", "--method", "gptq", "--scheme", "MXFP4A16",
        "--dataset", "x.txt",
    )  # fmt: skip
    assert done.exit_code == 2 and "rounds to integers" in done.stderr


# ---- subsets, plans --------------------------------------------------------------------


def test_experts_of_a_file_alone(model: Path, tmp_path: Path) -> None:
    chosen = tmp_path / "experts.json"
    chosen.write_text(json.dumps({"schema": 1, "experts": {"0": [2]}}))
    done = ktconv(
        "quantize-cpu", model, tmp_path / "some", "--method", "fp8", "--experts", chosen,
        "--allow-partial",
    )  # fmt: skip
    if done.exit_code:
        pytest.fail(done.stderr)
    modules = {
        n.split(".experts.")[1][0] for n in read_model(tmp_path / "some") if ".experts." in n
    }
    assert modules == {"2"}
    assert check(tmp_path / "some", model).passed


def test_the_card_has_the_command(model: Path, made: Callable[[str], Path], tmp_path: Path) -> None:
    """Defaults of the command line are left out."""
    for scheme, scale, words in (
        ("rawint4", "amax", "OUTPUT --method rawint4 --max-shard-size 5000000000 --scale amax"),
        ("rawint4", "search", "OUTPUT --method rawint4 --max-shard-size 5000000000\n"),
        ("fp8", "amax", "OUTPUT --method fp8 --max-shard-size 5000000000\n"),
        ("FP8_BLOCK", "amax", "--scheme FP8_BLOCK --max-shard-size 5000000000\n"),
    ):
        output = tmp_path / f"{scheme}-{scale}"
        encode(model, output, scheme, scale=scale)
        assert words in (output / "README.md").read_text() + "\n"


def test_experts_alone(model: Path, tmp_path: Path) -> None:
    encode(model, tmp_path / "out", "rawint4", experts_only=True)
    assert all(".experts." in name for name in read_model(tmp_path / "out"))
    assert check(tmp_path / "out", model).passed


@pytest.mark.parametrize("scheme", ["rawint4", "nvfp4", "gptq-int4", "bf16"])
def test_a_dry_run_tells_the_sizes(
    scheme: str, model: Path, made: Callable[[str], Path], tmp_path: Path
) -> None:
    done = ktconv(
        "quantize-cpu", model, tmp_path / "out", "--method", scheme, "--dry-run", "--json"
    )
    facts = json.loads(done.stdout)
    shards = made(scheme).glob("*.safetensors")
    assert facts["output_bytes"] == sum(path.stat().st_size for path in shards)
    assert facts["method"] == scheme and not (tmp_path / "out").exists()


def test_a_second_run_keeps_everything(model: Path, tmp_path: Path) -> None:
    encode(model, tmp_path / "out", "mxfp8")
    report = encode(model, tmp_path / "out", "mxfp8")
    assert not report.converted and report.complete
    with pytest.raises(Exception, match=r"other settings .* options.scheme"):
        encode(model, tmp_path / "out", "fp8")


@pytest.mark.parametrize("scheme", ALL)
def test_inspect_knows_an_output(scheme: str, made: Callable[[str], Path]) -> None:
    from ktconv.inspect.inspection import inspect_path

    found = inspect_path(str(made(scheme)))
    for_cpu = SCHEMES[scheme].command == "quantize-cpu"
    assert found["kind"] == ("encoded experts" if for_cpu else "experts for a GPU")
    assert found["method" if for_cpu else "scheme"] == scheme
    assert (found["moe_layers"], found["experts"], found["experts_left_out"]) == ("0", [3], 0)
    assert found["complete"] and found["hidden_size"] == [HIDDEN]


def test_experts_in_a_missing_shard_are_not_left_out(
    made: Callable[[str], Path], tmp_path: Path
) -> None:
    from ktconv.inspect.inspection import inspect_path

    output = shutil.copytree(made("fp8"), tmp_path / "out")
    for path in output.glob("*.safetensors"):
        path.unlink()
    found = inspect_path(str(output))
    assert (found["experts"], found["experts_left_out"]) == ([3], 0)
    assert found["missing_tensors"] > 0 and not found["complete"]


KERNELS = {
    "rawint4": "gint4-32", "int4-g64": "gint4-64", "int4-g128": "gint4-128", "fp8": "fp8",
    "fp8-channel": "fp8-channel", "mxfp4": "mxfp4", "gptq-int4": "gint4-128-f32", "bf16": "bf16",
    "int8-g128": "gint8-128", "mxfp8": "mxfp8", "nvfp4": "nvfp4", "awq": "gint4-128-f32",
    "W4A16": "gint4-128", "W8A16": "gint8-128", "FP8_BLOCK": "fp8", "FP8_DYNAMIC": "fp8-channel",
    "MXFP8": "mxfp8", "MXFP4A16": "mxfp4", "NVFP4A16": "nvfp4",
}  # fmt: skip


@pytest.mark.parametrize("scheme", ALL)
def test_our_kernels_have_its_numbers(
    scheme: str, model: Path, made: Callable[[str], Path]
) -> None:
    """As `bench --model` opens it."""
    from ktconv.bench.cases import _opened

    number, experts, _ = _opened(made(scheme), None)
    assert (number, experts.format.key, experts.count) == (0, KERNELS[scheme], EXPERTS)
    tensors, modules = read_model(made(scheme)), list(places(model, scheme))
    for expert in range(EXPERTS):
        streams = experts.streams(expert)
        for stream, (module, wanted) in zip(streams, modules[3 * expert :], strict=False):
            assert stream is not None
            expected = values_of(tensors, module, *wanted.shape)
            assert np.allclose(stream.values(), expected, 2.0**-22 * ("nvfp4" in scheme.lower()), 0)


def test_packed_experts_are_no_source(
    model: Path, made: Callable[[str], Path], tmp_path: Path
) -> None:
    from helpers.convert import convert

    convert(model, tmp_path / "int4", numa=1)
    for source in (tmp_path / "int4", made("awq")):
        with pytest.raises(CheckpointError, match="packed for KTransformers"):
            encode(source, tmp_path / "out", "fp8")
    encode(made("fp8"), tmp_path / "again", "bf16")  # what can be decoded is one
    assert check(tmp_path / "again", made("fp8")).passed


def test_inspect_tells_the_bytes_of_every_method(
    model: Path, made: Callable[[str], Path], tmp_path: Path
) -> None:
    from ktconv.inspect.choice import methods

    found = methods(open_checkpoint(str(model)))
    for scheme in names_of("quantize-cpu"):
        modules = {place.module for place in places(model, scheme)}
        tensors = read_model(made(scheme)).items()
        wanted = sum(len(raw.data) for name, raw in tensors if name.rpartition(".")[0] in modules)
        assert found[scheme]["expert_bytes"] == wanted
    small = write_checkpoint(
        tmp_path / "small",
        numbered(SOURCE, random_weights(96, 96, 2)),
        simple_config(hidden_size=96, moe_intermediate_size=96, num_experts=2),
    )
    found = methods(open_checkpoint(str(small)))
    assert found["fp8"]["numbers"].startswith("not possible: fp8 has groups of 128")
    assert found["mxfp4"]["expert_bytes"] == 6 * 96 * (48 + 3)
    kept = encoded_model(tmp_path / "fp8", "fp8 block")[0]
    found = methods(open_checkpoint(str(kept)))
    assert found["fp8"]["numbers"] == "codes and scales of the source are kept"


_LEFT_OUT = """
import sys
from ktconv.cli.entry import main
sys.argv = ["ktconv", *sys.argv[1:]]
try:
    main()
finally:
    print(*{"torch", "transformers"} & {name.partition(".")[0] for name in sys.modules})
"""


@pytest.mark.parametrize(
    "words",
    [("quantize-cpu", f"--method={one}") for one in ("int8-g128", "fp8", "mxfp8")]
    + [("quantize-gpu", "--method=rtn", "--scheme=W8A16")],
)
def test_a_conversion_leaves_torch_and_transformers_out(
    tmp_path: Path, words: tuple[str, ...]
) -> None:
    """Their import takes longer than the conversion of a layer, and their models are not asked."""
    model = write_model(tmp_path / "model", layers=1, experts=2)
    command, *options = words
    run = subprocess.run(
        [sys.executable, "-c", _LEFT_OUT, command, model, tmp_path / "out", *options],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert (tmp_path / "out" / "ktconv.json").exists()
    assert run.stdout.splitlines()[-1] == ""


def test_names_of_transformers_are_written_without_it(tmp_path: Path) -> None:
    """Phi's router is a linear layer of another name there."""
    weights = numbered("model.layers.0.block_sparse_moe.experts", ORDINARY, ("w1", "w3", "w2"))
    gate = {"model.layers.0.block_sparse_moe.gate.weight": bf16(np.ones((EXPERTS, HIDDEN)))}
    config = simple_config(
        hidden_size=HIDDEN, moe_intermediate_size=INNER, num_experts=EXPERTS, model_type="phimoe"
    )
    model = write_checkpoint(tmp_path / "model", {**weights, **gate}, config)
    ktconv_done("quantize-cpu", model, tmp_path / "out", "--method=int8-g128")
    ignored = read_json(tmp_path / "out" / "config.json")["quantization_config"]["ignore"]
    assert "model.layers.0.mlp.router" in ignored
    recorded = read_json(tmp_path / "out" / "ktconv.json")["ignored_by_transformers"]
    assert recorded == ["model.layers.0.mlp.router"]
