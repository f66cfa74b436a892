"""Where FastAPI finds the values that stand in the name of a lock: what a function and its dependencies declare."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator
from types import UnionType
from typing import Annotated, Any, NamedTuple, Union, get_args, get_origin

from aiolock.errors import ConfigError, MissingDriver, name_of, shorten
from aiolock.templates import Template

try:
    from fastapi import routing
    from fastapi.dependencies.models import Dependant
    from fastapi.dependencies.utils import request_params_to_args
    from fastapi.exceptions import RequestValidationError
    from pydantic import AliasChoices, BaseModel
    from starlette.requests import HTTPConnection
except ImportError as _missing:
    raise MissingDriver("fastapi", "fastapi") from _missing

__all__ = ["Sources", "all_below", "name_from_route", "routes_of"]

HINT = "a dependency of your own can make the name: locked(function)"


class _Declared(NamedTuple):
    """One parameter that a function declares, as FastAPI has understood it."""

    owner: object
    """The function."""
    place: str
    """Where in the request it is: path, query, headers, cookies or body."""
    parameter: Any
    """FastAPI's field."""
    name: str
    """What the function, or the model that the parameter is, calls it."""
    aliases: frozenset[str]
    """What the request calls it."""
    annotation: Any
    inside: bool = False
    """Whether it is a part of a model, which is read as a whole."""

    def read(self, connection: HTTPConnection) -> object:
        """The value that the function gets; what is wrong with it is said as FastAPI says it (422)."""
        received = connection.path_params if self.place == "path" else connection.query_params
        values, errors = request_params_to_args([self.parameter], received)
        if errors:
            raise RequestValidationError(errors)
        value = values[self.parameter.name]
        return getattr(value, self.name) if self.inside and value is not None else value


class Sources:
    """Where each value of a template comes from on one route.

    Raises :class:`ConfigError` for what can never become a name there. ``path`` are the names in the path of the route,
    also of applications that it is mounted in.
    """

    def __init__(self, template: Template, dependant: Dependant, path: Collection[str]) -> None:
        self._template = template
        known = [each for place in all_below(dependant) for each in _declared(place)]
        self._found = {
            field: _find(template, field, known, dependant.call, path) for field in template.fields
        }

    def name(self, connection: HTTPConnection) -> str:
        """The name for one request."""
        return self._template.fill(
            {
                field: connection.path_params[field] if found is None else found.read(connection)
                for field, found in self._found.items()
            }
        )


def _find(
    template: Template, field: str, known: list[_Declared], function: object, path: Collection[str]
) -> _Declared | None:
    """Who declares ``field``; ``None`` for a part of the path that nobody declares, which is text."""
    usable = [each for each in known if each.place in ("path", "query")]
    found = [each for each in usable if field in each.aliases]
    if not found and field in path:
        return None
    found = found or [each for each in usable if each.name == field]
    about = f"{shorten(template.text)} over {name_of(function)}"
    if not found:
        elsewhere = next((each for each in known if field in {each.name, *each.aliases}), None)
        if elsewhere is not None:
            raise ConfigError(
                f"{about}: {field} is in the {elsewhere.place}; names are made of path and query; {HINT}"
            )
        there = {alias for each in usable for alias in each.aliases} | set(path)
        raise ConfigError(
            f"{about}: there is no {field} to make a name of; there is {', '.join(sorted(there)) or 'nothing'}; {HINT}"
        )
    # What the function itself gets counts. Where only others do, they must agree: 7 and 07 would be one order or two.
    first, *others = [each for each in found if each.owner is function] or found
    for other in others:
        if (other.place, other.annotation) != (first.place, first.annotation):
            raise ConfigError(
                f"{about}: {name_of(first.owner)} and {name_of(other.owner)} declare {field} differently; declare it in "
                f"{name_of(function)} as well"
            )
    if _is_many(first.annotation) or _model(first.annotation) is not None:
        raise ConfigError(f"{about}: {field} is more than one value ({first.annotation}); {HINT}")
    return first


# --- what is declared


def all_below(dependant: Dependant) -> Iterator[Dependant]:
    """A function, then its dependencies and theirs; those that are nearer come first."""
    waiting = [dependant]
    for each in waiting:
        yield each
        waiting += each.dependencies


