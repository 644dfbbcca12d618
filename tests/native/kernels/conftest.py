"""The compiled library with the doors of native/test/product.c."""

from __future__ import annotations

import contextlib

import pytest
from helpers import amx
from native.kernels.product import LEVELS, Products, link_products


@pytest.fixture(scope="session")
def products(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Products:
    """All kernels, one product at a time."""
    compiler = amx.compiler()
    if compiler is None:
        pytest.skip("no C compiler")
    library = link_products(compiler, tmp_path_factory.mktemp("products"))
    emulated = pytestconfig.stash[amx.EMULATOR] is not None
    with amx.claimed() if emulated else contextlib.nullcontext():
        return Products(library)


@pytest.fixture(params=list(LEVELS))
def level(request: pytest.FixtureRequest, tiles: amx.Emulator | None) -> str:
    """Each level in turn; `Products.use` skips those that a kernel or this CPU lacks."""
    name: str = request.param
    return name
