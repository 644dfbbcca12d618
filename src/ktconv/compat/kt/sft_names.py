"""Names of `kt_kernel.sft` besides the wrapper: what SGLang asks before it serves LoRA.

Functions that load experts return where they are: the wrapper's `load_rawint4_weights` and
`load_block_fp8_weights` take that, and read them as any checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from msgspec import Struct

from ktconv.compat.kt.variants import FACTS
from ktconv.compat.kt.wrapper import KTMoEWrapper
from ktconv.errors import KtconvError, UsageError

INT8_BACKEND, INT8_SFT_METHOD = "INT8", "INT8_SFT"
FP8_BACKEND, FP8_SFT_METHOD = "FP8", "AMXFP8_SFT"
RAWINT4_BACKEND, RAWINT4_SFT_METHOD = "RAWINT4", "RAWINT4_SFT"
RAWINT4_GROUP_SIZE = 32
RAWINT4_WEIGHT_LAYOUT = FACTS["__rawint4_weight_layout__"]
MXFP4_SFT_METHOD = "MXFP4_SFT"
FUSED_EXPERT_LORA_NAME = "fused_expert_lora.safetensors"
KT_ADAPTER_MANIFEST_NAME = "kt_adapter_manifest.json"
KT_NON_EXPERT_MANIFEST_NAME = "kt_non_expert_manifest.json"

KTAMXError = KTAMXNotAvailableError = KTAMXModelNotSupportedError = KTAMXConfigError = KtconvError
KTArtifactError = KtconvError


class Runtime(Struct, frozen=True):
    """The kernels that a method of fine-tuning uses."""

    cpu_variant: str
    kernel: str
    weight_layout: str


def _runtime(name: str) -> Runtime:
    return Runtime(
        FACTS["__cpu_variant__"], FACTS[f"__{name}_kernel__"], FACTS[f"__{name}_weight_layout__"]
    )


def get_int8_runtime() -> Runtime:
    """The kernels of INT8_SFT, which every CPU has here."""
    return _runtime("int8")


def get_fp8_runtime() -> Runtime:
    """The kernels of AMXFP8_SFT, which every CPU has here."""
    return _runtime("fp8")


def get_rawint4_runtime() -> Runtime:
    """The kernels of RAWINT4_SFT, which every CPU has here."""
    return _runtime("rawint4")


class StoredExperts(Struct, frozen=True):
    """Layer `layer` of the checkpoint in directory `path`."""

    path: str
    layer: int


def get_mxfp4_runtime() -> Runtime:
    """The kernels of MXFP4_SFT, which every CPU has here."""
    return Runtime(FACTS["__cpu_variant__"], "avx512-bf16-mxfp4-g32", "mxfp4-e2m1-ue8m0-g32")


class CheckpointContract(Struct, frozen=True):
    """Encoding of the experts that RAWINT4_SFT reads."""

    bits: int = 4
    group_size: int = RAWINT4_GROUP_SIZE
    signed: bool = True
    symmetric: bool = True
    zero_point: bool = False
    format: str = "pack-quantized"


def get_rawint4_checkpoint_contract(model_config: Any) -> CheckpointContract:
    """The encoding that RAWINT4_SFT reads. Whether a checkpoint has it is checked when its tensors
    are read, by what they are."""
    return CheckpointContract()


class MOEArchConfig(Struct):
    """Names and sizes of a model's experts. Loading reads them from the checkpoint instead, and
    compares the sizes."""

    moe_layer_attr: str
    router_attr: str
    experts_attr: str
    weight_names: tuple[str, str, str]
    expert_num: int
    intermediate_size: int
    num_experts_per_tok: int
    has_shared_experts: bool = False
    router_type: str = "linear"


def load_rawint4_experts_from_checkpoint_files(
    checkpoint_files: Sequence[str],
    sharded_metadata: Mapping[str, Any] | None,
    layers_prefix: str,
    moe_config: MOEArchConfig,
    layer_idx: int,
    hidden_size: int,
    group_size: int = RAWINT4_GROUP_SIZE,
) -> StoredExperts:
    """The experts of a layer, for `load_rawint4_weights`. UsageError for other groups than 32."""
    if group_size != RAWINT4_GROUP_SIZE:
        raise UsageError(f"RAWINT4_SFT has groups of {RAWINT4_GROUP_SIZE}, not of {group_size}")
    return _stored(checkpoint_files, layer_idx)


def load_block_fp8_experts_from_checkpoint_files(
    checkpoint_files: Sequence[str],
    sharded_metadata: Mapping[str, Any] | None,
    layers_prefix: str,
    moe_config: MOEArchConfig,
    layer_idx: int,
    hidden_size: int,
    block_size: tuple[int, int] = (128, 128),
) -> StoredExperts:
    """The experts of a layer, for `load_block_fp8_weights`. UsageError for other blocks than
    128 x 128."""
    if tuple(block_size) != (128, 128):
        raise UsageError(f"AMXFP8_SFT has blocks of 128 x 128, not of {tuple(block_size)}")
    return _stored(checkpoint_files, layer_idx)


def _stored(files: Sequence[str], layer: int) -> StoredExperts:
    directories = {Path(one).parent for one in files}
    if len(directories) != 1:
        raise UsageError(f"checkpoint_files are in {len(directories)} directories, not in one")
    return StoredExperts(str(directories.pop()), int(layer))


class KExpertsSFTBuffer:
    """Buffers of fine-tuning: here the workspace of threads."""

    @staticmethod
    def clear_cache() -> None:
        """Returns workspace to the system, as `KTMoEWrapper.clear_sft_buffer_cache`."""
        KTMoEWrapper.clear_sft_buffer_cache()


OFFERED = (
    "FP8_BACKEND", "FP8_SFT_METHOD", "FUSED_EXPERT_LORA_NAME", "INT8_BACKEND", "INT8_SFT_METHOD",
    "KExpertsSFTBuffer", "KTAMXConfigError", "KTAMXError", "KTAMXModelNotSupportedError",
    "KTAMXNotAvailableError", "KTArtifactError", "KT_ADAPTER_MANIFEST_NAME",
    "KT_NON_EXPERT_MANIFEST_NAME", "MOEArchConfig", "MXFP4_SFT_METHOD",
    "RAWINT4_BACKEND", "RAWINT4_GROUP_SIZE", "RAWINT4_SFT_METHOD", "RAWINT4_WEIGHT_LAYOUT",
    "get_fp8_runtime", "get_int8_runtime", "get_mxfp4_runtime", "get_rawint4_checkpoint_contract",
    "get_rawint4_runtime", "load_block_fp8_experts_from_checkpoint_files",
    "load_rawint4_experts_from_checkpoint_files",
)  # fmt: skip


class Absent:
    """A name of kt_kernel.sft that ktconv has otherwise: using it raises UsageError. Nothing is an
    instance of it."""

    def __init__(self, name: str, instead: str) -> None:
        self._name, self._instead = name, instead

    def __call__(self, *given: Any, **named: Any) -> NoReturn:
        """Raises UsageError that names it and what to use."""
        raise UsageError(f"ktconv has no kt_kernel.sft.{self._name}", self._instead)

    def __mro_entries__(self, bases: tuple[Any, ...]) -> NoReturn:
        self()

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):  # what Python itself asks for, also before __init__
            raise AttributeError(name)
        raise AttributeError(f"ktconv has no kt_kernel.sft.{self._name}: {self._instead}")

    def __instancecheck__(self, instance: object) -> bool:
        return False

    def __subclasscheck__(self, subclass: type) -> bool:
        return False


_MODELS = "train with ktconv.train and ktconv.model: docs/fine-tuning.md"
_ADAPTERS = "use the adapter functions of ktconv.train: docs/fine-tuning.md"
_TABLE = {
    _MODELS: """KTConfig KTActivationPolicy KTMoEFunction KTMoELayerWrapper LoRAExpertMLP
        LoRAExperts KTAdaptationResult adapt_peft_lora kt_adapt_peft_lora extract_moe_weights
        wrap_moe_layers_with_kt_wrapper build_kt_device_map build_kt_device_map_simplified
        get_kt_loading_kwargs load_kt_model get_kt_lora_named_params get_kt_lora_params
        get_kt_named_trainable_params get_kt_rank_local_parameter_names get_kt_trainable_params
        update_kt_lora_pointers sync_kt_lora_gradients get_moe_arch_config get_moe_module
        move_non_experts_to_gpu get_expert_device get_kt_expert_placeholders
        load_experts_from_checkpoint_files load_experts_from_kt_weight_path INT8ExpertWeights
        BlockFP8ExpertWeights RAWINT4ExpertWeights get_activation_checkpoint_context_fn
        patch_vlm_conv3d is_vlm_conv3d_compatible collect_kt_sft_profile format_kt_sft_profile
        reset_kt_sft_profile validate_persistent_int8_weights KTNonExpertCache
        KTPretrainedLoadPlan claim_kt_routed_expert_subtrees
        hide_kt_int8_routed_experts_from_dispatch hide_kt_routed_experts_from_dispatch
        is_kt_int8_routed_expert_base_parameter is_kt_routed_expert_base_parameter
        is_kt_routed_expert_parameter_name is_kt_supported_moe_model
        mark_kt_int8_routed_expert_base_parameters prepare_kt_int8_non_expert_device_map
        prepare_kt_non_expert_device_map project_kt_int8_routed_experts_out_of_device_map
        project_kt_routed_experts_out_of_device_map resolve_kt_pretrained_artifacts
        should_disable_kt_source_quantizer validate_kt_prequantized_loading_info
        validate_kt_pretrained_load write_kt_non_expert_cache_manifest""",
    _ADAPTERS: """KTAdapterManifest get_kt_fused_lora_exclude_modules
        load_kt_adapter_artifacts save_kt_adapter_artifacts save_lora_experts_to_adapter
        save_kt_moe_to_adapter load_lora_experts_from_adapter load_kt_moe_from_adapter""",
}
ABSENT = {
    name: Absent(name, instead) for instead, names in _TABLE.items() for name in names.split()
}
