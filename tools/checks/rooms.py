"""Rooms and their doors: who may use whom, as the tables of docs/rooms.md say. Part of tools/checks/deps.

A room is a package. The table `| room | what it is for | may use |` has a row for each, from the top of the house to the
bottom, so that a room uses only rooms below its row. "dir/..." is a row for all packages below dir. Who "may use" is
"any" is there for tests or is a program, which no library may use. Libraries count; a test may also use what is there
for tests, and every room that does not need the test's own.

The table `| public header | includes | because |` has the public headers that cannot do without one that is private.
"""

import os
import re

DOCUMENT = "docs/rooms.md"
ROOMS = ["room", "what it is for", "may use"]
EXCEPTIONS = ["public header", "includes", "because"]
# Every package below these is a room.
TOPS = ("base", "capi", "checkpoint", "comm", "device_ops", "flat_param", "fsdp", "offload", "planner", "replicas", "testing")
ANY = "any"
LIBTORCH = "LibTorch"
NEEDS_LIBTORCH = {"//third_party/libtorch:libtorch", "//third_party/libtorch:cuda", "//third_party/libtorch:c10_cuda"}


class Row:
    """One room: where its row is, and whom it may use, by name."""

    def __init__(self, line, cells):
        self.line = line
        self.name = name_in(cells[0])
        self.purpose = cells[1]
        self.uses = [] if cells[2] == "nothing" else [name_in(cell) for cell in cells[2].split(",")]
        self.is_open = self.uses == [ANY]


