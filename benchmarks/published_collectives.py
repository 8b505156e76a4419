"""Published collectives against the prices that the planner uses.

    python benchmarks/published_collectives.py FILE.csv [--json]
    python benchmarks/published_collectives.py FILE.csv --leave-one-out
    python benchmarks/published_collectives.py FILE.csv --fit

Every row becomes a cluster (a preset's node, a known link between nodes) and is priced by
``Cluster.collective_seconds``, the function that the search calls. Columns: hardware, nodes, gpus,
op, bytes, busbw_GBps (as nccl-tests counts it), source. A row that cannot be expressed is listed
with the reason; one that leaves something open is priced under the assumption that is listed.

``--leave-one-out`` fits the constants without one publisher's rows and prices those;
``--fit`` fits them on all rows and prints them beside the presets' figures.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autoshard.cluster import Cluster, Reduction, Tier, links
from autoshard.errors import AutoshardError

DATA = Path(__file__).parent / "data" / "published_collectives.csv"
MIB = 1 << 20
LARGEST = 8 << 30
"""Bytes of a row that gives a bandwidth but no size: the sizes at which sweeps end."""
SOME_NODES = 4
"""Nodes of a row that says only that there were several."""

BUS = {
    "all_reduce": lambda p: 2 * (p - 1) / p,
    "all_gather": lambda p: (p - 1) / p,
    "reduce_scatter": lambda p: (p - 1) / p,
    "all_to_all": lambda p: (p - 1) / p,
    "send_recv": lambda p: 1.0,
}
"""Bus bytes for each byte of the message, nccl-tests doc/PERFORMANCE.md."""

# ---- from a row to a cluster --------------------------------------------------------------------

NODES: tuple[tuple[str, str], ...] = (
    (r"GB[23]00|NVL72", "gb200"),
    (r"B[23]00", "b200"),
    (r"H200", "h200"),
    (r"H100.*PCIe|PCIe Gen5", "pcie-gen5"),
    (r"A100.*PCIe|PCIe Gen4", "pcie-gen4"),
    (r"H100", "h100"),
    (r"A100.*80", "a100-80"),
    (r"A100", "a100-40"),
    (r"DGX-2", "v100-dgx2"),
    (r"V100", "v100-dgx1"),
    (r"MI300", "mi300x"),
    (r"910B", "ascend-910b"),
    (r"910C", "ascend-cloudmatrix384"),
    (r"TPU.?v4", "tpu-v4"),
    (r"TPU.?v5e", "tpu-v5e"),
    (r"TPU.?v5p", "tpu-v5p"),
)
"""The preset whose node a row's hardware names; the first that matches."""

CARDS: tuple[tuple[str, str], ...] = (
    (r"TCPXO", "tcpxo-200"),
    (r"Omni-?Path|OPA", "omni-path-100"),
    (r"100 ?Gb?\w* EFA", "efa-100"),
    (r"EFA", "efa-400"),
    (r"100 ?GbE|TCP", "ethernet-100"),
    (r"25 ?GbE", "ethernet-25"),
    (r"10 ?GbE", "ethernet-10"),
    (r"EDR|(?<!\d)100 ?G", "ib-edr"),
    (r"HDR|(?<!\d)200 ?G", "ib-hdr"),
    (r"NDR|(?<!\d)400 ?G", "ib-ndr"),
)
"""The link between nodes that a row's hardware names; the first that matches."""


