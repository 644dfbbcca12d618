"""`ktconv prune` and `--prune`: which experts stay, the bytes that are written, and their proof."""

from __future__ import annotations

import gc
import json
import shutil
import struct
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import gguf_files
from helpers.cli import ktconv, ktconv_done
from helpers.cli import refused as refused_with
from helpers.convert import all_files, read_json, read_model
from helpers.families import bf16, simple_config, write_checkpoint
from helpers.layouts import draw
from helpers.paths import EXAMPLE
from helpers.stopped import StopsAfterOneUnit

from ktconv.prune import Choice, choose
from ktconv.source import ModelSource, open_checkpoint
from ktconv.system.stores import MadePath

pytestmark = pytest.mark.slow

RANKING = [{"layer": 0, "ids": [7, 0, 3, 2, 6]}, {"layer": 1, "scores": [1, 8, 3, 7, 5, 6, 4, 2]}]
KEPT = {0: (0, 3, 7), 1: (1, 3, 5)}  # of which three stay


@pytest.fixture(scope="module")
def ranking(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("scores") / "ranking.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in RANKING))
    return path


@pytest.fixture(scope="module")
def output(ranking: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("pruned") / "output"
    ktconv_done("prune", EXAMPLE, directory, "--scores", ranking, "--keep", "3")
    return directory


@pytest.fixture
def kept(ranking: Path, tmp_path: Path) -> Path:
    path = tmp_path / "kept.json"
    ktconv_done("prune", EXAMPLE, "--scores", ranking, "--keep", "3", "--write", path)
    return path


def refused(result: Any) -> str:
    return refused_with(result, 2)


# ---- what is written ---------------------------------------------------------------------


def test_bytes_and_config(output: Path) -> None:
    source, found = read_model(EXAMPLE), read_model(output)
    expected = {}
    for name, tensor in source.items():
        words = name.split(".")
        if ".experts." in name:
            layer, expert = int(words[2]), int(words[5])
            if expert not in KEPT[layer]:
                continue
            words[5] = str(KEPT[layer].index(expert))
        elif name.endswith("mlp.gate.weight"):
            width = len(tensor.data) // tensor.shape[0]
            rows = [tensor.data[row * width : (row + 1) * width] for row in KEPT[int(words[2])]]
            tensor = tensor._replace(shape=(3, tensor.shape[1]), data=b"".join(rows))
        expected[".".join(words)] = tensor
    assert found == expected
    config, before = read_json(output / "config.json"), read_json(EXAMPLE / "config.json")
    assert config == {**before, "num_local_experts": 3}
    record = read_json(output / "ktconv.json")["source"]["pruned"]
    assert record == {
        "layers": {str(n): {"experts": 8, "kept": list(ids)} for n, ids in KEPT.items()}
    }
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (output / name).read_bytes() == (EXAMPLE / name).read_bytes()
    card = (output / "README.md").read_text()
    assert "3 of 8 experts (layers 0-1)" in card and "ktconv prune" in card


@pytest.mark.parametrize(
    "words",
    [
        ("quantize-cpu", "--numa=1"),
        ("quantize-cpu", "--method=bf16"),
        ("quantize-cpu", "--method=rawint4"),
        ("quantize-gpu", "--scheme=W4A16"),
    ],
)
def test_both_ways_give_the_same_bytes(
    words: tuple[str, ...], output: Path, kept: Path, tmp_path: Path
) -> None:
    """With a checkpoint in between, and without; also by the manifest of the pruned one."""
    command, option = words
    ktconv_done(command, output, tmp_path / "two", option)
    for number, file in enumerate((kept, output / "ktconv.json")):
        ktconv_done(command, EXAMPLE, tmp_path / f"one{number}", option, "--prune", file)
        one, two = all_files(tmp_path / f"one{number}"), all_files(tmp_path / "two")
        same = [name for name in two if name not in ("ktconv.json", "README.md")]
        assert {name: one[name] for name in same} == {name: two[name] for name in same}
        assert one.keys() == two.keys()


def test_ids_of_a_file_by_hand(kept: Path, output: Path, tmp_path: Path) -> None:
    """A file of --write, and `prune` by it."""
    assert read_json(kept)["layers"]["0"] == {"experts": 8, "kept": [0, 3, 7]}
    ktconv_done("prune", EXAMPLE, tmp_path / "again", "--prune", kept)
    assert all_files(tmp_path / "again") == all_files(output)


def test_an_interrupted_run_goes_on(kept: Path, output: Path, tmp_path: Path) -> None:
    from ktconv.prune.run import Request, prune

    again = tmp_path / "again"
    request = Request(ModelSource(str(EXAMPLE), prune=kept), again, threads=1)
    with pytest.raises(KeyboardInterrupt):
        prune(request, StopsAfterOneUnit())
    assert (again / ".ktconv").is_dir() and not (again / "ktconv.json").exists()
    report = prune(request)
    assert report.complete and report.kept
    assert all_files(again) == all_files(output)


def test_dry_run(ranking: Path, output: Path, tmp_path: Path) -> None:
    words = ("prune", EXAMPLE, tmp_path / "none", "--scores", ranking, "--keep", "3", "--dry-run")
    found = json.loads(ktconv_done(*words, "--json"))
    shards = sum(path.stat().st_size for path in output.glob("*.safetensors"))
    assert found["output_bytes"] == shards
    assert [one["dropped"] for one in found["layers_pruned"]] == [[1, 2, 4, 5, 6], [0, 2, 4, 6, 7]]
    assert not (tmp_path / "none").exists()
    assert "0,2,4,6-7" in ktconv_done(*words)


def test_gptq_on_a_text_sees_the_pruned_model(
    output: Path, kept: Path, tmp_path: Path, torch: Any
) -> None:
    """Second moments are those of the experts that stay, in a model without the others."""
    words = ("quantize-cpu", "--numa=1", "--calibrate", EXAMPLE.parent / "eval.txt")
    ktconv_done(*words, output, tmp_path / "two")
    ktconv_done(*words, EXAMPLE, tmp_path / "one", "--prune", kept)
    one, two = (all_files(tmp_path / name) for name in ("one", "two"))
    shards = [name for name in two if name.endswith(".safetensors")]
    assert {name: one[name] for name in shards} == {name: two[name] for name in shards}


def test_other_nodes_get_the_ids(kept: Path) -> None:
    """Not the name of a file."""
    from ktconv.distributed.requests import decode, source_record

    source = ModelSource(str(EXAMPLE), prune=kept)
    there = ModelSource(**decode(json.loads(json.dumps(source_record(source)))))
    assert there.pruning() == source.pruning() and not isinstance(there.prune, Path)


def test_gptq_of_llm_compressor(kept: Path, tmp_path: Path) -> None:
    pytest.importorskip("llmcompressor")
    result = ktconv("quantize-gpu", EXAMPLE, tmp_path / "none", "--algorithm=gptq", "--prune", kept)
    assert "--prune cannot be combined with --algorithm gptq" in refused(result)


def test_what_nothing_uses_is_freed(kept: Path) -> None:
    """Made files and their store name each other, which the collector of cycles must see."""
    checkpoint = open_checkpoint(ModelSource(EXAMPLE, prune=kept))
    [path, *_] = (one.file for one in checkpoint.other_tensors if isinstance(one.file, MadePath))
    store = weakref.ref(path.store)
    del checkpoint, path, _
    gc.collect()
    assert store() is None


def test_gguf(tmp_path: Path) -> None:
    """Is read, and not written."""

    from ktconv.source.reading.tensors import SourceTensors
    from ktconv.verify.reading import read_tensor

    path, ids = gguf_files.model(tmp_path, layers=2), (1, 2)
    record = {
        "layers": {str(n): {"experts": gguf_files.EXPERTS, "kept": list(ids)} for n in range(2)}
    }
    whole, view = (open_checkpoint(ModelSource(path, prune=one)) for one in (None, record))
    tensors = [SourceTensors(one) for one in (whole, view)]
    for before, after in zip(whole.layers, view.layers, strict=True):
        for new, old in enumerate(ids):
            pairs = zip(tensors[0].expert(before, old), tensors[1].expert(after, new), strict=True)
            for one, other in pairs:
                assert one is not None and other is not None
                assert np.array_equal(one.values(), other.values())
    for tensor in view.other_tensors:
        [own] = (one for one in whole.other_tensors if one.name == tensor.name)
        data = read_tensor(own)
        if "ffn_gate_inp" in own.name:
            data = data.reshape(gguf_files.EXPERTS, -1)[list(ids)].reshape(-1)
        assert np.array_equal(read_tensor(tensor), data)
    kept = tmp_path / "kept.json"
    kept.write_text(json.dumps({"kind": "kept experts", "schema": 1, **record}))
    ktconv_done(
        "quantize-cpu", path, tmp_path / "out", "--method=int8", "--numa=1", "--prune", kept
    )
    result = ktconv("verify", tmp_path / "out", "--source", path, "--level", "weights")
    assert result.exit_code == 0, result.stdout
    result = ktconv("prune", path, tmp_path / "none", "--prune", kept)
    assert "is a GGUF model, which is read and not written" in refused(result)


def test_files_about_quantization_name_the_new_experts(kept: Path, tmp_path: Path) -> None:
    """Beside config.json: as lists, as keys, and as a table of all tensors."""
    model, source = shutil.copytree(EXAMPLE, tmp_path / "model"), "model.layers.0.mlp.experts"
    names = [f"{source}.{expert}.down_proj" for expert in range(8)]
    files = {
        "hf_quant_config.json": {
            "quantization": {
                "exclude_modules": ["lm_head", *names],
                "quantized_layers": {name: {"quant_algo": n} for n, name in enumerate(names)},
            }
        },
        "quantize_config.json": {"bits": 4, "modules_to_not_convert": names},
        "quant_model_description.json": {
            "model_quant_type": "FLOAT", **{f"{name}.weight": "FLOAT" for name in names}
        },
    }  # fmt: skip
    for name, content in files.items():
        (model / name).write_text(json.dumps(content))
    ktconv_done("prune", model, tmp_path / "out", "--prune", kept)
    found = {name: read_json(tmp_path / "out" / name) for name in files}
    new = names[: len(KEPT[0])]
    quantization = found["hf_quant_config.json"]["quantization"]
    assert quantization["exclude_modules"] == ["lm_head", *new]
    numbers = [one["quant_algo"] for one in quantization["quantized_layers"].values()]
    assert list(quantization["quantized_layers"]) == new and numbers == list(KEPT[0])
    assert found["quantize_config.json"]["modules_to_not_convert"] == new
    described = found["quant_model_description.json"]
    assert list(described) == ["model_quant_type", *(f"{name}.weight" for name in new)]
    assert ktconv("verify", tmp_path / "out", "--source", model).exit_code == 0
    # Conversions write the same, with a checkpoint in between and without.
    for option in ("--method=int8", "--method=bf16"):
        words = ["quantize-cpu", option, *(["--numa=1"] if option == "--method=int8" else [])]
        one, two = (tmp_path / f"{name}{option}" for name in ("one", "two"))
        ktconv_done(*words, model, one, "--prune", kept)
        ktconv_done(*words, tmp_path / "out", two)
        for name in files:
            assert (one / name).read_bytes() == (two / name).read_bytes()
            assert (one / name).read_bytes() == (tmp_path / "out" / name).read_bytes()
        assert ktconv("verify", one, "--source", model).exit_code == 0


# ---- how many and which ------------------------------------------------------------------


def scored(path: Path, experts: int, layers: int = 2, tokens: int = 1000) -> Path:
    """Scores of ours in which expert e of each layer has e + 1."""
    from ktconv.stats.origin import Origin, source_sha256
    from ktconv.stats.router_sample import router_sample
    from ktconv.stats.scores import MEASURES, LayerScores, write_scores

    values = np.arange(1.0, experts + 1)
    measures = dict.fromkeys(MEASURES, values) | {"frequency": values[::-1].copy()}
    one = LayerScores(measures, np.full(experts, tokens))
    checkpoint = open_checkpoint(EXAMPLE)
    origin = Origin(
        "example", source_sha256(checkpoint), "t", "0", 9, "r", router_sample(checkpoint)
    )
    write_scores(path, dict.fromkeys(range(layers), one), origin)
    return path


def chosen(scores: Path, model: Path = EXAMPLE, **options: Any) -> dict[int, tuple[int, ...]]:
    found = choose(open_checkpoint(model), Choice(scores=scores, **options))
    return {layer: one.ids for layer, one in found.pruning.layers.items()}


def test_ratio_and_measures(tmp_path: Path) -> None:
    scores = scored(tmp_path / "scores.json", 8)
    assert chosen(scores, ratio=0.25) == {0: (2, 3, 4, 5, 6, 7), 1: (2, 3, 4, 5, 6, 7)}
    assert chosen(scores, ratio=0.374)[0] == (2, 3, 4, 5, 6, 7)  # rounded down
    assert chosen(scores, keep=2, measure="frequency")[0] == (0, 1)


def test_equal_scores_keep_the_lower_ids(tmp_path: Path) -> None:
    path = tmp_path / "scores"
    path.write_text(json.dumps([{"layer": n, "scores": [1, 2, 2, 2, 1, 1, 1, 1]} for n in (0, 1)]))
    assert chosen(path, keep=2)[0] == (1, 2) and chosen(path, keep=4)[0] == (0, 1, 2, 3)


def test_target_size(tmp_path: Path, output: Path) -> None:
    """The most experts that fit."""
    scores = scored(tmp_path / "scores.json", 8)
    sizes = {}
    for keep in (3, 4):
        words = ("prune", EXAMPLE, tmp_path / "none", "--scores", scores, "--dry-run", "--json")
        sizes[keep] = json.loads(ktconv_done(*words, f"--keep={keep}"))["output_bytes"]
    for size, expected in ((sizes[4] + 65536, 4), (sizes[4] - 1, 3), (sizes[3] + 65536, 3)):
        assert {len(ids) for ids in chosen(scores, target_size=size).values()} == {expected}


def test_one_threshold_for_all_layers(tmp_path: Path) -> None:
    path = tmp_path / "scores"
    layers = [[9, 8, 7, 6, 5, 0, 0, 0], [1, 2, 3, 4, 0.5, 0, 0, 0]]
    path.write_text(json.dumps([{"layer": n, "scores": one} for n, one in enumerate(layers)]))
    found = chosen(path, keep=4, per_layer="ktconv")
    assert found == {0: (0, 1, 2, 3, 4), 1: (1, 2, 3)}
    # Never fewer than a token takes.
    assert chosen(path, keep=2, per_layer="ktconv") == {0: (0, 1), 1: (2, 3)}


def test_layers_of_different_sizes_run(tmp_path: Path) -> None:
    """In ktconv's own runtime; config.json has the number of each layer."""
    from ktconv.runtime import MoELayer

    path, directory = tmp_path / "scores", tmp_path / "output"
    layers = [[9, 8, 7, 6, 5, 0, 0, 0], [1, 2, 3, 4, 0.5, 0, 0, 0]]
    path.write_text(json.dumps([{"layer": n, "scores": one} for n, one in enumerate(layers)]))
    words = ("--scores", path, "--keep", "4", "--per-layer", "ktconv")
    ktconv_done("prune", EXAMPLE, directory, *words)
    config = read_json(directory / "config.json")
    assert (config["num_local_experts"], config["num_local_experts_per_layer"]) == (5, [5, 3])
    assert [MoELayer.load(directory, n).experts for n in (0, 1)] == [5, 3]
    assert ktconv("verify", directory, "--source", EXAMPLE).exit_code == 0


def grouped(directory: Path, layers: int = 1) -> Path:
    """Eight experts in four groups, of which a token takes two."""
    rng, tensors = np.random.default_rng(1), dict[str, Any]()
    for layer in range(layers):
        block = f"model.layers.{layer}.mlp"
        tensors |= draw("N", f"{block}.experts", (8, 128, 128), rng, _encoded)[0]
        tensors[f"{block}.gate.weight"] = bf16(rng.standard_normal((8, 128)))
        tensors[f"{block}.gate.e_score_correction_bias"] = np.arange(8, dtype=np.float32)
    config = simple_config(
        model_type="deepseek_v3", num_experts=None, n_routed_experts=8, n_group=4, topk_group=2,
        num_experts_per_tok=2, first_k_dense_replace=0, num_hidden_layers=layers,
    )  # fmt: skip
    return write_checkpoint(directory, tensors, config)


def _encoded(rng: np.random.Generator, rows: int, cols: int) -> Any:
    values = rng.standard_normal((rows, cols)).astype(np.float32)
    return {"weight": bf16(values)}, values


def test_whole_groups(tmp_path: Path) -> None:
    model, scores = grouped(tmp_path / "model"), tmp_path / "scores"
    scores.write_text(json.dumps([{"layer": 0, "scores": [9, 0, 1, 1, 5, 5, 4, 4]}]))
    assert chosen(scores, model, keep=6) == {0: (0, 1, 4, 5, 6, 7)}
    assert chosen(scores, model, ratio=0.3) == {0: (0, 1, 4, 5, 6, 7)}  # as many as whole groups
    directory = tmp_path / "output"
    ktconv_done("prune", model, directory, "--scores", scores, "--keep", "6")
    config = read_json(directory / "config.json")
    assert (config["n_routed_experts"], config["n_group"], config["topk_group"]) == (6, 3, 2)
    words = ("prune", model, tmp_path / "none", "--scores", scores)
    assert "--keep 5 would cut a group" in refused(ktconv(*words, "--keep=5"))
    assert "each token takes experts of 2 groups" in refused(ktconv(*words, "--keep=2"))
    assert "does not go with a router that chooses groups" in refused(
        ktconv(*words, "--keep=6", "--per-layer=ktconv")
    )


def test_groups_of_layers_that_are_not_named(tmp_path: Path) -> None:
    """They keep all groups, and config.json has one number."""
    model = grouped(tmp_path / "model", layers=2)
    kept = tmp_path / "kept.json"
    layers = {"0": {"experts": 8, "kept": [0, 1, 4, 5, 6, 7]}}
    kept.write_text(json.dumps({"kind": "kept experts", "schema": 1, "layers": layers}))
    result = ktconv("prune", model, tmp_path / "out", "--prune", kept)
    assert "different numbers of groups are kept in layers 0-1" in refused(result)
    layers["1"] = layers["0"]
    kept.write_text(json.dumps({"kind": "kept experts", "schema": 1, "layers": layers}))
    ktconv_done("prune", model, tmp_path / "out", "--prune", kept)
    assert read_json(tmp_path / "out" / "config.json")["n_group"] == 3


# ---- bad input ---------------------------------------------------------------------------


def without(path: Path, **changes: Any) -> Path:
    content = read_json(path)
    path.write_text(json.dumps({**content, **changes}))
    return path


def test_scores_of_another_model(tmp_path: Path) -> None:
    path = scored(tmp_path / "scores.json", 8)
    router = [float(value) for value in np.random.default_rng(1).standard_normal(128)]
    without(path, router=json.dumps(router), source_sha256="1" * 64)
    words = ("prune", EXAMPLE, tmp_path / "none", "--scores", path, "--keep", "4")
    assert "another model: their routers differ" in refused(ktconv(*words))
    assert not (tmp_path / "none").exists()


def test_few_tokens(tmp_path: Path) -> None:
    path = scored(tmp_path / "scores.json", 8, tokens=99)
    words = ("prune", EXAMPLE, tmp_path / "out", "--scores", path, "--keep", "4")
    assert "has scores of few tokens: 99 for each expert" in refused(ktconv(*words))
    done = ktconv(*words, "--allow-few-tokens")
    assert done.exit_code == 0 and "100 are the least" in done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--keep=9",), "--keep 9 is more than the 8 experts of layer 0"),
        (("--keep=1",), "--keep 1: each token takes 2 experts"),
        (("--ratio=0.9",), "--ratio 0.9 would keep 1: each token takes 2"),
        (("--ratio=1",), "--ratio 1 is not between 0 and 1"),
        (("--target-size=1kB",), "--target-size 1.0 kB is too small: with 2 experts"),
        (("--keep=4", "--ratio=0.5"), "cannot be combined"),
        ((), "nothing says how many experts stay"),
        (("--keep=4", "--per-layer=vllm"), "layers have different numbers of experts"),
    ],
)
def test_numbers_that_cannot_be(words: tuple[str, ...], message: str, tmp_path: Path) -> None:
    scores = scored(tmp_path / "scores.json", 8)
    result = ktconv("prune", EXAMPLE, tmp_path / "none", "--scores", scores, *words)
    assert message in refused(result)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([{"layer": 0, "ids": [0, 1, 2]}], "has no scores of layer 1"),
        ([*RANKING, {"layer": 2, "ids": [0]}], "has scores of layer 2, which has no experts"),
        ([{"layer": n, "ids": [0, 1, 2, 8]} for n in (0, 1)], "lists expert 8 of layer 0"),
        ([{"layer": n, "scores": [1.0] * 7} for n in (0, 1)], "has scores of 7 experts in layer 0"),
        ([{"layer": n, "ids": [3, 4]} for n in (0, 1)], "lists 2 experts of layer 0, fewer than"),
        ([{"layer": 0, "ids": [3, 3]}], "lists expert 3 twice"),
    ],
)
def test_rankings_that_do_not_fit(lines: list[Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "ranking"
    path.write_text("\n".join(map(json.dumps, lines)))
    result = ktconv("prune", EXAMPLE, tmp_path / "none", "--scores", path, "--keep", "3")
    assert message in refused(result)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ({"0": {"experts": 8, "kept": [1, 1]}}, "expert 1 of layer 0 is named twice"),
        ({"0": {"experts": 8, "kept": [1, 8]}}, "8 is not an expert of layer 0, which has 8"),
        ({"0": {"experts": 8, "kept": []}}, "no expert of layer 0 is kept"),
        (
            {"0": {"experts": 8, "kept": [1]}},
            "1 expert of layer 0 are kept, but each token takes 2",
        ),
        ({"5": {"experts": 8, "kept": [1, 2]}}, "layer 5, which has no experts"),
        ({"0": {"experts": 16, "kept": [1, 2]}}, "a layer 0 with 16 experts, but"),
        ({"00": {"experts": 8, "kept": [1, 2]}}, "layer '00' is not a number"),
        ({}, "names no layers of kept experts"),
        ({"0": [1, 2]}, "layer 0 does not say how many experts it has"),
    ],
)
def test_files_of_kept_experts(layers: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / "kept.json"
    path.write_text(json.dumps({"kind": "kept experts", "schema": 1, "layers": layers}))
    result = ktconv("quantize-cpu", EXAMPLE, tmp_path / "none", "--numa=1", "--prune", path)
    assert message in refused(result)
    assert not (tmp_path / "none").exists()


def test_a_file_of_another_kind(tmp_path: Path, ranking: Path) -> None:
    words = ("quantize-cpu", EXAMPLE, tmp_path / "none", "--numa=1", "--prune")
    assert "does not say which experts are kept" in refused(ktconv(*words, EXAMPLE / "config.json"))
    path = scored(tmp_path / "scores.json", 8)
    assert "does not say which experts are kept" in refused(ktconv(*words, path))


def test_a_name_for_two_things(ranking: Path, tmp_path: Path) -> None:
    """Nothing is written where the file of --write is OUTPUT."""
    words = ("prune", EXAMPLE, tmp_path / "one", "--scores", ranking, "--keep", "3")
    (tmp_path / "here").mkdir()
    result = ktconv(*words, "--write", tmp_path / "here" / ".." / "one")
    assert "is a name that the command itself writes to" in refused(result)
    assert not (tmp_path / "one").exists()


def test_no_file_where_the_run_is_refused(ranking: Path, output: Path, tmp_path: Path) -> None:
    """OUTPUT was made with other experts: FILE of --write would not be of it."""
    path, copy = tmp_path / "kept.json", shutil.copytree(output, tmp_path / "copy")
    words = ("prune", EXAMPLE, copy, "--scores", ranking, "--write", path)
    result = ktconv(*words, "--keep=4")
    assert result.exit_code == 2 and "was begun with other settings" in result.stderr
    assert not path.exists()
    ktconv_done(*words, "--keep=3")
    assert read_json(path)["layers"]["0"]["kept"] == list(KEPT[0])


def test_no_expert_is_dropped(tmp_path: Path) -> None:
    """Which is said, where a size is large enough for all."""
    scores = scored(tmp_path / "scores.json", 8)
    words = ("prune", EXAMPLE, tmp_path / "out", "--scores", scores)
    for number in ("--target-size=1TB", "--keep=8", "--ratio=0.1"):
        plan = ktconv_done(*words, number, "--dry-run")
        assert "no expert is dropped: kept are 8 of 8 experts" in plan


def test_nothing_to_write(ranking: Path) -> None:
    result = ktconv("prune", EXAMPLE, "--scores", ranking, "--keep", "3")
    assert "neither OUTPUT nor --write" in refused(result)


# ---- proof -------------------------------------------------------------------------------


def damaged(output: Path, name: str, change: Callable[[bytearray], None]) -> None:
    """The bytes of a tensor, changed in its file."""
    for path in output.glob("*.safetensors"):
        data = bytearray(path.read_bytes())
        (length,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8 : 8 + length])
        if name in header:
            start, end = (8 + length + one for one in header[name]["data_offsets"])
            part = data[start:end]
            change(part)
            data[start:end] = part
            path.write_bytes(data)
            return
    raise AssertionError(name)


