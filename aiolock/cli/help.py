"""What each command says about itself."""

from __future__ import annotations

__all__ = ["ABOUT", "EXAMPLES", "SHORT"]

EXAMPLES = """\
examples:
  export AIOLOCK_URL=redis://127.0.0.1:6379/0
  aiolock run -n nightly-report -- ./report.sh     run it on one machine only; others skip
  aiolock run -w 30 deploy make deploy             wait at most 30 seconds
  aiolock run -s tree -- ls; aiolock run -x tree -- rm -r old      readers together, writers alone
  aiolock run --permits 1/3 api -- ./crawl         at most three at a time
  aiolock ls 'order:*'                             who holds what
  aiolock watch                                    the same, live
  aiolock doctor                                   what this server really promises
"""

_RUN = """\
Wait for the lock NAME, run COMMAND under it, and give the lock back when it ends.

-n, -w, -E, -s, -x, -o and -c mean what they mean for flock. Locks of -s and -x exclude each other; locks without
either, and those with --permits, are others, also under the same name.

If the lock cannot be renewed, COMMAND gets TERM so early that it has --kill-after seconds to end, and KILL a
moment before the server may give the lock to somebody else. It runs in a process group of its own, which gets the
signals that aiolock gets, and it is killed should aiolock be killed. A command of another user cannot be killed:
put aiolock inside sudo, not sudo inside aiolock.

It finds AIOLOCK_NAME, AIOLOCK_TOKEN (the fencing token) and AIOLOCK_LABEL in its environment. Runs of NAME inside COMMAND
work under its hold, one at a time, and the lock is given back after the last of them.
"""

SHORT = {
    "run": "run a command under a lock",
    "ls": "list the locks that are held or waited for",
    "inspect": "show who holds a lock and who waits",
    "watch": "see locks taken and given back, live",
    "force-release": "take a lock from whoever holds it",
    "doctor": "say what this server really promises",
    "schema": "print the tables that a server needs",
    "purge": "delete what is left of locks that nobody uses any more",
    "bench": "measure locks on this server, from here",
    "demo": "show in a few seconds what a lock does when workers contend, die and hang",
}

ABOUT = {
    "run": _RUN,
    "ls": """\
Every lock of the namespace that is held or waited for.
""",
    "inspect": """\
Who holds a lock, since when and under which token; and who waits, in order. Exit status 1 if nobody holds it.
""",
    "watch": """\
A live table in a terminal (Ctrl-C ends it); otherwise a line of JSON for every change that a look finds.
""",
    "force-release": """\
The holder is told that it has lost the lock, and the next in line gets it at once. The two can overlap:
fencing tokens keep their writes apart. A dead holder's lock is free after its ttl without this.
""",
    "doctor": """\
Looks at the server and its settings, changes nothing, and says in plain words what locks on it promise, what
they do not, and what would raise that. Exit status 1 if something is wrong.
""",
    "schema": """\
Prints the statements for an administrator; clients make the tables themselves where they may.
""",
    "purge": """\
Deletes the rows of locks of the namespace that nobody has needed for so long, on MySQL and MariaDB; what is held or
waited for stays, and tokens go on rising. May run at any time, for example once a day. Other servers have no such rows.
""",
    "bench": """\
Measures round trips, a free lock, and clients that contend, in a namespace of its own.
""",
    "demo": """\
Workers contend for a lock; one dies, one loses its lease, and its late write is refused. Over memory://
(the default) they are tasks of this process, over any other URL they are processes.
""",
}
