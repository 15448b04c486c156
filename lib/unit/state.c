/* A model's state as bytes, and its return into a run of the same or another number of ranks.
 *
 *   | header | schedule | exchanges of each unit | parts | checksum |
 *   part:  | counts | a reducer's saved state | members: lengths and name |
 *
 * Everything is in 8-byte units, little-endian; docs/reference/wire-format.md has the fields. Tensors go by name. With the same hosts and
 * ranks, a part that has the same tensors gets its bytes back. Otherwise values go from where they were to where they are: every former
 * rank's residual is taken up by one host, so that the sum over ranks stays. */
#include "codec/residual.h"
#include "core/xxh3.h"
#include "exchange/wire.h"
#include "unit/unit.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char magic[8] = {'T', 'A', 'G', 'C', 'M', 'O', 'D', 'L'};
enum { VERSION = 1, MOST_RANKS = 1 << 20 };

/* The header, after the magic. */
typedef struct saved_header {
    uint64_t version, n_hosts, n_places, rank, output, op, run, n_steps, n_schedule, n_units, n_parts;
} saved_header;

/* ---- saving ---- */

typedef struct writer {
    tagc_write_fn write; /* NULL: counts only */
    void *context;
    size_t n;
    tagc_xxh3_state sum;
    tagc_status status; /* of what was written so far */
} writer;

static void put_bytes(writer *w, const void *bytes, size_t n) {
    w->n += n;
    if (!w->write || w->status != TAGC_OK || n == 0) return;
    tagc_xxh3_add(&w->sum, bytes, n);
    w->status = w->write(w->context, bytes, n);
}

static void put_padding(writer *w) {
    put_bytes(w, (const char[8]){0}, (8 - w->n % 8) % 8);
}

static void put(writer *w, const void *bytes, size_t n) {
    put_bytes(w, bytes, n);
    put_padding(w);
}

static void put_number(writer *w, uint64_t number) {
    put(w, &number, sizeof number);
}

static tagc_status put_schedule(writer *w, const tagc_model *model, size_t n) {
    void *bytes = NULL;
    if (n > 0) TAGC_TRY(tagc_memory_create(n, "a schedule", &bytes));
    tagc_status status = n > 0 ? tagc_schedule_save(model->schedule, 1, bytes, n, &n) : TAGC_OK;
    if (status == TAGC_OK) put(w, bytes, n);
    tagc_memory_destroy(bytes);
    return status;
}

static void put_from_device(writer *w, const tagc_reducer *r, uint64_t n_body) {
    void *bytes;
    size_t n = TAGC_WIRE_HEADER_BYTES + (size_t)n_body;
    tagc_status status = tagc_memory_create(n, "a part's state", &bytes);
    if (status == TAGC_OK) status = tagc_reducer_state_save(r, bytes, n);
    if (w->status == TAGC_OK) w->status = status;
    put(w, bytes, n);
    tagc_memory_destroy(bytes);
}

static void put_part(writer *w, const tagc_model_part *part) {
    char header[TAGC_WIRE_HEADER_BYTES] = {0};
    const void *body = NULL;
    uint64_t n_body = tagc_reducer_state_bytes(part->reducer) - sizeof header;
    put_number(w, part->n_members);
    put_number(w, part->width);
    put_number(w, sizeof header + n_body);
    if (w->write && part->is_there)
        put_from_device(w, part->reducer, n_body);
    else {
        if (w->write) tagc_reducer_state_view(part->reducer, header, &body, &n_body);
        put_bytes(w, header, sizeof header);
        put(w, body, (size_t)n_body);
    }
    for (uint32_t i = 0; i < part->n_members; i++) {
        const tagc_member *t = &part->model->tensors[part->members[i]];
        put_number(w, t->n_elems);
        put_number(w, t->chunk);
        put_number(w, strlen(t->name));
        put(w, t->name, strlen(t->name));
    }
}

