/* The policy of names, against classes and reasons in policy.tsv that regular expressions gave: those of the names that the tests of Python
 * list, of models of transformers 5.23, and of made-up ones of the same words. Then what holds for any name, also a hostile one. */
#include "../test.h"
#include "tagc/policy.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define RANDOM_SEED 52
#include "../codec/random.h"

enum { MOST_DIMS = 8, LONGEST = 256, LONG = 10000, N_RANDOM = 20000 };

typedef struct row {
    char name[LONGEST], class_[16], reason[64];
    uint64_t shape[MOST_DIMS];
    size_t n_dims;
} row;

static const char *const class_names[TAGC_N_CLASSES] = {"compressed", "mild", "dense"};

static void read_shape(const char *text, row *r) {
    for (r->n_dims = 0; *text && *text != '-'; text += *text == 'x') {
        assert_true(r->n_dims < MOST_DIMS);
        r->shape[r->n_dims++] = strtoull(text, (char **)&text, 10);
    }
}

/* Calls `check` with each row; returns how many there are. */
static int for_all_rows(void (*check)(const row *)) {
    FILE *file = fopen(TAGC_TEST_DATA "/policy.tsv", "r");
    assert_non_null(file);
    char line[1024], shape[64];
    int n = 0;
    for (; fgets(line, sizeof line, file); n++) {
        row r;
        assert_int_equal(
            sscanf(line, "%255[^\t]\t%63[^\t]\t%15[^\t]\t%63[^\n]", r.name, shape, r.class_, r.reason), 4);
        read_shape(shape, &r);
        check(&r);
    }
    fclose(file);
    return n;
}

static void check_class(const char *name, const row *r) {
    tagc_class class_;
    const char *reason;
    assert_int_equal(tagc_classify(name, r->shape, r->n_dims, TAGC_CLASS_MIN_ELEMS, &class_, &reason),
                     TAGC_OK);
    if (strcmp(class_names[class_], r->class_) || strcmp(reason, r->reason))
        fail_msg("%s: %s, %s; expected %s, %s", name, class_names[class_], reason, r->class_, r->reason);
}

static void check_row(const row *r) {
    check_class(r->name, r);
}

TEST(known_names) {
    assert_true(for_all_rows(check_row) > 400);
}

/* Before each word, and behind the last. A name of wrappers' parts alone would have one of its own then. */
static void check_wrapped(const row *r) {
    static const char wrapper[] = "_fsdp_wrapped_module._checkpoint_wrapped_module._orig_mod";
    char wrapped[64 * LONGEST], clean[sizeof wrapped], expected[LONGEST];
    size_t n = (size_t)snprintf(wrapped, sizeof wrapped, "%s", wrapper);
    if (r->name[0] == '.' || strncmp(r->name, "_orig_mod", 9) == 0) return;
    for (const char *c = r->name; c; c = *c ? c + 1 : NULL) {
        size_t n_word = strcspn(c, ".");
        n += (size_t)snprintf(wrapped + n, sizeof wrapped - n, ".%.*s.%s", (int)n_word, c, wrapper);
        c += n_word;
    }
    check_class(wrapped, r);
    assert_int_equal(tagc_clean_name(wrapped, clean, strlen(wrapped) + 1), TAGC_OK);
    assert_int_equal(tagc_clean_name(r->name, expected, sizeof expected), TAGC_OK);
    assert_string_equal(clean, expected);
    assert_null(strstr(clean, "wrapped_module"));
}

TEST(wrappers_change_nothing) {
    for_all_rows(check_wrapped);
}

