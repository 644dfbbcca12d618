"""`ktconv verify` as users type it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import get_args

import pytest
from helpers.cli import ktconv, ktconv_done
from helpers.families import numbered, random_weights, simple_config, write_checkpoint

from ktconv.cli.verify import Level, verify
from ktconv.errors import ResourceError, UsageError
from ktconv.verify import LEVELS, VerifyRequest, command
from ktconv.verify.run import unwatched

pytestmark = pytest.mark.slow

Convert = Callable[..., Path]


def test_levels_of_the_command() -> None:
    assert get_args(Level) == LEVELS


def test_defaults_of_the_command(tmp_path: Path) -> None:
    """The command line has those of the library."""
    ours, request = signature(verify).parameters, VerifyRequest(tmp_path)
    for name in ("source", "level", "sample", "seed", "tokens", "text", "windows", "beside"):
        assert ours[name].default == getattr(request, name), name
    for name in ("max_ppl_increase", "max_kl"):
        assert ours[name].default == getattr(request.thresholds, name), name


def test_a_sound_output_passes_with_a_report(
    model: Path, converted: Convert, tmp_path: Path
) -> None:
    report = tmp_path / "report.html"
    done = ktconv(
        "verify", converted(), "--source", model, "--level", "weights", "--report", report
    )
    assert done.exit_code == 0, done.stderr
    assert "structure  ok" in done.stdout and "weights    ok" in done.stdout
    assert done.stdout.rstrip().splitlines()[-1].startswith(f"{converted()}: OK, verified to level")
    assert "ETA" in done.stderr
    page = report.read_text(encoding="utf-8")
    assert page.lstrip().lower().startswith("<!doctype html") and str(converted()) in page


def test_verify_json(model: Path, converted: Convert) -> None:
    done = ktconv("verify", converted(), "--source", model, "--level", "weights", "--json")
    facts = json.loads(done.stdout)
    assert facts["schema"] == 1 and facts["passed"] is True and facts["level"] == "weights"
    assert {"failures", "weights", "layers", "model"} <= facts.keys()
    assert facts["weights"]["passed"] and facts["layers"] is None


@pytest.mark.parametrize("scale", ["amax", "search"])
@pytest.mark.parametrize("method", ["int4", "int8", "rawint4", "int4-g64", "int8-g128"])
def test_a_bound_is_only_named_where_there_is_one(method: str, scale: str, tmp_path: Path) -> None:
    """A search of group scales may cut weights off, "at most 1.7 steps off (0.5 allowed)"."""
    weights = random_weights()
    weights.up[:, :, 5] = 3.5  # times the standard deviation of the others
    tensors = numbered("model.layers.0.mlp.experts", weights)
    model = write_checkpoint(tmp_path / "model", tensors, simple_config())
    numa = ("--numa=1",) if method in ("int4", "int8") else ()
    ktconv_done(
        "quantize-cpu", model, tmp_path / "out", "--method", method, "--scale", scale, *numa
    )
    words = ("verify", tmp_path / "out", "--source", model, "--level", "weights")
    about = json.loads(ktconv_done(*words, "--json"))["weights"]
    bound, largest, said = about["bound_steps"], about["max_error_steps"], ktconv_done(*words)
    assert (bound is None) == (scale == "search" and not numa)
    assert largest > 1 if bound is None else largest <= bound
    assert ("allowed)" in said) == (bound is not None)


def test_failure(model: Path, damaged: Convert) -> None:
    output = damaged()
    shard = min(output.glob("*.safetensors"))
    with shard.open("r+b") as file:
        file.seek(-1, 2)
        last = file.read(1)
        file.seek(-1, 2)
        file.write(bytes([last[0] ^ 1]))
    done = ktconv("verify", output)
    assert done.exit_code == 1
    assert done.stdout.startswith("structure, checksum: ")
    assert "FAILED" in done.stdout.splitlines()[-1]
    assert "Traceback" not in done.stderr
    facts = json.loads(ktconv("verify", output, "--json").stdout)
    assert facts["passed"] is False and facts["failure_count"] == len(facts["failures"]) == 1


def test_verify_with_two_outputs_compares_them(converted: Convert, damaged: Convert) -> None:
    done = ktconv("verify", converted("int4", 2), converted("int4", 2, "layers"))
    assert done.exit_code == 0 and "equal bytes" in done.stdout
    done = ktconv("verify", converted("int4", 2), converted("int4", 1), "--json")
    assert done.exit_code == 1
    facts = json.loads(done.stdout)
    assert facts["kind"] == "comparison" and facts["verdict"] == "different"


@pytest.mark.parametrize(
    ("words", "phrase"),
    [
        (["--level", "weights"], "--level weights needs the source"),
        (["--level", "everything"], "Invalid value"),
        (["--sample", "0"], "--sample must be in (0, 1], got 0"),
        (["--sample", "2"], "--sample must be in (0, 1], got 2"),
        (["--report", "report.txt"], "--report report.txt does not end in .html"),
        (["--report", "no/such/place/report.html"], "cannot be written"),
        (["--source", "no/such/model"], "no/such/model"),
        (["--tokens", "0"], "Invalid value"),
        (["--max-kl", "-1"], "Invalid value"),
    ],
)
def test_bad_usage(words: list[str], phrase: str, converted: Convert) -> None:
    done = ktconv("verify", converted(), *words)
    assert done.exit_code == 2, done.stdout
    assert phrase in done.stderr and "Traceback" not in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize("option", ["--source", "--text", "--level", "--max-kl"])
def test_options_without_meaning_for_two(option: str, converted: Convert) -> None:
    values = {"--level": "weights", "--max-kl": "1"}
    value = values.get(option, "README.md")
    done = ktconv("verify", converted(), converted("int8"), option, value)
    assert done.exit_code == 2 and f"{option} does not apply" in done.stderr


@pytest.mark.parametrize("level", ["weights", "layers"])
@pytest.mark.parametrize("text", [None, b"", b" \n", b"\xff\xfe\x00"])
def test_text_that_is_none(
    text: bytes | None, level: str, model: Path, converted: Convert, tmp_path: Path
) -> None:
    """Told before anything is read, at whatever level."""
    path = tmp_path / "file.txt"
    if text is not None:
        path.write_bytes(text)
    request = VerifyRequest(converted(), source=str(model), level=level, text=path)
    with pytest.raises(UsageError, match=f"--text {path} (cannot be read|is empty)"):
        command.run(request, unwatched, print)


def test_verify_where_no_output_is(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing"):
        done = ktconv("verify", path)
        assert done.exit_code == 2 and "quantize-cpu" in done.stderr


def test_unfinished_conversion(damaged: Convert) -> None:
    output = damaged()
    (output / ".ktconv").mkdir()
    (output / ".ktconv/run.json").write_text("{}")
    shutil.copy(output / "ktconv.json", output / ".ktconv/run.json")
    done = ktconv("verify", output)
    assert done.exit_code == 1 and "is incomplete" in done.stdout


def test_report_of_two_conversions(converted: Convert, tmp_path: Path) -> None:
    report = tmp_path / "two.html"
    done = ktconv("verify", converted("int4", 2), converted("int4", 1), "--report", report)
    assert done.exit_code == 1
    page = report.read_text(encoding="utf-8")
    assert "Two conversions: different" in page and 'class="verdict fail"' in page
    assert "each part has scales of its own" in page and "NUMA parts of B" in page
    assert "expert matrices, " in page and "side files compared" in page


def test_report_that_cannot_be_written(converted: Convert, tmp_path: Path) -> None:
    """A directory is there, or none: told before anything is read, and nothing is left."""
    (tmp_path / "taken.html").mkdir()
    for path in (tmp_path / "taken.html", tmp_path / "no" / "report.html"):
        done = ktconv("verify", converted(), "--report", path)
        assert done.exit_code == 2 and f"--report {path} cannot be written" in done.stderr
        assert done.stdout == "" and "ETA" not in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["taken.html"]


def test_full_disk_for_the_report(
    converted: Convert, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was found is told nevertheless."""

    def full(*_: object) -> None:
        raise ResourceError("cannot write report.html: the disk is full")

    monkeypatch.setattr("ktconv.writer.option_files.write_durably", full)
    said: list[str] = []
    page = tmp_path / "report.html"
    with pytest.raises(ResourceError, match="the disk is full"):
        command.run(VerifyRequest(converted()), unwatched, said.append, report=page)
    assert said[-1].startswith(f"{converted()}: OK, verified to level")


def test_links_in_a_circle(converted: Convert, tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    for words in ([tmp_path / "a", converted()], [converted(), tmp_path / "a"]):
        said = ktconv("verify", *words)
        assert said.exit_code == 2 and "Traceback" not in said.stderr


@pytest.mark.parametrize("words", [["--download"], ["--revision", "main"], ["--cache-dir", "c"]])
def test_options_of_a_source_that_is_not_given(words: list[str], converted: Convert) -> None:
    said = ktconv("verify", converted(), *words)
    assert said.exit_code == 2 and f"{words[0]} belongs to --source" in said.stderr
