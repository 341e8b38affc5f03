"""The HTML page of a study."""

from html.parser import HTMLParser

from fedjax_meta.study import page, run
from tests.study.common import TREE, Silent, study


class Checked(HTMLParser):
    """Counts tables and scripts, and sees whether every tag is closed."""

    def __init__(self):
        super().__init__()
        self.open, self.seen, self.words = [], [], []

    def handle_starttag(self, tag, attrs):
        self.seen.append(tag)
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


def test_a_page_is_well_formed_and_names_from_users_are_text_in_it(tmp_path):
    systems = {**TREE["systems"], "local": {**TREE["systems"]["local"], "title": "<script>x</script> & co"}}
    published = [{"system": "fedavg", "scenario": "pairs", "value": 81.5, "note": "Table 3 <b>"}]
    chosen = study(rounds=2, seeds=[1], systems=systems, title="A <i>title</i>", published=published)
    outcomes = run.run(chosen, tmp_path / "run", watcher=Silent())
    built = {name: scenario.build() for name, scenario in chosen.scenarios.items()}
    page.write(tmp_path / "page.html", chosen, built, outcomes, "fedjax-meta run <x>")
    parser = Checked()
    parser.feed((tmp_path / "page.html").read_text(encoding="utf-8"))
    assert parser.open == [] and "script" not in parser.seen and "b" not in parser.seen
    text = " ".join(parser.words)
    for word in ("<script>x</script> & co", "A <i>title</i>", "81.50", "fedjax-meta run <x>", "majority class"):
        assert word in text
