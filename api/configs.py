"""A Hugging Face config is checked here before a worker builds anything from it.

Numbers: each is bounded by what its name says it counts; a name that says nothing is bounded as a
width is. Texts: one that could name a place (a path, an address, a repository) is refused, since a
config has no need to reach one. What only describes (``_name_or_path``, ``transformers_version``,
names of labels) is dropped, so that equal models are equal requests.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from autoshard.api.problems import Fault, Invalid, pointer
from autoshard.api.settings import Limits
from autoshard.errors import UnknownNameError

DROPPED = frozenset(
    {
        *("attn_implementation", "auto_map", "custom_pipelines", "experts_implementation"),
        *("finetuning_task", "generation_config", "label2id", "name_or_path"),
        *("task_specific_params", "tokenizer_class", "transformers_version"),
    }
)
"""Names that say nothing about the computation, or ask for code that is not run."""

REFUSED = {
    "backbone": "names another model to be fetched; write that model out as 'backbone_config'",
    "trust_remote_code": "code that comes with a model is never run; leave it out",
    "use_pretrained_backbone": "weights are never fetched; set it to false or leave it out",
    "quantization_config": "quantized training cannot be planned; leave it out",
}
"""Names that are refused when they are set to anything but null or false."""

LONGEST_LIST = 4096
LONGEST_TEXT = 1000

_LAYERS = re.compile(
    r"layers?($|_num$|_types$)|layers_block_type|depths?($|_)|blocks?$|repeats$|num_stages"
)
_DEPTHS = re.compile(r"depths|^layers$|blocks$")
_EXPERTS = re.compile(r"^(num|n)_.*experts?$|experts$")
_VOCABULARY = re.compile(
    r"vocab|codebook|(token|pad|bos|eos)_(id|index)|_ids?$|_offset$|num_labels"
)
_POSITIONS = re.compile(
    r"position|n_ctx|max_.*length|length$|window|chunk_size|max_.*seq|sampling_rate|floor$"
)
_SCALE = re.compile(r"theta|base$|factor|eps|freq|scale|seed|initializer|_init|clip|_val(ue)?$")
_COUNTED = re.compile(r"^(num|n)_.*layers?$|^n_layers?$|depths$")
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,100}")
_PLACE = re.compile(r"[/\\]|^[.~]")


def checked_config(config: dict[str, Any], limits: Limits, at: str) -> dict[str, Any]:
    """The config without what only describes.

    Args:
        config: as it was sent.
        limits: of layers, widths and the like.
        at: JSON pointer of the config in the request.

    Raises:
        Invalid: what cannot be taken, where it stands, and what to do.
    """
    if "model_type" not in config:
        raise Invalid(
            [Fault(at, "the config has no 'model_type'; give a whole Hugging Face config.json")]
        )
    return _Check(limits).section(config, at, nested=False)


class _Check:
    def __init__(self, limits: Limits) -> None:
        self.limits = limits

    def section(self, config: dict[str, Any], at: str, *, nested: bool = True) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for name, value in config.items():
            here = at + pointer(name)
            if name.startswith("_") or name in DROPPED:
                continue
            if name == "id2label":
                # It says how many classes there are by listing them.
                if isinstance(value, dict):
                    self.number("num_labels", len(value), here)
                    out["num_labels"] = len(value)
                continue
            if not _NAME.fullmatch(name):
                _wrong(here, "this cannot be a config's name: up to 100 letters, digits, _ . -")
            if name in REFUSED and value:
                _wrong(here, REFUSED[name])
            if name == "model_type" and (value or not nested):  # parts may leave it empty
                self.model_type(value, here)
            if name == "architectures":
                self.architectures(value, here)
            out[name] = self.value(name, value, here)
        return out

    def model_type(self, value: Any, at: str) -> None:
        if not isinstance(value, str):
            _wrong(at, 'the model_type must be a text, as "llama"')
        known = model_types()
        if known and value not in known:
            _wrong(at, str(UnknownNameError("model_type", value[:100], known)))

    def architectures(self, value: Any, at: str) -> None:
        if value is None:
            return
        if not isinstance(value, list) or not all(
            isinstance(v, str) and _IDENTIFIER.fullmatch(v) for v in value
        ):
            _wrong(at, 'this must be a list of class names, as ["LlamaForCausalLM"]')

    def value(self, name: str, value: Any, at: str) -> Any:
        if isinstance(value, dict):
            if len(value) > LONGEST_LIST:
                _wrong(at, f"{len(value)} names; at most {LONGEST_LIST} are taken")
            if name.endswith("config") or "model_type" in value:
                return self.section(value, at)
            return {k: self.value(_key(k, name), v, at + pointer(k)) for k, v in value.items()}
        if isinstance(value, list):
            return self.items(name, value, at)
        if isinstance(value, str):
            self.text(value, at)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            self.number(name, value, at)
        return value

    def items(self, name: str, value: list[Any], at: str) -> list[Any]:
        most = self.limits.layers if _LAYERS.search(name) else LONGEST_LIST
        if len(value) > most:
            _wrong(at, f"{len(value)} items; at most {most} are taken")
        out = [self.value(name, v, at + pointer(i)) for i, v in enumerate(value)]
        if _DEPTHS.search(name) and all(type(v) is int for v in value):
            self.number(name, sum(value), at)
        return out

    def text(self, value: str, at: str) -> None:
        if len(value) > LONGEST_TEXT:
            _wrong(at, f"a text of {len(value)} characters; at most {LONGEST_TEXT} are taken")
        if _PLACE.search(value):
            _wrong(
                at,
                f"{value[:60]!r} looks like a path, an address or a repository; a request must "
                "not name places: leave it out",
            )

    def number(self, name: str, value: float, at: str) -> None:
        if value < 0 and _COUNTED.search(name):
            _wrong(at, f"{value:g} layers; write how many there are")
        most, what = self.bound(name, value)
        if abs(value) > most:
            _wrong(at, f"{value:g} {what}; at most {most:g} are taken here")

    def bound(self, name: str, value: float) -> tuple[float, str]:
        limits = self.limits
        if _SCALE.search(name):
            return 1e12, "is beyond what any known model uses"
        if _EXPERTS.search(name) and isinstance(value, int):
            return limits.experts, "experts"
        if _LAYERS.search(name):
            return limits.layers, "layers"
        if _VOCABULARY.search(name):
            return limits.vocabulary, "entries of a vocabulary"
        if _POSITIONS.search(name):
            return limits.seq_len, "positions"
        return limits.hidden, "as a width"


def _key(key: str, section: str) -> str:
    """What a number in a nested object counts: by its own name, or its section's for an index."""
    return section if key.isdigit() else key


