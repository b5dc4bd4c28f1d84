from types import SimpleNamespace

import numpy as np

from clearhead.analysis.behaviours.attention import ATTENTION
from clearhead.analysis.behaviours.behaviour import Scores
from clearhead.analysis.behaviours.calibration import Calibration
from clearhead.commands.printing.catalogue_report import show_calibration


def test_a_calibration_names_rates_with_intervals_and_what_was_taken_for_what(capsys):
    behaviour = ATTENTION[0]
    cases, none = np.full(4, behaviour.min_cases), [None] * 4
    units = [SimpleNamespace(kind=kind, shows=shows) for kind, shows in ((behaviour.name, behaviour.name),) * 2]
    units += [SimpleNamespace(kind=behaviour.name, shows=None), SimpleNamespace(kind="copies", shows=None)]
    calibration = Calibration(
        "words",
        (behaviour,),
        units,
        {behaviour.name: Scores(np.array([1.0, 0.0, 0.0, 1.0]), cases, none)},
        {behaviour.name: Scores(np.zeros(4), cases, none)},
    )
    show_calibration(calibration)
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "4 planted units, tokens of words; intervals of 95 %"
    assert (
        "precision 0.500 [0.095, 0.905]  recall 0.500 [0.095, 0.905]  on shuffled text 0.000 [0.000, 0.490]"
        in printed[1]
    )
    rows = [line.split() for line in printed[3:]]
    assert rows == [
        ["units", behaviour.name[:9]],
        [behaviour.name, "2", "1"],
        ["hardly", "any", "1", "0"],
        ["stray", "0", "0"],
        ["decoys", "1", "1"],
    ]
