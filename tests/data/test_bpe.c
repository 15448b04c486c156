/* Byte pair encoding against what two other encoders make of the same vocabulary and texts (bpe_cases.json),
 * and against the rule applied naively; then vocabularies that contradict themselves. */
#include "scratch.h"

#include "core/status.h"
#include "data/bpe.h"
#include "data/data.h"
#include "data/split.h"
#include "data/utf8.h"
#include <jansson.h>

static tagc_tokenizer *tiny(void) {
    tagc_tokenizer *tokenizer;
    assert_ok(tagc_tokenizer_create_bpe(TAGC_TEST_DATA "/tiny_vocab.json", TAGC_TEST_DATA "/tiny_merges.txt",
                                        &tokenizer));
    return tokenizer;
}

static void check_round_trip(const tagc_tokenizer *tokenizer, const int *tokens, size_t n_tokens,
                             const char *text, size_t n_bytes) {
    char *back;
    size_t n_back;
    assert_ok(tagc_tokenizer_decode(tokenizer, tokens, n_tokens, &back, &n_back));
    assert_int_equal(n_back, n_bytes);
    assert_memory_equal(back, text, n_bytes);
    assert_int_equal(back[n_back], 0);
    free(back);
}

static void equals_other_encoders(void **state) {
    (void)state;
    tagc_tokenizer *tokenizer = tiny();
    json_t *cases = json_load_file(TAGC_TEST_DATA "/bpe_cases.json", JSON_ALLOW_NUL, NULL), *one;
    assert_true(json_array_size(cases) > 500);
    size_t i;
    json_array_foreach(cases, i, one) {
        const char *text = json_string_value(json_object_get(one, "text"));
        size_t n_bytes = json_string_length(json_object_get(one, "text")), n_tokens, at = 0;
        const json_t *words = json_object_get(one, "words"), *expected = json_object_get(one, "tokens");
        for (size_t w = 0; w < json_array_size(words); w++) {
            size_t n_word = tagc_split_word((const uint8_t *)text + at, n_bytes - at);
            if ((json_int_t)n_word != json_integer_value(json_array_get(words, w)))
                fail_msg("word %zu of \"%s\" has %zu bytes", w, text, n_word);
            at += n_word;
        }
        assert_int_equal(at, n_bytes);

        int *tokens = malloc((n_bytes + 1) * sizeof *tokens);
        assert_ok(tagc_tokenizer_encode(tokenizer, text, n_bytes, tokens, &n_tokens));
        assert_int_equal(n_tokens, json_array_size(expected));
        for (size_t t = 0; t < n_tokens; t++)
            assert_int_equal(tokens[t], json_integer_value(json_array_get(expected, t)));
        check_round_trip(tokenizer, tokens, n_tokens, text, n_bytes);
        free(tokens);
    }
    json_decref(cases);
    tagc_tokenizer_destroy(tokenizer);
}

static void says_what_it_is(void **state) {
    (void)state;
    tagc_tokenizer *tokenizer = tiny(), *bytes;
    size_t n_bytes;
    assert_int_equal(tagc_tokenizer_vocab_size(tokenizer), 601);
    assert_int_equal(tagc_tokenizer_end_of_text(tokenizer), 600);
    assert_int_equal(strncmp(tagc_tokenizer_name(tokenizer), "bpe-", 4), 0);
    assert_int_equal(strlen(tagc_tokenizer_name(tokenizer)), 20);
    assert_null(tagc_tokenizer_piece(tokenizer, 600, &n_bytes));
    assert_null(tagc_tokenizer_piece(tokenizer, 601, &n_bytes));
    assert_null(tagc_tokenizer_piece(tokenizer, -1, &n_bytes));
    assert_non_null(tagc_tokenizer_piece(tokenizer, 599, &n_bytes));
    tagc_tokenizer_destroy(tokenizer);

    assert_ok(tagc_tokenizer_create_bytes(&bytes));
    assert_string_equal(tagc_tokenizer_name(bytes), "bytes");
    assert_int_equal(tagc_tokenizer_vocab_size(bytes), 256);
    assert_int_equal(tagc_tokenizer_end_of_text(bytes), 0);
    assert_null(tagc_tokenizer_piece(bytes, 0, &n_bytes));
    assert_null(tagc_tokenizer_piece(bytes, 256, &n_bytes));
    char text[255];
    int tokens[255];
    size_t n_tokens;
    for (int i = 0; i < 255; i++) text[i] = (char)(i + 1);
    assert_ok(tagc_tokenizer_encode(bytes, text, 255, tokens, &n_tokens));
    assert_int_equal(n_tokens, 255);
    check_round_trip(bytes, tokens, n_tokens, text, 255);
    tagc_tokenizer_destroy(bytes);
    tagc_tokenizer_destroy(NULL);
}

