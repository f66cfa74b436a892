"""Names from values, and what the user of a web application is told."""

from __future__ import annotations

import subprocess
import sys

import pytest

import aiolock
from aiolock._web import answer
from aiolock.decorators import Template


def test_values_are_put_where_their_names_stand():
    template = Template("{shop}:{{x}}:{order}:{shop}")
    assert template.fields == ("shop", "order")
    assert template.fill({"shop": 1, "order": "{shop}", "more": 3}) == "1:{x}:{shop}:1"


def test_a_value_stands_there_as_an_f_string_shows_it():
    class Odd:
        def __format__(self, spec: str) -> str:
            return "formatted"

        def __str__(self) -> str:
            return "text"

    assert Template("{a}").fill({"a": Odd()}) == "formatted"
    assert Template("{a}").fill({"a": None}) == "None"


def test_a_text_without_braces_is_a_name():
    assert Template("report").fields == ()
    assert Template("report").fill({}) == "report"


@pytest.mark.parametrize(
    "text", ["{a.b}", "{a[0]}", "{a!s}", "{a:x}", "{}", "{0}", "{a", "a}", "{a b}", "", None, b"a"]
)
def test_more_than_names_in_braces_is_refused(text):
    with pytest.raises(aiolock.ConfigError):
        Template(text)


def test_what_is_missing_is_named_with_what_there_is():
    with pytest.raises(aiolock.ConfigError, match=r"no order here .* there is shop"):
        Template("{order}").fill({"shop": 1})


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (aiolock.AcquireTimeout("secret", 2), 409),
        (aiolock.LockLost("secret", "expired"), 503),
        (aiolock.BackendUnavailable("secret"), 503),
        (aiolock.InvalidName("secret"), 422),
        (aiolock.BackendRefused("secret"), None),
        (aiolock.ConfigError("secret"), None),
        (KeyError("secret"), None),
    ],
)
def test_errors_have_answers_that_name_no_lock(error, status):
    response = answer(error, 0.5)
    assert (response and response.status) == status
    if response:
        assert "secret" not in response.text
        assert response.headers == ({} if status == 422 else {"Retry-After": "1"})


@pytest.mark.parametrize("package", ["fastapi", "starlette", "aiohttp"])
def test_a_missing_framework_is_named_with_the_command_that_helps(package):
    extra = "aiohttp" if package == "aiohttp" else "fastapi"
    program = (
        f"import sys; sys.modules[{package!r}] = None\n"
        f"import aiolock\n"
        f"try: import aiolock.{package}\n"
        f"except aiolock.MissingDriver as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert f'pip install "python-aiolock[{extra}]"' in done.stdout
