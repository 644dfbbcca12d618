"""benchmarks/accuracy/engine_kernels.py with an engine of a few lines of torch."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

import pytest
from helpers.cli import ktconv_done
from helpers.paths import EXAMPLE

pytest.importorskip("torch")

from benchmarks.accuracy import engine_kernels
from benchmarks.accuracy.engine_kernels import print_errors
from benchmarks.accuracy.engines.inputs import routed, sorted_tokens
from benchmarks.accuracy.engines.kernels import Sglang, Vllm
from benchmarks.accuracy.engines.modules import StandIn, engine_modules

pytestmark = [pytest.mark.slow, pytest.mark.torch]

PRODUCTS = """
import torch

class tl:
    float16, bfloat16 = torch.float16, torch.bfloat16

def multiply(
    A, *, B, C, B_scale, topk_weights, sorted_token_ids, expert_ids, num_tokens_post_padded,
    mul_routed_weight, top_k, config, compute_type, use_int4_w4a16, **_
):
    if use_int4_w4a16:
        B = torch.stack([B & 15, B >> 4], -1).flatten(2)
    columns = A.shape[1] // B_scale.shape[2]
    levels = B.float() - {"uint8": 8 if use_int4_w4a16 else 128}.get(str(B.dtype)[6:], 0)
    scale = B_scale.float().repeat_interleave(B.shape[1] // B_scale.shape[1], 1)
    weights = levels * scale.repeat_interleave(columns, 2)
    assert num_tokens_post_padded.item() == len(sorted_token_ids)
    assert len(sorted_token_ids) == len(expert_ids) * config["BLOCK_SIZE_M"]
    out = C.view(-1, C.shape[-1])
    for block, expert in enumerate(expert_ids.tolist()):
        size = config["BLOCK_SIZE_M"]
        places = sorted_token_ids[block * size : (block + 1) * size].long()
        places = places[places < len(out)]
        product = A[places // top_k].float() @ weights[expert].T
        if mul_routed_weight:
            product = product * topk_weights.flatten()[places, None]
        out[places] = product.to(compute_type)
"""
KERNELS = (
    PRODUCTS
    + """
from sglang.absent.server import Base, setting
from sglang.kernels.ops.quantization.fp8_kernel import sglang_per_token_group_quant_fp8
from sglang.kernels.ops.quantization.fp8_kernel import scaled_fp8_quant

def invoke_fused_moe_kernel(*, A, use_fp8_w8a8, use_int4_w4a16, block_shape, **given):
    if use_fp8_w8a8:
        round = scaled_fp8_quant if block_shape is None else sglang_per_token_group_quant_fp8
        codes, scale = round(A, None if block_shape is None else block_shape[1])
        A = codes.float() * scale.repeat_interleave(A.shape[1] // scale.shape[1], 1)
    multiply(A, use_int4_w4a16=use_int4_w4a16, **given)

def act_and_mul_triton(gate_up, out, config, topk_ids):
    gate, up = gate_up.float().chunk(2, -1)
    out.copy_(torch.nn.functional.silu(gate) * up)
"""
)
TILES = "def get_default_config(*_):\n    return {'BLOCK_SIZE_M': 16}\n"
LOADER = """
import torch
from sglang.absent.schemes import Scheme

class CompressedTensorsWNA16TritonMoE(Scheme):
    def process_weights_after_loading(self, layer):
        for name, of in list(layer.named_parameters()):
            found = of.data.transpose(1, 2).contiguous()
            found = found.view(torch.uint8) if found.dtype == torch.int32 else found
            setattr(layer, name, torch.nn.Parameter(found, requires_grad=False))
"""

VLLM = {
    "kernels": PRODUCTS
    + TILES
    + """
from vllm.platforms import current_platform
assert current_platform.is_cuda() and not current_platform.is_rocm()

def invoke_fused_moe_wna16_triton_kernel(*, A, B_zp, **given):
    multiply(A, **given)

def invoke_fused_moe_triton_kernel(*, A, A_scale, **given):
    multiply(A.float() * A_scale.repeat_interleave(A.shape[1] // A_scale.shape[1], 1), **given)
""",
    "rules": "",
    "loader": """
import torch
from vllm.absent.enums import WNA16MoEBackend

def convert_to_wna16_moe_kernel_format(_, layer, config, dtype, w13, w2, *scales):
    return w13.view(torch.uint8), w2.view(torch.uint8), *scales, None, None
""",
    "mxfp8": """
import torch
from vllm.model_executor.layers.fused_moe.fused_moe import multiply

def _grouped_gemm_mxfp8(
    A, A_scale, B, B_scale, places, owners, count, valid, top_k, block, dtype, divisor, weights
):
    scale, b_scale = ((of.float() - 127).exp2() for of in (A_scale, B_scale))
    out = torch.empty(valid, B.shape[1], dtype=dtype, device=B.device)
    multiply(
        A.float() * scale.repeat_interleave(32, 1), B=B, C=out, B_scale=b_scale,
        topk_weights=weights, sorted_token_ids=places, expert_ids=owners,
        num_tokens_post_padded=count, mul_routed_weight=weights is not None, top_k=divisor,
        config={"BLOCK_SIZE_M": block}, compute_type=dtype, use_int4_w4a16=False,
    )
    return out
""",
}


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command sets it for Triton."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")


def vllm(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    triton = ModuleType("triton")
    vars(triton)["next_power_of_2"] = lambda n: n
    monkeypatch.setitem(sys.modules, "triton", triton)
    monkeypatch.setitem(sys.modules, "triton.language", ModuleType("triton.language"))
    return written(folder, Vllm.modules, VLLM | {"tiles": VLLM["kernels"]})


def engine(folder: Path, kernels: str = KERNELS) -> Path:
    files = {"kernels": kernels, "tiles": TILES, "loader": LOADER}
    return written(folder, Sglang.modules, files)


def written(folder: Path, modules: Mapping[str, str], files: Mapping[str, str]) -> Path:
    for part, module in modules.items():
        file = folder.joinpath(*module.split(".")).with_suffix(".py")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(files[part])
    return folder


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("outputs")
    schemes = ("W4A16", "W8A16", "FP8_DYNAMIC", "FP8_BLOCK", "MXFP8", "MXFP4A16")
    for scheme in schemes:
        ktconv_done("quantize-gpu", EXAMPLE, folder / scheme, "--scheme", scheme)
    return {scheme: folder / scheme for scheme in schemes}


def test_outputs_lie_within_the_limits_and_faults_do_not(
    outputs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    print_errors(list(outputs.values()), "sglang", engine(tmp_path), [1, 20], None)
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines()[3:]]
    assert {(row[1], row[2]) for row in rows if row[2] in ("1", "20")} == {
        (scheme, count) for scheme in Sglang.schemes for count in ("1", "20")
    }
    assert ["| MXFP8", "MXFP8", "no Triton kernel"] in [row[:3] for row in rows]
    assert ["| MXFP4A16", "mxfp4-pack-quantized", "no Triton kernel"] in [row[:3] for row in rows]
    faults = [row[1] for row in rows if row[0] == "| W4A16" and row[2] == "8"]
    assert len(faults) == 4


def test_vllm_is_given_rounded_activations_and_codes_as_bytes(
    outputs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = vllm(tmp_path, monkeypatch)
    print_errors([outputs[scheme] for scheme in Vllm.schemes], "vllm", sources, [1, 20], 1)


@pytest.mark.parametrize(
    ("scheme", "right", "wrong"),
    [
        ("W4A16", "[B & 15, B >> 4]", "[B >> 4, B & 15]"),
        ("W4A16", "8 if use_int4", "7 if use_int4"),
        ("W8A16", "else 128", "else 127"),
        ("W4A16", ".repeat_interleave(columns, 2)", ".repeat(1, 1, columns)"),
        ("FP8_BLOCK", "B_scale.float()", "B_scale.float().flip(1)"),
        ("FP8_DYNAMIC", "gate, up =", "up, gate ="),
        ("FP8_DYNAMIC", "if mul_routed_weight", "if False"),
    ],
)
def test_an_engine_that_reads_otherwise_is_over_the_limit(
    outputs: dict[str, Path], tmp_path: Path, scheme: str, right: str, wrong: str
) -> None:
    assert right in KERNELS
    sources = engine(tmp_path, KERNELS.replace(right, wrong))
    with pytest.raises(SystemExit, match=f"{scheme}: 5 tokens are over the limit"):
        print_errors([outputs[scheme]], "sglang", sources, [5], 1)


def test_a_fault_that_is_not_seen_is_an_error(
    outputs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_kernels, "damaged", lambda stored: [("no fault", stored)])
    with pytest.raises(SystemExit, match="W4A16: no fault is not seen"):
        print_errors([outputs["W4A16"]], "sglang", engine(tmp_path), [5], None)


def test_places_are_those_of_each_expert_in_whole_blocks() -> None:
    ids = routed(9, 4, 5, 2).ids
    places, owners, count = sorted_tokens(ids, 5, 4)
    assert len(places) == count.item() == 4 * len(owners)
    assert sorted(places[places < 18].tolist()) == list(range(18))
    for block, expert in zip(places.view(-1, 4), owners.tolist(), strict=True):
        own = block[block < 18].long()
        assert len(own) and set(ids.flatten()[own].tolist()) == {expert}


def test_modules_of_an_engine_are_alone_and_leave_nothing(tmp_path: Path) -> None:
    (tmp_path / "oddengine").mkdir()
    (tmp_path / "oddengine/wanted.py").write_text(
        "from oddengine.sizes import padding\n"
        "from oddengine.server import Base, flag, log\n"
        "class Kernel(Base): pass\n"
        "def run(x: Base | None = None): return log.once('x') and flag\n"
    )
    given = {"oddengine.sizes.padding": 7}
    with engine_modules(tmp_path, ["oddengine"], ["oddengine.wanted"], given) as found:
        wanted = found["oddengine.wanted"]
    assert wanted.padding == 7 and not wanted.run() and isinstance(wanted.flag, StandIn)
    assert wanted.Kernel.__mro__ == (wanted.Kernel, object)
    assert not [name for name in sys.modules if name.startswith("oddengine")]
    with (
        pytest.raises(SystemExit, match="does not exist"),
        engine_modules(tmp_path, ["oddengine"], ["oddengine.other"], {}),
    ):
        pass
