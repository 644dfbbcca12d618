"""Copies of layers, in this process and for others."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import numpy as np
import pytest

from ktconv.errors import UsageError
from ktconv.runtime import MoELayer, Pool

from .conftest import batch


def test_copies_share_weights_and_threads(make_layer: Callable[..., MoELayer]) -> None:
    layer = make_layer()
    expected = layer(*batch())
    for one in (copy.copy(layer), copy.deepcopy(layer), copy.deepcopy([layer])[0]):
        assert one.pool is layer.pool and np.array_equal(one(*batch()), expected)


def test_other_processes_get_none(make_layer: Callable[..., MoELayer], pool: Pool) -> None:
    for one in (make_layer(), pool):
        with pytest.raises(UsageError, match="cannot be pickled") as caught:
            pickle.dumps(one)
        assert caught.value.hint