def swap_rows(data: bytearray, rows: int = 3) -> None:
    width = len(data) // rows
    data[:width], data[width : 2 * width] = data[width : 2 * width], data[:width]


def verified(output: Path, *words: str) -> dict[str, Any]:
    found = ktconv("verify", output, "--source", EXAMPLE, "--json", *words)
    report: dict[str, Any] = json.loads(found.stdout)
    assert found.exit_code == (0 if report["passed"] else 1)
    return report


def test_verify(output: Path, tmp_path: Path) -> None:
    assert verified(output)["passed"]
    # Rows of a router that are swapped, with a manifest that agrees.
    copy = shutil.copytree(output, tmp_path / "copy")
    damaged(copy, "model.layers.1.mlp.gate.weight", swap_rows)
    found = verified(copy)
    assert not found["passed"]
    words = "differs from the source at its index 0, which should be the source's 1"
    assert any(words in one["message"] for one in found["failures"])


def test_verify_finds_swapped_experts(output: Path, tmp_path: Path) -> None:
    """Whose names are exchanged, in the files and in the manifest."""
    copy = shutil.copytree(output, tmp_path / "copy")
    for path in (*copy.glob("*.safetensors"), copy / "ktconv.json", *copy.glob("*.index.json")):
        data = path.read_bytes()
        one, two = (b"layers.0.mlp.experts.%d.down_proj" % expert for expert in (0, 1))
        data = data.replace(one, b"@" * len(one)).replace(two, one).replace(b"@" * len(one), two)
        path.write_bytes(data)
    found = verified(copy)
    wrong = {one["tensor"] for one in found["failures"] if one["check"] == "copied tensor"}
    assert wrong == {f"model.layers.0.mlp.experts.{n}.down_proj.weight" for n in (0, 1)}