/* ---- the rule, naively, on a vocabulary of our own: bytes a, b, c and random merges ---- */

enum { N_PIECES = 40, MAX_PIECE = 64 };

typedef struct naive {
    char piece[N_PIECES][MAX_PIECE]; /* 0 to 2 are "a", "b", "c" */
    int left[N_PIECES], right[N_PIECES], n;
} naive;

static void make_naive(naive *rules, uint64_t *seed) {
    for (rules->n = 0; rules->n < 3; rules->n++) sprintf(rules->piece[rules->n], "%c", 'a' + rules->n);
    while (rules->n < N_PIECES) {
        int left = (int)(scratch_random(seed) % (uint64_t)rules->n),
            right = (int)(scratch_random(seed) % (uint64_t)rules->n);
        char joined[2 * MAX_PIECE];
        snprintf(joined, sizeof joined, "%s%s", rules->piece[left], rules->piece[right]);
        int known = strlen(joined) >= MAX_PIECE;
        for (int i = 0; i < rules->n; i++) known |= strcmp(rules->piece[i], joined) == 0;
        if (known) continue;
        strcpy(rules->piece[rules->n], joined);
        rules->left[rules->n] = left;
        rules->right[rules->n++] = right;
    }
}

static size_t encode_naively(const naive *rules, const char *text, size_t n, int *tokens) {
    for (size_t i = 0; i < n; i++) tokens[i] = text[i] - 'a';
    for (int found = 1; found;) {
        found = 0;
        for (int rule = 3; rule < rules->n && !found; rule++) {
            for (size_t i = 0; i + 1 < n && !found; i++) {
                if (tokens[i] != rules->left[rule] || tokens[i + 1] != rules->right[rule]) continue;
                tokens[i] = rule;
                memmove(tokens + i + 1, tokens + i + 2, (n - i - 2) * sizeof *tokens);
                n--;
                found = 1;
            }
        }
    }
    return n;
}

/* Spells bytes as vocab.json does. */
static void spell(char *out, int byte) {
    static const char prints[] = "abc";
    if (strchr(prints, byte) && byte) {
        sprintf(out, "%c", byte);
        return;
    }
    int next = 0x100, code = -1;
    for (int i = 0; i <= byte; i++) {
        int own = (i >= 33 && i <= 126) || (i >= 161 && i <= 172) || i >= 174;
        code = own ? i : next++;
    }
    sprintf(out, code < 0x80 ? (code == '"' || code == '\\' ? "\\%c" : "%c") : "\\u%04x", (unsigned)code);
}

static size_t write_vocab(char *json, const naive *rules, int skipped_byte) {
    char *p = json, spelling[16];
    *p++ = '{';
    for (int i = 0; i < rules->n; i++) p += sprintf(p, "\"%s\":%d,", rules->piece[i], i);
    for (int byte = 0; byte < 256; byte++) {
        if ((byte >= 'a' && byte <= 'c') || byte == skipped_byte) continue;
        spell(spelling, byte);
        p += sprintf(p, "\"%s\":%d,", spelling, 1000 + byte);
    }
    p[-1] = '}';
    return (size_t)(p - json);
}

