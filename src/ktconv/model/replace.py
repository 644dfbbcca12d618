"""Puts packed experts into a loaded model of transformers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ktconv import native
from ktconv.errors import CheckpointError, UsageError
from ktconv.families.names import layer_number
from ktconv.model.module import PackedExperts, SortedExperts
from ktconv.moe import Experts, open_experts
from ktconv.moe.load import activation_of, moe_layers, packed_experts
from ktconv.packed.weights import open_packed
from ktconv.system.pool import Pool

_LEAST_LIKENESS = 0.5  # cosine; INT4 stays above 0.9, experts of another model are near 0


class UnlikeExperts(CheckpointError):
    """Packed experts whose outputs differ from those of the model's own."""


@dataclass(frozen=True, slots=True)
class Site:
    """Where a model has the experts of a layer."""

    layer: int
    path: str
    parent: nn.Module
    name: str

    @property
    def module(self) -> nn.Module:
        found: nn.Module = getattr(self.parent, self.name)
        return found


class ReplacedExperts:
    """What `replace_experts` did. `layers` are on packed experts, `method` is their format;
    `own` are the ids, by layer, of experts that run on the model's own weights as before.

    As a context manager it puts the model's own experts back at the end if they were kept, and
    is closed.
    """

    def __init__(
        self,
        sites: Mapping[int, Site],
        packed: Mapping[int, PackedExperts],
        keep: bool,
        used: ExitStack,
    ) -> None:
        self.layers = tuple(sorted(sites))
        self.method = packed[self.layers[0]].experts.format.key
        self.own = {layer: _elsewhere(packed[layer].experts) for layer in self.layers}
        self._sites, self._packed = sites, packed
        self._used = used  # the threads, and the instruction set that was in use before
        self._originals = {n: site.module for n, site in sites.items()} if keep else None
        self._put(packed)

    def _put(self, modules: Mapping[int, nn.Module]) -> None:
        for layer, site in self._sites.items():
            setattr(site.parent, site.name, modules[layer])

    def _kept(self) -> Mapping[int, nn.Module]:
        if self._originals is None:
            raise UsageError(
                "the model's own experts were not kept", "call replace_experts with keep=True"
            )
        return self._originals

    def restore(self) -> None:
        """The model as it was before; UsageError unless its experts were kept."""
        self._put(self._kept())
        self.close()

    @contextmanager
    def originals(self) -> Iterator[None]:
        """The model's own experts for a while; UsageError unless they were kept."""
        self._put(self._kept())
        try:
            yield
        finally:
            self._put(self._packed)

    def close(self) -> None:
        """Ends threads of our own and gives the instruction set back.

        Packed experts that are still in the model use the process's own pool from then on.
        """
        for module in self._packed.values():
            module.pool = None
        self._used.close()

    def __enter__(self) -> ReplacedExperts:
        return self

    def __exit__(self, *_: object) -> None:
        if self._originals is not None:
            self._put(self._originals)
        self.close()


def replace_experts(
    model: nn.Module,
    output: str | Path,
    *,
    threads: int | None = None,
    isa: str | None = None,
    keep: bool = False,
) -> ReplacedExperts:
    """Run the experts of every MoE layer of `model` on the packed weights in `output`.

    `model` is a transformers model on the CPU, `output` what ktconv quantize-cpu made of its
    checkpoint. Layers of `output` beyond the model's own (multi-token prediction) are left out.
    Experts that `output` leaves out (quantize-cpu --exclude-experts) run on the model's own
    weights. The replaced parameters are freed, unless `keep` or such experts need them.
    `threads`: size of a thread pool of its own, else the shared one is used; `isa` applies to the
    whole process until the result is closed.

    The result computes in bf16, has no gradients, and cannot be saved as a model.

    Raises CheckpointError, and leaves the model as it was, where no experts are found, or layers,
    sizes, activation or the experts' answers to a trial do not match; UsageError for options or
    devices that cannot be used.
    """
    directory = Path(output)
    if not directory.is_dir():
        raise UsageError(f"{directory} is not a directory")
    sites = find_experts(model)
    _check_layers(model, sites, directory)
    experts = _open(directory, sites)
    for layer, site in sites.items():
        _check_match(model, site, experts[layer], directory)
    with ExitStack() as used:
        if isa is not None:
            _use_isa(isa, used)
        pool = used.enter_context(Pool(threads)) if threads is not None else None
        packed = {layer: _packed(site, experts[layer], pool) for layer, site in sites.items()}
        for layer, site in sites.items():
            _check_likeness(site, packed[layer], directory)
        return ReplacedExperts(sites, packed, keep, used.pop_all())


