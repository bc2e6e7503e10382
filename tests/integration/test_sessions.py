"""Groups of sessions on a real engine: turns on every route, stops, keys, streams and rows to train on."""

import json
import threading
from typing import Any

import httpx
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
    end(server, session)
    again = httpx.post(f"{server.url}/darts/v1/sessions/{session['id']}:end", json={})
    assert again.status_code == 409


def test_events_stream_until_the_group_ends(server: Server) -> None:
    group = create(server, size=1, extra=0, policy="off")
    (session,) = group["sessions"]
    url = f"{server.url}/darts/v1/sessions/{session['id']}/events"
    timer = threading.Timer(0.5, lambda: end(server, session))
    timer.start()
    with httpx.stream("GET", url, headers={"Accept": "text/event-stream"}, timeout=60) as response:
        lines = [line for line in response.iter_lines() if line.startswith("event:")]
    timer.join()
    assert lines == ["event: started", "event: ended", "event: completed"]
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
