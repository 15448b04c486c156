/* Where the values of a tensor lie in the arrays that ranks exchange, and who owns them.
 *
 * Owner o has elements [o * chunk, (o + 1) * chunk) of a tensor, at `offset` of his row of the part. Rows of one place come one after
 * the other, host by host, so that what a host sums for a place is one array:
 *
 *   SHARD                   | place 0: host 0 | host 1 | ... | place 1: host 0 | ...       (L, H, width)
 *   HOST_SHARD, UNIT        | place 0 | place 1 | ...                                      (L, width)
 *
 * In a flat, owner o has positions [o * width, (o + 1) * width), and `offset` is where a tensor begins. With ranges of the caller's, his
 * row has his elements of each tensor, one after the other.
 */
#include "codec/elements.h"
#include "unit/unit.h"

#include <math.h>
#include <string.h>

static int has_rows_of_hosts(const tagc_model *model) {
    return model->options.layout.output == TAGC_OUTPUT_SHARD;
}

uint64_t tagc_part_place_elems(const tagc_model_part *part) {
    return part->width * (has_rows_of_hosts(part->model) ? (uint64_t)part->model->n_hosts : 1);
}

/* The row of an owner in the part's array, and back. */
static uint64_t row_of(const tagc_model *model, uint64_t owner) {
    uint64_t n_places = (uint64_t)model->n_places;
    return has_rows_of_hosts(model) ? owner % n_places * (uint64_t)model->n_hosts + owner / n_places : owner;
}

static uint64_t owner_of(const tagc_model *model, uint64_t row) {
    uint64_t n_hosts = (uint64_t)model->n_hosts;
    return has_rows_of_hosts(model) ? row % n_hosts * (uint64_t)model->n_places + row / n_hosts : row;
}

uint64_t tagc_part_own_row(const tagc_model_part *part) {
    const tagc_model *model = part->model;
    return row_of(model, (uint64_t)(model->rank % model->n_owners)) * part->width;
}

tagc_slot tagc_member_slot(const tagc_model *model, const tagc_member *t, uint64_t owner) {
    if (t->begins)
        return (tagc_slot){t->offsets[owner], t->begins[owner], t->begins[owner + 1] - t->begins[owner],
                           t->begins[owner + 1] - t->begins[owner]};
    if (!tagc_model_is_flat(model)) {
        uint64_t first = owner * t->chunk, n_left = first < t->n_elems ? t->n_elems - first : 0;
        return (tagc_slot){t->offset, first, n_left < t->chunk ? n_left : t->chunk, t->chunk};
    }
    uint64_t width = t->part->width, begin = owner * width, end = begin + width,
             last = t->offset + t->n_elems;
    uint64_t from = begin < t->offset ? t->offset : begin < last ? begin : last, to = end < last ? end : last;
    uint64_t n = to > from ? to - from : 0;
    return (tagc_slot){from > begin ? from - begin : 0, from - t->offset, n, n};
}

uint64_t tagc_model_row_owner(const tagc_model *model, uint64_t row) {
    uint64_t n_places = (uint64_t)model->n_places, place = (uint64_t)model->place;
    return has_rows_of_hosts(model) ? row * n_places + place : place;
}

static uint64_t owner_of_element(const tagc_model_part *part, const tagc_member *t, uint64_t element) {
    if (!t->begins)
        return tagc_model_is_flat(part->model) ? (t->offset + element) / part->width : element / t->chunk;
    uint64_t low = 0, high = (uint64_t)part->model->n_owners;
    while (high - low > 1) {
        uint64_t middle = low + (high - low) / 2;
        if (t->begins[middle] <= element)
            low = middle;
        else
            high = middle;
    }
    return low;
}

/* Where an element is: its owner, its position in the owner's row, and how many elements from there on are beside it. */
typedef struct spot {
    uint64_t owner, in_row, n;
} spot;

