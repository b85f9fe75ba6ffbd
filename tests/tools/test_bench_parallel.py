"""Time limits, processes that measure in turns, and resumed runs of `tools.bench.models`."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from tools.bench import common, limits, model_tables, models, parallel
from tools.bench.limits import OutOfTime, deadline_after, over, until
from tools.bench.parallel import Job, jobs
from tools.bench.steps import Size
from tools.bench.ways import WAYS

ROOT = Path(__file__).parents[2]


def test_what_takes_too_long_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Again and again, because code may catch the first interruption."""
    monkeypatch.setattr(limits, "AGAIN", 0.05)
    caught = 0
    with pytest.raises(OutOfTime), until(deadline_after(0.05)):
        while True:
            try:
                time.sleep(600)
            except OutOfTime:
                caught += 1
                if caught == 2:
                    raise
    time.sleep(0.1)  # nothing is left behind
    with pytest.raises(OutOfTime, match="before it was started"), until(deadline_after(-1.0)):
        pytest.fail("this must not run")
    with until(None), until(deadline_after(600)):
        assert not over(None) and not over(deadline_after(600)) and over(deadline_after(-1.0))


def test_jobs() -> None:
    """Every model and batch size once, at most so many processes, unless there are more models."""
    assert jobs(["a", "b"], (1, 4, 8, 16), 4) == [
        Job("a", (1, 8)),
        Job("a", (4, 16)),
        Job("b", (1, 8)),
        Job("b", (4, 16)),
    ]
    assert jobs(["a"], (1, 4), 16) == [Job("a", (1,)), Job("a", (4,))]
    assert jobs(["a", "b", "c"], (1, 4), 2) == [Job(name, (1, 4)) for name in "abc"]


SCRIPT = """
import json, os, sys, time
from pathlib import Path
from tools.bench.parallel import wait_for_turn
line = dict(zip(sys.argv[1::1], sys.argv[2::1]))
folder, report = Path(line["--turn"]), Path(line["--json"])
if line["--model"] == "=broken":
    sys.exit("a reason")
wait_for_turn(folder)
measuring = folder.parent / "measuring"
alone = not measuring.exists()
measuring.touch()
time.sleep(0.2)
measuring.unlink()
part = report.with_name("part")
part.write_text(json.dumps({"rows": [{"model": line["--model"], "alone": alone}]}))
part.replace(report)
"""


def test_processes_measure_in_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    """One after another, and one that fails does not stop the others."""
    own = subprocess.Popen

    def start(command: list[str], **options: Any) -> Any:
        return own([sys.executable, "-c", SCRIPT, *command[3:]], cwd=ROOT, **options)

    monkeypatch.setattr(subprocess, "Popen", start)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # all folders are side by side
    asked = [Job(name, (1,)) for name in ("one", "broken", "two")]
    found = list(parallel.run(asked, 3, [], deadline_after(600), None))
    assert [job.model for job, _ in found] == ["one", "two"]
    (first,), (second,) = (report["rows"] for _, report in found)
    assert [first["model"], second["model"]] == ["=one", "=two"] and first["alone"] and second["alone"]
    assert "2 of 3 ready" in (text := capfd.readouterr().out) and "broken, batches (1,): a reason" in text


def test_rows_of_a_process_that_is_too_slow_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It measured one row before its time was over."""
    own = subprocess.Popen
    slow = SCRIPT + "\ntime.sleep(600)\n"

    def start(command: list[str], **options: Any) -> Any:
        return own([sys.executable, "-c", slow, *command[3:]], cwd=ROOT, **options)

    monkeypatch.setattr(subprocess, "Popen", start)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(parallel, "over", lambda deadline: any(tmp_path.glob("*/found.json")))
    ((job, report),) = parallel.run([Job("one", (1, 4))], 1, [], deadline_after(600), None)
    assert job.model == "one" and report["rows"] == [{"model": "=one", "alone": True}]


def test_resumed_processes_return_what_they_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their files begin with the rows that are known, among them rows that another process measures again."""
    file = tmp_path / "models.json"

    def row(batch: int, us: float) -> dict[str, Any]:
        return {"model": "Qwen3 8B, 2 layers", "batch": batch, "us": {"unpatched": us}, "agreement": {}, "failed": {}}

    head = {**common.head("cpu"), "rows": [row(1, 1.0), row(4, 1.0)]}
    file.write_text(json.dumps(head))

    def run(*_: Any) -> Any:
        for batch, other in ((1, 4), (4, 1)):
            yield Job("Qwen3 8B", (batch,)), {"rows": [row(batch, 9.0), row(other, 1.0)]}

    monkeypatch.setattr(parallel, "run", run)
    line = ["models", "--device=cpu", "--tiny", "--model=qwen3-8b", "--workers=2", "--resume", f"--json={file}"]
    monkeypatch.setattr(sys, "argv", [*line, "--batch", "1", "4"])
    with pytest.raises(SystemExit):
        models.main()
    assert [row["us"] for row in json.loads(file.read_text())["rows"]] == [{"unpatched": 9.0}] * 2


def test_resumed_runs_measure_what_is_missing() -> None:
    ways = tuple(WAYS[name] for name in ("eager", "decode", "fp8"))
    rows = [{"model": "M", "batch": 1, "us": {"unpatched": 3.0, "decode": 1.0}, "failed": {"decode, fp8": "no"}}]
    assert [way.name for way in models.missing(ways, rows, "M", Size(1))] == ["unpatched", "decode, fp8"]
    for size in (Size(4), Size(1, 4096)):
        assert models.missing(ways, rows, "M", size) == ways == models.missing(ways, [], "M", size)
    rows[0]["us"]["decode, fp8"] = 1.0  # type: ignore[index]
    assert models.missing(ways, rows, "M", Size(1)) == ()


def test_gains_name_rows_where_a_compiler_is_ahead() -> None:
    def row(model: str, batch: int, **us: float) -> dict[str, Any]:
        return {"model": model, "batch": batch, "us": us, "failed": {}}

    plain = {"unpatched": 9.0, "decode": 4.0}
    rows = [row("One", 1, **plain, **{"torch.compile": 6.0}), row("Two", 8, **plain, **{"torch.compile": 3.0})]
    tokens = {"captured, decode": 10.4, "static cache, compiled by transformers": 20.0}
    report = {"rows": rows, "generated": [{"model": "One", "batch": 1, "us_per_token": tokens, "failed": {}}]}
    assert model_tables.gains(report) == (
        "A `decode=True` step is 0.75 to 1.50 times as fast as torch.compile, and faster in 1 of 2 rows (not in Two, batch 8). "
        "For One, batch 1, captured decode takes 10 us per token and transformers' compiled static cache 20."
    )
    assert model_tables.gains({"rows": []}) == ""


def test_limits_are_not_failures() -> None:
    row = {"us": {"unpatched": 2.0}, "failed": {"max-autotune": "InductorError: OutOfTime: over", "decode": "no"}}
    assert model_tables._cell(row, "max-autotune") == "" and model_tables._cell(row, "decode") == "failed"
    assert json.loads(json.dumps(model_tables._failed(row))) == {"decode": "no"}
