"""Recording with a model: its own routers and experts, on a text."""

from __future__ import annotations

import json
import os
import shutil
import signal
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from helpers import gguf_files
from helpers.forked import forked
from helpers.paths import EVAL, EXAMPLE
from helpers.paths import MODELS as TRAINED

from ktconv.cli.app import app
from ktconv.conversion.pipeline import Observer
from ktconv.errors import CheckpointError, KtconvError, OutputError, ResourceError, UsageError
from ktconv.model.text import text_pieces
from ktconv.source import PROJECTIONS
from ktconv.stats import Recorder, Statistics, Wanted, open_hessians, read_importance
from ktconv.stats.command import StatsRequest, run
from ktconv.stats.record import token_windows
from ktconv.system import machine
from ktconv.targets.expert_sets import read_expert_set

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def recorder(torch: Any) -> Recorder:
    return Recorder(EXAMPLE)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where passes of these tests are kept."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "ktconv" / "passes"


def silent(text: str) -> None:
    pass


def counted(
    recorder: Recorder, pieces: Any, limit: int, **options: Any
) -> tuple[Statistics, dict[int, Any]]:
    with recorder.prepare(pieces, limit, Wanted(ids=True), **options) as recording:
        found = recording.run()
        recording.complete()
        return found


def test_counts_are_the_routers_choice(recorder: Recorder, torch: Any, cache: Path) -> None:
    """Held against the best of the router's own logits, which transformers hands out."""
    from ktconv.model import load_model

    statistics, ids = counted(recorder, text_pieces(EVAL), 64)
    assert list(cache.iterdir()) == []
    model, tokenizer = load_model(EXAMPLE)
    tokens = torch.tensor(tokenizer(EVAL.read_text())["input_ids"][:64])[None]
    with torch.inference_mode():
        logits = model(tokens, output_router_logits=True).router_logits
    assert [layer.layer for layer in statistics.layers] == list(range(len(logits)))
    for layer, of_layer in zip(statistics.layers, logits, strict=True):
        expected = of_layer.float().topk(2).indices.numpy()
        assert (layer.tokens, layer.routed) == (64, 128)
        assert np.array_equal(np.sort(ids[layer.layer], axis=1), np.sort(expected, axis=1))
        assert layer.counts.tolist() == np.bincount(expected.ravel(), minlength=8).tolist()


def test_every_token_is_read_once(recorder: Recorder) -> None:
    """Up to the limit; the last window is shorter."""
    for limit in (1, 600, 10**9):
        statistics, ids = counted(recorder, [EVAL.read_text()[:6000]], limit)
        tokens = statistics.about["tokens"]
        assert tokens == limit if limit < 10**9 else tokens > 600
        assert all(layer.tokens == tokens == len(ids[layer.layer]) for layer in statistics.layers)


class Letters:
    """A tokenizer of letters."""

    def __call__(self, text: str, **_: object) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) for letter in text]}


@pytest.mark.parametrize("limit", [1, 3, 4, 7, 8, 12, 99])
def test_windows_do_not_depend_on_pieces(limit: int) -> None:
    text = "abcdefghijk"
    expected = [ord(letter) for letter in text[:limit]]
    for cut in range(12):
        windows = list(token_windows(Letters(), [text[:cut], text[cut:]], 4, limit))
        assert [token for window in windows for token in window] == expected
        assert all(len(window) == 4 for window in windows[:-1])
        assert all(0 < len(window) <= 4 for window in windows)


def test_only_what_is_needed_is_read(tmp_path: Path) -> None:
    """Of a long text, which comes line by line."""
    path = tmp_path / "long.txt"
    path.write_text("word " * 300_000 + "\n" + "the end\n" * 10)
    pieces = list(text_pieces(path))
    assert len(pieces) == 2
    assert pieces[0].endswith("\n")
    assert "".join(pieces) == path.read_text()

    def endless() -> Any:
        yield "abcdefgh"
        raise AssertionError("more was read than needed")

    assert list(token_windows(Letters(), endless(), 4, 8)) == [
        [ord(letter) for letter in part] for part in ("abcd", "efgh")
    ]


