"""What the bytes of the KTransformers CPU weight format mean: arrays only, no files.

Importing this package is cheap: it holds the table of formats, the names and the
split into parts, without NumPy.  The slow, readable truth of the format is in the
modules beside it, which are imported by name: `reference` (quantize and pack),
`kt_layout` (where a code lies), `int8` and `int4` (the roundings), `decode` (source
encodings).
"""

from ktconv.families.family import PROJECTIONS, Projection

from .names import (
    BACKWARD,
    KINDS,
    Kind,
    KtFile,
    Matrix,
    TensorId,
    kt_path,
    parse_kt_path,
    parse_tensor_name,
    tensor_name,
)
from .split import Slice, is_backward, matrix_shape, packed_shape, split
from .table import FORMATS, INT4, INT8, SMALLEST_NORMAL, Format

__all__ = [
    "BACKWARD",
    "FORMATS",
    "INT4",
    "INT8",
    "KINDS",
    "PROJECTIONS",
    "SMALLEST_NORMAL",
    "Format",
    "Kind",
    "KtFile",
    "Matrix",
    "Projection",
    "Slice",
    "TensorId",
    "is_backward",
    "kt_path",
    "matrix_shape",
    "packed_shape",
    "parse_kt_path",
    "parse_tensor_name",
    "split",
    "tensor_name",
]
