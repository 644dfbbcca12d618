"""`quantize-cpu --importance weights`: weights of squared errors that follow from the model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import reference
from helpers.activations import computed
from helpers.cli import ktconv
from helpers.convert import convert, read_json, read_model, source_matrices
from helpers.corrupt import bytes_of, check, overwrite, place_of
from helpers.disk_calls import Commands
from helpers.families import bf16, numbered, random_weights, simple_config, write_checkpoint
from helpers.nemotron import write_nemotron
from helpers.reference import Choice
from numpy.typing import NDArray

from ktconv.errors import CheckpointError, UsageError
from ktconv.formats import FORMATS, Projection, split, tensor_name
from ktconv.formats.decode import bf16_to_f32
from ktconv.quantize.estimate.run import Estimation
from ktconv.quantize.packed.importance.channel_weights import FLOOR, normalised
from ktconv.quantize.packed.importance.source_weights import SourceWeights
from ktconv.quantize.packed.run import Request, prepare
from ktconv.repack.reshard import Request as ReshardRequest
from ktconv.repack.reshard import reshard
from ktconv.source import open_checkpoint
from ktconv.targets.packed.target import BY_WEIGHTS, Options, options_of_record

pytestmark = pytest.mark.slow

HIDDEN, INNER, EXPERTS = 640, 256, 2  # columns of up: more than one block of lanes
LAYERS = (0, 1)  # the second has no norm
Floats = NDArray[np.float32]


def norm_of(layer: int) -> Floats:
    values = np.exp(np.random.default_rng(layer).standard_normal(HIDDEN)).astype(np.float32)
    return (values.view(np.uint32) & 0xFFFF0000).view(np.float32)


def write_model(path: Path, norms: dict[int, Floats], **changes: Any) -> Path:
    tensors: dict[str, Any] = {}
    for index in LAYERS:
        weights = random_weights(HIDDEN, INNER, EXPERTS, seed=index)
        spread = np.exp(np.random.default_rng(index).standard_normal(INNER)).astype(np.float32)
        weights = weights._replace(up=weights.up * spread[:, None])
        tensors |= numbered(f"model.layers.{index}.mlp.experts", weights)
    for index, norm in norms.items():
        tensors[f"model.layers.{index}.post_attention_layernorm.weight"] = bf16(norm)
    config = simple_config(
        hidden_size=HIDDEN,
        moe_intermediate_size=INNER,
        num_experts=EXPERTS,
        num_hidden_layers=len(LAYERS),
        **changes,
    )
    return write_checkpoint(path, tensors, config)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("weights") / "model", {0: norm_of(0)})


def expected(model: Path, layer: int, expert: int, proj: Projection) -> Floats | None:
    """In binary64 and NumPy's order, which is not that of the product."""
    norm = norm_of(0).astype(np.float64) if layer == 0 else np.ones(HIDDEN)
    if proj != "down":
        return (norm**2 / np.mean(norm**2)).astype(np.float32) if layer == 0 else None
    matrices = source_matrices(model)
    up, gate = (matrices[layer, expert, one] * norm for one in ("up", "gate"))
    product = (up**2).sum(axis=1) * (gate**2).sum(axis=1)
    weights: Floats = (product / product.mean()).astype(np.float32)
    return weights


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("proj", ["gate", "up", "down"])
def test_weights_follow_from_norm_up_and_gate(model: Path, layer: int, proj: Projection) -> None:
    checkpoint = open_checkpoint(model)
    weights = SourceWeights(checkpoint, checkpoint.layers)
    for expert in range(EXPERTS):
        found, wanted = weights.of(layer, expert, proj), expected(model, layer, expert, proj)
        if wanted is None:
            assert found is None
        else:
            assert found is not None
            np.testing.assert_allclose(found, wanted, rtol=2e-6)
            assert found.max() > 10 * np.median(found)  # so that they matter


