"""The vocabulary of all families' rows. `FAMILIES` is looked up at every use, never copied."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cached_property
from itertools import chain
from typing import TypeVar

from ktconv.families.family import USUAL, Family, Matrices, Projection
from ktconv.families.rows import ROWS

_T = TypeVar("_T")

# Settings that are read from config.json, and the names that many families have for them, in order.
KEYS: Mapping[str, tuple[str, ...]] = {
    "text section": ("thinker_config", "text_config", "llm_config", "language_config"),
    "MoE section": ("ffn_config",),
    "model type": ("model_type",),
    "layers": ("num_hidden_layers", "num_layers"),
    "MTP layers": ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers"),
    "hidden size": ("hidden_size",),
    # where it is not the hidden size
    "width of experts": ("moe_latent_size", "routed_expert_hidden_size", "moe_hidden_size"),
    "experts": ("n_routed_experts", "num_experts", "num_local_experts", "num_routed_experts"),
    # one number for each layer, beside the largest of them
    "experts of each layer": (
        "n_routed_experts_per_layer",
        "num_experts_per_layer",
        "num_local_experts_per_layer",
        "num_routed_experts_per_layer",
    ),
    "zero experts": (),
    "intermediate size": ("moe_intermediate_size", "moe_ffn_hidden_size"),
    # of an expert only where none of the names above is there
    "plain intermediate size": ("intermediate_size",),
    "activation": ("hidden_act", "hidden_activation"),
    "activation alpha": ("swiglu_alpha",),
    "activation limit": ("swiglu_limit",),
    "limit after activation": ("swiglu_limits",),
    "limit after activation of shared experts": ("swiglu_limits_shared",),
    "gate cap": ("mlp_gate_softcap",),
    "up cap": ("mlp_up_softcap",),
    "situ gate cap": ("activation_situ_beta",),
    "situ up cap": ("activation_situ_linear_beta",),  # none where only the other is there
    "post norm epsilon": ("post_norm_eps",),
    "top_k": ("num_experts_per_tok", "moe_topk"),
    "scoring": ("scoring_func", "score_func", "score_function"),
    "method": ("topk_method",),
    "renormalise": ("norm_topk_prob",),
    "scale": ("routed_scaling_factor",),
    "correction": ("use_routing_bias", "use_expert_bias"),
    "n_group": ("n_group",),
    "topk_group": ("topk_group",),
    "hash layers": ("num_hash_layers",),
    "shared experts": ("n_shared_experts",),
    "further numbers of shared experts": (
        "num_shared_experts",
        "moe_num_shared_experts",
        "num_shared_expert",
    ),
    "shared size": (
        "shared_expert_intermediate_size",
        "moe_shared_expert_intermediate_size",
        "share_expert_dim",
    ),
    "vocabulary": ("vocab_size",),
    "norm epsilon": ("rms_norm_eps",),
    "least sum": ("moe_norm_min",),
    "p-norm": ("moe_normalize_expert_weights",),
    "experts choose": ("expert_choice_router",),  # their tokens, instead of tokens their experts
    "experts of a block": ("expert_capacity",),  # from which its tokens choose theirs
    "logit scale": ("output_multiplier",),
    "logit softcap": ("moe_router_logit_softcapping",),
    "router jitter": ("router_jitter_noise",),
    "weight on input": ("moe_apply_router_weight_on_input",),
    # which layers have experts: see layer_kinds
    "kind of each layer": ("mlp_layer_types",),
    "kind of each block": ("layers_block_type", "hybrid_override_pattern"),
    "MoE layers": ("moe_layers",),
    "MoE layers in a text": ("moe_layers_enum",),
    "first MoE layer": ("moe_layer_start_index",),
    "last MoE layer": ("moe_layer_end_index",),
    "MoE interval": ("moe_layer_interval",),
    "MoE period": ("expert_layer_period",),
    "MoE offset": ("expert_layer_offset",),
    "MoE step": ("interleave_moe_layer_step",),
    "leading dense layers": ("first_k_dense_replace", "num_dense_layers"),
    "MoE frequency": ("moe_layer_freq",),
    "sparse step": ("decoder_sparse_step",),
    "dense layers": ("mlp_only_layers",),
}


class Families:
    """The rows, and their combined vocabulary: each name once, in the order of the rows."""

    def __init__(self, rows: Iterable[Family]) -> None:
        self.rows = tuple(rows)
        self._by_type = {kind: row for row in self.rows for kind in row.types}
        self._by_key: dict[str, tuple[str, ...]] = {}
        self._by_field: dict[str, tuple[str, ...]] = {}

    def of(self, model_type: object) -> Family | None:
        """The row of a model_type; None where there is none."""
        return self._by_type.get(str(model_type or "").removesuffix("_text"))

    def keys(self, setting: str, family: Family | None = None) -> tuple[str, ...]:
        """The names in config.json of what KEYS calls `setting`: those of `family` first, then
        those of KEYS, then those of other families."""
        if setting not in self._by_key:
            own = (row.keys.get(setting, ()) for row in self.rows)
            self._by_key[setting] = _distinct(chain(KEYS[setting], *own))
        first = family.keys.get(setting, ()) if family is not None else ()
        return _distinct((*first, *self._by_key[setting]))

    def names(self, field: str) -> tuple[str, ...]:
        """All values of a field of the rows that is a name; empty ones are left out."""
        if field not in self._by_field:
            own = (getattr(row, field) for row in self.rows)
            self._by_field[field] = _distinct(name for name in own if name)
        return self._by_field[field]

    # ---- experts ----

    @cached_property
    def matrices(self) -> tuple[Matrices, ...]:
        """The spellings of experts' matrices."""
        own = (row.matrices for row in self.rows)
        return _distinct((*own, *(row.before_number for row in self.rows if row.before_number)))

    @cached_property
    def projections(self) -> Mapping[str, Projection]:
        """gate_proj -> gate, w3 -> up: of matrices that each expert has for itself."""
        own = (one for one in self.matrices if not one.rows_of_all)
        return {name: what for one in own for name, what in one.projections.items()}

    @cached_property
    def fused(self) -> Mapping[str, str]:
        """gate_up_proj -> down_proj: of matrices that have all experts of a layer."""
        return {one.gate_up: one.down for one in self.matrices if one.gate_up}

    @cached_property
    def stacked(self) -> tuple[Mapping[Projection, str], ...]:
        """The names of the two or three tensors that have all experts of a layer, by their
        projections; gate and up have one name where they are together."""
        pairs: list[dict[Projection, str]] = [
            {"gate": gate_up, "up": gate_up, "down": down} for gate_up, down in self.fused.items()
        ]
        apart: list[dict[Projection, str]] = [
            {what: name for name, what in one.projections.items()}
            for one in self.matrices
            if one.up
        ]
        return (*pairs, *apart)

    @cached_property
    def rows_of_all(self) -> frozenset[str]:
        """Names of those that have the rows of all experts in one axis."""
        return frozenset(
            name for one in self.matrices if one.rows_of_all for name in one.projections
        )

    @cached_property
    def matrix_words(self) -> tuple[str, ...]:
        return _distinct((*self.projections, *self.fused, *self.fused.values()))

    @cached_property
    def unfused(self) -> Mapping[str, Matrices]:
        """output_linear -> w1, w3, w2: what engines call the matrices of stacked experts, by the
        name of the down projection."""
        return {row.matrices.down: row.unfused for row in self.rows if row.unfused != USUAL}

    @cached_property
    def beside(self) -> tuple[str, ...]:
        """Words that follow the experts' name in tensors that belong to none of them."""
        norms = (f"{name}.weight" for name in self.names("post_norm"))
        return _distinct((*chain.from_iterable(row.beside for row in self.rows), *norms))

    @cached_property
    def latent(self) -> tuple[str, ...]:
        """Names of projections from a model's width to that of its experts, and back."""
        return _distinct(chain.from_iterable(row.latent for row in self.rows))

    @cached_property
    def shared_experts(self) -> tuple[tuple[str, Matrices, str], ...]:
        """Name, spelling and gate of every kind of shared expert."""
        return _distinct((row.shared, row.shared_matrices, row.shared_gate) for row in self.rows)

    @cached_property
    def routers(self) -> tuple[str, ...]:
        """First words of the names of routers, from their blocks on: gate, router."""
        return _distinct(name.partition(".")[0] for name in self.names("router"))

    @cached_property
    def corrections(self) -> tuple[str, ...]:
        """Names of correction biases that are not inside their routers."""
        names = self.names("correction")
        return tuple(name for name in names if name.partition(".")[0] not in self.routers)

    @cached_property
    def containers(self) -> tuple[str, ...]:
        """Words before an expert's number: experts."""
        return self.names("experts")

    @cached_property
    def own_containers(self) -> frozenset[str]:
        """Containers that families have, and not tools which save them."""
        return frozenset(row.experts for row in self.rows if row.types and row.experts)

    @cached_property
    def has_blocks(self) -> bool:
        """Whether experts with a container are always in a block of their layer."""
        return all(row.block or not row.experts for row in self.rows)

    @cached_property
    def bare_blocks(self) -> Mapping[str, frozenset[str]]:
        """Last words of blocks that have stacked experts in them -> first words of those."""
        found: dict[str, frozenset[str]] = {}
        for row in self.rows:
            if row.block and not row.experts:
                word, one = row.block.rpartition(".")[2], row.matrices
                words = {*one.projections, *filter(None, (one.gate_up,))}
                found[word] = found.get(word, frozenset()) | words
        return found

    @cached_property
    def _bare(self) -> tuple[Family, ...]:
        """Rows whose layers contain their experts' tensors themselves."""
        return tuple(row for row in self.rows if not row.block and not row.experts)

    @cached_property
    def bare_gate_up(self) -> frozenset[str]:
        """Their names of gate and up together: ffn_gate_up_exps."""
        return frozenset(row.matrices.gate_up for row in self._bare if row.matrices.gate_up)

    @cached_property
    def bare_lists(self) -> frozenset[str]:
        """Their names of the list of layers: blk."""
        return frozenset(row.layers for row in self._bare)

    @cached_property
    def bare_layer(self) -> re.Pattern[str]:
        """PREFIX.blk.3, whole: `layer`, `prefix`, `list`, `number`."""
        lists = one_of(sorted(self.bare_lists))
        return re.compile(rf"(?P<layer>(?P<prefix>(?:.*\.)?)(?P<list>{lists})\.(?P<number>[0-9]+))")

    @cached_property
    def bare_words(self) -> tuple[str, ...]:
        """ffn_gate: of an ordinary MLP in such a layer."""
        rows = (row.before_number for row in self._bare if row.before_number)
        return _distinct(name for one in rows for name in one.projections)

    @cached_property
    def bare_expert(self) -> re.Pattern[str]:
        """Pattern of what follows blk.3 and a dot: ffn_gate_exps.weight, whole, or
        ffn_gate.5.weight, with `matrix`, `expert` and `part`."""
        whole = {name for row in self._bare for name in row.matrices.projections}
        whole |= self.bare_gate_up
        return re.compile(
            rf"{one_of(sorted(whole))}(?:\.(?![0-9]).*)?"  # what ktconv writes has a number here
            rf"|(?P<matrix>{one_of(self.bare_words)})\.(?P<expert>[0-9]+)\.(?P<part>.+)",
            re.DOTALL,
        )

    @cached_property
    def mtp_words(self) -> frozenset[str]:
        return frozenset(self.names("mtp"))

    @cached_property
    def block_path(self) -> re.Pattern[str]:
        """PREFIX.layers.3.mlp, whole: `layer`, `prefix`, `list`, `number`."""
        # mtp.{j} without "layers." is how DeepSeek V4 names its multi-token-prediction layers.
        lists = one_of((*self.names("layers"), *self.names("mtp")))
        bare = "" if self.has_blocks else "?"
        return re.compile(
            rf"(?P<layer>(?P<prefix>(?:.+\.)?)(?P<list>{lists})\.(?P<number>[0-9]+)"
            rf"(?:\.{one_of(self.names('mtp_inside'))})?)"
            rf"(?:\.{one_of(self.names('block'))}){bare}"
        )

    @cached_property
    def numbered_layer(self) -> re.Pattern[str]:
        """layers.3 anywhere in a name: list, number."""
        lists = one_of((*self.names("layers"), *self.names("mtp")))
        return re.compile(rf"(?:^|\.)({lists})\.([0-9]{{1,6}})\.")

    @cached_property
    def expert_module(self) -> re.Pattern[str]:
        """PREFIX.layers.3.mlp.experts.5.gate_proj, whole: where, expert, matrix."""
        return re.compile(
            rf"(.+\.{one_of(self.containers)})\.(0|[1-9][0-9]*)\.({one_of(self.projections)})"
        )


def one_of(names: Iterable[str]) -> str:
    """A regular expression for one of these names; without any it matches nothing."""
    return f"(?:{'|'.join(map(re.escape, names)) or '(?!)'})"


def _distinct(values: Iterable[_T]) -> tuple[_T, ...]:
    return tuple(dict.fromkeys(values))


FAMILIES = Families(ROWS)
