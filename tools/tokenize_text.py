#!/usr/bin/env python3
"""Makes token files, which //examples/llama trains on, from text or JSON lines.

  tools/tokenize_text.py --tokenizer=MODEL/tokenizer.json --out=data/books --validation=0.01 books/*.txt
  tools/tokenize_text.py --tokenizer=MODEL/tokenizer.json --out=data/web --jsonl=text web.jsonl
  tools/tokenize_text.py --tokenizer=MODEL/tokenizer.json --out=data/qa --jsonl=answer --prompt=question qa.jsonl
  tools/tokenize_text.py --tokenizer=MODEL/tokenizer.json --out=data/chats --jsonl=messages --chat chats.jsonl
  zcat web.jsonl.gz | tools/tokenize_text.py --bytes --out=data/web --jsonl=text /dev/stdin
  tools/tokenize_text.py --tokenizer=MODEL --encode="Once upon a time" | generate --model=MODEL --tokens=- |
      tools/tokenize_text.py --tokenizer=MODEL --decode

Writes OUT.bin (tokens), OUT.idx (where documents begin) and OUT.json (what they are); with --validation all of them for
OUT.train and OUT.validation. examples/llama/data/README.md says to the byte what they hold. They get these names when
all is written, OUT.json last.

A text file is one document, or with --documents=paragraph each of its paragraphs; of JSON lines, each is one. Empty
ones are left out. A text file may be larger than memory: what is longer than 256 KiB is tokenized in pieces, which end
where a line does. A line of JSON lines has to fit into memory.

The text of a special token ("<|endoftext|>") in a document becomes that token, as it does with transformers.

With --prompt or --chat only answers are learned: OUT.mask says which tokens these are, and training takes
--rows=packed. A chat is a list of messages such as {"role": "user", "content": "Why?"}. The model's chat template makes
a text of it, in which the messages of the role "assistant" are learned, with what ends them. A template may write an
earlier message differently once others follow, as some do with thoughts; then that message is not learned.

--encode and --decode are for //examples/llama:generate: the first prints the tokens of one text, as it would begin a
document, or with --chat as a user's message and what leads to the answer; the second reads tokens and prints their text
as it comes, special tokens included.
"""

import argparse
import array
import hashlib
import json
import os
import signal
import sys
import time

FORMAT, VERSION, VERSION_WITH_MASK = "fsdp-tokens", 1, 2
TYPECODES = {"uint16": "H", "uint32": "I"}  # of array.array
PIECE_BYTES = 256 << 10
BATCH_BYTES = 2 << 20
SECONDS_BETWEEN_REPORTS = 2


class Failure(Exception):
    """A text for the user."""


class ByteTokenizer:
    """Tokens are bytes of UTF-8."""

    vocab_size = 256
    bos = eos = sha256 = None

    def encode_batch(self, texts):
        return [list(text) for text in texts]

    def encode_with_places(self, texts):
        return [(list(text), [(i, i + 1) for i in range(len(text))]) for text in texts]

    def decode(self, tokens):
        return bytes(tokens).decode(errors="replace")


