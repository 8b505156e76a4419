"""Plans of what the software does: products in fewer bits, messages beside computing."""

from __future__ import annotations

import pytest

import autoshard
from autoshard.errors import RequestError, UnknownNameError
from autoshard.planner.plan import Plan
from tests.test_stretch import LLAMA

MODEL = {**LLAMA, "num_hidden_layers": 4, "hidden_size": 2048, "intermediate_size": 8192}


def planned(products: str, **options: object) -> Plan:
    asked: dict[str, object] = {"space": "full", **options}
    return autoshard.optimize(
        MODEL,
        cluster="h100",
        devices=8,
        global_batch=16,
        seq_len=1024,
        dtype="bfloat16",
        products=products,
        progress=None,
        **asked,  # type: ignore[arg-type]
    )


def test_a_plan_of_the_full_space_is_found_and_priced_with_them() -> None:
    native, few = planned("native"), planned("fp8")
    assert few.schedule.products == "fp8"
    assert few.step_time.compute_s < native.step_time.compute_s
    assert few.lower_bound_s is not None
    assert few.lower_bound_s <= few.step_time.total_s < native.step_time.total_s
    # Others of the space are priced with them too.
    answers = few.why(progress=None).alternatives
    assert answers
    for answer in answers:
        whole = answer.time[-1]
        assert whole.plan == pytest.approx(few.step_time.total_s)
        assert not answer.fits or whole.other >= few.lower_bound_s * (1 - 1e-9)


def test_who_asks_for_them_elsewhere_or_by_another_name_is_told() -> None:
    with pytest.raises(UnknownNameError, match="nvfp4"):
        planned("fp6")
    with pytest.raises(RequestError, match="they have native, tf32, fp8"):
        planned("nvfp4")
    with pytest.raises(RequestError, match="they have native, tf32, fp8"):
        autoshard.estimate(MODEL, mesh="data=8", cluster="h100", products="mxfp8", progress=None)
    with pytest.raises(RequestError, match="products is of the full space"):
        planned("fp8", space="plain")
    with pytest.raises(RequestError, match="products is of training"):
        planned("fp8", space="plain", mode="decode", context=64)


def test_a_plan_is_found_with_messages_beside_computing() -> None:
    waiting, beside = planned("native"), planned("native", overlapped=["data", "model"])
    assert beside.schedule.overlapped == ("data", "model")
    assert beside.step_time.total_s < waiting.step_time.total_s
    assert beside.schedule.order != "zero-bubble"
    assert planned("native", overlapped="data").schedule.overlapped == ("data",)
    with pytest.raises(RequestError, match="leave zero-bubble out: name other schedules"):
        planned("native", overlapped=["data"], axes={"pipeline": 2}, schedule="zero-bubble")
    with pytest.raises(UnknownNameError, match="context"):
        planned("native", overlapped=["pipeline"])
    with pytest.raises(RequestError, match="overlapped is of the full space"):
        planned("native", overlapped=["data"], space="plain")
