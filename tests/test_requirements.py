"""The page that says which tests prove which requirement."""

from __future__ import annotations

import re

from scripts.requirements import PAGE, PAGES, ROOT, proofs, rendered
from tests.contracts.requirements import REQUIREMENTS

from .contracts.test_stores import TestPostgresStoreOverAsyncpg as Contract

#: How many promises there are, and how many requirements each document has.
_COUNTS = {"F-": 25, "S0-": 61, "S1-": 43, "S2-": 52, "S3-": 29, "S4-": 24}
REQUIRED = {f"G{number}" for number in range(1, 14)} | {
    f"{document}{number:02}" for document, count in _COUNTS.items() for number in range(1, count + 1)
}


def test_every_requirement_has_a_row_and_every_row_a_test_or_a_page() -> None:
    rows = re.findall(r"^\| ((?:F-|S\d-|G)\d+) \| .*? \|(.*)\|$", PAGE.read_text(), re.MULTILINE)

    assert sorted(name for name, _ in rows) == sorted(REQUIRED)
    assert [name for name, targets in rows if not targets.strip()] == []


def test_the_page_names_the_tests_that_are_marked_today() -> None:
    """`python -m scripts.requirements` writes it."""
    page = PAGE.read_text()

    assert page == rendered(page)


def test_markers_name_requirements_that_exist() -> None:
    assert proofs().keys() | PAGES.keys() == REQUIRED


def test_the_listed_tests_of_the_contract_exist() -> None:
    assert [name for name in REQUIREMENTS if not hasattr(Contract, name)] == []


def test_sections_that_meet_a_requirement_exist() -> None:
    for target in {target for targets in PAGES.values() for target in targets}:
        page, _, anchor = target.partition("#")
        headings = re.findall(r"^#+ (.*)$", (ROOT / "docs" / page).read_text(), re.MULTILINE)
        slugs = [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings]

        assert not anchor or anchor in slugs, target
