"""The consumers of converted experts: what they compute, and models that need something else.

The methods of KTransformers 0.7.2 read parameters that they do not have as zero, without a word.
A step of an `ExpertActivation` that a method leaves out makes its results wrong.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct, field

from ktconv.errors import CheckpointError
from ktconv.families.family import PLAIN, ExpertActivation
from ktconv.formats.specs import names_of_kt
from ktconv.source import Checkpoint, MoELayer, TensorRef
from ktconv.source.activations import in_words
from ktconv.system.units import listed

ALLOW = "--allow-activation-mismatch converts it for ktconv's own runtime"


class Method(Struct, frozen=True):
    """A method of KTransformers. All compute SiLU of experts with a gate, of every weight on the
    output; `computes`: fields of ExpertActivation that they follow besides."""

    name: str
    computes: frozenset[str] = frozenset()
    families: Mapping[str, frozenset[str]] = field(default_factory=dict)  # model_type -> instead
    encoding: str = ""  # of checkpoints whose experts it reads as they are
    needs: str = ""  # of the CPU, the environment and the file, in words


_LIMIT = frozenset({"limit"})
_ONLY_FP8: Mapping[str, frozenset[str]] = {"glm5_next": frozenset()}  # which its server enforces

# Of methods of which there is something to say; the others compute SiLU alone, and need nothing.
_KNOWN = (
    Method("RAWINT4", needs="groups of 32; AVX-512 or AVX-VNNI: its AVX2 kernel crashes"),
    Method("FP8", families={"glm5_next": _LIMIT}, encoding="fp8-block"),
    Method("FP8_PERCHANNEL", needs="AVX-512"),
    Method("GPTQ_INT4", needs="symmetric, without activation order (`desc_act`)"),
    Method(
        "NVFP4", needs="`KT_MXFP4_BACKEND=avx2` where there is AMX: it has an AVX2 kernel alone"
    ),
    Method("MXFP4", _LIMIT, _ONLY_FP8, "mxfp4"),
    Method("MXFP8", _LIMIT | {"alpha"}, _ONLY_FP8, "fp8-group"),
    Method(
        "LLAMAFILE",
        needs="a GGUF file with gate and up apart, an intermediate size that 256 divides",
    ),
)
_BY_NAME = {name: Method(name) for name in names_of_kt()} | {one.name: one for one in _KNOWN}
METHODS = tuple(_BY_NAME.values())


def server_refuses(model_type: str) -> bool:
    """Whether sglang-kt refuses wrong methods for such models when it starts; others run, and
    their results are wrong."""
    return any(model_type in method.families for method in METHODS)


class Engine(Struct, frozen=True):
    """An engine that serves whole models, as the source of this version has it: nothing of it was
    run on a GPU. `computes`: fields of ExpertActivation that its Marlin kernels, for `quantize-gpu
    --scheme W4A16` and `W8A16`, follow in addition to plain SiLU; of others they compute plain SiLU
    without a word, unless they are in `stops`, which end in an error, or in `unread`, of which
    nothing is known."""

    name: str
    version: str
    has: frozenset[str]  # model types that it has a class for
    lacks: frozenset[str]  # that it has none for; of types in neither nothing is known
    computes: frozenset[str] = frozenset()
    stops: frozenset[str] = frozenset()
    unread: frozenset[str] = frozenset()
    own_config: frozenset[str] = frozenset()  # types with a quantization of their own in its class
    general: frozenset[str] = frozenset()  # types of which it names its class for any model
    by_function: frozenset[str] = frozenset()  # whose class computes experts by a plain function

    @property
    def title(self) -> str:
        """Name and version."""
        return f"{self.name} {self.version}"


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Types of which all three have a class, whose experts KTransformers can take over.
_ALL = _words(
    "qwen2_moe qwen3_moe qwen3_next qwen3_omni_moe qwen3_5_moe qwen3_vl_moe mixtral minimax_m2 "
    "minimax_m3_vl phimoe kimi_linear deepseek_v2 deepseek_v3 deepseek_v32 kimi_k2 kimi_k25 "
    "deepseek_v4 glm4_moe glm4v_moe glm4_moe_lite glm_moe_dsa glm5_next gpt_oss ernie4_5_moe "
    "ernie4_5_vl_moe hunyuan_v1_moe bailing_moe_v2 step3p5 mimo_v2_flash longcat_flash exaone_moe "
    "granitemoe granitemoehybrid lfm2_moe llama4 nemotron_h olmoe bailing_moe step3_vl interns1_pro"
)
# None of the three has one; of MiniMax-Text-01 and dots.llm1 vLLM removed it after 0.23.
_NONE = _words("solar_open axk2 inkling2 inkling2_loop hy_v4_vl lara_mini jetmoe minimax dots1")
_BOTH = _words(  # SGLang and vLLM have one, sglang-kt has not
    "qwen4_exp kimi_k3 hy_v3 hy_v4 cohere2_moe dots3_note gemma4 diffusion_gemma granitemoeshared "
    "granitemoe_swa inkling_mm_model laguna beam muse_spark sarvam_moe sarvam_mla unlimited_ocr "
    "k2_horizon"
)
# In SGLang and sglang-kt a function computes their experts from plain weights: KTransformers cannot
# take them over, and quantized experts cannot be loaded.
_BY_FUNCTION = _words("afmoe dbrx deepseek deepseek_ocr2")
_OF_SGLANG = _words("zaya mellum iquest_q1")
_OF_BOTH_SGLANGS = _words("llada2_moe")
_VLLM_BY_FUNCTION = _words("minicpm")
_OF_VLLM = _words("openai_privacy_filter aria axk1 jamba nomic_bert flint pangu_ultra_moe")
_GENERAL = _words("flex_olmo mellum kolibri1")

SGLANG_KT = Engine(
    "sglang-kt",
    "0.7.2",
    _ALL | _BY_FUNCTION | _OF_BOTH_SGLANGS,
    _NONE | _BOTH | _OF_SGLANG | _OF_VLLM | _VLLM_BY_FUNCTION | _GENERAL,
    by_function=_BY_FUNCTION,
)
SGLANG = Engine(
    "SGLang",
    "0.5.23",
    _ALL | _BOTH | _BY_FUNCTION | _OF_SGLANG | _OF_BOTH_SGLANGS,
    _NONE | _OF_VLLM | _VLLM_BY_FUNCTION | (_GENERAL - _OF_SGLANG),
    computes=_LIMIT,
    stops=_words("function gate_cap up_cap"),
    unread=_words("post_norm"),
    own_config=_words("deepseek_v4"),
    by_function=_BY_FUNCTION | _words("unlimited_ocr"),
)
VLLM = Engine(
    "vLLM",
    "0.33",
    _ALL | _BOTH | _BY_FUNCTION | _OF_VLLM | _VLLM_BY_FUNCTION,
    _NONE | _OF_BOTH_SGLANGS | (_OF_SGLANG - _GENERAL),
    computes=_words("function alpha limit limit_after gate_cap up_cap weight_on_input"),
    unread=_words("gated post_norm"),
    own_config=_words("deepseek_v4 kimi_k3"),
    general=_GENERAL,
    by_function=_VLLM_BY_FUNCTION,
)

# What a method does in place of a field that it does not follow, beside plain SiLU.
_INSTEAD = {
    "biases": " without biases",
    "post_norm": " without a norm",
    "weight_on_input": " of inputs without weights",
}


UNEVEN = (
    "layers have different numbers of experts: KTransformers, vLLM, SGLang and transformers "
    "build all layers with the one number of config.json and cannot load them; this output is "
    "for ktconv's own runtime, and for engines changed to take a number for each layer"
)


def uneven(layers: Iterable[MoELayer]) -> str | None:
    """A sentence about what loads layers with different numbers of experts; None where all have
    the same. `local-inference-lab/vllm`, pull request 249, is a branch of vLLM that can."""
    if len({len(layer.experts) for layer in layers}) < 2:
        return None
    return UNEVEN


def model_types(checkpoint: Checkpoint) -> list[str]:
    """Model types of the text section and of the whole config.json."""
    return [kind for kind in checkpoint.config.model_types if isinstance(kind, str)]


def left_out(
    activation: ExpertActivation, method: str, model_types: Iterable[str] = ()
) -> frozenset[str]:
    """The fields of `activation` that the method of KTransformers does not follow. One that is not
    in the table, as of a new format, counts as one that computes SiLU alone."""
    one = _BY_NAME.get(method, Method(method))
    types = (kind.removesuffix("_text") for kind in model_types)
    computed = next((one.families[kind] for kind in types if kind in one.families), one.computes)
    names = ExpertActivation.__struct_fields__
    changed = (name for name in names if getattr(activation, name) != getattr(PLAIN, name))
    return frozenset(changed) - computed


def right_methods(
    activations: Iterable[ExpertActivation], model_types: Iterable[str] = ()
) -> list[str]:
    """The methods of KTransformers that compute all of them."""
    wanted, types = set(activations), tuple(model_types)
    return [
        method.name
        for method in METHODS
        if not any(left_out(one, method.name, types) for one in wanted)
    ]


class Mismatch(Struct, frozen=True):
    """Layers of a model whose experts compute something else than a method of KTransformers."""

    layers: Sequence[MoELayer]
    method: str
    left_out: frozenset[str]  # fields of ExpertActivation that the method does not follow
    right: Sequence[str]  # the methods that compute what these layers do

    @property
    def sentence(self) -> str:
        where = listed("layer", (layer.index for layer in self.layers))
        activations = {layer.index: layer.activation for layer in self.layers}
        return (
            f"the experts of {where} compute {in_words(activations)}{self._bias}; "
            f"{self.instead}, and its results would be wrong"
        )

    @property
    def instead(self) -> str:
        """The consumer's computation, in words."""
        ends = (end for name, end in _INSTEAD.items() if name in self.left_out)
        return f"KTransformers' {self.method} computes plain SiLU" + "".join(ends)

    @property
    def hint(self) -> str:
        if self.right:
            own = f"{self._own}, as this model's are" if self._own else " and ".join(self.right)
            return f"KTransformers computes it with weights in {own}; {ALLOW}."
        if self.supported:
            return f"No method of KTransformers computes it; {ALLOW}."
        return (
            "Neither KTransformers nor ktconv's kernels compute it. Check hidden_act in "
            "config.json; --allow-activation-mismatch converts it for something else."
        )

    @property
    def consequence(self) -> str:
        """Consequence for an output that was converted all the same."""
        if self.supported:
            return "this output is for ktconv's own runtime"
        return "ktconv's kernels do not compute it either"

    @property
    def supported(self) -> bool:
        """Whether ktconv's kernels compute it."""
        return all(layer.activation.supported for layer in self.layers)

    @property
    def _own(self) -> str | None:
        """The right method whose format the layers are in already, if there is one."""
        encodings = {layer.encoding for layer in self.layers}
        names = (name for name in self.right if encodings == {_BY_NAME[name].encoding})
        return next(names, None)

    @property
    def _bias(self) -> str:
        tensor = _first_bias(self.layers)
        return f" ({tensor.name})" if tensor else ""


