"""A worker of a history run on a cluster: it finds each node behind a proxy of its own, wherever nodes say that they are."""

from __future__ import annotations

import json
import sys
from urllib.parse import parse_qs, urlsplit

from aiolock.backends.redis.cluster.slots import NodeEndpoint, Seeds
from aiolock.backends.urls import Host
from tests.faults import worker


def main() -> None:
    """As the usual worker's, with addresses such as ``redis://user@proxy:port?real=port`` instead of one."""
    settings = json.loads(sys.argv[1])
    ways: dict[int, Host] = {}
    account = ""
    for url in settings["url"]:
        parts = urlsplit(url)
        assert parts.hostname
        assert parts.port
        ways[int(parse_qs(parts.query)["real"][0])] = Host(parts.hostname, parts.port)
        account = "".join(parts.netloc.rpartition("@")[:2])
    settings["url"] = f"redis+cluster://{account}{','.join(f'127.0.0.1:{port}' for port in ways)}"
    straight = Seeds.at

    def at(self: Seeds, host: Host) -> NodeEndpoint:
        return straight(self, ways[host.port])

    Seeds.at = at  # type: ignore[method-assign]  # of this process alone
    sys.argv[1] = json.dumps(settings)
    worker.main()


if __name__ == "__main__":
    main()
