import re
from pathlib import Path

from darts_server.http.resources.queue_models import QueueIn

PAGE = Path(__file__).parents[3] / "docs/queue.md"


def test_the_puts_of_the_documentation_are_accepted() -> None:
    bodies = re.findall(r"/darts/v1/queue -d '(.*?)'", PAGE.read_text(), re.DOTALL)
    puts = [QueueIn.model_validate_json(body) for body in bodies]
    assert {put.job for put in puts} == {"train"}
    assert [(len(put.prompts), put.taken) for put in puts] == [(2, None), (0, 0)]
