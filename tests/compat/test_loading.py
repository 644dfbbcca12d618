"""Weights by every method: conversions, checkpoints, GGUF files; maps of slots; what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.convert import convert
from helpers.encoded import HIDDEN as WIDE
from helpers.encoded import INNER as INNER_WIDE
from helpers.encoded import SOURCE, encoded_model
from helpers.families import Weights, numbered, simple_config, write_checkpoint
from helpers.ggml import blocks_of
from helpers.gguf_files import Blocks, around, metadata, write_gguf

from ktconv.errors import CheckpointError, KtconvError, UsageError

from .conftest import (
    EXACT,
    EXPERTS,
    HIDDEN,
    INNER,
    Make,
    Stacks,
    batch,
    error,
    expected,
    stacks,
)

pytestmark = [pytest.mark.slow, pytest.mark.torch]

torch = pytest.importorskip("torch")

PERMUTATION = [3, 0, 7, 1, 2, 6, 5, 4]
REPLICAS = [5, 5, 0, 1, 1, 1, 7, 5]
FORMATS = {"AMXINT4": 0.25, "AMXINT8": 0.025, "BF16": EXACT}  # errors against float32


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The weights of `stacks()`: a checkpoint, and conversions of it."""
    folder = tmp_path_factory.mktemp("files")
    weights = Weights(*(stack.float().numpy() for stack in stacks()))
    config = simple_config(hidden_size=HIDDEN, moe_intermediate_size=INNER, num_experts=EXPERTS)
    source = write_checkpoint(folder / "source", numbered(SOURCE, weights), config)
    made = {"checkpoint": source}
    conversions: dict[str, dict[str, Any]] = {
        "int4": {"method": "int4"},
        "int8": {"method": "int8"},
        "int8, parts": {"method": "int8", "numa": 2},
        "int4, folders": {"method": "int4", "layout": "layers"},
    }
    for name, options in conversions.items():
        convert(source, folder / name, **options)
        made[name] = folder / name
    return made


@pytest.mark.parametrize(
    ("name", "method", "parts"),
    [
        ("int4", "AMXINT4", 1), ("int8", "AMXINT8", 1), ("int8, parts", "AMXINT8", 2),
        ("int4, folders", "AMXINT4", 1), ("int8", "MOE_INT8", 1), ("checkpoint", "BF16", 1),
        ("checkpoint", "BF16", 2),
    ],
)  # fmt: skip
@pytest.mark.parametrize("mapping", [None, list(range(EXPERTS)), PERMUTATION, REPLICAS])
def test_d5_one_rule_for_maps_of_files(
    make: Make, files: dict[str, Path], name: str, method: str, parts: int, mapping: Any
) -> None:
    """Slot p computes with the weights of expert map[p]; ids are slots."""
    wrapper = make(None, path=files[name], method=method, threadpool_count=parts)
    wrapper.load_weights(None if mapping is None else torch.tensor(mapping))
    given, order = batch(16), mapping or list(range(EXPERTS))
    own = Stacks(*(stack[order] for stack in stacks()))
    bound = FORMATS.get(method, 0.025)
    assert error(wrapper.forward(*given), expected(own, *given)) < bound


@pytest.mark.parametrize("method", ["AMXINT4", "AMXINT8", "BF16", "FP8", "RAWINT4", "MXFP8"])
@pytest.mark.parametrize("mapping", [PERMUTATION, REPLICAS])
def test_d5_the_same_rule_for_maps_of_tensors(make: Make, method: str, mapping: Any) -> None:
    """The bits are those of weights that are in the order of slots already."""
    given = batch(16)
    ordered = make(Stacks(*(stack[mapping] for stack in stacks())), method=method)
    for kind in (torch.tensor(mapping), torch.tensor(mapping, dtype=torch.int32), mapping):
        mapped = make(mapping=kind, method=method)
        assert torch.equal(mapped.forward(*given), ordered.forward(*given))
    assert not torch.equal(make(method=method).forward(*given), ordered.forward(*given))


def test_files_and_tensors_give_the_same_bits(make: Make, files: dict[str, Path]) -> None:
    given = batch(16)
    for name, method in (("int4", "AMXINT4"), ("int4, folders", "AMXINT4"), ("int8", "AMXINT8")):
        loaded = make(None, path=files[name], method=method)
        loaded.load_weights()
        assert torch.equal(loaded.forward(*given), make(method=method).forward(*given))


