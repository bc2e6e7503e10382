from tests.deploy.names import ours
from tests.deploy.table import PAGE, page


def test_the_page_of_metrics_is_up_to_date() -> None:
    assert PAGE.read_text() == page(ours()), "run scripts/metrics"


def test_metric_names_follow_the_conventions_of_prometheus() -> None:
    for metric in ours():
        assert metric.name.startswith("darts_")
        assert metric.name.endswith("_total") == (metric.kind == "counter")
        assert not metric.name.endswith(("_bucket", "_sum", "_count", "_created", "_ms", "_milliseconds"))
        assert metric.text.endswith(".")
        assert not {"le", "quantile", "job", "instance"} & set(metric.labels)