def name_in(cell):
    """The name in a cell, which may be a link or code."""
    return re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", cell).strip(" `")


def read_tables(text, titles):
    """(line, cells) of every row below a head with these titles."""
    inside = False
    for number, line in enumerate(text.splitlines(), 1):
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")] if line.startswith("|") else []
        if cells == titles:
            inside = True
        elif len(cells) != len(titles):
            inside = False
        elif inside and not all(set(cell) <= set("-: ") for cell in cells):
            yield number, cells


def package_of(label):
    return label[2:].split(":")[0]


def is_test(target):
    return "test" in target.kind or target.testonly


def has_door(targets):
    """Whether users of the library can include what one of these targets offers."""
    return any(target.is_public and not target.testonly for target in targets)


class Rooms:
    """Compares the targets below `root` with the tables; `findings` has what is wrong."""

    def __init__(self, root, targets, includes):
        self.root = root
        self.targets = targets
        self.includes = includes  # of a file: (line, header)
        self.findings = []
        text = self.read(DOCUMENT)
        self.rows = [Row(*row) for row in read_tables(text, ROOMS)]
        self.exceptions = {(name_in(cells[0]), name_in(cells[1])): line for line, cells in read_tables(text, EXCEPTIONS)}
        self.places = {row.name: place for place, row in enumerate(self.rows)}
        # {room: {room: (label, label)}}: one dependency of a library for each edge.
        self.edges = {}

    def read(self, path):
        full = os.path.join(self.root, path)
        if not os.path.exists(full):
            return ""
        with open(full, encoding="utf-8") as file:
            return file.read()

    def row_of(self, package):
        names = [package]
        while package:
            names.append(f"{package}/...")
            package = os.path.dirname(package)
        return next((self.rows[self.places[name]] for name in names if name in self.places), None)

    def run(self):
        if not self.rows:
            self.findings.append(f"{DOCUMENT} has no table | {' | '.join(ROOMS)} |: nobody knows who may use whom")
            return self.findings
        self.check_rows()
        self.check_libraries()
        self.check_circles()
        self.check_unused()
        self.check_tests()
        self.check_public_headers()
        return self.findings

    def check_rows(self):
        """Every room has a row, every row a room, and rows are in the order in which rooms use each other."""
        packages = {package_of(label) for label in self.targets}
        for package in sorted(packages):
            if package.split("/")[0] in TOPS and not self.row_of(package):
                self.findings.append(f"{package}: {DOCUMENT} has no row for this room: add one, above the rooms that it uses")
        for place, row in enumerate(self.rows):
            if not any(self.row_of(package) is row for package in packages):
                self.findings.append(f"{DOCUMENT}:{row.line}: there is no room {row.name}: take the row out")
            for name in row.uses:
                other = self.rows[self.places[name]] if name in self.places else None
                if name in (ANY, LIBTORCH):
                    continue
                if not other:
                    self.findings.append(f"{DOCUMENT}:{row.line}: {row.name} may use {name}, which has no row: is it "
                                         "misspelt?")
                elif other.is_open:
                    self.findings.append(f"{DOCUMENT}:{row.line}: {row.name} may not use {name}, which is for tests and "
                                         "programs: move what it needs into a room of its own")
                elif self.places[name] < place:
                    self.findings.append(f"{DOCUMENT}:{row.line}: {row.name} may use {name}, whose row is above: move the "
                                         "rows so that whoever uses is above, or do without")

    def check_libraries(self):
        for target in self.targets.values():
            row = self.row_of(package_of(target.label))
            if not row or is_test(target):
                continue
            for label in target.written:
                if label in NEEDS_LIBTORCH:
                    name = LIBTORCH
                elif label in self.targets and self.row_of(package_of(label)):
                    name = self.row_of(package_of(label)).name
                else:
                    continue
                if name == row.name:
                    continue
                self.edges.setdefault(row.name, {}).setdefault(name, (target.label, label))
                if not row.is_open and name not in row.uses:
                    self.findings.append(f"{target.label} may not use {target.written.get(label, label)}: the row of {row.name} in "
                                         f"{DOCUMENT} (line {row.line}) lacks {name}; do without, or add it there if {name} "
                                         "is below")

    def check_circles(self):
        """One finding for each circle of libraries, with the dependencies that make it."""
        state = {}
        way = []

        def visit(name):
            state[name] = "open"
            way.append(name)
            for other in sorted(self.edges.get(name, {})):
                if state.get(other) == "open":
                    circle = way[way.index(other):] + [other]
                    because = ", ".join("{} needs {}".format(*self.edges[one][two]) for one, two in zip(circle, circle[1:]))
                    self.findings.append(f"{' -> '.join(circle)}: rooms need each other in a circle ({because}): move what "
                                         "both need into a room below them")
                elif other not in state:
                    visit(other)
            state[name] = "done"
            way.pop()

        for name in sorted(self.edges):
            if name not in state:
                visit(name)

    def check_unused(self):
        for row in self.rows:
            for name in row.uses:
                if name != ANY and (name in self.places or name == LIBTORCH) and name not in self.edges.get(row.name, {}):
                    self.findings.append(f"{DOCUMENT}:{row.line}: {row.name} may use {name}, but no library in it does: take "
                                         f"{name} out of the row")

    def needed_by(self, name):
        """All rooms that libraries of a room need, however indirectly."""
        found = set()
        queue = [name]
        while queue:
            for other in self.edges.get(queue.pop(), {}):
                if other not in found:
                    found.add(other)
                    queue.append(other)
        return found

    def check_tests(self):
        for target in self.targets.values():
            row = self.row_of(package_of(target.label))
            if not row or row.is_open or not is_test(target):
                continue
            for label in target.deps:
                other = self.row_of(package_of(label)) if label in self.targets else None
                if other and not other.is_open and other is not row and row.name in self.needed_by(other.name):
                    self.findings.append(f"{target.label} may not use {target.written.get(label, label)}: {other.name} needs {row.name}; "
                                         f"move the test to {other.name} or to a room of tests")

    def check_public_headers(self):
        owners = {}
        for target in self.targets.values():
            for header in target.hdrs:
                owners.setdefault(header, []).append(target)
        used = set()
        for path, targets in sorted(owners.items()):
            full = os.path.join(self.root, path)
            if path.split("/")[0] not in TOPS or not has_door(targets) or not os.path.exists(full):
                continue
            for number, header in self.includes(full):
                if header not in owners or has_door(owners[header]):
                    continue
                if (path, header) in self.exceptions:
                    used.add((path, header))
                    continue
                self.findings.append(f"{path}:{number}: a public header includes {header} of {owners[header][0].label}, which "
                                     "is not public: declare the class, include it in the .cc, make it public, or say in "
                                     f"{DOCUMENT}, below \"{EXCEPTIONS[0]}\", what needs it")
        for pair, line in sorted(self.exceptions.items()):
            if pair not in used:
                self.findings.append(f"{DOCUMENT}:{line}: {pair[0]} does not include {pair[1]}, or both are public: take the "
                                     "row out")
