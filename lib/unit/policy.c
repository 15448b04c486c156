/* The policy of names: what of a model is compressed. Rules are patterns of one word of a name (a module, or the parameter itself), and the
 * order in which they are asked decides. They are data, so that a new name of somebody's layer is one word in a table here. */
#include "tagc/policy.h"
#include "core/status.h"

#include <string.h>

/* A part of a name between dots. */
typedef struct word {
    const char *text;
    size_t n;
} word;

/* ---- patterns ---- */

/* A pattern is a word in lower case, in which
 *     *  is anything, also nothing
 *     #  is a digit
 *     ^  is an underscore, or the beginning or the end of the word
 * A table of patterns ends with NULL and matches what one of them matches. */
typedef const char *const patterns[];

static char lower(char c) {
    return (char)(c >= 'A' && c <= 'Z' ? c + ('a' - 'A') : c);
}

static int is_digit(char c) {
    return c >= '0' && c <= '9';
}

/* Whether *p, which is no star, takes what stands at `at`; *n_taken becomes the number of bytes that it takes. */
static int takes(char p, word w, size_t at, size_t *n_taken) {
    *n_taken = 1;
    if (p == '^' && !(at < w.n && w.text[at] == '_')) {
        *n_taken = 0;
        return at == 0 || at == w.n;
    }
    if (at == w.n) return 0;
    return p == '^' || (p == '#' ? is_digit(w.text[at]) : lower(w.text[at]) == p);
}

/* The earliest match of what stands between two stars leaves the most for the rest, so only the last star ever takes more. */
static int matches(const char *p, word w) {
    const char *after_star = NULL;
    size_t at = 0, star_end = 0, n_taken;
    for (;;) {
        if (*p == '*') {
            after_star = ++p;
            star_end = at;
        } else if (*p == 0 && at == w.n) {
            return 1;
        } else if (*p != 0 && takes(*p, w, at, &n_taken)) {
            p++;
            at += n_taken;
        } else if (after_star && star_end < w.n) {
            p = after_star;
            at = ++star_end;
        } else {
            return 0;
        }
    }
}

static int is_one_of(patterns table, word w) {
    for (; *table; table++)
        if (matches(*table, w)) return 1;
    return 0;
}

/* ---- the rules ---- */

/* A parameter of such a name is called as its module. */
static patterns weights = {"weight",   "weight_g",  "weight_v",         "kernel",
                           "original", "original#", "parametrizations", NULL};
static patterns norms = {"*norm*", "ln^*", "ln#*", "*_ln", NULL};
/* The decay of a state space has one value per channel and state, like a bias. */
static patterns biases = {"*bias", "a_log", NULL};
static patterns positions = {"*^pe^*", "*^wpe^*", "*^pos^*", "*^relpos^*", "*^posit*", "*position*", NULL};
static patterns embeddings = {"wte", "*embed*", "tok_emb*", "shared", "emb", NULL};
static patterns heads = {"head", "lmhead", "lm_head", "embed_out", "lm_head_proj", "vocab_proj", NULL};
static patterns attention = {"*attn*", "*attention*", "mha", NULL};
static patterns feed_forward = {
    "*mlp*",   "ff^*",     "ffn^*", "ffs^*", "ffns^*",           "*feedforward*", "*feed_forward*",
    "*expert", "*experts", "moe",   "*_moe", "*densereludense*", "intermediate",  NULL};
/* Each also with a w behind it, as llm.c has them. */
static patterns feed_forward_matrices = {
    "fc",        "fc#",          "cfc",           "c_fc",          "fc_in",     "fc_out",
    "fcproj",    "fc_proj",      "lin1",          "lin2",          "lin_1",     "lin_2",
    "linear1",   "linear2",      "linear_1",      "linear_2",      "w1",        "w2",
    "w3",        "wi",           "wi_0",          "wi_1",          "gate_proj", "up_proj",
    "down_proj", "gate_up_proj", "dense_h_to_4h", "dense_4h_to_h", NULL};
static patterns projections = {"o",       "wo",       "w_o",      "oproj",     "o_proj",
                               "out",     "output",   "outproj",  "out_proj",  "to_out",
                               "out_lin", "c_proj",   "proj",     "dense",     "linear_out",
                               "attproj", "att_proj", "attprojw", "att_projw", NULL};
/* Of queries, keys and values at once. */
static patterns mixed_inputs = {"c_attn", "in_proj", "in_proj_weight", NULL};
static patterns attention_names = {"c_attn", "attn_qkv", "q_attn", "in_proj_weight", NULL};
static patterns routers = {"router", NULL};

/* Queries, keys and values. Inside attention any word that has one of these names is one; elsewhere the whole word has to be one. */
static patterns inputs = {"q",     "k",   "v",     "qk",      "kv",   "qv",     "qkv",
                          "query", "key", "value", "queries", "keys", "values", "query_key_value",
                          NULL};
