"""Outputs whose matrices have several methods: the same bytes as with one, and a config that the
library and engines match to them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.cli import ktconv
from helpers.convert import all_files, read_json, read_model
from helpers.corrupt import check
from helpers.families import Raw
from helpers.gpu_corrupt import flip
from helpers.layered import EXPERTS, HIDDEN, layered_model
from helpers.recoded import change_recorded, encode, values_of

from ktconv.errors import UsageError
from ktconv.source import PROJECTIONS, open_checkpoint
from ktconv.targets.encoded.engines import ENGINES, why_not
from ktconv.targets.encoded.names import fits, patterns_of
from ktconv.targets.encoded.recipe import Recipe, parse_recipe, read_recipe
from ktconv.targets.encoded.scheme import MIXABLE, MIXED

pytestmark = pytest.mark.slow

# Every method that can be mixed, in layers, projections and experts.
EVERYTHING = """
method = "int4-g128"
engine = "compressed-tensors"

[[rule]]
layers = "1"
method = "FP8_DYNAMIC"

[[rule]]
layers = [2]
projections = ["down", "gate"]
method = "int8-g128"

[[rule]]
layers = "2-3"
experts = { 2 = "0,2-3", 3 = "1" }
projections = "up"
method = "NVFP4A16"

[[rule]]
layers = "3"
projections = "down"
method = "bf16"

[[rule]]
layers = "3"
experts = { 3 = "0" }
projections = "gate"
method = "W4A16"
group_size = 32

[[rule]]
layers = "0"
projections = "down"
method = "FP8_BLOCK"
"""
PER_LAYER = 'method = "int4-g128"\n[[rule]]\nlayers = "1,3"\nmethod = "int8-g128"\n'


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return layered_model(tmp_path_factory.mktemp("recipes") / "model")


@pytest.fixture(scope="module")
def mixed(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("recipes") / "mixed"
    made(model, output, EVERYTHING)
    return output


def made(model: Path, output: Path, toml: str, **options: Any) -> Any:
    given = {"scale": "search", "recipe": parse_recipe(toml).toml, **options}
    return encode(model, output, MIXED.name, **given)


def modules(model: Path) -> list[tuple[str, int, int, Any]]:
    return [
        (f"model.layers.{layer.index}.mlp.experts.{expert}.{proj}_proj", layer.index, expert, proj)
        for layer in open_checkpoint(str(model)).layers
        for expert in range(EXPERTS)
        for proj in PROJECTIONS
    ]


def of_module(tensors: dict[str, Raw], module: str) -> dict[str, Raw]:
    return {name: raw for name, raw in tensors.items() if name.rpartition(".")[0] == module}


# ---- bytes -----------------------------------------------------------------------------


def test_each_matrix_is_as_with_its_method_alone(model: Path, mixed: Path, tmp_path: Path) -> None:
    recipe, tensors = parse_recipe(EVERYTHING), read_model(mixed)
    alone: dict[Any, dict[str, Raw]] = {}
    seen = set()
    for module, *where in modules(model):
        method = recipe.of(*where)
        if method not in alone:
            scale = "search" if method.scheme(search=True).search else "amax"
            size = {"group_size": method.group_size, "scale": scale}
            encode(model, tmp_path / method.words, method.name, **size)
            alone[method] = read_model(tmp_path / method.words)
        found, wanted = of_module(tensors, module), of_module(alone[method], module)
        assert found == wanted and found, module
        seen.add(method.name)
    assert len(seen) == 7
    assert not {name for name in tensors if ".experts." in name} - {
        name for module, *_ in modules(model) for name in of_module(tensors, module)
    }


def test_an_interrupted_run_and_another_recipe(model: Path, mixed: Path, tmp_path: Path) -> None:
    """Layer by layer gives the same bytes; another recipe does not continue it."""
    output = tmp_path / "out"
    for layers in ([2], [0, 1], None):
        made(model, output, EVERYTHING, layers=layers)
    ours, theirs = all_files(output), all_files(mixed)
    assert ours.keys() == theirs.keys()
    assert [n for n in ours if ours[n] != theirs[n] and n not in ("ktconv.json", "README.md")] == []
    (tmp_path / "half").mkdir()
    made(model, tmp_path / "half", EVERYTHING, layers=[2])
    from ktconv.errors import OutputError

    with pytest.raises(OutputError, match="other settings"):
        made(model, tmp_path / "half", EVERYTHING.replace("int8-g128", "int4-g64"))


def test_the_recorded_recipe_gives_the_same_output(
    model: Path, mixed: Path, tmp_path: Path
) -> None:
    words = ("quantize-cpu", model, tmp_path / "again", "--recipe", mixed / "ktconv_recipe.toml")
    done = ktconv(*words)
    assert done.exit_code == 0, done.stderr
    assert read_model(tmp_path / "again") == read_model(mixed)


# ---- config.json -----------------------------------------------------------------------


def test_the_library_finds_each_module_in_its_group(model: Path, mixed: Path) -> None:
    """compressed-tensors' own matching, and its decompression of every module."""
    quantization = pytest.importorskip("compressed_tensors.quantization")
    import torch
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.utils.match import match_name

    section = read_json(mixed / "config.json")["quantization_config"]
    config = quantization.QuantizationConfig.model_validate(section)
    assert config.format == "mixed-precision"
    recipe, tensors = parse_recipe(EVERYTHING), read_model(mixed)
    dtypes = {
        "I32": torch.int32, "BF16": torch.bfloat16, "I64": torch.int64, "U8": torch.uint8,
        "F32": torch.float32, "F8_E4M3": torch.float8_e4m3fn,
    }  # fmt: skip
    for module, *where in modules(model):
        method = recipe.of(*where)
        groups = [
            group
            for group in config.config_groups.values()
            if any(match_name(module, target) for target in group.targets)
        ]
        ignored = any(match_name(module, one) for one in config.ignore)
        assert (len(groups), ignored) == ((0, True) if method.name == "bf16" else (1, False))
        if not groups:
            continue
        assert groups[0].weights.num_bits == method.scheme(search=False).bits
        stored = {
            name.rpartition(".")[2]: torch.frombuffer(
                bytearray(raw.data), dtype=dtypes[raw.dtype]
            ).reshape(raw.shape)
            for name, raw in of_module(tensors, module).items()
        }
        compressor = BaseCompressor.get_value_from_registry(groups[0].format)
        found = compressor.decompress(stored, groups[0])["weight"].float().numpy()
        shape = (HIDDEN, 128) if where[-1] == "down" else (128, HIDDEN)
        assert np.allclose(found, values_of(tensors, module, *shape), rtol=2**-8, atol=0)
    for name in ("model.layers.0.mlp.gate", "lm_head"):
        assert any(match_name(name, one) for one in config.ignore)


