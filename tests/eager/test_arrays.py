"""NumPy's functions on arrays that are cut: NumPy's results, dtypes kept."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, no-any-return"
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.eager.world import BodyError, check, layout, run

pytestmark = pytest.mark.multirank

CASES: dict[str, Callable[..., Any]] = {
    "dot": lambda a, b: np.dot(a, b),
    "matmul": lambda a, b: (a @ b, np.matmul(b, a), a.dot(b)),
    "einsum": lambda a, b: (
        np.einsum("ij,jk->ik", a, b),
        np.einsum("ij->j", a),
        np.einsum("ij,ij", a, a),
    ),
    "outer": lambda a, b: (np.outer(a[0], b[0]), np.add.outer(a[0], b[0]), np.inner(a, a)),
    "tensordot": lambda a, b: (np.tensordot(a, b, 1), np.kron(a[:2, :2], b[:2, :2]), np.vdot(a, a)),
    "arithmetic": lambda a, b: (
        a + 1,
        2 - a,
        a * a / 3,
        a**2,
        -a,
        abs(a),
        a // 2,
        a % 2,
        divmod(a, 2)[0],
    ),
    "ufuncs": lambda a, b: (
        np.exp(a),
        np.sin(a),
        np.tanh(a),
        np.sqrt(abs(a)),
        np.log1p(a * a),
        np.square(a),
    ),
    "binary": lambda a, b: (
        np.maximum(a, 0),
        np.hypot(a, a),
        np.arctan2(a, a),
        np.power(a, 2),
        np.add(a, a),
    ),
    "comparisons": lambda a, b: (
        a > 0,
        (a > 0) & (a < 1),
        ~(a == a),
        np.isnan(a),
        np.logical_or(a > 0, a < 0),
    ),
    "rounding": lambda a, b: (
        np.floor(a),
        np.ceil(a),
        np.round(a),
        np.rint(a),
        np.sign(a),
        np.trunc(a),
    ),
    "sum": lambda a, b: (a.sum(), np.sum(a, 0), np.sum(a, axis=1, keepdims=True), np.add.reduce(a)),
    "mean": lambda a, b: (
        a.mean(),
        np.mean(a, axis=1),
        np.std(a),
        np.var(a, axis=0),
        np.average(a, axis=0),
    ),
    "extremes": lambda a, b: (
        a.max(),
        np.min(a, axis=0),
        np.argmax(a, 1),
        a.argmin(),
        np.maximum.reduce(a),
    ),
    "products": lambda a, b: (
        np.prod(a, 1),
        np.cumsum(a, 0),
        np.cumprod(a, 1),
        np.add.accumulate(a),
    ),
    "truth": lambda a, b: (
        np.all(a > -9),
        np.any(a > 0, axis=0),
        np.count_nonzero(a > 0),
        (a > 0).all(),
    ),
    "reshape": lambda a, b: (
        a.reshape(6, 8),
        np.reshape(a, -1),
        a.ravel(),
        np.ravel(b),
        a.flatten(),
        a.reshape((2, -1)),
    ),
    "transpose": lambda a, b: (
        a.T,
        np.transpose(a),
        a.transpose(1, 0),
        np.swapaxes(a, 0, 1),
        np.moveaxis(a, 0, 1),
    ),
    "dims": lambda a, b: (
        np.expand_dims(a, 0),
        np.squeeze(a[None]),
        a[:, None],
        np.broadcast_to(a[0], (3, 6)),
    ),
    "concatenate": lambda a, b: (
        np.concatenate([a, a], 1),
        np.concatenate((a, b.T)),
        np.stack([a, a], 1),
    ),
    "stacks": lambda a, b: (
        np.vstack([a, a]),
        np.hstack([a, a]),
        np.split(a, 2),
        np.array_split(a, 3, 1),
    ),
    "repeats": lambda a, b: (
        np.tile(a, (2, 1)),
        np.repeat(a, 2, axis=1),
        np.roll(a, 1, 0),
        np.flip(a, 1),
        np.pad(a, 1),
    ),
    "where": lambda a, b: (
        np.where(a > 0, a, 0),
        np.clip(a, -1, 1),
        np.triu(a),
        np.tril(a),
        np.nan_to_num(a),
    ),
    "indexing": lambda a, b: (
        a[1:5, ::2],
        a[0],
        a[-1, 2],
        a[..., 1],
        a[[0, 3]],
        a[a > 0].sum(),
        np.take(a, [0, 2], 0),
    ),
    "sorting": lambda a, b: (np.sort(a, 0), np.argsort(a, 1), np.sort(a)),
    "diagonals": lambda a, b: (np.diag(a), np.trace(a), np.eye(6) + a[:6], np.diagonal(a)),
    "making": lambda a, b: (
        np.zeros_like(a),
        np.ones_like(a) + a,
        np.full_like(a, 3),
        np.arange(6) * a,
    ),
    "astype": lambda a, b: (
        a.astype(np.float32),
        (a * 9).astype(int),
        a.astype("float32").max(),
        a.copy(),
    ),
    "attributes": lambda a, b: (a.shape, a.ndim, a.size, len(a), a.itemsize, a.nbytes),
    "python": lambda a, b: (
        float(a.sum()),
        a.tolist(),
        a[0, 0].item(),
        [float(r.sum()) for r in a],
    ),
    "norm": lambda a, b: (np.linalg.norm(a), np.linalg.norm(a, axis=1)),
    "linalg": lambda a, b: (
        np.linalg.inv(a[:6] + 9 * np.eye(6)),
        np.linalg.det(a[:6]),
        np.linalg.solve(a[:6], b[:6]),
    ),
    "quantiles": lambda a, b: (
        np.median(a),
        np.median(a, axis=0),
        np.quantile(a, 0.3),
        np.quantile(a, [0.1, 0.9], axis=1, keepdims=True),
        np.percentile(a, 20, axis=(0, 1)),
    ),
    "several_axes": lambda a, b: (
        np.prod(a, axis=(0, 1)),
        np.any(a > 0, axis=(0, 1)),
        np.all(a, axis=(0, 1), keepdims=True),
        np.sum(a, (0, 1)),
    ),
    "covariance": lambda a, b: (np.cov(a), np.cov(a, rowvar=False), np.corrcoef(a, rowvar=False)),
    "small_integers": lambda a, b: (
        np.cumsum((abs(a) * 99).astype(np.uint8)).astype(int),
        int((abs(a) * 99).astype(np.uint8).sum()),
        (a > 0).cumsum(),
        np.any((a * 2).astype(np.uint8)),
        np.square((a * 9).astype(int)),
    ),
    "dtypes_of_numbers": lambda a, b: (
        a.astype(np.float32) * np.float64(2),
        a.astype(np.float32) / 2,
        a.astype(np.float32) + a.sum(),
        (a * 9).astype(int) / 2,
        (a * 9).astype(np.int32) / (a * 9 + 99).astype(np.int32),
        (a * 9).astype(np.uint8) + np.int64(3),
    ),
    "roots_and_parts": lambda a, b: (np.cbrt(a), np.modf(a), np.outer(a, b)),
    "plain_arrays": lambda a, b: (
        a + np.ones(6),
        np.ones((8, 6)) * a,
        np.float64(2) * a,
        np.asarray(a).sum(),
    ),
}


def writes(a, b):
    a[0] = 1
    a[:, 1] = a[:, 2]
    a += 1
    a[a > 2] = 0
    np.add(a, 1, out=a)
    np.multiply(a, 2, out=a)
    return a


def arrays() -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    return rng.standard_normal((8, 6)), rng.standard_normal((6, 8))


@pytest.mark.parametrize("name", CASES)
def test_function_is_numpys(name: str) -> None:
    cuts = [layout((8, 6), "data", "model"), layout((6, 8), "model")]
    check(CASES[name], *arrays(), cuts=cuts, same_random=False)


def test_writes_in_place_reach_the_argument() -> None:
    check(writes, *arrays(), cuts=[layout((8, 6), "data", "model")], same_random=False)


def test_single_precision_stays_single() -> None:
    a, b = (x.astype(np.float32) for x in arrays())
    check(np.dot, a, b, cuts=[layout((8, 6), "data")], same_random=False, tolerance=1e-5)


def into_plain_arrays(a):
    out, index = np.zeros((8, 6)), np.array(2)
    out[[0, 7]] += a[[7, 0]]
    out[1:3] = a[1:3]
    np.add(out, a, out=out)
    return out, a[index], a[index, 1:], str(a[0]) == str(np.asarray(a[0]))


def test_plain_arrays_take_results() -> None:
    cuts = [layout((8, 6), "data", "model")]
    check(into_plain_arrays, arrays()[0], cuts=cuts, same_random=False)


def test_integers_divide_in_double_precision_whatever_torch_has() -> None:
    def ratio(a):
        torch.set_default_dtype(torch.float32)
        return a / 7, a.mean(), np.sqrt(a)

    a = np.arange(8)
    results, _, _ = run(ratio, a, cuts=[layout((8,), "data")])
    for piece, wanted in zip(results[0].output, (a / 7, a.mean(), np.sqrt(a)), strict=True):
        assert piece.local.dtype == torch.float64
        assert piece.shape == np.shape(wanted)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda a: np.sum(a, where=a > 0), "numpy.sum with where= .* use numpy.where"),
        (lambda a: np.max(a, initial=9), "numpy.max .* does not take these arguments"),
        (lambda a: np.reshape(a, (6, 8), order="F"), "numpy.reshape .* gather first"),
    ],
)
def test_arguments_without_a_form_are_refused(function, message: str) -> None:
    with pytest.raises(BodyError, match=f"RequestError: {message}"):
        run(function, arrays()[0], cuts=[layout((8, 6), "data")])


def test_dtype_that_torch_does_not_compute_with_is_refused() -> None:
    with pytest.raises(BodyError, match=r"dtype uint16 .* a\.astype\(numpy\.int64\)"):
        run(lambda a: a, np.zeros(4, np.uint16))


def test_function_without_a_form_says_what_to_do() -> None:
    with pytest.raises(BodyError, match=r"gather first: numpy\.asarray"):
        run(lambda a: np.linalg.lstsq(a, a)[0] + np.unwrap(a), arrays()[0])
