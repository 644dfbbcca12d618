"""Experts that are read one after the other give what the model's own experts give, bit by bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers.family_list import SAVED
from helpers.family_models import build
from helpers.saved import written
from helpers.streamed import on_meta, routed

from ktconv.source import open_checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.torch]

FAMILIES = list(SAVED)
# Its bf16 rows are multiplied in float32, where products depend on the rows beside a row.
IN_FLOAT32 = "openai_privacy_filter"


def own_output(torch: Any, site: Any, rows: Any, ids: Any, weights: Any) -> Any:
    """What the model's module gives for these choices."""
    module, call, count = site.module, site.own.call, site.own.count
    with torch.no_grad():
        if hasattr(module, "config"):
            module.config._experts_implementation = "eager"
        if call == "routed":
            return module(rows, ids, weights).reshape(rows.shape)
        if call == "logits":
            module.route_tokens_to_experts = lambda _: (ids, weights)
            return module(rows, None)
        if call == "sorted":  # a row is of one expert; all others get zeros in its place
            inputs = rows.new_zeros((count, *rows.shape))
            for place, row in enumerate(rows):
                inputs[ids[place, 0], place] = row
            y = module(inputs.reshape(-1, rows.shape[1])).reshape(inputs.shape)
            return y[ids[:, 0], torch.arange(len(rows))]
        order = ids.reshape(-1).argsort(stable=True)
        sizes = torch.bincount(ids.reshape(-1), minlength=count).tolist()
        token, gates = order // ids.shape[1], weights.reshape(-1)[order]
        module.router = torch.nn.Identity()
        module.router.forward = lambda _: (None, token, gates, sizes, None)
        module.bias.data.zero_()
        return module(rows[None])[0]


@pytest.mark.parametrize("name", FAMILIES)
def test_families(name: str, torch: Any, tmp_path: Path) -> None:
    """With weights as routers make them: of the model's dtype, or of float32."""
    from ktconv.model.sites import find_experts
    from ktconv.model.streamed.calls import Call, ExpertLayer
    from ktconv.model.streamed.experts import SourceExperts

    family = SAVED[name]
    checkpoint = open_checkpoint(written(name, tmp_path))
    model = build(family).eval()  # of the same weights
    site = find_experts(model)[family.layers[-1]]
    (source,) = (layer for layer in checkpoint.layers if layer.index == site.layer)
    layer = ExpertLayer.at(site.layer, on_meta(site), source)
    runner = SourceExperts(checkpoint, torch.bfloat16)
    # DBRX's cannot have others.
    by_ids, top_k = (
        name != "dbrx" and site.own.call == "routed",
        1 if site.own.call == "sorted" else 2,
    )
    for dtype in (torch.bfloat16, torch.float32) if by_ids else (torch.bfloat16,):
        calls, outputs, expected = [], [], []
        for window, tokens in enumerate((33, 1, 2)):
            rows = torch.randn((tokens, site.own.hidden)).to(torch.bfloat16)
            ids, weights = routed(tokens, site.own.count, top_k, window)
            if top_k == 1:  # rows are times their weights already
                weights = torch.ones_like(weights)
            calls.append(Call(0, window, rows, ids, weights.to(dtype)))
            outputs.append(torch.zeros_like(rows))
            expected.append(own_output(torch, site, rows, ids, weights.to(dtype)))
        with torch.inference_mode():
            runner.run(layer, calls, outputs)
        for own, found in zip(expected, outputs, strict=True):
            if name == IN_FLOAT32:
                assert torch.allclose(own, found, rtol=2**-7, atol=2**-9 * float(own.abs().max()))
            else:
                assert torch.equal(own, found)
