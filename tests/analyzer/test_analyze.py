"""What analyze accepts, assumes, refuses, and leaves alone."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoshard.analyzer import Captured, analyze, evaluate_constants, list_presets, load_preset
from autoshard.analyzer._sources import resolve
from autoshard.errors import CaptureError, InputError, RequestError, UnknownNameError
from autoshard.graph import ModelGraph
from tests.analyzer.families import BATCH, FAMILIES, gpt2, llama, text
from tests.analyzer.interpreter import loss_and_gradients, run

# ---- small models ---------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, width: int = 8, slope: float = 0.0) -> None:
        super().__init__()
        self.slope = slope
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.leaky_relu(self.up(x), self.slope))


class Stack(nn.Module):
    """Two kinds of block in turn."""

    def __init__(self, depth: int = 6) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(Block(8, 0.1 if i % 2 else 0.2) for i in range(depth))
        self.head = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@dataclasses.dataclass
class Output:
    loss: Tensor
    scores: Tensor
    extra: tuple[Tensor, ...] = ()


class Keywords(nn.Module):
    """Keyword arguments, an optional one, an integer one; a dataclass result."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(
        self, *, x: Tensor, y: Tensor, weight: Tensor | None = None, times: int = 1
    ) -> Output:
        scores = self.layer(x) * times
        if weight is not None:
            scores = scores * weight
        return Output(F.mse_loss(scores, y), scores, (scores.softmax(-1),))


