"""--target-size and --target-bits: outputs that fit, chosen by errors that conversions have."""

from __future__ import annotations

import json
from math import sqrt
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from helpers.cli import ktconv
from helpers.convert import read_json, read_model
from helpers.corrupt import check
from helpers.importance_files import importance_of, write_importance
from helpers.layered import EXPERTS, HIDDEN, INNER, LAYERS, layered_model

from ktconv.cli.mix import MixEngine
from ktconv.errors import UsageError
from ktconv.quantize.encoded.request import Request
from ktconv.quantize.encoded.run import encode
from ktconv.quantize.recipes.document import document
from ktconv.quantize.recipes.run import Fitted, Fitting
from ktconv.quantize.recipes.wish import _PARTS, Wish, method_named, methods_named
from ktconv.source import PROJECTIONS, open_checkpoint
from ktconv.targets.encoded.engines import ENGINES, why_not
from ktconv.targets.encoded.recipe import parse_recipe, read_recipe
from ktconv.targets.encoded.scheme import MIXED
from ktconv.targets.encoded.target import Options

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return layered_model(tmp_path_factory.mktemp("fit") / "model")


def request(model: Path, output: Path, **options: Any) -> Request:
    given = {"scheme": MIXED.name, "group_size": 0, "scale": "search", **options}
    return Request(str(model), output, Options(**given), threads=2)


def fit(model: Path, tmp_path: Path, wish: Wish, **options: Any) -> Fitted:
    return Fitting(request(model, tmp_path / "out", **options), wish).run()


def written(fitted: Fitted, model: Path, output: Path) -> list[Path]:
    encode(request(model, output, recipe=fitted.recipe.toml))
    return sorted(output.glob("*.safetensors"))


def test_choices_of_the_command_are_those_of_the_table() -> None:
    assert get_args(MixEngine) == tuple(_PARTS) and {*_PARTS} <= {*ENGINES}


@pytest.mark.parametrize("engine", _PARTS)
@pytest.mark.parametrize("bits", [4.3, 5.0, 6.5, 9.0, 16.0])
def test_outputs_fit_and_load(engine: str, bits: float, model: Path, tmp_path: Path) -> None:
    fitted = fit(model, tmp_path, Wish(bits=bits, engine=engine))
    assert fitted.bits <= bits
    layers = open_checkpoint(str(model)).layers
    chosen = [(layer, range(EXPERTS)) for layer in layers]
    assert why_not(engine, fitted.recipe, chosen) is None
    shards = written(fitted, model, tmp_path / "out")
    assert sum(one.stat().st_size for one in shards) == fitted.nbytes
    experts = sum(len(t.data) for n, t in read_model(tmp_path / "out").items() if ".experts." in n)
    weights = LAYERS * EXPERTS * 3 * HIDDEN * INNER
    assert 8 * experts / weights == pytest.approx(fitted.bits)
    others = [both for both in fitted.uniform.values() if both[0] <= fitted.bits]
    assert all(fitted.error <= error for _, error in others)


def test_a_size_is_kept_to_the_byte(model: Path, tmp_path: Path) -> None:
    """With headers and all other tensors; one byte less takes another recipe."""
    for size in (900_000, 1_000_000, 1_333_333):
        fitted = fit(model, tmp_path, Wish(nbytes=size, engine="compressed-tensors"))
        assert 0.9 * size < fitted.nbytes <= size
        again = fit(model, tmp_path, Wish(nbytes=fitted.nbytes, engine="compressed-tensors"))
        assert again.nbytes == fitted.nbytes
        less = fit(model, tmp_path, Wish(nbytes=fitted.nbytes - 1, engine="compressed-tensors"))
        assert less.nbytes < fitted.nbytes and less.error >= fitted.error


def test_errors_are_those_of_the_conversion(model: Path, tmp_path: Path) -> None:
    """All rows of this model are in the sample."""
    wish = Wish(bits=6.0, engine="compressed-tensors")
    fitted = fit(model, tmp_path, wish)
    written(fitted, model, tmp_path / "out")
    units = read_json(tmp_path / "out" / "ktconv.json")["units"].values()
    recorded = {
        name: about["relative_rms_error"]
        for unit in units
        for name, about in unit["tensors"].items()
        if "relative_rms_error" in about
    }
    for layer in range(LAYERS):
        for proj in PROJECTIONS:
            method = fitted.recipe.of(layer, 0, proj)
            mine = [e for n, e in recorded.items() if f".{layer}.mlp" in n and f"{proj}_proj" in n]
            low, high = min(mine), max(mine)
            predicted = sqrt(fitted.measured.errors[method][layer, proj])
            assert len(mine) == EXPERTS and low * 0.99 <= predicted <= high * 1.01


def test_the_worst_layers_get_the_most_bits(model: Path, tmp_path: Path) -> None:
    """Those where int8 saves most."""
    four, eight = methods_named("int4-g128,int8-g128")
    fitted = fit(model, tmp_path, Wish(bits=5.6, methods=(four, eight)))
    errors = fitted.measured.errors

    def saved(layer: int) -> float:
        return sum(errors[four][layer, proj] - errors[eight][layer, proj] for proj in PROJECTIONS)

    worst = max(range(LAYERS), key=saved)
    assert len({saved(layer) for layer in range(LAYERS)}) == LAYERS
    chosen = [fitted.recipe.of(layer, 0, "up") for layer in range(LAYERS)]
    assert chosen == [eight if layer == worst else four for layer in range(LAYERS)]