def _wrong(at: str, detail: str) -> None:
    raise Invalid([Fault(at, detail)])


@cache
def model_types() -> frozenset[str]:
    """Every model_type of the installed transformers; empty where they cannot be read.

    Read from the text of its mapping: importing that would load torch, which this process must
    not. Where it is written in another way one day, the worker says the same a little later.
    """
    spec = find_spec("transformers")
    if spec is None or not spec.submodule_search_locations:
        return frozenset()
    folder = Path(spec.submodule_search_locations[0]) / "models" / "auto"
    found: set[str] = set()
    for name in ("auto_mappings.py", "configuration_auto.py"):
        try:
            tree = ast.parse((folder / name).read_text("utf-8"))
        except (OSError, SyntaxError):
            return frozenset()
        for node in tree.body:
            if "CONFIG_MAPPING_NAMES" in _targets(node):
                found |= {
                    text.value
                    for part in ast.walk(node)
                    if isinstance(part, ast.Dict | ast.Tuple)
                    for text in (part.keys if isinstance(part, ast.Dict) else part.elts[:1])
                    if isinstance(text, ast.Constant) and isinstance(text.value, str)
                }
    return frozenset(found)


def _targets(node: ast.stmt) -> set[str]:
    """Names that a statement assigns to, or whose method it calls."""
    if isinstance(node, ast.Assign):
        return {t.id for t in node.targets if isinstance(t, ast.Name)}
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return {node.target.id}
    call = node.value if isinstance(node, ast.Expr) else None
    if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
        owner = call.func.value
        return {owner.id} if isinstance(owner, ast.Name) else set()
    return set()
