"""Experts modules that are called or stored in a way of their own, against packed ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from ktconv.formats import FORMATS
from ktconv.model.forms import packed_class
from ktconv.model.module import PackedExperts
from ktconv.model.sites import find_experts
from ktconv.model.stored import StoredExperts, stored_in
from ktconv.native import Activation
from ktconv.runtime.layers.experts import pack_experts

pytestmark = pytest.mark.torch

HIDDEN, INNER, COUNT, TOKENS, TOP_K = 64, 128, 4, 9, 2


class Case(NamedTuple):
    """A module of transformers, and what it is called with: hidden states [TOKENS, HIDDEN], ids
    and weights [TOKENS, TOP_K]."""

    config: str
    module: str  # of the file that has `config`'s model
    settings: dict[str, Any]
    inputs: Callable[[Any, Any, Any, Any], tuple[Any, ...]]
    activation: Activation = Activation()


def _as_they_are(_: Any, hidden: Any, ids: Any, weights: Any) -> tuple[Any, ...]:
    return hidden, ids, weights


def _with_batch(_: Any, hidden: Any, ids: Any, weights: Any) -> tuple[Any, ...]:
    return hidden[None], ids, weights


def _logits(torch: Any, hidden: Any, ids: Any, weights: Any) -> tuple[Any, ...]:
    """Whose softmax over the best is `weights`."""
    logits = torch.full((TOKENS, COUNT), -50.0)
    return hidden, logits.scatter(1, ids, weights.log())


def _block(_: Any, hidden: Any, *__: Any) -> tuple[Any, ...]:
    return (hidden[None],)


def _sorted(torch: Any, hidden: Any, ids: Any, weights: Any) -> tuple[Any, ...]:
    scores = torch.zeros((COUNT, TOKENS)).scatter(0, ids.T, weights.T)
    return ((scores[..., None] * hidden).reshape(-1, HIDDEN),)


_SIZES = {"hidden_size": HIDDEN, "intermediate_size": INNER, "moe_intermediate_size": INNER}
_DBRX = {"hidden_size": HIDDEN, "ffn_hidden_size": INNER, "moe_num_experts": COUNT}
CASES = {
    "aria": Case(
        "AriaTextConfig", "AriaExperts",
        {**_SIZES, "moe_num_experts": COUNT, "moe_topk": TOP_K}, _logits,
    ),
    "dbrx": Case("DbrxFFNConfig", "DbrxExperts", _DBRX, _with_batch),
    "gpt_oss": Case("GptOssConfig", "GptOssExperts", {**_SIZES, "num_local_experts": COUNT},
                    _as_they_are, Activation(alpha=1.702, beta=1.0, limit=7.0)),
    "jetmoe": Case(
        "JetMoeConfig", "JetMoeMoE",
        {**_SIZES, "num_local_experts": COUNT, "num_experts_per_tok": TOP_K}, _block,
    ),
    "llama4": Case("Llama4TextConfig", "Llama4TextExperts",
                   {**_SIZES, "num_local_experts": COUNT}, _sorted),
    "longcat_flash": Case(
        "LongcatFlashConfig", "LongcatFlashExperts",
        {"hidden_size": HIDDEN, "expert_ffn_hidden_size": INNER, "n_routed_experts": COUNT,
         "zero_expert_num": 2}, _as_they_are,
    ),
    "muse_spark": Case(
        "MuseSparkTextConfig", "MuseSparkExperts",
        {**_SIZES, "num_local_experts": COUNT, "moe_hidden_size": HIDDEN,
         "num_attention_heads": 2}, _as_they_are,
    ),
    "nemotron_h": Case(
        "NemotronHConfig", "NemotronHExperts",
        {**_SIZES, "hidden_size": 32, "n_routed_experts": COUNT, "moe_latent_size": HIDDEN},
        _as_they_are, Activation("relu2"),
    ),
    "step3p7": Case(
        "Step3p7TextConfig", "Step3p7Experts", {**_SIZES, "n_routed_experts": COUNT},
        _as_they_are, Activation("swiglu_clamped", limit=0.1),
    ),
}  # fmt: skip


def make(name: str, torch: Any) -> tuple[Any, Any]:
    """The module with random weights that differ from expert to expert, and its config."""
    from importlib import import_module

    case = CASES[name]
    where = f"transformers.models.{name}"
    pytest.importorskip(where)
    config_class = getattr(import_module(f"{where}.configuration_{name}"), case.config)
    config = config_class(**case.settings)
    kind = getattr(import_module(f"{where}.modeling_{name}"), case.module)
    more = {"swiglu_limit": 0.1} if name == "step3p7" else {}
    module = kind(config, **more).eval()
    if case.inputs is _logits and not hasattr(module, "route_tokens_to_experts"):
        case = case._replace(inputs=_as_they_are)  # transformers 5.23
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for one in module.parameters():
            fan = max(one.shape[-1], 1) if one.dim() > 1 else 16
            one.copy_(torch.randn(one.shape, generator=generator) / fan**0.5)
    return module, case


def packed(own: StoredExperts, case: Case, missing: tuple[int, ...] = ()) -> PackedExperts:
    """INT8 experts from the matrices that `own` says it has."""

    def source(expert: int) -> Any:
        found = own.matrices(expert)
        arrays = [matrix.contiguous().numpy() for matrix in found.values()]
        return (None, *arrays) if len(arrays) == 2 else tuple(arrays)

    origins = [None if expert in missing else expert for expert in range(own.count)]
    experts = pack_experts(
        FORMATS["int8"], source, origins, own.hidden, own.intermediate, activation=case.activation
    )
    return packed_class(own)(experts, None, own)


def arguments(torch: Any, case: Case) -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(11)
    hidden = torch.randn((TOKENS, HIDDEN), generator=generator)
    ids = torch.stack([torch.randperm(COUNT, generator=generator)[:TOP_K] for _ in hidden])
    weights = torch.rand((TOKENS, TOP_K), generator=generator) + 0.1
    return case.inputs(torch, hidden, ids, weights / weights.sum(dim=1, keepdim=True))


@pytest.mark.parametrize("missing", [(), (1, 2)])
@pytest.mark.parametrize("name", CASES)
def test_packed_experts_answer_as_the_module(
    name: str, missing: tuple[int, ...], torch: Any
) -> None:
    module, case = make(name, torch)
    own = stored_in(module)
    assert own is not None
    assert (own.count, own.hidden, own.intermediate) == (COUNT, HIDDEN, INNER)
    assert own.gated is case.activation.gated and own.biased is (name == "gpt_oss")
    if own.biased:
        with torch.no_grad():
            module.gate_up_proj_bias.zero_()
            module.down_proj_bias.zero_()
    given = arguments(torch, case)
    with torch.no_grad():
        theirs, ours = module(*given), packed(own, case, missing)(*given)
    assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
    # Of random numbers INT8 loses 1.2 % by the two matrices in a row, and as much by activations.
    assert 1e-4 < float((ours - theirs).norm() / theirs.norm()) < 0.03


@pytest.mark.parametrize("missing", [(), (1, 2)])
@pytest.mark.parametrize("name", CASES)
def test_inputs_from_another_device(
    name: str, missing: tuple[int, ...], torch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outputs are there, too, and the same; so they are if the model's own experts are there."""
    from helpers.far import FAR, FarTensor, far_device

    module, case = make(name, torch)
    module.requires_grad_(False)
    own = stored_in(module)
    assert own is not None
    ours, given = packed(own, case, missing), arguments(torch, case)
    with torch.no_grad():
        expected = ours(*given)
        with far_device(monkeypatch) as device:
            module.to(FAR)
            own = stored_in(module)
            assert own is not None
            ours.own = (own,) if missing else ()
            if name == "jetmoe":  # its block has the router
                ours.router, ours.bias = module.router, module.bias
            found = ours(*(one.to(FAR) for one in given))
            assert isinstance(found, FarTensor) and found.dtype == expected.dtype
            assert device.pinned > 1
            found = found.to("cpu")
    assert torch.allclose(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["aria", "jetmoe", "dbrx", "llama4", "longcat_flash"])
