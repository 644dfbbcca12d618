"""`--fold up-down` with `--calibrate`: what is compensated, recorded and proven is folded."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.activations import silu
from helpers.convert import all_files, convert, read_json, read_model, source_matrices
from helpers.corrupt import bytes_of, overwrite, place_of
from helpers.families import bf16, numbered, random_weights, simple_config, write_checkpoint
from helpers.levels import at_level
from helpers.paths import EXAMPLE
from helpers.second_moments import TOKENS, correlated, record
from helpers.stopped import StopsAfterOneUnit
from numpy.typing import NDArray

from ktconv import native
from ktconv.errors import OutputError
from ktconv.formats import FORMATS, split, tensor_name
from ktconv.formats.folding import decode, encode, factors
from ktconv.quantize.packed.gptq.codes import factor_of
from ktconv.quantize.packed.gptq.inputs import FEWEST_TOKENS
from ktconv.quantize.packed.run import Request, quantize_cpu
from ktconv.repack import merge, reshard
from ktconv.source import PROJECTIONS, MoELayer, Projection, open_checkpoint
from ktconv.targets.packed.target import Options
from ktconv.verify import Request as VerifyRequest
from ktconv.verify import Result, verify

pytestmark = [pytest.mark.slow, pytest.mark.torch]

pytest.importorskip("torch")

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
FOLD: dict[str, Any] = {"fold": "up-down"}
HIDDEN, INNER, EXPERTS = 128, 256, 2  # of the model with uneven columns


@pytest.fixture(scope="module")
def moments(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("calibration") / "moments"
    return record(directory, open_checkpoint(EXAMPLE))


@pytest.fixture(scope="module", params=[1, 2])
def numa(request: pytest.FixtureRequest) -> int:
    count: int = request.param
    return count


@pytest.fixture(scope="module")
def folded(moments: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """Outputs of so many parts, each made once."""

    @cache
    def get(numa: int) -> Path:
        output = tmp_path_factory.mktemp("folded") / f"output-{numa}"
        convert(EXAMPLE, output, calibrate=moments, numa=numa, threads=2, **FOLD)
        return output

    return get


@pytest.fixture(scope="module")
def converted(numa: int, folded: Callable[[int], Path]) -> Path:
    return folded(numa)


def tensor_records(output: Path) -> dict[str, Any]:
    units = read_json(output / "ktconv.json")["units"].values()
    return {name: one for unit in units for name, one in unit["tensors"].items()}


def verified(output: Path, calibrate: Path | None) -> Result:
    return verify(VerifyRequest(output, str(EXAMPLE), "weights", calibrate=calibrate, threads=1))


# ---- arithmetic ------------------------------------------------------------------------


def test_a_factor_of_inputs_that_are_multiplied() -> None:
    """The damped matrix of the inputs as they were, between two diagonal matrices: whatever the
    exponents are, errors of the outputs count what they did."""
    rng, tokens, size = np.random.default_rng(5), 900, 96
    inputs = correlated(tokens, size, 5)
    hessian, profile = inputs.T @ inputs, rng.uniform(0.2, 1.8, size)
    stretch = factors(rng.integers(-60, 60, size))
    plain = _damped(factor_of(hessian.copy(), tokens, profile))
    factor = factor_of(hessian.copy(), tokens, profile, stretch)
    found = _damped(factor) / np.outer(stretch, stretch)
    np.testing.assert_allclose(found, plain, atol=2e-4 * plain.diagonal().max())
    np.testing.assert_allclose(found.diagonal(), plain.diagonal(), rtol=1e-3)
    diagonal = plain.diagonal() * np.square(stretch.astype(float))
    assert (np.diff(diagonal[factor.order]) <= 1e-3 * diagonal[factor.order][:-1]).all()


def _damped(factor: Any) -> F64:
    """What a factor is of, columns as they were."""
    upper, place = factor.upper.double().numpy(), np.argsort(factor.order)
    whole: F64 = np.linalg.inv(upper.T @ upper)[np.ix_(place, place)]
    return whole


# ---- what is recorded and proven -------------------------------------------------------


def test_records(converted: Path, numa: int) -> None:
    """Experts that fell back are folded, too."""
    manifest, records = read_json(converted / "ktconv.json"), tensor_records(converted)
    assert manifest["options"]["fold"] == "up-down" and "calibrate" in manifest["options"]
    for expert, tokens in enumerate(TOKENS):
        for proj in PROJECTIONS:
            one = records[tensor_name(1, proj, expert, numa - 1, "weight")]
            enough = tokens >= FEWEST_TOKENS
            assert one["codes"] == ("gptq" if enough else "search")
            assert ("row_error_bound" in one) == enough
            assert ("fold" in one) == (proj == "up")
            if proj == "up":
                assert decode(one["fold"], 256 // numa).any()
    readme = (converted / "README.md").read_text()
    assert "--fold up-down" in readme and readme.count("--calibrate DIR") == 1


def test_verify_proves_it(converted: Path, moments: Path) -> None:
    given, without = verified(converted, moments), verified(converted, None)
    assert given.passed and without.passed, [*given.failures, *without.failures]
    assert [len(one.facts["weights"]["unproven"]) for one in (given, without)] == [1, 2]
    words = given.facts["weights"]["codes_by"]
    assert "GPTQ on text" in words and "up-down folded" in words


def test_a_wrong_exponent_is_found(
    converted: Path, numa: int, moments: Path, tmp_path: Path
) -> None:
    output, experts = copied(converted, tmp_path), (0, 2, 6)  # two that fell back, one that did not
    for expert in experts:
        name = tensor_name(1, "up", expert, numa - 1, "weight")
        exponents = decode(tensor_records(output)[name]["fold"], 256 // numa).copy()
        exponents[37] += 1
        set_fold(output, name, encode(exponents))
    failures = verified(output, moments).failures
    located = {(one.layer, one.expert) for one in failures if one.check != "manifest"}
    assert located == {(1, expert) for expert in experts}
    up = [one for one in failures if one.projection == "up" and one.check == "scale"]
    assert [(one.expert, one.part, one.row) for one in up] == [
        (expert, numa - 1, 37) for expert in experts
    ]
    down = {(one.expert, one.part) for one in failures if one.projection == "down"}
    assert down == {(expert, numa - 1) for expert in experts}
    without = verified(output, None)
    # Of compensated ones only the moments are certain to tell.
    assert {0, 2} <= {one.expert for one in without.failures}
    said = without.facts["weights"]["unproven"][1]
    assert "factors of folding" in said and "--calibrate DIR" in said


@pytest.mark.parametrize("value", [None, 7, "AAAA"])
def test_missing_exponents_are_found(
    value: object, converted: Path, moments: Path, tmp_path: Path
) -> None:
    output = copied(converted, tmp_path)
    set_fold(output, tensor_name(1, "up", 6, 0, "weight"), value)
    failures = verified(output, moments).failures
    assert {one.check for one in failures} == {"manifest"}
    assert {one.projection for one in failures} == {"up", "down"}


def test_wrong_scales_are_found(converted: Path, numa: int, moments: Path, tmp_path: Path) -> None:
    output, cases = copied(converted, tmp_path), [(2, "up"), (2, "down"), (6, "up"), (6, "down")]
    for expert, proj in cases:
        place = place_of(output, f"blk.0.ffn_{proj}_exps.{expert}.numa.{numa - 1}.scale")
        scale = np.frombuffer(bytes_of(place), "<f4").copy()
        scale[9] = np.nextafter(scale[9], np.float32(np.inf))
        overwrite(place, scale.tobytes())
    wrong = [one for one in verified(output, moments).failures if one.check == "scale"]
    assert [(one.expert, one.projection) for one in wrong] == cases
    assert {(one.part, one.row) for one in wrong} == {(numa - 1, 9)}


def copied(output: Path, tmp_path: Path) -> Path:
    shutil.copytree(output, tmp_path / "copy")
    return tmp_path / "copy"


def set_fold(output: Path, name: str, value: object) -> None:
    manifest = read_json(output / "ktconv.json")
    for unit in manifest["units"].values():
        if name in unit["tensors"]:
            del unit["tensors"][name]["fold"]
            unit["tensors"][name] |= {} if value is None else {"fold": value}
    (output / "ktconv.json").write_text(json.dumps(manifest))


# ---- runs ------------------------------------------------------------------------------


def test_a_killed_run_goes_on(converted: Path, numa: int, moments: Path, tmp_path: Path) -> None:
    """With the same bytes, with another number of threads and other instructions."""
    options = Options(numa=numa, **FOLD)
    request = Request(str(EXAMPLE), tmp_path / "out", options, threads=1, calibrate=moments)
    with pytest.raises(KeyboardInterrupt):
        quantize_cpu(request, StopsAfterOneUnit())
    with at_level("scalar"):
        report = quantize_cpu(request)
    assert report.kept and report.complete
    assert all_files(tmp_path / "out") == all_files(converted)


def test_another_run_must_fold_too(converted: Path, numa: int, moments: Path) -> None:
    with pytest.raises(OutputError, match=r"options\.fold"):
        convert(EXAMPLE, converted, calibrate=moments, numa=numa)


# ---- merged and cut anew ---------------------------------------------------------------


def test_merging_carries_the_records(moments: Path, tmp_path: Path) -> None:
    folders, out = tmp_path / "folders", tmp_path / "out"
    convert(EXAMPLE, folders, calibrate=moments, numa=2, layout="layers", threads=2, **FOLD)
    merge.merge(merge.Request(folders, out, source=str(EXAMPLE), threads=1))
    assert tensor_records(folders).items() <= tensor_records(out).items()
    result = verified(out, moments)
    assert result.passed, result.failures


def test_parts_are_cut_anew(moments: Path, folded: Callable[[int], Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    reshard.reshard(reshard.Request(folded(1), out, numa=2, threads=1))
    for given in (moments, None):
        result = verified(out, given)
        assert result.passed, result.failures


# ---- uneven columns of down ------------------------------------------------------------


@pytest.fixture(scope="module")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Columns of down differ by orders of magnitude, and rows of up make up for it."""
    weights = random_weights(HIDDEN, INNER, EXPERTS, seed=11)
    spread = np.exp2(np.random.default_rng(11).integers(-3, 4, INNER)).astype(np.float32)
    weights = weights._replace(down=weights.down * spread, up=weights.up / spread[:, None])
    tensors = numbered("model.layers.0.mlp.experts", weights)
    bias = np.arange(INNER, dtype=np.float32)
    tensors["model.layers.0.mlp.experts.1.up_proj.bias"] = bf16(bias)
    config = simple_config(hidden_size=HIDDEN, moe_intermediate_size=INNER, num_experts=EXPERTS)
    return write_checkpoint(tmp_path_factory.mktemp("uneven") / "model", tensors, config)


