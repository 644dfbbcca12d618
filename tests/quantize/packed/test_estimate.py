"""--estimate: what it predicts and what conversions record, for every encoding and layout."""

from __future__ import annotations

import json
import math
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import reference
from helpers.cli import contents, done, refused, refused_in_json, run, write_model
from helpers.convert import convert, read_json
from helpers.encoded import HIDDEN, INNER, KINDS, SIZES, SOURCE, encoded_model
from helpers.families import Weights, bf16, fused, random_weights, simple_config, write_checkpoint
from helpers.gguf_files import Blocks as GgufBlocks
from helpers.gguf_files import write_gguf
from helpers.gpt_oss import SIZES as GPT_OSS
from helpers.gpt_oss import Blocks
from helpers.importance_files import importance_of, write_importance
from helpers.paths import EXAMPLE
from helpers.reference import Choice
from numpy.typing import NDArray

from ktconv.cli.estimate import advice, estimate_lines
from ktconv.errors import CheckpointError, ResourceError, SourceChangedError
from ktconv.formats import FORMATS, Projection, parse_tensor_name, split
from ktconv.formats.decode import round_to_bf16
from ktconv.quantize.estimate.predictions import Candidate, Estimate, not_estimated
from ktconv.quantize.estimate.run import Estimation
from ktconv.quantize.estimate.sampling import STEP, Limits, Sample, TimedReader, cost_of, draw
from ktconv.quantize.packed.run import Request, prepare
from ktconv.source import open_checkpoint
from ktconv.system.units import parse_ranges
from ktconv.targets.expert_sets import expert_set, write_expert_set
from ktconv.targets.packed.target import Options

pytestmark = pytest.mark.slow

F32 = NDArray[np.float32]
REQUEST = {"layers", "threads", "exclude_experts", "allow_partial"}
FEW = Limits(rows=STEP)  # of all experts of these models


def estimation(
    model: Path, limits: Limits = FEW, weights: Any = None, **options: Any
) -> Estimation:
    """With fields of Request and Options by name, one part and two threads."""
    request = {key: options.pop(key) for key in REQUEST & options.keys()}
    chosen = Options(**{"numa": 1, **options})
    wanted = Request(str(model), model.parent / "none", chosen, **{"threads": 2, **request})
    return Estimation(prepare(wanted), limits, weights)


def predict(model: Path, *args: Any, **options: Any) -> Estimate:
    return estimation(model, *args, **options).run()


def truth(
    candidate: Candidate, proj: Projection, values: F32, rows: range, numa: int, compat: bool
) -> float:
    """The relative RMS error of some rows of a matrix, from the reference arithmetic."""
    inner, hidden = values.shape if proj != "down" else values.shape[::-1]
    parts = [split(proj, hidden, inner, part, numa) for part in range(numa)]
    values = values[rows.start : rows.stop]
    errors = weights = 0.0
    for start, stop in sorted({(part.col_start, part.col_stop) for part in parts}):
        piece = np.ascontiguousarray(values[:, start:stop])
        piece = round_to_bf16(piece) if compat and candidate.rule == "amax" else piece
        fmt = FORMATS[candidate.method]
        codes, scale = reference.quantize(fmt, piece, Choice(candidate.rule))
        off = reference.dequantize(fmt, codes, scale).astype(np.float64) - piece
        errors += float((off**2).sum())
        weights += float((piece.astype(np.float64) ** 2).sum())
    return math.sqrt(errors / weights)


def assert_true(found: Estimate, weights: Weights) -> None:
    """Every sampled row has the errors of the values that the source stands for."""
    options = found.options
    assert len(found.measured) == found.planned
    for sample, errors in found.measured:
        values = getattr(weights, sample.proj)[sample.expert]
        for candidate, error in zip(found.candidates, errors, strict=True):
            where = (sample.proj, values, sample.rows, options.numa, options.compat)
            assert error[0] == pytest.approx(truth(candidate, *where), rel=1e-5)