static size_t write_merges(char *text, const naive *rules, const char *end_of_line) {
    char *p = text;
    for (int i = 3; i < rules->n; i++)
        p += sprintf(p, "%s %s%s", rules->piece[rules->left[i]], rules->piece[rules->right[i]], end_of_line);
    return (size_t)(p - text);
}

static void equals_the_rule_applied_naively(void **state) {
    (void)state;
    uint64_t seed = 11;
    static char vocab_text[16384], merges_text[16384];
    for (int round = 0; round < 30; round++) {
        naive rules;
        make_naive(&rules, &seed);
        tagc_blob vocab = {"v", vocab_text, write_vocab(vocab_text, &rules, -1)};
        tagc_blob merges = {"m", merges_text, write_merges(merges_text, &rules, round % 2 ? "\r\n" : "\n")};
        tagc_bpe *bpe;
        assert_ok(tagc_bpe_create(&vocab, &merges, &bpe));
        assert_int_equal(tagc_bpe_end_of_text(bpe), -1);
        assert_int_equal(tagc_bpe_vocab_size(bpe), 1256);
        for (int i = 0; i < 60; i++) {
            char text[200];
            int expected[200], tokens[200];
            size_t n = scratch_random(&seed) % sizeof text, n_letters = 1 + scratch_random(&seed) % 3,
                   n_tokens;
            for (size_t k = 0; k < n; k++) text[k] = (char)('a' + scratch_random(&seed) % n_letters);
            size_t n_expected = encode_naively(&rules, text, n, expected);
            assert_ok(tagc_bpe_encode(bpe, (const uint8_t *)text, n, tokens, &n_tokens));
            assert_int_equal(n_tokens, n_expected);
            assert_memory_equal(tokens, expected, n_tokens * sizeof *tokens);
        }
        tagc_bpe_destroy(bpe);
    }
}

/* A megabyte without a blank: n squared would take hours. */
static void long_words_are_no_trap(void **state) {
    (void)state;
    size_t n = 1 << 20, n_tokens;
    tagc_tokenizer *tokenizer = tiny();
    char *text = malloc(n);
    int *tokens = malloc(n * sizeof *tokens);
    for (size_t i = 0; i < n; i++) text[i] = "theriver"[i % 8];
    assert_ok(tagc_tokenizer_encode(tokenizer, text, n, tokens, &n_tokens));
    assert_in_range(n_tokens, n / 8, n / 2);
    check_round_trip(tokenizer, tokens, n_tokens, text, n);
    free(text);
    free(tokens);
    tagc_tokenizer_destroy(tokenizer);
}

/* Any bytes go in and come out, and cutting where split says is safe changes nothing. */
static void random_bytes_and_safe_cuts(void **state) {
    (void)state;
    static const char *const parts[] = {" ",   "  ", "\n",           "\xc2\xa0", "\xe3\x80\x80", "the",
                                        "'ll", "1",  "\xe6\x9c\xa8", "!",        "\xf0\x9f",     "\xff"};
    tagc_tokenizer *tokenizer = tiny();
    uint64_t seed = 3;
    for (int round = 0; round < 3000; round++) {
        char text[400];
        int tokens[400], in_parts[400];
        size_t n = 0, n_tokens, n_first, n_second;
        while (n < 300 && scratch_random(&seed) % 40) {
            if (round % 2) {
                text[n++] = (char)scratch_random(&seed);
            } else {
                const char *part = parts[scratch_random(&seed) % 12];
                memcpy(text + n, part, strlen(part));
                n += strlen(part);
            }
        }
        assert_ok(tagc_tokenizer_encode(tokenizer, text, n, tokens, &n_tokens));
        check_round_trip(tokenizer, tokens, n_tokens, text, n);
        if (n == 0) continue;
        size_t n_seen = 1 + scratch_random(&seed) % n, cut = tagc_split_safe((const uint8_t *)text, n_seen);
        assert_in_range(cut, 1, n_seen);
        int at_blank = cut < n_seen && (text[cut] == ' ' || text[cut] == '\n');
        if (!at_blank) continue;
        assert_ok(tagc_tokenizer_encode(tokenizer, text, cut, in_parts, &n_first));
        assert_ok(tagc_tokenizer_encode(tokenizer, text + cut, n - cut, in_parts + n_first, &n_second));
        assert_int_equal(n_first + n_second, n_tokens);
        assert_memory_equal(in_parts, tokens, n_tokens * sizeof *tokens);
    }
    tagc_tokenizer_destroy(tokenizer);
}