def hidden_states(tokens: int, seed: int) -> F64:
    """Of one distribution; `seed`: of the tokens."""
    mix = np.random.default_rng(0).standard_normal((HIDDEN, HIDDEN)) / HIDDEN
    return np.random.default_rng(seed).standard_normal((tokens, HIDDEN)) @ mix


def inner_states(inputs: F64, gate: F32, up: F32) -> F64:
    return silu(inputs @ gate.T.astype(float), inputs @ up.T.astype(float))


def recorded_inputs(model: Path) -> Callable[[MoELayer, int], tuple[F32, F32]]:
    source = source_matrices(model)

    def inputs(layer: MoELayer, expert: int) -> tuple[F32, F32]:
        seen = hidden_states(2000, expert)
        gate, up = (source[layer.index, expert, proj] for proj in ("gate", "up"))
        return seen.astype(np.float32), inner_states(seen, gate, up).astype(np.float32)

    return inputs


def restored(output: Path, proj: Projection, numa: int) -> F32:
    """Expert 0's matrix [out, in] that the packed bytes mean."""
    fmt, tensors, parts = FORMATS["int4"], read_model(output), []
    for part in range(numa):
        owned = split(proj, HIDDEN, INNER, part, numa)
        names = [tensor_name(0, proj, 0, part, kind) for kind in ("weight", "scale")]
        packed, scale = (np.frombuffer(tensors[name].data, np.uint8) for name in names)
        codes, scales = native.unpack_weight(fmt.layout, *owned.shape, packed, scale)
        parts.append(codes * (scales * np.float32(fmt.traits.scale_units))[:, None])
    whole: F32 = np.concatenate(parts, axis=1 if proj == "down" else 0)
    return whole


