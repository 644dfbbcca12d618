"""The border to the C library: the one package that touches cffi.

Every function checks sizes and contiguity, calls, and turns a status into an
exception. Calls release the GIL, so Python threads run them in parallel.
"""

from ktconv.native.build import check_build

check_build()  # before any module looks for a function that an old build lacks

# ruff: noqa: E402
from ktconv.native.adapters import (
    AdapterTable,
    ChosenAdapters,
    ExpertPairs,
    LoraPair,
    lora_bytes,
    pack_lora,
)
from ktconv.native.arrays import (
    Array,
    NonFiniteError,
    NoWeightsError,
    ScratchError,
    address_of,
    aligned_bytes,
    array_at,
)
from ktconv.native.auditing import (
    Audit,
    ByteSums,
    Unpacked,
    audit,
    audit_codes,
    byte_sum,
    quantize_audit,
    same_bytes,
)
from ktconv.native.blocks import BLOCK_TYPES, audit_blocks, blocks_bytes, encode_blocks
from ktconv.native.compensation import BLOCK_COLS, compensate
from ktconv.native.dense import (
    NORM_KINDS,
    Attention,
    AttentionLayer,
    DecoderLayers,
    Linear,
    Norm,
    RoutedLayer,
    bytes_at,
    decoder_step,
    dense_is_fast,
    rotate,
)
from ktconv.native.encoding import (
    ENCODINGS,
    EncodedAudit,
    Encoding,
    audit_encoded,
    encode,
    encode_audit,
    largest,
)
from ktconv.native.layouts import FORMATS, SCALE_DTYPES, Layout, packed_size, stored_scale
from ktconv.native.levels import (
    ISA_NAMES,
    cpu_features,
    isa,
    isa_available,
    use_isa,
)
from ktconv.native.mapped import Mapped, map_file
from ktconv.native.memory import (
    PAGE,
    Gathered,
    Ranges,
    allowed_nodes,
    bind_memory,
    gather_pages,
    pages_by_node,
    populate,
)
from ktconv.native.moe import (
    GATE_FUNCTIONS,
    MAX_COLS,
    VALUE_DTYPES,
    Activation,
    Call,
    Expert,
    Layer,
    PackedMatrix,
    kernel_levels,
    part_node,
)
from ktconv.native.packing import (
    new_scratch,
    pack,
    pack_weight,
    quantize,
    quantize_pack,
    scratch_size,
    unpack,
    unpack_weight,
)
from ktconv.native.pool import UNITS, Pool, limit_dot, limit_ops, limit_read
from ktconv.native.routing import MAX_ROUTED, SCORINGS, Router, choose_experts
from ktconv.native.rules import RULES, Choice
from ktconv.native.source import DTYPES, Matrix, decode, stored_unit
from ktconv.native.tasks import (
    RAISE,
    START,
    WAIT,
    CallTask,
    Flag,
    PythonTask,
    Queue,
    Task,
    immortal,
)
