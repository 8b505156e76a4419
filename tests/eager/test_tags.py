from __future__ import annotations

import copy
import pickle
import subprocess
import sys

import torch

from autoshard.runtime.eager.arguments import map_tensors, objects_of
from autoshard.runtime.eager.tags import Meta, dual, meta_of, set_meta
from autoshard.sharding.layout import RP, Cut, P, R


def test_equal_tags_are_one_object_after_copies_too() -> None:
    meta = Meta((Cut(0, 1, 2), R), (4, 3), (1,))
    assert Meta((Cut(0, 1, 2), R), (4, 3), (1,)) is meta
    assert copy.deepcopy(meta) is meta
    assert pickle.loads(pickle.dumps(meta)) is meta


def test_tag_goes_along_with_a_deep_copy() -> None:
    tensor = torch.ones(2, 3)
    set_meta(tensor, Meta((Cut(0, 1, 2), R), (4, 3)))
    assert meta_of(copy.deepcopy(tensor)) is meta_of(tensor)


def test_gradient_of_a_gradient_is_partial_where_the_value_is() -> None:
    assert dual((RP, P, R, Cut(0, 1, 2))) == (P, RP, R, Cut(0, 1, 2))


def test_objects_are_found_once_in_order() -> None:
    module = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    x, y = torch.ones(1), torch.ones(2)
    found = objects_of((x, [module, {"a": y}], module.weight, scheduler), {"again": x})
    assert found.modules == [module]
    assert found.optimizers == [optimizer]
    assert [id(t) for t in found.tensors] == [id(x), id(y)]


def test_containers_without_a_change_stay_themselves() -> None:
    value = ({"a": [1, 2]}, (3,))
    assert map_tensors(value, lambda v: v) is value
    assert map_tensors(value, lambda v: v + 1) == ({"a": [2, 3]}, (4,))


def test_recording_does_not_load_the_compiler() -> None:
    text = "import sys, autoshard.runtime.eager.warm; print('torch._dynamo' in sys.modules)"
    out = subprocess.run(
        [sys.executable, "-c", text], check=True, capture_output=True, text=True, timeout=120
    )
    assert out.stdout.strip() == "False"
