"""quantize-gpu as a command: plan, resume, refusals, what is printed where."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from click.testing import CliRunner, Result
from helpers.cli import STATE, contents, layer_tensors, process, refused, write_model
from helpers.families import bf16, fp8, numbered, random_weights, simple_config, write_checkpoint
from helpers.paths import EXAMPLE

from ktconv import native
from ktconv.cli.app import app
from ktconv.cli.quantize_gpu import GpuMethod, ScaleRule, Scheme

pytestmark = [pytest.mark.slow, pytest.mark.torch, pytest.mark.process]

SOURCE = "model.layers.0.mlp.experts"
LAYERS = 12


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, torch: Any) -> Path:
    return write_model(tmp_path_factory.mktemp("source") / "model", layers=LAYERS)


def run(*words: object) -> Result:
    return CliRunner().invoke(app, ["quantize-gpu", *map(str, words)])


def done(*words: object) -> Result:
    result = run(*words, "--threads=1")
    assert result.exit_code == 0, result.stderr
    return result


# ---- what is told ----------------------------------------------------------------------


def test_dry_run_counts_classes_and_writes_nothing(model: Path, tmp_path: Path) -> None:
    result = done(model, tmp_path / "out", "--dry-run", "--json")
    facts = json.loads(result.stdout)
    assert not (tmp_path / "out").exists()
    assert facts["scheme"] == "W4A16" and facts["group_size"] == 128 and facts["method"] == "rtn"
    counts = {item["name"]: (item["modules"], item["quantized"]) for item in facts["classes"]}
    assert counts == {
        "routed experts": (LAYERS * 4 * 3, True),
        "router gates": (LAYERS, False),
        "embeddings": (1, False),
    }
    text = done(model, tmp_path / "out", "--dry-run").stdout
    assert re.search(rf"routed experts +{LAYERS * 4 * 3} modules .*quantized", text)


def test_plan_knows_every_byte(model: Path, tmp_path: Path) -> None:
    planned = json.loads(done(model, tmp_path / "out", "--dry-run", "--json").stdout)
    result = done(model, tmp_path / "out", "--json", "--max-shard-size=60kB")
    facts = json.loads(result.stdout)
    shards = list((tmp_path / "out").glob("*.safetensors"))
    assert len(shards) == facts["files"] > planned["files"]
    assert all(shard.stat().st_size <= 60_000 for shard in shards)
    assert sum(shard.stat().st_size for shard in shards) == facts["output_bytes"]
    assert facts["complete"] and facts["peak_rss_bytes"] > 0


def test_stdout_is_one_document_and_stderr_ours(model: Path, tmp_path: Path) -> None:
    """In a process of its own: llm-compressor writes logs while it is imported."""
    result = process("quantize-gpu", model, tmp_path / "out", "--json", "--threads=1")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["complete"]
    known = re.compile(r"(layer|other)-\d+ done|.* modules?  ")
    assert [line for line in result.stderr.splitlines() if not known.match(line)] == []


def test_manifest_card_and_recipe(model: Path, tmp_path: Path) -> None:
    done(model, tmp_path / "out", "--group-size=32")
    manifest = json.loads((tmp_path / "out/ktconv.json").read_text())
    assert manifest["options"] == {
        "format": "pack-quantized",
        "method": "rtn",
        "scheme": "W4A16",
        "group_size": 32,
        "mtp": True,
        "max_shard_size": 5_000_000_000,
    }
    assert manifest["geometry"]["layers"]["3"]["experts"] == 4
    card = (tmp_path / "out/README.md").read_text()
    command = re.search(r"^    ktconv quantize-gpu (.*)$", card, re.M)
    assert command is not None
    words = [word for word in command[1].split() if word not in ("model", "OUTPUT")]
    done(model, tmp_path / "again", *words)
    assert contents(tmp_path / "again") == contents(tmp_path / "out")
    assert "QuantizationModifier" in (tmp_path / "out/recipe.yaml").read_text()


def test_the_card_says_who_loads_it(model: Path, tmp_path: Path) -> None:
    """kt-kernel computes groups of 32 right, no others; no engine loads a part of the experts."""
    from ktconv.targets.expert_sets import expert_set, write_expert_set

    write_expert_set(expert_set({3: [0]}), tmp_path / "set.json")
    for name, words, said in (
        ("a", ["--group-size=32"], "It can be the weights of `--kt-method RAWINT4`"),
        ("b", ["--group-size=64"], "It cannot be the weights of `--kt-method RAWINT4`"),
        ("c", ["--group-size=32", "--scheme=W8A16"], "It cannot be the weights"),
        ("d", [f"--experts={tmp_path / 'set.json'}"], "No engine loads it by itself"),
    ):
        done(model, tmp_path / name, *words)
        card = (tmp_path / name / "README.md").read_text()
        assert said in card
        assert ("--kt-weight-path" in card) == (name != "d")


def test_choices_of_quantize_gpu_are_those_of_the_library() -> None:
    from ktconv.quantize.llm_compressor.run import METHODS
    from ktconv.targets.encoded.scheme import names_of
    from ktconv.targets.encoded.target import ScaleRule as OfTarget

    assert get_args(GpuMethod) == tuple(METHODS)
    assert get_args(ScaleRule) == get_args(OfTarget)
    assert get_args(Scheme) == tuple(names_of("quantize-gpu"))


def test_coverage_is_shown_as_a_table() -> None:
    from ktconv.quantize.llm_compressor.gptq.coverage import LayerCoverage, coverage_lines

    records = {
        "12": LayerCoverage(100, 2, [99, 98, 1, 2], ["2.up"]).record(),
        "3": LayerCoverage(100, 2, [50, 50, 50, 50]).record(),
    }
    head, third, twelfth, *rest = coverage_lines(records)
    assert head.split() == ["layer", "tokens", "least", "median", "most", "seldom", "fell", "back"]
    assert third.split() == ["3", "100", "50", "50", "50", "0", "0"]
    assert twelfth.split() == ["12", "100", "1", "50", "99", "2", "1"]
    assert rest == [
        "layer 12: 2, 3 got fewer than 5 routed tokens",
        "layer 12: 2.up rounded to nearest",
    ]


# ---- resume ----------------------------------------------------------------------------


KILLED = """
import os, signal, sys
from ktconv.cli.entry import main
from ktconv.writer.staging import ShardStaging

