"""The parts of benchmarks/accuracy that run models: outliers, evaluation, a whole run."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from helpers.paths import EVAL, EXAMPLE

pytest.importorskip("torch")
pytest.importorskip("transformers")

from safetensors.torch import load_file

from benchmarks.accuracy.evaluation import (
    Evaluation,
    Values,
    each_of_running_means,
    greatest_difference,
)
from benchmarks.accuracy.limit import least_squares, quantized
from benchmarks.accuracy.outliers import LARGEST, factors, write_outliers
from benchmarks.accuracy.run import Job, run
from benchmarks.accuracy.texts import cut_in_halves
from benchmarks.accuracy.variants import VARIANTS, Variant
from benchmarks.accuracy.weights import (
    recorded_folds,
    values_of_format,
    values_of_output,
    weight_errors,
)
from ktconv.formats import FORMATS
from ktconv.quantize.packed.run import Request, quantize_cpu
from ktconv.targets.packed.target import Options

pytestmark = [pytest.mark.slow, pytest.mark.torch]


@pytest.fixture(scope="module")
def evaluation() -> Evaluation:
    return Evaluation(EXAMPLE, cut_in_halves(EVAL)[1], limit=3)


def copied(values: Values) -> Values:
    return {key: {p: m.copy() for p, m in of.items()} for key, of in values.items()}


def test_outliers_change_weights_and_no_bit_of_the_function(tmp_path: Path) -> None:
    output = tmp_path / "outliers"
    write_outliers(EXAMPLE, output, 3, 0.5)
    assert greatest_difference(EXAMPLE, output, EVAL) == 0
    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    weights = [
        tensors[name]
        for folder in (EXAMPLE, output)
        for file in sorted(folder.glob("*.safetensors"))
        if name in (tensors := load_file(file))
    ]
    assert weights[0].dtype == weights[1].dtype
    ratio = (weights[1].float() / weights[0].float()).nan_to_num(1.0)
    assert len(ratio.unique()) > 3
    assert ((weights[1].float().abs() > 4 * weights[0].float().abs().max()).sum()) > 0
    again = tmp_path / "again"
    write_outliers(EXAMPLE, again, 3, 0.5)
    for file in output.glob("*.safetensors"):
        assert file.read_bytes() == (again / file.name).read_bytes()


def test_factors_are_powers_of_two_of_heavy_tails() -> None:
    exponents = np.log2(factors((1, 2), 20000, 0.5).numpy())
    assert (exponents == np.rint(exponents)).all()
    assert np.abs(exponents).max() <= LARGEST
    # Of a normal distribution with the same share of zeros, 2 in 100,000 would reach 3.
    assert 0.002 < (np.abs(exponents) >= 3).mean() < 0.02
    assert (factors((1, 3), 100, 0.5) != factors((1, 2), 100, 0.5)).any()


def test_a_checkpoint_without_known_routers_is_refused(tmp_path: Path) -> None:
    model = tmp_path / "dense"
    model.mkdir()
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "b"}}))
    with pytest.raises(ValueError, match="has no routers"):
        write_outliers(model, tmp_path / "out", 1, 0.5)
    assert not (tmp_path / "out").exists()


def test_the_source_is_exactly_its_own_equal(evaluation: Evaluation) -> None:
    found = evaluation.of_values(copied(evaluation.source))
    assert found.kl_mean == found.kl_p99 == 0
    assert found.top1_agreement == 1
    assert found.perplexity_converted == found.perplexity_source
    assert set(found.layer_errors) == {0.0}


def test_worse_weights_are_found_worse_and_are_taken_out_again(evaluation: Evaluation) -> None:
    source = copied(evaluation.source)
    coarse = values_of_format(FORMATS["int4"], evaluation.source)
    fine = values_of_format(FORMATS["int8"], evaluation.source)
    four, eight = evaluation.of_values(coarse), evaluation.of_values(fine)
    assert four.kl_mean > 10 * eight.kl_mean > 0
    assert min(four.layer_errors) > 5 * max(eight.layer_errors)
    assert np.isclose(np.mean(four.kl_windows), four.kl_mean, rtol=1e-9)
    errors = weight_errors(evaluation.source, coarse)
    assert sorted(errors) == ["all", "down", "gate", "up"]
    assert 0.05 < errors["all"] < 0.2
    for key, matrices in evaluation.source.items():
        for projection, matrix in matrices.items():
            assert np.array_equal(matrix, source[key][projection])


def test_running_means() -> None:
    values = np.array([3.0, 1.0, 4.0, 1.5])
    running = np.cumsum(values) / np.arange(1, 5)
    assert np.allclose(each_of_running_means(running.tolist()), values)


def test_the_limit_of_row_scales_is_below_every_rule_and_near_the_search() -> None:
    chooser = np.random.default_rng(2)
    matrix = chooser.standard_t(5, (32, 256)).astype(np.float32)
    matrix[3] = 0
    limit = least_squares(matrix)
    assert limit[3] == 0
    errors = [
        np.square(quantized(matrix, rule) - matrix).sum(axis=1) for rule in ("search", "amax")
    ]
    assert (limit <= errors[0] * (1 + 1e-5)).all()
    assert limit.sum() > 0.98 * errors[0].sum()
    assert limit.sum() < 0.8 * errors[1].sum()


@pytest.mark.parametrize("numa", [1, 2])
def test_folding_is_undone_before_weights_are_compared(
    evaluation: Evaluation, tmp_path: Path, numa: int
) -> None:
    output = tmp_path / "out"
    options = Options(method="int8", numa=numa, fold="up-down")
    quantize_cpu(Request(str(EXAMPLE), output, options))
    folds = recorded_folds(output)
    assert folds.keys() == evaluation.source.keys()
    assert len(np.unique(np.stack(list(folds.values())))) > 5
    settings = evaluation.model.config.to_dict()
    values = values_of_output(output, list(evaluation.sites), settings)
    errors = weight_errors(evaluation.source, values, folds)
    assert max(errors.values()) < 0.01  # those of INT8
    assert min(weight_errors(evaluation.source, values)[p] for p in ("up", "down")) > 0.05


def test_a_run_measures_real_bytes_and_a_second_only_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results, refused = (
        tmp_path / "results.jsonl",
        Variant("odd", "odd", FORMATS["int4"], ("--odd",)),
    )

    def job(*variants: Variant) -> Job:
        return Job(EXAMPLE, EVAL, "halves", ["split"], variants, [1, 4], True, tmp_path, results)

    run(job(VARIANTS["amax"], refused))
    assert "No such option" in capsys.readouterr().out
    (row,) = [json.loads(line) for line in results.read_text().splitlines()]  # INT4 has no 4 parts
    assert (row["variant"], row["numa"], row["kind"]) == ("amax", 1, None)
    assert row["evaluation"] == cut_in_halves(EVAL)[1].name
    assert 0 < row["values"]["kl_mean"] < 0.1
    assert row["kernels"]["kl_mean"] == pytest.approx(row["values"]["kl_mean"], rel=0.5)
    assert row["source_bytes"] > 3_000_000
    assert list((tmp_path / "output").iterdir()) == []
    before = results.read_bytes()
    run(job(VARIANTS["amax"]))
    assert results.read_bytes() == before
