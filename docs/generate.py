"""Write the generated reference pages, or compare them with what stands there.

    python docs/generate.py            writes docs/reference/
    python docs/generate.py --check    ends with status 1 where a page is out of date

Everything on these pages is read from the code: commands from the command line itself, rules from
the registry on example calls (those of the rules' tests), presets from their files, errors from
their classes, the schema from the plan's classes.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

REFERENCE = ROOT / "docs" / "reference"
NOTE = "<!-- Written by `python docs/generate.py`; do not edit. -->\n\n"
MOST_EXAMPLES = 4
"""Example calls of one rule function; calls whose rule reads the same count once."""


# ---- commands ---------------------------------------------------------------------------------


def commands() -> list[str]:
    """Names of the commands."""
    from typer.main import get_command

    from autoshard.cli.app import app

    return list(getattr(get_command(app), "commands", {}))


def help_of(*arguments: str) -> str:
    """What ``autoshard ... --help`` prints in 80 columns."""
    from autoshard.cli.app import run

    out = io.StringIO()
    with _environment(COLUMNS="100", TERMINAL_WIDTH="80"), contextlib.redirect_stdout(out):
        run([*arguments, "--help"])
    return "\n".join(line.rstrip() for line in out.getvalue().strip().splitlines())


@contextlib.contextmanager
def _environment(**values: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def cli_page() -> str:
    """Every command with its help."""
    parts = [
        NOTE + "# Commands\n",
        "Results go to stdout, progress and errors to stderr. `--json` prints one document on "
        "stdout and nothing else there. Exit status: 0 done, 2 the request was wrong, 3 nothing "
        "fits, 4 validation failed, 1 anything else.\n",
        f"```text\n$ autoshard --help\n{help_of()}\n```\n",
    ]
    for name in commands():
        text = help_of(name)
        parts.append(f"## autoshard {name}\n\n```text\n$ autoshard {name} --help\n{text}\n```\n")
    return "\n".join(parts)


# ---- rules ------------------------------------------------------------------------------------


def rules_page() -> str:
    """Every operator family, by the function that gives its rule, with example calls."""
    from autoshard.sharding import rules
    from autoshard.sharding.registry import _RULES, known_families, user_rules
    from tests.rules.cases import CASES
    from tests.rules.simulation import Whole

    calls: dict[str, list[Whole]] = {}
    for case in CASES:
        calls.setdefault(case.family, []).append(Whole(case, 0))
    functions: dict[Callable[..., object], list[str]] = {}
    for family in known_families():
        if family not in user_rules():
            functions.setdefault(_RULES[family], []).append(family)
    count = sum(len(families) for families in functions.values())
    parts = [
        NOTE + "# Rules by operator\n",
        f"{count} operator families have a rule, given by {len(functions)} functions. How to read "
        "a rule, and how to write one: [rules.md](../rules.md).\n",
        "*Partial*: the operands that may be partial sums, each set together; the result is then "
        "one too. *Inside*: messages that the operator issues itself where the named factors are "
        "cut.\n",
    ]
    for name in rules.__all__:
        module = getattr(rules, name)
        mine = [f for f in functions if f.__module__ == module.__name__]
        mine.sort(key=lambda f: inspect.getsourcelines(f)[1])
        parts.append(f"## {name}\n\n{_paragraphs(inspect.getdoc(module) or '')}\n")
        for function in mine:
            parts.append(_rule_section(function, functions[function], calls))
    return "\n".join(parts)


def _rule_section(
    function: Callable[..., object], families: list[str], calls: dict[str, list[object]]
) -> str:
    rows: dict[str, str] = {}
    for whole in (w for family in families for w in calls.get(family, ())):
        if len(rows) == MOST_EXAMPLES:
            break
        rows.setdefault(str(whole.rule), _rule_row(whole))
    listed = ", ".join(f"`{family}`" for family in families)
    head = "| call | rule | partial | inside |\n|---|---|---|---|\n"
    doc = _paragraphs(inspect.getdoc(function) or "")
    return f"**{listed}**\n\n{doc}\n\n{head}{''.join(rows.values())}"


def _rule_row(whole: object) -> str:
    call, rule = whole.call, whole.rule
    operands = ", ".join(
        f"{role} {_shape(shape)}" for role, shape in zip(call.roles, call.shapes, strict=True)
    )
    attrs = ", ".join(f"{k}={_value(v)}" for k, v in call.attrs.items())
    name = call.op.removesuffix(".default")
    text = f"`{name}({', '.join(filter(None, (operands, attrs)))})` gives `{_shape(call.result)}`"
    linear = "; ".join(" ".join(call.roles[i] for i in sorted(group)) for group in rule.linear)
    inside = "; ".join(_message(internal) for internal in rule.internal)
    return f"| {text} | `{str(rule).strip()}` | {linear} | {inside} |\n"


def _message(internal: object) -> str:
    """``all_reduce of 2 x n elements, forward, where v is cut``."""
    count = [str(internal.count)] if internal.count > 1 or not internal.elements else []
    size = " x ".join((*count, *internal.elements))
    cut = " or ".join(sorted(internal.when))
    return f"{internal.op} of {size} elements, {internal.phase}, where {cut} is cut"


def _value(value: object) -> str:
    """An attribute; a number that only says "to the end" is not worth its digits."""
    return "..." if isinstance(value, int) and value > 2**31 else repr(value)


def _shape(shape: Iterable[int]) -> str:
    return f"[{', '.join(map(str, shape))}]"


def _paragraphs(text: str) -> str:
    """A docstring as Markdown: its double backquotes become single ones."""
    return re.sub(r"``([^`]*)``", r"`\1`", text).strip()


# ---- presets ----------------------------------------------------------------------------------

FIGURES = (
    ("layers", ("num_hidden_layers", "n_layer", "num_layers", "depths")),
    ("width", ("hidden_size", "n_embd", "d_model", "embed_dim", "hidden_sizes")),
    ("heads", ("num_attention_heads", "n_head", "num_heads")),
    ("key heads", ("num_key_value_heads",)),
    ("vocabulary", ("vocab_size",)),
)
"""Columns of the table of models, and the config fields that they are read from."""


def presets_page() -> str:
    """Models and clusters, with their figures and sources."""
    from autoshard.cluster import ALIASES, Cluster, presets

    parts = [
        NOTE + "# Presets\n",
        "## Models\n",
        "`autoshard plan NAME`. Each is a Hugging Face config, built by `transformers` with random "
        "weights; parameters are counted on the model that it builds, tied ones once.\n",
        "| name | class | parameters | " + " | ".join(n for n, _ in FIGURES) + " | dtype |",
        "|---|---|--:|" + "---|" * len(FIGURES) + "---|",
        *(_model_row(*row) for row in _models()),
        "\nWhere the figures come from:\n",
        *(f"- `{name}`: {_linked(config['_source'])}" for name, config, _ in _models()),
        "\n## Clusters\n",
        "`--cluster NAME`, with `--devices N` for another number of devices. A file of the same "
        "form (`cluster.toml`, `cluster.json`) is taken too. `local` is this machine: its memory "
        "is read from the machine, and its rates fall where there are more processes than cores.\n",
    ]
    for name in presets():
        cluster = Cluster.preset(name)
        names = ", ".join(f"`{a}`" for a, of in sorted(ALIASES.items()) if of == name)
        also = f" (also called {names})" if names else ""
        parts.append(f"### {name}{also}\n\n{_cluster_table(name, cluster)}")
    return "\n".join(parts)


_MODELS: list[tuple[str, dict[str, object], int]] = []


def _models() -> list[tuple[str, dict[str, object], int]]:
    """(name, config, number of parameters) of every model preset."""
    from autoshard.analyzer import list_presets, load_preset
    from autoshard.analyzer._sources import resolve

    if not _MODELS:
        for name in list_presets():
            module = resolve(name, None).plan(None)
            count = sum(p.numel() for p in module.parameters())
            _MODELS.append((name, load_preset(name), count))
    return _MODELS


def _model_row(name: str, config: dict[str, object], count: int) -> str:
    cells = [f"`{name}`", str(config["architectures"][0]), f"{count:,}"]
    for _, fields in FIGURES:
        found = next((config[f] for f in fields if config.get(f) is not None), "")
        cells.append("/".join(map(str, found)) if isinstance(found, list) else str(found))
    cells.append(str(config.get("dtype") or config.get("torch_dtype") or "float32"))
    return f"| {' | '.join(cells)} |"


def _cluster_table(name: str, cluster: object) -> str:
    """The preset's own figures: of ``local`` those of one process that has a core to itself."""
    from autoshard.cluster import figures, preset_document

    document = preset_document(name)
    tiers = document["tiers"]
    lines = [
        f"{cluster.device.name}; "
        + ", ".join(f"{tier}: {given['link']}" for tier, given in tiers.items())
        + ".\n",
        "| figure | value | source |",
        "|---|--:|---|",
    ]
    for figure, value in figures(document).items():
        if name == "local" and figure == "device.memory_bytes":
            continue
        shown = f"{value:,}" if isinstance(value, int) else f"{value:g}"
        lines.append(f"| `{figure}` | {shown} | {_linked(document['sources'].get(figure, ''))} |")
    return "\n".join(lines) + "\n"


