/* The timeline. Events are stored in memory that is allocated at the start; they become text only when the file is written.
 *
 * Viewers require that the spans of one thread do not overlap. Transfers overlap, so they are spread over several threads.
 *
 * Ranks send their text to rank 0 in pieces of whole events, so that a long run needs memory for one piece per rank. */
#include "fsdp/trace.h"
#include "disk/new_file.h"
#include "fsdp/internal.h"
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define PIECE_BYTES ((size_t)256 << 10)
#define EVENT_BYTES 1024 /* more than any event takes */
#define SAME_CLOCK_S                                                                                         \
    1.0 /* ranks of one host share a clock; clocks of other hosts differ by their start times */

struct tagc_trace {
    pthread_mutex_t lock;
    tagc_event *events;
    size_t n_events, capacity;
    uint64_t n_dropped;
    int paused;
};

tagc_status tagc_trace_create(size_t n_events, tagc_trace **out) {
    *out = NULL;
    if (n_events < 1 || n_events > SIZE_MAX / sizeof(tagc_event))
        return tagc_fail(TAGC_ERR_ARGUMENT, "n_events is %zu, allowed is 1 to %zu", n_events,
                         SIZE_MAX / sizeof(tagc_event));
    tagc_trace *trace = calloc(1, sizeof *trace);
    if (trace != NULL) trace->events = malloc(n_events * sizeof *trace->events);
    if (trace == NULL || trace->events == NULL) {
        free(trace);
        return tagc_fail(TAGC_ERR_MEMORY, "no memory for a trace of %zu events", n_events);
    }
    pthread_mutex_init(&trace->lock, NULL);
    trace->capacity = n_events;
    *out = trace;
    return TAGC_OK;
}

void tagc_trace_destroy(tagc_trace *trace) {
    if (trace == NULL) return;
    pthread_mutex_destroy(&trace->lock);
    free(trace->events);
    free(trace);
}

void tagc_trace_add(void *context, const tagc_event *event) {
    tagc_trace *trace = context;
    pthread_mutex_lock(&trace->lock);
    if (!trace->paused) {
        if (trace->n_events < trace->capacity)
            trace->events[trace->n_events++] = *event;
        else
            trace->n_dropped++;
    }
    pthread_mutex_unlock(&trace->lock);
}

void tagc_trace_pause(tagc_trace *trace, int paused) {
    pthread_mutex_lock(&trace->lock);
    trace->paused = paused;
    pthread_mutex_unlock(&trace->lock);
}

/* ---- writing ---- */

/* Threads of a rank: streams without overlap, then the lanes of transfers. */
static const char *const streams[] = {"compute", "codec"};
enum { N_STREAMS = sizeof streams / sizeof *streams, MAX_LANES = 64 };

typedef struct tagc_trace_writer {
    const tagc_trace *trace;
    const char *const *unit_names;
    int n_units, rank;
    double zero_s; /* on this rank's clock */
    size_t next;   /* event */
    int has_header, n_lanes;
    double lane_end_s[MAX_LANES];
    uint64_t n_dropped; /* events without a free lane */
} tagc_trace_writer;

static int compare_starts(const void *a, const void *b) {
    const tagc_event *x = a, *y = b;
    return (x->start_s > y->start_s) - (x->start_s < y->start_s);
}

/* Call it in the order of starts: the first free lane then gives the fewest lanes. -1: none is free. */
static int thread_of(tagc_trace_writer *w, const tagc_event *e) {
    for (int i = 0; i < N_STREAMS; i++)
        if (strcmp(streams[i], e->stream) == 0) return i;
    for (int lane = 0; lane < MAX_LANES; lane++) {
        if (w->lane_end_s[lane] > e->start_s) continue;
        w->lane_end_s[lane] = e->end_s;
        w->n_lanes = lane < w->n_lanes ? w->n_lanes : lane + 1;
        return N_STREAMS + lane;
    }
    return -1;
}

/* A clock may begin below zero. */
static void free_lanes(tagc_trace_writer *w) {
    for (int lane = 0; lane < MAX_LANES; lane++) w->lane_end_s[lane] = -INFINITY;
}

