#!/usr/bin/env python3
"""What tokenize_text.py writes, and what it says."""

import array
import glob
import hashlib
import io
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import tokenize_text  # pylint: disable=wrong-import-position

try:
    import tokenizers
except ImportError:
    tokenizers = None
try:
    import jinja2
except ImportError:
    jinja2 = None

TOOL = str(pathlib.Path(__file__).resolve().parent / "tokenize_text.py")
SAMPLES = pathlib.Path("examples/llama/data/samples")  # among this test's runfiles


def lines(*objects):
    return "".join(json.dumps(value) + "\n" for value in objects)


class ToolTest(unittest.TestCase):

    def setUp(self):
        folder = tempfile.TemporaryDirectory()  # pylint: disable=consider-using-with
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.out = str(self.folder / "out")

    def write(self, name, content):
        path = self.folder / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return str(path)

    def start(self, *arguments, **options):
        return subprocess.Popen([sys.executable, TOOL, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                universal_newlines=True, **options)

    def run_tool(self, *arguments, given=""):
        process = self.start(*arguments, stdin=subprocess.PIPE)
        output, errors = process.communicate(given)
        return process.returncode, output, errors

    def succeed(self, *arguments, given=""):
        code, output, errors = self.run_tool(*arguments, given=given)
        self.assertEqual(code, 0, errors)
        return output

    def fail_with(self, text, *arguments, code=1, given=""):
        before = sorted(os.listdir(self.folder))
        found, _, errors = self.run_tool(*arguments, given=given)
        self.assertEqual(found, code, errors)
        self.assertIn(text, errors)
        self.assertNotIn("Traceback", errors)
        self.assertEqual(sorted(os.listdir(self.folder)), before, "it leaves something")

    def description(self, name=None):
        with open(f"{name or self.out}.json", encoding="utf-8") as file:
            return json.load(file)

    def documents(self, name=None):
        """Lists of tokens; reads by itself what the format says."""
        name = name or self.out
        said = self.description(name)
        size = {"uint16": 2, "uint32": 4}[said["dtype"]]
        data = pathlib.Path(f"{name}.bin").read_bytes()
        tokens = [int.from_bytes(data[i:i + size], "little") for i in range(0, len(data), size)]
        index = pathlib.Path(f"{name}.idx").read_bytes()
        begins = [int.from_bytes(index[i:i + 8], "little") for i in range(0, len(index), 8)]
        self.assertEqual(said["num_tokens"], len(tokens))
        self.assertEqual(said["num_documents"], len(begins))
        self.assertEqual(begins[0], 0)
        return [tokens[begin:end] for begin, end in zip(begins, begins[1:] + [len(tokens)])]

    def learned(self):
        """Of each document the tokens that are."""
        mask = pathlib.Path(f"{self.out}.mask").read_bytes()
        self.assertEqual((self.description()["mask"], self.description()["version"]), (True, 2))
        self.assertEqual(len(mask), self.description()["num_tokens"])
        marks = iter(mask)
        return [[token for token in tokens if next(marks)] for tokens in self.documents()]

    def texts(self, name=None):
        return [bytes(tokens).decode() for tokens in self.documents(name)]


class BytesTest(ToolTest):

    def test_each_file_is_a_document(self):
        files = [self.write("a", b"one\xff\n\n"), self.write("empty", ""), self.write("b", "zwölf")]
        output = self.succeed("--bytes", f"--out={self.out}", *files)
        self.assertEqual(self.documents(), [list(b"one\xff\n\n"), list("zwölf".encode())])
        self.assertEqual(self.description(), {
            "format": "fsdp-tokens", "version": 1, "dtype": "uint16", "num_tokens": 12, "num_documents": 2,
            "vocab_size": 256, "bos_id": None, "eos_id": None, "tokenizer_sha256": None})
        self.assertIn("2 documents, 12 tokens", output)
        self.assertEqual(len(os.listdir(self.folder)), 3 + 3)

    def test_each_paragraph_is_a_document(self):
        text = self.write("a", "\n\none\ntwo\n \t\n\nthree\n\n\nfour")
        self.succeed("--bytes", "--documents=paragraph", f"--out={self.out}", text)
        self.assertEqual(self.texts(), ["one\ntwo\n", "three\n", "four"])

    def test_each_line_of_json_is_a_document(self):
        text = self.write("a", lines({"text": "a", "body": "one\n"}, {"body": ""}) + "\n" + lines({"body": "zwölf"}))
        self.succeed("--bytes", "--jsonl=body", "--dtype=uint32", f"--out={self.out}", text, text)
        self.assertEqual(self.texts(), ["one\n", "zwölf"] * 2)
        self.assertEqual(self.description()["dtype"], "uint32")

    def test_a_prompt_is_not_learned(self):
        text = self.write("a", lines({"q": "why ", "a": "so"}, {"q": "", "a": "é"}, {"q": "?", "a": ""},
                                     {"q": "é", "a": "x"}))
        self.succeed("--bytes", "--jsonl=a", "--prompt=q", f"--out={self.out}", text)
        self.assertEqual(self.texts(), ["why so", "é", "éx"])
        self.assertEqual(self.learned(), [list(b"so"), list("é".encode()), [ord("x")]])
        wrong = self.write("b", lines({"q": "a", "a": "b"}, {"a": "b"}))
        self.fail_with(f"{wrong}:2: is no JSON object with a text \"a\" and a text \"q\"", "--bytes", "--jsonl=a",
                       "--prompt=q", f"--out={self.out}2", wrong)

    def test_a_text_longer_than_a_piece_is_one_document(self):
        content = "".join(f"line {i} ö\n" for i in range(250000)).encode()
        self.assertGreater(len(content), 3 * tokenize_text.PIECE_BYTES)
        for how in ("file", "paragraph"):
            self.succeed("--bytes", "--force", f"--documents={how}", f"--out={self.out}", self.write("a", content))
            self.assertEqual([bytes(tokens) for tokens in self.documents()], [content])

    def test_held_out_documents(self):
        texts = [f"document {i}" for i in range(400)]
        source = self.write("a", lines(*({"text": text} for text in texts)))

        def split(out, seed, fraction):
            self.succeed("--bytes", "--jsonl=text", f"--out={out}", f"--validation={fraction}", f"--seed={seed}",
                         source)
            return self.texts(f"{out}.train"), self.texts(f"{out}.validation")

        train, held_out = split(self.out, 1, 0.25)
        self.assertEqual(sorted(train + held_out), sorted(texts))
        self.assertEqual(train, [text for text in texts if text in train])
        self.assertAlmostEqual(len(held_out), 100, delta=35)
        self.assertEqual(split(self.out + "same", 1, 0.25), (train, held_out))
        self.assertNotEqual(split(self.out + "other", 2, 0.25)[1], held_out)
        # More is held out, nothing goes back.
        self.assertLess(set(held_out), set(split(self.out + "more", 1, 0.5)[1]))

    def test_nothing_to_write_is_an_error(self):
        self.fail_with("no document for", "--bytes", f"--out={self.out}", self.write("empty", ""))
        self.fail_with(".validation: there are 1 in all; with --documents=paragraph", "--bytes", f"--out={self.out}",
                       "--validation=0.001", self.write("a", "text"))

    def test_files_are_replaced_only_if_asked_to(self):
        text = self.write("a", "one")
        for kind in ("bin", "idx", "json"):
            present = self.write(f"out.{kind}", "old")
            self.fail_with(f"{present} is there already", "--bytes", f"--out={self.out}", text)
            os.remove(present)
        self.succeed("--bytes", f"--out={self.out}", text)
        self.succeed("--bytes", f"--out={self.out}", "--force", self.write("b", "other"))
        self.assertEqual(self.texts(), ["other"])

    def test_errors_say_where(self):
        good = lines({"text": "a"})
        for wrong in (lines({"body": "b"}), lines(["text"]), lines({"text": 1}), "{\n", "1\n"):
            path = self.write("a", good + "\n" + wrong)
            self.fail_with(f"{path}:3: is no JSON object", "--bytes", "--jsonl=text", f"--out={self.out}", path)
        path = self.write("a", good + '{"text": "\\ud800"}\n')
        self.fail_with(f"{path}:2: \"text\" is no valid Unicode", "--bytes", "--jsonl=text", f"--out={self.out}", path)
        missing = str(self.folder / "missing")
        self.fail_with(f"{missing}: No such file", "--bytes", f"--out={self.out}", missing)
        self.fail_with("No such file", "--bytes", f"--out={missing}/out", self.write("a", "text"))

    def test_flags_that_make_no_sense(self):
        text = self.write("a", "text")
        for text_of_error, flags in (("not allowed with", ["--bytes", "--tokenizer=a"]), ("is required", []),
                                     ("--bos and --eos", ["--bytes", "--eos=none"]),
                                     ("between 0 and 1", ["--bytes", "--validation=1"]),
                                     ("about text files", ["--bytes", "--jsonl=text", "--documents=paragraph"]),
                                     ("names a field", ["--bytes", "--prompt=a"]),
                                     ("such as --jsonl=messages", ["--tokenizer=a", "--chat"]),
                                     ("beside a --tokenizer", ["--bytes", "--jsonl=a", "--chat"])):
            self.fail_with(text_of_error, f"--out={self.out}", *flags, text, code=2)
        self.fail_with("without .bin", f"--out={self.out}.bin", "--bytes", text, code=2)
        self.fail_with("name the files", f"--out={self.out}", "--bytes", code=2)
        for flags in (["--decode", text], ["--encode=x", "--force"]):
            self.fail_with(f"no flags of files: {flags[1]}", "--bytes", *flags, code=2)

    def test_help_names_every_flag(self):
        output = self.succeed("--help")
        for flag in ("tokenizer", "bytes", "out", "encode", "decode", "jsonl", "prompt", "chat", "documents", "bos",
                     "eos", "dtype", "validation", "seed", "force", "quiet"):
            self.assertIn(f"--{flag}", output)

    def test_a_run_that_is_ended_leaves_nothing(self):
        os.mkfifo(self.folder / "fifo")
        process = self.start("--bytes", f"--out={self.out}", str(self.folder / "fifo"))
        self.addCleanup(process.communicate)
        self.addCleanup(process.kill)
        with open(self.folder / "fifo", "wb") as fifo:  # it has begun to read
            fifo.write(b"text")
            fifo.flush()
            while len(glob.glob(f"{self.out}*")) < 3:
                time.sleep(0.01)
            process.send_signal(signal.SIGTERM)
        # A read that begins right behind the signal waits on, until the end of the file.
        self.assertEqual(process.wait(), 128 + signal.SIGTERM)
        self.assertEqual(os.listdir(self.folder), ["fifo"])

    def test_progress(self):
        self.addCleanup(setattr, sys, "stderr", sys.stderr)
        sys.stderr = io.StringIO()
        for quiet in (False, True):
            progress = tokenize_text.Progress(quiet)
            progress.last -= tokenize_text.SECONDS_BETWEEN_REPORTS
            progress.add(1234, True, 1500000)
            progress.add(1, True, 1)
        self.assertEqual(sys.stderr.getvalue().count("\n"), 1)
        self.assertIn("1 documents, 1,234 tokens, 1.5 M characters", sys.stderr.getvalue())

    def test_makes_the_samples(self):
        self.succeed("--bytes", "--dtype=uint32", "--jsonl=text", f"--out={self.out}", str(SAMPLES / "text.jsonl"))
        for kind in ("bin", "idx", "json"):
            self.assertEqual(pathlib.Path(f"{self.out}.{kind}").read_bytes(), (SAMPLES / f"bytes.{kind}").read_bytes())


    def test_bytes_of_a_text_and_back(self):
        for text in ("", "two\nlines", "zwölf 🦊"):
            tokens = self.succeed("--bytes", f"--encode={text}")
            self.assertEqual(tokens, " ".join(map(str, text.encode())) + "\n")
            self.assertEqual(self.succeed("--bytes", "--decode", given=tokens), text + "\n")
        self.assertEqual(self.succeed("--bytes", "--decode", given="195\n97, 98,\n\n195"),
                         "\N{REPLACEMENT CHARACTER}ab\N{REPLACEMENT CHARACTER}\n")

    def test_what_is_no_token(self):
        for word in ("256", "-1", "a", "1.0"):
            self.fail_with(f'"{word}" is no token: they are numbers from 0 to 255', "--bytes", "--decode",
                           given=f"1 {word}")

    def test_decodes_as_tokens_come(self):
        process = self.start("--bytes", "--decode", stdin=subprocess.PIPE)
        self.addCleanup(process.communicate)
        self.addCleanup(process.kill)
        for byte in b"text":
            process.stdin.write(f"{byte}\n")
            process.stdin.flush()
            self.assertEqual(process.stdout.read(1), chr(byte))


class PiecesTest(unittest.TestCase):

    def setUp(self):
        self.addCleanup(setattr, tokenize_text, "PIECE_BYTES", tokenize_text.PIECE_BYTES)
        tokenize_text.PIECE_BYTES = 16

    def pieces(self, text, paragraphs=False):
        found = list(tokenize_text.text_pieces(io.BytesIO(text.encode()), paragraphs))
        return [data.decode() for data, _ in found], [ends for _, ends in found]

    def test_pieces_end_where_tokens_do(self):
        self.assertEqual(self.pieces("one two\nthree four five")[0], ["one two\n", "three four five"])
        # Neither before a line that is indented, nor at a blank one.
        self.assertEqual(self.pieces("one\ntwo\n  three four")[0], ["one\n", "two\n  three four"])
        self.assertEqual(self.pieces("one\ntwo\n\nthree four")[0], ["one\n", "two\n\nthree four"])
        # Where there is no such place.
        self.assertEqual(self.pieces("one\r\ntwo\r\nthree four")[0], ["one\r\ntwo\r\n", "three four"])
        self.assertEqual(self.pieces("one two three four five")[0], ["one two three", " four five"])
        self.assertEqual(self.pieces("äöüäöüäöüäöü")[0], ["äöüäöüäö", "üäöü"])
        self.assertEqual(self.pieces("aäöüäöüäöüäöü")[0], ["aäöüäöüä", "öüäöü"])
        self.assertEqual(self.pieces("a🦊🦊🦊🦊🦊")[0], ["a🦊🦊🦊", "🦊🦊"])
        self.assertEqual(self.pieces("a\nb" + "x" * 30)[0], ["a\n", "b" + "x" * 15, "x" * 15])

    def test_bytes_that_are_no_text_have_pieces_too(self):
        found = [data for data, _ in tokenize_text.text_pieces(io.BytesIO(b"\x80" * 40), False)]
        self.assertEqual(b"".join(found), b"\x80" * 40)
        self.assertLessEqual(max(map(len, found)), 16)

    def test_the_last_piece_ends_the_document(self):
        for size in range(1, 70):
            for paragraphs in (False, True):
                pieces, ends = self.pieces("x" * size, paragraphs)
                self.assertEqual("".join(pieces), "x" * size)
                self.assertLessEqual(max(map(len, pieces)), 16)
                self.assertEqual(ends, [False] * (len(pieces) - 1) + [True])

    def test_blank_lines_are_no_documents(self):
        self.assertEqual(self.pieces("\n\na\n\n\nb\n\n", paragraphs=True), (["a\n", "b\n"], [True, True]))

    def test_a_blank_line_is_a_whole_line(self):
        # Bytes 16 and on of the first line are white space.
        pieces, ends = self.pieces("x" * 16 + "   \ny\n\nz", paragraphs=True)
        self.assertEqual("".join(pieces), "x" * 16 + "   \ny\nz")
        self.assertEqual(ends.count(True), 2)


class EncodedTest(unittest.TestCase):

    def test_few_texts_are_in_memory(self):
        batches = []

        class Tokenizer:
            def encode_batch(self, texts):
                batches.append(sum(map(len, texts)))
                return [[len(text)] for text in texts]

        sizes = [1, 100, 300000, tokenize_text.BATCH_BYTES] + [200000] * 50 + [1]
        pieces = [("x" * size, True, None) for size in sizes]
        found = list(tokenize_text.encoded(Tokenizer(), iter(pieces)))
        self.assertEqual(found, [([size], None, True, size) for size in sizes])
        self.assertLess(max(batches), tokenize_text.BATCH_BYTES + 300200)
        self.assertGreater(min(batches[:-1]), tokenize_text.BATCH_BYTES - 1)


class WithoutTokenizersTest(ToolTest):

    def test_says_what_is_missing(self):
        self.write("tokenizers.py", "raise ImportError('not here')")
        process = self.start(f"--tokenizer={SAMPLES}/tokenizer.json", f"--out={self.out}", self.write("a", "text"),
                             env=dict(os.environ, PYTHONPATH=str(self.folder)))
        _, errors = process.communicate()
        self.assertEqual(process.returncode, 1)
        self.assertIn("needs Python's package tokenizers (not here): install it", errors)
        self.assertIn("--bytes", errors)


@unittest.skipIf(tokenizers is None, "there is no package tokenizers")
class TokenizerTest(ToolTest):

    def setUp(self):
        super().setUp()
        self.tokenizer = self.write("tokenizer.json", (SAMPLES / "tokenizer.json").read_bytes())
        self.oracle = tokenizers.Tokenizer.from_file(self.tokenizer)
        self.oracle.no_truncation()
        self.oracle.no_padding()

    def tokenize(self, *arguments):
        self.succeed(f"--tokenizer={self.tokenizer}", f"--out={self.out}", "--force", *arguments)
        return self.documents()

    def plain(self, text):
        return self.oracle.encode(text, add_special_tokens=False).ids

    def test_makes_the_samples(self):
        self.succeed(f"--tokenizer={SAMPLES}/tokenizer.json", "--jsonl=text", f"--out={self.out}",
                     str(SAMPLES / "text.jsonl"))
        for kind in ("bin", "idx", "json"):
            self.assertEqual(pathlib.Path(f"{self.out}.{kind}").read_bytes(), (SAMPLES / f"bpe.{kind}").read_bytes())

    def test_documents_have_their_ends(self):
        text = self.write("a", "The quick brown fox, and the lazy dog.")
        plain = self.plain("The quick brown fox, and the lazy dog.")
        self.assertGreater(len(plain), 12, "what the file says of truncation and padding would show")
        self.assertEqual(self.tokenize("--eos=none", text), [[0] + plain])
        self.assertEqual(self.tokenize("--eos=none", "--bos=none", text), [plain])
        self.assertEqual(self.tokenize("--eos=<|end|>", text), [[0] + plain + [1]])
        self.assertEqual(self.tokenize("--eos=<|end|>", "--bos=<|end|>", text), [[1] + plain + [1]])
        said = self.description()
        self.assertEqual((said["bos_id"], said["eos_id"], said["vocab_size"]), (1, 1, 290))
        with open(self.tokenizer, "rb") as file:
            self.assertEqual(said["tokenizer_sha256"], hashlib.sha256(file.read()).hexdigest())

    def test_eos_is_that_of_the_configuration(self):
        text = self.write("a", "fox")
        for config in ('{"eos_token": "<|begin|>"}', '{"eos_token": {"content": "<|begin|>"}}'):
            self.write("tokenizer_config.json", config)
            self.assertEqual(self.tokenize("--bos=none", text), [self.plain("fox") + [0]])
        for config in ("{}", "[]", "", '{"eos_token": null}'):
            self.write("tokenizer_config.json", config)
            code, _, errors = self.run_tool(f"--tokenizer={self.tokenizer}", f"--out={self.out}", "--force", text)
            self.assertEqual(code, 1)
            self.assertIn("add --eos=TOKEN, or --eos=none", errors)

    def test_a_tokenizer_that_ends_texts_itself_has_no_bos_for_it(self):
        self.oracle.post_processor = tokenizers.processors.TemplateProcessing(
            single="$A <|end|>", special_tokens=[("<|end|>", 1)])
        self.oracle.save(self.tokenizer)
        text = self.write("a", "fox")
        self.assertEqual(self.tokenize("--eos=<|end|>", text), [self.plain("fox") + [1]])
        flags = [f"--tokenizer={self.tokenizer}"]
        self.assertEqual(self.succeed(*flags, "--encode=fox").split(), [str(token) for token in self.plain("fox")])
        self.oracle.post_processor = tokenizers.processors.TemplateProcessing(
            single="<|begin|> $A <|end|>", special_tokens=[("<|begin|>", 0), ("<|end|>", 1)])
        self.oracle.save(self.tokenizer)
        self.assertEqual(self.succeed(*flags, "--encode=fox").split(), ["0"] + [str(token) for token in self.plain("fox")])
        self.assertEqual(self.succeed(*flags, "--decode", given="0 1"), "<|begin|><|end|>\n")
        self.oracle.post_processor = tokenizers.processors.TemplateProcessing(
            single="<|begin|> <|end|> $A", special_tokens=[("<|begin|>", 0), ("<|end|>", 1)])
        self.oracle.save(self.tokenizer)
        self.fail_with("add --bos=TOKEN", f"--tokenizer={self.tokenizer}", f"--out={self.out}2", "--eos=none", text)

    def test_long_texts_are_tokenized_as_if_in_one(self):
        content = "".join(f"line {i}: the lazy dog\n" for i in range(60000))
        self.assertGreater(len(content), tokenize_text.PIECE_BYTES)
        self.assertEqual(self.tokenize("--eos=<|end|>", self.write("a", content)), [[0] + self.plain(content) + [1]])

    def test_many_documents_are_tokenized_in_order(self):
        texts = [str(i) + " the lazy dog sleeps" * 150 for i in range(720)]
        self.assertGreater(sum(map(len, texts)), tokenize_text.BATCH_BYTES)
        source = self.write("a", lines(*({"text": text} for text in texts)))
        self.assertEqual(self.tokenize("--eos=none", "--bos=none", "--jsonl=text", source),
                         [self.plain(text) for text in texts])

    def test_a_document_without_tokens_is_left_out(self):
        self.oracle.normalizer = tokenizers.normalizers.Strip()
        self.oracle.save(self.tokenizer)
        source = self.write("a", lines(*({"text": text} for text in (" ", "fox", " ", "dog", " "))))
        self.assertEqual(self.tokenize("--eos=none", "--bos=none", "--jsonl=text", source),
                         [self.plain("fox"), self.plain("dog")])

    def test_a_prompt_has_the_tokens_of_the_whole_text(self):
        source = self.write("a", lines({"q": "The quick bro", "a": "wn fox"}))
        self.assertEqual(self.tokenize("--eos=<|end|>", "--jsonl=a", "--prompt=q", source),
                         [[0] + self.plain("The quick brown fox") + [1]])
        learned = self.learned()[0]
        self.assertEqual(learned[-1], 1)
        # A token that is of both is learned.
        self.assertIn(self.oracle.decode(learned[:-1]), (" brown fox", "brown fox", "own fox", "rown fox", "wn fox"))
        self.assertLess(len(learned), len(self.plain("The quick brown fox")))

    @unittest.skipIf(jinja2 is None, "there is no package jinja2")
    def test_answers_of_chats_are_learned(self):
        config = {"eos_token": {"content": "<|end|>"}, "chat_template":
                  "{% for m in messages %}{{ m.role[0] + m.content + eos_token }}{% endfor %}"
                  "{% if add_generation_prompt %}a{% endif %}"}
        self.write("tokenizer_config.json", json.dumps(config))
        chat = [{"role": role, "content": text}
                for role, text in (("user", "one"), ("assistant", "two"), ("user", "three"))]
        source = self.write("a", lines({"chat": chat}))
        self.assertEqual(self.tokenize("--jsonl=chat", "--chat", source),
                         [self.plain("uone<|end|>atwo<|end|>uthree<|end|>")])
        self.assertEqual(self.oracle.decode(self.learned()[0], skip_special_tokens=False), "two<|end|>")
        asked = self.succeed(f"--tokenizer={self.folder}", "--chat", "--encode=one")
        self.assertEqual(list(map(int, asked.split())), self.plain("uone<|end|>a"))
        flags = [f"--tokenizer={self.tokenizer}", f"--out={self.out}2", "--jsonl=chat", "--chat"]
        for wrong, why in ((chat[:1], "no message of an assistant"), ("text", "a list of messages \"chat\"")):
            source = self.write("b", lines({"chat": chat}, {"chat": wrong}))
            self.fail_with(f"{source}:2: ", *flags, source)
            self.fail_with(why, *flags, source)
        # A template may need a beginning.
        config["chat_template"] = ("{{ messages[0].content }}"
                                   "{% if messages[0].role == 'user' %}{{ raise_exception('no') }}{% endif %}")
        self.write("tokenizer_config.json", json.dumps(config))
        source = self.write("b", lines({"chat": chat[1:2]}))
        self.fail_with(f"{source}:1: the chat template does not take it", *flags, source)
        self.fail_with("--encode: the chat template does not take it: no", f"--tokenizer={self.folder}", "--chat",
                       "--encode=one")
        self.write("tokenizer_config.json", '{"eos_token": "<|end|>"}')
        self.fail_with("has no chat_template", *flags, source)

    def test_errors_say_what_to_do(self):
        text = self.write("a", "text")
        flags = [f"--out={self.out}", "--eos=none"]
        self.fail_with("has no such token", f"--tokenizer={self.tokenizer}", f"--out={self.out}", "--eos=<|none|>",
                       text)
        self.fail_with("is no tokenizer.json", f"--tokenizer={text}", *flags, text)
        self.fail_with("No such file", f"--tokenizer={text}.json", *flags, text)
        wrong = self.write("b", b"good\xffbad")
        self.fail_with(f"{wrong}: is not UTF-8 at b'good\\xffbad'", f"--tokenizer={self.tokenizer}", *flags, wrong)

    def test_tokens_of_a_text_and_back(self):
        flags = [f"--tokenizer={self.folder}"]
        text = "The quick zwölf 🦊<|end|> fox"
        tokens = self.succeed(*flags, f"--encode={text}")
        self.assertEqual([int(token) for token in tokens.split()], [0] + self.plain(text))
        self.assertGreater(len(self.plain("🦊")), 1, "several tokens are one character")
        self.assertEqual(self.succeed(*flags, "--decode", given=tokens), f"<|begin|>{text}\n")
        self.assertEqual(self.succeed(*flags, "--bos=none", f"--encode={text}").split(), tokens.split()[1:])
        self.assertEqual(self.succeed(*flags, "--decode", given=f"{tokens} 100000"), f"<|begin|>{text}\n")
        self.fail_with('"-1" is no token', *flags, "--decode", given="-1")
        self.fail_with('"256" is no token: they are numbers from 0 to 255', "--bytes", "--decode", given="256")

    def test_what_a_token_says_depends_on_the_one_before(self):
        words = {"<unk>": 0, "▁one": 1, "▁two": 2, "s": 3}
        model = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
        model.decoder = tokenizers.decoders.Metaspace()
        model.save(self.tokenizer)
        self.assertEqual(self.succeed(f"--tokenizer={self.tokenizer}", "--decode", given="1 3 2 2"), "ones two two\n")

    def test_large_vocabularies_need_four_bytes(self):
        vocab = {f"w{i}": i for i in range(65536)}
        for size, dtype in ((65536, "uint16"), (65537, "uint32")):
            vocab[f"w{size - 1}"] = size - 1
            model = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="w0"))
            model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
            model.save(self.tokenizer)
            text = self.write("a", f"w0 w{size - 1}")
            self.assertEqual(self.tokenize("--eos=none", text), [[0, size - 1]])
            self.assertEqual(self.description()["dtype"], dtype)
            self.tokenize("--eos=none", f"--dtype={dtype}", text)
        self.fail_with("which need uint32", f"--tokenizer={self.tokenizer}", f"--out={self.out}2", "--eos=none",
                       "--dtype=uint16", text)

    def test_the_vocabulary_is_as_large_as_its_largest_token(self):
        model = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 41}, unk_token="a"))
        model.save(self.tokenizer)
        self.tokenize("--eos=none", self.write("a", "b"))
        self.assertEqual(self.description()["vocab_size"], 42)
        model = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
        model.add_special_tokens(["<|extra|>"])
        model.save(self.tokenizer)
        self.assertEqual(self.tokenize("--eos=<|extra|>", self.write("a", "b")), [[1, 2]])
        self.assertEqual(self.description()["vocab_size"], 3)


class WriterTest(ToolTest):

    def test_a_document_begins_with_its_first_token(self):
        writer = tokenize_text.TokenWriter(self.out, "uint16")
        for tokens, ends in (([], False), ([5], False), ([], False), ([6], True), ([], True), ([7], True)):
            writer.add(tokens, ends)
        writer.publish(tokenize_text.ByteTokenizer())
        self.assertEqual(self.documents(), [[5, 6], [7]])

    def test_items_are_as_large_as_they_say(self):
        for dtype, typecode in tokenize_text.TYPECODES.items():
            self.assertEqual(8 * array.array(typecode).itemsize, int(dtype[4:]))
        self.assertEqual(array.array("Q").itemsize, 8)


if __name__ == "__main__":
    unittest.main()
