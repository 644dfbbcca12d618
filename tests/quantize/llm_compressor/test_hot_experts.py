"""The hot experts on the GPU, the others on the CPU: both parts from one file."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from helpers.convert import read_json, read_model
from helpers.paths import EXAMPLE

from ktconv.cli.app import app
from ktconv.inspect.inspection import inspect_path
from ktconv.targets.expert_sets import expert_set, read_expert_set, write_expert_set

pytestmark = pytest.mark.torch

if find_spec("llmcompressor") is None:  # not imported: each process would, for its list of tests
    pytest.skip("llmcompressor is not installed", allow_module_level=True)


def run(*words: object) -> Any:
    return CliRunner().invoke(app, [str(word) for word in words])


def gpu(output: Path, file: Path, scheme: str = "W4A16") -> Any:
    return run("quantize-gpu", EXAMPLE, output, "--scheme", scheme, "--experts", file)


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The two hottest experts of each layer on the GPU, the others on the CPU."""
    where = tmp_path_factory.mktemp("parts")
    words = ["stats", EXAMPLE, "--max-tokens", 256, "--hot", 2, "--write", where / "hot.json"]
    for done in (
        run(*words),
        run(
            "quantize-cpu",
            EXAMPLE,
            where / "cpu",
            "--allow-partial",
            "--exclude-experts",
            where / "hot.json",
        ),
        gpu(where / "gpu", where / "hot.json"),
    ):
        assert done.exit_code == 0, done.stderr
    return where


def test_together_they_hold_each_expert_once(parts: Path) -> None:
    done = run("verify", parts / "cpu", "--with", parts / "gpu", "--json")
    assert done.exit_code == 0, done.stdout
    about = json.loads(done.stdout)["coverage"]
    assert (about["experts"], about["experts_here"], about["experts_there"]) == (16, 12, 4)


def test_only_the_named_experts_are_there(parts: Path) -> None:
    chosen = read_expert_set(parts / "hot.json")
    found = {
        (int(name.split(".")[2]), int(name.split(".experts.")[1].split(".")[0]))
        for name in read_model(parts / "gpu")
        if ".experts." in name
    }
    assert found == {(layer, expert) for layer, ids in chosen.layers.items() for expert in ids}
    manifests = [read_json(parts / part / "ktconv.json")["options"] for part in ("cpu", "gpu")]
    assert manifests[0]["exclude_experts"] == manifests[1]["experts"] == chosen.as_record()


def test_what_is_left_out_is_told(parts: Path, tmp_path: Path) -> None:
    words = ("quantize-gpu", EXAMPLE, tmp_path / "out", "--experts", parts / "hot.json")
    done = run(*words, "--dry-run", "--json")
    assert json.loads(done.stdout)["skipped"] == ["12 experts of 2 layers: not in --experts"]


def test_a_gap_and_a_double_are_found(parts: Path, tmp_path: Path) -> None:
    """A GPU part of another choice."""
    hot = read_expert_set(parts / "hot.json")
    other = next(expert for expert in range(8) if expert not in hot.of(0))
    write_expert_set(expert_set({0: [hot.of(0)[0], other]}), tmp_path / "other.json")
    assert gpu(tmp_path / "gpu", tmp_path / "other.json", "W8A16").exit_code == 0
    done = run("verify", parts / "cpu", "--with", tmp_path / "gpu")
    assert done.exit_code == 1
    assert f"layer 0: expert {other} in both." in done.stdout
    assert f"layer 0: expert {hot.of(0)[1]} in neither output." in done.stdout
    assert f"layer 1: experts {hot.as_record()['layers']['1']} in neither" in done.stdout


def test_a_changed_set_is_refused(parts: Path, tmp_path: Path) -> None:
    write_expert_set(expert_set({0: [1], 1: [1]}), tmp_path / "other.json")
    done = gpu(parts / "gpu", tmp_path / "other.json")
    assert done.exit_code == 2
    assert "was begun with other settings" in done.stderr


@pytest.mark.parametrize(
    ("layers", "said"),
    [
        ({2: [0]}, "names layer 2, which is not an MoE layer"),
        ({0: [8]}, "names expert 8 of layer 0, but it has 8"),
    ],
)
def test_sets_for_the_gpu_that_do_not_fit(
    layers: dict[int, list[int]], said: str, tmp_path: Path
) -> None:
    write_expert_set(expert_set(layers), tmp_path / "set.json")
    done = gpu(tmp_path / "out", tmp_path / "set.json")
    assert done.exit_code == 2
    assert said in done.stderr
    assert not (tmp_path / "out").exists()


def test_inspect_counts_experts_on_the_gpu(parts: Path, tmp_path: Path) -> None:
    facts = inspect_path(str(parts / "gpu"))
    assert (facts["kind"], facts["scheme"], facts["method"]) == (
        "experts for a GPU",
        "W4A16",
        "rtn",
    )
    assert (facts["moe_layers"], facts["experts"], facts["experts_left_out"]) == ("0-1", [8], 12)
    assert (facts["complete"], facts["missing_tensors"]) == (True, 0)
    (next((parts / "gpu").glob("*.safetensors"))).rename(tmp_path / "away")
    facts = inspect_path(str(parts / "gpu"))
    assert facts["complete"] is False
    assert facts["missing_tensors"] > 0
    assert len(facts["damaged_files"]) == 1