class Unpriced(Exception):
    """Why a row cannot be priced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row of the file, as it can be priced.

    Attributes:
        number: from 1, without the heading.
        hardware: as the file has it.
        source: as the file has it.
        op: torch's spelling.
        num_bytes: as ``Collective.num_bytes`` counts them.
        measured_s: from the bus bandwidth.
        cluster: what it ran on.
        assumed: what the row left open.
    """

    number: int
    hardware: str
    source: str
    op: str
    num_bytes: int
    measured_s: float
    cluster: Cluster
    assumed: tuple[str, ...]

    @property
    def publisher(self) -> str:
        """Whose measurement it is: repository and issue, or the document that is quoted."""
        return publisher(self.source)

    @property
    def doubted(self) -> bool:
        """The source itself calls the network unhealthy."""
        return bool(re.search(r"known bad|SLOW", self.source))

    def seconds(self, cluster: Cluster | None = None) -> float:
        """What the planner says."""
        cluster = cluster or self.cluster
        prices = cluster.collective_seconds((cluster.devices,))
        return prices(self.op, (0,), self.num_bytes)  # type: ignore[arg-type]


def publisher(source: str) -> str:
    """Repository and issue of a source, or the document that it quotes."""
    if quoted := re.search(r"S62129", source):
        return f"NVIDIA GTC24 {quoted[0]}"
    issue = re.search(r"(?:issue|PR) #\d+", source)
    return " ".join(filter(None, [re.split(r"[@ ]", source)[0], issue and issue[0]]))


def read_row(number: int, row: Mapping[str, str]) -> Row:
    """A row of the file.

    Raises:
        Unpriced: it cannot be expressed; the message says why.
    """
    op = row["op"]
    if op not in BUS:
        raise Unpriced(f"op {op!r} is not one of {', '.join(BUS)}")
    if not row["busbw_GBps"]:
        raise Unpriced("no bandwidth is given")
    assumed: list[str] = []
    cluster = cluster_of(row, assumed)
    if cluster.devices < 2:
        raise Unpriced("one device sends nothing")
    if row["bytes"]:
        num_bytes = int(float(row["bytes"]))
    else:
        num_bytes = LARGEST
        assumed.append(f"size not stated: {LARGEST >> 30} GiB, where sweeps end")
    bus = BUS[op](cluster.devices) * num_bytes
    return Row(
        number=number,
        hardware=row["hardware"],
        source=row["source"],
        op=op,
        num_bytes=num_bytes,
        measured_s=bus / (float(row["busbw_GBps"]) * 1e9),
        cluster=cluster,
        assumed=tuple(assumed),
    )


def cluster_of(row: Mapping[str, str], assumed: list[str]) -> Cluster:
    """Preset's node, number of devices, and the link between nodes that a row names.

    Raises:
        Unpriced: hardware, or numbers of devices, that no preset describes.
    """
    text = row["hardware"]
    if not row["nodes"]:
        raise Unpriced("the number of nodes is not given")
    alone = bool(re.search(r"1 NIC|sockets|1 GPU/node", text))
    preset = next((name for form, name in NODES if re.search(form, text)), None)
    if preset is None:
        if not alone:
            raise Unpriced(f"no preset describes {text!r}")
        preset = "h100"
        assumed.append("device not stated: H100, one a node")
    if row["nodes"] == "multi":
        nodes = SOME_NODES
        assumed.append(f"number of nodes not stated: {SOME_NODES}")
    else:
        nodes = int(row["nodes"])
    found = Cluster.preset(preset)
    most = found.inside.devices or found.devices
    if row["gpus"]:
        devices = int(row["gpus"])
    else:
        devices = nodes if alone else nodes * found.devices_per_node
        assumed.append(f"number of devices not stated: {devices}")
    if devices % nodes:
        raise Unpriced(f"{devices} devices do not fill {nodes} nodes evenly")
    if devices // nodes > most:
        raise Unpriced(f"{devices // nodes} devices a node; {preset} has at most {most}")
    try:
        return _network(_nodes(found, nodes, devices), text)
    except AutoshardError as error:
        raise Unpriced(str(error)) from error