static spot spot_of(const tagc_model_part *part, const tagc_member *tensor, uint64_t element) {
    uint64_t owner = owner_of_element(part, tensor, element);
    tagc_slot slot = tagc_member_slot(part->model, tensor, owner);
    return (spot){owner, slot.offset + (element - slot.first), slot.first + slot.room - element};
}

void tagc_part_stretches(const tagc_model_part *part, const tagc_member *tensor, uint64_t first, uint64_t n,
                         tagc_stretch_fn visit, void *context) {
    while (n > 0) {
        spot s = spot_of(part, tensor, first);
        uint64_t n_here = s.n < n ? s.n : n;
        visit(context, row_of(part->model, s.owner) * part->width + s.in_row, first, n_here);
        first += n_here;
        n -= n_here;
    }
}

uint64_t tagc_part_find(const tagc_model_part *part, const tagc_member *tensor, uint64_t element) {
    const tagc_model *model = part->model;
    spot s = spot_of(part, tensor, element);
    uint64_t place = s.owner % (uint64_t)model->n_places;
    if (place != (uint64_t)model->place) return UINT64_MAX;
    return row_of(model, s.owner) * part->width + s.in_row - place * tagc_part_place_elems(part);
}

/* A stretch of the part's array, of one owner's chunk of one tensor: elements [first, first + n_real), then padding. */
typedef struct stretch {
    const tagc_member *tensor; /* NULL: padding alone */
    uint64_t first, n_real, n;
} stretch;

/* That which begins at position `at`, and reaches to `end` at most. *hint: the member to look at first. */
static stretch stretch_at(const tagc_model_part *part, uint64_t at, uint64_t end, uint32_t *hint) {
    const tagc_model *model = part->model;
    uint64_t owner = owner_of(model, at / part->width), in_row = at % part->width, n = part->width - in_row;
    if (n > end - at) n = end - at;
    if (*hint >= part->n_members ||
        tagc_member_slot(model, &model->tensors[part->members[*hint]], owner).offset > in_row)
        *hint = 0;
    for (; *hint < part->n_members; ++*hint) {
        const tagc_member *t = &model->tensors[part->members[*hint]];
        tagc_slot slot = tagc_member_slot(model, t, owner);
        if (in_row < slot.offset || in_row - slot.offset >= slot.room) continue;
        uint64_t in_slot = in_row - slot.offset, n_real = in_slot < slot.n ? slot.n - in_slot : 0;
        stretch s = {t, slot.first + in_slot, 0, slot.room - in_slot < n ? slot.room - in_slot : n};
        s.n_real = n_real < s.n ? n_real : s.n;
        return s;
    }
    return (stretch){.n = n};
}

/* A stretch of the caller's array of a flat: *n elements from position `at` on lie there side by side. */
static float *in_array(const tagc_model_part *part, int is_sums, uint64_t at, uint64_t *n) {
    uint64_t owner = owner_of(part->model, at / part->width), in_row = at % part->width;
    int is_chunk = is_sums && part->model->options.layout.output != TAGC_OUTPUT_UNIT; /* the rank's own */
    if (*n > part->width - in_row) *n = part->width - in_row;
    float *array = is_sums ? part->sums : (float *)(uintptr_t)part->gradient;
    return array + (is_chunk ? 0 : owner * part->width) + in_row;
}

/* The first of a tensor's pieces that ends behind an element. */
static const tagc_piece *piece_behind(const tagc_piece *pieces, size_t n, uint64_t element) {
    size_t low = 0, high = n;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (pieces[middle].first + pieces[middle].n_elems > element)
            high = middle;
        else
            low = middle + 1;
    }
    return pieces + low;
}

static char *at_element(const void *array, int element, uint64_t i) {
    return (char *)(uintptr_t)array + i * tagc_element_bytes(element);
}