static tagc_status write_all(const tagc_model *model, writer *w) {
    size_t n_schedule = 0;
    if (model->schedule) TAGC_TRY(tagc_schedule_save(model->schedule, 1, NULL, 0, &n_schedule));
    saved_header header = {VERSION,
                           (uint64_t)model->n_hosts,
                           (uint64_t)model->n_places,
                           (uint64_t)model->rank,
                           (uint64_t)model->options.layout.output,
                           (uint64_t)model->options.op,
                           model->run,
                           model->n_steps,
                           n_schedule,
                           model->n_units,
                           0};
    for (uint32_t u = 0; u < model->n_units; u++) header.n_parts += model->units[u].n_parts;
    tagc_xxh3_begin(&w->sum);
    put(w, magic, sizeof magic);
    put(w, &header, sizeof header);
    TAGC_TRY(put_schedule(w, model, n_schedule));
    for (uint32_t u = 0; u < model->n_units; u++) put_number(w, model->units[u].n_exchanges);
    for (uint32_t u = 0; u < model->n_units; u++)
        for (uint32_t p = 0; p < model->units[u].n_parts; p++) put_part(w, &model->units[u].parts[p]);
    put_number(w, tagc_xxh3_end(&w->sum));
    return w->status;
}

void tagc_model_set_run(tagc_model *model, uint64_t run) {
    model->run = run;
}

tagc_status tagc_model_write(const tagc_model *model, tagc_write_fn write, void *context) {
    writer w = {.write = write, .context = context};
    TAGC_TRY(tagc_model_check_idle(model, "save"));
    return write_all(model, &w);
}

static tagc_status write_to_memory(void *context, const void *bytes, size_t n) {
    char **at = context;
    memcpy(*at, bytes, n);
    *at += n;
    return TAGC_OK;
}

static tagc_status check_cut(const tagc_model *model) {
    if (!model->ranges) return TAGC_OK;
    return tagc_fail(
        TAGC_ERR_UNSUPPORTED,
        "the cut is RANGES, which a saved state does not tell: _get_residual has what is not sent");
}

tagc_status tagc_model_save(const tagc_model *model, void *bytes, size_t n_bytes, size_t *n_written) {
    writer size = {0};
    char *at = bytes;
    if (!n_written) return tagc_fail(TAGC_ERR_ARGUMENT, "n_written is NULL");
    TAGC_TRY(tagc_model_check_idle(model, "save"));
    TAGC_TRY(tagc_model_check_own_schedule(model, "save"));
    TAGC_TRY(check_cut(model));
    TAGC_TRY(write_all(model, &size));
    *n_written = size.n;
    if (!bytes) return TAGC_OK;
    if (n_bytes < size.n)
        return tagc_fail(TAGC_ERR_ARGUMENT, "n_bytes is %zu, must be at least %zu", n_bytes, size.n);
    return tagc_model_write(model, write_to_memory, &at);
}

/* ---- reading: nothing is believed before the checksum, and no length then ---- */

typedef struct reader {
    const char *bytes;
    size_t n, at;
} reader;

static const void *take(reader *r, uint64_t n) {
    uint64_t n_padded = (n + 7) / 8 * 8;
    if (n_padded < n || n_padded > r->n - r->at) return NULL;
    const void *bytes = r->bytes + r->at;
    r->at += (size_t)n_padded;
    return bytes;
}

static int take_number(reader *r, uint64_t *number) {
    const void *bytes = take(r, sizeof *number);
    if (bytes) memcpy(number, bytes, sizeof *number);
    return bytes != NULL;
}

typedef struct saved_tensor {
    uint64_t n_elems, chunk, n_name;
    const char *name; /* not terminated */
} saved_tensor;

typedef struct saved_part {
    uint64_t n_members, width, n_state;
    const char *state;
    reader members;
} saved_part;

static int take_tensor(reader *r, saved_tensor *t) {
    *t = (saved_tensor){0};
    if (!take_number(r, &t->n_elems) || !take_number(r, &t->chunk) || !take_number(r, &t->n_name)) return 0;
    t->name = take(r, t->n_name);
    return t->name != NULL && t->n_name > 0 && t->n_name < 1024 && t->n_elems > 0 && t->chunk <= t->n_elems &&
           t->n_elems <= (uint64_t)1 << 48;
}

