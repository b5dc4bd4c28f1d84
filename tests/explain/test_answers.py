import threading

import pytest

from clearhead.errors import CorruptFileError
from clearhead.explain.answers import BYTES_PER_TOKEN, Answer, Answers, Spending, Stopped, key_of


def test_answers_outlive_the_process_and_a_line_cut_by_a_kill(tmp_path):
    path = tmp_path / "run" / "answers.jsonl"
    answers = Answers(path)
    assert answers.get("a") is None and answers.bytes_per_token == BYTES_PER_TOKEN
    answers.put("a", Answer("one\n«", 10, 2), 40)
    answers.put("b", Answer("two"), 30)
    with path.open("a") as file:
        file.write('{"key": "c", "answ')
    again = Answers(path)
    assert again.get("a") == ("one\n«", 10, 2) and again.get("b") == ("two", None, None) and again.get("c") is None
    assert again.bytes_per_token == 4.0
    again.put("c", Answer("three"), 1)
    assert Answers(path).get("c") == ("three", None, None)
    assert len(path.read_text().splitlines()) == 3


def test_a_damaged_line_is_named(tmp_path):
    path = tmp_path / "answers.jsonl"
    path.write_text('{"key": 1}\n')
    with pytest.raises(CorruptFileError, match="line 1 of"):
        Answers(path)


def test_several_threads_write_whole_lines(tmp_path):
    answers = Answers(tmp_path / "answers.jsonl")

    def write(name):
        for number in range(20):
            answers.put(f"{name}{number}", Answer("x" * 500), 1)

    threads = [threading.Thread(target=write, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    again = Answers(answers.path)
    assert all(again.get(f"{name}{number}") is not None for name in "abcd" for number in range(20))


def test_the_key_depends_on_all_of_the_request():
    one = {"endpoint": "u", "model": "m", "messages": [{"a": "b"}]}
    assert key_of(one) == key_of(dict(reversed(one.items())))
    assert len({key_of(one), key_of(one | {"model": "n"}), key_of(one | {"endpoint": "v"})}) == 3


def test_what_is_under_way_counts_towards_the_limit():
    spending = Spending(price_in=1e6, price_out=0.0001, max_cost=10.0)
    with spending.request(6, 0) as settle:
        with pytest.raises(Stopped), spending.request(6, 0):
            pass
        settle(1, 0)
    with spending.request(6, 0) as settle:
        settle(6, 0)
    assert spending.cost == pytest.approx(7.0) and spending.requests == 2
    assert Spending().cost is None