/* values: as pieces are, or fp32. What no piece covers is zero. */
static void read_pieces(const tagc_piece *pieces, size_t n_pieces, int from, uint64_t first, uint64_t n,
                        int to, void *values) {
    const tagc_piece *piece = piece_behind(pieces, n_pieces, first), *last = pieces + n_pieces;
    for (uint64_t done = 0; done < n;) {
        uint64_t next = piece < last ? piece->first : UINT64_MAX, element = first + done, n_here = n - done;
        if (next > element) {
            if (n_here > next - element) n_here = next - element;
            memset(at_element(values, to, done), 0, n_here * tagc_element_bytes(to));
        } else {
            uint64_t n_left = piece->n_elems - (element - next);
            if (n_here > n_left) n_here = n_left;
            if (from == to)
                memcpy(at_element(values, to, done), at_element(piece->values, from, element - next),
                       n_here * tagc_element_bytes(to));
            else
                tagc_elements_read(piece->values, from, element - next, n_here, (float *)values + done);
            if (n_here == n_left) piece++;
        }
        done += n_here;
    }
}

/* from: the unit's gradients, or its sums. */
static void read_part(const tagc_model_part *part, int is_sums, uint64_t begin, uint64_t n, int element,
                      void *values) {
    const tagc_model_unit *unit = part->unit;
    int from = is_sums ? part->model->options.formats.sum : part->model->options.formats.gradient;
    uint32_t hint = 0;
    for (uint64_t at = begin, n_here; part->gradient && at < begin + n; at += n_here) {
        n_here = begin + n - at;
        const float *array = in_array(part, is_sums, at, &n_here);
        memcpy(at_element(values, element, at - begin), array, n_here * sizeof *array);
    }
    for (uint64_t at = begin; !part->gradient && at < begin + n;) {
        stretch s = stretch_at(part, at, begin + n, &hint);
        void *to = at_element(values, element, at - begin);
        const tagc_member *t = s.tensor;
        if (s.n_real > 0 && is_sums)
            read_pieces(unit->sums + t->first_sum, t->n_sums, from, s.first, s.n_real, element, to);
        else if (s.n_real > 0)
            read_pieces(unit->gradients + t->first_gradient, t->n_gradients, from, s.first, s.n_real, element,
                        to);
        memset(at_element(to, element, s.n_real), 0, (s.n - s.n_real) * tagc_element_bytes(element));
        at += s.n;
    }
}

void tagc_part_read(const tagc_model_part *part, uint64_t begin, uint64_t n, int element, void *values) {
    read_part(part, 0, begin, n, element, values);
}

void tagc_part_read_sums(const tagc_model_part *part, uint64_t begin, uint64_t n, void *values) {
    read_part(part, 1, begin, n, part->model->options.formats.sum, values);
}

/* Returns how many of the elements have a piece. values: fp32 or as pieces are; NULL: NaN. */
static uint64_t write_pieces(const tagc_piece *pieces, size_t n_pieces, int to, uint64_t first, uint64_t n,
                             int from_element, const void *values) {
    enum { N_VOID = 256 };
    float not_finite[N_VOID];
    for (int i = 0; i < N_VOID && !values; i++) not_finite[i] = NAN;
    const tagc_piece *piece = piece_behind(pieces, n_pieces, first), *last = pieces + n_pieces;
    uint64_t n_written = 0;
    for (; piece < last && piece->first < first + n; piece++) {
        uint64_t from = piece->first > first ? piece->first : first, end = piece->first + piece->n_elems;
        if (end > first + n) end = first + n;
        n_written += end - from;
        for (uint64_t n_here; from < end; from += n_here) {
            n_here = values || end - from < N_VOID ? end - from : N_VOID;
            if (values && from_element == to)
                memcpy(at_element(piece->values, to, from - piece->first),
                       at_element(values, to, from - first), n_here * tagc_element_bytes(to));
            else
                tagc_elements_write(values ? (const float *)values + (from - first) : not_finite,
                                    piece->values, to, from - piece->first, n_here);
        }
    }
    return n_written;
}

