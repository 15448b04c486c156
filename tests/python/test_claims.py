"""What README and the guide say is run by a test, or stands in a stored result or study. HELD says by which:
README sentence by sentence, by words of it; the guide section by section ("" is what stands above the first).
A sentence or section that comes needs an entry here, and an entry goes with what it names."""

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
TESTS, ANNEX = "tests/python/test_", "tests/python/"
TABLE, ROWS = f"{TESTS}commands.py::test_", "lab/tests/check_stored.py::check_"

README = {
    "makes training on several machines faster": "lab/results/speed.json",
    "It is a PyTorch library with a core in C": f"{TESTS}docs.py::test_snippet",
    "takes a script as it is": f"{TESTS}run.py::test_ddp",
    "It pays between machines": f"{TABLE}the_guide_says_what_its_commands_say",
    "Within one machine it does not help": f"{TESTS}advice.py::test_hosts_of_several_ranks",
    "measures whether it pays on yours": f"{TESTS}advice.py::test_measuring",
    "No GPU yet": "lab/results/speed.json",
    "All measurements are from processors": "lab/results/speed.json",
    "The code for CUDA is tested without a GPU": "tests/gpu/cuda",
    "The cost in loss has been shown up to 12 M": "lab/docs/parity.md",
    "lowers Adam's beta1 from 0.9 to 0.5": f"{TESTS}gentle.py::test_memories_make_betas",
    "keeps it, and sends every value in 4 bits": f"{TESTS}gentle.py::test_levels",
    "A GPU holds 1 byte more per parameter": f"{TESTS}memory.py::test_memory",
    "Questions and bugs": "SECURITY.md",
    "prints the call for its best row": f"{TABLE}the_code_of_the_best_row_is_that_of_readme",
    "begins with what to do before you compress": f"{TESTS}claims.py::test_what_comes_first",
    "GPT-2 with 162 M parameters": "lab/experiments/speed.toml",
    "One machine with two cores plays two": "lab/experiments/speed.toml",
    'with 5 % of the gradient from the first step on': "lab/experiments/speed.toml",
    "The less the baseline waits": f"{ROWS}readme",
    "The more tokens a GPU computes": f"{TABLE}readme_says_what_these_commands_say_by_tokens",
    "Forecasts for 1 B parameters, four machines": f"{TABLE}readme_says_what_these_commands_say_by_tokens",
    "also where compression loses": f"{ROWS}hosts",
    "has forecasts for 1 B and 7 B": f"{TABLE}the_guide_says_what_its_commands_say",
    "each beside a run without compression": "lab/docs/first-try.md",
    "Chance alone is half a per cent": "lab/docs/results.md",
    "In three of five models a beta1 of 0.5": "lab/docs/results.md",
    "sends gradients to the ranks that own": f"{TESTS}fsdp2.py::test_fsdp2",
    "sends every gradient value in 4 bits at first": f"{TESTS}gentle.py::test_levels",
    "When a gradient is mostly noise": f"{TESTS}gentle.py::test_levels",
    "Parameters travel as 4-bit differences": f"{TESTS}gathers.py::test_two_levels",
    "is the method in one file": f"{TESTS}direct_simple.py",
    "tagc began as an implementation of": "lab/docs/paper.md",
}  # fmt: skip

