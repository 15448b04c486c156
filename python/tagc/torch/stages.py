"""Which stage each parameter is in. Options.stages() names them; tagc.torch.watch tells when a parameter may go on."""

from tagc.torch.watch import Watch, fits_window, pooled

MOST_COHERENCE = 1.3  # of a parameter that may go on; 1 is noise
ALARM = 2.6  # of one that has gone on, and begins anew


def fits(about):
    """Whether a checkpoint's words on stages are such."""
    stages, windows = about.get("stages", {}), about.get("windows", {})
    if not isinstance(stages, dict) or not isinstance(windows, dict):
        return False
    if not all(isinstance(about.get(names, []), list) for names in ("seen", "noisy")) or not isinstance(about.get("moment", True), bool):
        return False
    return (all(isinstance(stage, int) and not isinstance(stage, bool) and stage >= 0 for stage in stages.values())
            and all(fits_window(window) for window in windows.values()))


def _words(values, sparsity):
    return f"{100 * sparsity:g} % zero, {values}" if sparsity else f"every value in {values}"


class Stages:
    """Of one model. All ranks that exchange a parameter decide alike: they decide from sums over ranks."""

    def __init__(self, wrapper, options):
        self._wrapper, self._options = wrapper, options
        self._kinds = {p.name: p.kind for p in wrapper.parameters() if options.stages(p.kind)}
        self._keeps_moment = True  # as far as is known: of what is compressed
        self._now = dict.fromkeys(self._kinds, 0)
        self._next = {}  # name -> the stage from the next exchange of the whole model on
        self._seen = set()  # names that had a gradient over a window: those frozen or never used hold nothing up
        self._noisy = set()  # of these, whose last window was mostly noise
        self.alarms = {}  # name -> coherence, of those that begin anew
        self._watch = Watch(self._kinds)

    def _last(self, name):
        return 0 if self._keeps_moment else len(self._options.stages(self._kinds[name])) - 1

    def _waiting(self):
        return [name for name, stage in self._now.items() if stage < self._last(name) and name in self._seen]

    def has_no_moment(self):
        """Adam's first moment of what is compressed is off."""
        self._keeps_moment = False

    def are_ripe(self):
        """Whether a first moment of what is compressed is all that holds selection up."""
        compressed = {name for name in self._seen if self._kinds[name] == "compressed"}
        return self._keeps_moment and bool(compressed) and compressed <= self._noisy

    def look(self, comm, layout, gradient):
        """Before a reduction of that gradient. Collective where a window is full. Returns the bytes that this rank sent."""
        names = self._watch.add(layout, gradient)
        if not names:
            return 0
        for name, coherence in zip(names, pooled(comm, self._watch.take(names))):
            if coherence is None:
                continue
            self._seen.add(name)
            (self._noisy.add if coherence < MOST_COHERENCE else self._noisy.discard)(name)
            if coherence < MOST_COHERENCE and self._now[name] < self._last(name):
                self._next[name] = self._now[name] + 1
            elif coherence > ALARM and self._now[name] > 0:
                self._next[name] = 0
                self.alarms[name] = coherence
        return 16 * len(names) * (comm.world_size - 1)

    def go_on(self):
        """An exchange of the whole model is over. Returns whether all are in their last stage now, and were not before."""
        if not self._next:
            return False
        self._put(self._now | self._next)
        self._next = {}
        return not self._waiting()

    def take_alarms(self):
        """What there is to say on alarms since the last call, or ""."""
        alarms, self.alarms = self.alarms, {}
        if not alarms:
            return ""
        name = max(alarms, key=alarms.get)
        return (f"gradients of {name}{f' and {len(alarms) - 1} more' if len(alarms) > 1 else ''} point one way again ({alarms[name]:.1f} "
                f"times what noise would, allowed are {ALARM}): compression falls behind, and every value travels for a while")

    def _put(self, stages):
        self._now = stages
        self._wrapper.set_kinds({p.name: {"stage": stages.get(p.name, 0)} for p in self._wrapper.parameters()})

    def scale(self, factor):
        """Gradients are multiplied with that from now on."""
        self._watch.scale(factor)

    def __str__(self):
        used = {(kind, *self._options.stages(kind)[self._now[name]]) for name, kind in self._kinds.items()}
        return ", ".join(f"{kind}: {_words(values, sparsity)}" for kind, values, sparsity in sorted(used))

    def words(self):
        """For the table."""
        if not self._kinds:
            return ""
        gentle = _words(*self._options.stages(next(iter(self._kinds.values())))[0])
        if self._keeps_moment:
            return (f"\nfor now {gentle}, since the optimizer may keep a first moment of it all: compress(model, optimizer)"
                    "\nswitches that off for what is compressed, and goes on to the above when gradients are mostly noise")
        return f"\ngently: {gentle}, and the above when gradients are mostly noise"

    # ---- in checkpoints ----

    def state(self):
        if not self._now:
            return {}
        return {"stages": self._now, "windows": self._watch.state(), "seen": sorted(self._seen), "noisy": sorted(self._noisy), "moment": self._keeps_moment}

    def load(self, about, with_windows):
        """about: of a checkpoint; one that has no stages is of a run that was in the last one from the beginning. Returns whether
        a first moment of what is compressed was off already."""
        if not self._now:
            return False
        self._next, stages = {}, about.get("stages", {})
        last = {name: len(self._options.stages(kind)) - 1 for name, kind in self._kinds.items()}
        self._put({name: min(stages.get(name, n), n) for name, n in last.items()})
        self._watch.load(about.get("windows", {}) if with_windows else {})
        self._seen, self._noisy = (self._kinds.keys() & set(about.get(names, ())) for names in ("seen", "noisy"))
        return not about.get("moment", False)
