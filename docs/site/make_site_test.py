#!/usr/bin/env python3
"""Tests of make_site.py without Doxygen: what it makes of headers and pages, and which links it finds dead."""

import pathlib
import sys
import tempfile
import textwrap
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import make_site  # pylint: disable=wrong-import-position


def documented(text):
    return make_site.documented(textwrap.dedent(text))


class HeaderTest(unittest.TestCase):
    def expect(self, text, wanted):
        self.assertEqual(documented(text), textwrap.dedent(wanted))

    def test_a_file_comment_takes_the_place_of_the_guard(self):
        self.expect("""\
            // Two things.
            // Threads: none.
            #ifndef A_B_H_
            #define A_B_H_

            #include <string>

            #endif  // A_B_H_
            """, """\
            /// @file
            /// %Two things.
            /// %Threads: none.
            ///

            #include <string>


            """)

    def test_lines_stay_where_they_are(self):
        text = """\
            // A file.
            #ifndef A_H_
            #define A_H_

            // --- Part ---------------------------------------------------------------
            // It is one.

            // Floats.

            class A {
             public:
              // NOLINTNEXTLINE(google-default-arguments): as LibTorch has it.
              void F(int i = 0) override;  // or
                                           // not
              int g() const {
                // not of the class
                return 1;  // neither
              }
            };
            #endif  // A_H_
            """
        self.assertEqual(documented(text).count("\n"), textwrap.dedent(text).count("\n"))
        self.assertIn("// not of the class\n    return 1;  // neither\n", documented(text))
        self.assertIn("/** @file\n * @details <b>Part.</b> %It is one. */\n", documented(text))
        self.assertIn("/** @file\n * @details %Floats. */\n", documented(text))
        self.assertIn("override;  ///< or\n                               ///< not\n", documented(text))
        self.assertNotIn("NOLINT", documented(text))

    def test_a_comment_holds_up_to_a_blank_line_or_the_next_one(self):
        self.expect("""\
            namespace n {
            // How it ended.
            struct End {
              // Where.
              std::string host;
              int port = 0;
              int code = 0;  // of the process
              int other = 0;

              int alone = 0;
            };
            }  // namespace n
            """, """\
            namespace n {
            /// %How it ended.
            struct End {
              /// %Where.
              std::string host;
              /** %Where. */ int port = 0;
              int code = 0;  ///< of the process
              int other = 0;

              int alone = 0;
            };
            }  // namespace n
            """)

    def test_what_the_language_says_takes_no_comment_from_above(self):
        lines = documented("""\
            class A {
             public:
              // Makes one.
              explicit A(int i);
              A(A&&) noexcept;
              A& operator=(A&&);
              A(const A&) = delete;
              ~A();
              A* Copy(int i,
                      int j);
            };
            """).split("\n")
        self.assertEqual([line.strip() for line in lines if "/**" in line], ["/** %Makes one. */ A* Copy(int i,"])

    def test_enumerators_macros_and_holders(self):
        self.expect("""\
            // Kinds.
            enum class Kind {
              kA,  // a comma, too
              // The last.
              kB,
              kC
            };
            // Calls `f`.
            #define CALL(f) CALL_IMPL_(f)
            #define CALL_IMPL_(f) \\
              f()

            int g();
            TORCH_MODULE(Net);
            """, """\
            /// %Kinds.
            enum class Kind {
              kA,  ///< a comma, too
              /// %The last.
              kB,
              /** %The last. */ kC
            };
            /// %Calls `f`.
            #define CALL(f) CALL_IMPL_(f)



            int g();
            /** Holds a NetImpl; copies hold the same one. */ class Net : public torch::nn::ModuleHolder<NetImpl> {};
            """)

    def test_templates_with_bodies(self):
        self.assertIn("  /** %Both. */ template <typename T>", documented("""\
            class A {
              // Both.
              template <typename T>
              void F(T t) {
                if (t) { G(); }
              }
              template <typename T>
              void G();
            };
            """))

    def test_text_is_no_command(self):
        self.assertEqual(make_site.escaped('a *p <T> "#17" @x \\ `*"q"` 5 %'),
                         r'a \*p \<T\> &quot;\#17&quot; \@x \\ `*"q"` 5 \%')
        self.assertEqual(make_site.escaped("Call it. Work::Wait() and Call. Step it"),
                         "%Call it. Work::Wait() and Call. %Step it")

    def test_code_terms_and_lists(self):
        comment = ["So:", "  int i = F();", "", "  G();", "", "Errors:", "  NotFound  there is", "            none",
                   "  Aborted   *", "Then", "  - one", "    more", "| a", "  | b | c"]
        self.assertEqual(make_site.rendered(comment), [
            "%So: @code{.cpp}", "  int i = F();", "", "  G(); @endcode", "", "%Errors:",
            "<ul><li>`NotFound`: there is", "none", r"</li><li>`Aborted`: \*</li></ul>", "%Then",
            "<ul><li>one", "more</li></ul>", r"\| a @verbatim", "  | b | c @endverbatim"])


