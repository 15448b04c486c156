/* Token files as one array in memory, by mapping them. The ranks of one host share their pages, and opening a file of many
 * gigabytes copies nothing. A corpus of several files, its shards, reads as if it were one file. */
#include "core/status.h"
#include "core/xxh3.h"
#include "data/token_format.h"
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

typedef struct token_shard {
    char *path;
    uint8_t *map; /* the whole file */
    size_t n_bytes;
    tagc_tokens_info info;
    uint64_t first; /* its first token among those of all shards */
} token_shard;

struct tagc_tokens {
    char *name;
    token_shard *shards; /* (n_shards) */
    size_t n_shards;
    tagc_tokens_info info; /* the first shard's, with the tokens of all */
};

static tagc_status map_file(token_shard *shard) {
    const char *path = shard->path;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* a pipe would wait for who writes to it */
    if (fd < 0) return tagc_fail(TAGC_ERR_IO, "%s: cannot open: %s", path, strerror(errno));
    struct stat about;
    tagc_status status = TAGC_OK;
    if (fstat(fd, &about) != 0)
        status = tagc_fail(TAGC_ERR_IO, "%s: cannot stat: %s", path, strerror(errno));
    else if (!S_ISREG(about.st_mode))
        status = tagc_fail(TAGC_ERR_IO, "%s: not a file, which a token file must be", path);
    else if (about.st_size == 0)
        status = tagc_fail(TAGC_ERR_CORRUPT, "%s: the file is empty", path);
    else if ((uint64_t)about.st_size > SIZE_MAX)
        status = tagc_fail(TAGC_ERR_UNSUPPORTED, "%s: larger than this machine can map", path);
    if (status == TAGC_OK) {
        shard->n_bytes = (size_t)about.st_size;
        void *map = mmap(NULL, shard->n_bytes, PROT_READ, MAP_SHARED, fd, 0);
        if (map == MAP_FAILED)
            status =
                tagc_fail(TAGC_ERR_IO, "%s: cannot map %zu bytes: %s", path, shard->n_bytes, strerror(errno));
        else
            shard->map = map;
    }
    close(fd);
    return status;
}

static tagc_status open_shard(const char *path, tagc_tokens_format format, token_shard *shard) {
    shard->path = strdup(path);
    if (!shard->path) return tagc_fail(TAGC_ERR_MEMORY, "%s: no memory to open it", path);
    TAGC_TRY(map_file(shard));
    return tagc_token_format_parse(shard->map, shard->n_bytes, shard->n_bytes, format, path, &shard->info);
}

/* Tokens of another kind would mean other text. */
static tagc_status check_alike(const token_shard *shard, const token_shard *first) {
    const tagc_tokens_info *a = &shard->info, *b = &first->info;
    if (a->format == b->format && a->vocab_size == b->vocab_size && a->end_of_text == b->end_of_text &&
        strcmp(a->tokenizer, b->tokenizer) == 0)
        return TAGC_OK;
    return tagc_fail(TAGC_ERR_MISMATCH,
                     "%s: %s format, vocabulary %" PRIu32 ", tokenizer \"%s\"; the shard %s has %s, %" PRIu32
                     " and \"%s\"",
                     shard->path, tagc_tokens_format_name(a->format), a->vocab_size, a->tokenizer,
                     first->path, tagc_tokens_format_name(b->format), b->vocab_size, b->tokenizer);
}

tagc_status tagc_tokens_open_shards(const char *name, const char *const *paths, size_t n_paths,
                                    tagc_tokens_format format, tagc_tokens **out) {
    *out = NULL;
    tagc_tokens *tokens = calloc(1, sizeof *tokens);
    if (tokens) tokens->name = strdup(name);
    if (tokens) tokens->shards = calloc(n_paths, sizeof *tokens->shards);
    tagc_status status = TAGC_OK;
    if (!tokens || !tokens->name || !tokens->shards)
        status = tagc_fail(TAGC_ERR_MEMORY, "%s: no memory to open it", name);
    uint64_t n_tokens = 0;
    for (size_t i = 0; status == TAGC_OK && i < n_paths; i++) {
        token_shard *shard = &tokens->shards[tokens->n_shards++];
        status = open_shard(paths[i], format, shard);
        if (status == TAGC_OK) status = check_alike(shard, &tokens->shards[0]);
        shard->first = n_tokens;
        n_tokens += shard->info.n_tokens;
    }
    if (status != TAGC_OK) {
        tagc_tokens_close(tokens);
        return status;
    }
    tokens->info = tokens->shards[0].info;
    tokens->info.n_tokens = n_tokens;
    *out = tokens;
    return TAGC_OK;
}

tagc_status tagc_tokens_open(const char *path, tagc_tokens_format format, tagc_tokens **out) {
    return tagc_tokens_open_shards(path, &path, 1, format, out);
}

