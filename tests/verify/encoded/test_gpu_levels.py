"""Levels layers and model of checkpoints for GPUs, the command, and the report."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from helpers.gpu import quantize
from helpers.gpu_corrupt import swap
from helpers.paths import EXAMPLE, MODELS

from ktconv.cli.app import app
from ktconv.errors import CheckpointError, UsageError
from ktconv.verify import Request, Result, Thresholds, verify
from ktconv.verify.encoded.output import EncodedOutput

pytestmark = pytest.mark.slow

LIMITS = Thresholds(max_ppl_increase=0.2, max_kl=0.2)


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The example model with all experts, or two of each layer."""
    pytest.importorskip("llmcompressor")
    pytest.importorskip("torch")
    made: dict[tuple[str, bool], Path] = {}

    def get(scheme: str = "W4A16", hot: bool = False) -> Path:
        if (scheme, hot) not in made:
            where = tmp_path_factory.mktemp("example")
            options: dict[str, Any] = {}
            if hot:
                layers = {str(layer): [1, 3] for layer in moe_layers()}
                options["experts"] = where / "hot.json"
                options["experts"].write_text(json.dumps({"schema": 1, "experts": layers}))
            quantize(EXAMPLE, where / "out", scheme=scheme, **options)
            made[scheme, hot] = where / "out"
        return made[scheme, hot]

    return get


@pytest.fixture(scope="module")
def proven(example: Callable[..., Path]) -> Result:
    """Level model of the whole W4A16 example; not to be changed."""
    return run(example(), "model")


def moe_layers() -> list[int]:
    from ktconv.source import open_checkpoint

    return [layer.index for layer in open_checkpoint(EXAMPLE).layers]


def run(output: Path, level: str, **options: Any) -> Result:
    given: dict[str, Any] = {"thresholds": LIMITS, "threads": 1, "windows": 2, "tokens": 8}
    return verify(Request(output, str(EXAMPLE), level, **(given | options)))


@pytest.mark.parametrize("scheme", ["W4A16", "W8A16"])
def test_model_through_transformers(
    scheme: str, example: Callable[..., Path], proven: Result
) -> None:
    result = proven if scheme == "W4A16" else run(example(scheme), "model")
    assert result.passed, result.failures
    layers, model = result.facts["layers"], result.facts["model"]
    low, high = (0.02, 0.3) if scheme == "W4A16" else (0.001, 0.03)
    for row in layers["layers"]:
        assert low < row["quantization_error"] < high
        assert row["kernel_error"] == {}
    assert model["loaded_by"] == "transformers" and model["experts_of_source"] == 0
    assert model["perplexity_converted"] != model["perplexity_source"]
    assert 0 < model["kl_mean"] < (0.1 if scheme == "W4A16" else 0.001)
    assert model["generation"]["converted"]


def test_some_experts_run_in_the_source_model(example: Callable[..., Path], proven: Result) -> None:
    """Nearer to the source than all of them, but not the source."""
    whole, part = proven, run(example(hot=True), "model")
    assert part.passed, part.failures
    model = part.facts["model"]
    assert model["loaded_by"] == "ktconv"
    assert model["experts_of_source"] == sum(8 - 2 for _ in moe_layers())
    assert 0 < model["kl_mean"] < whole.facts["model"]["kl_mean"]
    assert model["perplexity_source"] == whole.facts["model"]["perplexity_source"]
    assert any("ran on the source's weights" in note for note in part.facts["notes"])


