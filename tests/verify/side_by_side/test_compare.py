"""Several conversions of one model: their sizes, errors, speeds, the page and the picture."""

from __future__ import annotations

import json
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from helpers.cli import ktconv
from helpers.gpu_corrupt import change, flip
from helpers.layered import LAYERS, layered_model
from helpers.recoded import encode

from ktconv.errors import UsageError
from ktconv.targets.encoded.recipe import parse_recipe
from ktconv.targets.encoded.scheme import MIXED
from ktconv.verify.report import render_report
from ktconv.verify.report.scatter import Point, scatter_chart
from ktconv.verify.side_by_side.command import lines_of
from ktconv.verify.side_by_side.request import CompareRequest
from ktconv.verify.side_by_side.run import Row, compare, dominated
from ktconv.verify.side_by_side.speed import Speed, kinds_of_output

pytestmark = pytest.mark.slow

MIX = 'method = "int4-g128"\n[[rule]]\nlayers = "1,3"\nmethod = "fp8-channel"\n'

NO_KERNELS = """engine = "compressed-tensors"
method = "int4-g128"
[[rule]]
projections = "down"
method = "fp8-channel"
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return layered_model(tmp_path_factory.mktemp("compare") / "model")


@pytest.fixture(scope="module")
def outputs(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    where = tmp_path_factory.mktemp("outputs")
    encode(model, where / "four", "int4-g128", scale="search")
    encode(model, where / "eight", "fp8-channel")
    by_projection = parse_recipe(NO_KERNELS).toml
    encode(model, where / "none", MIXED.name, recipe=by_projection, scale="search")
    recipe = parse_recipe(MIX).toml
    encode(model, where / "mix", MIXED.name, recipe=recipe, scale="search")
    return {path.name: path for path in where.iterdir()}


@pytest.fixture(scope="module")
def facts(model: Path, outputs: dict[str, Path]) -> dict[str, Any]:
    request = CompareRequest(
        [outputs[name] for name in ("four", "mix", "eight", "none")],
        str(model),
        level="layers",
        threads=2,
        seconds=0.0,
        tokens=(1, 2),
    )
    return compare(request).facts()


def by_name(facts: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in facts["rows"]}


def test_sizes_and_errors(facts: dict[str, Any], outputs: dict[str, Path]) -> None:
    rows = by_name(facts)
    assert list(rows) == ["source", "four", "mix", "eight", "none"] and facts["passed"]
    for name, path in outputs.items():
        size = sum(one.stat().st_size for one in path.glob("*.safetensors"))
        assert rows[name]["bytes"] == size
    assert rows["source"]["bits"] == 16 and rows["source"]["relative_rms_error"] == 0
    assert rows["four"]["bits"] == pytest.approx(4.125, abs=0.02)
    assert rows["mix"]["bits"] == pytest.approx((4.125 + 8.2) / 2, abs=0.1)
    errors = [rows[name]["relative_rms_error"] for name in ("four", "mix", "eight")]
    assert errors == sorted(errors, reverse=True) and errors[-1] > 0
    assert all(rows[name]["output_error"] > 0 for name in outputs)
    assert all(rows[name]["kl_mean"] is None for name in outputs)
    assert rows["mix"]["method"] == "mixed" and rows["four"]["method"] == "int4-g128"


def test_speeds_and_what_our_kernels_lack(facts: dict[str, Any]) -> None:
    rows = by_name(facts)
    for name, formats in (
        ("source", ["bf16"]),
        ("four", ["gint4-128"]),
        ("mix", ["gint4-128", "fp8-channel"]),
        ("eight", ["fp8-channel"]),
    ):
        assert rows[name]["kernel_formats"] == formats
        assert set(rows[name]["tokens_per_s"]) == {"1", "2"}
        assert all(rate > 0 for rate in rows[name]["tokens_per_s"].values())
    assert rows["none"]["tokens_per_s"] == {}
    assert "no weight format of the kernels" in rows["none"]["not_measured"]


def test_layers_of_a_kind_are_measured_once(outputs: dict[str, Path]) -> None:
    kinds = kinds_of_output(outputs["mix"], range(LAYERS))
    assert repr(kinds[0]) == repr(kinds[2]) != repr(kinds[1]) == repr(kinds[3])
    assert (
        len({repr(kind) for kind in kinds_of_output(outputs["four"], range(LAYERS)).values()}) == 1
    )


def row(name: str, nbytes: int, **measures: float) -> Row:
    return Row(name, name, name, nbytes, 1.0, measures, Speed({}))


def test_what_another_conversion_makes_superfluous() -> None:
    rows = [
        row("small", 10, kl_mean=0.3, relative_rms_error=0.1),
        row("large", 20, kl_mean=0.1, relative_rms_error=0.2),
        row("bad", 20, kl_mean=0.4, relative_rms_error=0.01),
        row("twin", 20, kl_mean=0.1, relative_rms_error=0.2),
        row("unmeasured", 15),
    ]
    assert dominated(rows) == {"bad": "small"}


def test_lines_and_page(facts: dict[str, Any]) -> None:
    lines = list(lines_of(facts))
    assert lines[0].split()[:4] == ["method", "size", "bits", "weights"]
    assert [line.split()[0] for line in lines[1:6]] == list(by_name(facts))
    assert any(line.startswith("none: speed not measured") for line in lines)
    page = render_report(json.loads(json.dumps(facts)))
    assert page.count("<figure>") == 3  # error, and speed at 1 and 2 tokens
    assert "int4-g128" in page and "none: speed not measured" in page
    assert "http" not in page.replace("http-equiv", "")
    assert "<strong>ktconv compare</strong>" in page


def test_a_hostile_name_stays_text(facts: dict[str, Any]) -> None:
    changed = json.loads(json.dumps(facts))
    changed["rows"][1]["name"] = "<script>alert(1)</script>"
    assert "<script>alert" not in render_report(changed)
    assert "nothing" not in render_report({"kind": "outputs", "rows": [{"name": None}, 3]})


def test_names_beside_points_do_not_overlap() -> None:
    chart = scatter_chart([Point(f"p{i}", 1.0, 1.0 + i * 1e-9) for i in range(5)], "x", "y")
    assert chart is not None
    heights = sorted(float(one["at"][1]) for one in chart["points"])
    assert all(b - a >= 14.9 for a, b in pairwise(heights))
    assert scatter_chart([], "x", "y") is None


def test_a_damaged_output_fails(model: Path, outputs: dict[str, Path], tmp_path: Path) -> None:
    damaged = shutil.copytree(outputs["four"], tmp_path / "damaged")

    change(damaged, "model.layers.2.mlp.experts.1.up_proj.weight_packed", flip)
    words = (damaged, outputs["eight"], "--source", model, "--level", "weights", "--no-speed")
    done = ktconv("compare", *words, "--json")
    found = by_name(json.loads(done.stdout))
    assert done.exit_code == 1 and found["damaged"]["failures"] and not found["eight"]["failures"]


def test_level_model_report_and_plot(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from helpers.paths import EXAMPLE

    for method in ("rawint4", "bf16"):
        done = ktconv("quantize-cpu", EXAMPLE, tmp_path / method, "--method", method)
        assert done.exit_code == 0, done.stderr
    words = [tmp_path / "rawint4", tmp_path / "bf16", "--source", EXAMPLE, "--windows", "1"]
    words += ["--report", tmp_path / "r.html", "--plot", tmp_path / "p.svg", "--seconds", "0"]
    done = ktconv("compare", *words, "--json", "--tokens", "1")
    assert done.exit_code == 0, done.stderr
    rows = by_name(json.loads(done.stdout))
    assert abs(rows["bf16"]["kl_mean"]) < 1e-6 < rows["rawint4"]["kl_mean"]
    assert rows["rawint4"]["top1_agreement"] < 1
    assert "KL divergence" in (tmp_path / "r.html").read_text()
    assert "<svg" in (tmp_path / "p.svg").read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["four"], "one output alone cannot be compared"),
        (["four", "four"], "four is given twice"),
        (["four", "none"], "none is not a directory"),
        (["four", "eight", "--report", "r.txt"], "does not end in .html"),
        (["four", "eight", "--plot", "p.gif"], "not a picture file"),
        (["four", "eight", "--tokens", "0"], "--tokens"),
        (["four", "eight", "--sample", "2"], "--sample must be in"),
    ],
)
def test_bad_usage(
    words: list[str], message: str, model: Path, outputs: dict[str, Path], tmp_path: Path
) -> None:
    paths = {"four": outputs["four"], "eight": outputs["eight"], "none": tmp_path / "none"}
    given = [paths.get(word, word) for word in words]
    done = ktconv("compare", *given, "--source", model, "--level", "weights", "--no-speed")
    assert done.exit_code == 2 and message in done.stderr, done.stderr
    assert "Traceback" not in done.stderr


def test_a_directory_that_is_no_output(model: Path, outputs: dict[str, Path]) -> None:
    request = CompareRequest([outputs["four"], model], str(model), level="weights")
    with pytest.raises(UsageError):
        compare(request)
