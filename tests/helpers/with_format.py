"""`python with_format.py ARGS`: ktconv with one more row in its table of weight formats."""

from __future__ import annotations

from ktconv.formats import FORMATS, Format
from ktconv.formats.table import GINT4_ERROR_STEPS

ROWS = {
    row.key: row
    for row in (
        Format(
            f"g32-{dtype}",
            f"G32_{dtype.upper()}",
            "gint4",
            32,
            dtype,
            activations="int8",
            tolerance=0.05,
            max_error_steps=GINT4_ERROR_STEPS,
            output=True,
        )
        for dtype in ("f32", "bf16")
    )
}

if __name__ == "__main__":
    FORMATS.update(ROWS)
    from ktconv.cli.entry import main

    main()
