"""The recipe as a file with what it was chosen by, for people who edit it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

from ktconv import __version__
from ktconv.quantize.recipes.run import Fitted
from ktconv.quantize.recipes.wish import Wish
from ktconv.system.regular_files import read_given
from ktconv.writer.option_files import WrittenFile

_SEAL = "# SHA-256 of the lines above: "  # an edited file is not overwritten


def recipe_file(path: Path) -> WrittenFile:
    """FILE of --write-recipe: it replaces recipes as ktconv wrote them, and not edited ones."""
    return WrittenFile(path, "--write-recipe", "a recipe as ktconv wrote it", _is_unedited)


def _is_unedited(path: Path) -> bool:
    data = read_given(path, "--write-recipe", "give the name of a new file")
    text, seal, digest = data.decode().rpartition(_SEAL)
    return bool(seal) and digest == _digest(text)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest() + "\n"


def document(fitted: Fitted, wish: Wish) -> str:
    """Comments around `Recipe.toml`."""
    text = "\n".join([*_head(fitted, wish), "", fitted.recipe.toml, *_table(fitted)]) + "\n"
    return text + _SEAL + _digest(text)


def _head(fitted: Fitted, wish: Wish) -> Iterator[str]:
    yield f"# Chosen by ktconv {__version__} for {wish.words}: {fitted.nbytes} bytes,"
    yield f"# {fitted.bits:.3f} bits per weight of the experts."
    yield "# Edit it and run: ktconv quantize-cpu MODEL OUTPUT --recipe FILE"
    yield "#"
    yield "# bits per weight, relative RMS error"
    yield from (f"# {line}" for line in fitted.table())


def _table(fitted: Fitted) -> Iterator[str]:
    """Measured errors by layer and projection; the chosen one is marked."""
    methods = list(fitted.measured.errors)
    cells = sorted(
        fitted.measured.errors[methods[0]],
        key=lambda cell: (cell[0], ("gate", "up", "down").index(cell[1])),
    )
    yield "# Relative RMS errors that were measured; * is chosen."
    yield "# layer proj " + " ".join(f"{method.words:>18}" for method in methods)
    for layer, proj in cells:
        marked = fitted.recipe.of(layer, 0, proj)
        errors = (
            f"{fitted.measured.errors[method][layer, proj] ** 0.5:.4f}"
            + ("*" if method == marked else " ")
            for method in methods
        )
        yield f"# {layer:>5} {proj:<4} " + " ".join(f"{error:>18}" for error in errors)