def test_the_recipe_is_a_file_to_edit(model: Path, tmp_path: Path) -> None:
    words = ("quantize-cpu", model, tmp_path / "out", "--target-bits", "5.2")
    done = ktconv(*words, "--engine", "compressed-tensors", "--write-recipe", tmp_path / "r.toml")
    assert done.exit_code == 0, done.stderr
    text = (tmp_path / "r.toml").read_text()
    assert "for --target-bits 5.2" in text and text.count("*") == LAYERS * 3 + 1
    recorded = (tmp_path / "out" / "ktconv_recipe.toml").read_text()
    assert read_recipe(tmp_path / "r.toml") == parse_recipe(recorded)
    assert check(tmp_path / "out", model).passed
    again = ktconv(*words, "--engine", "compressed-tensors")
    assert again.exit_code == 0, again.stderr  # nothing to do: the same recipe again
    edited = ktconv("quantize-cpu", model, tmp_path / "two", "--recipe", tmp_path / "r.toml")
    assert edited.exit_code == 0 and read_model(tmp_path / "two") == read_model(tmp_path / "out")


def test_a_dry_run_writes_the_recipe_alone(model: Path, tmp_path: Path) -> None:
    words = ("quantize-cpu", model, tmp_path / "out", "--target-size", "1MB", "--dry-run")
    done = ktconv(*words, "--json", "--write-recipe", tmp_path / "r.toml")
    assert done.exit_code == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts["output_bytes"] <= 1_000_000 and facts["methods"]
    assert [one.name for one in tmp_path.iterdir()] == ["r.toml"]
    assert facts["fit"]["output_bytes"] == facts["output_bytes"]


def test_importance_decides(model: Path, tmp_path: Path) -> None:
    """Where inputs of large errors do not count, layers look better than they are."""
    checkpoint = open_checkpoint(str(model))
    layers = importance_of(checkpoint)
    path = write_importance(tmp_path / "importance.safetensors", layers, checkpoint)
    wish = Wish(bits=5.6, methods=methods_named("int4-g128,int8-g128"))
    plain = Fitting(request(model, tmp_path / "out"), wish).run()
    weighed = Fitting(request(model, tmp_path / "out"), wish, path).run()
    method = method_named("int4-g128")
    assert plain.measured.errors[method] != weighed.measured.errors[method]


def test_a_source_that_has_the_format_loses_nothing(model: Path, tmp_path: Path) -> None:
    encode(Request(str(model), tmp_path / "packed", Options(scheme="rawint4", group_size=32)))
    fitted = fit(tmp_path / "packed", tmp_path, Wish(bits=8.0))
    assert fitted.recipe.toml == 'method = "rawint4"\n\nengine = "vllm"\n'.replace("\n\n", "\n")
    assert fitted.error == 0
    anew = fit(tmp_path / "packed", tmp_path, Wish(bits=8.0), requantize=True)
    assert anew.uniform[method_named("rawint4")][1] > 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--target-bits", "4"], "--target-bits 4 is too small: with the smallest of int4-g128"),
        (["--target-size", "1kB"], "--target-size 1000 is too small"),
        (["--target-size", "much"], "--target-size"),
        (["--target-bits", "0"], "must be in (0, 32]"),
        (["--target-bits", "5", "--methods", "int4"], "--methods: int4 cannot be mixed"),
        (["--target-bits", "5", "--methods", "FP8_BLOCK"], "follows from blocks of rows"),
        (["--target-bits", "5", "--methods", "W4A16:7"], "has a group size that W4A16 does not"),
        (["--target-bits", "5", "--target-size", "1GB"], "cannot be combined"),
        (["--target-bits", "5", "--method", "int8"], "--method cannot be combined with --target"),
        (["--target-bits", "5", "--importance", "weights"], "--importance weights cannot"),
        (["--target-bits", "5", "--importance", "none.st"], "none.st"),
        (["--methods", "bf16"], "--methods belongs to --target-size and --target-bits"),
        (["--write-recipe", "r.toml"], "--write-recipe belongs to"),
        (["--target-bits", "5", "--write-recipe", "/nowhere/r.toml"], "/nowhere"),
    ],
)
def test_bad_wishes(words: list[str], message: str, model: Path, tmp_path: Path) -> None:
    done = ktconv("quantize-cpu", model, tmp_path / "out", *words)
    assert done.exit_code == 2 and message in done.stderr, done.stderr
    assert "Traceback" not in done.stderr and not (tmp_path / "out").exists()


def test_the_smallest_that_a_hint_names_is_possible(model: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as raised:
        fit(model, tmp_path, Wish(nbytes=1000))
    assert raised.value.hint
    size = int(raised.value.hint.split()[4])
    assert fit(model, tmp_path, Wish(nbytes=size)).nbytes <= size
    with pytest.raises(UsageError):
        fit(model, tmp_path, Wish(nbytes=size - 1))


def test_methods_that_do_not_fit_a_model_are_left_out(tmp_path: Path) -> None:
    from helpers.families import numbered, random_weights, simple_config, write_checkpoint

    odd = random_weights(128, 96, 2)
    config = simple_config(hidden_size=128, moe_intermediate_size=96, num_experts=2)
    write_checkpoint(tmp_path / "odd", numbered("model.layers.0.mlp.experts", odd), config)
    fitted = fit(tmp_path / "odd", tmp_path, Wish(bits=5.0))
    assert [one.name for one in fitted.left_out] == ["int4-g128", "int4-g64", "int8-g128"]
    assert "96 columns" in next(iter(fitted.left_out.values()))
    assert "left out" in "\n".join(fitted.lines())
    assert document(fitted, Wish(bits=5.0)).startswith("# Chosen by ktconv")
    assert np.isfinite(fitted.error)
    with pytest.raises(UsageError, match="no method of --methods"):
        fit(tmp_path / "odd", tmp_path, Wish(bits=5.0, methods=methods_named("int4-g128")))
