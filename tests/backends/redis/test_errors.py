"""Error replies become sentences of the right class, and never repeat arguments."""

from __future__ import annotations

import pickle

import pytest

from aiolock.backends.redis.errors import from_reply, not_sent, was_sent
from aiolock.errors import BackendRefused, BackendUnavailable

FINAL, FOR_NOW = False, True


@pytest.mark.parametrize(
    ("reply", "kind", "retryable", "hint"),
    [
        ("NOAUTH Authentication required.", BackendRefused, FINAL, "password"),
        (
            "WRONGPASS invalid username-password pair or user is disabled.",
            BackendRefused,
            FINAL,
            "check username",
        ),
        (
            "NOPERM this user has no permissions to run the 'evalsha' command",
            BackendRefused,
            FINAL,
            "'evalsha'",
        ),
        ("DENIED Redis is running in protected mode ...", BackendRefused, FINAL, "protected mode"),
        ("ERR DB index is out of range", BackendRefused, FINAL, "lower db"),
        ("ERR invalid DB index", BackendRefused, FINAL, "lower db"),
        ("ERR SELECT is not allowed in cluster mode", BackendRefused, FINAL, "redis+cluster://"),
        (
            "ERR AUTH <password> called without any password configured for the default user.",
            BackendRefused,
            FINAL,
            "leave it out",
        ),
        ("LOADING Redis is loading the dataset in memory", BackendUnavailable, FOR_NOW, "loading"),
        ("READONLY You can't write against a read only replica.", BackendUnavailable, FOR_NOW, "primary"),
        (
            "OOM command not allowed when used memory > 'maxmemory'.",
            BackendRefused,
            FOR_NOW,
            "maxmemory",
        ),
        ("MISCONF Redis is configured to save RDB snapshots, but ...", BackendRefused, FOR_NOW, "disk"),
        ("BUSY Redis is busy running a script.", BackendUnavailable, FOR_NOW, "SCRIPT KILL"),
        ("MASTERDOWN Link with MASTER is down", BackendUnavailable, FOR_NOW, "replica"),
        ("CLUSTERDOWN The cluster is down", BackendUnavailable, FOR_NOW, "slots"),
        (
            "ERR Script attempted to execute a write command while the cluster is down and readonly script: 0123",
            BackendUnavailable,
            FOR_NOW,
            "slots",
        ),
        ("MOVED 3999 127.0.0.1:6381", BackendRefused, FINAL, "redis+cluster://"),
        ("ASK 3999 127.0.0.1:6381", BackendRefused, FINAL, "redis+cluster://"),
        ("NOREPLICAS Not enough good replicas to write.", BackendRefused, FOR_NOW, "min-replicas"),
        ("WRONGTYPE Operation against a key", BackendRefused, FINAL, "namespace="),
        (
            "ERR Error running script (call to f_0): @user_script:3: WRONGTYPE Operation against a key",
            BackendRefused,
            FINAL,
            "namespace=",
        ),
        (
            "ERR Error running script (call to f_0): @user_script:1: @user_script: 1: -OOM command not allowed",
            BackendRefused,
            FOR_NOW,
            "maxmemory",
        ),
        (
            "@user_script: 1: -READONLY You can't write against a read only replica.",
            BackendUnavailable,
            FOR_NOW,
            "primary",
        ),
        ("ERR max number of clients reached", BackendUnavailable, FOR_NOW, "maxclients"),
        ("ERR unknown command 'EVALSHA'", BackendRefused, FINAL, "6.2"),
        ("ERR unknown command `EVALSHA`, with args beginning with: `0`", BackendRefused, FINAL, "Sentinel"),
        ("ERR something new", BackendRefused, FINAL, "something new"),
        ("", BackendRefused, FINAL, "answered"),
    ],
)
def test_an_error_reply_becomes_a_sentence(reply, kind, retryable, hint):
    error = from_reply(reply)
    assert type(error) is kind
    assert error.retryable is retryable
    assert hint in str(error)
    assert "\n" not in str(error)


@pytest.mark.parametrize("command", ["AUTH", "EVALSHA", "HELLO"])
def test_arguments_that_the_server_repeats_are_not_shown(command):
    error = from_reply(f"ERR unknown command '{command}', with args beginning with: 'default' 'secret-word' ")
    assert "secret-word" not in str(error)
    assert command in str(error)


def test_what_a_replica_refuses_was_certainly_not_executed():
    assert not was_sent(from_reply("READONLY You can't write against a read only replica."))
    assert was_sent(from_reply("LOADING Redis is loading the dataset in memory"))


def test_an_error_that_was_not_sent_can_be_told_after_pickling():
    error = pickle.loads(pickle.dumps(not_sent("it was not sent")))
    assert type(error) is BackendUnavailable
    assert not was_sent(error)
    assert str(error) == "it was not sent"
