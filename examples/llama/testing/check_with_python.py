#!/usr/bin/env python3
"""Trains tiny models with //examples/llama:train and checks that transformers and PEFT read what it writes, and compute
with it what it and //examples/llama:generate do; and that tools/tokenize_text.py makes of chats what transformers does.

usage: check_with_python.py TRAIN GENERATE     (the two programs)

Needs torch, transformers, peft and safetensors. Prints a line for each check and at the end how many passed and failed;
exits with 1 if any failed.
"""
import functools
import itertools
import json
import pathlib
import random
import subprocess
import sys
import tempfile
import traceback

import peft
import torch
from record_models import MODELS, make
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

SEQ, WINDOWS, PROMPT, GENERATED = 16, 40, 8, 16
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
LORA = ("--lora_rank=4", "--lora_alpha=8", "--lr=1e-2")
TOKENIZE = str(pathlib.Path(__file__).resolve().parents[3] / "tools" / "tokenize_text.py")
SAMPLES = pathlib.Path(__file__).resolve().parents[1] / "data" / "samples"
# As models have them: one role after the other; with marks; with a rule; and with thoughts in the last answer alone.
CHATS = {
    "chatml": "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}"
              "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "marked": "{{ bos_token }}{%- for m in messages %}\n  {%- if m.role == 'assistant' %}\n{{ '<|a|>' }}"
              "{% generation %}{{ m.content + eos_token }}{% endgeneration %}\n  {%- else %}"
              "{{ '<|u|>' + m.content | tojson }}{% endif %}\n{%- endfor %}{%- if add_generation_prompt %}{{ '<|a|>' }}{%- endif %}",
    "rule": "{{ bos_token }}{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
            "{{ raise_exception('roles must alternate') }}{% endif %}{% if m['role'] == 'user' %}{{ '[INST] ' + "
            "m['content'] + ' [/INST]' }}{% else %}{{ ' ' + m['content'] + eos_token }}{% endif %}{% endfor %}",
    "thoughts": "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
                "{% if m.role == 'assistant' and loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{{ m.content + '<|im_end|>\n' }}{% endfor %}"
                "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
}
LEARNED = {
    "chatml": " Light.\n<|im_end|>\nja<|im_end|>\nb<|im_end|>\n",
    "marked": " Light.\n<|end|>ja<|end|>b<|end|>",
    "rule": "  Light.\n<|end|> ja<|end|> b<|end|>",
    "thoughts": "<think>\n\n</think>\n\nja<|im_end|>\n<think>\n\n</think>\n\nb<|im_end|>\n",
}