class InPlace(nn.Module):
    """Writes to values, to views of values, and reads other views afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        kept = y[:, 2:]
        y[:, :3].mul_(2.0)
        y[:, 1] = 0.5
        z = torch.zeros_like(y)
        z.t()[2:4].copy_(y.t()[:2])
        z.add_(y, alpha=3)
        return (z * kept.sum(1, keepdim=True)).relu_().square().mean()


class Ops(nn.Module):
    """Operators with a normal form of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(4, 6, 3, padding="same")
        self.norm = nn.BatchNorm1d(6)
        self.scale = torch.tensor([1.0, 2.0])
        self.register_buffer("offset", torch.arange(6.0), persistent=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.norm(self.conv(x)) + self.offset[:, None]
        a, b, c = h.split([1, 2, 3], dim=1)
        p, q = b.unbind(1)
        r, s = c.chunk(2, dim=1)
        with torch.no_grad():
            mask = (h.mean(2) > 0).float()
        m = torch.stack([p, q], 1).movedim(1, 2).flatten(1) * self.scale[0]
        t = (
            torch.baddbmm(a, r.mT[:, :, :1], s[:, :1])
            + torch.einsum("bct,bdt->bcd", b, b)[:, :1, :1]
        )
        logits = torch.stack([m.sum(1), t.sum((1, 2)), mask.sum(1), h.amax((1, 2))], 1)
        per_step = logits[:, :, None].expand(-1, -1, 5)
        return F.cross_entropy(per_step, y, label_smoothing=0.1) + F.smooth_l1_loss(
            m, m.detach() + 1
        )


class Running(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("mean", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.mul_(0.9)
        return self.layer(x) - self.mean


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(2, 2), Item())

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class Item(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            return x
        return -x


class Doubling(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        return 3 * g


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = Doubling.apply(self.layer(x))
        return out


def state_hash(module: nn.Module) -> str:
    digest = hashlib.sha256()
    for name, value in module.state_dict().items():
        digest.update(name.encode() + value.numpy().tobytes())
    return digest.hexdigest()


def compare(module: nn.Module, captured: Captured, inputs: dict[str, Tensor], loss: Tensor) -> None:
    """The graph's loss and gradients are the module's."""
    loss.backward()
    expected = {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
    found_loss, found = loss_and_gradients(captured.graph, module, inputs, torch.float32)
    torch.testing.assert_close(found_loss, loss.detach())
    assert found.keys() == expected.keys()
    scale = max(1.0, *(float(g.abs().max()) for g in expected.values()))
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-5 * scale)


# ---- what is accepted -----------------------------------------------------------------------


def test_keywords_dataclasses_and_plain_arguments() -> None:
    module = Keywords()
    inputs = {"x": torch.randn(5, 4), "y": torch.randn(5, 3), "weight": torch.randn(3)}
    captured = analyze(module, {**inputs, "times": 2})
    assert captured.graph.batch == 5
    assert [p for p, _ in captured.graph.outputs] == ["loss", "scores", "extra.0"]
    assert set(captured.graph.inputs) == set(inputs)
    args, kwargs = captured.arguments(inputs)
    assert kwargs["times"] == 2
    compare(module, captured, inputs, captured.loss(module(*args, **kwargs)))


def test_positional_arguments_are_numbered() -> None:
    module = Ops()
    x, y = torch.randn(3, 4, 5), torch.randint(0, 4, (3, 5))
    captured = analyze(module, (x, y))
    assert set(captured.graph.inputs) == {"0", "1"}
    inputs = {"0": x, "1": y}
    twin = copy.deepcopy(module)
    compare(twin, captured, inputs, twin(x, y))


def test_one_tensor_given_twice_stays_two_inputs() -> None:
    ids = torch.randint(0, 61, (2, 8))
    captured = analyze(gpt2(n_layer=1)(), {"input_ids": ids, "labels": ids})
    assert set(captured.graph.inputs) == {"input_ids", "labels"}


def test_nested_arguments_have_dotted_paths() -> None:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 1)

        def forward(self, batch: dict[str, Tensor], pair: tuple[Tensor, Tensor]) -> Tensor:
            return self.layer(batch["a"] + pair[0] * pair[1]).mean()

    t = torch.randn(4, 2)
    graph = analyze(Nested(), {"pair": (t, t), "batch": {"a": t}}).graph
    assert set(graph.inputs) == {"batch.a", "pair.0", "pair.1"}


def test_in_place_writes_become_values() -> None:
    module = InPlace()
    x = torch.randn(5, 6)
    captured = analyze(module, x)
    assert not [n.op for n in captured.graph.nodes if n.family.endswith("_")]
    compare(module, captured, {"0": x}, module(x))


def test_a_module_on_meta_and_one_with_weights_give_equal_graphs() -> None:
    with torch.device("meta"):
        empty = Stack()
    x = torch.randn(2, 8)
    assert analyze(empty, x).graph == analyze(Stack(), x).graph


def test_training_dtype_of_a_module() -> None:
    graph = analyze(Stack(), dtype="bf16").graph
    assert {n.dtype for n in graph.nodes} == {"bfloat16"}


def test_a_factory_is_called_by_name() -> None:
    captured = analyze("tests.analyzer.test_analyze:Stack", batch=4)
    assert captured.graph.name == "Stack"
    assert captured.graph.inputs["0"].shape == (4, 8)
    first, second = (captured.materialize(seed=s) for s in (1, 1))
    assert state_hash(first) == state_hash(second)


def test_a_config_file_and_a_saved_graph(tmp_path: Path) -> None:
    config = load_preset("gpt2") | {"n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 99}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    captured = analyze(str(path), batch=2, seq_len=16)
    assert captured.graph == analyze(config, batch=2, seq_len=16).graph
    saved = tmp_path / "graph.json"
    saved.write_text(json.dumps(captured.graph.to_json()))
    loaded = analyze(str(saved))
    assert loaded.graph == captured.graph
    assert loaded.inputs == captured.inputs
    with pytest.raises(RequestError, match="without its model"):
        loaded.materialize()
    module = captured.materialize(seed=1)
    inputs = captured.draw_inputs(seed=2)
    assert inputs["labels"].eq(-100).any()
    assert inputs["input_ids"].max() < 99
    assert bool(module(**inputs).loss.isfinite())


def test_a_model_without_weights_is_built_to_be_run() -> None:
    with torch.device("meta"):
        empty = llama(num_hidden_layers=2)()
    captured = analyze(empty, batch=2, seq_len=6)
    module = captured.materialize(seed=4)
    inputs = captured.draw_inputs(seed=5)
    assert module.training
    args, kwargs = captured.arguments(inputs)
    compare(module, captured, inputs, captured.loss(module(*args, **kwargs)))


@pytest.mark.parametrize(
    "layer",
    [nn.LSTM(4, 4), nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), nn.GRUCell(4, 4)],
)
def test_layers_of_torch(layer: nn.Module) -> None:
    captured = analyze(layer, torch.randn(3, 4))
    twin = copy.deepcopy(layer)
    compare(twin, captured, {"0": (x := torch.randn(3, 4))}, captured.loss(twin(x)))


# ---- what is assumed ------------------------------------------------------------------------


def test_inputs_come_from_the_first_layer() -> None:
    graph = analyze(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()), batch=2).graph
    assert graph.inputs["0"].shape == (2, 3, 224, 224)
    assert any("first layer" in a for a in graph.assumptions)
    assert any("mean of its output 'output'" in a for a in graph.assumptions)
    ids = analyze(nn.Sequential(nn.Embedding(11, 4), nn.Linear(4, 2)), batch=2, seq_len=7)
    assert ids.inputs[0].shape == (2, 7)
    assert ids.inputs[0].high == 11


def test_inputs_of_a_language_model_hold_its_vocabulary() -> None:
    captured = analyze(gpt2(n_layer=1)(), batch=3, seq_len=8)
    by_path = {i.path: i for i in captured.inputs}
    assert by_path["input_ids"].shape == (3, 8)
    assert by_path["input_ids"].high == 61
    assert by_path["labels"].ignore_index == -100


# ---- the normal form ------------------------------------------------------------------------


def test_alternating_blocks_fold_by_kind() -> None:
    module = Stack()
    x = torch.randn(3, 8)
    captured = analyze(module, x)
    assert [len(r.starts) for r in captured.graph.repeats] == [3, 3]
    assert analyze(module, x, fold=False).graph == captured.graph
    compare(module, captured, {"0": x}, module(x).mean())


def test_blocks_that_read_their_index_are_not_folded() -> None:
    class Indexed(Block):
        def __init__(self, layer_idx: int) -> None:
            super().__init__()
            self.layer_idx = layer_idx

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * (self.layer_idx + 1)

    module = nn.Sequential(*(Indexed(i) for i in range(3)))
    x = torch.randn(2, 8)
    captured = analyze(module, x)
    assert captured.graph.repeats == ()
    assert any("look alike but compute different things" in w for w in captured.graph.warnings)
    compare(module, captured, {"0": x}, module(x).mean())


def test_a_frozen_parameter_gets_no_gradient() -> None:
    module = Stack(depth=4)
    for block in (module.first, module.blocks[0], module.blocks[1]):
        block.requires_grad_(False)
    x = torch.randn(2, 8)
    captured = analyze(module, x)
    graph = captured.graph
    assert not graph.parameters["blocks.0.up.weight"].differentiable
    assert graph.parameters["blocks.2.up.weight"].differentiable
    assert [n.flops_backward for n in graph.nodes if n.module == "blocks.1.down"] == [0, 0]
    compare(module, captured, {"0": x}, module(x).mean())


def test_tied_parameters_are_one_node() -> None:
    graph = analyze(gpt2()(), text()).graph
    assert graph.aliases == {"lm_head.weight": "transformer.wte.weight"}
    assert [u for u, _ in graph.uses["transformer.wte.weight"]] == [
        "transformer.wte.weight.identity"
    ]


def test_dropout_stays_and_masks_vanish() -> None:
    graph = analyze(gpt2(resid_pdrop=0.1, attn_pdrop=0.1)(), text()).graph
    drops = [n for n in graph.nodes if n.op == "autoshard.dropout"]
    assert {n.attrs["p"] for n in drops} == {0.1}
    attention = [n for n in graph.nodes if "attention.default" in n.op]
    assert all(n.attrs["is_causal"] and n.attrs["dropout_p"] == 0.1 for n in attention)
    assert all("attn_mask" not in n.roles for n in attention)
    quiet = analyze(gpt2(resid_pdrop=0.1, attn_pdrop=0.1)().eval(), text()).graph
    assert not [n for n in quiet.nodes if n.op == "autoshard.dropout"]


@pytest.mark.parametrize("kind", ["bool", "float", "full"])
def test_a_constant_mask_is_recognised(kind: str) -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(8, 24)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).view(2, 5, 3, 2, 4).permute(2, 0, 3, 1, 4)
            mask = torch.ones(5, 5, dtype=torch.bool)
            if kind != "full":
                mask = mask.tril()
            if kind == "float":
                mask = torch.zeros(5, 5).masked_fill(~mask, float("-inf"))
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).sum()

    module = Attention()
    x = torch.randn(2, 5, 8)
    captured = analyze(module, x)
    (node,) = [n for n in captured.graph.nodes if "attention.default" in n.op]
    assert "attn_mask" not in node.roles
    assert node.attrs.get("is_causal", False) == (kind != "full")
    compare(module, captured, {"0": x}, module(x))


