"""Which files a GGUF model consists of: single ones, splits, directories, the hub's cache."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.families import HIDDEN
from helpers.gguf_files import (
    INNER,
    around,
    experts,
    link_into_cache,
    metadata,
    model,
    write_gguf,
)

from ktconv.errors import CheckpointError
from ktconv.source import open_checkpoint
from ktconv.source.locate import locate_model


def refusal(place: Path | str) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(place)
    assert caught.value.hint
    return str(caught.value)


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model(tmp_path_factory.mktemp("single"), layers=2)


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four parts of at most four tensors."""
    return model(tmp_path_factory.mktemp("split"), layers=3, per_file=4)


def copy(split: Path, directory: Path) -> list[Path]:
    directory.mkdir(exist_ok=True)
    return [Path(shutil.copy2(file, directory)) for file in sorted(split.parent.iterdir())]


# ---- one file and several --------------------------------------------------------------


def test_a_file_and_its_directory(single: Path, tmp_path: Path) -> None:
    for place in (single, single.parent, str(single)):
        checkpoint = open_checkpoint(place)
        assert checkpoint.is_gguf and checkpoint.path == single
        assert [layer.index for layer in checkpoint.layers] == [0, 1]
        assert [source.name for source in checkpoint.sources] == ["tiny-moe.gguf"]
    nameless = tmp_path / "sha256-0123"  # as some tools store downloads
    shutil.copy(single, nameless)
    assert len(open_checkpoint(nameless).layers) == 2


def test_every_part_means_all(split: Path) -> None:
    parts = sorted(split.parent.iterdir())
    assert len(parts) == 4
    for place in (*parts, split.parent):
        checkpoint = open_checkpoint(place)
        assert checkpoint.files == parts and checkpoint.path == parts[0]
        assert [layer.index for layer in checkpoint.layers] == [0, 1, 2]
    assert len(checkpoint.sources) == 4


def test_missing_parts(split: Path, tmp_path: Path) -> None:
    parts = copy(split, tmp_path / "m")
    parts[1].unlink()
    parts[3].unlink()
    message = refusal(parts[0])
    assert "2 of the 4 parts of" in message
    assert "tiny-moe-00002-of-00004.gguf, tiny-moe-00004-of-00004.gguf" in message
    assert "2 of the 4 parts" in refusal(tmp_path / "m")


def test_parts_that_were_renamed(split: Path, tmp_path: Path) -> None:
    parts = copy(split, tmp_path / "m")
    parts[1].rename(tmp_path / "third")
    parts[2].rename(parts[1])
    (tmp_path / "third").rename(parts[2])
    assert "is part 3 of 4 (split.no, split.count), but its name says part 2 of 4" in refusal(
        parts[0]
    )
    lone = tmp_path / "lone.gguf"
    shutil.copy(parts[0], lone)
    assert "lone.gguf is part 1 of 4, but its name does not say so" in refusal(lone)
    odd = tmp_path / "m-00003-of-00002.gguf"
    shutil.copy(parts[0], odd)
    assert "is called part 3 of 2, which cannot be" in refusal(odd)


def test_parts_of_two_splits(split: Path, tmp_path: Path) -> None:
    """A part of another quantization with another number of tensors; and no split at all."""
    parts = copy(split, tmp_path / "m")
    other = model(tmp_path / "other", layers=3, per_file=5)
    assert len(list(other.parent.iterdir())) == 4
    shutil.copy(sorted(other.parent.iterdir())[1], parts[1])
    assert "parts together have 16 tensors (split.tensors.count), but" in refusal(parts[0])
    shutil.copy(parts[2], parts[1])  # with the numbers of the second part
    data = parts[1].read_bytes()
    at = data.index(b"split.no") + len(b"split.no") + 4
    parts[1].write_bytes(data[:at] + b"\1" + data[at + 1 :])
    assert "tensor 'blk." in refusal(parts[0]) and "is in both" in refusal(parts[0])
    short = write_gguf(tmp_path / "short.gguf", {"x": np.ones(32, np.float32)})
    shutil.copy(short, parts[1])
    assert "is part of a split, but has no split.count" in refusal(parts[0])


def test_a_declared_count_of_tensors(tmp_path: Path, split: Path) -> None:
    parts = copy(split, tmp_path / "m")
    data = parts[2].read_bytes()
    key = b"split.tensors.count"
    at = data.index(key) + len(key) + 4
    parts[2].write_bytes(data[:at] + (99).to_bytes(4, "little") + data[at + 4 :])
    message = refusal(parts[0])
    assert "00003-of-00004.gguf says that all parts together have 99 tensors" in message
    assert "but they have 16" in message


def test_a_truncated_part(tmp_path: Path, split: Path) -> None:
    parts = copy(split, tmp_path / "m")
    parts[3].write_bytes(parts[3].read_bytes()[:-4])
    assert "00004-of-00004.gguf" in refusal(parts[0])


def test_links_and_pipes(tmp_path: Path) -> None:
    (tmp_path / "link.gguf").symlink_to(tmp_path / "nothing")
    assert "link.gguf" in refusal(tmp_path) and "link" in refusal(tmp_path)
    (tmp_path / "link.gguf").unlink()
    os.mkfifo(tmp_path / "pipe.gguf")
    for place in (tmp_path, tmp_path / "pipe.gguf"):
        assert "pipe.gguf is " in refusal(place)


