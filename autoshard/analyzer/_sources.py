"""Where a model comes from: a preset, a Hugging Face config, a factory, a module.

A :class:`Source` can build the model twice: without weights (on the ``meta`` device) to plan, and
with random weights on the CPU to validate.
"""

from __future__ import annotations

import copy
import importlib
import json
import logging
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autoshard.errors import CaptureError, InputError, RequestError, UnknownNameError
from autoshard.normal.operators import torch_dtype

DTYPE_NAMES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "fp32": "float32",
    "float": "float32",
    "fp64": "float64",
    "double": "float64",
}
"""Short names of dtypes that people type."""


@dataclass(frozen=True)
class Source:
    """A model that can be built.

    Attributes:
        name: for people.
        plan: builds it to plan with; takes the dtype of its parameters or None. Parameters may
            be on the meta device.
        run: builds it with real weights on the CPU; takes a dtype or None.
        assumptions: what was assumed, in words.
        native_dtype: whether ``plan`` already builds in the dtype that it is given.
    """

    name: str
    plan: Callable[[torch.dtype | None], nn.Module]
    run: Callable[[torch.dtype | None], nn.Module]
    assumptions: tuple[str, ...] = ()
    native_dtype: bool = False

    def wrapped(self, change: Callable[[nn.Module], nn.Module]) -> Source:
        """The same source, what it builds changed."""
        return replace(
            self,
            plan=lambda dtype: change(self.plan(dtype)),
            run=lambda dtype: change(self.run(dtype)),
        )


def parse_dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    """A floating dtype from its name.

    Raises:
        UnknownNameError: no floating dtype is called so.
    """
    if dtype is None or isinstance(dtype, torch.dtype):
        return dtype
    name = DTYPE_NAMES.get(dtype, dtype).removeprefix("torch.")
    known = sorted({*DTYPE_NAMES, *DTYPE_NAMES.values()})
    if name not in DTYPE_NAMES.values():
        raise UnknownNameError("dtype", dtype, known)
    return torch_dtype(name)


# ---- presets ------------------------------------------------------------------------------


def list_presets() -> tuple[str, ...]:
    """Names of the model presets, sorted."""
    files = resources.files("autoshard.models").iterdir()
    return tuple(sorted(f.name.removesuffix(".json") for f in files if f.name.endswith(".json")))


def load_preset(name: str) -> dict[str, Any]:
    """The Hugging Face config of a preset, with its ``_source``.

    Raises:
        UnknownNameError: there is no such preset.
    """
    if name not in list_presets():
        raise UnknownNameError("model preset", name, list_presets())
    text = (resources.files("autoshard.models") / f"{name}.json").read_text("utf-8")
    document = json.loads(text)
    assert isinstance(document, dict)
    return document


DEPTHS = ("num_hidden_layers", "n_layer")
"""Keys of a Hugging Face config that say how many blocks the model has."""


def shortened(document: Mapping[str, Any], blocks: int) -> tuple[dict[str, Any], int] | None:
    """A config with ``blocks`` blocks, and how many it had; None where that is another model.

    Configs of two stacks are left alone, and those that list something for every block which is
    not the same for all.
    """
    found = [key for key in DEPTHS if isinstance(document.get(key), int)]
    if len(found) != 1 or document.get("is_encoder_decoder"):
        return None
    depth = int(document[found[0]])
    if depth <= blocks:
        return None
    out = dict(document) | {found[0]: blocks}
    for key, value in document.items():
        if isinstance(value, list) and len(value) == depth:
            if any(v != value[0] for v in value):
                return None
            out[key] = value[:blocks]
    return out, depth


# ---- sources ------------------------------------------------------------------------------


def resolve(model: str | Mapping[str, Any] | nn.Module, name: str | None) -> Source:
    """The source of what a caller named.

    Raises:
        UnknownNameError: no preset, file or factory is called so.
        RequestError: a file or factory that cannot be read.
    """
    if isinstance(model, nn.Module):
        _check_module(model)
        # What torch.compile returns holds the module itself.
        inner = model._modules.get("_orig_mod")
        model = model if inner is None else inner
        return _from_module(model, name or type(model).__name__)
    if isinstance(model, Mapping):
        return from_config(model, name)
    if not isinstance(model, str):
        raise RequestError(
            f"the model is a {type(model).__name__}; give a torch.nn.Module, a preset's name, a "
            "Hugging Face config, package.module:factory or a graph.json"
        )
    if model in list_presets():
        return from_config(load_preset(model), name or model)
    path = Path(model)
    if path.suffix == ".json" or path.is_dir():
        return from_config(read_json(path / "config.json" if path.is_dir() else path), name)
    if ":" in model:
        return _from_factory(model, name)
    raise UnknownNameError("model preset", model, list_presets())


def _check_module(module: nn.Module) -> None:
    if isinstance(module, torch.jit.ScriptModule):
        raise CaptureError(
            "the module is a TorchScript one, which cannot be traced again; give the module that "
            "it was made of"
        )
    for name, p in (*module.named_parameters(), *module.named_buffers()):
        if nn.parameter.is_lazy(p):
            raise InputError(
                f"{name!r} of {type(module).__name__} is lazy and has no shape yet; call the "
                "module once with a batch before it is planned"
            )


def read_json(path: Path) -> dict[str, Any]:
    """A JSON document that is an object.

    Raises:
        RequestError: no such file, or no JSON object in it.
    """
    try:
        document = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise RequestError(f"cannot read {path}: {error.strerror or error}") from error
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise RequestError(f"{path} is not JSON: {error}") from error
    if not isinstance(document, dict):
        raise RequestError(f"{path} holds a {type(document).__name__}, not a JSON object")
    return document