def test_a_padding_mask_that_is_an_argument_is_kept() -> None:
    inputs = text()
    inputs["attention_mask"] = torch.ones(BATCH, 12, dtype=torch.int64)
    inputs["attention_mask"][0, -3:] = 0
    module = llama(num_hidden_layers=1)()
    captured = analyze(module, inputs)
    assert "attention_mask" in captured.graph.inputs
    compare(module, captured, inputs, module(**inputs).loss)


def test_running_statistics_are_buffers_and_the_counter_is_noted() -> None:
    graph = analyze(Ops(), (torch.randn(3, 4, 5), torch.randint(0, 4, (3, 5)))).graph
    (node,) = [n for n in graph.nodes if n.op == "autoshard.batch_norm"]
    assert node.attrs["counter"] == "norm.num_batches_tracked"
    buffers = {n.attrs["fqn"] for n in graph.nodes if n.op == "buffer"}
    assert buffers == {"norm.running_mean", "norm.running_var"}
    assert [c.attrs["fqn"] for c in graph.constants if c.op == "buffer"] == ["offset"]


def test_batch_norm_in_eval_is_elementwise() -> None:
    module = Ops().eval()
    module.norm.running_mean.uniform_()  # type: ignore[union-attr]
    x, y = torch.randn(3, 4, 5), torch.randint(0, 4, (3, 5))
    captured = analyze(module, (x, y))
    assert not [n for n in captured.graph.nodes if n.op in ("autoshard.batch_norm", "buffer")]
    compare(module, captured, {"0": x, "1": y}, module(x, y))


