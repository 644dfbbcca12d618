"""Faults in the files beside the weights: config, tokenizer, templates, code."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.convert import convert, read_json
from helpers.corrupt import check, earlier_version, forget_manifest, found, record_again

from ktconv.errors import CheckpointError, VerificationError
from ktconv.merge import Request as MergeRequest
from ktconv.merge import merge
from ktconv.repack.reshard import Request as ReshardRequest
from ktconv.repack.reshard import reshard
from ktconv.source.side_files import record_of
from ktconv.verify.side_content import content_differences

pytestmark = pytest.mark.slow

Copy = Callable[..., Path]

FILES = {
    "tokenizer.json": '{"version": "1.0", "model": {"type": "BPE", "vocab": {"a": 0}}}',
    "generation_config.json": '{"do_sample": true, "temperature": 0.7}',
    "chat_template.jinja": "{{ messages }}",
    "modeling_odd.py": "raise SystemExit\n",
    "additional_chat_templates/tool.jinja": "{{ tools }}",
    "LICENSE": "MIT",
}
LAYOUTS = ["safetensors", "layers"]


@pytest.fixture(scope="module")
def furnished(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model with side files of every kind."""
    directory = tmp_path_factory.mktemp("furnished") / "model"
    shutil.copytree(model, directory)
    for name, text in FILES.items():
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_text(text)
    return directory