static patterns uses_of_inputs = {"_proj", "_lin", "_a_proj", "_a_lin", "_b_proj", "_b_lin", NULL};

/* Takes `text` off the front of a word, if it is there. */
static int skip(word *w, const char *text) {
    size_t n = strlen(text);
    if (n > w->n) return 0;
    for (size_t i = 0; i < n; i++)
        if (lower(w->text[i]) != text[i]) return 0;
    w->text += n;
    w->n -= n;
    return 1;
}

/* As q, wq, to_q, q_proj, query_states, kv2 or qkvw, from the beginning or an underscore on. */
static int has_input(word w) {
    for (size_t at = 0; at < w.n; at++) {
        if (at > 0 && w.text[at - 1] != '_') continue;
        word from = {w.text + at, w.n - at};
        if (!skip(&from, "w") && !skip(&from, "to")) skip(&from, "c");
        for (size_t i = 0; inputs[i]; i++) {
            word rest = from;
            if (!skip(&rest, inputs[i])) continue;
            if (rest.n == 0 || rest.text[0] == '_' || is_digit(rest.text[0])) return 1;
            if (rest.n == 1 && lower(rest.text[0]) == 'w') return 1;
        }
    }
    return 0;
}

/* As q, wq, w_q, c_q, to_q, q_proj, kv_b_proj, q_lin_weight or qkvw. */
static int is_input(word w) {
    if (skip(&w, "w"))
        skip(&w, "_");
    else if (!skip(&w, "c_"))
        skip(&w, "to_");
    for (size_t i = 0; inputs[i]; i++) {
        word rest = w;
        if (!skip(&rest, inputs[i])) continue;
        for (size_t k = 0; uses_of_inputs[k] && !skip(&rest, uses_of_inputs[k]); k++) continue;
        skip(&rest, "_weight");
        skip(&rest, "w");
        if (rest.n == 0) return 1;
    }
    return 0;
}

/* ---- words of a name ---- */

/* Those that have not been taken, which is done from the innermost outwards. */
typedef struct words {
    const char *name;
    size_t n_bytes;
    int are_over, keep_wrappers;
} words;

static int is_wrapper(word w) {
    static const char *const wrappers[] = {"_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod"};
    for (size_t i = 0; i < sizeof wrappers / sizeof *wrappers; i++)
        if (strlen(wrappers[i]) == w.n && memcmp(wrappers[i], w.text, w.n) == 0) return 1;
    return 0;
}

/* Returns 0, and an empty word, if all have been taken. */
static int take(words *from, word *w) {
    while (!from->are_over) {
        size_t start = from->n_bytes;
        while (start > 0 && from->name[start - 1] != '.') start--;
        *w = (word){from->name + start, from->n_bytes - start};
        from->are_over = start == 0;
        from->n_bytes = start > 0 ? start - 1 : 0;
        if (from->keep_wrappers || !is_wrapper(*w)) return 1;
    }
    *w = (word){"", 0};
    return 0;
}

static words words_of(const char *name) {
    words all = {.name = name, .n_bytes = strlen(name)}, without = all;
    size_t n_words = 0, n_bytes = 0;
    for (word w; take(&without, &w); n_words++) n_bytes += w.n;
    all.keep_wrappers = n_words < 2 && n_bytes == 0; /* nothing would be left */
    return all;
}

static int is_number(word w) {
    for (size_t i = 0; i < w.n; i++)
        if (!is_digit(w.text[i])) return 0;
    return w.n > 0;
}

static int have(words all, patterns table) {
    for (word w; take(&all, &w);)
        if (is_one_of(table, w)) return 1;
    return 0;
}

static int have_a_number(words all) {
    for (word w; take(&all, &w);)
        if (is_number(w)) return 1;
    return 0;
}

/* ---- the decision ---- */

typedef struct verdict {
    tagc_class class_;
    const char *reason;
} verdict;

/* The table that names the innermost module that is known, or NULL. */
static const char *const *place_of(words modules) {
    for (word w; take(&modules, &w);) {
        if (is_one_of(feed_forward, w)) return feed_forward;
        if (is_one_of(attention, w)) return attention;
    }
    return NULL;
}

/* Of a matrix: by its modules, the innermost first, then by its own name. */
static verdict by_place(words modules, word owner, size_t n_dims) {
    const char *const *place = place_of(modules);
    word inner;
    take(&modules, &inner);
    if (place == attention) {
        if (is_one_of(mixed_inputs, owner) || has_input(owner))
            return (verdict){TAGC_CLASS_MILD, "attention"};
        if (is_one_of(projections, owner) || (is_number(owner) && is_one_of(projections, inner)))
            return (verdict){TAGC_CLASS_COMPRESSED, "attention projection"};
        return (verdict){TAGC_CLASS_MILD, "attention, unknown use"};
    }
    word without_w = owner;
    if (owner.n > 0 && lower(owner.text[owner.n - 1]) == 'w') without_w.n--;
    if (place == feed_forward || is_one_of(feed_forward, owner) || is_one_of(feed_forward_matrices, owner) ||
        is_one_of(feed_forward_matrices, without_w) || (matches("dense", owner) && matches("output", inner)))
        return (verdict){TAGC_CLASS_COMPRESSED, "feed-forward"};
    if (is_one_of(attention_names, owner) || is_input(owner)) return (verdict){TAGC_CLASS_MILD, "attention"};
    if (is_one_of(projections, owner) && matches("att*", owner))
        return (verdict){TAGC_CLASS_COMPRESSED, "attention projection"};
    return (verdict){TAGC_CLASS_COMPRESSED, n_dims == 2 ? "unknown matrix" : "unknown, 3+ dimensions"};
}

