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
from functools import cache
from pathlib import Path
from typing import Any, cast

from autoshard.cluster import Cluster, Reduction, Tier, links
from autoshard.errors import AutoshardError
from autoshard.sharding.collective import MessageOp

DATA = Path(__file__).parent / "data" / "published_collectives.csv"
MIB = 1 << 20
LARGEST = 8 << 30
"""Bytes of a row that gives a bandwidth but no size: the sizes at which sweeps end."""
SOME_NODES = 4
"""Nodes of a row that says only that there were several."""

BUS: Mapping[str, Callable[[int], float]] = {
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
    op: MessageOp
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
        return prices(self.op, (0,), self.num_bytes)


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
    bandwidth = _number("busbw_GBps", row["busbw_GBps"])
    cluster, assumed = cluster_of(row["hardware"], row["nodes"], row["gpus"])
    if cluster.devices < 2:
        raise Unpriced("one device sends nothing")
    if row["bytes"]:
        num_bytes = int(_number("bytes", row["bytes"]))
    else:
        num_bytes = LARGEST
        assumed = (*assumed, f"size not stated: {LARGEST >> 30} GiB, where sweeps end")
    bus = BUS[op](cluster.devices) * num_bytes
    return Row(
        number=number,
        hardware=row["hardware"],
        source=row["source"],
        op=cast(MessageOp, op),
        num_bytes=num_bytes,
        measured_s=bus / (bandwidth * 1e9),
        cluster=cluster,
        assumed=assumed,
    )


def _number(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise Unpriced(f"{name} is {text!r}, not a positive number")
    return value


@cache
def cluster_of(text: str, node_count: str, device_count: str) -> tuple[Cluster, tuple[str, ...]]:
    """Preset's node, number of devices, and the link between nodes that a row names.

    Raises:
        Unpriced: hardware, or numbers of devices, that no preset describes.
    """
    assumed = []
    alone = bool(re.search(r"1 NIC|sockets|1 GPU/node", text))
    preset = next((name for form, name in NODES if re.search(form, text)), None)
    if preset is None:
        if not alone:
            raise Unpriced(f"no preset describes {text!r}")
        preset = "h100"
        assumed.append("device not stated: H100, one a node")
    if node_count == "multi":
        nodes = SOME_NODES
        assumed.append(f"number of nodes not stated: {SOME_NODES}")
    else:
        nodes = int(_number("nodes", node_count))
    found = Cluster.preset(preset)
    most = found.inside.devices or found.devices
    if device_count:
        devices = int(_number("gpus", device_count))
    else:
        devices = nodes if alone else nodes * found.devices_per_node
        assumed.append(f"number of devices not stated: {devices}")
    if devices % nodes:
        raise Unpriced(f"{devices} devices do not fill {nodes} nodes evenly")
    if devices // nodes > most:
        raise Unpriced(f"{devices // nodes} devices a node; {preset} has at most {most}")
    if nodes > 1 and _link_of(text) is None and devices > most:
        assumed.append(f"network not stated: {found.across.link}")
    try:
        return _network(_nodes(found, nodes, devices), text), tuple(assumed)
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
    if (link := _link_of(text)) is not None:
        fabric = _tier(fabric, link)
        per_node = cluster.devices_per_node
        cards = re.search(r"(\d+) ?x ?\d+ ?G", text)
        if cards and int(cards[1]) < per_node:
            fabric = replace(fabric, devices_per_card=per_node // int(cards[1]))
    if "SHARP" in text and "NVLS" not in text:
        rate = fabric.bytes_per_second
        fabric = replace(fabric, reduction=Reduction(bytes_per_second=rate, latency_s=0.0))
    return cluster.with_tier(0, node).with_tier(-1, fabric)


def _link_of(text: str) -> str | None:
    return next((name for form, name in CARDS if re.search(form, text)), None)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Constant:
    """A figure that is fitted, of a link (or of several that share it) or of a device.

    Attributes:
        owners: names of links, or of a device.
        field: of the tier, dotted; or of the cluster.
        prior: what it is without any row: data sheet or NCCL's table.
        most: what it cannot exceed: the wire.
    """

    owners: tuple[str, ...]
    field: str
    prior: float
    most: float = math.inf

    @property
    def name(self) -> str:
        """For a person."""
        return f"{', '.join(self.owners)}: {self.field}"

    def find(self, cluster: Cluster) -> float | None:
        """The figure of a cluster, None where the cluster does not have it."""
        if self.field == "collective_s":
            return cluster.collective_s if cluster.device.name.startswith(self.owners) else None
        titles = {links()[owner]["title"] for owner in self.owners}
        for tier in cluster.tiers:
            if tier.link in titles:
                at: Any = tier
                for part in self.field.split("."):
                    at = None if at is None else getattr(at, part)
                if at is not None:
                    return float(at)
        return None

    def put(self, cluster: Cluster, value: float) -> Cluster:
        """The cluster with another figure on every tier that has it."""
        if self.field == "collective_s":
            return replace(cluster, collective_s=value)
        titles = {links()[owner]["title"] for owner in self.owners}
        for i, tier in enumerate(cluster.tiers):
            if tier.link not in titles:
                continue
            outer, _, inner = self.field.partition(".")
            new: Any = value
            if inner:
                if tier.reduction is None:
                    continue
                new = replace(tier.reduction, **{inner: value})
            cluster = cluster.with_tier(i, replace(tier, **{outer: new}))
        return cluster


NVLINKS = ("nvlink2", "nvlink3", "nvlink4", "nvlink5", "nvlink5-rack")
CABLES = ("ib-edr", "ib-hdr", "ib-ndr", "omni-path-100")


def _bandwidth(link: str, wire: float, share: float) -> Constant:
    """``share`` of the wire without any row, and never more than headers leave (97%)."""
    return Constant(owners=(link,), field="bytes_per_second", prior=share * wire, most=0.97 * wire)


def _sums(link: str, wire: float) -> tuple[Constant, Constant]:
    rate, latency = "reduction.bytes_per_second", "reduction.latency_s"
    return (
        Constant(owners=(link,), field=rate, prior=0.85 * 0.8 * wire, most=wire),
        Constant(owners=(link,), field=latency, prior=50e-6),
    )


def constants() -> list[Constant]:
    """What is fitted; everything else is frozen.

    Priors: 80% of the wire inside a node, 95% of it between nodes, NCCL's table of latencies and
    its 7/9 for LL128 in a tree, for sums by switches 85% of the links' sustained rate and twice
    NCCL's 25 us, for latencies of networks that the table lacks 20 and 50 us. In the order in which
    they are fitted: what one kind of row alone tells comes first.
    """
    return [
        Constant(owners=("B200",), field="collective_s", prior=8.4e-6),
        Constant(owners=("efa-400", "efa-100"), field="latency_s", prior=20e-6),
        Constant(owners=("tcpxo-200",), field="latency_s", prior=20e-6),
        _bandwidth("nvlink2", 150e9, 0.8),
        _bandwidth("nvlink3", 300e9, 0.8),
        _bandwidth("nvlink4", 450e9, 0.8),
        _bandwidth("nvlink5", 900e9, 0.8),
        Constant(owners=(*NVLINKS, "efa-400"), field="short_share", prior=7 / 9, most=1.0),
        *_sums("nvlink4", 450e9),
        *_sums("nvlink5", 900e9),
        *_sums("nvlink5-rack", 900e9),
        _bandwidth("xgmi3", 448e9, 0.8),
        _bandwidth("pcie4", 31e9, 0.8),
        _bandwidth("pcie5", 63e9, 0.8),
        _bandwidth("ib-hdr", 25e9, 0.95),
        _bandwidth("ib-ndr", 50e9, 0.95),
        Constant(owners=CABLES, field="bulk_latency_s", prior=9.6e-6),
        _bandwidth("efa-100", 12.5e9, 0.95),
        _bandwidth("efa-400", 50e9, 0.95),
        Constant(owners=("efa-400", "efa-100"), field="bulk_latency_s", prior=50e-6),
        _bandwidth("tcpxo-200", 25e9, 0.95),
        Constant(owners=("tcpxo-200",), field="bulk_latency_s", prior=50e-6),
        Constant(owners=("tcpxo-200",), field="short_share", prior=7 / 9, most=1.0),
        _bandwidth("omni-path-100", 12.5e9, 0.95),
        _bandwidth("ethernet-100", 12.5e9, 0.8),
        Constant(owners=NVLINKS, field="latency_s", prior=1.2e-6),
    ]


def _with(cluster: Cluster, values: Mapping[Constant, float]) -> Cluster:
    for constant, value in values.items():
        if constant.find(cluster) is not None:
            cluster = constant.put(cluster, value)
    return cluster


def fit(rows: Sequence[Row]) -> dict[Constant, float]:
    """Constants that bring prices nearest to the rows, each from its prior by coordinate descent.

    The loss is the sum of |log(price / measured)|, cut off at 2, so that a single broken row counts
    little, and a hundredth of |log(value / prior)|, so what no row tells stays at its prior.
    """
    values = {c: c.prior for c in constants()}
    clusters = {id(row.cluster): row.cluster for row in rows}
    of: dict[int, list[Row]] = {}
    for row in rows:
        of.setdefault(id(row.cluster), []).append(row)
    uses = {
        c: [key for key, cluster in clusters.items() if c.find(cluster) is not None] for c in values
    }

    def loss(constant: Constant, value: float) -> float:
        trial = {**values, constant: value}
        total = 0.01 * abs(math.log(value / constant.prior))
        for key in uses[constant]:
            cluster = _with(clusters[key], trial)
            prices = cluster.collective_seconds((cluster.devices,))
            for row in of[key]:
                price = prices(row.op, (0,), row.num_bytes)
                total += min(2.0, abs(math.log(price / row.measured_s)))
        return total

    step = 0.3
    while step > 0.005:
        moved = False
        for constant in values:
            if not uses[constant]:
                continue
            here = values[constant]
            best = loss(constant, here)
            for steps in (1, -1, 3, -3):
                value = min(here * math.exp(steps * step), constant.most)
                if (found := loss(constant, value)) < best - 1e-9:
                    best, moved = found, True
                    values[constant] = value
        if not moved:
            step /= 2
    return values


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
    out: dict[str, Any] = {}
    joined: list[Priced] = []
    for name in dict.fromkeys(row.publisher for row in rows):
        values = fit([row for row in rows if row.publisher != name])
        found = [
            Priced(row, row.seconds(_with(row.cluster, values)))
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
    for constant, value in fit(rows).items():
        found = {constant.find(row.cluster) for row in rows} - {None}
        shown = ", ".join(f"{figure:.4g}" for figure in found)
        print(f"  {constant.name}")
        print(f"    prior {constant.prior:.4g}, fitted {value:.4g}, in the presets {shown}")


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