class FileTokenizer:
    """What a tokenizer.json says."""

    def __init__(self, path, bos, eos):
        if os.path.isdir(path):
            path = os.path.join(path, "tokenizer.json")
        try:
            import tokenizers  # pylint: disable=import-outside-toplevel
        except ImportError as error:
            raise Failure(f"--tokenizer needs Python's package tokenizers ({error}): install it (pip install "
                          "tokenizers), or make tokens of bytes with --bytes") from error
        try:
            with open(path, "rb") as file:
                content = file.read()
        except OSError as error:
            raise Failure(f"--tokenizer={path}: {error.strerror}") from error
        try:
            self.tokenizer = tokenizers.Tokenizer.from_str(content.decode())
        except Exception as error:  # pylint: disable=broad-except
            raise Failure(f"--tokenizer={path} is no tokenizer.json that tokenizers {tokenizers.__version__} reads: "
                          f"{error}") from error
        # A file may have been written with those of a training that needed them.
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        # Newer versions can leave out where tokens come from.
        self.encode = getattr(self.tokenizer, "encode_batch_fast", self.tokenizer.encode_batch)
        self.path = path
        self.sha256 = hashlib.sha256(content).hexdigest()
        # Ids may have gaps.
        self.vocab_size = max(self.tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        self.eos = self.id_of("eos", eos if eos is not None else self.default_eos())
        self.bos = self.default_bos() if bos is None else self.id_of("bos", bos)

    def encode_batch(self, texts):
        return [encoding.ids for encoding in self.encode(texts, add_special_tokens=False)]

    def encode_with_places(self, texts):
        """Tokens, and the range of characters of the text that each stands for."""
        return [(encoding.ids, encoding.offsets)
                for encoding in self.tokenizer.encode_batch(texts, add_special_tokens=False)]

    def decode(self, tokens):
        return self.tokenizer.decode(tokens, skip_special_tokens=False)

    def id_of(self, flag, token):
        if token == "none":
            return None
        found = self.tokenizer.token_to_id(token)
        if found is None:
            raise Failure(f"--{flag}={token}: {self.path} has no such token")
        return found

    def default_eos(self):
        """eos_token of the file that transformers keeps beside tokenizer.json."""
        path = os.path.join(os.path.dirname(self.path), "tokenizer_config.json")
        try:
            with open(path, encoding="utf-8") as file:
                token = json.load(file).get("eos_token")
        except (OSError, ValueError, AttributeError):
            token = None
        if isinstance(token, dict):  # an AddedToken
            token = token.get("content")
        if not isinstance(token, str):
            raise Failure(f"{path} does not say which token ends a document: add --eos=TOKEN, or --eos=none")
        return token

    def default_bos(self):
        """What the tokenizer itself puts before a text, which the model has seen there."""
        encoding = self.tokenizer.encode("a")
        before = encoding.ids[:(encoding.special_tokens_mask + [0]).index(0)]
        if len(before) > 1:
            raise Failure(f"{self.path} puts several tokens before a text: add --bos=TOKEN, or --bos=none")
        return before[0] if before else None


class ChatTemplate:
    """What transformers makes of messages, by the files beside a tokenizer.json."""

    def __init__(self, path):
        try:
            import jinja2.sandbox  # pylint: disable=import-outside-toplevel
        except ImportError as error:
            raise Failure(f"--chat needs Python's package jinja2 ({error}): install it (pip install jinja2)") from error
        folder = path if os.path.isdir(path) else os.path.dirname(path)
        path, alone = (os.path.join(folder, name) for name in ("tokenizer_config.json", "chat_template.jinja"))
        try:
            with open(path, encoding="utf-8") as file:
                config = json.load(file)
            template = config.get("chat_template")
            if isinstance(template, list):
                template = {named["name"]: named["template"] for named in template}.get("default")
            if os.path.exists(alone):
                path = alone
                with open(path, encoding="utf-8") as file:
                    template = file.read()
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise Failure(f"--chat: {path}: {error}") from error
        if not isinstance(template, str):
            raise Failure(f"--chat: {path} has no chat_template: take the tokenizer of a model for chats, or write the "
                          "texts yourself, for --jsonl and --prompt")
        self.tokens = {name: token["content"] if isinstance(token, dict) else token for name, token in config.items()
                       if name.endswith("_token") and isinstance(token, (str, dict))}
        self.error = jinja2.TemplateError
        try:
            self.template = self.environment().from_string(template)
        except jinja2.TemplateError as error:
            raise Failure(f"--chat: {path}: its chat template cannot be read: {error}") from error

    def environment(self):
        """What transformers gives templates."""
        import jinja2.ext  # pylint: disable=import-outside-toplevel
        import jinja2.sandbox  # pylint: disable=import-outside-toplevel

        class Generation(jinja2.ext.Extension):
            """Reads over the marks that some templates have around what assistants say."""

            tags = {"generation"}

            def parse(self, parser):
                next(parser.stream)
                return parser.parse_statements(["name:endgeneration"], drop_needle=True)

        def refuse(message):
            raise jinja2.TemplateError(message)

        def to_json(value, ensure_ascii=False, **how):
            return json.dumps(value, ensure_ascii=ensure_ascii, **how)

        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols])
        environment.filters["tojson"] = to_json
        environment.globals.update(raise_exception=refuse, strftime_now=time.strftime)
        return environment

    def text(self, messages, tools=None, answer_follows=False):
        return self.template.render(messages=messages, tools=tools, documents=None,
                                    add_generation_prompt=answer_follows, **self.tokens)

    def learned(self, messages, tools):
        """The text, and the ranges of its characters that assistants say."""
        text, ranges = self.text(messages, tools), []
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            try:
                before = self.text(messages[:i], tools, answer_follows=True)
                with_it = self.text(messages[:i + 1], tools)
            except self.error:  # it takes no such beginning
                continue
            if with_it.startswith(before) and text.startswith(with_it):
                ranges.append((len(before), len(with_it)))
        if not ranges:
            raise self.error("no message of an assistant is in the text as it is said")
        return text, ranges


