/* A schedule as bytes, for checkpoints. docs/reference/wire-format.md draws them. Bytes that are loaded are hostile until they are
 * checked: a first pass checks all of them, a second one takes over. */
#include "schedule/private.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static const char magic[8] = "tagcsch1";

/* Reads or writes one field after the other. bytes NULL: only counts. */
typedef struct cursor {
    uint8_t *bytes;
    size_t at, n_bytes;
    int is_over; /* a field did not fit */
} cursor;

static void *next(cursor *c, size_t n) {
    void *place = c->bytes ? c->bytes + c->at : NULL;
    if (c->is_over || (c->bytes && n > c->n_bytes - c->at)) {
        c->is_over = 1;
        return NULL;
    }
    c->at += n;
    return place;
}

static void put(cursor *c, const void *from, size_t n) {
    void *to = next(c, n);
    if (to) memcpy(to, from, n);
}

static void put_u32(cursor *c, uint32_t x) {
    uint8_t b[4] = {(uint8_t)x, (uint8_t)(x >> 8), (uint8_t)(x >> 16), (uint8_t)(x >> 24)};
    put(c, b, sizeof b);
}

static void put_f64(cursor *c, double x) {
    uint64_t u;
    memcpy(&u, &x, sizeof u);
    put_u32(c, (uint32_t)u);
    put_u32(c, (uint32_t)(u >> 32));
}

static void put_f32s(cursor *c, const float *x, uint32_t n) {
    for (uint32_t i = 0; i < n; i++) {
        uint32_t u;
        memcpy(&u, &x[i], sizeof u);
        put_u32(c, u);
    }
}

static uint32_t get_u32(cursor *c) {
    const uint8_t *b = next(c, 4);
    return b ? (uint32_t)b[0] | (uint32_t)b[1] << 8 | (uint32_t)b[2] << 16 | (uint32_t)b[3] << 24 : 0;
}

static double get_f64(cursor *c) {
    uint64_t low = get_u32(c), u = low | (uint64_t)get_u32(c) << 32;
    double x;
    memcpy(&x, &u, sizeof x);
    return x;
}

static void get_f32s(cursor *c, float *x, uint32_t n) {
    for (uint32_t i = 0; i < n; i++) {
        uint32_t u = get_u32(c);
        memcpy(&x[i], &u, sizeof u);
    }
}

enum {
    IS_SEEN = 1,
    IS_NOISE = 2,
    HAS_GROWN = 4,
    IS_SETTLED = 8,
    ALL_FLAGS = 15,
    IS_FRESH = 1,
    HAS_LEAST = 2,
    HAS_RISEN = 4,
    ALL_RUN_FLAGS = 7
};

/* ---- saving ---- */

static void put_parameter(cursor *c, const tagc_scheduled *p, int with_windows) {
    uint32_t n_name = (uint32_t)strlen(p->name);
    int has_window = with_windows && p->window.n_exchanges > 0;
    put_u32(c, n_name);
    put(c, p->name, n_name);
    put_u32(c, (uint32_t)p->now);
    put_u32(c, (uint32_t)((p->is_seen ? IS_SEEN : 0) | (p->is_noise ? IS_NOISE : 0) |
                          (p->has_grown ? HAS_GROWN : 0) | (p->is_settled ? IS_SETTLED : 0)));
    put_u32(c, (uint32_t)(p->fading + 1)); /* 0: does not fade */
    put_u32(c, p->n_calm);
    put_u32(c, p->n_failures);
    put_u32(c, p->n_windows);
    put_f64(c, p->mean_square);
    put_f64(c, p->share);
    put_u32(c, has_window ? p->window.n_exchanges : 0);
    put_u32(c, has_window ? p->window.n : 0);
    if (!has_window) return;
    put_f32s(c, p->window.sums, p->window.n);
    put_f32s(c, p->window.squares, p->window.n);
}

static void put_losses(cursor *c, const tagc_schedule_losses *l) {
    put_f64(c, l->sum);
    put_f64(c, l->squares);
    put_f64(c, l->n);
}