class PageTest(unittest.TestCase):
    FILES = ["README.md", "docs/guide/README.md", "docs/guide/options.md", "docs/a.svg", "fsdp/a.h"]

    def page(self, text, path="docs/guide/options.md"):
        return make_site.page_of(textwrap.dedent(text), path, self.FILES)

    def test_links(self):
        self.assertEqual(self.page("[a\nb](../../README.md) [c](README.md#some-part) [d](#here) [e](https://e.org/x)"),
                         "[a b](index.html) [c](docs-guide-index.html#docs-guide-index-some-part) "
                         "[d](docs-guide-options.html#docs-guide-options-here) [e](https://e.org/x)")
        self.assertEqual(self.page("[h](../../fsdp/a.h) ![p](../a.svg)"), '@ref fsdp/a.h "h" ![p](a.svg)')
        self.assertEqual(self.page("[`n`](../../fsdp/a.cc) [README](../../x/README.md)"), "`n` `x/README.md`")

    def test_a_readme_has_the_pages_of_its_folder_below(self):
        self.assertEqual(self.page("[Options](options.md), [again](options.md)", "docs/guide/README.md"),
                         '@subpage docs-guide-options "Options", [again](docs-guide-options.html)')

    def test_headings(self):
        self.assertEqual(self.page("# Options\n## A `b` - c!\n## A\n## A\n"),
                         "# Options {#docs-guide-options}\n## A `b` - c! {#docs-guide-options-a-b-c}\n"
                         "## A {#docs-guide-options-a}\n## A {#docs-guide-options-a-1}\n")
        self.assertEqual(self.page("# Name\n## A\n", "README.md"), "# Name\n## A {#index-a}\n")

    def test_code_stays(self):
        code = "`[a](README.md)`\n\n    # [a](README.md)\n\n```sh\n# [a](README.md)\n```\n"
        self.assertEqual(self.page(f"<!-- from a.sh -->\n{code}"), code)
        self.assertEqual(self.page("`a\nb` `c's` **`d`**"), "`a b` ``c's`` <b>`d`</b>")

    def test_namespaces_are_rooms(self):
        rooms = "| room | what | uses |\n| fsdp | The API. | comm |\n| comm | Ranks. | any |\n| x | X. | any |\n"
        self.assertEqual(make_site.namespaces_of(rooms, "namespace fsdp {\nnamespace fsdp::comm {\n"),
                         "/** @namespace fsdp\nThe API. */\n/** @namespace fsdp::comm\nRanks. */\n")


class SiteTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name

    def test_symbols(self):
        tags = f"{self.folder}/tags"
        member = '<member kind="{}"><name>{}</name><anchorfile>{}</anchorfile><anchor>{}</anchor></member>'
        make_site.write(tags, "<tagfile>"
                        '<compound kind="class"><name>n::A</name><filename>a.html</filename>' +
                        member.format("function", "F", "a.html", "f1") +
                        member.format("function", "F", "a.html", "f2") +
                        member.format("variable", "both", "a.html", "v") + "</compound>"
                        '<compound kind="struct"><name>n::B</name><filename>b.html</filename>' +
                        member.format("variable", "both", "b.html", "v") + "</compound>"
                        '<compound kind="file"><name>empty.h</name></compound>'
                        '<compound kind="file"><name>b.h</name><class kind="struct">n::B</class></compound></tagfile>')
        self.assertEqual(make_site.without_symbols(tags), ["empty.h"])
        places = make_site.places_of(tags)
        self.assertEqual(places["F()"], "a.html#f1")
        self.assertNotIn("both", places)
        page = "<code>B::both</code> <code>A::F</code> <code>F()</code> <code>F</code>"
        self.assertEqual(make_site.linked(page, places),
                         '<a class="el" href="b.html#v"><code>B::both</code></a> '
                         '<a class="el" href="a.html#f1"><code>A::F</code></a> '
                         '<a class="el" href="a.html#f1"><code>F()</code></a> <code>F</code>')
        linked = '<a href="x"><code>F()</code></a>'
        self.assertEqual(make_site.linked(linked, places), linked)

    def test_dead_links(self):
        make_site.write(f"{self.folder}/a.html", '<a href="b.html#here">b</a><a href="b.html#there">b</a>'
                        '<a href="c.html">c</a><a href="#no">a</a><a href="https://e.org">e</a><img src="p.svg"/>')
        make_site.write(f"{self.folder}/b.html", '<h1 id="here">B</h1>')
        self.assertEqual(list(make_site.dead_links(self.folder)),
                         [("a.html", "b.html#there"), ("a.html", "c.html"), ("a.html", "#no"), ("a.html", "p.svg")])

    def test_warnings(self):
        said = ["a.h:1: warning: Member A(const A &)=delete (function) of class n::A is not documented.",
                "a.h:2: warning: Member ~A() (function) of class n::A is not documented.",
                "a.h:3: warning: Member A(int i) (function) of class n::A< T > is not documented.",
                "a.h:4: warning: Member operator==(const A &a) (friend) of struct n::A is not documented.",
                "a.h:5: warning: Member F() override (function) of class n::A is not documented."]
        asked = ["a.h:6: warning: Member B(int i) (function) of class n::A is not documented.",
                 "a.h:7: warning: Compound n::A is not documented.",
                 "a.md:1: warning: unable to resolve reference to 'x' for \\ref command"]
        self.assertEqual(make_site.findings_of("\n".join(["", *said, *asked])), asked)


if __name__ == "__main__":
    unittest.main()
