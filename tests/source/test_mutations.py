"""Damaged checkpoints and outputs: every command ends with a sentence or with a sound result.

The damage is drawn from a seeded generator; what was changed is shown when a case fails.
"""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest
from helpers.cli import done, edit_json, words, write_model
from helpers.harmless import assert_safe, run
from helpers.mutation import damaged, mutated, mutated_safetensors

pytestmark = pytest.mark.slow

SHARD = "model-00001-of-00002.safetensors"
INDEX = "model.safetensors.index.json"
# Keys that decide what is read, beside those that every test model has.
KEYS = {
    "num_experts_per_tok": 1, "moe_layers": [0], "moe_layer_freq": 1, "first_k_dense_replace": 0,
    "rope_theta": 1e4, "swiglu_limit": 0.0, "rms_norm_eps": 1e-6, "norm_topk_prob": True,
    "hidden_act": "silu", "mlp_only_layers": [], "mlp_layer_types": ["sparse"],
    "num_nextn_predict_layers": 0, "architectures": ["X"], "text_config": {"num_experts": 2},
    "quantization_config": {"weight_block_size": [128, 128]},
}  # fmt: skip
REFUSED = {2, 3}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("mutations") / "model"
    write_model(directory, layers=1, experts=2, shards=2)
    edit_json(directory / "config.json", lambda config: config.update(KEYS))
    return directory


@pytest.fixture(scope="module")
def output(model: Path) -> Path:
    done(model, model.parent / "output")
    return model.parent / "output"


def damage(path: Path, rng: random.Random) -> str:
    """Changes one file and returns what was changed."""
    data = path.read_bytes()
    if path.suffix == ".safetensors":
        data, change = mutated_safetensors(data, rng)
    elif path.suffix == ".json":
        data, change = mutated(json.loads(data), rng)
    else:
        data, change = damaged(data, rng)
    path.write_bytes(data)
    return f"{path.name}: {change}"


def ends_well(change: str, codes: set[int], *command: object) -> int:
    result = run(*command)
    try:
        assert_safe(result)
        assert result.exit_code in codes, result.output
    except AssertionError as error:
        raise AssertionError(f"{command}\n{change}\n{error}") from result.exception
    return result.exit_code


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("name", ["config.json", INDEX, SHARD])
def test_a_damaged_checkpoint(name: str, seed: int, model: Path, tmp_path: Path) -> None:
    source, output = tmp_path / "model", tmp_path / "output"
    shutil.copytree(model, source)
    change = damage(source / name, random.Random(f"{name} {seed}"))
    ends_well(change, {0, *REFUSED}, "inspect", source)
    planned = ends_well(change, {0, *REFUSED}, *words(source, output, "--dry-run"))
    assert not output.exists(), change
    if seed < 6:
        assert ends_well(change, {0, *REFUSED}, *words(source, output)) == planned, change
        if planned == 0:
            ends_well(change, {0}, "verify", output, "--level", "structure")


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("name", ["ktconv.json", INDEX, SHARD])
def test_a_damaged_output(name: str, seed: int, model: Path, output: Path, tmp_path: Path) -> None:
    spoilt = tmp_path / "output"
    shutil.copytree(output, spoilt)
    change = damage(spoilt / name, random.Random(f"{name} {seed}"))
    ends_well(change, {0, 1, *REFUSED}, "verify", spoilt, "--level", "structure")
    ends_well(change, {0, *REFUSED}, "inspect", spoilt)
    ends_well(change, {0, *REFUSED}, *words(model, spoilt))


@pytest.mark.parametrize("seed", range(10))
def test_a_damaged_state_of_a_run(seed: int, tmp_path: Path) -> None:
    model, output = write_model(tmp_path / "model", layers=2, experts=2), tmp_path / "output"
    done(model, output, "--layers", "0")
    rng = random.Random(seed)
    state = sorted(path for path in (output / ".ktconv").rglob("*") if path.is_file())
    change = damage(rng.choice(state), rng)
    ends_well(change, {0, 1, *REFUSED}, "verify", output, "--level", "structure")
    if ends_well(change, {0, *REFUSED}, *words(model, output)) == 0:
        ends_well(change, {0}, "verify", output, "--source", model, "--level", "structure")


@pytest.mark.parametrize("seed", range(10))
def test_a_damaged_expert_set(seed: int, model: Path, tmp_path: Path) -> None:
    document = {"schema": 1, "experts": {"0": [0]}}
    data, change = mutated(document, random.Random(seed))
    (tmp_path / "set.json").write_bytes(data)
    command = words(model, tmp_path / "output", "--dry-run", "--allow-partial")
    command += ["--exclude-experts", str(tmp_path / "set.json")]
    ends_well(change, {0, *REFUSED}, *command)