static int take_part(reader *r, saved_part *part) {
    if (!take_number(r, &part->n_members) || !take_number(r, &part->width) || !take_number(r, &part->n_state))
        return 0;
    part->state = take(r, part->n_state);
    if (!part->state) return 0;
    part->members = *r;
    for (uint64_t i = 0; i < part->n_members; i++) {
        saved_tensor t;
        if (!take_tensor(r, &t)) return 0;
    }
    return part->n_members > 0;
}

/* A file that was checked. */
typedef struct saved_file {
    saved_header header;
    const char *schedule;
    reader exchanges, parts;
} saved_file;

static tagc_status corrupt(const char *what) {
    return tagc_fail(TAGC_ERR_CORRUPT, "%s", what);
}

static tagc_status read_header(const void *bytes, size_t n_bytes, saved_header *header) {
    if (!bytes || n_bytes < sizeof magic + sizeof *header + 8 || n_bytes % 8 != 0)
        return corrupt("too few bytes for a model's state");
    if (memcmp(bytes, magic, sizeof magic) != 0)
        return corrupt("not a model's state: it does not begin with TAGCMODL");
    memcpy(header, (const char *)bytes + sizeof magic, sizeof *header);
    if (header->version != VERSION)
        return tagc_fail(TAGC_ERR_CORRUPT, "version is %llu, this library reads %d",
                         (unsigned long long)header->version, VERSION);
    if (header->n_hosts < 1 || header->n_places < 1 || header->n_hosts > MOST_RANKS ||
        header->n_places > MOST_RANKS || header->rank >= header->n_hosts * header->n_places ||
        header->output > TAGC_OUTPUT_HOST_SHARD || header->op > TAGC_OP_SUM)
        return corrupt("the header has a number that is out of its range");
    return TAGC_OK;
}

/* Whether the residual in a part has the shape that its width and the former ranks say. */
static tagc_status check_part(const saved_part *part, const saved_header *h) {
    tagc_wire_header state;
    reader members = part->members;
    uint64_t n_owners = h->output == TAGC_OUTPUT_SHARD ? h->n_hosts * h->n_places : h->n_places;
    uint64_t n_rows = h->output == TAGC_OUTPUT_SHARD ? h->n_hosts : 1, width = 0, n_elems, n_flat = 0;
    uint64_t most = part->width; /* of all members: in a row, or in the flat */
    TAGC_TRY(tagc_wire_read(part->state, part->n_state, &state));
    if (state.kind != TAGC_WIRE_STATE) return corrupt("a part has no residual's header");
    for (uint64_t i = 0; i < part->n_members; i++) {
        saved_tensor t;
        (void)take_tensor(&members, &t);
        n_flat += t.chunk == 0;
        if (t.chunk > 0 && (t.chunk > UINT64_MAX / n_owners || t.chunk * n_owners < t.n_elems))
            return corrupt("a chunk is too short for its tensor");
        if (__builtin_add_overflow(width, t.chunk > 0 ? t.chunk : t.n_elems, &width))
            return corrupt("a row is too long");
    }
    if (n_flat > 0 && (n_flat != part->n_members || __builtin_mul_overflow(part->width, n_owners, &most)))
        return corrupt("a part is cut in two ways, or its flat is too long");
    if (width > most || __builtin_mul_overflow(part->width, n_rows, &n_elems) || n_elems != state.n_elems)
        return corrupt("a part's residual does not fit its tensors");
    uint64_t n_residual = (uint64_t)state.n_items * state.k;
    if (n_residual != 0 && (n_residual != n_elems ||
                            state.body_bytes != state.n_items * tagc_residual_bytes(state.coding, state.k)))
        return corrupt("a part's residual has another length than its tensors");
    return TAGC_OK;
}