/* Values of a flat that the caller has as one array. */
static void write_array(const tagc_model_part *part, int is_sums, uint64_t begin, uint64_t n,
                        const float *values) {
    for (uint64_t done = 0, n_here; done < n; done += n_here) {
        n_here = n - done;
        float *array = in_array(part, is_sums, begin + done, &n_here);
        for (uint64_t i = 0; !values && i < n_here; i++) array[i] = NAN;
        if (values) memcpy(array, values + done, n_here * sizeof *array);
    }
}

void tagc_part_write(const tagc_model_part *part, uint64_t begin, uint64_t n, int element,
                     const void *values) {
    uint32_t hint = 0;
    if (part->gradient) { /* all is fp32 */
        write_array(part, 1, begin, n, values);
        return;
    }
    for (uint64_t at = begin; at < begin + n;) {
        stretch s = stretch_at(part, at, begin + n, &hint);
        if (s.n_real > 0)
            write_pieces(part->unit->sums + s.tensor->first_sum, s.tensor->n_sums,
                         part->model->options.formats.sum, s.first, s.n_real, element,
                         values ? at_element(values, element, at - begin) : NULL);
        at += s.n;
    }
}

/* 1: an element that is not zero has no piece. */
static int is_any_lost(const tagc_piece *pieces, size_t n_pieces, uint64_t first, uint64_t n,
                       const float *values) {
    for (uint64_t i = 0; i < n; i++) {
        const tagc_piece *piece = piece_behind(pieces, n_pieces, first + i);
        int is_covered = piece < pieces + n_pieces && piece->first <= first + i;
        if (!is_covered && values[i] != 0) return 1;
    }
    return 0;
}

void tagc_part_write_gradient(const tagc_model_part *part, uint64_t begin, uint64_t n, const float *values,
                              const tagc_member **lacks) {
    uint32_t hint = 0;
    if (part->gradient) {
        write_array(part, 0, begin, n, values);
        return;
    }
    for (uint64_t at = begin; at < begin + n;) {
        stretch s = stretch_at(part, at, begin + n, &hint);
        const tagc_piece *pieces = s.n_real > 0 ? part->unit->gradients + s.tensor->first_gradient : NULL;
        const float *from = values ? values + (at - begin) : NULL;
        at += s.n;
        if (!pieces) continue;
        uint64_t n_written =
            write_pieces(pieces, s.tensor->n_gradients, part->model->options.formats.gradient, s.first,
                         s.n_real, TAGC_ELEMENT_FP32, from);
        if (from && n_written < s.n_real &&
            is_any_lost(pieces, s.tensor->n_gradients, s.first, s.n_real, from))
            *lacks = s.tensor;
    }
}

const void *tagc_member_at(const tagc_model *model, const tagc_model_unit *unit, const tagc_member *tensor,
                           uint64_t element) {
    const tagc_piece *pieces = unit->gradients + tensor->first_gradient;
    const tagc_piece *piece = piece_behind(pieces, tensor->n_gradients, element);
    if (piece == pieces + tensor->n_gradients || piece->first > element) return NULL;
    return at_element(piece->values, model->options.formats.gradient, element - piece->first);
}

float tagc_member_read(const tagc_model *model, const tagc_model_unit *unit, const tagc_member *tensor,
                       uint64_t element) {
    if (tensor->part->gradient) return tensor->part->gradient[tensor->offset + element];
    const void *at = tagc_member_at(model, unit, tensor, element);
    return at ? tagc_element_read(at, model->options.formats.gradient, 0) : 0;
}

/* ---- for a device ---- */

typedef struct row_of_place {
    uint64_t begin, end;
    int is_left; /* some stretch is elsewhere */
} row_of_place;

static void note_elsewhere(void *context, uint64_t at, uint64_t first, uint64_t n) {
    row_of_place *place = context;
    (void)first, (void)n;
    place->is_left |= at < place->begin || at >= place->end;
}

