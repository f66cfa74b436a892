"""The recipe of the literature: one node that whoever creates it holds, and that all others wait for.

There is no order, and every release wakes everybody who waits: n waiters cost n creates for one hand-over. It is here
for few contenders, and for comparison. A release reads the node before it deletes it, because the next holder's has
the same name; that is all that protects it if an administrator deletes the node in between.
"""

from __future__ import annotations

import contextlib
from typing import Any

from aiozk import exc

from aiolock.backends.zookeeper import wire
from aiolock.backends.zookeeper.claim import BLOCK, QueueClaim
from aiolock.backends.zookeeper.rules import SIMPLE, Verdict
from aiolock.backends.zookeeper.wire import InDoubt, NotSent, SessionChanged
from aiolock.contract import Grant