def test_routing_is_what_the_module_computes_with(name: str, torch: Any) -> None:
    """Each token's experts, by leaving one of them out at a time."""
    module, case = make(name, torch)
    own = stored_in(module)
    assert own is not None
    given = arguments(torch, case)
    ids = packed_class(own).routing(module, given).ids.reshape(TOKENS, -1)
    again = type(packed(own, case)).routing(packed(own, case), given).ids.reshape(TOKENS, -1)
    assert torch.equal(ids.sort()[0], again.sort()[0])
    with torch.no_grad():
        whole = module(*given).reshape(-1, TOKENS, HIDDEN)
        for expert in range(COUNT):
            down = own.matrices(expert)["down"]
            before = down.clone()
            down.zero_()
            changed = (module(*given).reshape(-1, TOKENS, HIDDEN) != whole).any(dim=2).any(dim=0)
            down.copy_(before)
            assert torch.equal(changed, (ids == expert).any(dim=1))


def test_ids_of_identity_experts_give_the_token_itself(torch: Any) -> None:
    module, case = make("longcat_flash", torch)
    own = stored_in(module)
    assert own is not None and own.identities == 2
    hidden, ids, weights = arguments(torch, case)
    ids[:4, 0], ids[2, 1], ids[3] = COUNT, COUNT + 1, torch.tensor([COUNT + 1, COUNT])
    with torch.no_grad():
        theirs, ours = module(hidden, ids, weights), packed(own, case)(hidden, ids, weights)
    assert float((ours - theirs).norm() / theirs.norm()) < 0.03
    assert torch.allclose(ours[2:4], hidden[2:4] * weights[2:4].sum(dim=1, keepdim=True))


