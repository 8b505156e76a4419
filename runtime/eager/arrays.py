"""NumPy arrays inside a sharded function: NumPy's names and semantics over torch's operators.

``torch._numpy`` is NumPy's semantics (dtypes, broadcasting, out=, axis) written in torch; its
operators meet the mode like any others. It is private to torch, so only this module touches it.
An :class:`Array` forwards NumPy's two protocols and its methods to it by name.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.lib.mixins import NDArrayOperatorsMixin
from torch import Tensor

from autoshard.errors import RequestError

tnp: Any = importlib.import_module("torch._numpy")

_REDUCTIONS = {
    "add": "sum",
    "multiply": "prod",
    "maximum": "max",
    "minimum": "min",
    "logical_and": "all",
    "logical_or": "any",
}
_ACCUMULATIONS = {"add": "cumsum", "multiply": "cumprod"}
_PROPERTIES = frozenset({"T", "real", "imag", "flat"})


class Array(NDArrayOperatorsMixin):
    """An array whose data are cut over the mesh; it looks like the whole NumPy array.

    ``isinstance(a, numpy.ndarray)`` is False; ``numpy.asarray(a)`` gathers.

    Attributes:
        tensor: the tensor under it.
    """

    __slots__ = ("tensor",)
    __array_priority__ = 1000

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    # ---- NumPy's protocols ------------------------------------------------------------------

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        name = ufunc.__name__
        if method == "__call__":
            return _call(_function(name), inputs, kwargs)
        if method == "reduce" and name in _REDUCTIONS:
            kwargs.setdefault("axis", 0)
            kwargs = {k: v for k, v in kwargs.items() if k in ("axis", "keepdims", "dtype", "out")}
            return _call(_function(_REDUCTIONS[name]), inputs, kwargs)
        if method == "accumulate" and name in _ACCUMULATIONS:
            kwargs.setdefault("axis", 0)
            return _call(_function(_ACCUMULATIONS[name]), inputs, kwargs)
        if method == "outer":
            left, right = (np.asarray(i) if not isinstance(i, Array) else i for i in inputs)
            wide = left.reshape(tuple(left.shape) + (1,) * len(right.shape))
            return _call(_function(name), (wide, right), kwargs)
        raise RequestError(
            f"numpy.{name}.{method} of an array that is cut over the mesh is not supported; "
            "write it with plain functions, or gather first: numpy.asarray(a)"
        )

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        module = getattr(func, "__module__", "numpy") or "numpy"
        return _call(_function(func.__name__, module), args, kwargs)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        whole = self.tensor.detach().numpy()
        return whole if dtype is None else whole.astype(dtype)

    # ---- what an array has ------------------------------------------------------------------

    @property
    def shape(self) -> tuple[int, ...]:
        """The global shape."""
        return tuple(self.tensor.shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        """NumPy's."""
        return _numpy_dtype(self.tensor.dtype)

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return self.tensor.dim()

    @property
    def size(self) -> int:
        """Number of items."""
        return self.tensor.numel()

    @property
    def itemsize(self) -> int:
        """Bytes of one item."""
        return self.tensor.element_size()

    @property
    def nbytes(self) -> int:
        """Bytes of all items."""
        return self.size * self.itemsize

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        found = getattr(tnp.ndarray(self.tensor), name)
        if name in _PROPERTIES:
            return _wrapped(found)
        if not callable(found):
            return found

        def method(*args: Any, **kwargs: Any) -> Any:
            if name in _METHODS:
                return _call(_EXTRA[name], (self, *args), kwargs)
            return _call(getattr(tnp.ndarray(self.tensor), name), args, kwargs)

        return method

    def astype(self, dtype: Any, **_: Any) -> Array:
        """As another dtype."""
        return Array(self.tensor.to(_torch_dtype(dtype), copy=True))

    def copy(self, order: str = "C") -> Array:
        """A copy."""
        return Array(self.tensor.clone())

    def tolist(self) -> Any:
        """Nested lists of the whole."""
        return self.tensor.tolist()

    def item(self, *args: Any) -> Any:
        """The one item, or that at an index."""
        return (self.tensor[args] if args else self.tensor).item()

    def dot(self, other: Any, out: Any = None) -> Any:
        """``numpy.dot``."""
        return _call(tnp.dot, (self, other), {} if out is None else {"out": out})

    def fill(self, value: Any) -> None:
        """Every item becomes ``value``."""
        self.tensor.fill_(value)

    def __getitem__(self, index: Any) -> Any:
        return _wrapped(tnp.ndarray(self.tensor)[_given(_index(index))])

    def __setitem__(self, index: Any, value: Any) -> None:
        tnp.ndarray(self.tensor)[_given(_index(index))] = _given(value)

    def __len__(self) -> int:
        return len(self.tensor)

    def __iter__(self) -> Iterator[Any]:
        return (self[i] for i in range(len(self)))

    def __bool__(self) -> bool:
        return bool(self.tensor)

    def __float__(self) -> float:
        return float(self.tensor)

    def __int__(self) -> int:
        return int(self.tensor)

    def __index__(self) -> int:
        return self.tensor.__index__()

    def __complex__(self) -> complex:
        return complex(self.tensor)

    def __repr__(self) -> str:
        return repr(np.asarray(self))

    def __str__(self) -> str:
        return str(np.asarray(self))