def test_no_class_is_a_target(mixed: Path) -> None:
    """Engines that look up experts by the class Linear would read all by one scheme."""
    groups = read_json(mixed / "config.json")["quantization_config"]["config_groups"]
    assert all(one.startswith("re:") for group in groups.values() for one in group["targets"])


def test_what_is_bf16_alone_has_no_section(model: Path, tmp_path: Path) -> None:
    made(model, tmp_path / "out", 'method = "bf16"')
    assert "quantization_config" not in read_json(tmp_path / "out" / "config.json")
    assert check(tmp_path / "out", model).passed


def test_patterns_tell_a_draft_from_its_model() -> None:
    places = [("model.layers", 0), ("model.layers", 10), ("model.layers", 1), ("mtp.layers", 0)]
    given = [
        (f"{stem}.{layer}.mlp.experts.{expert}.{proj}_proj", proj, f"{stem} {layer == 1}")
        for stem, layer in places
        for expert in range(3)
        for proj in PROJECTIONS
    ]
    patterns = patterns_of(given)
    for module, _, method in given:
        found = [one for one, some in patterns.items() if any(fits(p, module) for p in some)]
        assert found == [method]
    one_list = patterns_of([given[0], given[9]])
    assert one_list == {
        "model.layers False": [r"re:(.*\.)?layers\.(0|10)\.(.*\.)?experts\.[0-9]+\.gate_proj$"]
    }


# ---- proof -----------------------------------------------------------------------------


def test_verify_proves_it_and_finds_every_flipped_bit(
    model: Path, mixed: Path, tmp_path: Path
) -> None:
    assert check(mixed, model).passed
    assert check(mixed).passed
    recipe = parse_recipe(EVERYTHING)
    seen: set[tuple[str, str]] = set()
    for module, *where in modules(model):
        name = recipe.of(*where).name
        parts = sorted(n.rpartition(".")[2] for n in of_module(read_model(mixed), module))
        for part in parts:
            if (name, part) in seen:
                continue
            seen.add((name, part))
            output = shutil.copytree(mixed, tmp_path / "damaged")

            change_recorded(output, f"{module}.{part}", flip)
            result = check(output, model)
            assert not result.passed, (module, part)
            shutil.rmtree(output)
    assert len(seen) == 17


