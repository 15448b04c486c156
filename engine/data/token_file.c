/* Token files: their headers, checked before use; files mapped into memory, so that the ranks of a host share their pages and
 * opening many gigabytes copies nothing; shards that read as if they were one file; and which files --data names. */
#include "data/token_file.h"
#include "core/status.h"
#include "core/xxh3.h"
#include "data/text_files.h"
#include "data/xxh64.h"
#include "disk/file_kind.h"
#include "disk/paths.h"
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <glob.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

/* ---- headers: the first bytes tell three formats apart; every field is checked against the file's size ---- */

static const char our_magic[8] = {'t', 'a', 'g', 'c', 't', 'o', 'k', '\n'};

enum {
    OUR_VERSION = 2, /* 1 had XXH64 as its checksum */
    AT_VERSION = 8,
    AT_TOKEN_BYTES = 12,
    AT_VOCAB_SIZE = 16,
    AT_N_TOKENS = 24,
    AT_PAYLOAD_CHECKSUM = 32,
    AT_TOKENIZER = 40,
    AT_END_OF_TEXT = 104,
    AT_HEADER_CHECKSUM = 120
};

/* Of llm.c's two headers. Each version implies a tokenizer and so a vocabulary. */
static const struct llmc_kind {
    uint32_t magic, version;
    int token_bytes;
    uint32_t vocab_size;
    int64_t end_of_text;
} llmc_kinds[] = {{20240520, 1, 2, 50257, 50256}, {20240801, 7, 4, 128256, 128000}};

const char *tagc_tokens_format_name(int format) {
    switch (format) {
    case TAGC_TOKENS_TAGC:
        return "tagc";
    case TAGC_TOKENS_RAW16:
        return "raw16";
    case TAGC_TOKENS_LLMC:
        return "llmc";
    }
    return "?";
}

