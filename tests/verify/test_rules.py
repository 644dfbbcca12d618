"""Scales and codes of every rule: what level weights must find, however small it is."""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blake3 import blake3
from helpers import reference
from helpers.cli import ktconv, write_model
from helpers.convert import convert, read_json, read_model, source_matrices
from helpers.corrupt import bytes_of, check, forget_manifest, found, overwrite, place_of
from helpers.importance_files import importance_of, write_importance
from helpers.reference import Choice
from msgspec.structs import asdict
from numpy.typing import NDArray

from ktconv import native
from ktconv.errors import UsageError
from ktconv.formats import FORMATS, split
from ktconv.formats.search import possible_scales
from ktconv.inspect.inspection import inspect_path
from ktconv.repack.merge import Request as MergeRequest
from ktconv.repack.merge import merge
from ktconv.repack.recut import carried
from ktconv.repack.reshard import Request as ReshardRequest
from ktconv.repack.reshard import reshard
from ktconv.source import open_checkpoint
from ktconv.targets.packed.target import CalibrationRecord
from ktconv.targets.packed.weights import name_of, open_packed
from ktconv.verify import Request, Result, verify

pytestmark = pytest.mark.slow

EXAMPLE = Path(__file__).parents[2] / "docs" / "example" / "tiny-moe"
METHODS = ["int4", "int8"]
RULES = ["amax", "search", "importance"]
GIVES = {
    "amax": "the largest weight makes",
    "search": "the search for the smallest error gives",
    "importance": "the weighted search for the smallest error gives",
}
OPTIONS: dict[str, dict[str, Any]] = {
    "search-1": {"search": 1},
    "importance": {}, "fold": {"fold": "up-down"}, "fold, importance": {"fold": "up-down"},
}  # fmt: skip
Make = Callable[..., Path]
Floats = NDArray[np.float32]