/* The header names the lanes before the first event is printed, so a first pass only counts them. */
static void count_lanes(tagc_trace_writer *w) {
    w->n_lanes = 1;
    free_lanes(w);
    for (size_t i = 0; i < w->trace->n_events; i++) thread_of(w, &w->trace->events[i]);
    free_lanes(w);
}

/* Names may come from a user: quotes and control characters must not break the file. */
static void escape(const char *text, char *out, size_t n_bytes) {
    size_t n = 0;
    for (; *text != 0 && n + 7 < n_bytes; text++) {
        unsigned char c = (unsigned char)*text;
        if (c == '"' || c == '\\' || c < 0x20)
            n += (size_t)snprintf(out + n, n_bytes - n, "\\u%04x", c);
        else
            out[n++] = (char)c;
    }
    out[n] = 0;
}

static int print_header(const tagc_trace_writer *w, char *out) {
    int n = snprintf(out, EVENT_BYTES,
                     "{\"ph\":\"M\",\"name\":\"process_name\",\"pid\":%d,\"args\":{\"name\":\"rank %d\"}},\n",
                     w->rank, w->rank);
    for (int i = 0; i < N_STREAMS + w->n_lanes; i++) {
        char name[32];
        int lane = i - N_STREAMS;
        if (lane <= 0)
            snprintf(name, sizeof name, "%s", lane < 0 ? streams[i] : "comm");
        else
            snprintf(name, sizeof name, "comm %d", lane + 1);
        n += snprintf(
            out + n, EVENT_BYTES,
            "{\"ph\":\"M\",\"name\":\"thread_name\",\"pid\":%d,\"tid\":%d,\"args\":{\"name\":\"%s\"}},\n"
            "{\"ph\":\"M\",\"name\":\"thread_sort_index\",\"pid\":%d,\"tid\":%d,\"args\":{\"sort_index\":%d}}"
            ",\n",
            w->rank, i, name, w->rank, i, i);
    }
    return n;
}

/* Microseconds in eighths, which binary fractions and whole nanoseconds both represent exactly. So an event that begins
 * where another ends does not overlap it after a reader's arithmetic. */
static double event_us(const tagc_trace_writer *w, double time_s) {
    return floor((time_s - w->zero_s) * 8e6 + 0.5) / 8;
}

/* If no lane is free, prints nothing and counts the event as dropped. */
static int print_event(tagc_trace_writer *w, const tagc_event *e, char *out) {
    char name[128], unit[256] = "";
    int thread = thread_of(w, e);
    w->n_dropped += thread < 0;
    if (thread < 0) return 0;
    escape(e->name, name, sizeof name);
    if (e->tag < (uint64_t)w->n_units) escape(w->unit_names[e->tag], unit, sizeof unit);
    double start_us = event_us(w, e->start_s);
    return snprintf(out, EVENT_BYTES,
                    "{\"ph\":\"X\",\"name\":\"%s%s%s\",\"pid\":%d,\"tid\":%d,\"ts\":%.3f,\"dur\":%.3f,"
                    "\"args\":{\"n_bytes\":%llu,\"unit\":\"%s\"}},\n",
                    name, unit[0] != 0 ? " " : "", unit, w->rank, thread, start_us,
                    event_us(w, e->end_s) - start_us, (unsigned long long)e->n_bytes, unit);
}

typedef struct trace_text {
    uint64_t n_bytes, n_dropped;
    int more;
    char text[PIECE_BYTES];
} trace_text;

static void fill_piece(tagc_trace_writer *w, trace_text *piece) {
    size_t n = 0;
    if (!w->has_header) n += (size_t)print_header(w, piece->text);
    w->has_header = 1;
    while (w->next < w->trace->n_events && n + EVENT_BYTES < PIECE_BYTES)
        n += (size_t)print_event(w, &w->trace->events[w->next++], piece->text + n);
    piece->n_bytes = n;
    piece->n_dropped = w->trace->n_dropped + w->n_dropped;
    piece->more = w->next < w->trace->n_events;
}

