"""`quantize-cpu --fold up-down`: which factors and bytes, what is preserved, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import reference
from helpers.activations import silu
from helpers.cli import ktconv
from helpers.convert import all_files, convert, read_json, read_model, source_matrices
from helpers.disk_calls import Commands
from helpers.encoded import of_int8
from helpers.families import (
    Weights,
    bf16,
    numbered,
    random_weights,
    simple_config,
    write_checkpoint,
)
from helpers.importance_files import importance_of, write_importance
from helpers.reference import Choice
from msgspec.structs import replace
from numpy.typing import NDArray

from ktconv.errors import CheckpointError, MemoryLimitError, OutputError, UsageError
from ktconv.families.family import ExpertActivation
from ktconv.formats import FORMATS, split, tensor_name
from ktconv.formats.folding import decode, encode, factors, folded_importance
from ktconv.quantize.packed.folding import Folding, column_exponents, why_not
from ktconv.quantize.packed.importance.channel_weights import channel_weights
from ktconv.quantize.packed.run import Request, prepare
from ktconv.repack import merge, reshard
from ktconv.source import open_checkpoint
from ktconv.source.reading.matrices import Factors, MatrixReader
from ktconv.source.reading.reader import SourceReader
from ktconv.targets.packed.target import Options, options_of_record

pytestmark = pytest.mark.slow

HIDDEN, INNER, EXPERTS = 256, 512, 2
LAYERS = (0, 1)
FOLD: dict[str, Any] = {"fold": "up-down"}
INT4 = FORMATS["int4"].layout


def uneven(seed: int) -> Weights:
    """Columns of down differ by orders of magnitude, and one is of zeros."""
    weights = random_weights(HIDDEN, INNER, EXPERTS, seed=seed)
    spread = np.exp2(np.random.default_rng(seed).normal(0, 1.5, INNER)).astype(np.float32)
    spread[7] = 0
    return weights._replace(down=weights.down * spread)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tensors: dict[str, Any] = {}
    for index in LAYERS:
        tensors |= numbered(f"model.layers.{index}.mlp.experts", uneven(index))
    config = simple_config(
        hidden_size=HIDDEN, moe_intermediate_size=INNER, num_experts=EXPERTS, num_hidden_layers=2
    )
    return write_checkpoint(tmp_path_factory.mktemp("fold") / "model", tensors, config)


def tensor_records(output: Path) -> dict[str, Any]:
    units = read_json(output / "ktconv.json")["units"].values()
    return {name: one for unit in units for name, one in unit["tensors"].items()}


def recorded(output: Path, layer: int, expert: int, numa: int) -> NDArray[np.int8]:
    """The exponents [I] of an expert, by the manifest."""
    records = tensor_records(output)
    names = [tensor_name(layer, "up", expert, part, "weight") for part in range(numa)]
    return np.concatenate([decode(records[name]["fold"], INNER // numa) for name in names])


# ---- bytes -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "numa", "scale", "weighted"),
    [
        ("int4", 1, "search", False),
        ("int4", 2, "search", True),
        ("int4", 4, "search", False),
        ("int8", 4, "search", False),
        ("int4", 1, "amax", False),
    ],
)
def test_bytes_are_those_of_the_folded_source(
    method: str, numa: int, scale: Any, weighted: bool, model: Path, tmp_path: Path
) -> None:
    importance = importance_of(open_checkpoint(model))
    file = write_importance(tmp_path / "importance", importance) if weighted else None
    out = tmp_path / "out"
    convert(model, out, method=method, numa=numa, scale=scale, importance=file, threads=2, **FOLD)
    found, fmt = read_model(out), FORMATS[method]
    for (layer, expert, proj), values in source_matrices(model).items():
        exponents, own = recorded(out, layer, expert, numa), None
        assert exponents.any()
        if weighted:
            own = channel_weights(importance[layer].of(proj), importance[layer].counts)[expert]
        if proj == "up":
            values = values * factors(exponents)[:, None]
        if proj == "down":
            values = values * factors(-exponents.astype(int))
            own = folded_importance(own, exponents) if scale == "search" else None
        for part in range(numa):
            rows, cols = split(proj, HIDDEN, INNER, part, numa).index
            choice = Choice(scale, None if own is None else own[cols])
            payload, scales = reference.quantize_pack(
                fmt, np.ascontiguousarray(values[rows, cols]), choice
            )
            names = (tensor_name(layer, proj, expert, part, one) for one in ("weight", "scale"))
            assert [found[name].data for name in names] == [payload.tobytes(), scales.tobytes()]


def test_only_up_has_a_record(model: Path, tmp_path: Path) -> None:
    convert(model, tmp_path / "out", **FOLD)
    for name, record in tensor_records(tmp_path / "out").items():
        assert ("fold" in record) == ("ffn_up_exps" in name and name.endswith("weight"))
    options = read_json(tmp_path / "out" / "ktconv.json")["options"]
    assert options["fold"] == "up-down"
    assert options_of_record(options) == Options(fold="up-down")
    assert options_of_record({**options, "fold": "gate-up"}) is None
    assert "--fold up-down" in (tmp_path / "out" / "README.md").read_text()


def test_bytes_do_not_depend_on_threads_level_or_the_run(
    commands: Commands, model: Path, tmp_path: Path
) -> None:
    convert(model, tmp_path / "one", threads=1, **FOLD)
    for layer in reversed(LAYERS):
        convert(model, tmp_path / "two", threads=3, layers=[layer], **FOLD)
    words = ["quantize-cpu", model, tmp_path / "scalar", "--fold", "up-down", "--numa", "1"]
    scalar = commands.run(words, variables={"KTCONV_ISA": "scalar"})
    assert scalar.returncode == 0, scalar.stdout + scalar.stderr
    expected = all_files(tmp_path / "one")
    for other in ("two", "scalar"):
        assert all_files(tmp_path / other) == expected


def test_another_run_must_fold_too(model: Path, tmp_path: Path) -> None:
    convert(model, tmp_path / "out", layers=[0], **FOLD)
    with pytest.raises(OutputError, match=r"options\.fold"):
        convert(model, tmp_path / "out")


# ---- what it is for --------------------------------------------------------------------


def expert_outputs(inputs: NDArray[np.float64], matrices: Any) -> NDArray[np.float64]:
    gate, up, down = (one.astype(np.float64) for one in matrices)
    return silu(inputs @ gate.T, inputs @ up.T) @ down.T


def test_the_folded_expert_computes_the_same(model: Path, tmp_path: Path) -> None:
    convert(model, tmp_path / "out", **FOLD)
    inputs, checkpoint = np.random.default_rng(0).normal(size=(20, HIDDEN)), open_checkpoint(model)
    reader = SourceReader(checkpoint.files, checkpoint.sources)
    sources = source_matrices(model)
    for layer in checkpoint.layers:
        exponents, folded = recorded(tmp_path / "out", layer.index, 1, 1), []
        for proj, matrix in layer.experts[1].items():
            source = MatrixReader(reader, matrix, factors=Factors.of(proj, exponents))
            buffer, bounce = np.empty((2, 8 << 20), np.uint8)
            folded.append(np.concatenate([one for _, one in source.decoded(buffer, bounce)]))
        plain = [sources[layer.index, 1, proj] for proj in layer.experts[1]]
        assert not np.array_equal(folded[1], plain[1])
        expected = expert_outputs(inputs, plain)
        error = np.linalg.norm(expert_outputs(inputs, folded) - expected)
        assert error < 2e-7 * np.linalg.norm(expected)


def _unfolded(sample: NDArray[np.float32], exponents: NDArray[np.int8]) -> NDArray[np.float32]:
    """What INT4 makes of down, its columns multiplied by their factors again."""
    columns = factors(-exponents.astype(int))
    choice = Choice("search", folded_importance(None, exponents))
    codes, scale = reference.quantize(FORMATS["int4"], sample * columns, choice)
    step = FORMATS["int4"].traits.scale_units * scale
    return codes * step.reshape(-1, 1) / columns


@pytest.mark.parametrize(("spread", "most"), [(0.0, 1.0), (0.5, 0.75), (2.0, 0.1)])
def test_errors_become_smaller(spread: float, most: float) -> None:
    """Most where columns differ most, and none larger where they do not."""
    rng = np.random.default_rng(1)
    down = rng.normal(size=(HIDDEN, INNER)) * np.exp2(rng.normal(0, spread, INNER))
    sample = down.astype(np.float32)
    none = np.zeros(INNER, np.int8)
    folded = _unfolded(sample, column_exponents(INT4, sample))
    error, before = (np.square(one - sample).sum() for one in (folded, _unfolded(sample, none)))
    assert error < most * before


def test_exponents_of_extreme_columns() -> None:
    sample = np.random.default_rng(2).normal(size=(128, 256)).astype(np.float32)
    sample[:, 0], sample[:, 1] = sample[:, 0] * 1e30, sample[:, 1] * 1e-30
    sample[:, 2], sample[5] = 0, 0
    exponents = column_exponents(INT4, sample)
    assert (exponents[0], exponents[2]) == (127, 0)
    assert exponents[1] in (0, -127)  # what the scales of rows leave of it
    assert np.abs(exponents[3:].astype(int)).max() < 127
    assert not column_exponents(INT4, np.zeros_like(sample)).any()


def test_exponents_follow_the_columns() -> None:
    """Columns that differ by octaves have exponents that do, up to less than an octave."""
    rng = np.random.default_rng(3)
    base, powers = rng.normal(size=(512, 128)), rng.integers(-2, 3, 128)
    plain = column_exponents(INT4, base.astype(np.float32)).astype(int)
    found = column_exponents(INT4, (base * np.exp2(powers)).astype(np.float32)).astype(int)
    differences = found - plain - 16 * powers
    assert np.ptp(differences) < 16


# ---- what is refused, and said ---------------------------------------------------------


@pytest.mark.parametrize(
    ("activation", "why"),
    [
        (ExpertActivation("relu2", gated=False), "without a gate"),
        (ExpertActivation(limit=10), "clamps"),
        (ExpertActivation(limit=10, limit_after=True), "clamps"),
        (ExpertActivation(gate_cap=4.0), "bounds"),
        (ExpertActivation(gate_cap=4.0, up_cap=25.0), "bounds"),
        (ExpertActivation(alpha=1.702), "adds 1"),
        (ExpertActivation("mystery"), "not known"),
    ],
)
def test_activations_that_are_not_linear_in_up(activation: ExpertActivation, why: str) -> None:
    assert why in why_not(activation)


@pytest.mark.parametrize("function", ["silu", "gelu", "gelu_tanh"])
def test_activations_that_are_linear_in_up(function: str) -> None:
    assert not why_not(ExpertActivation(function, biases=True, weight_on_input=True))


def test_refused_before_anything_is_written(model: Path, tmp_path: Path) -> None:
    clamped = simple_config(
        model_type="glm5_next", hidden_size=HIDDEN, moe_intermediate_size=INNER,
        num_experts=EXPERTS, num_hidden_layers=2, swiglu_limit=10.0,
    )  # fmt: skip
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "config.json").write_text(json.dumps(clamped))
    done = ktconv("quantize-cpu", model, tmp_path / "out", "--fold", "up-down", "--numa", "1",
                  "--config", tmp_path / "config", "--allow-activation-mismatch")  # fmt: skip
    assert done.exit_code == 2, done.stdout
    assert "--fold up-down would change what the experts of layers 0-1 compute" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()


def test_compat_cannot_be_folded(model: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="whose bytes --compat asks for"):
        prepare(Request(str(model), tmp_path / "out", Options(numa=1, compat=True, **FOLD)))


def test_integers_of_up_and_down_are_not_kept(tmp_path: Path) -> None:
    """Those of gate are, as without folding, and the plan says so."""
    rng = np.random.default_rng(4)
    tensors: dict[str, Any] = {}
    for name in ("gate_proj", "up_proj", "down_proj"):
        shape = (HIDDEN, INNER) if name == "down_proj" else (INNER, HIDDEN)
        parts, _ = of_int8(rng, *shape)
        tensors |= {f"model.layers.0.mlp.experts.0.{name}.{key}": one for key, one in parts.items()}
    config = simple_config(hidden_size=HIDDEN, moe_intermediate_size=INNER, num_experts=1)
    model = write_checkpoint(tmp_path / "model", tensors, config)
    notes = prepare(Request(str(model), tmp_path / "out", Options(method="int8", numa=1, **FOLD)))
    assert any("up and down are quantized again" in note for note in notes.plan.notes)
    convert(model, tmp_path / "out", method="int8", **FOLD)
    kept = {
        name: one.get("lossless_rows") for name, one in tensor_records(tmp_path / "out").items()
    }
    rows = [kept[tensor_name(0, proj, 0, 0, "weight")] for proj in ("gate", "up", "down")]
    assert rows[0] and rows[1:] == [None, None]


def test_memory_is_counted(model: Path, tmp_path: Path) -> None:
    request = Request(str(model), tmp_path / "out", Options(numa=1), threads=1)
    folded = replace(request, options=Options(numa=1, **FOLD))
    extra = Folding().worker_memory(prepare(request).plan)
    assert extra >= 4 * HIDDEN * INNER
    roomy = prepare(folded).peak_memory
    least = prepare(replace(folded, max_memory=roomy - 1)).peak_memory
    with pytest.raises(MemoryLimitError):
        prepare(replace(folded, max_memory=least - extra))


def test_a_bias_of_up_is_multiplied_too(tmp_path: Path) -> None:
    source = "model.layers.0.mlp.experts"
    tensors = numbered(source, uneven(5))
    bias = np.arange(INNER, dtype=np.float32)
    tensors[f"{source}.1.up_proj.bias"] = bf16(bias)
    config = simple_config(hidden_size=HIDDEN, moe_intermediate_size=INNER, num_experts=EXPERTS)
    model = write_checkpoint(tmp_path / "model", tensors, config)
    convert(model, tmp_path / "out", allow_activation_mismatch=True, **FOLD)
    found = np.frombuffer(
        read_model(tmp_path / "out")[tensor_name(0, "up", 1, 0, "bias")].data, "<f4"
    )
    stored = (bias.view(np.uint32) & 0xFFFF0000).view(np.float32)
    np.testing.assert_array_equal(found, stored * factors(recorded(tmp_path / "out", 0, 1, 1)))


# ---- merged and cut anew --------------------------------------------------------------


def test_resharding_carries_the_exponents(model: Path, tmp_path: Path) -> None:
    convert(model, tmp_path / "one", **FOLD)
    reshard.reshard(reshard.Request(tmp_path / "one", tmp_path / "two", numa=2, threads=1))
    for layer in LAYERS:
        for expert in range(EXPERTS):
            expected = recorded(tmp_path / "one", layer, expert, 1)
            np.testing.assert_array_equal(recorded(tmp_path / "two", layer, expert, 2), expected)


def test_merging_carries_the_exponents(model: Path, tmp_path: Path) -> None:
    convert(model, tmp_path / "folders", layout="layers", **FOLD)
    merge.merge(merge.Request(tmp_path / "folders", tmp_path / "merged", threads=1))
    expected = tensor_records(tmp_path / "folders")
    assert tensor_records(tmp_path / "merged") == expected


@pytest.mark.parametrize("record", [7, "AAAA", encode(np.full(INNER, -128, np.int8))])
def test_a_damaged_record_is_not_carried(record: object, model: Path, tmp_path: Path) -> None:
    convert(model, tmp_path / "one", **FOLD)
    manifest = read_json(tmp_path / "one" / "ktconv.json")
    name = tensor_name(1, "up", 0, 0, "weight")
    manifest["units"]["layer-00001"]["tensors"][name]["fold"] = record
    (tmp_path / "one" / "ktconv.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=r"exponent.* of folding .*blk\.1\.ffn_up_exps\.0"):
        reshard.reshard(reshard.Request(tmp_path / "one", tmp_path / "two", numa=2, threads=1))


def test_a_weight_that_a_factor_moves_beyond_float32(tmp_path: Path) -> None:
    """The source is sound, and said to be; a NaN in it is said to be one."""
    weights = uneven(0)
    weights.up[:] = np.where(weights.up < 0, -3e38, 3e38)
    config = simple_config(
        hidden_size=HIDDEN, moe_intermediate_size=INNER, num_experts=EXPERTS, num_hidden_layers=1
    )
    tensors = numbered("model.layers.0.mlp.experts", weights)
    model = write_checkpoint(tmp_path / "model", tensors, config)
    with pytest.raises(CheckpointError, match=r"e\+38 at .* times the factor that --fold chose"):
        convert(model, tmp_path / "out", **FOLD)
    weights.up[0, 5, 7] = np.nan
    tensors = numbered("model.layers.0.mlp.experts", weights)
    model = write_checkpoint(tmp_path / "other", tensors, config)
    checkpoint = open_checkpoint(model)
    matrix = checkpoint.layers[0].experts[0]["up"]
    twice = Factors.of("up", np.ones(INNER, np.int8))
    source = MatrixReader(SourceReader(checkpoint.files, checkpoint.sources), matrix, factors=twice)
    assert "contains a NaN or an infinity at [5, 7]" in str(source.not_finite(5, 7))
    assert "2.991e+38 at [5, 8] times the factor" in str(source.not_finite(5, 8))
