"""`--calibrate DIR`: codes that make up for one another's errors, from second moments to bytes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.convert import Converted, all_files, convert, read_json, read_model
from helpers.corrupt import bytes_of, overwrite, place_of
from helpers.families import read_matrix
from helpers.levels import at_level
from helpers.paths import EXAMPLE
from helpers.second_moments import TOKENS, correlated, record
from helpers.stopped import StopsAfterOneUnit
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from ktconv import native
from ktconv.conversion.run import DISK_MARGIN
from ktconv.errors import CheckpointError, DiskSpaceError, MemoryLimitError, OutputError, UsageError
from ktconv.formats import FORMATS, split, tensor_name
from ktconv.formats.search import MULTIPLES
from ktconv.quantize.packed.gptq.codes import Factor, OrderedRows, best_codes, factor_of
from ktconv.quantize.packed.gptq.inputs import FEWEST_TOKENS, open_calibration
from ktconv.quantize.packed.gptq.task import bound_of
from ktconv.quantize.packed.run import Request, prepare, quantize_cpu
from ktconv.repack.reshard import Request as ReshardRequest
from ktconv.repack.reshard import reshard
from ktconv.source import PROJECTIONS, Checkpoint, Projection, open_checkpoint
from ktconv.stats.command import StatsRequest
from ktconv.stats.command import run as run_stats
from ktconv.stats.hessian import open_hessians
from ktconv.stats.router_sample import router_sample
from ktconv.targets.packed.target import Options
from ktconv.verify import Request as VerifyRequest
from ktconv.verify import Result, verify

pytestmark = [pytest.mark.slow, pytest.mark.torch]

torch = pytest.importorskip("torch")

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return open_checkpoint(EXAMPLE)


@pytest.fixture(scope="module")
def moments(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(tmp_path_factory.mktemp("calibration") / "moments", checkpoint)


@pytest.fixture(scope="module")
def converted(moments: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("calibrated") / "output"
    convert(EXAMPLE, output, calibrate=moments, numa=2)
    return output


def restored(output: Path, layer: Any, expert: int, proj: Projection, numa: int) -> F32:
    """The matrix [out, in] that the packed bytes mean."""
    fmt, tensors = FORMATS["int4"], read_model(output)
    whole = np.zeros((0, 0), np.float32)
    for part in range(numa):
        owned = split(proj, layer.hidden_size, layer.intermediate_size, part, numa)
        names = [tensor_name(layer.index, proj, expert, part, kind) for kind in ("weight", "scale")]
        packed, scale = (np.frombuffer(tensors[name].data, np.uint8) for name in names)
        codes, scales = native.unpack_weight(fmt.layout, *owned.shape, packed, scale)
        values = codes * (scales * np.float32(fmt.traits.scale_units))[:, None]
        axis = 1 if proj == "down" else 0
        whole = values if part == 0 else np.concatenate([whole, values], axis=axis)
    return whole


# ---- arithmetic ------------------------------------------------------------------------


def searched(layout: native.Layout, weights: F32, hessian: F32, parts: int = 1) -> F32:
    """Scales [N, G] by the search on the diagonal, of slices of the columns."""
    importance = (hessian.diagonal() / hessian.diagonal().mean()).astype(np.float32)
    found = []
    for own, of in zip(np.split(weights, parts, 1), np.split(importance, parts), strict=True):
        view = native.Matrix(
            np.ascontiguousarray(own).view(np.uint8).reshape(-1), "F32", *own.shape
        )
        choice = native.Choice("search", np.ascontiguousarray(of))
        found.append(native.quantize(layout, view, choice)[1].reshape(len(weights), -1))
    return np.concatenate(found, axis=1)


def error(weights: F32, values: F32, hessian: F32) -> F64:
    """Squared errors of outputs [N]."""
    off = (weights - values).astype(np.float64)
    return np.einsum("nk,nk->n", off @ hessian.astype(np.float64), off)


def case(tokens: int, size: int = 256) -> tuple[F32, F32]:
    rng = np.random.default_rng(tokens)
    weights = (rng.standard_normal((64, size)) / 50).astype(np.float32)
    inputs = correlated(tokens, size, tokens)
    hessian: F32 = inputs.T @ inputs
    return weights, hessian


@pytest.mark.parametrize("tokens", [1, 20, 3000])  # rank-deficient twice
@pytest.mark.parametrize(
    ("layout", "parts"),
    [
        (native.Layout("int4"), 1),
        (native.Layout("int4"), 2),
        (native.Layout("int8"), 4),
        (native.Layout("gint4", 32), 1),
        (native.Layout("gint4", 128), 2),
    ],
)
def test_beats_the_search_on_its_own_inputs(layout: native.Layout, parts: int, tokens: int) -> None:
    """Rows, slices and groups with scales of their own: errors are made up for across them."""
    weights, hessian = case(tokens)
    scale = searched(layout, weights, hessian, parts)
    group_of_col = np.arange(256, dtype=np.int32) // (256 // scale.shape[1])
    factor = factor_of(hessian.copy(), tokens, np.ones(256))
    codes, scales = best_codes(layout, weights, factor, scale, group_of_col)
    step = np.float32(layout.traits.scale_units)
    plain = np.clip(np.rint(weights / (scale * step)[:, group_of_col]), *_range(layout))
    before = error(weights, plain * (scale * step)[:, group_of_col], hessian)
    after = error(weights, codes * (scales * step)[:, group_of_col], hessian)
    assert np.abs(codes.astype(int)).max() <= layout.traits.max_level
    assert after.sum() < 0.5 * before.sum()
    ratio = scales / scale
    assert np.isclose(ratio[:, :, None], MULTIPLES, rtol=1e-6).any(axis=2).all()
    assert (ratio == ratio[:, :1]).mean() > 0.9  # a row has one multiple, up to rounding


def _range(layout: native.Layout) -> tuple[int, int]:
    return -layout.traits.max_level, layout.traits.max_level


@pytest.mark.parametrize("size", [64, 256, 300])  # blocks of columns: one, two, and a part
def test_the_factor_is_that_of_the_inverse(size: int) -> None:
    _, hessian = case(3000, size)
    factor = factor_of(hessian.copy(), 3000, np.ones(size))
    assert sorted(factor.order) == list(range(size))
    upper = factor.upper.double().numpy()
    assert np.array_equal(upper, np.triu(upper))
    inverse = np.linalg.inv(upper.T @ upper)
    diagonal = inverse.diagonal()
    assert (np.diff(diagonal) <= 1e-3 * diagonal[:-1]).all()  # largest inputs first
    expected = hessian[np.ix_(factor.order, factor.order)] / hessian.diagonal().mean()
    off = ~np.eye(size, dtype=bool)
    np.testing.assert_allclose(inverse[off], expected[off], atol=1e-3 * diagonal.max())


def test_each_row_has_its_best_multiple(monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors of four rows under each; the last one's fall again behind a multiple that is worse."""
    losses = {
        0.85: [9, 1, 9, 0], 0.92: [9, 2, 9, 5], 1.0: [3, 3, 3, 4], 1.08: [3, 9, 2, 5],
        1.15: [3, 9, 1, 0],
    }  # fmt: skip

    def under(rows: OrderedRows, scale: F32) -> Any:
        multiple = min(losses, key=lambda one: abs(one - float(scale[0, 0])))
        codes = np.full((32, 4), round(100 * multiple), np.int8)
        return codes, np.array(losses[multiple], np.float64)

    monkeypatch.setattr(OrderedRows, "codes_under", under)
    weights, factor = np.zeros((4, 32), np.float32), Factor(np.arange(32), torch.eye(32))
    ones, group_of_col = np.ones((4, 1), np.float32), np.zeros(32, np.int32)
    codes, scales = best_codes(native.Layout("int4"), weights, factor, ones, group_of_col)
    np.testing.assert_allclose(scales[:, 0], [1, 0.85, 1.15, 0.85], rtol=1e-6)
    assert list(codes[:, 0]) == [100, 85, 115, 85]


