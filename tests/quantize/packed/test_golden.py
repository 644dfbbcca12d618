"""The reference converter's own bytes, end to end: checkpoint in, files out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers import golden
from helpers.convert import all_files, assert_same, assert_shards, convert, read_folders, read_model
from helpers.families import Raw, Tensor, simple_config, write_checkpoint

from ktconv import native
from ktconv.formats import PROJECTIONS

pytestmark = pytest.mark.slow


def write_case(case: golden.Case, directory: Path) -> Path:
    """The case's source as a checkpoint whose layers before are dense."""
    source = f"model.layers.{case.layer}.mlp.experts"
    tensors: dict[str, Tensor] = {}
    for expert in range(case.experts):
        for proj in PROJECTIONS:
            bits = case.source(expert, proj)
            name = f"{source}.{expert}.{proj}_proj.weight"
            tensors[name] = Raw("BF16", bits.shape, bits.astype("<u2").tobytes())
    config = simple_config(
        hidden_size=case.hidden,
        moe_intermediate_size=case.intermediate,
        num_experts=case.experts,
        num_hidden_layers=case.layer + 1,
        first_k_dense_replace=case.layer,
    )
    return write_checkpoint(directory, tensors, config)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("golden")
    return {case.name: write_case(case, root / case.name) for case in golden.CASES}


def options_of(case: golden.Case) -> dict[str, Any]:
    """That the reference's bytes follow from."""
    made = {"method": case.format.key, "numa": case.parts, "save_backward": case.backward}
    return {**made, "scale": "amax"}


def check_shards(case: golden.Case, output: Path) -> None:
    assert_shards(output, case.format.key, case.parts)
    tensors = read_model(output)
    assert tensors.keys() == case.tensors.keys()
    for key, tensor in tensors.items():
        expected = case.tensors[key]
        assert (tensor.dtype, list(tensor.shape)) == (expected["dtype"], expected["shape"])
        case.check(key, tensor.data)


def check_folders(case: golden.Case, output: Path) -> None:
    files = read_folders(output)
    expected = {entry["kt_file"]: key for key, entry in case.tensors.items()}
    assert files.keys() == expected.keys()
    for path, data in files.items():
        case.check(expected[path], data)


@pytest.mark.parametrize("layout", ["safetensors", "layers"])
@pytest.mark.parametrize("case", golden.PARAMS)
def test_golden(case: golden.Case, layout: str, models: dict[str, Path], tmp_path: Path) -> None:
    output = tmp_path / "output"
    convert(models[case.name], output, threads=2, layout=layout, **options_of(case))
    (check_folders if layout == "layers" else check_shards)(case, output)


@pytest.fixture(scope="module")
def here(
    models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, bytes]]:
    """The files of each case, manifests too, by the best level."""
    outputs = {case.name: tmp_path_factory.mktemp("here") / "output" for case in golden.CASES}
    for case in golden.CASES:
        convert(models[case.name], outputs[case.name], **options_of(case))
        check_shards(case, outputs[case.name])
    return {name: all_files(output) for name, output in outputs.items()}


def test_golden_on_every_level(
    isa: str, models: dict[str, Path], here: dict[str, dict[str, bytes]], tmp_path: Path
) -> None:
    for case in golden.CASES:
        convert(models[case.name], tmp_path / case.name, **options_of(case))
        assert_same(all_files(tmp_path / case.name), here[case.name])
    assert native.isa() == isa


def test_compat_changes_nothing_for_bf16(models: dict[str, Path], tmp_path: Path) -> None:
    case = next(case for case in golden.CASES if case.name == "int4_256_np2")
    options = options_of(case) | {"compat": True, "scale": ""}
    convert(models[case.name], tmp_path / "out", **options)
    check_shards(case, tmp_path / "out")