# Encodings that checkpoints have, and what must come out of float32 arithmetic on their values.
@pytest.mark.parametrize(
    ("kind", "method", "bound"),
    [
        ("fp8 block, Qwen", "FP8", EXACT),
        ("fp8 block, DeepSeek-V4", "FP8", EXACT),
        ("fp8 channel", "FP8_PERCHANNEL", EXACT),
        ("mxfp4, DeepSeek-V4", "MXFP4", EXACT),
        ("mxfp8", "MXFP8", EXACT),
        ("int4 packed, group 32", "RAWINT4", 0.025),
        ("int4 packed, unused index", "GPTQ_INT4", 0.025),
        ("gptq symmetric", "GPTQ_INT4", 0.025),
    ],
)
@pytest.mark.parametrize("parts", [1, 3])
def test_checkpoints_as_they_are(
    make: Make, tmp_path: Path, kind: str, method: str, bound: float, parts: int
) -> None:
    path, weights, _ = encoded_model(tmp_path, kind)
    own = Stacks(*(torch.from_numpy(one / 16 / np.abs(one).mean()) for one in weights))
    scale = [16 * float(np.abs(one).mean()) for one in weights]
    wrapper = make(
        None, path=path, method=method, threadpool_count=parts, num_experts=2,
        num_experts_per_tok=2, hidden_size=WIDE, moe_intermediate_size=INNER_WIDE,
    )  # fmt: skip
    wrapper.load_weights(torch.tensor([1, 0]))
    own = Stacks(*(stack[[1, 0]] * factor for stack, factor in zip(own, scale, strict=True)))
    given = batch(4, top_k=2)
    ids = given.ids % 2
    assert error(wrapper.forward(given.x, ids, given.weights), expected(own, given.x, ids,
                 given.weights)) < bound  # fmt: skip


# Where a block of ggml has its halves, which random bytes would make absurd.
HALVES = {"Q4_K": (0, 2), "Q6_K": (208,)}


def gguf_model(path: Path, kind: str) -> tuple[Path, Stacks]:
    """A GGUF file with experts of one of ggml's types, and their values."""
    import gguf

    rng = np.random.default_rng(0)
    tensors: dict[str, tuple[Any, Any]] = {}
    for word in ("gate", "up", "down"):
        rows, cols = (HIDDEN, 2 * INNER) if word == "down" else (2 * INNER, HIDDEN)
        values = rng.standard_normal((4, rows, cols), np.float32) / 10
        if kind in HALVES:
            blocks = np.stack([blocks_of(rng, kind, rows, cols) for _ in range(4)])
            each = blocks.reshape(-1, gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][1])
            for start in HALVES[kind]:
                each[:, start : start + 2] = np.array([2**-13], np.float16).view(np.uint8)
        elif kind == "F32":
            tensors[word] = values, torch.from_numpy(values)
            continue
        else:
            blocks = gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind])
        tensors[word] = Blocks(kind, blocks), torch.from_numpy(Blocks(kind, blocks).values)
    stored = {f"blk.0.ffn_{word}_exps.weight": blocks for word, (blocks, _) in tensors.items()}
    others = around(hidden=HIDDEN) | {"token_embd.weight": np.ones((8, HIDDEN), np.float32)}
    sizes = {"expert_feed_forward_length": 2 * INNER, "embedding_length": HIDDEN}
    file = write_gguf(path / "m.gguf", stored | others, metadata(**sizes))
    return file, Stacks(*(values for _, values in tensors.values()))


@pytest.mark.parametrize(
    ("kind", "packed", "bound"),
    [
        ("BF16", "bf16", EXACT),
        ("F32", "int8", 0.025),
        ("MXFP4", "mxfp4", EXACT),
        ("Q4_0", "gint4-32-f32", 0.025),  # its activations are rounded to int8
        ("Q8_0", "gint8-32-f32", 0.0135),  # as kt-kernel, whose activations are Q8_0
        ("Q4_K", "int8", 0.025),
        ("Q6_K", "int8", 0.025),
    ],
)
def test_llamafile_reads_gguf(
    make: Make, tmp_path: Path, kind: str, packed: str, bound: float
) -> None:
    """Exactly where a kernel has the numbers, else as INT8."""
    file, own = gguf_model(tmp_path, kind)
    wrapper = make(
        None, path=file, method="LLAMAFILE", num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=2 * INNER, threadpool_count=2,
    )  # fmt: skip
    wrapper.load_weights(torch.tensor([2, 0, 1, 1]))
    assert wrapper.layer.method == packed
    own = Stacks(*(stack[[2, 0, 1, 1]] for stack in own))
    given = batch(4, top_k=2)
    ids = given.ids % 4
    assert error(wrapper.forward(given.x, ids, given.weights), expected(own, given.x, ids,
                 given.weights)) < bound  # fmt: skip


