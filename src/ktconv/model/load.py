"""The only place where transformers loads anything; no code of a checkpoint runs.

How a checkpoint could have code run or a pickle read, and what prevents it:

- `auto_map` of config.json, of a section in it or of tokenizer_config.json, and the folder
  custom_generate: `trust_remote_code=False`, and configs lose their `auto_map`, since
  transformers builds the models of sections without that option
- `tokenizer_class`, which may name any class of transformers: refused unless it is a tokenizer
- pickled weights: `use_safetensors=True`; encoded ones come from `ktconv.model.decoded`
- an adapter (peft), another config.json (`configuration_files`): refused
- a kernel of the hub (`_attn_implementation`): the model's default is used instead
- "FILE.py:CLASS" in quantization_config, which compressed-tensors imports: refused
- keys of config.json that are no names: dropped

`ktconv.model.guard` is the second line of defence. Nothing is downloaded either.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from logging import LogRecord, getLogRecordFactory, setLogRecordFactory
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ktconv.errors import CheckpointError, KtconvError, ResourceError
from ktconv.model.guard import RefusedError, no_code_of
from ktconv.source.adapter.beside import CONFIG as ADAPTER_CONFIG
from ktconv.source.config import CONFIG_NAME, read_config
from ktconv.source.side_files import find_side_files
from ktconv.source.strict_json import parse_object
from ktconv.system.stores import local_path
from ktconv.system.text import printable
from ktconv.system.units import counted

if TYPE_CHECKING:
    from ktconv.model.decoded import SourceWeights

_SAFE: Mapping[str, Any] = {"trust_remote_code": False, "local_files_only": True}
# Else transformers ends loading with a hint at its log, before its report can be read.
_REPORTING: Mapping[str, Any] = {"output_loading_info": True, "ignore_mismatched_sizes": True}
# One of these must be there: tokenizers, SentencePiece, tiktoken, plain vocabularies.
_TOKENIZERS = ("*token*.json", "*token*.py", "*.model", "*.tiktoken", "vocab*", "*spm*", "*.bpe")
# Of those, files that have settings of a tokenizer and no words; some tokenizers need no others.
_WITHOUT_WORDS = {"tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"}
_TOKENIZER = "tokenizer.json"
_GENERATION = "generation_config.json"
# Keys within quantization_config whose value names a class.
_CLASS_KEYS = ("format", "observer", "quant_method", "type")


class NeedsOwnCode(CheckpointError):
    """A checkpoint that cannot be loaded without its own Python code."""

    def __init__(self, name: Path, what: str) -> None:
        super().__init__(
            f"{name} needs its own Python code ({what}), and ktconv does not run code "
            "from checkpoints: it never sets trust_remote_code",
            "use a release of transformers that supports this architecture",
        )


class NoTokenizer(CheckpointError):
    """A checkpoint without a tokenizer."""

    def __init__(self, name: Path) -> None:
        super().__init__(
            f"{name} has no tokenizer, or one without a vocabulary",
            "put the files of the model's tokenizer, as tokenizer.json, next to config.json",
        )


def load_config(directory: Path, name: Path | None = None) -> Any:
    """The config of a local checkpoint, which errors call `name`, as an object of transformers.

    Raises NeedsOwnCode where transformers does not have the architecture itself, CheckpointError
    for whatever else keeps it from being loaded.
    """
    name = name or directory
    _refuse_what_runs(directory, name)
    with loading(directory, str(name), name, CONFIG_NAME):
        from transformers import AutoConfig

        _check_known(directory, name)
        return _cleaned(AutoConfig.from_pretrained(local_path(directory), **_SAFE))


def check_language_model(directory: Path) -> None:
    """Raises as `load_config` does, also where transformers has no language model for it."""
    _class_for(_language_config(load_config(directory)), directory)


def load_tokenizer(directory: Path, name: Path | None = None) -> Any:
    """The tokenizer of a local checkpoint; raises as `load_config` does, CheckpointError also where
    there is none."""
    name = name or directory
    config = load_config(directory, name)
    local = local_path(directory)
    if not any(next(local.glob(pattern), None) for pattern in _TOKENIZERS):
        raise NoTokenizer(name)
    of = f" ({_TOKENIZER})" if (local / _TOKENIZER).exists() else ""
    with loading(directory, f"the tokenizer of {name}{of}", name, "tokenizer_config.json"):
        from transformers import AutoTokenizer

        _check_tokenizer_class(directory, config)
        try:
            tokenizer = AutoTokenizer.from_pretrained(local, config=config, **_SAFE)
        except Exception as error:
            found = {file.name for pattern in _TOKENIZERS for file in local.glob(pattern)}
            if isinstance(error, ValueError) and found <= _WITHOUT_WORDS:
                raise NoTokenizer(name) from error
            _check_json(local / _TOKENIZER)
            raise
    # Without any file of one, transformers makes one up that knows no word.
    if not tokenizer.get_vocab().keys() - set(tokenizer.all_special_tokens):
        raise NoTokenizer(name)
    return tokenizer


def _check_json(file: Path) -> None:
    """CheckpointError that names a file which is no JSON object; one that is not there is none."""
    if file.exists():
        parse_object(file.read_bytes(), str(file), "Download it again.", allow_same_twice=True)


def load_language_model(
    directory: Path,
    dtype: Any,
    *,
    gguf: Path | None = None,
    decoded: SourceWeights | None = None,
    **placement: Any,
) -> Any:
    """The language model of a local checkpoint, on the CPU or where `placement` (device_map and
    what belongs to it) says. With `gguf` or `decoded` only config.json and its like are of
    `directory`, and the weights are of that file, or those.

    Raises as `load_config` does, CheckpointError also for weights that cannot be decoded and where
    transformers would initialise missing ones at random, ResourceError when out of memory.
    """
    config = load_config(directory, directory)
    place, weights = directory, dict[str, Any](use_safetensors=True)
    if gguf is not None:
        _refuse_what_runs(gguf.parent, gguf)
        vars(config).pop("quantization_config", None)  # of other files than this one
        place, weights = gguf.parent, {"gguf_file": gguf.name}
    what = f"{directory} as a language model"
    with loading(place, what, directory, CONFIG_NAME), no_progress():
        config = _language_config(config)
        kind = _class_for(config, directory)
        if decoded is None:
            loaded: Any = kind.from_pretrained(
                place, config=config, dtype=dtype, **weights, **_REPORTING, **_SAFE, **placement,
            )  # fmt: skip
        else:
            loaded = _load_decoded(kind, directory, config, dtype, decoded, placement)
    model, report = loaded
    check_complete(directory, report)
    return model.eval()


def build_empty(
    directory: Path,
    name: Path,
    dtype: Any,
    mode: AbstractContextManager[Any],
    counts: Mapping[int, int],
) -> tuple[Any, Any]:
    """The language model of a local config.json, made within `mode`, without weights but for those
    that `mode` leaves, and the dtype that it is in. `counts`: numbers of experts by layer, where
    they differ. Raises as `check_language_model`."""
    import torch

    config = _language_config(load_config(directory, name))
    kind = _class_for(config, name)
    found = _dtype_of(config, dtype)
    config = _unquantized(config)
    config._experts_implementation = "eager"  # as transformers sums up where it has no kernels
    with no_progress(), mode:
        model = kind.from_config(config, trust_remote_code=False, dtype=found)
        if counts:
            with _built_with(model, counts):
                model = kind.from_config(config, trust_remote_code=False, dtype=found)
    assert isinstance(found, torch.dtype)
    return model.eval(), found


@contextmanager
def running(name: Path) -> Iterator[None]:
    """Whatever a model's own code raises becomes a KtconvError that names its directory."""
    try:
        yield
    except Exception as error:
        if _is_clear(error):
            raise
        if out_of_memory(error):
            raise ResourceError(f"out of memory while running {name}") from error
        raise CheckpointError(
            f"{name} cannot be run by transformers: {first_line(error)}"
        ) from error


