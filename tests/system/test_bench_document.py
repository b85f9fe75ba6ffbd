"""Result files may come from anywhere: bad ones are rejected in one line, and nothing in them reaches the terminal unescaped."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from typing import Any

import pytest

from benchmarks.suite import baseline, command, document, page, results, run
from tests.helpers.command import Result, invoke
from tools.bench import report

ROW = {"op": "rms_norm", "shape": [4, 256], "bytes": 4224, "us": {"memory stream": [1.0, 1.1], "onepass": [9e5, 9.1e5]}}
GOOD: dict[str, Any] = {
    "machine": "M",
    "date": "2030-01-01",
    "torch": "9",
    "device": "cpu",
    "threads": 2,
    "packages": {"llvmlite": "1"},
    "rows": [ROW],
    "peers": {"vLLM": "not installed"},
    "host_us": {"rms_norm": [1.0, 2.0]},
    "refused": {},
    "checks": {"rms_norm": 9},
}
HOSTILE = "[red]x[/red]\x1b[31m\x9b31m\u202e\nnew [link=file:///etc]l[/link]"


def bench(baseline: Path, monkeypatch: pytest.MonkeyPatch) -> Result:
    """The command on a row whose time is invented."""

    def measure(self: run.Run, workload: Any, row: dict[str, Any], peers: Any, ours: bool) -> None:
        row["us"] = {"onepass": [2.0, 2.0]}

    monkeypatch.setattr(run.Run, "measure", measure)
    monkeypatch.setattr(run, "check", lambda op, device: [])
    monkeypatch.setenv("COLUMNS", "200")
    arguments = ["--device", "cpu", "--op", "rms_norm", "--shapes", "4x256", "--peers", "none"]
    return invoke(command.main, *arguments, "--baseline", str(baseline))


def changed(path: str, value: Any) -> dict[str, Any]:
    """The good document with one value replaced, or removed if the new value is the class `Any`."""
    found = copy.deepcopy(GOOD)
    *way, last = path.split(".")
    place: Any = found
    for step in way:
        place = place[int(step) if step.isdigit() else step]
    if value is Any:
        del place[last]
    else:
        place[int(last) if isinstance(place, list) else last] = value
    return found


BROKEN: list[tuple[Any, str]] = [
    (b"not json", "Expecting value"),
    (b"", "Expecting value"),
    (b"\x00\xff\xfe\x80" * 100, "it is not text"),
    (b"[" * 200_000, "nested too deeply"),
    (b'{"rows": ' + b"[" * 90 + b"]" * 90 + b"}", "it has no `machine`"),
    (b"[]", "it is not an object"),
    (b"3", "it is not an object"),
    (b"{}", "it has no `machine`"),
    (b'{"a": 1' + b"1" * 5000 + b"}", "is not a result file"),
    (changed("rows", Any), "it has no `rows`"),
    (changed("rows", {}), "`rows` is not a list"),
    (changed("rows", [3]), "row 0 is not an object"),
    (changed("machine", 3), "`machine` is not a string"),
    (changed("peers", []), "`peers` is not an object"),
    (changed("rows.0.op", Any), "row 0 has no `op`"),
    (changed("rows.0.op", ["x"]), "row 0 `op` is not a string"),
    (changed("rows.0.shape", []), "row 0 `shape` is not a short list of positive whole numbers"),
    (changed("rows.0.cache", "fp8"), "row 0 has a `shape` with too few numbers for its op"),
    (changed("rows.0.shape", [4, "256"]), "row 0 `shape` is not a short list of positive whole numbers"),
    (changed("rows.0.shape", [0, 256]), "row 0 `shape` is not a short list of positive whole numbers"),
    (changed("rows.0.bytes", -1), "row 0 `bytes` is not a positive whole number"),
    (changed("rows.0.us", [1.0]), "row 0 `us` is not an object"),
    (changed("rows.0.us", {}), "row 0 `us` has no `onepass`"),
    (changed("rows.0.us.onepass", []), "row 0 `us` `onepass` is not one or more positive times"),
    (changed("rows.0.us.onepass", [float("nan")]), "row 0 `us` `onepass` is not one or more positive times"),
    (changed("rows.0.us.onepass", [float("inf")]), "row 0 `us` `onepass` is not one or more positive times"),
    (changed("rows.0.us.onepass", [0.0]), "row 0 `us` `onepass` is not one or more positive times"),
    (changed("rows.0.us.onepass", [10**400]), "row 0 `us` `onepass` is not one or more positive times"),
    (changed("rows.0.us.onepass", "fast"), "row 0 `us` `onepass` is not one or more positive times"),
    (changed("host_us", {"a": "b"}), "`host_us` `a` is not one or more positive times"),
    ({**GOOD, "device": "cuda"}, "row 0 has no time of a best copy, and there are no `ceilings`"),
    ({**GOOD, "device": "cuda", "ceilings": {"copy 2 GiB TB/s": 0}}, "`ceilings` has no `read 1 GiB TB/s`"),
    (
        {**GOOD, "ceilings": {"copy 2 GiB TB/s": 0, "read 1 GiB TB/s": 1, "empty kernel us": 1}},
        "`ceilings` `copy 2 GiB TB/s` is not a positive number",
    ),
    ({**GOOD, "device": "tpu"}, "`device` is not cpu or cuda"),
    ({**GOOD, "clocks": {"before": 3}}, "`clocks` `before` is not an object"),
    ({**GOOD, "threads": "two"}, "`threads` is not a positive whole number"),
    ({**GOOD, "packages": {"llvmlite": 3}}, "`packages` `llvmlite` is not a string"),
    (changed("rows.0.us.onepass", HOSTILE), "row 0 `us` `onepass` is not one or more positive times"),
    (changed("rows.0.us", {"onepass": 1.0, HOSTILE: 0}), "`us` `[red]x"),
]


@pytest.mark.parametrize(
    ("given", "message"), BROKEN, ids=[message[:24] + str(i) for i, (_, message) in enumerate(BROKEN)]
)
def test_a_bad_baseline_is_one_line_and_status_2(
    given: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "old.json"
    file.write_bytes(given if isinstance(given, bytes) else json.dumps(given).encode())
    result = bench(file, monkeypatch)
    assert result.exit_code == 2 and message in result.output, result.output
    assert len(result.output.splitlines()) == 1 and result.output.startswith("python -m benchmarks: --baseline:")
    assert "\x1b" not in result.output and "\x9b" not in result.output


def test_a_huge_baseline_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "huge.json"
    with file.open("wb") as out:
        out.truncate(document.LARGEST + 1)
    monkeypatch.setattr(Path, "read_bytes", lambda self: pytest.fail("was read"))
    result = bench(file, monkeypatch)
    assert (
        result.exit_code == 2 and "it has 64 MB, more than 64" in result.output and len(result.output.splitlines()) == 1
    )


def test_the_good_document_is_good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "old.json"
    file.write_text(json.dumps(GOOD))
    result = bench(file, monkeypatch)
    assert result.exit_code == 0 and "faster" in result.output and "0 of 1 rows are the same" in result.output


def test_strings_of_a_file_are_neither_markup_nor_escapes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hostile text in every string of a file is shown escaped, including its brackets."""
    given = copy.deepcopy(GOOD)
    row = {**given["rows"][0], "us": {"onepass": [9e5, 9e5], HOSTILE: [1.0, 1.0]}, "with": HOSTILE, HOSTILE: 1}
    given |= {"machine": HOSTILE, "torch": HOSTILE, "triton": HOSTILE, "note": HOSTILE, "rows": [given["rows"][0], row]}
    file = tmp_path / "old.json"
    file.write_text(json.dumps(given))
    result = bench(file, monkeypatch)
    assert result.exit_code == 0, result.output
    assert (
        "machine differs: [red]x[/red]\\x1b[31m\\x9b31m\\u202e\\nnew [link=file:///etc]l[/link], now" in result.output
    )
    for bad in "\x1b\x9b\u202e":
        assert bad not in result.output
    found = results.load([file])
    assert found.rows[1].words == f"4 x 256, {document.plain(HOSTILE)}"
    assert "\x1b" not in baseline.text(baseline.compare(found, found))
    html = page.html(found)
    assert "\x1b" not in html and "[red]x[/red]\\x1b[31m" in html
    assert "\x1b" not in report.full(found, ["old.json"])


