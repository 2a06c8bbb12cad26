#!/usr/bin/env python3
"""Makes one site of the public headers and the guide: a folder with index.html that opens from disk.

Runs in the root of the tree, by which files are named. Fails, with a line for each, if a public symbol has no comment,
Doxygen warns of something else, or the site has a link to nothing.
"""

import argparse
import html
import os
import posixpath
import re
import shutil
import subprocess
import sys
import tempfile
import urllib.parse
import xml.etree.ElementTree

# Not asked for: what the language or the class says of a member, and what a base class has declared.
NEEDS_NO_COMMENT = re.compile(r"=(delete|default)\b| override\b|Member (~|operator(==|!=|=)\(|"
                              r"(?P<name>\w+)\(.* (class|struct) (\S*::)?(?P=name)(<.*)? is)")


def read(path):
    with open(path, encoding="utf-8") as file:
        return file.read()


def write(path, text):
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)


# --- Headers -----------------------------------------------------------------

LINE = re.compile(r"""(?P<code>(?:"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])'|/(?!/)|[^"/])*)(?P<comment>//.*)?""")
HOLDS_MEMBERS = re.compile(r"(?:^|[\s:>])(namespace|class|struct|union|enum|extern)\b[^()=]*$")
# What the language says of a member.
SAYS_ALL = re.compile(r"= (delete|default);|^ *(friend|virtual ~|~|\})|operator=\(|\b(\w+)\(\3&&")


class Scopes:
    """Follows braces, to tell declarations from bodies of functions and from initializers."""

    def __init__(self):
        self.open = []  # for each brace the word that lets members be behind it, or None
        self.statement = ""

    def read(self, code):
        for part in re.findall(r"[{};]|[^{};]+", re.sub(r'"(\\.|[^"\\])*"|' r"'(\\.|[^'\\])'", "", code)):
            if part == "{":
                found = HOLDS_MEMBERS.search(self.statement)
                self.open.append(found and found[1])
            elif part == "}" and self.open:
                self.open.pop()
            self.statement = "" if part in "{};" else f"{self.statement}{part} "

    def has_members(self):
        return all(self.open)

    def begins(self):
        """Whether the next code begins a declaration, or an enumerator."""
        ended = r"(^|,)\s*$" if self.open[-1:] == ["enum"] else r"(^|(public|protected|private):)\s*$"
        return self.has_members() and re.search(ended, self.statement) is not None


def escaped(text):
    """Text in which nothing is a command to Doxygen except what stands in backticks."""
    parts = text.split("`")
    for i in range(0, len(parts), 2):
        parts[i] = re.sub(r"([\\@<>#%&*_|\[\]])", r"\\\1", parts[i]).replace('"', "&quot;")  # in quotes \ stays
        parts[i] = re.sub(r"^(\d+)\.", r"\1\\.", parts[i])
        # A sentence begins with a word of English, even if a class has that name.
        parts[i] = re.sub(r"(^|[.:] )([A-Z][a-z]+)\b(?!::|\()", r"\1%\2", parts[i])
    return "`".join(parts)


def rendered(texts):
    """The lines of a comment in Doxygen's language; indented ones are a list of terms, code, or as they stand."""
    result = []
    while texts:
        end = next((i for i, text in enumerate(texts) if text and not text.startswith("  ")), len(texts))
        while end and not texts[end - 1]:
            end -= 1
        block, texts = (texts[:end], texts[end:]) if end and texts[0] else (None, texts)
        if block is None:
            result.append(escaped(texts[0]))
            texts = texts[1:]
            continue
        first = re.match(r" +\S.*?  +(?=\S)", block[0])
        column = first.end() if first else 0
        terms = [text[:column].strip() for text in block]
        items = None  # (does it begin one, text) of each line
        are_terms = all(not term or text[column - 2:column] == "  " for term, text in zip(terms, block))
        if sum(map(bool, terms)) > 1 and are_terms:
            items = [(bool(term), (f"`{term.rstrip(':')}`: " if term else "") + escaped(text[column:]))
                     for term, text in zip(terms, block)]
        elif block[0].lstrip().startswith("- "):
            items = [(text.lstrip().startswith("- "), escaped(re.sub("^ *(- )?", "", text))) for text in block]
        if items:
            result += [("<ul>" if i == 0 else "</li>") + f"<li>{text}" if begins else text
                       for i, (begins, text) in enumerate(items)]
            result[-1] += "</li></ul>"
            continue
        command = "code{.cpp}" if re.search(r"\);|[{}]| = ", "\n".join(block)) else "verbatim"
        if result:
            result[-1] += f" @{command}"
        else:
            block[0] = f"@{command} {block[0]}"
        result += block[:-1] + [f"{block[-1]} @end{command.split('{')[0]}"]
    return result