/* Zero is the earliest event of all ranks. If clocks differ, the barrier is taken as one moment on all ranks. */
static tagc_status find_zero(tagc_trace_writer *w, tagc_comm *comm, double (*times)[2]) {
    int world_size = tagc_comm_world_size(comm);
    TAGC_TRY(tagc_comm_barrier(comm));
    double *own = times[world_size];
    own[0] = own[1] = tagc_time_s();
    for (size_t i = 0; i < w->trace->n_events; i++)
        if (w->trace->events[i].start_s < own[1]) own[1] = w->trace->events[i].start_s;
    TAGC_TRY(tagc_comm_all_gather(comm, own, sizeof *times, times, (size_t)world_size * sizeof *times));
    double longest_s = 0, skew_s = 0;
    for (int rank = 0; rank < world_size; rank++) {
        double skew = times[rank][0] - times[0][0];
        skew_s = skew > skew_s ? skew : -skew > skew_s ? -skew : skew_s;
    }
    for (int rank = 0; rank < world_size; rank++) {
        double now_s = skew_s < SAME_CLOCK_S ? own[0] : times[rank][0];
        longest_s = now_s - times[rank][1] > longest_s ? now_s - times[rank][1] : longest_s;
    }
    w->zero_s = own[0] - longest_s;
    return TAGC_OK;
}

/* Rank 0 keeps receiving after its file has failed, because the others are still sending. */
static tagc_status write_pieces(tagc_trace_writer *w, tagc_comm *comm, trace_text *pieces, FILE *file,
                                uint64_t *n_dropped) {
    int world_size = tagc_comm_world_size(comm), more = 1;
    while (more) {
        trace_text *own = &pieces[world_size];
        fill_piece(w, own);
        TAGC_TRY(tagc_comm_all_gather(comm, own, sizeof *own, pieces, (size_t)world_size * sizeof *pieces));
        more = 0;
        *n_dropped = 0;
        for (int rank = 0; rank < world_size; rank++) {
            more |= pieces[rank].more;
            *n_dropped += pieces[rank].n_dropped;
            if (file != NULL) fwrite(pieces[rank].text, 1, pieces[rank].n_bytes, file);
        }
    }
    return TAGC_OK;
}

static tagc_status write_all(tagc_trace_writer *w, tagc_comm *comm, trace_text *pieces, double (*times)[2],
                             const char *path) {
    TAGC_TRY(find_zero(w, comm, times));
    tagc_new_file file = {0}; /* of rank 0 */
    uint64_t n_dropped = 0;   /* by all ranks */
    tagc_status opened =
        tagc_levels_agree(NULL, comm, w->rank == 0 ? tagc_new_file_open(path, &file) : TAGC_OK);
    if (opened != TAGC_OK) {
        tagc_new_file_close(&file);
        return opened;
    }
    if (file.stream != NULL) fprintf(file.stream, "{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n");
    tagc_status status = write_pieces(w, comm, pieces, file.stream, &n_dropped);
    int is_sent = status == TAGC_OK;
    if (is_sent && file.stream != NULL) {
        fprintf(file.stream, "{\"ph\":\"M\",\"name\":\"tagc\",\"pid\":0,\"args\":{\"n_dropped\":%llu}}\n]}\n",
                (unsigned long long)n_dropped);
        status = tagc_new_file_commit(&file);
    }
    tagc_new_file_close(&file);
    return is_sent ? tagc_levels_agree(NULL, comm, status) : status;
}

tagc_status tagc_trace_write(tagc_trace *trace, tagc_comm *comm, const char *const *unit_names, int n_units,
                             const char *path) {
    size_t n = (size_t)tagc_comm_world_size(comm) + 1; /* one more for this rank's own piece */
    int paused = trace->paused;
    tagc_trace_pause(trace, 1); /* writing the trace must not add events to it */
    trace_text *pieces = calloc(n, sizeof *pieces);
    double(*times)[2] = calloc(n, sizeof *times);
    tagc_status status = TAGC_OK;
    if (pieces == NULL || times == NULL) status = tagc_fail(TAGC_ERR_MEMORY, "no memory to write the trace");
    status = tagc_levels_agree(NULL, comm, status);
    tagc_trace_writer writer = {
        .trace = trace, .unit_names = unit_names, .n_units = n_units, .rank = tagc_comm_rank(comm)};
    if (trace->n_events > 0) qsort(trace->events, trace->n_events, sizeof *trace->events, compare_starts);
    count_lanes(&writer);
    if (status == TAGC_OK) status = write_all(&writer, comm, pieces, times, path);
    free(pieces);
    free(times);
    tagc_trace_pause(trace, paused);
    return status;
}
