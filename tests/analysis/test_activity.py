import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clearhead.analysis.activity import BINS, Activity
from clearhead.analysis.entries import Entries

UNITS = 5
# powers of two and their neighbours lie on the edges of bins
edges = [0.5, 1.0, 2.0, 0.75, 1.5, float(np.nextafter(np.float32(1), np.float32(0))), 2.0**-20]
magnitudes = st.sampled_from(edges) | st.floats(2**-30, 2**20, width=32)


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, UNITS - 2), magnitudes, st.sampled_from([1, -1])), min_size=1, max_size=60),
    st.lists(st.integers(0, 60), max_size=5).map(sorted),
    st.booleans(),
)
def test_equals_numpys_histogram_however_the_data_are_cut(rows, cuts, signed):
    unit = np.array([row[0] for row in rows])
    value = np.array([row[1] * (row[2] if signed else 1) for row in rows], dtype=np.float32)
    activity = Activity(UNITS, signed=signed)
    for low, high in zip([0, *cuts], [*cuts, len(rows)], strict=True):
        activity.update(Entries(unit[low:high], np.arange(low, max(low, min(high, len(rows)))), value[low:high]))
    for u in range(UNITS):
        own = value[unit == u]
        assert activity.count[u] == len(own)
        edges = activity.edges()[u]
        counts, _ = np.histogram(own.astype(np.float64), edges)
        np.testing.assert_array_equal(activity.histogram[u], counts)
        assert activity.histogram[u].sum() == len(own)
        if len(own):
            assert activity.mean[u] == pytest.approx(own.mean(dtype=np.float64))
            assert edges[-1] / 2 <= np.abs(own).max() < edges[-1]
            assert edges[0] == (-edges[-1] if signed else 0)
        else:
            assert np.isnan(activity.mean[u])
        assert len(edges) == BINS + 1
