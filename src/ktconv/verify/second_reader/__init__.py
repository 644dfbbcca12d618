"""A second implementation of reading weights, for `verify`: from the names of tensors to values.

It is written from the descriptions of the encodings, with plain NumPy, and shares no code with
`checkpoint.encodings` and `reading.matrices`, which the converter uses (tests/test_structure.py).
Scales, zero points and groups are read completely, numbers only where a check asks for them.
"""

from ktconv.verify.second_reader.adapters import Adapted
from ktconv.verify.second_reader.encodings import Weight
from ktconv.verify.second_reader.names import SecondReader, UnknownWeightError

__all__ = ["Adapted", "SecondReader", "UnknownWeightError", "Weight"]