def documented(text):
    """A header with its comments as Doxygen wants them, line for line.

    A comment belongs to the declaration below it, and to those that follow that one with neither a blank line nor a
    comment of their own. If a blank line follows the comment it belongs to the file.
    """
    text = re.sub(r"^TORCH_MODULE\((\w+)\);", r"/** Holds a \1Impl; copies hold the same one. */ "
                  r"class \1 : public torch::nn::ModuleHolder<\1Impl> {};", text, flags=re.M)
    guard = re.search(r"^#ifndef (\w+_H_)$", text, re.M)
    lines = text.split("\n")
    result = []
    scopes = Scopes()
    inherited = ""  # what the declaration above says of the next one, too
    is_below = False  # the comment is right above
    column = None  # of a comment behind code, which may go on
    while len(result) < len(lines):
        line = lines[len(result)]
        rest = lines[len(result):]
        match = re.match(r" *//", line)
        if match and match.end() == column:
            result.append(line.replace("//", "///<", 1))
            continue
        column = None
        if match and scopes.begins():
            prefix = f"{match[0]}/"
            block = [other[match.end():] for other in rest]
            block = block[:next(i for i, other in enumerate(rest) if not other.startswith(match[0]))]
            end = len(block)
            title = re.match(r" --- (.*?) -+$", block[0])
            texts = ["" if "NOLINT" in other or re.match(" --- ", other) else other[1:] for other in block]
            texts = rendered(texts)
            if not result and guard:
                texts = ["@file", *texts, ""]  # in place of the guard
            elif not any(texts):
                inherited = prefix = ""
            elif not rest[end]:
                texts = [f"<b>{title[1]}.</b> {texts[1]}", *texts[2:]] if title else texts
                texts[0] = f"@details {texts[0]}"
                texts = ["/** @file", *(f" * {other}" for other in texts[:-1]), f" * {texts[-1]} */"]
                prefix = ""
            else:
                inherited, is_below = " ".join(texts), True
            result += [f"{prefix} {other}".rstrip() if prefix else other for other in texts]
            continue
        if line.startswith("#"):
            end = next(i for i, other in enumerate(rest) if not other.endswith("\\")) + 1
            is_hidden = guard and guard[1] in line or re.match(r"#define \w+_\b", line)
            result += [""] * end if is_hidden else rest[:end]
            inherited, is_below = "", False
            continue
        found = LINE.match(line)
        code, comment = found["code"], found["comment"] or ""
        begins, before = scopes.begins(), scopes.open[:]
        scopes.read(code)
        if "NOLINT" in comment:
            comment = ""
        elif comment and code.strip()[:1] != "}" and scopes.has_members() and scopes.open == before:
            column = found.start("comment") + 2
            comment = comment.replace("//", "///<", 1)
        if is_below:
            is_below = False
        elif not code.strip() or comment or code.endswith(":"):
            inherited = ""
        elif begins and inherited and not re.search(SAYS_ALL, code):
            code = re.sub(r"^ *", lambda indent: f"{indent[0]}/** {inherited} */ ", code)
        if any(before[len(scopes.open):] + scopes.open[len(before):]):
            inherited = ""  # members begin or end
        result.append((code + comment).rstrip())
    return "\n".join(result)


# --- Pages -------------------------------------------------------------------

def name_of(path):
    """The name that Doxygen has for a page, with which the names of its sections begin."""
    return re.sub(r"\W+", "-", path.lower().replace("readme.md", "index").replace(".md", ""))


def anchor(title):
    """What GitHub calls a heading."""
    return re.sub(r"[ -]+", "-", re.sub(r"[^\w\- ]", "", title.lower()))