def place_to_cut(text):
    """How many bytes of a text longer than PIECE_BYTES make a piece of it. That is where most tokenizers have a token
    end, after a line that neither ends nor is followed by white space; else after a line, a word or a character."""
    cut = text.rfind(b"\n", 0, PIECE_BYTES)
    while cut > 0:
        if not (text[cut - 1:cut].isspace() or text[cut + 1:cut + 2].isspace()):
            return cut + 1
        cut = text.rfind(b"\n", 0, cut)
    for cut in (text.rfind(b"\n", 0, PIECE_BYTES) + 1, text.rfind(b" ", 0, PIECE_BYTES)):
        if cut > 0:
            return cut
    cut = PIECE_BYTES
    while cut > PIECE_BYTES - 3 and text[cut] & 0xC0 == 0x80:
        cut -= 1
    return cut


def paragraph_blocks(file):
    """Lines, and None after each paragraph."""
    begins_line = True
    while True:
        line = file.readline(PIECE_BYTES)
        if not line:
            return
        yield None if begins_line and not line.strip() else line
        begins_line = line.endswith(b"\n")


def text_pieces(file, paragraphs):
    """(bytes, whether a document ends with them), in order."""
    blocks = paragraph_blocks(file) if paragraphs else iter(lambda: file.read(PIECE_BYTES), b"")
    rest = bytearray()
    for block in blocks:
        if block is None:
            if rest:
                yield bytes(rest), True
            rest.clear()
            continue
        rest += block
        while len(rest) > PIECE_BYTES:  # what ends the document is not empty
            cut = place_to_cut(rest)
            yield bytes(rest[:cut]), False
            del rest[:cut]
    if rest:
        yield bytes(rest), True


def document_of(value, options, chat):
    """The text of a line of JSON, and the ranges of it that are learned, or None: all is."""
    answer = value[options.jsonl]
    if chat is not None:
        if not isinstance(answer, list):
            raise TypeError("it is no list")
        return chat.learned(answer, value.get("tools"))
    if options.prompt is None or not answer:
        return answer, None
    text = value[options.prompt] + answer
    sizes = [len(part.encode() if options.bytes else part) for part in (value[options.prompt], text)]
    return text, [tuple(sizes)]


def jsonl_pieces(file, path, options, chat):
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        try:
            text, learned = document_of(json.loads(line), options, chat)
            data = text.encode()
        except UnicodeEncodeError as error:
            raise Failure(f"{path}:{number}: \"{options.jsonl}\" is no valid Unicode: {error}") from error
        except () if chat is None else chat.error as error:
            raise Failure(f"{path}:{number}: the chat template does not take it: {error}") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            fields = [f"a list of messages \"{options.jsonl}\"" if options.chat else f"a text \"{options.jsonl}\""]
            fields += [] if options.prompt is None else [f"a text \"{options.prompt}\""]
            raise Failure(f"{path}:{number}: is no JSON object with {' and '.join(fields)} in it ({error}); "
                          f"--jsonl{'' if options.prompt is None else ' and --prompt'} names the field") from error
        if data:
            yield data, True, learned


def decoded(data, path):
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        around = data[max(error.start - 20, 0):error.start + 20]
        raise Failure(f"{path}: is not UTF-8 at {around!r}: convert it, or make tokens of bytes with --bytes") \
            from error


def pieces_of(options):
    """(text, whether a document ends with it, the ranges of it that are learned or None), of all files: bytes with
    --bytes."""
    chat = ChatTemplate(options.tokenizer) if options.chat else None
    for path in options.files:
        try:
            with open(path, "rb") as file:
                if options.jsonl is not None:
                    pieces = jsonl_pieces(file, path, options, chat)
                else:
                    pieces = ((*piece, None) for piece in text_pieces(file, options.documents == "paragraph"))
                for data, ends, learned in pieces:
                    yield data if options.bytes else decoded(data, path), ends, learned
        except OSError as error:
            raise Failure(f"{path}: {error.strerror}") from error