class Run:
    """One training of a model; the checks of it are methods, which return whether it passed and what to say of it."""

    def __init__(self, root, name, precision, adapters):
        self.model, self.precision, self.dtype = root / name, precision, DTYPES[precision]
        self.folder = root / f"{name}_{precision}{'_lora' if adapters else ''}"
        self.folder.mkdir()
        self.exported, self.adapter = self.folder / "exported", self.folder / "adapter"
        self.text, self.adapted = root / "text", adapters
        self.flags = (*LORA, f"--save_adapter={self.adapter}") if adapters else ("--lr=2e-3",)

    def train(self, program):
        metrics = self.folder / "metrics"
        subprocess.run([program, f"--model={self.model}", f"--data={self.text}", f"--eval_data={self.text}",
                        "--ranks=2", "--threads=1", f"--seq={SEQ}", "--batch=4", "--steps=20", "--warmup=2",
                        f"--precision={self.precision}", f"--metrics={metrics}", f"--export={self.exported}",
                        *self.flags], check=True, stdout=subprocess.DEVNULL)
        self.loss = json.loads(metrics.read_text().splitlines()[-1])["eval_loss"]

    def loads(self, _):
        model, info = AutoModelForCausalLM.from_pretrained(self.exported, output_loading_info=True)
        loaded = model.state_dict()
        weights = load_file(self.exported / "model.safetensors")
        ours, theirs = (json.loads((folder / "config.json").read_text()) for folder in (self.exported, self.model))
        dtype = ours.pop("dtype")
        theirs.pop("dtype")
        fine = {"keys": not any(info.values()), "weights": all(loaded[key].equal(weights[key]) for key in weights),
                "dtype": model.dtype == self.dtype and f"torch.{dtype}" == str(self.dtype), "config": ours == theirs}
        return all(fine.values()), ", ".join(f"{key} {'fine' if value else 'WRONG'}" for key, value in fine.items())

    def loss_of(self, model):
        text = torch.tensor(list(self.text.read_bytes()))
        targets = text[1:].view(-1, SEQ)
        with torch.no_grad():
            return model(input_ids=text[:-1].view(-1, SEQ), labels=targets, shift_labels=targets).loss.item()

    def has_the_loss(self, _):
        before = self.loss_of(AutoModelForCausalLM.from_pretrained(self.model, dtype=self.dtype))
        # The program computes with factors in bfloat16 where it does with the base.
        after = self.loss_of(self.with_adapter(self.dtype, autocast_adapter_dtype=False) if self.adapted else
                             AutoModelForCausalLM.from_pretrained(self.exported))
        off = abs(after - self.loss)
        return off < 1e-5 and after < before - 1, f"{self.loss:.4f}, was {before:.4f}, Python's differs by {off:.1e}"

    def generates(self, generate):
        return same_tokens(generate, AutoModelForCausalLM.from_pretrained(self.exported, dtype=torch.float32),
                           self.text, f"--model={self.exported}")

    def adapter_loads(self, _):
        model = peft.AutoPeftModelForCausalLM.from_pretrained(self.adapter, dtype=self.dtype)
        ours = load_file(self.adapter / "adapter_model.safetensors")
        theirs = peft.get_peft_model_state_dict(model, save_embedding_layers=False)
        same = ours.keys() == theirs.keys() and all(theirs[key].equal(ours[key]) for key in ours)
        return same, f"PEFT has {'the same' if same else 'OTHER'} factors"

    def with_adapter(self, dtype, **options):
        base = AutoModelForCausalLM.from_pretrained(self.model, dtype=dtype)
        return peft.PeftModel.from_pretrained(base, self.adapter, **options)

    def merges(self, _):
        theirs = dict(self.with_adapter(self.dtype).merge_and_unload().named_parameters())
        ours = load_file(self.exported / "model.safetensors")
        same = ours.keys() == theirs.keys() and all(theirs[key].equal(ours[key]) for key in ours)
        return same, "the bits of merge_and_unload()" if same else "OTHER BITS than merge_and_unload()"

    def generates_with_adapter(self, generate):
        return same_tokens(generate, self.with_adapter(torch.float32), self.text, f"--model={self.model}",
                           f"--adapter={self.adapter}")


FULL = {"transformers loads it": Run.loads, "loss": Run.has_the_loss, "greedy tokens": Run.generates}
ADAPTED = {**FULL, "adapter": Run.adapter_loads, "merged": Run.merges,
           "greedy tokens by the adapter": Run.generates_with_adapter}


def same_tokens(generate, model, text, *flags):
    """Whether the program, with these flags, goes on from pieces of the text together as `model` does from each."""
    text = list(text.read_bytes())
    prompts = [text[begin:begin + PROMPT + begin // PROMPT] for begin in range(0, 3 * PROMPT, PROMPT)]
    ours = subprocess.run([generate, *flags, "--tokens=-", "--batch", "--temperature=0", f"--max_tokens={GENERATED}",
                           "--precision=fp32", "--threads=1"], check=True, stdout=subprocess.PIPE,
                          stderr=subprocess.DEVNULL, text=True,
                          input="".join(",".join(map(str, prompt)) + "\n" for prompt in prompts)).stdout
    theirs = [model.generate(input_ids=torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)).long(),
                             do_sample=False, max_new_tokens=GENERATED, pad_token_id=0)[0, len(prompt):].tolist()
              for prompt in prompts]
    same = all(len(tokens) == GENERATED for tokens in theirs) and theirs == [
        list(map(int, line.split(","))) for line in ours.splitlines()]
    return same, "the same" if same else "OTHERS"


def make_inputs(root):
    draw = random.Random(1)
    words = "to be or not that is the question".split()
    text = " ".join(draw.choice(words) for _ in range(SEQ * WINDOWS))
    (root / "text").write_text(text[:SEQ * WINDOWS + 1])
    for seed, (name, (model_class, config)) in enumerate(MODELS.items()):
        torch.manual_seed(seed)
        config.vocab_size = 256  # bytes are tokens
        make(model_class, config).save_pretrained(root / name)


def tokenize(*arguments):
    return subprocess.run([sys.executable, TOKENIZE, *map(str, arguments)], check=True, stdout=subprocess.PIPE,
                          text=True).stdout


def numbers(path, size):
    data = path.read_bytes()
    return [int.from_bytes(data[i:i + size], "little") for i in range(0, len(data), size)]


def said(*contents):
    roles = itertools.cycle(("user", "assistant"))
    return [{"role": role, "content": content} for role, content in zip(roles, contents)]


