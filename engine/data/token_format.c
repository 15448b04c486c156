/* Headers of token files. Their first bytes tell three formats apart. Every field is checked against the file's size before
 * use. */
#include "data/token_format.h"

#include "core/status.h"
#include "data/xxh64.h"
#include "disk/file_kind.h"
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

static const char our_magic[8] = {'t', 'a', 'g', 'c', 't', 'o', 'k', '\n'};

enum {
    OUR_VERSION = 1,
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
    case TAGC_TOKENS_AUTO:
        return "auto";
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

int tagc_token_format_width(uint32_t vocab_size) {
    return vocab_size <= 0x100 ? 1 : vocab_size <= 0x10000 ? 2 : 4;
}

static const struct llmc_kind *llmc_kind_of(const uint8_t *data, uint64_t n_at_hand) {
    for (size_t i = 0; n_at_hand >= 4 && i < sizeof llmc_kinds / sizeof *llmc_kinds; i++)
        if (get_u32(data) == llmc_kinds[i].magic) return &llmc_kinds[i];
    return NULL;
}

static tagc_tokens_format detect(const uint8_t *data, uint64_t n_at_hand, const char *name) {
    size_t n_chars = strlen(name);
    if (n_at_hand >= sizeof our_magic && memcmp(data, our_magic, sizeof our_magic) == 0)
        return TAGC_TOKENS_TAGC;
    if (llmc_kind_of(data, n_at_hand)) return TAGC_TOKENS_LLMC;
    if (n_chars >= 4 && strcmp(name + n_chars - 4, ".bin") == 0) return TAGC_TOKENS_RAW16;
    return TAGC_TOKENS_AUTO;
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

static tagc_status parse_ours(const uint8_t *data, uint64_t n_at_hand, uint64_t n_bytes, const char *name,
                              tagc_tokens_info *info) {
    if (n_at_hand < TAGC_TOKEN_HEADER_BYTES)
        return tagc_fail(TAGC_ERR_CORRUPT, "%s: %" PRIu64 " bytes, the header alone has %d", name, n_bytes,
                         TAGC_TOKEN_HEADER_BYTES);
    if (memcmp(data, our_magic, sizeof our_magic) != 0)
        return tagc_fail(TAGC_ERR_CORRUPT, "%s: no token file of tagc: the magic number is missing", name);
    if (get_u32(data + AT_VERSION) != OUR_VERSION)
        return tagc_fail(TAGC_ERR_UNSUPPORTED, "%s: version is %" PRIu32 ", this program reads %d", name,
                         get_u32(data + AT_VERSION), OUR_VERSION);
    if (tagc_xxh64(data, AT_HEADER_CHECKSUM, 0) != get_u64(data + AT_HEADER_CHECKSUM))
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
    info->token_bytes = (int)token_bytes;
    info->vocab_size = vocab_size;
    info->n_tokens = get_u64(data + AT_N_TOKENS);
    info->end_of_text = end_of_text == UINT32_MAX ? -1 : (int64_t)end_of_text;
    info->first_byte = TAGC_TOKEN_HEADER_BYTES;
    memcpy(info->tokenizer, data + AT_TOKENIZER, TAGC_TOKENIZER_NAME_BYTES);
    TAGC_TRY(check_payload(info, n_bytes, name));
    if (n_at_hand == n_bytes && tagc_xxh64(data + info->first_byte, n_bytes - info->first_byte, 0) !=
                                    get_u64(data + AT_PAYLOAD_CHECKSUM))
        return tagc_fail(TAGC_ERR_CORRUPT, "%s: the checksum of the tokens is wrong: the file is damaged",
                         name);
    return TAGC_OK;
}

static tagc_status parse_llmc(const uint8_t *data, uint64_t n_at_hand, uint64_t n_bytes, const char *name,
                              tagc_tokens_info *info) {
    const struct llmc_kind *kind = llmc_kind_of(data, n_at_hand);
    if (!kind)
        return tagc_fail(TAGC_ERR_CORRUPT,
                         "%s: no token file of llm.c: the first four bytes must be %" PRIu32 " or %" PRIu32,
                         name, llmc_kinds[0].magic, llmc_kinds[1].magic);
    if (n_at_hand < TAGC_LLMC_HEADER_BYTES)
        return tagc_fail(TAGC_ERR_CORRUPT, "%s: %" PRIu64 " bytes, llm.c's header alone has %d", name,
                         n_bytes, TAGC_LLMC_HEADER_BYTES);
    if (get_u32(data + 4) != kind->version)
        return tagc_fail(TAGC_ERR_UNSUPPORTED,
                         "%s: version is %" PRIu32 ", llm.c files with magic number %" PRIu32
                         " have %" PRIu32,
                         name, get_u32(data + 4), kind->magic, kind->version);
    info->token_bytes = kind->token_bytes;
    info->vocab_size = kind->vocab_size;
    info->end_of_text = kind->end_of_text;
    info->n_tokens = get_u32(data + 8);
    info->first_byte = TAGC_LLMC_HEADER_BYTES;
    return check_payload(info, n_bytes, name);
}

/* Weights of PyTorch are named *.bin, too. */
static tagc_status check_raw16(const uint8_t *data, uint64_t n_at_hand, const char *name) {
    const tagc_file_kind *kind = tagc_file_kind_of(data, (size_t)n_at_hand);
    if (!kind || (kind->group != TAGC_FILE_PACKED && kind->group != TAGC_FILE_PICKLE)) return TAGC_OK;
    return tagc_fail(TAGC_ERR_UNSUPPORTED, "%s is %s, and no raw uint16 tokens", name, kind->what);
}

static tagc_status parse_raw16(uint64_t n_bytes, const char *name, tagc_tokens_info *info) {
    if (n_bytes == 0 || n_bytes % 2)
        return tagc_fail(TAGC_ERR_CORRUPT,
                         "%s: %" PRIu64 " bytes cannot be raw uint16 tokens: must be even and above 0", name,
                         n_bytes);
    info->token_bytes = 2;
    info->n_tokens = n_bytes / 2;
    return TAGC_OK;
}

tagc_status tagc_token_format_parse(const void *data, uint64_t n_at_hand, uint64_t n_bytes,
                                    tagc_tokens_format format, const char *name, tagc_tokens_info *out) {
    *out = (tagc_tokens_info){.end_of_text = -1};
    if (format == TAGC_TOKENS_AUTO) format = detect(data, n_at_hand, name);
    if (format == TAGC_TOKENS_RAW16) TAGC_TRY(check_raw16(data, n_at_hand, name));
    out->format = (int)format;
    switch (format) {
    case TAGC_TOKENS_TAGC:
        return parse_ours(data, n_at_hand, n_bytes, name, out);
    case TAGC_TOKENS_LLMC:
        return parse_llmc(data, n_at_hand, n_bytes, name, out);
    case TAGC_TOKENS_RAW16:
        return parse_raw16(n_bytes, name, out);
    case TAGC_TOKENS_AUTO:
        break;
    }
    if (format != TAGC_TOKENS_AUTO)
        return tagc_fail(TAGC_ERR_ARGUMENT, "format is %d, must be 0 (auto), 1 (tagc), 2 (raw16) or 3 (llmc)",
                         (int)format);
    return tagc_fail(
        TAGC_ERR_CORRUPT,
        "%s: no token file: it has neither the magic number of tagc nor of llm.c, and its name does "
        "not end in .bin as raw uint16 tokens do (text becomes a token file by `tagc data`)",
        name);
}

void tagc_token_format_write(const tagc_tokens_info *info, uint64_t payload_checksum,
                             uint8_t header[TAGC_TOKEN_HEADER_BYTES]) {
    memset(header, 0, TAGC_TOKEN_HEADER_BYTES);
    memcpy(header, our_magic, sizeof our_magic);
    put_u32(header + AT_VERSION, OUR_VERSION);
    put_u32(header + AT_TOKEN_BYTES, (uint32_t)info->token_bytes);
    put_u32(header + AT_VOCAB_SIZE, info->vocab_size);
    put_u64(header + AT_N_TOKENS, info->n_tokens);
    put_u64(header + AT_PAYLOAD_CHECKSUM, payload_checksum);
    snprintf((char *)header + AT_TOKENIZER, TAGC_TOKENIZER_NAME_BYTES, "%s", info->tokenizer);
    put_u32(header + AT_END_OF_TEXT, info->end_of_text < 0 ? UINT32_MAX : (uint32_t)info->end_of_text);
    put_u64(header + AT_HEADER_CHECKSUM, tagc_xxh64(header, AT_HEADER_CHECKSUM, 0));
}
