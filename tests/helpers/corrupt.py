"""Planting faults in conversions, and what `verify` makes of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ktconv.source import TensorRef
from ktconv.source.side_files import record_of
from ktconv.targets.packed.weights import open_packed
from ktconv.verify import Request, Result, verify


def check(output: Path, source: Path | None = None, level: str | None = None) -> Result:
    chosen = level or ("weights" if source else None)
    return verify(Request(output, str(source) if source else None, chosen, threads=2))


def found(result: Result, level: str, name: str) -> list[dict[str, Any]]:
    """The failures of one check; none of another level may be there."""
    assert not result.passed
    assert {failure.level for failure in result.failures} == {level}, result.failures
    mine = [failure.as_dict() for failure in result.failures if failure.check == name]
    assert mine, result.failures
    return mine


def place_of(output: Path, name: str) -> TensorRef:
    for tensor, place in open_packed(output).tensors.items():
        number = f"blk.{tensor.layer}.ffn_{tensor.proj}_exps.{tensor.expert}.numa.{tensor.part}"
        if f"{number}.{tensor.kind}" == name:
            return place
    raise KeyError(name)


def overwrite(place: TensorRef, data: bytes, at: int = 0) -> None:
    with place.file.open("r+b") as file:
        file.seek(place.offset + at)
        file.write(data)


def bytes_of(place: TensorRef) -> bytes:
    with place.file.open("rb") as file:
        file.seek(place.offset)
        return file.read(place.nbytes)


def swap(output: Path, one: str, two: str) -> None:
    for kind in ("weight", "scale"):
        first, second = place_of(output, f"{one}.{kind}"), place_of(output, f"{two}.{kind}")
        a, b = bytes_of(first), bytes_of(second)
        overwrite(first, b)
        overwrite(second, a)


def forget_manifest(output: Path) -> Path:
    """As if another tool had written it: then there are no checksums to find faults by."""
    (output / "ktconv.json").unlink()
    return output


def record_again(output: Path, *names: str) -> Path:
    """As somebody who changes side files and their checksums in the manifest too."""
    path = output / "ktconv.json"
    manifest = json.loads(path.read_text())
    for name in names or manifest["side_files"]:
        manifest["side_files"][name] = record_of(output, name)
    path.write_text(json.dumps(manifest))
    return output


def earlier_version(output: Path) -> Path:
    """As a version that recorded no checksums of side files left it."""
    path = output / "ktconv.json"
    manifest = json.loads(path.read_text())
    del manifest["side_files"]
    path.write_text(json.dumps(manifest))
    return output
