import json

import pytest

from clearhead.errors import ClearheadError
from clearhead.explain.answers import Answers, Spending, Stopped
from clearhead.explain.endpoint import IN_A_ROW, TRIES, Endpoint, Prompt, address, read_body
from tests.explain.server import Server

ASK = Prompt("Answer.", "1. (from token 0) a the", 50)
LIST = Prompt("Give a JSON list.", "1. (from token 0) a the\n2. (from token 0) b", 50)


def read(answer):
    return answer if "rather not" not in answer and answer else None


@pytest.fixture
def server():
    with Server() as server:
        yield server


@pytest.fixture
def make_endpoint(server, tmp_path, monkeypatch):
    monkeypatch.delenv("CLEARHEAD_API_KEY", raising=False)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)

    def make(spending=None, **options):
        made = Endpoint(
            server.url,
            "judge",
            Answers(tmp_path / "answers.jsonl"),
            spending or Spending(),
            sleep=waits.append,
            **{"timeout": 5.0, **options},
        )
        made.waits = waits
        return made

    waits = []
    return make


def test_a_question_is_one_post_of_json(server, make_endpoint, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "other")
    monkeypatch.setenv("CLEARHEAD_API_KEY", "secret")
    endpoint = make_endpoint()
    assert endpoint.ask(ASK, read) == '"Active on the and of."\n'
    (body,) = server.seen
    assert body == {
        "model": "judge",
        "messages": [{"role": "system", "content": "Answer."}, {"role": "user", "content": ASK.user}],
        "temperature": 0,
        "max_tokens": 50,
    }
    assert server.headers[0]["Authorization"] == "Bearer secret"
    assert "secret" not in endpoint.answers.path.read_text()
    spending = endpoint.spending
    assert (spending.requests, spending.prompt_tokens, spending.completion_tokens) == (1, 100, 10)


def test_without_a_key_none_is_sent(server, make_endpoint):
    make_endpoint().ask(ASK, read)
    assert "Authorization" not in server.headers[0]


@pytest.mark.parametrize("trouble", ["slow", 429, 500, 503, "garbled", "cut"])
def test_what_may_pass_is_tried_again(server, make_endpoint, trouble):
    server.plan = [trouble, trouble]
    endpoint = make_endpoint(timeout=0.2 if trouble == "slow" else 5.0)
    assert endpoint.ask(ASK, read) is not None
    assert len(server.seen) == 3 and endpoint.waits == [1.0, 2.0]
    assert endpoint.spending.requests == 3 and endpoint.spending.failed == 0


def test_retry_after_is_obeyed(server, make_endpoint):
    server.plan = ["soon"]
    endpoint = make_endpoint()
    assert endpoint.ask(ASK, read) is not None and endpoint.waits == [7.0]


def test_what_does_not_pass_is_given_up(server, make_endpoint):
    server.plan = [500] * TRIES
    endpoint = make_endpoint()
    assert endpoint.ask(ASK, read) is None
    assert len(server.seen) == TRIES and endpoint.spending.failed == 1
    assert endpoint.ask(ASK, read) is not None  # a failure is not kept


def test_a_request_that_is_refused_is_not_repeated(server, make_endpoint):
    server.plan = [400]
    endpoint = make_endpoint()
    assert endpoint.ask(ASK, read) is None and len(server.seen) == 1 and endpoint.spending.failed == 1


def test_an_endpoint_that_is_down_ends_the_run(make_endpoint, server):
    server.plan = [500] * TRIES * IN_A_ROW
    endpoint = make_endpoint()
    for _ in range(IN_A_ROW - 1):
        assert endpoint.ask(ASK, read) is None
    with pytest.raises(Stopped, match="8 times in a row, the last time: HTTP 500"):
        endpoint.ask(ASK, read)


