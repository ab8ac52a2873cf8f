"""The table in docs/options.md is what the declarations of options say. Renew it after a change of one that is meant:

python -m tests.options.test_options_document && git diff docs/options.md
"""

from pathlib import Path

from dflash_jax.options.table import options_table

DOCUMENT = Path(__file__).parents[2] / "docs" / "options.md"
BEGIN = "<!-- options: made by python -m tests.options.test_options_document -->\n\n"
END = "\n<!-- end of options -->\n"


def parts() -> tuple[str, str, str]:
    """The document before the table, the table, and the document after it."""
    before, rest = DOCUMENT.read_text().split(BEGIN)
    table, after = rest.split(END)
    return before, table, after


def test_the_table_of_options_is_what_the_declarations_say():
    assert parts()[1] == options_table()


def test_the_table_is_markdown():
    rows = options_table().splitlines()
    assert len(rows) > 10
    assert {row.count("|") for row in rows} == {4}


if __name__ == "__main__":
    before, _, after = parts()
    DOCUMENT.write_text(before + BEGIN + options_table() + END + after)