def test_verify_finds_other_ids(output: Path, tmp_path: Path) -> None:
    """In the manifest: experts of the source that are not these."""
    copy = shutil.copytree(output, tmp_path / "copy")
    manifest = read_json(copy / "ktconv.json")
    manifest["source"]["pruned"]["layers"]["0"]["kept"] = [0, 2, 7]
    (copy / "ktconv.json").write_text(json.dumps(manifest))
    found = verified(copy)
    wrong = {one.get("tensor") for one in found["failures"]}
    assert "model.layers.0.mlp.experts.1.up_proj.weight" in wrong
    assert "model.layers.0.mlp.experts.0.up_proj.weight" not in wrong


@pytest.mark.parametrize("method", ["int4", "bf16"])
def test_verify_conversions(method: str, kept: Path, tmp_path: Path) -> None:
    """By the ids in their manifests; router rows are held to the source's, too."""
    out = tmp_path / "out"
    numa = ["--numa=1"] if method == "int4" else []
    ktconv_done("quantize-cpu", EXAMPLE, out, f"--method={method}", *numa, "--prune", kept)
    assert verified(out, "--level=layers")["passed"]
    name = "blk.1.mlp.gate.weight" if method == "int4" else "model.layers.1.mlp.gate.weight"
    damaged(out, name, swap_rows)
    found = verified(out, "--level=weights")
    assert any(one["check"] == "copied tensor" for one in found["failures"])