def output_error(output: Path, source: Any, numa: int) -> float:
    """Relative error of expert 0's outputs, of other tokens than the recorded ones."""
    seen = hidden_states(500, 99)
    mine = [restored(output, proj, numa) for proj in PROJECTIONS]
    own = [source[0, 0, proj] for proj in PROJECTIONS]
    got, expected = (
        inner_states(seen, gate, up) @ down.T.astype(float) for gate, up, down in (mine, own)
    )
    return float(np.linalg.norm(got - expected) / np.linalg.norm(expected))


@pytest.mark.parametrize("numa", [1, 2])
def test_outputs_are_nearer_than_without_folding(numa: int, uneven: Path, tmp_path: Path) -> None:
    moments = record(tmp_path / "moments", open_checkpoint(uneven), inputs=recorded_inputs(uneven))
    options = {"calibrate": moments, "numa": numa, "allow_activation_mismatch": True}
    convert(uneven, tmp_path / "plain", **options)
    convert(uneven, tmp_path / "folded", **options, **FOLD)
    convert(uneven, tmp_path / "rounded", numa=numa, allow_activation_mismatch=True, **FOLD)
    source = source_matrices(uneven)
    plain, folded, rounded = (
        output_error(tmp_path / name, source, numa) for name in ("plain", "folded", "rounded")
    )
    print(plain, folded, rounded)
    assert folded < plain and folded < rounded


def test_the_bias_of_up_is_folded(uneven: Path, tmp_path: Path) -> None:
    moments = record(tmp_path / "moments", open_checkpoint(uneven), inputs=recorded_inputs(uneven))
    options = {"calibrate": moments, "allow_activation_mismatch": True}
    convert(uneven, tmp_path / "out", **options, **FOLD)
    records = tensor_records(tmp_path / "out")
    exponents = decode(records[tensor_name(0, "up", 1, 0, "weight")]["fold"], INNER)
    stored = read_model(tmp_path / "out")[tensor_name(0, "up", 1, 0, "bias")].data
    plain = (np.arange(INNER, dtype=np.float32).view(np.uint32) & 0xFFFF0000).view(np.float32)
    np.testing.assert_array_equal(np.frombuffer(stored, "<f4"), plain * factors(exponents))
