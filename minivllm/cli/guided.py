"""The flags that say what an answer must look like."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

from typer import Option

from minivllm.config import RequestError
from minivllm.request import Guided, GuidedChoice, GuidedJson, GuidedRegex

GuidedOption = partial(Option, rich_help_panel="Structured output")


@dataclass(frozen=True, slots=True)
class GuidedFlags:
    """At most one of three ways to guide an answer."""

    guided_json: Annotated[
        str | None,
        GuidedOption(
            metavar="FILE|'{}'",
            help="A JSON schema, or a file with one: the answer is a document that it allows. '{}' allows any.",
        ),
    ] = None
    guided_regex: Annotated[
        str | None, GuidedOption(metavar="PATTERN", help="The whole answer matches this pattern.")
    ] = None
    guided_choice: Annotated[str | None, GuidedOption(metavar="A,B,C", help="The answer is one of these texts.")] = None

    def guided(self) -> Guided | None:
        """What the flags ask for. Raises `RequestError` for two of them, and for a file that can't be read."""
        guides: list[Guided] = []
        if self.guided_json is not None:
            guides.append(GuidedJson(read_schema(self.guided_json)))
        if self.guided_regex is not None:
            guides.append(GuidedRegex(self.guided_regex))
        if self.guided_choice is not None:
            guides.append(GuidedChoice(tuple(self.guided_choice.split(","))))
        if len(guides) > 1:
            raise RequestError("guided", len(guides), "give one of --guided-json, --guided-regex and --guided-choice")
        return guides[0] if guides else None


def read_schema(argument: str) -> str:
    """The text of a schema: the argument itself if it begins as one, else what is in the file of that name."""
    if argument.lstrip().startswith("{"):
        return argument
    try:
        return Path(argument).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(
            "guided_json", argument, f"is no schema in braces, nor a file that can be read: {error}"
        ) from error
