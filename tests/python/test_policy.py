"""The layer policy in Python, and against models of transformers where that is installed. Which name is of
which class is held by tests/unit/test_policy.c, with the classes of policy.tsv."""

import math
import pathlib
import re

import pytest

from tagc import Error
from tagc.torch.schedule.policy import CLASSES, MIN_ELEMS, Row, classify, clean_name, table

D = 64  # every matrix below is D x D or larger, so at least MIN_ELEMS
C, M, N = "compressed", "mild", "dense"
SAME = {kind: kind for kind in CLASSES}  # how each travels


def kind_of(name):
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


def classes_of(parameters, **options):
    return {row.name: row.class_ for row in classify(parameters, **options)}


def test_shapes_decide_before_names():
    few = MIN_ELEMS // D - 1
    rows = [
        ("h.0.ln_1.weight", (D,), N, "norm"), ("h.0.mlp.c_fc.bias", (D,), N, "bias"), ("scale", (), N,
            "vector"),
        ("cls_token", (1, 1, 4 * MIN_ELEMS), N, "vector"), ("h.0.mlp.c_fc.weight", (few, D), N, "small"),
        ("h.1.mlp.c_fc.weight", (few + 1, D), C, "feed-forward"), ("h.0.attn.c_attn.weight", (few, D), N,
            "small"),
        ("empty.weight", (0, D), N, "empty"), ("q_norm.weight", (D, D), N, "norm"),
        ("blocks.0.moe.gate.weight", (D, 4 * D), N, "router"), ("blocks.0.mlp.gate.weight", (4 * D, D), C,
            "feed"),
        ("conv1.weight", (D, 3, 7, 7), C, "3+ dimensions"), ("something.weight", (D, D), C, "unknown matrix"),
        ("layers.0.self_attn.something.weight", (D, D), M, "unknown use"),
    ]  # fmt: skip
    for row, (name, shape, class_, reason) in zip(classify([row[:2] for row in rows]), rows, strict=True):
        assert (row.name, row.shape, row.n_elems, row.class_) == (name, shape, math.prod(shape), class_), name
        assert reason in row.reason, name


def test_a_module_of_the_users_that_is_called_module_keeps_its_name():
    """What DDP adds, named_parameters() removes: test_names.py."""
    for name in ("encoder.module.weight", "module.weight", "module"):
        assert clean_name(name) == name


def test_equal_names_are_refused():
    with pytest.raises(Error, match="two parameters are called a.weight once .* such as _orig_mod"):
        classify([("a.weight", (D, D)), ("b.weight", (D, D)), ("a._orig_mod.weight", (D, D))])


def test_all_and_none():
    parameters = [("ln.weight", (D,)), ("h.0.attn.c_attn.weight", (D, D)), ("empty", (0,)), ("scalar", ())]
    assert classes_of(parameters, layers="all") == {
        "ln.weight": C, "h.0.attn.c_attn.weight": C, "empty": N, "scalar": C}  # fmt: skip
    assert set(classes_of(parameters, layers="none").values()) == {N}


def test_rules_come_first_and_in_order():
    parameters = [("h.0.mlp.a.weight", (D, D)), ("h.1.mlp.a.weight", (D, D)), ("h.1.ln.weight", (D,))]
    rules = {"h.0.*": "dense", "*.a.weight": "mild", "*.ln.*": "compressed"}
    rows = classify(parameters, rules=rules)
    assert [row.class_ for row in rows] == [N, M, C]
    assert [row.reason for row in rows] == ["rule h.0.*", "rule *.a.weight", "rule *.ln.*"]
    wrapped = [("_orig_mod." + name, shape) for name, shape in parameters]
    assert [row.class_ for row in classify(wrapped, rules=rules)] == [N, M, C]


def test_a_callable_sees_name_and_what_was_given():
    seen = []

    def layers(name, parameter):
        seen.append((name, parameter))
        return "mild"

    assert classes_of([("_orig_mod.a", (D, D)), ("b", (3,))], layers=layers, rules={"b": "dense"}) == {
        "a": M,
        "b": N,
    }
    assert seen == [("a", (D, D))]