@pytest.mark.parametrize(
    ("status", "said"),
    [(401, "key is missing"), (403, "set the environment variable"), (404, "model 'judge'"), ("moved", "sends on to")],
)
def test_refusals_that_need_the_user_are_errors(server, make_endpoint, status, said):
    server.plan = [status]
    with pytest.raises(ClearheadError, match=said):
        make_endpoint().ask(ASK, read)
    assert len(server.seen) == 1


def test_nonsense_is_asked_again_with_a_reminder_once(server, make_endpoint):
    server.plan = ["nonsense"]
    endpoint = make_endpoint()
    assert endpoint.ask(ASK, read) is not None
    assert "could not be read" in server.seen[1]["messages"][1]["content"]
    server.plan = ["nonsense", "empty"]
    assert endpoint.ask(LIST, read) is None and endpoint.spending.failed == 1 and len(server.seen) == 4
    # nonsense too was paid for: a later run does not ask for it again
    again = make_endpoint()
    assert again.ask(LIST, read) is None and len(server.seen) == 4 and again.spending.cached == 2


def test_nothing_is_asked_twice(server, make_endpoint):
    first = make_endpoint().ask(ASK, read)
    again = make_endpoint()
    assert again.ask(ASK, read) == first and len(server.seen) == 1
    assert (again.spending.requests, again.spending.cached) == (0, 1)
    other = Prompt(ASK.system, ASK.user, 51)
    again.ask(other, read)
    assert len(server.seen) == 2


def test_a_dry_run_sends_nothing_and_counts(server, make_endpoint):
    make_endpoint().ask(ASK, read)
    dry = make_endpoint(Spending(price_in=2.0, price_out=10.0), sending=False)
    assert dry.ask(ASK, read) is not None and dry.ask(LIST, read) is None
    spending = dry.spending
    assert len(server.seen) == 1 and (spending.requests, spending.cached, spending.failed) == (1, 1, 0)
    # 100 tokens for the bytes of the first prompt were counted
    assert dry.answers.counted
    assert spending.prompt_tokens == pytest.approx(LIST.n_bytes / (ASK.n_bytes / 100))
    assert spending.completion_tokens == 50
    assert spending.cost == pytest.approx((spending.prompt_tokens * 2 + 50 * 10) / 1e6)


def test_limits_end_the_run_before_they_are_exceeded(server, make_endpoint):
    endpoint = make_endpoint(Spending(max_requests=1))
    endpoint.ask(ASK, read)
    endpoint.ask(ASK, read)
    with pytest.raises(Stopped, match="--max-requests 1"):
        endpoint.ask(LIST, read)
    endpoint = make_endpoint(Spending(price_in=0.0001, price_out=1.0, max_cost=90e-6))
    endpoint.ask(LIST, read)  # at most 50 tokens, and in truth 10
    with pytest.raises(Stopped, match="--max-cost"):
        endpoint.ask(Prompt("Give", "more", 90), read)
    assert len(server.seen) == 2 and endpoint.spending.cost < 90e-6


def test_tokens_are_estimated_where_the_endpoint_does_not_count(server, make_endpoint):
    server.usage = False
    endpoint = make_endpoint()
    endpoint.ask(ASK, read)
    assert endpoint.spending.prompt_tokens == pytest.approx(ASK.n_bytes / endpoint.answers.bytes_per_token)
    assert not endpoint.answers.counted


@pytest.mark.parametrize(
    "url",
    [
        "localhost:8000",
        "ftp://a/v1",
        "http://",
        "file:///etc/passwd",
        "",
        "http://[a/v1",
        "http://a:b/v1",
        "http://a b/",
    ],
)
def test_what_is_no_address_is_refused(url):
    with pytest.raises(ClearheadError, match="is no address"):
        address(url)


def test_addresses():
    assert address("https://a.org/v1/") == address("https://a.org/v1/chat/completions")
    assert json.dumps(address("http://h:1")) == '"http://h:1/chat/completions"'


def test_half_a_character_in_an_answer_can_be_written_down():
    answer = read_body(b'{"choices": [{"message": {"content": "a \\ud800 b"}}]}')
    assert answer.text == "a ? b"