def encoded(tokenizer, pieces):
    """(tokens, whether each is learned or None, whether a document ends with them, how long they were as text),
    tokenized many at a time."""
    batch, size = [], 0

    def flush():
        texts = [text for text, _, _ in batch]
        if not batch or batch[0][2] is None:
            tokens = tokenizer.encode_batch(texts)
            return [(ids, None, ends, len(text)) for ids, (text, ends, _) in zip(tokens, batch)]
        return [(ids, [any(begin < place[1] and place[0] < end for begin, end in learned) for place in places], ends,
                 len(text))
                for (ids, places), (text, ends, learned) in zip(tokenizer.encode_with_places(texts), batch)]

    for piece in pieces:
        batch.append(piece)
        size += len(piece[0])
        if size >= BATCH_BYTES:
            yield from flush()
            batch, size = [], 0
    yield from flush()


class TokenWriter:
    """The files of one name, which they get in publish()."""

    def __init__(self, name, dtype, has_mask=False):
        self.name = name
        self.dtype = dtype
        self.num_tokens = 0
        self.num_documents = 0
        self.is_open = False  # a document
        self.has_mask = has_mask
        self.files = {}
        try:
            for kind in ("bin", "idx", "mask", "json") if has_mask else ("bin", "idx", "json"):
                self.files[kind] = open(self.temporary(kind), "xb")  # pylint: disable=consider-using-with
        except OSError as error:
            self.discard()
            raise Failure(f"{self.temporary(kind)}: {error.strerror}") from error

    def temporary(self, kind):
        return f"{self.name}.{kind}.part{os.getpid()}"

    def put(self, kind, typecode, values):
        values = array.array(typecode, values)
        if sys.byteorder == "big":
            values.byteswap()
        try:
            self.files[kind].write(memoryview(values).cast("B"))
        except OSError as error:
            raise Failure(f"{self.temporary(kind)}: {error.strerror}") from error

    def add(self, tokens, ends, mask=()):
        """Of one document after the other; one without any is left out."""
        if tokens and not self.is_open:
            self.put("idx", "Q", [self.num_tokens])
            self.num_documents += 1
        self.put("bin", TYPECODES[self.dtype], tokens)
        if self.has_mask:
            self.put("mask", "B", mask)
        self.num_tokens += len(tokens)
        self.is_open = not ends and (self.is_open or bool(tokens))

    def publish(self, tokenizer):
        description = {
            "format": FORMAT,
            "version": VERSION_WITH_MASK if self.has_mask else VERSION,
            "dtype": self.dtype,
            "num_tokens": self.num_tokens,
            "num_documents": self.num_documents,
            "vocab_size": tokenizer.vocab_size,
            "bos_id": tokenizer.bos,
            "eos_id": tokenizer.eos,
            "tokenizer_sha256": tokenizer.sha256,
            **({"mask": True} if self.has_mask else {}),
        }
        try:
            self.files["json"].write(json.dumps(description, indent=1).encode() + b"\n")
            for file in self.files.values():
                file.flush()
                os.fsync(file.fileno())
                file.close()
            # Nobody finds the description of one file beside another.
            if os.path.exists(f"{self.name}.json"):
                os.remove(f"{self.name}.json")
            for kind in self.files:
                os.replace(self.temporary(kind), f"{self.name}.{kind}")
        except OSError as error:
            raise Failure(f"{self.name}: {error.strerror}") from error

    def discard(self):
        """What has no name yet is gone."""
        for kind, file in self.files.items():
            try:
                file.close()
                os.remove(self.temporary(kind))
            except OSError:
                pass


class Progress:
    """A line on stderr now and then."""

    def __init__(self, quiet):
        self.quiet = quiet
        self.begin = self.last = time.monotonic()
        self.documents = self.tokens = self.text = 0

    def add(self, tokens, ends, text):
        self.documents += ends
        self.tokens += tokens
        self.text += text
        now = time.monotonic()
        if now - self.last >= SECONDS_BETWEEN_REPORTS and not self.quiet:
            self.last = now
            print(f"tokenize_text: {self.documents:,} documents, {self.tokens:,} tokens, {self.text / 1e6:,.1f} M "
                  f"characters, {self.tokens / (now - self.begin):,.0f} tokens/s", file=sys.stderr, flush=True)


