/* A token file as an array in memory, by mapping it. The ranks of one host share its pages, and opening a file of many
 * gigabytes copies nothing. */
#include "core/status.h"
#include "data/token_format.h"
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

struct tagc_tokens {
    char *path;
    uint8_t *map; /* the whole file */
    size_t n_bytes;
    tagc_tokens_info info;
};

static tagc_status map_file(const char *path, tagc_tokens *tokens) {
    int fd = open(path, O_RDONLY | O_CLOEXEC);
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
        tokens->n_bytes = (size_t)about.st_size;
        void *map = mmap(NULL, tokens->n_bytes, PROT_READ, MAP_SHARED, fd, 0);
        if (map == MAP_FAILED)
            status = tagc_fail(TAGC_ERR_IO, "%s: cannot map %zu bytes: %s", path, tokens->n_bytes,
                               strerror(errno));
        else
            tokens->map = map;
    }
    close(fd);
    return status;
}

tagc_status tagc_tokens_open(const char *path, tagc_tokens_format format, tagc_tokens **out) {
    *out = NULL;
    tagc_tokens *tokens = calloc(1, sizeof *tokens);
    if (tokens) tokens->path = strdup(path);
    if (!tokens || !tokens->path) {
        tagc_tokens_close(tokens);
        return tagc_fail(TAGC_ERR_MEMORY, "%s: no memory to open it", path);
    }
    tagc_status status = map_file(path, tokens);
    if (status == TAGC_OK)
        status = tagc_token_format_parse(tokens->map, tokens->n_bytes, tokens->n_bytes, format, path,
                                         &tokens->info);
    if (status != TAGC_OK) {
        tagc_tokens_close(tokens);
        return status;
    }
    *out = tokens;
    return TAGC_OK;
}

void tagc_tokens_close(tagc_tokens *tokens) {
    if (!tokens) return;
    if (tokens->map) munmap(tokens->map, tokens->n_bytes);
    free(tokens->path);
    free(tokens);
}

void tagc_tokens_get_info(const tagc_tokens *tokens, tagc_tokens_info *out) {
    *out = tokens->info;
}

const char *tagc_tokens_path(const tagc_tokens *tokens) {
    return tokens->path;
}

uint64_t tagc_tokens_n(const tagc_tokens *tokens) {
    return tokens->info.n_tokens;
}

uint64_t tagc_tokens_fingerprint(const tagc_tokens *tokens) {
    enum { PIECES = 1024, PIECE_BYTES = 4096 };
    const uint8_t *data = tokens->map + tokens->info.first_byte;
    size_t n_bytes = (size_t)tokens->info.n_tokens * (size_t)tokens->info.token_bytes;
    uint64_t hash = XXH3_64bits_withSeed(&tokens->info.n_tokens, sizeof tokens->info.n_tokens,
                                         (XXH64_hash_t)tokens->info.token_bytes);
    if (n_bytes <= (size_t)PIECES * PIECE_BYTES) return XXH3_64bits_withSeed(data, n_bytes, hash);
    size_t stride = (n_bytes - PIECE_BYTES) / (PIECES - 1);
    for (size_t i = 0; i < PIECES; i++) hash = XXH3_64bits_withSeed(data + i * stride, PIECE_BYTES, hash);
    return hash;
}

uint32_t tagc_tokens_at(const tagc_tokens *tokens, uint64_t index) {
    const uint8_t *p = tokens->map + tokens->info.first_byte + index * (uint64_t)tokens->info.token_bytes;
    switch (tokens->info.token_bytes) {
    case 1:
        return p[0];
    case 2:
        return (uint32_t)p[0] | (uint32_t)p[1] << 8;
    default:
        return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
    }
}

tagc_status tagc_tokens_read(const tagc_tokens *tokens, uint64_t first, size_t n, uint32_t vocab_size,
                             int *out) {
    if (vocab_size == 0 || vocab_size > INT32_MAX)
        return tagc_fail(TAGC_ERR_ARGUMENT, "vocab_size is %" PRIu32 ", must be in [1, 2^31 - 1]",
                         vocab_size);
    if (first > tokens->info.n_tokens || n > tokens->info.n_tokens - first)
        return tagc_fail(TAGC_ERR_ARGUMENT, "%s: tokens [%" PRIu64 ", + %zu) asked for, it has %" PRIu64,
                         tokens->path, first, n, tokens->info.n_tokens);
    for (size_t i = 0; i < n; i++) {
        uint32_t token = tagc_tokens_at(tokens, first + i);
        if (token >= vocab_size)
            return tagc_fail(
                TAGC_ERR_CORRUPT,
                "%s: token %" PRIu32 " at byte %" PRIu64 ", the model's vocabulary ends below %" PRIu32,
                tokens->path, token,
                tokens->info.first_byte + (first + i) * (uint64_t)tokens->info.token_bytes, vocab_size);
        out[i] = (int)token;
    }
    return TAGC_OK;
}
