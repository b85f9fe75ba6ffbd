"""Documents match the code: generated pages are current, the README example runs, links resolve, numbers match the data."""

from __future__ import annotations

import inspect
import json
import re
import tomllib
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

import onepass
from benchmarks.suite.results import COMPILED, load
from onepass import engines, formats
from tests import matrix
from tools.bench import model_tables, report
from tools.bench.markdown import filled
from tools.docs import __main__ as docs
from tools.docs import architectures_page, dist_page, docstrings, ops_page

ROOT = Path(__file__).parents[2]
MARKDOWN = sorted(path for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/**/*.md")))
SOURCES = sorted((ROOT / "src").rglob("*.py"))


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("page", docs.PAGES, ids=lambda page: page.PATH.name)
def test_generated_page_is_current(page: Any) -> None:
    assert (ROOT / page.PATH).read_text() == page.render(), f"{page.PATH} is stale: run `make docs`"


def test_dist_md_has_every_public_name() -> None:
    """Each name has its signature, with the name, type and default of every parameter."""
    text = dist_page.render()
    for name in onepass.dist.__all__:
        section = text.split(f"\n## {name}\n")[1].split("\n## ")[0]
        for parameter in inspect.signature(getattr(onepass.dist, name)).parameters.values():
            assert f"{parameter.name}: " in section, (name, parameter.name)


def test_scaling_md_quotes_current_signatures() -> None:
    """The signatures of the two halves match the code."""
    text = (ROOT / "docs/scaling.md").read_text()
    for name in ("start_qk_stats", "finish_qk_rms_norm"):
        assert dist_page.signature(f"onepass.dist.{name}", getattr(onepass.dist, name)) in text


def test_docstrings_become_markdown() -> None:
    """A literal block, including its empty lines, becomes one fenced block."""
    made = docstrings.markdown("Both::\n\n    a = ``b``\n\n    c\n\nThen ``d``.")
    assert made == "Both:\n\n```\na = ``b``\n\nc\n```\n\nThen `d`."


def test_unchecked_index_values_are_documented() -> None:
    """Every page that covers argument checks mentions the debug switch, and the README names the exceptions."""
    for name in ("README.md", "CONTRIBUTING.md", "docs/ops.md", "docs/mla.md", "docs/numerics.md", "docs/scaling.md"):
        assert "ONEPASS_DEBUG=1" in (ROOT / name).read_text(), name
    readme = (ROOT / "README.md").read_text()
    claim = readme[readme.index("Invalid arguments raise") :].split("\n## ")[0]
    assert "clamped" in claim and "is not stored" in claim and "ONEPASS_DEBUG=1" in claim
    assert "Nothing is silent" not in readme


def test_every_public_op_is_documented() -> None:
    documented = {op.name for op in ops_page.public_ops()}
    assert documented <= set(onepass.__all__)
    for op in ops_page.public_ops():
        base = op.name.removesuffix("_with_scratch")
        assert any(case.op == base for case in matrix.CASES), f"{op.name} has no check cases"
        contract = {*op.contract.args, *op.contract.options, *(out.argument for out in op.contract.outs.values())}
        parameters = set(op.function.__annotations__) - {"return"}
        carried = op.contract.carried
        assert set(carried) <= parameters and {name for names in carried.values() for name in names} <= contract
        theirs = {own: name for name, own in op.names.items()}
        parameters = {theirs.get(parameter, parameter) for parameter in parameters}
        taken = {name for parameter in parameters for name in carried.get(parameter, (parameter,))}
        assert taken < contract if op.names else taken == contract


def test_ops_md_names_every_argument() -> None:
    for section, op in zip(ops_page.render().split("\n## ")[1:], ops_page.public_ops(), strict=True):
        head, _, body = section.partition("\n")
        assert head == op.name
        names = (*op.contract.args, *op.contract.options, *op.contract.outs)
        for name in op.names.values() if op.names else names:
            assert f"| `{name}`" in body


def _rows(heading: str) -> list[list[str]]:
    """The rows of the first table under a heading of docs/numerics.md, without its first."""
    text = (ROOT / "docs/numerics.md").read_text().split(f"# {heading}\n")[1].split("\n#")[0]
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[1:]]