@pytest.mark.parametrize("function", ["relu2", "relu", "gelu"])
def test_weights_without_a_gate(function: str, tmp_path: Path) -> None:
    """They follow the mean squares of what goes into down, for normal inputs."""
    model, matrices = write_nemotron(tmp_path / "model")
    config = json.loads((model / "config.json").read_text()) | {"mlp_hidden_act": function}
    (model / "config.json").write_text(json.dumps(config))
    checkpoint = open_checkpoint(model)
    found = SourceWeights(checkpoint, checkpoint.layers).of(1, 2, "down")
    assert found is not None
    raw = read_model(model)["backbone.layers.1.norm.weight"].data
    norm = bf16_to_f32(np.frombuffer(raw, np.uint16)).astype(np.float64)
    up = matrices[1, 2, "up"] * norm
    size = (up**2).sum(axis=1)
    size = size**2 if function == "relu2" else size
    np.testing.assert_allclose(found, size / size.mean(), rtol=2e-6)
    x = np.random.default_rng(4).standard_normal((1 << 14, len(norm)))
    inner = computed({"gelu": "ungated gelu"}.get(function, function), x, x @ up.T, {}, 1)
    means = np.mean(inner**2, axis=0)
    assert np.corrcoef(np.log(means), np.log(found))[0, 1] > 0.95
    assert np.polyfit(np.log(found), np.log(means), 1)[0] == pytest.approx(1, abs=0.15)


def test_a_norm_stored_less_1(tmp_path: Path) -> None:
    """As Qwen3-Next stores it."""
    less = (norm_of(0) - 1).astype(np.float32)
    less = (less.view(np.uint32) & 0xFFFF0000).view(np.float32)
    path = write_model(tmp_path / "model", {0: less}, model_type="qwen3_next")
    checkpoint = open_checkpoint(path)
    found = SourceWeights(checkpoint, checkpoint.layers).of(0, 0, "up")
    squares = (less.astype(np.float64) + 1) ** 2
    assert found is not None
    np.testing.assert_allclose(found, squares / squares.mean(), rtol=1e-5)


@pytest.mark.parametrize("scale", [1.0, 2.0**50, 2.0**-60])
def test_any_size_of_norm_and_weights(scale: float, tmp_path: Path) -> None:
    """Sums of squares that binary32 cannot hold are as exact as others."""
    usual = open_checkpoint(write_model(tmp_path / "usual", {0: norm_of(0)}))
    other = open_checkpoint(write_model(tmp_path / "other", {0: norm_of(0) * np.float32(scale)}))
    found = [SourceWeights(one, one.layers).of(0, 1, "down") for one in (usual, other)]
    first, second = (one for one in found if one is not None)
    np.testing.assert_allclose(first, second, rtol=1e-6)


def test_normalised() -> None:
    assert normalised(np.zeros(4)) is None
    found = normalised(np.array([0.0, 1.0, 3.0]))
    assert found is not None
    assert 0 < found[0] <= FLOOR  # never 0: such a weight could become anything
    assert found.mean() == pytest.approx(1)


@pytest.mark.parametrize(("method", "numa"), [("int4", 2), ("int8", 1)])
def test_scales_and_codes_are_those_of_weighted_errors(
    method: str, numa: int, model: Path, tmp_path: Path
) -> None:
    convert(model, tmp_path / "out", importance="weights", method=method, numa=numa, threads=2)
    checkpoint = open_checkpoint(model)
    weights = SourceWeights(checkpoint, checkpoint.layers)
    found, fmt, weighted = read_model(tmp_path / "out"), FORMATS[method], 0
    for (layer, expert, proj), values in source_matrices(model).items():
        counted = weights.of(layer, expert, proj)
        for part in range(numa):
            rows, cols = split(proj, HIDDEN, INNER, part, numa).index
            piece = np.ascontiguousarray(values[rows, cols])
            own = None if counted is None else counted[cols]
            payload, scale = reference.quantize_pack(fmt, piece, Choice("search", own))
            names = (tensor_name(layer, proj, expert, part, one) for one in ("weight", "scale"))
            assert [found[name].data for name in names] == [payload.tobytes(), scale.tobytes()]
            weighted += (scale != reference.quantize(fmt, piece, Choice("search"))[1]).sum()
    assert weighted > 500  # scales that the plain search does not give
    assert read_json(tmp_path / "out" / "ktconv.json")["options"]["importance"] == {
        "kind": "weights"
    }


@pytest.mark.parametrize("fold", ["", "up-down"])
def test_verify_needs_nothing_but_the_source(fold: str, model: Path, tmp_path: Path) -> None:
    convert(model, tmp_path / "out", importance="weights", numa=2, fold=fold)
    result = check(tmp_path / "out", model)
    assert result.passed, result.facts
    output = tmp_path / "plain"
    convert(model, output, numa=2, fold=fold)
    changed = tmp_path / "changed"
    shutil.copytree(tmp_path / "out", changed)
    places: list[tuple[int, Projection]] = [(0, "gate"), (0, "down"), (1, "down")]
    names = [tensor_name(layer, proj, 1, 0, "scale") for layer, proj in places]
    for name in names:
        overwrite(place_of(changed, name), bytes_of(place_of(output, name)))
    failures = [one.as_dict() for one in check(changed, model).failures if one.check == "scale"]
    # The plain search's scales are not the weighted one's.
    assert {one["tensor"] for one in failures} == {*names}


