"""Text that is safe to show."""

from __future__ import annotations

from datetime import timedelta

import pytest

from postroom.text import MAX_ERROR, describe, duration, labelled, printable, traceback_of


@pytest.mark.parametrize(
    ("unsafe", "safe"),
    [
        ("orders", "orders"),
        ("Bestellungen für Zürich ✓", "Bestellungen für Zürich ✓"),
        ("\x1b[2J", r"\x1b[2J"),
        ("a\r\nb\tc", r"a\r\nb\tc"),
        ("\x00\x07\x7f\x9b", r"\x00\x07\x7f\x9b"),
        ("\u2028\u2029\u202e\u2066\ufeff\u200b", r"\u2028\u2029\u202e\u2066\ufeff\u200b"),
        ("\U000e0041", r"\U000e0041"),
        ("\ud800", r"\ud800"),
    ],
)
def test_what_could_move_a_cursor_end_a_line_or_turn_the_writing_is_escaped(unsafe: str, safe: str) -> None:
    """Names and errors come from others, and end up on terminals."""
    assert printable(unsafe) == safe
    assert printable(unsafe).isprintable()


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("orders", "key=orders"),
        (3, "key=3"),
        ("", 'key=""'),
        ("a attempt=1", 'key="a attempt=1"'),
        ('a"b', r'key="a\"b"'),
        ("a\n topic=b", r'key="a\n topic=b"'),
    ],
)
def test_no_value_passes_for_two(value: object, shown: str) -> None:
    assert labelled("key", value) == shown


def test_lengths_of_time_are_short() -> None:
    shown = [duration(timedelta(seconds=seconds)) for seconds in (0.0031, 0.4, 4, 60, 119, 120, 3600)]

    assert shown == ["0.003 s", "0.4 s", "4.0 s", "60.0 s", "119.0 s", "2 min", "60 min"]


class MuteError(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


@pytest.mark.parametrize(
    ("error", "described"),
    [
        (ValueError("no stock"), "ValueError: no stock"),
        (ValueError("no\nstock\x1b"), r"ValueError: no\nstock\x1b"),
        (ValueError("trailing\n"), "ValueError: trailing"),
        (TimeoutError(), "TimeoutError"),
        (MuteError(), "MuteError"),
        (ExceptionGroup("many", [OSError("gone")]), "ExceptionGroup: many (1 sub-exception): OSError: gone"),
        (ValueError("refused\nDETAIL:  Failing row contains (secret)."), "ValueError: refused"),
        (ValueError("refused\n[SQL: INSERT]\n[parameters: ('secret',)]"), r"ValueError: refused\n[SQL: INSERT]"),
    ],
)
def test_an_error_is_described_by_its_type_and_what_may_be_shown_of_its_text(error: Exception, described: str) -> None:
    assert describe(error) == described


def test_a_description_is_bounded() -> None:
    """Errors are stored in a column, and a payload may be quoted in one."""
    assert len(describe(ValueError("\x00" * 100_000))) == MAX_ERROR


@pytest.mark.parametrize(
    "said",
    [
        "(1062, \"Duplicate entry 'it's a-canary' for key 'PRIMARY'\")",
        "(1366, \"Incorrect integer value: 'canary' for column `db`.`t`.`n` at row 1\")",
        'duplicate key value violates unique constraint "k"\nDETAIL:  Key (name)=(canary) already exists.',
    ],
)
def test_a_description_has_no_value_that_a_database_quotes(said: str) -> None:
    """Payloads and keys are among them."""
    shown = describe(ValueError(said))

    assert "canary" not in shown
    assert "PRIMARY" in shown or "column" in shown or "constraint" in shown


def raised(error: Exception, cause: Exception | None = None) -> Exception:
    try:
        raise error from cause  # noqa: TRY301
    except Exception as caught:  # noqa: BLE001
        return caught


def test_a_traceback_shows_the_code_and_each_error_on_one_line() -> None:
    """What an error says must not pass for a record of its own."""
    cause = raised(ValueError("first\nERROR postroom all is lost\x1b[2J"))
    lines = traceback_of(raised(KeyError("second\u2028"), cause)).split("\n")

    assert r"ValueError: first\nERROR postroom all is lost\x1b[2J" in lines
    assert "The above exception was the direct cause of the following exception:" in lines
    assert "    raise error from cause  # noqa: TRY301" in lines
    assert all(line.isprintable() for line in lines)


def test_a_traceback_of_a_group_is_as_safe() -> None:
    inner = raised(ValueError("first\nERROR postroom all is lost\nDETAIL: secret"))
    text = traceback_of(raised(ExceptionGroup("many", [inner, OSError("x\ny")])))

    assert not any(line.startswith("ERROR") or "| ERROR" in line.partition(r"\n")[0] for line in text.split("\n"))
    assert all(line.isprintable() for line in text.split("\n"))
    assert "secret" not in text


def noted(error: Exception, *notes: str) -> Exception:
    for note in notes:
        error.add_note(note)
    return raised(error)


NOTES = ("x\nERROR postroom forged\x1b[2J", "ERROR postroom forged again", '  File "x"\nERROR postroom forged')


@pytest.mark.parametrize(
    "error",
    [
        noted(ValueError("no"), *NOTES),
        raised(KeyError("second"), noted(ValueError("first"), *NOTES)),
        raised(ExceptionGroup("many", [noted(ValueError("no"), *NOTES)])),
    ],
    ids=["alone", "cause", "group"],
)
def test_no_note_of_an_error_passes_for_a_record(error: Exception) -> None:
    """Python prints each line of a note as it is, at the start of a line."""
    lines = traceback_of(error).split("\n")

    assert all(line.isprintable() for line in lines)
    assert [line for line in lines if line.lstrip(" |").startswith(("ERROR", "x"))] == []
    assert any(line.endswith(r"note: x\nERROR postroom forged\x1b[2J") for line in lines)
    assert any(line.endswith("note: ERROR postroom forged again") for line in lines)


@pytest.mark.parametrize("note", ["refused\nDETAIL:  (secret)", "DETAIL:  (secret)", "x\n[parameters: ('secret',)]"])
def test_a_note_shows_no_row(note: str) -> None:
    """An error of a database may be quoted in one."""
    assert "secret" not in traceback_of(noted(ValueError("no"), note))


def test_notes_that_python_would_not_print_do_not_break_a_traceback() -> None:
    error = raised(ValueError("no"))
    error.__notes__ = 42  # type: ignore[assignment]

    assert traceback_of(error).endswith("ValueError: no\n    note: 42")


def test_a_note_that_is_no_text_is_shown_if_it_has_one() -> None:
    error = raised(ValueError("no"))
    error.__notes__ = [MuteError(), 7]  # type: ignore[list-item]

    assert traceback_of(error).endswith("ValueError: no\n    note: <note without a text>\n    note: 7")