def _linked(text: object) -> str:
    """Addresses as links."""
    return re.sub(r"https?://[^\s;,)]+", r"<\g<0>>", str(text)).replace("|", "\\|")


# ---- errors -----------------------------------------------------------------------------------


def errors_page() -> str:
    """The tree, and each class."""
    from autoshard import errors

    doc = inspect.getdoc(errors) or ""
    tree = re.search(r"^( *)AutoshardError\n(?:\1.*\n)+", doc, re.MULTILINE)
    assert tree is not None
    drawn = inspect.cleandoc("\n" + tree[0])
    parts = [
        NOTE + "# Errors\n",
        "What each message says and what to do about it: [errors.md](../errors.md). All of them "
        "can be imported from `autoshard`.\n",
        f"```text\n{drawn}\n```\n",
    ]
    for name, cls in _errors():
        parents = ", ".join(f"`{b.__name__}`" for b in cls.__bases__)
        text = _paragraphs(inspect.getdoc(cls) or "").replace("Attributes:\n", "Attributes:\n\n")
        text = re.sub(r"^    (\w+): ", r"- `\1`: ", text, flags=re.MULTILINE)
        parts.append(f"## {name}\n\nA {parents}; exit status {cls.exit_status}. {text}\n")
    return "\n".join(parts)


