import numpy as np
import pyarrow as pa

from clearhead.analysis.relations import Related, relation_rows


def related(relation, unit, value, names, **more):
    labels = pa.array([name.upper() for name in names])
    return Related(relation, np.array(unit), np.array(names), labels, np.array(value), **more)


def test_rows_are_in_order_of_size_and_kinds_take_turns():
    rows = relation_rows(
        ["a", "b"],
        [
            related("reads", [1, 0, 1], [1.0, 2.0, -3.0], ["x", "y", "z"]),
            related("reads", [1], [0.1], ["f"]),
            related("writes", [0], [0.5], ["w"]),
            related("key", [0, 0], [5.0, 7.0], ["r", "s"], order=np.array([0.9, 0.1]), share=np.array([0.9, 0.1])),
            related("modes", [], [], []),
        ],
    )
    names = ("unit_id", "relation", "rank", "other", "label", "value", "share")
    columns = [rows[name].to_pylist() if isinstance(rows[name], pa.Array) else rows[name].tolist() for name in names]
    assert list(zip(*columns, strict=True)) == [
        ("a", "reads", 0, "y", "Y", 2.0, None),
        ("b", "reads", 0, "z", "Z", -3.0, None),
        ("b", "reads", 1, "f", "F", 0.1, None),
        ("b", "reads", 2, "x", "X", 1.0, None),
        ("a", "writes", 0, "w", "W", 0.5, None),
        ("a", "key", 0, "r", "R", 5.0, 0.9),
        ("a", "key", 1, "s", "S", 7.0, 0.1),
    ]
    assert all(len(column) == 0 for column in relation_rows(["a"], []).values())
