"""The README's tree of files is the tree of files."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_readme_has_one_line_for_each_source_file_and_no_other() -> None:
    tree = (ROOT / "README.md").read_text().split("## Where is what")[1].split("```")[1]
    listed: set[str] = set()
    folders: list[str] = []  # that the line is in
    for line in tree.splitlines():
        if found := re.match(r"( +)(\w+)(/|\.py)(?: |$)", line):
            depth = len(found[1]) // 2 - 1
            if found[3] == "/":
                folders[depth:] = [found[2]]
            else:
                listed.add("/".join([*folders[:depth], found[2] + ".py"]))
    package = ROOT / "src" / "diloco"
    actual = {str(p.relative_to(package)) for p in package.rglob("*.py") if p.name != "__init__.py"}
    assert listed == actual