def test_every_op_has_an_order_of_sums() -> None:
    listed = {name for row in _rows("Orders of sums") for name in re.findall(r"`(\w+)`", row[0])}
    named = {op.name.removesuffix("_with_scratch") for op in ops_page.public_ops()}
    assert named | {"attend", "attend_latents", "head_product"} <= listed


def test_every_word_of_rounding_is_explained() -> None:
    """And which ops take it, unless they are all that have the option."""
    rows = {row[0].strip('"'): row[2] for row in _rows("The words of `rounding`")}
    taken: dict[str, set[str]] = {word: set() for word in get_args(formats.Rounding)}
    for op in ops_page.public_ops():
        option = op.contract.options.get("rounding")
        for word in () if option is None else option.choices:
            taken[word].add(op.name)
    assert rows.keys() == taken.keys() and all(taken.values())
    for word in ("stored", "hf_rope", "reference"):
        assert set(re.findall(r"`(\w+)`", rows[word])) == taken[word]
    assert taken["once"] - taken["hf"] == {"fused_rope_rmsnorm_quantization"}


def test_docs_command_writes_pages_that_changed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    docs.main(["--root", str(tmp_path)])
    assert capsys.readouterr().out == "".join(f"{page.PATH} written\n" for page in docs.PAGES)
    assert (tmp_path / "docs/ops.md").read_text() == ops_page.render()
    (tmp_path / "docs/dist.md").write_text("stale")
    docs.main(["--root", str(tmp_path)])
    states: dict[Any, str] = {dist_page: "written"}
    expected = [f"{page.PATH} {states.get(page, 'is up to date')}" for page in docs.PAGES]
    assert capsys.readouterr().out.splitlines() == expected


def _floor(row: dict[str, Any]) -> str:
    floor, cache = row.get("floor"), (row.get("floor") or {}).get("cache", 0.0)
    return (
        f"{floor[''] + cache:.0f} ({floor['fp8'] + cache:.0f}) | {row['us']['unpatched']:.0f}"
        if floor
        else f" | {row['us']['unpatched']:.0f}"
    )


def _name(row: dict[str, Any]) -> str:
    context = row.get("context", 128)
    return row["model"] if context == 128 else f"{row['model']}, context {context:,}"


def test_model_tables_match_the_measurements() -> None:
    """Tables and sentences about models are generated from the files they cite."""
    for path, text in model_tables.render(ROOT).items():
        assert path.read_text() == text, f"{path.name} is stale: run `python -m tools.bench.model_tables`"
    text = (ROOT / "docs/notebook/models.md").read_text()
    rows = json.loads((ROOT / "benchmarks/h200/models.json").read_text())["rows"]
    assert len({row["model"] for row in rows}) >= 5 and len(rows) >= 10
    for row in rows:
        us = row["us"]
        (line,) = (
            line for line in text.splitlines() if line.startswith(f"| {_name(row)} | {row['batch']} | {_floor(row)}")
        )
        for way in us.keys() - {"unpatched"}:
            assert f"{us[way]:.0f} ({us['unpatched'] / us[way]:.2f}x" in line, way


def test_performance_page_quotes_the_results() -> None:
    """Numbers in the prose of docs/performance.md are those of bench.json; tests/tools/test_bench_report.py checks the tables."""
    text = " ".join((ROOT / "docs/performance.md").read_text().split())
    results = load([ROOT / "benchmarks/h200/bench.json"])
    host = (ROOT / "benchmarks/h200/host-native.txt").read_text().split("off (ONEPASS_NATIVE=0)")[0]
    times = {name.strip(): float(us) for name, us in re.findall(r"^(.+?) +(\d+\.\d\d)$", host, re.MULTILINE)}
    quoted = (f"{times['rms_norm']:.1f} us for `rms_norm`", f"{times['rms_norm, out=']:.1f} with `out=`")
    assert all(words in text for words in quoted) and f"{times['F.rms_norm']:.1f} for `F.rms_norm`" in text
    large = {row.op: row.share_words for row in report.headlines(results) if row.m > 1}
    shares = sorted(int(share.rstrip("%")) for op, share in large.items() if op != "gemv_and_partial_norm")
    assert f"{shares[0]} to {shares[-1]} % of the fastest plain copy" in text
    assert all(row.best(COMPILED) is not None for row in report.headlines(results))


