"""examples/pytorch/fine_tune.py on a small model of the same kind: with every value in fp32 its losses are
those without tagc, bit for bit on two ranks, and with tagc's defaults they fall alike."""

import sys

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
import launch
import ranks


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder with random weights, and a tokenizer of single letters and a few words."""
    folder = tmp_path_factory.mktemp("model")
    words = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        *"abcdefghijklmnopqrstuvwxyz.,",
        "the",
        "of",
        "rank",
    ]
    words += [f"##{letter}" for letter in "abcdefghijklmnopqrstuvwxyz"]
    (folder / "vocab.txt").write_text("\n".join(words))
    transformers.BertTokenizerFast(vocab=str(folder / "vocab.txt")).save_pretrained(folder)
    config = transformers.BertConfig(
        vocab_size=len(words), hidden_size=64, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=128, max_position_embeddings=64, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    torch.manual_seed(1)
    transformers.BertForMaskedLM(config).save_pretrained(folder)
    return folder


def check(rank, world_size, folder):
    sys.path.insert(0, str(launch.EXAMPLES))
    import fine_tune as job

    job.dist.init_process_group = job.dist.destroy_process_group = lambda *_, **__: None
    words = ["--model", str(folder), "--length", "32", "--steps", "12", "--lr", "3e-3"]
    for flags in ([*words, "--ddp"], words):
        alone = job.main([*flags, "--torch"])
        assert job.main(flags, sparsity=0, values="fp32", verbose=False) == alone, flags
    trained = job.main(words, verbose=False)
    assert trained != alone and abs(trained[-1] / alone[-1] - 1) < 0.05, (trained, alone)
    assert trained[-1] < 0.9 * trained[0], trained


def test_fine_tune(model):
    ranks.run(check, 2, model)


def test_no_text(model, tmp_path):
    sys.path.insert(0, str(launch.EXAMPLES))
    import fine_tune as job

    with pytest.raises(SystemExit, match="no .md or .txt file"):
        job.blocks_of([tmp_path], transformers.AutoTokenizer.from_pretrained(model), 32)