def test_verify_compares_config_and_recipe(model: Path, mixed: Path, tmp_path: Path) -> None:
    output = shutil.copytree(mixed, tmp_path / "out")
    config = read_json(output / "config.json")
    groups = config["quantization_config"]["config_groups"]
    next(iter(groups.values()))["targets"][0] += "x"
    (output / "config.json").write_text(json.dumps(config))
    result = check(output, model)
    assert {failure.check for failure in result.failures} == {"config", "changed file"}
    assert not check(output).passed


def test_a_missing_tensor_of_a_mix(model: Path, mixed: Path, tmp_path: Path) -> None:
    """Of a matrix whose layout is not the usual one."""
    output = shutil.copytree(mixed, tmp_path / "out")
    shard = next(one for one in output.glob("*.safetensors") if b"layers.1.mlp" in one.read_bytes())
    data = shard.read_bytes()
    name = b"model.layers.1.mlp.experts.0.up_proj.weight_scale"
    shard.write_bytes(data.replace(name, name[:-1] + b"x", 1))
    result = check(output, model)
    assert any("weight_scale" in one.message for one in result.failures)


@pytest.mark.parametrize("level", ["layers"])
def test_layers_of_a_mix_are_computed(model: Path, mixed: Path, level: str) -> None:
    assert check(mixed, model, level).passed


def test_it_can_be_a_source(model: Path, mixed: Path, tmp_path: Path) -> None:
    """Dequantized to bf16, and for KTransformers."""
    encode(mixed, tmp_path / "plain", "bf16")
    plain, tensors = read_model(tmp_path / "plain"), read_model(mixed)
    for module, _, _, proj in modules(model):
        shape = (HIDDEN, 128) if proj == "down" else (128, HIDDEN)
        wanted = values_of(tensors, module, *shape)
        assert np.allclose(values_of(plain, module, *shape), wanted, rtol=2**-8, atol=0)


# ---- engines ---------------------------------------------------------------------------


LOADS = [
    (PER_LAYER, {"vllm", "ktconv"}),
    (PER_LAYER.replace("int8-g128", "NVFP4A16"), {"vllm", "ktconv"}),
    ('method = "rawint4"\n[[rule]]\nlayers = "0"\nmethod = "bf16"\n', {"vllm", "ktconv"}),
    ('method = "rawint4"\n[[rule]]\nprojections = "down"\nmethod = "fp8-channel"\n', set()),
    ('method = "rawint4"\n[[rule]]\nprojections = "gate"\nmethod = "int4-g64"\n', set()),
    ('method = "int4-g64"\n[[rule]]\nexperts = { 1 = "0" }\nmethod = "rawint4"\n', set()),
    ('method = "int4-g64"\n', set(ENGINES)),
    ('method = "NVFP4A16"\n', set(ENGINES)),
]


@pytest.mark.parametrize(("toml", "loads"), LOADS)
def test_what_loads_a_mix(toml: str, loads: set[str], model: Path) -> None:
    layers = open_checkpoint(str(model)).layers
    recipe = parse_recipe(toml).resolved(layers)
    chosen = [(layer, range(EXPERTS)) for layer in layers]
    found = {name for name in ENGINES if why_not(name, recipe, chosen) is None}
    assert found == loads | {"compressed-tensors"}


def test_our_kernels_compute_a_mix_of_layers(model: Path, tmp_path: Path) -> None:
    from ktconv.runtime.layers.native_load import native_experts

    rules = {"1": "rawint4", "2": "fp8-channel", "3": "bf16"}
    toml = 'method = "int4-g128"\nengine = "ktconv"\n' + "".join(
        f'[[rule]]\nlayers = "{layer}"\nmethod = "{method}"\n' for layer, method in rules.items()
    )
    made(model, tmp_path / "out", toml)
    formats = [native_experts(tmp_path / "out", layer).format.key for layer in range(4)]
    assert formats == ["gint4-128", "gint4-32", "fp8-channel", "bf16"]


def test_an_engine_that_cannot_mix_is_refused(model: Path, tmp_path: Path) -> None:
    toml = 'method = "rawint4"\n[[rule]]\nprojections = "down"\nmethod = "fp8-channel"\n'
    with pytest.raises(UsageError, match=r"vllm, which computes all experts.*rawint4 and fp8-ch"):
        made(model, tmp_path / "out", toml)
    made(model, tmp_path / "out", toml.replace("[[", 'engine = "compressed-tensors"\n[[', 1))
    assert check(tmp_path / "out", model).passed
    card = (tmp_path / "out" / "README.md").read_text()
    assert "Loaded by: compressed-tensors." in card
    assert "- fp8-channel: layers 0-3, down" in card
    assert "library_name: compressed-tensors" in card


