from __future__ import annotations

import importlib
import importlib.metadata
import pkgutil
import subprocess
import sys

import pytest

import autoshard
from autoshard import _HOME


def test_import_alone_loads_nothing_slow() -> None:
    heavy = ["torch", "transformers", "optuna", "scipy", "numpy", "pydantic", "rich"]
    code = (
        "import sys, autoshard; autoshard.DeviceMesh.of(data=2); autoshard.ShardingSpec\n"
        f"found = [n for n in {heavy} if n in sys.modules]\nassert not found, found"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_public_names_are_those_of_the_table() -> None:
    assert sorted(autoshard.__all__) == sorted([*_HOME, "__version__"])
    assert set(autoshard.__all__) <= set(dir(autoshard))


@pytest.mark.parametrize("name", sorted(_HOME))
def test_public_name_leads_to_its_module(name: str) -> None:
    try:
        found = getattr(autoshard, name)
    except (ImportError, AttributeError):
        pytest.skip(f"{_HOME[name]} has no {name} yet")
    assert found is getattr(sys.modules[_HOME[name]], name)
    assert getattr(found, "__doc__", None)


@pytest.mark.parametrize("home", sorted({"autoshard", *_HOME.values()}))
def test_no_submodule_hides_a_public_name(home: str) -> None:
    # Importing ``package.name`` sets it on the package, in place of what a lazy name would find.
    package = importlib.import_module(home)
    modules = {found.name for found in pkgutil.iter_modules(getattr(package, "__path__", []))}
    assert not modules & {name for name in _HOME if home in ("autoshard", _HOME[name])}


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'autoshard' has no attribute 'optimise'"):
        _ = autoshard.optimise


def test_version_is_that_of_the_installation() -> None:
    assert autoshard.__version__ == importlib.metadata.version("autoshard")