@contextmanager
def way_out(hint: str, memory: str = "use a machine with more memory") -> Iterator[None]:
    """Give errors without a hint of their own one: `memory` where memory is short, else `hint`."""
    try:
        yield
    except KtconvError as error:
        if isinstance(error, ResourceError):
            error.hint = error.hint or memory
        elif error.hint is None or isinstance(error, NeedsOwnCode):
            error.hint = hint
        raise


def context_length(config: Any, most: int) -> int:
    """The most tokens, up to `most`, that the model of a config reads at a time."""
    text = config.get_text_config()
    return min(most, getattr(text, "max_position_embeddings", None) or most)


def out_of_memory(error: BaseException) -> bool:
    """Whether PyTorch or Python ran out of memory; on the CPU, PyTorch has no class for that."""
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or "DefaultCPUAllocator" in str(error)
    )


# ---- what keeps code out ---------------------------------------------------------------


def _refuse_what_runs(directory: Path, name: Path) -> None:
    """Refuse what no option of transformers keeps out, before it reads the checkpoint."""
    find_side_files(directory)  # transformers waits for named pipes, and follows links anywhere
    there = (directory / CONFIG_NAME).exists()
    content = read_config(directory).content if there else {}
    if (directory / ADAPTER_CONFIG).exists():
        raise CheckpointError(
            f"{name} contains an adapter ({ADAPTER_CONFIG}), which is not part of what ktconv "
            "converts",
            "give the model with the adapter merged, or move the adapter away",
        )
    if content.get("configuration_files"):
        raise CheckpointError(
            f"config.json of {name} names other configuration files, which ktconv does not read",
            "put their settings into config.json and remove configuration_files",
        )
    for key, value in _named_classes(content):
        if ":" in value or "/" in value:
            raise NeedsOwnCode(name, f"quantization_config names {value!r} as its {key}")