def _declared(dependant: Dependant) -> Iterator[_Declared]:
    for place, parameters in (
        ("path", dependant.path_params),
        ("query", dependant.query_params),
        ("headers", dependant.header_params),
        ("cookies", dependant.cookie_params),
        ("body", dependant.body_params),
    ):
        for parameter in parameters:
            info = parameter.field_info
            one = functools.partial(_Declared, dependant.call, place, parameter)
            model = _model(info.annotation) if place == "query" else None
            # The request knows the parts of a model, and not what the function calls the whole.
            aliases = _aliases(parameter.name, info) if model is None else frozenset[str]()
            yield one(parameter.name, aliases, info.annotation)
            for name, part in model.model_fields.items() if model is not None else ():
                yield one(name, _aliases(name, part), part.annotation, inside=True)


def _aliases(name: str, info: Any) -> frozenset[str]:
    given = info.alias if info.validation_alias is None else info.validation_alias
    choices = given.choices if isinstance(given, AliasChoices) else [given or name]
    return frozenset(choice for choice in choices if isinstance(choice, str))


def _plain(annotation: Any) -> list[Any]:
    """The types that a value may have."""
    annotation = getattr(annotation, "__value__", annotation)
    if get_origin(annotation) is Annotated:
        return _plain(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return [each for choice in get_args(annotation) for each in _plain(choice)]
    return [get_origin(annotation) or annotation]


def _is_many(annotation: Any) -> bool:
    return any(
        isinstance(each, type) and issubclass(each, Collection) and not issubclass(each, str | bytes)
        for each in _plain(annotation)
    )


def _model(annotation: Any) -> type[BaseModel] | None:
    models = (each for each in _plain(annotation) if isinstance(each, type) and issubclass(each, BaseModel))
    return next(models, None)


# --- routes


class _Same:
    """A key of a cache that is equal to itself alone: what FastAPI knows of a route has no hash."""

    __slots__ = ("dependant",)

    def __init__(self, dependant: Dependant) -> None:
        self.dependant = dependant

    def __hash__(self) -> int:
        return id(self.dependant)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.dependant is other.dependant


def name_from_route(template: Template) -> Callable[..., Any]:
    """A dependency that fills a template from the route that it is asked on."""

    async def name_of(connection: HTTPConnection) -> str:
        if not template.fields:
            return template.fill({})
        dependant = _dependant_of(connection)
        if dependant is None:
            raise ConfigError(
                f"{shorten(template.text)}: only path operations have values to make a name of; {HINT}"
            )
        return _sources(template, _Same(dependant), frozenset(connection.path_params)).name(connection)

    return name_of


@functools.lru_cache(maxsize=4096)
def _sources(template: Template, route: _Same, path: frozenset[str]) -> Sources:
    return Sources(template, route.dependant, path)


def _dependant_of(connection: HTTPConnection) -> Dependant | None:
    route = connection.scope.get("route")
    # Newer versions share one route between all places where its router is included; the path in front of it and the
    # dependencies that come with that are kept beside it.
    included = connection.scope.get("fastapi", {}).get("effective_route_context")
    if included is not None and included.original_route is route:
        route = included
    dependant = getattr(route, "dependant", None)
    return dependant if isinstance(dependant, Dependant) else None


def routes_of(app: Any) -> Iterator[tuple[Dependant, frozenset[str]]]:
    """Every path operation of an application and of those mounted in it, with the names in its path."""
    return _below(getattr(app, "routes", ()), frozenset())


def _below(routes: Any, path: frozenset[str]) -> Iterator[tuple[Dependant, frozenset[str]]]:
    # Older versions have every route of an included router in the list.
    spread = getattr(routing, "iter_route_contexts", iter)
    for route in spread(routes):
        names = path | set(getattr(route, "param_convertors", None) or ())
        dependant = getattr(route, "dependant", None)
        if isinstance(dependant, Dependant):
            yield dependant, names
        else:
            # What Starlette calls the rest of the path is none of its parameters.
            yield from _below(getattr(route, "routes", None) or (), names - {"path"})