def test_model_tables_with_torch_compile() -> None:
    """Columns, failures and comparisons appear when a run has them."""
    fine = {"equal": 1.0, "same_token": True}
    half = {"equal": 0.5, "same_token": False}
    rows: list[dict[str, Any]] = [
        {
            "model": "One",
            "batch": 1,
            "agreement": {"patched": fine},
            "failed": {},
            "us": {"unpatched": 300.0, "patched": 200.0, "torch.compile": 150.0, "torch.compile, patched": 100.0},
        },
        {
            "model": "Two",
            "batch": 1,
            "agreement": {"patched": half},
            "us": {"unpatched": 300.0, "patched": 100.0, "torch.compile": 200.0},
            "failed": {"torch.compile, patched": "RuntimeError: no"},
        },
    ]
    report = {"machine": "NVIDIA H200", "date": "today", "torch": "2", "transformers": "5", "rows": rows}
    text = model_tables.steps(report)
    assert "| model | batch | unpatched | patched | torch.compile | torch.compile, patched |" in text
    assert "| One | 1 | 300 | 200 (1.50x) | 150 (2.00x) | 100 (3.00x) |" in text
    assert "| Two | 1 | 300 | 100 (3.00x) | 200 (1.50x) | failed |" in text
    assert "faster than a patched model that is not compiled in 1 of 2 rows" in text
    assert "faster than compiled alone in 1 of 1 rows" in text
    assert "`torch.compile, patched` failed: `RuntimeError: no`." in text
    assert "eager step in 1 of 2 rows; in the others at least 50% did" in text
    assert "same in 1 of 2 rows" in text and "generate()" not in text
    assert model_tables.headline(report) == (
        "On an H200, a patched model decodes 1.50 to 3.00 times as fast as uncompiled transformers, both in a CUDA graph, "
        "over 2 models. `torch.compile` reaches 1.50 to 2.00, and 3.00 to 3.00 on top of a patched model."
    )
    with pytest.raises(ValueError, match="must each occur once"):
        filled("<!-- steps:begin --> no end", {"steps": "x"})


def test_model_tables_with_decode() -> None:
    """The floor, `decode=True` and fp8 weights are columns of a run that has them, and so are all forms of `generate`."""
    us = {"unpatched": 300.0, "patched": 200.0, "torch.compile": 150.0, "max-autotune": 90.0}
    us |= {"decode": 100.0, "decode, fp8": 50.0}
    agreed = {"patched": {"equal": 1.0, "same_token": True}}
    rows = [{"model": "One", "batch": 4, "agreement": agreed, "failed": {}, "us": us, "floor": {"": 80.2, "fp8": 42.0}}]
    report: dict[str, Any] = {
        "machine": "NVIDIA H200",
        "date": "today",
        "torch": "2",
        "transformers": "5",
        "rows": rows,
    }
    per_token = {"unpatched": 700.0, "captured": 350.0, "captured, decode": 100.0}
    report["generated"] = [{"model": "One", "batch": 4, "prompt": 63, "new_tokens": 64, "us_per_token": per_token}]
    report["generated"][0] |= {"same_tokens": dict.fromkeys(per_token, 1.0), "failed": {"patched": "TypeError: no"}}
    text = model_tables.steps(report)
    assert (
        '| floor | unpatched | patched | torch.compile | max-autotune | `decode=True` | `decode=True, weights="fp8"` |'
        in text
    )
    assert (
        "| One | 4 | 80 (42) | 300 | 200 (1.50x) | 150 (2.00x) | 90 (3.33x) | 100 (3.00x, 80%) | 50 (6.00x, 84%) |"
        in text
    )
    assert "reads all weights of a step once" in text
    long = {**rows[0], "context": 4096, "floor": {"": 80.2, "fp8": 42.0, "cache": 8.0}}
    cached = model_tables.steps({**report, "rows": [*rows, long]})
    assert "| One, context 4,096 | 4 | 88 (50) | 300 |" in cached and "100 (3.00x, 88%) | 50 (6.00x, 100%) |" in cached
    assert "reads all weights of a step, and the entries of its cache, once" in cached
    assert "`decode=True` was faster than torch.compile in 1 of 1 rows." in text
    assert "`decode=True` was faster than max-autotune in 0 of 1 rows." in text
    assert (
        "| One | 4 | 700 | failed | 350 (2.00x) | 100 (7.00x) |" in text
        and "`patched` failed: `TypeError: no`." in text
    )
    assert "`captured`, unpatched, generated the tokens of the first column in 1 of 1 rows." in text
    assert "over 1 models. `decode=True` reaches 3.00 to 3.00. `torch.compile`" in model_tables.headline(report)


