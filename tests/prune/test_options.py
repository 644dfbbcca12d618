"""Pruning together with other options: adapters, recipes, models at the hub, settings of
quantization; and the level that `verify` names."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.cli import ktconv, ktconv_done, refused
from helpers.convert import all_files, read_json
from helpers.lora import sides, write_adapter
from helpers.paths import EXAMPLE
from helpers.stores import close_stores

from ktconv.source import ModelSource, open_checkpoint
from ktconv.source.pruning.kept import Kept, Pruning
from ktconv.source.reading.tensors import SourceTensors

pytestmark = pytest.mark.slow

KEPT = {0: (0, 3, 7), 1: (1, 3, 5)}


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    return written(tmp_path / "kept.json", {layer: Kept(8, ids) for layer, ids in KEPT.items()})


def written(path: Path, layers: dict[int, Kept]) -> Path:
    path.write_text(json.dumps(Pruning(layers).document()))
    return path


def shards(output: Path) -> dict[str, bytes]:
    return {name: data for name, data in all_files(output).items() if name.endswith(".safetensors")}


def test_verify_names_the_level_that_it_ran(kept: Path, tmp_path: Path) -> None:
    """No kernel computes a pruned checkpoint, so level layers ends as level weights."""
    ktconv_done("prune", EXAMPLE, tmp_path / "out", "--prune", kept)
    for words in ((), ("--level=layers",)):
        said = ktconv_done("verify", tmp_path / "out", "--source", EXAMPLE, *words)
        assert "OK, verified to level weights in" in said
        assert said.count("level layers was not run") == 1
    said = ktconv_done("verify", tmp_path / "out", "--source", EXAMPLE, "--level=weights")
    assert "to level weights in" in said and "was not run" not in said


def test_adapters(kept: Path, tmp_path: Path) -> None:
    """Merged into the experts that stay, as into all and then fewer."""
    rng = np.random.default_rng(8)
    names = [
        (f"model.layers.{layer}.mlp.experts.{expert}.{name}_proj", shape)
        for layer in range(2)
        for expert in range(8)
        for name, shape in (("gate", (256, 128)), ("up", (256, 128)), ("down", (128, 256)))
    ]
    modules = {name: sides(rng, *shape) for name, shape in names}
    adapter = write_adapter(tmp_path / "adapter", modules)
    words = ("quantize-cpu", EXAMPLE, "--method=bf16", "--adapter", adapter)
    ktconv_done(*words[:2], tmp_path / "one", *words[2:], "--prune", kept)
    ktconv_done(*words[:2], tmp_path / "merged", *words[2:])
    ktconv_done("prune", tmp_path / "merged", tmp_path / "two", "--prune", kept)
    ktconv_done("quantize-cpu", tmp_path / "two", tmp_path / "three", "--method=bf16")
    assert shards(tmp_path / "one") == shards(tmp_path / "three")
    assert ktconv("verify", tmp_path / "one", "--source", EXAMPLE).exit_code == 0


@pytest.mark.parametrize(
    "words",
    [
        ("quantize-cpu", "--method=int4"),
        ("quantize-cpu", "--method=gguf-q8_0"),
        ("quantize-cpu", "--method=fp8"),
        ("quantize-gpu", "--scheme=MXFP8", "--expert-layout=stacked"),
    ],
    ids=lambda words: words[1],
)
def test_cards_say_which_experts_stay(words: tuple[str, ...], kept: Path, tmp_path: Path) -> None:
    """And the command gives the same output again."""
    first, second = tmp_path / "first", tmp_path / "second"
    ktconv_done(words[0], EXAMPLE, first, *words[1:], "--prune", kept)
    card = (first / "README.md").read_text()
    assert "- Kept are 3 of 8 experts (layers 0-1); `ktconv.json` says which\n" in card
    command = next(line for line in card.splitlines() if line.startswith("    ktconv quantize-"))
    given = {"tiny-moe": EXAMPLE, "OUTPUT": second, "ktconv.json": first / "ktconv.json"}
    again = command.split()[1:]
    assert "--prune" in again
    ktconv_done(*(given.get(word, word) for word in again))
    assert all_files(first) == all_files(second)


def test_recipes_number_the_experts_that_stay(kept: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    text = (
        'method = "rawint4"\nengine = "compressed-tensors"\n'
        '[[rule]]\nexperts = {{ 0 = "{}" }}\nmethod = "bf16"\n'
    )
    recipe.write_text(text.format(2))
    words = ("quantize-cpu", EXAMPLE, tmp_path / "out", "--recipe", recipe, "--prune", kept)
    ktconv_done(*words)
    whole, found = (open_checkpoint(one) for one in (EXAMPLE, tmp_path / "out"))
    for new, old in enumerate(KEPT[0]):
        one, other = (
            SourceTensors(model).expert(model.layers[0], expert)[2]
            for model, expert in ((whole, old), (found, new))
        )
        assert one is not None and other is not None
        assert np.array_equal(one.values(), other.values()) == (new == 2)
    recipe.write_text(text.format(7))
    refused(ktconv(*words, "--overwrite"), 2, "7")


def test_a_model_at_the_hub(kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from helpers.hub_server import Repository, serving

    constants = pytest.importorskip("huggingface_hub.constants")

    ktconv_done("prune", EXAMPLE, tmp_path / "local", "--prune", kept)
    with serving() as hub:
        hub.repositories["org/model"] = Repository(EXAMPLE)
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-login"))
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.delenv("HF_TOKEN", raising=False)
        ktconv_done("prune", "hf://org/model", tmp_path / "out", "--prune", kept)
        close_stores()
    assert shards(tmp_path / "out") == shards(tmp_path / "local")


@pytest.mark.parametrize(
    "pattern",
    [
        r"re:.*mlp\.experts\.3\..*",
        r"re:model\.layers\.0\.mlp\.experts\.(0|1)\.down_proj",
        r"re:.*experts\.[0-5]\..*",
        r"re:.*experts\.\d\.up_proj",
        "model.layers.0.mlp.experts.3*",
        "model.layers.0.mlp.experts.?.down_proj",
        "*.experts.7.*",
        "language_model.model.layers.0.mlp.experts.3.down_proj",
        "mlp.experts.3",
        r"-:.*experts\.1\..*",
    ],
)
def test_patterns_of_some_experts_are_refused(pattern: str, kept: Path, tmp_path: Path) -> None:
    model = with_settings(tmp_path / "model", pattern)
    for name in ("prune", "quantize-cpu"):
        words = (name, model, tmp_path / "none", "--prune", kept, "--dry-run")
        more = [] if name == "prune" else ["--method=bf16"]
        refused(ktconv(*words, *more), 2, "name some experts by", json.dumps(pattern)[1:9])
    # They stay where no expert gets another number.
    every = {layer: Kept(8, tuple(range(8))) for layer in KEPT}
    ktconv_done("prune", model, tmp_path / "all", "--prune", written(tmp_path / "all.json", every))
    assert read_json(tmp_path / "all" / "hf_quant_config.json")["ignore"][0] == pattern


@pytest.mark.parametrize(
    "pattern",
    [
        r"re:.*mlp\.experts\..*",
        r"re:.*\.experts\.\d+\.(gate|up|down)_proj$",
        r"re:.*\.experts\.[0-9]+\.w[13]$",
        "*.mlp.experts.*",
        r"re:.*shared_experts\.0\..*",
        "model.layers.1.mlp.gate",
        r"re:model\.layers\.(0|1)\..*experts.*",
    ],
)
def test_patterns_of_all_experts_stay(pattern: str, kept: Path, tmp_path: Path) -> None:
    model = with_settings(tmp_path / "model", pattern)
    ktconv_done("prune", model, tmp_path / "out", "--prune", kept)
    ignore = read_json(tmp_path / "out" / "hf_quant_config.json")["ignore"]
    assert ignore == [pattern, "model.layers.0.mlp.experts.1.up_proj"]


def with_settings(model: Path, pattern: str) -> Path:
    """The example with settings of quantization beside config.json, which no reader needs."""
    shutil.copytree(EXAMPLE, model)
    settings = {"ignore": [pattern, "model.layers.0.mlp.experts.3.up_proj"]}
    (model / "hf_quant_config.json").write_text(json.dumps(settings))
    return model


def test_experts_without_weights_in_any_order(tmp_path: Path) -> None:
    """Of a model whose later layers lie first in its file: both ways give the same bytes."""
    pytest.importorskip("torch")
    from helpers.saved import written as saved
    from safetensors import safe_open
    from safetensors.torch import save_file

    model = saved("longcat_flash", tmp_path)
    file = model / "model.safetensors"
    with safe_open(file, "pt") as tensors:
        found: dict[str, Any] = {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118
    file.unlink()
    for number, later in ((1, True), (2, False)):
        part = {name: one for name, one in found.items() if ("layers.1." in name) == later}
        save_file(part, model / f"model-{number}.safetensors")
    layers = {one.index: Kept(len(one.experts), (2, 3)) for one in open_checkpoint(model).layers}
    view = open_checkpoint(ModelSource(str(model), prune=Pruning(layers).record()))
    names = [one.name for one in view.other_tensors if ".mlp.experts." in one.name]
    order = [view_layer(name, view) for name in names]
    assert len(names) > 4 and order == sorted(order)


def view_layer(name: str, view: Any) -> int:
    return next(n for n, one in enumerate(view.layers) if name.startswith(f"{one.source}."))
