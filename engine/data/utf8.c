/* UTF-8 and character classes. White space is Unicode's White_Space property, as \s of the regex packages
 * that GPT-2's tokenizers use; letters and numbers are general categories L and N. */
#include "data/utf8.h"

#include "data/unicode_table.h"
#include <string.h>

int tagc_utf8_decode(const uint8_t *text, size_t n_bytes, uint32_t *code) {
    uint8_t lead = text[0];
    *code = TAGC_CODE_INVALID;
    if (lead < 0x80) {
        *code = lead;
        return 1;
    }
    int n_more = lead >= 0xf0 ? 3 : lead >= 0xe0 ? 2 : 1;
    if (lead < 0xc2 || lead > 0xf4) return -1;
    /* The bounds of the second byte are what excludes overlong forms, surrogates and what lies above
     * U+10FFFF. */
    uint8_t low = lead == 0xe0 ? 0xa0 : lead == 0xf0 ? 0x90 : 0x80;
    uint8_t high = lead == 0xed ? 0x9f : lead == 0xf4 ? 0x8f : 0xbf;
    uint32_t value = lead & (0x3fu >> n_more);
    for (int i = 1; i <= n_more; i++) {
        if ((size_t)i >= n_bytes) return 0;
        if (text[i] < low || text[i] > high) return -1;
        value = value << 6 | (text[i] & 0x3fu);
        low = 0x80;
        high = 0xbf;
    }
    *code = value;
    return n_more + 1;
}

size_t tagc_utf8_decode_any(const uint8_t *text, size_t n_bytes, uint32_t *code) {
    int length = tagc_utf8_decode(text, n_bytes, code);
    return length > 0 ? (size_t)length : 1;
}

size_t tagc_utf8_valid_prefix(const uint8_t *text, size_t n_bytes) {
    size_t i = 0;
    while (i < n_bytes) {
        uint64_t word;
        if (n_bytes - i >= sizeof word) {
            memcpy(&word, text + i, sizeof word);
            if (!(word & UINT64_C(0x8080808080808080))) {
                i += sizeof word;
                continue;
            }
        }
        uint32_t code;
        int length = tagc_utf8_decode(text + i, n_bytes - i, &code);
        if (length <= 0) return i;
        i += (size_t)length;
    }
    return i;
}

static int in_ranges(const tagc_code_range *ranges, size_t n, uint32_t code) {
    size_t low = 0, high = n;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (code > ranges[middle].last)
            low = middle + 1;
        else
            high = middle;
    }
    return low < n && code >= ranges[low].first;
}

enum tagc_char_class tagc_char_class(uint32_t code) {
    if (code < 0x80) {
        if ((code | 0x20) - 'a' < 26) return TAGC_CHAR_LETTER;
        if (code - '0' < 10) return TAGC_CHAR_NUMBER;
        return code == ' ' || code - '\t' < 5 ? TAGC_CHAR_SPACE : TAGC_CHAR_OTHER;
    }
    if (code == 0x85 || code == 0xa0 || code == 0x1680 || (code >= 0x2000 && code <= 0x200a) ||
        code == 0x2028 || code == 0x2029 || code == 0x202f || code == 0x205f || code == 0x3000)
        return TAGC_CHAR_SPACE;
    if (in_ranges(letter_ranges, sizeof letter_ranges / sizeof *letter_ranges, code)) return TAGC_CHAR_LETTER;
    if (in_ranges(number_ranges, sizeof number_ranges / sizeof *number_ranges, code)) return TAGC_CHAR_NUMBER;
    return TAGC_CHAR_OTHER;
}
