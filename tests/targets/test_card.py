"""Model cards: what they take over from the source's, held against the hub's own library."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from helpers.cli import write_model
from helpers.convert import all_files, convert

from ktconv.conversion.records import ErrorSummary
from ktconv.errors import ResourceError
from ktconv.merge import Request as MergeRequest
from ktconv.merge import merge
from ktconv.repack.reshard import Request as ReshardRequest
from ktconv.repack.reshard import reshard
from ktconv.source.source_card import SourceCard, front_matter, hub_id
from ktconv.targets.card import header, yaml_string

yaml = pytest.importorskip("yaml")
hub = pytest.importorskip("huggingface_hub")

CARD = """---
# a comment
base_model:
  - org/some-base  # what it was made from
license: other
license_name: "some-licence"
license_link: LICENSE
language: [en, "no", fr]
pipeline_tag: image-text-to-text
tags:
- secret-of-the-source
widget:
  - text: "hello: world"
    license: mit
---
# A model

license: apache-2.0
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_model(tmp_path_factory.mktemp("card") / "model", layers=1, experts=2, inner=256)
    (path / "README.md").write_text(CARD)
    (path / "LICENSE").write_text("Do what is right.\n")
    return path


def data_of(output: Path) -> dict[str, Any]:
    """The YAML of a card as the hub's library reads it."""
    found: dict[str, Any] = hub.ModelCard.load(output / "README.md").data.to_dict()
    return found


def test_a_conversion(model: Path, tmp_path: Path) -> None:
    convert(model, tmp_path / "out")
    assert data_of(tmp_path / "out") == {
        "base_model": "org/some-base",
        "base_model_relation": "quantized",
        "library_name": "ktransformers",
        "pipeline_tag": "image-text-to-text",
        "license": "other",
        "license_name": "some-licence",
        "license_link": "LICENSE",
        "language": ["en", "no", "fr"],
        "tags": ["ktconv", "mixture-of-experts", "int4"],
    }
    assert (tmp_path / "out" / "LICENSE").read_bytes() == (model / "LICENSE").read_bytes()
    text = (tmp_path / "out" / "README.md").read_text()
    assert "Relative RMS error of the weights: mean 0." in text


def test_the_card_goes_on_to_what_is_made_from_outputs(model: Path, tmp_path: Path) -> None:
    convert(model, tmp_path / "folders", layout="layers")
    merge(MergeRequest(tmp_path / "folders", tmp_path / "merged"))
    reshard(ReshardRequest(tmp_path / "merged", tmp_path / "resharded", 2))
    expected = data_of(tmp_path / "folders")
    for name in ("merged", "resharded"):
        assert data_of(tmp_path / name) == expected
        assert (tmp_path / name / "LICENSE").is_file()
    # The same bytes have the same errors; those of rows that were split are not known.
    texts = {name: (tmp_path / name / "README.md").read_text() for name in ("folders", "merged")}
    lines = [re.findall("Relative RMS error.*", text) for text in texts.values()]
    assert lines[0] == lines[1] != []
    assert "Relative RMS" not in (tmp_path / "resharded" / "README.md").read_text()


def test_the_order_of_threads_leaves_no_trace(tmp_path: Path) -> None:
    """The errors that a card names are sums over units, which finish in any order."""
    source = write_model(tmp_path / "model", layers=3)
    for threads in (1, 4):
        convert(source, tmp_path / f"out-{threads}", threads=threads)
    assert all_files(tmp_path / "out-1") == all_files(tmp_path / "out-4")
    records = [{"tensors": {"a": {"relative_rms_error": x}}} for x in (0.1, 1e9, 1e-9, 0.2)]
    sums = [ErrorSummary(), ErrorSummary()]
    for record, mirrored in zip(records, reversed(records), strict=True):
        sums[0].add(record)
        sums[1].add(mirrored)
    assert sums[0].mean == sums[1].mean and sums[0].worst == sums[1].worst


def test_a_source_from_the_hub(model: Path, tmp_path: Path) -> None:
    """It is the base model itself; a licence that is not copied is linked to there."""
    snapshot = tmp_path / "models--org--some-moe" / "snapshots" / "0123abc"
    shutil.copytree(model, snapshot)
    (snapshot / "LICENSE").unlink()
    convert(snapshot, tmp_path / "out")
    data = data_of(tmp_path / "out")
    assert data["base_model"] == "org/some-moe"
    assert data["license_link"] == "https://huggingface.co/org/some-moe/blob/main/LICENSE"
    card = (tmp_path / "out" / "README.md").read_text()
    assert "ktconv quantize-cpu hf://org/some-moe@0123abc OUTPUT" in card


