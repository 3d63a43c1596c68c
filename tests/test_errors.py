"""Errors are sentences: one line, whatever they quote."""

from kleinlite.errors import FileError, HubError, MemoryLimitError, UserError, clip, first_few


def test_a_sentence_is_one_line_whatever_it_quotes():
    """In Python too, not only on the command line: a file's names may come from anybody."""
    for kind in (UserError, FileError, HubError, MemoryLimitError):
        text = str(kind("a tensor called x\ny\x1b[31m" + 10**6 * "z" + ": download it again."))
        assert text.startswith("a tensor called x\\ny\\x1b[31mzzz") and text.endswith("zz: download it again.")
        assert text.isprintable() and len(text) <= 1000
    assert len(first_few([10**6 * "x"] * 9)) < 500


def test_names_from_files_are_cut_and_escaped():
    assert clip("a" * 64) == "a" * 64
    assert clip("b" + "a" * 10**7 + "c") == "b" + "a" * 31 + "…" + "a" * 31 + "c"
    assert clip("a\nb") == "a\\nb"
    for text in ("\x00" * 64, "\x1b" * 10**6, "é" * 100, "x" * 65):
        assert len(clip(text)) == 65 and clip(text).isprintable()
