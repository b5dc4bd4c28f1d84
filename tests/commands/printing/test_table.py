import pytest

from clearhead.commands.printing.table import duration, show, size, spelled


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.21349, "0.213"),
        (0.0, "0.000"),
        (0.00012, "1.20e-04"),
        (-0.5, "-0.500"),
        (1234.56, "1,235"),
        (4608, "4,608"),
        (True, "yes"),
        (False, "no"),
        (None, "–"),
        (["ours", 2], "ours, 2"),
        ("runs/x", "runs/x"),
    ],
)
def test_spelled(value, shown):
    assert spelled(value) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0.4, "0 s"), (59.4, "59 s"), (59.6, "1 min 0 s"), (200, "3 min 20 s"), (7500, "2 h 5 min")]
)
def test_duration(seconds, shown):
    assert duration(seconds) == shown


@pytest.mark.parametrize(
    ("n", "shown"), [(999, "999 B"), (1500, "1.5 kB"), (538_000_000, "538 MB"), (6e9, "6 GB"), (2e12, "2 TB")]
)
def test_size(n, shown):
    assert size(n) == shown


def test_rows_are_aligned(capsys):
    show({"a": 1, "long name": "x"}, "title")
    assert capsys.readouterr().out == "title\n  a          1\n  long name  x\n"