# ---- bad input -------------------------------------------------------------------------

BAD = [
    ("method = int4", "is not TOML"),
    ("method = 1" + 5000 * "0", "is not TOML: exceeds the limit"),
    ('methd = "int4-g128"', "methd is not a key of a recipe; the nearest is method"),
    ("rule = 3", "must be tables"),
    ('[[rule]]\nmethod = "bf16"', "method is missing"),
    ('method = "int4"', "'int4' cannot be mixed: KTransformers loads such packed experts"),
    ('method = "fp8"', "'fp8' cannot be mixed: config.json names this format"),
    ('method = "int4-g256"', "'int4-g256' is not known; the nearest is int4-g64"),
    ('method = "bf16"\ngroup_size = 32', "32 is not one of bf16: no groups"),
    ('method = "W4A16"\ngroup_size = 48', "48 is not one of W4A16: 128, 32, 64, -1"),
    ('method = "bf16"\nengine = "llama.cpp"', "'llama.cpp', which is not a known engine"),
    ('method = "bf16"\nengine = 3', "engine 3 must be a name"),
    ('method = "bf16"\n[[rule]]\nlayers = "x"\nmethod = "rawint4"', "rule 1: layers"),
    ('method = "bf16"\n[[rule]]\nlayers = -1\nmethod = "rawint4"', 'must be like "0-2,61"'),
    ('method = "bf16"\n[[rule]]\nlayers = "9"\nmethod = "rawint4"', "names layer 9, which is not"),
    ('method = "bf16"\n[[rule]]\nlayers = "mtp"\nmethod = "rawint4"', "of which none is conv"),
    ('method = "bf16"\n[[rule]]\nexperts = "no.json"\nmethod = "rawint4"', "no.json is not a file"),
    ('method = "bf16"\n[[rule]]\nexperts = { 1 = "9" }\nmethod = "rawint4"', "names expert 9 of l"),
    ('method = "bf16"\n[[rule]]\nexperts = { x = "9" }\nmethod = "rawint4"', "'x' must be like"),
    ('method = "bf16"\n[[rule]]\nexperts = 3\nmethod = "rawint4"', "3 must be a file, or"),
    ('method = "bf16"\n[[rule]]\nprojections = ["w1"]\nmethod = "rawint4"', "must be some of"),
    ('method = "bf16"\n[[rule]]\nprojection = "up"\nmethod = "rawint4"', "nearest is projections"),
    (
        'method = "bf16"\n[[rule]]\nlayers = "1"\nmethod = "rawint4"\n[[rule]]\nmethod = "W4A16"',
        "rule 1 of the recipe decides nothing",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("toml", "message"), BAD)
def test_bad_recipes(toml: str, message: str, model: Path, tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(toml)
    with pytest.raises(UsageError) as raised:
        made(model, tmp_path / "out", read_recipe(path).toml)
    assert message in str(raised.value) and "\n" not in str(raised.value)
    assert raised.value.hint and not (tmp_path / "out").exists()


def test_files_that_are_no_recipes(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        read_recipe(tmp_path / "none.toml")
    (tmp_path / "latin.toml").write_bytes(b'method = "\xe4"')
    with pytest.raises(UsageError, match="not UTF-8"):
        read_recipe(tmp_path / "latin.toml")
    with pytest.raises(UsageError, match=r"name a recipe|directory|regular"):
        read_recipe(tmp_path)


def test_a_card_names_a_method_once_and_what_loads_it(model: Path, tmp_path: Path) -> None:
    toml = 'method = "W4A16"\n[[rule]]\nlayers = "0"\nmethod = "W4A16"\ngroup_size = 32\n'
    made(model, tmp_path / "out", toml)
    card = (tmp_path / "out" / "README.md").read_text()
    assert "library_name: vllm" in card and card.count("- W4A16\n") == 1
    assert "- W4A16 (group 32): layers 0" in card


def test_a_group_that_divides_no_matrix(model: Path, tmp_path: Path) -> None:
    narrow = layered_model(tmp_path / "model")
    toml = 'method = "rawint4"\n[[rule]]\nprojections = "down"\nmethod = "int4-g128"\n'
    made(narrow, tmp_path / "fits", toml.replace("[[", 'engine = "compressed-tensors"\n[[', 1))
    from helpers.families import numbered, random_weights, simple_config, write_checkpoint

    odd = random_weights(128, 96, 2)
    config = simple_config(hidden_size=128, moe_intermediate_size=96, num_experts=2)
    write_checkpoint(tmp_path / "odd", numbered("model.layers.0.mlp.experts", odd), config)
    with pytest.raises(UsageError, match=r"down of layer 0 a method that it cannot have.*96 col"):
        made(
            tmp_path / "odd",
            tmp_path / "out",
            toml.replace("[[", 'engine = "compressed-tensors"\n[[', 1),
        )
    swapped = toml.replace('"down"', '["gate", "up"]').replace(
        "[[", 'engine = "compressed-tensors"\n[[', 1
    )
    made(tmp_path / "odd", tmp_path / "up", swapped)
    assert check(tmp_path / "up", tmp_path / "odd").passed


def test_mtp_layers_and_files_of_experts(tmp_path: Path) -> None:
    model = layered_model(tmp_path / "model", 3, model_type="glm4_moe", num_nextn_predict_layers=1,
                          num_hidden_layers=2)  # fmt: skip
    assert [layer.is_mtp for layer in open_checkpoint(str(model)).layers] == [False, False, True]
    hot = {"schema": 1, "experts": {"0": [1, 3]}}
    (tmp_path / "hot.json").write_text(json.dumps(hot))
    path = tmp_path / "recipe.toml"
    path.write_text(
        'method = "int4-g128"\nengine = "compressed-tensors"\n[[rule]]\nlayers = "mtp"\n'
        'method = "int8-g128"\n[[rule]]\nexperts = "hot.json"\nmethod = "fp8-channel"\n'
    )
    done = ktconv("quantize-cpu", model, tmp_path / "out", "--recipe", path)
    assert done.exit_code == 0, done.stderr
    recipe = parse_recipe((tmp_path / "out" / "ktconv_recipe.toml").read_text())
    names = [recipe.of(*where).name for where in ((2, 0, "up"), (0, 3, "up"), (0, 2, "up"))]
    assert names == ["int8-g128", "fp8-channel", "int4-g128"]
    assert check(tmp_path / "out", model).passed
    alone = ktconv("quantize-cpu", model, tmp_path / "b", "--recipe", path, "--no-mtp")
    assert alone.exit_code == 2 and "of which none is converted" in alone.stderr


def test_the_plan_shows_methods_and_engines(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(PER_LAYER)
    done = ktconv("quantize-cpu", model, tmp_path / "out", "--recipe", path, "--dry-run", "--json")
    facts = json.loads(done.stdout)
    found = {
        one["method"]: (one["layers"], one["matrices"], one["bits"]) for one in facts["methods"]
    }
    assert found["int8-g128"] == ("1,3", 24, pytest.approx(8.125, abs=0.01))
    assert any("sglang cannot load this mix" in note for note in facts["notes"])
    made(model, tmp_path / "out", PER_LAYER)
    assert facts["output_bytes"] == sum(
        one.stat().st_size for one in (tmp_path / "out").glob("*.safetensors")
    )
    shown = json.loads(ktconv("inspect", tmp_path / "out", "--json").stdout)
    assert shown["methods"] == ["int4-g128", "int8-g128"] and shown["complete"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--method", "int8"], "--method cannot be combined with --recipe"),
        (["--numa", "2"], "--numa cannot be combined with --recipe"),
        (["--target-bits", "5"], "--recipe and --target-bits cannot be combined"),
        (["--engine", "vllm"], "a recipe names its engine"),
    ],
)
def test_options_that_exclude_a_recipe(
    words: list[str], message: str, model: Path, tmp_path: Path
) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(PER_LAYER)
    done = ktconv("quantize-cpu", model, tmp_path / "out", "--recipe", path, *words)
    assert done.exit_code == 2 and message in done.stderr
    assert not (tmp_path / "out").exists()


def test_toml_gives_the_recipe_again() -> None:
    recipe = parse_recipe(EVERYTHING)
    assert parse_recipe(recipe.toml) == recipe and isinstance(recipe, Recipe)
    assert {"int4-g128", "W4A16", "bf16", "FP8_BLOCK"} <= {*MIXABLE}
    assert not {"awq", "fp8", "mxfp4", "mixed"} & {*MIXABLE}
