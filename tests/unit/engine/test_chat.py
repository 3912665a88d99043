"""Chat templates: the same prompts as transformers and llama.cpp, and templates that mean harm."""

from __future__ import annotations

import json
import os
import signal
import threading
from datetime import datetime
from pathlib import Path

import llamacpp_tokens as peer
import pytest

from kvasir_console.engine import chat, template_child
from kvasir_console.engine.chat import ChatTemplate
from kvasir_console.engine.checkpoint.gguf import Checkpoint
from kvasir_console.engine.tokens import MAX_TEXT_CHARS, Tokenizer
from kvasir_console.errors import ModelError, RequestError

HELLO = [{"role": "user", "content": "hello"}]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Wetter für <Ort> & Zeit",
            "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
        },
    }
]
CONVERSATION = [
    {"role": "system", "content": "Be brief.\n"},
    {"role": "user", "content": "  What's the weather in Köln? <b>&</b> {{ not_a_variable }} "},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "weather", "arguments": {"place": "Köln"}}}],
    },
    {"role": "tool", "name": "weather", "content": "rain"},
    {"role": "assistant", "content": "Rain."},
    {"role": "user", "content": "Thanks 😀"},
]

CHATML = """{% for message in messages %}{{'<|im_start|>' + message['role'] + '
' + message['content'] + '<|im_end|>' + '
'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant
' }}{% endif %}"""
TOOLS_AND_BLOCKS = """
{%- if tools %}
    {%- for tool in tools %}
{{ tool | tojson }}
{{ tool | tojson(indent=2) }}
    {%- endfor %}
{%- endif %}
{% for message in messages %}
    {% if message.tool_calls %}
        {%- for call in message.tool_calls %}
CALL {{ call.function.name }} {{ call.function.arguments | tojson }}
        {%- endfor %}
    {% else %}
[{{ loop.index0 }}/{{ loop.last }}] {{ message.role | upper }}: {{ message.content | trim }}
    {% endif %}
{% endfor %}
"""
LOOP_CONTROLS = """{% set ns = namespace(seen=0) %}{% for message in messages %}
{% if message.role == 'tool' %}{% continue %}
{% endif %}
{% set ns.seen = ns.seen + 1 %}{% if ns.seen > 3 %}{% break %}{% endif %}{{ message.content[:9] }}|{% endfor %}
{{- ns.seen }}"""
MACRO_AND_GENERATION = """{% macro show(m) %}<{{ m.role }}>{{ m['content'] }}{% endmacro %}{{ bos_token }}
{% for m in messages %}
{% generation %}
{{ show(m) }}{{ eos_token if loop.last else '' }}
{% endgeneration %}
{% endfor %}
{%- if tools is none %}no tools{% endif %}{{ messages | map(attribute='role') | join(',') }}"""


@pytest.fixture
def template():
    """Builds templates and ends their processes."""
    made = []

    def make(source: str | None, **kwargs) -> ChatTemplate:
        made.append(ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}, **kwargs))
        return made[-1]

    yield make
    for one in made:
        one.close()


# -- the same as others ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", [CHATML, TOOLS_AND_BLOCKS, LOOP_CONTROLS, MACRO_AND_GENERATION])
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["no-tools", "tools"])
@pytest.mark.parametrize("opening", [True, False], ids=["opening", "closed"])
def test_prompts_are_those_of_transformers(template, source, tools, opening):
    reference = pytest.importorskip("transformers.utils.chat_template_utils")
    (expected,), _ = reference.render_jinja_template(
        conversations=[CONVERSATION],
        tools=tools,
        chat_template=source,
        add_generation_prompt=opening,
        bos_token="<s>",
        eos_token="</s>",
    )
    assert template(source).render(CONVERSATION, tools=tools, add_generation_prompt=opening) == expected


