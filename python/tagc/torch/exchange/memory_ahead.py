"""Takes the memory of a device that a unit can come to need, before its first exchange: whatever the schedule
does, later ones allocate nothing. It makes probes (tagc_reducer_probe_in), which leave their memory with
the queue and the store."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from tagc.torch.exchange.exchanged_part import ExchangedPart
from tagc.torch.exchange.layout import Layout, Part
from tagc.torch.exchange.reducer import Probe, Way, is_direct
from tagc.torch.exchange.staging import Store
from tagc.torch.exchange.task import Sampler, Task, TaskPart

Options = Callable[[Layout, Part, Mapping[str, Any]], dict[str, Any]]  # all fields of a part's reducer


def all_levels(
    layout: Layout, dtype: torch.dtype, sampler: Sampler
) -> Iterator[tuple[Layout, list[Mapping[str, Any]]]]:
    """Yields layouts with levels of which one needs most, and the fields of each part's reducer. Batches need
    most where all are at one level, and bodies where each is at another."""
    has_levels = [sampler.has_levels(parameter.kind) for parameter in layout.parameters]
    together = [0 if has else p.level for p, has in zip(layout.parameters, has_levels)]
    apart = [i if has else p.level for i, (p, has) in enumerate(zip(layout.parameters, has_levels))]
    for grouped in (layout.regrouped(together), layout.regrouped(apart)):
        variants = [sampler.largest(part, dtype) for part in grouped.parts]
        for number in range(max(map(len, variants))):
            yield grouped, [each[min(number, len(each) - 1)] for each in variants]


def take(
    make: Callable[[Sequence[TaskPart]], Task],
    way: Way,
    layout: Layout,
    fields: Sequence[Mapping[str, Any]],
    dtype: torch.dtype,
    store: Store,
    options: Options,
    exchanges: Sequence[ExchangedPart],
) -> None:
    """Takes what a task of that layout needs. fields: of each part. exchanges: the unit's own. Local."""
    probes: list[Probe] = []
    parts: list[TaskPart] = []
    try:
        for part, own in zip(layout.parts, fields):
            outputs = layout.output_runs(part, way.comm.rank)
            if is_direct(own):
                probes.append(Probe(way.comm, part.n_elems, dtype, store, options(layout, part, own)))
                parts.append((part, probes[-1], outputs))
            else:  # without levels it is the same part in every layout
                found = next(each for each in exchanges if each.has_values_of(layout, part))
                parts.append((part, found.reducer, outputs))
        make(parts).close()
    finally:
        for probe in probes:
            probe.close()
