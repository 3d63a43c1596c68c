"""The lowest versions that pyproject.toml allows, one a line, as constraints for pip: `python -m tools.lowest`.

`make test-lowest` installs the package with these and runs its quick tests. The bounds of pyproject.toml are the list:
nothing is written down twice. What only the book and the tests take may be as new as there is.
"""

import re
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"
BOUND = re.compile(r'^ *"([\w.-]+)(?:\[\w+\])?>=([\d.]+)', re.M)


def lowest_versions(project: str) -> dict[str, str]:
    """Name and lowest version of each dependency of the package, in the text of a pyproject.toml."""
    listed = re.search(r"^dependencies = \[\n(.*?)^\]", project, re.M | re.S)
    assert listed
    return dict(BOUND.findall(listed[1]))


def main() -> None:
    for package, version in lowest_versions(PROJECT.read_text("utf-8")).items():
        print(f"{package}=={version}")


if __name__ == "__main__":
    main()
