"""What the audit says of what it was told."""

from tests.deploy.audit import told

UNKNOWN = {"name": "ours", "skip_reason": "not found"}
GOOD = {"name": "httpx", "version": "1", "vulns": []}
BAD = {"name": "jinja2", "version": "2.4.1", "vulns": [{"id": "CVE-1", "fix_versions": ["2.10.1"]}, {"id": "CVE-2"}]}


def test_a_vulnerable_package_fails_and_is_named_with_the_remedy() -> None:
    lines, found = told([GOOD, BAD, UNKNOWN])
    assert found
    assert lines == [
        "audit: jinja2 2.4.1: CVE-1, mended in 2.10.1",
        "audit: jinja2 2.4.1: CVE-2, not mended yet",
        "audit: 2 of 3 packages looked up, 2 vulnerabilities",
    ]


def test_what_nobody_was_asked_about_is_not_called_sound() -> None:
    assert told([UNKNOWN, UNKNOWN]) == (["audit: not made, no service knows any of the 2 packages"], False)
    assert told([GOOD, UNKNOWN]) == (["audit: 1 of 2 packages looked up, 0 vulnerabilities"], False)