def is_held_out(seed, document, fraction):
    """Whether the document of that number is for validation: as likely as `fraction`, whatever the others are."""
    digest = hashlib.sha256(f"{seed} {document}".encode()).digest()
    return int.from_bytes(digest[:8], "little") < fraction * 2**64


def write_tokens(options, tokenizer, writers):
    """Each document to one of `writers`: those to train on, and to validate with if there are two."""
    progress = Progress(options.quiet)
    begins = True
    for tokens, mask, ends, text in encoded(tokenizer, pieces_of(options)):
        mask = mask or [True] * len(tokens)
        if begins and tokenizer.bos is not None:
            tokens, mask = [tokenizer.bos] + tokens, [False] + mask
        if ends and tokenizer.eos is not None:
            tokens, mask = tokens + [tokenizer.eos], mask + [True]
        writers[is_held_out(options.seed, progress.documents, options.validation)].add(tokens, ends, mask)
        progress.add(len(tokens), ends, text)
        begins = ends
    for writer in writers:
        if writer.num_tokens == 0:
            raise Failure(f"no document for {writer.name}: there are {progress.documents} in all"
                          + ("; with --documents=paragraph a text file has more than one, and another --seed or "
                             "--validation draws others" if len(writers) > 1 else ""))


def dtype_for(wanted, vocab_size):
    if wanted == "uint16" and vocab_size > 1 << 16:
        raise Failure(f"--dtype=uint16: the tokenizer has {vocab_size} tokens, which need uint32")
    return wanted or ("uint16" if vocab_size <= 1 << 16 else "uint32")


def tokenizer_of(options, eos):
    if options.bytes:
        return ByteTokenizer()
    # A chat template writes them where it wants them.
    return FileTokenizer(options.tokenizer, options.bos or ("none" if options.chat else None), eos)


def encode(options):
    tokenizer = tokenizer_of(options, eos="none")
    text = os.fsencode(options.encode)
    if not options.bytes:
        text = decoded(text, "--encode")
    if options.chat:
        chat = ChatTemplate(options.tokenizer)
        try:
            text = chat.text([{"role": "user", "content": text}], answer_follows=True)
        except chat.error as error:
            raise Failure(f"--encode: the chat template does not take it: {error}") from error
    tokens = tokenizer.encode_batch([text])[0]
    print(*([] if tokenizer.bos is None else [tokenizer.bos]), *tokens)


def tokens_of(lines, options):
    """Numbers with commas or white space between. A model may have more of them than its tokenizer, without a text."""
    largest = 255 if options.bytes else (1 << 32) - 1
    for word in (word for line in lines for word in line.replace(",", " ").split()):
        if not word.isdecimal() or int(word) > largest:
            raise Failure(f"\"{word}\" is no token: they are numbers from 0 to {largest}")
        yield int(word)


def text_as_it_comes(tokenizer, tokens):
    """What each token adds to the text. What a token says may depend on the one before it, and a character may be of
    several tokens: so the last ones that had some text are decoded again, with and without what has come since."""
    before, new = [], []
    for token in tokens:
        new.append(token)
        text = tokenizer.decode(before + new)
        if text.endswith("\N{REPLACEMENT CHARACTER}"):
            continue
        yield text[len(tokenizer.decode(before)):]
        before, new = new, []
    yield tokenizer.decode(before + new)[len(tokenizer.decode(before)):]


def decode(options):
    tokenizer = tokenizer_of(options, eos="none")
    for text in text_as_it_comes(tokenizer, tokens_of(sys.stdin, options)):
        print(text, end="", flush=True)
    print()


def tokenize(options):
    tokenizer = tokenizer_of(options, options.eos or ("none" if options.chat else None))
    names = [f"{options.out}.train", f"{options.out}.validation"] if options.validation else [options.out]
    for name in names:
        for path in (f"{name}.{kind}" for kind in ("bin", "idx", "mask", "json")):
            if os.path.exists(path) and not options.force:
                raise Failure(f"{path} is there already: remove it, or add --force")
    writers = []
    try:
        for name in names:
            writers.append(TokenWriter(name, dtype_for(options.dtype, tokenizer.vocab_size),
                                       has_mask=options.chat or options.prompt is not None))
        write_tokens(options, tokenizer, writers)
        for writer in writers:
            writer.publish(tokenizer)
            print(f"{writer.name}.bin: {writer.num_documents} documents, {writer.num_tokens} tokens ({writer.dtype}) "
                  f"of {tokenizer.vocab_size}")
    finally:
        for writer in writers:
            writer.discard()