def _index(index: Any) -> Any:
    """NumPy's integers, also arrays of no dim, are Python's."""
    if isinstance(index, tuple):
        return tuple(_index(i) for i in index)
    whole = isinstance(index, (np.ndarray, np.generic)) and index.ndim == 0
    return index.item() if whole and index.dtype.kind in "iu" else index


def _function(name: str, module: str = "numpy") -> Callable[..., Any]:
    owner: Any = tnp
    for part in module.split(".")[1:]:
        if part in ("linalg", "fft", "random"):
            owner = getattr(tnp, part)
    found = (_EXTRA.get(name) if owner is tnp else None) or getattr(owner, name, None)
    if found is None:
        where = ".".join(["numpy", *(p for p in module.split(".")[1:] if p in ("linalg", "fft"))])
        raise RequestError(
            f"{where}.{name} has no form for arrays that are cut over the mesh; write it with "
            "other functions, or gather first: numpy.asarray(a)"
        )
    return found


def _given(value: Any) -> Any:
    if isinstance(value, Array):
        return tnp.ndarray(value.tensor)
    if isinstance(value, np.ndarray):
        return tnp.ndarray(torch.from_numpy(np.ascontiguousarray(value)))
    if isinstance(value, np.generic):
        return tnp.ndarray(torch.from_numpy(np.array(value)))  # its dtype counts
    if isinstance(value, (np.dtype, type)) and _is_dtype(value):
        return tnp.dtype(np.dtype(value).name)
    if isinstance(value, tuple):
        return tuple(_given(v) for v in value)
    if isinstance(value, list):
        return [_given(v) for v in value]
    return value


def _is_dtype(value: Any) -> bool:
    return isinstance(value, np.dtype) or issubclass(value, (np.generic, bool, int, float, complex))


def _wrapped(value: Any) -> Any:
    if isinstance(value, tnp.ndarray):
        return Array(value.tensor)
    if isinstance(value, Tensor):
        return Array(value)
    if isinstance(value, tuple):
        return tuple(_wrapped(v) for v in value)
    if isinstance(value, list):
        return [_wrapped(v) for v in value]
    return value