GUIDE = {
    "c": {
        "": "tests/install/use_installed.sh",
        "What is reduced once": "tests/exchange/test_once.c",
        "One array, without a comm": "tests/exchange/test_changes.c",
        "Which options": "tests/exchange/test_reducer_options.c",
        "Processors, and valgrind": "tests/exchange/test_cpu.c",
        "Errors and versions": "tests/abi",
    },
    "choosing": {
        "": "tests/cli/test_cli_options.sh",
        "How it works": "lab/results/speed.json",
        "Is compression worth it?": "tests/bench/test_advice.c",
        "Bits per parameter": "tests/exchange/test_volume.c",
        "Which exchange": "tests/exchange/test_reducer_oracle.c",
        "Which units": "tests/cli/test_cli_buckets.sh",
        "Which tensors": "tests/unit/test_policy.c",
        "Sparsity and error feedback": "lab/docs/results.md",
        "Parameters": "tests/exchange/test_gatherer_delta.c",
        "Several ranks per host": "tests/cli/test_cli_hosts.sh",
        "Local steps": "tests/cli/test_cli_levels.sh",
        "Options that lose gradient values": "tests/cli/test_cli_options.sh",
    },
    "command": {
        "": "tests/cli/test_cli_commands.sh",
        "A first run": "tests/python/door.py",
        "What a run writes": "tests/cli/test_cli_folder.sh",
    },
    "compiled": {
        "": f"{ANNEX}compiled/test_compiled.py::test_compiled",
        "Overlap": f"{ANNEX}compiled/test_compiled.py::test_ahead",
        "Order": f"{ANNEX}compiled/test_compiled.py::test_units",
        "torchtitan": f"{ANNEX}compiled/test_compiled.py::test_eager",
        "Limits": f"{ANNEX}compiled/test_compiled.py::test_hosts",
    },
    "does-it-pay": {
        "": "tests/cli/test_cli_plan.sh",
        "Measure": "tests/cli/test_cli_bench.sh",
        "In PyTorch": f"{TESTS}advice.py::test_measuring",
        "One margin": "tests/bench/test_advice.c",
        "Predict": f"{TABLE}micro_steps_exchange_gradients_once",
        "On a mesh": f"{TESTS}plan_mesh.py::test_the_guide_shows_what_its_command_prints",
        "Draw": f"{ANNEX}report/test_report_page.py",
        "Without a second machine": "lab/tests/test_lab.sh",
        "What distorts a measurement": "lab/docs/disturbed.md",
    },
    "elastic": {
        "": f"{TESTS}elastic.py",
        "torchrun": f"{TESTS}elastic.py::test_a_host_comes_stops_and_goes",
        "torchft": f"{ANNEX}quorum/test_torchft.py::test_as_documented",
        "mpirun": "tests/cli/test_cli_supervise.sh",
    },
    "collectives": {"": f"{ANNEX}collectives/test_collectives.py::test_two_ranks"},
    "fsdp1": {"": f"{ANNEX}fsdp1/test_fsdp1.py::test_fsdp1"},
    "local": {"": f"{ANNEX}local/test_local_steps.py::test_two_sites"},
    "pipeline": {"": f"{ANNEX}pipeline/test_pipeline.py::test_two_ranks"},
    "report": {"": f"{ANNEX}report/test_report_page.py"},
    "torchft": {
        "": f"{ANNEX}quorum/test_torchft.py::test_as_documented",
        "FSDP2 under torchft": f"{ANNEX}quorum/test_torchft.py::test_sharded_replicas_come_and_go",
        "Local steps under torchft": f"{ANNEX}quorum/test_torchft_sites.py::test_sites_come_and_go",
    },
    "weights": {"": f"{ANNEX}weights/test_weight_sync.py::test_bytes_are_exact"},
    "install": {
        "": "tests/install/minbase.sh",
        "PyTorch": f"{TESTS}install.sh",
        "The command": "tests/python/door.py",
        "The C library": "tests/install/use_installed.sh",
    },
    "meshes": {"": f"{TESTS}mesh_losses.py"},
    "pytorch": {
        "": f"{TESTS}internals.py",
        "Before you compress": "lab/results/speed-accumulate.json",
        "One line": f"{TESTS}docs.py::test_snippet",
        "The most used options": f"{TESTS}docs.py::test_the_reference_has_all_options",
        "Hosts of several ranks": f"{TESTS}two_levels.py::test_four_ranks",
        "LoRA and QLoRA": f"{TESTS}frozen.py::test_a_frozen_base_decides_the_advice",
        "Does it pay?": f"{TESTS}advice.py::test_passes_of_a_step",
        "The beginning": f"{TESTS}first_words.py::test_weights_that_look_fresh",
        "Optimizers": f"{TESTS}optimizers.py::test_optimizers_and_schedulers",
        "What works with what": f"{TESTS}patterns.py",
        "Pipelines": f"{ANNEX}pipeline/test_pipeline.py::test_two_ranks",
        "Loops that communicate by themselves": f"{ANNEX}collectives/test_collectives.py::test_two_ranks",
        "Weights for generators": f"{ANNEX}weights/test_weight_sync.py::test_bytes_are_exact",
        "On GPUs": f"{TESTS}staging.py::test_kernels",
        "Checkpoints": f"{TESTS}state.py::test_another_number_of_ranks",
        "Statistics": f"{TESTS}statistics.py::test_statistics",
        "Memory": f"{TESTS}memory.py::test_what_the_process_holds",
        "Messages between ranks": f"{TESTS}native.py::test_interfaces_by_their_variables",
        "Limits": f"{TESTS}limits.py",
        "When something is wrong": f"{TESTS}errors.py::test_two_ranks",
    },
    "run": {
        "": f"{TESTS}run.py::test_as_python_starts_it",
        "What it does": f"{TESTS}run.py::test_several",
        "Options": f"{TESTS}run.py::test_options",
        "Checkpoints": f"{TESTS}run.py::test_last_checkpoint",
        "Limits": f"{TESTS}run.py::test_compiled",
    },
    "sites": {
        "": f"{ANNEX}local/test_local_steps.py",
        "Between hosts, at every step": f"{TESTS}two_levels.py::test_four_ranks",
        "Local steps": f"{ANNEX}local/test_local_steps.py::test_two_sites",
        "Bytes": f"{ANNEX}local/test_local_steps.py::test_sites_of_several_ranks",
        "Seconds": f"{TESTS}advice.py::test_time_of_a_local_step",
        "Encryption": "lab/experiments/wireguard.toml",
    },
    "trainers": {
        "": f"{ANNEX}integrations/test_integrations.py",
        "In loops of your own": f"{TESTS}neighbours.py::test_job",
    },
}