static tagc_status read_file(const void *bytes, size_t n_bytes, saved_file *file) {
    reader r = {bytes, n_bytes - 8, sizeof magic + sizeof file->header};
    uint64_t sum;
    TAGC_TRY(read_header(bytes, n_bytes, &file->header));
    memcpy(&sum, (const char *)bytes + n_bytes - 8, sizeof sum);
    if (sum != tagc_checksum(bytes, n_bytes - 8)) return corrupt("the checksum is wrong");
    file->schedule = take(&r, file->header.n_schedule);
    file->exchanges = r;
    if (!file->schedule || file->header.n_units > (uint64_t)1 << 20 || !take(&r, file->header.n_units * 8))
        return corrupt("a length is out of its range");
    file->parts = r;
    for (uint64_t p = 0; p < file->header.n_parts; p++) {
        saved_part part;
        if (!take_part(&r, &part)) return corrupt("a length is out of its range");
        TAGC_TRY(check_part(&part, &file->header));
    }
    return r.at == r.n ? TAGC_OK : corrupt("there are bytes after the last part");
}

/* ---- which files ---- */

static int is_same_world(const tagc_model *model, const saved_header *h) {
    return h->n_hosts == (uint64_t)model->n_hosts && h->n_places == (uint64_t)model->n_places &&
           h->output == (uint64_t)model->options.layout.output;
}

static int is_taken(const tagc_model *model, const saved_header *h) {
    return is_same_world(model, h) ? h->rank == (uint64_t)model->rank
                                   : h->rank % (uint64_t)model->n_hosts == (uint64_t)model->host;
}

/* Reads the files that this rank takes, in the order of their ranks. */
typedef struct saved_files {
    saved_file *files; /* (n) */
    size_t n;
} saved_files;

static int by_rank(const void *a, const void *b) {
    uint64_t x = ((const saved_file *)a)->header.rank, y = ((const saved_file *)b)->header.rank;
    return (x > y) - (x < y);
}

static tagc_status check_complete(const tagc_model *model, const saved_files *taken) {
    const saved_header *h = &taken->files[0].header;
    uint64_t expected = is_same_world(model, h) ? (uint64_t)model->rank : (uint64_t)model->host;
    uint64_t step = is_same_world(model, h) ? h->n_hosts * h->n_places : (uint64_t)model->n_hosts;
    for (size_t i = 0; i < taken->n; i++, expected += step) {
        const saved_header *other = &taken->files[i].header;
        if (other->run != h->run || other->n_steps != h->n_steps || other->n_hosts != h->n_hosts ||
            other->n_places != h->n_places || other->output != h->output || other->op != h->op)
            return tagc_fail(
                TAGC_ERR_MISMATCH,
                "files of rank %llu (step %llu) and of rank %llu (step %llu) are not of one save",
                (unsigned long long)h->rank, (unsigned long long)h->n_steps, (unsigned long long)other->rank,
                (unsigned long long)other->n_steps);
        if (other->rank != expected)
            return tagc_fail(
                TAGC_ERR_STATE,
                "the file of rank %llu %s: this rank takes those of ranks %d, %d + %llu and so on, of %llu",
                (unsigned long long)(other->rank < expected ? other->rank : expected),
                other->rank < expected ? "came twice" : "is missing",
                (int)(is_same_world(model, h) ? model->rank : model->host),
                (int)(is_same_world(model, h) ? model->rank : model->host), (unsigned long long)step,
                (unsigned long long)(h->n_hosts * h->n_places));
    }
    if (expected < h->n_hosts * h->n_places)
        return tagc_fail(TAGC_ERR_STATE, "the file of rank %llu is missing, of %llu",
                         (unsigned long long)expected, (unsigned long long)(h->n_hosts * h->n_places));
    return TAGC_OK;
}

static tagc_status read_files(const tagc_model *model, const void *const *files, const size_t *sizes,
                              size_t n_files, saved_files *taken) {
    void *memory;
    if (n_files > 0 && (!files || !sizes))
        return tagc_fail(TAGC_ERR_ARGUMENT, "%s is NULL", files ? "sizes" : "files");
    TAGC_TRY(tagc_memory_create((n_files + 1) * sizeof *taken->files, "a list of files", &memory));
    taken->files = memory;
    for (size_t i = 0; i < n_files; i++) {
        saved_header header;
        tagc_status status = read_header(files[i], sizes[i], &header);
        if (status == TAGC_OK && !is_taken(model, &header)) continue;
        if (status == TAGC_OK) status = read_file(files[i], sizes[i], &taken->files[taken->n++]);
        if (status != TAGC_OK) return tagc_fail_in(status, "files[%zu]", i);
    }
    qsort(taken->files, taken->n, sizeof *taken->files, by_rank);
    return taken->n > 0 ? check_complete(model, taken) : TAGC_OK;
}

