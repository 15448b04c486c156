"""Reading experiment files. README.md has the list of keys; each is checked here, with an error that names
file, key, value and what is allowed."""

import dataclasses
import pathlib
import re

import delay
from common import LAB, LabError, bits_per_s, nearest, read_toml

EXPERIMENTS = LAB / "experiments"
VIEWS = ("times", "exchanges", "bits", "losses", "quality", "timeline", "torch", "cluster", "pipeline")
OF_TORCH = ("torch", "cluster", "pipeline")  # of them
MOST_HOSTS = 64


def _word(pattern, allowed):
    return lambda value: isinstance(value, str) and re.fullmatch(pattern, value), allowed


def _one_of(*words):
    return lambda value: value in words, " or ".join(words)


def _number(kind, low, high):
    def is_good(value):
        return isinstance(value, kind) and not isinstance(value, bool) and low <= value <= high

    return is_good, f"a {'whole ' if kind is int else ''}number from {low} to {high}"


def _list_of(is_item, allowed):
    return lambda value: isinstance(value, list) and value != [] and all(map(is_item, value)), allowed


def _is_text(value):
    return isinstance(value, str) and value.strip() != ""


def _is_pair(value):
    return isinstance(value, list) and len(value) == 2 and all(map(_is_text, value))


def _is_seed(value):
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**32


def _are_options(value):
    return isinstance(value, dict) and all(
        re.fullmatch("[a-z][a-z0-9-]*", name) and isinstance(word, (str, int, float))
        for name, word in value.items()
    )


RATE = r"(?![0.]+[kmg])\d+(?:\.\d+)?[kmg]bit"
RATE_WORDS = 'a rate of tc, as in "500mbit" or "2gbit", or two, up and down, as in "110mbit/500mbit"'

# Where an experiment runs: these may differ between cases.
PLACE_KEYS = {
    "hosts": _number(int, 1, MOST_HOSTS),
    "ranks_per_host": _number(int, 1, 64),
    "rate": _word(f"{RATE}(/{RATE})?", RATE_WORDS),
    "links": _list_of(
        _word(f"{RATE}(/{RATE})?", RATE_WORDS)[0], f"a list with the rate of each host: {RATE_WORDS}"
    ),
    "wireguard": (lambda value: isinstance(value, bool), "true or false"),
    "mtu": _number(int, 576, 65000),
    "burst": _word(r"\d+[km]?b", 'a size of tc, as in "256kb"'),
    "queue": _word(r"\d+ms", 'the longest wait in the queue, as in "50ms"'),
    "latency": (
        delay.is_latency,
        'the way from one host to another, from 0.1 ms to 1 s, as in "10ms" or "500us"',
    ),
    "arms": _list_of(_is_text, "a list of arms, NAME[+option=value]..., or config files"),
    "options": (_are_options, "a table of options of the command, as in batch-size = 1"),
}
KEYS = PLACE_KEYS | {
    "title": (_is_text, "one line of text"),
    "kind": _one_of("bench", "train", "torch"),
    "table": _one_of(*VIEWS),
    "minutes": _number((int, float), 0.01, 10000),
    "memory_gb": _number((int, float), 0.1, 10000),
    "against": (_is_text, "the arm with which the picture compares the others"),
    "pairs": _list_of(_is_pair, 'a list of pairs of arms, as in [["fsdp", "packed"]]'),
    "seeds": _list_of(_is_seed, "a list of whole numbers"),
    "base": (_are_options, "a table of options of tagc train, as in steps = 600"),
    "rates": _list_of(_number(float, 1e-9, 10)[0], "a list of learning rates from 1e-9 to 10"),
    "data": _one_of("manual", "words"),
    "trace": _word(r"\d+(-\d+)?", 'steps, as in "3-4"'),
    "units": (_is_pair, "the two units whose backward the timeline shows"),
}
OF_TRAIN = ("seeds", "data", "trace", "units", "base", "rates")
OF_BENCH = ("pairs", "against")
REQUIRED = ("title", "kind", "table", "minutes", "arms")
DEFAULTS = {
    "hosts": 1,
    "ranks_per_host": 1,
    "rate": "1gbit",
    "mtu": 9000,
    "burst": "256kb",
    "queue": None,
    "latency": None,
    "links": None,
    "wireguard": False,
    "options": {},
}


