"""Runs every op and `onepass env` under Python's audit events.

`python watched.py` prints as JSON which network events occurred, which processes were started and
which files were opened for writing. With an argument it runs `misbehave`, which does all three.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

seen: dict[str, Any] = {"network": [], "started": [], "written": []}


def watch(event: str, arguments: Any) -> None:
    if event.startswith(("socket.", "urllib.", "http.", "ftplib.", "smtplib.")):
        seen["network"].append(event)
    elif event in ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork"):
        seen["started"].append(f"{event} {arguments[:1]}")
    elif event == "open" and isinstance(arguments[0], str):
        if arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC):
            seen["written"].append(arguments[0])
    elif event in ("os.rename", "os.link", "os.symlink"):
        seen["written"].append(os.fspath(arguments[1]))
    elif event == "os.mkdir":
        seen["written"].append(os.fspath(arguments[0]))


def work() -> None:
    from onepass.__main__ import main
    from tests.all_ops.concurrency_workers import digests, prepared
    from tests.helpers.command import invoke

    digests(prepared(0, 3, 4, 6, 11))
    seen["env"] = json.loads(invoke(main, "env", "--json").stdout)["backends"]["cpu"]["cache"]


def misbehave() -> None:
    import socket
    import subprocess

    socket.socket().close()
    subprocess.run(["true"], check=True)
    with open("here", "w"):
        pass
    os.mkdir("there")


if __name__ == "__main__":
    sys.addaudithook(watch)
    (misbehave if sys.argv[1:] else work)()
    print(json.dumps(seen))
