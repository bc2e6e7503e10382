"""State after a process was killed or its disk was full."""

import time
from pathlib import Path

from darts_server.store import Store
from tests.store.children import start
from tests.store.reading import saved_documents


def test_a_killed_process_loses_only_the_last_puts(tmp_path: Path, nightly: bool) -> None:
    # Older puts must survive. On an idle machine one second is enough; on a busy one the writer starts late.
    loss = 6.0 if nightly else 3.0
    with start("put_for_ever", tmp_path) as child:
        assert child.stdout is not None
        said = [child.stdout.readline()]
        began = time.monotonic()
        while time.monotonic() < began + loss + 0.3:
            said.append(child.stdout.readline())
        killed = time.monotonic()
        child.kill()
        said += child.stdout.readlines()
    put_at = {int(line.split()[0]): float(line.split()[1]) for line in said if line.endswith("\n")}
    old = [number for number, at in put_at.items() if at < killed - loss]
    with Store(tmp_path) as store:
        found = saved_documents(store, "prompt")
    assert old
    assert all(found.get(f"{number:08}") == {"number": number} for number in old)
    # Only the end is lost.
    assert list(found) == [f"{number:08}" for number in range(len(found))]


def test_a_restore_that_is_killed_leaves_the_old_or_the_new_state(tmp_path: Path, nightly: bool) -> None:
    for attempt in range(8) if nightly else (2,):
        with start("restore_for_ever", tmp_path) as child:
            assert child.stdout is not None
            for _ in range(2):
                child.stdout.readline()
            time.sleep(0.011 * attempt)
            child.kill()
        with Store(tmp_path) as store:
            numbers = [document["number"] for document in saved_documents(store, "prompt").values()]
        assert numbers in ([0] * 3000, [1] * 3001)


def test_a_write_that_fails_on_a_full_disk_is_retried_and_loses_nothing(tmp_path: Path) -> None:
    with start("run_out_of_space", tmp_path) as child:
        said, errors = child.communicate(timeout=120)
    assert said.splitlines() == [
        "flush failed True",
        "restore failed",
        "True 2001 {'text': 'newest'} {'number': 1}",
        "recovered",
    ], errors
    # The line is logged once, and not at each try.
    assert errors.count("cannot be written") == 1
    # The child was killed after it had recovered.
    with Store(tmp_path) as store:
        assert store.count("prompt") == 2001
        assert store.get("prompt", "0") == {"text": "newest"}


def test_a_close_that_cannot_write_raises(tmp_path: Path) -> None:
    with start("close_without_space", tmp_path) as child:
        said, errors = child.communicate(timeout=120)
    assert (said, child.returncode) == ("close failed\n", 0), errors