int tagc_part_has(const tagc_model_part *part, const tagc_member *tensor, uint64_t first, uint64_t n) {
    uint64_t n_place = tagc_part_place_elems(part), begin = n_place * (uint64_t)part->model->place;
    row_of_place place = {begin, begin + n_place, 0};
    tagc_part_stretches(part, tensor, first, n, note_elsewhere, &place);
    return !place.is_left;
}

typedef struct run_of_piece {
    const tagc_piece *piece;
    uint64_t begin; /* of what `at` counts from */
    int element;
    tagc_run_fn visit;
    void *context;
} run_of_piece;

static void visit_run(void *context, uint64_t at, uint64_t first, uint64_t n) {
    const run_of_piece *run = context;
    run->visit(run->context, at_element(run->piece->values, run->element, first - run->piece->first),
               at - run->begin, n);
}

void tagc_part_runs(const tagc_model_part *part, int is_sums, tagc_run_fn visit, void *context) {
    const tagc_model *model = part->model;
    run_of_piece run = {.begin = is_sums ? tagc_part_own_row(part)
                                         : tagc_part_place_elems(part) * (uint64_t)model->place,
                        .element = is_sums ? model->options.formats.sum : model->options.formats.gradient,
                        .visit = visit,
                        .context = context};
    for (uint32_t i = 0; i < part->n_members; i++) {
        const tagc_member *t = &model->tensors[part->members[i]];
        size_t n = is_sums ? t->n_sums : t->n_gradients;
        run.piece = is_sums ? part->unit->sums + t->first_sum : part->unit->gradients + t->first_gradient;
        for (const tagc_piece *end = run.piece + n; run.piece < end; run.piece++)
            tagc_part_stretches(part, t, run.piece->first, run.piece->n_elems, visit_run, &run);
    }
}

uint64_t tagc_unit_elems(const tagc_model_unit *unit, int is_sums) {
    const tagc_model *model = unit->model;
    int is_by_place = !is_sums && model->within && model->options.hosts.summed;
    uint64_t n_all = 0;
    for (uint32_t i = 0; i < unit->n_members; i++) {
        const tagc_member *t = &model->tensors[unit->members[i]];
        uint64_t first, n = t->n_elems;
        if (is_sums || (is_by_place && !has_rows_of_hosts(model)))
            tagc_member_owned(model, model->rank, t, &first, &n);
        for (int host = 0; is_by_place && has_rows_of_hosts(model) && host < model->n_hosts; host++) {
            uint64_t n_host;
            tagc_member_owned(model, host * model->n_places + model->place, t, &first, &n_host);
            n = host == 0 ? n_host : n + n_host;
        }
        n_all += n;
    }
    return n_all;
}

void tagc_part_copy_residual(const tagc_model_part *part, float *residual, int to_pieces) {
    uint64_t n_place = tagc_part_place_elems(part), begin = n_place * (uint64_t)part->model->place;
    uint32_t hint = 0;
    for (uint64_t at = begin; at < begin + n_place;) {
        stretch s = stretch_at(part, at, begin + n_place, &hint);
        const tagc_piece *pieces = s.n_real > 0 ? part->unit->gradients + s.tensor->first_gradient : NULL,
                         *last = pieces ? pieces + s.tensor->n_gradients : NULL, *piece = last;
        if (pieces) piece = piece_behind(pieces, s.tensor->n_gradients, s.first);
        for (; piece < last && piece->first < s.first + s.n_real; piece++) {
            uint64_t from = piece->first > s.first ? piece->first : s.first,
                     end = piece->first + piece->n_elems;
            if (end > s.first + s.n_real) end = s.first + s.n_real;
            float *theirs = (float *)piece->values + (from - piece->first),
                  *own = residual + (at - begin) + (from - s.first);
            memcpy(to_pieces ? theirs : own, to_pieces ? own : theirs, (end - from) * sizeof *own);
        }
        at += s.n;
    }
}

typedef struct zero_search {
    const tagc_piece *piece;
    uint64_t begin, end; /* the place's row */
    int element, is_zero;
} zero_search;

