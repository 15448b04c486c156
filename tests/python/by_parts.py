"""The exchange of a unit as the documents describe it, put together from libtagc's reducers in plain Python:
parameters of one class, level and split are packed row by row, reduced, and unpacked. The oracle of what
libtagc does by itself (tagc_model)."""

import ctypes
import zlib

import torch

from tagc import _library as lib

LARGEST = 65504.0  # of fp16


class Reducer:
    """libtagc's, of fp32 values. Collective to make."""

    def __init__(self, comm, n_elems, options):
        self.n_elems, self.options, self._handle = n_elems, None, ctypes.c_void_p()
        is_unit = options["output"] == lib.OUTPUTS["unit"]
        self.n_output = n_elems if is_unit else n_elems // comm.world_size
        fields = self._fields(options)
        lib.call("tagc_reducer_create", comm.handle, ctypes.byref(fields), ctypes.byref(self._handle))

    def _fields(self, options):
        fields = lib.initialised(lib.ReducerOptions, "tagc_reducer_options_init")
        fields.n_elems = self.n_elems
        for name, value in options.items():
            setattr(fields, name, value)
        self.options = options
        return fields

    def change(self, options):
        if options != self.options:
            lib.call("tagc_reducer_change", self._handle, ctypes.byref(self._fields(options)))

    def set_steps(self, n):
        lib.call("tagc_reducer_set_steps", self._handle, n)

    def begin(self, gradient, output):
        arrays = (gradient.data_ptr(), gradient.numel(), output.data_ptr(), output.numel())
        lib.call("tagc_reducer_begin", self._handle, *arrays)

    def end(self):
        stats = lib.initialised(lib.ReducerStats, "tagc_reducer_stats_init")
        lib.call("tagc_reducer_end", self._handle, ctypes.byref(stats))

    def residual(self):
        """A copy, or None."""
        n = lib.load().tagc_reducer_residual_elems(self._handle)
        values = torch.empty(n)
        if n:
            lib.call("tagc_reducer_get_residual", self._handle, values.data_ptr(), n)
        return values if n else None

    def set_residual(self, values):
        lib.call("tagc_reducer_set_residual", self._handle, values.data_ptr(), values.numel())

    def close(self):
        lib.load().tagc_reducer_destroy(self._handle)


