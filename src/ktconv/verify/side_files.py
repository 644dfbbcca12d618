"""Level 1, what lies beside the tensors: configuration, tokenizer, leftovers of other runs."""

from __future__ import annotations

import filecmp
import json
from pathlib import Path

from ktconv.checkpoint import read_header
from ktconv.checkpoint.agreement import absent_layers, contradictions
from ktconv.checkpoint.config import CONFIG_NAME, interpret_config, read_config
from ktconv.errors import CheckpointError, KtconvError
from ktconv.formats import FORMATS, parse_kt_path, parse_tensor_name
from ktconv.side_files import list_side_files
from ktconv.verify.findings import Findings
from ktconv.verify.subject import Subject
from ktconv.writer.files import translated

LEVEL = "structure"


def check_side_files(subject: Subject, findings: Findings) -> None:
    """They are there, can be read, are the source's, and fit the tensors."""
    _sidecars(subject, findings)
    _config(subject, findings)
    _leftovers(subject, findings)
    _names_of_files(subject, findings)


def _absent(subject: Subject, findings: Findings, name: str) -> None:
    """A failure for our own outputs; other tools leave files out, and folders that were merged
    without a source may have had none."""
    manifest = subject.manifest or {}
    alone = "merged_from" in manifest and not manifest.get("source", {}).get("files")
    if subject.ours and not alone:
        findings.fail(LEVEL, "missing file", f"{subject.directory} has no {name}.", file=name)
    else:
        findings.note(f"{subject.directory} has no {name}, which models need")


def _sidecars(subject: Subject, findings: Findings) -> None:
    source = subject.checkpoint.path if subject.checkpoint else None
    planned = subject.plan.sidecars if subject.plan else [Path(CONFIG_NAME)]
    for name in planned:
        if not (subject.directory / name).is_file():
            _absent(subject, findings, str(name))
        elif source is not None and not _same(subject.directory / name, source / name):
            message = f"{name} is not the source's"
            if subject.ours:
                findings.fail(LEVEL, "changed file", f"{message}, byte for byte.", file=str(name))
            else:
                findings.note(message)
    for name in list_side_files(subject.directory):
        if name.suffix != ".json" or name.name == CONFIG_NAME:  # which _config() reads
            continue
        if why := _why_no_json(subject.directory / name):
            findings.fail(LEVEL, "damaged file", f"{name} {why}.", file=str(name))


def _same(one: Path, other: Path) -> bool:
    with translated("read", other):
        return filecmp.cmp(one, other, shallow=False)


def _why_no_json(path: Path) -> str | None:
    with translated("read", path):
        data = path.read_bytes()
    try:
        json.loads(data)
    except (ValueError, RecursionError) as error:
        return f"is no JSON: {error}"
    return None


# ---- config.json against the tensors ----


def _config(subject: Subject, findings: Findings) -> None:
    """The layers, experts and sizes that config.json tells are those of the tensors."""
    if not (subject.directory / CONFIG_NAME).is_file():
        return
    try:
        config = interpret_config(read_config(subject.directory).content)
    except KtconvError as error:
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
