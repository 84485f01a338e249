"""Chat templates: what they render, and what is refused."""

import pytest

from minivllm.config import RequestError
from minivllm.models.chat import render_chat, render_template
from tests.byte_tokenizer import ByteTokenizer

# as the default model ships it
SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou are a "
    "helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] "
    "+ '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' "
    "}}{% endif %}"
)
# the constructs that Qwen3's template is made of: namespaces, reversed loops, string methods, a switch for thinking
THINKING = """\
{%- set ns = namespace(searching=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- if ns.searching and message.role == "user" %}
        {%- set ns.searching = false %}
        {%- set ns.last = messages|length - 1 - loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if '</think>' in content and loop.index0 < ns.last %}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""
HI = [{"role": "user", "content": "hi"}]


def test_one_message_by_hand():
    assert render_chat(ByteTokenizer(SMOLLM2), HI) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nhi<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_a_system_message_replaces_the_default_one():
    messages = [{"role": "system", "content": "Be brief."}, *HI]
    assert render_chat(ByteTokenizer(SMOLLM2), messages, add_generation_prompt=False) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
    )


def test_thinking_is_dropped_from_earlier_answers():
    messages = [
        *HI,
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nhello"},
        {"role": "user", "content": "2+2?"},
    ]
    assert render_chat(ByteTokenizer(THINKING), messages) == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nhello<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_variables_reach_the_template():
    assert render_chat(ByteTokenizer(THINKING), HI, enable_thinking=False).endswith(
        "assistant\n<think>\n\n</think>\n\n"
    )


def test_templates_know_the_begin_and_end_tokens():
    assert render_chat(ByteTokenizer("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"), HI) == "<bos>hi<eos>"


def test_blocks_leave_no_blank_lines():
    assert render_template("{% if true %}\n  {% set x = 1 %}\nx\n{% endif %}\n", HI) == "x\n"


def test_json_keeps_characters_as_they_are():
    assert render_template("{{ tools | tojson }}", HI, tools=[{"name": "é<b>"}]) == '[{"name": "é<b>"}]'


def test_loops_may_break():
    assert render_template("{% for m in messages %}{{ m.content }}{% break %}{% endfor %}", [*HI, *HI]) == "hi"


def test_templates_know_the_date():
    assert render_template("{{ strftime_now('%%') }}", HI) == "%"


def test_content_is_never_run_as_a_template():
    assert render_template("{{ messages[0].content }}", [{"role": "user", "content": "{{ 7 * 7 }}"}]) == "{{ 7 * 7 }}"


# refused


def test_a_model_without_a_template_says_so():
    with pytest.raises(RequestError, match="no chat template; give a plain prompt"):
        render_chat(ByteTokenizer(), HI)


@pytest.mark.parametrize("messages", [[], "hi", {"role": "user", "content": "hi"}])
def test_messages_must_be_a_list(messages):
    with pytest.raises(RequestError, match=r"messages=.* must be a list"):
        render_template(SMOLLM2, messages)


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ("hi", r"messages\[1\]='hi': must be"),
        ({"content": "hi"}, r"messages\[1\]\.role=None: must be one of system"),
        ({"role": "robot", "content": "hi"}, r"messages\[1\]\.role='robot': must be one of system"),
        ({"role": "user"}, r"messages\[1\]\.content=None: must be text"),
        ({"role": "user", "content": 7}, r"messages\[1\]\.content=7: must be text"),
        ({"role": ["user"], "content": "hi"}, r"messages\[1\]\.role="),
    ],
)
def test_a_bad_message_is_named(message, says):
    with pytest.raises(RequestError, match=says):
        render_template(SMOLLM2, [*HI, message])


def test_a_template_can_refuse_a_conversation():
    with pytest.raises(RequestError, match="chat template says: roles must alternate"):
        render_template("{{ raise_exception('roles must alternate') }}", HI)


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{{ fetch_weather() }}", "'fetch_weather' is undefined"),
        ("{% for %}", "is not valid Jinja"),
        ("{{ messages[0].content + 1 }}", "fails on these messages"),
        ("{{ messages | teleport }}", "teleport"),
        ("{{ 1 / 0 }}", "fails on these messages"),
        ("{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}", "fails on these messages"),
    ],
)
def test_a_broken_template_is_a_bad_request(template, says):
    with pytest.raises(RequestError, match=says):
        render_template(template, HI)


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
    ],
)
def test_a_template_stays_in_its_sandbox(template):
    with pytest.raises(RequestError, match="fails on these messages"):
        render_template(template, HI)