static uint32_t get_u32(const uint8_t *p) {
    return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

static uint64_t get_u64(const uint8_t *p) {
    return (uint64_t)get_u32(p) | (uint64_t)get_u32(p + 4) << 32;
}

static void put_u32(uint8_t *p, uint32_t value) {
    for (int i = 0; i < 4; i++) p[i] = (uint8_t)(value >> (8 * i));
}

static void put_u64(uint8_t *p, uint64_t value) {
    put_u32(p, (uint32_t)value);
    put_u32(p + 4, (uint32_t)(value >> 32));
}

static uint64_t checksum_of(uint32_t version, const void *bytes, size_t n_bytes) {
    return version == 1 ? tagc_xxh64(bytes, n_bytes, 0) : tagc_xxh3(bytes, n_bytes, 0);
}

static const struct llmc_kind *llmc_kind_of(const uint8_t *data, uint64_t n_bytes) {
    for (size_t i = 0; n_bytes >= 4 && i < sizeof llmc_kinds / sizeof *llmc_kinds; i++)
        if (get_u32(data) == llmc_kinds[i].magic) return &llmc_kinds[i];
    return NULL;
}

/* The payload, the rest of the file, must be n_tokens >= 1 of token_bytes each. */
static tagc_status check_payload(const tagc_tokens_info *info, uint64_t n_bytes, const char *name) {
    uint64_t n_payload = n_bytes - info->first_byte;
    if (info->n_tokens == 0)
        return tagc_fail(TAGC_ERR_CORRUPT, "%s: n_tokens is 0, at least 1 is needed", name);
    if (info->n_tokens != n_payload / (uint64_t)info->token_bytes || n_payload % (uint64_t)info->token_bytes)
        return tagc_fail(TAGC_ERR_CORRUPT,
                         "%s: n_tokens is %" PRIu64 " of %d bytes, but %" PRIu64
                         " bytes follow the header (is the file cut short?)",
                         name, info->n_tokens, info->token_bytes, n_payload);
    return TAGC_OK;
}

static tagc_status parse_ours(const uint8_t *data, uint64_t n_bytes, const char *name,
                              tagc_tokens_info *info) {
    if (n_bytes < TAGC_TOKEN_HEADER_BYTES)
        return tagc_fail(TAGC_ERR_CORRUPT, "%s: %" PRIu64 " bytes, the header alone has %d", name, n_bytes,
                         TAGC_TOKEN_HEADER_BYTES);
    uint32_t version = get_u32(data + AT_VERSION);
    if (version < 1 || version > OUR_VERSION)
        return tagc_fail(TAGC_ERR_UNSUPPORTED, "%s: version is %" PRIu32 ", this program reads 1 to %d", name,
                         version, OUR_VERSION);
    if (checksum_of(version, data, AT_HEADER_CHECKSUM) != get_u64(data + AT_HEADER_CHECKSUM))
        return tagc_fail(TAGC_ERR_CORRUPT, "%s: the header's checksum is wrong: the file is damaged", name);

    /* From here on the fields are as some program wrote them, not necessarily ours. */
    uint32_t token_bytes = get_u32(data + AT_TOKEN_BYTES), vocab_size = get_u32(data + AT_VOCAB_SIZE);
    uint32_t end_of_text = get_u32(data + AT_END_OF_TEXT);
    if (token_bytes != 1 && token_bytes != 2 && token_bytes != 4)
        return tagc_fail(TAGC_ERR_CORRUPT, "%s: token_bytes is %" PRIu32 ", must be 1, 2 or 4", name,
                         token_bytes);
    if (vocab_size == 0 || vocab_size > INT32_MAX)
        return tagc_fail(TAGC_ERR_CORRUPT, "%s: vocab_size is %" PRIu32 ", must be in [1, 2^31 - 1]", name,
                         vocab_size);
    if (end_of_text != UINT32_MAX && end_of_text >= vocab_size)
        return tagc_fail(TAGC_ERR_CORRUPT,
                         "%s: end_of_text is %" PRIu32 ", must be below vocab_size %" PRIu32, name,
                         end_of_text, vocab_size);
    if (data[AT_TOKENIZER + TAGC_TOKENIZER_NAME_BYTES - 1] != '\0')
        return tagc_fail(TAGC_ERR_CORRUPT, "%s: tokenizer is longer than %d characters", name,
                         TAGC_TOKENIZER_NAME_BYTES - 1);
    for (const uint8_t *at = data + AT_TOKENIZER; *at; at++) /* checkpoints hold it as a text */
        if (*at < ' ' || *at > '~')
            return tagc_fail(TAGC_ERR_CORRUPT, "%s: tokenizer has a byte 0x%02x, must be printable ASCII",
                             name, *at);
    info->format = TAGC_TOKENS_TAGC;
    info->token_bytes = (int)token_bytes;
    info->vocab_size = vocab_size;
    info->n_tokens = get_u64(data + AT_N_TOKENS);
    info->end_of_text = end_of_text == UINT32_MAX ? -1 : (int64_t)end_of_text;
    info->first_byte = TAGC_TOKEN_HEADER_BYTES;
    memcpy(info->tokenizer, data + AT_TOKENIZER, TAGC_TOKENIZER_NAME_BYTES);
    TAGC_TRY(check_payload(info, n_bytes, name));
    if (checksum_of(version, data + info->first_byte, n_bytes - info->first_byte) !=
        get_u64(data + AT_PAYLOAD_CHECKSUM))
        return tagc_fail(TAGC_ERR_CORRUPT, "%s: the checksum of the tokens is wrong: the file is damaged",
                         name);
    return TAGC_OK;
}

static tagc_status parse_llmc(const struct llmc_kind *kind, const uint8_t *data, uint64_t n_bytes,
                              const char *name, tagc_tokens_info *info) {
    if (n_bytes < TAGC_LLMC_HEADER_BYTES)
        return tagc_fail(TAGC_ERR_CORRUPT, "%s: %" PRIu64 " bytes, llm.c's header alone has %d", name,
                         n_bytes, TAGC_LLMC_HEADER_BYTES);
    if (get_u32(data + 4) != kind->version)
        return tagc_fail(TAGC_ERR_UNSUPPORTED,
                         "%s: version is %" PRIu32 ", llm.c files with magic number %" PRIu32
                         " have %" PRIu32,
                         name, get_u32(data + 4), kind->magic, kind->version);
    info->format = TAGC_TOKENS_LLMC;
    info->token_bytes = kind->token_bytes;
    info->vocab_size = kind->vocab_size;
    info->end_of_text = kind->end_of_text;
    info->n_tokens = get_u32(data + 8);
    info->first_byte = TAGC_LLMC_HEADER_BYTES;
    return check_payload(info, n_bytes, name);
}

static tagc_status parse_raw16(const uint8_t *data, uint64_t n_bytes, const char *name,
                               tagc_tokens_info *info) {
    const tagc_file_kind *kind = tagc_file_kind_of(data, (size_t)n_bytes);
    /* Weights of PyTorch are named *.bin, too. */
    if (kind && (kind->group == TAGC_FILE_PACKED || kind->group == TAGC_FILE_PICKLE))
        return tagc_fail(TAGC_ERR_UNSUPPORTED, "%s is %s, and no raw uint16 tokens", name, kind->what);
    if (n_bytes == 0 || n_bytes % 2)
        return tagc_fail(TAGC_ERR_CORRUPT,
                         "%s: %" PRIu64 " bytes cannot be raw uint16 tokens: must be even and above 0", name,
                         n_bytes);
    info->format = TAGC_TOKENS_RAW16;
    info->token_bytes = 2;
    info->n_tokens = n_bytes / 2;
    return TAGC_OK;
}

tagc_status tagc_token_file_parse(const void *data, uint64_t n_bytes, const char *name,
                                  tagc_tokens_info *out) {
    size_t n_chars = strlen(name);
    const struct llmc_kind *kind = llmc_kind_of(data, n_bytes);
    *out = (tagc_tokens_info){.end_of_text = -1};
    if (n_bytes >= sizeof our_magic && memcmp(data, our_magic, sizeof our_magic) == 0)
        return parse_ours(data, n_bytes, name, out);
    if (kind) return parse_llmc(kind, data, n_bytes, name, out);
    if (n_chars >= 4 && strcmp(name + n_chars - 4, ".bin") == 0) return parse_raw16(data, n_bytes, name, out);
    return tagc_fail(
        TAGC_ERR_CORRUPT,
        "%s: no token file: it has neither the magic number of tagc nor of llm.c, and its name does "
        "not end in .bin as raw uint16 tokens do (text becomes a token file by `tagc data`)",
        name);
}

void tagc_token_file_header(const tagc_tokens_info *info, const uint8_t *payload,
                            uint8_t header[TAGC_TOKEN_HEADER_BYTES]) {
    size_t n_payload = (size_t)info->n_tokens * (size_t)info->token_bytes;
    memset(header, 0, TAGC_TOKEN_HEADER_BYTES);
    memcpy(header, our_magic, sizeof our_magic);
    put_u32(header + AT_VERSION, OUR_VERSION);
    put_u32(header + AT_TOKEN_BYTES, (uint32_t)info->token_bytes);
    put_u32(header + AT_VOCAB_SIZE, info->vocab_size);
    put_u64(header + AT_N_TOKENS, info->n_tokens);
    put_u64(header + AT_PAYLOAD_CHECKSUM, checksum_of(OUR_VERSION, payload, n_payload));
    snprintf((char *)header + AT_TOKENIZER, TAGC_TOKENIZER_NAME_BYTES, "%s", info->tokenizer);
    put_u32(header + AT_END_OF_TEXT, info->end_of_text < 0 ? UINT32_MAX : (uint32_t)info->end_of_text);
    put_u64(header + AT_HEADER_CHECKSUM, checksum_of(OUR_VERSION, header, AT_HEADER_CHECKSUM));
}

/* ---- mapped files ---- */

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

static tagc_status open_shard(const char *path, token_shard *shard) {
    shard->path = strdup(path);
    if (!shard->path) return tagc_fail(TAGC_ERR_MEMORY, "%s: no memory to open it", path);
    TAGC_TRY(map_file(shard));
    return tagc_token_file_parse(shard->map, shard->n_bytes, path, &shard->info);
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

/* paths (n_paths >= 1): read as if they were one file, in this order. Shards of different formats, vocabularies or tokenizers
 * are TAGC_ERR_MISMATCH. name: what _path returns. */
static tagc_status open_shards(const char *name, const char *const *paths, size_t n_paths,
                               tagc_tokens **out) {
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
        status = open_shard(paths[i], shard);
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

/* ---- what --data names: one file for each part, or shards as llm.c's corpora have ---- */

static tagc_status add_path(tagc_file_list *list, const char *dir, const char *name) {
    char path[TAGC_PATH_BYTES];
    TAGC_TRY(tagc_path_join(dir, name, path));
    return tagc_file_list_append(list, path);
}

static int by_path(const void *a, const void *b) {
    return strcmp(*(char *const *)a, *(char *const *)b);
}

static int is_shard(const char *name, tagc_data_part part, int has_train) {
    size_t n = strlen(name);
    int is_train = strstr(name, "train") != NULL, is_val = strstr(name, "val") != NULL;
    if (name[0] == '.' || n < 5 || strcmp(name + n - 4, ".bin") != 0) return 0;
    if (part == TAGC_DATA_VAL) return is_val && !is_train;
    return has_train ? is_train : !is_val;
}

static tagc_status list_shards(const char *dir, tagc_data_part part, tagc_file_list *list) {
    DIR *folder = opendir(dir);
    if (!folder) return tagc_fail(TAGC_ERR_IO, "%.200s: %s", dir, strerror(errno));
    int has_train = 0;
    for (struct dirent *entry; (entry = readdir(folder));) has_train |= is_shard(entry->d_name, part, 1);
    rewinddir(folder);
    tagc_status status = TAGC_OK;
    for (struct dirent *entry; status == TAGC_OK && (entry = readdir(folder));)
        if (is_shard(entry->d_name, part, has_train)) status = add_path(list, dir, entry->d_name);
    closedir(folder);
    return status;
}

static tagc_status list_folder(const char *dir, tagc_data_part part, tagc_file_list *list) {
    const char *name = part == TAGC_DATA_TRAIN ? "train.bin" : "val.bin";
    struct stat about;
    TAGC_TRY(add_path(list, dir, name));
    if (stat(list->paths[0], &about) == 0 || errno != ENOENT)
        return TAGC_OK; /* opening it says what is wrong */
    tagc_file_list_clear(list);
    TAGC_TRY(list_shards(dir, part, list));
    if (list->n > 0) return TAGC_OK;
    return tagc_fail(TAGC_ERR_IO,
                     "%.200s has no %s, and no shards *.bin; tagc data makes one from text files", dir, name);
}

static tagc_status list_pattern(const char *pattern, tagc_data_part part, tagc_file_list *list) {
    glob_t found;
    int code = glob(pattern, GLOB_NOSORT | GLOB_ERR, NULL, &found);
    tagc_status status = TAGC_OK;
    if (code != 0 && strpbrk(pattern, "*?["))
        status = tagc_fail(TAGC_ERR_IO, "no file matches %.200s", pattern);
    else if (code != 0)
        status = tagc_fail(TAGC_ERR_IO, "%.200s does not exist; tagc data makes %s from text files", pattern,
                           part == TAGC_DATA_TRAIN ? "train.bin" : "val.bin");
    for (size_t i = 0; code == 0 && status == TAGC_OK && i < found.gl_pathc; i++)
        status = tagc_file_list_append(list, found.gl_pathv[i]);
    globfree(&found);
    return status;
}

static tagc_status find_files(const char *data, tagc_data_part part, tagc_file_list *list) {
    struct stat about;
    tagc_status status;
    *list = (tagc_file_list){0};
    int is_there = stat(data, &about) == 0;
    if (is_there && S_ISDIR(about.st_mode))
        status = list_folder(data, part, list);
    else if (is_there || errno != ENOENT)
        status = tagc_file_list_append(list, data);
    else
        status = list_pattern(data, part, list);
    if (status != TAGC_OK)
        tagc_file_list_clear(list);
    else
        qsort(list->paths, list->n, sizeof *list->paths, by_path);
    return status;
}

int tagc_data_has(const char *data, tagc_data_part part) {
    tagc_file_list list;
    int has = find_files(data, part, &list) == TAGC_OK;
    tagc_file_list_clear(&list);
    return has;
}

tagc_status tagc_data_open(const char *data, tagc_data_part part, tagc_tokens **out) {
    tagc_file_list list;
    *out = NULL;
    TAGC_TRY(find_files(data, part, &list));
    tagc_status status =
        open_shards(list.n == 1 ? list.paths[0] : data, (const char *const *)list.paths, list.n, out);
    tagc_file_list_clear(&list);
    return status;
}