void tagc_tokens_close(tagc_tokens *tokens) {
    if (!tokens) return;
    for (size_t i = 0; i < tokens->n_shards; i++) {
        if (tokens->shards[i].map) munmap(tokens->shards[i].map, tokens->shards[i].n_bytes);
        free(tokens->shards[i].path);
    }
    free(tokens->shards);
    free(tokens->name);
    free(tokens);
}

void tagc_tokens_get_info(const tagc_tokens *tokens, tagc_tokens_info *out) {
    *out = tokens->info;
}

const char *tagc_tokens_path(const tagc_tokens *tokens) {
    return tokens->name;
}

size_t tagc_tokens_n_shards(const tagc_tokens *tokens) {
    return tokens->n_shards;
}

uint64_t tagc_tokens_n(const tagc_tokens *tokens) {
    return tokens->info.n_tokens;
}

static uint64_t fingerprint_of(const token_shard *shard) {
    enum { PIECES = 1024, PIECE_BYTES = 4096 };
    const tagc_tokens_info *info = &shard->info;
    const uint8_t *data = shard->map + info->first_byte;
    size_t n_bytes = (size_t)info->n_tokens * (size_t)info->token_bytes;
    uint64_t hash = tagc_xxh3(&info->n_tokens, sizeof info->n_tokens, (uint64_t)info->token_bytes);
    if (n_bytes <= (size_t)PIECES * PIECE_BYTES) return tagc_xxh3(data, n_bytes, hash);
    size_t stride = (n_bytes - PIECE_BYTES) / (PIECES - 1);
    for (size_t i = 0; i < PIECES; i++) hash = tagc_xxh3(data + i * stride, PIECE_BYTES, hash);
    return hash;
}

uint64_t tagc_tokens_fingerprint(const tagc_tokens *tokens) {
    uint64_t hash = fingerprint_of(&tokens->shards[0]);
    for (size_t i = 1; i < tokens->n_shards; i++) {
        uint64_t next = fingerprint_of(&tokens->shards[i]);
        hash = tagc_xxh3(&next, sizeof next, hash);
    }
    return hash;
}

/* The shard of a token, whose index must be below n_tokens. */
static const token_shard *shard_of(const tagc_tokens *tokens, uint64_t index) {
    size_t low = 0, high = tokens->n_shards;
    while (high - low > 1) {
        size_t middle = low + (high - low) / 2;
        if (tokens->shards[middle].first <= index)
            low = middle;
        else
            high = middle;
    }
    return &tokens->shards[low];
}

/* index: in the shard. */
static uint32_t token_at(const token_shard *shard, uint64_t index) {
    const uint8_t *p = shard->map + shard->info.first_byte + index * (uint64_t)shard->info.token_bytes;
    switch (shard->info.token_bytes) {
    case 1:
        return p[0];
    case 2:
        return (uint32_t)p[0] | (uint32_t)p[1] << 8;
    default:
        return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
    }
}

uint32_t tagc_tokens_at(const tagc_tokens *tokens, uint64_t index) {
    const token_shard *shard = shard_of(tokens, index);
    return token_at(shard, index - shard->first);
}

/* n tokens of one shard, from `first` in it on. */
static tagc_status read_shard(const token_shard *shard, uint64_t first, size_t n, uint32_t vocab_size,
                              int *out) {
    for (size_t i = 0; i < n; i++) {
        uint32_t token = token_at(shard, first + i);
        if (token >= vocab_size)
            return tagc_fail(
                TAGC_ERR_CORRUPT,
                "%s: token %" PRIu32 " at byte %" PRIu64 ", the model's vocabulary ends below %" PRIu32,
                shard->path, token, shard->info.first_byte + (first + i) * (uint64_t)shard->info.token_bytes,
                vocab_size);
        out[i] = (int)token;
    }
    return TAGC_OK;
}

tagc_status tagc_tokens_read(const tagc_tokens *tokens, uint64_t first, size_t n, uint32_t vocab_size,
                             int *out) {
    if (vocab_size == 0 || vocab_size > INT32_MAX)
        return tagc_fail(TAGC_ERR_ARGUMENT, "vocab_size is %" PRIu32 ", must be in [1, 2^31 - 1]",
                         vocab_size);
    if (first > tokens->info.n_tokens || n > tokens->info.n_tokens - first)
        return tagc_fail(TAGC_ERR_ARGUMENT, "%s: tokens [%" PRIu64 ", + %zu) asked for, it has %" PRIu64,
                         tokens->name, first, n, tokens->info.n_tokens);
    while (n > 0) {
        const token_shard *shard = shard_of(tokens, first);
        uint64_t at = first - shard->first, n_here = shard->info.n_tokens - at;
        if (n_here > n) n_here = n;
        TAGC_TRY(read_shard(shard, at, (size_t)n_here, vocab_size, out));
        first += n_here;
        out += n_here;
        n -= (size_t)n_here;
    }
    return TAGC_OK;
}