def test_three_ways_to_run_the_same_model(
    example: Callable[..., Path], proven: Result, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layer by layer, our unpacking put into the source model, and compressed-tensors' own."""
    from ktconv.model.streamed.cut import CutModel
    from ktconv.model.streamed.parts import NotCut

    found = [proven.facts["model"]]

    def refuse(self: Any, *_: object) -> None:
        raise NotCut(self.name, "it is whole")

    monkeypatch.setattr(CutModel, "check", refuse)
    found.append(run(example(), "model").facts["model"])
    monkeypatch.setattr(EncodedOutput, "is_partial", True)
    found.append(run(example(), "model").facts["model"])
    assert [one["loaded_by"] for one in found] == ["transformers", "transformers", "ktconv"]
    assert [bool(one["layers"]) for one in found] == [True, False, False]
    for name in ("perplexity_source", "perplexity_converted", "kl_mean", "top1_agreement"):
        assert found[0][name] == found[2][name]
        assert found[0][name] == pytest.approx(found[1][name], rel=1e-6), name


def test_what_transformers_loads_is_compared(
    example: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where compressed-tensors makes something else of the tensors than we do, that is a failure,
    though our figures are good; and so is a checkpoint that it does not load."""
    import ktconv.model

    load = ktconv.model.load_model

    def other(place: Path, *args: Any, **options: Any) -> Any:
        model, tokenizer = load(place, *args, **options)
        if place != EXAMPLE:
            for layer in model.model.layers:
                layer.mlp.gate.weight.data.neg_()
        return model, tokenizer

    monkeypatch.setattr(ktconv.model, "load_model", other, raising=False)
    result = run(example(), "model")
    (failure,) = result.failures
    assert (failure.level, failure.check) == ("model", "loading")
    assert "as transformers loads" in failure.message

    def none(place: Path, *args: Any, **options: Any) -> Any:
        if place != EXAMPLE:
            raise CheckpointError(f"transformers cannot load {place}")
        return load(place, *args, **options)

    monkeypatch.setattr(ktconv.model, "load_model", none, raising=False)
    result = run(example(), "model")
    (failure,) = result.failures
    assert failure.check == "loading" and "cannot load" in failure.message
    assert result.facts["model"]["kl_mean"] > 0 and result.facts["model"]["generation"] is None


def test_wrong_experts_are_heard(example: Callable[..., Path], tmp_path: Path) -> None:
    import shutil

    output = tmp_path / "copy"
    shutil.copytree(example(), output)
    for layer in moe_layers():
        for proj in ("gate", "up", "down"):
            name = f"model.layers.{layer}.mlp.experts"
            swap(output, f"{name}.0.{proj}_proj", f"{name}.1.{proj}_proj")
    (output / "ktconv.json").unlink()
    result = run(output, "model", thresholds=Thresholds(0.0, 1e-4))
    assert {"weights", "model"} == {failure.level for failure in result.failures}
    errors = [row["worst_expert"]["error"] for row in result.facts["layers"]["layers"]]
    assert max(errors) > 0.9


def test_thresholds_by_scheme(example: Callable[..., Path]) -> None:
    for scheme, limit in (("W4A16", 0.05), ("W8A16", 0.01)):
        model = run(example(scheme), "model", thresholds=Thresholds(), windows=1).facts["model"]
        assert model["thresholds"] == {"max_ppl_increase": limit, "max_kl": limit}


def test_command_and_report(example: Callable[..., Path], tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    words = ["verify", example(), "--source", EXAMPLE, "--level", "layers", "--tokens", 4]
    words += ["--tp", "1", "--ep", "1,2-3", "--report", page]
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exit_code == 1  # eight experts on three GPUs
    assert "mapping    FAILED" in done.stdout
    assert "not on 3: 8 experts give GPUs 2-3 each" in done.stdout
    assert "layers in float32" in done.stdout
    text = page.read_text()
    assert "Expert parallel" in text and "8 experts give GPUs 2-3 each" in text
    assert "W4A16" in text and "NUMA parts" not in text
    done = CliRunner().invoke(app, [*map(str, words), "--json"])
    assert json.loads(done.stdout)["mapping"]["passed"] is False


def test_sizes_that_are_no_numbers(example: Callable[..., Path]) -> None:
    done = CliRunner().invoke(app, ["verify", str(example()), "--tp", "two"])
    assert done.exit_code == 2 and "--tp" in done.stderr
    done = CliRunner().invoke(app, ["verify", str(example()), str(example()), "--tp", "2"])
    assert done.exit_code == 2 and "--tp does not apply" in done.stderr


def test_gradients_are_those_of_cpu_experts(example: Callable[..., Path]) -> None:
    with pytest.raises(UsageError, match="--gradients is for experts on CPUs"):
        verify(Request(example(), str(EXAMPLE), gradients=True))


@pytest.mark.skipif(not MODELS.is_dir(), reason="the trained models are not here")
def test_what_llm_compressor_writes_by_itself(tmp_path: Path) -> None:
    """Targets by class, an ignore list, no recipe and no manifest."""
    model_free = pytest.importorskip("llmcompressor.entrypoints.model_free")
    source, output = MODELS / "tiny-qwen3moe", tmp_path / "out"
    ignore = ["re:.*embed_tokens", "lm_head", "re:.*self_attn.*", "re:.*mlp.gate$", "re:.*norm.*"]
    model_free.model_free_ptq(
        str(source), str(output), scheme="W4A16", ignore=ignore, device="cpu", max_workers=1
    )
    result = verify(Request(output, str(source), "weights"))
    assert result.passed, result.failures
    assert result.facts["method"] == "rtn"  # by its codes and scales
    assert result.facts["weights"]["matrices"] == 4 * 16 * 3
    assert 0.10 < result.facts["weights"]["relative_rms_error"] < 0.12
    config = json.loads((output / "config.json").read_text())
    config["quantization_config"]["ignore"].remove("re:.*self_attn.*")
    (output / "config.json").write_text(json.dumps(config))
    failures = verify(Request(output, str(source), "structure")).failures
    assert "self_attn.q_proj is packed, but it is BF16" in " ".join(f.message for f in failures)
