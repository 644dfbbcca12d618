"""Level 1, what lies beside the tensors: configuration, tokenizer, leftovers of other runs."""

from __future__ import annotations

import json
import os
from collections.abc import Set
from contextlib import suppress
from pathlib import Path

from ktconv.checkpoint import read_header
from ktconv.checkpoint.agreement import absent_layers, contradictions
from ktconv.checkpoint.config import CONFIG_NAME, interpret_config, read_config
from ktconv.checkpoint.side_files import (
    RECORDS,
    Record,
    flaws,
    list_side_files,
    record_of,
    recorded,
)
from ktconv.errors import CheckpointError
from ktconv.formats import FORMATS, parse_kt_path, parse_tensor_name
from ktconv.system.regular_files import read_small
from ktconv.system.text import path_text
from ktconv.verify.findings import Findings
from ktconv.verify.side_content import content_differences
from ktconv.verify.subject import Subject
from ktconv.writer.metadata import MANIFEST

LEVEL = "structure"


def check_side_files(subject: Subject, findings: Findings) -> int:
    """They are there, can be read, are what was written and the source's, and fit the tensors.

    Returns how many were held against their checksums.
    """
    records = _records(subject, findings)
    flawed = set()
    for flaw in flaws(subject.directory, records) if records is not None else ():
        findings.fail(LEVEL, flaw.check, f"{flaw.message}.", file=flaw.name)
        flawed.add(flaw.name)
    _against_source(subject, findings, flawed, records is not None)
    _readable(subject, findings)
    _config(subject, findings)
    _leftovers(subject, findings)
    _names_of_files(subject, findings)
    return len(records or _earlier_record(subject))


def _records(subject: Subject, findings: Findings) -> dict[str, Record] | None:
    """What the manifest records of them; None if it does not."""
    if subject.manifest is None:
        return None
    try:
        records = recorded(subject.manifest)
    except CheckpointError as error:
        findings.fail(LEVEL, "manifest", f"{error}.", file=MANIFEST)
        return None
    if records is None:
        _earlier(subject, findings)
    return records


def _earlier(subject: Subject, findings: Findings) -> None:
    """A manifest of an earlier version knows config.json of the source alone."""
    findings.note(
        f"{MANIFEST} was written by an earlier version, which recorded no checksums of side files: "
        f"of these only {CONFIG_NAME} can be checked without the source"
    )
    for name, record in _earlier_record(subject).items():
        with suppress(CheckpointError):  # which other checks report
            if record_of(subject.directory, name)["sha256"] != record["sha256"]:
                message = f"{name} is not the file that was copied."
                findings.fail(LEVEL, "changed file", message, file=name)


def _earlier_record(subject: Subject) -> dict[str, Record]:
    """Of config.json, where it was copied: outputs for GPUs have one of their own."""
    manifest = subject.manifest or {}
    about = manifest.get("source", {}).get("files", {}).get(CONFIG_NAME, {})
    copied = subject.packed.tensors and RECORDS not in manifest and "sha256" in about
    return {CONFIG_NAME: about} if copied else {}


def _against_source(subject: Subject, findings: Findings, flawed: Set[str], recorded: bool) -> None:
    """Everything that the source has is there, byte for byte; `flawed` is known already."""
    planned = subject.plan.sidecars if subject.plan else []
    if CONFIG_NAME not in map(str, planned) and not (subject.directory / CONFIG_NAME).exists():
        planned = [*planned, Path(CONFIG_NAME)]
    for name in planned:
        if path_text(name) in flawed:
            continue
        if not os.path.lexists(subject.directory / name):
            _absent(subject, findings, str(name))
        elif subject.checkpoint is not None:
            _compare(subject, findings, name, recorded)


def _absent(subject: Subject, findings: Findings, name: str) -> None:
    """A failure for our own outputs; other tools leave files out, and folders that were merged
    without a source may have had none."""
    manifest = subject.manifest or {}
    alone = "merged_from" in manifest and not manifest.get("source", {}).get("files")
    if subject.ours and not alone:
        findings.fail(LEVEL, "missing file", f"{subject.directory} has no {name}.", file=name)
    elif not subject.unfinished:
        findings.note(f"{subject.directory} has no {name}, which models need")