@pytest.mark.parametrize("arguments, words", [
    (dict(layers="attention"), ["layers", "'attention'", "'all'", "'none'", "'non-attention-linear'"]),
    (dict(layers=None), ["layers", "None"]),
    (dict(layers=["all"]), ["layers", "['all']"]),
    (dict(layers=lambda name, parameter: "sparse"), ["'sparse'", "a.weight", "'mild'"]),
    (dict(layers=lambda name, parameter: None), ["None", "a.weight"]),
    (dict(layers=lambda name, parameter: ["dense"]), ["['dense']"]),
    (dict(rules={"a.*": "sparse"}), ["rules['a.*']", "'sparse'", "'compressed'"]),
    (dict(rules={"a.*": None}), ["rules['a.*']", "None"]),
    (dict(rules={"b.*": "dense"}), ["rules['b.*']", "matches no parameter", "a.weight"]),
    (dict(rules={"A.weight": "dense"}), ["rules['A.weight']", "matches no parameter"]),
    (dict(rules={"*": "dense", "a.*": "mild"}), ["rules['a.*']", "no effect", "a.weight"]),
    (dict(rules={3: "dense"}), ["pattern", "3"]),
    (dict(rules={"": "dense"}), ["pattern", "''"]),
    (dict(rules=["a.*"]), ["rules", "['a.*']", "dict"]),
    (dict(parameters=[("", (3, 3))]), ["name", "''"]),
    (dict(parameters=[(7, (3, 3))]), ["name", "7"]),
    (dict(parameters=[("a.b\0c", (3, 3))]), ["name", "'a.b\\x00c'", "NUL"]),
    (dict(parameters=[("a\ud800", (3, 3))]), ["name", "'a\\ud800'", "UTF-8"]),
    (dict(parameters=[("a", (2**64, 0))]), [f"a is given as ({2**64}, 0)"]),
    (dict(parameters=[("a", (2**40, 2**40))]), ["shape of a has 2^64 values"]),
    (dict(parameters=[("a", "3x3")]), ["a is given as '3x3'"]),
    (dict(parameters=[("a", "33")]), ["a is given as '33'"]),
    (dict(parameters=[("a", None)]), ["a is given as None"]),
    (dict(parameters=[("a", (3, -1))]), ["a is given as (3, -1)"]),
])  # fmt: skip
def test_hostile(arguments, words):
    with pytest.raises(Error) as raised:
        classify(**{"parameters": [("a.weight", (D, D))], **arguments})
    assert raised.value.status == "argument"
    for word in words:
        assert word in str(raised.value)


def test_what_a_callable_raises_comes_through():
    def layers(name, parameter):
        raise KeyError(name)

    with pytest.raises(KeyError):
        classify([("a", (D, D))], layers=layers)


def test_names_that_look_like_patterns_or_nothing():
    names = ["*", "a[0]", "..", "weight", "w" * 3000, "ü.weight", "q" * 5000 + "_proj"]
    rows = classify([(name, (D, D)) for name in names])
    assert all(row.class_ in CLASSES and row.reason for row in rows)
    assert all(len(line) <= 100 for line in table(rows, SAME).splitlines())
    assert classify([]) == []


def test_the_number_is_that_of_the_header():
    header = pathlib.Path(__file__, "../../../include/tagc/policy.h").resolve().read_text()
    assert re.search(r"^#define TAGC_CLASS_MIN_ELEMS (\d+)$", header, re.M)[1] == str(MIN_ELEMS)
    assert re.findall(r"TAGC_CLASS_([A-Z]+) = (\d)", header) == [
        (kind.upper(), str(i)) for i, kind in enumerate(CLASSES)
    ]


def gpt2_rows(n_layer=12, d=768, n_vocab=50257, n_positions=1024):
    shapes = [("transformer.wte.weight", (n_vocab, d)), ("transformer.wpe.weight", (n_positions, d))]
    for i in range(n_layer):
        h = f"transformer.h.{i}"
        shapes += [(f"{h}.ln_1.weight", (d,)), (f"{h}.ln_1.bias", (d,)), (f"{h}.attn.c_attn.weight", (d,
            3 * d)),
                   (f"{h}.attn.c_attn.bias", (3 * d,)), (f"{h}.attn.c_proj.weight", (d, d)),
                   (f"{h}.mlp.c_fc.weight", (d, 4 * d)), (f"{h}.mlp.c_proj.weight", (4 * d, d))]  # fmt: skip
    return classify(shapes)