def test_verify_without_the_right_source(output: Path, kept: Path) -> None:
    content = read_json(kept)
    content["layers"]["0"]["kept"] = [0, 2, 7]
    kept.write_text(json.dumps(content))
    result = ktconv("verify", output, "--source", EXAMPLE, "--prune", kept)
    assert "--prune names other experts" in refused(result)


def test_level_model(output: Path, kept: Path, torch: Any, tmp_path: Path) -> None:
    """Figures of both models by their own classes."""
    from helpers.paths import EVAL

    from ktconv.model import load_model

    words = ("--level=model", "--windows=1", "--text", str(EVAL))
    found = verified(output, *words)["model"]
    losses = []
    for path in (EXAMPLE, output):
        model, tokenizer = load_model(path)
        ids = torch.tensor(tokenizer(EVAL.read_text())["input_ids"][:512])[None]
        with torch.inference_mode():
            logits = model(ids).logits[0, :-1].double().log_softmax(1)
        losses.append(-float(logits.gather(1, ids[0, 1:, None]).mean()))
    figures = found["perplexity_source"], found["perplexity_converted"]
    np.testing.assert_allclose(figures, np.exp(losses), rtol=1e-3)
    assert figures[1] > figures[0] and found["kl_mean"] > 0.1
    # A conversion of the view has them beside its own.
    out = tmp_path / "out"
    ktconv_done("quantize-cpu", EXAMPLE, out, "--numa=1", "--method=int8", "--prune", kept)
    model_facts = verified(out, *words)["model"]
    np.testing.assert_allclose(model_facts["perplexity_source"], figures[1], rtol=1e-3)
    whole = model_facts["unpruned"]
    np.testing.assert_allclose(whole["perplexity_source"], figures[0], rtol=1e-3)
    assert whole["kl_mean"] > model_facts["kl_mean"]