def test_less_memory_gives_the_same(
    recorder: Recorder, cache: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Windows that do not fit are run again, and what experts get is in a file; the folder is gone
    afterwards, and no library said a word."""
    expected, ids = counted(recorder, text_pieces(EVAL), 2000)
    prepared = recorder.prepare(text_pieces(EVAL), 2000)
    with pytest.raises(ResourceError, match=r"--max-memory 1\.0 MB is too small") as refusal:
        recorder.prepare(text_pieces(EVAL), 2000, max_memory=10**6)
    least = int(str(refusal.value.hint).split()[2].strip("MiB,")) << 20
    with recorder.prepare(
        text_pieces(EVAL), 2000, Wanted(ids=True), max_memory=least, work=tmp_path / "work"
    ) as small:
        assert small.plan.parked < prepared.plan.parked
        found, same = small.run()
        small.complete()
    for layer, other in zip(found.layers, expected.layers, strict=True):
        assert layer.counts.tolist() == other.counts.tolist()
        assert np.array_equal(same[layer.layer], ids[layer.layer])
    assert list((tmp_path / "work").iterdir()) == []
    assert capfd.readouterr() == ("", "")


# ---- inputs of experts -----------------------------------------------------------------


def seen_inputs(torch: Any, source: Path, text: str, limit: int) -> dict[int, dict[int, Any]]:
    """Layer -> expert -> float64 inputs of gate and up, and of down, and weights of tokens; by a
    plain forward pass of transformers with hooks."""
    from ktconv.model import load_model
    from ktconv.model.sites import experts_watched, find_experts

    model, tokenizer = load_model(source)
    model.config._experts_implementation = "eager"
    linear = torch.nn.functional.linear
    sites = find_experts(model)
    found: dict[int, dict[int, Any]] = {layer: {} for layer in sites}

    def called(layer: int, routing: Any) -> None:
        own = sites[layer].own
        rows = routing.hidden.reshape(-1, own.hidden)
        for expert in routing.ids.unique().tolist():
            gate, up, _ = own.matrices(expert).values()
            x = rows[(routing.ids == expert).any(dim=1)]
            inner = torch.nn.functional.silu(linear(x, gate)) * linear(x, up)
            weights = (routing.weights * (routing.ids == expert)).sum(dim=1, keepdim=True)
            weights = weights[(routing.ids == expert).any(dim=1)]
            seen = x.double(), inner.double(), weights.double()
            found[layer].setdefault(expert, []).append(seen)

    with experts_watched(sites, called), torch.inference_mode():
        for window in token_windows(tokenizer, [text], 512, limit):
            model(input_ids=torch.tensor([window]), use_cache=False)
    return {
        layer: {
            expert: tuple(torch.cat(part).numpy() for part in zip(*parts, strict=True))
            for expert, parts in experts.items()
        }
        for layer, experts in found.items()
    }


MODELS = [EXAMPLE, TRAINED / "tiny-qwen3moe", TRAINED / "tiny-deepseekv3"]


@pytest.mark.parametrize("source", MODELS, ids=lambda path: path.name)
def test_inputs_are_those_of_a_plain_forward_pass(source: Path, torch: Any, tmp_path: Path) -> None:
    if not source.is_dir():
        pytest.skip(f"{source.name} is not here")
    path, directory = tmp_path / "importance.safetensors", tmp_path / "hessians"
    request = StatsRequest(str(source), EVAL, max_tokens=530, importance=path, hessian=directory)
    facts, _ = run(request, silent)
    expected = seen_inputs(torch, source, EVAL.read_text(), 530)
    importance, hessians = read_importance(path), open_hessians(directory)
    assert importance.origin == hessians.origin
    assert (importance.origin.text, importance.origin.tokens) == ("eval.txt", 530)
    assert list(importance.layers) == list(hessians.layers) == sorted(expected)
    for about in facts["layers"]:
        number = about["layer"]
        layer, experts = importance.layers[number], expected[number]
        counts = [len(experts[e][0]) if e in experts else 0 for e in range(about["experts"])]
        assert layer.counts.tolist() == hessians.counts(number).tolist() == counts
        assert counts == about["counts"]
        for expert, (rows, inner, weights) in experts.items():
            for projection in PROJECTIONS:
                x = inner if projection == "down" else rows
                np.testing.assert_allclose(
                    layer.of(projection)[expert], np.square(x).mean(axis=0), rtol=1e-6
                )
                product = (x * weights).T @ (x * weights)
                matrix = hessians.matrix(number, expert, projection)
                assert np.abs(matrix - product).max() <= 1e-5 * product.diagonal().max()


def files_of(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_killed_and_continued(torch: Any, tmp_path: Path) -> None:
    """In the second layer: the first is not run again, and all files are the same byte by byte."""

    class Seen(Observer):
        def begin(self, keys: list[str]) -> None:
            begun.append(keys)

    class Killer(Observer):
        def unit_started(self, key: str) -> None:
            self.key = key

        def advanced(self, nbytes: int) -> None:
            if self.key == "layer-1":
                os.kill(os.getpid(), signal.SIGKILL)

    def request(name: str) -> StatsRequest:
        (tmp_path / name).mkdir(exist_ok=True)
        return StatsRequest(
            str(EXAMPLE), EVAL, 1100, trace=tmp_path / name / "trace.safetensors",
            importance=tmp_path / name / "importance.safetensors",
            hessian=tmp_path / name / "hessians", work_dir=tmp_path / "work",
        )  # fmt: skip

    begun: list[list[str]] = []
    expected, _ = run(request("whole"), silent)
    killed = request("killed")
    assert forked(lambda: run(killed, silent, lambda sizes: nullcontext(Killer()))) == -9
    assert "hessians/layer-00000.safetensors" in files_of(tmp_path / "killed")
    assert not any(
        (tmp_path / "killed" / name).exists()
        for name in ("trace.safetensors", "importance.safetensors")
    )
    said: list[str] = []
    found, _ = run(killed, said.append, lambda sizes: nullcontext(Seen()))
    assert begun == [["layer-1"]] and any("continuing behind layer 0" in line for line in said)
    assert found["layers"] == expected["layers"]
    assert files_of(tmp_path / "killed") == files_of(tmp_path / "whole")
    assert list((tmp_path / "work").iterdir()) == []


def test_what_was_recorded_survives_what_cannot_be_written(
    torch: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trace that does not fit on the disk: the model is not read again for it."""
    from ktconv.stats import command

    request = StatsRequest(
        str(EXAMPLE), EVAL, 100, trace=tmp_path / "trace.safetensors",
        importance=tmp_path / "importance.safetensors", work_dir=tmp_path / "work",
    )  # fmt: skip

    def full(*_: Any) -> None:
        raise ResourceError("the disk is full")

    with monkeypatch.context() as patch, pytest.raises(ResourceError):
        patch.setattr(command, "write_trace", full)
        run(request, silent)
    said: list[str] = []
    run(request, said.append)
    assert any("continuing behind layer 1" in line for line in said)
    assert (tmp_path / "trace.safetensors").exists()
    origin = read_importance(tmp_path / "importance.safetensors").origin
    assert origin is not None and origin.tokens == 100


def test_layers_restrict_the_files(torch: Any, tmp_path: Path) -> None:
    """And how far the model is read. Hessians of other layers are added to the same directory."""
    begun: list[list[str]] = []

    class Seen(Observer):
        def begin(self, keys: list[str]) -> None:
            begun.append(keys)

    for layers in ([1], [0]):
        request = StatsRequest(
            str(EXAMPLE), EVAL, 60, layers=layers, hessian=tmp_path / "hessians",
            importance=tmp_path / "importance.safetensors",
        )  # fmt: skip
        facts, _ = run(request, silent, lambda sizes: nullcontext(Seen()))
        assert [layer["layer"] for layer in facts["layers"]] == layers
        assert list(read_importance(tmp_path / "importance.safetensors").layers) == layers
    assert begun == [["layer-0", "layer-1"], ["layer-0"]]
    assert open_hessians(tmp_path / "hessians").layers == (0, 1)


def test_a_directory_of_another_text(torch: Any, tmp_path: Path) -> None:
    """Is refused before anything runs."""
    run(StatsRequest(str(EXAMPLE), EVAL, 60, hessian=tmp_path / "hessians"), silent)
    before = files_of(tmp_path)
    with pytest.raises(OutputError, match=r"layer-00000\.safetensors is of another model, text"):
        run(StatsRequest(str(EXAMPLE), EVAL, 61, hessian=tmp_path / "hessians"), silent)
    assert files_of(tmp_path) == before


def test_a_dry_run_writes_nothing(torch: Any, tmp_path: Path) -> None:
    words = ["stats", EXAMPLE, "--text", EVAL, "--dry-run"]
    words += ["--importance", tmp_path / "i.safetensors", "--hessian", tmp_path / "h"]
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exit_code == 0, done.stderr
    assert "peak memory about" in done.stdout and "will be written to" in done.stdout
    done = CliRunner().invoke(app, [*map(str, words), "--json"])
    facts = json.loads(done.stdout)
    assert facts["hessian_bytes"] == 2 * 8 * 4 * (128 * 131 // 2 + 256 * 259 // 2)
    assert facts["importance_bytes"] == 2 * 8 * (4 * (128 + 256) + 8)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"hessian": "h"}, "--hessian .*h needs 2.7 MB, but only 1.0 MB are free"),
        ({}, "of hidden states are kept in .*, but only"),
    ],
)
def test_a_disk_too_small(
    options: dict[str, Any], said: str, torch: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "disk_free", lambda path: 10**6 if options else 1000)
    options = {name: tmp_path / value for name, value in options.items()}
    with pytest.raises(ResourceError, match=said):
        run(StatsRequest(str(EXAMPLE), EVAL, 60, **options), silent)
    assert list(tmp_path.iterdir()) == []


