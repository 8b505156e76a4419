"""Operators that make tensors: constants at the local shape, random numbers at the global one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autoshard.runtime.local.adapt import plain
from autoshard.runtime.local.calls import python_value
from autoshard.runtime.local.site import Local, Site, local_for
from autoshard.runtime.shards import shard_viewer
from autoshard.sharding.rules.dims import number


def _taken(site: Site, whole: Local) -> Local:
    """This device's part of what ``whole`` makes for the global shape."""
    take = shard_viewer(site.call.result, site.result, site.mesh, site.coordinate)
    return lambda *tensors: take(whole(*tensors))


def _where(site: Site) -> dict[str, Any]:
    return {} if site.device is None else {"device": site.device}


@local_for("aten.zeros", "aten.ones", "aten.full")
def filled(site: Site) -> Local:
    """At the local shape."""
    return plain(site, size=site.result_shape, **_where(site))


@local_for("aten.new_zeros", "aten.new_ones", "aten.new_full")
def filled_from(site: Site) -> Local:
    """At the local shape, with the operand's dtype and device."""
    return plain(site, size=site.result_shape)


@local_for("aten.rand", "aten.randn", "aten.randint")
def random(site: Site) -> Local:
    """Drawn for the global shape."""
    return _taken(site, plain(site, size=site.call.result, **_where(site)))


@local_for("aten.arange", "aten.scalar_tensor")
def counted(site: Site) -> Local:
    """All of it, then this device's part."""
    return _taken(site, plain(site, **_where(site)))


@local_for("aten.rand_like", "aten.randn_like")
def random_like(site: Site) -> Local:
    """Drawn for the global shape."""
    draw = torch.rand if site.call.family == "aten.rand_like" else torch.randn
    shape, dtype = site.call.result, python_value("dtype", site.attr("dtype"))
    return _taken(site, lambda x: draw(shape, dtype=dtype or x.dtype, device=x.device))


@local_for("aten.bernoulli")
def bernoulli(site: Site) -> Local:
    """Drawn for the global shape where the probability is a number."""
    if "p" not in site.call.attrs:
        return plain(site)
    shape, p = site.call.result, number(site.call, "p", 0.5)

    def draw(x: Tensor) -> Tensor:
        return torch.empty(shape, dtype=x.dtype, device=x.device).bernoulli_(p)

    return _taken(site, draw)
