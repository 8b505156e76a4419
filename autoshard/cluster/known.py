"""Known clusters and known links, as documents with their sources."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

from autoshard.errors import RequestError, UnknownNameError

ALIASES: Mapping[str, str] = {
    "a100": "a100-80",
    "v100": "v100-dgx1",
    "gb200-nvl72": "gb200",
    "ascend-910c": "ascend-cloudmatrix384",
}
"""Other names of presets."""

LINKS = "_links"
"""The file of links; a file with an underscore is no preset."""


def presets() -> tuple[str, ...]:
    """Names of the known clusters, sorted."""
    names = (entry.name for entry in resources.files("autoshard.clusters").iterdir())
    return tuple(
        sorted(n.removesuffix(".toml") for n in names if n.endswith(".toml") and n[0] != "_")
    )


def preset_document(name: str) -> dict[str, Any]:
    """The document of a preset, its links spelled out.

    Raises:
        UnknownNameError: no such preset.
    """
    key = ALIASES.get(name, name)
    if key not in presets():
        raise UnknownNameError("cluster preset", name, [*presets(), *ALIASES])
    return with_links(_file(key))


def links() -> Mapping[str, Any]:
    """Known links by name: figures of a tier, ``title``, and ``sources``."""
    return _links()


@cache
def _links() -> Mapping[str, Any]:
    return _file(LINKS)


def _file(name: str) -> dict[str, Any]:
    text = (resources.files("autoshard.clusters") / f"{name}.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def with_links(document: Mapping[str, Any]) -> dict[str, Any]:
    """The document with the figures of the links that its tiers name; what a tier says stands.

    A ``link`` that is not known is the name of the tier's own: then the tier gives all figures.

    Raises:
        RequestError: a tier that gives no bandwidth and names no known link.
    """
    tiers = document.get("tiers")
    if not isinstance(tiers, Mapping):
        return dict(document)
    sources = document.get("sources")
    named = dict(sources) if isinstance(sources, Mapping) else {}
    out: dict[str, Any] = {}
    for name, tier in tiers.items():
        link = tier.get("link") if isinstance(tier, Mapping) else None
        if not isinstance(link, str) or link not in links():
            if isinstance(tier, Mapping) and "bytes_per_second" not in tier:
                raise RequestError(
                    f"tiers.{name} has no bytes_per_second and names no known link; known links: "
                    f"{', '.join(links())}"
                )
            out[name] = tier
            continue
        known = links()[link]
        figures = {k: v for k, v in known.items() if k not in ("title", "sources")}
        out[name] = {**figures, **tier, "link": known["title"]}
        for field, source in known["sources"].items():
            own = field.partition(".")[0] in tier
            if not own:
                named.setdefault(f"tiers.{name}.{field}", source)
    return {**document, "tiers": out, "sources": named}
