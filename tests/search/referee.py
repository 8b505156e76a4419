"""A second opinion: the same additive problem as a mixed-integer program, solved by HiGHS."""

from __future__ import annotations

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from autoshard.search.folded import Folded
from autoshard.search.problem import Problem
from autoshard.search.sums import Sums


def optimum(
    problem: Problem, exposed: float, limit: float | None = None, seconds: float = 60.0
) -> float:
    """The least seconds of any choice (within ``limit`` bytes), proved by HiGHS."""
    tables = problem.tables
    cost: list[float] = []
    size: list[float] = []
    upper: list[float] = []
    first = []
    for t in tables.unary:
        first.append(len(cost))
        cost += tables.unary_tables[t].seconds.tolist()
        size += tables.unary_tables[t].num_bytes.tolist()
        upper += [1.0] * len(tables.unary_tables[t].seconds)
    whole = len(cost)
    rows: list[int] = []
    columns: list[int] = []
    values: list[float] = []
    right: list[float] = []

    def term(row: int, column: int, value: float) -> None:
        rows.append(row)
        columns.append(column)
        values.append(value)

    for v, options in enumerate(tables.lists):
        for i in range(len(options)):
            term(len(right), first[v] + i, 1.0)
        right.append(1.0)
    for u, v, _, t in tables.edges:
        table = tables.edge_tables[t]
        value = table.value(exposed, 0.0)
        n, m = value.shape
        ends = len(right)
        right += [0.0] * (n + m)
        for i in range(n):
            term(ends + i, first[u] + i, -1.0)
        for j in range(m):
            term(ends + n + j, first[v] + j, -1.0)
        for i in range(n):
            for j in range(m):
                ways = [(value[i, j], 0.0)]
                if table.gathered is not None and table.gathered[i, j] and limit is not None:
                    assert table.again is not None
                    ways = [(value[i, j], table.gathered[i, j])]
                    ways.append((value[i, j] + table.again[i, j], 0.0))
                for seconds_, bytes_ in ways:
                    if not np.isfinite(seconds_):
                        continue
                    column = len(cost)
                    cost.append(float(seconds_))
                    size.append(float(bytes_))
                    upper.append(1.0)
                    term(ends + i, column, 1.0)
                    term(ends + n + j, column, 1.0)
    scale = max(cost)
    matrix = coo_array((values, (rows, columns)), shape=(len(right), len(cost))).tocsr()
    constraints = [LinearConstraint(matrix, right, right)]
    if limit is not None:
        unit = limit or 1.0
        constraints.append(LinearConstraint(np.array([size]) / unit, -np.inf, limit / unit))
    # With a limit, keeping and gathering again may not be mixed: all columns are whole then.
    integrality = (
        np.ones(len(cost))
        if limit is not None
        else np.r_[np.ones(whole), np.zeros(len(cost) - whole)]
    )
    found = milp(
        np.array(cost) / scale,
        constraints=constraints,
        bounds=Bounds(0, np.array(upper)),
        integrality=integrality,
        options={"time_limit": seconds, "mip_rel_gap": 1e-9},
    )
    assert found.status == 0, found.message
    return float(found.fun * scale)


def tied_optimum(folded: Folded, sums: Sums, limit: float, seconds: float = 60.0) -> float:
    """The least seconds of any choice within ``limit`` bytes, blocks alike, proved by HiGHS."""
    cost: list[float] = []
    size: list[float] = []
    first: list[int] = []
    for kind, rows_ in enumerate(folded.lists):
        first.append(len(cost))
        cost += sums.seconds[kind].tolist()
        size += sums.num_bytes[kind].tolist()
        assert len(rows_) == len(sums.seconds[kind])
    entries: list[tuple[int, int, float]] = []
    right: list[float] = []
    for kind, rows_ in enumerate(folded.lists):
        entries += [(len(right), first[kind] + i, 1.0) for i in range(len(rows_))]
        right.append(1.0)
    for factor in range(len(folded.lists), len(folded.scopes)):
        u, v = folded.scopes[factor]
        value, size_ = sums.seconds[factor], sums.num_bytes[factor]
        n, m = value.shape
        ends = len(right)
        right += [0.0] * (n + m)
        entries += [(ends + i, first[u] + i, -1.0) for i in range(n)]
        entries += [(ends + n + j, first[v] + j, -1.0) for j in range(m)]
        gathered = sums.gathered.get(factor)
        for i in range(n):
            for j in range(m):
                ways = [(value[i, j], size_[i, j])]
                if gathered is not None and gathered[i, j] > 0:
                    again = value[i, j] + sums.again[factor][i, j]
                    ways = [(value[i, j], size_[i, j] + gathered[i, j]), (again, size_[i, j])]
                for seconds_, bytes_ in ways:
                    if not np.isfinite(seconds_):
                        continue
                    entries += [(ends + i, len(cost), 1.0), (ends + n + j, len(cost), 1.0)]
                    cost.append(float(seconds_))
                    size.append(float(bytes_))
    rows, columns, values = zip(*entries, strict=True)
    matrix = coo_array((values, (rows, columns)), shape=(len(right), len(cost))).tocsr()
    scale = max(cost)
    found = milp(
        np.array(cost) / scale,
        constraints=[
            LinearConstraint(matrix, right, right),
            LinearConstraint(np.array([size]) / limit, -np.inf, 1.0),
        ],
        bounds=Bounds(0, 1),
        integrality=np.ones(len(cost)),
        options={"time_limit": seconds, "mip_rel_gap": 1e-6},
    )
    assert found.status == 0, found.message
    return float(found.fun * scale)