def _call(function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    out = kwargs.pop("out", None)
    if isinstance(out, tuple):
        out = out[0] if len(out) == 1 else out
    out = None if isinstance(out, tuple) and not any(o is not None for o in out) else out
    name = getattr(function, "__name__", str(function)).removeprefix("_")
    where = kwargs.pop("where", True)
    if where is not True:
        raise RequestError(
            f"numpy.{name} with where= of an array that is cut over the mesh is not supported; "
            "use numpy.where(condition, value, other)"
        )
    try:
        found = function(*_given(tuple(args)), **{k: _given(v) for k, v in kwargs.items()})
    except NotImplementedError as error:
        raise RequestError(
            f"numpy.{name} of an array that is cut over the mesh does not take these arguments"
            f"{f' ({error})' if str(error) else ''}; write it otherwise, or gather first: "
            "numpy.asarray(a)"
        ) from error
    result = _wrapped(found)
    if out is None:
        return result
    if isinstance(out, np.ndarray):
        out[...] = np.asarray(result)
    else:
        out.tensor.copy_(result.tensor)
    return out


def _torch_dtype(dtype: Any) -> torch.dtype:
    found = getattr(torch, np.dtype(dtype).name)
    assert isinstance(found, torch.dtype)
    return found


def _numpy_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    return np.dtype(str(dtype).removeprefix("torch."))


def _concatenate(arrays: Any, axis: int | None = 0, **kwargs: Any) -> Any:
    return tnp.concatenate(arrays, axis=axis, **kwargs)


def _reshape(a: Any, shape: Any, **kwargs: Any) -> Any:
    return tnp.reshape(a, (shape,) if isinstance(shape, int) else shape, **kwargs)


def _integral(a: Any) -> bool:
    if isinstance(a, tnp.ndarray):
        return not (a.tensor.is_floating_point() or a.tensor.is_complex())
    return isinstance(a, int)  # a number of Python has no dtype


def _divide(x: Any, y: Any, **kwargs: Any) -> Any:
    """Of integers it is in double precision, whatever torch's default is."""
    x, y = (tnp.asarray(v) if isinstance(v, (list, tuple)) else v for v in (x, y))
    if _integral(x) and _integral(y):
        x = tnp.asarray(x).astype("float64")
    return tnp.divide(x, y, **kwargs)


def _outer(a: Any, b: Any) -> Any:
    return tnp.outer(tnp.ravel(a), tnp.ravel(b))


def _modf(x: Any) -> Any:
    whole = tnp.trunc(x)
    return tnp.copysign(x - whole, x), whole


def _cbrt(x: Any) -> Any:
    return tnp.copysign(tnp.abs(x) ** (1 / 3), x)


def _double(x: Any) -> Any:
    x = tnp.asarray(x)
    return x if x.tensor.is_complex() else x.astype("float64")


def _cov(m: Any, *args: Any, rowvar: bool = True, **kwargs: Any) -> Any:
    if args:
        raise NotImplementedError("name all arguments but the first")
    return tnp.cov(_double(m if rowvar else tnp.transpose(m)), **kwargs)


def _corrcoef(x: Any, *args: Any, rowvar: bool = True, **kwargs: Any) -> Any:
    if args:
        raise NotImplementedError("name all arguments but the first")
    return tnp.corrcoef(_double(x if rowvar else tnp.transpose(x)), **kwargs)


def _last(function: Callable[..., Any]) -> Callable[..., Any]:
    """A reduction of one axis, over any axes: they are brought to the end as one."""

    def run(a: Any, axis: Any, keepdims: bool, *args: Any, **kwargs: Any) -> Any:
        a = tnp.asarray(a)
        dims = range(a.ndim) if axis is None else axis if isinstance(axis, tuple) else (axis,)
        over = tuple(d % a.ndim for d in dims)
        rest = [d for d in range(a.ndim) if d not in over]
        x = tnp.reshape(tnp.transpose(a, (*rest, *over)), (*(a.shape[d] for d in rest), -1))
        out = tnp.asarray(function(x, *args, axis=-1, **kwargs))
        if keepdims:
            before = out.shape[: out.ndim - len(rest)]
            out = out.reshape((*before, *(1 if d in over else n for d, n in enumerate(a.shape))))
        return out

    return run


def _median(a: Any, axis: Any = None, *, keepdims: bool = False) -> Any:
    return _last(tnp.median)(a, axis, keepdims)


def _quantile(a: Any, q: Any, axis: Any = None, *, keepdims: bool = False, **kwargs: Any) -> Any:
    return _last(tnp.quantile)(a, axis, keepdims, q, **kwargs)


def _percentile(a: Any, q: Any, axis: Any = None, *, keepdims: bool = False, **kwargs: Any) -> Any:
    return _last(tnp.percentile)(a, axis, keepdims, q, **kwargs)


def _any(a: Any, axis: Any = None, *, keepdims: bool = False) -> Any:
    return _last(tnp.any)(tnp.asarray(a) != 0, axis, keepdims)


def _all(a: Any, axis: Any = None, *, keepdims: bool = False) -> Any:
    return _last(tnp.all)(tnp.asarray(a) != 0, axis, keepdims)


def _wide(name: str) -> Callable[..., Any]:
    """A sum or product: of small integers in 64 bits (signed: torch has no other)."""
    function = getattr(tnp, name)

    def run(a: Any, axis: Any = None, dtype: Any = None, **kwargs: Any) -> Any:
        a = tnp.asarray(a)
        if dtype is None and _integral(a):
            a, dtype = a.astype("int64"), "int64"
        if name == "prod" and isinstance(axis, tuple):
            return _last(tnp.prod)(a, axis, kwargs.get("keepdims", False), dtype=dtype)
        return function(a, axis=axis, dtype=dtype, **kwargs)

    run.__name__ = name
    return run


_METHODS = frozenset({"any", "all", "sum", "prod", "cumsum", "cumprod"})
_EXTRA: dict[str, Callable[..., Any]] = {
    "concat": _concatenate,
    "reshape": _reshape,
    "matrix_transpose": lambda x: tnp.swapaxes(x, -1, -2),
    "permute_dims": lambda x, axes=None: tnp.transpose(x, axes),
    "vecdot": lambda a, b, axis=-1: tnp.sum(tnp.conjugate(a) * b, axis=axis),
    "true_divide": _divide,
    "divide": _divide,
    "square": lambda x: x * x,
    "cbrt": _cbrt,
    "modf": _modf,
    "outer": _outer,
    "cov": _cov,
    "corrcoef": _corrcoef,
    "median": _median,
    "quantile": _quantile,
    "percentile": _percentile,
    "any": _any,
    "all": _all,
    **{name: _wide(name) for name in ("sum", "prod", "cumsum", "cumprod")},
}
