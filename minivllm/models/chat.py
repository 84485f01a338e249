"""Messages to a prompt: the chat template that a model ships, a Jinja program, run in a sandbox."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, TemplateSyntaxError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from minivllm.config import RequestError
from minivllm.models.tokenizer import Tokenizer

ROLES = ("system", "developer", "user", "assistant", "tool")

# what a template that doesn't fit the messages can raise while it runs
TEMPLATE_ERRORS = (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)

Message = Mapping[str, Any]


def render_chat(
    tokenizer: Tokenizer, messages: Sequence[Message], add_generation_prompt: bool = True, **variables: object
) -> str:
    """The prompt that the model's chat template makes of `messages`, each {"role", "content"}.

    With `add_generation_prompt` it ends where the assistant starts to speak. `variables` reach the template, for
    example `enable_thinking=False` for Qwen3. The text has its special tokens in it: encode it with `parse_special`,
    and add no begin token. Raises `RequestError` if the model has no template, a message is malformed or the template
    refuses the conversation.
    """
    if tokenizer.chat_template is None:
        raise RequestError(
            "messages", "chat", "the model has no chat template; give a plain prompt, or use an instruct model"
        )
    bos = tokenizer.bos_token_id
    eos = next(iter(tokenizer.eos_token_ids), None)
    return render_template(
        tokenizer.chat_template,
        messages,
        add_generation_prompt=add_generation_prompt,
        bos_token="" if bos is None else tokenizer.token_bytes(bos).decode(),
        eos_token="" if eos is None else tokenizer.token_bytes(eos).decode(),
        **variables,
    )


def render_template(template: str, messages: Sequence[Message], **variables: object) -> str:
    """Render a chat template with `messages` and `variables`; errors as in `render_chat`."""
    check_messages(messages)
    try:
        return compile_template(template).render(messages=[dict(message) for message in messages], **variables)
    except RequestError:
        raise
    except TemplateSyntaxError as error:
        raise RequestError("chat_template", f"line {error.lineno}", f"is not valid Jinja: {error.message}") from error
    except TEMPLATE_ERRORS as error:
        raise RequestError("chat_template", template[:40], f"fails on these messages: {error}") from error


def check_messages(messages: Sequence[Message]) -> None:
    """Raise `RequestError` unless `messages` is a conversation: one or more of a known role with text as content."""
    if isinstance(messages, (str, bytes, Mapping)) or not messages:
        raise RequestError("messages", messages, 'must be a list of {"role": .., "content": ..}, at least one')
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise RequestError(f"messages[{index}]", message, 'must be {"role": .., "content": ..}')
        if message.get("role") not in ROLES:
            raise RequestError(f"messages[{index}].role", message.get("role"), f"must be one of {', '.join(ROLES)}")
        content = message.get("content")
        if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
            raise RequestError(f"messages[{index}].content", content, "must be text")


@lru_cache(maxsize=16)
def compile_template(source: str) -> Template:
    """Compile a chat template with the settings and functions that published templates count on.

    The sandbox keeps a template out of Python and from changing the messages: it comes from a stranger's file.
    (transformers 5.24, `utils/chat_template_utils.py:_compile_jinja_template`.)
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(raise_exception=_refuse, strftime_now=_now)
    return environment.from_string(source)


def _to_json(value: object, indent: int | None = None) -> str:
    # jinja's own tojson escapes <, > and & for web pages; a model should see them as they are
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(reason: str) -> NoReturn:
    raise RequestError("messages", "refused", f"the model's chat template says: {reason}")


def _now(layout: str) -> str:
    return datetime.now().strftime(layout)