# ---- predictions -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], list[float]]:
    """What conversions of the example record: (method, rule) -> errors, layer by layer."""
    found = {}
    for method in ("int4", "int8"):
        for rule in ("amax", "search"):
            output = tmp_path_factory.mktemp(method) / rule
            convert(EXAMPLE, output, method=method, scale=rule)
            found[method, rule] = errors_by_cell(read_json(output / "ktconv.json"))
    return found


def errors_by_cell(manifest: dict[str, Any]) -> list[float]:
    """Means over experts, in the order of layers and projections."""
    cells: dict[tuple[int, str], list[float]] = {}
    for unit in manifest["units"].values():
        for name, entry in unit["tensors"].items():
            if "relative_rms_error" in entry:
                tensor = parse_tensor_name(name)
                assert tensor is not None
                cells.setdefault((tensor.layer, tensor.proj), []).append(
                    entry["relative_rms_error"]
                )
    order = [(layer, proj) for layer in range(2) for proj in ("gate", "up", "down")]
    return [float(np.mean(cells[cell])) for cell in order]


def test_a_small_model_is_predicted_as_it_is_converted(
    recorded: dict[tuple[str, str], list[float]],
) -> None:
    """All rows of all experts: the same numbers, but for the digits that the manifest has."""
    found = predict(EXAMPLE, Limits())
    cells = found.cells()
    assert len(cells) == 6
    for i, candidate in enumerate(found.candidates):
        expected = recorded[candidate.method, candidate.rule]
        means = [errors.mean[i, 0] for errors in cells.values()]
        assert means == pytest.approx(expected, rel=2e-3)
    assert all((errors.deviation == 0).all() for errors in cells.values())


@pytest.mark.parametrize("seed", range(3))
def test_samples_predict_within_their_standard_errors(
    seed: int, recorded: dict[tuple[str, str], list[float]]
) -> None:
    facts = predict(EXAMPLE, Limits(rows=STEP, matrices=24, seed=seed)).facts()
    assert facts["experts_sampled"] == [4, 4] and facts["rows_sampled"] == [32, 32]
    for one in facts["candidates"]:
        expected = np.mean(recorded[one["method"], one["scale"]])
        off = abs(one["relative_rms_error"] - expected)
        assert 0 < one["standard_error"] < 0.03 * expected
        assert off < 4 * one["standard_error"]
    int4 = {one["scale"]: one["relative_rms_error"] for one in facts["candidates"][:2]}
    assert int4["search"] < 0.95 * int4["amax"]


@pytest.mark.parametrize(("numa", "kind"), [(1 + i % 3, kind) for i, kind in enumerate(KINDS)])
def test_every_encoding(numa: int, kind: str, tmp_path: Path) -> None:
    model, weights, _ = encoded_model(tmp_path / "model", kind)
    method = "int8" if numa == 2 else "int4"  # which needs whole tiles of 128 in a part
    assert_true(predict(model, method=method, numa=numa, requantize=True), weights)


@pytest.mark.parametrize("form", ["stacked", "stacked [in, out]", "mxfp4 in turn", "bf16 in turn"])
def test_every_layout(form: str, tmp_path: Path) -> None:
    """Those that store weights [in, out] too, and outputs of gate and up in turn."""
    config = simple_config(hidden_size=128, moe_intermediate_size=256)
    allow = False
    if form.startswith("stacked"):
        weights = random_weights(128, 256)
        tensors = fused(SOURCE, weights, "in" in form)
    else:
        blocks = Blocks()
        weights, allow = blocks.weights, True
        tensors = blocks.mxfp4 if form.startswith("mx") else blocks.bf16
        config = simple_config(**GPT_OSS, model_type="gpt_oss", num_experts_per_tok=2)
    model = write_checkpoint(tmp_path / "model", tensors, config)
    found = predict(model, method="int8", numa=3 if allow else 2, allow_activation_mismatch=allow)
    assert set(found.left_out) == ({"int4"} if allow else set())
    assert_true(found, weights)


