"""The JSON files of a model folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from minivllm.config import ModelError

Json = Mapping[str, Any]


def read_json(path: Path, *, optional: bool = False) -> Json:
    """The object in a JSON file; empty if the file is `optional` and missing.

    Raises `ModelError` for a file that is missing, can't be read or holds no object.
    """
    if optional and not path.exists():
        return {}
    try:
        content = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path}: is missing; the model folder is incomplete, fetch it again") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: can't be read ({error}); fetch it again") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path}: must hold a JSON object; fetch it again")
    return content