def test_bytes_do_not_depend_on_threads_levels_and_runs(
    commands: Commands, model: Path, tmp_path: Path
) -> None:
    convert(model, tmp_path / "one", importance="weights")
    convert(model, tmp_path / "parts", importance="weights", layers=frozenset({1}), threads=4)
    convert(model, tmp_path / "parts", importance="weights", threads=4)
    assert read_model(tmp_path / "parts") == read_model(tmp_path / "one")
    words = ["quantize-cpu", model, tmp_path / "scalar", "--importance", "weights", "--numa", 1]
    done = commands.run(words, variables={"KTCONV_ISA": "scalar"})
    assert done.returncode == 0, done.stderr
    assert read_model(tmp_path / "scalar") == read_model(tmp_path / "one")
    assert "no known norm" in done.stderr + done.stdout


def test_parts_are_joined_again(model: Path, tmp_path: Path) -> None:
    for numa in (1, 2):
        convert(model, tmp_path / str(numa), importance="weights", numa=numa)
    joined = ReshardRequest(tmp_path / "2", tmp_path / "joined", 1, source=str(model))
    reshard(joined)
    assert read_model(tmp_path / "joined") == read_model(tmp_path / "1")
    with pytest.raises(UsageError, match="follow from the source"):
        reshard(
            ReshardRequest(
                tmp_path / "2", tmp_path / "no", 1, source=str(model), importance=tmp_path / "file"
            )
        )


def test_plan_says_where_the_norm_is_missing(model: Path, tmp_path: Path) -> None:
    done = ktconv("quantize-cpu", model, tmp_path / "out", "--importance", "weights", "--dry-run",
                  "--json")  # fmt: skip
    assert done.exit_code == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts["importance"] == {"kind": "weights"}
    assert [one for one in facts["notes"] if "layer 1: no known norm" in one]
    with_all = write_model(tmp_path / "all", {0: norm_of(0), 1: norm_of(1)})
    checkpoint = open_checkpoint(with_all)
    assert SourceWeights(checkpoint, checkpoint.layers).notes == []


def test_estimate_weighs_gate_and_up(model: Path, tmp_path: Path) -> None:
    preflight = prepare(Request(str(model), tmp_path / "out", Options(), importance="weights"))
    facts = Estimation(preflight).run().facts()
    assert facts["weighted"]
    assert any("down" in one for one in facts["not_estimated"])
    assert {one["weighted"] for one in facts["candidates"]} == {False, True}


def test_a_file_of_that_name_is_given_with_its_directory(model: Path, tmp_path: Path) -> None:
    done = ktconv("quantize-cpu", model, tmp_path / "out", "--importance", "./weights")
    assert done.exit_code != 0
    assert "weights" in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("options", [("--compat",), ("--scale", "amax")])
def test_only_the_search_can_weigh_errors(
    options: tuple[str, ...], model: Path, tmp_path: Path
) -> None:
    done = ktconv("quantize-cpu", model, tmp_path / "out", "--importance", "weights", *options)
    assert done.exit_code == 2
    assert "cannot be combined" in done.stderr


def test_a_norm_that_is_damaged(tmp_path: Path) -> None:
    norm = norm_of(0)
    norm[3] = np.nan
    checkpoint = open_checkpoint(write_model(tmp_path / "model", {0: norm}))
    with pytest.raises(CheckpointError, match=r"post_attention_layernorm.*NaN"):
        SourceWeights(checkpoint, checkpoint.layers)


@pytest.mark.parametrize(
    "record", [{"kind": "imatrix"}, {"kind": "weights", "file": "a"}, {},
               {"kind": "weights", "file": "a", "sha256": "b"}],
)  # fmt: skip
def test_records_that_are_none(record: dict[str, str]) -> None:
    usual = Options(importance=BY_WEIGHTS).as_dict()
    assert options_of_record(usual) == Options(importance=BY_WEIGHTS)
    assert options_of_record(usual | {"importance": record}) is None


def test_verify_takes_no_file(model: Path, tmp_path: Path) -> None:
    convert(model, tmp_path / "out", importance="weights")
    file = tmp_path / "file"
    done = ktconv("verify", tmp_path / "out", "--source", model, "--importance", file)
    assert done.exit_code == 2
    assert "follow from the source" in done.stderr
