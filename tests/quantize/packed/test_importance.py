"""`quantize-cpu --importance`: which bytes, what is said, which files are refused."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import reference
from helpers.cli import ktconv
from helpers.convert import convert, read_json, read_model, source_matrices
from helpers.families import numbered, random_weights, simple_config, write_checkpoint
from helpers.imatrix_files import tensors_of, write_imatrix
from helpers.importance_files import importance_of, write_importance
from helpers.reference import Choice
from msgspec.structs import replace

from ktconv.errors import OutputError, SourceChangedError, UsageError
from ktconv.formats import FORMATS, split, tensor_name
from ktconv.quantize.packed.importance.channel_weights import SHRINKAGE, channel_weights
from ktconv.quantize.packed.importance.load import ExpertWeights, open_weights
from ktconv.quantize.packed.importance.way import coverage_facts, coverage_lines
from ktconv.quantize.packed.run import Request, prepare
from ktconv.source import Checkpoint, open_checkpoint
from ktconv.stats.importance_file import LayerImportance
from ktconv.targets.packed.target import ImportanceRecord, Options, options_of_record

pytestmark = pytest.mark.slow

HIDDEN, INNER, EXPERTS = 128, 256, 3
LAYERS = (0, 1)
Change = Callable[[dict[int, LayerImportance]], object]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tensors: dict[str, Any] = {}
    for index in LAYERS:
        weights = random_weights(HIDDEN, INNER, EXPERTS, seed=index)
        tensors |= numbered(f"model.layers.{index}.mlp.experts", weights)
    config = simple_config(
        moe_intermediate_size=INNER, num_experts=EXPERTS, num_hidden_layers=len(LAYERS)
    )
    return write_checkpoint(tmp_path_factory.mktemp("importance") / "model", tensors, config)


@pytest.fixture(scope="module")
def checkpoint(model: Path) -> Checkpoint:
    return open_checkpoint(model)


@pytest.fixture(scope="module")
def importance(checkpoint: Checkpoint) -> dict[int, LayerImportance]:
    return importance_of(checkpoint)


@pytest.fixture
def file(tmp_path: Path, checkpoint: Checkpoint, importance: dict[int, LayerImportance]) -> Path:
    return write_importance(tmp_path / "importance.safetensors", importance, checkpoint)


def opened(path: Path, checkpoint: Checkpoint) -> ExpertWeights:
    return open_weights(path, checkpoint, checkpoint.layers)


# ---- bytes -----------------------------------------------------------------------------


@pytest.mark.parametrize(("method", "numa"), [("int4", 1), ("int4", 2), ("int8", 2)])
def test_scales_and_codes_are_those_of_weighted_errors(
    method: str,
    numa: int,
    model: Path,
    file: Path,
    importance: dict[int, LayerImportance],
    tmp_path: Path,
) -> None:
    """Of every matrix; parts of down have the weights of their columns."""
    convert(model, tmp_path / "out", importance=file, method=method, numa=numa, threads=2)
    found, fmt, weighted = read_model(tmp_path / "out"), FORMATS[method], 0
    for (layer, expert, proj), values in source_matrices(model).items():
        weights = channel_weights(importance[layer].of(proj), importance[layer].counts)[expert]
        for part in range(numa):
            rows, cols = split(proj, HIDDEN, INNER, part, numa).index
            piece, own = np.ascontiguousarray(values[rows, cols]), weights[cols]
            payload, scale = reference.quantize_pack(fmt, piece, Choice("search", own))
            names = (tensor_name(layer, proj, expert, part, one) for one in ("weight", "scale"))
            assert [found[name].data for name in names] == [payload.tobytes(), scale.tobytes()]
            weighted += (scale != reference.quantize(fmt, piece, Choice("search"))[1]).sum()
    assert weighted > 100  # scales that another rule gives


def test_an_imatrix_of_the_same_numbers_makes_the_same_bytes(
    model: Path, file: Path, importance: dict[int, LayerImportance], tmp_path: Path
) -> None:
    # Powers of two, so that sums and means of float32 are exact.
    layers = {
        index: LayerImportance(one.gate_up, one.down, np.where(one.counts > 0, 128, 0))
        for index, one in importance.items()
    }
    recorded = write_importance(tmp_path / "recorded", layers)
    imatrix = write_imatrix(tmp_path / "imatrix.gguf", tensors_of(layers))
    for path in (recorded, imatrix):
        convert(model, tmp_path / f"of-{path.name}", importance=path)
    kinds = {}
    for path in (recorded, imatrix):
        output = tmp_path / f"of-{path.name}"
        assert read_model(output) == read_model(tmp_path / "of-recorded")
        kinds[path.name] = read_json(output / "ktconv.json")["options"]["importance"]["kind"]
    assert kinds == {"recorded": "ktconv-importance", "imatrix.gguf": "imatrix"}


def test_experts_and_layers_may_be_left_out(model: Path, file: Path, tmp_path: Path) -> None:
    """Each expert keeps its own weights, and each layer, whichever run converts it."""
    convert(model, tmp_path / "whole", importance=file)
    excluded = tmp_path / "hot.json"
    excluded.write_text(json.dumps({"schema": 1, "experts": {"1": [0]}}))
    request = Request(
        str(model), tmp_path / "part", Options(numa=1), importance=file,
        exclude_experts=excluded, allow_partial=True, threads=1,
    )  # fmt: skip
    from ktconv.quantize.packed.run import quantize_cpu

    quantize_cpu(request)
    whole, part = read_model(tmp_path / "whole"), read_model(tmp_path / "part")
    assert part == {name: one for name, one in whole.items() if not _of(name, 1, 0)}
    for layer in reversed(LAYERS):
        convert(model, tmp_path / "twice", importance=file, layers=[layer])
    assert read_model(tmp_path / "twice") == whole


def _of(name: str, layer: int, expert: int) -> bool:
    return name.startswith(f"blk.{layer}.") and f"_exps.{expert}." in name


# ---- records ---------------------------------------------------------------------------


def test_manifest_and_resume(
    model: Path,
    file: Path,
    checkpoint: Checkpoint,
    importance: dict[int, LayerImportance],
    tmp_path: Path,
) -> None:
    output = tmp_path / "out"
    convert(model, output, importance=file, layers=[0])
    changed = dict(importance)
    changed[1] = replace(changed[1], counts=changed[1].counts + (changed[1].counts > 0))
    (tmp_path / "other").mkdir()
    other = write_importance(tmp_path / "other" / file.name, changed, checkpoint)
    for wrong, said in ((other, "options.importance.sha256"), (None, "options.importance")):
        with pytest.raises(OutputError, match=said):
            convert(model, output, importance=wrong)
    convert(model, output, importance=file)
    record = read_json(output / "ktconv.json")["options"]
    assert record["importance"] == {
        "file": file.name,
        "sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
        "kind": "ktconv-importance",
    }
    assert "--importance FILE" in (output / "README.md").read_text()
    options = options_of_record(record)
    assert options is not None and options.as_dict() == record
    assert opened(file, checkpoint).record == options.importance


@pytest.mark.parametrize(
    "damage",
    [
        {"importance": {"file": "x", "sha256": "y"}},
        {"importance": {"file": "x", "sha256": "y", "kind": 3}},
        {"importance": {"file": "x", "sha256": "y", "kind": "z", "more": ""}},
        {"importance": None},
        {"scale": "amax"},
    ],
)
def test_records_that_are_none(damage: dict[str, Any]) -> None:
    record = Options(importance=ImportanceRecord("a", "b", "c")).as_dict()
    assert options_of_record(record) is not None
    assert options_of_record({**record, **damage}) is None


def test_converting_again_needs_the_file(model: Path, file: Path, tmp_path: Path) -> None:
    """reshard would otherwise make other scales, and say that they are the same."""
    convert(model, tmp_path / "out", importance=file)
    done = ktconv("reshard", tmp_path / "out", tmp_path / "new", "--numa", 2, "--source", model)
    assert done.exit_code == 2 and f"--importance {file.name}" in done.stderr
    assert not (tmp_path / "new").exists()


# ---- what is said ----------------------------------------------------------------------


def test_plan_and_report_show_coverage(
    model: Path, file: Path, importance: dict[int, LayerImportance], tmp_path: Path
) -> None:
    words = ("quantize-cpu", model, tmp_path / "out", "--importance", file, "--numa", 1)
    plan = ktconv(*words, "--dry-run")
    assert plan.exit_code == 0, plan.stderr
    assert f"of {2 * EXPERTS} experts 2 got no token and " in plan.stdout
    assert not (tmp_path / "out").exists()
    for more in (("--dry-run",), ()):
        facts = json.loads(ktconv(*words, "--json", *more).stdout)["importance"]
        assert facts["file"] == file.name and facts["kind"] == "ktconv-importance"
        assert facts["experts_without_tokens"] == 2
        assert list(facts["layers"]) == ["0", "1"]
        assert facts["layers"]["1"]["tokens_median"] == np.median(importance[1].counts)


def test_the_table_is_short_and_has_the_worst_layers_first() -> None:
    layers = {index: np.array([1000 + index, 2000, 3000, 40_000 - index]) for index in range(60)}
    layers[40] = np.array([0, 0, 5, 7000])
    layers[7] = np.array([SHRINKAGE - 1, SHRINKAGE, SHRINKAGE + 2, 600])
    lines = coverage_lines(layers)
    assert len(lines) == 12
    assert lines[2].split() == ["40", "0", "2", "7000", "2", "1"]
    assert lines[3].split() == ["7", str(SHRINKAGE - 1), str(SHRINKAGE + 1), "600", "0", "1"]
    assert lines[-2].strip() == "and 52 layers whose experts saw more"
    assert lines[-1].startswith(f"of 240 experts 2 got no token and 2 fewer than {SHRINKAGE}")
    facts = coverage_facts(layers)
    assert facts["experts"] == 240 and facts["experts_mostly_of_layer"] == 2
    assert len(facts["layers"]) == 60


def test_memory_is_planned(model: Path, file: Path, tmp_path: Path) -> None:
    request = Request(str(model), tmp_path / "out", Options(numa=1), threads=1)
    weights = prepare(replace(request, importance=file)).weights
    assert weights is not None
    nbytes = 4 * EXPERTS * (HIDDEN + INNER)
    assert weights.memory(2) - weights.memory(1) == nbytes


def test_a_layer_of_mtp_without_importance_is_said(
    checkpoint: Checkpoint, importance: dict[int, LayerImportance], tmp_path: Path
) -> None:
    layers = [checkpoint.layers[0], replace(checkpoint.layers[1], is_mtp=True)]
    path = write_importance(tmp_path / "file", {0: importance[0]}, checkpoint)
    weights = open_weights(path, checkpoint, layers)
    assert weights.of(1, 0, "down") is None and weights.of(0, 0, "down") is not None
    assert list(weights.coverage) == [0]
    (note,) = weights.notes
    assert "no importance of MTP layer 1: all errors count the same there" in note
    both = write_importance(tmp_path / "both", importance, checkpoint)
    assert open_weights(both, checkpoint, layers).of(1, 0, "down") is not None


# ---- files that are refused ------------------------------------------------------------


def cut(index: int, **to: int) -> Change:
    """Other sizes of a layer."""

    def change(layers: dict[int, LayerImportance]) -> None:
        e, h, i = (to.get(name) for name in ("experts", "hidden", "inner"))
        one = layers[index]
        layers[index] = LayerImportance(
            np.ascontiguousarray(one.gate_up[:e, :h]),
            np.ascontiguousarray(one.down[:e, :i]),
            one.counts[:e],
        )

    return change


def zeros(index: int, **parts: float) -> Change:
    """Nothing in some parts of a layer."""
    return lambda layers: layers.update(
        {index: replace(layers[index], **{k: getattr(layers[index], k) * 0 for k in parts})}
    )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda layers: layers.pop(1), r"has no importance of layer 1"),
        (
            lambda layers: layers.update({5: layers[0]}),
            r"another model: it has MoE layer 5",
        ),
        (cut(1, experts=2), "of another model: layer 1 has 2 experts of hidden size 128"),
        (cut(1, hidden=64), "of another model: layer 1 has 3 experts of hidden size 64"),
        (cut(0, inner=128), "layer 0 has 3 experts of hidden size 128 and intermediate size 128"),
        (zeros(1, gate_up=0, down=0, counts=0), "no inputs of gate and up in layer 1: no expert"),
        (zeros(1, down=0), "no inputs of down in layer 1: all are 0"),
    ],
)
def test_files_of_other_models(
    change: Change,
    said: str,
    model: Path,
    checkpoint: Checkpoint,
    importance: dict[int, LayerImportance],
    tmp_path: Path,
) -> None:
    layers = dict(importance)
    change(layers)
    path = write_importance(tmp_path / "other.safetensors", layers, checkpoint)
    with pytest.raises(UsageError, match=said) as caught:
        convert(model, tmp_path / "out", importance=path)
    assert str(path) in str(caught.value) and caught.value.hint
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("options", [{"scale": "amax"}, {"compat": True}])
def test_only_the_search_can_weigh_errors(
    options: dict[str, Any], model: Path, file: Path, tmp_path: Path
) -> None:
    flag = "--compat" if "compat" in options else "--scale amax"
    with pytest.raises(UsageError, match=f"--importance .* combined with {flag}"):
        convert(model, tmp_path / "out", importance=file, **options)


def test_damaged_values_are_found_before_anything_is_written(
    model: Path, checkpoint: Checkpoint, importance: dict[int, LayerImportance], tmp_path: Path
) -> None:
    layers = dict(importance)
    broken = layers[1].down.copy()
    broken[2, 7] = np.nan
    layers[1] = replace(layers[1], down=broken)
    path = write_importance(tmp_path / "nan", layers, checkpoint)
    done = ktconv("quantize-cpu", model, tmp_path / "out", "--importance", path)
    assert done.exit_code == 2 and "layers.1.down has values that are negative" in done.stderr
    assert "Traceback" not in done.stderr and not (tmp_path / "out").exists()


def test_a_file_that_changes_meanwhile(
    file: Path, checkpoint: Checkpoint, importance: dict[int, LayerImportance]
) -> None:
    weights = opened(file, checkpoint)
    assert weights.of(0, 1, "up") is not None
    layers = dict(importance)
    layers[1] = replace(layers[1], counts=layers[1].counts * 2)
    again = write_importance(file.with_name("new"), layers, checkpoint)
    again.replace(file)
    with pytest.raises(SourceChangedError, match=str(file)):
        weights.of(1, 1, "up")


@pytest.mark.parametrize("kind", ["missing", "directory", "pipe", "text", "model"])
def test_what_is_no_file_of_importance(kind: str, model: Path, tmp_path: Path) -> None:
    path = {"directory": tmp_path, "model": model / "model.safetensors"}.get(kind, tmp_path / kind)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "text":
        path.write_text("1, 2, 3 " * 100)
    with pytest.raises(UsageError, match=str(path)) as caught:
        convert(model, tmp_path / "out", importance=path)
    assert "stats" in str(caught.value.hint) and not (tmp_path / "out").exists()