@pytest.mark.parametrize(("machine", "minutes"), [("cpu", 20), ("h200", 10)])
def test_long_runs_cited_by_reliability_md_passed(machine: str, minutes: int) -> None:
    """A million random calls without a failure, and a soak without a fault."""
    fuzz, soak = (json.loads((ROOT / "benchmarks" / machine / f"{name}.json").read_text()) for name in ("fuzz", "soak"))
    assert sum(fuzz["cases"].values()) == 1_000_000 and not fuzz["failed"] and not fuzz["failures"]
    assert soak["minutes"] >= minutes and not soak["faults"]


@pytest.mark.slow
def test_readme_example(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Run it as a program, with a small model from disk instead of Qwen3, on the CPU."""
    pytest.importorskip("transformers")
    from tests.helpers import readme

    readme.run(tmp_path)
    printed = capsys.readouterr().out.strip()
    assert re.fullmatch(rf"An RMSNorm is\d+( \d+){{{readme.NEW_TOKENS - 1}}}", printed), printed
    assert len([line for line in readme.example(tmp_path).splitlines() if line]) <= 6


def test_readme_is_short() -> None:
    """As `wc -w` counts, tables and tags included."""
    assert len((ROOT / "README.md").read_text().split()) <= 450


@pytest.mark.parametrize("path", MARKDOWN, ids=relative)
def test_links_resolve(path: Path) -> None:
    text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        found = path.parent / file if file else path
        if not found.exists() or (anchor and anchor not in anchors(found)):
            broken.append(target)
    assert not broken


def anchors(path: Path) -> set[str]:
    """The anchors that GitHub generates for a file's headings."""
    titles = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def test_models_md_lists_every_family() -> None:
    """The table of docs/models.md matches tests/helpers/families.py."""
    from tests.helpers.families import FAMILIES

    assert f"{len(FAMILIES) - 1} Hugging Face model families" in (ROOT / "README.md").read_text()
    text, _ = (ROOT / "docs/models.md").read_text().split("## Releases of transformers")
    table = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| ")]
    rows = {cells[0]: cells for cells in table}
    for family in FAMILIES:
        if family.name == "torch.nn":
            continue
        _, rounds, offset, addition, heads, more = rows[family.name]
        assert rounds == {"hf": "twice", "once": "once"}[family.form.rounding]
        assert float(offset) == family.form.weight_offset
        assert family.layer is not None
        fused = "yes" if family.form.rounding == "hf" else 'with `rounding="once"`'
        assert addition == (fused if family.layer.norm else "none follows an addition")
        kinds = {None: "", True: "per head", False: "whole projections"}
        assert heads == kinds[family.attention.per_head if family.attention else None]
        assert ("MLA" in more) == (family.mla is not None)


def test_models_md_states_what_was_compared() -> None:
    """The numbers of classes and architectures are those of benchmarks/cpu/architectures*.json."""
    data = [json.loads((ROOT / "benchmarks/cpu" / name).read_text()) for name in architectures_page.DATA]
    text = " ".join((ROOT / "docs/models.md").read_text().split())
    tested, newest, newer, older = (architectures_page.matched(found["classes"]) for found in data)
    assert f"{tested.replace(' of ', ' of the ')} RMSNorm classes of transformers 5.17 " in text
    assert f"In transformers 5.23 it is {newest}, in 5.22 {newer}, in 4.57 {older}" in text
    lowest, highest = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["onepass"]["tested"]["transformers"]
    assert [found["transformers"] for found in data] == [lowest, highest, "5.22.2", "4.57.6"]
    assert f"CI runs the tests of models with {lowest} and {highest}" in text
    for found in data:
        rows = found["models"]
        errors = sorted((row["error"], name) for name, row in rows.items())
        assert errors[-1][1] == "mamba" and errors[-2][0] <= 5e-6
        assert all(row["tokens_equal"] is not False for row in rows.values())
    assert f"Tiny models of {len(data[0]['models'])} architectures" in text
    changes = " ".join((ROOT / "CHANGELOG.md").read_text().split())
    assert set(re.findall(r"(\d+) of the 184 RMSNorm classes", changes)) == {tested.split()[0]}
    equal = sum(row["equal"] for row in data[0]["models"].values() if row["norms"])
    assert f"equal to the byte for {equal} of " in (ROOT / "docs/reliability.md").read_text()
    assert f"Mamba's logits agree to {data[0]['models']['mamba']['error'] * 1e6:.1f}e-6" in text


def test_changelog_asks_for_no_variable_that_nothing_needs() -> None:
    """`ONEPASS_UNPROVEN` runs what is listed, and nothing is."""
    if not re.search(r"^UNPROVEN: .* = \(\)$", (ROOT / "src/onepass/gpu/compile.py").read_text(), re.MULTILINE):
        return
    assert "ONEPASS_UNPROVEN" not in (ROOT / "CHANGELOG.md").read_text()


def test_nothing_is_installed_from_an_index() -> None:
    """onepass is on none, so ``pip install onepass`` and its extras fail."""
    for path in (*MARKDOWN, *SOURCES, ROOT / "pyproject.toml"):
        assert not re.search(r"pip install ['\"]?onepass|onepass\[[a-z]", path.read_text()), path


def test_contributing_lists_the_folders_of_tests() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    table = text.split("| folder | what it tests |")[1].split("\n\n")[0]
    listed = [name for line in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", line.split("|")[1])]
    assert sorted(listed) == sorted(path.parent.name for path in (ROOT / "tests").glob("*/__init__.py"))


def test_engines_md_lists_every_function() -> None:
    text = (ROOT / "docs/engines.md").read_text().split("## Coming from vLLM")[1]
    for module in (engines.vllm, engines.flashinfer, engines.sglang):
        for name in module.__all__:
            short = name.removeprefix("fused_add_") if name.endswith("static_fp8_quant") else name
            assert inspect.ismodule(getattr(module, name)) or f"`{short}`" in text, name
    assert "no int8" not in text


def test_engines_md_names_calls_that_exist() -> None:
    """Those in the table of requests."""
    rows = (ROOT / "docs/engines.md").read_text().split("## Requests that a call answers")[1].splitlines()
    names = [name for row in rows if row.startswith("| ") for name in re.findall(r"`onepass\.([\w.]+)", row)]
    assert len(names) >= 5
    for name in names:
        *path, last = name.split(".")
        member: object = onepass
        for part in path:
            member = getattr(member, part)
        assert callable(getattr(member, last)), name


def test_numerics_states_the_tolerances() -> None:
    """The numbers in docs/numerics.md match the code."""
    from onepass.formats import FP8_FORMATS, SMALLEST_EPS, SMALLEST_SCALE
    from tests.oracle import bounds

    text = (ROOT / "docs/numerics.md").read_text()
    assert bounds.FLOAT32_ERROR == 1e-6
    assert "its float32 error, 1e-6 relative" in text
    assert SMALLEST_SCALE == 2.0**-126 == torch.finfo(torch.float32).smallest_normal
    assert SMALLEST_EPS == 2.0**-126 and "below 2^-126 it counts as 2^-126" in text
    _, scale = onepass.rms_norm_fused_fp8(torch.zeros(1, 64), torch.ones(64), scale_format="ue8m0")
    assert scale.item() == 2.0**-127 and "(UE8M0: 2^-127)" in text
    for fmt in FP8_FORMATS.values():
        assert all(f"{limit:g}" in text for limit in fmt.maxima)
        assert f"0x{fmt.nan_code:X}" in text


CLOCKS = re.compile(r"\b(?:perf_counter|process_time|monotonic|time\.time)(?:_ns)?\(\)")
LIMITS = re.compile(r"(?:timeout|seconds)=(\d+)\b(?!\.)|\.(?:join|wait)\((\d+)\)")
MAY_READ_A_CLOCK = {
    "tests/all_ops/concurrency_workers.py": "sets a file's age",
    "tests/dist/workers.py": "a waiting rank waits at least as long as requested",
    "tests/system/test_bench_timing.py": "a process works until it has used one second of CPU time",
    "tests/cpu/test_object_cache.py": "sets a file's age",
    "tests/gemv_norm/test_cpu.py": "timestamps are in order",
    "tests/engines/serve.py": "tokens per second are printed, and compared with nothing",
}
HANGS = {"tests/dist/test_dist.py": "seconds=4"}
"""Time limits that a test is meant to reach."""


def test_tests_do_not_depend_on_the_speed_of_the_machine() -> None:
    """Tests read a clock only for the reasons above, and a busy machine cannot reach their time limits."""
    found: dict[str, list[str]] = {"clocks": [], "limits": []}
    for path in sorted((ROOT / "tests").rglob("*.py")):
        name, text = relative(path), path.read_text()
        if name == relative(Path(__file__)):
            continue
        if CLOCKS.search(text) and name not in MAY_READ_A_CLOCK:
            found["clocks"].append(name)
        limits = [match for match in LIMITS.finditer(text) if int(match[1] or match[2]) < 300]
        found["limits"] += [f"{name}: {match[0]}" for match in limits if match[0] != HANGS.get(name)]
    assert found == {"clocks": [], "limits": []}


def test_mutation_score_is_quoted_with_its_scope() -> None:
    """Every quotation of the score names the files that mutation testing does not cover."""
    outside = ("`gpu/`", "prologues", "models", "`dist`", "`kvcache`", "`nn`", "`engines`")
    quoted = 0
    for path in MARKDOWN:
        for block in re.split(r"\n(?=#|\*\*The result|\| a small mistake|\| no network)", path.read_text()):
            if re.search(r"mut(ants|ation)", block) and re.search(r"\b(95\.6|86\.[28]) %", block):
                quoted += 1
                assert not [word for word in outside if word not in block], relative(path)
    assert quoted == 2
    (targets,) = re.findall(r"^TARGETS: Final = \((.*)\)$", (ROOT / "tools/mutation/campaign.py").read_text(), re.M)
    notebook = (ROOT / "docs/notebook/reliability.md").read_text()
    section = notebook[notebook.index("**The mistakes.**") : notebook.index("**Not covered**")]
    assert all(f"`{name}`" in section for name in re.findall(r'"(.*?)"', targets))


def test_cache_is_not_described_as_signed() -> None:
    notebook = (ROOT / "docs/notebook/reliability.md").read_text().split("## Cache faults")[1].split("\n## ")[0]
    limits = (ROOT / "docs/reliability.md").read_text().split("## Limits")[1]
    assert "did not write" not in notebook
    for text in (notebook, limits):
        assert "None of this is a signature" in text and "as the same user" in text