def mismatch_of(
    layers: Iterable[MoELayer], method: str, model_types: Iterable[str]
) -> Mismatch | None:
    """The layers that the method would compute wrongly, if there are any."""
    types = tuple(model_types)
    wrong = [one for one in layers if left_out(one.activation, method, types)]
    if not wrong:
        return None
    activations = {one.activation for one in wrong}
    missing = frozenset().union(*(left_out(one, method, types) for one in activations))
    return Mismatch(wrong, method, missing, right_methods(activations, types))


def notes_of(mismatch: Mismatch | None) -> list[str]:
    """Sentences about activations, for the plan."""
    return [] if mismatch is None else [f"{mismatch.sentence}; {mismatch.consequence}"]


def refuse_biases(layers: Sequence[MoELayer], why: str, hint: str) -> None:
    """CheckpointError that names the first bias of an expert, if there is one."""
    if (tensor := _first_bias(layers)) is not None:
        raise CheckpointError(f"{tensor.name}: the experts of this model have biases; {why}", hint)


def _first_bias(layers: Sequence[MoELayer]) -> TensorRef | None:
    biased = (layer for layer in layers if layer.biased)  # of packed ones nothing is known
    matrices = (matrix for one in biased for expert in one.experts for matrix in expert.values())
    return next((matrix.bias.tensor for matrix in matrices if matrix.bias), None)
