"""Reading a chat request: what has an effect, and that nothing which would change the answer is ignored."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir_console.node.gateway.chatrequest import ParameterError, parse_chat

BASE: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def refused(**fields: Any) -> ParameterError:
    with pytest.raises(ParameterError) as caught:
        parse_chat(BASE | fields)
    return caught.value


def test_defaults_are_openais() -> None:
    chat = parse_chat(BASE)
    assert (chat.temperature, chat.top_p, chat.stop, chat.stream, chat.max_tokens) == (1.0, 1.0, (), False, None)
    assert (chat.experts, chat.trace, chat.extended) == ("network", False, False)
    assert 0 <= chat.seed < 2**63
    assert parse_chat(BASE).seed != chat.seed  # without a seed two answers differ


def test_everything_reaches_the_engine() -> None:
    body = BASE | {
        "max_tokens": 9,
        "temperature": 0.5,
        "top_p": 0.9,
        "seed": 7,
        "stop": ["a", "b"],
        "top_k": 40,
        "min_p": 0.05,
        "repetition_penalty": 1.1,
        "presence_penalty": -0.5,
        "frequency_penalty": 0.25,
        "penalty_last_n": 128,
        "logprobs": True,
        "top_logprobs": 5,
        "stream": True,
        "kvasir": {"experts": "local", "trace": True},
    }
    chat = parse_chat(body)
    request = chat.to_engine(9)
    assert (request.max_tokens, request.temperature, request.top_p, request.seed) == (9, 0.5, 0.9, 7)
    assert (request.stop, request.experts, request.trace) == (("a", "b"), "local", True)
    assert (request.top_k, request.min_p, request.logprobs) == (40, 0.05, 5)
    assert (request.repetition_penalty, request.presence_penalty, request.frequency_penalty) == (1.1, -0.5, 0.25)
    assert request.penalty_last_n == 128
    assert chat.stream
    assert chat.extended


def test_what_is_not_asked_for_does_not_reach_the_engine() -> None:
    request = parse_chat(BASE | {"temperature": 0, "seed": 0}).to_engine(256)
    assert request.to_fields() == {"messages": ({"role": "user", "content": "hi"},)}


def test_penalties_look_at_the_whole_text_unless_told_otherwise() -> None:
    assert parse_chat(BASE | {"presence_penalty": 1}).to_engine(9).penalty_last_n == -1


def test_log_probabilities_without_alternatives() -> None:
    assert parse_chat(BASE | {"logprobs": True}).logprobs == 0
    assert parse_chat(BASE | {"logprobs": True, "top_logprobs": 20}).logprobs == 20
    assert parse_chat(BASE | {"logprobs": False, "top_logprobs": 0}).logprobs is None


def test_every_token_may_come_by_either_number() -> None:
    assert [parse_chat(BASE | {"top_k": top_k}).top_k for top_k in (-1, 0, 7)] == [0, 0, 7]


def test_a_session_is_known_by_a_digest() -> None:
    def session(caller: str = "", **fields: Any) -> str:
        return parse_chat(BASE | fields).to_engine(9, caller).session

    assert session() == session(user="") == ""
    named = [
        session(user="a"),
        session(user="b"),
        session("x", user="a"),
        session(prompt_cache_key="a"),
        session(user="\0a"),
    ]
    assert len(set(named)) == len(named)
    assert session(user="z", prompt_cache_key="a") == session(prompt_cache_key="a")
    assert all(len(each) == 64 and each.isalnum() for each in named)


def test_the_newer_name_of_the_limit_wins() -> None:
    assert parse_chat(BASE | {"max_tokens": 5, "max_completion_tokens": 6}).max_tokens == 6


@pytest.mark.parametrize(
    ("role", "expected"),
    [
        ("system", "system"),
        ("developer", "system"),
        ("user", "user"),
        ("assistant", "assistant"),
        ("tool", "tool"),
        ("function", "tool"),
    ],
)
def test_roles(role: str, expected: str) -> None:
    chat = parse_chat(BASE | {"messages": [{"role": role, "content": "x", "name": "n"}]})
    assert chat.messages == ({"role": expected, "content": "x"},)


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert parse_chat(BASE | {"messages": [{"role": "user", "content": parts}]}).messages == (
        {"role": "user", "content": "ab"},
    )
    assert parse_chat(BASE | {"messages": [{"role": "assistant", "content": None}]}).messages == (
        {"role": "assistant", "content": ""},
    )


def test_a_stop_may_be_one_text() -> None:
    assert parse_chat(BASE | {"stop": "\n"}).stop == ("\n",)
    assert parse_chat(BASE | {"stop": None}).stop == ()


@given(st.integers(-(2**64) + 1, 2**64 - 1))
def test_any_seed_of_64_bits_is_taken(seed: int) -> None:
    assert 0 <= parse_chat(BASE | {"seed": seed}).seed < 2**63
    assert parse_chat(BASE | {"seed": seed}).seed == parse_chat(BASE | {"seed": seed}).seed


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 2}, "n"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"response_format": "json"}, "response_format"),
        ({"logit_bias": {"1": 2}}, "logit_bias"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages.0.content",
        ),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    error = refused(**fields)
    assert (error.param, error.code, error.http_status) == (param, "unsupported_parameter", 400)


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 1},
        {"tools": []},
        {"tools": [{"type": "function"}], "tool_choice": "none"},
        {"logprobs": False},
        {"logprobs": False, "top_logprobs": 0},
        {"presence_penalty": None, "top_k": None, "min_p": None},
        {"response_format": {"type": "text"}},
        {"frequency_penalty": 0},
        {"logit_bias": {}},
        {"stream_options": {"include_usage": True}},
        {"user": "u", "metadata": {}, "store": False},
    ],
)
def test_what_changes_nothing_is_taken(fields: dict[str, Any]) -> None:
    assert parse_chat(BASE | fields).messages == parse_chat(BASE).messages


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"model": ""}, "model"),
        ({"model": None}, "model"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": ["hi"]}, "messages.0"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ({"messages": [{"role": "root", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": [], "content": "x"}]}, "messages.0.role"),
        ({"messages": [BASE["messages"][0], {"role": "user", "content": 7}]}, "messages.1.content"),
        ({"prompt": ["a"]}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"top_k": 2**31}, "top_k"),
        ({"min_p": 1.01}, "min_p"),
        ({"min_p": -0.1}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"repetition_penalty": 10.5}, "repetition_penalty"),
        ({"presence_penalty": -2.1}, "presence_penalty"),
        ({"presence_penalty": True}, "presence_penalty"),
        ({"frequency_penalty": 2.1}, "frequency_penalty"),
        ({"frequency_penalty": "0"}, "frequency_penalty"),
        ({"penalty_last_n": -2}, "penalty_last_n"),
        ({"logprobs": 1}, "logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": True}, "top_logprobs"),
        ({"user": 7}, "user"),
        ({"user": "x" * 1025}, "user"),
        ({"prompt_cache_key": ["k"]}, "prompt_cache_key"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_completion_tokens": 1.5}, "max_completion_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 1.1}, "top_p"),
        ({"seed": 1.5}, "seed"),
        ({"seed": 2**64}, "seed"),
        ({"stop": 5}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": ["x" * 257]}, "stop"),
        ({"stream": "yes"}, "stream"),
        ({"kvasir": {"experts": "both"}}, "kvasir"),
        ({"kvasir": {"trace": 1}}, "kvasir"),
        ({"kvasir": {"other": 1}}, "kvasir"),
        ({"kvasir": 1}, "kvasir"),
    ],
)
def test_a_malformed_field_is_named(fields: dict[str, Any], param: str) -> None:
    error = refused(**fields)
    assert (error.param, error.code, error.http_status) == (param, "invalid_value", 400)
