"""Level structure: configuration, tokenizer and leftovers of other runs."""

from __future__ import annotations

import json
import os
from collections.abc import Set
from contextlib import suppress
from pathlib import Path

from ktconv.checkpoint import Checkpoint, read_header
from ktconv.checkpoint.agreement import absent_layers, contradictions
from ktconv.checkpoint.config import CONFIG_NAME, interpret_config, read_config
from ktconv.checkpoint.side_files import (
    RECORDS,
    Record,
    flaws,
    list_side_files,
    record_of,
)
from ktconv.errors import CheckpointError
from ktconv.formats import parse_tensor_name
from ktconv.system.regular_files import read_small
from ktconv.system.text import path_text
from ktconv.verify.findings import Findings
from ktconv.verify.output import OpenedOutput
from ktconv.verify.side_content import content_differences
from ktconv.writer.manifest import MANIFEST

LEVEL = "structure"


def check_side_files(output: OpenedOutput, findings: Findings) -> int:
    """Checks that they exist, are readable, equal what was written and the source's, and fit the
    tensors.

    Returns how many were compared with their checksums.
    """
    records = _records(output, findings)
    flawed = set()
    for flaw in flaws(output.directory, records) if records is not None else ():
        findings.fail(LEVEL, flaw.check, f"{flaw.message}.", file=flaw.name)
        flawed.add(flaw.name)
    _against_source(output, findings, flawed, records is not None)
    _readable(output, findings)
    _config(output, findings)
    _leftovers(output, findings)
    return len(records or _earlier_record(output))


def _records(output: OpenedOutput, findings: Findings) -> dict[str, Record] | None:
    """The records of the manifest; None if it has none."""
    if output.manifest is None:
        return None
    try:
        records = output.manifest.side_files
    except CheckpointError as error:
        findings.fail(LEVEL, "manifest", f"{error}.", file=MANIFEST)
        return None
    if records is None:
        _earlier(output, findings)
    return records


def _earlier(output: OpenedOutput, findings: Findings) -> None:
    """Checks config.json, of which alone manifests of earlier versions have a checksum."""
    findings.note(
        f"{MANIFEST} was written by an earlier version, which recorded no checksums of side files: "
        f"of these only {CONFIG_NAME} can be checked without the source"
    )
    for name, record in _earlier_record(output).items():
        with suppress(CheckpointError):  # reported by other checks
            if record_of(output.directory, name)["sha256"] != record["sha256"]:
                message = f"{name} differs from the file that was copied."
                findings.fail(LEVEL, "changed file", message, file=name)


def _earlier_record(output: OpenedOutput) -> dict[str, Record]:
    """The record of config.json if it was copied: outputs for GPUs have another one."""
    manifest = output.manifest
    if manifest is None or RECORDS in manifest.record:
        return {}
    about = manifest.source_files.get(CONFIG_NAME, {})
    copied = output.packed.tensors and "sha256" in about
    return {CONFIG_NAME: about} if copied else {}


def _against_source(
    output: OpenedOutput, findings: Findings, flawed: Set[str], recorded: bool
) -> None:
    """Checks that files equal the source's; those in `flawed` are reported already."""
    planned = output.plan.sidecars if output.plan else []
    if CONFIG_NAME not in map(str, planned) and not (output.directory / CONFIG_NAME).exists():
        planned = [*planned, Path(CONFIG_NAME)]
    for name in planned:
        if path_text(name) in flawed:
            continue
        if not os.path.lexists(output.directory / name):
            _absent(output, findings, str(name))
        elif output.checkpoint is not None:
            _compare(output, findings, name, recorded)


def _absent(output: OpenedOutput, findings: Findings, name: str) -> None:
    """A failure for our own outputs, a note for others: tools omit files, and folders that were
    merged without a source may have had none."""
    manifest = output.manifest
    if manifest and (manifest.source_files or not manifest.merged):
        findings.fail(LEVEL, "missing file", f"{output.directory} has no {name}.", file=name)
    elif not output.unfinished:
        findings.note(f"{output.directory} has no {name}, which models need")