def _nodes(cluster: Cluster, nodes: int, devices: int) -> Cluster:
    """The cluster with nodes of as many devices as the row has."""
    node = cluster.inside
    if nodes > 1 and not (cluster.devices_per_node < (node.devices or 0)):
        # Fewer devices in a node are a smaller node; trays of a rack stay what they are.
        node = replace(node, devices=devices // nodes)
        cluster = replace(cluster, devices=1, devices_per_node=devices // nodes)
    return replace(cluster.with_tier(0, node), devices=devices)


def _network(cluster: Cluster, text: str) -> Cluster:
    """The link between nodes, and what switches sum."""
    node, fabric = cluster.inside, cluster.across
    if re.search(r"NVLS off|NVLink4$|NVL4 ", text):
        node = replace(node, reduction=None)
    if (link := next((n for form, n in CARDS if re.search(form, text)), None)) is not None:
        fabric = _tier(fabric, link)
        per_node = cluster.devices_per_node
        cards = re.search(r"(\d+) ?x ?\d+ ?G", text)
        if cards and int(cards[1]) < per_node:
            fabric = replace(fabric, devices_per_card=per_node // int(cards[1]))
    if "SHARP" in text and "NVLS" not in text:
        rate = fabric.bytes_per_second
        fabric = replace(fabric, reduction=Reduction(bytes_per_second=rate, latency_s=0.0))
    return cluster.with_tier(0, node).with_tier(-1, fabric)


def _tier(tier: Tier, link: str) -> Tier:
    known = links()[link]
    return replace(
        tier,
        link=known["title"],
        bytes_per_second=known["bytes_per_second"],
        latency_s=known["latency_s"],
        bulk_latency_s=known["bulk_latency_s"],
        short_share=known["short_share"],
        devices_per_card=1,
    )


def read(path: Path) -> tuple[list[Row], list[dict[str, Any]]]:
    """Rows that can be priced, and the others with the reason."""
    rows, skipped = [], []
    with path.open(encoding="utf-8", newline="") as file:
        for number, row in enumerate(csv.DictReader(file), 1):
            try:
                rows.append(read_row(number, row))
            except Unpriced as why:
                skipped.append({"row": number, "hardware": row["hardware"], "reason": str(why)})
    return rows, skipped


# ---- constants ----------------------------------------------------------------------------------

Find = Callable[[Cluster], float]
Put = Callable[[Cluster, float], Cluster]


@dataclass(frozen=True, slots=True, kw_only=True)
class Constant:
    """A figure that is fitted.

    Attributes:
        name: link or preset, and field.
        prior: what it is without any row: data sheet or NCCL's table.
        find: the figure of a cluster; raises KeyError where the cluster does not have it.
        put: a cluster with another figure.
    """

    name: str
    prior: float
    find: Find
    put: Put


def _link_constant(link: str, field: str, prior: float) -> Constant:
    title = links()[link]["title"]

    def place(cluster: Cluster) -> int:
        titles = [tier.link for tier in cluster.tiers]
        if title not in titles:
            raise KeyError(link)
        return titles.index(title)

    def find(cluster: Cluster) -> float:
        tier: Any = cluster.tiers[place(cluster)]
        for part in field.split("."):
            tier = getattr(tier, part)
            if tier is None:
                raise KeyError(field)
        return float(tier)

    def put(cluster: Cluster, value: float) -> Cluster:
        at = place(cluster)
        tier = cluster.tiers[at]
        if field.startswith("reduction."):
            assert tier.reduction is not None
            inner = replace(tier.reduction, **{field.partition(".")[2]: value})  # type: ignore[arg-type]
            return cluster.with_tier(at, replace(tier, reduction=inner))
        return cluster.with_tier(at, replace(tier, **{field: value}))  # type: ignore[arg-type]

    return Constant(name=f"{link}.{field}", prior=prior, find=find, put=put)


def _start(kind: str, prior: float) -> Constant:
    def find(cluster: Cluster) -> float:
        if not cluster.device.name.startswith(kind):
            raise KeyError(kind)
        return cluster.collective_s

    def put(cluster: Cluster, value: float) -> Cluster:
        return replace(cluster, collective_s=value)

    return Constant(name=f"{kind}.collective_s", prior=prior, find=find, put=put)


def constants() -> list[Constant]:
    """What is fitted; everything else is frozen.

    Priors: 80% of the wire inside a node, 95% of it between nodes, NCCL's table of latencies, its
    7/9 for LL128 in a tree, and for sums by switches 85% of the links' sustained rate.
    """
    return [
        _link_constant(*given)
        for given in (
            ("nvlink2", "bytes_per_second", 0.8 * 150e9),
            ("nvlink3", "bytes_per_second", 0.8 * 300e9),
            ("nvlink4", "bytes_per_second", 0.8 * 450e9),
            ("nvlink4", "latency_s", 1.2e-6),
            ("nvlink4", "short_share", 7 / 9),
            ("nvlink4", "reduction.bytes_per_second", 0.85 * 0.8 * 450e9),
            ("nvlink4", "reduction.latency_s", 50e-6),
            ("nvlink5", "bytes_per_second", 0.8 * 900e9),
            ("nvlink5", "short_share", 7 / 9),
            ("nvlink5", "reduction.bytes_per_second", 0.85 * 0.8 * 900e9),
            ("nvlink5", "reduction.latency_s", 50e-6),
            ("nvlink5-rack", "reduction.bytes_per_second", 0.85 * 0.8 * 900e9),
            ("nvlink5-rack", "reduction.latency_s", 50e-6),
            ("xgmi3", "bytes_per_second", 0.8 * 448e9),
            ("pcie4", "bytes_per_second", 0.8 * 31e9),
            ("pcie5", "bytes_per_second", 0.8 * 63e9),
            ("ib-hdr", "bytes_per_second", 0.95 * 25e9),
            ("ib-ndr", "bytes_per_second", 0.95 * 50e9),
            ("ib-ndr", "bulk_latency_s", 9.6e-6),
            ("efa-100", "bytes_per_second", 0.95 * 12.5e9),
            ("efa-400", "bytes_per_second", 0.95 * 50e9),
            ("efa-400", "latency_s", 20e-6),
            ("efa-400", "bulk_latency_s", 50e-6),
            ("efa-400", "short_share", 7 / 9),
            ("tcpxo-200", "bytes_per_second", 0.95 * 25e9),
            ("tcpxo-200", "latency_s", 20e-6),
            ("tcpxo-200", "bulk_latency_s", 50e-6),
            ("tcpxo-200", "short_share", 7 / 9),
            ("omni-path-100", "bytes_per_second", 0.95 * 12.5e9),
            ("ethernet-100", "bytes_per_second", 0.8 * 12.5e9),
        )
    ] + [_start("B200", 8.4e-6)]


def _with(cluster: Cluster, values: Mapping[str, tuple[Constant, float]]) -> Cluster:
    for constant, value in values.values():
        try:
            constant.find(cluster)
        except KeyError:
            continue
        cluster = constant.put(cluster, value)
    return cluster


def fit(rows: Sequence[Row]) -> dict[str, float]:
    """Constants that bring prices nearest to the rows, each from its prior by coordinate descent.

    The loss is the mean of |log(price / measured)|, in which a rounded figure of a small message
    counts little, and a hundredth of |log(value / prior)|, so what no row tells stays where it was.
    """
    known = constants()
    values = {c.name: (c, c.prior) for c in known}
    uses: dict[str, list[Row]] = {c.name: [] for c in known}
    for row in rows:
        for c in known:
            try:
                c.find(row.cluster)
            except KeyError:
                continue
            uses[c.name].append(row)

    def loss(name: str, value: float) -> float:
        constant, _ = values[name]
        trial = {**values, name: (constant, value)}
        made: dict[int, Cluster] = {}
        total = 0.0
        for row in uses[name]:
            key = id(row.cluster)
            if key not in made:
                made[key] = _with(row.cluster, trial)
            off = abs(math.log(row.seconds(made[key]) / row.measured_s))
            total += min(off, 1.0)
        return total + 0.01 * abs(math.log(value / constant.prior))

    step = 0.3
    while step > 0.004:
        moved = False
        for constant in known:
            name = constant.name
            if not uses[name]:
                continue
            here = values[name][1]
            best = loss(name, here)
            for factor in (math.exp(step), math.exp(-step), math.exp(3 * step), math.exp(-3 * step)):
                value = here * factor
                if name.endswith("short_share") and value > 1:
                    continue
                found = loss(name, value)
                if found < best - 1e-12:
                    best, moved = found, True
                    values[name] = (constant, value)
        if not moved:
            step /= 2
    return {name: value for name, (_, value) in values.items()}


# ---- errors -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Priced:
    """A row and what the model says."""

    row: Row
    predicted_s: float

    @property
    def error(self) -> float:
        """Of the time, as a share of what was measured; above 0: priced too slow."""
        return self.predicted_s / self.row.measured_s - 1


def summary(found: Iterable[Priced]) -> dict[str, Any]:
    """Error from 1 MiB up; below it, how many rows lie within a factor 2."""
    rows = list(found)
    large = [p for p in rows if p.row.num_bytes >= MIB]
    small = [p for p in rows if p.row.num_bytes < MIB]
    out: dict[str, Any] = {"rows": len(rows)}
    if large:
        out["from_1_MiB"] = {
            "rows": len(large),
            "mape": statistics.fmean(abs(p.error) for p in large),
            "bias": statistics.fmean(p.error for p in large),
        }
    if small:
        ratios = [max(1 + p.error, 1 / (1 + p.error)) for p in small]
        out["below_1_MiB"] = {
            "rows": len(small),
            "within_2x": sum(r <= 2 for r in ratios),
            "median_ratio": statistics.median(ratios),
        }
    return out


def report(path: Path) -> dict[str, Any]:
    """Everything that is printed, as a document."""
    rows, skipped = read(path)
    priced = [Priced(row, row.seconds()) for row in rows]

    def by(key: Callable[[Priced], str]) -> dict[str, Any]:
        groups: dict[str, list[Priced]] = {}
        for p in priced:
            groups.setdefault(key(p), []).append(p)
        return {name: summary(group) for name, group in groups.items()}

    worst = sorted(priced, key=lambda p: -abs(math.log(1 + p.error)))[:8]
    return {
        "all": summary(priced),
        "healthy": summary(p for p in priced if not p.row.doubted),
        "fully_stated": summary(p for p in priced if not p.row.assumed and not p.row.doubted),
        "hardware": by(lambda p: f"{p.row.hardware}: {p.row.op}, {p.row.cluster.devices} devices"),
        "sources": by(lambda p: p.row.publisher),
        "worst": [_row_document(p) for p in worst],
        "assumed": [
            {"row": p.row.number, "hardware": p.row.hardware, "assumed": list(p.row.assumed)}
            for p in priced
            if p.row.assumed
        ],
        "skipped": skipped,
        "constants": len(constants()),
    }


def _row_document(p: Priced) -> dict[str, Any]:
    return {
        "row": p.row.number,
        "hardware": p.row.hardware,
        "op": p.row.op,
        "devices": p.row.cluster.devices,
        "bytes": p.row.num_bytes,
        "measured_s": p.row.measured_s,
        "predicted_s": p.predicted_s,
        "error": p.error,
    }


def leave_one_out(path: Path) -> dict[str, Any]:
    """Each publisher's rows under constants that were fitted without them."""
    rows, _ = read(path)
    known = {c.name: c for c in constants()}
    out: dict[str, Any] = {}
    joined: list[Priced] = []
    for name in dict.fromkeys(row.publisher for row in rows):
        values = fit([row for row in rows if row.publisher != name])
        given = {key: (known[key], value) for key, value in values.items()}
        found = [
            Priced(row, row.seconds(_with(row.cluster, given)))
            for row in rows
            if row.publisher == name
        ]
        joined += found
        out[name] = summary(found)
    return {"all": summary(joined), "sources": out}


# ---- printing -----------------------------------------------------------------------------------


def _line(name: str, found: Mapping[str, Any]) -> str:
    large, small = found.get("from_1_MiB"), found.get("below_1_MiB")
    text = f"  {name[:84]:84}"
    text += f" {large['rows']:4} {large['mape']:7.1%} {large['bias']:+7.1%}" if large else " " * 21
    if small:
        text += f"   {small['within_2x']:2} of {small['rows']:2}, {small['median_ratio']:.2f}"
    return text.rstrip()


HEAD = f"  {'':84} {'rows':>4} {'MAPE':>7} {'bias':>7}   below 1 MiB: within 2x, median ratio"


def _print(found: Mapping[str, Any]) -> None:
    print("error of the time, from 1 MiB up; below that, within a factor 2")
    print(HEAD)
    for title, group in (("by hardware and op", "hardware"), ("by source", "sources")):
        print(title)
        for name, one in found[group].items():
            print(_line(name, one))
    print("together")
    print(_line("all rows that are priced", found["all"]))
    print(_line("without networks that their source calls unhealthy", found["healthy"]))
    print(_line("and only rows that state size and number of nodes", found["fully_stated"]))
    print("worst rows")
    for p in found["worst"]:
        print(
            f"  row {p['row']}: {p['hardware']}, {p['op']} of {p['bytes']:,} bytes: measured "
            f"{p['measured_s'] * 1e6:,.0f} us, priced {p['predicted_s'] * 1e6:,.0f} us"
        )
    print(f"priced under an assumption: {len(found['assumed'])}")
    for row in found["assumed"]:
        print(f"  row {row['row']}: {row['hardware']}: {'; '.join(row['assumed'])}")
    print(f"not priced: {len(found['skipped'])}")
    for row in found["skipped"]:
        print(f"  row {row['row']}: {row['hardware']}: {row['reason']}")
    print(f"fitted constants: {found['constants']}, each of a link or a device")


def _print_left_out(found: Mapping[str, Any]) -> None:
    print("constants fitted without the source, its rows then priced")
    print(HEAD)
    for name, one in found["sources"].items():
        print(_line(name, one))
    print(_line("all", found["all"]))


def _print_fit(path: Path) -> None:
    rows, _ = read(path)
    values = fit(rows)
    for constant in constants():
        used = {constant.find(r.cluster) for r in rows if _has(constant, r.cluster)}
        print(
            f"  {constant.name:40} prior {constant.prior:10.4g} fitted {values[constant.name]:10.4g}"
            f"  in the presets {', '.join(f'{u:.4g}' for u in sorted(used))}"
        )


def _has(constant: Constant, cluster: Cluster) -> bool:
    try:
        constant.find(cluster)
    except KeyError:
        return False
    return True


def main(arguments: Sequence[str] = ()) -> None:
    """Print the report."""
    parser = argparse.ArgumentParser(description="Published collectives against their prices.")
    parser.add_argument("file", nargs="?", type=Path, default=DATA)
    parser.add_argument("--json", action="store_true", help="a document instead of tables")
    parser.add_argument(
        "--leave-one-out", action="store_true", help="constants fitted without each source"
    )
    parser.add_argument("--fit", action="store_true", help="fit the constants and print them")
    given = parser.parse_args(arguments)
    if given.fit:
        _print_fit(given.file)
        return
    found = report(given.file)
    if given.leave_one_out:
        found["leave_one_out"] = leave_one_out(given.file)
    if given.json:
        print(json.dumps(found, indent=1))
        return
    _print(found)
    if given.leave_one_out:
        _print_left_out(found["leave_one_out"])


if __name__ == "__main__":
    import sys

    main(sys.argv[1:])
