#!/usr/bin/env python3
"""Makes tiny_vocab.json, tiny_merges.txt and bpe_cases.json of this folder: a small byte-level vocabulary and
what two other encoders, tokenizers and tiktoken, make of hostile texts with it. They must agree, or nothing
is written.

    pip install tokenizers tiktoken regex && tests/data/make_bpe_cases.py
"""

import json
import os
import random
import sys
import unicodedata

import regex
import tiktoken
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

HERE = os.path.dirname(os.path.abspath(__file__))
PATTERN = r"""'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""

LESSONS = [
    "A gradient is a list of numbers that says which way is up; we walk the other way, and don't look back.",
    (
        "There's no shorter way: they've tried it, we'll try it, I'm trying it, you'd try it, and it isn't "
        "there."
    ),
    "if (n_bytes > 0) {\n    n_bytes -= 1;\n    return n_bytes;\n}\n",
    "In 2024 there were 12345 rows and 67890 columns; 3.14159 of them mattered, and 1000000 did not.",
    "Der Baum steht draußen, und drüben läuft ein Hund über die Straße. Größe, Höhe, Tür und Öl.",
    "Où est la forêt? Derrière la fenêtre, là où l'été a été très chaud, dit le garçon.",
    "Дерево стоит у реки, и река течёт мимо дерева. Вода холодная, а день тёплый.",
    "木は川のそばに立っている。川は木のそばを流れる。水は冷たく、日は暖かい。",
    "树在河边，河在树边。水是冷的，天是暖的。",
    "나무는 강가에 서 있고 강은 나무 옆을 흐른다.",
    "🙂 🙃 🎉🎉🎉 and 👩‍👩‍👧 walk by the river 🌊.",
]

BY_HAND = [
    "",
    " ",
    "  ",
    "   ",
    "\n",
    "\n\n",
    " \n ",
    "\t",
    "\r\n",
    "a",
    " a",
    "  a",
    "   a",
    "a ",
    "a  ",
    "a   ",
    "a b",
    "a  b",
    "a   b",
    "a \n b",
    "a\n\nb",
    "\n\na",
    "a\u00a0b",
    "a\u00a0\u00a0b",
    "\u3000\u3000木",
    "木\u3000\u3000木",
    "a\u2028 b",
    "\u0085\u0085x",
    "\x1c\x1dx",
    "\x00",
    "a\x00b",
    "\x7f\x80",
    "'s",
    "'t",
    "'re",
    "'ve",
    "'m",
    "'ll",
    "'d",
    "'S",
    "'LL",
    "'x",
    "'",
    "''",
    "''s",
    "'''s",
    " 's",
    " '",
    "it's",
    "they're we've I'm you'll he'd isn't",
    "IT'S",
    "dogs'",
    "'r",
    "'v",
    "'l",
    "'rex",
    "'stop",
    "'dare",
    "a'sb",
    "1's",
    "!'s",
    "!!'s",
    "\u2019s",
    "12345",
    " 12345",
    "a1b2",
    "1a",
    "1.5",
    "½ ² ٣ Ⅷ 一",
    "a½",
    "x²y",
    "日本語テキスト",
    "e\u0301a",
    "\u0301",
    "a\u0301\u0302b",
    " \u0301",
    "🙂🙃",
    " 🙂",
    "👩‍👩‍👧",
    "a🙂b",
    "\U0001f1e9\U0001f1ea",
    "ﬀ",
    "ǅ",
    "ªº",
    "\u200b",
    "a\u200bb",
    "\ufeffa",
    "_",
    "__init__",
    "a_b",
    "...",
    " ...",
    "a...b",
    "(a)",
    '"a"',
    "a, b; c",
    "<|endoftext|>",
    "a<|endoftext|>b",
    "https://x.y/z?q=1#2",
    "\U00020000\U0010ffff",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    " the the the the",
    "abababababababab" * 20,
    "𝟙𝟚𝟛 𝔸𝔹",
    "क्षत्रिय",
    "ไทยภาษา",
    "עברית",
    "العربية ٠١٢",
]


def train():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(LESSONS * 3, trainer)
    return tokenizer


def spelled_bytes():
    prints = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in prints]
    return {chr(byte): byte for byte in prints} | {chr(0x100 + i): byte for i, byte in enumerate(rest)}


def random_texts(rng, n):
    assigned = [
        code for code in range(0x20, 0x30000) if unicodedata.category(chr(code)) not in ("Cn", "Cs", "Co")
    ]
    spaces = [" ", " ", "  ", "\n", "\t", "\u00a0", "\u2003", "\u3000", "\r\n"]
    parts = spaces + [
        "'",
        "'s",
        "'ll",
        "the",
        "un",
        "1",
        "23",
        "é",
        "ß",
        "木",
        "🙂",
        "\u0301",
        ".",
        "!?",
        "_",
    ]
    for i in range(n):
        length = rng.randint(1, 24)
        if i % 2:
            yield "".join(rng.choice(parts) for _ in range(length))
        else:
            yield "".join(
                chr(rng.choice(assigned)) if rng.random() < 0.7 else rng.choice(spaces) for _ in range(length)
            )


def main():
    tokenizer = train()
    table = json.loads(tokenizer.to_str())["model"]
    vocab, merges = table["vocab"], table["merges"]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in merges]
    byte_of = spelled_bytes()
    ranks = {bytes(byte_of[c] for c in piece): token for piece, token in vocab.items()}
    other = tiktoken.Encoding("tiny", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={})

    cases = []
    for text in BY_HAND + LESSONS + list(random_texts(random.Random(7), 400)):
        words = [word.encode() for word in regex.findall(PATTERN, text)]
        assert b"".join(words) == text.encode(), text
        tokens = tokenizer.encode(text).ids
        if tokens != other.encode_ordinary(text):
            sys.exit("the two encoders disagree on %r" % text)
        assert tokenizer.decode(tokens) == text
        cases.append({"text": text, "words": [len(word) for word in words], "tokens": tokens})

    vocab["<|endoftext|>"] = max(vocab.values()) + 1
    with open(os.path.join(HERE, "tiny_vocab.json"), "w") as file:
        json.dump(dict(sorted(vocab.items(), key=lambda item: item[1])), file)
    with open(os.path.join(HERE, "tiny_merges.txt"), "w", encoding="utf-8") as file:
        file.write("#version: 0.2\n" + "".join(merge + "\n" for merge in merges))
    with open(os.path.join(HERE, "bpe_cases.json"), "w") as file:
        file.write("[\n" + ",\n".join(json.dumps(case) for case in cases) + "\n]\n")
    print("%d cases, %d tokens" % (len(cases), len(vocab)))


main()