def test_other_modules_have_no_experts(torch: Any) -> None:
    """Shared experts of Inkling, experts of JetMoE's attention, ordinary layers."""
    from transformers import JetMoeConfig, LlamaConfig
    from transformers.models.jetmoe.modeling_jetmoe import JetMoeDecoderLayer
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    def parameter(*shape: int) -> Any:
        return torch.nn.Parameter(torch.zeros(shape))

    shared = torch.nn.Module()
    shared.gate_proj, shared.up_proj = parameter(2, 8, 4), parameter(2, 8, 4)
    shared.down_proj = parameter(2, 4, 8)
    assert stored_in(shared) is None
    odd = torch.nn.Module()
    odd.gate_up_proj, odd.down_proj = parameter(2, 8, 4), parameter(2, 4, 5)
    assert stored_in(odd) is None
    sizes: Any = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2}
    jetmoe = JetMoeDecoderLayer(
        JetMoeConfig(**sizes, num_key_value_heads=1, kv_channels=32, num_local_experts=2), 0
    )
    found = [path for path, one in jetmoe.named_modules() if stored_in(one) is not None]
    assert found == ["mlp"]
    llama = LlamaDecoderLayer(LlamaConfig(**sizes, num_key_value_heads=1), 0)
    assert not [path for path, one in llama.named_modules() if stored_in(one) is not None]


def test_experts_of_other_towers_are_left_out(torch: Any, fused_experts: Callable[[], Any]) -> None:
    def layers(**blocks: Any) -> Any:
        return torch.nn.ModuleDict({"layers": torch.nn.ModuleList([torch.nn.ModuleDict(blocks)])})

    two = torch.nn.ModuleDict(
        {"talker": layers(mlp=fused_experts()), "thinker": layers(mlp=fused_experts())}
    )
    assert find_experts(two)[0].path == "thinker.layers.0.mlp"
    one = layers(text_moe=fused_experts(), vision_moe=fused_experts())
    assert find_experts(one)[0].path == "layers.0.text_moe"
    assert find_experts(layers(vision_moe=fused_experts()))[0].path == "layers.0.vision_moe"