@pytest.mark.parametrize("together", [128, 160, 512])
def test_the_loss_is_the_error_of_outputs(together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss by which multiples are chosen, against the damped matrix itself, however many
    columns spread their errors together."""
    monkeypatch.setattr("ktconv.quantize.packed.gptq.codes.TOGETHER_COLS", together)
    weights, hessian = case(500)
    layout = native.Layout("int4")
    scale, groups = searched(layout, weights, hessian), np.zeros(256, np.int32)
    factor = factor_of(hessian.copy(), 500, np.ones(256))
    rows = OrderedRows(layout, weights, factor, groups)
    found, loss = rows.codes_under(scale)
    codes = rows.in_place(found)
    upper = factor.upper.double().numpy()
    damped = np.linalg.inv(upper.T @ upper)
    values = codes * (scale * np.float32(16))
    order = factor.order
    np.testing.assert_allclose(loss, error(weights[:, order], values[:, order], damped), rtol=1e-2)


def test_no_second_moment() -> None:
    wrong = -100 * np.ones((64, 64), np.float32)
    np.fill_diagonal(wrong, 1)
    with pytest.raises(ValueError, match="not positive definite"):
        factor_of(wrong, 100, np.ones(64))


@pytest.mark.parametrize("value", [0.0, 1.0, 0.123451, 0.99999999, 1e-7 / 3, 0.15000001])
def test_bounds_are_rounded_up(value: float) -> None:
    bound = bound_of(np.array([0.0, value]))
    assert value <= bound <= value * 1.001


# ---- the conversion --------------------------------------------------------------------


def test_records_and_fallback(converted: Path, checkpoint: Checkpoint) -> None:
    manifest = read_json(converted / "ktconv.json")
    assert manifest["options"]["calibrate"]["kind"] == "hessian"
    tensors = {n: one for unit in manifest["units"].values() for n, one in unit["tensors"].items()}
    for layer in checkpoint.layers:
        for expert, tokens in enumerate(TOKENS):
            for proj in PROJECTIONS:
                found = tensors[tensor_name(layer.index, proj, expert, 1, "weight")]
                assert found["calibration_tokens"] == tokens
                enough = tokens >= FEWEST_TOKENS
                assert found["codes"] == ("gptq" if enough else "search")
                assert ("row_error_bound" in found) == enough


def test_outputs_are_nearer(
    converted: Path, moments: Path, checkpoint: Checkpoint, converted_example: Converted
) -> None:
    """Errors of the outputs of matrices, against the search without inputs."""
    plain_output = converted_example(numa=2)
    hessians = open_hessians(moments)
    layer = checkpoint.layers[1]
    for proj in PROJECTIONS:
        source, hessian = read_matrix(layer.experts[7][proj]), hessians.matrix(1, 7, proj)
        plain, mine = (
            error(source, restored(output, layer, 7, proj, 2), hessian).sum()
            for output in (plain_output, converted)
        )
        assert mine < 0.4 * plain


@pytest.mark.parametrize("level", native.isa_available()[::2])
def test_bytes_follow_from_the_inputs_alone(
    converted: Path, moments: Path, level: str, tmp_path: Path
) -> None:
    """For any number of threads and at every level."""
    with at_level(level):
        convert(EXAMPLE, tmp_path / "other", calibrate=moments, numa=2, threads=3)
    assert all_files(tmp_path / "other") == all_files(converted)


def test_a_killed_run_goes_on(converted: Path, moments: Path, tmp_path: Path) -> None:
    request = Request(str(EXAMPLE), tmp_path / "out", Options(numa=2), threads=1, calibrate=moments)
    with pytest.raises(KeyboardInterrupt):
        quantize_cpu(request, StopsAfterOneUnit())
    assert not (tmp_path / "out" / "ktconv.json").exists()
    report = quantize_cpu(request)
    assert report.kept and report.complete
    assert all_files(tmp_path / "out") == all_files(converted)


def test_other_second_moments_do_not_go_on(
    checkpoint: Checkpoint, converted: Path, tmp_path: Path
) -> None:
    other = record(tmp_path / "other", checkpoint, run="3" * 64)
    with pytest.raises(OutputError, match="options"):
        convert(EXAMPLE, converted, calibrate=other, numa=2)


# ---- a text ----------------------------------------------------------------------------


def tensors_of(output: Path) -> dict[str, bytes]:
    return {name: bytes(one.data) for name, one in read_model(output).items()}


def disk_needed(request: Request) -> int:
    """Bytes on disk at the peak of a run, more than the converted weights and what comes with
    them."""
    preflight = prepare(request)
    output = sum(unit.output_bytes for unit in preflight.pending())
    needed = preflight.disk_needed(preflight.pending())
    assert needed > output + DISK_MARGIN
    return needed


@pytest.mark.parametrize("fold", ["", "up-down"])
def test_a_text_is_as_good_as_its_second_moments(
    fold: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed behind the first layer, and continued: the bytes of a directory that was recorded of
    the same text. Nothing of the pass is left. Second moments and hidden states count as disk."""
    text = tmp_path / "text.txt"
    text.write_text((EXAMPLE.parent / "corpus.txt").read_text()[:3000])
    recorded = run_stats(StatsRequest(str(EXAMPLE), text, hessian=tmp_path / "moments"))
    convert(EXAMPLE, tmp_path / "expected", calibrate=tmp_path / "moments", fold=fold)
    request = Request(
        str(EXAMPLE), tmp_path / "out", Options(numa=1, fold=fold), threads=2, calibrate=text
    )
    disk = disk_needed(request)
    monkeypatch.setattr("ktconv.system.machine.disk_free", lambda path: disk - 1)
    with pytest.raises(DiskSpaceError):
        quantize_cpu(request)
    monkeypatch.setattr("ktconv.system.machine.disk_free", lambda path: disk)
    with pytest.raises(KeyboardInterrupt):
        quantize_cpu(request, StopsAfterOneUnit())
    report = quantize_cpu(request)
    assert report.complete and report.kept == ["layer-00000"]
    assert list(report.more["calibration_coverage"]["layers"]) == ["1"]
    assert tensors_of(tmp_path / "out") == tensors_of(tmp_path / "expected")
    assert not (tmp_path / "out" / ".ktconv").exists()
    runs = [
        read_json(tmp_path / name / "ktconv.json")["options"]["calibrate"]["run"]
        for name in ("out", "expected")
    ]
    assert recorded and runs[0] == runs[1]


@pytest.mark.parametrize(
    ("content", "options", "said"),
    [
        (b"", {}, "is empty"),
        (b"\xff\xfe", {}, "not UTF-8"),
        (b"A few words.", {}, "too short to calibrate"),
        (b"A text.", {"layers": [0]}, "--layers"),
    ],
)
def test_texts_that_are_refused(
    content: bytes, options: dict[str, Any], said: str, tmp_path: Path
) -> None:
    (tmp_path / "text.txt").write_bytes(content)
    refused(tmp_path / "text.txt", said, **options)


# ---- refusals --------------------------------------------------------------------------


def refused(calibrate: Path, *said: str, **options: Any) -> None:
    output = options.pop("output", calibrate.parent / "refused")
    with pytest.raises(UsageError) as caught:
        convert(EXAMPLE, output, calibrate=calibrate, **options)
    words = str(caught.value)
    assert all(one in words for one in said), words
    assert not output.exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"compat": True}, "--compat"),
        ({"scale": "amax"}, "--scale amax"),
        ({"importance": Path("x")}, "cannot be combined with --importance"),
    ],
)
def test_options_that_exclude_it(moments: Path, options: dict[str, Any], said: str) -> None:
    refused(moments, said, **options)


