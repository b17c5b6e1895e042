"""A page as a test reads it, and what holds for every page."""

from html.parser import HTMLParser

from starlette.testclient import TestClient

from lospmm_server.pages import HEADERS

#: What a browser accepts.
BROWSER = {"Accept": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"}


class Page(HTMLParser):
    """The tags of a page; a page that is not well formed fails here."""

    VOID = frozenset({"meta", "link", "input"})

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self._open: list[str] = []
        self.feed(text.replace("<wbr>", ""))
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len({name for name, _ in attrs}) == len(attrs), f"an attribute of {tag} twice"
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words += data.split()

    @property
    def text(self) -> str:
        return " ".join(self.words)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def page(client: TestClient, path: str, status: int = 200) -> Page:
    response = client.get(path)
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    for name, value in HEADERS.items():
        assert response.headers[name] == value
    found = Page(response.text)
    ids = [attributes["id"] for _, attributes in found.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    for _, attributes in found.tags:  # what the policy would refuse, and a reader would not hear
        assert not any(name == "style" or name.startswith("on") for name in attributes)
        for name in ("aria-labelledby", "aria-describedby"):
            assert set((attributes.get(name) or "").split()) <= set(ids)
    assert all(attributes.get("scope") in ("row", "col") for attributes in found.all("th"))
    assert "alert(1)" not in " ".join(f"{name} {attributes}" for name, attributes in found.tags if name == "script")
    return found