@pytest.fixture
def output(furnished: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    layout = getattr(request, "param", "safetensors")
    convert(furnished, tmp_path / "out", layout=layout)
    return tmp_path / "out"


def edit(output: Path, **changes: Any) -> None:
    """Changes keys of config.json; None removes one."""
    content = read_json(output / "config.json") | changes
    kept = {key: value for key, value in content.items() if value is not None}
    (output / "config.json").write_text(json.dumps(kept))


# ---- checksums -------------------------------------------------------------------------------


@pytest.mark.parametrize("output", LAYOUTS, indirect=True)
def test_the_manifest_records_every_side_file(output: Path, furnished: Path) -> None:
    records = read_json(output / "ktconv.json")["side_files"]
    assert records == {name: record_of(furnished, name) for name in ("config.json", *FILES)}
    result = check(output)
    assert result.passed and result.facts["structure"]["side_files"] == len(FILES) + 1
    assert check(output, furnished, "structure").passed


@pytest.mark.parametrize("source", [False, True])
@pytest.mark.parametrize("name", ["config.json", *FILES])
def test_a_changed_file(name: str, source: bool, output: Path, furnished: Path) -> None:
    data = (output / name).read_bytes()
    (output / name).write_bytes(data + b" ")
    failures = found(check(output, furnished if source else None, "structure"), "structure",
                     "changed file")  # fmt: skip
    assert [failure["file"] for failure in failures] == [name]


@pytest.mark.parametrize("output", LAYOUTS, indirect=True)
@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_missing_file(name: str, output: Path, furnished: Path) -> None:
    (output / name).unlink()
    for source in (None, furnished):
        failures = found(check(output, source, "structure"), "structure", "missing file")
        assert [failure["file"] for failure in failures] == [name]


@pytest.mark.parametrize(
    "name", ["tokenizer_config.json", "modeling.py", "chat_template.json", "vocab.txt"]
)
def test_a_file_that_was_not_written_and_that_loaders_read(name: str, output: Path) -> None:
    (output / name).write_text("{}")
    failures = found(check(output), "structure", "unexpected file")
    assert [failure["file"] for failure in failures] == [name]


def test_what_its_owner_may_change(output: Path, furnished: Path) -> None:
    (output / "README.md").write_text("better")
    (output / "NOTICE").write_text("thanks")
    assert check(output).passed and check(output, furnished, "structure").passed


@pytest.mark.parametrize("change", [{"num_experts_per_tok": 2}, {"norm_topk_prob": False}])
def test_the_config_of_the_findings(change: dict[str, Any], output: Path) -> None:
    edit(output, **change)
    assert found(check(output), "structure", "changed file")
    (output / "config.json").write_text("{}")
    assert found(check(output), "structure", "changed file")


def test_a_link_out_of_the_output(output: Path, tmp_path: Path) -> None:
    (output / "tokenizer.json").rename(tmp_path / "elsewhere")
    (output / "tokenizer.json").symlink_to(tmp_path / "elsewhere")
    failure = found(check(output), "structure", "damaged file")[0]
    assert failure["file"] == "tokenizer.json" and "outside of" in failure["message"]


def test_a_source_whose_tokenizer_changed(output: Path, furnished: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(furnished, source)
    (source / "tokenizer.json").write_text("{}")
    failures = found(check(output, source, "structure"), "structure", "changed source")
    assert [failure["file"] for failure in failures] == ["tokenizer.json"]


@pytest.mark.parametrize(
    "records", [[], {"a": 1}, {"../config.json": {"bytes": 1, "sha256": "x"}}, {"a": {}}]
)
def test_odd_records(records: Any, output: Path) -> None:
    manifest = read_json(output / "ktconv.json")
    (output / "ktconv.json").write_text(json.dumps(manifest | {"side_files": records}))
    assert found(check(output), "structure", "manifest")


# ---- manifests of earlier versions -----------------------------------------------------------


def test_a_manifest_without_side_files(output: Path, furnished: Path) -> None:
    earlier_version(output)
    for source in (None, furnished):
        result = check(output, source, "structure")
        assert result.passed
        assert any("earlier version" in note for note in result.facts["notes"])
    edit(output, num_experts_per_tok=2)
    failures = found(check(output), "structure", "changed file")
    assert [failure["file"] for failure in failures] == ["config.json"]


# ---- merge and reshard -----------------------------------------------------------------------


@pytest.mark.parametrize("output", ["layers"], indirect=True)
def test_merged_and_resharded(output: Path, furnished: Path, tmp_path: Path) -> None:
    merge(MergeRequest(output, tmp_path / "merged"))
    reshard(ReshardRequest(tmp_path / "merged", tmp_path / "two", numa=2, threads=1))
    for made in (tmp_path / "merged", tmp_path / "two"):
        assert check(made, furnished, "structure").passed
        assert (made / "tokenizer.json").read_text() == FILES["tokenizer.json"]
        (made / "tokenizer.json").write_text("{}")
        assert found(check(made), "structure", "changed file")


@pytest.mark.parametrize("fault", ["changed", "missing", "more"])
@pytest.mark.parametrize("output", ["layers"], indirect=True)
def test_merge_and_reshard_do_not_take_what_is_not_recorded(
    fault: str, output: Path, tmp_path: Path
) -> None:
    name = "added_tokens.json" if fault == "more" else "tokenizer.json"
    if fault == "missing":
        (output / name).unlink()
    else:
        (output / name).write_text("{}")
    with pytest.raises((VerificationError, CheckpointError), match=name):
        merge(MergeRequest(output, tmp_path / "merged"))
    with pytest.raises((VerificationError, CheckpointError), match=name):
        reshard(ReshardRequest(output, tmp_path / "two", numa=2, threads=1))


# ---- forged records, no records --------------------------------------------------------------


def test_forged_records_are_found_with_the_source(output: Path, furnished: Path) -> None:
    (output / "tokenizer.json").write_text("{}")
    record_again(output)
    assert check(output).passed  # nothing can tell
    assert not check(output, furnished, "structure").passed


CHANGES: dict[str, Any] = {
    "top-k": (
        "config.json",
        {"num_experts_per_tok": 2},
        "num_experts_per_tok is 2, but not given in the source",
    ),
    "normalisation": ("config.json", {"norm_topk_prob": True}, "norm_topk_prob is true"),
    "norms": ("config.json", {"rms_norm_eps": 0.1}, "rms_norm_eps is 0.1"),
    "scoring": ("config.json", {"scoring_func": "sigmoid"}, "scoring_func"),
    "rope": ("config.json", {"rope_theta": 3.0}, "rope_theta is 3.0"),
    "quantization": ("config.json", {"quantization_config": {"a": 1}}, "quantization_config.a"),
    "sampling": ("generation_config.json", {"temperature": 9}, "temperature is 9, but 0.7"),
    "vocabulary": ("tokenizer.json", {"model": {"vocab": {"b": 0}}}, "model.vocab.b is 0"),
}


@pytest.mark.parametrize("output", LAYOUTS, indirect=True)
@pytest.mark.parametrize("change", CHANGES)
def test_what_computes_differs_and_there_is_no_manifest(
    change: str, output: Path, furnished: Path
) -> None:
    """Whatever tool wrote it."""
    name, changes, words = CHANGES[change]
    forget_manifest(output)
    assert check(output, furnished, "structure").passed
    content = read_json(output / name)
    (output / name).write_text(json.dumps(content | changes))
    for level in ("structure", "weights"):
        failures = found(check(output, furnished, level), "structure", "changed file")
        assert {failure["file"] for failure in failures} == {name}
        assert any(words in failure["message"] for failure in failures)


@pytest.mark.parametrize("name", ["chat_template.jinja", "modeling_odd.py"])
def test_code_and_templates_that_differ(name: str, output: Path, furnished: Path) -> None:
    (forget_manifest(output) / name).write_text("other")
    failures = found(check(output, furnished, "structure"), "structure", "changed file")
    assert [failure["file"] for failure in failures] == [name]


def test_rewritten_files_are_a_note(output: Path, furnished: Path) -> None:
    """As other tools do it: order, white space, and keys without an effect."""
    forget_manifest(output)
    edit(output, transformers_version="9.9", pad_token_id=None, initializer_range=0.5)
    content = read_json(output / "tokenizer.json") | {"version": "2.0", "truncation": None}
    content["model"] |= {"ignore_merges": False}
    (output / "tokenizer.json").write_text(json.dumps(content, indent=7))
    (output / "LICENSE").write_text("MIT, too")
    result = check(output, furnished, "structure")
    assert result.passed
    for name in ("config.json", "tokenizer.json", "LICENSE"):
        assert any(f"{name} differs from the source's" in note for note in result.facts["notes"])


def test_a_licence_that_an_earlier_version_did_not_copy(output: Path, furnished: Path) -> None:
    """A note; one that the manifest records is missing."""
    (output / "LICENSE").unlink()
    failures = found(check(output, furnished, "structure"), "structure", "missing file")
    assert [failure["file"] for failure in failures] == ["LICENSE"]
    manifest = read_json(output / "ktconv.json")
    del manifest["side_files"]["LICENSE"]
    (output / "ktconv.json").write_text(json.dumps(manifest))
    result = check(output, furnished, "structure")
    assert result.passed
    assert any("no LICENSE, a licence" in note for note in result.facts["notes"])


def test_merges_in_two_spellings() -> None:
    old, new = (
        json.dumps({"model": {"merges": merges}}).encode() for merges in (["a b"], [["a", "b"]])
    )
    name = Path("tokenizer.json")
    assert content_differences(name, old, new, "in the source") == []
    assert content_differences(name, old, b'{"model": {"merges": ["a c"]}}', "in the source")
    assert content_differences(name, old, b"[]", "in the source")
    assert content_differences(name, old, b"[" * 100_000, "in the source")


# ---- with a manifest that was forged -----------------------------------------------------


@pytest.mark.parametrize("output", LAYOUTS, indirect=True)
@pytest.mark.parametrize("key", ["num_experts_per_tok", "norm_topk_prob", "rope_theta"])
def test_config_is_compared_whatever_the_manifest_says(
    key: str, output: Path, furnished: Path
) -> None:
    edit(output, **{key: 1})
    record_again(output, "config.json")
    for level in ("structure", "weights"):
        failures = found(check(output, furnished, level), "structure", "changed file")
        assert [failure["file"] for failure in failures] == ["config.json"]
        assert "differs from the source's" in failures[0]["message"]
    manifest = read_json(output / "ktconv.json")
    del manifest["source"]["files"]["config.json"]
    (output / "ktconv.json").write_text(json.dumps(manifest))
    found(check(output, furnished, "structure"), "structure", "changed file")


def test_a_changed_source_is_told_from_a_changed_output(output: Path, furnished: Path) -> None:
    """Once, and not as a fault of the output."""
    before = (furnished / "config.json").read_bytes()
    try:
        content = json.loads(before) | {"rope_theta": 7}
        (furnished / "config.json").write_text(json.dumps(content))
        failures = found(check(output, furnished, "structure"), "structure", "changed source")
        assert [failure["file"] for failure in failures] == ["config.json"]
    finally:
        (furnished / "config.json").write_bytes(before)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-8-sig", "utf-32", "latin-1"])
@pytest.mark.parametrize("name", list(FILES)[:3])
def test_text_that_engines_cannot_read(
    name: str, encoding: str, output: Path, furnished: Path
) -> None:
    """Also of an output without a manifest, and of ours where somebody wrote the manifest anew."""
    text = (output / name).read_text()
    text = text.replace("1.0", "é").replace("true", '"é"').replace("messages", "é")
    (output / name).write_bytes(text.encode(encoding))
    record_again(output)
    for level in (None, furnished):
        failures = check(output, level, "structure").failures
        assert ("damaged file", name) in {(one.check, one.file) for one in failures}
    forget_manifest(output)
    failures = check(output, None, "structure").failures
    assert ("damaged file", name) in {(one.check, one.file) for one in failures}