def test_layers_that_are_missing(checkpoint: Checkpoint, tmp_path: Path) -> None:
    refused(record(tmp_path / "some", checkpoint, layers=[1]), "no second moments of layer 0")


def test_an_empty_directory(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "has no files of ktconv stats --hessian")


def test_another_model_by_its_router(checkpoint: Checkpoint, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    own = json.loads(router_sample(checkpoint))
    router = json.dumps(rng.standard_normal(len(own)).tolist())
    refused(record(tmp_path / "other", checkpoint, router=router), "is another model")


def changed(
    moments: Path, to: Path, change: Callable[[dict[str, Any], dict[str, str]], None]
) -> Path:
    from safetensors import safe_open

    shutil.copytree(moments, to)
    path = to / "layer-00001.safetensors"
    with safe_open(path, framework="numpy") as file:
        metadata = file.metadata()
    tensors = load_file(path)
    change(tensors, metadata)
    save_file(tensors, path, metadata)
    return to


def test_sizes_of_another_model(moments: Path, tmp_path: Path) -> None:
    def grow(tensors: dict[str, Any], metadata: dict[str, str]) -> None:
        metadata["experts"] = "9"
        for name in ("gate_up.diagonal", "down.diagonal"):
            tensors[name] = np.vstack([tensors[name], tensors[name][:1]])
        tensors["counts"] = np.append(tensors["counts"], 0)

    said = "layer 1 has 9 experts", "8 experts of hidden size 128"
    refused(changed(moments, tmp_path / "other", grow), *said)


@pytest.mark.parametrize("name", ["experts.7.down", "gate_up.diagonal"])
def test_values_that_are_none(moments: Path, name: str, tmp_path: Path) -> None:
    """Found in the run: whole files are not read before. What is finished is kept."""

    def spoil(tensors: dict[str, Any], metadata: dict[str, str]) -> None:
        tensors[name].reshape(-1)[-1] = np.nan

    spoiled = changed(moments, tmp_path / "spoiled", spoil)
    with pytest.raises(UsageError, match=name):
        convert(EXAMPLE, tmp_path / "out", calibrate=spoiled)
    assert not (tmp_path / "out" / "ktconv.json").exists()


def test_a_source_with_nan_is_named(moments: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(EXAMPLE, source)
    where = open_checkpoint(source).layers[0].experts[7]["up"]
    with where.tensor.file.open("r+b") as file:
        file.seek(where.tensor.offset + 2 * where.start)
        file.write(b"\xff\xff")
    with pytest.raises(CheckpointError, match="NaN or an infinity"):
        convert(source, tmp_path / "out", calibrate=moments)


def test_memory_is_planned(moments: Path, tmp_path: Path) -> None:
    def peak(**more: Any) -> int:
        options = Options(numa=1)
        return prepare(
            Request(str(EXAMPLE), tmp_path / "o", options, threads=2, **more)
        ).peak_memory

    assert peak(calibrate=moments) > peak() + 2 * 4 * 256**2
    with pytest.raises(MemoryLimitError, match="--max-memory"):
        peak(calibrate=moments, max_memory=200 << 20)


def test_importance_for_verify(moments: Path, checkpoint: Checkpoint) -> None:
    calibration = open_calibration(moments, checkpoint, checkpoint.layers)
    for expert in range(8):
        weights = calibration.importance(0, expert, "down")
        assert weights is not None and weights.shape == (256,)
        assert weights.mean() == pytest.approx(1) and (weights > 0).all()
    assert calibration.importance(99, 0, "down") is None


# ---- verify ----------------------------------------------------------------------------


def verified(output: Path, calibrate: Path | None) -> Result:
    return verify(VerifyRequest(output, str(EXAMPLE), "weights", calibrate=calibrate, threads=1))


def test_verify_proves_scales_by_the_second_moments(
    converted: Path, moments: Path, tmp_path: Path
) -> None:
    """Of compensated experts and of those that fell back, to the last bit; without the moments
    they are only possible, and the report says so."""
    given, without = verified(converted, moments), verified(converted, None)
    assert given.passed and without.passed, [*given.failures, *without.failures]
    assert [len(one.facts["weights"]["unproven"]) for one in (given, without)] == [1, 2]
    assert "GPTQ on text" in given.facts["weights"]["codes_by"]
    output = tmp_path / "copy"
    shutil.copytree(converted, output)
    for expert in (0, 6):  # without and with enough tokens
        for proj in ("up", "down"):
            place = place_of(output, f"blk.0.ffn_{proj}_exps.{expert}.numa.1.scale")
            scale = np.frombuffer(bytes_of(place), "<f4").copy()
            scale[9] = np.nextafter(scale[9], np.float32(np.inf))
            overwrite(place, scale.tobytes())
    scales = [one for one in verified(output, moments).failures if one.check == "scale"]
    assert [(one.expert, one.projection, one.part, one.row) for one in scales] == [
        (0, "up", 1, 9), (0, "down", 1, 9), (6, "up", 1, 9), (6, "down", 1, 9),
    ]  # fmt: skip
    assert not [one for one in verified(output, None).failures if one.check == "scale"]


def test_verify_proves_codes_of_experts_that_fell_back(
    converted: Path, moments: Path, tmp_path: Path
) -> None:
    output = tmp_path / "copy"
    shutil.copytree(converted, output)
    place = place_of(output, "blk.1.ffn_gate_exps.1.numa.0.weight")
    overwrite(place, bytes([bytes_of(place)[77] ^ 0x33]), 77)
    failures = verified(output, moments).failures
    assert ("element", 1, "gate") in {(one.check, one.expert, one.projection) for one in failures}


def test_verify_refuses_other_second_moments(
    converted: Path, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    other = record(tmp_path / "other", checkpoint, text_sha256="3" * 64)
    with pytest.raises(UsageError, match="was converted with other calibration data than") as error:
        verified(converted, other)
    assert str(error.value.hint).endswith("--text with the same text, with as many tokens")
    convert(EXAMPLE, tmp_path / "plain")
    with pytest.raises(UsageError, match="was converted without --calibrate"):
        verified(tmp_path / "plain", other)
    (tmp_path / "plain" / "ktconv.json").unlink()
    with pytest.raises(UsageError, match=r"has no sound ktconv\.json with --calibrate"):
        verified(tmp_path / "plain", other)


@pytest.mark.parametrize("numa", [1, 2])
def test_calibrated_parts_are_cut_but_not_joined(
    numa: int, moments: Path, converted: Path, tmp_path: Path
) -> None:
    if numa == 2:
        with pytest.raises(UsageError, match="calibrate"):
            reshard(ReshardRequest(converted, tmp_path / "out", numa=1, source=str(EXAMPLE)))
        with pytest.raises(UsageError, match="cannot be joined") as error:
            reshard(ReshardRequest(converted, tmp_path / "out", numa=1))
        assert error.value.hint is not None and "--source" not in error.value.hint
        for words in (error.value.hint, (converted / "README.md").read_text()):
            assert "--calibrate DIR" in words
        return
    convert(EXAMPLE, tmp_path / "one", calibrate=moments, numa=1)
    reshard(ReshardRequest(tmp_path / "one", tmp_path / "out", numa=2, threads=1))
    for given in (moments, None):
        result = verified(tmp_path / "out", given)
        assert result.passed, result.failures
