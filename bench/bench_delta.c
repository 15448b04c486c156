/* What the parameter leg costs beside the floor of memory (reading two arrays and writing a third, 12 bytes per element):
 * encoding what an owner sends, and putting what has arrived into the replica, for every wire, and the checksums of messages
 * and of a replica. A replica is bf16, or fp32 where its line says so. One thread, all taking turns; a ratio is the median over the turns of time / floor of the same turn. */
#include "codec/bf16.h"
#include "codec/delta.h"
#include "codec/delta_kernels.h"
#include "core/xxh3.h"
#include "measure.h"

enum { N_DEFAULT = 7087872, N_REPEATS = 25 }; /* a block of GPT-2 124M */

typedef struct bench {
    size_t n;
    float *master, *values, *sum; /* (n) */
    uint16_t *replica, *halves;   /* (n) */
    uint8_t *body;                /* of 8 bits */
    volatile uint64_t checksum;
} bench;

typedef struct work {
    const char *text;
    int bits; /* 0: bf16 */
    void (*run)(bench *b, const tagc_delta_kernels *k, int bits);
} work;

static void encode(bench *b, const tagc_delta_kernels *k, int bits) {
    tagc_delta_encode_with(k, bits, b->master, b->replica, sizeof *b->replica, b->n, b->body);
}
static void encode_wide(bench *b, const tagc_delta_kernels *k, int bits) {
    tagc_delta_encode_with(k, bits, b->master, b->values, sizeof *b->values, b->n, b->body);
}
static void encode_values(bench *b, const tagc_delta_kernels *k, int bits) {
    tagc_delta_encode_with(k, bits, b->master, NULL, 0, b->n, b->body);
}
static void apply(bench *b, const tagc_delta_kernels *k, int bits) {
    tagc_delta_apply_with(k, bits, b->body, b->replica, sizeof *b->replica, b->n);
}
static void apply_wide(bench *b, const tagc_delta_kernels *k, int bits) {
    tagc_delta_apply_with(k, bits, b->body, b->values, sizeof *b->values, b->n);
}
static void decode(bench *b, const tagc_delta_kernels *k, int bits) {
    tagc_delta_decode_with(k, bits, b->body, b->values, b->n);
}
static void narrow(bench *b, const tagc_delta_kernels *k, int bits) {
    (void)k, (void)bits;
    tagc_bf16_narrow(b->master, b->halves, b->n);
}
static void widen(bench *b, const tagc_delta_kernels *k, int bits) {
    (void)k, (void)bits;
    tagc_bf16_widen(b->halves, b->values, b->n);
}
static void sum_message(bench *b, const tagc_delta_kernels *k, int bits) {
    (void)k;
    b->checksum = tagc_xxh3(b->body, tagc_delta_bytes(bits, b->n), 0);
}
static void sum_replica(bench *b, const tagc_delta_kernels *k, int bits) {
    (void)k, (void)bits;
    b->checksum = tagc_xxh3(b->replica, b->n * sizeof *b->replica, 0);
}

static const work works[] = {
    {"bf16: narrow", 0, narrow},
    {"bf16: widen", 0, widen},
    {"int8: encode", 8, encode_values},
    {"int8: decode", 8, decode},
    {"delta8: encode", 8, encode},
    {"delta8: apply", 8, apply},
    {"delta4: encode", 4, encode},
    {"delta4: apply", 4, apply},
    {"delta2: encode", 2, encode},
    {"delta2: apply", 2, apply},
    {"delta4, fp32: encode", 4, encode_wide},
    {"delta4, fp32: apply", 4, apply_wide},
    {"delta4: checksum", 4, sum_message},
    {"replica: checksum", 0, sum_replica},
};
enum { N_WORKS = sizeof works / sizeof *works };

int main(int argc, char **argv) {
    bench b = {.n = argc > 1 ? strtoull(argv[1], NULL, 10) : N_DEFAULT};
    if (b.n < TAGC_DELTA_BLOCK) {
        fprintf(stderr, "usage: bench_delta [elements, at least %d]\n", TAGC_DELTA_BLOCK);
        return 1;
    }
    printf("bench_delta: %s and below\n", level_in_use());
    b.master = take(b.n, sizeof(float), "master");
    b.values = take(b.n, sizeof(float), "values");
    b.replica = take(b.n, sizeof(uint16_t), "replica");
    b.sum = take(b.n, sizeof(float), "sum");
    b.halves = take(b.n, sizeof(uint16_t), "halves");
    b.body = take(tagc_delta_bytes(8, b.n), 1, "body");
    uint64_t random = 1;
    tagc_fill_gradient(b.master, b.n, &random);
    double ratios[N_WORKS][N_REPEATS], times[N_WORKS][N_REPEATS], floors[N_REPEATS];
    for (const tagc_delta_kernels *const *k = tagc_delta_kernels_all(); *k; k++) {
        for (int turn = 0; turn < N_REPEATS; turn++) {
            floors[turn] = tagc_time_floor(NULL, b.master, b.values, b.sum, b.n);
            for (int w = 0; w < N_WORKS; w++) {
                if (works[w].bits)
                    works[w].run(&b, *k, works[w].bits); /* leaves a body of these bits, or uses one */
                if (works[w].run == apply || works[w].run == apply_wide || works[w].run == decode ||
                    works[w].run == sum_message)
                    encode(&b, *k, works[w].bits);
                double start_s = tagc_clock_s();
                works[w].run(&b, *k, works[w].bits);
                times[w][turn] = tagc_clock_s() - start_s;
                ratios[w][turn] = times[w][turn] / floors[turn];
            }
        }
        printf("%s, %zu elements, floor %.3f ns per element\n", (*k)->name, b.n,
               spread_of(floors, N_REPEATS).median * 1e9 / (double)b.n);
        for (int w = 0; w < N_WORKS; w++) {
            spread ratio = spread_of(ratios[w], N_REPEATS);
            printf("  %-20s %.3f of the floor (%.2f to %.2f)  %.3f ns per element\n", works[w].text,
                   ratio.median, ratio.quarter, ratio.three_quarters,
                   spread_of(times[w], N_REPEATS).median * 1e9 / (double)b.n);
        }
    }
    void *all[] = {b.master, b.values, b.replica, b.sum, b.halves, b.body};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) tagc_memory_destroy(all[i]);
    return 0;
}