@dataclasses.dataclass
class Case:
    """One place an experiment runs in."""

    hosts: int
    ranks_per_host: int
    rate: str
    mtu: int
    burst: str
    queue: str | None
    latency: str | None  # one way, None: none is added
    links: list | None  # of each host, instead of rate
    wireguard: bool  # between all hosts
    arms: list
    options: dict

    @property
    def world_size(self):
        return self.hosts * self.ranks_per_host

    def up(self, host):
        """The rate of what a host sends; hosts are numbered from 1."""
        return (self.links[host - 1] if self.links else self.rate).split("/")[0]

    def down(self, host):
        return (self.links[host - 1] if self.links else self.rate).split("/")[-1]

    def way(self, host, to):
        """The rate from one host to another."""
        return min(self.up(host), self.down(to), key=bits_per_s)

    def fastest(self):
        return max(
            (rate for host in range(1, self.hosts + 1) for rate in (self.up(host), self.down(host))),
            key=bits_per_s,
        )

    def link_text(self):
        return ", ".join(self.links) if self.links else self.rate

    def queue_text(self):
        """As tc has it."""
        return self.queue or f"{delay.queue_ms(self.latency) if self.latency else 50}ms"

    def text(self):
        link = (
            self.link_text()
            + (f", {self.latency} one way" if self.latency else "")
            + (", WireGuard" if self.wireguard else "")
        )
        where = f"{self.hosts} hosts, {link}" if self.hosts > 1 else "this machine, no shaped link"
        return f"{where}, {self.world_size} ranks, {len(self.arms)} arms"


@dataclasses.dataclass
class Experiment:
    name: str
    settings: dict
    cases: list

    def __getattr__(self, key):
        return self.settings.get(key)

    @property
    def needs_root(self):
        return any(case.hosts > 1 for case in self.cases)


def split_arm(arm):
    """Returns (label, what it begins with, words) of "experiments/configs/packed.conf+sparsity=0.9", whose
    label is made as by tagc bench, or of "NAME: experiments/configs/packed.conf+sparsity=0.9"."""
    named, _, rest = arm.rpartition(": ")
    begin, *extras = rest.split("+")
    label = named.strip() or "+".join([pathlib.Path(begin).name.removesuffix(".conf"), *extras])
    return label, begin, [f"--{extra}" for extra in extras]


def names():
    return sorted(path.stem for path in EXPERIMENTS.glob("*.toml"))


def numbers(text, n):
    """The numbers of "0,3-5", each below n."""
    found = []
    for word in text.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", word.strip())
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if not first <= last < n:
            raise LabError(
                f'--cases is "{text}", allowed: numbers from 0 to {n - 1} and ranges of them, as in 0,3-5'
            )
        found += range(first, last + 1)
    return sorted(set(found))


def path_of(name):
    path = EXPERIMENTS / f"{name}.toml"
    if not re.fullmatch(r"[A-Za-z0-9_-]+", name) or not path.exists():
        raise LabError(
            f'there is no experiment "{name}"{nearest(name, names())}; known: {", ".join(names())}'
        )
    return path


def _check(where, table, keys):
    for key, value in table.items():
        if key not in keys:
            raise LabError(
                f'{where}: unknown key "{key}"{nearest(key, keys)}; known: {", ".join(sorted(keys))}'
            )
        is_good, allowed = keys[key]
        if not is_good(value):
            raise LabError(f"{where}: {key} is {value!r}, allowed: {allowed}")


def _merged(below, above):
    """`above` wins; tables of options are merged name by name."""
    both = {**below, **above}
    for key in ("options", "base"):
        if key in below and key in above:
            both[key] = {**below[key], **above[key]}
    return both


