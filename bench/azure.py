"""The Azure traces on disk: which file belongs to which task, and where they come from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

TAGS = ("code", "conv")
SOURCE = (
    "the Azure LLM inference trace 2023: AzureLLMInferenceTrace_code.csv and …_conv.csv from "
    "github.com/Azure/AzurePublicDataset, folder data"
)
ADD = f"add --data FOLDER with {SOURCE}"


class NoTraces(ValueError):
    """The folder does not hold a trace; the message says what to put there."""


def traces(folder: Path, tags: Sequence[str] = TAGS) -> dict[str, Path]:
    """Tag -> the first CSV of ``folder`` with the tag in its name. Raises NoTraces."""
    found = {}
    for tag in tags:
        files = sorted([*folder.glob(f"*{tag}*.csv"), *folder.glob(f"*{tag}*.csv.gz")])
        if not files:
            raise NoTraces(f"--data {folder}: no CSV with {tag!r} in its name; it takes {SOURCE}")
        found[tag] = files[0]
    return found