/* ---- UTF-8 ---- */

/* Every code point encoded the textbook way decodes to itself; every 1 to 3 byte string is judged as the set
 * of those encodings judges it. */
static void utf8_is_exact(void **state) {
    (void)state;
    static uint8_t valid[1 << 24]; /* by three bytes: 1 valid, 2 proper prefix of a valid one */
    for (uint32_t code = 0x80; code < 0x110000; code++) {
        uint8_t c[4];
        uint32_t back;
        int n = code < 0x800 ? 2 : code < 0x10000 ? 3 : 4;
        if (code >= 0xd800 && code < 0xe000) continue;
        for (int i = n - 1; i > 0; i--) c[i] = (uint8_t)(0x80 | ((code >> (6 * (n - 1 - i))) & 0x3f));
        c[0] = (uint8_t)((n == 2 ? 0xc0 : n == 3 ? 0xe0 : 0xf0) | code >> (6 * (n - 1)));
        if (tagc_utf8_decode(c, 4, &back) != n || back != code) fail_msg("U+%04x", code);
        if (n == 2) valid[c[0] << 16 | c[1] << 8] = 1;
        if (n == 3) valid[c[0] << 16 | c[1] << 8 | c[2]] = 1;
        if (n >= 3) valid[c[0] << 16 | c[1] << 8] |= 2;
        if (n == 4) valid[c[0] << 16 | c[1] << 8 | c[2]] = 2;
        valid[c[0] << 16] = 2;
    }
    for (uint32_t lead = 0x80; lead < 0x100; lead++) {
        uint32_t code;
        uint8_t c[3] = {(uint8_t)lead};
        assert_int_equal(tagc_utf8_decode(c, 1, &code), valid[lead << 16] == 2 ? 0 : -1);
        for (uint32_t second = 0x80; second < 0xc0; second++) {
            c[1] = (uint8_t)second;
            uint8_t two = valid[lead << 16 | second << 8];
            /* A third byte of 0 cannot be, so cell 0 is free for what two bytes are. */
            assert_int_equal(tagc_utf8_decode(c, 2, &code), two == 1 ? 2 : two == 2 ? 0 : -1);
            for (uint32_t third = 0x80; third < 0xc0; third++) {
                c[2] = (uint8_t)third;
                uint8_t three = valid[lead << 16 | second << 8 | third];
                if (two == 2)
                    assert_int_equal(tagc_utf8_decode(c, 3, &code), three == 1 ? 3 : three == 2 ? 0 : -1);
            }
        }
    }
    assert_int_equal(tagc_utf8_valid_prefix((const uint8_t *)"0123456789\xc3\xa4 \xe2\x82", 15), 13);
    assert_int_equal(tagc_utf8_valid_prefix((const uint8_t *)"\x80", 1), 0);
    assert_int_equal(tagc_utf8_valid_prefix((const uint8_t *)"", 0), 0);
}

/* ---- files that contradict themselves ---- */

static void expect_refusal(const char *vocab_text, size_t n_vocab, const char *merges_text,
                           const char *part) {
    tagc_blob vocab = {"v.json", vocab_text, n_vocab}, merges = {"m.txt", merges_text, strlen(merges_text)};
    tagc_bpe *bpe = (tagc_bpe *)1;
    assert_fails(tagc_bpe_create(&vocab, &merges, &bpe), TAGC_ERR_CORRUPT, part);
    assert_null(bpe);
}

