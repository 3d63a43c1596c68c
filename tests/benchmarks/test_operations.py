"""The table of operations against MLX's own."""

from benchmarks import operations as table


def test_the_table_names_what_this_room_makes_quick(monkeypatch, capsys):
    monkeypatch.setattr(table, "time_ratio", lambda own, theirs, *args, **_: 1.0)
    monkeypatch.setattr(table.mx, "eval", lambda *_: None)
    table.benchmark()
    said = capsys.readouterr().out
    names = ("softmax", "silu", "attention", "affine", "convolution", "upsampled", "4 bits")
    assert all(name in said for name in names)