def test_transformers_loads_it(output: Path, torch: Any) -> None:
    """With the logits of a model that is cut by hand."""
    from transformers import AutoModelForCausalLM

    with torch.inference_mode():
        found = AutoModelForCausalLM.from_pretrained(output, dtype=torch.float32).eval()
        whole = AutoModelForCausalLM.from_pretrained(EXAMPLE, dtype=torch.float32).eval()
        for number, layer in enumerate(whole.model.layers):
            ids = list(KEPT[number])
            experts, gate = layer.mlp.experts, layer.mlp.gate
            for name in ("gate_up_proj", "down_proj"):
                whole_tensor = getattr(experts, name)
                setattr(experts, name, torch.nn.Parameter(whole_tensor[ids]))
            gate.weight = torch.nn.Parameter(gate.weight[ids])
            for module in (experts, gate):
                for name in ("num_experts", "num_local_experts"):
                    if hasattr(module, name):
                        setattr(module, name, 3)
        tokens = torch.arange(5, 69)[None]
        assert torch.equal(found(tokens).logits, whole(tokens).logits)


def test_compare(output: Path, kept: Path, tmp_path: Path) -> None:
    """Pruned outputs beside one of the whole model: bits are those of the experts that stay."""
    for name, more in (("whole", ()), ("fewer", ("--prune", kept))):
        ktconv_done("quantize-cpu", EXAMPLE, tmp_path / name, "--numa=1", *more)
    outputs = tmp_path / "whole", tmp_path / "fewer", output
    words = ("--source", EXAMPLE, "--level", "weights", "--no-speed", "--json")
    found = json.loads(ktconv_done("compare", *outputs, *words))
    assert found["passed"]
    source, whole, fewer, copied = found["rows"]
    assert source["bits"] == copied["bits"] == 16 and whole["bits"] == fewer["bits"]
    assert copied["method"] == "pruned"
    sizes = [row["bytes"] for row in (source, whole, copied, fewer)]
    assert sizes[3] < sizes[1] and sizes[2] < sizes[0]