# ---- several models --------------------------------------------------------------------


def test_several_models_in_a_directory(single: Path, tmp_path: Path) -> None:
    for name in ("m-Q4_K_M.gguf", "m-Q8_0.gguf", "mmproj-F16.gguf"):
        shutil.copy(single, tmp_path / name)
    message = refusal(tmp_path)
    assert "contains 3 GGUF models: m-Q4_K_M, m-Q8_0, mmproj-F16" in message
    assert locate_model(tmp_path / "m-Q8_0.gguf") == tmp_path / "m-Q8_0.gguf"


def test_safetensors_beside_gguf(single: Path, tmp_path: Path) -> None:
    shutil.copy(single, tmp_path)
    (tmp_path / "model.safetensors").touch()
    assert locate_model(tmp_path) == tmp_path


def test_subdirectories(single: Path, split: Path, tmp_path: Path) -> None:
    """As repositories with several quantizations have them."""
    copy(split, tmp_path / "Q4_K_M")
    assert locate_model(tmp_path) == tmp_path / "Q4_K_M" / split.name
    (tmp_path / "Q8_0").mkdir()
    shutil.copy(single, tmp_path / "Q8_0")
    assert "2 GGUF models: Q4_K_M/tiny-moe, Q8_0/tiny-moe" in refusal(tmp_path)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    constants: Any = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    return tmp_path


def test_models_of_the_hub(cache: Path, single: Path, split: Path) -> None:
    snapshot = link_into_cache(cache, "org/one-GGUF", [single])
    assert locate_model("org/one-GGUF") == snapshot / single.name
    assert len(open_checkpoint("org/one-GGUF").layers) == 2
    whole = link_into_cache(cache, "org/two-GGUF", sorted(split.parent.iterdir()), "UD-Q4_K_XL")
    link_into_cache(cache, "org/two-GGUF", [single], "Q8_0")
    assert "org/two-GGUF:NAME" in hint("org/two-GGUF")
    for name in ("UD-Q4_K_XL", "q4_k_xl", "UD-Q4_K_XL/tiny-moe", f"UD-Q4_K_XL/{split.name}"):
        assert locate_model(f"org/two-GGUF:{name}") == whole / split.name
    assert locate_model("org/two-GGUF:Q8_0").parent.name == "Q8_0"
    assert "2 GGUF models" in refusal("org/two-GGUF:tiny-moe")
    message = refusal("org/two-GGUF:Q4_K")
    assert "no GGUF model called Q4_K; there are Q8_0/tiny-moe, UD-Q4_K_XL/tiny-moe" in message


def hint(place: str) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(place)
    return str(caught.value.hint)


# ---- files that are no models ----------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "architecture", "words"),
    [
        ("imatrix", "qwen3moe", "an importance matrix"),
        ("mmproj", "clip", "the projector of a multimodal model"),
        ("", "clip", "the projector of a multimodal model"),
        ("adapter", "qwen3moe", "a LoRA adapter"),
        ("vocab", "qwen3moe", "a vocabulary"),
    ],
)
def test_files_that_are_no_models(kind: str, architecture: str, words: str, tmp_path: Path) -> None:
    general = {"type": kind} if kind else None
    path = write_gguf(
        tmp_path / "x.gguf", experts() | around(), architecture=architecture, general=general
    )
    assert f"x.gguf is {words}" in refusal(path)


def test_importance_matrices_by_name(tmp_path: Path) -> None:
    for name in ("x.imatrix", "imatrix.dat"):
        (tmp_path / name).write_bytes(bytes(20))
        assert "is an importance matrix, not a model" in refusal(tmp_path / name)


def test_architectures_that_are_refused(tmp_path: Path) -> None:
    tensors = experts() | around()
    path = write_gguf(tmp_path / "g.gguf", tensors, architecture="grovemoe")
    assert "architecture grovemoe, which is not supported: it has chunk experts" in refusal(path)
    chunks = {"blk.0.ffn_gate_chexps.weight": np.ones((2, INNER, HIDDEN), np.float32)}
    path = write_gguf(tmp_path / "c.gguf", tensors | chunks)
    assert "blk.0.ffn_gate_chexps.weight is a matrix of chunk experts" in refusal(path)


@pytest.mark.parametrize("name", ["ffn_side_exps.weight", "ffn_gate_exps.0.weight"])
def test_a_tensor_of_experts_that_is_not_known(name: str, tmp_path: Path) -> None:
    norm = {"blk.0.ffn_norm_exps.weight": np.ones(HIDDEN, np.float32)}  # of Arctic: no experts'
    path = write_gguf(tmp_path / "a.gguf", experts() | norm)
    assert [one.name for one in open_checkpoint(path).other_tensors] == list(norm)
    more = {f"blk.0.{name}": np.ones((INNER, HIDDEN), np.float32)}
    path = write_gguf(tmp_path / "b.gguf", experts() | norm | more)
    assert f"blk.0.{name} is not a known tensor of experts" in refusal(path)


def test_a_dense_model(tmp_path: Path) -> None:
    dense = {"blk.0.ffn_gate.weight": np.ones((INNER, HIDDEN), np.float32)}
    path = write_gguf(tmp_path / "d.gguf", dense, metadata(expert_count=None))
    assert "no MoE layer was found" in refusal(path)
