"""Groups of sessions on a real engine: turns on every route, stops, keys, streams and rows to train on."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import httpx
import openai
import pytest

from darts_server.offline.demo.server import Server

PROMPT = "7a-5b*4>"
LONG = {"model": "tiny", "prompt": PROMPT, "max_tokens": 150, "ignore_eos": True}


def create(server: Server, **fields: Any) -> dict[str, Any]:
    answer = httpx.post(f"{server.url}/darts/v1/sessions", json={"prompt_key": "a task", **fields}, timeout=60)
    assert answer.status_code == 200, answer.text
    made: dict[str, Any] = answer.json()
    return made


def complete(session: dict[str, Any], **fields: Any) -> httpx.Response:
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 10, "return_token_ids": True, **fields}
    return httpx.post(f"{session['base_url']}/completions", json=body, timeout=60)


def end(server: Server, session: dict[str, Any], **fields: Any) -> dict[str, Any]:
    answer = httpx.post(f"{server.url}/darts/v1/sessions/{session['id']}:end", json=fields, timeout=60)
    assert answer.status_code == 200, answer.text
    state: dict[str, Any] = answer.json()
    return state


def read(server: Server, session: dict[str, Any]) -> dict[str, Any]:
    answer = httpx.get(f"{server.url}/darts/v1/sessions/{session['id']}", timeout=60)
    assert answer.status_code == 200, answer.text
    state: dict[str, Any] = answer.json()
    return state


def test_turns_of_a_session_make_one_row_with_the_log_probs_of_the_answers(server: Server) -> None:
    group = create(server, size=1, extra=0, policy="off")
    (session,) = group["sessions"]
    first = complete(session, logprobs=1)
    assert first.status_code == 200, first.text
    choice = first.json()["choices"][0]
    prompt, answer = choice["prompt_token_ids"], choice["token_ids"]
    field = first.json()["darts_session"]
    assert field == {"id": session["id"], "state": "open", "end": None, "turns": 1, "tokens": len(answer)}
    assert first.headers["X-Darts-Session"].startswith(f"id={session['id']}; state=open")

    # A tool's result, and a turn that does not ask for log-probs.
    history = [*prompt, *answer, *prompt]
    second = complete(session, prompt=history)
    more = second.json()["choices"][0]
    assert more["logprobs"] is None
    state = end(server, session, reward=1.0)
    assert (state["state"], state["end"], state["selected"], state["turns"]) == ("over", "finished", True, 2)
    (row,) = read(server, session)["rows"]
    assert row["token_ids"] == [*history, *more["token_ids"]]
    expected = [0] * len(prompt) + [1] * len(answer) + [0] * len(prompt) + [1] * len(more["token_ids"])
    assert row["mask"] == expected
    generated = [value for value, mask in zip(row["logprobs"], expected, strict=True) if mask]
    assert generated[: len(answer)] == pytest.approx(choice["logprobs"]["token_logprobs"], abs=1e-5)
    assert all(value < 0 for value in generated)
    assert row["version_spans"] == [[0, len(generated)]]

    # Provenance and statistics know the session as a candidate.
    record = httpx.get(f"{server.url}/darts/v1/groups/{group['group_id']}").json()["groups"][0]
    assert record["candidates"][0]["length"] == len(generated)
    assert record["candidates"][0]["reward"] == 1.0
    assert httpx.get(f"{server.url}/darts/v1/prompts/a task").json()["groups"] >= 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("stopped_as", "reason"), [("abort", "abort"), ("length", "length")])
def test_a_session_that_is_not_needed_is_stopped_in_its_turn(
    server: Server, stream: bool, stopped_as: str, reason: str
) -> None:
    # Size 2 of 6: one place for the shortest, one for the lowest tail draw. At least four sessions are stopped.
    group = create(server, size=2, extra=4, policy="uniform", stopped_as=stopped_as, over_status=409)
    sessions = group["sessions"]
    answers: dict[str, Any] = {}

    def run_long(session: dict[str, Any]) -> None:
        # Turn after turn, as long as the server lets it.
        for _ in range(50):
            answers[session["id"]] = complete(session, **LONG, stream=stream)
            if answers[session["id"]].status_code != 200 or reason in answers[session["id"]].text:
                return

    threads = [threading.Thread(target=run_long, args=(session,)) for session in sessions[1:]]
    for thread in threads:
        thread.start()
    complete(sessions[0], max_tokens=2, ignore_eos=True)
    end(server, sessions[0], reward=0.0)
    events = httpx.get(f"{server.url}/darts/v1/session-groups/{group['group_id']}/events?after=6", timeout=60).json()
    assert {event["type"] for event in events["events"]} <= {"ended", "stopped"}
    while True:
        state = httpx.get(f"{server.url}/darts/v1/session-groups/{group['group_id']}").json()
        open_sessions = [s for s in state["sessions"] if s["state"] == "open"]
        if len(open_sessions) <= 1:
            break
    for session in open_sessions:
        end(server, session)
    for thread in threads:
        thread.join(60)
    state = httpx.get(f"{server.url}/darts/v1/session-groups/{group['group_id']}").json()
    assert state["state"] == "completed"
    selected = [s for s in state["sessions"] if s["selected"]]
    assert len(selected) == 2
    assert sum(s["weight"] for s in selected) == pytest.approx(6.0)
    stopped = [s for s in state["sessions"] if s["end"] == "stopped"]
    assert len(stopped) == 4
    for s in stopped:
        assert s["reason"] == "tail_pruned"
        session = sessions[s["index"]]
        refused = complete(session)
        assert refused.status_code == 409
        error = refused.json()["error"]
        assert error["type"] == "darts_session_over"
        assert "stopped" in error["message"]
        assert read(server, session)["rows"] == []
    # The state in the answers of the stopped turns is "over".
    texts = [answers[s["id"]].text for s in stopped if answers[s["id"]].status_code == 200]
    for text in texts:
        last = (
            text.strip().splitlines()[-1] if not stream else next(x for x in text.splitlines() if "darts_session" in x)
        )
        field = json.loads(last.removeprefix("data: "))["darts_session"]
        assert (field["state"], field["end"]) == ("over", "stopped")
    assert texts or all(answers[s["id"]].status_code == 409 for s in stopped)


def test_a_session_is_found_by_its_key_and_by_a_header(server: Server) -> None:
    group = create(server, size=2, extra=0, policy="off")
    first, second = group["sessions"]
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 3}
    url = f"{server.url}/v1/completions"
    by_key = httpx.post(url, json=body, headers={"Authorization": f"Bearer {first['api_key']}"}, timeout=60)
    assert by_key.json()["darts_session"]["id"] == first["id"]
    for header in ("X-Session-ID", "X-Darts-Session", "X-SMG-Routing-Key", "X-Dynamo-Session-ID", "X-Session-Affinity"):
        by_header = httpx.post(url, json=body, headers={header: second["id"]}, timeout=60)
        assert by_header.json()["darts_session"]["id"] == second["id"], header
    xargs = httpx.post(url, json={**body, "vllm_xargs": {"darts_session": second["id"]}}, timeout=60)
    assert xargs.json()["darts_session"]["turns"] == 6
    chat = {"model": "tiny", "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 3}
    answer = httpx.post(f"{first['base_url']}/chat/completions", json=chat, timeout=60)
    if answer.status_code == 200:
        assert answer.json()["darts_session"]["turns"] == 2

    # The key of a session opens nothing else, and a wrong key nothing at all.
    key = {"Authorization": f"Bearer {first['api_key']}"}
    assert httpx.get(f"{server.url}/darts/v1/groups", headers=key).status_code == 403
    assert httpx.get(f"{server.url}/darts/v1/sessions/{second['id']}", headers=key).status_code == 403
    assert httpx.get(f"{server.url}/darts/v1/sessions/{first['id']}", headers=key).status_code == 200
    own_end = f"{server.url}/darts/v1/sessions/{first['id']}:end"
    assert httpx.post(own_end, json={"reward": 1.0}, headers=key).status_code == 403
    wrong = {"Authorization": "Bearer ses-key-unknown"}
    assert httpx.post(url, json=body, headers=wrong).status_code == 401
    # Another name in a header is a session of the harness's own, and no session of ours.
    plain = httpx.post(url, json=body, headers={"X-Session-ID": "a name"}, timeout=60).json()
    assert "darts_session" not in plain
    assert httpx.post(url.replace("/v1/", "/darts/v1/sessions/ses-none/v1/"), json=body).status_code == 404
    assert httpx.delete(f"{server.url}/darts/v1/session-groups/{group['group_id']}").json()["state"] == "cancelled"
    assert complete(first).status_code == 410


def test_turns_have_one_answer_and_wrong_requests_say_so(server: Server) -> None:
    group = create(server, size=1, extra=0, policy="off")
    (session,) = group["sessions"]
    refused = complete(session, n=2)
    assert refused.status_code == 400
    assert "must be 1 for a turn of a session" in refused.json()["error"]["message"]
    answer = httpx.post(f"{server.url}/darts/v1/sessions", json={"size": 4, "extra": 2, "policy": "off"})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "extra"
    answer = httpx.post(f"{server.url}/darts/v1/sessions", json={"size": 0})
    assert answer.status_code == 400
    assert httpx.get(f"{server.url}/darts/v1/sessions/ses-unknown").status_code == 404
    assert httpx.get(f"{server.url}/darts/v1/session-groups/unknown/events").status_code == 404
    for wrong in (b'{"reward": NaN}', b'{"reward": 1e999}', b'{"reward": "1"}', b'{"metadata": {"x": NaN}}', b"["):
        answer = httpx.post(f"{server.url}/darts/v1/sessions/{session['id']}:end", content=wrong)
        assert answer.status_code == 400, wrong
    end(server, session, reward=1)
    end(server, session, reward=1)
    again = httpx.post(f"{server.url}/darts/v1/sessions/{session['id']}:end", json={"reward": 2})
    assert again.status_code == 409


def test_events_stream_until_the_group_ends(server: Server) -> None:
    group = create(server, size=1, extra=0, policy="off")
    (session,) = group["sessions"]
    url = f"{server.url}/darts/v1/sessions/{session['id']}/events"
    timer = threading.Timer(0.5, lambda: end(server, session))
    timer.start()
    with httpx.stream("GET", url, headers={"Accept": "text/event-stream"}, timeout=60) as response:
        lines = [line for line in response.iter_lines() if line.startswith(("id:", "event:"))]
    timer.join()
    assert lines == ["id: 1", "event: started", "id: 2", "event: ended", "id: 3", "event: completed"]
    assert httpx.get(url, params={"after": 3, "wait": 0}).json() == {"events": [], "next": 3}


def test_a_harness_that_leaves_a_turn_may_send_it_again(server: Server) -> None:
    group = create(server, size=1, extra=0, policy="off")
    (session,) = group["sessions"]
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{session['base_url']}/completions", json=LONG, timeout=0.05)
    answer = complete(session)
    assert answer.status_code == 200
    state = end(server, session)
    assert state["turns"] == 1
    assert len(read(server, session)["rows"]) == 1


def turns_of_all_routes(session: dict[str, Any]) -> dict[str, httpx.Response]:
    """Send a short turn to each generation route below the base URL, whole and streamed."""
    chat = {"model": "tiny", "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 3}
    tool = {"type": "function", "function": {"name": "calc", "parameters": {"type": "object", "properties": {}}}}
    sampling = {"max_tokens": 3}
    bodies: dict[str, dict[str, Any]] = {
        "/completions": {"model": "tiny", "prompt": PROMPT, "max_tokens": 3},
        "/chat/completions": {**chat, "tools": [tool], "tool_choice": "none"},
        "/responses": {"model": "tiny", "input": PROMPT, "max_output_tokens": 3},
        "/messages": chat,
        "/inference/v1/generate": {"model": "tiny", "token_ids": [5, 6, 7], "sampling_params": sampling},
    }
    answers = {}
    for path, body in bodies.items():
        for stream in (False, True):
            url = session["base_url"] + path
            answers[f"{path} {stream}"] = httpx.post(url, json={**body, "stream": stream}, timeout=60)
    return answers


def test_turns_on_every_route_say_the_state_of_their_session(server: Server) -> None:
    group = create(server, size=1, extra=0, policy="off")
    (session,) = group["sessions"]
    answers = turns_of_all_routes(session)
    for number, (name, answer) in enumerate(answers.items(), 1):
        assert answer.status_code == 200, (name, answer.text)
        if name.endswith("True"):
            lines = [line for line in answer.text.splitlines() if "darts_session" in line]
            assert len(lines) == 1, name
            field = json.loads(lines[0].removeprefix("data: "))["darts_session"]
        else:
            field = answer.json()["darts_session"]
            assert f"turns={number}; tokens={3 * number}" in answer.headers["X-Darts-Session"]
        assert (field["state"], field["turns"], field["tokens"]) == ("open", number, 3 * number), name
    end(server, session)
    for name, answer in turns_of_all_routes(session).items():
        assert answer.status_code == 410, name
        assert answer.json()["error"]["type"] == "darts_session_over", name


def test_a_turn_ends_on_the_engine_when_its_harness_ends_the_session(server: Server) -> None:
    group = create(server, size=1, extra=0, policy="off")
    (session,) = group["sessions"]
    with ThreadPoolExecutor(2) as pool:
        turns = [pool.submit(complete, session, **LONG, stream=stream) for stream in (False, True)]
        while read(server, session)["tokens"] < 2:
            pass
        state = end(server, session)
        assert state["running_turns"] == 0
        for turn in turns:
            assert '"finish_reason":"abort"' in turn.result(60).text
    assert read(server, session)["tokens"] == state["tokens"]


def test_a_stop_aborts_no_other_request_with_the_same_request_id_and_counts_no_token_of_it(server: Server) -> None:
    group = create(server, size=2, extra=0, policy="off")
    first, second = group["sessions"]

    def run(base_url: str, max_tokens: int) -> httpx.Response:
        headers = {"X-Request-Id": "one-for-all", "X-Darts-Policy": "off"}
        body = {**LONG, "max_tokens": max_tokens}
        return httpx.post(f"{base_url}/completions", json=body, headers=headers, timeout=60)

    longest: Any = LONG["max_tokens"]
    urls = {f"{server.url}/v1": longest, first["base_url"]: longest - 5, second["base_url"]: longest - 10}
    with ThreadPoolExecutor(3) as pool:
        answers = [pool.submit(run, *each) for each in urls.items()]
        while min(read(server, session)["tokens"] for session in (first, second)) < 1:
            pass
        end(server, first)
    choices = [answer.result().json()["choices"][0] for answer in answers]
    assert [choice["finish_reason"] for choice in choices] == ["length", "abort", "length"]
    assert read(server, second)["tokens"] == longest - 10
    end(server, second)


def test_tokens_of_a_turn_that_its_harness_has_left_count_in_the_length(server: Server) -> None:
    group = create(server, size=1, extra=0, policy="off")
    (session,) = group["sessions"]
    before = 0
    for stream in (False, True):
        with suppress(httpx.ReadTimeout):
            url = f"{session['base_url']}/completions"
            with httpx.stream("POST", url, json={**LONG, "stream": stream}, timeout=0.3) as answer:
                for _ in zip(range(20), answer.iter_lines(), strict=False):
                    pass
        while read(server, session)["running_turns"]:
            pass
        state = read(server, session)
        assert before < state["tokens"] < before + 150
        assert state["turns"] == 0
        before = state["tokens"]
    state = end(server, session)
    assert (state["tokens"], state["turns"]) == (before, 0)


def test_metadata_comes_back_as_it_was_sent_and_wrong_paths_find_nothing(server: Server) -> None:
    metadata = {"large": 2**70, "text": "\u00e9", "none": None, "deep": [[[]]]}
    group = create(server, size=1, extra=0, policy="off", metadata=metadata)
    (session,) = group["sessions"]
    assert end(server, session, metadata=metadata)["metadata"] == metadata
    assert read(server, session)["metadata"] == metadata
    url = f"{server.url}/darts/v1/session-groups/{group['group_id']}"
    assert httpx.get(url).json()["metadata"] == metadata
    answer = httpx.post(f"{server.url}/darts/v1/sessions", json={"size": 1, "metadata": {"a": "a" * (1 << 20)}})
    assert answer.status_code == 413
    # More events than there are, and ids with colons, slashes, and other characters.
    answer = httpx.get(f"{url}/events", params={"after": 10**20, "wait": 0})
    assert answer.json() == {"events": [], "next": 10**20}
    for name in ("a:b", "a:b:end", "a%2Fb", "a%3Ab", "%00", "%ff", "x" * 5000):
        for method, path in (("GET", ""), ("POST", ":end"), ("GET", "/events"), ("POST", "/v1/completions")):
            answer = httpx.request(method, f"{server.url}/darts/v1/sessions/{name}{path}", timeout=60)
            assert answer.status_code in (400, 404, 405), (name, path)
    encoded = session["base_url"].replace("ses-", "ses%2D")
    assert complete({"base_url": encoded}).status_code == 410
    assert httpx.head(f"{server.url}/darts/v1/sessions/{session['id']}").status_code == 405


def test_the_openai_client_sends_a_request_of_a_session_that_is_over_once(server: Server) -> None:
    group = create(server, size=1, extra=0, policy="off", over_status=409)
    (session,) = group["sessions"]
    end(server, session)
    client = openai.OpenAI(base_url=session["base_url"], api_key=session["api_key"])
    before = server.metric("darts_session_requests_refused_total")
    with pytest.raises(openai.ConflictError, match="send no further request"):
        client.completions.create(model="tiny", prompt=PROMPT)
    assert server.metric("darts_session_requests_refused_total") == before + 1


TURNS: dict[str, tuple[str, dict[str, Any]]] = {
    "completions": ("completions", {"prompt": PROMPT, "return_token_ids": True, "logprobs": 0}),
    "chat": ("chat/completions", {"messages": [{"role": "user", "content": PROMPT}], "logprobs": True}),
    "tokens": ("inference/v1/generate", {"token_ids": [5, 6, 7], "sampling_params": {"logprobs": 0}}),
}


@pytest.mark.parametrize("stopped_as", ["abort", "length"])
@pytest.mark.parametrize("route", TURNS)
def test_a_session_that_is_over_may_get_answers_without_tokens(server: Server, route: str, stopped_as: str) -> None:
    group = create(server, size=1, extra=0, policy="off", over_status=200, stopped_as=stopped_as)
    (session,) = group["sessions"]
    end(server, session)
    before = server.metric("darts_session_requests_refused_total")
    path, body = TURNS[route]
    url = f"{session['base_url'].removesuffix('/v1') if path.startswith('inference') else session['base_url']}/{path}"
    answer = httpx.post(url, json=body | {"model": "tiny"}, timeout=60)
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    assert choice["finish_reason"] == stopped_as
    assert "state=over" in answer.headers["X-Darts-Session"]
    if route == "completions":
        assert choice["token_ids"] == choice["logprobs"]["token_logprobs"] == []
        assert choice["prompt_token_ids"]
    elif route == "chat":
        assert choice["message"]["content"] in ("", None)
    else:
        assert choice["token_ids"] == []
    if route != "tokens":
        assert answer.json()["darts_session"]["state"] == "over"
        streamed = httpx.post(url, json=body | {"model": "tiny", "stream": True}, timeout=60)
        events = [json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: {")]
        reasons = [choice["finish_reason"] for event in events for choice in event["choices"]]
        assert reasons[-1] == stopped_as
    assert server.metric("darts_session_requests_refused_total") > before
    # Nothing reaches the engine, and nothing is added to the session.
    assert read(server, session)["turns"] == 0


def test_turns_on_the_token_route_have_the_header(server: Server) -> None:
    group = create(server, size=1, extra=0, policy="off")
    (session,) = group["sessions"]
    url = f"{session['base_url'].removesuffix('/v1')}/inference/v1/generate"
    body = {"model": "tiny", "token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 5}}
    answer = httpx.post(url, json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    assert "state=open; end=None; turns=1" in answer.headers["X-Darts-Session"]
    end(server, session)
    (row,) = read(server, session)["rows"]
    assert row["token_ids"] == [5, 6, 7, *answer.json()["choices"][0]["token_ids"]]