static void look_for_values(void *context, uint64_t at, uint64_t first, uint64_t n) {
    enum { N_READ = 1024 };
    zero_search *search = context;
    float values[N_READ];
    if (at < search->begin || at >= search->end) return;
    for (uint64_t done = 0, n_here; search->is_zero && done < n; done += n_here) {
        n_here = n - done < N_READ ? n - done : N_READ;
        tagc_elements_read(search->piece->values, search->element, first - search->piece->first + done,
                           n_here, values);
        for (uint64_t i = 0; i < n_here; i++) search->is_zero &= values[i] == 0;
    }
}

int tagc_part_is_zero(const tagc_model_part *part, const tagc_member *tensor) {
    uint64_t n_place = tagc_part_place_elems(part), begin = n_place * (uint64_t)part->model->place;
    zero_search search = {.begin = begin,
                          .end = begin + n_place,
                          .element = part->model->options.formats.gradient,
                          .is_zero = 1};
    for (size_t i = 0; i < tensor->n_gradients; i++) {
        search.piece = &part->unit->gradients[tensor->first_gradient + i];
        tagc_part_stretches(part, tensor, search.piece->first, search.piece->n_elems, look_for_values,
                            &search);
    }
    return search.is_zero;
}

void tagc_member_owned(const tagc_model *model, int rank, const tagc_member *tensor, uint64_t *first,
                       uint64_t *n) {
    uint64_t owner = (uint64_t)(rank % model->n_owners); /* the place, where a host's ranks are owners */
    *first = 0;
    *n = tensor->n_elems;
    if (model->options.layout.output == TAGC_OUTPUT_UNIT) return;
    tagc_slot slot = tagc_member_slot(model, tensor, owner);
    *first = slot.n > 0 ? slot.first : 0;
    *n = slot.n;
}

uint64_t tagc_member_room(const tagc_model *model, const tagc_member *tensor) {
    uint64_t most = tensor->chunk;
    for (int owner = 0; tensor->begins && owner < model->n_owners; owner++) {
        uint64_t n = tensor->begins[owner + 1] - tensor->begins[owner];
        if (n > most) most = n;
    }
    return most;
}

/* The longest row of ranges of the caller's. Sets where tensors begin in each. */
static uint64_t lay_ranges_out(tagc_model_part *part) {
    tagc_model *model = part->model;
    uint64_t width = 0;
    for (int owner = 0; owner < model->n_owners; owner++) {
        uint64_t n = 0;
        for (uint32_t i = 0; i < part->n_members; i++) {
            const tagc_member *t = &model->tensors[part->members[i]];
            t->offsets[owner] = n;
            n += t->begins[owner + 1] - t->begins[owner];
        }
        if (n > width) width = n;
    }
    return width;
}

void tagc_part_lay_out(tagc_model_part *part) {
    tagc_model *model = part->model;
    uint64_t width = 0;
    for (uint32_t i = 0; i < part->n_members; i++) {
        tagc_member *tensor = &model->tensors[part->members[i]];
        tensor->part = part;
        tensor->offset = width;
        width += tagc_model_is_flat(model) ? tensor->n_elems : tensor->chunk;
    }
    if (model->ranges) width = lay_ranges_out(part);
    if (tagc_model_is_flat(model))
        width = tagc_padded_elems(width, model->world_size) / (uint64_t)model->n_owners;
    else if (!has_rows_of_hosts(model)) /* the hosts cut what all of them get among themselves */
        width = tagc_padded_elems(width, model->n_hosts);
    part->width = width;
}

/* ---- tables ---- */

