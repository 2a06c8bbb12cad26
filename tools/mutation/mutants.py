"""Mutants of C++ sources: small changes that a test should notice.

Works on text: it knows comments, strings and brackets, not C++. What it makes may fail to compile.
"""

import collections
import hashlib
import re
import typing


class Mutant(typing.NamedTuple):
    path: str
    begin: int  # source[begin:end] becomes `text`
    end: int
    text: str
    what: str
    line: int
    key: str = ""  # the same as long as the lines it changes are, wherever they move to

    def apply(self, source):
        return source[:self.begin] + self.text + source[self.end:]


def blank(source):
    """`source` without what is in comments, strings and preprocessor lines: blanks take its place."""
    pattern = re.compile(r'//[^\n]*|/\*.*?\*/|R"\((?:.*?)\)"|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'|^#[^\n]*',
                         re.DOTALL | re.MULTILINE)
    return pattern.sub(lambda match: re.sub(r"[^\n]", " ", match.group()), source)


def closing(code, at):
    """Where the bracket at code[at] is closed; -1 if nowhere."""
    pairs = {"(": ")", "{": "}", "[": "]"}
    depth = 0
    for i in range(at, len(code)):
        if code[i] in pairs:
            depth += 1
        elif code[i] in pairs.values():
            depth -= 1
            if depth == 0:
                return i
    return -1


_SWAPS = [
    (r" && ", " || "), (r" \|\| ", " && "), (r" == ", " != "), (r" != ", " == "), (r" < ", " <= "), (r" <= ", " < "),
    (r" > ", " >= "), (r" >= ", " > "), (r" \+ 1\b(?!\.)", ""), (r" - 1\b(?!\.)", ""), (r" \+ ", " - "),
    (r"(?<=[\w)\]]) - ", " + "), (r"\+\+(?=\w)", "--"), (r"--(?=\w)", "++"), (r" \+= ", " -= "), (r" -= ", " += "),
    (r"\btrue\b", "false"), (r"\bfalse\b", "true"), (r"(?<=[(\s])!(?=[\w(])", ""), (r"\bstd::max\b", "std::min"),
    (r"\bstd::min\b", "std::max"), (r"\bany_of\b", "all_of"), (r"\ball_of\b", "any_of"), (r"\bfront\(\)", "back()"),
    (r"\bback\(\)", "front()"), (r"\bcontinue;", "break;"), (r"\bbreak;(?=\s*\n\s*[^\s}cd])", ";"),
]
# A statement on lines of its own: a call, or an assignment.
_STATEMENT = re.compile(r"^(?P<indent> +)(?P<text>(?:\+\+|--|\*)?[A-Za-z_][^;{}\n]*(?:\n(?P=indent)    [^;{}\n]*)*;)\n",
                        re.MULTILINE)
_NO_STATEMENT = re.compile(r"(?:return|break|continue|case|default|using|namespace|else|if|for|while|do|switch|goto|"
                           r"const|auto|static|constexpr|int|bool|struct|class|enum|public|private|template)\b")
_DECLARATION = re.compile(r"(?:[\w:]+(?:<[^;=]*>)?[&*]*\s+[&*]*\w+\s*(?:=|;|\{|\())|(?:[\w:]+<[^;]*>\s+\w+)")


def _statements(code):
    for match in _STATEMENT.finditer(code):
        text = match.group("text")
        if not _NO_STATEMENT.match(text):
            yield match.start("text"), match.end("text"), len(match.group("indent")), bool(_DECLARATION.match(text))


def _conditions(code):
    for match in re.finditer(r"\bif \(", code):
        end = closing(code, match.end() - 1)
        if end > 0 and "constexpr" not in code[match.start() - 2:match.end()]:
            yield match.end(), end


def mutants(path, source):
    """All mutants of `source`, in its order."""
    code = blank(source)
    body = code.find("\nnamespace ")  # what is above are includes
    found = []

    def add(begin, end, text, what):
        if begin >= body and source[begin:end] != text:
            found.append(Mutant(path, begin, end, text, what, source.count("\n", 0, begin) + 1))

    for begin, end in _conditions(code):
        add(begin, end, f"!({source[begin:end]})", "negate the condition")
    for pattern, text in _SWAPS:
        for match in re.finditer(pattern, code):
            add(match.start(), match.end(), text, f"{match.group().strip()} becomes {text.strip() or 'nothing'}")
    statements = list(_statements(code))
    for begin, end, _, declares in statements:
        if not declares:
            add(begin, end, ";", "drop the statement")
    for first, second in zip(statements, statements[1:]):
        begin, end, indent, declares = first
        if source[end:second[0]].strip() == "" and second[2] == indent and not declares and not second[3]:
            add(begin, second[1], f"{source[second[0]:second[1]]}{source[end:second[0]]}{source[begin:end]}",
                "swap two statements")
    # Functions that return nothing, left at once.
    for match in re.finditer(r"^void [\w:]+\(", code, re.MULTILINE):
        end = closing(code, match.end() - 1)
        brace = re.compile(r"\)[\w\s]*\{\n").match(code, end) if end > 0 else None
        if brace:
            add(brace.end(), brace.end(), "  return;\n", "return early")
    found.sort(key=lambda mutant: (mutant.begin, mutant.end, mutant.what, mutant.text))
    return _with_keys(found, source)


def _with_keys(found, source):
    seen = collections.Counter()
    keyed = []
    for mutant in found:
        begin = source.rfind("\n", 0, mutant.begin) + 1
        end = source.find("\n", mutant.end)
        before, after = source[begin:mutant.begin], source[mutant.end:end]
        identity = (mutant.path, mutant.what, before, source[mutant.begin:mutant.end], mutant.text, after)
        seen[identity] += 1
        text = "\0".join([*identity, str(seen[identity])])
        keyed.append(mutant._replace(key=hashlib.sha256(text.encode()).hexdigest()[:12]))
    return keyed