class Part:
    """rows: of pieces (name, position in the input, first of the parameter's elements, length)."""

    def __init__(self, kind, level, rows, n_ranks_of_row):
        self.kind, self.level = kind, level
        self.shard = max(sum(piece[3] for piece in row) for row in rows)
        if n_ranks_of_row:  # an all-reduce divides its only row among the ranks
            self.shard = -(-self.shard // (16 * n_ranks_of_row)) * 16 * n_ranks_of_row
        self.n_elems, self.pieces, self.weights = self.shard * len(rows), [], {}
        for r, row in enumerate(rows):
            at = r * self.shard
            for name, start, offset, length in row:
                self.pieces.append((name, start, offset, length, at))
                self.weights[name] = self.weights.get(name, 0) + length
                at += length

    def key(self):
        return tuple((name, offset, length, at) for name, _, offset, length, at in self.pieces)


def parts_of(layout):
    """What one reducer exchanges of a layout, part by part."""
    n_rows = layout.n_elems // layout.row
    rows_of = {}
    pieces = [(i, piece) for i in range(len(layout.parameters)) for piece in layout.pieces_of(i)]
    for i, piece in sorted(pieces, key=lambda each: each[1].start):
        p = layout.parameters[i]
        split = () if p.kind == "dense" else p.split
        rows = rows_of.setdefault((p.kind, p.level, split), [[] for _ in range(n_rows)])
        rows[piece.start // layout.row].append((p.name, piece.start, piece.offset, piece.length))
    n_ranks_of_row = layout.world_size if layout.all_reduce else 0
    return [Part(kind, level, rows, n_ranks_of_row) for (kind, level, _), rows in sorted(rows_of.items())]


def fields_of(settings, schedule, dtype):
    """Returns fields(part) of a model's options: those of tagc_reducer_options. dtype: of gradients."""
    from tagc.torch.schedule.options import of_direct

    def fields(part):
        if not settings.has_levels(part.kind):
            return settings.reducer(part.kind, dtype)
        plan = schedule.plan(part.weights)
        block = {"block": plan.block} if plan.block else {}
        return settings.stored() | of_direct(plan.values, plan.sparsity) | block

    return fields


class Exchange:
    """comm: over the ranks of one place. fields(part) -> options of its reducer. place: of the ranks in their
    hosts."""

    def __init__(self, comm, fields, place=0):
        self._comm, self._fields, self._place = comm, fields, place
        self._reducers = {}  # key of a part -> (part, reducer)
        self._stowed = {}  # residuals of what has no reducer now

    def _prepare(self, layout):
        parts = parts_of(layout)
        made = {}
        for part in parts:
            options = self._fields(part) | {
                "output": lib.OUTPUTS["unit" if layout.all_reduce else "shard"],
                "op": lib.OPS[self.op],
                "rounding_seed": zlib.crc32(f"{min(part.weights)} {self._place}".encode()),
            }
            if (found := self._reducers.pop(part.key(), None)) is not None:
                found[1].change(options)
                made[part.key()] = part, found[1]
            else:
                made[part.key()] = part, options
        for part, reducer in self._reducers.values():
            self._read(part, reducer, self._stowed)
            reducer.close()
        self._reducers = {
            key: (part, how if isinstance(how, Reducer) else Reducer(self._comm, part.n_elems, how))
            for key, (part, how) in made.items()
        }
        for _, reducer in self._reducers.values():
            reducer.set_steps(self.step - 1)
        for part, reducer in self._reducers.values():
            if reducer.residual() is None or not self._stowed.keys() & part.weights.keys():
                continue
            values = torch.full((part.n_elems,), -0.0)
            for name, _, offset, length, at in part.pieces:
                if name in self._stowed:
                    values[at : at + length] = self._stowed[name][offset : offset + length]
            reducer.set_residual(values)
            for name in part.weights:
                self._stowed.pop(name, None)

    def reduce(self, layout, source, target, op, factor, step, rests=False):
        """source and target of one dtype; op: one of lib.OPS. Returns how many sums were beyond fp16.
        Collective."""
        self.op, self.step, n_beyond = op, step, 0
        self._prepare(layout)
        rank = self._comm.rank
        target.zero_()
        for part, reducer in self._reducers.values():
            gradient, output = torch.zeros(part.n_elems), torch.empty(reducer.n_output)
            for _, start, _, length, at in part.pieces:
                gradient[at : at + length] = source[start : start + length]
            kept = self._withdraw(part, reducer, source) if rests else None
            reducer.begin(gradient, output)
            reducer.end()
            if factor != 1.0:
                output *= factor
            elif target.dtype == torch.float16 and op == "avg":
                n_beyond += self._saturate(reducer, output)
            if kept is not None:
                now = reducer.residual()
                reducer.set_residual(kept if now is None else kept + now)
            first = 0 if layout.all_reduce else rank * part.shard
            for _, start, _, length, at in part.pieces:
                if first <= at < first + reducer.n_output:
                    to = start if layout.all_reduce else start - rank * layout.row
                    target[to : to + length] = output[at - first : at - first + length]
        return n_beyond

    @staticmethod
    def _withdraw(part, reducer, source):
        """Takes out of the residual what belongs to parameters whose gradient is zero, and returns it."""
        residual = reducer.residual()
        if residual is None:
            return None
        used = {name for name, start, _, length, _ in part.pieces if source[start : start + length].any()}
        kept = torch.full((part.n_elems,), -0.0)
        resting = [piece for piece in part.pieces if piece[0] not in used]
        for _, _, _, length, at in resting:
            kept[at : at + length] = residual[at : at + length]
            residual[at : at + length] = -0.0
        if not resting:
            return None
        reducer.set_residual(residual)
        return kept

    def _saturate(self, reducer, output):
        """A mean beyond fp16 waits in the residual."""
        rest = output - output.clamp(-LARGEST, LARGEST)
        if not rest.isfinite().all() or not rest.any():
            return 0
        output -= rest
        if (residual := reducer.residual()) is not None:
            is_all, n, rank = rest.numel() == residual.numel(), rest.numel(), self._comm.rank
            own = residual if is_all else residual[rank * n : (rank + 1) * n]
            own.add_(rest, alpha=1 if is_all else residual.numel() // n)
            reducer.set_residual(residual)
        return int(rest.count_nonzero())

    @staticmethod
    def _read(part, reducer, found):
        if (residual := reducer.residual()) is None:
            return
        n_of = {}
        for name, _, offset, length, _ in part.pieces:
            n_of[name] = max(n_of.get(name, 0), offset + length)
        for name, _, offset, length, at in part.pieces:
            values = found.setdefault(name, torch.full((n_of[name],), -0.0))
            values[offset : offset + length] = residual[at : at + length]

    def residuals(self):
        """name -> values in wire order."""
        found = {name: values.clone() for name, values in self._stowed.items()}
        for part, reducer in self._reducers.values():
            self._read(part, reducer, found)
        return found

    def close(self):
        for _, reducer in self._reducers.values():
            reducer.close()