@pytest.mark.model
def test_smollm2_prompts_are_those_of_transformers_and_llama_cpp(smollm2_path):
    reference = pytest.importorskip("transformers.utils.chat_template_utils")
    pytest.importorskip("xllamacpp")
    with Checkpoint.open(smollm2_path) as checkpoint:
        metadata = dict(checkpoint.metadata)
        own = ChatTemplate.from_metadata(metadata, Tokenizer.from_metadata(metadata))
    conversations = [
        HELLO,
        [{"role": "system", "content": "Be brief."}, *HELLO],
        [*HELLO, {"role": "assistant", "content": "Hi!\n"}, {"role": "user", "content": "Größe? 😀 <|im_end|>"}],
    ]
    prompts = [own.render(messages) for messages in conversations]
    own.close()
    assert prompts == peer.apply_template(Path(smollm2_path), conversations)
    expected, _ = reference.render_jinja_template(
        conversations=conversations, chat_template=metadata["tokenizer.chat_template"], add_generation_prompt=True
    )
    assert prompts == expected
    assert prompts[0].startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert prompts[1] == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    )


def test_the_date_is_the_clock_s(template):
    one = template("{{ strftime_now('%d %b %Y') }}", clock=lambda: datetime(2025, 3, 9, 12, 30))
    assert one.render(HELLO) == "09 Mar 2025"


def test_text_parts_are_joined(template):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert template("{{ messages[0].content }}").render([{"role": "user", "content": parts}]) == "a\nb"


def test_the_template_for_tools_is_used_when_there_are_tools(template):
    one = template("plain", tool_source="{{ tools | length }} tools")
    assert one.render(HELLO) == "plain"
    assert one.render(HELLO, tools=TOOLS) == "1 tools"
    assert one.supports_tools
    assert not template(CHATML).supports_tools


# -- metadata ----------------------------------------------------------------------------------------------------------


def _tokenizer(*extra: str) -> tuple[dict, Tokenizer]:
    metadata = peer.byte_pair_vocabulary("smollm")
    metadata["tokenizer.ggml.tokens"] += extra
    metadata["tokenizer.ggml.token_type"] += [3] * len(extra)
    return metadata, Tokenizer.from_metadata(metadata)


def test_tokens_of_the_file_are_variables():
    metadata, tokenizer = _tokenizer()
    metadata["tokenizer.chat_template"] = "{{ bos_token }}{{ eos_token }}{{ pad_token is defined }}"
    one = ChatTemplate.from_metadata(metadata, tokenizer)
    assert one.render(HELLO) == "<|a|><|b|>False"
    one.close()


def test_without_a_template_chatml_is_used_where_its_tokens_are():
    metadata, tokenizer = _tokenizer("<|im_start|>", "<|im_end|>")
    one = ChatTemplate.from_metadata(metadata, tokenizer)
    assert one.render(HELLO) == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    one.close()


def test_without_a_template_and_those_tokens_chat_is_refused():
    with pytest.raises(RequestError) as caught:
        ChatTemplate.from_metadata(*_tokenizer()).render(HELLO)
    assert caught.value.code == "no_chat_template"


@pytest.mark.parametrize("value", [7, ["x"], "x" * (chat.MAX_TEMPLATE_CHARS + 1)], ids=["number", "list", "long"])
def test_a_template_that_is_no_text_or_too_long_is_refused(value):
    metadata, tokenizer = _tokenizer()
    metadata["tokenizer.chat_template"] = value
    with pytest.raises(ModelError, match=r"tokenizer\.chat_template"):
        ChatTemplate.from_metadata(metadata, tokenizer)


# -- requests at fault -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("messages", "code"),
    [
        ([], "bad_messages"),
        ([{"content": "x"}], "bad_messages"),
        ([{"role": 1, "content": "x"}], "bad_messages"),
        (["x"], "bad_messages"),
        ([{"role": "user", "content": 7}], "bad_messages"),
        ([{"role": "user", "content": "x", "extra": object()}], "bad_messages"),
        ([{"role": "user", "content": "x", "extra": float("nan")}], "bad_messages"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "unsupported_content"),
        ([{"role": "user", "content": "x" * (chat.MAX_REQUEST_CHARS + 1)}], "prompt_too_long"),
        ([{"role": "user", "content": "x" * (MAX_TEXT_CHARS + 1)}], "prompt_too_long"),
        ([{"role": "user"}], "bad_messages"),
    ],
)
def test_messages_out_of_shape_are_refused(template, messages, code):
    with pytest.raises(RequestError) as caught:
        template(CHATML).render(messages)
    assert caught.value.code == code


