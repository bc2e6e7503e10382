from tests.deploy.names import ours
from tests.deploy.table import PAGE, page


def test_the_page_of_metrics_is_what_the_code_says() -> None:
    assert PAGE.read_text() == page(ours()), "run scripts/metrics"


def test_metrics_are_named_as_prometheus_wants_them() -> None:
    for metric in ours():
        assert metric.name.startswith("darts_")
        assert metric.name.endswith("_total") == (metric.kind == "counter")
        assert not metric.name.endswith(("_bucket", "_sum", "_count", "_created", "_ms", "_milliseconds"))
        assert metric.text.endswith(".")
        assert not {"le", "quantile", "job", "instance"} & set(metric.labels)
