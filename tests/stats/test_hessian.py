"""Second moments of experts' inputs: gathered, written layer by layer, read again."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.faults import no_space
from msgspec.structs import replace
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from ktconv.errors import CheckpointError, DiskFullError, OutputError, UsageError
from ktconv.source import PROJECTIONS
from ktconv.stats import hessian
from ktconv.stats.hessian import HessianTap, nbytes, open_hessians, unpacked
from ktconv.stats.origin import Origin, Sizes

ORIGIN = Origin("a/model", "0" * 64, "prose.txt", "1" * 64, 9, "2" * 64)
LAYERS = {3: Sizes(4, 7, 5), 10: Sizes(3, 7, 3)}
IDS = [[1, 3], [3, -1], [3, 1]]  # experts 0 and 2 get no token
FIRST, SECOND = "layer-00003.safetensors", "layer-00010.safetensors"


@pytest.fixture(autouse=True)
def small_bands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several bands and blocks of tokens in small matrices."""
    monkeypatch.setattr(hessian, "_BAND", 3)
    monkeypatch.setattr(hessian, "_TOKENS", 2)


def listed(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def inputs_of(torch: Any, layer: int) -> dict[int, tuple[Any, Any]]:
    """By expert the inputs of gate and up, and of down; bf16."""
    generator = torch.Generator().manual_seed(layer)
    sizes, ids = LAYERS[layer], np.clip(IDS, -1, LAYERS[layer].experts - 1)
    counts = {int(e): int((ids == e).sum()) for e in np.unique(ids) if e >= 0}
    return {
        expert: tuple(
            torch.randn((n, size), generator=generator).bfloat16()
            for size in (sizes.hidden, sizes.intermediate)
        )
        for expert, n in counts.items()
    }


def feed(tap: HessianTap, torch: Any, layer: int) -> None:
    """One layer, in two windows."""
    ids = torch.tensor(IDS).clamp(max=LAYERS[layer].experts - 1)
    tap.chosen(layer, 0, ids[:1], torch.ones(1, 2))
    tap.chosen(layer, 1, ids[1:], torch.ones(2, 2))
    for expert, (rows, inner) in inputs_of(torch, layer).items():
        tap.inputs(layer, expert, rows, inner, torch.ones(len(rows)))


def recorded(torch: Any, directory: Path, origin: Origin = ORIGIN) -> Path:
    """A directory of both layers."""
    tap = HessianTap(LAYERS, origin, directory)
    for layer in LAYERS:
        feed(tap, torch, layer)
        tap.layer_done(layer)
    return directory


def test_second_moments(torch: Any, tmp_path: Path) -> None:
    found = open_hessians(recorded(torch, tmp_path / "dir"))
    assert listed(tmp_path / "dir") == [FIRST, SECOND]
    assert found.layers == (3, 10) and found.origin == ORIGIN and found.sizes == LAYERS
    assert found.counts(3).tolist() == [0, 2, 0, 3] and found.counts(10).tolist() == [0, 2, 3]
    for layer, sizes in LAYERS.items():
        for expert, (rows, inner) in inputs_of(torch, layer).items():
            for projection in PROJECTIONS:
                x = (inner if projection == "down" else rows).double().numpy()
                matrix = found.matrix(layer, expert, projection)
                assert matrix.dtype == np.float32 and np.array_equal(matrix, matrix.T)
                np.testing.assert_allclose(matrix, x.T @ x, rtol=1e-5, atol=1e-5)
        assert not found.matrix(layer, 0, "up").any()
        assert found.matrix(layer, 0, "up").shape == (sizes.hidden, sizes.hidden)
        assert found.matrix(layer, 0, "down").shape == (sizes.intermediate, sizes.intermediate)


def test_what_the_files_have(torch: Any, tmp_path: Path) -> None:
    """As other programs read them: names, and the upper triangle row by row."""
    recorded(torch, tmp_path)
    content = load_file(tmp_path / FIRST)
    names = {f"experts.{e}.{name}" for e in (1, 3) for name in ("gate_up", "down")}
    assert set(content) == {"counts", "gate_up.diagonal", "down.diagonal", *names}
    matrix = np.zeros((7, 7), np.float32)
    matrix[np.triu_indices(7)] = content["experts.3.gate_up"]
    matrix += np.triu(matrix, 1).T
    assert np.array_equal(matrix, open_hessians(tmp_path).matrix(3, 3, "gate"))
    assert (tmp_path / SECOND).stat().st_size < 4096 + nbytes(LAYERS[10])


@pytest.mark.parametrize("size", [1, 2, 3, 4, 6, 7, 50])
def test_unpacked(size: int) -> None:
    whole = np.random.default_rng(size).random((size, size), np.float32)
    whole += whole.T
    assert np.array_equal(unpacked(whole[np.triu_indices(size)], size), whole)


def test_a_later_run_goes_on(torch: Any, tmp_path: Path) -> None:
    """Finished layers are kept, untouched; what a killed run had of the next is gone."""
    recorded(torch, tmp_path / "whole")
    killed = HessianTap(LAYERS, ORIGIN, tmp_path / "dir")
    assert killed.missing_bytes == sum(map(nbytes, LAYERS.values()))
    feed(killed, torch, 3)
    killed.layer_done(3)
    feed(killed, torch, 10)  # and killed here
    kept = (tmp_path / "dir" / FIRST).stat().st_mtime_ns
    assert open_hessians(tmp_path / "dir").layers == (3,)
    again = HessianTap(LAYERS, ORIGIN, tmp_path / "dir")
    again.restore(killed.state())
    assert again.kept == {3} and again.missing_bytes == nbytes(LAYERS[10])
    for layer in LAYERS:  # a layer that runs again is not written again
        feed(again, torch, layer)
        again.layer_done(layer)
    assert listed(tmp_path / "dir") == [FIRST, SECOND]
    assert (tmp_path / "dir" / FIRST).stat().st_mtime_ns == kept
    for name in (FIRST, SECOND):
        assert (tmp_path / "dir" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_a_lost_file_of_a_layer_that_is_not_run_again(torch: Any, tmp_path: Path) -> None:
    killed = HessianTap(LAYERS, ORIGIN, tmp_path)
    feed(killed, torch, 3)
    killed.layer_done(3)
    (tmp_path / FIRST).unlink()
    with pytest.raises(OutputError, match=f"{FIRST}, which the interrupted run wrote, is missing"):
        HessianTap(LAYERS, ORIGIN, tmp_path).restore(killed.state())


def test_layers_can_be_added(torch: Any, tmp_path: Path) -> None:
    for layer in (10, 3):
        tap = HessianTap({layer: LAYERS[layer]}, ORIGIN, tmp_path)
        for number in LAYERS:
            feed(tap, torch, number)
            tap.layer_done(number)
        assert open_hessians(tmp_path).layers == ((10,) if layer == 10 else (3, 10))


def test_an_error_leaves_no_part(torch: Any, tmp_path: Path) -> None:
    tap = HessianTap(LAYERS, ORIGIN, tmp_path)
    feed(tap, torch, 3)
    assert listed(tmp_path) == [f"{FIRST}.part"]
    tap.close()
    tap.close()
    assert listed(tmp_path) == []


@pytest.mark.parametrize(
    "change", [{"model": "b"}, {"source_sha256": "3"}, {"text_sha256": "3"}, {"run": "3"}]
)
def test_a_directory_of_another_run(change: dict[str, Any], torch: Any, tmp_path: Path) -> None:
    recorded(torch, tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(OutputError, match="is of another model, text or version"):
        HessianTap(LAYERS, replace(ORIGIN, **change), tmp_path)
    with pytest.raises(OutputError, match="is of another model, text or version"):
        HessianTap(LAYERS | {3: Sizes(4, 7, 6)}, ORIGIN, tmp_path)
    os.truncate(tmp_path / FIRST, 500)
    with pytest.raises(OutputError, match="is truncated"):
        HessianTap(LAYERS, ORIGIN, tmp_path)
    (tmp_path / FIRST).write_bytes(before[FIRST])
    other = recorded(torch, tmp_path / "other", replace(ORIGIN, **change))
    (other / SECOND).replace(tmp_path / SECOND)
    with pytest.raises(UsageError, match="are of different models or texts"):
        open_hessians(tmp_path)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
def test_inputs_that_overflow_are_refused(value: float, torch: Any, tmp_path: Path) -> None:
    tap = HessianTap(LAYERS, ORIGIN, tmp_path)
    tap.chosen(3, 0, torch.tensor([[2]]), torch.ones(1, 1))
    rows = torch.ones(3, 7)
    rows[2, 6] = value
    with pytest.raises(CheckpointError, match="inputs of expert 2 of layer 3 are not finite"):
        tap.inputs(3, 2, rows, torch.ones(3, 5), torch.ones(3))
    tap.close()
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk(torch: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "posix_fallocate", no_space)
    tap = HessianTap(LAYERS, ORIGIN, tmp_path / "dir")
    with pytest.raises(DiskFullError, match=rf"dir/{FIRST}.part: the disk is full"):
        feed(tap, torch, 3)
    tap.close()
    assert list((tmp_path / "dir").iterdir()) == []


# ---- files that are refused ------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "metadata", "said"),
    [
        ({"counts": None}, {}, "it has no tensor counts"),
        ({"counts": np.array([0, 2, 0])}, {}, r"counts is I64 \[3\], not I64 \[4\]"),
        ({"counts": np.array([0, 2, 0, -3])}, {}, "counts has negative values"),
        ({"counts": np.array([1, 2, 0, 3])}, {}, "it has no tensor experts.0.gate_up"),
        ({"experts.1.down": None}, {}, "it has no tensor experts.1.down"),
        ({"experts.1.down": np.ones(14, np.float32)}, {}, r"F32 \[14\], not F32 \[15\]"),
        ({"experts.1.down": np.ones(15, np.float16)}, {}, "experts.1.down is F16"),
        ({}, {"layer": "4"}, "it is of layer 4"),
        ({}, {"layer": ""}, "layer in its metadata is ''"),
        ({}, {"experts": "0"}, "sizes in its metadata are impossible"),
        ({}, {"hidden_size": "2000000"}, "sizes in its metadata are impossible"),
        ({}, {"format": "ktconv-importance"}, "is not a file of ktconv stats --hessian"),
        ({}, {"format_version": "3"}, "has version 3 of its format"),
    ],
)
def test_damaged_files(
    changes: dict[str, Any], metadata: dict[str, str], said: str, torch: Any, tmp_path: Path
) -> None:
    path = recorded(torch, tmp_path) / FIRST
    with safe_open(path, framework="numpy") as file:
        about = file.metadata()
    tensors = {n: one for n, one in (load_file(path) | changes).items() if one is not None}
    save_file(tensors, path, about | metadata)
    with pytest.raises(UsageError, match=said) as caught:
        open_hessians(tmp_path)
    assert str(path) in str(caught.value)


def test_versions_say_what_to_do(torch: Any, tmp_path: Path) -> None:
    """An earlier one cannot be read by a later ktconv either."""
    path = recorded(torch, tmp_path) / FIRST
    with safe_open(path, framework="numpy") as file:
        metadata = file.metadata()
    for version, hint in (("1", "record it again with: "), ("3", "use a later ktconv, or ")):
        save_file(load_file(path), path, metadata | {"format_version": version})
        with pytest.raises(UsageError) as caught:
            open_hessians(tmp_path)
        assert str(caught.value.hint).startswith(hint)


def test_damaged_values(torch: Any, tmp_path: Path) -> None:
    """Found when they are read."""
    path = recorded(torch, tmp_path) / FIRST
    with safe_open(path, framework="numpy") as file:
        about = file.metadata()
    for value, said in ((np.nan, "not finite"), (-1, "negative value on its diagonal")):
        tensors = load_file(path)
        tensors["experts.3.down"][0] = value
        save_file(tensors, path, about)
        found = open_hessians(tmp_path)
        found.matrix(3, 3, "up")
        with pytest.raises(UsageError, match=f"experts.3.down has .*{said}"):
            found.matrix(3, 3, "down")


def test_diagonals_of_other_matrices(torch: Any, tmp_path: Path) -> None:
    """Scales follow from the diagonals, codes from the matrices, both by how many tokens there are:
    a file in which they contradict one another is of no use."""
    path = recorded(torch, tmp_path) / FIRST
    with safe_open(path, framework="numpy") as file:
        about = file.metadata()
    tensors = load_file(path)
    tensors["down.diagonal"][3, 1] *= 2
    save_file(tensors, path, about)
    found = open_hessians(tmp_path)
    found.matrix(3, 1, "down")
    with pytest.raises(
        UsageError, match=r"experts\.3\.down has another diagonal than down\.diagonal"
    ):
        found.matrix(3, 3, "down")
    tensors["counts"][3] = 0
    save_file(tensors, path, about)
    with pytest.raises(UsageError, match=r"gate_up\.diagonal has values of experts without tokens"):
        open_hessians(tmp_path).diagonal(3, "up")


def test_directories_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has no files of ktconv stats --hessian"):
        open_hessians(tmp_path)
    for path, said in (
        (tmp_path / "absent", "does not exist"),
        (Path(__file__), "not a directory"),
    ):
        with pytest.raises(UsageError, match=said):
            open_hessians(path)


def test_tokens_count_by_the_weights_of_the_router(torch: Any, tmp_path: Path) -> None:
    tap = HessianTap(LAYERS, ORIGIN, tmp_path)
    tap.chosen(3, 0, torch.tensor([[2]] * 5), torch.ones(5, 1))
    generator = torch.Generator().manual_seed(0)
    rows, inner = (torch.randn((5, size), generator=generator) for size in (7, 5))
    weights = torch.tensor([0.5, 2.0, 0.0, 1.0, -1.0])
    tap.inputs(3, 2, rows, inner, weights)
    tap.layer_done(3)
    found = open_hessians(tmp_path)
    for projection, values in zip(PROJECTIONS, (rows, rows, inner), strict=True):
        x = (values * weights[:, None]).double().numpy()
        matrix = found.matrix(3, 2, projection)
        np.testing.assert_allclose(matrix, x.T @ x, rtol=1e-5, atol=1e-5)
        diagonal = found.diagonal(3, projection)
        assert np.array_equal(diagonal[2], matrix.diagonal()) and not diagonal[[0, 1, 3]].any()