def find_experts(model: nn.Module) -> dict[int, Site]:
    """Layer -> where its experts are, whether the model's own or packed ones.

    Raises CheckpointError if there are none, if experts are not in a numbered layer, or if a
    layer has two.
    """
    sites: dict[int, Site] = {}
    for path, module in model.named_modules():
        if _is_fused(module) or isinstance(module, PackedExperts):
            site = _site(model, path)
            other = sites.setdefault(site.layer, site)
            if other is not site:
                raise CheckpointError(f"{other.path} and {path} both are layer {site.layer}")
    if not sites:
        raise CheckpointError(
            f"no experts were found in this {type(model).__name__}",
            "a Mixture-of-Experts model of transformers 5 has a module with gate_up_proj and "
            "down_proj of all experts in each layer",
        )
    return sites


@contextmanager
def experts_watched(
    sites: Mapping[int, Site], called: Callable[[int, Sequence[Any]], None]
) -> Iterator[None]:
    """Meanwhile `called(layer, arguments)` runs before each call of a layer's experts."""

    def watch(layer: int, module: nn.Module) -> Any:
        signature = inspect.signature(type(module).forward)  # of the object it may be a wrapper

        def hook(_: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
            called(layer, signature.bind(module, *args, **named).args[1:])

        return module.register_forward_pre_hook(hook, with_kwargs=True)

    with ExitStack() as stack:
        for layer, site in sites.items():
            stack.callback(watch(layer, site.module).remove)
        yield


def _site(model: nn.Module, path: str) -> Site:
    number = layer_number(path)
    if number is None:
        raise CheckpointError(f"the experts {path} are not in a numbered layer")
    parent, _, name = path.rpartition(".")
    return Site(number, path, model.get_submodule(parent), name)


def _is_fused(module: nn.Module) -> bool:
    """All experts of a layer in two three-dimensional parameters."""
    matrices = (getattr(module, name, None) for name in ("gate_up_proj", "down_proj"))
    return all(isinstance(matrix, Tensor) and matrix.ndim == 3 for matrix in matrices)


def _open(directory: Path, layers: Iterable[int]) -> dict[int, Experts]:
    """Each layer's experts; headers are read for all of them at once, not once per layer."""
    first, *others = sorted(layers)
    experts = {first: open_experts(directory, first)}
    packed = open_packed(directory)
    for layer in others:
        experts[layer] = packed_experts(packed, layer, experts[first].activation)
    return experts


def _check_layers(model: nn.Module, sites: Mapping[int, Site], directory: Path) -> None:
    converted = moe_layers(directory)
    if not converted:
        raise CheckpointError(
            f"{directory} contains no packed experts", "give an OUTPUT of ktconv quantize-cpu"
        )
    lacking = sorted(sites.keys() - set(converted))
    if lacking:
        raise CheckpointError(
            f"{directory} does not contain the experts of layers {lacking} of the model",
            "convert all layers of the checkpoint that the model was loaded from",
        )
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    count = getattr(text, "num_hidden_layers", max(sites) + 1)
    extra = sorted(layer for layer in set(converted) - sites.keys() if layer < count)
    if extra:
        raise CheckpointError(
            f"{directory} has experts of layers {extra}, which are not MoE layers of the model",
            "give the model that was converted",
        )


def _check_match(model: nn.Module, site: Site, experts: Experts, directory: Path) -> None:
    """The experts are plain matrices on the CPU, of the same sizes, with the same activation."""
    _check_plain(site)
    if getattr(site.module, "has_bias", False) != experts.biased:
        missing = f"those in {directory}" if not experts.biased else "those of the model"
        raise CheckpointError(
            f"layer {site.layer} does not match: its experts have biases, {missing} do not",
            "give the model that was converted",
        )
    theirs, ours = _sizes(site.module), (experts.count, experts.hidden, experts.intermediate)
    for what, own, packed in zip(("experts", "hidden", "intermediate"), theirs, ours, strict=True):
        if own != packed:
            raise CheckpointError(
                f"layer {site.layer} does not match: {what} is {own} in the model and {packed} "
                f"in {directory}",
                "give the model that was converted",
            )
    config: Any = getattr(model, "config", None)
    if hasattr(config, "to_dict") and activation_of(config.to_dict()) != experts.activation:
        raise CheckpointError(
            f"the model and {directory} do not have the same activation",
            "compare hidden_act in both config.json",
        )


def _check_plain(site: Site) -> None:
    module: Any = site.module
    if isinstance(module, PackedExperts):
        raise UsageError(f"{site.path} already uses packed experts", "restore() the model first")
    if getattr(module, "has_post_expert_norm", False):
        raise CheckpointError(
            f"{site.path}, the experts of {type(module).__name__}, have their own "
            "norm, which packed experts do not support",
            "the model can be converted and verified up to --level layers",
        )
    if module.down_proj.device.type != "cpu":
        raise UsageError(f"{site.path} is not on the CPU", "load the model with device_map='cpu'")


def _sizes(module: Any) -> tuple[int, int, int]:
    """Experts, hidden size, intermediate size.

    down_proj is [E, H, I] or, transposed, [E, I, H]: gate_up_proj has 2 * I on its other side.
    """
    count, rows, cols = module.down_proj.shape
    if tuple(module.gate_up_proj.shape[1:]) == (2 * cols, rows):
        return count, rows, cols
    return count, cols, rows


def _use_isa(name: str, used: ExitStack) -> None:
    """Uses this level until `used` ends."""
    if name not in native.isa_available():
        raise UsageError(
            f"this machine does not support {name}", f"it has: {', '.join(native.isa_available())}"
        )
    used.callback(native.use_isa, native.isa())
    native.use_isa(name)


def _packed(site: Site, experts: Experts, pool: Pool | None) -> PackedExperts:
    """The module for this place; CheckpointError for an unknown call signature of experts."""
    count = len(inspect.signature(site.module.forward).parameters)
    kinds: dict[int, type[PackedExperts]] = {1: SortedExperts, 3: PackedExperts}
    if count not in kinds:
        raise CheckpointError(
            f"{type(site.module).__name__} is called with {count} arguments, which is not known"
        )
    return kinds[count](experts, pool, site.module).eval()


def _elsewhere(experts: Experts) -> list[int]:
    """Ids of experts that are not among the packed ones."""
    return [index for index, origin in enumerate(experts.origins) if origin < 0]


def _check_likeness(site: Site, packed: PackedExperts, directory: Path) -> None:
    """CheckpointError unless an expert's output for a random token is close to the model's own.

    Packed weights of another checkpoint can have the very same sizes.
    """
    dtype: Any = site.module.down_proj.dtype
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return  # experts that transformers has quantized itself: only it knows how to run them
    arguments = _trial(packed, dtype)
    with torch.no_grad():
        theirs, ours = site.module(*arguments).float(), packed(*arguments).float()
    likeness = torch.nn.functional.cosine_similarity(theirs.flatten(), ours.flatten(), dim=0)
    if theirs.any() and not likeness > _LEAST_LIKENESS:
        raise UnlikeExperts(
            f"the experts of layer {site.layer} in {directory} are not those of the model",
            "give the model that was converted",
        )


def _trial(packed: PackedExperts, dtype: torch.dtype) -> tuple[Any, ...]:
    """What an experts module is called with to send one random token through the first expert
    that is packed."""
    experts, generator = packed.experts, torch.Generator().manual_seed(0)
    first = int((experts.origins >= 0).argmax())
    token = torch.randn((1, experts.hidden), generator=generator).to(dtype)
    if isinstance(packed, SortedExperts):
        tokens = token.new_zeros((experts.count, experts.hidden))
        tokens[first] = token
        return (tokens,)
    return token, torch.full((1, 1), first), torch.ones((1, 1), dtype=dtype)