def page_of(text, path, files):
    """A Markdown file as Doxygen reads it: links lead to `files` of the site, or become plain text."""
    folder = posixpath.dirname(path)
    below, anchors = set(), []

    def is_below(target):
        """Whether the page is in the folder of this README, or the README of a folder there."""
        return path.endswith("README.md") and folder and re.fullmatch(
            r"(?!README)\w+(\.md|/README\.md)", posixpath.relpath(target, folder))

    def link(match):
        text = re.sub(r"\s*\n\s*", " ", match["text"] or match[0])
        if not match["text"]:
            return f"`{text}`" if "'" in text else text  # code, which Doxygen would end at an apostrophe
        if re.match(r"\w+:", match["target"]):
            return f"[{text}]({match['target']})"
        target, _, place = match["target"].partition("#")
        target = posixpath.normpath(posixpath.join(folder, target)) if target else path
        if target not in files:
            return f"`{target}`" if posixpath.basename(target).startswith(text) else text
        if target.endswith(".h"):
            return f'@ref {target} "{text}"'
        if not target.endswith(".md"):
            return f"[{text}]({posixpath.basename(target)})"
        if is_below(target) and target not in below:
            below.add(target)
            return f'@subpage {name_of(target)} "{text}"'
        return f"[{text}]({name_of(target)}.html{f'#{name_of(target)}-{place}' if place else ''})"

    def heading(match):
        anchors.append(anchor(match[2]))
        if match[1] == "#":
            return match[0] if path == "README.md" else f"{match[0]} {{#{name_of(path)}}}"
        count = anchors.count(anchors[-1])
        return f"{match[0]} {{#{name_of(path)}-{anchors[-1]}{f'-{count - 1}' if count > 1 else ''}}}"

    # Blocks of code: those in fences, and lines that are indented behind a blank one.
    block = r"(^```.*?^```$|(?<=\n\n)(?:^ {4}[^\n]*\n|^\n(?= {4}))+)"
    parts = re.split(block, re.sub(r"^<!--.*?-->\n", "", text, flags=re.M), flags=re.M | re.S)
    for i in range(0, len(parts), 2):
        parts[i] = re.sub(r"`[^`]+`|\[(?P<text>(?:`[^`]*`|[^`\[\]])+)\]\((?P<target>[^()\s]+)\)", link, parts[i])
        parts[i] = re.sub(r"\*\*(`[^*]+`)\*\*", r"<b>\1</b>", parts[i])
        parts[i] = re.sub(r"^(#+) (.*)$", heading, parts[i], flags=re.M)
    return "".join(parts)


def namespaces_of(rooms, headers):
    """What Doxygen is told of the headers' namespaces: what docs/rooms.md says of the rooms with their names."""
    names = set(re.findall(r"^namespace (?:fsdp::)?(\w+) \{$", headers, re.M))
    return "".join(f"/** @namespace {'' if room == 'fsdp' else 'fsdp::'}{room}\n{purpose} */\n"
                   for room, purpose in re.findall(r"^\| (\w+) \| (.*?) \| [^|]* \|$", rooms, re.M) if room in names)


# --- The site ----------------------------------------------------------------

def places_of(tagfile):
    """{name: place} of symbols, by all names that only one has: "Options::offload", "Backward()", "Options"."""
    places = {}

    def add(symbol, place, ending=""):
        parts = symbol.split("::")
        for i in range(len(parts)):
            name = "::".join(parts[i:]) + ending
            # Overloads are one symbol, whose first place counts.
            if places.setdefault(name, (symbol, place))[0] != symbol:
                places[name] = (None, None)

    for compound in xml.etree.ElementTree.parse(tagfile).getroot():
        name = compound.findtext("name")
        if compound.get("kind") in ("class", "struct"):
            add(name, compound.findtext("filename"))
        if compound.get("kind") in ("class", "struct", "namespace"):
            for member in compound.iter("member"):
                place = f"{member.findtext('anchorfile')}#{member.findtext('anchor')}"
                add(f"{name}::{member.findtext('name')}", place, "()" if member.get("kind") == "function" else "")
    return {name: place for name, (_, place) in places.items() if place}


def without_symbols(tagfile):
    """The names of files of which the reference has nothing."""
    return [file.findtext("name") for file in xml.etree.ElementTree.parse(tagfile).getroot()
            if file.get("kind") == "file" and file.find("class") is None and file.find("member") is None]


def linked(text, places):
    """A page in which code links to the symbol that it names, also where Doxygen would want the name of its scope."""
    def link(match):
        name = html.unescape(match["code"] or "")
        place = places.get(name) or "::" in name and places.get(f"{name}()")
        # Other words are more often words than symbols.
        is_name = re.search(r"::|\(\)|^[A-Z]\w*[a-z]", name)
        return f'<a class="el" href="{place}">{match[0]}</a>' if is_name and place else match[0]

    return re.sub(r"<a [^>]*>.*?</a>|<code>(?P<code>[^<]*)</code>", link, text)