write, calls = ShardStaging.write, []

def killed(self, *words):
    calls.append(words)
    if len(calls) == 9:
        os.kill(os.getpid(), signal.SIGKILL)
    write(self, *words)

ShardStaging.write = killed
sys.argv = ["ktconv", "quantize-gpu", *sys.argv[1:], "--threads=1"]
main()
"""


def test_kill_9_loses_nothing_that_was_finished(model: Path, tmp_path: Path) -> None:
    done(model, tmp_path / "clean")
    output = tmp_path / "out"
    command = [sys.executable, "-c", KILLED, str(model), str(output)]
    assert subprocess.run(command, capture_output=True, check=False).returncode == -signal.SIGKILL
    records = [json.loads(path.read_bytes()) for path in (output / STATE).glob("layer-*.json")]
    names = [file["name"] for record in records for file in record["files"]]
    finished = {name: (output / name).stat().st_mtime_ns for name in names}
    assert 5 <= len(finished) <= 8  # a layer takes one write, and three may be under way
    assert list((output / STATE).glob("*.part"))
    result = done(model, output)
    assert contents(output) == contents(tmp_path / "clean")
    kept = {name: (output / name).stat().st_mtime_ns for name in finished}
    assert kept == finished
    assert "Converted" in result.stdout
    assert "nothing to do" in done(model, output).stdout


def test_layers_in_several_runs(model: Path, tmp_path: Path) -> None:
    done(model, tmp_path / "clean")
    assert (
        "is incomplete: missing" in done(model, tmp_path / "out", f"--layers=5-{LAYERS - 1}").stdout
    )
    assert not (tmp_path / "out/config.json").exists()
    done(model, tmp_path / "out", "--layers=0-4")
    assert contents(tmp_path / "out") == contents(tmp_path / "clean")


def test_other_settings_are_refused(model: Path, tmp_path: Path) -> None:
    done(model, tmp_path / "out", "--layers=1")
    refused(run(model, tmp_path / "out", "--scheme=W8A16"), 2, "options.scheme: W4A16 there")
    done(model, tmp_path / "out", "--scheme=W8A16", "--overwrite")
    assert (tmp_path / "out/recipe.yaml").exists()


def test_an_output_of_quantize_cpu_is_refused(model: Path, tmp_path: Path) -> None:
    CliRunner().invoke(app, ["quantize-cpu", str(model), str(tmp_path / "out"), "--layers=0"])
    refused(run(model, tmp_path / "out"), 2, "was begun with other settings")


# ---- refusals --------------------------------------------------------------------------


def written(directory: Path, extra: dict[str, Any] | None = None, **config: Any) -> Path:
    tensors = {**numbered(SOURCE, random_weights()), **(extra or {})}
    return write_checkpoint(directory, tensors, simple_config(**config))


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--group-size=100",), "--group-size 100 is not supported by inference engines"),
        (("--max-memory=50MB",), "is too small"),
        (("--layers=99",), f"the last MoE layer is {LAYERS - 1}"),
        (("--max-shard-size=1kB",), "too small for tensor"),
        (("--device=cuda",), "--device cuda belongs to --algorithm gptq"),
        (("--dataset=x.txt",), "--dataset belongs to --algorithm gptq"),
        (("--no-self-test",), "--self-test belongs to --algorithm gptq"),
        (("--method=gptq", "--max-memory=8GB"), "--max-memory belongs to --algorithm rtn"),
        (("--experts=nowhere.json",), "nowhere.json is not a file"),
    ],
)
def test_options_that_cannot_be(
    words: tuple[str, ...], told: str, model: Path, tmp_path: Path
) -> None:
    result = run(model, tmp_path / "out", *words)
    assert result.exit_code in (2, 3)
    assert told in " ".join(result.stderr.split()), result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "out").exists()


def test_unknown_scheme_and_method(model: Path, tmp_path: Path) -> None:
    for words in (("--scheme=W3A16",), ("--method=awq",)):
        assert run(model, tmp_path / "out", *words).exit_code == 2


def test_group_size_that_does_not_divide(tmp_path: Path, torch: Any) -> None:
    weights = random_weights(128, 96, 2)
    config = simple_config(moe_intermediate_size=96, num_experts=2)
    model = write_checkpoint(tmp_path / "model", numbered(SOURCE, weights), config)
    result = run(model, tmp_path / "out")
    refused(result, 2, "--group-size 128 does not divide the 96 columns of down in layer 0")
    assert "--group-size for this model: 32, -1" in result.stderr


def test_gptq_without_llm_compressor(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ktconv.quantize.llm_compressor import run as module

    monkeypatch.setattr(
        module, "find_spec", lambda name: None if name == "llmcompressor" else find_spec(name)
    )
    result = run(model, tmp_path / "out", "--method=gptq", "--dataset=x.txt")
    refused(result, 2, "--algorithm gptq needs llmcompressor, which is not installed")
    assert "pip install 'ktconv[gpu]'" in result.stderr


def test_rounding_needs_neither_torch_nor_llm_compressor(model: Path, tmp_path: Path) -> None:
    """Nor transformers; the tensors are the same."""
    hidden = ("torch", "transformers", "compressed_tensors", "llmcompressor")
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({hidden!r}))\n"
        "from ktconv.cli.app import app; app()"
    )
    words = ["quantize-gpu", str(model), str(tmp_path / "bare")]
    ended = subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    done(model, tmp_path / "out")
    bare, full = contents(tmp_path / "bare"), contents(tmp_path / "out")
    shards = [name for name in full if name.endswith(".safetensors")]
    assert shards and all(bare[name] == full[name] for name in shards)


def test_quantized_in_a_way_that_cannot_be_used(tmp_path: Path, torch: Any) -> None:
    codes = np.zeros((128, 128), np.uint8)
    odd = written(tmp_path / "odd", {"model.layers.0.self_attn.q_proj.weight": fp8(codes)})
    refused(run(odd, tmp_path / "out"), 2, "q_proj.weight is F8_E4M3 without scales")


def test_an_expert_that_would_stay_unquantized(tmp_path: Path, torch: Any) -> None:
    """A place for experts that the reader takes for something else."""
    stray = {"encoder.moe.experts.0.gate_proj.weight": bf16(np.ones((128, 128), np.float32))}
    model = written(tmp_path / "model", stray)
    refused(run(model, tmp_path / "out"), 2, "belongs to an expert that would stay unquantized")


def test_nan_is_named(tmp_path: Path, torch: Any) -> None:
    weights = random_weights(128, 128, 2)
    weights.up[1, 5, 7] = np.nan
    config = simple_config(num_experts=2)
    model = write_checkpoint(tmp_path / "model", numbered(SOURCE, weights), config)
    refused(run(model, tmp_path / "out"), 2, "1.up_proj.weight", "a NaN or an infinity at [5, 7]")
    assert not (tmp_path / "out").exists()


def test_wrong_codes_and_scales_are_found_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_checkpoint(tmp_path / "model", {**layer_tensors(0)}, simple_config(num_experts=4))

    def wrong(what: str) -> Any:
        def encode(
            encoding: Any, view: Any, scale: float, codes: Any, scales: Any, room: Any
        ) -> Any:
            native.encode(encoding, view, scale, codes, scales, room)
            (codes if what == "codes" else scales.reshape(-1))[5:6] ^= 0x44
            found = native.audit_encoded(encoding, view, codes, scales, scale)
            return found, native.ByteSums(native.byte_sum(codes), native.byte_sum(scales))

        return encode

    for what, told in {
        "codes": "2 codes are not its source",
        "scales": "1 scales are not those",
    }.items():
        monkeypatch.setattr(native, "encode_audit", wrong(what))
        refused(run(model, tmp_path / "out"), 1, "weight_packed is wrong", told)


@pytest.mark.parametrize("part", ["packed", "scale"])
def test_bytes_that_change_in_memory_after_they_were_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    model = write_checkpoint(tmp_path / "model", {**layer_tensors(0)}, simple_config(num_experts=4))
    right = native.encode_audit

    def changed(*arguments: Any) -> Any:
        found = right(*arguments)
        arguments[3 if part == "packed" else 4].reshape(-1)[5:6] ^= 0x44
        return found

    monkeypatch.setattr(native, "encode_audit", changed)
    refused(run(model, tmp_path / "out"), 1, f"weight_{part} changed in memory between")


@pytest.mark.skipif(not find_spec("llmcompressor"), reason="llmcompressor is not installed")
def test_keys_of_config_do_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """llm-compressor writes the config into Python source, its keys as they are, and runs that."""
    from ktconv.quantize.encoded.request import Request
    from ktconv.quantize.llm_compressor.run import quantize_gpu
    from ktconv.targets.encoded.target import Calibration, Options

    model = tmp_path / "model"
    shutil.copytree(EXAMPLE, model)
    config = json.loads((model / "config.json").read_text())
    config["a=__import__('pathlib').Path('ran').touch(),b"] = 1
    (model / "config.json").write_text(json.dumps(config))
    monkeypatch.chdir(tmp_path)
    text = Calibration(str(EXAMPLE.parent / "eval.txt"), samples=1, max_seq_len=16)
    options = Options(method="gptq", calibration=text, dampening=0.1)
    quantize_gpu(Request(str(model), tmp_path / "out", options, threads=1, self_test=False))
    assert not (tmp_path / "ran").exists()
