"""Pictures of results: where one can be written, and axes to draw on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ktconv.errors import ResourceError, UsageError
from ktconv.system.files import check_writable

_DPI = 120


def check_plot(path: Path) -> None:
    """UsageError before anything is computed if this picture could not be drawn."""
    if path.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise UsageError(f"--plot {path} is not a picture file", "end it with .png, .svg or .pdf")
    if not path.absolute().parent.is_dir():
        raise UsageError(f"--plot {path}: there is no directory {path.parent}", "make it first")
    if path.is_dir():
        raise UsageError(f"--plot {path} is a directory", "give the name of a file in it")
    check_writable(path, "--plot")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise UsageError("--plot needs matplotlib", "pip install 'ktconv[plot]'") from None


@contextmanager
def picture(
    path: Path, size: tuple[float, float], rows: int = 1, columns: int = 1
) -> Iterator[Any]:
    """matplotlib's axes, an array of several; written to `path` at the end. `size` is in inches."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(rows, columns, figsize=size, layout="constrained")
    try:
        yield axes
        figure.savefig(path, dpi=_DPI)
    except OSError as error:
        raise ResourceError(f"{path} cannot be written: {error.strerror}") from None
    finally:
        pyplot.close(figure)
