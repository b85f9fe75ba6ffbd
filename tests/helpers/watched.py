"""Every op and `onepass env` under the interpreter's audit events: `python watched.py` prints, as JSON, what was asked of the
network, which processes were started and which files opened to be written, wherever they lie. `misbehave` does all three.
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
    from typer.testing import CliRunner

    from onepass.cli import main as cli
    from tests.helpers.concurrency_workers import digests, prepared

    digests(prepared(0, 3, 4, 6, 11))
    shown = CliRunner().invoke(cli.app, ["env", "--json"])
    seen["env"] = json.loads(shown.output)["backends"]["cpu"]["cache"]


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