@pytest.mark.parametrize("layout", ["safetensors", "layers"])
def test_what_is_made_of_a_pruned_conversion(layout: str, kept: Path, tmp_path: Path) -> None:
    """Its experts are still known: parts cut again, or layers merged, without the source."""
    words = ("--method=int8", "--numa=1", f"--layout={layout}", "--prune", kept)
    ktconv_done("quantize-cpu", EXAMPLE, tmp_path / "one", *words)
    command = ("merge",) if layout == "layers" else ("reshard", "--numa=2")
    ktconv_done(command[0], tmp_path / "one", tmp_path / "two", *command[1:])
    record = read_json(tmp_path / "two" / "ktconv.json")["source"]
    assert record["pruned"] == read_json(tmp_path / "one" / "ktconv.json")["source"]["pruned"]
    assert verified(tmp_path / "two")["passed"]


def test_inspect(output: Path) -> None:
    """A pruned checkpoint is a checkpoint, with what was kept of it."""
    found = json.loads(ktconv_done("inspect", output, "--json"))
    assert (found["kind"], found["experts"], found["hidden_size"]) == ("checkpoint", [3], [128])
    assert found["kept"] == "3 of 8 experts (layers 0-1)"
    assert "3 of 8 experts (layers 0-1)" in ktconv_done("inspect", output)


def test_level_model_of_compare(output: Path, tmp_path: Path, torch: Any) -> None:
    """Divergence is that against the whole model."""
    ktconv_done("quantize-cpu", EXAMPLE, tmp_path / "whole", "--numa=1", "--method=int8")
    words = ("--source", EXAMPLE, "--level", "model", "--windows=1", "--no-speed", "--json")
    found = json.loads(ktconv_done("compare", output, tmp_path / "whole", *words))
    _, copied, whole = found["rows"]
    assert copied["kl_mean"] > 0.1 > whole["kl_mean"] and copied["perplexity_increase"] > 0
