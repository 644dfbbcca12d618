"""--map in every command that reads a source: the output is that of usual names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import gguf_files
from helpers.cli import ktconv, refused
from helpers.cli import ktconv_done as done
from helpers.convert import read_model
from helpers.families import Tensor, bf16, random_weights, simple_config, write_checkpoint

from ktconv.formats import parse_tensor_name

# `verify` runs the kernels of every level.
pytestmark = [pytest.mark.usefixtures("tiles"), pytest.mark.slow]

HIDDEN, INNER, EXPERTS = 128, 256, 4
NAMES = {
    "experts": {
        key: f"decoder.h.{{layer}}.moe.{word}.{{expert}}"
        for key, word in (("gate", "w_gate"), ("up", "w_up"), ("down", "w_down"))
    },
    "mtp": {key: f"extra.{{layer}}.moe.{key}.{{expert}}" for key in ("gate", "up", "down")},
    "mtp_others": {
        "router": "extra.{layer}.moe.route",
        "correction": "extra.{layer}.moe.route_bias",
    },
    "others": {
        "router": "decoder.h.{layer}.moe.route",
        "correction": "decoder.h.{layer}.moe.route_bias",
        "norm": "decoder.h.{layer}.ln2",
        "shared_gate": "decoder.h.{layer}.moe.always.gate",
        "shared_up": "decoder.h.{layer}.moe.always.up",
        "shared_down": "decoder.h.{layer}.moe.always.down",
    },
}
USUAL = {
    "experts": {
        key: f"model.layers.{{layer}}.mlp.experts.{{expert}}.{key}_proj"
        for key in ("gate", "up", "down")
    },
    "mtp": {
        key: f"mtp.layers.{{layer}}.mlp.experts.{{expert}}.{key}_proj"
        for key in ("gate", "up", "down")
    },
    "mtp_others": {
        "router": "mtp.layers.{layer}.mlp.gate",
        "correction": "mtp.layers.{layer}.mlp.gate.e_score_correction_bias",
    },
    "others": {
        "router": "model.layers.{layer}.mlp.gate",
        "correction": "model.layers.{layer}.mlp.gate.e_score_correction_bias",
        "norm": "model.layers.{layer}.post_attention_layernorm",
        "shared_gate": "model.layers.{layer}.mlp.shared_experts.gate_proj",
        "shared_up": "model.layers.{layer}.mlp.shared_experts.up_proj",
        "shared_down": "model.layers.{layer}.mlp.shared_experts.down_proj",
    },
}
ROUTING = {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "norm_topk_prob": True}


def map_text(names: Mapping[str, Mapping[str, str]] = NAMES) -> str:
    lines = ['like = "deepseek_v3"']
    for table, patterns in names.items():
        lines += [f"[{table}]", *(f'{key} = "{text}"' for key, text in patterns.items())]
    return "\n".join(lines) + "\n"


def write(directory: Path, names: Mapping[str, Mapping[str, str]], model_type: str) -> Path:
    """Two layers with router and shared expert, one MTP layer, an embedding."""
    rng = np.random.default_rng(4)

    def draw(*shape: int) -> Tensor:
        return bf16(rng.standard_normal(shape) / 8)

    tensors: dict[str, Tensor] = {"embed.weight": draw(16, HIDDEN)}
    shapes = {
        "router": (EXPERTS, HIDDEN), "correction": (EXPERTS,), "norm": (HIDDEN,),
        "shared_gate": (INNER, HIDDEN), "shared_up": (INNER, HIDDEN),
        "shared_down": (HIDDEN, INNER),
    }  # fmt: skip
    for table, count in (("others", 2), ("mtp_others", 1)):
        for layer in range(count):
            for key, pattern in names[table].items():
                ending = "" if key == "correction" else ".weight"
                tensors[pattern.replace("{layer}", str(layer)) + ending] = draw(*shapes[key])
    for table, count in (("experts", 2), ("mtp", 1)):
        for layer in range(count):
            weights = random_weights(HIDDEN, INNER, EXPERTS, seed=layer + 5 * (table == "mtp"))
            for key, pattern in names[table].items():
                for expert in range(EXPERTS):
                    name = pattern.replace("{layer}", str(layer)).replace("{expert}", str(expert))
                    tensors[f"{name}.weight"] = bf16(getattr(weights, key)[expert] / 8)
    tensors["extra.0.eh_proj.weight"] = draw(HIDDEN, 2 * HIDDEN)
    sizes = {"hidden_size": HIDDEN, "moe_intermediate_size": INNER, "num_experts": EXPERTS}
    config = simple_config(
        model_type=model_type, num_hidden_layers=2, num_nextn_predict_layers=1, **sizes, **ROUTING
    )
    return write_checkpoint(directory, tensors, config, shards=2)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """The model with odd names, its map, and the same model with usual names."""
    place = tmp_path_factory.mktemp("maps")
    naming = place / "names.toml"
    naming.write_text(map_text())
    odd = write(place / "odd", NAMES, "nobody_knows")
    return odd, naming, write(place / "usual", USUAL, "deepseek_v3")


def experts_in(output: Path) -> dict[str, Any]:
    return {name: one for name, one in read_model(output).items() if parse_tensor_name(name)}


CPU = ("--numa=2", "--threads=2")


@pytest.fixture(scope="module")
def converted(
    models: tuple[Path, Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """Outputs of the odd model and of the usual one."""
    odd, naming, usual = models
    place = tmp_path_factory.mktemp("outputs")
    done("quantize-cpu", odd, place / "odd", *CPU, "--map", naming)
    done("quantize-cpu", usual, place / "usual", *CPU)
    return place / "odd", place / "usual"


def test_the_same_bytes_as_with_usual_names(
    converted: tuple[Path, Path], models: tuple[Path, Path, Path]
) -> None:
    odd, usual = converted
    assert experts_in(odd) and experts_in(odd) == experts_in(usual)
    there = read_model(models[0])
    kept = {name: one for name, one in read_model(odd).items() if not parse_tensor_name(name)}
    assert kept == {name: one for name, one in there.items() if name in kept}
    assert {"decoder.h.1.moe.route.weight", "embed.weight"} <= kept.keys()
    assert (odd / "config.json").read_bytes() == (models[0] / "config.json").read_bytes()


def test_the_manifest_has_the_map(
    converted: tuple[Path, Path], models: tuple[Path, Path, Path]
) -> None:
    source = json.loads((converted[0] / "ktconv.json").read_text())["source"]
    assert "\n".join(source["map"]["toml"]) == models[1].read_text()
    assert "map" not in json.loads((converted[1] / "ktconv.json").read_text())["source"]
    cards = [(output / "README.md").read_text() for output in converted]
    assert ["--map FILE.toml" in card for card in cards] == [True, False]


def test_only_the_same_map_continues(
    converted: tuple[Path, Path], models: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    odd, naming, _ = models
    assert "nothing to do" in done("quantize-cpu", odd, converted[0], *CPU, "--map", naming)
    other = tmp_path / "other.toml"
    other.write_text(naming.read_text() + "# changed\n")
    result = ktconv("quantize-cpu", odd, converted[0], *CPU, "--map", other)
    refused(result, 2, "other settings or another source: source.map.sha256")


def test_verify_takes_the_map_of_the_output(
    converted: tuple[Path, Path], models: tuple[Path, Path, Path]
) -> None:
    odd, naming, _ = models
    few = ("--tokens=1", "--sample=0.3", "--json")  # AMX may be emulated
    report = json.loads(done("verify", converted[0], "--source", odd, *few))
    assert report["passed"] and report["layers"]
    assert any("map in ktconv.json" in note for note in report["notes"])
    assert not any("chosen at random" in note for note in report["notes"])
    words = ("verify", converted[0], "--source", odd, "--map", naming, "--level=weights")
    given = json.loads(done(*words, "--json"))
    assert not any("map in ktconv.json" in note for note in given["notes"])
    rows = report["layers"]["layers"]
    assert rows and all(row["routing"] == "router" for row in rows)
    assert any(row["quantization_error_with_shared"] is not None for row in rows)


def test_verify_with_a_wrong_map_fails(
    converted: tuple[Path, Path], models: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    """Gate and up exchanged: other weights than those that were converted."""
    experts = NAMES["experts"]
    exchanged = {**experts, "gate": experts["up"], "up": experts["gate"]}
    wrong = tmp_path / "wrong.toml"
    wrong.write_text(map_text({**NAMES, "experts": exchanged}))
    result = ktconv(
        "verify", converted[0], "--source", models[0], "--map", wrong, "--json",
        "--level=weights",
    )  # fmt: skip
    assert result.exit_code == 1
    report = json.loads(result.stdout)
    assert any("another map" in note for note in report["notes"])
    assert {one["projection"] for one in report["failures"] if "projection" in one} == {
        "gate",
        "up",
    }


def test_level_model_is_refused(
    converted: tuple[Path, Path], models: tuple[Path, Path, Path]
) -> None:
    pytest.importorskip("transformers")
    words = ("verify", converted[0], "--source", models[0], "--level=model")
    refused(ktconv(*words), 2, "--level model", "its own names")


def test_no_mtp(models: tuple[Path, Path, Path], tmp_path: Path) -> None:
    odd, naming, _ = models
    done("quantize-cpu", odd, tmp_path / "out", *CPU, "--map", naming, "--no-mtp")
    names = read_model(tmp_path / "out").keys()
    assert not any(name.startswith(("blk.2.", "extra.")) for name in names)
    assert any(name.startswith("blk.1.") for name in names)


def test_inspect(models: tuple[Path, Path, Path]) -> None:
    odd, naming, _ = models
    facts = json.loads(done("inspect", odd, "--map", naming, "--json"))
    assert (facts["moe_layers"], facts["mtp_layers"]) == ("0-2", "2")
    assert facts["other_tensors"] == 1 + 2 * 6 + 2 + 1


def test_merge_and_reshard_keep_the_map(
    converted: tuple[Path, Path], models: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    odd, naming, _ = models
    folders, merged, cut = tmp_path / "folders", tmp_path / "merged", tmp_path / "cut"
    done("quantize-cpu", odd, folders, *CPU, "--map", naming, "--layout=layers")
    done("merge", folders, merged, "--source", odd)
    assert read_model(merged) == read_model(converted[0])
    done("merge", folders, tmp_path / "alone")
    done("reshard", converted[0], cut, "--numa=1", "--source", odd)
    for output in (merged, tmp_path / "alone", cut):
        assert "map" in json.loads((output / "ktconv.json").read_text())["source"]
        done("verify", output, "--source", odd, "--level=weights")


def test_quantize_gpu(models: tuple[Path, Path, Path], tmp_path: Path) -> None:
    pytest.importorskip("llmcompressor")
    odd, naming, usual = models
    outputs = tmp_path / "odd", tmp_path / "usual"
    done("quantize-gpu", odd, outputs[0], "--method=rtn", "--map", naming)
    done("quantize-gpu", usual, outputs[1], "--method=rtn")
    packed = [
        {name: one for name, one in read_model(output).items() if ".mlp.experts." in name}
        for output in outputs
    ]
    assert packed[0] and packed[0] == packed[1]
    assert "--map FILE.toml" in (outputs[0] / "README.md").read_text()
    done("verify", outputs[0], "--source", odd, "--level=weights")
    result = ktconv("quantize-gpu", odd, tmp_path / "gptq", "--method=gptq", "--map", naming)
    refused(result, 2, "--map cannot be combined with --algorithm gptq")


@pytest.mark.parametrize("command", ["verify", "merge", "reshard"])
def test_a_map_needs_a_source(
    converted: tuple[Path, Path], models: tuple[Path, Path, Path], tmp_path: Path, command: str
) -> None:
    out = str(tmp_path / "out")
    more: dict[str, list[str]] = {"verify": [], "merge": [out], "reshard": [out, "--numa=1"]}
    result = ktconv(command, converted[0], *more[command], "--map", models[1])
    refused(result, 2, "--map belongs to --source")
    assert not (tmp_path / "out").exists()


def test_a_bad_map_writes_nothing(models: tuple[Path, Path, Path], tmp_path: Path) -> None:
    naming = tmp_path / "bad.toml"
    naming.write_text(map_text().replace("w_up", "w_upp"))
    result = ktconv("quantize-cpu", models[0], tmp_path / "out", *CPU, "--map", naming)
    refused(result, 2, "[experts] up of the map", "matches no tensor", "decoder.h.0.moe.w_up.")
    assert not (tmp_path / "out").exists()


def test_gguf_has_no_map(tmp_path: Path, models: tuple[Path, Path, Path]) -> None:

    model = gguf_files.model(tmp_path / "gguf")
    result = ktconv("quantize-cpu", model, tmp_path / "out", "--map", models[1])
    refused(result, 2, "--map is not for GGUF models")


# ---- inspect ---------------------------------------------------------------------------


def test_inspect_of_unknown_names(models: tuple[Path, Path, Path]) -> None:
    result = ktconv("inspect", models[0])
    message = refused(
        result, 2, "no MoE layer was found", "decoder.h.{}.moe.w_gate.{}.weight (2 x 4 tensors",
        "the most similar names are those of",
    )  # fmt: skip
    assert "model.layers" not in message
    assert "`ktconv inspect MODEL --explain`" in result.stderr


def test_the_printed_map_gives_the_bytes_of_usual_names(
    converted: tuple[Path, Path], models: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    """As printed, but for the family that it asks for."""
    printed = ktconv("inspect", models[0], "--explain")
    assert printed.exit_code == 0
    assert printed.stderr.startswith("note: no MoE layer was found")
    naming = tmp_path / "printed.toml"
    naming.write_text(printed.stdout)
    done("quantize-cpu", models[0], tmp_path / "out", *CPU, "--map", naming)
    assert experts_in(tmp_path / "out") == experts_in(converted[1])
    assert '# like = "qwen3_moe"' in printed.stdout
    naming.write_text(printed.stdout.replace('# like = "qwen3_moe"', 'like = "deepseek_v3"'))
    facts = json.loads(done("inspect", models[0], "--map", naming, "--explain", "--json"))
    assert facts["explained"]["router"].startswith("sigmoid: top k 2, correction True")
    assert "router correction" in {one["what"] for one in facts["explained"]["beside_experts"]}


def test_explained_in_json(models: tuple[Path, Path, Path]) -> None:
    facts = json.loads(done("inspect", models[0], "--explain", "--json"))
    assert facts["kind"] == "checkpoint with unknown names"
    assert facts["map"].startswith("# A map for odd")
    assert sum(one["tensors"] for one in facts["patterns"]) == 3 * 3 * EXPERTS + 2 * 6 + 2 + 2
    assert [one["pattern"] for one in facts["likely_experts"]][:3] == [
        f"decoder.h.{{}}.moe.w_{key}.{{}}.weight" for key in ("gate", "up", "down")
    ]


@pytest.mark.parametrize("usual", [True, False], ids=["usual", "map"])
def test_how_known_experts_were_found(models: tuple[Path, Path, Path], usual: bool) -> None:
    words = [models[2]] if usual else [models[0], "--map", models[1]]
    facts = json.loads(done("inspect", *words, "--explain", "--json"))
    explained = facts["explained"]
    main, mtp = explained["experts"]
    assert (main["layers"], mtp["layers"], mtp["mtp"]) == ("0-1", "2", True)
    assert main["rule"] == ("names of known families" if usual else "[experts] of the map")
    assert [one["tensors"] for one in main["patterns"]] == [2 * EXPERTS] * 3
    assert main["stored"] == "each expert has tensors of its own"
    found = {one["what"]: one["tensors"] for one in explained["beside_experts"]}
    assert found["norm"] == 2 and found["shared expert down"] == 2
    names = {one["what"]: one["pattern"] for one in explained["beside_experts"]}
    assert names["router"].startswith("mtp." if usual else "extra.")  # the last pattern of two
    assert explained["config_used"]["n_group"] == 1
    assert explained["left_over"] == []
    assert facts["other_tensors"] == sum(one["tensors"] for one in explained["other_patterns"])
    lines = done("inspect", *words, "--explain").splitlines()
    assert f"layers 0-1: by {main['rule']}, found as model.layers.{{}}.mlp.experts" in lines


def test_what_is_left_over_and_ignored(models: tuple[Path, Path, Path], tmp_path: Path) -> None:
    """Experts at another place, and settings that nothing reads."""
    rng = np.random.default_rng(1)
    weights = random_weights(HIDDEN, INNER, EXPERTS)
    names = USUAL["experts"]
    tensors: dict[str, Tensor] = {
        f"{names[key].replace('{layer}', '0').replace('{expert}', str(expert))}.weight": bf16(
            getattr(weights, key)[expert]
        )
        for key in names
        for expert in range(EXPERTS)
    }
    tensors["tower.experts_of_images.weight"] = bf16(rng.standard_normal((4, 4)))
    config = simple_config(
        hidden_size=HIDDEN,
        moe_intermediate_size=INNER,
        rope_theta=1e6,
        n_group=1,
        vision={"depth": 3},
    )
    write_checkpoint(tmp_path / "m", tensors, config)
    explained = json.loads(done("inspect", tmp_path / "m", "--explain", "--json"))["explained"]
    assert [one["pattern"] for one in explained["left_over"]] == ["tower.experts_of_images.weight"]
    assert explained["config_ignored"] == ["n_group", "rope_theta"]  # routers of the family
    assert explained["config_used"]["num_experts"] == EXPERTS


def test_stacked_experts_explained(tmp_path: Path) -> None:
    weights = random_weights(HIDDEN, INNER, EXPERTS)
    gate_up = np.stack([weights.gate, weights.up], axis=2).reshape(EXPERTS, 2 * INNER, HIDDEN)
    tensors: dict[str, Tensor] = {
        "h.0.inp": bf16(gate_up.transpose(0, 2, 1)), "h.0.outp": bf16(weights.down.swapaxes(1, 2))
    }  # fmt: skip
    model = write_checkpoint(
        tmp_path / "m", tensors, simple_config(hidden_size=HIDDEN, moe_intermediate_size=INNER)
    )
    naming = tmp_path / "map.toml"
    naming.write_text(
        '[experts]\ngate_up = "h.{layer}.inp"\ndown = "h.{layer}.outp"\norder = "interleaved"\n'
    )
    explained = json.loads(done("inspect", model, "--map", naming, "--explain", "--json"))
    [group] = explained["explained"]["experts"]
    assert group["stored"] == (
        "all experts in one tensor, gate and up in one tensor, interleaved, stored [in, out]"
    )


def test_explaining_an_output_changes_nothing(converted: tuple[Path, Path]) -> None:
    assert done("inspect", converted[0], "--explain") == done("inspect", converted[0])


def test_a_model_without_experts_explained(tmp_path: Path) -> None:
    tensors: dict[str, Tensor] = {"h.0.w": bf16(np.ones((4, 4))), "h.1.w": bf16(np.ones((4, 4)))}
    model = write_checkpoint(tmp_path / "m", tensors, simple_config())
    lines = done("inspect", model, "--explain").splitlines()
    assert lines == [
        "# No group of tensors looks like experts. Patterns of all names:",
        "#   h.{}.w: 2 tensors, BF16 [4, 4]",
    ]