@pytest.fixture(scope="module")
def importance(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    checkpoint = open_checkpoint(model)
    path = tmp_path_factory.mktemp("importance") / "importance.safetensors"
    return write_importance(path, importance_of(checkpoint), checkpoint)


@pytest.fixture(scope="module")
def made(model: Path, importance: Path, tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Conversions by a rule, each made once; not to be changed."""
    known: dict[tuple[str, str, int], Path] = {}

    def make(rule: str, method: str = "int4", numa: int = 2) -> Path:
        key = rule, method, numa
        if key not in known:
            known[key] = tmp_path_factory.mktemp("rules") / "out"
            more = OPTIONS.get(rule, {"scale": rule})
            more = more | ({"importance": importance} if "importance" in rule else {})
            convert(model, known[key], method=method, numa=numa, **more)
        return known[key]

    return make


@pytest.fixture
def copied(made: Make, tmp_path: Path) -> Make:
    """A copy, to be changed."""

    def make(rule: str, method: str = "int4", numa: int = 2) -> Path:
        copy = tmp_path / f"copy-{rule}-{method}-{numa}"
        shutil.copytree(made(rule, method, numa), copy)
        return copy

    return make


def signed(output: Path) -> Path:
    """With checksums of what is there, and without the errors that were measured: so nothing but
    the weights can tell."""
    measured = {"relative_rms_error", "max_error_steps", "zero_share"}
    places = {name_of(tensor): place for tensor, place in open_packed(output).tensors.items()}

    def change(record: Any) -> None:
        for unit in record["units"].values():
            for name in unit["tensors"].keys() & places.keys():
                digest = blake3(bytes_of(places[name])).hexdigest()
                about = unit["tensors"][name]
                kept = {key: about[key] for key in about.keys() - measured}
                unit["tensors"][name] = kept | {"blake3": digest}

    return edit_manifest(output, change)


def edit_manifest(output: Path, change: Callable[[Any], None]) -> Path:
    record = read_json(output / "ktconv.json")
    change(record)
    (output / "ktconv.json").write_text(json.dumps(record))
    return output


def verified(output: Path, model: Path, importance: Path | None = None) -> Result:
    return verify(Request(output, str(model), "weights", importance=importance, threads=1))


def changed(output: Path, model: Path, importance: Path | None = None) -> Result:
    """`verified`, of a copy."""
    return verified(signed(output), model, importance)


def set_scale(output: Path, name: str, row: int, value: np.float32) -> None:
    overwrite(place_of(output, f"{name}.scale"), value.astype("<f4").tobytes(), 4 * row)


def scale_of(output: Path, name: str) -> Floats:
    return np.frombuffer(bytes_of(place_of(output, f"{name}.scale")), "<f4").copy()


def codes_of(output: Path, name: str, method: str, rows: int, cols: int) -> NDArray[np.int8]:
    packed = np.frombuffer(bytes_of(place_of(output, f"{name}.weight")), np.uint8)
    return native.audit_codes(method, packed, rows, cols)


def set_codes(output: Path, name: str, method: str, codes: NDArray[np.int8]) -> None:
    overwrite(place_of(output, f"{name}.weight"), native.pack(method, codes).tobytes())


# ---- what is right ---------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("rule", RULES)
def test_a_sound_output_is_proven(
    rule: str, method: str, made: Make, model: Path, importance: Path
) -> None:
    given = importance if rule == "importance" else None
    result = verified(made(rule, method), model, given)
    assert result.passed, result.failures
    about = result.facts["weights"]
    assert about["unproven"] == [] and about["rule"] == ("amax" if rule == "amax" else "search")
    assert ("weighted by importance.safetensors" in about["codes_by"]) is (rule == "importance")
    assert inspect_path(str(made(rule, method)))["codes_by"] == about["codes_by"]
    assert f"Codes by {about['codes_by']}" in (made(rule, method) / "README.md").read_text()


# ---- what is wrong by as little as possible --------------------------------------------


@pytest.mark.parametrize("up", [True, False])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("rule", RULES)
def test_a_neighbouring_scale(
    rule: str, method: str, up: bool, copied: Make, model: Path, importance: Path
) -> None:
    """One unit in the last place, of a matrix that is cut by rows and of one cut by columns."""
    output, given = copied(rule, method), importance if rule == "importance" else None
    for proj in ("gate", "down"):
        name = f"blk.1.ffn_{proj}_exps.2.numa.1"
        here = scale_of(output, name)[19]
        set_scale(output, name, 19, np.nextafter(here, np.float32(np.inf if up else 0)))
    failures = found(changed(output, model, given), "weights", "scale")
    assert [(one["tensor"], one["row"]) for one in failures] == [
        ("blk.1.ffn_gate_exps.2.numa.1.scale", 19), ("blk.1.ffn_down_exps.2.numa.1.scale", 19),
    ]  # fmt: skip
    assert all(GIVES[rule] in one["message"] for one in failures)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("rule", ["search", "importance"])
def test_every_code_is_the_nearest(
    rule: str, method: str, copied: Make, model: Path, importance: Path
) -> None:
    """Codes that are off by one, at the last level as in the middle, wherever the other one is not
    as near within what comparing in binary32 can tell."""
    output, fmt = copied(rule, method), FORMATS[method]
    name, top = "blk.0.ffn_up_exps.1.numa.0", fmt.traits.max_level
    source = source_matrices(model)[0, 1, "up"][:128].astype(np.float64)
    codes = codes_of(output, name, method, 128, 256)
    steps = np.clip(source / (scale_of(output, name) * fmt.traits.scale_units)[:, None], -top, top)
    toward = np.where(steps > codes, 1, -1)  # the second nearest code
    toward = np.where(np.abs(codes + toward) > top, -toward, toward)
    clear = np.abs(steps - codes - toward) > 0.5 + 2.0**-14
    assert clear.mean() > 0.99 and (np.abs(codes[clear]) == top).any()
    rng, others = np.random.default_rng(1), codes.copy()
    column = [int(rng.choice(np.flatnonzero(row))) for row in clear]  # one of each row
    rows = np.arange(128)
    others[rows, column] += toward[rows, column].astype(np.int8)
    set_codes(output, name, method, others)
    given = importance if rule == "importance" else None
    result = changed(output, model, given)
    failures = found(result, "weights", "element")
    assert {one["row"] for one in failures} <= set(range(128))
    assert all(one["column"] == column[one["row"]] for one in failures)
    assert "under --scale search" in failures[0]["message"]
    set_codes(output, name, method, codes)
    for row in (0, 63, 127):  # each of them alone
        one = codes.copy()
        one[row, column[row]] = others[row, column[row]]
        set_codes(output, name, method, one)
        (failure,) = found(changed(output, model, given), "weights", "element")
        assert (failure["row"], failure["column"]) == (row, column[row])


@pytest.mark.parametrize("whole_row", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_a_row_by_the_largest_weight(
    method: str, whole_row: bool, copied: Make, model: Path
) -> None:
    """Its scale alone, and with the codes that belong to it."""
    output, name = copied("search", method), "blk.0.ffn_gate_exps.0.numa.1"
    source = source_matrices(model)[0, 0, "gate"][128:]
    other, scale = reference.quantize(FORMATS[method], source)
    row = int(np.flatnonzero(scale != scale_of(output, name))[0])
    set_scale(output, name, row, scale[row])
    if whole_row:
        codes = codes_of(output, name, method, 128, 256)
        codes[row] = other[row]
        set_codes(output, name, method, codes)
    result = changed(output, model)
    assert not result.passed and {one.level for one in result.failures} == {"weights"}
    (failure,) = [one for one in result.failures if one.check == "scale"]
    assert failure.row == row and GIVES["search"] in failure.message


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("rule", "claimed"), [("amax", "search"), ("search", "amax")])
def test_another_rule_than_the_manifest_says(
    rule: str, claimed: str, method: str, copied: Make, model: Path
) -> None:
    output = edit_manifest(
        copied(rule, method), lambda record: record["options"].update(scale=claimed)
    )
    failures = found(changed(output, model), "weights", "scale")
    assert len(failures) > 10 and all(GIVES[claimed] in one["message"] for one in failures)


@pytest.mark.parametrize("rule", RULES)
def test_the_level_that_no_rule_uses(
    rule: str, copied: Make, model: Path, importance: Path
) -> None:
    output, name = copied(rule, "int4"), "blk.0.ffn_up_exps.1.numa.0"
    codes = codes_of(output, name, "int4", 128, 256)
    row, column = (int(i) for i in np.argwhere(codes == -7)[0])
    codes[row, column] = -8
    set_codes(output, name, "int4", codes)
    result = changed(output, model, importance if rule == "importance" else None)
    failure = found(result, "weights", "level")[0]
    assert (failure["row"], failure["column"], failure["value"]) == (row, column, -8.0)


# ---- without a manifest ----------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("rule", ["amax", "search"])
def test_the_rule_of_an_output_without_manifest(
    rule: str, method: str, copied: Make, model: Path
) -> None:
    """It is found by scales, and then all are held to it."""
    output = forget_manifest(copied(rule, method))
    result = check(output, model)
    assert result.passed and result.facts["weights"]["rule"] == rule
    set_scale(output, "blk.1.ffn_down_exps.0.numa.1", 3, np.float32(0.5))
    assert GIVES[rule] in check(output, model).failures[-1].message


# ---- outputs of the first search -------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_an_output_of_the_first_search(method: str, copied: Make, model: Path) -> None:
    """It is held to that; with a revision in its manifest, to the one it names."""
    output = copied("search-1", method)
    assert "search" not in json.loads((output / "ktconv.json").read_text())["options"]
    result = verified(output, model)
    assert result.passed and result.facts["weights"]["rule"] == "search-1"
    assert "the smallest squared error" in result.facts["weights"]["codes_by"]
    edit_manifest(output, lambda record: record["options"].update(search=2))
    failures = found(changed(output, model), "weights", "scale")
    assert len(failures) > 10 and all(GIVES["search"] in one["message"] for one in failures)


@pytest.mark.parametrize("method", METHODS)
def test_the_first_search_is_found_without_a_manifest(
    method: str, copied: Make, model: Path
) -> None:
    output = forget_manifest(copied("search-1", method))
    result = check(output, model)
    assert result.passed and result.facts["weights"]["rule"] == "search-1"


def test_an_output_of_the_present_search_is_not_of_the_first(copied: Make, model: Path) -> None:
    output = copied("search")
    edit_manifest(output, lambda record: record["options"].pop("search"))
    failures = found(changed(output, model), "weights", "scale")
    assert len(failures) > 10 and all(GIVES["search"] in one["message"] for one in failures)


# ---- importance ------------------------------------------------------------------------


def test_without_the_file_the_report_says_what_is_not_proven(
    made: Make, model: Path, tmp_path: Path
) -> None:
    report = tmp_path / "report.html"
    words = ("verify", made("importance"), "--source", model, "--level", "weights")
    done = ktconv(*words, "--report", report)
    assert done.exit_code == 0, done.stdout
    assert "not proven: " in done.stdout and "--importance FILE" in done.stdout
    assert "Not proven: " in report.read_text() and "--importance FILE" in report.read_text()
    facts = json.loads(ktconv(*words, "--json").stdout)
    assert len(facts["weights"]["unproven"]) == 1


@pytest.mark.parametrize("method", METHODS)
def test_without_the_file_scales_must_be_possible(method: str, copied: Make, model: Path) -> None:
    output, name, fmt = (
        copied("importance", method),
        "blk.1.ffn_down_exps.2.numa.1",
        FORMATS[method],
    )
    assert changed(output, model).passed
    source = source_matrices(model)[1, 2, "down"][:, 128:]
    first = reference.scale_of(fmt, np.abs(source).max(axis=1))
    before = scale_of(output, name)
    for row, factor, possible in ((3, 0.34, False), (4, 2.4, False), (5, 0.36, True)):
        set_scale(output, name, row, np.float32(factor) * first[row])
        result = changed(output, model)
        scales = [one for one in result.failures if one.check == "scale"]
        assert bool(scales) is not possible
        # Codes are those of the scale that was there.
        assert any(one.check == "element" and one.row == row for one in result.failures)
        set_scale(output, name, row, before[row])
        if scales:
            assert scales[0].row == row and "unknown weights" in scales[0].message


def test_without_the_file_codes_are_the_nearest(copied: Make, model: Path) -> None:
    output, name = copied("importance"), "blk.1.ffn_down_exps.2.numa.1"
    codes = codes_of(output, name, "int4", 256, 128)
    row, column = (int(i) for i in np.argwhere(codes == 7)[0])
    codes[row, column] = 6
    set_codes(output, name, "int4", codes)
    (failure,) = found(changed(output, model), "weights", "element")
    assert (failure["row"], failure["column"]) == (row, 128 + column)


def test_files_of_importance_that_are_refused(
    made: Make, model: Path, importance: Path, tmp_path: Path
) -> None:
    checkpoint = open_checkpoint(model)
    other = write_importance(tmp_path / "other", importance_of(checkpoint, seed=9), checkpoint)
    with pytest.raises(UsageError, match="another file of importance than"):
        verified(made("importance"), model, other)
    with pytest.raises(UsageError, match="was converted without --importance"):
        verified(made("search"), model, importance)
    for words in (("--level", "structure"), (made("search"),)):
        done = ktconv("verify", made("importance"), *words, "--importance", importance)
        assert done.exit_code == 2 and "--importance" in done.stderr


def test_possible_scales_are_those_of_any_importance() -> None:
    """Rows whose errors count in a few columns, so that scales are far from the usual ones."""
    rng = np.random.default_rng(4)
    for method in ("int4", "int8", "gint4-32"):
        fmt, most = FORMATS[method], 0.0
        for _ in range(40):
            rows = (rng.standard_normal((64, 128)) * np.exp(rng.normal(0, 1, 128))).astype(
                np.float32
            )
            weights = np.where(rng.random(128) < 0.03, 1, 1e-6).astype(np.float32)
            if fmt.group:
                parts = np.abs(rows.reshape(64, -1, fmt.group)).max(axis=2)
            else:
                parts = np.abs(rows).max(axis=1)[:, None]
            least, largest = possible_scales(fmt, parts, reference.scale_of(fmt, parts))
            _, scale = reference.quantize(fmt, rows, Choice("search", weights))
            scale = scale.reshape(64, -1)
            if scale.dtype == np.uint16:
                scale = (scale.astype(np.uint32) << 16).view(np.float32)
            assert ((least <= scale) & (scale <= largest)).all()
            most = max(most, float((scale / reference.scale_of(fmt, parts)).max()))
        assert most > 1.001  # or the limit above proves nothing


# ---- cut anew --------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("method", METHODS)
def test_parts_that_were_cut_keep_the_scale_of_the_whole_row(
    method: str, rule: str, made: Make, model: Path, importance: Path, tmp_path: Path
) -> None:
    given = importance if rule == "importance" else None
    reshard(ReshardRequest(made(rule, method, 1), tmp_path / "two", numa=2, threads=1))
    result = verified(tmp_path / "two", model, given)
    assert result.passed, result.failures
    whole = source_matrices(model)[0, 1, "down"]
    weights = None if given is None else importance_weights(model, given)
    for part in (0, 1):
        name = f"blk.0.ffn_down_exps.1.numa.{part}"
        columns = split("down", 256, 256, part, 2).index
        own = None if weights is None else weights[columns[1]]
        choice = Choice("amax" if rule == "amax" else "search", own)
        _, fresh = reference.quantize(FORMATS[method], whole[columns], choice)
        row = int(np.flatnonzero(fresh != scale_of(tmp_path / "two", name))[part])
        set_scale(tmp_path / "two", name, row, fresh[row])  # what a fresh conversion has
    failures = changed(tmp_path / "two", model, given).failures
    scales = [one for one in failures if one.check == "scale"]
    assert [one.part for one in scales] == [0, 1] and GIVES[rule] in scales[0].message


def importance_weights(model: Path, file: Path) -> Floats:
    """Of down of expert 1 in layer 0."""
    from ktconv.quantize.packed.importance.load import open_weights

    checkpoint = open_checkpoint(model)
    found = open_weights(file, checkpoint, checkpoint.layers).of(0, 1, "down")
    assert found is not None
    return found


def test_parts_that_were_cut_and_joined_across_one_another(tmp_path: Path) -> None:
    """4 -> 1 is refused, as scales differ; 1 -> 2 -> 3 and back keeps those of the whole row."""
    model = write_model(tmp_path / "model", layers=1, inner=768)
    convert(model, tmp_path / "one", numa=1)
    for before, after in ((1, 2), (2, 3), (3, 1)):
        reshard(ReshardRequest(tmp_path / NAMED[before], tmp_path / NAMED[after + 3 * (after == 1)],
                               numa=after, threads=1))  # fmt: skip
    for name in ("two", "three", "four"):
        assert verified(tmp_path / name, model).passed
    assert read_model(tmp_path / "four") == read_model(tmp_path / "one")
    name = "blk.0.ffn_down_exps.0.numa.1"
    output = tmp_path / "three"
    set_scale(output, name, 7, np.nextafter(scale_of(output, name)[7], np.float32(0)))
    (failure,) = found(changed(output, model), "weights", "scale")
    assert (failure["part"], failure["row"]) == (1, 7)


def test_parts_are_joined_with_the_recorded_importance(
    made: Make, model: Path, importance: Path, tmp_path: Path
) -> None:
    """Only from the source, and only by the file that the conversion was given."""
    packed, joined = made("importance", "int4", 2), tmp_path / "joined"

    def words(**given: Any) -> ReshardRequest:
        return ReshardRequest(packed, joined, numa=1, threads=1, **given)

    with pytest.raises(UsageError, match="cannot be joined"):
        reshard(words())
    with pytest.raises(UsageError, match="were converted with --importance"):
        reshard(words(source=str(model)))
    with pytest.raises(UsageError, match="--importance belongs to --source"):
        reshard(words(importance=importance))
    checkpoint = open_checkpoint(model)
    other = write_importance(tmp_path / "other", importance_of(checkpoint, seed=9), checkpoint)
    with pytest.raises(UsageError, match="another file of importance"):
        reshard(words(source=str(model), importance=other))
    assert not joined.exists()
    reshard(words(source=str(model), importance=importance))
    assert read_model(joined) == read_model(made("importance", "int4", 1))
    with pytest.raises(UsageError, match="was converted without --importance"):
        reshard(ReshardRequest(made("search", "int4", 2), tmp_path / "never", numa=1,
                               source=str(model), importance=importance))  # fmt: skip


def test_records_of_codes_go_with_the_parts() -> None:
    first = {"blake3": "x", "codes": "gptq", "calibration_tokens": 9, "row_error_bound": 0.1}
    second = {**first, "row_error_bound": 0.3}
    expected = {"codes": "gptq", "calibration_tokens": 9, "row_error_bound": 0.3}
    assert carried([first, second]) == expected
    assert carried([{"blake3": "x", "relative_rms_error": 0.1}]) == {}


NAMED = {1: "one", 2: "two", 3: "three", 4: "four"}


@pytest.mark.parametrize("earlier", [[0], [-1], ["1"], [3], [1 << 40], "1", [None]])
def test_a_history_that_cannot_be(earlier: Any, made: Make, model: Path, tmp_path: Path) -> None:
    """Numbers of parts that the sizes do not allow are none: scales are then those of the parts."""
    reshard(ReshardRequest(made("search", "int4", 1), tmp_path / "two", numa=2, threads=1))
    edit_manifest(
        tmp_path / "two", lambda record: record["resharded_from"].update(earlier=earlier, numa=7)
    )
    assert found(verified(tmp_path / "two", model), "weights", "scale")


# ---- folding ---------------------------------------------------------------------------


def given(rule: str, importance: Path) -> Path | None:
    return importance if "importance" in rule else None


@pytest.mark.parametrize("numa", [1, 2])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("rule", ["fold", "fold, importance"])
def test_a_folded_output_is_proven_against_the_folded_source(
    rule: str, method: str, numa: int, made: Make, model: Path, importance: Path
) -> None:
    result = verified(made(rule, method, numa), model, given(rule, importance))
    assert result.passed, result.failures
    about = result.facts["weights"]
    assert about["unproven"] == [] and "up-down folded" in about["codes_by"]
    if "importance" in rule:
        assert verified(made(rule, method, numa), model).facts["weights"]["unproven"]


def test_kernels_compute_the_same_layer_folded(tmp_path: Path) -> None:
    found = []
    for fold in ("", "up-down"):
        convert(EXAMPLE, tmp_path / f"out-{fold}", fold=fold)
        request = Request(tmp_path / f"out-{fold}", str(EXAMPLE), "layers", tokens=8, threads=1)
        result = verify(request)
        assert result.passed, result.failures
        found.append(result.facts["layers"]["layers"])
    for plain, folded in zip(*found, strict=True):
        assert folded["quantization_error"] < 1.5 * plain["quantization_error"]


def exponents_of(output: Path, name: str) -> NDArray[np.int8]:
    units = read_json(output / "ktconv.json")["units"].values()
    (text,) = [unit["tensors"][name]["fold"] for unit in units if name in unit["tensors"]]
    return np.frombuffer(base64.b64decode(text), np.int8).copy()


def set_fold(output: Path, name: str, value: object) -> Path:
    def change(record: Any) -> None:
        for unit in record["units"].values():
            if name in unit["tensors"]:
                del unit["tensors"][name]["fold"]
                unit["tensors"][name] |= {} if value is None else {"fold": value}

    return edit_manifest(output, change)


@pytest.mark.parametrize("by", [1, -1])
@pytest.mark.parametrize("method", METHODS)
def test_a_wrong_exponent_is_found(method: str, by: int, copied: Make, model: Path) -> None:
    """In its row of up, and in its column of down."""
    output, name = copied("fold", method), "blk.1.ffn_up_exps.2.numa.1.weight"
    exponents = exponents_of(output, name)
    exponents[37] += by
    set_fold(output, name, base64.b64encode(exponents.tobytes()).decode())
    failures = changed(output, model).failures
    assert {(one.layer, one.expert) for one in failures} == {(1, 2)}
    up = [one for one in failures if one.projection == "up" and one.check == "scale"]
    assert [(one.part, one.row) for one in up] == [(1, 37)]
    down = [one for one in failures if one.projection == "down"]
    assert down and {one.part for one in down} == {1}
    assert {one.column for one in down if one.check == "element"} <= {128 + 37}


@pytest.mark.parametrize(
    "value", [None, 7, "", "AAAA", "*" * 172, base64.b64encode(b"\x80" * 128).decode()]
)
def test_exponents_that_are_none(value: object, copied: Make, model: Path) -> None:
    output = set_fold(copied("fold"), "blk.1.ffn_up_exps.2.numa.1.weight", value)
    failures = found(verified(output, model), "weights", "manifest")
    assert [(one["expert"], one["projection"]) for one in failures] == [(2, "up"), (2, "down")]
    words = "ktconv.json cannot say how up of expert 2 in layer 1 is folded: "
    assert failures[0]["message"].startswith(words)


def test_a_fold_that_the_options_do_not_say(copied: Make, model: Path) -> None:
    output = edit_manifest(copied("fold"), lambda record: record["options"].pop("fold"))
    assert found(verified(output, model), "weights", "scale")


@pytest.mark.parametrize("rule", ["fold", "fold, importance"])
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
def test_folded_parts_are_cut_anew(
    before: int, after: int, rule: str, made: Make, model: Path, importance: Path, tmp_path: Path
) -> None:
    """Cut with their exponents; joined from the source, by the same rule."""
    weights, out = given(rule, importance), tmp_path / "out"
    packed, source = made(rule, "int4", before), str(model) if after < before else None
    own = weights if source else None
    reshard(ReshardRequest(packed, out, numa=after, threads=1, source=source, importance=own))
    result = verified(out, model, weights)
    assert result.passed, result.failures
    if source:
        assert read_model(out) == read_model(made(rule, "int4", after))
        return
    name = "blk.0.ffn_down_exps.0.numa.1"
    set_scale(out, name, 7, np.nextafter(scale_of(out, name)[7], np.float32(0)))
    (failure,) = found(changed(out, model, weights), "weights", "scale")
    assert (failure["part"], failure["row"]) == (1, 7)


def test_folded_folders_are_merged_with_their_exponents(model: Path, tmp_path: Path) -> None:
    convert(model, tmp_path / "folders", numa=2, layout="layers", fold="up-down")
    assert verified(tmp_path / "folders", model).passed
    merge(MergeRequest(tmp_path / "folders", tmp_path / "out", source=str(model), threads=1))
    assert verified(tmp_path / "out", model).passed


# ---- compensated codes -----------------------------------------------------------------


def as_compensated(output: Path, model: Path, method: str, numa: int) -> Path:
    """A copy by the search, whose codes are moved as compensation moves them, within a step of the
    nearest; and recorded so. The scales of every third row are another multiple."""
    rng, records, fmt = np.random.default_rng(3), {}, FORMATS[method]
    for (layer, expert, proj), whole in source_matrices(model).items():
        inner, hidden = whole.shape if proj != "down" else whole.shape[::-1]
        for part in range(numa):
            source = whole[split(proj, hidden, inner, part, numa).index].astype(np.float64)
            name = f"blk.{layer}.ffn_{proj}_exps.{expert}.numa.{part}"
            scale = scale_of(output, name)
            scale[::3] *= np.float32(0.92)
            step = (scale * fmt.traits.scale_units).astype(np.float64)[:, None]
            moved = np.rint(source / step + rng.normal(0, 0.4, source.shape))
            top = fmt.traits.max_level
            codes = np.clip(moved, -top, top).astype(np.int8)
            set_codes(output, name, method, codes)
            overwrite(place_of(output, f"{name}.scale"), scale.tobytes())
            values = (codes * step.astype(np.float32)).astype(np.float64)
            errors = np.sqrt(((source - values) ** 2).sum(1) / (source**2).sum(1))
            bound = float(f"{errors.max() * 1.00001:.6g}")
            records[f"{name}.weight"] = {"codes": "gptq", "row_error_bound": bound}

    def change(record: Any) -> None:
        record["options"]["calibrate"] = asdict(CalibrationRecord("dir", "hessian", "t", "1", "2"))
        for unit in record["units"].values():
            for name in unit["tensors"].keys() & records.keys():
                unit["tensors"][name] |= records[name]

    return edit_manifest(output, change)


@pytest.mark.parametrize("method", METHODS)
def test_compensated_codes(method: str, copied: Make, model: Path) -> None:
    output = as_compensated(copied("search", method), model, method, 2)
    result = changed(output, model)
    assert result.passed, result.failures
    codes, scales = result.facts["weights"]["unproven"]
    assert "follow from data" in codes and "--calibrate DIR" in scales


def test_records_of_codes_do_not_count_without_calibration(copied: Make, model: Path) -> None:
    """Codes and scales that only compensation could have chosen, in a conversion without it."""
    output = as_compensated(copied("search"), model, "int4", 2)
    edit_manifest(output, lambda record: record["options"].pop("calibrate"))
    result = changed(output, model)
    assert found(result, "weights", "element") and found(result, "weights", "scale")
    assert result.facts["weights"]["unproven"] == []


def test_options_that_contradict_one_another(copied: Make, model: Path) -> None:
    """--compat has the scales of --scale amax: such a manifest is damaged."""
    output = edit_manifest(copied("search"), lambda record: record["options"].update(compat=True))
    failures = verified(output, model).failures
    assert [one.message for one in failures] == ["ktconv.json is damaged."]


def test_faults_of_compensated_codes(copied: Make, model: Path) -> None:
    """An error beyond the recorded one, a bound that nothing reaches, none at all, a level that is
    none, a scale that cannot be."""
    output, name = as_compensated(copied("search"), model, "int4", 2), "blk.0.ffn_up_exps.1.numa.0"
    codes = codes_of(output, name, "int4", 128, 256)
    worse = codes.copy()
    worse[5] = -worse[5]
    set_codes(output, name, "int4", worse)
    failures = found(changed(output, model), "weights", "error")
    assert [(one["tensor"], one["row"]) for one in failures] == [(f"{name}.weight", 5)]
    assert "is recorded as the largest" in failures[0]["message"]
    worse = codes.copy()
    worse[5, 6] = -8
    set_codes(output, name, "int4", worse)
    assert found(changed(output, model), "weights", "level")[0]["column"] == 6
    set_codes(output, name, "int4", codes)
    before = scale_of(output, name)[5]
    set_scale(output, name, 5, np.float32(6) * before)
    assert found(changed(output, model), "weights", "scale")[0]["row"] == 5
    set_scale(output, name, 5, before)
    for bound, words in ((9.0, "row_error_bound 9 of"), (None, "nan"), ("1", "nan"), (1, "nan")):
        set_bound(output, f"{name}.weight", bound)
        failures = found(changed(output, model), "weights", "manifest")
        assert [one["tensor"] for one in failures] == [f"{name}.weight"]
        assert words in failures[0]["message"]


def set_bound(output: Path, name: str, bound: object) -> None:
    def change(record: Any) -> None:
        for unit in record["units"].values():
            if name in unit["tensors"]:
                unit["tensors"][name]["row_error_bound"] = bound

    edit_manifest(output, change)


@pytest.mark.parametrize("numa", [2, 4])
def test_compensated_rows_that_were_cut_anew(
    numa: int, copied: Make, model: Path, tmp_path: Path
) -> None:
    """A row of down is held to its error over all columns; cutting it changes none."""
    if numa == 4:
        model = write_model(tmp_path / "model", layers=1, inner=512)
        convert(model, tmp_path / "given", numa=2)
        output = tmp_path / "given"
    else:
        output = copied("search", "int4", 1)
    reshard(
        ReshardRequest(
            signed(as_compensated(output, model, "int4", numa // 2)),
            tmp_path / "out", numa=numa, threads=1,
        )
    )  # fmt: skip
    result = verified(tmp_path / "out", model)
    assert result.passed, result.failures
    name = "blk.0.ffn_down_exps.1.numa.1"
    rows, cols = open_packed(tmp_path / "out").layers[0].shape("down")
    codes = codes_of(tmp_path / "out", name, "int4", rows, cols)
    codes[9] = -codes[9]
    set_codes(tmp_path / "out", name, "int4", codes)
    failures = found(changed(tmp_path / "out", model), "weights", "error")
    assert {one["row"] for one in failures} == {9}