def test_a_resumed_file_is_validated_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tools.bench.__main__ import main

    file = tmp_path / "x.json"
    file.write_text("[1]")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as end:
        patch.setattr("sys.argv", ["bench", "--device", "cpu", "--op", "rms_norm", "--json", str(file), "--resume"])
        main()
    assert end.value.code == 2 and "it is not an object" in capsys.readouterr().err


def values(random_: random.Random) -> Any:
    strange: list[Any] = [
        None,
        True,
        0,
        -1,
        1.5,
        10**40,
        "",
        HOSTILE,
        [],
        {},
        [[]],
        [None],
        {"a": []},
        float("nan"),
        "1",
        [1, "2"],
    ]
    return random_.choice(strange)


def mutate(found: Any, random_: random.Random) -> Any:
    """The document with one value somewhere replaced, removed or added."""
    places: list[tuple[Any, Any]] = []
    left = [found]
    while left:
        inner = left.pop()
        keys = list(inner) if isinstance(inner, dict) else range(len(inner))
        for key in keys:
            places.append((inner, key))
            if isinstance(inner[key], (dict, list)):
                left.append(inner[key])
    inner, key = random_.choice(places)
    what = random_.randrange(3)
    if what == 0:
        inner[key] = values(random_)
    elif what == 1:
        del inner[key]
    elif isinstance(inner, dict):
        inner[random_.choice([HOSTILE, "normed", "latent", "cache", "behind_us", "others", "stream", "with"])] = values(
            random_
        )
    else:
        inner.insert(key, values(random_))
    return found


@pytest.mark.parametrize("seed", range(4))
def test_a_document_is_rejected_or_can_be_shown(seed: int, tmp_path: Path) -> None:
    """Random damage: either a one-line ValueError, or everything rendered from results works."""
    random_ = random.Random(seed)
    committed = json.loads((Path(__file__).parents[2] / "benchmarks/h200/bench.json").read_text())
    committed["rows"] = committed["rows"][::12]
    file = tmp_path / "x.json"
    fine = refused = 0
    for i in range(150):
        given = copy.deepcopy(committed if i % 2 else GOOD)
        for _ in range(random_.randrange(1, 4)):
            given = mutate(given, random_)
        file.write_text(json.dumps(given))
        try:
            found = results.load([file])
        except ValueError as error:
            assert (
                str(error).startswith(f"{file} is not a result file: ")
                and "\n" not in str(error)
                and "\x1b" not in str(error)
            )
            refused += 1
            continue
        fine += 1
        texts = [baseline.text(baseline.compare(found, found))]
        if found.rows:
            texts += [page.html(found), report.full(found, ["x.json"])]
        assert not any("\x1b" in text or "\x9b" in text for text in texts)
    assert fine > 10 and refused > 30