@pytest.mark.parametrize(
    ("model", "path", "expected"),
    [
        ("hf://org/name", "/tmp/x/name", "org/name"),
        ("hf://org/name@v1.0/folder:Q4", "/tmp/x/name", "org/name"),
        ("org/name", "/hub/models--org--name/snapshots/0", "org/name"),
        ("org/name", "org/name", None),  # a directory here
        ("s3://org/name", "/tmp/x/name", None),
        ("hf://org/na\nme", "/tmp/x/name", None),
        (".", "/hub/models--org\n--name/snapshots/0", None),
    ],
)
def test_hub_id(model: str, path: str, expected: str | None) -> None:
    assert hub_id(model, Path(path)) == expected


def test_nothing_is_known(tmp_path: Path) -> None:
    """The hub refuses a base model that it does not have, so none is named."""
    convert(write_model(tmp_path / "model", layers=1), tmp_path / "out")
    data = data_of(tmp_path / "out")
    assert "base_model" not in data and "base_model_relation" not in data and "license" not in data
    assert data["pipeline_tag"] == "text-generation"


@pytest.mark.parametrize("content", [b"", b"\xff\xfe---", b"---\nlicense: mit\n", b"\0" * 100])
def test_a_readme_that_is_no_card(content: bytes, tmp_path: Path) -> None:
    source = write_model(tmp_path / "model", layers=1)
    (source / "README.md").write_bytes(content)
    convert(source, tmp_path / "out")
    assert "license" not in data_of(tmp_path / "out")


def test_a_card_that_cannot_be_read_is_named_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_model(tmp_path / "model", layers=1)

    def refuse(directory: Path, name: str, limit: int) -> bytes:
        raise ResourceError(f"{directory / name} cannot be read: Input/output error")

    monkeypatch.setattr("ktconv.source.source_card.read_small", refuse)
    with pytest.raises(ResourceError, match=r"README\.md cannot be read"):
        convert(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


FRONTS = [
    "license: mit",
    "license: 'apache-2.0'   # comment",
    "license: no",
    "license: 1.0",
    "license: 2024-01-01",
    "license: ~",
    "license: [mit, bsd]",
    "license: [mit, [bsd]]",
    "license: &anchor mit",
    "license: !!str mit",
    "license: |\n  mit",
    "license: mit\n  more",
    'license: "mi\\x74"',
    "license: {a: b}",
    "license:\n- mit\n- bsd",
    "license:\n  - mit\n  -   bsd",
    "license:\n  name: mit",
    "license:",
    "license:\n# nothing\nlanguage: en",
    "license_name: a b, c",
    "license_name: it's so",
    "license_name: 'it''s so'",
    "license_link: https://host/a?b=c#d",
    "language:\n- en\n- yes",
    "other:\n  license: mit\nlanguage: en",
    "other: >\n  license: mit\n  x\nlanguage: en",
    "- license: mit",
]


@pytest.mark.parametrize("front", FRONTS)
def test_front_matter_is_what_yaml_says(front: str) -> None:
    """What is found is what YAML says; the rarer forms count as absent."""
    found = front_matter(f"---\n{front}\n---\n")
    whole = yaml.safe_load(front)
    for key, values in found.items():
        there = whole[key]
        assert list(values) == (there if isinstance(there, list) else [there])


def test_front_matter_finds_usual_forms() -> None:
    found = front_matter(CARD)
    assert found["license"] == ("other",) and found["language"] == ("en", "no", "fr")
    assert found["base_model"] == ("org/some-base",) and "widget" not in found
    assert front_matter("---\nlicense: mit\nlicense: bsd\n---\n") == {}
    assert front_matter("license: mit\n---\n") == {}
    assert front_matter("---\nlicense_link: a: b\n---\n") == {}  # no YAML at all


NASTY = ["mit", "no", "1.0", "a: b", "#x", "- x", '"', "'", "\n", "é", "null", "{}", "a#b", "", "Y"]


def test_what_is_written_is_what_was_meant() -> None:
    assert [yaml.safe_load(f"a: {yaml_string(text)}")["a"] for text in NASTY] == NASTY
    source = SourceCard(base_model=("a/b", "c/d"), license=("mit",), language=("no",))
    found = yaml.safe_load(header(source, "ktconv", NASTY))
    assert found["base_model"] == ["a/b", "c/d"] and found["tags"] == NASTY
    assert found["language"] == ["no"] and found["license"] == "mit"