def test_running_statistics_are_updated_by_the_graph() -> None:
    module = FAMILIES["resnet"][0]()
    inputs = FAMILIES["resnet"][1]
    graph = analyze(module, inputs).graph
    buffers = {n: b.clone() for n, b in module.named_buffers()}
    run(graph, dict(module.named_parameters()), buffers, inputs)
    module(**inputs)
    for name, buffer in module.named_buffers():
        if "num_batches" not in name:
            torch.testing.assert_close(buffers[name], buffer)


@pytest.mark.parametrize("spelling", ["floor", "bernoulli"])
def test_stochastic_depth_is_a_dropout_with_a_shared_mask(spelling: str) -> None:
    class Drop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            h = self.layer(x)
            if spelling == "floor":
                mask = (0.75 + torch.rand(h.shape[0], 1, 1)).floor_()
                return x + h.div(0.75) * mask
            return x + h * h.new_empty(h.shape[0], 1, 1).bernoulli_(0.75).div_(0.75)

    graph = analyze(Drop(), torch.randn(3, 5, 4)).graph
    (node,) = [n for n in graph.nodes if n.op == "autoshard.dropout"]
    assert dict(node.attrs) == {"p": 0.25, "shared": (1, 2)}
    assert not [n for n in graph.nodes if "rand" in n.op or "bernoulli" in n.op]


