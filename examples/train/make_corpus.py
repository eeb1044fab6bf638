"""Turns the unpacked text packages into one corpus file.

A corpus is UTF-8 text made of documents; each starts with a line "\\f<source>", where source is bible, postgresql or
python. read_corpus() is the only reader of that format.
"""

import argparse
import re
from html.parser import HTMLParser
from pathlib import Path

SOURCES = ("bible", "postgresql", "python")


def read_corpus(path):
    """Yields (source, text) for every document, in file order."""
    for document in Path(path).read_text(encoding="utf-8").split("\f")[1:]:
        source, _, text = document.partition("\n")
        if source not in SOURCES:
            raise ValueError(f"{path}: unknown source {source!r}, expected one of {', '.join(SOURCES)}")
        yield source, text


BLOCK_TAGS = frozenset(("p", "div", "h1", "h2", "h3", "h4", "h5", "li", "tr", "dt", "dd", "pre", "table", "br"))


class _PageText(HTMLParser):
    """Text of a documentation page without its navigation bars; <pre> keeps its lines."""

    def __init__(self):
        super().__init__()
        self.parts = []
        self.hidden_divs = 0
        self.pre = 0
        self.in_title = False

    def handle_starttag(self, tag, attrs):
        if tag == "div" and (self.hidden_divs or dict(attrs).get("class") in ("navheader", "navfooter", "toc")):
            self.hidden_divs += 1
        self.in_title = self.in_title or tag == "title"
        self.pre += tag == "pre"
        if tag in BLOCK_TAGS:
            self.parts.append("\n")

    def handle_endtag(self, tag):
        if tag == "div" and self.hidden_divs:
            self.hidden_divs -= 1
        if tag == "title":
            self.in_title = False
        self.pre -= tag == "pre"
        if tag in BLOCK_TAGS:
            self.parts.append("\n")

    def handle_data(self, data):
        if not self.hidden_divs and not self.in_title:
            self.parts.append(data if self.pre else re.sub(r"\s+", " ", data))


def html_text(page):
    parser = _PageText()
    parser.feed(page)
    lines = [line.rstrip() for line in "".join(parser.parts).split("\n")]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip() + "\n"


def bible_chapters(text):
    """One document a chapter: "Ge1:1 In the beginning ..." becomes the line "1 In the beginning ..." under "Ge 1"."""
    chapters = {}
    for line in text.splitlines():
        match = re.match(r"(\d?\s?[A-Za-z]+)\s?(\d+):(\d+) (.*)", line)
        if match:
            book, chapter, verse, words = match.groups()
            chapters.setdefault(f"{book} {chapter}", []).append(f"{verse} {words}")
    return [f"{name}\n" + "\n".join(verses) + "\n" for name, verses in chapters.items()]


def read_files(folder, pattern):
    """Texts of the matching files, each file once: the packages link to some folders under a second name."""
    return [path.read_text(encoding="utf-8") for path in sorted({path.resolve() for path in folder.glob(pattern)})]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bible", type=Path, required=True, help="output of `bible -f gen1:1-rev22:21`")
    parser.add_argument("--docs", type=Path, required=True, help="folder usr/share/doc of the unpacked packages")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()

    documents = {
        "bible": bible_chapters(args.bible.read_text(encoding="latin-1")),
        "postgresql": [html_text(page) for page in read_files(args.docs, "postgresql-doc-*/html/*.html")],
        "python": read_files(args.docs, "python3*/html/_sources/**/*.rst.txt"),
    }
    with args.out.open("w", encoding="utf-8") as out:
        for source in SOURCES:
            kept = [text.replace("\f", "\n") for text in documents[source]]
            if not kept:
                raise SystemExit(f"no document found for {source} under {args.docs}")
            out.writelines(f"\f{source}\n{text}" for text in kept)
            print(f"{source}: {len(kept)} documents, {sum(len(t.encode()) for t in kept)} bytes")


if __name__ == "__main__":
    main()
