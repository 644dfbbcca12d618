"""Meaning of codes and scales of weights: arrays only, no files.

Importing this package is cheap: it has the table of formats, names and the split into parts, and
does not import NumPy.  The other modules have the arithmetic: of integer formats (`integers`), of
each other format, by format (`reference`), and of source encodings (`decode`).
"""

from ktconv.families.family import PROJECTIONS, UNGATED, Projection

from .names import (
    BACKWARD,
    KINDS,
    Kind,
    KtFile,
    Matrix,
    TensorId,
    backward_of,
    kinds_of,
    kt_path,
    parse_kt_path,
    parse_tensor_name,
    tensor_name,
)
from .split import Slice, cut_by_rows, is_backward, matrix_shape, packed_shape, split
from .table import (
    FORMATS,
    INT4,
    INT8,
    SMALLEST_NORMAL,
    Format,
    format_named,
    formats_for,
    output_formats,
    output_named,
)