# ---- what is left alone ---------------------------------------------------------------------


def test_the_module_is_untouched() -> None:
    module = gpt2()()
    handle = module.transformer.ln_f.register_forward_hook(lambda m, a, o: None)  # type: ignore[union-attr]
    hooks = dict(module.transformer.ln_f._forward_hooks)  # type: ignore[union-attr]
    before = state_hash(module)
    identity = {n: (id(p), p.requires_grad) for n, p in module.named_parameters()}
    attributes = {n: set(m.__dict__) for n, m in module.named_modules()}
    config = module.config.to_dict()  # type: ignore[union-attr, operator]
    analyze(module, text())
    assert state_hash(module) == before
    assert {n: (id(p), p.requires_grad) for n, p in module.named_parameters()} == identity
    assert {n: set(m.__dict__) for n, m in module.named_modules()} == attributes
    assert module.config.to_dict() == config  # type: ignore[union-attr, operator]
    assert module.training
    assert module.transformer.ln_f._forward_hooks == hooks  # type: ignore[union-attr]
    assert all(p.grad is None for p in module.parameters())
    handle.remove()


def test_patches_are_taken_back_after_a_failure() -> None:
    import transformers.masking_utils as masking

    before = (masking.is_torchdynamo_exporting, masking.find_packed_sequence_indices)
    with pytest.raises(InputError):
        analyze(gpt2()(), {"input_ids": torch.zeros(2, 64, 3)})
    assert before == (masking.is_torchdynamo_exporting, masking.find_packed_sequence_indices)
    assert float(Custom()(torch.ones(1, 2)).detach().sum()) is not None


def test_a_large_preset_allocates_nothing() -> None:
    analyze("gpt2", batch=1, seq_len=64)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    graph = analyze("llama-3-70b", batch=1, seq_len=8192).graph
    assert graph.parameter_count == 70_553_706_496
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < 600e6


# ---- presets --------------------------------------------------------------------------------


def test_every_preset_names_its_source() -> None:
    assert len(list_presets()) >= 19
    for name in list_presets():
        assert "http" in load_preset(name)["_source"], name


PUBLISHED = {
    "bert-base": 109_514_298,
    "bert-large": 335_174_458,
    "convnext-tiny": 28_589_128,
    "gpt2": 124_439_808,
    "gpt2-large": 774_030_080,
    "gpt2-medium": 354_823_168,
    "gpt2-xl": 1_557_611_200,
    "gpt3-175b": 174_604_259_328,
    "llama-2-7b": 6_738_415_616,
    "llama-3-405b": 405_853_388_800,
    "llama-3-70b": 70_553_706_496,
    "llama-3-8b": 8_030_261_248,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x22b": 140_620_634_112,
    "mixtral-8x7b": 46_702_792_704,
    "resnet-50": 25_557_032,
    "swin-tiny": 28_288_354,
    "t5-base": 222_903_552,
    "t5-small": 60_506_624,
    "vit-base": 86_567_656,
    "vit-large": 304_326_632,
}
"""Parameters; the models' cards and papers round them."""


def test_presets_have_the_published_size() -> None:
    assert set(PUBLISHED) == set(list_presets())
    for name, parameters in PUBLISHED.items():
        module = resolve(name, None).plan(None)
        assert all(p.is_meta for p in module.parameters()), name
        assert sum(p.numel() for p in module.parameters()) == parameters, name