static verdict by_name(const char *name, const uint64_t *shape, size_t n_dims, int is_small) {
    words modules = words_of(name);
    word owner; /* the name of its module, or its own name if that is more specific */
    take(&modules, &owner);
    while (!modules.are_over && is_one_of(weights, owner)) {
        word module;
        if (take(&modules, &module)) owner = module;
    }
    size_t n_long = 0;
    for (size_t i = 0; i < n_dims; i++) n_long += shape[i] > 1;
    if (is_one_of(norms, owner)) return (verdict){TAGC_CLASS_DENSE, "norm"};
    if (is_one_of(biases, owner)) return (verdict){TAGC_CLASS_DENSE, "bias"};
    if (n_long < 2) return (verdict){TAGC_CLASS_DENSE, "vector"};
    /* A feed-forward gate has at least as many rows as columns; a router has one row per expert. */
    if (is_one_of(routers, owner) || have(modules, routers) ||
        (matches("gate", owner) && shape[0] <= shape[n_dims - 1] / 4))
        return (verdict){TAGC_CLASS_DENSE, "router"};
    if (is_small) return (verdict){TAGC_CLASS_DENSE, "small matrix"};
    if (is_one_of(positions, owner)) return (verdict){TAGC_CLASS_MILD, "positions"};
    if (is_one_of(heads, owner) || (matches("output", owner) && !have_a_number(modules)))
        return (verdict){TAGC_CLASS_COMPRESSED, "head"};
    if (is_one_of(embeddings, owner)) return (verdict){TAGC_CLASS_COMPRESSED, "embedding"};
    return by_place(modules, owner, n_dims);
}

/* ---- what callers call ---- */

static tagc_status check_name(const char *name) {
    if (name && *name) return TAGC_OK;
    return tagc_fail(TAGC_ERR_ARGUMENT, "name is %s, must have at least one byte", name ? "empty" : "NULL");
}

static tagc_status count(const char *name, const uint64_t *shape, size_t n_dims, uint64_t *n_elems) {
    if (n_dims > 0 && !shape)
        return tagc_fail(TAGC_ERR_ARGUMENT, "shape of %.200s is NULL, n_dims is %zu", name, n_dims);
    *n_elems = 1;
    for (size_t i = 0; i < n_dims; i++)
        if (shape[i] == 0) *n_elems = 0;
    for (size_t i = 0; i<n_dims && * n_elems> 0; i++) {
        if (*n_elems > UINT64_MAX / shape[i])
            return tagc_fail(TAGC_ERR_ARGUMENT, "shape of %.200s has 2^64 values or more", name);
        *n_elems *= shape[i];
    }
    return TAGC_OK;
}

tagc_status tagc_classify(const char *name, const uint64_t *shape, size_t n_dims, uint64_t min_elems,
                          tagc_class *class_, const char **reason) {
    uint64_t n_elems = 0;
    TAGC_TRY(check_name(name));
    TAGC_TRY(count(name, shape, n_dims, &n_elems));
    verdict found = {TAGC_CLASS_DENSE, "empty"};
    if (n_elems > 0) found = by_name(name, shape, n_dims, n_elems < min_elems);
    if (class_) *class_ = found.class_;
    if (reason) *reason = found.reason;
    return TAGC_OK;
}

tagc_status tagc_clean_name(const char *name, char *clean, size_t n_bytes) {
    TAGC_TRY(check_name(name));
    if (!clean || n_bytes <= strlen(name))
        return tagc_fail(TAGC_ERR_ARGUMENT, "clean has %zu bytes, must have at least %zu for %.200s",
                         clean ? n_bytes : 0, strlen(name) + 1, name);
    int keep_wrappers = words_of(name).keep_wrappers;
    size_t n_kept = 0;
    char *end = clean;
    for (const char *rest = name; rest; rest = *rest ? rest + 1 : NULL) {
        word w = {rest, strcspn(rest, ".")};
        rest += w.n;
        if (!keep_wrappers && is_wrapper(w)) continue;
        if (n_kept++ > 0) *end++ = '.';
        memcpy(end, w.text, w.n);
        end += w.n;
    }
    *end = 0;
    return TAGC_OK;
}