def read(path, quick=False):
    """The experiment in a file, checked. quick: with what its table [quick] says in its place."""
    settings = read_toml(path)
    quicker, cases = settings.pop("quick", {}), settings.pop("case", [{}])
    for key, value, kind in (("quick", quicker, dict), ("case", cases, list)):
        if not isinstance(value, kind):
            raise LabError(
                f"{path}: {key} is {value!r}, allowed: {'[quick]' if kind is dict else '[[case]]'}, a table"
            )
    _check(path, settings, KEYS)
    _check(f"{path} [quick]", quicker, KEYS)
    for case in cases:
        _check(f"{path} [[case]]", case, PLACE_KEYS)
    if quick:
        settings, cases = _merged(settings, quicker), [_merged(case, quicker) for case in cases]
    _check_whole(path, settings, cases)
    place = _merged(DEFAULTS, {key: value for key, value in settings.items() if key in PLACE_KEYS})
    made = [
        Case(**{key: value for key, value in _merged(place, case).items() if key in PLACE_KEYS})
        for case in cases
    ]
    for case in made:
        if case.links and len(case.links) != case.hosts:
            raise LabError(
                f"{path}: links has {len(case.links)} rates, and hosts is {case.hosts}: must be one for "
                "each host"
            )
        if case.wireguard and settings["kind"] == "torch":
            raise LabError(
                f'{path}: wireguard has no meaning for kind = "torch": gloo would not send through the '
                "tunnels"
            )
        if case.wireguard and case.hosts == 1:
            raise LabError(f"{path}: wireguard has no meaning for hosts = 1: it is between two hosts")
        if case.latency and case.hosts == 1:
            raise LabError(
                f"{path}: latency has no meaning for hosts = 1: it is of the link between two hosts"
            )
    return Experiment(path.stem, {**settings, "case": cases, "is_quick": quick}, made)


def _check_whole(path, settings, cases):
    lists = [case.get("arms", settings.get("arms")) for case in cases]
    for key in REQUIRED:
        if key not in settings and not (key == "arms" and all(lists)):
            raise LabError(f"{path}: {key} is missing, allowed: {KEYS[key][1]}")
    wrong = OF_BENCH if settings["kind"] == "train" else OF_TRAIN
    for key in wrong:
        if key in settings:
            raise LabError(f'{path}: {key} has no meaning for kind = "{settings["kind"]}"')
    if settings["kind"] == "train":
        for arm in sum(lists, []):
            if not split_arm(arm)[1].endswith(".conf"):
                raise LabError(
                    f'{path}: arms has "{arm}", allowed for kind = "train": config files, as in '
                    '"experiments/configs/packed.conf+sparsity=0.9", and NAME: before one if wanted'
                )
    labels = [split_arm(arm)[0] for arm in sum(lists, [])]
    named = [("pairs", label) for label in sum(settings.get("pairs", []), [])]
    for key, label in [*named, *([("against", settings["against"])] if "against" in settings else [])]:
        if label not in labels:
            raise LabError(
                f'{path}: {key} has "{label}"{nearest(label, labels)}; the arms are: {", ".join(labels)}'
            )
    for arms in lists:
        own = [split_arm(arm)[0] for arm in arms]
        if len(set(own)) != len(own):
            raise LabError(f"{path}: two arms of one name among {', '.join(own)}")
    if (settings["table"] in OF_TORCH) != (settings["kind"] == "torch"):
        raise LabError(f'{path}: kind = "torch" and table = "torch", "cluster" or "pipeline" go together')
    if settings["table"] == "quality" and not ("base" in settings and "seeds" in settings):
        raise LabError(f'{path}: table = "quality" needs base and seeds')
    if "rates" in settings and "base" not in settings:
        raise LabError(f"{path}: rates has no meaning without base")
    if settings["table"] == "timeline" and not ("trace" in settings and "units" in settings):
        raise LabError(f'{path}: table = "timeline" needs trace and units')