/* Other files of a tokenizer's folder. */
static void names_files_that_it_does_not_take(void **state) {
    (void)state;
    static char vocab[16384];
    naive rules = {.n = 4, .piece = {"a", "b", "c", "ab"}};
    size_t n = write_vocab(vocab, &rules, -1);
    static const char one[] =
        "{\n \"version\": \"1.0\", \"model\": {\"type\": \"BPE\", \"vocab\": {\"a\": 0}}}",
                      config[] = "{\"tokenizer_class\": \"GPT2Tokenizer\"}",
                      model[] = "{\"model_type\": \"gpt2\"}", merges[] = "#version: 0.2\na b\n";
    static const struct {
        const char *vocab, *merges, *message;
    } cases[] = {{one, merges, "v.json: this is a tokenizer of Hugging Face in one file"},
                 {config, merges, "v.json: this is a configuration and no vocabulary"},
                 {model, merges, "v.json: this is a configuration and no vocabulary"},
                 {merges, merges, "v.json: this is a list of merges: give it to --merges"},
                 {NULL, one, "m.txt: this is JSON: --merges takes GPT-2's merges.txt"},
                 {NULL, "{\"a\":0}", "m.txt: this is JSON"}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const char *text = cases[i].vocab;
        tagc_blob v = {"v.json", text ? text : vocab, text ? strlen(text) : n};
        tagc_blob m = {"m.txt", cases[i].merges, strlen(cases[i].merges)};
        tagc_bpe *bpe;
        assert_fails(tagc_bpe_create(&v, &m, &bpe), TAGC_ERR_UNSUPPORTED, cases[i].message);
        assert_null(bpe);
    }
}

static void refuses_bad_vocabularies(void **state) {
    (void)state;
    static char vocab[16384];
    naive rules = {.n = 4, .piece = {"a", "b", "c", "ab"}};
    expect_refusal("", 0, "", "v.json: not JSON");
    expect_refusal("{\"a\":1,", 7, "", "v.json: not JSON");
    expect_refusal("[1]", 3, "", "one JSON object");
    expect_refusal("{\"a\":-1}", 8, "", "\"a\" must be");
    expect_refusal("{\"a\":1.5}", 9, "", "\"a\" must be");
    expect_refusal("{\"a\":1048576}", 13, "", "\"a\" must be");
    expect_refusal("{\"a\":\"b\"}", 9, "", "\"a\" must be");
    expect_refusal("{\"a\":1,\"b\":1}", 13, "", "token 1 has two pieces");
    expect_refusal("{\"a\":1,\"a\":2}", 13, "", "v.json");
    expect_refusal("{\"\":1}", 6, "", "not spelled");
    expect_refusal("{\"a b\":1}", 9, "", "\"a b\" is not spelled");
    expect_refusal("{}", 2, "", "no token for byte 0x00");
    size_t n = write_vocab(vocab, &rules, 0xe9);
    expect_refusal(vocab, n, "", "no token for byte 0xe9");
    n = write_vocab(vocab, &rules, -1);
    expect_refusal(vocab, n, "a b\na b\n", "m.txt line 2: the pair was listed before");
    expect_refusal(vocab, n, "#version: 0.2\n\na c\n", "m.txt line 3: \"ac\" is not in v.json");
    expect_refusal(vocab, n, "x1 b\n", "\"x1\" is not in");
    expect_refusal(vocab, n, "ab\n", "two pieces");
    expect_refusal(vocab, n, "a b c\n", "two pieces");
    expect_refusal(vocab, n, " ab\n", "two pieces");
    expect_refusal(vocab, n, "ab ", "two pieces");

    tagc_tokenizer *tokenizer;
    assert_fails(tagc_tokenizer_create_bpe("/nowhere/vocab.json", "/nowhere/merges.txt", &tokenizer),
                 TAGC_ERR_IO, "/nowhere/vocab.json: cannot open");
    assert_null(tokenizer);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(equals_other_encoders),
        cmocka_unit_test(says_what_it_is),
        cmocka_unit_test(equals_the_rule_applied_naively),
        cmocka_unit_test(long_words_are_no_trap),
        cmocka_unit_test(random_bytes_and_safe_cuts),
        cmocka_unit_test(utf8_is_exact),
        cmocka_unit_test(names_files_that_it_does_not_take),
        cmocka_unit_test(refuses_bad_vocabularies),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
