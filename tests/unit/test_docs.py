"""The documents name files and tests that exist and every option, and the README stays short."""

import re
from pathlib import Path

import pytest

import diloco
from diloco.training.config.run_file import known_keys

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
FOLDERS = sorted(path.name for path in (ROOT / "src/diloco").iterdir() if path.is_dir() and path.name != "__pycache__")

LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
NAMED_PATH = re.compile(
    rf"(?<![\w./-])(?:(?:src|docs|benchmarks|examples|tests)/[\w./-]*\w|(?:{'|'.join(FOLDERS)})/[\w/-]+\.py)"
)
MODULE = re.compile(r"\bdiloco(?:\.[a-z]\w*)+")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_path_and_module_that_a_page_names_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    missing = [link for link in LINK.findall(text) if "://" not in link and not (page.parent / link).exists()]
    for name in NAMED_PATH.findall(text):
        places = (ROOT, ROOT / "src/diloco", ROOT / "tests", page.parent)
        if not any((place / name).exists() for place in places):
            missing.append(name)
    missing += [name for name in MODULE.findall(text) if not _is_importable(name)]
    assert not missing, f"{page.name} names what does not exist: {missing}"


def _is_importable(name: str) -> bool:
    """A package or module, an attribute of a module, or one of the names that `import diloco` offers."""
    *parents, last = name.split(".")[1:]
    path = ROOT.joinpath("src/diloco", *parents, last)
    if path.is_dir() or path.with_suffix(".py").exists():
        return True
    return path.parent.with_suffix(".py").exists() if parents else last in dir(diloco) or last in diloco.__all__


def test_every_module_that_a_module_docstring_names_exists() -> None:
    modules = [f"/{path}" for folder in ("src", "tests", "benchmarks") for path in (ROOT / folder).glob("**/*.py")]
    missing = [
        f"{path.name}: {name}"
        for path in (ROOT / "src/diloco").glob("**/*.py")
        for name in re.findall(r"(?<![\w./-])[a-z_][\w/]*\.py\b", _docstring(path))
        if not any(module.endswith(f"/{name}") for module in modules)
    ]
    assert not missing


def _docstring(module: Path) -> str:
    text = module.read_text(encoding="utf-8")
    return text.split('"""')[1] if text.startswith('"""') else ""


def test_every_option_is_on_a_page() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in PAGES if "adr" not in path.parts)
    named = set(re.findall(r"[`-](?:\w+\.)?(\w+)", text))
    assert not [key for key in known_keys() if key.rpartition(".")[2] not in named]


def test_every_test_that_the_invariants_name_exists() -> None:
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "docs/invariants.md").read_text(encoding="utf-8")))
    defined = {
        name for path in ROOT.glob("tests/**/test_*.py") for name in re.findall(r"def (test_\w+)", path.read_text())
    }
    assert named and not named - defined


def test_the_readme_has_at_most_150_lines_and_says_where_the_mean_is_computed() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 150
    assert "engines/reduction.py" in text and "core/merging.py" in text


def test_every_decision_record_has_a_number_of_its_own_which_is_that_of_its_title() -> None:
    records = sorted((ROOT / "docs/adr").glob("[0-9]*.md"))
    numbers = [path.name[:4] for path in records]
    assert len(numbers) == len(set(numbers))
    for path in records:
        assert path.read_text(encoding="utf-8").startswith(f"# {int(path.name[:4])}. "), path.name
