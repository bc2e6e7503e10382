from darts_server.settings import Settings
from tests.settings.table import PAGE, SECTIONS, page


def test_the_page_of_settings_is_up_to_date() -> None:
    assert PAGE.read_text() == page(), "run scripts/settings"


def test_sections_begin_with_settings_that_exist() -> None:
    assert SECTIONS.keys() <= Settings.model_fields.keys()