/* What all ranks must have read alike. */
typedef struct saved_about {
    uint64_t n_files, run, n_steps, n_hosts, n_places, output, op, n_schedule;
} saved_about;

static int is_same(const tagc_model *model, const saved_about *about) {
    return about->n_hosts == (uint64_t)model->n_hosts && about->n_places == (uint64_t)model->n_places &&
           about->output == (uint64_t)model->options.layout.output;
}

static tagc_status compare_over(tagc_comm *comm, const saved_about *own, saved_about *any) {
    int n = tagc_comm_world_size(comm);
    void *memory;
    *any = n == 1 ? *own : (saved_about){0};
    if (n == 1) return TAGC_OK;
    TAGC_TRY(tagc_memory_create((size_t)n * sizeof *own, "what ranks have read", &memory));
    const saved_about *all = memory;
    tagc_status status = tagc_comm_all_gather(comm, own, sizeof *own, memory, (size_t)n * sizeof *own);
    for (int rank = 0; status == TAGC_OK && rank < n; rank++) {
        if (all[rank].n_files == 0) continue;
        if (any->n_files == 0) *any = all[rank];
        if (all[rank].run != any->run || all[rank].n_steps != any->n_steps ||
            all[rank].n_hosts != any->n_hosts || all[rank].n_places != any->n_places ||
            all[rank].output != any->output || all[rank].op != any->op)
            status = tagc_fail(TAGC_ERR_MISMATCH,
                               "files of rank %d, of step %llu, are of another save than those of step %llu",
                               tagc_comm_name(comm, rank), (unsigned long long)all[rank].n_steps,
                               (unsigned long long)any->n_steps);
    }
    tagc_memory_destroy(memory);
    return status;
}

static tagc_status agree_on_files(const tagc_model *model, const saved_files *taken, saved_about *about) {
    saved_about own = {0};
    if (taken->n > 0) {
        const saved_header *h = &taken->files[0].header;
        own = (saved_about){taken->n,    h->run,    h->n_steps, h->n_hosts,
                            h->n_places, h->output, h->op,      h->n_schedule};
    }
    tagc_status status = compare_over(model->between, &own, about);
    if (model->within) { /* after a failure, too: the ranks of the host may not know of it */
        own = *about;
        tagc_status other = compare_over(model->within, &own, about);
        if (status == TAGC_OK) status = other;
    }
    if (status != TAGC_OK) return status;
    if (about->n_files == 0) return tagc_fail(TAGC_ERR_STATE, "no rank has a file to load");
    int first = is_same(model, about) ? model->rank : model->host;
    if (taken->n == 0 && (uint64_t)first < about->n_hosts * about->n_places)
        return tagc_fail(TAGC_ERR_STATE, "the file of rank %d is missing, of %llu", first,
                         (unsigned long long)(about->n_hosts * about->n_places));
    if (about->op != (uint64_t)model->options.op)
        return tagc_fail(TAGC_ERR_MISMATCH, "op was %llu in the saved run, and is %d",
                         (unsigned long long)about->op, model->options.op);
    return TAGC_OK;
}

/* ---- the schedule ---- */

/* Memory is not made for any number that a rank says. Of a model that had many more tensors than this one it may be long. */
static tagc_status check_schedule_bytes(const tagc_model *model, uint64_t n) {
    enum { ANY = 1 << 30, MORE = 16 };
    size_t own;
    TAGC_TRY(tagc_schedule_save(model->schedule, 1, NULL, 0, &own));
    uint64_t most = (uint64_t)own * MORE > ANY ? (uint64_t)own * MORE : ANY;
    if (n <= most) return TAGC_OK;
    return tagc_fail(TAGC_ERR_CORRUPT, "a saved schedule of %llu bytes, at most %llu can be",
                     (unsigned long long)n, (unsigned long long)most);
}

