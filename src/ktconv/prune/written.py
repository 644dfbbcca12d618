"""FILE of --write of `ktconv prune`: which experts are kept."""

from __future__ import annotations

import json
from pathlib import Path

from ktconv.source.pruning.kept import Pruning, read_pruning
from ktconv.writer.option_files import WrittenFile


def kept_file(path: Path) -> WrittenFile:
    """The file that --write names."""
    return WrittenFile(path, "--write", "a file of kept experts that ktconv wrote", _is_one)


def _is_one(path: Path) -> bool:
    read_pruning(path)
    return True


def write_kept(path: Path, pruning: Pruning) -> None:
    """Replace `path` in one step, with a line for each layer."""
    content = pruning.document()
    layers = content.pop("layers")
    head = json.dumps(content, indent=1)[:-2]
    lines = [f"{json.dumps(layer)}: {json.dumps(one)}" for layer, one in layers.items()]
    text = f'{head},\n "layers": {{\n  ' + ",\n  ".join(lines) + "\n }\n}\n"
    kept_file(path).write(text.encode())