def check_chat(root, name):
    """Tokens are those of transformers, and so is what is learned, where a template marks it."""
    folder = root / f"chat_{name}"
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(SAMPLES / "tokenizer.json"), bos_token="<|begin|>",
                                     eos_token="<|end|>", chat_template=CHATS[name])
    theirs.save_pretrained(folder)
    chats = [said("Why is snow white?", " Light.\n", 'zwölf "é" 😀', "ja"), said("a", "b")]
    (folder / "chats").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    tokenize(f"--tokenizer={folder}", f"--out={folder}/out", "--jsonl=messages", "--chat", folder / "chats")
    marks = [theirs.apply_chat_template(chat, return_dict=True, return_assistant_tokens_mask=name == "marked")
             for chat in chats]
    tokens, mask = numbers(folder / "out.bin", 2), numbers(folder / "out.mask", 1)
    learned = theirs.decode([token for token, is_learned in zip(tokens, mask) if is_learned])
    question = theirs.apply_chat_template(said("Why?"), add_generation_prompt=True, return_dict=True)
    asked = tokenize(f"--tokenizer={folder}", "--chat", "--encode=Why?")
    fine = {"tokens": tokens == sum((chat["input_ids"] for chat in marks), []), "learned": learned == LEARNED[name],
            "marks": name != "marked" or mask == sum((chat["assistant_masks"] for chat in marks), []),
            "question": list(map(int, asked.split())) == question["input_ids"]}
    return all(fine.values()), ", ".join(f"{key} {'fine' if value else 'WRONG'}" for key, value in fine.items())


def check_answers(root, train):
    """Answers alone are learned: the evaluation is transformers' loss with labels of -100 in the prompts."""
    folder, name = root / "answers", next(iter(MODELS))
    folder.mkdir()
    draw = random.Random(2)
    lines = [{"q": "".join(draw.choices("ab ", k=draw.randint(0, 30))), "a": "".join(draw.choices("cd", k=length))}
             for length in range(1, 30)]
    (folder / "qa").write_text("".join(json.dumps(line) + "\n" for line in lines))
    tokenize("--bytes", f"--out={folder}/qa", "--jsonl=a", "--prompt=q", folder / "qa")
    data = f"{folder}/qa.bin"
    subprocess.run([train, f"--model={root / name}", f"--data={data}", f"--eval_data={data}", "--ranks=2",
                    "--threads=1", "--seq=64", "--batch=4", "--rows=packed", "--steps=10", "--lr=2e-3", "--precision=fp32",
                    f"--metrics={folder}/metrics", f"--export={folder}/exported"], check=True,
                   stdout=subprocess.DEVNULL)
    ours = json.loads((folder / "metrics").read_text().splitlines()[-1])["eval_loss"]
    model, total, count = AutoModelForCausalLM.from_pretrained(folder / "exported"), 0.0, 0
    for line in lines:
        tokens = torch.tensor([list((line["q"] + line["a"]).encode())])
        labels = tokens.clone()
        labels[0, :max(len(line["q"]), 1)] = -100  # nothing predicts the first token
        learned = (labels != -100).sum().item()
        if learned > 0:
            with torch.no_grad():
                total += model(input_ids=tokens, labels=labels).loss.item() * learned
            count += learned
    return abs(ours - total / count) < 1e-5, f"{ours:.4f}, Python's differs by {abs(ours - total / count):.1e}"


def check_all(root, train, generate):
    for what, function, last in (*((f"chat {name}", check_chat, name) for name in CHATS),
                                 ("answers alone", check_answers, train)):
        yield tell(what, functools.partial(function, root, last))
    for name, precision, adapters in itertools.product(MODELS, DTYPES, (False, True)):
        run = Run(root, name, precision, adapters)
        run.train(train)
        for what, function in (ADAPTED if adapters else FULL).items():
            yield tell(f"{run.folder.name}: {what}", functools.partial(function, run, generate))


def tell(what, check):
    try:
        passed, text = check()
    except Exception:  # pylint: disable=broad-except
        passed, text = False, traceback.format_exc()
    print(f"{'passed' if passed else 'FAILED'}: {what}: {text}", flush=True)
    return passed


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        root = pathlib.Path(scratch)
        make_inputs(root)
        results = list(check_all(root, *map(pathlib.Path, sys.argv[1:])))
    print(f"{sum(results)} passed, {len(results) - sum(results)} failed")
    sys.exit(0 if all(results) else 1)


if __name__ == "__main__":
    main()