/* Of another number of ranks: host 0 has the file of rank 0, and all take what that says. Windows under way are of one rank, and go. */
static tagc_status spread_schedule(tagc_model *model, const saved_files *taken, const saved_about *about) {
    size_t n_hosts = (size_t)model->n_hosts;
    uint64_t n = about->n_schedule;
    void *memory = NULL;
    tagc_status made = check_schedule_bytes(model, n);
    if (made == TAGC_OK) made = tagc_memory_create((n_hosts + 1) * (size_t)n, "a saved schedule", &memory);
    tagc_status status = tagc_model_agree(model, made);
    if (status != TAGC_OK) { /* perhaps another rank's */
        tagc_memory_destroy(memory);
        return status;
    }
    char *all = memory, *own = all + n_hosts * n;
    if (model->host == 0) memcpy(own, taken->files[0].schedule, n);
    status = tagc_comm_all_gather(model->between, own, n, all, n_hosts * n);
    if (status == TAGC_OK) status = tagc_schedule_load(model->schedule, all, n, 0, NULL, NULL);
    tagc_memory_destroy(memory);
    return status;
}

static tagc_status load_schedule(tagc_model *model, const saved_files *taken, const saved_about *about) {
    if (!model->schedule || about->n_schedule == 0) return TAGC_OK;
    if (!is_same(model, about)) return spread_schedule(model, taken, about);
    const saved_file *own = &taken->files[0];
    return tagc_schedule_load(model->schedule, own->schedule, own->header.n_schedule, 1, NULL, NULL);
}

static tagc_status copy_schedule(const tagc_model *model, int with_windows, void **bytes, size_t *n) {
    TAGC_TRY(tagc_schedule_save(model->schedule, with_windows, NULL, 0, n));
    TAGC_TRY(tagc_memory_create(*n, "a schedule", bytes));
    return tagc_schedule_save(model->schedule, with_windows, *bytes, *n, n);
}

/* But for windows under way, what ranks have loaded must be the same: they decide alike from it, and exchange alike. */
static tagc_status compare_schedules(tagc_model *model) {
    void *bytes = NULL;
    size_t n = 0;
    tagc_status status = tagc_model_agree(model, copy_schedule(model, 0, &bytes, &n));
    if (status == TAGC_OK)
        status = tagc_model_compare(model, tagc_checksum(bytes, n),
                                    "what its file says of the schedule, which must be");
    tagc_memory_destroy(bytes);
    return status;
}

static tagc_status load_schedules(tagc_model *model, const saved_files *taken, const saved_about *about) {
    void *before = NULL;
    size_t n = 0;
    if (!model->schedule) return TAGC_OK;
    tagc_status status = tagc_model_agree(model, copy_schedule(model, 1, &before, &n));
    if (status == TAGC_OK) {
        status = tagc_model_agree(model, load_schedule(model, taken, about));
        if (status == TAGC_OK) status = compare_schedules(model);
        if (status != TAGC_OK) { /* nothing has changed */
            char text[TAGC_ERROR_TEXT_BYTES];
            snprintf(text, sizeof text, "%s", tagc_last_error());
            (void)tagc_schedule_load(model->schedule, before, n, 1, NULL, NULL);
            status = tagc_fail(status, "%s", text);
        }
    }
    tagc_memory_destroy(before);
    return status;
}

/* ---- residuals ---- */

/* The unit's tensor of that name and length, or NULL. */
static const tagc_member *find_tensor(const tagc_model_unit *unit, const tagc_model *model,
                                      const saved_tensor *saved) {
    for (uint32_t i = 0; i < unit->n_members; i++) {
        const tagc_member *t = &model->tensors[unit->members[i]];
        if (t->n_elems == saved->n_elems && strlen(t->name) == saved->n_name &&
            memcmp(t->name, saved->name, saved->n_name) == 0)
            return t;
    }
    return NULL;
}