def dead_links(folder):
    """(page, link) of all links to nothing in the pages of a folder."""
    texts = {page: read(f"{folder}/{page}") for page in sorted(os.listdir(folder)) if page.endswith(".html")}
    anchors = {page: set(re.findall(r'(?:id|name)="([^"]*)"', text)) for page, text in texts.items()}
    for page, text in texts.items():
        for link in re.findall(r'(?:href|src)="([^"]*)"', text):
            path, _, place = urllib.parse.unquote(html.unescape(link)).partition("#")
            if re.match(r"\w+:", path):
                continue
            path = path or page
            if not os.path.exists(f"{folder}/{path}") or place and place not in anchors.get(path, [place]):
                yield page, link


def findings_of(warnings):
    """Doxygen's warnings, but for what needs no comment."""
    return [line for line in warnings.splitlines() if line.strip() and not (
        line.endswith("is not documented.") and NEEDS_NO_COMMENT.search(line))]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--filter", metavar="HEADER", help="only prints the header as Doxygen reads it")
    parser.add_argument("--output", metavar="FOLDER", help="where the site goes")
    parser.add_argument("files", nargs="*", metavar="FILE",
                        help="Doxyfile, headers, Markdown pages, pictures and a style sheet; pages keep this order")
    args = parser.parse_args()
    if args.filter:
        print(documented(read(args.filter)), end="")
        return 0
    if not args.output or not args.files:
        parser.error("--output and files are missing")
    if not shutil.which("doxygen"):
        sys.exit("there is no doxygen on PATH (Debian: apt-get install doxygen)")
    with tempfile.TemporaryDirectory() as scratch:
        sources = [path for path in args.files if path.endswith(".h")]
        pages = [path for path in args.files if path.endswith(".md")]
        texts = {path: read(path) for path in sources + pages}
        made = {f"{name_of(path)}.md": page_of(texts[path], path, args.files) for path in pages}
        made["namespaces.dox"] = namespaces_of(texts.get("docs/rooms.md", ""), "".join(texts[path] for path in sources))
        for name, text in made.items():
            write(f"{scratch}/{name}", text)
            sources.append(f"{scratch}/{name}")
        settings = f"""
INPUT = {" ".join(sources)}
FILTER_PATTERNS = "*.h={sys.executable} {os.path.abspath(__file__)} --filter"
GENERATE_TAGFILE = {scratch}/tags
HTML_EXTRA_FILES = {" ".join(path for path in args.files if path.endswith(".svg"))}
HTML_EXTRA_STYLESHEET = {" ".join(path for path in args.files if path.endswith(".css"))}
OUTPUT_DIRECTORY = {args.output}
STRIP_FROM_INC_PATH = {os.getcwd()}
STRIP_FROM_PATH = {os.getcwd()} {scratch}
USE_MDFILE_AS_MAINPAGE = {scratch}/index.md
WARN_LOGFILE = {scratch}/warnings
"""
        settings += "".join(read(path) for path in args.files if os.path.basename(path) == "Doxyfile")
        os.makedirs(args.output, exist_ok=True)
        subprocess.run(["doxygen", "-"], input=settings, text=True, check=True)
        warnings = read(f"{scratch}/warnings").replace(f"{os.getcwd()}/", "").replace(f"{scratch}/", "")
        places = places_of(f"{scratch}/tags")
        empty = without_symbols(f"{scratch}/tags")
    for name in os.listdir(args.output):
        if name.endswith(".html"):
            text = read(f"{args.output}/{name}")
            if 'name="nested-classes"' not in text:  # all are private, but Doxygen 1.9.4 links to their list
                text = re.sub(r'<a href="#nested-classes">Classes</a> &#124;\s*', "", text)
            write(f"{args.output}/{name}", linked(text, places))
    findings = findings_of(warnings)
    findings += [f"{name}: the reference has nothing of it: see EXCLUDE_SYMBOLS in the Doxyfile" for name in empty]
    findings += [f"{page}: there is nothing at {link}" for page, link in dead_links(args.output)]
    print("".join(f"{finding}\n" for finding in findings), end="")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
