"""Code and documentation say the same."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
RUN = [ROOT / "README.md", ROOT / "docs" / "rules.md"]
"""Pages whose Python blocks are run."""

BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"# file: (\w+\.py)\n")
OFFLINE = """
import socket
def refused(*arguments, **named):
    raise OSError("the documentation's blocks run without a network")
socket.getaddrinfo = refused
"""
"""What a block runs after: no name of another machine can be looked up."""


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@cache
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_generate", ROOT / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def blocks(page: Path) -> tuple[dict[str, str], list[str]]:
    """Modules by file name, and scripts."""
    files, scripts = {}, []
    for text in BLOCK.findall(page.read_text(encoding="utf-8")):
        if found := FILE.match(text):
            files[found[1]] = text
        else:
            scripts.append(text)
    return files, scripts


@pytest.mark.multirank
@pytest.mark.parametrize(
    ("page", "number"),
    [pytest.param(p, i, id=f"{name(p)}-{i}") for p in RUN for i in range(len(blocks(p)[1]))],
)
def test_python_blocks_run_offline(page: Path, number: int, tmp_path: Path) -> None:
    files, scripts = blocks(page)
    for file, text in files.items():
        (tmp_path / file).write_text(text, encoding="utf-8")
    (tmp_path / "sitecustomize.py").write_text(OFFLINE, encoding="utf-8")
    (tmp_path / "block.py").write_text(scripts[number], encoding="utf-8")
    found = subprocess.run(
        [sys.executable, "-P", "block.py"],
        cwd=tmp_path,
        env={"PYTHONPATH": f"{tmp_path}:{ROOT}", "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert found.returncode == 0, found.stdout + found.stderr
    shown = _shown_after(page, number)
    for line in shown:
        assert line in found.stdout, f"{name(page)} shows {line!r}, found:\n{found.stdout}"


def _shown_after(page: Path, number: int) -> list[str]:
    """Lines of the indented block right after a script; figures may differ in their last digits."""
    text = page.read_text(encoding="utf-8")
    ends = [m for m in BLOCK.finditer(text) if not FILE.match(m[1])]
    after = text[ends[number].end() :]
    shown = re.match(r"\n\n((?:    .+\n)+)", after)
    if shown is None:
        return []
    lines = [line.strip() for line in shown[1].splitlines()]
    return [line for line in lines if not re.search(r"\d\.\de[+-]\d\d", line)]


@pytest.mark.parametrize(
    "page", ["cli.md", "errors.md", "plan.schema.json", "presets.md", "rules.md"]
)
def test_generated_page_is_current(page: str) -> None:
    pages = generator()
    stands = (pages.REFERENCE / page).read_text(encoding="utf-8")
    assert pages.PAGES[page]() == stands, "run python docs/generate.py"


def test_every_generated_page_is_there_and_no_other() -> None:
    pages = generator()
    assert {p.name for p in pages.REFERENCE.iterdir()} == set(pages.PAGES)


def _in_docs() -> str:
    return "\n".join(p.read_text(encoding="utf-8") for p in PAGES)


def test_every_command_is_documented() -> None:
    text = _in_docs()
    assert [c for c in generator().commands() if f"## autoshard {c}\n" not in text] == []


def test_every_operator_family_is_documented() -> None:
    from autoshard.sharding.registry import known_families, user_rules

    text = _in_docs()
    families = set(known_families()) - set(user_rules())
    assert sorted(f for f in families if f"`{f}`" not in text) == []


def test_every_error_is_documented() -> None:
    import autoshard.errors

    pages = [ROOT / "docs" / "errors.md", ROOT / "docs" / "reference" / "errors.md"]
    text = pages[0].read_text(encoding="utf-8")
    names = [n for n in dir(autoshard.errors) if n.endswith("Error")]
    assert [n for n in names if n not in text] == []
    tree = pages[1].read_text(encoding="utf-8")
    assert [n for n in names if f"## {n}\n" not in tree] == []


def test_every_preset_is_documented() -> None:
    from autoshard.analyzer import list_presets
    from autoshard.cluster import ALIASES, presets

    text = (ROOT / "docs" / "reference" / "presets.md").read_text(encoding="utf-8")
    assert [n for n in list_presets() if f"| `{n}` |" not in text] == []
    assert [n for n in presets() if f"### {n}" not in text] == []
    assert [n for n in ALIASES if f"`{n}`" not in text] == []


def test_every_field_of_a_plan_is_documented() -> None:
    from autoshard.plan import PLAN_VERSION, PlanDocument

    text = (ROOT / "docs" / "plan-format.md").read_text(encoding="utf-8")
    assert f'`kind: "autoshard.plan"`, `schema_version: {PLAN_VERSION}`' in text
    fields = set(PlanDocument.model_fields) - {"kind", "schema_version"}
    assert sorted(f for f in fields if f"`{f}`" not in text) == []


def test_every_optimizer_is_documented() -> None:
    from autoshard.search.memory import OPTIMIZERS

    text = (ROOT / "docs" / "cost-model.md").read_text(encoding="utf-8")
    assert [n for n in OPTIMIZERS if f"`{n}`" not in text] == []


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_internal_links_resolve(page: Path) -> None:
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        if not found.exists() or (anchor and anchor not in _anchors(found)):
            broken.append(target)
    assert broken == []


@cache
def _anchors(page: Path) -> set[str]:
    """Anchors of headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    heads = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}