tagc_status tagc_schedule_save(const tagc_schedule *s, int with_windows, void *bytes, size_t n_bytes,
                               size_t *n_written) {
    static const tagc_schedule_losses none = {0};
    cursor c = {.bytes = bytes, .n_bytes = n_bytes};
    const tagc_loss_watch *w = &s->losses;
    uint32_t n = 0;
    for (size_t i = 0; i < s->n; i++) n += s->parameters[i].has_levels != 0;
    put(&c, magic, sizeof magic);
    put_u32(&c, (uint32_t)((s->is_fresh ? IS_FRESH : 0) | (w->has_least ? HAS_LEAST : 0) |
                           (w->has_risen ? HAS_RISEN : 0)));
    put_f64(&c, w->least);
    put_f64(&c, w->variance);
    put_losses(&c, &w->pooled);
    put_losses(&c, with_windows ? &w->own : &none);
    put_u32(&c, n);
    for (size_t i = 0; i < s->n; i++)
        if (s->parameters[i].has_levels) put_parameter(&c, &s->parameters[i], with_windows);
    if (c.is_over)
        return tagc_fail(TAGC_ERR_ARGUMENT, "n_bytes is %zu, too few for the state of this schedule",
                         n_bytes);
    *n_written = c.at;
    return TAGC_OK;
}

/* ---- loading ---- */

typedef struct saved_parameter {
    const char *name; /* (n_name,), not terminated */
    uint32_t n_name;
    tagc_scheduled state; /* without a name */
} saved_parameter;

static int is_number(double x) {
    return isfinite(x) && x >= 0;
}

/* Returns whether a saved parameter is there, and possible. */
static int get_parameter(cursor *c, saved_parameter *out) {
    tagc_scheduled *p = &out->state;
    memset(p, 0, sizeof *p);
    out->n_name = get_u32(c);
    if (out->n_name == 0 || out->n_name > 1023) return 0;
    out->name = next(c, out->n_name);
    uint32_t now = get_u32(c), flags = get_u32(c), fading = get_u32(c);
    p->n_calm = get_u32(c);
    p->n_failures = get_u32(c);
    p->n_windows = get_u32(c);
    p->mean_square = get_f64(c);
    p->share = get_f64(c);
    p->window.n_exchanges = get_u32(c);
    p->window.n = get_u32(c);
    if (c->is_over || now > TAGC_LEVEL_LAST || flags > ALL_FLAGS || fading > TAGC_FADING + 1) return 0;
    if (memchr(out->name, 0, out->n_name)) return 0;
    if (!(isfinite(p->mean_square)) || !(p->share >= TAGC_LEAST_SHARE) ||
        !(p->share <= fmax(1, TAGC_MOST_SHARE)))
        return 0;
    if (p->window.n_exchanges >= TAGC_WINDOW || p->window.n > TAGC_SCHEDULE_SAMPLE) return 0;
    get_f32s(c, p->window.sums, p->window.n);
    get_f32s(c, p->window.squares, p->window.n);
    p->now = p->next = (int)now;
    p->fading = (int)fading - 1;
    p->is_seen = (flags & IS_SEEN) != 0;
    p->is_noise = (flags & IS_NOISE) != 0;
    p->has_grown = (flags & HAS_GROWN) != 0;
    p->is_settled = (flags & IS_SETTLED) != 0;
    return !c->is_over;
}

static int get_losses(cursor *c, tagc_schedule_losses *l) {
    l->sum = get_f64(c);
    l->squares = get_f64(c);
    l->n = get_f64(c);
    return isfinite(l->sum) && is_number(l->squares) && is_number(l->n);
}

/* Returns whether the bytes before the parameters are possible, and writes the number of these. */
static int get_run(cursor *c, tagc_loss_watch *w, int *is_fresh, uint32_t *n) {
    const void *found = next(c, sizeof magic);
    if (!found || memcmp(found, magic, sizeof magic) != 0) return 0;
    uint32_t flags = get_u32(c);
    w->least = get_f64(c);
    w->variance = get_f64(c);
    int is_right = isfinite(w->least) && is_number(w->variance);
    is_right &= get_losses(c, &w->pooled);
    is_right &= get_losses(c, &w->own);
    *n = get_u32(c);
    *is_fresh = (flags & IS_FRESH) != 0;
    w->has_least = (flags & HAS_LEAST) != 0;
    w->has_risen = (flags & HAS_RISEN) != 0;
    return is_right && flags <= ALL_RUN_FLAGS && !c->is_over;
}

static int by_name(const void *a, const void *b) {
    return strcmp((*(tagc_scheduled *const *)a)->name, (*(tagc_scheduled *const *)b)->name);
}

static int compare_name(const void *key, const void *member) {
    const saved_parameter *saved = key;
    const char *name = (*(tagc_scheduled *const *)member)->name;
    int order = strncmp(saved->name, name, saved->n_name);
    return order != 0 ? order : name[saved->n_name] ? -1 : 0;
}

