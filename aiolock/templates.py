"""Names of locks made from values: what stands in braces in ``order:{order_id}``, and what it becomes."""

from __future__ import annotations

from collections.abc import Mapping
from string import Formatter

from aiolock.errors import ConfigError, shorten

__all__ = ["Template"]

HINT = "write it as in 'order:{order_id}'"


class Template:
    """A text with names in braces, such as ``order:{order_id}``.

    Names only: what ``str.format`` offers beyond them (attributes, indices, conversions, formats) would let a value
    decide what is read, or make one name of two values.
    """

    __slots__ = ("_parts", "fields", "text")

    def __init__(self, text: object) -> None:
        if not isinstance(text, str) or not text:
            raise ConfigError(f"the name of a lock must be a text, not {shorten(text)}; {HINT}")
        try:
            parts = list(Formatter().parse(text))
        except ValueError as error:
            raise ConfigError(f"{shorten(text)} is no template: {error}; {HINT}") from error
        for _, field, form, conversion in parts:
            if field is not None and (not field.isidentifier() or form or conversion):
                raise ConfigError(f"{shorten(text)} has more than a name in its braces; {HINT}")
        self.text: str = text
        self.fields: tuple[str, ...] = tuple(
            dict.fromkeys(field for _, field, _, _ in parts if field is not None)
        )
        """The names in braces, each once."""
        self._parts = [(literal, field) for literal, field, _, _ in parts]

    def fill(self, values: Mapping[str, object]) -> str:
        """The text with every name replaced by its value; :class:`ConfigError` if one has none."""
        missing = [field for field in self.fields if field not in values]
        if missing:
            raise ConfigError(
                f"there is no {', '.join(missing)} here to make a name of {shorten(self.text)}; "
                f"there is {', '.join(sorted(values)) or 'nothing'}"
            )
        return "".join(
            literal if field is None else f"{literal}{values[field]}" for literal, field in self._parts
        )
