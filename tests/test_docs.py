"""The pages in docs/ and beside them: they name rules, files and each other, and all of these exist."""

import ast
import doctest
import pathlib
import re

import pytest
import torch

import foregrad

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = pathlib.Path(foregrad.__file__).parent
PAGES = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
CODE = [path for folder in (ROOT / "tests", ROOT / "fuzz", PACKAGE) for path in sorted(folder.rglob("*.py"))]
WITH_EXAMPLES = [
    "README.md",
    "docs/check.md",
    "docs/effects.md",
    "docs/mutation.md",
    "docs/objects.md",
    "docs/running.md",
    "docs/subclasses.md",
    "docs/training_step.md",
]
FILE_NAMES = {path.name for path in CODE}

A_RULE = re.compile(r"\b[A-Z]-\d+\b")
A_LINK = re.compile(r"\]\(([^)\s]+)\)")
AN_EXAMPLE = re.compile(r"^```python\n(.*?)^```", re.S | re.M)
A_PATH = re.compile(r"`([\w./<>-]+)`")


def missing_files(text: str) -> list[str]:
    """Files that a page names and that do not exist: below the root or the package, or anywhere for a bare name."""
    missing = []
    for path in A_PATH.findall(text):
        folder, is_pattern, _ = path.partition("<")  # as in layout_tables/torch-<version>.json
        start = f"{folder.rpartition('/')[0]}/" if is_pattern else path
        if "/" in start:
            found = any((base / name).exists() for base in (ROOT, PACKAGE) for name in (start, f"{start}.py"))
        else:
            found = not start.endswith(".py") or start in FILE_NAMES
        missing += [] if found else [path]
    return missing


def headings(page: pathlib.Path) -> set[str]:
    """The anchors of a page, as GitHub makes them of its headings."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_every_rule_that_code_names_is_explained():
    explained = re.findall(r"^\| ([A-Z]-\d+) \|", (ROOT / "docs" / "rules.md").read_text(), re.M)
    assert len(set(explained)) == len(explained) > 100
    assert {path.name: new for path in CODE if (new := set(A_RULE.findall(path.read_text())) - set(explained))} == {}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page):
    for link in A_LINK.findall(page.read_text()):
        if not re.match(r"[a-z]+:", link):
            name, _, anchor = link.partition("#")
            target = page.parent / name if name else page
            assert target.exists(), link
            assert not anchor or anchor in headings(target), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_that_a_page_names_exists(page):
    assert missing_files(page.read_text()) == []


def test_the_architecture_lists_every_file():
    """A row for each, with the first sentence of its docstring."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    listed = re.findall(r"^\| `(\w+\.py)` \| (.+) \|$", page, re.M)
    layers = [path for path in sorted(PACKAGE.rglob("*.py")) if path.parent.name != "testing"]
    described = [PACKAGE / name for name in ("api.py", "compat.py", "compiling.py", "training.py")]  # in a section each
    files = [path for path in layers if path.name != "__init__.py" and path not in described]
    expected = [(path.name, first_paragraph(path).rstrip(".")) for path in files]
    assert sorted(listed) == sorted(expected)


def first_paragraph(path: pathlib.Path) -> str:
    docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
    return " ".join(docstring.split("\n\n")[0].split())


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_examples_run_in_order(name):
    names = {"__name__": "__main__"}
    for example in AN_EXAMPLE.findall((ROOT / name).read_text()):
        exec(compile(example, name, "exec"), names)


def test_the_quoted_lines_of_a_generated_call_are_generated():
    text = (ROOT / "docs" / "mutation.md").read_text()
    quoted = text.partition("The relevant lines of the source:\n\n```\n")[2].partition("```")[0].splitlines()
    f = foregrad.aot_function(
        lambda x, y: (x.mul_(2), y + 1)[1], lambda graph, _: foregrad.make_boxed_func(graph.forward)
    )
    a = torch.arange(4.0)
    f(a[:3], a[1:])
    generated = [line.strip() for line in f.specializations[0].source.splitlines()]
    assert quoted and [line for line in quoted if line.strip() not in generated] == []


def test_doctests_of_capture_hold():
    assert doctest.testfile(str(ROOT / "docs" / "capture.md"), module_relative=False).failed == 0


def test_the_glossary_defines_each_term_once_in_order():
    text = (ROOT / "docs" / "glossary.md").read_text()
    terms = re.findall(r"^- \*\*(.+?)\*\*: ", text, re.M)
    assert len(terms) == text.count("\n- ") > 30
    assert terms == sorted(set(terms))
    referred = re.findall(r"(?<!\*)\*([a-z ]+)\*(?!\*)", text)
    assert [term for term in referred if term not in terms and term.removesuffix("s") not in terms] == []


def test_a_file_that_is_gone_is_noticed():
    assert missing_files("`ops.py`, `record/lift.py`, `record/`, `tests/test_docs.py`") == []
    gone = ["record/no_such_file.py", "no_such_file.py", "record/no_such_folder", "gone/torch-<version>.json"]
    assert missing_files(", ".join(f"`{path}`" for path in gone)) == gone