static tagc_status check_tensor(const tagc_tensor *t, size_t i, size_t n_tensors, uint64_t *n_elems) {
    size_t length = t->name ? strnlen(t->name, 1024) : 0;
    if (length == 0 || length > 1023)
        return tagc_fail(TAGC_ERR_ARGUMENT, "tensors[%zu].name has %s%zu bytes, must have 1 to 1023", i,
                         length > 1023 ? "at least " : "", length);
    if (t->n_dims > 64 || (t->n_dims > 0 && !t->shape))
        return tagc_fail(TAGC_ERR_ARGUMENT, "%s: n_dims is %zu%s, must be at most 64", t->name, t->n_dims,
                         t->shape ? "" : " and shape is NULL");
    *n_elems = 1;
    for (size_t d = 0; d < t->n_dims; d++) {
        if (t->shape[d] == 0)
            return tagc_fail(TAGC_ERR_ARGUMENT, "%s: shape[%zu] is 0, must be at least 1", t->name, d);
        if (__builtin_mul_overflow(*n_elems, t->shape[d], n_elems) || *n_elems > (uint64_t)1 << 48)
            return tagc_fail(TAGC_ERR_ARGUMENT, "%s has more than 2^48 elements", t->name);
    }
    if (t->unit >= n_tensors)
        return tagc_fail(TAGC_ERR_ARGUMENT, "%s: unit is %u, must be below %zu, the number of tensors",
                         t->name, t->unit, n_tensors);
    if (t->kind < TAGC_CLASS_BY_NAME || t->kind > TAGC_CLASS_DENSE)
        return tagc_fail(TAGC_ERR_ARGUMENT, "%s: kind is %d, must be in [%d, %d]", t->name, t->kind,
                         TAGC_CLASS_BY_NAME, TAGC_CLASS_DENSE);
    return TAGC_OK;
}

/* The tables, with the arrays of an exchange that depend on them. Called twice, see tagc_arena. */
static void place_tables(tagc_model *model, tagc_arena *arena, size_t name_bytes, uint64_t n_samples,
                         char **names, uint32_t **members) {
    size_t n = model->n_tensors;
    model->tensors = tagc_arena_take(arena, n, sizeof *model->tensors);
    model->units = tagc_arena_take(arena, model->n_units, sizeof *model->units);
    *members = tagc_arena_take(arena, n, sizeof **members);
    *names = tagc_arena_take(arena, name_bytes, 1);
    model->positions = tagc_arena_take(arena, (size_t)n_samples, sizeof *model->positions);
    model->samples = tagc_arena_take(arena, (size_t)n_samples, sizeof *model->samples);
    model->weights = tagc_arena_take(arena, n, sizeof *model->weights);
    model->numbers = tagc_arena_take(arena, n, sizeof *model->numbers);
    model->counts = tagc_arena_take(arena, n, sizeof *model->counts);
    model->full = tagc_arena_take(arena, n, sizeof *model->full);
    if (model->options.layout.cut != TAGC_CUT_RANGES) return;
    model->ranges = tagc_arena_take(arena, n * ((size_t)model->n_owners + 1), sizeof *model->ranges);
    model->offsets = tagc_arena_take(arena, n * (size_t)model->n_owners, sizeof *model->offsets);
}

static uint64_t samples_of(uint64_t n_elems) {
    return n_elems < TAGC_SCHEDULE_SAMPLE ? n_elems : TAGC_SCHEDULE_SAMPLE;
}

static tagc_status fill_tensor(tagc_model *model, const tagc_tensor *t, tagc_member *out, char *name) {
    uint64_t n_rows = t->n_dims > 0 ? t->shape[0] : 1, n_owners = (uint64_t)model->n_owners;
    int is_by_name = t->kind == TAGC_CLASS_BY_NAME;
    out->name = name;
    out->unit = t->unit;
    if (model->options.layout.cut == TAGC_CUT_ROWS)
        out->chunk = (n_rows + n_owners - 1) / n_owners * (out->n_elems / n_rows);
    out->kind = is_by_name ? TAGC_CLASS_DENSE : (tagc_class)t->kind;
    if (!is_by_name) return TAGC_OK;
    return tagc_classify(t->name, t->shape, t->n_dims, model->options.layout.min_elems, &out->kind, NULL);
}

