"""Group sizes that a method or a model cannot have, and what is advised instead."""

from __future__ import annotations

from typing import Any

import pytest

from ktconv.errors import UsageError
from ktconv.source import MoELayer
from ktconv.targets.encoded.scheme import Scheme


def layer(hidden: int, inner: int) -> MoELayer:
    matrices: Any = dict.fromkeys(("gate", "up", "down"))
    return MoELayer(3, "", False, hidden, inner, "bf16", [matrices])


def refusal(name: str, size: int, *layers: MoELayer) -> tuple[str, str | None]:
    with pytest.raises(UsageError) as caught:
        Scheme(name, size).check(layers)
    return str(caught.value), caught.value.hint


@pytest.mark.parametrize(
    ("name", "size", "said", "hint"),
    [
        ("W4A16", 16, "--group-size 16 is not supported by inference engines",
         "use 32, 64, 128, or -1 for one scale per row"),
        ("awq", -1, "--group-size -1 is not supported by inference engines", "use 32, 64, 128"),
        ("mxfp4", 64, "--group-size 64 is not that of mxfp4, which has groups of 32",
         "omit it"),
    ],
)  # fmt: skip
def test_sizes_that_a_method_has_not(name: str, size: int, said: str, hint: str) -> None:
    assert refusal(name, size) == (said, hint)


def test_sizes_that_do_not_divide_a_model() -> None:
    """A method that has no scales per row is not advised to have them."""
    said = "--group-size 128 does not divide the 96 columns of gate and up in layer 3"
    values = "possible values of --group-size for this model:"
    assert refusal("W4A16", 128, layer(96, 128)) == (said, f"{values} 32, -1")
    assert refusal("awq", 128, layer(96, 128)) == (said, f"{values} 32")
    said = "--group-size 128 does not divide the 64 columns of down in layer 3"
    assert refusal("W4A16", 128, layer(128, 64), layer(256, 256)) == (said, f"{values} 32, 64, -1")
    said, hint = refusal("awq", 32, layer(40, 128))
    assert said == "--group-size 32 does not divide the 40 columns of gate and up in layer 3"
    assert hint == "possible values of --method for this model: fp8-channel, bf16"
    said, hint = refusal("rawint4", 32, layer(40, 128))
    assert said == (
        "rawint4 has groups of 32, which do not divide the 40 columns of gate and up in layer 3"
    )
    assert hint == "possible values of --method for this model: fp8-channel, bf16"
    Scheme("awq", 32).check([layer(96, 128)])