/* Sorts s->members, in which find() looks: a search through all would take n^2 steps. */
static void sort_members(tagc_schedule *s) {
    for (size_t i = 0; i < s->n; i++) s->members[i] = &s->parameters[i];
    qsort(s->members, s->n, sizeof *s->members, by_name);
}

static tagc_scheduled *find(const tagc_schedule *s, const saved_parameter *saved) {
    tagc_scheduled **found = bsearch(saved, s->members, s->n, sizeof *s->members, compare_name);
    return found && (*found)->has_levels ? *found : NULL;
}

static void take_over(tagc_scheduled *p, const tagc_scheduled *from) {
    tagc_scheduled now = *from;
    now.name = p->name;
    now.n_elems = p->n_elems;
    now.kind = p->kind;
    now.moment = p->moment;
    now.has_levels = 1;
    now.next_share = now.share;
    if (p->kind == TAGC_CLASS_MILD && now.now == TAGC_LEVEL_LARGEST) now.now = now.next = TAGC_LEVEL_LAST;
    *p = now;
}

/* Its first moment was short, and is not known to be so here. */
static int is_unknown(const tagc_scheduled *p) {
    return p->kind == TAGC_CLASS_COMPRESSED && p->moment == TAGC_MOMENT_STAYS &&
           (p->is_settled || p->fading != TAGC_NOT_FADING);
}

static void begin_unknown_anew(tagc_schedule *s, size_t *n_unknown, size_t *unknown) {
    size_t n = 0, first = 0;
    for (size_t i = s->n; i-- > 0;)
        if (is_unknown(&s->parameters[i])) {
            n++;
            first = i;
        }
    for (size_t i = 0; i < s->n; i++) {
        tagc_scheduled *p = &s->parameters[i];
        int is_mild = p->kind == TAGC_CLASS_MILD && p->has_levels;
        if (n > 0 && (is_mild || is_unknown(p)) && p->now > TAGC_LEVEL_EVERY)
            p->now = p->next = TAGC_LEVEL_EVERY;
        if (is_mild ? n == 0 : p->moment == TAGC_MOMENT_SHORTENS) continue;
        p->fading = TAGC_NOT_FADING;
        p->is_settled = 0;
    }
    if (n_unknown) *n_unknown = n;
    if (unknown) *unknown = first;
}

/* Reads all of it; with `s` takes it over, too. */
static int read_all(const void *bytes, size_t n_bytes, tagc_schedule *s) {
    cursor c = {.bytes = (uint8_t *)(uintptr_t)bytes, .n_bytes = n_bytes};
    tagc_loss_watch losses;
    int is_fresh;
    uint32_t n;
    if (!bytes || !get_run(&c, &losses, &is_fresh, &n)) return 0;
    for (uint32_t i = 0; i < n; i++) {
        saved_parameter saved;
        if (!get_parameter(&c, &saved)) return 0;
        tagc_scheduled *p = s ? find(s, &saved) : NULL;
        if (p) take_over(p, &saved.state);
    }
    if (s) {
        s->losses = losses;
        s->is_fresh = is_fresh;
    }
    return c.at == n_bytes;
}

tagc_status tagc_schedule_load(tagc_schedule *s, const void *bytes, size_t n_bytes, int with_windows,
                               size_t *n_unknown, size_t *unknown) {
    if (!read_all(bytes, n_bytes, NULL))
        return tagc_fail(TAGC_ERR_CORRUPT, "%zu bytes are no state of a schedule, or a damaged one", n_bytes);
    for (size_t i = 0; i < s->n; i++) {
        tagc_scheduled *p = &s->parameters[i], was = *p;
        *p = (tagc_scheduled){.name = was.name,
                              .n_elems = was.n_elems,
                              .kind = was.kind,
                              .moment = was.moment,
                              .now = TAGC_LEVEL_LAST,
                              .next = TAGC_LEVEL_LAST,
                              .has_levels = was.has_levels,
                              .fading = TAGC_NOT_FADING,
                              .mean_square = -1,
                              .share = 1,
                              .next_share = 1};
    }
    memset(s->alarms, 0, sizeof s->alarms);
    sort_members(s);
    read_all(bytes, n_bytes, s);
    for (size_t i = 0; !with_windows && i < s->n; i++)
        memset(&s->parameters[i].window, 0, sizeof s->parameters[i].window);
    if (!with_windows) s->losses.own = (tagc_schedule_losses){0};
    begin_unknown_anew(s, n_unknown, unknown);
    return TAGC_OK;
}