def test_experts_are_captured() -> None:
    config = load_preset("mixtral-8x7b") | {"num_hidden_layers": 2}
    graph = analyze(config, batch=1, seq_len=32).graph
    assert [len(r.starts) for r in graph.repeats] == [2]
    layers = [n for n in graph.nodes if n.op == "autoshard.experts"]
    assert len(layers) == 2
    assert not any("sort" in n.op or "grouped_mm" in n.op for n in graph.nodes)
    # Two experts a token: 2 x (4096 x 2 x 14336 + 14336 x 4096) multiply-adds, forward.
    assert layers[0].flops_forward == 32 * 2 * 2 * 3 * 4096 * 14336
    assert layers[0].flops_backward == 2 * layers[0].flops_forward


def test_a_config_says_its_dtype() -> None:
    config = load_preset("llama-3-8b") | {"num_hidden_layers": 2}
    own = analyze(config, batch=1, seq_len=64).graph
    assert {n.dtype for n in own.parameters.values()} == {"bfloat16"}
    assert {
        n.dtype
        for n in analyze(config, batch=1, seq_len=64, dtype="fp32").graph.parameters.values()
    } == {"float32"}


# ---- what is refused ------------------------------------------------------------------------


def vit_channels() -> Any:
    return {"pixel_values": torch.zeros(2, 5, 32, 32), "labels": torch.zeros(2, dtype=torch.int64)}