def prose_of(text):
    """Without code, tables, pictures, headings and the marks of markdown."""
    text = re.sub(r"^```.*?^```$|^[#|!].*?$", "", text, flags=re.M | re.S)
    text = re.sub(r"^\|.*$", "", text, flags=re.M)
    return re.sub(r"\]\([^)]*\)|[\[*]", "", text)


def sentences_of(text):
    found = []
    for paragraph in re.split(r"\n\n|\n- ", prose_of(text)):
        one = " ".join(paragraph.split())
        found += re.split(r"(?<=[.:;]) (?=[A-Z`])", one)
    return [sentence for sentence in found if len(re.findall(r"[A-Za-z]{2,}", sentence)) > 2]


def is_there(holder):
    """An annex may have gone, with the tests of its folder."""
    path, _, name = holder.partition("::")
    if path.startswith(ANNEX) and not (ROOT / path).parent.is_dir():
        return True
    path = path if (ROOT / path).exists() else f"{path}.sh"
    if not (ROOT / path).exists():
        return False
    return not name or f"def {name}(" in (ROOT / path).read_text()


def test_every_sentence_of_readme():
    text = (ROOT / "README.md").read_text()
    sentences = [sentence for sentence in sentences_of(text) if not sentence.startswith("Documentation, ")]
    assert len(sentences) > 20
    open_ones = [one for one in sentences if not any(words in one for words in README)]
    assert not open_ones, f"README has sentences that no entry here names: {open_ones}"
    gone = [words for words in README if not any(words in one for one in sentences_of(text))]
    assert not gone, f"README no longer says: {gone}"


@pytest.mark.parametrize("page", sorted(path.stem for path in (ROOT / "docs/guide").glob("*.md")))
def test_every_section_of_the_guide(page):
    titles = ["", *re.findall(r"^## (.*)$", (ROOT / f"docs/guide/{page}.md").read_text(), re.M)]
    assert list(GUIDE[page]) == titles


def test_what_holds_them_is_there():
    holders = {*README.values(), *(holder for page in GUIDE.values() for holder in page.values())}
    assert not (gone := sorted(holder for holder in holders if not is_there(holder))), gone


def test_what_comes_first():
    """The guide's first section is what to do before compressing, in three points, on its first screen."""
    text = (ROOT / "docs/guide/pytorch.md").read_text()
    first = text[text.index("\n## ") + 1 :].split("\n## ")[0]
    assert first.startswith("## Before you compress") and len(re.findall(r"^\d\. ", first, re.M)) == 3
    assert text[: text.index(first) + len(first)].count("\n") < 25


def test_sentences_are_found():
    page = (
        "# A\n\nOne two *three*. `x`: Six [seven eight](nine.md) ten.\n\n| a b c d |\n\n- **X.** Yes we do.\n"
    )
    assert sentences_of(page) == ["One two three.", "Six seven eight ten.", "Yes we do."]
