from tests.deploy.audit import summarize

UNKNOWN = {"name": "ours", "skip_reason": "not found"}
GOOD = {"name": "httpx", "version": "1", "vulns": []}
BAD = {"name": "jinja2", "version": "2.4.1", "vulns": [{"id": "CVE-1", "fix_versions": ["2.10.1"]}, {"id": "CVE-2"}]}


def test_a_vulnerable_package_fails_and_is_named_with_the_remedy() -> None:
    lines, found = summarize([GOOD, BAD, UNKNOWN])
    assert found
    assert lines == [
        "audit: jinja2 2.4.1: CVE-1, fixed in 2.10.1",
        "audit: jinja2 2.4.1: CVE-2, no fix yet",
        "audit: 2 of 3 packages looked up, 2 vulnerabilities",
    ]


def test_packages_that_no_service_lists_are_reported_as_not_audited() -> None:
    assert summarize([UNKNOWN, UNKNOWN]) == (["audit: not made, no service lists any of the 2 packages"], False)
    assert summarize([GOOD, UNKNOWN]) == (["audit: 1 of 2 packages looked up, 0 vulnerabilities"], False)