def test_a_conversation_the_template_refuses_is_the_request_s_fault(template):
    one = template("{{ raise_exception('Roles must\x1b[2J alternate') }}")
    with pytest.raises(RequestError, match="Roles must") as caught:
        one.render(HELLO)
    assert "\x1b" not in str(caught.value)


def test_a_machine_that_stands_still_is_not_the_template_s_fault(template):
    one = template(CHATML)
    before = one.render(HELLO)
    child = one._renderer._process
    os.kill(child.pid, signal.SIGSTOP)
    threading.Timer(template_child.CPU_S + 2, os.kill, (child.pid, signal.SIGCONT)).start()
    assert one.render(HELLO) == before
    assert one._renderer._process is child


# -- templates at fault ------------------------------------------------------------------------------------------------

HOSTILE = {
    "range": "{% for i in range(10**12) %}x{% endfor %}",
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "filtered loops": "{% for a in range(99999) %}{% for b in range(99999) if false %}{% endfor %}{% endfor %}",
    "much text": "{% for a in range(99999) %}{{ 'x' * 1000 }}{% endfor %}",
    "a long string": "{{ 'x' * 10**11 }}",
    "a long list": "{{ [0] * 10**11 }}",
    "a large power": "{{ 10 ** (10 ** 10) }}",
    "doubling": "{% set n = namespace(s='x') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}{{ n.s }}",
    "padding": "{{ 'x'.ljust(10**11) }}",
    "a wide format": "{{ '{:100000000000d}'.format(1) }}",
    "recursion": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "compile time": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "syntax": "{% for %}",
    "a class": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals": "{{ raise_exception.__globals__['os'] }}",
    "mutation": "{{ messages.append(1) }}",
    "a file": "{% include '/etc/passwd' %}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_is_refused_and_the_next_one_is_served(template, name):
    one = template(HOSTILE[name], timeout_s=1.5)
    with pytest.raises((ModelError, RequestError)) as caught:
        one.render(HELLO)
    assert caught.value.code in ("bad_template", "bad_messages")
    assert template(CHATML).render(HELLO).endswith("<|im_start|>assistant\n")


def test_a_template_without_end_is_stopped_by_its_processor_time(template):
    with pytest.raises(ModelError, match="processor time") as caught:
        template(HOSTILE["nested loops"]).render(HELLO)
    assert caught.value.code == "bad_template"


@pytest.mark.parametrize(
    "name", ["range", "nested loops", "much text", "a long string", "doubling", "syntax", "a class"]
)
def test_a_hostile_template_is_the_file_s_fault(template, name):
    with pytest.raises(ModelError, match="chat template of this file"):
        template(HOSTILE[name], timeout_s=1.5).render(HELLO)


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="looks into /proc")
def test_a_template_sees_nothing_of_this_process(template, monkeypatch):
    monkeypatch.setenv("KVASIR_SECRET", "shh")
    one = template(CHATML)
    one.render(HELLO)
    pid = one._renderer._process.pid
    environment = Path(f"/proc/{pid}/environ").read_bytes()
    assert b"KVASIR" not in environment
    open_files = {os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir() if link.name not in "012"}
    assert open_files == set()


def test_one_process_serves_many_renderings_and_a_lost_one_is_replaced(template):
    one = template(CHATML)
    first = one.render(HELLO)
    pid = one._renderer._process.pid
    assert one.render(HELLO) == first
    assert one._renderer._process.pid == pid
    os.kill(pid, signal.SIGKILL)
    one._renderer._process.wait()
    assert one.render(HELLO) == first
    assert one._renderer._process.pid != pid


def test_the_process_ends_with_its_template(template):
    one = template(CHATML)
    one.render(HELLO)
    process = one._renderer._process
    one.close()
    assert process.poll() is not None


def test_a_prompt_is_json_s_to_carry_whatever_it_holds(template):
    text = '"\\\n\u2028\x00😀\ud800'
    assert template("{{ messages[0].content }}").render([{"role": "user", "content": text}]) == text
    assert json.loads(template("{{ messages | tojson }}").render(HELLO)) == HELLO
