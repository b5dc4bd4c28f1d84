import pytest

from clearhead.commands.printing.table import duration, show, show_columns, show_layers, size, spelled


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


def test_columns_are_as_wide_as_their_widest_cell(capsys):
    show_columns([("unit", "KL"), ("lorsa.5.7", "0.100"), ("family", "12")])
    assert capsys.readouterr().out == "  unit          KL\n  lorsa.5.7  0.100\n  family        12\n"


def test_layers_have_their_mean_and_what_is_missing_is_no_zero(capsys):
    show_layers({3: {"fvu": 0.5}, 4: {"fvu": None}, 5: {"fvu": 0.25}}, {"fvu": "FVU"}, {6: "no attention"}, "trained")
    lines = ["trained", "  layer    FVU", "      3  0.500", "      4      –", "      5  0.250", "   mean  0.375"]
    assert capsys.readouterr().out.splitlines() == [*lines, "layer 6 left out: no attention"]