def test_table():
    rows = gpt2_rows()
    text = table(rows, {"compressed": "direct 95 % int2", "mild": "direct 85 % int4", "dense": "fp32"})
    lines = text.splitlines()
    assert all(len(line) <= 100 and line == line.rstrip() for line in lines)
    assert not any(line.startswith("  transformer.h.0.") for line in lines)
    fc = next(line for line in lines if "mlp.c_fc.weight" in line)
    assert "transformer.h.*.mlp.c_fc.weight x 12" in fc and f"{12 * 768 * 3072:,}" in fc
    assert "12 norms, 24 biases" in text
    # Sections and the whole, against sums by hand.
    d = 768
    n = {"compressed": 50257 * d + 12 * 9 * d * d, "mild": 1024 * d + 12 * 3 * d * d, "dense": 12 * 5 * d}
    for class_, how in ("compressed", "direct 95 % int2"), ("mild", "direct 85 % int4"), ("dense", "fp32"):
        head = next(line for line in lines if line.startswith(class_))
        assert how in head and f"{n[class_]:,}" in head
        assert f"{100 * n[class_] / sum(n.values()):.1f} %" in head
    assert f"{n['compressed'] + n['mild']:,} of {sum(n.values()):,} elements compressed" in lines[-1]


def test_table_tells_layers_of_another_class_apart():
    rows = [Row(f"h.{i}.a", (D, D), D * D, "dense" if i == 0 else "compressed", "why") for i in range(3)]
    text = table(rows, SAME)
    assert "h.*.a x 2" in text and "h.0.a" in text
    assert f"{2 * D * D:,} of {3 * D * D:,}" in text


def test_table_of_nothing():
    assert table([], SAME) == "0 of 0 elements compressed (0.0 %)"


def known_classes():
    """Returns {name, with * for numbers: class} of matrices in policy.tsv."""
    path = pathlib.Path(__file__).parents[1] / "unit" / "policy.tsv"
    rows = [line.split("\t") for line in path.read_text().splitlines()]
    return {kind_of(name): class_ for name, shape, class_, _ in rows if shape == "256x64"}


SMALL = dict(
    vocab_size=320, hidden_size=D, num_hidden_layers=2, num_attention_heads=4, intermediate_size=4 * D
)


@pytest.mark.parametrize("model, config", [
    ("GPT2LMHeadModel", dict(vocab_size=320, n_positions=128, n_embd=D, n_layer=2, n_head=4)),
    ("LlamaForCausalLM", SMALL),
    ("MistralForCausalLM", SMALL | dict(num_key_value_heads=4)),
    ("Qwen2ForCausalLM", SMALL | dict(num_key_value_heads=4)),
    ("Gemma2ForCausalLM", SMALL | dict(num_key_value_heads=4)),
    ("OPTForCausalLM", SMALL | dict(ffn_dim=4 * D, word_embed_proj_dim=D)),
    ("GPTNeoXForCausalLM", SMALL),
    ("T5ForConditionalGeneration", dict(vocab_size=320, d_model=D, d_kv=D // 4, num_heads=4, num_layers=2,
                                        d_ff=4 * D)),
    ("BertForMaskedLM", SMALL),
    ("MixtralForCausalLM", SMALL | dict(num_key_value_heads=4)),
])  # fmt: skip
def test_models_of_transformers(model, config):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    if not hasattr(transformers, model):
        pytest.skip(f"transformers {transformers.__version__} has no {model}")
    kind = getattr(transformers, model)
    with torch.device("meta"):
        built = kind(kind.config_class(**config))
    rows = classify(built.named_parameters())
    assert len(rows) == len(list(built.parameters()))
    expected = known_classes()
    for row in rows:
        if len(row.shape) < 2 or row.n_elems < MIN_ELEMS:
            assert row.class_ == "dense", row
        else:  # a matrix that the list does not have is a KeyError: names have changed
            assert row.class_ == expected[kind_of(row.name)], row
    assert {row.class_ for row in rows} == set(CLASSES)
    assert all(len(line) <= 100 for line in table(rows, SAME).splitlines())


def test_table_of_the_real_gpt2_and_llama():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    with torch.device("meta"):
        gpt2 = transformers.GPT2LMHeadModel(transformers.GPT2Config())
        llama = transformers.LlamaForCausalLM(transformers.LlamaConfig())
    # GPT-2 small has 124,439,808 parameters, 768 x 2304 of attention in each of 12 layers, and 1024
    # positions.
    text = table(classify(gpt2.named_parameters()), SAME)
    assert "124,318,464 of 124,439,808 elements compressed" in text
    assert len(text.splitlines()) == 3 + 4 + 2 + 1 + 1 and "25 norms, 73 biases" in text
    # Llama 7B: three of four attention matrices of 4096 x 4096 in each of 32 layers, 65 norms.
    text = table(classify(llama.named_parameters()), SAME)
    assert "6,738,149,376 of 6,738,415,616 elements compressed" in text
    assert f"{32 * 3 * 4096 * 4096:,}" in text and "65 norms" in text
