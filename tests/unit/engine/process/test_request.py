"""Generate requests across the control stream: what is sent is what is read, and what is wrong is named."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir_console.engine.process.client import GenerateRequest
from kvasir_console.engine.process.request import parse_request, sampling_of
from kvasir_console.engine.sampling import SamplingParams
from kvasir_console.errors import RequestError

unit = st.floats(0, 1)
requests = st.builds(
    GenerateRequest,
    prompt=st.text(),
    max_tokens=st.integers(1, 9999),
    temperature=st.floats(0, 2),
    top_k=st.integers(0, 100),
    top_p=unit,
    min_p=unit,
    seed=st.integers(0, 2**64 - 1),
    repetition_penalty=st.floats(0.5, 2),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    penalty_last_n=st.integers(-1, 500),
    stop=st.lists(st.text(min_size=1, max_size=5), max_size=4).map(tuple),
    ignore_eos=st.booleans(),
    logprobs=st.none() | st.integers(0, 20),
    session=st.text(max_size=20),
    speculation=st.sampled_from(("auto", "on", "off")),
    experts=st.sampled_from(("network", "local")),
    trace=st.booleans(),
)


@given(requests)
def test_a_request_arrives_as_it_was_sent(request):
    message = json.loads(json.dumps({"id": 7, "verb": "generate", **request.to_fields()}))
    assert parse_request(message) == request


def test_fields_that_say_nothing_are_not_sent():
    assert GenerateRequest(prompt="x").to_fields() == {"prompt": "x"}
    assert GenerateRequest(prompt_tokens=(1, 2), top_p=0.5).to_fields() == {"prompt_tokens": (1, 2), "top_p": 0.5}


def test_sampling_is_taken_from_the_request():
    request = GenerateRequest(prompt="x", temperature=1, top_p=0.5, frequency_penalty=1, penalty_last_n=-1, seed=4)
    assert sampling_of(request) == SamplingParams(1.0, top_p=0.5, seed=4, frequency_penalty=1.0, penalty_last_n=-1)


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({}, "no_prompt"),
        ({"prompt": "a", "prompt_tokens": [1]}, "no_prompt"),
        ({"prompt": 5}, "wrong_type"),
        ({"prompt": "a", "max_tokens": True}, "wrong_type"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens_out_of_range"),
        ({"prompt_tokens": [1, "2"]}, "wrong_type"),
        ({"prompt": "a", "logprobs": 21}, "logprobs_out_of_range"),
        ({"prompt": "a", "logprobs": -1}, "logprobs_out_of_range"),
        ({"prompt": "a", "logprobs": True}, "wrong_type"),
        ({"prompt": "a", "speculation": "maybe"}, "unknown_speculation_mode"),
        ({"prompt": "a", "session": "s" * 129}, "session_too_long"),
        ({"prompt": "a", "experts": "mine"}, "unknown_experts_mode"),
        ({"prompt": "a", "stop": [""]}, "bad_stop"),
        ({"prompt": "a", "stop": ["x"] * 17}, "bad_stop"),
        ({"prompt": "a", "frequency": 1}, "unknown_field"),
    ],
)
def test_what_is_wrong_is_named(fields, code):
    with pytest.raises(RequestError) as refusal:
        parse_request(fields)
    assert refusal.value.code == code


@pytest.mark.parametrize(
    "fields",
    [{"repetition_penalty": 0}, {"presence_penalty": 3}, {"frequency_penalty": -3}, {"penalty_last_n": -2}],
)
def test_penalties_out_of_range_are_named(fields):
    (name,) = fields
    with pytest.raises(RequestError) as refusal:
        sampling_of(parse_request({"prompt": "a", **fields}))
    assert refusal.value.code == "bad_sampling"
    assert name in refusal.value.message