def _check_known(directory: Path, name: Path) -> None:
    """CheckpointError for a model_type that the installed transformers does not have."""
    import transformers

    if not (directory / CONFIG_NAME).exists():
        return
    content = read_config(directory).content
    kind, has_own = content.get("model_type"), bool(content.get("auto_map"))
    if isinstance(kind, str) and kind not in transformers.CONFIG_MAPPING and not has_own:
        raise CheckpointError(
            f"{name} is of type {printable(kind)}, which transformers "
            f"{transformers.__version__} does not have",
            "use a release of transformers that supports it",
        )


def _named_classes(value: Any, inside: bool = False) -> Iterator[tuple[str, str]]:
    """Keys and values that name classes, anywhere in a quantization_config."""
    if isinstance(value, list):
        for item in value:
            yield from _named_classes(item, inside)
    elif isinstance(value, dict):
        for key, item in value.items():
            if inside and key in _CLASS_KEYS and isinstance(item, str):
                yield key, item
            yield from _named_classes(item, inside or key == "quantization_config")


def _check_tokenizer_class(directory: Path, config: Any) -> None:
    """TypeError for a class of transformers that is no tokenizer: it would be loaded all the same,
    and AutoProcessor, for one, asks then whether to run code."""
    import transformers

    file = directory / "tokenizer_config.json"
    there = file.exists()
    settings = parse_object(local_path(file).read_bytes(), str(file), "") if there else {}
    for kind in filter(
        None, (settings.get("tokenizer_class"), getattr(config, "tokenizer_class", None))
    ):
        for spelling in (kind, kind.removesuffix("Fast"), f"{kind}Fast"):
            found = getattr(transformers, spelling, None)
            absent = type(found).__name__ == "DummyObject"  # a package that it needs is missing
            if found is not None and not absent and not _is_tokenizer(found):
                raise TypeError(f"{kind} is not a tokenizer class")


def _is_tokenizer(found: Any) -> bool:
    from transformers import PreTrainedTokenizerBase

    return isinstance(found, type) and issubclass(found, PreTrainedTokenizerBase)


def _cleaned(config: Any) -> Any:
    """A config without what could make transformers run something."""
    for section in _sections(config):
        settings = vars(section)
        for key in [key for key in settings if not key.isidentifier()]:
            del settings[key]
        if section is not config:  # models of sections are built without trust_remote_code
            settings.pop("auto_map", None)
        for implementation in ("_attn_implementation", "_experts_implementation"):
            if "/" in str(getattr(section, implementation, None)):
                setattr(section, implementation, None)
    return config


def _language_config(config: Any) -> Any:
    """Config of the part that reads and writes text, in a model that also speaks."""
    return getattr(config, "thinker_config", config)


def _class_for(config: Any, name: Path) -> Any:
    """The Auto class that has a language model for this config, with its vision and audio parts
    where transformers does not have it without them. CheckpointError where there is none."""
    import transformers

    kinds: tuple[Any, ...] = (
        transformers.AutoModelForCausalLM,
        transformers.AutoModelForMultimodalLM,
    )
    for kind in kinds:
        if type(config) in kind._model_mapping:
            return kind
    if getattr(config, "auto_map", None):
        raise NeedsOwnCode(name, f"auto_map in {CONFIG_NAME}")
    raise CheckpointError(
        f"{name} is of type {config.model_type}, for which transformers "
        f"{transformers.__version__} has no language model"
    )


def _load_decoded(
    kind: Any,
    directory: Path,
    config: Any,
    dtype: Any,
    decoded: SourceWeights,
    placement: Mapping[str, Any],
) -> Any:
    """A model with decoded weights, and what transformers reports of loading it."""
    import torch

    config = _unquantized(config)
    with torch.device("meta"):  # of the Auto classes only this works without a directory of weights
        empty = kind.from_config(config, trust_remote_code=False)
    building: AbstractContextManager[Any] = nullcontext()
    if decoded.counts:
        building = _built_with(empty, decoded.counts)
        with torch.device("meta"), _built_with(empty, decoded.counts):
            empty = kind.from_config(config, trust_remote_code=False)
    weights = decoded.state_dict(_dtype_of(config, dtype), empty)
    try:
        with building:
            loaded: Any = type(empty).from_pretrained(
                None, config=empty.config, dtype=weights.dtype, state_dict=weights,
                generation_config=read_generation_config(directory),
                **_REPORTING, **_SAFE, **placement,
            )  # fmt: skip
    except Exception as error:
        if weights.error is not None:  # of which transformers may have kept only the words
            raise weights.error from error
        raise
    model, report = loaded
    model.name_or_path = model.config.name_or_path = str(
        directory
    )  # as if it were loaded from there
    return model, report