class Positive(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[x[:, 0] > 0].mean()


class Penalty(Positive):
    def forward(self, x: Tensor) -> Tensor:
        h = F.linear(x, self.weight).tanh()
        (gradient,) = torch.autograd.grad(h.sum(), self.weight, create_graph=True)
        return gradient.square().mean()


class Mapped(Positive):
    def forward(self, x: Tensor) -> Tensor:
        return torch.vmap(lambda row: F.linear(row, self.weight))(x).mean()


REFUSED: dict[str, tuple[Any, Any, type[Exception], str]] = {
    "an unknown preset": (lambda: "llama-3-8c", None, UnknownNameError, "nearest: llama-3-8b"),
    "a missing file": (lambda: "nowhere.json", None, RequestError, "cannot read nowhere.json"),
    "a missing factory": (lambda: "no.such:thing", None, RequestError, "package.module:function"),
    "a config without type": (lambda: {"a": 1}, None, RequestError, "model_type"),
    "missing arguments": (
        Keywords,
        None,
        InputError,
        r"needs the arguments x, y; give example_inputs=\{'x'",
    ),
    "an unknown argument": (
        Keywords,
        {"x": torch.zeros(1, 4), "z": torch.zeros(1)},
        InputError,
        "do not fit Keywords.forward.*x: Tensor, y: Tensor.*given: x, z",
    ),
    "an argument of no kind": (Stack, 3, InputError, "is a int; give a tensor"),
    "a wrong width": (
        Stack,
        torch.zeros(2, 5),
        InputError,
        r"do not fit module 'first' of Stack.*5.*8",
    ),
    "wrong channels": (
        FAMILIES["vit"][0],
        vit_channels(),
        (InputError),
        "do not fit module 'vit.embeddings",
    ),
    "a choice by value": (
        Branch,
        torch.zeros(2, 2),
        CaptureError,
        "module 'inner.1' of Branch reads tensor values.*torch.where",
    ),
    "a buffer that changes": (
        Running,
        torch.zeros(2, 2),
        CaptureError,
        "buffer 'mean' is changed in place by aten.mul_.Tensor",
    ),
    "a boolean index": (
        Positive,
        torch.zeros(2, 2),
        CaptureError,
        r"module \(root\): aten.index.Tensor gives a tensor whose size depends on data",
    ),
    "a gradient inside forward": (
        Penalty,
        torch.zeros(2, 2),
        CaptureError,
        "calls torch.autograd.grad inside forward",
    ),
    "vmap": (Mapped, torch.zeros(2, 2), CaptureError, r"module \(root\) calls torch.vmap"),
    "a lazy module": (
        lambda: nn.Sequential(nn.LazyLinear(4)),
        torch.zeros(2, 3),
        InputError,
        "'0.weight' of Sequential is lazy",
    ),
    "no model": (lambda: 3, None, RequestError, "the model is a int; give a torch.nn.Module"),
    "an empty batch": (Stack, torch.zeros(0, 8), InputError, "has no sample"),
    "a custom autograd function": (
        Custom,
        torch.zeros(2, 2),
        CaptureError,
        "torch.autograd.Function 'Doubling'",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_say_what_where_and_what_to_do(case: str) -> None:
    model, inputs, error, words = REFUSED[case]
    with pytest.raises(error, match=words):
        analyze(model(), inputs)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_scripted_module_is_refused() -> None:
    with pytest.raises(CaptureError, match="TorchScript"):
        analyze(torch.jit.script(nn.Linear(3, 4)), torch.zeros(2, 3))


def test_a_refusal_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CaptureError) as caught:
        analyze(Branch(), torch.zeros(2, 2))
    assert capfd.readouterr() == ("", "")
    assert "TORCH_LOGS" not in str(caught.value)
    assert "unhinted" not in str(caught.value)


def test_hooks_on_gradients_are_named() -> None:
    module = Stack()
    module.head.weight.register_hook(lambda gradient: gradient * 2)
    assert any("head.weight" in w for w in analyze(module, torch.zeros(2, 8)).graph.warnings)


def test_a_causal_mask_given_to_a_transformer_is_recognised() -> None:
    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Transformer(8, 2, 1, 1, 16, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
            return self.layers(x, x, tgt_mask=mask)

    nodes = analyze(Decoder(), torch.zeros(2, 5, 8)).graph.nodes
    attentions = [n for n in nodes if "scaled_dot_product" in n.op]
    assert [bool(n.attrs.get("is_causal")) for n in attentions] == [False, True, False]


def test_what_is_drawn_like_a_value_gives_it_no_gradient() -> None:
    class Noisy(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            h = super().forward(x)
            return (h + torch.randn_like(h) * torch.randn(3)).mean()

    nodes = analyze(Noisy(4, 3), torch.zeros(2, 4)).graph.nodes
    noise = [n for n in nodes if "randn" in n.op]
    assert len(noise) == 2
    assert not any(n.differentiable for n in noise)
    assert {n.dtype for n in noise} == {"float32"}


def test_sizes_are_checked() -> None:
    with pytest.raises(InputError, match="batch is 0"):
        analyze(Stack(), batch=0)
    with pytest.raises(InputError, match="longer than the 32 positions"):
        analyze(gpt2(n_layer=1)(), batch=1, seq_len=64)
    with pytest.raises(InputError, match="leave out batch and seq_len"):
        analyze(Stack(), torch.zeros(1, 8), batch=2)
    with pytest.raises(UnknownNameError, match="dtype 'bf17'"):
        analyze(Stack(), dtype="bf17")


def test_constants_need_their_buffers() -> None:
    graph = analyze(Ops(), (torch.randn(3, 4, 5), torch.randint(0, 4, (3, 5)))).graph
    with pytest.raises(InputError, match="value of buffer 'offset' is needed"):
        evaluate_constants(graph, {})
    with pytest.raises(InputError, match=r"'offset' has shape \(2,\)"):
        evaluate_constants(graph, {"offset": torch.zeros(2)})
    values = evaluate_constants(graph, {"offset": torch.arange(6.0)}, torch.float64)
    assert {v.dtype for v in values.values()} == {torch.float64}


def test_a_model_that_trains_nothing_says_so() -> None:
    module = Stack()
    module.requires_grad_(False)
    graph = analyze(module.eval(), torch.zeros(2, 8)).graph
    assert any("nothing is trained" in w for w in graph.warnings)
    assert any("eval mode" in a for a in graph.assumptions)


def test_a_graph_from_json_needs_no_model_code() -> None:
    graph = analyze(Stack(), torch.zeros(2, 8)).graph
    document = json.loads(json.dumps(graph.to_json()))
    assert analyze(document).graph == graph
    assert isinstance(ModelGraph.from_json(document), ModelGraph)