def _compare(subject: Subject, findings: Findings, name: Path, recorded: bool) -> None:
    """A file with the source's, which it was copied from."""
    assert subject.checkpoint is not None
    try:
        here = read_small(subject.directory, name)
    except CheckpointError as error:
        findings.fail(LEVEL, "damaged file", f"{error}.", file=str(name))
        return
    there = read_small(subject.checkpoint.path, name)
    if here == there:
        return
    if not subject.ours:
        _compare_content(name, here, there, findings)
    elif recorded and name.name != CONFIG_NAME:  # of which the source's identity tells
        message = f"{name} of the source is not the file that was copied."
        findings.fail(LEVEL, "changed source", message, file=str(name))
    elif not recorded:
        message = f"{name} is not the source's, byte for byte."
        findings.fail(LEVEL, "changed file", message, file=str(name))


def _compare_content(name: Path, here: bytes, there: bytes, findings: Findings) -> None:
    """Other tools may rewrite a file, if it still means the same."""
    found = content_differences(name, here, there, "in the source")
    for difference in found or ():
        findings.fail(LEVEL, "changed file", f"{name}: {difference}.", file=str(name))
    if not found:
        equal = "" if found is None else ", though what it says is"
        findings.note(f"{name} is not the source's{equal}")


def _readable(subject: Subject, findings: Findings) -> None:
    """Every JSON file is JSON; config.json is read elsewhere."""
    for name in list_side_files(subject.directory):
        if name.suffix != ".json" or name.name == CONFIG_NAME:
            continue
        if why := _why_no_json(subject.directory, name):
            findings.fail(LEVEL, "damaged file", f"{why}.", file=name.as_posix())


def _why_no_json(directory: Path, name: Path) -> str | None:
    try:
        json.loads(read_small(directory, name))
    except (ValueError, RecursionError) as error:
        return f"{name} is not JSON: {error}"
    except CheckpointError as error:
        return str(error)
    return None


# ---- config.json against the tensors ----


def _config(subject: Subject, findings: Findings) -> None:
    """The layers, experts and sizes that config.json tells are those of the tensors."""
    if not os.path.lexists(subject.directory / CONFIG_NAME):
        return
    try:
        config = interpret_config(read_config(subject.directory).content)
    except CheckpointError as error:
        findings.fail(LEVEL, "damaged file", f"{str(error).rstrip('.')}.", file=CONFIG_NAME)
        return
    layers = {
        index: (here.experts, here.hidden, here.intermediate)
        for index, here in subject.packed.layers.items()
        if here.format is not None
    }
    for message, layer in contradictions(config, layers):
        findings.fail(LEVEL, "dimensions", f"{message}.", file=CONFIG_NAME, layer=layer)
    if subject.plan or subject.manifest or not subject.packed.layers:  # nothing is absent, or known
        return
    for layer in absent_layers(config, subject.packed.layers):
        message = f"layer {layer} is one of experts by {CONFIG_NAME}, but none are there."
        findings.fail(LEVEL, "dimensions", message, file=CONFIG_NAME, layer=layer)


# ---- other files ----


def _leftovers(subject: Subject, findings: Findings) -> None:
    """KTransformers reads every shard below the directory, whatever the index says."""
    for shard in sorted(subject.directory.rglob("*.safetensors")):
        if shard.parent == subject.directory:
            continue
        try:
            names = [ref.name for ref in read_header(shard).tensors]
        except CheckpointError:
            continue  # nobody can read it
        if any(parse_tensor_name(name) for name in names):
            inside = shard.relative_to(subject.directory).as_posix()
            findings.fail(
                LEVEL,
                "double tensor",
                f"{inside} holds packed experts too, and KTransformers reads every shard below "
                f"{subject.directory}.",
                file=inside,
            )
    if subject.packed.layout == "safetensors":
        folders = sorted(path.name for path in subject.directory.glob("_layer_*"))
        if folders:
            findings.note(f"{', '.join(folders)} beside the shards: not looked at")


def _names_of_files(subject: Subject, findings: Findings) -> None:
    """`.kt` files are found by names that begin with the method."""
    if subject.packed.layout != "layers":
        return
    method = FORMATS[subject.options.method].name
    for place in subject.packed.tensors.values():
        name = place.file.relative_to(subject.directory).as_posix()
        file = parse_kt_path(name)
        if file is not None and file.method != method:
            findings.fail(
                LEVEL, "damaged file", f"{name} is named {file.method}, not {method}.", file=name
            )