def _errors() -> list[tuple[str, type]]:
    from autoshard import errors

    found = inspect.getmembers(errors, inspect.isclass)
    ours = [(n, c) for n, c in found if issubclass(c, errors.AutoshardError)]
    return sorted(ours, key=lambda pair: inspect.getsourcelines(pair[1])[1])


# ---- the schema -------------------------------------------------------------------------------


def schema_page() -> str:
    """The JSON Schema of a plan."""
    from autoshard.plan import PlanDocument

    return json.dumps(PlanDocument.json_schema(), indent=1) + "\n"


PAGES: dict[str, Callable[[], str]] = {
    "cli.md": cli_page,
    "errors.md": errors_page,
    "plan.schema.json": schema_page,
    "presets.md": presets_page,
    "rules.md": rules_page,
}


def main(arguments: list[str]) -> int:
    """Write the pages, or compare them."""
    if arguments not in ([], ["--check"]):
        print("usage: python docs/generate.py [--check]", file=sys.stderr)
        return 2
    stale = []
    for name, page in PAGES.items():
        path, text = REFERENCE / name, page()
        if arguments:
            if not path.is_file() or path.read_text(encoding="utf-8") != text:
                stale.append(name)
        else:
            REFERENCE.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    if stale:
        print(f"out of date: {', '.join(stale)}; run python docs/generate.py", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