def fraction_of_documents(text):
    value = float(text)
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError("has to be between 0 and 1")
    return value


def parse(arguments):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", metavar="FILE", help="text in UTF-8, or JSON lines; any bytes with --bytes")
    how = parser.add_mutually_exclusive_group(required=True)
    how.add_argument("--tokenizer", metavar="FILE",
                     help="the model's tokenizer.json, or the folder it is in; needs Python's package tokenizers")
    how.add_argument("--bytes", action="store_true",
                     help="tokens are the bytes of the text, 0 to 255, without bos and eos")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--out", metavar="OUT", help="path of what is written, without .bin")
    what.add_argument("--encode", metavar="TEXT", help="print the tokens of this text, with bos before it, and no eos")
    what.add_argument("--decode", action="store_true",
                      help="print the text of the tokens on standard input, as they come")
    parser.add_argument("--jsonl", metavar="FIELD",
                        help="each line of a file is a JSON object, a document, whose text is this field")
    parser.add_argument("--prompt", metavar="FIELD",
                        help="with --jsonl: the text of this field comes before, in the same document, and is not "
                        "learned")
    parser.add_argument("--chat", action="store_true",
                        help="what --jsonl names is a list of messages, of which those of assistants are learned; "
                        "--encode's text is a user's message. Needs Python's package jinja2")
    parser.add_argument("--documents", choices=["file", "paragraph"], default="file",
                        help="what of a text file is a document; between paragraphs there are blank lines "
                        "(default: %(default)s)")
    parser.add_argument("--bos", metavar="TOKEN",
                        help="the token that begins each document, or none (default: what the tokenizer itself puts "
                        "there; with --chat none, as the template writes it)")
    parser.add_argument("--eos", metavar="TOKEN",
                        help="the token that ends each document, or none (default: eos_token of the "
                        "tokenizer_config.json beside the tokenizer.json; with --chat none)")
    parser.add_argument("--dtype", choices=sorted(TYPECODES), help="(default: uint16 for up to 65536 tokens)")
    parser.add_argument("--validation", type=fraction_of_documents, metavar="FRACTION", default=0,
                        help="documents to hold out: drawn one by one, so that about this part of them is")
    parser.add_argument("--seed", type=int, default=0, help="of that draw (default: %(default)s)")
    parser.add_argument("--force", action="store_true", help="replace files that are there")
    parser.add_argument("--quiet", action="store_true", help="no progress on stderr")
    options = parser.parse_args(arguments)
    if options.bytes and (options.bos is not None or options.eos is not None):
        parser.error("--bos and --eos are tokens of a --tokenizer")
    if options.bytes and options.chat:
        parser.error("--chat takes the chat template beside a --tokenizer")
    if options.prompt is not None and (options.jsonl is None or options.chat):
        parser.error("--prompt names a field of JSON lines whose text is in --jsonl's field, not of chats")
    if options.chat and options.out is not None and options.jsonl is None:
        parser.error("--chat: name the field that has the messages, such as --jsonl=messages")
    if options.jsonl is not None and options.documents != "file":
        parser.error("--documents is about text files: of JSON lines each is a document")
    if options.out is None:
        if options.decode and options.chat:
            parser.error("--chat is for --out and --encode")
        only_files = ("jsonl", "prompt", "documents", "eos", "dtype", "validation", "force")
        given = [f"--{name}" for name in only_files if getattr(options, name) != parser.get_default(name)]
        if options.files or given:
            parser.error("--encode and --decode take no files and no flags of files: "
                         + " ".join(given + options.files))
        return options
    if not options.files:
        parser.error("name the files to make tokens of")
    if options.out.endswith(".bin") or not os.path.basename(options.out):
        parser.error("--out is a path without .bin, such as data/books")
    return options


def main():
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # takes what was begun away
    try:
        options = parse(sys.argv[1:])
        if options.encode is not None:
            encode(options)
        elif options.decode:
            decode(options)
        else:
            tokenize(options)
    except Failure as failure:
        print(f"tokenize_text: {failure}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