/* 1: the part has the same tensors in the same places. */
static int is_same_part(const tagc_model_part *part, const saved_part *saved) {
    reader members = saved->members;
    if (saved->n_members != part->n_members || saved->width != part->width) return 0;
    for (uint32_t i = 0; i < part->n_members; i++) {
        const tagc_member *t = &part->model->tensors[part->members[i]];
        saved_tensor s;
        (void)take_tensor(&members, &s);
        if (s.n_elems != t->n_elems || s.chunk != t->chunk || s.n_name != strlen(t->name) ||
            memcmp(s.name, t->name, s.n_name) != 0)
            return 0;
    }
    return 1;
}

/* One saved stretch on its way to where its elements are now. */
typedef struct moving {
    const tagc_model_part *part;
    float *residual; /* of this place */
    uint64_t first;  /* element of values[0] */
    const float *values;
    double factor;
} moving;

static void add_stretch(void *context, uint64_t at, uint64_t first, uint64_t n) {
    const moving *m = context;
    const tagc_model *model = m->part->model;
    uint64_t n_place = tagc_part_place_elems(m->part), begin = n_place * (uint64_t)model->place;
    if (at < begin || at >= begin + n_place) return; /* another place's */
    for (uint64_t i = 0; i < n; i++)
        m->residual[at - begin + i] += (float)(m->factor * (double)m->values[first - m->first + i]);
}

enum { PIECE = 4096 };

/* Adds elements [first, first + n) of a tensor, from number `at` of a saved residual. */
static void add_saved(const saved_part *saved, uint64_t at, const tagc_member *t, uint64_t first, uint64_t n,
                      moving *m) {
    float values[PIECE];
    tagc_wire_header state;
    (void)tagc_wire_read(saved->state, saved->n_state, &state); /* it was checked */
    size_t row_bytes = tagc_residual_bytes(state.coding, state.k);
    while (n > 0) {
        uint64_t row = at / state.k, in_row = at % state.k, n_here = n < PIECE ? n : PIECE;
        if (n_here > state.k - in_row) n_here = state.k - in_row;
        tagc_residual_read(state.coding, state.k, saved->state + TAGC_WIRE_HEADER_BYTES + row * row_bytes,
                           (size_t)in_row, (size_t)n_here, values);
        m->first = first;
        m->values = values;
        tagc_part_stretches(m->part, t, first, n_here, add_stretch, m);
        at += n_here;
        first += n_here;
        n -= n_here;
    }
}

/* All chunks of a saved tensor that the former rank's place had. */
static void add_tensor(const saved_header *h, const saved_part *saved, const saved_tensor *s, uint64_t offset,
                       const tagc_member *t, moving *m) {
    uint64_t n_rows = h->output == TAGC_OUTPUT_SHARD ? h->n_hosts : 1, place = h->rank % h->n_places;
    for (uint64_t row = 0; row < n_rows; row++) {
        uint64_t owner = row * h->n_places + place, at = row * saved->width + offset;
        uint64_t first = owner * s->chunk, end = first + s->chunk;
        if (s->chunk == 0) { /* in a flat */
            uint64_t begin = owner * saved->width;
            first = begin > offset ? begin - offset : 0;
            end = begin + saved->width > offset ? begin + saved->width - offset : 0;
            at = row * saved->width + (offset > begin ? offset - begin : 0);
        }
        if (end > t->n_elems) end = t->n_elems;
        if (first < end) add_saved(saved, at, t, first, end - first, m);
    }
}

/* residuals (n_parts,): of the parts of a unit, NULL where there is none. */
static void add_file(const tagc_model *model, const tagc_model_unit *unit, const saved_file *file,
                     float *const *residuals, double factor) {
    reader r = file->parts;
    for (uint64_t p = 0; p < file->header.n_parts; p++) {
        saved_part saved;
        tagc_wire_header state;
        uint64_t offset = 0;
        (void)take_part(&r, &saved);
        (void)tagc_wire_read(saved.state, saved.n_state, &state);
        for (uint64_t i = 0; state.n_items > 0 && i < saved.n_members; i++) {
            saved_tensor s;
            (void)take_tensor(&saved.members, &s);
            const tagc_member *t = find_tensor(unit, model, &s);
            if (t && residuals[t->part - unit->parts]) {
                moving m = {.part = t->part, .residual = residuals[t->part - unit->parts], .factor = factor};
                add_tensor(&file->header, &saved, &s, offset, t, &m);
            }
            offset += s.chunk > 0 ? s.chunk : s.n_elems;
        }
    }
}

