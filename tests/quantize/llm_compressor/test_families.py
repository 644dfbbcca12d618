"""Experts for GPUs of families with names, layouts or modules of their own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers import saved
from helpers.convert import read_model
from helpers.gpu import modules, quantize

from ktconv.errors import CheckpointError
from ktconv.verify import VerifyRequest, verify

pytestmark = [pytest.mark.slow, pytest.mark.torch]

# Transformers has other modules than the checkpoint's names say, or reads experts in fused form.
RENAMED = ("minimax_m3_vl", "phimoe", "kimi_k25, resaved", "hy_v3", "axk2", "llama4")
FUSED = ("gemma4", "granitemoe", "step3p7", "hy_v4")
CALIBRATED = ("minimax_m3_vl", "llama4", "granitemoe", "gemma4", "longcat_flash", "step3p7")
REFUSED = ("aria", "dbrx", "jetmoe")


def written(name: str, directory: Path) -> Path:
    pytest.importorskip("llmcompressor")
    return saved.written(name, directory)


@pytest.mark.parametrize("name", [*RENAMED, *FUSED, "nemotron_h, latent"])
def test_the_quantized_model_answers_as_its_source(name: str, tmp_path: Path, torch: Any) -> None:
    source, output = written(name, tmp_path), tmp_path / "out"
    quantize(source, output, scheme="W8A16", group_size=32)
    facts = verify(VerifyRequest(output, str(source), level="model", windows=1)).facts
    assert facts["model"]["loaded_by"] == ("ktconv" if name in FUSED else "transformers")
    # Models of random numbers in bf16 have 0.0001 to 0.02, depending on how sure they are.
    assert 0 < facts["model"]["kl_mean"] < 0.1
    assert {failure["check"] for failure in facts["failures"]} <= {"perplexity", "divergence"}


def test_names_that_only_transformers_has_are_recorded(tmp_path: Path, torch: Any) -> None:
    """Phi's routers are linear layers of another name; verify refuses names that nothing has."""
    source, output = written("phimoe", tmp_path), tmp_path / "out"
    quantize(source, output, group_size=32)
    config = json.loads((output / "config.json").read_text())
    ignored = config["quantization_config"]["ignore"]
    names = json.loads((output / "ktconv.json").read_text())["ignored_by_transformers"]
    assert names == [f"model.layers.{layer}.mlp.router" for layer in (0, 1)]
    assert set(names) <= set(ignored)
    ignored.append("model.layers.0.mlp.other")
    (output / "config.json").write_text(json.dumps(config))
    result = verify(VerifyRequest(output, str(source), level="structure"))
    says = 'ignore names "model.layers.0.mlp.other", which is not a non-expert module'
    assert any(says in failure["message"] for failure in result.facts["failures"])


def test_engines_spell_stacked_matrices_of_granite_as_mixtral(tmp_path: Path, torch: Any) -> None:
    quantize(written("granitemoe", tmp_path), tmp_path / "out", group_size=32)
    found = modules(read_model(tmp_path / "out"))
    assert "model.layers.0.block_sparse_moe.experts.0.w1" in found
    assert {name.rpartition(".")[2] for name in found} == {"w1", "w2", "w3"}


@pytest.mark.parametrize("name", REFUSED)
def test_experts_that_no_engine_reads_one_by_one(name: str, tmp_path: Path, torch: Any) -> None:
    source = written(name, tmp_path)
    with pytest.raises(CheckpointError, match=f"is of type {name}, whose experts inference"):
        quantize(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", [*CALIBRATED, "nemotron_h, latent"])
def test_gptq_of_what_the_models_own_experts_compute(name: str, tmp_path: Path, torch: Any) -> None:
    """Also of activations, layouts and calls that llm-compressor does not know: weights that are
    rounded for the outputs of another function would be worse than rounded to nearest."""
    from compressed_tensors.quantization import QuantizationArgs

    from ktconv.model.streamed.parts import PartedModel
    from ktconv.model.streamed.run import StreamedPass
    from ktconv.model.streamed.states import Scratch, States
    from ktconv.quantize.llm_compressor.gptq.rounding import Rounding
    from ktconv.quantize.llm_compressor.gptq.runner import GptqRunner
    from ktconv.source import open_checkpoint

    checkpoint = open_checkpoint(written(name, tmp_path))
    parted = PartedModel(checkpoint, torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    windows = [torch.randint(1, 32, (1, 96), generator=generator) for _ in range(2)]
    weights = QuantizationArgs(num_bits=4, strategy="group", group_size=32)
    chosen = {index: range(len(one.source.experts)) for index, one in parted.experts.items()}
    events, tested = Collected(), list[Any]()
    runner = GptqRunner(
        checkpoint, chosen, Rounding(weights, 0.1), events, torch.bfloat16, tested=tested.append
    )
    with States(tmp_path, 1, len(windows)) as states, Scratch(tmp_path, 1 << 30) as scratch:
        StreamedPass(parted, windows, states, scratch).run(runner)
    assert events.found == {
        (index, expert, projection)
        for index, one in parted.experts.items()
        for expert in chosen[index]
        for projection in one.source.projections
    }
    # Some tokens of LongCat have no expert; Llama 4 has a row per token and expert.
    tokens = {coverage.tokens for coverage in events.coverages}
    assert tokens == {2 * 96} or name in ("llama4", "longcat_flash"), tokens
    assert 0 < tested[0].gptq_error < tested[0].rtn_error < 0.5, tested


class Collected:
    """Events of a run: what was quantized."""

    def __init__(self) -> None:
        self.found, self.coverages = set[tuple[int, int, str]](), list[Any]()

    def finished_layer(self, layer: int) -> None:
        return None

    def layer_started(self, layer: int) -> None:
        pass

    def progressed(self, layer: int, share: float) -> None:
        pass

    def layer_done(self, layer: int, matrices: Any, coverage: Any) -> None:
        for matrix in matrices:
            self.found.add((layer, matrix.expert, matrix.projection))
            assert matrix.tensors["weight_shape"].tolist() == list(matrix.source.shape)
        self.coverages.append(coverage())
