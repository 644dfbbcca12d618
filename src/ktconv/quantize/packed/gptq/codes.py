"""Codes of weights with correlated inputs: GPTQ under given scales, and the choice among them.

With H = X^T X of a matrix's inputs, the squared error of its outputs is the sum over its rows d of
d H d^T, d the errors of the row's weights. Columns are rounded one after the other, those with the
largest inputs first, and each error is compensated by the columns that follow (Frantar et al.,
"GPTQ", https://arxiv.org/abs/2210.17323; the factor is that of their section 3.3). A row is done
once for each of MULTIPLES of its searched scales, and the result with the smallest error stays.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import Struct

from ktconv import native
from ktconv.formats.search import MULTIPLES
from ktconv.native import Layout
from ktconv.system.arrays import F32, F64, I8, I32, I64

if TYPE_CHECKING:
    from torch import Tensor
else:
    Tensor = Any  # help() evaluates annotations

# Added to the diagonal, in units of its mean: the layer's profile times LEAST_DAMPING, and with few
# tokens n times up to MORE_DAMPING, by K / n: their second moments say little about other tokens.
LEAST_DAMPING, MORE_DAMPING = 0.03, 0.25
FACTOR_COLS = 128  # of a block of a factor
TOGETHER_COLS = 512  # whose errors columns far behind them take in one product


class Factor(Struct, frozen=True):
    """Factor that follows from H [K, K]: `order` in which columns are rounded, and U, float32 [K,
    K], upper triangular, with H^-1 = U^T U, H in that order and damped."""

    order: I64
    upper: Tensor


def factor_of(hessian: F32, tokens: int, profile: F64, stretch: F32 | None = None) -> Factor:
    """Factor of a symmetric matrix [K, K], the sum over `tokens`, which may have any rank but is
    not all zero; it is overwritten. `profile` [K], of mean 1: how inputs differ by channel in the
    whole layer (`channel_weights.layer_profile`). `stretch` [K]: what inputs are multiplied by,
    where columns of weights are divided by it; the factor is then that of s_i s_j H_ij, H damped,
    under which an error of the outputs counts what it does without.

    Raises ValueError where it is no second moment: not even damping makes it positive definite.
    """
    import torch

    diagonal: F64 = hessian.diagonal().astype(np.float64)
    mean = float(np.cumsum(diagonal)[-1]) / len(diagonal)
    damping = LEAST_DAMPING + MORE_DAMPING * min(1.0, len(diagonal) / tokens)
    diagonal = diagonal / mean + damping * profile
    hessian *= np.float32(1 / mean)
    np.fill_diagonal(hessian, diagonal)
    if stretch is not None:
        hessian *= stretch[:, None]
        hessian *= stretch
        diagonal = diagonal * np.square(stretch.astype(np.float64))
    order: I64 = np.argsort(-diagonal, kind="stable")
    ordered = np.empty_like(hessian)
    for row, place in zip(ordered, order, strict=True):
        np.take(hessian[place], order, out=row, mode="clip")  # which needs no buffer
    return Factor(order, _inverse_factor(torch.from_numpy(ordered)))


def _inverse_factor(matrix: Tensor) -> Tensor:
    """U [K, K], upper triangular, with U^T U the inverse of a symmetric matrix, which it replaces.

    The matrix is R R^T with R upper triangular, a Cholesky factorisation from the last column to
    the first; U is the inverse of R. That is half of the operations of inverting the matrix and
    factoring the inverse. Both go by blocks of columns, so that nearly all is multiplication.
    """
    import torch

    blocks = [slice(at, at + FACTOR_COLS) for at in range(0, len(matrix), FACTOR_COLS)]
    inverses = []  # of the blocks of R on the diagonal, from the last one to the first
    for block in reversed(blocks):
        panel = matrix[: block.stop, block]
        panel.addmm_(matrix[: block.stop, block.stop :], matrix[block, block.stop :].T, alpha=-1)
        lower, failed = torch.linalg.cholesky_ex(panel[block.start :].flip(0, 1))
        if failed:
            raise ValueError("the matrix is not positive definite")
        one = torch.eye(len(lower))
        inverses.append(torch.linalg.solve_triangular(lower.flip(0, 1), one, upper=True))
        above = panel[: block.start]
        above.copy_(above @ inverses[-1].T)
    for block, inverse in zip(blocks, reversed(inverses), strict=True):
        panel = matrix[: block.start, block] @ -inverse
        for row in blocks[: block.start // FACTOR_COLS]:
            inside = slice(row.start, block.start)
            torch.mm(matrix[row, inside], panel[row.start :], out=matrix[row, block])
        matrix[block, block] = inverse
    return matrix.triu_()


def best_codes(
    layout: Layout, weights: F32, factor: Factor, scale: F32, group_of_col: I32
) -> tuple[I8, F32]:
    """Codes int8 [N, K] and scales [N, G]: for each row those of MULTIPLES with the smallest error
    of its outputs, the first of equal ones.

    `weights` float32 [N, K]; `scale` float32 [N, G], `group_of_col` int32 [K] which of the G scales
    a column has. The same bits for any number of threads and every instruction set of ours.
    """
    rows = OrderedRows(layout, weights, factor, group_of_col)
    first, *others = MULTIPLES
    assert first == 1
    codes, least = rows.codes_under(scale)
    chosen = scale.copy()
    for multiple in others:
        candidate = native.stored_scale(layout, scale * np.float32(multiple))
        found, loss = rows.codes_under(candidate)
        better = loss < least
        np.copyto(codes, found, where=better)
        np.copyto(chosen, candidate, where=better[:, None])
        np.copyto(least, loss, where=better)
    return rows.in_place(codes), chosen


class OrderedRows:
    """Weights of a matrix as compensation takes them: [K, N], a column of all rows after the other,
    in the order of its factor."""

    def __init__(self, layout: Layout, weights: F32, factor: Factor, group_of_col: I32) -> None:
        self._traits, self._factor = layout.traits, factor
        self._cols = np.take(np.ascontiguousarray(weights.T), factor.order, axis=0)
        self._groups = np.ascontiguousarray(group_of_col[factor.order])

    def codes_under(self, scale: F32) -> tuple[I8, F64]:
        """Codes int8 [K, N] under scales [N, G], in that order, and the squared error of the
        outputs of each row [N], in units of H."""
        import torch

        upper = self._factor.upper
        step = np.ascontiguousarray((scale * np.float32(self._traits.scale_units)).T)
        left = torch.from_numpy(self._cols.copy())  # changed by compensation
        cols, rows = left.shape
        codes, loss = np.empty((cols, rows), np.int8), np.zeros(rows, np.float64)
        errors = torch.empty(min(TOGETHER_COLS, cols), rows)
        for first in range(0, cols, TOGETHER_COLS):
            last = min(first + TOGETHER_COLS, cols)
            for start in range(first, last, native.BLOCK_COLS):
                own = slice(start, min(start + native.BLOCK_COLS, last))
                block = np.ascontiguousarray(upper[own, own].numpy())
                codes[own], found = native.compensate(
                    self._traits.max_level, left[own].numpy(), block, step, self._groups[own], loss
                )
                near = slice(own.stop, last)  # the others take all errors at once
                part = errors[start - first : own.stop - first]
                part.copy_(torch.from_numpy(found))
                left[near].addmm_(upper[own, near].T, part, alpha=-1)
            left[last:].addmm_(upper[first:last, last:].T, errors[: last - first], alpha=-1)
        return codes, loss

    def in_place(self, codes: I8) -> I8:
        """The codes [N, K] of columns as they are in the matrix, of those in order [K, N]."""
        return np.ascontiguousarray(np.take(codes, np.argsort(self._factor.order), axis=0).T)