def _built_with(model: Any, counts: Mapping[int, int]) -> AbstractContextManager[None]:
    from ktconv.model.counts import built_with

    return built_with(model, counts)


def _unquantized(config: Any) -> Any:
    """A config of the same model with weights that are not quantized."""
    for section in _sections(config):
        vars(section).pop("quantization_config", None)
    return config


def _dtype_of(config: Any, dtype: Any) -> Any:
    """The dtype to load in: for "auto" what config.json says, else bf16."""
    if dtype != "auto":
        return dtype
    import torch

    found = (getattr(section, "dtype", None) for section in _sections(config))
    return next(filter(None, found), torch.bfloat16)


def read_generation_config(directory: Path) -> Any:
    """The settings of generation_config.json, if it exists. CheckpointError where transformers
    refuses them."""
    from transformers import GenerationConfig

    file = directory / _GENERATION
    if not file.exists():
        return None
    found = parse_object(local_path(file).read_bytes(), str(file), "Download it again.")
    try:
        return GenerationConfig.from_dict(found)
    except Exception as error:  # of any class: values are compared as they are
        raise CheckpointError(
            f"transformers cannot load {file}: {first_line(error)}", "Download it again."
        ) from error


def _sections(config: Any) -> Iterator[Any]:
    from transformers import PreTrainedConfig

    yield config
    for value in list(vars(config).values()):
        if isinstance(value, PreTrainedConfig):
            yield from _sections(value)


# ---- loading ---------------------------------------------------------------------------


@contextmanager
def loading(directory: Path, what: str, name: Path, file: str = CONFIG_NAME) -> Iterator[None]:
    """While `what` is loaded, from `file` among others: no code runs, nothing is downloaded, and
    errors of libraries become KtconvErrors, except those of the system."""
    from huggingface_hub import constants
    from transformers.utils import hub

    with ExitStack() as stack:
        stack.callback(setattr, constants, "HF_HUB_OFFLINE", constants.HF_HUB_OFFLINE)
        constants.HF_HUB_OFFLINE = True
        stack.callback(setLogRecordFactory, getLogRecordFactory())
        setLogRecordFactory(_PrintableRecord)
        stack.enter_context(no_code_of(local_path(directory), hub.HF_MODULES_CACHE))
        try:
            yield
        except Exception as error:
            if _is_clear(error):
                raise
            raise _translated(error, what, name, file) from error


class _PrintableRecord(LogRecord):
    """A log record without control characters, since libraries quote checkpoints.

    Lines after the first are indented, so that none looks like one of ktconv's own.
    """

    def getMessage(self) -> str:
        return "\n    ".join(map(printable, super().getMessage().split("\n")))


def _translated(error: Exception, what: str, name: Path, file: str) -> KtconvError:
    if out_of_memory(error):
        return ResourceError(f"out of memory while loading {name}")
    refused: BaseException | None = error
    while refused is not None and not isinstance(refused, RefusedError):
        refused = refused.__cause__ or refused.__context__
    if refused is not None or "trust_remote_code" in str(error):
        return NeedsOwnCode(name, str(refused) if refused else f"auto_map in {file}")
    return CheckpointError(f"transformers cannot load {what}: {first_line(error)}")


def _is_clear(error: Exception) -> bool:
    """Whether the message is clear already: errors of ktconv, and of the system (a full disk)."""
    return isinstance(error, KtconvError) or getattr(error, "errno", None) is not None


def first_line(error: Exception) -> str:
    """First line of an error's message, or its class where it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


@contextmanager
def no_progress() -> Iterator[None]:
    """transformers draws no bars meanwhile."""
    from transformers.utils import logging as untyped

    logging: Any = untyped
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        from transformers import modeling_gguf_pytorch_utils as of_gguf

        def bare(items: Any, **_: Any) -> Any:
            return items

        with replaced(of_gguf, "tqdm", bare):
            yield
    finally:
        if shown:
            logging.enable_progress_bar()


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Another value for an attribute of a library, for a while."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def check_complete(name: Path, report: Mapping[str, Any]) -> None:
    """CheckpointError for missing weights, which transformers makes up with only a warning."""
    for kind in ("missing_keys", "mismatched_keys"):
        if report.get(kind):
            names = (one if isinstance(one, str) else one[0] for one in report[kind])
            key = min(names)  # beside mismatched ones are both shapes
            raise CheckpointError(
                f"{name} does not contain {key}, or in another shape ("
                f"{counted(len(report[kind]), 'tensor')} in all)",
                "check that config.json and the weights belong together",
            )
