"""Read the ``.sql`` files of the SQL servers. No driver is imported."""

from __future__ import annotations

from importlib.resources import files

__all__ = ["read_schema", "read_statements"]


def _read(server: str, file: str) -> str:
    return files("aiolock.backends").joinpath(server, "sql", file).read_text("utf-8")


def read_schema(server: str) -> str:
    """Return the statements that create the tables of a server, with placeholders in ``{}``."""
    return _read(server, "schema.sql").strip()


def read_statements(server: str, *names: str) -> dict[str, str]:
    """Return the statements of some files by name, each on one line. A name is in the comment above its statement."""
    statements: dict[str, str] = {}
    for part in "".join(_read(server, name) for name in names).split("-- name: ")[1:]:
        name, _, body = part.partition("\n")
        lines = [line.strip() for line in body.splitlines() if not line.startswith("--")]
        statements[name.strip()] = " ".join(line for line in lines if line)
    return statements
