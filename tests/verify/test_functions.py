"""Functions of all forms get the columns that they know from their trainer."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from darts_server.verify.channel import Item, Task
from darts_server.verify.functions import Function, LoadError, load_function, trl_call_key
from darts_server.verify.specs import Kind

CODE = str(Path(__file__).with_name("user_code.py"))
MESSAGES = json.dumps([{"role": "user", "content": "1+1"}]).encode()


def function(name: str, kind: Kind = Kind.FUNCTION) -> Function:
    return load_function(Task(kind, CODE, name, 0))[0]


def item(text: str, messages: bytes | None = None, prompt: str | None = "1+1", **columns: Any) -> Item:
    asked = None if messages or prompt is None else prompt.encode()
    return Item(text.encode(), json.dumps(columns).encode(), messages, asked, token_ids=list(range(len(text))))


# --- answers ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "pattern", "text", "answer", "reward"),
    [
        (Kind.BOXED, "", r"\boxed{41} no: \boxed{ 42 }", "42", True),
        (Kind.BOXED, "", r"\boxed{41}", 42, False),
        (Kind.BOXED, "", r"\boxed{42}", 42, True),
        (Kind.BOXED, "", r"\boxed{a   b}", " a b", True),
        (Kind.BOXED, "", "42", "42", False),
        (Kind.BOXED, "", r"\boxed{}", "", False),
        (Kind.REGEX, r"#### (-?\d+)", "#### 1\n#### -7", "-7", True),
        (Kind.REGEX, r"#### (-?\d+)", "-7", "-7", False),
    ],
)
def test_the_last_answer_is_compared_with_the_metadata(
    kind: Kind, pattern: str, text: str, answer: Any, reward: bool
) -> None:
    run, is_trl = load_function(Task(kind, pattern, "", 0))
    assert run([item(text, answer=answer)]) == [reward]
    assert not is_trl


def test_a_missing_answer_is_an_error_that_names_the_column() -> None:
    run, _ = load_function(Task(Kind.BOXED, "", "", 0))
    for metadata in (b"{}", None, b"[1]"):
        with pytest.raises(ValueError, match="metadata has no 'answer', which the verifier needs"):
            run([Item(b"", metadata)])


# --- the library math-verify --------------------------------------------------


@pytest.mark.parametrize(
    ("text", "answer", "reward"),
    [
        (r"so \boxed{\frac{1}{2}}", "0.5", True),
        (r"so $\frac{2}{4}$", r"\frac12", True),
        (r"\boxed{\{1, 2\}}", r"\{2, 1\}", True),
        ("The answer is 7.", "8", False),
        ("no number", "8", False),
    ],
)
def test_math_verify_compares_values(text: str, answer: str, reward: bool) -> None:
    run, _ = load_function(Task(Kind.MATH_VERIFY, "", "", 0))
    assert run([item(text, answer=answer)]) == [reward]


def test_an_answer_that_math_verify_cannot_parse_is_an_error() -> None:
    run, _ = load_function(Task(Kind.MATH_VERIFY, "", "", 0))
    with pytest.raises(ValueError, match=r"cannot parse metadata.answer = ''"):
        run([item("1", answer="")])


def test_a_missing_library_is_an_error_that_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    # Importing a module that is None fails.
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(LoadError, match=r"math-verify cannot be imported .*; pip install 'darts-server\[math\]'"):
        load_function(Task(Kind.MATH_VERIFY, "", "", 0))


# --- veRL -------------------------------------------------------------------


def test_functions_of_verls_form_get_verls_columns() -> None:
    row: dict[str, Any] = {"data_source": "gsm8k", "ground_truth": "x", "extra_info": {"index": 7}, "other": 1}
    assert function("columns", Kind.VERL)([item("a", **row)]) == [1.0]
    assert function("compute_score")([item(" x", **row)]) == [1.0]


def test_a_column_that_verls_function_needs_may_not_be_missing() -> None:
    # As in veRL, data_source is None if the data set has none.
    assert function("compute_score")([item("x", ground_truth="x")]) == [1.0]
    with pytest.raises(ValueError, match="metadata has no 'ground_truth'"):
        function("compute_score")([item("x", data_source="gsm8k")])


# --- TRL --------------------------------------------------------------------


def test_functions_of_trls_form_get_lists_and_columns() -> None:
    items = [item("2", answer="2", level=1), item("3", answer="2", level=2)]
    assert function("with_columns")(items) == [1.0, 0.0]
    assert function("prompts_too")(items) == [1.0, 1.0]
    assert load_function(Task(Kind.FUNCTION, CODE, "lengths", 0))[1]


def test_completions_are_messages_if_the_prompt_was() -> None:
    items = [item("2", MESSAGES, answer="2")]
    assert function("with_columns")(items) == [1.0]
    assert function("prompts_too")(items) == [1.0]


def test_the_column_prompt_is_the_prompt_of_token_ids() -> None:
    columns = json.dumps({"prompt": "1+1"}).encode()
    assert function("prompts_too")([Item(b"2", columns)]) == [1.0]


def test_answers_of_one_call_have_the_same_columns_and_the_same_form_of_prompt() -> None:
    keys = [
        trl_call_key(each) for each in (item("a", a=1, b=2), item("b", b=1, a=1), item("c", a=1), item("c", MESSAGES))
    ]
    assert keys[0] == keys[1]
    assert len(set(keys)) == 3


# --- loading ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        (
            "missing",
            r"user_code\.py has no function missing; its functions are async_lengths, async_score, batch_size",
        ),
        ("NOT_A_FUNCTION", "has no function NOT_A_FUNCTION"),
        ("neither", r"neither veRL's parameters .* nor TRL's .* write verl:\.\.\. or trl:\.\.\. to choose"),
        ("columns", "neither veRL's"),
    ],
)
def test_a_function_that_cannot_be_used_is_an_error_with_the_remedy(name: str, complaint: str) -> None:
    with pytest.raises(LoadError, match=complaint):
        function(name)


def test_a_file_can_import_the_modules_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "beside_it.py").write_text("REWARD = 0.75")
    file = tmp_path / "rewards.py"
    file.write_text("import beside_it\ndef score(solution_str, **_):\n    return beside_it.REWARD\n")
    run, _ = load_function(Task(Kind.FUNCTION, str(file), "score", 0))
    assert run([item("a", ground_truth="")]) == [0.75]
