"""verify --with: two outputs hold every expert of every layer once, together."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from helpers.cli import ktconv
from helpers.convert import read_json
from safetensors.numpy import save_file

from ktconv.cli.app import app
from ktconv.errors import UsageError
from ktconv.quantize.packed.run import Request, quantize_cpu
from ktconv.targets.expert_sets import expert_set, write_expert_set
from ktconv.targets.packed.target import Options
from ktconv.verify import Result, VerifyRequest, verify

EXPERTS, LAYERS = 3, 2  # of the model in conftest.py
CHOSEN = {0: [1], 1: [0, 2]}
NAMES = ("gate_proj", "up_proj", "down_proj")


def left(model: Path, output: Path, chosen: dict[int, list[int]], method: str = "int4") -> Path:
    write_expert_set(expert_set(chosen), output.parent / "set.json")
    request = Request(
        str(model),
        output,
        Options(method),
        threads=1,
        exclude_experts=output.parent / "set.json",
        allow_partial=True,
    )
    quantize_cpu(request)
    return output


@pytest.fixture(scope="module")
def cpu(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Without the chosen experts."""
    return left(model, tmp_path_factory.mktemp("cpu") / "out", CHOSEN)


@pytest.fixture(scope="module")
def packed(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The chosen experts alone, in INT8."""
    rest = {n: [e for e in range(EXPERTS) if e not in ids] for n, ids in CHOSEN.items()}
    return left(model, tmp_path_factory.mktemp("packed") / "out", rest, "int8")


def gpu(
    directory: Path,
    chosen: dict[int, list[int]],
    names: tuple[str, ...] = NAMES,
    block: str = "mlp",
) -> Path:
    """A checkpoint as compressed-tensors names its tensors."""
    tensors = {
        f"model.layers.{layer}.{block}.experts.{expert}.{name}.{kind}": np.zeros((2, 2), np.int32)
        for layer, ids in chosen.items()
        for expert in ids
        for name in names
        for kind in ("weight_packed", "weight_scale", "weight_shape")
    }
    tensors["model.layers.0.mlp.gate.weight"] = np.zeros((EXPERTS, 2), np.int32)
    directory.mkdir()
    save_file(tensors, directory / "model.safetensors")
    return directory


def covered(cpu: Path, other: Path, source: Path | None = None) -> Result:
    request = VerifyRequest(
        cpu, str(source) if source else None, "structure", threads=1, beside=other
    )
    return verify(request)


def failures(result: Result) -> set[tuple[str, int | None, str]]:
    return {(one.check, one.layer, one.message) for one in result.failures}


# ---- what holds ------------------------------------------------------------------------


def test_packed_experts_of_another_format(cpu: Path, packed: Path, model: Path) -> None:
    for source in (None, model):
        result = covered(cpu, packed, source)
        assert result.passed, result.failures
        about = result.facts["coverage"]
        assert (about["experts"], about["experts_here"], about["experts_there"]) == (6, 3, 3)
        assert (about["output"], about["with"]) == (str(cpu), str(packed))
        assert about["with_options"]["method"] == "int8"
        assert about["passed"] is True
    assert covered(packed, cpu).passed


@pytest.mark.parametrize("names", [NAMES, ("w1", "w3", "w2")])
def test_a_quantized_checkpoint(names: tuple[str, ...], cpu: Path, tmp_path: Path) -> None:
    result = covered(cpu, gpu(tmp_path / "gpu", CHOSEN, names))
    assert result.passed, result.failures
    assert "was made from the same model is not known" in " ".join(result.facts["notes"])


def test_not_asked_for(cpu: Path, model: Path) -> None:
    result = verify(VerifyRequest(cpu, str(model), "structure", threads=1))
    assert result.passed
    assert result.facts["coverage"] is None


# ---- what does not ---------------------------------------------------------------------


def test_gaps_and_doubles_are_named(cpu: Path, tmp_path: Path) -> None:
    result = covered(cpu, gpu(tmp_path / "gpu", {0: [0, 1, 2], 1: [2]}))
    assert failures(result) == {
        ("experts in both", 0, "layer 0: experts 0,2 in both."),
        ("experts in neither", 1, "layer 1: expert 0 in neither output."),
    }
    assert result.facts["coverage"]["passed"] is False
    assert result.facts["structure"]["passed"] is True


def test_a_layer_without_any(cpu: Path, tmp_path: Path) -> None:
    result = covered(cpu, gpu(tmp_path / "gpu", {0: [1]}))
    assert failures(result) == {
        ("experts in neither", 1, "layer 1: experts 0,2 in neither output."),
    }


def test_the_whole_source_has_all_of_them(cpu: Path, model: Path) -> None:
    assert failures(covered(cpu, model)) == {
        ("experts in both", 0, "layer 0: experts 0,2 in both."),
        ("experts in both", 1, "layer 1: expert 1 in both."),
    }


def test_experts_and_layers_that_the_model_has_not(cpu: Path, tmp_path: Path) -> None:
    result = covered(cpu, gpu(tmp_path / "gpu", {**CHOSEN, 0: [1, 3], 4: [0]}))
    assert {(check, layer) for check, layer, _ in failures(result)} == {
        ("unknown experts", 0),
        ("unknown layer", 4),
    }


def test_an_expert_without_one_of_its_matrices(cpu: Path, tmp_path: Path) -> None:
    for names in (NAMES[:2], NAMES[1:], ("gate_proj",)):
        shutil.rmtree(tmp_path / "gpu", ignore_errors=True)
        result = covered(cpu, gpu(tmp_path / "gpu", CHOSEN, names))
        assert {(check, layer) for check, layer, _ in failures(result)} == {
            ("incomplete expert", 0),
            ("incomplete expert", 1),
        }


def test_an_expert_that_the_manifest_has_but_the_shards_have_not(
    cpu: Path, packed: Path, tmp_path: Path
) -> None:
    """Manifests are not trusted: tensors count."""
    copy = tmp_path / "copy"
    shutil.copytree(packed, copy)
    shards = sorted(copy.glob("*.safetensors"))
    shards[0].unlink()  # layer 0
    result = covered(cpu, copy)
    assert ("experts in neither", 0, "layer 0: expert 1 in neither output.") in failures(result)


def test_cover_by_another_source(cpu: Path, packed: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(packed, copy)
    manifest = read_json(copy / "ktconv.json")
    files = manifest["source"]["files"]
    files["model.safetensors"]["mtime_ns"] += 1
    (copy / "ktconv.json").write_text(json.dumps(manifest))
    assert covered(cpu, copy).passed
    files["model.safetensors"]["header_sha256"] = "0"
    (copy / "ktconv.json").write_text(json.dumps(manifest))
    assert {check for check, _, _ in failures(covered(cpu, copy))} == {"another source"}


def test_an_unfinished_part(cpu: Path, packed: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(packed, copy)
    (copy / ".ktconv").mkdir()
    (copy / ".ktconv/run.json").write_text("{}")
    assert {check for check, _, _ in failures(covered(cpu, copy))} == {"unfinished"}


# ---- what cannot be asked --------------------------------------------------------------


def test_verify_with_refuses_what_is_no_output(cpu: Path, model: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for other, said in (
        (tmp_path / "absent", "is not a directory"),
        (tmp_path / "empty", "no experts"),
    ):
        with pytest.raises(UsageError, match=said):
            covered(cpu, other)
    copy = tmp_path / "copy"
    shutil.copytree(cpu, copy)
    (copy / "ktconv.json").unlink()
    with pytest.raises(UsageError, match=r"the experts of the model of .* are not known"):
        covered(copy, model)


def run(*words: object) -> Any:
    return CliRunner().invoke(app, [str(word) for word in words])


def test_verify_with_command(cpu: Path, packed: Path, model: Path, tmp_path: Path) -> None:
    done = run("verify", cpu, "--with", packed)
    assert done.exit_code == 0, done.stdout
    assert (
        f"coverage   ok: of 6 experts in 2 layers 3 are in this output, 3 in {packed}"
        in done.stdout
    )
    page = tmp_path / "report.html"
    done = run("verify", cpu, "--with", model, "--report", page)
    assert done.exit_code == 1
    assert "coverage, experts in both: layer 1: expert 1 in both." in done.stdout
    assert "expert 1 in both" in page.read_text()
    done = ktconv("verify", cpu, packed, "--with", packed)
    assert done.exit_code == 2
    assert "--with does not apply when comparing two conversions" in done.stderr