TEST(clean_names) {
    static const char *const cases[][2] = {
        {"a._orig_mod.weight", "a.weight"},
        {"_orig_mod.a", "a"},
        {"a._orig_mod", "a"},
        {"a..b.", "a..b."},
        {"..", ".."},
        {"_orig_mod..a", ".a"},
        {"_orig_mod", "_orig_mod"}, /* nothing would be left */
        {"_orig_mod._orig_mod", "_orig_mod._orig_mod"},
        {"._orig_mod", "._orig_mod"},
        {"_Orig_mod.a", "_Orig_mod.a"},
        {"module.a_orig_mod.b", "module.a_orig_mod.b"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char clean[64];
        assert_int_equal(tagc_clean_name(cases[i][0], clean, strlen(cases[i][0]) + 1), TAGC_OK);
        assert_string_equal(clean, cases[i][1]);
    }
}

static void require_refusal(tagc_status status, const char *words) {
    assert_int_equal(status, TAGC_ERR_ARGUMENT);
    if (!strstr(tagc_last_error(), words)) fail_msg("%s: %s", words, tagc_last_error());
}

TEST(what_is_refused) {
    const uint64_t large[] = {(uint64_t)1 << 32, (uint64_t)1 << 32}, empty[] = {UINT64_MAX, UINT64_MAX, 0};
    tagc_class class_;
    const char *reason;
    char clean[8];
    require_refusal(tagc_classify(NULL, large, 1, 0, &class_, &reason), "name is NULL");
    require_refusal(tagc_classify("", large, 1, 0, &class_, &reason), "name is empty");
    require_refusal(tagc_classify("a.b", NULL, 2, 0, &class_, &reason), "shape of a.b is NULL, n_dims is 2");
    require_refusal(tagc_classify("a.b", large, 2, 0, &class_, &reason),
                    "shape of a.b has 2^64 values or more");
    assert_int_equal(tagc_classify("a.b", empty, 3, 0, &class_, &reason), TAGC_OK);
    assert_string_equal(reason, "empty");
    assert_int_equal(tagc_classify("a.b", NULL, 0, 0, NULL, NULL), TAGC_OK);
    require_refusal(tagc_clean_name(NULL, clean, 8), "name is NULL");
    require_refusal(tagc_clean_name("", clean, 8), "name is empty");
    require_refusal(tagc_clean_name("a", NULL, 8), "clean has 0 bytes, must have at least 2 for a");
    require_refusal(tagc_clean_name("abcdefgh", clean, 8), "clean has 8 bytes, must have at least 9");
    assert_int_equal(tagc_clean_name("abcdefg", clean, 8), TAGC_OK);
}

/* Matrices below min_elems are dense, and nothing else depends on it. */
TEST(min_elems_is_a_choice) {
    const uint64_t shape[] = {2, 2};
    tagc_class class_;
    for (uint64_t min_elems = 0; min_elems < 9; min_elems++) {
        assert_int_equal(tagc_classify("mlp.fc1.weight", shape, 2, min_elems, &class_, NULL), TAGC_OK);
        assert_int_equal(class_, min_elems <= 4 ? TAGC_CLASS_COMPRESSED : TAGC_CLASS_DENSE);
    }
    assert_int_equal(tagc_classify("wpe", shape, 2, UINT64_MAX, &class_, NULL), TAGC_OK);
    assert_int_equal(class_, TAGC_CLASS_DENSE);
}

/* A piece of a name: a word of the rules, or any bytes. */
static size_t add_piece(char *to) {
    static const char *const pieces[] = {".",         ".",
                                         "_",         "0",
                                         "norm",      "ln",
                                         "bias",      "pos",
                                         "posit",     "wpe",
                                         "embed",     "head",
                                         "attn",      "mlp",
                                         "ff",        "expert",
                                         "fc",        "c_",
                                         "to_",       "q",
                                         "kv",        "query_key_value",
                                         "proj",      "out",
                                         "weight",    "gate",
                                         "router",    "w",
                                         "_orig_mod", "output",
                                         "dense"};
    size_t kind = random_below(sizeof pieces / sizeof *pieces + 2);
    if (kind < sizeof pieces / sizeof *pieces) return (size_t)sprintf(to, "%s", pieces[kind]);
    *to = (char)(1 + random_below(255));
    return 1;
}

/* In an array of exactly its length, so that a sanitizer sees what is read beyond it. */
static void check_any(const char *made, const uint64_t *shape, size_t n_dims) {
    size_t n_bytes = strlen(made) + 1;
    char *name = memcpy(malloc(n_bytes), made, n_bytes), *other = malloc(n_bytes);
    tagc_class class_, again;
    const char *reason, *reason_again;
    assert_int_equal(tagc_classify(name, shape, n_dims, 0, &class_, &reason), TAGC_OK);
    assert_true((unsigned)class_ < TAGC_N_CLASSES && reason && *reason);
    assert_int_equal(tagc_clean_name(name, other, n_bytes), TAGC_OK);
    assert_true(*other != 0);
    assert_int_equal(tagc_classify(other, shape, n_dims, 0, &again, &reason_again), TAGC_OK);
    assert_true(again == class_ && reason_again == reason);
    if (!strstr(name, "_orig_mod")) { /* whose letters are small */
        for (size_t i = 0; i < n_bytes; i++)
            other[i] = (char)(name[i] >= 'a' && name[i] <= 'z' ? name[i] - 32 : name[i]);
        assert_int_equal(tagc_classify(other, shape, n_dims, 0, &again, &reason_again), TAGC_OK);
        assert_true(again == class_ && reason_again == reason);
    }
    assert_int_equal(tagc_classify(name, shape, n_dims > 0, 0, &again, NULL), TAGC_OK);
    assert_int_equal(again, TAGC_CLASS_DENSE); /* a vector */
    free(name);
    free(other);
}

TEST(any_name) {
    static char name[LONG + 64];
    for (int trial = 0; trial < N_RANDOM; trial++) {
        random_begin(1, (uint64_t)trial);
        size_t n = 0, n_pieces = 1 + random_below(12), n_dims = random_below(4);
        uint64_t shape[3];
        for (size_t i = 0; i < n_dims; i++) shape[i] = 1 + random_below(100);
        for (size_t i = 0; i < n_pieces; i++) n += add_piece(name + n);
        check_any(name, shape, n_dims);
    }
}

TEST(long_names) {
    static char name[LONG + 64];
    static const char *const repeated[] = {"w",          ".",   "_",        "q_",    "a.",       "weight.",
                                           "_orig_mod.", "nor", "attentio", "posit", "\xc3\xa4", "\xff"};
    const uint64_t shape[] = {64, 64};
    for (size_t i = 0; i < sizeof repeated / sizeof *repeated; i++) {
        size_t n = 0;
        while (n < LONG) n += (size_t)sprintf(name + n, "%s", repeated[i]);
        check_any(name, shape, 2);
    }
    random_begin(2, 0);
    for (size_t n = 0; n < LONG;) n += add_piece(name + n);
    check_any(name, shape, 2);
}