/* Copies the ranges of tensor i. */
static tagc_status fill_ranges(tagc_model *model, size_t i) {
    size_t n_owners = (size_t)model->n_owners;
    tagc_member *t = &model->tensors[i];
    uint64_t *begins = model->ranges + i * (n_owners + 1);
    memcpy(begins, model->options.layout.ranges + i * (n_owners + 1), (n_owners + 1) * sizeof *begins);
    int is_whole = begins[0] == 0 && begins[n_owners] == t->n_elems;
    for (size_t owner = 0; owner < n_owners; owner++) is_whole &= begins[owner] <= begins[owner + 1];
    if (!is_whole)
        return tagc_fail(TAGC_ERR_ARGUMENT,
                         "ranges of %s go from %llu to %llu, must go up from 0 to %llu, its elements",
                         t->name, (unsigned long long)begins[0], (unsigned long long)begins[n_owners],
                         (unsigned long long)t->n_elems);
    t->begins = begins;
    t->offsets = model->offsets + i * n_owners;
    return TAGC_OK;
}

static tagc_status fill_units(tagc_model *model, uint32_t *members) {
    for (uint32_t i = 0; i < model->n_tensors; i++) model->units[model->tensors[i].unit].n_members++;
    for (uint32_t u = 0; u < model->n_units; u++) {
        tagc_model_unit *unit = &model->units[u];
        unit->model = model;
        if (unit->n_members == 0)
            return tagc_fail(TAGC_ERR_ARGUMENT, "no tensor has unit %u, and some have unit %u", u,
                             model->n_units - 1);
        unit->members = members;
        unit->factor = 1;
        members += unit->n_members;
        unit->n_members = 0;
    }
    for (uint32_t i = 0; i < model->n_tensors; i++) {
        tagc_model_unit *unit = &model->units[model->tensors[i].unit];
        unit->members[unit->n_members++] = i;
    }
    return TAGC_OK;
}

tagc_status tagc_model_lay_out(tagc_model *model, const tagc_tensor *tensors, size_t n_tensors) {
    uint64_t n_elems = 0, n_samples = 0;
    size_t name_bytes = 0;
    if (n_tensors < 1 || n_tensors > (size_t)1 << 20)
        return tagc_fail(TAGC_ERR_ARGUMENT, "n_tensors is %zu, must be in [1, 1048576]", n_tensors);
    if (!tensors) return tagc_fail(TAGC_ERR_ARGUMENT, "tensors is NULL");
    uint32_t last = 0;
    for (size_t i = 0; i < n_tensors; i++) {
        TAGC_TRY(check_tensor(&tensors[i], i, n_tensors, &n_elems));
        name_bytes += strlen(tensors[i].name) + 1;
        n_samples += samples_of(n_elems);
        last = tensors[i].unit > last ? tensors[i].unit : last;
    }
    model->n_tensors = (uint32_t)n_tensors;
    model->n_units = last + 1;
    tagc_arena arena = {0};
    char *names;
    uint32_t *members;
    place_tables(model, &arena, name_bytes, n_samples, &names, &members);
    TAGC_TRY(tagc_memory_create(arena.n_bytes, "tables of a model", &model->memory));
    arena = (tagc_arena){.base = model->memory};
    place_tables(model, &arena, name_bytes, n_samples, &names, &members);
    for (size_t i = 0; i < n_tensors; i++) {
        tagc_member *out = &model->tensors[i];
        size_t n_bytes = strlen(tensors[i].name) + 1;
        memcpy(names, tensors[i].name, n_bytes);
        TAGC_TRY(check_tensor(&tensors[i], i, n_tensors, &out->n_elems));
        TAGC_TRY(fill_tensor(model, &tensors[i], out, names));
        if (model->ranges) TAGC_TRY(fill_ranges(model, i));
        out->apart = model->options.layout.apart ? model->options.layout.apart[i] : 0;
        names += n_bytes;
    }
    model->options.layout.apart = NULL; /* the caller's */
    model->options.layout.ranges = NULL;
    return fill_units(model, members);
}
