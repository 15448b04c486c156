/* A plain driver for the fuzz targets where libFuzzer is not at hand: seed inputs, mutated by a fixed random
 * sequence for some seconds of the processor. It finds what a short run can find, and repeats what it found.
 *
 *   fuzz_x SECONDS [FOLDER_OF_SEEDS [COUNT]]     fuzz; COUNT: at most so many mutated inputs
 *   fuzz_x FILE                                  run one input, to repeat a failure (written to ./fuzz-last-input)
 */
#include <dirent.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes);

enum { MAX_SEEDS = 256, MAX_BYTES = 1 << 16, LONG_S = 60 };

typedef struct input {
    uint8_t *data;
    size_t n_bytes;
} input;

static uint64_t random_state = 88172645463325252u;

static uint64_t random_u64(void) {
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return random_state;
}

static input read_file(const char *path) {
    input in = {NULL, 0};
    FILE *file = fopen(path, "rb");
    if (!file) return in;
    in.data = malloc(MAX_BYTES);
    if (in.data) in.n_bytes = fread(in.data, 1, MAX_BYTES, file);
    fclose(file);
    return in;
}

/* By name: inputs must not depend on the order of a file system. */
static int read_seeds(const char *folder, input *seeds) {
    struct dirent **entries;
    int n = 0, n_entries = scandir(folder, &entries, NULL, alphasort);
    if (n_entries < 0) return 0;
    for (int i = 0; i < n_entries; i++) {
        char path[4096];
        snprintf(path, sizeof path, "%s/%s", folder, entries[i]->d_name);
        if (entries[i]->d_name[0] != '.' && n < MAX_SEEDS) {
            seeds[n] = read_file(path);
            if (seeds[n].data) n++;
        }
        free(entries[i]);
    }
    free(entries);
    return n;
}

static size_t mutate(uint8_t *data, size_t n_bytes) {
    static const uint8_t edge[] = {0, 1, 2, 7, 8, 0x7f, 0x80, 0xfe, 0xff};
    for (uint64_t n_edits = random_u64() % 6; n_edits > 0; n_edits--) {
        size_t at = n_bytes ? random_u64() % n_bytes : 0;
        switch (random_u64() % 6) {
        case 0:
            if (n_bytes) data[at] ^= (uint8_t)(1u << (random_u64() % 8));
            break;
        case 1:
            if (n_bytes) data[at] = (uint8_t)random_u64();
            break;
        case 2:
            if (n_bytes) data[at] = edge[random_u64() % sizeof edge];
            break;
        case 3:
            n_bytes = at;
            break;
        case 4:
            for (size_t i = random_u64() % 64; i > 0 && n_bytes < MAX_BYTES; i--)
                data[n_bytes++] = (uint8_t)random_u64();
            break;
        default: /* four equal edge bytes: hits length fields */
            for (size_t i = 0; i < 4 && at + i < n_bytes; i++)
                data[at + i] = edge[random_u64() % sizeof edge];
        }
    }
    return n_bytes;
}

int main(int argc, char **argv) {
    if (argc < 2) {
        fprintf(stderr, "usage: %s SECONDS [SEED_FOLDER [COUNT]] | FILE\n", argv[0]);
        return 2;
    }
    char *end;
    double n_seconds = strtod(argv[1], &end);
    if (*end) {
        input one = read_file(argv[1]);
        if (!one.data) {
            fprintf(stderr, "%s: cannot read %s\n", argv[0], argv[1]);
            return 2;
        }
        LLVMFuzzerTestOneInput(one.data, one.n_bytes);
        free(one.data);
        return 0;
    }
    static input seeds[MAX_SEEDS];
    int n_seeds = argc > 2 ? read_seeds(argv[2], seeds) : 0;
    uint8_t *data = malloc(MAX_BYTES);
    if (!data) return 2;
    LLVMFuzzerTestOneInput(data, 0);
    for (int i = 0; i < n_seeds; i++) LLVMFuzzerTestOneInput(seeds[i].data, seeds[i].n_bytes);

    uint64_t n_runs = 0, most = argc > 3 ? strtoull(argv[3], NULL, 10) : UINT64_MAX;
    const char *asked = getenv("LONG"); /* make check sets it, and most often to nothing */
    if (asked && asked[0]) {
        n_seconds = LONG_S;
        most = UINT64_MAX;
    }
    clock_t stop = clock() + (clock_t)(n_seconds * CLOCKS_PER_SEC);
    while (n_runs < most && clock() < stop) {
        size_t n_bytes = 0;
        if (n_seeds > 0 && random_u64() % 8) {
            const input *seed = &seeds[random_u64() % (uint64_t)n_seeds];
            memcpy(data, seed->data, seed->n_bytes);
            n_bytes = seed->n_bytes;
        } else {
            n_bytes = random_u64() % 512;
            for (size_t i = 0; i < n_bytes; i++) data[i] = (uint8_t)random_u64();
        }
        n_bytes = mutate(data, n_bytes);
        FILE *last = getenv("TAGC_FUZZ_KEEP") ? fopen("fuzz-last-input", "wb") : NULL;
        if (last) {
            fwrite(data, 1, n_bytes, last);
            fclose(last);
        }
        /* An exact copy on the heap, so that the address sanitizer sees a read past the end. */
        uint8_t *exact = malloc(n_bytes ? n_bytes : 1);
        if (!exact) return 2;
        memcpy(exact, data, n_bytes);
        LLVMFuzzerTestOneInput(exact, n_bytes);
        free(exact);
        n_runs++;
    }
    printf("%llu inputs from %d seeds\n", (unsigned long long)n_runs, n_seeds);
    for (int i = 0; i < n_seeds; i++) free(seeds[i].data);
    free(data);
    return 0;
}