def test_d12_every_wrapper_reads_its_own_files(make: Make, files: dict[str, Path]) -> None:
    """Not those of the first wrapper of the process."""
    given = batch(4)
    for name, method, bound in (
        ("int8", "AMXINT8", 0.025), ("int4", "AMXINT4", 0.25), ("checkpoint", "BF16", EXACT)
    ):  # fmt: skip
        wrapper = make(None, path=files[name], method=method)
        wrapper.load_weights(torch.arange(EXPERTS))
        found = error(wrapper.forward(*given), expected(stacks(), *given))
        assert bound / 20 < found < bound


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("int4", {"method": "AMXINT8"}, "are int4, which the method AMXINT8 does not read"),
        ("checkpoint", {"method": "AMXINT4"}, "are bf16, which the method AMXINT4 does not"),
        ("checkpoint", {"method": "FP8"}, "are bf16, which the method FP8 does not read"),
        ("checkpoint", {"method": "LLAMAFILE"}, "reads GGUF files"),
        ("int8, parts", {"method": "AMXINT8"}, "cut into 2 NUMA parts, but threadpool_count is 1"),
        ("int8", {"method": "AMXINT8", "hidden_size": 512}, "hidden_size is 512, but .* have 256"),
        ("int8", {"method": "AMXINT8", "moe_intermediate_size": 64}, "have 128"),
        ("int8", {"method": "AMXINT8", "num_experts": 4}, "num_experts is 4, but .* have 8"),
        ("int8", {"method": "AMXINT8", "layer_idx": 7}, "no experts of layer 7"),
        ("checkpoint", {"method": "BF16", "layer_idx": 7}, "no experts of layer 7"),
        ("nowhere", {"method": "BF16"}, "nowhere"),
        ("nowhere", {"method": "AMXINT4"}, "nowhere"),
        ("nowhere", {"method": "LLAMAFILE"}, "nowhere"),
        ("checkpoint", {"method": "BF16", "threadpool_count": 3}, "part"),
    ],
)
def test_files_that_are_refused(
    make: Make, files: dict[str, Path], name: str, changes: dict[str, Any], message: str
) -> None:
    wrapper = make(None, path=files.get(name, files["int4"].parent / name), **changes)
    with pytest.raises(KtconvError, match=message):
        wrapper.load_weights()
    with pytest.raises(UsageError, match="has no weights yet"):
        _ = wrapper.layer


def test_the_method_that_would_read_it_is_named(make: Make, files: dict[str, Path]) -> None:
    with pytest.raises(CheckpointError) as refused:
        make(None, path=files["checkpoint"], method="FP8").load_weights()
    assert refused.value.hint == "use the method BF16"


@pytest.mark.parametrize("mapping", [[0, 1], [0] * 7 + [8], [-1] * 8, [0.0] * 8, [[0] * 8]])
def test_maps_that_are_refused(make: Make, files: dict[str, Path], mapping: Any) -> None:
    for path, method in ((files["int8"], "AMXINT8"), (files["checkpoint"], "BF16")):
        with pytest.raises(UsageError):
            make(None, path=path, method=method).load_weights(torch.tensor(mapping))
    with pytest.raises(UsageError):
        make(mapping=torch.tensor(mapping))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s._replace(gate=s.gate[:, :64]), r"gate_proj must be a tensor \[experts, 128"),
        (lambda s: s._replace(down=s.up), r"down_proj must be a tensor \[experts, 256, 128\]"),
        (lambda s: s._replace(up=s.up.numpy), "up_proj must be a tensor"),
        (lambda s: s._replace(up=s.up.double()), "float64"),
        (lambda s: s._replace(up=s.up.to("meta")), "up_proj is on the device meta"),
        (lambda s: Stacks(*(one[:4] for one in s)), "num_experts is 8, but .* have 4"),
        (lambda s: s._replace(up=s.up.index_fill(0, torch.tensor([3]), torch.nan)),
         "up of expert 3 has a NaN"),
    ],
)  # fmt: skip
def test_tensors_that_are_refused(make: Make, change: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make(change(stacks()))
    with pytest.raises(UsageError, match="reads GGUF files, not tensors"):
        make(method="LLAMAFILE")


def test_a_limit_that_contradicts_the_model(make: Make, tmp_path: Path) -> None:
    weights = Weights(*(stack.float().numpy() for stack in stacks()))
    config = simple_config(
        hidden_size=HIDDEN, moe_intermediate_size=INNER, num_experts=EXPERTS, swiglu_limit=0.25
    )
    source = write_checkpoint(tmp_path, numbered(SOURCE, weights), config)
    given, found = batch(), []
    for limit in (0.0, 0.25):
        wrapper = make(None, path=source, swiglu_limit=limit)
        wrapper.load_weights()
        found.append(wrapper.forward(*given))
    assert torch.equal(*found)
    assert not torch.equal(found[0], make().forward(*given))
    with pytest.raises(UsageError, match=r"but the model has .*0\.25"):
        make(None, path=source, swiglu_limit=7.0).load_weights()


def test_a_limit_that_files_do_not_state(make: Make, files: dict[str, Path]) -> None:
    given = batch()
    wrapper = make(None, path=files["int8"], method="AMXINT8", swiglu_limit=0.25)
    wrapper.load_weights()
    packed = make(method="AMXINT8", swiglu_limit=0.25)
    assert torch.equal(wrapper.forward(*given), packed.forward(*given))
    assert not torch.equal(packed.forward(*given), make(method="AMXINT8").forward(*given))


@pytest.mark.parametrize("path", ["", None])
def test_no_path_is_not_the_working_directory(make: Make, path: Any) -> None:
    with pytest.raises(UsageError, match="weight_path is empty"):
        make(None, path=path).load_weights()