def _compare(output: OpenedOutput, findings: Findings, name: Path, recorded: bool) -> None:
    """Compares a file with that of the source, which it was copied from."""
    try:
        here = read_small(output.directory, name)
    except CheckpointError as error:
        findings.fail(LEVEL, "damaged file", f"{error}.", file=str(name))
        return
    there = _of_source(output.source, str(name))
    if here == there:
        return
    if not output.ours:
        _compare_content(name, here, there, findings)
    elif recorded and name.name != CONFIG_NAME:  # whose changes the source's identity shows
        message = f"{name} of the source differs from the file that was copied."
        findings.fail(LEVEL, "changed source", message, file=str(name))
    elif not recorded:
        message = f"{name} differs from the source's."
        findings.fail(LEVEL, "changed file", message, file=str(name))


def _of_source(source: Checkpoint, name: str) -> bytes:
    """A side file; that of the metadata where the source has none."""
    if source.side_directory is None:
        return source.made_files[name]
    return read_small(source.side_directory, name)


def _compare_content(name: Path, here: bytes, there: bytes, findings: Findings) -> None:
    """Compares by content, since other tools may rewrite a file."""
    found = content_differences(name, here, there, "in the source")
    for difference in found or ():
        findings.fail(LEVEL, "changed file", f"{name}: {difference}.", file=str(name))
    if not found:
        equal = "" if found is None else ", but equal in content"
        findings.note(f"{name} differs from the source's{equal}")


def _readable(output: OpenedOutput, findings: Findings) -> None:
    """Checks that JSON files can be parsed, apart from config.json, which is read elsewhere."""
    for name in list_side_files(output.directory):
        if name.suffix != ".json" or name.name == CONFIG_NAME:
            continue
        why = None
        try:
            json.loads(read_small(output.directory, name))
        except (ValueError, RecursionError) as error:
            why = f"{name} is not JSON: {error}"
        except CheckpointError as error:
            why = str(error)
        if why is not None:
            findings.fail(LEVEL, "damaged file", f"{why}.", file=name.as_posix())


# ---- config.json against the tensors ----


def _config(output: OpenedOutput, findings: Findings) -> None:
    """Checks that config.json describes the layers, experts and sizes of the tensors."""
    if not os.path.lexists(output.directory / CONFIG_NAME):
        return
    try:
        config = interpret_config(read_config(output.directory).content)
    except CheckpointError as error:
        findings.fail(LEVEL, "damaged file", f"{str(error).rstrip('.')}.", file=CONFIG_NAME)
        return
    dimensions = output.dimensions
    for message, layer in contradictions(config, dimensions):
        findings.fail(LEVEL, "dimensions", f"{message}.", file=CONFIG_NAME, layer=layer)
    present = output.packed.layers or dimensions
    if output.plan or output.manifest or not present:  # absent layers are known, or unknown
        return
    for layer in absent_layers(config, present):
        message = f"layer {layer} is an MoE layer by {CONFIG_NAME}, but has no experts."
        findings.fail(LEVEL, "dimensions", message, file=CONFIG_NAME, layer=layer)


# ---- other files ----


def _leftovers(output: OpenedOutput, findings: Findings) -> None:
    """Checks subdirectories: KTransformers reads every shard in them, whatever the index says."""
    for shard in sorted(output.directory.rglob("*.safetensors")):
        if shard.parent == output.directory:
            continue
        try:
            names = [ref.name for ref in read_header(shard).tensors]
        except CheckpointError:
            continue  # no tool can read it
        if any(parse_tensor_name(name) for name in names):
            inside = shard.relative_to(output.directory).as_posix()
            findings.fail(
                LEVEL,
                "double tensor",
                f"{inside} contains packed experts too, and KTransformers reads every "
                f"shard below {output.directory}.",
                file=inside,
            )
    if output.packed.layout == "safetensors":
        folders = sorted(path.name for path in output.directory.glob("_layer_*"))
        if folders:
            findings.note(f"{', '.join(folders)} beside the shards: not checked")