def test_directories_that_cannot_be_used(torch: Any, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name in ("hessian", "work_dir"):
        for place in ("file", "file/below"):
            options: dict[str, Any] = {name: tmp_path / place}
            with pytest.raises(UsageError, match=r"cannot be used: .*/file is not a directory"):
                run(StatsRequest(str(EXAMPLE), EVAL, 60, **options), silent)


def test_nothing_is_added_to_the_model(torch: Any, tmp_path: Path) -> None:
    """Every safetensors file beside its shards would be one of them."""
    source = shutil.copytree(EXAMPLE, tmp_path / "model")
    before = sorted(source.iterdir())
    (tmp_path / "link").symlink_to(source)
    for name, place in (
        ("hessian", source),
        ("hessian", source / "below"),
        ("hessian", tmp_path / "link"),
        ("work_dir", source),
        ("importance", source / "importance.safetensors"),
        ("trace", source / "trace.safetensors"),
    ):
        options: dict[str, Any] = {name: place}
        with pytest.raises(UsageError, match=r"is in .*/model, (a model, )?to which"):
            run(StatsRequest(str(source), EVAL, 60, **options), silent)
    assert sorted(source.iterdir()) == before


def test_a_model_that_overflows(torch: Any, tmp_path: Path) -> None:
    """Routers choose experts for NaN too, which are no counts."""
    from safetensors.torch import load_file, save_file

    source = shutil.copytree(EXAMPLE, tmp_path / "model")
    name = "model.layers.1.post_attention_layernorm.weight"
    for shard in source.glob("*.safetensors"):
        tensors = load_file(shard)
        if name in tensors:
            tensors[name][3] = torch.inf
            save_file(tensors, shard, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"before the experts of layer 1 are not finite"):
        run(StatsRequest(str(source), EVAL, 60, work_dir=tmp_path / "work"), silent)


def test_a_gguf_model(recorder: Recorder, tmp_path: Path) -> None:
    """With the same values as the safetensors model: the same counts."""
    from safetensors.torch import load_file

    names = {
        "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
        "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm", "mlp.gate": "ffn_gate_inp",
    }  # fmt: skip
    tensors: dict[str, Any] = {}
    stacks: dict[str, dict[int, Any]] = {}
    for path in sorted(EXAMPLE.glob("*.safetensors")):
        for name, tensor in load_file(path).items():
            module, values = name.removesuffix(".weight"), tensor.float().numpy()
            layer = module.split(".")[2] if module.startswith("model.layers.") else None
            inner = module.removeprefix(f"model.layers.{layer}.")
            if ".experts." in inner:
                _, _, expert, projection = inner.split(".")
                stack = f"blk.{layer}.ffn_{projection.removesuffix('_proj')}_exps.weight"
                stacks.setdefault(stack, {})[int(expert)] = values
            elif layer is None:
                tensors[f"{names[module]}.weight"] = values
            else:
                tensors[f"blk.{layer}.{names[inner]}.weight"] = values
    for stack, experts in stacks.items():
        tensors[stack] = np.stack([experts[number] for number in sorted(experts)])
    settings = json.loads((EXAMPLE / "config.json").read_text())
    pairs = gguf_files.metadata(
        settings["num_hidden_layers"], expert_count=settings["num_local_experts"],
        embedding_length=settings["hidden_size"],
        expert_feed_forward_length=settings["moe_intermediate_size"],
    )  # fmt: skip
    path = gguf_files.write_gguf(tmp_path / "m.gguf", tensors, pairs)
    with pytest.raises(UsageError, match=r"has no config\.json and tokenizer"):
        Recorder(path)
    expected, _ = counted(recorder, text_pieces(EVAL), 300)
    found, _ = counted(Recorder(path, EXAMPLE), text_pieces(EVAL), 300)
    for one, other in zip(found.layers, expected.layers, strict=True):
        assert one.counts.tolist() == other.counts.tolist()


@pytest.mark.parametrize("package", ["torch", "transformers", "greenlet"])
def test_packages_that_are_missing(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import ktconv.model

    pytest.importorskip("transformers")
    there = ktconv.model.find_spec  # type: ignore[attr-defined]
    monkeypatch.setattr(
        "ktconv.model.find_spec", lambda name: None if name == package else there(name)
    )
    with pytest.raises(UsageError, match=f"needs {package}, which is not installed"):
        run(StatsRequest(str(EXAMPLE), EVAL, 60), silent)


def test_models_that_cannot_be_run(torch: Any, tmp_path: Path) -> None:
    """One sentence each, before anything is written."""
    broken = tmp_path / "model"

    def refused(said: str, hint: str = "") -> None:
        with pytest.raises(KtconvError, match=said) as caught:
            run(StatsRequest(str(broken), EVAL, 60), silent)
        assert hint in str(caught.value.hint)
        assert not (tmp_path / "cache").exists()

    shutil.copytree(EXAMPLE, broken)
    for path in broken.glob("tokenizer*"):
        path.unlink()
    refused("tokenizer")
    for path in EXAMPLE.glob("tokenizer*"):
        shutil.copy(path, broken)
    config = json.loads((EXAMPLE / "config.json").read_text())
    unknown = {**config, "model_type": "qwen9_moe", "architectures": ["Qwen9MoeForCausalLM"]}
    (broken / "config.json").write_text(json.dumps(unknown))
    import transformers

    refused(
        rf"qwen9_moe.*transformers {transformers.__version__}|{transformers.__version__}.*qwen9"
    )
    own = {
        **unknown,
        "auto_map": {"AutoConfig": "configuration.Own", "AutoModelForCausalLM": "m.O"},
    }
    (broken / "config.json").write_text(json.dumps(own))
    refused("does not run code")


def test_stats_record_command(torch: Any, tmp_path: Path) -> None:
    """Files and document agree, and the trace gives the same counts."""
    hot, trace = tmp_path / "hot.json", tmp_path / "trace.safetensors"
    words = ["stats", EXAMPLE, "--text", EVAL, "--max-tokens", 100, "--hot", 2]
    words += ["--write", hot, "--trace", trace, "--json"]
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exit_code == 0, done.stderr
    facts = json.loads(done.stdout)
    assert (facts["tokens"], facts["text"], facts["experts"]) == (100, "eval.txt", 16)
    chosen = read_expert_set(hot)
    assert {layer: list(ids) for layer, ids in chosen.layers.items()} == {
        about["layer"]: about["hot"] for about in facts["layers"]
    }
    again, _ = run(StatsRequest(str(trace), hot=2), silent)
    assert [one["counts"] for one in again["layers"]] == [one["counts"] for one in facts["layers"]]
    assert again["hot_share"] == facts["hot_share"]


def test_table(torch: Any) -> None:
    facts, lines = run(StatsRequest(str(EXAMPLE), max_tokens=64), silent)
    assert lines[0].split("  ")[0] == "layer"
    assert len(lines) == len(facts["layers"]) + 2
    assert facts["text"] == "the built-in sample"
    assert "the hottest quarter of each layer: 4 of 16 experts take" in lines[-1]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"text": "absent.txt"}, "absent.txt cannot be read: No such file or directory$"),
        ({"text": "empty.txt"}, "empty.txt is empty"),
        ({"text": "/dev/zero"}, "--text /dev/zero is a device$"),  # it has no end
        ({"text": "binary.txt"}, "binary.txt cannot be read: it is not UTF-8 text"),
        ({"hot": 9}, "--hot 9 is more than the 8 experts of layer 0"),
        ({"layers": [5]}, "--layers names layer 5"),
    ],
)
def test_what_record_refuses(
    options: dict[str, Any], said: str, torch: Any, tmp_path: Path
) -> None:
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00")
    if "text" in options:
        options = {"text": tmp_path / options["text"]}
    with pytest.raises(UsageError, match=said):
        run(StatsRequest(str(EXAMPLE), **options), silent)


