"""Options that several commands share, and how their text becomes values."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON object on stdout, nothing else.")
]


def comma_list(values: Sequence[str] | None) -> tuple[str, ...]:
    """``["a,b", "c"]`` -> ``("a", "b", "c")``: repeats or commas, as the user likes."""
    parts = [part.strip() for value in values or () for part in value.split(",")]
    return tuple(part for part in parts if part)


def some(values: tuple[str, ...], given: Sequence[str] | None, option: str) -> tuple[str, ...]:
    """The list, unless the option was given and names nothing (an unset shell variable, say).

    Raises:
        typer.BadParameter: It names nothing.
    """
    if given and not values:
        raise typer.BadParameter(f"{option} is given and names nothing")
    return values


def share(text: str) -> float:
    """``1%`` or ``0.01``.

    Raises:
        typer.BadParameter: It is neither.
    """
    try:
        return float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is neither a share such as 0.01 nor 1%") from None


def print_json(data: Mapping[str, Any]) -> None:
    """Exactly one object on stdout."""
    print(json.dumps(data, allow_nan=False), flush=True)
