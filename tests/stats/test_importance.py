"""Mean squares of experts' inputs: gathered, written, read again."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.faults import no_space
from safetensors.numpy import load_file, save_file

from ktconv.errors import CheckpointError, DiskFullError, ResourceError, UsageError
from ktconv.stats.importance import ImportanceTap, nbytes, read_importance
from ktconv.stats.origin import Origin, Sizes

ORIGIN = Origin("a/model", "0" * 64, "prose.txt", "1" * 64, 9, "2" * 64)
LAYERS = {3: Sizes(4, 6, 5), 10: Sizes(2, 6, 3)}


def listed(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def feed(tap: ImportanceTap, torch: Any, layers: Any = LAYERS, most: int = 5000) -> dict[str, Any]:
    """Random inputs of bf16 for all experts but the first of each layer, the second in two calls;
    what the file should have of them."""
    expected: dict[str, Any] = {}
    for layer, sizes in layers.items():
        generator = torch.Generator().manual_seed(layer)
        means = [np.zeros((sizes.experts, n)) for n in (sizes.hidden, sizes.intermediate)]
        counts = np.zeros(sizes.experts, np.int64)
        for expert in range(1, sizes.experts):
            counts[expert] = n = 1 if expert == 2 else most
            inputs = [
                (torch.randn((n, mean.shape[1]), generator=generator) * 30**expert).bfloat16()
                for mean in means
            ]
            weights = torch.ones(n)
            tap.inputs(layer, expert, *(one[: n // 2] for one in (*inputs, weights)))
            tap.inputs(layer, expert, *(one[n // 2 :] for one in (*inputs, weights)))
            for mean, one in zip(means, inputs, strict=True):
                mean[expert] = np.square(one.double().numpy()).mean(axis=0)
        tap.layer_done(layer)
        names = (f"layers.{layer}.{name}" for name in ("gate_up", "down", "counts"))
        expected |= dict(zip(names, (*means, counts), strict=True))
    return expected


def test_mean_squares(torch: Any, tmp_path: Path) -> None:
    """Of large and small inputs alike; the file has nothing else."""
    folder, path = tmp_path / "work", tmp_path / "importance.safetensors"
    folder.mkdir()
    tap = ImportanceTap(LAYERS, ORIGIN, folder)
    expected = feed(tap, torch)
    assert not path.exists()
    for _ in range(2):  # in place of an older file
        tap.write(path)
    assert listed(tmp_path) == [path.name, "work"]
    content = load_file(path)
    assert {name: array.dtype for name, array in content.items()} == {
        name: np.int64 if name.endswith("counts") else np.float32 for name in expected
    }
    for name, array in content.items():
        np.testing.assert_allclose(array, expected[name], rtol=1e-6, atol=0)
    assert sum(array.nbytes for array in content.values()) == nbytes(LAYERS)
    found = read_importance(path)
    assert found.origin == ORIGIN and list(found.layers) == [3, 10]
    layer = found.layers[3]
    assert layer.of("gate") is layer.of("up") is layer.gate_up and layer.of("down") is layer.down
    assert layer.counts.tolist() == [0, 5000, 1, 5000]


def test_only_these_layers(torch: Any, tmp_path: Path) -> None:
    tap = ImportanceTap({10: LAYERS[10]}, ORIGIN, tmp_path)
    expected = feed(tap, torch)
    tap.write(tmp_path / "file")
    assert set(load_file(tmp_path / "file")) == {name for name in expected if "10" in name}


def test_a_layer_without_tokens_is_zeros(torch: Any, tmp_path: Path) -> None:
    tap = ImportanceTap(LAYERS, ORIGIN, tmp_path)
    tap.layer_done(3)
    feed(tap, torch, {10: LAYERS[10]})
    tap.write(tmp_path / "file")
    layer = read_importance(tmp_path / "file").layers[3]
    assert not layer.gate_up.any() and not layer.down.any() and not layer.counts.any()


def test_a_later_run_goes_on(torch: Any, tmp_path: Path) -> None:
    """Whatever the layer had seen when the first was killed: the same bytes."""
    whole = ImportanceTap(LAYERS, ORIGIN, tmp_path)
    feed(whole, torch)
    whole.write(tmp_path / "whole")
    killed = ImportanceTap(LAYERS, ORIGIN, tmp_path)
    feed(killed, torch, {3: LAYERS[3]})
    state = killed.state()
    killed.inputs(10, 1, torch.ones(2, 6), torch.ones(2, 3), torch.ones(2))
    again = ImportanceTap(LAYERS, ORIGIN, tmp_path)
    again.restore(state)
    feed(again, torch, {10: LAYERS[10]})
    again.write(tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == (tmp_path / "whole").read_bytes()


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: os.truncate(path, 300)])
def test_a_damaged_layer_of_an_interrupted_run(damage: Any, torch: Any, tmp_path: Path) -> None:
    killed = ImportanceTap(LAYERS, ORIGIN, tmp_path)
    feed(killed, torch, {3: LAYERS[3]})
    state = killed.state()
    (path,) = tmp_path.iterdir()
    damage(path)
    with pytest.raises(ResourceError, match="with which an interrupted run goes on") as caught:
        ImportanceTap(LAYERS, ORIGIN, tmp_path).restore(state)
    assert str(tmp_path) in str(caught.value.hint)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e30])
def test_inputs_that_overflow_are_refused(value: float, torch: Any, tmp_path: Path) -> None:
    """The largest of them in float32, whose squares are infinite."""
    tap = ImportanceTap(LAYERS, ORIGIN, tmp_path)
    inner = torch.ones(3, 5)
    inner[1, 2] = value
    with pytest.raises(CheckpointError, match="inputs of expert 2 of layer 3 are not finite"):
        tap.inputs(3, 2, torch.ones(3, 6), inner, torch.ones(3))


def test_a_full_disk_leaves_the_older_file(
    torch: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    tap = ImportanceTap(LAYERS, ORIGIN, tmp_path)
    feed(tap, torch)
    path = tmp_path / "file"
    tap.write(path)
    older, before = path.read_bytes(), listed(tmp_path)

    with monkeypatch.context() as patch, pytest.raises(DiskFullError, match=r"file\.ktconv\.part"):
        patch.setattr(os, "posix_fallocate", no_space)
        tap.write(path)
    assert path.read_bytes() == older and listed(tmp_path) == before
    tap.write(path)  # nothing was lost
    assert list(read_importance(path).layers) == [3, 10]


# ---- files that are refused ------------------------------------------------------------


def stored(torch: Any, folder: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Tensors and metadata of a good file."""
    tap = ImportanceTap(LAYERS, ORIGIN, folder)
    feed(tap, torch, most=4)
    tap.write(folder / "good")
    from safetensors import safe_open

    with safe_open(folder / "good", framework="numpy") as file:
        return load_file(folder / "good"), file.metadata()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"layers.3.down": None}, "its tensors are not three of each layer"),
        ({"layers.03.counts": np.ones(4, np.int64)}, "its tensors are not three"),
        ({"more": np.ones(1, np.float32)}, "its tensors are not three"),
        ({"layers.3.gate_up": np.ones((4, 6), np.float16)}, "layers.3.gate_up is F16"),
        ({"layers.3.gate_up": np.ones((3, 6), np.float32)}, "layers.3.counts is I64 .4., not"),
        ({"layers.3.down": np.ones((3, 6), np.float32)}, "layers.3.down is F32 .3, 6., not"),
        ({"layers.3.down": np.ones((4, 0), np.float32)}, "layers.3.down is missing or has shape"),
        ({"layers.3.counts": np.ones(4, np.int32)}, "layers.3.counts is I32"),
        ({"layers.3.counts": np.array([0, 4, 1, -4])}, "negative counts"),
        ({"layers.3.counts": np.array([0, 4, 0, 4])}, "values of experts without tokens"),
        ({"layers.3.down": np.full((4, 5), np.nan, np.float32)}, "negative or not finite"),
        ({"layers.3.down": np.full((4, 5), np.inf, np.float32)}, "negative or not finite"),
        ({"layers.3.down": np.full((4, 5), -1, np.float32)}, "negative or not finite"),
    ],
)
def test_damaged_tensors(changes: dict[str, Any], said: str, torch: Any, tmp_path: Path) -> None:
    tensors, metadata = stored(torch, tmp_path)
    tensors = {name: one for name, one in (tensors | changes).items() if one is not None}
    save_file(tensors, tmp_path / "bad", metadata)
    with pytest.raises(UsageError, match=said) as caught:
        read_importance(tmp_path / "bad")
    assert str(tmp_path / "bad") in str(caught.value) and "--importance FILE" in str(
        caught.value.hint
    )


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"format": "ktconv-hessian"}, "is not a file of ktconv stats --importance"),
        ({"format": None}, "is not a file of ktconv stats --importance"),
        ({"format_version": "2"}, "has version 2 of its format"),
        ({"source_sha256": None}, "its metadata has no source_sha256"),
        ({"tokens": "-1"}, "tokens in its metadata is '-1'"),
        ({"tokens": "9" * 5000}, "tokens in its metadata is '999"),
        ({"tokens": "²"}, "tokens in its metadata is '²'"),
    ],
)
def test_other_metadata(changes: dict[str, Any], said: str, torch: Any, tmp_path: Path) -> None:
    tensors, metadata = stored(torch, tmp_path)
    metadata = {key: one for key, one in (metadata | changes).items() if one is not None}
    save_file(tensors, tmp_path / "bad", metadata)
    with pytest.raises(UsageError, match=said):
        read_importance(tmp_path / "bad")


def test_files_that_are_none(torch: Any, tmp_path: Path) -> None:
    stored(torch, tmp_path)
    good = (tmp_path / "good").read_bytes()
    for name, content in (
        ("empty", b""),
        ("text", b"1, 2, 3 " * 20),
        ("cut", good[:-1]),
        ("cut header", good[:100]),
        ("longer", good + b"\0"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UsageError, match=name) as caught:
            read_importance(tmp_path / name)
        assert "--importance FILE" in str(caught.value.hint)
    for name in ("absent", "."):
        with pytest.raises(UsageError):
            read_importance(tmp_path / name)
