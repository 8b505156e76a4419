"""The folders, the links, the package list and the built wheel name the same modules."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
SETUPTOOLS = PROJECT["tool"]["setuptools"]
FOLDERS: dict[str, str] = SETUPTOOLS["package-dir"]
PACKAGES: list[str] = SETUPTOOLS["packages"]
DATA: dict[str, list[str]] = SETUPTOOLS["package-data"]
LINKED = sorted(set(FOLDERS) - {"autoshard"})


def folder_of(package: str) -> Path:
    """The real folder of a package: the longest mapped prefix decides."""
    prefix = max((p for p in FOLDERS if f"{package}.".startswith(f"{p}.")), key=len)
    return ROOT / FOLDERS[prefix] / package.removeprefix(prefix).lstrip(".").replace(".", "/")


def modules_of_the_checkout() -> set[str]:
    """Each Python file under the mapped folders, by its path inside a wheel."""
    return {
        f"{package.replace('.', '/')}/{path.relative_to(ROOT / folder).as_posix()}"
        for package, folder in FOLDERS.items()
        for path in (ROOT / folder).rglob("*.py")  # does not descend into links
    }


def data_of_the_checkout() -> set[str]:
    """Each data file that package-data names, by its path inside a wheel."""
    return {
        f"{package.replace('.', '/')}/{path.relative_to(folder_of(package)).as_posix()}"
        for package, patterns in DATA.items()
        for pattern in patterns
        for path in folder_of(package).glob(pattern)
    }


@pytest.fixture(scope="module")
def wheel_names(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    # From a clean copy: in place, setuptools packs what an earlier build left behind.
    source = tmp_path_factory.mktemp("source")
    out = tmp_path_factory.mktemp("wheel")
    ignore = shutil.ignore_patterns("__pycache__")
    for folder in FOLDERS.values():
        shutil.copytree(ROOT / folder, source / folder, symlinks=True, ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip_wheel = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check"]
    offline = ["--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip_wheel, *offline, "--wheel-dir", str(out), str(source)], check=True)
    (wheel,) = out.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


def test_package_list_is_sorted_and_names_each_package_of_the_checkout() -> None:
    found = {str(Path(m).parent).replace("/", ".") for m in modules_of_the_checkout()}
    assert sorted(found) == PACKAGES


@pytest.mark.parametrize("package", PACKAGES)
def test_package_has_an_init(package: str) -> None:
    assert (folder_of(package) / "__init__.py").is_file()


@pytest.mark.parametrize("package", LINKED)
def test_link_in_the_package_is_relative_and_leads_to_the_mapped_folder(package: str) -> None:
    link = ROOT / package.replace(".", "/")
    assert link.is_symlink()
    assert link.readlink() == Path("..") / FOLDERS[package]
    assert link.resolve() == folder_of(package)


def test_wheel_holds_each_module_of_the_checkout(wheel_names: list[str]) -> None:
    assert {n for n in wheel_names if n.endswith(".py")} == modules_of_the_checkout()


def test_wheel_holds_the_data_and_the_licence(wheel_names: list[str]) -> None:
    assert "autoshard/py.typed" in wheel_names
    assert data_of_the_checkout() <= set(wheel_names)
    assert any(n.endswith(".dist-info/licenses/LICENSE") for n in wheel_names)


def test_wheel_has_one_top_level_name(wheel_names: list[str]) -> None:
    assert {n.split("/")[0] for n in wheel_names if ".dist-info/" not in n} == {"autoshard"}


@pytest.mark.parametrize("from_root", [True, False], ids=["from_root", "from_elsewhere"])
def test_linked_packages_import(from_root: bool, tmp_path: Path) -> None:
    code = f"import importlib\nfor name in {PACKAGES}: importlib.import_module(name)"
    where = ROOT if from_root else tmp_path
    subprocess.run([sys.executable, "-W", "error", "-c", code], cwd=where, check=True)


def test_bare_folder_names_do_not_import_from_elsewhere(tmp_path: Path) -> None:
    bare = [FOLDERS[package] for package in LINKED]
    code = f"from importlib.util import find_spec\nassert not [n for n in {bare} if find_spec(n)]"
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)


def test_command_line_entry_does_not_import_torch(tmp_path: Path) -> None:
    module, _, _ = PROJECT["project"]["scripts"]["autoshard"].partition(":")
    heavy = ["torch", "transformers", "optuna", "scipy"]
    code = f"import sys, {module}\nassert not [n for n in {heavy} if n in sys.modules]"
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)


def test_constraints_pin_torch_and_every_dependency_exactly() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = {
        line.partition("==")[0].lower().replace("_", "-")
        for line in lines
        if line and not line.startswith("#")
    }
    wanted = [*PROJECT["project"]["dependencies"]]
    for extra in PROJECT["project"]["optional-dependencies"].values():
        wanted += [w for w in extra if not w.startswith("autoshard[")]
    names = {w.split(">")[0].split("[")[0].strip().lower() for w in wanted}
    assert names <= pinned