def _from_module(module: nn.Module, name: str) -> Source:
    def run(dtype: torch.dtype | None) -> nn.Module:
        if not any(t.is_meta for t in (*module.parameters(), *module.buffers())):
            copied = copy.deepcopy(module)
            return copied if dtype is None else copied.to(dtype)
        return _filled(module, dtype)

    return Source(name, lambda dtype: module, run)


def _filled(module: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    """A copy of a module on meta with random weights."""
    config = getattr(module, "config", None)
    if config is not None and hasattr(type(module), "_from_config"):
        training = module.training
        return _build_hf(type(module), config, dtype, None).train(training)
    filled = copy.deepcopy(module).to_empty(device="cpu")
    with torch.no_grad():
        for sub in filled.modules():
            reset = getattr(sub, "reset_parameters", None)
            if callable(reset):
                reset()
            else:
                for p in sub.parameters(recurse=False):
                    p.normal_(std=0.02)
                for b in sub.buffers(recurse=False):
                    b.zero_()
    return filled if dtype is None else filled.to(dtype)


def _from_factory(reference: str, name: str | None) -> Source:
    module_name, _, attribute = reference.partition(":")
    try:
        factory: Any = importlib.import_module(module_name)
        for part in attribute.split("."):
            factory = getattr(factory, part)
    except (ImportError, AttributeError) as error:
        raise RequestError(
            f"cannot import the factory {reference!r}: {error}; write package.module:function"
        ) from error

    def build(device: str, dtype: torch.dtype | None) -> nn.Module:
        with torch.device(device):
            made = factory()
        if not isinstance(made, nn.Module):
            raise RequestError(
                f"{reference} returned a {type(made).__name__}; it must return a torch.nn.Module"
            )
        return made if dtype is None else made.to(dtype)

    def plan(dtype: torch.dtype | None) -> nn.Module:
        try:
            return build("meta", dtype)
        except (RuntimeError, NotImplementedError):
            # It reads the values of tensors while it builds: it needs real ones.
            return build("cpu", dtype)

    return Source(name or attribute, plan, lambda dtype: build("cpu", dtype))


def from_config(document: Mapping[str, Any], name: str | None) -> Source:
    """A transformers model from its config document (no remote code).

    Raises:
        RequestError: an architecture that transformers does not have.
    """
    values = {k: v for k, v in document.items() if not k.startswith("_") and k != "auto_map"}
    if "model_type" not in values:
        raise RequestError(
            "the config has no 'model_type'; give a Hugging Face config.json, a graph.json written "
            "by autoshard, or a preset"
        )
    import transformers
    from huggingface_hub.errors import StrictDataclassError

    kind = values["model_type"]
    if kind not in transformers.CONFIG_MAPPING:
        raise UnknownNameError("model_type", str(kind), transformers.CONFIG_MAPPING.keys())
    try:
        with _silent():
            config = transformers.AutoConfig.for_model(**values)
    except (ValueError, KeyError, TypeError, StrictDataclassError) as error:
        reason = error.__cause__ or error  # a validator's own words
        raise RequestError(f"transformers cannot read this config.json: {reason}") from error
    names = values.get("architectures") or []
    cls: Any = next((c for n in names if (c := getattr(transformers, n, None))), None)
    notes: list[str] = []
    if cls is None:
        for auto in (
            transformers.AutoModelForCausalLM,
            transformers.AutoModelForSeq2SeqLM,
            transformers.AutoModelForMaskedLM,
            transformers.AutoModelForImageClassification,
        ):
            mapping: Any = auto._model_mapping
            if type(config) in mapping:
                cls = mapping[type(config)]
                break
        if cls is None:
            raise RequestError(
                f"transformers has no training model for model_type {kind!r}; name one in "
                "'architectures'"
            )
        notes.append(f"the architecture {cls.__name__}, as the config names none")
    declared = values.get("dtype") or values.get("torch_dtype")

    def build(dtype: torch.dtype | None, device: str | None) -> nn.Module:
        wanted = dtype or (parse_dtype(declared) if declared else torch.float32)
        return _build_hf(cls, config, wanted, device)

    return Source(
        name or str(kind),
        lambda dtype: build(dtype, "meta"),
        lambda dtype: build(dtype, None),
        tuple(notes),
        native_dtype=True,
    )


def _build_hf(cls: Any, config: Any, dtype: torch.dtype | None, device: str | None) -> nn.Module:
    config = copy.deepcopy(config)
    if hasattr(config, "use_cache"):
        config.use_cache = False
    try:
        with _silent():
            if device is None:
                model = cls._from_config(config, dtype=dtype)
            else:
                with torch.device(device):
                    model = cls._from_config(config, dtype=dtype)
    except (ValueError, KeyError, TypeError, RuntimeError, ImportError, AttributeError) as error:
        raise CaptureError(
            f"transformers cannot build {cls.__name__} from this config: "
            f"{type(error).__name__}: {error}"
        ) from error
    assert isinstance(model, nn.Module)
    return model.train()


class _silent:
    """transformers says nothing on the terminal about a config that it was given."""

    def __enter__(self) -> None:
        self._warnings = warnings.catch_warnings()
        self._warnings.__enter__()
        warnings.simplefilter("ignore")
        self._logger = logging.getLogger("transformers")
        self._level = self._logger.level
        self._logger.setLevel(logging.CRITICAL)

    def __exit__(self, *exc: Any) -> None:
        self._logger.setLevel(self._level)
        self._warnings.__exit__(*exc)
