"""Pictures of results: where one can be written, and axes to draw on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

from ktconv.errors import UsageError
from ktconv.writer.option_files import WrittenFile

_DPI = 120
_MARK = "drawn by ktconv"  # in the metadata of every picture
_KEYS = {".png": "Software", ".svg": "Creator", ".pdf": "Creator"}  # of metadata, by ending
_MOST = 64 << 20  # bytes of a picture


def picture_file(path: Path) -> WrittenFile:
    """FILE of --plot. UsageError if its ending is not that of a picture, or without matplotlib."""
    _check_plot(path)
    return WrittenFile(path, "--plot", "a picture that ktconv drew", _is_drawn)


def _is_drawn(path: Path) -> bool:
    return path.stat().st_size <= _MOST and _MARK.encode() in path.read_bytes()


def _check_plot(path: Path) -> None:
    """UsageError before anything is computed if this picture could not be drawn."""
    if path.suffix.lower() not in _KEYS:
        raise UsageError(f"--plot {path} is not a picture file", "end it with .png, .svg or .pdf")
    if not path.absolute().parent.is_dir():
        raise UsageError(f"--plot {path}: there is no directory {path.parent}", "make it first")
    if path.is_dir():
        raise UsageError(f"--plot {path} is a directory", "give the name of a file in it")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise UsageError("--plot needs matplotlib", "pip install 'ktconv[plot]'") from None


@contextmanager
def picture(
    path: Path, size: tuple[float, float], rows: int = 1, columns: int = 1
) -> Iterator[Any]:
    """matplotlib's axes, an array of several; written to `path` at the end. `size` is in inches.
    UsageError where there is another file, or a model around it."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(rows, columns, figsize=size, layout="constrained")
    try:
        yield axes
        drawn, ending = BytesIO(), path.suffix.lower()
        about = {_KEYS[ending]: _MARK}
        figure.savefig(drawn, dpi=_DPI, format=ending[1:], metadata=about)
        picture_file(path).write(drawn.getvalue())
    finally:
        pyplot.close(figure)