@pytest.mark.parametrize("kind", ["Q4_K", "IQ3_S", "NVFP4"])
def test_gguf(kind: str, tmp_path: Path) -> None:
    """Blocks of ggml, decoded by the C library and by the package gguf; a part begins inside of
    a block."""
    from helpers.ggml import HALVES, block_size, blocks_of

    rng, stacks, values = np.random.default_rng(2), {}, []
    for word in ("gate", "up", "down"):
        rows, cols = (256, 768) if word == "down" else (768, 256)
        data = blocks_of(rng, kind, 2 * rows, cols)
        for at in HALVES[kind]:  # scales of about the size that weights have
            data.reshape(-1, block_size(kind)[1])[:, at + 1] = 0x14
        blocks = GgufBlocks(kind, data.reshape(2, rows, -1))
        stacks[f"blk.0.ffn_{word}_exps.weight"] = blocks
        values.append(blocks.values)
    sizes = {"block_count": 1, "expert_count": 2, "expert_used_count": 2,
             "embedding_length": 256, "expert_feed_forward_length": 768}  # fmt: skip
    path = write_gguf(tmp_path / "m.gguf", stacks, sizes)
    assert_true(predict(path, numa=2), Weights(*values))


@pytest.mark.parametrize("rule", ["", "amax"])
@pytest.mark.parametrize("compat", [False, True])
def test_compat_rounds_first(compat: bool, rule: Any, tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    values = Weights(*(rng.standard_normal((2, 128, 128)).astype(np.float32) for _ in range(3)))
    tensors = {
        f"{SOURCE}.{expert}.{name}_proj.weight": getattr(values, name)[expert]
        for name in ("gate", "up", "down")
        for expert in range(2)
    }
    config = simple_config(**{**SIZES, "hidden_size": 128, "moe_intermediate_size": 128})
    model = write_checkpoint(tmp_path / "model", tensors, config)
    found = predict(model, compat=compat, scale=rule)
    assert_true(found, values)
    chosen = next(one for one in found.facts()["candidates"] if one["chosen"])
    assert (chosen["scale"], chosen["compat"]) == ("amax" if rule or compat else "search", compat)


def test_integers_that_are_kept_have_no_error(tmp_path: Path) -> None:
    """Of INT8 rows with one scale; --requantize quantizes them anew, and the search finds most of
    them again."""
    kind = next(name for name in KINDS if name.startswith("int8"))
    model, _, _ = encoded_model(tmp_path / "model", kind)
    facts = predict(model, method="int8").facts()
    kept = {one["scale"]: one["relative_rms_error"] for one in facts["candidates"][2:]}
    candidates = predict(model, method="int8", requantize=True).facts()["candidates"][2:]
    anew = {one["scale"]: one["relative_rms_error"] for one in candidates}
    assert kept["amax"] < anew["amax"] and kept["search"] <= anew["search"] < anew["amax"]


def test_importance_is_what_errors_count(tmp_path: Path) -> None:
    """The weighted search is the best by weighted errors, the plain one by plain errors; both
    numbers are those of the reference."""
    rng = np.random.default_rng(8)
    importance = {
        cols: np.exp(rng.normal(0, 2, cols)).astype(np.float32) for cols in (HIDDEN, INNER)
    }

    def weights(layer: int, expert: int, proj: Projection) -> F32:
        assert (layer, expert in (0, 1)) == (0, True)
        return importance[INNER if proj == "down" else HIDDEN]

    tensors = {
        f"{SOURCE}.{expert}.{name}_proj.weight": bf16(rng.standard_normal(shape))
        for name, shape in (
            ("gate", (INNER, HIDDEN)), ("up", (INNER, HIDDEN)), ("down", (HIDDEN, INNER))
        )
        for expert in range(2)
    }  # fmt: skip
    model = write_checkpoint(tmp_path / "model", tensors, simple_config(**SIZES))
    facts = predict(model, FEW, weights, numa=3).facts()
    assert facts["weighted"]
    int4 = {(one["scale"], one["weighted"]): one for one in facts["candidates"][:3]}
    assert [one for one in int4 if int4[one]["chosen"]] == [("search", True)]
    plain, by_importance = "relative_rms_error", "weighted_relative_rms_error"
    search, weighted = int4["search", False], int4["search", True]
    assert weighted[by_importance] < search[by_importance] < int4["amax", False][by_importance]
    assert search[plain] < weighted[plain]
    assert "search, weighted" in "\n".join(estimate_lines(facts | {"advice": advice(facts)}))


def test_importance_by_the_reference(tmp_path: Path) -> None:
    model, values, _ = encoded_model(tmp_path / "model", "fp8 block")
    importance = np.exp(np.random.default_rng(4).normal(0, 1, INNER)).astype(np.float32)
    fmt = FORMATS["int4"]

    def weights(layer: int, expert: int, proj: Projection) -> F32:
        return importance if proj == "down" else importance[:HIDDEN]

    found = predict(model, FEW, weights)
    for sample, errors in found.measured:
        weight = weights(0, sample.expert, sample.proj)
        rows = getattr(values, sample.proj)[sample.expert][sample.rows.start : sample.rows.stop]
        codes, scale = reference.quantize(fmt, np.ascontiguousarray(rows), Choice("search", weight))
        off = reference.dequantize(fmt, codes, scale).astype(np.float64) - rows
        counted = weight.astype(np.float64)
        expected = math.sqrt(
            (counted * off**2).sum() / (counted * rows.astype(np.float64) ** 2).sum()
        )
        assert errors[2, 1] == pytest.approx(expected, rel=1e-5)


def test_a_file_of_importance(tmp_path: Path) -> None:
    """The errors that a conversion with it records, and the coverage of the plan beside them."""
    checkpoint = open_checkpoint(EXAMPLE)
    file = write_importance(tmp_path / "i.safetensors", importance_of(checkpoint), checkpoint)
    convert(EXAMPLE, tmp_path / "out", importance=file)
    expected = errors_by_cell(read_json(tmp_path / "out/ktconv.json"))
    words = ("--importance", file, "--dry-run", "--estimate")
    facts = json.loads(done(EXAMPLE, tmp_path / "none", *words, "--json"))
    assert facts["importance"] and facts["estimate"]["weighted"]
    found = next(one for one in facts["estimate"]["candidates"] if one["chosen"])
    assert (found["scale"], found["weighted"]) == ("search", True)
    cells = [layer[proj] for layer in found["layers"] for proj in ("gate", "up", "down")]
    assert [one["relative_rms_error"] for one in cells] == pytest.approx(expected, rel=2e-3)
    assert "int4 search, weighted, by layer:" in done(EXAMPLE, tmp_path / "none", *words)


# ---- what is sampled -------------------------------------------------------------------


def test_the_same_numbers_every_time(tmp_path: Path) -> None:
    limits = Limits(rows=STEP, matrices=24)
    once, again = (predict(EXAMPLE, limits, threads=n).facts() for n in (1, 4))
    assert once.pop("seconds") > 0 and again.pop("seconds") > 0
    assert once == again
    other = predict(EXAMPLE, Limits(rows=STEP, matrices=24, seed=1)).facts()
    assert (
        other["candidates"][0]["relative_rms_error"] != once["candidates"][0]["relative_rms_error"]
    )


def test_samples_are_spread_and_bounded(tmp_path: Path) -> None:
    """Any beginning of the list has all layers and projections about equally often."""
    model = write_model(tmp_path / "model", layers=5, experts=8, inner=256)
    units = prepare(Request(str(model), tmp_path / "none")).units
    limits = Limits(matrices=70, rows=64)
    samples = draw(units, limits)
    assert len(samples) == 60  # 4 of 8 experts: 5 would be 75 matrices
    for count in (15, 30, 45, 60):
        cells = [sample.cell for sample in samples[:count]]
        assert {cells.count(cell) for cell in cells} == {count // 15}
    for unit in units:
        own = {sample.expert for sample in samples if sample.layer.index == unit.layer.index}
        assert len(own) == 4
    assert len({sample.rows.start for sample in samples}) > 1
    assert all(
        sample.rows.start % STEP == 0 and sample.rows.start >= 0
        and sample.rows.stop <= sample.matrix.rows and len(sample.rows) == 64
        for sample in samples
    )  # fmt: skip
    cost = 40 * cost_of(samples[0].matrix, STEP)
    cheap = draw(units, Limits(cost=cost))
    assert sum(cost_of(sample.matrix, len(sample.rows)) for sample in cheap) <= cost
    assert len(draw(units, Limits(cost=1))) == 15  # one expert of each layer all the same


def test_rows_of_a_turned_matrix_cost_pages(tmp_path: Path) -> None:
    """A piece of every input is in a page of its own, but no more is there than the matrix."""
    tensors = fused(SOURCE, random_weights(128, 8192, experts=1), transposed=True)
    config = simple_config(hidden_size=128, moe_intermediate_size=8192, num_experts=1)
    model = write_checkpoint(tmp_path / "model", tensors, config)
    matrices = prepare(Request(str(model), tmp_path / "none")).units[0].layer.experts[0]
    assert cost_of(matrices["gate"], 32) == cost_of(matrices["gate"], 2048) == 128 * 4096
    assert cost_of(matrices["down"], 32) == 128 * 8192 * 2


def test_time_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write_model(tmp_path / "model", layers=3)
    with pytest.raises(ResourceError, match=r"no rows of .* could be read within 0 s"):
        predict(model, Limits(seconds=0))
    reads = iter(range(1000))
    read = TimedReader.read

    def slow(self: TimedReader, *args: Any) -> None:
        if next(reads) == 5:
            self.stop()
        read(self, *args)

    monkeypatch.setattr(TimedReader, "read", slow)
    facts = predict(model, threads=1).facts()
    assert (facts["matrices_sampled"], facts["complete"]) == (5, False)
    assert len(facts["layers_not_sampled"]) == 2  # one was not begun, one has two of three
    text = "\n".join(estimate_lines(facts | {"advice": advice(facts)}))
    assert "no time for 31 of 36 matrices" in text and "Not sampled" in text
    assert "nan" not in text


def test_only_what_would_be_converted(tmp_path: Path) -> None:
    file = tmp_path / "hot.json"
    write_expert_set(expert_set({0: [0, 3, 7], 1: [5]}), file)
    found = predict(EXAMPLE, layers=[1], exclude_experts=file, allow_partial=True)
    assert {sample.layer.index for sample, _ in found.measured} == {1}
    assert {sample.expert for sample, _ in found.measured} == set(range(8)) - {5}
    facts = found.facts()
    assert facts["experts"] == [7, 7]
    expected = 7 * FORMATS["int4"].expert_bytes(128, 256)
    assert facts["candidates"][0]["expert_bytes"] == expected


# ---- bad input -------------------------------------------------------------------------


def test_a_nan_in_the_sample_is_named(tmp_path: Path) -> None:
    weights = random_weights(128, 128, experts=2)
    weights.down[1, 37, 5] = np.nan
    model = write_checkpoint(
        tmp_path / "model",
        {f"{SOURCE}.{e}.{n}_proj.weight": getattr(weights, n)[e]
         for e in range(2) for n in ("gate", "up", "down")},
        simple_config(num_experts=2),
    )  # fmt: skip
    with pytest.raises(CheckpointError, match=r"1\.down_proj.* NaN .* at \[37, 5\]"):
        predict(model, Limits(), numa=1)


def test_files_that_change_are_refused(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", layers=1, shards=1)
    planned = estimation(model)
    shard = next(model.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1000])
    with pytest.raises(SourceChangedError, match="changed while it was read"):
        planned.run()
    shard.unlink()
    with pytest.raises(ResourceError, match="No such file"):
        planned.run()


# ---- the command -----------------------------------------------------------------------


def test_the_command_prints_a_table_and_writes_nothing(tmp_path: Path) -> None:
    before = contents(tmp_path)
    result = run(EXAMPLE, tmp_path / "out", "--dry-run", "--estimate")
    assert result.exit_code == 0
    assert "sample 4 of 4 done" in result.stderr
    lines = result.stdout.splitlines()
    table = [line.split() for line in lines if line[3:7] == "int4" or line[3:7] == "int8"]
    assert [row[:2] for row in table if row[0] == ">"] == [[">", "int4"]]
    assert len(table) == 4
    assert lines[-1].startswith("Advice: int4 search has 0.88 times the error of amax")
    assert all(len(line) <= 110 for line in lines[-12:-1])
    assert contents(tmp_path) == before


def test_the_advice_follows_from_the_numbers(tmp_path: Path) -> None:
    def said(*more: str) -> str:
        return json.loads(done(EXAMPLE, tmp_path / "out", "--dry-run", "--estimate", "--json",
                               *more))["estimate"]["advice"]  # fmt: skip

    assert "use --scale search" in said("--scale", "amax")
    assert "omit --compat" in said("--compat")
    assert said("--method", "int8").startswith("Advice: ")
    assert "--method int4 has 16" in said("--method", "int8")
    assert "use --scale" not in said()


def test_what_is_not_estimated_is_said() -> None:
    facts = predict(EXAMPLE).facts()
    assert facts["not_estimated"] == []
    facts["not_estimated"] = not_estimated({"method": "int4", "calibrate": {}, "fold": "up-down"})
    lines = list(estimate_lines(facts | {"advice": advice(facts)}))
    said = [line for line in lines if line.startswith("Not estimated: ")]
    assert ["--fold" in said[0], "--calibrate" in said[1], len(said)] == [True, True, 2]


def test_usage(tmp_path: Path) -> None:
    refused(run(EXAMPLE, tmp_path / "out", "--estimate"), 2, "without converting")
    refused_in_json(run(EXAMPLE, tmp_path / "out", "--estimate", "--json"), 2, "--estimate")
    assert not (tmp_path / "out").exists()


def test_an_interrupt_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[Sample] = []

    def interrupted(_: Estimation, sample: Sample, reader: TimedReader) -> None:
        begun.append(sample)
        if len(begun) == 1:
            os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.05)

    monkeypatch.setattr(Estimation, "_measure", interrupted)
    result = run(EXAMPLE, tmp_path / "out", "--dry-run", "--estimate")
    assert result.exit_code == 130
    assert "Interrupted. Nothing was written." in result.stderr
    assert result.stdout == ""
    assert len(begun) < 48  # what was not begun never is


def layers_of(count: int) -> list[dict[str, Any]]:
    """Facts of layers whose errors jump once, at layer 40."""
    return [
        {"layer": i} | {proj: {"relative_rms_error": 0.1 + 0.05 * (i >= 40)} for proj in "ab"}
        for i in range(count)
    ]


def noisy(count: int) -> list[dict[str, Any]]:
    """Facts of layers of which no two are alike; of some a projection was not sampled."""
    found: list[dict[str, Any]] = [
        {"layer": i} | {proj: {"relative_rms_error": 0.1 + i % 7 / 100} for proj in "ab"}
        for i in range(count)
    ]
    for one in found[::9]:
        del one["b"]
    return found


def test_deep_models_have_short_tables() -> None:
    from ktconv.cli.estimate import _layer_rows

    def rows(layers: list[dict[str, Any]]) -> list[list[str]]:
        return _layer_rows({"by_projection": {"a": {}, "b": {}}, "layers": layers})[1:]

    found = rows(layers_of(61))
    assert found == [["0-39", "0.1000", "0.1000"], ["40-60", "0.1500", "0.1500"]]
    assert len(rows(layers_of(16))) == 16
    assert rows(noisy(16))[0] == ["0", "0.1000", "-"]
    assert 2 <= len(rows(noisy(90))) <= 24
    assert parse_ranges(",".join(row[0] for row in rows(noisy(90))), "") == list(range(90))
    nothing = [
        {"layer": i, "a": {"relative_rms_error": 0.0}, "b": {"relative_rms_error": 0.0}}
        for i in range(20)
    ]
    assert rows(nothing) == [["0-19", "0.0000", "0.0000"]]