def test_a_dense_model_has_no_experts(torch: Any, tmp_path: Path) -> None:
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=1,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(EXAMPLE).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="no MoE layer was found"):
        Recorder(tmp_path)


@pytest.mark.parametrize("name", ["tiny-qwen3moe", "tiny-deepseekv3"])
def test_trained_models(name: str, torch: Any) -> None:
    """Real routers: uneven, but no expert is dead on a text like the training's."""
    if not (TRAINED / name).is_dir():
        pytest.skip(f"{name} is not here")
    options = StatsRequest(str(TRAINED / name), TRAINED / name / "eval.txt", max_tokens=1024, hot=4)
    facts, _ = run(options, silent)
    assert all(layer["routed"] == 4 * 1024 for layer in facts["layers"])
    assert 0.3 < facts["hot_share"] < 0.9
    assert all(0.5 < layer["balance"] < 1 for layer in facts["layers"])


def test_recorded_importance_is_that_of_its_model(
    recorder: Recorder, cache: Path, tmp_path: Path
) -> None:
    """As a conversion checks it: of this model, without a word about another version."""
    from ktconv.quantize.packed.importance.load import open_weights
    from ktconv.source import open_checkpoint

    path, checkpoint = tmp_path / "importance.safetensors", open_checkpoint(EXAMPLE)
    with recorder.prepare([EVAL.read_text()], 300, Wanted(importance=path)) as recording:
        statistics, _ = recording.run()
        recording.complete()
    weights = open_weights(path, checkpoint, checkpoint.layers)
    assert weights.notes == []
    for layer in statistics.layers:
        assert np.array_equal(weights.coverage[layer.layer], layer.counts)
    hidden = checkpoint.layers[0].hidden_size
    own = weights.of(0, int(statistics.layers[0].counts.argmax()), "up")
    assert own is not None and own.shape == (hidden,) and own.min() > 0
    assert own.max() / own.min() > 2  # channels differ