static tagc_status load_by_value(tagc_model *model, tagc_model_unit *unit, const saved_files *taken,
                                 const saved_about *about) {
    float **residuals;
    TAGC_TRY(tagc_parts_open_residuals(unit->parts, unit->n_parts, &residuals));
    /* A mean over H hosts gives a residual 1 / H of its weight. */
    double factor = model->options.op == TAGC_OP_AVG ? (double)model->n_hosts / (double)about->n_hosts : 1.0;
    for (size_t i = 0; i < taken->n; i++) add_file(model, unit, &taken->files[i], residuals, factor);
    tagc_status status = TAGC_OK;
    for (uint32_t p = 0; status == TAGC_OK && p < unit->n_parts; p++)
        if (residuals[p]) status = tagc_reducer_set_steps(unit->parts[p].reducer, unit->n_exchanges);
    return tagc_parts_close_residuals(unit->parts, unit->n_parts, residuals, status);
}

/* *is_loaded: every part has got the bytes that it saved. */
static tagc_status load_as_it_was(tagc_model_unit *unit, const saved_file *file, int *is_loaded) {
    *is_loaded = 1;
    for (uint32_t p = 0; p < unit->n_parts && *is_loaded; p++) {
        reader r = file->parts;
        *is_loaded = 0;
        for (uint64_t i = 0; i < file->header.n_parts && !*is_loaded; i++) {
            saved_part saved;
            (void)take_part(&r, &saved);
            if (!is_same_part(&unit->parts[p], &saved)) continue;
            tagc_status status = tagc_reducer_state_load(unit->parts[p].reducer, saved.state, saved.n_state);
            if (status == TAGC_ERR_MISMATCH)
                return TAGC_OK; /* of another output, or of a unit with another number */
            TAGC_TRY(status);
            *is_loaded = 1;
        }
    }
    return TAGC_OK;
}

static tagc_status load_residuals(tagc_model *model, const saved_files *taken, const saved_about *about) {
    for (uint32_t u = 0; u < model->n_units; u++) {
        tagc_model_unit *unit = &model->units[u];
        int is_loaded = 0;
        if (is_same(model, about)) TAGC_TRY(load_as_it_was(unit, &taken->files[0], &is_loaded));
        if (!is_loaded) TAGC_TRY(load_by_value(model, unit, taken, about));
    }
    return TAGC_OK;
}

/* Rounding goes on where it was. */
static void load_counts(tagc_model *model, const saved_files *taken, const saved_about *about) {
    model->run = about->run;
    model->n_steps = about->n_steps;
    for (uint32_t u = 0; u < model->n_units; u++) {
        uint64_t n = about->n_steps;
        if (taken->n > 0 && taken->files[0].header.n_units == model->n_units) {
            reader r = taken->files[0].exchanges;
            for (uint32_t i = 0; i <= u; i++) (void)take_number(&r, &n);
        }
        model->units[u].n_exchanges = n;
    }
}

tagc_status tagc_model_load(tagc_model *model, const void *const *files, const size_t *sizes,
                            size_t n_files) {
    saved_files taken = {0};
    saved_about about;
    TAGC_TRY(tagc_model_check_idle(model, "load"));
    TAGC_TRY(tagc_model_check_own_schedule(model, "load"));
    TAGC_TRY(check_cut(model));
    tagc_status status = tagc_model_agree(model, read_files(model, files, sizes, n_files, &taken));
    if (status == TAGC_OK) status = tagc_model_agree(model, agree_on_files(model, &taken, &about));
    if (status == TAGC_OK) {
        status = load_schedules(model, &taken, &about);
        if (status == TAGC_OK) load_counts(model, &taken, &about);
        if (status == TAGC_OK) status = tagc_model_take_up(model);
        if (status == TAGC_OK) status = tagc_model_agree(model, load_residuals(model, &taken, &about));
    }
    tagc_memory_destroy(taken.files);
    return status;
}
